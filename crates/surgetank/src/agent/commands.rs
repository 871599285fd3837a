//! The commands that people are shown about a directory. A shell can run each as it is printed, from any working directory:
//! it names the directory, and the store, tiers and state that an agent was started with.
//!
//! The danger it avoids: advice that leaves the store out, and so brings files to another store than they are owed to.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use surgetank_policy::config::Config;
use surgetank_types::shell;

use super::place::{Place, StateRoot};

#[derive(Debug, Clone)]
pub struct Commands {
    over: PathBuf,
    /// What `run`, `mount`, `fsck` and `scavenge` need.
    options: Vec<OsString>,
    /// What the verbs need that only ask.
    state: Vec<OsString>,
}

impl Commands {
    /// As this configuration says.
    pub fn of(config: &Config) -> Self {
        let state = Config::state_options(&config.state);
        Self { over: config.over.clone(), options: config.again.clone(), state }
    }

    /// As the last agent at this place was started. (One of an earlier version did not write that down.)
    pub fn at(place: &Place, over: &Path) -> Self {
        let state = place.path().parent().map(Config::state_options).unwrap_or_default();
        let options = place.identity().map_or_else(Vec::new, |identity| identity.options());
        let options = if options.is_empty() { state.clone() } else { options };
        Self { over: over.to_path_buf(), options, state }
    }

    /// The same by the place's path.
    pub fn of_path(place: &Path, over: &Path) -> Self {
        if let Ok(place) = Place::open(place) {
            return Self::at(&place, over);
        }
        let state = place.parent().map(Config::state_options).unwrap_or_default();
        Self { over: over.to_path_buf(), options: state.clone(), state }
    }

    /// Of a directory whose place is looked for: a dead mount has no numbers of its own.
    pub fn of_directory(over: &Path, state: &Path) -> Self {
        let places = StateRoot::open_existing(state).ok().flatten().and_then(|root| root.places().ok());
        let places = places.into_iter().flatten().filter(|place| place.served(over));
        // One that was killed first: it has something left.
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

    /// Takes up what is left, and brings it to the store.
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

    /// Acknowledges what is lost.
    pub fn forget(&self) -> String {
        self.line("scavenge", &self.options, &["--forget".as_ref(), &self.over])
    }

    /// For a store that does not come back: it is not named, because nothing is brought there.
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

/// `surgetank status` or another verb that is about no directory.
pub fn asking(verb: &[&str], state: &Path) -> String {
    let words = std::iter::once("surgetank").chain(verb.iter().copied()).map(OsString::from);
    shell::line(words.chain(Config::state_options(state)))
}
