//! Members at work, in one process and over real sockets.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use surgetank_pool::membership::{Host, Joining, NotClaimed, RegistryAt, Resumed};
use surgetank_pool::{Authority, Claim, Directory, Epoch, MemberId, Membership, Secret, Term, Times, Whereabouts};
use surgetank_types::clock::uptime;
use surgetank_types::model::Role;

const LEASE: Duration = Duration::from_secs(4);
const TIMES: Times =
    Times { margin: Duration::from_millis(300), renew: Duration::from_millis(500), again: Duration::from_millis(200) };
const PATIENCE: Duration = Duration::from_secs(20);

/// Writes down what it is asked to do.
#[derive(Default)]
struct Notes {
    forgot: Mutex<Vec<Directory>>,
    changed: Mutex<Vec<Directory>>,
    expelled: Mutex<bool>,
}

impl Host for Notes {
    fn forget(&self, directory: &Directory) {
        // (As a kernel that needs a while.)
        thread::sleep(Duration::from_millis(20));
        self.forgot.lock().unwrap().push(directory.clone());
    }
    fn changed(&self, directory: &Directory) {
        self.changed.lock().unwrap().push(directory.clone());
    }
    fn expelled(&self) {
        *self.expelled.lock().unwrap() = true;
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
    fn forgot(&self) -> Vec<Directory> {
        self.notes.forgot.lock().unwrap().clone()
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

    fn joining(&self) -> Joining {
        Joining {
            secret: self.secret.clone(),
            pool: [3; 16],
            registry: self.registry.clone().map_or(RegistryAt::Here(LEASE), RegistryAt::Peer),
            host: "127.0.0.1".to_owned(),
            temporaries: "key".to_owned(),
            role: Role::default(),
            resumes: None,
            times: TIMES,
            patience: PATIENCE,
        }
    }

    fn join(&mut self) -> One {
        let one = start(self.joining()).unwrap();
        self.registry.get_or_insert_with(|| one.membership.address().to_owned());
        one
    }
}

fn start(joining: Joining) -> std::io::Result<One> {
    let notes = Arc::new(Notes::default());
    Ok(One { membership: Membership::join(joining, notes.clone())?, notes })
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

#[test]
fn claim_is_known_to_all_members_when_it_is_granted() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..4).map(|_| pool.join()).collect();
    let results = directory("results");
    let epoch = members[1].membership.claim(&results, PATIENCE).unwrap();
    assert_eq!(members[1].membership.authority(&results), Some(Authority::Ours(epoch)));
    for (number, one) in members.iter().enumerate() {
        let forgot: BTreeSet<Directory> = one.forgot().into_iter().collect();
        let expected = if number == 1 { BTreeSet::new() } else { BTreeSet::from([results.clone()]) };
        assert_eq!(forgot, expected, "member {number}");
        if number != 1 {
            let refused = one.membership.claim(&results, PATIENCE).unwrap_err();
            assert!(matches!(refused, NotClaimed::Owned(claim) if claim.owner == members[1].id()), "{refused:?}");
        }
    }
    // The directory is another member's next, at a higher epoch.
    members[1].membership.release(&results);
    let mut next = Err(NotClaimed::TimedOut);
    wait_until("a claim after the release", || {
        next = members[3].membership.claim(&results, PATIENCE);
        next.is_ok()
    });
    assert!(next.unwrap() > epoch);
    let peers = members[3].membership.network_bytes();
    assert_eq!(peers.len(), 3, "{peers:?}");
    assert!(peers.iter().all(|(_, (received, sent))| *received > 0 && *sent > 0), "{peers:?}");
}

#[test]
fn claims_of_many_members_at_once_give_each_directory_one_owner() {
    let mut pool = Pool::new();
    let members: Vec<One> = (0..4).map(|_| pool.join()).collect();
    let directories: Vec<Directory> = (0..30).map(|number| directory(&format!("d{number}"))).collect();
    let granted: Vec<usize> = thread::scope(|scope| {
        let claims = members.iter().map(|one| {
            let directories = &directories;
            scope.spawn(move || {
                directories.iter().filter(|directory| one.membership.claim(directory, PATIENCE).is_ok()).count()
            })
        });
        claims.collect::<Vec<_>>().into_iter().map(|claims| claims.join().unwrap()).collect()
    });
    assert_eq!(granted.iter().sum::<usize>(), directories.len(), "{granted:?}");
}

#[test]
fn member_that_dies_is_lost_after_its_lease_and_its_directory_is_taken_over() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let epoch = second.membership.claim(&directory("lost"), PATIENCE).unwrap();
    let dead = second.id();
    drop(second);
    let began = Instant::now();
    // It is waited for as long as it may serve.
    first.membership.claim(&directory("other"), PATIENCE).unwrap();
    let took = began.elapsed();
    assert!((LEASE / 2..LEASE * 3).contains(&took), "{took:?}");
    assert_eq!(first.membership.members(), [first.id()]);
    let authority = first.membership.authority(&directory("lost"));
    assert!(matches!(authority, Some(Authority::Lost(claim)) if claim.owner == dead), "{authority:?}");
    assert_eq!(first.membership.lost()[0].temporaries, "key");
    // A third one learns of the take-over by the claim.
    let third = pool.join();
    let next = first.membership.claim(&directory("lost"), PATIENCE).unwrap();
    assert!(next > epoch);
    let authority = third.membership.authority(&directory("lost"));
    assert!(matches!(authority, Some(Authority::Peer(claim)) if claim.epoch == next), "{authority:?}");
    let refused = third.membership.claim(&directory("lost"), PATIENCE).unwrap_err();
    assert!(matches!(refused, NotClaimed::Owned(claim) if claim.owner == first.id()), "{refused:?}");
    // Without it there is no wait.
    let began = Instant::now();
    first.membership.claim(&directory("third"), PATIENCE).unwrap();
    assert!(began.elapsed() < LEASE / 4, "{:?}", began.elapsed());
}

