//! Making room on the tiers, and emptying them at the end.
//!
//! Invariant: an eviction only drops a copy whose version the store has. The exceptions are temporaries that no process
//! has open: their rule lets them go when the last command has ended.
//!
//! The dangers that this avoids:
//! - a tier drops the only copy of a file;
//! - an eviction frees no space because a process still reads the plain file.

use std::time::Instant;

use surgetank_policy::placement;
use surgetank_policy::placement::{Candidate, Reason, Skip};
use surgetank_state::{PlainId, Tree};
use surgetank_tier::{Remains, Tiers};
use surgetank_types::error::Result;
use surgetank_types::model::{DeviceId, FileId, Mode};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::Base;
use crate::base::events::{Events, without_figures};
use crate::content::Location;
use crate::content::fetch::Fetch;
use crate::files::waiting::Waiting;
use crate::metadata::Metadata;
use crate::report::run::EventKind;

pub(crate) const THE_END: &str = "the last run over this directory ended";
/// Room is kept free for this many polls of the direct writers, at the rate of the last poll.
const LOOKS_AHEAD: u64 = 4;
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

/// Plain files that leave a tier because another one needs the room.
pub struct Eviction {
    events: Arc<Events>,
    started: Instant,
    pub(super) tiers: Arc<Tiers>,
    pub(super) metadata: Arc<Metadata>,
    /// Copies on tiers of files that processes read from the store, while they have them open.
    pub(super) waiting_copies: Waiting,
}

