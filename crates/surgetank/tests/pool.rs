//! Members of a pool on one machine: each has its own mount, tier and state, and all have one store.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use serde_json::Value;

use crate::pool_network::Network;
use crate::scene::{Scene, eventually};

/// Mounts that `surgetank mount --pool` made.
pub struct Pool {
    scene: Scene,
    base: PathBuf,
    members: Vec<PathBuf>,
    /// So long members believe the store.
    pub store_ttl: &'static str,
    /// Each node has mounted the store elsewhere: at [`Self::store_of`].
    pub has_own_stores: bool,
    /// The URL of the store on a server, and what its driver needs in the environment.
    server: Option<(String, Vec<(&'static str, &'static str)>)>,
    tier: &'static str,
    /// Each node has its own addresses.
    network: Option<Network>,
}

impl Pool {
    /// `None` where tests may not mount. One pool a test, named after it.
    pub fn start(name: &str, members: usize) -> Option<Self> {
        Self::with_tiers(name, members, (600, "64MiB"))
    }

    /// The same, with tiers so large that directories are delegated.
    pub fn ample(name: &str, members: usize) -> Option<Self> {
        Self::with_tiers(name, members, (30_000, "8192MiB"))
    }

    /// The size of the memory for all, in MiB, and of each member's tier.
    fn with_tiers(name: &str, members: usize, (all_mib, tier): (u64, &'static str)) -> Option<Self> {
        let scene = Scene::new(&format!("pool-{name}"))?;
        scene.tmpfs("pool", all_mib);
        let mut pool = Self {
            scene,
            base: PathBuf::from("/mnt/pool"),
            members: Vec::new(),
            tier,
            store_ttl: "100ms",
            has_own_stores: false,
            server: None,
            network: None,
        };
        pool.mount(members);
        Some(pool)
    }

    /// The store is on a server, which runs already.
    pub fn on_server(name: &str, url: &str, environment: &[(&'static str, &'static str)]) -> Option<Self> {
        let mut pool = Self::start(name, 0)?;
        pool.server = Some((url.to_owned(), environment.to_vec()));
        Some(pool)
    }

    /// So many nodes may have members, each with an address of its own.
    pub fn on_network(name: &str, nodes: usize) -> Option<Self> {
        let mut pool = Self::start(name, 0)?;
        pool.network = Some(Network::new(nodes));
        Some(pool)
    }

    pub fn network(&self) -> &Network {
        self.network.as_ref().unwrap()
    }

    /// More pools in the same scene, one after the other: the store of each has this name.
    pub fn again(&mut self, store: &str, members: usize) {
        assert!(self.members.is_empty(), "the last pool has not ended");
        self.base = Path::new("/mnt/pool").join(store);
        self.mount(members);
    }

    fn mount(&mut self, members: usize) {
        fs::create_dir_all(self.store()).unwrap();
        for _ in 0..members {
            self.mount_one(&[]);
        }
    }

    /// One more member, with more options.
    pub fn mount_one(&mut self, more: &[&str]) {
        self.mount_with(more, None);
    }

    /// One more member. `crash`: where its agent is killed.
    pub fn mount_with(&mut self, more: &[&str], crash: Option<&str>) {
        let number = self.members.len();
        let (over, tier) = (self.base.join(format!("node{number}")), self.base.join(format!("tier{number}")));
        fs::create_dir_all(&over).unwrap();
        fs::create_dir_all(&tier).unwrap();
        let mut command = self.command("mount", number, more);
        let mounted = command.arg(&over).envs(crash.map(|crash| ("SURGETANK_CRASH", crash))).output().unwrap();
        assert!(mounted.status.success(), "member {number}: {mounted:?}");
        self.members.push(over);
    }

    /// So many members that start at the same moment.
    pub fn mount_at_once(&mut self, members: usize) {
        let mount = |number: usize| {
            let over = self.over(number);
            let mut command = self.command("mount", number, &[]);
            (command.arg(&over).spawn().unwrap(), over)
        };
        let begun: Vec<_> = (0..members).map(mount).collect();
        for (child, over) in begun {
            let mounted = child.wait_with_output().unwrap();
            assert!(mounted.status.success(), "{}: {mounted:?}", over.display());
            self.members.push(over);
        }
    }

    /// The node of the member that came last is gone: nothing of it ends in order.
    pub fn lose(&mut self, number: usize) {
        assert_eq!(number + 1, self.members.len(), "only the last member can be lost");
        self.kill(number);
        self.members.pop();
    }

    /// The member's node is gone, and still counted.
    pub fn kill(&self, number: usize) {
        let agent = self.agent(number);
        let parent = parent_of(agent.as_raw_nonzero().get()).unwrap();
        let supervisor = rustix::process::Pid::from_raw(parent).unwrap();
        // (Stopped first, so that no agent is replaced.)
        rustix::process::kill_process(supervisor, Signal::STOP).unwrap();
        let all: Vec<_> = self.processes(number).into_iter().chain([supervisor]).collect();
        for pid in &all {
            // (One may have ended with another.)
            let _ = rustix::process::kill_process(*pid, Signal::KILL);
        }
        // (Until then they accept connections.)
        eventually("the member's processes end", || all.iter().all(|pid| has_ended(*pid)));
        rustix::mount::unmount(self.member(number), rustix::mount::UnmountFlags::DETACH).unwrap();
    }

    /// The same, with its tier and its state: the machine is gone.
    pub fn lose_machine(&mut self, number: usize) {
        self.lose(number);
        for gone in [self.base.join(format!("tier{number}")), self.state(number)] {
            fs::remove_dir_all(gone).unwrap();
        }
    }

    /// Stops the member's agent, its pool's process and the supervisor. Returns what is to be continued.
    pub fn stop(&self, number: usize) -> Vec<rustix::process::Pid> {
        let parent = parent_of(self.agent(number).as_raw_nonzero().get()).and_then(rustix::process::Pid::from_raw);
        let mut stopped: Vec<_> = parent.into_iter().collect();
        stopped.extend(self.processes(number));
        stopped.iter().for_each(|pid| rustix::process::kill_process(*pid, Signal::STOP).unwrap());
        stopped
    }

    /// The member is cut off from all others, and not from the store: its pool's process is stopped.
    pub fn cut(&self, number: usize) {
        let agent = self.agent(number);
        for process in self.processes(number).into_iter().filter(|pid| *pid != agent) {
            rustix::process::kill_process(process, Signal::STOP).unwrap();
        }
    }

    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The member's agent and its pool's process.
    fn processes(&self, number: usize) -> Vec<rustix::process::Pid> {
        let supervisor = parent_of(self.agent(number).as_raw_nonzero().get());
        let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|one| one.file_name().to_str()?.parse().ok());
        pids.filter(|pid| parent_of(*pid) == supervisor).filter_map(rustix::process::Pid::from_raw).collect()
    }

