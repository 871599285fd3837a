//! The shared file: mapped by the agent for writing, by everybody else for reading.
//!
//! It has its full size from the beginning and never shrinks, so nobody can run off its end; what is used of it is
//! allocated before it is touched, or a full file system would kill the agent instead of telling it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::Header;

pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    file: File,
    path: PathBuf,
}

// SAFETY: the mapping belongs to this value alone in the process; all writes go through `Index`, behind a lock.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new file, only ours; what an earlier agent left under the name goes.
    pub fn create(path: &Path, bytes: usize) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
            _ => {}
        }
        let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        let memory = file.set_len(bytes as u64).and_then(|()| {
            // SAFETY: a fresh mapping at an address that the kernel chooses.
            let base = unsafe {
                rustix::mm::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::NORESERVE,
                    file.as_fd(),
                    0,
                )
            }?;
            NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
        });
        match memory {
            Ok(base) => Ok(Self { base, bytes, file, path: path.to_path_buf() }),
            Err(why) => {
                drop(std::fs::remove_file(path));
                Err(why)
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.bytes);
        // SAFETY: offsets come from tables that were laid out within `bytes`.
        unsafe { self.base.as_ptr().add(offset) }
    }

    pub fn header(&self) -> *mut Header {
        self.at(0).cast()
    }

    /// Room in the file system for these bytes. `false`: there is none.
    pub fn provide(&self, offset: usize, bytes: usize) -> bool {
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset as u64, bytes as u64).is_ok()
    }

    /// Readers keep away while `act` runs.
    pub fn while_unsettled(&self, act: impl FnOnce()) {
        let generation = self.word(std::mem::offset_of!(Header, generation));
        generation.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        act();
        fence(Ordering::SeqCst);
        generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Until then (CLOCK_MONOTONIC) the index may be believed.
    pub fn live_until(&self, nanoseconds: u64) {
        self.word(std::mem::offset_of!(Header, alive_until_ns)).store(nanoseconds, Ordering::Release);
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the header, which is mapped as long as `self` lives.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.live_until(0);
        drop(std::fs::remove_file(&self.path));
        // SAFETY: nothing of ours points into the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
