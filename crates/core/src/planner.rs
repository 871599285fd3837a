//! How long a workload will take: on the store alone, and with Surgetank in each of its modes.
//!
//! ```text
//! Calibration (what the machine can do) ─┐
//! Workload (what is to be done) ─────────┼─► simulate: the estimate ─┐
//! Setup (mode, nodes, processes, tiers) ─┘   bounds: closed forms ───┴─► Prediction ─► Advice
//! ```
//! Sea's equations ([`sea`]) are the limit of the simulation without latency, metadata and computing. All functions are
//! pure except [`workload::Workload::load`]; `surgetank calibrate` measures the machine. docs/model.md derives the
//! model on one page.

pub mod advise;
mod bounds;
mod fluid;
pub mod machine;
pub mod predict;
pub mod sea;
pub mod simulate;
#[cfg(test)]
mod tests;
pub mod workload;
