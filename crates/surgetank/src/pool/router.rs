//! Between the kernel and the door: each request goes to the member that decides about it.
//!
//! A directory that was made here, or that this member has claimed, is served by the door behind, as without a pool. One
//! of the store is claimed before its first change. A request about another member's directory, or about a file in one,
//! goes there. The kernel's number of such a file is the owner's number with a mark, so that the next agent understands
//! it without a table.
//!
//! The danger that this avoids: two members that decide the names of one directory.

mod adopt;
mod believed;
mod bundles;
mod changes;
mod closing;
pub mod copies;
mod delegated;
mod delegating;
mod forward;
mod handles;
mod held;
mod here;
mod homes;
mod kept;
mod lasting;
mod lengths;
pub mod locating;
mod lost;
mod moves;
mod names;
mod order;
pub mod owners;
mod pieces;
mod placing;
mod remote;
mod rights;
mod sending;
mod serving;
mod shim;
pub mod single;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_core::namespace::{Membership, Namespace, pooled};
use surgetank_types::clock::tick;
use surgetank_types::error::{Error, FsResult, Result};
use surgetank_types::model::{Caller, FileId, Kind};

use super::call::{Answer, Ask, Listed, Stored};
use super::link::{Agent, Claimed, Link, Owner, Turns};
use super::others::{Drains, Others, Wish};
use super::status::PoolStatus;
use crate::mount::{Filesystem, killed, wait_long};
use believed::Believed;
pub use lasting::Lasting;
use lasting::Left;
pub use moves::numbered_request;
use remote::{At, Remote};

/// So long a request waits for another member, or for the registry.
const PATIENCE: Duration = Duration::from_secs(60);
/// So long changes in a directory that is given back may take to reach the store. (Less than a member waits for an agent.)
const GIVING: Duration = Duration::from_secs(10);
/// The pause before a request looks again who owns a directory.
const AGAIN: Duration = Duration::from_millis(10);
/// A member that leaves waits so long for those that it tells where its directories are.
const FAREWELL: Duration = Duration::from_secs(2);
/// By so much longer than asked the kernel may believe something: it counts in ticks.
const A_TICK: Duration = Duration::from_millis(10);
/// Of a member that does not own the directory any more: its file service says so to the one that asked.
const NOT_OWNER: Errno = Errno::REMCHG;
/// The name of the threads that look for a directory by its path: what they look up may be another member's.
const WALKER: &str = "pool-walk";
/// The name of the threads that put content back: they act as programs of this node.
const BACK: &str = "pool-back";

/// Decides where a request goes.
pub struct Router<F> {
    door: Arc<F>,
    /// The ids that programs of the mount see, if it has only one user.
    only_ids: Option<(u32, u32)>,
    namespace: Arc<Namespace>,
    link: Arc<Link>,
    remote: Remote,
    /// Names of directories of other members that programs read, by handle.
    listings: Mutex<HashMap<u64, Arc<Vec<Listed>>>>,
    /// Files of the store that were opened here before another member claimed their directory: the member and its handle.
    moved: Mutex<HashMap<u64, (u32, u64)>>,
    /// This member gives its directories back: other members change nothing here any more.
    leaving: AtomicBool,
    left: AtomicBool,
    believed: Believed,
    /// What is done here.
    works: Turns,
    drains: OnceLock<Weak<dyn Drains>>,
    /// Directories that are being given back: requests about their names wait.
    giving: RwLock<HashSet<Vec<u8>>>,
    /// Changes with each beginning and each end of one: what was decided before must be decided again.
    gifts: AtomicU64,
    /// What members that left have said.
    left_members: Left,
    lengths: lengths::Lengths,
    lost: lost::Lost,
    outgoing: copies::Outgoing,
    held: held::Held,
    closing: closing::Closing,
    /// Read delegations of this member's directories, and those of other members' that it has.
    delegating: delegating::Given,
    delegated: delegated::Delegated,
    bundles: kept::Bundles,
    here: here::Here,
    order: Arc<order::Order>,
    shim: shim::Shim,
    /// What programs of this node changed at other members.
    pub others: Arc<Others>,
}

/// Who serves a directory.
enum Way {
    /// This member decides.
    Here,
    /// The store decides: the directory at this path has no owner.
    Store(Vec<u8>),
    There(At),
}

/// What a request does in a directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// Only its attributes. The kernel asks for them during a change of another name.
    Looks,
    Reads,
    Changes,
}

