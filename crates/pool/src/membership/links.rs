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

use super::{Packet, Registry, Shared, State, hold};
use crate::connection::{Closed, Connection, Event, Hello};
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
                None => self.connect(state, None, address.clone(), Packet::Ask(request)),
            },
        }
    }

    pub(super) fn tell(self: &Arc<Self>, state: &mut State, to: MemberId, message: Message) {
        let record = state.member.as_ref().and_then(|member| member.record_of(to));
        let Some(MemberRecord { term, address, .. }) = record.cloned() else { return };
        let packet = Packet::Said(message);
        match state.peers.get(&to) {
            Some((_, link)) if link.peer().member == Some((to, term)) => {
                if link.send(&packet, Duration::ZERO).is_err() {
                    state.peers.remove(&to);
                }
            }
            _ => {
                // (To an agent that was replaced.)
                state.peers.remove(&to);
                self.connect(state, Some((to, term)), address, packet);
            }
        }
    }

    /// In a thread of its own, which then sends. `None`: to the registry.
    fn connect(self: &Arc<Self>, state: &mut State, to: Option<(MemberId, Term)>, address: String, packet: Packet) {
        let id = to.map(|(id, _)| id);
        if let Some(packets) = state.connecting.get_mut(&id) {
            if packets.len() < PACKETS_MAX {
                packets.push(packet);
            }
            return;
        }
        if self.stops() {
            return;
        }
        state.connecting.insert(id, vec![packet]);
        let number = state.next_link;
        state.next_link += 1;
        let me = state.member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: to.and(me), ..self.hello.clone() };
        let shared = self.clone();
        let connect = move || {
            let is_it = |peer: &Hello| to.is_none() || peer.member == to;
            let deliver = shared.deliver(number, id);
            let made = Connection::connect(&address, (&shared.tls, hello), CONNECTING, is_it, deliver);
            let mut state = hold(&shared.state);
            let packets = state.connecting.remove(&id).unwrap_or_default();
            match made {
                _ if shared.stops() => {}
                Ok(link) => {
                    let is_sent = packets.iter().all(|packet| link.send(packet, Duration::ZERO).is_ok());
                    match id {
                        _ if !is_sent => {}
                        None => (state.registry, state.failure) = (Some((number, link)), None),
                        Some(id) => drop(state.peers.insert(id, (number, link))),
                    }
                }
                Err(why) => {
                    if id.is_none() {
                        state.failure = Some(why.to_string());
                    }
                }
            }
            shared.changed.notify_all();
        };
        if thread::Builder::new().name("pool-connect".to_owned()).spawn(connect).is_err() {
            state.connecting.remove(&id);
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
                (Event::Closed(_), Some(to)) => {
                    if state.peers.get(&to).is_some_and(|(of, _)| *of == number) {
                        state.peers.remove(&to);
                    }
                }
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
