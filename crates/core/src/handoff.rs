//! State for the next agent beside catalog and tiers: what the kernel and programs know of a killed agent.
//!
//! It is stored in memory that the supervisor holds (a memfd). So it survives the agent and nothing else, and costs no
//! I/O.
//!
//! - There are two halves. When the log has grown to twice its compacted size, the agent writes the records that still
//!   count to the other half. Then one store turns the header over to it.
//! - A record counts once the half's length includes it; an unfinished record does not count.
//! - A record has a checksum. A byte that a bug or the memory changed would be a handle of another file, and a hole
//!   would lose handles. [`Handoff::is_whole`] reports such damage, and then no agent takes over.
//! - The log has no version. One supervisor forks all agents, and they never execute another program, so reader and
//!   writer are the same binary.
//!
//! The danger that it avoids: an answer that the kernel has and the log does not. So the agent writes a record *before*
//! it gives the answer. If the agent dies in between, there is one record too many; [`Left`]'s readers expect that.

mod left;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};

use surgetank_types::model::{FileId, Kind, RunId};

pub use left::{Left, LeftRun};
pub(crate) use left::{LeftHandle, LeftListing, LeftMirror};

/// One fact that the kernel or a program has from the agent, or is about to get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record<'a> {
    /// This number means a file that only the store has: the one of that name in that directory.
    Mirror {
        /// Id of the file.
        id: FileId,
        /// Its directory.
        dir: FileId,
        /// Its name there.
        name: &'a [u8],
        /// Inode number in the store.
        ino: u64,
        /// Kind of the file.
        kind: Kind,
    },
    /// The number has no meaning any more, or the catalog has the file now.
    Forgotten {
        /// Id of the file.
        id: FileId,
    },
    /// An open file; `by`: the request that opened it.
    Opened {
        /// Handle of the open file.
        fh: u64,
        /// Id of the file.
        id: FileId,
        /// The kernel's flags of the open.
        flags: i32,
        /// The handle permits writes.
        writes: bool,
        /// The run of the process.
        run: RunId,
        /// Processes read and write the plain file itself.
        direct: bool,
        /// Number of the request.
        by: u64,
    },
    /// An open file or directory was closed.
    Closed {
        /// Its handle.
        fh: u64,
    },
    /// A request is about to append there.
    Appending {
        /// Handle of the open file.
        fh: u64,
        /// Number of the request.
        by: u64,
        /// Offset in bytes.
        at: u64,
    },
    /// An open directory, and the user who opened it.
    Listing {
        /// Handle of the open directory.
        fh: u64,
        /// Id of the directory.
        dir: FileId,
        /// Owner of the process that opened it.
        uid: u32,
        /// Group of that process.
        gid: u32,
    },
    /// The name before this position of its listing.
    Listed {
        /// Handle of the open directory.
        fh: u64,
        /// The position in the listing.
        offset: u64,
        /// The name before it.
        before: &'a [u8],
    },
    /// The kernel's id for the plain file behind an open file.
    Backed {
        /// Id of the file.
        id: FileId,
        /// The kernel's id.
        backing: u32,
    },
    /// The kernel's id of the file is not valid any more.
    Unbacked {
        /// Id of the file.
        id: FileId,
    },
    /// Times and links of a directory, which the catalog does not record at each change.
    Touched {
        /// Id of the directory.
        dir: FileId,
        /// Time of the last modification, in nanoseconds since 1970.
        nanos: i64,
        /// Number of links.
        links: u32,
    },
    /// A fact that counts against a run's exit code, as JSON.
    Noted {
        /// The event as JSON.
        text: &'a [u8],
    },
    /// A run began to use the directory.
    Joined {
        /// Number of the run.
        run: RunId,
        /// Process id of `surgetank run`.
        pid: u32,
        /// Command line, shortened.
        command: &'a str,
    },
    /// A run does not use the directory any more.
    Ended {
        /// Number of the run.
        run: RunId,
    },
    /// A value to be known once, by its name.
    Fact {
        /// Name of the value.
        name: &'a str,
        /// The value; a later record of the same name replaces it.
        value: &'a [u8],
    },
}

