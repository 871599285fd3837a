//! `evict`, `pin`, `unpin`, `prefetch`, `refresh`: manage the files in the tiers and what is cached about the store.

use std::path::{Path, PathBuf};

use surgetank_core::report::PathText;
use surgetank_types::error::Error;

use super::directory::agent_of;
use super::outcome::Outcome;
use super::program::Program;
use super::settings::Settings;
use super::{exit, words};
use crate::agent::client::Connection;
use crate::agent::wire::{Answer, Request};

#[derive(Debug, clap::Args)]
pub struct PathsArgs {
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub struct PrefetchArgs {
    /// Files, directories or globs
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// Sends a request for each path; a refused one does not stop the rest.
fn each(
    program: &Program<'_>,
    args: &PathsArgs,
    request: impl Fn(PathText) -> Request,
    mut heard: impl FnMut(&Path, &Answer) -> Result<(), Error>,
) -> Outcome {
    let mut code = exit::OK;
    for path in &args.paths {
        let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), path)?;
        match agent.relative(path).and_then(|relative| agent.ask(&request(relative))) {
            Ok(answer) => heard(path, &answer)?,
            Err(error) => {
                eprintln!("surgetank: {error}");
                code = exit::FAILED;
            }
        }
    }
    Ok(code)
}

pub fn evict(program: &Program<'_>, args: &PathsArgs) -> Outcome {
    each(
        program,
        args,
        |path| Request::Evict { path },
        |path, answer| {
            if let Answer::Evicted { bytes } = answer {
                words::print(&format!("{}: {} freed\n", path.display(), words::bytes(*bytes)))?;
            }
            Ok(())
        },
    )
}

pub fn pin(program: &Program<'_>, args: &PathsArgs, on: bool) -> Outcome {
    each(program, args, |path| Request::Pin { path, on }, |_, _| Ok(()))
}

#[derive(Debug, clap::Args)]
pub struct RefreshArgs {
    /// Anything in the served directory
    #[arg(value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

/// Changes by other clients of the store are visible when this returns.
pub fn refresh(program: &Program<'_>, args: &RefreshArgs) -> Outcome {
    let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), &args.directory)?;
    match agent.ask(&Request::Refresh)? {
        Answer::Done => Ok(exit::OK),
        other => Err(agent.confused(&other).into()),
    }
}

pub fn prefetch(program: &Program<'_>, args: &PrefetchArgs) -> Outcome {
    let first = args.paths.first().map_or(Path::new("."), PathBuf::as_path);
    let mut agent: Connection = agent_of(program, &Settings::of_state(args.state.as_ref()), first)?;
    let patterns = args.paths.iter().map(|path| agent.relative(path)).collect::<Result<_, Error>>()?;
    match agent.ask(&Request::Prefetch { patterns })? {
        Answer::Prefetching(begun) => {
            let files = words::count(begun.files);
            words::print(&format!("{files} files, {} on their way\n", words::bytes(begun.bytes)))?;
            Ok(exit::OK)
        }
        other => Err(agent.confused(&other).into()),
    }
}
