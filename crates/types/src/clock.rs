//! The only place that reads clocks.

use std::num::NonZeroU32;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::model::Timestamp;

/// Wall-clock time for timestamps of files.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Timestamp { nanos: i64::try_from(since.as_nanos()).unwrap_or(i64::MAX) }
}

/// A moment of this process's life in milliseconds, small enough to keep one for each of a million files. It wraps after
/// 49 days: what is older than that seems young for once, and is looked at again one `store_ttl` later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(NonZeroU32);

impl Moment {
    pub fn now() -> Self {
        static BEGAN: OnceLock<Instant> = OnceLock::new();
        Self::after(BEGAN.get_or_init(tick).elapsed())
    }
    pub fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    fn after(age: Duration) -> Self {
        // The low bits are what is wanted.
        Self(NonZeroU32::new(age.as_millis() as u32).unwrap_or(NonZeroU32::MIN))
    }
    fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::from(self.0.get().wrapping_sub(earlier.0.get())))
    }
}

/// Monotonic time for intervals.
pub fn tick() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_stood_still_after_49_days() {
        let wraps = Duration::from_millis(1 << 32);
        for age in [Duration::ZERO, Duration::from_secs(1), wraps - Duration::from_millis(500), wraps * 3] {
            let later = Moment::after(age + Duration::from_secs(2));
            let since = later.since(Moment::after(age));
            assert!((1999..=2000).contains(&since.as_millis()), "{age:?}: {since:?}");
        }
    }
}
