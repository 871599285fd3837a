//! The time while the command runs: passes signals on, and notices the agent's death or silence.
//!
//! Nothing here waits for the agent: the command's signals come first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use surgetank_core::report::Scope;
use surgetank_policy::config::Deadline;
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

use super::offspring::{self, Change};
use super::waiting::Waiting;
use super::{ENDS, Run, shown_command, trace};
use crate::agent::client::{Dialed, Joined};
use crate::agent::line::{Limits, Wait};
use crate::agent::signals;
use crate::agent::wire::{Answer, Request};
use crate::verbs::{exit, words};

/// Short, because a run can do without this display. (In a pool the agent asks the other members, for 2 s at most.)
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

impl Run {
    /// Runs until the command ends: passes signals on, notices the agent's death.
    pub(super) fn attend(&mut self, command: u32) -> Result<u8> {
        let end = self.config.deadline.clone();
        let mut last_call = end.as_ref().map(|end| clock::tick() + end.left().saturating_sub(end.lead));
        let mut waiting = Waiting::default();
        let mut asked_to_end = false;
        loop {
            let look = waiting.next();
            self.await_event(Some(last_call.map_or(look, |call| call.min(look))))?;
            for answer in self.heard.drain(..) {
                waiting.answered(&answer);
            }
            if clock::tick() >= look && !self.agent_lost && self.dialed.is_none() {
                waiting.look(&mut self.agent);
            }
            if let Some(end) = end.as_ref().filter(|end| last_call.is_some() && end.is_near()) {
                last_call = None;
                self.report_near_end(end);
            }
            while let Some(arrived) = self.signals.next().map_err(|error| Error::new("signals").why(error))? {
                if arrived.number == libc::SIGTERM {
                    // Schedulers kill a moment later: files written so far need not wait for the command's end.
                    let _ = self.agent.send(&Request::Hasten { scope: Scope::run(self.run) });
                }
                if ENDS.contains(&arrived.number) && waiting.is_silent() {
                    // The command cannot die before the agent has answered its last system call.
                    if asked_to_end {
                        self.agent.give_up();
                        self.abandoned = true;
                        let _ = signals::send(command, arrived.number);
                        return Ok(u8::try_from(128 + arrived.number).unwrap_or(exit::FAILED));
                    }
                    asked_to_end = true;
                    eprintln!(
                        "surgetank: {}: the command may be waiting for the agent, which does not answer; a second signal ends this run without the agent",
                        signals::name(arrived.number)
                    );
                }
                if arrived.number != libc::SIGCHLD && !arrived.from_terminal {
                    // A command that changed its user may be out of reach of our signals; no remedy exists.
                    let _ = signals::send(command, arrived.number);
                }
            }
            while let Some(change) = offspring::reap() {
                match change {
                    Change::Ended { pid, exit } if pid == command => return Ok(exit),
                    Change::Suspended { pid } if pid == command => suspend_with(command),
                    _ => {}
                }
            }
        }
    }

