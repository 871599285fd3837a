//! Calls of one member to another, each carried out once.
//!
//! A caller sends a call until it has the reply, always with the same number. States of a call at its receiver: running,
//! then done with its reply, until the caller needs no reply of that number any more. Numbers count per caller, term of the
//! caller, and receiver. Each side sends on the connection that it made.
//!
//! The dangers that this avoids: a call that a lost connection repeats has its effect twice; a call that comes late, after
//! its caller gave it up or went away, has one at all; a reply reaches another call of the same number.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, PoisonError};
use std::time::{Duration, Instant};

use surgetank_types::clock::tick;

use super::links::{Route, SENDING};
use super::{Membership, Packet, Shared, hold};
use crate::frame::FRAME_BYTES_MAX;
use crate::{MemberId, Term};

/// Bytes of the longest body of a call, and of a reply: the frame has its numbers, too.
pub const BODY_BYTES_MAX: usize = FRAME_BYTES_MAX - 64;
/// So many threads wait for a next call.
pub(super) const IDLE_MAX: usize = 8;
/// So many calls run at once. The caller of another one sends it again.
const RUNNING_MAX: usize = 1024;
/// Without a reply, a call is sent again after this time. The time doubles with each try.
const AGAIN: Duration = Duration::from_secs(1);
/// It doubles up to here, so that the bodies of slow calls do not fill the network.
const AGAIN_MAX: Duration = Duration::from_secs(4);
/// A call that could not be sent is tried again after this time.
const UNSENT: Duration = Duration::from_millis(100);
/// After a connection was lost, a call is sent again so long after the last time.
const CUT: Duration = Duration::from_millis(50);

/// Why a call has no reply. It may have been carried out, except after [`CallFailed::TooLong`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFailed {
    /// The member has left the pool, or was lost.
    Gone,
    /// No reply came in time: the member is not known or not reached, or its call still runs.
    TimedOut,
    /// This agent has left the pool, or was lost.
    Expelled,
    /// The body has more than [`BODY_BYTES_MAX`] bytes.
    TooLong,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "the other agent has left the pool, or was lost",
            Self::TimedOut => "the other agent did not answer in time",
            Self::Expelled => "this agent has left the pool, or was lost",
            Self::TooLong => "a request to another agent is too long",
        })
    }
}

impl std::error::Error for CallFailed {}

/// The calls of this member, and those that it carries out.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// By receiver.
    own: HashMap<MemberId, Own>,
    /// By caller.
    tables: HashMap<MemberId, Table>,
    /// Members that never come back. Their late calls are not carried out.
    gone: HashSet<MemberId>,
    /// Threads that carry out a call, or send a reply.
    running: usize,
    /// This agent is not a member any more.
    expelled: bool,
}

/// Calls to one member.
#[derive(Debug, Default)]
struct Own {
    last: u64,
    unanswered: BTreeMap<u64, Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Of this call alone: many may wait.
    changed: Arc<Condvar>,
    outcome: Option<Result<Vec<u8>, CallFailed>>,
    /// A connection was lost, and with it the call or its reply.
    is_lost: bool,
}

/// Calls of one member.
#[derive(Debug)]
struct Table {
    term: Term,
    /// Its caller needs no reply of a lower number.
    oldest: u64,
    calls: BTreeMap<u64, Progress>,
}

#[derive(Debug)]
enum Progress {
    Running,
    Done {
        reply: Arc<Packet>,
        /// A thread sends the reply.
        is_sending: bool,
    },
}

/// What to do with a call that has come.
#[derive(Debug)]
enum Accepted {
    CarryOut,
    SendReply(Arc<Packet>),
    /// Its reply is under way, or its caller does not want one, or sends it again later.
    Ignore,
}

impl Calls {
    /// Returns the number of a new call, the lowest number without a reply, and what wakes the caller.
    fn begin(&mut self, to: MemberId) -> Result<(u64, u64, Arc<Condvar>), CallFailed> {
        if self.expelled {
            return Err(CallFailed::Expelled);
        }
        if self.gone.contains(&to) {
            return Err(CallFailed::Gone);
        }
        let own = self.own.entry(to).or_default();
        own.last += 1;
        let waiting = own.unanswered.entry(own.last).or_default();
        let changed = waiting.changed.clone();
        let oldest = own.unanswered.first_key_value().map_or(own.last, |(oldest, _)| *oldest);
        Ok((own.last, oldest, changed))
    }

    fn waiting(&mut self, to: MemberId, number: u64) -> Option<&mut Waiting> {
        self.own.get_mut(&to)?.unanswered.get_mut(&number)
    }

