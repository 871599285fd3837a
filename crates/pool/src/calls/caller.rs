//! The calling side. States of a connection: in use by one call, idle, closed.
//!
//! A connection that fails is replaced, and the call is sent again. A call that ends without a reply resets its connection,
//! so that the receiver does not begin it later.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use surgetank_types::clock::tick;

use super::stream::{Head, Stream};
use super::{BODY_BYTES_MAX, CONNECTIONS_MAX, CallFailed, Once, Traffic, Waits, Whereabouts};
use crate::connection::{Closed, Hello, PROTOCOL, Purpose};
use crate::greeting::Greeted;
use crate::secret::{Secret, Tls};
use crate::sockets::{Patience, SLICE};
use crate::{MemberId, Term};

/// So many idle connections to a member are kept.
const IDLE_MAX: usize = 32;
/// How long connecting may take.
const CONNECTING: Duration = Duration::from_secs(3);
/// After a failure the call is sent again after this time. The time doubles with each try.
const PAUSE: Duration = Duration::from_millis(10);
/// It doubles up to here.
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// A call that waits looks so often whether the member is still there.
const LOOKING: Duration = Duration::from_secs(1);
/// One call carries so many numbers of answered calls.
const ANSWERED_AT_ONCE: usize = 1000;
/// So many are kept for the next call. The receiver keeps as many replies.
const ANSWERED_MAX: usize = 65_536;

type Find = Box<dyn Fn(MemberId) -> Whereabouts + Send + Sync>;

/// Makes calls to other members. Each process that has the pool's secret may have one, also without a membership.
pub struct Caller {
    tls: Tls,
    hello: Hello,
    find: Find,
    peers: Mutex<HashMap<MemberId, Arc<Peer>>>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").field("member", &self.hello.member).finish_non_exhaustive()
    }
}

/// A member that is called.
#[derive(Debug, Default)]
struct Peer {
    connections: Mutex<Connections>,
    /// A call has ended.
    room: Condvar,
    traffic: Arc<Traffic>,
}

#[derive(Debug, Default)]
struct Connections {
    /// The last one is used next.
    idle: Vec<(Term, Stream)>,
    in_use: usize,
    answered: Vec<Once>,
}

/// The right to use one connection.
struct Seat<'a> {
    peer: &'a Peer,
    idle: Option<Stream>,
    answered: Vec<Once>,
}

/// A call that waits.
struct Watch<'a> {
    caller: &'a Caller,
    patient: &'a mut dyn FnMut(Waits) -> bool,
    to: (MemberId, Term),
    waits: Waits,
    looked: Instant,
    /// Why the call ends.
    failed: Option<CallFailed>,
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Caller {
    /// `me`: the member in whose name calls are made. `find`: says where a member is. It is asked before each call and each
    /// second while a call waits, and must not block for long.
    ///
    /// Errors: TLS cannot be set up.
    pub fn new(secret: &Secret, pool: [u8; 16], me: (MemberId, Term), find: Find) -> io::Result<Self> {
        let uid = rustix::process::geteuid().as_raw();
        Ok(Self {
            tls: secret.tls().map_err(io::Error::other)?,
            hello: Hello { version: PROTOCOL, pool, uid, member: Some(me), purpose: Purpose::Calls },
            find,
            peers: Mutex::default(),
        })
    }

    /// Has another member carry out a call ([`crate::membership::Host::call`]), and waits for its reply. Waits for a member
    /// that is not known yet, too.
    ///
    /// `once`: the number by which the receiver carries the call out once. `None`: it may be carried out twice. `patient`:
    /// asked at least every 50 ms while the call waits; `false` gives up. (Looking up a host's name is not interrupted.)
    ///
    /// Errors: there is no reply. The call is not sent again, and the receiver does not begin it once it knows. What the
    /// receiver has begun is finished.
    pub fn call(
        &self,
        to: MemberId,
        once: Option<Once>,
        body: &[u8],
        patient: &mut dyn FnMut(Waits) -> bool,
    ) -> Result<Vec<u8>, CallFailed> {
        if body.len() > BODY_BYTES_MAX {
            return Err(CallFailed::TooLong);
        }
        let peer = self.peer(to);
        let mut pause = PAUSE;
        // (An idle connection leads to a member that was there a moment ago.)
        if let Some((term, seat)) = peer.take_idle() {
            let mut watch = Watch::new(self, patient, (to, term));
            if let Ok(reply) = self.exchange(seat, "", (once, body), &mut watch) {
                return Ok(reply);
            }
            if let Some(why) = watch.failed {
                return Err(why);
            }
        }
        loop {
            let (term, address) = match (self.find)(to) {
                Whereabouts::At(term, address) => (term, address),
                Whereabouts::Unknown => {
                    wait(&mut pause, patient)?;
                    continue;
                }
                Whereabouts::Gone => {
                    hold(&peer.connections).idle.clear();
                    return Err(CallFailed::Gone);
                }
                Whereabouts::Expelled => return Err(CallFailed::Expelled),
            };
            let Some(seat) = peer.take_seat(term) else {
                if !patient(Waits::ForMember) {
                    return Err(CallFailed::TimedOut);
                }
                continue;
            };
            let was_idle = seat.idle.is_some();
            let mut watch = Watch::new(self, patient, (to, term));
            if let Ok(reply) = self.exchange(seat, &address, (once, body), &mut watch) {
                return Ok(reply);
            }
            if let Some(why) = watch.failed {
                return Err(why);
            }
            if !was_idle {
                wait(&mut pause, patient)?;
            } else if !patient(Waits::ForMember) {
                return Err(CallFailed::TimedOut);
            }
        }
    }

    /// The reply to this call has reached the program: the receiver may drop it. It learns that with the next call.
    pub fn answered(&self, by: MemberId, once: Once) {
        let peer = self.peer(by);
        hold(&peer.connections).answered(&[once]);
    }

    /// Bytes on the network so far for each member that was called: received, sent.
    pub fn network_bytes(&self) -> Vec<(MemberId, (u64, u64))> {
        let peers = hold(&self.peers);
        let mut bytes: Vec<_> = peers.iter().map(|(id, peer)| (*id, peer.traffic.bytes())).collect();
        bytes.sort_unstable();
        bytes
    }

    fn peer(&self, id: MemberId) -> Arc<Peer> {
        hold(&self.peers).entry(id).or_default().clone()
    }

    /// Sends the call and reads its reply, on one connection.
    fn exchange(
        &self,
        mut seat: Seat<'_>,
        address: &str,
        (once, body): (Option<Once>, &[u8]),
        watch: &mut Watch<'_>,
    ) -> Result<Vec<u8>, Closed> {
        let mut stream = match seat.idle.take() {
            Some(stream) => stream,
            None => self.connect(seat.peer, address, watch)?,
        };
        watch.waits = Waits::ForReply;
        let head = Head { once, answered: std::mem::take(&mut seat.answered) };
        let mut waits = || watch.goes_on();
        let reply = stream.write_call(&head, body, &mut waits).and_then(|()| stream.read_reply(&mut waits));
        match reply {
            Ok(reply) => {
                seat.give_back(watch.to.1, stream);
                Ok(reply)
            }
            Err(why) => {
                stream.reset();
                seat.answered = head.answered;
                Err(why.into())
            }
        }
    }

    fn connect(&self, peer: &Peer, address: &str, watch: &mut Watch<'_>) -> Result<Stream, Closed> {
        let to = watch.to;
        let mut waits = || watch.goes_on();
        let mut patience = Patience::new(CONNECTING, &mut waits);
        let greeted = Greeted::connect(address, (&self.tls, &self.hello), &mut patience)?;
        if greeted.peer.member != Some(to) {
            return Err(Closed::Refused("the peer is another member"));
        }
        let stream = Stream::new(greeted, peer.traffic.clone());
        stream.ask_each(SLICE)?;
        Ok(stream)
    }
}

