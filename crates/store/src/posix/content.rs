//! The bytes: one pass from a source into a file of the store, holes kept, summed on the way.
//!
//! Write-back of a large file is started while the copy still runs, and awaited some windows later. The device is then always
//! busy, dirty memory stays small, the throttle and the progress bar see what really moved, and the final sync is short.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::ioctl_ficlone;
use rustix::io::Errno;

use super::counters::Counters;
use crate::Gate;
use crate::blocks::Act;
use crate::checksum::{Checksum, checksum, read_extent};
use crate::extents::{Extent, Extents};

const WINDOW_BYTES: u64 = 8 << 20;
/// From here on the rest of a file is written back at once. Otherwise the device would idle while earlier files are published,
/// which takes some milliseconds each on a slow store. (Small files are written back together.)
const REST_BYTES_MIN: u64 = 1 << 20;
/// Bytes by which write-back may lag behind the copy.
const BEHIND_BYTES: u64 = 4 * WINDOW_BYTES;

/// Copies into files of one store.
pub struct Copier {
    /// The device whose sources last could not share extents with the store, so that it is not asked for each of its files.
    refused: AtomicU64,
}

impl Copier {
    pub fn new() -> Self {
        Self { refused: AtomicU64::new(u64::MAX) }
    }

    /// Fills the empty `target` and returns the checksum of what was read from `source`. It writes through `act`, which sets
    /// the ids (reserved blocks and quotas are the writer's); `gate` runs with the agent's.
    pub fn copy(
        &self,
        source: &File,
        target: &File,
        act: Act<'_>,
        counters: &Counters,
        gate: Gate<'_>,
    ) -> io::Result<u64> {
        let extents = Extents::of(source)?;
        if self.clone_extents(source, extents.device(), target) {
            counters.files_cloned.add(1);
            return checksum(source, gate);
        }
        let size = extents.size();
        let mut sum = Checksum::default();
        let mut behind = WriteBehind::new(target);
        let mut written_to = 0;
        for extent in extents {
            match extent? {
                Extent::Hole { len, .. } => sum.zeros(len),
                Extent::Bytes { start, len } => {
                    let mut at = start;
                    read_extent(source, start, len, |bytes| {
                        sum.bytes(bytes);
                        act(&|| target.write_all_at(bytes, at))?;
                        at += bytes.len() as u64;
                        counters.bytes_written.add(bytes.len() as u64);
                        behind.reached(at)?;
                        gate(bytes.len() as u64)
                    })?;
                    written_to = at;
                }
            }
        }
        behind.ends(written_to)?;
        if written_to < size {
            act(&|| target.set_len(size))?;
        }
        Ok(sum.value())
    }

    fn clone_extents(&self, source: &File, device: u64, target: &File) -> bool {
        if self.refused.load(Ordering::Relaxed) == device {
            return false;
        }
        let result = ioctl_ficlone(target, source);
        if let Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS | Errno::XDEV) = result {
            self.refused.store(device, Ordering::Relaxed);
        }
        result.is_ok()
    }
}

struct WriteBehind<'a> {
    file: &'a File,
    /// Write-back was started up to this offset.
    started: u64,
}

impl<'a> WriteBehind<'a> {
    fn new(file: &'a File) -> Self {
        Self { file, started: 0 }
    }

    fn reached(&mut self, at: u64) -> io::Result<()> {
        while at >= self.started + WINDOW_BYTES {
            self.range(self.started, libc::SYNC_FILE_RANGE_WRITE)?;
            if self.started >= BEHIND_BYTES {
                let all =
                    libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
                self.range(self.started - BEHIND_BYTES, all)?;
            }
            self.started += WINDOW_BYTES;
        }
        Ok(())
    }

    fn ends(&self, at: u64) -> io::Result<()> {
        match at.saturating_sub(self.started) {
            rest if rest >= REST_BYTES_MIN => sync_range(self.file, self.started, rest, libc::SYNC_FILE_RANGE_WRITE),
            _ => Ok(()),
        }
    }

    fn range(&self, start: u64, flags: libc::c_uint) -> io::Result<()> {
        sync_range(self.file, start, WINDOW_BYTES, flags)
    }
}

/// Reports a write-back error that no sync has reported yet; starts no write and requests no flush.
pub fn written_without_error(file: &File) -> io::Result<()> {
    sync_range(file, 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
}

fn sync_range(file: &File, start: u64, len: u64, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: the descriptor is open for the length of the call, which takes only numbers.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), start.cast_signed(), len.cast_signed(), flags) };
    if result == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // Only advice; file systems that do not know it may refuse.
        error
            if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::ESPIPE | libc::EOPNOTSUPP)) =>
        {
            Ok(())
        }
        error => Err(error),
    }
}
