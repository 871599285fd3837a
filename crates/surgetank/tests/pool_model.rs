//! Members of a pool against the reference model: each operation goes through the mount of a random member, and all
//! results must equal those of one directory tree. So must the store at the end.
//!
//! `SURGETANK_POOL_MODEL_CASES` makes it run longer, `SURGETANK_MODEL_SEED` repeats a run.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output};

use rustix::io::Errno;
use surgetank_testkit::model::disk;
use surgetank_testkit::model::operation::{Operation, SLOTS};
use surgetank_testkit::model::reference::{Outcome, Reference};
use surgetank_testkit::seeds;

use crate::model_mount::{apply, number, operations};

const CASES: u64 = 6;

/// Members on one machine: each has its own mount, tier and state, and all have one store.
pub struct Pool {
    scratch: disk::Scratch,
    members: Vec<PathBuf>,
}

impl Pool {
    pub fn start(scratch: disk::Scratch, members: usize) -> Self {
        let mut pool = Self { scratch, members: Vec::new() };
        for number in 1..=members {
            let over = pool.scratch.join(&format!("node{number}"));
            std::fs::create_dir_all(&over).unwrap();
            std::fs::create_dir_all(pool.scratch.join("store")).unwrap();
            let tier = pool.scratch.join(&format!("tier{number}"));
            std::fs::create_dir_all(&tier).unwrap();
            let tier = format!("fast={}:64MiB", tier.display());
            let args = ["mount", "--pool", "model", "--pool-host", "127.0.0.1", "--store-ttl", "100ms"];
            let output = pool.surgetank(&args, |command| {
                command.arg("--pool-secret").arg(pool.scratch.join("secret"));
                command.arg("--store").arg(pool.scratch.join("store"));
                command.args(["--tier", &tier]).arg("--state").arg(pool.scratch.join(&format!("state{number}")));
                command.arg(&over);
            });
            assert!(output.status.success(), "member {number}: {output:?}");
            pool.members.push(over);
        }
        pool
    }

    /// The directory of a member, from 0.
    pub fn member(&self, number: usize) -> &PathBuf {
        &self.members[number]
    }

    pub fn count(&self) -> usize {
        self.members.len()
    }

    pub fn store(&self) -> PathBuf {
        self.scratch.join("store")
    }

    pub fn state(&self, number: usize) -> PathBuf {
        self.scratch.join(&format!("state{}", number + 1))
    }

    fn surgetank(&self, args: &[&str], more: impl FnOnce(&mut Command)) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
        command.args(args);
        more(&mut command);
        command.output().unwrap()
    }

    /// Everything reaches the store. The last member leaves first.
    pub fn end(mut self) -> disk::Scratch {
        while let Some(over) = self.members.pop() {
            let state = self.state(self.members.len());
            let output = self.surgetank(&["umount", "--timeout", "60s"], |command| {
                command.arg("--state").arg(&state).arg(&over);
            });
            assert!(output.status.success(), "{}: {output:?}", over.display());
        }
        std::mem::replace(&mut self.scratch, disk::Scratch::new())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for number in 0..self.members.len() {
            for place in std::fs::read_dir(self.state(number)).into_iter().flatten().flatten() {
                let log = std::fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
                log.lines().filter(|line| !line.contains(" INFO ")).for_each(|line| eprintln!("member {number}: {line}"));
            }
        }
        for over in &self.members {
            // (A test that failed: what is left must not stay mounted.)
            let _ = rustix::mount::unmount(over, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

#[test]
fn three_members_equal_one_directory_tree() {
    // SAFETY: takes and returns a number.
    unsafe { libc::umask(0) };
    let seed = number("SURGETANK_MODEL_SEED");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let first = seed.unwrap_or_else(|| u64::from(now.subsec_nanos()));
    let searched = first..first + number("SURGETANK_POOL_MODEL_CASES").unwrap_or(CASES);
    for seed in seeds::kept("pool_model").into_iter().chain(searched) {
        eprintln!("SURGETANK_MODEL_SEED={seed}");
        let scratch = disk::Scratch::new();
        let store = scratch.join("store");
        let mut reference = Reference::new();
        std::fs::create_dir_all(&store).unwrap();
        // (Of a file with several names in the store, members see each other's changes as clients of the store do.)
        disk::lay_out(&store, &mut reference, false);
        let pool = Pool::start(scratch, 3);
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
        let scratch = pool.end();
        let found = disk::differences(&scratch.join("store"), &reference, &BTreeSet::new());
        assert!(found.is_empty(), "SURGETANK_MODEL_SEED={seed}: in the store: {found:#?}\n{}", done.join("\n"));
    }
}

/// What docs/semantics.md says is refused where two members own the directories.
fn is_refused_across_nodes(operation: &Operation, got: &Outcome) -> bool {
    match operation {
        Operation::Rename { .. } | Operation::Link { .. } => *got == Outcome::Failed(Errno::XDEV),
        Operation::Rmdir { .. } => *got == Outcome::Failed(Errno::BUSY),
        _ => false,
    }
}
