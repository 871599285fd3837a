//! A job with a limit on its memory, and a tier in memory whose pages count against the limit. The kernel kills no
//! process for it, and every byte reaches the store.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

#[cfg(feature = "s3")]
use std::fs;
use std::path::Path;

use crate::scene::group::Group;
use crate::scene::{Ended, MIB, Running, Scene, eventually, noise};

/// The limit also covers the memory of the agent, its supervisor and some programs.
const LIMIT: u64 = 192 * MIB;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.beside("beside");
    // Larger than all the memory that the job may have.
    scene.tier("ram", 1000);
    fs::write("/mnt/source", noise(11, 32 * MIB)).unwrap();
    Some(scene)
}

fn start(scene: &Scene, group: &Group, options: &[&str], script: &str) -> Running {
    let mut command = scene.run_command(options, script);
    group.holds(&mut command);
    Running::of(command)
}

#[track_caller]
fn run(scene: &Scene, group: &Group, options: &[&str], script: &str) -> Ended {
    let ended = start(scene, group, options, script).ends();
    assert_eq!(group.kills(), 0, "killed for lack of memory: {}", ended.stderr);
    ended
}

const WRITE: &str = "for i in $(seq 12); do cp /mnt/source part$i; done";

#[track_caller]
fn holds_parts(scene: &Scene, count: usize) {
    let bytes = noise(11, 32 * MIB);
    (1..=count).for_each(|number| scene.holds(&format!("part{number}"), &bytes));
    scene.is_clean();
}

fn more_than_the_limit(name: &str, options: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    let Some(group) = Group::new(name) else { return };
    let group = group.limited(LIMIT);
    run(&scene, &group, options, WRITE).exits(0);
    holds_parts(&scene, 12);
}

#[test]
fn job_may_write_more_than_its_memory() {
    more_than_the_limit("memory_shim", &[]);
}

#[test]
fn job_may_write_more_than_its_memory_mediated() {
    more_than_the_limit("memory_mediated", &["--no-preload", "--direct", "false"]);
}

/// Regression: a file was closed and published during its move out of memory, and the temporary of the move stayed in
/// the store.
#[test]
fn file_closed_during_its_move_leaves_no_temporary() {
    let Some(scene) = prepare("memory_closed") else { return };
    let Some(group) = Group::new("memory_closed") else { return };
    let group = group.limited(LIMIT);
    let script = "for i in $(seq 12); do { cat /mnt/source; sleep 0.1; } > part$i; done";
    let mut command = scene.run_command(&["--no-preload", "--direct", "false", "--quiet-period", "0s"], script);
    group.holds(&mut command);
    command.env("SURGETANK_HOLD", "spill.copied:300");
    Running::of(command).ends().exits(0);
    assert_eq!(group.kills(), 0);
    holds_parts(&scene, 12);
}

/// The job's step has no limit of its own; the job has one.
#[test]
fn memory_limit_of_a_parent_group_counts() {
    let Some(scene) = prepare("memory_nested") else { return };
    let Some(job) = Group::new("memory_nested") else { return };
    let job = job.limited(LIMIT);
    let step = job.below("step");
    run(&scene, &step, &["--no-preload"], WRITE).exits(0);
    assert_eq!(job.kills(), 0);
    holds_parts(&scene, 12);
}

