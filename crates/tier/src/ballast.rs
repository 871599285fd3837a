//! Ballast: a preallocated file beside `files/`, thrown overboard when a direct writer runs out of room.
//!
//! A program with a direct descriptor gets the device's ENOSPC itself; while the agent evicts for it, the ballast's
//! blocks keep it going. `release` gives them back at once; `refill` takes them again when the device has plenty.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

const NAME: &str = "ballast";
const BYTES_MAX: u64 = 64 << 20;
/// Taken only where this many times as much is free.
const PLENTY: u64 = 4;

/// How much ballast a device with this cap carries.
pub(super) fn size_bytes(cap_bytes: u64) -> u64 {
    (cap_bytes / 100).min(BYTES_MAX)
}

/// Is there room to take ballast on again?
pub(super) fn affordable(ballast_bytes: u64, free_bytes: u64) -> bool {
    ballast_bytes > 0 && free_bytes / PLENTY >= ballast_bytes
}

/// Allocates the ballast in the scope directory. A file system that cannot allocate ahead carries none.
pub(super) fn refill(scope: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: OwnedFd = rustix::fs::openat(scope, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)).inspect_err(|_| {
        // Half an allocation would be use that nobody accounts for.
        let _ = rustix::fs::unlinkat(scope, NAME, AtFlags::empty());
    })
}

/// Gives the blocks back; absent is fine.
pub(super) fn release(scope: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::unlinkat(scope, NAME, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        outcome => outcome,
    }
}
