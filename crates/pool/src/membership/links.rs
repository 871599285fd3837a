//! The connections of a member: to the registry, to members for sending, from members for receiving.
//!
//! The dangers that this avoids: two members that connect at once and end each other's connections; an answer of another
//! member, or of an earlier agent, in the name of the one that was asked; a connection that ends late and takes its
//! successor with it.

use std::ffi::CString;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use surgetank_types::clock::uptime;

use super::{Packet, RETRY, Registry, Shared, State, hold};
use crate::calls::{Admitted, name_of_thread};
use crate::connection::{Closed, Connection, Event, Hello, Purpose};
use crate::greeting::Greeted;
use crate::member::Message;
use crate::registry::{Answer, MemberRecord, Request};
use crate::sockets::{self, Patience};
use crate::{MemberId, Term};

/// So many peers may shake hands at once. More are refused: only strangers need long.
const GREETINGS_MAX: usize = 256;
/// A stranger is refused after this time.
const GREETING: Duration = Duration::from_secs(3);
/// How long connecting may take.
const CONNECTING: Duration = Duration::from_secs(3);
/// So many packets wait for a connection that is being made, and for a thread that receives.
const PACKETS_MAX: usize = 256;
/// How long a packet waits for room in the queue of a connection.
const SENDING: Duration = Duration::from_secs(5);
/// The stack of a thread that carries out calls.
const STACK_BYTES: usize = 1 << 20;

impl Shared {
    pub(super) fn ask_registry(self: &Arc<Self>, state: &mut State, request: Request) {
        match &self.registry {
            Registry::Here(engine) => {
                let number = number_of(&request);
                let answer = hold(engine).ask(uptime(), request);
                self.take_answer(state, number, answer);
            }
            Registry::Server(asking) => asking.ask(request),
            Registry::Peer(address) => match &state.registry {
                Some((_, link)) => {
                    if link.send(&Packet::Ask(request), Duration::ZERO).is_err() {
                        state.registry = None;
                    }
                }
                None => self.connect(state, None, address.clone(), Packet::Ask(request)),
            },
        }
    }

    /// Sends it on the member's connection, or makes one. What is lost the sender says again.
    pub(super) fn tell(self: &Arc<Self>, state: &mut State, to: MemberId, message: Message) {
        let packet = Packet::Said(message);
        let record = |state: &State| state.member.as_ref().and_then(|member| member.record_of(to)).cloned();
        if record(state).is_none() {
            // (It has just joined. Without this its first claims would wait for the next renewal.)
            self.look(state);
        }
        let Some(MemberRecord { term: known, address, .. }) = record(state) else { return };
        match state.peers.get(&to) {
            Some((number, link)) if link.peer().member == Some((to, known)) => {
                if link.send_urgent(&packet).is_err() {
                    lost_link(state, to, *number);
                }
            }
            replaced => {
                if let Some((number, _)) = replaced {
                    lost_link(state, to, *number);
                }
                self.connect(state, Some((to, known)), address, packet);
            }
        }
    }

    /// Asks the registry for news, at most once in [`RETRY`]: a member is not known, or not reached.
    pub(super) fn look(self: &Arc<Self>, state: &mut State) {
        let now = uptime();
        if now < state.looked + RETRY {
            return;
        }
        state.looked = now;
        if let Some(member) = state.member.as_mut() {
            member.look_again(now);
        }
        self.send_outputs(state);
    }

