//! Members over real key-value servers that are killed, restarted, fail over, or are cut off from one member.
//!
//! Each member claims directories by chance, and *holds* a directory for moments in which it may serve it. Two members
//! that hold one directory at the same time are what must not be. A member whose membership ends joins again.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

#[path = "support/servers.rs"]
mod servers;

use std::io::ErrorKind;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use servers::{Etcd, Process, Proxy, Redis, await_port, free_port, is_installed};
use surgetank_pool::membership::{Host, Joining, RegistryAt};
use surgetank_pool::remote::Pool;
use surgetank_pool::remote::place::Place;
use surgetank_pool::{Authority, Directory, Membership, Secret, Times};
use surgetank_types::model::Role;

const LEASE: Duration = Duration::from_secs(4);
const TIMES: Times =
    Times { margin: Duration::from_millis(1000), renew: Duration::from_millis(800), again: Duration::from_millis(200) };
const DIRECTORIES: usize = 5;
const PATIENCE: Duration = Duration::from_secs(60);

struct Idle;

impl Host for Idle {
    fn forget(&self, _: &Directory) {}
    fn expelled(&self) {}
}

/// What all members of one test see.
#[derive(Default)]
struct Board {
    holders: [AtomicU64; DIRECTORIES],
    held: AtomicU64,
    claims: AtomicU64,
    joins: AtomicU64,
    twice: AtomicU64,
    stops: AtomicBool,
}

fn joining(secret: &Secret, url: &str, is_founder: bool) -> Joining {
    let pool = Pool { id: [7; 16], proof: [8; 32], lease: LEASE, is_founder, writes_max: 100 };
    Joining {
        secret: secret.clone(),
        pool: [7; 16],
        registry: RegistryAt::Server {
            place: Box::new(Place::parse(url).unwrap()),
            name: "flow".to_owned(),
            pool: Box::new(pool),
        },
        host: "127.0.0.1".to_owned(),
        temporaries: "key".to_owned(),
        role: Role::default(),
        resumes: None,
        times: TIMES,
        patience: PATIENCE,
    }
}

struct Scene {
    board: Arc<Board>,
    members: Vec<JoinHandle<()>>,
}

impl Scene {
    fn start(urls: &[String]) -> Self {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let board = Arc::new(Board::default());
        let secret = Secret::random().unwrap();
        let first = Membership::join(joining(&secret, &urls[0], true), Arc::new(Idle)).unwrap();
        let mut first = Some(first);
        let members = urls.iter().enumerate().map(|(number, url)| {
            let (board, secret, url, first) = (board.clone(), secret.clone(), url.clone(), first.take());
            let mut rng = fastrand::Rng::with_seed(seed.wrapping_add(number as u64));
            thread::spawn(move || {
                let mut membership = first;
                while !board.stops.load(Ordering::Acquire) {
                    let is_over = |one: &Membership| one.serves_until().is_none();
                    if membership.as_ref().is_none_or(is_over) {
                        drop(membership.take());
                        match Membership::join(joining(&secret, &url, false), Arc::new(Idle)) {
                            Ok(joined) => membership = Some(joined),
                            Err(why) => println!("member {number}: {why}"),
                        }
                        board.joins.fetch_add(1, Ordering::Relaxed);
                    } else if let Some(membership) = &membership {
                        work(&board, membership, &mut rng);
                    }
                }
            })
        });
        let members = members.collect();
        Self { board, members }
    }

