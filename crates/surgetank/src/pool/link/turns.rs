//! Waits for the requests that began before a moment.
//!
//! The danger that this avoids: a request uses what was so before a change, and its end is not awaited.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Requests that began before and after a change, counted apart.
#[derive(Default)]
pub struct Turns {
    turn: AtomicUsize,
    counts: [AtomicUsize; 2],
    waits: Mutex<()>,
}

/// A request that is under way.
pub struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Turns {
    /// A request begins. What it depends on is to be looked up after this.
    pub fn enter(&self) -> UnderWay<'_> {
        loop {
            let turn = self.turn.load(Ordering::SeqCst);
            let count = &self.counts[turn & 1];
            count.fetch_add(1, Ordering::SeqCst);
            let under_way = UnderWay(count);
            // (Counted after the turn, it would not be waited for.)
            if self.turn.load(Ordering::SeqCst) == turn {
                return under_way;
            }
        }
    }

    /// Returns when the requests are done that began before, or when `stops` says so. Returns whether they are done.
    pub fn await_earlier(&self, stops: impl Fn() -> bool) -> bool {
        let _one = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let is_done = |turn: usize| {
            while self.counts[turn & 1].load(Ordering::SeqCst) > 0 {
                if stops() {
                    return false;
                }
                thread::sleep(Duration::from_micros(200));
            }
            true
        };
        // (Those for which an earlier wait has stopped: in the next turn they would be taken for new ones.)
        let turn = self.turn.load(Ordering::SeqCst);
        if !is_done(turn.wrapping_add(1)) {
            return false;
        }
        self.turn.store(turn.wrapping_add(1), Ordering::SeqCst);
        is_done(turn)
    }
}
