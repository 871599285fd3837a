//! The registry in a key-value server that all members reach: each member carries out its own requests there.
//!
//! [`Remote`] has the rules and no connection. It says which [`Exchange`] comes next, and takes what became of it. Rows and
//! their keys are in `remote/rows.rs`. Leases, lost members and lost writes:
//!
//! - **Leases** need no clock of the server. A renewal writes a value that is new each time. Each member looks at the
//!   values of all others. One that did not change for a lease is lost. The lease counts from when the observer received
//!   the value, by its own clock. The member itself counts from when it sent the renewal, so it stops before. An observer
//!   that was without contact for half a lease begins to observe again: an outage of the server expels no member.
//! - **Eras.** A server that restarts or fails over may have lost its last writes. Its identity differs then from the one
//!   in the head. Or the head is older than one that was seen. The member that notices it first begins a new era
//!   (`remote/eras.rs`): numbers jump, and for one lease each member asserts what it has and nothing else changes.
//!
//! Invariants:
//! - Each change guards the head and changes it. So all changes have one order, and an exchange that comes late does nothing.
//! - A renewal guards the value before it. So a late one never hides a later one.
//! - In an era nothing is granted until each renewal of the era before it has ended. At that time a member serves only if
//!   it was renewed in this era. It was, if it asserted its claims while its lease lasted. Then no other member had got
//!   them. If its lease had ended, it serves only after the quiet time, and only if all its claims stand.
//! - With replicas a renewal counts only if a replica has it. So a server that was cut off, and whose replica was
//!   promoted, renews no lease.
//!
//! The danger that this avoids: two owners of a directory after the server has forgotten one of them.

pub mod driver;
mod eras;
pub mod etcd;
pub mod exchange;
pub mod place;
pub mod redis;
mod rows;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::registry::{Answer, Ask, Change, Claim, Everything, Join, News, Refusal, Request};
use crate::rules::{self, Known, Rows};
use crate::view::View;
use crate::{Directory, Epoch, MemberId, Revision, Uptime};
use exchange::{Exchange, Exchanged, Key, Read, Write};
use rows::{Alive, Draft, Era, FORM, HEAD, Head, Last, Snapshot, encode, of_directory, of_member};

/// So long a member that did not make the pool's file waits for the one that did.
pub const FOUNDING: Duration = Duration::from_secs(2);

/// What all members of a pool know before they join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Random, one for each pool.
    pub id: [u8; 16],
    /// Only a process with the pool's secret knows it.
    pub proof: [u8; 32],
    /// How long a lease lasts, if this member begins the pool.
    pub lease: Duration,
    /// This member chose the pool's number, so no earlier pool has it. Otherwise a pool may have been forgotten.
    pub is_founder: bool,
    /// So many writes fit into one exchange.
    pub writes_max: usize,
}

/// What is wanted of the registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// A request.
    Ask(Request),
    /// Refuse every later join, if no other member is registered.
    End,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Carry this out, then call [`Remote::take`].
    Exchange(Exchange),
    /// The answer to the request.
    Answer(Answer),
    /// Whether every later join is refused.
    Ended(bool),
    /// There is no answer now: ask again. Members assert what they have, or the server's replica does not answer.
    Later,
}

/// One member's registry. Times are of its machine.
#[derive(Debug)]
pub struct Remote {
    pool: Pool,
    me: Option<Me>,
    /// The newest era that was seen, and its newest revision.
    known: Option<(Era, Revision)>,
    /// The highest revision of all eras.
    revision_max: Revision,
    /// What each other member's last renewal wrote, and when that was received first.
    observed: BTreeMap<MemberId, (Option<Vec<u8>>, Uptime)>,
    /// When the server was last heard.
    contact: Option<Uptime>,
    quiet_since: Option<(Era, Uptime)>,
    absent_since: Option<Uptime>,
    pending: Option<Pending>,
}

/// The member, since it joined.
#[derive(Debug)]
struct Me {
    id: MemberId,
    known: Known,
    /// What its last renewal wrote, as far as is known.
    alive: Alive,
    /// When the last renewal was sent that counts.
    renewed: Uptime,
    /// Its lease ended in an era before this one: another member may have its claims.
    unsure: bool,
    leaves: bool,
    /// Of its newest request that is not a renewal.
    number: u64,
    /// What was granted to it.
    owns: BTreeMap<Directory, Epoch>,
    /// What the others have, as far as news came.
    view: View,
    /// Claims of lost members that later ones replaced, as far as news came.
    replaced: BTreeMap<Directory, Claim>,
}

