//! `surgetank fsck` and `surgetank scavenge`: what they find after a fault, what they repair, and what they leave.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod kept;
mod lost;
mod owed;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::scene::{Scene, eventually};
use serde_json::Value;
use surgetank_core::catalog::decode;
use surgetank_types::model::{Change, Kind};

const QUIET: [&str; 2] = ["--quiet-period", "1h"];

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 64);
    scene.beside("notes");
    Some(scene)
}

/// Runs the script until it is ready (`touch /mnt/notes/there`), and kills agent and command.
fn killed(scene: &Scene, options: &[&str], script: &str) {
    let _ = fs::remove_file("/mnt/notes/there");
    let quiet: &[&str] = if options.contains(&QUIET[0]) { &[] } else { &QUIET };
    let running = scene.start(&[quiet, options].concat(), &format!("{script}\ntouch /mnt/notes/there\nsleep 100"));
    eventually("the command runs", || fs::exists("/mnt/notes/there").unwrap());
    // An agent whose run has ended drains; a run whose agent has died starts another.
    running.halt();
    scene.kill_agent();
    running.kill();
    drop(running);
    eventually("all agents have ended", || scene.agent().is_none());
}

/// The verb, with the scene's tiers and directory.
fn verb(scene: &Scene, words: &[&str]) -> crate::scene::Ended {
    let tier = "fast=/mnt/tier-fast:64M";
    let mut all =
        vec!["--state", scene.state.to_str().unwrap(), "--over", scene.over.to_str().unwrap(), "--tier", tier];
    all.extend(&words[1..]);
    scene.bare_verb(words[0], &all)
}

fn plain(scene: &Scene, name: &str) -> PathBuf {
    fn find(dir: &Path, name: &Path) -> Option<PathBuf> {
        fs::read_dir(dir).unwrap().flatten().find_map(|entry| {
            let path = entry.path();
            let is_files = path.file_name().unwrap().as_encoded_bytes().starts_with(b"surgetank-");
            let here = is_files.then(|| path.join(name)).filter(|path| path.exists());
            here.or_else(|| path.is_dir().then(|| find(&path, name)).flatten())
        })
    }
    let _ = scene;
    find(Path::new("/mnt/tier-fast"), Path::new(name)).unwrap_or_else(|| panic!("{name} is not on the tier"))
}

fn found(audit: &Value) -> BTreeSet<(String, String)> {
    let list = audit["findings"].as_array().unwrap();
    let text = |one: &Value, key: &str| one[key].as_str().unwrap().to_owned();
    list.iter().map(|one| (text(one, "what"), text(one, "path"))).collect()
}

fn pairs(list: &[(&str, &str)]) -> BTreeSet<(String, String)> {
    list.iter().map(|(what, path)| ((*what).to_owned(), (*path).to_owned())).collect()
}

#[test]
fn fsck_reports_damage_and_changes_nothing() {
    let Some(scene) = prepare("fsck_finds") else { return };
    killed(
        &scene,
        &[],
        "mkdir d; for n in lost short good; do echo content of $n >d/$n; done; (echo begun; sleep 100) >d/open & until test -s d/open; do sleep 0.01; done",
    );
    fs::remove_file(plain(&scene, "d/lost")).unwrap();
    fs::OpenOptions::new().write(true).open(plain(&scene, "d/short")).unwrap().set_len(3).unwrap();
    let unrecorded = plain(&scene, "d/good").with_file_name("unrecorded");
    fs::write(&unrecorded, "whose?").unwrap();
    for _ in 0..2 {
        let audit = verb(&scene, &["fsck", "--json"]).exits(3).json();
        assert_eq!(found(&audit), pairs(&[("lost", "d/lost"), ("wrong-size", "d/short"), ("orphan", "d/unrecorded")]));
        let undrained: BTreeSet<&str> =
            audit["undrained"].as_array().unwrap().iter().map(|one| one["path"].as_str().unwrap()).collect();
        assert_eq!(undrained, BTreeSet::from(["d/short", "d/good", "d/open"]));
        let open = audit["undrained"].as_array().unwrap().iter().find(|one| one["path"] == "d/open").unwrap();
        assert_eq!(open["open"], true);
        assert_eq!(fs::read_to_string(&unrecorded).unwrap(), "whose?");
        assert!(!scene.path("d/good").exists(), "fsck without --repair changed the store");
    }
    let text = verb(&scene, &["fsck"]).exits(3).stdout;
    assert!(text.contains("d/lost: it is gone from the tier fast") && text.contains("3 findings"), "{text}");
}

