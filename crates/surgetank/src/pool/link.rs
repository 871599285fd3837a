//! The agent's connection to the pool's process: claims, what is known of claims, and where other members are. Calls to
//! other members go to them directly.
//!
//! The danger that this avoids: the agent answers for a directory after another member has claimed it. So what the
//! process says about claims is taken in order, by one thread, and a claim of another member is acknowledged only when no
//! request that began before it is under way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use surgetank_core::report::Traffic;
use surgetank_pool::calls::{CallFailed, Caller, Once, Waits, Whereabouts};
use surgetank_pool::frame::Frames;
use surgetank_pool::{MemberId, Secret, Term};
use surgetank_types::clock::{tick, uptime};

use super::call::{Answer, Ask, Call, Stored, encoded};
use super::others::contents::{Content, below};
use super::status::PoolStatus;
use crate::socket_address::Address;

mod messages;
mod turns;
pub use messages::{Claimed, FromProcess, Me, Moves, Owner, Place, Renamed, ToProcess, receive, send};
pub use turns::{Turns, UnderWay};

/// So long after its last moment of service a member's lease has ended in any case.
/// (A renewal may be under way for 4 s, then its connection is closed.)
const OVER: Duration = Duration::from_secs(8);
/// In the list of those that the next agent asks: the member has read delegations. (No pool has so many members.)
const READS: u32 = 1 << 31;
/// So long the process may take to say where a member is.
const FINDING: Duration = Duration::from_secs(2);

/// Why a call has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// The member has left or is lost.
    Gone,
    TimedOut,
    Expelled,
    /// The process of this agent does not answer.
    NoProcess,
}

/// What the agent does for its link.
pub trait Agent: Send + Sync {
    /// Forgets what it believes of a directory, and returns when the kernel has too.
    fn forget(&self, directory: &[u8]);
    /// The directory is the store's again, or this member's.
    fn given(&self, directory: &[u8]);
    /// Answers what another member asks the agent itself.
    fn asked(&self, member: u32, ask: &Ask) -> Answer;
    /// Another member leaves; these are its directories that were looked up here.
    fn leaves(&self, member: u32, directories: Vec<Stored>);
}

enum Reply {
    Claimed(Claimed),
    Found(Place),
    Count(u32),
    LookedUp(Vec<Stored>),
    Status(PoolStatus),
}

