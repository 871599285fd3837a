//! The configuration's command-line options, shared by every verb that needs a configuration.

use std::path::PathBuf;

use clap::Args;
use surgetank_policy::config::Overrides;

/// Each overwrites the environment (`SURGETANK_…`) and `surgetank.toml`; `surgetank help configuration` explains them all.
#[derive(Debug, Clone, Default, Args)]
pub struct Settings {
    /// Directory to serve [default: the current directory]
    #[arg(long, value_name = "DIR")]
    pub over: Option<PathBuf>,
    /// The store: a path or the URL of a server; see `surgetank help stores` [default: the directory itself, underneath the mount]
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// A tier and its devices, fastest tier first; may be given several times [default: found]
    #[arg(long = "tier", value_name = "NAME=PATH[,PATH…][:SIZE]")]
    pub tiers: Vec<String>,
    /// surgetank.toml or Sea's sea.ini [default: the one in the directory]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Mode of files that match; may be given several times
    #[arg(long = "rule", value_name = "GLOB=keep|copy|move|remove")]
    pub rules: Vec<String>,
    /// Directory of journals and sockets [default: /var/tmp/surgetank-UID]
    #[arg(long, value_name = "DIR", help_heading = "Tuning")]
    pub state: Option<PathBuf>,
    /// Let files reach the store in any order
    #[arg(long, conflicts_with = "ordered", help_heading = "Tuning")]
    pub unordered: bool,
    /// Whether files reach the store in the order in which they were closed: true or false
    #[arg(long, value_name = "BOOL", help_heading = "Tuning")]
    pub ordered: Option<String>,
    /// Whether that order holds over all members of a pool, not for each one: true or false
    #[arg(long, value_name = "BOOL", help_heading = "Tuning")]
    pub pool_ordered: Option<String>,
    /// On how many members of a pool a closed file is until the store has it: 1 to 16 [default: 1]
    #[arg(long, value_name = "N", help_heading = "Tuning")]
    pub replicas: Option<String>,
    /// Whether close waits for these copies: later (no) or close [default: later]
    #[arg(long, value_name = "WHEN", help_heading = "Tuning")]
    pub replicas_at: Option<String>,
    /// How copies in the store are checked: cache or reread
    #[arg(long, value_name = "HOW", help_heading = "Tuning")]
    pub verify: Option<String>,
    /// What fsync waits for: auto, tier or store
    #[arg(long, value_name = "WHERE", help_heading = "Tuning")]
    pub fsync: Option<String>,
    /// Files of the store up to this size are copied to a tier when opened for writing
    #[arg(long, value_name = "SIZE", help_heading = "Tuning")]
    pub copy_up_bytes_max: Option<String>,
    /// Undrained bytes allowed in memory
    #[arg(long, value_name = "SIZE", help_heading = "Tuning")]
    pub dirty_bytes_max: Option<String>,
    /// Files copied to the store at a time
    #[arg(long, value_name = "N", help_heading = "Tuning")]
    pub drain_threads: Option<String>,
    /// Limit of the drain's speed; 0: none
    #[arg(long, value_name = "SIZE", help_heading = "Tuning")]
    pub drain_bytes_per_second_max: Option<String>,
    /// How long cached metadata of the store is valid
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub store_ttl: Option<String>,
    /// How long a closed file waits before it is drained
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub quiet_period: Option<String>,
    /// How long a closed file may wait until it is synced on its tier
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub sync_after: Option<String>,
    /// How long a failing store is tried again
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub retry: Option<String>,
    /// How long a writer waits when no tier and not the store has room for it
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub wait_for_room: Option<String>,
    /// How long background children may outlive the command
    #[arg(long, value_name = "TIME", help_heading = "Tuning")]
    pub grace: Option<String>,
    /// Where members of a group may ask for the status: the group of the directory it is in
    #[arg(long, value_name = "PATH")]
    pub group_socket: Option<String>,
    /// Serve metrics for Prometheus there, while the agent lives: a port of 127.0.0.1, or IP:PORT
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<String>,
    /// The token that a reader of the metrics has to present, or none [default: one is made in the state directory]
    #[arg(long, value_name = "FILE", help_heading = "Tuning")]
    pub metrics_token_file: Option<String>,
    /// When the job ends: 2h30m from now, a point in time, or none [default: SLURM_JOB_END_TIME]
    #[arg(long, value_name = "WHEN")]
    pub deadline: Option<String>,
    /// What happens to files of mode keep at the end: leave, drain or drop
    #[arg(long, value_name = "WHAT", help_heading = "Tuning")]
    pub keep_at_exit: Option<String>,
    /// Whether programs may get direct descriptors of tier files: true or false
    #[arg(long, value_name = "BOOL", help_heading = "Tuning")]
    pub direct: Option<String>,
    /// How programs reach the directory: auto, fuse (a mount) or seccomp (system calls are answered by the agent)
    #[arg(long, value_name = "DOOR")]
    pub door: Option<String>,
    /// Do not preload the shim: all programs use the mount
    #[arg(long, conflicts_with = "preload")]
    pub no_preload: bool,
    /// Whether programs get the preload shim, which avoids the kernel's FUSE: true or false
    #[arg(long, value_name = "BOOL", help_heading = "Tuning")]
    pub preload: Option<String>,
    /// Programs that do not get the shim, by name
    #[arg(long, value_name = "NAME[,NAME…]", help_heading = "Tuning")]
    pub preload_skip: Option<String>,
}

