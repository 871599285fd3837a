//! A store that refuses files. The exit code and the message must be right: which file, which store, the cause, what
//! to try, and where the bytes are safe. Once the store accepts files again, another run drains every file.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::scene::server::{Server, unmount};
use crate::scene::{MIB, Running, Scene, eventually, mount, noise};
use rustix::mount::MountFlags;

/// Short, because a test cannot wait long until the agent gives up a store that always fails.
const SHORT: [&str; 2] = ["--retry", "500ms"];
/// The fragments of every report about a store that refuses, besides the particulars.
const ALWAYS: [&str; 5] =
    ["not durable", "safe at", "/mnt/tier-fast", "surgetank run --state /mnt/state", "--over /mnt/project -- true"];

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 96);
    fs::write("/mnt/source", noise(5, 64 * MIB)).unwrap();
    Some(scene)
}

/// Eight files of 4 MiB in a directory, one of which is then renamed.
const WRITE: &str = "mkdir out
    for i in 0 1 2 3 4 5 6 7; do dd if=/mnt/source of=out/part$i bs=4M count=1 skip=$i status=none; done
    mv out/part7 out/last";

#[track_caller]
fn all_is_there(scene: &Scene) {
    let bytes = noise(5, 64 * MIB);
    for (i, part) in bytes.chunks(4 << 20).take(8).enumerate() {
        let name = if i == 7 { "out/last".into() } else { format!("out/part{i}") };
        scene.holds(&name, part);
    }
    assert!(!scene.path("out/part7").exists());
    scene.is_clean();
    assert_eq!(scene.tier_files(), Vec::<PathBuf>::new());
}

fn full(name: &str, fill: impl FnOnce(&Scene) -> PathBuf) {
    let Some(scene) = prepare(name) else { return };
    let ballast = fill(&scene);
    scene.run(&SHORT, WRITE).exits(3).says(&ALWAYS).says(&["out/part", "/mnt/project", "full", "Make room"]);
    for path in scene.store_files().into_keys().filter(|path| path.starts_with("out")) {
        assert_eq!(fs::metadata(scene.path(path.to_str().unwrap())).unwrap().len(), 4 * MIB, "{path:?}");
    }
    // The store is still full, and the report must be the same.
    scene.run(&SHORT, "true").exits(3).says(&ALWAYS);
    // (Regression: the advised command found no files, because it did not name the state.)
    scene.verb("wait", &["/mnt/project"]).exits(3).says(&ALWAYS);
    fs::remove_file(ballast).unwrap();
    scene.drain_what_is_left().exits(0);
    all_is_there(&scene);
}

fn ballast(scene: &Scene, mib: u64) -> PathBuf {
    let ballast = scene.path("ballast");
    let file = fs::File::create(&ballast).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, mib * MIB).unwrap();
    ballast
}

#[test]
fn full_tmpfs_is_reported_and_drained_later() {
    full("full_tmpfs", |scene| {
        scene.tmpfs("project", 60);
        ballast(scene, 50)
    });
}

#[test]
fn full_ext4_is_reported_and_drained_later() {
    full("full_ext4", |scene| {
        scene.ext4("project", 64);
        ballast(scene, 45)
    });
}

/// Regression: the pause before the last try took as long as all pauses before it. No message reported how long the
/// agent retries.
#[test]
fn full_store_fails_when_retry_window_ends() {
    let Some(scene) = prepare("full_given_up") else { return };
    scene.tmpfs("project", 8);
    ballast(&scene, 6);
    let words = ["--retry", "5s", "--json", "/mnt/report.json"];
    let quiet = scene.run_command(&words, "head -c 4M /mnt/source > late");
    let mut command = scene.surgetank(&[]);
    command.args(quiet.get_args().filter(|word| *word != "--no-progress"));
    let ended = Running::of(command).ends().exits(3);
    let ended = ended.says(&[
        "draining",
        "full",
        "The agent retries for ",
        " s; files that are left then stay safe in the tiers.",
    ]);
    let report: serde_json::Value = serde_json::from_slice(&fs::read("/mnt/report.json").unwrap()).unwrap();
    let drain_ms = report["drain_ms"].as_u64().unwrap();
    // (The upper bound: `last_try_is_when_the_retry_time_ends`.)
    assert!(drain_ms >= 4900, "{drain_ms} ms: {}", ended.stderr);
}

