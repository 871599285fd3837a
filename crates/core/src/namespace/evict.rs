//! Making room on the tiers, and emptying them at the end.
//!
//! Invariant: an eviction only drops a copy whose version the store has. The exceptions are temporaries that no process
//! has open: their rule lets them go when the last command has ended.
//!
//! The dangers that this avoids:
//! - a tier drops the only copy of a file;
//! - an eviction frees no space because a process still reads the plain file.

use super::events::without_figures;
use crate::report::run::EventKind;
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use surgetank_policy::config::KeepAtExit;
use surgetank_policy::placement::{self, Candidate, Reason, Skip};
use surgetank_tier::Remains;
use surgetank_types::error::Result;
use surgetank_types::model::{DeviceId, FileId, Mode};

use super::Namespace;
use super::content::Location;
use surgetank_state::{Place, PlainId, Tree};

/// Room is kept free for this many polls of the direct writers, at the rate of the last poll.
const LOOKS_AHEAD: u64 = 4;
pub(crate) const THE_END: &str = "the last run over this directory ended";
/// The pause before another look at temporaries that could not go yet.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);
const LOOK_AGAIN_MAX: std::time::Duration = std::time::Duration::from_secs(5);
/// An eviction for a new file frees at least this share of the device.
const EVICT_SHARE: u64 = 16;

/// The bytes that a direct writer wrote between the last two polls.
#[derive(Debug, Default, Clone, Copy)]
struct Growth {
    bytes: u64,
    /// The bytes that were reserved for it at that time.
    reserved_bytes: u64,
}

impl Growth {
    /// The bytes that it may write until the next poll, beyond its reservation. While the file keeps to its expected
    /// size, one poll ahead is enough. With more, a file of a known size evicted four times its size.
    fn ahead_bytes(self) -> u64 {
        match self.reserved_bytes.checked_sub(self.bytes) {
            Some(left_bytes) => self.bytes.saturating_sub(left_bytes),
            None => self.bytes.saturating_mul(LOOKS_AHEAD),
        }
    }
}

impl Namespace {
    /// Frees at least this many bytes on a device, if enough files may go. Returns the bytes freed.
    pub(crate) fn make_room(&self, device: DeviceId, want_bytes: u64) -> u64 {
        let freed = self.evict_from(device, want_bytes);
        if freed >= want_bytes {
            return freed;
        }
        freed + self.squeeze_arrivals(device) + self.drop_waiting_on(Some(device))
    }

    /// The same, of files that no process has open.
    pub(crate) fn evict_from(&self, device: DeviceId, want_bytes: u64) -> u64 {
        let candidates: Vec<Candidate> = {
            let tree = self.read_tree();
            tree.iter()
                .filter(|(_, inode)| inode.replica.is_some_and(|plain| plain.device == device))
                .map(|(id, inode)| {
                    let decision = tree.logical_path(id).map(|path| self.decided(&tree, id, &path));
                    Candidate {
                        id,
                        bytes: inode.charged_bytes,
                        durable: inode.sealed && !inode.dirty() && inode.publish.is_none(),
                        pinned: inode.pinned || decision.as_ref().is_some_and(|decision| decision.pin),
                        open: inode.handles > 0 || !inode.sealed,
                        next_read: decision.as_ref().and_then(|decision| decision.next_read),
                        mode: decision.map_or(Mode::Copy, |decision| decision.mode),
                        // The workflow that made a temporary may read it again: it goes at the end, not before.
                        droppable: false,
                        prefetched: inode.prefetched,
                        reads: inode.reads,
                        idle: inode.used.map_or_else(|| self.uptime(), |at| at.elapsed()),
                    }
                })
                .collect()
        };
        let mut freed = 0;
        for (id, reason) in placement::victims(candidates.into_iter(), want_bytes) {
            // The caller may already hold an inode's lock or a gate.
            if let Some(_inode) = self.try_lock_inode(id) {
                freed += self.evict_locked(id, &reason.to_string(), false);
            }
        }
        freed
    }

    /// Makes room on the tiers that a choice passed over because they are full, as far as the store has their files.
    /// Frees more than the request needs, because each search for victims walks over all files.
    pub(crate) fn make_room_where_full(&self, reason: &Reason) -> bool {
        let (Reason::Tier { skipped, .. } | Reason::Store { skipped }) = reason;
        let mut freed = 0;
        for (tier, skip) in skipped {
            let Skip::NoRoom { wanted_bytes, .. } = skip else {
                continue;
            };
            for device in self.tiers.devices().filter(|device| *device.tier_name() == **tier) {
                let view = device.view();
                let clean_bytes = view.used_bytes.saturating_sub(self.dirty_bytes_of(device));
                if view.healthy && clean_bytes > 0 {
                    freed += self.make_room(device.id(), (*wanted_bytes).max(view.cap_bytes / EVICT_SHARE));
                }
            }
        }
        freed > 0
    }

