//! A member: keeps its lease, claims directories, and answers the claims of others.
//!
//! States of a directory that this member wants: asked (the registry has not answered), announced (the claim stands, and
//! some members have not acknowledged it), owned, releasing. A directory that is not listed here is the store's or a peer's.
//!
//! The dangers that this avoids: a member that believes what the store said before another member's change; an owner that
//! serves after its lease; a claim that its owner does not know, so that all wait for its owner.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::registry::{Answer, Ask, Claim, MemberRecord, Refusal, Request};
use crate::view::{Differences, View};
use crate::{Directory, Epoch, MemberId, Revision, Term, Uptime};

/// How long a member waits for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// So long before the end of its lease a member stops serving. At least how long a kernel believes an answer, and how
    /// far two clocks may drift apart in a lease.
    pub margin: Duration,
    /// The lease is renewed so often.
    pub renew: Duration,
    /// What has no answer is asked again after this time.
    pub again: Duration,
}

/// Who decides the names of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Authority {
    /// The store. The first change claims it.
    Store,
    /// This member.
    Ours(Epoch),
    /// This member, once the others have acknowledged the claim, or the store, once it is released. Changes wait.
    /// Readers read what the store has.
    Between,
    /// Another member.
    Peer(Claim),
    /// A member that is lost. What it had not published is lost with it, and any member may claim the directory.
    Lost(Claim),
}

/// What members say to each other about claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The sender owns the directory.
    Claimed {
        /// The directory.
        directory: Directory,
        /// Number of the ownership.
        epoch: Epoch,
        /// The revision of the claim, or a later one at which it stood.
        revision: Revision,
    },
    /// The sender knows it, and believes nothing of the directory any more.
    Forgotten {
        /// The directory.
        directory: Directory,
        /// Number of the ownership.
        epoch: Epoch,
    },
}

/// What the agent has to do for its member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send it to the registry.
    Ask(Request),
    /// Send it to the other member.
    Tell(MemberId, Message),
    /// Forget what is believed of the directory, wait until the kernel has too, then call [`Member::forgotten`].
    Forget(Directory, Claim),
    /// The directory's authority may be another one now: what waited for it looks again.
    Changed(Directory),
    /// A member has left, or was lost. Its number is never used again.
    Gone(MemberId),
    /// The lease had run out and was renewed: all that waited looks again.
    Serves,
    /// The membership has ended. The agent stops serving, and writes down what it holds.
    Expelled,
}

#[derive(Debug)]
enum Held {
    /// By requests from this number on. The answer to an earlier one is about an ownership that has ended.
    Asked(u64),
    Announced {
        epoch: Epoch,
        revision: Revision,
        missing: BTreeSet<MemberId>,
    },
    Owned(Epoch),
    Releasing(Epoch),
    /// Nothing was done with it.
    GivingUp(Epoch),
}

/// One member's side. All times are of its own machine.
#[derive(Debug)]
pub struct Member {
    id: MemberId,
    term: Term,
    times: Times,
    lease: Duration,
    lease_ends: Uptime,
    renew_at: Uptime,
    number: u64,
    /// Requests under way: number, and when each was sent.
    asked: BTreeMap<u64, (Uptime, Ask)>,
    view: View,
    held: BTreeMap<Directory, (Held, Uptime)>,
    /// Directories of lost members that this one claims: the claim that it replaces.
    taking: BTreeMap<Directory, Claim>,
    /// Claims of other members in the place of a member of which no end is known here. They are acknowledged after the
    /// news of that revision, so that nothing is accepted from a lost owner once the next one serves.
    unheard: Vec<(Revision, Directory, Claim)>,
    leaving: bool,
    /// Since when it serves nothing, to leave.
    left: Option<Uptime>,
    /// When leaving is tried again.
    leave_at: Uptime,
    expelled: bool,
    outputs: VecDeque<Output>,
}

