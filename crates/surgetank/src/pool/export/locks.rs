//! Locks of programs at other members, held at this node's mount.
//!
//! * flock(2) is taken on the handle's own open file, and ends with it.
//! * A range is locked through an open file description that the lock owner has for the file. All handles of the owner
//!   share it, so its ranges do not exclude each other, as within a process.
//!
//! The danger that it avoids: a lock that outlives its owner. Where the agent decides locks, the kernel does not report
//! the end of such a description. So its end releases what it has locked.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::{Errno, retry_on_intr};

use super::holdings::{Holdings, OpenFile};
use super::place::{last_error, reopened};
use crate::pool::call::{Answer, Lock, LockKind};

/// The open file description of a lock owner.
#[derive(Debug)]
pub struct Description(OwnedFd);

impl Description {
    /// For locks of both kinds, if the file's mode permits both.
    fn of(file: &OpenFile) -> Result<Self, Errno> {
        let first = match reopened(&file.fd, OFlags::RDWR) {
            Ok(fd) => return Ok(Self(fd)),
            Err(error) => error,
        };
        reopened(&file.fd, OFlags::RDONLY).or_else(|_| reopened(&file.fd, OFlags::WRONLY)).map(Self).map_err(|_| first)
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        let mut all = range(libc::F_UNLCK, 0, 0);
        // A failure leaves nothing to do: the descriptor closes.
        let _ = fcntl(&self.0, libc::F_OFD_SETLK, &mut all);
    }
}

/// The lock that is in the way of a lock on a range.
pub fn test(of: &Holdings, handle: u64, lock: &Lock) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    if lock.flock || lock.kind == LockKind::None {
        return Err(Errno::INVAL);
    }
    let mut found = wanted(lock)?;
    match of.description(&file, lock.owner) {
        Some(description) => fcntl(&description.0, libc::F_OFD_GETLK, &mut found)?,
        // (The owner has locked nothing, and nothing is locked through the handle.)
        None => fcntl(&file.fd, libc::F_OFD_GETLK, &mut found)?,
    }
    let kind = match i32::from(found.l_type) {
        libc::F_UNLCK => return Ok(Answer::Lock(Lock { kind: LockKind::None, ..*lock })),
        libc::F_RDLCK => LockKind::Shared,
        _ => LockKind::Exclusive,
    };
    let last = if found.l_len == 0 { i64::MAX } else { found.l_start.saturating_add(found.l_len - 1) };
    let byte = |at: i64| u64::try_from(at).unwrap_or_default();
    // The kernel does not say which owner has the other lock.
    Ok(Answer::Lock(Lock { owner: 0, flock: false, kind, first: byte(found.l_start), last: byte(last) }))
}

/// Takes or releases a lock. Errors: EAGAIN, another lock is in the way.
pub fn set(of: &Holdings, handle: u64, lock: &Lock) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    if lock.flock {
        let operation = match lock.kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
            LockKind::None => FlockOperation::NonBlockingUnlock,
        };
        retry_on_intr(|| flock(&file.fd, operation))?;
        return Ok(Answer::Done);
    }
    let mut range = wanted(lock)?;
    let description = match of.description(&file, lock.owner) {
        Some(description) => description,
        // The owner has locked nothing.
        None if lock.kind == LockKind::None => return Ok(Answer::Done),
        None => of.described(&file, lock.owner, Arc::new(Description::of(&file)?))?,
    };
    match fcntl(&description.0, libc::F_OFD_SETLK, &mut range) {
        Err(Errno::ACCESS) => Err(Errno::AGAIN),
        result => result.map(|()| Answer::Done),
    }
}

/// The owner's locks on ranges of the file end.
pub fn end_of_owner(of: &Holdings, handle: u64, owner: u64) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    drop(of.undescribed(&file, owner));
    Ok(Answer::Done)
}

/// The range as the kernel takes it. Errors: EINVAL, there is no such range.
fn wanted(lock: &Lock) -> Result<libc::flock, Errno> {
    let byte = |at: u64| i64::try_from(at).map_err(|_| Errno::INVAL);
    let (first, last) = (byte(lock.first)?, byte(lock.last)?);
    if last < first {
        return Err(Errno::INVAL);
    }
    // (0: to the end.)
    let length = if last == i64::MAX { 0 } else { last - first + 1 };
    let kind = match lock.kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
        LockKind::None => libc::F_UNLCK,
    };
    Ok(range(kind, first, length))
}

fn range(kind: i32, first: i64, length: i64) -> libc::flock {
    // (The numbers of the three kinds are 0 to 2.)
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: first, l_len: length, l_pid: 0 }
}

fn fcntl(fd: &OwnedFd, command: i32, range: &mut libc::flock) -> Result<(), Errno> {
    retry_on_intr(|| {
        // SAFETY: both commands take a pointer to this structure, which lives during the call.
        let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(range)) };
        if result == -1 { Err(last_error()) } else { Ok(()) }
    })
}
