//! `surgetank workflow`: the Python package's command, in the Python beside this program or the first on the path.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use surgetank_core::error::Error;

use super::{Failure, Outcome, exit};

/// Without `-m`: that would say only that there is no such module.
const START: &str = "
import sys
try:
    from surgetank.workflow.cli import main
except ModuleNotFoundError as error:
    if (error.name or '').split('.')[0] != 'surgetank':
        raise
    sys.exit(f'surgetank: {sys.executable} has no package surgetank\\n  try:  `pip install .` in the sources of Surgetank brings it')
sys.exit(main())
";

/// What the workflow's graph knows: import, explain, plot, hints, run, replay, crate (docs/workflows.md)
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct WorkflowArgs {
    /// Its verb and options; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

pub fn workflow(args: &WorkflowArgs) -> Outcome {
    let own = std::env::current_exe().ok();
    // One wheel puts program and package below one interpreter.
    let beside = own.as_ref().and_then(|own| own.parent()).map(|dir| dir.join("python3")).filter(|path| path.exists());
    let mut command = Command::new(beside.unwrap_or_else(|| PathBuf::from("python3")));
    // Not what lies in the current directory under that name.
    command.args(["-P", "-c", START]);
    command.args(&args.words);
    if let Some(own) = own
        && std::env::var_os("SURGETANK_BINARY").is_none()
    {
        command.env("SURGETANK_BINARY", own);
    }
    // Comes back only when it failed.
    let error = command.exec();
    let code = if error.kind() == io::ErrorKind::NotFound { exit::NOT_FOUND } else { exit::NOT_EXECUTABLE };
    Err(Failure {
        error: Error::new("python3 cannot be executed").why(error).remedy(
            "workflows need Python 3.11 or later and the Python package: `pip install .` in Surgetank's sources",
        ),
        exit: code,
    })
}