/// Bytes of the log that one half can hold. Only touched pages are memory.
const HALF_BYTES: usize = 1 << 30;
const HEADER_BYTES: usize = 4096;
/// A shorter log is not compacted.
const COMPACTED_FROM_BYTES: usize = 4 << 20;
/// A name has at most 255 bytes, so most records fit; notes and facts may be longer.
const RECORD_BYTES: usize = 512;
const RECORD_BYTES_MAX: usize = 16 << 10;
const NO_ROOM: &str = "no room to remember what the kernel knows";

/// The frame of a record: its length and its checksum.
const FRAME_BYTES: usize = 8;

/// All zeroes at first.
#[repr(C)]
struct Header {
    /// The half that counts.
    half: AtomicU64,
    used: [AtomicU64; 2],
    /// A record did not fit, or differs from what was written: no agent can take over from this.
    lacking: AtomicU64,
    nonce: AtomicU64,
}

/// The log of facts, in memory that outlives the agent.
pub struct Handoff {
    base: NonNull<u8>,
    half_bytes: usize,
    memory: OwnedFd,
    pen: Mutex<Pen>,
}

struct Pen {
    /// The log is compacted when it has grown to this.
    compact_at: usize,
}

// SAFETY: the mapping belongs to this value as long as it lives; only the holder of `pen` writes, except single words
// of the header.
unsafe impl Send for Handoff {}
// SAFETY: as above.
unsafe impl Sync for Handoff {}

impl Handoff {
    /// Empty memory, which a fork inherits.
    pub fn new() -> io::Result<Self> {
        Self::of_size(HALF_BYTES)
    }

