//! A file lock as programs ask for it and as it is held: between the mount, which decodes it, and the namespace, which
//! takes it.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    Shared,
    Exclusive,
    /// No lock: to unlock when asked for, "nobody is in the way" as an answer.
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLock {
    pub kind: LockKind,
    /// First and last byte; a lock to the end of the file, however long it gets, ends at `i64::MAX`.
    pub first: u64,
    pub last: u64,
    /// The process that asks or holds; 0 when it is not known.
    pub pid: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockRequest {
    /// The open file through which it is asked.
    pub handle: u64,
    /// Who asks, as the kernel tells lock owners apart: a process for POSIX locks, an open file for OFD locks and flock.
    pub owner: u64,
    /// flock(2): on the whole file, and independent of the locks on ranges.
    pub flock: bool,
    pub lock: FileLock,
}
