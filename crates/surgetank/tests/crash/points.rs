//! Where the agent is killed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::Failed;

/// The crash points that this workload passes, and about how often one life passes them at most
/// (`SURGETANK_CRASH_LOG`).
pub const POINTS: &[(&str, u64)] = &[
    ("catalog.append", 190),
    ("catalog.torn", 190),
    ("catalog.appended", 190),
    ("catalog.sync", 14),
    ("catalog.segment_made", 3),
    ("catalog.segment_headed", 3),
    ("catalog.clear", 1),
    ("catalog.restarted", 1),
    ("catalog.snapshot_deleted", 1),
    ("catalog.rolled", 6),
    ("catalog.fold", 5),
    ("catalog.snapshot_made", 1),
    ("catalog.snapshot_named", 1),
    ("catalog.folded", 5),
    ("tier.reserved", 40),
    ("tier.created", 40),
    ("make.adopted", 40),
    ("make.written_down", 40),
    ("seal.looked", 100),
    ("seal.begun", 40),
    ("seal.written_down", 40),
    ("rename.written_down", 12),
    ("rename.before_tier", 12),
    ("exchange.written_down", 4),
    ("exchange.one_aside", 4),
    ("link.written_down", 4),
    ("node.written_down", 4),
    ("rmdir.written_down", 4),
    ("unlink.begun", 4),
    ("unlink.written_down", 4),
    ("unlink.tier_done", 4),
    ("copy_up.copied", 1),
    ("copy_up.adopted", 1),
    ("spill.copied", 1),
    ("spill.adopted", 1),
    ("spill.written_down", 1),
    ("evict.begun", 30),
    ("evict.written_down", 30),
    ("drain.stage", 46),
    ("store.temporary_made", 46),
    ("store.copied", 46),
    ("store.staged", 46),
    ("store.settle", 10),
    ("store.verify", 43),
    ("drain.compared", 14),
    ("drain.started", 14),
    ("store.published", 41),
    ("store.replace", 10),
    ("store.replaced", 10),
    ("store.stage_dir", 9),
    ("store.rename", 5),
    ("store.unlink", 3),
    ("store.exchange", 8),
    ("store.restage", 5),
    ("store.link", 2),
    ("store.remove_dir", 2),
    ("store.set_meta", 4),
    ("drain.renamed", 5),
    ("drain.attributes_set", 4),
    ("store.discard", 14),
    ("drain.executed", 56),
    ("store.sync_dirs", 14),
    ("drain.durable", 14),
    ("drain.done", 14),
    ("sync.written_down", 5),
    ("mount.served", 900),
    ("lookup.missed", 100),
    ("shim.asked", 20),
    ("rename.looked", 20),
    ("name.decided", 20),
    ("shim.given", 20),
    ("delegation.published", 20),
    ("delegation.settling", 100),
    ("delegation.settled", 100),
    ("delegation.giving", 100),
    ("delegation.stopped", 20),
    ("recover.intake", 1),
    ("recover.loaded", 1),
    ("recover.settled", 1),
    ("recover.matched", 1),
    ("recover.taken_over", 1),
    ("recover.sealed", 1),
    ("recover.cleaned", 1),
];

/// Points that the workload does not pass, and the reason.
const ELSEWHERE: &[(&str, &str)] = &[
    ("drain.rename", "an example in the documentation of `crash`"),
    ("packed.behind", "where rules deduplicate: tests/dedup.rs"),
    ("packed.published", "where rules compress: tests/compress.rs"),
    ("packed.referred", "where rules deduplicate: tests/dedup.rs"),
    ("packed.renamed", "where rules compress: tests/compress.rs"),
    ("fetch.copied", "a store without plain files: tests/s3.rs, core's tests/fetch.rs"),
    ("fetch.adopted", "a store without plain files: tests/s3.rs, core's tests/fetch.rs"),
    ("prefetch.copied", "a prefetch: tests/prefetch.rs"),
    ("prefetch.adopted", "a prefetch: tests/prefetch.rs"),
    ("memory_pressure.copied", "when memory runs short: tests/memory_limit.rs"),
    ("memory_pressure.written_down", "when memory runs short: tests/memory_limit.rs"),
    ("remains.held", "files of more than a megabyte; held, not killed at: tests/races.rs"),
    ("lookup.found", "held, not killed at: tests/shim.rs"),
    ("run.joined", "`surgetank run`, which is not an agent: tests/handoff.rs"),
    ("store.publish", "drivers of servers: tests/redis.rs, tests/hdfs.rs"),
    ("store.overwriting", "files of several names, and files of other users: tests/recovery.rs"),
    ("store.rename_copied", "stores without renames: tests/s3.rs"),
    ("store.rename_deleted", "stores without renames: tests/s3.rs"),
    ("recover.put_back", "where the state is on the store's disk: tests/synced_copies.rs"),
    ("synced_copy.written", "where the state is on the store's disk: tests/synced_copies.rs"),
    ("store.upload_begun", "object stores: tests/s3.rs"),
    ("store.part_sent", "object stores: tests/s3.rs"),
];

/// A point in neither list would never be tested, and no other test would fail.
pub fn is_complete() -> Result<(), Failed> {
    let mut named = BTreeSet::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut left: Vec<PathBuf> = fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path().join("src")).collect();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let names =
                text.split("crash_point!(\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned()));
            named.extend(names);
        }
    }
    let listed = POINTS.iter().map(|(name, _)| *name).chain(ELSEWHERE.iter().map(|(name, _)| *name));
    let listed: BTreeSet<String> = listed.map(str::to_owned).collect();
    let differ: Vec<&String> = named.symmetric_difference(&listed).collect();
    if differ.is_empty() {
        Ok(())
    } else {
        Err(format!("either in the sources or in the lists, not in both: {differ:?}").into())
    }
}
