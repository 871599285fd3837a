//! The table of docs/durability.md: failure × state, and what survives. Every cell names its tests here. This file
//! has the tests that belong to no other one.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::scene::{MIB, Running, Scene, eventually};

/// How the row begins, then the tests of each column: `file::function`.
const CELLS: &[(&str, [&[&str]; 4])] = &[
    ("a program", [DIES_ALONE, DIES_ALONE, DIES_ALONE, &["synced::wait_means_the_store_on_every_tier"]]),
    (
        "`surgetank run`",
        [
            &["durability::run_killed_keeps_its_files"],
            &["durability::run_killed_keeps_its_files"],
            &["durability::run_killed_keeps_its_files", "recovery::agent_outlives_its_run"],
            &["durability::run_killed_keeps_its_files"],
        ],
    ),
    (
        "the agent",
        [
            &[
                "handoff::open_files_survive_the_agent_through_the_mount",
                "handoff::open_files_survive_the_agent_with_the_shim",
            ],
            &[
                "handoff::twenty_agent_kills_lose_nothing_with_direct_files",
                "handoff::twenty_agent_kills_lose_nothing_with_mediated_files",
            ],
            &[
                "recovery::agent_killed_during_writes_loses_no_data",
                "handoff::agent_killed_at_each_critical_point_loses_nothing",
            ],
            &["handoff::files_only_in_the_store_keep_their_inode_numbers"],
        ],
    ),
    ("the agent and its supervisor", [AGENT_TOO, AGENT_TOO, AGENT_TOO, AGENT_TOO]),
    (
        "node rebooted, volatile",
        [
            &["durability::reboot_with_a_memory_tier_names_lost_files"],
            &[
                "durability::reboot_with_a_memory_tier_names_lost_files",
                "power::files_only_in_memory_are_named_after_a_reboot",
                "synced_copies::synced_content_survives_power_loss",
                "synced_copies::synced_content_survives_loss_of_the_tier",
            ],
            &["power::files_only_in_memory_are_named_after_a_reboot"],
            &["durability::reboot_with_a_memory_tier_names_lost_files"],
        ],
    ),
    (
        "node rebooted, persistent",
        [
            &["power::partial_file_is_kept_beside_its_name"],
            &[
                "power::synced_data_survives_power_loss_through_the_mount",
                "durability::reboot_with_undrained_files_drains_them",
            ],
            &["power::file_closed_long_ago_is_complete", "power::partial_file_is_kept_beside_its_name"],
            &["power::stored_file_is_not_read_from_an_unsynced_tier"],
        ],
    ),
    ("node lost permanently", [NODE_LOST, NODE_LOST, NODE_LOST, NODE_LOST]),
    ("node lost, tier `node`", [NODE_TIER, NODE_TIER, NODE_TIER, NODE_TIER]),
    ("the store's power", [&[], STORE_POWER, STORE_POWER, STORE_POWER]),
];
const DIES_ALONE: &[&str] = &["durability::program_killed_keeps_its_files"];
const AGENT_TOO: &[&str] = &["durability::agent_and_supervisor_killed_keep_the_files"];
const NODE_LOST: &[&str] =
    &["durability::lost_disk_leaves_files_synced_to_the_store", "power::lost_node_leaves_data_synced_to_the_store"];
const NODE_TIER: &[&str] = &["durability::another_node_continues_from_a_shared_tier"];
const STORE_POWER: &[&str] = &["durability::store_power_loss_keeps_durable_files"];

#[test]
fn every_cell_of_the_table_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("../../docs/durability.md")).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with("| failure of "));
    assert_eq!(lines.next().unwrap().matches('|').count(), 6);
    let rows: Vec<Vec<&str>> = lines
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), CELLS.len(), "rows of the table");
    for (row, (name, cells)) in rows.iter().zip(CELLS) {
        assert!(row[0].trim_matches('*').replace("**", "").starts_with(name), "{} is not {name}", row[0]);
        for (says, tests) in row[1..].iter().zip(cells) {
            assert_eq!(tests.is_empty(), *says == "–", "{name}: {says}");
            for test in *tests {
                let (file, function) = test.split_once("::").unwrap();
                let source = fs::read_to_string(root.join(format!("tests/{file}.rs"))).unwrap();
                let Some((above, _)) = source.split_once(&format!("\nfn {function}() {{")) else {
                    panic!("{test} does not exist");
                };
                let is_run =
                    above.lines().rev().take_while(|line| line.starts_with("#[")).any(|line| line == "#[test]");
                assert!(is_run, "{test} has no #[test]");
            }
        }
    }
}