    fn end(&mut self, to: MemberId, number: u64) {
        if let Some(own) = self.own.get_mut(&to) {
            own.unanswered.remove(&number);
            if own.unanswered.is_empty() && self.gone.contains(&to) {
                self.own.remove(&to);
            }
        }
    }

    pub(super) fn take_reply(&mut self, from: MemberId, number: u64, body: Vec<u8>) {
        if let Some(waiting) = self.waiting(from, number) {
            waiting.outcome.get_or_insert(Ok(body));
            waiting.changed.notify_all();
        }
    }

    /// A connection with the member was lost.
    pub(super) fn send_again(&mut self, to: MemberId) {
        for waiting in self.own.get_mut(&to).into_iter().flat_map(|own| own.unanswered.values_mut()) {
            waiting.is_lost = true;
            waiting.changed.notify_all();
        }
    }

    /// The member has left, or was lost.
    pub(super) fn gone(&mut self, member: MemberId) {
        self.gone.insert(member);
        self.tables.remove(&member);
        self.fail(member, CallFailed::Gone);
        self.own.retain(|id, own| *id != member || !own.unanswered.is_empty());
    }

    /// This agent is not a member any more.
    pub(super) fn expelled(&mut self) {
        self.expelled = true;
        for member in self.own.keys().copied().collect::<Vec<_>>() {
            self.fail(member, CallFailed::Expelled);
        }
    }

    fn fail(&mut self, member: MemberId, why: CallFailed) {
        for waiting in self.own.get_mut(&member).into_iter().flat_map(|own| own.unanswered.values_mut()) {
            waiting.outcome.get_or_insert(Err(why));
            waiting.changed.notify_all();
        }
    }

    /// A call has come. Unless it is ignored, a thread is counted until [`Self::sent`].
    fn accept(&mut self, (id, term): (MemberId, Term), number: u64, oldest: u64) -> Accepted {
        if self.gone.contains(&id) {
            return Accepted::Ignore;
        }
        let table = self.tables.entry(id).or_insert_with(|| Table::new(term));
        if term < table.term {
            return Accepted::Ignore;
        }
        if term > table.term {
            *table = Table::new(term);
        }
        if oldest > table.oldest {
            table.oldest = oldest;
            table.calls = table.calls.split_off(&oldest);
        }
        if number < table.oldest || self.running >= RUNNING_MAX {
            return Accepted::Ignore;
        }
        let accepted = match table.calls.get_mut(&number) {
            Some(Progress::Running | Progress::Done { is_sending: true, .. }) => return Accepted::Ignore,
            Some(Progress::Done { reply, is_sending }) => {
                *is_sending = true;
                Accepted::SendReply(reply.clone())
            }
            None => {
                table.calls.insert(number, Progress::Running);
                Accepted::CarryOut
            }
        };
        self.running += 1;
        accepted
    }

    /// The system starts no thread for it: the caller sends it again.
    fn not_begun(&mut self, from: (MemberId, Term), number: u64) {
        if let Some(calls) = self.calls_of(from)
            && matches!(calls.get(&number), Some(Progress::Running))
        {
            calls.remove(&number);
        }
        self.sent(from, number);
    }

    /// A call has been carried out. Returns whether its reply is to be sent.
    fn done(&mut self, from: (MemberId, Term), number: u64, reply: &Arc<Packet>) -> bool {
        let progress = self.calls_of(from).and_then(|calls| calls.get_mut(&number));
        let is_wanted = progress.is_some();
        if let Some(progress) = progress {
            *progress = Progress::Done { reply: reply.clone(), is_sending: true };
        }
        is_wanted
    }

    /// The thread has sent the reply, or failed to.
    fn sent(&mut self, from: (MemberId, Term), number: u64) {
        self.running -= 1;
        if let Some(Progress::Done { is_sending, .. }) = self.calls_of(from).and_then(|calls| calls.get_mut(&number)) {
            *is_sending = false;
        }
    }

    fn calls_of(&mut self, (id, term): (MemberId, Term)) -> Option<&mut BTreeMap<u64, Progress>> {
        self.tables.get_mut(&id).filter(|table| table.term == term).map(|table| &mut table.calls)
    }
}

impl Table {
    fn new(term: Term) -> Self {
        Self { term, oldest: 0, calls: BTreeMap::new() }
    }
}

