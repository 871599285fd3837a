//! Backing files: the kernel reads, writes and maps them itself for open files of the mount (passthrough).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::thread::{CapabilitySet, CapabilitySets};

use super::abi::device;

/// A backing file that is registered with the kernel for open files (passthrough). The kernel keeps it open until
/// [`super::Notifier::backing_close`] **and** the close of the last open file that uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackingId(u32);

impl BackingId {
    /// A backing id that an earlier server of this mount received.
    pub(crate) fn of(raw: u32) -> Self {
        Self(raw)
    }
    pub(crate) fn raw(self) -> u32 {
        self.0
    }
}

/// Registers `file` with the kernel. [`super::Notifier::backing_open`] says what it must be.
pub(super) fn open(device: &OwnedFd, file: impl AsFd) -> io::Result<BackingId> {
    let _aside = FsetidAside::put()?;
    let map = device::BackingMap { fd: file.as_fd().as_raw_fd(), flags: 0, padding: 0 };
    // SAFETY: the ioctl reads one `BackingMap` through the pointer, which lives across the call.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), device::BACKING_OPEN.into(), &raw const map) };
    u32::try_from(id).map(BackingId).map_err(|_negative| io::Error::last_os_error())
}

pub(super) fn close(device: &OwnedFd, id: BackingId) -> io::Result<()> {
    // SAFETY: the ioctl reads one `u32` through the pointer, which lives across the call.
    let outcome = unsafe { libc::ioctl(device.as_raw_fd(), device::BACKING_CLOSE.into(), &raw const id.0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// CAP_FSETID is not effective in this thread until the value is dropped.
struct FsetidAside {
    before: CapabilitySets,
}

impl FsetidAside {
    fn put() -> io::Result<Self> {
        let before = rustix::thread::capabilities(None)?;
        let effective = before.effective.difference(CapabilitySet::FSETID);
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..before })?;
        Ok(Self { before })
    }
}

impl Drop for FsetidAside {
    fn drop(&mut self) {
        if let Err(errno) = rustix::thread::set_capabilities(None, self.before) {
            tracing::error!(%errno, "CAP_FSETID did not come back; setgid bits of new files may be lost");
        }
    }
}
