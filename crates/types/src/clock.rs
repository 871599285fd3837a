//! The only place that reads clocks: wall-clock time for files' timestamps, monotonic time for intervals.
//!
//! The danger that it avoids: an interval measured by a wall clock, which an administrator can set.

use std::num::NonZeroU32;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::model::Timestamp;

/// Wall-clock time, for timestamps of files. A clock before 1970 gives 0, one after 2262 the largest timestamp.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Timestamp { nanos: i64::try_from(since.as_nanos()).unwrap_or(i64::MAX) }
}

/// Milliseconds since the first call in this process, in 32 bits, because one is kept for each of up to a million files. The
/// value wraps after 49 days: an older moment then appears young, and its owner checks it again one `store_ttl` later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(NonZeroU32);

impl Moment {
    /// The present moment.
    pub fn now() -> Self {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        Self::after(BEGAN.get_or_init(tick).elapsed())
    }
    /// Time since this moment, exact to a millisecond, modulo 2³² ms.
    pub fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    fn after(age: Duration) -> Self {
        // The cast keeps the low 32 bits on purpose: the value wraps.
        Self(NonZeroU32::new(age.as_millis() as u32).unwrap_or(NonZeroU32::MIN))
    }
    fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::from(self.0.get().wrapping_sub(earlier.0.get())))
    }
}

/// Time since the machine started, with the time for which it slept (`CLOCK_BOOTTIME`): for leases.
pub fn uptime() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Monotonic time, for intervals.
pub fn tick() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Ages were compared as absolute values: after 49 days every interval was zero.
    #[test]
    fn moment_elapsed_after_wrap_stays_exact() {
        let wraps = Duration::from_millis(1 << 32);
        for age in [Duration::ZERO, Duration::from_secs(1), wraps - Duration::from_millis(500), wraps * 3] {
            let later = Moment::after(age + Duration::from_secs(2));
            let since = later.since(Moment::after(age));
            assert!((1999..=2000).contains(&since.as_millis()), "{age:?}: {since:?}");
        }
    }
}
