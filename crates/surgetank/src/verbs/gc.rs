//! `surgetank gc`: finds invisible garbage in a store. One kind is an upload in parts that began on a server and that
//! no process continues: it is not listed, and it costs money. The other kind is deduplicated content that no file
//! refers to any more.
//!
//! An agent aborts its own uploads at its end; the next agent aborts those of a killed one. What remains belongs to
//! nodes that never came back. The danger: a server does not say which process owns an upload. An upload in progress
//! should be younger than `--older-than`; if it is not, its file is sent again, and no data is lost. For content a
//! mistake costs more: no process may be about to refer to it (`packed::shared::unused` of the crate `store`).

use std::time::Duration;

use surgetank_types::clock;
use surgetank_types::error::Error;

use super::outcome::{Failure, Outcome};
use super::program::Program;
use super::settings::Settings;
use super::{exit, wait, words};
use crate::service::stores;

#[derive(Debug, clap::Args)]
pub struct GcArgs {
    /// Uploads of any client that are older than this
    #[arg(long, value_name = "DURATION", default_value = "1d", value_parser = wait::duration_millis)]
    older_than: u64,
    /// Deduplicated content without references for this time
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = wait::duration_millis)]
    unused_for: u64,
    /// Only list what would be removed
    #[arg(long)]
    dry_run: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Default, serde::Serialize)]
struct Found {
    uploads: Vec<stores::Abandoned>,
    #[cfg(feature = "dedup")]
    content: surgetank_store::packed::shared::unused::Unused,
}

pub fn gc(program: &Program<'_>, args: &GcArgs) -> Outcome {
    let mut settings = args.settings.clone();
    let nothing = stores::Scratch::new()?;
    // No directory is served: the current directory is unaffected.
    if settings.over.is_none() && settings.store.as_deref().is_some_and(|store| store.contains("://")) {
        settings.over = Some(nothing.0.clone());
    }
    let config = (program.configure)(&settings).map_err(Failure::usage)?;
    let mut found = Found::default();
    if let Some(url) = config.store_url() {
        found.uploads = stores::abandoned(url, Duration::from_millis(args.older_than), args.dry_run)?;
    }
    #[cfg(feature = "dedup")]
    {
        found.content = stores::unused(&config, Duration::from_millis(args.unused_for), args.dry_run)?;
    }
    if args.json {
        words::print(&(serde_json::to_string_pretty(&found).map_err(|why| Error::new("JSON").why(why))? + "\n"))?;
        return Ok(exit::OK);
    }
    let age = |then: i64| words::seconds(u64::try_from(clock::now().secs() - then).unwrap_or(0));
    for one in &found.uploads {
        words::print(&format!("{}  begun {} ago\n", one.path, age(one.begun_unix_seconds)))?;
    }
    let would = if args.dry_run { "would be " } else { "" };
    words::print(&format!("{} uploads {would}aborted\n", words::count(found.uploads.len() as u64)))?;
    #[cfg(feature = "dedup")]
    {
        let blobs = &found.content.blobs;
        for one in blobs {
            let (size, age) = (words::bytes(one.size_bytes), age(one.used_unix_seconds));
            words::print(&format!("{}  {size}, not referred to for {age}\n", one.path))?;
        }
        let total = words::bytes(blobs.iter().map(|one| one.size_bytes).sum());
        words::print(&format!("{} contents, {total}, {would}removed\n", words::count(blobs.len() as u64)))?;
    }
    Ok(exit::OK)
}
