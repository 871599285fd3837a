//! The verbs of the command line, one file each. Their return value is the process's exit code (`docs/exit-codes.md`).
//!
//! A verb reads its arguments, talks to the agent over the socket and prints. It never touches files of the mount.

pub(crate) mod advise;
pub(crate) mod calibrate;
pub(crate) mod completions;
mod directory;
pub(crate) mod doctor;
pub(crate) mod exit;
pub(crate) mod gc;
pub(crate) mod help;
pub(crate) mod hint;
mod left;
pub(crate) mod locate;
pub(crate) mod model;
pub(crate) mod mount;
pub(crate) mod outcome;
pub(crate) mod plan;
pub(crate) mod pool;
mod pooling;
pub(crate) mod probe;
pub(crate) mod program;
mod progress;
pub(crate) mod records;
pub mod report;
pub(crate) mod rescue;
pub(crate) mod run;
pub mod settings;
pub(crate) mod stage;
pub(crate) mod status;
pub(crate) mod tend;
pub(crate) mod wait;
pub(crate) mod why;
pub(crate) mod words;
pub(crate) mod workflow;

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use surgetank_types::error::Error;

use crate::agent::life;
use outcome::Failure;
pub use program::Program;

#[derive(Parser)]
#[command(
    name = "surgetank",
    version,
    about = "A burst buffer for scientific workflows: node-local speed, and nothing is ever lost",
    disable_help_subcommand = true,
    after_help = "Exit codes: the command's own; 1 surgetank failed, 2 usage, 3 something is not durable, 4 the drain continues in the background.\nAll exit codes: surgetank help exit-codes. `surgetank help` lists the topics of the manual."
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a command on the fast tiers; return when its output is in the store
    Run(run::Args),
    /// Mount over a directory for all programs of this machine, until `umount`
    Mount(mount::MountArgs),
    /// Drain, then unmount
    Umount(mount::UmountArgs),
    /// Show tiers, queue, rates, runs, and files that are not durable
    Status(status::Args),
    /// Report a run: where the bytes went, which programs did the I/O, what slowed it
    Report(report::ReportArgs),
    /// Show the pool of a directory (members, owners of directories), or leave it
    Pool(pool::Args),
    /// Wait until all, or these paths, are durable
    Wait(wait::Args),
    /// Show where a file is, its state, and the rule and decision for it
    Why(why::Args),
    /// Show on which nodes and tiers files are, for thousands at once
    Locate(locate::Args),
    /// Give back the tier space of durable files
    Evict(tend::PathsArgs),
    /// Keep files in their tier
    Pin(tend::PathsArgs),
    /// Allow eviction of files again
    Unpin(tend::PathsArgs),
    /// Copy files to the tiers before programs open them
    Prefetch(tend::PrefetchArgs),
    /// Give hints about files, existing or future ones: NAME=VALUE… PATH…
    Hint(hint::Args),
    /// Revalidate the store now, so that changes of other clients are visible
    Refresh(tend::RefreshArgs),
    /// Abort unfinished uploads to a server
    Gc(gc::GcArgs),
    /// Copy files and trees from a store to this node, or from store to store; asked for again it goes on where it was
    StageIn(stage::StageArgs),
    /// The same from this node to a store
    StageOut(stage::StageArgs),
    /// Show what the rules would do with the files below a directory, without changes
    Plan(plan::PlanArgs),
    /// Compare catalog, tiers and store while no agent runs; under a mount, scrub files that tier and store have
    Fsck(rescue::FsckArgs),
    /// Drain files that a dead agent left in the tiers, or copy them elsewhere
    Scavenge(rescue::ScavengeArgs),
    /// Check what this machine offers, and name remedies for what it lacks
    Doctor(doctor::DoctorArgs),
    /// Measure this machine's tiers, store and agent, for `model` and `advise`
    Calibrate(calibrate::CalibrateArgs),
    /// Predict how long a workload takes, on the store and in each mode
    Model(model::ModelArgs),
    /// Advise whether to use Surgetank for a workload, and how
    Advise(advise::AdviseArgs),
    /// What a workflow's graph knows: import, explain, plot, hints, run, replay, crate (needs the Python package)
    Workflow(workflow::WorkflowArgs),
    /// Explain a verb, or a topic of the manual; write man pages (`--man DIR`)
    Help(help::HelpArgs),
    /// Print the completion script of a shell
    Completions(completions::CompletionsArgs),
    /// What `calibrate` times, in processes of its own
    #[command(hide = true)]
    Probe(probe::ProbeArgs),
    /// The agent itself; started by `run` and `mount`
    #[command(hide = true)]
    Agent,
}

