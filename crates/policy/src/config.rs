//! Configuration: `surgetank.toml`, `SURGETANK_…`, the command line, and Sea's own files.
//!
//! [`Config::load`] is the way in; what it returns is resolved, absolute and ready to use. `docs/configuration.md` is the
//! reference for people.

mod again;
mod deadline;
mod file;
pub mod key;
mod load;
pub mod machine;
mod metrics;
mod places;
pub mod quantity;
mod sea;
mod slurm;
pub mod tiers;

pub use deadline::Deadline;
pub use load::{Loaded, OTHER_VARIABLES, Surroundings};
pub use metrics::TokenFile;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use surgetank_store::Verify;
use surgetank_types::error::Result;
use surgetank_types::model::{FsyncTarget, Mode};

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
    /// `None`: found out from the file system (tmpfs → agent, local disk → reboot, shared → node).
    pub survives: Option<Survives>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pattern {
    /// `**`, `*`, `?`, `[…]`, `{a,b}`, read as in `.gitignore` (see [`crate::rule`]).
    Glob(String),
    /// Sea's lists: a regular expression that covers the whole path, relative to the directory that is served.
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
    pub compress: Option<Compress>,
    /// `false`: not, whatever weaker rules say.
    pub dedup: Option<bool>,
    pub authority: Authority,
    /// Where it was written: `surgetank.toml:12`, `.sea_flushlist:3`, `--rule`.
    pub origin: String,
}

impl RuleConfig {
    /// A rule that says nothing yet.
    pub fn empty(pattern: Pattern, authority: Authority, origin: impl Into<String>) -> Self {
        Self {
            pattern,
            mode: None,
            timing: None,
            fsync: None,
            size_bytes: None,
            tier: None,
            prefetch: false,
            pin: false,
            compress: None,
            dedup: None,
            authority,
            origin: origin.into(),
        }
    }
}

/// How a file lies in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compress {
    /// As it is, whatever weaker rules say.
    None,
    /// With this level.
    Zstd(i32),
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

/// How programs reach the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// By a mount where one can be made, otherwise by seccomp.
    #[default]
    Auto,
    Fuse,
    Seccomp,
}

/// Everything the agent needs to know; resolved, absolute, ready to use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub over: PathBuf,
    /// Directory of a `file:` store, equal to `over` unless `--store` puts it elsewhere; or a URL (`store_url`).
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
    /// How long a closed file may lie on a tier, not in the store yet, until the tier is made to keep it through a reboot.
    pub sync_after: Duration,
    /// How long a failing store operation is retried before the final drain gives up.
    pub retry: Duration,
    /// How long a writer waits when neither a tier nor the store has room, before it gets the error.
    #[serde(default)]
    pub wait_for_room: Duration,
    /// How long background children may outlive the command.
    pub grace: Duration,
    /// When the job ends, as far as it is known.
    #[serde(default)]
    pub deadline: Option<Deadline>,
    /// A job of Slurm's, of which nobody said when it ends.
    #[serde(skip)]
    pub job: Option<String>,
    pub keep_at_exit: KeepAtExit,
    pub direct: bool,
    #[serde(default)]
    pub door: Way,
    /// Programs get the preload shim.
    pub preload: bool,
    /// Names of programs that do not.
    pub preload_skip: Vec<String>,
    /// Where the members of a group may ask for the status: of that to which the directory around it belongs.
    #[serde(default)]
    pub group_socket: Option<PathBuf>,
    /// Where metrics are served, if they are.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    #[serde(default)]
    pub metrics_token_file: TokenFile,
    /// The options of a later command that means the same, all but `--over`.
    #[serde(default)]
    pub again: Vec<OsString>,
}

/// What the command line says; everything as it was typed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    pub over: Option<PathBuf>,
    /// `surgetank.toml`, or a `sea.ini`.
    pub config: Option<PathBuf>,
    /// A path or a `file:` URL.
    pub store: Option<String>,
    /// `NAME=PATH[,PATH…][:SIZE]`
    pub tiers: Vec<String>,
    /// `GLOB=keep|copy|move|remove`
    pub rules: Vec<String>,
    pub state: Option<PathBuf>,
    pub ordered: Option<String>,
    pub verify: Option<String>,
    pub fsync: Option<String>,
    pub copy_up_bytes_max: Option<String>,
    pub dirty_bytes_max: Option<String>,
    pub drain_threads: Option<String>,
    pub drain_bytes_per_second_max: Option<String>,
    pub store_ttl: Option<String>,
    pub quiet: Option<String>,
    pub sync_after: Option<String>,
    pub retry: Option<String>,
    pub wait_for_room: Option<String>,
    pub grace: Option<String>,
    pub deadline: Option<String>,
    pub keep_at_exit: Option<String>,
    pub direct: Option<String>,
    pub door: Option<String>,
    pub preload: Option<String>,
    pub preload_skip: Option<String>,
    pub group_socket: Option<String>,
    pub metrics: Option<String>,
    pub metrics_token_file: Option<String>,
}

impl Overrides {
    fn scalars(&self) -> [(&'static str, &Option<String>); 23] {
        [
            ("store", &self.store),
            ("ordered", &self.ordered),
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
            draft.over = Some(key::Said { value: cwd.join(over), origin: origin("over") });
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
    /// Where the store is no directory.
    pub fn store_url(&self) -> Option<&str> {
        url_of(&self.store)
    }

    /// A store is said; the directory itself is not only the default.
    pub fn says_store(&self) -> bool {
        self.again.iter().any(|word| word == again::STORE)
    }

    /// The options that lead a command that only asks to this state; none where it is found without.
    pub fn state_options(state: &Path) -> Vec<OsString> {
        match Surroundings::of_this_process() {
            Ok(around) => again::state(state, &around),
            Err(_) => vec!["--state".into(), state.into()],
        }
    }

    /// Gathers everything that was said, for this process.
    pub fn load(overrides: &Overrides) -> Result<Loaded> {
        Self::load_in(overrides, &Surroundings::of_this_process()?)
    }

    /// The same for surroundings of the caller's choice.
    pub fn load_in(overrides: &Overrides, around: &Surroundings) -> Result<Loaded> {
        load::load(overrides, around)
    }

    /// Asks Slurm for the end of the job where nobody said it: before version 23.02 it tells jobs nothing of it.
    pub fn ask_when_the_job_ends(&mut self) {
        if let Some(job) = self.job.take() {
            self.deadline = slurm::end_of(&job);
        }
    }

    /// The state root alone, for those who only look for agents; it does not matter where they ask from.
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
