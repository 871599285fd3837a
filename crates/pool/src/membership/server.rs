//! The thread that asks a registry in a key-value server. It has the only connection there.
//!
//! Renewals come first: a claim that waits does not end a lease. Of several renewals only the newest is asked. What has no
//! answer the member asks again, so nothing is kept for long.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use surgetank_types::clock::{tick, uptime};

use super::{RETRY, Shared, hold};
use crate::member::Message;
use crate::registry::{Answer, Ask, Claim, Refusal, Request};
use crate::remote::driver::{self, Outcome};
use crate::remote::place::Place;
use crate::remote::{Pool, Remote, Wish};
use crate::{Directory, MemberId, Revision, Uptime};

/// So many requests wait at most.
const REQUESTS_MAX: usize = 4096;

/// What waits for the thread.
pub(super) struct Asking {
    place: Place,
    name: String,
    pool: Pool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    renewal: Option<Request>,
    others: VecDeque<(Uptime, Request)>,
    /// Claims that other members have announced.
    heard: Vec<(Directory, Claim, Revision)>,
    /// Every later join is to be refused: what became of it.
    end: Option<Option<bool>>,
}

impl Asking {
    pub(super) fn new(place: Place, name: String, pool: Pool) -> Self {
        Self { place, name, pool, queue: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    pub(super) fn ask(&self, request: Request) {
        let mut queue = hold(&self.queue);
        match &request {
            Request::Of { ask: Ask::Renew(_), .. } => queue.renewal = Some(request),
            // (It is said again until it is answered.)
            Request::Join(_) => queue.others = VecDeque::from([(uptime(), request)]),
            Request::Of { ask, .. } => {
                // (The member says it again while it waits.)
                queue.others.retain(|(_, other)| !matches!(other, Request::Of { ask: before, .. } if before == ask));
                if queue.others.len() < REQUESTS_MAX {
                    queue.others.push_back((uptime(), request));
                }
            }
        }
        self.changed.notify_all();
    }

    pub(super) fn hear(&self, from: MemberId, message: &Message) {
        if let Message::Claimed { directory, epoch, revision } = message {
            let mut queue = hold(&self.queue);
            if queue.heard.len() < REQUESTS_MAX {
                queue.heard.push((directory.clone(), Claim { owner: from, epoch: *epoch }, *revision));
            }
        }
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Every later join is to be refused, if no other member is registered. Returns whether it is.
    pub(super) fn end(&self, patience: Duration) -> bool {
        let until = tick() + patience;
        let mut queue = hold(&self.queue);
        queue.end = Some(None);
        self.changed.notify_all();
        loop {
            let left = until.saturating_duration_since(tick());
            match queue.end {
                Some(Some(has_ended)) => return has_ended,
                Some(None) if !left.is_zero() => {
                    queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                _ => {
                    queue.end = None;
                    return false;
                }
            }
        }
    }

    /// The next wish. A renewal comes first.
    fn next(&self) -> Option<Wish> {
        let mut queue = hold(&self.queue);
        if let Some(renewal) = queue.renewal.take() {
            return Some(Wish::Ask(renewal));
        }
        let now = uptime();
        while let Some((sent, request)) = queue.others.pop_front() {
            // (Its member does not wait for it any more.)
            if now < sent + self.pool.lease {
                return Some(Wish::Ask(request));
            }
        }
        (queue.end == Some(None)).then_some(Wish::End)
    }

    /// For the time in which nothing waits, at most.
    fn wait(&self, at_most: Duration) {
        let queue = hold(&self.queue);
        if queue.renewal.is_none() && queue.others.is_empty() {
            drop(self.changed.wait_timeout(queue, at_most));
        }
    }

    /// Runs until the membership ends.
    pub(super) fn run(&self, shared: &Arc<Shared>) {
        let mut remote = Remote::new(self.pool.clone());
        let mut server = driver::server(&self.place, &self.name);
        while !shared.stops() {
            let Some(wish) = self.next() else {
                self.wait(RETRY);
                continue;
            };
            let number = match &wish {
                Wish::Ask(Request::Of { number, .. }) => *number,
                Wish::Ask(Request::Join(_)) | Wish::End => 0,
            };
            let renewal = match &wish {
                Wish::Ask(request @ Request::Of { ask: Ask::Renew(_), .. }) => Some(request.clone()),
                _ => None,
            };
            for (directory, claim, revision) in std::mem::take(&mut hold(&self.queue).heard) {
                remote.hear(&directory, claim, revision);
            }
            match driver::carry_out(&mut remote, &mut *server, &uptime, wish) {
                Ok(Outcome::Answer(Answer::Refused(refusal @ (Refusal::Ended | Refusal::OtherStore)))) => {
                    // (It may end while this agent waits.)
                    let failure = match refusal {
                        Refusal::Ended => (io::ErrorKind::ConnectionAborted, "the pool has ended"),
                        _ => (io::ErrorKind::AlreadyExists, "the pool of this name has another store"),
                    };
                    hold(&shared.state).failure = Some((failure.0, failure.1.to_owned()));
                    self.pause(RETRY / 2);
                }
                Ok(Outcome::Answer(answer)) => Self::deliver(shared, number, answer),
                Ok(Outcome::Ended(has_ended)) => {
                    hold(&self.queue).end = Some(Some(has_ended));
                    self.changed.notify_all();
                }
                Ok(Outcome::Later) => {
                    let why = "its server was replaced, and the members report what they have for one lease";
                    hold(&shared.state).failure = Some((io::ErrorKind::TimedOut, why.to_owned()));
                    self.try_again(renewal, RETRY / 2);
                }
                Err(why) => {
                    hold(&shared.state).failure = Some((why.kind(), why.to_string()));
                    shared.changed.notify_all();
                    self.try_again(renewal, RETRY);
                }
            }
        }
    }

    /// A renewal is asked again, unless a newer one waits. All else the member asks again.
    fn try_again(&self, renewal: Option<Request>, after: Duration) {
        if let Some(renewal) = renewal {
            hold(&self.queue).renewal.get_or_insert(renewal);
        }
        self.pause(after);
    }

    fn pause(&self, time: Duration) {
        let until = tick() + time;
        let mut queue = hold(&self.queue);
        loop {
            let left = until.saturating_duration_since(tick());
            if left.is_zero() {
                return;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn deliver(shared: &Arc<Shared>, number: u64, answer: Answer) {
        let mut state = hold(&shared.state);
        shared.take_answer(&mut state, number, answer);
        shared.send_outputs(&mut state);
    }
}
