//! Sealing: the last writer has closed, and the file cannot be written any more. Then its content becomes a version,
//! and its rule decides what follows.
//!
//! States: open, sealed, or with a deferred seal. Invariant: files become versions in the order of their closes. The
//! danger that this avoids: the drain copies a file that a process still writes.

use super::super::events::Seen;
use std::os::fd::AsRawFd;
use surgetank_types::sync::PoisonError;
use surgetank_types::sync::atomic::Ordering;

use surgetank_policy::config::KeepAtExit;
use surgetank_types::model::{FileId, Mode, OpKind, Timestamp};

use super::super::Namespace;
use super::super::attributes::{SET_IDS, as_written};
use super::super::content::{Content, Location, Open};
use surgetank_state::Tree;

impl Namespace {
    /// The last writer closed. The caller holds the inode's lock. `false`: a duplicate, a child or a mapping can still
    /// write. Then the seal is deferred, and the `Open` stays, because it has the charge and knows that the file was
    /// written.
    pub(super) fn seal(&self, open: &Open) -> bool {
        let content = open.content();
        // Files that were closed before it come before it.
        if somebody_writes(open, &content) || self.seal_those_before(open.id).is_err() {
            self.defer_seal(open.id);
            return false;
        }
        self.finish_seal(open.id, Some(open), &content);
        true
    }

    /// Makes the content a version. The caller holds the inode's lock.
    pub(crate) fn finish_seal(&self, id: FileId, open: Option<&Open>, content: &Content) {
        crash_point!("seal.begun");
        let written = open.is_none_or(|open| {
            let direct = open.direct_writer.swap(false, Ordering::Relaxed);
            if direct && let Location::Tier(device) = content.location {
                self.tiers.device(device).writer_closed();
            }
            open.written.swap(false, Ordering::Relaxed) || direct
        });
        let in_place = content.location == Location::Store;
        let synced = in_place && written;
        if synced && let Err(why) = sync_in_place(&content.file) {
            let path = self.read_tree().logical_path(id).unwrap_or_default();
            let run = self.read_tree().get(id).map_or(surgetank_types::model::RunId(0), |inode| inode.run);
            self.note(
                run,
                String::from_utf8_lossy(&path).into_owned(),
                format!("written in place on the store {}, which failed to sync: {why}", self.store.describe()),
                true,
            );
        }
        let Ok((mut tree, stat)) = self.look_and_lock(id, &content.file) else {
            return;
        };
        if let Some(open) = open
            && let now = open.content()
            && now.location != content.location
        {
            // The content was moved, or published as it is, during the look.
            drop(tree);
            open.written.fetch_or(written, Ordering::Relaxed);
            return self.finish_seal(id, Some(open), &now);
        }
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        // The kernel clears them on the store's own file at every write. Here they stay if the writer may keep them.
        let mut lost_set_ids = false;
        if written {
            inode.attr = as_written(inode, &stat, open);
            lost_set_ids = in_place && (inode.attr.perm & !stat.st_mode) & SET_IDS != 0;
            inode.version += 1;
            if in_place {
                inode.durable = inode.version;
                inode.identity = Some(Box::new(identity_of(&stat)));
            }
        }
        inode.sealed = true;
        // A promise for a version that does not exist becomes one for the version before.
        inode.promised = inode.promised.min(inode.version);
        // Opened for writing and not written: the copy that was made for it is not needed.
        let unwanted =
            !written && !inode.dirty() && inode.applied.is_some() && content.location == Location::StoreTemporary;
        let spill = inode.extra.as_mut().filter(|_| unwanted).and_then(|extra| extra.spill.take());
        let cred = inode.cred();
        let data_bytes = inode.attr.data_bytes();
        if let Location::Tier(device) = content.location {
            self.settle_charge(device, open, inode, stat.st_blocks);
        }
        if written {
            if let Location::Tier(device) = content.location {
                let counters = self.tiers.device(device).counters();
                counters.files.fetch_add(1, Ordering::Relaxed);
                counters.bytes_in.fetch_add(data_bytes, Ordering::Relaxed);
            }
            if let Some(path) = tree.logical_path(id) {
                self.tell_sealed(&tree, id, &path, &content.location);
                self.history.lock().unwrap_or_else(PoisonError::into_inner).observe(&path, data_bytes);
            }
        }
        if let Some((dir, name)) = spill {
            tree.discards.push((dir, name, cred));
        }
        tree.recount(id);
        tree.txn.file(id);
        self.queue_publish(&mut tree, id);
        if lost_set_ids {
            self.queue_meta(&mut tree, id, surgetank_types::model::RunId(0), false);
        }
        self.commit(&mut tree);
        self.to_be_synced(&tree, id);
        let queued = lost_set_ids || tree.get(id).is_some_and(|inode| inode.publish.is_some());
        crash_point!("seal.written_down");
        let first = tree.get(id).is_some_and(|inode| inode.version <= 1);
        drop(tree);
        // The kernel may cache attributes of an older version for long; it never does for a new file.
        if !first && open.is_some_and(|open| open.direct) {
            self.forget_attributes(id);
        }
        if queued {
            self.nudge();
        }
    }

