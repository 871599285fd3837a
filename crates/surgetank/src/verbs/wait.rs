//! `surgetank wait [PATH…]`: 0 if everything, or these paths, is durable; 3 with names if not.
//!
//! The answer does not depend on whether the agent has just ended: then the verb inspects its leftovers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use surgetank_core::report::{Scope, Verdict};
use surgetank_types::clock;
use surgetank_types::error::Error;

use super::left::Looked;
use super::outcome::{Failure, Outcome};
use super::program::{Program, state_root};
use super::run::final_drain::{self, Drained};
use super::settings::Settings;
use super::{exit, left, words};
use crate::agent::client;
use crate::agent::commands::Commands;
use crate::agent::place::StateRoot;
use crate::agent::signals::Signals;
use crate::agent::wire::{Answer, RefusalKind, Request};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files or directories [default: everything of the directory we are in]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Give up after this time
    #[arg(long, value_name = "DURATION", value_parser = duration_millis)]
    timeout: Option<u64>,
    #[arg(long, short)]
    quiet: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// The result of the verb: what is not durable, or why there is no list of that.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Found {
    pub(super) durable: bool,
    why: Option<String>,
    verdict: Option<Verdict>,
}

impl Found {
    /// The agent, or what holds its leftovers, does not answer: no file may count as durable.
    fn unknown(error: &Error) -> Self {
        eprintln!("surgetank: {error}");
        Self { why: Some(error.to_string()), ..Self::default() }
    }

    fn not_durable(verdict: Verdict) -> Self {
        Self { verdict: Some(verdict), ..Self::default() }
    }

    fn because(why: impl Into<String>) -> Self {
        Self { why: Some(why.into()), ..Self::default() }
    }

    fn code(&self) -> u8 {
        if self.durable { exit::OK } else { exit::NOT_DURABLE }
    }
}

/// `90s`, `5m`, `1.5h`, `250ms`, or plain seconds.
pub fn duration_millis(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "ms" => 1.0,
        "" | "s" => 1e3,
        "m" | "min" => 60e3,
        "h" => 3600e3,
        "d" => 86_400e3,
        _ => return Err(format!("`{unit}` is not a unit of time: ms, s, m, h, d")),
    };
    let value: f64 = number.parse().map_err(|_| format!("`{number}` is not a number"))?;
    Ok((value * factor) as u64)
}

/// How long the verb retries a place that another process holds.
const HELD_TIMEOUT: Duration = Duration::from_secs(5);

pub fn wait(program: &Program<'_>, args: &Args) -> Outcome {
    let found = look(program, args)?;
    if args.json {
        words::print(&(serde_json::to_string_pretty(&found).map_err(|why| Error::new("JSON").why(why))? + "\n"))?;
    }
    Ok(found.code())
}

fn look(program: &Program<'_>, args: &Args) -> Outcome<Found> {
    let first = args.paths.first().map_or(Path::new("."), PathBuf::as_path);
    let state = state_root(program, &Settings::of_state(args.state.as_ref()))?;
    let begun = clock::tick();
    loop {
        let mut agents = client::survey(&state)?;
        if let Some(error) = agents.silence_over(first)? {
            return Ok(Found::unknown(&error));
        }
        let Some(mut agent) = agents.serving(first)? else {
            match without_agent(&state, first, &args.paths, args.quiet)? {
                Ok(found) => return Ok(found),
                Err(held) if begun.elapsed() >= HELD_TIMEOUT => return Ok(Found::unknown(&held)),
                // An agent may have started, or the inspecting process may have ended.
                Err(_) => continue,
            }
        };
        let paths = args.paths.iter().map(|path| agent.relative(path)).collect::<Result<_, Error>>()?;
        let scope = Scope { run: None, paths };
        let request = Request::Wait { scope: scope.clone(), timeout_ms: args.timeout };
        let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT])
            .map_err(|error| Error::new("signals cannot be blocked").why(error))?;
        let signals = Arc::new(signals);
        let drained = final_drain::follow(&mut agent, &scope, &request, &signals, args.quiet);
        let verdict = match drained {
            Ok(Ok(Drained::Settled(verdict) | Drained::TimedOut(verdict))) => verdict,
            Ok(Ok(Drained::GaveUp)) => return Ok(Found::because("a signal ended the wait")),
            // The agent is leaving: its leftovers are the answer.
            Ok(Err(Answer::Error(refusal))) if refusal.kind == RefusalKind::Leaving => {
                agent.await_exit()?;
                signals.unblock();
                continue;
            }
            Ok(Err(other)) => return Err(agent.confused(&other).into()),
            Err(error) if agent.is_silent() => return Ok(Found::unknown(&error)),
            Err(error) => {
                signals.unblock();
                if client::serving(&state, first)?.is_none() {
                    continue;
                }
                return Err(error.into());
            }
        };
        if !args.quiet || !verdict.is_durable() {
            words::print_verdict(&verdict, &agent.commands());
        }
        return Ok(Found { durable: verdict.is_durable(), why: None, verdict: Some(*verdict) });
    }
}

