//! The tests of the library's public interface, in one binary: a file is a module, and each test has its own process
//! (`cargo nextest`). `schedules` is a separate binary, because it builds the library differently.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test reports by a panic")]

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
