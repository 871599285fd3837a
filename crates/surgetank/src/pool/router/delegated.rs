//! Read delegations that this member has: it answers for directories of other members, until they recall them.
//!
//! After some look-ups in a directory this member asks for it. From then on look-ups, attributes of files that no program may
//! write, absent names and listings cost no message. What the answer does not have is asked, as before.
//!
//! Look-ups that are answered here are not counted at the owner. So what the kernel forgets is divided ([`Delegated::forget`]), and
//! the owner finds a file by its number alone (`homes::by_number`).
//!
//! The kernel believes attributes for a moment. It is notified before a recall is answered. (Only the answer to a request for
//! attributes is believed: the kernel has the file then, and a notification finds it. An answer that began earlier does not count
//! for the kernel.)
//!
//! The danger that this avoids: an answer that the owner has taken back. So a delegation is looked up for each request, and not
//! believed for longer than [`BELIEVED`] without a word of the owner.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_types::clock::{tick, uptime};
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, Kind};

use super::super::call::{Answer, Ask, Call, DelegatedName, Listed};
use super::bundles::{self, Came};
use super::delegating::BELIEVED;
use super::homes::HOME;
use super::pieces::PIECE_BYTES;
use super::remote::{At, MARK};
use super::rights::permits;
use super::{A_TICK, Router};
use crate::mount::{Attributes, Entry, Filesystem, Looked, Notifier, OpenedDirectory, wait_long};

/// Of handles of directories that are listed here, beside the mark.
pub(super) const LISTED_HERE: u64 = 1 << 61;
/// So many look-ups in a directory are answered by its owner before it is asked for. With each recall it is twice as many.
const ANSWERS_MIN: u32 = 8;
/// (Builds with debug assertions try again soon, so that tests find delegations.)
const ANSWERS_MAX: u32 = if cfg!(debug_assertions) { 16 } else { 1024 };
/// A delegation that lasted so long is worth as much as a first one.
const LONG: Duration = Duration::from_secs(10);
/// A directory that is not delegated is not asked for so long.
const REFUSED: Duration = Duration::from_secs(30);
/// So many directories are kept in mind.
const DIRECTORIES_MAX: usize = 10_000;
/// The owner is asked so long for a delegation, or whether it holds. Then requests go there.
pub(super) const ASKING: Duration = Duration::from_secs(2);
/// The kernel believes attributes so long: for the requests of one program that opens a file and reads it.
const KERNEL: Duration = Duration::from_millis(50);
const NAME_BYTES_MAX: usize = 255;

/// A directory of a member: the member and its number there.
pub(super) type Key = (u32, u64);

/// The delegations that this member has.
pub(super) struct Delegated {
    directories: RwLock<HashMap<Key, State>>,
    count: AtomicUsize,
    uses: Mutex<HashMap<Key, Uses>>,
    looked: Mutex<HashMap<u64, LookedUp>>,
    /// Directories that the kernel has, and how often their owners have counted that. (One that an owner has forgotten, it finds by
    /// no number.)
    counted: Mutex<HashMap<u64, u64>>,
    next_handle: AtomicU64,
    /// Files of which the kernel believes the attributes: by their delegation.
    believed: Mutex<HashMap<Key, HashSet<u64>>>,
    notifier: OnceLock<Notifier>,
    begun: Instant,
}

enum State {
    /// It is asked for. `recalled`: what comes is old already.
    Asked {
        recalled: bool,
    },
    Here(Arc<Directory>),
}

pub(super) struct Directory {
    attr: Attr,
    /// In their order.
    pub names: Vec<DelegatedName>,
    /// Its number at the owner.
    pub serial: u64,
    since: Duration,
    /// When its owner was asked (of [`uptime`], which goes on while the machine sleeps), and said that it holds. `None`: it said
    /// that it does not, or nothing.
    confirmed: Mutex<Option<Duration>>,
    /// So many members were lost then.
    losses: usize,
    /// Content of its files.
    pub came: Mutex<Came>,
}

/// How much a directory is used.
struct Uses {
    answers: u32,
    needed: u32,
    not_before: Instant,
}

/// A file that the kernel has looked up here.
struct LookedUp {
    count: u64,
    directory: Key,
    /// Of the name there.
    index: u32,
}

