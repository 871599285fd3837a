//! The final drain as the user sees it: progress, the first Ctrl-C that tells, the second that stops.

use rustix::event::{PollFd, PollFlags};
use surgetank_core::error::{Error, Result};
use surgetank_core::report::{Scope, Verdict};

use crate::agent::client::Connection;
use crate::agent::progress::Display;
use crate::agent::signals::{self, Signals};
use crate::agent::wire::{Answer, RefusalKind, Request};
use crate::verbs::words;

pub enum Drained {
    /// Settled; the verdict says how.
    Settled(Box<Verdict>),
    /// The time ran out first.
    TimedOut(Box<Verdict>),
    /// Interrupted for the second time.
    GaveUp,
}

/// Drains `scope` to its end. `request` is `Wait` or `Unmount`; other answers than theirs are handed back.
pub fn follow(
    agent: &mut Connection,
    scope: &Scope,
    request: &Request,
    signals: &Signals,
    quiet: bool,
) -> Result<std::result::Result<Drained, Answer>> {
    let mut display = Display::new("draining", quiet);
    let mut told = false;
    agent.send(request)?;
    let outcome = loop {
        if agent.has_answer() || wait(agent, signals)? {
            let answer = match agent.receive() {
                // A run has to join the next agent first.
                Err(lost) if scope.run.is_some() || !agent.goes_on_with_next() => return Err(lost),
                Err(_replaced) => {
                    agent.send(request)?;
                    continue;
                }
                Ok(answer) => answer,
            };
            match answer {
                Answer::Progress(progress) => display.show(&progress),
                Answer::Verdict { verdict, timed_out: false } => break Ok(Drained::Settled(verdict)),
                Answer::Verdict { verdict, timed_out: true } => break Ok(Drained::TimedOut(verdict)),
                Answer::Error(refusal) if refusal.kind != RefusalKind::Leaving => {
                    display.finish();
                    return Err(refusal.into());
                }
                other => break Err(other),
            }
        }
        while let Some(arrived) = signals.next().map_err(|error| Error::new("signals cannot be read").why(error))? {
            if ![libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].contains(&arrived.number) {
                continue;
            }
            if told {
                display.say(&format!(
                    "surgetank: the agent goes on draining; wait for it with:\n  {}\nIf it is killed, bring what is left to the store with:\n  {}",
                    agent.commands().wait(),
                    agent.commands().scavenge()
                ));
                display.finish();
                return Ok(Ok(Drained::GaveUp));
            }
            told = true;
            display.say(&format!(
                "surgetank: {}: draining goes on; once more stops waiting. Not in the store yet:",
                signals::name(arrived.number)
            ));
            for line in undrained(agent, scope) {
                display.say(&format!("surgetank: {line}"));
            }
        }
    };
    display.finish();
    Ok(outcome)
}

/// True when an answer can be read, false when a signal came.
fn wait(agent: &Connection, signals: &Signals) -> Result<bool> {
    let mut fds = [PollFd::new(agent, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
    match rustix::event::poll(&mut fds, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(errno) => Err(Error::new("waiting for the agent failed").why(errno)),
    }
}

fn undrained(agent: &Connection, scope: &Scope) -> Vec<String> {
    let asked = agent.another().and_then(|other| match other {
        Some(mut other) => other.verdict(scope.clone()),
        None => Err(Error::new("the agent does not answer")),
    });
    match asked {
        Ok(verdict) => words::verdict_lines(&verdict),
        Err(error) => vec![error.to_string()],
    }
}
