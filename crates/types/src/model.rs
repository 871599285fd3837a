//! The nouns that every room shares: ids, attributes, records. No behaviour beyond their own invariants.

pub mod attr;
pub mod lock;
pub mod record;

pub use attr::{Attr, Kind, Timestamp, data_bytes};
pub use lock::{FileLock, LockKind, LockRequest};
pub use record::{
    Change, EntryRecord, FileRecord, HintRecord, Hinted, Image, LostRecord, OpKind, OpRecord, Prepared, Replica,
    StoreIdentity, Xattrs,
};

use serde::{Deserialize, Serialize};

/// Identity of a file for as long as the catalog knows it; also the FUSE node id. Never reused. 1 is the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FileId(pub u64);

impl FileId {
    pub const ROOT: Self = Self(1);
}

/// Position in the one global order of what must reach the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seq(pub u64);

/// A compute node. One for now; replicas name it so that more can come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u16);

/// A device of a tier: in memory both are indices into the configuration's order, fastest tier first. In the catalog
/// it is a number of its own that outlives the configuration (`tier::Remembered`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceId {
    pub tier: u8,
    pub device: u8,
}

/// One `surgetank run`. 0 is "nobody in particular" (a mount without runs, recovery).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct RunId(pub u32);

/// What happens to a file that a program wrote (Sea, section "memory management modes").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Stays in the tiers and is not drained; named at exit as "NOT in the store".
    Keep,
    /// Drained, and kept in the tier while there is room.
    #[default]
    Copy,
    /// Drained, then evicted at once.
    Move,
    /// A temporary: never drained, dropped at the end (or when room is wanted and nobody has it open).
    Remove,
}

/// What `fsync` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsyncTarget {
    /// The device the file lies on.
    Tier,
    /// The store: the bytes are published there before fsync returns.
    Store,
}

/// Who asks. Store I/O is done with these ids; decisions never are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    pub umask: u32,
}

/// Prefix of every temporary that we make in the store; hidden from our own listings.
pub const STORE_TEMPORARY_PREFIX: &[u8] = b".surgetank-tmp-";
/// What stage-in and stage-out have under way lies beside its place under such names. (A served directory takes them.)
pub const PART_PREFIX: &str = ".surgetank-part-";
/// Marks the copy that is kept when somebody else changed the store's file: `NAME.surgetank-conflict-RUN`.
pub const CONFLICT_INFIX: &str = ".surgetank-conflict-";
