//! Descriptor grants: the agent gives the shim a descriptor of the plain file itself. The shim creates files and opens
//! them for writing that way, where this is direct. This file also notices that a process has closed the last such
//! descriptor.
//!
//! - A request that needs the store, a copy or mediation goes to the mount ([`LEFT_TO_THE_MOUNT`]).
//! - Granted descriptors do not pass through the agent again. The kernel reports when a process closes a writable one
//!   (`Shim::watch`), and a lease shows whether others remain.
//! - Until then `Open::handed` counts as one writer.
//!
//! The danger that this avoids: the agent seals a file that a process can still write.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind};

use super::super::Namespace;
use super::super::attributes::SET_IDS;
use super::super::content::{Content, Location, Open};
use super::super::handoff::MANY;
use super::seal::nobody_writes;
use super::{KEPT, LEFT_TO_THE_MOUNT, STORE_TO_BE_ASKED, Via};
use surgetank_state::{Inode, Name, Tree};

/// The limit of tries while another client removes the name and creates it again during one open.
const LOOKS_MAX: usize = 1000;
/// The kernel gets a decided answer within microseconds, if the processor is free.
const TOLD_TRIES: u32 = 16;
const TOLD_PAUSE: std::time::Duration = std::time::Duration::from_micros(100);
const TOLD_PAUSE_MAX: std::time::Duration = std::time::Duration::from_millis(200);

impl Namespace {
    /// A descriptor of the plain file, as open(2) of the name with these flags would return it.
    ///
    /// Errors: [`STORE_TO_BE_ASKED`] if the store has to be asked and `may_ask` is false.
    pub fn hand_out(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        perm: u32,
        flags: i32,
        may_ask: bool,
    ) -> FsResult<File> {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if !writes || name.is_empty() || name.starts_with(surgetank_types::model::STORE_TEMPORARY_PREFIX) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        // The caller may have closed an earlier grant. If the agent still has its own copy of that descriptor, the
        // kernel would report the close after the file that the caller creates now.
        if let Some(shim) = self.shim.get() {
            shim.await_given();
        }
        // The caller may also have closed a file at the mount, and the kernel reports such closes late.
        if self.writing_handles.load(Ordering::SeqCst) > 0
            && let Some(door) = self.door.get()
        {
            door.await_closes();
        }
        let once = || {
            let known = {
                let tree = self.read_tree();
                let inode = tree.get(dir).ok_or(LEFT_TO_THE_MOUNT)?;
                if !inode.is_dir() || (inode.logical.is_none() && dir != FileId::ROOT) {
                    return Err(LEFT_TO_THE_MOUNT.into());
                }
                self.permit(caller, &inode.attr, 1)?;
                self.known(&tree, dir, &Name::from(name))
            };
            let known = match known {
                Some(known) => known,
                None if !may_ask => return Err(STORE_TO_BE_ASKED.into()),
                None => match self.resolve(caller, dir, name) {
                    Ok(id) => Some(id),
                    Err(fault) if fault.errno == Errno::NOENT => None,
                    Err(fault) => return Err(fault),
                },
            };
            match known {
                Some(_) if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL => {
                    Err(Errno::EXIST.into())
                }
                Some(id) => self.hand_out_existing(caller, id, flags, may_ask),
                None if flags & libc::O_CREAT == 0 => Err(Errno::NOENT.into()),
                None if perm & SET_IDS != 0 => Err(LEFT_TO_THE_MOUNT.into()),
                None if !may_ask && self.change_would_ask(caller, dir) => Err(STORE_TO_BE_ASKED.into()),
                None => {
                    self.permit_change(caller, dir)?;
                    self.hand_out_new(caller, dir, name, perm, flags)
                }
            }
        };
        for _ in 0..LOOKS_MAX {
            match once() {
                // Another process removed or created the name between the look and the open.
                Err(fault) if fault.errno == Errno::STALE => {}
                Err(fault) if fault.errno == Errno::EXIST && flags & libc::O_EXCL == 0 => {}
                handed => return handed,
            }
        }
        Err(LEFT_TO_THE_MOUNT.into())
    }

    /// The agent created the file for this very process, and the answer did not arrive. If the agent cannot grant it
    /// any more, it removes the file, and the mount creates another one.
    pub fn hand_out_again(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        id: FileId,
        flags: i32,
    ) -> FsResult<File> {
        let handed = self.hand_out_existing(caller, id, flags & !libc::O_TRUNC, true);
        if handed.as_ref().is_err_and(|fault| fault.errno == LEFT_TO_THE_MOUNT) {
            let known = self.known(&self.read_tree(), dir, &Name::from(name));
            if known == Some(Some(id)) {
                self.unlink(caller, dir, name)?;
                if let Some(door) = self.door.get() {
                    door.invalidate_name(dir, name);
                }
            }
        }
        handed
    }

