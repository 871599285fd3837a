//! How fast a device is filled and how busy it is, derived from its counters.

use std::time::{Duration, Instant};

const START_MEMORY_BYTES_PER_SECOND: u64 = 4_000_000_000;
const START_DISK_BYTES_PER_SECOND: u64 = 2_000_000_000;
/// A shorter interval measures the clock rather than the device.
const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// The bytes of a direct writer are counted when it closes; a whole file at once is not a bandwidth.
const BANDWIDTH_OVER_START_MAX: u64 = 4;

/// `bandwidth` is one writer's. It protects free space, so it is never below its start, rises at once to the measured value and
/// falls slowly (by 1/32 a poll). `load` is that of all programs. It distributes work, so it follows quickly (by half).
#[derive(Debug, Clone)]
pub(super) struct Rate {
    start_bytes_per_second: u64,
    bandwidth_bytes_per_second: u64,
    load_bytes_per_second: u64,
    last: Option<(u64, u64, Instant)>,
}

impl Rate {
    pub fn new(in_memory: bool) -> Self {
        let start_bytes_per_second =
            if in_memory { START_MEMORY_BYTES_PER_SECOND } else { START_DISK_BYTES_PER_SECOND };
        Self {
            start_bytes_per_second,
            bandwidth_bytes_per_second: start_bytes_per_second,
            load_bytes_per_second: 0,
            last: None,
        }
    }

    pub fn bandwidth_bytes_per_second(&self) -> u64 {
        self.bandwidth_bytes_per_second
    }
    pub fn load_bytes_per_second(&self) -> u64 {
        self.load_bytes_per_second
    }

    /// Records the totals so far and the number of possible writers; called with every poll.
    pub fn measure(&mut self, bytes_in: u64, bytes_out: u64, writers: u32, now: Instant) {
        let Some((last_in, last_out, last_at)) = self.last else {
            self.last = Some((bytes_in, bytes_out, now));
            return;
        };
        let interval = now.duration_since(last_at);
        if interval < INTERVAL_MIN {
            return;
        }
        self.last = Some((bytes_in, bytes_out, now));
        let per_second = |bytes: u64| {
            let rate = u128::from(bytes) * 1_000_000 / interval.as_micros().max(1);
            u64::try_from(rate).unwrap_or(u64::MAX)
        };
        let rate_in = per_second(bytes_in.saturating_sub(last_in));
        let rate_out = per_second(bytes_out.saturating_sub(last_out));
        let one_writer = rate_in / u64::from(writers.max(1));
        let most = self.start_bytes_per_second.saturating_mul(BANDWIDTH_OVER_START_MAX);
        let faded = self.bandwidth_bytes_per_second - self.bandwidth_bytes_per_second / 32;
        self.bandwidth_bytes_per_second = one_writer.min(most).max(faded).max(self.start_bytes_per_second);
        self.load_bytes_per_second = self.load_bytes_per_second / 2 + rate_in.saturating_add(rate_out) / 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_rises_at_once_and_falls_to_its_start() {
        let mut now = surgetank_types::clock::tick();
        let mut rate = Rate::new(false);
        rate.measure(0, 0, 0, now);
        now += Duration::from_millis(100);
        rate.measure(600_000_000, 0, 1, now);
        assert_eq!(rate.bandwidth_bytes_per_second(), 6_000_000_000);
        assert_eq!(rate.load_bytes_per_second(), 3_000_000_000);
        for _ in 0..300 {
            now += Duration::from_millis(100);
            rate.measure(600_000_000, 0, 0, now);
        }
        assert_eq!(rate.bandwidth_bytes_per_second(), START_DISK_BYTES_PER_SECOND);
        assert_eq!(rate.load_bytes_per_second(), 0);
        // Three writers share the measured rate; a file of a terabyte that closes is not a bandwidth.
        now += Duration::from_millis(100);
        rate.measure(600_000_000 + 900_000_000, 0, 3, now);
        assert_eq!(rate.bandwidth_bytes_per_second(), 3_000_000_000);
        now += Duration::from_millis(100);
        rate.measure(1 << 40, 0, 0, now);
        assert_eq!(rate.bandwidth_bytes_per_second(), 8_000_000_000);
    }
}
