//! Files that are written directly. Such a file is complete only when the kernel reports that no process can write it
//! any more.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::scene::Scene;

/// Regression: a program deleted the only name that any program had looked up, and the new content was lost with that
/// name.
#[test]
fn content_survives_the_unlink_of_one_older_hard_link() {
    let Some(mut scene) = Scene::new("links_before") else {
        return;
    };
    scene.tier("fast", 256);
    for name in ["p", "r", "t"] {
        std::fs::write(scene.path(name), "old").unwrap();
        std::fs::hard_link(scene.path(name), scene.path(&format!("{name}-other"))).unwrap();
    }
    let script = "echo new >p; rm p
        echo newer >r; echo replacing >x; mv x r
        exec 9>>t; echo ' appended' >&9; rm t; exec 9>&-";
    scene.run(&[], script).exits(0);
    scene.holds("p-other", b"new\n");
    scene.holds("r-other", b"newer\n");
    scene.holds("r", b"replacing\n");
    scene.holds("t-other", b"old appended\n");
    assert!(!scene.path("p").exists() && !scene.path("t").exists());
    scene.is_clean();
}

/// The file is written directly, and opened for reading before the agent gets the lease that seals it. Regression:
/// the file was never drained.
#[test]
fn file_opened_for_reading_before_its_seal_is_drained() {
    let Some(mut scene) = Scene::new("read_before_seal") else {
        return;
    };
    scene.tier("fast", 64);
    let script = "for n in $(seq 30); do head -c 1000000 /dev/urandom >f-$n; sha256sum f-$n >>sums; done";
    scene.run(&[], script).exits(0);
    let check = std::process::Command::new("sha256sum")
        .args(["--check", "--quiet", "sums"])
        .current_dir(scene.path(""))
        .output()
        .unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    assert_eq!(scene.read("sums").iter().filter(|byte| **byte == b'\n').count(), 30);
    scene.is_clean();
}

