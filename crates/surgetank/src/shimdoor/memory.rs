//! The shared file: the agent maps it for writing, all other processes map it for reading.
//!
//! It has its full size from the beginning and never shrinks, so no reader can run off its end. The used part is
//! allocated before it is touched; otherwise a full file system would kill the agent instead of returning an error.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::FallocateFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::Header;
use super::leftovers;

pub struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    file: File,
    path: PathBuf,
    /// Programs have mapped it from an earlier agent, and distrust it until it is filled again.
    unsettled: AtomicBool,
}

// SAFETY: the mapping belongs to this value alone in the process; all writes go through `Index`, behind a lock.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new file for this user only; an earlier agent's file with this name is removed.
    pub fn create(path: &Path, bytes: usize) -> io::Result<Self> {
        let file = leftovers::create(path)?;
        let memory = file.set_len(bytes as u64).and_then(|()| map(&file, bytes));
        match memory {
            Ok(base) => Ok(Self { base, bytes, file, path: path.to_path_buf(), unsettled: AtomicBool::new(false) }),
            Err(why) => {
                drop(std::fs::remove_file(path));
                Err(why)
            }
        }
    }

    /// The file of an earlier agent, which programs have mapped: emptied, and distrusted until [`Memory::settle`].
    pub fn take_over(path: &Path, bytes: usize, keep_bytes: usize) -> io::Result<Self> {
        unsettle(path)?;
        let file = leftovers::open(path)?;
        if !leftovers::mark_used(&file) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if file.metadata()?.len() != bytes as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let base = map(&file, bytes)?;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, keep_bytes as u64, (bytes - keep_bytes) as u64)?;
        Ok(Self { base, bytes, file, path: path.to_path_buf(), unsettled: AtomicBool::new(true) })
    }

    pub fn is_taken_over(&self) -> bool {
        self.unsettled.load(Ordering::Relaxed)
    }

    /// It is filled: programs may trust it.
    pub fn settle(&self) {
        if self.unsettled.swap(false, Ordering::SeqCst) {
            fence(Ordering::SeqCst);
            self.word(std::mem::offset_of!(Header, generation)).fetch_add(1, Ordering::SeqCst);
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// While its description is open the file counts as used.
    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.bytes);
        // SAFETY: offsets come from tables that were laid out within `bytes`.
        unsafe { self.base.as_ptr().add(offset) }
    }

    pub fn header(&self) -> *mut Header {
        self.at(0).cast()
    }

    /// Allocates these bytes in the file system. `false`: there is no room.
    pub fn provide(&self, offset: usize, bytes: usize) -> bool {
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset as u64, bytes as u64).is_ok()
    }

    /// Readers keep away while `act` runs.
    pub fn while_unsettled(&self, act: impl FnOnce()) {
        if self.is_taken_over() {
            return act();
        }
        let generation = self.word(std::mem::offset_of!(Header, generation));
        generation.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        act();
        fence(Ordering::SeqCst);
        generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Programs may trust the index until this time (CLOCK_MONOTONIC).
    pub fn live_until(&self, nanoseconds: u64) {
        self.word(std::mem::offset_of!(Header, alive_until_ns)).store(nanoseconds, Ordering::Release);
    }

    pub fn count_move(&self) {
        let at = self.at(std::mem::offset_of!(Header, moves));
        // SAFETY: an aligned number of the header, which is mapped as long as `self` lives.
        unsafe { AtomicU32::from_ptr(at.cast()) }.fetch_add(1, Ordering::SeqCst);
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the header, which is mapped as long as `self` lives.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }
}

fn map(file: &File, bytes: usize) -> io::Result<NonNull<u8>> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
    // SAFETY: a fresh mapping at an address that the kernel chooses.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, file.as_fd(), 0) }?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Makes programs distrust the index at this path until its generation is even again. Call it while no agent writes the
/// index.
pub fn unsettle(path: &Path) -> io::Result<()> {
    let file = leftovers::open(path)?;
    let at = std::mem::offset_of!(Header, generation) as u64;
    let mut generation = [0; 8];
    file.read_exact_at(&mut generation, at)?;
    file.write_all_at(&(u64::from_ne_bytes(generation) | 1).to_ne_bytes(), at)
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.live_until(0);
        drop(std::fs::remove_file(&self.path));
        // SAFETY: nothing of ours points into the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
