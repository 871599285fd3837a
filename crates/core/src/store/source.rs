//! Content of the store to be read: the store's own plain file, or bytes that a server gives by ranges.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::Gate;
use super::checksum::{self, Checksum};
use crate::model::StoreIdentity;
use crate::sync::{Arc, PoisonError};

/// What is asked for at once, when all of it is wanted.
pub const RANGE_BYTES: u64 = 8 << 20;
/// So many ranges are under way at the same time.
pub const RANGES_AT_ONCE: usize = 4;

/// One version of a file that is only there by ranges.
pub trait Remote: Send + Sync {
    fn identity(&self) -> StoreIdentity;
    /// Fills the whole buffer, which lies within the file; ESTALE when that version is there no more.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

pub enum Source {
    Plain(File),
    Remote(Arc<dyn Remote>),
}

impl Source {
    /// Of the store's inode.
    pub fn ino(&self) -> io::Result<u64> {
        match self {
            Self::Plain(file) => Ok(rustix::fs::fstat(file)?.st_ino),
            Self::Remote(remote) => Ok(remote.identity().ino),
        }
    }

    /// The plain file, where there is one.
    pub fn plain(self) -> io::Result<File> {
        match self {
            Self::Plain(file) => Ok(file),
            Self::Remote(_) => Err(rustix::io::Errno::OPNOTSUPP.into()),
        }
    }

    /// Fills the empty `target` with the first `size_bytes`.
    pub fn copy_to(&self, target: &File, size_bytes: u64, gate: Gate<'_>) -> io::Result<()> {
        match self {
            Self::Plain(file) => crate::tier::ladder::copy_file(file, target, size_bytes, gate).map(drop),
            Self::Remote(remote) => {
                target.set_len(size_bytes)?;
                fetch(&**remote, target, size_bytes, gate)
            }
        }
    }

    /// Of all bytes, as the store's device or server has them.
    pub fn sum(&self) -> io::Result<u64> {
        match self {
            Self::Plain(file) => checksum::reread(file),
            Self::Remote(remote) => {
                let mut sum = Checksum::default();
                let size_bytes = remote.identity().size_bytes;
                let mut buffer = vec![0; usize::try_from(RANGE_BYTES.min(size_bytes)).unwrap_or(0)];
                let mut at = 0;
                while at < size_bytes {
                    let len = usize::try_from((size_bytes - at).min(RANGE_BYTES)).unwrap_or(buffer.len());
                    remote.read_at(&mut buffer[..len], at)?;
                    sum.bytes(&buffer[..len]);
                    at += len as u64;
                }
                Ok(sum.value())
            }
        }
    }
}

/// Several ranges at a time; the first error ends it.
fn fetch(remote: &dyn Remote, target: &File, size_bytes: u64, gate: Gate<'_>) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let stopped = AtomicBool::new(false);
    let failed: Mutex<Option<io::Error>> = Mutex::new(None);
    let work = || {
        let mut buffer = Vec::new();
        while !stopped.load(Ordering::Relaxed) {
            let at = next.fetch_add(RANGE_BYTES, Ordering::Relaxed);
            if at >= size_bytes {
                return;
            }
            buffer.resize(usize::try_from((size_bytes - at).min(RANGE_BYTES)).unwrap_or(0), 0);
            let moved = remote
                .read_at(&mut buffer, at)
                .and_then(|()| target.write_all_at(&buffer, at))
                .and_then(|()| gate(buffer.len() as u64));
            if let Err(why) = moved {
                stopped.store(true, Ordering::Relaxed);
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
            }
        }
    };
    let ranges = usize::try_from(size_bytes.div_ceil(RANGE_BYTES)).unwrap_or(RANGES_AT_ONCE);
    std::thread::scope(|scope| {
        for _ in 1..ranges.min(RANGES_AT_ONCE) {
            scope.spawn(work);
        }
        work();
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}
