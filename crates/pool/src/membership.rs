//! A member at work: its threads, its connections, and the registry if this is the pool's first member.
//!
//! The rules are in [`Member`]; this module brings it time and messages. What it sends may be lost, because a connection
//! fails or is not there yet: the member asks again. So no lock is held while a peer or the registry is awaited.
//!
//! Threads: `pool-listen` accepts, `pool-greet` shakes hands with one peer, `pool-connect` connects to one,
//! `pool-tick` brings time, `pool-host` waits until the kernel has forgotten. Each connection has two of its own.

use std::collections::{HashMap, HashSet};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::{Deserialize, Serialize};
use surgetank_types::clock::uptime;

use crate::connection::{Closed, Connection, Event, Hello, PROTOCOL};
use crate::member::{Authority, Member, Message, Output, Times};
use crate::registry::{Answer, Claim, Join, Refusal, Request};
use crate::secret::{Secret, Tls};
use crate::{Directory, Embedded, Epoch, MemberId, Term};

/// So many peers may shake hands at once. More are refused: only strangers need so long.
const GREETINGS_MAX: usize = 64;
/// The registry is tried again so often.
const RETRY: Duration = Duration::from_millis(200);

/// Where the registry is.
#[derive(Debug, Clone)]
pub enum RegistryAt {
    /// In this agent, the pool's first member. A lease lasts so long.
    Here(Duration),
    /// At the first member: `HOST:PORT`.
    Peer(String),
}

/// How an agent joins.
#[derive(Debug, Clone)]
pub struct Joining {
    /// What all members have in common.
    pub secret: Secret,
    /// Random, one for each pool.
    pub pool: [u8; 16],
    /// Where the registry is.
    pub registry: RegistryAt,
    /// The host name or address under which other members reach this machine.
    pub host: String,
    /// What the agent continues.
    pub resumes: Option<Resumed>,
    /// How long a member waits for what.
    pub times: Times,
    /// How long the join may take.
    pub patience: Duration,
}

/// What an agent continues that replaces another one.
#[derive(Debug, Clone)]
pub struct Resumed {
    /// The member.
    pub member: MemberId,
    /// Higher than that of the agent before, as the supervisor counts.
    pub term: Term,
    /// The directories that the catalog knows as owned.
    pub owned: Vec<(Directory, Epoch)>,
}

/// What the agent does for its member.
pub trait Host: Send + Sync {
    /// Forgets what is believed of the directory, and returns when the kernel has too.
    fn forget(&self, directory: &Directory);
    /// The membership has ended: the agent stops serving, and writes down what it holds.
    fn expelled(&self);
}

/// Why a directory could not be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotClaimed {
    /// That member decides its names.
    Owned(Claim),
    /// Its owner is lost.
    OwnerLost(Claim),
    /// This agent has left the pool, or was lost.
    Expelled,
    /// The patience has run out: the registry or a member does not answer.
    TimedOut,
}

/// What members send each other.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Packet {
    /// To the registry.
    Ask(Request),
    /// From it, to the request with this number; 0: to a join.
    Answered(u64, Answer),
    /// To a member.
    Said(Message),
}

/// A running member. Dropping it ends its threads without leaving, as the death of an agent does.
pub struct Membership {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    address: String,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("address", &self.address).finish_non_exhaustive()
    }
}

struct Shared {
    tls: Tls,
    hello: Hello,
    host: Arc<dyn Host>,
    registry: Registry,
    state: Mutex<State>,
    changed: Condvar,
    duties: Mutex<Option<Sender<Duty>>>,
    greetings: AtomicUsize,
    stops: AtomicBool,
}

/// What the host has to do, in order, by a thread that holds no lock.
enum Duty {
    Forget(Directory, Claim),
    Expelled,
}

enum Registry {
    Here(Mutex<Embedded>),
    Peer(String),
}

