//! The directory of a catalog: which process may use it, its files, and what a death leaves of it.
//!
//! ```text
//! lock             held (flock) by the agent that uses it, with its pid
//! snapshot.redb    the content of the segments before the oldest one here
//! log-<first>.wal  segments, oldest first; the last is appended to
//! *.new            an unfinished file; removed at the next start
//! *.damaged        a log as it was before it was cut, until the user has the report (then *.reported); see `damage`
//! ```
//! Recovery keeps every intact record up to the first bad one.
//!
//! - In the last segment, and in one that was not yet on the media when the machine died, a bad record marks the death:
//!   recovery cuts the segment there.
//! - With intact records behind it the cause is uncertain, and recovery reports it.
//! - Anywhere else it is damage, and recovery refuses.
//!
//! The danger that it avoids: the agent continues from a state that never existed.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use surgetank_types::sync::Arc;

use rustix::fs::{FlockOperation, flock};

use super::Lsn;
use super::damage::{self, Damage};
use super::digest::{damaged, unreadable};
use super::segment::{self, FORMAT, HEADER_BYTES, Segment, Step};
use super::snapshot::Snapshot;
use surgetank_types::error::{Errno, Error, Result};

pub(super) const TEMPORARY_EXTENSION: &str = "new";
pub(super) const DATA_IS_SAFE: &str =
    "files in the tiers' directories and in the store are plain files under their own names and were not touched";

/// What the last death cost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Recovery {
    /// Bytes of the log after its last intact record. None of them was promised to survive what happened, unless the
    /// disk damaged them.
    pub dropped_bytes: u64,
    /// The file that was cut and the offset where it ends now.
    pub cut: Option<(PathBuf, u64)>,
    /// More was lost than a death takes, and the user has no report yet: see [`super::Catalog::damage_reported`].
    pub damage: Option<Damage>,
    /// An earlier start found such damage.
    pub damaged_once: bool,
}

/// The state that a start finds.
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

/// Makes the directory when absent, with its missing ancestors, for its owner only. Returns the directories that got a
/// new entry.
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
    let failed = |error: io::Error| not_locked(&path, error);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    hold(dir, &path, &mut file)?;
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// The same for a reader that changes nothing: the holder's pid is not overwritten. `None`: no process ever took it.
pub(super) fn lock_to_look(dir: &Path) -> Result<Option<File>> {
    let path = dir.join("lock");
    match File::open(&path) {
        Ok(mut file) => hold(dir, &path, &mut file).map(|()| Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(not_locked(&path, error)),
    }
}

fn not_locked(path: &Path, error: io::Error) -> Error {
    Error::new(format!("The catalog's lock {} cannot be taken", path.display())).why(error)
}

fn hold(dir: &Path, path: &Path, file: &mut File) -> Result<()> {
    match flock(&*file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let holder = match file.read_to_string(&mut holder) {
                Ok(_) if !holder.trim().is_empty() => format!("process {}", holder.trim()),
                _ => "another process".to_owned(),
            };
            Err(Error::new(format!("The catalog {} is in use", dir.display()))
                .why(format!("{holder} holds {}", path.display()))
                .remedy("let that agent finish, or join it; one agent serves a directory on a node")
                .data(DATA_IS_SAFE))
        }
        Err(errno) => Err(not_locked(path, errno.into())),
    }
}

/// The state before any repair.
pub(super) struct Survey {
    /// Unfinished files, and segments that do not count.
    void: Vec<PathBuf>,
    is_snapshot_void: bool,
    /// Oldest first; in the last one the records up to `end` count.
    pub segments: Vec<Segment>,
    pub end: u64,
    pub folded: Option<Lsn>,
    last: Lsn,
    /// Cut off: the last segment from `end` on, and these.
    cut: Option<Cut>,
}

struct Cut {
    why: &'static str,
    /// The first ends at this byte; below a header's length nothing of it counts.
    good: u64,
    segments: Vec<Segment>,
    is_damage: bool,
}

