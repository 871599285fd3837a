//! The connections of a member: to the registry, to members for sending, from members for receiving.
//!
//! The dangers that this avoids: two members that connect at once and end each other's connections; an answer of another
//! member, or of an earlier agent, in the name of the one that was asked; a connection that ends late and takes its
//! successor with it.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use surgetank_types::clock::uptime;

use super::{Packet, RETRY, Registry, Shared, State, hold};
use crate::connection::{Closed, Connection, Event, Hello};
use crate::frame::FRAME_BYTES_MAX;
use crate::member::Message;
use crate::registry::{Answer, MemberRecord, Request};
use crate::{MemberId, Term};

/// So many peers may shake hands at once. More are refused: only strangers need long.
const GREETINGS_MAX: usize = 256;
/// A stranger is refused after this time.
const GREETING: Duration = Duration::from_secs(3);
/// How long connecting may take.
const CONNECTING: Duration = Duration::from_secs(3);
/// So many packets wait for a connection that is being made, and for a thread that receives.
const PACKETS_MAX: usize = 256;
/// The bodies of calls that wait for a connection have so many bytes at most.
const WAITING_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX;
/// How long a packet waits for room in the queue of a connection.
pub(super) const SENDING: Duration = Duration::from_secs(5);

/// How a packet gets to a member.
pub(super) enum Route {
    /// The caller sends it on this connection, without the state's lock. A failure: [`Shared::lost_link`].
    Link(u64, Arc<Connection>),
    /// It is sent once the connection is made.
    Queued,
    /// It cannot be sent now: the member is not known, or too much waits for its connection.
    Nowhere,
}

impl Shared {
    pub(super) fn ask_registry(self: &Arc<Self>, state: &mut State, request: Request) {
        match &self.registry {
            Registry::Here(engine) => {
                let number = number_of(&request);
                let answer = hold(engine).ask(uptime(), request);
                self.take_answer(state, number, answer);
            }
            Registry::Peer(address) => match &state.registry {
                Some((_, link)) => {
                    if link.send(&Packet::Ask(request), Duration::ZERO).is_err() {
                        state.registry = None;
                    }
                }
                None => drop(self.connect(state, None, address.clone(), &Packet::Ask(request))),
            },
        }
    }

    pub(super) fn tell(self: &Arc<Self>, state: &mut State, to: MemberId, message: Message) {
        let packet = Packet::Said(message);
        // (Bodies of calls may fill the queue: they must not delay claims.)
        if let Route::Link(number, link) = self.send_to(state, to, None, &packet)
            && link.send_urgent(&packet).is_err()
        {
            self.lost_link(state, to, number);
        }
    }

    /// Finds the connection for a packet, or makes one. `term`: only to the agent of that term.
    pub(super) fn send_to(
        self: &Arc<Self>,
        state: &mut State,
        to: MemberId,
        term: Option<Term>,
        packet: &Packet,
    ) -> Route {
        let record = state.member.as_ref().and_then(|member| member.record_of(to));
        let Some(MemberRecord { term: known, address, .. }) = record.cloned() else { return Route::Nowhere };
        if term.is_some_and(|term| term != known) {
            return Route::Nowhere;
        }
        match state.peers.get(&to) {
            Some((number, link)) if link.peer().member == Some((to, known)) => Route::Link(*number, link.clone()),
            replaced => {
                if let Some((number, _)) = replaced {
                    self.lost_link(state, to, *number);
                }
                let is_queued = self.connect(state, Some((to, known)), address, packet);
                if is_queued { Route::Queued } else { Route::Nowhere }
            }
        }
    }

