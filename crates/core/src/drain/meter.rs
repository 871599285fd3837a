//! The current rate of the drain: the bytes of the last half second, or of the last piece where that takes longer.
//!
//! It measures where bytes pass, so the result does not depend on how often it is read. A time without bytes gives 0,
//! and does not lower the rate of later bytes.

use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::sync::{Mutex, PoisonError};

/// The length of the average.
const WINDOW: Duration = Duration::from_millis(500);
/// Without a piece for this long the rate is 0. (On a slow link one piece takes seconds.)
const PAUSE: Duration = Duration::from_secs(3);
/// Pieces that pass in less time give no rate.
const WINDOW_MIN: Duration = Duration::from_millis(20);

/// Measures the current rate of the drain.
#[derive(Debug, Default)]
pub struct Meter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The current window: begin, last piece, bytes after the piece that began it.
    window: Option<(Instant, Instant, u64)>,
    /// The rate of the window before.
    bytes_per_second: u64,
}

impl Meter {
    /// Counts `bytes` bytes that pass now.
    pub fn pass(&self, bytes: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).pass(bytes, clock::tick());
    }

    /// Bytes per second.
    pub fn rate(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).rate(clock::tick())
    }
}

impl State {
    fn pass(&mut self, bytes: u64, now: Instant) {
        match &mut self.window {
            Some((begun, last, passed)) if now.saturating_duration_since(*last) <= PAUSE => {
                *passed += bytes;
                *last = now;
                if now.saturating_duration_since(*begun) >= WINDOW {
                    self.bytes_per_second = over(*passed, now.saturating_duration_since(*begun));
                    self.window = Some((now, now, 0));
                }
            }
            // After a pause: how long this piece took is unknown.
            _ => *self = Self { window: Some((now, now, 0)), bytes_per_second: 0 },
        }
    }

    fn rate(&self, now: Instant) -> u64 {
        match self.window {
            Some((begun, last, passed)) if now.saturating_duration_since(last) <= PAUSE => {
                let elapsed = now.saturating_duration_since(begun);
                if self.bytes_per_second == 0 && elapsed >= WINDOW_MIN {
                    over(passed, elapsed)
                } else {
                    self.bytes_per_second
                }
            }
            _ => 0,
        }
    }
}

fn over(bytes: u64, time: Duration) -> u64 {
    (bytes as f64 / time.as_secs_f64().max(1e-6)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_after_a_pause_does_not_count_the_pause() {
        let mut state = State::default();
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        assert_eq!(state.rate(at(0)), 0);
        (0..=20).for_each(|piece| state.pass(1000, at(piece * 50)));
        assert_eq!(state.rate(at(1000)), 20_000, "20 pieces a second");
        assert_eq!(state.rate(at(5000)), 0, "nothing passes");
        // Regression: after an hour of rest the rate was `429 B/s` for a drain of 173 MiB.
        let later = 3_600_000;
        (0..=20).for_each(|piece| state.pass(1000, at(later + piece * 50)));
        assert_eq!(state.rate(at(later + 1000)), 20_000);
    }

    #[test]
    fn rate_of_pieces_slower_than_the_window_is_not_zero() {
        let mut state = State::default();
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        (0..=4).for_each(|piece| state.pass(1000, at(piece * 1000)));
        assert_eq!(state.rate(at(4500)), 1000);
    }
}
