//! Which run a process belongs to, and which runs are ending.

use foldhash::HashSet;

use surgetank_policy::config::Timing;
use surgetank_policy::rule::Decision;
use surgetank_types::model::{Caller, RunId};
use surgetank_types::sync::atomic::{AtomicU32, Ordering};
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::base::end::End;

/// The run to which a process belongs. The agent knows it.
pub type RunOf = Box<dyn Fn(u32) -> RunId + Send + Sync>;
/// The run that a process claims to belong to, if such a run exists.
pub type RunKnown = Box<dyn Fn(RunId) -> RunId + Send + Sync>;

/// The runs, as far as the core knows them. The agent knows the rest.
pub struct Runs {
    end: Arc<End>,
    run_of: OnceLock<RunOf>,
    run_known: OnceLock<RunKnown>,
    /// Number of callers that wait for the whole queue.
    pub(crate) final_drains: AtomicU32,
    /// Runs whose command has ended. The drain starts at once with what they still queue.
    pub(crate) ending: Mutex<HashSet<RunId>>,
}

impl Runs {
    pub(crate) fn new(end: Arc<End>) -> Self {
        Self {
            end,
            run_of: OnceLock::new(),
            run_known: OnceLock::new(),
            final_drains: AtomicU32::new(0),
            ending: Mutex::default(),
        }
    }

    pub(crate) fn is_ending(&self, run: RunId) -> bool {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).contains(&run)
            || self.final_drains.load(surgetank_types::sync::atomic::Ordering::Relaxed) > 0
    }

    pub fn set_run_of(&self, run_of: RunOf) {
        drop(self.run_of.set(run_of));
    }

    pub fn set_run_known(&self, run_known: RunKnown) {
        drop(self.run_known.set(run_known));
    }

    pub(crate) fn run(&self, caller: &Caller) -> RunId {
        self.run_of.get().map_or(RunId(0), |run_of| run_of(caller.pid))
    }

    pub(crate) fn run_claimed(&self, run: RunId) -> RunId {
        self.run_known.get().map_or(RunId(0), |known| known(run))
    }

    /// Does the file wait for the end of its run?
    pub(crate) fn is_last(&self, decision: &Decision) -> bool {
        decision.timing == Timing::Last && self.final_drains.load(Ordering::Relaxed) == 0 && !self.end.is_hurried()
    }
}