/// Inspects the directory and changes nothing. (`folded`: the position up to which the snapshot, if present, holds the
/// log.)
pub(super) fn survey(dir: &Path, folded: Option<Lsn>, writable: bool) -> Result<Survey> {
    let (mut segments, mut void) = list(dir, writable).map_err(|error| unreadable_directory(dir, error))?;
    let mut survey = Survey {
        void: Vec::new(),
        is_snapshot_void: false,
        segments: Vec::new(),
        end: HEADER_BYTES,
        folded,
        last: Lsn(0),
        cut: None,
    };
    // A fresh start voids all that came before it; a death may have prevented the deletion.
    let is_fresh = |segment: &Segment| segment.header.is_some_and(|header| header.fresh);
    if let Some(index) = segments.iter().rposition(is_fresh) {
        void.extend(segments.drain(..index).map(|segment| segment.path));
        let begin = segments.first().and_then(|segment| segment.header).map_or(Lsn(0), |header| header.after);
        if folded.is_some_and(|folded| folded <= begin) {
            survey.is_snapshot_void = true;
            survey.folded = None;
        }
    }
    // A fold also voids the segments that it covers.
    let base = survey.folded.unwrap_or_default();
    while let [_, next, ..] = &*segments
        && next.header.is_some_and(|header| header.after <= base)
    {
        void.push(segments.remove(0).path);
    }
    survey.void = void;
    survey.last = base;
    for index in 0..segments.len() {
        let segment = &segments[index];
        let (good, problem) = examine(segment, &mut survey.last, index == 0)?;
        if good >= HEADER_BYTES {
            survey.end = good;
        }
        let Some(Problem { why, torn }) = problem else { continue };
        // Damage where no record may be missing; otherwise the place of the death.
        let is_last = index + 1 == segments.len();
        if segment.marked_bytes.is_some() && !is_last {
            return Err(damaged(segment, good, why));
        }
        if let Some(marked) = segment.marked_bytes.filter(|marked| good < *marked) {
            return Err(damaged(segment, good, &format!("{why}, yet {marked} bytes were safely on the disk")));
        }
        let cut = segments.split_off(index);
        let behind = damage::intact_behind(&cut, good, survey.last);
        let is_damage = !torn || behind.map_err(|error| unreadable_directory(dir, error))? > 0;
        if let Some(segment) = cut.first().filter(|_| good >= HEADER_BYTES) {
            let segment = Segment::open(segment.path.clone(), writable);
            segments.push(segment.map_err(|error| unreadable_directory(dir, error))?);
        }
        survey.cut = Some(Cut { why, good, segments: cut, is_damage });
        break;
    }
    survey.segments = segments;
    Ok(survey)
}

impl Survey {
    /// The report for the user.
    pub fn recovery(&self, dir: &Path) -> Result<Recovery> {
        let unreadable = |error: io::Error| unreadable_directory(dir, error);
        let mut recovery = Recovery {
            damage: damage::unreported(dir).map_err(unreadable)?,
            damaged_once: damage::was_reported(dir).map_err(unreadable)?,
            ..Recovery::default()
        };
        if let Some(cut) = &self.cut {
            for (index, segment) in cut.segments.iter().enumerate() {
                let kept = if index == 0 { cut.good } else { 0 };
                recovery.dropped_bytes += segment.file.metadata().map_err(unreadable)?.len().saturating_sub(kept);
            }
            recovery.cut = cut.segments.first().map(|segment| (segment.path.clone(), cut.good));
            if cut.is_damage && recovery.damage.is_none() {
                recovery.damage = damage::of(&cut.segments).map_err(unreadable)?;
            }
        }
        Ok(recovery)
    }
}

