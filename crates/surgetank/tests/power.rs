//! The machine loses its power, or crashes: data that the tier's file system has not written is lost. The test shuts
//! down an ext4 of its own, as the developers of ext4 do in their tests (EXT4_IOC_SHUTDOWN). The machine then
//! "boots": it gets another boot id.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

mod failing;

use std::collections::BTreeMap;
use std::fs;

use crate::scene::{Scene, eventually};
use failing::{CLOSED, PUT, TIER, begin, go_on_when_synced, prepare, store_of, synced, until_the_power_fails};

/// Acknowledges a loss; until then every run names it.
const FORGET: &str = "/mnt/surgetank scavenge --state /mnt/disk/state --over /mnt/project --forget";

const PROGRAM: &str = "
import os, time
def put(name, text, flags=0, sync=False, close=True):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    os.write(fd, text)
    if sync: os.fsync(fd)
    if close: os.close(fd)
os.mkdir('d')
put('d/in', b'i' * 5000, sync=True)
put('synced', b's' * 100000, sync=True)
put('renamed.tmp', b'r' * 7000, sync=True)
os.rename('renamed.tmp', 'renamed')
fd = os.open('d', os.O_RDONLY); os.fsync(fd); os.close(fd)
put('old', b'after', flags=os.O_TRUNC)
put('log', b'more\\n', flags=os.O_APPEND)
put('new', b'n' * 3000)
put('result.tmp', b'after')
os.rename('result.tmp', 'result')
put('held', b'h' * 9000, sync=True, close=False)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";

fn what_is_left(name: &str, options: &[&str]) {
    let Some(scene) = prepare(name) else { return };
    for journal_too in [false, true] {
        until_the_power_fails(&scene, options, PROGRAM, journal_too);
        let ended = scene.run(&TIER, "cat old log result; test ! -e result.tmp").exits(3);
        assert_eq!(ended.stdout, "before\nbefore\nbefore\n", "{}", ended.stderr);
        let (mut there, apart) = store_of(&scene);
        // The file was open when the power failed. It has at least its synced data.
        let held = there.remove("held").unwrap();
        assert!(held.len() >= 9000 && held[..9000].iter().all(|byte| *byte == b'h'), "{}", held.len());
        let before = b"before\n".to_vec();
        let mut expected = BTreeMap::from([
            ("d/in".to_owned(), vec![b'i'; 5000]),
            ("synced".to_owned(), vec![b's'; 100_000]),
            ("renamed".to_owned(), vec![b'r'; 7000]),
        ]);
        expected.extend(["old", "log", "result"].map(|name| (name.to_owned(), before.clone())));
        assert_eq!(there, expected, "journal too: {journal_too}; apart: {apart:?}\n{}", ended.stderr);
        scene.run(&TIER, &format!("{FORGET}; rm -rf d synced renamed held *unproven*")).exits(0);
    }
}

#[test]
fn synced_data_survives_power_loss_through_the_mount() {
    what_is_left("power_mount", &["--no-preload"]);
}

#[test]
fn synced_data_survives_power_loss_with_the_shim() {
    what_is_left("power_shim", &[]);
}

#[test]
fn synced_data_survives_power_loss_with_seccomp() {
    what_is_left("power_seccomp", &["--door", "seccomp"]);
}

/// Half of the file had reached the disk: there it has the full size, and only a part of its content.
#[test]
fn partial_file_is_kept_beside_its_name() {
    let Some(scene) = prepare("power_half") else { return };
    let program = "
import os, subprocess, time
with open('old', 'r+b', 0) as f:
    f.write(b'a' * 65536)
    subprocess.run(['sync', '-f', '/mnt/disk'], check=True)
    f.write(b'b' * 65536)
with open('new', 'wb', 0) as f:
    f.write(b'a' * 65536)
    subprocess.run(['sync', '-f', '/mnt/disk'], check=True)
    f.write(b'b' * 65536)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    until_the_power_fails(&scene, &["--no-preload"], program, true);
    let ended = scene.run(&TIER, "true").exits(3).says(&["unproven", "the store keeps the version before"]);
    let (there, apart) = store_of(&scene);
    assert_eq!(there["old"], b"before\n", "{}", ended.stderr);
    assert!(!there.contains_key("new"));
    for name in ["old", "new"] {
        assert!(apart[name].starts_with(&[b'a'; 65536]), "{name} has {} bytes", apart[name].len());
    }
}

