//! The receiving side: who may call, what runs, and the replies that are kept.
//!
//! States of a call with a number: running, then done with its reply, until its caller says that it is answered. Each
//! calling member has a table of them, which ends with the member's term.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::stream::Stream;
use super::{BODY_BYTES_MAX, CONNECTIONS_MAX, Once, Traffic};
use crate::greeting::Greeted;
use crate::{MemberId, Term};

/// So many replies are kept for a member. The oldest are dropped.
const DONE_MAX: usize = 65_536;
/// They have so many bytes at most, besides the last one.
const DONE_BYTES_MAX: usize = 64 << 20;

type Reply = Arc<Vec<u8>>;

/// The members that call this one.
#[derive(Debug, Default)]
pub(crate) struct Serving {
    members: HashMap<MemberId, Arc<Served>>,
    traffic: HashMap<MemberId, Arc<Traffic>>,
    /// Members that never come back. Their late calls are not carried out.
    gone: HashSet<MemberId>,
    /// This agent is not a member any more.
    is_closed: bool,
}

/// One term of a member that calls.
#[derive(Debug)]
struct Served {
    from: (MemberId, Term),
    state: Mutex<State>,
    /// A call has ended, or all of them.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    connections: HashMap<u64, Arc<TcpStream>>,
    next_connection: u64,
    table: Table,
}

#[derive(Debug, Default)]
struct Table {
    calls: HashMap<Once, Progress>,
    /// By age.
    done: BTreeMap<u64, Once>,
    done_bytes: usize,
    next_done: u64,
}

#[derive(Debug)]
enum Progress {
    /// Each thread that waits for it has the place of the reply.
    Running {
        reply: Arc<OnceLock<Reply>>,
        is_answered: bool,
    },
    Done {
        at: u64,
        reply: Reply,
    },
}

/// What to do with a call that has come.
enum Begun {
    CarryOut(Arc<OnceLock<Reply>>),
    Await(Arc<OnceLock<Reply>>),
    Reply(Reply),
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Serving {
    /// Takes up a connection of a member that is known. `None`: it is refused.
    pub fn admit(&mut self, greeted: Greeted) -> Option<Admitted> {
        let (id, term) = greeted.peer.member?;
        self.supersede(id, term);
        if self.is_closed || self.gone.contains(&id) {
            return None;
        }
        let served = self.members.entry(id).or_insert_with(|| Arc::new(Served::new((id, term)))).clone();
        if term < served.from.1 {
            return None;
        }
        let number = {
            let mut state = hold(&served.state);
            if state.connections.len() >= CONNECTIONS_MAX {
                return None;
            }
            state.next_connection += 1;
            state.next_connection
        };
        let stream = Stream::new(greeted, self.traffic.entry(id).or_default().clone());
        hold(&served.state).connections.insert(number, stream.socket().clone());
        Some(Admitted { stream, seat: Seat { served, number } })
    }

    /// The member has this term by now: nothing of an earlier one is carried out any more.
    pub fn supersede(&mut self, id: MemberId, term: Term) {
        if self.members.get(&id).is_some_and(|served| served.from.1 < term)
            && let Some(served) = self.members.remove(&id)
        {
            served.close();
        }
    }

    /// The member has left, or was lost.
    pub fn gone(&mut self, id: MemberId) {
        self.gone.insert(id);
        self.traffic.remove(&id);
        if let Some(served) = self.members.remove(&id) {
            served.close();
        }
    }

    pub fn is_gone(&self, id: MemberId) -> bool {
        self.gone.contains(&id)
    }

    /// This agent is not a member any more.
    pub fn close(&mut self) {
        self.is_closed = true;
        self.members.drain().for_each(|(_, served)| served.close());
    }

    /// Closes all connections, as a network that fails.
    pub fn cut(&self) {
        self.members.values().for_each(|served| hold(&served.state).cut());
    }

    /// Bytes on the network for each member: received, sent.
    pub fn network_bytes(&self) -> impl Iterator<Item = (MemberId, (u64, u64))> {
        self.traffic.iter().map(|(id, traffic)| (*id, traffic.bytes()))
    }
}

/// A connection whose calls may be carried out.
pub(crate) struct Admitted {
    stream: Stream,
    seat: Seat,
}

/// Its place among the member's connections.
struct Seat {
    served: Arc<Served>,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        hold(&self.served.state).connections.remove(&self.number);
    }
}

impl Admitted {
    /// The member that calls.
    pub fn caller(&self) -> MemberId {
        self.seat.served.from.0
    }