    fn tell_sealed(&self, tree: &Tree, id: FileId, path: &[u8], location: &Location) {
        let Some(inode) = tree.get(id) else { return };
        let size_bytes = inode.attr.size_bytes;
        let decision = self.decided(tree, id, path);
        let seen = || Seen {
            path: path.to_vec(),
            size_bytes,
            mode: decision.mode,
            rule: self.rules.why(decision.reason).into(),
            place: match location {
                Location::Tier(device) => self.tiers.device(*device).tier_name().into(),
                Location::Store | Location::StoreTemporary | Location::Arriving => "store".into(),
            },
            placement: inode.placed.clone().unwrap_or_else(|| "".into()),
            sealed: surgetank_types::clock::tick(),
            durable: None,
            versions: 1,
        };
        self.events.sealed(inode.run, id, seen, size_bytes);
    }

    /// The device's real usage replaces the bytes that were charged meanwhile.
    fn settle_charge(
        &self,
        device: surgetank_types::model::DeviceId,
        open: Option<&Open>,
        inode: &mut surgetank_state::Inode,
        blocks: i64,
    ) {
        let exact = u64::try_from(blocks).unwrap_or(0) * 512;
        let device = self.tiers.device(device);
        let charged = open.map_or(inode.charged_bytes, |open| open.charged_bytes.swap(exact, Ordering::Relaxed));
        if let Some(open) = open {
            device.unreserve(open.reserved_bytes.swap(0, Ordering::Relaxed));
        }
        device.add_used(exact as i64 - charged as i64);
        inode.charged_bytes = exact;
    }

    /// No process has the file open any more. Content without a name goes now.
    pub(super) fn last_close(&self, open: &Open) {
        let mut tree = self.write_tree();
        // In one step. The thread that removes the last name drops the content if the file is not open; this thread
        // drops it if it was.
        self.opens().remove(&open.id);
        let Some(inode) = tree.get(open.id) else {
            return;
        };
        if inode.logical.is_some() {
            return;
        }
        // Processes with the shim may have it open without a request.
        let shown_perm = self.perm_to_leave(&tree, open.id);
        self.drop_content(&mut tree, open.id, open.charged_bytes.load(Ordering::Relaxed));
        self.tiers_unreserve(open);
        if let Location::Tier(device) = open.content().location {
            // A file that never had a name, or lost it while it was open.
            drop(self.tiers.device(device).unlink_with(&super::hidden_name(open.id), shown_perm));
        }
        self.reap(&mut tree, open.id);
        self.commit(&mut tree);
        self.succession.give_up_content(open.id);
    }

    pub(super) fn tiers_unreserve(&self, open: &Open) {
        if let Location::Tier(device) = open.content().location {
            self.tiers.device(device).unreserve(open.reserved_bytes.swap(0, Ordering::Relaxed));
        }
    }

    /// Discharges the content of an unlinked inode. Its plain file has no name any more.
    pub(crate) fn drop_content(&self, tree: &mut Tree, id: FileId, charged_bytes: u64) {
        if let Some((device, _)) = tree.drop_replica(id) {
            self.tiers.device(device).add_used(-i64::try_from(charged_bytes).unwrap_or(i64::MAX));
        }
        let publish = tree.get(id).and_then(|inode| inode.publish);
        let goes = publish.is_none_or(|seq| tree.take_back(id, seq));
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        let cred = inode.cred();
        // Unless the drain is publishing the temporary as the file: then an operation in the queue deletes it.
        if goes
            && let Some(extra) = inode.extra.as_mut()
            && let Some((dir, name)) = extra.spill.take()
        {
            tree.discards.push((dir, name, cred));
        }
        tree.txn.file(id);
    }

