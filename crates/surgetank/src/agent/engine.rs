//! The seam between the agent's process and what serves the directory: namespace, tiers, drain and mount.
//!
//! The agent calls [`Backend::start`] once, [`Mounted::detach`] at the end, and the [`Engine`] whenever somebody asks:
//! from any thread, several at once.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use surgetank_core::bequest::Bequest;
use surgetank_core::report::{
    Audit, Figures, HintOf, Listing, Lost, Prefetch, Progress, RefusedHint, Scope, Status, Summary, Trouble, Verdict,
    Visibility, Why,
};
use surgetank_policy::config::Config;
use surgetank_types::error::Result;
use surgetank_types::model::RunId;

use super::keep::Channel;
use super::wire::Account;

/// What serves one directory. Paths are relative to it.
pub trait Engine: Send + Sync {
    fn status(&self) -> Status;
    /// Writers for whom no tier and not the store has room.
    fn waiting_for_room(&self) -> Vec<Trouble> {
        Vec::new()
    }
    fn why(&self, path: &[u8]) -> Result<Why>;
    fn progress(&self, scope: &Scope) -> Progress;
    /// Blocks until the scope is settled or `at_most` has passed. This is how the end of a drain is noticed without polling.
    fn await_settled(&self, scope: &Scope, at_most: Duration) -> Progress;
    /// Everything in the scope is due now: no quiet period, `Timing::Last` included. Starts the count of what is done.
    fn begin_final_drain(&self, scope: &Scope);
    /// Nobody waits for it any more: what is written from now on has its quiet period again. (For a scope without a run.)
    fn end_final_drain(&self, _scope: &Scope) {}
    /// The job ends: everything is due, and nothing new is begun where it may be wiped.
    fn job_ends(&self) {
        self.begin_final_drain(&Scope::everything());
    }
    /// Every command has ended. Tiers may be given back while the rest is drained; temporaries once `nobody_inside` says that no
    /// process of theirs is left (`None`: that cannot be known).
    fn nobody_works(&self, _nobody_inside: Option<Box<dyn Fn() -> bool + Send>>) {}
    /// A run has come.
    fn somebody_came(&self) {}
    /// What is not durable in the scope, and why. Open files that were written count as not durable.
    fn verdict(&self, scope: &Scope) -> Verdict;
    fn summary(&self, run: Option<RunId>) -> Summary;
    /// For the metrics. Never waits for the store.
    fn figures(&self) -> Figures;
    /// Frees the tier copies of a durable file, or of all below a directory; returns the bytes freed.
    fn evict(&self, path: &[u8]) -> Result<u64>;
    fn pin(&self, path: &[u8], on: bool) -> Result<()>;
    /// Takes what a workflow says of its files, whether they are there or not; returns what was refused.
    fn hint(&self, hints: &[HintOf]) -> Listing<RefusedHint>;
    /// What others changed in the store is seen from now on.
    fn refresh(&self);
    /// Brings in what these paths or globs name.
    fn prefetch(&self, patterns: &[Vec<u8>]) -> Result<Prefetch>;
    /// Reads what lies both on a tier and in the store and compares it with its checksum.
    fn scrub(&self, repair: bool) -> Audit;
    /// Files on tiers that are not there count as lost. When no program is served.
    fn give_up_absent(&self) {}
    /// The user knows of what is lost; returns what is not reported any more.
    fn forget_losses(&self) -> Listing<Lost>;
    /// What `pid` and its descendants write from now on is this run's.
    fn register_run(&self, pid: u32) -> RunId;
    /// Answers why the record of the run is not written, where it is not.
    fn release_run(&self, run: RunId) -> Option<String>;
    /// It is recorded from here on. `again`: an earlier agent had it.
    fn record_run(&self, _run: RunId, _pid: u32, _command: &str, _again: bool) {}
    /// Every open and request of it is for the record.
    fn trace_run(&self, run: RunId) -> Result<()>;
    /// How it ended.
    fn account(&self, _run: RunId, _account: &Account) {}
    /// A run that an earlier agent had.
    fn restore_run(&self, run: RunId, pid: u32);
    /// Stops the drain and syncs the catalog. Called once, after the mount is gone.
    fn shutdown(&self);
}

/// What the agent hands to the backend at start.
pub struct Opening {
    pub config: Config,
    /// Root of the store, opened before anything is mounted over it; the bare directory unless the store is elsewhere, and
    /// nothing where it is no directory.
    pub store: Option<OwnedFd>,
    /// The served directory itself, where the store is elsewhere.
    pub bare: Option<OwnedFd>,
    /// Ours alone, for catalog and journal.
    pub state: PathBuf,
    /// Names what this agent puts elsewhere.
    pub key: String,
    pub visibility: Visibility,
    /// Without a mount: programs' calls are put before us.
    pub by_calls: bool,
    /// What survives this agent, and what another one left.
    pub survival: Option<Afterlife>,
    /// To be called when the mount stops being served without [`Mounted::detach`] (somebody else unmounted it).
    pub on_lost: Box<dyn Fn() + Send + Sync>,
}

/// A mount that is being served.
pub trait Mounted: Send {
    /// Unmounts, never lazily, and waits for the serving threads. `EBUSY` leaves everything as it was.
    fn detach(&mut self) -> io::Result<()>;
}

/// Where programs with the preload shim find its door.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ShimPlace {
    pub index: surgetank_core::report::PathText,
    pub socket: surgetank_core::report::PathText,
}

pub struct Running {
    pub engine: Arc<dyn Engine>,
    pub mount: Box<dyn Mounted>,
    /// The second door, where it is open.
    pub shim: Option<ShimPlace>,
    /// Without a mount.
    pub listeners: Option<Listeners>,
    /// Another agent can go on should this one die.
    pub survives: bool,
}

/// An agent's relation to those before and after it.
pub struct Afterlife {
    pub bequest: Arc<Bequest>,
    pub channel: Arc<Channel>,
    /// Descriptors that were kept for an earlier agent, by their names.
    pub kept: BTreeMap<String, OwnedFd>,
    /// How many agents there were before.
    pub life: u32,
}

/// Where there is no mount: how runs' calls come to us.
#[derive(Debug, Clone)]
pub struct Listeners {
    /// Runs bring the listeners of their filters there.
    pub socket: PathBuf,
    /// Filters under which somebody lives.
    pub living: Arc<std::sync::atomic::AtomicUsize>,
}

impl Listeners {
    pub fn nobody_lives(&self) -> bool {
        self.living.load(std::sync::atomic::Ordering::Acquire) == 0
    }
}

pub trait Backend: Send + Sync {
    /// Opens catalog and tiers, mounts over `config.over`, and serves from its own threads. The process is in its
    /// private namespace already and has no rights that it should not have.
    fn start(&self, opening: Opening) -> Result<Running>;
    /// Takes up what an agent left, with no door for programs.
    fn offline(&self, opening: Opening) -> Result<Arc<dyn Engine>>;
    /// Looks at what an agent left, and changes nothing. `scrub`: reads every byte, too.
    fn audit(&self, opening: Opening, scrub: bool) -> Result<Audit>;
}
