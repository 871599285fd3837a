//! Content of the store to be read: the store's own plain file, or bytes that a server gives by ranges.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Gate;
use super::checksum::{self, Checksum};
use surgetank_types::model::{StoreIdentity, Timestamp};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};

/// What is asked for at once, when all of it is wanted.
pub const RANGE_BYTES: u64 = 8 << 20;
/// So many ranges are under way at the same time.
pub const RANGES_AT_ONCE: usize = 4;

/// One version of a file that is only there by ranges.
pub trait Remote: Send + Sync {
    fn identity(&self) -> StoreIdentity;
    /// CRC-64/NVME of the whole, where the server keeps it.
    fn checksum(&self) -> Option<u64> {
        None
    }
    /// Fills the whole buffer, which lies within the file; ESTALE when that version is there no more.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Of an open file of a directory.
pub fn identity_of(file: &File) -> io::Result<StoreIdentity> {
    let stat = rustix::fs::fstat(file)?;
    Ok(StoreIdentity {
        ino: stat.st_ino,
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_nanos: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32).nanos,
        ctime_nanos: Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32).nanos,
    })
}

pub enum Source {
    Plain(File),
    Remote(Arc<dyn Remote>),
}

impl Source {
    /// Which version it is of.
    pub fn identity(&self) -> io::Result<StoreIdentity> {
        match self {
            Self::Plain(file) => identity_of(file),
            Self::Remote(remote) => Ok(remote.identity()),
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
            Self::Plain(file) => surgetank_types::ladder::copy_file(file, target, size_bytes, gate).map(drop),
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

/// Where the server keeps a sum of the whole, what came is compared with it.
fn fetch(remote: &dyn Remote, target: &File, size_bytes: u64, gate: Gate<'_>) -> io::Result<()> {
    let ranges = usize::try_from(size_bytes.div_ceil(RANGE_BYTES)).map_err(io::Error::other)?;
    let known = remote.checksum().filter(|_| size_bytes == remote.identity().size_bytes);
    let sums: Vec<AtomicU64> = std::iter::repeat_with(AtomicU64::default).take(ranges).collect();
    super::at_once(ranges, RANGES_AT_ONCE, &|index| {
        let at = index as u64 * RANGE_BYTES;
        let mut buffer = vec![0; usize::try_from((size_bytes - at).min(RANGE_BYTES)).map_err(io::Error::other)?];
        remote.read_at(&mut buffer, at)?;
        if known.is_some() {
            sums[index].store(checksum::of_bytes(&buffer), Ordering::Relaxed);
        }
        target.write_all_at(&buffer, at)?;
        gate(buffer.len() as u64)
    })?;
    let Some(known) = known else { return Ok(()) };
    let length = |index: usize| RANGE_BYTES.min(size_bytes - index as u64 * RANGE_BYTES);
    let sum = sums.iter().enumerate().fold(checksum::of_bytes(b""), |whole, (index, sum)| {
        checksum::joined(whole, sum.load(Ordering::Relaxed), length(index))
    });
    if sum == known {
        return Ok(());
    }
    let why = format!("what came has the checksum {sum:016x}, the server says {known:016x}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}
