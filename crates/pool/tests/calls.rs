//! Calls of members to each other, in one process and over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use surgetank_pool::membership::{BODY_BYTES_MAX, Host, Joining, RegistryAt, Resumed};
use surgetank_pool::{CallFailed, Claim, Directory, MemberId, Membership, Secret, Term, Times};
use surgetank_types::clock::uptime;

const LEASE: Duration = Duration::from_secs(4);
const TIMES: Times =
    Times { margin: Duration::from_millis(300), renew: Duration::from_millis(500), again: Duration::from_millis(200) };
const PATIENCE: Duration = Duration::from_secs(30);

/// Replies to each call with its reversed body, and counts it. A body that begins with one of these is another matter.
const SLEEPS: u8 = 1;
const LONG_REPLY: u8 = 2;
const PANICS: u8 = 3;

#[derive(Default)]
struct Notes {
    called: Mutex<HashMap<(MemberId, Vec<u8>), usize>>,
    changed: Mutex<Vec<Directory>>,
    gone: Mutex<Vec<MemberId>>,
}

impl Host for Notes {
    fn forget(&self, _: &Directory) {}
    fn expelled(&self) {}
    fn call(&self, from: MemberId, body: Vec<u8>) -> Vec<u8> {
        match body.first() {
            Some(&SLEEPS) => thread::sleep(Duration::from_secs(3)),
            Some(&LONG_REPLY) => return vec![0; BODY_BYTES_MAX + 1],
            Some(&PANICS) => panic!("a panic that the test asks for"),
            _ => {}
        }
        let reply = body.iter().rev().copied().collect();
        *self.called.lock().unwrap().entry((from, body)).or_default() += 1;
        reply
    }
    fn changed(&self, directory: &Directory) {
        self.changed.lock().unwrap().push(directory.clone());
    }
    fn gone(&self, member: MemberId) {
        self.gone.lock().unwrap().push(member);
    }
}

struct One {
    membership: Membership,
    notes: Arc<Notes>,
}

impl One {
    fn id(&self) -> MemberId {
        self.membership.id().unwrap().0
    }
    fn called(&self) -> HashMap<(MemberId, Vec<u8>), usize> {
        self.notes.called.lock().unwrap().clone()
    }
    fn call(&self, to: &Self, body: &[u8], patience: Duration) -> Result<Vec<u8>, CallFailed> {
        self.membership.call(to.id(), body.to_vec(), patience)
    }
}

/// One pool.
struct Pool {
    secret: Secret,
    registry: Option<String>,
}

impl Pool {
    fn new() -> Self {
        Self { secret: Secret::random().unwrap(), registry: None }
    }

    fn join(&mut self) -> One {
        let one = self.start(None);
        self.registry.get_or_insert_with(|| one.membership.address().to_owned());
        one
    }

    fn start(&self, resumes: Option<Resumed>) -> One {
        let joining = Joining {
            secret: self.secret.clone(),
            pool: [3; 16],
            registry: self.registry.clone().map_or(RegistryAt::Here(LEASE), RegistryAt::Peer),
            host: "127.0.0.1".to_owned(),
            resumes,
            times: TIMES,
            patience: PATIENCE,
        };
        let notes = Arc::new(Notes::default());
        One { membership: Membership::join(joining, notes.clone()).unwrap(), notes }
    }

    /// An agent that replaces the one of this member.
    fn replace(&self, member: MemberId, term: u32) -> One {
        self.start(Some(Resumed { member, term: Term(term), owned: Vec::new() }))
    }
}

fn directory(name: &str) -> Directory {
    Directory(name.as_bytes().into())
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "not in time: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Calls of 16 threads between all members, `count` in all. Each is carried out once, and gets its own reply.
fn call_at_once(members: &[One], count: usize, body_of: impl Fn(usize) -> Vec<u8> + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let (from, to) = (number % members.len(), (number + 1) % members.len());
                    let body = body_of(number);
                    let reply = members[from].call(&members[to], &body, PATIENCE).unwrap();
                    assert!(reply.iter().eq(body.iter().rev()), "call {number}");
                }
            });
        }
    });
    for number in 0..count {
        let (from, to) = (number % members.len(), (number + 1) % members.len());
        let called = members[to].notes.called.lock().unwrap().get(&(members[from].id(), body_of(number))).copied();
        assert_eq!(called, Some(1), "call {number}");
    }
    let carried_out: usize = members.iter().map(|one| one.called().values().sum::<usize>()).sum();
    assert_eq!(carried_out, count);
}