/// A file that has been closed for a while is complete without an fsync.
#[test]
fn file_closed_long_ago_is_complete() {
    let Some(scene) = prepare("power_later") else { return };
    let program = format!(
        "import os, time
{CLOSED}
for n in range(300):
    with open(f'f{{n}}', 'wb') as f: f.write(b'%d' % n * 1000)
with open('old', 'w') as f: f.write('after')
with open('log', 'a') as f: f.write('more\\n')
os.rename('f0', 'result')
# A later sync puts the rename into the catalog.
with open('last', 'w') as f: f.write('last')
closed()
"
    );
    let running = begin(&scene, &["--sync-after", "100ms"], &program);
    go_on_when_synced(&scene, 0, 303);
    scene.power_fails("disk", false);
    drop(running);
    let ended = scene.run(&TIER, "true").exits(0);
    let (there, apart) = store_of(&scene);
    assert!(apart.is_empty(), "{:?}\n{}", apart.keys(), ended.stderr);
    assert_eq!(
        (&there["old"][..], &there["log"][..], &there["result"][..]),
        (&b"after"[..], &b"before\nmore\n"[..], &b"0".repeat(1000)[..])
    );
    for n in 1..300 {
        assert_eq!(there[&format!("f{n}")], format!("{n}").repeat(1000).into_bytes());
    }
}

/// Regression: after a power loss the bytes of a file that was synced and then overwritten counted as the synced
/// content.
#[test]
fn file_overwritten_after_its_sync_is_not_complete() {
    let Some(scene) = prepare("power_over") else { return };
    let program = format!(
        "import os, time
{CLOSED}
def put(name, text, flags, sync=False):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    os.write(fd, text)
    if sync: os.fsync(fd)
    return fd
for name in 'old', 'new': os.close(put(name, b'a' * 50000, os.O_TRUNC))
closed()
held = [put(name, b'b' * 70000, os.O_TRUNC) for name in ('old', 'new')]
open('/mnt/notes/there', 'w').close()
time.sleep(100)
"
    );
    for journal_too in [true, false] {
        for door in [&["--no-preload"][..], &[]] {
            let before = synced(&scene);
            let running = begin(&scene, &[door, &["--sync-after", "20ms"]].concat(), &program);
            go_on_when_synced(&scene, before, 2);
            eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
            scene.power_fails("disk", journal_too);
            drop(running);
            let ended = scene.run(&TIER, "true").exits(3).says(&["new: the machine went down"]);
            let (there, _) = store_of(&scene);
            assert_eq!(there["old"], b"before\n", "{}", ended.stderr);
            assert!(!there.contains_key("new"), "new has {} bytes; {}", there["new"].len(), ended.stderr);
            scene.run(&TIER, &format!("{FORGET}; rm -f *unproven*")).exits(0);
        }
    }
}

/// After a power loss it is unknown whether the bytes of a prefetched copy reached the tier's disk.
#[test]
fn prefetched_copy_is_fetched_again_after_power_loss() {
    let Some(scene) = prepare("power_brought") else { return };
    fs::write(scene.path("data"), vec![b'd'; 300_000]).unwrap();
    let program = "
import glob, os, subprocess, time
subprocess.run(['/mnt/surgetank', 'prefetch', '--state', '/mnt/disk/state', 'data'], check=True)
while not glob.glob('/mnt/disk/**/data', recursive=True): time.sleep(0.01)
time.sleep(0.2)
# (Now the catalog is on the disk.)
with open('other', 'w') as other: os.fsync(other.fileno())
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    until_the_power_fails(&scene, &[], program, true);
    let ended = scene
        .run(&TIER, "cmp data <(head -c 300000 /dev/zero | tr '\\0' d) && echo same")
        .exits(3)
        .says(&["other: the machine went down"]);
    assert_eq!(ended.stdout, "same\n");
}

/// A copy on a tier of a file that the store has too: after a crash of the machine only the store's copy counts.
#[test]
fn stored_file_is_not_read_from_an_unsynced_tier() {
    let Some(scene) = prepare("power_clean") else { return };
    let program = "
import subprocess, time
with open('data', 'wb') as f: f.write(b'd' * 300000)
subprocess.run(['/mnt/surgetank', 'wait', '--state', '/mnt/disk/state', 'data'], check=True)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    until_the_power_fails(&scene, &[], program, true);
    let ended = scene.run(&TIER, "cmp data <(head -c 300000 /dev/zero | tr '\\0' d) && echo same").exits(0);
    assert_eq!(ended.stdout, "same\n");
    assert_eq!(fs::read(scene.path("data")).unwrap(), vec![b'd'; 300_000]);
}

