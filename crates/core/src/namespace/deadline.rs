//! The end of the job is known: what is undrained stays so small that it is drained by then, at the speed at which the
//! drain was seen to work.
//!
//! Beyond that a new file is written to a temporary in the store, where it needs no copy to become durable, and an open one
//! that we mediate goes on there. When half of what fits is undrained, or the end is near, quiet periods and `last` lose
//! their effect. The danger it avoids: a scheduler that wipes the tiers while they hold what cannot be drained in time.

use std::time::{Duration, Instant};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashSet;

use surgetank_policy::config::{Deadline, Survives};
use surgetank_policy::placement::DirtyRoom;
use surgetank_types::clock;
use surgetank_types::model::{FileId, Mode};

use super::Namespace;

/// Before anything was measured: less than most shared file systems take.
const ASSUMED_BYTES_PER_SECOND: u64 = 32 << 20;
/// Of what the measured speed promises, so much is counted on: others use the store too.
const COUNTED_ON: f64 = 0.75;
/// A shorter time of work measures the clock rather than the store, unless much was moved in it.
const MEASURED_MIN: Duration = Duration::from_millis(100);
const MEASURED_BYTES_MIN: u64 = 64 << 20;
/// From this size on (in the mean) files tell how fast bytes are.
const LARGE_BYTES: u64 = 1 << 20;
/// So many leads before the end nothing waits any more for a better moment.
const NEAR_LEADS: u32 = 4;
/// What is never drained is looked for so often.
const KEPT_LOOK_EVERY: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(crate) struct End {
    pace: Mutex<Pace>,
    /// The job ends now: nothing new is begun on tiers that may be wiped.
    come: AtomicBool,
    /// Quiet periods and `last` have no effect, for want of time or of memory.
    late: AtomicBool,
    short_of_memory: AtomicBool,
    interrupted: Mutex<HashSet<FileId>>,
    /// Whoever looks after the memory rests here.
    pub resting: Mutex<()>,
    pub rested: surgetank_types::sync::Condvar,
    /// Bytes that the rules keep from the store, and when they were counted.
    kept_bytes: AtomicU64,
    kept_counted: Mutex<Option<Instant>>,
}

/// How fast files become durable, idle time left out. Small ones cost time each, large ones by their bytes: from what small
/// ones were seen to take nothing follows for large ones.
#[derive(Default)]
struct Pace {
    at_work: u32,
    since: Option<Instant>,
    worked: Duration,
    /// The same since the agent started, up to `since`.
    busy: Duration,
    bytes: u64,
    files: u32,
    bytes_per_second: Option<u64>,
    file_takes: Option<Duration>,
}

/// Somebody works for the drain as long as this lives.
pub(crate) struct Work<'a> {
    end: &'a End,
    bytes: u64,
    files: u32,
}

impl Work<'_> {
    pub fn copied(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.files += 1;
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        self.end.pace().leave(self.bytes, self.files, clock::tick());
    }
}

impl End {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn work(&self) -> Work<'_> {
        self.pace().enter(clock::tick());
        Work { end: self, bytes: 0, files: 0 }
    }
    /// How long the drain has worked since the agent started; idle time is left out.
    pub fn busy(&self) -> Duration {
        let pace = self.pace();
        pace.busy + pace.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
    pub fn is_hurried(&self) -> bool {
        self.late.load(Ordering::Relaxed) || self.short_of_memory.load(Ordering::Relaxed)
    }
    /// Files whose copies were given up because memory is short.
    pub fn interrupted(&self) -> MutexGuard<'_, HashSet<FileId>> {
        self.interrupted.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn press_for_memory(&self, namespace: &Namespace, on: bool) {
        if self.short_of_memory.swap(on, Ordering::Relaxed) != on && on {
            tracing::info!("memory is short: what is undrained there is due, and moved away");
            namespace.hasten();
        }
    }
}

impl Pace {
    fn enter(&mut self, now: Instant) {
        self.at_work += 1;
        self.since.get_or_insert(now);
    }

    fn leave(&mut self, bytes: u64, files: u32, now: Instant) {
        self.at_work = self.at_work.saturating_sub(1);
        self.bytes += bytes;
        self.files += files;
        if let Some(since) = self.since.take() {
            let worked = now.saturating_duration_since(since);
            self.worked += worked;
            self.busy += worked;
        }
        if self.at_work > 0 {
            self.since = Some(now);
        }
        if (self.worked >= MEASURED_MIN || self.bytes >= MEASURED_BYTES_MIN) && self.files > 0 {
            if self.bytes / u64::from(self.files) >= LARGE_BYTES {
                let seen = (self.bytes as f64 / self.worked.as_secs_f64().max(1e-6)) as u64;
                self.bytes_per_second = Some(self.bytes_per_second.map_or(seen, |before| before / 2 + seen / 2));
            } else {
                let seen = self.worked / self.files;
                self.file_takes = Some(self.file_takes.map_or(seen, |before| before / 2 + seen / 2));
            }
            (self.worked, self.bytes, self.files) = (Duration::ZERO, 0, 0);
        }
    }
}

/// How the end of the job looks from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    pub deadline: Deadline,
    /// Measured, or assumed where nothing was drained yet.
    pub bytes_per_second: u64,
    pub measured: bool,
    /// What can be drained from now until the end, with a margin.
    pub drainable_bytes: u64,
    /// What has to be.
    pub undrained_bytes: u64,
}

impl Namespace {
    /// The job ends: all is due, and nothing new is begun where it may be wiped.
    pub fn job_ends(&self) {
        self.end.come.store(true, Ordering::Relaxed);
        self.press(true);
    }

