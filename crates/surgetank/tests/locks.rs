//! Locks of programs: exclusive among all programs at the mount, and against locks on a tier's plain file itself.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use crate::scene::{Ended, Scene};

/// The common part of the programs below.
const PRELUDE: &str = r#"
import fcntl, os, signal, struct, sys, time
EX, SH, NB, UN = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_NB, fcntl.LOCK_UN

def plain(name):
    return os.getxattr(name, "user.surgetank.location").decode().split()[0].split(":", 1)[1]

def tried(take, *words):
    # Beside the mount, a lock that a close at the mount released appears free a moment later.
    for attempt in range(20):
        try:
            take(*words)
            return "granted"
        except BlockingIOError:
            if not words[0].name.startswith("/"): break
            time.sleep(0.01)
    return "busy"

def flock(path, how):
    with open(path, "r+b") as file:
        return tried(fcntl.flock, file, how | NB)

def ranged(path, how, start, length):
    with open(path, "r+b") as file:
        return tried(fcntl.lockf, file, how | NB, length, start)

def ofd(path, how, start, length):
    with open(path, "r+b") as file:
        return tried(take_ofd, file, how, start, length)

def take_ofd(file, how, start, length):
    kind = fcntl.F_WRLCK if how == EX else fcntl.F_RDLCK
    fcntl.fcntl(file, 37, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))

def child(act):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            act(lambda text: os.write(write, text.encode() + b"\n"))
        except BaseException as why:
            os.write(write, repr(why).encode() + b"\n")
        os._exit(0)
    os.close(write)
    return pid, open(read)

def elsewhere(act, *words):
    "What another process answers."
    pid, answer = child(lambda say: say(str(act(*words))))
    text = answer.read().strip()
    os.waitpid(pid, 0)
    return text
"#;

/// A run of the program in a scene with a tier, which has the plain file of `f`.
#[track_caller]
fn run(scene: &mut Scene, program: &str) -> Ended {
    // Room enough for root's files to be written directly; those of an ordinary user never are.
    scene.tier("fast", 4096);
    let script = format!("head -c 1000 /dev/zero >f\npython3 - <<'END'\n{PRELUDE}\n{program}\nEND");
    // This test is about the mount, so the preload shim is off.
    let ended = scene.run(&["--no-preload"], &script).exits(0);
    assert_eq!(ended.stderr.contains(" 0 opens direct"), scene.user.is_some(), "{}", ended.stderr);
    ended
}

const DOORS: &str = r#"
for holder, asker in (("f", "f"), ("f", plain("f")), (plain("f"), "f")):
    with open(holder, "r+b") as held:
        words = []
        for how in (EX, SH, UN):
            fcntl.flock(held, how)
            words += [elsewhere(flock, asker, EX), elsewhere(flock, asker, SH)]
        print("flock", *words)
        for act in (ranged, ofd):
            fcntl.lockf(held, EX, 100, 0)
            fcntl.lockf(held, SH, 100, 500)
            asked = ((EX, 50, 10), (SH, 50, 10), (EX, 100, 10), (SH, 550, 10), (EX, 550, 10), (EX, 600, 0))
            words = [elsewhere(act, asker, *each) for each in asked]
            fcntl.lockf(held, UN, 50, 25)
            words += [elsewhere(act, asker, EX, 24, 1), elsewhere(act, asker, EX, 25, 50)]
            fcntl.lockf(held, UN)
            print(act.__name__, *words, elsewhere(act, asker, EX, 0, 0))
        # An open file description of its own; the lock of the first one's process conflicts.
        if tried(take_ofd, held, EX, 10, 10) == "busy": print("cannot hold")
        print("held as OFD", elsewhere(ranged, asker, EX, 5, 10), elsewhere(ofd, asker, SH, 15, 1), ofd(asker, EX, 15, 1))
"#;

fn expected_of_doors() -> String {
    let flock = "flock busy busy busy granted granted granted\n";
    let ranges = "busy busy granted granted busy granted busy granted granted\n";
    format!("{flock}ranged {ranges}ofd {ranges}held as OFD busy busy busy\n").repeat(3)
}

#[test]
fn lock_excludes_across_doors() {
    let Some(mut scene) = Scene::new("locks_doors") else { return };
    run(&mut scene, DOORS).prints(&expected_of_doors());
}

#[test]
fn lock_excludes_across_doors_without_privileges() {
    let Some(mut scene) = Scene::of_user("locks_doors_user") else { return };
    run(&mut scene, DOORS).prints(&expected_of_doors());
}

