//! Files whose bytes the agent moves. A process that only writes bypasses the kernel's page cache, and all other
//! processes must see its data.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use crate::scene::Scene;

const PROGRAM: &str = r"
import mmap, os
with open('f', 'wb') as f: f.write(b'a' * 100000)
both = os.open('f', os.O_RDWR)
mapping = mmap.mmap(both, 0)
assert mapping[5:8] == b'aaa'
writer = os.open('f', os.O_WRONLY)
os.pwrite(writer, b'bbb', 5)
assert mapping[5:8] == b'bbb' and os.pread(both, 3, 5) == b'bbb'
mapping[9000:9003] = b'ccc'         # a dirty page
os.pwrite(writer, b'ddd', 9004)     # in the same page
assert mapping[9000:9008] == b'cccaddda'
mapping.flush()
assert os.pread(both, 8, 9000) == b'cccaddda'
end = os.open('f', os.O_WRONLY | os.O_APPEND)
os.write(end, b'end')
assert os.fstat(end).st_size == 100003 and os.pread(both, 3, 100000) == b'end'
";

#[test]
fn write_past_the_page_cache_is_seen_in_mapped_pages() {
    let Some(mut scene) = Scene::new("past_the_pages") else {
        return;
    };
    scene.tier("fast", 32);
    std::fs::write("/mnt/program.py", PROGRAM).unwrap();
    scene.run(&["--direct", "false"], "python3 /mnt/program.py").exits(0);
    let mut expected = vec![b'a'; 100_000];
    expected[5..8].copy_from_slice(b"bbb");
    expected[9000..9003].copy_from_slice(b"ccc");
    expected[9004..9007].copy_from_slice(b"ddd");
    expected.extend_from_slice(b"end");
    scene.holds("f", &expected);
    scene.is_clean();
}

/// Regression: the agent used the append mode from the time of the open for every write.
#[test]
fn append_mode_follows_fcntl() {
    let Some(mut scene) = Scene::new("append_ends") else {
        return;
    };
    scene.tier("fast", 32);
    let program = "
import fcntl, os
one = os.open('f', os.O_CREAT | os.O_RDWR | os.O_APPEND)
os.write(one, b'12345')
fcntl.fcntl(one, fcntl.F_SETFL, 0)
os.pwrite(one, b'a', 0)
other = os.open('f', os.O_WRONLY)
fcntl.fcntl(other, fcntl.F_SETFL, os.O_APPEND)
os.write(one, b'6')
os.write(other, b'7')
";
    std::fs::write("/mnt/program.py", program).unwrap();
    scene.run(&["--direct", "false"], "python3 /mnt/program.py").exits(0);
    scene.holds("f", b"a234567");
    scene.is_clean();
}

const MEDIATED: &[&str] = &["--direct", "false", "--quiet-period", "0s"];

/// How many bytes the kernel requested from the agent.
fn asked_for(ended: &crate::scene::Ended) -> u64 {
    ended.json()["summary"]["mount"]["mediated_read_bytes"].as_u64().unwrap()
}

/// Regression: every open made the kernel drop the file's pages. 40 tasks that read one database read it 40 times from
/// the agent.
#[test]
fn second_open_reads_from_the_page_cache() {
    let Some(mut scene) = Scene::new("read_again") else {
        return;
    };
    scene.tier("fast", 32);
    let bytes = crate::scene::noise(1, 4 << 20);
    std::fs::write(scene.path("f"), &bytes).unwrap();
    // A younger version may change and keep its time and size.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    let ended = scene
        .run(&[MEDIATED, &["--json", "/dev/stdout"]].concat(), "for i in 1 2 3 4 5; do sha256sum f >/dev/null; done")
        .exits(0);
    let asked = asked_for(&ended);
    assert!((4 << 20..5 << 20).contains(&asked), "{asked} bytes were requested");
    // The same for a file on the tier, after its writer has closed it.
    let script = "cat f f >g; for i in 1 2 3 4 5; do sha256sum g >/dev/null; done; sha256sum <g >sum";
    let ended = scene.run(&[MEDIATED, &["--json", "/dev/stdout"]].concat(), script).exits(0);
    let asked = asked_for(&ended);
    assert!((12 << 20..14 << 20).contains(&asked), "{asked} bytes were requested");
    scene.holds("g", &[&bytes[..], &bytes[..]].concat());
    scene.is_clean();
}

/// A program or another client of the store overwrites the file while a reader has it open. Regression: the kernel
/// kept pages of the old version.
#[test]
fn page_cache_drops_pages_of_an_old_version() {
    let Some(mut scene) = Scene::new("pages_no_more") else {
        return;
    };
    scene.tier("fast", 32);
    std::fs::write(scene.path("f"), vec![b'a'; 300_000]).unwrap();
    std::fs::write(scene.path("held"), vec![b'a'; 300_000]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2100));
    let program = "
import mmap, os, time
def is_all(name, byte):
    with open(name, 'rb') as f:
        got = f.read()
    assert got == byte * 300000, (name, byte, got[:4], len(got))
def waits_for(name):
    while not os.path.exists('/mnt/' + name):
        time.sleep(0.01)
held = open('held', 'rb')
for _ in range(3):
    is_all('f', b'a')
    is_all('held', b'a')
open('/mnt/read', 'x').close()
waits_for('changed')
# Another client changes both in place, one of them under a reader; mtime and size are as before.
for _ in range(3):
    is_all('f', b'b')
    is_all('held', b'b')
# From here on the file is on the tier.
for byte in (b'c', b'd'):
    with open('f', 'r+b') as f:
        f.write(byte * 300000)
    is_all('f', byte)
    is_all('f', byte)
    writer = os.open('f', os.O_WRONLY)
    reader = os.open('f', os.O_RDONLY)
    for more in (b'x', b'y', b'z'):
        assert os.pread(reader, 300000, 0)[:1] != more
        os.pwrite(writer, more * 300000, 0)
        is_all('f', more)
    os.close(writer)
    is_all('f', b'z')
    os.close(reader)
    is_all('f', b'z')
    with open('f', 'r+b') as f, mmap.mmap(f.fileno(), 0) as mapping:
        mapping[:] = b'm' * 300000
        is_all('f', b'm')
    is_all('f', b'm')
os.truncate('f', 1000)
os.truncate('f', 300000)
is_all_zero = open('f', 'rb').read()
assert is_all_zero == b'm' * 1000 + bytes(299000)
";
    std::fs::write("/mnt/program.py", program).unwrap();
    let running = scene.start(&[MEDIATED, &["--store-ttl", "0s"]].concat(), "python3 /mnt/program.py");
    crate::scene::eventually("the program reads both files", || std::path::Path::new("/mnt/read").exists());
    for name in ["f", "held"] {
        use std::os::unix::fs::FileExt;
        let file = std::fs::OpenOptions::new().write(true).open(scene.path(name)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(&vec![b'b'; 300_000], 0).unwrap();
        file.set_modified(modified).unwrap();
    }
    std::fs::write("/mnt/changed", "").unwrap();
    running.ends().exits(0);
    scene.holds("f", &[vec![b'm'; 1000], vec![0; 299_000]].concat());
    scene.is_clean();
}