impl Default for Delegated {
    fn default() -> Self {
        // (An earlier agent's handles have smaller numbers.)
        let next = u64::try_from(uptime().as_nanos()).unwrap_or(0) & (LISTED_HERE - 1);
        let (directories, count, uses, looked, counted) = Default::default();
        let (next_handle, begun) = (AtomicU64::new(next), tick());
        let (believed, notifier) = Default::default();
        Self { directories, count, uses, looked, counted, next_handle, believed, notifier, begun }
    }
}

impl Delegated {
    /// The kernel forgets so many look-ups of a file. Returns how many of them the owner has counted.
    pub fn forget(&self, id: u64, count: u64) -> u64 {
        let mut looked = self.looked();
        let of_here = looked.get(&id).map_or(0, |here| here.count.min(count));
        if let Some(here) = looked.get_mut(&id) {
            here.count -= of_here;
            if here.count == 0 {
                self.is_forgotten(here.directory, id);
                looked.remove(&id);
            }
        }
        drop(looked);
        let mut counted = self.counted();
        if let Some(there) = counted.get_mut(&id) {
            *there = there.saturating_sub(count - of_here);
            if *there == 0 {
                counted.remove(&id);
            }
        }
        count - of_here
    }

    /// The mount is there.
    pub fn notifies(&self, notifier: &Notifier) {
        // (Set once.)
        let _ = self.notifier.set(notifier.clone());
    }

    fn believed(&self) -> MutexGuard<'_, HashMap<Key, HashSet<u64>>> {
        self.believed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_forgotten(&self, key: Key, id: u64) {
        if let MapEntry::Occupied(mut files) = self.believed().entry(key) {
            files.get_mut().remove(&id);
            if files.get().is_empty() {
                files.remove();
            }
        }
    }

    /// From now on the kernel believes no attributes of these directories and their files. (`of`: whether it is meant.)
    fn is_believed_no_more(&self, of: impl Fn(&Key) -> bool) {
        let files: Vec<u64> = {
            let mut believed = self.believed();
            let keys: Vec<Key> = believed.keys().copied().filter(|key| of(key)).collect();
            keys.iter().filter_map(|key| believed.remove(key)).flatten().collect()
        };
        let notifier = self.notifier.get().filter(|_| !files.is_empty());
        let is_unknown = |id: &&u64| notifier.is_none_or(|notifier| notifier.inval_inode(**id, -1, 0).is_err());
        if files.iter().filter(is_unknown).count() > 0 {
            std::thread::sleep(KERNEL + A_TICK);
        }
    }

    /// The owner has counted a look-up in a directory. One below a delegated directory is asked for when it is used.
    pub fn is_counted(&self, (at, found): (At, u64), entry: &Entry) {
        if entry.attr.kind == Kind::Directory {
            *self.counted().entry(entry.id).or_default() += 1;
            if matches!(self.read().get(&(at.member, at.node)), Some(State::Here(_))) {
                let fresh = Uses { answers: 0, needed: 1, not_before: tick() };
                self.uses().entry((at.member, found)).or_insert(fresh);
            }
        }
    }

    /// Is the directory to be asked for before its first name?
    fn is_wanted_now(&self, key: Key) -> bool {
        self.uses().get(&key).is_some_and(|uses| uses.answers == 0 && uses.needed == 1)
    }

    /// The owner recalls them. Without any: all of its.
    fn recalled(&self, member: u32, nodes: &[u64]) {
        if nodes.is_empty() {
            self.all_recalled(member);
        }
        for node in nodes {
            let key = (member, *node);
            if let Some(State::Asked { recalled }) = self.write().get_mut(&key) {
                *recalled = true;
            }
            let before = self.remove(key);
            self.has_ended(key, before.is_some_and(|before| uptime().saturating_sub(before.since) >= LONG));
        }
    }

    /// The owner's agent was replaced, and does not know them.
    fn all_recalled(&self, member: u32) {
        let nodes: Vec<u64> = self.read().keys().filter(|(of, _)| *of == member).map(|(_, node)| *node).collect();
        if !nodes.is_empty() {
            self.recalled(member, &nodes);
        }
    }

