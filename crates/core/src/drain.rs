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
mod attempts;
mod counters;
mod execute;
mod failed;
mod maintenance;
mod meter;
mod overwrite;
mod pause;
mod publish;
mod rests;
mod spares;
mod spilled;
mod stage;
mod throttle;
mod turns;

use std::time::{Duration, Instant};

use again::Recognition;
use attempts::Attempts;
use execute::Executor;
use maintenance::Maintenance;
use pause::May;
use stage::Stager;

use surgetank_state::{BATCH_OPS_MAX, Limits, Name};
use surgetank_store::Staged;
use surgetank_types::clock;
use surgetank_types::model::{FileId, Seq};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::thread::JoinHandle;
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::{Base, Publishes, StoreCopy};
use crate::files::Files;
use crate::metadata::Metadata;
use crate::namespace::emptying::Emptying;
use crate::namespace::order::{Ordered, await_cut, in_order};
use crate::namespace::questions::Questions;
use crate::namespace::{Namespace, Queued};
use crate::report::Scope;

pub use counters::DrainCounters;
pub use meter::Meter;

/// How long the publisher waits while the queue can hand nothing out.
const PAUSE: Duration = Duration::from_millis(100);
/// A ready operation waits at most this long for others to join its batch.
const BATCH_WAIT: Duration = Duration::from_millis(5);
/// A smaller file that comes alone is copied by the publisher itself, if the store is a local file system.
const ALONE_BYTES: u64 = 1 << 20;
/// The end of the drain waits this long for a thread that hangs in the store.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Carries out the queue: decides what comes next, and publishes.
pub struct Drain {
    base: Base,
    metadata: Arc<Metadata>,
    files: Arc<Files>,
    questions: Arc<Questions>,
    emptying: Arc<Emptying>,
    attempts: Arc<Attempts>,
    stager: Arc<Stager>,
    executor: Executor,
    /// Counts for status and metrics.
    pub counters: Arc<DrainCounters>,
    /// The rate of copies.
    pub meter: Arc<Meter>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

enum Next {
    Publish(Vec<Seq>),
    /// Something may come before what is ready, as in [`Ordered::Await`].
    Await {
        needed_nanos: u64,
        goes_then: Option<Seq>,
    },
    /// The publisher copies this file itself.
    Stage(Seq),
    Wait(Duration),
    Sleep,
}

fn spawn<T: Send + Sync + 'static>(name: &str, of: &Arc<T>, run: fn(&T)) -> std::io::Result<JoinHandle<()>> {
    let of = of.clone();
    surgetank_types::sync::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10).spawn(move || run(&of))
}

impl Drain {
    /// Starts the threads of the drain. Errors: the system does not create a thread.
    pub fn start(namespace: &Namespace) -> std::io::Result<Arc<Self>> {
        let (base, metadata, files) = (&namespace.base, &namespace.metadata, &namespace.files);
        let counters = Arc::new(DrainCounters::default());
        let meter = Arc::new(Meter::default());
        let attempts = Arc::new(Attempts::new(base, metadata, files, &counters));
        let recognition = Arc::new(Recognition::new(base, metadata, &attempts));
        let stager = Arc::new(Stager::new(base, metadata, files, &attempts, &meter));
        let maintenance = Arc::new(Maintenance::new(base, files, &attempts));
        let drain = Arc::new(Self {
            base: base.clone(),
            metadata: metadata.clone(),
            files: files.clone(),
            questions: namespace.questions.clone(),
            emptying: namespace.emptying.clone(),
            executor: Executor::new(base, metadata, files, (&attempts, &recognition, &stager)),
            attempts,
            stager,
            counters,
            meter,
            threads: Mutex::default(),
        });
        let mut threads = vec![spawn("drain", &drain, Self::publish_loop)?];
        for _ in 0..base.config.drain_threads.max(1) {
            threads.push(spawn("stage", &drain, Self::stage_loop)?);
        }
        threads.push(spawn("tender", &maintenance, Maintenance::tend_loop)?);
        threads.push(spawn("sync", &maintenance, Maintenance::sync_loop)?);
        if base.tiers.devices().any(surgetank_tier::Device::in_memory) {
            threads.push(spawn("memory", &maintenance, Maintenance::memory_loop)?);
        }
        *drain.threads.lock().unwrap_or_else(PoisonError::into_inner) = threads;
        Ok(drain)
    }

