//! The tree: every known file and name, and the state that they share.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::{HashMap, HashSet};

use surgetank_store::{Cred, StorePath};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, DeviceId, FileId, Kind, OpKind, Prepared, RunId, Seq};

use crate::bindings::Before;
use crate::charges::CleanFiles;
use crate::delegation::Delegations;
use crate::final_ops::FinalOps;
use crate::hints::KnownHints;
use crate::leaving::Leaving;
use crate::operation::{Op, files_of, places};
use crate::order::Order;
use crate::temporaries::Temporaries;
use crate::txn::Txn;
use crate::{Dir, Entry, Inode, Name, Place, Progress, State};

/// So many different reasons are kept before those without a file are dropped.
const REASONS_MAX: usize = 1024;

/// Inode numbers that the agent gives out are above this; those of store files are the store's own.
pub const OWN_INODE_BASE: u64 = 1 << 56;

/// Everything that one lock guards.
#[derive(Debug)]
pub struct Tree {
    pub(crate) inodes: HashMap<FileId, Box<Inode>>,
    /// The queue, in order.
    pub ops: BTreeMap<Seq, Box<Op>>,
    /// How many operations of the queue a file has.
    operations: HashMap<FileId, u32>,
    /// The operations that wait for the end of their run.
    pub(crate) for_the_end: FinalOps,
    /// All other operations of the queue.
    pub(crate) before_the_end: BTreeSet<Seq>,
    /// The directory of contents for other members' names ([`HOMES`](surgetank_types::model::HOMES)).
    pub homes: Option<FileId>,
    /// The number of the next file.
    pub next_id: u64,
    /// Spilled content with a lower number may belong to a file without a record in a damaged catalog.
    pub doubtful_below: u64,
    /// The number of the next operation.
    pub next_seq: u64,
    /// Staged temporaries whose operation was cancelled, to be removed by the drain.
    pub discards: Vec<(FileId, Name, Cred)>,
    /// Counts operations that changed the number of a file's names in the store.
    pub links_changed: u64,
    /// Reasons of placements, each once.
    reasons: HashSet<Arc<str>>,
    reasons_max: usize,
    /// Copies in progress, and their directories.
    pub staging: Vec<(Seq, FileId)>,
    /// Where the drain's temporaries may be.
    pub temporaries: Temporaries,
    /// Store files with several links, by their inode number: all names lead to one file.
    pub hard_links: HashMap<u64, FileId>,
    /// The part of each device that the store has too.
    pub clean: CleanFiles,
    /// Charged on each device for files that are still coming from the store.
    pub(crate) arriving_bytes: HashMap<DeviceId, u64>,
    /// The catalog's number for each device.
    pub device_numbers: HashMap<DeviceId, DeviceId>,
    /// Names for which the agent is making a plain file, and for which file. A name that is bound meanwhile leaves this
    /// list: its path then belongs to another plain file.
    pub making: HashMap<Place, FileId>,
    /// Delegated directories.
    pub delegations: Delegations,
    /// For files in the batch in progress: what the catalog keeps until the batch ends.
    pub before: HashMap<FileId, Before>,
    /// Files whose newest version was lost: the store's version counts again, and the agent must ask the store for it.
    pub reverted: Vec<FileId>,
    /// Publications that were taken back although the store may have carried them out and only its answer was lost.
    pub doubts: HashMap<FileId, Prepared>,
    /// Places in the queue of files that programs may still write, in a pool.
    pub order: Order,
    /// Files that are about to get a name at another member of the pool.
    pub leaving: Leaving,
    /// Hints of names, and whether there are any hints.
    pub hints: KnownHints,
    /// The changes since the last commit.
    pub txn: Txn,
}

impl Tree {
    /// Only the root is known.
    pub fn new(root: Inode) -> Self {
        let mut inodes = HashMap::default();
        inodes.insert(FileId::ROOT, Box::new(root));
        Self {
            inodes,
            ops: BTreeMap::new(),
            operations: HashMap::default(),
            for_the_end: FinalOps::default(),
            before_the_end: BTreeSet::new(),
            homes: None,
            next_id: 2,
            doubtful_below: 0,
            next_seq: 1,
            discards: Vec::new(),
            reverted: Vec::new(),
            making: HashMap::default(),
            delegations: Delegations::default(),
            links_changed: 0,
            reasons: HashSet::default(),
            reasons_max: REASONS_MAX,
            staging: Vec::new(),
            temporaries: Temporaries::default(),
            hard_links: HashMap::default(),
            clean: CleanFiles::default(),
            arriving_bytes: HashMap::default(),
            device_numbers: HashMap::default(),
            before: HashMap::default(),
            doubts: HashMap::default(),
            order: Order::default(),
            leaving: Leaving::default(),
            hints: KnownHints::default(),
            txn: Txn::default(),
        }
    }

