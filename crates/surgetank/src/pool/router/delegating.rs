//! Read delegations that this member has given: another member answers for a directory of this one, until it is recalled.
//!
//! A delegation has all names of a directory that was made in the pool, and the attributes of files that no program may write.
//! Each change of a name or of attributes recalls the directory ([`recall`]) before the program that makes it is answered.
//!
//! Invariants:
//! - A delegation is in the table before the directory is looked at, and changes that began before are awaited then. So either
//!   that look finds a change, or the change finds the delegation.
//! - It leaves the table when its member has let go of it, or does not believe it any more: each [`BELIEVED`] the member asks
//!   whether it still holds.
//!
//! The danger that this avoids: a member answers with what was so before a change.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use surgetank_core::namespace::pooled::{Child, Place};
use surgetank_types::clock::{tick, uptime};
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Attr, FileId};

use super::super::call::{Answer, Ask, Call, Delegated, DelegatedName};
use super::super::link::{Link, NoAnswer};
use super::{AGAIN, Router, kept};
use crate::mount::{Filesystem, wait_long};

/// Names of one message.
const NAMES_MAX: usize = 30_000;
/// A directory with more names is not delegated.
const ALL_NAMES_MAX: usize = 1 << 20;
/// Content of one message.
const CONTENT_BYTES_MAX: usize = 8 << 20;
/// Changes that are under way are awaited so long.
const CHANGING: Duration = Duration::from_millis(500);
/// So long a member answers for a directory without asking whether it still may.
pub(super) const BELIEVED: Duration = Duration::from_secs(5);
/// Clocks of two machines do not run quite alike.
const MARGIN: Duration = Duration::from_millis(500);

/// The delegations that were given.
pub(super) struct Given {
    table: Mutex<Table>,
    /// How many directories are delegated.
    count: AtomicUsize,
    /// Those of an earlier agent have ended.
    are_known: AtomicBool,
    begun: Instant,
    /// Members that the next agent asks.
    noted: Mutex<BTreeSet<u32>>,
}

#[derive(Default)]
struct Table {
    serial: u64,
    /// By directory and member.
    given: HashMap<u64, BTreeMap<u32, One>>,
    /// Members that asked for large files of a directory, in their order: each one is a source for the next.
    sources: HashMap<u64, HashMap<u64, Vec<u32>>>,
    /// What a member has not fetched yet: from this name on.
    left: HashMap<(u64, u32), (u64, Attr, Vec<DelegatedName>)>,
}

/// A delegation: its number, whether it is being recalled, and a hash of what was given.
#[derive(Clone, Copy)]
struct One {
    serial: u64,
    is_recalled: bool,
    print: u64,
}

impl Given {
    pub fn new(link: &Link) -> Self {
        Self {
            table: Mutex::default(),
            count: AtomicUsize::new(0),
            are_known: AtomicBool::new(link.readers().next().is_none()),
            begun: tick(),
            noted: Mutex::default(),
        }
    }

    /// Does another member answer for the directory, or may it?
    pub fn may_be_given(&self, dir: u64) -> bool {
        !self.are_known.load(Ordering::SeqCst)
            || self.count.load(Ordering::SeqCst) > 0 && self.table().given.contains_key(&dir)
    }

    /// Returns the number of the delegation, and whether the member had none.
    fn add(&self, dir: u64, member: u32) -> (u64, bool) {
        let mut table = self.table();
        // (Also greater than those of an earlier agent.)
        table.serial = (table.serial + 1).max(u64::try_from(uptime().as_nanos()).unwrap_or(0));
        let one = One { serial: table.serial, is_recalled: false, print: 0 };
        let is_new = table.given.entry(dir).or_default().insert(member, one).is_none();
        self.count.store(table.given.len(), Ordering::SeqCst);
        (one.serial, is_new)
    }

    /// It has ended, unless it is another one by now.
    fn remove(&self, dir: u64, member: u32, serial: u64) {
        let mut table = self.table();
        let Some(members) = table.given.get_mut(&dir) else { return };
        if members.get(&member).is_some_and(|one| one.serial == serial) {
            members.remove(&member);
            if members.is_empty() {
                table.given.remove(&dir);
                table.sources.remove(&dir);
            }
            for members in table.sources.get_mut(&dir).into_iter().flat_map(HashMap::values_mut) {
                members.retain(|one| *one != member);
            }
            table.left.remove(&(dir, member));
            self.count.store(table.given.len(), Ordering::SeqCst);
        }
    }

