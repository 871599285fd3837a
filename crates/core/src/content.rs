//! The content of an open file: one plain file on a tier (or the store's own). Programs reach it directly, or the agent
//! mediates.
//!
//! Invariants: a file is wholly direct or wholly mediated from its first open to its last release. Only a mediated file
//! can move while it is written. The danger that this avoids: a writer continues in a plain file that is no longer the
//! content.

pub(crate) mod fetch;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use surgetank_state::{Name, PlainId};
use surgetank_store::Cred;
use surgetank_types::model::{DeviceId, FileId, StoreIdentity, Timestamp};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use surgetank_types::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::content::fetch::Fetch;

/// Where the plain file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    Tier(DeviceId),
    /// A temporary in the store to which the file was spilled.
    StoreTemporary,
    /// The store's own file.
    Store,
    /// Incomplete: the arrived part of a file from a store without plain files (`Open::fetch`). It has no writer.
    Arriving,
}

#[derive(Debug, Clone)]
pub struct Content {
    pub file: Arc<File>,
    pub location: Location,
    pub writable: bool,
}

#[derive(Debug, Default, Clone, Copy)]
pub struct Users {
    pub readers: u32,
    pub writers: u32,
}

/// An inode that a program has open.
#[derive(Debug)]
pub struct Open {
    pub id: FileId,
    /// Held for reading while bytes are read or written, for writing while the content moves elsewhere. Taken after the
    /// inode's lock and before the tree's.
    pub gate: RwLock<()>,
    /// The number of appends and cuts so far. Held during each: in a pool a file has two inodes in the kernel of its home, so the
    /// kernel's lock does not suffice. Taken after the gate.
    pub(crate) end: Mutex<u64>,
    /// The present content; a leaf lock, held for an instant.
    current: Mutex<Content>,
    /// Set while its bytes still come from a store without plain files; a leaf lock.
    fetch: Mutex<Option<Arc<Fetch>>>,
    /// Programs have the plain file itself open, through the kernel's passthrough or a granted descriptor: it stays
    /// where it is.
    pub direct: bool,
    /// The kernel's registration of the plain file; made when the first program comes through the mount.
    backing: Mutex<Option<u32>>,
    /// The agent granted writable descriptors of the plain file, and no report shows yet that all of them are closed.
    /// Counts as one of the writers in `users`.
    pub granted: AtomicBool,
    pub users: Mutex<Users>,
    /// Bytes that the device has charged for the content.
    pub charged_bytes: AtomicU64,
    /// Bytes reserved for direct writers beyond the charge.
    pub reserved_bytes: AtomicU64,
    /// Changed since the last seal, as far as the agent saw (a direct writer counts from its open).
    pub written: AtomicBool,
    /// A process had it open for direct writing.
    pub direct_writer: AtomicBool,
    /// The number of its handles that run it as a program.
    programs: AtomicUsize,
    /// For the store's own file: its version at the open.
    pub found: Option<StoreIdentity>,
    /// A process has, or had, a granted descriptor.
    was_granted: AtomicBool,
    /// A process that may not keep set-user-id and set-group-id has a granted descriptor.
    others: AtomicBool,
    /// The plain file's size and time when the file got one of these bits while descriptors were granted. A difference
    /// means that the plain file was written since. A leaf lock.
    unwritten: Mutex<Option<(i64, Timestamp)>>,
}

