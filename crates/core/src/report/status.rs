//! The answer of `surgetank status`: the agent, its tiers, its queue, and the failures at the moment.

use serde::{Deserialize, Serialize};

use super::{Listing, Lost, PathText};
use surgetank_policy::config::Survives;
use surgetank_store::Savings;
use surgetank_types::model::RunId;

/// Is a tier's device in use, and if not, why not?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    Well,
    /// Taken out of use after errors.
    Sick {
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    pub path: PathText,
    pub used_bytes: u64,
    pub reserved_bytes: u64,
    /// The free bytes of the file system, shared with other users.
    pub free_bytes: u64,
    pub health: Health,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    pub name: String,
    pub cap_bytes: u64,
    pub used_bytes: u64,
    pub reserved_bytes: u64,
    /// Bytes here that the store does not have yet.
    pub dirty_bytes: u64,
    pub survives: Survives,
    pub devices: Vec<DeviceStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oldest {
    pub path: PathText,
    pub age_seconds: u64,
}

/// The work that waits for the store.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Queue {
    pub files: u64,
    pub bytes: u64,
    /// Renames, deletes, changes of mode.
    pub operations: u64,
    pub oldest: Option<Oldest>,
    pub bytes_per_second: u64,
}

/// A failure at the moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    pub path: Option<PathText>,
    /// The tier or store.
    pub place: String,
    pub reason: String,
    pub since_unix_seconds: i64,
}

/// The drain's state and failures with the store, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DrainStatus {
    /// No operation has reached the store since then: the time of the first failure, or of a call without an answer.
    /// `troubles` has the reason.
    pub paused_since_unix_seconds: Option<i64>,
    /// Failed tries.
    pub failures: u64,
    /// Copies that verification rejected.
    pub corrupt: u64,
    /// Present where rules compress files for the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub savings: Option<Savings>,
}

/// The engine's part of `surgetank status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Status {
    pub tiers: Vec<TierStatus>,
    pub queue: Queue,
    #[serde(default)]
    pub drain: DrainStatus,
    pub troubles: Vec<Trouble>,
    /// Losses that the user has not acknowledged yet.
    #[serde(default)]
    pub lost: Listing<Lost>,
    /// Bytes that are meant for the store, have no durable copy, and would be lost with a reboot of the node.
    pub at_risk_reboot_bytes: u64,
    /// The same with the loss of the node.
    pub at_risk_node_bytes: u64,
    #[serde(default)]
    pub deadline: Option<DeadlineStatus>,
}

/// The end of the job, where it is known, and the bytes that can be drained by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineStatus {
    pub unix_seconds: i64,
    /// The source of the end's time.
    pub from: String,
    pub left_seconds: u64,
    /// The drain's rate while it works; assumed as long as it is not `measured`.
    pub bytes_per_second: u64,
    pub measured: bool,
    /// The bytes that can be drained until then, with a margin.
    pub drainable_bytes: u64,
    /// The bytes that have to be drained.
    pub undrained_bytes: u64,
    pub fits: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Visibility {
    /// A mount namespace of the runs.
    Private,
    /// Every program of the node sees the mount.
    Global,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    pub run: RunId,
    pub pid: u32,
    pub command: String,
    pub since_unix_seconds: i64,
}

/// All of `surgetank status`: the agent's own part and the engine's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub over: PathText,
    pub store: PathText,
    pub pid: u32,
    pub version: String,
    pub phase: Phase,
    pub visibility: Visibility,
    pub since_unix_seconds: i64,
    pub runs: Vec<RunStatus>,
    /// Other mounts below the directory: bound through, not served by the agent.
    pub bypassed: Vec<PathText>,
    #[serde(flatten)]
    pub content: Status,
}

/// The agent's life; `agent/users.rs` has the transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has users, or was ordered to stay.
    Serving,
    /// Without users: the agent drains the rest, and still admits a new user.
    Leaving,
    /// Unmounting: a new user has to wait and start another agent.
    Closed,
}
