//! What the catalog remembers of a file, of a name and of an operation on its way to the store.
//!
//! Two bindings of every name are recorded: `logical`, what programs see, and `planned`, what the store will have when the
//! queue is empty. The operation queue changes the store to the planned bindings, in one global order.
//!
//! The catalog encodes these types with postcard: a new field or variant is appended at the end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Attr, DeviceId, FileId, Kind, NodeId, RunId, Seq};

/// Extended attributes by name.
pub type Xattrs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// A whole plain copy of a file's content on a tier's device, under the file's own relative path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// The node that has the content. If it is another one, the copy here has only its length.
    pub node: NodeId,
    /// The device that has the copy.
    pub device: DeviceId,
    /// Inode number on the device: identifies the file after a crash in the middle of a rename.
    pub backing_ino: u64,
    /// A digest of the plain file's birth time, because a device may reuse an inode number. 0 if the birth time is unknown.
    pub born: u32,
}

/// What Surgetank knew of the store's file at its last look; a difference means that another client changed the file. Times
/// that Surgetank itself changed and has not read since are unknown: they have a value that no file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreIdentity {
    /// Inode number in the store.
    pub ino: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Modification time, in nanoseconds since 1970; `i64::MIN` if unknown.
    pub mtime_nanos: i64,
    /// Change time, in nanoseconds since 1970; `i64::MIN` if unknown.
    pub ctime_nanos: i64,
}

impl StoreIdentity {
    const UNKNOWN_NANOS: i64 = i64::MIN;

    /// The identity after Surgetank itself changed the file's attributes and has not read them since: a name was added or
    /// removed, or a rename was a copy. Only the change time becomes unknown.
    #[must_use]
    pub fn touched(self) -> Self {
        Self { ctime_nanos: Self::UNKNOWN_NANOS, ..self }
    }

    /// Whether the change time is unknown.
    pub fn is_touched(&self) -> bool {
        self.ctime_nanos == Self::UNKNOWN_NANOS
    }

    /// The identity of a file of which only the inode is known: its content may be a mixture of two versions.
    #[must_use]
    pub fn bare(self) -> Self {
        Self { mtime_nanos: Self::UNKNOWN_NANOS, ..self.touched() }
    }

    /// The identity for a file of this kind. The times of a fifo or device change with its use, and programs use the store's
    /// own: of these only the inode counts.
    #[must_use]
    pub fn of_kind(self, kind: Kind) -> Self {
        if matches!(kind, Kind::File | Kind::Directory | Kind::Symlink) { self } else { self.bare() }
    }

    /// Whether only the inode is known.
    pub fn is_bare(&self) -> bool {
        self.mtime_nanos == Self::UNKNOWN_NANOS
    }

    /// Whether the store still has exactly this version.
    pub fn is_still(&self, now: &Self) -> bool {
        !self.is_bare() && self.is(now)
    }

    /// Whether the store has this file now, as far as its identity is known.
    pub fn is(&self, now: &Self) -> bool {
        self.ino == now.ino
            && (self.is_bare() || self.size_bytes == now.size_bytes && self.mtime_nanos == now.mtime_nanos)
            && (self.is_touched() || self.ctime_nanos == now.ctime_nanos)
    }
}

