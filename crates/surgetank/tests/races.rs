//! Programs that use the same name at once: they make, open, replace and delete it, through one door and through two.
//! The result must be one that a plain directory can give, and no file may be lost.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::scene::Scene;

/// `ROLE SECONDS NAME`: repeats its operation until the time ends. An errno that a plain directory would not give
/// ends the program.
const PROGRAM: &str = r#"
import errno, os, sys, time
role, seconds, name = sys.argv[1], float(sys.argv[2]), sys.argv[3]
end, turns = time.monotonic() + seconds, 0
while time.monotonic() < end:
    turns += 1
    try:
        if role == "open":
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
            if turns % 3 == 0:
                os.write(descriptor, b"x")
            os.close(descriptor)
        elif role == "delete":
            os.unlink(name)
        elif role == "replace":
            new = f"{name}.{os.getpid()}"
            os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            os.rename(new, name)
    except FileNotFoundError:
        if role != "delete":
            raise
if turns < 50:
    raise SystemExit(f"{role} had {turns} turns only: the test proves nothing")
"#;

fn prepare(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 32);
    Some(scene)
}

/// Some processes open or make the file, other processes delete and replace it; half of them use the mount.
/// Afterwards the tier must be empty in the agent's accounts, and the last version must be in the store.
fn busy_name(name: &str, options: &[&str], other_half: &str) {
    let Some(scene) = prepare(name) else { return };
    fs::write(scene.path("program.py"), PROGRAM).unwrap();
    let script = format!(
        "pids=
         for one in 1 2; do python3 program.py open 3 busy & pids=\"$pids $!\"; done
         {other_half} python3 program.py open 3 busy & pids=\"$pids $!\"
         {other_half} python3 program.py delete 3 busy & pids=\"$pids $!\"
         python3 program.py replace 3 busy & pids=\"$pids $!\"
         for pid in $pids; do wait $pid || exit 1; done
         echo last > busy"
    );
    let ended = scene.run(options, &script).exits(0);
    assert!(!ended.stderr.contains("at risk"), "bytes of deleted files still count: {}", ended.stderr);
    assert_eq!(fs::read(scene.path("busy")).unwrap(), b"last\n");
}

/// Regression: the open failed when the file was deleted between the look-up and the open.
#[test]
fn open_during_a_deletion_succeeds_through_the_mount() {
    busy_name("busy_mount", &["--no-preload"], "");
}

/// Regression: the open failed when the file was deleted between the look-up and the open.
#[test]
fn open_during_a_deletion_succeeds_with_the_shim() {
    busy_name("busy_shim", &[], "");
}

/// Regression: one door deleted the plain file that another door had put in its place, and the content was lost.
#[test]
fn file_made_at_two_doors_is_kept() {
    busy_name("busy_doors", &[], "SURGETANK_PRELOAD=0");
}

/// Regression: several threads of the agent carried out the kernel's close messages, and one message overtook another.
#[test]
fn closes_are_applied_in_order() {
    let Some(scene) = prepare("overtaking") else { return };
    fs::write(
        scene.path("writer.py"),
        "import os, sys\nos.mkdir(sys.argv[1])\nfor n in range(400):\n    with open(f'{sys.argv[1]}/{n:04}', 'w') as f: f.write('x')\n",
    )
    .unwrap();
    // Other processes keep the agent's further threads busy: each fsync waits in the store.
    let script = "pids=
        for one in a b; do python3 writer.py $one & pids=\"$pids $!\"; done
        for one in 1 2 3; do (for n in $(seq 60); do echo $n > s$one; sync s$one; stat s$one >/dev/null; done) & pids=\"$pids $!\"; done
        for pid in $pids; do wait $pid; done";
    scene.run(&["--no-preload", "--fsync", "store", "--quiet-period", "0s"], script).exits(0);
    // The change time in the store is that of the rename that published the file.
    let changed = |name: String| {
        let stat = fs::metadata(scene.path(&name)).unwrap();
        (stat.ctime(), stat.ctime_nsec())
    };
    for writer in ["a", "b"] {
        for n in 1..400 {
            let (before, this) = (format!("{writer}/{:04}", n - 1), format!("{writer}/{n:04}"));
            assert!(changed(before.clone()) <= changed(this.clone()), "{this} was published before {before}");
        }
    }
}

