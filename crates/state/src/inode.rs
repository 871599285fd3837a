//! A file as it is known in memory, and a name in a directory.

use std::collections::BTreeMap;
use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::HashMap;

use surgetank_store::Cred;
use surgetank_types::clock::Moment;
use surgetank_types::model::{Attr, DeviceId, FileId, Kind, NodeId, RunId, Seq, StoreIdentity, Xattrs};

use crate::delegation::DelegationDemand;
use crate::hints::HintHistory;
use crate::kernel_entries::KernelNegativeEntries;
use crate::negative_cache::NegativeCache;
use crate::{Name, OWN_INODE_BASE, Place};

/// One name. 0 stands for no file: a million of these have to be small.
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
    /// A name with these bindings and no queued operation.
    pub fn new(logical: Option<FileId>, planned: Option<FileId>) -> Self {
        Self { logical: raw(logical), planned: raw(planned), pins: 0 }
    }
    /// The file that processes see under the name.
    pub fn logical(self) -> Option<FileId> {
        some(self.logical)
    }
    /// The file that the store has under the name once the queue is empty.
    pub fn planned(self) -> Option<FileId> {
        some(self.planned)
    }
    /// Binds the name for processes.
    pub fn set_logical(&mut self, id: Option<FileId>) {
        self.logical = raw(id);
    }
    /// Binds the name for the store.
    pub fn set_planned(&mut self, id: Option<FileId>) {
        self.planned = raw(id);
    }
}

/// What only a directory has.
#[derive(Debug, Default)]
pub struct Dir {
    /// Its names that are not simply as in the store.
    pub children: BTreeMap<Name, Entry>,
    /// The agent made it: a name without an entry does not exist, and the store need not be asked.
    pub complete: bool,
    /// Grows when an entry is dropped, so that a look-up in the store that overlapped it is repeated.
    pub generation: u32,
    /// Names that the store did not have at the last look-up.
    pub absent: HashMap<Name, Instant>,
    /// Names that a listing of the store showed to be absent.
    pub negative_cache: NegativeCache,
    /// Queued operations that add to this directory or remove from it.
    pub queued: u32,
    /// The kernel caches the directory's attributes or listing, which a new name invalidates.
    pub is_in_kernel: bool,
    /// The kernel may cache a listing without its files' attributes.
    pub listed_bare: bool,
    /// Names that the kernel caches as absent for a long time.
    pub kernel_negative_entries: KernelNegativeEntries,
    /// A rename of the directory itself is queued, so its creation can no longer be taken back.
    pub moved: bool,
    /// A program set its times, and has changed no name in it since.
    pub times_set: bool,
    /// Processes create files in it without asking: the kernel must not cache it for long.
    pub is_delegated: bool,
    /// Another member of the pool has used names in it while it was delegated: it is not delegated again.
    pub is_shared: bool,
    /// This member of the pool decides about it, as if it had been made here ([`FileRecord::adopted`]).
    ///
    /// [`FileRecord::adopted`]: surgetank_types::model::FileRecord::adopted
    pub adopted: bool,
    /// Whether delegation pays.
    pub demand: DelegationDemand,
}

/// Rarely needed parts of a file.
#[derive(Debug, Default)]
pub struct Extra {
    /// Logical names beyond the primary one.
    pub more_names: Vec<Place>,
    /// Names that the store has for it now, beyond `applied`.
    pub more_applied: Vec<Place>,
    /// Of a symbolic link.
    pub target: Option<Box<[u8]>>,
    /// Extended attributes; `None`: as the store has them.
    pub xattrs: Option<Xattrs>,
    /// The content is in a temporary in the store: this name in this directory.
    pub spill: Option<Place>,
    /// Its own hints.
    pub hints: Option<Box<HintHistory>>,
    /// The member of the pool that has the content: the plain file here has only its length.
    pub home: NodeId,
}