const VOLATILE: &str = "
import os, time
def put(name, text, sync=False):
    with open(name, 'wb', 0) as f:
        f.write(text)
        if sync: os.fsync(f.fileno())
put('synced', b's' * 100000, sync=True)
held = open('held', 'wb', 0)
held.write(b'h' * 9000)
os.fsync(held.fileno())
# (An fsync also stores files that were closed before it.)
put('old', b'after')
put('new', b'n' * 3000)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";

/// Runs on a tier in memory, with its own state, until the machine dies. (`fsync` means a copy beside the state there, or the store.)
fn on_memory(name: &str, options: &[&str], state_too: bool) {
    let Some(mut scene) = Scene::new(name) else { return };
    scene.beside("notes");
    fs::write(scene.path("old"), "before\n").unwrap();
    scene.tier("ram", 64);
    fs::write("/mnt/program.py", VOLATILE).unwrap();
    let running = scene.start(&[&["--quiet-period", "1h"], options].concat(), "exec /usr/bin/python3 /mnt/program.py");
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    scene.machine_dies("/mnt/tier-ram".as_ref());
    drop(running);
    scene.tmpfs("tier-ram", 65);
    if state_too {
        fs::remove_dir_all(&scene.state).unwrap();
    }
    let ended = scene.run(&[], "true");
    let (there, apart) = store_of(&scene);
    if state_too {
        ended.exits(0);
    } else {
        let before = "old: its newest version is gone from the tier";
        ended.exits(3).says(&[before, "the store keeps the version before", "new: it is gone from the tier"]);
    }
    let expected = BTreeMap::from([
        ("synced".to_owned(), vec![b's'; 100_000]),
        ("held".to_owned(), vec![b'h'; 9000]),
        ("old".to_owned(), b"before\n".to_vec()),
    ]);
    assert_eq!((there, apart.len()), (expected, 0));
}

#[test]
fn files_only_in_memory_are_named_after_a_reboot() {
    on_memory("power_memory", &["--no-preload"], false);
}

#[test]
fn files_only_in_memory_are_named_after_a_reboot_with_the_shim() {
    on_memory("power_memory_shim", &[], false);
}

#[test]
fn lost_node_leaves_data_synced_to_the_store() {
    on_memory("power_lost", &["--fsync", "store"], true);
}

/// Regression: the publication of a lost file preceded that of the file that replaces it. The second publication
/// waited indefinitely.
#[test]
fn replacement_of_a_lost_file_is_published() {
    let Some(scene) = prepare("power_replaced") else { return };
    let program = "
import os, time
def put(name, text, sync=False):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, text)
    if sync: os.fsync(fd)
    os.close(fd)
os.mkdir('d')
put('d/f', b'first')
os.link('d/f', 'l')
put('d/f.new', b'second', sync=True)
os.rename('d/f.new', 'd/f')
put('a', b'a')
put('b', b'b', sync=True)
os.rename('b', 'a')
put('c', b'c', sync=True)
os.rename('a', 'old')
os.link('c', 'd/c')
put('z', b'z', sync=True)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    until_the_power_fails(&scene, &["--no-preload"], program, false);
    scene.run(&TIER, "true").exits(3);
    let again = scene.run(&TIER, FORGET).exits(0);
    let (there, _) = store_of(&scene);
    let content = |name: &str| there.get(name).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let found = ["d/f", "l", "a", "b", "old", "c", "d/c", "z"].map(content);
    let expected = [Some("second"), None, None, None, Some("b"), Some("c"), Some("c"), Some("z")];
    assert_eq!(found, expected.map(|text| text.map(str::to_owned)), "{}", again.stderr);
}