#[derive(Debug)]
struct Pending {
    wish: Wish,
    sent: Uptime,
    /// A renewal of this request was written: by a replica, too?
    renewed: Option<bool>,
    /// All rows are read.
    whole: bool,
    then: Then,
}

/// What the exchange under way does.
#[derive(Debug)]
enum Then {
    Look,
    Renew(Alive),
    Finish(Answer),
    End,
}

impl Remote {
    /// Of an agent that has not joined yet.
    pub fn new(pool: Pool) -> Self {
        Self {
            pool,
            me: None,
            known: None,
            revision_max: Revision(0),
            observed: BTreeMap::new(),
            contact: None,
            quiet_since: None,
            absent_since: None,
            pending: None,
        }
    }

    /// Which member it is, once it has joined.
    pub fn id(&self) -> Option<MemberId> {
        self.me.as_ref().map(|me| me.id)
    }

    /// Another member has announced a claim. Once all have acknowledged it, a server that forgets it does no harm.
    pub fn hear(&mut self, directory: &Directory, claim: Claim, revision: Revision) {
        let Some(me) = self.me.as_mut() else { return };
        me.note_replaced(directory, claim);
        me.view.learn(directory, Some(claim), revision);
    }

    /// Begins with a request. One that was under way is given up.
    pub fn begin(&mut self, now: Uptime, wish: Wish) -> Step {
        let mut pending = Pending { wish, sent: now, renewed: None, whole: false, then: Then::Look };
        if let Wish::Ask(Request::Of { member, term, number, ask }) = &pending.wish {
            let Some(me) = self.me.as_mut().filter(|me| me.id == *member) else {
                return Step::Answer(Answer::Refused(Refusal::NotAMember));
            };
            if me.known.term != *term {
                return Step::Answer(Answer::Refused(Refusal::Superseded));
            }
            me.leaves |= *ask == Ask::Leave;
            if matches!(ask, Ask::Renew(_)) {
                return self.renew(pending);
            }
            if *number < me.number {
                return Step::Answer(Answer::Refused(Refusal::Overtaken));
            }
            me.number = *number;
        }
        pending.whole = matches!(pending.wish, Wish::Ask(Request::Join(_) | Request::Of { ask: Ask::Leave, .. }));
        self.look(pending)
    }

    /// Takes what became of the exchange.
    pub fn take(&mut self, now: Uptime, exchanged: &Exchanged) -> Step {
        let Some(mut pending) = self.pending.take() else { return Step::Later };
        if self.contact.replace(now).is_none_or(|before| before + self.pool.lease / 2 < now) {
            self.observed.clear();
        }
        if exchanged.done {
            match std::mem::replace(&mut pending.then, Then::Look) {
                Then::Look => {}
                Then::Renew(alive) => {
                    pending.renewed = Some(exchanged.is_confirmed);
                    if let Some(me) = self.me.as_mut() {
                        me.alive = alive;
                    }
                }
                Then::Finish(answer) => return self.finish(&pending, answer, Snapshot(exchanged)),
                Then::End => return Step::Ended(true),
            }
        }
        self.decide(now, pending, Snapshot(exchanged))
    }

    fn exchange(&mut self, mut pending: Pending, then: Then, exchange: Exchange) -> Step {
        let mut reads = vec![Read::Key(HEAD.to_vec()), rows::all(b'm'), rows::all(b'a')];
        match &pending.wish {
            Wish::Ask(Request::Of { ask: Ask::Renew(after), .. }) => reads.push(rows::changes_after(*after)),
            Wish::Ask(Request::Of {
                member,
                ask: Ask::Claim(directory) | Ask::Release(directory, _) | Ask::GiveUp(directory, _),
                ..
            }) => {
                reads.push(Read::Key(of_member(b'n', *member)));
                if !pending.whole {
                    reads.push(Read::Key(of_directory(b'r', directory)));
                    reads.push(Read::Key(of_directory(b'c', directory)));
                }
            }
            Wish::Ask(Request::Of { member, ask: Ask::Leave, .. }) => reads.push(Read::Key(of_member(b'n', *member))),
            Wish::Ask(Request::Join(_)) | Wish::End => {}
        }
        if pending.whole {
            reads.extend([b'c', b'l', b'r'].map(rows::all));
        }
        pending.then = then;
        self.pending = Some(pending);
        Step::Exchange(Exchange { reads, ..exchange })
    }

    fn look(&mut self, pending: Pending) -> Step {
        self.exchange(pending, Then::Look, Exchange::default())
    }

    fn look_at_all(&mut self, pending: Pending) -> Step {
        self.look(Pending { whole: true, ..pending })
    }

