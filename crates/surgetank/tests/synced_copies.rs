//! `fsync` of files on a volatile tier, where the agent's state is on the store's disk: the power fails, and the tier is empty
//! afterwards.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::scene::{Running, Scene, eventually};

const DOORS: [(&str, &[&str]); 3] = [("mount", &["--no-preload"]), ("shim", &[]), ("seccomp", &["--door", "seccomp"])];

/// No file is published, except by an fsync.
const LATER: [&str; 4] = ["--quiet-period", "1h", "--config", "/mnt/conf.toml"];

const BEGIN: &str = "
import mmap, os, time
def made(name, text, flags=os.O_TRUNC, sync=True):
    fd = os.open(name, os.O_CREAT | os.O_RDWR | flags, 0o644)
    os.write(fd, text)
    if sync: os.fsync(fd)
    return fd
def put(*args, **kwargs): os.close(made(*args, **kwargs))
def there():
    open('/mnt/notes/there', 'w').close()
    time.sleep(100)
";

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.ext4("disk", 512);
    scene.state = "/mnt/disk/state".into();
    scene.over = "/mnt/disk/project".into();
    fs::create_dir(&scene.over).unwrap();
    for name in ["old", "result", "log"] {
        fs::write(scene.path(name), "before\n").unwrap();
    }
    assert!(Command::new("sync").args(["-f", "/mnt/disk"]).status().unwrap().success());
    fs::write("/mnt/conf.toml", "").unwrap();
    scene.beside("notes");
    scene.tier("fast", 200);
    Some(scene)
}

/// Runs the program until it is ready, then fails the power. The tier in memory is empty after that.
fn power_fails(scene: &Scene, options: &[&str], program: &str, journal_too: bool) {
    let running = start(scene, options, program);
    scene.power_fails("disk", journal_too);
    drop(running);
    empty_the_tier(scene);
}

fn empty_the_tier(scene: &Scene) {
    eventually("the tier is released", || Command::new("umount").arg("/mnt/tier-fast").status().unwrap().success());
    scene.tmpfs("tier-fast", 201);
}

fn start(scene: &Scene, options: &[&str], program: &str) -> Running {
    fs::write("/mnt/program.py", [BEGIN, program].concat()).unwrap();
    let _ = fs::remove_file("/mnt/notes/there");
    let options = [&LATER[..], options].concat();
    let mut running = Running::of(scene.run_command(&options, "exec /usr/bin/python3 /mnt/program.py"));
    eventually("the program runs", || {
        assert!(!running.has_ended(), "{}", running.so_far());
        fs::exists("/mnt/notes/there").unwrap()
    });
    running
}

fn content_of(scene: &Scene) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(&scene.over).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

fn copies(scene: &Scene) -> usize {
    let find = Command::new("find").arg(&scene.state).args(["-path", "*/synced/*", "-type", "f"]).output().unwrap();
    find.stdout.iter().filter(|byte| **byte == b'\n').count()
}