/// The first file has room if the second one's copy is not there.
#[test]
fn later_file_does_not_take_the_room_of_an_earlier_one() {
    let Some(scene) = prepare("full_for_the_first") else {
        return;
    };
    scene.tmpfs("project", 8);
    let ballast = ballast(&scene, 5);
    let write = "head -c 6M /mnt/source > first; head -c 2600k /mnt/source > second; sleep 2";
    let running = scene.start(&["--retry", "3s"], write);
    std::thread::sleep(std::time::Duration::from_secs(1));
    fs::remove_file(ballast).unwrap();
    running.ends().exits(3).says(&["second", "full"]);
    let bytes = noise(5, 64 * MIB);
    scene.holds("first", &bytes[..6 << 20]);
    assert_eq!(scene.store_files().len(), 1);
    mount(&["-o", "remount,size=16m", "/mnt/project"]);
    scene.drain_what_is_left().exits(0);
    scene.holds("second", &bytes[..2600 << 10]);
    scene.is_clean();
}

/// Tiers and store are full: the program itself gets the error, and the files that it closed before are safe.
#[test]
fn write_without_any_room_fails() {
    let Some(mut scene) = Scene::new("no_room") else {
        return;
    };
    scene.tier("fast", 8);
    scene.tmpfs("project", 24);
    fs::write("/mnt/source", noise(6, 64 * MIB)).unwrap();
    scene
        .run(
            &[SHORT[0], SHORT[1], "--wait-for-room", "0s"],
            "head -c 3M /mnt/source > before
             ! dd if=/mnt/source of=large bs=1M 2> /mnt/errors
             grep -q 'No space left' /mnt/errors
             rm large
             head -c 2M /mnt/source > after",
        )
        .exits(0);
    let bytes = noise(6, 64 * MIB);
    scene.holds("before", &bytes[..3 << 20]);
    scene.holds("after", &bytes[..2 << 20]);
    assert_eq!(scene.store_files().len(), 2);
}

/// Remounted read-only in the middle of the drain.
#[test]
fn store_that_turns_read_only_is_reported() {
    let Some(scene) = prepare("read_only") else {
        return;
    };
    scene.ext4("project", 96);
    let slow = ["--drain-bytes-per-second-max", "8M", SHORT[0], SHORT[1]];
    let running = scene.start(&slow, WRITE);
    eventually("the drain continues", || scene.path("out/part0").exists());
    // The kernel refuses the remount while a file is open for writing, which is most of the time. The loop has to hit
    // the moment between two files.
    let deadline = Instant::now() + Duration::from_secs(30);
    while rustix::mount::mount_remount("/mnt/project", MountFlags::RDONLY, c"").is_err() {
        assert!(Instant::now() < deadline, "a file was open all the time");
        std::thread::sleep(Duration::from_micros(50));
    }
    running.ends().exits(3).says(&ALWAYS).says(&["out/", "/mnt/project", "read-only", "Mount it read-write"]);
    mount(&["-o", "remount,rw", "/mnt/project"]);
    scene.drain_what_is_left().exits(0);
    all_is_there(&scene);
}

/// The store is read-only from the start. The test accepts both behaviours: a refused create, and a report at the
/// end.
#[test]
fn read_only_store_is_reported() {
    let Some(scene) = prepare("read_only_from_the_start") else {
        return;
    };
    scene.tmpfs("project", 64);
    fs::write(scene.path("there"), "read me").unwrap();
    mount(&["-o", "remount,ro", "/mnt/project"]);
    let ended = scene.run(
        &SHORT,
        "test \"$(cat there)\" = 'read me'
         if : > new; then echo created; else echo refused; fi",
    );
    match ended.stdout.trim() {
        "refused" => ended.exits(0).says(&["Read-only file system"]),
        _ => ended.exits(3).says(&ALWAYS).says(&["new", "read-only"]),
    };
    mount(&["-o", "remount,rw", "/mnt/project"]);
    scene.drain_what_is_left().exits(0);
    assert_eq!(fs::read(scene.path("there")).unwrap(), b"read me");
}

