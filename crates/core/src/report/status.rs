//! The answer of `surgetank status`: the agent, its tiers, its queue, and the failures at the moment.
//!
//! The danger that it avoids: a failure that only the log names.

use serde::{Deserialize, Serialize};

use super::{Listing, Lost, PathText, PoolMembers};
use surgetank_policy::config::Survives;
use surgetank_store::Savings;
use surgetank_types::model::RunId;

/// Is a tier's device in use, and if not, why not?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// In use.
    Well,
    /// Taken out of use after errors.
    Sick {
        /// The error of the device, in words.
        reason: String,
    },
}

/// One device of a tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// The configured directory of the device.
    pub path: PathText,
    /// Bytes of files on the device.
    pub used_bytes: u64,
    /// Bytes that are promised to writers and not written yet.
    pub reserved_bytes: u64,
    /// The free bytes of the file system, shared with other users.
    pub free_bytes: u64,
    /// Use of the device after errors.
    pub health: Health,
}

/// One tier with all its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    /// Name of the tier.
    pub name: String,
    /// The most bytes that Surgetank uses of the tier.
    pub cap_bytes: u64,
    /// Bytes of files on the tier.
    pub used_bytes: u64,
    /// Bytes that are promised to writers and not written yet.
    pub reserved_bytes: u64,
    /// Bytes here that the store does not have yet.
    pub dirty_bytes: u64,
    /// The event that its files outlive.
    pub survives: Survives,
    /// Devices in the configured order.
    pub devices: Vec<DeviceStatus>,
}

/// The file that has waited longest for the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oldest {
    /// Path below the served directory.
    pub path: PathText,
    /// Time in the queue, in seconds.
    pub age_seconds: u64,
}

/// The work that waits for the store.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Queue {
    /// Files whose content waits.
    pub files: u64,
    /// Their bytes, without holes.
    pub bytes: u64,
    /// Renames, deletes, changes of mode.
    pub operations: u64,
    /// The first file in the queue; `None`: no content waits.
    pub oldest: Option<Oldest>,
    /// The drain's current rate; 0 without progress.
    pub bytes_per_second: u64,
}

/// A failure at the moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// Path below the served directory; `None`: the failure concerns no single file.
    pub path: Option<PathText>,
    /// The tier or store.
    pub place: String,
    /// The error, in words.
    pub reason: String,
    /// Time of the first failure, in seconds since 1970.
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
    /// Tiers, in the configured order.
    pub tiers: Vec<TierStatus>,
    /// The work that waits for the store.
    pub queue: Queue,
    /// The drain and its failures.
    #[serde(default)]
    pub drain: DrainStatus,
    /// Failures at the moment, those of the drain first.
    pub troubles: Vec<Trouble>,
    /// Losses that the user has not acknowledged yet.
    #[serde(default)]
    pub lost: Listing<Lost>,
    /// Bytes that are meant for the store, have no durable copy, and would be lost with a reboot of the node.
    pub at_risk_reboot_bytes: u64,
    /// The same with the loss of the node.
    pub at_risk_node_bytes: u64,
    /// The end of the job; `None`: unknown.
    #[serde(default)]
    pub deadline: Option<DeadlineStatus>,
}

/// The end of the job, where it is known, and the bytes that can be drained by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineStatus {
    /// The end, in seconds since 1970.
    pub unix_seconds: i64,
    /// The source of the end's time.
    pub from: String,
    /// Time from now to the end, in seconds; 0 after it.
    pub left_seconds: u64,
    /// The drain's rate while it works; assumed as long as it is not `measured`.
    pub bytes_per_second: u64,
    /// `bytes_per_second` is a measurement.
    pub measured: bool,
    /// The bytes that can be drained until then, with a margin.
    pub drainable_bytes: u64,
    /// The bytes that have to be drained.
    pub undrained_bytes: u64,
    /// All undrained bytes can be drained until the end.
    pub fits: bool,
}

/// The programs that see the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Visibility {
    /// A mount namespace of the runs.
    Private,
    /// Every program of the node sees the mount.
    Global,
}

/// One run that uses the directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Number of the run.
    pub run: RunId,
    /// Process id of `surgetank run`.
    pub pid: u32,
    /// Command line, shortened.
    pub command: String,
    /// Time at which the run joined, in seconds since 1970.
    pub since_unix_seconds: i64,
}

/// All of `surgetank status`: the agent's own part and the engine's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// The served directory.
    pub over: PathText,
    /// Path or URL of the store, without secrets.
    pub store: PathText,
    /// Process id of the agent.
    pub pid: u32,
    /// The version of Surgetank that the agent is.
    pub version: String,
    /// Phase of the agent's life.
    pub phase: Phase,
    /// The programs that see the mount.
    pub visibility: Visibility,
    /// Time at which the agent began to serve, in seconds since 1970.
    pub since_unix_seconds: i64,
    /// Runs that use the directory.
    pub runs: Vec<RunStatus>,
    /// Other mounts below the directory: bound through, not served by the agent.
    pub bypassed: Vec<PathText>,
    /// The members of the agent's pool; missing: it belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolMembers>,
    /// The engine's part.
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
