//! Programs with the preload shim in a pool: what they do, other members see, and what other members do, they see.
//!
//! A [`Worker`] is a program with the shim at one member. Other members' programs are the test's own: they use the mount.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::pool::Pool;
use crate::scene::eventually;

/// Carries out each line, and says what it came to.
const LOOP: &str = "
import errno, fcntl, json, os, sys
def put(path, text, flags=os.O_TRUNC):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    os.write(fd, text.encode())
    os.close(fd)
def get(path):
    fd = os.open(path, os.O_RDONLY)
    text = os.read(fd, 1 << 20).decode()
    os.close(fd)
    return text
def lock(fd, how):
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
kept = {}
for line in sys.stdin:
    try:
        answer = eval(line)
    except OSError as why:
        answer = errno.errorcode[why.errno]
    print(json.dumps(answer), flush=True)
";

pub struct Worker {
    child: Child,
    to: RefCell<ChildStdin>,
    from: RefCell<BufReader<ChildStdout>>,
}

/// What the shim did: opens from the index, by the agent, and left to the mount; stats from the index, and left. The last one:
/// files that it made in delegated directories.
pub struct Counts([u64; 6]);

impl Counts {
    pub fn opens_from_index(&self) -> u64 {
        self.0[0]
    }
    pub fn opens_by_agent(&self) -> u64 {
        self.0[1]
    }
    pub fn stats_from_index(&self) -> u64 {
        self.0[3]
    }
    pub fn made_without_a_request(&self) -> u64 {
        self.0[5]
    }
}

impl Worker {
    pub fn start(pool: &Pool, number: usize) -> Self {
        let mut command = pool.command("run", number, &["--quiet", "--over"]);
        command.arg(pool.over(number)).args(["--", "/usr/bin/python3", "-uc", LOOP]).current_dir(pool.over(number));
        command.env("SURGETANK_REPORT", "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let worker = Self { child, to: RefCell::new(to), from: RefCell::new(from) };
        assert_eq!(worker.does("1"), 1);
        worker
    }

    pub fn begins(&self, what: &str) {
        writeln!(self.to.borrow_mut(), "{what}").unwrap();
    }

    pub fn ends(&self) -> Value {
        let mut line = String::new();
        self.from.borrow_mut().read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|why| panic!("{line:?}: {why}"))
    }

    pub fn does(&self, what: &str) -> Value {
        self.begins(what);
        self.ends()
    }

    pub fn end(self) -> Counts {
        drop(self.to);
        let output = self.child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let line = text.lines().find(|line| line.contains(" opens from the index")).unwrap_or_else(|| panic!("{text}"));
        let numbers = line.rsplit("]: ").next().unwrap().split(|c: char| !c.is_ascii_digit());
        let numbers: Vec<u64> = numbers.filter_map(|word| word.parse().ok()).collect();
        Counts([numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], *numbers.last().unwrap()])
    }
}