    fn hand_out_existing(&self, caller: &Caller, id: FileId, flags: i32, may_ask: bool) -> FsResult<File> {
        let want = if flags & libc::O_ACCMODE == libc::O_WRONLY { 2 } else { 6 };
        {
            let tree = self.read_tree();
            let inode = tree.get(id).ok_or(Errno::STALE)?;
            if inode.attr.kind != Kind::File {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
            self.permit(caller, &inode.attr, want)?;
            // Only the store has the content, or the kernel has to see each writer.
            if inode.replica.is_none() || inode.attr.perm & SET_IDS != 0 {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
        }
        // The holder of the lock may be waiting for the store.
        let inode = if may_ask { self.lock_inode(id) } else { self.try_lock_inode(id).ok_or(STORE_TO_BE_ASKED)? };
        // The kernel's caches for the mount's readers stay while those read.
        let open = self.open_locked(id, true, flags & libc::O_TRUNC != 0, self.run(caller), Via::Shim(flags))?;
        self.count_handed(&open);
        let file = self.hand(caller, &open, None, flags)?;
        drop(inode);
        self.forget_attributes_for_sure(id);
        Ok(file)
    }

    fn hand_out_new(&self, caller: &Caller, dir: FileId, name: &[u8], perm: u32, flags: i32) -> FsResult<File> {
        let run = self.run(caller);
        let made = self.make_file(caller, (dir, name), perm, run, Via::Shim(flags))?;
        self.handed.fetch_add(1, Ordering::Relaxed);
        let location = made.open.content().location;
        let roomy = matches!(location, Location::Tier(device) if self.may_delegate_at_all(caller) && self.may_hold_more(device));
        let mut tree = self.write_tree();
        let mut more = self.consider_delegation(&mut tree, caller, dir, &made.open, roomy);
        // A program that checks for a free name before each creation makes the kernel cache every name: so try again at once.
        for again in [true, false] {
            let (listed, absent) = tree.dir_mut(dir).map_or((false, false), |d| {
                (std::mem::take(&mut d.is_in_kernel), d.kernel_negative_entries.take(name))
            });
            drop(tree);
            if let Some(door) = self.door.get() {
                if listed {
                    door.invalidate(dir, false);
                }
                if absent {
                    door.invalidate_name(dir, name);
                }
                more.iter().flatten().for_each(|name| door.invalidate_name(dir, name));
            }
            if more.is_none() || !again {
                break;
            }
            tree = self.write_tree();
            more = self.delegate(&mut tree, caller, dir, &made.open);
        }
        self.hand(caller, &made.open, made.plain, flags)
    }

    /// The writer that was just counted gets a descriptor. The caller holds the inode's lock.
    pub(super) fn count_handed(&self, open: &Open) {
        if open.handed.swap(true, Ordering::Relaxed) {
            // It counts already, for one writer. Earlier descriptors may be closed by now; this one is not.
            self.uncount_user(open, true);
        } else {
            self.handed.fetch_add(1, Ordering::Relaxed);
        }
        self.show(&self.read_tree(), open.id);
    }

    /// Gives up the open file when the descriptor cannot be granted.
    pub(super) fn hand(&self, caller: &Caller, open: &Arc<Open>, plain: Option<File>, flags: i32) -> FsResult<File> {
        open.handed_to(caller.uid);
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
            self.defer_seal(open.id);
        }
        file.map_err(|why| {
            tracing::warn!(%why, "a descriptor of a plain file could not be handed out");
            LEFT_TO_THE_MOUNT.into()
        })
    }

    fn watch_apart_open(&self, open: &Open) -> std::io::Result<()> {
        match self.shim.get() {
            Some(shim) => shim.watch(open.id, open.content().file.as_fd()),
            None => Err(Errno::NOTCONN.into()),
        }
    }

    /// Watches through the directory where the name is certain: plain files move only under the tree's lock.
    fn watch_made(&self, open: &Open, content: &Content) -> std::io::Result<()> {
        if let (Some(shim), Location::Tier(device)) = (self.shim.get(), content.location) {
            let tree = self.read_tree();
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
        if self.handed.load(Ordering::Relaxed) == 0 {
            return;
        }
        let opens: Vec<Arc<Open>> = if tree.get(id).is_some_and(Inode::is_dir) {
            self.opens().values().filter(|open| tree.is_within(open.id, id)).cloned().collect()
        } else {
            self.opens().get(&id).cloned().into_iter().collect()
        };
        for open in opens.into_iter().filter(|open| open.handed.load(Ordering::Relaxed)) {
            if let Err(why) = self.watch_apart_open(&open) {
                tracing::warn!(%why, "a plain file cannot be watched; it is looked at now and then");
            }
        }
    }

    /// A process closed a granted descriptor; others may remain. `false`: others remain, or the kernel reported the
    /// close too early, see `retry_handed`.
    pub fn handed_closed(&self, id: FileId) -> bool {
        loop {
            match self.look_whether_closed(id) {
                Ok(ended) => return ended,
                // Waits without any other lock. Without the wait, `catch_up` would return, and the next operation would
                // come before this file.
                Err(busy) => drop(self.lock_inode(busy)),
            }
        }
    }

    /// The error: the file is closed, and another thread holds the lock of the returned file, which was closed before it.
    fn look_whether_closed(&self, id: FileId) -> Result<bool, FileId> {
        let _inode = self.lock_inode(id);
        let Some(open) = self.open_of(id) else { return Ok(true) };
        if self.try_end_handed(&open)? {
            return Ok(true);
        }
        // Watches again first, because the last close might fall between the two looks.
        let watched = self.shim.get().is_some_and(|shim| shim.watch(id, open.content().file.as_fd()).is_ok());
        let ended = self.try_end_handed(&open)?;
        if !ended && !watched {
            self.defer_seal(id);
        }
        Ok(ended)
    }

    /// The kernel reports a close an instant before the file counts as closed. A file whose lease was refused in that
    /// instant is tried again here.
    pub(crate) fn retry_handed(&self) {
        self.settle();
        if self.handed.load(Ordering::Relaxed) == 0 {
            return;
        }
        let handed: Vec<Arc<Open>> =
            self.opens().values().filter(|open| open.handed.load(Ordering::Relaxed)).cloned().collect();
        for open in handed {
            if !nobody_writes(&open.content()) {
                continue;
            }
            // It is closed. Files that were closed before it come first, in the kernel's order.
            self.catch_up();
            // A thread that holds the lock ends it.
            if let Some(_inode) = self.try_lock_inode(open.id)
                && self.open_of(open.id).is_some_and(|now| Arc::ptr_eq(&now, &open))
            {
                self.end_handed(&open);
            }
        }
    }

    /// A close was reported without its file, so all granted files are tried.
    pub fn any_handed_closed(&self) {
        self.settle();
        let handed: Vec<FileId> =
            self.opens().values().filter(|o| o.handed.load(Ordering::Relaxed)).map(|o| o.id).collect();
        for id in handed {
            self.handed_closed(id);
        }
    }

    /// Makes the kernel drop the attributes of a file that it knows.
    pub fn forget_attributes(&self, id: FileId) {
        let known = self.read_tree().get(id).is_some_and(|inode| inode.lookups > 0);
        if let Some(door) = self.door.get().filter(|_| known) {
            door.invalidate(id, true);
        }
    }

    /// The same, where no later event invalidates them. The kernel does not know the file while the answer to its first
    /// look-up is under way, with the old attributes. The caller holds no lock.
    pub fn forget_attributes_for_sure(&self, id: FileId) {
        for turn in 0..TOLD_TRIES {
            let lookups = self.read_tree().get(id).map_or(0, |inode| inode.lookups);
            match self.door.get().filter(|_| lookups > 0) {
                // For an earlier agent's file, the agent cannot know whether the kernel has seen it.
                Some(door) if !door.invalidate(id, true) && lookups < MANY / 2 => {
                    std::thread::sleep((TOLD_PAUSE * 2_u32.pow(turn)).min(TOLD_PAUSE_MAX))
                }
                _ => return,
            }
        }
    }

    /// The caller holds the inode's lock.
    pub(super) fn end_handed(&self, open: &Arc<Open>) -> bool {
        self.try_end_handed(open).unwrap_or(false)
    }

    /// Errors: as [`Self::seal_those_before`].
    fn try_end_handed(&self, open: &Arc<Open>) -> Result<bool, FileId> {
        if !open.handed.load(Ordering::Relaxed) {
            return Ok(true);
        }
        let content = open.content();
        // Without leases on a device, a writer never causes a refusal.
        let ended = nobody_writes(&content);
        if ended {
            self.seal_those_before(open.id)?;
            self.ended(open, &content);
        }
        Ok(ended)
    }

    /// The same, after the files that were closed before are sealed.
    pub(super) fn end_handed_now(&self, open: &Arc<Open>) -> bool {
        if !open.handed.load(Ordering::Relaxed) {
            return true;
        }
        let content = open.content();
        let ended = nobody_writes(&content);
        if ended {
            self.ended(open, &content);
        }
        ended
    }

    fn ended(&self, open: &Arc<Open>, content: &Content) {
        open.handed.store(false, Ordering::Relaxed);
        let left = self.uncount_user(open, true);
        if left.writers == 0 {
            self.finish_seal(open.id, Some(open), content);
            if left.readers == 0 {
                self.give_up(open);
            }
        }
        // Not earlier: at zero granted files, `catch_up` does not wait.
        self.handed.fetch_sub(1, Ordering::Release);
        if self.delegated.load(Ordering::Relaxed) > 0 {
            self.limit_by_handed();
        }
    }

    /// Takes in the closes of granted descriptors, so that later operations come after them. Returns whether there were
    /// any. The caller holds no lock.
    pub fn catch_up(&self) -> bool {
        self.settle();
        let before = self.handed.load(Ordering::Acquire);
        if before > 0
            && let Some(shim) = self.shim.get()
        {
            shim.catch_up();
        }
        self.handed.load(Ordering::Relaxed) < before
    }

    /// fsync of a granted descriptor.
    pub fn fsync_handed(&self, id: FileId) -> FsResult<()> {
        match self.open_of(id) {
            Some(open) => self.fsync_open(&open, false),
            None => self.fsync_closed(id),
        }
    }
}
