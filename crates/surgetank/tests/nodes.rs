//! Members of a pool on several nodes: each has a network namespace, with an address and a link of 1 Gbit/s to a
//! bridge. Links are cut, and nodes are stopped.
//!
//! The names of the namespaces are in the mount namespace of the scene. So they, the links and the bridge vanish with
//! the test's thread and the scene's processes, also when the test process is killed.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde_json::Value;

use crate::scene::{Running, Scene, eventually};

/// The shortest that the program takes.
const LEASE: Duration = Duration::from_secs(6);
const SWITCH: &str = "sgtk-switch";
const NAMES: &str = "/run/netns";

pub struct Nodes {
    scene: Scene,
    base: PathBuf,
    over: Vec<PathBuf>,
    lease: Duration,
}

impl Nodes {
    /// `None` where tests may not mount. One pool a test, named after it. Each node has a directory in the store:
    /// `own0`, `own1` and so on.
    fn start(name: &str, count: usize) -> Option<Self> {
        Self::start_with(name, count, LEASE)
    }

    pub fn start_with(name: &str, count: usize, lease: Duration) -> Option<Self> {
        let scene = Scene::new(&format!("nodes-{name}"))?;
        let base = scene.tmpfs("pool", 400);
        fs::create_dir_all(NAMES).unwrap();
        succeed("mount -t tmpfs -o size=1m,mode=0755 tmpfs", &[NAMES]);
        succeed("ip netns add", &[SWITCH]);
        succeed("ip -n", &[SWITCH, "link", "add", "bridge", "type", "bridge"]);
        succeed("ip -n", &[SWITCH, "link", "set", "bridge", "up"]);
        fs::create_dir(base.join("store")).unwrap();
        let mut nodes = Self { scene, base, over: Vec::new(), lease };
        for number in 0..count {
            fs::create_dir(nodes.store().join(format!("own{number}"))).unwrap();
        }
        for number in 0..count {
            nodes.connect(number);
            nodes.join(number);
        }
        Some(nodes)
    }

    fn connect(&self, number: usize) {
        const LIMITED: &str = "root tbf rate 1gbit burst 1mb latency 50ms";
        let (name, port) = (namespace(number), port(number));
        succeed("ip netns add", &[&name]);
        succeed("ip link add eth0 netns", &[&name, "type", "veth", "peer", "name", &port, "netns", SWITCH]);
        succeed("ip -n", &[SWITCH, "link", "set", &port, "master", "bridge", "up"]);
        succeed("ip -n", &[&name, "address", "add", &format!("{}/24", address(number)), "dev", "eth0"]);
        succeed("ip -n", &[&name, "link", "set", "eth0", "up"]);
        succeed("ip -n", &[&name, "link", "set", "lo", "up"]);
        for (space, link) in [(name.as_str(), "eth0"), (SWITCH, port.as_str())] {
            let words = ["-n", space, "qdisc", "add", "dev", link].into_iter().chain(LIMITED.split(' '));
            succeed("tc", &words.collect::<Vec<_>>());
        }
    }

    fn join(&mut self, number: usize) {
        let (over, tier) = (self.base.join(format!("node{number}")), self.base.join(format!("tier{number}")));
        fs::create_dir_all(&over).unwrap();
        fs::create_dir_all(&tier).unwrap();
        let mut command = self.surgetank(number, &["mount", "--pool", "test", "--store-ttl", "100ms"]);
        command.arg("--pool-host").arg(address(number)).arg("--pool-lease").arg(format!("{}s", self.lease.as_secs()));
        command.arg("--pool-secret").arg(self.base.join("secret")).arg("--store").arg(self.store());
        command.arg("--tier").arg(format!("fast={}:64MiB", tier.display())).arg(&over);
        let mounted = command.output().unwrap();
        assert!(mounted.status.success(), "node {number}: {mounted:?}");
        self.over.push(over);
    }

