//! What operations in a pool cost: messages between members, and system calls of the agent.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags, openat, statat, unlinkat};
use rustix::process::{Pid, Signal, kill_process};

use crate::pool::Pool;

const FILES: usize = 200;
/// Of the kernel's requests for one file: create, write, close, stat, open, close, unlink.
const OPERATIONS: usize = 7;
/// How often each operation elsewhere is counted.
const TIMES: usize = 30;

/// Calls of a member's agent to the others so far.
fn calls(pool: &Pool, number: usize) -> u64 {
    let status = pool.asked(number, "members");
    status["members"].as_array().unwrap().iter().map(|one| one["calls"].as_u64().unwrap()).sum()
}

/// What a thread does to wait for work, and what begins and ends threads: no part of a request.
const WAITING: &str = "read futex sched_yield clock_nanosleep restart_syscall exit gettid madvise mmap mprotect munmap prctl rseq \
    rt_sigprocmask rt_sigreturn sched_getaffinity set_robust_list sigaltstack";
/// What the agent looks at now and then.
const LOOKED_AT: [&str; 3] = ["/proc/self/", "/proc/meminfo", "/sys/"];

/// The same, when no more come: closes are answered first, and made then.
pub fn calls_at_rest(pool: &Pool, number: usize) -> u64 {
    const ALIKE: usize = 4;
    let mut last = (calls(pool, number), 0);
    while last.1 < ALIKE {
        std::thread::sleep(Duration::from_millis(20));
        let now = calls(pool, number);
        last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
    }
    last.0
}

/// System calls of a process, as strace sees them.
struct Traced {
    strace: Child,
    log: PathBuf,
}

impl Traced {
    fn of(pid: Pid, log: &Path) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-y", "-s", "0", "-e", "signal=none", "-o"]).arg(log);
        strace.args(["-p", &pid.as_raw_nonzero().to_string()]).stderr(Stdio::piped());
        let mut strace = strace.spawn().unwrap();
        let mut said = BufReader::new(strace.stderr.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert!(line.contains("attached"), "{line}");
        // (It says more when threads come and go.)
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Self { strace, log: log.to_owned() }
    }

    /// How often threads that serve the mount made each system call.
    fn end(mut self) -> BTreeMap<String, usize> {
        kill_process(Pid::from_child(&self.strace), Signal::INT).unwrap();
        self.strace.wait().unwrap();
        let text = fs::read_to_string(&self.log).unwrap();
        let thread = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
        let servers: BTreeSet<String> = text.lines().filter(|line| line.contains("</dev/fuse>")).map(thread).collect();
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            // (The end of a call that another thread's line interrupted does not count.)
            let call = line.split_once('(').and_then(|(call, _)| call.split_whitespace().nth(1));
            let Some(call) = call.filter(|call| *call != "<..." && servers.contains(&thread(line))) else { continue };
            if !WAITING.split(' ').any(|other| other == call) && !LOOKED_AT.iter().any(|path| line.contains(path)) {
                *counts.entry(call.to_owned()).or_default() += 1;
            }
        }
        counts
    }
}

/// Each operation on each of the files, with names in an open directory.
fn work(directory: &Path) {
    let directory = File::open(directory).unwrap();
    for number in 0..FILES {
        let name = number.to_string();
        let made = openat(
            &directory,
            &name,
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        );
        File::from(made.unwrap()).write_all(b"content").unwrap();
        assert_eq!(statat(&directory, &name, AtFlags::empty()).unwrap().st_size, 7);
        let mut text = String::new();
        let opened = openat(&directory, &name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        File::from(opened).read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        unlinkat(&directory, &name, AtFlags::empty()).unwrap();
    }
}

/// The same work in a directory of a member's own, and on a mount without a pool.
#[test]
fn own_directories_cost_no_message_and_no_system_call() {
    let Some(mut pool) = Pool::start("counts", 0) else { return };
    pool.store_ttl = "1s";
    // (Nothing is drained meanwhile.)
    let quiet = ["--rule", "**=keep", "--keep-at-exit", "drop"];
    for _ in 0..2 {
        pool.mount_one(&quiet);
    }
    let alone = pool.over(7);
    let mounted = pool.without_pool("mount", 7, &quiet).arg(&alone).output().unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
    let (own, plain) = (pool.member(0).join("own"), alone.join("plain"));
    for directory in [&own, &plain] {
        fs::create_dir(directory).unwrap();
        work(directory);
    }
    let before = calls(&pool, 0) + calls(&pool, 1);
    work(&own);
    assert_eq!(calls(&pool, 0) + calls(&pool, 1), before, "calls to other members");
    let log = pool.store().with_file_name("calls");
    let [in_pool, without] = [(&own, 0), (&plain, 7)].map(|(directory, number)| {
        let traced = Traced::of(pool.agent(number), &log);
        work(directory);
        traced.end()
    });
    let (in_pool_sum, without_sum) = (in_pool.values().sum::<usize>(), without.values().sum::<usize>());
    eprintln!("{in_pool_sum} system calls in a pool, {without_sum} without, for {FILES} files");
    // (A file that is being sealed when it is removed costs a few more: that depends on the moment.)
    for (call, count) in &in_pool {
        let more = count.saturating_sub(without.get(call).copied().unwrap_or(0));
        assert!(
            more < FILES / 2,
            "{call}: {more} more for {FILES} files\nin a pool: {in_pool:#?}\nwithout: {without:#?}"
        );
    }
    assert!(in_pool_sum > FILES * OPERATIONS, "strace saw only {in_pool_sum} system calls");
    let ended = pool.command_at(7, "umount", &["--timeout", "60s"]).arg(&alone).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    pool.end();
}

/// Calls that a program's operations elsewhere cost, each.
struct Trips<'a> {
    pool: &'a Pool,
    /// Changes before each operation: the member does not answer for its directory.
    changes: PathBuf,
    /// The mean, and how much more it may be: the attributes of a directory are believed for a second.
    costs: BTreeMap<&'static str, (f64, f64)>,
}