    /// Drops the tier's copy of a durable file. Returns the bytes freed; 0 if the copy must stay.
    pub fn evict(&self, id: FileId, reason: &str) -> Result<u64> {
        let _inode = self.lock_inode(id);
        Ok(self.evict_locked(id, reason, false))
    }

    /// Pinned by the user (`surgetank pin`), a rule or a hint.
    pub(crate) fn pinned(&self, tree: &Tree, id: FileId) -> bool {
        tree.get(id).is_some_and(|inode| inode.pinned)
            || tree.logical_path(id).is_some_and(|path| self.decided(tree, id, &path).pin)
    }

    /// The caller holds the inode's lock.
    pub(crate) fn evict_locked(&self, id: FileId, reason: &str, even_pinned: bool) -> u64 {
        let mut tree = self.write_tree();
        let Some(inode) = tree.get(id) else {
            return 0;
        };
        let Some(replica) = inode.replica else {
            return 0;
        };
        let device = replica.device;
        let evictable = inode.sealed && !inode.dirty() && inode.publish.is_none() && inode.applied.is_some();
        let held = !even_pinned && self.pinned(&tree, id);
        if !evictable || held || self.opens().contains_key(&id) {
            return 0;
        }
        let path = tree.logical_path(id);
        // With `even_pinned`, at the agent's end for instance, only the name goes: readers keep the bytes.
        if !even_pinned && self.somebody_reads(&tree, id, device, path.as_deref()) {
            return 0;
        }
        let place = self.tiers.device(device).tier_name();
        // The final eviction of everything is not an event.
        if reason != THE_END {
            self.events.count(EventKind::Evicted, place, &without_figures(reason), inode.charged_bytes);
        }
        let reason = tree.reason(reason);
        if let Some(inode) = tree.get_mut(id) {
            inode.placed = Some(reason);
        }
        tree.txn.file(id);
        let remains = self.drop_copy(&mut tree, id, replica, path);
        drop(tree);
        remains.bytes()
    }

    /// Another client has changed or removed the store's file of which the agent has a copy. The copy goes, and so does
    /// the name, which the next look-up resolves again. A process that has the file open keeps its content. `false`:
    /// the file is in use.
    pub(super) fn disown_copy(&self, tree: &mut Tree, id: FileId) -> bool {
        let Some(_inode) = self.try_lock_inode(id) else { return false };
        let Some(inode) = tree.get_mut(id).filter(|inode| inode.is_copy()) else { return false };
        let replica = inode.replica;
        let Some((dir, name)) = inode.logical.clone() else { return false };
        if inode.handles > 0 || self.opens().contains_key(&id) {
            return false;
        }
        // A queued operation may have caused the change. And the agent does not see other clients' changes in its own
        // directory.
        if tree.is_queued(id) || tree.dir(dir).is_none_or(|dir| dir.complete) {
            return false;
        }
        tracing::info!(id = id.0, "changed in the store by another client");
        let path = tree.logical_path(id);
        if let Some(inode) = tree.get_mut(id) {
            inode.owned = false;
            inode.logical = None;
            inode.applied = None;
        }
        tree.bind(dir, &name, |entry| *entry = surgetank_state::Entry::default());
        self.commit_apart(tree, |tree| {
            tree.txn.dropped(id);
            tree.txn.entry(dir, &name);
            if let Some(replica) = replica {
                drop(self.drop_copy(tree, id, replica, path));
            }
        });
        self.show(tree, id);
        if tree.get(id).is_some_and(|inode| inode.lookups == 0) {
            tree.forget_mirror(id);
        }
        true
    }

