//! The meaning of `fsync`, `fdatasync`, `msync`, `O_SYNC` and `O_DSYNC`: for each kind of tier, each value of `fsync
//! = auto | tier | store`, and each door. The test checks for "in the store" in the bare directory, while the file is
//! still open.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::scene::{Running, Scene, eventually};

/// One file for each kind of sync. The program announces each one when its call has returned, and continues after the
/// test has checked it.
const PROGRAM: &str = "
import mmap, os, time
def made(name, flags=0):
    return os.open(name, os.O_CREAT | os.O_RDWR | flags, 0o644)
def announce(name):
    open('/mnt/beside/' + name, 'w').close()
    while not os.path.exists('/mnt/beside/seen-' + name): time.sleep(0.01)
fd = made('fsync'); os.write(fd, b'fsync'); os.fsync(fd); announce('fsync'); os.close(fd)
fd = made('fdatasync'); os.write(fd, b'fdatasync'); os.fdatasync(fd); announce('fdatasync'); os.close(fd)
fd = made('O_SYNC', os.O_SYNC); os.write(fd, b'O_SYNC'); announce('O_SYNC'); os.close(fd)
fd = os.open('write_only', os.O_CREAT | os.O_WRONLY | os.O_SYNC, 0o644); os.write(fd, b'write_only'); announce('write_only'); os.close(fd)
fd = made('O_DSYNC', os.O_DSYNC); os.write(fd, b'O_DSYNC'); announce('O_DSYNC'); os.close(fd)
fd = made('msync'); os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096); m[0:5] = b'msync'; m.flush(); announce('msync')
m.close(); os.close(fd)
open('closed', 'w').write('closed')
os.mkdir('made'); d = os.open('.', os.O_RDONLY); os.fsync(d); announce('directory')
";

/// The kinds whose data is in the store, complete, when the call returns. Each scene needs a thread of its own.
fn synced_to_store(
    name: &str,
    volatile: bool,
    fsync: Option<&'static str>,
    door: &'static [&str],
) -> Option<Vec<&'static str>> {
    let name = name.to_owned();
    std::thread::spawn(move || stored_after_sync(&name, volatile, fsync, door)).join().unwrap()
}

fn stored_after_sync(name: &str, volatile: bool, fsync: Option<&str>, door: &[&str]) -> Option<Vec<&'static str>> {
    let mut scene = Scene::new(name)?;
    scene.state_elsewhere();
    scene.beside("beside");
    match volatile {
        true => drop(scene.tier("fast", 1100)),
        false => {
            let disk = scene.ext4("disk", 2200);
            scene.other_tier("fast", &disk, 2000);
        }
    }
    fs::write("/mnt/program.py", PROGRAM).unwrap();
    let mut options = vec!["--quiet-period", "1h"];
    options.extend(fsync.iter().flat_map(|fsync| ["--fsync", fsync]));
    options.extend(door);
    let mut running: Running = scene.start(&options, "exec python3 /mnt/program.py");
    let mut there = Vec::new();
    for way in ["fsync", "fdatasync", "O_SYNC", "write_only", "O_DSYNC", "msync", "directory"] {
        eventually(way, || {
            assert!(!running.has_ended(), "{}", running.so_far());
            Path::new("/mnt/beside").join(way).exists()
        });
        let is = match way {
            "directory" => scene.path("made").is_dir(),
            _ => fs::read(scene.path(way)).is_ok_and(|bytes| bytes.starts_with(way.as_bytes())),
        };
        if is {
            there.push(way);
        }
        fs::write(format!("/mnt/beside/seen-{way}"), "").unwrap();
    }
    running.ends().exits(0);
    for way in ["fsync", "fdatasync", "O_SYNC", "write_only", "O_DSYNC", "closed"] {
        scene.holds(way, way.as_bytes());
    }
    scene.is_clean();
    if !volatile {
        assert!(std::process::Command::new("umount").arg("/mnt/disk").status().unwrap().success());
    }
    Some(there)
}