impl Member {
    /// After the registry's answer to a join that was sent at `sent`. `owned`: the directories that the catalog knows as
    /// owned. All other claims of an earlier term are given back: that term may have refused requests for them.
    ///
    /// Errors: the registry's refusal, or its answer to something else.
    pub fn new(sent: Uptime, answer: Answer, times: Times, owned: &[(Directory, Epoch)]) -> Result<Self, Answer> {
        let Answer::Joined { member, term, lease, everything } = answer else { return Err(answer) };
        let view = View::new(everything);
        let hold = |(directory, claim): (&Directory, Claim)| {
            let is_owned = owned.contains(&(directory.clone(), claim.epoch));
            let held = if is_owned { Held::Owned(claim.epoch) } else { Held::GivingUp(claim.epoch) };
            (directory.clone(), (held, Uptime::ZERO))
        };
        let held = view.owned_by(member).map(hold).collect();
        Ok(Self {
            id: member,
            term,
            times,
            lease,
            lease_ends: sent + lease,
            renew_at: sent + times.renew,
            number: 0,
            asked: BTreeMap::new(),
            view,
            held,
            taking: BTreeMap::new(),
            unheard: Vec::new(),
            leaving: false,
            left: None,
            leave_at: Uptime::MAX,
            expelled: false,
            outputs: VecDeque::new(),
        })
    }

    /// Which member this is.
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// Its incarnation.
    pub fn term(&self) -> Term {
        self.term
    }

    /// May it serve? Ask again before each answer and each publication.
    pub fn serves(&self, now: Uptime) -> bool {
        self.serves_until().is_some_and(|until| now < until)
    }

    /// Until when it may serve, as far as is known now: a renewal makes it later. It may be past. `None`: the membership
    /// has ended, or the member is leaving and owns nothing.
    pub fn serves_until(&self) -> Option<Uptime> {
        let may_serve = !self.expelled && self.left.is_none();
        may_serve.then(|| self.lease_ends.saturating_sub(self.times.margin))
    }

    /// The members, as far as this one knows.
    pub fn members(&self) -> impl Iterator<Item = MemberId> {
        self.view.members().map(|record| record.id)
    }

    /// The members, with what is known of each.
    pub fn records(&self) -> impl Iterator<Item = &MemberRecord> {
        self.view.members()
    }

    /// Members whose lease ended before they left, as far as is known.
    pub fn lost(&self) -> impl Iterator<Item = &MemberRecord> {
        self.view.lost()
    }

    /// All claims that are known, of this member and of others.
    pub fn claims(&self) -> impl Iterator<Item = (&Directory, Claim)> {
        self.view.claims()
    }

    /// What is known of a member.
    pub fn record_of(&self, id: MemberId) -> Option<&MemberRecord> {
        self.view.members().find(|record| record.id == id)
    }

    /// Who decides the names of the directory, as far as this member knows. `None`: it may not serve.
    pub fn authority(&self, now: Uptime, directory: &Directory) -> Option<Authority> {
        self.serves(now).then(|| {
            let held = self.held.get(directory).map(|(held, _)| held);
            if let (Some(_), Some(of)) = (held, self.taking.get(directory)) {
                // (Unless another member was first.)
                let is_lost = |claim: Claim| claim.owner == self.id || self.view.is_lost(directory);
                if self.view.claim(directory).is_none_or(is_lost) {
                    return Authority::Lost(*of);
                }
            }
            match (held, self.view.claim(directory)) {
                // (It may have replaced a lost member's: the registry says so.)
                (Some(Held::GivingUp(epoch)), _) => Authority::Lost(Claim { owner: self.id, epoch: *epoch }),
                (Some(Held::Owned(epoch)), _) => Authority::Ours(*epoch),
                // A claim that was acknowledged counts, also while this member's own request is under way.
                (_, Some(claim)) if claim.owner != self.id && self.view.is_lost(directory) => Authority::Lost(claim),
                (_, Some(claim)) if claim.owner != self.id => Authority::Peer(claim),
                (None, None) => Authority::Store,
                // (Without `held`: a claim that this member does not know of, and that the next renewal gives back.)
                (Some(_), _) | (None, Some(_)) => Authority::Between,
            }
        })
    }

    /// Claims the directory if it is the store's, or a lost member's.
    pub fn claim(&mut self, now: Uptime, directory: &Directory) {
        let authority = self.authority(now, directory);
        if self.leaving || self.held.contains_key(directory) {
            return;
        }
        if let Some(Authority::Lost(of)) = authority {
            self.taking.insert(directory.clone(), of);
        }
        if matches!(authority, Some(Authority::Store | Authority::Lost(_))) {
            self.held.insert(directory.clone(), (Held::Asked(self.number + 1), now + self.times.again));
            self.ask(now, Ask::Claim(directory.clone()));
        }
    }