    /// The program, on the network of a node.
    fn surgetank(&self, number: usize, words: &[&str]) -> Command {
        let network = File::open(Path::new(NAMES).join(namespace(number))).unwrap();
        let mut command = self.scene.surgetank(words);
        command.arg("--state").arg(self.state(number));
        let enter = move || {
            // SAFETY: a system call with a descriptor that the closure keeps open.
            match unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: `setns` is a plain system call.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// A program that works on a path of a node. It does not start in the mount: that would wait already.
    pub fn program(&self, number: usize, script: &str, path: &str) -> Running {
        let mut command = self.scene.command("sh");
        command.args(["-euc", script, "sh"]).arg(self.on(number).join(path));
        Running::of(command)
    }

    pub fn on(&self, number: usize) -> &Path {
        &self.over[number]
    }

    pub fn store(&self) -> PathBuf {
        self.base.join("store")
    }

    fn state(&self, number: usize) -> PathBuf {
        self.base.join(format!("state{number}"))
    }

    fn link(&self, number: usize, state: &str) {
        succeed("ip -n", &[SWITCH, "link", "set", &port(number), state]);
    }

    /// Every process on the network of a node: those of the member.
    fn processes(&self, number: usize) -> Vec<Pid> {
        let network = fs::metadata(Path::new(NAMES).join(namespace(number))).unwrap().ino();
        let is_there = |pid: &i32| fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|one| one.ino() == network);
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_there);
        pids.filter_map(Pid::from_raw).collect()
    }

    /// Stops every process of a member until this command of the shell ends. A process of its own does so: if the test is
    /// killed meanwhile, its thread waits for the stopped mount, and keeps the scene's name until then.
    pub fn stopped(&self, number: usize, until: &str) -> Running {
        let pids: Vec<String> = self.processes(number).iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
        assert!(pids.len() >= 2, "{pids:?}: the agent and the pool's process are at least two");
        let script = format!("kill -STOP $*; echo stopped >&2; {until}; kill -CONT $*");
        let mut command = self.scene.command("sh");
        command.args(["-euc", &script, "sh"]).args(pids);
        Running::of(command)
    }

    fn status(&self, number: usize) -> Value {
        let output = self.surgetank(number, &["pool", "status", "--json"]).arg(self.on(number)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Everything reaches the store. The last member leaves first.
    pub fn end(&mut self) {
        while let Some(over) = self.over.pop() {
            let mut command = self.surgetank(self.over.len(), &["umount", "--timeout", "60s"]);
            let output = command.arg(&over).output().unwrap();
            assert!(output.status.success(), "{}: {output:?}", over.display());
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for number in 0..self.over.len() {
                for place in fs::read_dir(self.state(number)).into_iter().flatten().flatten() {
                    let log = fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
                    let lines = log.lines().filter(|line| !line.contains(" INFO "));
                    lines.for_each(|line| eprintln!("node {number}: {line}"));
                }
            }
        }
    }
}

fn namespace(number: usize) -> String {
    format!("sgtk-node{number}")
}

fn port(number: usize) -> String {
    format!("port{number}")
}

fn address(number: usize) -> String {
    format!("10.78.0.{}", number + 1)
}

/// The words of the first argument, then the others.
#[track_caller]
fn succeed(command: &str, more: &[&str]) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).args(more).output().unwrap();
    assert!(output.status.success(), "{command} {more:?}: {output:?}");
}

#[test]
fn members_on_different_hosts_share_a_directory() {
    let Some(mut nodes) = Nodes::start("share", 3) else { return };
    let (one, two, three) = (nodes.on(0).to_owned(), nodes.on(1).to_owned(), nodes.on(2).to_owned());
    fs::write(one.join("own0/a"), "one").unwrap();
    for over in [&two, &three] {
        assert_eq!(fs::read_to_string(over.join("own0/a")).unwrap(), "one");
    }
    fs::rename(three.join("own0/a"), three.join("own0/b")).unwrap();
    for over in [&one, &two, &three] {
        assert!(!over.join("own0/a").exists());
        assert_eq!(fs::read_to_string(over.join("own0/b")).unwrap(), "one");
    }
    OpenOptions::new().append(true).open(two.join("own0/b")).unwrap().write_all(b" two").unwrap();
    fs::create_dir(two.join("own0/d")).unwrap();
    fs::write(three.join("own0/d/c"), vec![3; 3 << 20]).unwrap();
    assert_eq!(fs::read_to_string(one.join("own0/b")).unwrap(), "one two");
    assert!(fs::read(two.join("own0/d/c")).unwrap() == [3; 3 << 20]);
    let members = nodes.status(2)["members"].clone();
    let hosts: BTreeSet<String> = members.as_array().unwrap().iter().map(host).collect();
    assert_eq!(hosts, (0..3).map(address).collect());
    nodes.end();
    assert_eq!(fs::read_to_string(nodes.store().join("own0/b")).unwrap(), "one two");
    assert!(fs::read(nodes.store().join("own0/d/c")).unwrap() == [3; 3 << 20]);
}

