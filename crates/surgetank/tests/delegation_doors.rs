//! Delegated directories in which other processes use the same names. Their entries stop half-way, they belong to
//! another run, use another door, or have no privileges.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::fs;
use std::path::Path;

use crate::scene::delegation::{FAST, INTAKE, created_delegated, python, scene};
use crate::scene::record::{number, records};
use crate::scene::{Running, Scene, eventually};

/// A program that has created its plain file and has not reported it. There it dies, or stops until it may continue.
///
/// (Its own filter holds its `fstat`, which comes just between. Root needs no `prctl` for the filter. At a `prctl`, or at
/// a `syscall` through the shim's symbol, the shim would stop.)
const STUCK: &str = r"
HALF = '''
import ctypes, fcntl, os, struct, sys, threading, time
name, plain, aside, then = sys.argv[1:5]
libc = ctypes.CDLL('libc.so.6', use_errno=True)
class Step(ctypes.Structure): _fields_ = [('code', ctypes.c_uint16), ('yes', ctypes.c_uint8), ('no', ctypes.c_uint8), ('k', ctypes.c_uint32)]
class Program(ctypes.Structure): _fields_ = [('steps', ctypes.c_ushort), ('first', ctypes.POINTER(Step))]
FSTAT, SECCOMP = {'x86_64': (5, 317), 'aarch64': (80, 277)}[os.uname().machine]
steps = (Step * 4)((0x20, 0, 0, 0), (0x15, 0, 1, FSTAT), (6, 0, 0, 0x7fc00000), (6, 0, 0, 0x7fff0000))
program = Program(4, steps)
listener = -1
def answer():
    while listener < 0: time.sleep(0.001)
    stood = False
    while True:
        call = bytearray(80)
        fcntl.ioctl(listener, 0xc0502100, call)
        if not stood and os.path.lexists(plain):
            if then == 'dies': os.kill(os.getpid(), 9)
            stood = True
            open(aside + '.stands', 'w').close()
            while not os.path.exists(aside + '.go'): time.sleep(0.001)
        fcntl.ioctl(listener, 0xc0182101, struct.pack('<QqiI', struct.unpack_from('<Q', call)[0], 0, 0, 1))
threading.Thread(target=answer, daemon=True).start()
listener = libc.syscall(SECCOMP, 1, 8, ctypes.byref(program))
assert listener >= 0, ctypes.get_errno()
try:
    made = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(made, b'own'); os.close(made)
    print('made', flush=True)
except FileExistsError: print('exists', flush=True)
sys.stdout.flush(); ctypes.CDLL(None).exit(0)
'''
def half(name, then):
    delegate_again('d')
    one = subprocess.Popen([sys.executable, '-S', '-c', HALF, f'd/{name}', f'{tier}/{name}', f'/mnt/aside/{name}', then], stdout=subprocess.PIPE, text=True)
    until = time.time() + 20
    while one.poll() is None and not os.path.exists(f'/mnt/aside/{name}.stands'):
        assert time.time() < until
        time.sleep(0.001)
    return one
def go(name, one):
    open(f'/mnt/aside/{name}.go', 'w').close()
    return one.communicate(timeout=20)[0].strip()
again = 0
def delegate_again(dir):
    # Files are created through the agent until it is delegated again.
    global again
    before = made_alone()
    for n in range(200):
        again += 1
        make(f'{dir}/again-{again}', b'')
        if made_alone() > before: return
        if n > 100: time.sleep(0.001) # the machine is busy
    assert False, 'not delegated again'
def made_alone(): return struct.unpack_from('<Q', memory, 64)[0]
";

