//! Many programs at several members at once: one member is stopped, names change in two directories, and two pools and
//! a run without one have the same store.
//!
//! `SURGETANK_POOL_STOP_SECONDS` stops a member for longer. `SURGETANK_STORM_SEED` repeats a storm of names.

mod held;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use crate::nodes::{Nodes, names};
use crate::pool::Pool;
use crate::scene::{Running, Scene, eventually, files_below};
use held::{HELD, Held};

/// At most 60: a request does not wait longer for its owner.
const STOP_SECONDS: u64 = 5;
/// How long a test keeps a member stopped at most, beyond that time.
const STOP_PATIENCE_SECONDS: u64 = 45;
/// Threads of the test, each in a system call.
const WAITING: usize = 200;
/// What a member does at least in its own directory meanwhile.
const OWN_ROUNDS: usize = 200;

/// Programs of member 0 wait for files of member 1, which is stopped. Members 0 and 2 go on in the directory of member 0.
#[test]
fn stopped_agent_holds_up_only_its_own_directories() {
    let stop = std::env::var("SURGETANK_POOL_STOP_SECONDS").ok().and_then(|text| text.parse().ok());
    let stop = stop.unwrap_or(STOP_SECONDS);
    let most = stop + STOP_PATIENCE_SECONDS;
    let lease = Duration::from_secs(2 * most);
    let Some(mut nodes) = Nodes::start_with("storm", 3, lease) else { return };
    for node in [0, 2] {
        fs::write(nodes.on(node).join(format!("own0/value{node}")), "0").unwrap();
    }
    let waiting = lay_out_for_waiting(&nodes);
    let go = nodes.store().with_file_name("go");
    let until = format!("timeout {most} sh -c 'until [ -e {} ]; do sleep 0.02; done' || :", go.display());
    let mut stopped = nodes.stopped(1, &until);
    eventually("the member is stopped", || stopped.says("stopped"));
    let (asked, answered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (rounds, ends) = ([AtomicUsize::new(0), AtomicUsize::new(0)], AtomicBool::new(false));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let all_end = AtEnd(|| ends.store(true, Ordering::SeqCst));
        for (number, files) in waiting.into_iter().enumerate() {
            let (nodes, asked, answered) = (&nodes, &asked, &answered);
            scope.spawn(move || {
                asked.fetch_add(1, Ordering::SeqCst);
                let said = wait_for_member(nodes, number, files);
                answered.fetch_add(1, Ordering::SeqCst);
                said.unwrap_or_else(|why| panic!("program {number}: {why}"));
            });
        }
        for (node, rounds) in [0, 2].into_iter().zip(&rounds) {
            let (nodes, ends) = (&nodes, &ends);
            scope.spawn(move || own_directory_goes_on(nodes, node, rounds, ends));
        }
        eventually("all programs ask", || asked.load(Ordering::SeqCst) == WAITING);
        killed_programs_end(&nodes);
        let before: Vec<_> = rounds.iter().map(|rounds| rounds.load(Ordering::SeqCst)).collect();
        eventually("own directories go on", || {
            let grown = |(rounds, before): (&AtomicUsize, &usize)| rounds.load(Ordering::SeqCst) > before + OWN_ROUNDS;
            begun.elapsed() > Duration::from_secs(stop) && rounds.iter().zip(&before).all(grown)
        });
        let early = answered.load(Ordering::SeqCst);
        drop(all_end);
        assert!(!stopped.has_ended(), "the stop has ended by itself");
        fs::write(&go, "").unwrap();
        assert_eq!(early, 0, "a stopped member answers");
    });
    stopped.ends().exits(0);
    eprintln!("stopped for {:?} at most; rounds in own directories: {rounds:?}", begun.elapsed());
    for node in 0..3 {
        what_waited_is_there(&nodes.on(node).join("own1"));
    }
    nodes.end();
    what_waited_is_there(&nodes.store().join("own1"));
    for (node, rounds) in [0, 2].into_iter().zip(&rounds) {
        let value = fs::read_to_string(nodes.store().join(format!("own0/value{node}"))).unwrap();
        assert_eq!(value, rounds.load(Ordering::SeqCst).to_string());
    }
}