/// The server of the store dies in the middle of the drain, and is started again.
#[test]
fn store_that_goes_away_is_reported_and_drained_later() {
    let Some(scene) = prepare("server_killed") else { return };
    fs::create_dir("/mnt/behind").unwrap();
    let store = PathBuf::from("/mnt/store");
    fs::create_dir(&store).unwrap();
    let mut server = Server::start(&store, &[]);
    let slow = ["--store", "/mnt/store", "--drain-bytes-per-second-max", "8M", SHORT[0], SHORT[1]];
    let running = scene.start(&slow, WRITE);
    eventually("the drain continues", || Path::new("/mnt/behind/out/part0").exists());
    server.kill();
    running.ends().exits(3).says(&ALWAYS).says(&["out/", "/mnt/store", "mounted"]);
    unmount(&store);
    let _server = Server::start(&store, &[]);
    scene.run(&["--store", "/mnt/store"], "true").exits(0);
    unmount(&store);
    let bytes = noise(5, 64 * MIB);
    for (i, part) in bytes.chunks(4 << 20).take(7).enumerate() {
        let name = format!("/mnt/behind/out/part{i}");
        crate::scene::same_bytes(&name, &fs::read(&name).unwrap(), part);
    }
    assert!(Path::new("/mnt/behind/out/last").exists());
}

/// A store in which each operation takes long: slow does not mean failed.
#[test]
fn slow_store_gets_all_files() {
    let Some(scene) = prepare("slow") else { return };
    fs::create_dir("/mnt/behind").unwrap();
    let store = PathBuf::from("/mnt/store");
    fs::create_dir(&store).unwrap();
    let _server = Server::start(&store, &["--latency-us", "20000"]);
    let ended = scene.run(&["--store", "/mnt/store"], WRITE).exits(0);
    assert!(!ended.stderr.contains("not durable"), "{}", ended.stderr);
    unmount(&store);
    let bytes = noise(5, 64 * MIB);
    for (name, part) in
        ["part0", "part1", "part2", "part3", "part4", "part5", "part6", "last"].iter().zip(bytes.chunks(4 << 20))
    {
        crate::scene::same_bytes(name, &fs::read(Path::new("/mnt/behind/out").join(name)).unwrap(), part);
    }
    assert_eq!(fs::read_dir("/mnt/behind/out").unwrap().count(), 8);
}

/// Another client removes the directory to which files are being drained.
#[test]
fn removed_directory_is_reported_and_its_files_kept() {
    let Some(scene) = prepare("removed") else {
        return;
    };
    fs::create_dir(scene.path("out")).unwrap();
    fs::write(scene.path("out/old"), "old").unwrap();
    let slow = ["--drain-bytes-per-second-max", "8M", SHORT[0], SHORT[1]];
    let running = scene.start(
        &slow,
        "for i in 0 1 2 3 4 5 6 7; do dd if=/mnt/source of=out/part$i bs=4M count=1 skip=$i status=none; done
         mv out/part7 out/last",
    );
    eventually("the drain continues", || scene.path("out/part1").exists());
    eventually("the directory is removed", || {
        let _ = fs::remove_dir_all(scene.path("out"));
        !scene.path("out").exists()
    });
    running.ends().exits(3).says(&ALWAYS).says(&["out/", "/mnt/project", "no longer there", "Make it again"]);
    fs::create_dir(scene.path("out")).unwrap();
    scene.drain_what_is_left().exits(0);
    // A durable file that another client removed afterwards stays removed.
    let bytes = noise(5, 64 * MIB);
    scene.holds("out/last", &bytes[28 << 20..32 << 20]);
    scene.holds("out/part6", &bytes[24 << 20..28 << 20]);
    scene.is_clean();
}

