//! The files of this node for other members: their programs' requests, done as ordinary system calls on the mount.
//!
//! The pool's process holds an `Export`, beside the agent. The kernel's caches stay right, because each change passes
//! through the kernel. What a member holds survives a restart of the agent, as the descriptors of any program do.
//!
//! * `holdings`: nodes, handles and lock owners of one member, by number.
//! * `place`: the mount's root, single names below it, and the numbers of nodes.
//! * `names`, `attributes`, `content`, `locks`: the requests, each kind in its file.
//! * `belief`: how long members may believe an answer.
//! * `identity`: the user of a request, for the thread that carries it out.
//!
//! Invariants:
//! - A number means something only for the member that got it.
//! - No table is locked during a system call on the mount, which may wait for the agent.
//! - A node is an `O_PATH` descriptor, so it stays the same file whatever happens to its names.
//!
//! The danger that it avoids: names, numbers and offsets come from another machine. None of them reaches a file outside
//! the mount, follows a symbolic link, or ends the process.

mod attributes;
mod back;
mod belief;
mod content;
mod holdings;
pub mod homes;
mod identity;
mod locks;
mod moving;
mod names;
mod place;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::mem;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use surgetank_pool::MemberId;
use surgetank_pool::calls::{name_of_closing_thread, name_of_opening_thread, name_of_thread};

use surgetank_types::model::Kind;

use super::call::{Answer, Ask, Call, Found, Stored};
use super::link::{Moves, Renamed};
use super::rendezvous::meeting::Meeting;
use belief::Beliefs;
use holdings::Holdings;
use identity::Own;
use place::Root;
pub use place::{BY_NUMBER, OF_A_MEMBER, checked};

/// The name of a thread that looks for a directory by its path. The agent lets its look-ups go to other members.
const WALKS: &std::ffi::CStr = c"pool-walk";

/// Serves the mount's files to members.
#[derive(Debug)]
pub struct Export {
    path: PathBuf,
    own: Own,
    /// The next handle's number, of all members: so no number returns after [`Export::end_of`].
    next_handle: Arc<AtomicU64>,
    beliefs: Beliefs,
    /// The members for which threads change directories, by thread.
    changing: Mutex<HashMap<u32, u32>>,
    /// Numbers of contents that are put back now.
    putting: Mutex<HashSet<u64>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ended: bool,
    root: Option<Arc<Root>>,
    members: HashMap<u32, Arc<Holdings>>,
}