/// Inspects the directory, repairs what a death left, and returns the state.
pub(super) fn recover(dir: &Path, snapshot: &Snapshot) -> Result<Found> {
    let failed = |error: io::Error| unreadable_directory(dir, error);
    let folded = snapshot.exists().then(|| snapshot.folded()).transpose()?;
    let mut survey = survey(dir, folded, true)?;
    for path in &survey.void {
        std::fs::remove_file(path).map_err(failed)?;
    }
    if survey.is_snapshot_void {
        snapshot.delete().map_err(failed)?;
    }
    let mut recovery = survey.recovery(dir)?;
    if let Some(cut) = survey.cut.take() {
        if cut.is_damage {
            damage::keep(dir, &cut.segments).map_err(failed)?;
            recovery.damage = damage::unreported(dir).map_err(failed)?;
        }
        cut_off(cut.segments, cut.good).map_err(failed)?;
        tracing::warn!(dropped_bytes = recovery.dropped_bytes, cut = ?recovery.cut, damage = ?recovery.damage, why = cut.why, "the catalog's log ended in a bad record");
    }
    // A marked segment is never appended to: its mark would be wrong.
    let Survey { mut segments, mut end, folded, last, .. } = survey;
    if segments.last().is_none_or(|segment| segment.marked_bytes.is_some()) {
        segments.push(Segment::create(dir, last, false).map_err(failed)?);
        end = HEADER_BYTES;
    }
    Ok(Found { segments: segments.into_iter().map(Arc::new).collect(), end, folded, last, recovery })
}

fn unreadable_directory(dir: &Path, error: io::Error) -> Error {
    Error::new(format!("The catalog's directory {} cannot be read", dir.display())).why(error).data(DATA_IS_SAFE)
}

/// All segments, oldest first, and unfinished files that a death left.
fn list(dir: &Path, writable: bool) -> io::Result<(Vec<Segment>, Vec<PathBuf>)> {
    let (mut names, mut void) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if Path::new(&entry.file_name()).extension().is_some_and(|extension| extension == TEMPORARY_EXTENSION) {
            void.push(entry.path());
        } else if let Some(name) = entry.file_name().to_str().filter(|name| segment::is_segment(name)) {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    let segments = names.into_iter().map(|name| Segment::open(dir.join(name), writable));
    Ok((segments.collect::<io::Result<_>>()?, void))
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

struct Problem {
    why: &'static str,
    /// A death of the writer may look like this, without a death of the machine.
    torn: bool,
}

/// Finds where the intact records of `segment` end and what, if anything, is wrong there; moves `last` on.
fn examine(segment: &Segment, last: &mut Lsn, is_first: bool) -> Result<(u64, Option<Problem>)> {
    let damage = |why| Some(Problem { why, torn: false });
    let Some(header) = segment.header else {
        return Ok((0, damage("the header is damaged or was never written")));
    };
    // Records do not describe their own shape: another format would be misread.
    if header.format != FORMAT {
        return Err(other_format("log", &segment.path, u64::from(header.format), u64::from(FORMAT)));
    }
    if header.after > *last {
        if is_first && !header.fresh {
            return Err(damaged(segment, 0, "the segment before this one, or the snapshot, is missing"));
        } else if !is_first {
            return Ok((0, damage("the segment before this one ends too early")));
        }
        *last = header.after;
    }
    let mut reader = segment.read(None).map_err(|error| unreadable(segment, error))?;
    let problem = loop {
        match reader.step().map_err(|error| unreadable(segment, error))? {
            Step::Record { lsn, .. } => *last = lsn.max(*last),
            Step::End => break None,
            Step::Bad { why, torn } => break Some(Problem { why, torn }),
        }
    };
    let short = segment.marked_bytes.is_some_and(|marked| reader.offset < marked);
    let missing = || Problem { why: "records are missing at the end", torn: false };
    Ok((reader.offset, problem.or(short.then(missing))))
}

/// Cuts the first of `segments` to `good` bytes (0: removes it) and removes the others, the youngest first. So a death
/// in between leaves the same work.
fn cut_off(segments: Vec<Segment>, good: u64) -> io::Result<()> {
    for (index, segment) in segments.iter().enumerate().rev() {
        // On the media at once: later records must not come before those that a second power loss brings back.
        if index > 0 || good == 0 {
            std::fs::remove_file(&segment.path)?;
            if let Some(dir) = segment.path.parent() {
                File::open(dir)?.sync_all()?;
            }
        } else {
            segment.file.set_len(good)?;
            segment.file.sync_all()?;
        }
    }
    Ok(())
}
