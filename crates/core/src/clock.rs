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

/// A moment of this process's life in milliseconds, small enough to keep one for each of a million files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(NonZeroU32);

impl Moment {
    pub fn now() -> Self {
        Self(NonZeroU32::MIN.saturating_add(age_ms()))
    }
    pub fn elapsed(self) -> Duration {
        Duration::from_millis(u64::from(age_ms().saturating_sub(self.0.get() - 1)))
    }
}

fn age_ms() -> u32 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    u32::try_from(BEGAN.get_or_init(tick).elapsed().as_millis()).unwrap_or(u32::MAX - 1)
}

/// Monotonic time for intervals.
pub fn tick() -> Instant {
    Instant::now()
}
