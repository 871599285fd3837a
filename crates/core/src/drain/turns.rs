//! Publications that run together and still show one after the other: each does its work before its turn, and its last
//! step in its turn.
//!
//! The danger that it avoids: a later publication shows before an earlier one. When one fails, those behind it never
//! get their turn.

use std::io;

use surgetank_store::TakesTurn;
use surgetank_types::error::Errno;
use surgetank_types::sync::atomic::{AtomicBool, Ordering};
use surgetank_types::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct State {
    /// The number whose turn it is.
    next: usize,
    /// The first number that failed; those behind it do not get their turn.
    failed: Option<usize>,
}

/// More than run together, so the one that passes wakes only the next. (To wake all for each file took a tenth of the
/// processor's time with 10,000 small files.)
const DOORS: usize = 32;

#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    /// Number N waits at the door N modulo DOORS.
    doors: [Condvar; DOORS],
}

/// One turn; if it is dropped without a result, it has failed.
pub(super) struct Ticket<'a> {
    turns: &'a Turns,
    number: usize,
    passed: AtomicBool,
}

impl Turns {
    pub fn of(&self, number: usize) -> Ticket<'_> {
        Ticket { turns: self, number, passed: AtomicBool::new(false) }
    }

    fn door(&self, number: usize) -> &Condvar {
        &self.doors[number % DOORS]
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TakesTurn for Ticket<'_> {
    /// Waits until all before it show. ECANCELED: one of them will not.
    fn wait(&self) -> io::Result<()> {
        let mut state = self.turns.state();
        while state.next < self.number && state.failed.is_none_or(|failed| failed > self.number) {
            state = self.turns.door(self.number).wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.next >= self.number { Ok(()) } else { Err(Errno::CANCELED.into()) }
    }

    fn pass(&self) {
        if self.passed.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut state = self.turns.state();
        state.next = state.next.max(self.number + 1);
        let next = state.next;
        drop(state);
        self.turns.door(next).notify_all();
    }
}

impl Ticket<'_> {
    pub fn has_come(&self) -> bool {
        self.turns.state().next >= self.number
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if !*self.passed.get_mut() {
            let mut state = self.turns.state();
            state.failed = Some(state.failed.map_or(self.number, |failed| failed.min(self.number)));
            drop(state);
            self.turns.doors.iter().for_each(Condvar::notify_all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use surgetank_store::at_once;

    #[test]
    fn turns_come_in_order_until_one_fails() {
        let (turns, order) = (Turns::default(), Mutex::new(Vec::new()));
        at_once(100, 8, &|index| {
            let turn = turns.of(index);
            if turn.wait().is_err() || index == 60 {
                return Ok(());
            }
            assert!(turn.has_come());
            order.lock().unwrap().push(index);
            turn.pass();
            Ok(())
        })
        .unwrap();
        assert_eq!(*order.lock().unwrap(), (0..60).collect::<Vec<_>>());
    }

    /// Regression: a failure behind it cancelled the wait. The turn came nevertheless, and the drain took the
    /// cancellation for the store's refusal.
    #[test]
    fn waiting_turn_is_not_cancelled_by_a_later_failure() {
        let turns = Turns::default();
        std::thread::scope(|scope| {
            let first = turns.of(0);
            let second = scope.spawn(|| {
                let turn = turns.of(1);
                let waited = turn.wait();
                turn.pass();
                waited
            });
            drop(turns.of(2));
            std::thread::sleep(std::time::Duration::from_millis(50));
            first.pass();
            second.join().unwrap().unwrap();
        });
        assert!(turns.of(3).wait().is_err());
    }

    #[test]
    fn failure_before_its_turn_leaves_earlier_turns() {
        let turns = Turns::default();
        drop(turns.of(2));
        for number in 0..2 {
            let turn = turns.of(number);
            turn.wait().unwrap();
            turn.pass();
        }
        let last = turns.of(3);
        assert!(!last.has_come());
        assert_eq!(last.wait().unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    }
}