impl Trips<'_> {
    /// The mean over all files.
    fn count(&mut self, what: &'static str, mut act: impl FnMut(usize)) {
        let (before, begun) = (calls_at_rest(self.pool, 1), Instant::now());
        for number in 0..TIMES {
            fs::write(&self.changes, "").unwrap();
            act(number);
        }
        let cost = (calls_at_rest(self.pool, 1) - before) as f64 / TIMES as f64;
        let more = 0.3 + 3.0 * begun.elapsed().as_secs_f64() / TIMES as f64;
        self.costs.insert(what, (cost, more));
    }

    fn are(&self, expected: &[(&str, f64)]) {
        eprintln!("{:#?}", self.costs);
        for (what, most) in expected {
            let (cost, more) = self.costs[what];
            assert!((most - 0.1..most + more).contains(&cost), "{what}: {cost} round trips, and not {most}");
        }
    }
}

/// Round trips of operations of the second member's programs in a directory of the first one.
#[test]
fn operations_elsewhere_cost_few_round_trips() {
    let Some(mut pool) = Pool::start("counted", 0) else { return };
    pool.store_ttl = "1s";
    (0..3).for_each(|_| pool.mount_one(&[]));
    let owner = pool.member(0).join("d");
    fs::create_dir(&owner).unwrap();
    let there = File::open(pool.member(1).join("d")).unwrap();
    for number in 0..TIMES {
        fs::write(owner.join(format!("owner{number}")), "content").unwrap();
        fs::write(pool.member(2).join(format!("d/third{number}")), "content").unwrap();
    }
    let mut trips = Trips { pool: &pool, changes: owner.join("changed"), costs: BTreeMap::new() };
    let stat = |what: &str, number: usize| statat(&there, format!("{what}{number}"), AtFlags::empty()).unwrap();
    let open = |what: &str, number: usize, flags: OFlags| {
        openat(&there, format!("{what}{number}"), flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR).unwrap()
    };
    let mut kept = Vec::new();
    let new = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
    trips.count("create", |number| kept.push(open("new", number, new)));
    trips.count("stat of a file that is written", |number| assert_eq!(stat("new", number).st_size, 0));
    trips.count("write", |number| assert_eq!(rustix::io::write(&kept[number], b"content"), Ok(7)));
    trips.count("close of a writer", |_| drop(kept.pop()));
    trips.count("stat", |number| assert_eq!(stat("owner", number).st_size, 7));
    trips.count("stat, content at a third", |number| assert_eq!(stat("third", number).st_size, 7));
    trips.count("open", |number| kept.push(open("owner", number, OFlags::RDONLY)));
    trips.count("close", |_| drop(kept.pop()));
    trips.count("open, content at a third", |number| kept.push(open("third", number, OFlags::RDONLY)));
    trips.count("fstat", |number| assert_eq!(rustix::fs::fstat(&kept[number]).unwrap().st_size, 7));
    kept.clear();
    trips.count("open, content here", |number| kept.push(open("new", number, OFlags::RDONLY)));
    kept.clear();
    trips.count("missing name", |_| assert!(statat(&there, "missing", AtFlags::empty()).is_err()));
    trips.count("unlink", |number| unlinkat(&there, format!("owner{number}"), AtFlags::empty()).unwrap());
    trips.are(&[
        ("create", 2.0),
        // (A program here has it open: its kernel must not get an old length.)
        ("stat of a file that is written", 2.0),
        ("write", 0.0),
        ("stat", 1.0),
        ("stat, content at a third", 1.0),
        ("fstat", 1.0),
        ("open", 2.0),
        ("open, content at a third", 3.0),
        ("open, content here", 2.0),
        ("close", 1.0),
        ("close of a writer", 1.0),
        ("missing name", 1.0),
        // (The look-up is taken back.)
        ("unlink", 3.0),
    ]);
    drop(there);
    list_in_few_round_trips(&pool);
    pool.end();
}

/// One round trip for 1,000 names, and a few for the listing itself.
fn list_in_few_round_trips(pool: &Pool) {
    const NAMES: usize = 2500;
    fs::create_dir(pool.member(0).join("many")).unwrap();
    (0..NAMES).for_each(|number| drop(File::create(pool.member(0).join(format!("many/{number}"))).unwrap()));
    let before = calls_at_rest(pool, 1);
    assert_eq!(fs::read_dir(pool.member(1).join("many")).unwrap().count(), NAMES);
    let cost = calls_at_rest(pool, 1) - before;
    eprintln!("{cost} round trips for a listing of {NAMES} names");
    // (Names: 3, and one that there are no more. The path: up to 3. Opening and closing: 2.)
    assert!((4..=9).contains(&cost), "{cost} round trips for {NAMES} names");
}
