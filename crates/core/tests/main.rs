//! The tests of the library from outside, in one binary: a file is a module, and each test a process of its own (`cargo nextest`).
//! Apart from it: `schedules`, for which the library is built otherwise.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "in a test that is how it fails")]

mod catalog;
mod fetch;
mod model;
mod negative_cache;
mod prefetch;
mod query_timeout;
mod transfer;

#[test]
fn every_test_file_is_compiled() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let forgotten = surgetank_testkit::modules::undeclared(&tests, include_str!("../Cargo.toml"));
    assert!(forgotten.is_empty(), "no module names {forgotten:?}");
}
