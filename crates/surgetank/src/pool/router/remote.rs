//! What the agent knows of other members' files: their numbers, and the nodes of directories and files that it has of the
//! store itself.
//!
//! A number with the mark is `MARK + node`; the node's own bits name its member. Nodes that a member has numbered before
//! it joined are listed.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_pool::calls::{Once, Waits};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, Kind};

use super::super::call::{Answer, Ask, Call, Found};
use super::super::link::{Link, NoAnswer, Place};
use super::super::others::written::Written;
use super::delegated::LISTED_HERE;
use super::here::Parents;
use super::homes::HOME;
use super::{NOT_OWNER, PATIENCE};
use crate::mount::{current, killed, wait_long};

/// Of the kernel's numbers of other members' files, and of handles there.
pub(super) const MARK: u64 = 1 << 63;
/// Of numbers that are listed.
const LISTED: u64 = 1 << 62;
/// A handle is `MARK + member * HANDLES + number`.
pub(super) const HANDLES: u64 = 1 << 40;

/// A program that may hold locks of directories waits so long before a look at what it does.
const LONG: Duration = Duration::from_millis(30);
/// A name whose file was replaced is one that may be replaced again, for so long.
const REPLACED: Duration = Duration::from_secs(1);
/// Nodes that are forgotten are collected for so long.
const FORGETTING: Duration = Duration::from_millis(50);
/// So many nodes are forgotten by one call.
const FORGOTTEN_MAX: usize = 1000;

/// A file or directory of another member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct At {
    pub member: u32,
    pub node: u64,
    /// Found by a directory of the store: if the owner changes, another member has it.
    pub by_path: bool,
}

/// A directory that a member has claimed.
#[derive(Clone, Copy)]
struct Claimed {
    /// Owner and epoch.
    of: (u32, u64),
    node: u64,
    ino: u64,
}

/// A name at a member: in this directory.
type NameAt = (u32, u64, Box<[u8]>);

pub(super) struct Remote {
    pub link: Arc<Link>,
    /// Claimed directories, by path.
    directories: Mutex<HashMap<Vec<u8>, Claimed>>,
    listed: Mutex<Vec<(u32, u64)>>,
    /// Files that this agent knows from the store, in directories that another member owns by now: its member and node.
    files: Mutex<HashMap<u64, (u32, u64)>>,
    /// Names whose file was replaced between a look-up and an open: by member and directory, and when.
    replaced: Mutex<HashMap<NameAt, Instant>>,
    forgotten: Arc<Forgotten>,
    /// What programs of this node have changed there.
    pub written: Arc<Written>,
    pub parents: Parents,
    answers: AtomicU64,
    /// When a member last said that it does not know a node any more.
    stale: Mutex<Option<Instant>>,
}

/// Look-ups to be taken back: by member and node, how many.
#[derive(Default)]
struct Forgotten {
    nodes: Mutex<HashMap<(u32, u64), u64>>,
    changed: Condvar,
}

/// Calls of this thread's request that are carried out once. The kernel has the request's answer when the thread begins
/// the next one.
#[derive(Default)]
struct Asked {
    request: u64,
    /// How many calls the request has made to each member.
    parts: HashMap<u32, u32>,
    calls: Vec<(Arc<Link>, u32, Once)>,
}

impl Asked {
    fn answered(&mut self) {
        for (link, member, once) in self.calls.drain(..) {
            link.answered(member, once);
        }
    }

    /// Each call of a request to a member has its own number. A request that the kernel repeats makes the same calls to
    /// that member again.
    fn next(&mut self, request: u64, member: u32) -> Once {
        if self.request != request {
            self.answered();
            self.request = request;
            self.parts.clear();
        }
        let part = self.parts.entry(member).or_default();
        *part += 1;
        Once { request, part: *part }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.answered();
    }
}

