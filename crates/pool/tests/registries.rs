//! One suite for all engines of the registry. An engine is asked by [`Engine`], which also lets time pass for it.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::time::Duration;

use surgetank_pool::registry::Change;
use surgetank_pool::{
    Answer, Ask, Claim, Directory, Embedded, Epoch, Everything, Join, MemberId, News, Refusal, Request, Revision, Term,
    Uptime,
};

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

fn engines() -> Vec<Box<dyn Engine>> {
    vec![Box::new(InMemory { engine: Embedded::new(LEASE), now: Duration::from_secs(1000) })]
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
    })
}

fn directory(name: &str) -> Directory {
    Directory(name.as_bytes().into())
}

#[test]
fn member_that_joins_gets_all_members_and_claims() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        let (epoch, members) = first.claim(&mut *engine, "results");
        assert_eq!(members, [first.id]);
        let (second, everything) = Player::join(&mut *engine, 2, None);
        assert!(second.id > first.id);
        let known: Vec<(MemberId, &str)> = everything.members.iter().map(|r| (r.id, &*r.address)).collect();
        assert_eq!(known, [(first.id, "host-1:7070"), (second.id, "host-2:7070")]);
        let claims: Vec<(Directory, Claim)> =
            everything.claims.iter().map(|(d, claim, _)| (d.clone(), *claim)).collect();
        assert_eq!(claims, [(directory("results"), Claim { owner: first.id, epoch })]);
    }
}

#[test]
fn claim_of_an_owned_directory_names_its_owner() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        let (mut second, _) = Player::join(&mut *engine, 2, None);
        let (epoch, members) = first.claim(&mut *engine, "results");
        assert_eq!(members, [first.id, second.id]);
        let refused = second.ask(&mut *engine, Ask::Claim(directory("results")));
        assert!(
            matches!(refused, Answer::Owned { claim, .. } if claim == Claim { owner: first.id, epoch }),
            "{refused:?}"
        );
        // Its own claim again is the same ownership.
        assert_eq!(first.claim(&mut *engine, "results").0, epoch);
        let (other, _) = second.claim(&mut *engine, "results/below");
        assert!(other > epoch);
    }
}

#[test]
fn released_directory_gets_a_higher_epoch_at_the_next_claim() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        let (mut second, _) = Player::join(&mut *engine, 2, None);
        let (epoch, _) = first.claim(&mut *engine, "results");
        let stranger = second.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(stranger, Answer::Refused(Refusal::NotOwner));
        let released = first.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert!(matches!(released, Answer::Released(_)), "{released:?}");
        let again = first.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(again, Answer::Refused(Refusal::NotOwner));
        assert!(second.claim(&mut *engine, "results").0 > epoch);
    }
}

#[test]
fn news_are_each_change_once_and_in_order() {
    for mut engine in engines() {
        let (mut first, everything) = Player::join(&mut *engine, 1, None);
        let (mut second, _) = Player::join(&mut *engine, 2, None);
        let (epoch, _) = second.claim(&mut *engine, "a");
        second.ask(&mut *engine, Ask::Release(directory("a"), epoch));
        let (changes, upto) = first.changes(&mut *engine, everything.revision);
        let claim = Claim { owner: second.id, epoch };
        assert!(matches!(&changes[0], Change::Joined(record) if record.id == second.id), "{changes:?}");
        assert_eq!(changes[1..], [Change::Claimed(directory("a"), claim), Change::Released(directory("a"))]);
        assert_eq!(first.changes(&mut *engine, upto), (Vec::new(), upto));
    }
}

#[test]
fn news_that_are_not_remembered_are_a_gap_with_everything() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        for round in 0..5_000 {
            let (epoch, _) = first.claim(&mut *engine, &format!("d{round}"));
            first.ask(&mut *engine, Ask::Release(directory(&format!("d{round}")), epoch));
        }
        let (epoch, _) = first.claim(&mut *engine, "last");
        let answer = first.ask(&mut *engine, Ask::Renew(Revision(1)));
        let Answer::Renewed(News::Gap(everything)) = answer else { panic!("{answer:?}") };
        assert_eq!(everything.claims.len(), 1);
        assert_eq!(everything.claims[0].1, Claim { owner: first.id, epoch });
        // Nor does it know a future that an engine before it promised.
        let answer = first.ask(&mut *engine, Ask::Renew(Revision(u64::MAX)));
        assert!(matches!(answer, Answer::Renewed(News::Gap(_))), "{answer:?}");
    }
}

#[test]
fn member_whose_lease_is_over_is_lost_and_its_claims_stand_until_they_are_taken_over() {
    for mut engine in engines() {
        let (mut first, everything) = Player::join(&mut *engine, 1, None);
        let (mut second, _) = Player::join(&mut *engine, 2, None);
        let (epoch, _) = second.claim(&mut *engine, "results");
        for _ in 0..3 {
            engine.pass(400);
            first.ask(&mut *engine, Ask::Renew(everything.revision));
        }
        let answer = second.ask(&mut *engine, Ask::Renew(everything.revision));
        assert_eq!(answer, Answer::Refused(Refusal::NotAMember));
        let (changes, _) = first.changes(&mut *engine, everything.revision);
        assert_eq!(changes.last(), Some(&Change::Lost(second.id)));
        let everything = Player::join(&mut *engine, 4, None).1;
        assert_eq!(everything.claims[0].1, Claim { owner: second.id, epoch });
        assert_eq!(everything.lost[0].temporaries, "key-2");
        let (next, _) = first.claim(&mut *engine, "results");
        assert!(next > epoch);
        let (changes, _) = first.changes(&mut *engine, everything.revision);
        let claim = Claim { owner: first.id, epoch: next };
        assert_eq!(changes, [Change::Claimed(directory("results"), claim)]);
        // What the lost member sends late changes nothing.
        let late = second.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(late, Answer::Refused(Refusal::NotAMember));
        let everything = Player::join(&mut *engine, 5, None).1;
        assert_eq!(everything.claims[0].1, claim);
        // It is a new member when it comes again.
        assert_eq!(engine.ask(joining(3, Some((second.id, Term(2))))), Answer::Refused(Refusal::NotAMember));
        assert!(Player::join(&mut *engine, 3, None).0.id > second.id);
    }
}

