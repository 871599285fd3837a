//! Code that the tests of several crates share: the reference model ([`model`]), real servers ([`servers`]), stores that
//! wrap another one ([`stores`]), seeds at which a random search failed ([`seeds`]), and [`modules`], which finds test files
//! that are not compiled.
//!
//! Invariant: only [`stores`] depends on crates under test. A unit test of the crate `store` or `types` can use everything but
//! that: the compiler takes the crate under test and the crate that [`stores`] was built with for two different ones.
#![warn(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "in a test that is how it fails")]

pub mod model;
pub mod modules;
pub mod seeds;
pub mod servers;
pub mod stores;
