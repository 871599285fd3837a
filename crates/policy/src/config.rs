//! Configuration: `surgetank.toml`, `SURGETANK_…`, the command line, and Sea's own files.
//!
//! [`Config::load`] gathers and resolves them: the result has absolute paths and no open choices. `docs/configuration.md` is
//! the reference for users.

mod again;
mod deadline;
mod file;
pub mod key;
mod load;
pub mod machine;
mod metrics;
mod places;
mod sea;
mod slurm;
pub mod tiers;

pub use deadline::Deadline;
pub use load::{Loaded, OTHER_VARIABLES};
pub use machine::Surroundings;
pub use metrics::TokenFile;

pub use crate::rule::{Authority, Compress, Pattern, RuleConfig};
pub use crate::words::{ReplicasAt, Timing, quantity};

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use surgetank_store::Verify;
use surgetank_types::error::Result;
use surgetank_types::model::{FsyncTarget, Role};

/// The strongest event that files on a tier survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Survives {
    /// The end of the agent's process only (tmpfs).
    Agent,
    /// A reboot of the node (a local disk).
    Reboot,
    /// The loss of the node (shared storage).
    Node,
}

/// One tier of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierConfig {
    /// Its name: letters, digits, `-`, `_` and `.`; not `store`.
    pub name: String,
    /// One directory for each device.
    pub paths: Vec<PathBuf>,
    /// Cap of Surgetank's files over all devices of the tier, in bytes; `None`: chosen so that the machine keeps space.
    pub cap_bytes: Option<u64>,
    /// What it survives; `None`: derived from the file system (tmpfs → agent, local disk → reboot, shared → node).
    pub survives: Option<Survives>,
}

/// What happens at the end of the last run to files whose mode is `keep`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum KeepAtExit {
    /// They stay in the tiers.
    #[default]
    Leave,
    /// They are drained to the store.
    Drain,
    /// They are removed from the tiers.
    Drop,
}

/// How programs access the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// By a mount if one can be made, otherwise by seccomp.
    #[default]
    Auto,
    /// By a FUSE mount.
    Fuse,
    /// Without a mount: the agent answers system calls by seccomp.
    Seccomp,
}

/// The agents of a job that share one namespace over their tiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolConfig {
    /// Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The file with the secret that all members have.
    pub secret: PathBuf,
    /// The host name or address under which the other members reach this machine.
    pub host: String,
    /// How long a member that does not answer keeps what it owns.
    pub lease: Duration,
    /// What this member is for.
    #[serde(default)]
    pub role: Role,
    /// The name is that of the Slurm job, not one that the user gave.
    #[serde(default)]
    pub is_of_job: bool,
    /// A line for the user when an agent starts as a member; empty: there is none.
    #[serde(default)]
    pub announcement: String,
    /// The URL of the server that has the registry; `None`: the pool's first member has it. No password is in it.
    #[serde(default)]
    pub registry: Option<String>,
    /// The file with the registry's password.
    #[serde(default)]
    pub registry_password: Option<PathBuf>,
}

