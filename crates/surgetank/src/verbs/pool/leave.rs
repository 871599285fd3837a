//! `surgetank pool leave`: the member of a directory ends its membership in order.
//!
//! A member that `surgetank mount` keeps leaves as by `umount`. A member of runs leaves by itself after its last run:
//! then this verb only waits for that. It ends no run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use surgetank_core::report::{Holder, PathText, RunStatus, Scope, Verdict, Visibility};
use surgetank_types::clock;
use surgetank_types::error::Error;

use crate::agent::client::Connection;
use crate::agent::signals::Signals;
use crate::agent::wire::{Answer, RefusalKind, Request};
use crate::verbs::directory::{agent_of, without_pool};
use crate::verbs::mount::{Taken, signals, take_away};
use crate::verbs::outcome::Outcome;
use crate::verbs::program::{Program, state_root};
use crate::verbs::run::final_drain::{self, Drained};
use crate::verbs::settings::Settings;
use crate::verbs::wait;
use crate::verbs::words;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory [default: the one we are in]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Give up after this time; the member stays
    #[arg(long, value_name = "DURATION", value_parser = wait::duration_millis)]
    timeout: Option<u64>,
    /// The result as JSON
    #[arg(long)]
    json: bool,
    #[arg(long, short)]
    quiet: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// The result, as JSON.
#[derive(serde::Serialize)]
struct Left<'a> {
    directory: &'a PathText,
    pool: &'a str,
    left: bool,
    /// `None`: the agent did not report what is in the store.
    verdict: Option<&'a Verdict>,
}

const LOOK_EVERY: Duration = Duration::from_millis(20);

pub fn leave(program: &Program<'_>, args: &Args) -> Outcome {
    let directory = args.directory.as_deref().unwrap_or(Path::new("."));
    let settings = Settings::of_state(args.state.as_ref());
    let agent = agent_of(program, &settings, directory)?;
    let Some(pool) = agent.hello.pool.clone() else { return Err(without_pool(&agent).into()) };
    let over = agent.hello.over.clone();
    let taken = match agent.hello.visibility {
        Visibility::Global => take_away(agent, args.timeout, args.quiet, "then leave again")?,
        Visibility::Private => of_runs(agent, &pool, args, &state_root(program, &settings)?)?,
    };
    if taken.is_gone && !args.quiet {
        eprintln!("surgetank: {over} has left the pool {pool}");
    }
    if args.json {
        let left = Left { directory: &over, pool: &pool, left: taken.is_gone, verdict: taken.verdict.as_deref() };
        let text =
            serde_json::to_string_pretty(&left).map_err(|why| Error::new("the result cannot be printed").why(why))?;
        words::print(&format!("{text}\n"))?;
    }
    Ok(taken.code())
}

/// The member leaves when no run uses it: its drain and its end are awaited.
fn of_runs(mut agent: Connection, pool: &str, args: &Args, state: &Path) -> Outcome<Taken> {
    let begun = clock::tick();
    let runs = match agent.ask(&Request::Status)? {
        Answer::Status(status) => status.runs,
        other => return Err(agent.confused(&other).into()),
    };
    if !runs.is_empty() {
        return Err(in_use(&agent, pool, runs).into());
    }
    let over = agent.hello.over.clone();
    let scope = Scope::everything();
    let request = Request::Wait { scope: scope.clone(), timeout_ms: args.timeout };
    let signals = signals()?;
    let verdict = match final_drain::follow(&mut agent, &scope, &request, &signals, args.quiet)? {
        Ok(Drained::Settled(verdict)) => Some(verdict),
        Ok(Drained::TimedOut(verdict)) => {
            words::print_verdict(&verdict, &agent.commands());
            eprintln!("surgetank: {over} stays in the pool {pool}: not everything is in the store");
            return Ok(Taken::stays(Some(verdict)));
        }
        Ok(Drained::GaveUp) => {
            eprintln!("surgetank: {over} stays in the pool {pool} and goes on draining");
            return Ok(Taken::stays(None));
        }
        // It is just leaving.
        Err(Answer::Error(refusal)) if refusal.kind == RefusalKind::Leaving => None,
        Err(other) => return Err(agent.confused(&other).into()),
    };
    // (It waits for processes that its runs left, and the pool's first member for the others.)
    while agent.at_hand().is_ok() {
        let is_late = args.timeout.is_some_and(|timeout| begun.elapsed() >= Duration::from_millis(timeout));
        if is_late || is_interrupted(&signals)? {
            return Err(Error::new(format!("{over} stays in the pool {pool}: it did not leave in time"))
                .why("processes that its runs left use it, or other members need it")
                .remedy("end those processes, or wait longer")
                .data("everything sealed goes on draining")
                .into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let Some(verdict) = verdict else {
        let found = wait::without_agent(state, over.as_path(), &[], true)?;
        return Ok(Taken { is_gone: true, is_durable: found.is_ok_and(|found| found.durable), verdict: None });
    };
    if !args.quiet || !verdict.is_durable() {
        words::print_verdict(&verdict, &agent.commands());
    }
    Ok(Taken::goes(verdict))
}

fn is_interrupted(signals: &Signals) -> Outcome<bool> {
    Ok(signals.next().map_err(|why| Error::new("signals").why(why))?.is_some())
}

fn in_use(agent: &Connection, pool: &str, runs: Vec<RunStatus>) -> Error {
    let holder = |run: RunStatus| Holder { pid: run.pid, command: run.command, holds: format!("run {}", run.run.0) };
    let lines = words::holder_lines(&runs.into_iter().map(holder).collect::<Vec<_>>());
    Error::new(format!("{} stays in the pool {pool}: runs use it", agent.hello.over))
        .why(format!("\n{}", lines.join("\n")))
        .remedy("wait for them: the member leaves when they have ended")
        .data("nothing was changed")
}
