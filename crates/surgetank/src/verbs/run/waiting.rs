//! Reports programs that wait because no tier or store has room; without the report a user would seek the fault in the
//! programs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use surgetank_core::report::Trouble;
use surgetank_types::clock;

use crate::agent::client::Connection;
use crate::agent::line::{self, Broken};
use crate::agent::wire::{Answer, Request};

const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The limit per report; the other programs wait for the same room.
const TOLD_MAX: usize = 3;

pub struct Waiting {
    next: Instant,
    /// The reported programs, with the second since which each waits.
    reported: BTreeSet<(Vec<u8>, i64)>,
    /// The time of the question that is not answered yet.
    asked: Option<Instant>,
    stopped: Option<Instant>,
    silent: bool,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { next: clock::tick() + LOOK_EVERY, reported: BTreeSet::new(), asked: None, stopped: None, silent: false }
    }
}

impl Waiting {
    /// The time of the next question.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Asks, and does not wait for the answer: the command's signals come first.
    pub fn look(&mut self, agent: &mut Connection) {
        self.next = clock::tick() + LOOK_EVERY;
        if agent.has_answered() {
            self.asked = Some(clock::tick());
            // (Other code notices a dying agent.)
            let _ = agent.send(&Request::Waiting);
            return;
        }
        let is_stopped = matches!(line::process_state(agent.pid), Some('T' | 't'));
        self.stopped = self.stopped.filter(|_| is_stopped).or_else(|| is_stopped.then(clock::tick));
        let asked = *self.asked.get_or_insert_with(clock::tick);
        let stopped = self.stopped.is_some_and(|since| since.elapsed() >= line::STOPPED_PATIENCE);
        if !self.silent && (stopped || asked.elapsed() >= line::BUSY_PATIENCE) {
            self.silent = true;
            eprintln!("surgetank: {}", agent.described(Broken::Silent(asked.elapsed())));
        }
    }

    /// The agent has not answered in time.
    pub fn is_silent(&self) -> bool {
        self.silent
    }

    pub fn answered(&mut self, answer: &Answer) {
        self.asked = None;
        if std::mem::take(&mut self.silent) {
            eprintln!("surgetank: the agent answers again");
        }
        if let Answer::Waiting(waiting) = answer {
            for line in self.lines(waiting) {
                eprintln!("surgetank: {line}");
            }
        }
    }

    fn lines(&mut self, waiting: &[Trouble]) -> Vec<String> {
        if waiting.is_empty() {
            let over = !std::mem::take(&mut self.reported).is_empty();
            return over.then(|| "there is room again: no program waits any more".to_owned()).into_iter().collect();
        }
        let mut lines = Vec::new();
        for trouble in waiting.iter().take(TOLD_MAX) {
            let path = trouble.path.as_ref().map_or(&[][..], |path| &path.0);
            if self.reported.insert((path.to_vec(), trouble.since_unix_seconds)) {
                lines.push(format!("{}: {}", String::from_utf8_lossy(path), trouble.reason));
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble(path: &str, since_unix_seconds: i64) -> Trouble {
        let path = Some(surgetank_core::report::PathText(path.into()));
        Trouble { path, place: "store".into(), reason: "a writer waits".into(), since_unix_seconds }
    }

    #[test]
    fn each_wait_and_its_end_are_reported_once() {
        let mut waiting = Waiting::default();
        assert_eq!(waiting.lines(&[]), [""; 0], "nobody waited");
        assert_eq!(waiting.lines(&[trouble("a", 1)]), ["a: a writer waits"]);
        assert_eq!(waiting.lines(&[trouble("a", 1), trouble("b", 2)]), ["b: a writer waits"]);
        assert_eq!(waiting.lines(&[]), ["there is room again: no program waits any more"]);
        assert_eq!(waiting.lines(&[]), [""; 0]);
        assert_eq!(waiting.lines(&[trouble("a", 7)]), ["a: a writer waits"], "again");
    }
}