/// Waits before the next try.
fn wait(pause: &mut Duration, patient: &mut dyn FnMut(Waits) -> bool) -> Result<(), CallFailed> {
    let until = tick() + *pause;
    *pause = (*pause * 2).min(PAUSE_MAX);
    loop {
        if !patient(Waits::ForMember) {
            return Err(CallFailed::TimedOut);
        }
        let left = until.saturating_duration_since(tick());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(SLICE));
    }
}

impl<'a> Watch<'a> {
    fn new(caller: &'a Caller, patient: &'a mut dyn FnMut(Waits) -> bool, to: (MemberId, Term)) -> Self {
        Self { caller, patient, to, waits: Waits::ForMember, looked: tick(), failed: None }
    }

    fn goes_on(&mut self) -> bool {
        if !(self.patient)(self.waits) {
            self.failed = Some(CallFailed::TimedOut);
            return false;
        }
        if self.looked.elapsed() < LOOKING {
            return true;
        }
        self.looked = tick();
        match (self.caller.find)(self.to.0) {
            Whereabouts::At(term, _) => term == self.to.1,
            Whereabouts::Unknown => true,
            Whereabouts::Gone => {
                self.failed = Some(CallFailed::Gone);
                false
            }
            Whereabouts::Expelled => {
                self.failed = Some(CallFailed::Expelled);
                false
            }
        }
    }
}

impl Peer {
    /// The connection that was used last, with its term.
    fn take_idle(&self) -> Option<(Term, Seat<'_>)> {
        let mut connections = hold(&self.connections);
        if connections.in_use >= CONNECTIONS_MAX {
            return None;
        }
        let (term, stream) = connections.idle.pop()?;
        Some((term, connections.seat(self, Some(stream))))
    }

    /// Waits up to [`SLICE`].
    fn take_seat(&self, term: Term) -> Option<Seat<'_>> {
        let mut connections = hold(&self.connections);
        if connections.in_use >= CONNECTIONS_MAX {
            connections = self.room.wait_timeout(connections, SLICE).unwrap_or_else(PoisonError::into_inner).0;
            if connections.in_use >= CONNECTIONS_MAX {
                return None;
            }
        }
        // (Those to another term lead to an agent that was replaced.)
        let idle = std::iter::from_fn(|| connections.idle.pop()).find(|(of, _)| *of == term);
        Some(connections.seat(self, idle.map(|(_, stream)| stream)))
    }
}

impl Connections {
    fn seat<'a>(&mut self, peer: &'a Peer, idle: Option<Stream>) -> Seat<'a> {
        self.in_use += 1;
        let rest = self.answered.len().saturating_sub(ANSWERED_AT_ONCE);
        Seat { peer, idle, answered: self.answered.split_off(rest) }
    }

    fn answered(&mut self, more: &[Once]) {
        self.answered.extend_from_slice(more);
        let excess = self.answered.len().saturating_sub(ANSWERED_MAX);
        if excess > 0 {
            // (Some more, so that this is rare.)
            self.answered.drain(..excess + ANSWERED_AT_ONCE);
        }
    }
}

impl Seat<'_> {
    fn give_back(self, term: Term, stream: Stream) {
        let mut connections = hold(&self.peer.connections);
        if connections.idle.len() < IDLE_MAX {
            connections.idle.push((term, stream));
        }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut connections = hold(&self.peer.connections);
        connections.in_use -= 1;
        // (Of a call that was not carried out, as far as is known.)
        connections.answered(&self.answered);
        drop(connections);
        self.peer.room.notify_one();
    }
}