#[test]
fn waiter_for_a_lock_is_woken_when_it_is_free() {
    let Some(mut scene) = Scene::new("locks_wait") else { return };
    let program = r#"
def wait(take):
    def act(say):
        say("waits")
        with open(asker, "r+b") as file:
            take(file, EX)
            say("has it" if os.path.exists("unlocked") else "has it too early")
    return act
for holder, asker in (("f", "f"), ("f", plain("f")), (plain("f"), "f")):
    for take in (fcntl.flock, fcntl.lockf):
        with open(holder, "r+b") as held:
            take(held, EX)
            pid, answer = child(wait(take))
            first = answer.readline().strip()
            time.sleep(0.2)
            open("unlocked", "w").close()
            take(held, UN)
            print(first, answer.readline().strip())
            os.waitpid(pid, 0)
            os.unlink("unlocked")
"#;
    run(&mut scene, program).prints(&"waits has it\n".repeat(6));
}

#[test]
fn waiting_for_a_lock_ends_with_a_signal() {
    let Some(mut scene) = Scene::new("locks_interrupted") else { return };
    // The second waiter is killed while it waits: it ends only when the mount releases it.
    let program = r#"
class Alarm(Exception): pass
def ring(signal, frame): raise Alarm
def wait(take):
    def act(say):
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        with open("f", "r+b") as file:
            say("waits")
            take(file, EX)
            say("has it")
    return act
for holder in ("f", plain("f")):
    for take in (fcntl.flock, fcntl.lockf):
        with open(holder, "r+b") as held:
            take(held, EX)
            pid, answer = child(wait(take))
            print(answer.read().split(), os.waitpid(pid, 0)[1])
            pid, answer = child(lambda say: (say("waits"), take(open("f", "r+b"), EX)))
            answer.readline()
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            print(os.waitpid(pid, 0)[1])
"#;
    run(&mut scene, program).prints(&"['waits', 'Alarm()'] 0\n9\n".repeat(4));
}

#[test]
fn lock_ends_with_its_holder() {
    let Some(mut scene) = Scene::new("locks_end") else { return };
    let program = r#"
def asks():
    "From both doors."
    return " ".join((elsewhere(flock, "f", EX), elsewhere(flock, plain("f"), EX),
        elsewhere(ranged, "f", EX, 0, 0), elsewhere(ranged, plain("f"), EX, 0, 0)))
one = os.open("f", os.O_RDWR)
fcntl.lockf(one, EX)
fcntl.flock(one, EX)
print("held:", asks())
os.close(os.dup(one))
print("a duplicate was closed:", asks())
fcntl.lockf(one, EX)
os.close(os.open("f", os.O_RDWR))
print("another one was closed:", asks())
os.close(one)
print("all were closed:", asks())
for access in (os.O_RDWR, os.O_WRONLY):
    def hold(say):
        file = os.open("f", access)
        fcntl.lockf(file, EX)
        fcntl.flock(file, EX)
        say("holds")
        time.sleep(1000)
    pid, answer = child(hold)
    answer.readline()
    held = asks()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    print("killed:", held, asks())
# The next request follows at once, many times.
for n in range(100):
    for act, words in ((flock, (EX,)), (ranged, (EX, 0, 0)), (ofd, (EX, 0, 0))):
        if elsewhere(act, "f", *words) == "busy": print("busy after the holder's end:", act.__name__)
"#;
    run(&mut scene, program).prints(
        "held: busy busy busy busy
a duplicate was closed: busy busy granted granted
another one was closed: busy busy granted granted
all were closed: granted granted granted granted
killed: busy busy busy busy granted granted granted granted
killed: busy busy busy busy granted granted granted granted
",
    );
}

#[test]
fn process_does_not_conflict_with_its_own_lock() {
    let Some(mut scene) = Scene::new("locks_own") else { return };
    let program = r#"
reads, writes = open("f", "rb"), open("f", "r+b")
fcntl.lockf(reads, SH, 100, 0)
fcntl.lockf(writes, EX, 100, 500)
fcntl.lockf(writes, EX, 10, 0)
print(*(elsewhere(ranged, path, *each) for path in ("f", plain("f"))
    for each in ((SH, 0, 10), (SH, 50, 10), (EX, 50, 10), (SH, 550, 10), (EX, 200, 10))))
"#;
    run(&mut scene, program).prints(&format!("{0} {0}\n", "busy granted busy busy granted"));
}

