//! `surgetank advise`: whether to use Surgetank for a workload, in which mode, with which tiers and how many processes.

use clap::Args;
use surgetank_core::planner::advise::{self, Advice, Question};
use surgetank_core::planner::simulate::Mode;
use surgetank_policy::config::quantity::show_bytes;
use surgetank_types::error::Error;
use surgetank_types::shell;

use super::model::{Loaded, Subject, prediction_lines};
use super::outcome::{Failure, Outcome};
use super::{exit, words};

/// Say which mode, tiers and number of processes to use for a workload, and what is gained
#[derive(Debug, Args)]
pub struct AdviseArgs {
    #[command(flatten)]
    subject: Subject,
    /// Numbers of tasks at a time to choose from [default: 1 to twice the cores]
    #[arg(long, value_name = "N[,N…]", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=4096))]
    processes: Vec<u16>,
    /// Intermediate files are wanted in the store, too
    #[arg(long)]
    all_files: bool,
}

pub fn advise(args: &AdviseArgs) -> Outcome {
    let loaded = args.subject.load().map_err(Failure::usage)?;
    let mut processes: Vec<usize> = args.processes.iter().map(|&number| usize::from(number)).collect();
    if processes.is_empty() {
        let most = 2 * loaded.machine.cores as usize;
        // 1, 2, 4, … and the maximum.
        processes =
            std::iter::successors(Some(1), |number| Some(number * 2)).take_while(|&number| number < most).collect();
        processes.push(most);
    }
    processes.sort_unstable();
    let modes =
        if args.all_files { vec![Mode::CopyAll, Mode::Move] } else { vec![Mode::InMemory, Mode::CopyAll, Mode::Move] };
    let question = Question {
        nodes: usize::from(args.subject.nodes),
        processes,
        modes,
        tier_bytes: loaded.tier_bytes.clone(),
        page_cache: loaded.page_cache,
    };
    let advice = advise::advise(&loaded.machine, &loaded.workload, &question)
        .ok_or_else(|| Failure::usage(Error::new("there is nothing to choose from")))?;
    let command = advice.use_surgetank.then(|| command(&loaded, &advice));
    if args.subject.json {
        let mut value = serde_json::to_value(&advice).map_err(unwritten)?;
        value["command"] = command.into();
        words::print(&format!("{}\n", serde_json::to_string_pretty(&value).map_err(unwritten)?))?;
    } else {
        words::print(&shown(&advice, command.as_deref()))?;
    }
    Ok(exit::OK)
}

fn unwritten(error: serde_json::Error) -> Error {
    Error::new("the advice can't be written as JSON").why(error)
}

/// The command to type. Only the user knows the pattern of intermediate files.
fn command(loaded: &Loaded, advice: &Advice) -> String {
    let setup = &advice.best.setup;
    let mut line = "surgetank run".to_owned();
    for (tier, bytes) in loaded.machine.tiers.iter().zip(&setup.tier_bytes) {
        if *bytes > 0 {
            let option = format!("{}={}:{}M", tier.name, tier.path.display(), bytes.div_ceil(1 << 20));
            line += &format!(" --tier {}", shell::word(option));
        }
    }
    line += match setup.mode {
        Mode::InMemory => " --rule 'INTERMEDIATE-FILES=keep'",
        Mode::Move => " --rule '**=move'",
        Mode::CopyAll | Mode::Store => "",
    };
    line + " -- COMMAND"
}

fn shown(advice: &Advice, command: Option<&str>) -> String {
    let best = &advice.best;
    let mut lines = Vec::new();
    if advice.use_surgetank {
        lines.push(format!(
            "use Surgetank: mode {}, {} at a time; {:.1} × faster (between {:.1} and {:.1})",
            best.setup.mode.name(),
            words::count(best.setup.processes as u64),
            advice.gain,
            advice.gain_lower,
            advice.gain_upper
        ));
    } else {
        lines.push(format!(
            "do not use Surgetank here; run it on the store, {} at a time",
            words::count(advice.store.setup.processes as u64)
        ));
    }
    lines.push(format!("because {}", advice.why));
    if let Some(command) = command {
        lines.push(String::new());
        lines.push(format!("  {command}"));
        if best.setup.mode == Mode::InMemory {
            let kept = best.outcome.tier_peak_bytes.iter().sum::<u64>();
            lines.push(format!(
                "  INTERMEDIATE-FILES: the pattern of files that are not needed afterwards; they stay out of the store (tiers hold up to {})",
                show_bytes(kept)
            ));
        }
    }
    lines.push(String::new());
    lines.push(format!("{:10} {:>11} {:>11} {:>11}   limit", "", "at least", "estimate", "at most"));
    for prediction in std::iter::once(&advice.store).chain(&advice.considered) {
        lines.extend(prediction_lines(prediction));
    }
    lines.join("\n") + "\n"
}
