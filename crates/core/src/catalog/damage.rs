//! Damage beyond a torn end of the log: intact records behind a bad one, or a bad one that no death of the writer
//! leaves.
//!
//! Records are written one behind the other, so a killed agent leaves at most a cut one at the very end. Anything else
//! is damage, or a machine that went down before the bad record was on the media. The two cannot always be
//! distinguished.
//!
//! Invariants:
//! - Records behind a bad one are not believed. They build on it, because the queue's order runs through it; a state
//!   without it never existed.
//! - The log is kept as it was until the user has the report.
//! - Recovery deletes nothing for want of a record (`namespace/recover/damaged`).
//!
//! The danger that it avoids: records are dropped without a report.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Lsn;
use super::directory::TEMPORARY_EXTENSION;
use super::record::{FRAME_BYTES, Frame};
use super::segment::{HEADER_BYTES, Segment, Step};

/// The place and extent of a log's damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The file with the first bad byte, and that byte's offset. (For a log whose header is bad: 0.)
    pub path: PathBuf,
    pub(crate) offset: u64,
    /// Intact records behind it, none of which is believed.
    pub records_behind: u64,
}

impl Damage {
    /// Where the unchanged log is stored once the damage is reported.
    pub fn reported_path(&self) -> PathBuf {
        match self.path.extension() {
            Some(extension) if extension == KEPT => self.path.with_extension(REPORTED),
            _ => aside(&self.path, REPORTED),
        }
    }
}

const KEPT: &str = "damaged";
const REPORTED: &str = "reported";
/// Positions of failed commits are skipped; so many never fail in a row.
const POSITIONS_LEFT_OUT_MAX: u64 = 1 << 32;

/// Counts intact records with later positions than `last`: in the first of `segments` from `good` on, and in the
/// others.
pub(super) fn intact_behind(segments: &[Segment], good: u64, last: Lsn) -> io::Result<u64> {
    let mut last = last;
    let mut records = 0;
    for (index, segment) in segments.iter().enumerate() {
        let begin = if index == 0 { good.max(HEADER_BYTES) } else { HEADER_BYTES };
        records += scan(&segment.file, begin, &mut last)?;
    }
    Ok(records)
}

/// The start of the next record is unknown: it may be at every byte.
fn scan(file: &File, begin: u64, last: &mut Lsn) -> io::Result<u64> {
    let length = file.metadata()?.len().saturating_sub(begin);
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, begin)?;
    let mut rest = &*bytes;
    let mut records = 0;
    while let Some(head) = rest.first_chunk::<FRAME_BYTES>() {
        let frame = Frame::read(head);
        let possible = frame.payload_bytes > 0 && frame.lsn > *last && frame.lsn.0 - last.0 <= POSITIONS_LEFT_OUT_MAX;
        let payload = rest[FRAME_BYTES..].get(..frame.payload_bytes as usize).filter(|_| possible);
        match payload.filter(|payload| frame.fits(payload)) {
            Some(payload) => {
                records += 1;
                *last = frame.lsn;
                rest = &rest[FRAME_BYTES + payload.len()..];
            }
            None => rest = &rest[1..],
        }
    }
    Ok(records)
}

/// The damage of these logs, the first of which has a bad byte.
pub(super) fn of(segments: &[Segment]) -> io::Result<Option<Damage>> {
    let Some(first) = segments.first() else { return Ok(None) };
    let mut last = first.after();
    let mut offset = 0;
    if first.header.is_some() {
        let mut reader = first.read(None)?;
        let is_whole = loop {
            match reader.step()? {
                Step::Record { lsn, .. } => last = lsn,
                Step::End => break true,
                Step::Bad { .. } => break false,
            }
        };
        // A whole segment is cut off because records before it are missing.
        (offset, last) = if is_whole { (0, first.after()) } else { (reader.offset, last) };
    }
    let records_behind = intact_behind(segments, offset, last)?;
    Ok(Some(Damage { path: first.path.clone(), offset, records_behind }))
}

/// Copies the segments aside, durably, before they are cut.
pub(super) fn keep(dir: &Path, segments: &[Segment]) -> io::Result<()> {
    for segment in segments {
        let kept = aside(&segment.path, KEPT);
        // (Named like an unfinished file until it is complete.)
        let temporary = kept.with_extension(TEMPORARY_EXTENSION);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut to = options.open(&temporary)?;
        io::copy(&mut File::open(&segment.path)?, &mut to)?;
        to.sync_all()?;
        std::fs::rename(&temporary, &kept)?;
    }
    File::open(dir)?.sync_all()
}

/// Damage whose log is kept and that has not been reported.
pub(super) fn unreported(dir: &Path) -> io::Result<Option<Damage>> {
    let segments =
        kept_in(dir, KEPT)?.into_iter().map(|path| Segment::open(path, false)).collect::<io::Result<Vec<_>>>()?;
    of(&segments)
}

/// The kept log stays, for later inspection.
pub(super) fn mark_reported(dir: &Path) -> io::Result<()> {
    let kept = kept_in(dir, KEPT)?;
    for path in &kept {
        std::fs::rename(path, path.with_extension(REPORTED))?;
    }
    if kept.is_empty() { Ok(()) } else { File::open(dir)?.sync_all() }
}

pub(super) fn was_reported(dir: &Path) -> io::Result<bool> {
    Ok(!kept_in(dir, REPORTED)?.is_empty())
}

fn aside(path: &Path, extension: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(extension);
    path.with_file_name(name)
}

fn kept_in(dir: &Path, as_what: &str) -> io::Result<Vec<PathBuf>> {
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == as_what) {
            kept.push(path);
        }
    }
    kept.sort_unstable();
    Ok(kept)
}
