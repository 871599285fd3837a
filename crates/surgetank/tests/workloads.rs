//! The scientific programs of `bench/workloads` under `surgetank run`, at a size that takes a second or two.
//!
//! Each runs twice from the same inputs: in a plain directory, and in one under `surgetank run`. The store is then
//! compared with the plain directory, and passed to the workload's own check, which computes the expected outputs. A
//! changed byte, and a file that does not belong there, show that the check can fail.
//!
//! Needs the programs that `scripts/setup test` installs. A missing one skips the test; under CI it is a failure.

// A test panics at a failed step, so that the failure names its line.
#![allow(clippy::unwrap_used)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::SystemTime;

use serde_json::Value;
use tempfile::TempDir;

macro_rules! workloads {
    ($($name:ident: $final:literal)+) => {
        $(#[test]
        fn $name() {
            run_twice(stringify!($name), $final);
        })+

        const NAMES: &[&str] = &[$(stringify!($name)),+];
    };
}

// Each with one of its final outputs.
workloads! {
    blast: "merged.tsv"
    cybershake: "seismograms/000/00007.x.bin"
    genome: "archive/chr1.tar"
    montage: "mosaic.png"
    sweep: "blocks/002"
}

/// A workload that is not in the table above would never run here.
#[test]
fn every_workload_is_a_case() {
    let mut programs: Vec<String> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file() && entry.path().extension().is_none())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    programs.sort();
    assert_eq!(programs, NAMES);
}

fn run_twice(name: &str, output: &str) {
    let started = SystemTime::now();
    // Not under /tmp, which may be a tmpfs: the store must be a file system with all abilities of a disk's.
    let scratch = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = scratch.path().join("project");
    let plain = scratch.path().join("plain");

    fs::create_dir(&place).unwrap();
    let inputs = workload(name, "inputs", &place, &[]);
    let errors = String::from_utf8_lossy(&inputs.stderr).into_owned();
    if inputs.status.code() == Some(2) {
        assert!(std::env::var_os("CI").is_none(), "scripts/setup test installs it: {errors}");
        eprintln!("skipped: {errors}");
        return;
    }
    assert!(inputs.status.success(), "{name} inputs: {errors}");
    succeeds(&workload(name, "run", &place, &[]), "run in a plain directory");
    fs::rename(&place, &plain).unwrap();

    fs::create_dir(&place).unwrap();
    succeeds(&workload(name, "inputs", &place, &[]), "inputs");
    let tier = TempDir::new_in("/dev/shm").unwrap();
    let tier_words = format!("ram={}:1G", tier.path().display());
    let state = tier.path().join("state");
    let words = [
        "run",
        "--quiet",
        "--over",
        place.to_str().unwrap(),
        "--tier",
        &tier_words,
        "--state",
        state.to_str().unwrap(),
        "--",
    ];
    let ran = workload(name, "run", &place, &words);
    succeeds(&ran, "run under surgetank");

    let lines = String::from_utf8(ran.stdout).unwrap();
    let stages: Vec<String> = lines.lines().map(|line| stage(&serde_json::from_str(line).unwrap())).collect();
    let described: Value = serde_json::from_slice(&workload(name, "describe", &place, &[]).stdout).unwrap();
    let expected: Vec<String> = described["stages"].as_array().unwrap().iter().map(stage).collect();
    assert_eq!(stages, expected, "stages with their numbers of tasks");

    let differences: Vec<String> = crate::trees::differences(&plain, &place, started).into_values().collect();
    assert!(differences.is_empty(), "the store differs from a plain directory:\n{}", differences.join("\n"));
    succeeds(&workload(name, "check", &place, &[]), "check of the store");

    let stray = place.join("stray");
    fs::write(&stray, "").unwrap();
    fails(&workload(name, "check", &place, &[]), "stray belongs to no stage");
    fs::remove_file(&stray).unwrap();
    let damaged = OpenOptions::new().read(true).write(true).open(place.join(output)).unwrap();
    let middle = damaged.metadata().unwrap().len() / 2;
    let mut bytes = [0; 64];
    damaged.read_exact_at(&mut bytes, middle).unwrap();
    bytes.iter_mut().for_each(|byte| *byte ^= 0x15);
    damaged.write_all_at(&bytes, middle).unwrap();
    fails(&workload(name, "check", &place, &[]), output.rsplit('/').next().unwrap());
}

fn stage(line: &Value) -> String {
    format!("{} {}", line["stage"], line["tasks"])
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/workloads")
}

/// A verb of a workload, run under the `words` of surgetank if there are any.
fn workload(name: &str, verb: &str, place: &Path, words: &[&str]) -> Output {
    let program = folder().join(name);
    let mut command = match words {
        [] => Command::new(&program),
        words => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_surgetank"));
            command.args(words).arg(&program);
            command
        }
    };
    command.env("PYTHONDONTWRITEBYTECODE", "1").arg(verb).arg(place).args(["--size", "smoke"]).output().unwrap()
}

#[track_caller]
fn succeeds(output: &Output, what: &str) {
    assert!(output.status.success(), "{what}: {:?}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn fails(output: &Output, words: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains(words), "{words:?} is missing in:\n{errors}");
}
