//! Eras: what members do when the server may have lost writes.
//!
//! A pool's first head, and each one after writes may have been lost, begins an *era*. Steps of a new one:
//!
//! 1. The member that notices it changes the head. Revision and member numbers jump above all that it knows of, so no
//!    epoch and no member's number is used twice. All members get everything instead of news, later.
//! 2. *Quiet*: each member asserts its record and its claims, and what it knows of others. Of two claims of one directory
//!    the one with the higher epoch stands. A member that another one knows as lost is lost. Nothing is granted, released,
//!    joined or reported. A member whose lease lasts is renewed.
//! 3. A member that has seen the era for one lease ends the quiet time. Members that have asserted nothing are lost.
//!
//! Why no directory has two owners that serve:
//! - Each lease of the era before it ends within the quiet time: its renewal was sent before the new head was written.
//! - Of members whose lease lasts at step 2, none has another one's claim: that is granted only after a lease has ended.
//! - A member whose lease had ended may assert a claim that another one has got since. So it is not renewed in the quiet
//!   time. Afterwards it is only if all its claims stand, as they do if no other member knew better.
//!
//! What may be wrong, if the server forgot it and no member that knows it asserts anything in the quiet time:
//! - A release: the directory then counts as lost with its member.
//! - A loss: the lost member goes on with its claims, and may overwrite what another one did in their directories since.

use super::exchange::{Exchange, Write};
use super::rows::{Alive, Draft, HEAD, Head, Snapshot, encode, everything, no_changes, of_directory, of_member};
use super::{FORM, FOUNDING, Pending, Remote, Step, Then, Wish, chance_of};
use crate::registry::{Answer, Ask, Claim, News, Refusal, Request};
use crate::rules::{self, Known};
use crate::{MemberId, Revision, Uptime};

/// Revisions of writes that were lost, and that no member knows, are fewer.
const REVISIONS: u64 = 1 << 20;
/// Where the revisions of a pool begin whose rows no member remembers. A random number is added.
const FORGOTTEN_REVISIONS: u64 = 1 << 48;

impl Remote {
    /// The pool is new, or all its rows were lost.
    pub(super) fn without_head(&mut self, now: Uptime, pending: Pending, rows: Snapshot<'_>) -> Step {
        match (&self.me, &pending.wish) {
            // (Its leaving ended the pool.)
            (Some(me), _) if me.leaves => Step::Answer(Answer::Left),
            (Some(_), _) => self.begin_era(pending, None, rows),
            (None, Wish::Ask(Request::Join(join))) => {
                let since = *self.absent_since.get_or_insert(now);
                if !self.pool.is_founder && now < since + FOUNDING {
                    return Step::Later;
                }
                let mut head = self.first_head(rows);
                if !self.pool.is_founder {
                    // Members of a pool that was forgotten may serve until their leases end. Their numbers do not come back.
                    (head.quiet, head.generation) = (true, 2);
                    head.revision = Revision(FORGOTTEN_REVISIONS + (chance_of(&join.instance) >> 24));
                    head.forgotten = head.revision;
                }
                // (It may have its effect though no answer comes. Then others join, and it is forgotten again.)
                self.pool.is_founder = false;
                let writes = vec![Write::Put(HEAD.to_vec(), encode(&head))];
                self.change(pending, Then::Look, None, writes)
            }
            (None, _) => Step::Later,
        }
    }

    fn first_head(&self, rows: Snapshot<'_>) -> Head {
        Head {
            form: FORM,
            pool: self.pool.id,
            proof: self.pool.proof,
            lease: self.pool.lease,
            revision: Revision(0),
            forgotten: Revision(0),
            next_member: 1,
            ended: false,
            generation: 1,
            server: rows.0.server.clone(),
            quiet: false,
            replicated: rows.0.has_replicas,
        }
    }