/// The data by which the agent finds the catalog again was not on the disk yet, but the catalog was.
#[test]
fn directory_with_a_new_device_number_is_recognised() {
    let Some(mut scene) = Scene::new("power_renumbered") else { return };
    scene.ext4("project", 64);
    scene.ext4("disk", 512);
    scene.state = "/mnt/disk/state".into();
    fs::write("/mnt/conf.toml", "").unwrap();
    scene.beside("notes");
    let program = "
import os, time
fd = os.open('synced', os.O_CREAT | os.O_WRONLY, 0o644)
os.write(fd, b's' * 5000)
os.fsync(fd)
os.close(fd)
open('/mnt/notes/there', 'w').close()
time.sleep(100)
";
    until_the_power_fails(&scene, &["--no-preload"], program, false);
    assert_eq!(store_of(&scene).0, BTreeMap::new());
    scene.ext4_renumbered("project");
    // (The record of the close was not on the disk.)
    scene.run(&TIER, "true").exits(3).says(&["what was synced is there"]);
    scene.holds("synced", &[b's'; 5000]);
}

/// Regression: the agent used the lost version's length. The next append copied that many bytes of the stored
/// version, and the result was published.
#[test]
fn stored_version_has_its_own_length_after_a_loss() {
    let Some(scene) = prepare("power_length") else { return };
    let program = format!(
        "{PUT}put('old', b'x', os.O_TRUNC)\nput('log', b'y' * 9000, os.O_TRUNC)\nput('z', b'z', sync=True)\nthere()"
    );
    for options in [&["--no-preload"][..], &["--no-preload", "--direct", "false"], &[]] {
        until_the_power_fails(&scene, options, &program, false);
        let script = "stat -c %s old; echo more >>old; stat -c %s log; echo more >>log; cat log";
        let ended = scene.run(&[&TIER[..], options].concat(), script).exits(3);
        assert_eq!(ended.stdout, "7\n7\nbefore\nmore\n");
        for name in ["old", "log"] {
            scene.holds(name, b"before\nmore\n");
            fs::write(scene.path(name), "before\n").unwrap();
        }
        scene.run(&TIER, "rm -f z *unproven*").exits(0);
    }
}

/// Regression: the first start after the power loss found the tier missing, and the second one took its files for
/// complete.
#[test]
fn tier_missing_at_one_start_is_verified_when_back() {
    let Some(mut scene) = prepare("power_missing") else { return };
    scene.state = "/mnt/state".into();
    let program = format!("{PUT}put('old', b'a' * 50000, os.O_TRUNC)\nput('z', b'z', sync=True)\nthere()");
    until_the_power_fails(&scene, &["--no-preload"], &program, true);
    crate::scene::succeed(std::process::Command::new("umount").arg("/mnt/disk"));
    let ended = scene.run(&TIER, "true").exits(3).says(&["on a tier that is not there"]);
    scene.ext4_again("disk");
    scene.run(&TIER, "true").exits(3).says(&["old: the machine went down"]);
    let (there, _) = store_of(&scene);
    assert_eq!((&there["old"][..], &there["z"][..]), (&b"before\n"[..], &b"z"[..]), "{}", ended.stderr);
}

/// Regression: the synced file left the tier before the catalog's disk had the record of its replacement.
#[test]
fn synced_file_is_replaced_completely_or_not_at_all() {
    let Some(scene) = prepare("power_replace") else { return };
    let program = format!(
        "{PUT}put('f', b'a' * 50000, sync=True)\nput('f.new', b'b' * 50000, sync=True)\nos.rename('f.new', 'f')\nthere()"
    );
    for (options, journal_too) in [(&["--no-preload"][..], true), (&[], true), (&[], false)] {
        until_the_power_fails(&scene, options, &program, journal_too);
        let ended = scene.run(&TIER, "true");
        let (there, _) = store_of(&scene);
        let f = there.get("f").unwrap_or_else(|| panic!("neither: {}", ended.stderr));
        assert!(f.len() == 50000 && f.iter().all(|byte| *byte == f[0]), "{} bytes", f.len());
        assert!(b"ab".contains(&f[0]));
        scene.run(&TIER, "rm -f f f.new; test ! -e f").exits(0);
        scene.leaves_nothing_on_the_tiers();
    }
}