impl Membership {
    /// Has another member carry out a call ([`super::Host::call`]), and returns its reply. Waits up to `patience`, also for
    /// a member that is not known yet. The receiving agent carries it out at most once; an agent that replaces that one may
    /// carry it out again.
    ///
    /// Errors: no reply came. Except for [`CallFailed::TooLong`] the call may have been carried out, or, after
    /// [`CallFailed::TimedOut`], still be.
    pub fn call(&self, to: MemberId, body: Vec<u8>, patience: Duration) -> Result<Vec<u8>, CallFailed> {
        let until = tick() + patience;
        if body.len() > BODY_BYTES_MAX {
            return Err(CallFailed::TooLong);
        }
        let (number, oldest, changed) = hold(&self.shared.calls).begin(to)?;
        let packet = Packet::Call { number, oldest, body };
        let outcome = self.shared.await_reply(to, (number, &changed), &packet, until);
        hold(&self.shared.calls).end(to, number);
        outcome
    }
}

impl Shared {
    fn await_reply(
        self: &Arc<Self>,
        to: MemberId,
        (number, changed): (u64, &Condvar),
        packet: &Packet,
        until: Instant,
    ) -> Result<Vec<u8>, CallFailed> {
        let mut pause = AGAIN;
        loop {
            let is_sent = self.send_patiently((to, None), packet, until.saturating_duration_since(tick()).min(SENDING));
            let sent = tick();
            let again = sent + if is_sent { pause } else { UNSENT };
            let mut calls = hold(&self.calls);
            let is_lost = loop {
                let Some(waiting) = calls.waiting(to, number) else { return Err(CallFailed::Expelled) };
                if let Some(outcome) = waiting.outcome.take() {
                    return outcome;
                }
                let now = tick();
                if now >= until {
                    return Err(CallFailed::TimedOut);
                }
                let again = if waiting.is_lost { again.min(sent + CUT) } else { again };
                if now >= again {
                    break std::mem::take(&mut waiting.is_lost);
                }
                let left = again.min(until) - now;
                calls = changed.wait_timeout(calls, left).unwrap_or_else(PoisonError::into_inner).0;
            };
            pause = if is_lost || !is_sent { AGAIN } else { (pause * 2).min(AGAIN_MAX) };
        }
    }

    /// Sends a packet whose place among the others does not matter, or queues it for a connection that is being made.
    /// Returns whether it did. The caller holds no lock.
    fn send_patiently(
        self: &Arc<Self>,
        (to, term): (MemberId, Option<Term>),
        packet: &Packet,
        patience: Duration,
    ) -> bool {
        let route = {
            let mut state = hold(&self.state);
            let route = self.send_to(&mut state, to, term, packet);
            if matches!(route, Route::Nowhere) {
                self.look(&mut state);
            }
            route
        };
        match route {
            Route::Queued => true,
            Route::Nowhere => false,
            Route::Link(number, link) => link.offer(packet, patience).unwrap_or_else(|_| {
                self.lost_link(&mut hold(&self.state), to, number);
                false
            }),
        }
    }

    /// A member calls.
    pub(super) fn take_call(self: &Arc<Self>, from: (MemberId, Term), number: u64, oldest: u64, body: Vec<u8>) {
        let is_replaced = {
            let state = hold(&self.state);
            let known = state.member.as_ref().and_then(|member| member.record_of(from.0));
            known.is_some_and(|known| known.term > from.1)
        };
        if is_replaced {
            return;
        }
        let accepted = hold(&self.calls).accept(from, number, oldest);
        let shared = self.clone();
        let is_begun = match accepted {
            Accepted::Ignore => return,
            Accepted::SendReply(reply) => self.callers.run(move || shared.reply(from, number, &reply)),
            Accepted::CarryOut => self.callers.run(move || {
                // (Its hook reports the panic. Without a reply the caller would wait for nothing.)
                let body = catch_unwind(AssertUnwindSafe(|| shared.host.call(from.0, body))).unwrap_or_default();
                let body = if body.len() > BODY_BYTES_MAX { Vec::new() } else { body };
                let reply = Arc::new(Packet::Replied { number, body });
                if hold(&shared.calls).done(from, number, &reply) {
                    shared.reply(from, number, &reply);
                } else {
                    hold(&shared.calls).sent(from, number);
                }
            }),
        };
        if is_begun.is_err() {
            hold(&self.calls).not_begun(from, number);
        }
    }