/// The state of a file's life (ARCHITECTURE.md, "The life of a file").
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
    /// In a pool: its content was only on a node that is lost.
    Lost,
    /// Its rule says that it is not drained.
    Kept,
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Draining => "draining",
            Self::Durable => "durable",
            Self::Evicted => "evicted",
            Self::Lost => "lost",
            Self::Kept => "kept",
        })
    }
}

/// A plain file on a tier; see [`surgetank_tier::Plain`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlainId {
    /// The device with the plain file.
    pub device: DeviceId,
    /// Birth time of the plain file, shortened; 0: unknown. It tells apart two files with the same inode number.
    pub born: u32,
    /// Inode number on the device.
    pub ino: u64,
}

impl PlainId {
    /// Identifies a plain file of the device.
    pub fn new(device: DeviceId, plain: &surgetank_tier::Plain) -> Self {
        Self { device, born: plain.born, ino: plain.ino }
    }
}

/// A file, directory, link or special file.
#[derive(Debug)]
pub struct Inode {
    /// Attributes as processes see them.
    pub attr: Attr,
    /// The newest sealed version; 0: as the store had the file.
    pub version: u32,
    /// The newest version that the store has.
    pub durable: u32,
    /// The plain file on a tier.
    pub replica: Option<PlainId>,
    /// The highest version of which the tier has synced every byte.
    pub synced: u32,
    /// The version, at least, of which a program has synced bytes while it was still open (fsync).
    pub promised: u32,
    /// Bytes charged to the replica's device.
    pub charged_bytes: u64,
    /// The version that the store has, as far as the agent knows.
    pub identity: Option<StoreIdentity>,
    /// The content whose pages the kernel may have; they are valid as long as the content stays that.
    pub pages: Option<Box<Pages>>,
    /// The name that processes see; `None`: removed.
    pub logical: Option<Place>,
    /// The name that the store has now; `None`: none.
    pub applied: Option<Place>,
    /// Queued publication of the content.
    pub publish: Option<Seq>,
    /// Queued change of attributes.
    pub set_meta: Option<Seq>,
    /// References that the kernel holds.
    pub lookups: u32,
    /// Open handles of processes.
    pub handles: u32,
    /// The run that wrote the file last.
    pub run: RunId,
    /// How often it was opened for writing again before it was drained: each time doubles the quiet period.
    pub reopened: u8,
    /// No process can write it.
    pub sealed: bool,
    /// The catalog has a record of it.
    pub owned: bool,
    /// The user pinned it to its tier.
    pub pinned: bool,
    /// Grows whenever content may change; a copy that overlapped a change is void.
    pub epoch: u32,
    /// When the store was last asked about it.
    pub checked: Option<Moment>,
    /// CRC-64/NVME of the durable version, if `has_checksum`.
    checksum: u64,
    has_checksum: bool,
    /// Its share of the evictable bytes of its device.
    pub(crate) clean_bytes: u64,
    /// Opens for reading since it has been on its tier, and the last of them.
    pub reads: u32,
    /// The last open for reading.
    pub used: Option<Moment>,
    /// A prefetch brought the replica.
    pub prefetched: bool,
    /// Why the content is where it is (`surgetank why`): see [`Tree::reason`](crate::Tree::reason).
    pub placed: Option<Arc<str>>,
    /// Of a directory.
    pub dir: Option<Box<Dir>>,
    /// Parts that few files have.
    pub extra: Option<Box<Extra>>,
}

