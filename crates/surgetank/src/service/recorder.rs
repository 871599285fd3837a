//! Writes the record of each run: it samples tiers and queue, gathers the counters of processes, and stores the record
//! in `STATE/PLACE/runs/` when the run ends.
//!
//! ```text
//! join ─► begun ─► (tick: gather ended processes, take a sample, note the progress) … ─► finished ─► runs/ID.json
//! ```
//! An agent that takes over continues from the note. The first danger that it avoids: a run that is slower, or fails,
//! because of its record. Sampling costs at most one part in 200 of the time, or more if thousands of processes start
//! and end. The log reports what cannot be written. The second danger: processes that find no slot to count in, because
//! ended processes still have them. The recorder frees slots when they may run short, before it notes their contents.

mod keep;
mod processes;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use std::sync::atomic::Ordering;
use surgetank_core::drain::Drain;
use surgetank_core::namespace::Namespace;
use surgetank_core::report::run::{
    COMMAND_CHARS_MAX, Event, EventKind, FORMAT, Fill, RunRecord, Sample, StoreTraffic, TierRecord,
};
use surgetank_core::report::{PathText, PoolTraffic, Summary, Verdict};
use surgetank_types::clock;
use surgetank_types::model::RunId;

use super::tally::Tally;
use crate::agent::wire::Account;
use crate::pool::others::{Others, reports};
use crate::shimdoor::counts::{self, Counts};
use keep::Shelf;
pub use keep::{RUNS, read, records_in};
use processes::Processes;

/// The interval between samples at first.
const INTERVAL: Duration = Duration::from_millis(100);
const TICK: Duration = Duration::from_millis(100);
/// Sampling takes at most one part in this many of the processor time. It is not wall time: on a busy machine a sample
/// that waited for a processor would delay the next one for seconds.
const SHARE: u32 = 200;
/// The recorder frees slots of ended processes at the latest when they are one in this many. It samples again before
/// more than that many can have ended.
const FREED_FROM: usize = 4;
/// How often the recorder notes a run's progress.
const NOTED_EVERY: Duration = Duration::from_secs(2);

/// The place of hits whose tier is not known.
const IN_THE_TIERS: &str = "tiers";

pub struct Recorder {
    namespace: Arc<Namespace>,
    drain: Arc<Drain>,
    tally: Arc<Tally>,
    shelf: Shelf,
    /// The shim's index: the runs' files are in the same directory.
    index: Option<PathBuf>,
    /// Set if the agent is a member of a pool.
    pool: Option<Arc<Others>>,
    runs: Mutex<BTreeMap<RunId, Recording>>,
    stop: Mutex<bool>,
    stopped: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Recording {
    record: RunRecord,
    begun: Instant,
    /// The same, on the clock that programs read.
    begun_ns: u64,
    base: Totals,
    /// The counts of earlier agents.
    before: Totals,
    counts: Option<Counts>,
    processes: Processes,
    next_sample: Instant,
    next_note: Instant,
    last_look: Instant,
    last_gathered: Instant,
    queue_was_busy: bool,
}

/// The agent's counters at one moment, or their growth.
#[derive(Default, Clone)]
struct Totals {
    tiers: Vec<TierRecord>,
    store: StoreTraffic,
    pool: Option<PoolTraffic>,
    events: Vec<Event>,
}

/// Processor time of this thread.
fn used() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(used).unwrap_or_default()
}

impl Recorder {
    /// `again`: programs continue to count in the files of an earlier agent.
    pub fn start(
        namespace: &Arc<Namespace>,
        drain: &Arc<Drain>,
        tally: Arc<Tally>,
        state: &Path,
        index: Option<PathBuf>,
        pool: Option<Arc<Others>>,
        again: bool,
    ) -> Arc<Self> {
        if let Some(index) = index.as_ref().filter(|_| !again) {
            counts::sweep(index);
        }
        let recorder = Arc::new(Self {
            namespace: Arc::clone(namespace),
            drain: Arc::clone(drain),
            tally,
            shelf: Shelf::new(state),
            index,
            pool,
            runs: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            thread: Mutex::default(),
        });
        let works = Arc::clone(&recorder);
        match std::thread::Builder::new().name("recorder".into()).spawn(move || works.work()) {
            Ok(thread) => *lock(&recorder.thread) = Some(thread),
            Err(why) => tracing::warn!(%why, "runs are recorded without what happens on the way"),
        }
        recorder
    }