    /// Waits until the members have claimed so many directories more.
    fn await_claims(&self, more: u64) {
        let from = self.board.claims.load(Ordering::Acquire);
        let until = Instant::now() + Duration::from_secs(90);
        while self.board.claims.load(Ordering::Acquire) < from + more {
            assert!(Instant::now() < until, "the members claim nothing");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn end(self) -> Arc<Board> {
        self.board.stops.store(true, Ordering::Release);
        self.members.into_iter().for_each(|member| member.join().unwrap());
        let board = self.board;
        let count = |number: &AtomicU64| number.load(Ordering::Acquire);
        println!("claims {}, holds {}, joins {}", count(&board.claims), count(&board.held), count(&board.joins));
        assert_eq!(count(&board.twice), 0, "two members held one directory");
        assert!(count(&board.held) > 100);
        board
    }
}

fn work(board: &Board, membership: &Membership, rng: &mut fastrand::Rng) {
    let number = rng.usize(..DIRECTORIES);
    let directory = Directory(format!("d{number}").into_bytes().into());
    if membership.claim(&directory, Duration::from_secs(2)).is_err() {
        thread::sleep(Duration::from_millis(20));
        return;
    }
    board.claims.fetch_add(1, Ordering::AcqRel);
    let until = Instant::now() + Duration::from_millis(rng.u64(0..200));
    while Instant::now() < until {
        if matches!(membership.authority(&directory), Some(Authority::Ours(_))) {
            let before = board.holders[number].fetch_add(1, Ordering::AcqRel);
            board.twice.fetch_add(u64::from(before > 0), Ordering::AcqRel);
            board.held.fetch_add(1, Ordering::AcqRel);
            board.holders[number].fetch_sub(1, Ordering::AcqRel);
        }
        thread::sleep(Duration::from_millis(5));
    }
    // (Some stay claimed for a while.)
    if rng.u32(0..3) > 0 {
        membership.release(&directory);
    }
}

fn three(url: &str) -> Vec<String> {
    vec![url.to_owned(); 3]
}

#[test]
fn killed_redis_with_a_log_has_one_owner_of_each() {
    if !is_installed("redis-server") {
        return;
    }
    let mut redis = Redis::lasting();
    let scene = Scene::start(&three(&format!("redis://127.0.0.1:{}", redis.port)));
    scene.await_claims(10);
    redis.kill();
    redis.again();
    scene.await_claims(10);
    let board = scene.end();
    assert_eq!(board.joins.load(Ordering::Acquire), 2, "no member is lost");
}

#[test]
fn killed_redis_without_a_log_has_one_owner_of_each() {
    if !is_installed("redis-server") {
        return;
    }
    let mut redis = Redis::start(&[]);
    let scene = Scene::start(&three(&format!("redis://127.0.0.1:{}", redis.port)));
    scene.await_claims(10);
    redis.kill();
    redis.again();
    scene.await_claims(10);
    let board = scene.end();
    assert_eq!(board.joins.load(Ordering::Acquire), 2, "no member is lost");
}

#[test]
fn member_that_is_cut_off_is_lost_and_others_go_on() {
    if !is_installed("redis-server") {
        return;
    }
    let redis = Redis::start(&[]);
    let proxy = Proxy::to(redis.port);
    let mut urls = three(&format!("redis://127.0.0.1:{}", redis.port));
    urls[2] = format!("redis://127.0.0.1:{}", proxy.port);
    let scene = Scene::start(&urls);
    scene.await_claims(10);
    proxy.cut(true);
    thread::sleep(LEASE * 2);
    scene.await_claims(10);
    proxy.cut(false);
    let until = Instant::now() + PATIENCE;
    while scene.board.joins.load(Ordering::Acquire) < 3 {
        assert!(Instant::now() < until, "the member does not come back");
        thread::sleep(Duration::from_millis(20));
    }
    scene.await_claims(10);
    scene.end();
}

#[test]
fn wrong_password_is_said_at_once() {
    if !is_installed("redis-server") {
        return;
    }
    let redis = Redis::start(&["--requirepass", "right"]);
    let secret = Secret::random().unwrap();
    let with = |password: &str| {
        let mut joining = joining(&secret, &format!("redis://127.0.0.1:{}", redis.port), true);
        let RegistryAt::Server { place, .. } = &mut joining.registry else { unreachable!() };
        place.password = password.to_owned();
        Membership::join(joining, Arc::new(Idle))
    };
    for wrong in ["", "wrong"] {
        let why = with(wrong).map(drop).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::PermissionDenied, "{why}");
        assert!(!why.to_string().contains("wrong "), "{why}");
    }
    with("right").unwrap();
}

#[test]
fn etcd_whose_leader_is_killed_has_one_owner_of_each() {
    if !is_installed("etcd") {
        return;
    }
    let mut etcd = Etcd::start(3);
    let scene = Scene::start(&three(&etcd.url()));
    scene.await_claims(10);
    for _ in 0..3 {
        let leader = etcd.leader().unwrap();
        etcd.kill_one(leader);
        scene.await_claims(5);
        etcd.start_one(leader);
        etcd.await_leader();
        scene.await_claims(5);
    }
    scene.end();
}

/// A master with two replicas, and three sentinels.
struct Sentinels {
    servers: Vec<Redis>,
    ports: Vec<u16>,
    _processes: Vec<Process>,
}

impl Sentinels {
    fn start() -> Self {
        let master = Redis::start(&[]);
        let follows = format!("{}", master.port);
        let replica = || Redis::start(&["--replicaof", "127.0.0.1", &follows, "--repl-diskless-sync-delay", "0"]);
        let servers = vec![replica(), replica()];
        let (mut ports, mut processes) = (Vec::new(), Vec::new());
        for number in 0..3 {
            let (port, dir) = (free_port(), master.directory.path());
            let path = dir.join(format!("sentinel{number}.conf"));
            let text = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {follows} 2\n\
                sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 4000\n",
                dir.display()
            );
            servers::write(&path, &text);
            processes.push(Process::start(Command::new("redis-server").arg(&path).arg("--sentinel")));
            await_port(port);
            ports.push(port);
        }
        let mut all = vec![master];
        all.extend(servers);
        let sentinels = Self { servers: all, ports, _processes: processes };
        sentinels.await_replicas(2);
        sentinels
    }

