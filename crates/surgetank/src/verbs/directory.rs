//! The directory that a verb is about: the agent that serves it, a dead mount over it, or a store that its place refuses.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use surgetank_core::report::PathText;
use surgetank_policy::config::Config;
use surgetank_types::error::{Error, Result};

use super::outcome::{Failure, Outcome};
use super::program::{Program, state_root};
use super::settings::Settings;
use crate::agent::client::{self, Connection, absolute};
use crate::agent::commands::{self, Commands};

/// The agent that serves `path`, or an error that says plainly that none does.
pub(super) fn agent_of(program: &Program<'_>, settings: &Settings, path: &Path) -> Outcome<Connection> {
    let state = state_root(program, settings)?;
    if let Some(agent) = client::serving(&state, path)? {
        return Ok(agent);
    }
    Err(match client::dead_mount(path)? {
        Some(dead) => dead_mount_error(&dead, &state),
        None => Error::new(format!("no agent of yours serves {}", path.display()))
            .remedy(format!(
                "start one with `surgetank run` or `surgetank mount`, or list the agents of this state directory:\n  {}",
                commands::asking(&["status"], &state)
            ))
            .data("nothing was changed"),
    }
    .into())
}

pub(super) fn without_pool(agent: &Connection) -> Error {
    Error::new(format!("{} belongs to no pool", agent.hello.over))
        .why("its agent was started without --pool")
        .remedy("name a pool when you start it: surgetank run --pool NAME …")
}

pub(super) fn dead_mount_error(dead: &Path, state: &Path) -> Error {
    Error::new(format!("{} is a dead mount of an agent that was killed", dead.display()))
        .remedy(Commands::of_directory(dead, state).umount())
        .data("what was closed there is in the store or still in the tiers; the next run over the directory brings it to the store")
}

/// For verbs that start an agent.
pub(super) fn refuse_other_store(config: &Config) -> Outcome<()> {
    client::refused_store(config)?.map_or(Ok(()), |refusal| Err(Failure::usage(refusal)))
}

/// For verbs that start an agent: no file in a dead mount can be read, not even the configuration.
pub(super) fn clear_dead_mount(program: &Program<'_>, settings: &Settings) -> Outcome<()> {
    let from_environment = std::env::var_os("SURGETANK_OVER").filter(|over| !over.is_empty()).map(PathBuf::from);
    let over = settings.over.clone().or(from_environment).unwrap_or_else(|| PathBuf::from("."));
    let Some(dead) = client::dead_mount(&over)? else {
        return Ok(());
    };
    // A process whose working directory is in the dead mount continues in the directory underneath.
    let here = std::env::current_dir();
    let state = state_root(program, settings)?;
    if !client::clear_dead_mount(&state, &dead)? {
        return Err(dead_mount_error(&dead, &state).into());
    }
    if let Ok(here) = here {
        std::env::set_current_dir(&here).map_err(|error| {
            Error::new(format!("the working directory {} is not in the store", here.display())).why(error)
        })?;
    }
    Ok(())
}

/// Paths as the agent knows them. Directories are looked up once: thousands of paths are in few of them.
pub(super) struct Below<'a> {
    over: &'a Path,
    parents: HashMap<PathBuf, PathBuf>,
}

impl<'a> Below<'a> {
    /// `over`: the served directory.
    pub(super) fn new(over: &'a Path) -> Self {
        Self { over, parents: HashMap::new() }
    }

    /// The path below that directory.
    pub(super) fn relative(&mut self, path: &Path) -> Result<PathText> {
        let whole = match path.parent().zip(path.file_name()) {
            None => absolute(path)?,
            Some((parent, name)) => match self.parents.get(parent) {
                Some(real) => real.join(name),
                None => {
                    let whole = absolute(path)?;
                    if let Some(real) = whole.parent() {
                        self.parents.insert(parent.to_path_buf(), real.to_path_buf());
                    }
                    whole
                }
            },
        };
        whole.strip_prefix(self.over).map(Into::into).map_err(|_| {
            Error::new(format!("{} is not below {}", path.display(), self.over.display()))
                .why("the agent serves that directory only")
        })
    }
}
