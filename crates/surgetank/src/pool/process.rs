//! The pool's process: the membership of this node, and what other members do here.
//!
//! States: joining; a member; left. Agents come and go beside it, one at a time: each connects, learns all claims, and is
//! asked to forget what another member claims. What no agent acknowledges is asked of the next one.
//!
//! The danger that this avoids: a membership, or open files of other nodes, that end with an agent.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use surgetank_core::report::LostMember;
use surgetank_policy::config::PoolConfig;
use surgetank_pool::calls::Whereabouts;
use surgetank_pool::frame::Frames;
use surgetank_pool::membership::{Host, NotClaimed};
use surgetank_pool::{Authority, Claim, Directory, MemberId, Membership};
use surgetank_types::clock::{tick, uptime};
use surgetank_types::error::Error;
use surgetank_types::workers::Workers;

use super::call::{Answer, Ask, Call, encoded};
use super::export::Export;
use super::link::{Claimed, FromProcess, Me, Moves, Owner, Place, ToProcess, key_of, receive, send};
use super::rendezvous::meeting::{Meeting, Where};
use super::rendezvous::{self, Joined};
use super::status::{ClaimStatus, MemberStatus, PoolStatus};

/// So long a claim may take.
const CLAIM: Duration = Duration::from_secs(60);
/// So long the agent, or the next one, may take to answer another member.
const WISH: Duration = Duration::from_secs(20);
/// So long the agent may take for another member's command.
const TENDING: Duration = Duration::from_secs(3600);
/// So long the registry may take to release a directory.
const RELEASE: Duration = Duration::from_secs(5);
/// How often the agent learns until when it may serve.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What the process starts with.
pub struct Start {
    /// The pool.
    pub config: PoolConfig,
    /// The store, in which members find each other.
    pub store: Where,
    /// The mount's directory.
    pub over: PathBuf,
    /// So long other members may believe an answer about a directory.
    pub believed: Duration,
    /// Begins the names of the agent's temporaries in the store.
    pub temporaries: String,
    /// Where the agent connects.
    pub socket: UnixListener,
}

struct Process {
    export: Export,
    membership: OnceLock<Membership>,
    /// The present agent.
    agent: Mutex<Option<(u64, UnixStream)>>,
    agents: AtomicU64,
    /// Members that may have copies of this one's files.
    holders: Mutex<BTreeSet<u32>>,
    serving: AtomicBool,
    /// The membership ends in order.
    leaves: AtomicBool,
    forgetting: Mutex<HashMap<u64, bool>>,
    forgotten: Condvar,
    tokens: AtomicU64,
    /// What other members ask the agent, and its answers.
    asked: Mutex<HashMap<u64, Option<Vec<u8>>>>,
    answered: Condvar,
    workers: Workers,
    refused: Mutex<Option<String>>,
    store: OnceLock<Meeting>,
    /// The file by which others find the pool, if this member made it.
    made: Mutex<Option<Vec<u8>>>,
    changed: Condvar,
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs until it is killed; the supervisor does that.
pub fn main(start: Start) -> u8 {
    let Start { config, store, over, believed, temporaries, socket } = start;
    surgetank_types::heap::keep_buffers();
    // SAFETY: takes and returns numbers. A write beyond the limit of sizes then fails, as for the program that asked for it.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let process = Arc::new(Process {
        export: Export::new(over, believed),
        membership: OnceLock::new(),
        agent: Mutex::new(None),
        agents: AtomicU64::new(0),
        holders: Mutex::default(),
        serving: AtomicBool::new(false),
        leaves: AtomicBool::new(false),
        forgetting: Mutex::default(),
        forgotten: Condvar::new(),
        tokens: AtomicU64::new(1),
        asked: Mutex::default(),
        answered: Condvar::new(),
        workers: Workers::new("pool-agent", 16),
        refused: Mutex::new(None),
        store: OnceLock::new(),
        made: Mutex::new(None),
        changed: Condvar::new(),
    });
    let listens = process.clone();
    let listen = move || {
        for stream in socket.incoming().flatten() {
            listens.attend(stream);
        }
    };
    if thread::Builder::new().name("pool-agents".to_owned()).spawn(listen).is_err() {
        return 1;
    }
    let joined = store.open().map_err(|why| refusal(&why)).and_then(|meeting| {
        let meeting = process.store.get_or_init(|| meeting);
        let host = process.clone() as Arc<dyn Host>;
        rendezvous::join(&config, &temporaries, meeting, &host).map_err(|why| why.to_string())
    });
    match joined {
        Ok(Joined { membership, made }) => {
            *hold(&process.made) = made;
            let _ = process.membership.set(membership);
        }
        Err(why) => *hold(&process.refused) = Some(why),
    }
    process.changed.notify_all();
    let mut before = Duration::ZERO;
    let mut is_member = false;
    let mut look_at_files = tick();
    loop {
        let until = process.membership.get().and_then(Membership::serves_until).unwrap_or_default();
        if until != before {
            before = until;
            process.say(&FromProcess::ServesUntil(until));
        }
        let serves = process.membership.get().is_some_and(|membership| !is_over(membership));
        if is_member && !serves && !process.leaves.load(Ordering::Acquire) {
            tracing::error!(
                pool = config.name,
                "the lease of this node has ended: if it was cut off, or the first member is gone, programs get EIO now"
            );
        }
        is_member = serves;
        // (A close may wait for the agent.)
        if tick() >= look_at_files {
            look_at_files = tick() + Duration::from_secs(1);
            process.run(|process| process.export.end_keeping());
        }
        thread::sleep(LOOK_EVERY);
    }
}

