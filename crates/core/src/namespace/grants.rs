//! Descriptor grants without a mount that could mediate (the seccomp door): every file that can be opened is opened
//! directly, or the open fails.
//!
//! This works like the shim's grants (`descriptor_grant`), but a request cannot go elsewhere:
//! - Small files of the store are copied up first.
//! - Large files, and files that a process has open there, are written in place in the store.
//! - A file without room in any tier is written to a temporary in the store.
//! - When a device is full, the program gets ENOSPC from it.
//!
//! The danger that this avoids: a program writes to a plain file that a thread of the agent is moving.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use surgetank_state::Name;
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Caller, FileId, Kind, RunId};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::runs::Runs;
use crate::base::users::Permissions;
use crate::base::{Base, Door};
use crate::content::Location;
use crate::files::delegation::Delegator;
use crate::files::descriptor_grant::Descriptors;
use crate::files::dispatcher::Dispatcher;
use crate::files::open::Opener;
use crate::files::open_files::{OpenFiles, SET_IDS};
use crate::files::seal::Sealer;
use crate::files::{Files, KEPT, LEFT_TO_THE_MOUNT, STORE_TO_BE_ASKED, Via};
use crate::metadata::{Metadata, closed, may_have_copies};
use crate::namespace::names::Names;
use crate::namespace::resolve::Resolver;

/// While a thread of the agent moves a file's bytes (a prefetch, an eviction), no process gets the file directly.
const TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The limit of tries while another client removes the name and creates it again during one open.
const LOOKS_MAX: usize = 1000;

/// Descriptors of plain files, for the doors without a mount.
pub struct Grants {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    permissions: Arc<Permissions>,
    runs: Arc<Runs>,
    delegation: Arc<Delegator>,
    descriptors: Arc<Descriptors>,
    dispatcher: Arc<Dispatcher>,
    metadata: Arc<Metadata>,
    names: Arc<Names>,
    open_files: Arc<OpenFiles>,
    opener: Arc<Opener>,
    resolver: Arc<Resolver>,
    sealer: Arc<Sealer>,
}

impl Grants {
    pub(crate) fn new(base: &Base, files: &Files, names: &Arc<Names>, resolver: &Arc<Resolver>) -> Self {
        Self {
            door: base.door.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            delegation: files.delegation.clone(),
            descriptors: files.descriptors.clone(),
            dispatcher: files.dispatcher.clone(),
            metadata: files.metadata.clone(),
            names: names.clone(),
            open_files: files.open_files.clone(),
            opener: files.opener.clone(),
            resolver: resolver.clone(),
            sealer: files.sealer.clone(),
        }
    }