/// Another client changes, makes and replaces files that the agent has yet to drain. Both versions are kept and
/// named.
#[test]
fn conflicts_with_another_client_keep_both_files() {
    let Some(mut scene) = Scene::new("other_client") else {
        return;
    };
    scene.tier("fast", 32);
    scene.beside("beside");
    for name in ["changed", "replaced"] {
        fs::write(scene.path(name), "of old").unwrap();
    }
    let running = scene.start(
        &["--quiet-period", "0s"],
        "exec 3>> changed 4>> replaced 5> made
         echo ours >&3; echo ours >&4; echo ours >&5
         touch /mnt/beside/written
         while ! test -e /mnt/beside/meddled; do sleep 0.01; done",
    );
    eventually("the run's files are written", || Path::new("/mnt/beside/written").exists());
    OpenOptions::new().append(true).open(scene.path("changed")).unwrap().write_all(b" theirs").unwrap();
    fs::write(scene.path("new"), "theirs").unwrap();
    fs::rename(scene.path("new"), scene.path("replaced")).unwrap();
    fs::write(scene.path("made"), "theirs").unwrap();
    fs::write("/mnt/beside/meddled", "").unwrap();
    let ended = running.ends().exits(3).says(&["changed", "replaced", "made", "both kept", ".surgetank-conflict-"]);
    let files = scene.store_files();
    let ours = |name: &str| {
        let kept: Vec<_> = files
            .keys()
            .filter(|path| path.to_string_lossy().starts_with(&format!("{name}.surgetank-conflict-")))
            .collect();
        assert_eq!(kept.len(), 1, "{name}: {files:?}\n{}", ended.stderr);
        fs::read_to_string(scene.over.join(kept[0])).unwrap()
    };
    assert_eq!(fs::read(scene.path("changed")).unwrap(), b"of old theirs");
    assert_eq!(ours("changed"), "of oldours\n");
    assert_eq!(fs::read(scene.path("replaced")).unwrap(), b"theirs");
    assert_eq!(ours("replaced"), "of oldours\n");
    assert_eq!(fs::read(scene.path("made")).unwrap(), b"theirs");
    assert_eq!(ours("made"), "ours\n");
    // The conflicts have been reported, and no work is left.
    scene.drain_what_is_left().exits(0);
}

/// Regression: nothing was left to do, and each `umount` kept the mount because of the conflict.
#[test]
fn mount_with_a_conflict_can_be_taken_away() {
    let Some(mut scene) = Scene::new("other_clients_and_umount") else { return };
    scene.tier("fast", 32);
    let over = scene.over.to_str().unwrap().to_owned();
    // (Another client sees the store without the mount.)
    let store = Path::new("/mnt/another-client");
    fs::create_dir(store).unwrap();
    rustix::mount::mount_bind(&scene.over, store).unwrap();
    fs::write(store.join("changed"), "of old").unwrap();
    let mount = ["--tier", "fast=/mnt/tier-fast:32M", "--quiet-period", "0s", &over];
    scene.verb("mount", &mount).exits(0);
    let mut file = OpenOptions::new().append(true).open(scene.over.join("changed")).unwrap();
    file.write_all(b" ours").unwrap();
    fs::write(store.join("changed"), "of another client").unwrap();
    drop(file);
    eventually("both are kept", || fs::read_dir(store).unwrap().count() == 2);
    let mut umount = scene.surgetank(&["umount", "--state", scene.state.to_str().unwrap(), &over]);
    umount.current_dir("/");
    let ended = crate::scene::Running::of(umount).ends();
    ended.exits(3).says(&["both kept", "changed.surgetank-conflict-"]);
    scene.is_clean();
    assert_eq!(fs::read(scene.path("changed")).unwrap(), b"of another client");
}

