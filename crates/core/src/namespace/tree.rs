//! The live state in memory: files, names, and the queue of operations on their way to the store.
//!
//! Every name has two bindings. *Logical* is what programs see; *planned* is what the store will have
//! once all queued operations are carried out (less the publication of files that it never had: those
//! can still be taken back). A name without an entry is "as in the store". Where a file is in the store
//! *now* stands in its inode (`applied`). Nothing here does I/O; the one lock around it is held briefly.
//!
//! Invariants: a file that is `owned` is in the catalog, and so are all its ancestors; a file is kept
//! while a name, an operation, an open handle, the store or the kernel refers to it; an entry is kept
//! while an operation that names it is queued (`pins`), or else the store would show through too early.

mod applied;
mod charged;
mod op;
mod told;
mod version;

use std::collections::BTreeMap;
use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::{HashMap, HashSet};

use surgetank_store::{Cred, StorePath};
use surgetank_types::clock::Moment;
use surgetank_types::model::{
    Attr, DeviceId, EntryRecord, FileId, FileRecord, Kind, NodeId, OpKind, Replica, RunId, Seq, StoreIdentity, Xattrs,
};

pub use applied::Before;
pub use op::{Op, Progress, Trouble, file_of, files_of, places};
pub use told::ToldAbsent;

pub type Name = Arc<[u8]>;
/// A name in a directory.
pub type Place = (FileId, Name);

/// So many different reasons are remembered before those that no file has any more are dropped.
const REASONS_MAX: usize = 1024;

/// Inode numbers that we give out lie above this; those of store files are the store's own.
pub const OWN_INODE_BASE: u64 = 1 << 56;

/// One name. 0 stands for nobody: a million of these should be small.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Entry {
    logical: u64,
    planned: u64,
    /// Queued operations that name it.
    pub pins: u32,
}

fn some(raw: u64) -> Option<FileId> {
    (raw != 0).then_some(FileId(raw))
}

fn raw(id: Option<FileId>) -> u64 {
    id.map_or(0, |id| id.0)
}

impl Entry {
    pub fn new(logical: Option<FileId>, planned: Option<FileId>) -> Self {
        Self { logical: raw(logical), planned: raw(planned), pins: 0 }
    }
    pub fn logical(self) -> Option<FileId> {
        some(self.logical)
    }
    pub fn planned(self) -> Option<FileId> {
        some(self.planned)
    }
    pub fn set_logical(&mut self, id: Option<FileId>) {
        self.logical = raw(id);
    }
    pub fn set_planned(&mut self, id: Option<FileId>) {
        self.planned = raw(id);
    }
}

#[derive(Debug, Default)]
pub struct Dir {
    pub children: BTreeMap<Name, Entry>,
    /// We made it: a name without an entry does not exist, the store need not be asked.
    pub complete: bool,
    /// Grows when an entry is dropped, so that a look-up in the store that overlapped it is repeated.
    pub generation: u32,
    /// Names that the store did not have when we looked.
    pub absent: HashMap<Name, Instant>,
    pub believed: super::believed::Believed,
    /// Queued operations that put something into this directory or take it away.
    pub queued: u32,
    /// The kernel was told of it, or of its listing, what a new name makes untrue.
    pub told: bool,
    /// The listing that the kernel may have kept came without its files' attributes.
    pub listed_bare: bool,
    /// Names of which the kernel was told that they do not exist, to be believed for long.
    pub told_absent: ToldAbsent,
    /// A rename of the directory itself is queued, so its making can no longer be taken back.
    pub moved: bool,
    /// A program gave it a time of its own, and has changed no name in it since.
    pub times_given: bool,
    /// Programs make files in it themselves: the kernel must not believe for long what it was told of it.
    pub is_lent: bool,
    pub lend: super::lent::Wish,
}

/// Rarely needed parts of a file.
#[derive(Debug, Default)]
pub struct Extra {
    /// Logical names beyond the primary one.
    pub more_names: Vec<Place>,
    /// Names that the store has for it now, beyond `applied`.
    pub more_applied: Vec<Place>,
    pub target: Option<Box<[u8]>>,
    pub xattrs: Option<Xattrs>,
    /// The content lies in a temporary in the store: this name in this directory.
    pub spill: Option<Place>,
    pub hints: Option<Box<super::hints::Said>>,
}

