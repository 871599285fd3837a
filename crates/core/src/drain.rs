//! The drain: it carries out the queue that turns what the store has into what programs see.
//!
//! Staging (copy to a temporary, sync, compare) runs in parallel. One thread publishes (rename into place, link,
//! rename, delete), in the order of the queue unless the user gave up that order.
//!
//! Invariants:
//! - A copy counts only if the file did not change during the copy.
//! - The drain retries an operation that fails, with back-off; in ordered mode all operations behind it wait.
//!
//! The danger that it avoids: another client sees a later file before an earlier one.

mod again;
mod execute;
mod failed;
mod meter;
mod overwrite;
mod pause;
mod publish;
mod spilled;
mod stage;
mod throttle;
mod turns;

use crate::base::users::own_cred;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use surgetank_types::sync::thread::JoinHandle;
use surgetank_types::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

use crate::namespace::{Namespace, Queued};
use crate::report::Scope;
pub use meter::Meter;
use pause::{May, Pause};
use surgetank_state::{BATCH_OPS_MAX, Copied, Limits, Name};
use surgetank_types::clock;
use surgetank_types::model::{FileId, Seq};
use throttle::Throttle;

/// A ready operation waits at most this long for others to join its batch.
const BATCH_WAIT: Duration = Duration::from_millis(5);
/// After this long in one call the drain asks the store for something that needs no time.
const HANGS: Duration = Duration::from_secs(2);
/// The drain reports a call that takes this long, whatever else the store does.
const SLOW: Duration = Duration::from_secs(15);
/// The end of the drain waits this long for a thread that hangs in the store.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
const POLL_PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub struct DrainCounters {
    pub files: AtomicU64,
    pub bytes: AtomicU64,
    /// Copied bytes, with repeated copies and with files whose copy is not complete yet.
    pub staged_bytes: AtomicU64,
    pub operations: AtomicU64,
    pub failures: AtomicU64,
    /// Copies that differed from their files; the drain discarded them and copied again.
    pub corrupt: AtomicU64,
    pub conflicts: AtomicU64,
}

pub struct Drain {
    pub(crate) namespace: Arc<Namespace>,
    jobs: Mutex<VecDeque<Seq>>,
    job_came: Condvar,
    stop: AtomicBool,
    pub(crate) throttle: Throttle,
    /// Held while the drain stages something by its path, and for writing while a directory of the store moves.
    /// Otherwise a copy could end up in the directory that takes the other's place.
    pub(crate) staging: RwLock<()>,
    /// The staged copies of the operations in progress.
    staged: Mutex<HashMap<Seq, Copied>>,
    /// How many bytes of each file in staging are copied.
    copying: Mutex<HashMap<Seq, u64>>,
    pub counters: DrainCounters,
    /// The rate of copies.
    pub meter: Meter,
    pause: Pause,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

enum Next {
    Publish(Vec<Seq>),
    Wait(Duration),
    Sleep,
}

impl Drain {
    pub fn start(namespace: Arc<Namespace>) -> std::io::Result<Arc<Self>> {
        let drain = Arc::new(Self {
            jobs: Mutex::default(),
            job_came: Condvar::new(),
            stop: AtomicBool::new(false),
            throttle: Throttle::new(namespace.base.config.drain_bytes_per_second_max),
            staging: RwLock::new(()),
            staged: Mutex::default(),
            copying: Mutex::default(),
            counters: DrainCounters::default(),
            meter: Meter::default(),
            pause: Pause::default(),
            threads: Mutex::default(),
            namespace,
        });
        let mut threads = Vec::new();
        let spawn = |name: &str, run: fn(&Self)| {
            let drain = drain.clone();
            surgetank_types::sync::thread::Builder::new()
                .name(name.to_owned())
                .stack_size(512 << 10)
                .spawn(move || run(&drain))
        };
        threads.push(spawn("drain", Self::publish_loop)?);
        threads.push(spawn("tender", Self::tend_loop)?);
        threads.push(spawn("sync", Self::sync_loop)?);
        if drain.namespace.base.tiers.devices().any(surgetank_tier::Device::in_memory) {
            threads.push(spawn("memory", Self::memory_loop)?);
        }
        for _ in 0..drain.namespace.base.config.drain_threads.max(1) {
            threads.push(spawn("stage", Self::stage_loop)?);
        }
        *drain.threads.lock().unwrap_or_else(PoisonError::into_inner) = threads;
        Ok(drain)
    }