#[test]
fn replaced_agent_keeps_its_claims_and_gives_back_what_it_does_not_know() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    let (known, unknown) = (directory("known"), directory("unknown"));
    let epoch: Epoch = second.membership.claim(&known, PATIENCE).unwrap();
    second.membership.claim(&unknown, PATIENCE).unwrap();
    let (id, term) = second.membership.id().unwrap();
    drop(second);
    let term = Term(term.0 + 1);
    let resumes = Some(Resumed { member: id, term, owned: vec![(known.clone(), epoch)] });
    let second = start(Joining { resumes, ..pool.joining() }).unwrap();
    assert_eq!(second.membership.id(), Some((id, term)));
    assert_eq!(second.membership.authority(&known), Some(Authority::Ours(epoch)));
    wait_until("the other directory to be the store's", || first.membership.claim(&unknown, PATIENCE).is_ok());
    assert!(!*second.notes.expelled.lock().unwrap());
    // An agent of the earlier term comes too late.
    let late = start(Joining { resumes: Some(Resumed { member: id, term, owned: vec![] }), ..pool.joining() })
        .map(|_| ())
        .unwrap_err();
    assert!(late.to_string().contains("a later agent is this member"), "{late}");
}

#[test]
fn member_leaves_and_is_not_waited_for() {
    let mut pool = Pool::new();
    let (first, second, third) = (pool.join(), pool.join(), pool.join());
    let claimed = directory("results");
    second.membership.claim(&claimed, PATIENCE).unwrap();
    second.membership.release(&claimed);
    let notes = second.notes.clone();
    assert!(second.membership.leave(PATIENCE));
    wait_until("the host of the second to know it", || *notes.expelled.lock().unwrap());
    let began = Instant::now();
    first.membership.claim(&claimed, PATIENCE).unwrap();
    assert!(began.elapsed() < LEASE / 2, "{:?}", began.elapsed());
    wait_until("the third to know that the second left", || third.membership.members().len() == 2);
}

