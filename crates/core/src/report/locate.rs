//! Where the contents of files are, for schedulers (`surgetank locate`).

use serde::{Deserialize, Serialize};

use super::{FileState, PathText};

/// A file's newest version, and its copies on the tiers of nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Its number; 0: the store had the file before this run.
    pub version: u32,
    /// Its state.
    pub state: FileState,
    /// The member of the pool that decides its content. `None`: outside a pool, or if the store decides.
    pub home: Option<u32>,
    /// Whole copies on tiers.
    pub copies: Vec<CopyOn>,
    /// The store has this version.
    pub durable: bool,
    /// Between agents: other members that have copies, and the file's number, by which they know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<(u64, Vec<u32>)>,
}

/// A copy on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOn {
    /// The member of the pool; `None`: outside a pool.
    pub member: Option<u32>,
    /// The name of its node (`uname -n`). Empty, like tier and path: the member did not answer.
    pub node: String,
    /// The tier.
    pub tier: String,
    /// The plain file on that node.
    pub path: PathText,
}

/// A file as one member knows it, for another member that may have it too: of the same size, and changed at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Same {
    /// Below the served directory.
    pub path: PathText,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Seconds and nanoseconds.
    pub mtime: (i64, u32),
}