#[test]
fn creator_killed_before_its_report_leaves_the_name_free() {
    let Some(scene) = scene("delegation_dies") else { return };
    let text = format!(
        "{INTAKE}{STUCK}{}",
        r"
os.mkdir('d'); delegate('d'); memory = ring(); tier = glob.glob('/mnt/tier-ram/surgetank-*/d')[0]
assert half('dead', 'dies').wait() == -9 and os.path.lexists(f'{tier}/dead')
began = time.time()
assert 'dead' not in os.listdir('d') and not os.path.exists('d/dead') and bare('stat', 'd/dead').returncode
make('d/dead', b'mine')
assert open('d/dead').read() == 'mine' and os.listdir('d').count('dead') == 1
# By the mount.
assert half('other', 'dies').wait() == -9
assert bare('bash', '-c', 'set -C; echo mount >d/other').returncode == 0 and open('d/other').read() == 'mount\n'
# A directory of that name, and one that is renamed to it.
assert half('dir', 'dies').wait() == -9
os.mkdir('d/dir'); make('d/dir/x', b'')
assert half('to', 'dies').wait() == -9
make('d/from', b'moved'); os.rename('d/from', 'd/to')
assert open('d/to').read() == 'moved'
# No process takes this name. Then the directory is renamed, and an emptied one is removed.
assert half('orphan', 'dies').wait() == -9
os.rename('d', 'e')
assert 'orphan' not in os.listdir('e') and os.listdir('e/dir') == ['x']
assert time.time() - began < 20
os.mkdir('d'); delegate('d')
assert half('last', 'dies').wait() == -9
for name in os.listdir('d'): os.unlink(f'd/{name}')
os.rmdir('d')
os.mkdir('d'); make('d/last', b'new')
",
    );
    let ended = scene.run(FAST, python(&text)).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    for (name, bytes) in [("e/dead", &b"mine"[..]), ("e/other", b"mount\n"), ("e/to", b"moved"), ("d/last", b"new")] {
        scene.holds(name, bytes);
    }
    assert!(!scene.path("e/orphan").exists());
    scene.leaves_nothing_on_the_tiers();
    scene.is_clean();
}

#[test]
fn creator_stopped_before_its_report_blocks_no_process() {
    let Some(scene) = scene("delegation_stands") else { return };
    let text = format!(
        "{INTAKE}{STUCK}{}",
        r"
os.mkdir('d'); delegate('d'); memory = ring(); tier = glob.glob('/mnt/tier-ram/surgetank-*/d')[0]
# Another process is faster.
one = half('a', 'stands'); began = time.time()
os.mkdir('d/sub'); make('d/a', b'mine')
assert time.time() - began < 2, time.time() - began
assert go('a', one) == 'exists' and open('d/a').read() == 'mine'
# Recalled meanwhile, and no process took the name: the create succeeds.
one = half('b', 'stands'); os.mkdir('d/sub2')
assert not os.path.exists('d/b')
assert go('b', one) == 'made' and open('d/b').read() == 'own'
# The directory is renamed meanwhile, and another takes its place. The create uses the directory that it found before.
one = half('c', 'stands'); os.rename('d', 'e'); os.mkdir('d')
assert 'c' not in os.listdir('e')
assert go('c', one) == 'made' and open('e/c').read() == 'own' and not os.path.exists('d/c')
# Revoked by the tender. Meanwhile another process makes the name and removes it.
delegate('d'); one = half('f', 'stands'); make('d/f', b'mine'); os.unlink('d/f')
assert go('f', one) == 'made' and open('d/f').read() == 'own'
# The agent dies meanwhile.
one = half('g', 'stands')
open('/mnt/aside/kill', 'w').close()
while not os.path.exists('/mnt/aside/killed'): time.sleep(0.01)
assert go('g', one) == 'made' and open('d/g').read() == 'own'
",
    );
    let mut running = scene.start(FAST, python(&text));
    eventually("the agent is to be killed", || Path::new("/mnt/aside/kill").exists() || running.has_ended());
    if Path::new("/mnt/aside/kill").exists() {
        scene.replace_agent();
        scene.await_served();
    }
    fs::write("/mnt/aside/killed", "").unwrap();
    let ended = running.ends().exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    let holds = [("e/a", &b"mine"[..]), ("e/b", b"own"), ("e/c", b"own"), ("d/f", b"own"), ("d/g", b"own")];
    holds.into_iter().for_each(|(name, bytes)| scene.holds(name, bytes));
    scene.leaves_nothing_on_the_tiers();
    scene.is_clean();
}

