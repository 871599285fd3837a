//! The tests of the program, in one binary. Each file is a module, and `cargo nextest` runs each test in a process of
//! its own.
//!
//! Not included are `agent_life` and `crash`: they list their cases at run time and are binaries of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test reports by a panic")]

mod anchors;
mod attributes;
mod bad_input;
mod compress;
mod dedup;
mod delegation;
mod delegation_doors;
mod documentation;
mod durability;
mod escapes;
mod foreign_programs;
mod fsx;
mod gridfs;
mod handoff;
mod hdfs;
mod hints;
mod hints_asked;
mod hostile;
mod job_end;
mod locks;
mod mediated;
mod memory_limit;
mod metrics;
mod mirror;
mod mirror_faults;
mod model_mount;
mod moosefs;
mod mount_adapter;
mod mount_decoder;
mod mount_namespaces;
mod mount_session;
mod mounted;
mod nodes;
mod page;
mod pool;
mod pool_closes;
mod pool_collocation;
mod pool_counts;
mod pool_crash;
mod pool_delegations;
mod pool_directories;
mod pool_hints;
mod pool_homes;
mod pool_late;
mod pool_life;
mod pool_locate;
mod pool_losses;
mod pool_marks;
mod pool_model;
mod pool_network;
mod pool_objects;
mod pool_order;
mod pool_pieces;
mod pool_registry;
mod pool_renames;
mod pool_replicas;
mod pool_shim;
mod pool_shim_made;
mod pool_status;
mod pool_storms;
mod posix;
mod posix_tables;
mod postgresql;
mod power;
mod prediction;
mod prefetch;
mod races;
mod real_programs;
mod recovery;
mod redis;
mod refused;
mod regressions;
mod report;
mod report_regressions;
mod rescue;
mod rules_end_to_end;
mod s3;
mod scene;
mod sealing;
mod seccomp;
mod seccomp_gaps;
mod semantics;
mod shim;
mod shim_regressions;
mod spill;
mod stage;
mod store_faults;
mod store_node;
mod store_trouble;
mod synced;
mod synced_copies;
mod trace;
mod trees;
mod unprivileged;
mod workloads;

#[test]
fn every_test_file_is_compiled() {
    let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let forgotten = surgetank_testkit::modules::undeclared(&tests, include_str!("../Cargo.toml"));
    assert!(forgotten.is_empty(), "no module names {forgotten:?}");
}
