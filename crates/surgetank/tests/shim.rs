//! The preload shim and the mount serve the same files. A file that a program writes through one door is visible
//! through the other one as soon as it is closed, without a notification.
//!
//! `$by_mount` is the environment without the shim: a program that is started with it goes through the kernel. The
//! shell itself leaves its redirections to the mount, so python writes the files here.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use crate::scene::Scene;

const HEAD: &str = "set -eu; by_mount='env -u LD_PRELOAD -u SURGETANK_SHIM'\n";

/// A rule says that all files are small, so a process that writes one gets it directly, even on a busy machine.
const SMALL: [&str; 2] = ["--config", "/mnt/small.toml"];

fn scene(name: &str) -> Option<Scene> {
    Scene::new(name).map(with_small_files)
}

fn with_small_files(mut scene: Scene) -> Scene {
    scene.tier("fast", 512);
    std::fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"1M\"\n").unwrap();
    scene
}

#[track_caller]
fn wait_until(there: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !there() {
        assert!(begin.elapsed() < crate::scene::LIMIT, "waited in vain");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Runs python under the shim and returns its output.
fn python(scene: &Scene, options: &[&str], program: &str) -> crate::scene::Ended {
    std::fs::write("/mnt/program.py", program).unwrap();
    let options = [&SMALL, options].concat();
    scene.run(&options, &format!("{HEAD}exec /usr/bin/python3 /mnt/program.py")).exits(0)
}

/// All other tests would pass with the mount alone, so this one checks that the shim serves at all.
#[test]
fn programs_are_served_from_the_index_and_by_the_agent() {
    let Some(scene) = scene("shim_counts") else { return };
    let program = "
import os
os.mkdir('d')
for n in range(10):
    os.close(os.open(f'd/{n}', os.O_CREAT | os.O_WRONLY, 0o640))
for n in range(10):
    os.close(os.open(f'd/{n}', os.O_RDONLY))
    os.stat(f'd/{n}')
    assert not os.path.exists(f'd/{n}.not')
";
    std::fs::write("/mnt/program.py", program).unwrap();
    let ended = scene.run(&SMALL, &format!("{HEAD}SURGETANK_REPORT=1 exec /usr/bin/python3 /mnt/program.py")).exits(0);
    let line = ended.stderr.lines().find(|line| line.contains(" opens from the index")).unwrap().to_owned();
    let calls: String = line.split("; ").take(2).collect();
    let numbers: Vec<u32> = calls.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    // pid (behind the program's name, which has a digit), opens: index, agent, mount; stats: index, mount.
    let [.., index, agent, _, stats, _] = numbers[..] else { panic!("{line}") };
    // (The mount serves a file whose index record the agent is just writing.)
    assert!(index >= 8 && agent == 10 && stats >= 15, "{line}");
}

#[test]
fn run_without_the_shim_preloads_nothing() {
    let Some(scene) = scene("shim_off") else { return };
    let report = "echo \"${LD_PRELOAD:-none}\"; grep -c libsurgetank /proc/self/maps || true";
    scene.run(&["--no-preload"], report).exits(0).prints("none\n0\n");
    let with = scene.run(&[], report).exits(0);
    assert!(with.stdout.starts_with('/') && !with.stdout.ends_with("\n0\n"), "{}", with.stdout);
    // Loaded, but inactive.
    for sleep in ["SURGETANK_PRELOAD=0", "SURGETANK_PRELOAD_SKIP=perl:python3.11:python3"] {
        let script = format!("{sleep} SURGETANK_REPORT=1 /usr/bin/python3 -c 'open(\"f\", \"w\").write(\"x\")'");
        let ended = scene.run(&[], &script).exits(0);
        assert!(!ended.stderr.contains("opens from the index"), "{sleep}: {}", ended.stderr);
    }
}

#[test]
fn closed_file_is_seen_at_the_other_door() {
    let Some(scene) = scene("shim_close_to_open") else { return };
    python(
        &scene,
        &[],
        "
import os, subprocess
mount = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
reader = subprocess.Popen(['/usr/bin/python3', '-c', '''
import os, sys
for line in sys.stdin:
    name = line.strip()
    with open(name) as f: text = f.read()
    assert os.stat(name).st_size == len(text), (name, os.stat(name).st_size, len(text))
    with open(name, 'a') as f: f.write('+')
    print(text, flush=True)
'''], env=mount, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
os.mkdir('d')
for n in range(300):
    name = f'd/{n % 7}'
    before = open(name).read() if os.path.exists(name) else ''
    with open(name, 'w' if n % 2 else 'a') as f: f.write(f'{n};' * (n % 5 + 1))
    expected = ('' if n % 2 else before) + f'{n};' * (n % 5 + 1)
    reader.stdin.write(name + '\\n'); reader.stdin.flush()
    seen = reader.stdout.readline().strip()
    assert seen == expected, (n, seen, expected)
    assert open(name).read() == expected + '+', n
    assert os.stat(name).st_size == len(expected) + 1, n
",
    );
    scene.is_clean();
}

#[test]
fn growing_file_shows_its_size_at_once() {
    let Some(scene) = scene("shim_growing") else { return };
    python(
        &scene,
        &[],
        "
import os, subprocess
mount = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
watcher = subprocess.Popen(['/usr/bin/python3', '-c', '''
import os, sys
held = None
for line in sys.stdin:
    held = held or os.open('log', os.O_RDONLY)
    print(os.stat('log').st_size, os.fstat(held).st_size, len(os.pread(held, 1 << 20, 0)), flush=True)
'''], env=mount, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
with open('log', 'w', buffering=1) as log:
    for n in range(1, 200):
        log.write('line of a log\\n')
        watcher.stdin.write('now\\n'); watcher.stdin.flush()
        sizes = watcher.stdout.readline().split()
        assert sizes == [str(14 * n)] * 3, (n, sizes)
        assert os.stat('log').st_size == 14 * n
",
    );
}

/// The kernel's cache of a directory and its names is outdated when the shim makes a file without the kernel.
#[test]
fn file_made_after_a_failed_lookup_is_found() {
    let Some(scene) = scene("shim_negative") else { return };
    let script = format!(
        "{HEAD}mkdir d
        for n in $(seq 40); do
            if $by_mount test -e d/$n; then exit 1; fi
            $by_mount ls d >/dev/null; before=$($by_mount stat -c %y d)
            /usr/bin/python3 -c 'import sys; open(sys.argv[1], \"w\").write(\"x\")' d/$n
            $by_mount test -s d/$n
            test $($by_mount ls d | wc -l) = $n
            test \"$before\" != \"$($by_mount stat -c %y d)\"
        done"
    );
    scene.run(&[], &script).exits(0);
    scene.is_clean();
}

/// Only the kernel knows all descriptors of a file: the file is complete when the last of them is closed.
#[test]
fn file_is_complete_when_its_last_descriptor_closes() {
    let Some(scene) = scene("shim_last_close") else { return };
    let ended = python(&scene, &["--quiet-period", "0s"], "
import mmap, os, subprocess, time
def state(name): return os.getxattr(name, 'user.surgetank.state').decode()
def becomes(name, wanted):
    for _ in range(500):
        if state(name) == wanted: return
        time.sleep(0.02)
    raise SystemExit(f'{name} is {state(name)}, not {wanted}')
# A duplicate.
first = os.open('dup', os.O_CREAT | os.O_WRONLY); second = os.dup(first); os.write(first, b'a'); os.close(first)
time.sleep(0.2); assert state('dup') == 'open', state('dup')
os.write(second, b'b'); os.close(second); becomes('dup', 'durable')
# A child that outlives its parent's descriptor.
child_file = os.open('child', os.O_CREAT | os.O_WRONLY); os.set_inheritable(child_file, True)
child = subprocess.Popen(['sh', '-c', f'sleep 0.5; echo late >&{child_file}'], close_fds=False)
os.close(child_file); time.sleep(0.2); assert state('child') == 'open'
child.wait(); becomes('child', 'durable')
# A shared mapping outlives all descriptors.
mapped = os.open('mapped', os.O_CREAT | os.O_RDWR); os.ftruncate(mapped, 8192)
memory = mmap.mmap(mapped, 8192); os.close(mapped); time.sleep(0.2); assert state('mapped') == 'open'
memory[5000:5004] = b'page'; memory.close(); becomes('mapped', 'durable')
# Two independent descriptors; the process of one of them is killed.
killed = subprocess.Popen(['/usr/bin/python3', '-c', 'import os, time; f = os.open(\"two\", os.O_CREAT | os.O_WRONLY); os.write(f, b\"1\"); print(\"x\", flush=True); time.sleep(100)'], stdout=subprocess.PIPE)
killed.stdout.readline()
mine = os.open('two', os.O_WRONLY | os.O_APPEND); os.write(mine, b'2'); os.close(mine)
time.sleep(0.2); assert state('two') == 'open'
killed.kill(); killed.wait(); becomes('two', 'durable')
print('done')
");
    assert_eq!(ended.stdout, "done\n");
    scene.holds("dup", b"ab");
    scene.holds("child", b"late\n");
    scene.holds("two", b"12");
    assert_eq!(&scene.read("mapped")[5000..5004], b"page");
    scene.is_clean();
}

/// Regression: the agent had not noticed the last close when the next open came. It then sealed the file, and later
/// writes were lost.
#[test]
fn write_after_a_quick_reopen_is_kept() {
    let Some(scene) = scene("shim_reopen") else { return };
    python(
        &scene,
        &["--quiet-period", "0s"],
        "
import time
for n in range(150):
    with open(f'f{n}', 'w') as f: f.write('a')
    with open(f'f{n}', 'a') as f:
        time.sleep(0.003)
        f.write('b' * 1000)
",
    );
    for n in 0..150 {
        scene.holds(&format!("f{n}"), format!("a{}", "b".repeat(1000)).as_bytes());
    }
    scene.is_clean();
}

#[test]
fn fsync_in_memory_means_the_store() {
    let Some(mut scene) = Scene::new("shim_fsync") else { return };
    scene.state_elsewhere();
    let memory = scene.tmpfs("memory", 64);
    let tier = format!("ram={}:48M", memory.display());
    scene.tier("unused", 8);
    std::fs::write(
        "/mnt/program.py",
        "
import mmap, os, sys
f = os.open('f', os.O_CREAT | os.O_RDWR); os.write(f, b'synced'); os.fsync(f)
print('synced', flush=True); sys.stdin.readline()
os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); m[0:6] = b'mapped'; m.flush()
print('flushed', flush=True); sys.stdin.readline()
",
    )
    .unwrap();
    // The test looks at the bare directory from outside while the program waits.
    let script = format!(
        "{HEAD}mkfifo /mnt/go; (exec 3<>/mnt/go; exec /usr/bin/python3 /mnt/program.py <&3) |
         while read step; do echo $step >/mnt/step-$step; while ! test -e /mnt/seen-$step; do sleep 0.01; done; echo >/mnt/go; done"
    );
    let running = scene.start(&["--tier", &tier, "--quiet-period", "60s"], &script);
    for (step, expected) in [("synced", &b"synced"[..]), ("flushed", &b"mapped"[..])] {
        wait_until(|| std::path::Path::new(&format!("/mnt/step-{step}")).exists());
        assert_eq!(&scene.read("f")[..6], expected, "{step} before any close");
        std::fs::write(format!("/mnt/seen-{step}"), "").unwrap();
    }
    running.ends().exits(0);
}

/// The kernel sees two different file systems here.
#[test]
fn copy_between_the_doors_works() {
    let Some(scene) = scene("shim_copies") else { return };
    let program = "
import os, subprocess
# The shell leaves its redirections to the mount.
source = os.open('source', os.O_CREAT | os.O_RDWR); os.write(source, bytes(range(256)) * 200)
assert os.copy_file_range(source, 1, 50000, 100) == 50000
assert os.lseek(1, 0, os.SEEK_CUR) == 50000
assert os.copy_file_range(1, source, 1000, 0, 60000) == 1000
assert os.pread(source, 1000, 60000) == (bytes(range(256)) * 200)[100:1100]
assert os.copy_file_range(1, source, 10, 10**9, 0) == 0
";
    std::fs::write("/mnt/program.py", program).unwrap();
    scene.run(&SMALL, &format!("{HEAD}exec /usr/bin/python3 /mnt/program.py 1<>target")).exits(0);
    let bytes: Vec<u8> = (0..=255).cycle().skip(100).take(50_000).collect();
    scene.holds("target", &bytes);
    scene.is_clean();
}

/// A reader has the plain file open, and the agent has no record of that.
#[test]
fn file_open_for_reading_is_not_evicted() {
    let Some(scene) = scene("shim_evict") else { return };
    python(
        &scene,
        &["--quiet-period", "0s"],
        "
import os, subprocess, time
with open('f', 'wb') as f: f.write(b'x' * 100000)
while os.getxattr('f', 'user.surgetank.state') != b'durable': time.sleep(0.01)
held = os.open('f', os.O_RDONLY)
before = os.fstat(held)
subprocess.run(['/mnt/surgetank', 'evict', 'f'])
assert os.getxattr('f', 'user.surgetank.state') == b'durable', 'evicted under a reader'
assert os.fstat(held) == before and os.path.samestat(os.stat('f'), before)
os.close(held)
subprocess.run(['/mnt/surgetank', 'evict', 'f'])
assert os.getxattr('f', 'user.surgetank.state') == b'evicted'
assert os.stat('f').st_ino == before.st_ino and open('f', 'rb').read() == b'x' * 100000
",
    );
}

/// A program writes data through the shim and closes it. Then a program at the mount makes the marker for it.
#[test]
fn marker_made_through_the_mount_follows_its_data() {
    let Some(scene) = scene("shim_order") else { return };
    let script = format!(
        "{HEAD}mkdir out
        for n in $(seq 60); do
            /usr/bin/python3 -c 'import sys; open(sys.argv[1], \"wb\").write(b\"d\" * 20000)' out/data-$n
            $by_mount touch out/done-$n
        done"
    );
    let mut running = scene.start(&["--quiet-period", "0s"], &script);
    let mut marks = 0;
    while !running.has_ended() {
        // The store, while the drain fills it.
        for n in 1..=60 {
            if scene.path(&format!("out/done-{n}")).exists() {
                let data = std::fs::metadata(scene.path(&format!("out/data-{n}")));
                assert_eq!(data.map(|there| there.len()).ok(), Some(20_000), "done-{n} is there before its data");
                marks += 1;
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    running.ends().exits(0);
    assert!(marks > 100, "too few markers were seen: {marks}");
    scene.is_clean();
}

/// srun, ssh and containers carry the environment to machines without the mount.
#[test]
fn shim_without_the_mount_writes_nothing_to_the_bare_directory() {
    let Some(scene) = scene("shim_elsewhere") else { return };
    std::fs::write(scene.path("there"), "before").unwrap();
    let script =
        format!("{HEAD}env | grep -E '^(LD_PRELOAD|SURGETANK_SHIM)=' | tr '\\n' '\\f' >/mnt/environment; sleep 60");
    let running = scene.start(&[], &script);
    wait_until(|| std::fs::read("/mnt/environment").is_ok_and(|text| text.ends_with(b"\x0c")));
    let environment = std::fs::read_to_string("/mnt/environment").unwrap();
    let elsewhere = "
import errno, os
def refused(act, *args):
    try: act(*args)
    except OSError as why: assert why.errno == errno.ENOTCONN, (act, args, why)
    else: raise SystemExit(f'{act.__name__}{args} was let through')
def tries(path):
    refused(os.open, path + '/new', os.O_CREAT | os.O_WRONLY)
    refused(os.mkdir, path + '/dir')
    refused(os.unlink, path + '/there')
    refused(os.rename, path + '/there', '/mnt/stolen')
    refused(os.rename, '/mnt/program.py', path + '/program')
    refused(os.symlink, 'x', path + '/link')
    refused(os.truncate, path + '/there', 0)
    refused(os.chmod, path + '/there', 0)
    refused(os.listdir, path)
    refused(os.stat, path + '/there')
    refused(open, path + '/there')
    refused(os.execv, path + '/there', ['x'])
tries('/mnt/project'); tries('/mnt//./project'); tries('/mnt/state/../project')
refused(os.chdir, '/mnt/project')
os.chdir('/mnt')
tries('project')
open('/mnt/outside', 'w').write('works')
os.stat('/mnt/projectile') if os.path.exists('/mnt/projectile') else None
print('refused')
";
    std::fs::write("/mnt/program.py", elsewhere).unwrap();
    let mut command = std::process::Command::new("/usr/bin/python3");
    command.arg("/mnt/program.py").current_dir("/");
    // The variable itself has lines: only the separator after each variable was replaced.
    for variable in environment.split('\x0c').filter(|line| !line.is_empty()) {
        let (name, value) = variable.split_once('=').unwrap();
        command.env(name, value);
    }
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "refused\n", "{}", String::from_utf8_lossy(&output.stderr));
    let mut names: Vec<_> = std::fs::read_dir(scene.path("")).unwrap().map(|one| one.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["there"]);
    assert_eq!(scene.read("there"), b"before");
    assert_eq!(std::fs::read("/mnt/outside").unwrap(), b"works");
    running.kill();
    drop(running);
}

#[test]
fn unprivileged_user_is_served() {
    let Some(scene) = Scene::of_user("shim_user").map(with_small_files) else { return };
    let program = "
import os, subprocess
mount = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
os.mkdir('d'); os.umask(0o027)
f = os.open('d/f', os.O_CREAT | os.O_WRONLY); os.write(f, b'shared')
assert oct(os.fstat(f).st_mode) == '0o100750' and os.fstat(f).st_uid == os.getuid()
assert os.path.samestat(os.fstat(f), os.stat('d/f'))
# Read through the mount while it is being written.
assert subprocess.run(['cat', 'd/f'], env=mount, capture_output=True).stdout == b'shared'
os.write(f, b' and more')
assert subprocess.run(['cat', 'd/f'], env=mount, capture_output=True).stdout == b'shared and more'
os.close(f)
# Not even its owner may read it.
os.chmod('d/f', 0o200)
try: open('d/f'); raise SystemExit('read without permission')
except PermissionError: pass
os.chmod('d/f', 0o600)
";
    std::fs::write("/mnt/program.py", program).unwrap();
    let script = format!("{HEAD}SURGETANK_REPORT=1 exec /usr/bin/python3 /mnt/program.py");
    let ended = scene.run(&SMALL, &script).exits(0);
    assert!(ended.stderr.contains(" 1 from the agent"), "{}", ended.stderr);
    scene.holds("d/f", b"shared and more");
    scene.is_clean();
}

/// The library alone, with an index and an agent of its own tests.
#[test]
fn shim_passes_its_own_tests() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shim/tests/run");
    let output = std::process::Command::new(script).output().unwrap();
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{output_text}");
}

/// Regression: after each listing the kernel looked up all files in it for programs that have them from the index,
/// which doubled the listing's time. The shim also asked the mount to remove missing names.
#[test]
fn listing_and_removal_need_no_mount_request() {
    let Some(scene) = scene("shim_listing") else { return };
    let program = "
import os, subprocess, sys, urllib.request
def requests():
    text = urllib.request.urlopen('http://127.0.0.1:PORT/metrics').read().decode()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith('surgetank_mount_requests_total '))
if sys.argv[1:] == ['walk']:
    for name, count in ('few', 300), ('many', 2000):
        assert sum(entry.stat().st_size for entry in os.scandir(name)) == count
elif sys.argv[1:] == ['remove']:
    os.chdir('few')
    here = os.open('.', os.O_RDONLY)
    for n in range(100):
        for remove in os.unlink, os.rmdir, lambda path: os.unlink(path, dir_fd=here):
            try:
                remove(f'{n}.not')
            except FileNotFoundError:
                pass
            else:
                sys.exit('it was there')
elif sys.argv[1:] == ['times']:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    os.mkdir('times')
    for n in range(100):
        with open(f'times/{n}', 'w') as file:
            file.write('x')
        # Like git and Python's shutil, before any process has looked the file up again.
        if n % 2:
            assert libc.utime(f'times/{n}'.encode(), (ctypes.c_long * 2)(n, 2 * n)) == 0
        else:
            os.utime(f'times/{n}', ns=(n * 10**9 + 7, 2 * n * 10**9 + 7))
        assert os.stat(f'times/{n}').st_mtime_ns == 2 * n * 10**9 + (0 if n % 2 else 7), n
    os.utime('times/3', ns=(1, 5))
    os.symlink('3', 'times/link')
    os.utime('times/link', ns=(3, 8), follow_symlinks=False)
    assert (os.stat('times/3').st_mtime_ns, os.lstat('times/link').st_mtime_ns) == (5, 8)
    os.utime('times/link', ns=(3, 2))
    assert os.stat('times/3').st_mtime_ns == 2
    for missing in 'times/no', 'no/no':
        try:
            os.utime(missing)
        except FileNotFoundError:
            continue
        sys.exit('it was there')
elif sys.argv[1:] == ['times seen']:
    for n in range(100):
        if n != 3:
            assert os.stat(f'times/{n}').st_mtime_ns == 2 * n * 10**9 + (0 if n % 2 else 7), n
elif sys.argv[1:] == ['stat']:
    assert all(os.stat(f'few/{n}').st_size == 1 for n in range(300))
else:
    for name, count in ('few', 300), ('many', 2000):
        os.mkdir(name)
        for n in range(count):
            with open(f'{name}/{n}', 'w') as file:
                file.write('x')
        assert len(os.listdir(name)) == count
    free = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
    for what, environment in ('times', os.environ), ('times seen', free), ('remove', os.environ), ('walk', os.environ), ('walk', free), *[('stat', free)] * 3:
        before = requests()
        subprocess.run([sys.executable, '/mnt/program.py', what], env=environment, check=True)
        print(requests() - before)
";
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    std::fs::write("/mnt/program.py", program.replace("PORT", &port.to_string())).unwrap();
    std::fs::write("/mnt/open.toml", format!("metrics = {port}\nmetrics_token_file = \"none\"\n")).unwrap();
    let script = format!("{HEAD}exec /usr/bin/python3 /mnt/program.py");
    let printed = scene.run(&["--config", "/mnt/open.toml"], &script).exits(0).stdout;
    let mtime = |name: &str| std::fs::metadata(scene.over.join("times").join(name)).unwrap().modified().unwrap();
    for n in [0, 1, 2, 99] {
        let nanos = if n % 2 == 0 { 7 } else { 0 };
        assert_eq!(mtime(&n.to_string()), std::time::UNIX_EPOCH + std::time::Duration::new(2 * n, nanos), "{n}");
    }
    let counts: Vec<u32> = printed.lines().map(|line| line.parse().unwrap()).collect();
    let [times, _, removals, with_the_shim, walk, ..] = counts[..] else { panic!("{printed}") };
    assert!(times < 50, "{printed}");
    assert!(removals < 50, "the shim looked up missing names at the mount to remove them: {printed}");
    assert!(with_the_shim < 50, "{printed}");
    assert!(walk >= 300, "a listing for the shim filled the kernel's cache: {printed}");
    assert!(walk < 1000, "a program without the shim looked up each file: {printed}");
    // (With little free memory the kernel drops names at any moment.)
    assert!(counts[5..].iter().any(|stat| *stat < 50), "{printed}");
}

/// Regression: the answer to the file's first look-up was in flight with the old times, valid for an hour. The
/// notification of the change reached a kernel that did not know the file yet.
#[test]
fn times_set_during_a_mount_lookup_are_seen() {
    let Some(scene) = scene("shim_times_looked") else { return };
    let program = "
import os, subprocess, time
plain = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
def seen(name):
    return int(subprocess.run(['stat', '-c', '%Y', name], env=plain, check=True, capture_output=True).stdout)
os.mkdir('d')
caught = False
for n in range(20): # on a busy machine one try may miss the moment
    with open(f'd/{n}', 'w') as file:
        file.write('x')
    time.sleep(0.2)
    looks = subprocess.Popen(['stat', '-c', '%Y', f'd/{n}'], env=plain, stdout=subprocess.PIPE)
    time.sleep(0.2)
    os.utime(f'd/{n}', (7, 7))
    caught = int(looks.communicate()[0]) != 7
    assert seen(f'd/{n}') == 7, seen(f'd/{n}')
    if caught: break
assert caught
";
    std::fs::write("/mnt/program.py", program).unwrap();
    scene.run_held("lookup.found:500", &SMALL, "exec /usr/bin/python3 /mnt/program.py").exits(0);
}

/// Regression: the same with a size. A program got the file for writing while that answer was in flight.
#[test]
fn size_grown_during_a_mount_lookup_is_seen() {
    let Some(scene) = scene("shim_size_looked") else { return };
    let program = "
import os, subprocess, time
plain = {name: value for name, value in os.environ.items() if name not in ('LD_PRELOAD', 'SURGETANK_SHIM')}
def seen(name):
    return int(subprocess.run(['stat', '-c', '%s', name], env=plain, check=True, capture_output=True).stdout)
os.mkdir('d')
caught = False
for n in range(20):
    with open(f'd/{n}', 'w') as file:
        file.write('x')
    time.sleep(0.2)
    looks = subprocess.Popen(['stat', '-c', '%s', f'd/{n}'], env=plain, stdout=subprocess.PIPE)
    time.sleep(0.2)
    begun = time.monotonic()
    file = open(f'd/{n}', 'a')
    # The answer is held for half a second: it is still in flight, or the open waited for it.
    caught = looks.poll() is None or time.monotonic() - begun > 0.1
    file.write('y' * 99)
    file.flush()
    looks.communicate()
    assert seen(f'd/{n}') == 100, seen(f'd/{n}') # while it is open
    file.close()
    if caught: break
assert caught
";
    std::fs::write("/mnt/program.py", program).unwrap();
    scene.run_held("lookup.found:500", &SMALL, "exec /usr/bin/python3 /mnt/program.py").exits(0);
}

/// The agent cannot know whether the kernel has an earlier agent's file. Regression: each change of times waited for
/// more than a second, and blocked all other programs' requests.
#[test]
fn times_on_files_of_a_killed_agent_are_set_at_once() {
    let Some(scene) = scene("shim_times_killed") else { return };
    let program = "
import os, time
os.mkdir('d')
for n in range(120):
    with open(f'd/{n}', 'w') as file:
        file.write('x')
time.sleep(2)
os.unlink('d/119') # the agent dies during this unlink
# At more than a second each, these calls would take longer than any command of a test may.
for n in range(119):
    os.utime(f'd/{n}', (7, 7))
assert all(os.stat(f'd/{n}').st_mtime == 7 for n in range(119))
";
    std::fs::write("/mnt/program.py", program).unwrap();
    let mut command = scene.run_command(&SMALL, "exec /usr/bin/python3 /mnt/program.py");
    command.env("SURGETANK_CRASH", "unlink.begun:1");
    crate::scene::Running::of(command).ends().exits(0);
    assert!(scene.log().contains("another one takes over"), "{}", scene.log());
}
