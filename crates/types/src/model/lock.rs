//! A file lock as a program requests it and as the namespace holds it. The mount decodes it; the namespace grants it.

/// Type of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// A read lock (`F_RDLCK`, `LOCK_SH`).
    Shared,
    /// A write lock (`F_WRLCK`, `LOCK_EX`).
    Exclusive,
    /// No lock (`F_UNLCK`): in a request, unlock; in an answer, no conflicting lock exists.
    None,
}

/// A lock on a range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLock {
    /// Type of the lock.
    pub kind: LockKind,
    /// First byte of the range.
    pub first: u64,
    /// Last byte of the range, inclusive. `i64::MAX` means the end of the file, however long it becomes.
    pub last: u64,
    /// The process that requests or holds the lock; 0 when it is unknown.
    pub pid: u32,
}

/// A program's request for a lock on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockRequest {
    /// The handle of the open file through which the program asks.
    pub handle: u64,
    /// The kernel's number of the lock owner: a process for POSIX locks, an open file for OFD locks and flock.
    pub owner: u64,
    /// flock(2): the lock covers the whole file and is independent of the locks on ranges.
    pub flock: bool,
    /// The lock that the program requests.
    pub lock: FileLock,
}