fn host(member: &Value) -> String {
    member["address"].as_str().unwrap().rsplit_once(':').unwrap().0.to_owned()
}

#[test]
fn network_cut_shorter_than_the_lease_is_only_a_wait() {
    let Some(mut nodes) = Nodes::start("wait", 2) else { return };
    const FILES: usize = 200;
    fs::write(nodes.on(0).join("own0/first"), "").unwrap();
    let written = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| {
            for number in 0..FILES {
                let path = nodes.on(1).join(format!("own0/{number}"));
                let made = OpenOptions::new().write(true).create_new(true).open(&path);
                let mut file = made.unwrap_or_else(|why| panic!("{number}: {why}"));
                file.write_all(format!("content of {number}").as_bytes()).unwrap();
                written.fetch_add(1, Ordering::SeqCst);
            }
        });
        eventually("a quarter is written", || written.load(Ordering::SeqCst) >= FILES / 4 || writes.is_finished());
        nodes.link(1, "down");
        std::thread::sleep(Duration::from_millis(500));
        let at_cut = written.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(written.load(Ordering::SeqCst), at_cut, "a file is written without the owner");
        assert!(at_cut < FILES, "all files were written before the cut");
        nodes.link(1, "up");
        let begun = Instant::now();
        writes.join().unwrap();
        eprintln!("{at_cut} files before the cut, the others within {:?} after it", begun.elapsed());
    });
    let expected: BTreeSet<String> = (0..FILES).map(|number| number.to_string()).chain(["first".into()]).collect();
    assert_eq!(names(&nodes.on(0).join("own0")), expected);
    nodes.end();
    assert_eq!(names(&nodes.store().join("own0")), expected);
    for number in 0..FILES {
        let content = fs::read_to_string(nodes.store().join(format!("own0/{number}"))).unwrap();
        assert_eq!(content, format!("content of {number}"));
    }
}

