//! The parts of the program that the verbs need. The binary chooses them, a test passes its own.

use std::path::PathBuf;

use surgetank_policy::config::Config;
use surgetank_types::error::Result;

use super::outcome::{Failure, Outcome};
use super::settings::Settings;
use crate::agent::engine::Backend;

/// The parts of the program that the verbs need.
pub struct Program<'a> {
    /// Serves a directory.
    pub backend: &'a dyn Backend,
    /// Resolves the configuration of a verb.
    pub configure: fn(&Settings) -> Result<Config>,
    /// For verbs that only ask, from any directory.
    pub state_root: fn(&Settings) -> Result<PathBuf>,
}

/// The state root, for verbs that only ask.
pub(super) fn state_root(program: &Program<'_>, settings: &Settings) -> Outcome<PathBuf> {
    (program.state_root)(settings).map_err(Failure::usage)
}
