//! Every command names lost files and exits with 3, until the user acknowledges them. A copy is examined before it is
//! reported as safe.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

use super::{QUIET, killed, plain, prepare, verb};
use crate::scene::server::{Server, faults};
use crate::scene::{Ended, Scene, eventually, succeed};

const STATE: [&str; 2] = ["--state", "/mnt/state"];

/// Removes everything below; the directory stays.
fn empty(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            fs::remove_dir_all(entry.path()).unwrap();
        } else {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

fn wait(scene: &Scene) -> Ended {
    scene.bare_verb("wait", &[&STATE[..], &["/mnt/project"]].concat())
}

/// Each command that examines remaining files, with its name.
fn all(scene: &Scene) -> Vec<(&'static str, Ended)> {
    vec![
        ("wait", wait(scene)),
        ("fsck", verb(scene, &["fsck"])),
        ("scavenge --list", verb(scene, &["scavenge", "--list"])),
        ("scavenge", verb(scene, &["scavenge"])),
        ("fsck --repair", verb(scene, &["fsck", "--repair"])),
        ("run", scene.run(&QUIET, "true")),
    ]
}

fn printed(ended: &Ended) -> String {
    format!("{}{}", ended.stdout, ended.stderr)
}

#[track_caller]
fn each_names(scene: &Scene, when: &str, names: &[&str]) {
    for (command, ended) in all(scene) {
        let printed = printed(&ended);
        assert_eq!(ended.status.code(), Some(3), "{command} {when}: {printed}");
        for name in names {
            assert!(printed.contains(name), "{command} {when} does not name {name}: {printed}");
        }
        assert!(!printed.contains("safe at"), "{command} {when}: {printed}");
    }
}

#[track_caller]
fn each_is_content(scene: &Scene, when: &str) {
    for (command, ended) in all(scene) {
        assert_eq!(ended.status.code(), Some(0), "{command} {when}: {}", printed(&ended));
    }
}

/// Regression: the first command that took up an agent's remaining files reported the losses, and the next ones
/// exited with 0 and no message. `fsck` reported nothing for a tier that was emptied completely.
#[test]
fn lost_files_are_named_until_acknowledged() {
    for (name, wipe) in [("wiped", true), ("partial", false)] {
        std::thread::spawn(move || lost(name, wipe)).join().unwrap();
    }
}

fn lost(name: &str, whole_tier: bool) {
    let Some(scene) = prepare(&format!("lost_{name}")) else { return };
    scene.run(&[], "mkdir d; echo the version before >d/old").exits(0);
    killed(&scene, &[], "echo newer >d/old; echo content >d/new; echo scratch >other");
    let names = ["d/old", "d/new"];
    if whole_tier {
        empty(Path::new("/mnt/tier-fast"));
    } else {
        names.iter().for_each(|name| fs::remove_file(plain(&scene, name)).unwrap());
    }
    let lost = if whole_tier { 3 } else { 2 };
    let status = || scene.bare_verb("status", &STATE).exits(0).stdout;
    assert!(status().contains(&format!("/mnt/project  (no agent): {lost} files are lost")), "{}", status());
    each_names(&scene, "at first", &names);
    assert!(status().contains(&format!("/mnt/project  (no agent): {lost} files are lost")), "{}", status());
    each_names(&scene, "again", &names);
    let ended =
        scene.run(&QUIET, "/mnt/surgetank status --state /mnt/state; code=0; /mnt/surgetank wait --state /mnt/state || code=$?; echo $code");
    assert!(
        ended.stdout.contains("LOST: ") && ended.stdout.contains("d/new: ") && ended.stdout.ends_with("3\n"),
        "{}",
        ended.stdout
    );
    // A new file of that name does not hide the loss.
    scene.run(&[], "echo another >d/new").exits(3).says(&["d/new: it is gone from the tier fast"]);
    assert_eq!(fs::read_to_string(scene.path("d/old")).unwrap(), "the version before\n");
    let forgotten = verb(&scene, &["scavenge", "--forget"]).exits(0);
    for name in names {
        assert!(forgotten.stderr.contains(&format!("forgotten: {name}: ")), "{}", forgotten.stderr);
    }
    each_is_content(&scene, "when they are acknowledged");
    assert_eq!(status(), "no agent of yours is running\n");
    assert_eq!(fs::read_to_string(scene.path("d/new")).unwrap(), "another\n");
    assert!(whole_tier || fs::read_to_string(scene.path("other")).unwrap() == "scratch\n");
}

/// A running agent takes the acknowledgement, too: a mount need not end for it.
#[test]
fn lost_files_can_be_acknowledged_in_a_run() {
    let Some(scene) = prepare("lost_in_a_run") else { return };
    killed(&scene, &[], "echo content >new");
    empty(Path::new("/mnt/tier-fast"));
    let script = "
        code=0; /mnt/surgetank fsck --state /mnt/state || code=$?; echo $code
        /mnt/surgetank scavenge --state /mnt/state --forget; echo $?
        /mnt/surgetank fsck --state /mnt/state >/mnt/notes/after; echo $?";
    let ended = scene.run(&QUIET, script).exits(0);
    let codes: Vec<&str> = ended.stdout.lines().filter(|line| line.len() == 1).collect();
    assert_eq!(codes, ["3", "0", "0"], "{}{}", ended.stdout, ended.stderr);
    wait(&scene).exits(0);
}

/// The state of the tier's path after the fault.
#[derive(Clone, Copy)]
enum Fault {
    Unmounted,
    Replaced,
    Missing,
}

/// Three regressions with a missing tier. Its finding named no files, and `scavenge --list` did not mention it. The
/// verdict reported its files as safe on it.
#[test]
fn files_on_an_absent_tier_are_named_and_come_back() {
    for fault in [Fault::Unmounted, Fault::Replaced, Fault::Missing] {
        for comes_back in [true, false] {
            std::thread::spawn(move || absent(fault, comes_back)).join().unwrap();
        }
    }
}

fn absent(fault: Fault, comes_back: bool) {
    let Some(mut scene) = Scene::new("absent_tier") else { return };
    scene.beside("notes");
    let mounted = scene.ext4("tier-fast", 64);
    let below = mounted.join("below");
    fs::create_dir(&below).unwrap();
    let tier = if matches!(fault, Fault::Unmounted) { mounted.clone() } else { below };
    scene.other_tier("fast", &tier, 32);
    killed(&scene, &[], "mkdir d; echo content >d/new");
    let aside: PathBuf = mounted.join("aside");
    match fault {
        Fault::Unmounted => rustix::mount::unmount(&mounted, rustix::mount::UnmountFlags::empty()).unwrap(),
        Fault::Replaced => {
            fs::rename(&tier, &aside).unwrap();
            fs::create_dir(&tier).unwrap();
        }
        Fault::Missing => fs::rename(&tier, &aside).unwrap(),
    }
    let spec = format!("fast={}:32M", tier.display());
    let verb = |words: &[&str]| {
        let here = [&STATE[..], &["--over", "/mnt/project", "--tier", &spec]].concat();
        scene.bare_verb(words[0], &[&here[..], &words[1..]].concat())
    };
    // (The commands need the tier's directory, and the test has not made it yet.)
    let missing = matches!(fault, Fault::Missing);
    for _ in 0..2 {
        wait(&scene).exits(3).says(&["d/new"]);
        if missing {
            continue;
        }
        for words in [&["fsck"][..], &["scavenge", "--list"], &["scavenge"], &["fsck", "--repair"]] {
            let ended = verb(words).exits(3);
            let printed = printed(&ended);
            assert!(printed.contains("d/new") && !printed.contains("safe at"), "{words:?}: {printed}");
        }
    }
    if comes_back {
        match fault {
            Fault::Unmounted => drop(scene.ext4_again("tier-fast")),
            Fault::Replaced | Fault::Missing => {
                drop(fs::remove_dir_all(&tier));
                fs::rename(&aside, &tier).unwrap();
            }
        }
        verb(&["scavenge"]).exits(0);
        assert_eq!(fs::read_to_string(scene.path("d/new")).unwrap(), "content\n");
    } else {
        fs::create_dir_all(&tier).unwrap();
        verb(&["scavenge", "--forget"]).exits(0).says(&["d/new"]);
    }
    verb(&["fsck"]).exits(0);
    wait(&scene).exits(0);
}

/// Regression: after the loss of the state directory `fsck` reported no finding, and `scavenge --list` listed files
/// and exited with 0.
#[test]
fn files_without_a_state_are_named_by_fsck_and_the_list() {
    let Some(scene) = prepare("no_state") else { return };
    killed(&scene, &[], "mkdir d; echo one >d/one");
    fs::remove_dir_all(&scene.state).unwrap();
    for words in [&["fsck"][..], &["scavenge", "--list"], &["scavenge"]] {
        let ended = verb(&scene, words).exits(3);
        assert!(printed(&ended).contains("d/one"), "{words:?}: {}", printed(&ended));
    }
}

/// The state directory is restored from an earlier copy. Regression: the agent set newer files aside on the tier, and
/// `run` and `scavenge` exited with 0 and no message.
#[test]
fn files_newer_than_the_state_are_named() {
    for by in ["run", "scavenge"] {
        std::thread::spawn(move || older_state(by)).join().unwrap();
    }
}

fn older_state(by: &str) {
    let Some(scene) = prepare(&format!("older_state_{by}")) else { return };
    killed(&scene, &[], "echo first >first");
    let copy = Path::new("/mnt/notes/state");
    let copied = |from: &Path, to: &Path| succeed(Command::new("cp").arg("-a").arg(from).arg(to));
    copied(&scene.state, copy);
    killed(&scene, &[], "mkdir d; echo second >d/second");
    fs::remove_dir_all(&scene.state).unwrap();
    copied(copy, &scene.state);
    let named = |ended: Ended| {
        let printed = printed(&ended.exits(3));
        assert!(printed.contains("d/second") && !printed.contains("safe at"), "{printed}");
    };
    named(verb(&scene, &["fsck"]));
    named(verb(&scene, &["scavenge", "--list"]));
    named(if by == "run" { scene.run(&QUIET, "true") } else { verb(&scene, &["scavenge"]) });
    named(verb(&scene, &["fsck"]));
    named(verb(&scene, &["scavenge", "--list"]));
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/d/second")).unwrap(), "second\n");
}

#[track_caller]
fn is_of_the_tier(ended: &Ended) {
    for of_the_store in ["safe at", "refused it", "the store failed"] {
        assert!(!ended.stderr.contains(of_the_store), "{}", ended.stderr);
    }
}

/// Regression: the drain reported a missing plain file as a failure of the store, retried until `--retry` ended, and
/// reported the file as safe.
#[test]
fn verdict_names_the_tier_that_lost_the_plain_file() {
    let Some(scene) = prepare("gone_alive") else { return };
    let script = "echo content >a; exec 3>b; echo more >&3; exec 3>&-; touch /mnt/notes/there; until test -e /mnt/notes/go; do sleep 0.01; done";
    for order in [&[][..], &["--unordered"]] {
        let _ = fs::remove_file("/mnt/notes/there");
        let _ = fs::remove_file("/mnt/notes/go");
        let running = scene.start(&[&QUIET[..], &["--retry", "1h"], order].concat(), script);
        eventually("the command runs", || fs::exists("/mnt/notes/there").unwrap());
        empty(Path::new("/mnt/tier-fast"));
        fs::write("/mnt/notes/go", "").unwrap();
        let ended = running.ends().exits(3).says(&["a: its plain file is gone from the tier fast (/mnt/tier-fast)"]);
        is_of_the_tier(&ended);
        wait(&scene).exits(3).says(&["lost: 2", "a: it is gone from the tier fast"]);
        verb(&scene, &["scavenge", "--forget"]).exits(0);
    }
}

/// Regression: an error of a tier was reported as a store that refused the file.
#[test]
fn verdict_names_the_tier_that_cannot_be_read() {
    let Some(mut scene) = Scene::new("unreadable_tier") else { return };
    scene.beside("notes");
    scene.beside("behind");
    let tier = scene.beside("tier-served");
    faults("");
    let _server = Server::start(&tier, &[]);
    scene.other_tier("fast", &tier, 32);
    let script = "echo content >a; touch /mnt/notes/there; until test -e /mnt/notes/go; do sleep 0.01; done";
    let running = scene.start(&[&QUIET[..], &["--retry", "1s", "--no-preload"]].concat(), script);
    eventually("the command runs", || fs::exists("/mnt/notes/there").unwrap());
    faults("read EIO 1000000");
    fs::write("/mnt/notes/go", "").unwrap();
    let ended = running.ends().exits(3).says(&["a: the tier fast (/mnt/tier-served) cannot be read"]);
    is_of_the_tier(&ended);
    faults("");
    scene.run(&[], "cat a").exits(0).prints("content\n");
}

/// Regression: `wait` printed the agent's note from its end, although the tier had been emptied since.
#[test]
fn wait_checks_a_copy_before_it_reports_it_safe() {
    let Some(scene) = prepare("safe_at") else { return };
    let full = scene.tmpfs("full", 1);
    let options = ["--store", full.to_str().unwrap(), "--retry", "1s"];
    let safe = "safe at /mnt/tier-fast";
    scene.run(&options, "head -c 3M /dev/zero >big; head -c 3M /dev/zero >other").exits(3).says(&["big", safe]);
    wait(&scene).exits(3).says(&["not durable: 2", "big", safe]);
    let other = fs::File::options().write(true).open(plain(&scene, "other")).unwrap();
    other.set_len(1 << 20).unwrap();
    let ended = wait(&scene).exits(3).says(&["not durable: 2", "other: 1048576 bytes, and 3145728 when it was closed"]);
    assert!(!ended.stderr.contains("closed; safe at"), "{}", ended.stderr);
    other.set_len(3 << 20).unwrap();
    fs::remove_file(plain(&scene, "big")).unwrap();
    wait(&scene).exits(3).says(&["not durable: 1", "lost: 1", "big: it is gone from the tier fast", "other", safe]);
    empty(Path::new("/mnt/tier-fast"));
    let ended = wait(&scene).exits(3).says(&["lost: 2", "other: it is gone from the tier fast"]);
    assert!(!ended.stderr.contains("safe at"), "{}", ended.stderr);
}

/// Regression: if another process held a lock, `wait` assumed that no agent had been killed, and exited with 0.
#[test]
fn wait_gives_no_answer_while_the_place_is_held() {
    let Some(scene) = prepare("held") else { return };
    killed(&scene, &[], "echo content >new");
    for name in ["agent.lock", "start.lock"] {
        let mut places = fs::read_dir(&scene.state).unwrap().flatten().map(|entry| entry.path());
        let lock = places.find_map(|place| fs::File::open(place.join(name)).ok()).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        wait(&scene).exits(3).says(&["/mnt/project is in the store is not known", "another process holds", "fuser "]);
    }
    wait(&scene).exits(3).says(&["the agent of /mnt/project was killed"]);
}

/// Regression: bytes that a rule keeps out of the store, and copies of stored files, counted as at risk.
#[test]
fn only_bytes_meant_for_the_store_are_at_risk() {
    let Some(scene) = prepare("at_risk") else { return };
    let rules = ["--rule", "*.keep=keep", "--rule", "*.tmp=remove", "--json", "/mnt/notes/report"];
    let status = "/mnt/surgetank status --json --state /mnt/state /mnt/project";
    let write = |name: &str, mib: u32| format!("head -c {mib}M /dev/zero >{name}");
    let script = format!(
        "{}; {}; {status} >/mnt/notes/before; {}; {status} >/mnt/notes/during; /mnt/surgetank wait --state /mnt/state .; {status} >/mnt/notes/after",
        write("big.keep", 20),
        write("big.tmp", 8),
        write("data", 5)
    );
    let ended = scene.run(&[&QUIET[..], &rules].concat(), &script).exits(0);
    assert!(!ended.stderr.contains("at risk"), "{}", ended.stderr);
    let json = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(Path::new("/mnt/notes").join(name)).unwrap()).unwrap()
    };
    let at_risk = |name: &str| {
        let status = &json(name)[0];
        (status["at_risk_node_bytes"].as_u64().unwrap(), status["at_risk_reboot_bytes"].as_u64().unwrap())
    };
    assert_eq!(at_risk("before"), (0, 0));
    assert_eq!(at_risk("during"), (5 << 20, 5 << 20));
    assert_eq!(at_risk("after"), (0, 0));
    assert_eq!(json("report")["summary"]["at_risk_node_bytes"], 0);
}