    /// Removes the plain file after the catalog has the record of it.
    fn drop_copy(&self, tree: &mut Tree, id: FileId, replica: PlainId, path: Option<Vec<u8>>) -> Remains<'_> {
        tree.txn.gone(Some(replica));
        let shown_perm = self.perm_to_leave(tree, id);
        let charged = tree.drop_replica(id).map_or(0, |(_, charged)| charged);
        crash_point!("evict.begun");
        self.commit(tree);
        crash_point!("evict.written_down");
        let device = self.tiers.device(replica.device);
        let remains = device.hold(path.as_deref(), charged);
        if let Some(path) = path
            && let Err(why) = device.unlink_with(&path, shown_perm)
        {
            self.device_failed(device.id(), &why);
        }
        device.counters().evictions.fetch_add(1, Ordering::Relaxed);
        device.counters().evicted_bytes.fetch_add(charged, Ordering::Relaxed);
        remains
    }

    /// Does a process with the shim have the plain file open? Such processes open it without a request. An open copy
    /// stays, because its removal frees no space, and because the process could not identify its file any more. The
    /// index hides the file first, so that no process can open it after the look.
    pub(super) fn somebody_reads(&self, tree: &Tree, id: FileId, device: DeviceId, path: Option<&[u8]>) -> bool {
        let (Some(shim), Some(path)) = (self.shim.get(), path) else {
            return false;
        };
        shim.conceal(id);
        let device = self.tiers.device(device);
        let busy = match device.open(path, false) {
            Ok(file) => device.leases() && !super::files::nobody_has(&file),
            Err(_) => false,
        };
        if busy {
            self.show(tree, id);
        }
        busy
    }

    /// Charges the bytes that direct writers wrote since the last poll. Keeps free the room that they would fill within
    /// the next polls: first by eviction, then with the device's ballast. After that the process gets ENOSPC, as it
    /// would without Surgetank.
    pub(crate) fn watch_direct_writers(&self) {
        let writers: Vec<_> = self.opens().values().filter(|open| open.directly_written()).cloned().collect();
        for device in self.tiers.devices() {
            let mut any = false;
            let mut grown_bytes = 0;
            let mut ahead_bytes = 0u64;
            for open in &writers {
                let content = open.content();
                if content.location == Location::Tier(device.id()) {
                    any = true;
                    // A thread that holds the lock, perhaps to seal the file, also corrects its charge.
                    if let Some(_inode) = self.try_lock_inode(open.id)
                        && open.directly_written()
                        && self.open_of(open.id).is_some_and(|now| Arc::ptr_eq(&now, open))
                    {
                        let grown = self.charge_growth(open, &content.file, device);
                        grown_bytes += grown.bytes;
                        ahead_bytes = ahead_bytes.saturating_add(grown.ahead_bytes());
                    }
                }
            }
            device.want_ballast(any);
            let free_bytes = device.free_bytes();
            if free_bytes < ahead_bytes
                && self.make_room(device.id(), ahead_bytes - free_bytes) == 0
                && free_bytes < grown_bytes
            {
                device.release_ballast();
            }
            // Other programs fill the device, or its cap was lowered: evict what may go.
            let excess_bytes = device.excess_bytes();
            if excess_bytes > 0 {
                self.make_room(device.id(), excess_bytes);
            }
        }
    }

    /// Moves the bytes that a direct writer wrote from reserved to used.
    fn charge_growth(
        &self,
        open: &super::content::Open,
        file: &std::fs::File,
        device: &surgetank_tier::Device,
    ) -> Growth {
        let Ok(stat) = rustix::fs::fstat(file) else {
            return Growth::default();
        };
        let now = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        let grown = now.saturating_sub(open.charged_bytes.load(Ordering::Relaxed));
        let reserved = open.reserved_bytes.load(Ordering::Relaxed);
        if grown > 0 {
            device.add_used(i64::try_from(grown).unwrap_or(i64::MAX));
            open.charged_bytes.store(now, Ordering::Relaxed);
            let spent = reserved.min(grown);
            device.unreserve(spent);
            open.reserved_bytes.fetch_sub(spent, Ordering::Relaxed);
        }
        Growth { bytes: grown, reserved_bytes: reserved }
    }

    /// The last command over this directory has ended. Until `end_emptying`, durable files leave the tiers at once,
    /// while the drain writes the rest. (Giving memory back takes a quarter of a second for each gigabyte. This way no
    /// user waits for it.) The caller does not run this and `end_emptying` at the same time. Returns the number of this
    /// turn, for `empty_tiers`; `None` if a turn has already begun.
    pub fn begin_emptying(&self) -> Option<u32> {
        let before = self.emptyings.load(Ordering::Relaxed);
        let begins = before.is_multiple_of(2);
        begins.then(|| {
            self.emptyings.store(before.wrapping_add(1), Ordering::Relaxed);
            before.wrapping_add(1)
        })
    }

    /// A user has arrived.
    pub fn end_emptying(&self) {
        if self.is_emptying() {
            self.emptyings.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_emptying(&self) -> bool {
        !self.emptyings.load(Ordering::Relaxed).is_multiple_of(2)
    }

    /// Evicts the files that are durable already, while this turn lasts. Several threads do it; each takes the files of
    /// its `share` of `of`.
    pub fn empty_tiers(&self, turn: u32, (share, of): (usize, usize)) {
        for id in self.replicas() {
            if id.0 as usize % of != share {
                continue;
            }
            if self.emptyings.load(Ordering::Relaxed) != turn {
                return;
            }
            let _inode = self.lock_inode(id);
            self.evict_locked(id, THE_END, false);
        }
    }

    /// Drops temporaries, while this turn lasts, as soon as no process is left that could read them. The last process
    /// may be dying, and its files may count as open for a moment: so the loop looks again.
    pub fn drop_temporaries(&self, turn: u32, nobody_inside: impl Fn() -> bool) {
        let lasts = || self.emptyings.load(Ordering::Relaxed) == turn;
        let mut pause = LOOK_AGAIN;
        let mut open = None;
        while lasts() {
            if nobody_inside() {
                let mut ids = open.unwrap_or_else(|| self.replicas());
                ids.retain(|id| lasts() && self.drop_at_the_end(*id));
                if ids.is_empty() {
                    return;
                }
                open = Some(ids);
            }
            surgetank_types::sync::thread::sleep(pause);
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }

    /// Returns whether the file is a temporary that is still open.
    fn drop_at_the_end(&self, id: FileId) -> bool {
        if let Some((dir, name)) = self.drop_temporary(id, false) {
            // A later run may create the name again.
            if let Some(door) = self.door.get() {
                door.invalidate_name(dir, &name);
            }
            return false;
        }
        let tree = self.read_tree();
        let mode = tree.logical_path(id).map(|path| self.mode_for(&tree, id, &path));
        mode == Some(Mode::Remove) && self.opens().contains_key(&id)
    }

    fn replicas(&self) -> Vec<FileId> {
        self.read_tree().iter().filter(|(_, inode)| inode.replica.is_some()).map(|(id, _)| id).collect()
    }

    /// The end of the agent: every durable file leaves the tiers, and temporaries are dropped. When the agent has no
    /// file left that only it has, the catalog starts over. Returns whether everything is in the store.
    pub fn finish(&self) -> bool {
        self.end_promises(std::time::Duration::ZERO);
        self.drop_waiting_on(None);
        for id in self.replicas() {
            self.drop_temporary(id, true);
            // A pin lasts as long as an agent runs here: without one, the copy would only grow stale.
            let _inode = self.lock_inode(id);
            self.evict_locked(id, THE_END, true);
        }
        let (left, queued) = {
            let tree = self.read_tree();
            let left = tree.iter().any(|(_, inode)| inode.replica.is_some() || inode.spill().is_some());
            (left, !tree.ops.is_empty())
        };
        let is_over = !left && !queued;
        // Losses are reported until they are acknowledged.
        if !is_over || self.has_losses() {
            // The files may wait long: until the store is back, or for the next run.
            self.sync_closed(true);
            self.end_hints();
            self.forget_what_the_store_has();
        } else {
            if let Err(why) = self.catalog.clear() {
                tracing::warn!(%why, "the catalog could not be cleared");
            }
            super::recover::Recovery::new(self).write_down_doubt();
        }
        if !is_over {
            return false;
        }
        for device in self.tiers.devices() {
            if let Err(why) = device.sweep() {
                tracing::warn!(%why, device = %device.path().display(), "a tier could not be swept");
            }
        }
        true
    }

    /// Drops a `remove` file. At the agent's end (`ends`) this includes files with several names, and `keep` files with
    /// `--keep-at-exit=drop`, which the verdict names first. Returns the name that is now free.
    fn drop_temporary(&self, id: FileId, ends: bool) -> Option<Place> {
        let _inode = self.lock_inode(id);
        let mut tree = self.write_tree();
        let path = tree.logical_path(id)?;
        let mode = self.mode_for(&tree, id, &path);
        let droppable =
            mode == Mode::Remove || (ends && mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drop);
        let inode = tree.get(id)?;
        let wanted = inode.publish.is_some() || inode.applied.is_some();
        let several = inode.extra.as_ref().is_some_and(|extra| !extra.more_names.is_empty());
        if !droppable || !inode.dirty() || wanted || (several && !ends) || self.opens().contains_key(&id) {
            return None;
        }
        let (at, replica) = (inode.logical.clone(), inode.replica);
        tree.txn.gone(replica);
        let dropped = tree.drop_replica(id);
        tree.txn.file(id);
        if let Some((dir, name)) = &at {
            tree.bind(*dir, name, |entry| entry.set_logical(None));
            tree.txn.entry(*dir, name);
        }
        if let Some(inode) = tree.get_mut(id) {
            inode.logical = None;
        }
        self.commit(&mut tree);
        let remains = dropped.map(|(device, charged)| {
            let device = self.tiers.device(device);
            let remains = device.hold(Some(&path), charged);
            if let Err(why) = device.unlink(&path) {
                self.device_failed(device.id(), &why);
            }
            remains
        });
        drop(tree);
        drop(remains);
        at
    }
}
