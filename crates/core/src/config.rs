//! Configuration: `surgetank.toml`, `SURGETANK_…`, the command line, and Sea's own files.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{FsyncTarget, Mode};
use crate::store::Verify;

/// What a tier outlives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Survives {
    /// The death of the agent only (tmpfs).
    Agent,
    /// A reboot of the node (a local disk).
    Reboot,
    /// The loss of the node (shared storage).
    Node,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierConfig {
    pub name: String,
    /// One directory for each device.
    pub paths: Vec<PathBuf>,
    /// Cap of our use over all of the tier's devices; `None`: chosen so that the machine keeps room.
    pub cap_bytes: Option<u64>,
    /// `None`: found out from the file system (tmpfs → agent, otherwise reboot).
    pub survives: Option<Survives>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pattern {
    /// `**`, `*`, `?`, `[…]`, `{a,b}`; without a slash it matches the name in any directory.
    Glob(String),
    /// Sea's lists: a regular expression, found anywhere in the path.
    Regex(String),
}

/// Who says so; a later variant wins over an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Authority {
    Default,
    Hint,
    Project,
    CommandLine,
    Site,
}

/// When the drain takes a file up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Timing {
    /// As soon as it is sealed and quiet.
    #[default]
    Soon,
    /// In the final drain (`.git`, caches, virtual environments).
    Last,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleConfig {
    pub pattern: Pattern,
    pub mode: Option<Mode>,
    pub timing: Option<Timing>,
    pub fsync: Option<FsyncTarget>,
    /// Expected size: room is reserved for it, so that writes are direct.
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<String>,
    pub prefetch: bool,
    pub pin: bool,
    pub authority: Authority,
    /// Where it was written: `surgetank.toml:12`, `.sea_flushlist:3`, `--rule`.
    pub origin: String,
}

/// What happens at the end to files whose mode is `keep`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum KeepAtExit {
    #[default]
    Leave,
    Drain,
    Drop,
}

/// Everything the agent needs to know; resolved, absolute, ready to use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub over: PathBuf,
    /// Directory of a `file:` store; equal to `over` unless `--store` puts it elsewhere.
    pub store: PathBuf,
    pub tiers: Vec<TierConfig>,
    pub rules: Vec<RuleConfig>,
    /// Root of journals and sockets; never under `over`.
    pub state: PathBuf,
    pub ordered: bool,
    pub verify: Verify,
    pub fsync: Option<FsyncTarget>,
    /// An existing store file up to this size is copied to a tier when opened for writing; a larger one is written in place.
    pub copy_up_bytes_max: u64,
    /// Undrained bytes allowed on volatile tiers before writers wait.
    pub dirty_bytes_max: u64,
    pub drain_threads: usize,
    /// 0: no limit.
    pub drain_bytes_per_second_max: u64,
    /// How long what we know of the store's names and attributes is believed.
    pub store_ttl: Duration,
    /// How long a sealed file must be quiet before it is drained.
    pub quiet: Duration,
    /// How long a failing store operation is retried before the final drain gives up.
    pub retry: Duration,
    /// How long background children may outlive the command.
    pub grace: Duration,
    pub keep_at_exit: KeepAtExit,
    pub direct: bool,
}
