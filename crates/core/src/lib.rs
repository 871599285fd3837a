//! Surgetank's core: everything that decides and remembers, without a mount or a process around it.
//!
//! Imports point one way (see `ARCHITECTURE.md`):
//! `{drain, audit, planner} → namespace → {report, transfer} → {handoff, catalog}`, and below them the crates `state → tier → policy → store → types`.

#[macro_use]
extern crate surgetank_types;

pub mod audit;
pub mod catalog;
pub mod drain;
pub mod handoff;
pub mod namespace;
pub mod planner;
pub mod report;
pub mod transfer;
