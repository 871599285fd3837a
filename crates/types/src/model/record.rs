//! What the catalog remembers of a file, of a name and of an operation on its way to the store.
//!
//! Two bindings of every name are recorded: what programs see (`logical`) and what the store will have
//! when the queue is empty (`planned`). The operation queue gets the store there, in one global order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Attr, DeviceId, FileId, Kind, NodeId, RunId, Seq};

/// Extended attributes by name.
pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// A whole plain copy of a file's content on a tier's device, under the file's own relative path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    pub node: NodeId,
    pub device: DeviceId,
    /// Inode number on the device: finds the file again after a crash in the middle of a rename.
    pub backing_ino: u64,
    /// A digest of when the plain file was made, 0 if nobody knows: the number may be given out again.
    pub born: u32,
}

/// What we knew of the store's file when we last looked; a difference means that somebody else changed it. (What we changed
/// ourselves and could not look at since is not known: no file has such times.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreIdentity {
    pub ino: u64,
    pub size_bytes: u64,
    pub mtime_nanos: i64,
    pub ctime_nanos: i64,
}

impl StoreIdentity {
    const UNKNOWN_NANOS: i64 = i64::MIN;

    /// It was changed by our own hand, but for what its owner wrote, and nobody looked since: one of its names came or went, or it
    /// was copied where a rename is a copy.
    #[must_use]
    pub fn touched(self) -> Self {
        Self { ctime_nanos: Self::UNKNOWN_NANOS, ..self }
    }

    pub fn is_touched(&self) -> bool {
        self.ctime_nanos == Self::UNKNOWN_NANOS
    }

    /// Only which file it is is known: its content may be half of two versions.
    #[must_use]
    pub fn bare(self) -> Self {
        Self { mtime_nanos: Self::UNKNOWN_NANOS, ..self.touched() }
    }

    /// A fifo's or a device's times change with its use, in the store where programs use the store's own: of those only the inode
    /// is known.
    #[must_use]
    pub fn of_kind(self, kind: Kind) -> Self {
        if matches!(kind, Kind::File | Kind::Directory | Kind::Symlink) { self } else { self.bare() }
    }

    pub fn is_bare(&self) -> bool {
        self.mtime_nanos == Self::UNKNOWN_NANOS
    }

    /// Has the store this very version of it still?
    pub fn is_still(&self, now: &Self) -> bool {
        !self.is_bare() && self.is(now)
    }

    /// Is it what the store has now, as far as it is known?
    pub fn is(&self, now: &Self) -> bool {
        self.ino == now.ino
            && (self.is_bare() || self.size_bytes == now.size_bytes && self.mtime_nanos == now.mtime_nanos)
            && (self.is_touched() || self.ctime_nanos == now.ctime_nanos)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub attr: Attr,
    /// Counts what programs sealed; content is dirty while `version != durable_version`.
    pub version: u64,
    pub durable_version: u64,
    /// The highest version of which the tier was made to keep every byte.
    pub synced_version: u64,
    /// The highest version of which a program was promised bytes while it was open.
    pub promised_version: u64,
    /// False while some program may still write it.
    pub sealed: bool,
    pub replica: Option<Replica>,
    /// The content spilled into a temporary in the store, under this name in the directory `spilled_in`.
    pub spill: Option<(FileId, Box<[u8]>)>,
    /// The store's own copy, as we last saw it.
    pub identity: Option<StoreIdentity>,
    /// The primary name programs see; `None` once unlinked.
    pub logical: Option<(FileId, Box<[u8]>)>,
    /// Where the store has it; nowhere before the first publication, under several names when it has hard links.
    pub applied: Vec<(FileId, Box<[u8]>)>,
    pub target: Option<Box<[u8]>>,
    /// Extended attributes, when they differ from the store's copy.
    pub xattrs: Option<Xattrs>,
    pub pinned: bool,
    /// CRC-64/NVME of the durable version, when the drain computed one.
    pub checksum: Option<u64>,
    /// The run that wrote the content last.
    pub run: RunId,
}

/// What hints were given for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Hinted {
    File(FileId),
    /// Whatever has this name, now or later.
    Path(Box<[u8]>),
}

