//! A store in trouble: how long the drain waits before a retry, and since when it makes no progress.
//!
//! - An operation whose own file or name fails is retried by itself, later each time.
//! - When the store as a whole is away, the drain pauses. That means: no server, no connection, read-only, or
//!   operations of several files failed in a row.
//! - A pause hands out nothing until a time that moves further away with each failure; then one operation alone is
//!   tried.
//!
//! The danger that it avoids: many nodes return to one store at the same time. So each wait is longer by a random part
//! that differs between processes.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use surgetank_store::verdict;
use surgetank_store::verdict::Verdict;
use surgetank_types::clock;
use surgetank_types::error::Errno;
use surgetank_types::model::Seq;
use surgetank_types::sync::thread::ThreadId;
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// After so many different operations failed with none done in between, the store as a whole is away.
const ROW: usize = 3;

#[derive(Default)]
pub(super) struct Pause {
    state: Mutex<State>,
    random: RandomState,
    /// The threads in a call of the store, and since when each made no progress: by the monotonic clock, and by the
    /// displayed one.
    calls: Mutex<HashMap<ThreadId, (Instant, i64)>>,
}

#[derive(Default)]
struct State {
    /// The first failure after which no operation succeeded, and its time by the wall clock.
    since: Option<(Instant, i64)>,
    row: Vec<Seq>,
    tries: u32,
    until: Option<Instant>,
}

/// What the queue may hand out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum May {
    All,
    /// One operation, to test whether the store is back.
    One,
    Nothing(Duration),
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The errors that concern the whole store, whatever was asked.
fn is_away(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::TIMEDOUT
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::NETRESET
            | Errno::CONNREFUSED
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::NOTCONN
            | Errno::SHUTDOWN
            | Errno::NODEV
            | Errno::NXIO
            | Errno::NOMEDIUM
            | Errno::ROFS
            | Errno::KEYEXPIRED
            | Errno::NOKEY
            | Errno::KEYREVOKED
    )
}

/// May it have been done, and only the answer have been lost?
pub(super) fn may_be_done(errno: Errno) -> bool {
    errno != Errno::ROFS && is_away(errno) || matches!(errno, Errno::IO | Errno::REMOTEIO | Errno::STALE | Errno::INTR)
}

impl Pause {
    /// The wait of an operation after so many failures.
    pub fn back_off(&self, seq: Seq, failures: u32) -> Duration {
        let factor = 1_u32 << failures.min(10).saturating_sub(1);
        let wait = (RETRY_FIRST * factor).min(RETRY_MAX);
        let random = self.random.hash_one((seq.number(), failures)) as u32;
        wait + wait.mul_f64(f64::from(random) / f64::from(u32::MAX) / 2.0)
    }

    /// The time of the next try. The last try, at `last`, is not put off: a program waits for it.
    pub fn next_try(&self, seq: Seq, failures: u32, now: Instant, last: Instant) -> Instant {
        let due = now + self.back_off(seq, failures);
        if now < last { due.min(last) } else { due }
    }

    pub fn failed(&self, seq: Seq, errno: Errno) {
        let mut state = locked(&self.state);
        state.since.get_or_insert_with(|| (clock::tick(), clock::now().secs()));
        // Room is freed file by file, and each refusal concerns one file.
        if matches!(errno, Errno::NOSPC | Errno::DQUOT)
            || !is_away(errno) && verdict::classify(errno) == Verdict::Refuse
        {
            return;
        }
        if !state.row.contains(&seq) && state.row.len() < ROW {
            state.row.push(seq);
        }
        if is_away(errno) || state.row.len() >= ROW {
            // Operations that were handed out together fail together.
            if state.until.is_none_or(|until| until <= clock::tick()) {
                state.tries += 1;
                state.until = Some(clock::tick() + self.back_off(Seq::new(0), state.tries));
            }
        }
    }

    /// An operation succeeded.
    pub fn succeeded(&self) {
        *locked(&self.state) = State::default();
    }