impl Inode {
    /// A sealed file without names and content.
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
            checksum: 0,
            has_checksum: false,
            clean_bytes: 0,
            reads: 0,
            used: None,
            prefetched: false,
            placed: None,
            dir,
            extra: None,
        }
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.attr.kind == Kind::Directory
    }
    /// The rarely needed parts, for a change.
    pub fn extra_mut(&mut self) -> &mut Extra {
        self.extra.get_or_insert_default()
    }
    /// The temporary in the store that has the content of a spilled file.
    pub fn spill(&self) -> Option<&Place> {
        self.extra.as_ref().and_then(|extra| extra.spill.as_ref())
    }
    /// The member of the pool that has the content; `None`: this one has it.
    pub fn home(&self) -> Option<NodeId> {
        self.replica?;
        self.extra.as_ref().map(|extra| extra.home).filter(|home| *home != NodeId::default())
    }
    /// Its own hints, old ones included.
    pub fn hint_history(&self) -> Option<&HintHistory> {
        self.extra.as_ref().and_then(|extra| extra.hints.as_deref())
    }
    /// The owner.
    pub fn cred(&self) -> Cred {
        Cred { uid: self.attr.uid, gid: self.attr.gid }
    }

    /// CRC-64/NVME of the durable version.
    pub fn checksum(&self) -> Option<u64> {
        self.has_checksum.then_some(self.checksum)
    }
    /// Remembers the checksum of the durable version.
    pub fn set_checksum(&mut self, checksum: Option<u64>) {
        (self.has_checksum, self.checksum) = (checksum.is_some(), checksum.unwrap_or_default());
    }

    /// The kernel gets to know the directory.
    pub fn enters_kernel(&mut self) {
        if let Some(dir) = self.dir.as_mut() {
            dir.is_in_kernel = true;
        }
    }

    // Versions: in memory, on a tier that was made to keep them, and in the store.

    /// A copy of the store's file on a tier (or evicted since), never written here: another client may change it in the
    /// store.
    pub fn is_copy(&self) -> bool {
        let at_rest = self.publish.is_none() && self.set_meta.is_none() && self.identity.is_some();
        let one_name = self.extra.as_ref().is_none_or(|extra| extra.more_names.is_empty() && extra.spill.is_none());
        self.owned && self.may_be_copy() && self.applied == self.logical && at_rest && one_name
    }

    /// A directory of the store that was not made here and has no change of its own. It is the agent's own (`owned`) only
    /// because of files below it.
    pub fn is_way(&self, id: FileId) -> bool {
        let at_rest = self.publish.is_none() && self.set_meta.is_none() && self.applied == self.logical;
        self.owned && self.is_dir() && self.applied.is_some() && at_rest && !self.is_made(id) && !self.pinned
    }

    /// A directory that was made here, or that counts as one.
    pub fn is_made(&self, id: FileId) -> bool {
        self.attr.ino == OWN_INODE_BASE + id.0 || self.is_adopted()
    }

    /// A directory of the store that counts as made here.
    pub fn is_adopted(&self) -> bool {
        self.dir.as_ref().is_some_and(|dir| dir.adopted)
    }

    /// It is a copy, or will be one when the queued operations are done.
    pub fn may_be_copy(&self) -> bool {
        self.attr.kind == Kind::File && self.version == 0 && self.sealed && self.applied.is_some()
    }

    /// On a tier, and without a version yet.
    pub fn is_fresh(&self) -> bool {
        self.version == 0 && self.replica.is_some()
    }

    /// The tier has synced the present version.
    pub fn is_synced(&self) -> bool {
        self.sealed && self.synced >= self.version
    }

    /// A program has synced bytes that are not in the store yet.
    pub fn is_promised(&self) -> bool {
        self.promised > self.durable
    }

    /// The version of the present content, or the one it gets when it is closed.
    pub fn present_version(&self) -> u32 {
        self.version + u32::from(!self.sealed)
    }

    /// Whether the store lacks the newest version.
    pub fn dirty(&self) -> bool {
        self.version != self.durable
    }
}

/// The content whose pages the kernel may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The store's file at this version.
    Store(StoreIdentity),
    /// The agent's content at this epoch.
    Ours(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    // A million of each have to be small. (An allocation has 8 bytes more, in steps of 16.)
    #[test]
    fn records_of_a_file_have_the_size_that_was_measured() {
        assert!(size_of::<Inode>() <= 312, "{}", size_of::<Inode>());
        assert!(size_of::<crate::Op>() <= 232, "{}", size_of::<crate::Op>());
        assert!(size_of::<(Name, Entry)>() <= 32, "{}", size_of::<(Name, Entry)>());
    }
}