/// rsync sets a file's times by name right after its close, and renames it. Regression: the seal read the plain file's
/// times before that and stored them after it, so the next rsync copied the file again.
#[test]
fn times_set_after_a_close_are_kept() {
    let program = "
import os
for n in range(3):
    with open(f'f{n}', 'w') as f: f.write('x')
    os.utime(f'f{n}', (1321009871, 1321009871))
    os.chmod(f'f{n}', 0o640)
    os.rename(f'f{n}', f'g{n}')
";
    let Some(scene) = prepare("times_after_close") else { return };
    fs::write(scene.path("set.py"), program).unwrap();
    let script = "python3 set.py; sleep 0.5; stat -c '%n %a %Y' g*";
    for door in [&["--no-preload"][..], &[], &["--door", "seccomp"]] {
        let ended = scene.run_held("seal.looked:100", door, script).exits(0);
        assert_eq!(ended.stdout, "g0 640 1321009871\ng1 640 1321009871\ng2 640 1321009871\n", "{door:?}");
        for name in ["g0", "g1", "g2"] {
            let stat = fs::metadata(scene.path(name)).unwrap();
            assert_eq!((stat.mtime(), stat.mode() & 0o777), (1_321_009_871, 0o640), "{door:?}");
            fs::remove_file(scene.path(name)).unwrap();
        }
    }
}

/// A file is removed while the drain copies it. Regression: on a busy machine the drain discarded the copy after a
/// program had set the directory's times.
#[test]
fn discarded_copy_keeps_the_time_of_its_directory() {
    let Some(scene) = prepare("late_discard") else { return };
    fs::create_dir(scene.path("d")).unwrap();
    let script = "echo x >d/f; sleep 0.2; rm d/f; touch -d @1000000000 d; sleep 1; stat -c %Y d";
    let ended = scene.run_held("store.copied:500", &["--no-preload", "--quiet-period", "0s"], script).exits(0);
    assert_eq!(ended.stdout, "1000000000\n");
    assert_eq!(fs::metadata(scene.path("d")).unwrap().mtime(), 1_000_000_000);
}

/// The drain has renamed the directory in the store, and has not recorded that yet. Regression: an open of a file in it
/// failed with ENOENT.
#[test]
fn open_succeeds_while_its_directory_is_renamed() {
    let Some(scene) = prepare("race_dir_renamed") else { return };
    fs::create_dir(scene.path("d")).unwrap();
    fs::write(scene.path("d/f"), "content\n").unwrap();
    let script = "cat d/f; mv d e; sleep 0.15; cat e/f; printf more >>e/f; cat e/f";
    for door in [&["--no-preload", "--quiet-period", "0s"][..], &["--quiet-period", "0s"]] {
        let ended = scene.run_held("drain.renamed:400", door, script).exits(0);
        assert_eq!(ended.stdout, "content\ncontent\ncontent\nmore");
        scene.holds("e/f", b"content\nmore");
        fs::rename(scene.path("e"), scene.path("d")).unwrap();
        fs::write(scene.path("d/f"), "content\n").unwrap();
    }
}

/// Regression: with two exchanged directories an open returned the other directory's file, and a writer continued in a
/// copy of it.
#[test]
fn open_finds_its_file_while_directories_are_exchanged() {
    let Some(scene) = prepare("race_dirs_exchanged") else { return };
    for name in ["d", "e"] {
        fs::create_dir(scene.path(name)).unwrap();
        fs::write(scene.path(name).join("f"), format!("of {name}\n")).unwrap();
    }
    let exchange = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)