#[test]
fn synced_content_survives_power_loss() {
    let program = "
put('synced', b's' * 100000)
put('renamed.tmp', b'r' * 7000); os.rename('renamed.tmp', 'renamed')
put('removed', b'x' * 5000); os.unlink('removed')
put('over', b'1' * 5000); put('over.tmp', b'2' * 6000); os.rename('over.tmp', 'over')
put('old', b'after')
put('twice', b'1' * 9000); put('twice', b'2' * 3000)
dir = os.open('.', os.O_RDONLY); os.fsync(dir)
put('unsynced', b'u' * 3000, sync=False)
put('result.tmp', b'after', sync=False); os.rename('result.tmp', 'result')
again = made('again', b'a' * 1000000)
for n in range(1, 20):
    os.pwrite(again, b'%02d' % n * 2000, n * 40000); os.fdatasync(again)
os.pwrite(again, b'unsynced', 0)
short = made('short', b'b' * 50000)
os.ftruncate(short, 1000); os.fsync(short)
os.ftruncate(short, 90000); os.pwrite(short, b'end', 90000); os.fsync(short)
mapped = made('mapped', b'm' * 8192)
m = mmap.mmap(mapped, 8192); m[4096:4100] = b'page'; m.flush()
direct = os.open('direct', os.O_CREAT | os.O_WRONLY | os.O_SYNC, 0o644); os.write(direct, b'd' * 4000)
log = os.open('log', os.O_WRONLY | os.O_APPEND); os.write(log, b'more\\n'); os.fsync(log)
there()
";
    let mut again = vec![b'a'; 1_000_000];
    (1..20).for_each(|n| {
        let text = format!("{n:02}").repeat(2000);
        again[n * 40_000..][..4000].copy_from_slice(text.as_bytes());
    });
    let mut short = vec![b'b'; 1000];
    short.resize(90_000, 0);
    short.extend_from_slice(b"end");
    for (door, options) in DOORS {
        let expected = (again.clone(), short.clone());
        let name = format!("synced_copies_{door}");
        std::thread::spawn(move || {
            let Some(scene) = scene(&name) else { return };
            for journal_too in [false, true] {
                power_fails(&scene, options, program, journal_too);
                assert!(copies(&scene) > 0, "nothing was tested");
                let ended = scene.run(&[], "true").exits(3);
                let mut there = content_of(&scene);
                // Where the plain file is mapped or opened directly, nothing reports msync and O_SYNC (docs/semantics.md).
                let mapped = there.remove("mapped").unwrap();
                assert_eq!((mapped.len(), &mapped[..4096]), (8192, &[b'm'; 4096][..]));
                assert!(door != "shim" || &mapped[4096..4100] == b"page", "{door}: {}", ended.stderr);
                let direct = there.remove("direct");
                assert!(door == "seccomp" || direct == Some(vec![b'd'; 4000]), "{door}: {}", ended.stderr);
                let wanted: BTreeMap<String, Vec<u8>> = [
                    ("synced", vec![b's'; 100_000]),
                    ("renamed", vec![b'r'; 7000]),
                    ("over", vec![b'2'; 6000]),
                    ("old", b"after".to_vec()),
                    ("result", b"before\n".to_vec()),
                    ("twice", vec![b'2'; 3000]),
                    ("again", expected.0.clone()),
                    ("short", expected.1.clone()),
                    ("log", b"before\nmore\n".to_vec()),
                ]
                .into_iter()
                .map(|(name, content)| (name.to_owned(), content))
                .collect();
                for (name, content) in &wanted {
                    assert!(there.get(name) == Some(content), "{door}: {name}\n{}", ended.stderr);
                }
                assert_eq!(there.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{}", ended.stderr);
                assert_eq!(copies(&scene), 0, "{door}");
                scene.run(
                    &["--config", "/mnt/conf.toml"],
                    "rm -f [^olr]* over; for f in old log result; do echo before >$f; done",
                );
                scene.run(&[], "true");
            }
        })
        .join()
        .unwrap();
    }
}

/// A container is started again: its memory is empty, and the machine went on.
#[test]
fn synced_content_survives_loss_of_the_tier() {
    let Some(scene) = scene("synced_copies_tier") else { return };
    let program = "
put('closed', b'c' * 50000)
open_still = made('open', b'o' * 60000); os.pwrite(open_still, b'changed', 0); os.fsync(open_still)
there()
";
    let running = start(&scene, &[], program);
    // (A second agent makes another copy of a file that it did not copy itself.)
    scene.replace_agent();
    scene.await_served();
    // (Without the run, the agent would drain.)
    scene.kill_agent();
    running.kill();
    drop(running);
    empty_the_tier(&scene);
    let found = scene.verb("fsck", &["--json"]).exits(3).json();
    assert_eq!(found["findings"].as_array().unwrap().iter().filter(|one| one["what"] == "lost").count(), 0, "{found}");
    scene.verb("scavenge", &["--to", "/mnt/notes/out"]).exits(0);
    let changed = [&b"changed"[..], &[b'o'; 60000 - 7]].concat();
    for dir in ["/mnt/notes/out", "/mnt/disk/project"] {
        if dir != "/mnt/notes/out" {
            scene.run(&[], "true").exits(3).says(&["what fsync synced of it is there"]);
        }
        let read = |name: &str| fs::read(std::path::Path::new(dir).join(name)).unwrap();
        assert!(read("closed") == vec![b'c'; 50000] && read("open") == changed, "{dir}");
    }
    assert_eq!(copies(&scene), 0);
}

/// No tier has room for the copy: it is named and stays.
#[test]
fn copy_that_cannot_be_put_back_is_kept() {
    let Some(scene) = scene("synced_copies_room") else { return };
    power_fails(&scene, &[], "put('large', b'l' * 20000000)\nthere()\n", false);
    assert!(Command::new("umount").arg("/mnt/tier-fast").status().unwrap().success());
    scene.tmpfs("tier-fast", 4);
    let ended = scene.run(&[], "true").exits(3).says(&["could not be put back", "/synced/kept-"]);
    let kept = ended
        .stderr
        .split_whitespace()
        .find_map(|word| word.strip_suffix(':').filter(|word| word.contains("/synced/kept-")));
    let kept = kept.unwrap_or_else(|| panic!("{}", ended.stderr));
    assert!(fs::read(kept).unwrap() == vec![b'l'; 20_000_000], "{kept}");
}

/// Each fsync is durable, whichever agent answers it.
#[test]
fn fsyncs_continue_after_an_agent_is_killed() {
    let Some(scene) = scene("synced_copies_kill") else { return };
    let program = "
file = made('data', b'd' * 300000)
for n in range(4):
    os.pwrite(file, b'first%d' % n, n * 5000); os.fsync(file)
there()
while not os.path.exists('/mnt/notes/killed'): time.sleep(0.01)
for n in range(4):
    os.pwrite(file, b'second%d' % n, n * 6000); os.fsync(file)
open('/mnt/notes/synced', 'w').close()
time.sleep(100)
";
    let running = start(&scene, &[], &program.replace("\nthere()", "\nopen('/mnt/notes/there', 'w').close()"));
    scene.replace_agent();
    scene.await_served();
    fs::write("/mnt/notes/killed", "").unwrap();
    eventually("the program goes on", || fs::exists("/mnt/notes/synced").unwrap());
    assert_eq!(copies(&scene), 1, "one copy a file");
    scene.power_fails("disk", false);
    drop(running);
    empty_the_tier(&scene);
    scene.run(&[], "true").exits(3);
    let mut expected = vec![b'd'; 300_000];
    for n in 0..4 {
        expected[n * 5000..][..6].copy_from_slice(format!("first{n}").as_bytes());
    }
    for n in 0..4 {
        expected[n * 6000..][..7].copy_from_slice(format!("second{n}").as_bytes());
    }
    crate::scene::same_bytes("data", &scene.read("data"), &expected);
}

/// An fsync of a directory covers names whose files have no copy: empty ones, and one that was synced before it had a name.
#[test]
fn synced_directory_keeps_files_without_copies() {
    let Some(scene) = scene("synced_copies_dir") else { return };
    let program = "
os.mkdir('d')
put('d/empty', b'', sync=False)
new = os.open('d', os.O_TMPFILE | os.O_RDWR, 0o644); os.write(new, b'n' * 7000); os.fsync(new)
dir = os.open('d', os.O_RDONLY)
os.link(f'/proc/self/fd/{new}', 'named', src_dir_fd=dir, dst_dir_fd=dir)
os.close(new)
os.fsync(dir)
there()
";
    power_fails(&scene, &["--no-preload"], program, false);
    scene.run(&[], "true");
    scene.holds("d/empty", b"");
    scene.holds("d/named", &[b'n'; 7000]);
}

/// The start that puts copies back is killed in the middle.
#[test]
fn copies_are_put_back_after_a_killed_start() {
    let Some(scene) = scene("synced_copies_start") else { return };
    power_fails(&scene, &[], "for name in 'abcdef': put(name, name.encode() * 5000)\nthere()\n", false);
    let mut killed = scene.run_command(&[], "true");
    killed.env("SURGETANK_CRASH", "recover.put_back:4").env("SURGETANK_CRASH_SUPERVISOR", "1");
    assert!(!killed.output().unwrap().status.success());
    let ended = scene.run(&[], "true").exits(3);
    for name in ["a", "b", "c", "d", "e", "f"] {
        assert!(
            fs::read(scene.path(name)).is_ok_and(|read| read == name.repeat(5000).into_bytes()),
            "{name}: {}",
            ended.stderr
        );
    }
    assert_eq!((copies(&scene), scene.store_files().len()), (0, 6 + 3), "{}", ended.stderr);
}

/// Looks at a mapped hole fill it: a file with holes is read.
#[test]
fn fsync_of_a_sparse_file_takes_no_memory() {
    let Some(scene) = scene("synced_copies_sparse") else { return };
    let program = "
file = made('sparse', b's' * 4096)
os.ftruncate(file, 100 << 20); os.fsync(file)
for n in range(3): os.pwrite(file, b'%d' % n, n << 20); os.fsync(file)
";
    let script = format!(
        "cat >/mnt/sparse.py <<'END'{BEGIN}{program}END\npython3 /mnt/sparse.py; du -k /mnt/tier-fast | tail -1"
    );
    let ended = scene.run(&LATER_MOUNTED, &script).exits(0);
    let used: u64 = ended.stdout.split_whitespace().next().unwrap().parse().unwrap();
    assert!(used < 1000, "{used} KiB on the tier");
}

const LATER_MOUNTED: [&str; 3] = ["--no-preload", "--quiet-period", "1h"];
