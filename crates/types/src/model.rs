//! The nouns that every crate shares: ids, attributes, records. They have no behaviour beyond their own invariants.

pub mod attr;
pub mod lock;
pub mod record;

pub use attr::{Attr, Kind, Timestamp, data_bytes};
pub use lock::{FileLock, LockKind, LockRequest};
pub use record::{
    Change, EntryRecord, FileRecord, HintRecord, Hinted, Image, LostRecord, Mark, OpKind, OpRecord, Prepared, Replica,
    StoreIdentity, Xattrs,
};

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// Identity of a file for as long as the catalog has a record of it; also the FUSE node id. Never reused. 1 is the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId(pub u64);

impl FileId {
    /// The mount's root directory.
    pub const ROOT: Self = Self(1);
}

/// Position in the one global order of the operations that must reach the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seq(NonZeroU64);

impl Seq {
    /// The operation with this number; 0 counts as 1, the first.
    pub const fn new(number: u64) -> Self {
        match NonZeroU64::new(number) {
            Some(number) => Self(number),
            None => Self(NonZeroU64::MIN),
        }
    }
    /// Its number, from 1.
    pub const fn number(self) -> u64 {
        self.0.get()
    }
}

/// A compute node: a member of the pool, from 1. 0: this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u16);

/// A device of a tier. In memory both numbers are indices into the configuration's order, fastest tier first. In the catalog
/// `device` is a number that outlives the configuration (`surgetank_tier::Remembered`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceId {
    /// Index of the tier, fastest first.
    pub tier: u8,
    /// Index of the device in its tier; in the catalog, the remembered number.
    pub device: u8,
}

/// One `surgetank run`. 0 stands for no run (a mount without runs, recovery).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct RunId(pub u32);

impl RunId {
    /// What programs of another member of a pool write belongs to the run with this number plus the member's.
    const OF_MEMBERS: u32 = 1 << 31;

    /// The run of what programs of another member of a pool write.
    #[must_use]
    pub fn of_member(member: u32) -> Self {
        Self(Self::OF_MEMBERS + member % Self::OF_MEMBERS)
    }

    /// Is it that of another member of a pool?
    #[must_use]
    pub fn is_of_a_member(self) -> bool {
        self.0 >= Self::OF_MEMBERS
    }

    /// Does what was written by `run` count for this one? What belongs to no run counts for each run of this node.
    #[must_use]
    pub fn has(self, run: Self) -> bool {
        run == self || run == Self(0) && !self.is_of_a_member()
    }
}

/// What happens to a file that a program wrote (Sea, section "memory management modes": `.sea_flushlist` and `.sea_evictlist`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Stays in the tiers and is not drained; the verdict at exit lists it as "NOT in the store".
    Keep,
    /// Drained, and kept in the tier while there is space.
    #[default]
    Copy,
    /// Drained, then evicted at once.
    Move,
    /// A temporary: never drained. It is dropped at the end, or earlier when space is needed and no program has it open.
    Remove,
}

/// What `fsync` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsyncTarget {
    /// The device that stores the file.
    Tier,
    /// The store: the bytes are published there before fsync returns.
    Store,
}

/// What a member of a pool is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It runs tasks.
    #[default]
    Compute,
    /// Its tiers are for copies of other members' files.
    Storage,
}

/// The process that makes a request. Store I/O uses its ids; decisions do not depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User id, as in the agent's user namespace.
    pub uid: u32,
    /// Group id, as in the agent's user namespace.
    pub gid: u32,
    /// Process id; 0 when the kernel does not report one.
    pub pid: u32,
    /// Permission bits that new files do not get.
    pub umask: u32,
}

/// The directory below the root in which a member of a pool has contents of files that belong to other members' directories.
/// The store does not have it, and programs do not see it.
pub const HOMES: &[u8] = b".surgetank-homes";
/// Prefix of the name of every temporary that Surgetank makes in the store; the mount's listings hide these names.
pub const STORE_TEMPORARY_PREFIX: &[u8] = b".surgetank-tmp-";
/// Prefix of the temporaries of `stage-in` and `stage-out` in a directory. A served directory accepts such names.
pub const PART_PREFIX: &str = ".surgetank-part-";
/// Infix of the copy that is kept when another client changed the store's file: `NAME.surgetank-conflict-KEY-RUN`.
pub const CONFLICT_INFIX: &str = ".surgetank-conflict-";