/// Regression: when a file outlived its `Open` unsealed, the writer's charge and reservation were never released.
#[test]
fn charge_of_a_deferred_seal_is_released() {
    let Some(mut scene) = Scene::new("lingering_charge") else {
        return;
    };
    scene.tier("fast", 256);
    // Each file is open for longer than the interval at which the agent counts the bytes of direct writers.
    let script = "for n in $(seq 20); do exec 9>f-$n; head -c 300000 /dev/urandom >&9; sleep 0.12; exec 9>&-; done
        sleep 0.5; rm f-*
        for n in $(seq 100); do
            used=$(/mnt/surgetank status --state /mnt/state --json | python3 -c '
import json, sys
print(sum(tier[\"used_bytes\"] for tier in json.load(sys.stdin)[0][\"tiers\"]))')
            [ \"$used\" -gt 100000 ] || break; sleep 0.05
        done; echo $used >used";
    scene.run(&[], script).exits(0);
    let used: u64 = String::from_utf8(scene.read("used")).unwrap().trim().parse().unwrap();
    assert!(used <= 100_000, "{used} bytes are still charged");
    scene.is_clean();
}

/// Regression: a program that waited in fsync for a slow store could not be ended, not even by SIGKILL.
#[test]
fn fsync_waiting_for_the_store_can_be_killed() {
    let Some(mut scene) = Scene::new("fsync_interrupted") else {
        return;
    };
    scene.tier("fast", 256);
    // The copy takes 10 seconds; the program is killed meanwhile.
    let script = "dd if=/dev/zero of=f bs=1M count=1 conv=fsync & dd=$!; sleep 1; kill -KILL $dd; wait $dd || echo $?
        getfattr --absolute-names -n user.surgetank.state --only-values f";
    let options = ["--drain-bytes-per-second-max", "100K", "--fsync", "store"];
    scene.run(&options, script).exits(0).prints("137\ndraining");
    scene.holds("f", &vec![0; 1 << 20]);
    scene.is_clean();
}

/// PostgreSQL's postmaster signals its processes all the time. Regression: fsync, fdatasync, fsync of a directory and
/// an exchange of new files failed with EINTR wherever they waited for the store. The kernel reports every signal to
/// a FUSE server, also one whose handler has SA_RESTART. A local file system completes these calls.
#[test]
fn signals_do_not_interrupt_waits_for_the_store() {
    const PROGRAM: &str = "
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
handled = 0
def handler(*_):
    global handled
    handled += 1
signal.signal(signal.SIGALRM, handler)
os.mkdir('made')
def content(name):
    with open(name, 'wb') as file: file.write(bytes(200_000))
content('made/a'), content('made/b'), content('made/c')
new = os.open('new', os.O_RDWR | os.O_CREAT)
os.write(new, bytes(200_000))
old = os.open('old', os.O_RDWR)
os.write(old, bytes(200_000))
made = os.open('made', os.O_RDONLY)
calls = [
    ('fsync', lambda: libc.fsync(new)),
    ('fdatasync', lambda: libc.fdatasync(old)),
    ('exchange', lambda: libc.renameat2(-100, b'made/a', -100, b'made/b', 2)),
    ('fsync of a directory', lambda: libc.fsync(made)),
]
for restarts in [True, False]:
    signal.siginterrupt(signal.SIGALRM, not restarts)
    for name, call in calls:
        before = handled
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        failed = call()
        errno = ctypes.get_errno()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(name, os.strerror(errno) if failed else 'succeeds', flush=True)
        os.pwrite(new, bytes(200_000), 0), os.pwrite(old, bytes(200_000), 0)
        content('made/c'), content('made/d' if restarts else 'made/e')
assert handled, 'no signal arrived'
";
    let Some(mut scene) = Scene::new("fsync_signals") else {
        return;
    };
    scene.tier("fast", 256);
    std::fs::write("/mnt/signals.py", PROGRAM).unwrap();
    let names = ["fsync", "fdatasync", "exchange", "fsync of a directory"];
    let expected = names.map(|name| format!("{name} succeeds\n")).concat().repeat(2);
    for preload in [&["--no-preload"][..], &[]] {
        std::fs::write(scene.path("old"), "old").unwrap();
        let options = [&["--drain-bytes-per-second-max", "1M", "--fsync", "store"], preload].concat();
        scene.run(&options, "python3 /mnt/signals.py").exits(0).prints(&expected);
        std::fs::remove_dir_all(scene.path("made")).unwrap();
        std::fs::remove_file(scene.path("new")).unwrap();
        scene.is_clean();
    }
}

/// The kernel reports only the first signal of a call. Regression: a program that handled one signal and was killed
/// later could not end.
#[test]
fn kill_after_a_handled_signal_ends_an_fsync() {
    let Some(mut scene) = Scene::new("fsync_signal_kill") else {
        return;
    };
    scene.tier("fast", 256);
    let script = "python3 -c '
import os, signal
signal.signal(signal.SIGALRM, lambda *_: open(\"/mnt/handled\", \"w\"))
file = os.open(\"f\", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(1 << 20))
os.posix_spawn(\"/bin/sh\", [\"sh\", \"-c\", f\"sleep 1; kill -ALRM {os.getpid()}; sleep 1; kill -TERM {os.getpid()}\"], os.environ)
os.fsync(file)
print(\"the fsync ended\")' & wait $! || echo $?
        getfattr --absolute-names -n user.surgetank.state --only-values f";
    let options = ["--drain-bytes-per-second-max", "100K", "--fsync", "store", "--no-preload"];
    scene.run(&options, script).exits(0).prints("143\ndraining");
    scene.holds("f", &vec![0; 1 << 20]);
    scene.is_clean();
}

/// A new version keeps another user as the owner, as a write would. Regression: it also kept the old owner after a
/// program had set a new one.
#[test]
fn rewritten_file_gets_its_new_owner_in_the_store() {
    use std::os::unix::fs::MetadataExt;
    let Some(mut scene) = Scene::new("given_away") else {
        return;
    };
    scene.tier("fast", 256);
    for (name, owner) in [("a", 0), ("b", 1000), ("c", 1000)] {
        std::fs::write(scene.path(name), "old").unwrap();
        std::os::unix::fs::chown(scene.path(name), Some(owner), Some(owner)).unwrap();
    }
    scene.run(&[], "for f in a b c; do echo new >$f; done; chown 1000:1000 a; chown 0:0 b; chown 0:1000 c").exits(0);
    for (name, owner, group) in [("a", 1000, 1000), ("b", 0, 0), ("c", 0, 1000)] {
        let metadata = std::fs::metadata(scene.path(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (owner, group), "{name}");
        scene.holds(name, b"new\n");
    }
    scene.is_clean();
}

/// Regression: the agent knew the file by the name that was replaced, and lost its other names.
#[test]
fn other_hard_links_survive_the_replacement_of_one() {
    let Some(mut scene) = Scene::new("replaced_link") else {
        return;
    };
    scene.tier("fast", 256);
    for (name, others) in [("a", vec!["b"]), ("f1", vec!["f2", "f3"])] {
        std::fs::write(scene.path(name), "old\n").unwrap();
        others.iter().for_each(|other| std::fs::hard_link(scene.path(name), scene.path(other)).unwrap());
    }
    let script = "echo new >t; mv t a; echo more >>b; cat b
        rm f1; ln f2 f9; mv f9 f1; cat f1; stat -c %h f1";
    scene.run(&[], script).exits(0).prints("old\nmore\nold\n3\n");
    for (name, content) in [("a", "new\n"), ("b", "old\nmore\n"), ("f1", "old\n"), ("f2", "old\n"), ("f3", "old\n")] {
        scene.holds(name, content.as_bytes());
    }
    scene.is_clean();
}

/// `open(2)` with O_RDONLY and O_TRUNC. Regression: the open counted as a writer and the close as a reader, so the
/// file stayed open indefinitely.
#[test]
fn file_opened_only_to_truncate_it_is_sealed() {
    let Some(mut scene) = Scene::new("only_emptied") else {
        return;
    };
    scene.tier("fast", 256);
    std::fs::write(scene.path("old"), "old").unwrap();
    let script = "exec /usr/bin/python3 - <<'P'
import os
open('new', 'w').write('new')
for name in ('old', 'new'):
    held = os.open(name, os.O_RDONLY | os.O_TRUNC)
    print(os.read(held, 10), os.fstat(held).st_size)
P";
    for options in [&["--no-preload"][..], &[]] {
        std::fs::write(scene.path("old"), "old").unwrap();
        scene.run(options, script).exits(0).prints("b'' 0\nb'' 0\n");
        scene.holds("old", b"");
        scene.holds("new", b"");
        scene.is_clean();
        std::fs::remove_file(scene.path("new")).unwrap();
    }
}

/// Operations below a directory wait for the end of the run: links that were dropped with their file's last names,
/// and renames of directories. Regression: the directory's removal did not wait for them. They found no directory and
/// stopped the drain.
#[test]
fn removed_directory_with_late_operations_stops_no_drain() {
    let Some(mut scene) = Scene::new("removed_before_the_end") else {
        return;
    };
    scene.tier("fast", 256);
    let clone = "mkdir -p a/.git/objects b/.git/objects; echo x >a/.git/objects/1
        ln a/.git/objects/1 b/.git/objects/1; rm -rf a/.git b; echo later >c";
    let moved = "mkdir -p b/.git/objects/new; mv b/.git/objects/new b/.git/objects/1; rm -rf b; echo later >c";
    let replaced = "mkdir -p b/.git/objects/new d; mv b/.git/objects/new b/.git/objects/1
        rm -rf b/.git; mv -T d b; echo later >c";
    for script in [clone, moved, replaced] {
        scene.run(&["--retry", "2s"], script).exits(0);
        scene.holds("c", b"later\n");
        assert!(!scene.path("b/.git").exists(), "{script}");
        scene.is_clean();
        let _ = std::fs::remove_dir(scene.path("b"));
    }
}

/// Regression: the drain published the link early, with its directory, but not its file. The link then had no target.
#[test]
fn link_moved_into_a_late_directory_is_stored() {
    use std::os::unix::fs::MetadataExt;
    let Some(mut scene) = Scene::new("link_moved") else {
        return;
    };
    scene.tier("fast", 256);
    std::fs::create_dir(scene.path("e")).unwrap();
    scene.run(&[], "mkdir .git; echo x >.git/f; ln .git/f e/f; mv e .git/o").exits(0);
    scene.holds(".git/o/f", b"x\n");
    assert_eq!(std::fs::metadata(scene.path(".git/f")).unwrap().nlink(), 2);
    scene.is_clean();
}

/// A new version of a file does not change its directory's time, and neither does a close. The drain's work in the
/// store must not show there.
///
/// (rsync sets directory times while the close of a file is still on its way to the agent.)
#[test]
fn directory_keeps_its_time_when_a_file_drains_later() {
    directories_keep_their_times("directory_times", "--ordered=true");
}

#[test]
fn directory_keeps_its_time_when_unordered() {
    directories_keep_their_times("directory_times_unordered", "--unordered");
}

fn directories_keep_their_times(scene: &str, order: &str) {
    use std::os::unix::fs::MetadataExt;
    let Some(mut scene) = Scene::new(scene) else {
        return;
    };
    scene.tier("fast", 256);
    let script = "mkdir closed rewritten linked late changed
        exec 8>closed/f; echo x >rewritten/f; echo y >linked/f; echo z >changed/f
        sleep 0.3; exec 9>>late/f; ln linked/f late/g
        for d in closed rewritten linked late changed; do touch -d 2011-11-11T11:11:11.5Z $d; done
        sleep 0.3; echo more >>rewritten/f; echo more >>linked/f; exec 8>&- 9>&-; echo new >changed/g";
    scene.run(&[order], script).exits(0);
    for dir in ["closed", "rewritten", "linked", "late"] {
        let metadata = std::fs::metadata(scene.path(dir)).unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_321_009_871, 500_000_000), "{dir}");
    }
    assert!(
        std::fs::metadata(scene.path("changed")).unwrap().mtime() > 1_700_000_000,
        "a new name did not change the time"
    );
    scene.is_clean();
}

/// Regression: attributes waited for operations queued behind them in the directory, and those operations waited for
/// the attributes.
#[test]
fn unordered_chmod_and_new_file_do_not_deadlock() {
    use std::os::unix::fs::MetadataExt;
    let Some(mut scene) = Scene::new("chmod_unordered") else {
        return;
    };
    scene.tier("fast", 256);
    // The drain waits until all operations are queued.
    let script = "for d in 1 2 3 4 5; do mkdir $d; chmod 770 $d; echo $d >$d/f; chmod 750 $d; echo $d >$d/g; done";
    scene.run(&["--unordered", "--quiet-period", "500ms"], script).exits(0);
    for dir in ["1", "2", "3", "4", "5"] {
        assert_eq!(std::fs::metadata(scene.path(dir)).unwrap().mode() & 0o7777, 0o750);
        scene.holds(&format!("{dir}/f"), format!("{dir}\n").as_bytes());
        scene.holds(&format!("{dir}/g"), format!("{dir}\n").as_bytes());
    }
    scene.is_clean();
}

/// The store's own file is written while a reader has it open. Regression: the kernel clears set-user-id at every
/// such write, so the mode in the store differed from the one that programs saw.
#[test]
fn set_ids_of_a_file_written_in_place_follow_the_store() {
    let Some(mut scene) = Scene::new("sealing_set_ids") else { return };
    scene.tier("fast", 64);
    for name in ["kept", "lost"] {
        fs::write(scene.path(name), "old\n").unwrap();
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(0o6777)).unwrap();
    }
    let script = "exec 3<kept 4<lost; read -r line <&3; read -r line <&4
        echo more >>kept; setpriv --reuid 1000 --regid 1000 --clear-groups bash -c 'echo more >>lost'; stat -c %a kept lost";
    scene.run(&["--no-preload"], script).exits(0).prints("6777\n777\n");
    for (name, mode) in [("kept", 0o6777), ("lost", 0o777)] {
        assert_eq!(fs::metadata(scene.path(name)).unwrap().permissions().mode() & 0o7777, mode, "{name}");
        scene.holds(name, b"old\nmore\n");
    }
    scene.is_clean();
}

/// Copies for a directory that the store does not have yet are staged in its parent. Regression: they left the parent
/// after its time was set, and changed that time.
#[test]
fn directory_keeps_its_time_when_copies_leave_it() {
    keeps_its_time("times_above", "--ordered=true");
}

#[test]
fn directory_keeps_its_time_when_copies_leave_it_unordered() {
    keeps_its_time("times_above_unordered", "--unordered");
}

fn keeps_its_time(scene: &str, order: &str) {
    let Some(mut scene) = Scene::new(scene) else { return };
    scene.tier("fast", 16);
    fs::create_dir(scene.path("above")).unwrap();
    // The drain waits until all operations are queued.
    let script = "echo first >first; sleep 0.2; mkdir above/new; touch -d 2011-11-11 above
        for n in $(seq 9); do echo $n >above/new/$n; done; sleep 0.8";
    scene.run_held("drain.started:700", &["--quiet-period", "0s", order], script).exits(0);
    assert_eq!(scene.store_files().len(), 10);
    let times = scene.command("stat").args(["-c", "%y", "above"]).output().unwrap().stdout;
    assert!(times.starts_with(b"2011-11-11 "), "{}", String::from_utf8_lossy(&times));
}
