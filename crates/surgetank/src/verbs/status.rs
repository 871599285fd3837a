//! `surgetank status [DIR]`: tiers, queue, rates, runs and troubles of one agent, or of all of this user's agents.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use surgetank_core::report::{AgentStatus, Health, Phase, Visibility};
use surgetank_policy::config::Survives;
use surgetank_types::clock;
use surgetank_types::error::Error;

use super::directory::agent_of;
use super::outcome::Outcome;
use super::program::{Program, state_root};
use super::settings::Settings;
use super::{exit, left, words};
use crate::agent::client::{self, Connection};
use crate::agent::commands::Commands;
use crate::agent::wire::{Answer, Request};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A served directory [default: the one we are in, or all]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// As JSON: one array
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Of another user's agent, whose `group_socket` this is
    #[arg(long, value_name = "PATH", conflicts_with_all = ["directory", "state"])]
    socket: Option<PathBuf>,
}

/// The JSON output has more.
const LOST_SHOWN_MAX: usize = 10;

pub fn status(program: &Program<'_>, args: &Args) -> Outcome {
    let settings = Settings::of_state(args.state.as_ref());
    let (mut left, mut silent) = (Vec::new(), Vec::new());
    let told = match (&args.directory, &args.socket) {
        (_, Some(socket)) => match client::ask_guest(socket, &Request::Status)? {
            Answer::Status(status) => vec![(*status, None)],
            other => return Err(Error::new("the agent answers something else").why(format!("{other:?}")).into()),
        },
        (Some(directory), None) => {
            let mut agent = agent_of(program, &settings, directory)?;
            vec![(ask(&mut agent)?, Some(agent.commands()))]
        }
        (None, None) => {
            let state = state_root(program, &settings)?;
            let mut all = client::survey(&state)?;
            let nth = if all.silent.is_empty() { all.innermost_of(Path::new("."))? } else { None };
            match nth {
                Some(nth) => all.answering = vec![all.answering.swap_remove(nth)],
                None => left = left::notices(&state)?,
            }
            silent.extend(all.silent.into_iter().map(|(_, error)| error));
            let mut told = Vec::new();
            for mut agent in all.answering {
                match ask(&mut agent) {
                    Ok(status) => told.push((status, Some(agent.commands()))),
                    Err(error) if agent.is_silent() => silent.push(error),
                    // An agent that ends during the question counts as absent.
                    Err(_) => {}
                }
            }
            told
        }
    };
    if args.json {
        let told: Vec<&AgentStatus> = told.iter().map(|(status, _)| status).collect();
        words::print(&(serde_json::to_string_pretty(&told).map_err(|error| Error::new("JSON").why(error))? + "\n"))?;
    } else {
        let texts: Vec<String> = told.iter().map(|(status, commands)| text(status, commands.as_ref())).collect();
        let none = told.is_empty() && silent.is_empty();
        let agents = if none { "no agent of yours is running\n".to_owned() } else { texts.join("\n") };
        words::print(&left.iter().fold(agents, |all, line| format!("{all}{line}\n")))?;
    }
    for error in &silent {
        eprintln!("surgetank: {error}");
    }
    Ok(if silent.is_empty() { exit::OK } else { exit::FAILED })
}

fn ask(agent: &mut Connection) -> Result<AgentStatus, Error> {
    match agent.ask(&Request::Status)? {
        Answer::Status(status) => Ok(*status),
        other => Err(agent.confused(&other)),
    }
}

/// `commands`: `None` for another user's agent; only that user can run them.
fn text(status: &AgentStatus, commands: Option<&Commands>) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, status, commands);
    out
}