/// What the file's life is at (DESIGN.md, "The life of a file").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Some program may write it.
    Open,
    /// Complete, not yet in the store.
    Sealed,
    /// On its way.
    Draining,
    /// Verified in the store, and still on a tier.
    Durable,
    /// Verified in the store only.
    Evicted,
    /// Its rule says that it is not drained.
    Kept,
}

/// A plain file on a tier; see [`surgetank_tier::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlainId {
    pub device: DeviceId,
    pub born: u32,
    pub ino: u64,
}

impl PlainId {
    pub fn new(device: DeviceId, plain: &surgetank_tier::Plain) -> Self {
        Self { device, born: plain.born, ino: plain.ino }
    }
}

#[derive(Debug)]
pub struct Inode {
    pub attr: Attr,
    pub version: u32,
    pub durable: u32,
    pub replica: Option<PlainId>,
    /// The highest version of which the tier was made to keep every byte.
    pub synced: u32,
    /// Of which version, at least, a program was promised bytes while it was still open (fsync).
    pub promised: u32,
    /// Bytes charged to the replica's device.
    pub charged_bytes: u64,
    pub identity: Option<Box<StoreIdentity>>,
    /// Of what the kernel may have pages, that are good as long as it is that.
    pub pages: Option<Box<super::files::Pages>>,
    pub logical: Option<Place>,
    pub applied: Option<Place>,
    /// Queued publication of the content.
    pub publish: Option<Seq>,
    /// Queued change of attributes.
    pub set_meta: Option<Seq>,
    pub lookups: u32,
    pub handles: u32,
    pub run: RunId,
    /// Times it was opened for writing again before it was drained: doubles the quiet period.
    pub reopened: u8,
    pub sealed: bool,
    pub owned: bool,
    pub pinned: bool,
    /// Grows whenever content may change; a copy that overlapped a change is void.
    pub epoch: u32,
    /// When the store was last asked about it.
    pub checked: Option<Moment>,
    pub checksum: Option<u64>,
    /// What it counts for among the evictable bytes of its device.
    clean_bytes: u64,
    /// Opens for reading since it is on its tier, and the last of them.
    pub reads: u32,
    pub used: Option<Moment>,
    pub prefetched: bool,
    /// Why the content lies where it lies (`why`): see [`Tree::reason`].
    pub placed: Option<Arc<str>>,
    pub dir: Option<Box<Dir>>,
    pub extra: Option<Box<Extra>>,
}