#[test]
fn fsck_repair_drains_leftovers_and_keeps_only_copies() {
    let Some(scene) = prepare("fsck_repair") else { return };
    killed(&scene, &[], "mkdir d; for n in lost good; do echo content of $n >d/$n; done");
    fs::remove_file(plain(&scene, "d/lost")).unwrap();
    let unrecorded = plain(&scene, "d/good").with_file_name("unrecorded");
    fs::write(&unrecorded, "whose?").unwrap();
    let audit = verb(&scene, &["fsck", "--repair", "--json"]).exits(3).json();
    // A lost file stays lost, and is named; the unrecorded file is set aside.
    assert_eq!(found(&audit), pairs(&[("lost", "d/lost"), ("orphan", "d/unrecorded")]));
    assert!(audit["findings"].as_array().unwrap().iter().all(|one| one["repaired"] == false), "{audit:#}");
    assert_eq!(fs::read_to_string(scene.path("d/good")).unwrap(), "content of good\n");
    assert!(!scene.path("d/lost").exists());
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/d/unrecorded")).unwrap(), "whose?");
    let audit = verb(&scene, &["fsck", "--json"]).exits(3).json();
    assert_eq!(found(&audit), pairs(&[("lost", "d/lost"), ("orphan", "d/unrecorded")]));
    // After the acknowledgement of the loss only the unrecorded file remains.
    verb(&scene, &["scavenge", "--forget"]).exits(0);
    let audit = verb(&scene, &["fsck", "--json"]).exits(3).json();
    assert_eq!(found(&audit), pairs(&[("orphan", "d/unrecorded")]));
}

/// Every file below, with its bytes, its mode and the time of its last change.
fn exactly(dirs: &[&str]) -> BTreeMap<PathBuf, (Vec<u8>, u32, i64)> {
    let mut left: Vec<PathBuf> = dirs.iter().map(PathBuf::from).collect();
    let mut found = BTreeMap::new();
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let (path, meta) = (entry.path(), entry.metadata().unwrap());
            let modified = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
            if meta.is_dir() {
                left.push(path.clone());
                found.insert(path, (Vec::new(), meta.mode(), 0));
            } else {
                let bytes = if meta.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
                found.insert(path, (bytes, meta.mode(), modified));
            }
        }
    }
    found
}

fn log_of(scene: &Scene) -> PathBuf {
    let below = exactly(&[scene.state.to_str().unwrap()]);
    below.into_keys().rfind(|path| path.extension().is_some_and(|end| end == "wal")).unwrap()
}

/// Regression: `fsck` and `scavenge --list` truncated the catalog that a killed agent had left, and folded it.
#[test]
fn fsck_and_list_leave_the_catalog_unchanged() {
    let Some(scene) = prepare("fsck_exactly") else { return };
    killed(&scene, &[], "mkdir d; for n in 1 2 3; do echo content of $n >d/$n; done; ln -s 1 d/link");
    let log = log_of(&scene);
    let length = fs::metadata(&log).unwrap().len();
    fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(length - 3).unwrap();
    fs::write(log.with_file_name("snapshot.new"), "half").unwrap();
    let places = [scene.state.to_str().unwrap(), "/mnt/tier-fast", scene.over.to_str().unwrap()];
    let before = exactly(&places);
    verb(&scene, &["fsck", "--json"]);
    verb(&scene, &["scavenge", "--list"]);
    verb(&scene, &["fsck", "--scrub"]);
    verb(&scene, &["scavenge", "--to", "/mnt/notes/out"]);
    let after = exactly(&places);
    let changed: Vec<_> =
        before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path)).collect();
    assert!(changed.is_empty(), "{changed:?}");
}

