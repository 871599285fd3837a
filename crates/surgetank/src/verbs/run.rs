//! `surgetank run … -- COMMAND…`: runs an agent, the command inside its mount and the final drain, and reports the
//! result as its exit code.
//!
//! ```text
//! find or start agent ─► join ─► command (signals passed on) ─► grace for its children ─► final drain ─► account
//! ```
//! The run *is* its connection to the agent: the agent releases it when the connection ends, even after a kill. This
//! process stays outside the mount, and has no other thread than the one of `seccomp/reach`. Only the command enters
//! the mount.

pub mod account;
mod attending;
pub mod child;
pub mod final_drain;
mod library;
pub mod offspring;
mod preload;
mod waiting;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use surgetank_core::report::{Holder, PathText, RunReport, Scope, Summary, Verdict, Visibility};
use surgetank_policy::config::Config;
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::RunId;

use super::outcome::{Failure, Outcome};
use super::pooling::Pooling;
use super::program::Program;
use super::settings::Settings;
use super::{directory, words};
use crate::agent::client::{self, Connection, Dialed, Joined};
use crate::agent::signals::Signals;
use crate::agent::wire::{Account, Answer, Request};
use child::Stillborn;
use final_drain::Drained;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    pooling: Pooling,
    /// Write the run's summary to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave the final drain to the agent (needs a global mount: `surgetank mount`)
    #[arg(long)]
    detach_drain: bool,
    /// No progress and no summary; problems are still reported
    #[arg(long, short)]
    quiet: bool,
    /// No progress
    #[arg(long)]
    no_progress: bool,
    /// No summary; progress and problems are reported
    #[arg(long)]
    no_summary: bool,
    /// Record which process reads and writes which file, and where in it. Everything goes through the agent then, and is slower
    #[arg(long)]
    trace: bool,
    /// Report each step
    #[arg(long, short)]
    verbose: bool,
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Signals that are passed on to the command.
const PASSED_ON: [i32; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGTSTP,
    libc::SIGWINCH,
];

/// Signals with which people and schedulers end a run.
const ENDS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

pub fn run(program: &Program<'_>, args: Args) -> Outcome {
    directory::clear_dead_mount(program, &args.settings)?;
    let mut config = (program.configure)(&args.settings).map_err(Failure::usage)?;
    args.pooling.configure(&mut config, args.quiet).map_err(Failure::usage)?;
    config.ask_when_the_job_ends();
    let cwd = std::env::current_dir()
        .map_err(|error| Error::new("the working directory is gone").why(error).remedy("cd to it again"))?;
    let inherited = child::inherited_below(&config.over);
    // This precedes every start: the user must learn now that a report cannot be written.
    let json = args.json.as_deref().map(open_report).transpose()?;

    directory::refuse_other_store(&config)?;
    let (mut agent, run, started) = join(&config, &args)?;
    if args.trace
        && let Err(error) = trace(&mut agent)
    {
        // (For the record: the run was not killed.)
        let reason = "it could not be traced, and nothing was begun".to_owned();
        let account = Account { command_exit: 1, exit: 1, reason, ended_us_ago: 0 };
        drop(agent.ask(&Request::Account(account)));
        drop(agent.ask(&Request::Release));
        return Err(error.into());
    }
    if args.verbose {
        let how = if started { "started" } else { "joined" };
        eprintln!("surgetank: {how} the agent of {} (pid {}), run {}", agent.hello.over, agent.pid, run.0);
    }
    check_agent(&agent, &config, &args, started)?;
    report_descriptors(&inherited, &agent, &config)?;

    let mut numbers = PASSED_ON.to_vec();
    numbers.push(libc::SIGCHLD);
    let signals = Arc::new(Signals::block(&numbers).map_err(broken)?);
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(broken)?;

    let mut session = Run {
        config,
        args,
        agent,
        run,
        signals,
        agent_lost: false,
        dialed: None,
        heard: Vec::new(),
        abandoned: false,
        begun: clock::tick(),
        ended: clock::tick(),
    };
    surgetank_types::crash_point!("run.joined");
    let spawned = loop {
        // (The agent does not see files that the shim opens.)
        let variables = match session.args.trace {
            true => Vec::new(),
            false => preload::variables(&session.config, &session.agent.hello, session.run),
        };
        match child::spawn(&session.args.command, &cwd, &session.agent, &session.signals, &variables) {
            // The agent was killed after its greeting: the next one has the same namespaces.
            Err(Stillborn::Ours(_)) if !session.agent_lost && session.has_another_agent()? => {}
            spawned => break spawned,
        }
    };
    let command_exit = match spawned {
        Ok(pid) => session.attend(pid)?,
        Err(Stillborn::Command { exit, error }) => {
            eprintln!("surgetank: {error}");
            exit
        }
        Err(Stillborn::Ours(error)) => return Err(error.into()),
    };
    session.ended = clock::tick();
    let left_running = if session.abandoned { offspring::living() } else { session.grant_grace()? };
    session.finish(command_exit, left_running, json)
}

