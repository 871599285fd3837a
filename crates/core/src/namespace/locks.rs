//! File locks of programs on the mount. They also exclude locks that processes take on the plain file itself.
//!
//! Only the kernel's own locks are visible at both doors. So the agent takes a lock of the mount on the file's *proxy*,
//! with a description (an open file) of its own. The proxy is the file's plain file on a tier. Without one, it is a
//! file in memory that only the agent has. A flock becomes flock(2) on a description for each open file of the mount.
//! Ranges become OFD locks on a description for each lock owner.
//!
//! Invariants:
//! - The proxy stays the same while a description exists, wherever the content goes: a new description is always made
//!   from an existing one.
//! - A description ends, with its locks, at FLUSH of its owner (ranges) and at RELEASE of a handle through which it was used.
//! - A writable description exists only while a handle that writes does. Otherwise the lease that seals the file would
//!   fail. So reading handles get read-only descriptions, which suffice for shared locks and for flock.
//! - The locks of this file are leaves: the namespace locks nothing under them, and no request goes to a store.
//!
//! A wait repeats the request: soon after an unlock here, otherwise at growing intervals. The kernel could wait
//! instead, but then the agent could not interrupt the thread when the program gets a signal. Deadlocks are not
//! detected (EDEADLK).
//!
//! The danger that this avoids: two programs hold the same exclusive lock through different doors.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags};

use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, FileLock, LockKind, LockRequest};
use surgetank_types::sync::atomic::{AtomicUsize, Ordering};
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::base::Base;
use crate::base::succession::Keeper;
use crate::base::waits::Waits;
use crate::content::{Handle, Location};
use crate::files::Files;
use crate::files::open_files::OpenFiles;

const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);
/// When many requests wait.
const PAUSE_CROWDED_MAX: Duration = Duration::from_millis(300);
/// A request without a wait is refused only after this time if the holder's end is reported late. `close` returns
/// before RELEASE is served, and a program that starts after the holder's end must find the lock free.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(20);
/// Each waiting request uses a thread of the mount.
const WAITING_MAX: usize = 1024;
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Files on which programs have locks, or had them until a close.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    files: Mutex<HashMap<FileId, Arc<Locked>>>,
    waiting: AtomicUsize,
    /// Holds descriptions beyond this agent's death.
    guardian: Guardian,
}

#[derive(Debug, Default)]
struct Locked {
    descriptions: Mutex<Descriptions>,
    /// Signalled after an unlock.
    freed: Condvar,
}

/// All descriptions have one proxy.
#[derive(Debug, Default)]
struct Descriptions {
    list: Vec<Description>,
    /// The entry is no longer in the table: look there again.
    struck: bool,
}

/// The party that holds the locks of a description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Party {
    /// flock: an open file of the mount.
    Handle(u64),
    /// Ranges: a process, or with OFD locks an open file; identified by the kernel's number for it.
    Owner(u64),
}

#[derive(Debug)]
struct Description {
    party: Party,
    file: File,
    writable: bool,
    /// The process that used it last.
    pid: u32,
    /// Open files of the mount through which it was used.
    handles: Vec<u64>,
    /// Its end is reported some time after `close`. This concerns flock, a handle that does not ask for FLUSH, and
    /// locks that remain after FLUSH.
    ends_late: bool,
    /// The supervisor also holds it, under this name: its locks outlive the agent.
    kept: Option<Kept>,
}

#[derive(Debug, Clone)]
struct Kept {
    name: String,
    keeper: Guardian,
}

/// The keeper of descriptions, in a form that implements `Debug`.
#[derive(Clone, Default)]
struct Guardian(Option<Arc<dyn Keeper>>);

impl std::fmt::Debug for Guardian {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "a keeper" } else { "no keeper" })
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        self.release();
    }
}

impl Description {
    /// The description has a lock now, so the keeper gets it.
    fn is_kept_by(&mut self, guardian: &Guardian, id: FileId, asked: &LockRequest) {
        if self.kept.is_none() {
            self.kept = keep(guardian, id, self.party, asked, self.writable, &self.file);
        }
    }

