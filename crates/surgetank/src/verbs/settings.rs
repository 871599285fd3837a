//! The options that shape an agent, as typed; reading them is the business of `surgetank_core::config`.

use std::path::PathBuf;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Settings {
    /// The directory to serve [default: the current one]
    #[arg(long, value_name = "DIR")]
    pub over: Option<PathBuf>,
    /// Where everything ends up [default: the directory itself, underneath the mount]
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// A fast tier, fastest first: name, one directory a device, cap [default: found]
    #[arg(long = "tier", value_name = "NAME=PATH[,PATH…][:SIZE]")]
    pub tiers: Vec<String>,
    /// Configuration file [default: surgetank.toml in the directory]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What happens to files: keep, copy, move or remove
    #[arg(long = "rule", value_name = "GLOB=MODE")]
    pub rules: Vec<String>,
    /// What becomes of `keep` files at the end: leave, drain or drop
    #[arg(long, value_name = "WHAT")]
    pub keep_at_exit: Option<String>,
    /// Publish files as they come, not in the order in which they were closed
    #[arg(long)]
    pub unordered: bool,
    /// How copies are checked: cache or reread
    #[arg(long, value_name = "HOW")]
    pub verify: Option<String>,
    /// What fsync waits for: tier or store
    #[arg(long, value_name = "TARGET")]
    pub fsync: Option<String>,
    /// Root of sockets, logs and catalogs; never below the directory
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// How long background children may outlive the command
    #[arg(skip)]
    pub grace: Option<String>,
}

impl Settings {
    /// For verbs that only look for an agent.
    pub fn of_state(state: Option<&PathBuf>) -> Self {
        Self {
            state: state.cloned(),
            ..Self::default()
        }
    }

    /// Options that an agent takes at its start only; named when an agent runs already.
    pub fn given_at_start(&self) -> Vec<&'static str> {
        let given = [
            ("--tier", !self.tiers.is_empty()),
            ("--rule", !self.rules.is_empty()),
            ("--config", self.config.is_some()),
            ("--keep-at-exit", self.keep_at_exit.is_some()),
            ("--unordered", self.unordered),
            ("--verify", self.verify.is_some()),
            ("--fsync", self.fsync.is_some()),
        ];
        given
            .into_iter()
            .filter_map(|(name, given)| given.then_some(name))
            .collect()
    }
}
