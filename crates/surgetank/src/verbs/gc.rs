//! `surgetank gc`: uploads in parts that were begun on a server and are gone on with by nobody. They show nowhere and are
//! paid for.
//!
//! An agent gives up its own at its end, and the next one those of an agent that was killed. Left are those of nodes that
//! never came back. The danger: a server does not say whose an upload is; one that somebody still works at is younger than
//! `--older-than`, and if it is not, its file is sent anew: nothing is lost.

use std::time::Duration;

use surgetank_core::clock;
use surgetank_core::error::Error;

use super::settings::Settings;
use super::{Failure, Outcome, Program, exit, wait, words};
use crate::service::stores;

#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// What was begun so long ago, by whomever
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = wait::duration_millis)]
    older_than: u64,
    /// Only say what would go
    #[arg(long)]
    dry_run: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

pub fn gc(program: &Program<'_>, args: &GcArgs) -> Outcome {
    let config = (program.configure)(&args.settings).map_err(Failure::usage)?;
    let Some(url) = config.store_url() else {
        return Err(Failure::usage(
            Error::new(format!("the store {} is a directory", config.store.display()))
                .why("only on servers of objects something can be under way that nobody sees")
                .remedy("surgetank gc --store URL"),
        ));
    };
    let found = stores::abandoned(url, Duration::from_millis(args.older_than), args.dry_run)?;
    if args.json {
        words::print(&(serde_json::to_string_pretty(&found).map_err(|why| Error::new("JSON").why(why))? + "\n"));
        return Ok(exit::OK);
    }
    let now = clock::now().secs();
    for one in &found {
        let age = u64::try_from(now - one.begun_unix_seconds).unwrap_or(0);
        words::print(&format!("{}  begun {} ago\n", one.path, words::seconds(age)));
    }
    let done = if args.dry_run { "would be given up" } else { "given up" };
    words::print(&format!("{} uploads {done}\n", words::count(found.len() as u64)));
    Ok(exit::OK)
}
