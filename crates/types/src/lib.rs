//! What every room speaks in: ids, attributes and records ([`model`]), errors for people and faults for programs ([`error`]), the
//! clock, locks and threads ([`sync`]), crash points, words as a shell reads them, and the copy ladder between two files.

#[macro_use]
pub mod crash;

pub mod clock;
pub mod error;
pub mod ladder;
pub mod model;
pub mod shell;
pub mod sync;
