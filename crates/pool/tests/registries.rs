//! One suite for all engines of the registry. An engine is asked by [`Engine`], which also lets time pass for it.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

#[path = "support/memory.rs"]
mod memory;
#[path = "registries/rows.rs"]
mod rows;
#[path = "support/servers.rs"]
mod servers;

use std::time::Duration;

use rows::{in_memory, on_etcd, on_redis};
use surgetank_pool::registry::Change;
use surgetank_pool::{
    Answer, Ask, Claim, Directory, Embedded, Epoch, Everything, Join, MemberId, News, Refusal, Request, Revision, Term,
    Uptime,
};
use surgetank_types::model::Role;

/// What the suite does to an engine.
trait Engine {
    fn ask(&mut self, request: Request) -> Answer;
    /// A part of a lease, in thousandths, passes.
    fn pass(&mut self, of_a_lease: u32);
    /// The engine's process ends and is replaced.
    fn restart(&mut self);
}

struct InMemory {
    engine: Embedded,
    now: Uptime,
}

const LEASE: Duration = Duration::from_secs(10);

impl InMemory {
    fn new() -> Self {
        Self { engine: Embedded::new(LEASE), now: Duration::from_secs(1000) }
    }
}

impl Engine for InMemory {
    fn ask(&mut self, request: Request) -> Answer {
        self.engine.ask(self.now, request)
    }
    fn pass(&mut self, of_a_lease: u32) {
        self.now += LEASE * of_a_lease / 1000;
    }
    fn restart(&mut self) {
        // (As its supervisor keeps it.)
        let kept = postcard::to_stdvec(self.engine.kept()).unwrap();
        self.engine = Embedded::restored(self.now, postcard::from_bytes(&kept).unwrap());
    }
}

macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        mod embedded {
            $(#[test] fn $name() { super::$name(&mut super::InMemory::new()) })*
        }
        mod rows_in_memory {
            $(#[test] fn $name() { super::$name(&mut super::in_memory()) })*
        }
        mod redis {
            $(#[test] fn $name() {
                if let Some(mut engine) = super::on_redis() { super::$name(&mut engine) }
            })*
        }
        mod etcd {
            $(#[test] fn $name() {
                if let Some(mut engine) = super::on_etcd() { super::$name(&mut engine) }
            })*
        }
    };
}

suite! {
    member_that_joins_gets_all_members_and_claims,
    claim_of_an_owned_directory_names_its_owner,
    released_directory_gets_a_higher_epoch_at_the_next_claim,
    news_are_each_change_once_and_in_order,
    news_that_are_not_remembered_are_a_gap_with_everything,
    member_whose_lease_is_over_is_lost_and_its_claims_stand_until_they_are_taken_over,
    replaced_agent_is_the_same_member_with_a_higher_term,
    late_join_of_an_agent_that_died_is_refused,
    resent_request_gets_the_first_answer,
    overtaken_request_has_no_effect,
    member_leaves_only_when_it_owns_nothing,
    restarted_engine_has_lost_nothing,
}

/// A member as the suite plays it.
struct Player {
    id: MemberId,
    term: Term,
    number: u64,
}

impl Player {
    fn join(engine: &mut dyn Engine, instance: u8, resumes: Option<(MemberId, Term)>) -> (Self, Everything) {
        match engine.ask(joining(instance, resumes)) {
            Answer::Joined { member, term, everything, .. } => (Self { id: member, term, number: 0 }, everything),
            other => panic!("{other:?}"),
        }
    }

    fn request(&self, number: u64, ask: Ask) -> Request {
        Request::Of { member: self.id, term: self.term, number, ask }
    }

    fn ask(&mut self, engine: &mut dyn Engine, ask: Ask) -> Answer {
        self.number += 1;
        engine.ask(self.request(self.number, ask))
    }

    fn claim(&mut self, engine: &mut dyn Engine, name: &str) -> (Epoch, Vec<MemberId>) {
        match self.ask(engine, Ask::Claim(directory(name))) {
            Answer::Granted { epoch, members, .. } => (epoch, members),
            other => panic!("{other:?}"),
        }
    }