    fn url(&self) -> String {
        let hosts: Vec<String> = self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis+sentinel://{}/main", hosts.join(","))
    }

    fn master(&self) -> usize {
        let answer = servers::command(self.ports[0], "SENTINEL get-master-addr-by-name main").unwrap_or_default();
        let port = answer.lines().last().and_then(|line| line.trim().parse().ok());
        self.servers.iter().position(|server| Some(server.port) == port).unwrap_or(usize::MAX)
    }

    /// Until the sentinels know the others, and the master has so many replicas.
    fn await_replicas(&self, many: usize) {
        let until = Instant::now() + Duration::from_secs(60);
        let is_ready = || {
            let master = self.servers.get(self.master())?;
            let known = self.ports.iter().all(|port| {
                let answer = servers::command(*port, "SENTINEL master main").unwrap_or_default();
                let field =
                    |name: &str| answer.lines().skip_while(|line| line.trim() != name).nth(2).map(str::to_owned);
                field("num-other-sentinels").is_some_and(|number| number.trim() == "2")
                    && field("num-slaves").and_then(|n| n.trim().parse::<usize>().ok()).is_some_and(|n| n >= many)
            });
            let online = master.command("INFO replication")?.matches("state=online").count();
            (known && online >= many).then_some(())
        };
        while is_ready().is_none() {
            assert!(Instant::now() < until, "the sentinels do not find each other");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn fail_over_of_sentinel_has_one_owner_of_each() {
    if !is_installed("redis-server") {
        return;
    }
    let mut sentinels = Sentinels::start();
    let scene = Scene::start(&three(&sentinels.url()));
    scene.await_claims(10);
    let mut fail_overs = 0;
    for _ in 0..3 {
        let before = sentinels.master();
        sentinels.servers[before].kill();
        let until = Instant::now() + Duration::from_secs(60);
        while matches!(sentinels.master(), now if now == before || now == usize::MAX) {
            assert!(Instant::now() < until, "the sentinels choose no master");
            thread::sleep(Duration::from_millis(50));
        }
        fail_overs += 1;
        scene.await_claims(10);
        sentinels.servers[before].again();
        sentinels.await_replicas(2);
        scene.await_claims(5);
    }
    scene.end();
    assert_eq!(fail_overs, 3);
}
