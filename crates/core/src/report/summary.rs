//! The summary of a run: the work of tiers, drain and mount since the agent started.

use serde::{Deserialize, Serialize};

use super::{Listing, PathText};
use surgetank_store::Savings;

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierSummary {
    pub name: String,
    pub files: u64,
    pub in_bytes: u64,
    pub out_bytes: u64,
    /// Opens served from here.
    pub hits: u64,
    /// Files that had to leave in the middle of a write.
    pub spills: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DrainSummary {
    pub files: u64,
    /// Without holes.
    pub bytes: u64,
    /// `bytes` over the time in which the drain worked.
    pub bytes_per_second: u64,
    /// Failed tries of all runs.
    #[serde(default)]
    pub failures: u64,
    /// Copies of all runs that verification rejected, and that were made again.
    #[serde(default)]
    pub corrupt: u64,
    /// From the end of the command to the last durable byte.
    pub tail_ms: u64,
    /// Present where rules compress files for the store; of all runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub savings: Option<Savings>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MountSummary {
    pub requests: u64,
    /// Time the agent spent answering, over all threads.
    pub service_ms: u64,
    pub direct_opens: u64,
    pub mediated_opens: u64,
    pub mediated_read_bytes: u64,
    pub mediated_write_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summary {
    pub tiers: Vec<TierSummary>,
    pub drain: DrainSummary,
    pub mount: MountSummary,
    /// Bytes that are meant for the store, have no durable copy, and would be lost with the node now.
    pub at_risk_node_bytes: u64,
    /// By all programs that the agent served, of all runs.
    #[serde(default)]
    pub refused: Vec<Refused>,
    /// Writers that got an error because no room was left anywhere.
    #[serde(default)]
    pub no_room: Listing<NoRoom>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NoRoom {
    pub path: PathText,
    /// The tiers and the store, and the store's answer.
    pub why: String,
}

/// Calls of one kind that failed because there is no mount.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Refused {
    pub what: String,
    pub count: u64,
    /// The path in the first of them, as the program gave it; empty without a path.
    pub path: PathText,
    /// The program of the first call.
    pub command: String,
}