/// Kills at any point, while other processes continue.
#[test]
fn killed_creator_loses_no_file_of_other_creators() {
    let Some(scene) = scene("delegation_kills") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
code = '''
import os, sys
worker, at = sys.argv[1], 0
made = os.open('/mnt/aside/made-' + worker, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
while True:
    at += 1
    name = f'{worker}-{at}'
    try: file = os.open('d/' + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError: os.write(made, b'exists '); os._exit(9)
    os.write(file, name.encode())
    os.close(file)
    os.write(made, name.encode() + b' ')
'''
dice, some, n = random.Random(7), {}, 0
until = time.time() + 8
while time.time() < until:
    while len(some) < 4:
        n += 1
        some[n] = subprocess.Popen([sys.executable, '-S', '-c', code, str(n)])
    time.sleep(0.08 + dice.random() * 0.02)
    worker = dice.choice(list(some))
    some[worker].kill()
    assert some.pop(worker).wait() == -9, worker
for one in some.values(): one.kill()
for one in some.values(): assert one.wait() == -9
# A request of a killed process may still be on its way.
time.sleep(0.5)
there = set(os.listdir('d'))
for worker in range(1, n + 1):
    try: made = open(f'/mnt/aside/made-{worker}').read()
    except FileNotFoundError: continue
    # (A kill may cut a write between two pages.)
    made = made[:made.rfind(' ') + 1].split()
    for name in made: assert name in there and open(f'd/{name}').read() == name, name
    # The create that the kill interrupted has happened, or the name is free.
    name = f'{worker}-{len(made) + 1}'
    if name in there: assert open(f'd/{name}').read() in ('', name)
    else: make(f'd/{name}', name.encode())
print(n, len(there))
",
    );
    // (A killed program reports no counts: the test counts the files created without a request.)
    let ended = scene.run(&[FAST, &["--rule", "*=keep", "--keep-at-exit", "drop"]].concat(), script).exits(0);
    assert!(!ended.stderr.contains("it is lost"), "{}", ended.stderr);
    scene.leaves_nothing_on_the_tiers();
    scene.is_clean();
}

/// The file closed first is in the store first, also when the agent is slow to close a file whose descriptor it
/// granted.
#[test]
fn mediated_file_is_published_before_later_creates() {
    let Some(scene) = scene("delegation_given") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d'); os.mkdir('m')
for n in range(6):
    make(f'm{n}', b'data')
    make(f'd/done-{n}', b'')
    time.sleep(0.5)
for n in range(20): make(f'd/more-{n}', b'')
",
    );
    let mut command = scene.run_command(FAST, script);
    command.env("SURGETANK_HOLD", "shim.given:200");
    let mut running = Running::of(command);
    let mut seen = 0;
    while !running.has_ended() {
        for n in 0..6 {
            if scene.path(&format!("d/done-{n}")).exists() {
                assert!(scene.path(&format!("m{n}")).exists(), "done-{n} is in the store before its data");
                seen += 1;
            }
        }
    }
    let ended = running.ends().exits(0);
    assert!(created_delegated(&ended) > 0 && seen > 0, "{seen} looked at; not delegated: {}", ended.stderr);
}

/// Each of several runs with one agent counts the files of its own programs. A run that ends takes nothing from the
/// other runs.
#[test]
fn runs_share_a_delegated_directory_and_count_apart() {
    let Some(scene) = scene("delegation_runs") else { return };
    let first = python(
        r"
os.mkdir('d'); delegate('d')
open('/mnt/aside/delegated', 'w').close()
while not os.path.exists('/mnt/aside/second'): time.sleep(0.001)
won = []
for n in range(1500):
    try: make(f'd/both-{n}', b'first'); won.append(n)
    except FileExistsError: pass
for n in won: assert open(f'd/both-{n}').read() == 'first'
with open('/mnt/aside/won-1', 'w') as file: file.write(' '.join(map(str, won)))
",
    );
    let mut one = scene.start(FAST, &first.replace("program.py", "first.py"));
    fs::rename("/mnt/program.py", "/mnt/first.py").unwrap();
    eventually("it is delegated", || Path::new("/mnt/aside/delegated").exists() || one.has_ended());
    let second = python(
        r"
# By children that end before the agent looks up their run.
code = '''
import os, sys
at, won = int(sys.argv[1]), []
for n in range(at, at + 100):
    try: file = os.open(f'd/both-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError: continue
    os.write(file, b'second'); os.close(file); won.append(n)
os.write(int(sys.argv[2]), (' '.join(map(str, won)) + ' ').encode())
'''
won = os.open('/mnt/aside/won-2', os.O_CREAT | os.O_WRONLY | os.O_APPEND); os.set_inheritable(won, True)
open('/mnt/aside/second', 'w').close()
for at in range(0, 1500, 100): subprocess.run([sys.executable, '-S', '-c', code, str(at), str(won)], check=True, pass_fds=[won])
while not os.path.exists('/mnt/aside/first-ended'): time.sleep(0.01)
assert len([name for name in os.listdir('d') if name.startswith('both-')]) == 1500
for n in range(300): make(f'd/late-{n}', b'second')
won = open('/mnt/aside/won-2').read().split()
for n in won: assert open(f'd/both-{n}').read() == 'second', n
",
    );
    let two = scene.start(FAST, second);
    let one = one.ends().exits(0);
    fs::write("/mnt/aside/first-ended", "").unwrap();
    let two = two.ends().exits(0);
    assert!(
        created_delegated(&one) > 0 && created_delegated(&two) > 0,
        "not delegated: {}\n{}",
        one.stderr,
        two.stderr
    );
    let won = |number: &str| -> Vec<u32> {
        let text = fs::read_to_string(format!("/mnt/aside/won-{number}")).unwrap();
        text.split_whitespace().map(|n| n.parse().unwrap()).collect()
    };
    let mut all = [won("1"), won("2")].concat();
    all.sort_unstable();
    assert_eq!(all, (0..1500).collect::<Vec<_>>(), "each name belongs to one run");
    let mut counted: Vec<u64> = records(&scene).iter().map(|one| files_of(&scene, one)).collect();
    let mut made = vec![8 + won("1").len() as u64, won("2").len() as u64 + 300];
    counted.sort_unstable();
    made.sort_unstable();
    assert_eq!(counted, made, "files of each run by its record, and by its programs' lists");
    assert_eq!(scene.store_files().len(), 8 + 1500 + 300);
    scene.is_clean();
}