/// Done at the end of a test's scope, also if the test fails: other threads wait for it.
struct AtEnd<F: Fn()>(F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Files of member 1 that member 0 has seen in an earlier state. Some programs have files open.
fn lay_out_for_waiting(nodes: &Nodes) -> Vec<Option<File>> {
    let (here, owner) = (nodes.on(0).join("own1"), nodes.on(1).join("own1"));
    fs::write(owner.join("log"), "").unwrap();
    for name in ["rm", "mv"] {
        fs::write(owner.join(format!("kept-{name}")), name).unwrap();
    }
    let laid_out = (0..WAITING).map(|number| {
        let name = format!("value{number}");
        fs::write(owner.join(&name), "old").unwrap();
        assert_eq!(fs::read_to_string(here.join(&name)).unwrap(), "old");
        let file = match number % 6 {
            2 => Some(OpenOptions::new().append(true).open(here.join("log")).unwrap()),
            3 | 5 => Some(File::open(here.join(&name)).unwrap()),
            _ => None,
        };
        fs::write(owner.join(&name), format!("new {number}")).unwrap();
        file
    });
    laid_out.collect()
}

/// One program of member 0, with a file that was opened before.
fn wait_for_member(nodes: &Nodes, number: usize, file: Option<File>) -> std::io::Result<()> {
    let dir = nodes.on(0).join("own1");
    let value = dir.join(format!("value{number}"));
    let is_new = |text: String| match text == format!("new {number}") {
        true => Ok(()),
        false => Err(std::io::Error::other(format!("a stale value: {text}"))),
    };
    match (number % 6, file) {
        (0, _) => is_new(fs::read_to_string(value)?),
        (1, _) => {
            let mut made = OpenOptions::new().write(true).create_new(true).open(dir.join(format!("made{number}")))?;
            made.write_all(format!("made {number}").as_bytes())
        }
        (2, Some(mut log)) => log.write_all(format!("{number}\n").as_bytes()),
        (3, Some(mut file)) => {
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            is_new(text)
        }
        (4, _) => fs::rename(value, dir.join(format!("renamed{number}"))),
        (_, Some(file)) => {
            flock(&file, FlockOperation::LockExclusive)?;
            is_new(fs::read_to_string(value)?)
        }
        _ => unreachable!(),
    }
}

/// Writes, renames and reads in the directory of member 0.
fn own_directory_goes_on(nodes: &Nodes, node: usize, rounds: &AtomicUsize, ends: &AtomicBool) {
    let [new, value, fixed] = ["new", "value", "fixed"].map(|name| nodes.on(node).join(format!("own0/{name}{node}")));
    fs::write(&fixed, "fixed").unwrap();
    while !ends.load(Ordering::SeqCst) {
        let round = rounds.load(Ordering::SeqCst) + 1;
        fs::write(&new, round.to_string()).unwrap();
        fs::rename(&new, &value).unwrap();
        assert_eq!(fs::read_to_string(&value).unwrap(), round.to_string());
        assert_eq!(fs::read_to_string(&fixed).unwrap(), "fixed");
        rounds.store(round, Ordering::SeqCst);
    }
}

/// Programs at member 0 and at the stopped one. None has an effect later.
fn killed_programs_end(nodes: &Nodes) {
    let scripts = [
        ("cat", "exec cat $1", "own1/value0"),
        ("ls", "exec ls $1", "own1"),
        ("touch", "exec touch $1", "own1/killed-touch"),
        ("mkdir", "exec mkdir $1", "own1/killed-mkdir"),
        ("mv", "exec mv $1 $1-killed", "own1/kept-mv"),
        ("rm", "exec rm $1", "own1/kept-rm"),
    ];
    let both = [0, 1].into_iter().flat_map(|node| scripts.map(|(name, script, path)| (node, name, script, path)));
    let mut programs: Vec<_> =
        both.map(|(node, name, script, path)| (node, name, nodes.program(node, script, path))).collect();
    for (node, name, program) in &programs {
        eventually(&format!("{name} of node {node} waits"), || waits_in_a_call(program, name));
    }
    for (_, _, program) in &programs {
        program.kill();
    }
    for (node, name, program) in &mut programs {
        eventually(&format!("{name} of node {node} ends"), || program.has_ended());
    }
    for (node, name, program) in programs {
        let ended = program.ends();
        assert_eq!((ended.stdout.as_str(), ended.status.code()), ("", None), "{name} of node {node}");
    }
}

/// The process runs this program, and sleeps in a system call.
fn waits_in_a_call(program: &Running, name: &str) -> bool {
    let read = |what: &str| fs::read_to_string(format!("/proc/{}/{what}", program.pid())).unwrap_or_default();
    let call = read("syscall").split(' ').next().and_then(|number| number.parse::<i64>().ok());
    read("comm").trim() == name && call.is_some_and(|number| number >= 0)
}

fn what_waited_is_there(dir: &Path) {
    let read = |name: String| fs::read_to_string(dir.join(&name)).unwrap_or_else(|why| panic!("{name}: {why}"));
    let mut expected = BTreeSet::from(["log", "kept-rm", "kept-mv"].map(str::to_owned));
    let mut logged = BTreeSet::new();
    for number in 0..WAITING {
        let value = if number % 6 == 4 { format!("renamed{number}") } else { format!("value{number}") };
        assert_eq!(read(value.clone()), format!("new {number}"));
        expected.insert(value);
        if number % 6 == 1 {
            let made = format!("made{number}");
            assert_eq!(read(made.clone()), format!("made {number}"));
            expected.insert(made);
        }
        if number % 6 == 2 {
            logged.insert(number.to_string());
        }
    }
    let log = read("log".to_owned());
    assert_eq!(log.lines().count(), logged.len(), "{log}");
    assert_eq!(log.lines().map(str::to_owned).collect::<BTreeSet<_>>(), logged);
    assert_eq!(names(dir), expected, "{}", dir.display());
}

/// What a name is: a file with its content, or a directory in which there is a file or none.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    File(String),
    Dir(bool),
}