/// One byte in the middle of the log is changed. Regression: the agent cut off the records behind it and set their
/// plain files aside. The run ended with 0 and no message.
#[test]
fn damage_inside_the_log_is_reported_with_its_names() {
    let Some(scene) = prepare("log_damaged") else { return };
    killed(&scene, &[], "for n in $(seq 40); do echo content of $n >f$n; done; : >empty");
    let log = log_of(&scene);
    let bytes = fs::read(&log).unwrap();
    // The record that makes the twentieth file.
    let at = bytes.windows(3).position(|window| window == b"f20").unwrap();
    fs::OpenOptions::new().write(true).open(&log).unwrap().write_all_at(b"X", at as u64).unwrap();
    let audit = verb(&scene, &["fsck", "--json"]).exits(3).json();
    let kinds = found(&audit);
    assert!(
        kinds.contains(&("damaged".into(), String::new())) && kinds.contains(&("orphan".into(), "f40".into())),
        "{kinds:?}"
    );
    verb(&scene, &["scavenge", "--list"]).exits(3).says(&["damaged at byte", "surgetank fsck"]);
    let ended = scene.run(&QUIET, "true").exits(3);
    ended.says(&[
        "the catalog's log ends at byte",
        "not believed",
        "this is the log as it was",
        "f25",
        "no record names it any more",
    ]);
    // Every file exists: in the store, or set aside.
    for n in 1..=40 {
        let (here, aside) = (scene.path(&format!("f{n}")), format!(".surgetank-orphans/f{n}"));
        let bytes = fs::read_to_string(&here).unwrap_or_else(|_| fs::read_to_string(plain(&scene, &aside)).unwrap());
        assert_eq!(bytes, format!("content of {n}\n"));
    }
    assert!(scene.path("f19").exists() && !scene.path("f21").exists());
    assert!(plain(&scene, ".surgetank-orphans/empty").exists());
    // The damage has been reported.
    scene.run(&QUIET, "true").exits(0);
}

/// Damages the record after the first matching one.
fn damage_behind(scene: &Scene, is_it: impl Fn(&Change) -> bool) {
    let log = log_of(scene);
    let bytes = fs::read(&log).unwrap();
    let mut at = 64;
    loop {
        let record = decode(&bytes[at..]).unwrap_or_else(|| panic!("there is no such record"));
        at += record.bytes;
        if record.changes.iter().any(&is_it) {
            break;
        }
    }
    fs::OpenOptions::new().write(true).open(&log).unwrap().write_all_at(b"XXXX", at as u64).unwrap();
}

/// Damages the log after the record by which a file is clean, in the store as on the tier.
fn damage_since_clean(scene: &Scene) {
    damage_behind(
        scene,
        |change| matches!(change, Change::PutFile(_, file) if file.attr.kind == Kind::File && file.durable_version == 1 && file.version == 1 && file.sealed),
    );
}

/// Regression: the agent removed files that were spilled into the store together with the incomplete copies.
#[test]
fn damage_inside_the_log_keeps_spilled_files() {
    let Some(mut scene) = Scene::new("log_damaged_spill") else { return };
    scene.tier("fast", 2);
    scene.beside("notes");
    let script = "
        echo version one >clean
        /mnt/surgetank wait --state /mnt/state clean
        (head -c 3000000 /dev/zero | tr '\\0' x; sleep 100) >big &
        until test $(stat -c %s big) = 3000000; do sleep 0.01; done";
    killed(&scene, &["--dirty-bytes-max", "1G"], script);
    damage_since_clean(&scene);
    scene.run(&QUIET, "true").exits(3).says(&["the catalog's log ends at byte", "spill"]);
    let kept = fs::read_dir(&scene.over).unwrap().flatten().map(|entry| entry.path());
    let kept = kept.filter(|path| path.to_string_lossy().contains("surgetank-orphan-")).collect::<Vec<_>>();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_eq!(fs::read(&kept[0]).unwrap(), vec![b'x'; 3_000_000]);
    scene.run(&QUIET, "true").exits(0);
}

/// The remaining log says that the copy is clean, but a program has written it since. Regression: the agent removed
/// the copy, or took it for the store's version.
fn written_since(name: &str, boots: bool) {
    let Some(scene) = prepare(name) else { return };
    let script = "
        echo version one >clean
        /mnt/surgetank wait --state /mnt/state clean
        echo version two | dd of=clean conv=notrunc status=none";
    killed(&scene, &[], script);
    damage_since_clean(&scene);
    if boots {
        let other = scene.tmpfs("other", 1);
        scene.machine_dies(&other);
    }
    let in_store = fs::read_to_string(scene.path("clean")).unwrap();
    let ended = scene.run(&QUIET, "cat clean").exits(3);
    ended.says(&["the catalog's log ends at byte", "clean: no record"]).prints(&in_store);
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/clean")).unwrap(), "version two\n");
    scene.run(&QUIET, "true").exits(0);
}