/// What the catalog remembers of one file (inode).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Attributes, as programs see them.
    pub attr: Attr,
    /// Number of times that the content was sealed. The content is dirty while `version != durable_version`.
    pub version: u64,
    /// The version that the store has.
    pub durable_version: u64,
    /// The highest version of which the tier has synced every byte.
    pub synced_version: u64,
    /// The highest version of which a program got bytes synced while the file was open.
    pub promised_version: u64,
    /// False while a program may still write the file.
    pub sealed: bool,
    /// The plain copy on a tier; `None` if no tier has one.
    pub replica: Option<Replica>,
    /// The directory and name of the temporary in the store to which the content spilled.
    pub spill: Option<(FileId, Box<[u8]>)>,
    /// The store's own copy at the last look.
    pub identity: Option<StoreIdentity>,
    /// The primary directory and name that programs see; `None` once unlinked.
    pub logical: Option<(FileId, Box<[u8]>)>,
    /// The names that the store has for the file: none before the first publication, several with hard links.
    pub applied: Vec<(FileId, Box<[u8]>)>,
    /// Target of a symbolic link.
    pub target: Option<Box<[u8]>>,
    /// Extended attributes, if they differ from the store's copy.
    pub xattrs: Option<Xattrs>,
    /// Whether `surgetank pin` keeps the file on its tier.
    pub pinned: bool,
    /// A directory of the store that a member of a pool renamed: since then the member decides about it and about all that
    /// is below, as if it had made them.
    pub adopted: bool,
    /// CRC-64/NVME of the durable version, when the drain computed one.
    pub checksum: Option<u64>,
    /// The run that wrote the content last.
    pub run: RunId,
}

/// The subject of hints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Hinted {
    /// One file, under all its names.
    File(FileId),
    /// The file or directory that has this path, now or later.
    Path(Box<[u8]>),
}

/// Hints by their names, with their values as the user wrote them. A directory keeps every set that it ever had, each with the
/// first file id to which the set applies.
pub type HintRecord = Vec<(FileId, BTreeMap<Box<str>, Box<str>>)>;

/// One name in one directory. An absent record means that the store's name counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryRecord {
    /// What programs see; `None` hides a name that the store still has.
    pub logical: Option<FileId>,
    /// What the store has under this name once all queued operations are carried out.
    pub planned: Option<FileId>,
}

/// One operation in the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpRecord {
    /// What the operation does.
    pub kind: OpKind,
    /// The run that caused it.
    pub run: RunId,
    /// The verified temporary. It is recorded before it is renamed into place, so that recovery recognises it after a crash.
    pub prepared: Option<Prepared>,
    /// Whether it belongs to the final drain.
    pub last: bool,
    /// Whether the drain was about to carry it out, or did and could not sync it.
    pub started: bool,
    /// Whether the drain began it at least once. Later operations depend on it, so it cannot be taken back.
    pub certain: bool,
}

/// A staged copy that is ready to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    /// Identity of the temporary in the store.
    pub identity: StoreIdentity,
    /// CRC-64/NVME of its content.
    pub checksum: u64,
    /// The version of the file that it holds, modulo 2³².
    pub version: u32,
}

impl Prepared {
    /// Whether a file of the store has the length and modification time of this copy. The inode also agrees if the copy was
    /// renamed into place, but not if it was written over a file with several names.
    pub fn is(&self, there: &StoreIdentity) -> bool {
        self.identity.size_bytes == there.size_bytes && self.identity.mtime_nanos == there.mtime_nanos
    }
}