    /// A verb with the options by which the member joins.
    pub fn command(&self, verb: &str, number: usize, more: &[&str]) -> Command {
        let host = self.network.as_ref().map_or("127.0.0.1".to_owned(), |_| Network::host(number));
        let mut command = self.without_pool(verb, number, &["--pool", "test", "--pool-host", &host]);
        command.arg("--pool-secret").arg(self.base.join("secret")).args(more);
        command
    }

    /// A verb with the member's directories, which this call makes. No option names a pool.
    pub fn without_pool(&self, verb: &str, number: usize, more: &[&str]) -> Command {
        let tier = self.base.join(format!("tier{number}"));
        fs::create_dir_all(self.over(number)).unwrap();
        fs::create_dir_all(&tier).unwrap();
        let mut command = match &self.network {
            None => self.scene.command("/mnt/surgetank"),
            Some(network) => {
                let mut command = self.scene.command("nsenter");
                command.args(["--net", "--target", &network.process(number).to_string(), "/mnt/surgetank"]);
                command
            }
        };
        let tier = format!("fast={}:{}", tier.display(), self.tier);
        command.args([verb, "--store-ttl", self.store_ttl, "--tier", &tier]);
        match &self.server {
            None => command.arg("--store").arg(self.store_of(number)),
            Some((url, environment)) => command.arg("--store").arg(url).envs(environment.iter().copied()),
        };
        command.arg("--state").arg(self.state(number)).args(more);
        command
    }

    /// The directory of a member, also of one that is not mounted.
    pub fn over(&self, number: usize) -> PathBuf {
        self.base.join(format!("node{number}"))
    }

    /// This member has left by itself.
    pub fn has_left(&mut self, number: usize) {
        assert_eq!(number + 1, self.members.len(), "only the last member can leave");
        self.members.pop();
    }