fn broken(error: impl std::fmt::Display) -> Failure {
    Error::new("the run cannot be set up").why(error).into()
}

fn open_report(path: &Path) -> Outcome<std::fs::File> {
    std::fs::File::create(path).map_err(|error| {
        let what = Error::new(format!("--json: {} cannot be written", path.display())).why(error);
        Failure::usage(what.remedy("give a file in a directory that is yours to write").data("nothing was started"))
    })
}

const COMMAND_SHOWN_CHARS_MAX: usize = 1000;
/// With many short runs over one directory, a run may find one leaving agent after another. A thousand in a row is not
/// a coincidence.
const AGENTS_TRIED_MAX: usize = 1000;

/// For display in `status`, cut to a readable length.
fn shown_command(args: &Args) -> String {
    let command: Vec<_> = args.command.iter().map(|word| word.to_string_lossy()).collect();
    command.join(" ").chars().take(COMMAND_SHOWN_CHARS_MAX).collect()
}

/// Finds or starts the agent and joins it; tries again if the agent was about to leave.
fn join(config: &Config, args: &Args) -> Result<(Connection, RunId, bool)> {
    let command = shown_command(args);
    for _ in 0..AGENTS_TRIED_MAX {
        let mut found = client::find_or_start(config, Visibility::Private)?;
        match found.connection.join(&command)? {
            Joined::As(run) => {
                let started = found.started;
                return Ok((found.settled(), run, started));
            }
            Joined::Leaving => {
                // Returns when that agent has ended; then a fresh one is started.
                found.connection.await_exit()?;
            }
        }
    }
    Err(Error::new(format!("no agent for {} stays", config.over.display()))
        .why(format!("{AGENTS_TRIED_MAX} of them were about to go when they were asked"))
        .remedy(format!("look into the agent's log below {}", config.state.display()))
        .data("nothing was begun"))
}

fn trace(agent: &mut Connection) -> Result<()> {
    match agent.ask(&Request::Trace)? {
        Answer::Done => Ok(()),
        other => Err(agent.confused(&other)),
    }
}

fn check_agent(agent: &Connection, config: &Config, args: &Args, started: bool) -> Outcome<()> {
    let hello = &agent.hello;
    if !hello.inherited.is_empty() && !args.quiet {
        eprintln!("surgetank: {}", hello.inherited);
    }
    if args.detach_drain && hello.visibility == Visibility::Private {
        return Err(Failure::usage(
            Error::new("--detach-drain needs a mount that outlives the run")
                .why(format!("the mount over {} is private to its runs", hello.over))
                .remedy(format!("when its runs have ended, mount it first:\n  {}", agent.commands().mount())),
        ));
    }
    if started {
        return Ok(());
    }
    agent.check_store(config).map_err(Failure::usage)?;
    let strange = agent.check_pool(config).map_err(Failure::usage)?;
    if let Some(line) = strange.filter(|_| !args.quiet) {
        eprintln!("surgetank: {line}");
    }
    let ignored = args.settings.given_at_start();
    if !ignored.is_empty() {
        eprintln!(
            "surgetank: {} is served already; its agent keeps its start options and ignores {}",
            hello.over,
            ignored.join(", ")
        );
    }
    Ok(())
}