/// Files in every state, each of one letter. Files that are closed after the fsyncs are not synced by them.
const PROGRAM: &str = "
import os, subprocess, sys, time
state, more = sys.argv[1], sys.argv[2:]
def put(name, text, sync=False):
    with open(name, 'wb', 0) as f:
        f.write(text)
        if sync: os.fsync(f.fileno())
put('durable', b'd' * 3000)
subprocess.run(['/mnt/surgetank', 'wait', '--state', state, 'durable'], check=True)
synced = open('synced', 'wb', 0); synced.write(b's' * 9000); os.fsync(synced.fileno())
for name in more: put(name, b'm' * 2000, sync=True)
held = open('open', 'wb', 0); held.write(b'o' * 5000)
put('sealed', b'c' * 7000)
put('old', b'after\\n')
open('/mnt/notes/there', 'w').close()
while not os.path.exists('/mnt/notes/go'): time.sleep(0.01)
held.write(b'o' * 1000)
";

fn letters(letter: u8, count: usize) -> Vec<u8> {
    vec![letter; count]
}

fn prepare(name: &str) -> Option<Scene> {
    let scene = Scene::new(name)?;
    scene.beside("notes");
    fs::write(scene.path("old"), "before\n").unwrap();
    fs::write("/mnt/program.py", PROGRAM).unwrap();
    Some(scene)
}

/// Returns when the program has all its files. `more`: files of 2,000 bytes that are synced.
fn begin(scene: &Scene, options: &[&str], more: &[&str]) -> Running {
    drop(fs::remove_file("/mnt/notes/there"));
    drop(fs::remove_file("/mnt/notes/go"));
    let script = format!("exec /usr/bin/python3 /mnt/program.py {} {}", scene.state.display(), more.join(" "));
    let mut running = scene.start(&[&["--quiet-period", "1h"], options].concat(), &script);
    eventually("the program has its files", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        Path::new("/mnt/notes/there").exists()
    });
    running
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let all = fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_file());
    all.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

fn expected(of: &[(&str, u8, usize)], old: &str) -> BTreeMap<String, Vec<u8>> {
    let mut all: BTreeMap<String, Vec<u8>> =
        of.iter().map(|(name, letter, count)| ((*name).to_owned(), letters(*letter, *count))).collect();
    all.insert("old".to_owned(), old.as_bytes().to_vec());
    all
}

#[track_caller]
fn same(is: BTreeMap<String, Vec<u8>>, should: BTreeMap<String, Vec<u8>>) {
    let short = |all: &BTreeMap<String, Vec<u8>>| -> Vec<String> {
        all.iter()
            .map(|(name, bytes)| format!("{name}: {} × {:?}", bytes.len(), bytes.first().map(|byte| *byte as char)))
            .collect()
    };
    assert!(is == should, "is     {:?}\nshould {:?}", short(&is), short(&should));
}

const DOORS: [(&str, &[&str]); 4] = [
    ("shim", &[]),
    ("mount", &["--no-preload"]),
    ("mediated", &["--no-preload", "--direct", "false"]),
    ("seccomp", &["--door", "seccomp"]),
];

/// Each scene has a thread of its own.
fn by_every_door(name: &'static str, case: fn(&mut Scene, &[&str])) {
    for (door, options) in DOORS {
        std::thread::spawn(move || {
            let Some(mut scene) = prepare(&format!("durability_{name}_{door}")) else { return };
            println!("door: {door}");
            case(&mut scene, options);
        })
        .join()
        .unwrap();
    }
}