    fn remove(&self, key: Key) -> Option<Arc<Directory>> {
        let mut directories = self.write();
        match directories.get(&key) {
            Some(State::Here(_)) => {}
            _ => return None,
        }
        let removed = directories.remove(&key);
        self.count.fetch_sub(1, Ordering::SeqCst);
        match removed {
            Some(State::Here(directory)) => Some(directory),
            _ => None,
        }
    }

    fn has_ended(&self, key: Key, was_long: bool) {
        if let Some(uses) = self.uses().get_mut(&key) {
            uses.answers = 0;
            uses.needed = if was_long { ANSWERS_MIN } else { (uses.needed * 2).min(ANSWERS_MAX) };
        }
    }

    /// The owner has answered in the directory. Returns whether to ask for it.
    fn is_wanted(&self, key: Key, answers: u32) -> bool {
        let now = tick();
        let mut uses = self.uses();
        if uses.len() >= DIRECTORIES_MAX {
            uses.clear();
        }
        let uses = uses.entry(key).or_insert(Uses { answers: 0, needed: ANSWERS_MIN, not_before: now });
        uses.answers += answers;
        if uses.answers < uses.needed || now < uses.not_before || self.count.load(Ordering::SeqCst) >= DIRECTORIES_MAX {
            return false;
        }
        uses.answers = 0;
        true
    }

