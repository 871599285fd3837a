//! Files that must be drained to one store go to no other one. Every command that is printed about them can be run
//! unchanged.
//!
//! The paths have blanks, quotes and a `$` in them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::scene::{Ended, Scene, eventually, files_below, mount, succeed};

const OVER: &str = "/mnt/it's a \"project\"";
const STORE: &str = "/mnt/the $store";
const TIER: &str = "tier 'a' b";
const BYTES: u64 = 6 << 20;
const WRITE: &str = "head -c 6M /dev/zero >big; echo small >small";
/// A short time limit for a store that refuses all files.
const SOON: [&str; 2] = ["--retry", "500ms"];

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.over = PathBuf::from(OVER);
    scene.state = PathBuf::from("/mnt/the state");
    fs::create_dir(OVER).unwrap();
    let tier = scene.tmpfs(TIER, 65);
    scene.other_tier("fast", &tier, 64);
    Some(scene)
}

/// The scene has a store of its own that is too small.
fn prepare_full(name: &str) -> Option<Scene> {
    let scene = prepare(name)?;
    scene.tmpfs("the $store", 4);
    Some(scene)
}

fn give_room() {
    mount(&["-o", "remount,size=64m", STORE]);
}

fn fails(scene: &Scene) -> Ended {
    let ended = scene.run(&[&["--store", STORE], &SOON[..]].concat(), WRITE).exits(3);
    give_room();
    ended
}

#[track_caller]
fn is_all_in(store: &str) {
    assert_eq!(files_below(Path::new(store)), [("big".into(), BYTES), ("small".into(), 6)].into());
    if store != OVER {
        assert_eq!(files_below(Path::new(OVER)).len(), 0, "something is in another store");
    }
}

fn verb(scene: &Scene, verb: &str, words: &[&str]) -> Ended {
    scene.verb(verb, &[&["--tier", "fast=/mnt/tier 'a' b:64M"], words].concat())
}

/// Regression: after a run with a full `--store` the printed command had no `--store`, and put the files into the
/// directory itself.
#[test]
fn printed_run_brings_leftovers_to_their_store() {
    let Some(scene) = prepare_full("owed_run") else { return };
    let line = fails(&scene).printed("run");
    scene.as_printed(&line).exits(0);
    is_all_in(STORE);
    // After the drain the directory may get another store.
    scene.run(&[], "cat small 2>/dev/null || echo fresh >small").exits(0).prints("");
    assert_eq!(fs::read_to_string(scene.path("small")).unwrap(), "fresh\n");
}

#[test]
fn printed_commands_of_wait_and_scavenge_name_the_store() {
    let Some(scene) = prepare_full("owed_wait") else { return };
    fails(&scene);
    let waited = scene.verb("wait", &[OVER]).exits(3);
    assert_eq!(waited.all_printed().len(), 1, "{}", waited.stderr);
    let found: Value = serde_json::from_str(&scene.verb("wait", &["--json", OVER]).exits(3).stdout).unwrap();
    assert_eq!((&found["durable"], &found["why"]), (&Value::Bool(false), &Value::Null));
    assert!(found["verdict"]["not_durable"]["total"].as_u64() > Some(0), "{found}");
    scene.as_printed(&waited.printed("run")).exits(0);
    is_all_in(STORE);
    scene.verb("wait", &[OVER]).exits(0);
}

