//! The users of the agent, and therefore whether it may leave.
//!
//! ```text
//!            last user left               drained, none inside
//! Serving ────────────────────► Leaving ─────────────────────────► Closed ──► unmounted, gone
//!    ▲      a user arrived         │ ▲         busy                   │
//!    └─────────────────────────────┘ └────────────────────────────────┘
//! ```
//! Users are runs and waiting clients; a mount that stays counts as one. Invariant: arriving and closing are decided
//! under one lock, so no run joins an agent that unmounts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use surgetank_core::report::{Holder, Phase, RunStatus};
use surgetank_types::clock;
use surgetank_types::model::RunId;

pub struct Users {
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    phase: Phase,
    /// `surgetank mount`: the agent stays as if a user were always there.
    stay: bool,
    /// It stayed before an explicit umount was asked for.
    stayed: bool,
    /// The agent has a stop signal (SIGTERM): it admits no new run.
    stopping: bool,
    runs: BTreeMap<RunId, RunStatus>,
    /// Those of `runs` that an earlier agent had and that have not joined again yet.
    expected: BTreeSet<RunId>,
    /// Runs whose command has ended: they wait for their drain.
    ended: BTreeSet<RunId>,
    waiters: usize,
    unmount: Unmount,
}

/// The progress of an explicit `surgetank umount`.
enum Unmount {
    NotAsked,
    Asked,
    Refused(Vec<Holder>),
    Detached,
    /// The client has its answer.
    Answered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Arrived,
    /// The number of users that remain.
    Left(usize),
    Drained,
    Busy,
}

/// The one place where the phase changes; `None` refuses the event.
fn next(phase: Phase, event: Event) -> Option<Phase> {
    match (phase, event) {
        (Phase::Serving | Phase::Leaving, Event::Arrived) => Some(Phase::Serving),
        (Phase::Serving, Event::Left(0)) => Some(Phase::Leaving),
        (phase, Event::Left(_)) => Some(phase),
        (Phase::Leaving, Event::Drained) => Some(Phase::Closed),
        (Phase::Closed, Event::Busy) => Some(Phase::Leaving),
        (Phase::Closed, Event::Arrived) | (_, Event::Drained | Event::Busy) => None,
    }
}

impl Inner {
    fn count(&self) -> usize {
        self.runs.len() + self.waiters + usize::from(self.stay)
    }
    fn step(&mut self, event: Event) -> bool {
        match next(self.phase, event) {
            Some(phase) => {
                self.phase = phase;
                true
            }
            None => false,
        }
    }
    /// After an umount that did not end it. (A stop signal holds.)
    fn stays_again(&mut self) {
        self.stay = self.stayed && !self.stopping;
        if self.stay {
            self.step(Event::Arrived);
        }
    }
    fn left(&mut self) {
        let remaining = self.count();
        self.step(Event::Left(remaining));
    }
}