const MOUNT: &[&str] = &["--no-preload"];
const MEDIATED: &[&str] = &["--no-preload", "--direct", "false"];
const SHIM: &[&str] = &[];

fn means_the_store(door_name: &str, door: &'static [&str]) {
    for (case, volatile, fsync) in
        [("auto", true, None), ("memory", true, Some("store")), ("disk", false, Some("store"))]
    {
        let Some(there) = synced_to_store(&format!("synced_{door_name}_{case}"), volatile, fsync, door) else { return };
        // (The kernel does not report msync on a file that it passes through; see docs/semantics.md.)
        let unreported = |way: &str| way == "msync" && fsync.is_none() && door == MOUNT;
        let expected: Vec<&str> = ALL.iter().copied().filter(|way| !unreported(way)).collect();
        assert_eq!(there, expected, "{case}");
    }
}

fn means_the_tier(door_name: &str, door: &'static [&str]) {
    for (case, volatile, fsync) in
        [("auto_tier", false, None), ("memory_tier", true, Some("tier")), ("disk_tier", false, Some("tier"))]
    {
        let Some(there) = synced_to_store(&format!("synced_{door_name}_{case}"), volatile, fsync, door) else { return };
        assert_eq!(there, [""; 0], "{case}");
    }
}

const ALL: &[&str] = &["fsync", "fdatasync", "O_SYNC", "write_only", "O_DSYNC", "msync", "directory"];

#[test]
fn sync_means_the_store_through_the_mount() {
    means_the_store("mount", MOUNT);
}

#[test]
fn sync_means_the_store_through_the_mount_mediated() {
    means_the_store("mediated", MEDIATED);
}

#[test]
fn sync_means_the_store_with_the_shim() {
    means_the_store("shim", SHIM);
}

#[test]
fn sync_means_the_tier_through_the_mount() {
    means_the_tier("mount", MOUNT);
}

#[test]
fn sync_means_the_tier_through_the_mount_mediated() {
    means_the_tier("mediated", MEDIATED);
}

#[test]
fn sync_means_the_tier_with_the_shim() {
    means_the_tier("shim", SHIM);
}

/// `surgetank wait PATH` waits for the store, whatever the setting of `fsync`.
#[test]
fn wait_means_the_store_on_every_tier() {
    for (case, volatile) in [("memory", true), ("disk", false)] {
        std::thread::spawn(move || {
            let Some(mut scene) = Scene::new(&format!("synced_wait_{case}")) else { return };
            match volatile {
                true => drop(scene.tier("fast", 64)),
                false => {
                    let disk = scene.ext4("disk", 100);
                    scene.other_tier("fast", &disk, 64);
                }
            }
            let script = "echo waited > waited; ! [ -e /mnt/store/waited ]
                /mnt/surgetank wait --state /mnt/state waited; cat /mnt/store/waited";
            let store = scene.beside("store");
            let options = ["--fsync", "tier", "--quiet-period", "1h", "--store", store.to_str().unwrap()];
            scene.run(&options, script).exits(0).prints("waited\n");
            if !volatile {
                assert!(std::process::Command::new("umount").arg("/mnt/disk").status().unwrap().success());
            }
        })
        .join()
        .unwrap();
    }
}