const ALL: [(&str, u8, usize); 4] =
    [("durable", b'd', 3000), ("synced", b's', 9000), ("open", b'o', 5000), ("sealed", b'c', 7000)];

#[test]
fn program_killed_keeps_its_files() {
    by_every_door("program", |scene, door| {
        scene.tier("fast", 64);
        let script = format!(
            "/usr/bin/python3 /mnt/program.py {} & until test -e /mnt/notes/there; do sleep 0.01; done; kill -9 $!; ! wait $!",
            scene.state.display()
        );
        scene.run(&[&["--quiet-period", "1h"], door].concat(), &script).exits(0);
        same(files(&scene.over), expected(&ALL, "after\n"));
    });
}

#[test]
fn run_killed_keeps_its_files() {
    by_every_door("run", |scene, door| {
        // Where `run` itself takes part in every call, the program cannot continue without it.
        if door.contains(&"seccomp") {
            return;
        }
        scene.tier("fast", 64);
        let running = begin(scene, door, &[]);
        // (Kills only `run`: its command leads no group of its own.)
        crate::scene::succeed(std::process::Command::new("kill").args(["-9", &running.pid().to_string()]));
        fs::write("/mnt/notes/go", "").unwrap();
        scene.await_no_agent();
        drop(running);
        let mut all = expected(&ALL, "after\n");
        all.insert("open".to_owned(), letters(b'o', 6000));
        same(files(&scene.over), all);
    });
}

#[test]
fn agent_and_supervisor_killed_keep_the_files() {
    by_every_door("agents", |scene, door| {
        scene.tier("fast", 64);
        let running = begin(scene, door, &[]);
        // (A run whose agent has died starts another.)
        running.halt();
        scene.kill_agent();
        running.kill();
        drop(running);
        scene.run(&[], "true").exits(0);
        same(files(&scene.over), expected(&ALL, "after\n"));
    });
}

/// Two kinds of files are only in memory: those that rules keep from the store, and synced files where `fsync` means
/// the tier.
#[test]
fn reboot_with_a_memory_tier_names_lost_files() {
    for (case, fsync, stored) in [("auto", "auto", true), ("store", "store", true), ("tier", "tier", false)] {
        std::thread::spawn(move || {
            let Some(mut scene) = prepare(&format!("durability_memory_{case}")) else { return };
            scene.tier("ram", 64);
            let rules = ["--rule", "kept=keep", "--rule", "scratch=remove", "--fsync", fsync];
            let running = begin(&scene, &rules, &["kept", "scratch"]);
            scene.machine_dies("/mnt/tier-ram".as_ref());
            drop(running);
            scene.tmpfs("tier-ram", 65);
            let ended = scene.run(&rules, "test ! -e kept && test ! -e scratch").exits(3);
            ended.says(&[
                "old: its newest version is gone from the tier",
                "sealed: it is gone from the tier",
                "kept: it is gone",
            ]);
            let there: &[_] = if stored { &ALL[..2] } else { &ALL[..1] };
            same(files(&scene.over), expected(there, "before\n"));
        })
        .join()
        .unwrap();
    }
}

const ON_DISK: [&str; 2] = ["--tier", "disk=/mnt/disk:200M"];

#[test]
fn reboot_with_undrained_files_drains_them() {
    for journal_too in [false, true] {
        std::thread::spawn(move || {
            let Some(mut scene) = prepare(&format!("durability_kept_{journal_too}")) else { return };
            scene.ext4("disk", 512);
            scene.state = "/mnt/disk/state".into();
            let rules = [&ON_DISK[..], &["--rule", "kept=keep", "--rule", "scratch=remove"]].concat();
            let running = begin(&scene, &rules, &["kept", "scratch"]);
            scene.power_fails("disk", journal_too);
            drop(running);
            scene
                .run(&rules, "cat kept scratch | tr -d m | wc -c; wc -c <kept; wc -c <scratch")
                .exits(3)
                .prints("0\n2000\n2000\n");
        })
        .join()
        .unwrap();
    }
}