/// Regression: each of these commands put the files into the directory itself, or reported that no file was left.
#[test]
fn commands_for_another_store_refuse_and_name_the_right_one() {
    let Some(scene) = prepare_full("owed_refused") else { return };
    fails(&scene);
    let elsewhere = scene.beside("elsewhere");
    let left = files_below(&Path::new("/mnt").join(TIER));
    let mut printed = Vec::new();
    for other in [&[][..], &["--store", elsewhere.to_str().unwrap()]] {
        for words in [&["fsck"][..], &["fsck", "--repair"], &["scavenge"]] {
            let refused = verb(&scene, words[0], &[&words[1..], other, &[OVER]].concat()).exits(2);
            printed.push(refused.says(&[STORE, "2 file(s)", "nothing was changed"]).printed("run"));
        }
        printed.push(scene.run(other, "echo other >other").exits(2).says(&[STORE, "another store"]).printed("run"));
        printed.push(verb(&scene, "mount", &[other, &[OVER]].concat()).exits(2).says(&[STORE]).printed("run"));
    }
    // The same with a variable.
    let mut command = scene.run_command(&[], "echo other >other");
    command.env("SURGETANK_STORE", &elsewhere);
    printed.push(crate::scene::Running::of(command).ends().exits(2).says(&[STORE]).printed("run"));
    assert_eq!(files_below(&Path::new("/mnt").join(TIER)), left);
    assert!(files_below(&elsewhere).is_empty() && files_below(Path::new(OVER)).is_empty());
    printed.dedup();
    assert_eq!(printed.len(), 1, "{printed:#?}");
    scene.as_printed(&printed[0]).exits(0);
    is_all_in(STORE);
}

#[test]
fn joining_run_for_another_store_is_refused() {
    let Some(scene) = prepare("owed_joining") else { return };
    scene.beside("the $store");
    let elsewhere = scene.beside("elsewhere");
    let begun = "echo one >one; touch /mnt/there; until [ -e /mnt/go ]; do sleep 0.02; done";
    let running = scene.start(&["--store", STORE], begun);
    eventually("the command runs", || Path::new("/mnt/there").exists());
    let mut lines = Vec::new();
    for other in [&[][..], &["--store", OVER], &["--store", elsewhere.to_str().unwrap()]] {
        let refused = scene.run(other, "echo two >two").exits(2).says(&["is served already", STORE]);
        lines.push(refused.printed("wait"));
        verb(&scene, "fsck", &[other, &[OVER]].concat()).exits(2).says(&["is served already", STORE]);
    }
    // The same store, and a nested run that names no store.
    scene.run(&["--store", STORE], "echo two >two").exits(0);
    let nested = "/mnt/surgetank run --state '/mnt/the state' -- sh -c 'echo three >three'";
    scene.run(&["--store", STORE], nested).exits(0);
    let mounted = scene.verb("scavenge", &["--store", STORE, OVER]).exits(1);
    lines.push(mounted.printed("wait"));
    lines.dedup();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    scene.as_printed(&lines[0]).exits(0);
    fs::write("/mnt/go", "").unwrap();
    running.ends().exits(0);
    let there: Vec<_> = files_below(Path::new(STORE)).into_keys().collect();
    assert_eq!(there, ["one", "three", "two"].map(PathBuf::from));
    assert!(files_below(Path::new(OVER)).is_empty() && files_below(&elsewhere).is_empty());
}

/// The store's file system is not mounted, so its path is the bare mount point.
#[test]
fn other_directory_at_the_path_of_the_store_is_refused() {
    let Some(scene) = prepare("owed_unmounted") else { return };
    scene.ext4("store", 32);
    fs::write("/mnt/store/ballast", vec![0; 24 << 20]).unwrap();
    let store = ["--store", "/mnt/store"];
    scene.run(&[&store[..], &SOON].concat(), "head -c 12M /dev/zero >big").exits(3);
    succeed(std::process::Command::new("umount").arg("/mnt/store"));
    let refused = scene.run(&store, "true").exits(2).says(&["another directory is at this path now"]);
    assert!(files_below(Path::new("/mnt/store")).is_empty());
    // For a store that does not come back.
    scene.as_printed(&refused.printed("scavenge")).exits(0);
    assert_eq!(files_below(Path::new("/mnt/rescued")), [("big".into(), 12 << 20)].into());
    // The store comes back, perhaps with another device number.
    scene.ext4_again("store");
    fs::remove_file("/mnt/store/ballast").unwrap();
    scene.as_printed(&refused.printed("run")).exits(0);
    assert_eq!(files_below(Path::new("/mnt/store")), [("big".into(), 12 << 20)].into());
}