impl Eviction {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self {
            events: base.events.clone(),
            started: base.started,
            tiers: base.tiers.clone(),
            metadata: metadata.clone(),
            waiting_copies: Waiting::default(),
        }
    }

    /// Frees at least this many bytes on a device, if enough files may go. Returns the bytes freed.
    pub(crate) fn make_room(&self, device: DeviceId, want_bytes: u64) -> u64 {
        let freed = self.evict_from(device, want_bytes);
        if freed >= want_bytes {
            return freed;
        }
        freed + self.squeeze_fetches(device) + self.drop_waiting_on(Some(device))
    }

    /// The same, of files that no process has open.
    pub(crate) fn evict_from(&self, device: DeviceId, want_bytes: u64) -> u64 {
        let candidates: Vec<Candidate> = {
            let tree = self.metadata.read_tree();
            tree.clean_files(device)
                // The rules are asked only about files that could leave.
                .filter(|(_, inode)| inode.publish.is_none() && inode.handles == 0)
                .map(|(id, inode)| {
                    let decision = tree.logical_path(id).map(|path| self.metadata.decided(&tree, id, &path));
                    Candidate {
                        id,
                        bytes: inode.charged_bytes,
                        durable: true,
                        pinned: inode.pinned || decision.as_ref().is_some_and(|decision| decision.pin),
                        open: false,
                        next_read: decision.as_ref().and_then(|decision| decision.next_read),
                        mode: decision.map_or(Mode::Copy, |decision| decision.mode),
                        // The workflow that made a temporary may read it again: it goes at the end, not before.
                        droppable: false,
                        prefetched: inode.prefetched,
                        reads: inode.reads,
                        idle: inode.used.map_or_else(|| self.started.elapsed(), |at| at.elapsed()),
                    }
                })
                .collect()
        };
        let mut freed = 0;
        for (id, reason) in placement::victims(candidates.into_iter(), want_bytes) {
            // The caller may already hold an inode's lock or a gate.
            if let Some(_inode) = self.metadata.try_lock_inode(id) {
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
                let clean_bytes = view.used_bytes.saturating_sub(self.metadata.dirty_bytes_of(device));
                if view.healthy && clean_bytes > 0 {
                    freed += self.make_room(device.id(), (*wanted_bytes).max(view.cap_bytes / EVICT_SHARE));
                }
            }
        }
        freed > 0
    }

    /// Drops the tier's copy of a durable file. Returns the bytes freed; 0 if the copy must stay.
    pub fn evict(&self, id: FileId, reason: &str) -> Result<u64> {
        let _inode = self.metadata.lock_inode(id);
        Ok(self.evict_locked(id, reason, false))
    }

    /// Pinned by the user (`surgetank pin`), a rule or a hint.
    pub(crate) fn pinned(&self, tree: &Tree, id: FileId) -> bool {
        tree.get(id).is_some_and(|inode| inode.pinned)
            || tree.logical_path(id).is_some_and(|path| self.metadata.decided(tree, id, &path).pin)
    }

    /// The caller holds the inode's lock.
    pub(crate) fn evict_locked(&self, id: FileId, reason: &str, even_pinned: bool) -> u64 {
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get(id) else {
            return 0;
        };
        let Some(replica) = inode.replica else {
            return 0;
        };
        let device = replica.device;
        let evictable = inode.sealed && !inode.dirty() && inode.publish.is_none() && inode.applied.is_some();
        // (Without its plain file nothing would say which member has the content.)
        let held = !even_pinned && (inode.home().is_some() || self.pinned(&tree, id));
        if !evictable || held || self.metadata.opens().contains_key(&id) {
            return 0;
        }
        let path = tree.logical_path(id);
        // With `even_pinned`, at the agent's end for instance, only the name goes: readers keep the bytes.
        if !even_pinned && self.has_readers(&tree, id, device, path.as_deref()) {
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
    pub(crate) fn disown_copy(&self, tree: &mut Tree, id: FileId) -> bool {
        let Some(_inode) = self.metadata.try_lock_inode(id) else { return false };
        let Some(inode) = tree.get_mut(id).filter(|inode| inode.is_copy()) else { return false };
        let replica = inode.replica;
        let Some((dir, name)) = inode.logical.clone() else { return false };
        if inode.handles > 0 || self.metadata.opens().contains_key(&id) {
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
        self.metadata.commit_apart(tree, |tree| {
            tree.txn.dropped(id);
            tree.txn.entry(dir, &name);
            if let Some(replica) = replica {
                drop(self.drop_copy(tree, id, replica, path));
            }
        });
        self.metadata.show(tree, id);
        if tree.get(id).is_some_and(|inode| inode.lookups == 0) {
            tree.forget_mirror(id);
        }
        true
    }

    /// Another member of the pool has removed a directory of the store, or put another one in its place. `false`: there is
    /// something of this agent below it.
    pub(crate) fn disown_way(&self, tree: &mut Tree, id: FileId) -> bool {
        let Some(inode) = tree.get(id).filter(|inode| inode.is_way(id)) else { return false };
        let Some((dir, name)) = inode.logical.clone() else { return false };
        let below: Vec<FileId> =
            inode.dir.iter().flat_map(|dir| dir.children.values()).filter_map(|entry| entry.logical()).collect();
        for child in &below {
            self.disown_copy(tree, *child);
        }
        if below.iter().any(|child| tree.get(*child).is_some_and(|child| child.owned)) {
            return false;
        }
        if tree.is_queued(id) || tree.dir(dir).is_none_or(|dir| dir.complete) {
            return false;
        }
        if let Some(inode) = tree.get_mut(id) {
            (inode.owned, inode.logical, inode.applied) = (false, None, None);
        }
        tree.bind(dir, &name, |entry| *entry = surgetank_state::Entry::default());
        self.metadata.commit_apart(tree, |tree| {
            tree.txn.dropped(id);
            tree.txn.entry(dir, &name);
        });
        if tree.get(id).is_some_and(|inode| inode.lookups == 0) {
            tree.forget_mirror(id);
        }
        true
    }

    /// Removes the plain file after the catalog has the record of it.
    fn drop_copy(&self, tree: &mut Tree, id: FileId, replica: PlainId, path: Option<Vec<u8>>) -> Remains<'_> {
        tree.txn.pending_unlink(Some(replica));
        let shown_perm = self.metadata.perm_to_leave(tree, id);
        let charged = tree.drop_replica(id).map_or(0, |(_, charged)| charged);
        crash_point!("evict.begun");
        self.metadata.commit(tree);
        crash_point!("evict.written_down");
        let device = self.tiers.device(replica.device);
        let remains = device.hold(path.as_deref(), charged);
        if let Some(path) = path
            && let Err(why) = device.unlink_with(&path, shown_perm)
        {
            self.tiers.device_failed(device.id(), &why);
        }
        device.counters().evictions.fetch_add(1, Ordering::Relaxed);
        device.counters().evicted_bytes.fetch_add(charged, Ordering::Relaxed);
        remains
    }

    /// Does a process with the shim have the plain file open? Such processes open it without a request. An open copy
    /// stays, because its removal frees no space, and because the process could not identify its file any more. The
    /// index hides the file first, so that no process can open it after the look.
    pub(crate) fn has_readers(&self, tree: &Tree, id: FileId, device: DeviceId, path: Option<&[u8]>) -> bool {
        let (Some(shim), Some(path)) = (self.metadata.shim.get(), path) else {
            return false;
        };
        shim.conceal(id);
        let device = self.tiers.device(device);
        let busy = match device.open(path, false) {
            Ok(file) => device.leases() && !crate::content::is_open_only_here(&file),
            Err(_) => false,
        };
        if busy {
            self.metadata.show(tree, id);
        }
        busy
    }

    /// Charges the bytes that direct writers wrote since the last poll. Keeps free the room that they would fill within
    /// the next polls: first by eviction, then with the device's ballast. After that the process gets ENOSPC, as it
    /// would without Surgetank.
    pub(crate) fn watch_direct_writers(&self) {
        let writers: Vec<_> = self.metadata.opens().values().filter(|open| open.directly_written()).cloned().collect();
        for device in self.tiers.devices() {
            let mut any = false;
            let mut grown_bytes = 0;
            let mut ahead_bytes = 0u64;
            for open in &writers {
                let content = open.content();
                if content.location == Location::Tier(device.id()) {
                    any = true;
                    // A thread that holds the lock, perhaps to seal the file, also corrects its charge.
                    if let Some(_inode) = self.metadata.try_lock_inode(open.id)
                        && open.directly_written()
                        && self.metadata.open_of(open.id).is_some_and(|now| Arc::ptr_eq(&now, open))
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
        open: &crate::content::Open,
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

    /// Charges arriving bytes. The store has them, so they count as clean.
    pub(crate) fn charge_fetching(&self, device: DeviceId, bytes: i64) {
        self.tiers.device(device).add_used(bytes);
        self.metadata.write_tree().arriving(device, bytes);
    }

    /// A writer needs room on the device: arriving files there drop the chunks that were read.
    pub(crate) fn squeeze_fetches(&self, device: DeviceId) -> u64 {
        let fetches: Vec<Arc<Fetch>> = self.metadata.opens().values().filter_map(|open| open.fetch()).collect();
        let mut freed = 0;
        for fetch in fetches.iter().filter(|fetch| fetch.device() == Some(device)) {
            let bytes = fetch.squeeze();
            self.charge_fetching(device, -i64::try_from(bytes).unwrap_or(i64::MAX));
            freed += bytes;
        }
        freed
    }
}