/// A version that fsync brought to the store is not copied again when the file is closed. A write after the fsync is, even
/// one through a mapping, which changes no time.
#[test]
fn close_after_fsync_publishes_only_later_writes() {
    for (case, door) in [("mount", MOUNT), ("mediated", MEDIATED), ("shim", SHIM)] {
        std::thread::spawn(move || {
            let Some(mut scene) = Scene::new(&format!("synced_close_{case}")) else { return };
            scene.state_elsewhere();
            scene.tier("fast", 64);
            let store = scene.beside("store");
            let script = r#"python3 - <<'END'
import mmap, os, subprocess

def stored(name):
    return os.stat(f"/mnt/store/{name}").st_ino

def close(file, name):
    os.close(file)
    subprocess.run(["/mnt/surgetank", "wait", "--state", "/mnt/state", name], check=True)

def fresh(name):
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o640)
    os.write(file, b"a" * 100_000)
    return file

file = fresh("unchanged")
os.fsync(file)
first = stored("unchanged")
os.fsync(file)
assert stored("unchanged") == first, "the second fsync copied again"
close(file, "unchanged")
assert stored("unchanged") == first, "the close copied again"

file = fresh("written")
os.fsync(file)
os.pwrite(file, b"b", 50_000)
close(file, "written")

file = fresh("mapped")
memory = mmap.mmap(file, 100_000)
memory[1] = memory[50_000] = ord("b")
os.fsync(file)
assert open("/mnt/store/mapped", "rb").read(2) == b"ab"
memory[50_000] = ord("c")
memory.close()
close(file, "mapped")

file = fresh("mode")
os.fsync(file)
os.fchmod(file, 0o604)
close(file, "mode")
END"#;
            let options = [door, &["--store", store.to_str().unwrap()]].concat();
            scene.run(&options, script).exits(0);
            let read = |name: &str| fs::read(store.join(name)).unwrap();
            assert_eq!(read("unchanged"), vec![b'a'; 100_000]);
            assert_eq!((read("written")[50_000], read("mapped")[1], read("mapped")[50_000]), (b'b', b'b', b'c'));
            let mode = fs::metadata(store.join("mode")).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o604);
        })
        .join()
        .unwrap();
    }
}

/// The drain copies only what changed between two fsyncs: a version is made of the one before the last.
#[test]
fn repeated_fsyncs_copy_what_changed() {
    for (case, door) in [("mount", MOUNT), ("mediated", MEDIATED), ("shim", SHIM)] {
        std::thread::spawn(move || {
            let Some(mut scene) = Scene::new(&format!("synced_bytes_{case}")) else { return };
            scene.state_elsewhere();
            scene.tier("fast", 64);
            let script = r#"python3 - <<'END'
import os
file = os.open("data", os.O_RDWR | os.O_CREAT, 0o640)
os.write(file, os.urandom(4 << 20))
for turn in range(67):
    os.pwrite(file, os.urandom(8192), turn * 8192)
    os.fdatasync(file)
END"#;
            let ended = scene.run(door, script).exits(0);
            // Two whole copies, then 65 times two changes of 8 KiB.
            let words: Vec<&str> = ended.stderr.split_whitespace().collect();
            let line = words.windows(5).find(|five| five[0] == "drain:" && five[4] == "MiB,");
            let copied: f64 = line.unwrap_or_else(|| panic!("{}", ended.stderr))[3].parse().unwrap();
            assert!((8.5..=10.0).contains(&copied), "{case}: {copied} MiB were copied");
        })
        .join()
        .unwrap();
    }
}

