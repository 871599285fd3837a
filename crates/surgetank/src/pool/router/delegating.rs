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

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use surgetank_core::namespace::pooled::{Child, Place};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, FileId};

use super::super::call::{Answer, Ask, Call, Delegated, DelegatedName};
use super::super::link::NoAnswer;
use super::{AGAIN, Router, copies, sending};
use crate::mount::{Filesystem, wait_long};

/// Names of one message.
const NAMES_MAX: usize = 30_000;
/// A directory with more names is not delegated.
const ALL_NAMES_MAX: usize = 1 << 20;
/// Changes that are under way are awaited so long.
const CHANGING: Duration = Duration::from_millis(500);
/// So long a member answers for a directory without asking whether it still may.
pub(super) const BELIEVED: Duration = Duration::from_secs(5);
/// Clocks of two machines do not run quite alike.
const MARGIN: Duration = Duration::from_millis(500);

/// The delegations that were given.
#[derive(Default)]
pub(super) struct Given {
    table: Mutex<Table>,
    /// How many directories are delegated.
    count: AtomicUsize,
}

#[derive(Default)]
struct Table {
    serial: u64,
    /// By directory and member.
    given: HashMap<u64, BTreeMap<u32, One>>,
    /// What a member has not fetched yet: from this name on.
    left: HashMap<(u64, u32), (u64, Attr, Vec<DelegatedName>)>,
}

/// A delegation: its number, and whether it is being recalled.
#[derive(Clone, Copy)]
struct One {
    serial: u64,
    is_recalled: bool,
}

impl Given {
    pub fn is_given(&self, dir: u64) -> bool {
        self.count.load(Ordering::SeqCst) > 0 && self.table().given.contains_key(&dir)
    }

    /// Returns the number of the delegation.
    fn add(&self, dir: u64, member: u32) -> u64 {
        let mut table = self.table();
        table.serial += 1;
        let serial = table.serial;
        table.given.entry(dir).or_default().insert(member, One { serial, is_recalled: false });
        self.count.store(table.given.len(), Ordering::SeqCst);
        serial
    }

    /// It has ended, unless it is another one by now.
    fn remove(&self, dir: u64, member: u32, serial: u64) {
        let mut table = self.table();
        let Some(members) = table.given.get_mut(&dir) else { return };
        if members.get(&member).is_some_and(|one| one.serial == serial) {
            members.remove(&member);
            if members.is_empty() {
                table.given.remove(&dir);
            }
            table.left.remove(&(dir, member));
            self.count.store(table.given.len(), Ordering::SeqCst);
        }
    }

