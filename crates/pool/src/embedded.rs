//! The engine that is embedded in the pool's first member: one process, nothing to install. It does not outlive its
//! machine. Its supervisor keeps its state ([`Kept`]) while the agent is replaced.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::registry::{Answer, Ask, Change, Claim, Everything, Join, MemberRecord, News, Refusal, Request};
use crate::rules::{self, CHANGES_MAX, Known, Rows};
use crate::{Directory, MemberId, Revision, Term, Uptime};

/// The engine. `now` is the time of its machine, and never goes back.
#[derive(Debug)]
pub struct Embedded {
    kept: Kept,
    /// When each lease ends.
    ends: BTreeMap<MemberId, Uptime>,
    /// The last request of each member's term, and its answer.
    last: BTreeMap<MemberId, (u64, Answer)>,
    changes: VecDeque<(Revision, Change)>,
}

/// What survives the engine's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    lease: Duration,
    revision: Revision,
    next_member: u32,
    members: BTreeMap<MemberId, Known>,
    /// The number of each member's last request.
    numbers: BTreeMap<MemberId, u64>,
    lost: Vec<MemberRecord>,
    claims: BTreeMap<Directory, (Claim, Revision)>,
    /// Claims of lost members that later ones replaced.
    replaced: BTreeMap<Directory, Claim>,
    /// No agent joins any more.
    ended: bool,
}

impl Embedded {
    /// A registry without members. A lease lasts `lease` from the moment at which the engine hears of its member.
    pub fn new(lease: Duration) -> Self {
        let (members, numbers, lost, claims, replaced) = Default::default();
        let (revision, next_member, ended) = (Revision(0), 1, false);
        let kept = Kept { lease, revision, next_member, members, numbers, lost, claims, replaced, ended };
        Self::restored(Uptime::ZERO, kept)
    }

    /// Continues with what was kept. Their age is unknown, so each lease begins again.
    pub fn restored(now: Uptime, kept: Kept) -> Self {
        let ends = kept.members.keys().map(|id| (*id, now + kept.lease)).collect();
        Self { kept, ends, last: BTreeMap::new(), changes: VecDeque::new() }
    }

    /// What a supervisor keeps. An answer is sent only after the state that it reports is kept.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Carries out a request.
    pub fn ask(&mut self, now: Uptime, request: Request) -> Answer {
        self.end_leases(now);
        match request {
            Request::Join(join) => self.join(now, join),
            Request::Of { member, term, number, ask } => self.ask_of(now, member, term, number, ask),
        }
    }

    /// Refuses every later join, if no member but this one is registered. Returns whether it does.
    pub fn end(&mut self, now: Uptime, own: MemberId) -> bool {
        self.end_leases(now);
        self.kept.ended |= self.kept.members.keys().all(|id| *id == own);
        self.kept.ended
    }

    /// Members whose lease has ended are lost.
    pub fn end_leases(&mut self, now: Uptime) {
        let over: Vec<MemberId> = self.ends.iter().filter(|(_, end)| **end <= now).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|id| rules::lose(self, id));
    }

    fn join(&mut self, now: Uptime, join: Join) -> Answer {
        if self.kept.ended {
            return Answer::Refused(Refusal::Ended);
        }
        match rules::join(self, join) {
            Ok((member, term)) => {
                self.ends.insert(member, now + self.kept.lease);
                Answer::Joined { member, term, lease: self.kept.lease, everything: self.everything() }
            }
            Err(refusal) => Answer::Refused(refusal),
        }
    }

    fn ask_of(&mut self, now: Uptime, member: MemberId, term: Term, number: u64, ask: Ask) -> Answer {
        let Some(known) = self.kept.members.get(&member) else { return Answer::Refused(Refusal::NotAMember) };
        if term != known.term {
            return Answer::Refused(Refusal::Superseded);
        }
        if number <= self.kept.numbers.get(&member).copied().unwrap_or(0) {
            let again = self.last.get(&member).filter(|(last, _)| *last == number);
            return again.map_or(Answer::Refused(Refusal::Overtaken), |(_, answer)| answer.clone());
        }
        self.kept.numbers.insert(member, number);
        self.last.remove(&member);
        let answer = match ask {
            Ask::Renew(after) => {
                self.ends.insert(member, now + self.kept.lease);
                // (Not kept for a resend: it may be long, and a later renewal brings the same.)
                return Answer::Renewed(self.news(after));
            }
            Ask::Claim(directory) => rules::claim(self, member, &directory),
            Ask::Release(directory, epoch) => rules::release(self, Claim { owner: member, epoch }, &directory),
            Ask::GiveUp(directory, epoch) => rules::give_up(self, Claim { owner: member, epoch }, &directory),
            Ask::Leave => match rules::leave(self, member) {
                Answer::Left => return Answer::Left,
                refused => refused,
            },
        };
        self.last.insert(member, (number, answer.clone()));
        answer
    }

    fn news(&self, after: Revision) -> News {
        let remembered = self.changes.front().map_or(self.kept.revision, |(first, _)| Revision(first.0 - 1));
        if after < remembered || after > self.kept.revision {
            return News::Gap(self.everything());
        }
        let since = self.changes.iter().filter(|(revision, _)| *revision > after);
        News::Changes(since.cloned().collect(), self.kept.revision)
    }

    /// All members and claims.
    pub fn everything(&self) -> Everything {
        let claims = self.kept.claims.iter();
        Everything {
            revision: self.kept.revision,
            members: self.kept.members.iter().map(|(id, known)| known.record(*id)).collect(),
            lost: self.kept.lost.clone(),
            claims: claims.map(|(directory, (claim, at))| (directory.clone(), *claim, *at)).collect(),
        }
    }
}

impl Rows for Embedded {
    fn revision(&self) -> Revision {
        self.kept.revision
    }

    fn new_member(&mut self) -> MemberId {
        let id = MemberId(self.kept.next_member);
        self.kept.next_member += 1;
        id
    }

    fn members(&self) -> &BTreeMap<MemberId, Known> {
        &self.kept.members
    }

    fn set_member(&mut self, id: MemberId, known: Option<Known>) {
        self.last.remove(&id);
        self.kept.numbers.remove(&id);
        if let Some(known) = known {
            self.kept.members.insert(id, known);
        } else {
            self.kept.members.remove(&id);
            self.ends.remove(&id);
        }
    }

    fn add_lost(&mut self, record: MemberRecord) {
        self.kept.lost.push(record);
    }

    fn claim_of(&self, directory: &Directory) -> Option<(Claim, Revision)> {
        self.kept.claims.get(directory).copied()
    }

    fn set_claim(&mut self, directory: &Directory, claim: Option<(Claim, Revision)>) {
        match claim {
            Some(claim) => drop(self.kept.claims.insert(directory.clone(), claim)),
            None => drop(self.kept.claims.remove(directory)),
        }
    }

    fn replaced(&self, directory: &Directory) -> Option<Claim> {
        self.kept.replaced.get(directory).copied()
    }

    fn set_replaced(&mut self, directory: &Directory, claim: Option<Claim>) {
        match claim {
            Some(claim) => drop(self.kept.replaced.insert(directory.clone(), claim)),
            None => drop(self.kept.replaced.remove(directory)),
        }
    }

    fn owns_some(&self, member: MemberId) -> bool {
        self.kept.claims.values().any(|(claim, _)| claim.owner == member)
    }

    fn note(&mut self, change: Change) {
        self.kept.revision.0 += 1;
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back((self.kept.revision, change));
    }
}