    /// Sends a reply to the agent that called. If that fails the agent calls again.
    fn reply(self: &Arc<Self>, (to, term): (MemberId, Term), number: u64, reply: &Packet) {
        // (The second time after the connection turned out to be closed.)
        let _ = (0..2).any(|_| self.send_patiently((to, Some(term)), reply, SENDING));
        hold(&self.calls).sent((to, term), number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: (MemberId, Term) = (MemberId(2), Term(1));

    fn reply(number: u64) -> Arc<Packet> {
        Arc::new(Packet::Replied { number, body: number.to_le_bytes().to_vec() })
    }

    fn carry_out(calls: &mut Calls, from: (MemberId, Term), number: u64, oldest: u64) {
        assert!(matches!(calls.accept(from, number, oldest), Accepted::CarryOut), "{number}");
        assert!(calls.done(from, number, &reply(number)));
        calls.sent(from, number);
    }

    #[test]
    fn repeated_call_gets_the_first_reply() {
        let mut calls = Calls::default();
        assert!(matches!(calls.accept(CALLER, 1, 1), Accepted::CarryOut));
        assert!(matches!(calls.accept(CALLER, 1, 1), Accepted::Ignore));
        assert!(calls.done(CALLER, 1, &reply(1)));
        // Its thread sends the reply.
        assert!(matches!(calls.accept(CALLER, 1, 1), Accepted::Ignore));
        calls.sent(CALLER, 1);
        let Accepted::SendReply(again) = calls.accept(CALLER, 1, 1) else { panic!("not answered again") };
        assert!(matches!(&*again, Packet::Replied { number: 1, body } if body[..] == 1_u64.to_le_bytes()));
        calls.sent(CALLER, 1);
        assert_eq!(calls.running, 0);
    }

    #[test]
    fn late_call_is_not_carried_out() {
        let mut calls = Calls::default();
        carry_out(&mut calls, CALLER, 1, 1);
        carry_out(&mut calls, CALLER, 3, 3);
        for number in [1, 2] {
            assert!(matches!(calls.accept(CALLER, number, number), Accepted::Ignore), "{number}");
        }
        // The caller gives up a call that runs.
        assert!(matches!(calls.accept(CALLER, 4, 3), Accepted::CarryOut));
        carry_out(&mut calls, CALLER, 5, 5);
        assert!(!calls.done(CALLER, 4, &reply(4)));
        calls.sent(CALLER, 4);
        assert!(matches!(calls.accept(CALLER, 4, 4), Accepted::Ignore));
        assert_eq!(calls.running, 0);
    }

    #[test]
    fn replies_are_kept_until_the_caller_has_them() {
        let mut calls = Calls::default();
        for number in 1..10_000 {
            carry_out(&mut calls, CALLER, number, number.saturating_sub(5).max(1));
            assert!(calls.tables[&CALLER.0].calls.len() <= 6);
        }
    }

    #[test]
    fn later_agent_of_a_member_counts_from_one() {
        let mut calls = Calls::default();
        carry_out(&mut calls, CALLER, 7, 7);
        assert!(matches!(calls.accept(CALLER, 8, 7), Accepted::CarryOut));
        let later = (CALLER.0, Term(2));
        carry_out(&mut calls, later, 1, 1);
        // What the earlier agent asked has no place any more.
        assert!(!calls.done(CALLER, 8, &reply(8)));
        calls.sent(CALLER, 8);
        assert!(matches!(calls.accept(CALLER, 9, 9), Accepted::Ignore));
        assert_eq!(calls.running, 0);
    }

    #[test]
    fn member_that_is_gone_calls_and_is_called_in_vain() {
        let mut calls = Calls::default();
        carry_out(&mut calls, CALLER, 1, 1);
        let (number, ..) = calls.begin(CALLER.0).unwrap();
        calls.gone(CALLER.0);
        assert!(calls.tables.is_empty());
        assert!(matches!(calls.accept(CALLER, 1, 1), Accepted::Ignore));
        assert_eq!(calls.waiting(CALLER.0, number).unwrap().outcome, Some(Err(CallFailed::Gone)));
        assert_eq!(calls.begin(CALLER.0).unwrap_err(), CallFailed::Gone);
        calls.expelled();
        assert_eq!(calls.begin(MemberId(9)).unwrap_err(), CallFailed::Expelled);
    }

    #[test]
    fn calls_beyond_the_limit_are_left_to_their_caller() {
        let mut calls = Calls::default();
        for number in 1..=RUNNING_MAX as u64 {
            assert!(matches!(calls.accept(CALLER, number, 1), Accepted::CarryOut), "{number}");
        }
        let next = RUNNING_MAX as u64 + 1;
        assert!(matches!(calls.accept(CALLER, next, 1), Accepted::Ignore));
        calls.not_begun(CALLER, 1);
        carry_out(&mut calls, CALLER, next, 1);
        carry_out(&mut calls, CALLER, 1, 1);
    }
}