/// Allocates memory step by step, more than the job has left, and marks when it has all of it.
const HOG: &str = "
import sys, time
taken = []
for _ in range(int(sys.argv[1]) // 4):
    taken.append(b'x' * (4 << 20))
    time.sleep(0.03)
open('/mnt/beside/taken', 'w').close()
";

/// The tier is full of undrained files, and the drain is slow. The agent must move files to a disk, or to the store,
/// in time.
fn a_program_needs_the_memory(name: &str, disk: bool, script: &str, count: usize) {
    needs_the_memory_and_is_killed(name, disk, script, count, None);
}

/// `crash`: the point where the agent is killed meanwhile.
fn needs_the_memory_and_is_killed(name: &str, disk: bool, script: &str, count: usize, crash: Option<&str>) {
    let Some(mut scene) = prepare(name) else { return };
    let Some(group) = Group::new(name) else { return };
    let group = group.limited(LIMIT + 64 * MIB);
    if disk {
        let disk = scene.beside("tier-disk");
        scene.other_tier("disk", &disk, 500);
    }
    fs::write("/mnt/hog.py", HOG).unwrap();
    let options =
        ["--quiet-period", "1h", "--dirty-bytes-max", "1G", "--drain-bytes-per-second-max", "32M", "--no-preload"];
    let script =
        format!("{script}\n/mnt/surgetank why --state /mnt/state part1 > /mnt/beside/why\npython3 /mnt/hog.py 160");
    let mut command = scene.run_command(&options, &script);
    group.holds(&mut command);
    if let Some(crash) = crash {
        command.env("SURGETANK_CRASH", crash);
    }
    let ended = Running::of(command).ends();
    assert_eq!(group.kills(), 0, "killed for lack of memory: {}", ended.stderr);
    ended.exits(0);
    assert_eq!(scene.log().contains("another one takes over"), crash.is_some());
    let why = fs::read_to_string("/mnt/beside/why").unwrap();
    assert!(why.contains("ram"), "the file was not in memory, so the test proves nothing: {why}");
    assert!(Path::new("/mnt/beside/taken").exists());
    let bytes = noise(11, 32 * MIB);
    (1..=count).for_each(|number| scene.holds(&format!("part{number}"), &bytes[..96 * MIB as usize / count]));
    scene.is_clean();
    scene.leaves_nothing_on_the_tiers();
}

const FILL: &str = "for i in $(seq 24); do head -c 4M /mnt/source > part$i; done";

/// Regression: undrained files stayed in memory, and the kernel killed the program that needed it.
#[test]
fn undrained_files_leave_memory_that_a_program_needs() {
    a_program_needs_the_memory("memory_hog_disk", true, FILL, 24);
}

/// Regression: as above, with no other tier to move the files to.
#[test]
fn undrained_files_leave_memory_without_another_tier() {
    a_program_needs_the_memory("memory_hog_store", false, FILL, 24);
}

/// The drain holds the plain file of a small file open while it waits for an object server. Regression: the file kept
/// its memory after it was moved.
#[cfg(feature = "s3")]
#[test]
fn files_waiting_for_a_server_leave_needed_memory() {
    let Some(server) = surgetank_testkit::servers::s3::S3Server::start() else { return };
    let name = "memory_hog_server";
    let Some(mut scene) = prepare(name) else { return };
    let Some(group) = Group::new(name) else { return };
    let group = group.limited(LIMIT + 64 * MIB);
    let disk = scene.beside("tier-disk");
    scene.other_tier("disk", &disk, 500);
    fs::write("/mnt/hog.py", HOG).unwrap();
    let link = server.link(Some(4_000_000));
    let url = format!("s3://{}/project?endpoint={}", surgetank_testkit::servers::s3::BUCKET, link.endpoint());
    let options = ["--store", &url, "--quiet-period", "0s", "--dirty-bytes-max", "1G", "--no-preload"];
    let script = format!(
        "mkdir d; cd d; {FILL}
         sleep 1; /mnt/surgetank why --state /mnt/state part20 > /mnt/beside/why
         cd /mnt/beside; /usr/bin/python3 -I /mnt/hog.py 160"
    );
    let mut command = scene.run_command(&options, &script);
    command.envs(server.environment());
    group.holds(&mut command);
    let ended = Running::of(command).ends();
    assert_eq!(group.kills(), 0, "killed for lack of memory: {}", ended.stderr);
    ended.exits(0);
    let why = fs::read_to_string("/mnt/beside/why").unwrap();
    assert!(why.contains("ram"), "the file was not in memory, so the test proves nothing: {why}");
    let bytes = noise(11, 32 * MIB);
    for number in 1..=24 {
        let there = fs::read(server.files().join(format!("project/d/part{number}"))).unwrap();
        assert!(there == bytes[..4 << 20], "part{number}");
    }
    scene.leaves_nothing_on_the_tiers();
}

/// The agent is killed between any two steps of a move. No file is lost, and no temporary remains.
#[test]
fn agent_killed_while_moving_files_from_memory_loses_none() {
    for (point, disk) in [("copied", true), ("written_down", true), ("copied", false), ("written_down", false)] {
        let name = format!("memory_killed_{point}_{disk}");
        let crash = format!("memory_pressure.{point}:2");
        // (Each scene needs a thread of its own.)
        let ended =
            std::thread::spawn(move || needs_the_memory_and_is_killed(&name, disk, FILL, 24, Some(&crash))).join();
        assert!(ended.is_ok(), "{point} {disk}");
    }
}

/// The agent also moves open files that no program is writing. Regression: such files stayed in memory.
#[test]
fn open_files_leave_memory_that_a_program_needs() {
    let open = "exec 3>part1 4>part2 5>part3; for i in 3 4 5; do cat /mnt/source >&$i; done";
    a_program_needs_the_memory("memory_hog_open", true, open, 3);
}

/// The agent gives clean copies back at once when the limit is lowered.
#[test]
fn lowered_memory_limit_is_followed() {
    let Some(scene) = prepare("memory_lowered") else { return };
    let Some(group) = Group::new("memory_lowered") else { return };
    let group = group.limited(2 * LIMIT);
    let script = "for i in 1 2 3 4 5; do cp /mnt/source part$i; done
        /mnt/surgetank wait --state /mnt/state . ; touch /mnt/beside/written
        until [ -e /mnt/beside/lowered ]; do sleep 0.02; done
        cmp part1 /mnt/source; cp /mnt/source part6";
    let mut running = start(&scene, &group, &["--no-preload"], script);
    eventually("all files are written", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        Path::new("/mnt/beside/written").exists()
    });
    let held = tier_bytes(&scene);
    assert!(held >= 90 * MIB, "{held}: the test proves nothing");
    // In steps, because version 1 refuses a limit below the use: the kernel gives back its cache, and the agent the
    // margin.
    let target = LIMIT - 96 * MIB;
    eventually("the limit reaches its target", || {
        let used = group.used_bytes();
        let lower = target.max(used.saturating_sub(16 * MIB));
        let taken = group.try_limit(lower);
        if !taken {
            group.try_limit(used + MIB);
        }
        taken && lower == target
    });
    // The memory is free before the agent has updated its count.
    eventually("the tier is below the limit", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        tier_bytes(&scene) < target
    });
    fs::write("/mnt/beside/lowered", "").unwrap();
    running.ends().exits(0);
    assert_eq!(group.kills(), 0);
    holds_parts(&scene, 6);
}

fn tier_bytes(scene: &Scene) -> u64 {
    let status = scene.verb("status", &["--json"]).exits(0).json();
    status[0]["tiers"][0]["used_bytes"].as_u64().unwrap()
}