/// Regression: a file moved to another tier while a program wrote it, and the record of its synced bytes ended with the
/// first tier's name.
#[test]
fn synced_data_survives_the_move_to_another_tier() {
    let Some(scene) = prepare("power_moved") else { return };
    for name in ["a", "b"] {
        fs::create_dir(format!("/mnt/disk/{name}")).unwrap();
    }
    let program = format!(
        "{PUT}fd = os.open('big', os.O_CREAT | os.O_WRONLY, 0o644)
os.write(fd, b'h' * (6 << 20))
os.fsync(fd)
for _ in range(6): os.write(fd, b'i' * (1 << 20))
there()"
    );
    let tiers =
        ["--tier", "a=/mnt/disk/a:8M", "--tier", "b=/mnt/disk/b:100M", "--quiet-period", "1h", "--fsync", "tier"];
    let options = [&tiers[..], &["--config", "/mnt/conf.toml", "--no-preload", "--direct", "false"]].concat();
    fs::write("/mnt/program.py", program).unwrap();
    let running = scene.start(&options, "exec /usr/bin/python3 /mnt/program.py");
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    scene.power_fails("disk", true);
    drop(running);
    let ended = scene.run(&options, "true");
    let (there, apart) = store_of(&scene);
    let big = there.get("big").unwrap_or_else(|| panic!("lost: {:?} {}", apart.keys(), ended.stderr));
    assert!(big.len() >= 6 << 20 && big[..6 << 20].iter().all(|byte| *byte == b'h'), "{} bytes", big.len());
}

/// Regression: after a kill the next agent never synced the files that were closed before.
#[test]
fn file_closed_long_ago_is_complete_after_a_handoff() {
    let Some(scene) = prepare("power_heir") else { return };
    let program = format!(
        "{PUT}{CLOSED}
put('f', b'f' * 50000)
os.mkdir('d'); put('d/g', b'g' * 50000)
closed()
os.rename('d', 'e')
# A later sync puts the rename into the catalog.
put('last', b'l')
there()"
    );
    let running = begin(&scene, &["--no-preload", "--sync-after", "700ms"], &program);
    eventually("files are closed", || fs::exists("/mnt/notes/closed").unwrap());
    assert!(scene.kill_one_agent());
    fs::write("/mnt/notes/go", "").unwrap();
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    eventually("all files are synced", || synced(&scene) >= 3);
    scene.power_fails("disk", false);
    drop(running);
    let ended = scene.run(&TIER, "true").exits(0);
    let (there, apart) = store_of(&scene);
    assert!(apart.is_empty(), "{:?} {}", apart.keys(), ended.stderr);
    assert_eq!((there["f"].len(), there["e/g"].len()), (50000, 50000));
}

/// Regression: the replaced version was current again, and the drain then tried to publish it without a source.
#[test]
fn lost_replacement_restores_the_stored_version() {
    let Some(scene) = prepare("power_back") else { return };
    let program = format!(
        "{PUT}put('old', b'x' * 9, os.O_TRUNC)\nput('n', b'n' * 9)\nos.rename('n', 'old')\nput('z', b'z', sync=True)\nthere()"
    );
    until_the_power_fails(&scene, &["--no-preload"], &program, false);
    let ended = scene.run(&TIER, "stat -c %s old; echo more >>old").exits(3);
    assert_eq!(ended.stdout, "7\n");
    scene.holds("old", b"before\nmore\n");
}

/// A program writes more after the sync, and that data is lost. Regression: the file had the length from before the
/// loss.
#[test]
fn rest_of_a_synced_file_has_its_own_length() {
    let Some(scene) = prepare("power_promised") else { return };
    let program = format!(
        "{PUT}fd = os.open('p', os.O_CREAT | os.O_WRONLY, 0o644)
os.write(fd, b'a' * 50000); os.fsync(fd); os.write(fd, b'b' * 50000); os.close(fd)
put('z', b'z', sync=True)
there()"
    );
    until_the_power_fails(&scene, &["--no-preload"], &program, false);
    let ended = scene.run(&TIER, "stat -c %s p; wc -c <p; printf c >>p").exits(3).says(&["what was synced is there"]);
    let sizes: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(sizes[0], sizes[1]);
    let size: usize = sizes[0].parse().unwrap();
    assert!(size >= 50000);
    let (there, _) = store_of(&scene);
    assert_eq!((there["p"].len(), there["p"][size]), (size + 1, b'c'));
}

