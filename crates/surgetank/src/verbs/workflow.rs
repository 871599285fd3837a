//! `surgetank workflow`: the Python package's command, found beside this program, in the environment's Python or on the path.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use surgetank_core::error::Error;

use super::{Failure, Outcome, exit};

const NAME: &str = "surgetank-workflow";

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
    // One wheel puts both into one directory.
    let beside = own.as_ref().and_then(|own| own.parent()).map(|dir| dir.join(NAME)).filter(|path| path.exists());
    let mut command = Command::new(beside.unwrap_or_else(|| PathBuf::from(NAME)));
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
        error: Error::new(format!("{NAME} cannot be executed"))
            .why(error)
            .remedy("workflows need the Python package: `pip install .` in Surgetank's sources brings it"),
        exit: code,
    })
}