impl<F: Filesystem> Router<F> {
    /// The process of `link` has joined.
    pub fn new(door: Arc<F>, only_ids: Option<(u32, u32)>, namespace: Arc<Namespace>, link: Arc<Link>) -> Self {
        namespace.pooled.number_files_of(link.member());
        namespace.homes.is_in_pool(&link.key(), link.member());
        namespace.homes.directory();
        if link.had_earlier() {
            namespace.moves.had_earlier();
            namespace.replicas.are_unknown();
        } else {
            namespace.pooled.adopts_none();
        }
        let outgoing = copies::Outgoing::new(&link);
        let delegating = delegating::Given::new(&link);
        let order = Arc::new(order::Order::new(link.clone()));
        namespace.set_members(Arc::new(serving::Others { link: link.clone(), order: order.clone() }));
        let others = Arc::new(Others::new(link.clone()));
        let remote = Remote::new(link.clone(), others.written.clone());
        Self {
            door,
            only_ids,
            namespace,
            link,
            remote,
            listings: Mutex::default(),
            moved: Mutex::default(),
            leaving: AtomicBool::new(false),
            left: AtomicBool::new(false),
            believed: Believed::since_now(),
            works: Turns::default(),
            drains: OnceLock::new(),
            giving: RwLock::default(),
            gifts: AtomicU64::new(0),
            left_members: Left::default(),
            lengths: lengths::Lengths::default(),
            lost: lost::Lost::default(),
            outgoing,
            held: held::Held::default(),
            closing: closing::Closing::default(),
            delegating,
            delegated: delegated::Delegated::default(),
            bundles: kept::Bundles::default(),
            here: here::Here::default(),
            order,
            shim: shim::Shim::default(),
            others,
        }
    }

    /// The mount is there: other members may come. `drains`: answers how far their programs' changes are.
    pub fn serve(self: &Arc<Self>, drains: Weak<dyn Drains>) {
        let _ = self.drains.set(drains); // (Set once.)
        homes::begin(self);
        copies::begin(self);
        delegating::begin(self);
        self.link.serve(self.clone());
        // (What was given before is not noted.)
        self.namespace.pooled.is_given(b"");
        self.others.look_now_and_then();
        serving::look_now_and_then(self);
        lost::look_now_and_then(self);
        order::ask_when_wanted(self);
    }

    /// Which member of which pool this is.
    pub fn membership(&self) -> Membership {
        Membership { pool: self.link.key(), member: self.link.member() }
    }

    /// The pool, as this member sees it.
    pub fn status(&self) -> Result<PoolStatus> {
        let failed =
            |_| Error::new("the pool's process of this node does not answer").data("the tiers' files are safe");
        self.link.status(PATIENCE).map_err(failed)
    }

    /// Gives all directories back and ends the membership, if everything is `settled`, no other member has a file open
    /// here, none needs this one's registry, and `close` says that no user is left or comes. Returns whether it did. With
    /// `false`, `close` lets users come again.
    ///
    /// A member that is not `clean` does not leave: others must learn that its directories are not in the store, and see
    /// it lost.
    pub fn leave(&self, settled: impl Fn() -> bool, clean: impl Fn() -> bool, close: &dyn Fn(bool) -> bool) -> bool {
        const LOOK_EVERY: Duration = Duration::from_millis(200);
        let is_held = || {
            let status = self.link.status(PATIENCE);
            !self.link.is_over()
                && status.is_ok_and(|status| {
                    let mut others = status.members.iter().filter(|other| other.member != status.member);
                    others.any(|other| status.has_registry || other.handles > 0)
                })
                || self.namespace.moves.are_leaving() && !self.link.is_over()
        };
        if self.left.load(Ordering::SeqCst) {
            return close(true);
        }
        // (Other members' files need what this one has for them.)
        let is_home = || !self.link.is_over() && clean() && serving::remove_all(self) > 0;
        let may_be_needed = || !self.link.is_over() && (lost::is_pending(self) || !held::owners_live(self));
        let may_be_open = || {
            // (Open files that their owner does not know of are open here afterwards.)
            if settled() {
                delegating::end(self);
            }
            is_held()
        };
        if is_held() || is_home() || may_be_needed() || may_be_open() {
            std::thread::sleep(LOOK_EVERY);
            return false;
        }
        self.leaving.store(true, Ordering::SeqCst);
        self.works.await_earlier(|| false);
        // (From now on none makes files without a request: this member refuses what would begin that.)
        self.namespace.metadata.recall_for_writer();
        if delegating::are_any(self) || !settled() || is_held() || is_home() || may_be_needed() || !close(true) {
            self.leaving.store(false, Ordering::SeqCst);
            return false;
        }
        self.left.store(true, Ordering::SeqCst);
        shim::stop(self);
        bundles::end(self);
        // (With the registry the pool ends, and no other member is left.)
        let is_clean = clean() || self.link.status(PATIENCE).is_ok_and(|status| status.has_registry);
        if is_clean {
            copies::end(self);
            lasting::say_where_directories_are(self);
        }
        let others = if is_clean && self.link.release(PATIENCE) { self.link.leave(PATIENCE).ok() } else { None };
        if others.is_some_and(|others| others > 0) {
            // (One has joined at this moment.)
            self.left.store(false, Ordering::SeqCst);
            self.leaving.store(false, Ordering::SeqCst);
            return close(false);
        }
        // (A process that does not answer is killed later.)
        let _ = self.link.close(PATIENCE);
        if !is_clean {
            tracing::warn!("not everything is in the store: this member does not give its directories back");
        } else if others.is_none() {
            tracing::warn!("the pool did not confirm that this member left");
        }
        true
    }

