//! `surgetank probe`: runs one timed measurement in its own process, as programs do. Only `calibrate` starts it.
//!
//! A probe prepares, reports ready, and begins on a signal, so that several begin together. It prints its measurement
//! as JSON.

use std::io::{self, BufRead};
use std::path::PathBuf;

use clap::Args;
use surgetank_types::error::Error;

use super::calibrate::probe::{Probe, measure};
use super::calibrate::rounds;
use super::outcome::Outcome;
use super::{exit, words};

#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// A `Probe`, or rounds of them, as JSON
    what: String,
    /// It is rounds
    #[arg(long)]
    rounds: bool,
    /// State root of the agent whose processor time is reported, too
    #[arg(long)]
    agent: Option<PathBuf>,
}

pub fn probe(args: &ProbeArgs) -> Outcome {
    let wrong = |error: serde_json::Error| Error::new("the probe is not understood").why(error);
    let failed = |error: io::Error| Error::new(format!("the probe {} failed", args.what)).why(error);
    let answer = if args.rounds {
        let rounds: Vec<Vec<Probe>> = serde_json::from_str(&args.what).map_err(wrong)?;
        serde_json::to_string(&rounds::play(&rounds, args.agent.as_deref()).map_err(failed)?)
    } else {
        let probe: Probe = serde_json::from_str(&args.what).map_err(wrong)?;
        words::print("ready\n")?;
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map_err(failed)?;
        serde_json::to_string(&measure(&probe).map_err(failed)?)
    };
    words::print(&format!("{}\n", answer.map_err(wrong)?))?;
    Ok(exit::OK)
}