type Names = BTreeMap<String, Node>;

const STORM_ROUNDS: usize = 250;
/// The directories of the storm, of the members 0 and 1.
const DIRS: [&str; 2] = ["a", "b"];
const NAMES_EACH: usize = 4;

/// Files and directories that all threads make and remove. No rename replaces one of them, so they can be counted.
#[derive(Default)]
struct Shared {
    made: [AtomicUsize; 2],
    removed: [AtomicUsize; 2],
}

/// Members 2 and 3 own none of the directories. Working directories and mounts below stay.
#[test]
fn storm_of_names_equals_the_reference() {
    let seed = std::env::var("SURGETANK_STORM_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    eprintln!("SURGETANK_STORM_SEED={seed}");
    let Some(mut pool) = Pool::start("storm", 0) else { return };
    for dir in DIRS {
        fs::create_dir(pool.store().join(dir)).unwrap();
    }
    (0..4).for_each(|_| pool.mount_one(&[]));
    let mut expected = Names::new();
    for (member, dir) in DIRS.into_iter().enumerate() {
        let name = format!("{dir}/first");
        fs::write(pool.member(member).join(&name), "first").unwrap();
        expected.insert(name, Node::File("first".into()));
    }
    let held = Held::begin(&pool, &DIRS);
    let held_names = DIRS.iter().flat_map(|dir| HELD.map(|name| format!("{dir}/{name}")));
    expected.extend(held_names.map(|name| (name, Node::Dir(true))));
    let shared = Shared::default();
    std::thread::scope(|scope| {
        let (pool, shared) = (&pool, &shared);
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || storm(pool, thread, seed, shared))).collect();
        threads.into_iter().for_each(|thread| expected.extend(thread.join().unwrap()));
    });
    held.end();
    let found = tree(pool.member(0));
    for member in 1..4 {
        assert_eq!(tree(pool.member(member)), found, "member {member} lists another tree than member 0");
    }
    for member in 0..4 {
        let sets = DIRS.iter().flat_map(|dir| SETS.iter().map(move |set| format!("{dir}/{set}")));
        let all = sets.flat_map(|set| (0..NAMES_EACH).map(move |number| format!("{set}-{number}")));
        for name in all.filter(|name| !found.contains_key(name)) {
            assert_eq!(seen(pool.member(member), &name), None, "{name} at member {member} is not listed");
        }
    }
    let (common, own): (Names, Names) = found.clone().into_iter().partition(|(name, _)| name.contains("/shared"));
    assert_eq!(own, expected, "SURGETANK_STORM_SEED={seed}");
    let is_file = |node: &&Node| matches!(node, Node::File(_));
    let counts = [common.values().filter(is_file).count(), common.values().filter(|node| !is_file(node)).count()];
    let wanted = [0, 1].map(|kind| {
        let count = |of: &[AtomicUsize; 2]| of[kind].load(Ordering::SeqCst);
        count(&shared.made).checked_sub(count(&shared.removed)).unwrap()
    });
    assert_eq!(counts, wanted, "SURGETANK_STORM_SEED={seed}: files and directories of all threads");
    let contents: BTreeSet<_> = common.values().map(|node| format!("{node:?}")).collect();
    assert!(contents.len() >= counts[0], "a file has two names: {common:?}");
    pool.end();
    assert_eq!(tree(&pool.store()), found, "SURGETANK_STORM_SEED={seed}: the store has another tree");
}