impl Process {
    fn say(&self, message: &FromProcess) -> bool {
        let mut agent = hold(&self.agent);
        agent.as_mut().is_some_and(|(_, stream)| send(stream, message).is_ok())
    }

    /// Says who owns the directory, as it is while nothing else is said.
    fn say_owner(&self, directory: &Directory) {
        let mut agent = hold(&self.agent);
        let owner = self.owner(directory);
        if let Some((_, stream)) = agent.as_mut() {
            let _ = send(stream, &FromProcess::Claims(directory.0.clone(), owner));
        }
    }

    fn owner(&self, directory: &Directory) -> Owner {
        match self.membership.get().and_then(|membership| membership.authority(directory)) {
            Some(authority) => owner_of(authority),
            // (The agent does not serve then, whatever it knows.)
            None => Owner::Between,
        }
    }

    /// An agent has connected: it serves from now on in the place of the one before.
    fn attend(self: &Arc<Self>, stream: UnixStream) {
        let process = self.clone();
        let attend = move || {
            let me = rustix::process::geteuid().as_raw();
            let is_ours = rustix::net::sockopt::socket_peercred(&stream).is_ok_and(|peer| peer.uid.as_raw() == me);
            if is_ours {
                // (The connection has ended; the next agent makes another one.)
                let _ = process.attend_in_thread(stream);
            }
        };
        // (The agent tries again.)
        let _ = thread::Builder::new().name("pool-agent".to_owned()).spawn(attend);
    }

