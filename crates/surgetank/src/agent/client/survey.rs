//! Finds all agents, and the agent that serves a path. The survey names an agent that does not answer: it must not
//! count as absent.

use std::path::{Path, PathBuf};

use surgetank_types::error::{Error, Result};

use super::super::place::{Place, StateRoot};
use super::{AGENT_VARIABLE, Connection, absolute};

/// All expected agents: the enclosing ones first, then those of the state root.
#[derive(Default)]
pub struct Survey {
    pub answering: Vec<Connection>,
    /// The agents that do not answer: their directories and the errors.
    pub silent: Vec<(PathBuf, Error)>,
}

pub fn survey(state: &Path) -> Result<Survey> {
    let mut found = Survey::default();
    let mut places = Vec::new();
    if let Some(around) = std::env::var_os(AGENT_VARIABLE) {
        places.extend(std::env::split_paths(&around).filter_map(|path| Place::open(&path).ok()));
        places.reverse();
    }
    if let Some(root) = StateRoot::open_existing(state)? {
        places.extend(root.places()?);
    }
    let mut seen: Vec<PathBuf> = Vec::new();
    for place in places {
        if seen.iter().any(|known| known == place.path()) {
            continue;
        }
        seen.push(place.path().to_path_buf());
        // An agent that does not answer must not hide the rest.
        match (Connection::open(&place), place.card()) {
            (Ok(Some(connection)), _) => found.answering.push(connection),
            (Err(error), Some(card)) => found.silent.push((card.over.to_path_buf(), error)),
            (Ok(None) | Err(_), _) => {}
        }
    }
    Ok(found)
}

impl Survey {
    /// The agent that serves the directory of `path`: the innermost one. An error when that agent does not answer.
    pub fn serving(mut self, path: &Path) -> Result<Option<Connection>> {
        if let Some(error) = self.silence_over(path)? {
            return Err(error);
        }
        Ok(self.innermost_of(path)?.map(|nth| self.answering.swap_remove(nth)))
    }

    /// The error when the agent that serves `path` does not answer: which agent, and what helps.
    pub fn silence_over(&mut self, path: &Path) -> Result<Option<Error>> {
        let lexical = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        // This check comes before any file system call: such a call waits for a stopped agent.
        if let Some(error) = self.silent_innermost(&[&lexical]) {
            return Ok(Some(error));
        }
        let (path, real) = both(path)?;
        Ok(self.silent_innermost(&[&path, &real]))
    }

    /// The index of the answering agent that serves `path`.
    pub fn innermost_of(&self, path: &Path) -> Result<Option<usize>> {
        let (path, real) = both(path)?;
        Ok(self.innermost(&[&path, &real]).map(|(nth, _)| nth))
    }

    /// The index, with the length of the directory's path.
    fn innermost(&self, paths: &[&Path]) -> Option<(usize, usize)> {
        let over = |nth: usize| self.answering[nth].hello.over.as_path();
        let serving = (0..self.answering.len()).filter(|nth| paths.iter().any(|path| path.starts_with(over(*nth))));
        serving.map(|nth| (nth, over(nth).as_os_str().len())).max_by_key(|(_, length)| *length)
    }

    fn silent_innermost(&mut self, paths: &[&Path]) -> Option<Error> {
        let length = self.innermost(paths).map_or(0, |(_, length)| length);
        let is_it = |over: &Path| paths.iter().any(|path| path.starts_with(over)) && over.as_os_str().len() > length;
        self.silent.iter().position(|(over, _)| is_it(over)).map(|nth| self.silent.swap_remove(nth).1)
    }
}

/// A path as the user wrote it, and with its symlinks resolved.
fn both(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let path = absolute(path)?;
    let real = path.canonicalize().unwrap_or_else(|_| path.clone());
    Ok((path, real))
}

/// The agent that serves the directory of `path`: the innermost one.
pub fn serving(state: &Path, path: &Path) -> Result<Option<Connection>> {
    survey(state)?.serving(path)
}