    fn work(&self) {
        let mut stop = lock(&self.stop);
        while !*stop {
            drop(stop);
            let mut pause = Pause::default();
            for recording in lock(&self.runs).values_mut() {
                pause = pause.and(self.look(recording));
            }
            let pause = pause.length();
            stop = lock(&self.stop);
            let until = clock::tick() + pause;
            while !*stop && clock::tick() < until {
                let left = until.saturating_duration_since(clock::tick());
                stop = self.stopped.wait_timeout(stop, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    pub fn end(&self) {
        *lock(&self.stop) = true;
        self.stopped.notify_all();
        if let Some(thread) = lock(&self.thread).take() {
            drop(thread.join());
        }
        // Runs that never reported their end; no other agent follows.
        let left: Vec<RunId> = lock(&self.runs).keys().copied().collect();
        for run in left {
            drop(self.finish(run, None, None));
        }
    }

    /// A run joins, or joins again.
    pub fn begin(&self, run: RunId, pid: u32, command: &str, again: bool) {
        let mut runs = lock(&self.runs);
        if runs.contains_key(&run) {
            return;
        }
        let file = self.index.as_ref().map(|index| counts::path_of(index, run.0));
        let counts = file.and_then(|path| {
            let made = if again { Counts::take_over(&path) } else { Counts::create(&path) };
            made.inspect_err(|why| tracing::warn!(%why, path = %path.display(), "programs of this run do not count"))
                .ok()
        });
        let noted = if again { self.shelf.noted(run) } else { None };
        let begun_before = noted.as_ref().map(|record| Duration::from_micros(record.ended_us));
        let (now, now_ns) = (clock::tick(), monotonic_ns());
        let unix_us = clock::now().nanos / 1000;
        let mut record = noted.unwrap_or_default();
        let since = match begun_before {
            // Only the wall clock is common to both agents.
            Some(_) => Duration::from_micros(u64::try_from(unix_us - record.begun_unix_us).unwrap_or(0)),
            None => Duration::ZERO,
        };
        let begun = now.checked_sub(since).unwrap_or(now);
        if begun_before.is_none() {
            record.format = FORMAT;
            record.version = env!("CARGO_PKG_VERSION").into();
            record.begun_unix_us = unix_us;
            record.id = keep::name_of(unix_us, pid);
            record.run = run;
            record.host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            record.command = command.chars().take(COMMAND_CHARS_MAX).collect();
            record.directory = self.namespace.base.config.over.as_path().into();
            record.store = self.namespace.base.store.describe();
            record.samples.interval_us = micros(INTERVAL);
        }
        record.agents += 1;
        let before = Totals {
            tiers: std::mem::take(&mut record.tiers),
            store: std::mem::take(&mut record.store_traffic),
            pool: record.pool_traffic.take(),
            events: std::mem::take(&mut record.events),
        };
        let processes = Processes::of(&mut record);
        for other in runs.values_mut() {
            other.record.runs_beside += 1;
        }
        record.runs_beside += u32::try_from(runs.len()).unwrap_or(u32::MAX);
        self.namespace.base.events.begin(run);
        self.tally.want();
        if record.traced {
            self.tally.traces.begin(run);
        }
        let recording = Recording {
            record,
            begun,
            begun_ns: now_ns.saturating_sub(u64::try_from(since.as_nanos()).unwrap_or(0)),
            base: self.totals(),
            before,
            counts,
            processes,
            next_sample: now,
            next_note: now,
            last_look: now,
            last_gathered: now,
            queue_was_busy: false,
        };
        runs.insert(run, recording);
    }

    /// Records each request of the run from now on.
    pub fn trace(&self, run: RunId) {
        if let Some(recording) = lock(&self.runs).get_mut(&run) {
            recording.record.traced = true;
            self.tally.traces.begin(run);
        }
    }

    /// The command has ended, and the final drain begins.
    pub fn command_ended(&self, run: RunId) {
        let waiting = self.namespace.questions.waiting();
        if let Some(recording) = lock(&self.runs).get_mut(&run) {
            let at_us = micros(recording.begun.elapsed());
            recording.record.command_ended_us = Some(at_us);
            let tail = &mut recording.record.tail;
            tail.undrained_files = waiting.files;
            tail.undrained_bytes = waiting.bytes;
            tail.undrained_operations = waiting.operations;
        }
    }

    /// What `surgetank run` reports about its end.
    pub fn account(&self, run: RunId, account: &Account) {
        if let Some(recording) = lock(&self.runs).get_mut(&run) {
            let record = &mut recording.record;
            record.command_exit = Some(account.command_exit);
            record.exit = Some(account.exit);
            record.reason.clone_from(&account.reason);
            let since_us = micros(recording.begun.elapsed());
            record.command_ended_us = Some(since_us.saturating_sub(account.ended_us_ago));
        }
    }

    /// Returns the reason if the record could not be written.
    pub fn finish(&self, run: RunId, verdict: Option<Verdict>, summary: Option<Summary>) -> Option<String> {
        let mut recording = lock(&self.runs).remove(&run)?;
        self.gather(&mut recording, true);
        self.sample(&mut recording);
        self.bring_up_to_date(&mut recording);
        let Recording { mut record, counts, .. } = recording;
        record.verdict = verdict;
        record.summary = summary;
        record.tail.elapsed_us = record.command_ended_us.map_or(0, |at| record.ended_us.saturating_sub(at));
        self.namespace.base.events.end(run);
        self.tally.traces.end(run);
        self.tally.want_no_more();
        let unrecorded = self.shelf.put(&record).err().map(|why| format!("{}: {why}", self.shelf.dir().display()));
        if let Some(why) = &unrecorded {
            tracing::warn!(%why, run = run.0, "the record of a run could not be written");
        }
        self.shelf.forget_noted(run);
        if let Some(counts) = counts {
            counts.remove();
        }
        unrecorded
    }

    fn look(&self, recording: &mut Recording) -> Pause {
        let (now, begun) = (clock::tick(), used());
        let over = self.gather(recording, false);
        let since_last = now.saturating_duration_since(std::mem::replace(&mut recording.last_gathered, now));
        if now >= recording.next_sample {
            self.sample(recording);
            recording.next_sample = now + Duration::from_micros(recording.record.samples.interval_us);
        }
        // Writing the note has its own share of time.
        let mut pause = Pause { looking: used().saturating_sub(begun), most: None };
        if now >= recording.next_note {
            self.bring_up_to_date(recording);
            // A full disk must not affect the run.
            if let Err(why) = self.shelf.note(&recording.record) {
                tracing::debug!(%why, "how far a run is could not be written down");
            }
            recording.next_note = now + NOTED_EVERY.max(now.elapsed() * SHARE);
            // From here on the note has their counts: other processes may use their slots.
            recording.free();
        }
        if let Some(counts) = &recording.counts {
            let usable = counts.usable();
            if recording.processes.settled().len() >= usable / FREED_FROM {
                recording.free();
            }
            pause.most = lasts(usable / FREED_FROM, over, since_last);
        }
        pause
    }

    /// Returns the number of processes that ended.
    fn gather(&self, recording: &mut Recording, all: bool) -> usize {
        let run = recording.record.run;
        let since = processes::Since { begun: recording.begun, begun_ns: recording.begun_ns };
        // (A process that ended before the slots are read adds nothing to them afterwards.)
        let over_before: HashSet<u32> =
            self.tally.processes(run).into_iter().filter(|pid| !processes::is_alive(*pid)).collect();
        let look = |counts: &Counts| counts.look(recording.processes.settled(), processes::is_alive);
        let counted = recording.counts.as_ref().map(look);
        let counted = counted.transpose().unwrap_or_else(|why| {
            recording.count_no_more(&why);
            None
        });
        let counted = counted.unwrap_or_default();
        let over: HashSet<u32> = counted.iter().filter(|one| !one.alive).map(|one| one.pid).collect();
        let seen = self.tally.take(run, |pid| all || over.contains(&pid) || over_before.contains(&pid));
        let over = recording.processes.gather(counted, seen, &since, all);
        recording.record.counting_ended |= recording.counts.as_ref().is_some_and(Counts::is_nameless);
        recording.processes.lost =
            recording.counts.as_ref().map_or(recording.processes.lost, |counts| counts.lost().into());
        over
    }

    fn bring_up_to_date(&self, recording: &mut Recording) {
        let now = self.totals().since(&recording.base).and(&recording.before);
        let record = &mut recording.record;
        let busy_us = record.store_traffic.busy_us;
        let highest: Vec<(u64, u64)> =
            record.tiers.iter().map(|tier| (tier.used_bytes_max, tier.dirty_bytes_max)).collect();
        record.tiers = now.tiers;
        for (tier, (used, dirty)) in record.tiers.iter_mut().zip(highest) {
            tier.used_bytes_max = tier.used_bytes_max.max(used);
            tier.dirty_bytes_max = tier.dirty_bytes_max.max(dirty);
        }
        for point in &record.samples.points {
            for (tier, fill) in record.tiers.iter_mut().zip(&point.tiers) {
                tier.used_bytes_max = tier.used_bytes_max.max(fill.used_bytes);
                tier.dirty_bytes_max = tier.dirty_bytes_max.max(fill.dirty_bytes);
            }
        }
        record.store_traffic = now.store;
        record.store_traffic.busy_us = busy_us;
        record.store_traffic.out_bytes_per_second = per_second(record.store_traffic.out_bytes, busy_us);
        record.pool_traffic = now.pool;
        record.events = now.events;
        record.ended_us = micros(recording.begun.elapsed());
        let (total, files) = self.namespace.base.events.files(record.run, recording.begun);
        // (After another agent took over: what it observed.)
        if !files.is_empty() || record.agents <= 1 {
            record.files_total = total;
            record.files = files;
        }
        recording.processes.write_into(record, |file| {
            self.namespace.eager.path_of(file).or_else(|| self.tally.traces.last_name(file))
        });
        // No process asked the agent for these.
        let opens = record.programs.iter().map(|program| program.io.shim.read_opens);
        let count = opens.fold(0, u64::saturating_add);
        record.events.retain(|event| event.place != IN_THE_TIERS);
        if count > 0 {
            let (place, reason) = (IN_THE_TIERS.into(), "opened there by programs themselves (preload shim)".into());
            record.events.push(Event { kind: EventKind::Hit, place, reason, count, bytes: 0 });
        }
    }

    fn sample(&self, recording: &mut Recording) {
        let tiers = self.tiers();
        let waiting = self.namespace.questions.waiting();
        let now = self.totals_of_store();
        let record = &mut recording.record;
        let queued = waiting.files + waiting.operations > 0;
        if queued || recording.queue_was_busy {
            record.store_traffic.busy_us += micros(recording.last_look.elapsed());
        }
        recording.queue_was_busy = queued;
        recording.last_look = clock::tick();
        record.samples.tiers = tiers.iter().map(|tier| tier.0.clone()).collect();
        record.samples.push(Sample {
            at_us: micros(recording.begun.elapsed()),
            tiers: tiers.into_iter().map(|tier| tier.1).collect(),
            queue_operations: waiting.files + waiting.operations,
            queue_bytes: waiting.bytes,
            drained_bytes: recording.before.store.out_bytes
                + now.out_bytes.saturating_sub(recording.base.store.out_bytes),
            fetched_bytes: recording.before.store.in_bytes + now.in_bytes.saturating_sub(recording.base.store.in_bytes),
        });
    }

    fn tiers(&self) -> Vec<(String, Fill)> {
        let mut tiers: Vec<(String, Fill)> = Vec::new();
        for device in self.namespace.base.tiers.devices() {
            let (used_bytes, dirty_bytes) = (device.view().used_bytes, self.namespace.metadata.dirty_bytes_of(device));
            match tiers.iter_mut().find(|(name, _)| name == device.tier_name()) {
                Some((_, fill)) => {
                    fill.used_bytes += used_bytes;
                    fill.dirty_bytes += dirty_bytes;
                }
                None => tiers.push((device.tier_name().to_owned(), Fill { used_bytes, dirty_bytes })),
            }
        }
        tiers
    }

    fn totals(&self) -> Totals {
        let mut tiers: Vec<TierRecord> = Vec::new();
        for device in self.namespace.base.tiers.devices() {
            let counters = device.counters();
            let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            let at = match tiers.iter().position(|tier| tier.name == device.tier_name()) {
                Some(at) => at,
                None => {
                    let name = device.tier_name().to_owned();
                    tiers.push(TierRecord { name, survives: Some(device.survives()), ..TierRecord::default() });
                    tiers.len() - 1
                }
            };
            if let Some(tier) = tiers.get_mut(at) {
                tier.cap_bytes += device.view().cap_bytes;
                tier.devices.push(PathText::from(device.path()));
                tier.files += load(&counters.files);
                tier.in_bytes += load(&counters.bytes_in);
                tier.out_bytes += load(&counters.bytes_out);
                tier.hits += load(&counters.hits);
                tier.spills += load(&counters.spills_out);
            }
        }
        let pool = self.pool.as_deref().map(reports::traffic);
        Totals { tiers, store: self.totals_of_store(), pool, events: self.namespace.base.events.events() }
    }

    fn totals_of_store(&self) -> StoreTraffic {
        let counters = &self.drain.counters;
        let fetched: Vec<Event> =
            self.namespace.base.events.events().into_iter().filter(|event| event.kind == EventKind::Fetched).collect();
        StoreTraffic {
            out_files: counters.files.load(Ordering::Relaxed),
            out_bytes: counters.bytes.load(Ordering::Relaxed),
            in_files: fetched.iter().map(|event| event.count).sum(),
            in_bytes: fetched.iter().map(|event| event.bytes).sum(),
            failures: counters.failures.load(Ordering::Relaxed),
            corrupt: counters.corrupt.load(Ordering::Relaxed),
            ..StoreTraffic::default()
        }
    }
}

impl Recording {
    /// From here on other processes may use the slots of processes that were gathered.
    fn free(&mut self) {
        let freed = self.counts.as_ref().map_or(Ok(()), |counts| self.processes.free(counts));
        if let Err(why) = freed {
            self.count_no_more(&why);
        }
    }

    /// A program truncated the file: it is in memory that programs own.
    fn count_no_more(&mut self, why: &std::io::Error) {
        tracing::warn!(%why, run = self.record.run.0, "a program damaged the memory in which processes of this run count: they are no longer counted");
        self.record.counting_ended = true;
        if let Some(counts) = self.counts.take() {
            counts.remove();
        }
    }
}

/// The pause before the next sample.
#[derive(Default)]
struct Pause {
    /// Processor time of this sample.
    looking: Duration,
    /// After this time slots would run short.
    most: Option<Duration>,
}

impl Pause {
    fn and(self, other: Self) -> Self {
        let most = [self.most, other.most].into_iter().flatten().min();
        Self { looking: self.looking + other.looking, most }
    }

    fn length(&self) -> Duration {
        TICK.max((self.looking * SHARE).min(self.most.unwrap_or(Duration::MAX)))
    }
}

/// How long this many slots last at the rate at which processes ended.
fn lasts(slots: usize, over: usize, in_time: Duration) -> Option<Duration> {
    (over > 0).then(|| in_time.mul_f64(slots as f64 / over as f64))
}

fn per_second(bytes: u64, in_us: u64) -> u64 {
    let rate = (u128::from(bytes) * 1_000_000).checked_div(in_us.into()).unwrap_or(0);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

impl Totals {
    /// The growth since `base`.
    fn since(mut self, base: &Self) -> Self {
        for tier in &mut self.tiers {
            if let Some(base) = base.tiers.iter().find(|base| base.name == tier.name) {
                tier.files = tier.files.saturating_sub(base.files);
                tier.in_bytes = tier.in_bytes.saturating_sub(base.in_bytes);
                tier.out_bytes = tier.out_bytes.saturating_sub(base.out_bytes);
                tier.hits = tier.hits.saturating_sub(base.hits);
                tier.spills = tier.spills.saturating_sub(base.spills);
            }
        }
        let (store, from) = (&mut self.store, &base.store);
        store.out_files = store.out_files.saturating_sub(from.out_files);
        store.out_bytes = store.out_bytes.saturating_sub(from.out_bytes);
        store.in_files = store.in_files.saturating_sub(from.in_files);
        store.in_bytes = store.in_bytes.saturating_sub(from.in_bytes);
        store.failures = store.failures.saturating_sub(from.failures);
        store.corrupt = store.corrupt.saturating_sub(from.corrupt);
        self.pool = self.pool.map(|pool| pool.since(base.pool.as_ref()));
        for event in &mut self.events {
            if let Some(base) = base.events.iter().find(|base| is_like(base, event)) {
                event.count = event.count.saturating_sub(base.count);
                event.bytes = event.bytes.saturating_sub(base.bytes);
            }
        }
        self.events.retain(|event| event.count > 0);
        self
    }

    /// The sum with the counts of earlier agents.
    fn and(mut self, before: &Self) -> Self {
        for tier in &mut self.tiers {
            if let Some(before) = before.tiers.iter().find(|before| before.name == tier.name) {
                tier.files += before.files;
                tier.in_bytes += before.in_bytes;
                tier.out_bytes += before.out_bytes;
                tier.hits += before.hits;
                tier.spills += before.spills;
                tier.used_bytes_max = tier.used_bytes_max.max(before.used_bytes_max);
                tier.dirty_bytes_max = tier.dirty_bytes_max.max(before.dirty_bytes_max);
            }
        }
        let (store, from) = (&mut self.store, &before.store);
        store.out_files += from.out_files;
        store.out_bytes += from.out_bytes;
        store.in_files += from.in_files;
        store.in_bytes += from.in_bytes;
        store.failures += from.failures;
        store.corrupt += from.corrupt;
        self.pool = self.pool.map(|pool| pool.and(before.pool.as_ref()));
        for earlier in &before.events {
            match self.events.iter_mut().find(|event| is_like(event, earlier)) {
                Some(event) => {
                    event.count += earlier.count;
                    event.bytes += earlier.bytes;
                }
                None => self.events.push(earlier.clone()),
            }
        }
        self
    }
}

fn is_like(a: &Event, b: &Event) -> bool {
    a.kind == b.kind && a.place == b.place && a.reason == b.reason
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}