/// Closes descriptors that lead underneath the mount, and reports them.
fn report_descriptors(inherited: &[child::Inherited], agent: &Connection, config: &Config) -> Outcome<()> {
    // In a globally mounted directory these descriptors are the mount's own.
    if agent.hello.visibility == Visibility::Global {
        return Ok(());
    }
    for descriptor in inherited {
        if descriptor.number > 2 {
            child::close_in_command(descriptor).map_err(broken)?;
            eprintln!(
                "surgetank: descriptor {} ({}) leads underneath the mount and is closed for the command",
                descriptor.number,
                descriptor.path.display()
            );
        } else if config.store != config.over {
            eprintln!(
                "surgetank: {} is redirected to {}, which is not in the store {}",
                ["stdin", "stdout", "stderr"][usize::try_from(descriptor.number).unwrap_or(0).min(2)],
                descriptor.path.display(),
                config.store.display()
            );
        }
    }
    Ok(())
}

/// A run that has joined.
struct Run {
    config: Config,
    args: Args,
    agent: Connection,
    run: RunId,
    signals: Arc<Signals>,
    /// The agent was killed and no other one replaced it.
    agent_lost: bool,
    /// The agent was killed: the call to its replacement.
    dialed: Option<Dialed>,
    /// Answers that no wait has taken yet.
    heard: Vec<Answer>,
    /// The agent does not answer, and the second signal arrived: the command may still run.
    abandoned: bool,
    begun: Instant,
    ended: Instant,
}

impl Run {
    /// Gives background children time to finish; returns those that still run.
    fn grant_grace(&mut self) -> Result<Vec<Holder>> {
        let until = clock::tick() + self.config.grace;
        let mut account = false;
        loop {
            while offspring::reap().is_some() {}
            let left = offspring::living();
            if left.is_empty() || clock::tick() >= until {
                return Ok(left);
            }
            if !account && !self.args.quiet {
                account = true;
                eprintln!(
                    "surgetank: waiting up to {} for background children:",
                    words::millis(millis(self.config.grace))
                );
                words::print_lines(&words::holder_lines(&left));
            }
            self.await_event(Some(until))?;
            while let Some(arrived) = self.signals.next().map_err(|error| Error::new("signals").why(error))? {
                if ENDS.contains(&arrived.number) {
                    // The user ended the wait; the drain follows.
                    return Ok(offspring::living());
                }
            }
        }
    }

