//! Keeps the drain below a rate that the user set for the shared store.

use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::sync::{Mutex, PoisonError};

#[derive(Debug)]
pub struct Throttle {
    bytes_per_second_max: u64,
    /// The time at which the bytes so far are within the rate.
    paid: Mutex<Instant>,
}

/// This much may be ahead of the rate, so that small files do not sleep one by one.
const BURST: Duration = Duration::from_millis(100);
/// A copy that is no longer wanted must not hold its thread, nor the agent's end, until its time has come.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Throttle {
    pub fn new(bytes_per_second_max: u64) -> Self {
        Self { bytes_per_second_max, paid: Mutex::new(clock::tick()) }
    }

    /// Waits until these bytes fit under the rate, or are no longer wanted.
    pub fn pass(&self, bytes: u64, is_wanted: &dyn Fn() -> bool) {
        if self.bytes_per_second_max == 0 {
            return;
        }
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second_max as f64);
        let until = {
            let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
            *paid = (*paid).max(clock::tick()) + cost;
            *paid
        };
        loop {
            let ahead = until.saturating_duration_since(clock::tick());
            if ahead <= BURST || !is_wanted() {
                return;
            }
            surgetank_types::sync::thread::sleep((ahead - BURST).min(LOOK_EVERY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_keeps_below_the_rate() {
        let throttle = Throttle::new(10_000_000);
        let start = clock::tick();
        for _ in 0..10 {
            throttle.pass(500_000, &|| true);
        }
        // 5 MB at 10 MB/s take 500 ms, less the burst.
        assert!(start.elapsed() >= Duration::from_millis(390));
    }

    #[test]
    fn throttle_without_a_limit_never_waits() {
        let throttle = Throttle::new(0);
        let start = clock::tick();
        throttle.pass(u64::MAX, &|| true);
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