    fn is_refused(&self, key: Key) {
        if let Some(uses) = self.uses().get_mut(&key) {
            uses.not_before = tick() + REFUSED;
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<Key, State>> {
        self.directories.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Key, State>> {
        self.directories.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn uses(&self) -> MutexGuard<'_, HashMap<Key, Uses>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counted(&self) -> MutexGuard<'_, HashMap<u64, u64>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looked(&self) -> MutexGuard<'_, HashMap<u64, LookedUp>> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directory {
    /// So long it is believed without a word of its owner.
    fn left(&self) -> Option<Duration> {
        let confirmed = *self.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
        Some((confirmed? + BELIEVED).saturating_sub(uptime()))
    }

    fn find(&self, name: &[u8]) -> Option<(u32, &DelegatedName)> {
        let index = self.names.binary_search_by(|one| (*one.name).cmp(name)).ok()?;
        Some((u32::try_from(index).ok()?, self.names.get(index)?))
    }
}

/// The delegation of a directory, if this member may answer for it now.
pub(super) fn of<F: Filesystem>(router: &Router<F>, key: Key) -> Option<Arc<Directory>> {
    let delegated = &router.delegated;
    if delegated.count.load(Ordering::SeqCst) == 0 {
        return None;
    }
    let directory = match delegated.read().get(&key) {
        Some(State::Here(directory)) => directory.clone(),
        _ => return None,
    };
    let is_held =
        router.link.may_serve() && router.link.losses() == directory.losses && is_confirmed(router, key, &directory);
    if !is_held {
        delegated.remove(key);
    }
    is_held.then_some(directory)
}

fn is_confirmed<F: Filesystem>(router: &Router<F>, key: Key, directory: &Directory) -> bool {
    // (One thread asks, and others wait for it.)
    let mut confirmed = directory.confirmed.lock().unwrap_or_else(PoisonError::into_inner);
    let now = uptime();
    let Some(last) = *confirmed else { return false };
    if now.saturating_sub(last) < BELIEVED {
        return true;
    }
    let still = Ask::IsDelegated { node: key.1, serial: directory.serial };
    *confirmed = matches!(ask(router, key.0, still), Some(Answer::Done)).then_some(now);
    confirmed.is_some()
}

pub(super) fn ask<F: Filesystem>(router: &Router<F>, member: u32, ask: Ask) -> Option<Answer> {
    wait_long();
    let until = tick() + ASKING;
    let call = Call { uid: 0, gid: 0, ask };
    router.link.call(member, &call, None, &mut |_| tick() < until && !crate::mount::killed()).ok()
}

/// The owner recalls directories. Without any: all of its.
pub(super) fn recalled<F: Filesystem>(router: &Router<F>, member: u32, nodes: &[u64]) {
    router.delegated.recalled(member, nodes);
    let is_meant = |(of, node): &Key| *of == member && (nodes.is_empty() || nodes.contains(node));
    router.delegated.is_believed_no_more(is_meant);
    // (What an earlier agent answered the kernel may still believe.)
    let rest = KERNEL.saturating_sub(router.delegated.begun.elapsed());
    if router.link.had_earlier() && !rest.is_zero() {
        std::thread::sleep(rest + A_TICK);
    }
    bundles::recalled(router, member, nodes);
}

/// The owner of a directory is lost, or another one: what a member answered for below it ends.
pub(super) fn owner_changed<F: Filesystem>(router: &Router<F>) {
    router.delegated.is_believed_no_more(|_| true);
}

/// The owner has answered a look-up. Asks for the directory if it is used much, or if a large file was found.
pub(super) fn answered<F: Filesystem>(router: &Router<F>, at: At, answer: Option<&FsResult<Answer>>) {
    let key = (at.member, at.node);
    let is_large = |attr: &Attr| attr.kind == Kind::File && attr.size_bytes > PIECE_BYTES;
    let answers = match answer {
        Some(Ok(Answer::Found(found))) if is_large(&found.attr) => ANSWERS_MIN,
        _ => 1,
    };
    // (A directory of the store has other clients.)
    if at.by_path || !router.delegated.is_wanted(key, answers) {
        return;
    }
    let delegated = &router.delegated;
    match delegated.write().entry(key) {
        // (Another thread asks.)
        MapEntry::Occupied(_) => return,
        MapEntry::Vacant(entry) => drop(entry.insert(State::Asked { recalled: false })),
    }
    let brought = bring(router, key);
    let mut directories = delegated.write();
    let was_asked = directories.remove(&key);
    if let (Some(directory), Some(State::Asked { recalled: false })) = (brought, was_asked) {
        directories.insert(key, State::Here(Arc::new(directory)));
        delegated.count.fetch_add(1, Ordering::SeqCst);
    }
}

fn bring<F: Filesystem>(router: &Router<F>, key: Key) -> Option<Directory> {
    // (A loss from now on ends it.)
    let (losses, since) = (router.link.losses(), uptime());
    let (mut all, mut serial) = (Vec::<DelegatedName>::new(), 0);
    loop {
        match ask(router, key.0, Ask::Delegate { node: key.1, serial, from: all.len() as u64 }) {
            Some(Answer::Delegated(part)) => {
                serial = part.serial;
                let is_all = part.is_all || part.names.is_empty();
                all.extend(part.names);
                if is_all {
                    let confirmed = Mutex::new(Some(since));
                    let came = Mutex::default();
                    return Some(Directory { attr: part.attr, names: all, serial, since, confirmed, losses, came });
                }
            }
            Some(Answer::Failed(why)) if why == Errno::OPNOTSUPP.raw_os_error() => {
                router.delegated.is_refused(key);
                return None;
            }
            _ => {
                router.delegated.has_ended(key, false);
                return None;
            }
        }
    }
}

// ---- Answers.

/// The answer to a look-up, if it is known.
pub(super) fn look_up<F: Filesystem>(router: &Router<F>, caller: &Caller, at: At, name: &[u8]) -> Option<Looked> {
    let key = (at.member, at.node);
    if of(router, key).is_none() && router.delegated.is_wanted_now(key) {
        answered(router, at, None);
    }
    let directory =
        of(router, key).filter(|directory| name.len() <= NAME_BYTES_MAX && permits(&directory.attr, caller, 1))?;
    let Some((index, found)) = directory.find(name) else {
        return Some(Looked::Missing { ttl: Duration::ZERO });
    };
    let id = router.remote.number_of(at.member, found.node);
    let attr = match found.attr {
        // (A directory's own delegation has them.)
        None if found.kind == Kind::Directory && router.delegated.counted().contains_key(&id) => {
            of(router, (at.member, found.node))?.attr
        }
        attr => attr?,
    };
    if router.here.is_open(id) {
        return None;
    }
    router.remote.written.named(at.member, found.node, at.node, name);
    let mut looked = router.delegated.looked();
    let one = looked.entry(id).or_insert(LookedUp { count: 0, directory: key, index });
    (one.count, one.directory, one.index) = (one.count + 1, key, index);
    let (attr, ttl) = (router.shown(attr), Duration::ZERO);
    Some(Looked::Found(Entry { id, generation: 0, attr, entry_ttl: ttl, attr_ttl: ttl }))
}

/// The attributes of a directory that is delegated, or of a file in one.
pub(super) fn attributes<F: Filesystem>(router: &Router<F>, id: u64) -> Option<Attributes> {
    if router.delegated.count.load(Ordering::SeqCst) == 0 {
        return None;
    }
    let at = router.remote.at(id)?;
    let own = (at.member, at.node);
    // (Of a directory, its own delegation has them.)
    if let Some((directory, ttl)) = believed(router, own, id) {
        return Some(Attributes { attr: router.shown(directory.attr), ttl });
    }
    let (key, index) = router.delegated.looked().get(&id).map(|one| (one.directory, one.index))?;
    let (directory, ttl) = believed(router, key, id)?;
    let found = directory.names.get(usize::try_from(index).ok()?).filter(|found| found.node == at.node)?;
    let attr = found.attr.filter(|_| !router.here.is_open(id))?;
    Some(Attributes { attr: router.shown(attr), ttl })
}

/// The delegation of a directory, and how long the kernel may believe what it says of this file.
fn believed<F: Filesystem>(router: &Router<F>, key: Key, id: u64) -> Option<(Arc<Directory>, Duration)> {
    of(router, key)?;
    // (In this order: a recall that does not find it has ended the delegation already.)
    router.delegated.believed().entry(key).or_default().insert(id);
    let directory = of(router, key)?;
    let left = directory.left()?;
    Some((directory, left.min(KERNEL)))
}

/// A file that the kernel has looked up: its directory, and which name there it is. `None`: this member may not answer.
pub(super) fn file_of<F: Filesystem>(router: &Router<F>, at: At) -> Option<(Key, Arc<Directory>, usize)> {
    if router.delegated.count.load(Ordering::SeqCst) == 0 {
        return None;
    }
    let id = router.remote.number_of(at.member, at.node);
    let looked = router.delegated.looked().get(&id).map(|one| (one.directory, one.index));
    // (Its owner may have answered the look-up.)
    let by_name = || {
        let (parent, name) = router.remote.written.name_of(at.member, at.node)?;
        let key = (at.member, parent);
        Some((key, of(router, key)?.find(&name)?.0))
    };
    let (key, index) = looked.or_else(by_name)?;
    let directory = of(router, key)?;
    let index = usize::try_from(index).ok()?;
    let is_it = directory.names.get(index).is_some_and(|found| found.node == at.node);
    (is_it && !router.here.is_open(id)).then_some((key, directory, index))
}

/// Does this delegation last?
pub(super) fn is_still<F: Filesystem>(router: &Router<F>, key: Key, directory: &Arc<Directory>) -> bool {
    of(router, key).is_some_and(|now| Arc::ptr_eq(&now, directory))
}

/// Opens a directory for listing.
pub(super) fn opendir<F: Filesystem>(router: &Router<F>, caller: &Caller, at: At) -> Option<OpenedDirectory> {
    of(router, (at.member, at.node)).filter(|directory| permits(&directory.attr, caller, 4))?;
    let number = router.delegated.next_handle.fetch_add(1, Ordering::Relaxed);
    let number = number & (LISTED_HERE - 1);
    Some(OpenedDirectory { fh: MARK | LISTED_HERE | number, ..OpenedDirectory::default() })
}

/// Is it the handle of a directory that is listed here?
pub(super) fn is_listed_here(fh: u64) -> bool {
    fh & (MARK | HOME | LISTED_HERE) == MARK | LISTED_HERE
}

/// Its names now.
pub(super) fn names<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64) -> FsResult<Vec<Listed>> {
    let at = router.remote.at(id).ok_or(Errno::BADF)?;
    if let Some(directory) = of(router, (at.member, at.node)) {
        let listed = |one: &DelegatedName| Listed { ino: one.ino, kind: one.kind, name: one.name.clone() };
        return Ok(directory.names.iter().map(listed).collect());
    }
    let opened = router.open_directory_there(caller, at)?;
    let names = router.listed_there(caller, opened.fh);
    if let Some((member, handle)) = super::remote::Remote::handle(opened.fh) {
        router.close_there(member, Ask::Close { handle });
    }
    names
}