impl Inode {
    pub fn new(attr: Attr) -> Self {
        let dir = (attr.kind == Kind::Directory).then(Box::default);
        Self {
            attr,
            version: 0,
            durable: 0,
            replica: None,
            synced: 0,
            promised: 0,
            charged_bytes: 0,
            identity: None,
            pages: None,
            logical: None,
            applied: None,
            publish: None,
            set_meta: None,
            lookups: 0,
            handles: 0,
            run: RunId(0),
            reopened: 0,
            sealed: true,
            owned: false,
            pinned: false,
            epoch: 0,
            checked: None,
            checksum: None,
            clean_bytes: 0,
            reads: 0,
            used: None,
            prefetched: false,
            placed: None,
            dir,
            extra: None,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.attr.kind == Kind::Directory
    }
    pub fn extra_mut(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }
    pub fn spill(&self) -> Option<&Place> {
        self.extra.as_ref().and_then(|extra| extra.spill.as_ref())
    }
    pub fn said(&self) -> Option<&super::hints::Said> {
        self.extra.as_ref().and_then(|extra| extra.hints.as_deref())
    }
    pub fn cred(&self) -> Cred {
        Cred { uid: self.attr.uid, gid: self.attr.gid }
    }
}

#[derive(Debug)]
pub struct Tree {
    inodes: HashMap<FileId, Box<Inode>>,
    pub ops: BTreeMap<Seq, Op>,
    pub next_id: u64,
    /// Spilled content with a lower number may be a file's of which a damaged catalog has no record.
    pub doubtful_below: u64,
    pub next_seq: u64,
    /// Staged temporaries whose operation was cancelled, to be removed by the drain.
    pub discards: Vec<(FileId, Name, Cred)>,
    /// Counts operations that changed the number of a file's names in the store.
    pub links_changed: u64,
    /// Reasons of placements, each once.
    reasons: HashSet<Arc<str>>,
    reasons_max: usize,
    /// Copies that are being made, and where.
    pub staging: Vec<(Seq, FileId)>,
    pub temporaries: super::temporaries::Temporaries,
    /// Store files with several links, by their inode number: all names lead to one file.
    pub hard_links: HashMap<u64, FileId>,
    /// Bytes on each device that the store has too.
    pub clean_bytes: HashMap<DeviceId, u64>,
    /// Charged on each device for files that are still coming from the store.
    arriving_bytes: HashMap<DeviceId, u64>,
    /// How the catalog calls each device.
    pub device_numbers: HashMap<DeviceId, DeviceId>,
    /// Names for which a plain file is being made just now, and for whom. A name that is bound meanwhile leaves this list:
    /// what lies under its path then is not the plain file that was made.
    pub making: HashMap<Place, FileId>,
    pub lends: super::lent::Lends,
    /// Of files that a batch is about: what the catalog is told until the batch is over.
    pub before: HashMap<FileId, Before>,
    /// Files of which the newest version was lost: they are as the store has them, and that is to be asked for what it has.
    pub reverted: Vec<FileId>,
    /// Publications that were taken back although the store may have carried them out, only that its answer was lost.
    pub doubts: HashMap<FileId, surgetank_types::model::Prepared>,
    pub hints: super::hints::Known,
    /// What was changed since the last commit.
    pub txn: super::journal::Txn,
}

impl Tree {
    pub fn new(root: Inode) -> Self {
        let mut inodes = HashMap::default();
        inodes.insert(FileId::ROOT, Box::new(root));
        Self {
            inodes,
            ops: BTreeMap::new(),
            next_id: 2,
            doubtful_below: 0,
            next_seq: 1,
            discards: Vec::new(),
            reverted: Vec::new(),
            making: HashMap::default(),
            lends: super::lent::Lends::default(),
            links_changed: 0,
            reasons: HashSet::default(),
            reasons_max: REASONS_MAX,
            staging: Vec::new(),
            temporaries: super::temporaries::Temporaries::default(),
            hard_links: HashMap::default(),
            clean_bytes: HashMap::default(),
            arriving_bytes: HashMap::default(),
            device_numbers: HashMap::default(),
            before: HashMap::default(),
            doubts: HashMap::default(),
            hints: super::hints::Known::default(),
            txn: super::journal::Txn::default(),
        }
    }

    pub fn get(&self, id: FileId) -> Option<&Inode> {
        self.inodes.get(&id).map(AsRef::as_ref)
    }
    pub fn get_mut(&mut self, id: FileId) -> Option<&mut Inode> {
        self.inodes.get_mut(&id).map(AsMut::as_mut)
    }
    pub fn iter(&self) -> impl Iterator<Item = (FileId, &Inode)> {
        self.inodes.iter().map(|(id, inode)| (*id, inode.as_ref()))
    }
    /// How many files are known.
    pub fn count(&self) -> usize {
        self.inodes.len()
    }
    pub fn insert(&mut self, id: FileId, inode: Inode) {
        self.inodes.insert(id, Box::new(inode));
    }
    pub fn reserve(&mut self, files: usize) {
        self.inodes.reserve(files);
    }
    pub fn new_id(&mut self) -> FileId {
        let id = FileId(self.next_id);
        self.next_id += 1;
        id
    }

    pub fn dir(&self, id: FileId) -> Option<&Dir> {
        self.get(id).and_then(|inode| inode.dir.as_deref())
    }
    pub fn dir_mut(&mut self, id: FileId) -> Option<&mut Dir> {
        self.get_mut(id).and_then(|inode| inode.dir.as_deref_mut())
    }
    pub fn entry(&self, dir: FileId, name: &[u8]) -> Option<Entry> {
        self.dir(dir).and_then(|d| d.children.get(name)).copied()
    }