impl Open {
    pub fn new(id: FileId, content: Content, direct: bool, backing: Option<u32>, charged_bytes: u64) -> Self {
        Self {
            id,
            gate: RwLock::new(()),
            end: Mutex::default(),
            current: Mutex::new(content),
            fetch: Mutex::default(),
            direct,
            backing: Mutex::new(backing),
            granted: AtomicBool::new(false),
            users: Mutex::default(),
            charged_bytes: AtomicU64::new(charged_bytes),
            reserved_bytes: AtomicU64::new(0),
            written: AtomicBool::new(false),
            direct_writer: AtomicBool::new(false),
            programs: AtomicUsize::new(0),
            found: None,
            was_granted: AtomicBool::new(false),
            others: AtomicBool::new(false),
            unwritten: Mutex::default(),
        }
    }
    /// The content counts as written, now and when the write has ended: an fsync in between takes the mark away, and
    /// must not take this write for one that it brought to the store.
    pub(crate) fn mark_written(&self) -> WriteMark<'_> {
        self.written.store(true, Ordering::Relaxed);
        WriteMark(&self.written)
    }
    /// A process of this user gets a writable descriptor of the plain file.
    pub fn granted_to(&self, uid: u32) {
        self.was_granted.store(true, Ordering::Relaxed);
        self.others.fetch_or(uid != 0, Ordering::Relaxed);
    }
    /// Is the plain file empty, and has no process had a descriptor of it?
    pub(crate) fn is_untouched(&self) -> bool {
        let is_granted = self.was_granted.load(Ordering::Relaxed) || self.granted.load(Ordering::Relaxed);
        !is_granted && self.content().file.metadata().is_ok_and(|plain| plain.len() == 0)
    }
    /// `plain`: the plain file, of which descriptors are granted; `None`: the file has neither bit.
    pub(crate) fn watch_writes_of_others(&self, plain: Option<&rustix::fs::Stat>) {
        *self.unwritten.lock().unwrap_or_else(PoisonError::into_inner) = plain.map(written_at);
    }
    pub(crate) fn is_watched(&self) -> bool {
        self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
    /// Has a process that may not keep these bits written the file since it has them?
    pub(crate) fn is_written_by_others(&self, plain: &rustix::fs::Stat) -> bool {
        let unwritten = *self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        self.others.load(Ordering::Relaxed) && unwritten.is_some_and(|then| then != written_at(plain))
    }
    pub fn content(&self) -> Content {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub fn replace(&self, content: Content) {
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = content;
    }
    /// The fetch, while bytes are still coming.
    pub(crate) fn fetch(&self) -> Option<Arc<Fetch>> {
        self.fetch.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn set_fetch(&self, fetch: Arc<Fetch>) {
        *self.fetch.lock().unwrap_or_else(PoisonError::into_inner) = Some(fetch);
    }
    /// Ends the fetch: all bytes are there, or they are not needed any more. The new content must be in place before.
    pub(crate) fn take_fetch(&self) -> Option<Arc<Fetch>> {
        self.fetch.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
    /// The kernel's registration; `register` makes it if there is none yet.
    pub fn backing_or(&self, register: impl FnOnce(&Content) -> Option<u32>) -> Option<u32> {
        let mut backing = self.backing.lock().unwrap_or_else(PoisonError::into_inner);
        if backing.is_none() && self.direct {
            *backing = register(&self.content());
        }
        *backing
    }
    pub fn take_backing(&self) -> Option<u32> {
        self.backing.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
    pub fn directly_written(&self) -> bool {
        self.direct && self.direct_writer.load(Ordering::Relaxed)
    }
    pub fn is_run(&self) -> bool {
        self.programs.load(Ordering::Relaxed) > 0
    }
    pub fn is_unused(&self) -> bool {
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.writers == 0 && users.readers == 0
    }
    pub fn writers(&self) -> u32 {
        self.users.lock().unwrap_or_else(PoisonError::into_inner).writers
    }
}

/// Marks the content as written again when the write has ended.
pub(crate) struct WriteMark<'a>(&'a AtomicBool);

impl Drop for WriteMark<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn written_at(plain: &rustix::fs::Stat) -> (i64, Timestamp) {
    (plain.st_size, Timestamp::from_parts(plain.st_mtime, plain.st_mtime_nsec as u32))
}

/// One open file description, as the mount knows it.
#[derive(Debug)]
pub struct Handle {
    pub id: FileId,
    pub open: Arc<Open>,
    pub reads: bool,
    pub writes: bool,
    runs: bool,
}

impl Handle {
    /// `flags`: the kernel's flags of the open.
    pub fn new(open: Arc<Open>, writes: bool, flags: i32) -> Self {
        let runs = runs_it(flags);
        open.programs.fetch_add(usize::from(runs), Ordering::Relaxed);
        Self { id: open.id, open, reads: flags & libc::O_ACCMODE != libc::O_WRONLY, writes, runs }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.open.programs.fetch_sub(usize::from(self.runs), Ordering::Relaxed);
    }
}

/// Does the kernel open the file to run it as a program? FMODE_EXEC (linux/fs.h), which it passes on to a FUSE file system.
pub(crate) fn runs_it(flags: i32) -> bool {
    flags & 0x20 != 0
}

/// Appends to a plain file that processes may append to at the same time.
pub(crate) fn append_all(file: &File, data: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    std::fs::OpenOptions::new().append(true).open(path)?.write_all(data)
}

/// A second descriptor, for writing, of a file that the agent holds read-only. (The agent's descriptors are read-only
/// so that they do not prevent its own leases.)
pub fn reopen_writable(file: &File) -> std::io::Result<File> {
    use std::os::fd::AsRawFd;
    std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
}

/// A new version's plain file, before an inode has it.
pub(crate) struct Placed {
    pub content: Content,
    pub direct: bool,
    pub reserved_bytes: u64,
    /// The temporary, if the store itself was chosen: its directory, its name and its owner.
    pub spill: Option<(FileId, Name, Cred)>,
    pub reason: Arc<str>,
    /// Meaningless if the store was chosen.
    pub plain: PlainId,
    /// Its present path on the tier.
    pub at: Vec<u8>,
    /// The descriptor with which it was made, for reading and writing, if processes will have it directly.
    pub made: Option<std::fs::File>,
}

/// (Only the agent writes a mediated file.)
pub(crate) fn has_direct_writer(open: &Open, content: &Content) -> bool {
    let directly = open.direct_writer.load(Ordering::Relaxed) && matches!(content.location, Location::Tier(_));
    directly && !has_no_writer(content)
}

/// The kernel grants a read lease exactly when no writer exists: no descriptor, no duplicate, no shared mapping.
pub(crate) fn has_no_writer(content: &Content) -> bool {
    lease_is_granted(&content.file, libc::F_RDLCK)
}

/// A write lease: granted when no other descriptor of the file is open.
pub(crate) fn is_open_only_here(file: &std::fs::File) -> bool {
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