/// The configuration of an agent: resolved, with absolute paths.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// The pool of which the agent is a member.
    #[serde(default)]
    pub pool: Option<PoolConfig>,
    /// The directory that is served.
    pub over: PathBuf,
    /// Directory of a `file:` store, equal to `over` unless `--store` names another one; or a URL (`store_url`).
    pub store: PathBuf,
    /// The tiers, fastest first.
    pub tiers: Vec<TierConfig>,
    /// The rules of all sources, in the order in which they were read.
    pub rules: Vec<RuleConfig>,
    /// Root of journals and sockets; never under `over`.
    pub state: PathBuf,
    /// Whether files appear in the store in the order in which programs closed them.
    pub ordered: bool,
    /// Whether a member of a pool waits for what is older at the other members.
    pub pool_ordered: bool,
    /// On how many members of a pool a closed file is until the store has it, unless a rule or hint decides.
    #[serde(default = "one")]
    pub replicas: u32,
    /// When it is there, unless a rule or hint decides.
    #[serde(default)]
    pub replicas_at: ReplicasAt,
    /// How a copy in the store is verified.
    pub verify: Verify,
    /// What fsync waits for, unless a rule decides; `None`: chosen for each file by what its tier survives.
    pub fsync: Option<FsyncTarget>,
    /// An existing store file up to this size is copied to a tier when a program opens it for writing; a larger one is written
    /// in place.
    pub copy_up_bytes_max: u64,
    /// Undrained bytes allowed on volatile tiers before writers wait.
    pub dirty_bytes_max: u64,
    /// Number of threads that copy files to the store.
    pub drain_threads: usize,
    /// Limit of the drain's rate; 0: no limit.
    pub drain_bytes_per_second_max: u64,
    /// Time for which names and attributes of the store are cached before they are checked again.
    pub store_ttl: Duration,
    /// Time for which a sealed file must be quiet before it is drained.
    pub quiet: Duration,
    /// Longest time that a closed file is on a tier, and not in the store yet, until the tier's device is synced.
    pub sync_after: Duration,
    /// Time for which a failing store operation is retried before the final drain fails.
    pub retry: Duration,
    /// Time for which a writer waits if neither a tier nor the store has space, before it gets the error.
    #[serde(default)]
    pub wait_for_room: Duration,
    /// Time for which background children may outlive the command.
    pub grace: Duration,
    /// The end of the job, if it is known.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// Id of the Slurm job, if no source reports its end.
    #[serde(skip)]
    pub job: Option<String>,
    /// What happens at the end to files with mode `keep`.
    pub keep_at_exit: KeepAtExit,
    /// Whether programs may get direct descriptors.
    pub direct: bool,
    /// How programs access the directory.
    #[serde(default)]
    pub door: Way,
    /// Whether programs get the preload shim.
    pub preload: bool,
    /// Names of programs that do not get the shim.
    pub preload_skip: Vec<String>,
    /// Path of a socket that gives the status to the members of the Unix group of its directory.
    #[serde(default)]
    pub group_socket: Option<PathBuf>,
    /// The address at which metrics are served, if any.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// The token that readers of the metrics show.
    #[serde(default)]
    pub metrics_token_file: TokenFile,
    /// The options of a later command with the same meaning, except `--over`.
    #[serde(default)]
    pub again: Vec<OsString>,
}

/// Of a file, without a rule or hint.
fn one() -> u32 {
    1
}

/// The options of the command line, as the user typed them. The units and forms are those of `docs/configuration.md`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `--over`: the directory that is served.
    pub over: Option<PathBuf>,
    /// `--config`: a `surgetank.toml`, or a `sea.ini`.
    pub config: Option<PathBuf>,
    /// `--store`: a path or a URL.
    pub store: Option<String>,
    /// `--tier`: `NAME=PATH[,PATH…][:SIZE]`.
    pub tiers: Vec<String>,
    /// `--rule`: `GLOB=keep|copy|move|remove`.
    pub rules: Vec<String>,
    /// `--state`: the root of journals and sockets.
    pub state: Option<PathBuf>,
    /// `--ordered`: `true` or `false`.
    pub ordered: Option<String>,
    /// `--pool-ordered`: `true` or `false`.
    pub pool_ordered: Option<String>,
    /// `--replicas`: 1 to 16.
    pub replicas: Option<String>,
    /// `--replicas-at`: `later` or `close`.
    pub replicas_at: Option<String>,
    /// `--verify`: `cache` or `reread`.
    pub verify: Option<String>,
    /// `--fsync`: `auto`, `tier` or `store`.
    pub fsync: Option<String>,
    /// `--copy-up-bytes-max`: a size.
    pub copy_up_bytes_max: Option<String>,
    /// `--dirty-bytes-max`: a size.
    pub dirty_bytes_max: Option<String>,
    /// `--drain-threads`: 1 to 256.
    pub drain_threads: Option<String>,
    /// `--drain-bytes-per-second-max`: a size; 0: no limit.
    pub drain_bytes_per_second_max: Option<String>,
    /// `--store-ttl`: a duration.
    pub store_ttl: Option<String>,
    /// `--quiet`: a duration.
    pub quiet: Option<String>,
    /// `--sync-after`: a duration.
    pub sync_after: Option<String>,
    /// `--retry`: a duration.
    pub retry: Option<String>,
    /// `--wait-for-room`: a duration.
    pub wait_for_room: Option<String>,
    /// `--grace`: a duration.
    pub grace: Option<String>,
    /// `--deadline`: a duration from now, a point in time, seconds since 1970, or `none`.
    pub deadline: Option<String>,
    /// `--keep-at-exit`: `leave`, `drain` or `drop`.
    pub keep_at_exit: Option<String>,
    /// `--direct`: `true` or `false`.
    pub direct: Option<String>,
    /// `--door`: `auto`, `fuse` or `seccomp`.
    pub door: Option<String>,
    /// `--preload`: `true` or `false`.
    pub preload: Option<String>,
    /// `--preload-skip`: names of programs, separated by commas.
    pub preload_skip: Option<String>,
    /// `--group-socket`: a path.
    pub group_socket: Option<String>,
    /// `--metrics`: `PORT`, `IP:PORT` or `none`.
    pub metrics: Option<String>,
    /// `--metrics-token-file`: a path, or `none`.
    pub metrics_token_file: Option<String>,
}

