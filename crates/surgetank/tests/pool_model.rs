//! Members of a pool against the reference model: each operation goes through the mount of a random member, and all
//! results must equal those of one directory tree. So must the store at the end.
//!
//! `SURGETANK_POOL_MODEL_CASES` makes it run longer, `SURGETANK_MODEL_SEED` repeats a run.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use surgetank_testkit::model::disk;
use surgetank_testkit::model::operation::{Operation, SLOTS};
use surgetank_testkit::model::reference::{Kind, Outcome, Reference};
use surgetank_testkit::seeds;

use crate::model_mount::{apply, number, operations};
use crate::pool::Pool;

const CASES: u64 = 2;

#[test]
fn three_members_equal_one_directory_tree() {
    // SAFETY: takes and returns a number.
    unsafe { libc::umask(0) };
    let cases = number("SURGETANK_POOL_MODEL_CASES");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    // A search begins anywhere; without one the same cases are repeated.
    let first = cases.map_or(1, |_| u64::from(now.subsec_nanos()));
    let first = number("SURGETANK_MODEL_SEED").unwrap_or(first);
    let searched = first..first + cases.unwrap_or(CASES);
    let Some(mut pool) = Pool::start("model", 0) else { return };
    for seed in seeds::kept("pool_model").into_iter().chain(searched) {
        eprintln!("SURGETANK_MODEL_SEED={seed}");
        let mut reference = Reference::new();
        let store = Path::new("/mnt/pool").join(seed.to_string()).join("store");
        std::fs::create_dir_all(&store).unwrap();
        // (Of a file with several names in the store, members see each other's changes as clients of the store do.)
        disk::lay_out(&store, &mut reference, false);
        pool.again(&seed.to_string(), 3);
        let operations = operations(seed);
        let mut files = [const { None }; SLOTS];
        let mut random = fastrand::Rng::with_seed(seed);
        let mut done = Vec::new();
        for (index, operation) in operations.iter().enumerate() {
            let member = random.usize(..pool.count());
            std::env::set_current_dir(pool.member(member)).unwrap();
            let got = apply(&mut files, operation).unwrap_or_else(Outcome::Failed);
            done.push(format!("    {member}: {operation:?} -> {got:?},"));
            if is_refused_across_nodes(operation, &got) {
                continue;
            }
            let mut want = reference.apply(operation);
            let mut got = got;
            if let (Outcome::Seen(want), Outcome::Seen(seen)) = (&want, &got)
                && want.kind == Kind::Directory
                && seen.links != want.links
            {
                // (Other members believe the number of its directories for the time of `--store-ttl`.)
                std::thread::sleep(Duration::from_millis(150));
                got = apply(&mut files, operation).unwrap_or_else(Outcome::Failed);
            }
            if let (Outcome::Seen(want), Outcome::Seen(got)) = (&mut want, &mut got)
                && want.mtime.is_none()
            {
                got.mtime = None;
            }
            assert!(
                want == got,
                "SURGETANK_MODEL_SEED={seed}: operation {index} at member {member}, {operation:?}: {got:?}, not {want:?}\n{}",
                done.join("\n")
            );
        }
        drop(files);
        std::env::set_current_dir("/").unwrap();
        reference.close_all();
        pool.end();
        let found = disk::differences(&store, &reference, &BTreeSet::new());
        assert!(found.is_empty(), "SURGETANK_MODEL_SEED={seed}: in the store: {found:#?}\n{}", done.join("\n"));
    }
}

/// What docs/semantics.md says is refused where two members own the directories.
fn is_refused_across_nodes(operation: &Operation, got: &Outcome) -> bool {
    match operation {
        Operation::Rename { .. } | Operation::Link { .. } => *got == Outcome::Failed(Errno::XDEV),
        _ => false,
    }
}