    /// Changes rows, if the head is still the same.
    fn change(&mut self, pending: Pending, then: Then, before: Option<&Head>, writes: Vec<Write>) -> Step {
        let guards = vec![(HEAD.to_vec(), before.map(encode))];
        self.exchange(pending, then, Exchange { guards, writes, ..Exchange::default() })
    }

    fn renew(&mut self, pending: Pending) -> Step {
        let Some(me) = &self.me else { return self.look(pending) };
        let alive = Alive { counter: me.alive.counter + 1, ..me.alive.clone() };
        let key = of_member(b'a', me.id);
        let guards = vec![(key.clone(), Some(encode(&me.alive)))];
        let writes = vec![Write::Put(key, encode(&alive))];
        self.exchange(pending, Then::Renew(alive), Exchange { guards, writes, confirm: true, ..Exchange::default() })
    }

    fn decide(&mut self, now: Uptime, pending: Pending, rows: Snapshot<'_>) -> Step {
        let Some(head) = rows.row::<Head>(HEAD) else { return self.without_head(now, pending, rows) };
        self.absent_since = None;
        let joins = matches!(pending.wish, Wish::Ask(Request::Join(_)));
        let is_other = head.pool != self.pool.id || head.form != FORM;
        if (head.ended || is_other) && joins && self.me.is_none() {
            return self.join_of_ended(now, pending, &head, rows);
        }
        if is_other {
            return Step::Answer(Answer::Refused(Refusal::NotAMember));
        }
        if head.proof != self.pool.proof {
            return Step::Answer(Answer::Refused(Refusal::OtherSecret));
        }
        let went_back = self
            .known
            .as_ref()
            .is_some_and(|(era, revision)| head.generation < era.0 || head.era() == *era && head.revision < *revision);
        if head.server != rows.0.server || went_back {
            return self.begin_era(pending, Some(&head), rows);
        }
        self.see(&head);
        if let Some(me) = self.me.as_mut() {
            let (own, row) = ((me.known.term, me.known.instance), rows.alive(me.id));
            match row {
                Some(row) if (row.term, row.instance) == own && row.era == head.era() => {
                    // (A renewal whose answer was lost.)
                    me.alive = row;
                }
                Some(row) if row.term > me.known.term => return Step::Answer(Answer::Refused(Refusal::Superseded)),
                _ if head.quiet && self.may_assert(rows) => return self.assert(now, pending, &head, rows),
                _ => return Step::Answer(Answer::Refused(Refusal::NotAMember)),
            }
        }
        if head.quiet {
            return self.in_quiet(now, pending, &head, rows);
        }
        let silent = self.silent(now, head.lease, rows);
        if !silent.is_empty() {
            return self.lose(pending, &head, rows, &silent);
        }
        match pending.wish.clone() {
            Wish::Ask(Request::Join(join)) => self.join(pending, &head, rows, join),
            Wish::Ask(Request::Of { ask: Ask::Renew(after), .. }) => self.renewed(pending, &head, rows, after),
            Wish::Ask(Request::Of { member, number, ask, .. }) => {
                self.carry_out(pending, &head, rows, (member, number), ask)
            }
            Wish::End if head.ended => Step::Ended(true),
            Wish::End => {
                let is_alone = rows.members().keys().all(|id| self.me.as_ref().is_some_and(|me| me.id == *id));
                if !is_alone {
                    return Step::Ended(false);
                }
                let mut draft = Draft::new(&head, rows);
                draft.head.ended = true;
                let writes = draft.finish();
                self.change(pending, Then::End, Some(&head), writes)
            }
        }
    }

    fn see(&mut self, head: &Head) {
        if self.known.as_ref().is_none_or(|(era, _)| *era != head.era()) {
            self.observed.clear();
        }
        self.known = Some((head.era(), head.revision));
        self.revision_max = self.revision_max.max(head.revision);
        self.pool.lease = head.lease;
        if !head.quiet {
            self.quiet_since = None;
        }
    }

    /// Other members whose lease has ended, as far as this one has observed them.
    fn silent(&mut self, now: Uptime, lease: Duration, rows: Snapshot<'_>) -> Vec<MemberId> {
        let own = self.me.as_ref().map(|me| me.id);
        let members = rows.members();
        self.observed.retain(|id, _| members.contains_key(id));
        let mut silent = Vec::new();
        for id in members.into_keys().filter(|id| Some(*id) != own) {
            let value = rows.value(&of_member(b'a', id)).cloned();
            match self.observed.get(&id) {
                Some((before, since)) if *before == value => silent.extend((*since + lease <= now).then_some(id)),
                _ => drop(self.observed.insert(id, (value, now))),
            }
        }
        silent
    }