    /// Gives an owned directory back. The caller has published all changes, and answers no request about it any more.
    pub fn release(&mut self, now: Uptime, directory: &Directory) {
        if let Some((Held::Owned(epoch), _)) = self.held.get(directory) {
            let epoch = *epoch;
            self.held.insert(directory.clone(), (Held::Releasing(epoch), now + self.times.again));
            self.ask(now, Ask::Release(directory.clone(), epoch));
        }
    }

    /// Gives up a claim that is not granted yet, or that some members do not acknowledge for longer than the caller waits.
    /// A directory that is owned stays so.
    pub fn give_up(&mut self, now: Uptime, directory: &Directory) {
        match self.held.get(directory) {
            // (If it is granted after all, the next renewal gives it back.)
            Some((Held::Asked(_), _)) => {
                self.held.remove(directory);
                self.taking.remove(directory);
            }
            Some((Held::Announced { epoch, .. }, _)) => {
                let epoch = *epoch;
                self.give_up_claim(now, directory.clone(), epoch);
            }
            _ => {}
        }
    }

    fn give_up_claim(&mut self, now: Uptime, directory: Directory, epoch: Epoch) {
        self.held.insert(directory.clone(), (Held::GivingUp(epoch), now + self.times.again));
        self.ask(now, Ask::GiveUp(directory, epoch));
    }

    /// Has this ownership of its own ended, and does this member know that? Otherwise it lasts, or is still to begin (others
    /// may know of a claim before its owner), and a request that names it is answered later.
    pub fn has_ended(&self, directory: &Directory, epoch: Epoch) -> bool {
        match self.held.get(directory) {
            Some((Held::Releasing(_) | Held::GivingUp(_), _)) => true,
            Some((Held::Owned(present) | Held::Announced { epoch: present, .. }, _)) => *present != epoch,
            Some((Held::Asked(_), _)) | None => self.view.has_ended(directory, epoch),
        }
    }

    /// How many claims and releases are not done yet.
    pub fn unfinished(&self) -> usize {
        self.held.values().filter(|(held, _)| !matches!(held, Held::Owned(_))).count()
    }

    /// Ends the membership once nothing is owned any more. From now on nothing is claimed. Once nothing is owned, nothing
    /// is served either, and after the margin the registry is asked: the others do not wait for a member that has left.
    pub fn leave(&mut self, now: Uptime) {
        (self.leaving, self.leave_at) = (true, now + self.times.again);
        self.leave_if_free(now);
    }

    fn leave_if_free(&mut self, now: Uptime) {
        if self.leaving && self.held.is_empty() {
            let left = *self.left.get_or_insert(now);
            if now >= left + self.times.margin {
                self.ask(now, Ask::Leave);
            }
        }
    }

    /// Asks the registry what has changed: a peer says that it does not own what this member believes it to own.
    pub fn look_again(&mut self, now: Uptime) {
        let again = self.times.again;
        if !self.asked.values().any(|(sent, ask)| matches!(ask, Ask::Renew(_)) && *sent + again > now) {
            self.renew(now);
        }
    }

    /// Sends what is due. Call it at [`Self::wake`] at the latest.
    pub fn tick(&mut self, now: Uptime) {
        if self.expelled {
            return;
        }
        let again = self.times.again;
        self.asked.retain(|_, (sent, _)| *sent + self.lease > now);
        if now >= self.renew_at {
            self.renew(now);
        }
        let due: Vec<Directory> = self
            .held
            .iter()
            .filter(|(_, (held, at))| *at <= now && !matches!(held, Held::Owned(_)))
            .map(|(directory, _)| directory.clone())
            .collect();
        let mut announces = false;
        for directory in due {
            let Some((held, at)) = self.held.get_mut(&directory) else { continue };
            *at = now + again;
            match held {
                Held::Asked(_) => self.ask(now, Ask::Claim(directory)),
                Held::Releasing(epoch) => {
                    let epoch = *epoch;
                    self.ask(now, Ask::Release(directory, epoch));
                }
                Held::GivingUp(epoch) => {
                    let epoch = *epoch;
                    self.ask(now, Ask::GiveUp(directory, epoch));
                }
                Held::Announced { epoch, revision, missing } => {
                    announces = true;
                    for id in missing.iter() {
                        let message =
                            Message::Claimed { directory: directory.clone(), epoch: *epoch, revision: *revision };
                        self.outputs.push_back(Output::Tell(*id, message));
                    }
                }
                Held::Owned(_) => {}
            }
        }
        if self.leaving && self.leave_at <= now {
            self.leave_at = now + again;
            self.leave_if_free(now);
        }
        if announces {
            // A member that does not answer may be lost.
            self.look_again(now);
        }
    }

