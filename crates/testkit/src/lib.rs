//! Code that the tests of several crates share: the reference model ([`model`]), real servers ([`servers`]), seeds at which a
//! random search failed ([`seeds`]), and [`modules`], which finds test files that are not compiled.
//!
//! Invariant: it depends on none of the crates under test, so that their unit tests can use it too.
#![warn(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "in a test that is how it fails")]

pub mod model;
pub mod modules;
pub mod seeds;
pub mod servers;
