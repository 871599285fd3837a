//! Files that recovery has to keep: the only copies of data newer than the catalog's last record, and files that cannot
//! be examined now.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use surgetank_types::model::{Change, Mark};

use super::{QUIET, damage_behind, damage_since_clean, is_apart, killed, log_of, plain, prepare};
use crate::scene::server::{Server, faults, faults_hit};
use crate::scene::{Running, Scene, eventually, files_below, mount};

const BIG: usize = 3_000_000;

/// Writes the file, which has no room on a tier of 2 MiB, and keeps it open for writing.
fn spills(name: &str) -> String {
    format!(
        "(head -c {BIG} /dev/zero | tr '\\0' x; sleep 100) >{name} & until test $(stat -c %s {name}) = {BIG}; do sleep 0.01; done"
    )
}

/// The spilled file in the store is set aside.
#[track_caller]
fn is_kept_in(store: &Path) {
    let kept: Vec<PathBuf> = files_below(store).into_keys().map(|path| store.join(path)).collect();
    let kept: Vec<_> = kept.iter().filter(|path| path.to_string_lossy().contains("surgetank-orphan-")).collect();
    assert_eq!(kept.len(), 1, "{:?}", files_below(store));
    assert!(fs::read(kept[0]).unwrap() == vec![b'x'; BIG], "other bytes");
}

fn not_put_aside(name: &str, wrong: &str) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 2);
    scene.beside("notes");
    scene.beside("behind");
    let store = scene.beside("store");
    faults("");
    let _server = Server::start(&store, &[]);
    let script = format!("echo version one >clean; /mnt/surgetank wait --state /mnt/state clean; {}", spills("big"));
    let at_the_server = ["--store", "/mnt/store"];
    killed(&scene, &[&at_the_server[..], &["--dirty-bytes-max", "1G"]].concat(), &script);
    damage_since_clean(&scene);
    faults(wrong);
    let before = faults_hit();
    scene.run(&[&QUIET[..], &at_the_server].concat(), "true").exits(3).says(&["surgetank-orphan-"]);
    assert_ne!(faults_hit(), before, "no fault occurred");
    is_kept_in(Path::new("/mnt/behind"));
    faults("");
    scene.run(&[&QUIET[..], &at_the_server].concat(), "true").exits(0);
}

/// Regression: after damage to the catalog the first rename of a spilled file failed, and the agent removed it with the
/// incomplete copies.
#[test]
fn spill_that_cannot_be_set_aside_is_kept() {
    not_put_aside("not_renamed", "rename EIO 2");
}

/// Regression: the agent removed a spilled file whose directory could not be listed.
#[test]
fn spill_that_cannot_be_listed_is_kept() {
    not_put_aside("not_listed", "readdir EIO 2");
}

/// No remaining record of the log names the directory. Regression: the agent treated a spilled file there as an
/// incomplete copy when a program removed the directory, or made another one.
fn spilled_where_no_record_leads(name: &str, from_the_start: bool) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("fast", 2);
    scene.beside("notes");
    fs::create_dir(scene.path("sub")).unwrap();
    let script =
        format!("echo version one >clean; /mnt/surgetank wait --state /mnt/state clean; {}", spills("sub/big"));
    killed(&scene, &["--dirty-bytes-max", "1G"], &script);
    if from_the_start {
        fs::OpenOptions::new().write(true).open(log_of(&scene)).unwrap().write_all_at(b"XXXX", 64).unwrap();
    } else {
        damage_since_clean(&scene);
    }
    scene.run(&QUIET, "true").exits(3).says(&["the catalog's log ends at byte"]);
    // A later agent is killed at the same point.
    killed(&scene, &["--dirty-bytes-max", "1G"], &spills("sub/other"));
    scene.run(&QUIET, "rm sub/other; rmdir sub").exits(3).says(&["surgetank-orphan-"]);
    is_kept_in(&scene.over);
}

/// Regression: the agent removed a spilled file in a directory that no record names.
#[test]
fn spill_in_an_unrecorded_directory_is_kept() {
    spilled_where_no_record_leads("spill_unnamed", false);
}

/// Regression: the agent removed spilled files when the whole log was lost.
#[test]
fn spill_is_kept_when_the_log_is_lost() {
    spilled_where_no_record_leads("spill_nothing", true);
}