    /// Removes the locks first, because the supervisor closes its own copy a moment later.
    fn release(&mut self) {
        let Some(Kept { name, keeper }) = self.kept.take() else { return };
        let _ = rustix::fs::flock(&self.file, FlockOperation::NonBlockingUnlock);
        let all = FileLock { kind: LockKind::None, first: 0, last: OFFSET_MAX, pid: 0 };
        let _ = set_range(&self.file, &all);
        if let Some(keeper) = keeper.0 {
            keeper.give_up(&name);
        }
    }
}

/// Locks that programs set on files.
pub struct FileLocks {
    waits: Arc<Waits>,
    open_files: Arc<OpenFiles>,
    locks: Locks,
}

impl FileLocks {
    pub(crate) fn new(base: &Base, files: &Files, keeper: Option<Arc<dyn Keeper>>) -> Self {
        Self { waits: base.waits.clone(), open_files: files.open_files.clone(), locks: Locks::kept_by(keeper) }
    }

    /// Takes or releases a lock. `EAGAIN` when another lock conflicts and `wait` is false.
    pub fn lock(&self, id: FileId, asked: &LockRequest, wait: bool) -> FsResult<()> {
        let handle = self.open_files.handle(asked.handle)?;
        let party = Party::of(asked);
        if asked.lock.kind == LockKind::None {
            return self.locks.unlock(id, party, asked);
        }
        let place = match Waiting::new(&self.locks.waiting) {
            Err(fault) if wait => return Err(fault),
            place => place.ok(),
        };
        let timeout_at = clock::tick() + if place.is_some() { RELEASE_TIMEOUT } else { Duration::ZERO };
        let mut pause = PAUSE_FIRST;
        loop {
            let locked = self.locks.of(id);
            let mut descriptions = locked.descriptions();
            if descriptions.struck {
                continue;
            }
            let outcome = descriptions.take(&handle, party, asked, &self.locks.guardian);
            if !matches!(outcome, Ok(false)) {
                self.locks.strike_unused(id, &mut descriptions);
                return outcome.map(drop).map_err(refused);
            }
            let left = timeout_at.saturating_duration_since(clock::tick());
            if !wait && (left.is_zero() || !descriptions.others_end_late(party)) {
                self.locks.strike_unused(id, &mut descriptions);
                return Err(Errno::AGAIN.into());
            }
            if wait && self.waits.is_interrupted() {
                self.locks.strike_unused(id, &mut descriptions);
                return Err(Errno::INTR.into());
            }
            let at_most = if wait { (pause * self.locks.crowd()).min(PAUSE_CROWDED_MAX) } else { pause.min(left) };
            let timeout = locked.freed.wait_timeout(descriptions, at_most);
            let freed = !timeout.unwrap_or_else(PoisonError::into_inner).1.timed_out();
            pause = if freed { PAUSE_FIRST } else { (pause * 2).min(PAUSE_MAX) };
        }
    }

    /// The lock that conflicts with a range; kind `None` without a conflict.
    pub fn lock_in_the_way(&self, id: FileId, asked: &LockRequest) -> FsResult<FileLock> {
        let handle = self.open_files.handle(asked.handle)?;
        let party = Party::of(asked);
        let locked = self.locks.find(id);
        let descriptions = locked.as_deref().map(Locked::descriptions);
        let list = descriptions.as_ref().map_or(&[][..], |descriptions| &descriptions.list);
        let fresh;
        let file = match list.iter().find(|description| description.party == party) {
            Some(own) => &own.file,
            None => match list.first().map(|any| reopen(&any.file, false)).or_else(|| plain_file(&handle, false)) {
                Some(file) => {
                    fresh = file.map_err(refused)?;
                    &fresh
                }
                None => return Ok(FileLock { kind: LockKind::None, ..asked.lock }),
            },
        };
        let found = range_in_the_way(file, &asked.lock).map_err(refused)?;
        // The kernel knows no process for an OFD lock; for its own descriptions the agent does.
        let ours = list.iter().filter(|description| matches!(description.party, Party::Owner(_)));
        let holder = ours.filter(|description| description.party != party).find(|description| {
            let ranges = ranges_of(&description.file).unwrap_or_default();
            ranges.iter().any(|range| (range.first, range.last) == (found.first, found.last))
        });
        Ok(FileLock { pid: holder.map_or(found.pid, |holder| holder.pid), ..found })
    }

