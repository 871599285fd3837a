//! `surgetank pool lost`: files whose content was only on a lost node. They keep their names until something makes them again.
//!
//! It looks at each file through the mount, so it sees those of all members.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use surgetank_core::report::PathText;
use surgetank_types::error::Error;

use super::super::directory::{agent_of, without_pool};
use super::super::exit;
use super::super::outcome::Outcome;
use super::super::program::Program;
use super::super::settings::Settings;
use crate::agent::wire::{Answer, Request};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory, or one below [default: the one we are in]
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Remove them, so that an engine sees that they are missing
    #[arg(long)]
    remove: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub fn lost(program: &Program<'_>, args: &Args) -> Outcome {
    let directory = args.directory.clone().unwrap_or_else(|| PathBuf::from("."));
    let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), &directory)?;
    if !matches!(agent.ask(&Request::Pool)?, Answer::Pool(Some(_))) {
        return Err(without_pool(&agent).into());
    }
    let device = fs::metadata(&directory).map_err(|why| unreadable(&directory, &why))?.dev();
    let mut found = Vec::new();
    find(&directory, device, &mut found)?;
    let mut kept = None;
    if args.remove {
        found.retain(|path| match remove(path) {
            Ok(is_removed) => is_removed,
            Err(why) => {
                kept.get_or_insert_with(|| {
                    Error::new(format!("{} cannot be removed", path.display()))
                        .why(why)
                        .data("what is listed was removed")
                });
                false
            }
        });
    }
    let mut out = std::io::stdout().lock();
    let printed = if args.json {
        let all: Vec<PathText> = found.iter().map(|path| PathText(path.as_os_str().as_bytes().to_vec())).collect();
        serde_json::to_string_pretty(&all).map_err(std::io::Error::other).and_then(|text| writeln!(out, "{text}"))
    } else {
        found.iter().try_for_each(|path| out.write_all(&[path.as_os_str().as_bytes(), b"\n"].concat()))
    };
    printed.and_then(|()| out.flush()).map_err(|why| Error::new("the list cannot be printed").why(why))?;
    if let Some(error) = kept {
        return Err(error.into());
    }
    Ok(if found.is_empty() || args.remove { exit::OK } else { exit::NOT_DURABLE })
}

/// Returns `false` if it is there again, or gone, since it was found.
fn remove(path: &Path) -> std::io::Result<bool> {
    if !is_lost(path) {
        return Ok(false);
    }
    match fs::remove_file(path) {
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

fn unreadable(at: &Path, why: &std::io::Error) -> Error {
    Error::new(format!("{} cannot be searched", at.display())).why(why).data("nothing was changed")
}

fn find(directory: &Path, device: u64, found: &mut Vec<PathBuf>) -> Result<(), Error> {
    let mut above = vec![directory.to_owned()];
    while let Some(at) = above.pop() {
        let entries = match fs::read_dir(&at).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Err(why) if why.kind() == std::io::ErrorKind::NotFound && at != directory => continue,
            entries => entries.map_err(|why| unreadable(&at, &why))?,
        };
        for entry in entries {
            let path = entry.path();
            match entry.file_type() {
                // (Not below another mount.)
                Ok(kind) if kind.is_dir() && entry.metadata().is_ok_and(|of| of.dev() == device) => above.push(path),
                Ok(kind) if kind.is_file() && is_lost(&path) => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(())
}

fn is_lost(path: &Path) -> bool {
    let mut state = [0; 32];
    let known = rustix::fs::lgetxattr(path, "user.surgetank.state", &mut state);
    known.is_ok_and(|bytes| state.get(..bytes) == Some(b"lost"))
}