    /// Stops after the operations in progress; the queue stays as it is.
    pub fn stop(&self) {
        self.attempts.stop.store(true, Ordering::Relaxed);
        drop(self.attempts.jobs.lock());
        self.attempts.job_came.notify_all();
        self.metadata.wake();
        self.base.deferred.end_deferred();
        self.files.syncs.end_unsynced();
        self.files.memory_pressure.end_memory_pressure();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            while !surgetank_types::sync::is_finished(&thread)
                && self.attempts.hangs_for().is_none_or(|time| time < STOP_TIMEOUT)
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
        self.stager.spares.give_up(&mut self.metadata.write_tree(), true);
        self.discard();
        self.attempts.take_back_jobs();
        self.discard();
        self.files.temporaries.discard_late_at_the_end();
        if self.metadata.read_tree().ops.is_empty()
            && let Err(why) = self.base.store.collect()
        {
            tracing::warn!(%why, "an abandoned temporary stays in the store");
        }
    }

    /// Makes a copy in the store for another member of the pool, whose file has this number there: its content is here.
    /// Errors: the content is not here; the store; a newer request for the same file.
    pub fn stage_for_another(&self, number: u64, copy: &StoreCopy<'_>) -> std::io::Result<Staged> {
        self.stager.stage_for_another(number, copy)
    }

    /// Ends tries of [`Self::stage_for_another`] before this one. Returns when none writes to the store any more.
    pub fn end_stage_for_another(&self, number: u64, attempt: u64) {
        self.stager.end_stage_for_another(number, attempt);
    }

    /// The files that wait for the store, and how much of each is copied.
    pub fn queued(&self, scope: &Scope) -> Queued {
        self.questions.queued(scope, &|seq| self.stager.copied_bytes(seq))
    }

    /// Since when a failure has kept all operations from the store.
    pub fn paused_since_unix_seconds(&self) -> Option<i64> {
        self.attempts.paused_since_unix_seconds()
    }

    /// How long the store has been in one call, when that is too long: it does not answer other questions either, or is
    /// very slow.
    pub fn stalled_for(&self) -> Option<Duration> {
        self.attempts.stalled_for()
    }

    /// How long the drain has had no answer from the store.
    pub fn hangs_for(&self) -> Option<Duration> {
        self.attempts.hangs_for()
    }

    /// Retries all waiting operations at once.
    pub fn hurry(&self) {
        self.attempts.hurry();
    }

    /// Bytes that became durable per second, over the time in which the drain worked.
    pub fn average_bytes_per_second(&self) -> u64 {
        let bytes = self.counters.bytes.load(Ordering::Relaxed);
        (bytes as f64 / self.base.end.busy().as_secs_f64().max(1e-3)) as u64
    }