    fn changes(&mut self, engine: &mut dyn Engine, after: Revision) -> (Vec<Change>, Revision) {
        match self.ask(engine, Ask::Renew(after)) {
            Answer::Renewed(News::Changes(changes, upto)) => {
                (changes.into_iter().map(|(_, change)| change).collect(), upto)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn joining(instance: u8, resumes: Option<(MemberId, Term)>) -> Request {
    Request::Join(Join {
        instance: [instance; 16],
        resumes,
        address: format!("host-{instance}:7070"),
        temporaries: format!("key-{instance}"),
        role: if instance == 2 { Role::Storage } else { Role::Compute },
    })
}

fn directory(name: &str) -> Directory {
    Directory(name.as_bytes().into())
}

fn member_that_joins_gets_all_members_and_claims(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    let (epoch, members) = first.claim(engine, "results");
    assert_eq!(members, [first.id]);
    let (second, everything) = Player::join(engine, 2, None);
    assert!(second.id > first.id);
    let known: Vec<(MemberId, &str)> = everything.members.iter().map(|r| (r.id, &*r.address)).collect();
    assert_eq!(known, [(first.id, "host-1:7070"), (second.id, "host-2:7070")]);
    let claims: Vec<(Directory, Claim)> = everything.claims.iter().map(|(d, claim, _)| (d.clone(), *claim)).collect();
    assert_eq!(claims, [(directory("results"), Claim { owner: first.id, epoch })]);
}

fn claim_of_an_owned_directory_names_its_owner(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    let (mut second, _) = Player::join(engine, 2, None);
    let (epoch, members) = first.claim(engine, "results");
    assert_eq!(members, [first.id, second.id]);
    let refused = second.ask(engine, Ask::Claim(directory("results")));
    assert!(matches!(refused, Answer::Owned { claim, .. } if claim == Claim { owner: first.id, epoch }), "{refused:?}");
    // Its own claim again is the same ownership.
    assert_eq!(first.claim(engine, "results").0, epoch);
    let (other, _) = second.claim(engine, "results/below");
    assert!(other > epoch);
}

fn released_directory_gets_a_higher_epoch_at_the_next_claim(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    let (mut second, _) = Player::join(engine, 2, None);
    let (epoch, _) = first.claim(engine, "results");
    let stranger = second.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(stranger, Answer::Refused(Refusal::NotOwner));
    let released = first.ask(engine, Ask::Release(directory("results"), epoch));
    assert!(matches!(released, Answer::Released(_)), "{released:?}");
    let again = first.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(again, Answer::Refused(Refusal::NotOwner));
    assert!(second.claim(engine, "results").0 > epoch);
}

fn news_are_each_change_once_and_in_order(engine: &mut dyn Engine) {
    let (mut first, everything) = Player::join(engine, 1, None);
    let (mut second, _) = Player::join(engine, 2, None);
    let (epoch, _) = second.claim(engine, "a");
    second.ask(engine, Ask::Release(directory("a"), epoch));
    let (changes, upto) = first.changes(engine, everything.revision);
    let claim = Claim { owner: second.id, epoch };
    assert!(matches!(&changes[0], Change::Joined(record) if record.id == second.id), "{changes:?}");
    assert_eq!(changes[1..], [Change::Claimed(directory("a"), claim), Change::Released(directory("a"))]);
    assert_eq!(first.changes(engine, upto), (Vec::new(), upto));
}

fn news_that_are_not_remembered_are_a_gap_with_everything(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    for round in 0..5_000 {
        let (epoch, _) = first.claim(engine, &format!("d{round}"));
        first.ask(engine, Ask::Release(directory(&format!("d{round}")), epoch));
    }
    let (epoch, _) = first.claim(engine, "last");
    let answer = first.ask(engine, Ask::Renew(Revision(1)));
    let Answer::Renewed(News::Gap(everything)) = answer else { panic!("{answer:?}") };
    assert_eq!(everything.claims.len(), 1);
    assert_eq!(everything.claims[0].1, Claim { owner: first.id, epoch });
    // Nor does it know a future that an engine before it promised.
    let answer = first.ask(engine, Ask::Renew(Revision(u64::MAX)));
    assert!(matches!(answer, Answer::Renewed(News::Gap(_))), "{answer:?}");
}

fn member_whose_lease_is_over_is_lost_and_its_claims_stand_until_they_are_taken_over(engine: &mut dyn Engine) {
    let (mut first, everything) = Player::join(engine, 1, None);
    let (mut second, _) = Player::join(engine, 2, None);
    let (epoch, _) = second.claim(engine, "results");
    for _ in 0..4 {
        engine.pass(400);
        first.ask(engine, Ask::Renew(everything.revision));
    }
    let answer = second.ask(engine, Ask::Renew(everything.revision));
    assert_eq!(answer, Answer::Refused(Refusal::NotAMember));
    let (changes, _) = first.changes(engine, everything.revision);
    assert_eq!(changes.last(), Some(&Change::Lost(second.id)));
    let everything = Player::join(engine, 4, None).1;
    assert_eq!(everything.claims[0].1, Claim { owner: second.id, epoch });
    assert_eq!((everything.lost[0].temporaries.as_str(), everything.lost[0].role), ("key-2", Role::Storage));
    let (next, _) = first.claim(engine, "results");
    assert!(next > epoch);
    let (changes, _) = first.changes(engine, everything.revision);
    let claim = Claim { owner: first.id, epoch: next };
    assert_eq!(changes, [Change::Claimed(directory("results"), claim)]);
    // What the lost member sends late changes nothing.
    let late = second.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(late, Answer::Refused(Refusal::NotAMember));
    let everything = Player::join(engine, 5, None).1;
    assert_eq!(everything.claims[0].1, claim);
    // It is a new member when it comes again.
    assert_eq!(engine.ask(joining(3, Some((second.id, Term(2))))), Answer::Refused(Refusal::NotAMember));
    assert!(Player::join(engine, 3, None).0.id > second.id);
}

fn replaced_agent_is_the_same_member_with_a_higher_term(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    let (epoch, _) = first.claim(engine, "results");
    engine.pass(900);
    let (mut next, everything) = Player::join(engine, 2, Some((first.id, Term(2))));
    assert_eq!((next.id, next.term), (first.id, Term(first.term.0 + 1)));
    assert_eq!(everything.claims[0].1, Claim { owner: first.id, epoch });
    let late = first.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(late, Answer::Refused(Refusal::Superseded));
    // Its lease began again.
    engine.pass(900);
    next.changes(engine, everything.revision);
}

// It would expel the agent that works.
fn late_join_of_an_agent_that_died_is_refused(engine: &mut dyn Engine) {
    let (first, _) = Player::join(engine, 1, None);
    let (mut third, everything) = Player::join(engine, 3, Some((first.id, Term(3))));
    assert_eq!(engine.ask(joining(2, Some((first.id, Term(2))))), Answer::Refused(Refusal::Superseded));
    third.changes(engine, everything.revision);
}

fn resent_request_gets_the_first_answer(engine: &mut dyn Engine) {
    let join = joining(1, None);
    let (first, again) = (engine.ask(join.clone()), engine.ask(join));
    assert_eq!(first, again);
    let (mut player, _) = Player::join(engine, 1, None);
    let claim = player.request(1, Ask::Claim(directory("results")));
    let (first, again) = (engine.ask(claim.clone()), engine.ask(claim));
    assert_eq!(first, again);
    player.number = 1;
    let Answer::Granted { epoch, .. } = first else { panic!("{first:?}") };
    let release = player.request(2, Ask::Release(directory("results"), epoch));
    assert_eq!(engine.ask(release.clone()), engine.ask(release));
}

// A claim that was under way for long would give the directory to a member that has released it since.
fn overtaken_request_has_no_effect(engine: &mut dyn Engine) {
    let (mut player, _) = Player::join(engine, 1, None);
    let slow = player.request(1, Ask::Claim(directory("results")));
    player.number = 1;
    let (epoch, _) = player.claim(engine, "results");
    player.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(engine.ask(slow), Answer::Refused(Refusal::Overtaken));
    let (other, _) = Player::join(engine, 2, None);
    let (_, everything) = Player::join(engine, 3, None);
    assert!(everything.claims.is_empty(), "{everything:?}, {:?}", other.id);
}

fn member_leaves_only_when_it_owns_nothing(engine: &mut dyn Engine) {
    let (mut first, _) = Player::join(engine, 1, None);
    let (mut second, everything) = Player::join(engine, 2, None);
    let (epoch, _) = first.claim(engine, "results");
    assert_eq!(first.ask(engine, Ask::Leave), Answer::Refused(Refusal::StillOwns));
    first.ask(engine, Ask::Release(directory("results"), epoch));
    assert_eq!(first.ask(engine, Ask::Leave), Answer::Left);
    let (changes, _) = second.changes(engine, everything.revision);
    assert_eq!(changes.last(), Some(&Change::Left(first.id)));
    assert_eq!(first.ask(engine, Ask::Renew(Revision(0))), Answer::Refused(Refusal::NotAMember));
}

fn restarted_engine_has_lost_nothing(engine: &mut dyn Engine) {
    let (mut first, everything) = Player::join(engine, 1, None);
    let (mut second, _) = Player::join(engine, 2, None);
    let (epoch, _) = first.claim(engine, "results");
    engine.pass(900);
    engine.restart();
    // The age of the leases is unknown: none ends early.
    engine.pass(900);
    let answer = second.ask(engine, Ask::Renew(everything.revision));
    assert!(matches!(answer, Answer::Renewed(_)), "{answer:?}");
    let (_, now) = Player::join(engine, 3, None);
    assert_eq!(now.members.len(), 3);
    assert_eq!(now.claims[0].1, Claim { owner: first.id, epoch });
    // An overtaken request is still one, or gets its answer again.
    let again = engine.ask(first.request(1, Ask::Leave));
    let is_again = matches!(again, Answer::Granted { epoch: of, .. } if of == epoch);
    assert!(is_again || again == Answer::Refused(Refusal::Overtaken), "{again:?}");
    let refused = second.ask(engine, Ask::Claim(directory("results")));
    assert!(matches!(refused, Answer::Owned { .. }), "{refused:?}");
    first.number += 5;
    first.changes(engine, now.revision);
}
