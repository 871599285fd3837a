//! `surgetank mount DIR` and `surgetank umount DIR`: a mount for every program of the machine.
//!
//! The danger that both avoid: a program that holds the bare directory writes past the mount, and a program still
//! inside loses its files. So `mount` refuses while a process holds the directory. `umount` drains first and is never
//! lazy.

use std::path::PathBuf;
use std::sync::Arc;

use surgetank_core::report::{Scope, Verdict, Visibility};
use surgetank_types::error::Error;
use surgetank_types::shell;

use super::directory::{agent_of, clear_dead_mount, dead_mount_error, refuse_other_store};
use super::outcome::{Failure, Outcome};
use super::pooling::Pooling;
use super::program::{Program, state_root};
use super::run::final_drain::{self, Drained};
use super::settings::Settings;
use super::{exit, wait, words};
use crate::agent::client::Connection;
use crate::agent::commands::{self, Commands};
use crate::agent::signals::Signals;
use crate::agent::wire::{Answer, Request};
use crate::agent::{client, holders};

#[derive(Debug, clap::Args)]
pub struct MountArgs {
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    pooling: Pooling,
    /// The directory [default: the current one]
    #[arg(value_name = "DIR", conflicts_with = "over")]
    directory: Option<PathBuf>,
}

pub fn mount(program: &Program<'_>, args: &MountArgs) -> Outcome {
    let mut settings = args.settings.clone();
    settings.over = args.directory.clone().or(settings.over);
    clear_dead_mount(program, &settings)?;
    let mut config = (program.configure)(&settings).map_err(Failure::usage)?;
    args.pooling.configure(&mut config, false).map_err(Failure::usage)?;
    config.ask_when_the_job_ends();
    let over = config.over.clone();
    if let Some(agent) = client::serving(&config.state, &over)? {
        return Err(Error::new(format!("{} is served already, by the agent of {}", over.display(), agent.hello.over))
            .why(match agent.hello.visibility {
                Visibility::Global => "it is mounted",
                Visibility::Private => "a run has a private mount over it",
            })
            .remedy(match agent.hello.visibility {
                Visibility::Global => format!("take the mount away:\n  {}", agent.commands().umount()),
                Visibility::Private => format!("wait until its runs have ended:\n  {}", agent.commands().wait()),
            })
            .into());
    }
    let holding = holders::of_directory(&over);
    if !holding.is_empty() {
        let error = Error::new(format!("{} is in use: these processes would write past the mount", over.display()))
            .why(format!("\n{}", words::holder_lines(&holding).join("\n")))
            .remedy("end them or let them leave the directory (a shell: `cd /`), or use `surgetank run`, which needs no such care");
        return Err(error.into());
    }
    refuse_other_store(&config)?;
    let found = client::find_or_start(&config, Visibility::Global)?;
    if !found.started && found.connection.hello.visibility == Visibility::Private {
        return Err(Error::new(format!("{} is served by runs with a private mount", over.display()))
            .remedy(format!("see when they have ended:\n  {}", commands::asking(&["status"], &config.state)))
            .into());
    }
    let agent = found.settled();
    if !agent.hello.inherited.is_empty() {
        eprintln!("surgetank: {}", agent.hello.inherited);
    }
    eprintln!(
        "surgetank: mounted over {} (agent pid {}); take it away with:\n  {}",
        over.display(),
        agent.pid,
        agent.commands().umount()
    );
    Ok(exit::OK)
}

#[derive(Debug, clap::Args)]
pub struct UmountArgs {
    /// The mounted directory [default: the one we are in]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Give up draining after this time; the mount stays
    #[arg(long, value_name = "DURATION", value_parser = wait::duration_millis)]
    timeout: Option<u64>,
    #[arg(long, short)]
    quiet: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub fn umount(program: &Program<'_>, args: &UmountArgs) -> Outcome {
    let directory = args.directory.clone().unwrap_or_else(|| PathBuf::from("."));
    let settings = Settings::of_state(args.state.as_ref());
    if let Some(dead) = client::dead_mount(&directory)? {
        let state = state_root(program, &settings)?;
        if !client::clear_dead_mount(&state, &dead)? {
            return Err(dead_mount_error(&dead, &state)
                .remedy(format!("no agent of yours left it there:\n  umount {}", shell::word(&dead)))
                .into());
        }
        eprintln!("surgetank: {}", words::left_by_killed(&dead, &Commands::of_directory(&dead, &state)));
        return Ok(exit::NOT_DURABLE);
    }
    let agent = agent_of(program, &settings, &directory)?;
    Ok(take_away(agent, args.timeout, args.quiet, "then umount again")?.code())
}

/// How taking a mount away ended.
pub(super) struct Taken {
    /// Its agent has ended. (Otherwise a message says why not.)
    pub is_gone: bool,
    pub is_durable: bool,
    /// As the agent reported it, if it did.
    pub verdict: Option<Box<Verdict>>,
}

impl Taken {
    pub fn goes(verdict: Box<Verdict>) -> Self {
        Self { is_gone: true, is_durable: verdict.is_durable(), verdict: Some(verdict) }
    }

