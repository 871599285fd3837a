//! The engine of a served directory: it returns the namespace's and the drain's answers in the shapes of the report.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use surgetank_core::drain::Drain;
use surgetank_core::namespace::{Namespace, Newest, Queued, Undurable};
use surgetank_core::report::{
    Audit, Conflict, CopyOn, DeadlineStatus, DeviceStatus, DrainFigures, DrainStatus, DrainSummary, Figures, Health,
    HintOf, LISTED_MAX, Listing, Located, Lost, MountSummary, NotDurable, Oldest, PathText, PoolMembers, Prefetch,
    Progress, Queue, RefusedHint, ReplicaStatus, Same, Scope, Status, Summary, TierFigures, TierStatus, TierSummary,
    Trouble, Undelivered, Verdict, Why,
};
use surgetank_policy::config::Survives;
use surgetank_store::StorePath;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Mode, RunId};

use super::door::Door;
use super::guard::Guard;
use super::prefetcher::Prefetcher;
use super::recorder::Recorder;
use super::runs::Runs;
use crate::agent::engine::Engine;
use crate::agent::wire::{Account, Answer, Request};
use crate::pool::router::Router;
use crate::pool::router::owners::is_of_another;
use crate::pool::status::PoolStatus;
use crate::seccomp::Refusals;

mod final_drain;
mod locating;
mod members;
mod tending;
mod trouble;

use trouble::before_unix;

pub struct Served {
    namespace: Arc<Namespace>,
    drain: Arc<Drain>,
    runs: Arc<Runs>,
    door: Arc<Door>,
    prefetcher: Prefetcher,
    guard: Option<Guard>,
    /// The drain's counts and the time when a scope's final drain began.
    begun: Mutex<HashMap<Option<RunId>, Mark>>,
    /// Set if there is no mount.
    refusals: Option<Arc<Refusals>>,
    /// Set if programs are served.
    recorder: Option<Arc<Recorder>>,
    /// Set if the agent is a member of a pool.
    pool: Option<Arc<Router<Door>>>,
    /// Other members are asked next to drain what programs of this node changed there.
    others_begin: AtomicBool,
}

#[derive(Clone, Copy)]
struct Mark {
    files: u64,
    bytes: u64,
    /// Includes bytes of incomplete files.
    copied_bytes: u64,
    at: Instant,
}

/// Threads that free the tiers. Freeing memory takes the same total time on several cores as on one, and that many
/// times the processor time.
const EMPTIERS: usize = 2;
/// The pause between two looks at the queue, in multiples of the time that one look takes.
const LOOK_REST: u32 = 20;

impl Served {
    #[expect(clippy::too_many_arguments, reason = "the parts of what is served, each once")]
    pub fn new(
        namespace: Arc<Namespace>,
        drain: Arc<Drain>,
        runs: Arc<Runs>,
        door: Arc<Door>,
        prefetcher: Prefetcher,
        guard: Option<Guard>,
        refusals: Option<Arc<Refusals>>,
        recorder: Option<Arc<Recorder>>,
        pool: Option<Arc<Router<Door>>>,
    ) -> Self {
        Self {
            namespace,
            drain,
            runs,
            door,
            prefetcher,
            guard,
            begun: Mutex::default(),
            refusals,
            recorder,
            pool,
            others_begin: AtomicBool::new(false),
        }
    }

    fn mark(&self) -> Mark {
        let counters = &self.drain.counters;
        Mark {
            files: counters.files.load(Ordering::Relaxed),
            bytes: counters.bytes.load(Ordering::Relaxed),
            copied_bytes: counters.staged_bytes.load(Ordering::Relaxed),
            at: Instant::now(),
        }
    }

    fn undurable(&self, scope: &Scope) -> Vec<Undurable> {
        let mut list = self.namespace.questions.undurable(scope.run);
        list.retain(|one| scope.covers(&one.path));
        list
    }

    fn fault(path: &[u8], fault: &surgetank_types::error::Fault) -> Error {
        Error::new(format!("{}: cannot be looked up", String::from_utf8_lossy(path))).why(fault)
    }
}