    /// `None`: no such file is known.
    pub fn get(&self, id: FileId) -> Option<&Inode> {
        self.inodes.get(&id).map(AsRef::as_ref)
    }
    /// For a change, which the caller notes in `txn` if the catalog has to know it.
    pub fn get_mut(&mut self, id: FileId) -> Option<&mut Inode> {
        self.inodes.get_mut(&id).map(AsMut::as_mut)
    }
    /// All known files, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (FileId, &Inode)> {
        self.inodes.iter().map(|(id, inode)| (*id, inode.as_ref()))
    }
    /// The number of known files.
    pub fn count(&self) -> usize {
        self.inodes.len()
    }
    /// Adds a file under a number from [`Self::new_id`].
    pub fn insert(&mut self, id: FileId, inode: Inode) {
        self.inodes.insert(id, Box::new(inode));
    }
    /// Makes room for so many more files.
    pub fn reserve(&mut self, files: usize) {
        self.inodes.reserve(files);
    }
    /// A number that no file had before.
    pub fn new_id(&mut self) -> FileId {
        let id = FileId(self.next_id);
        self.next_id += 1;
        id
    }

    /// `None`: not a known directory.
    pub fn dir(&self, id: FileId) -> Option<&Dir> {
        self.get(id).and_then(|inode| inode.dir.as_deref())
    }
    /// For a change.
    pub fn dir_mut(&mut self, id: FileId) -> Option<&mut Dir> {
        self.get_mut(id).and_then(|inode| inode.dir.as_deref_mut())
    }
    /// `None`: the name is as in the store.
    pub fn entry(&self, dir: FileId, name: &[u8]) -> Option<Entry> {
        self.dir(dir).and_then(|d| d.children.get(name)).copied()
    }

    /// Changes one name; an empty entry is dropped.
    pub fn bind(&mut self, dir: FileId, name: &Name, change: impl FnOnce(&mut Entry)) -> Entry {
        let Some(d) = self.dir_mut(dir) else {
            return Entry::default();
        };
        let entry = d.children.entry(name.clone()).or_default();
        change(entry);
        let entry = *entry;
        if !self.making.is_empty() && entry.logical().is_some() {
            self.making.remove(&(dir, name.clone()));
        }
        let Some(d) = self.dir_mut(dir) else {
            return entry;
        };
        if entry == Entry::default() {
            d.children.remove(name);
            d.generation = d.generation.wrapping_add(1);
        }
        d.absent.remove(name);
        d.negative_cache.may_be_there(name);
        entry
    }

    /// Updates a directory's times after a change of its names.
    pub fn touch_dir(&mut self, dir: FileId, subdirs: i32) {
        let now = clock::now();
        if let Some(inode) = self.get_mut(dir) {
            inode.attr.mtime = now;
            inode.attr.ctime = now;
            if let Some(dir) = inode.dir.as_mut() {
                dir.times_set = false;
            }
            inode.attr.links = inode.attr.links.saturating_add_signed(subdirs);
        }
    }

    /// Takes one logical name from a file. Returns whether it was the last one.
    pub fn unname(&mut self, id: FileId, dir: FileId, name: &Name) -> bool {
        let Some(inode) = self.get_mut(id) else {
            return true;
        };
        inode.attr.ctime = clock::now();
        if !inode.is_dir() {
            inode.attr.links = inode.attr.links.saturating_sub(1);
        }
        if inode.logical.as_ref().is_some_and(|(d, n)| *d == dir && n == name) {
            inode.logical = inode.extra.as_mut().and_then(|extra| extra.more_names.pop());
        } else if let Some(extra) = inode.extra.as_mut() {
            extra.more_names.retain(|(d, n)| !(*d == dir && n == name));
        }
        inode.logical.is_none()
    }

    /// The state in the life of a file.
    pub fn state_of(&self, id: FileId) -> Option<State> {
        let inode = self.get(id)?;
        if !inode.sealed {
            return Some(State::Open);
        }
        let op = inode.publish.and_then(|seq| self.ops.get(&seq));
        Some(match op {
            Some(op) if op.progress == Progress::Waiting => State::Sealed,
            Some(_) => State::Draining,
            None if inode.dirty() => State::Kept,
            None if inode.replica.is_some() => State::Durable,
            None => State::Evicted,
        })
    }

    /// Owner and mode of a new file: a directory with the set-group-id bit gives its group, and its bit to directories.
    pub fn owner_for_new(&self, caller: &Caller, dir: FileId, kind: Kind, perm: u32) -> (Cred, u32) {
        let parent = self.get(dir).map(|inode| inode.attr);
        let inherits = parent.is_some_and(|attr| attr.perm & 0o2000 != 0);
        let gid = match parent {
            Some(attr) if inherits => attr.gid,
            _ => caller.gid,
        };
        let perm = if inherits && kind == Kind::Directory { perm | 0o2000 } else { perm };
        (Cred { uid: caller.uid, gid }, perm)
    }

    /// `ENOTEMPTY` if a file of the namespace is in the directory.
    pub fn require_empty(&self, id: FileId) -> FsResult<()> {
        if self.dir(id).is_some_and(|d| d.children.values().any(|entry| entry.logical().is_some())) {
            return Err(Errno::NOTEMPTY.into());
        }
        Ok(())
    }

    /// `EEXIST` if the name is bound, `ENOENT` if the directory was removed.
    pub fn require_absent(&self, dir: FileId, name: &[u8]) -> FsResult<()> {
        let parent = self.get(dir).ok_or(Errno::NOENT)?;
        if parent.logical.is_none() && dir != FileId::ROOT {
            return Err(Errno::NOENT.into());
        }
        if self.entry(dir, name).and_then(Entry::logical).is_some() {
            return Err(Errno::EXIST.into());
        }
        Ok(())
    }

    /// Is the store's version the present one, and the store the only one that has it?
    pub fn is_at_rest(&self, id: FileId) -> bool {
        self.get(id).is_some_and(|inode| {
            inode.attr.kind == Kind::File && inode.replica.is_none() && inode.sealed && !inode.dirty()
        })
    }

    /// The file that the store has under the name once the queue is empty.
    pub fn planned(&self, dir: FileId, name: &[u8]) -> Option<FileId> {
        self.entry(dir, name).and_then(Entry::planned)
    }

    /// Does the store have the file, or will it for certain (its publication can no longer be taken back)?
    pub fn in_store(&self, id: FileId) -> bool {
        let Some(inode) = self.get(id) else {
            return false;
        };
        inode.applied.is_some()
            || inode.publish.is_some_and(|seq| inode.is_dir() || self.ops.get(&seq).is_some_and(|op| op.certain))
    }

    /// The path that programs use; `None` when some ancestor is unlinked.
    pub fn logical_path(&self, id: FileId) -> Option<Vec<u8>> {
        self.path_by(id, |inode| inode.logical.as_ref())
    }
    /// The path in the store.
    pub fn applied_path(&self, id: FileId) -> Option<StorePath> {
        self.path_by(id, |inode| inode.applied.as_ref()).map(StorePath)
    }

    fn path_by<'a>(&'a self, id: FileId, place: impl Fn(&'a Inode) -> Option<&'a Place>) -> Option<Vec<u8>> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = id;
        while at != FileId::ROOT {
            let (parent, name) = place(self.get(at)?)?;
            names.push(name);
            at = *parent;
        }
        let mut path = Vec::with_capacity(names.iter().map(|name| name.len() + 1).sum());
        for name in names.iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
        }
        Some(path)
    }

    /// Path of a child of `dir`.
    pub fn child_path(&self, dir: FileId, name: &[u8]) -> Option<Vec<u8>> {
        Some(StorePath(self.logical_path(dir)?).join(name).0)
    }

    /// The directory itself or its nearest ancestor that the store has.
    pub fn nearest_applied(&self, dir: FileId) -> FileId {
        let mut at = dir;
        while at != FileId::ROOT {
            let Some(inode) = self.get(at) else {
                return FileId::ROOT;
            };
            if inode.applied.is_some() && self.applied_path(at).is_some() {
                return at;
            }
            let Some((parent, _)) = inode.logical.as_ref() else {
                return FileId::ROOT;
            };
            at = *parent;
        }
        at
    }

    /// Is `below` the directory `above` or inside it (by what programs see)?
    pub fn is_within(&self, below: FileId, above: FileId) -> bool {
        let mut at = below;
        loop {
            if at == above {
                return true;
            }
            match self.get(at).and_then(|inode| inode.logical.as_ref()) {
                Some((parent, _)) if at != FileId::ROOT => at = *parent,
                _ => return false,
            }
        }
    }

    /// Puts an operation at the end of the queue.
    pub fn queue(&mut self, kind: OpKind, run: RunId, due: Instant, last: bool) -> Seq {
        let seq = Seq::new(self.next_seq);
        self.next_seq += 1;
        self.order.queue(seq);
        self.enqueue(seq, Op::new(kind, run, due, last));
        seq
    }

    /// The moment from which the drain may take the operation.
    pub fn due(&self, op: &Op) -> Instant {
        let empty = || self.get(op.file()).is_some_and(|inode| inode.attr.size_bytes == 0);
        op.not_before.filter(|_| empty()).map_or(op.due, |not_before| op.due.max(not_before))
    }

    /// Puts an operation at its place and pins its names.
    pub fn enqueue(&mut self, seq: Seq, op: Op) {
        for (dir, name) in places(&op.kind) {
            self.bind(dir, &name, |entry| entry.pins += 1);
            if let Some(d) = self.dir_mut(dir) {
                d.queued += 1;
            }
        }
        for file in files_of(&op.kind) {
            *self.operations.entry(file).or_default() += 1;
        }
        if op.last {
            self.for_the_end.insert(seq, &op);
        } else {
            self.before_the_end.insert(seq);
        }
        self.ops.insert(seq, Box::new(op));
    }

    /// Is an operation of the queue about the file, or about one that it replaces?
    pub fn is_queued(&self, id: FileId) -> bool {
        self.operations.contains_key(&id)
    }

    /// Removes an operation, done or not. Returns the names that it had pinned.
    pub fn dequeue(&mut self, seq: Seq) -> Option<(Op, Vec<Place>)> {
        let op = self.ops.remove(&seq)?;
        self.order.dequeue(seq);
        if op.last {
            self.for_the_end.remove(seq, &op);
        } else {
            self.before_the_end.remove(&seq);
        }
        for file in files_of(&op.kind) {
            if let Some(count) = self.operations.get_mut(&file) {
                *count -= 1;
                if *count == 0 {
                    self.operations.remove(&file);
                }
            }
        }
        let places = places(&op.kind);
        for (dir, name) in &places {
            self.bind(*dir, name, |entry| entry.pins = entry.pins.saturating_sub(1));
            if let Some(d) = self.dir_mut(*dir) {
                d.queued = d.queued.saturating_sub(1);
            }
        }
        Some((*op, places))
    }

    /// Does nothing refer to the file any more?
    pub fn unreferenced(&self, id: FileId) -> bool {
        let Some(inode) = self.get(id) else {
            return false;
        };
        id != FileId::ROOT
            // An operation in progress may have to be repeated.
            && !self.before.contains_key(&id)
            && inode.lookups == 0
            && inode.handles == 0
            && inode.publish.is_none()
            && inode.set_meta.is_none()
            && inode.logical.is_none()
            && inode.applied.is_none()
            && inode.dir.as_ref().is_none_or(|dir| dir.children.is_empty())
    }

    /// A sentence that many files share.
    pub fn reason(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.reasons.get(text) {
            return known.clone();
        }
        if self.reasons.len() >= self.reasons_max {
            self.reasons.retain(|reason| Arc::strong_count(reason) > 1);
            self.reasons_max = REASONS_MAX.max(2 * self.reasons.len());
        }
        let reason: Arc<str> = text.into();
        self.reasons.insert(reason.clone());
        reason
    }

    /// Forgets the file; its names and operations are gone already.
    pub fn remove(&mut self, id: FileId) -> Option<Inode> {
        self.inodes.remove(&id).map(|boxed| *boxed)
    }

    /// Forgets a file that only mirrors the store: it has no change of its own, and neither kernel nor process refers to it.
    pub fn forget_mirror(&mut self, id: FileId) -> bool {
        let Some(inode) = self.get(id) else {
            return false;
        };
        let idle = id != FileId::ROOT
            && !inode.owned
            && inode.lookups == 0
            && inode.handles == 0
            && inode.dir.as_ref().is_none_or(|dir| dir.children.is_empty());
        if !idle {
            return false;
        }
        let places: Vec<Place> =
            inode.logical.iter().chain(inode.extra.iter().flat_map(|extra| &extra.more_names)).cloned().collect();
        for (dir, name) in places {
            if self.entry(dir, &name) == Some(Entry::new(Some(id), Some(id)))
                && let Some(d) = self.dir_mut(dir)
            {
                d.children.remove(&name);
            }
            // A directory that was kept only for this child may be dropped too.
            if dir != id {
                self.forget_mirror(dir);
            }
        }
        if let Some(inode) = self.inodes.remove(&id)
            && self.hard_links.get(&inode.attr.ino) == Some(&id)
        {
            self.hard_links.remove(&inode.attr.ino);
        }
        true
    }
}

/// Is the file content that this member of a pool has for another one's name?
pub fn is_for_another(tree: &Tree, id: FileId) -> bool {
    let dir = tree.homes.is_some().then(|| tree.get(id)?.logical.as_ref().map(|(dir, _)| *dir)).flatten();
    dir.is_some() && dir == tree.homes
}
