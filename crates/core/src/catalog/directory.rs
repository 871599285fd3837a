//! The directory of a catalog: who may use it, what lies in it, and what is left of it after a death.
//!
//! ```text
//! lock             held (flock) by the agent that uses it, with its pid
//! snapshot.redb    what the segments before the oldest one here came to
//! log-<first>.wal  segments, oldest first; the last is appended to
//! *.new            a file being made; removed at the next start
//! ```
//! Recovery keeps every intact record up to the first bad one. In the last segment, and in one that was not yet on
//! the media when the machine died, a bad record is where the death happened: it is cut off there. Anywhere
//! else it is damage, and recovery refuses rather than go on from a state that never was.

use crate::sync::Arc;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::Lsn;
use super::digest::{damaged, unreadable};
use super::segment::{self, FORMAT, HEADER_BYTES, Segment, Step};
use super::snapshot::Snapshot;
use crate::error::{Errno, Error, Result};

pub(super) const TEMPORARY_EXTENSION: &str = "new";
pub(super) const DATA_IS_SAFE: &str =
    "files in the tiers' directories and in the store are plain files under their own names and were not touched";

/// What the last death cost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recovery {
    /// Bytes of the log after its last intact record. None of them had been promised to survive what happened,
    /// unless the disk damaged them.
    pub dropped_bytes: u64,
    /// The file that was cut and the offset where it ends now.
    pub cut: Option<(PathBuf, u64)>,
}

/// What is found at the start.
pub(super) struct Found {
    /// Not folded yet, oldest first; the last is the current one and fit to be appended to.
    pub segments: Vec<Arc<Segment>>,
    /// End of the current segment.
    pub end: u64,
    /// Up to which position the snapshot holds the log; `None` when there is no snapshot.
    pub folded: Option<Lsn>,
    /// The last position.
    pub last: Lsn,
    pub recovery: Recovery,
}

/// Makes the directory when absent, with the ancestors it needs; for its owner only. Returns the directories that got a new
/// entry by this.
pub(super) fn create(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: io::Error| {
        Error::new(format!("The catalog's directory {} cannot be used", dir.display()))
            .why(error)
            .remedy("choose another place for the state, on a local disk, owned by you")
    };
    let absent = dir.ancestors().take_while(|ancestor| !ancestor.as_os_str().is_empty() && !ancestor.exists());
    let here = Path::new(".");
    let parents = absent
        .filter_map(Path::parent)
        .map(|parent| if parent.as_os_str().is_empty() { here } else { parent }.to_owned())
        .collect();
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    let mode = std::fs::metadata(dir).map_err(failed)?.permissions().mode() & 0o7777;
    if mode != 0o700 {
        std::fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(failed)?;
    }
    Ok(parents)
}

/// Takes the directory for this process, as long as the file lives.
pub(super) fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let failed =
        |error: io::Error| Error::new(format!("The catalog's lock {} cannot be taken", path.display())).why(error);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let holder = match file.read_to_string(&mut holder) {
                Ok(_) if !holder.trim().is_empty() => format!("process {}", holder.trim()),
                _ => "another process".to_owned(),
            };
            return Err(Error::new(format!("The catalog {} is in use", dir.display()))
                .why(format!("{holder} holds {}", path.display()))
                .remedy("let that agent finish, or join it; one agent serves a directory on a node")
                .data(DATA_IS_SAFE));
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Looks through the directory, puts right what a death left, and says what there is.
pub(super) fn recover(dir: &Path, snapshot: &Snapshot) -> Result<Found> {
    let failed = |error: io::Error| {
        Error::new(format!("The catalog's directory {} cannot be read", dir.display())).why(error).data(DATA_IS_SAFE)
    };
    let mut segments = list(dir).map_err(failed)?;
    let mut folded = snapshot.exists().then(|| snapshot.folded()).transpose()?;

    // A fresh start makes all that came before it void; a death may have kept it from being deleted.
    let is_fresh = |segment: &Segment| segment.header.is_some_and(|header| header.fresh);
    if let Some(index) = segments.iter().rposition(is_fresh) {
        for segment in segments.drain(..index) {
            std::fs::remove_file(&segment.path).map_err(failed)?;
        }
        let begin = segments.first().and_then(|segment| segment.header).map_or(Lsn(0), |header| header.after);
        if folded.is_some_and(|folded| folded <= begin) {
            snapshot.delete().map_err(failed)?;
            folded = None;
        }
    }
    // So does a fold make the segments void that it covers.
    let base = folded.unwrap_or_default();
    while let [_, next, ..] = &*segments
        && next.header.is_some_and(|header| header.after <= base)
    {
        std::fs::remove_file(&segments.remove(0).path).map_err(failed)?;
    }

    let mut recovery = Recovery::default();
    let mut last = base;
    let mut end = HEADER_BYTES;
    for index in 0..segments.len() {
        let segment = &segments[index];
        let (good, problem) = examine(segment, &mut last, index == 0)?;
        if good >= HEADER_BYTES {
            end = good;
        }
        let Some(why) = problem else { continue };
        // Damage where nothing may be missing; otherwise the place of the death.
        let is_last = index + 1 == segments.len();
        if segment.marked_bytes.is_some() && !is_last {
            return Err(damaged(segment, good, why));
        }
        if let Some(marked) = segment.marked_bytes.filter(|marked| good < *marked) {
            return Err(damaged(segment, good, &format!("{why}, yet {marked} bytes were safely on the disk")));
        }
        recovery = cut(segments.split_off(index), good).map_err(failed)?;
        if let Some(segment) = recovery.cut.as_ref().filter(|_| good >= HEADER_BYTES) {
            segments.push(Segment::open(segment.0.clone()).map_err(failed)?);
        }
        tracing::warn!(dropped_bytes = recovery.dropped_bytes, cut = ?recovery.cut, why, "the catalog's log ended in a torn record");
        break;
    }
    // A marked segment is never appended to: its mark would be wrong.
    if segments.last().is_none_or(|segment| segment.marked_bytes.is_some()) {
        segments.push(Segment::create(dir, last, false).map_err(failed)?);
        end = HEADER_BYTES;
    }
    Ok(Found { segments: segments.into_iter().map(Arc::new).collect(), end, folded, last, recovery })
}