impl Overrides {
    fn scalars(&self) -> [(&'static str, &Option<String>); 26] {
        [
            ("store", &self.store),
            ("ordered", &self.ordered),
            ("pool_ordered", &self.pool_ordered),
            ("replicas", &self.replicas),
            ("replicas_at", &self.replicas_at),
            ("verify", &self.verify),
            ("fsync", &self.fsync),
            ("copy_up_bytes_max", &self.copy_up_bytes_max),
            ("dirty_bytes_max", &self.dirty_bytes_max),
            ("drain_threads", &self.drain_threads),
            ("drain_bytes_per_second_max", &self.drain_bytes_per_second_max),
            ("store_ttl", &self.store_ttl),
            ("quiet", &self.quiet),
            ("sync_after", &self.sync_after),
            ("retry", &self.retry),
            ("wait_for_room", &self.wait_for_room),
            ("grace", &self.grace),
            ("deadline", &self.deadline),
            ("keep_at_exit", &self.keep_at_exit),
            ("direct", &self.direct),
            ("door", &self.door),
            ("preload", &self.preload),
            ("preload_skip", &self.preload_skip),
            ("group_socket", &self.group_socket),
            ("metrics", &self.metrics),
            ("metrics_token_file", &self.metrics_token_file),
        ]
    }

    fn apply(&self, cwd: &Path, draft: &mut key::Draft) -> Result<()> {
        let origin = |option: &str| key::Origin {
            label: format!("--{}", option.replace('_', "-")),
            base: cwd.to_path_buf(),
            authority: Authority::CommandLine,
        };
        if let Some(over) = &self.over {
            draft.over = Some(key::Sourced { value: cwd.join(over), origin: origin("over") });
        }
        if let Some(state) = &self.state {
            draft.state = Some(key::path(state, &origin("state"))?);
        }
        if !self.tiers.is_empty() {
            draft.tiers = Some(self.tiers.iter().map(|text| key::tier(text, &origin("tier"))).collect::<Result<_>>()?);
        }
        for text in &self.rules {
            draft.rules.push(key::rule(text, &origin("rule"))?);
        }
        for (name, value) in self.scalars() {
            if let Some(text) = value {
                draft.set(name, text, &origin(name))?;
            }
        }
        Ok(())
    }
}

impl Config {
    /// The URL of a store that is not a directory.
    pub fn store_url(&self) -> Option<&str> {
        url_of(&self.store)
    }

    /// Whether a source names the store, even if it names the directory itself.
    pub fn says_store(&self) -> bool {
        self.again.iter().any(|word| word == again::STORE)
    }

    /// The options by which a command that only asks finds this state; empty if it finds it without.
    pub fn state_options(state: &Path) -> Vec<OsString> {
        match Surroundings::of_this_process() {
            Ok(around) => again::state(state, &around),
            Err(_) => vec!["--state".into(), state.into()],
        }
    }

    /// Gathers and resolves all sources, for this process. Errors: a value that is invalid, with its place; conflicting
    /// directories.
    pub fn load(overrides: &Overrides) -> Result<Loaded> {
        Self::load_in(overrides, &Surroundings::of_this_process()?)
    }

    /// The same in an environment of the caller's choice.
    pub fn load_in(overrides: &Overrides, around: &Surroundings) -> Result<Loaded> {
        load::load(overrides, around)
    }

    /// Asks Slurm for the end of the job, if no source reports it: before version 23.02 jobs have no variable with it.
    pub fn ask_when_the_job_ends(&mut self) {
        if let Some(job) = self.job.take() {
            self.deadline = slurm::end_of(&job);
        }
    }

    /// Only the state root, for commands that only look for agents, from any directory.
    pub fn state_root(overrides: &Overrides) -> Result<PathBuf> {
        load::state_root(overrides, &Surroundings::of_this_process()?)
    }
}

#[cfg(test)]
mod tests;

fn url_of(store: &Path) -> Option<&str> {
    let is_url = |text: &&str| text.split_once("://").is_some_and(|(scheme, _)| key::STORE_SCHEMES.contains(&scheme));
    store.to_str().filter(is_url)
}
