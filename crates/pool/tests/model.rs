//! The protocol against a reference. Members on machines with clocks of their own, a registry, a store, and a network
//! that loses, delays and cuts, all from one seed. Agents stop, are replaced and are lost; the registry restarts.
//!
//! The reference is one number for each directory: how often it was changed. It stands for the directory's names. What is
//! compared: every read gives at least what was answered before it began, and at most what was begun. At every moment a
//! directory has at most one owner that serves. In the end everything that can be answered is.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

#[path = "model/chance.rs"]
mod chance;
#[path = "model/checks.rs"]
mod checks;
#[path = "model/counts.rs"]
mod counts;
#[path = "model/directed.rs"]
mod directed;
#[path = "model/machine.rs"]
mod machine;
#[path = "support/memory.rs"]
mod memory;
#[path = "model/owners.rs"]
mod owners;
#[path = "model/programs.rs"]
mod programs;
#[path = "model/rows.rs"]
mod rows;
#[path = "model/world.rs"]
mod world;

use std::time::Duration;

use counts::Counts;
use surgetank_pool::{Answer, Authority, Directory, Embedded, Join, Member, Output, Request, Times};
use surgetank_types::model::Role;
use world::World;

/// Seeds of one run; `SURGETANK_POOL_SEEDS` sets another number, `SURGETANK_POOL_SEED` runs one seed.
const SEEDS: u64 = 200;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|why| panic!("{variable}={text}: {why}")))
}

fn seeds() -> std::ops::Range<u64> {
    match number("SURGETANK_POOL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("SURGETANK_POOL_SEEDS").unwrap_or(SEEDS),
    }
}

fn enough(all: &Counts, least: &[(&str, u64, u64)]) {
    for (what, there, least) in least {
        assert!(there >= least, "only {there} {what}: {all:?}");
    }
}

#[test]
fn members_under_faults_agree_with_the_reference() {
    let seeds = seeds();
    let whole = seeds.end - seeds.start > 100;
    let mut all = Counts::default();
    for seed in seeds {
        all.add(&World::new(seed).run(Duration::from_secs(60)));
    }
    println!("{all:?}");
    // A search that never comes to the hard cases shows nothing.
    if whole {
        enough(&all, &hard_cases(&all));
        enough(&all, &[("lost members", all.expelled, 50), ("restarts of the registry", all.registry_restarts, 50)]);
    }
}