    /// Their claims stand. (As many as fit; the others come next.)
    fn lose(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>, silent: &[MemberId]) -> Step {
        let mut draft = Draft::new(head, rows);
        let mut guards = vec![(HEAD.to_vec(), Some(encode(head)))];
        for id in &silent[..silent.len().min(self.pool.writes_max / 8).max(1)] {
            let key = of_member(b'a', *id);
            guards.push((key.clone(), rows.value(&key).cloned()));
            rules::lose(&mut draft, *id);
        }
        let exchange = Exchange { guards, writes: draft.finish(), ..Exchange::default() };
        self.exchange(pending, Then::Look, exchange)
    }

    fn join(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>, join: Join) -> Step {
        let mut draft = Draft::new(head, rows);
        let instance = join.instance;
        draft.chance = chance_of(&instance);
        let (member, term) = match rules::join(&mut draft, join) {
            Ok(joined) => joined,
            Err(refusal) => return Step::Answer(Answer::Refused(refusal)),
        };
        // (A join that is repeated lengthens the lease.)
        let counter = rows.alive(member).filter(|row| row.instance == instance).map_or(0, |row| row.counter + 1);
        draft.put(of_member(b'a', member), &Alive { term, instance, era: head.era(), counter });
        let everything =
            Everything { revision: head.revision, members: Vec::new(), lost: Vec::new(), claims: Vec::new() };
        let answer = Answer::Joined { member, term, lease: head.lease, everything };
        let writes = draft.finish();
        self.change(pending, Then::Finish(answer), Some(head), writes)
    }

    fn renewed(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>, after: Revision) -> Step {
        let Some(is_confirmed) = pending.renewed else { return self.renew(pending) };
        if head.replicated && !is_confirmed {
            return Step::Later;
        }
        if rows.0.has_replicas && !head.replicated {
            let writes = vec![Write::Put(HEAD.to_vec(), encode(&Head { replicated: true, ..head.clone() }))];
            return self.change(pending, Then::Look, Some(head), writes);
        }
        let is_gap = after < head.forgotten || after > head.revision;
        let Some(me) = self.me.as_mut() else { return Step::Later };
        if (is_gap || me.unsure) && !pending.whole {
            return self.look_at_all(pending);
        }
        if me.unsure && !me.has_all(rows) {
            return self.expel(pending, head, rows);
        }
        (me.unsure, me.renewed) = (false, pending.sent);
        let news = if is_gap {
            me.replaced = rows.replaced();
            News::Gap(rows.everything(head.revision))
        } else {
            let changes = rows.changes(after);
            me.follow(&changes);
            News::Changes(changes, head.revision)
        };
        me.view.take(news.clone());
        Step::Answer(Answer::Renewed(news))
    }

    fn carry_out(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>, of: (MemberId, u64), ask: Ask) -> Step {
        let (member, number) = of;
        if self.me.as_ref().is_some_and(|me| me.unsure) {
            // (The next renewal decides whether it still is a member.)
            return Step::Later;
        }
        let Some(term) = self.me.as_ref().map(|me| me.known.term) else { return Step::Later };
        let last = rows.row::<Last>(&of_member(b'n', member));
        if let Some(last) = last.filter(|last| last.term == term && number <= last.number) {
            let is_again = number == last.number;
            return Step::Answer(if is_again { last.answer } else { Answer::Refused(Refusal::Overtaken) });
        }
        let mut draft = Draft::new(head, rows);
        let claim = |epoch| Claim { owner: member, epoch };
        let owns = |directory| self.me.as_ref().and_then(|me| me.owns.get(directory)).copied();
        // (It may have released it, and the server has forgotten that. No epoch comes back.)
        let is_unknown = |directory| {
            let stands = draft.claim_of(directory).map(|(claim, _)| claim);
            stands.is_some_and(|claim| claim.owner == member && owns(directory) != Some(claim.epoch))
        };
        let answer = match &ask {
            Ask::Claim(directory) if is_unknown(directory) => rules::grant(&mut draft, member, directory),
            Ask::Claim(directory) => rules::claim(&mut draft, member, directory),
            Ask::Release(directory, epoch) => rules::release(&mut draft, claim(*epoch), directory),
            Ask::GiveUp(directory, epoch) => rules::give_up(&mut draft, claim(*epoch), directory),
            Ask::Leave => rules::leave(&mut draft, member),
            Ask::Renew(_) => return Step::Later,
        };
        if draft.writes.is_empty() {
            return self.finish(&pending, answer, rows);
        }
        let is_last = answer == Answer::Left && draft.members().is_empty();
        if answer != Answer::Left {
            draft.put(of_member(b'n', member), &Last { term, number, answer: answer.clone() });
        }
        let writes = if is_last { vec![rows::everything()] } else { draft.finish() };
        self.change(pending, Then::Finish(answer), Some(head), writes)
    }

