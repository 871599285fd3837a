//! Renames within directories of this member. A directory that the store has is *adopted* first.
//!
//! A directory of the store has an owner by its path, and so has each one below it. So this member claims it and all that the
//! store has below. From then on it decides about them as if it had made them, whatever their paths are (`Inode::is_made`).
//! The rename is then one step, as that of a directory that was made here, and the drain carries it out in its order. Other
//! members that know one of the directories by its old path find it by the path of its claim, which stays.
//!
//! The danger that this avoids: a member that changes a directory by a path that leads elsewhere by now.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use rustix::process::{getegid, geteuid};
use surgetank_core::namespace::pooled::Place;
use surgetank_store::Cred;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::link::{Claimed, Moves, Owner, Renamed};
use super::{AGAIN, NOT_OWNER, PATIENCE, Router, lost};
use crate::mount::{Filesystem, Looked, killed, wait_long};

/// With more directories below it, a directory of the store is copied, not moved.
const DIRECTORIES_MAX: usize = 2_000;
/// So many claims are made at once: each waits until other members believe nothing of its directory.
const CLAIMS_AT_ONCE: usize = 16;

/// What a rename is about.
pub(super) struct Names<'a> {
    pub from: (u64, &'a [u8]),
    pub to: (u64, &'a [u8]),
    pub flags: RenameFlags,
}

/// A directory with its present name and its next one.
type Step<'a> = (FileId, ((u64, &'a [u8]), (u64, &'a [u8])));

impl Names<'_> {
    /// Those of the directories under both names that get another name.
    fn moving(&self, [from, to]: [Option<FileId>; 2]) -> Vec<Step<'_>> {
        let exchanged = to.filter(|_| self.flags.contains(RenameFlags::EXCHANGE));
        let steps = [from.map(|dir| (dir, (self.from, self.to))), exchanged.map(|dir| (dir, (self.to, self.from)))];
        steps.into_iter().flatten().collect()
    }

    /// The directory that is removed.
    fn replaced(&self, [_, to]: [Option<FileId>; 2]) -> Option<FileId> {
        to.filter(|_| !self.flags.contains(RenameFlags::EXCHANGE))
    }
}

/// The directory under a name in a directory of this member. It stays known until this is dropped.
pub(super) struct Known<'a, F: Filesystem> {
    router: &'a Router<F>,
    pub directory: Option<FileId>,
    /// What was looked up for this.
    looked_up: Option<u64>,
}

impl<'a, F: Filesystem> Known<'a, F> {
    /// (An agent that replaces another one has not looked at the name yet, although the kernel knows it.)
    pub fn at(router: &'a Router<F>, caller: &Caller, (parent, name): (u64, &[u8])) -> FsResult<Self> {
        let looked_up = match router.namespace.pooled.child_of(FileId(parent), name) {
            Some(_) => None,
            None => match router.door.lookup(caller, parent, name) {
                Ok(Looked::Found(entry)) => Some(entry.id),
                Ok(Looked::Missing { .. }) => None,
                // (The operation itself says so.)
                Err(fault) if fault.errno == Errno::NOENT => None,
                Err(fault) => return Err(fault),
            },
        };
        Ok(Self { router, directory: router.directory_at(parent, name), looked_up })
    }
}

impl<F: Filesystem> Drop for Known<'_, F> {
    fn drop(&mut self) {
        if let Some(id) = self.looked_up {
            self.router.door.forget(id, 1);
        }
    }
}

/// The directories that a rename is about, which this member has taken.
pub(super) type Taken<'a, F> = [Known<'a, F>; 2];

/// Renames in directories of this member, with what was `taken` for it. Errors: EREMCHG, the names mean other directories by now.
pub(super) fn rename<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    names: &Names<'_>,
    taken: Option<Taken<'_, F>>,
) -> FsResult<()> {
    let taken = taken.ok_or(NOT_OWNER)?;
    let directories = [names.from, names.to].map(|(dir, name)| router.directory_at(dir, name));
    if directories != taken.each_ref().map(|known| known.directory) {
        return Err(NOT_OWNER.into());
    }
    // (No member makes a name in what is replaced meanwhile. And claims may have taken long.)
    let parents = [names.from.0, names.to.0].map(FileId);
    if !parents.into_iter().chain(names.replaced(directories)).all(|dir| router.is_ours(dir)) {
        return Err(NOT_OWNER.into());
    }
    let pooled = &router.namespace.pooled;
    for (dir, (from, to)) in names.moving(directories) {
        if pooled.is_adoptable(dir) {
            pooled.adopt(dir);
        }
        let path = |(dir, name): (u64, &[u8])| pooled.path_of(FileId(dir), name).map(Vec::into_boxed_slice);
        if let (Some(from), Some(to)) = (path(from), path(to)) {
            router.link.moving(Some(Renamed { from, to }));
        }
    }
    router.door.rename(caller, names.from.0, names.from.1, names.to.0, names.to.1, names.flags)?;
    directories.into_iter().flatten().for_each(|dir| router.await_seen(caller, dir));
    Ok(())
}

