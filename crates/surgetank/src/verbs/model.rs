//! `surgetank model`: predicts how long a workload takes on the store and in each mode, with bounds and causes.

use std::path::PathBuf;

use clap::Args;
use clap::ValueEnum;
use serde::Serialize;
use surgetank_core::planner::machine::Calibration;
use surgetank_core::planner::predict::{self, Prediction};
use surgetank_core::planner::simulate::{Mode, Setup};
use surgetank_core::planner::workload::{Totals, Workload};
use surgetank_policy::config::quantity::{show_bytes, size_bytes};
use surgetank_types::error::{Error, Result};

use super::calibrate;
use super::outcome::{Failure, Outcome};
use super::{exit, words};

/// What `model` and `advise` are asked about.
#[derive(Debug, Args)]
pub struct Subject {
    /// A description (`surgetank help model`), a WfFormat 1.5 instance, or a recorded run
    workload: PathBuf,
    /// What `surgetank calibrate` wrote [default: ~/.cache/surgetank/calibration.json]
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Only these tiers of the calibration, each with a cap of its own; may be given several times [default: all]
    #[arg(long = "tier", value_name = "NAME[:SIZE]")]
    tiers: Vec<String>,
    /// Compute nodes, each like the one that was calibrated
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub nodes: u16,
    /// Memory for programs, tiers in memory and page cache on each node [default: as calibrated]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Nothing is found in the page cache again (what the job reads and writes is much more than its memory)
    #[arg(long)]
    no_page_cache: bool,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
}

/// A subject after reading its files.
pub struct Loaded {
    pub machine: Calibration,
    pub workload: Workload,
    pub tier_bytes: Vec<u64>,
    pub page_cache: bool,
}

impl Subject {
    pub fn load(&self) -> Result<Loaded> {
        let calibrated = "measure first: surgetank calibrate --store DIR";
        let file = self.calibration.clone().or_else(calibrate::default_file).ok_or_else(|| {
            Error::new("no calibration was given, and there is no home directory to look for one")
                .remedy("give it with --calibration FILE")
        })?;
        let text = std::fs::read_to_string(&file).map_err(|error| {
            Error::new(format!("the calibration {} can't be read", file.display())).why(error).remedy(calibrated)
        })?;
        let mut machine = Calibration::parse(&text).map_err(|error| Error {
            what: format!("the calibration {} can't be read", file.display()),
            why: if error.why.is_empty() { error.what } else { error.why },
            ..error
        })?;
        if let Some(memory) = &self.memory {
            let refused = |why| Error::new(format!("--memory: {why}")).remedy("write a size, for example 16G");
            machine.memory_bytes = size_bytes(memory).map_err(refused)?;
            machine.check().map_err(|why| refused(why.to_string()))?;
        }
        let tier_bytes = caps(&machine, &self.tiers)?;
        let workload = Workload::load(&self.workload)?;
        Ok(Loaded { machine, workload, tier_bytes, page_cache: !self.no_page_cache })
    }
}

/// Caps of the calibration's tiers, in its order; 0 for the other tiers if `named` has entries.
fn caps(machine: &Calibration, named: &[String]) -> Result<Vec<u64>> {
    let mut caps: Vec<u64> =
        machine.tiers.iter().map(|tier| if named.is_empty() { tier.room_bytes } else { 0 }).collect();
    for text in named {
        let (name, size) = text.split_once(':').map_or((text.as_str(), None), |(name, size)| (name, Some(size)));
        let Some(at) = machine.tiers.iter().position(|tier| tier.name == name) else {
            let known: Vec<&str> = machine.tiers.iter().map(|tier| tier.name.as_str()).collect();
            return Err(Error::new(format!("--tier: the calibration has no tier {name}"))
                .why(format!("it has: {}", known.join(", ")))
                .remedy("measure it: surgetank calibrate --tier NAME=PATH"));
        };
        caps[at] = match size {
            None => machine.tiers[at].room_bytes,
            Some(size) => size_bytes(size).map_err(|why| {
                Error::new(format!("--tier: {why}")).remedy(format!("write a size, for example {name}:4G"))
            })?,
        };
    }
    Ok(caps)
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ModeName {
    Store,
    InMemory,
    CopyAll,
    Move,
}

impl From<ModeName> for Mode {
    fn from(name: ModeName) -> Self {
        match name {
            ModeName::Store => Self::Store,
            ModeName::InMemory => Self::InMemory,
            ModeName::CopyAll => Self::CopyAll,
            ModeName::Move => Self::Move,
        }
    }
}

/// Predict how long a workload takes, with and without Surgetank
#[derive(Debug, Args)]
pub struct ModelArgs {
    #[command(flatten)]
    subject: Subject,
    /// Tasks at a time on each node [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    processes: Option<u16>,
    /// Only this mode; may be given several times [default: all]
    #[arg(long = "mode", value_name = "MODE")]
    modes: Vec<ModeName>,
    /// Programs use the mount, as with `run --no-preload`
    #[arg(long)]
    no_preload: bool,
    /// The same for several values of one quantity: a tier's size, processes or nodes
    #[arg(long, value_name = "TIER|processes|nodes=VALUE,VALUE…")]
    sweep: Option<String>,
}

#[derive(Serialize)]
struct Answer<'a> {
    workload: &'a str,
    totals: Totals,
    predictions: Vec<Swept>,
}

#[derive(Serialize)]
struct Swept {
    /// `ram=1G`; empty without a sweep.
    at: String,
    #[serde(flatten)]
    prediction: Prediction,
}