    /// Where a request about the directory goes. A change claims a directory of the store first.
    fn way(&self, caller: &Caller, dir: u64, does: Does) -> FsResult<Way> {
        if let Some(at) = self.remote.at(dir) {
            return self.forwarded(caller, at, does);
        }
        let until = tick() + PATIENCE;
        let mut tried = false;
        loop {
            if self.left.load(Ordering::SeqCst) {
                // No program is left, and the mount ends. What still looks sees the store.
                if self.is_of_a_peer(caller) && does != Does::Looks {
                    return Err(NOT_OWNER.into());
                }
                return if does == Does::Changes { Err(Errno::IO.into()) } else { Ok(Way::Here) };
            }
            let place = self.namespace.pooled.place_of(FileId(dir));
            let path = match place {
                Some(pooled::Place::Made) | None if self.link.may_serve() => return Ok(Way::Here),
                Some(pooled::Place::OfTheStore(path)) if self.link.may_serve() => path,
                _ => {
                    self.pause(until)?;
                    continue;
                }
            };
            if self.lost.is_behind(self.link.losses()) && self.link.is_of_lost(&path) {
                lost::learn(self, until)?;
            }
            if does != Does::Looks && self.gives_back(&path) {
                self.pause(until)?;
                continue;
            }
            match self.link.owner(&path) {
                Owner::Us => return Ok(Way::Here),
                Owner::TheStore | Owner::Between if does != Does::Changes => return Ok(Way::Store(path)),
                Owner::TheStore if self.is_of_a_peer(caller) => return Err(NOT_OWNER.into()),
                Owner::TheStore => self.claim(&path, until)?,
                Owner::Between => self.pause(until)?,
                Owner::Member(member, epoch) => match self.remote.directory(
                    caller,
                    (&path, self.namespace.pooled.ino_of(FileId(dir))),
                    (member, epoch),
                    until,
                ) {
                    Ok(at) => return self.forwarded(caller, at, does),
                    // (It has been released since, or its owner is gone.)
                    Err(fault) if fault.errno == NOT_OWNER && tick() < until => {
                        if tried {
                            self.pause(until)?;
                        }
                        tried = true;
                    }
                    Err(fault) => return Err(fault),
                },
                Owner::Lost(_) if self.is_of_a_peer(caller) => return Err(NOT_OWNER.into()),
                Owner::Lost(member) => lost::take_over(self, &path, member, until)?,
            }
        }
    }

    fn is_ours(&self, dir: FileId) -> bool {
        let serves = self.link.may_serve();
        serves
            && match self.namespace.pooled.place_of(dir) {
                Some(pooled::Place::Made) => true,
                Some(pooled::Place::OfTheStore(path)) => self.link.owner(&path) == Owner::Us,
                None => false,
            }
    }

    /// Tries to own the directory. Look then who does.
    fn claim(&self, path: &[u8], until: Instant) -> FsResult<()> {
        wait_long();
        match self.link.claim(path, None, || tick() < until && !killed()) {
            Claimed::Ours => {
                self.namespace.pooled.owner_changed(path);
                Ok(())
            }
            Claimed::NotOurs => Ok(()),
            Claimed::Missing => Err(Errno::STALE.into()),
            Claimed::TimedOut if killed() => Err(Errno::INTR.into()),
            Claimed::Expelled | Claimed::TimedOut => Err(Errno::IO.into()),
        }
    }

