//! Runs in which one thing happens on purpose.

use std::time::Duration;

use surgetank_pool::Uptime;

use super::counts::Counts;
use super::world::{BELIEF, LEASE, World};

impl World {
    /// Programs on all members read.
    pub fn only_reads(&mut self, time: Duration) -> Counts {
        (self.works, self.only_reads) = (true, true);
        self.until(time);
        self.counts.clone()
    }

    /// One machine changes one directory: the counts of the first change, and of all others.
    pub fn changes_by_one(&mut self, time: Duration) -> (Counts, Counts) {
        let second = Duration::from_secs(1);
        self.until(second);
        let directory = self.directories[0].clone();
        self.begin(0, true, directory.clone());
        self.until(2 * second);
        let first = std::mem::take(&mut self.counts);
        let mut at = 2 * second;
        while at < time {
            at += second / 20;
            self.begin(0, true, directory.clone());
            self.until(at);
        }
        (first, self.counts.clone())
    }

    /// A member that sees only the store reads on, while another one changes what it reads. Returns when the change was
    /// answered, and when the member that was cut off read for the last time.
    pub fn cut_off_one(&mut self) -> (Uptime, Uptime) {
        self.answers_take = Duration::from_secs(2);
        self.until(LEASE);
        let directory = self.directories[0].clone();
        let end = self.now + 2 * LEASE;
        self.cuts.extend([((None, 1), end), ((Some(0), 1), end)]);
        self.begin(0, true, directory.clone());
        let (mut answered, mut read) = (Uptime::ZERO, Uptime::ZERO);
        while self.now < end {
            if self.machines[1].operations.is_empty() {
                self.begin(1, false, directory.clone());
            }
            let before = (self.counts.operations, self.answered.contains_key(&directory));
            self.until(self.now + Duration::from_millis(5));
            if self.answered.contains_key(&directory) && !before.1 {
                answered = self.now;
            } else if self.counts.operations > before.0 {
                read = self.now;
            }
        }
        (answered, read)
    }

    /// A member leaves while its programs read. As soon as the registry does not count it any more, another one changes
    /// what they read. Returns how often they read after that, if the change was answered.
    pub fn leave_while_reading(&mut self) -> Option<u64> {
        self.answers_take = Duration::from_secs(2);
        self.until(LEASE);
        let directory = self.directories[0].clone();
        self.begin(1, false, directory.clone());
        self.until(self.now + BELIEF / 5);
        let now = self.clock(1);
        self.machines[1].leaves = true;
        if let Some(member) = self.machines[1].member.as_mut() {
            member.leave(now);
        }
        let mut gone = None;
        for _ in 0..1_000 {
            if self.machines[1].operations.is_empty() && !self.machines[1].is_gone {
                self.begin(1, false, directory.clone());
            }
            if gone.is_none() && self.everything().members.len() == 1 {
                gone = Some(self.counts.operations);
                self.begin(0, true, directory.clone());
            }
            self.until(self.now + Duration::from_millis(5));
        }
        let is_answered = self.answered.contains_key(&directory);
        // (One of them is the change.)
        gone.filter(|_| is_answered).map(|before| self.counts.operations - before - 1)
    }
}