pub fn model(args: &ModelArgs) -> Outcome {
    let loaded = args.subject.load().map_err(Failure::usage)?;
    let modes: Vec<Mode> = match &args.modes[..] {
        [] => Mode::ALL.to_vec(),
        named => named.iter().map(|&name| name.into()).collect(),
    };
    let processes = args.processes.map_or(loaded.machine.cores as usize, usize::from);
    let base = Setup {
        nodes: usize::from(args.subject.nodes),
        tier_bytes: loaded.tier_bytes.clone(),
        page_cache: loaded.page_cache,
        ..Setup::new(&loaded.machine, Mode::Store, processes)
    };
    let base = Setup { mount_only: args.no_preload || base.mount_only, ..base };
    let points = match &args.sweep {
        None => vec![(String::new(), base)],
        Some(sweep) => swept(&loaded.machine, &base, sweep).map_err(Failure::usage)?,
    };
    let mut predictions = Vec::new();
    for (at, setup) in points {
        for &mode in &modes {
            let setup = Setup { mode, ..setup.clone() };
            let prediction = predict::predict(&loaded.machine, &loaded.workload, &setup);
            predictions.push(Swept { at: at.clone(), prediction });
        }
    }
    let answer = Answer { workload: &loaded.workload.name, totals: loaded.workload.totals(), predictions };
    if args.subject.json {
        let text = serde_json::to_string_pretty(&answer)
            .map_err(|error| Error::new("the prediction can't be written as JSON").why(error))?;
        words::print(&format!("{text}\n"))?;
    } else {
        words::print(&shown(&loaded, &answer))?;
    }
    Ok(exit::OK)
}

/// The maximum number of values in a sweep.
const SWEEP_MAX: usize = 64;

fn swept(machine: &Calibration, base: &Setup, sweep: &str) -> Result<Vec<(String, Setup)>> {
    let remedy = "write for example --sweep ram=1G,4G,16G, --sweep processes=1,2,4 or --sweep nodes=1,2,4";
    let refused = |why: String| Error::new(format!("--sweep {sweep}")).why(why).remedy(remedy);
    let (what, values) = sweep.split_once('=').ok_or_else(|| refused("there is no =".into()))?;
    let values: Vec<&str> = values.split(',').map(str::trim).collect();
    if values.len() > SWEEP_MAX {
        return Err(refused(format!("{} values, at most {SWEEP_MAX}", values.len())));
    }
    let number = |value: &str| match value.parse::<usize>() {
        Ok(number) if (1..=4096).contains(&number) => Ok(number),
        _ => Err(refused(format!("'{value}' is not a number from 1 to 4096"))),
    };
    // `tier` is the first one, whatever its name.
    let tier = machine.tiers.iter().position(|tier| tier.name == what || what == "tier");
    let point = |value: &str| -> Result<(String, Setup)> {
        let mut setup = base.clone();
        match (what, tier) {
            ("processes", _) => setup.processes = number(value)?,
            ("nodes", _) => setup.nodes = number(value)?,
            (_, Some(tier)) => setup.tier_bytes[tier] = size_bytes(value).map_err(refused)?,
            (_, None) => return Err(refused(format!("the calibration has no tier {what}"))),
        }
        Ok((format!("{what}={value}"), setup))
    };
    values.into_iter().map(point).collect()
}

fn shown(loaded: &Loaded, answer: &Answer<'_>) -> String {
    let totals = &answer.totals;
    let mut lines = vec![format!(
        "{}: {} tasks, {:.1} s of computing; {} in, {} intermediate, {} out, {} files written",
        if answer.workload.is_empty() { "workload" } else { answer.workload },
        totals.tasks,
        totals.cpu_s,
        show_bytes(totals.input_bytes),
        show_bytes(totals.intermediate_bytes),
        show_bytes(totals.final_bytes),
        words::count(totals.files_written)
    )];
    lines.extend(loaded.machine.notes.iter().map(|note| format!("note of the calibration: {note}")));
    let mut at = None;
    for swept in &answer.predictions {
        if at != Some(&swept.at) {
            at = Some(&swept.at);
            lines.push(String::new());
            let heading = format!("{:10} {:>11} {:>11} {:>11}   limit", swept.at, "at least", "estimate", "at most");
            lines.push(heading);
        }
        lines.extend(prediction_lines(&swept.prediction));
    }
    lines.join("\n") + "\n"
}

pub fn prediction_lines(prediction: &Prediction) -> Vec<String> {
    let time = |seconds: f64| words::millis((seconds * 1e3).round() as u64);
    let mut parts: Vec<_> = prediction.outcome.spent.clone();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    // A part below one hundredth is too small to report.
    let parts = parts.iter().filter(|(_, seconds)| *seconds >= 0.01 * prediction.estimate_s);
    let parts: Vec<String> =
        parts.map(|(cause, seconds)| format!("{} {}", predict::words(*cause), time(*seconds))).collect();
    let mut lines = vec![
        format!(
            "{:10} {:>11} {:>11} {:>11}   {}",
            prediction.setup.mode.name(),
            time(prediction.lower_s),
            time(prediction.estimate_s),
            time(prediction.upper_s),
            prediction.bottleneck
        ),
        format!("{:48}{}", "", parts.join(", ")),
    ];
    if prediction.outcome.spilled_bytes > 0 {
        let spilled = show_bytes(prediction.outcome.spilled_bytes);
        lines.push(format!("{:48}{spilled} find no room in the tiers and go to the store", ""));
    }
    lines
}