/// Hints by their names, as they were given. Of a directory all that were ever: each time with the first number of the
/// files that they hold for.
pub type HintRecord = Vec<(FileId, BTreeMap<Box<str>, Box<str>>)>;

/// One name in one directory; an absent record means "ask the store".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryRecord {
    /// What programs see; `None` hides what the store still has.
    pub logical: Option<FileId>,
    /// What the store has under this name once all queued operations are carried out.
    pub planned: Option<FileId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpRecord {
    pub kind: OpKind,
    pub run: RunId,
    /// The verified temporary, written down before it is renamed into place, so that it is recognised after a crash.
    pub prepared: Option<Prepared>,
    /// Belongs to the final drain.
    pub last: bool,
    /// The drain was about to carry it out, or did and could not sync it.
    pub started: bool,
    /// It was begun once: what was queued later builds on it, so it is not taken back.
    pub certain: bool,
}

/// A staged copy whose time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    pub identity: StoreIdentity,
    pub checksum: u64,
    pub version: u32,
}

impl Prepared {
    /// Has a file of the store the length and time of this copy? The inode too, if it was renamed into place, and not if
    /// it was written over a file that has several names.
    pub fn is(&self, there: &StoreIdentity) -> bool {
        self.identity.size_bytes == there.size_bytes && self.identity.mtime_nanos == there.mtime_nanos
    }
}

/// An operation on its way to the store. Names are explicit: they are those of the moment it was queued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpKind {
    /// Make the file (content, link target, directory) appear under this name, or replace its content.
    /// `over` is what the name holds in the store when its turn comes.
    Publish {
        file: FileId,
        dir: FileId,
        name: Box<[u8]>,
        over: Option<FileId>,
    },
    /// Bring mode, owner, times and extended attributes over.
    SetMeta {
        file: FileId,
    },
    Link {
        file: FileId,
        dir: FileId,
        name: Box<[u8]>,
    },
    Rename {
        file: FileId,
        from_dir: FileId,
        from: Box<[u8]>,
        to_dir: FileId,
        to: Box<[u8]>,
        over: Option<FileId>,
    },
    Exchange {
        a: FileId,
        a_dir: FileId,
        a_name: Box<[u8]>,
        b: FileId,
        b_dir: FileId,
        b_name: Box<[u8]>,
    },
    Unlink {
        file: FileId,
        dir: FileId,
        name: Box<[u8]>,
    },
    RemoveDir {
        file: FileId,
        dir: FileId,
        name: Box<[u8]>,
    },
}

/// One change of the catalog; a batch of them is atomic. Changes state absolute values, so replaying one twice does no harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    PutFile(FileId, Box<FileRecord>),
    DropFile(FileId),
    PutEntry(FileId, Box<[u8]>, EntryRecord),
    DropEntry(FileId, Box<[u8]>),
    PutOp(Seq, OpRecord),
    DropOp(Seq),
    /// A number kept by name: highest id given out, run counter, …
    PutCounter(String, u64),
    PutHints(Hinted, HintRecord),
    DropHints(Hinted),
    /// By the path that programs knew it by.
    PutLost(Box<[u8]>, LostRecord),
    DropLost(Box<[u8]>),
}

/// A version whose bytes are gone. The record stays until the user acknowledges the loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRecord {
    /// Where its bytes were.
    pub at: Box<[u8]>,
    pub why: String,
}

/// All that the catalog remembers, as loaded at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    pub files: Vec<(FileId, FileRecord)>,
    pub entries: Vec<(FileId, Box<[u8]>, EntryRecord)>,
    pub ops: BTreeMap<Seq, OpRecord>,
    pub counters: BTreeMap<String, u64>,
    pub hints: BTreeMap<Hinted, HintRecord>,
    pub lost: BTreeMap<Box<[u8]>, LostRecord>,
}