#[test]
fn agent_with_another_secret_does_not_join() {
    let mut pool = Pool::new();
    let _first = pool.join();
    let joining = Joining { secret: Secret::random().unwrap(), patience: Duration::from_secs(1), ..pool.joining() };
    let refused = start(joining).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    assert!(refused.to_string().contains("the peer does not have the pool's secret"), "{refused}");
}

#[test]
fn agent_without_a_registry_says_which_one_it_tried() {
    let mut pool = Pool::new();
    pool.registry = Some("127.0.0.1:1".to_owned());
    let joining = Joining { patience: Duration::from_millis(700), ..pool.joining() };
    let refused = start(joining).map(|_| ()).unwrap_err();
    assert!(refused.to_string().starts_with("the pool's registry at 127.0.0.1:1 was not reached: "), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

// (Its first member's machine hangs, for example.)
#[test]
fn agent_whose_registry_is_silent_does_not_join_in_time() {
    let mut pool = Pool::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    pool.registry = Some(silent.local_addr().unwrap().to_string());
    let joining = Joining { patience: Duration::from_millis(700), ..pool.joining() };
    assert_eq!(start(joining).map(|_| ()).unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn registry_ends_only_without_other_members_and_refuses_joins() {
    let mut pool = Pool::new();
    let (first, second) = (pool.join(), pool.join());
    assert!(!first.membership.end_registry());
    assert!(!second.membership.end_registry());
    let third = pool.join();
    assert!(second.membership.leave(PATIENCE));
    assert!(!first.membership.end_registry());
    assert!(third.membership.leave(PATIENCE));
    assert!(first.membership.end_registry());
    assert!(first.membership.end_registry());
    let refused = start(pool.joining()).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionAborted, "{refused}");
    // The last member goes on, and leaves.
    first.membership.claim(&directory("last"), PATIENCE).unwrap();
    first.membership.release(&directory("last"));
    assert!(first.membership.leave(PATIENCE));
    assert!(start(pool.joining()).is_err());
}

// Two agents: one joins, or the registry ends, never both.
#[test]
fn join_and_end_of_the_registry_at_once_have_one_winner() {
    for _ in 0..20 {
        let mut pool = Pool::new();
        let first = pool.join();
        let joining = pool.joining();
        let joins = thread::spawn(move || start(joining));
        thread::sleep(Duration::from_micros(fastrand::u64(0..8000)));
        let ended = first.membership.end_registry();
        let joined = joins.join().unwrap();
        assert_ne!(ended, joined.is_ok());
        if let Err(why) = joined {
            assert_eq!(why.kind(), ErrorKind::ConnectionAborted, "{why}");
        }
    }
}

// On Debian the name of a host means 127.0.1.1 to the host itself, and another address to others.
#[test]
fn member_with_a_name_listens_at_all_addresses() {
    let mut pool = Pool::new();
    let joining = Joining { host: "localhost".to_owned(), ..pool.joining() };
    let first = start(joining).unwrap();
    let address = first.membership.address().to_owned();
    let port: u16 = address.strip_prefix("localhost:").unwrap().parse().unwrap();
    for host in ["localhost", "127.0.0.1", "127.0.1.1"] {
        pool.registry = Some(format!("{host}:{port}"));
        let one = pool.join();
        assert!(one.membership.address().starts_with("127.0.0.1:"));
        // (An address is bound, and no other one.)
        let port: u16 = one.membership.address().rsplit_once(':').unwrap().1.parse().unwrap();
        assert!(TcpStream::connect(("127.0.1.1", port)).is_err());
    }
    assert!(TcpStream::connect(("127.0.1.1", port)).is_ok());
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
    let at = Whereabouts::At(Term(1), second.membership.address().to_owned());
    assert_eq!(first.membership.find(second.id()), at);
    assert_eq!(first.membership.find(MemberId(77)), Whereabouts::Unknown);
    let gone = second.id();
    second.membership.release(&directory("results"));
    assert!(second.membership.leave(PATIENCE));
    assert_eq!(second.membership.find(first.id()), Whereabouts::Expelled);
    wait_until("the first to know that the second left", || first.membership.find(gone) == Whereabouts::Gone);
}