    fn of_size(half_bytes: usize) -> io::Result<Self> {
        let memory = rustix::fs::memfd_create("surgetank-handoff", MemfdFlags::CLOEXEC)?;
        let bytes = HEADER_BYTES + 2 * half_bytes;
        rustix::fs::ftruncate(&memory, bytes as u64)?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, memory.as_fd(), 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut nonce = [0; 8];
        io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut nonce)?;
        let handoff = Self {
            base,
            half_bytes,
            memory,
            pen: Mutex::new(Pen { compact_at: COMPACTED_FROM_BYTES.min(half_bytes) }),
        };
        handoff.header().nonce.store(u64::from_ne_bytes(nonce), Ordering::Relaxed);
        Ok(handoff)
    }

    /// Distinguishes this mount's requests from another mount's in the catalog.
    pub fn nonce(&self) -> u64 {
        self.header().nonce.load(Ordering::Relaxed)
    }

    /// No record is missing, so another agent can take over.
    pub fn is_whole(&self) -> bool {
        self.header().lacking.load(Ordering::Relaxed) == 0
    }

    /// Appends a record. A record without room is an error in the log file, and then no agent takes over.
    pub fn put(&self, record: &Record<'_>) {
        if framed::<RECORD_BYTES, _>(record, |bytes| self.append(bytes)).is_none()
            && framed::<RECORD_BYTES_MAX, _>(record, |bytes| self.append(bytes)).is_none()
        {
            self.lacks(NO_ROOM);
        }
    }

    fn append(&self, bytes: &[u8]) {
        let mut pen = self.pen();
        let mut end = self.used();
        if end + bytes.len() > pen.compact_at.min(self.half_bytes) {
            self.compact(&mut pen);
            end = self.used();
        }
        if end + bytes.len() > self.half_bytes {
            return self.lacks(NO_ROOM);
        }
        let half = self.header().half.load(Ordering::Relaxed) as usize;
        // SAFETY: within the half, as checked above; no other thread writes there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(half).as_ptr().add(end), bytes.len()) };
        self.header().used[half].store((end + bytes.len()) as u64, Ordering::Release);
    }

    /// The state that all records come to.
    pub fn left(&self) -> Left {
        let _pen = self.pen();
        self.read()
    }

    fn read(&self) -> Left {
        let half = self.header().half.load(Ordering::Acquire) as usize & 1;
        let used = self.used().min(self.half_bytes);
        // SAFETY: within the half; the bytes before `used` are not written any more.
        let mut rest = unsafe { std::slice::from_raw_parts(self.at(half).as_ptr(), used) };
        let mut left = Left::default();
        while !rest.is_empty() {
            let Some((record, next)) = taken(rest) else {
                self.lacks("what an earlier agent left makes no sense");
                break;
            };
            left.take(&record);
            rest = next;
        }
        left
    }

    fn compact(&self, pen: &mut Pen) {
        let left = self.read();
        let half = self.header().half.load(Ordering::Relaxed) as usize & 1;
        let other = 1 - half;
        let mut end = 0;
        let mut fits = true;
        left.each(|record| {
            let put = framed::<RECORD_BYTES_MAX, _>(record, |bytes| {
                let room = end + bytes.len() <= self.half_bytes;
                if room {
                    // SAFETY: within the other half, which no thread reads or writes now.
                    unsafe {
                        std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(other).as_ptr().add(end), bytes.len());
                    }
                    end += bytes.len();
                }
                room
            });
            fits &= put.unwrap_or(false);
        });
        if !fits {
            return self.lacks(NO_ROOM);
        }
        let header = self.header();
        header.used[other].store(end as u64, Ordering::Relaxed);
        header.half.store(other as u64, Ordering::Release);
        pen.compact_at = (2 * end).max(COMPACTED_FROM_BYTES).min(self.half_bytes);
        // Frees the half's memory; a failure only costs memory.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let offset = (HEADER_BYTES + half * self.half_bytes) as u64;
        let _ = rustix::fs::fallocate(&self.memory, hole, offset, self.half_bytes as u64);
    }

    fn lacks(&self, why: &str) {
        if self.header().lacking.swap(1, Ordering::Relaxed) == 0 {
            tracing::error!("{why}: this agent cannot be replaced");
        }
    }

    fn pen(&self) -> MutexGuard<'_, Pen> {
        self.pen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used(&self) -> usize {
        let header = self.header();
        let half = header.half.load(Ordering::Acquire) as usize & 1;
        header.used[half].load(Ordering::Acquire) as usize
    }

    fn header(&self) -> &Header {
        // SAFETY: the first page of the mapping, aligned; any bytes are a header of atomic words.
        unsafe { self.base.cast().as_ref() }
    }

    fn at(&self, half: usize) -> NonNull<u8> {
        // SAFETY: both halves are within the mapping.
        unsafe { self.base.add(HEADER_BYTES + half * self.half_bytes) }
    }
}

/// The first record, and the bytes behind it. `None`: it differs from what was written.
fn taken(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let (frame, rest) = bytes.split_first_chunk::<FRAME_BYTES>()?;
    let [a, b, c, d, crc @ ..] = *frame;
    let (text, next) = rest.split_at_checked(u32::from_ne_bytes([a, b, c, d]) as usize)?;
    let right = crc_fast::crc32_iscsi(text) == u32::from_ne_bytes(crc);
    Some((right.then(|| postcard::from_bytes(text).ok()).flatten()?, next))
}

/// The record behind its frame. `None`: it does not fit.
fn framed<const BYTES: usize, T>(record: &Record<'_>, act: impl FnOnce(&[u8]) -> T) -> Option<T> {
    let mut bytes = [0; BYTES];
    let length = postcard::to_slice(record, &mut bytes[FRAME_BYTES..]).ok()?.len();
    let crc = crc_fast::crc32_iscsi(&bytes[FRAME_BYTES..FRAME_BYTES + length]);
    bytes[..4].copy_from_slice(&(length as u32).to_ne_bytes());
    bytes[4..FRAME_BYTES].copy_from_slice(&crc.to_ne_bytes());
    Some(act(&bytes[..FRAME_BYTES + length]))
}

impl Drop for Handoff {
    fn drop(&mut self) {
        // SAFETY: nothing points into the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), HEADER_BYTES + 2 * self.half_bytes) };
    }
}
