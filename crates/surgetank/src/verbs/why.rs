//! `surgetank why PATH`: where a file is, in which state, by which rule and decision.

use std::path::PathBuf;

use surgetank_core::error::Error;
use surgetank_core::report::Why;

use super::settings::Settings;
use super::{Outcome, Program, agent_of, exit, words};
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
    let mut agent = agent_of(program, &Settings::of_state(args.state.as_ref()), &args.path)?;
    let path = agent.relative(&args.path)?;
    match agent.ask(&Request::Why { path })? {
        Answer::Why(why) if args.json => {
            words::print(
                &(serde_json::to_string_pretty(&*why).map_err(|error| Error::new("JSON").why(error))? + "\n"),
            )?;
        }
        Answer::Why(why) => words::print(&text(&why))?,
        other => return Err(agent.confused(&other).into()),
    }
    Ok(exit::OK)
}

fn text(why: &Why) -> String {
    let mode = format!("{:?}", why.mode).to_lowercase();
    let mut rows = vec![
        ("path", why.path.to_string()),
        ("state", format!("{}, {}", why.state, words::bytes(why.size_bytes))),
        ("place", why.place.clone()),
        ("because", why.placement.clone()),
        ("rule", format!("{mode} — {}", why.rule)),
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
    rows.into_iter().map(|(label, value)| format!("{label:<8} {value}\n")).collect()
}
