//! `surgetank status [DIR]`: tiers, queue, rates, runs, troubles and the pool's members of one agent, or of all of this user's agents.

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use surgetank_core::report::{
    AgentStatus, Health, Listing, Lost, Phase, PoolMember, PoolMembers, Status, TierStatus, Trouble, Visibility,
};
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

fn write(out: &mut String, status: &AgentStatus, commands: Option<&Commands>) -> fmt::Result {
    let content = &status.content;
    let now = clock::now().secs();
    write_agent(out, status)?;
    write_tiers(out, &content.tiers)?;
    write_queue(out, content, now)?;
    status.pool.as_ref().map_or(Ok(()), |pool| write_pool(out, pool))?;
    write_losses(out, &content.lost, commands)?;
    write_risks(out, content)?;
    write_runs(out, status, now)?;
    write_troubles(out, &content.troubles, now)
}

fn write_agent(out: &mut String, status: &AgentStatus) -> fmt::Result {
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
    writeln!(out, "{}  (store {store}; {seen}; agent {}{phase})", status.over, status.pid)
}

fn write_tiers(out: &mut String, tiers: &[TierStatus]) -> fmt::Result {
    if !tiers.is_empty() {
        writeln!(out, "  {:<12} {:>11} {:>11} {:>11} {:>11}  survives", "tier", "cap", "used", "reserved", "dirty")?;
    }
    for tier in tiers {
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
    Ok(())
}

/// The queue, and how its drain fares.
fn write_queue(out: &mut String, content: &Status, now: i64) -> fmt::Result {
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
    if let Some(since) = drain.paused_since_unix_seconds {
        writeln!(out, "  drain: paused for {}, {} tries failed", ago(now, since), words::count(drain.failures))?;
    } else if drain.failures > 0 {
        writeln!(out, "  drain: goes on, {} tries failed", words::count(drain.failures))?;
    }
    if drain.corrupt > 0 {
        writeln!(out, "  {} copies came out wrong in the store and were made again", words::count(drain.corrupt))?;
    }
    if let Some(oldest) = &queue.oldest {
        writeln!(out, "  oldest undrained: {}, {}", oldest.path, words::seconds(oldest.age_seconds))?;
    }
    Ok(())
}

/// The members of the pool, and what each has to drain.
fn write_pool(out: &mut String, pool: &PoolMembers) -> fmt::Result {
    if pool.members.is_empty() {
        return writeln!(out, "  pool: member {}; this node does not know the members now", pool.member);
    }
    let count = pool.members.len();
    writeln!(out, "  pool: member {} of {count}; received, sent and calls are this node's", pool.member)?;
    writeln!(
        out,
        "  {:>6}  {:<32} {:>11} {:>10} {:>11} {:>11} {:>10} {:>11}",
        "member", "address", "undrained", "operations", "received", "sent", "calls", "free"
    )?;
    for one in &pool.members {
        let own = if one.member == pool.member { "  (this one)" } else { "" };
        let registry = if one.has_registry == Some(true) { "  has the registry" } else { "" };
        let free = one.tiers.as_ref().map(|tiers| words::bytes(tiers.iter().map(|room| room.free_bytes).sum()));
        let free = free.unwrap_or_else(|| "–".to_owned());
        let safe = if one.safe_to_power_off == Some(true) { "  safe to power off" } else { "" };
        let undrained = one.undrained_bytes.map_or_else(|| "no answer".to_owned(), words::bytes);
        writeln!(
            out,
            "  {:>6}  {:<32} {undrained:>11} {:>10} {:>11} {:>11} {:>10} {free:>11}{own}{registry}{safe}",
            one.member,
            one.address,
            one.undrained_operations.map_or_else(|| "–".to_owned(), words::count),
            words::bytes(one.received_bytes),
            words::bytes(one.sent_bytes),
            words::count(one.calls)
        )?;
    }
    let single = |count: fn(&PoolMember) -> Option<u64>| pool.members.iter().filter_map(count).sum::<u64>();
    let files = single(|one| one.single_copy_files);
    if files > 0 {
        let bytes = words::bytes(single(|one| one.single_copy_bytes));
        writeln!(out, "  on one node only, and lost with it: {bytes} in {} files", words::count(files))?;
    }
    for lost in &pool.lost {
        writeln!(
            out,
            "  {:>6}  {:<32} lost: what it had not put into the store is missing",
            lost.member, lost.address
        )?;
    }
    Ok(())
}

fn write_losses(out: &mut String, lost: &Listing<Lost>, commands: Option<&Commands>) -> fmt::Result {
    if lost.is_empty() {
        return Ok(());
    }
    writeln!(out, "  LOST: {} files, until they are acknowledged", words::count(lost.total))?;
    for one in lost.first.iter().take(LOST_SHOWN_MAX) {
        writeln!(out, "    {}: {}", one.path, one.why)?;
    }
    if let Some(commands) = commands {
        writeln!(out, "  to acknowledge them:\n    {}", commands.forget())?;
    }
    Ok(())
}

/// What a reboot, the loss of the node, or the job's end may cost.
fn write_risks(out: &mut String, content: &Status) -> fmt::Result {
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
    Ok(())
}

/// The runs, and the other mounts that their programs use directly.
fn write_runs(out: &mut String, status: &AgentStatus, now: i64) -> fmt::Result {
    for run in &status.runs {
        writeln!(out, "  run {} (pid {}, {}): {}", run.run.0, run.pid, ago(now, run.since_unix_seconds), run.command)?;
    }
    for path in &status.bypassed {
        writeln!(out, "  bypassed, another mount: {path}")?;
    }
    Ok(())
}

fn write_troubles(out: &mut String, troubles: &[Trouble], now: i64) -> fmt::Result {
    for trouble in troubles {
        let path = trouble.path.as_ref().map(|path| format!("{path}: ")).unwrap_or_default();
        let since = ago(now, trouble.since_unix_seconds);
        writeln!(out, "  trouble for {since}: {path}{}: {}", trouble.place, trouble.reason)?;
    }
    Ok(())
}

fn ago(now: i64, since: i64) -> String {
    words::seconds(u64::try_from(now - since).unwrap_or(0))
}