/// Parses the command line, runs the verb, and returns the exit code.
pub fn main(program: &Program<'_>) -> u8 {
    // Every run waits for the agent's start, so the agent is recognised before any other setup.
    if std::env::args_os().nth(1).is_some_and(|verb| verb == "agent") {
        return life::main(program.backend);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.kind() == ErrorKind::InvalidUtf8 => {
            return print_failure(Failure::usage(not_utf8(&std::env::args_os().collect::<Vec<_>>())));
        }
        Err(error) => {
            // Help and version come this way too; an error of the terminal has no remedy.
            let _ = error.print();
            return if error.use_stderr() { exit::USAGE } else { exit::OK };
        }
    };
    let outcome = match cli.verb {
        Verb::Run(args) => run::run(program, args),
        Verb::Mount(args) => mount::mount(program, &args),
        Verb::Umount(args) => mount::umount(program, &args),
        Verb::Status(args) => status::status(program, &args),
        Verb::Report(args) => report::report(program, &args),
        Verb::Pool(args) => pool::pool(program, &args),
        Verb::Wait(args) => wait::wait(program, &args),
        Verb::Why(args) => why::why(program, &args),
        Verb::Locate(args) => locate::locate(program, &args),
        Verb::Evict(args) => tend::evict(program, &args),
        Verb::Pin(args) => tend::pin(program, &args, true),
        Verb::Unpin(args) => tend::pin(program, &args, false),
        Verb::Prefetch(args) => tend::prefetch(program, &args),
        Verb::Hint(args) => hint::hint(program, &args),
        Verb::Refresh(args) => tend::refresh(program, &args),
        Verb::Gc(args) => gc::gc(program, &args),
        Verb::StageIn(args) | Verb::StageOut(args) => stage::stage(program, &args),
        Verb::Plan(args) => plan::run(args).map_err(Failure::usage),
        Verb::Fsck(args) => rescue::fsck(program, &args),
        Verb::Scavenge(args) => rescue::scavenge(program, &args),
        Verb::Doctor(args) => doctor::run(args).map_err(Failure::usage),
        Verb::Calibrate(args) => calibrate::calibrate(program, &args),
        Verb::Model(args) => model::model(&args),
        Verb::Advise(args) => advise::advise(&args),
        Verb::Workflow(args) => workflow::workflow(&args),
        Verb::Help(args) => help::help(&args, command()),
        Verb::Completions(args) => completions::completions(&args, command()),
        Verb::Probe(args) => probe::probe(&args),
        Verb::Agent => Ok(life::main(program.backend)),
    };
    outcome.unwrap_or_else(print_failure)
}

/// Prints a failure and returns its exit code.
fn print_failure(Failure { mut error, exit }: Failure) -> u8 {
    if exit == exit::USAGE && error.data.is_empty() {
        "nothing was started".clone_into(&mut error.data);
    }
    eprintln!("surgetank: {error}");
    exit
}

/// The command line: every verb with its options.
pub fn command() -> clap::Command {
    Cli::command()
}

/// The error for a word that is not UTF-8: clap does not say which one. It is the first word that clap refuses when all
/// others are valid.
fn not_utf8(words: &[OsString]) -> Error {
    let is_text = |word: &&OsString| word.to_str().is_some();
    let all_but = |but: usize| {
        let lossy = |(at, word): (usize, &OsString)| {
            if at == but { word.clone() } else { word.to_string_lossy().into_owned().into() }
        };
        words.iter().enumerate().map(lossy).collect::<Vec<OsString>>()
    };
    let is_refused = |at: &usize| {
        words.get(*at).filter(|word| !is_text(word)).is_some()
            && Cli::try_parse_from(all_but(*at)).is_err_and(|error| error.kind() == ErrorKind::InvalidUtf8)
    };
    let at = (0..words.len()).find(is_refused).unwrap_or(0);
    let word = words.get(at).map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let before = at.checked_sub(1).and_then(|before| words.get(before)).and_then(|word| word.to_str());
    let (label, value) = match (word.split_once('='), before) {
        (Some((option, value)), _) if option.starts_with("--") => (option.to_owned(), value.to_owned()),
        (_, Some(option)) if option.starts_with('-') && option != "--" => (option.to_owned(), word),
        _ => (format!("argument {at}"), word),
    };
    Error::new(format!("{label}: the value '{value}' is not UTF-8"))
        .remedy("give it in UTF-8; in patterns '?' or '*' stand for bytes of another encoding")
}
