//! Ballast: a preallocated file beside the files' directory, released when a direct writer runs out of space.
//!
//! A program with a direct descriptor gets the device's ENOSPC itself. While the agent evicts files for it, the ballast's
//! blocks are its supply. [`release`] frees them at once; [`refill`] allocates them again when the device has plenty.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

const NAME: &str = "ballast";
const BYTES_MAX: u64 = 64 << 20;
/// Ballast is allocated only where this many times as much is free.
const PLENTY: u64 = 4;

/// Size of the ballast of a device with this cap.
pub(super) fn size_bytes(cap_bytes: u64) -> u64 {
    (cap_bytes / 100).min(BYTES_MAX)
}

/// Whether there is enough free space to allocate the ballast.
pub(super) fn affordable(ballast_bytes: u64, free_bytes: u64) -> bool {
    ballast_bytes > 0 && free_bytes / PLENTY >= ballast_bytes
}

/// Allocates the ballast in the scope directory. A file system that cannot preallocate has none.
pub(super) fn refill(scope: BorrowedFd<'_>, bytes: u64) -> Result<(), Errno> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: OwnedFd = rustix::fs::openat(scope, NAME, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)).inspect_err(|_| {
        // A partial allocation would be use that no ledger counts.
        let _ = rustix::fs::unlinkat(scope, NAME, AtFlags::empty());
    })
}

/// Frees the blocks; no ballast is not an error.
pub(super) fn release(scope: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::unlinkat(scope, NAME, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        outcome => outcome,
    }
}
