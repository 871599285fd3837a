//! fsync returns when the data is in the store. Other open files, and operations that another agent began earlier, do
//! not delay it.

use std::fs;
use std::path::Path;

use crate::scene::{Running, Scene, eventually};

/// A file was opened again during its fsync: the operation of that fsync was cancelled, and the catalog kept it.
/// Regression: the next agent delayed all later operations until that file was closed, so PostgreSQL hung.
#[test]
fn fsync_does_not_wait_for_another_open_file() {
    let Some(mut scene) = Scene::new("handoff-fsync") else { return };
    scene.tier("ram", 64);
    scene.beside("aside");
    let script = r#"
        cat >/mnt/aside/program.py <<'END'
import os, pathlib, threading, time

aside, until = pathlib.Path("/mnt/aside"), time.monotonic() + 1
held = os.open("held", os.O_CREAT | os.O_RDWR)

def opens():
    while time.monotonic() < until:
        os.close(os.open("held", os.O_RDWR))

opener = threading.Thread(target=opens)
opener.start()
while time.monotonic() < until:
    os.pwrite(held, b"held", 0)
    os.fsync(held)
opener.join()
(aside / "ready").touch()
while not (aside / "go").exists():
    time.sleep(0.01)
later = os.open("later", os.O_CREAT | os.O_RDWR)
os.write(later, b"later")
os.fsync(later)
(aside / "done").touch()
END
        python3 /mnt/aside/program.py
        "#;
    let mut running = scene.start(&["--no-preload", "--fsync", "store"], script);
    let aside = Path::new("/mnt/aside");
    eventually("files are written", || aside.join("ready").exists() || running.has_ended());
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    eventually("fsync returns", || aside.join("done").exists() || running.has_ended());
    running.ends().exits(0);
    scene.holds("held", b"held");
    scene.holds("later", b"later");
    scene.is_clean();
}

/// The agent dies after it begins to publish a file that is open again. The publication of a new file cannot be
/// undone.
#[test]
fn fsync_does_not_wait_for_a_begun_publication() {
    begun_and_open("handoff-fsync-begun", None);
}

/// Regression: the next agent published a partial version of a file that the store already had, while a program was
/// writing it.
#[test]
fn begun_publication_does_not_replace_the_stored_file() {
    begun_and_open("handoff-fsync-replaced", Some("of the store\n"));
}

fn begun_and_open(name: &str, old: Option<&str>) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.tier("ram", 64);
    let aside = scene.beside("aside");
    if let Some(old) = old {
        fs::write(scene.path("held"), old).unwrap();
    }
    let script = "echo held >held
        until [ -e /mnt/aside/go.reached ]; do sleep 0.01; done
        exec 3>held
        printf half >&3
        touch /mnt/aside/go
        echo later >later
        sync later
        touch /mnt/aside/done
        until [ -e /mnt/aside/seen ]; do sleep 0.01; done
        echo ' and half' >&3
        exec 3>&-";
    let mut command = scene.run_command(&["-v", "--no-preload", "--quiet-period", "0s", "--fsync", "store"], script);
    command.env("SURGETANK_HOLD", "drain.started:@/mnt/aside/go").env("SURGETANK_CRASH", "drain.started:1");
    let mut running = Running::of(command);
    eventually("fsync returns", || aside.join("done").exists() || running.has_ended());
    if let Some(old) = old {
        scene.holds("held", old.as_bytes());
    }
    fs::write(aside.join("seen"), "").unwrap();
    running.ends().exits(0).says(&["was replaced"]);
    scene.holds("held", b"half and half\n");
    scene.holds("later", b"later\n");
    scene.is_clean();
}

/// Regression: after a kill the next agent queued the files that programs had open. It then delayed all other
/// operations until they were closed.
#[test]
fn fsync_does_not_wait_for_files_open_at_a_kill() {
    let Some(mut scene) = Scene::new("handoff-fsync-open") else { return };
    scene.tier("ram", 64);
    let aside = scene.beside("aside");
    let script = "echo hold >held
        exec 3<>held
        echo held >&3
        touch /mnt/aside/ready
        until [ -e /mnt/aside/go ]; do sleep 0.01; done
        echo later >later
        sync later
        touch /mnt/aside/done
        until [ -e /mnt/aside/seen ]; do sleep 0.01; done
        exec 3>&-";
    let options = ["--no-preload", "--fsync", "store", "--quiet-period", "1h"];
    let mut running = scene.start(&options, script);
    eventually("a file is open", || aside.join("ready").exists() || running.has_ended());
    scene.replace_agent();
    fs::write(aside.join("go"), "").unwrap();
    eventually("fsync returns", || aside.join("done").exists() || running.has_ended());
    assert!(!scene.path("held").exists(), "an open file without an fsync is in the store");
    fs::write(aside.join("seen"), "").unwrap();
    running.ends().exits(0);
    scene.holds("held", b"held\n");
    scene.holds("later", b"later\n");
    scene.is_clean();
}
