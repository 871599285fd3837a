//! The summary of a run: the work of tiers, drain and mount since the agent started.
//!
//! The danger that it avoids: a write that failed without room, or a call that failed without a mount, goes unnoticed.

use serde::{Deserialize, Serialize};

use super::{Listing, PathText};
use surgetank_store::Savings;

/// The work of one tier, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierSummary {
    /// Name of the tier.
    pub name: String,
    /// Files placed on the tier.
    pub files: u64,
    /// Bytes that programs wrote to the tier, and bytes copied to it.
    pub in_bytes: u64,
    /// Bytes that the drain and mediated reads read from the tier.
    pub out_bytes: u64,
    /// Opens served from here.
    pub hits: u64,
    /// Files that had to leave in the middle of a write.
    pub spills: u64,
}

/// The work of the drain, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DrainSummary {
    /// Files that became durable.
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

/// The work of the mount, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MountSummary {
    /// Requests that the kernel sent.
    pub requests: u64,
    /// Time the agent spent answering, over all threads.
    pub service_ms: u64,
    /// Opens after which the kernel reads and writes the plain file itself.
    pub direct_opens: u64,
    /// Opens after which every read and write comes to the agent.
    pub mediated_opens: u64,
    /// Bytes that the agent read for programs.
    pub mediated_read_bytes: u64,
    /// Bytes that the agent wrote for programs.
    pub mediated_write_bytes: u64,
}

/// The agent's work since it started, as `run` prints and `--json` contains it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Tiers, in the configured order.
    pub tiers: Vec<TierSummary>,
    /// The drain.
    pub drain: DrainSummary,
    /// The mount.
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

/// A writer that got an error because no room was left.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NoRoom {
    /// Path below the served directory.
    pub path: PathText,
    /// The tiers and the store, and the store's answer.
    pub why: String,
}

/// Calls of one kind that failed because there is no mount.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Refused {
    /// Kind of the call, in words.
    pub what: String,
    /// Number of calls.
    pub count: u64,
    /// The path in the first of them, as the program gave it; empty without a path.
    pub path: PathText,
    /// The program of the first call.
    pub command: String,
}
