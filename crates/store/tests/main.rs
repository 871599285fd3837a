//! The tests of the store's drivers on real servers, in one binary: a file is a module, and each test a process of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test reports by a panic")]

mod gridfs;
mod redis;
mod redis_cluster;
mod redis_trouble;
mod s3;

#[test]
fn every_test_file_is_compiled() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let forgotten = surgetank_testkit::modules::undeclared(&tests, include_str!("../Cargo.toml"));
    assert!(forgotten.is_empty(), "no module names {forgotten:?}");
}
