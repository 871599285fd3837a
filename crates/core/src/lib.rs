//! Surgetank's core: everything that decides and remembers, without a mount or a process around it.
//!
//! Imports point one way (see `ARCHITECTURE.md`):
//! `drain → namespace → {report, transfer} → {bequest, catalog}`, and below them the crates `tier → policy → store → types`.

#[macro_use]
extern crate surgetank_types;

pub mod audit;
pub mod bequest;
pub mod catalog;
pub mod drain;
pub mod makespan;
pub mod namespace;
pub mod report;
pub mod transfer;