    /// A process closed one of its descriptors of the file, or ended: its POSIX locks end. If it was the open file's
    /// last descriptor, RELEASE follows and ends the OFD locks. A request does not say which locks are OFD locks.
    pub fn unlock_owner(&self, id: FileId, handle: u64, owner: u64) {
        self.locks.end(id, |description| {
            description.ends_late |= description.handles.contains(&handle);
            description.party == Party::Owner(owner)
        });
    }

    /// An open file of the mount has ended, with all locks that were taken through it. Called before the file is released.
    pub fn unlock_handle(&self, id: FileId, handle: u64) {
        self.locks.end(id, |description| description.handles.contains(&handle));
    }

    /// Takes over the locks that an earlier agent held for programs. They were never released.
    pub(crate) fn restore_locks(&self, kept: &mut HashMap<String, File>) {
        let names: Vec<String> = kept.keys().filter(|name| name.starts_with(KEPT_AS)).cloned().collect();
        for name in names {
            let words: Vec<&str> = name[KEPT_AS.len()..].split('-').collect();
            let [id, kind, number, handle, pid, access] = words[..] else { continue };
            let Some(file) = kept.remove(&name) else { continue };
            let (Ok(id), Ok(number), Ok(handle), Ok(pid)) = (id.parse(), number.parse(), handle.parse(), pid.parse())
            else {
                continue;
            };
            let party = if kind == "h" { Party::Handle(number) } else { Party::Owner(number) };
            let kept = Some(Kept { name: name.clone(), keeper: self.locks.guardian.clone() });
            let description = Description {
                party,
                file,
                writable: access == "w",
                pid,
                handles: vec![handle],
                // The agent does not know any more whether its end would be reported.
                ends_late: true,
                kept,
            };
            // Otherwise the open file ended while no agent served.
            if self.open_files.handle(handle).is_ok() {
                self.locks.of(FileId(id)).descriptions().list.push(description);
            }
        }
    }
}

impl Locks {
    pub fn kept_by(keeper: Option<Arc<dyn Keeper>>) -> Self {
        Self { guardian: Guardian(keeper), ..Self::default() }
    }

    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Arc<Locked>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With many waiting requests, each one tries less often, so that together they leave time for other work.
    fn crowd(&self) -> u32 {
        u32::try_from(self.waiting.load(Ordering::Relaxed) / 16).unwrap_or(u32::MAX).max(1)
    }

    /// In a crowd, only one request is woken, and the next one after that one unlocks: all others would fail.
    fn hand_off(&self, locked: &Locked) {
        match self.crowd() {
            1 => locked.freed.notify_all(),
            _ => locked.freed.notify_one(),
        }
    }

    fn find(&self, id: FileId) -> Option<Arc<Locked>> {
        self.files().get(&id).cloned()
    }

    fn of(&self, id: FileId) -> Arc<Locked> {
        self.files().entry(id).or_default().clone()
    }

    /// Lock order: an entry, then the table.
    fn strike_unused(&self, id: FileId, descriptions: &mut Descriptions) {
        if descriptions.list.is_empty() && !std::mem::replace(&mut descriptions.struck, true) {
            self.files().remove(&id);
        }
    }

    fn end(&self, id: FileId, ends: impl Fn(&mut Description) -> bool) {
        let Some(locked) = self.find(id) else { return };
        let mut descriptions = locked.descriptions();
        descriptions.list.retain_mut(|description| !ends(description));
        self.strike_unused(id, &mut descriptions);
        self.hand_off(&locked);
    }

    fn unlock(&self, id: FileId, party: Party, asked: &LockRequest) -> FsResult<()> {
        let Some(locked) = self.find(id) else { return Ok(()) };
        let mut descriptions = locked.descriptions();
        match (party, descriptions.list.iter().position(|description| description.party == party)) {
            (_, None) => {}
            (Party::Handle(_), Some(at)) => {
                // Kept until the handle ends: another open for the next lock costs more than the lock.
                let description = &mut descriptions.list[at];
                description.ends_late = false;
                rustix::fs::flock(&description.file, FlockOperation::NonBlockingUnlock)
                    .map_err(|errno| refused(errno.into()))?;
            }
            (Party::Owner(_), Some(at)) => {
                set_range(&descriptions.list[at].file, &asked.lock).map_err(refused)?;
            }
        }
        self.strike_unused(id, &mut descriptions);
        self.hand_off(&locked);
        Ok(())
    }
}