/// All segments, oldest first; removes files that a death left half-made.
fn list(dir: &Path) -> io::Result<Vec<Segment>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if Path::new(&entry.file_name()).extension().is_some_and(|extension| extension == TEMPORARY_EXTENSION) {
            std::fs::remove_file(entry.path())?;
        } else if let Some(name) = entry.file_name().to_str().filter(|name| segment::is_segment(name)) {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    names.into_iter().map(|name| Segment::open(dir.join(name))).collect()
}

pub(super) fn other_format(part: &str, path: &Path, format: u64, known: u64) -> Error {
    let dir = path.parent().unwrap_or(path);
    Error::new(format!("The catalog {part} {} has format {format}", path.display()))
        .why(format!("this version of surgetank knows format {known}"))
        .remedy(format!(
            "use the version that wrote it; if that one ended well and keeps nothing in the tiers, remove {} instead",
            dir.parent().unwrap_or(dir).display()
        ))
        .data(DATA_IS_SAFE)
}

/// Where the intact records of `segment` end and what, if anything, is wrong there; moves `last` on.
fn examine(segment: &Segment, last: &mut Lsn, is_first: bool) -> Result<(u64, Option<&'static str>)> {
    let Some(header) = segment.header else {
        return Ok((0, Some("the header is damaged or was never written")));
    };
    // Records say nothing of their own shape: another one would be read as something that it is not.
    if header.format != FORMAT {
        return Err(other_format("log", &segment.path, u64::from(header.format), u64::from(FORMAT)));
    }
    if header.after > *last {
        if is_first && !header.fresh {
            return Err(damaged(segment, 0, "the segment before this one, or the snapshot, is missing"));
        } else if !is_first {
            return Ok((0, Some("the segment before this one ends too early")));
        }
        *last = header.after;
    }
    let mut reader = segment.read(None).map_err(|error| unreadable(segment, error))?;
    let problem = loop {
        match reader.step().map_err(|error| unreadable(segment, error))? {
            Step::Record { lsn, .. } => *last = lsn.max(*last),
            Step::End => break None,
            Step::Bad(why) => break Some(why),
        }
    };
    let short = segment.marked_bytes.is_some_and(|marked| reader.offset < marked);
    Ok((reader.offset, problem.or(short.then_some("records are missing at the end"))))
}

/// Cuts the first of `segments` to `good` bytes (0: removes it) and removes the others, the youngest first, so that a
/// death in between leaves the same to be done.
fn cut(segments: Vec<Segment>, good: u64) -> io::Result<Recovery> {
    let mut recovery = Recovery::default();
    for (index, segment) in segments.iter().enumerate().rev() {
        let length = segment.file.metadata()?.len();
        let kept = if index == 0 { good } else { 0 };
        recovery.dropped_bytes += length.saturating_sub(kept);
        // On the media at once: what comes next must not stand before what a second power loss brings back.
        if kept == 0 {
            std::fs::remove_file(&segment.path)?;
            if let Some(dir) = segment.path.parent() {
                File::open(dir)?.sync_all()?;
            }
        } else {
            segment.file.set_len(kept)?;
            segment.file.sync_all()?;
        }
        recovery.cut = Some((segment.path.clone(), kept));
    }
    Ok(recovery)
}
