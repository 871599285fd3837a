//! Descriptor grants: the agent gives the shim a descriptor of the plain file itself. The shim creates files and opens
//! them for writing that way, where this is direct. This file also notices that a process has closed the last such
//! descriptor.
//!
//! - A request that needs the store, a copy or mediation goes to the mount ([`LEFT_TO_THE_MOUNT`]).
//! - Granted descriptors do not pass through the agent again. The kernel reports when a process closes a writable one
//!   (`Shim::watch`), and a lease shows whether others remain.
//! - Until then `Open::granted` counts as one writer.
//!
//! The danger that this avoids: the agent seals a file that a process can still write.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use surgetank_state::{Inode, Tree};
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::Base;
use crate::base::deferred::DeferredSeals;
use crate::content::{Content, Location, Open, has_no_writer};
use crate::files::seal::Sealer;
use crate::files::sync::Syncs;
use crate::files::{KEPT, LEFT_TO_THE_MOUNT};
use crate::metadata::{Metadata, hold_place, place_of_descriptors};

/// Descriptors of plain files that processes hold, and seals that wait for them.
pub struct Descriptors {
    pub(super) tiers: Arc<Tiers>,
    pub(super) deferred: Arc<DeferredSeals>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) sealer: Arc<Sealer>,
    pub(super) syncs: Arc<Syncs>,
}