/// The catalog records that a copy is not needed before the copy becomes the file's. Regression: if the log ended
/// with that record, the agent removed the copy, with the data that programs had written to it.
#[test]
fn damage_inside_the_log_keeps_a_copy_just_adopted() {
    let Some(scene) = prepare("log_damaged_placed") else { return };
    fs::write(scene.path("old"), "version one\n").unwrap();
    killed(&scene, &[], "echo version two >>old");
    damage_behind(&scene, |change| matches!(change, Change::PutMark(Mark::PendingUnlink(_), _)));
    scene.run(&QUIET, "true").exits(3).says(&["old: no record names it any more"]);
    assert_eq!(fs::read_to_string(plain(&scene, ".surgetank-orphans/old")).unwrap(), "version one\nversion two\n");
}

/// The store has the recorded version, and the tier's file has more. Regression: the agent took it for a spare copy and
/// removed it without a message.
#[test]
fn clean_file_that_grew_is_kept() {
    let Some(scene) = prepare("clean_grew") else { return };
    // (The agent remembers clean files only while it has work left.)
    let script =
        "mkdir d; echo version one >d/short; /mnt/surgetank wait --state /mnt/state d; exec 3>held; echo held >&3";
    killed(&scene, &["--quiet-period", "0s"], script);
    fs::OpenOptions::new().append(true).open(plain(&scene, "d/short")).unwrap().write_all(b"version two\n").unwrap();
    let ended = scene.run(&[], "cat d/short").exits(3);
    ended.says(&["d/short", "has 24 bytes, and had 12"]).prints("version one\n");
    assert_eq!(fs::read_to_string(scene.path("d/short")).unwrap(), "version one\n");
    is_apart(&scene, "clean", "version one\nversion two\n");
    scene.run(&[], "true").exits(0);
}

/// A file was open for writing when all processes died. Regression: if its plain file could not be opened, the agent
/// removed it as if it had no data.
#[test]
fn unopenable_plain_file_is_not_the_version_before() {
    let Some(mut scene) = Scene::of_user("not_opened") else { return };
    scene.tier("fast", 64);
    scene.beside("notes");
    scene.run(&[], "echo version one >file; echo one >other").exits(0);
    killed(&scene, &[], "exec 3>file; echo version two >&3");
    let at = plain(&scene, "file");
    fs::set_permissions(&at, fs::Permissions::from_mode(0o0)).unwrap();
    scene.run(&[], "cat other; echo two >other").exits(3).says(&["file: ", "cannot be opened"]).prints("one\n");
    assert_eq!(fs::read_to_string(&at).unwrap(), "version two\n");
    assert_eq!(fs::read_to_string(scene.path("other")).unwrap(), "two\n");
    fs::set_permissions(&at, fs::Permissions::from_mode(0o600)).unwrap();
    scene.run(&[], "cat file").exits(0).prints("version two\n");
    assert_eq!(fs::read_to_string(scene.path("file")).unwrap(), "version two\n");
}

/// Regression: the same, with a file that was spilled into the store.
#[test]
fn unopenable_spill_is_not_the_version_before() {
    let Some(mut scene) = Scene::of_user("spill_not_opened") else { return };
    scene.tier("fast", 2);
    scene.beside("notes");
    scene.run(&[], "echo version one >big").exits(0);
    killed(&scene, &["--dirty-bytes-max", "1G"], &spills("big"));
    let at = files_below(&scene.over).into_keys().find(|path| path.to_string_lossy().contains("-spill-")).unwrap();
    let at = scene.path(at.to_str().unwrap());
    fs::set_permissions(&at, fs::Permissions::from_mode(0o0)).unwrap();
    scene.run(&[], "echo another >other").exits(3).says(&["big: ", "cannot be opened"]);
    assert!(scene.path("other").exists());
    fs::set_permissions(&at, fs::Permissions::from_mode(0o600)).unwrap();
    scene.run(&[], "true").exits(0);
    assert!(fs::read(scene.path("big")).unwrap() == vec![b'x'; BIG], "other bytes");
}

