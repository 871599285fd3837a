//! The pool as a member sees it, for `surgetank pool`.

use serde::{Deserialize, Serialize};
use surgetank_core::report::LostMember;
use surgetank_types::model::Role;

/// Members and directories.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct PoolStatus {
    /// The number of the member that answers.
    pub member: u32,
    /// The registry is there: it leaves last.
    pub has_registry: bool,
    /// All members.
    pub members: Vec<MemberStatus>,
    /// Members that were lost: their lease ended before they left.
    #[serde(default)]
    pub lost: Vec<LostMember>,
    /// Directories of the store that have an owner.
    pub claims: Vec<ClaimStatus>,
}

/// One member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its number, from 1.
    pub member: u32,
    /// Its incarnation.
    pub term: u32,
    /// Where the others reach it: `HOST:PORT`.
    pub address: String,
    /// What it is for.
    #[serde(default)]
    pub role: Role,
    /// Calls of this node's programs to it: each one is a round trip.
    #[serde(default)]
    pub calls: u64,
    /// Bytes on the network from it.
    pub received_bytes: u64,
    /// Bytes on the network to it.
    pub sent_bytes: u64,
    /// Files and directories of this node that its programs have open.
    pub handles: u64,
}

/// A directory and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimStatus {
    /// Below the root, for people.
    pub directory: String,
    /// The number of a member.
    pub owner: u32,
}
