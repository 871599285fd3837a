//! A member at work: its threads, its connections, and the registry if this is the pool's first member.
//!
//! The rules are in [`Member`]; this module brings it time and messages. What it sends may be lost, because a connection
//! fails: the member asks again. So no lock is held while a peer or the registry is awaited. A member sends on connections
//! that it made, and receives on those that others made: so two that connect at once do not end each other's.
//!
//! Threads: `pool-listen` accepts, `pool-greet` shakes hands with one peer, `pool-connect` connects to one, `pool-in-…`
//! receives from one, `pool-registry` asks a registry in a server, `pool-tick` brings time, `pool-host` waits until the kernel has forgotten, `pool-serve` carries out
//! the calls of one connection. Each other connection has two of its own.

mod joining;
mod links;
mod server;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::{Deserialize, Serialize};
use surgetank_types::clock::{tick, uptime};

use crate::calls::{Serving, Whereabouts};
use crate::connection::{Connection, Hello, PROTOCOL, Purpose};
use crate::member::{Authority, Member, Message, Output};
use crate::registry::{Answer, Claim, Join, MemberRecord, Refusal, Request};
use crate::secret::{Secret, Tls};
use crate::{Directory, Embedded, Epoch, MemberId, Term, Uptime, sockets};
pub use joining::{Joining, RegistryAt, Resumed};
use server::Asking;

/// The registry is tried again so often.
const RETRY: Duration = Duration::from_millis(200);

/// So long the registry's server may refuse connections: it may just start.
const REFUSED: Duration = Duration::from_secs(4);
/// So long a registry in a server may take to end the pool.
const ENDING: Duration = Duration::from_secs(5);

/// What the agent does for its member.
pub trait Host: Send + Sync {
    /// Forgets what is believed of the directory, and returns when the kernel has too.
    fn forget(&self, directory: &Directory);
    /// The membership has ended: the agent stops serving, and writes down what it holds.
    fn expelled(&self);
    /// Carries out the call of another member ([`crate::Caller::call`]), and returns the reply. Runs in the thread of the
    /// call's connection, which has a stack of 1 MiB. It may run on after the membership has ended.
    ///
    /// The caller gets an empty reply if this one has more than [`crate::calls::BODY_BYTES_MAX`] bytes, or if this panics.
    fn call(&self, from: MemberId, body: Vec<u8>) -> Vec<u8> {
        let _ = (from, body);
        Vec::new()
    }
    /// The directory's authority may be another one now. Comes in order with [`Self::forget`], which it follows.
    fn changed(&self, directory: &Directory) {
        let _ = directory;
    }
    /// The member has left, or was lost, and never comes back. Some of its calls may still run.
    fn gone(&self, member: MemberId) {
        let _ = member;
    }
}

/// Why a directory could not be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotClaimed {
    /// That member decides its names.
    Owned(Claim),
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
    introduction: ([u8; 16], Secret),
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
    /// Calls of other members. Locked after `state`, never before it.
    serving: Mutex<Serving>,
    duties: Mutex<Option<Sender<Duty>>>,
    greetings: AtomicUsize,
    stops: AtomicBool,
}

/// What the host has to do, in order, by a thread that holds no lock.
enum Duty {
    Forget(Directory, Claim),
    Changed(Directory),
    Gone(MemberId),
    Expelled,
}

enum Registry {
    Here(Mutex<Embedded>),
    Peer(String),
    Server(Asking),
}