    fn finish(mut self, command_exit: u8, left_running: Vec<Holder>, json: Option<std::fs::File>) -> Outcome {
        let mut detached = self.args.detach_drain;
        let mut gave_up = false;
        let mut timed_out = false;
        let mut verdict: Option<Verdict> = None;
        if !detached && !self.abandoned {
            let mut drained = self.drain();
            // The agent died as the command ended, or since.
            while drained.is_err() && !self.agent.is_silent() {
                match self.has_another_agent() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        drained = Err(error);
                        break;
                    }
                }
                let lost = self.agent_lost;
                drained = self.drain();
                if lost {
                    break;
                }
            }
            match drained {
                Ok(Drained::Settled(settled)) => verdict = Some(*settled),
                Ok(Drained::TimedOut(left)) => {
                    timed_out = !left.is_durable();
                    verdict = Some(*left);
                }
                Ok(Drained::GaveUp) => gave_up = true,
                Err(error) => eprintln!("surgetank: {error}"),
            }
        }
        let drain_ms = millis(self.ended.elapsed());
        // The run requests no figures while the agent is silent, or while it still reports a drain that the run
        // abandoned.
        let silent = self.agent.is_silent() && !gave_up;
        let summary = self.summary();
        detached &= left_running.is_empty();
        let facts = account::Facts {
            command_exit,
            verdict: verdict.as_ref(),
            left_running: &left_running,
            agent_lost: self.agent_lost,
            silent,
            gave_up,
            timed_out,
            detached,
        };
        let (exit, reason) = account::decide(&facts);
        let account = Account {
            command_exit,
            exit,
            reason: reason.into(),
            ended_us_ago: u64::try_from(self.ended.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        // Only for the record, which an ended agent cannot write.
        let _ = self.agent.ask(&Request::Account(account));
        let (last, unrecorded) = match self.agent.ask(&Request::Release) {
            Ok(Answer::Released { last, unrecorded }) => (last, unrecorded),
            _ => (false, String::new()),
        };
        self.report(&facts, summary.as_ref(), drain_ms, reason);
        if !unrecorded.is_empty() {
            eprintln!("surgetank: {}", account::unrecorded(&unrecorded, exit));
        }
        // The agent's last work (unmount, catalog) is part of the run: a script may remove the tiers next.
        if last && !gave_up && !timed_out && left_running.is_empty() {
            let _ = self.agent.await_exit().inspect_err(|error| eprintln!("surgetank: {error}"));
        }
        if let Some(file) = json {
            let report = RunReport {
                version: env!("CARGO_PKG_VERSION").into(),
                over: self.agent.hello.over.clone(),
                store: self.agent.hello.store.clone(),
                command: self.args.command.iter().map(|word| PathText(word.as_bytes().to_vec())).collect(),
                command_exit,
                exit,
                command_ms: millis(self.ended.duration_since(self.begun)),
                drain_ms,
                reason: reason.into(),
                verdict,
                summary,
                left_running,
            };
            let path = self.args.json.as_deref().unwrap_or(Path::new("--json"));
            return account::write(file, path, &report);
        }
        Ok(exit)
    }

    /// The final drain of what this run wrote; of everything if the agent had to be started again.
    fn drain(&mut self) -> Result<Drained> {
        let mut scope = Scope::run(self.run);
        if self.agent_lost {
            // No code checks the signals in these waits: a signal ends this process. Sealed files stay in the tiers.
            self.signals.unblock();
            let joined = join(&self.config, &self.args);
            self.signals.block_again().map_err(|error| Error::new("signals cannot be blocked").why(error))?;
            let (agent, run, _) = joined?;
            eprintln!("surgetank: a new agent took over (pid {}); all that was left is drained", agent.pid);
            (self.agent, self.run) = (agent, run);
            scope = Scope::everything();
        }
        // The report must come before the scheduler's kill. (If the deadline has passed without a kill, it was wrong.)
        let left = self.config.deadline.as_ref().map(|end| end.left().saturating_sub(end.lead / 4));
        let timeout_ms = left.filter(|left| !left.is_zero()).map(millis);
        let request = Request::Wait { scope: scope.clone(), timeout_ms };
        let quiet = self.args.quiet || self.args.no_progress;
        match final_drain::follow(&mut self.agent, &scope, &request, &self.signals, quiet)? {
            Ok(drained) => Ok(drained),
            Err(answer) => Err(self.agent.confused(&answer)),
        }
    }

    fn summary(&mut self) -> Option<Summary> {
        match self.agent.ask(&Request::Summary { run: Some(self.run) }) {
            Ok(Answer::Summary(summary)) => Some(*summary),
            _ => None,
        }
    }

    fn report(&self, facts: &account::Facts<'_>, summary: Option<&Summary>, drain_ms: u64, reason: &str) {
        let no_summary = self.args.quiet || self.args.no_summary;
        if !no_summary && let Some(summary) = summary {
            words::print_lines(&account::summary_lines(summary, drain_ms));
        }
        if let Some(verdict) = facts.verdict
            && (!no_summary || !verdict.is_durable())
        {
            words::print_verdict(verdict, &self.agent.commands());
        }
        if !facts.left_running.is_empty() {
            eprintln!("surgetank: still running after the grace:");
            words::print_lines(&words::holder_lines(facts.left_running));
        }
        if !reason.is_empty() {
            eprintln!("surgetank: {reason} (the command's own exit code was {})", facts.command_exit);
        }
        let (commands, pid) = (self.agent.commands(), self.agent.pid);
        if facts.timed_out {
            eprintln!(
                "surgetank: the agent (pid {pid}) goes on as long as it may. Bring what it leaves to the store with:\n  {}",
                commands.scavenge()
            );
        } else if facts.gave_up || facts.detached {
            eprintln!("surgetank: the agent (pid {pid}) goes on; wait for it with:\n  {}", commands.wait());
        } else if facts.verdict.is_some_and(|verdict| !verdict.not_durable.is_empty()) {
            eprintln!("surgetank: after the cause is fixed, bring it to the store with:\n  {}", commands.run());
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