impl Export {
    /// `root`: the mount's directory. It is opened at the first request, because the mount may come later. Also raises
    /// the process's limit of open files, as each node takes one. `ttl`: so long members may believe an answer about a
    /// directory.
    #[must_use]
    pub fn new(root: PathBuf, ttl: Duration) -> Self {
        let limit = getrlimit(Resource::Nofile);
        if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
            tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
        }
        // A later process gives other numbers, so that a handle of an earlier process never means another file.
        let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // (32 bits: the asking member has 40 for a handle.)
        let first_handle = u64::from(start.as_millis() as u32);
        Self {
            path: root,
            own: Own::now(),
            next_handle: Arc::new(AtomicU64::new(first_handle)),
            beliefs: Beliefs::new(ttl),
            changing: Mutex::default(),
            putting: Mutex::default(),
            state: Mutex::default(),
        }
    }

    /// Carries out a request of a member. Blocks as long as the mount does.
    pub fn answer(&self, member: u32, call: &Call) -> Answer {
        let before = self.beliefs.before();
        let changes = changes_a_directory(&call.ask).then(|| self.changing(member));
        let answer = self.carried_out(member, call);
        drop(changes);
        match answer {
            Ok(Answer::Found(found)) if found.attr.kind == Kind::Directory => {
                Answer::Found(Found { ttl: self.beliefs.give(found.node, member, before), ..found })
            }
            Ok(Answer::Attributes { attr, .. }) if attr.kind == Kind::Directory => {
                let ttl = node_of(&call.ask).map(|node| self.beliefs.give(node, member, before));
                Answer::Attributes { attr, ttl: ttl.unwrap_or_default() }
            }
            Ok(Answer::CreatedAt { found, handle, home, waits, parent: Some(parent) }) => {
                let ttl = node_of(&call.ask).map(|node| self.beliefs.give(node, member, before));
                Answer::CreatedAt { found, handle, home, waits, parent: ttl.map(|ttl| Box::new((parent.0, ttl))) }
            }
            Ok(answer) => answer,
            Err(Errno::REMCHG) => Answer::NotOwner,
            Err(error) => Answer::Failed(error.raw_os_error()),
        }
    }

    /// A thread, of this machine's numbers, has changed the name or the attributes of a directory. Returns when other
    /// members believe no earlier answer.
    pub fn await_seen(&self, node: u64, thread: u32) {
        let member = self.changing.lock().unwrap_or_else(PoisonError::into_inner).get(&thread).copied();
        self.beliefs.await_end(node, member);
    }

    /// This thread changes a directory for that member.
    fn changing(&self, member: u32) -> Changing<'_> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        self.changing.lock().unwrap_or_else(PoisonError::into_inner).insert(thread, member);
        Changing { of: &self.changing, thread }
    }

    /// This member has claimed the directory at this path. Call it while the change that claims it waits.
    pub fn keep(&self, path: &[u8]) -> Result<(), Errno> {
        let _walks = Walks::begin();
        self.root()?.keep(path)
    }

    /// This member has claimed a directory to rename it.
    pub fn moves(&self, path: &[u8], moves: &Moves) -> Result<(), Errno> {
        self.root()?.moves(path, moves);
        Ok(())
    }

    /// A directory gets another path.
    pub fn renamed(&self, renamed: Option<&Renamed>) {
        if let (Ok(root), Some(renamed)) = (self.root(), renamed) {
            root.renamed(renamed);
        }
    }

    /// Is it claimed to be renamed, and not kept yet?
    pub fn is_moving(&self, path: &[u8]) -> bool {
        self.root().is_ok_and(|root| root.is_moving(path))
    }

    /// Keeps directories that were claimed for renames, as soon as these are done. (Only one thread does so.)
    pub fn keep_moved(&self) {
        const PAUSE_MAX: Duration = Duration::from_secs(1);
        let Ok(root) = self.root() else { return };
        let _walks = Walks::begin();
        let mut pause = Duration::from_millis(5);
        while root.keep_moved() {
            std::thread::sleep(pause);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }

    /// This member gives back the directory at this path.
    pub fn keep_no_more(&self, path: &[u8]) -> Option<Arc<OwnedFd>> {
        let root = self.state().root.clone();
        root.and_then(|root| root.keep_no_more(path))
    }

    /// It has not given it back.
    pub fn keep_again(&self, path: &[u8], directory: Arc<OwnedFd>) {
        let root = self.state().root.clone();
        if let Some(root) = root {
            root.keep_again(path, directory);
        }
    }

    /// The mount is there. Opens the directory of contents for other members, while nothing waits for it: later, a program
    /// that waits for another member may keep the kernel from looking the directory up.
    pub fn prepare(&self, pool: &str) {
        if let Err(why) = self.root().and_then(|root| root.find_homes(pool)) {
            tracing::warn!(%why, "other members cannot read what programs of this node write in their directories");
        }
    }

    /// Puts content for a lost member's file under its path, or makes a directory (`None`). `syncs`: it is synced, too. Returns
    /// `false` if something has that path already.
    pub fn put_back(
        &self,
        (number, syncs): (Option<u64>, bool),
        path: &[u8],
        perm: u32,
        owner: (u32, u32),
    ) -> Result<bool, Errno> {
        let one = || self.putting.lock().unwrap_or_else(PoisonError::into_inner);
        // (A second copy would be made of the first one's part.)
        let key = number.unwrap_or_default();
        if !one().insert(key) {
            return Err(Errno::BUSY);
        }
        let put = self.root().and_then(|root| back::put(&root, (number, syncs), path, perm, owner));
        one().remove(&key);
        put
    }

    /// Files that were kept for a moment ([`Ask::Lookup`]) are not kept any more.
    pub fn end_keeping(&self) {
        let members: Vec<_> = self.state().members.values().cloned().collect();
        members.iter().for_each(|of| of.end_keeping());
    }

    /// The member is gone: its handles, locks and nodes end. Calls of it that still run keep theirs until they return.
    pub fn end_of(&self, member: u32) {
        let holdings = self.state().members.remove(&member);
        if let Some(holdings) = holdings {
            holdings.end();
        }
    }

    /// Everything ends, so that the mount can be removed. Later calls fail with ENOTCONN.
    pub fn end(&self) {
        let ended = mem::replace(&mut *self.state(), State { ended: true, ..State::default() });
        for holdings in ended.members.values() {
            holdings.end();
        }
    }

    /// Number of nodes and of handles that the member has.
    pub fn holds(&self, member: u32) -> (usize, usize) {
        let holdings = self.state().members.get(&member).cloned();
        holdings.map_or((0, 0), |holdings| holdings.counts())
    }

    /// The directories that the member has looked up, as far as they are in `store`.
    pub fn looked_up(&self, member: u32, store: &Meeting) -> Vec<Stored> {
        let holdings = self.state().members.get(&member).cloned();
        holdings.map_or_else(Vec::new, |of| of.directories_in(store))
    }

    fn carried_out(&self, member: u32, call: &Call) -> Result<Answer, Errno> {
        let holdings = self.holdings(member)?;
        // Giving back needs no right of the user, and must not fail for lack of one.
        let gives_back = matches!(
            call.ask,
            Ask::Forget(_) | Ask::Close { .. } | Ask::CloseWritten { .. } | Ask::CloseMoved { .. } | Ask::Unlock { .. }
        );
        // (The owner of the name has asked whether the user may.)
        let is_home = matches!(call.ask, Ask::OpenHome { .. });
        let _user = if gives_back || is_home { None } else { self.own.switched(call.uid, call.gid)? };
        let _named = match call.ask {
            Ask::Open { .. } | Ask::Create { .. } | Ask::NameAttributes { .. } => Some(Named::opens(member)),
            Ask::Flush { .. } => Some(Named::closes(member)),
            _ => None,
        };
        answered(&holdings, &call.ask)
    }

    fn root(&self) -> Result<Arc<Root>, Errno> {
        let known = {
            let state = self.state();
            if state.ended {
                return Err(Errno::NOTCONN);
            }
            state.root.clone()
        };
        // (Opened without the lock: it may wait for the agent.)
        let root = known.map_or_else(|| Root::open(&self.path).map(Arc::new), Ok)?;
        let mut state = self.state();
        if state.ended { Err(Errno::NOTCONN) } else { Ok(state.root.get_or_insert(root).clone()) }
    }

    fn holdings(&self, member: u32) -> Result<Arc<Holdings>, Errno> {
        let root = self.root()?;
        let mut state = self.state();
        if state.ended {
            return Err(Errno::NOTCONN);
        }
        let holdings = || Arc::new(Holdings::new(root, self.next_handle.clone()));
        Ok(state.members.entry(member).or_insert_with(holdings).clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends an entry of [`Export::changing`].
struct Changing<'a> {
    of: &'a Mutex<HashMap<u32, u32>>,
    thread: u32,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.of.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.thread);
    }
}