/// Regression: the full catalog could not record that the file was open. The next agent took it for a clean copy that
/// had grown.
#[test]
fn file_written_while_the_catalog_is_full_is_kept() {
    let Some(mut scene) = Scene::new("catalog_full") else { return };
    scene.tier("fast", 64);
    scene.beside("notes");
    scene.run(&[], "true").exits(0);
    let place = fs::read_dir(&scene.state).unwrap().flatten().map(|entry| entry.path()).find(|path| path.is_dir());
    let catalog = place.unwrap().join("catalog");
    fs::remove_dir_all(&catalog).unwrap();
    fs::create_dir(&catalog).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", catalog.to_str().unwrap()]);
    // (The log's last page still has room for a write.)
    let script = "
        await() { until test -e /mnt/notes/$1; do sleep 0.01; done; }
        echo version one >file; : >other; /mnt/surgetank wait --state /mnt/state .
        exec 4>held; echo held >&4; touch /mnt/notes/there
        await full; for mode in 600 640 644 660 664 666; do for n in 1 2 3 4 5; do chmod $mode other; chmod 400 other; done; done
        exec 3>>file; echo version two >&3; touch /mnt/notes/written
        await replaced; echo version three >&3; exec 3>&-; cat file";
    let running = scene.start(&["--quiet-period", "0s"], script);
    eventually("all files are in the store", || fs::exists("/mnt/notes/there").unwrap());
    let mut filler = fs::File::create(catalog.join("filler")).unwrap();
    while filler.write_all(&[b'x'; 4096]).is_ok() {}
    fs::write("/mnt/notes/full", "").unwrap();
    eventually("the file is written", || fs::exists("/mnt/notes/written").unwrap());
    let agent = scene.agent().unwrap();
    // SAFETY: the process was started by this test. The stopped agent cannot write its delayed records.
    unsafe { libc::kill(agent as i32, libc::SIGSTOP) };
    fs::remove_file(catalog.join("filler")).unwrap();
    scene.replace_agent();
    fs::write("/mnt/notes/replaced", "").unwrap();
    let ended = running.ends();
    let all = "version one\nversion two\nversion three\n";
    assert_eq!(ended.stdout, all, "{}", ended.stderr);
    assert_eq!(fs::read_to_string(scene.path("file")).unwrap(), all);
    assert_eq!(files_below(&scene.over).len(), 3, "{:?}", files_below(&scene.over));
}

/// Regression: the agent ended when it could not write to its log.
#[test]
fn full_state_directory_does_not_end_the_agent() {
    let Some(mut scene) = Scene::new("state_full") else { return };
    scene.tier("fast", 64);
    scene.beside("notes");
    fs::create_dir(&scene.state).unwrap();
    mount(&["-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", scene.state.to_str().unwrap()]);
    let script = "
        echo before >before; touch /mnt/notes/there
        until test -e /mnt/notes/full; do sleep 0.01; done
        for n in $(seq 300); do echo $n >file$n || exit 7; done; cat file300; touch /mnt/notes/written
        until test -e /mnt/notes/room; do sleep 0.01; done; ls | wc -l";
    let mut command = scene.run_command(&["--quiet-period", "1h"], script);
    command.env("SURGETANK_LOG", "trace");
    let running = Running::of(command);
    eventually("the command runs", || fs::exists("/mnt/notes/there").unwrap());
    let agent = scene.agent();
    let filler = scene.state.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[b'x'; 4096]).is_ok() {}
    // (The last page of the log still has room.)
    let log = fs::read_dir(&scene.state).unwrap().flatten().map(|place| place.path().join("agent.log"));
    let log = log.into_iter().find(|log| log.exists()).unwrap();
    let mut log = fs::OpenOptions::new().append(true).open(log).unwrap();
    while log.write_all(b"x").is_ok() {}
    fs::write("/mnt/notes/full", "").unwrap();
    eventually("all files are written", || fs::exists("/mnt/notes/written").unwrap());
    assert_eq!(scene.agent(), agent, "the agent died");
    fs::remove_file(filler).unwrap();
    fs::write("/mnt/notes/room", "").unwrap();
    running.ends().exits(0).prints("300\n301\n");
    assert_eq!(fs::read_to_string(scene.path("file300")).unwrap(), "300\n");
}
