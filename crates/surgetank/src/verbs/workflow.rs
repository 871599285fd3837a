//! `surgetank workflow`: the Python package's command, in the Python beside this program or the first on the path.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use surgetank_types::error::Error;

use super::outcome::{Failure, Outcome};
use super::{exit, words};

/// Without `-m`, whose error would say only that the module does not exist.
const START: &str = "
import sys
try:
    from surgetank.workflow.cli import main
except ModuleNotFoundError as error:
    if (error.name or '').split('.')[0] != 'surgetank':
        raise
    sys.exit(f'surgetank: {sys.executable} has no package surgetank\\n  try:  `pip install .` in the sources of Surgetank brings it\\n  data: nothing was started')
sys.exit(main())
";

/// What the workflow's graph knows: import, explain, plot, hints, run, replay, crate
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct WorkflowArgs {
    /// Its verb and options; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// The package's verbs. A test of the package compares them with its own.
const VERBS: [(&str, &str); 7] = [
    ("import", "Read a description and write it as WfFormat"),
    ("explain", "Per file: pattern, lifetime, size, readers, hint; the peak of live bytes"),
    ("plot", "Draw the graph, files coloured by lifetime or tier, as SVG"),
    ("hints", "The hints for the agent: for `surgetank hint --from`, or as rules"),
    ("run", "Run the tasks on this machine, or on the nodes of a Slurm job"),
    ("replay", "Replay a recorded execution with scaled sizes and times"),
    ("crate", "Write a run as a Workflow Run RO-Crate"),
];

fn usage() -> String {
    let rows: String = VERBS.iter().map(|(verb, about)| format!("  {verb:<8} {about}\n")).collect();
    format!(
        "What the workflow's graph knows: lifetimes, patterns and placement\n\n\
         Usage: surgetank workflow VERB [OPTION…]\n\nVerbs:\n{rows}\n\
         `surgetank workflow VERB --help` lists a verb's options; it needs the Python package.\n\
         `surgetank help workflows` explains them all.\n"
    )
}

pub fn workflow(args: &WorkflowArgs) -> Outcome {
    // The list of verbs needs no Python.
    if matches!(&args.words[..], [word] if word == "--help" || word == "-h") {
        words::print(&usage())?;
        return Ok(exit::OK);
    }
    let own = std::env::current_exe().ok();
    // One wheel installs program and package for one interpreter.
    let beside = own.as_ref().and_then(|own| own.parent()).map(|dir| dir.join("python3")).filter(|path| path.exists());
    let mut command = Command::new(beside.unwrap_or_else(|| PathBuf::from("python3")));
    // A module of that name in the current directory must not be imported.
    command.args(["-P", "-c", START]);
    command.args(&args.words);
    if let Some(own) = own
        && std::env::var_os("SURGETANK_BINARY").is_none()
    {
        command.env("SURGETANK_BINARY", own);
    }
    // Returns only on failure.
    let error = command.exec();
    let code = if error.kind() == io::ErrorKind::NotFound { exit::NOT_FOUND } else { exit::NOT_EXECUTABLE };
    Err(Failure {
        error: Error::new("python3 cannot be executed")
            .why(error)
            .remedy(
                "workflows need Python 3.11 or later and the Python package: `pip install .` in Surgetank's sources",
            )
            .data("nothing was started"),
        exit: code,
    })
}
