//! The commands that messages print about a directory. A shell runs each one as printed, from any working directory.
//! Each names the directory, and the store, tiers and state that its agent was started with.
//!
//! The danger that it avoids: advice that omits the store and so brings files to the wrong store.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use surgetank_policy::config::Config;
use surgetank_types::shell;

use super::place::{Place, StateRoot};

#[derive(Debug, Clone)]
pub struct Commands {
    over: PathBuf,
    /// The options that `run`, `mount`, `fsck` and `scavenge` need.
    options: Vec<OsString>,
    /// The options that the asking verbs need.
    state: Vec<OsString>,
}

impl Commands {
    /// The options of this configuration.
    pub fn of(config: &Config) -> Self {
        let state = Config::state_options(&config.state);
        Self { over: config.over.clone(), options: config.again.clone(), state }
    }

    /// The options of the last agent at this place. (An earlier version did not write them down.)
    pub fn at(place: &Place, over: &Path) -> Self {
        let state = place.path().parent().map(Config::state_options).unwrap_or_default();
        let options = place.identity().map_or_else(Vec::new, |identity| identity.options());
        let options = if options.is_empty() { state.clone() } else { options };
        Self { over: over.to_path_buf(), options, state }
    }

    /// The same, from the place's path.
    pub fn of_path(place: &Path, over: &Path) -> Self {
        if let Ok(place) = Place::open(place) {
            return Self::at(&place, over);
        }
        let state = place.parent().map(Config::state_options).unwrap_or_default();
        Self { over: over.to_path_buf(), options: state.clone(), state }
    }

    /// For a directory whose place has to be searched: a dead mount has no numbers of its own.
    pub fn of_directory(over: &Path, state: &Path) -> Self {
        let places = StateRoot::open_existing(state).ok().flatten().and_then(|root| root.places().ok());
        let places = places.into_iter().flatten().filter(|place| place.served(over));
        // A place whose agent was killed comes first: it has leftovers.
        let place = places.reduce(|one, other| if one.card().is_some() { one } else { other });
        match place {
            Some(place) => Self::at(&place, over),
            None => {
                let state = Config::state_options(state);
                Self { over: over.to_path_buf(), options: state.clone(), state }
            }
        }
    }

    fn line(&self, verb: &str, options: &[OsString], rest: &[&Path]) -> String {
        let first = ["surgetank", verb].map(OsString::from);
        let rest = rest.iter().map(|word| word.as_os_str().to_owned());
        shell::line(first.into_iter().chain(options.iter().cloned()).chain(rest))
    }

    /// The command that takes up leftovers and drains them to the store.
    pub fn run(&self) -> String {
        self.line("run", &self.options, &["--over".as_ref(), &self.over, "--".as_ref(), "true".as_ref()])
    }

    pub fn mount(&self) -> String {
        self.line("mount", &self.options, &[&self.over])
    }

    pub fn fsck(&self) -> String {
        self.line("fsck", &self.options, &[&self.over])
    }

    pub fn scavenge(&self) -> String {
        self.line("scavenge", &self.options, &[&self.over])
    }

    /// The command that acknowledges losses.
    pub fn forget(&self) -> String {
        self.line("scavenge", &self.options, &["--forget".as_ref(), &self.over])
    }

    /// The command for a store that does not come back. It names no store, because it writes nothing there.
    pub fn copy_out(&self) -> String {
        self.line("scavenge", &self.state, &["--to".as_ref(), "rescued".as_ref(), &self.over])
    }

    pub fn wait(&self) -> String {
        self.line("wait", &self.state, &[&self.over])
    }

    pub fn umount(&self) -> String {
        self.line("umount", &self.state, &[&self.over])
    }
}

/// `surgetank status`, or another verb that concerns no directory.
pub fn asking(verb: &[&str], state: &Path) -> String {
    let words = std::iter::once("surgetank").chain(verb.iter().copied()).map(OsString::from);
    shell::line(words.chain(Config::state_options(state)))
}
