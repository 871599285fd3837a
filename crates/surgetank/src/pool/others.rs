//! What programs of this node have changed at other members, until those have put it into the store.
//!
//! The danger that this avoids: a run that ends well while its output is not in the store.

pub mod contents;
pub mod reports;
pub mod stored;
pub mod written;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_core::namespace::StoreCopy;
use surgetank_core::report::{Lost, PathText, Progress, Undelivered, Verdict};
use surgetank_store::Staged;
use surgetank_types::clock::tick;

use super::call::{Answer, Ask, Call};
use super::link::Link;
use reports::Report;
use stored::Stored;
use written::Written;

/// How often members are asked without a need, so that little counts as lost if one is.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// A member may take so much longer than it was asked to.
const GRACE: Duration = Duration::from_secs(5);
/// The pool's process of this node may take so long to say who is a member.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a member is asked about the changes of another one's programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// They are due at once from now on.
    pub begins: bool,
    /// The answer may take so long.
    pub at_most_ms: u64,
    /// Only these, if there are any.
    pub paths: Vec<PathText>,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Drained {
    /// How far they are.
    pub progress: Progress,
    /// What is not in the store.
    pub verdict: Verdict,
    /// They are due at once.
    pub has_begun: bool,
}

/// Answers the wishes of other members.
pub trait Drains: Send + Sync {
    /// How far the changes of that member's programs are here.
    fn drained_for(&self, member: u32, wish: &Wish) -> Drained;
    /// Copies content that this member has for another one's file of this number to the store.
    fn stage_for(&self, number: u64, copy: &StoreCopy<'_>) -> io::Result<Staged>;
    /// Ends tries of that before this one, and waits for their end.
    fn end_stage_for(&self, number: u64, attempt: u64);
    /// Answers a command of another member's user about files of this member, in JSON.
    fn tend(&self, request: &[u8]) -> Vec<u8>;
    /// What this member says about itself; `None`: its pool's process does not answer.
    fn report(&self) -> Option<Report>;
}

/// A member, and its answer. `None`: it did not answer.
struct Other {
    member: u32,
    address: String,
    is_lost: bool,
    drained: Option<Drained>,
}

/// Asks other members.
pub struct Others {
    link: Arc<Link>,
    pub written: Arc<Written>,
    /// Up to when the others had everything in the store.
    pub stored: Stored,
    /// How much was put back when that was last looked at.
    puts_seen: AtomicU64,
}

impl Others {
    pub fn new(link: Arc<Link>) -> Self {
        let written = Written::default();
        if link.had_earlier() {
            written.had_earlier();
        }
        Self { link, written: Arc::new(written), stored: Stored::default(), puts_seen: AtomicU64::new(0) }
    }

    /// Asks each member how far the changes of this node's programs are there.
    fn asked(&self, wish: &Wish) -> Vec<Other> {
        let answer = self.link.status(PATIENCE);
        let is_known = answer.is_ok();
        let status = answer.unwrap_or_default();
        let me = self.link.member();
        let lost = status.lost.into_iter().map(|one| (one.member, one.address, true));
        let members = status.members.into_iter().map(|one| (one.member, one.address, false));
        let mut others: Vec<_> = members.chain(lost).filter(|(member, ..)| *member != me).collect();
        // Without the pool's registry it is not known which members live. (One that left in order has drained first.)
        let is_over = self.link.is_over();
        // (Without an answer of the own process, too: then a member with changes counts as one that does not answer.)
        if is_over || !is_known {
            let known: Vec<u32> = others.iter().map(|(member, ..)| *member).collect();
            let written = self.written.members().into_iter().filter(|member| !known.contains(member));
            others.extend(written.map(|member| (member, String::new(), is_over)));
            others.iter_mut().for_each(|(.., is_lost)| *is_lost |= is_over);
        }
        let ask = |(member, address, is_lost): (u32, String, bool)| {
            let drained = if is_lost { None } else { self.drained_at(member, wish) };
            Other { member, address, is_lost, drained }
        };
        others.into_iter().map(ask).collect()
    }

