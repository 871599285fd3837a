//! New files, removals of directories and renames, here or at another member.

use std::cell::Cell;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::call::{Answer, Ask};
use super::remote::At;
use super::{Does, NOT_OWNER, Router, Way, adopt, closing, copies, delegating, forward, homes, lost, moves, shim};
use crate::mount::{Entry, Filesystem, Opened};

pub(super) fn remove_directory<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    parent: u64,
    name: &[u8],
) -> FsResult<()> {
    let taken = Cell::new(None);
    let way = || {
        let way = router.way(caller, parent, Does::Changes)?;
        if let Way::Here = &way {
            let known = adopt::Known::at(router, caller, (parent, name))?;
            known.directory.map_or(Ok(()), |dir| router.may_remove(dir))?;
            taken.set(Some(known));
        }
        Ok(way)
    };
    let here = |door: &F| {
        let _known = taken.take();
        let dir = router.directory_at(parent, name);
        // (No member makes a name in it meanwhile.)
        if dir.is_some_and(|dir| !router.is_ours(dir)) {
            return Err(NOT_OWNER.into());
        }
        door.rmdir(caller, parent, name)?;
        delegating::recall(router, &[Some(parent), dir.map(|dir| dir.0)].into_iter().flatten().collect::<Vec<_>>());
        dir.into_iter().for_each(|dir| router.await_seen(caller, dir));
        Ok(())
    };
    let there = |at: At| router.done(caller, at, Ask::RemoveDirectory { parent: at.node, name: name.into() });
    router.within(caller, way, here, there)
}

pub(super) fn rename<F: Filesystem>(router: &Router<F>, caller: &Caller, names: &adopt::Names<'_>) -> FsResult<()> {
    let (is_between, taken) = (Cell::new(false), Cell::new(None));
    let ((parent, name), (new_parent, new_name), flags) = (names.from, names.to, names.flags);
    let way = || {
        let ways = (router.way(caller, parent, Does::Changes)?, router.way(caller, new_parent, Does::Changes)?);
        is_between.set(moves::are_two(&ways.0, &ways.1));
        match ways.0 {
            _ if is_between.get() => return Err(Errno::XDEV.into()),
            Way::Here => taken.set(Some(adopt::take(router, caller, names)?)),
            _ => {}
        }
        Ok(ways.0)
    };
    let there = |from: At| {
        let Way::There(to) = router.way(caller, new_parent, Does::Changes)? else {
            return Err(NOT_OWNER.into());
        };
        let (name, new_name, flags) = (name.into(), new_name.into(), flags.bits());
        let ask = Ask::Rename { parent: from.node, name, new_parent: to.node, new_name, flags };
        router.done(caller, from, ask)
    };
    let here = |_: &F| {
        let child = |(dir, name): (u64, &[u8])| router.namespace.pooled.child_of(FileId(dir), name).map(|id| id.0);
        let concerned = [Some(parent), Some(new_parent), child(names.from), child(names.to)];
        let rename = || copies::rename(router, names, || adopt::rename(router, caller, names, taken.take()));
        let to = (new_parent, new_name);
        let renamed = if flags.contains(RenameFlags::NOREPLACE) {
            lost::making(router, caller, to, rename)
        } else {
            rename().inspect(|()| lost::made(router, to.0, to.1))
        };
        if delegating::may_have_changed(&renamed) {
            delegating::recall(router, &concerned.into_iter().flatten().collect::<Vec<_>>());
        }
        renamed
    };
    let renamed = router.within(caller, way, here, there);
    if is_between.get() {
        return moves::rename(router, caller, (parent, name), (new_parent, new_name), flags);
    }
    renamed
}

pub(super) fn create<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (parent, name): (u64, &[u8]),
    perm: u32,
    flags: OFlags,
    kill_suidgid: bool,
) -> FsResult<(Entry, Opened)> {
    let there = |at: At| {
        let (name, flags_bits) = (name.into(), flags.bits());
        let (begun, before) = (tick(), router.remote.parents.before());
        match router.remote.ask_once(caller, at, Ask::Create { parent: at.node, name, perm, flags: flags_bits })? {
            Answer::Created { found, handle, waits } => {
                let opened = Router::<F>::opened_there(at.member, handle, flags);
                Ok((router.entry(at, &found), closing::opened_there(router, caller, opened, flags, waits)))
            }
            Answer::CreatedAt { found, handle, home, waits, parent } => {
                let how = (flags, found.attr.size_bytes == 0);
                let opened = homes::created_at(router, caller, (at.member, handle), home, how)?;
                let opened = closing::opened_there(router, caller, opened, flags, waits);
                let entry = router.entry(at, &found);
                // (Where the kernel checks permissions, it asks for them again.)
                if router.only_ids.is_none() {
                    router.here.making(entry.id, caller, entry.attr);
                }
                if let Some((attr, ttl)) = parent.map(|parent| *parent) {
                    router.remote.parents.made_in((at.member, at.node), router.shown(attr), begun + ttl, before);
                }
                Ok((entry, opened))
            }
            answer => forward::unexpected(answer),
        }
    };
    let here = |door: &F| {
        let make = || door.create(caller, parent, name, perm, flags, kill_suidgid);
        let made = lost::making(router, caller, (parent, name), make)?;
        let created = homes::created(router, caller, flags, made)?;
        delegating::changed(router, created.0.id);
        Ok(created)
    };
    shim::uses_names(router, caller, parent);
    let way = || router.way(caller, parent, Does::Changes);
    router.within(caller, way, here, there)
}
