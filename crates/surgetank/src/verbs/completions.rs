//! `surgetank completions SHELL`: the script with which a shell completes verbs, options and their values.

use clap::Command;
use clap_complete::Shell;

use super::outcome::Outcome;
use super::{exit, words};

#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    shell: Shell,
}

pub fn completions(args: &CompletionsArgs, mut line: Command) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut line, "surgetank", &mut script);
    words::print(&String::from_utf8_lossy(&script))?;
    Ok(exit::OK)
}