/// Regression: damage inside the log lost what programs wrote after it.
#[test]
fn damage_inside_the_log_keeps_later_writes() {
    written_since("log_damaged_since", false);
}

/// Regression: damage inside the log lost what programs wrote before a boot.
#[test]
fn damage_inside_the_log_keeps_writes_before_a_boot() {
    written_since("log_damaged_boot", true);
}

#[test]
fn clean_state_is_reported() {
    let Some(scene) = prepare("fsck_clean") else { return };
    let text = verb(&scene, &["fsck"]).exits(0).stdout;
    assert!(text.contains("0 findings"), "{text}");
    scene.run(&[], "echo x >file").exits(0);
    verb(&scene, &["fsck", "--scrub", "--repair"]).exits(0);
    verb(&scene, &["scavenge"]).exits(0);
    assert_eq!(fs::read_to_string(scene.path("file")).unwrap(), "x\n");
}

/// Changes a byte like a faulty device: neither timestamp shows the change.
fn rot(path: &Path) {
    let before = fs::metadata(path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(b"!", 100).unwrap();
    file.sync_all().unwrap();
    file.set_times(
        fs::FileTimes::new().set_modified(before.modified().unwrap()).set_accessed(before.accessed().unwrap()),
    )
    .unwrap();
}

#[test]
fn scrub_under_a_mount_replaces_a_corrupt_copy() {
    let Some(scene) = prepare("scrub") else { return };
    // (A change in the store would show in the change time, which no program can set. Only a device can lose data
    // there unseen.)
    let script = "
        for n in $(seq 20); do head -c 100000 /dev/zero | tr '\\0' x >f$n; done
        /mnt/surgetank wait --state /mnt/state .
        touch /mnt/notes/there
        until test -e /mnt/notes/rotten; do sleep 0.05; done
        code=0; /mnt/surgetank fsck --scrub --json --state /mnt/state >/mnt/notes/found || code=$?
        echo $code >>/mnt/notes/codes
        /mnt/surgetank fsck --scrub --repair --state /mnt/state >/mnt/notes/repaired
        code=0; /mnt/surgetank fsck --scrub --state /mnt/state >/mnt/notes/again || code=$?
        echo $code >>/mnt/notes/codes
        cat f* | tr -d x | wc -c";
    let _ = fs::remove_file("/mnt/notes/there");
    let running = scene.start(&["--quiet-period", "0s"], script);
    eventually("all files are in the store", || fs::exists("/mnt/notes/there").unwrap());
    rot(&plain(&scene, "f7"));
    rot(&plain(&scene, "f11"));
    fs::write("/mnt/notes/rotten", "").unwrap();
    let ended = running.ends().exits(0);
    assert_eq!(ended.stdout.trim(), "0", "rotten bytes were read: {}", ended.stderr);
    let audit: Value = serde_json::from_str(&fs::read_to_string("/mnt/notes/found").unwrap()).unwrap();
    assert_eq!(found(&audit), pairs(&[("rotten-on-tier", "f7"), ("rotten-on-tier", "f11")]));
    assert_eq!(audit["scrubbed_bytes"], 2 * 20 * 100_000);
    let repaired = fs::read_to_string("/mnt/notes/repaired").unwrap();
    assert_eq!(repaired.matches("(repaired)").count(), 2, "{repaired}");
    assert_eq!(fs::read_to_string("/mnt/notes/codes").unwrap(), "3\n0\n");
    for n in 1..=20 {
        assert_eq!(fs::read(scene.path(&format!("f{n}"))).unwrap(), vec![b'x'; 100_000]);
    }
}

#[test]
fn scrub_rewrites_a_corrupt_file_in_the_store() {
    let Some(scene) = prepare("scrub_store") else { return };
    let store = scene.ext4("store", 64);
    let script = "
        (echo SIGNATURE-OF-F; head -c 100000 /dev/zero | tr '\\0' x) >f
        /mnt/surgetank wait --state /mnt/state .
        touch /mnt/notes/there
        until test -e /mnt/notes/rotten; do sleep 0.05; done
        /mnt/surgetank fsck --repair --scrub --state /mnt/state >/mnt/notes/repaired
        /mnt/surgetank wait --state /mnt/state .
        code=0; /mnt/surgetank fsck --scrub --state /mnt/state >/mnt/notes/again || code=$?
        echo $code";
    let running = scene.start(&["--quiet-period", "0s", "--store", store.to_str().unwrap()], script);
    eventually("all files are in the store", || fs::exists("/mnt/notes/there").unwrap());
    let good = fs::read(store.join("f")).unwrap();
    // The device loses a bit.
    let image = Path::new("/mnt/store.img");
    let bytes = fs::read(image).unwrap();
    let at = bytes.windows(14).position(|window| window == b"SIGNATURE-OF-F").unwrap();
    fs::OpenOptions::new().write(true).open(image).unwrap().write_all_at(b"R", at as u64 + 50).unwrap();
    fs::write("/mnt/notes/rotten", "").unwrap();
    let ended = running.ends().exits(0);
    let repaired = fs::read_to_string("/mnt/notes/repaired").unwrap();
    assert!(repaired.contains("rotten in store") && repaired.contains("(repaired)"), "{repaired}{}", ended.stderr);
    assert_eq!(ended.stdout.lines().last(), Some("0"), "{}", fs::read_to_string("/mnt/notes/again").unwrap());
    assert_eq!(fs::read(store.join("f")).unwrap(), good);
}

#[test]
fn scavenge_lists_copies_and_drains() {
    let Some(scene) = prepare("scavenge") else { return };
    fs::write(scene.path("old"), "before\n").unwrap();
    killed(
        &scene,
        &[],
        "mkdir -p d/e; echo one >d/one; echo two >d/e/two; chmod 750 d/e/two; echo after >old; ln -s one d/link",
    );
    let listed = verb(&scene, &["scavenge", "--list"]).exits(0).stdout;
    for name in ["d/one", "d/e/two", "old"] {
        let line = listed.lines().find(|line| line.contains(&format!("  {name}  "))).unwrap();
        let at = line.rsplit("  ").next().unwrap();
        assert!(Path::new(at).exists(), "{line}");
    }
    assert_eq!(fs::read_to_string(scene.path("old")).unwrap(), "before\n");
    verb(&scene, &["scavenge", "--to", "/mnt/notes/out"]).exits(0);
    let copy = |name: &str| fs::read_to_string(Path::new("/mnt/notes/out").join(name)).unwrap();
    assert_eq!((copy("d/one"), copy("d/e/two"), copy("old")), ("one\n".into(), "two\n".into(), "after\n".into()));
    assert_eq!(fs::metadata("/mnt/notes/out/d/e/two").unwrap().mode() & 0o777, 0o750);
    verb(&scene, &["scavenge", "--to", "/mnt/notes/out"]).exits(1).says(&["is not empty"]);
    assert!(!scene.path("d/one").exists(), "a copy elsewhere changed the store");
    verb(&scene, &["scavenge"]).exits(0);
    let store = |name: &str| fs::read_to_string(scene.path(name)).unwrap();
    assert_eq!((store("d/one"), store("d/e/two"), store("old")), ("one\n".into(), "two\n".into(), "after\n".into()));
    assert_eq!(fs::read_link(scene.path("d/link")).unwrap(), Path::new("one"));
    let listed = verb(&scene, &["scavenge", "--list"]).exits(0).stdout;
    assert!(listed.starts_with("0 files"), "{listed}");
}

/// The state directory was on a file system that did not survive.
#[test]
fn scavenge_finds_plain_files_without_a_state() {
    let Some(scene) = prepare("scavenge_stateless") else { return };
    killed(&scene, &[], "mkdir d; echo one >d/one");
    fs::remove_dir_all(&scene.state).unwrap();
    verb(&scene, &["scavenge"]).exits(3).says(&["no state of", "--to"]);
    verb(&scene, &["scavenge", "--to", "/mnt/notes/out"]).exits(0);
    assert_eq!(fs::read_to_string("/mnt/notes/out/d/one").unwrap(), "one\n");
}

#[test]
fn directory_of_a_live_agent_is_not_scavenged() {
    let Some(scene) = prepare("scavenge_living") else { return };
    let script = "echo x >file; code=0; /mnt/surgetank scavenge --state /mnt/state --over /mnt/project 2>&1 || code=$?; echo $code";
    let ended = scene.run(&QUIET, script).exits(0);
    assert!(ended.stdout.contains("is being served") && ended.stdout.ends_with("1\n"), "{}", ended.stdout);
}

#[test]
fn unprivileged_user_scavenges_own_files() {
    let Some(mut scene) = Scene::of_user("scavenge_user") else { return };
    scene.tier("fast", 64);
    scene.beside("notes");
    killed(&scene, &[], "mkdir d; echo one >d/one");
    verb(&scene, &["scavenge"]).exits(0);
    assert_eq!(fs::read_to_string(scene.path("d/one")).unwrap(), "one\n");
}

/// Names in the store's directory `d` that are not the given one.
fn beside(scene: &Scene, name: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(scene.path("d")).unwrap().flatten().map(|entry| entry.path());
    all.filter(|path| !path.ends_with(name)).collect()
}

/// Regression: a plain file that was truncated behind the agent replaced the version in the store.
#[test]
fn truncated_plain_file_does_not_replace_the_stored_version() {
    for by in ["fsck", "run", "scavenge", "fsynced"] {
        std::thread::spawn(move || cut_off(by)).join().unwrap();
    }
}

const SEALED: &str =
    "until [ \"$(getfattr --only-values -n user.surgetank.state d/short)\" = sealed ]; do sleep 0.01; done";

fn cut_off(by: &str) {
    let Some(scene) = prepare(&format!("cut_off_{by}")) else { return };
    scene.run(&[], "mkdir d; echo the version before >d/short").exits(0);
    // (Nor does the synced data exist any more.)
    let (options, sync): (&[&str], _) =
        if by == "fsynced" { (&["--fsync", "tier"], "sync d/short") } else { (&[], "true") };
    killed(&scene, options, &format!("exec 3>d/short; echo the newest version >&3; {sync}; exec 3>&-; {SEALED}"));
    fs::OpenOptions::new().write(true).open(plain(&scene, "d/short")).unwrap().set_len(3).unwrap();
    match by {
        "fsck" => {
            let audit = verb(&scene, &["fsck", "--repair", "--json"]).exits(3).json();
            assert_eq!(found(&audit), pairs(&[("wrong-size", "d/short")]));
            assert_eq!(audit["findings"][0]["repaired"], false, "{audit:#}");
        }
        "run" | "fsynced" => {
            let errors = scene.run(&[], "true").exits(3).stderr;
            assert!(errors.contains("has 3 bytes, and had 19 when it was closed"), "{errors}");
        }
        _ => {
            // The copy gets a name that marks it as incomplete.
            let text = verb(&scene, &["scavenge", "--to", "/mnt/notes/out"]).exits(0).stdout;
            assert!(text.contains("(not as long as it was when it was closed)"), "{text}");
            let copied: Vec<_> =
                fs::read_dir("/mnt/notes/out/d").unwrap().map(|one| one.unwrap().file_name()).collect();
            assert!(
                copied.len() == 1 && copied[0].to_str().unwrap().starts_with("short.surgetank-unproven-"),
                "{copied:?}"
            );
            drop(verb(&scene, &["scavenge"]).exits(3));
        }
    }
    assert_eq!(fs::read_to_string(scene.path("d/short")).unwrap(), "the version before\n", "{by}");
    is_apart(&scene, by, "the");
}

/// The only file beside `d/short` has these bytes.
#[track_caller]
fn is_apart(scene: &Scene, by: &str, bytes: &str) {
    let apart = beside(scene, "short");
    assert_eq!(apart.len(), 1, "{by}: {apart:?}");
    assert!(apart[0].to_str().unwrap().contains("short.surgetank-unproven-"), "{apart:?}");
    assert_eq!(fs::read_to_string(&apart[0]).unwrap(), bytes, "{by}");
}

#[test]
fn truncated_plain_file_of_a_live_agent_stays_in_place() {
    let Some(scene) = prepare("cut_off_alive") else { return };
    scene.run(&[], "mkdir d; echo the version before >d/short; echo another >d/other").exits(0);
    let script = &format!(
        "echo the newest version >d/short; echo newer >d/other; {SEALED}; touch /mnt/notes/there; until test -e /mnt/notes/cut; do sleep 0.01; done"
    );
    let running = scene.start(&[&QUIET[..], &["--retry", "1s", "--unordered"]].concat(), script);
    eventually("the command runs", || fs::exists("/mnt/notes/there").unwrap());
    let at = plain(&scene, "d/short");
    fs::OpenOptions::new().write(true).open(&at).unwrap().set_len(3).unwrap();
    fs::write("/mnt/notes/cut", "").unwrap();
    running.ends().exits(3).says(&["d/short", "has 3 bytes, and had 19"]);
    assert_eq!(fs::read_to_string(scene.path("d/short")).unwrap(), "the version before\n");
    assert_eq!(fs::read_to_string(scene.path("d/other")).unwrap(), "newer\n");
    assert_eq!(fs::read_to_string(&at).unwrap(), "the");
}

/// Changes in the store to durable files, and stray files there.
#[test]
fn fsck_reports_changes_by_other_clients_in_the_store() {
    let Some(scene) = prepare("fsck_store") else { return };
    // (The agent remembers the state of the store only while it has work left.)
    killed(
        &scene,
        &["--quiet-period", "0s"],
        "for n in removed changed good; do echo content of $n >$n; done; /mnt/surgetank wait --state /mnt/state .; exec 3>held; echo held >&3",
    );
    fs::remove_file(scene.path("removed")).unwrap();
    fs::write(scene.path("changed"), "by another client").unwrap();
    let orphans = plain(&scene, "changed").with_file_name(".surgetank-orphans");
    fs::create_dir(&orphans).unwrap();
    fs::write(orphans.join("removed"), "an earlier one").unwrap();
    let key = serde_json::from_str::<Value>(
        &fs::read_dir(&scene.state)
            .unwrap()
            .flatten()
            .find_map(|place| fs::read_to_string(place.path().join("identity.json")).ok())
            .unwrap(),
    )
    .unwrap();
    let key = key["key"].as_str().unwrap().to_owned();
    let leftover = format!(".surgetank-tmp-{key}-77");
    fs::write(scene.path(&leftover), "half").unwrap();
    let audit = verb(&scene, &["fsck", "--json"]).exits(3).json();
    assert_eq!(
        found(&audit),
        pairs(&[
            ("not-in-store", "removed"),
            ("changed-in-store", "changed"),
            ("orphan", "removed"),
            ("leftover", &leftover)
        ]),
        "{audit:#}"
    );
    assert!(scene.path(&leftover).exists(), "fsck without --repair changed the store");
    let text = verb(&scene, &["fsck", "--repair"]).exits(3).stdout;
    assert!(text.contains("not in the store any more") && text.contains("2 need action"), "{text}");
    assert!(!scene.path("removed").exists(), "a file that another client removed came back");
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/removed")).unwrap(), "an earlier one");
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/removed+")).unwrap(), "content of removed\n");
    assert_eq!(fs::read_dir(plain(&scene, ".surgetank-orphans")).unwrap().count(), 2, "another file was set aside");
    assert_eq!(fs::read_to_string(scene.path("changed")).unwrap(), "by another client");
    assert_eq!(fs::read_to_string(scene.path("good")).unwrap(), "content of good\n");
    assert_eq!(fs::read_to_string(scene.path("held")).unwrap(), "held\n");
}

#[test]
fn fsck_reports_files_without_a_good_or_readable_copy() {
    let Some(scene) = prepare("fsck_rotten") else { return };
    let store = scene.ext4("store", 64);
    let options = ["--quiet-period", "0s", "--store", store.to_str().unwrap()];
    killed(
        &scene,
        &options,
        "(echo SIGNATURE-OF-G; head -c 100000 /dev/zero | tr '\\0' x) >g; echo f >f; /mnt/surgetank wait --state /mnt/state .; exec 3>held; echo held >&3",
    );
    rot(&plain(&scene, "g"));
    let image = Path::new("/mnt/store.img");
    let bytes = fs::read(image).unwrap();
    let at = bytes.windows(14).position(|window| window == b"SIGNATURE-OF-G").unwrap();
    fs::OpenOptions::new().write(true).open(image).unwrap().write_all_at(b"R", at as u64 + 50).unwrap();
    let words = ["fsck", "--scrub", "--json", "--store", store.to_str().unwrap()];
    let audit = verb(&scene, &words).exits(3).json();
    assert_eq!(found(&audit), pairs(&[("rotten-everywhere", "g")]), "{audit:#}");
    crate::scene::succeed(std::process::Command::new("umount").arg("/mnt/tier-fast"));
    let audit = verb(&scene, &words).exits(3).json();
    let found = found(&audit);
    assert!(found.iter().any(|(what, _)| what == "unread"), "{audit:#}");
    assert!(!found.iter().any(|(what, _)| what == "lost"), "an unreadable file is not lost: {audit:#}");
}