#[test]
fn lock_query_names_the_conflicting_lock() {
    let Some(mut scene) = Scene::new("locks_asked") else { return };
    let program = r#"
def ask(path, how):
    with open(path, "r+b") as file:
        found = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", how, 0, 0, 1000, 0)))
        if found[0] == fcntl.F_UNLCK: return "free"
        return ("shared" if found[0] == fcntl.F_RDLCK else "exclusive", *found[2:4], "mine" if found[4] == os.getppid() else found[4])
for holder, asker in (("f", "f"), (plain("f"), "f"), ("f", plain("f"))):
    with open(holder, "r+b") as held:
        print(elsewhere(ask, asker, fcntl.F_WRLCK))
        fcntl.lockf(held, SH, 100, 500)
        print(elsewhere(ask, asker, fcntl.F_WRLCK), elsewhere(ask, asker, fcntl.F_RDLCK))
        fcntl.lockf(held, EX, 0, 700)
        fcntl.lockf(held, UN, 100, 500)
        print(elsewhere(ask, asker, fcntl.F_RDLCK))
"#;
    // For the door of the plain file the kernel knows no process behind the locks that the mount holds.
    let expected = |pid: &str| format!("free\n('shared', 500, 100, {pid}) free\n('exclusive', 700, 0, {pid})\n");
    run(&mut scene, program).prints(&[expected("'mine'"), expected("'mine'"), expected("-1")].concat());
}

/// A file without a plain file is locked too, for programs at the mount.
#[test]
fn lock_on_a_file_only_in_the_store_excludes_at_the_mount() {
    let Some(mut scene) = Scene::new("locks_store") else { return };
    std::fs::write(scene.path("old"), "old").unwrap();
    let program = r#"
assert "store:" in os.getxattr("old", "user.surgetank.location").decode()
with open("old", "rb") as held:
    def asks(how):
        with open("old", "rb") as file:
            return tried(fcntl.flock, file, how | NB)
    fcntl.flock(held, SH)
    words = [elsewhere(asks, EX), elsewhere(asks, SH)]
    fcntl.flock(held, EX)
    words += [elsewhere(asks, EX), elsewhere(asks, SH)]
print(*words, elsewhere(asks, EX))
"#;
    run(&mut scene, program).prints("busy granted busy busy granted\n");
}

/// More processes wait than the mount has threads for other requests. The mount must still serve the lock holder's
/// requests.
#[test]
fn many_lock_waiters_do_not_block_the_holder() {
    let Some(mut scene) = Scene::new("locks_many") else { return };
    let program = r#"
def count(say):
    say("waits")
    with open("f", "r+b") as file:
        fcntl.flock(file, EX)
        number = int(open("count").read())
        with open("count.new", "w") as fresh: fresh.write(str(number + 1))
        os.rename("count.new", "count")
with open("f", "r+b") as held:
    fcntl.flock(held, EX)
    children = [child(count) for _ in range(100)]
    for _, answer in children: answer.readline()
    time.sleep(0.5)
    with open("count", "w") as fresh: fresh.write("0")
    # A close would not release the lock: the children have the file open, too.
    fcntl.flock(held, UN)
for pid, answer in children:
    print(answer.read(), end="")
    os.waitpid(pid, 0)
print(open("count").read())
"#;
    run(&mut scene, program).prints("100\n");
}

/// Concurrent writers lose updates, unless their locks exclude each other.
#[test]
fn sqlite_counts_right_with_writers_at_both_doors() {
    let Some(mut scene) = Scene::new("locks_sqlite") else { return };
    let program = r#"
import sqlite3
def write(path, journal):
    base = sqlite3.connect(path, timeout=80, isolation_level=None)
    if journal == "memory": base.execute("PRAGMA journal_mode=memory").fetchone()
    base.execute("PRAGMA synchronous=OFF")
    for _ in range(50):
        base.execute("BEGIN IMMEDIATE")
        (number,) = base.execute("SELECT number FROM counter").fetchone()
        time.sleep(0.001)
        base.execute("UPDATE counter SET number = ?", (number + 1,))
        base.execute("COMMIT")
for journal in ("delete", "wal", "memory"):
    name = journal + ".db"
    base = sqlite3.connect(name)
    base.execute(f"PRAGMA journal_mode={journal}").fetchone()
    base.execute("CREATE TABLE counter (number)")
    base.execute("INSERT INTO counter VALUES (0)")
    base.commit()
    base.close()
    # A journal file would be beside the plain file, where the other door does not find it.
    paths = (name, plain(name)) if journal == "memory" else (name, name)
    children = [child(lambda say: write(path, journal)) for path in paths]
    for pid, answer in children:
        print(answer.read(), end="")
        os.waitpid(pid, 0)
    base = sqlite3.connect(name)
    print(journal, *base.execute("SELECT number FROM counter").fetchone(), *base.execute("PRAGMA integrity_check").fetchone())
"#;
    run(&mut scene, program).prints("delete 100 ok\nwal 100 ok\nmemory 100 ok\n");
    assert!(scene.store_files().contains_key(std::path::Path::new("wal.db")));
}

