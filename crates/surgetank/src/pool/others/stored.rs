//! Up to which moment each other member had everything in the store. What its own programs did after that may be undone if it is
//! lost: no other node has a list of it.
//!
//! Each member asks the next one every few seconds. After a loss the one before the lost member knows, and the others ask.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use surgetank_core::report::{Undone, Verdict};
use surgetank_types::clock::{now, tick};

use super::super::call::{Answer, Ask, Call};
use super::super::link::Link;

/// So long all members that are asked may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// So long the pool's process of this node may take.
const OF_PROCESS: Duration = Duration::from_secs(1);

/// What is known, by member: nanoseconds, Unix.
#[derive(Debug, Default)]
pub struct Stored {
    known: Mutex<BTreeMap<u32, u64>>,
    /// Lost members about which the others were asked.
    asked: Mutex<BTreeSet<u32>>,
}

impl Stored {
    /// 0: it is not known.
    pub fn of(&self, member: u32) -> u64 {
        self.hold().get(&member).copied().unwrap_or_default()
    }

    fn note(&self, member: u32, nanos: u64) {
        let mut known = self.hold();
        let last = known.entry(member).or_default();
        *last = nanos.max(*last);
    }

    fn hold(&self) -> MutexGuard<'_, BTreeMap<u32, u64>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the member after this one.
    pub fn look_at_next(&self, link: &Link) {
        let Ok(status) = link.status(OF_PROCESS) else { return };
        let members: Vec<u32> = status.members.iter().map(|one| one.member).collect();
        let Some(next) = next_after(link.member(), &members) else { return };
        let asked = nanos();
        let until = tick() + PATIENCE;
        let call = Call { uid: 0, gid: 0, ask: Ask::OldestAge };
        match link.call(next, &call, None, &mut |_| tick() < until) {
            Ok(Answer::Count(age_ms)) if age_ms != u64::MAX => {
                self.note(next, asked.saturating_sub(age_ms.saturating_mul(1_000_000)));
            }
            _ => {}
        }
    }

    /// Adds what programs of lost members may have lost.
    pub fn with_verdict(&self, link: &Link, verdict: &mut Verdict) {
        if link.losses() == 0 {
            return;
        }
        let Ok(status) = link.status(OF_PROCESS) else { return };
        for lost in &status.lost {
            let living = status.members.iter().map(|one| one.member).filter(|member| *member != link.member());
            let until = self.of_lost(link, lost.member, living);
            let since_unix_seconds = (until != 0).then_some(until / 1_000_000_000);
            verdict.perhaps_undone.push(Undone {
                member: lost.member,
                address: lost.address.clone(),
                since_unix_seconds,
            });
        }
    }

    fn of_lost(&self, link: &Link, lost: u32, living: impl Iterator<Item = u32>) -> u64 {
        let asked = || self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if self.of(lost) != 0 || asked().contains(&lost) {
            return self.of(lost);
        }
        let until = tick() + PATIENCE;
        let mut have_answered = true;
        for member in living {
            let call = Call { uid: 0, gid: 0, ask: Ask::StoredUntil { member: lost } };
            match link.call(member, &call, None, &mut |_| tick() < until) {
                Ok(Answer::Count(nanos)) => self.note(lost, nanos),
                _ => have_answered = false,
            }
        }
        if have_answered {
            asked().insert(lost);
        }
        self.of(lost)
    }
}

fn nanos() -> u64 {
    u64::try_from(now().nanos).unwrap_or(0)
}

/// The members are a ring, in the order of their numbers.
fn next_after(me: u32, members: &[u32]) -> Option<u32> {
    let others = || members.iter().copied().filter(|member| *member != me);
    others().filter(|member| *member > me).min().or_else(|| others().min())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_member_asks_another_one() {
        let members = [1, 3, 4, 9];
        assert_eq!(members.map(|me| next_after(me, &members)), [Some(3), Some(4), Some(9), Some(1)]);
        assert_eq!((next_after(5, &[5]), next_after(5, &[])), (None, None));
    }

    #[test]
    fn earlier_moment_changes_nothing() {
        let stored = Stored::default();
        stored.note(3, 20);
        stored.note(3, 10);
        assert_eq!((stored.of(3), stored.of(4)), (20, 0));
    }
}
