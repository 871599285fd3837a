//! How long a workload will take: on the store alone, and with Surgetank in each of its modes.
//!
//! ```text
//! Calibration (what the machine can do) ─┐
//! Workload (what is to be done) ─────────┼─► simulate: the estimate ─┐
//! Setup (mode, nodes, processes, tiers) ─┘   bounds: closed forms ───┴─► Prediction ─► Advice
//! ```
//! Sea's equations ([`sea`]) are the limit of the simulation without latency, metadata and computing. Everything here is pure but for
//! [`workload::Workload::load`]; what is measured comes from `surgetank calibrate`. docs/model.md derives it on a page.

pub mod advise;
pub mod bounds;
mod fluid;
pub mod machine;
pub mod predict;
pub mod sea;
pub mod simulate;
#[cfg(test)]
mod tests;
pub mod workload;