    /// Returns when a signal or an answer of the agent arrives, or at `until`.
    pub(super) fn await_event(&mut self, until: Option<Instant>) -> Result<()> {
        let left = until.map(|until| until.saturating_duration_since(clock::tick()));
        let timeout = left.and_then(|left| rustix::time::Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        match &self.dialed {
            Some(dialed) => fds.push(PollFd::new(dialed, PollFlags::IN)),
            None if self.agent_lost => {}
            None => fds.push(PollFd::new(&self.agent, PollFlags::IN)),
        }
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::new("waiting for the command failed").why(errno)),
        }
        let speaks = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        match self.dialed.take() {
            Some(dialed) if speaks => self.join_next(dialed),
            Some(dialed) => self.dialed = Some(dialed),
            // An agent sends nothing without a request: readable means closed.
            None if speaks && self.has_hung_up() => match self.agent.dial_next() {
                Ok(Some(dialed)) => self.dialed = Some(dialed),
                Ok(None) | Err(_) => self.lose_agent(),
            },
            None => {}
        }
        Ok(())
    }

    /// Takes the agent's answers; true when it has closed the connection.
    fn has_hung_up(&mut self) -> bool {
        loop {
            match self.agent.at_hand() {
                Ok(Some(answer)) => self.heard.push(answer),
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    /// The supervisor has started another agent: this run continues with it.
    fn join_next(&mut self, dialed: Dialed) {
        let joined = dialed.greeted(&Limits::default()).ok().flatten().and_then(|mut agent| {
            let joined = agent.join_as(&shown_command(&self.args), Some(self.run));
            if self.args.trace {
                let _ = trace(&mut agent).inspect_err(|error| eprintln!("surgetank: the rest is not traced: {error}"));
            }
            matches!(joined, Ok(Joined::As(run)) if run == self.run).then_some(agent)
        });
        match joined {
            Some(agent) => {
                if self.args.verbose {
                    eprintln!("surgetank: the agent of {} was replaced (pid {})", agent.hello.over, agent.pid);
                }
                self.agent = agent;
            }
            None => {
                // The agent was killed again, or it leaves, and then the socket soon stops answering.
                std::thread::sleep(Duration::from_millis(5));
                match self.agent.dial_next() {
                    Ok(Some(dialed)) => self.dialed = Some(dialed),
                    Ok(None) | Err(_) => self.lose_agent(),
                }
            }
        }
    }

    /// The agent does the necessary work by itself.
    fn report_near_end(&mut self, end: &Deadline) {
        eprintln!(
            "surgetank: the job ends at {}, says {}: everything is due, and new files are written to the store",
            end.shown(),
            end.from
        );
        if let Ok(Answer::Status(status)) = self.agent.ask_within(&Request::Status, STATUS_TIMEOUT)
            && let Some(outlook) = &status.content.deadline
            && outlook.undrained_bytes > 0
        {
            eprintln!("surgetank: {} are not in the store yet", words::bytes(outlook.undrained_bytes));
        }
    }

    fn lose_agent(&mut self) {
        self.agent_lost = true;
        eprintln!(
            "surgetank: the agent of {} died; the command sees errors on the mount. What was sealed is safe in the tiers",
            self.agent.hello.over
        );
    }

    /// The conversation broke: true if another agent answers. An error: the next agent does not answer, or a signal
    /// ended the wait. No agent is asked after that.
    pub(super) fn has_another_agent(&mut self) -> Result<bool> {
        const LOOK_EVERY: Duration = Duration::from_millis(1);
        // A dying process releases its namespaces first, and its sockets some time later.
        const TIMEOUT: Duration = Duration::from_secs(1);
        let (before, until) = (self.agent.pid, clock::tick() + TIMEOUT);
        // (The call may have been made before, and be answered now.)
        self.await_event(Some(clock::tick()))?;
        while self.dialed.is_none() && !self.agent_lost && self.agent.pid == before && clock::tick() < until {
            self.await_event(Some(until))?;
        }
        let limits = Limits { signals: Some(Arc::clone(&self.signals)), until: None };
        let mut wait = Wait::new(&limits, self.dialed.as_ref().map_or(0, Dialed::pid));
        while let Some(dialed) = &self.dialed {
            if let Err(broken) = wait.goes_on() {
                let error = dialed.unanswered(broken);
                self.dialed = None;
                self.agent.give_up();
                return Err(error);
            }
            self.await_event(Some(clock::tick() + LOOK_EVERY * 50))?;
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(self.agent.pid != before || self.agent_lost)
    }
}

/// The terminal stopped the command: the shell has to see the whole job stopped. When the job continues, the command
/// continues too.
fn suspend_with(command: u32) {
    // SIGSTOP cannot be blocked: this returns after SIGCONT.
    let _ = signals::send(std::process::id(), libc::SIGSTOP);
    let _ = signals::send(command, libc::SIGCONT);
}
