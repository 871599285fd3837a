//! What is known of the end of the job: whether the drain is short of time or memory, and the speed of the drain.
//! `files/deadline` decides by it.

use std::time::{Duration, Instant};

use foldhash::HashSet;

use surgetank_types::clock;
use surgetank_types::model::FileId;
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

/// A shorter period of work measures the clock rather than the store, unless many bytes were moved in it.
const MEASURED_MIN: Duration = Duration::from_millis(100);
const MEASURED_BYTES_MIN: u64 = 64 << 20;
/// From this mean size on, files show the speed of bytes.
const LARGE_BYTES: u64 = 1 << 20;

/// What is known of the end of the job, and the speed of the drain.
#[derive(Default)]
pub(crate) struct End {
    pace: Mutex<Pace>,
    /// The job ends now: no file is begun on a tier that may be wiped.
    pub(crate) come: AtomicBool,
    /// Quiet periods and `last` have no effect, for lack of time or memory.
    pub(crate) late: AtomicBool,
    pub(crate) short_of_memory: AtomicBool,
    interrupted: Mutex<HashSet<FileId>>,
    /// The thread that watches the memory sleeps here.
    pub resting: Mutex<()>,
    pub rested: surgetank_types::sync::Condvar,
    /// Bytes that the rules keep from the store, and the time of the count.
    pub(crate) kept_bytes: AtomicU64,
    pub(crate) kept_counted: Mutex<Option<Instant>>,
}

/// The speed at which files become durable, without idle time. Small files cost time each; large ones cost time by
/// their bytes. So the speed of small files says nothing about large ones.
#[derive(Default)]
pub(crate) struct Pace {
    at_work: u32,
    since: Option<Instant>,
    worked: Duration,
    /// The same since the agent started, up to `since`.
    busy: Duration,
    bytes: u64,
    files: u32,
    pub(crate) bytes_per_second: Option<u64>,
    pub(crate) file_takes: Option<Duration>,
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
    pub(crate) fn pace(&self) -> MutexGuard<'_, Pace> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_counts_work_without_waiting() {
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