/// Takes the directories of the store that a rename is about, and all that the store has below those that move. Errors: EXDEV,
/// another member has changed one of them; EIO, the owner of one is lost, or all takes too long.
pub(super) fn take<'a, F: Filesystem>(
    router: &'a Router<F>,
    caller: &Caller,
    names: &Names<'_>,
) -> FsResult<Taken<'a, F>> {
    let taken = [Known::at(router, caller, names.from)?, Known::at(router, caller, names.to)?];
    let directories = taken.each_ref().map(|known| known.directory);
    if let Some(replaced) = names.replaced(directories) {
        router.may_remove(replaced)?;
    }
    for (dir, _) in names.moving(directories) {
        if router.namespace.pooled.is_adoptable(dir) {
            take_one(router, dir)?;
        }
    }
    Ok(taken)
}

fn take_one<F: Filesystem>(router: &Router<F>, dir: FileId) -> FsResult<()> {
    let pooled = &router.namespace.pooled;
    // (Below a directory that was made here, it is this member's.)
    let Some(Place::OfTheStore(path)) = pooled.place_of(dir) else { return Ok(()) };
    // A bucket's objects would be copied one by one.
    if !router.namespace.base.store.features().plain_files {
        return Err(Errno::XDEV.into());
    }
    let ino = pooled.ino_of(dir).ok_or(Errno::STALE)?;
    wait_long();
    let taken = take_below(router, Claims { path, moves: Moves::Itself(ino) });
    if taken.is_err() {
        router.link.moving(None);
    }
    taken
}

/// A directory, and how it is found after the rename.
struct Claims {
    path: Vec<u8>,
    moves: Moves,
}

/// Claims a directory of the store, and all that the store has below it.
fn take_below<F: Filesystem>(router: &Router<F>, top: Claims) -> FsResult<()> {
    let until = tick() + PATIENCE;
    let (mut level, mut count) = (vec![top], 0);
    while !level.is_empty() {
        own_all(router, &level, until)?;
        count += level.len();
        let mut below = Vec::new();
        for one in &level {
            below.extend(directories_in(router, one)?);
            if count + below.len() > DIRECTORIES_MAX {
                return Err(Errno::XDEV.into());
            }
        }
        level = below;
    }
    Ok(())
}

/// What the store has in a directory that no other member changes any more.
fn directories_in<F: Filesystem>(router: &Router<F>, dir: &Claims) -> FsResult<Vec<Claims>> {
    let who = Cred { uid: geteuid().as_raw(), gid: getegid().as_raw() };
    match router.namespace.pooled.stored_directories(who, &dir.path) {
        Ok(names) => {
            let claims = |name: Box<[u8]>| Claims { path: [&*dir.path, &*name].join(&b'/'), moves: Moves::Below };
            Ok(names.into_iter().map(claims).collect())
        }
        // (This member has removed it, and the store does not know yet that it was there.)
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(why) => {
            tracing::debug!(%why, directory = %String::from_utf8_lossy(&dir.path), "a directory that is to be renamed cannot be listed");
            Err(Errno::XDEV.into())
        }
    }
}

/// Owns all these directories.
fn own_all<F: Filesystem>(router: &Router<F>, directories: &[Claims], until: Instant) -> FsResult<()> {
    const LOOK_EVERY: Duration = Duration::from_millis(5);
    let (next, stops, failed) = (AtomicUsize::new(0), AtomicBool::new(false), OnceLock::new());
    let some = || {
        while let Some(one) = directories.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(fault) = own(router, one, &|| !stops.load(Ordering::Relaxed) && tick() < until) {
                // (The first failure counts: it stops the others.)
                let _ = failed.set(fault.errno);
                stops.store(true, Ordering::Relaxed);
            }
        }
    };
    if let [one] = directories {
        return own(router, one, &|| !killed() && tick() < until);
    }
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..CLAIMS_AT_ONCE.min(directories.len()) {
            let begun = thread::Builder::new().name("pool-claims".to_owned()).spawn_scoped(scope, some);
            threads.push(begun.map_err(|_| Errno::AGAIN)?);
        }
        while threads.iter().any(|thread| !thread.is_finished()) {
            if killed() {
                stops.store(true, Ordering::Relaxed);
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok::<(), Errno>(())
    })?;
    failed.into_inner().map_or(Ok(()), |why| Err(why.into()))
}

/// Owns the directory of the store at this path, also if another member has it and nothing is in it.
fn own<F: Filesystem>(router: &Router<F>, one: &Claims, patient: &dyn Fn() -> bool) -> FsResult<()> {
    let Claims { path, moves } = one;
    loop {
        let owner = router.link.owner(path);
        match owner {
            _ if !patient() || router.link.is_over() => return Err(Errno::IO.into()),
            Owner::Member(member, _) => match router.remote.take_back(member, path, tick() + PATIENCE) {
                Err(fault) if matches!(fault.errno, Errno::NOTEMPTY | Errno::BUSY) => return Err(Errno::XDEV.into()),
                taken => taken?,
            },
            Owner::Lost(member) => lost::take_over(router, path, member, tick() + PATIENCE)?,
            // (Also of one that this member owns: the process may not have opened it yet.)
            Owner::TheStore | Owner::Us => match router.link.claim(path, Some(moves.clone()), patient) {
                Claimed::Ours => {
                    if owner != Owner::Us {
                        router.namespace.pooled.owner_changed(path);
                    }
                    return Ok(());
                }
                Claimed::NotOurs => {}
                Claimed::Missing => return Err(Errno::STALE.into()),
                Claimed::Expelled | Claimed::TimedOut => return Err(Errno::IO.into()),
            },
            Owner::Between => thread::sleep(AGAIN),
        }
    }
}