fn write(out: &mut String, status: &AgentStatus, commands: Option<&Commands>) -> std::fmt::Result {
    let store = if status.store == status.over { "underneath".to_owned() } else { status.store.to_string() };
    let seen = match status.visibility {
        Visibility::Private => "private to its runs",
        Visibility::Global => "seen by all programs",
    };
    let phase = match status.phase {
        Phase::Serving => "",
        Phase::Leaving => ", leaving when drained",
        Phase::Closed => ", unmounting",
    };
    writeln!(out, "{}  (store {store}; {seen}; agent {}{phase})", status.over, status.pid)?;
    let content = &status.content;
    if !content.tiers.is_empty() {
        writeln!(out, "  {:<12} {:>11} {:>11} {:>11} {:>11}  survives", "tier", "cap", "used", "reserved", "dirty")?;
    }
    for tier in &content.tiers {
        let survives = match tier.survives {
            Survives::Agent => "the agent",
            Survives::Reboot => "a reboot",
            Survives::Node => "the node",
        };
        writeln!(
            out,
            "  {:<12} {:>11} {:>11} {:>11} {:>11}  {survives}",
            tier.name,
            words::bytes(tier.cap_bytes),
            words::bytes(tier.used_bytes),
            words::bytes(tier.reserved_bytes),
            words::bytes(tier.dirty_bytes)
        )?;
        for device in &tier.devices {
            if let Health::Sick { reason } = &device.health {
                writeln!(out, "    {} is out of use: {reason}", device.path)?;
            }
        }
    }
    let queue = &content.queue;
    writeln!(
        out,
        "  queue: {} files, {}, {} operations, {}/s",
        words::count(queue.files),
        words::bytes(queue.bytes),
        words::count(queue.operations),
        words::bytes(queue.bytes_per_second)
    )?;
    let drain = &content.drain;
    let now = clock::now().secs();
    let ago = |since: i64| words::seconds(u64::try_from(now - since).unwrap_or(0));
    if let Some(since) = drain.paused_since_unix_seconds {
        writeln!(out, "  drain: paused for {}, {} tries failed", ago(since), words::count(drain.failures))?;
    } else if drain.failures > 0 {
        writeln!(out, "  drain: goes on, {} tries failed", words::count(drain.failures))?;
    }
    if drain.corrupt > 0 {
        writeln!(out, "  {} copies came out wrong in the store and were made again", words::count(drain.corrupt))?;
    }
    if let Some(oldest) = &queue.oldest {
        writeln!(out, "  oldest undrained: {}, {}", oldest.path, words::seconds(oldest.age_seconds))?;
    }
    if !content.lost.is_empty() {
        writeln!(out, "  LOST: {} files, until they are acknowledged", words::count(content.lost.total))?;
        for one in content.lost.first.iter().take(LOST_SHOWN_MAX) {
            writeln!(out, "    {}: {}", one.path, one.why)?;
        }
        if let Some(commands) = commands {
            writeln!(out, "  to acknowledge them:\n    {}", commands.forget())?;
        }
    }
    if content.at_risk_node_bytes > 0 {
        writeln!(
            out,
            "  at risk: {} if the node is lost, {} if it reboots",
            words::bytes(content.at_risk_node_bytes),
            words::bytes(content.at_risk_reboot_bytes)
        )?;
    }
    if let Some(deadline) = &content.deadline {
        let measured = if deadline.measured { "" } else { " (assumed)" };
        writeln!(
            out,
            "  the job ends in {}, says {}: {} undrained, {} can be drained by then, at {}/s{measured}",
            words::seconds(deadline.left_seconds),
            deadline.from,
            words::bytes(deadline.undrained_bytes),
            words::bytes(deadline.drainable_bytes),
            words::bytes(deadline.bytes_per_second)
        )?;
        if !deadline.fits {
            let late = words::bytes(deadline.undrained_bytes - deadline.drainable_bytes.min(deadline.undrained_bytes));
            writeln!(out, "  WARNING: {late} may not be in the store when the job ends")?;
        }
    }
    for run in &status.runs {
        writeln!(out, "  run {} (pid {}, {}): {}", run.run.0, run.pid, ago(run.since_unix_seconds), run.command)?;
    }
    for path in &status.bypassed {
        writeln!(out, "  bypassed, another mount: {path}")?;
    }
    for trouble in &content.troubles {
        let path = trouble.path.as_ref().map(|path| format!("{path}: ")).unwrap_or_default();
        let since = ago(trouble.since_unix_seconds);
        writeln!(out, "  trouble for {since}: {path}{}: {}", trouble.place, trouble.reason)?;
    }
    Ok(())
}