/// The agent's side.
pub struct Link {
    out: Mutex<UnixStream>,
    me: Me,
    caller: OnceLock<Caller>,
    /// Random, and not a number of the kernel's.
    own_calls: u64,
    /// How many calls each member got.
    counts: Mutex<HashMap<u32, u64>>,
    owners: RwLock<HashMap<Box<[u8]>, Owner>>,
    /// Lost members, and how the names of their temporaries in the store begin.
    lost: RwLock<BTreeMap<u32, String>>,
    losses: AtomicUsize,
    /// Directories that lost members had.
    concerned: RwLock<BTreeSet<Box<[u8]>>>,
    serves_until_nanos: AtomicU64,
    waiting: Mutex<HashMap<u64, SyncSender<Reply>>>,
    next: AtomicU64,
    readers: Turns,
    agent: OnceLock<Arc<dyn Agent>>,
    ended: AtomicBool,
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Link {
    /// Connects to the process, which may still be joining. Errors: why it did not join.
    pub fn connect(socket: &Path, patience: Duration) -> io::Result<Arc<Self>> {
        surgetank_types::heap::keep_buffers();
        let until = tick() + patience;
        let mut stream = loop {
            match UnixStream::connect(Address::of(socket)?.path()) {
                Ok(stream) => break stream,
                Err(why) if tick() >= until => return Err(why),
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut frames = Frames::default();
        stream.set_read_timeout(Some(until.saturating_duration_since(tick()).max(Duration::from_millis(1))))?;
        let (me, claims, lost, serves_until) = match receive(&mut stream, &mut frames)? {
            FromProcess::Joined { me, claims, lost, serves_until } => (me, claims, lost, serves_until),
            FromProcess::Refused(why) => return Err(io::Error::other(why)),
            _ => return Err(io::Error::other("the pool's process began with something else")),
        };
        stream.set_read_timeout(None)?;
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let link = Arc::new(Self {
            out: Mutex::new(stream.try_clone()?),
            me,
            caller: OnceLock::new(),
            own_calls: u64::from_ne_bytes(random) | 1 << 63,
            counts: Mutex::default(),
            owners: RwLock::default(),
            losses: AtomicUsize::new(lost.len()),
            // (Which ones they had is not known.)
            concerned: RwLock::new(lost.first().map(|_| Box::default()).into_iter().collect()),
            lost: RwLock::new(lost.into_iter().collect()),
            // (Known before the first request: without a lease each of them would get EIO.)
            serves_until_nanos: AtomicU64::new(nanos(serves_until)),
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            readers: Turns::default(),
            agent: OnceLock::new(),
            ended: AtomicBool::new(false),
        });
        claims.into_iter().for_each(|(directory, owner)| link.learn(directory, owner));
        let caller = link.calls()?;
        let _ = link.caller.set(caller);
        let reads = link.clone();
        thread::Builder::new().name("pool-link".to_owned()).spawn(move || reads.read_loop(stream, frames))?;
        Ok(link)
    }

    fn calls(self: &Arc<Self>) -> io::Result<Caller> {
        let secret = Secret::parse(&self.me.secret).ok_or_else(|| io::Error::other("the pool's secret is damaged"))?;
        let link = Arc::downgrade(self);
        let find = move |member: MemberId| match link.upgrade().map(|link| link.find(member.0)) {
            Some(Place::At(term, address)) => Whereabouts::At(Term(term), address),
            Some(Place::Unknown) => Whereabouts::Unknown,
            Some(Place::Gone) => Whereabouts::Gone,
            Some(Place::Expelled) | None => Whereabouts::Expelled,
        };
        let me = (MemberId(self.me.member), Term(self.me.term));
        Caller::new(&secret, self.me.pool, me, Box::new(find))
    }

    /// Where a member is now.
    pub fn find(&self, member: u32) -> Place {
        let until = tick() + FINDING;
        match self.ask(|id| ToProcess::Find { id, member }, || tick() < until) {
            Ok(Reply::Found(place)) => place,
            Err(NoAnswer::NoProcess) => Place::Expelled,
            _ => Place::Unknown,
        }
    }

    /// Tells this pool from earlier ones.
    pub fn key(&self) -> String {
        key_of(&self.me.pool)
    }

    /// The number of this member, from 1.
    pub fn member(&self) -> u32 {
        self.me.member
    }

    /// Was an agent of this member there before?
    pub fn had_earlier(&self) -> bool {
        self.me.had_earlier
    }

    /// Members to which an earlier agent of this member sent copies of its files.
    pub fn holders(&self) -> impl Iterator<Item = u32> {
        self.me.holders.iter().copied().filter(|member| member & READS == 0)
    }

    /// Members to which an earlier agent of this member gave read delegations.
    pub fn readers(&self) -> impl Iterator<Item = u32> {
        self.me.holders.iter().filter(|member| **member & READS != 0).map(|member| member & !READS)
    }

    /// Before the member gets the first copy: the next agent will know that it may have some. Returns whether that is noted.
    pub fn may_hold(&self, member: u32, patience: Duration) -> bool {
        self.count(|id| ToProcess::MayHold { id, member }, patience).is_ok()
    }

    /// The same before it gets the first read delegation.
    pub fn may_read(&self, member: u32, patience: Duration) -> bool {
        self.may_hold(member | READS, patience)
    }

    /// The process that acts for other members on this machine.
    pub fn process(&self) -> u32 {
        self.me.process
    }

    /// From now on other members are served.
    pub fn serve(&self, agent: Arc<dyn Agent>) {
        // (Set again, it is the same one.)
        let _ = self.agent.set(agent);
        self.say(&ToProcess::Serving);
    }

    /// May the agent answer for directories that it owns, and believe the store?
    pub fn may_serve(&self) -> bool {
        uptime() < self.serves_until()
    }

    /// Until when it may, by [`uptime`]. Zero: not any more.
    pub fn serves_until(&self) -> Duration {
        Duration::from_nanos(self.serves_until_nanos.load(Ordering::Acquire))
    }

    /// Has the membership ended? (Its lease ended some time ago, and is never renewed then.)
    pub fn is_over(&self) -> bool {
        // (Zero: it has ended.)
        self.ended.load(Ordering::Acquire) || uptime() > self.serves_until() + OVER
    }

    /// Who decides the names of the directory.
    pub fn owner(&self, directory: &[u8]) -> Owner {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        owners.get(directory).copied().unwrap_or(Owner::TheStore)
    }

    /// The directories of the store that other members own, and whose they are.
    pub fn owned_by_others(&self) -> Vec<(Box<[u8]>, u32)> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        let of = |owner: &Owner| match owner {
            Owner::Member(member, _) | Owner::Lost(member) => Some(*member),
            Owner::TheStore | Owner::Us | Owner::Between => None,
        };
        owners.iter().filter_map(|(directory, owner)| Some((directory.clone(), of(owner)?))).collect()
    }

    /// For a request that reads what the store says. While one is under way, a claim is not acknowledged.
    pub fn reading(&self) -> UnderWay<'_> {
        self.readers.enter()
    }

    /// Owns the directory. `patient` says whether to wait on. `moves`: the directory is to be renamed, and
    /// [`Self::moving`] follows.
    pub fn claim(&self, directory: &[u8], moves: Option<Moves>, patient: impl FnMut() -> bool) -> Claimed {
        let directory = Box::from(directory);
        match self.ask(|id| ToProcess::Claim { id, directory, moves }, patient) {
            Ok(Reply::Claimed(claimed)) => claimed,
            Err(NoAnswer::TimedOut) => Claimed::TimedOut,
            _ => Claimed::Expelled,
        }
    }

    /// A directory is being renamed, or not, although directories were claimed for it (`None`).
    pub fn moving(&self, renamed: Option<Renamed>) {
        self.say(&ToProcess::Moving { renamed });
    }

    /// The directories of this member below this path, as far as they are claimed.
    pub fn owned_below(&self, directory: &[u8]) -> Vec<Box<[u8]>> {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        let is_below = |path: &[u8]| path.strip_prefix(directory).is_some_and(|rest| rest.starts_with(b"/"));
        owners
            .iter()
            .filter(|(path, owner)| **owner == Owner::Us && is_below(path))
            .map(|(path, _)| path.clone())
            .collect()
    }

    /// Asks another member. `once`: it does this once, also if an earlier agent asked the same. `patient` is asked every 50 ms.
    pub fn call(
        &self,
        member: u32,
        call: &Call,
        once: Option<Once>,
        patient: &mut dyn FnMut(Waits) -> bool,
    ) -> Result<Answer, NoAnswer> {
        let Some(caller) = self.caller.get() else { return Err(NoAnswer::NoProcess) };
        let body = encoded(call);
        // (Programs cause the others.)
        if !matches!(call.ask, Ask::OldestAge) {
            *hold(&self.counts).entry(member).or_default() += 1;
        }
        let mut goes_on = |waits| !self.is_over() && patient(waits);
        let answer = caller.call(MemberId(member), once, &body, &mut goes_on).map_err(|why| match why {
            CallFailed::Gone => NoAnswer::Gone,
            CallFailed::TimedOut => NoAnswer::TimedOut,
            CallFailed::Expelled | CallFailed::TooLong => NoAnswer::Expelled,
        })?;
        // (Another member may decide by now about what it says.)
        if self.losses() > 0 && self.lost().contains_key(&member) {
            return Err(NoAnswer::Gone);
        }
        // (A member that cannot serve answers nothing.)
        postcard::from_bytes(&answer).map_err(|_| NoAnswer::TimedOut)
    }

    /// How many members are lost.
    pub fn losses(&self) -> usize {
        self.losses.load(Ordering::Acquire)
    }

    /// Lost members, and how the names of their temporaries in the store begin. (Empty: the one that said that it is lost does
    /// not know it.)
    pub fn lost(&self) -> BTreeMap<u32, String> {
        self.lost.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// May something be missing in the directory, or in one above it, because its member is lost?
    pub fn is_of_lost(&self, directory: &[u8]) -> bool {
        let concerned = self.concerned.read().unwrap_or_else(PoisonError::into_inner);
        concerned.iter().any(|of| of.is_empty() || below(directory, of).is_some())
    }

    /// Nothing that the member says is believed any more.
    pub fn is_lost(&self, member: u32, temporaries: &str) {
        let owners = self.owners.read().unwrap_or_else(PoisonError::into_inner);
        let had = |owner: &Owner| matches!(owner, Owner::Member(of, _) | Owner::Lost(of) if *of == member);
        let had: Vec<_> =
            owners.iter().filter(|(_, owner)| had(owner)).map(|(directory, _)| directory.clone()).collect();
        drop(owners);
        self.concerned.write().unwrap_or_else(PoisonError::into_inner).extend(had);
        let mut lost = self.lost.write().unwrap_or_else(PoisonError::into_inner);
        let known = lost.entry(member).or_default();
        if known.is_empty() {
            temporaries.clone_into(known);
        }
        self.losses.store(lost.len(), Ordering::Release);
    }

    /// Puts the content for a lost member's file under its path, as a program of this node would. Returns whether it is there,
    /// or something else is; `None`: it failed.
    pub fn put_back(&self, number: u64, (content, syncs): (&Content, bool), patience: Duration) -> Option<bool> {
        let number = (!content.is_directory).then_some(number);
        let (path, perm, owner) = (content.path.as_slice().into(), content.perm, content.owner);
        match self.count(|id| ToProcess::PutBack { id, number, path, perm, owner, syncs }, patience) {
            Ok(0) => Some(true),
            Ok(1) => Some(false),
            _ => None,
        }
    }

    /// A number for a call that belongs to no request of the kernel.
    pub fn next_once(&self) -> Once {
        Once { request: self.own_calls, part: self.next.fetch_add(1, Ordering::Relaxed) as u32 }
    }

    /// The program has the answer: the other member may forget it.
    pub fn answered(&self, member: u32, once: Once) {
        if let Some(caller) = self.caller.get() {
            caller.answered(MemberId(member), once);
        }
    }

    /// This agent's calls to each member, and their bytes on the network.
    pub fn traffic(&self) -> Vec<Traffic> {
        let counts = hold(&self.counts).clone();
        let bytes = self.caller.get().map(Caller::network_bytes).unwrap_or_default();
        let traffic = bytes.into_iter().map(|(MemberId(member), (received_bytes, sent_bytes))| {
            let calls = counts.get(&member).copied().unwrap_or_default();
            Traffic { member, calls, received_bytes, sent_bytes }
        });
        traffic.collect()
    }

    /// Returns when no member believes the old name, or the old attributes, of a directory.
    pub fn await_seen(&self, node: u64, thread: u32, patience: Duration) {
        let until = tick() + patience;
        // (A process that does not answer has ended, and the agent serves no more.)
        let _ = self.ask(|id| ToProcess::Changed { id, node, thread }, || tick() < until);
    }

    /// Gives back one directory. Returns whether it is the store's again.
    pub fn give_back(&self, directory: &[u8], patience: Duration) -> bool {
        let directory = Box::from(directory);
        matches!(self.count(|id| ToProcess::GiveBack { id, directory }, patience), Ok(0))
    }

    /// Asks the registry for news. (They come soon.)
    pub fn look(&self, patience: Duration) {
        let _ = self.count(|id| ToProcess::Look { id }, patience);
    }

    /// Gives back all directories.
    pub fn release(&self, patience: Duration) -> bool {
        let until = tick() + patience;
        self.ask(|id| ToProcess::Release { id }, || tick() < until).is_ok()
    }

    /// The directories of this member that another one has looked up. Everything in them is in the store.
    pub fn looked_up(&self, member: u32, patience: Duration) -> Vec<Stored> {
        let until = tick() + patience;
        match self.ask(|id| ToProcess::LookedUp { id, member }, || tick() < until) {
            Ok(Reply::LookedUp(directories)) => directories,
            _ => Vec::new(),
        }
    }

    /// Ends the membership; returns the number of members that still need this one.
    pub fn leave(&self, patience: Duration) -> Result<u32, NoAnswer> {
        self.count(|id| ToProcess::Leave { id }, patience)
    }

    /// Closes what other members have open here; returns how many files they had open.
    pub fn close(&self, patience: Duration) -> Result<u32, NoAnswer> {
        self.count(|id| ToProcess::Close { id }, patience)
    }

    /// The pool, as this member sees it.
    pub fn status(&self, patience: Duration) -> Result<PoolStatus, NoAnswer> {
        let until = tick() + patience;
        let Reply::Status(mut status) = self.ask(|id| ToProcess::Status { id }, || tick() < until)? else {
            return Err(NoAnswer::NoProcess);
        };
        for traffic in self.traffic() {
            if let Some(status) = status.members.iter_mut().find(|status| status.member == traffic.member) {
                status.calls = traffic.calls;
                status.received_bytes += traffic.received_bytes;
                status.sent_bytes += traffic.sent_bytes;
            }
        }
        Ok(status)
    }

    fn count(&self, message: impl FnOnce(u64) -> ToProcess, patience: Duration) -> Result<u32, NoAnswer> {
        let until = tick() + patience;
        match self.ask(message, || tick() < until)? {
            Reply::Count(count) => Ok(count),
            _ => Err(NoAnswer::NoProcess),
        }
    }

    /// Sends a request and waits for its reply. `patient` is asked every 50 ms.
    fn ask(
        &self,
        message: impl FnOnce(u64) -> ToProcess,
        mut patient: impl FnMut() -> bool,
    ) -> Result<Reply, NoAnswer> {
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, replies) = sync_channel(1);
        hold(&self.waiting).insert(id, sender);
        let reply = if self.say(&message(id)) {
            loop {
                match replies.recv_timeout(LOOK_EVERY) {
                    Ok(reply) => break Ok(reply),
                    Err(RecvTimeoutError::Disconnected) => break Err(NoAnswer::NoProcess),
                    Err(RecvTimeoutError::Timeout) if !patient() => break Err(NoAnswer::TimedOut),
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
        } else {
            Err(NoAnswer::NoProcess)
        };
        hold(&self.waiting).remove(&id);
        reply
    }

    /// Returns whether it was sent.
    fn say(&self, message: &ToProcess) -> bool {
        !self.ended.load(Ordering::Acquire) && send(&mut hold(&self.out), message).is_ok()
    }

    fn read_loop(self: &Arc<Self>, mut stream: UnixStream, mut frames: Frames) {
        while let Ok(message) = receive(&mut stream, &mut frames) {
            self.take(message);
        }
        self.ended.store(true, Ordering::Release);
        self.serves_until_nanos.store(0, Ordering::Release);
        hold(&self.waiting).clear();
    }

    fn take(self: &Arc<Self>, message: FromProcess) {
        match message {
            FromProcess::Joined { .. } | FromProcess::Refused(_) => {}
            FromProcess::Claims(directory, owner) => {
                // (Before it is known: requests then read what the store says.)
                if let (Some(agent), Owner::TheStore | Owner::Us | Owner::Between) = (self.agent.get(), owner) {
                    agent.given(&directory);
                }
                self.learn(directory, owner);
            }
            FromProcess::Lost(member, temporaries) => self.is_lost(member, &temporaries),
            FromProcess::Forget { token, directory, owner } => {
                self.learn(directory.clone(), owner);
                let link = self.clone();
                let forget = move || {
                    let ended = || link.ended.load(Ordering::Acquire);
                    link.readers.await_earlier(ended);
                    // (The kernel may believe what an earlier agent said.)
                    while link.agent.get().is_none() && !ended() {
                        thread::sleep(Duration::from_millis(5));
                    }
                    if let Some(agent) = link.agent.get() {
                        agent.forget(&directory);
                    }
                    link.say(&ToProcess::Forgotten { token });
                };
                // (Without a thread the claim is not acknowledged, and the owner asks again.)
                let _ = thread::Builder::new().name("pool-forget".to_owned()).spawn(forget);
            }
            FromProcess::Asked { token, member, ask } => {
                let link = self.clone();
                let answer = move || {
                    while link.agent.get().is_none() && !link.ended.load(Ordering::Acquire) {
                        thread::sleep(Duration::from_millis(5));
                    }
                    if let Some(agent) = link.agent.get() {
                        let answer = encoded(&agent.asked(member, &ask));
                        link.say(&ToProcess::Answered { token, answer });
                    }
                };
                // (Without a thread the other member asks again.)
                let _ = thread::Builder::new().name("pool-asked".to_owned()).spawn(answer);
            }
            FromProcess::Leaves { member, directories } => {
                if let Some(agent) = self.agent.get() {
                    agent.leaves(member, directories);
                }
            }
            FromProcess::LookedUp { id, directories } => self.reply(id, Reply::LookedUp(directories)),
            FromProcess::ServesUntil(until) => self.serves_until_nanos.store(nanos(until), Ordering::Release),
            FromProcess::Claimed { id, claimed } => self.reply(id, Reply::Claimed(claimed)),
            FromProcess::Found { id, place } => self.reply(id, Reply::Found(place)),
            FromProcess::Seen { id } | FromProcess::Released { id } => self.reply(id, Reply::Count(0)),
            FromProcess::Left { id, others: count } | FromProcess::PutBack { id, end: count } => {
                self.reply(id, Reply::Count(count))
            }
            FromProcess::Closed { id, handles } => self.reply(id, Reply::Count(handles)),
            FromProcess::Status { id, status } => self.reply(id, Reply::Status(status)),
        }
    }

    fn reply(&self, id: u64, reply: Reply) {
        if let Some(sender) = hold(&self.waiting).remove(&id) {
            // (One that has stopped waiting needs it no more.)
            let _ = sender.try_send(reply);
        }
    }

    fn learn(&self, directory: Box<[u8]>, owner: Owner) {
        if let Owner::Lost(_) = owner {
            self.concerned.write().unwrap_or_else(PoisonError::into_inner).insert(directory.clone());
        }
        let mut owners = self.owners.write().unwrap_or_else(PoisonError::into_inner);
        match owner {
            Owner::TheStore => owners.remove(&directory),
            owner => owners.insert(directory, owner),
        };
    }
}

/// Tells a pool from earlier ones.
pub fn key_of(pool: &[u8; 16]) -> String {
    pool.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