    /// All members have left by themselves.
    pub fn have_left(&mut self) {
        self.members.clear();
    }

    /// The directory of a member, from 0.
    pub fn member(&self, number: usize) -> &Path {
        &self.members[number]
    }

    pub fn count(&self) -> usize {
        self.members.len()
    }

    pub fn store(&self) -> PathBuf {
        self.base.join("store")
    }

    /// Where the member's node has the store.
    pub fn store_of(&self, number: usize) -> PathBuf {
        if self.has_own_stores { self.base.join(format!("store{number}")) } else { self.store() }
    }

    fn state(&self, number: usize) -> PathBuf {
        self.base.join(format!("state{number}"))
    }

    /// The process that serves the member now.
    pub fn agent(&self, number: usize) -> rustix::process::Pid {
        let place = fs::read_dir(self.state(number)).unwrap().flatten().map(|entry| entry.path().join("agent.json"));
        let card = place.into_iter().find(|card| card.exists()).unwrap();
        let card: Value = serde_json::from_slice(&fs::read(card).unwrap()).unwrap();
        rustix::process::Pid::from_raw(card["pid"].as_i64().unwrap() as i32).unwrap()
    }

    /// A verb with words, about the first member.
    pub fn command_of(&self, verb: &str, words: &[&str]) -> Command {
        self.command_at(0, verb, words)
    }

    /// A verb with words, about this member.
    pub fn command_at(&self, number: usize, verb: &str, words: &[&str]) -> Command {
        let mut command = self.scene.command("/mnt/surgetank");
        command.arg(verb).args(words).arg("--state").arg(self.state(number));
        command
    }

    /// As all members answer.
    pub fn status(&self, number: usize) -> Value {
        self.asked(number, "status")
    }

    /// `members`: as this member knows it, without a message to another one.
    pub fn asked(&self, number: usize, what: &str) -> Value {
        let mut command = self.command_at(number, "pool", &[what, "--json"]);
        let output = command.arg(self.member(number)).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Everything reaches the store. The last member leaves first.
    pub fn end(&mut self) {
        while !self.members.is_empty() {
            self.end_last();
        }
    }

    /// A member with this number is mounted again, as a new one. It was killed.
    pub fn mount_again(&self, number: usize, more: &[&str]) {
        let mounted = self.command("mount", number, more).arg(self.over(number)).output().unwrap();
        assert!(mounted.status.success(), "member {number}: {mounted:?}");
    }

    /// No member is counted any more: each has ended.
    pub fn have_ended(&mut self) {
        self.members.clear();
    }

    /// One member leaves. Returns how it ended.
    pub fn try_end(&self, number: usize, timeout: &str) -> std::process::Output {
        let mut command = self.command_at(number, "umount", &["--timeout", timeout]);
        command.arg(self.over(number)).output().unwrap()
    }

    /// Its tier and its state are gone.
    pub fn wipe(&self, number: usize) {
        for dir in [self.state(number), self.base.join(format!("tier{number}"))] {
            fs::remove_dir_all(dir).unwrap();
        }
    }

    /// The member that came last leaves.
    pub fn end_last(&mut self) {
        let output = self.try_end_last();
        assert!(output.status.success(), "{}: {output:?}", self.over(self.members.len()).display());
    }

    /// The same. Returns how it ended.
    pub fn try_end_last(&mut self) -> std::process::Output {
        let over = self.members.pop().unwrap();
        let mut command = self.scene.command("/mnt/surgetank");
        command.args(["umount", "--timeout", "60s", "--state"]).arg(self.state(self.members.len())).arg(&over);
        command.output().unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for number in 0..self.members.len() {
                for place in fs::read_dir(self.state(number)).into_iter().flatten().flatten() {
                    let log = fs::read_to_string(place.path().join("agent.log")).unwrap_or_default();
                    let lines = log.lines().filter(|line| !line.contains(" INFO ") || line.contains("lost"));
                    lines.for_each(|line| eprintln!("member {number}: {line}"));
                }
            }
        }
    }
}