    pub(super) fn begin_era(&mut self, pending: Pending, before: Option<&Head>, rows: Snapshot<'_>) -> Step {
        let mut head = before.cloned().unwrap_or_else(|| self.first_head(rows));
        let known = self.known.as_ref().map_or(0, |(era, _)| era.0);
        head.generation = head.generation.max(known) + 1;
        head.server = rows.0.server.clone();
        (head.quiet, head.replicated) = (true, rows.0.has_replicas);
        self.jump(&mut head);
        let guards = vec![(HEAD.to_vec(), before.map(encode))];
        let writes = vec![no_changes(), Write::Put(HEAD.to_vec(), encode(&head))];
        let only_at = Some(rows.0.server.clone());
        self.exchange(pending, Then::Look, Exchange { guards, writes, only_at, ..Exchange::default() })
    }

    /// Above all numbers that are known here.
    fn jump(&self, head: &mut Head) {
        // (An era that was forgotten began elsewhere, so its epochs do not come back.)
        let mix = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let chance = head.server.iter().fold(0xcbf2_9ce4_8422_2325, mix) % REVISIONS;
        head.revision = Revision(head.revision.max(self.revision_max).0 + REVISIONS + chance);
        head.forgotten = head.revision;
    }

    /// Is its place still its own?
    pub(super) fn may_assert(&self, rows: Snapshot<'_>) -> bool {
        let Some(me) = &self.me else { return false };
        let same = |known: &Known| known.instance == [0; 16] || known.instance == me.known.instance;
        rows.members().get(&me.id).is_none_or(|known| same(known) || known.term < me.known.term)
    }

    /// Writes what this member has, and what it knows of others. It takes several exchanges if that is much.
    pub(super) fn assert(&mut self, now: Uptime, pending: Pending, head: &Head, rows: Snapshot<'_>) -> Step {
        if !pending.whole {
            return self.look_at_all(pending);
        }
        let Some(me) = self.me.as_mut() else { return Step::Later };
        let lasts = !me.unsure && now < me.renewed + head.lease * 7 / 8;
        let present: std::collections::BTreeMap<_, _> = rows.claims().collect();
        let newer = |directory: &_, epoch| {
            let stands: Option<&(Claim, Revision)> = present.get(directory);
            stands.filter(|(claim, _)| claim.epoch > epoch).map(|(claim, _)| *claim)
        };
        let id = me.id;
        let is_behind = |directory: &_, epoch| newer(directory, epoch).is_some_and(|claim| claim.owner != id);
        let known_lost = rows.lost();
        if !lasts && me.owns.iter().any(|(directory, epoch)| is_behind(directory, *epoch))
            || known_lost.contains_key(&id)
        {
            return self.expel(pending, head, rows);
        }
        // (Only a release whose answer was lost can be behind.)
        me.owns.retain(|directory, epoch| !is_behind(directory, *epoch));
        me.unsure = !lasts;
        let mut draft = Draft::new(head, rows);
        let owns = me.owns.iter().map(|(directory, epoch)| (directory, Claim { owner: id, epoch: *epoch }));
        let others = me.view.claims();
        let others = others.filter(|(directory, claim)| claim.owner != id && !me.owns.contains_key(*directory));
        for (directory, claim) in owns.chain(others) {
            if present.get(directory).is_none_or(|(stands, _)| stands.epoch < claim.epoch) {
                draft.put(of_directory(b'c', directory), &(claim, Revision(claim.epoch.0)));
                if let Some(replaced) = me.replaced.get(directory) {
                    draft.put(of_directory(b'r', directory), replaced);
                }
            }
        }
        let members = rows.members();
        for record in me.view.lost().filter(|record| record.id != id && !known_lost.contains_key(&record.id)) {
            draft.put(of_member(b'l', record.id), record);
            draft.writes.extend([b'm', b'a', b'n'].map(|kind| Write::Delete(of_member(kind, record.id))));
        }
        for record in me.view.members().filter(|record| record.id != id) {
            if !members.contains_key(&record.id) && !known_lost.contains_key(&record.id) {
                let (address, temporaries) = (record.address.clone(), record.temporaries.clone());
                let (term, role) = (record.term, record.role);
                let known = Known { term, instance: [0; 16], address, temporaries, role };
                draft.put(of_member(b'm', record.id), &known);
            }
        }
        let mut then = Then::Look;
        if draft.writes.len() + 3 > self.pool.writes_max {
            draft.writes.truncate(self.pool.writes_max - 3);
        } else {
            let alive = Alive { era: head.era(), counter: me.alive.counter + 1, ..me.alive.clone() };
            draft.put(of_member(b'm', id), &me.known);
            draft.put(of_member(b'a', id), &alive);
            then = Then::Renew(alive);
        }
        if self.revision_max > head.revision {
            self.jump(&mut draft.head);
        }
        draft.head.revision.0 += 1;
        draft.head.forgotten = draft.head.revision;
        let (guards, writes) = (vec![(HEAD.to_vec(), Some(encode(head)))], draft.finish());
        self.exchange(pending, then, Exchange { guards, writes, confirm: true, ..Exchange::default() })
    }

