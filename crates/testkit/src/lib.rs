//! Code that the tests of several crates share: the reference model ([`model`]), real servers ([`servers`]), stores that
//! wrap another one ([`stores`]), seeds at which a random search failed ([`seeds`]), and [`modules`], which finds test files
//! that are not compiled.
//!
//! Invariant: only [`stores`] depends on crates under test. A unit test of the crate `store` or `types` can use all other
//! modules. To the compiler, the crate under test and the crate with which [`stores`] was built are two different crates.
#![warn(missing_docs)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test reports by a panic")]

pub mod model;
pub mod modules;
pub mod seeds;
pub mod servers;
pub mod stores;