const SETS: [&str; 5] = ["own0", "own1", "own2", "own3", "shared"];

/// One thread at its member. Its own names must always be as its model says, at every member.
fn storm(pool: &Pool, thread: usize, seed: u64, shared: &Shared) -> Names {
    let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(31).wrapping_add(thread as u64));
    let root = pool.member(thread);
    let (mut names, mut crossed) = (Names::new(), 0);
    for round in 0..STORM_ROUNDS {
        let context = format!("SURGETANK_STORM_SEED={seed}: round {round} of thread {thread}");
        let dir = DIRS[random.usize(..2)];
        // (One rename in four is to the other directory.)
        let other = if random.u8(..4) == 0 { DIRS[random.usize(..2)] } else { dir };
        let set = SETS[if round % 3 == 0 { 4 } else { thread }];
        let [from, to] = [dir, other].map(|dir| format!("{dir}/{set}-{}", random.usize(..NAMES_EACH)));
        let token = format!("{round} of {thread}");
        if set == SETS[4] {
            storm_shared(root, (&from, &to), random.u8(..5), &token, shared, &context);
            continue;
        }
        let operation = random.u8(..9);
        let before = names.clone();
        let wanted = apply_to_model(&mut names, (&from, &to), operation, &token);
        let got = apply_to_mount(root, (&from, &to), operation, &token);
        let crosses = from.split('/').next() != to.split('/').next();
        let is_dir = matches!(before.get(&from), Some(Node::Dir(_)));
        if operation == 2 && crosses && is_dir && got == Err(Errno::XDEV) {
            names = before;
            crossed += 1;
        } else {
            assert_eq!(got, wanted, "{context}: operation {operation} on {from} and {to}, before: {before:?}");
        }
        for name in [&from, &to] {
            let member = random.usize(..4);
            let found = seen(pool.member(member), name);
            assert_eq!(found.as_ref(), names.get(name), "{context}: {name} at member {member}");
        }
    }
    eprintln!("thread {thread}: {crossed} directories are not renamed to the other owner's directory");
    names
}

fn apply_to_mount(root: &Path, (from, to): (&str, &str), operation: u8, token: &str) -> Result<(), Errno> {
    let (from, to) = (root.join(from), root.join(to));
    let done = match operation {
        0 | 1 => create(&from, token),
        2 => fs::rename(from, to),
        3 | 4 => fs::create_dir(from),
        5 => fs::remove_dir(from),
        6 => fs::remove_file(from),
        7 => create(&from.join("below"), "below"),
        _ => fs::remove_file(from.join("below")),
    };
    done.map_err(|why| Errno::from_io_error(&why).unwrap())
}