/// Regression: the synced version was in the store, and yet the later unsynced version replaced it.
#[test]
fn sync_record_of_a_published_version_ends_with_it() {
    let Some(scene) = prepare("power_kept") else { return };
    let program = format!(
        "import subprocess\n{PUT}put('f', b'a' * 50000, sync=True)
time.sleep(2)
with open('f', 'r+b', 0) as f:
    f.write(b'b' * 65536)
    subprocess.run(['sync', '-f', '/mnt/disk'], check=True)
    f.write(b'c' * 65536)
there()"
    );
    fs::write("/mnt/program.py", program).unwrap();
    let options = ["--tier", "disk=/mnt/disk:200M", "--quiet-period", "0s", "--fsync", "tier", "--no-preload"];
    // Each version waits after the record that its publication has begun. The second version is closed meanwhile.
    let mut command = scene.run_command(&options, "exec /usr/bin/python3 /mnt/program.py");
    command.env("SURGETANK_HOLD", "drain.started:5000");
    let running = crate::scene::Running::of(command);
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    eventually("the first version is in the store", || scene.path("f").exists());
    eventually("the second one is copied", || scene.store_files().keys().any(|path| crate::scene::is_ours(path)));
    std::thread::sleep(std::time::Duration::from_millis(1500));
    scene.power_fails("disk", true);
    drop(running);
    let ended =
        scene.run(&TIER, "true").exits(3).says(&["f: the machine went down", "the store keeps the version before"]);
    let (there, apart) = store_of(&scene);
    assert!(there["f"] == [b'a'; 50000], "{} bytes of {:?}; {}", there["f"].len(), there["f"][0], ended.stderr);
    assert!(apart["f"].starts_with(&[b'b'; 65536]));
}

/// Regression: after a power loss `scavenge` copied a half-written file under its own name, as if it were complete.
#[test]
fn scavenge_keeps_a_doubtful_file_apart() {
    let Some(scene) = prepare("power_scavenge") else { return };
    let program = format!(
        "import subprocess\n{PUT}{CLOSED}
put('whole', b'w' * 5000)
closed()
old, part = open('old', 'wb', 0), open('part', 'wb', 0)
for f in old, part: f.write(b'a' * 65536)
os.fsync(part.fileno())
subprocess.run(['sync', '-f', '/mnt/disk'], check=True)
for f in old, part: f.write(b'b' * 65536)
there()"
    );
    let running = begin(&scene, &["--no-preload", "--sync-after", "20ms"], &program);
    go_on_when_synced(&scene, 0, 1);
    eventually("the program runs", || fs::exists("/mnt/notes/there").unwrap());
    scene.power_fails("disk", true);
    drop(running);
    let verb = |words: &[&str]| {
        let rest = ["--state", "/mnt/disk/state", "--over", "/mnt/project", "--tier", "disk=/mnt/disk:200M"];
        scene.bare_verb(words[0], &[&words[1..], &rest].concat())
    };
    verb(&["scavenge", "--to", "/mnt/notes/out"]).exits(0);
    let copies = || fs::read_dir("/mnt/notes/out").unwrap().map(|entry| entry.unwrap().path());
    let copy =
        |name: &str| copies().find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(name)).unwrap();
    assert!(!fs::exists("/mnt/notes/out/old").unwrap());
    assert!(copy("old.surgetank-unproven").exists() && fs::read(copy("whole")).unwrap() == [b'w'; 5000]);
    assert!(fs::read("/mnt/notes/out/part").unwrap().starts_with(&[b'a'; 65536]));
    let list = verb(&["scavenge", "--list", "--json"]).exits(0).json();
    let proven: BTreeMap<_, _> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["path"].as_str().unwrap(), one["proven"].as_str().unwrap()))
        .collect();
    assert_eq!(proven, BTreeMap::from([("old", "nothing"), ("part", "in-part"), ("whole", "whole")]));
    let text = verb(&["scavenge", "--list"]).exits(0).stdout;
    assert_eq!(text.matches("the machine went down").count(), 2, "{text}");
    let audit = verb(&["fsck", "--json"]).exits(3).json();
    let found: Vec<_> = audit["findings"].as_array().unwrap().iter().map(|one| (&one["what"], &one["path"])).collect();
    assert!(found.len() == 2 && found.iter().all(|(what, _)| *what == "unproven"), "{audit:#}");
    // These verbs changed nothing.
    scene.run(&TIER, "true").exits(3).says(&["old: the machine went down", "part: the machine went down"]);
    assert_eq!(scene.read("old"), b"before\n");
}