    pub fn stays(verdict: Option<Box<Verdict>>) -> Self {
        Self { is_gone: false, is_durable: false, verdict }
    }

    pub fn code(&self) -> u8 {
        if self.is_gone && self.is_durable { exit::OK } else { exit::NOT_DURABLE }
    }
}

/// The signals that a client reports while it waits for a drain.
pub(super) fn signals() -> Result<Arc<Signals>, Error> {
    let signals = Signals::block(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT])
        .map_err(|error| Error::new("signals cannot be blocked").why(error))?;
    Ok(Arc::new(signals))
}

/// Drains, then unmounts. `again`: what the user does when no process uses the directory any more.
///
/// Errors: processes use the directory; the agent refuses or is lost; other members of the pool need it.
pub(super) fn take_away(mut agent: Connection, timeout: Option<u64>, quiet: bool, again: &str) -> Outcome<Taken> {
    let commands = agent.commands();
    let signals = signals()?;
    let over = agent.hello.over.clone();
    let scope = Scope::everything();
    let request = Request::Unmount { timeout_ms: timeout };
    let verdict = loop {
        let drained = match final_drain::follow(&mut agent, &scope, &request, &signals, quiet) {
            Err(error) if agent.is_silent() => {
                eprintln!("surgetank: {error}");
                return Ok(Taken::stays(None));
            }
            drained => drained?,
        };
        let verdict = match drained {
            Ok(Drained::Settled(verdict)) if verdict.is_drained() => verdict,
            Ok(Drained::Settled(verdict) | Drained::TimedOut(verdict)) => {
                words::print_verdict(&verdict, &commands);
                eprintln!("surgetank: {over} stays mounted: not everything is in the store");
                return Ok(Taken::stays(Some(verdict)));
            }
            Ok(Drained::GaveUp) => {
                eprintln!("surgetank: {over} stays mounted and goes on draining");
                return Ok(Taken::stays(None));
            }
            Err(Answer::Busy { holders }) => return Err(busy(&over.to_string(), &holders, again).into()),
            Err(other) => return Err(agent.confused(&other).into()),
        };
        match last_answer(&mut agent, quiet) {
            Ok(Answer::Done) => break verdict,
            Ok(Answer::Busy { holders }) => return Err(busy(&over.to_string(), &holders, again).into()),
            Ok(Answer::Error(refusal)) => return Err(Error::from(refusal).into()),
            Ok(other) => return Err(agent.confused(&other).into()),
            Err(lost) if !agent.goes_on_with_next() => return Err(lost.into()),
            Err(_replaced) => {}
        }
    };
    agent.await_exit()?;
    if !quiet || !verdict.is_durable() {
        words::print_verdict(&verdict, &commands);
    }
    Ok(Taken::goes(verdict))
}

/// The answer after the drain. A member of a pool may have to wait for others.
fn last_answer(agent: &mut Connection, quiet: bool) -> Result<Answer, Error> {
    let mut waited_for = 0;
    loop {
        match agent.receive()? {
            Answer::Waits { members, to_leave } => {
                if members != waited_for && members > 0 && !quiet {
                    let (over, end) = (&agent.hello.over, if to_leave { "left" } else { "closed its files" });
                    eprintln!("surgetank: {over} waits until {members} other member(s) of the pool have {end}");
                }
                waited_for = members;
            }
            answer => return Ok(answer),
        }
    }
}

fn busy(over: &str, holders: &[surgetank_core::report::Holder], again: &str) -> Error {
    let why = if holders.is_empty() {
        "a process that this user cannot see is inside".to_owned()
    } else {
        format!("\n{}", words::holder_lines(holders).join("\n"))
    };
    Error::new(format!("{over} stays mounted: it is in use"))
        .why(why)
        .remedy(format!("end them or let them leave, {again}"))
        .data("everything sealed goes on draining")
}