fn files_of(scene: &Scene, record: &serde_json::Value) -> u64 {
    let id = record["id"].as_str().unwrap();
    number(&scene.verb("report", &["--json", id]).exits(0).json()["files_total"])
}

/// Without privileges no program writes a file directly, so the agent delegates no directory. If it delegates one,
/// the same rules hold.
#[test]
fn unprivileged_delegated_creates_make_each_name_once() {
    let Some(mut scene) = Scene::of_user("delegation_user") else { return };
    scene.tier("ram", 8192);
    let script = python(
        r"
os.mkdir('d'); delegate('d')
code = '''
import os, sys
won = 0
for n in range(400):
    try: os.close(os.open(f'd/one-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)); won += 1
    except FileExistsError: pass
print(won)
'''
some = [subprocess.Popen([sys.executable, '-S', '-c', code], env=env, stdout=subprocess.PIPE, text=True)
        for env in (dict(os.environ), dict(os.environ), {'PATH': os.environ['PATH']})]
assert sum(int(one.communicate()[0]) for one in some) == 400
for n in range(0, 400, 40):
    one = os.stat(f'd/one-{n}')
    assert one.st_uid == 1000 and bare('stat', '-c', '%i %u', f'd/one-{n}').stdout == f'{one.st_ino} 1000\n'
",
    );
    let ended = scene.run(FAST, script).exits(0);
    println!("{} created in delegated directories", created_delegated(&ended));
    assert_eq!(scene.store_files().len(), 408);
    scene.is_clean();
}

/// Behind a listener no directory is delegated: the agent makes every file.
#[test]
fn delegated_creates_without_a_mount_make_each_name_once() {
    let Some(scene) = scene("delegation_seccomp") else { return };
    let script = python(
        r"
os.mkdir('d'); delegate('d')
code = '''
import os, sys, time
won, start = 0, float(sys.argv[1])
for n in range(300):
    while time.time() < start + n * 0.002: pass
    try: os.close(os.open(f'd/one-{n}', os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)); won += 1
    except FileExistsError: pass
print(won)
'''
start = str(time.time() + 0.7)
some = [subprocess.Popen([sys.executable, '-S', '-c', code, start], env=env, stdout=subprocess.PIPE, text=True)
        for env in (dict(os.environ), dict(os.environ), {'PATH': os.environ['PATH']})]
assert sum(int(one.communicate()[0]) for one in some) == 300
assert len(os.listdir('d')) == 308
",
    );
    let ended = scene.run(&[FAST, &["--door", "seccomp"]].concat(), script).exits(0);
    assert_eq!(created_delegated(&ended), 0, "{}", ended.stderr);
    assert_eq!(scene.store_files().len(), 308);
    scene.is_clean();
}