    /// Queues the publication of the file's present version, if its rule says so and the version is dirty.
    pub(crate) fn queue_publish(&self, tree: &mut Tree, id: FileId) {
        let Some(path) = tree.logical_path(id) else {
            return;
        };
        let decision = self.decided(tree, id, &path);
        let Some(inode) = tree.get(id) else { return };
        let mode = self.mode_as(tree, id, decision.mode);
        // Sealed after the end of the command, when the `keep` files had been collected already.
        let kept = mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drain && self.is_ending(inode.run);
        let drained = kept || Self::drained(mode) || inode.spill().is_some();
        if !inode.dirty() || !drained || inode.publish.is_some() || inode.is_dir() {
            return;
        }
        let (run, delay) = (inode.run, 1_u32 << inode.reopened.min(7));
        let last = self.is_last(&decision);
        if let Some((dir, name)) = inode.applied.clone() {
            let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over: Some(id) };
            let seq = self.queue(tree, kind, run, last, delay);
            if let Some(inode) = tree.get_mut(id) {
                inode.publish = Some(seq);
            }
            self.queue_times(tree, dir, run, last);
            return;
        }
        let Some((dir, name)) = inode.logical.clone() else {
            return;
        };
        let more = inode.extra.as_ref().map(|extra| extra.more_names.clone()).unwrap_or_default();
        tree.hasten_dirs(dir, last);
        let over = tree.planned(dir, &name);
        let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over };
        let seq = self.queue(tree, kind, run, last, delay);
        if let Some(inode) = tree.get_mut(id) {
            inode.publish = Some(seq);
        }
        for (dir, name) in more {
            tree.hasten_dirs(dir, last);
            // A link does not replace a file: the file that has the name goes first.
            if tree.planned(dir, &name).is_some_and(|holder| holder != id) {
                self.vacate(tree, dir, &name, run);
            }
            self.queue(tree, OpKind::Link { file: id, dir, name: Box::from(&*name) }, run, last, delay);
            self.queue_times(tree, dir, run, last);
        }
        self.queue_times(tree, dir, run, last);
    }
}

/// (Only the agent writes a mediated file.)
pub(super) fn somebody_writes(open: &Open, content: &Content) -> bool {
    let directly = open.direct_writer.load(Ordering::Relaxed) && matches!(content.location, Location::Tier(_));
    directly && !nobody_writes(content)
}

/// The kernel grants a read lease exactly when no writer exists: no descriptor, no duplicate, no shared mapping.
pub(crate) fn nobody_writes(content: &Content) -> bool {
    lease_is_granted(&content.file, libc::F_RDLCK)
}

/// A write lease: granted when no other descriptor of the file is open.
pub(crate) fn nobody_has(file: &std::fs::File) -> bool {
    lease_is_granted(file, libc::F_WRLCK)
}

fn lease_is_granted(file: &std::fs::File, kind: i32) -> bool {
    let fd = file.as_raw_fd();
    // SAFETY: fcntl on a descriptor that `file` keeps open; F_SETLEASE takes an int.
    let taken = unsafe { libc::fcntl(fd, libc::F_SETLEASE, kind) };
    if taken == 0 {
        // SAFETY: as above; gives the lease back.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        return true;
    }
    // Busy means that a writer exists. Any other error means that leases do not work here, and then there are no direct
    // writers.
    std::io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN)
}

fn sync_in_place(file: &std::fs::File) -> std::io::Result<()> {
    // A read-only descriptor syncs the whole file just as well.
    file.sync_all()
}

pub(crate) fn identity_of(stat: &rustix::fs::Stat) -> surgetank_types::model::StoreIdentity {
    surgetank_types::model::StoreIdentity {
        ino: stat.st_ino,
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_nanos: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32).nanos,
        ctime_nanos: Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32).nanos,
    }
}