    /// Undrained bytes on tiers that go with the node, and at most; `None` where no end is known.
    pub(crate) fn room_until_the_end(&self) -> Option<DirtyRoom> {
        if self.end.come.load(Ordering::Relaxed) {
            return Some(DirtyRoom { bytes: self.wiped_bytes(), bytes_max: 0 });
        }
        let deadline = self.config.deadline.as_ref()?;
        Some(DirtyRoom { bytes: self.wiped_bytes(), bytes_max: self.drainable_bytes(deadline) })
    }

    pub fn outlook(&self) -> Option<Outlook> {
        let deadline = self.config.deadline.clone()?;
        let (bytes_per_second, measured) = self.bytes_per_second();
        let drainable_bytes = self.drainable_bytes(&deadline);
        Some(Outlook { bytes_per_second, measured, drainable_bytes, undrained_bytes: self.wiped_bytes(), deadline })
    }

    fn bytes_per_second(&self) -> (u64, bool) {
        let measured = self.end.pace().bytes_per_second;
        let limit = match self.config.drain_bytes_per_second_max {
            0 => u64::MAX,
            limit => limit,
        };
        (measured.unwrap_or(ASSUMED_BYTES_PER_SECOND).min(limit), measured.is_some())
    }

    fn drainable_bytes(&self, deadline: &Deadline) -> u64 {
        let file_takes = self.end.pace().file_takes.unwrap_or_default();
        // (With names and attributes, of which each takes less.)
        let files = u32::try_from(self.read_tree().ops.len()).unwrap_or(u32::MAX);
        let time = deadline.left().saturating_sub(deadline.lead).saturating_sub(file_takes.saturating_mul(files));
        (time.as_secs_f64() * self.bytes_per_second().0 as f64 * COUNTED_ON) as u64
    }

    /// What the end of the job would take, were it now. What the rules keep from the store does not hold up the rest.
    fn wiped_bytes(&self) -> u64 {
        let dirty: u64 = {
            let tree = self.read_tree();
            let wiped = self.tiers.devices().filter(|device| device.survives() != Survives::Node);
            wiped.map(|device| self.dirty_bytes_on(&tree, device)).sum()
        };
        dirty.saturating_sub(self.end.kept_bytes.load(Ordering::Relaxed))
    }

    /// Looked at in every poll.
    pub(crate) fn watch_the_end(&self) {
        if self.end.come.load(Ordering::Relaxed) {
            return;
        }
        let Some(deadline) = &self.config.deadline else { return };
        self.count_kept();
        let late = self.room_until_the_end().is_some_and(|room| room.bytes > room.bytes_max / 2);
        self.press(late || deadline.left() <= deadline.lead * NEAR_LEADS);
    }

    /// Nothing waits for a better moment, or everything may again.
    fn press(&self, on: bool) {
        if self.end.late.swap(on, Ordering::Relaxed) != on && on {
            self.hasten();
        }
    }

    /// What waits for a better moment is due. (What is queued from now on sees for itself.)
    fn hasten(&self) {
        {
            let mut tree = self.write_tree();
            let now = clock::tick();
            for op in tree.ops.values_mut() {
                op.last = false;
                // What was refused is tried again in its time.
                if op.failures == 0 {
                    op.due = op.due.min(now);
                }
            }
        }
        self.wake();
    }

    fn count_kept(&self) {
        let rules = self.config.rules.iter();
        if rules.into_iter().all(|rule| !matches!(rule.mode, Some(Mode::Keep | Mode::Remove)))
            && !self.read_tree().hints.any()
        {
            return;
        }
        let mut counted = self.end.kept_counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.is_some_and(|at| at.elapsed() < KEPT_LOOK_EVERY) {
            return;
        }
        *counted = Some(clock::tick());
        drop(counted);
        let kept = [Mode::Keep, Mode::Remove].into_iter().flat_map(|mode| self.kept(None, mode));
        self.end.kept_bytes.store(kept.map(|(_, _, bytes)| bytes).sum(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_of_work_and_not_of_waiting() {
        let mut pace = Pace::default();
        let start = clock::tick();
        let at = |millis| start + Duration::from_millis(millis);
        // Two at once, for a second, then an hour of nothing.
        pace.enter(at(0));
        pace.enter(at(100));
        pace.leave(40 << 20, 1, at(900));
        pace.leave(60 << 20, 1, at(1000));
        assert_eq!(pace.since, None);
        let before = pace.bytes_per_second.unwrap();
        pace.enter(at(3_600_000));
        pace.leave(10 << 20, 1, at(3_600_100));
        let after = pace.bytes_per_second.unwrap();
        assert!(after.abs_diff(before) <= before / 2 + (50 << 20), "{before} {after}");
        // Small and quick: not enough to tell.
        pace.enter(at(3_600_200));
        pace.leave(1, 1, at(3_600_201));
        assert_eq!(pace.bytes_per_second, Some(after));
        assert_eq!(pace.bytes, 1);
    }

    #[test]
    fn small_files_say_nothing_of_large_ones() {
        let mut pace = Pace::default();
        let start = clock::tick();
        pace.enter(start);
        pace.leave(100 << 20, 1, start + Duration::from_secs(1));
        let fast = pace.bytes_per_second;
        for number in 0..100 {
            pace.enter(start + Duration::from_millis(2000 + number * 10));
            pace.leave(20, 1, start + Duration::from_millis(2005 + number * 10));
        }
        assert_eq!(pace.bytes_per_second, fast);
        assert_eq!(pace.file_takes, Some(Duration::from_millis(5)));
    }
}
