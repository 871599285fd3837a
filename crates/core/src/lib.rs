//! Surgetank's core: everything that decides and remembers, without a mount or a process around it.
//!
//! Imports point one way (see `ARCHITECTURE.md`):
//! `{drain, audit, planner} → namespace → files → metadata → base → content → {report, transfer} → {handoff, catalog}`, and below them the crates `state → tier → policy → store → types`.

#![warn(missing_docs)]

#[macro_use]
extern crate surgetank_types;

pub mod audit;
pub(crate) mod base;
pub mod catalog;
pub(crate) mod content;
pub mod drain;
pub mod files;
pub mod handoff;
pub mod metadata;
pub mod namespace;
pub mod planner;
pub mod report;
pub mod transfer;