/// Regression: the drain set the attributes, and from then on took that file for its own.
#[test]
fn attributes_are_not_set_on_a_file_of_another_client() {
    let Some(mut scene) = Scene::new("other_clients_attributes") else { return };
    scene.tier("fast", 32);
    scene.beside("beside");
    fs::write(scene.path("f"), "of old").unwrap();
    fs::write(scene.path("mine"), "of old").unwrap();
    let script =
        "chmod 600 f mine; touch /mnt/beside/written; while ! test -e /mnt/beside/meddled; do sleep 0.01; done";
    let mut command = scene.run_command(&[], script);
    // Holds the drain just before it sets the attributes.
    command.env("SURGETANK_HOLD", "drain.started:2000");
    let running = crate::scene::Running::of(command);
    eventually("the run's files are changed", || Path::new("/mnt/beside/written").exists());
    let mode = |name: &str| fs::metadata(scene.path(name)).unwrap().permissions().mode() & 0o777;
    fs::write(scene.path("new"), "theirs").unwrap();
    fs::set_permissions(scene.path("new"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::rename(scene.path("new"), scene.path("f")).unwrap();
    fs::write("/mnt/beside/meddled", "").unwrap();
    running
        .ends()
        .exits(3)
        .says(&["f: another client changed it in the store before its mode, owner and times were set"]);
    assert_eq!(fs::read(scene.path("f")).unwrap(), b"theirs");
    assert_eq!((mode("f"), mode("mine")), (0o640, 0o600));
}

/// A directory of the store in which an ordinary user may not write any more when the drain reaches it.
#[test]
fn permission_denied_is_reported() {
    let Some(mut scene) = Scene::of_user("denied") else {
        return;
    };
    scene.tier("fast", 32);
    scene.beside("beside");
    fs::create_dir(scene.path("out")).unwrap();
    std::os::unix::fs::chown(scene.path("out"), Some(crate::scene::USER), Some(crate::scene::USER)).unwrap();
    let running = scene.start(
        &SHORT,
        "exec 3> out/file
         echo ours >&3
         touch /mnt/beside/written
         while ! test -e /mnt/beside/meddled; do sleep 0.01; done",
    );
    eventually("the file is written", || Path::new("/mnt/beside/written").exists());
    std::os::unix::fs::chown(scene.path("out"), Some(0), Some(0)).unwrap();
    fs::set_permissions(scene.path("out"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write("/mnt/beside/meddled", "").unwrap();
    running.ends().exits(3).says(&ALWAYS).says(&[
        "out/file",
        "/mnt/project",
        "Permission denied",
        "owner, mode and ACL",
    ]);
    std::os::unix::fs::chown(scene.path("out"), Some(crate::scene::USER), Some(crate::scene::USER)).unwrap();
    scene.drain_what_is_left().exits(0);
    assert_eq!(fs::read(scene.path("out/file")).unwrap(), b"ours\n");
    scene.is_clean();
}

/// ext4 returns ENOSPC for attributes that it can never store. Regression: the message reported a full store.
#[test]
fn attributes_too_large_for_ext4_are_named() {
    let Some(scene) = prepare("large_attributes") else {
        return;
    };
    scene.ext4("project", 64);
    fs::write(scene.path("old"), "old").unwrap();
    let truth = ["not durable", "extended attributes are larger", "setfattr -x", "bytes of extended attributes"];
    // No file is drained before its attributes are set.
    let late = [&SHORT[..], &["--quiet-period", "1h"]].concat();
    let ended = scene.run(
        &late,
        "echo content >new; echo beside >other
         v=$(head -c 5000 /dev/zero | tr '\\0' x)
         setfattr -n user.small -v 1 new; setfattr -n user.big -v $v new; setfattr -n user.big -v $v old",
    );
    let ended = ended.exits(3).says(&truth).says(&["  new: ", "safe at /mnt/tier-fast", "old"]);
    assert!(!ended.stderr.contains("is full"), "{}", ended.stderr);
    // The failure persists, and the advised command helps.
    scene.run(&late, "cat new; setfattr -x user.big old").exits(3).says(&truth).prints("content\n");
    scene.run(&SHORT, "setfattr -x user.big new").exits(0);
    for (name, content) in [("new", "content\n"), ("other", "beside\n"), ("old", "old")] {
        scene.holds(name, content.as_bytes());
    }
    let mut value = [0; 8];
    let length = rustix::fs::getxattr(scene.path("new"), "user.small", &mut value).unwrap();
    assert_eq!(&value[..length], b"1");
    scene.is_clean();
    assert_eq!(scene.tier_files(), Vec::<PathBuf>::new());
}