impl Locked {
    fn descriptions(&self) -> MutexGuard<'_, Descriptions> {
        self.descriptions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Party {
    fn of(asked: &LockRequest) -> Self {
        if asked.flock { Self::Handle(asked.handle) } else { Self::Owner(asked.owner) }
    }
}

impl Descriptions {
    /// `false`: another lock conflicts.
    fn take(&mut self, handle: &Handle, party: Party, asked: &LockRequest, guardian: &Guardian) -> io::Result<bool> {
        let at = self.description(handle, party, asked, guardian)?;
        let description = &mut self.list[at];
        description.pid = asked.lock.pid;
        if !description.handles.contains(&asked.handle) {
            description.handles.push(asked.handle);
        }
        description.ends_late |= asked.flock || !(handle.reads && handle.writes);
        if !asked.flock {
            let taken = set_range(&description.file, &asked.lock)?;
            if taken {
                description.is_kept_by(guardian, handle.id, asked);
            }
            return Ok(taken);
        }
        let operation = match asked.lock.kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
            LockKind::None => FlockOperation::NonBlockingUnlock,
        };
        match rustix::fs::flock(&description.file, operation) {
            Ok(()) => {
                description.is_kept_by(guardian, handle.id, asked);
                Ok(true)
            }
            Err(Errno::WOULDBLOCK) => {
                // A failed change of a lock also loses the old lock, as flock(2) says.
                self.list.swap_remove(at);
                Ok(false)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// The index of the party's description. Makes one if it does not exist, and makes it writable if the request needs that.
    fn description(
        &mut self,
        handle: &Handle,
        party: Party,
        asked: &LockRequest,
        guardian: &Guardian,
    ) -> io::Result<usize> {
        let writable = !asked.flock && (handle.writes || asked.lock.kind == LockKind::Exclusive);
        let own = self.list.iter().position(|description| description.party == party);
        if let Some(at) = own
            && (self.list[at].writable || !writable)
        {
            return Ok(at);
        }
        let (file, writable) = match self.open(handle, writable) {
            Err(why) if asked.lock.kind != LockKind::Shared => return Err(why),
            Err(_) => (self.open(handle, false)?, false),
            Ok(file) => (file, writable),
        };
        match own {
            Some(at) => {
                // It has only shared locks. Both files can hold them at once, so no other lock comes in between.
                for range in ranges_of(&self.list[at].file)? {
                    set_range(&file, &range)?;
                }
                self.list[at].release();
                self.list[at].kept = keep(guardian, handle.id, party, asked, writable, &file);
                self.list[at].file = file;
                self.list[at].writable = writable;
                Ok(at)
            }
            None => {
                let (pid, handles) = (asked.lock.pid, vec![asked.handle]);
                // The keeper gets it with its first lock, because waiting requests try often.
                self.list.push(Description { party, file, writable, pid, handles, ends_late: false, kept: None });
                Ok(self.list.len() - 1)
            }
        }
    }

    /// A new description of the proxy.
    fn open(&self, handle: &Handle, writable: bool) -> io::Result<File> {
        if let Some(any) = self.list.first() {
            return reopen(&any.file, writable);
        }
        match plain_file(handle, writable) {
            Some(file) => file,
            None => Ok(File::from(rustix::fs::memfd_create("surgetank-lock", MemfdFlags::CLOEXEC)?)),
        }
    }

    fn others_end_late(&self, party: Party) -> bool {
        self.list.iter().any(|description| description.party != party && description.ends_late)
    }
}

/// Prefix of a kept description's name. The name contains everything that the next agent needs.
const KEPT_AS: &str = "lock-";

fn keep(
    guardian: &Guardian,
    id: FileId,
    party: Party,
    asked: &LockRequest,
    writable: bool,
    file: &File,
) -> Option<Kept> {
    let keeper = guardian.0.as_ref()?;
    let (kind, number) = match party {
        Party::Handle(number) => ('h', number),
        Party::Owner(number) => ('o', number),
    };
    let name = format!(
        "{KEPT_AS}{}-{kind}-{number}-{}-{}-{}",
        id.0,
        asked.handle,
        asked.lock.pid,
        if writable { 'w' } else { 'r' }
    );
    let kept = keeper.keep(&name, file.as_fd());
    kept.inspect_err(|why| tracing::warn!(%why, "a lock would not survive this agent")).ok()?;
    Some(Kept { name, keeper: guardian.clone() })
}

/// A waiting request, counted while this value exists.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(count: &'a AtomicUsize) -> FsResult<Self> {
        let place = Self(count);
        if count.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
            return Err(Fault::new(Errno::NOLCK, format!("{WAITING_MAX} programs wait for locks already")));
        }
        Ok(place)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The plain file on a tier, where other processes may have locks.
fn plain_file(handle: &Handle, writable: bool) -> Option<io::Result<File>> {
    let content = handle.open.content();
    matches!(content.location, Location::Tier(_)).then(|| reopen(&content.file, writable))
}

/// Another description of the same file, even after a rename or deletion. If a seal is testing a lease at this moment,
/// the kernel waits until the seal returns the lease, which is at once.
fn reopen(file: &File, writable: bool) -> io::Result<File> {
    let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(File::from(rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?))
}

fn flock_of(lock: &FileLock) -> libc::flock {
    let kind = match lock.kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
        LockKind::None => libc::F_UNLCK,
    };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: lock.first as i64,
        // 0: to the end of the file, even if the file grows.
        l_len: if lock.last >= OFFSET_MAX { 0 } else { (lock.last - lock.first + 1) as i64 },
        l_pid: 0,
    }
}

