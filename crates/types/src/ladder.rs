//! The copy ladder: copies a file between tiers by the fastest way that both ends support.
//!
//! The rungs, in order: share the blocks (`FICLONE`), `copy_file_range`, `splice` through a pipe, read and write. If the file
//! systems refuse a rung, the copy continues on the next one, also in the middle of a file. Holes stay holes.
//!
//! Programs may share the descriptors. Every transfer therefore names its offsets, and holes are sought on a separate
//! descriptor, so no file position moves.
//! The dangers that it avoids: a second open of the source that breaks the agent's own write lease (zeros are then sought in
//! the bytes instead), and a destination in append mode, which ignores offsets.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

/// Bytes that are moved between two calls of the gate.
const CHUNK_BYTES: u64 = 4 << 20;
/// The largest pipe that an ordinary user may request.
const PIPE_BYTES: usize = 1 << 20;
const BUFFER_BYTES: usize = 1 << 20;
/// A run of zeros of this length and alignment becomes a hole where the source cannot report its holes.
const ZERO_BLOCK_BYTES: usize = 64 << 10;

/// Called between chunks with the number of bytes just moved: throttles, counts, and may stop the copy by an error.
pub type Gate<'a> = &'a dyn Fn(u64) -> io::Result<()>;

/// Makes `to` a copy of the first `len` bytes of `from`, holes included. Returns the length copied, which is less than `len`
/// when `from` is shorter. The previous content of `to` is lost.
///
/// Errors: those of the file systems and of the gate (`to` is then incomplete), and `EINVAL` if `to` is in append mode.
pub fn copy_file(from: &File, to: &File, len: u64, gate: Gate<'_>) -> io::Result<u64> {
    refuse_append(to)?;
    let source = from.metadata()?;
    let len = len.min(source.len());
    if to.metadata()?.len() > 0 {
        to.set_len(0)?;
    }
    gate(0)?;
    if len == source.len() && len > 0 && rustix::fs::ioctl_ficlone(to, from).is_ok() {
        gate(len)?;
        return Ok(len);
    }
    let mut transfer = Transfer::new();
    let sparse = std::os::unix::fs::MetadataExt::blocks(&source).saturating_mul(512) < source.len();
    if !sparse {
        transfer.copy(from, to, 0, len, gate)?;
    } else if let Some(own) = own_description(from) {
        let mut offset = 0;
        while let Some((start, end)) = next_data(&own, offset, len)? {
            transfer.copy(from, to, start, end, gate)?;
            offset = end;
        }
    } else {
        copy_without_zeros(from, to, len, gate)?;
    }
    // A file that a program truncates meanwhile is not an error: its present length counts.
    let len = len.min(from.metadata()?.len());
    to.set_len(len)?;
    Ok(len)
}

/// Copies one range to the same offsets; holes are written as zeros. Returns the bytes moved, which are fewer than `len` when
/// `from` ends before.
///
/// Errors: those of the file systems and of the gate, and `EINVAL` if `to` is in append mode.
pub fn copy_range(from: &File, to: &File, offset: u64, len: u64, gate: Gate<'_>) -> io::Result<u64> {
    refuse_append(to)?;
    Transfer::new().copy(from, to, offset, offset.saturating_add(len), gate)
}

fn refuse_append(to: &File) -> io::Result<()> {
    match rustix::fs::fcntl_getfl(to)?.contains(OFlags::APPEND) {
        true => Err(Errno::INVAL.into()),
        false => Ok(()),
    }
}