    /// The answer stands. `rows` are those after it.
    fn finish(&mut self, pending: &Pending, answer: Answer, rows: Snapshot<'_>) -> Step {
        let head = rows.row::<Head>(HEAD);
        if let Some(head) = &head {
            self.see(head);
        }
        if let (Answer::Joined { member, term, lease, .. }, Some(head)) = (&answer, &head) {
            let (Some(known), Some(alive)) = (rows.members().remove(member), rows.alive(*member)) else {
                return Step::Later;
            };
            let everything = rows.everything(head.revision);
            let view = View::new(everything.clone());
            let owns = view.owned_by(*member).map(|(directory, claim)| (directory.clone(), claim.epoch));
            let owns = owns.collect();
            let (renewed, replaced) = (pending.sent, rows.replaced());
            self.me = Some(Me {
                id: *member,
                known,
                alive,
                renewed,
                unsure: false,
                leaves: false,
                number: 0,
                owns,
                view,
                replaced,
            });
            let (member, term, lease) = (*member, *term, *lease);
            return Step::Answer(Answer::Joined { member, term, lease, everything });
        }
        if let (Some(me), Wish::Ask(Request::Of { ask, .. })) = (self.me.as_mut(), &pending.wish) {
            me.learn(ask, &answer, rows);
        }
        Step::Answer(answer)
    }
}

/// An agent's instance is random.
fn chance_of(instance: &[u8; 16]) -> u64 {
    instance.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

impl Me {
    /// Does each of its claims stand?
    fn has_all(&self, rows: Snapshot<'_>) -> bool {
        self.owns.iter().all(|(directory, epoch)| {
            let stands: Option<(Claim, Revision)> = rows.row(&of_directory(b'c', directory));
            stands.is_some_and(|(claim, _)| claim == Claim { owner: self.id, epoch: *epoch })
        })
    }

    /// Which claims replaced those of lost members.
    fn follow(&mut self, changes: &[(Revision, Change)]) {
        for (revision, change) in changes {
            match change {
                _ if *revision <= self.view.revision() => continue,
                Change::Claimed(directory, claim) => {
                    if claim.epoch.0 < revision.0 {
                        self.replaced.remove(directory);
                    }
                    self.note_replaced(directory, *claim);
                }
                Change::Released(directory) => drop(self.replaced.remove(directory)),
                _ => {}
            }
            self.view.take(News::Changes(vec![(*revision, change.clone())], *revision));
        }
    }

    fn note_replaced(&mut self, directory: &Directory, claim: Claim) {
        let before = self.view.claim(directory).filter(|before| before.owner != claim.owner);
        if let Some(lost) = before.filter(|before| before.epoch < claim.epoch) {
            self.replaced.insert(directory.clone(), lost);
        }
    }

    fn learn(&mut self, ask: &Ask, answer: &Answer, rows: Snapshot<'_>) {
        match (ask, answer) {
            (Ask::Claim(directory), Answer::Granted { epoch, revision, .. }) => {
                match rows.row(&of_directory(b'r', directory)) {
                    Some(replaced) => drop(self.replaced.insert(directory.clone(), replaced)),
                    None => drop(self.replaced.remove(directory)),
                }
                self.owns.insert(directory.clone(), *epoch);
                self.view.learn(directory, Some(Claim { owner: self.id, epoch: *epoch }), *revision);
            }
            (Ask::GiveUp(directory, _), Answer::Owned { claim, revision }) => {
                self.owns.remove(directory);
                self.view.learn(directory, Some(*claim), *revision);
            }
            (Ask::Release(directory, _) | Ask::GiveUp(directory, _), Answer::Released(revision)) => {
                self.owns.remove(directory);
                self.view.learn(directory, None, *revision);
            }
            (Ask::Release(directory, epoch) | Ask::GiveUp(directory, epoch), Answer::Refused(Refusal::NotOwner))
                if self.owns.get(directory) == Some(epoch) =>
            {
                self.owns.remove(directory);
            }
            _ => {}
        }
    }
}

/// What a server's rows say. For tests.
#[doc(hidden)]
pub fn everything_in(rows: &BTreeMap<Key, Vec<u8>>) -> Option<(Everything, bool)> {
    let exchanged = Exchanged { rows: rows.clone(), ..Exchanged::default() };
    let head = Snapshot(&exchanged).row::<Head>(HEAD)?;
    Some((Snapshot(&exchanged).everything(head.revision), head.quiet))
}