    fn stage_loop(&self) {
        while !self.attempts.stopping() {
            let seq = {
                let mut jobs = self.attempts.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                loop {
                    if self.attempts.stopping() {
                        return;
                    }
                    if let Some(seq) = jobs.pop_front() {
                        break seq;
                    }
                    jobs = self
                        .attempts
                        .job_came
                        .wait_timeout(jobs, Duration::from_secs(1))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            };
            self.stager.stage(seq);
            self.metadata.wake();
        }
    }

    fn publish_loop(&self) {
        let mut ready_since: Option<Instant> = None;
        let mut has_waited = None;
        while !self.attempts.stopping() {
            self.discard();
            match self.next(&mut ready_since, has_waited) {
                Next::Await { needed_nanos, goes_then } => {
                    await_cut(&self.base, needed_nanos);
                    has_waited = goes_then;
                }
                Next::Publish(batch) => {
                    (ready_since, has_waited) = (None, None);
                    self.publish(&batch);
                    self.metadata.changed.notify_all();
                }
                Next::Stage(seq) => self.stager.stage(seq),
                Next::Wait(time) => self.metadata.wait_woken(time),
                Next::Sleep => {
                    self.stager.spares.give_up(&mut self.metadata.write_tree(), false);
                    self.discard();
                    if self.stager.spares.is_empty() {
                        self.files.temporaries.forget_temporaries();
                    }
                    self.metadata.wait_woken(Duration::from_millis(500));
                    self.metadata.drain_asleep.store(false, Ordering::Relaxed);
                }
            }
        }
    }

    /// Removes staged copies whose operation was taken back.
    fn discard(&self) {
        let discards: Vec<_> = {
            let tree = self.metadata.read_tree();
            let place =
                |(dir, name, cred): &(FileId, Name, _)| (tree.applied_path(*dir).map(|dir| dir.join(name)), *cred);
            tree.discards.iter().map(place).collect()
        };
        for (path, cred) in &discards {
            if let Some(path) = path
                && let Err(why) = self.attempts.as_owner(*cred, |who| self.base.store.discard(who, path))
            {
                tracing::warn!(%path, %why, "a temporary in the store could not be removed");
            }
        }
        if !discards.is_empty() {
            self.metadata.write_tree().discards.drain(..discards.len());
        }
    }

    /// Hands out staging, and finds the longest publishable run from the head of the queue. `has_waited`: up to
    /// here it waited for the order of the pool as long as it may.
    fn next(&self, ready_since: &mut Option<Instant>, has_waited: Option<Seq>) -> Next {
        if self.base.members.get().is_some_and(|members| members.publishes() == Publishes::Later) {
            return Next::Wait(PAUSE);
        }
        let may = self.attempts.pause.may();
        if let May::Nothing(time) = may {
            return Next::Wait(time);
        }
        let now = clock::tick();
        let limits = Limits {
            now,
            ordered: self.base.config.ordered,
            one: may == May::One,
            holds_bytes: !self.base.store.features().plain_files,
        };
        let mut tree = self.metadata.write_tree();
        let Some(next) = tree.drain_queue().next(&limits, &|seq| self.attempts.temporary(seq)) else {
            return Next::Wait(PAUSE);
        };
        // With the tree locked: a process that queues an operation after this sees that it must wake the drain.
        self.metadata.drain_asleep.store(next.is_empty, Ordering::Relaxed);
        let alone = match next.to_stage[..] {
            [seq] if next.batch.is_empty() && !next.is_staging => Some(seq),
            _ => None,
        };
        // A program may wait in fsync for this one file: another thread would come to it later.
        let is_local = self.base.store.features().publications_at_once < 2;
        if let Some(seq) = alone.filter(|seq| is_local && self.is_short_work(&tree, *seq)) {
            return Next::Stage(seq);
        }
        let ordered = in_order(&self.base, &tree, next.batch, has_waited);
        drop(tree);
        let more = !next.to_stage.is_empty();
        if more {
            self.attempts.jobs.lock().unwrap_or_else(PoisonError::into_inner).extend(next.to_stage);
            if alone.is_some() {
                self.attempts.job_came.notify_one();
            } else {
                self.attempts.job_came.notify_all();
            }
        }
        let batch = match ordered {
            Ordered::Await { needed_nanos, goes_then } => return Next::Await { needed_nanos, goes_then },
            Ordered::Publish(batch) => batch,
        };
        if batch.is_empty() {
            return if next.is_empty { Next::Sleep } else { Next::Wait(next.wait) };
        }
        let since = *ready_since.get_or_insert(now);
        let company = (more || next.is_staging) && batch.len() < BATCH_OPS_MAX && since.elapsed() < BATCH_WAIT;
        if company { Next::Wait(Duration::from_millis(1)) } else { Next::Publish(batch) }
    }

    fn is_short_work(&self, tree: &surgetank_state::Tree, seq: Seq) -> bool {
        let Some(id) = tree.ops.get(&seq).map(|op| op.file()) else { return false };
        let is_small = tree.get(id).is_some_and(|inode| inode.attr.size_bytes < ALONE_BYTES);
        is_small || self.stager.spares.has(id)
    }

    /// The queue will not progress in this scope by itself: all is done, or the rest is refused for good.
    pub fn settled(&self, run: Option<surgetank_types::model::RunId>) -> bool {
        if !self.base.deferred.deferred_files().is_empty() {
            return false;
        }
        // The drain gives up a store that does not answer at all like one that fails.
        let retry = self.base.config.retry;
        let silent = |time: Option<Duration>| time.is_some_and(|time| time >= retry);
        let away = silent(self.attempts.hangs_for()) && silent(self.base.queries.silent_for())
            || silent(self.attempts.pause.away_for());
        if away && self.questions.ending_for(run) >= retry {
            return true;
        }
        let tree = self.metadata.read_tree();
        let mut blocked = false;
        for op in tree.ops.values() {
            let mine = run.is_none_or(|run| run.has(op.run));
            blocked |= op.error.as_ref().is_some_and(|trouble| trouble.lasting);
            // Operations refused for good, and those behind them, are retried at intervals; that is not progress.
            if mine && !(blocked && (self.base.config.ordered || op.error.is_some())) {
                return false;
            }
        }
        true
    }
}
