//! A file-system exerciser (`fsx`, see scripts/setup) changes one file at random: it writes, cuts, maps, punches,
//! copies, closes and reopens it. It compares each read with the data that it expects. The tier is smaller than all
//! files together, so the file spills and other files are evicted all the time. Afterwards the store must have the
//! file's last content.
//!
//! `SURGETANK_FSX_OPERATIONS` is the number of operations in all, `SURGETANK_FSX_SEED` the first seed.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::{Path, PathBuf};
use surgetank_testkit::seeds;

use crate::scene::{MIB, Scene};
use serde_json::Value;

/// Operations in one run of the program under test, so that no run takes minutes.
const ROUND_OPERATIONS: u64 = 400;
/// How many tests share the operations.
const RUNS: u64 = 5;

/// Less than the size of the two files and the fillers.
const SMALL_MIB: u64 = 6;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// The path where scripts/setup installed it.
fn exerciser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("fsx")).find(|path| path.is_file());
    assert!(found.is_some() || std::env::var_os("CI").is_none(), "fsx is missing: scripts/setup test installs it");
    if found.is_none() {
        eprintln!("skipped: fsx is missing, scripts/setup test installs it");
    }
    found
}

/// How often a run in which no file had to leave the tier is repeated.
const ROUNDS_MORE_MAX: u64 = 100;

/// Two exercisers, each on a file that alone fits the tier, and a loop that fills the tier and reads it again.
fn exercise(name: &str, tier_mib: u64, options: &[&str]) {
    let Some(program) = exerciser() else { return };
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", tier_mib);
    let operations = (number("SURGETANK_FSX_OPERATIONS", 2_000) / RUNS / 2).max(1);
    let seed = number("SURGETANK_FSX_SEED", 1);
    fs::copy(program, "/mnt/fsx").unwrap();
    fs::write("/mnt/fsx.toml", CONFIGURATION).unwrap();
    scene.beside("copies");
    for seed in seeds::kept("fsx") {
        exercise_once(&scene, options, ROUND_OPERATIONS, seed);
    }
    let (mut left, mut spills) = (operations, 0);
    for round in 0.. {
        let now = left.min(ROUND_OPERATIONS);
        spills += exercise_once(&scene, options, now, seed + 2 * round);
        left -= now;
        // The three programs may happen to run one after another. They then have room enough, so the round is
        // repeated.
        if left == 0 && spills == 0 && tier_mib == SMALL_MIB && round < ROUNDS_MORE_MAX {
            left = now;
            continue;
        }
        if left == 0 {
            assert_eq!(spills > 0, tier_mib == SMALL_MIB, "{spills} spills");
            return;
        }
    }
}

/// Returns how many files were spilled.
fn exercise_once(scene: &Scene, options: &[&str], operations: u64, seed: u64) -> u64 {
    eprintln!("SURGETANK_FSX_SEED={seed}");
    let copies = Path::new("/mnt/copies");
    let copies = copies.display();
    let other = seed + 1;
    let script = format!(
        "/mnt/fsx -q -f /mnt/fsx.toml -P /mnt/copies -N {operations} -S {seed} one >/mnt/copies/one.log 2>&1 & one=$!
         /mnt/fsx -q -f /mnt/fsx.toml -P /mnt/copies -N {operations} -S {other} two >/mnt/copies/two.log 2>&1 & two=$!
         n=0
         while kill -0 $one 2>/dev/null || kill -0 $two 2>/dev/null; do
             n=$((n + 1)); name=filler-$((n % 4))
             head -c {} /dev/zero | tr '\\0' \"$((n % 10))\" >$name
             [ $(tr -d \"$((n % 10))\" <$name | wc -c) = 0 ] || {{ echo $name is broken; stat $name; od -A d -c $name | head -20; kill $one $two; exit 1; }}
         done
         wait $one || {{ tail -50 {copies}/one.log; exit 1; }}
         wait $two || {{ tail -50 {copies}/two.log; exit 1; }}
         cp one two {copies}/",
        2 * MIB
    );
    let options = [options, &["--json", "/mnt/copies/report"]].concat();
    let ended = scene.run(&options, &script);
    assert_eq!(ended.status.code(), Some(0), "seed {seed}\n{}\n{}", ended.stdout, ended.stderr);
    let report: Value = serde_json::from_slice(&fs::read("/mnt/copies/report").unwrap()).unwrap();
    let spills = report["summary"]["tiers"][0]["spills"].as_u64().unwrap();
    for file in ["one", "two"] {
        scene.holds(file, &fs::read(format!("/mnt/copies/{file}")).unwrap());
    }
    scene.is_clean();
    spills
}

const CONFIGURATION: &str = "
flen = 3000000
[opsize]
max = 200000
[weights]
close_open = 3
invalidate = 1
read = 10
write = 10
mapread = 5
mapwrite = 5
truncate = 3
fsync = 0.05
fdatasync = 0.05
posix_fallocate = 1
punch_hole = 3
sendfile = 3
posix_fadvise = 1
copy_file_range = 3
";

#[test]
fn direct_file_keeps_its_content() {
    exercise("fsx_direct", SMALL_MIB, &["--no-preload"]);
}

#[test]
fn mediated_file_keeps_its_content() {
    exercise("fsx_mediated", SMALL_MIB, &["--no-preload", "--direct", "false"]);
}

#[test]
fn file_keeps_its_content_through_the_shim() {
    exercise("fsx_shim", SMALL_MIB, &[]);
}

#[test]
fn file_keeps_its_content_with_fsync_to_the_tier() {
    exercise("fsx_tier", SMALL_MIB, &["--no-preload", "--direct", "false", "--fsync", "tier"]);
}

/// Without a mount a full tier is an error for the program, so this tier is large.
#[test]
fn file_keeps_its_content_without_a_mount() {
    exercise("fsx_seccomp", 64, &["--door", "seccomp"]);
}