impl Descriptors {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>, sealer: &Arc<Sealer>, syncs: &Arc<Syncs>) -> Self {
        Self {
            tiers: base.tiers.clone(),
            deferred: base.deferred.clone(),
            metadata: metadata.clone(),
            sealer: sealer.clone(),
            syncs: syncs.clone(),
        }
    }

    /// The writer that was just counted gets a descriptor. The caller holds the inode's lock.
    pub(crate) fn count_grants(&self, open: &Open) {
        if open.granted.swap(true, Ordering::Relaxed) {
            // It counts already, for one writer. Earlier descriptors may be closed by now; this one is not.
            self.sealer.uncount_user(open, true);
        } else {
            self.metadata.granted.fetch_add(1, Ordering::Relaxed);
        }
        self.metadata.show(&self.metadata.read_tree(), open.id);
    }

    /// Gives up the open file when the descriptor cannot be granted.
    pub(crate) fn grant(&self, caller: &Caller, open: &Arc<Open>, plain: Option<File>, flags: i32) -> FsResult<File> {
        open.granted_to(caller.uid);
        if self.metadata.pool.get().is_some() {
            hold_place(&self.metadata, &mut self.metadata.write_tree(), open.id);
        }
        let content = open.content();
        let made = plain.is_some();
        let file = match plain {
            Some(file) => Ok(file),
            None => std::fs::OpenOptions::new()
                .write(true)
                .read(flags & libc::O_ACCMODE == libc::O_RDWR)
                .custom_flags(flags & KEPT & !libc::O_ACCMODE)
                .open(format!("/proc/self/fd/{}", content.file.as_raw_fd())),
        };
        let watched = if made { self.watch_made(open, &content) } else { self.watch_apart_open(open) };
        if let Err(why) = &watched {
            // No event will report the close, so the agent polls.
            tracing::warn!(%why, "a plain file cannot be watched (fs.inotify.max_user_watches)");
        }
        if watched.is_err() || file.is_err() {
            self.deferred.defer_seal(open.id);
        }
        file.map_err(|why| {
            tracing::warn!(%why, "a descriptor of a plain file could not be handed out");
            LEFT_TO_THE_MOUNT.into()
        })
    }

    fn watch_apart_open(&self, open: &Open) -> std::io::Result<()> {
        match self.metadata.shim.get() {
            Some(shim) => shim.watch(open.id, open.content().file.as_fd()),
            None => Err(Errno::NOTCONN.into()),
        }
    }

    /// Watches through the directory where the name is certain: plain files move only under the tree's lock.
    fn watch_made(&self, open: &Open, content: &Content) -> std::io::Result<()> {
        if let (Some(shim), Location::Tier(device)) = (self.metadata.shim.get(), content.location) {
            let tree = self.metadata.read_tree();
            if let Some(path) = tree.logical_path(open.id)
                && let Some((dir, name)) = self.tiers.device(device).place_of(&path)
                && shim.watch_in(&dir, name, open.id).is_ok()
            {
                return Ok(());
            }
        }
        self.watch_apart_open(open)
    }

    /// The plain file gets another name, or none. A granted file is watched by itself from now on; for a directory this
    /// holds for all files below it. The caller holds the tree's lock.
    pub(crate) fn watch_apart(&self, tree: &Tree, id: FileId) {
        if self.metadata.granted.load(Ordering::Relaxed) == 0 {
            return;
        }
        let opens: Vec<Arc<Open>> = if tree.get(id).is_some_and(Inode::is_dir) {
            self.metadata.opens().values().filter(|open| tree.is_within(open.id, id)).cloned().collect()
        } else {
            self.metadata.opens().get(&id).cloned().into_iter().collect()
        };
        for open in opens.into_iter().filter(|open| open.granted.load(Ordering::Relaxed)) {
            if let Err(why) = self.watch_apart_open(&open) {
                tracing::warn!(%why, "a plain file cannot be watched; it is looked at now and then");
            }
        }
    }

    /// A process closed a granted descriptor; others may remain. `false`: others remain, or the kernel reported the
    /// close too early, see `retry_grants`.
    pub fn grant_closed(&self, id: FileId) -> bool {
        loop {
            match self.look_whether_closed(id) {
                Ok(ended) => return ended,
                // Waits without any other lock. Without the wait, `catch_up` would return, and the next operation would
                // come before this file.
                Err(busy) => drop(self.metadata.lock_inode(busy)),
            }
        }
    }

    /// The error: the file is closed, and another thread holds the lock of the returned file, which was closed before it.
    fn look_whether_closed(&self, id: FileId) -> Result<bool, FileId> {
        let _inode = self.metadata.lock_inode(id);
        let Some(open) = self.metadata.open_of(id) else { return Ok(true) };
        if self.try_end_grant(&open)? {
            return Ok(true);
        }
        // Watches again first, because the last close might fall between the two looks.
        let watched = self.metadata.shim.get().is_some_and(|shim| shim.watch(id, open.content().file.as_fd()).is_ok());
        let ended = self.try_end_grant(&open)?;
        if !ended && !watched {
            self.deferred.defer_seal(id);
        }
        Ok(ended)
    }

    /// The kernel reports a close an instant before the file counts as closed. A file whose lease was refused in that
    /// instant is tried again here.
    pub(crate) fn retry_grants(&self) {
        self.retry(|_| true);
    }

    /// The same for files whose close no event reports.
    pub(crate) fn retry_unwatched(&self) {
        let unwatched = self.deferred.deferred_files();
        if !unwatched.is_empty() {
            self.retry(|id| unwatched.contains(&id));
        }
    }

    fn retry(&self, which: impl Fn(FileId) -> bool) {
        self.metadata.settle();
        if self.metadata.granted.load(Ordering::Relaxed) == 0 {
            return;
        }
        let is_one = |open: &&Arc<Open>| open.granted.load(Ordering::Relaxed) && which(open.id);
        let granted: Vec<Arc<Open>> = self.metadata.opens().values().filter(is_one).cloned().collect();
        for open in granted {
            if !has_no_writer(&open.content()) {
                continue;
            }
            // It is closed. Files that were closed before it come first, in the kernel's order.
            self.catch_up();
            // A thread that holds the lock ends it.
            if let Some(_inode) = self.metadata.try_lock_inode(open.id)
                && self.metadata.open_of(open.id).is_some_and(|now| Arc::ptr_eq(&now, &open))
            {
                self.end_grant(&open);
            }
        }
    }

    /// A close was reported without its file, so all granted files are tried.
    pub fn any_grant_closed(&self) {
        self.metadata.settle();
        let granted: Vec<FileId> =
            self.metadata.opens().values().filter(|o| o.granted.load(Ordering::Relaxed)).map(|o| o.id).collect();
        for id in granted {
            self.grant_closed(id);
        }
    }

    /// The caller holds the inode's lock.
    pub(crate) fn end_grant(&self, open: &Arc<Open>) -> bool {
        self.try_end_grant(open).unwrap_or(false)
    }

    /// Errors: as [`Self::seal_those_before`].
    fn try_end_grant(&self, open: &Arc<Open>) -> Result<bool, FileId> {
        if !open.granted.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let content = open.content();
        // Without leases on a device, a writer never causes a refusal.
        let ended = has_no_writer(&content);
        if ended {
            self.seal_those_before(open.id)?;
            self.ended(open, &content);
        }
        Ok(ended)
    }

    /// The same, after the files that were closed before are sealed.
    pub(crate) fn end_grant_now(&self, open: &Arc<Open>) -> bool {
        if !open.granted.load(Ordering::Relaxed) {
            return true;
        }
        let content = open.content();
        let ended = has_no_writer(&content);
        if ended {
            self.ended(open, &content);
        }
        ended
    }

    fn ended(&self, open: &Arc<Open>, content: &Content) {
        let in_pool = self.metadata.pool.get().is_some();
        let holds = in_pool && self.metadata.write_tree().order.close(place_of_descriptors(open.id), open.id);
        open.granted.store(false, Ordering::Relaxed);
        let left = self.sealer.uncount_user(open, true);
        if left.writers == 0 {
            self.sealer.finish_seal(open.id, Some(open), content);
            if left.readers == 0 {
                self.sealer.give_up(open);
            }
        }
        // (Otherwise it is sealed when other writers have ended.)
        if holds && !self.deferred.is_seal_deferred(open.id) {
            self.metadata.write_tree().order.closed(open.id);
        }
        // Not earlier: at zero granted files, `catch_up` does not wait.
        self.metadata.granted.fetch_sub(1, Ordering::Release);
        if self.metadata.delegated.load(Ordering::Relaxed) > 0 {
            self.metadata.limit_by_grants();
        }
    }

    /// Takes in the closes of granted descriptors, so that later operations come after them. Returns whether there were
    /// any. The caller holds no lock.
    pub fn catch_up(&self) -> bool {
        self.metadata.settle();
        let before = self.metadata.granted.load(Ordering::Acquire);
        if before > 0
            && let Some(shim) = self.metadata.shim.get()
        {
            shim.catch_up();
        }
        self.metadata.granted.load(Ordering::Relaxed) < before
    }

    /// fsync of a granted descriptor.
    pub fn fsync_granted(&self, id: FileId) -> FsResult<()> {
        match self.metadata.open_of(id) {
            Some(open) => self.syncs.fsync_open(&open, false),
            None => self.syncs.fsync_closed(id),
        }
    }
}
