//! Making room, and bringing in ahead of use. Only what the store has is ever evicted, except temporaries
//! that their rule lets go when nobody has them open.

use std::sync::atomic::Ordering;

use crate::config::KeepAtExit;
use crate::error::{Errno, Error, Result};
use crate::model::{DeviceId, FileId, Kind, Mode};
use crate::placement::{self, AskKind, Candidate, Reason, Skip};

use super::Namespace;
use super::content::Lies;
use super::journal::Txn;

/// Room is kept for what direct writers would write in so many looks, at the rate of the last one.
const LOOKS_AHEAD: u64 = 4;
/// For a new file at least this part of a full device is emptied.
const EVICT_SHARE: u64 = 16;

impl Namespace {
    /// Frees at least so many bytes on a device, if there is anything that may go. Returns what was freed.
    pub(crate) fn make_room(&self, device: DeviceId, want_bytes: u64) -> u64 {
        let candidates: Vec<Candidate> = {
            let tree = self.tree();
            tree.iter()
                .filter(|(_, inode)| inode.replica.is_some_and(|(at, _)| at == device))
                .map(|(id, inode)| Candidate {
                    id,
                    bytes: inode.charged_bytes,
                    durable: inode.sealed && !inode.dirty() && inode.publish.is_none(),
                    pinned: inode.pinned,
                    open: inode.handles > 0 || !inode.sealed,
                    mode: tree
                        .logical_path(id)
                        .map_or(Mode::Copy, |path| self.decide(&path).mode),
                    // A temporary may be read again by the workflow that made it: it goes at the end, not before.
                    droppable: false,
                    prefetched: inode.prefetched,
                    reads: inode.reads,
                    idle: inode.used.map_or_else(|| self.uptime(), |at| at.elapsed()),
                })
                .collect()
        };
        let mut freed = 0;
        for (id, reason) in placement::victims(candidates.into_iter(), want_bytes) {
            // Whoever wants the room may hold the lock of an inode or a gate already.
            if let Some(_inode) = self.try_lock_inode(id) {
                freed += self.evict_locked(id, &reason.to_string());
            }
        }
        freed
    }

    /// Makes room on the tiers that a choice passed over because they are full, as far as the store has what lies
    /// there. More than is asked for at once: finding victims is a walk over all files.
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

    /// Drops the tier's copy of a durable file. Returns the bytes freed; 0 when it may not go.
    pub fn evict(&self, id: FileId, reason: &str) -> Result<u64> {
        let _inode = self.lock_inode(id);
        Ok(self.evict_locked(id, reason))
    }

    fn evict_locked(&self, id: FileId, reason: &str) -> u64 {
        let mut tree = self.tree();
        let Some(inode) = tree.get(id) else {
            return 0;
        };
        let Some((device, _)) = inode.replica else {
            return 0;
        };
        let evictable =
            inode.sealed && !inode.dirty() && inode.publish.is_none() && inode.applied.is_some();
        if !evictable || inode.pinned || self.opens().contains_key(&id) {
            return 0;
        }
        let path = tree.logical_path(id);
        let mut txn = Txn::default();
        let charged = tree.drop_replica(id).map_or(0, |(_, charged)| charged);
        if let Some(inode) = tree.get_mut(id) {
            inode.extra_mut().placed = reason.to_owned();
        }
        txn.file(id);
        self.commit(&tree, txn);
        let device = self.tiers.device(device);
        if let Some(path) = path
            && let Err(why) = device.unlink(&path)
        {
            self.device_failed(device.id(), &why);
        }
        device.add_used(-i64::try_from(charged).unwrap_or(i64::MAX));
        device.counters().evictions.fetch_add(1, Ordering::Relaxed);
        device
            .counters()
            .evicted_bytes
            .fetch_add(charged, Ordering::Relaxed);
        charged
    }

    /// Charges what direct writers wrote since the last look, and keeps ahead of them the room that they would fill
    /// until we have looked a few times more: first by eviction, then with the device's ballast. After that the
    /// program sees ENOSPC, as it would without us.
    pub(crate) fn watch_direct_writers(&self) {
        let writers: Vec<_> = self.opens().values().filter(|open| open.directly_written()).cloned().collect();
        for device in self.tiers.devices() {
            let mut any = false;
            let mut grown_bytes = 0;
            for open in &writers {
                let content = open.content();
                if content.lies == Lies::Tier(device.id()) {
                    any = true;
                    grown_bytes += self.charge_growth(open, &content.file, device);
                }
            }
            device.want_ballast(any);
            let ahead_bytes = grown_bytes.saturating_mul(LOOKS_AHEAD);
            let free_bytes = device.free_bytes();
            if free_bytes < ahead_bytes && self.make_room(device.id(), ahead_bytes - free_bytes) == 0 && free_bytes < grown_bytes {
                device.release_ballast();
            }
            // A stranger fills the device, or its cap went down: what may go makes way.
            let excess_bytes = device.excess_bytes();
            if excess_bytes > 0 {
                self.make_room(device.id(), excess_bytes);
            }
        }
    }

