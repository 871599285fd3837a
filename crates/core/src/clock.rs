//! The only place that reads clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::model::Timestamp;

/// Wall-clock time for timestamps of files.
pub fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    Timestamp { nanos: i64::try_from(since.as_nanos()).unwrap_or(i64::MAX) }
}

/// Monotonic time for intervals.
pub fn tick() -> Instant {
    Instant::now()
}
