//! Content of the store for reading: the store's own plain file, or ranges of bytes from a server.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Gate;
use super::checksum::{self, Checksum};
use surgetank_types::model::{StoreIdentity, Timestamp};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};

/// Size of one request, in bytes, when all of the content is read.
pub const RANGE_BYTES: u64 = 8 << 20;
/// Number of ranges that are requested at the same time.
pub const RANGES_AT_ONCE: usize = 4;

/// One version of a file that can only be read by ranges.
pub trait Remote: Send + Sync {
    /// What identifies the version.
    fn identity(&self) -> StoreIdentity;
    /// CRC-64/NVME of the whole content, if the server keeps it.
    fn checksum(&self) -> Option<u64> {
        None
    }
    /// Fills the whole buffer, which lies within the file. Errors: ESTALE if that version no longer exists.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// The identity of an open plain file.
pub fn identity_of(file: &File) -> io::Result<StoreIdentity> {
    let stat = rustix::fs::fstat(file)?;
    Ok(StoreIdentity {
        ino: stat.st_ino,
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_nanos: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32).nanos,
        ctime_nanos: Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32).nanos,
    })
}

/// The content of one version of a file.
pub enum Source {
    /// The store's own plain file.
    Plain(File),
    /// Ranges from a server.
    Remote(Arc<dyn Remote>),
}

impl Source {
    /// What identifies the version.
    pub fn identity(&self) -> io::Result<StoreIdentity> {
        match self {
            Self::Plain(file) => identity_of(file),
            Self::Remote(remote) => Ok(remote.identity()),
        }
    }

    /// The plain file. Errors: EOPNOTSUPP if the store has no plain files.
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

    /// CRC-64/NVME of the content, as the store's device or server has it.
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

/// Reads all ranges. If the server keeps a checksum of the whole, the received bytes are compared with it.
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
    let why = format!("the received bytes have the checksum {sum:016x}, the server says {known:016x}");
    Err(io::Error::new(io::ErrorKind::InvalidData, why))
}