impl Engine for Served {
    fn status(&self) -> Status {
        let namespace = &self.namespace;
        let mut status = Status::default();
        for device in namespace.base.tiers.devices() {
            let view = device.view();
            let dirty_bytes = namespace.metadata.dirty_bytes_of(device);
            let health = match device.sickness() {
                None => Health::Well,
                Some(errno) => Health::Sick { reason: errno.to_string() },
            };
            let shown = DeviceStatus {
                path: PathText::from(device.path()),
                used_bytes: view.used_bytes,
                reserved_bytes: view.reserved_bytes,
                free_bytes: view.free_bytes,
                health,
            };
            match status.tiers.iter_mut().find(|tier| tier.name == device.tier_name()) {
                Some(tier) => {
                    tier.cap_bytes += view.cap_bytes;
                    tier.used_bytes += view.used_bytes;
                    tier.reserved_bytes += view.reserved_bytes;
                    tier.dirty_bytes += dirty_bytes;
                    tier.devices.push(shown);
                }
                None => status.tiers.push(TierStatus {
                    name: device.tier_name().to_owned(),
                    cap_bytes: view.cap_bytes,
                    used_bytes: view.used_bytes,
                    reserved_bytes: view.reserved_bytes,
                    dirty_bytes,
                    survives: device.survives(),
                    devices: vec![shown],
                }),
            }
        }
        status.at_risk_reboot_bytes =
            namespace.files.copies.at_risk_bytes(|device| device.survives() == Survives::Agent);
        status.at_risk_node_bytes = namespace.files.copies.at_risk_bytes(|device| device.survives() != Survives::Node);
        status.lost = namespace.losses.losses(&Scope::everything());
        let waiting = namespace.questions.waiting();
        status.queue = Queue {
            files: waiting.files,
            bytes: waiting.bytes,
            operations: waiting.operations,
            oldest: waiting.oldest.map(|(path, age)| Oldest { path: PathText(path), age_seconds: age.as_secs() }),
            bytes_per_second: self.drain.meter.rate(),
        };
        status.deadline = namespace.files.deadline.outlook().map(|outlook| DeadlineStatus {
            unix_seconds: outlook.deadline.unix_seconds,
            left_seconds: outlook.deadline.left().as_secs(),
            from: outlook.deadline.from,
            bytes_per_second: outlook.bytes_per_second,
            measured: outlook.measured,
            drainable_bytes: outlook.drainable_bytes,
            undrained_bytes: outlook.undrained_bytes,
            fits: outlook.undrained_bytes <= outlook.drainable_bytes,
        });
        status.drain = DrainStatus {
            paused_since_unix_seconds: self.drain.paused_since_unix_seconds(),
            failures: self.drain.counters.failures.load(Ordering::Relaxed),
            corrupt: self.drain.counters.corrupt.load(Ordering::Relaxed),
            savings: namespace.base.store.savings(),
        };
        status.troubles.extend(self.trouble(false));
        status.troubles.extend(self.short_of_room(true));
        for noted in namespace.base.notes.troubles().into_iter().rev().take(20) {
            status.troubles.push(Trouble {
                path: Some(PathText(noted.path.into_bytes())),
                place: namespace.base.store.describe(),
                reason: noted.what,
                since_unix_seconds: noted.at_unix_seconds,
            });
        }
        status
    }

    fn waiting_for_room(&self) -> Vec<Trouble> {
        self.short_of_room(false).collect()
    }

    fn why(&self, path: &[u8]) -> Result<Why> {
        self.namespace.files.descriptors.catch_up();
        let id = self.namespace.locations.find(path).map_err(|fault| Self::fault(path, &fault))?;
        let unnamed = || Error::new(format!("{}: has no name any more", String::from_utf8_lossy(path)));
        let answer = self.namespace.questions.where_is(id).ok_or_else(unnamed)?;
        let mut replicas = Vec::new();
        if let Some((tier, file)) = answer.replica {
            replicas.push(ReplicaStatus { tier, file: PathText(file) });
        }
        let trouble = answer.pending.map(|pending| Trouble {
            path: None,
            place: self.namespace.base.store.describe(),
            reason: pending.why,
            since_unix_seconds: before_unix(pending.since),
        });
        Ok(Why {
            path: PathText(answer.path),
            state: locating::shown(answer.state),
            size_bytes: answer.size_bytes,
            place: answer.places.join(" "),
            mode: answer.mode,
            rule: answer.rule,
            hints: answer.hints,
            placement: answer.placed,
            replicas,
            store_path: PathText(answer.store_path),
            pinned: answer.pinned,
            trouble,
        })
    }

    fn locate(&self, paths: &[PathText]) -> Vec<std::result::Result<Located, String>> {
        locating::here(self, paths)
    }

    fn copies(&self, numbers: &[u64], files: &[Same]) -> Vec<Option<CopyOn>> {
        locating::copies_here(self, numbers, files)
    }