#[test]
fn replaced_agent_is_the_same_member_with_a_higher_term() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        let (epoch, _) = first.claim(&mut *engine, "results");
        engine.pass(900);
        let (mut next, everything) = Player::join(&mut *engine, 2, Some((first.id, Term(2))));
        assert_eq!((next.id, next.term), (first.id, Term(first.term.0 + 1)));
        assert_eq!(everything.claims[0].1, Claim { owner: first.id, epoch });
        let late = first.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(late, Answer::Refused(Refusal::Superseded));
        // Its lease began again.
        engine.pass(900);
        next.changes(&mut *engine, everything.revision);
    }
}

// It would expel the agent that works.
#[test]
fn late_join_of_an_agent_that_died_is_refused() {
    for mut engine in engines() {
        let (first, _) = Player::join(&mut *engine, 1, None);
        let (mut third, everything) = Player::join(&mut *engine, 3, Some((first.id, Term(3))));
        assert_eq!(engine.ask(joining(2, Some((first.id, Term(2))))), Answer::Refused(Refusal::Superseded));
        third.changes(&mut *engine, everything.revision);
    }
}

#[test]
fn resent_request_gets_the_first_answer() {
    for mut engine in engines() {
        let join = joining(1, None);
        let (first, again) = (engine.ask(join.clone()), engine.ask(join));
        assert_eq!(first, again);
        let (mut player, _) = Player::join(&mut *engine, 1, None);
        let claim = player.request(1, Ask::Claim(directory("results")));
        let (first, again) = (engine.ask(claim.clone()), engine.ask(claim));
        assert_eq!(first, again);
        player.number = 1;
        let Answer::Granted { epoch, .. } = first else { panic!("{first:?}") };
        let release = player.request(2, Ask::Release(directory("results"), epoch));
        assert_eq!(engine.ask(release.clone()), engine.ask(release));
    }
}

// A claim that was under way for long would give the directory to a member that has released it since.
#[test]
fn overtaken_request_has_no_effect() {
    for mut engine in engines() {
        let (mut player, _) = Player::join(&mut *engine, 1, None);
        let slow = player.request(1, Ask::Claim(directory("results")));
        player.number = 1;
        let (epoch, _) = player.claim(&mut *engine, "results");
        player.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(engine.ask(slow), Answer::Refused(Refusal::Overtaken));
        let (other, _) = Player::join(&mut *engine, 2, None);
        let (_, everything) = Player::join(&mut *engine, 3, None);
        assert!(everything.claims.is_empty(), "{everything:?}, {:?}", other.id);
    }
}

#[test]
fn member_leaves_only_when_it_owns_nothing() {
    for mut engine in engines() {
        let (mut first, _) = Player::join(&mut *engine, 1, None);
        let (mut second, everything) = Player::join(&mut *engine, 2, None);
        let (epoch, _) = first.claim(&mut *engine, "results");
        assert_eq!(first.ask(&mut *engine, Ask::Leave), Answer::Refused(Refusal::StillOwns));
        first.ask(&mut *engine, Ask::Release(directory("results"), epoch));
        assert_eq!(first.ask(&mut *engine, Ask::Leave), Answer::Left);
        let (changes, _) = second.changes(&mut *engine, everything.revision);
        assert_eq!(changes.last(), Some(&Change::Left(first.id)));
        assert_eq!(first.ask(&mut *engine, Ask::Renew(Revision(0))), Answer::Refused(Refusal::NotAMember));
    }
}

#[test]
fn restarted_engine_has_lost_nothing() {
    for mut engine in engines() {
        let (mut first, everything) = Player::join(&mut *engine, 1, None);
        let (mut second, _) = Player::join(&mut *engine, 2, None);
        let (epoch, _) = first.claim(&mut *engine, "results");
        engine.pass(900);
        engine.restart();
        // The age of the leases is unknown: none ends early.
        engine.pass(900);
        let answer = second.ask(&mut *engine, Ask::Renew(everything.revision));
        let Answer::Renewed(News::Gap(now)) = answer else { panic!("{answer:?}") };
        assert_eq!(now.members.len(), 2);
        assert_eq!(now.claims[0].1, Claim { owner: first.id, epoch });
        // An overtaken request is still one.
        assert_eq!(engine.ask(first.request(1, Ask::Leave)), Answer::Refused(Refusal::Overtaken));
        let refused = second.ask(&mut *engine, Ask::Claim(directory("results")));
        assert!(matches!(refused, Answer::Owned { .. }), "{refused:?}");
        first.number += 5;
        first.changes(&mut *engine, now.revision);
    }
}