assert libc.renameat2(-100, b'd', -100, b'e', 2) == 0, ctypes.get_errno()";
    let script = format!("cat d/f e/f; python3 -c \"{exchange}\"; sleep 0.15; cat d/f e/f; echo more >>d/f; cat d/f");
    let options = ["--no-preload", "--quiet-period", "0s", "--store-ttl", "10s"];
    let ended = scene.run_held("drain.renamed:400", &options, &script).exits(0);
    assert_eq!(ended.stdout, "of d\nof e\nof e\nof d\nof e\nmore\n");
    scene.holds("d/f", b"of e\nmore\n");
    scene.holds("e/f", b"of d\n");
}

/// Regression: the drain staged a copy into a directory that the batch before it removed, and looked for the copy there
/// indefinitely.
#[test]
fn copy_staged_into_a_removed_directory_is_made_again() {
    let Some(scene) = prepare("race_staged_in_removed") else { return };
    let script = "mkdir d; echo one >d/f; sleep 2
        mkdir x; sleep 0.2
        mv d/f f; rmdir d
        sleep 0.6; echo two >>f";
    let ended = scene.run_held("drain.started:600", &["--no-preload", "--quiet-period", "0s", "--retry", "5s"], script);
    ended.exits(0);
    scene.holds("f", b"one\ntwo\n");
    assert!(!scene.path("d").exists());
    scene.is_clean();
}

/// The file has two names and is written in place, just when the drain sets its attributes. Two regressions: the
/// drain set the older time on the newer content. It also recorded the old state as the store's, and took its own
/// removal for a conflict.
fn written_in_place_meanwhile(name: &str, held: &str) {
    let Some(scene) = prepare(name) else { return };
    fs::write(scene.path("one"), [b'x'; 5000]).unwrap();
    fs::hard_link(scene.path("one"), scene.path("two")).unwrap();
    let script = "touch -d 2001-01-01 one; sleep 0.3; truncate -s 100 one; stat -c %Y one; sleep 1; rm one";
    let ended = scene.run_held(held, &["--quiet-period", "0s"], script).exits(0);
    assert!(!scene.path("one").exists());
    let kept = fs::metadata(scene.path("two")).unwrap();
    assert_eq!((kept.size(), kept.mtime().to_string().as_str()), (100, ended.stdout.trim()));
}

/// Regression: the drain set an older time after a program had written the file in place.
#[test]
fn older_time_is_not_set_after_a_write_in_place() {
    written_in_place_meanwhile("late_time", "store.set_meta:700");
}

/// Regression: the drain mistook a file that was written in place meanwhile for another client's.
#[test]
fn file_written_in_place_is_not_a_conflict() {
    written_in_place_meanwhile("late_identity", "drain.attributes_set:700");
}

/// Regression: a program made a file between the check that a directory is empty and its replacement, and the file was
/// lost.
#[test]
fn directory_with_a_new_file_is_not_replaced_as_empty() {
    let Some(mut scene) = Scene::new("race_not_empty") else { return };
    scene.tier("ram", 2048); // (in a small tier the agent is not the only one that makes the first file)
    let program = "
import errno, os, subprocess, sys, time
code = 'import os; os.rename(\"other\", \"d\")'
os.mkdir('d'); os.mkdir('other')
one = subprocess.Popen([sys.executable, '-S', '-c', code], env={'PATH': os.environ['PATH']}, stderr=subprocess.PIPE, text=True)
while not os.path.exists('/mnt/go.reached'): time.sleep(0.01)
with open('d/late', 'w') as file: file.write('late')
open('/mnt/go', 'w').close()
errors = one.communicate()[1]
assert 'Directory not empty' in errors, (errors, os.listdir('.'), os.listdir('d'))
assert os.listdir('d') == ['late'] and os.path.isdir('other')
";
    fs::write("/mnt/rename.py", program).unwrap();
    scene.run_held("rename.looked:@/mnt/go", &[], "python3 /mnt/rename.py").exits(0);
    scene.holds("d/late", b"late");
}