/// While the agent is about to bind a name in another way, no program creates a file under that name.
#[test]
fn name_being_bound_otherwise_admits_no_delegated_create() {
    let Some(scene) = scene("delegation_other_kinds") else { return };
    let text = format!(
        "{INTAKE}{STUCK}{}",
        r"
os.mkdir('d'); delegate('d'); memory = ring(); tier = ''
code = '''
import os, sys
how, name, now = sys.argv[1:4]
open(now, 'w').close()
try:
    if how == 'mkdir': os.mkdir(name)
    elif how == 'symlink': os.symlink('nowhere', name)
    elif how == 'link': os.link('source', name)
    elif how == 'mkfifo': os.mkfifo(name)
    else: os.rename('moved-' + how, name)
except FileExistsError: sys.exit(9)
'''
make('source', b'source')
for how in ('mkdir', 'symlink', 'link', 'mkfifo', 'once', 'again'):
    delegate_again('d')
    if how in ('once', 'again'): make(f'moved-{how}', b'moved')
    now = f'/mnt/aside/now-{how}'
    one = subprocess.Popen([sys.executable, '-S', '-c', code, how, f'd/{how}', now], env={'PATH': os.environ['PATH']})
    while not os.path.exists(now): pass
    time.sleep(0.05)
    try: make(f'd/{how}', b'made'); won = True
    except FileExistsError: won = False
    other = one.wait() == 0
    if how in ('once', 'again'): assert other and open(f'd/{how}').read() == 'moved', how
    else: assert won != other, (how, won, other)
"
    );
    // The agent waits this long between its decision and its publication in the index.
    let ended = scene.run_held("name.decided:150", FAST, python(&text)).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    assert!(!ended.stderr.contains("it is lost"), "{}", ended.stderr);
}

/// A program makes a file in the directory after the agent has found it empty and before another directory takes its
/// place.
#[test]
fn directory_with_a_new_file_is_not_replaced_as_empty() {
    let Some(scene) = scene("delegation_not_empty") else { return };
    let text = python(
        r"
code = '''
import errno, os, sys
open(sys.argv[2], 'w').close()
try: os.rename(sys.argv[1], 'd')
except OSError as why: sys.exit(9 if why.errno == errno.ENOTEMPTY else 1)
'''
for delegated in (True, False):
    os.mkdir('d')
    if delegated: delegate('d')
    for name in os.listdir('d'): os.unlink(f'd/{name}')
    source, now = f'source-{delegated}', f'/mnt/aside/now-{delegated}'
    os.mkdir(source)
    one = subprocess.Popen([sys.executable, '-S', '-c', code, source, now], env={'PATH': os.environ['PATH']})
    while not os.path.exists(now): pass
    time.sleep(0.1)
    make('d/late', b'late')
    assert one.wait() == 9, (delegated, one.returncode)
    assert open('d/late').read() == 'late' and os.path.isdir(source)
    os.rename('d', f'kept-{delegated}')
",
    );
    let ended = scene.run_held("rename.looked:300", FAST, text).exits(0);
    assert!(created_delegated(&ended) > 0, "not delegated: {}", ended.stderr);
    scene.holds("kept-True/late", b"late");
    scene.holds("kept-False/late", b"late");
    scene.is_clean();
}

/// A program that looked before the epoch changed creates nothing. The epoch changes each time just before the
/// create.
#[test]
fn lookup_before_a_recall_makes_no_file() {
    let Some(scene) = scene("delegation_epoch") else { return };
    // (Between entry and epoch `getegid` is called.)
    let called_back = STUCK
        .replace("(5, 317)", "(108, 317)")
        .replace("(80, 277)", "(177, 277)")
        .replace("if not stood and os.path.lexists(plain):", "bump()\n        if False:")
        .replace("listener = -1\n", "listener = -1\nimport mmap\nring = mmap.mmap(os.open(plain, os.O_RDWR), 0)\ndef bump(): struct.pack_into('<Q', ring, 16, struct.unpack_from('<Q', ring, 16)[0] + 1)\n")
        .replace("    made = os.open(name, os", "  for n in range(200):\n    made = os.open(name + str(n), os");
    let text = format!(
        "{INTAKE}{called_back}{}",
        r"
os.mkdir('d'); delegate('d'); memory = ring(); delegate_again('d')
path = glob.glob('/dev/shm/surgetank-*.index.ring')[0]
one = subprocess.run([sys.executable, '-S', '-c', HALF, 'd/late-', path, '/mnt/aside/x', ''], stdout=subprocess.PIPE, text=True)
assert one.stdout.split() == ['made'] * 200, one
for n in range(200): assert open(f'd/late-{n}').read() == 'own'
print(made_alone())
"
    );
    let ended = scene.run(FAST, python(&text)).exits(0);
    let entries: u64 = ended.stdout.trim().parse().unwrap();
    // (The other entries were void. On a busy machine programs request most of the names without an entry.)
    let made = created_delegated(&ended);
    assert!(entries > made, "{entries} entries, {made} made");
    scene.is_clean();
}
