//! Delegated directories (docs/internals/doors.md, "Delegated directories"). A file that a program creates without a
//! request is visible at every door at once, exactly once. The drain publishes such files in the order of the closes.
//! Kills and renames do not change this.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::scene::delegation::{FAST, INTAKE, created_delegated, python, scene};
use crate::scene::{Running, Scene, eventually};

#[test]
fn delegated_create_is_visible_at_every_door_at_once() {
    let Some(scene) = scene("delegation_at_once") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
for n in range(300):
    name = f'd/file-{n}'
    try: os.stat(name); assert False
    except FileNotFoundError: pass
    made = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
    before = os.fstat(made)
    os.write(made, b'data')
    if n % 3 == 0: os.fchmod(made, 0o600)
    one, other = os.stat(name), os.fstat(made)
    assert (one.st_dev, one.st_ino, one.st_mode) == (other.st_dev, other.st_ino, other.st_mode), (one, other)
    assert before.st_ino == one.st_ino and one.st_dev == os.stat('d').st_dev and one.st_nlink == 1
    assert one.st_size == 4, one
    assert oct(one.st_mode) == ('0o100600' if n % 3 == 0 else '0o100640'), oct(one.st_mode)
    os.close(made)
    assert os.stat(name).st_ino == one.st_ino
    try: os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY); assert False
    except FileExistsError: pass
    assert open(name).read() == 'data'
    if n % 20 == 0:
        assert f'file-{n}' in os.listdir('d')
        seen = bare('stat', '-c', '%i %a', name)
        assert seen.stdout.split()[0] == str(one.st_ino), (seen, one)
    if n % 7 == 0: os.unlink(name)
    elif n % 11 == 0: os.rename(name, f'd/renamed-{n}')
expected = {f'first-{n}' for n in range(8)}
for n in range(300):
    if n % 7: expected.add(f'renamed-{n}' if n % 11 == 0 else f'file-{n}')
assert set(os.listdir('d')) == expected
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    let stored: BTreeSet<_> = scene.store_files().into_keys().collect();
    assert_eq!(stored.len(), 8 + 300 - 43);
    scene.is_clean();
}

/// `cp -a` creates a read-only file without the owner's right to write (git's objects): no request but that for its mode.
#[test]
fn delegated_create_of_a_read_only_file_keeps_mode_and_times() {
    let Some(scene) = scene("delegation_modes") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
modes = [0o400, 0o444, 0o555, 0o200, 0o000, 0o640]
for n in range(120):
    name, mode = f'd/file-{n}', modes[n % 6]
    made = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    os.write(made, b'data')
    os.utime(made, (1000 + n, 2000 + n))
    for seen in (os.fstat(made), os.stat(name)):
        assert (seen.st_mode & 0o7777, seen.st_size, seen.st_mtime) == (mode, 4, 2000 + n), (oct(seen.st_mode), seen)
    if n % 5 == 0: mode = 0o444; os.fchmod(made, mode)
    if n % 7 == 0: mode = 0o600; os.chmod(name, mode)
    assert os.fstat(made).st_mode & 0o7777 == mode == os.stat(name).st_mode & 0o7777, (n, oct(os.fstat(made).st_mode))
    os.close(made)
    assert os.stat(name).st_mode & 0o7777 == mode
    if n % 20 == 0: assert bare('stat', '-c', '%a %Y', name).stdout.split() == [f'{mode:o}', str(2000 + n)]
    assert open(name).read() == 'data'
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 60, "not delegated: {}", ended.stderr);
    let modes = [0o400, 0o444, 0o555, 0o200, 0o000, 0o640];
    for n in 0..120_usize {
        let stored = fs::metadata(scene.path(&format!("d/file-{n}"))).unwrap();
        let changed = if n % 7 == 0 { Some(0o600) } else { (n % 5 == 0).then_some(0o444) };
        let expected = (changed.unwrap_or(modes[n % 6]), 2000 + i64::try_from(n).unwrap(), 4);
        assert_eq!((stored.mode() & 0o7777, stored.mtime(), stored.len()), expected, "file {n}");
    }
    scene.is_clean();
}