    /// A connection that this agent made has failed, or its peer was replaced.
    pub(super) fn lost_link(&self, state: &mut State, to: MemberId, number: u64) {
        if state.peers.get(&to).is_some_and(|(of, _)| *of == number)
            && let Some((_, link)) = state.peers.remove(&to)
        {
            link.close();
        }
        hold(&self.calls).send_again(to);
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

    /// In a thread of its own, which then sends. `None`: to the registry. Returns whether the packet is queued.
    fn connect(
        self: &Arc<Self>,
        state: &mut State,
        to: Option<(MemberId, Term)>,
        address: String,
        packet: &Packet,
    ) -> bool {
        if let Some(packets) = state.connecting.get_mut(&to) {
            let bytes: usize = packets.iter().map(Packet::body_bytes).sum();
            let has_room = packets.len() < PACKETS_MAX && bytes < WAITING_BYTES_MAX;
            if has_room {
                packets.push(packet.clone());
            }
            return has_room;
        }
        if self.stops() {
            return false;
        }
        state.connecting.insert(to, vec![packet.clone()]);
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
        let is_begun = thread::Builder::new().name("pool-connect".to_owned()).spawn(connect).is_ok();
        if !is_begun {
            state.connecting.remove(&to);
        }
        is_begun
    }

    /// Sends what waits for a connection, then uses it for all that comes later.
    fn take_up(&self, number: u64, to: Option<(MemberId, Term)>, link: Connection) {
        let mut state = hold(&self.state);
        let is_open = loop {
            match state.connecting.get_mut(&to).map(std::mem::take) {
                _ if self.stops() => break false,
                Some(packets) if !packets.is_empty() => {
                    drop(state);
                    let is_sent = packets.iter().all(|packet| matches!(link.offer(packet, SENDING), Ok(true)));
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
        } else {
            hold(&self.calls).send_again(id);
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
                (Event::Closed(_), Some(to)) => shared.lost_link(&mut state, to, number),
            }
            shared.send_outputs(&mut state);
        }
    }

    fn take_answer(self: &Arc<Self>, state: &mut State, number: u64, answer: Answer) {
        match state.member.as_mut() {
            Some(member) if number > 0 => member.answered(uptime(), number, answer),
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
                        let _ = shared.greet(socket);
                        shared.greetings.fetch_sub(1, Ordering::AcqRel);
                    };
                    if thread::Builder::new().name("pool-greet".to_owned()).spawn(greet).is_err() {
                        self.greetings.fetch_sub(1, Ordering::AcqRel);
                    }
                }
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {
                    let mut waits = [rustix::event::PollFd::new(listener, rustix::event::PollFlags::IN)];
                    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                    let _ = rustix::event::poll(&mut waits, Some(&time));
                }
                // (While descriptors are short, for example.)
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Takes up a connection: from a member, or from an agent that asks the registry.
    fn greet(self: &Arc<Self>, socket: TcpStream) -> Result<(), Closed> {
        socket.set_nonblocking(false)?;
        let me = hold(&self.state).member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: me, ..self.hello.clone() };
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
        let link = Connection::accept::<Packet>(socket, (&self.tls, hello), GREETING, may_be, deliver)?;
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
                if let Some(from) = from {
                    // (A reply may be lost.)
                    hold(&shared.calls).send_again(from);
                }
            }
        };
        if thread::Builder::new().name(name).spawn(receive).is_err() {
            hold(&self.state).incoming.remove(&number);
        }
        Ok(())
    }

    /// Returns whether the connection goes on.
    fn take_packet(self: &Arc<Self>, from: Option<MemberId>, packet: Packet, link: &Connection) -> bool {
        match (packet, from, &self.registry) {
            (Packet::Said(message), Some(from), _) => {
                let mut state = hold(&self.state);
                if let Some(member) = state.member.as_mut() {
                    member.told(from, message);
                }
                self.send_outputs(&mut state);
                true
            }
            (Packet::Call { number, oldest, body }, Some(_), _) => {
                if let Some(from) = link.peer().member {
                    self.take_call(from, number, oldest, body);
                }
                true
            }
            (Packet::Replied { number, body }, Some(from), _) => {
                hold(&self.calls).take_reply(from, number, body);
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

fn number_of(request: &Request) -> u64 {
    match request {
        Request::Join(_) => 0,
        Request::Of { number, .. } => *number,
    }
}
