//! The interface between the agent's process and the parts that serve the directory: namespace, tiers, drain and mount.
//!
//! The agent calls [`Backend::start`] once and [`Mounted::detach`] at the end. It calls the [`Engine`] for each request
//! of a client: from any thread, several at once.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use surgetank_core::handoff::Handoff;
use surgetank_core::report::{
    Audit, CopyOn, Figures, HintOf, Listing, Located, Lost, PathText, PoolMembers, Prefetch, Progress, RefusedHint,
    Same, Scope, Status, Summary, Trouble, Verdict, Visibility, Why,
};
use surgetank_policy::config::Config;
use surgetank_types::error::Result;
use surgetank_types::model::RunId;

use super::keep::Channel;
use super::wire::{Account, Answer, Request};
use crate::pool::status::PoolStatus;

/// Serves one directory. Paths are relative to it.
pub trait Engine: Send + Sync {
    /// The engine's part of `surgetank status`.
    fn status(&self) -> Status;
    /// Writers for which neither a tier nor the store has room.
    fn waiting_for_room(&self) -> Vec<Trouble> {
        Vec::new()
    }
    /// Where a file is, its state and the rule for it. An error: the path cannot be resolved.
    fn why(&self, path: &[u8]) -> Result<Why>;
    /// Where the contents of these files are, as far as this agent decides: in the order of the paths. An error: in words.
    fn locate(&self, paths: &[PathText]) -> Vec<std::result::Result<Located, String>>;
    /// For another member of a pool: the copies here of its files by their numbers, and then of those of the store.
    fn copies(&self, numbers: &[u64], files: &[Same]) -> Vec<Option<CopyOn>>;
    /// The state of the scope's drain now.
    fn progress(&self, scope: &Scope) -> Progress;
    /// Blocks until the scope is settled or `at_most` has passed: callers notice the end of a drain without polling.
    fn await_settled(&self, scope: &Scope, at_most: Duration) -> Progress;
    /// As [`Self::await_settled`], also for what programs of this node changed at other members of a pool.
    fn await_settled_everywhere(&self, scope: &Scope, at_most: Duration) -> Progress {
        self.await_settled(scope, at_most)
    }
    /// As [`Self::verdict`], also for what programs of this node changed at other members of a pool.
    fn verdict_everywhere(&self, scope: &Scope) -> Verdict {
        self.verdict(scope)
    }
    /// Makes everything in the scope due: no quiet period, `Timing::Last` included. Starts the progress count.
    fn begin_final_drain(&self, scope: &Scope);
    /// No client waits for the scope any more: later writes have their quiet period again. (For a scope without a run.)
    fn end_final_drain(&self, _scope: &Scope) {}
    /// The job ends: everything is due, and nothing new begins where the job's end may wipe it.
    fn job_ends(&self) {
        self.begin_final_drain(&Scope::everything());
    }
    /// Every command has ended. The engine may free tier copies while the drain continues. It may remove temporaries
    /// once `is_deserted` says that no process of theirs is left (`None`: unknown).
    fn all_commands_ended(&self, _is_empty_inside: Option<Box<dyn Fn() -> bool + Send>>) {}
    /// Leaves the pool, once no other member needs this one. `close` with `true`: says whether the last user is gone, and
    /// then admits none; with `false`: admits users again. Returns whether the agent is a member no more and closed (`false`
    /// after a moment); `None`: it belonged to no pool, and is not closed.
    fn leave_pool(&self, _close: &dyn Fn(bool) -> bool) -> Option<bool> {
        None
    }
    /// The pool, as this member sees it; `None`: the agent belongs to none.
    fn pool_status(&self) -> Option<Result<PoolStatus>> {
        None
    }
    /// All members of the pool, as they answer within 2 s; `None`: the agent belongs to none.
    fn pool_members(&self) -> Option<PoolMembers> {
        None
    }
    /// The answer to a request about files, if other members of a pool have a part in it.
    fn answered_with_others(&self, _request: &Request) -> Option<Answer> {
        None
    }
    /// A run has joined.
    fn user_joined(&self) {}
    /// Files and operations in the scope that are not durable, and why. An open file that was written counts as not
    /// durable.
    fn verdict(&self, scope: &Scope) -> Verdict;
    /// The counters of tiers, drain and mount. `run` selects whose final drain and files without room are reported; `None`:
    /// all runs.
    fn summary(&self, run: Option<RunId>) -> Summary;
    /// Figures for the metrics. Never waits for the store.
    fn figures(&self) -> Figures;
    /// Frees the tier copies of a durable file, or of all below a directory; returns the bytes freed.
    fn evict(&self, path: &[u8]) -> Result<u64>;
    /// Keeps a file, or all below a directory, in its tier; `on` false removes the pin. An error: the path, or a directory
    /// below it, cannot be read.
    fn pin(&self, path: &[u8], on: bool) -> Result<()>;
    /// Takes a workflow's hints, whether the files exist or not; returns the refused ones.
    fn hint(&self, hints: &[HintOf]) -> Listing<RefusedHint>;
    /// Makes changes by other clients of the store visible.
    fn refresh(&self);
    /// Prefetches the files that these paths or globs name.
    fn prefetch(&self, patterns: &[Vec<u8>]) -> Result<Prefetch>;
    /// Reads every copy that is both on a tier and in the store, and compares it with its checksum.
    fn scrub(&self, repair: bool) -> Audit;
    /// Counts files on absent tiers as lost. Only while the engine serves no program.
    fn give_up_absent(&self) {}
    /// The user acknowledges the losses; returns those that are not reported any more.
    fn forget_losses(&self) -> Listing<Lost>;
    /// Files that `pid` and its descendants write from now on belong to this run.
    fn register_run(&self, pid: u32) -> RunId;
    /// Returns the reason when the run's record is not written.
    fn release_run(&self, run: RunId) -> Option<String>;
    /// Records the run from here on. `again`: an earlier agent had the run.
    fn record_run(&self, _run: RunId, _pid: u32, _command: &str, _again: bool) {}
    /// Adds every open and request of the run to its record.
    fn trace_run(&self, run: RunId) -> Result<()>;
    /// How the run ended.
    fn account(&self, _run: RunId, _account: &Account) {}
    /// Restores a run that an earlier agent had.
    fn restore_run(&self, run: RunId, pid: u32);
    /// Stops the drain and syncs the catalog. Called once, after the unmount.
    fn shutdown(&self);
}