    /// Changes one name; an entry that says nothing any more is dropped.
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
        d.believed.may_be_there(name);
        entry
    }

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

    /// Path that programs use; `None` when some ancestor is unlinked.
    pub fn logical_path(&self, id: FileId) -> Option<Vec<u8>> {
        self.path_by(id, |inode| inode.logical.as_ref())
    }
    /// Path that the store has.
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

    pub fn queue(&mut self, kind: OpKind, run: RunId, due: Instant, last: bool) -> Seq {
        let seq = Seq(self.next_seq);
        self.next_seq += 1;
        self.enqueue(seq, Op::new(kind, run, due, last));
        seq
    }

    pub fn due(&self, op: &Op) -> Instant {
        let empty = || self.get(op.file()).is_some_and(|inode| inode.attr.size_bytes == 0);
        op.not_before.filter(|_| empty()).map_or(op.due, |not_before| op.due.max(not_before))
    }

    /// Puts an operation at its place and pins the names it is about.
    pub fn enqueue(&mut self, seq: Seq, op: Op) {
        for (dir, name) in places(&op.kind) {
            self.bind(dir, &name, |entry| entry.pins += 1);
            if let Some(d) = self.dir_mut(dir) {
                d.queued += 1;
            }
        }
        self.ops.insert(seq, op);
    }

    /// Takes an operation out, done or not. Returns the names that it had pinned.
    pub fn dequeue(&mut self, seq: Seq) -> Option<(Op, Vec<Place>)> {
        let op = self.ops.remove(&seq)?;
        let places = places(&op.kind);
        for (dir, name) in &places {
            self.bind(*dir, name, |entry| entry.pins = entry.pins.saturating_sub(1));
            if let Some(d) = self.dir_mut(*dir) {
                d.queued = d.queued.saturating_sub(1);
            }
        }
        Some((op, places))
    }

    /// Is nothing left that refers to the file?
    pub fn unreferenced(&self, id: FileId) -> bool {
        let Some(inode) = self.get(id) else {
            return false;
        };
        id != FileId::ROOT
            // What is being carried out may have to be done again.
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

    pub fn remove(&mut self, id: FileId) -> Option<Inode> {
        self.inodes.remove(&id).map(|boxed| *boxed)
    }

    /// Forgets a file that only mirrors the store (nothing of ours in it, nobody knows it).
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
            // A directory that was kept only for this child may go too.
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

    pub fn record(&self, id: FileId) -> Option<FileRecord> {
        let inode = self.get(id)?;
        let place = |place: &Place| (place.0, Box::from(&*place.1));
        let now;
        let (applied, identity) = match self.before.get(&id) {
            Some(before) => (&before.names, &before.identity),
            None => {
                now = inode.names_in_store();
                (&now, &inode.identity)
            }
        };
        Some(FileRecord {
            attr: inode.attr,
            version: u64::from(inode.version),
            durable_version: u64::from(inode.durable),
            sealed: inode.sealed,
            synced_version: u64::from(inode.synced),
            promised_version: u64::from(inode.promised),
            replica: inode.replica.map(|plain| Replica {
                node: NodeId(0),
                device: self.device_numbers.get(&plain.device).copied().unwrap_or(plain.device),
                backing_ino: plain.ino,
                born: plain.born,
            }),
            spill: inode.spill().map(place),
            identity: identity.as_deref().copied(),
            logical: inode.logical.as_ref().map(place),
            applied: applied.iter().map(place).collect(),
            target: inode.extra.as_ref().and_then(|extra| extra.target.clone()),
            xattrs: inode.extra.as_ref().and_then(|extra| extra.xattrs.clone()),
            pinned: inode.pinned,
            checksum: inode.checksum,
            run: inode.run,
        })
    }

    pub fn entry_record(&self, dir: FileId, name: &[u8]) -> Option<EntryRecord> {
        self.entry(dir, name).map(|entry| EntryRecord { logical: entry.logical(), planned: entry.planned() })
    }
}