struct State {
    member: Option<Member>,
    /// The answer to a join.
    joined: Option<Answer>,
    registry: Option<Connection>,
    peers: HashMap<MemberId, Connection>,
    /// Being connected to.
    connecting: HashSet<Option<MemberId>>,
    /// Why the last connection to the registry was not made.
    failure: Option<String>,
    expelled: bool,
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Membership {
    /// Listens, and joins the pool.
    ///
    /// Errors: the registry was not reached or refused; the secret is another one.
    pub fn join(joining: Joining, host: Arc<dyn Host>) -> io::Result<Self> {
        let tls = joining.secret.tls().map_err(io::Error::other)?;
        let listener = TcpListener::bind((joining.host.as_str(), 0))?;
        let address = format!("{}:{}", joining.host, listener.local_addr()?.port());
        let uid = rustix::process::geteuid().as_raw();
        let shared = Arc::new(Shared {
            tls,
            hello: Hello { version: PROTOCOL, pool: joining.pool, uid, member: None },
            host,
            registry: match joining.registry {
                RegistryAt::Here(lease) => Registry::Here(Mutex::new(Embedded::new(lease))),
                RegistryAt::Peer(address) => Registry::Peer(address),
            },
            state: Mutex::new(State {
                member: None,
                joined: None,
                registry: None,
                peers: HashMap::new(),
                connecting: HashSet::new(),
                failure: None,
                expelled: false,
            }),
            changed: Condvar::new(),
            duties: Mutex::new(None),
            greetings: AtomicUsize::new(0),
            stops: AtomicBool::new(false),
        });
        let mut membership = Self { shared: shared.clone(), threads: Vec::new(), address: address.clone() };
        let (sender, duties) = channel();
        *hold(&shared.duties) = Some(sender);
        listener.set_nonblocking(true)?;
        membership.spawn("pool-listen", move |shared| shared.listen_loop(&listener))?;
        membership.spawn("pool-host", move |shared| shared.host_loop(&duties))?;
        let owned = joining.resumes.as_ref().map_or(&[][..], |resumed| &resumed.owned);
        let mut instance = [0; 16];
        rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty())?;
        let join =
            Join { instance, resumes: joining.resumes.as_ref().map(|resumed| (resumed.member, resumed.term)), address };
        let (sent, answer) = shared.await_joined(&join, Instant::now() + joining.patience)?;
        let member = Member::new(sent, answer, joining.times, owned).map_err(|answer| {
            let why = match answer {
                Answer::Refused(Refusal::NotAMember) => "its lease ended before the agent was replaced",
                Answer::Refused(Refusal::Superseded) => "a later agent is this member",
                _ => "the registry gave no answer to a join",
            };
            io::Error::other(why)
        })?;
        hold(&shared.state).member = Some(member);
        membership.spawn("pool-tick", |shared| shared.tick_loop())?;
        Ok(membership)
    }

    /// Where other members reach it: `HOST:PORT`. The first member's is the registry's, too.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Which member it is, and its term.
    pub fn id(&self) -> Option<(MemberId, Term)> {
        hold(&self.shared.state).member.as_ref().map(|member| (member.id(), member.term()))
    }

    /// The members, as far as this one knows.
    pub fn members(&self) -> Vec<MemberId> {
        hold(&self.shared.state).member.as_ref().map_or_else(Vec::new, |member| member.members().collect())
    }

    /// Who decides the names of the directory. `None`: this agent may not serve.
    pub fn authority(&self, directory: &Directory) -> Option<Authority> {
        hold(&self.shared.state).member.as_ref()?.authority(uptime(), directory)
    }