    /// Stops after the operations in progress; the queue stays as it is.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.jobs.lock());
        self.job_came.notify_all();
        self.namespace.metadata.wake();
        self.namespace.base.deferred.end_deferred();
        self.namespace.files.syncs.end_unsynced();
        self.namespace.files.memory_pressure.end_memory_pressure();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            while !surgetank_types::sync::is_finished(&thread)
                && self.hangs_for().is_none_or(|time| time < STOP_PATIENCE)
            {
                surgetank_types::sync::thread::sleep(Duration::from_millis(1));
            }
            if !surgetank_types::sync::is_finished(&thread) {
                tracing::warn!("a thread of the drain hangs in the store and is left behind");
                continue;
            }
            if thread.join().is_err() {
                tracing::error!("a thread of the drain panicked");
            }
        }
        // A copy that was just cut off leaves a temporary.
        self.discard();
        self.take_back_jobs();
        self.discard();
        self.namespace.files.temporaries.discard_late_at_the_end();
        if self.namespace.metadata.read_tree().ops.is_empty()
            && let Err(why) = self.namespace.base.store.collect()
        {
            tracing::warn!(%why, "what was begun in the store and is not wanted any more is left there");
        }
    }

    /// The files that wait for the store, and how much of each is copied.
    pub fn queued(&self, scope: &Scope) -> Queued {
        self.namespace.questions.queued(scope, &|seq| {
            self.copying.lock().unwrap_or_else(PoisonError::into_inner).get(&seq).copied().unwrap_or(0)
        })
    }

    /// Bytes that became durable per second, over the time in which the drain worked.
    pub fn average_bytes_per_second(&self) -> u64 {
        let bytes = self.counters.bytes.load(Ordering::Relaxed);
        (bytes as f64 / self.namespace.base.end.busy().as_secs_f64().max(1e-3)) as u64
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn stage_loop(&self) {
        while !self.stopping() {
            let seq = {
                let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                loop {
                    if self.stopping() {
                        return;
                    }
                    if let Some(seq) = jobs.pop_front() {
                        break seq;
                    }
                    jobs = self
                        .job_came
                        .wait_timeout(jobs, Duration::from_secs(1))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            };
            self.stage(seq);
            self.namespace.metadata.wake();
        }
    }

    /// Watches devices, direct writers, and files that a program still holds open for writing.
    fn tend_loop(&self) {
        let mut polled = clock::tick();
        let mut asked = polled;
        while !self.stopping() {
            self.namespace.files.opener.end_promises(crate::files::KEPT_FOR);
            let next = self.namespace.files.descriptors.seal_deferred();
            if polled.elapsed() >= POLL_PERIOD {
                polled = clock::tick();
                self.namespace.base.tiers.poll();
                self.namespace.files.deadline.watch_the_end();
                self.namespace.files.delegation.watch_delegations();
                self.namespace.files.eviction.watch_direct_writers();
                self.namespace.files.descriptors.retry_handed();
                if asked.elapsed() >= HANGS && self.hangs_for().is_some_and(|time| time >= HANGS) {
                    asked = clock::tick();
                    self.namespace.base.queries.ask_whether_alive();
                }
            }
            let until_poll = POLL_PERIOD.saturating_sub(polled.elapsed());
            let pause = next.map_or(until_poll, |next| next.min(until_poll)).max(Duration::from_micros(100));
            self.namespace.base.deferred.wait_deferred(pause, &|| self.stopping());
        }
    }

    /// Syncs the tiers' files that have been closed for a while.
    fn sync_loop(&self) {
        while !self.stopping() {
            let next = self.namespace.files.syncs.sync_closed(false);
            self.namespace.files.syncs.wait_unsynced(next, &|| self.stopping());
        }
    }

    /// Keeps the tiers in memory within the job's memory limit.
    fn memory_loop(&self) {
        while !self.stopping() {
            let next = self.namespace.files.memory_pressure.relieve_memory();
            self.namespace.files.memory_pressure.wait_memory_pressure(next, &|| self.stopping());
        }
    }

    fn publish_loop(&self) {
        let mut ready_since: Option<Instant> = None;
        while !self.stopping() {
            self.discard();
            match self.next(&mut ready_since) {
                Next::Publish(batch) => {
                    ready_since = None;
                    self.publish(&batch);
                    self.namespace.metadata.changed.notify_all();
                }
                Next::Wait(time) => self.namespace.metadata.wait_woken(time),
                Next::Sleep => {
                    self.namespace.files.temporaries.forget_temporaries();
                    self.namespace.metadata.wait_woken(Duration::from_millis(500));
                    self.namespace.metadata.drain_asleep.store(false, Ordering::Relaxed);
                }
            }
        }
    }

    /// Removes staged copies whose operation was taken back.
    fn discard(&self) {
        let discards: Vec<_> = {
            let tree = self.namespace.metadata.read_tree();
            let place =
                |(dir, name, cred): &(FileId, Name, _)| (tree.applied_path(*dir).map(|dir| dir.join(name)), *cred);
            tree.discards.iter().map(place).collect()
        };
        for (path, cred) in &discards {
            if let Some(path) = path
                && let Err(why) = self.as_owner(*cred, |who| self.namespace.base.store.discard(who, path))
            {
                tracing::warn!(%path, %why, "a temporary in the store could not be removed");
            }
        }
        if !discards.is_empty() {
            self.namespace.metadata.write_tree().discards.drain(..discards.len());
        }
    }

    /// Hands out staging, and finds the longest publishable run from the head of the queue.
    fn next(&self, ready_since: &mut Option<Instant>) -> Next {
        let may = self.pause.may();
        if let May::Nothing(time) = may {
            return Next::Wait(time);
        }
        let now = clock::tick();
        let limits = Limits {
            now,
            ordered: self.namespace.base.config.ordered,
            one: may == May::One,
            holds_bytes: !self.namespace.base.store.features().plain_files,
        };
        let mut tree = self.namespace.metadata.write_tree();
        let Some(next) = tree.drain_queue().next(&limits, &|seq| self.temporary(seq)) else {
            return Next::Wait(POLL_PERIOD);
        };
        // With the tree locked: a process that queues an operation after this sees that it must wake the drain.
        self.namespace.metadata.drain_asleep.store(next.is_empty, Ordering::Relaxed);
        drop(tree);
        let more = !next.to_stage.is_empty();
        if more {
            self.jobs.lock().unwrap_or_else(PoisonError::into_inner).extend(next.to_stage);
            self.job_came.notify_all();
        }
        if next.batch.is_empty() {
            return if next.is_empty { Next::Sleep } else { Next::Wait(next.wait) };
        }
        let since = *ready_since.get_or_insert(now);
        let company = (more || next.is_staging) && next.batch.len() < BATCH_OPS_MAX && since.elapsed() < BATCH_WAIT;
        if company { Next::Wait(Duration::from_millis(1)) } else { Next::Publish(next.batch) }
    }

    /// Operations that were handed out but not begun wait for their turn again.
    fn take_back_jobs(&self) {
        let left = std::mem::take(&mut *self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        self.namespace.metadata.write_tree().drain_queue().hand_back(left);
    }

    /// Store I/O with the owner's ids. Where they do not suffice (a file whose owner changed), with the agent's own
    /// ids.
    pub(crate) fn as_owner<T>(
        &self,
        owner: surgetank_store::Cred,
        act: impl Fn(surgetank_store::Cred) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let root = rustix::process::geteuid().is_root();
        if !root || owner.uid == 0 {
            return self.pause.call(|| act(own_cred(owner)));
        }
        match self.pause.call(|| act(owner)) {
            Err(why) if matches!(why.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
                self.pause.call(|| act(own_cred(owner)))
            }
            other => other,
        }
    }

    /// Verification found a copy that differs from its file.
    pub(crate) fn found_corrupt(&self, why: &std::io::Error) {
        if why.kind() == std::io::ErrorKind::InvalidData {
            self.counters.corrupt.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Since when a failure has kept all operations from the store.
    pub fn paused_since_unix_seconds(&self) -> Option<i64> {
        self.pause
            .since_unix_seconds()
            .or_else(|| self.stalled_for().and_then(|_| self.pause.hangs_since()).map(|(_, at)| at))
    }

    /// How long the store has been in one call, when that is too long: it does not answer other questions either, or is
    /// very slow.
    pub fn stalled_for(&self) -> Option<Duration> {
        let least = if self.namespace.base.queries.silent_for().is_some() { HANGS } else { SLOW };
        self.hangs_for().filter(|time| *time >= least)
    }

    /// How long the drain has had no answer from the store.
    pub fn hangs_for(&self) -> Option<Duration> {
        self.pause.hangs_for()
    }

    /// Retries all waiting operations at once.
    pub fn hurry(&self) {
        self.pause.hurry();
    }

    /// The queue will not progress in this scope by itself: all is done, or the rest is refused for good.
    pub fn settled(&self, run: Option<surgetank_types::model::RunId>) -> bool {
        if !self.namespace.base.deferred.deferred_files().is_empty() {
            return false;
        }
        // The drain gives up a store that does not answer at all like one that fails.
        let retry = self.namespace.base.config.retry;
        let silent = |time: Option<Duration>| time.is_some_and(|time| time >= retry);
        let away = silent(self.hangs_for()) && silent(self.namespace.base.queries.silent_for())
            || silent(self.pause.away_for());
        if away && self.namespace.questions.ending_for(run) >= retry {
            return true;
        }
        let tree = self.namespace.metadata.read_tree();
        let mut blocked = false;
        for op in tree.ops.values() {
            let mine = run.is_none_or(|run| op.run == run || op.run == surgetank_types::model::RunId(0));
            blocked |= op.error.as_ref().is_some_and(|trouble| trouble.lasting);
            // Operations refused for good, and those behind them, are retried at intervals; that is not progress.
            if mine && !(blocked && (self.namespace.base.config.ordered || op.error.is_some())) {
                return false;
            }
        }
        true
    }
}