    fn progress(&self, scope: &Scope) -> Progress {
        self.namespace.files.descriptors.catch_up();
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).get(&scope.run).copied();
        // This comes first: a file that is sealed meanwhile then counts as queued.
        let releasing = self.is_releasing(scope, begun);
        let left = self.drain.queued(scope);
        let now = self.mark();
        let since = begun.unwrap_or(now);
        let elapsed = now.at.saturating_duration_since(since.at);
        let copied_bytes = now.copied_bytes.saturating_sub(since.copied_bytes);
        Progress {
            undrained_files: left.files,
            undrained_bytes: left.bytes.saturating_sub(left.copied_bytes),
            undrained_operations: left.operations,
            done_files: now.files.saturating_sub(since.files),
            done_bytes: now.bytes.saturating_sub(since.bytes) + left.copied_bytes,
            bytes_per_second: self.drain.meter.rate(),
            average_bytes_per_second: (copied_bytes as f64 / elapsed.as_secs_f64().max(1e-3)) as u64,
            trouble: self.trouble(begun.is_some()),
            settled: ((left == Queued::default() && self.namespace.questions.no_deferred())
                || self.drain.settled(scope.run) && !self.gives_up_lost(scope))
                && !releasing,
        }
    }

    fn await_settled(&self, scope: &Scope, at_most: Duration) -> Progress {
        let until = Instant::now() + at_most;
        loop {
            let begun = Instant::now();
            let progress = self.progress(scope);
            let rest = begun.elapsed() * LOOK_REST;
            let left = until.saturating_duration_since(Instant::now());
            if progress.settled || left.is_zero() {
                return progress;
            }
            // A look at a long queue blocks the drain, which changes it thousands of times.
            std::thread::sleep(left.min(rest));
            let left = until.saturating_duration_since(Instant::now());
            self.namespace.questions.wait_change(left.min(Duration::from_millis(50)));
        }
    }

    fn begin_final_drain(&self, scope: &Scope) {
        if let (Some(recorder), Some(run)) = (&self.recorder, scope.run) {
            recorder.command_ended(run);
        }
        self.others_begin.store(true, Ordering::SeqCst);
        self.begin_drain_here(scope);
    }

    fn end_final_drain(&self, scope: &Scope) {
        if scope.run.is_none() {
            self.namespace.questions.end_final_drain();
        }
    }

    fn all_commands_ended(&self, is_deserted: Option<Box<dyn Fn() -> bool + Send>>) {
        let Some(turn) = self.namespace.emptying.begin_emptying() else { return };
        let spawn = |gives_back: Box<dyn FnOnce(&Namespace) + Send>| {
            let namespace = Arc::clone(&self.namespace);
            let emptier = std::thread::Builder::new().name("emptier".into());
            if let Err(error) = emptier.spawn(move || gives_back(&namespace)) {
                tracing::warn!(%error, "tiers are given back later");
            }
        };
        for share in 0..EMPTIERS {
            spawn(Box::new(move |namespace| namespace.emptying.empty_tiers(turn, (share, EMPTIERS))));
        }
        if let Some(is_deserted) = is_deserted {
            spawn(Box::new(move |namespace| namespace.emptying.drop_temporaries(turn, is_deserted)));
        }
    }

    fn await_settled_everywhere(&self, scope: &Scope, at_most: Duration) -> Progress {
        self.settled_everywhere(scope, at_most)
    }

    fn verdict_everywhere(&self, scope: &Scope) -> Verdict {
        self.judged_everywhere(scope)
    }

    fn leave_pool(&self, close: &dyn Fn(bool) -> bool) -> Option<bool> {
        self.left_pool(close)
    }

    fn pool_status(&self) -> Option<Result<PoolStatus>> {
        Some(self.pool.as_ref()?.status())
    }

    fn pool_members(&self) -> Option<PoolMembers> {
        members::of_all(self)
    }

    fn answered_with_others(&self, request: &Request) -> Option<Answer> {
        tending::with_others(self, request)
    }

    fn user_joined(&self) {
        self.namespace.emptying.end_emptying();
    }

    fn job_ends(&self) {
        self.namespace.files.deadline.job_ends();
        self.begin_final_drain(&Scope::everything());
    }

    fn verdict(&self, scope: &Scope) -> Verdict {
        self.namespace.files.descriptors.catch_up();
        let mut verdict = Verdict::default();
        for one in self.undurable(scope) {
            if one.is_content {
                // The engine checks a copy before it calls it safe, for the files that are listed.
                let listed = verdict.not_durable.total < LISTED_MAX as u64;
                let newest = if listed { self.namespace.files.copies.newest_copy(one.file) } else { Newest::Unknown };
                let (why, safe_at) = match newest {
                    Newest::At(at) => (one.why, PathText(at.into_bytes())),
                    Newest::Missing(why) => (why, PathText::default()),
                    Newest::Unknown => (one.why, PathText::default()),
                };
                verdict.not_durable.push(NotDurable { path: PathText(one.path), why, safe_at });
            } else {
                verdict.undelivered.push(Undelivered { operation: one.operation, why: one.why });
                verdict.waiting_operations += 1;
            }
        }
        verdict.lost = self.namespace.losses.losses(scope);
        let here = !scope.run.is_some_and(RunId::is_of_a_member);
        for escaped in self.guard.iter().filter(|_| here).flat_map(Guard::escaped) {
            if scope.covers(escaped.operation.as_bytes()) {
                verdict.undelivered.push(escaped);
            }
        }
        for noted in self.namespace.base.notes.troubles().into_iter().filter(|noted| noted.counts) {
            if scope.run.is_some_and(|run| !run.has(noted.run)) || !scope.covers(noted.path.as_bytes()) {
                continue;
            }
            match noted.kept_as {
                Some(kept_as) => verdict.conflicts.push(Conflict {
                    path: PathText(noted.path.into_bytes()),
                    kept_as: PathText(kept_as.into_bytes()),
                }),
                None => verdict.undelivered.push(Undelivered { operation: noted.path, why: noted.what }),
            }
        }
        for (_, path, _) in self.namespace.metadata.kept(scope.run, Mode::Keep) {
            if scope.covers(&path) {
                verdict.kept.push(PathText(path));
            }
        }
        verdict
    }

    fn summary(&self, run: Option<RunId>) -> Summary {
        let mut summary = Summary::default();
        for device in self.namespace.base.tiers.devices() {
            let counters = device.counters();
            let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            let one = TierSummary {
                name: device.tier_name().to_owned(),
                files: load(&counters.files),
                in_bytes: load(&counters.bytes_in),
                out_bytes: load(&counters.bytes_out),
                hits: load(&counters.hits),
                spills: load(&counters.spills_out),
            };
            match summary.tiers.iter_mut().find(|tier| tier.name == one.name) {
                Some(tier) => {
                    tier.files += one.files;
                    tier.in_bytes += one.in_bytes;
                    tier.out_bytes += one.out_bytes;
                    tier.hits += one.hits;
                    tier.spills += one.spills;
                }
                None => summary.tiers.push(one),
            }
        }
        summary.at_risk_node_bytes =
            self.namespace.files.copies.at_risk_bytes(|device| device.survives() != Survives::Node);
        let now = self.mark();
        let begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner).get(&run).copied();
        let tail = begun.map_or(Duration::ZERO, |begun| begun.at.elapsed());
        summary.drain = DrainSummary {
            files: now.files,
            bytes: now.bytes,
            bytes_per_second: self.drain.average_bytes_per_second(),
            failures: self.drain.counters.failures.load(Ordering::Relaxed),
            corrupt: self.drain.counters.corrupt.load(Ordering::Relaxed),
            tail_ms: u64::try_from(tail.as_millis()).unwrap_or(u64::MAX),
            savings: self.namespace.base.store.savings(),
        };
        let counters = &self.namespace.base.counters;
        summary.mount = MountSummary {
            requests: self.door.requests.load(Ordering::Relaxed),
            service_ms: self.door.service_nanos.load(Ordering::Relaxed) / 1_000_000,
            direct_opens: counters.direct_opens.load(Ordering::Relaxed),
            mediated_opens: counters.mediated_opens.load(Ordering::Relaxed),
            mediated_read_bytes: counters.read_bytes.load(Ordering::Relaxed),
            mediated_write_bytes: counters.written_bytes.load(Ordering::Relaxed),
        };
        summary.no_room = trouble::refused_for_room(self, run);
        summary.refused = self.refusals.as_ref().map(|refusals| refusals.list()).unwrap_or_default();
        summary
    }

    fn figures(&self) -> Figures {
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let mut tiers: Vec<TierFigures> = Vec::new();
        let files = self.namespace.questions.files_on_devices();
        for device in self.namespace.base.tiers.devices() {
            let index = tiers.iter().position(|tier| tier.name == device.tier_name()).unwrap_or_else(|| {
                tiers.push(TierFigures { name: device.tier_name().to_owned(), ..TierFigures::default() });
                tiers.len() - 1
            });
            let counters = device.counters();
            tiers[index].files += files.get(&device.id()).copied().unwrap_or(0);
            tiers[index].evictions += load(&counters.evictions);
            tiers[index].evicted_bytes += load(&counters.evicted_bytes);
            tiers[index].errors += load(&counters.errors);
        }
        Figures {
            status: self.status(),
            summary: self.summary(None),
            tiers,
            drain: DrainFigures {
                copied_bytes: load(&self.drain.counters.staged_bytes),
                operations: load(&self.drain.counters.operations),
                conflicts: load(&self.drain.counters.conflicts),
            },
            store_lookups: load(&self.namespace.base.counters.store_stats),
            store_listings: load(&self.namespace.base.counters.store_lists),
            events: self.namespace.base.events.events(),
            pool: members::figures(self),
        }
    }

    fn evict(&self, path: &[u8]) -> Result<u64> {
        self.namespace.files.descriptors.catch_up();
        let mut freed = 0;
        for id in self.namespace.prefetch.files_below(path)? {
            freed += self.namespace.files.eviction.evict(id, "evicted because the user asked for it")?;
        }
        Ok(freed)
    }

    fn pin(&self, path: &[u8], on: bool) -> Result<()> {
        for id in self.namespace.prefetch.files_below(path)? {
            self.namespace.questions.pin(id, on);
        }
        Ok(())
    }

    fn hint(&self, hints: &[HintOf]) -> Listing<RefusedHint> {
        let given: Vec<_> = hints.iter().map(|one| (one.path.0.as_slice(), &one.hints)).collect();
        let mut refused = Listing::default();
        for (at, why) in self.namespace.hints.hint(&given) {
            refused.push(RefusedHint {
                path: hints.get(at).map_or_else(|| PathText(Vec::new()), |one| one.path.clone()),
                why,
            });
        }
        refused
    }

    fn refresh(&self) {
        self.namespace.revalidation.refresh_all();
    }

    fn prefetch(&self, patterns: &[Vec<u8>]) -> Result<Prefetch> {
        let mut done = Prefetch::default();
        for pattern in patterns {
            let pattern = StorePath(pattern.clone());
            for id in self.namespace.prefetch.files_matching(&pattern.0)? {
                if self.pool.as_ref().is_some_and(|pool| is_of_another(pool, id)) {
                    continue;
                }
                let bytes = self.namespace.prefetch.prefetch(id, &|| false)?;
                if bytes > 0 {
                    done.files += 1;
                    done.bytes += bytes;
                }
            }
        }
        Ok(done)
    }

    fn register_run(&self, pid: u32) -> RunId {
        self.runs.register(pid)
    }

    fn restore_run(&self, run: RunId, pid: u32) {
        self.runs.restore(run, pid);
    }

    fn record_run(&self, run: RunId, pid: u32, command: &str, again: bool) {
        if let Some(recorder) = &self.recorder {
            recorder.begin(run, pid, command, again);
        }
    }

    fn trace_run(&self, run: RunId) -> Result<()> {
        match &self.recorder {
            Some(recorder) if self.refusals.is_none() => {
                recorder.trace(run);
                Ok(())
            }
            _ => Err(Error::new("this run cannot be traced")
                .why("the directory is served without a mount, and what programs do with files that they have open is not seen")
                .remedy("`surgetank doctor` says what a mount needs; without --trace the run works")
                .data("nothing was begun")),
        }
    }

    fn account(&self, run: RunId, account: &Account) {
        if let Some(recorder) = &self.recorder {
            recorder.account(run, account);
        }
    }

    fn release_run(&self, run: RunId) -> Option<String> {
        let finish = |recorder: &Arc<Recorder>| {
            recorder.finish(run, Some(self.verdict(&Scope::run(run))), Some(self.summary(Some(run))))
        };
        let unrecorded = self.recorder.as_ref().and_then(finish);
        self.runs.release(run);
        unrecorded
    }

    fn scrub(&self, repair: bool) -> Audit {
        self.namespace.files.scrub.scrub(repair)
    }

    fn give_up_absent(&self) {
        self.namespace.give_up_absent();
    }

    fn forget_losses(&self) -> Listing<Lost> {
        self.namespace.losses.forget_losses()
    }

    fn shutdown(&self) {
        if let Some(recorder) = &self.recorder {
            recorder.end();
        }
        self.prefetcher.end();
        self.drain.stop();
        let all = self.namespace.emptying.finish();
        if !all {
            tracing::warn!("not everything is in the store; state and tiers are left for the next agent");
        }
        if let Err(why) = self.namespace.base.catalog.sync(self.namespace.base.catalog.position()) {
            tracing::warn!(%why, "the catalog could not be synced");
        }
    }
}