    /// May the member go on answering for it?
    fn holds(&self, dir: u64, member: u32) -> bool {
        let table = self.table();
        table.given.get(&dir).and_then(|members| members.get(&member)).is_some_and(|one| !one.is_recalled)
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

/// The member asks whether it still has the delegation.
pub(super) const STILL: u64 = u64::MAX;

/// Another member asks for a delegation, or for more names of one.
pub(super) fn give<F: Filesystem>(router: &Router<F>, member: u32, dir: u64, from: u64) -> Answer {
    let given = &router.delegating;
    let refused = |why: Errno| Answer::Failed(why.raw_os_error());
    let (pooled, id) = (&router.namespace.pooled, FileId(dir));
    if from == STILL {
        return if router.link.may_serve() && given.holds(dir, member) { Answer::Done } else { refused(Errno::AGAIN) };
    }
    if from > 0 {
        let mut table = given.table();
        let left = table.left.remove(&(dir, member)).filter(|(at, ..)| *at == from);
        let Some((at, attr, names)) = left else { return refused(Errno::AGAIN) };
        return page(&mut table, (dir, member), at, attr, names);
    }
    let is_made = || pooled.place_of(id) == Some(Place::Made);
    if router.leaving.load(Ordering::SeqCst) || id == router.namespace.homes.directory() || !is_made() {
        return refused(Errno::OPNOTSUPP);
    }
    // (The next agent has to recall what this one gave.)
    if sending::note_holder(router, member).is_err() || !copies::are_known(router) {
        return refused(Errno::AGAIN);
    }
    let serial = given.add(dir, member);
    pooled.is_used_by_others(id);
    let until = tick() + CHANGING;
    let found = if router.works.await_earlier(|| tick() >= until || router.link.is_over()) {
        pooled.delegable(id).filter(|(_, names)| names.len() <= ALL_NAMES_MAX && router.is_ours(id))
    } else {
        None
    };
    let Some((attr, children)) = found else {
        given.remove(dir, member, serial);
        return refused(Errno::AGAIN);
    };
    let names = children.into_iter().map(|child| {
        let Child { name, id, kind, ino, attr } = child;
        DelegatedName { name, node: id.0, ino, kind, attr }
    });
    let mut table = given.table();
    page(&mut table, (dir, member), 0, attr, names.collect())
}

fn page(table: &mut Table, (dir, member): (u64, u32), from: u64, attr: Attr, mut names: Vec<DelegatedName>) -> Answer {
    let more = names.split_off(names.len().min(NAMES_MAX));
    let is_all = more.is_empty();
    // (One that was recalled meanwhile has ended: the member is refused the rest.)
    if !is_all && table.given.get(&dir).is_some_and(|members| members.contains_key(&member)) {
        table.left.insert((dir, member), (from + names.len() as u64, attr, more));
    }
    Answer::Delegated(Box::new(Delegated { attr, names, is_all }))
}

/// Something in these directories has changed, or they have. Returns when no member answers for them. Errors: EIO, an earlier
/// agent's delegations are not known.
pub(super) fn recall<F: Filesystem>(router: &Router<F>, dirs: &[u64]) -> FsResult<()> {
    copies::await_known(router)?;
    let members = router.delegating.recalled(dirs);
    if members.is_empty() {
        return Ok(());
    }
    wait_long();
    // (Also if the program is killed: others see the change already.)
    let until = tick() + BELIEVED + MARGIN;
    let recalled = |member: u32, dirs: &[(u64, u64)]| {
        let call = Call { uid: 0, gid: 0, ask: Ask::Recall { nodes: dirs.iter().map(|(dir, _)| *dir).collect() } };
        while tick() < until {
            match router.link.call(member, &call, None, &mut |_| tick() < until) {
                Ok(Answer::Done) | Err(NoAnswer::Gone) => break,
                _ => std::thread::sleep(AGAIN),
            }
        }
        dirs.iter().for_each(|(dir, serial)| router.delegating.remove(*dir, member, *serial));
    };
    match members.iter().collect::<Vec<_>>()[..] {
        [(member, dirs)] => recalled(*member, dirs),
        _ => std::thread::scope(|scope| {
            for (member, dirs) in &members {
                scope.spawn(|| recalled(*member, dirs));
            }
        }),
    }
    Ok(())
}

/// Does what may change names in this directory, and recalls it.
pub(super) fn changing<F: Filesystem, T>(
    router: &Router<F>,
    dir: u64,
    change: impl FnOnce() -> FsResult<T>,
) -> FsResult<T> {
    let changed = change()?;
    recall(router, &[dir])?;
    Ok(changed)
}

/// The attributes of this file or directory have changed, or a program may write it from now on.
pub(super) fn changed<F: Filesystem>(router: &Router<F>, id: u64) -> FsResult<()> {
    if router.delegating.count.load(Ordering::SeqCst) == 0 {
        return copies::await_known(router);
    }
    let pooled = &router.namespace.pooled;
    let mut dirs = vec![id];
    dirs.extend(pooled.name_of(FileId(id)).map(|(_, dir, _)| dir.0));
    dirs.extend(pooled.other_directories_of(FileId(id)).into_iter().map(|dir| dir.0));
    recall(router, &dirs)
}

/// This member leaves.
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    // (A member that does not let go loses its lease.)
    let _ = recall(router, &router.delegating.all());
}