/// No agent serves the path: everything is durable, unless an agent was killed or had leftovers. `Err` within: another
/// process holds the place, so its leftovers are not known.
pub(super) fn without_agent(
    state: &Path,
    path: &Path,
    paths: &[PathBuf],
    quiet: bool,
) -> Outcome<Result<Found, Error>> {
    let path = client::absolute(path)?;
    let root = StateRoot::open_existing(state)?;
    if let Some(dead) = client::dead_mount(&path)? {
        let commands = Commands::of_directory(&dead, state);
        eprintln!("surgetank: {}", words::left_by_killed(&dead, &commands));
        let mut found = Found::because(words::left_by_killed(&dead, &commands));
        if let Some(place) = root.and_then(|root| root.place_of(&dead).transpose()).transpose()? {
            match left::look(&place)? {
                Looked::Dead { audit, .. } => found = Found::not_durable(left::of_killed(&audit)),
                Looked::Held => found = Found::unknown(&left::held(&place, &dead)),
            }
        }
        if let Some(verdict) = &found.verdict {
            words::print_verdict(verdict, &commands);
        }
        return Ok(Ok(found));
    }
    for directory in path.ancestors() {
        let Some(root) = &root else { break };
        let place = match directory.metadata() {
            Ok(meta) => root.existing_place(&meta, directory)?,
            Err(_) => None,
        };
        let looked = place.as_ref().map(left::look).transpose()?;
        if let (Some(place), Some(Looked::Held)) = (&place, &looked) {
            return Ok(Err(left::held(place, directory)));
        }
        let behind = root.left_behind(directory, place.as_ref())?;
        let left_behind: Vec<String> = behind.iter().map(|left| left.message(directory)).collect();
        words::print_lines(&left_behind);
        let (Some(place), Some(Looked::Dead { was_killed, audit })) = (place, looked) else {
            if behind.is_empty() {
                continue;
            }
            return Ok(Ok(Found::because(left_behind.join("\n"))));
        };
        let commands = Commands::at(&place, directory);
        if was_killed {
            eprintln!("surgetank: {}", words::left_by_killed(directory, &commands));
            let verdict = left::of_killed(&audit);
            words::print_verdict(&verdict, &commands);
            return Ok(Ok(Found::not_durable(verdict)));
        }
        // The note is older than later changes to the tiers.
        let verdict = left::corrected(place.undrained().unwrap_or_default(), &audit);
        if !verdict.is_durable() {
            words::print_verdict(&verdict, &commands);
            if !verdict.is_drained() {
                eprintln!("surgetank: after the cause is fixed, bring it to the store with:\n  {}", commands.run());
            }
            return Ok(Ok(Found::not_durable(verdict)));
        }
        if !behind.is_empty() {
            return Ok(Ok(Found::because(left_behind.join("\n"))));
        }
    }
    // A user's script deletes the original when this verb says that the copy is safe.
    for path in paths {
        if let Err(why) = path.symlink_metadata() {
            let error = Error::new(format!("{} cannot be found", path.display())).why(why);
            return Err(Failure::usage(error.remedy("no agent of yours serves it either: is the path right?")));
        }
    }
    let why = format!("no agent of yours serves {}, and none left anything undrained", path.display());
    if !quiet {
        eprintln!("surgetank: {why}");
    }
    Ok(Ok(Found { durable: true, ..Found::because(why) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(duration_millis("1.5m"), Ok(90_000));
        assert_eq!(duration_millis("250ms"), Ok(250));
        assert_eq!(duration_millis("3"), Ok(3000));
        assert!(duration_millis("3 weeks").is_err() && duration_millis("").is_err());
    }
}