    /// Claims a directory of the store that is to be removed, so that no member makes a name in it meanwhile. Another
    /// member gives it back first, if it is empty. (That needs no look-up there: the kernel here holds a lock of the
    /// directory above.)
    fn may_remove(&self, dir: FileId) -> FsResult<()> {
        let until = tick() + PATIENCE;
        let Some(pooled::Place::OfTheStore(path)) = self.namespace.pooled.place_of(dir) else { return Ok(()) };
        loop {
            match self.link.owner(&path) {
                Owner::Us => return Ok(()),
                Owner::Member(member, _) => {
                    self.remote.take_back(member, &path, until)?;
                    self.check(until)?;
                }
                Owner::Lost(member) => lost::take_over(self, &path, member, until)?,
                Owner::TheStore => self.claim(&path, until)?,
                Owner::Between => self.pause(until)?,
            }
        }
    }

    fn gives_back(&self, path: &[u8]) -> bool {
        self.giving.read().unwrap_or_else(PoisonError::into_inner).contains(path)
    }

    /// Gives a directory back to the store, for another member that removes it.
    fn give_back(&self, path: &[u8]) -> Answer {
        let giving = || self.giving.write().unwrap_or_else(PoisonError::into_inner);
        // (It may be asked for twice.)
        if self.link.owner(path) != Owner::Us || !giving().insert(path.to_vec()) {
            return Answer::NotOwner;
        }
        self.gifts.fetch_add(1, Ordering::SeqCst);
        let given = self.given_back(path);
        self.gifts.fetch_add(1, Ordering::SeqCst);
        giving().remove(path);
        given
    }

