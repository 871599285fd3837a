//! Prefetch while programs read the file: through the mount, mediated or by the kernel, and across the agent's death.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;

use crate::scene::{MIB, Scene, noise};

const SIZE: u64 = 12 * MIB + 345;
/// The agent serves every read and write; or the kernel does; or the kernel and the shim.
const WAYS: [(&str, &[&str]); 3] =
    [("mediated", &["--no-preload", "--direct", "false"]), ("direct", &["--no-preload"]), ("shim", &[])];

const WORDS: &str = r"
import json, mmap, os, subprocess, time
direct = os.environ['WAY'] != 'mediated'
def surgetank(verb, *words):
    return subprocess.run(['/mnt/surgetank', verb, '--state', '/mnt/state', *words], check=True, capture_output=True, text=True).stdout
def used(): return sum(tier['used_bytes'] for tier in json.loads(surgetank('status', '--json'))[0]['tiers'])
def state(): return os.getxattr('f', 'user.surgetank.state').decode()
def until(is_so):
    for _ in range(1000):
        if is_so(): return
        time.sleep(0.02)
    raise SystemExit(f'waited in vain: {used()} bytes used')
def charged(): return size <= used() <= size + 65536
def is_whole(descriptor):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the next read requests the pages again
    at = 0
    while True:
        piece = os.pread(descriptor, 1 << 20, at)
        assert piece == should[at:at + (1 << 20)], f'other bytes in the megabyte at {at}'
        if not piece: return
        at += len(piece)
should = open('/mnt/beside/f', 'rb').read()
size = len(should)
reader = os.open('f', os.O_RDONLY)
assert os.pread(reader, 1000, 5000) == should[5000:6000]
os.setxattr('f', 'user.surgetank.hint.prefetch', b'true')
";

/// The store is beside the directory, so that another client can change it meanwhile.
fn run(
    name: &str,
    (way, options): (&str, &[&str]),
    held: &str,
    killed: &str,
    script: &str,
    after: impl FnOnce(&Scene),
) {
    let Some(mut scene) = Scene::new(&format!("ahead-{name}-{way}")) else { return };
    scene.tier("fast", 64);
    fs::create_dir("/mnt/store").unwrap();
    let bytes = noise(1, SIZE);
    for path in [scene.beside("beside").join("f"), "/mnt/store/f".into()] {
        fs::write(path, &bytes).unwrap();
    }
    fs::write("/mnt/program.py", format!("{WORDS}{script}")).unwrap();
    let options = [options, &["--store", "/mnt/store", "--quiet-period", "0s"]].concat();
    let mut command = scene.run_command(&options, &format!("WAY={way} python3 /mnt/program.py"));
    command.env("SURGETANK_HOLD", held).env("SURGETANK_CRASH", killed);
    crate::scene::Running::of(command).ends().exits(0);
    after(&scene);
    scene.leaves_nothing_on_the_tiers();
}

fn in_store() -> Vec<u8> {
    fs::read("/mnt/store/f").unwrap()
}

fn each_way(name: &str, held: &str, killed: &str, script: &str, after: impl Fn(&Scene) + Sync) {
    for way in WAYS {
        let after = &after;
        // (Each scene needs a thread of its own.)
        std::thread::scope(|scope| scope.spawn(move || run(name, way, held, killed, script, after)).join().unwrap());
    }
}

/// A database that all tasks read is hardly ever closed, and was therefore never prefetched.
const READ_ON: &str = r"
mapped = mmap.mmap(reader, 0, prot=mmap.PROT_READ)
assert mapped[:100000] == should[:100000]
until(charged)
if not direct: until(lambda: state() == 'durable')
is_whole(reader)
assert mapped[:] == should
other = os.open('f', os.O_RDONLY)
is_whole(other)
if direct:
    assert state() == 'evicted', 'the kernel reads from the store'
mapped.close(); os.close(reader); os.close(other)
until(lambda: state() == 'durable')
assert charged(), used()
again = os.open('f', os.O_RDONLY)
is_whole(again)
os.close(again)
for _ in range(500):
    surgetank('evict', 'f')
    if state() == 'evicted': break
    time.sleep(0.02)
assert used() == 0, used()
is_whole(os.open('f', os.O_RDONLY))
";

/// Regression: the agent never prefetched a file that was always open.
#[test]
fn open_file_is_prefetched() {
    each_way("read_on", "", "", READ_ON, |_| assert!(in_store() == noise(1, SIZE)));
}

/// The copy is complete, and no reader uses it yet.
#[test]
fn writer_before_the_copy_is_used_wins() {
    let script = r"
time.sleep(0.5)
should = should[:70000] + b'newer' + should[70005:]
with open('f', 'r+b') as writer:
    writer.seek(70000)
    writer.write(b'newer')
    writer.flush()
    is_whole(reader)
    time.sleep(1.5)
    is_whole(reader)
is_whole(reader)
os.close(reader)
is_whole(os.open('f', os.O_RDONLY))
surgetank('wait')
assert used() in (0, 4096) or charged(), used()
";
    each_way("writer", "prefetch.copied:1000", "", script, |_| {
        let mut bytes = noise(1, SIZE);
        bytes[70_000..70_005].copy_from_slice(b"newer");
        assert!(in_store() == bytes);
    });
}

#[test]
fn file_deleted_during_a_prefetch_stays_deleted() {
    let script = r"
time.sleep(0.5)
os.unlink('f')
is_whole(reader)
time.sleep(1.5)
is_whole(reader)
os.close(reader)
until(lambda: used() == 0)
assert not os.path.exists('f')
";
    each_way("deleted", "prefetch.copied:1000", "", script, |_| assert!(!fs::exists("/mnt/store/f").unwrap()));
}

#[test]
fn change_by_another_client_is_not_covered_by_the_copy() {
    let script = r"
time.sleep(0.5)
should = should[:70000] + b'newer' + should[70005:]
with open('/mnt/store/f', 'r+b') as theirs:
    theirs.seek(70000)
    theirs.write(b'newer')
time.sleep(1.5)
os.close(reader)
time.sleep(1.2)     # the agent caches names for a second
is_whole(os.open('f', os.O_RDONLY))
until(lambda: used() == 0)
";
    each_way("changed", "prefetch.copied:1000", "", script, |_| {
        assert_eq!(in_store()[70_000..70_005], *b"newer");
    });
}

#[test]
fn readers_continue_after_an_agent_kill_during_a_prefetch() {
    let script = r"
def asked(is_so):
    # (The next agent has no record of an unfinished prefetch.)
    os.setxattr('f', 'user.surgetank.hint.prefetch', b'true')
    return is_so()
until(lambda: asked(charged))
is_whole(reader)
if direct:
    os.close(reader)
until(lambda: asked(lambda: state() == 'durable'))
if not direct:
    is_whole(reader)
    os.close(reader)
assert charged(), used()
is_whole(os.open('f', os.O_RDONLY))
";
    for point in ["copied", "adopted"] {
        let killed = format!("prefetch.{point}:1");
        // (Where the kernel reads, the agent adopts the copy when all readers have closed the file. That is when the
        // second agent is killed.)
        each_way(point, "", &killed, script, |_| assert!(in_store() == noise(1, SIZE)));
    }
}
