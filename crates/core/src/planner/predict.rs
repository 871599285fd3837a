//! A prediction: lower bound, estimate, upper bound, and the causes of the time.

use serde::Serialize;

use super::bounds;
use super::machine::Calibration;
use super::simulate::{self, Outcome, Setup};
use super::workload::Workload;

/// The prediction for one workload and one setup.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// The setup.
    pub setup: Setup,
    /// The bound that no schedule beats at the best measured rates, or [`WRONG_BY`] below the estimate, whichever is
    /// more.
    pub lower_s: f64,
    /// The simulated makespan, in seconds.
    pub estimate_s: f64,
    /// [`WRONG_BY`] above the estimate.
    pub upper_s: f64,
    /// Everything one after the other, as Sea adds, with nothing cached, at the worst measured rates.
    pub serial_s: f64,
    /// The resource that limits the makespan, or the cause of most waiting, in words.
    pub bottleneck: String,
    /// The simulation's details.
    pub outcome: Outcome,
}

/// A resource that is busy for more of the makespan than this is a bottleneck.
const BOTTLENECK_BUSY: f64 = 0.6;

/// With it, upper ÷ lower is at most 1.5, as required. docs/model.md, "How good it is", says how many of the first
/// predicted cells kept to it.
const WRONG_BY: f64 = 1.22;
/// A store serves at once what it was not asked for just before: a short run was a tenth quicker than any schedule.
const BURSTS: f64 = 1.1;

/// Predicts how long a workload takes (docs/model.md).
pub fn predict(machine: &Calibration, workload: &Workload, setup: &Setup) -> Prediction {
    let (fastest, slowest) = (machine.at_spread(1.0), machine.at_spread(-1.0));
    let outcome = simulate::run(machine, workload, setup);
    let estimate_s = outcome.makespan_s;
    let limits = bounds::bounds(&fastest, &slowest, workload, setup);
    Prediction {
        setup: setup.clone(),
        lower_s: (limits.lower_s.min(estimate_s) / BURSTS).max(estimate_s / WRONG_BY),
        estimate_s,
        upper_s: estimate_s * WRONG_BY,
        serial_s: limits.upper_s,
        bottleneck: bottleneck(&outcome),
        outcome,
    }
}

fn bottleneck(outcome: &Outcome) -> String {
    if let Some(busiest) = outcome.uses.first().filter(|busiest| busiest.busy >= BOTTLENECK_BUSY) {
        return format!("{} ({:.0} % busy)", busiest.resource, 100.0 * busiest.busy);
    }
    let longest = outcome.spent.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    match longest {
        Some((cause, seconds)) => format!(
            "no resource: tasks wait one after the other, mostly for {} ({:.0} %)",
            words(*cause),
            100.0 * seconds / outcome.makespan_s
        ),
        None => "nothing".to_owned(),
    }
}

/// The name of a cause in a sentence.
pub fn words(cause: simulate::Cause) -> &'static str {
    use simulate::Cause;
    match cause {
        Cause::Start => "the agent's start",
        Cause::ReadStore => "reading the store",
        Cause::WriteStore => "writing the store",
        Cause::ReadTier => "reading tiers",
        Cause::WriteTier => "writing tiers",
        Cause::PageCache => "the page cache",
        Cause::StoreOperations => "operations of the store",
        Cause::AgentOperations => "operations of the agent",
        Cause::Compute => "computing",
        Cause::Wait => "waiting tasks",
        Cause::DirtyLimit => "room for undrained bytes",
        Cause::LastDrain => "the last drain",
    }
}