    /// A user waits: the next try is immediate.
    pub fn hurry(&self) {
        let mut state = locked(&self.state);
        (state.tries, state.until) = (0, None);
        state.row.clear();
    }

    pub fn may(&self) -> May {
        match locked(&self.state).until {
            None => May::All,
            Some(until) => match until.saturating_duration_since(clock::tick()) {
                Duration::ZERO => May::One,
                left => May::Nothing(left),
            },
        }
    }

    /// How long the whole store has been away.
    pub fn away_for(&self) -> Option<Duration> {
        let state = locked(&self.state);
        state.until.and(state.since).map(|(since, _)| since.elapsed())
    }

    pub fn since_unix_seconds(&self) -> Option<i64> {
        locked(&self.state).since.map(|(_, at)| at)
    }

    // ---- calls that may hang

    pub fn call<T>(&self, act: impl FnOnce() -> T) -> T {
        self.moved();
        let done = act();
        self.rests();
        done
    }

    /// This thread waits for something other than the store.
    pub fn rests(&self) {
        locked(&self.calls).remove(&surgetank_types::sync::thread::current().id());
    }

    /// This thread's call made progress: a part of a copy.
    pub fn moved(&self) {
        locked(&self.calls).insert(surgetank_types::sync::thread::current().id(), (clock::tick(), clock::now().secs()));
    }

    /// How long the longest waiting call has made no progress.
    pub fn hangs_for(&self) -> Option<Duration> {
        self.hangs_since().map(|(since, _)| since.elapsed())
    }

    pub fn hangs_since(&self) -> Option<(Instant, i64)> {
        locked(&self.calls).values().copied().min_by_key(|(since, _)| *since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_get_longer_and_are_bounded() {
        let pause = Pause::default();
        for failures in 1..40 {
            let least = (RETRY_FIRST * (1 << failures.min(10_u32).saturating_sub(1))).min(RETRY_MAX);
            let wait = pause.back_off(Seq::new(7), failures);
            assert!(wait >= least && wait <= least + least / 2, "{failures}: {wait:?}");
        }
    }

    /// Regression: the pause before the last try took as long as all before it.
    #[test]
    fn last_try_is_when_the_retry_time_ends() {
        let pause = Pause::default();
        let first = clock::tick();
        let last = first + Duration::from_secs(5);
        let (mut now, mut tries) = (first, 0);
        while now < last {
            tries += 1;
            now = pause.next_try(Seq::new(7), tries, now, last);
        }
        assert_eq!(now, last);
        assert!((5..=6).contains(&tries), "{tries} tries");
        // A later operation has its own pause.
        assert!(pause.next_try(Seq::new(7), tries, last, last) > last);
    }

    /// Regression: the random part of a wait was a hash of the operation's number, so all nodes retried at the same
    /// time.
    #[test]
    fn retry_waits_differ_between_nodes() {
        let waits = |pause: &Pause| (1..9).map(|failures| pause.back_off(Seq::new(1), failures)).collect::<Vec<_>>();
        assert_ne!(waits(&Pause::default()), waits(&Pause::default()));
    }

    #[test]
    fn unavailable_store_gets_one_request_at_a_time() {
        let pause = Pause::default();
        pause.failed(Seq::new(1), Errno::NOSPC);
        pause.failed(Seq::new(2), Errno::IO);
        pause.failed(Seq::new(2), Errno::IO);
        assert_eq!(pause.may(), May::All, "one file's trouble");
        assert!(pause.since_unix_seconds().is_some());
        pause.succeeded();
        assert_eq!(pause.since_unix_seconds(), None);
        pause.failed(Seq::new(3), Errno::TIMEDOUT);
        assert!(matches!(pause.may(), May::Nothing(_)));
        pause.succeeded();
        for seq in 1..=ROW as u64 {
            pause.failed(Seq::new(seq), Errno::IO);
        }
        assert!(matches!(pause.may(), May::Nothing(_)));
        pause.hurry();
        assert_eq!(pause.may(), May::All);
    }
}