struct State {
    member: Option<Member>,
    /// The answer to a join.
    joined: Option<Answer>,
    /// To the registry, with a number of its own: what ends late must not end its successor.
    registry: Option<(u64, Connection)>,
    /// To members, for sending.
    peers: HashMap<MemberId, (u64, Arc<Connection>)>,
    /// From members, for receiving, and from those who ask the registry.
    incoming: HashMap<u64, (Option<MemberId>, Arc<Connection>)>,
    next_link: u64,
    /// Being connected to (`None`: the registry), and what is sent then.
    connecting: HashMap<Option<(MemberId, Term)>, Vec<Packet>>,
    /// The host is forgetting.
    forgetting: HashSet<(Directory, Claim)>,
    /// Why the last connection to the registry was not made.
    failure: Option<(io::ErrorKind, String)>,
    /// When the registry was last asked for news because a member was not reached.
    looked: Uptime,
    expelled: bool,
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Membership {
    /// Listens, and joins the pool.
    ///
    /// Errors:
    /// - `PermissionDenied`: the registry refused, because the secret is another one, for example.
    /// - `ConnectionAborted`: the registry has ended ([`Self::end_registry`]).
    /// - `ConnectionRefused`: nothing listens at the registry's address.
    /// - `TimedOut`: the registry was not reached.
    pub fn join(joining: Joining, host: Arc<dyn Host>) -> io::Result<Self> {
        let introduction = (joining.pool, joining.secret.clone());
        let tls = joining.secret.tls().map_err(io::Error::other)?;
        let (listener, address) = sockets::listen(&joining.host)?;
        let uid = rustix::process::geteuid().as_raw();
        let shared = Arc::new(Shared {
            tls,
            hello: Hello { version: PROTOCOL, pool: joining.pool, uid, member: None, purpose: Purpose::Control },
            host,
            registry: match joining.registry {
                RegistryAt::Here(lease) => Registry::Here(Mutex::new(Embedded::new(lease))),
                RegistryAt::Peer(address) => Registry::Peer(address),
                RegistryAt::Server { place, name, pool } => Registry::Server(Asking::new(*place, name, *pool)),
            },
            state: Mutex::new(State {
                member: None,
                joined: None,
                registry: None,
                peers: HashMap::new(),
                incoming: HashMap::new(),
                next_link: 1,
                connecting: HashMap::new(),
                forgetting: HashSet::new(),
                failure: None,
                looked: Uptime::ZERO,
                expelled: false,
            }),
            changed: Condvar::new(),
            serving: Mutex::default(),
            duties: Mutex::new(None),
            greetings: AtomicUsize::new(0),
            stops: AtomicBool::new(false),
        });
        let mut membership =
            Self { shared: shared.clone(), threads: Vec::new(), address: address.clone(), introduction };
        let (sender, duties) = channel();
        *hold(&shared.duties) = Some(sender);
        listener.set_nonblocking(true)?;
        membership.spawn("pool-listen", move |shared| shared.listen_loop(&listener))?;
        membership.spawn("pool-host", move |shared| shared.host_loop(&duties))?;
        if matches!(shared.registry, Registry::Server(_)) {
            membership.spawn("pool-registry", |shared| {
                if let Registry::Server(asking) = &shared.registry {
                    asking.run(shared);
                }
            })?;
        }
        let owned = joining.resumes.as_ref().map_or(&[][..], |resumed| &resumed.owned);
        let mut instance = [0; 16];
        rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty())?;
        let resumes = joining.resumes.as_ref().map(|resumed| (resumed.member, resumed.term));
        let join = Join { instance, resumes, address, temporaries: joining.temporaries, role: joining.role };
        let (sent, answer) = shared.await_joined(&join, tick() + joining.patience)?;
        let member = Member::new(sent, answer, joining.times, owned).map_err(|answer| {
            let (kind, why) = match answer {
                Answer::Refused(Refusal::NotAMember) => {
                    (io::ErrorKind::Other, "its lease ended before the agent was replaced")
                }
                Answer::Refused(Refusal::Superseded) => (io::ErrorKind::Other, "a later agent is this member"),
                Answer::Refused(Refusal::Ended) => (io::ErrorKind::ConnectionAborted, "the pool has ended"),
                Answer::Refused(Refusal::OtherStore) => {
                    (io::ErrorKind::AlreadyExists, "the pool of this name has another store")
                }
                Answer::Refused(Refusal::OtherSecret) => {
                    (io::ErrorKind::PermissionDenied, "the pool has another secret, or another user's")
                }
                _ => (io::ErrorKind::Other, "the registry gave no answer to a join"),
            };
            io::Error::new(kind, why)
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

    /// What a [`crate::Caller`] needs to speak for this member: the pool, and its secret.
    pub fn introduction(&self) -> &([u8; 16], Secret) {
        &self.introduction
    }

    /// Is the registry in this agent?
    pub fn has_registry(&self) -> bool {
        matches!(self.shared.registry, Registry::Here(_))
    }

    /// Ends the pool if no other member is registered: every later join is refused. Returns whether it has ended. If not, or
    /// if the registry is in another agent, nothing has changed.
    pub fn end_registry(&self) -> bool {
        let engine = match &self.shared.registry {
            Registry::Here(engine) => engine,
            Registry::Peer(_) => return false,
            Registry::Server(asking) => return asking.end(ENDING),
        };
        let Some((own, _)) = self.id() else { return false };
        hold(engine).end(uptime(), own)
    }

    /// Where a member is, for a [`crate::Caller`]. Asks the registry for news if it is not known.
    pub fn find(&self, member: MemberId) -> Whereabouts {
        let mut state = hold(&self.shared.state);
        for is_last in [false, true] {
            if state.expelled {
                return Whereabouts::Expelled;
            }
            let Some(me) = state.member.as_ref() else { return Whereabouts::Expelled };
            if let Some(record) = me.record_of(member) {
                return Whereabouts::At(record.term, record.address.clone());
            }
            if hold(&self.shared.serving).is_gone(member) {
                return Whereabouts::Gone;
            }
            if !is_last {
                // (A registry in this process answers at once.)
                self.shared.look(&mut state);
            }
        }
        Whereabouts::Unknown
    }

    /// Asks the registry for news at once.
    pub fn look_again(&self) {
        let mut state = hold(&self.shared.state);
        if let Some(member) = state.member.as_mut() {
            member.look_again(uptime());
        }
        self.shared.send_outputs(&mut state);
    }

    /// The members, as far as this one knows.
    pub fn members(&self) -> Vec<MemberId> {
        hold(&self.shared.state).member.as_ref().map_or_else(Vec::new, |member| member.members().collect())
    }

    /// The members, with what this one knows of each.
    pub fn records(&self) -> Vec<MemberRecord> {
        let state = hold(&self.shared.state);
        state.member.as_ref().map_or_else(Vec::new, |member| member.records().cloned().collect())
    }

    /// Members that were lost, as far as this one knows.
    pub fn lost(&self) -> Vec<MemberRecord> {
        let state = hold(&self.shared.state);
        state.member.as_ref().map_or_else(Vec::new, |member| member.lost().cloned().collect())
    }

    /// All claims that this member knows, its own among them.
    pub fn claims(&self) -> Vec<(Directory, Claim)> {
        let state = hold(&self.shared.state);
        let copy = |(directory, claim): (&Directory, Claim)| (directory.clone(), claim);
        state.member.as_ref().map_or_else(Vec::new, |member| member.claims().map(copy).collect())
    }

    /// The uptime ([`uptime`]) until which this member may serve, as far as is known now: each renewal makes it later. It
    /// may be past. `None`: the membership has ended, or this member leaves.
    pub fn serves_until(&self) -> Option<Uptime> {
        hold(&self.shared.state).member.as_ref()?.serves_until()
    }

    /// Who decides the names of the directory. `None`: this agent may not serve.
    pub fn authority(&self, directory: &Directory) -> Option<Authority> {
        hold(&self.shared.state).member.as_ref()?.authority(uptime(), directory)
    }

    /// Owns the directory, once all other members know it. Returns the number of the ownership.
    pub fn claim(&self, directory: &Directory, patience: Duration) -> Result<Epoch, NotClaimed> {
        let until = tick() + patience;
        let mut state = hold(&self.shared.state);
        loop {
            let now = uptime();
            let expelled = state.expelled;
            let Some(member) = state.member.as_mut().filter(|_| !expelled) else { return Err(NotClaimed::Expelled) };
            match member.authority(now, directory) {
                Some(Authority::Ours(epoch)) => return Ok(epoch),
                Some(Authority::Peer(claim)) => return Err(NotClaimed::Owned(claim)),
                Some(Authority::Store | Authority::Lost(_)) => member.claim(now, directory),
                Some(Authority::Between) | None => {}
            }
            let left = until.saturating_duration_since(tick());
            if left.is_zero() {
                member.give_up(now, directory);
                self.shared.send_outputs(&mut state);
                // (Another thread may still want it.)
                self.shared.changed.notify_all();
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
    pub fn leave(&self, patience: Duration) -> bool {
        let until = tick() + patience;
        let mut state = hold(&self.shared.state);
        if let Some(member) = state.member.as_mut() {
            member.leave(uptime());
        }
        while !state.expelled {
            self.shared.send_outputs(&mut state);
            let left = until.saturating_duration_since(tick());
            if left.is_zero() || state.expelled {
                break;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.expelled
    }

    /// Bytes on the network so far for each peer that is connected or has called: received, sent.
    pub fn network_bytes(&self) -> Vec<(MemberId, (u64, u64))> {
        let state = hold(&self.shared.state);
        let incoming = state.incoming.values().filter_map(|(id, link)| Some(((*id)?, &**link)));
        let outgoing = state.peers.iter().map(|(id, (_, link))| (*id, &**link));
        let mut sums: BTreeMap<MemberId, (u64, u64)> = BTreeMap::new();
        for (id, link) in incoming.chain(outgoing) {
            let (received, sent) = link.network_bytes();
            let sum = sums.entry(id).or_default();
            *sum = (sum.0 + received, sum.1 + sent);
        }
        for (id, (received, sent)) in hold(&self.shared.serving).network_bytes() {
            let sum = sums.entry(id).or_default();
            *sum = (sum.0 + received, sum.1 + sent);
        }
        sums.into_iter().collect()
    }

    /// Closes all connections with members, as a network that fails. For tests.
    #[doc(hidden)]
    pub fn cut_connections(&self) {
        let state = hold(&self.shared.state);
        state.peers.values().for_each(|(_, link)| link.close());
        let from_members = state.incoming.values().filter(|(from, _)| from.is_some());
        from_members.for_each(|(_, link)| link.close());
        hold(&self.shared.serving).cut();
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
        {
            let mut state = hold(&self.shared.state);
            state.member = None;
            state.registry = None;
            state.peers.drain().for_each(|(_, (_, link))| link.close());
            state.incoming.values().for_each(|(_, link)| link.close());
            state.incoming.clear();
        }
        hold(&self.shared.serving).close();
        self.shared.changed.notify_all();
        if let Registry::Server(asking) = &self.shared.registry {
            asking.wake();
        }
        // (A host may drop it in its own thread, which cannot be awaited there.)
        let own = thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
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
            let again = until.min(tick() + RETRY);
            while state.joined.is_none() && tick() < again {
                let left = again.saturating_duration_since(tick());
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if let Some(answer) = state.joined.take() {
                return Ok((sent, answer));
            }
            let is_server = matches!(self.registry, Registry::Server(_));
            // (Its server is not there, and a wrong password stays wrong.)
            let is_final = |(kind, _): &(io::ErrorKind, String)| match kind {
                io::ErrorKind::PermissionDenied => true,
                io::ErrorKind::ConnectionRefused => uptime() >= sent + REFUSED,
                _ => false,
            };
            if tick() >= until || is_server && state.failure.as_ref().is_some_and(is_final) {
                let timed_out = || (io::ErrorKind::TimedOut, "it does not answer".to_owned());
                let (kind, why) = state.failure.clone().unwrap_or_else(timed_out);
                let address = match &self.registry {
                    Registry::Here(_) => return Err(io::Error::other(why)),
                    Registry::Peer(address) => address.clone(),
                    Registry::Server(asking) => asking.place().to_string(),
                };
                let text = format!("the pool's registry at {address} was not reached: {why}");
                return Err(io::Error::new(kind, text));
            }
        }
    }

    fn tick_loop(self: &Arc<Self>) {
        let mut state = hold(&self.state);
        while !self.stops() {
            let now = uptime();
            let is_alone = matches!(self.registry, Registry::Peer(_)) && state.registry.is_none();
            let Some(member) = state.member.as_mut() else { return };
            member.tick(now);
            if is_alone {
                member.look_again(now);
            }
            let wait = member.wake().saturating_sub(now).clamp(Duration::from_millis(1), RETRY);
            self.send_outputs(&mut state);
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn host_loop(self: &Arc<Self>, duties: &Receiver<Duty>) {
        for duty in duties {
            let (directory, claim) = match duty {
                Duty::Forget(directory, claim) => (directory, claim),
                Duty::Expelled => {
                    self.host.expelled();
                    continue;
                }
                _ if self.stops() => continue,
                Duty::Changed(directory) => {
                    self.host.changed(&directory);
                    continue;
                }
                Duty::Gone(member) => {
                    self.host.gone(member);
                    continue;
                }
            };
            if !self.stops() {
                self.host.forget(&directory);
            }
            let mut state = hold(&self.state);
            state.forgetting.remove(&(directory.clone(), claim));
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
                Output::Forget(directory, claim) => {
                    // (An owner repeats itself until it is answered.)
                    if state.forgetting.insert((directory.clone(), claim)) {
                        self.oblige(Duty::Forget(directory, claim));
                    }
                }
                Output::Changed(directory) => {
                    self.changed.notify_all();
                    self.oblige(Duty::Changed(directory));
                }
                Output::Gone(member) => {
                    hold(&self.serving).gone(member);
                    self.oblige(Duty::Gone(member));
                }
                Output::Serves => self.changed.notify_all(),
                Output::Expelled => {
                    state.expelled = true;
                    hold(&self.serving).close();
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
}