    /// Another member has what this one had, so this one is lost.
    pub(super) fn expel(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>) -> Step {
        let answer = Answer::Refused(Refusal::NotAMember);
        let own = self.me.as_ref().map(|me| me.id).filter(|id| rows.members().contains_key(id));
        let Some(own) = own else { return Step::Answer(answer) };
        let mut draft = Draft::new(head, rows);
        rules::lose(&mut draft, own);
        let writes = draft.finish();
        self.change(pending, Then::Finish(answer), Some(head), writes)
    }

    pub(super) fn in_quiet(&mut self, now: Uptime, pending: Pending, head: &Head, rows: Snapshot<'_>) -> Step {
        let since = match &self.quiet_since {
            Some((era, since)) if *era == head.era() => *since,
            _ => self.quiet_since.insert((head.era(), now)).1,
        };
        if since + head.lease <= now {
            return self.end_quiet(pending, head, rows);
        }
        let Wish::Ask(Request::Of { ask: Ask::Renew(after), .. }) = pending.wish else { return Step::Later };
        let Some(is_confirmed) = pending.renewed else { return self.renew(pending) };
        let Some(me) = self.me.as_mut() else { return Step::Later };
        let lasts = !me.unsure && now < me.renewed + head.lease * 7 / 8;
        if !lasts || head.replicated && !is_confirmed {
            me.unsure |= !lasts;
            return Step::Later;
        }
        me.renewed = pending.sent;
        Step::Answer(Answer::Renewed(News::Changes(Vec::new(), after)))
    }

    /// Members that have asserted nothing are lost. (As many as fit; the others come next.)
    fn end_quiet(&mut self, pending: Pending, head: &Head, rows: Snapshot<'_>) -> Step {
        let mut draft = Draft::new(head, rows);
        let mut guards = vec![(HEAD.to_vec(), Some(encode(head)))];
        let missing = |id: &MemberId| rows.alive(*id).is_none_or(|alive| alive.era != head.era());
        let mut missing: Vec<MemberId> = rows.members().into_keys().filter(missing).collect();
        let fit = (self.pool.writes_max / 8).max(1);
        draft.head.quiet = missing.len() > fit;
        missing.truncate(fit);
        for id in missing {
            let key = of_member(b'a', id);
            guards.push((key.clone(), rows.value(&key).cloned()));
            rules::lose(&mut draft, id);
        }
        draft.head.revision.0 += 1;
        draft.head.forgotten = draft.head.revision;
        let exchange = Exchange { guards, writes: draft.finish(), ..Exchange::default() };
        self.exchange(pending, Then::Look, exchange)
    }

    /// Its last member goes soon, or has died before it went. Or it is another pool, whose members may all be dead.
    pub(super) fn join_of_ended(&mut self, now: Uptime, pending: Pending, head: &Head, rows: Snapshot<'_>) -> Step {
        let silent = self.silent(now, head.lease, rows);
        if silent.len() < rows.members().len() {
            let refusal = if head.ended { Refusal::Ended } else { Refusal::OtherStore };
            return Step::Answer(Answer::Refused(refusal));
        }
        self.change(pending, Then::Look, Some(head), vec![everything()])
    }
}