/// May the request change the name or the attributes of a directory?
fn changes_a_directory(ask: &Ask) -> bool {
    matches!(ask, Ask::RemoveDirectory { .. } | Ask::Rename { .. } | Ask::SetAttributes { .. })
}

fn node_of(ask: &Ask) -> Option<u64> {
    match ask {
        Ask::Attributes { node, .. } | Ask::NameAttributes { node } | Ask::SetAttributes { node, .. } => Some(*node),
        Ask::Create { parent, .. } => Some(*parent),
        _ => None,
    }
}

/// A thread that looks for a directory by its path.
struct Walks;

impl Walks {
    fn begin() -> Self {
        // (Without the name the look-up is refused, and asked again.)
        let _ = rustix::thread::set_name(WALKS);
        Self
    }
}

impl Drop for Walks {
    fn drop(&mut self) {
        let _ = rustix::thread::set_name(c"pool-agent");
    }
}

/// A thread whose name says to the agent what it does for a member.
struct Named(u32);

impl Named {
    /// It opens a file. The kernel asks for attributes only because of permissions then: the agent need not ask the member that has
    /// the content.
    fn opens(member: u32) -> Self {
        Self::call_it(&name_of_opening_thread(MemberId(member)));
        Self(member)
    }

    /// It closes a file as a program does. (Without the name the close does not wait for copies.)
    fn closes(member: u32) -> Self {
        Self::call_it(&name_of_closing_thread(MemberId(member)));
        Self(member)
    }

    fn call_it(name: &str) {
        // (Without the name the agent asks one question more.)
        if let Ok(name) = std::ffi::CString::new(name) {
            let _ = rustix::thread::set_name(&name);
        }
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        Self::call_it(&name_of_thread(MemberId(self.0)));
    }
}