    /// Requests about its names wait meanwhile.
    fn given_back(&self, path: &[u8]) -> Answer {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let failed = |why: Errno| Answer::Failed(why.raw_os_error());
        let until = tick() + GIVING;
        if !self.works.await_earlier(|| tick() >= until || self.link.is_over()) {
            return failed(Errno::BUSY);
        }
        if self.namespace.pooled.has_names(path) {
            return failed(Errno::NOTEMPTY);
        }
        while !self.namespace.pooled.hurries(path) {
            if tick() >= until || self.link.is_over() {
                return failed(Errno::BUSY);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        // (Answers from now on are another owner's.)
        self.believed.note(path);
        if !self.link.give_back(path, PATIENCE) {
            return failed(Errno::BUSY);
        }
        self.namespace.pooled.forget(path);
        self.namespace.pooled.owner_changed(path);
        // (It is empty: what was claimed below was removed, or renamed. Another directory may get one of these paths.)
        for below in self.link.owned_below(path) {
            self.link.give_back(&below, PATIENCE);
        }
        Answer::Done
    }

    /// A request of another member is not forwarded again: two members that each believe the other one the owner would
    /// send it to and fro.
    fn forwarded(&self, caller: &Caller, at: At, does: Does) -> FsResult<Way> {
        if does != Does::Looks && self.is_of_a_peer(caller) && !self.walks(caller) {
            Err(NOT_OWNER.into())
        } else {
            Ok(Way::There(at))
        }
    }

    /// Does the caller act for another member?
    fn is_of_a_peer(&self, caller: &Caller) -> bool {
        self.name_of_thread(caller).is_some_and(|name| name.trim_end() != BACK)
    }

    fn walks(&self, caller: &Caller) -> bool {
        self.name_of_thread(caller).is_some_and(|name| name.trim_end() == WALKER)
    }

    /// The name of a thread of the pool's process.
    fn name_of_thread(&self, caller: &Caller) -> Option<String> {
        let process = self.link.process();
        if process == 0 || caller.pid == 0 {
            return None;
        }
        std::fs::read_to_string(format!("/proc/{process}/task/{}/comm", caller.pid)).ok()
    }

    fn pause(&self, until: Instant) -> FsResult<()> {
        self.check(until)?;
        std::thread::sleep(AGAIN);
        Ok(())
    }

    /// May the request go on waiting?
    fn check(&self, until: Instant) -> FsResult<()> {
        wait_long();
        if killed() {
            return Err(Errno::INTR.into());
        }
        if tick() >= until || self.link.is_over() { Err(Errno::IO.into()) } else { Ok(()) }
    }

    /// Where a request about a file or directory itself goes: a directory decides about itself, a file's directory about
    /// the file.
    fn way_of(&self, caller: &Caller, id: u64, does: Does) -> FsResult<Way> {
        if let Some(at) = self.remote.at(id) {
            return self.forwarded(caller, at, does);
        }
        match self.namespace.pooled.name_of(FileId(id)) {
            Some((Kind::Directory, ..)) => self.way(caller, id, does),
            None if id == FileId::ROOT.0 => self.way(caller, id, does),
            // Of several names, one in a directory of this member suffices: the content is written in the store, in place.
            Some(_) if self.namespace.pooled.other_directories_of(FileId(id)).iter().any(|dir| self.is_ours(*dir)) => {
                Ok(Way::Here)
            }
            Some((_, dir, name)) => match self.way(caller, dir.0, does)? {
                Way::There(dir) => {
                    let ino = self.namespace.pooled.ino_of(FileId(id)).ok_or(Errno::STALE)?;
                    self.remote.file(caller, id, (dir, &name), ino).map(Way::There)
                }
                way => Ok(way),
            },
            // It has no name: it is open here.
            None => Ok(Way::Here),
        }
    }

    /// Does something here or there, again if the owner has changed meanwhile.
    fn within<T>(
        &self,
        caller: &Caller,
        way: impl Fn() -> FsResult<Way>,
        here: impl Fn(&F) -> FsResult<T>,
        there: impl Fn(At) -> FsResult<T>,
    ) -> FsResult<T> {
        let until = tick() + PATIENCE;
        loop {
            let gifts = self.gifts.load(Ordering::SeqCst);
            let result = match way() {
                Ok(Way::Here) => {
                    let _work = self.works.enter();
                    // (A gift that has begun since did not wait for this request.)
                    if self.gifts.load(Ordering::SeqCst) != gifts {
                        continue;
                    }
                    if !self.leaving.load(Ordering::SeqCst) || !self.is_of_a_peer(caller) {
                        return here(&self.door);
                    }
                    Err(NOT_OWNER.into())
                }
                Ok(Way::Store(path)) => {
                    // (Before the owner is looked up again: what is read then ends before a claim is acknowledged.)
                    let _reading = self.link.reading();
                    if matches!(self.link.owner(&path), Owner::Member(..) | Owner::Lost(_)) {
                        continue;
                    }
                    let answer = here(&self.door);
                    // (After the answer: the store may have been slow.)
                    self.believed.note(&path);
                    return answer;
                }
                Ok(Way::There(at)) => there(at),
                Err(fault) => Err(fault),
            };
            match result {
                Err(fault) if fault.errno == NOT_OWNER && !self.is_of_a_peer(caller) => self.pause(until)?,
                result => return result,
            }
        }
    }
}

impl<F: Filesystem> Agent for Router<F> {
    fn forget(&self, directory: &[u8]) {
        // (If its owner is lost: what is missing is known here, too, before the next owner answers anything.)
        while self.lost.is_behind(self.link.losses())
            && self.link.is_of_lost(directory)
            && lost::learn(self, tick() + PATIENCE).is_err()
            && !self.link.is_over()
        {}
        delegated::owner_changed(self);
        self.namespace.pooled.forget(directory);
        self.namespace.pooled.owner_changed(directory);
        let believed = self.namespace.base.config.store_ttl;
        if let Some(left) = self.believed.since(directory).and_then(|since| believed.checked_sub(since)) {
            std::thread::sleep(left + A_TICK);
        }
    }

    fn given(&self, directory: &[u8]) {
        self.namespace.pooled.is_given(directory);
    }

    fn asked(&self, member: u32, ask: &Ask) -> Answer {
        match ask {
            Ask::Drain { wish } => {
                let drains = self.drains.get().and_then(Weak::upgrade);
                let drained = drains.zip(serde_json::from_slice::<Wish>(wish).ok());
                let drained = drained.map(|(drains, wish)| serde_json::to_vec(&drains.drained_for(member, &wish)));
                Answer::Bytes(drained.and_then(Result::ok).unwrap_or_default())
            }
            Ask::GiveBack { path } => self.give_back(path),
            Ask::Tend { request } => {
                let drains = self.drains.get().and_then(Weak::upgrade);
                Answer::Bytes(drains.map(|drains| drains.tend(request)).unwrap_or_default())
            }
            Ask::Report => {
                let report = self.drains.get().and_then(Weak::upgrade).and_then(|drains| drains.report());
                Answer::Bytes(report.and_then(|report| serde_json::to_vec(&report).ok()).unwrap_or_default())
            }
            Ask::Hold(hold) => held::asked(self, member, hold),
            Ask::Recall { nodes } => {
                delegated::recalled(self, member, nodes);
                Answer::Done
            }
            ask @ (Ask::LostWith { .. } | Ask::MadeAgain { .. }) => lost::asked(self, ask),
            ask => serving::asked(self, member, ask),
        }
    }

    fn leaves(&self, member: u32, directories: Vec<Stored>) {
        self.left_members.note(&self.remote, member, directories);
    }
}