/// Long ones, too.
fn mixed_body(number: usize) -> Vec<u8> {
    let length = if number.is_multiple_of(50) { 1 << 20 } else { 20 };
    let mut body = vec![9; length];
    body[1..9].copy_from_slice(&(number as u64).to_le_bytes());
    body
}

#[test]
fn calls_of_many_threads_are_each_carried_out_once() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..3).map(|_| pool.join()).collect();
    call_at_once(&members, 1000, mixed_body);
}

#[test]
fn calls_on_connections_that_are_cut_are_carried_out_once() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..2).map(|_| pool.join()).collect();
    let ends = AtomicBool::new(false);
    let cuts = thread::scope(|scope| {
        let cutter = scope.spawn(|| {
            let mut cuts = 0_u32;
            while !ends.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(fastrand::u64(2..60)));
                fastrand::choice(&members).unwrap().membership.cut_connections();
                cuts += 1;
            }
            cuts
        });
        call_at_once(&members, 4000, mixed_body);
        ends.store(true, Ordering::Relaxed);
        cutter.join().unwrap()
    });
    assert!(cuts > 10, "{cuts} cuts");
}

#[test]
fn long_bodies_do_not_close_connections_or_delay_claims() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..2).map(|_| pool.join()).collect();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        let claims = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            for number in 0.. {
                if ends.load(Ordering::Relaxed) && number > 0 {
                    break;
                }
                let began = Instant::now();
                members[number % 2].membership.claim(&directory(&format!("d{number}")), PATIENCE).unwrap();
                longest = longest.max(began.elapsed());
            }
            longest
        });
        let long = |number: usize| {
            let mut body = vec![9; 3 << 20];
            body[1..9].copy_from_slice(&(number as u64).to_le_bytes());
            body
        };
        call_at_once(&members, 100, long);
        ends.store(true, Ordering::Relaxed);
        let longest = claims.join().unwrap();
        assert!(longest < LEASE, "{longest:?}");
    });
    // (A connection that replaces another one counts from 0.)
    for one in &members {
        let sent: u64 = one.membership.network_bytes().iter().map(|(_, (_, sent))| sent).sum();
        assert!(sent > 99 * (3 << 20), "{sent} bytes");
    }
}

#[test]
fn longest_bodies_are_sent_and_longer_ones_refused() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let longest = vec![7; BODY_BYTES_MAX];
    assert!(first.call(&second, &longest, PATIENCE).unwrap() == longest);
    let too_long = vec![7; BODY_BYTES_MAX + 1];
    assert_eq!(first.call(&second, &too_long, PATIENCE), Err(CallFailed::TooLong));
    // A reply that cannot be sent is replaced by an empty one.
    assert_eq!(first.call(&second, &[LONG_REPLY], PATIENCE), Ok(Vec::new()));
    assert_eq!(first.call(&second, &[PANICS], PATIENCE), Ok(Vec::new()));
}

#[test]
fn call_to_a_member_that_leaves_ends_with_gone() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let to = second.id();
    thread::scope(|scope| {
        let calls = scope.spawn(|| {
            let began = Instant::now();
            (first.membership.call(to, vec![SLEEPS], PATIENCE), began.elapsed())
        });
        thread::sleep(Duration::from_millis(200));
        assert!(second.membership.leave(PATIENCE));
        let (reply, took) = calls.join().unwrap();
        assert_eq!(reply, Err(CallFailed::Gone));
        assert!(took < Duration::from_secs(3), "{took:?}");
    });
    assert_eq!(first.membership.call(to, vec![9], PATIENCE), Err(CallFailed::Gone));
    wait_until("the host to know it", || *first.notes.gone.lock().unwrap() == [to]);
}

#[test]
fn call_to_a_member_that_dies_ends_with_its_lease() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let to = second.id();
    drop(second);
    let began = Instant::now();
    assert_eq!(first.membership.call(to, vec![9], PATIENCE), Err(CallFailed::Gone));
    assert!(began.elapsed() < LEASE * 2, "{:?}", began.elapsed());
}