/// Its lease ends. It neither believes what it knows of the owner's directory nor what the store says.
#[test]
fn cut_off_member_gives_no_stale_data_and_obeys_signals() {
    let Some(nodes) = Nodes::start("cut", 2) else { return };
    fs::write(nodes.on(0).join("own0/a"), "old").unwrap();
    fs::write(nodes.on(1).join("own1/a"), "own").unwrap();
    assert_eq!(fs::read_to_string(nodes.on(1).join("own0/a")).unwrap(), "old");
    eventually("the store has the old content", || fs::read(nodes.store().join("own0/a")).is_ok_and(|a| a == b"old"));
    nodes.link(1, "down");
    fs::write(nodes.on(0).join("own0/a"), "new").unwrap();
    // Both programs ask within the lease and wait until after it. Another one comes after it.
    let mut waiting = vec![nodes.program(1, "cat $1", "own0/a"), nodes.program(1, "echo two > $1", "own0/b")];
    let cut = Instant::now();
    while cut.elapsed() < LEASE + Duration::from_secs(1) {
        let begun = Instant::now();
        fs::write(nodes.on(0).join("own0/goes-on"), "own work").unwrap();
        assert!(begun.elapsed() < Duration::from_secs(1), "the owner's own work waits {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(50));
    }
    waiting.push(nodes.program(1, "cat $1", "own0/a"));
    waiting.push(nodes.program(1, "ls $1", "own0"));
    std::thread::sleep(Duration::from_millis(500));
    for mut program in waiting {
        if program.has_ended() {
            // (An error is right as well, and no answer is stale.)
            let ended = program.ends();
            assert!(!ended.status.success() && ended.stderr.contains("Input/output error"), "{}", ended.stdout);
        } else {
            let begun = Instant::now();
            program.kill();
            let ended = program.ends();
            assert_eq!((ended.stdout.as_str(), ended.status.success()), ("", false));
            assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        }
    }
    assert!(!nodes.on(0).join("own0/b").exists());
    nodes.link(1, "up");
    // The registry counts the member as lost. Its programs wait, or get an error.
    let late = nodes.program(1, "cat $1", "own0/a");
    std::thread::sleep(Duration::from_secs(2));
    late.kill();
    let ended = late.ends();
    assert!(["", "new"].contains(&ended.stdout.as_str()), "{}", ended.stdout);
    assert_eq!(fs::read_to_string(nodes.on(0).join("own0/a")).unwrap(), "new");
    assert!(!nodes.on(0).join("own0/b").exists(), "a killed program's file is made late");
    eventually("the store has the new content", || fs::read(nodes.store().join("own0/a")).is_ok_and(|a| a == b"new"));
}

#[test]
fn cut_off_member_gives_an_error_after_its_lease() {
    let Some(nodes) = Nodes::start("error", 2) else { return };
    fs::write(nodes.on(0).join("own0/a"), "old").unwrap();
    assert_eq!(fs::read_to_string(nodes.on(1).join("own0/a")).unwrap(), "old");
    nodes.link(1, "down");
    let begun = Instant::now();
    let asked = [("cat $1", "own0/a"), ("ls $1", "own0"), ("echo > $1", "own0/b")];
    let waiting = asked.map(|(script, path)| (script, nodes.program(1, script, path)));
    for (script, program) in waiting {
        let ended = program.ends();
        assert!(!ended.status.success() && ended.stdout.is_empty(), "{script}: {}", ended.stdout);
        assert!(ended.stderr.contains("rror"), "{script}: {}", ended.stderr);
        eprintln!("{script} after {:?}: {}", begun.elapsed(), ended.stderr.trim());
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

#[test]
fn own_directories_go_on_while_another_member_is_stopped() {
    let Some(mut nodes) = Nodes::start("stopped", 2) else { return };
    fs::write(nodes.on(0).join("own0/a"), "0").unwrap();
    fs::write(nodes.on(1).join("own1/a"), "0").unwrap();
    assert_eq!(fs::read_to_string(nodes.on(1).join("own0/a")).unwrap(), "0");
    let stopped = nodes.stopped(1, "sleep 3");
    eventually("the member is stopped", || stopped.says("stopped"));
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    std::thread::scope(|scope| {
        // It uses the stopped mount, and goes on afterwards.
        let other = scope.spawn(|| {
            let begun = Instant::now();
            let read = fs::read_to_string(nodes.on(1).join("own0/a")).unwrap();
            fs::write(nodes.on(1).join("own1/a"), "1").unwrap();
            (begun.elapsed(), read)
        });
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(2500) {
            let round = Instant::now();
            rounds += 1;
            let path = nodes.on(0).join(format!("own0/{rounds}"));
            fs::write(&path, "content").unwrap();
            fs::rename(&path, nodes.on(0).join("own0/renamed")).unwrap();
            fs::write(nodes.on(0).join("own0/a"), rounds.to_string()).unwrap();
            assert_eq!(fs::read_to_string(nodes.on(0).join("own0/a")).unwrap(), rounds.to_string());
            longest = longest.max(round.elapsed());
        }
        let (waited, read) = other.join().unwrap();
        assert!(waited > Duration::from_secs(2), "a stopped member answers after {waited:?}");
        assert_eq!(read, rounds.to_string());
    });
    stopped.ends().exits(0);
    eprintln!("{rounds} rounds, the longest {longest:?}");
    assert!(longest < Duration::from_secs(1), "a pause of {longest:?}");
    assert_eq!(fs::read_to_string(nodes.on(0).join("own1/a")).unwrap(), "1");
    nodes.end();
    assert_eq!(fs::read_to_string(nodes.store().join("own0/a")).unwrap(), rounds.to_string());
    assert_eq!(fs::read_to_string(nodes.store().join("own1/a")).unwrap(), "1");
}

pub fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