fn create(path: &Path, content: &str) -> std::io::Result<()> {
    OpenOptions::new().write(true).create_new(true).open(path)?.write_all(content.as_bytes())
}

fn apply_to_model(names: &mut Names, (from, to): (&str, &str), operation: u8, token: &str) -> Result<(), Errno> {
    let found = names.get(from).cloned();
    match (operation, found) {
        (0 | 1 | 3 | 4, Some(_)) => return Err(Errno::EXIST),
        (0 | 1, None) => drop(names.insert(from.into(), Node::File(token.into()))),
        (3 | 4, None) => drop(names.insert(from.into(), Node::Dir(false))),
        (_, None) => return Err(Errno::NOENT),
        (2, Some(moved)) => {
            match (&moved, names.get(to)) {
                _ if from == to => return Ok(()),
                (Node::File(_), Some(Node::Dir(_))) => return Err(Errno::ISDIR),
                (Node::Dir(_), Some(Node::File(_))) => return Err(Errno::NOTDIR),
                (Node::Dir(_), Some(Node::Dir(true))) => return Err(Errno::NOTEMPTY),
                _ => {}
            }
            names.remove(from);
            names.insert(to.into(), moved);
        }
        (5, Some(Node::Dir(true))) => return Err(Errno::NOTEMPTY),
        (5, Some(Node::File(_))) => return Err(Errno::NOTDIR),
        (6, Some(Node::Dir(_))) => return Err(Errno::ISDIR),
        (5 | 6, Some(_)) => drop(names.remove(from)),
        (_, Some(Node::File(_))) => return Err(Errno::NOTDIR),
        (_, Some(Node::Dir(filled))) => {
            let fills = operation == 7;
            if fills == filled {
                return Err(if fills { Errno::EXIST } else { Errno::NOENT });
            }
            names.insert(from.into(), Node::Dir(fills));
        }
    }
    Ok(())
}

/// An operation on names of all threads.
fn storm_shared(root: &Path, names: (&str, &str), operation: u8, token: &str, shared: &Shared, context: &str) {
    let (from, to) = (root.join(names.0), root.join(names.1));
    let (done, count, refused): (_, _, &[Errno]) = match operation {
        0 => (create(&from, token), Some(&shared.made[0]), &[Errno::EXIST]),
        1 => (fs::create_dir(&from), Some(&shared.made[1]), &[Errno::EXIST]),
        2 => (fs::remove_file(&from), Some(&shared.removed[0]), &[Errno::NOENT, Errno::ISDIR]),
        3 => (fs::remove_dir(&from), Some(&shared.removed[1]), &[Errno::NOENT, Errno::NOTDIR]),
        _ => {
            let done = renameat_with(CWD, &from, CWD, &to, RenameFlags::NOREPLACE).map_err(Into::into);
            let crosses = names.0.split('/').next() != names.1.split('/').next();
            (done, None, &[Errno::NOENT, Errno::EXIST, Errno::XDEV][..2 + usize::from(crosses)])
        }
    };
    if let Err(why) = done {
        let why = Errno::from_io_error(&why).unwrap();
        assert!(refused.contains(&why), "{context}: {operation} on {names:?}: {why}");
    } else if let Some(count) = count {
        count.fetch_add(1, Ordering::SeqCst);
    }
}

fn seen(root: &Path, name: &str) -> Option<Node> {
    let path = root.join(name);
    let meta = match fs::symlink_metadata(&path) {
        Ok(meta) => meta,
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => return None,
        Err(why) => panic!("{}: {why}", path.display()),
    };
    if meta.is_dir() {
        let below = names(&path);
        assert!(below.iter().all(|name| name == "below"), "{}: {below:?}", path.display());
        return Some(Node::Dir(!below.is_empty()));
    }
    let content = fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    assert_eq!(content.len() as u64, meta.len(), "{}", path.display());
    Some(Node::File(content))
}

