//! The engine that is embedded in the pool's first member: one process, nothing to install. It does not outlive its
//! machine. Its supervisor keeps its state ([`Kept`]) while the agent is replaced.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::registry::{Answer, Ask, Change, Claim, Everything, Join, MemberRecord, News, Refusal, Request};
use crate::{Directory, Epoch, MemberId, Revision, Term, Uptime};

/// So many changes are remembered one by one. A member that missed more gets everything.
const CHANGES_MAX: usize = 4096;

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
    lost: Vec<MemberRecord>,
    claims: BTreeMap<Directory, (Claim, Revision)>,
    /// Claims of lost members that later ones replaced.
    replaced: BTreeMap<Directory, Claim>,
    /// No agent joins any more.
    ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    term: Term,
    instance: [u8; 16],
    address: String,
    temporaries: String,
    /// The number of its last request.
    number: u64,
}

impl Known {
    fn record(&self, id: MemberId) -> MemberRecord {
        let (address, temporaries) = (self.address.clone(), self.temporaries.clone());
        MemberRecord { id, term: self.term, address, temporaries }
    }
}

impl Embedded {
    /// A registry without members. A lease lasts `lease` from the moment at which the engine hears of its member.
    pub fn new(lease: Duration) -> Self {
        let (members, lost, claims, replaced) = Default::default();
        let kept = Kept { lease, revision: Revision(0), next_member: 1, members, lost, claims, replaced, ended: false };
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
        for id in over {
            self.kept.lost.extend(self.kept.members.get(&id).map(|known| known.record(id)));
            self.remove(id);
            self.note(Change::Lost(id));
        }
    }

    fn join(&mut self, now: Uptime, join: Join) -> Answer {
        if self.kept.ended {
            return Answer::Refused(Refusal::Ended);
        }
        let known = self.kept.members.iter().find(|(_, known)| known.instance == join.instance);
        let (member, term) = match (known.map(|(id, known)| (*id, known.term)), join.resumes) {
            (Some(again), _) => again,
            (None, Some((id, term))) => match self.kept.members.get(&id) {
                None => return Answer::Refused(Refusal::NotAMember),
                Some(before) if term <= before.term => return Answer::Refused(Refusal::Superseded),
                Some(_) => {
                    self.enter(id, term, join);
                    (id, term)
                }
            },
            (None, None) => {
                let id = MemberId(self.kept.next_member);
                self.kept.next_member += 1;
                self.enter(id, Term(1), join);
                (id, Term(1))
            }
        };
        self.ends.insert(member, now + self.kept.lease);
        Answer::Joined { member, term, lease: self.kept.lease, everything: self.everything() }
    }

    fn enter(&mut self, id: MemberId, term: Term, join: Join) {
        let Join { instance, address, temporaries, .. } = join;
        let known = Known { term, instance, address, temporaries, number: 0 };
        let record = known.record(id);
        self.kept.members.insert(id, known);
        self.last.remove(&id);
        self.note(Change::Joined(record));
    }

    fn ask_of(&mut self, now: Uptime, member: MemberId, term: Term, number: u64, ask: Ask) -> Answer {
        let Some(known) = self.kept.members.get_mut(&member) else { return Answer::Refused(Refusal::NotAMember) };
        if term != known.term {
            return Answer::Refused(Refusal::Superseded);
        }
        if number <= known.number {
            let again = self.last.get(&member).filter(|(last, _)| *last == number);
            return again.map_or(Answer::Refused(Refusal::Overtaken), |(_, answer)| answer.clone());
        }
        known.number = number;
        self.last.remove(&member);
        let answer = match ask {
            Ask::Renew(after) => {
                self.ends.insert(member, now + self.kept.lease);
                // (Not kept for a resend: it may be long, and a later renewal brings the same.)
                return Answer::Renewed(self.news(after));
            }
            Ask::Claim(directory) => self.claim(member, directory),
            Ask::Release(directory, epoch) => self.release(Claim { owner: member, epoch }, directory),
            Ask::GiveUp(directory, epoch) => self.give_up(Claim { owner: member, epoch }, directory),
            Ask::Leave if self.kept.claims.values().any(|(claim, _)| claim.owner == member) => {
                Answer::Refused(Refusal::StillOwns)
            }
            Ask::Leave => {
                self.remove(member);
                self.note(Change::Left(member));
                return Answer::Left;
            }
        };
        self.last.insert(member, (number, answer.clone()));
        answer
    }

    fn claim(&mut self, member: MemberId, directory: Directory) -> Answer {
        let epoch = match self.kept.claims.get(&directory) {
            Some((claim, _)) if claim.owner == member => claim.epoch,
            Some((claim, _)) if self.kept.members.contains_key(&claim.owner) => {
                return Answer::Owned { claim: *claim, revision: self.kept.revision };
            }
            // (The owner's lease has ended: it has stopped before.)
            before => {
                if let Some((lost, _)) = before {
                    self.kept.replaced.insert(directory.clone(), *lost);
                }
                let epoch = Epoch(self.kept.revision.0 + 1);
                let claim = Claim { owner: member, epoch };
                self.note(Change::Claimed(directory.clone(), claim));
                self.kept.claims.insert(directory, (claim, self.kept.revision));
                epoch
            }
        };
        Answer::Granted { epoch, revision: self.kept.revision, members: self.kept.members.keys().copied().collect() }
    }

    fn release(&mut self, claim: Claim, directory: Directory) -> Answer {
        if self.kept.claims.get(&directory).map(|(stands, _)| *stands) != Some(claim) {
            return Answer::Refused(Refusal::NotOwner);
        }
        self.kept.claims.remove(&directory);
        self.kept.replaced.remove(&directory);
        self.note(Change::Released(directory));
        Answer::Released(self.kept.revision)
    }

    fn give_up(&mut self, claim: Claim, directory: Directory) -> Answer {
        let stands = self.kept.claims.get(&directory).map(|(stands, _)| *stands) == Some(claim);
        let Some(lost) = self.kept.replaced.get(&directory).copied().filter(|_| stands) else {
            return self.release(claim, directory);
        };
        self.kept.replaced.remove(&directory);
        self.note(Change::Claimed(directory.clone(), lost));
        self.kept.claims.insert(directory, (lost, self.kept.revision));
        Answer::Owned { claim: lost, revision: self.kept.revision }
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

    fn remove(&mut self, id: MemberId) {
        self.kept.members.remove(&id);
        self.ends.remove(&id);
        self.last.remove(&id);
    }

    fn note(&mut self, change: Change) {
        self.kept.revision.0 += 1;
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back((self.kept.revision, change));
    }
}
