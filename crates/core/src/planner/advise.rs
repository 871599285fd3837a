//! The advice: which mode, which tiers of which size, how many processes, and whether it is worth it. It is the fastest
//! prediction of all permitted ones. Pure: the same machine and workload get the same advice.

use serde::Serialize;

use super::machine::Calibration;
use super::predict::{Prediction, predict};
use super::simulate::{Mode, Setup};
use super::workload::Workload;

/// The choices that the user leaves open, and those fixed.
#[derive(Debug, Clone)]
pub struct Question {
    /// Number of nodes.
    pub nodes: usize,
    /// Numbers of tasks at a time to choose from.
    pub processes: Vec<usize>,
    /// Modes to choose from.
    pub modes: Vec<Mode>,
    /// Caps, in the calibration's order of tiers.
    pub tier_bytes: Vec<u64>,
    /// May the page cache have earlier reads and writes?
    pub page_cache: bool,
}

/// The advice for one workload on one machine.
#[derive(Debug, Clone, Serialize)]
pub struct Advice {
    /// The gain is at least [`GAIN_MIN`].
    pub use_surgetank: bool,
    /// The reason, in words.
    pub why: String,
    /// Makespan on the store ÷ with Surgetank, both with their best number of processes.
    pub gain: f64,
    /// The gain if both predictions are at their most unfavourable bounds.
    pub gain_lower: f64,
    /// The gain if both predictions are at their most favourable bounds.
    pub gain_upper: f64,
    /// Best prediction on the store alone.
    pub store: Prediction,
    /// Best prediction with Surgetank.
    pub best: Prediction,
    /// The best of each mode; modes that leave the most in the store come first.
    pub considered: Vec<Prediction>,
}

/// Below this the estimate's own error is larger than the gain.
pub const GAIN_MIN: f64 = 1.1;
/// A smaller tier, or fewer processes, win when they cost less than this.
const AS_GOOD: f64 = 1.02;
const TIER_STEP_BYTES: u64 = 64 << 20;

/// `None`: no mode or number of processes to choose from.
pub fn advise(machine: &Calibration, workload: &Workload, question: &Question) -> Option<Advice> {
    let store = best_of(machine, workload, question, Mode::Store)?;
    let considered: Vec<Prediction> =
        safest_first(workload, &question.modes).filter_map(|mode| best_of(machine, workload, question, mode)).collect();
    let best = frugal(considered.iter())?.clone();
    let gain = store.estimate_s / best.estimate_s;
    let use_surgetank = gain >= GAIN_MIN;
    let why = if use_surgetank {
        format!("on the store alone the limit is {}; there it is {}", store.bottleneck, best.bottleneck)
    } else {
        format!(
            "the gain would be {gain:.2} ×, less than the estimate is sure of: even then the limit is {}",
            best.bottleneck
        )
    };
    Some(Advice {
        use_surgetank,
        why,
        gain,
        gain_lower: store.lower_s / best.upper_s,
        gain_upper: store.upper_s / best.lower_s,
        best,
        considered,
        store,
    })
}

/// The modes in the order in which fewer written bytes end in the store. Without intermediate files no file can stay
/// out of it: such advice would keep results out.
fn safest_first(workload: &Workload, modes: &[Mode]) -> impl Iterator<Item = Mode> {
    let has_intermediate = workload.totals().intermediate_bytes > 0;
    let asked: Vec<Mode> = modes.to_vec();
    [Mode::CopyAll, Mode::Move, Mode::InMemory]
        .into_iter()
        .filter(move |mode| asked.contains(mode) && (*mode != Mode::InMemory || has_intermediate))
}

fn best_of(machine: &Calibration, workload: &Workload, question: &Question, mode: Mode) -> Option<Prediction> {
    let mut found = Vec::new();
    for &processes in &question.processes {
        let setup = Setup {
            nodes: question.nodes,
            tier_bytes: question.tier_bytes.clone(),
            page_cache: question.page_cache,
            ..Setup::new(machine, mode, processes)
        };
        found.push(predict(machine, workload, &setup));
    }
    let best = frugal(found.iter())?.clone();
    if mode == Mode::Store {
        return Some(best);
    }
    // The unused part of a tier is not requested.
    let smaller = best.outcome.tier_peak_bytes.iter().zip(&best.setup.tier_bytes);
    let tier_bytes = smaller.map(|(peak, cap)| peak.next_multiple_of(TIER_STEP_BYTES).min(*cap)).collect();
    let tight = predict(machine, workload, &Setup { tier_bytes, ..best.setup.clone() });
    Some(if tight.estimate_s <= best.estimate_s * AS_GOOD { tight } else { best })
}

/// The first that is as good as the best: the predictions come in the order of their demands on machine and user.
fn frugal<'a>(predictions: impl Iterator<Item = &'a Prediction> + Clone) -> Option<&'a Prediction> {
    let best_s = predictions.clone().map(|prediction| prediction.estimate_s).reduce(f64::min)?;
    predictions.into_iter().find(|prediction| prediction.estimate_s <= best_s * AS_GOOD)
}