    fn attend_in_thread(self: &Arc<Self>, mut stream: UnixStream) -> io::Result<()> {
        let me = {
            let mut refused = hold(&self.refused);
            loop {
                if let Some(why) = &*refused {
                    return send(&mut stream, &FromProcess::Refused(why.clone()));
                }
                if let Some(me) = self.me() {
                    break me;
                }
                refused = self.changed.wait_timeout(refused, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
            }
        };
        let number = self.agents.fetch_add(1, Ordering::AcqRel) + 1;
        {
            let mut agent = hold(&self.agent);
            let membership = self.membership.get();
            let known = membership.map(Membership::claims).unwrap_or_default();
            let claims =
                known.into_iter().map(|(directory, _)| (directory.0.clone(), self.owner(&directory))).collect();
            let mut writer = stream.try_clone()?;
            let serves_until = membership.and_then(Membership::serves_until).unwrap_or_default();
            let lost = membership.map(Membership::lost).unwrap_or_default();
            let lost = lost.into_iter().map(|record| (record.id.0, record.temporaries)).collect();
            send(&mut writer, &FromProcess::Joined { me, claims, lost, serves_until })?;
            *agent = Some((number, writer));
        }
        self.forgotten.notify_all();
        let mut frames = Frames::default();
        let ended = loop {
            match receive::<ToProcess>(&mut stream, &mut frames) {
                Ok(message) => self.take(message),
                Err(why) => break why,
            }
        };
        let mut agent = hold(&self.agent);
        if agent.as_ref().is_some_and(|(present, _)| *present == number) {
            *agent = None;
        }
        Err(ended)
    }

    fn take(self: &Arc<Self>, message: ToProcess) {
        match message {
            ToProcess::Serving => self.run(|process| {
                let pool = process.membership.get().map(|membership| membership.introduction().0);
                process.export.prepare(&pool.map(|pool| key_of(&pool)).unwrap_or_default());
                process.serving.store(true, Ordering::Release);
            }),
            ToProcess::Forgotten { token } => {
                hold(&self.forgetting).insert(token, true);
                self.forgotten.notify_all();
            }
            ToProcess::Answered { token, answer } => {
                if let Some(waits) = hold(&self.asked).get_mut(&token) {
                    *waits = Some(answer);
                }
                self.answered.notify_all();
            }
            ToProcess::GiveBack { id, directory } => self.run(move |process| {
                let directory = Directory(directory);
                let is_kept = !process.give_back(&directory);
                process.say_owner(&directory);
                process.say(&FromProcess::Left { id, others: u32::from(is_kept) });
            }),
            ToProcess::Look { id } => {
                if let Some(membership) = self.membership.get() {
                    membership.look_again();
                }
                self.say(&FromProcess::Left { id, others: 0 });
            }
            ToProcess::PutBack { id, number, path, perm, owner, syncs } => self.run(move |process| {
                let end = match process.export.put_back((number, syncs), &path, perm, owner) {
                    Ok(true) => 0,
                    Ok(false) => 1,
                    Err(why) => {
                        tracing::info!(%why, ?number, "content for a lost member's file was not put back");
                        2
                    }
                };
                process.say(&FromProcess::PutBack { id, end });
            }),
            ToProcess::MayHold { id, member } => {
                hold(&self.holders).insert(member);
                self.say(&FromProcess::Left { id, others: 0 });
            }
            ToProcess::Find { id, member } => {
                let place = self.find(MemberId(member));
                self.say(&FromProcess::Found { id, place });
            }
            ToProcess::Changed { id, node, thread } => self.run(move |process| {
                process.export.await_seen(node, thread);
                process.say(&FromProcess::Seen { id });
            }),
            ToProcess::Moving { renamed } => {
                // (Before the rename is done.)
                self.export.renamed(renamed.as_ref());
                self.run(|process| process.export.keep_moved());
            }
            ToProcess::Claim { id, directory, moves } => self.run(move |process| {
                let directory = Directory(directory);
                let claimed = process.claim(&directory, moves);
                process.say_owner(&directory);
                process.say(&FromProcess::Claimed { id, claimed });
            }),
            ToProcess::Release { id } => self.run(move |process| {
                process.release_all();
                process.say(&FromProcess::Released { id });
            }),
            ToProcess::LookedUp { id, member } => self.run(move |process| {
                let store = process.store.get();
                let directories = store.map(|store| process.export.looked_up(member, store)).unwrap_or_default();
                process.say(&FromProcess::LookedUp { id, directories });
            }),
            ToProcess::Leave { id } => self.run(move |process| {
                let others = process.leave();
                process.say(&FromProcess::Left { id, others });
            }),
            ToProcess::Close { id } => self.run(move |process| {
                process.serving.store(false, Ordering::Release);
                let handles = process.handles();
                process.export.end();
                process.say(&FromProcess::Closed { id, handles });
            }),
            ToProcess::Status { id } => self.run(move |process| {
                let status = process.status();
                process.say(&FromProcess::Status { id, status });
            }),
        }
    }

    /// In a thread of its own. (Without one the agent gets no reply, and stops waiting.)
    fn run(self: &Arc<Self>, job: impl FnOnce(&Self) + Send + 'static) {
        let process = self.clone();
        let _ = self.workers.run(move || job(&process));
    }

    fn claim(&self, directory: &Directory, moves: Option<Moves>) -> Claimed {
        let Some(membership) = self.membership.get() else { return Claimed::Expelled };
        match membership.claim(directory, CLAIM) {
            Ok(_) => {
                // (The kernel holds locks for a rename, and the walk may need them.)
                if let Some(moves) = moves {
                    // (Without the mount, no program asks for a rename.)
                    return self.export.moves(&directory.0, &moves).map_or(Claimed::Missing, |()| Claimed::Ours);
                }
                match self.export.keep(&directory.0) {
                    Ok(()) => Claimed::Ours,
                    // (A rename has begun meanwhile, and needs the claim.)
                    Err(_) if self.export.is_moving(&directory.0) => Claimed::Ours,
                    // (The next agent may have removed it, in the place of the one that asked for the claim.)
                    Err(Errno::NOENT | Errno::NOTDIR) => {
                        membership.release(directory);
                        Claimed::Missing
                    }
                    Err(why) => {
                        // (Other members wait.)
                        tracing::warn!(%why, directory = %String::from_utf8_lossy(&directory.0), "a claimed directory cannot be opened");
                        Claimed::Ours
                    }
                }
            }
            Err(NotClaimed::Owned(_)) => Claimed::NotOurs,
            Err(NotClaimed::Expelled) => Claimed::Expelled,
            Err(NotClaimed::TimedOut) => Claimed::TimedOut,
        }
    }

    fn me(&self) -> Option<Me> {
        let membership = self.membership.get()?;
        let ((member, term), (pool, secret)) = (membership.id()?, membership.introduction());
        let process = std::process::id();
        let had_earlier = self.agents.load(Ordering::Acquire) > 0;
        let (secret, holders) = (secret.to_hex(), hold(&self.holders).iter().copied().collect());
        Some(Me { member: member.0, term: term.0, process, pool: *pool, secret, had_earlier, holders })
    }

    fn find(&self, member: MemberId) -> Place {
        match self.membership.get().map(|membership| membership.find(member)) {
            Some(Whereabouts::At(term, address)) => Place::At(term.0, address),
            Some(Whereabouts::Unknown) => Place::Unknown,
            Some(Whereabouts::Gone) => Place::Gone,
            Some(Whereabouts::Expelled) | None => Place::Expelled,
        }
    }

    /// Asks the agent, or the next one. `None`: none has answered in time.
    fn agents_answer(&self, member: MemberId, ask: &Ask) -> Option<Vec<u8>> {
        // (A prefetch takes as long as the store does.)
        let is_long = matches!(ask, Ask::Tend { .. } | Ask::Stage { .. } | Ask::EndStage { .. } | Ask::SendHome { .. });
        let until = tick() + if is_long { TENDING } else { WISH };
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        hold(&self.asked).insert(token, None);
        let mut asked = 0;
        while tick() < until {
            let agent = hold(&self.agent).as_ref().map_or(0, |(number, _)| *number);
            if agent != asked {
                asked = agent;
                self.say(&FromProcess::Asked { token, member: member.0, ask: ask.clone() });
            }
            let waits = hold(&self.asked);
            if waits.get(&token).is_some_and(Option::is_some) {
                break;
            }
            drop(self.answered.wait_timeout(waits, LOOK_EVERY));
        }
        hold(&self.asked).remove(&token).flatten()
    }

    /// Returns whether the directory is the store's again.
    fn give_back(&self, directory: &Directory) -> bool {
        let Some(membership) = self.membership.get() else { return false };
        // (Before: a program may claim it again at once.)
        let kept = self.export.keep_no_more(&directory.0);
        membership.release(directory);
        let is_ours = || matches!(membership.authority(directory), Some(Authority::Ours(_) | Authority::Between));
        let until = tick() + RELEASE;
        while is_ours() && tick() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let is_given = !is_ours() && !is_over(membership);
        if !is_given && let Some(kept) = kept {
            // (No walk: the way may need the member that waits for this.)
            self.export.keep_again(&directory.0, kept);
        }
        is_given
    }

    fn release_all(&self) {
        let Some((membership, me)) = self.membership.get().and_then(|one| Some((one, one.id()?.0))) else { return };
        let ours = |membership: &Membership| -> Vec<Directory> {
            let claims = membership.claims().into_iter();
            claims.filter(|(_, claim)| claim.owner == me).map(|(directory, _)| directory).collect()
        };
        if is_over(membership) {
            return;
        }
        let until = tick() + CLAIM;
        for directory in ours(membership) {
            membership.release(&directory);
        }
        while !ours(membership).is_empty() && tick() < until {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns how many members still need this one.
    fn leave(&self) -> u32 {
        self.leaves.store(true, Ordering::Release);
        let Some(membership) = self.membership.get() else { return 0 };
        if is_over(membership) {
            return 0;
        }
        membership.look_again();
        if !membership.has_registry() {
            // (Only a registry in a server ends here, with its last member.)
            let is_last = membership.end_registry();
            let has_left = membership.leave(CLAIM);
            if is_last && has_left {
                self.remove_file();
            }
            return u32::from(!has_left);
        }
        if !membership.end_registry() {
            return u32::try_from(membership.members().len().saturating_sub(1)).unwrap_or(u32::MAX).max(1);
        }
        // (A member that comes now waits until the file is gone, and begins a new pool.)
        self.remove_file();
        0
    }

    fn remove_file(&self) {
        if let (Some(name), Some(store)) = (&*hold(&self.made), self.store.get()) {
            rendezvous::remove(store, name);
        }
    }

    fn handles(&self) -> u32 {
        let members = self.membership.get().map(Membership::members).unwrap_or_default();
        members.iter().map(|member| u32::try_from(self.export.holds(member.0).1).unwrap_or(u32::MAX)).sum()
    }

    fn status(&self) -> PoolStatus {
        let Some((membership, me)) = self.membership.get().and_then(|one| Some((one, one.id()?.0))) else {
            return PoolStatus::default();
        };
        membership.look_again();
        let bytes: HashMap<MemberId, (u64, u64)> = membership.network_bytes().into_iter().collect();
        let members = membership.records().into_iter().map(|record| {
            let (received_bytes, sent_bytes) = bytes.get(&record.id).copied().unwrap_or_default();
            let handles = self.export.holds(record.id.0).1 as u64;
            let (member, term, address, role) = (record.id.0, record.term.0, record.address, record.role);
            MemberStatus { member, term, address, role, calls: 0, received_bytes, sent_bytes, handles }
        });
        let lost = membership.lost().into_iter();
        let lost = lost.map(|record| LostMember { member: record.id.0, address: record.address });
        let claims = membership.claims().into_iter().map(|(directory, claim)| ClaimStatus {
            directory: format!("/{}", String::from_utf8_lossy(&directory.0)),
            owner: claim.owner.0,
        });
        PoolStatus {
            member: me.0,
            has_registry: membership.has_registry(),
            members: members.collect(),
            lost: lost.collect(),
            claims: claims.collect(),
        }
    }
}

/// The cause, and in a second line what to do.
fn refusal(Error { what, why, remedy, .. }: &Error) -> String {
    let why = if why.is_empty() { String::new() } else { format!(": {why}") };
    if remedy.is_empty() { format!("{what}{why}") } else { format!("{what}{why}\n{remedy}") }
}

/// Has its lease ended, or has it left? The registry is not asked any more then.
fn is_over(membership: &Membership) -> bool {
    membership.serves_until().is_none_or(|until| uptime() >= until)
}

fn owner_of(authority: Authority) -> Owner {
    match authority {
        Authority::Store => Owner::TheStore,
        Authority::Ours(_) => Owner::Us,
        Authority::Between => Owner::Between,
        Authority::Peer(claim) => peer(claim),
        Authority::Lost(claim) => Owner::Lost(claim.owner.0),
    }
}

fn peer(claim: Claim) -> Owner {
    Owner::Member(claim.owner.0, claim.epoch.0)
}

impl Host for Process {
    /// Asks the agent, or the next one, until one has acknowledged it.
    fn forget(&self, directory: &Directory) {
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        hold(&self.forgetting).insert(token, false);
        let mut asked = 0;
        loop {
            let agent = hold(&self.agent).as_ref().map_or(0, |(number, _)| *number);
            if agent != asked {
                asked = agent;
                let owner = self.owner(directory);
                self.say(&FromProcess::Forget { token, directory: directory.0.clone(), owner });
            }
            let mut forgetting = hold(&self.forgetting);
            if forgetting.get(&token) != Some(&false) {
                forgetting.remove(&token);
                return;
            }
            drop(self.forgotten.wait_timeout(forgetting, LOOK_EVERY));
        }
    }

    fn expelled(&self) {
        self.say(&FromProcess::ServesUntil(Duration::ZERO));
    }

    fn changed(&self, directory: &Directory) {
        self.say_owner(directory);
    }

    fn gone(&self, member: MemberId) {
        let lost = self.membership.get().map(Membership::lost).unwrap_or_default();
        if let Some(record) = lost.into_iter().find(|record| record.id == member) {
            // (Before the next owner's claims are acknowledged.)
            self.say(&FromProcess::Lost(member.0, record.temporaries));
        }
        self.export.end_of(member.0);
    }

    fn call(&self, from: MemberId, body: Vec<u8>) -> Vec<u8> {
        let Ok(call) = postcard::from_bytes::<Call>(&body) else { return Vec::new() };
        let is_forget = matches!(call.ask, Ask::Forget(_));
        // (Before the mount is there, its directory is another one.)
        while !self.serving.load(Ordering::Acquire) {
            if is_forget {
                return Vec::new();
            }
            thread::sleep(Duration::from_millis(10));
        }
        if let Ask::Leaves { directories } = call.ask {
            // (An agent that comes later answers ESTALE for them.)
            self.say(&FromProcess::Leaves { member: from.0, directories });
            return encoded(&Answer::Done);
        }
        if call.ask.is_for_the_agent() {
            let failed = || encoded(&Answer::Failed(Errno::AGAIN.raw_os_error()));
            return self.agents_answer(from, &call.ask).unwrap_or_else(failed);
        }
        let answer = self.export.answer(from.0, &call);
        tracing::trace!(from = from.0, ?call, ?answer, "carried out");
        encoded(&answer)
    }
}