pub fn trials() -> usize {
    std::env::var("SURGETANK_POOL_TRIALS").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

/// A pool whose files are known to be small, so that programs get them directly. The store has directories.
pub fn pool(name: &str, members: usize, directories: &[&str], more: &[&str]) -> Option<Pool> {
    let mut pool = Pool::start(&format!("shim-{name}"), 0)?;
    fs::write("/mnt/small.toml", "[[rules]]\nmatch = \"**\"\nsize = \"64K\"\n").unwrap();
    directories.iter().for_each(|directory| fs::create_dir(pool.store().join(directory)).unwrap());
    let options = [&["--config", "/mnt/small.toml"], more].concat();
    (0..members).for_each(|_| pool.mount_one(&options));
    Some(pool)
}

fn calls_between(pool: &Pool) -> u64 {
    let status = pool.status(0);
    let counts = status["members"].as_array().unwrap().iter().map(|member| member["calls"].as_u64().unwrap_or(0));
    counts.sum()
}

/// All other tests would pass with the mount alone.
#[test]
fn shim_serves_own_directories_and_asks_no_member() {
    let Some(mut pool) = pool("own", 2, &["own"], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    for directory in ["", "d/", "own/"] {
        if directory == "d/" {
            worker.does("os.mkdir('d')");
        }
        worker.does(&format!("put('{directory}first', 'claims it')"));
    }
    let before = calls_between(&pool);
    for directory in ["", "d/", "own/"] {
        for number in 0..50 {
            let path = format!("{directory}{number}");
            assert_eq!(worker.does(&format!("put('{path}', 'text')")), Value::Null);
            assert_eq!(worker.does(&format!("get('{path}')")), "text");
            assert_eq!(worker.does(&format!("os.stat('{path}').st_size")), 4);
        }
    }
    // (The status counts the questions of the status.)
    let after = calls_between(&pool);
    let counts = worker.end();
    assert!(after <= before + 2, "{} calls", after - before);
    let (index, agent, stats) = (counts.opens_from_index(), counts.opens_by_agent(), counts.stats_from_index());
    // (The mount serves a file whose record the agent is just writing.)
    assert!(index >= 120 && agent >= 150 && stats >= 120, "index {index}, agent {agent}, stats {stats}");
    pool.end();
}

/// The other member has looked the name up before, when it did not exist.
#[test]
fn closed_file_is_seen_by_another_member() {
    let Some(mut pool) = pool("closed", 2, &["own"], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    worker.does("os.mkdir('d')");
    let there = pool.member(1).to_owned();
    for trial in 0..trials() {
        for directory in ["", "d/", "own/"] {
            let name = format!("{directory}{trial}");
            let path = there.join(&name);
            assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
            for (text, flags) in [("one", "os.O_EXCL"), ("other", "os.O_TRUNC"), ("others", "os.O_TRUNC")] {
                assert_eq!(worker.does(&format!("put('{name}', '{text}', {flags})")), Value::Null, "{name}");
                assert_eq!(fs::metadata(&path).unwrap().len(), text.len() as u64, "{name}");
                assert_eq!(fs::read_to_string(&path).unwrap(), text, "{name}");
            }
            worker.does(&format!("put('{name}', ' more', os.O_APPEND)"));
            assert_eq!(fs::read_to_string(&path).unwrap(), "others more", "{name}");
            let listed = fs::read_dir(there.join(directory)).unwrap();
            assert!(listed.flatten().any(|entry| entry.file_name().to_str() == Some(&trial.to_string())), "{name}");
            // What is written before the close is seen, too, also by one that has it open.
            let reader = File::open(&path).unwrap();
            let read = || {
                let mut bytes = [0; 20];
                let count = reader.read_at(&mut bytes, 0).unwrap();
                String::from_utf8_lossy(&bytes[..count]).into_owned()
            };
            assert_eq!(read(), "others more", "{name}");
            worker.does(&format!("kept.update(f=os.open('{name}', os.O_WRONLY))"));
            worker.does("os.pwrite(kept['f'], b'OTHER', 0)");
            assert_eq!(read(), "OTHERs more", "{name}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "OTHERs more", "{name}");
            worker.does("os.pwrite(kept['f'], b'Other', 0)");
            assert_eq!(read(), "Others more", "{name}");
            worker.does("os.close(kept.pop('f'))");
        }
    }
    let counts = worker.end();
    assert!(counts.opens_by_agent() >= 12 * trials() as u64, "by the agent: {}", counts.opens_by_agent());
    pool.end();
}

#[test]
fn what_another_member_changes_is_seen_under_the_shim() {
    let Some(mut pool) = pool("seen", 2, &["own"], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    worker.does("os.mkdir('d')");
    for trial in 0..trials() {
        for directory in ["", "d/", "own/"] {
            let (name, other) = (format!("{directory}f{trial}"), format!("{directory}g{trial}"));
            let (there, other_there) = (pool.member(1).join(&name), pool.member(1).join(&other));
            let read = |of: &str| worker.does(&format!("get('{of}')"));
            worker.does(&format!("put('{name}', 'ours')"));
            assert_eq!(read(&name), "ours");
            worker.does(&format!("kept.update(f=os.open('{name}', os.O_RDONLY))"));
            // Written there, and not closed.
            let writer = OpenOptions::new().write(true).open(&there).unwrap();
            writer.write_all_at(b"OURS", 0).unwrap();
            assert_eq!(worker.does("os.pread(kept['f'], 9, 0).decode()"), "OURS", "{name}");
            assert_eq!(read(&name), "OURS");
            drop(writer);
            OpenOptions::new().append(true).open(&there).unwrap().write_all(b"+").unwrap();
            assert_eq!(worker.does(&format!("os.stat('{name}').st_size")), 5, "{name}");
            assert_eq!(read(&name), "OURS+");
            worker.does("os.close(kept.pop('f'))");
            // Its content is there.
            fs::write(&other_there, "theirs").unwrap();
            assert_eq!(worker.does(&format!("os.stat('{other}').st_size")), 6, "{other}");
            assert_eq!(read(&other), "theirs");
            fs::rename(&other_there, &there).unwrap();
            assert_eq!((read(&name), read(&other)), ("theirs".into(), "ENOENT".into()));
            worker.does(&format!("put('{name}', '!', os.O_APPEND)"));
            assert_eq!(fs::read_to_string(&there).unwrap(), "theirs!");
            fs::remove_file(&there).unwrap();
            assert_eq!(worker.does(&format!("os.path.exists('{name}')")), false, "{name}");
            assert_eq!(worker.does(&format!("put('{name}', 'again', os.O_EXCL)")), Value::Null);
            assert_eq!(fs::read_to_string(&there).unwrap(), "again");
        }
    }
    let counts = worker.end();
    assert!(counts.opens_from_index() >= 4 * trials() as u64, "from the index: {}", counts.opens_from_index());
    pool.end();
}

#[test]
fn locks_hold_between_the_shim_and_another_member() {
    let Some(mut pool) = pool("locks", 2, &[], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    worker.does("os.mkdir('d')");
    worker.does("put('d/lock', 'x')");
    for flags in ["os.O_RDWR", "os.O_RDONLY"] {
        let there = OpenOptions::new().read(true).write(true).open(pool.member(1).join("d/lock")).unwrap();
        worker.does(&format!("kept.update(f=os.open('d/lock', {flags}))"));
        assert_eq!(worker.does("lock(kept['f'], fcntl.LOCK_EX)"), true);
        assert!(flock(&there, FlockOperation::NonBlockingLockExclusive).is_err(), "{flags}");
        worker.does("lock(kept['f'], fcntl.LOCK_UN)");
        flock(&there, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(worker.does("lock(kept['f'], fcntl.LOCK_SH)"), false);
        flock(&there, FlockOperation::Unlock).unwrap();
        assert_eq!(worker.does("lock(kept['f'], fcntl.LOCK_SH)"), true);
        worker.does("os.close(kept.pop('f'))");
        flock(&there, FlockOperation::NonBlockingLockExclusive).unwrap();
        flock(&there, FlockOperation::Unlock).unwrap();
    }
    // POSIX locks.
    let there = OpenOptions::new().read(true).write(true).open(pool.member(1).join("d/lock")).unwrap();
    rustix::fs::fcntl_lock(&there, FlockOperation::NonBlockingLockExclusive).unwrap();
    worker.does("kept.update(f=os.open('d/lock', os.O_RDWR))");
    assert_eq!(worker.does("fcntl.lockf(kept['f'], fcntl.LOCK_EX | fcntl.LOCK_NB)"), "EAGAIN");
    drop(there);
    eventually("the lock ends", || worker.does("fcntl.lockf(kept['f'], fcntl.LOCK_EX | fcntl.LOCK_NB)") == Value::Null);
    let there = OpenOptions::new().read(true).write(true).open(pool.member(1).join("d/lock")).unwrap();
    assert!(rustix::fs::fcntl_lock(&there, FlockOperation::NonBlockingLockExclusive).is_err());
    worker.does("os.close(kept.pop('f'))");
    drop(there);
    let counts = worker.end();
    assert!(counts.opens_by_agent() >= 3 && counts.opens_from_index() >= 1);
    pool.end();
}

#[test]
fn appends_of_the_shim_and_of_another_member_are_all_there() {
    let Some(mut pool) = pool("appends", 2, &[], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    worker.does("os.mkdir('d')");
    worker.does("put('d/log', '')");
    let count = 5 * trials();
    worker.does("kept.update(f=os.open('d/log', os.O_WRONLY | os.O_APPEND))");
    let mut there = OpenOptions::new().append(true).open(pool.member(1).join("d/log")).unwrap();
    worker.begins(&format!("[os.write(kept['f'], b'ours\\n') for _ in range({count})][:0]"));
    (0..count).for_each(|_| there.write_all(b"them\n").unwrap());
    worker.ends();
    worker.does("os.close(kept.pop('f'))");
    let text = fs::read_to_string(pool.member(1).join("d/log")).unwrap();
    let of = |line: &str| text.lines().filter(|one| *one == line).count();
    assert_eq!((of("ours"), of("them"), text.len()), (count, count, 10 * count));
    assert!(worker.end().opens_by_agent() >= 2);
    drop(there);
    pool.end();
}

#[test]
fn exclusive_creation_has_one_winner_with_the_shim() {
    let Some(mut pool) = pool("excl", 3, &[], &[]) else { return };
    let (first, second) = (Worker::start(&pool, 0), Worker::start(&pool, 1));
    first.does("os.mkdir('d')");
    for trial in 0..trials() {
        let make = format!("put('d/{trial}', 'x', os.O_EXCL)");
        first.begins(&make);
        second.begins(&make);
        let third = File::create_new(pool.member(2).join(format!("d/{trial}")));
        let won = [first.ends().is_null(), second.ends().is_null(), third.is_ok()];
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "{trial}: {won:?}");
    }
    assert!(first.end().opens_by_agent() > 0);
    second.end();
    pool.end();
}

/// The shim has served the directory's files before, from copies that were brought in ahead.
#[test]
fn directory_that_another_member_claims_is_not_served_any_more() {
    let Some(mut pool) = pool("claimed", 2, &["in"], &[]) else { return };
    for number in 0..10 {
        fs::write(pool.store().join(format!("in/{number}")), "old").unwrap();
    }
    let brought = pool.command_at(0, "prefetch", &[]).arg(pool.member(0).join("in")).output().unwrap();
    assert!(brought.status.success(), "{brought:?}");
    let worker = Worker::start(&pool, 0);
    let in_it = Worker::start(&pool, 0);
    in_it.does("os.chdir('in')");
    for number in 0..10 {
        assert_eq!(worker.does(&format!("get('in/{number}')")), "old");
        assert_eq!(in_it.does(&format!("get('{number}')")), "old");
    }
    for number in 0..10 {
        fs::write(pool.member(1).join(format!("in/{number}")), "new").unwrap();
        assert_eq!(worker.does(&format!("get('in/{number}')")), "new");
        assert_eq!(in_it.does(&format!("get('{number}')")), "new");
        assert_eq!(in_it.does(&format!("put('{number}', 'newest')")), Value::Null);
        assert_eq!(fs::read_to_string(pool.member(1).join(format!("in/{number}"))).unwrap(), "newest");
    }
    fs::remove_file(pool.member(1).join("in/0")).unwrap();
    assert_eq!(
        (worker.does("os.path.exists('in/0')"), in_it.does("os.path.exists('0')")),
        (false.into(), false.into())
    );
    assert_eq!((worker.end().opens_from_index(), in_it.end().opens_from_index()), (0, 0));
    pool.end();
}

/// Another member owns the directory above, and removes this member's.
#[test]
fn directory_that_another_member_removes_is_gone_under_the_shim() {
    const DIRECTORIES: [&str; 5] = ["own0", "own1", "own2", "own3", "own4"];
    let Some(mut pool) = pool("rmdir", 2, &DIRECTORIES, &[]) else { return };
    fs::write(pool.member(1).join("root is theirs"), "").unwrap();
    let worker = Worker::start(&pool, 0);
    for own in DIRECTORIES {
        let there = pool.member(1).join(own);
        assert_eq!(worker.does(&format!("put('{own}/f', 'x')")), Value::Null, "{own}");
        // (The first one has claimed the directory.)
        assert_eq!(worker.does(&format!("put('{own}/f', 'y')")), Value::Null, "{own}");
        assert_eq!(worker.does(&format!("get('{own}/f')")), "y");
        assert_eq!(worker.does(&format!("os.stat('{own}/f').st_size")), 1);
        assert_eq!(worker.does(&format!("os.unlink('{own}/f')")), Value::Null);
        fs::remove_dir(&there).unwrap();
        assert_eq!(worker.does(&format!("os.path.exists('{own}')")), false);
        assert_eq!(worker.does(&format!("put('{own}/g', 'x')")), "ENOENT");
        // Made again, it is theirs.
        fs::create_dir(&there).unwrap();
        assert_eq!(worker.does(&format!("os.path.exists('{own}')")), true);
        assert_eq!(worker.does(&format!("os.path.exists('{own}/f')")), false);
        fs::write(there.join("f"), "theirs").unwrap();
        assert_eq!(worker.does(&format!("get('{own}/f')")), "theirs");
    }
    let counts = worker.end();
    let (agent, index) = (counts.opens_by_agent(), counts.opens_from_index());
    assert!(agent >= 5 && index >= 5, "by the agent {agent}, from the index {index}");
    pool.end();
}

/// Kills the first member's agent. (Three that have served for less than 20 ms would not be replaced.)
pub fn kill(pool: &Pool) {
    std::thread::sleep(std::time::Duration::from_millis(40));
    kill_process(pool.agent(0), Signal::KILL).unwrap();
}

/// Programs go on, and what they closed while no agent was there is seen.
#[test]
fn killed_agent_is_replaced_and_the_shim_serves_again() {
    let Some(mut pool) = pool("killed", 2, &["own"], &[]) else { return };
    let worker = Worker::start(&pool, 0);
    worker.does("os.mkdir('d')");
    for trial in 0..10 {
        for directory in ["d", "own"] {
            let name = format!("{directory}/{trial}");
            worker.does(&format!("put('{name}', 'before')"));
            worker.does(&format!("kept.update(f=os.open('{name}', os.O_WRONLY))"));
            kill(&pool);
            worker.does("os.pwrite(kept['f'], b'during', 0)");
            worker.does("os.close(kept.pop('f'))");
            assert_eq!(fs::read_to_string(pool.member(1).join(&name)).unwrap(), "during");
            assert_eq!(worker.does(&format!("put('{name}', 'after')")), Value::Null);
            assert_eq!(fs::read_to_string(pool.member(1).join(&name)).unwrap(), "after");
            fs::write(pool.member(1).join(&name), "theirs").unwrap();
            assert_eq!(worker.does(&format!("get('{name}')")), "theirs");
        }
    }
    let counts = worker.end();
    assert!(counts.opens_by_agent() >= 20 && counts.opens_from_index() > 0);
    pool.end();
}

/// The first member, which has the registry, is stopped for longer than the lease.
#[test]
fn shim_serves_nothing_after_the_lease() {
    let Some(mut pool) = pool("lease", 2, &["own"], &["--pool-lease", "6s"]) else { return };
    let worker = Worker::start(&pool, 1);
    worker.does("put('own/f', 'x')");
    worker.does("os.chdir('own')");
    assert_eq!(worker.does("get('f')"), "x");
    let stopped = pool.stop(0);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(7);
    while std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let (answered, answers) = std::sync::mpsc::channel();
    let answer = std::thread::scope(|scope| {
        let worker = std::sync::Mutex::new(worker);
        let asks = scope.spawn(move || {
            let worker = worker.into_inner().unwrap();
            let answer = worker.does("get('f')");
            answered.send(()).unwrap();
            (worker, answer)
        });
        let is_early = answers.recv_timeout(std::time::Duration::from_secs(1)).is_ok();
        stopped.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
        let (worker, answer) = asks.join().unwrap();
        assert!(!is_early, "answered {answer} after the lease");
        worker.end();
        answer
    });
    assert!(answer == "x" || answer == "EIO", "{answer}");
    if answer == "x" {
        pool.end();
    }
}
