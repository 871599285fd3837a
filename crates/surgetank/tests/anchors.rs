//! Files that the shim opens from a descriptor of their tier's directory. A read must return the file that the path
//! leads to, whichever door changes directories and names between two opens.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use crate::scene::delegation::{FAST, python, scene};

/// Directories with files of the same names change places, are renamed, removed and made again. Each file is read
/// several times in a row, so that the shim opens its directory and opens from it. The data is compared with the
/// expected data.
const MOVES: &str = r"
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def exchange(a, b):
    assert libc.renameat2(-100, a.encode(), -100, b.encode(), 2) == 0, ctypes.get_errno()
NAMES = [f'n{n}' for n in range(4)]
holds, serial, anchored = {}, 0, 0
def fill(dir):
    global serial
    os.mkdir(dir)
    for name in NAMES:
        serial += 1
        make(f'{dir}/{name}', str(serial).encode())
        holds.setdefault(dir, {})[name] = serial
def anchors():
    count = 0
    for number in map(int, os.listdir('/proc/self/fd')):
        try: target = os.readlink(f'/proc/self/fd/{number}')
        except OSError: continue
        count += number >= 192 and target.startswith('/mnt/tier')
    return count
def check(dir):
    global anchored
    for _ in range(3):
        for name, number in holds[dir].items():
            read = os.open(f'{dir}/{name}', os.O_RDONLY)
            assert (text := os.read(read, 99)) == str(number).encode(), (dir, name, text, number)
            a, b = os.fstat(read), os.stat(f'{dir}/{name}')
            assert (a.st_dev, a.st_ino, a.st_size) == (b.st_dev, b.st_ino, b.st_size)
            os.close(read)
    there = anchors()
    assert there <= 1, there
    anchored += there
rng = random.Random(int(sys.argv[1]))
os.mkdir('in')
for dir in ('a', 'b', 'c', 'in/d'): fill(dir)
for step in range(250):
    one, other = rng.sample(sorted(holds), 2)
    act = rng.randrange(7)
    if act == 0:
        exchange(one, other)
        holds[one], holds[other] = holds[other], holds[one]
    elif act == 1:
        os.rename(one, 'aside'); os.rename(other, one); os.rename('aside', other)
        holds[one], holds[other] = holds[other], holds[one]
    elif act == 2:
        for name in NAMES: os.unlink(f'{one}/{name}')
        os.rmdir(one)
        fill(one)
    elif act == 3:
        name = rng.choice(NAMES)
        os.rename(f'{one}/{name}', f'{other}/{name}')
        holds[other][name] = holds[one][name]
        serial += 1
        make(f'{one}/{name}', str(serial).encode()); holds[one][name] = serial
    elif act == 4 and step % 3 == 0:
        done = bare('sh', '-c', 'mv $0 aside && mv $1 $0 && mv aside $1', one, other)
        assert done.returncode == 0, done
        holds[one], holds[other] = holds[other], holds[one]
    elif act == 5 and step % 3 == 0:
        name = rng.choice(NAMES); serial += 1
        done = bare('sh', '-c', 'printf %s $0 >$1.new && mv $1.new $1', str(serial), f'{one}/{name}')
        assert done.returncode == 0, done
        holds[one][name] = serial
    for dir in rng.sample(sorted(holds), 2): check(dir)
    check(rng.choice((one, other)))
assert anchored >= 100, anchored
# What closes all descriptors, and children that do, change nothing and leave none behind.
for _ in range(50):
    check('a'); check('b')
    subprocess.run(['true'], close_fds=True, check=True)
    os.closerange(3, 1024)
    check('a')
print('anchored', anchored)
";

#[test]
fn anchored_open_reads_the_file_of_the_path() {
    let Some(scene) = scene("anchors") else { return };
    for seed in 1..=3 {
        let ended = scene.run(FAST, &format!("mkdir t{seed}; cd t{seed}; {} {seed}", python(MOVES))).exits(0);
        assert!(ended.stdout.contains("anchored"), "{}", ended.stdout);
    }
}

/// The same while the tier evicts files: most files come and go.
#[test]
fn anchored_open_on_a_small_tier_reads_the_file_of_the_path() {
    let Some(mut scene) = crate::scene::Scene::new("anchors_small") else { return };
    scene.tier("ram", 24);
    let program = r"
names = [f'f{n}' for n in range(40)]
for at, dir in enumerate(('a', 'b', 'c')):
    os.mkdir(dir)
    for name in names: make(f'{dir}/{name}', f'{dir}{name}'.encode().ljust(300_000, b'.'))
for turn in range(12):
    for dir in ('a', 'b', 'c'):
        for name in names:
            for _ in range(2):
                read = os.open(f'{dir}/{name}', os.O_RDONLY)
                assert os.read(read, 400_000) == f'{dir}{name}'.encode().ljust(300_000, b'.')
                os.close(read)
    if turn % 3 == 0: os.rename('a', 'x'); os.rename('b', 'a'); os.rename('x', 'b')
    if turn % 3 == 0:
        for name in names: make(f'a/{name}', f'a{name}'.encode().ljust(300_000, b'.'), os.O_TRUNC); make(f'b/{name}', f'b{name}'.encode().ljust(300_000, b'.'), os.O_TRUNC)
print('read')
";
    let ended = scene.run(FAST, python(program)).exits(0);
    assert!(ended.stdout.contains("read"), "{}", ended.stdout);
}
