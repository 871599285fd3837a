//! The final drain as the user sees it: progress, then a first Ctrl-C that reports, and a second that stops the wait.

use std::sync::Arc;
use std::time::Duration;

use surgetank_core::report::{Scope, Verdict};
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

use crate::agent::client::Connection;
use crate::agent::line::{Broken, Limits};
use crate::agent::signals::{self, Signals};
use crate::agent::wire::{Answer, RefusalKind, Request};
use crate::verbs::progress::Display;
use crate::verbs::words;

pub enum Drained {
    /// Settled; the verdict says how.
    Settled(Box<Verdict>),
    /// The time limit came first.
    TimedOut(Box<Verdict>),
    /// Interrupted for the second time.
    GaveUp,
}

/// The verdict may be this much later than the time limit: the agent may be asking a store that hangs.
const TIMEOUT_GRACE: Duration = Duration::from_secs(10);
/// Short, because the run can do without the list of undrained files.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

/// Drains `scope` to its end. `request` is `Wait` or `Unmount`; other answers are returned to the caller. From now on
/// these signals end every wait for the agent.
pub fn follow(
    agent: &mut Connection,
    scope: &Scope,
    request: &Request,
    signals: &Arc<Signals>,
    quiet: bool,
) -> Result<std::result::Result<Drained, Answer>> {
    let (Request::Wait { timeout_ms, .. } | Request::Unmount { timeout_ms }) = request else {
        return Err(Error::new("only a final drain can be followed"));
    };
    let until = timeout_ms.map(|ms| clock::tick() + Duration::from_millis(ms) + TIMEOUT_GRACE);
    agent.limits = Limits { signals: Some(Arc::clone(signals)), until };
    let mut display = Display::new("draining", quiet);
    let outcome = hear_verdict(agent, scope, request, &mut display);
    agent.limits.until = None;
    display.finish();
    outcome
}

fn hear_verdict(
    agent: &mut Connection,
    scope: &Scope,
    request: &Request,
    display: &mut Display,
) -> Result<std::result::Result<Drained, Answer>> {
    let mut told = false;
    // A signal may end the wait that sends the request: then it is sent afterwards.
    let mut is_sent = false;
    loop {
        let sent = if is_sent { Ok(()) } else { agent.begin(request) };
        is_sent = sent.is_ok();
        let number = match sent.and_then(|()| agent.hear()) {
            Ok(Answer::Progress(progress)) => {
                display.show(&progress);
                continue;
            }
            Ok(Answer::Verdict { verdict, timed_out: false }) => return Ok(Ok(Drained::Settled(verdict))),
            Ok(Answer::Verdict { verdict, timed_out: true }) => return Ok(Ok(Drained::TimedOut(verdict))),
            Ok(Answer::Error(refusal)) if refusal.kind != RefusalKind::Leaving => return Err(refusal.into()),
            Ok(other) => return Ok(Err(other)),
            Err(Broken::Signal(number)) => number,
            // A run has to join the next agent first.
            Err(broken @ (Broken::Closed | Broken::Io(_))) => {
                if scope.run.is_some() || !agent.goes_on_with_next() {
                    return Err(agent.broken(broken));
                }
                is_sent = false;
                continue;
            }
            Err(broken @ Broken::Silent(_)) => return Err(agent.broken(broken)),
        };
        if !told {
            told = true;
            display.print(&format!(
                "surgetank: {}: the drain continues; a second signal stops waiting. Not in the store yet:",
                signals::name(number)
            ));
            if let Some(lines) = undrained(agent, scope) {
                lines.iter().for_each(|line| display.print(&format!("surgetank: {line}")));
                continue;
            }
        }
        display.print(&format!(
            "surgetank: the agent goes on draining; wait for it with:\n  {}\nIf it is killed, bring what is left to the store with:\n  {}",
            agent.commands().wait(),
            agent.commands().scavenge()
        ));
        agent.give_up();
        return Ok(Ok(Drained::GaveUp));
    }
}

/// `None`: another signal arrived.
fn undrained(agent: &Connection, scope: &Scope) -> Option<Vec<String>> {
    let limits = Limits { until: Some(clock::tick() + LIST_TIMEOUT), ..agent.limits.clone() };
    let asked = agent.another(&limits).and_then(|mut other| {
        other.begin(&Request::Verdict { scope: scope.clone() })?;
        other.hear()
    });
    match asked {
        Ok(Answer::Verdict { verdict, .. }) => Some(words::verdict_lines(&verdict)),
        Ok(Answer::Error(refusal)) => Some(vec![Error::from(refusal).to_string()]),
        Ok(other) => Some(vec![agent.confused(&other).to_string()]),
        Err(Broken::Signal(_)) => None,
        Err(broken) => Some(vec![agent.described(broken).to_string()]),
    }
}
