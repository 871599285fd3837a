//! The result of a stretch of the log: the last change of every key, sorted by key.
//!
//! It serves folding (the log into the snapshot) and loading (the log laid over the snapshot). File records, by far the
//! most of the bytes, stay in the segments; the digest keeps only their places. So it takes about a hundred bytes a
//! key, however large the log is.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use surgetank_types::sync::Arc;

use super::Lsn;
use super::directory::DATA_IS_SAFE;
use super::segment::{Segment, Step};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Change, EntryRecord, FileId, HintRecord, Hinted, LostRecord, Mark, OpRecord, Seq};

/// Where the postcard bytes of a `FileRecord` are stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    segment: u32,
    bytes: u32,
    offset: u64,
}

/// `None` stands for "dropped".
#[derive(Default)]
pub(super) struct Digest {
    segments: Vec<Arc<Segment>>,
    pub files: BTreeMap<FileId, Option<Span>>,
    pub entries: BTreeMap<(FileId, Box<[u8]>), Option<EntryRecord>>,
    pub ops: BTreeMap<Seq, Option<OpRecord>>,
    pub marks: BTreeMap<Mark, u64>,
    pub hints: BTreeMap<Hinted, Option<HintRecord>>,
    pub lost: BTreeMap<Box<[u8]>, Option<LostRecord>>,
}

impl Digest {
    /// Adds the records of `segment` after `folded`, up to the byte `end` if present. (After a power loss a segment may
    /// exist again in part although the snapshot has all of it.)
    pub fn add(&mut self, segment: &Arc<Segment>, end: Option<u64>, folded: Lsn) -> Result<()> {
        let index = self.segments.len() as u32;
        self.segments.push(Arc::clone(segment));
        let mut reader = segment.read(end).map_err(|error| unreadable(segment, error))?;
        loop {
            let offset = reader.offset;
            match reader.step().map_err(|error| unreadable(segment, error))? {
                Step::End => return Ok(()),
                Step::Bad { why, .. } => return Err(damaged(segment, offset, why)),
                Step::Record { lsn, .. } if lsn <= folded => {}
                Step::Record { lsn: _, payload, payload_offset } => {
                    self.absorb(index, payload, payload_offset)
                        .map_err(|error| damaged(segment, offset, &error.to_string()))?;
                }
            }
        }
    }

    fn absorb(&mut self, segment: u32, payload: &[u8], payload_offset: u64) -> postcard::Result<()> {
        let (count, mut rest) = postcard::take_from_bytes::<u64>(payload)?;
        for _ in 0..count {
            let (change, after) = postcard::take_from_bytes::<Change>(rest)?;
            match change {
                Change::PutFile(file, _) => {
                    // The record follows the variant and the id.
                    let ((_, _), record) = postcard::take_from_bytes::<(u32, FileId)>(rest)?;
                    let offset = payload_offset + (payload.len() - record.len()) as u64;
                    let bytes = (record.len() - after.len()) as u32;
                    self.files.insert(file, Some(Span { segment, bytes, offset }));
                }
                Change::DropFile(file) => {
                    self.files.insert(file, None);
                }
                Change::PutEntry(dir, name, record) => {
                    self.entries.insert((dir, name), Some(record));
                }
                Change::DropEntry(dir, name) => {
                    self.entries.insert((dir, name), None);
                }
                Change::PutOp(seq, record) => {
                    self.ops.insert(seq, Some(record));
                }
                Change::DropOp(seq) => {
                    self.ops.insert(seq, None);
                }
                Change::PutMark(mark, number) => {
                    self.marks.insert(mark, number);
                }
                Change::PutHints(of, record) => {
                    self.hints.insert(of, Some(record));
                }
                Change::DropHints(of) => {
                    self.hints.insert(of, None);
                }
                Change::PutLost(path, record) => {
                    self.lost.insert(path, Some(record));
                }
                Change::DropLost(path) => {
                    self.lost.insert(path, None);
                }
            }
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err(postcard::Error::DeserializeBadEncoding) }
    }

    /// Fetches the record at `span` into `buffer`.
    pub fn fetch(&self, span: Span, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.resize(span.bytes as usize, 0);
        let segment = self.segments.get(span.segment as usize).ok_or(io::ErrorKind::NotFound)?;
        segment.file.read_exact_at(buffer, span.offset)
    }
}

pub(super) const KEEP_A_COPY: &str = "keep a copy of the catalog's directory, look at the disk, compare the tiers' directories with the store \
     and copy over what is missing; then move the catalog's directory away to start afresh";

pub(super) fn unreadable(segment: &Segment, error: io::Error) -> Error {
    Error::new(format!("The catalog log {} cannot be read", segment.path.display())).why(error).data(DATA_IS_SAFE)
}

pub(super) fn damaged(segment: &Segment, offset: u64, why: &str) -> Error {
    Error::new(format!("The catalog log {} is damaged at byte {offset}", segment.path.display()))
        .why(format!("{why}; later records depend on it, so the state is unknown"))
        .remedy(KEEP_A_COPY)
        .data(DATA_IS_SAFE)
}