thread_local! {
    static ASKED: RefCell<Asked> = RefCell::default();
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Remote {
    pub fn new(link: Arc<Link>, written: Arc<Written>) -> Self {
        let forgotten = Arc::new(Forgotten::default());
        let (asks, nodes) = (link.clone(), forgotten.clone());
        let begun = thread::Builder::new().name("pool-forgets".to_owned()).spawn(move || nodes.tell_members(&asks));
        if let Err(why) = begun {
            tracing::warn!(%why, "other members keep what programs have forgotten");
        }
        let (directories, listed, files, replaced, parents, answers, stale) = Default::default();
        Self { link, directories, listed, files, replaced, forgotten, written, parents, answers, stale }
    }

    /// How often other members have answered requests of programs here.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::SeqCst)
    }

    /// Whose file the kernel's number is; `None`: one of this agent.
    pub fn at(&self, id: u64) -> Option<At> {
        if id & MARK == 0 {
            return None;
        }
        if id & LISTED != 0 {
            let listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            let known = usize::try_from(id & !(MARK | LISTED)).ok().and_then(|index| listed.get(index).copied());
            // (The list ended with an earlier agent.)
            let (member, node) = known.unwrap_or_default();
            return Some(At { member, node, by_path: false });
        }
        let node = id & !MARK;
        Some(At { member: u32::try_from(node / FILES_OF_A_MEMBER).unwrap_or(0), node, by_path: false })
    }

    /// Has the member left whose file the kernel's number is?
    pub fn has_left(&self, id: u64) -> bool {
        self.at(id).is_some_and(|at| self.link.find(at.member) == Place::Gone)
    }

    /// The kernel's number of a file.
    pub fn number_of(&self, member: u32, node: u64) -> u64 {
        if node < LISTED && node / FILES_OF_A_MEMBER == u64::from(member) {
            return MARK | node;
        }
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        let index = listed.iter().position(|one| *one == (member, node)).unwrap_or(listed.len());
        if index == listed.len() {
            listed.push((member, node));
        }
        MARK | LISTED | index as u64
    }

    /// The kernel's number of a handle.
    pub fn handle_number(member: u32, handle: u64) -> u64 {
        MARK | (u64::from(member) * HANDLES) | (handle % HANDLES)
    }

    /// The member and number of a handle; `None`: one of this agent, or of a file whose content is elsewhere than its name.
    pub fn handle(fh: u64) -> Option<(u32, u64)> {
        let number = fh & !MARK;
        (fh & MARK != 0 && fh & (HOME | LISTED_HERE) == 0)
            .then(|| (u32::try_from(number / HANDLES).unwrap_or(0), number % HANDLES))
    }

    /// The node of a directory that the member has claimed in that epoch. Errors: ESTALE, the claim is not for the directory of
    /// this inode number: one of them has been renamed.
    pub fn directory(
        &self,
        caller: &Caller,
        (path, ino): (&[u8], Option<u64>),
        (member, epoch): (u32, u64),
        until: Instant,
    ) -> FsResult<At> {
        let of = (member, epoch);
        let known = hold(&self.directories).get(path).copied().filter(|known| known.of == of);
        let at = At { member, node: 0, by_path: true };
        let claimed = match known {
            Some(known) => known,
            None => {
                let Found { node, attr, .. } = self.found(caller, at, Ask::Directory(path.into()), until)?;
                let claimed = Claimed { of, node, ino: attr.ino };
                hold(&self.directories).insert(path.to_vec(), claimed);
                self.written.claimed(member, node, path);
                claimed
            }
        };
        if ino.is_some_and(|ino| ino != claimed.ino) {
            return Err(Errno::STALE.into());
        }
        Ok(At { node: claimed.node, ..at })
    }

    /// The node of a file that the store had when this agent looked, in a directory that another member owns by now.
    pub fn file(&self, caller: &Caller, id: u64, (dir, name): (At, &[u8]), ino: u64) -> FsResult<At> {
        if let Some((member, node)) = hold(&self.files).get(&id).copied()
            && member == dir.member
        {
            return Ok(At { node, ..dir });
        }
        let Answer::Found(found) =
            self.ask(caller, dir, Ask::Lookup { parent: dir.node, name: name.into(), keep: false })?
        else {
            return Err(Errno::STALE.into());
        };
        if found.attr.ino != ino {
            self.forget(dir.member, found.node, 1);
            return Err(Errno::STALE.into());
        }
        let before = hold(&self.files).insert(id, (dir.member, found.node));
        if let Some((member, node)) = before {
            self.forget(member, node, 1);
        }
        Ok(At { node: found.node, ..dir })
    }

    /// The kernel has forgotten a file that this agent knows from the store.
    pub fn forget_file(&self, id: u64) {
        let known = hold(&self.files).remove(&id);
        if let Some((member, node)) = known {
            self.forget(member, node, 1);
        }
    }

    fn found(&self, caller: &Caller, at: At, ask: Ask, until: Instant) -> FsResult<Found> {
        match self.ask_until(caller, at, ask, None, until)? {
            Answer::Found(found) => Ok(found),
            _ => Err(Errno::IO.into()),
        }
    }

    /// Has the owner of a directory of the store give it back, if it is empty. Look then who owns it.
    pub fn take_back(&self, member: u32, path: &[u8], until: Instant) -> FsResult<()> {
        let at = At { member, node: 0, by_path: true };
        let caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0 };
        match self.ask_until(&caller, at, Ask::GiveBack { path: path.into() }, None, until) {
            Ok(_) => {}
            Err(fault) if [NOT_OWNER, Errno::AGAIN].contains(&fault.errno) && tick() < until => {}
            Err(fault) => return Err(fault),
        }
        self.link.look(PATIENCE);
        // (The news are under way.)
        thread::sleep(Duration::from_millis(2));
        Ok(())
    }

    /// A file that was looked up was gone when it was opened. The kernel looks its name up again.
    pub fn was_replaced(&self, at: At) {
        // (Without a name any name of the member may be meant.)
        let (parent, name) = self.written.name_of(at.member, at.node).unwrap_or((0, Box::default()));
        let mut replaced = hold(&self.replaced);
        replaced.retain(|_, since| since.elapsed() < REPLACED);
        replaced.insert((at.member, parent, name), tick());
    }

    /// Was the file under this name replaced just now?
    pub fn is_replaced(&self, member: u32, parent: u64, name: &[u8]) -> bool {
        let replaced = hold(&self.replaced);
        let is_now = |key| replaced.get(&key).is_some_and(|since| since.elapsed() < REPLACED);
        !replaced.is_empty() && (is_now((member, parent, Box::from(name))) || is_now((member, 0, Box::default())))
    }

    /// Asks what may be asked twice.
    pub fn ask(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Answer> {
        self.ask_until(caller, at, ask, None, tick() + PATIENCE)
    }

    /// The same. Errors: EDEADLK, there is no answer yet, and it is not waited for any longer (`stops`, looked at each 50 ms).
    pub fn ask_unless(&self, caller: &Caller, at: At, ask: Ask, stops: &dyn Fn() -> bool) -> FsResult<Answer> {
        self.ask_patiently(caller, at, ask, None, (tick() + PATIENCE, stops))
    }

    /// Asks what is to be done once, even if this agent dies before the program has the answer.
    pub fn ask_once(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Answer> {
        let once = current().map(|current| ASKED.with_borrow_mut(|asked| asked.next(current.number, at.member)));
        let noted = noted(&ask);
        let makes = matches!(ask, Ask::Create { .. });
        let changed = noted.as_ref().map_or([0; 2], Noted::nodes).map(|node| (at.member, node));
        let changes = changed != [(at.member, 0); 2];
        if changes && !makes {
            self.parents.change(&changed);
        }
        let answer = self.ask_until(caller, at, ask, once, tick() + PATIENCE);
        // (Unless its new attributes come with the answer.)
        if changes && !matches!(&answer, Ok(Answer::CreatedAt { .. })) {
            self.parents.change(&changed);
        }
        let is_lost = || self.link.losses() > 0 && self.link.lost().contains_key(&at.member);
        match (noted, &answer) {
            (Some(noted), Ok(answer)) => {
                self.note(at.member, noted, answer);
                // (What programs here changed may have been asked before that was noted.)
                if is_lost() {
                    return Err(if at.by_path { NOT_OWNER } else { Errno::STALE }.into());
                }
            }
            (Some(Noted::Close { handle }), Err(_)) if is_lost() => self.written.closed(at.member, handle),
            _ => {}
        }
        if let Some(once) = once {
            ASKED.with_borrow_mut(|asked| asked.calls.push((self.link.clone(), at.member, once)));
        }
        answer
    }

    /// Keeps the path of what has changed.
    fn note(&self, member: u32, noted: Noted, answer: &Answer) {
        match (noted, answer) {
            (
                Noted::Name { parent, name },
                Answer::Created { found, handle, .. } | Answer::CreatedAt { found, handle, .. },
            ) => {
                self.written.named(member, found.node, parent, &name);
                self.written.opened(member, found.node, *handle);
                if let Answer::CreatedAt { found, home, .. } = answer
                    && home.member == self.link.member()
                {
                    self.written.has_content(member, found.node, false, rights_of(&found.attr));
                }
            }
            (Noted::Name { parent, name }, answer) => {
                if let Answer::Found(found) = answer {
                    self.written.named(member, found.node, parent, &name);
                    if found.attr.kind == Kind::Directory {
                        self.written.has_content(member, found.node, true, rights_of(&found.attr));
                    }
                }
                self.written.changed(member, parent, &name);
            }
            (Noted::Rename { from, to, exchange: true }, _) => {
                self.written.exchanged(member, (from.0, &from.1), (to.0, &to.1))
            }
            (Noted::Rename { from, to, .. }, _) => self.written.renamed(member, (from.0, &from.1), (to.0, &to.1)),
            (Noted::Remove { parent, name }, _) => self.written.removed(member, parent, &name),
            (Noted::Node { node }, answer) => {
                self.written.changed_node(member, node);
                if let Answer::Attributes { attr, .. } = answer {
                    self.written.attributes_are(member, node, rights_of(attr));
                }
            }
            (Noted::Touched, _) => self.written.touched(member),
            (Noted::Open { node }, Answer::Opened { handle, .. } | Answer::OpenedAt { handle, .. }) => {
                self.written.opened(member, node, *handle)
            }
            (Noted::Close { handle }, _) => self.written.closed(member, handle),
            (Noted::Open { .. }, _) => {}
        }
    }

    /// `until`: to reach the member. What it has begun to carry out is awaited, until the program is killed.
    fn ask_until(&self, caller: &Caller, at: At, ask: Ask, once: Option<Once>, until: Instant) -> FsResult<Answer> {
        self.ask_patiently(caller, at, ask, once, (until, &|| false))
    }

    fn ask_patiently(
        &self,
        caller: &Caller,
        at: At,
        ask: Ask,
        once: Option<Once>,
        (mut until, stops): (Instant, &dyn Fn() -> bool),
    ) -> FsResult<Answer> {
        wait_long();
        let begun = tick();
        let mut has_stopped = false;
        let mut patient = |waits: Waits| {
            if waits == Waits::ForReply {
                until = until.max(tick() + PATIENCE);
            }
            has_stopped = begun.elapsed() > LONG && stops();
            tick() < until && !killed() && !self.link.is_over() && !has_stopped
        };
        let gone = if at.by_path { NOT_OWNER } else { Errno::STALE };
        let call = Call { uid: caller.uid, gid: caller.gid, ask };
        let answer = self.link.call(at.member, &call, once, &mut patient);
        self.answers.fetch_add(1, Ordering::SeqCst);
        let mut answer = match answer {
            Ok(Answer::Failed(errno)) => {
                if errno == Errno::STALE.raw_os_error() {
                    *hold(&self.stale) = Some(tick());
                }
                return Err(Errno::from_raw_os_error(errno).into());
            }
            // (It may be leaving, or be about to: it serves again, or is gone soon.)
            Ok(Answer::NotOwner) => return Err(NOT_OWNER.into()),
            Err(NoAnswer::Gone) => return Err(gone.into()),
            Ok(answer) => answer,
            Err(NoAnswer::TimedOut) if killed() => return Err(Errno::INTR.into()),
            Err(NoAnswer::TimedOut) if has_stopped => return Err(Errno::DEADLK.into()),
            Err(_) => return Err(Errno::IO.into()),
        };
        if let Answer::Found(Found { ttl, .. }) | Answer::Attributes { ttl, .. } = &mut answer {
            // (The other member counts from the moment at which it answered, which was later.)
            *ttl = ttl.saturating_sub(tick().saturating_duration_since(begun));
            // (It may be the answer that an earlier agent got.)
            if current().is_some_and(|current| current.again) {
                *ttl = Duration::ZERO;
            }
        }
        Ok(answer)
    }

    /// A member has just said that it does not know a node any more: names are looked up there again.
    pub fn is_stale(&self) -> bool {
        hold(&self.stale).is_some_and(|at| at.elapsed() < REPLACED)
    }

    /// Takes back look-ups. (None: the kernel has forgotten the file, and its owner counted none.)
    pub fn forget(&self, member: u32, node: u64, count: u64) {
        self.written.forget(member, node);
        if count == 0 {
            return;
        }
        let mut nodes = hold(&self.forgotten.nodes);
        *nodes.entry((member, node)).or_default() += count;
        if nodes.len() == 1 {
            self.forgotten.changed.notify_one();
        }
    }
}

impl Forgotten {
    fn tell_members(&self, link: &Link) {
        loop {
            let mut nodes = hold(&self.nodes);
            while nodes.is_empty() {
                nodes = self.changed.wait(nodes).unwrap_or_else(PoisonError::into_inner);
            }
            drop(nodes);
            thread::sleep(FORGETTING);
            let mut of_members = HashMap::<u32, Vec<(u64, u64)>>::new();
            for ((member, node), count) in mem::take(&mut *hold(&self.nodes)) {
                of_members.entry(member).or_default().push((node, count));
            }
            for (member, nodes) in of_members {
                for some in nodes.chunks(FORGOTTEN_MAX) {
                    let call = Call { uid: 0, gid: 0, ask: Ask::Forget(some.to_vec()) };
                    let until = tick() + PATIENCE;
                    // (A member that is gone has forgotten them. Of one that is not reached they stay until it ends.)
                    let once = link.next_once();
                    let _ = link.call(member, &call, Some(once), &mut |_| tick() < until);
                    link.answered(member, once);
                }
            }
        }
    }
}

/// What a change is noted by.
enum Noted {
    Name {
        parent: u64,
        name: Box<[u8]>,
    },
    Open {
        node: u64,
    },
    Close {
        handle: u64,
    },
    Remove {
        parent: u64,
        name: Box<[u8]>,
    },
    Rename {
        from: (u64, Box<[u8]>),
        to: (u64, Box<[u8]>),
        exchange: bool,
    },
    Node {
        node: u64,
    },
    /// Without a name.
    Touched,
}

impl Noted {
    /// The directories whose attributes change. (No directory has the number 0.)
    fn nodes(&self) -> [u64; 2] {
        match self {
            Self::Name { parent, .. } | Self::Remove { parent, .. } => [*parent, 0],
            Self::Rename { from, to, .. } => [from.0, to.0],
            Self::Node { node } => [*node, 0],
            Self::Open { .. } | Self::Close { .. } | Self::Touched => [0; 2],
        }
    }
}

fn rights_of(attr: &Attr) -> (u32, (u32, u32)) {
    (attr.perm, (attr.uid, attr.gid))
}

fn noted(ask: &Ask) -> Option<Noted> {
    match ask {
        Ask::Create { parent, name, .. }
        | Ask::MakeDirectory { parent, name, .. }
        | Ask::MakeNode { parent, name, .. }
        | Ask::SymbolicLink { parent, name, .. }
        | Ask::Arrive { parent, name, .. }
        | Ask::Link { new_parent: parent, new_name: name, .. } => {
            Some(Noted::Name { parent: *parent, name: name.clone() })
        }
        Ask::Unlink { parent, name } | Ask::RemoveDirectory { parent, name } | Ask::Leave { parent, name, .. } => {
            Some(Noted::Remove { parent: *parent, name: name.clone() })
        }
        Ask::Open { node, flags } if *flags & (libc::O_ACCMODE | libc::O_TRUNC) as u32 != 0 => {
            Some(Noted::Open { node: *node })
        }
        Ask::Close { handle } | Ask::CloseWritten { handle, .. } => Some(Noted::Close { handle: *handle }),
        Ask::Rename { parent, name, new_parent, new_name, flags } => {
            let exchange = flags & RenameFlags::EXCHANGE.bits() != 0;
            Some(Noted::Rename { from: (*parent, name.clone()), to: (*new_parent, new_name.clone()), exchange })
        }
        Ask::SetAttributes { node, .. } | Ask::SetXattr { node, .. } | Ask::RemoveXattr { node, .. } => {
            Some(Noted::Node { node: *node })
        }
        Ask::Allocate { .. } => Some(Noted::Touched),
        _ => None,
    }
}
