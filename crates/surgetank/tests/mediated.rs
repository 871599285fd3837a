//! Files whose bytes the agent moves. Who only writes goes past the kernel's pages; everybody else must not notice.
#![allow(clippy::unwrap_used, reason = "in a test that is how it fails")]

mod scene;

use scene::Scene;

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
fn what_is_written_past_the_pages_is_seen_in_them() {
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

/// Whether a write appends was believed to be as it was when the file was opened.
#[test]
fn what_was_opened_to_append_appended_for_ever() {
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
