//! The preload shim: regressions and near misses, each with its critical moment prolonged.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use crate::scene::{Running, Scene, eventually};

/// A rule says that all files are small, so a process that writes one gets it directly, even on a busy machine.
const SMALL: [&str; 2] = ["--config", "/mnt/small.toml"];
const PYTHON: &str = "exec /usr/bin/python3 /mnt/program.py";

fn scene(name: &str) -> Option<Scene> {
    let mut scene = Scene::new(name)?;
    scene.tier("fast", 512);
    Some(scene)
}

/// The files that every run here needs below the scene's /mnt.
fn prepare(program: &str) {
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"1M\"\n").unwrap();
    fs::write("/mnt/program.py", program).unwrap();
}

/// The kernel reports a close before the file counts as closed. In between the tier's file system may have work: ext4
/// allocates delayed blocks, and begins to write them if the file was truncated before. Regression: the marker after it
/// was queued, and shown in the store, before its data.
#[test]
fn marker_follows_data_whose_close_is_reported_early() {
    let Some(scene) = Scene::new("shim_early_close") else { return };
    scene.ext4("disk", 1024);
    prepare(
        "
import os
for n in range(12):
    data = os.open(f'data-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(data, b'x')
    os.ftruncate(data, 0)
    os.pwrite(data, b'd' * (16 << 20), 0)
    os.close(data)
    os.close(os.open(f'done-{n}', os.O_CREAT | os.O_WRONLY, 0o644))
",
    );
    fs::write("/mnt/large.toml", "[[rules]]\nmatch = \"**\"\nsize = \"20M\"\n").unwrap();
    let options = ["--config", "/mnt/large.toml", "--quiet-period", "0s", "--tier", "disk=/mnt/disk:900M"];
    let mut running = scene.start(&options, PYTHON);
    let (mut seen, mut looks) = (BTreeSet::new(), 0);
    while !running.has_ended() {
        for n in 0..12 {
            if !seen.contains(&n) && scene.path(&format!("done-{n}")).exists() {
                assert!(scene.path(&format!("data-{n}")).exists(), "done-{n} is in the store before its data");
                seen.insert(n);
            }
        }
        looks += 1;
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    let ended = running.ends().exits(0);
    assert!(looks > 100 && seen.len() > 5, "too few looks: {looks} times, {} markers", seen.len());
    assert!(ended.stderr.contains(" 0 mediated"), "not by the shim: {}", ended.stderr);
    assert_eq!(scene.store_files()[std::path::Path::new("data-11")], 16 << 20);
}

/// The kernel takes longer to close a large file, and other programs close theirs meanwhile. The agent must still
/// check the large file again.
#[test]
fn marker_follows_data_whose_close_takes_long() {
    let Some(scene) = Scene::new("shim_long_close") else { return };
    scene.ext4("disk", 2048);
    prepare(
        "
import os, subprocess, sys, time
code = 'import os, sys\\nn = 0\\nwhile not os.path.exists(\"over\"):\\n n += 1; open(f\"other-{n % 500}\", \"w\").close()'
others = subprocess.Popen([sys.executable, '-c', code])
longest = 0
for n in range(3):
    data = os.open(f'data-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(data, b'x')
    os.ftruncate(data, 0)
    for at in range(24): os.pwrite(data, b'd' * (16 << 20), at << 24)
    before = time.monotonic()
    os.close(data)
    longest = max(longest, time.monotonic() - before)
    os.close(os.open(f'done-{n}', os.O_CREAT | os.O_WRONLY, 0o644))
open('over', 'w').close()
sys.exit(others.wait())
",
    );
    fs::write(
        "/mnt/large.toml",
        "[[rules]]\nmatch = \"data-*\"\nsize = \"400M\"\n[[rules]]\nmatch = \"o*\"\nsize = \"1M\"\n",
    )
    .unwrap();
    let options = ["--config", "/mnt/large.toml", "--quiet-period", "0s", "--tier", "disk=/mnt/disk:1900M"];
    let mut running = scene.start(&options, PYTHON);
    while !running.has_ended() {
        for n in 0..3 {
            if scene.path(&format!("done-{n}")).exists() {
                assert!(scene.path(&format!("data-{n}")).exists(), "done-{n} is in the store before its data");
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    running.ends().exits(0);
    assert_eq!(scene.store_files()[std::path::Path::new("data-2")], 384 << 20);
}

/// The user's inotify watches are used up. Regression: the shim noticed that after it had made the file, and the
/// mount then returned EEXIST.
#[test]
fn exclusive_create_without_inotify_watches_succeeds() {
    let Some(mut scene) = Scene::of_user("shim_no_watch") else { return };
    scene.tier("fast", 64);
    prepare(
        "
import os
for n in range(20):
    made = os.open(f'exclusive-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(made, b'content')
    os.close(made)
    with open(f'exclusive-{n}', 'a') as again: again.write(' and more')
    assert open(f'exclusive-{n}').read() == 'content and more'
    try: os.open(f'exclusive-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY); assert False
    except FileExistsError: pass
held = open('held-to-the-end', 'w'); held.write('x'); held.flush()
os._exit(0)
",
    );
    // In a user namespace the limit is separate, and the agent, which starts inside, counts there.
    let script = "echo 0 > /proc/sys/user/max_inotify_watches; exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all \
        /mnt/surgetank run --over /mnt/project --state /mnt/state --no-progress --tier fast=/mnt/tier-fast:64M \
        --config /mnt/small.toml --quiet-period 0s -- /usr/bin/python3 /mnt/program.py";
    let mut command = scene.command("unshare");
    command.args(["--user", "--map-current-user", "--keep-caps", "bash", "-euc", script]);
    Running::of(command).ends().exits(0);
    assert!(scene.log().contains("cannot be watched"), "the agent had watches:\n{}", scene.log());
    for n in 0..20 {
        scene.holds(&format!("exclusive-{n}"), b"content and more");
    }
    scene.holds("held-to-the-end", b"x");
    scene.is_clean();
}

/// The agent empties the tiers at its end. Regression: a file that a process still read stayed there.
#[test]
fn file_read_during_the_final_drain_leaves_the_tier() {
    let Some(scene) = scene("shim_end_readers") else { return };
    prepare("");
    let script = "/usr/bin/python3 -c 'open(\"read\", \"w\").write(\"to the end\")'; touch /mnt/waits
        while [ ! -e /mnt/go ]; do sleep 0.02; done";
    let running = scene.start(&SMALL, script);
    eventually("the file is made", || std::path::Path::new("/mnt/waits").exists());
    // Like a process that received the descriptor from a program: it is outside the mount, and does not keep it busy.
    let mut tier = scene.tier_files();
    // (The agent adds the ballast at its next check of the devices.)
    tier.retain(|path| !path.ends_with("ballast"));
    assert_eq!(tier.len(), 1, "{tier:?}");
    let find = std::process::Command::new("find").args(["/mnt/tier-fast", "-name", "read"]).output().unwrap();
    let path = String::from_utf8(find.stdout).unwrap();
    let mut reader = File::open(path.trim()).unwrap();
    fs::write("/mnt/go", "").unwrap();
    running.ends().exits(0);
    scene.leaves_nothing_on_the_tiers();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "to the end");
    scene.holds("read", b"to the end");
}

/// A process appends, to an open file or with a close each time. A reader never sees the file shrink, by any call.
const GROWING: &str = "
import os, subprocess, sys, threading
code = '''
import os
log = None
for n in range(1500):
    # The reader has seen it grow again.
    if n % 50 == 49: assert os.read(0, 1)
    if n % 100 < 50:
        with open(\"log\", \"ab\") as one: one.write(b\"x\" * 7)
    else:
        log = log or os.open(\"log\", os.O_WRONLY | os.O_APPEND)
        os.write(log, b\"x\" * 7)
        if n % 100 == 99: os.close(log); log = None
    if n % 300 == 299: os.rename(\"log\", \"moved\"); os.rename(\"moved\", \"log\")
'''
open('log', 'wb').close()
environment = dict(os.environ)
if sys.argv[1] == 'plain':
    for name in ('LD_PRELOAD', 'SURGETANK_SHIM'): environment.pop(name, None)
heard, seen = os.pipe()
writer = subprocess.Popen(['/usr/bin/python3', '-c', code], env=environment, stdin=heard)
held = os.open('log', os.O_RDONLY)
calls = [lambda: os.stat('log').st_size, lambda: os.fstat(held).st_size, lambda: os.stat('log', dir_fd=here).st_size,
         lambda: os.lseek(held, 0, os.SEEK_END), lambda: [e for e in os.scandir('.') if e.name == 'log'][0].stat().st_size]
here = os.open('.', os.O_RDONLY)
last, looks, grew = 0, 0, 0
while True:
    over = writer.poll() is not None
    for number, call in enumerate(calls):
        try: size = call()
        # For an instant the file has the other name.
        except (FileNotFoundError, IndexError): continue
        assert size >= last, (number, size, last)
        if size > last: os.write(seen, b'.')
        grew += size > last
        last, looks = size, looks + 1
    if over: break
assert writer.returncode == 0 and last == 1500 * 7, last
assert looks > 100 and grew > 20, (looks, grew)
";

#[test]
fn growing_size_never_shrinks_in_any_call() {
    let Some(scene) = scene("shim_growing_sizes") else { return };
    prepare(GROWING);
    for (options, writer) in [
        (&[][..], "shim"),
        (&[][..], "plain"),
        (&["--door", "seccomp"][..], "shim"),
        (&["--door", "seccomp"][..], "plain"),
        (&["--door", "seccomp", "--no-preload"][..], "plain"),
    ] {
        let options = [&SMALL[..], options].concat();
        scene.run(&options, &format!("{PYTHON} {writer}")).exits(0);
        assert_eq!(scene.store_files()[std::path::Path::new("log")], 1500 * 7, "{options:?}, {writer}");
        scene.await_no_agent();
        fs::remove_file(scene.path("log")).unwrap();
    }
}

/// Between the look-up and the query of the plain file's size the file may become another one. The tier's file system
/// (ext4) may even reuse the inode number. A reader sees one of the two, never a mixture.
#[test]
fn stat_never_mixes_two_files_of_one_name() {
    let Some(scene) = Scene::new("shim_mixed") else { return };
    scene.ext4("disk", 64);
    prepare(
        "
import os, random, subprocess, sys
os.umask(0)
kinds = [(0o600, 1000), (0o640, 2000), (0o644, 3000), (0o664, 4000), (0o666, 5000)]
reader = '''
import os, sys
seen = {}
sizes = {0o600: 1000, 0o640: 2000, 0o644: 3000, 0o664: 4000, 0o666: 5000}
try:
    while not os.path.exists(\"over\"):
        try: s = os.stat(\"file\")
        except FileNotFoundError: continue
        kind = s.st_mode & 0o777
        seen[kind] = seen.get(kind, 0) + 1
        assert s.st_size <= sizes[kind], (oct(kind), s.st_size)
except AssertionError as e: print(\"mixed:\", e); sys.exit(1)
assert min(seen.values()) > 5 and len(seen) == 5, seen
'''
# strace delays the second of the two calls.
delay = ['strace', '-f', '-qq', '-o', '/dev/null', '-e', 'trace=newfstatat', '-e', 'inject=newfstatat:delay_enter=3000']
reading = subprocess.Popen([*delay, '/usr/bin/python3', '-c', reader])
while reading.poll() is None:
    for mode, size in random.choices(kinds, k=2):
        made = os.open('file', os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        os.write(made, b'x' * size)
        os.fstat(made)
        for _ in range(20000): pass
        os.unlink('file')
        os.close(made)
    if not hasattr(sys, 'rounds'): sys.rounds = 0
    sys.rounds += 1
    if sys.rounds == 1500: open('over', 'w').close()
sys.exit(reading.returncode)
",
    );
    if std::process::Command::new("strace").arg("-V").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "strace is missing: scripts/setup test installs it");
        eprintln!("skipped: no strace");
        return;
    }
    scene.run(&[&SMALL[..], &["--tier", "disk=/mnt/disk:48M"]].concat(), PYTHON).exits(0);
}

/// Regression: the index's reader tried three times, then took the descriptor for one outside the directory and
/// returned the tier's attributes.
#[test]
fn file_whose_record_is_being_written_has_its_attributes() {
    let Some(mut scene) = Scene::new("shim_record_written") else { return };
    scene.tier("fast", 64);
    let program = "
import os, stat
open('f', 'w').close()
os.chmod('f', 0o440)
file = os.open('f', os.O_RDONLY)
seen = os.fstat(file)
child = os.fork()
if child == 0:
    for turn in range(5000):
        os.chmod('f', 0o440 if turn % 2 else 0o400)
    os._exit(0)
looks = 0
while os.waitpid(child, os.WNOHANG) == (0, 0):
    for _ in range(100):
        now = os.fstat(file)
        assert (now.st_ino, now.st_dev) == (seen.st_ino, seen.st_dev), f'another file: {now}'
        assert stat.S_IMODE(now.st_mode) in (0o440, 0o400), f'after {looks} looks: {now}'
        looks += 1
assert looks > 1000
";
    fs::write("/mnt/program.py", program).unwrap();
    scene.run(&["--quiet-period", "1h"], "exec python3 /mnt/program.py").exits(0);
}

/// The device number does not tell which of two tiers stores a file. Regression: the shim assumed the first tier, and
/// returned the tier's attributes.
#[test]
fn file_on_the_second_tier_of_a_device_has_its_attributes() {
    let Some(scene) = Scene::new("shim_two_on_one") else { return };
    scene.tmpfs("both", 64);
    fs::create_dir("/mnt/both/a").unwrap();
    fs::create_dir("/mnt/both/b").unwrap();
    // The rule says that the file is small, so the shim gets it.
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"256K\"\n").unwrap();
    let tiers = ["--tier", "full=/mnt/both/a:4K", "--tier", "second=/mnt/both/b:32M", "--config", "/mnt/small.toml"];
    let program = "
import os
os.umask(0)
by_mount = os.stat('.')
f = os.open('f', os.O_CREAT | os.O_WRONLY, 0o444)
os.write(f, b'x' * 100000)
assert any('f' in files for _, _, files in os.walk('/mnt/both/b')), 'not on the second tier'
s = os.fstat(f)
assert (oct(s.st_mode), s.st_dev, s.st_ino) == ('0o100444', by_mount.st_dev, os.lstat('f').st_ino), s
";
    fs::write("/mnt/program.py", program).unwrap();
    scene.run(&tiers, "exec python3 /mnt/program.py").exits(0);
}

/// Regression: the answer to link declared the attributes valid for an hour while a program wrote the file directly.
#[test]
fn link_to_a_growing_file_shows_its_growth_at_the_mount() {
    let Some(scene) = scene("shim_link_growth") else { return };
    prepare(
        "
import os, subprocess
plain = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
by_mount = lambda *words: subprocess.run(words, env=plain, check=True, capture_output=True, text=True).stdout
file = os.open('grows', os.O_CREAT | os.O_WRONLY, 0o644)
os.write(file, b'x' * 100)
by_mount('ln', 'grows', 'also')
assert by_mount('stat', '-c', '%s', 'also') == '100\\n'
os.write(file, b'x' * 900)
assert by_mount('stat', '-c', '%s', 'also') == '1000\\n'
assert by_mount('stat', '-c', '%s', 'grows') == '1000\\n'
",
    );
    scene.run(&SMALL, PYTHON).exits(0);
}

/// Regression: a reader that opened the file before another program wrote it through the agent got the plain file's own
/// mode.
#[test]
fn reader_of_a_file_now_mediated_sees_its_mode() {
    let Some(mut scene) = Scene::new("shim_mediated_mode") else { return };
    // So little room that no program may write a file of unknown size directly.
    scene.tier("fast", 2);
    prepare(
        "
import os, subprocess
plain = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
os.close(os.open('file', os.O_CREAT | os.O_WRONLY, 0o444))
file = os.open('file', os.O_RDONLY)
first = os.fstat(file)
writer = subprocess.Popen(['sh', '-c', 'exec >>file; echo more; echo >&2; read end'], env=plain, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
writer.stderr.read(1)
now = os.fstat(file)
assert (oct(now.st_mode), now.st_ino, now.st_dev) == (oct(first.st_mode), first.st_ino, first.st_dev), (first, now)
writer.communicate(b'end\\n')
assert writer.returncode == 0
",
    );
    scene.run(&[], PYTHON).exits(0);
}

/// Regression: a reader that had the file open when its last name was removed got the plain file's own mode.
#[test]
fn reader_of_an_unlinked_file_sees_its_mode() {
    let Some(scene) = scene("shim_unnamed_mode") else { return };
    prepare(
        "
import os, time
for remove in (os.unlink, lambda name: os.replace('other', name)):
    for mode in (0o544, 0o440, 0o4711, 0o644):
        for name in ('f', 'other'):
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.chmod('f', mode)
        time.sleep(0.1)
        file = os.open('f', os.O_RDONLY)
        before = os.fstat(file)
        remove('f')
        after = os.fstat(file)
        assert (oct(after.st_mode), after.st_nlink) == (oct(0o100000 | mode), 0), (oct(mode), before, after)
        assert oct(before.st_mode) == oct(after.st_mode)
        os.close(file)
        for name in ('f', 'other'):
            if os.path.exists(name): os.unlink(name)
",
    );
    let ended = scene.run(&SMALL, PYTHON).exits(0);
    assert!(ended.stderr.contains(" 0 mediated"), "not by the shim: {}", ended.stderr);
}

/// Regression: while the agent processed the close, the plain file still had a name, and readers through the shim saw a
/// link.
#[test]
fn file_unlinked_just_after_its_close_has_no_link() {
    let Some(scene) = scene("shim_unnamed_closed") else { return };
    prepare(
        "
import os, time
writer = os.open('f', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
reader = os.open('f', os.O_RDONLY)
os.write(writer, b'more')
before = os.fstat(reader)
os.close(writer)
time.sleep(0.1) # the agent knows of the close, and has not processed it
os.unlink('f')
for _ in range(1000):
    after = os.fstat(reader)
    assert (after.st_nlink, after.st_size) == (0, 4), (before, after)
",
    );
    let ended = scene.run_held("seal.begun:600", &SMALL, PYTHON).exits(0);
    assert!(ended.stderr.contains(" 0 mediated"), "not by the shim: {}", ended.stderr);
}

/// Regression: the last file counted as closed an instant before it became a version. A program at the mount then had
/// nothing to wait for, and its marker was queued before the data.
#[test]
fn marker_follows_a_file_that_is_being_sealed() {
    let Some(scene) = scene("shim_becoming") else { return };
    prepare(
        "
import os, time
for n in range(5):
    with open(f'data-{n}', 'x') as data: data.write('d')
    time.sleep(0.05)
    os.symlink('x', f'done-{n}')
",
    );
    let options = [&SMALL[..], &["--quiet-period", "0s"]].concat();
    let ended = scene.run_held("seal.begun:300", &options, PYTHON).exits(0);
    assert!(ended.stderr.contains(" 0 mediated"), "not by the shim: {}", ended.stderr);
    // The change time in the store is that of the rename that published the file.
    let changed = |name: String| {
        let stat = fs::symlink_metadata(scene.path(&name)).unwrap();
        (stat.ctime(), stat.ctime_nsec())
    };
    for n in 0..5 {
        assert!(changed(format!("data-{n}")) <= changed(format!("done-{n}")), "done-{n} was published before data-{n}");
    }
}

/// Regression: the directory in which the file was made no longer reported a file that was moved while open. The marker
/// after it was queued before its data.
#[test]
fn marker_follows_data_renamed_during_its_write() {
    let Some(scene) = scene("shim_renamed_open") else { return };
    prepare(
        "
import os
for place in ('made', 'moved', 'below'):
    os.mkdir(place)
new = os.O_CREAT | os.O_EXCL | os.O_WRONLY
for n in range(40):
    data = os.open('made/data', new, 0o644)
    if n % 4 == 0:
        os.rename('made/data', f'moved/data-{n}')
    elif n % 4 == 1:
        os.rename('made/data', f'made/data-{n}')
        os.rename(f'made/data-{n}', f'moved/data-{n}')
    elif n % 4 == 2:
        # The name belongs to two files one after another.
        os.unlink('made/data')
        first, data = data, os.open('made/data', new, 0o644)
        os.close(first)
        os.rename('made/data', f'moved/data-{n}')
    else:
        os.rename('made', 'below/made')
        os.rename('below/made/data', f'moved/data-{n}')
        os.mkdir('made')
        os.rmdir('below/made')
    os.write(data, b'd' * 1000)
    os.close(data)
    os.close(os.open(f'done-{n}', new, 0o644))
",
    );
    let mut running = scene.start(&[&SMALL[..], &["--quiet-period", "0s"]].concat(), PYTHON);
    let (mut seen, mut looks) = (BTreeSet::new(), 0);
    while !running.has_ended() {
        for n in 0..40 {
            if !seen.contains(&n) && scene.path(&format!("done-{n}")).exists() {
                assert!(scene.path(&format!("moved/data-{n}")).exists(), "done-{n} is in the store before its data");
                seen.insert(n);
            }
        }
        looks += 1;
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    let ended = running.ends().exits(0);
    assert!(ended.stderr.contains(" 0 mediated"), "not by the shim: {}", ended.stderr);
    assert!(looks > 10, "too few looks at the store");
}

/// The mount has found no such name, and is about to report that to the kernel. Regression: when the shim made the file
/// at that moment, the kernel kept the negative entry for an hour.
#[test]
fn name_made_during_a_failing_mount_lookup_is_found() {
    let Some(scene) = scene("shim_missed_made") else { return };
    prepare(
        "
import os, subprocess, time
plain = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
os.mkdir('d')
caught = False
for n in range(20): # on a busy machine one try may miss the moment
    looks = subprocess.Popen(['stat', f'd/{n}'], env=plain, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(0.3)
    os.close(os.open(f'd/{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    caught = b'No such file' in looks.communicate()[1]
    subprocess.run(['stat', f'd/{n}'], env=plain, check=True, stdout=subprocess.DEVNULL)
    if caught: break
assert caught
",
    );
    scene.run_held("lookup.missed:1000", &SMALL, PYTHON).exits(0);
}

/// mkdir's answer has the directory's attributes, valid for an hour. Regression: the kernel was not notified of files
/// made in it without the kernel, and `tar` reported "file changed as we read it".
#[test]
fn new_directory_shows_current_times_while_open() {
    let Some(scene) = scene("shim_directory_times") else { return };
    prepare(
        "
import os
for d in range(20):
    os.mkdir(f'd{d}')
    for f in range(20):
        open(f'd{d}/{f}', 'w').close()
    directory = os.open(f'd{d}', os.O_RDONLY | os.O_DIRECTORY)
    by_path, opened = os.stat(f'd{d}'), os.fstat(directory)
    if (by_path.st_mtime_ns, by_path.st_ctime_ns) != (opened.st_mtime_ns, opened.st_ctime_ns):
        print(f'd{d}', (by_path.st_mtime_ns - opened.st_mtime_ns) / 1e6, 'ms behind')
    os.close(directory)
",
    );
    scene.run(&[&SMALL[..], &["--rule", "**=keep"]].concat(), PYTHON).exits(0).prints("");
}

/// Regression: no tier took the file, so the agent made it in the store and granted a writable descriptor of its own.
/// The file counted as open until the end.
#[test]
fn file_refused_by_its_tier_is_sealed_on_close() {
    let Some(scene) = scene("shim_refused") else { return };
    prepare(
        "
import glob, os
os.mkdir('d')
os.close(os.open('d/a', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
# A file on the tier takes the place of its directory.
there = glob.glob('/mnt/tier-fast/surgetank-*/d')[0] + '/dir'
open(there, 'w').close()
os.mkdir('d/dir')
os.close(os.open('d/dir/x', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
os.unlink(there)
",
    );
    scene.run(&SMALL, PYTHON).exits(0);
    scene.holds("d/dir/x", b"");
    scene.is_clean();
}