fn answered(of: &Holdings, ask: &Ask) -> Result<Answer, Errno> {
    match ask {
        Ask::Directory(path) => names::directory(of, path),
        Ask::Lookup { parent, name, keep: false } => names::look_up(of, *parent, name),
        Ask::Lookup { parent, name, keep: true } => names::look_up_and_keep(of, *parent, name),
        Ask::Forget(nodes) => {
            of.forget(nodes);
            Ok(Answer::Done)
        }
        Ask::Attributes { node, handle } => attributes::get(of, *node, *handle),
        Ask::NameAttributes { node } => attributes::get(of, *node, None),
        Ask::SetAttributes { node, handle, change } => attributes::set(of, *node, *handle, change),
        Ask::ReadLink { node } => names::read_link(of, *node),
        Ask::SymbolicLink { parent, name, target } => names::make_link(of, *parent, name, target),
        Ask::MakeNode { parent, name, mode, device } => names::make_node(of, *parent, name, *mode, *device),
        Ask::MakeDirectory { parent, name, perm } => names::make_directory(of, *parent, name, *perm),
        Ask::Unlink { parent, name } => names::remove(of, *parent, name, false),
        Ask::RemoveDirectory { parent, name } => names::remove(of, *parent, name, true),
        Ask::Rename { parent, name, new_parent, new_name, flags } => {
            names::rename(of, (*parent, name), (*new_parent, new_name), *flags)
        }
        Ask::Link { node, new_parent, new_name } => names::link(of, *node, *new_parent, new_name),
        Ask::Open { node, flags } => content::open(of, *node, *flags),
        Ask::OpenMoved { node, key } => content::open_moved(of, *node, *key),
        Ask::CloseMoved { key } => content::close_moved(of, *key),
        Ask::Create { parent, name, perm, flags } => content::create(of, *parent, name, *perm, *flags),
        Ask::Read { handle, offset, bytes } => content::read(of, *handle, *offset, *bytes),
        Ask::Write { handle, offset, at_end, content } => content::write(of, *handle, (*offset, *at_end), content),
        Ask::Close { handle } => content::close(of, *handle),
        Ask::CloseWritten { handle, content } => content::close_written(of, *handle, content),
        Ask::Sync { handle, data_only } => content::sync(of, *handle, *data_only),
        Ask::Flush { handle } => content::flush(of, *handle),
        Ask::SyncDirectory { node } => content::sync_directory(of, *node),
        Ask::Allocate { handle, mode, offset, length } => content::allocate(of, *handle, *mode, *offset, *length),
        Ask::Seek { handle, offset, whence } => content::seek(of, *handle, *offset, *whence),
        Ask::OpenDirectory { node } => content::open_directory(of, *node),
        Ask::List { handle, from_the_beginning } => content::list(of, *handle, *from_the_beginning),
        Ask::GetXattr { node, name } => attributes::get_value(of, *node, name),
        Ask::SetXattr { node, name, value, flags } => attributes::set_value(of, *node, name, value, *flags),
        Ask::ListXattrs { node } => attributes::list_values(of, *node),
        Ask::RemoveXattr { node, name } => attributes::remove_value(of, *node, name),
        Ask::TestLock { handle, lock } => locks::test(of, *handle, lock),
        Ask::Lock { handle, lock } => locks::set(of, *handle, lock),
        // (They are the agent's.)
        Ask::Drain { .. }
        | Ask::GiveBack { .. }
        | Ask::Tend { .. }
        | Ask::Report
        | Ask::Published { .. }
        | Ask::Leaves { .. }
        | Ask::Stage { .. }
        | Ask::EndStage { .. }
        | Ask::HomeAttributes { .. }
        | Ask::ChangeHome { .. }
        | Ask::SumHome { .. }
        | Ask::SendHome { .. }
        | Ask::Needs { .. }
        | Ask::EndHome { .. }
        | Ask::NameOf { .. }
        | Ask::Depart { .. }
        | Ask::Stay { .. }
        | Ask::Arrive { .. }
        | Ask::Settled { .. }
        | Ask::Leave { .. }
        | Ask::Removed { .. }
        | Ask::LostWith { .. }
        | Ask::StoredUntil { .. }
        | Ask::OldestAge
        | Ask::MadeAgain { .. }
        | Ask::Delegate { .. }
        | Ask::IsDelegated { .. }
        | Ask::Contents { .. }
        | Ask::Source { .. }
        | Ask::Piece { .. }
        | Ask::Recall { .. }
        | Ask::Hold(_) => Err(Errno::OPNOTSUPP),
        Ask::HomeOf { node } => Ok(Answer::Home(homes::of(&*of.node(*node)?.fd)?.0)),
        Ask::OpenHome { number, key, flags } => homes::open(of, *number, *key, *flags),
        Ask::Unlock { handle, owner } => locks::end_of_owner(of, *handle, *owner),
    }
}
