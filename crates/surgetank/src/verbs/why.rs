//! `surgetank why PATH`: a file's location and state, and the rules and decisions behind them.

use std::path::{Path, PathBuf};

use surgetank_core::report::run::{File, RunRecord};
use surgetank_core::report::{FileState, PathText, Trouble, Verdict, Why};
use surgetank_types::error::Error;

use super::directory::agent_of;
use super::outcome::Outcome;
use super::program::{Program, state_root};
use super::settings::Settings;
use super::{exit, records, words};
use crate::agent::client;
use crate::agent::wire::{Answer, Request};

#[derive(Debug, clap::Args)]
pub struct Args {
    path: PathBuf,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub fn why(program: &Program<'_>, args: &Args) -> Outcome {
    let settings = Settings::of_state(args.state.as_ref());
    let mut agent = match agent_of(program, &settings, &args.path) {
        Ok(agent) => agent,
        // (A dead mount hides the files below.)
        Err(none) if client::dead_mount(&args.path)?.is_some() => return Err(none),
        Err(none) => {
            let state = state_root(program, &settings)?;
            return match recorded(&records::around(&state, &args.path)?, &args.path)? {
                Some((record, why)) => print_result(&why, Some(&record), args),
                None => Err(none),
            };
        }
    };
    let path = agent.relative(&args.path)?;
    match agent.ask(&Request::Why { path })? {
        Answer::Why(why) => print_result(&why, None, args),
        other => Err(agent.confused(&other).into()),
    }
}

/// `record`: the run that gives the answer, if no agent serves the directory now.
fn print_result(why: &Why, record: Option<&RunRecord>, args: &Args) -> Outcome {
    if args.json {
        let json = serde_json::to_string_pretty(why).map_err(|error| Error::new("JSON").why(error))?;
        words::print(&(json + "\n"))?;
        return Ok(exit::OK);
    }
    let source = record.map(|record| {
        let ended = record.begun_unix_us / 1_000_000 + i64::try_from(record.ended_us / 1_000_000).unwrap_or(0);
        let age = u64::try_from(surgetank_types::clock::now().secs() - ended).unwrap_or(0);
        format!("as run {} left it, {} ago; no agent serves {} now\n", record.id, words::seconds(age), record.directory)
    });
    words::print(&(source.unwrap_or_default() + &text(why)))?;
    Ok(exit::OK)
}

/// The record of the last run that wrote the file. `records`: those of the directory, the newest first.
fn recorded(records: &[RunRecord], path: &Path) -> Outcome<Option<(RunRecord, Why)>> {
    let Some(newest) = records.first() else { return Ok(None) };
    let whole = client::absolute(path)?;
    let below = |record: &RunRecord| -> Option<PathText> {
        let directory = record.directory.to_path_buf();
        let rest = whole.strip_prefix(&directory).ok().map(PathBuf::from);
        rest.or_else(|| whole.canonicalize().ok()?.strip_prefix(&directory).ok().map(PathBuf::from)).map(PathText::from)
    };
    for record in records {
        let Some(name) = below(record) else { continue };
        let listed = record.files.iter().find(|file| file.path == name);
        if let Some(why) = answer(record, &name, listed) {
            return Ok(Some((record.clone(), why)));
        }
    }
    let runs = records.len();
    let files: u64 = records.iter().map(|record| record.files_total).sum();
    let left_out = files - records.iter().map(|record| record.files.len() as u64).sum::<u64>().min(files);
    let there = match path.symlink_metadata() {
        Ok(meta) => format!("in {} there is such a file now, of {}", newest.store, words::bytes(meta.len())),
        Err(why) => format!("it is not there now: {why}"),
    };
    Err(Error::new(format!("no run has recorded anything of {}", path.display()))
        .why(format!(
            "no agent serves {} now; its last {runs} runs wrote {} files, of which {} are not listed: a record has the largest and the slowest",
            newest.directory,
            words::count(files),
            words::count(left_out)
        ))
        .remedy("surgetank report --json shows what is recorded; under `surgetank run`, `why` knows every file")
        .data(there)
        .into())
}

/// `None`: this run's record does not have the file.
fn answer(record: &RunRecord, name: &PathText, listed: Option<&File>) -> Option<Why> {
    let verdict = record.verdict.clone().unwrap_or_default();
    let trouble = trouble(&verdict, name, record);
    let kept = verdict.kept.first.contains(name);
    if listed.is_none() && trouble.is_none() && !kept {
        return None;
    }
    let seen = listed.cloned().unwrap_or_default();
    let durable = seen.durable_us.is_some() && trouble.is_none();
    let place = match (durable, seen.place.as_str()) {
        (_, "") => String::new(),
        (true, place) => format!("written to {place}; in the store since the run"),
        (false, place) => format!("written to {place}; not in the store when the run ended"),
    };
    Some(Why {
        path: name.clone(),
        state: if durable { FileState::Durable } else { FileState::Sealed },
        size_bytes: seen.size_bytes,
        place,
        mode: seen.mode,
        rule: if kept && seen.rule.is_empty() { "a rule keeps it out of the store".to_owned() } else { seen.rule },
        hints: Vec::new(),
        placement: seen.placement,
        replicas: Vec::new(),
        store_path: if durable { name.clone() } else { PathText::default() },
        pinned: false,
        trouble,
    })
}

fn trouble(verdict: &Verdict, name: &PathText, record: &RunRecord) -> Option<Trouble> {
    let reason = if let Some(one) = verdict.not_durable.first.iter().find(|one| one.path == *name) {
        one.why.clone()
    } else if let Some(one) = verdict.conflicts.first.iter().find(|one| one.path == *name) {
        format!("changed in the store by another client; this run's version is {}", one.kept_as)
    } else {
        return None;
    };
    let since_unix_seconds = record.begun_unix_us / 1_000_000;
    Some(Trouble { path: Some(name.clone()), place: record.store.clone(), reason, since_unix_seconds })
}

fn text(why: &Why) -> String {
    let mode = format!("{:?}", why.mode).to_lowercase();
    let mut rows = vec![
        ("path", why.path.to_string()),
        ("state", format!("{}, {}", why.state, words::bytes(why.size_bytes))),
        ("place", why.place.clone()),
        ("because", why.placement.clone()),
        ("rule", if why.rule.is_empty() { String::new() } else { format!("{mode} — {}", why.rule) }),
    ];
    rows.extend(why.hints.iter().map(|hint| ("hint", hint.clone())));
    rows.extend(why.replicas.iter().map(|replica| ("replica", format!("{}: {}", replica.tier, replica.file))));
    rows.push(("store", why.store_path.to_string()));
    if why.pinned {
        rows.push(("pinned", "yes".into()));
    }
    if let Some(trouble) = &why.trouble {
        rows.push(("trouble", format!("{}: {}", trouble.place, trouble.reason)));
    }
    // A record does not have every field.
    rows.retain(|(_, value)| !value.is_empty());
    rows.into_iter().map(|(label, value)| format!("{label:<8} {value}\n")).collect()
}
