//! The records of runs below a state directory, and the choice of one.
//!
//! The danger that it avoids: reading a file that another user put there. It reads only this user's state directory,
//! which agents create with mode 0700.

use std::path::{Path, PathBuf};

use surgetank_core::report::run::RunRecord;
use surgetank_types::error::Error;

use super::outcome::{Failure, Outcome};
use crate::agent::client;
use crate::agent::commands;
use crate::agent::place::StateRoot;
use crate::service::recorder::{RUNS, read, records_in};

/// The records of one agent's place, which serves one directory: names and files, in the order of time.
struct Shelf {
    records: Vec<(String, PathBuf)>,
}

/// Names and files of all records below a state directory, in the order of time.
pub fn all(state: &Path) -> Outcome<Vec<(String, PathBuf)>> {
    let mut found: Vec<_> = shelves(state)?.into_iter().flat_map(|shelf| shelf.records).collect();
    found.sort();
    Ok(found)
}

fn shelves(state: &Path) -> Outcome<Vec<Shelf>> {
    if StateRoot::open_existing(state)?.is_none() {
        return Ok(Vec::new());
    }
    let places = std::fs::read_dir(state).map_err(|error| {
        Error::new(format!("the state directory {} cannot be read", state.display()))
            .why(error)
            .remedy("name another one with --state")
    })?;
    let mut shelves = Vec::new();
    for place in places.flatten() {
        let dir = place.path().join(RUNS);
        let mut names = records_in(&dir).unwrap_or_default();
        names.sort();
        let records: Vec<_> =
            names.into_iter().map(|name| (name.trim_end_matches(".json").to_owned(), dir.join(&name))).collect();
        if !records.is_empty() {
            shelves.push(Shelf { records });
        }
    }
    Ok(shelves)
}

/// The records of the directory that is or contains `path`, the newest first; the deepest such directory.
pub fn around(state: &Path, path: &Path) -> Outcome<Vec<RunRecord>> {
    let path = client::absolute(path)?;
    let real = path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut best: Option<(usize, Vec<RunRecord>)> = None;
    for shelf in shelves(state)? {
        let mut records = shelf.records.iter().rev().filter_map(|(_, file)| read(file).ok()).peekable();
        let Some(newest) = records.peek() else { continue };
        let directory = newest.directory.to_path_buf();
        let depth = directory.components().count();
        if depth == 0 || !(path.starts_with(&directory) || real.starts_with(&directory)) {
            continue;
        }
        match &mut best {
            Some((deepest, _)) if *deepest > depth => {}
            // A directory that came back under another device number may have two places.
            Some((deepest, found)) if *deepest == depth => found.extend(records),
            _ => best = Some((depth, records.collect())),
        }
    }
    let mut found = best.map(|(_, found)| found).unwrap_or_default();
    found.sort_by(|a, b| b.id.cmp(&a.id));
    Ok(found)
}

/// The last run over the current directory, or over a directory above it.
pub fn last_here(state: &Path) -> Outcome<RunRecord> {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    if let Some(newest) = around(state, &here)?.into_iter().next() {
        return Ok(newest);
    }
    // If only one directory was ever served, the choice is unambiguous.
    match shelves(state)?.as_slice() {
        [] => Err(none(state)),
        [only] => find(&only.records, "last", state),
        _ => Err(Failure::usage(
            Error::new(format!("no run over {} is recorded", here.display()))
                .why(format!("the runs below {} are of other directories", state.display()))
                .remedy(format!(
                    "name one of those that are recorded:\n  {}",
                    commands::asking(&["report", "--list"], state)
                )),
        )),
    }
}

fn none(state: &Path) -> Failure {
    Failure::usage(
        Error::new("no run is recorded").why(format!("below {}", state.display())).remedy(
            "run a command with `surgetank run`; a run with a state directory of its own needs --state here, too",
        ),
    )
}

/// `wanted`: `last`, a name, or a prefix of one.
pub fn find(records: &[(String, PathBuf)], wanted: &str, state: &Path) -> Outcome<RunRecord> {
    let like: Vec<&(String, PathBuf)> = match wanted {
        "last" => records.last().into_iter().collect(),
        _ => match records.iter().find(|(name, _)| name == wanted) {
            Some(exact) => vec![exact],
            None => records.iter().filter(|(name, _)| name.starts_with(wanted)).collect(),
        },
    };
    let list = || {
        let command = commands::asking(&["report", "--list"], state);
        format!("name one of those that are recorded (another state directory needs its --state):\n  {command}")
    };
    match like.as_slice() {
        [(_, path)] => read(path).map_err(|error| {
            Error::new(format!("the record {} cannot be read", path.display()))
                .why(error)
                .remedy(list())
                .data("the files of that run are not concerned")
                .into()
        }),
        [] if records.is_empty() => Err(none(state)),
        [] => Err(Failure::usage(
            Error::new(format!("no run {wanted} is recorded")).why(format!("below {}", state.display())).remedy(list()),
        )),
        several => Err(Failure::usage(
            Error::new(format!("{wanted} is the beginning of {} runs' names", several.len())).remedy(list()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::DirBuilderExt;

    use surgetank_core::report::PathText;

    use super::*;

    fn put(state: &Path, key: &str, id: &str, directory: &Path) {
        let runs = state.join(key).join(RUNS);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&runs).unwrap();
        let record = RunRecord { id: id.into(), directory: PathText::from(directory), ..RunRecord::default() };
        fs::write(runs.join(format!("{id}.json")), serde_json::to_vec(&record).unwrap()).unwrap();
    }

    #[test]
    fn run_is_found_by_the_beginning_of_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        for id in ["20261124-100000-1", "20261124-100000-12", "20261125-100000-7"] {
            put(&state, "0-1-2-3", id, Path::new("/project"));
        }
        let records = all(&state).unwrap_or_default();
        let found = |wanted: &str| find(&records, wanted, &state).map(|record| record.id).ok();
        assert_eq!(found("last").as_deref(), Some("20261125-100000-7"));
        assert_eq!(found("20261125").as_deref(), Some("20261125-100000-7"));
        assert_eq!(found("20261124-100000-1").as_deref(), Some("20261124-100000-1"), "a whole name is that one");
        assert_eq!(found("20261124"), None);
        assert_eq!(found("nothing"), None);
        assert!(find(&[], "last", &state).is_err());
    }

    /// `report` without a name once showed the last run of any directory.
    #[test]
    fn records_around_a_path_are_those_of_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (state, root) = (dir.path().join("state"), dir.path().canonicalize().unwrap());
        let (mine, inner, other) = (root.join("mine"), root.join("mine/inner"), root.join("other"));
        [&inner, &other].iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
        put(&state, "0-1-1-1", "20261124-100000-1", &mine);
        put(&state, "0-1-1-1", "20261124-110000-1", &mine);
        put(&state, "0-1-2-1", "20261124-120000-1", &inner);
        put(&state, "0-1-3-1", "20261124-130000-1", &other);
        let ids = |path: &Path| {
            let found = around(&state, path).unwrap_or_default();
            found.into_iter().map(|record| record.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(&mine), ["20261124-110000-1", "20261124-100000-1"]);
        assert_eq!(ids(&mine.join("a/file")), ["20261124-110000-1", "20261124-100000-1"]);
        assert_eq!(ids(&inner.join("file")), ["20261124-120000-1"], "the deepest directory");
        assert_eq!(ids(&root.join("mine-not")), [""; 0]);
    }
}