#[test]
fn what_one_member_writes_another_one_reads_at_once() {
    let Some(mut pool) = Pool::start("reads", 2) else { return };
    let (here, there) = (pool.member(0).to_owned(), pool.member(1).to_owned());
    assert!(!there.join("a").exists());
    fs::write(here.join("a"), "one").unwrap();
    assert_eq!(fs::read_to_string(there.join("a")).unwrap(), "one");
    let mut reads = File::open(there.join("a")).unwrap();
    // The second member appends, and writes where the first one has the file open.
    let mut appends = OpenOptions::new().append(true).open(there.join("a")).unwrap();
    appends.write_all(b" two").unwrap();
    let writes = OpenOptions::new().write(true).open(here.join("a")).unwrap();
    writes.write_all_at(b"ONE", 0).unwrap();
    let mut text = String::new();
    reads.read_to_string(&mut text).unwrap();
    assert_eq!(text, "ONE two");
    // Removed here, and still open there.
    fs::remove_file(here.join("a")).unwrap();
    assert_eq!(fs::metadata(there.join("a")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    appends.write_all(b" three").unwrap();
    assert_eq!(reads.metadata().unwrap().len(), 13);
    drop((reads, appends, writes));
    let status = pool.status(1);
    assert_eq!(
        (status["members"].as_array().unwrap().len(), &status["claims"][0]["directory"]),
        (2, &Value::from("/"))
    );
    assert_eq!((&status["claims"][0]["owner"], &status["member"]), (&Value::from(1), &Value::from(2)));
    pool.end();
    assert_eq!(names(&pool.store()), BTreeSet::new());
}

#[test]
fn own_directories_cost_no_message() {
    let Some(mut pool) = Pool::start("messages", 2) else { return };
    fs::create_dir(pool.member(0).join("own")).unwrap();
    let sent = |pool: &Pool| -> u64 {
        let members = pool.asked(0, "members")["members"].clone();
        members.as_array().unwrap().iter().map(|one| one["sent_bytes"].as_u64().unwrap()).sum()
    };
    // (Renewals of leases are messages, too: a try without one in between suffices.)
    eventually("operations without a message", || {
        let before = sent(&pool);
        for number in 0..200 {
            let path = pool.member(0).join(format!("own/{number}"));
            fs::write(&path, "content").unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"content");
            fs::remove_file(&path).unwrap();
        }
        sent(&pool) == before
    });
    pool.end();
}

#[test]
fn locks_hold_across_members() {
    let Some(mut pool) = Pool::start("locks", 2) else { return };
    fs::write(pool.member(0).join("lock"), "").unwrap();
    let open =
        |member: usize| OpenOptions::new().read(true).write(true).open(pool.member(member).join("lock")).unwrap();
    let (here, there) = (open(0), open(1));
    flock(&here, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(flock(&there, FlockOperation::NonBlockingLockExclusive), Err(rustix::io::Errno::AGAIN));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| flock(&there, FlockOperation::LockExclusive));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waits.is_finished());
        flock(&here, FlockOperation::Unlock).unwrap();
        waits.join().unwrap().unwrap();
    });
    assert_eq!(flock(&here, FlockOperation::NonBlockingLockShared), Err(rustix::io::Errno::AGAIN));
    drop(there);
    eventually("the lock ends with its file", || flock(&here, FlockOperation::NonBlockingLockShared).is_ok());
    drop(here);
    pool.end();
}

/// The owner's agent is killed again and again between effect and reply. Each name is made once, and its maker knows it.
#[test]
fn exclusive_creation_has_one_winner_while_the_owners_agent_is_killed() {
    let Some(mut pool) = Pool::start("kills", 3) else { return };
    fs::create_dir(pool.member(0).join("d")).unwrap();
    const NAMES: usize = 300;
    let makes = |member: usize| {
        let dir = pool.member(member).join("d");
        move || -> BTreeSet<usize> {
            let mut made = BTreeSet::new();
            for number in 0..NAMES {
                let path = dir.join(number.to_string());
                match OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path) {
                    Ok(mut file) => {
                        file.write_all(format!("{number} by {member}").as_bytes()).unwrap();
                        made.insert(number);
                    }
                    Err(why) => assert_eq!(why.kind(), std::io::ErrorKind::AlreadyExists, "{number}: {why}"),
                }
            }
            made
        }
    };
    let (mut kills, mut made) = (0, Vec::new());
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..3).map(|member| scope.spawn(makes(member))).collect();
        while makers.iter().any(|maker| !maker.is_finished()) {
            std::thread::sleep(Duration::from_millis(60));
            // (The one that is killed may just be replaced.)
            if rustix::process::kill_process(pool.agent(0), Signal::KILL).is_ok() {
                kills += 1;
            }
        }
        made = makers.into_iter().map(|maker| maker.join().unwrap()).collect();
    });
    assert!(kills > 0, "no agent was killed");
    let all: BTreeSet<usize> = made.iter().flatten().copied().collect();
    assert_eq!(made.iter().map(BTreeSet::len).sum::<usize>(), NAMES, "a name has two makers, or none");
    assert_eq!(all.len(), NAMES);
    pool.end();
    for (member, numbers) in made.iter().enumerate() {
        for number in numbers {
            let content = fs::read_to_string(pool.store().join("d").join(number.to_string())).unwrap();
            assert_eq!(content, format!("{number} by {member}"));
        }
    }
    eprintln!("{kills} kills; {:?} names each", made.iter().map(BTreeSet::len).collect::<Vec<_>>());
}

