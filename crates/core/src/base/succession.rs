//! The handoff: state that lets the next agent continue when this one is killed (`crate::handoff`; the catalog has the
//! requests that were carried out). `restore` is the next agent's side.
//!
//! When an agent is killed before it answers, the kernel sends the request again. That request has one of two states:
//! - Carried out: its change is committed, and the same record has the request's number. The next agent answers it from
//!   the present state.
//! - Not carried out: it has left no trace, and the next agent carries it out like a new one.
//!
//! Without a supervisor the agent writes no handoff. The danger that this avoids: a request that takes effect twice, or
//! never.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use surgetank_state::{Inode, Name, Place, Tree};
use surgetank_store::StoreStat;
use surgetank_types::model::{Change, FileId, Image, Kind, Mark, RunId};
use surgetank_types::sync::atomic::{AtomicBool, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::base::notes::Noted;
use crate::content::{Content, Location, Open};
use crate::handoff::{Handoff, Left, LeftMirror, Record};

/// Counters of the catalog: the last request that a thread carried out, and the file of that request.
/// The number of the kernel's references is unknown: the file is remembered as long as the mount lives.
pub(crate) const MANY: u32 = u32::MAX / 2;
/// A program without an answer asks the next agent as soon as it is there.
const ASKED_AGAIN_WITHIN: Duration = Duration::from_secs(5);

/// Holds descriptors that have to outlive the agent (the supervisor).
pub trait Keeper: Send + Sync {
    /// Takes a duplicate of `file` under `name`. Errors: the keeper has ended.
    fn keep(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()>;
    /// Closes the descriptor under `name`, if there is one.
    fn give_up(&self, name: &str);
}

thread_local! {
    /// Does the thread do something besides its request?
    static BESIDES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A flag of this thread, which is as before once this is dropped, also after a panic.
pub(crate) struct Flag {
    flag: &'static std::thread::LocalKey<std::cell::Cell<bool>>,
    before: bool,
}

impl Flag {
    pub fn set(flag: &'static std::thread::LocalKey<std::cell::Cell<bool>>) -> Self {
        Self { flag, before: flag.replace(true) }
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.flag.set(self.before);
    }
}

/// A request of the kernel, as the thread that serves it knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Two requests with the same slot are never served at once.
    pub slot: u64,
    /// Number of the request; a repeated request has the same one.
    pub number: u64,
}

/// The means of a handoff.
#[derive(Default)]
pub struct Survival {
    /// Memory that the supervisor holds; `None`: no other agent takes over.
    pub handoff: Option<Arc<Handoff>>,
    /// Holder of descriptors; `None`: they end with the agent.
    pub keeper: Option<Arc<dyn Keeper>>,
    /// The descriptors that the keeper held for an earlier agent, by name.
    pub kept: HashMap<String, File>,
    /// An earlier agent served this mount.
    pub again: bool,
    /// Files that processes created in delegated directories, and that an earlier agent did not record.
    pub intake: Vec<super::intake_file::IntakeFile>,
    /// Copies of what `fsync` synced of files in memory.
    pub synced_copies: Option<super::SyncedCopiesAt>,
}

type Names = HashMap<(FileId, Box<[u8]>), FileId>;

/// What an earlier agent left, and what this one leaves to the next.
pub struct Succession {
    log: Option<Arc<Handoff>>,
    keeper: Option<Arc<dyn Keeper>>,
    pub(crate) kept: Mutex<HashMap<String, File>>,
    pub(crate) again: bool,
    pub(crate) intake: Mutex<Vec<super::intake_file::IntakeFile>>,
    request: OnceLock<fn() -> Option<Request>>,
    pub(crate) left: Mutex<Left>,
    /// Files of the store that the kernel knows from an earlier agent, by their names; `mirrors`: whether there are any.
    names: Mutex<Names>,
    pub(crate) mirrors: AtomicBool,
    /// Requests that were carried out, and their files.
    pub(crate) done: Mutex<HashMap<u64, FileId>>,
    /// Handles below this number belong to an earlier agent.
    pub(crate) handles_from: OnceLock<u64>,
}

impl Succession {
    pub(crate) fn new(survival: Survival) -> Self {
        let Survival { handoff, keeper, kept, again, intake, synced_copies: _ } = survival;
        let left = handoff.as_ref().filter(|_| again).map(|handoff| handoff.left()).unwrap_or_default();
        Self {
            log: handoff,
            keeper,
            kept: Mutex::new(kept),
            again,
            intake: Mutex::new(intake),
            request: OnceLock::new(),
            names: Mutex::new(left.mirrors.iter().map(|(id, one)| ((one.dir, one.name.clone()), *id)).collect()),
            mirrors: AtomicBool::new(!left.mirrors.is_empty()),
            left: Mutex::new(left),
            done: Mutex::default(),
            handles_from: OnceLock::new(),
        }
    }

    pub(crate) fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(crate) fn done(&self) -> MutexGuard<'_, HashMap<u64, FileId>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Succession {
    /// Tells which request this thread serves.
    pub fn set_request(&self, request: fn() -> Option<Request>) {
        let _ = self.request.set(request);
    }

    pub(crate) fn hand_off(&self, record: &Record<'_>) {
        if let Some(handoff) = &self.log {
            handoff.put(record);
        }
    }

    fn request(&self) -> Option<Request> {
        if BESIDES.get() { None } else { self.request.get().and_then(|request| request()) }
    }

    /// What this thread does meanwhile is not its request: that is not carried out yet.
    pub(crate) fn besides<T>(act: impl FnOnce() -> T) -> T {
        let _flag = Flag::set(&BESIDES);
        act()
    }

    pub(crate) fn hand_off_handle(&self, fh: u64, open: &Open, writes: bool, flags: i32, run: RunId) {
        if self.log.is_some() {
            let by = self.request().map_or(0, |request| request.number);
            self.hand_off(&Record::Opened { fh, id: open.id, flags, writes, run, direct: open.direct, by });
        }
    }

    pub(crate) fn hand_off_noted(&self, noted: &Noted) {
        if self.log.is_some()
            && noted.counts
            && let Ok(text) = serde_json::to_vec(noted)
        {
            self.hand_off(&Record::Noted { text: &text });
        }
    }

    /// The directories of names that changed have new times, and files that are dropped mean nothing any more.
    pub(crate) fn hand_off_names(&self, tree: &Tree, names: &[Place], dropped: &[FileId]) {
        if self.log.is_none() {
            return;
        }
        let mut touched = None;
        for (dir, _) in names {
            if touched != Some(*dir)
                && let Some(inode) = tree.get(*dir)
            {
                let (nanos, links) = (inode.attr.mtime.nanos, inode.attr.links);
                self.hand_off(&Record::Touched { dir: *dir, nanos, links });
                touched = Some(*dir);
            }
        }
        dropped.iter().for_each(|id| self.hand_off(&Record::Forgotten { id: *id }));
    }

    /// Where this request appends. One that comes again appends where it did, or it would do so twice.
    pub(crate) fn append_at(&self, fh: u64, end: u64) -> u64 {
        let Some(by) = self.request().map(|request| request.number) else { return end };
        if self.again
            && let Some((before, at)) = self.left().appends.get(&fh)
            && *before == by
        {
            return *at;
        }
        self.hand_off(&Record::Appending { fh, by, at: end });
        end
    }

    /// What the catalog says of the request that this thread carries out.
    pub(crate) fn request_done(&self, about: FileId) -> Option<[Change; 2]> {
        let nonce = self.log.as_ref()?.nonce();
        let Request { slot, number } = self.request()?;
        Some([Change::PutMark(Mark::Request(slot), number ^ nonce), Change::PutMark(Mark::RequestFile(slot), about.0)])
    }

    /// The file of a request that an earlier agent carried out; `None`: it did not.
    pub fn carried_out(&self, number: u64) -> Option<FileId> {
        self.done().get(&number).copied()
    }

    pub(crate) fn remember_requests(&self, image: &Image) {
        let Some(handoff) = self.log.as_ref().filter(|_| self.again) else { return };
        let mut done = self.done();
        for (mark, number) in &image.marks {
            if let Mark::Request(slot) = mark
                && let Some(about) = image.marks.get(&Mark::RequestFile(*slot))
            {
                done.insert(number ^ handoff.nonce(), FileId(*about));
            }
        }
    }

    /// An empty file may have been made for a program that got no answer and asks again. The store must not show the file
    /// before that program had time to write it.
    pub(crate) fn await_makers(&self, tree: &mut Tree) {
        if !self.again {
            return;
        }
        let empty = |inode: &Inode| inode.attr.kind == Kind::File && inode.attr.size_bytes == 0;
        let ops: Vec<_> =
            tree.iter().filter(|(_, inode)| empty(inode)).filter_map(|(_, inode)| inode.publish).collect();
        let until = surgetank_types::clock::tick() + ASKED_AGAIN_WITHIN;
        for seq in ops {
            if let Some(op) = tree.ops.get_mut(&seq) {
                op.not_before = Some(until);
            }
        }
    }

    /// Which run a file or operation of an earlier agent belongs to.
    pub(crate) fn still(&self, run: RunId) -> RunId {
        if self.again { run } else { RunId(0) }
    }

    /// The number of a file that is only the store's: the one that the kernel knows, or a new one.
    pub(crate) fn mirror_id(&self, tree: &mut Tree, dir: FileId, name: &Name, stat: &StoreStat) -> FileId {
        if let Some(id) = self.known_before(tree, dir, name, stat) {
            return id;
        }
        let id = tree.new_id();
        let (ino, kind) = (stat.attr.ino, stat.attr.kind);
        self.hand_off(&Record::Mirror { id, dir, name, ino, kind });
        id
    }

    fn known_before(&self, tree: &Tree, dir: FileId, name: &Name, stat: &StoreStat) -> Option<FileId> {
        if !self.mirrors.load(Ordering::Relaxed) {
            return None;
        }
        let id = *self.names().get(&(dir, Box::from(&**name)))?;
        let same = self.left().mirrors.get(&id).is_some_and(|one| one.is(stat));
        (same && tree.get(id).is_none()).then_some(id)
    }

    /// A file of the store loses its last name while it is open: the next agent could not open it any more.
    pub(crate) fn keep_content(&self, open: &Open) {
        if let Some(keeper) = &self.keeper
            && let content = open.content()
            && content.location == Location::Store
            && let Err(why) = keeper.keep(&kept_as(open.id), content.file.as_fd())
        {
            tracing::warn!(%why, "an open file without a name would not survive this agent");
        }
    }

    /// No process has the file open any more, and it has no name.
    pub(crate) fn give_up_content(&self, id: FileId) {
        if let Some(keeper) = &self.keeper {
            keeper.give_up(&kept_as(id));
        }
    }

    /// Does a program have the file open through the mount since an earlier agent?
    pub(crate) fn left_open(&self, id: FileId) -> bool {
        self.again && self.left().handles.values().any(|handle| handle.id == id)
    }

    /// Do programs go on, and is not known yet with what?
    pub(crate) fn is_yet_to_restore(&self) -> bool {
        self.again && self.handles_from.get().is_none()
    }

    /// Can a program write the file through the mount?
    pub(crate) fn left_written(&self, id: FileId) -> bool {
        self.again && self.left().handles.values().any(|handle| handle.id == id && handle.writes)
    }

    /// Does a program still have the plain file itself open for writing?
    pub(crate) fn is_still_granted(&self, content: &Content) -> bool {
        self.again && matches!(content.location, Location::Tier(_)) && !crate::content::has_no_writer(content)
    }

    /// Is the handle one that an earlier agent gave, and that could not be restored?
    pub(crate) fn is_lost_handle(&self, fh: u64) -> bool {
        self.handles_from.get().is_some_and(|from| fh < *from)
    }

    pub(crate) fn backing_left(&self, id: FileId) -> Option<u32> {
        self.left().backings.remove(&id)
    }

    /// The handle that an earlier agent made for this request and did not tell the kernel of, and its file.
    pub fn handle_made_by(&self, request: u64) -> Option<(u64, FileId)> {
        let left = self.left();
        left.handles.iter().find(|(_, handle)| handle.by == request).map(|(fh, handle)| (*fh, handle.id))
    }
}

pub(crate) fn kept_as(id: FileId) -> String {
    format!("content-{}", id.0)
}

impl LeftMirror {
    pub(crate) fn is(&self, stat: &StoreStat) -> bool {
        (self.ino, self.kind) == (stat.attr.ino, stat.attr.kind)
    }
}