#[test]
fn call_to_a_silent_host_ends_when_the_patience_ends() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let began = Instant::now();
    assert_eq!(first.call(&second, &[SLEEPS], Duration::from_millis(1500)), Err(CallFailed::TimedOut));
    let took = began.elapsed();
    assert!((1500..2500).contains(&took.as_millis()), "{took:?}");
    // It delays no other call, and its late reply is not another call's.
    assert_eq!(first.call(&second, &[9, 8], PATIENCE), Ok(vec![8, 9]));
    wait_until("the first call", || second.called().len() == 2);
    assert!(second.called().values().all(|count| *count == 1));
}

#[test]
fn slow_call_is_sent_again_and_carried_out_once() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    assert_eq!(first.call(&second, &[SLEEPS, 5], PATIENCE), Ok(vec![5, SLEEPS]));
    assert_eq!(second.called(), HashMap::from([((first.id(), vec![SLEEPS, 5]), 1)]));
}

#[test]
fn call_waits_for_a_member_that_is_not_known_yet() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let next = MemberId(second.id().0 + 1);
    assert_eq!(second.membership.call(next, vec![9], Duration::from_millis(300)), Err(CallFailed::TimedOut));
    thread::scope(|scope| {
        let reply = scope.spawn(|| second.membership.call(next, vec![9, 8], PATIENCE));
        thread::sleep(Duration::from_millis(300));
        let third = pool.join();
        assert_eq!(third.id(), next);
        assert_eq!(reply.join().unwrap(), Ok(vec![8, 9]));
        // Neither does a new member wait for its first reply until all others know it.
        let began = Instant::now();
        assert_eq!(third.call(&first, &[9, 7], PATIENCE), Ok(vec![7, 9]));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
}

#[test]
fn replaced_agent_calls_and_is_called() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    for number in 1..=3 {
        assert_eq!(second.call(&first, &[9, number], PATIENCE), Ok(vec![number, 9]));
    }
    let (id, Term(term)) = second.membership.id().unwrap();
    // The call to the agent that dies is the next one's.
    let late = thread::scope(|scope| {
        let reply = scope.spawn(|| first.membership.call(id, vec![SLEEPS, 6], PATIENCE));
        thread::sleep(Duration::from_millis(100));
        drop(second);
        let second = pool.replace(id, term + 1);
        assert_eq!(reply.join().unwrap(), Ok(vec![6, SLEEPS]));
        second
    });
    // It counts from 1, and gets none of the replies that its predecessor got.
    for number in 4..=6 {
        assert_eq!(late.call(&first, &[9, number], PATIENCE), Ok(vec![number, 9]));
    }
    assert!(first.called().len() == 6 && first.called().values().all(|count| *count == 1));
    assert!(first.notes.gone.lock().unwrap().is_empty());
}

#[test]
fn call_of_a_superseded_agent_ends_with_expelled() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    assert!(second.membership.serves_until().is_some());
    let (id, Term(term)) = second.membership.id().unwrap();
    thread::scope(|scope| {
        let reply = scope.spawn(|| second.call(&first, &[SLEEPS], PATIENCE));
        thread::sleep(Duration::from_millis(100));
        let later = pool.replace(id, term + 1);
        assert_eq!(reply.join().unwrap(), Err(CallFailed::Expelled));
        drop(later);
    });
    assert_eq!(second.call(&first, &[9], PATIENCE), Err(CallFailed::Expelled));
    assert_eq!(second.membership.serves_until(), None);
}

#[test]
fn member_knows_records_claims_and_its_own_lease() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let epoch = second.membership.claim(&directory("results"), PATIENCE).unwrap();
    let claim = Claim { owner: second.id(), epoch };
    for one in [&first, &second] {
        assert_eq!(one.membership.claims(), [(directory("results"), claim)]);
        let records = one.membership.records();
        let addresses: Vec<&str> = records.iter().map(|record| record.address.as_str()).collect();
        assert_eq!(addresses, [first.membership.address(), second.membership.address()]);
        let until = one.membership.serves_until().unwrap();
        let left = until.checked_sub(uptime()).unwrap();
        assert!(left <= LEASE - TIMES.margin && left > LEASE / 2, "{left:?}");
        wait_until("the host to know the claim", || one.notes.changed.lock().unwrap().contains(&directory("results")));
    }
}