/// `false`: another lock conflicts.
fn set_range(file: &File, lock: &FileLock) -> io::Result<bool> {
    let asked = flock_of(lock);
    // SAFETY: F_OFD_SETLK reads one `flock`, which lives across the call; the descriptor is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const asked) } == 0 {
        return Ok(true);
    }
    let why = io::Error::last_os_error();
    if matches!(why.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) { Ok(false) } else { Err(why) }
}

fn range_in_the_way(file: &File, lock: &FileLock) -> io::Result<FileLock> {
    let mut found = flock_of(lock);
    // SAFETY: F_OFD_GETLK reads and writes one `flock`, which lives across the call; the descriptor is open.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let kind = match i32::from(found.l_type) {
        libc::F_RDLCK => LockKind::Shared,
        libc::F_WRLCK => LockKind::Exclusive,
        _ => return Ok(FileLock { kind: LockKind::None, ..*lock }),
    };
    let first = u64::try_from(found.l_start).unwrap_or(0);
    let last =
        u64::try_from(found.l_len).ok().filter(|length| *length > 0).map_or(OFFSET_MAX, |length| first + length - 1);
    Ok(FileLock { kind, first, last, pid: u32::try_from(found.l_pid).unwrap_or(0) })
}

/// The ranges that a description of the agent has locked. Only /proc shows them: `N: OFDLCK ADVISORY READ PID DEVICE
/// FIRST LAST`.
fn ranges_of(file: &File) -> io::Result<Vec<FileLock>> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let range = |line: &str| {
        let words: Vec<&str> = line.strip_prefix("lock:")?.split_whitespace().collect();
        let [_, "OFDLCK", _, kind, _, _, first, last] = words[..] else { return None };
        let kind = if kind == "READ" { LockKind::Shared } else { LockKind::Exclusive };
        let last = if last == "EOF" { OFFSET_MAX } else { last.parse().ok()? };
        Some(FileLock { kind, first: first.parse().ok()?, last, pid: 0 })
    };
    Ok(text.lines().filter_map(range).collect())
}

/// Distinguishes the failure from a conflict with another lock, and from an error of the program's own file.
fn refused(why: io::Error) -> Fault {
    Fault::new(Errno::NOLCK, format!("the lock cannot be taken: {why}"))
}
