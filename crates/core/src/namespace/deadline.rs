//! The deadline: the end of the job is known. The undrained bytes stay few enough that the drain can bring them to the
//! store in time, at its measured speed.
//!
//! Beyond that limit a new file goes to a temporary in the store, where it needs no copy to become durable. An open
//! mediated file moves there. When half of the limit is undrained, or the end is near, quiet periods and `last` lose
//! their effect.
//!
//! The danger that this avoids: a scheduler wipes the tiers while they hold files that cannot be drained in time.

use std::time::{Duration, Instant};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::HashSet;

use surgetank_policy::config::{Deadline, Survives};
use surgetank_policy::placement::DirtyRoom;
use surgetank_types::clock;
use surgetank_types::model::{FileId, Mode};

use super::Namespace;

/// The speed before any measurement: below that of most shared file systems.
const ASSUMED_BYTES_PER_SECOND: u64 = 32 << 20;
/// The share of the measured speed that is counted on: other jobs use the store too.
const COUNTED_ON: f64 = 0.75;
/// A shorter period of work measures the clock rather than the store, unless many bytes were moved in it.
const MEASURED_MIN: Duration = Duration::from_millis(100);
const MEASURED_BYTES_MIN: u64 = 64 << 20;
/// From this mean size on, files show the speed of bytes.
const LARGE_BYTES: u64 = 1 << 20;
/// At this many leads before the end, no operation waits for a better moment.
const NEAR_LEADS: u32 = 4;
/// How often files that are never drained are counted.
const KEPT_LOOK_EVERY: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(crate) struct End {
    pace: Mutex<Pace>,
    /// The job ends now: no file is begun on a tier that may be wiped.
    come: AtomicBool,
    /// Quiet periods and `last` have no effect, for lack of time or memory.
    late: AtomicBool,
    short_of_memory: AtomicBool,
    interrupted: Mutex<HashSet<FileId>>,
    /// The thread that watches the memory sleeps here.
    pub resting: Mutex<()>,
    pub rested: surgetank_types::sync::Condvar,
    /// Bytes that the rules keep from the store, and the time of the count.
    kept_bytes: AtomicU64,
    kept_counted: Mutex<Option<Instant>>,
}

/// The speed at which files become durable, without idle time. Small files cost time each; large ones cost time by
/// their bytes. So the speed of small files says nothing about large ones.
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

/// A thread works for the drain while this value exists.
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
    /// The drain's working time since the agent started, without idle time.
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

/// The present outlook for the end of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    pub deadline: Deadline,
    /// Measured, or assumed before the first measurement.
    pub bytes_per_second: u64,
    pub measured: bool,
    /// The bytes that can be drained until the end, with a margin.
    pub drainable_bytes: u64,
    /// The bytes that have to be drained until then.
    pub undrained_bytes: u64,
}

impl Namespace {
    /// The job ends: all operations are due, and no file is begun where it may be wiped.
    pub fn job_ends(&self) {
        self.end.come.store(true, Ordering::Relaxed);
        self.press(true);
    }

    /// Undrained bytes on tiers that are wiped with the node, and their limit; `None` if no end is known.
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
        // This counts names and attributes too, each of which takes less.
        let files = u32::try_from(self.read_tree().ops.len()).unwrap_or(u32::MAX);
        let time = deadline.left().saturating_sub(deadline.lead).saturating_sub(file_takes.saturating_mul(files));
        (time.as_secs_f64() * self.bytes_per_second().0 as f64 * COUNTED_ON) as u64
    }

    /// The undrained bytes that an end of the job would wipe now. Files that the rules keep from the store do not count.
    fn wiped_bytes(&self) -> u64 {
        let dirty: u64 = {
            let tree = self.read_tree();
            let wiped = self.tiers.devices().filter(|device| device.survives() != Survives::Node);
            wiped.map(|device| self.dirty_bytes_on(&tree, device)).sum()
        };
        dirty.saturating_sub(self.end.kept_bytes.load(Ordering::Relaxed))
    }

    /// Called in every poll.
    pub(crate) fn watch_the_end(&self) {
        if self.end.come.load(Ordering::Relaxed) {
            return;
        }
        let Some(deadline) = &self.config.deadline else { return };
        self.count_kept();
        let late = self.room_until_the_end().is_some_and(|room| room.bytes > room.bytes_max / 2);
        self.press(late || deadline.left() <= deadline.lead * NEAR_LEADS);
    }

    /// Operations do not wait for a better moment any more (`on`), or may again.
    fn press(&self, on: bool) {
        if self.end.late.swap(on, Ordering::Relaxed) != on && on {
            self.hasten();
        }
    }

    /// Makes waiting operations due. (Later ones are checked when they are queued.)
    fn hasten(&self) {
        {
            let mut tree = self.write_tree();
            let now = clock::tick();
            for op in tree.ops.values_mut() {
                op.last = false;
                // A refused operation keeps its time for the next try.
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
        // Two at once, for a second, then an hour of idle time.
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
        // Small and quick: not enough for a measurement.
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
