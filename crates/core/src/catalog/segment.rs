//! One file of the log: a header, then records with growing positions.
//!
//! States: *current* (the last one, appended to) → *closed* (a later one exists; never written again) → *marked*
//! (closed, and known to be on the media as a whole) → deleted once the snapshot holds it. Only the writer appends, at
//! an offset that it keeps itself.
//!
//! The mark distinguishes damage from a sudden death: an unmarked segment may end anywhere after a power loss, a marked
//! one may not. The mark is a hint: it is written after the sync, and never synced itself.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use surgetank_types::sync::atomic::{AtomicBool, Ordering};

use super::Lsn;
use super::record::{FRAME_BYTES, Frame};

pub(super) const HEADER_BYTES: u64 = 64;
pub(super) const FORMAT: u32 = 5;
const MAGIC: [u8; 8] = *b"SURGELOG";
const FLAG_FRESH: u32 = 1;
const MARK_OFFSET: u64 = 32;
const READ_BYTES: usize = 256 << 10;

/// The content of a segment's first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub format: u32,
    /// Position of the last record before this segment.
    pub after: Lsn,
    /// Nothing before this segment counts any more, the snapshot included.
    pub fresh: bool,
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.format.to_le_bytes());
        bytes[12..16].copy_from_slice(&(if self.fresh { FLAG_FRESH } else { 0 }).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.after.0.to_le_bytes());
        let crc = crc_fast::crc32_iscsi(&bytes[..24]);
        bytes[24..28].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES as usize]) -> Option<Self> {
        let crc = u32_at(bytes, 24);
        if bytes[..8] != MAGIC || crc_fast::crc32_iscsi(&bytes[..24]) != crc {
            return None;
        }
        Some(Self {
            format: u32_at(bytes, 8),
            fresh: u32_at(bytes, 12) & FLAG_FRESH != 0,
            after: Lsn(u64_at(bytes, 16)),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

pub(super) struct Segment {
    pub file: File,
    pub path: PathBuf,
    /// `None`: the header is damaged or was never written.
    pub header: Option<Header>,
    /// The length that the mark guarantees.
    pub marked_bytes: Option<u64>,
    /// Its name is on the media.
    pub named: AtomicBool,
    /// It is closed and all of its content is on the media.
    pub settled: AtomicBool,
}

impl Segment {
    /// Makes a new, empty segment under its final name; when `fresh`, it is on the media before it gets that name.
    pub fn create(dir: &Path, after: Lsn, fresh: bool) -> io::Result<Self> {
        let path = dir.join(file_name(after));
        let temporary = path.with_extension(super::directory::TEMPORARY_EXTENSION);
        let header = Header { format: FORMAT, after, fresh };
        let create = || {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            crash_point!("catalog.segment_made");
            file.write_all_at(&header.to_bytes(), 0)?;
            crash_point!("catalog.segment_headed");
            if fresh {
                file.sync_data()?;
            }
            std::fs::rename(&temporary, &path)?;
            Ok(file)
        };
        match create() {
            Ok(file) => {
                let header = Some(header);
                Ok(Self { file, path, header, marked_bytes: None, named: false.into(), settled: false.into() })
            }
            Err(error) => {
                // The next start removes it when this fails.
                let _ = std::fs::remove_file(&temporary);
                Err(error)
            }
        }
    }

    /// `writable`: false for a reader that changes nothing.
    pub fn open(path: PathBuf, writable: bool) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(writable).open(&path)?;
        let mut bytes = [0; HEADER_BYTES as usize];
        let whole = file.metadata()?.len() >= HEADER_BYTES;
        if whole {
            file.read_exact_at(&mut bytes, 0)?;
        }
        let header = if whole { Header::from_bytes(&bytes) } else { None };
        let mark = MARK_OFFSET as usize;
        let marked = whole && crc_fast::crc32_iscsi(&bytes[mark..mark + 8]) == u32_at(&bytes, mark + 8);
        let marked_bytes = marked.then(|| u64_at(&bytes, mark));
        let settled = marked_bytes.is_some().into();
        Ok(Self { file, path, header, marked_bytes, named: false.into(), settled })
    }

    /// Position of the last record before it.
    pub fn after(&self) -> Lsn {
        self.header.map_or(Lsn(0), |header| header.after)
    }

    /// Records that the whole of this closed segment is on the media. A failure loses only the mark.
    pub fn mark(&self) {
        if let Ok(metadata) = self.file.metadata() {
            let mut bytes = [0; 12];
            bytes[..8].copy_from_slice(&metadata.len().to_le_bytes());
            let crc = crc_fast::crc32_iscsi(&bytes[..8]);
            bytes[8..].copy_from_slice(&crc.to_le_bytes());
            let _ = self.file.write_all_at(&bytes, MARK_OFFSET);
        }
        self.settled.store(true, Ordering::Release);
    }

    /// Reads records up to `end`, which is the file's length when `None`.
    pub fn read(&self, end: Option<u64>) -> io::Result<Reader<'_>> {
        let end = match end {
            Some(end) => end,
            None => self.file.metadata()?.len(),
        };
        let file = BufReader::with_capacity(READ_BYTES, Onward { file: &self.file, offset: HEADER_BYTES });
        Ok(Reader { file, offset: HEADER_BYTES, end, last: Lsn(0), payload: Vec::new() })
    }
}

/// `log-<first position>.wal`.
pub(super) fn file_name(after: Lsn) -> String {
    format!("log-{:020}.wal", after.0.saturating_add(1))
}

/// Is this the name of a segment?
pub(super) fn is_segment(name: &str) -> bool {
    name.strip_prefix("log-")
        .and_then(|rest| rest.strip_suffix(".wal"))
        .is_some_and(|digits| digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Reads from an offset of its own, so that readers and the writer do not share the file's.
struct Onward<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for Onward<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

/// Walks over the records of one segment. The payload buffer is reused.
pub(super) struct Reader<'a> {
    file: BufReader<Onward<'a>>,
    /// Where the next record begins: the end of the last intact one.
    pub offset: u64,
    end: u64,
    last: Lsn,
    payload: Vec<u8>,
}

/// The content at the reader's place.
pub(super) enum Step<'a> {
    Record {
        lsn: Lsn,
        payload: &'a [u8],
        payload_offset: u64,
    },
    End,
    /// No intact record here, although the file continues. `torn`: the death of its writer may have cut it short.
    Bad {
        why: &'static str,
        torn: bool,
    },
}

impl Reader<'_> {
    pub fn step(&mut self) -> io::Result<Step<'_>> {
        let left = self.end.saturating_sub(self.offset);
        if left == 0 {
            return Ok(Step::End);
        }
        if left < FRAME_BYTES as u64 {
            return Ok(Step::Bad { why: "a record is cut short", torn: true });
        }
        let mut bytes = [0; FRAME_BYTES];
        self.file.read_exact(&mut bytes)?;
        let frame = Frame::read(&bytes);
        let whole = FRAME_BYTES as u64 + u64::from(frame.payload_bytes);
        if whole > left {
            return Ok(Step::Bad { why: "a record is cut short or its length is damaged", torn: true });
        }
        self.payload.resize(frame.payload_bytes as usize, 0);
        self.file.read_exact(&mut self.payload)?;
        if !frame.fits(&self.payload) {
            return Ok(Step::Bad { why: "the checksum of a record does not match", torn: false });
        }
        if frame.lsn <= self.last {
            return Ok(Step::Bad { why: "a record is out of order", torn: false });
        }
        let payload_offset = self.offset + FRAME_BYTES as u64;
        self.offset += whole;
        self.last = frame.lsn;
        Ok(Step::Record { lsn: frame.lsn, payload: &self.payload, payload_offset })
    }
}