    fn drained_at(&self, member: u32, wish: &Wish) -> Option<Drained> {
        let asked = self.written.ask();
        let call = Call { uid: 0, gid: 0, ask: Ask::Drain { wish: serde_json::to_vec(wish).ok()? } };
        let until = tick() + Duration::from_millis(wish.at_most_ms) + GRACE;
        let drained: Option<Drained> = match self.link.call(member, &call, None, &mut |_| tick() < until) {
            Ok(Answer::Bytes(bytes)) => serde_json::from_slice(&bytes).ok(),
            _ => None,
        };
        // What is in no complete list is in the store.
        if let Some(Drained { verdict, .. }) = &drained
            && wish.paths.is_empty()
            && verdict.undelivered.is_empty()
            && verdict.conflicts.is_empty()
            && verdict.not_durable.more() == 0
        {
            self.written.answered(member, asked, verdict.not_durable.first.iter().map(|one| one.path.0.clone()));
        }
        drained
    }

    /// Adds what other members have left to `progress`. Also returns whether it is due at once at all of them.
    pub fn with_progress(&self, mut progress: Progress, wish: &Wish) -> (Progress, bool) {
        let mut all_have_begun = true;
        // (Before the members are asked: what is put back meanwhile is in no answer yet.)
        let is_pending = self.link.lost().keys().any(|lost| self.written.is_pending(*lost));
        let puts = self.written.puts();
        let has_put = self.puts_seen.swap(puts, Ordering::SeqCst) != puts;
        progress.settled &= self.link.is_over() || !is_pending && !has_put;
        for other in self.asked(wish) {
            let Some(Drained { progress: there, has_begun, .. }) = other.drained else {
                all_have_begun &= other.is_lost;
                // (A verdict names what is there. A member that is not lost may still answer. What is put back after a loss is
                // then to be drained.)
                let (is_over, member) = (self.link.is_over(), other.member);
                progress.settled &= if other.is_lost {
                    is_over || !self.written.is_pending(member)
                } else {
                    self.written.of(member).is_empty()
                };
                continue;
            };
            progress.undrained_files += there.undrained_files;
            progress.undrained_bytes += there.undrained_bytes;
            progress.undrained_operations += there.undrained_operations;
            progress.trouble = progress.trouble.or(there.trouble);
            progress.settled &= there.settled && has_begun;
            all_have_begun &= has_begun;
        }
        (progress, all_have_begun)
    }

    /// Adds what other members have not put into the store, and what is lost with them.
    pub fn with_verdict(&self, verdict: &mut Verdict, wish: &Wish) {
        self.stored.with_verdict(&self.link, verdict);
        for other in self.asked(wish) {
            let name = if other.address.is_empty() {
                format!("member {} of the pool", other.member)
            } else {
                format!("member {} of the pool ({})", other.member, other.address)
            };
            if let Some(Drained { verdict: there, .. }) = other.drained {
                verdict.add(there);
            } else if other.is_lost {
                for path in self.written.of(other.member) {
                    let why = format!("{name} was lost before it said that the file is in the store");
                    let at = PathText(name.clone().into_bytes());
                    verdict.lost_elsewhere.push(Lost { path: PathText(path), at, why });
                }
            } else if !self.written.of(other.member).is_empty() {
                let why = "it does not answer".to_owned();
                verdict.undelivered.push(Undelivered { operation: format!("changes at {name}"), why });
                verdict.waiting_operations += 1;
            }
        }
    }

    /// Asks now and then, until the agent ends.
    pub fn look_now_and_then(self: &Arc<Self>) {
        let others = Arc::downgrade(self);
        let look = move || {
            loop {
                thread::sleep(LOOK_EVERY);
                let Some(others) = others.upgrade() else { return };
                others.stored.look_at_next(&others.link);
                for member in others.written.members() {
                    let wish = Wish { begins: false, at_most_ms: 0, paths: Vec::new() };
                    drop(others.drained_at(member, &wish));
                }
            }
        };
        // (Without it more counts as lost if a member is.)
        let _ = thread::Builder::new().name("pool-others".to_owned()).spawn(look);
    }
}
