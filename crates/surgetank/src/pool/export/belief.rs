//! What other members believe of directories here: so long as a kernel may use an answer without asking again, a change
//! of the directory's name or attributes is not answered.
//!
//! The danger that this avoids: a member goes through a directory by a name that it has no more. No wait is for another
//! request: the kernel holds locks of directories meanwhile.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use surgetank_types::clock::tick;

/// By so much longer than asked a kernel may believe something: it counts in ticks.
const A_TICK: Duration = Duration::from_millis(10);
/// With more answers than this, old ones leave.
const ANSWERS_MAX: usize = 10_000;

#[derive(Debug)]
pub struct Beliefs {
    /// A kernel may use an answer for so long.
    ttl: Duration,
    given: Mutex<Given>,
}

#[derive(Debug, Default)]
struct Given {
    /// Changes so far.
    changes: u64,
    /// By node and member: when the last answer was given.
    answers: HashMap<(u64, u32), Instant>,
}

/// The changes before an answer was looked up.
#[derive(Debug, Clone, Copy)]
pub struct Before(u64);

impl Beliefs {
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, given: Mutex::default() }
    }

    /// An answer is looked up after this.
    pub fn before(&self) -> Before {
        Before(self.given().changes)
    }

    /// The member gets an answer about a directory. Returns how long it may be believed.
    pub fn give(&self, node: u64, member: u32, before: Before) -> Duration {
        let mut given = self.given();
        if given.changes != before.0 {
            // (It may be the one that has changed.)
            return Duration::ZERO;
        }
        let now = tick();
        if given.answers.len() >= ANSWERS_MAX {
            given.answers.retain(|_, at| now.saturating_duration_since(*at) <= self.ttl + A_TICK);
        }
        if given.answers.len() >= ANSWERS_MAX {
            return Duration::ZERO;
        }
        given.answers.insert((node, member), now);
        self.ttl
    }

    /// The directory has changed. Returns when no member believes an earlier answer, besides the one that changed it:
    /// its own kernel knows.
    pub fn await_end(&self, node: u64, changed_by: Option<u32>) {
        let last = {
            let mut given = self.given();
            given.changes += 1;
            let mut answers = Vec::new();
            given.answers.retain(|(of, member), at| {
                if *of == node && Some(*member) != changed_by {
                    answers.push(*at);
                }
                // (What the one that changed it knows may be wrong after the next change.)
                *of != node || Some(*member) == changed_by
            });
            answers.into_iter().max()
        };
        if let Some(left) = last.and_then(|at| (at + self.ttl + A_TICK).checked_duration_since(tick())) {
            thread::sleep(left);
        }
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_millis(80);

    fn time(job: impl FnOnce()) -> Duration {
        let begun = tick();
        job();
        tick().saturating_duration_since(begun)
    }

    #[test]
    fn change_waits_for_what_others_believe() {
        let beliefs = Beliefs::new(TTL);
        assert_eq!(beliefs.give(7, 2, beliefs.before()), TTL);
        assert_eq!(beliefs.give(8, 2, beliefs.before()), TTL);
        assert!(time(|| beliefs.await_end(7, Some(3))) >= TTL);
        // It is forgotten then, and the other directory was not asked about.
        assert!(time(|| beliefs.await_end(7, None)) < TTL);
        assert!(time(|| beliefs.await_end(9, None)) < TTL);
    }

    #[test]
    fn change_does_not_wait_for_its_own_member() {
        let beliefs = Beliefs::new(Duration::from_secs(60));
        beliefs.give(7, 2, beliefs.before());
        assert!(time(|| beliefs.await_end(7, Some(2))) < Duration::from_secs(30));
        // The next change waits for it.
        let beliefs = Beliefs::new(TTL);
        beliefs.give(7, 2, beliefs.before());
        beliefs.await_end(7, Some(2));
        assert!(time(|| beliefs.await_end(7, Some(3))) > TTL / 2);
    }

    #[test]
    fn answer_from_before_a_change_is_not_believed() {
        let beliefs = Beliefs::new(TTL);
        let before = beliefs.before();
        beliefs.await_end(7, None);
        assert_eq!(beliefs.give(7, 2, before), Duration::ZERO);
        assert_eq!(beliefs.give(7, 2, beliefs.before()), TTL);
    }
}