    /// In a thread of its own, which then sends. `None`: to the registry.
    fn connect(self: &Arc<Self>, state: &mut State, to: Option<(MemberId, Term)>, address: String, packet: Packet) {
        if let Some(packets) = state.connecting.get_mut(&to) {
            if packets.len() < PACKETS_MAX {
                packets.push(packet);
            }
            return;
        }
        if self.stops() {
            return;
        }
        state.connecting.insert(to, vec![packet]);
        let number = state.next_link;
        state.next_link += 1;
        let me = state.member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: to.and(me), ..self.hello.clone() };
        let shared = self.clone();
        let connect = move || {
            let is_it = |peer: &Hello| to.is_none() || peer.member == to;
            let deliver = shared.deliver(number, to.map(|(id, _)| id));
            let made = Connection::connect(&address, (&shared.tls, hello), CONNECTING, is_it, deliver);
            match made {
                Ok(link) => shared.take_up(number, to, link),
                Err(why) => {
                    let mut state = hold(&shared.state);
                    state.connecting.remove(&to);
                    if to.is_none() {
                        let kind = match &why {
                            Closed::Stranger(_) | Closed::Refused(_) => io::ErrorKind::PermissionDenied,
                            Closed::Io(why) if why.kind() == io::ErrorKind::ConnectionRefused => why.kind(),
                            _ => io::ErrorKind::TimedOut,
                        };
                        state.failure = Some((kind, why.to_string()));
                    } else {
                        // (The member may have left.)
                        shared.look(&mut state);
                    }
                }
            }
            shared.changed.notify_all();
        };
        if let Err(why) = thread::Builder::new().name("pool-connect".to_owned()).spawn(connect) {
            // (What waited is said again.)
            state.connecting.remove(&to);
            if to.is_none() {
                state.failure = Some((io::ErrorKind::TimedOut, format!("the system starts no thread: {why}")));
            }
        }
    }

    /// Sends what waits for a connection, then uses it for all that comes later.
    fn take_up(&self, number: u64, to: Option<(MemberId, Term)>, link: Connection) {
        let mut state = hold(&self.state);
        let is_open = loop {
            match state.connecting.get_mut(&to).map(std::mem::take) {
                _ if self.stops() => break false,
                Some(packets) if !packets.is_empty() => {
                    drop(state);
                    let is_sent = packets.iter().all(|packet| link.send(packet, SENDING).is_ok());
                    state = hold(&self.state);
                    if !is_sent {
                        break false;
                    }
                }
                _ => break true,
            }
        };
        state.connecting.remove(&to);
        let Some((id, term)) = to else {
            if is_open {
                (state.registry, state.failure) = (Some((number, link)), None);
            }
            return;
        };
        let known = state.member.as_ref().and_then(|member| member.record_of(id));
        if is_open && known.is_some_and(|known| known.term == term) {
            state.peers.insert(id, (number, Arc::new(link)));
        }
    }

    /// What to do with the packets of a connection that this agent made. A peer sends on its own.
    fn deliver(self: &Arc<Self>, number: u64, to: Option<MemberId>) -> impl FnMut(Event<Packet>) + Send + use<> {
        // (A connection must not keep its owner.)
        let shared = Arc::downgrade(self);
        move |event| {
            let Some(shared) = Weak::upgrade(&shared) else { return };
            let mut state = hold(&shared.state);
            match (event, to) {
                (Event::Message(Packet::Answered(number, answer)), None) => {
                    shared.take_answer(&mut state, number, answer);
                }
                // (What has no place on such a connection is of no use.)
                (Event::Message(_), _) => {}
                (Event::Closed(_), None) => drop(state.registry.take_if(|(of, _)| *of == number)),
                (Event::Closed(_), Some(to)) => lost_link(&mut state, to, number),
            }
            shared.send_outputs(&mut state);
        }
    }

    pub(super) fn take_answer(self: &Arc<Self>, state: &mut State, number: u64, answer: Answer) {
        match state.member.as_mut() {
            Some(member) if number > 0 => {
                member.answered(uptime(), number, answer);
                let mut serving = hold(&self.serving);
                member.records().for_each(|record| serving.supersede(record.id, record.term));
            }
            None if number == 0 => state.joined = Some(answer),
            _ => {}
        }
        self.changed.notify_all();
    }

    pub(super) fn listen_loop(self: &Arc<Self>, listener: &TcpListener) {
        while !self.stops() {
            match listener.accept() {
                Ok((socket, _)) => {
                    if self.greetings.fetch_add(1, Ordering::AcqRel) >= GREETINGS_MAX {
                        self.greetings.fetch_sub(1, Ordering::AcqRel);
                        continue;
                    }
                    let shared = self.clone();
                    let greet = move || {
                        // (A stranger is refused; it learns that by itself.)
                        let calls = shared.greet(socket).unwrap_or(None);
                        shared.greetings.fetch_sub(1, Ordering::AcqRel);
                        let shared = weak(shared);
                        if let Some(calls) = calls {
                            serve(&shared, calls);
                        }
                    };
                    let thread = thread::Builder::new().name("pool-greet".to_owned()).stack_size(STACK_BYTES);
                    if thread.spawn(greet).is_err() {
                        // (The connection is closed, and the peer makes another one.)
                        self.greetings.fetch_sub(1, Ordering::AcqRel);
                    }
                }
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                    sockets::is_ready(listener, rustix::event::PollFlags::IN, Duration::from_millis(100));
                }
                // (While descriptors are short, for example.)
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Takes up a connection: from a member, or from an agent that asks the registry. Returns one for calls, which the
    /// caller serves.
    fn greet(self: &Arc<Self>, socket: TcpStream) -> Result<Option<Admitted>, Closed> {
        socket.set_nonblocking(false)?;
        let me = hold(&self.state).member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: me, ..self.hello.clone() };
        let mut goes_on = || !self.stops();
        let greeted = Greeted::accept(socket, (&self.tls, &hello), &mut Patience::new(GREETING, &mut goes_on))?;
        match greeted.peer.purpose {
            Purpose::Control => self.take_link(greeted, me).map(|()| None),
            Purpose::Calls => Ok(self.take_caller(greeted, me)),
        }
    }

    /// Admits a caller that is known. One that is not known yet comes again.
    fn take_caller(self: &Arc<Self>, greeted: Greeted, me: Option<(MemberId, Term)>) -> Option<Admitted> {
        let ((id, term), (own, _)) = (greeted.peer.member?, me?);
        let mut state = hold(&self.state);
        for is_last in [false, true] {
            let record = state.member.as_ref().and_then(|member| member.record_of(id));
            match record {
                Some(known) if id == own || term < known.term => return None,
                // (A higher term than is known here comes from an agent that the registry may not have accepted.)
                Some(known) if term == known.term => return hold(&self.serving).admit(greeted),
                _ if is_last => return None,
                _ => self.look(&mut state),
            }
        }
        None
    }

    fn take_link(self: &Arc<Self>, greeted: Greeted, me: Option<(MemberId, Term)>) -> Result<(), Closed> {
        let is_registry = matches!(self.registry, Registry::Here(_));
        let may_be = |peer: &Hello| match (peer.member, me) {
            (None, _) => is_registry,
            (Some((id, term)), Some((own, _))) => {
                let state = hold(&self.state);
                let known = state.member.as_ref().and_then(|member| member.record_of(id));
                // (An agent of an earlier term may still hang somewhere.)
                id != own && known.is_none_or(|known| term >= known.term)
            }
            (Some(_), None) => false,
        };
        let (packets, events) = sync_channel(PACKETS_MAX);
        let deliver = move |event| drop(packets.send(event));
        let link = Connection::open::<Packet>(greeted, may_be, deliver)?;
        let (from, link) = (link.peer().member.map(|(id, _)| id), Arc::new(link));
        let number = {
            let mut state = hold(&self.state);
            let number = state.next_link;
            state.next_link += 1;
            if self.stops() {
                return Ok(());
            }
            state.incoming.insert(number, (from, link.clone()));
            number
        };
        let shared = Arc::downgrade(self);
        let name = from.map_or_else(|| "pool-in-asker".to_owned(), |id| format!("pool-in-{}", id.0));
        let receive = move || {
            for event in events {
                let (Event::Message(packet), Some(shared)) = (event, Weak::upgrade(&shared)) else { break };
                if shared.stops() || !shared.take_packet(from, packet, &link) {
                    break;
                }
            }
            if let Some(shared) = Weak::upgrade(&shared) {
                hold(&shared.state).incoming.remove(&number);
            }
        };
        if thread::Builder::new().name(name).spawn(receive).is_err() {
            // (That closes it, and the peer makes another one.)
            hold(&self.state).incoming.remove(&number);
        }
        Ok(())
    }

    /// Returns whether the connection goes on.
    fn take_packet(self: &Arc<Self>, from: Option<MemberId>, packet: Packet, link: &Connection) -> bool {
        match (packet, from, &self.registry) {
            (Packet::Said(message), Some(from), registry) => {
                if let Registry::Server(asking) = registry {
                    asking.hear(from, &message);
                }
                let mut state = hold(&self.state);
                if let Some(member) = state.member.as_mut() {
                    member.told(uptime(), from, message);
                }
                self.send_outputs(&mut state);
                true
            }
            (Packet::Ask(request), None, Registry::Here(engine)) => {
                let number = number_of(&request);
                let answer = hold(engine).ask(uptime(), request);
                link.send(&Packet::Answered(number, answer), Duration::from_secs(1)).is_ok()
            }
            _ => false,
        }
    }
}

/// A connection that this agent made has failed, or its peer was replaced.
fn lost_link(state: &mut State, to: MemberId, number: u64) {
    if state.peers.get(&to).is_some_and(|(of, _)| *of == number)
        && let Some((_, link)) = state.peers.remove(&to)
    {
        link.close();
    }
}

/// Carries out the calls of one connection. The thread does not keep the membership.
fn serve(shared: &Weak<Shared>, calls: Admitted) {
    // (Without its name the agent would count what it writes for no member.)
    if let Ok(name) = CString::new(name_of_thread(calls.caller())) {
        let _ = rustix::thread::set_name(&name);
    }
    calls.serve(&|from, body| Some(Weak::upgrade(shared)?.host.call(from, body)));
}

fn weak(shared: Arc<Shared>) -> Weak<Shared> {
    Arc::downgrade(&shared)
}

fn number_of(request: &Request) -> u64 {
    match request {
        Request::Join(_) => 0,
        Request::Of { number, .. } => *number,
    }
}
