//! Which threads serve: a thread needs a seat to read requests. One seat is enough, as long as requests do not wait.
//!
//! A thread whose request waits for another program or member gives its seat to a parked one ([`super::wait_long`]), and parks when
//! it is done. So threads that wait for work do not take requests from each other.
//!
//! Invariants: each thread's flag says whether it is counted in `taken`; both change under one lock. (A seat may be taken from a
//! thread that just begins to read: it reads one more request.) A free seat is taken by a parked thread, if there is one. The [`super::lookout`] sees to those that sleep without saying
//! so, and starts threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub struct Seats {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// So many threads may have a seat.
    wanted: usize,
    taken: usize,
    parked: usize,
}

impl Default for Seats {
    fn default() -> Self {
        Self { state: Mutex::new(State { wanted: 1, taken: 0, parked: 0 }), changed: Condvar::new() }
    }
}

impl Seats {
    /// Waits for a seat. Returns `false` without one if the thread is to leave. `has_seat`: the thread's flag.
    pub fn take(&self, has_seat: &AtomicBool, leaves: impl Fn() -> bool) -> bool {
        let mut state = self.state();
        state.parked += 1;
        while state.taken >= state.wanted && !leaves() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.parked -= 1;
        let is_free = state.taken < state.wanted;
        state.taken += usize::from(is_free);
        has_seat.store(is_free, Ordering::SeqCst);
        is_free
    }

    /// A thread has no seat any more.
    pub fn give(&self, has_seat: &AtomicBool) {
        let mut state = self.state();
        if has_seat.swap(false, Ordering::SeqCst) {
            state.taken -= 1;
            if state.parked > 0 {
                self.changed.notify_one();
            }
        }
    }

    /// The same, if there are more than are wanted. Returns whether it has none.
    pub fn has_none(&self, has_seat: &AtomicBool) -> bool {
        let mut state = self.state();
        if state.taken > state.wanted && has_seat.swap(false, Ordering::SeqCst) {
            state.taken -= 1;
        }
        !has_seat.load(Ordering::SeqCst)
    }

    pub fn wanted(&self) -> usize {
        self.state().wanted
    }

    pub fn want(&self, seats: usize) {
        self.state().wanted = seats.max(1);
        self.changed.notify_all();
    }

    /// How many threads wait for a seat.
    pub fn parked(&self) -> usize {
        self.state().parked
    }

    /// Parked threads look whether they are to leave.
    pub fn look(&self) {
        // (With the lock: none is between its look and its wait.)
        let _state = self.state();
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
