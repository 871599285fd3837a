//! Surgetank's core: everything that decides and remembers, without a mount or a process around it.
//!
//! Imports point one way (see `ARCHITECTURE.md`):
//! `drain → namespace → {placement, report} → {catalog, store} → {tier, rule, hint} → {model, config, clock, error}`.

#[macro_use]
pub mod crash;

pub mod audit;
pub mod bequest;
pub mod catalog;
pub mod clock;
pub mod config;
pub mod drain;
pub mod error;
pub mod hint;
pub mod makespan;
pub mod model;
pub mod namespace;
pub mod placement;
pub mod report;
pub mod rule;
pub mod shell;
pub mod store;
mod sync;
pub mod tier;
pub mod transfer;
