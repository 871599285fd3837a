//! `surgetank report`: what happened in a run, from its record. The record itself is JSON; other renderings stand beside [`text`].
//!
//! The danger it avoids: reading what somebody else put there. Only the state directory of this user is looked into, which its
//! agents make 0700.

pub mod page;
pub mod text;

use std::path::{Path, PathBuf};

use surgetank_core::error::Error;
use surgetank_core::report::run::RunRecord;

use super::settings::Settings;
use super::{Failure, Outcome, Program, exit, state_root, words};
use crate::agent::commands;
use crate::agent::place::StateRoot;
use crate::service::recorder::{RUNS, read, records_in};

#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Name of the run, or the beginning of it, as --list shows it
    #[arg(value_name = "RUN", default_value = "last")]
    run: String,
    /// Runs that are recorded, the newest last
    #[arg(long)]
    list: bool,
    /// The record itself; with --list, an array of all
    #[arg(long, conflicts_with = "html")]
    json: bool,
    /// Write the run as a page for a browser there: one file, which needs nothing else
    #[arg(long, value_name = "FILE", conflicts_with = "list")]
    html: Option<PathBuf>,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub fn report(program: &Program<'_>, args: &ReportArgs) -> Outcome {
    let state = state_root(program, &Settings::of_state(args.state.as_ref()))?;
    let records = records(&state)?;
    if args.list {
        let read: Vec<RunRecord> = records.iter().filter_map(|(_, path)| read(path).ok()).collect();
        words::print(&if args.json { json(&read)? } else { text::list(&read) })?;
        return Ok(exit::OK);
    }
    let record = find(&records, &args.run, &state)?;
    if let Some(file) = &args.html {
        let cannot =
            |why: std::io::Error| Error::new(format!("the page {} cannot be written", file.display())).why(why);
        let page = page::render(&record, &page::fresh_nonce().map_err(cannot)?);
        std::fs::write(file, page).map_err(cannot)?;
        return Ok(exit::OK);
    }
    words::print(&if args.json { json(&record)? } else { text::render(&record) })?;
    Ok(exit::OK)
}

fn json(value: &impl serde::Serialize) -> Outcome<String> {
    Ok(serde_json::to_string_pretty(value).map_err(|error| Error::new("JSON").why(error))? + "\n")
}

/// Names and files of all records below a state directory, in the order of time.
pub fn records(state: &Path) -> Outcome<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    if StateRoot::open_existing(state)?.is_none() {
        return Ok(found);
    }
    let places = std::fs::read_dir(state)
        .map_err(|error| Error::new(format!("{} cannot be read", state.display())).why(error))?;
    for place in places.flatten() {
        let dir = place.path().join(RUNS);
        for name in records_in(&dir).unwrap_or_default() {
            let path = dir.join(&name);
            found.push((name.trim_end_matches(".json").to_owned(), path));
        }
    }
    found.sort();
    Ok(found)
}

/// `wanted`: `last`, a name, or the beginning of one.
pub fn find(records: &[(String, PathBuf)], wanted: &str, state: &Path) -> Outcome<RunRecord> {
    let like: Vec<&(String, PathBuf)> = match wanted {
        "last" => records.last().into_iter().collect(),
        _ => match records.iter().find(|(name, _)| name == wanted) {
            Some(exact) => vec![exact],
            None => records.iter().filter(|(name, _)| name.starts_with(wanted)).collect(),
        },
    };
    match like.as_slice() {
        [(_, path)] => read(path)
            .map_err(|error| Error::new(format!("the record {} cannot be read", path.display())).why(error).into()),
        [] => Err(Failure::usage(
            Error::new(if wanted == "last" {
                "no run is recorded".to_owned()
            } else {
                format!("no run {wanted} is recorded")
            })
            .why(format!("below {}", state.display()))
            .remedy(format!(
                "list those that are (a run with another state directory needs its --state):\n  {}",
                commands::asking(&["report", "--list"], state)
            )),
        )),
        several => Err(Failure::usage(
            Error::new(format!("{wanted} is the beginning of {} runs' names", several.len()))
                .remedy(format!("name one of them:\n  {}", commands::asking(&["report", "--list"], state))),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_found_by_the_beginning_of_its_name_if_that_says_which() {
        let dir = tempfile::tempdir().unwrap();
        let mut records = Vec::new();
        for id in ["20261124-100000-1", "20261124-100000-12", "20261125-100000-7"] {
            let path = dir.path().join(id);
            let record = RunRecord { id: id.into(), ..RunRecord::default() };
            std::fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
            records.push((id.to_owned(), path));
        }
        let found = |wanted: &str| find(&records, wanted, dir.path()).map(|record| record.id).ok();
        assert_eq!(found("last").as_deref(), Some("20261125-100000-7"));
        assert_eq!(found("20261125").as_deref(), Some("20261125-100000-7"));
        assert_eq!(found("20261124-100000-1").as_deref(), Some("20261124-100000-1"), "a whole name is that one");
        assert_eq!(found("20261124"), None);
        assert_eq!(found("nothing"), None);
        assert!(find(&[], "last", dir.path()).is_err());
    }
}