/// The store has each version as a whole when the call returns, a reader of an earlier version keeps it, and nothing is left.
#[test]
fn repeated_fsyncs_publish_whole_versions() {
    for (case, door) in [("mount", MOUNT), ("mediated", MEDIATED), ("shim", SHIM)] {
        std::thread::spawn(move || {
            let Some(mut scene) = Scene::new(&format!("synced_again_{case}")) else { return };
            scene.state_elsewhere();
            scene.tier("fast", 64);
            let store = scene.beside("store");
            let script = r#"python3 - <<'END'
import mmap, os, random, subprocess

dice = random.Random(7)
size = 3 << 20
content = bytearray(dice.randbytes(size))
file = os.open("data", os.O_RDWR | os.O_CREAT, 0o640)
os.write(file, content)

def write(at, data):
    os.pwrite(file, data, at)
    content[at:at + len(data)] = data

def sync(how=os.fdatasync):
    how(file)
    stored = open("/mnt/store/data", "rb").read()
    assert stored == content, (len(stored), len(content))

for turn in range(12):
    write(dice.randrange(size // 8192) * 8192, dice.randbytes(8192))
    sync(os.fsync if turn % 5 == 0 else os.fdatasync)

# A reader keeps the version that it opened.
readers = []
for turn in range(6):
    readers.append((open("/mnt/store/data", "rb"), content[:]))
    write(100_000 * turn, dice.randbytes(5))
    sync()
for reader, version in readers:
    assert reader.read() == version
    reader.close()

# Other ways of writing, and other lengths.
memory = mmap.mmap(file, size)
memory[70_000:70_003] = content[70_000:70_003] = b"map"
memory.flush()
memory.close()
sync()
for length in (size + 5, size + 300_000, size - 4097, 1_000_000, 1_000_001, 4096, 100):
    os.ftruncate(file, length)
    content = content[:length].ljust(length, b"\0")
    sync()
    write(length - 3, b"end")
    sync()
os.fchmod(file, 0o604)
for turn in range(4):
    write(7 + turn, b"x")
    sync()
os.setxattr(file, "user.a", b"1")
for turn in range(3):
    write(20 + turn, b"a")
    sync()
    assert os.getxattr("/mnt/store/data", "user.a") == b"1"
os.removexattr(file, "user.a")
for turn in range(3):
    write(30 + turn, b"r")
    sync()
    assert os.listxattr("/mnt/store/data") == [], turn
os.rename("data", "moved")
write(1, b"moved")
os.fsync(file)
assert open("/mnt/store/moved", "rb").read() == content
# The last version is published by the close.
write(2, b"last")
os.close(file)
subprocess.run(["/mnt/surgetank", "wait", "--state", "/mnt/state", "moved"], check=True)
assert open("/mnt/store/moved", "rb").read() == content
END"#;
            let options = [door, &["--store", store.to_str().unwrap()]].concat();
            scene.run(&options, script).exits(0);
            assert_eq!(fs::metadata(store.join("moved")).unwrap().permissions().mode() & 0o777, 0o604);
            let names: Vec<_> = fs::read_dir(&store).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(names, ["moved"], "an earlier version is left");
        })
        .join()
        .unwrap();
    }
}

/// Another client changes the file between two fsyncs, or the earlier version under its hidden name: both versions are kept, and
/// what the program synced has its own bytes.
#[test]
fn change_by_another_client_between_fsyncs_is_kept() {
    let Some(mut scene) = Scene::new("synced_again_another") else { return };
    scene.state_elsewhere();
    scene.tier("fast", 64);
    let store = scene.beside("store");
    let script = r#"python3 - <<'END'
import glob, os, random

content = bytearray(random.Random(8).randbytes(1 << 20))
file = os.open("data", os.O_RDWR | os.O_CREAT, 0o640)
os.write(file, content)

def sync(turn):
    content[turn * 9000:turn * 9000 + 4] = b"turn"
    os.pwrite(file, b"turn", turn * 9000)
    os.fsync(file)

for turn in range(6):
    sync(turn)
spares = glob.glob("/mnt/store/.surgetank-tmp-*")
assert len(spares) == 1, spares
with open(spares[0], "r+b") as spare:
    spare.seek(500_000)
    spare.write(b"another")
sync(6)
sync(7)
assert open("/mnt/store/data", "rb").read() == content
with open("/mnt/store/data", "r+b") as other:
    other.seek(600_000)
    other.write(b"another")
for turn in range(8, 14):
    sync(turn)
os.close(file)
END"#;
    let ended = scene.run(&["--store", store.to_str().unwrap()], script);
    ended.says(&["changed in the store by another client, both kept: 1"]);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for (path, _) in crate::scene::files_below(&store) {
        let bytes = fs::read(store.join(&path)).unwrap();
        assert_eq!(bytes.len(), 1 << 20, "{path:?}");
        match &bytes[600_000..600_007] == b"another" {
            true => theirs.push(bytes),
            false => ours.push(bytes),
        }
    }
    assert_eq!((ours.len(), theirs.len()), (1, 1), "each version once");
    assert_eq!(&ours[0][13 * 9000..13 * 9000 + 4], b"turn");
    assert_ne!(&ours[0][500_000..500_007], b"another", "a changed spare was used");
}