    /// When [`Self::tick`] has something to do.
    pub fn wake(&self) -> Uptime {
        if self.expelled {
            return Uptime::MAX;
        }
        let unfinished = self.held.values().filter(|(held, _)| !matches!(held, Held::Owned(_))).map(|(_, at)| *at);
        unfinished.chain([self.renew_at, self.leave_at]).min().unwrap_or(self.renew_at)
    }

    /// What is to be done now, in order.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// The registry's answer to the request with this number, which this term sent.
    pub fn answered(&mut self, now: Uptime, number: u64, answer: Answer) {
        let asked = self.asked.remove(&number);
        match answer {
            Answer::Renewed(news) => {
                let served = self.serves(now);
                if let Some((sent, _)) = asked {
                    self.lease_ends = self.lease_ends.max(sent + self.lease);
                }
                let Differences { changed, gone } = self.view.take(news);
                self.outputs.extend(gone.into_iter().filter(|id| *id != self.id).map(Output::Gone));
                self.outputs.extend(changed.into_iter().map(Output::Changed));
                self.acknowledge_unheard(now);
                if !served && self.serves(now) {
                    self.outputs.push_back(Output::Serves);
                }
                self.count_missing();
                self.give_back(now);
            }
            Answer::Granted { epoch, revision, members } => {
                if let Some((_, Ask::Claim(directory))) = asked {
                    self.granted(now, directory, number, (epoch, revision), members);
                }
            }
            Answer::Owned { claim, revision } => {
                if let Some((_, Ask::GiveUp(directory, epoch))) = &asked {
                    self.view.learn(directory, Some(claim), revision);
                    self.ended(directory, *epoch, None);
                }
                if let Some((_, Ask::Claim(directory))) = asked {
                    self.view.learn(&directory, Some(claim), revision);
                    if matches!(self.held.get(&directory), Some((Held::Asked(first), _)) if number >= *first) {
                        self.held.remove(&directory);
                        self.taking.remove(&directory);
                    }
                    self.outputs.push_back(Output::Changed(directory));
                    // (The owner may be lost, or have released it.)
                    self.look_again(now);
                }
            }
            Answer::Released(revision) => {
                if let Some((_, Ask::Release(directory, epoch) | Ask::GiveUp(directory, epoch))) = asked {
                    self.ended(&directory, epoch, Some(revision));
                }
            }
            Answer::Refused(Refusal::NotOwner) => {
                // An earlier release of the same epoch had its effect. (Another member may own the directory by now.)
                if let Some((_, Ask::GiveUp(directory, epoch))) = &asked
                    && self.view.claim(directory) == Some(Claim { owner: self.id, epoch: *epoch })
                {
                    // (Whose it is since is news.)
                    self.look_again(now);
                } else if let Some((_, Ask::Release(directory, epoch) | Ask::GiveUp(directory, epoch))) = asked {
                    self.ended(&directory, epoch, None);
                }
            }
            Answer::Refused(
                Refusal::Overtaken | Refusal::StillOwns | Refusal::Ended | Refusal::OtherStore | Refusal::OtherSecret,
            ) => {}
            Answer::Joined { .. } => {}
            Answer::Left | Answer::Refused(Refusal::NotAMember | Refusal::Superseded) => {
                if !std::mem::replace(&mut self.expelled, true) {
                    self.outputs.push_back(Output::Expelled);
                }
            }
        }
    }

    /// Another member said it.
    pub fn told(&mut self, now: Uptime, from: MemberId, message: Message) {
        match message {
            Message::Claimed { directory, epoch, revision } => {
                let claim = Claim { owner: from, epoch };
                let before = self.view.claim(&directory).map(|claim| claim.owner);
                self.view.learn(&directory, Some(claim), revision);
                let is_of_another =
                    before.is_some_and(|owner| owner != from && owner != self.id && self.view.is_member(owner));
                let is_unheard = self.unheard.iter().any(|(_, known, of)| *known == directory && *of == claim);
                if is_unheard || is_of_another && self.view.revision() < revision {
                    if !is_unheard {
                        self.unheard.push((revision, directory.clone(), claim));
                    }
                    self.look_again(now);
                } else {
                    self.outputs.push_back(Output::Forget(directory.clone(), claim));
                }
                self.outputs.push_back(Output::Changed(directory));
            }
            Message::Forgotten { directory, epoch } => {
                if let Some((Held::Announced { epoch: announced, missing, .. }, _)) = self.held.get_mut(&directory)
                    && *announced == epoch
                {
                    missing.remove(&from);
                    self.count_missing();
                }
            }
        }
    }