#[test]
fn lost_disk_leaves_files_synced_to_the_store() {
    let Some(mut scene) = prepare("durability_disk_lost") else { return };
    scene.ext4("disk", 512);
    scene.state = "/mnt/disk/state".into();
    let running = begin(&scene, &[&ON_DISK[..], &["--fsync", "store"]].concat(), &[]);
    scene.machine_dies("/mnt/disk".as_ref());
    drop(running);
    same(files(&scene.over), expected(&ALL[..2], "before\n"));
}

/// Tier and state are on storage that other nodes see. Data that the dead node did not sync there is lost.
#[test]
fn another_node_continues_from_a_shared_tier() {
    for journal_too in [false, true] {
        std::thread::spawn(move || {
            let Some(mut scene) = prepare(&format!("durability_shared_{journal_too}")) else { return };
            scene.ext4("disk", 512);
            scene.state = "/mnt/disk/state".into();
            let config = "[[tiers]]\nname = \"shared\"\npath = \"/mnt/disk\"\nsize = \"200M\"\nsurvives = \"node\"\n";
            fs::write("/mnt/conf.toml", config).unwrap();
            let options = ["--config", "/mnt/conf.toml"];
            let running = begin(&scene, &options, &[]);
            scene.power_fails("disk", journal_too);
            drop(running);
            scene.run(&options, "true").exits(3);
            let mut there = files(&scene.over);
            there.retain(|name, _| !name.contains(".surgetank-unproven-"));
            same(there, expected(&ALL[..2], "before\n"));
        })
        .join()
        .unwrap();
    }
}

/// Files reported as durable, and files that `fsync` put into the store, are on the store's disk.
#[test]
fn store_power_loss_keeps_durable_files() {
    for journal_too in [false, true] {
        std::thread::spawn(move || {
            let Some(mut scene) = prepare(&format!("durability_store_power_{journal_too}")) else { return };
            scene.tier("fast", 64);
            let disk = scene.ext4("store", 512);
            let data = disk.join("data");
            fs::create_dir(&data).unwrap();
            fs::rename(scene.path("old"), "/mnt/old").unwrap();
            fs::copy("/mnt/old", data.join("old")).unwrap();
            crate::scene::succeed(&mut std::process::Command::new("sync"));
            let options = ["--store", data.to_str().unwrap(), "--fsync", "store"];
            let running = begin(&scene, &options, &[]);
            scene.power_fails("store", journal_too);
            drop(running);
            let mut there = files(&data);
            there.retain(|name, _| !name.starts_with(".surgetank-"));
            same(there, expected(&ALL[..2], "before\n"));
        })
        .join()
        .unwrap();
    }
}

/// A spilled file, and a file that is written in place: the store outlives the node.
#[test]
fn spilled_and_in_place_files_survive_kills() {
    let Some(mut scene) = prepare("durability_spilled") else { return };
    scene.tier("fast", 8);
    let large = letters(b'l', 20 * MIB as usize);
    fs::write(scene.path("large"), &large).unwrap();
    fs::write("/mnt/conf.toml", "copy_up_bytes_max = \"1M\"\n").unwrap();
    let program = "
import os, time
spilled = open('spilled', 'wb', 0)
for _ in range(20): spilled.write(b'p' * (1 << 20))
os.fsync(spilled.fileno())
place = os.open('large', os.O_RDWR)
os.pwrite(place, b'X' * 4096, 1 << 20)
os.fsync(place)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    fs::write("/mnt/program.py", program).unwrap();
    let options = ["--config", "/mnt/conf.toml", "--fsync", "tier"];
    let running = begin(&scene, &options, &[]);
    scene.machine_dies("/mnt/tier-fast".as_ref());
    drop(running);
    scene.tmpfs("tier-fast", 9);
    let mut written = large;
    written[MIB as usize..][..4096].fill(b'X');
    scene.holds("large", &written);
    drop(scene.run(&options, "true"));
    scene.holds("spilled", &letters(b'p', 20 * MIB as usize));
    scene.holds("large", &written);
}