    /// Carries out one call after the other, in this thread, until the connection ends. `carry_out`: `None` if the
    /// membership has ended.
    pub fn serve(self, carry_out: &dyn Fn(MemberId, Vec<u8>) -> Option<Vec<u8>>) {
        let Self { mut stream, seat } = self;
        let served = &*seat.served;
        // (Its hook reports a panic. Without a reply the caller would wait for nothing.)
        let carry_out = |body| {
            let reply = catch_unwind(AssertUnwindSafe(|| carry_out(served.from.0, body)));
            let reply = reply.unwrap_or_else(|_| Some(Vec::new()))?;
            Some(if reply.len() > BODY_BYTES_MAX { Vec::new() } else { reply })
        };
        while let Ok((head, body)) = stream.read_call(&mut || true) {
            // (Its caller may have given it up, or be dead.)
            if !served.takes(&head.answered) || stream.has_ended() {
                return;
            }
            let is_sent = match head.once {
                None => carry_out(body).is_some_and(|reply| stream.write_reply(&reply, &mut || true).is_ok()),
                Some(once) => served
                    .carry_out_once(once, || carry_out(body))
                    .is_some_and(|reply| stream.write_reply(&reply, &mut || true).is_ok()),
            };
            if !is_sent {
                return;
            }
        }
    }
}

impl Served {
    fn new(from: (MemberId, Term)) -> Self {
        Self { from, state: Mutex::default(), changed: Condvar::new() }
    }

    fn close(&self) {
        let mut state = hold(&self.state);
        state.is_closed = true;
        state.table = Table::default();
        state.cut();
        drop(state);
        self.changed.notify_all();
    }

    /// Drops what is answered. Returns whether calls are carried out.
    fn takes(&self, answered: &[Once]) -> bool {
        let mut state = hold(&self.state);
        answered.iter().for_each(|once| state.table.answered(*once));
        !state.is_closed
    }

    /// `None`: there is no reply any more.
    fn carry_out_once(&self, once: Once, carry_out: impl FnOnce() -> Option<Vec<u8>>) -> Option<Reply> {
        let mut state = hold(&self.state);
        if state.is_closed {
            return None;
        }
        let place = match state.table.begin(once) {
            Begun::Reply(reply) => return Some(reply),
            Begun::Await(place) => loop {
                if let Some(reply) = place.get() {
                    return Some(reply.clone());
                }
                if state.is_closed {
                    return None;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            },
            Begun::CarryOut(place) => place,
        };
        drop(state);
        let Some(reply) = carry_out() else {
            self.close();
            return None;
        };
        let reply = place.get_or_init(|| Arc::new(reply)).clone();
        let mut state = hold(&self.state);
        state.table.end(once, reply.clone());
        let is_closed = state.is_closed;
        drop(state);
        self.changed.notify_all();
        (!is_closed).then_some(reply)
    }
}

impl State {
    fn cut(&self) {
        for socket in self.connections.values() {
            // (A peer that closed first makes this fail.)
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Table {
    fn begin(&mut self, once: Once) -> Begun {
        match self.calls.get(&once) {
            Some(Progress::Done { reply, .. }) => Begun::Reply(reply.clone()),
            Some(Progress::Running { reply, .. }) => Begun::Await(reply.clone()),
            None => {
                let place = Arc::new(OnceLock::new());
                self.calls.insert(once, Progress::Running { reply: place.clone(), is_answered: false });
                Begun::CarryOut(place)
            }
        }
    }

    fn end(&mut self, once: Once, reply: Reply) {
        match self.calls.get_mut(&once) {
            Some(Progress::Running { is_answered: true, .. }) => drop(self.calls.remove(&once)),
            Some(progress @ Progress::Running { .. }) => {
                let at = self.next_done;
                self.next_done += 1;
                self.done_bytes += reply.len();
                *progress = Progress::Done { at, reply };
                self.done.insert(at, once);
                while self.done.len() > DONE_MAX || self.done_bytes > DONE_BYTES_MAX && self.done.len() > 1 {
                    let Some((_, oldest)) = self.done.first_key_value() else { break };
                    self.answered(*oldest);
                }
            }
            // (The table was closed meanwhile.)
            Some(Progress::Done { .. }) | None => {}
        }
    }

    fn answered(&mut self, once: Once) {
        match self.calls.get_mut(&once) {
            Some(Progress::Running { is_answered, .. }) => *is_answered = true,
            Some(Progress::Done { at, reply }) => {
                self.done_bytes -= reply.len();
                self.done.remove(at);
                self.calls.remove(&once);
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::super::stream::Head;
    use super::*;
    use crate::Secret;
    use crate::connection::{Hello, PROTOCOL, Purpose};
    use crate::sockets::Patience;

    const CALLER: (MemberId, Term) = (MemberId(2), Term(1));

    fn once(request: u64) -> Once {
        Once { request, part: 0 }
    }

    /// Both ends of a connection for calls: the caller's, the receiver's.
    fn pair() -> (Stream, Greeted) {
        let tls = Secret::random().unwrap().tls().unwrap();
        let hello =
            Hello { version: PROTOCOL, pool: [7; 16], uid: 1000, member: Some(CALLER), purpose: Purpose::Calls };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let patience = Duration::from_secs(10);
        thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let mut goes_on = || true;
                Greeted::connect(&address, (&tls, &hello), &mut Patience::new(patience, &mut goes_on)).unwrap()
            });
            let mut goes_on = || true;
            let socket = listener.accept().unwrap().0;
            let receiver = Greeted::accept(socket, (&tls, &hello), &mut Patience::new(patience, &mut goes_on));
            (Stream::new(caller.join().unwrap(), Arc::default()), receiver.unwrap())
        })
    }

    /// Sends a call that waits in the receiver's socket, then does `ends`. Returns how often it is carried out.
    fn serve_late(ends: impl FnOnce(Stream)) -> usize {
        let (mut caller, receiver) = pair();
        let head = Head { once: Some(once(1)), answered: Vec::new() };
        caller.write_call(&head, b"late", &mut || true).unwrap();
        ends(caller);
        thread::sleep(Duration::from_millis(100));
        let calls = AtomicUsize::new(0);
        let admitted = Serving::default().admit(receiver).unwrap();
        let carry_out = |from, body: Vec<u8>| {
            assert_eq!((from, &body[..]), (CALLER.0, &b"late"[..]));
            calls.fetch_add(1, Ordering::Relaxed);
            Some(body)
        };
        admitted.serve(&carry_out);
        calls.into_inner()
    }

    // The kernel delivers what came before a reset.
    #[test]
    fn call_that_was_reset_before_it_is_read_is_not_carried_out() {
        assert_eq!(serve_late(Stream::reset), 0);
        // (Its agent was killed.)
        assert_eq!(serve_late(drop), 0);
        // With a caller that waits it is.
        let waits = |caller: Stream| {
            let socket = caller.socket().clone();
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(500));
                drop(caller);
                let _ = socket.shutdown(Shutdown::Both);
            });
        };
        assert_eq!(serve_late(waits), 1);
    }