#[test]
fn delegated_create_ends_a_kernel_negative_entry() {
    let Some(scene) = scene("delegation_missing") else { return };
    let script = python(
        r"
os.mkdir('d')
for n in range(60): assert bare('stat', f'd/late-{n}').returncode
assert bare('ls', 'd').stdout == ''
delegate('d')
for n in range(60):
    assert bare('stat', f'd/other-{n}').returncode
    before = bare('stat', '-c', '%y', 'd').stdout
    make(f'd/late-{n}')
    seen = bare('stat', f'd/late-{n}')
    assert seen.returncode == 0, seen
    assert bare('stat', '-c', '%y', 'd').stdout != before
    make(f'd/other-{n}')
    assert os.path.exists(f'd/other-{n}') and bare('stat', f'd/other-{n}').returncode == 0
    assert f'late-{n}' in bare('ls', 'd').stdout.split()
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
}

/// Of several processes that make a name exclusively exactly one succeeds, at whichever door.
#[test]
fn exclusive_creates_of_one_name_succeed_once() {
    let Some(scene) = scene("delegation_exclusive") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
code = '''
import os, sys, time
won = []
start = float(sys.argv[2])
for n in range(400):
    while time.time() < start + n * 0.003: pass
    try:
        os.close(os.open(f'd/one-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)); won.append(n)
    except FileExistsError: pass
print(*won)
'''
start = str(time.time() + 0.7)
some = []
for number in range(4):
    env = dict(os.environ) if number < 3 else {'PATH': os.environ['PATH']}
    some.append(subprocess.Popen([sys.executable, '-S', '-c', code, str(number), start], env=env, stdout=subprocess.PIPE, text=True))
won = [set(map(int, one.communicate()[0].split())) for one in some]
assert all(one.returncode == 0 for one in some)
for n in range(400):
    assert sum(n in one for one in won) == 1, (n, [n in one for one in won])
print([len(one) for one in won])
assert {f'one-{n}' for n in range(400)} <= set(os.listdir('d'))
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert_eq!(scene.store_files().len(), 408);
    scene.is_clean();
}

/// Directories above are renamed, and exchanged with others, while programs make files in them.
#[test]
fn delegated_creates_follow_renamed_parent_directories() {
    let Some(scene) = scene("delegation_renamed") else { return };
    let script = python(
        r"
os.makedirs('a/b/d'); delegate('a/b/d')
code = '''
import os, sys, time
worker, dir = sys.argv[1], os.open('a/b/d', os.O_RDONLY)
made, until = [], time.time() + 3
n = 0
while time.time() < until:
    n += 1
    name = f'{worker}-{n}'
    if n % 2:
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644, dir_fd=dir)
    else:
        try: file = os.open(f'a/b/d/{name}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileNotFoundError: continue
    os.write(file, name.encode())
    os.close(file)
    made.append(name)
    if n % 50 == 0: time.sleep(0.01)
with open(f'/mnt/aside/made-{worker}', 'w') as file: file.write(' '.join(made))
'''
some = [subprocess.Popen([sys.executable, '-S', '-c', code, str(worker)]) for worker in range(4)]
time.sleep(0.3)
renames = 0
while any(one.poll() is None for one in some):
    for away, here in (('a', 'z'), ('a/b', 'a/y'), ('a/b/d', 'a/b/e')):
        os.rename(away, here)
        if renames % 3 == 0: time.sleep(0.001)
        os.rename(here, away)
        renames += 1
    time.sleep(0.02)
made = [name for worker in range(4) for name in open(f'/mnt/aside/made-{worker}').read().split()]
assert all(one.returncode == 0 for one in some)
there = set(os.listdir('a/b/d')) - {f'first-{n}' for n in range(8)}
assert there == set(made), (there ^ set(made))
for name in made: assert open(f'a/b/d/{name}').read() == name
print(len(made), renames)
assert os.listdir('a') == ['b'] and os.listdir('.') == ['a']
",
    );
    let mut all = FAST.to_vec();
    all.extend(["--rule", "*=keep", "--keep-at-exit", "drop"]);
    let ended = scene.run(&all, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert!(!ended.stderr.contains("and it is lost"), "{}", ended.stderr);
    scene.is_clean();
}

/// Two directories change places all the time: each file is in exactly one of them.
#[test]
fn delegated_creates_land_once_in_exchanged_directories() {
    let Some(scene) = scene("delegation_swapped") else { return };
    let script = python(
        r"
for dir in 'de': os.mkdir(dir); delegate(dir)
code = '''
import os, sys, time
worker, made, until, n = sys.argv[1], [], time.time() + 4, 0
while time.time() < until:
    n += 1
    name = f'{worker}-{n}'
    dir = 'de'[n % 2]
    try: file = os.open(f'{dir}/{name}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileNotFoundError: continue
    os.write(file, name.encode())
    os.close(file)
    made.append(name)
    if n % 200 == 0: time.sleep(0.005)
with open(f'/mnt/aside/made-{worker}', 'w') as file: file.write(' '.join(made))
'''
some = [subprocess.Popen([sys.executable, '-S', '-c', code, str(worker)]) for worker in range(3)]
while any(one.poll() is None for one in some):
    time.sleep(0.003)
    os.rename('d', 't'); os.rename('e', 'd'); os.rename('t', 'e')
made = {name for worker in range(3) for name in open(f'/mnt/aside/made-{worker}').read().split()}
assert all(one.returncode == 0 for one in some)
d, e = set(os.listdir('d')), set(os.listdir('e'))
first = {f'first-{n}' for n in range(8)}
assert d & e == first and (d | e) - first == made, ((d | e) - first) ^ made
for dir, names in (('d', d), ('e', e)):
    for name in names - first: assert open(f'{dir}/{name}').read() == name
",
    );
    let mut all = FAST.to_vec();
    all.extend(["--rule", "*=keep", "--keep-at-exit", "drop"]);
    let ended = scene.run(&all, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert!(!ended.stderr.contains("and it is lost"), "{}", ended.stderr);
    scene.is_clean();
}

/// Files reach the store in the order of their closes.
#[test]
fn marker_is_not_published_before_its_data() {
    let Some(scene) = scene("delegation_order") else { return };
    let script = python(
        r"
os.mkdir('d'); os.mkdir('m'); delegate('d')
for n in range(150):
    for more in range(6): make(f'd/data-{n}-{more}', b'd' * 3000)
    if n % 3 == 0: make(f'd/done-{n}', b'')
    elif n % 3 == 1: bare('touch', f'm/done-{n}')
    else: os.mkdir(f'm/done-{n}')
",
    );
    let mut running = scene.start(FAST, script);
    let mut seen = BTreeSet::new();
    while !running.has_ended() {
        for n in 0..150 {
            let mark = format!("{}/done-{n}", if n % 3 == 0 { "d" } else { "m" });
            if !seen.contains(&n) && scene.path(&mark).exists() {
                for more in 0..6 {
                    assert!(
                        scene.path(&format!("d/data-{n}-{more}")).exists(),
                        "done-{n} is in the store before its data"
                    );
                }
                seen.insert(n);
            }
        }
    }
    let ended = running.ends().exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert!(seen.len() > 20, "too few markers were seen in time: {}", seen.len());
    scene.is_clean();
}

/// A process that stops in the middle of a create blocks no other process, and its file does not exist.
#[test]
fn stopped_creator_blocks_no_process() {
    let Some(scene) = scene("delegation_stopped") else { return };
    let text = format!(
        "{INTAKE}{}",
        r"
os.mkdir('d'); delegate('d')
OWN = 1 << 56
dir = os.stat('d').st_ino - OWN
memory = ring()
tier = glob.glob('/mnt/tier-ram/surgetank-*/d')[0]
for n, so_far in enumerate((0, 1, 1)):
    slot, at = enter(memory, dir, b'stuck-%d' % n, so_far)
    if n == 2: make(f'{tier}/stuck-{n}', b'')
    make(f'd/meanwhile-{n}')
    began = time.time()
    assert f'meanwhile-{n}' in os.listdir('d') and f'stuck-{n}' not in os.listdir('d')
    os.mkdir(f'd/sub-{n}')
    assert time.time() - began < 1
    while phase(memory, slot, at) not in (4, None): assert time.time() - began < 3, phase(memory, slot, at)
    # The next process can create it, with its own content.
    make(f'd/stuck-{n}', b'mine')
    assert open(f'd/stuck-{n}').read() == 'mine'
    delegate('d/' + f'sub-{n}')
for n in range(3000): make(f'd/more-{n}', b'')
assert len([name for name in os.listdir('d') if name.startswith('more-')]) == 3000
"
    );
    let ended = scene.run(FAST, python(&text)).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    scene.holds("d/stuck-2", b"mine");
    scene.is_clean();
}

/// The ring has forged entries. They give no program another program's file, and the agent continues.
#[test]
fn forged_ring_entries_expose_no_file() {
    let Some(scene) = scene("delegation_forged") else { return };
    let text = format!(
        "{INTAKE}{}",
        r"
os.mkdir('d'); delegate('d'); make('secret', b's')
OWN = 1 << 56
dir = os.stat('d').st_ino - OWN
memory = ring()
tier = glob.glob('/mnt/tier-ram/surgetank-*/d')[0]
os.symlink('/etc/passwd', f'{tier}/link')
os.link(f'{tier}/first-0', f'{tier}/second-name')
for name in (b'', b'.', b'..', b'../secret', b'a/b', b'link', b'second-name', b'first-1', b'nothing', b'\0', b'.surgetank-tmp-x'):
    enter(memory, dir, name, 2)
enter(memory, 99999, b'x', 2)
os.unlink(f'{tier}/link'); os.unlink(f'{tier}/second-name')
assert sorted(os.listdir('d')) == sorted(f'first-{n}' for n in range(8)), os.listdir('d')
for n in range(300): make(f'd/more-{n}')
assert open('secret').read() == 's' and len(os.listdir('d')) == 308
"
    );
    let ended = scene.run(FAST, python(&text));
    let ended = ended.exits(3);
    assert!(ended.stderr.contains("it is lost"), "{}", ended.stderr);
    scene.holds("d/first-1", b"x");
}

/// The agent is killed while programs make files. The next agent takes in the reported creates.
#[test]
fn reported_creates_survive_an_agent_kill() {
    let Some(scene) = scene("delegation_killed") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
n, held = 0, []
open('/mnt/aside/ready', 'w').close()
while not os.path.exists('/mnt/aside/stop'):
    n += 1
    name = f'd/file-{n}'
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(file, name.encode())
    ino = os.fstat(file).st_ino
    if n % 50 == 0: held.append((file, name, ino))
    else: os.close(file)
    if n % 20 == 0: time.sleep(0.002)
for file, name, ino in held:
    assert os.fstat(file).st_ino == ino == os.stat(name).st_ino, (name, ino, os.fstat(file), os.stat(name))
    os.write(file, b'+'); os.close(file)
for at in range(1, n + 1):
    name = f'd/file-{at}'
    assert open(name).read() == (name + '+' if at % 50 == 0 else name), name
assert len(os.listdir('d')) == n + 8
print(n)
",
    );
    let mut running = scene.start(FAST, script);
    eventually("the program runs", || Path::new("/mnt/aside/ready").exists() || running.has_ended());
    for _ in 0..4 {
        std::thread::sleep(std::time::Duration::from_millis(300));
        scene.replace_agent();
        // (An agent that is killed while it starts, and then again, is not replaced.)
        scene.await_served();
    }
    fs::write("/mnt/aside/stop", "").unwrap();
    let ended = running.ends().exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    let made: usize = ended.stdout.trim().parse().unwrap();
    assert_eq!(scene.store_files().len(), made + 8);
    scene.is_clean();
}

/// Several agents are killed in order, each before or just after it records the reported creates.
#[test]
fn agent_killed_while_taking_in_creates_loses_none() {
    let Some(scene) = scene("delegation_killed_there") else { return };
    let script = python(
        r"
inos = {}
for dir in range(6):
    os.mkdir(f'd{dir}'); delegate(f'd{dir}')
    for n in range(200):
        name = f'd{dir}/file-{n}'
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(file, name.encode()); inos[name] = os.fstat(file).st_ino; os.close(file)
        time.sleep(0.001)
for name, ino in inos.items():
    assert open(name).read() == name
    assert os.stat(name).st_ino == ino
for dir in range(6): assert len(os.listdir(f'd{dir}')) == 208
",
    );
    let mut command = scene.run_command(FAST, script);
    command.env("SURGETANK_CRASH", "delegation.settled:5,delegation.settling:5,delegation.settled:9");
    let ended = Running::of(command).ends().exits(0);
    let killed = scene.log().matches("another one takes over").count();
    assert!(killed > 1, "{killed} were killed:\n{}", scene.log());
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert_eq!(scene.store_files().len(), 6 * 208);
    scene.is_clean();
}

/// The supervisor dies too, so the next start takes in the reported creates.
#[test]
fn reported_creates_survive_the_loss_of_the_supervisor() {
    let Some(scene) = scene("delegation_left") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
for n in range(40): make(f'd/file-{n}')
open('/mnt/aside/ready', 'w').close()
time.sleep(30)
",
    );
    let mut command = scene.run_command(&["--quiet-period", "60s"], script);
    // No process reads the ring from then on.
    command.env("SURGETANK_CRASH", "delegation.settling:1").env("SURGETANK_CRASH_SUPERVISOR", "1");
    let running = Running::of(command);
    eventually("the program runs", || Path::new("/mnt/aside/ready").exists());
    scene.await_no_agent();
    running.kill();
    drop(running.ends());
    // An agent of another directory removes remains of dead agents, but not these.
    scene.beside("elsewhere");
    let words = ["run", "--over", "/mnt/elsewhere", "--state", "/mnt/state-elsewhere", "--tier", "t=/mnt/tier-ram:32M"];
    Running::of(scene.surgetank(&[&words[..], &["--", "true"]].concat())).ends().exits(0);
    // A process that dies holds its files for a moment longer than `/proc` shows it.
    eventually("the doctor names the remains of the dead agent", || {
        let clean = Running::of(scene.surgetank(&["doctor", "--clean"])).ends().exits(0).stdout;
        clean.contains("stays: it names 4")
    });
    scene.drain_what_is_left().exits(0);
    let stored = scene.store_files();
    for n in 0..40 {
        scene.holds(&format!("d/file-{n}"), b"x");
    }
    assert_eq!(stored.len(), 48);
    scene.is_clean();
}

#[test]
fn full_tier_sends_delegated_creates_elsewhere() {
    let Some(mut scene) = Scene::new("delegation_full") else { return };
    scene.tier("ram", 24);
    let script = python(
        r"
os.mkdir('d'); delegate('d')
for n in range(160): make(f'd/file-{n}', bytes([n]) * (400 << 10))
for n in range(160): assert open(f'd/file-{n}', 'rb').read() == bytes([n]) * (400 << 10), n
",
    );
    scene.run(FAST, script).exits(0);
    assert_eq!(scene.store_files().len(), 168);
    scene.is_clean();
}

/// Permissions, and flags without `O_EXCL`.
#[test]
fn delegated_creates_have_their_modes_and_flags() {
    let Some(scene) = scene("delegation_flags") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
for mask in (0, 0o022, 0o077, 0o777, 0o133):
    os.umask(mask)
    for mode in (0o644, 0o755, 0o600, 0o400, 0, 0o4755, 0o666):
        name = f'd/m-{mask:o}-{mode:o}'
        make(name, b'', os.O_TRUNC, mode)
        assert os.stat(name).st_mode & 0o7777 == mode & ~mask & 0o7777, (name, oct(os.stat(name).st_mode))
os.umask(0o022)
for n in range(200):
    make(f'd/more-{n}')
    if n > 100: time.sleep(0.001) # the machine is busy
make('d/again', b'long content', 0)
make('d/again', b'short', os.O_TRUNC)
assert open('d/again').read() == 'short'
make('d/again', b'SH', 0)
assert open('d/again').read() == 'SHort'
both = os.open('d/append', os.O_CREAT | os.O_RDWR | os.O_APPEND)
os.write(both, b'1'); os.lseek(both, 0, 0); os.write(both, b'2'); os.lseek(both, 0, 0)
assert os.read(both, 9) == b'12'
os.chmod('d', 0o500)
os.chmod('d', 0o700)
os.mkdir('e'); delegate('e')
for name in os.listdir('e'): os.unlink(f'e/{name}')
os.rmdir('e')
try: make('e/x'); assert False
except FileNotFoundError: pass
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    scene.is_clean();
}

/// Like git: each name is looked up through the mount, and unlinked, before it is made.
#[test]
fn lookup_before_each_create_keeps_the_delegation() {
    let Some(scene) = scene("delegation_looked_for") else { return };
    let script = python(
        r"
os.mkdir('d')
for n in range(200):
    try: os.unlink(f'd/{n}'); assert False
    except FileNotFoundError: pass
    make(f'd/{n}')
    assert n % 10 or bare('stat', f'd/{n}').returncode == 0
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert_eq!(scene.store_files().len(), 200);
    scene.is_clean();
}

/// Regression: the directory stayed delegated and watched. Every look-up there also read the ring, every open took a
/// tenth of a microsecond longer, and the kernel cached no listing. While a file of the directory is open, the kernel
/// has to report its close.
#[test]
fn unused_delegation_ends() {
    let Some(scene) = scene("delegation_unused") else { return };
    let script = python(
        r"
import glob
os.mkdir('d'); delegate('d')
# As the kernel prints it. (Another agent of this machine may watch another file system's inode of the same number.)
stat = os.stat(glob.glob('/mnt/tier-ram/surgetank-*/d')[0])
watched = f' ino:{stat.st_ino:x} sdev:{os.major(stat.st_dev) << 20 | os.minor(stat.st_dev):x} '
def is_watched():
    for info in glob.glob('/proc/[0-9]*/fdinfo/*'):
        try: text = open(info).read()
        except OSError: continue
        if watched in text: return True
    return False
def rests():
    began = time.time()
    while is_watched():
        assert time.time() - began < 20, 'still watched'
        time.sleep(0.1)
assert is_watched()
rests()
assert len(bare('ls', 'd').stdout.split()) == 8
held = os.open('d/held', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
for n in range(20): make(f'd/again-{n}')
assert len(bare('ls', 'd').stdout.split()) == 29
time.sleep(5)
assert is_watched(), 'no watch would report the close'
os.write(held, b'late'); os.close(held)
rests()
for n in range(20): make(f'd/more-{n}')
assert len(os.listdir('d')) == 49 and open('d/held').read() == 'late'
",
    );
    let ended = scene.run(FAST, script).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    scene.holds("d/held", b"late");
    assert_eq!(scene.store_files().len(), 49);
    scene.is_clean();
}
