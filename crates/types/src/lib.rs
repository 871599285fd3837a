//! The base crate, which every other crate uses: ids, attributes and records ([`model`]), errors for people and faults for
//! programs ([`error`]), the clock ([`clock`]), locks and threads ([`sync`]), crash points ([`crash`]), quoting for shells
//! ([`shell`]), threads for jobs that may block ([`workers`]), and the copy ladder between two files ([`ladder`]).
//!
//! Invariant: nothing here performs store I/O or decides anything; only [`ladder`] moves bytes.

#![warn(missing_docs)]

#[macro_use]
pub mod crash;

pub mod clock;
pub mod error;
pub mod heap;
pub mod ladder;
pub mod mapped;
pub mod model;
pub mod shell;
pub mod sync;
pub mod workers;