    #[test]
    fn call_that_is_not_a_frame_ends_the_connection() {
        for bytes in [&[0xff; 8][..], &[1, 0, 0, 0, 0, 0, 0, 0, 0xff], &[0, 0, 0, 0, 0, 0, 0, 1]] {
            let (caller, receiver) = pair();
            // (TLS refuses what is not encrypted; so does this.)
            (&**caller.socket()).write_all(bytes).unwrap();
            let admitted = Serving::default().admit(receiver).unwrap();
            admitted.serve(&|_, _| unreachable!("a call"));
        }
    }

    #[test]
    fn reply_that_is_answered_while_it_runs_is_not_kept() {
        let served = Served::new(CALLER);
        let reply = served.carry_out_once(once(1), || {
            assert!(served.takes(&[once(1)]));
            Some(vec![1])
        });
        assert_eq!(reply.as_deref(), Some(&vec![1]));
        assert!(hold(&served.state).table.calls.is_empty());
        served.carry_out_once(once(2), || Some(vec![2]));
        let again = served.carry_out_once(once(2), || unreachable!("it is done"));
        assert_eq!(again.as_deref(), Some(&vec![2]));
        assert!(served.takes(&[once(2), once(9)]));
        let state = hold(&served.state);
        assert!(state.table.calls.is_empty() && state.table.done.is_empty() && state.table.done_bytes == 0);
    }

    #[test]
    fn oldest_replies_are_dropped_when_there_are_too_many() {
        let served = Served::new(CALLER);
        let carry_out = |request, bytes: usize| served.carry_out_once(once(request), || Some(vec![0; bytes]));
        (0..DONE_MAX as u64 + 2).for_each(|request| drop(carry_out(request, 1)));
        let calls = |of: &Served| hold(&of.state).table.calls.len();
        assert_eq!(calls(&served), DONE_MAX);
        assert!(!hold(&served.state).table.calls.contains_key(&once(1)));
        carry_out(1 << 40, DONE_BYTES_MAX - 10);
        assert_eq!(calls(&served), 11);
        carry_out(1 << 41, DONE_BYTES_MAX + 10);
        assert_eq!(calls(&served), 1);
    }

    #[test]
    fn closed_table_ends_waits_and_refuses_calls() {
        let served = Served::new(CALLER);
        thread::scope(|scope| {
            let reply = served.carry_out_once(once(1), || {
                let waits = scope.spawn(|| served.carry_out_once(once(1), || unreachable!("it runs")));
                thread::sleep(Duration::from_millis(100));
                assert!(!waits.is_finished());
                served.close();
                assert_eq!(waits.join().unwrap(), None);
                Some(vec![1])
            });
            assert_eq!(reply, None);
        });
        assert!(!served.takes(&[]));
        assert_eq!(served.carry_out_once(once(2), || unreachable!("it is closed")), None);
        assert!(hold(&served.state).table.calls.is_empty());
    }

    #[test]
    fn serving_refuses_members_that_are_gone_or_superseded() {
        let mut serving = Serving::default();
        let admitted = serving.admit(pair().1).unwrap();
        serving.supersede(CALLER.0, CALLER.1);
        assert!(admitted.seat.served.takes(&[]));
        serving.supersede(CALLER.0, Term(2));
        assert!(!admitted.seat.served.takes(&[]));
        let admitted = serving.admit(pair().1).unwrap();
        serving.gone(CALLER.0);
        assert!(!admitted.seat.served.takes(&[]) && serving.is_gone(CALLER.0));
        assert!(serving.admit(pair().1).is_none());
    }
}