/// Regression: the agent let the kernel cache a missing name for an hour while a directory existed only on the tier.
/// The kernel kept that entry after the store had the directory.
fn absent_name_is_found(name: &str, script: &str, meanwhile: impl FnOnce(&Scene)) {
    let Some(scene) = prepare(name) else { return };
    let aside = scene.beside("aside");
    let script = format!(
        "look() {{ [ -e $1/theirs ] && echo early; touch /mnt/aside/looked; until [ -e /mnt/aside/made ]; do sleep 0.01; done; }}
         find() {{ for turn in $(seq 300); do [ -e $1/theirs ] && break; sleep 0.1; done; cat $1/theirs; }}
         {script}"
    );
    let running = scene.start(&["--no-preload", "--quiet-period", "0s", "--fsync", "store"], &script);
    crate::scene::eventually("the name is looked up", || aside.join("looked").exists());
    meanwhile(&scene);
    fs::write(aside.join("made"), "").unwrap();
    running.ends().exits(0).prints("theirs\n");
    scene.is_clean();
}

/// The drain makes directories of this name in the store at the end, or when one of them is synced.
#[test]
fn absent_name_is_found_when_the_store_has_the_directory() {
    absent_name_is_found("absent_merged", "mkdir .venv; look .venv; sync .venv; find .venv", |scene| {
        fs::create_dir(scene.path(".venv")).unwrap();
        fs::write(scene.path(".venv/theirs"), "theirs\n").unwrap();
    });
}

#[test]
fn absent_name_is_found_after_the_agent_is_replaced() {
    absent_name_is_found("absent_replaced", "mkdir d; look d; find d", |scene| {
        crate::scene::eventually("the store has the directory", || scene.path("d").exists());
        fs::write(scene.path("d/theirs"), "theirs\n").unwrap();
        scene.replace_agent();
    });
}

/// Regression: the agent freed a gigabyte of memory, a quarter of a second, under the lock that every request needs.
#[test]
fn deletion_of_a_large_file_blocks_no_other_request() {
    let Some(scene) = prepare("races_large") else { return };
    scene.beside("beside");
    // The deletion continues when all other commands are done. If it blocked them, the run would not end.
    let script = "
        mkdir sub; head -c 4M /dev/urandom >sub/large; echo 1 >other
        (rm sub/large; touch /mnt/beside/removed) &
        until [ -e /mnt/beside/go.reached ]; do sleep 0.01; done
        cat other; touch new; mkdir d; [ ! -e /mnt/beside/removed ] || echo removed
        touch /mnt/beside/go; wait; ls /mnt/beside; echo *";
    let ended = scene.run_held("remains.held:@/mnt/beside/go", &["--no-preload"], script).exits(0);
    assert_eq!(ended.stdout, "1\ngo\ngo.reached\nremoved\nd new other sub\n");
    scene.is_clean();
}

/// On an ordinary user's mount the agent writes what comes through the mount, and programs with the shim write the plain file.
#[test]
fn appends_through_both_doors_are_all_there() {
    let Some(mut scene) = Scene::of_user("both-append") else { return };
    scene.tier("fast", 64);
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"1M\"\n").unwrap();
    let program = "
import os, sys
log = os.open('log', os.O_WRONLY | os.O_APPEND)
open(sys.argv[1], 'w').close()
while not (os.path.exists('one') and os.path.exists('two')): pass
for n in range(5000): os.write(log, sys.argv[1].encode() + b'\\n')
";
    fs::write("/mnt/program.py", program).unwrap();
    let script = "python3 -c 'open(\"log\", \"w\")'
        python3 /mnt/program.py one & first=$!
        env -u LD_PRELOAD -u SURGETANK_SHIM python3 /mnt/program.py two & second=$!
        wait $first; wait $second
        [ $(grep -cx one log) = 5000 ]; [ $(grep -cx two log) = 5000 ]; [ $(wc -c <log) = 40000 ]";
    scene.run(&["--config", "/mnt/small.toml"], &format!("set -eu\n{script}")).exits(0);
    assert_eq!(fs::metadata(scene.path("log")).unwrap().len(), 40_000);
}