    /// May the member go on answering for it? Returns the hash of what it has.
    fn held(&self, dir: u64, member: u32, serial: u64) -> Option<u64> {
        let table = self.table();
        let one = table.given.get(&dir)?.get(&member)?;
        (one.serial == serial && !one.is_recalled).then_some(one.print)
    }

    /// The members that have some of these directories, which are recalled now.
    fn recalled(&self, dirs: &[u64]) -> BTreeMap<u32, Vec<(u64, u64)>> {
        let mut members = BTreeMap::<u32, Vec<(u64, u64)>>::new();
        if self.count.load(Ordering::SeqCst) > 0 {
            let mut table = self.table();
            for dir in dirs {
                for (member, one) in table.given.get_mut(dir).into_iter().flatten() {
                    one.is_recalled = true;
                    members.entry(*member).or_default().push((*dir, one.serial));
                }
            }
        }
        members
    }

    fn all(&self) -> Vec<u64> {
        self.table().given.keys().copied().collect()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an earlier agent gave ends.
pub(super) fn begin<F: Filesystem>(router: &Arc<Router<F>>) {
    kept::begin(router);
    if router.delegating.are_known.load(Ordering::SeqCst) {
        return;
    }
    let router = router.clone();
    let ends = move || {
        let until = router.delegating.begun + BELIEVED + MARGIN;
        // (All at the same time.)
        std::thread::scope(|scope| {
            for member in router.link.readers() {
                let router = &router;
                let asked = std::thread::Builder::new().spawn_scoped(scope, move || ask(router, member, &[], until));
                if asked.is_err() {
                    ask(router, member, &[], until);
                }
            }
        });
        router.delegating.are_known.store(true, Ordering::SeqCst);
    };
    // (Without a thread they end by themselves.)
    let _ = std::thread::Builder::new().name("pool-recalls".to_owned()).spawn(ends);
}

/// Recalls directories of a member, until it answers or does not believe them any more.
fn ask<F: Filesystem>(router: &Router<F>, member: u32, dirs: &[(u64, u64)], until: Instant) {
    let call = Call { uid: 0, gid: 0, ask: Ask::Recall { nodes: dirs.iter().map(|(dir, _)| *dir).collect() } };
    while tick() < until && !router.link.is_over() {
        match router.link.call(member, &call, None, &mut |_| tick() < until) {
            Ok(Answer::Done) | Err(NoAnswer::Gone) => break,
            _ => std::thread::sleep(AGAIN),
        }
    }
}

fn await_known<F: Filesystem>(router: &Router<F>) {
    let given = &router.delegating;
    while !given.are_known.load(Ordering::SeqCst) && given.begun.elapsed() < BELIEVED + MARGIN {
        wait_long();
        std::thread::sleep(AGAIN);
    }
}

/// Another member asks for a delegation, or for more names of one.
pub(super) fn give<F: Filesystem>(router: &Router<F>, member: u32, dir: u64, (serial, from): (u64, u64)) -> Answer {
    let given = &router.delegating;
    let refused = |why: Errno| Answer::Failed(why.raw_os_error());
    let (pooled, id) = (&router.namespace.pooled, FileId(dir));
    if from > 0 {
        if given.held(dir, member, serial).is_none() {
            return refused(Errno::AGAIN);
        }
        let mut table = given.table();
        let left = table.left.remove(&(dir, member)).filter(|(at, ..)| *at == from);
        let Some((at, attr, names)) = left else { return refused(Errno::AGAIN) };
        return page(&mut table, (dir, member), (serial, at), attr, names);
    }
    let is_made = || pooled.place_of(id) == Some(Place::Made);
    let leaves = || router.leaving.load(Ordering::SeqCst);
    if leaves() || id == router.namespace.homes.directory() || !is_made() {
        return refused(Errno::OPNOTSUPP);
    }
    if !note_reader(router, member) || !given.are_known.load(Ordering::SeqCst) {
        return refused(Errno::AGAIN);
    }
    let (serial, is_new) = given.add(dir, member);
    pooled.is_used_by_others(id);
    let until = tick() + CHANGING;
    let found = if router.works.await_earlier(|| tick() >= until || router.link.is_over()) {
        // (One that leaves recalls what it finds in the table.)
        let found = pooled.delegable(id).filter(|(_, names)| names.len() <= ALL_NAMES_MAX && router.is_ours(id));
        found.filter(|_| !leaves())
    } else {
        None
    };
    let Some((attr, children)) = found else {
        // (The member may have an earlier one, which has to be recalled.)
        if is_new {
            given.remove(dir, member, serial);
        }
        return refused(Errno::AGAIN);
    };
    let print = print_of(&attr, &children);
    let names = children.into_iter().map(|child| {
        let Child { name, id, kind, ino, attr } = child;
        DelegatedName { name, node: id.0, ino, kind, attr }
    });
    let names = names.collect();
    let mut table = given.table();
    let one = table.given.get_mut(&dir).and_then(|members| members.get_mut(&member));
    if let Some(one) = one.filter(|one| one.serial == serial) {
        one.print = print;
    }
    page(&mut table, (dir, member), (serial, 0), attr, names)
}

/// The next agent has to recall what this one gives. Returns whether it will.
fn note_reader<F: Filesystem>(router: &Router<F>, member: u32) -> bool {
    let noted = || router.delegating.noted.lock().unwrap_or_else(PoisonError::into_inner);
    let is_noted = noted().contains(&member) || router.link.may_read(member, CHANGING);
    if is_noted {
        noted().insert(member);
    }
    is_noted
}

/// The member asks whether it still has the delegation. What has changed without a request of a program is found here.
pub(super) fn is_held<F: Filesystem>(router: &Router<F>, member: u32, dir: u64, serial: u64) -> Answer {
    let given = &router.delegating;
    let is_same = |print: u64| {
        let now = router.namespace.pooled.delegable(FileId(dir));
        now.is_some_and(|(attr, names)| print_of(&attr, &names) == print)
    };
    let holds = router.link.may_serve() && given.held(dir, member, serial).is_some_and(is_same);
    // (A recall that has begun meanwhile waits for the member.)
    if holds && given.held(dir, member, serial).is_some() {
        return Answer::Done;
    }
    Answer::Failed(Errno::AGAIN.raw_os_error())
}

/// The content of files of a delegated directory. (What has changed meanwhile the member does not use: it has lost the delegation.)
pub(super) fn contents<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    (dir, serial): (u64, u64),
    files: &[u64],
) -> Answer {
    let is_held = || router.link.may_serve() && router.delegating.held(dir, member, serial).is_some();
    if !is_held() {
        return Answer::Failed(Errno::AGAIN.raw_os_error());
    }
    let (mut lengths, mut content) = (Vec::with_capacity(files.len()), Vec::new());
    for number in files {
        let from = content.len();
        let file = router.namespace.replicas.open_sealed(FileId(*number), FileId(dir));
        let rest = (CONTENT_BYTES_MAX - from) as u64;
        let read = file.and_then(|file| file.take(rest + 1).read_to_end(&mut content).ok());
        // (Where the content has moved away, the plain file loses its bytes after that.)
        let read = read.filter(|_| router.namespace.homes.home_of(FileId(*number)).is_none());
        let length = read.and_then(|bytes| u32::try_from(bytes).ok()).filter(|_| content.len() <= CONTENT_BYTES_MAX);
        if length.is_none() {
            content.truncate(from);
        }
        lengths.push(length);
    }
    if is_held() { Answer::Contents { lengths, content } } else { Answer::Failed(Errno::AGAIN.raw_os_error()) }
}

/// A member reads a large file of a delegated directory: which one asked before it, and may have more of it. 0: none.
pub(super) fn source<F: Filesystem>(router: &Router<F>, member: u32, (dir, serial): (u64, u64), file: u64) -> Answer {
    /// So many files of a directory have sources.
    const FILES_MAX: usize = 10_000;
    let mut table = router.delegating.table();
    let Table { given, sources, .. } = &mut *table;
    let holds = |one: &One| one.serial == serial && !one.is_recalled;
    if !given.get(&dir).and_then(|members| members.get(&member)).is_some_and(holds) {
        return Answer::Failed(Errno::AGAIN.raw_os_error());
    }
    let files = sources.entry(dir).or_default();
    if files.len() >= FILES_MAX && !files.contains_key(&file) {
        return Answer::Count(0);
    }
    let has = |one: &u32| {
        *one != member && given.get(&dir).and_then(|members| members.get(one)).is_some_and(|one| !one.is_recalled)
    };
    let members = files.entry(file).or_default();
    // (Never one that asked after it: they would wait for each other.)
    let before = members.iter().position(|one| *one == member).unwrap_or(members.len());
    let source = members.iter().take(before).rev().copied().find(has);
    if before == members.len() {
        members.push(member);
    }
    Answer::Count(source.unwrap_or(0).into())
}

fn print_of(attr: &Attr, names: &[Child]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let mut hash = |attr: &Attr| {
        let Attr { kind: _, perm, uid, gid, ino, links, size_bytes, blocks, device, atime, mtime, ctime } = attr;
        (perm, uid, gid, ino, links, size_bytes).hash(&mut hasher);
        (blocks, device).hash(&mut hasher);
        for time in [atime, mtime, ctime] {
            (time.secs(), time.nanos).hash(&mut hasher);
        }
    };
    hash(attr);
    for Child { attr, .. } in names {
        attr.iter().for_each(&mut hash);
    }
    for Child { name, id, kind, ino, attr } in names {
        (name, id, kind, ino, attr.is_some()).hash(&mut hasher);
    }
    hasher.finish()
}

fn page(
    table: &mut Table,
    (dir, member): (u64, u32),
    (serial, from): (u64, u64),
    attr: Attr,
    mut names: Vec<DelegatedName>,
) -> Answer {
    let more = names.split_off(names.len().min(NAMES_MAX));
    let is_all = more.is_empty();
    // (One that was recalled meanwhile has ended: the member is refused the rest.)
    if !is_all && table.given.get(&dir).is_some_and(|members| members.contains_key(&member)) {
        table.left.insert((dir, member), (from + names.len() as u64, attr, more));
    }
    Answer::Delegated(Box::new(Delegated { serial, attr, names, is_all }))
}

/// Something in these directories has changed, or they have. Returns when no member answers for them. (Also if the program is
/// killed: others see the change already.)
pub(super) fn recall<F: Filesystem>(router: &Router<F>, dirs: &[u64]) {
    await_known(router);
    let members = router.delegating.recalled(dirs);
    if members.is_empty() {
        return;
    }
    wait_long();
    let until = tick() + BELIEVED + MARGIN;
    let recalled = |member: u32, dirs: &[(u64, u64)]| {
        ask(router, member, dirs, until);
        dirs.iter().for_each(|(dir, serial)| router.delegating.remove(*dir, member, *serial));
    };
    match members.iter().collect::<Vec<_>>()[..] {
        [(member, dirs)] => recalled(*member, dirs),
        _ => std::thread::scope(|scope| {
            for (member, dirs) in &members {
                let begun = std::thread::Builder::new().spawn_scoped(scope, || recalled(*member, dirs));
                if begun.is_err() {
                    recalled(*member, dirs);
                }
            }
        }),
    }
}

/// Does what may change names in this directory, and recalls it.
pub(super) fn changing<F: Filesystem, T>(
    router: &Router<F>,
    dir: u64,
    change: impl FnOnce() -> FsResult<T>,
) -> FsResult<T> {
    let changed = change();
    if may_have_changed(&changed) {
        recall(router, &[dir]);
    }
    changed
}

/// Has a request changed something? With these errors it may have: another member does not answer, or the program was killed.
pub(super) fn may_have_changed<T>(changed: &FsResult<T>) -> bool {
    let is_open = |fault: &Fault| [Errno::IO, Errno::INTR].contains(&fault.errno);
    changed.as_ref().err().is_none_or(is_open)
}

/// The attributes of this file or directory have changed, or a program may write it from now on.
pub(super) fn changed<F: Filesystem>(router: &Router<F>, id: u64) {
    await_known(router);
    if router.delegating.count.load(Ordering::SeqCst) == 0 {
        return;
    }
    let pooled = &router.namespace.pooled;
    let mut dirs = vec![id];
    dirs.extend(pooled.name_of(FileId(id)).map(|(_, dir, _)| dir.0));
    dirs.extend(pooled.other_directories_of(FileId(id)).into_iter().map(|dir| dir.0));
    recall(router, &dirs);
}

/// Does another member answer for a directory?
pub(super) fn are_any<F: Filesystem>(router: &Router<F>) -> bool {
    router.delegating.count.load(Ordering::SeqCst) > 0
}

/// This member leaves.
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    // (A member that does not let go loses its lease.)
    recall(router, &router.delegating.all());
}