    /// Owns the directory, once all other members know it. Returns the number of the ownership.
    pub fn claim(&self, directory: &Directory, patience: Duration) -> Result<Epoch, NotClaimed> {
        let until = Instant::now() + patience;
        let mut state = hold(&self.shared.state);
        loop {
            let now = uptime();
            let expelled = state.expelled;
            let Some(member) = state.member.as_mut().filter(|_| !expelled) else { return Err(NotClaimed::Expelled) };
            match member.authority(now, directory) {
                Some(Authority::Ours(epoch)) => return Ok(epoch),
                Some(Authority::Peer(claim)) => return Err(NotClaimed::Owned(claim)),
                Some(Authority::Lost(claim)) => return Err(NotClaimed::OwnerLost(claim)),
                Some(Authority::Store) => member.claim(now, directory),
                Some(Authority::Between) | None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                member.release(now, directory);
                self.shared.send_outputs(&mut state);
                return Err(NotClaimed::TimedOut);
            }
            self.shared.send_outputs(&mut state);
            // (A claim at a registry in this process is answered already.)
            let now = uptime();
            let is_ours = |member: &Member| matches!(member.authority(now, directory), Some(Authority::Ours(_)));
            if !state.member.as_ref().is_some_and(is_ours) {
                state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Gives the directory back. All changes are in the store.
    pub fn release(&self, directory: &Directory) {
        let mut state = hold(&self.shared.state);
        if let Some(member) = state.member.as_mut() {
            member.release(uptime(), directory);
        }
        self.shared.send_outputs(&mut state);
    }

    /// Ends the membership. The caller has released all directories. Returns whether the registry confirmed it in time.
    pub fn leave(self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = hold(&self.shared.state);
        if let Some(member) = state.member.as_mut() {
            member.leave(uptime());
        }
        while !state.expelled {
            self.shared.send_outputs(&mut state);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.expelled {
                break;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.expelled
    }

    /// Bytes on the network so far for each peer that is connected: received, sent.
    pub fn network_bytes(&self) -> Vec<(MemberId, (u64, u64))> {
        hold(&self.shared.state).peers.iter().map(|(id, link)| (*id, link.network_bytes())).collect()
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce(&Arc<Shared>) + Send + 'static) -> io::Result<()> {
        let shared = self.shared.clone();
        self.threads.push(thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared))?);
        Ok(())
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        *hold(&self.shared.duties) = None;
        let (registry, peers) = {
            let mut state = hold(&self.shared.state);
            state.member = None;
            (state.registry.take(), std::mem::take(&mut state.peers))
        };
        drop((registry, peers));
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // (A panic has been reported by its thread.)
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn stops(&self) -> bool {
        self.stops.load(Ordering::Acquire)
    }

    /// The answer to a join, and when the join was sent.
    fn await_joined(self: &Arc<Self>, join: &Join, until: Instant) -> io::Result<(Duration, Answer)> {
        // (The answer may be to any try: the lease counts from the first.)
        let sent = uptime();
        loop {
            let mut state = hold(&self.state);
            self.ask_registry(&mut state, Request::Join(join.clone()));
            let again = until.min(Instant::now() + RETRY);
            while state.joined.is_none() && Instant::now() < again {
                let left = again.saturating_duration_since(Instant::now());
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if let Some(answer) = state.joined.take() {
                return Ok((sent, answer));
            }
            if Instant::now() >= until {
                let why = state.failure.clone().unwrap_or_else(|| "it does not answer".to_owned());
                let Registry::Peer(address) = &self.registry else { return Err(io::Error::other(why)) };
                let text = format!("the pool's registry at {address} was not reached: {why}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
        }
    }

    fn tick_loop(self: &Arc<Self>) {
        let mut state = hold(&self.state);
        while !self.stops() {
            let now = uptime();
            let Some(member) = state.member.as_mut() else { return };
            member.tick(now);
            let wait = member.wake().saturating_sub(now).clamp(Duration::from_millis(1), RETRY);
            self.send_outputs(&mut state);
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn host_loop(self: &Arc<Self>, duties: &Receiver<Duty>) {
        for duty in duties {
            let Duty::Forget(directory, claim) = duty else {
                self.host.expelled();
                continue;
            };
            self.host.forget(&directory);
            let mut state = hold(&self.state);
            if let Some(member) = state.member.as_mut() {
                member.forgotten(directory, claim);
            }
            self.send_outputs(&mut state);
        }
    }

    /// Sends what the member wants sent. What cannot be sent now is asked again by the member.
    fn send_outputs(self: &Arc<Self>, state: &mut State) {
        while let Some(output) = state.member.as_mut().and_then(Member::next_output) {
            match output {
                Output::Ask(request) => self.ask_registry(state, request),
                Output::Tell(to, message) => self.tell(state, to, message),
                Output::Forget(directory, claim) => self.oblige(Duty::Forget(directory, claim)),
                Output::Changed(_) | Output::Serves => self.changed.notify_all(),
                Output::Expelled => {
                    state.expelled = true;
                    self.changed.notify_all();
                    self.oblige(Duty::Expelled);
                }
            }
        }
    }

    fn oblige(&self, duty: Duty) {
        if let Some(duties) = hold(&self.duties).as_ref() {
            // (Its thread ends only with the membership.)
            let _ = duties.send(duty);
        }
    }

    fn ask_registry(self: &Arc<Self>, state: &mut State, request: Request) {
        match &self.registry {
            Registry::Here(engine) => {
                let number = number_of(&request);
                let answer = hold(engine).ask(uptime(), request);
                self.take_answer(state, number, answer);
            }
            Registry::Peer(address) => match &state.registry {
                Some(link) => {
                    if link.send(&Packet::Ask(request), Duration::ZERO).is_err() {
                        state.registry = None;
                    }
                }
                None => self.connect(state, None, address.clone()),
            },
        }
    }

    fn tell(self: &Arc<Self>, state: &mut State, to: MemberId, message: Message) {
        if let Some(link) = state.peers.get(&to) {
            if link.send(&Packet::Said(message), Duration::ZERO).is_err() {
                state.peers.remove(&to);
            }
            return;
        }
        let address = state.member.as_ref().and_then(|member| member.address_of(to)).map(str::to_owned);
        if let Some(address) = address {
            self.connect(state, Some(to), address);
        }
    }

    /// In a thread of its own. `None`: to the registry.
    fn connect(self: &Arc<Self>, state: &mut State, to: Option<MemberId>, address: String) {
        let patience = Duration::from_secs(5);
        if self.stops() || !state.connecting.insert(to) {
            return;
        }
        let me = state.member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: to.and(me), ..self.hello.clone() };
        let shared = self.clone();
        let connect = move || {
            let made = Connection::connect(&address, &shared.tls, hello, patience, shared.deliver(to));
            let mut state = hold(&shared.state);
            state.connecting.remove(&to);
            match (made, to) {
                _ if shared.stops() => {}
                (Ok(link), None) => (state.registry, state.failure) = (Some(link), None),
                (Ok(link), Some(to)) => drop(state.peers.insert(to, link)),
                (Err(why), None) => state.failure = Some(why.to_string()),
                (Err(_), Some(_)) => {}
            }
            shared.changed.notify_all();
        };
        if thread::Builder::new().name("pool-connect".to_owned()).spawn(connect).is_err() {
            state.connecting.remove(&to);
        }
    }

    /// What to do with the packets of a connection that this agent made.
    fn deliver(self: &Arc<Self>, from: Option<MemberId>) -> impl FnMut(Event<Packet>) + Send + use<> {
        // (A connection must not keep its owner.)
        let shared = Arc::downgrade(self);
        move |event| {
            let Some(shared) = Weak::upgrade(&shared) else { return };
            let mut state = hold(&shared.state);
            match (event, from) {
                (Event::Message(Packet::Answered(number, answer)), None) => {
                    shared.take_answer(&mut state, number, answer)
                }
                (Event::Message(Packet::Said(message)), Some(from)) => shared.take_message(&mut state, from, message),
                // (What has no place on such a connection is of no use.)
                (Event::Message(_), _) => {}
                (Event::Closed(_), None) => state.registry = None,
                (Event::Closed(_), Some(from)) => drop(state.peers.remove(&from)),
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

    fn take_message(self: &Arc<Self>, state: &mut State, from: MemberId, message: Message) {
        if let Some(member) = state.member.as_mut() {
            member.told(from, message);
        }
        self.changed.notify_all();
    }

    fn listen_loop(self: &Arc<Self>, listener: &TcpListener) {
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
                Err(_) => {
                    // (Also while descriptors are short.)
                    let mut waits = [rustix::event::PollFd::new(listener, rustix::event::PollFlags::IN)];
                    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
                    let _ = rustix::event::poll(&mut waits, Some(&time));
                }
            }
        }
    }

    /// Takes up a connection. The registry answers on it; a member's becomes the one to that member.
    fn greet(self: &Arc<Self>, socket: TcpStream) -> Result<(), Closed> {
        socket.set_nonblocking(false)?;
        let me = hold(&self.state).member.as_ref().map(|member| (member.id(), member.term()));
        let hello = Hello { member: me, ..self.hello.clone() };
        let (packets, events) = channel();
        let deliver = move |event| drop(packets.send(event));
        let link = Connection::accept::<Packet>(socket, &self.tls, hello, Duration::from_secs(5), deliver)?;
        match link.peer().member {
            Some((from, _)) => {
                let mut deliver = self.deliver(Some(from));
                // (Both may have connected at once. The later one serves for sending, both for receiving.)
                let mut state = hold(&self.state);
                if !self.stops() {
                    state.peers.insert(from, link);
                }
                drop(state);
                thread::Builder::new().name("pool-peer".to_owned()).spawn(move || {
                    events.into_iter().for_each(&mut deliver);
                })?;
            }
            None => {
                let shared = Arc::downgrade(self);
                thread::Builder::new().name("pool-registry".to_owned()).spawn(move || {
                    for event in events {
                        let (Event::Message(Packet::Ask(request)), Some(shared)) = (event, shared.upgrade()) else {
                            break;
                        };
                        let (number, Registry::Here(engine)) = (number_of(&request), &shared.registry) else { break };
                        if shared.stops() {
                            break;
                        }
                        let answer = hold(engine).ask(uptime(), request);
                        if link.send(&Packet::Answered(number, answer), Duration::from_secs(1)).is_err() {
                            break;
                        }
                    }
                })?;
            }
        }
        Ok(())
    }
}

fn number_of(request: &Request) -> u64 {
    match request {
        Request::Join(_) => 0,
        Request::Of { number, .. } => *number,
    }
}