    /// A descriptor of a regular file's plain file, as open(2) with these flags would return it.
    pub fn open_plain(&self, caller: &Caller, id: FileId, flags: i32) -> FsResult<File> {
        let access = flags & libc::O_ACCMODE;
        let truncates = flags & libc::O_TRUNC != 0;
        let want = match access {
            libc::O_RDONLY if truncates => 6,
            libc::O_RDONLY => 4,
            libc::O_WRONLY => 2,
            _ => 6,
        };
        {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).filter(|inode| inode.attr.kind == Kind::File).ok_or(Errno::NOENT)?;
            self.permissions.permit(caller, &inode.attr, want)?;
        }
        // (Readers do not wait for writers here: their signals are not seen.)
        if access != libc::O_RDONLY || truncates {
            self.dispatcher.before_change(caller, id)?;
        }
        let until = clock::tick() + TIMEOUT;
        loop {
            let opened = if access == libc::O_RDONLY && !truncates {
                self.open_to_read(id, flags)
            } else {
                self.open_to_write(caller, id, flags)
            };
            match opened {
                Err(fault) if fault.errno == Errno::AGAIN && clock::tick() < until => {
                    surgetank_types::sync::thread::sleep(LOOK_EVERY)
                }
                Err(fault) if fault.errno == Errno::AGAIN => return Err(Errno::BUSY.into()),
                Err(fault) if fault.errno == LEFT_TO_THE_MOUNT => {
                    return Err(Fault::new(Errno::IO, "the plain file cannot be watched"));
                }
                other => return other,
            }
        }
    }

    fn open_to_read(&self, id: FileId, flags: i32) -> FsResult<File> {
        let _inode = self.metadata.lock_inode(id);
        let open = self.opener.open_locked(id, false, false, RunId(0), Via::Only(flags))?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags & (KEPT | libc::O_DIRECT) & !libc::O_ACCMODE)
            .open(format!("/proc/self/fd/{}", open.content().file.as_raw_fd()));
        self.opener.close_user(&open, false);
        Ok(file?)
    }

    fn open_to_write(&self, caller: &Caller, id: FileId, flags: i32) -> FsResult<File> {
        // An open that only truncates is a writer too, although nothing of it remains.
        let given = flags & !libc::O_TRUNC;
        let given = if given & libc::O_ACCMODE == libc::O_RDONLY { given | libc::O_RDWR } else { given };
        let _inode = self.metadata.lock_inode(id);
        let open =
            self.opener.open_locked(id, true, flags & libc::O_TRUNC != 0, self.runs.run(caller), Via::Only(given))?;
        self.descriptors.count_grants(&open);
        let file = self.descriptors.grant(caller, &open, None, given)?;
        self.open_files.watch_set_ids(&self.metadata.read_tree(), &open);
        Ok(file)
    }

    /// Makes a file that must not exist, and opens it for writing.
    pub fn create_plain(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        perm: u32,
        flags: i32,
    ) -> FsResult<(FileId, File)> {
        self.names.must_be_absent(caller, dir, name)?;
        self.names.permit_change(caller, dir)?;
        let flags = flags & !libc::O_TRUNC;
        let flags = if flags & libc::O_ACCMODE == libc::O_RDONLY { flags | libc::O_RDWR } else { flags };
        let run = self.runs.run(caller);
        let made = self.names.make_file(caller, (dir, name), perm, run, Via::Only(flags))?;
        self.metadata.granted.fetch_add(1, Ordering::Relaxed);
        let file = self
            .descriptors
            .grant(caller, &made.open, made.plain, flags)
            .map_err(|fault| if fault.errno == LEFT_TO_THE_MOUNT { Errno::IO.into() } else { fault })?;
        self.open_files.watch_set_ids(&self.metadata.read_tree(), &made.open);
        Ok((made.id, file))
    }

    /// A descriptor of the plain file, as open(2) of the name with these flags would return it.
    ///
    /// Errors: [`STORE_TO_BE_ASKED`] if the store has to be asked and `may_ask` is false.
    pub fn grant(
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
        if let Some(shim) = self.metadata.shim.get() {
            shim.await_grants();
        }
        // The caller may also have closed a file at the mount, and the kernel reports such closes late.
        if self.metadata.writing_handles.load(Ordering::SeqCst) > 0
            && let Some(door) = self.door.get()
        {
            door.await_closes();
        }
        let once = || {
            let known = {
                let tree = self.metadata.read_tree();
                let inode = tree.get(dir).ok_or(LEFT_TO_THE_MOUNT)?;
                if !inode.is_dir() || (inode.logical.is_none() && dir != FileId::ROOT) {
                    return Err(LEFT_TO_THE_MOUNT.into());
                }
                self.permissions.permit(caller, &inode.attr, 1)?;
                self.resolver.known(&tree, dir, &Name::from(name))
            };
            let known = match known {
                Some(known) => known,
                None if !may_ask => return Err(STORE_TO_BE_ASKED.into()),
                None => match self.resolver.resolve(caller, dir, name) {
                    Ok(id) => Some(id),
                    Err(fault) if fault.errno == Errno::NOENT => None,
                    Err(fault) => return Err(fault),
                },
            };
            match known {
                Some(_) if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL => {
                    Err(Errno::EXIST.into())
                }
                Some(id) => self.grant_existing(caller, id, flags, may_ask),
                None if flags & libc::O_CREAT == 0 => Err(Errno::NOENT.into()),
                None if perm & SET_IDS != 0 => Err(LEFT_TO_THE_MOUNT.into()),
                None if !may_ask && self.names.change_would_ask(caller, dir) => Err(STORE_TO_BE_ASKED.into()),
                None => {
                    self.names.permit_change(caller, dir)?;
                    self.grant_new(caller, dir, name, perm, flags)
                }
            }
        };
        for _ in 0..LOOKS_MAX {
            match once() {
                // Another process removed or created the name between the look and the open.
                Err(fault) if fault.errno == Errno::STALE => {}
                Err(fault) if fault.errno == Errno::EXIST && flags & libc::O_EXCL == 0 => {}
                granted => return granted,
            }
        }
        Err(LEFT_TO_THE_MOUNT.into())
    }

    /// The agent created the file for this very process, and the answer did not arrive. If the agent cannot grant it
    /// any more, it removes the file, and the mount creates another one.
    pub fn grant_again(&self, caller: &Caller, (dir, name): (FileId, &[u8]), id: FileId, flags: i32) -> FsResult<File> {
        let granted = self.grant_existing(caller, id, flags & !libc::O_TRUNC, true);
        if granted.as_ref().is_err_and(|fault| fault.errno == LEFT_TO_THE_MOUNT) {
            let known = self.resolver.known(&self.metadata.read_tree(), dir, &Name::from(name));
            if known == Some(Some(id)) {
                self.names.unlink(caller, dir, name)?;
                if let Some(door) = self.door.get() {
                    door.invalidate_name(dir, name);
                }
            }
        }
        granted
    }

    fn grant_existing(&self, caller: &Caller, id: FileId, flags: i32, may_ask: bool) -> FsResult<File> {
        let want = if flags & libc::O_ACCMODE == libc::O_WRONLY { 2 } else { 6 };
        {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).ok_or(Errno::STALE)?;
            if inode.attr.kind != Kind::File {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
            self.permissions.permit(caller, &inode.attr, want)?;
            // Only the store, or another member of the pool, has the content, or the kernel has to see each writer.
            if inode.replica.is_none() || inode.home().is_some() || inode.attr.perm & SET_IDS != 0 {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
        }
        // (In a pool the version that was closed before has a place of its own in the queue.)
        let open = self.metadata.open_of(id).filter(|_| self.metadata.pool.get().is_some());
        if open.is_some_and(|open| open.granted.load(Ordering::Relaxed)) {
            if !may_ask {
                return Err(STORE_TO_BE_ASKED.into());
            }
            self.descriptors.catch_up();
        }
        // The holder of the lock may be waiting for the store.
        let inode = if may_ask {
            self.metadata.lock_inode(id)
        } else {
            self.metadata.try_lock_inode(id).ok_or(STORE_TO_BE_ASKED)?
        };
        // Another member may have made the file a moment ago, and have the content.
        if self.metadata.read_tree().get(id).is_none_or(|inode| inode.home().is_some()) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        // (Other members have copies of the version that is to be written: the mount tells them.)
        if may_have_copies(&self.metadata, id) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        if closed::waits_for(&self.metadata, id) || self.dispatcher.is_asked(id) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        // The kernel's caches for the mount's readers stay while those read.
        let open =
            self.opener.open_locked(id, true, flags & libc::O_TRUNC != 0, self.runs.run(caller), Via::Shim(flags))?;
        self.descriptors.count_grants(&open);
        let file = self.descriptors.grant(caller, &open, None, flags)?;
        drop(inode);
        self.sealer.forget_attributes_for_sure(id);
        Ok(file)
    }

    fn grant_new(&self, caller: &Caller, dir: FileId, name: &[u8], perm: u32, flags: i32) -> FsResult<File> {
        if closed::waits_for_new(&self.metadata, dir, name) || self.dispatcher.is_asked_new(dir, name) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        let run = self.runs.run(caller);
        let made = self.names.make_file(caller, (dir, name), perm, run, Via::Shim(flags))?;
        self.metadata.granted.fetch_add(1, Ordering::Relaxed);
        let location = made.open.content().location;
        let roomy = matches!(location, Location::Tier(device) if self.delegation.may_delegate_at_all(caller) && self.delegation.may_hold_more(device));
        let mut tree = self.metadata.write_tree();
        let mut more = self.delegation.consider_delegation(&mut tree, caller, dir, &made.open, roomy);
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
            tree = self.metadata.write_tree();
            more = self.delegation.delegate(&mut tree, caller, dir, &made.open);
        }
        self.descriptors.grant(caller, &made.open, made.plain, flags)
    }
}