/// Both directories as they are listed. Each name is what the list says.
fn tree(root: &Path) -> Names {
    let mut found = Names::new();
    for dir in DIRS {
        for entry in fs::read_dir(root.join(dir)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{dir}/{}", entry.file_name().into_string().unwrap());
            let meta = fs::symlink_metadata(entry.path()).unwrap_or_else(|why| panic!("{name} is listed: {why}"));
            assert_eq!((entry.file_type().unwrap(), entry.ino()), (meta.file_type(), meta.ino()), "{name}");
            let node = seen(root, &name).unwrap();
            assert!(found.insert(name.clone(), node).is_none(), "{name} is listed twice");
        }
    }
    found
}

const FILES: usize = 20;
const RUNS: usize = 3;

/// Pool `a` is mounted at two nodes. Pool `b` and the plain client are runs that come and go.
#[test]
fn two_pools_and_a_plain_run_lose_nothing() {
    let Some(scene) = Scene::new("pool-two-pools") else { return };
    let base = scene.tmpfs("pool", 600);
    let clients = [("a0", Some("a")), ("a1", Some("a")), ("b0", Some("b")), ("b1", Some("b")), ("plain", None)];
    for dir in clients.map(|(who, _)| format!("own-{who}")).into_iter().chain(["common".into()]) {
        fs::create_dir_all(base.join("store").join(dir)).unwrap();
    }
    for (who, pool) in &clients[..2] {
        let output = client(&scene, &base, "mount", who, *pool).arg(base.join(format!("over-{who}"))).output().unwrap();
        assert!(output.status.success(), "{who}: {output:?}");
    }
    std::thread::scope(|scope| {
        for (who, pool) in clients {
            let (scene, base) = (&scene, &base);
            scope.spawn(move || (0..RUNS).for_each(|run| work(scene, base, who, pool, run)));
        }
    });
    for (who, _) in clients[..2].iter().rev() {
        let over = base.join(format!("over-{who}"));
        let mut command = scene.surgetank(&["umount", "--timeout", "60s", "--state"]);
        let output = command.arg(base.join(format!("state-{who}"))).arg(&over).output().unwrap();
        assert!(output.status.success(), "{who}: {output:?}");
        eprintln!("umount of {who}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let mut expected = BTreeSet::new();
    for (who, _) in clients {
        for (run, number) in (0..RUNS).flat_map(|run| (0..FILES).map(move |number| (run, number))) {
            for path in [format!("own-{who}/{run}-{number}"), format!("common/{who}-{run}-{number}")] {
                let content = fs::read_to_string(base.join("store").join(&path));
                let content = content.unwrap_or_else(|why| panic!("{path}: {why}"));
                assert!(content == content_of(who, run, number), "{path}: {} bytes", content.len());
                expected.insert(PathBuf::from(path));
            }
        }
    }
    // (So neither a temporary nor a conflict is left.)
    assert_eq!(files_below(&base.join("store")).into_keys().collect::<BTreeSet<_>>(), expected);
}

/// A verb of a client: of a node in a pool, or without one. The drain is slow, so that temporaries are in use for longer.
fn client(scene: &Scene, base: &Path, verb: &str, who: &str, pool: Option<&str>) -> Command {
    let mut command = scene.surgetank(&[verb, "--store-ttl", "100ms", "--drain-bytes-per-second-max", "4MiB"]);
    let [over, tier, state] = ["over", "tier", "state"].map(|what| base.join(format!("{what}-{who}")));
    fs::create_dir_all(&over).unwrap();
    fs::create_dir_all(&tier).unwrap();
    command.arg("--store").arg(base.join("store")).arg("--state").arg(state);
    command.arg("--tier").arg(format!("fast={}:64MiB", tier.display()));
    if let Some(pool) = pool {
        command.args(["--pool", pool, "--pool-host", "127.0.0.1", "--pool-secret"]);
        command.arg(base.join(format!("secret-{pool}")));
    }
    command
}

fn work(scene: &Scene, base: &Path, who: &str, pool: Option<&str>, run: usize) {
    let over = base.join(format!("over-{who}"));
    let script = format!(
        "n=0; while [ $n -lt {FILES} ]; do lines=300; if [ $((n % 10)) = 0 ]; then lines=100000; fi; \
         (echo {who} {run} $n; seq $lines) > own-{who}/{run}-$n; cp own-{who}/{run}-$n common/new-{who}; \
         mv common/new-{who} common/{who}-{run}-$n; n=$((n+1)); done"
    );
    let mut command = match pool {
        Some("a") => scene.command("sh"),
        _ => client(scene, base, "run", who, pool),
    };
    if pool != Some("a") {
        command.arg("--over").arg(&over).args(["--no-progress", "--", "sh"]);
    }
    command.args(["-euc", &script]).current_dir(&over);
    let ended = Running::of(command).ends();
    eprintln!("{who}, run {run}: {}", ended.stderr.trim());
    ended.exits(0);
}

fn content_of(who: &str, run: usize, number: usize) -> String {
    let lines: String =
        (1..=if number.is_multiple_of(10) { 100_000 } else { 300 }).map(|line| format!("{line}\n")).collect();
    format!("{who} {run} {number}\n{lines}")
}

const VERSIONS: usize = 300;
const WRITER: usize = 1;
const READERS: [usize; 3] = [0, 2, 3];
const RECORD: usize = 8;
const RECORDS: usize = (10 << 10) / RECORD;

/// One directory is a reader's, the other one the writer's.
#[test]
fn rename_writes_are_seen_whole() {
    let Some(mut pool) = Pool::start("current", 0) else { return };
    let dirs = [(0, "theirs"), (WRITER, "own")];
    for (_, dir) in dirs {
        fs::create_dir(pool.store().join(dir)).unwrap();
    }
    (0..4).for_each(|_| pool.mount_one(&[]));
    for (owner, dir) in dirs {
        fs::write(pool.member(owner).join(dir).join("current"), version(0)).unwrap();
        let done = AtomicUsize::new(0);
        let reads: [AtomicUsize; 3] = Default::default();
        std::thread::scope(|scope| {
            let start = |(reader, reads)| {
                let (current, done) = (pool.member(READERS[reader]).join(dir).join("current"), &done);
                scope.spawn(move || read_versions(&current, done, reads))
            };
            let readers: Vec<_> = reads.iter().enumerate().map(start).collect();
            let _ends = AtEnd(|| done.store(VERSIONS, Ordering::SeqCst));
            let dir = pool.member(WRITER).join(dir);
            for number in 1..=VERSIONS {
                fs::write(dir.join("current.tmp"), version(number)).unwrap();
                fs::rename(dir.join("current.tmp"), dir.join("current")).unwrap();
                done.store(number, Ordering::SeqCst);
                if number % 10 == 0 {
                    let before = reads.each_ref().map(|reads| reads.load(Ordering::SeqCst));
                    let more = || reads.iter().zip(before).all(|(reads, before)| reads.load(Ordering::SeqCst) > before);
                    let more = || more() || readers.iter().any(|reader| reader.is_finished());
                    eventually("each reader reads", more);
                }
            }
        });
        eprintln!("{dir}: {reads:?} reads");
    }
    pool.end();
    for (_, dir) in dirs {
        assert!(fs::read(pool.store().join(dir).join("current")).unwrap() == version(VERSIONS));
    }
}

fn version(number: usize) -> Vec<u8> {
    format!("{number:07}\n").repeat(RECORDS).into_bytes()
}

/// No version is older than the last one that was complete before the read, or than one that was seen.
/// (A file is replaced between the look-up and the open of another member, too.)
fn read_versions(current: &Path, done: &AtomicUsize, reads: &AtomicUsize) {
    let mut last = 0;
    while last < VERSIONS {
        let complete = done.load(Ordering::SeqCst);
        let mut content = Vec::new();
        let read = File::open(current).and_then(|mut file| file.read_to_end(&mut content));
        read.unwrap_or_else(|why| panic!("after version {last}: {why}"));
        let number = content.get(..RECORD - 1).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        let number: usize = number.unwrap_or_else(|| panic!("after version {last}: {} bytes", content.len()));
        assert!(content == version(number), "version {number} is not whole: {} bytes", content.len());
        assert!(number >= last.max(complete), "version {number} after {last} and {complete}");
        last = number;
        reads.fetch_add(1, Ordering::SeqCst);
    }
}
