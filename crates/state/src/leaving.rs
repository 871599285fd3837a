//! Files that are about to get a name at another member of the pool.
//!
//! The danger that this avoids: two programs rename one file, and both succeed. Programs use rename to
//! decide which of them does a task.

use std::time::{Duration, Instant};

use foldhash::HashMap;
use surgetank_types::model::FileId;

/// Who renames: the member, and the number of its program's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mover {
    /// The member.
    pub member: u32,
    /// The kernel's number of the request there.
    pub request: u64,
    /// It has asked before, perhaps another agent.
    pub again: bool,
}

/// So long a file keeps its names after its mover has last asked.
const HELD: Duration = Duration::from_secs(30);
/// By then movers have asked the next agent, too: they ask twice a second.
const ASKED_AGAIN: Duration = Duration::from_secs(2);

/// Files that are about to get a name at another member of the pool. Meanwhile no other request changes their names here.
#[derive(Debug, Default)]
pub struct Leaving {
    files: HashMap<FileId, (Mover, Instant)>,
    /// An earlier agent's movers have asked again by then.
    first_after: Option<Instant>,
}

impl Leaving {
    /// An earlier agent may have answered movers that this one does not know.
    pub fn had_earlier(&mut self, now: Instant) {
        self.first_after = Some(now + ASKED_AGAIN);
    }

    /// Keeps the names of a file for this mover, from now on or longer. `false`: another one has it, or may have.
    pub fn take(&mut self, id: FileId, mover: Mover, now: Instant) -> bool {
        self.files.retain(|_, (_, until)| *until > now);
        let is_his = |held: &Mover| (held.member, held.request) == (mover.member, mover.request);
        let may = match self.files.get(&id) {
            Some((held, _)) => is_his(held),
            None => mover.again || self.first_after.is_none_or(|after| after <= now),
        };
        if may {
            self.files.insert(id, (mover, now + HELD));
        }
        may
    }

    /// The mover has finished, or has given up.
    pub fn end(&mut self, id: FileId, mover: Mover) {
        if self.files.get(&id).is_some_and(|(held, _)| (held.member, held.request) == (mover.member, mover.request)) {
            self.files.remove(&id);
        }
    }

    /// Do some files keep their names?
    pub fn any(&self, now: Instant) -> bool {
        self.files.values().any(|(_, until)| *until > now)
    }

    /// Has this mover the file? Then it has it for longer.
    pub fn renew(&mut self, id: FileId, mover: Mover, now: Instant) -> bool {
        let is_his = |held: &Mover| (held.member, held.request) == (mover.member, mover.request);
        match self.files.get_mut(&id) {
            Some((held, until)) if is_his(held) && *until > now => {
                *until = now + HELD;
                true
            }
            _ => false,
        }
    }

    /// Do its names stay as they are?
    pub fn has(&self, id: FileId, now: Instant) -> bool {
        !self.files.is_empty() && self.files.get(&id).is_some_and(|(_, until)| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mover_has_a_file_until_it_ends_or_is_silent() {
        let (first, second) = (mover(1, 7), mover(2, 7));
        let (file, begin) = (FileId(9), Instant::now());
        let mut leaving = Leaving::default();
        assert!(leaving.take(file, first, begin));
        assert!(!leaving.take(file, second, begin));
        leaving.end(file, second);
        assert!(leaving.has(file, begin));
        assert!(leaving.take(file, first, begin + HELD / 2));
        assert!(!leaving.take(file, second, begin + HELD), "the first one has asked again");
        leaving.end(file, first);
        assert!(!leaving.has(file, begin + HELD));
        assert!(leaving.take(file, second, begin + HELD));
        assert!(leaving.take(file, first, begin + HELD * 3), "the second one was silent for too long");
    }

    #[test]
    fn next_agent_waits_for_the_movers_of_the_one_before() {
        let (file, begin) = (FileId(9), Instant::now());
        let mut leaving = Leaving::default();
        leaving.had_earlier(begin);
        assert!(!leaving.take(file, mover(2, 7), begin));
        assert!(leaving.take(file, Mover { again: true, ..mover(1, 7) }, begin));
        assert!(leaving.take(FileId(10), mover(2, 7), begin + ASKED_AGAIN));
    }

    fn mover(member: u32, request: u64) -> Mover {
        Mover { member, request, again: false }
    }
}