    /// Moves what a direct writer wrote from reserved to used; returns how much that was.
    fn charge_growth(&self, open: &super::content::Open, file: &std::fs::File, device: &crate::tier::Device) -> u64 {
        let Ok(stat) = rustix::fs::fstat(file) else { return 0 };
        let now = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        let grown = now.saturating_sub(open.charged_bytes.load(Ordering::Relaxed));
        if grown > 0 {
            device.add_used(i64::try_from(grown).unwrap_or(i64::MAX));
            open.charged_bytes.store(now, Ordering::Relaxed);
            let spent = open.reserved_bytes.load(Ordering::Relaxed).min(grown);
            device.unreserve(spent);
            open.reserved_bytes.fetch_sub(spent, Ordering::Relaxed);
        }
        grown
    }

    /// Brings a file of the store into a tier. Returns its bytes; 0 when it is there already or no tier has room.
    pub fn prefetch(&self, id: FileId) -> Result<u64> {
        let failed = |why: &dyn std::fmt::Display| {
            Error::new("a file could not be prefetched")
                .why(why)
                .data("the store has it, nothing is lost")
        };
        let _inode = self.lock_inode(id);
        let (path, store_path, size_bytes, owner, identity, perm) = {
            let tree = self.tree();
            let Some(inode) = tree.get(id) else {
                return Ok(0);
            };
            let wanted = inode.attr.kind == Kind::File
                && inode.replica.is_none()
                && inode.sealed
                && !inode.dirty();
            if !wanted || self.opens().contains_key(&id) {
                return Ok(0);
            }
            let (Some(path), Some(store_path)) = (tree.logical_path(id), tree.applied_path(id))
            else {
                return Ok(0);
            };
            (
                path,
                store_path,
                inode.attr.size_bytes,
                inode.cred(),
                inode.identity.as_deref().copied(),
                inode.attr.perm,
            )
        };
        let placed = self
            .place(
                &path,
                id,
                AskKind::Prefetch { bytes: size_bytes },
                Mode::Copy,
                perm,
            )
            .map_err(|why| failed(&why))?;
        let Lies::Tier(device) = placed.content.lies else {
            if let Some((dir, name)) = placed.spill {
                self.tree().discards.push((dir, name, owner));
            }
            return Ok(0);
        };
        let device = self.tiers.device(device);
        let source = self
            .store
            .open(self.own_cred(owner), &store_path, false)
            .map_err(|why| failed(&why))?;
        let copied = placed.writable().and_then(|target| {
            crate::tier::ladder::copy_file(&source, &target, size_bytes, &|_| Ok(()))?;
            let metadata = source.metadata()?;
            target.set_times(
                std::fs::FileTimes::new()
                    .set_modified(metadata.modified()?)
                    .set_accessed(metadata.accessed()?),
            )?;
            rustix::fs::fstat(&target).map_err(std::io::Error::from)
        });
        self.undo_placed(&placed);
        // Changed by somebody else while we copied: the copy is of no version at all.
        let unchanged = self
            .store
            .stat(self.own_cred(owner), &store_path)
            .is_ok_and(|stat| Some(stat.identity) == identity);
        let stat = match copied {
            Ok(stat) if unchanged => stat,
            other => {
                drop(device.unlink(&super::files::hidden_name(id)));
                return other.map(|_| 0).map_err(|why| failed(&why));
            }
        };
        let mut tree = self.tree();
        let mut txn = Txn::default();
        self.own(&mut tree, &mut txn, id);
        self.adopt(&mut tree, id, &placed)
            .map_err(|why| failed(&why))?;
        let charged = u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        device.add_used(i64::try_from(charged).unwrap_or(i64::MAX));
        device
            .counters()
            .bytes_in
            .fetch_add(size_bytes, Ordering::Relaxed);
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = charged;
            inode.prefetched = true;
        }
        tree.recount(id);
        self.commit(&tree, txn);
        Ok(size_bytes)
    }

    /// Files below a path that the tiers hold or the store has; for evict, pin and prefetch of whole trees.
    pub fn files_below(&self, path: &[u8]) -> Result<Vec<FileId>> {
        let shown = String::from_utf8_lossy(path).into_owned();
        let failed = |why: &dyn std::fmt::Display| {
            Error::new(format!("{shown}: cannot be looked up")).why(why)
        };
        let caller = crate::model::Caller {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            pid: 0,
            umask: 0,
        };
        let mut files = Vec::new();
        let mut todo = vec![self.find(path).map_err(|why| failed(&why))?];
        while let Some(id) = todo.pop() {
            let kind = self.tree().get(id).map(|inode| inode.attr.kind);
            match kind {
                Some(Kind::Directory) => {
                    for listed in self.merged(&caller, id).map_err(|why| failed(&why))? {
                        match self.resolve(&caller, id, &listed.name) {
                            Ok(child) => todo.push(child),
                            Err(fault) if fault.errno == Errno::NOENT => {}
                            Err(fault) => return Err(failed(&fault)),
                        }
                    }
                }
                Some(Kind::File) => files.push(id),
                _ => {}
            }
        }
        Ok(files)
    }

    /// Files that a glob (relative to the directory) or a path names.
    pub fn files_matching(&self, pattern: &[u8]) -> Result<Vec<FileId>> {
        let text = String::from_utf8_lossy(pattern).into_owned();
        if !text.contains(['*', '?', '[', '{']) {
            return self.files_below(pattern);
        }
        let glob = globset::GlobBuilder::new(&text).literal_separator(true).build().map_err(|why| {
            Error::new(format!("{text}: not a pattern")).why(why)
        })?;
        let matcher = glob.compile_matcher();
        // Only the part of the tree that the pattern's plain beginning names is walked.
        let plain: Vec<&str> = text.split('/').take_while(|part| !part.contains(['*', '?', '[', '{'])).collect();
        let mut files = Vec::new();
        for id in self.files_below(plain.join("/").as_bytes())? {
            let path = self.tree().logical_path(id).unwrap_or_default();
            let path: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(path.as_slice());
            if matcher.is_match(std::path::Path::new(path)) {
                files.push(id);
            }
        }
        Ok(files)
    }

    /// The end of the agent: everything durable leaves the tiers, temporaries are dropped, and when nothing
    /// is left that only we have, the catalog starts over. Returns whether all is in the store.
    pub fn finish(&self) -> bool {
        let ids: Vec<FileId> = self
            .tree()
            .iter()
            .filter(|(_, inode)| inode.replica.is_some())
            .map(|(id, _)| id)
            .collect();
        for id in &ids {
            self.drop_temporary(*id);
            drop(self.evict(*id, "the last run over this directory ended"));
        }
        let (left, queued) = {
            let tree = self.tree();
            let left = tree
                .iter()
                .any(|(_, inode)| inode.replica.is_some() || inode.spill().is_some());
            (left, !tree.ops.is_empty())
        };
        if left || queued {
            return false;
        }
        if let Err(why) = self.catalog.clear() {
            tracing::warn!(%why, "the catalog could not be cleared");
        }
        for device in self.tiers.devices() {
            if let Err(why) = device.sweep() {
                tracing::warn!(%why, device = %device.path().display(), "a tier could not be swept");
            }
        }
        true
    }

    /// `remove`, and `keep` with `--keep-at-exit=drop`.
    fn drop_temporary(&self, id: FileId) {
        let _inode = self.lock_inode(id);
        let mut tree = self.tree();
        let Some(path) = tree.logical_path(id) else {
            return;
        };
        let mode = self.mode_for(&tree, id, &path);
        let droppable = mode == Mode::Remove
            || (mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drop);
        let Some(inode) = tree.get(id) else { return };
        let wanted = inode.publish.is_some() || inode.applied.is_some();
        if !droppable || !inode.dirty() || wanted || self.opens().contains_key(&id) {
            return;
        }
        let mut txn = Txn::default();
        let dropped = tree.drop_replica(id);
        txn.file(id);
        if let Some((dir, name)) = tree.get(id).and_then(|inode| inode.logical.clone()) {
            tree.bind(dir, &name, |entry| entry.set_logical(None));
            txn.entry(dir, &name);
        }
        if let Some(inode) = tree.get_mut(id) {
            inode.logical = None;
        }
        self.commit(&tree, txn);
        if let Some((device, charged)) = dropped {
            let device = self.tiers.device(device);
            if let Err(why) = device.unlink(&path) {
                self.device_failed(device.id(), &why);
            }
            device.add_used(-i64::try_from(charged).unwrap_or(i64::MAX));
        }
    }
}
