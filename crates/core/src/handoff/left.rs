//! The state that a log comes to.

use std::collections::BTreeMap;

use foldhash::HashMap;

use super::Record;
use surgetank_types::model::{FileId, Kind, RunId};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftMirror {
    pub(crate) dir: FileId,
    pub(crate) name: Box<[u8]>,
    pub(crate) ino: u64,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeftHandle {
    pub(crate) id: FileId,
    pub(crate) flags: i32,
    pub(crate) writes: bool,
    pub(crate) run: RunId,
    pub(crate) direct: bool,
    /// The request that opened it; when the kernel sends that request again, it was not answered.
    pub(crate) by: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftListing {
    pub(crate) dir: FileId,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The offset at which the kernel continues, and the name before it.
    pub(crate) at: Option<(u64, Box<[u8]>)>,
}

/// A run that used the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftRun {
    /// Process id of `surgetank run`.
    pub pid: u32,
    /// Command line, shortened.
    pub command: String,
}

/// The facts that an agent left to the next one.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Left {
    pub(crate) mirrors: HashMap<FileId, LeftMirror>,
    pub(crate) handles: BTreeMap<u64, LeftHandle>,
    pub(crate) listings: BTreeMap<u64, LeftListing>,
    /// By handle: which request appended last, and where.
    pub(crate) appends: HashMap<u64, (u64, u64)>,
    pub(crate) backings: HashMap<FileId, u32>,
    /// Nanoseconds of mtime, links.
    pub(crate) dirs: HashMap<FileId, (i64, u32)>,
    pub(crate) noted: Vec<Vec<u8>>,
    /// Runs that used the directory, by their numbers.
    pub runs: BTreeMap<RunId, LeftRun>,
    /// Values by their names.
    pub facts: BTreeMap<String, Vec<u8>>,
    /// The highest handle that was ever granted.
    pub(crate) handle_max: u64,
}

impl Left {
    pub(super) fn take(&mut self, record: &Record<'_>) {
        match *record {
            Record::Mirror { id, dir, name, ino, kind } => {
                self.mirrors.insert(id, LeftMirror { dir, name: name.into(), ino, kind });
            }
            Record::Forgotten { id } => {
                self.mirrors.remove(&id);
                self.dirs.remove(&id);
            }
            Record::Opened { fh, id, flags, writes, run, direct, by } => {
                self.handle_max = self.handle_max.max(own(fh));
                self.handles.insert(fh, LeftHandle { id, flags, writes, run, direct, by });
            }
            Record::Closed { fh } => {
                self.handles.remove(&fh);
                self.listings.remove(&fh);
                self.appends.remove(&fh);
            }
            Record::Appending { fh, by, at } => drop(self.appends.insert(fh, (by, at))),
            Record::Listing { fh, dir, uid, gid } => {
                self.handle_max = self.handle_max.max(own(fh));
                self.listings.insert(fh, LeftListing { dir, uid, gid, at: None });
            }
            Record::Listed { fh, offset, before } => {
                if let Some(listing) = self.listings.get_mut(&fh) {
                    listing.at = Some((offset, before.into()));
                }
            }
            Record::Backed { id, backing } => drop(self.backings.insert(id, backing)),
            Record::Unbacked { id } => drop(self.backings.remove(&id)),
            Record::Touched { dir, nanos, links } => drop(self.dirs.insert(dir, (nanos, links))),
            Record::Noted { text } => self.noted.push(text.to_vec()),
            Record::Joined { run, pid, command } => {
                self.runs.insert(run, LeftRun { pid, command: command.to_owned() });
            }
            Record::Ended { run } => drop(self.runs.remove(&run)),
            Record::Fact { name, value } => drop(self.facts.insert(name.to_owned(), value.to_vec())),
        }
    }

    /// The fewest records that say the same.
    pub(super) fn each(&self, mut put: impl FnMut(&Record<'_>)) {
        for (id, LeftMirror { dir, name, ino, kind }) in &self.mirrors {
            put(&Record::Mirror { id: *id, dir: *dir, name, ino: *ino, kind: *kind });
        }
        for (fh, LeftHandle { id, flags, writes, run, direct, by }) in &self.handles {
            put(&Record::Opened {
                fh: *fh,
                id: *id,
                flags: *flags,
                writes: *writes,
                run: *run,
                direct: *direct,
                by: *by,
            });
        }
        for (fh, listing) in &self.listings {
            put(&Record::Listing { fh: *fh, dir: listing.dir, uid: listing.uid, gid: listing.gid });
            if let Some((offset, before)) = &listing.at {
                put(&Record::Listed { fh: *fh, offset: *offset, before });
            }
        }
        self.appends.iter().for_each(|(fh, (by, at))| put(&Record::Appending { fh: *fh, by: *by, at: *at }));
        // The highest number must not be granted again.
        if !self.handles.contains_key(&self.handle_max) && !self.listings.contains_key(&self.handle_max) {
            put(&Record::Listing { fh: self.handle_max, dir: FileId::ROOT, uid: 0, gid: 0 });
            put(&Record::Closed { fh: self.handle_max });
        }
        self.backings.iter().for_each(|(id, backing)| put(&Record::Backed { id: *id, backing: *backing }));
        for (dir, (nanos, links)) in &self.dirs {
            put(&Record::Touched { dir: *dir, nanos: *nanos, links: *links });
        }
        self.noted.iter().for_each(|text| put(&Record::Noted { text }));
        for (run, LeftRun { pid, command }) in &self.runs {
            put(&Record::Joined { run: *run, pid: *pid, command });
        }
        self.facts.iter().for_each(|(name, value)| put(&Record::Fact { name, value }));
    }
}

/// The number, if the agent counted to it. Those of homes (`namespace/homes.rs`) are another member's.
fn own(fh: u64) -> u64 {
    /// Of numbers that the pool gives.
    const NOT_COUNTED: u64 = 1 << 63;
    if fh & NOT_COUNTED == 0 { fh } else { 0 }
}
