//! `surgetank report`: what happened in a run, from its record. The record itself is JSON; [`text`] and `page` are
//! other renderings.

pub mod page;
pub(crate) mod text;

use std::path::PathBuf;

use surgetank_core::report::run::RunRecord;
use surgetank_types::error::Error;

use super::outcome::Outcome;
use super::program::{Program, state_root};
use super::settings::Settings;
use super::{exit, records, words};
use crate::service::recorder::read;

#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// Name of the run, or the beginning of it, as --list shows it; `last`: of all [default: the last one over this directory]
    #[arg(value_name = "RUN")]
    run: Option<String>,
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

pub(crate) fn report(program: &Program<'_>, args: &ReportArgs) -> Outcome {
    let state = state_root(program, &Settings::of_state(args.state.as_ref()))?;
    if args.list {
        let records = records::all(&state)?;
        let read: Vec<RunRecord> = records.iter().filter_map(|(_, path)| read(path).ok()).collect();
        words::print(&if args.json { json(&read)? } else { text::list(&read) })?;
        return Ok(exit::OK);
    }
    let record = match &args.run {
        Some(run) => records::find(&records::all(&state)?, run, &state)?,
        None => records::last_here(&state)?,
    };
    if let Some(file) = &args.html {
        let cannot = |why: std::io::Error| {
            Error::new(format!("the page {} cannot be written", file.display()))
                .why(why)
                .remedy("give another file with --html")
                .data("the record of the run is untouched")
        };
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