fn hard_cases(all: &Counts) -> [(&'static str, u64, u64); 10] {
    [
        ("operations", all.operations, 10_000),
        ("reads of the store", all.store_reads, 1_000),
        ("reads of a belief", all.beliefs, 1_000),
        ("operations at a peer", all.at_peers, 1_000),
        ("claims", all.claims, 1_000),
        ("releases", all.releases, 400),
        ("beliefs that were forgotten", all.forgotten, 200),
        ("replaced agents", all.replaced, 100),
        ("directories with losses that were taken over", all.taken_over, 50),
        ("members that left", all.left, 20),
    ]
}

/// The same with the registry in a key-value server that restarts, and may lose its last writes or all of them.
#[test]
fn members_agree_when_the_server_loses_its_last_writes() {
    let seeds = seeds();
    let whole = seeds.end - seeds.start > 100;
    let mut all = Counts::default();
    for seed in seeds {
        all.add(&World::with_lost_writes(seed).run(Duration::from_secs(60)));
    }
    println!("{all:?}");
    if whole {
        enough(&all, &hard_cases(&all));
        let cases = [
            ("lost members", all.expelled, 50),
            ("restarts of the registry", all.registry_restarts, 50),
            ("eras", all.eras, 100),
            ("lost writes", all.lost_writes, 1_000),
        ];
        enough(&all, &cases);
    }
}

/// A directory that no member changes costs no message: only leases are renewed.
#[test]
fn reads_of_the_store_send_no_message_to_a_member() {
    let mut world = World::calm(7, 4);
    let counts = world.only_reads(Duration::from_secs(30));
    assert!(counts.store_reads > 50 && counts.beliefs > 300, "{counts:?}");
    assert_eq!((counts.messages, counts.claims), (0, 0), "{counts:?}");
    // 4 members, 30 s, one renewal in 3 s each.
    assert!((36..=44).contains(&counts.requests), "{counts:?}");
}

/// Changes in an owned directory: no message, and no request but renewals.
#[test]
fn changes_in_an_own_directory_send_no_message() {
    let mut world = World::calm(8, 4);
    let (first, later) = world.changes_by_one(Duration::from_secs(30));
    // The claim, one announcement to each of three, and their answers.
    assert_eq!((first.claims, first.messages), (1, 6), "{first:?}");
    assert!(later.operations > 500, "{later:?}");
    assert_eq!((later.claims, later.messages), (0, 0), "{later:?}");
}

// A lease that counted from the answer, or without its margin, ended after the registry's.
#[test]
fn member_that_is_cut_off_stops_before_it_is_lost() {
    for seed in 0..20 {
        let (answered, read) = World::calm(seed, 2).cut_off_one();
        assert!(read > Duration::ZERO && answered > read, "seed {seed}: answered at {answered:?}, read at {read:?}");
        // By what is left of the margin when the kernel has forgotten. Nor does it stop much too early.
        let between = answered - read;
        assert!((400..3_000).contains(&between.as_millis()), "seed {seed}: answered at {answered:?}, read at {read:?}");
    }
}

// The registry does not wait for its lease, and no other member for its acknowledgement.
#[test]
fn member_that_leaves_stops_before_others_change_anything() {
    for seed in 0..20 {
        let read = World::calm(seed, 2).leave_while_reading();
        assert_eq!(read, Some(0), "seed {seed}");
    }
}

// Two requests for one claim: the first finds another owner, and the second none.
#[test]
fn claim_that_its_owner_does_not_want_any_more_is_given_back() {
    let lease = Duration::from_secs(10);
    let times =
        Times { margin: Duration::from_secs(1), renew: Duration::from_secs(3), again: Duration::from_millis(500) };
    let directory = Directory(b"results"[..].into());
    let now = Duration::from_millis;
    let mut engine = Embedded::new(lease);
    let mut join = |instance| {
        let answer = engine.ask(
            now(0),
            Request::Join(Join {
                instance: [instance; 16],
                resumes: None,
                address: String::new(),
                temporaries: String::new(),
                role: Role::default(),
            }),
        );
        Member::new(now(0), answer, times, &[]).unwrap()
    };
    let (mut one, mut other) = (join(1), join(2));
    fn requests(member: &mut Member) -> Vec<(u64, Request)> {
        let outputs = std::iter::from_fn(|| member.next_output());
        outputs
            .filter_map(|output| match output {
                Output::Ask(request @ Request::Of { number, .. }) => Some((number, request)),
                _ => None,
            })
            .collect()
    }
    let mut ask = |at: u64, member: &mut Member, (number, request): (u64, Request)| {
        let answer = engine.ask(now(at), request);
        member.answered(now(at), number, answer.clone());
        answer
    };
    other.claim(now(1), &directory);
    let claim = requests(&mut other).remove(0);
    let Answer::Granted { epoch, .. } = ask(1, &mut other, claim) else { panic!("not granted") };
    one.claim(now(2), &directory);
    one.tick(now(600));
    let [first, second] = requests(&mut one).try_into().unwrap();
    assert!(matches!(ask(700, &mut one, first), Answer::Owned { .. }));
    other.told(now(700), one.id(), surgetank_pool::Message::Forgotten { directory: directory.clone(), epoch });
    other.release(now(800), &directory);
    let release = requests(&mut other).pop().unwrap();
    assert!(matches!(ask(800, &mut other, release), Answer::Released(_)));
    assert!(matches!(ask(900, &mut one, second), Answer::Granted { .. }));
    assert_eq!(one.unfinished(), 0, "it does not want it");
    one.look_again(now(1_500));
    let renewals = requests(&mut one);
    for request in renewals {
        ask(1_500, &mut one, request);
    }
    let release = requests(&mut one).pop().expect("a release");
    assert!(matches!(ask(1_600, &mut one, release), Answer::Released(_)));
    assert_eq!(one.authority(now(1_600), &directory), Some(Authority::Store));
}

#[test]
fn claim_that_takes_too_long_is_given_up_and_an_owned_directory_is_not() {
    let times =
        Times { margin: Duration::from_secs(1), renew: Duration::from_secs(3), again: Duration::from_millis(500) };
    let (one, other) = (Directory(b"one"[..].into()), Directory(b"other"[..].into()));
    let now = Duration::from_millis;
    let mut engine = Embedded::new(Duration::from_secs(10));
    let join = |instance| {
        Request::Join(Join {
            instance: [instance; 16],
            resumes: None,
            address: String::new(),
            temporaries: String::new(),
            role: Role::default(),
        })
    };
    let mut member = Member::new(now(0), engine.ask(now(0), join(1)), times, &[]).unwrap();
    let mut carry_out = |member: &mut Member, at: u64| {
        while let Some(output) = member.next_output() {
            if let Output::Ask(request @ Request::Of { number, .. }) = output {
                let answer = engine.ask(now(at), request);
                member.answered(now(at), number, answer);
            }
        }
    };
    member.claim(now(1), &one);
    carry_out(&mut member, 1);
    assert!(matches!(member.authority(now(1), &one), Some(Authority::Ours(_))));
    member.give_up(now(2), &one);
    carry_out(&mut member, 2);
    assert!(matches!(member.authority(now(2), &one), Some(Authority::Ours(_))));
    // Asked, and not answered.
    member.claim(now(3), &other);
    member.give_up(now(4), &other);
    assert_eq!(member.unfinished(), 0);
    carry_out(&mut member, 5);
    member.look_again(now(1_000));
    carry_out(&mut member, 1_000);
    assert_eq!(member.authority(now(1_000), &other), Some(Authority::Store));
    assert!(matches!(member.authority(now(1_000), &one), Some(Authority::Ours(_))));
}