/// The agent's arguments to the backend at start.
pub struct Opening {
    /// The resolved configuration.
    pub config: Config,
    /// Root of the store, opened before any mount covers it: the bare directory, unless the store is elsewhere. `None`:
    /// the store is not a directory.
    pub store: Option<OwnedFd>,
    /// The served directory itself, if the store is elsewhere.
    pub bare: Option<OwnedFd>,
    /// The directory for catalog and journal, of this agent alone.
    pub state: PathBuf,
    /// Names what this agent stores outside the place: tier directories and temporaries.
    pub key: String,
    /// The programs that will see the mount.
    pub visibility: Visibility,
    /// No mount: the agent receives programs' system calls.
    pub by_calls: bool,
    /// State that survives this agent, and state from an earlier agent.
    pub survival: Option<Afterlife>,
    /// Called when the mount ends without [`Mounted::detach`] (another process unmounted it).
    pub on_lost: Box<dyn Fn() + Send + Sync>,
}

/// A mount that is being served.
pub trait Mounted: Send {
    /// Unmounts, never lazily, and waits for the serving threads. `EBUSY` leaves everything as it was.
    fn detach(&mut self) -> io::Result<()>;
}

/// Where programs with the preload shim find its socket and index.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShimPlace {
    /// The index in shared memory.
    pub index: surgetank_core::report::PathText,
    /// The socket for requests.
    pub socket: surgetank_core::report::PathText,
}

/// A directory that is being served.
pub struct Running {
    /// The answers to clients' requests.
    pub engine: Arc<dyn Engine>,
    /// The mount, or its substitute without a mount.
    pub mount: Box<dyn Mounted>,
    /// The shim's door, if it is open.
    pub shim: Option<ShimPlace>,
    /// The listeners, if there is no mount.
    pub listeners: Option<Listeners>,
    /// Another agent can continue if this one dies.
    pub survives: bool,
}

/// Connects an agent with the agents before and after it.
pub struct Afterlife {
    /// The state for the next agent.
    pub handoff: Arc<Handoff>,
    /// The way to the supervisor.
    pub channel: Arc<Channel>,
    /// Descriptors that the supervisor kept for an earlier agent, by name.
    pub kept: BTreeMap<String, OwnedFd>,
    /// The number of agents before this one.
    pub life: u32,
}

/// Without a mount: how the calls of runs reach the agent.
#[derive(Debug, Clone)]
pub struct Listeners {
    /// Runs send the listeners of their filters to this socket.
    pub socket: PathBuf,
    /// The number of filters under which a process lives.
    pub living: Arc<std::sync::atomic::AtomicUsize>,
}

impl Listeners {
    /// Whether no process lives under a filter.
    pub fn is_empty(&self) -> bool {
        self.living.load(std::sync::atomic::Ordering::Acquire) == 0
    }
}

/// The program's way to serve a directory: the real one, or one of the tests.
pub trait Backend: Send + Sync {
    /// Opens catalog and tiers, mounts over `config.over`, and serves from its own threads. The process is in its
    /// private namespace already and has dropped the capabilities that it must not have.
    fn start(&self, opening: Opening) -> Result<Running>;
    /// Takes up what an agent left, without a door for programs.
    fn offline(&self, opening: Opening) -> Result<Arc<dyn Engine>>;
    /// Inspects what an agent left and changes nothing. `scrub`: also reads every byte.
    fn audit(&self, opening: Opening, scrub: bool) -> Result<Audit>;
}