impl Users {
    /// An agent begins as serving: its starter is about to join.
    pub fn new(stay: bool) -> Self {
        let inner = Inner {
            phase: Phase::Serving,
            stay,
            stayed: false,
            stopping: false,
            runs: BTreeMap::new(),
            expected: BTreeSet::new(),
            ended: BTreeSet::new(),
            waiters: 0,
            unmount: Unmount::NotAsked,
        };
        Self { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub fn runs(&self) -> Vec<RunStatus> {
        self.lock().runs.values().cloned().collect()
    }

    /// A run arrives; `welcome` is called before any other thread learns of it. False: the agent is leaving, or has a
    /// stop signal.
    pub fn join(&self, run: RunStatus, welcome: impl FnOnce()) -> bool {
        let mut inner = self.lock();
        // (A run that was here when an earlier agent got the signal is not new.)
        if inner.stopping && !inner.expected.contains(&run.run) || !inner.step(Event::Arrived) {
            return false;
        }
        inner.expected.remove(&run.run);
        inner.ended.remove(&run.run);
        inner.runs.insert(run.run, run);
        welcome();
        self.changed.notify_all();
        true
    }

    /// A run of an earlier agent, which will join again.
    pub fn expect(&self, run: RunStatus) {
        let mut inner = self.lock();
        inner.expected.insert(run.run);
        inner.runs.insert(run.run, run);
    }

    /// Removes the runs that did not join again; returns them.
    pub fn forget_expected(&self) -> Vec<RunId> {
        let gone: Vec<RunId> = std::mem::take(&mut self.lock().expected).into_iter().collect();
        for run in &gone {
            self.leave(*run);
        }
        self.starter_left();
        gone
    }

    /// A run ends; true when it was the last user.
    pub fn leave(&self, run: RunId) -> bool {
        let mut inner = self.lock();
        inner.runs.remove(&run);
        inner.ended.remove(&run);
        inner.left();
        self.changed.notify_all();
        inner.count() == 0
    }

    /// The command of a run has ended. `last` is called when no other command runs, before another run can join.
    pub fn command_ended(&self, run: RunId, last: impl FnOnce()) {
        let mut inner = self.lock();
        inner.ended.insert(run);
        if !inner.stay && inner.runs.keys().all(|run| inner.ended.contains(run)) {
            last();
        }
    }

    /// A client waits: the agent must not leave before the client has its answer. False: the agent has closed.
    pub fn begin_wait(&self) -> bool {
        let mut inner = self.lock();
        if inner.phase == Phase::Closed {
            return false;
        }
        // A waiter does not bring an agent back from leaving: it waits for the same drain.
        inner.waiters += 1;
        true
    }

    pub fn end_wait(&self) {
        let mut inner = self.lock();
        inner.waiters -= 1;
        inner.left();
        self.changed.notify_all();
    }

    /// The starter never arrived.
    pub fn starter_left(&self) {
        let mut inner = self.lock();
        inner.left();
        self.changed.notify_all();
    }

    /// `umount`, or the mount was lost: only users keep the agent now.
    pub fn stay_no_longer(&self) {
        let mut inner = self.lock();
        inner.stay = false;
        inner.left();
        self.changed.notify_all();
    }

    /// SIGTERM: as above, and the agent admits no new run.
    pub fn stop_admitting(&self) {
        self.lock().stopping = true;
        self.stay_no_longer();
    }

    /// `umount`, after the drain: asks the agent's main thread to detach. `false`: another umount is under way.
    pub fn ask_unmount(&self) -> bool {
        let mut inner = self.lock();
        if !matches!(inner.unmount, Unmount::NotAsked) {
            return false;
        }
        inner.unmount = Unmount::Asked;
        inner.stayed = std::mem::take(&mut inner.stay);
        inner.left();
        self.changed.notify_all();
        true
    }

    /// Waits for the result of [`Self::ask_unmount`]. `Err`: the processes that hold the mount. `None`: not yet.
    pub fn await_unmount(&self, at_most: Duration) -> Option<Result<(), Vec<Holder>>> {
        let until = clock::tick() + at_most;
        let mut inner = self.lock();
        loop {
            match std::mem::replace(&mut inner.unmount, Unmount::Asked) {
                Unmount::Refused(holders) => {
                    inner.unmount = Unmount::NotAsked;
                    return Some(Err(holders));
                }
                Unmount::Detached => {
                    inner.unmount = Unmount::Detached;
                    return Some(Ok(()));
                }
                other => inner.unmount = other,
            }
            let left = until.saturating_duration_since(clock::tick());
            if left.is_zero() {
                return None;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The mount stays after all. `false`: it is going, or its detaching was refused.
    pub fn withdraw_unmount(&self) -> bool {
        let mut inner = self.lock();
        let is_serving = matches!(inner.unmount, Unmount::Asked) && inner.phase != Phase::Closed;
        if is_serving {
            inner.unmount = Unmount::NotAsked;
            inner.stays_again();
            self.changed.notify_all();
        }
        is_serving
    }

    /// The answer to an explicit umount is written; the process may end.
    pub fn unmount_answered(&self) {
        self.lock().unmount = Unmount::Answered;
        self.changed.notify_all();
    }

    /// The mount is gone. Waits until the client of an explicit umount has its answer.
    pub fn detached(&self) {
        let mut inner = self.lock();
        if matches!(inner.unmount, Unmount::Asked) {
            inner.unmount = Unmount::Detached;
            self.changed.notify_all();
            while matches!(inner.unmount, Unmount::Detached) {
                inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Blocks while the agent serves.
    pub fn await_leaving(&self) {
        let mut inner = self.lock();
        while inner.phase == Phase::Serving {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Everything is drained: closes, unless a user arrived or still waits. True: closed.
    pub fn close(&self) -> bool {
        let mut inner = self.lock();
        if inner.waiters > 0 {
            // Their answers are being written; the waiters report when they have them.
            let (guard, _) =
                self.changed.wait_timeout(inner, Duration::from_millis(100)).unwrap_or_else(PoisonError::into_inner);
            inner = guard;
        }
        inner.waiters == 0 && inner.step(Event::Drained)
    }

    /// The unmount failed because of `holders`: serves again. After an explicit umount the mount stays.
    pub fn reopen(&self, holders: Vec<Holder>) {
        let mut inner = self.lock();
        inner.step(Event::Busy);
        if matches!(inner.unmount, Unmount::Asked) {
            inner.unmount = Unmount::Refused(holders);
            inner.stays_again();
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(number: u32) -> RunStatus {
        RunStatus { run: RunId(number), pid: 1, command: String::new(), since_unix_seconds: 0 }
    }

    fn joins(users: &Users, number: u32) -> bool {
        users.join(run(number), || ())
    }

    /// Regression: a run that still worked lost its files on the tiers when another run ended.
    #[test]
    fn tiers_are_emptied_only_when_the_last_run_ends() {
        let is_last = |users: &Users, run: u32| {
            let mut last = false;
            users.command_ended(RunId(run), || last = true);
            last
        };
        let users = Users::new(false);
        assert!(joins(&users, 1) && joins(&users, 2));
        assert!(!is_last(&users, 1));
        assert!(is_last(&users, 2));
        assert!(joins(&users, 3), "who comes while they wait for the store");
        assert!(!is_last(&users, 2));
        users.leave(RunId(3));
        assert!(is_last(&users, 2));
        let users = Users::new(true);
        assert!(joins(&users, 1));
        assert!(!is_last(&users, 1), "the mount stays");
    }

    #[test]
    fn closed_phase_is_left_only_when_busy() {
        for event in [Event::Arrived, Event::Drained] {
            assert_eq!(next(Phase::Closed, event), None);
        }
        assert_eq!(next(Phase::Closed, Event::Busy), Some(Phase::Leaving));
        assert_eq!(next(Phase::Serving, Event::Drained), None, "closing while somebody uses it");
    }

    #[test]
    fn agent_leaves_after_the_last_run_until_another_joins() {
        let users = Users::new(false);
        assert!(joins(&users, 1) && joins(&users, 2));
        assert!(!users.leave(RunId(1)));
        assert_eq!(users.phase(), Phase::Serving);
        assert!(users.leave(RunId(2)));
        assert_eq!(users.phase(), Phase::Leaving);
        assert!(joins(&users, 3));
        assert_eq!(users.phase(), Phase::Serving);
        assert!(!users.close(), "closed under a user");
    }

    #[test]
    fn closed_agent_admits_no_run() {
        let users = Users::new(false);
        users.starter_left();
        assert!(users.close());
        assert!(!joins(&users, 1));
        assert!(!users.begin_wait());
        users.reopen(Vec::new());
        assert!(joins(&users, 1));
    }

    #[test]
    fn mount_stays_until_stopped_and_then_admits_no_run() {
        let users = Users::new(true);
        users.starter_left();
        assert_eq!(users.phase(), Phase::Serving);
        users.stop_admitting();
        assert_eq!(users.phase(), Phase::Leaving);
        assert!(!joins(&users, 1));
    }

    /// Regression: an agent that was to stop refused a run that the agent before it had admitted.
    #[test]
    fn stopping_agent_admits_a_run_of_the_earlier_agent() {
        let users = Users::new(false);
        users.expect(run(1));
        users.stop_admitting();
        assert!(!joins(&users, 2));
        assert!(joins(&users, 1));
        assert!(!joins(&users, 1), "once");
    }

    #[test]
    fn waiting_verb_keeps_the_agent_open() {
        let users = Users::new(false);
        joins(&users, 1);
        assert!(users.begin_wait());
        users.leave(RunId(1));
        assert!(!users.close());
        users.end_wait();
        assert_eq!(users.phase(), Phase::Leaving);
        assert!(users.close());
    }

    #[test]
    fn refused_umount_names_the_holders_and_keeps_the_mount() {
        let users = Users::new(true);
        let answer = std::thread::scope(|scope| {
            assert!(users.ask_unmount());
            assert!(users.await_unmount(Duration::ZERO).is_none());
            let asker = scope.spawn(|| users.await_unmount(Duration::from_secs(60)).unwrap());
            users.await_leaving();
            assert!(users.close());
            users.reopen(vec![Holder { pid: 7, command: "sh".into(), holds: "cwd".into() }]);
            asker.join().unwrap()
        });
        assert_eq!(answer.unwrap_err()[0].pid, 7);
        assert_eq!(users.phase(), Phase::Serving);
    }

    #[test]
    fn umount_that_was_withdrawn_keeps_the_mount() {
        let users = Users::new(true);
        assert!(users.ask_unmount());
        assert_eq!(users.phase(), Phase::Leaving);
        assert!(users.withdraw_unmount());
        assert_eq!(users.phase(), Phase::Serving);
        assert!(users.ask_unmount() && users.close());
        assert!(!users.withdraw_unmount(), "it goes");
    }
}