impl Settings {
    /// For verbs that only need to find an agent.
    pub fn of_state(state: Option<&PathBuf>) -> Self {
        Self { state: state.cloned(), ..Self::default() }
    }

    /// Options that take effect only when an agent starts; a message names them if one runs already.
    pub fn given_at_start(&self) -> Vec<&'static str> {
        let given = [
            ("--tier", !self.tiers.is_empty()),
            ("--rule", !self.rules.is_empty()),
            ("--config", self.config.is_some()),
            ("--deadline", self.deadline.is_some()),
            ("--keep-at-exit", self.keep_at_exit.is_some()),
            ("--unordered", self.unordered),
            ("--ordered", self.ordered.is_some()),
            ("--pool-ordered", self.pool_ordered.is_some()),
            ("--replicas", self.replicas.is_some()),
            ("--replicas-at", self.replicas_at.is_some()),
            ("--verify", self.verify.is_some()),
            ("--fsync", self.fsync.is_some()),
            ("--direct", self.direct.is_some()),
            ("--door", self.door.is_some()),
            ("--group-socket", self.group_socket.is_some()),
            ("--metrics", self.metrics.is_some()),
            ("--metrics-token-file", self.metrics_token_file.is_some()),
            ("--quiet-period", self.quiet_period.is_some()),
            ("--sync-after", self.sync_after.is_some()),
            ("--copy-up-bytes-max", self.copy_up_bytes_max.is_some()),
            ("--dirty-bytes-max", self.dirty_bytes_max.is_some()),
            ("--drain-threads", self.drain_threads.is_some()),
            ("--drain-bytes-per-second-max", self.drain_bytes_per_second_max.is_some()),
        ];
        given.into_iter().filter_map(|(name, given)| given.then_some(name)).collect()
    }

    /// The settings as the command line's part of the configuration.
    pub fn overrides(self) -> Overrides {
        Overrides {
            over: self.over,
            config: self.config,
            store: self.store,
            tiers: self.tiers,
            rules: self.rules,
            state: self.state,
            ordered: if self.unordered { Some("false".to_owned()) } else { self.ordered },
            pool_ordered: self.pool_ordered,
            replicas: self.replicas,
            replicas_at: self.replicas_at,
            verify: self.verify,
            fsync: self.fsync,
            copy_up_bytes_max: self.copy_up_bytes_max,
            dirty_bytes_max: self.dirty_bytes_max,
            drain_threads: self.drain_threads,
            drain_bytes_per_second_max: self.drain_bytes_per_second_max,
            store_ttl: self.store_ttl,
            quiet: self.quiet_period,
            sync_after: self.sync_after,
            retry: self.retry,
            wait_for_room: self.wait_for_room,
            grace: self.grace,
            deadline: self.deadline,
            keep_at_exit: self.keep_at_exit,
            direct: self.direct,
            door: self.door,
            preload: if self.no_preload { Some("false".to_owned()) } else { self.preload },
            preload_skip: self.preload_skip,
            group_socket: self.group_socket,
            metrics: self.metrics,
            metrics_token_file: self.metrics_token_file,
        }
    }
}