/// An operation on its way to the store. Its names are those of the moment at which it was queued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpKind {
    /// Makes the file (content, link target, directory) appear under this name, or replaces its content.
    Publish {
        /// The file to publish.
        file: FileId,
        /// The directory of the name.
        dir: FileId,
        /// The name in `dir`.
        name: Box<[u8]>,
        /// The file that has this name in the store when the operation is carried out.
        over: Option<FileId>,
    },
    /// Copies mode, owner, times and extended attributes to the store.
    SetMeta {
        /// The file whose attributes changed.
        file: FileId,
    },
    /// Adds a name to a file of the store.
    Link {
        /// The file that gets a further name.
        file: FileId,
        /// The directory of the new name.
        dir: FileId,
        /// The new name in `dir`.
        name: Box<[u8]>,
    },
    /// Moves a name.
    Rename {
        /// The file or directory whose name moves.
        file: FileId,
        /// The directory of the old name.
        from_dir: FileId,
        /// The old name in `from_dir`.
        from: Box<[u8]>,
        /// The directory of the new name.
        to_dir: FileId,
        /// The new name in `to_dir`.
        to: Box<[u8]>,
        /// The file that the rename replaces.
        over: Option<FileId>,
    },
    /// Exchanges two names (`RENAME_EXCHANGE`).
    Exchange {
        /// The file with the first name before the exchange.
        a: FileId,
        /// The directory of the first name.
        a_dir: FileId,
        /// The first name in `a_dir`.
        a_name: Box<[u8]>,
        /// The file with the second name before the exchange.
        b: FileId,
        /// The directory of the second name.
        b_dir: FileId,
        /// The second name in `b_dir`.
        b_name: Box<[u8]>,
    },
    /// Removes a name of a file.
    Unlink {
        /// The file that loses the name.
        file: FileId,
        /// The directory of the name.
        dir: FileId,
        /// The name in `dir`.
        name: Box<[u8]>,
    },
    /// Removes an empty directory.
    RemoveDir {
        /// The directory to remove.
        file: FileId,
        /// Its parent directory.
        dir: FileId,
        /// Its name in `dir`.
        name: Box<[u8]>,
    },
}

/// One change of the catalog; a batch of them is atomic. A change states absolute values, so replaying it twice is harmless.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Inserts or replaces the record of a file.
    PutFile(FileId, Box<FileRecord>),
    /// Removes the record of a file.
    DropFile(FileId),
    /// Inserts or replaces the record of a name in a directory.
    PutEntry(FileId, Box<[u8]>, EntryRecord),
    /// Removes the record of a name in a directory.
    DropEntry(FileId, Box<[u8]>),
    /// Inserts or replaces an operation of the queue.
    PutOp(Seq, OpRecord),
    /// Removes an operation from the queue.
    DropOp(Seq),
    /// Sets the number of a mark.
    PutMark(Mark, u64),
    /// Inserts or replaces the hints of a file or path.
    PutHints(Hinted, HintRecord),
    /// Removes the hints of a file or path.
    DropHints(Hinted),
    /// Records a lost version under the path by which programs knew the file.
    PutLost(Box<[u8]>, LostRecord),
    /// Removes the record of a lost version.
    DropLost(Box<[u8]>),
}

/// What a number means that the catalog keeps beside files, names and the queue.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Mark {
    /// 1 while temporaries of the drain may be in this directory of the store, 0 afterwards.
    Temporaries(FileId),
    /// A digest of a plain file that is about to be removed. Each removal under way has a slot.
    PendingUnlink(u8),
    /// A digest of the boot in which the catalog was last written.
    Boot,
    /// A digest of the boot in which this device was last walked.
    DeviceBoot(DeviceId),
    /// The first file id that was not given out before the catalog was damaged; 0: it never was.
    DoubtfulBelow,
    /// The number of the request that was last carried out in this slot, XOR the handoff's nonce.
    Request(u64),
    /// The file of that request.
    RequestFile(u64),
    /// The number (tier × 256 + device) by which records name the device that this text describes.
    Device(String),
}

/// A version whose bytes are lost. The record stays until the user acknowledges the loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostRecord {
    /// The tier path or store path that had the bytes.
    pub at: Box<[u8]>,
    /// Why the bytes are lost, in words for the user.
    pub why: String,
}

/// The whole content of the catalog, as loaded at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// Records of files.
    pub files: Vec<(FileId, FileRecord)>,
    /// Records of names, with their directories.
    pub entries: Vec<(FileId, Box<[u8]>, EntryRecord)>,
    /// The operation queue, in its order.
    pub ops: BTreeMap<Seq, OpRecord>,
    /// The numbers of marks.
    pub marks: BTreeMap<Mark, u64>,
    /// Hints by their subjects.
    pub hints: BTreeMap<Hinted, HintRecord>,
    /// Lost versions, by the path by which programs knew the file.
    pub lost: BTreeMap<Box<[u8]>, LostRecord>,
}