/// A second open file of `from`, with its own position; `None` if a second open is refused or would break a lease.
fn own_description(from: &File) -> Option<OwnedFd> {
    // SAFETY: F_GETLEASE takes no argument and touches no memory of ours; the descriptor is open.
    let lease = unsafe { libc::fcntl(from.as_raw_fd(), libc::F_GETLEASE) };
    if lease == libc::F_WRLCK {
        return None;
    }
    let path = format!("/proc/self/fd/{}", from.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// The next stretch of data at or after `offset` and before `len`.
fn next_data(own: &OwnedFd, offset: u64, len: u64) -> io::Result<Option<(u64, u64)>> {
    if offset >= len {
        return Ok(None);
    }
    let start = match rustix::fs::seek(own, SeekFrom::Data(offset)) {
        Ok(start) => start,
        // No data after this offset.
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not report holes: all is data.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((offset, len))),
        Err(errno) => return Err(errno.into()),
    };
    if start >= len {
        return Ok(None);
    }
    let end = match rustix::fs::seek(own, SeekFrom::Hole(start)) {
        Ok(end) => end.min(len),
        // A program truncated the file between the two calls.
        Err(Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    Ok(Some((start, end)))
}

/// The rungs below `FICLONE`, from the fastest to the most general.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rung {
    CopyFileRange,
    Splice,
    ReadWrite,
}

struct Transfer {
    rung: Rung,
    pipe: Option<(OwnedFd, OwnedFd)>,
    buffer: Vec<u8>,
}

impl Transfer {
    fn new() -> Self {
        Self { rung: Rung::CopyFileRange, pipe: None, buffer: Vec::new() }
    }

    /// Moves `start..end`; stops early at the end of `from`.
    fn copy(&mut self, from: &File, to: &File, start: u64, end: u64, gate: Gate<'_>) -> io::Result<u64> {
        let mut offset = start;
        while offset < end {
            let chunk_end = end.min(offset.saturating_add(CHUNK_BYTES));
            let chunk_start = offset;
            while offset < chunk_end {
                match self.step(from, to, offset, chunk_end - offset)? {
                    0 => {
                        gate(offset - chunk_start)?;
                        return Ok(offset - start);
                    }
                    moved => offset += moved,
                }
            }
            gate(offset - chunk_start)?;
        }
        Ok(offset.saturating_sub(start))
    }

    /// Moves at least one byte, or none at the end of `from`; uses the next rung where the file systems refuse the present one.
    fn step(&mut self, from: &File, to: &File, offset: u64, len: u64) -> io::Result<u64> {
        loop {
            let outcome = match self.rung {
                Rung::CopyFileRange => copy_file_range(from, to, offset, len),
                Rung::Splice => self.splice(from, to, offset, len),
                Rung::ReadWrite => return self.read_write(from, to, offset, len),
            };
            match outcome {
                Ok(0) if from.metadata()?.len() <= offset => return Ok(0),
                // Some file systems return 0 for a transfer that they do not support.
                Ok(0) => {}
                Ok(moved) => return Ok(moved),
                Err(
                    Errno::XDEV
                    | Errno::OPNOTSUPP
                    | Errno::INVAL
                    | Errno::NOSYS
                    | Errno::PERM
                    | Errno::BADF
                    | Errno::MFILE
                    | Errno::NFILE
                    | Errno::TXTBSY,
                ) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.rung = match self.rung {
                Rung::CopyFileRange => Rung::Splice,
                Rung::Splice | Rung::ReadWrite => Rung::ReadWrite,
            };
        }
    }

    /// Moves at most one pipe-full. A pipe that still contains bytes is dropped, so that they never reach a later transfer.
    fn splice(&mut self, from: &File, to: &File, offset: u64, len: u64) -> Result<u64, Errno> {
        let (read_end, write_end) = match self.pipe.take() {
            Some(pipe) => pipe,
            None => {
                let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
                // Refused when the user already has many pipes: a small pipe works too.
                let _ = rustix::pipe::fcntl_setpipe_size(&pipe.1, PIPE_BYTES);
                pipe
            }
        };
        let wanted = usize::try_from(len).unwrap_or(usize::MAX).min(PIPE_BYTES);
        let filled = rustix::io::retry_on_intr(|| {
            let mut from_offset = offset;
            rustix::pipe::splice(from, Some(&mut from_offset), &write_end, None, wanted, SpliceFlags::MOVE)
        })?;
        let mut moved = 0;
        while moved < filled {
            let outcome = rustix::io::retry_on_intr(|| {
                let mut to_offset = offset + moved as u64;
                rustix::pipe::splice(&read_end, None, to, Some(&mut to_offset), filled - moved, SpliceFlags::MOVE)
            });
            match outcome {
                Ok(0) => return Ok(moved as u64),
                Ok(more) => moved += more,
                Err(errno) if moved == 0 => return Err(errno),
                // The moved bytes count; the next step gets the error again if it persists.
                Err(_) => return Ok(moved as u64),
            }
        }
        self.pipe = Some((read_end, write_end));
        Ok(moved as u64)
    }

    fn read_write(&mut self, from: &File, to: &File, offset: u64, len: u64) -> io::Result<u64> {
        if self.buffer.is_empty() {
            self.buffer.resize(BUFFER_BYTES, 0);
        }
        let wanted = usize::try_from(len).unwrap_or(usize::MAX).min(BUFFER_BYTES);
        let got = read_at(from, &mut self.buffer[..wanted], offset)?;
        to.write_all_at(&self.buffer[..got], offset)?;
        Ok(got as u64)
    }
}

fn copy_file_range(from: &File, to: &File, offset: u64, len: u64) -> Result<u64, Errno> {
    let wanted = usize::try_from(len).unwrap_or(usize::MAX);
    rustix::io::retry_on_intr(|| {
        let (mut from_offset, mut to_offset) = (offset, offset);
        rustix::fs::copy_file_range(from, Some(&mut from_offset), to, Some(&mut to_offset), wanted)
    })
    .map(|moved| moved as u64)
}

fn read_at(from: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    loop {
        match from.read_at(buffer, offset) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

/// For a sparse source that cannot report its holes: long runs of zeros are left out.
fn copy_without_zeros(from: &File, to: &File, len: u64, gate: Gate<'_>) -> io::Result<()> {
    let mut buffer = vec![0_u8; BUFFER_BYTES];
    let mut offset = 0;
    while offset < len {
        let wanted = usize::try_from(len - offset).unwrap_or(usize::MAX).min(BUFFER_BYTES);
        let got = read_at(from, &mut buffer[..wanted], offset)?;
        if got == 0 {
            break;
        }
        let mut moved = 0;
        for (index, block) in buffer[..got].chunks(ZERO_BLOCK_BYTES).enumerate() {
            if block.iter().any(|byte| *byte != 0) {
                to.write_all_at(block, offset + (index * ZERO_BLOCK_BYTES) as u64)?;
                moved += block.len() as u64;
            }
        }
        gate(moved)?;
        offset += got as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