/// One process has the preload shim, and the other one comes through the mount.
#[test]
fn counter_is_exact_when_one_writer_has_the_shim() {
    let Some(mut scene) = Scene::new("locks_shim") else { return };
    scene.tier("fast", 4096);
    let script = r#"
printf 00000000 >counter
cat >count.py <<'END'
import fcntl, os, sys
take = getattr(fcntl, sys.argv[1])
for n in range(200):
    with open("counter", "r+b", buffering=0) as file:
        take(file, fcntl.LOCK_EX)
        number = int(os.pread(file.fileno(), 8, 0))
        os.pwrite(file.fileno(), b"%08d" % (number + 1), 0)
        take(file, fcntl.LOCK_UN)
END
# One after another: the two kinds of lock do not exclude each other.
for kind in flock lockf; do
    python3 count.py $kind & env -u LD_PRELOAD python3 count.py $kind & wait
    cat counter; echo
done
"#;
    scene.run(&[], script).exits(0).prints("00000400\n00000800\n");
    scene.holds("counter", b"00000800");
    scene.is_clean();
}

/// A writable descriptor of the agent keeps a file from being sealed. The lock of a reader, or of an ended writer,
/// must not.
#[test]
fn locked_file_is_drained() {
    let Some(mut scene) = Scene::new("locks_drained") else { return };
    let program = r#"
readers = []
for name, access in (("both", os.O_RDWR), ("only", os.O_WRONLY), ("read", os.O_RDWR)):
    file = os.open(name, access | os.O_CREAT)
    fcntl.flock(file, EX)
    fcntl.lockf(file, EX)
    os.write(file, b"locked")
    if name == "read":
        fcntl.flock(file, UN)
        fcntl.lockf(file, UN)
        def hold(say):
            os.close(file)
            with open(name, "rb") as reader:
                fcntl.lockf(reader, SH)
                fcntl.flock(reader, SH)
                say("holds")
                time.sleep(1000)
        readers.append(child(hold))
        print(readers[0][1].readline(), end="")
        os.close(file)
    else:
        os.close(file)
for name in ("both", "only", "read"):
    while os.getxattr(name, "user.surgetank.state") != b"durable": time.sleep(0.01)
print("drained while", *(f"{elsewhere(flock, path, EX)} {elsewhere(ranged, path, EX, 0, 0)}" for path in ("read", plain("read"))))
os.kill(readers[0][0], signal.SIGKILL)
"#;
    run(&mut scene, program).prints("holds\ndrained while busy busy busy busy\n");
    scene.holds("both", b"locked");
    scene.holds("only", b"locked");
    scene.is_clean();
}

#[test]
fn two_hundred_lock_waiters_each_get_the_lock() {
    let Some(mut scene) = Scene::new("locks_crowd") else { return };
    scene.tier("fast", 64);
    let program = "
import fcntl, os, threading
got = []
held = os.open('lock', os.O_RDWR | os.O_CREAT); fcntl.flock(held, fcntl.LOCK_EX)
def wait():
    mine = os.open('lock', os.O_RDWR); fcntl.flock(mine, fcntl.LOCK_EX); got.append(os.fstat(mine).st_ino); os.close(mine)
waiters = [threading.Thread(target=wait) for _ in range(200)]
for waiter in waiters: waiter.start()
fcntl.flock(held, fcntl.LOCK_UN)
for waiter in waiters: waiter.join()
print(len(got), len(set(got)))
";
    std::fs::write("/mnt/program.py", program).unwrap();
    scene.run(&["--no-preload"], "exec /usr/bin/python3 /mnt/program.py").exits(0).prints("200 1\n");
}
