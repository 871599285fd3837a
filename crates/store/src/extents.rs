//! The parts of a file that hold bytes, and its holes; and the buffer through which such bytes move.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// Chunk of a copy: long enough for the device, short enough for the throttle and the processor's cache.
const BUFFER_BYTES: usize = 1 << 20;
/// Largest alignment that direct I/O needs (logical blocks of present devices).
pub const DIRECT_ALIGN_BYTES: u64 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    Bytes { start: u64, len: u64 },
    Hole { start: u64, len: u64 },
}

/// Walks a file from 0 to the length that it had at the start; the extents cover it without gaps.
pub struct Extents<'a> {
    file: &'a File,
    at: u64,
    size: u64,
    device: u64,
    /// The file is fully allocated and has no holes.
    dense: bool,
    failed: bool,
}

impl<'a> Extents<'a> {
    pub fn of(file: &'a File) -> io::Result<Self> {
        let stat = file.metadata()?;
        let allocated_bytes = stat.blocks().saturating_mul(512);
        Ok(Self {
            file,
            at: 0,
            size: stat.size(),
            device: stat.dev(),
            dense: allocated_bytes >= stat.size(),
            failed: false,
        })
    }

    /// `st_dev` of the file system that contains the file.
    pub fn device(&self) -> u64 {
        self.device
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    fn extent_here(&self) -> io::Result<Extent> {
        let (start, rest) = (self.at, self.size - self.at);
        if self.dense {
            return Ok(Extent::Bytes { start, len: rest });
        }
        let data = match seek(self.file, SeekFrom::Data(start)) {
            Ok(data) => data.min(self.size),
            Err(Errno::NXIO) => self.size,
            // The file system does not report holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Extent::Bytes { start, len: rest }),
            Err(error) => return Err(error.into()),
        };
        if data > start {
            return Ok(Extent::Hole { start, len: data - start });
        }
        let hole = match seek(self.file, SeekFrom::Hole(start)) {
            Ok(hole) => hole.clamp(start, self.size),
            // Another process truncated the file: reading will find it.
            Err(Errno::NXIO) => self.size,
            Err(error) => return Err(error.into()),
        };
        Ok(Extent::Bytes { start, len: hole - start })
    }
}

impl Iterator for Extents<'_> {
    type Item = io::Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.at >= self.size {
            return None;
        }
        let found = self.extent_here();
        match &found {
            Ok(Extent::Bytes { len, .. } | Extent::Hole { len, .. }) if *len > 0 => self.at += len,
            Ok(_) => {
                self.failed = true;
                return Some(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the file changed while its holes were looked for",
                )));
            }
            Err(_) => self.failed = true,
        }
        Some(found)
    }
}

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Calls `run` with the thread's buffer, aligned for direct I/O: at most 1 MiB, and no larger than `bytes`.
pub fn with_buffer<T>(bytes: u64, run: impl FnOnce(&mut [u8]) -> io::Result<T>) -> io::Result<T> {
    let align = DIRECT_ALIGN_BYTES as usize;
    let len = usize::try_from(bytes).unwrap_or(BUFFER_BYTES).clamp(1, BUFFER_BYTES).next_multiple_of(align);
    BUFFER.with(|cell| match cell.try_borrow_mut() {
        Ok(mut buffer) => {
            if buffer.len() < len + align {
                buffer.resize(len + align, 0);
            }
            let skip = buffer.as_ptr().align_offset(align);
            run(&mut buffer[skip..skip + len])
        }
        // A caller further up this thread's stack has it (a gate that copies): this call gets a separate one.
        Err(_) => {
            let mut own = vec![0; len + align];
            let skip = own.as_ptr().align_offset(align);
            run(&mut own[skip..skip + len])
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn extents_cover_the_file_without_gaps() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"x", 1 << 20).unwrap();
        file.write_all_at(b"y", 8 << 20).unwrap();
        file.set_len(9 << 20).unwrap();
        let (mut at, mut bytes) = (0, 0);
        for extent in Extents::of(&file).unwrap() {
            let (start, len) = match extent.unwrap() {
                Extent::Hole { start, len } => (start, len),
                Extent::Bytes { start, len } => {
                    bytes += len;
                    (start, len)
                }
            };
            assert_eq!(start, at);
            at += len;
        }
        assert_eq!(at, 9 << 20);
        assert!((2..1 << 20).contains(&bytes), "holes are seen: {bytes} bytes of data");
    }

    #[test]
    fn buffer_is_aligned_and_no_larger_than_requested() {
        for bytes in [0, 1, 5000, 1 << 30] {
            with_buffer(bytes, |buffer| {
                assert_eq!(buffer.as_ptr() as u64 % DIRECT_ALIGN_BYTES, 0);
                assert!(buffer.len() <= BUFFER_BYTES && buffer.len() as u64 >= bytes.min(BUFFER_BYTES as u64));
                let outer = buffer.as_ptr();
                with_buffer(1, |inner| {
                    assert_ne!(inner.as_ptr(), outer);
                    Ok(())
                })
            })
            .unwrap();
        }
    }
}