    fn acknowledge_unheard(&mut self, now: Uptime) {
        let known = self.view.revision();
        for (_, directory, claim) in self.unheard.extract_if(.., |(revision, ..)| *revision <= known) {
            self.outputs.push_back(Output::Forget(directory, claim));
        }
        if !self.unheard.is_empty() {
            self.look_again(now);
        }
    }

    /// Nothing is believed of the directory any more ([`Output::Forget`]).
    pub fn forgotten(&mut self, directory: Directory, claim: Claim) {
        let message = Message::Forgotten { directory, epoch: claim.epoch };
        self.outputs.push_back(Output::Tell(claim.owner, message));
    }

    fn granted(
        &mut self,
        now: Uptime,
        directory: Directory,
        number: u64,
        at: (Epoch, Revision),
        members: Vec<MemberId>,
    ) {
        let (epoch, revision) = at;
        // (It was lost while this one asked.)
        if let Some(before) = self.view.claim(&directory).filter(|claim| claim.owner != self.id) {
            self.taking.entry(directory.clone()).or_insert(before);
        }
        self.view.learn(&directory, Some(Claim { owner: self.id, epoch }), revision);
        if let Some((held, again)) = self.held.get_mut(&directory)
            && matches!(held, Held::Asked(first) if number >= *first)
        {
            let missing = members.into_iter().filter(|id| *id != self.id).collect();
            // (Announced at once.)
            (*held, *again) = (Held::Announced { epoch, revision, missing }, now);
            self.count_missing_of(&directory);
            self.tick(now);
        }
    }

    /// Members that are gone need not acknowledge anything.
    fn count_missing(&mut self) {
        let announced: Vec<Directory> = self
            .held
            .iter()
            .filter(|(_, (held, _))| matches!(held, Held::Announced { .. }))
            .map(|(d, _)| d.clone())
            .collect();
        for directory in announced {
            let Some((Held::Announced { missing, revision, .. }, _)) = self.held.get_mut(&directory) else { continue };
            // (A member that joined at a later revision than is known here is not gone.)
            if *revision <= self.view.revision() {
                missing.retain(|id| self.view.is_member(*id));
            }
            self.count_missing_of(&directory);
        }
    }

    fn count_missing_of(&mut self, directory: &Directory) {
        if let Some((held, _)) = self.held.get_mut(directory)
            && let Held::Announced { epoch, missing, .. } = held
            && missing.is_empty()
        {
            *held = Held::Owned(*epoch);
            self.taking.remove(directory);
            self.outputs.push_back(Output::Changed(directory.clone()));
        }
    }

    fn ended(&mut self, directory: &Directory, epoch: Epoch, revision: Option<Revision>) {
        if matches!(self.held.get(directory), Some((Held::Releasing(of) | Held::GivingUp(of), _)) if *of == epoch) {
            self.held.remove(directory);
            self.taking.remove(directory);
            if let Some(revision) = revision {
                self.view.learn(directory, None, revision);
            }
            self.outputs.push_back(Output::Changed(directory.clone()));
        }
    }

    /// The registry has claims of this member that it does not hold: a request that was given up had its effect.
    fn give_back(&mut self, now: Uptime) {
        let unknown: Vec<(Directory, Epoch)> = self
            .view
            .owned_by(self.id)
            .filter(|(directory, _)| !self.held.contains_key(*directory))
            .map(|(directory, claim)| (directory.clone(), claim.epoch))
            .collect();
        for (directory, epoch) in unknown {
            self.give_up_claim(now, directory, epoch);
        }
    }

    fn renew(&mut self, now: Uptime) {
        self.renew_at = now + self.times.renew;
        self.ask(now, Ask::Renew(self.view.revision()));
    }

    fn ask(&mut self, now: Uptime, ask: Ask) {
        self.number += 1;
        self.asked.insert(self.number, (now, ask.clone()));
        let request = Request::Of { member: self.id, term: self.term, number: self.number, ask };
        self.outputs.push_back(Output::Ask(request));
    }
}
