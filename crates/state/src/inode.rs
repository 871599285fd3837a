//! A file as it is known in memory, and a name in a directory.

use std::collections::BTreeMap;
use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::HashMap;

use surgetank_store::Cred;
use surgetank_types::clock::Moment;
use surgetank_types::model::{Attr, DeviceId, FileId, Kind, RunId, Seq, StoreIdentity, Xattrs};

use crate::delegation::DelegationDemand;
use crate::hints::HintHistory;
use crate::kernel_entries::KernelNegativeEntries;
use crate::negative_cache::NegativeCache;
use crate::{Name, Place};

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
    pub negative_cache: NegativeCache,
    /// Queued operations that put something into this directory or take it away.
    pub queued: u32,
    /// The kernel caches the directory's attributes or listing, which a new name makes wrong.
    pub is_in_kernel: bool,
    /// The listing that the kernel may have kept came without its files' attributes.
    pub listed_bare: bool,
    /// Names that the kernel caches as absent for a long time.
    pub kernel_negative_entries: KernelNegativeEntries,
    /// A rename of the directory itself is queued, so its making can no longer be taken back.
    pub moved: bool,
    /// A program gave it a time of its own, and has changed no name in it since.
    pub times_given: bool,
    /// Processes create files in it without asking: the kernel must not cache it for long.
    pub is_delegated: bool,
    pub demand: DelegationDemand,
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
    /// The content is in a temporary in the store: this name in this directory.
    pub spill: Option<Place>,
    pub hints: Option<Box<HintHistory>>,
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

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Draining => "draining",
            Self::Durable => "durable",
            Self::Evicted => "evicted",
            Self::Kept => "kept",
        })
    }
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
    pub pages: Option<Box<Pages>>,
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
    pub(crate) clean_bytes: u64,
    /// Opens for reading since it is on its tier, and the last of them.
    pub reads: u32,
    pub used: Option<Moment>,
    pub prefetched: bool,
    /// Why the content is where it is (`surgetank why`): see [`Tree::reason`](crate::Tree::reason).
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
    pub fn hint_history(&self) -> Option<&HintHistory> {
        self.extra.as_ref().and_then(|extra| extra.hints.as_deref())
    }
    pub fn cred(&self) -> Cred {
        Cred { uid: self.attr.uid, gid: self.attr.gid }
    }

    /// The kernel learns of the directory.
    pub fn enters_kernel(&mut self) {
        if let Some(dir) = self.dir.as_mut() {
            dir.is_in_kernel = true;
        }
    }

    // Versions: in memory, on a tier that was made to keep them, and in the store.

    /// Brought to a tier as the store has it (it may have gone from there again), and never written here: another client may
    /// change it there.
    pub fn is_copy(&self) -> bool {
        let at_rest = self.publish.is_none() && self.set_meta.is_none() && self.identity.is_some();
        let one_name = self.extra.as_ref().is_none_or(|extra| extra.more_names.is_empty() && extra.spill.is_none());
        self.owned && self.may_be_copy() && self.applied == self.logical && at_rest && one_name
    }

    /// It is a copy, or will be one when what is queued is done.
    pub fn may_be_copy(&self) -> bool {
        self.attr.kind == Kind::File && self.version == 0 && self.sealed && self.applied.is_some()
    }

    /// On a tier, and without a version yet.
    pub fn is_fresh(&self) -> bool {
        self.version == 0 && self.replica.is_some()
    }

    /// The tier has been made to keep the present version.
    pub fn is_synced(&self) -> bool {
        self.sealed && self.synced >= self.version
    }

    /// A program was promised bytes of what is not in the store yet.
    pub fn is_promised(&self) -> bool {
        self.promised > self.durable
    }

    /// The version that what is there now is, or will be when it is closed.
    pub fn present_version(&self) -> u32 {
        self.version + u32::from(!self.sealed)
    }

    pub fn dirty(&self) -> bool {
        self.version != self.durable
    }
}

/// Of what the kernel may have pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// Of the store's file, when it was this version.
    Store(StoreIdentity),
    /// Of ours, in this epoch.
    Ours(u32),
}