/// Schedulers send it to every process of the job.
#[test]
fn stop_signal_does_not_end_the_membership_before_the_drain() {
    let Some(mut pool) = Pool::start("stop", 2) else { return };
    fs::write(pool.member(0).join("a"), "content").unwrap();
    let is_the_pools = |pid: &rustix::process::Pid| {
        let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
        name == "surgetank-pool\n"
    };
    let found: Vec<_> = pool.processes(0).into_iter().filter(is_the_pools).collect();
    let [process] = found[..] else { panic!("the pool's processes of the member: {found:?}") };
    rustix::process::kill_process(process, Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(fs::read_to_string(pool.member(1).join("a")).unwrap(), "content");
    pool.end();
}

pub fn parent_of(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// A run on a member, by a shell, in the directory.
pub fn run(pool: &Pool, number: usize, script: &str) -> std::process::Child {
    run_with(pool, number, &[], script)
}

/// The same, with more options.
pub fn run_with(pool: &Pool, number: usize, more: &[&str], script: &str) -> std::process::Child {
    let over = pool.base.join(format!("node{number}"));
    fs::create_dir_all(&over).unwrap();
    fs::create_dir_all(pool.base.join(format!("tier{number}"))).unwrap();
    let mut command = pool.command("run", number, &["--quiet", "--over"]);
    command.arg(&over).args(more).args(["--", "sh", "-euc", script]).current_dir(&over);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn runs_of_two_nodes_share_a_directory_and_both_drain() {
    let Some(pool) = Pool::start("runs", 0) else { return };
    let waits = "until [ -e $1 ]; do sleep 0.01; done";
    let first = run(&pool, 0, &format!("mkdir d; echo one > d/one; set -- d/two; {waits}; cat d/two > d/three"));
    let second = run(&pool, 1, &format!("set -- d/one; {waits}; cat d/one; echo two > d/new; mv d/new d/two"));
    let (first, second) = (first.wait_with_output().unwrap(), second.wait_with_output().unwrap());
    assert!(first.status.success(), "{first:?}");
    assert!(second.status.success() && second.stdout == b"one\n", "{second:?}");
    let read = |name: &str| fs::read_to_string(pool.store().join("d").join(name)).unwrap();
    assert_eq!((read("one"), read("two"), read("three")), ("one\n".into(), "two\n".into(), "two\n".into()));
    assert_eq!(names(&pool.store()), BTreeSet::from(["d".to_owned()]), "a file by which members find each other stays");
}

#[test]
fn member_with_another_secret_is_refused() {
    let Some(mut pool) = Pool::start("secret", 1) else { return };
    let other = pool.base.join("other");
    fs::write(&other, "f".repeat(64)).unwrap();
    fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::create_dir_all(pool.base.join("node1")).unwrap();
    fs::create_dir_all(pool.base.join("tier1")).unwrap();
    let mut command = pool.command("mount", 1, &[]);
    let refused = command.arg("--pool-secret").arg(&other).arg(pool.base.join("node1")).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "given twice: {said}");
    fs::copy(&other, pool.base.join("secret")).unwrap();
    let refused = pool.command("mount", 1, &[]).arg(pool.base.join("node1")).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("secret"), "{said}");
    assert_eq!(fs::metadata(pool.base.join("secret")).unwrap().mode() & 0o777, 0o600);
    pool.end();
}

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Is the process gone, or a zombie, which has no descriptors?
fn has_ended(pid: rustix::process::Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}
