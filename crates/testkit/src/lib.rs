//! What the tests of several crates share: the reference model ([`model`]), real servers ([`servers`]), and seeds at which a random
//! search failed ([`seeds`]); and [`modules`], which finds test files that nothing compiles.
//!
//! It depends on none of the crates under test: unit tests use it too.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "in a test that is how it fails")]

pub mod model;
pub mod modules;
pub mod seeds;
pub mod servers;