#[test]
fn printed_commands_of_a_mount_are_complete() {
    let Some(scene) = prepare("owed_mount") else { return };
    scene.beside("the $store");
    let detached = scene.run(&["--store", STORE, "--detach-drain"], "true").exits(2);
    scene.await_no_agent();
    let mounted = scene.as_printed(&detached.printed("mount")).exits(0);
    fs::write(scene.path("big"), vec![0; BYTES as usize]).unwrap();
    fs::write(scene.path("small"), "small\n").unwrap();
    let again = verb(&scene, "mount", &["--store", STORE, OVER]).exits(1).printed("umount");
    assert_eq!(again, mounted.printed("umount"));
    scene.as_printed(&again).exits(0);
    is_all_in(STORE);
}

#[test]
fn printed_commands_over_a_dead_mount_are_complete() {
    let Some(scene) = prepare("owed_dead_mount") else { return };
    scene.beside("the $store");
    verb(&scene, "mount", &["--store", STORE, "--quiet-period", "1h", OVER]).exits(0);
    fs::write(scene.path("big"), vec![0; BYTES as usize]).unwrap();
    fs::write(scene.path("small"), "small\n").unwrap();
    scene.kill_agent();
    eventually("the mount is dead", || fs::metadata(OVER).is_err());
    let mut at_root = scene.surgetank(&["status", "--state", "/mnt/the state", OVER]);
    at_root.current_dir("/");
    let asked = crate::scene::Running::of(at_root).ends().exits(1);
    let umounted = scene.as_printed(&asked.printed("umount")).exits(3);
    scene.as_printed(&umounted.printed("run")).exits(0);
    is_all_in(STORE);
}

#[test]
fn printed_commands_that_only_ask_are_complete() {
    let Some(scene) = prepare("owed_asking") else { return };
    scene.run(&[], "echo small >small").exits(0);
    let unserved = scene.verb("status", &["."]).exits(1);
    scene.as_printed(&unserved.printed("status")).exits(0).prints("no agent of yours is running\n");
    let unknown = scene.verb("report", &["nothing"]).exits(2);
    let listed = scene.as_printed(&unknown.printed("report")).exits(0).stdout;
    assert!(listed.contains("echo small"), "{listed}");
}

/// Regression: the key was a hash of the host's name, the user and the state's path. One of two clones removed the
/// other one's incomplete copies.
#[test]
fn instance_leaves_the_copies_of_its_clone_alone() {
    let Some(scene) = super::prepare("clones") else { return };
    let key = || {
        let places = fs::read_dir(&scene.state).unwrap().flatten();
        let text =
            places.filter_map(|place| fs::read_to_string(place.path().join("identity.json")).ok()).next().unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["key"].as_str().unwrap().to_owned()
    };
    scene.run(&[], "true").exits(0);
    let clones = key();
    // The other machine has the same directory at the same paths, and a state of its own.
    fs::rename(&scene.state, "/mnt/state-of-the-clone").unwrap();
    super::killed(
        &scene,
        &["--quiet-period", "0s"],
        "echo content >file; /mnt/surgetank wait --state /mnt/state .; exec 3>open",
    );
    assert_ne!(key(), clones);
    let [its, ours] = [&clones, &key()].map(|key| scene.path(&format!(".surgetank-tmp-{key}-77")));
    fs::write(&its, "half").unwrap();
    fs::write(&ours, "half").unwrap();
    let found = super::found(&super::verb(&scene, &["fsck", "--json"]).exits(0).json());
    let leftover = ours.file_name().unwrap().to_str().unwrap();
    assert_eq!(found, super::pairs(&[("leftover", leftover)]));
    scene.run(&[], "true").exits(0);
    assert!(its.exists());
}
