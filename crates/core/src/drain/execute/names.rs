//! Operations without content: links, renames, exchanges, removals, new directories and other files without bytes.

use std::io;

use surgetank_state::{Inode, Name, Tree, places};
use surgetank_store::{Cred, Expect, StorePath};
use surgetank_types::model::{CONFLICT_INFIX, FileId, Kind, OpKind, Seq};
use surgetank_types::sync::PoisonError;

use crate::base::fence;
use crate::drain::attempts::already_absent;
use crate::drain::execute::{Done, Executor, Work, no_place};

impl Executor {
    pub(super) fn link(&self, one: &Work<'_>, file: FileId, at: (FileId, &[u8])) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let Some(from) = self.metadata.read_tree().applied_path(file) else {
            return Ok(Done::default());
        };
        let (owner, _) = self.owner_and_meta(file)?;
        match self.attempts.as_owner(owner, |who| self.base.store.link(who, &from, &path)) {
            Ok(()) => {}
            Err(why) if why.raw_os_error() == Some(libc::EEXIST) => {
                let ino = self.recognition.identity(file).map(|identity| identity.ino);
                let there = self.attempts.as_owner(owner, |who| self.base.store.stat(who, &path))?;
                if Some(there.identity.ino) != ino {
                    self.stranger(one, &path, "another client made a file of this name; the hard link was not made");
                    return Ok(Done { dirs: vec![at.0], removed: Vec::new() });
                }
            }
            Err(why) => return Err(why),
        }
        self.carried_out(one.kind, None, None);
        // A link changes ctime (and the number of links) by the drain's own work.
        self.reidentify(file, &path, owner);
        Ok(Done { dirs: vec![at.0], removed: Vec::new() })
    }

    pub(super) fn rename(
        &self,
        one: &Work<'_>,
        file: FileId,
        from: (FileId, &[u8]),
        to: (FileId, &[u8]),
        over: Option<FileId>,
    ) -> io::Result<Done> {
        let (_, from_path) = self.place(from)?;
        let (to_dir, to_path) = self.place(to)?;
        let (owner, _) = self.owner_and_meta(file)?;
        let store = &self.base.store;
        let is_dir = self.metadata.read_tree().get(file).is_some_and(Inode::is_dir);
        // Look-ups must not resolve a path while it moves.
        let _staging = is_dir.then(|| self.stager.staging.write().unwrap_or_else(PoisonError::into_inner));
        let moving = is_dir.then(|| self.metadata.moving.write().unwrap_or_else(PoisonError::into_inner));
        let mut free = is_dir || self.is_as_known(owner, &to_path, |tree| self.expectation(tree, over, to))?;
        if !free && !store.features().atomic_renames {
            // The file that had the name was removed before this one got it, and then an agent was killed.
            free = self.recognition.there(&to_path, owner)?.is_none();
        }
        // The operation renames only this very file: after a crash its old name may belong to another file already.
        let present = self.is_there(file, &from_path, owner)?;
        let arrived = !free && self.is_there(file, &to_path, owner)?;
        let mut name: Box<[u8]> = Box::from(to.1);
        if present && !free && !arrived {
            name = self.beside(one, &to_dir, to.1);
        }
        let target = to_dir.join(&name);
        // A rename cut off half-way leaves the file under both names; the old one must be removed.
        let both = arrived && !store.features().atomic_renames;
        let rename = || self.attempts.as_owner(owner, |who| store.rename(who, &from_path, &target));
        let renamed = if present && (!arrived || both) {
            match (rename(), over) {
                // A replaced directory is emptied like a removed one.
                (Err(why), Some(gone)) if is_dir && is_not_empty(&why) && self.empties(gone, (&target, owner))? => {
                    rename()
                }
                (renamed, _) => renamed,
            }
        } else if arrived {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOENT))
        };
        match renamed {
            Ok(()) => {}
            Err(why) if already_absent(&why) => {
                self.stranger(
                    one,
                    &from_path,
                    &format!("another client removed it in the store before it could be renamed to {to_path}"),
                );
            }
            Err(why) => return Err(why),
        }
        crash_point!("drain.renamed");
        let removed = self.carried_out(one.kind, Some((to.0, Name::from(name))), None);
        if is_dir {
            let mut tree = self.metadata.write_tree();
            self.metadata.copied_with(&mut tree, file);
            self.metadata.commit(&mut tree);
        }
        drop(moving);
        self.reidentify(file, &target, owner);
        Ok(Done { dirs: vec![from.0, to.0], removed })
    }

    pub(super) fn exchange(
        &self,
        one: &Work<'_>,
        a: (FileId, FileId, &[u8]),
        b: (FileId, FileId, &[u8]),
    ) -> io::Result<Done> {
        let (_, a_path) = self.place((a.1, a.2))?;
        let (_, b_path) = self.place((b.1, b.2))?;
        let (a, a_dir, b, b_dir) = (a.0, a.1, b.0, b.1);
        let (owner, _) = self.owner_and_meta(a)?;
        let store = &self.base.store;
        let _staging = self.stager.staging.write().unwrap_or_else(PoisonError::into_inner);
        let moving = self.metadata.moving.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_there(a, &a_path, owner)? && self.is_there(b, &b_path, owner)? {
            self.attempts.as_owner(owner, |who| store.exchange(who, &a_path, &b_path))?;
        } else if !(self.is_there(a, &b_path, owner)? && self.is_there(b, &a_path, owner)?) {
            // (Or it was done before a crash, and later operations on these names too.)
            let what =
                format!("another client changed one of them in the store before it could be exchanged with {b_path}");
            self.stranger(one, &a_path, &what);
        }
        crash_point!("drain.renamed");
        self.carried_out(one.kind, None, None);
        drop(moving);
        self.reidentify(a, &b_path, owner);
        self.reidentify(b, &a_path, owner);
        Ok(Done { dirs: vec![a_dir, b_dir], removed: Vec::new() })
    }

    pub(super) fn unlink(&self, one: &Work<'_>, file: FileId, at: (FileId, &[u8])) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let (owner, _) = self.owner_and_meta(file)?;
        let store = &self.base.store;
        // A directory may have the name by now, if this was carried out before a crash.
        let known = |tree: &Tree| self.expects(tree, file).unwrap_or(Expect::Unknown);
        let ours = self.is_as_known(owner, &path, known)? && self.is_there(file, &path, owner)?;
        let there = ours || self.recognition.there(&path, owner)?.is_some();
        if ours {
            match self.attempts.as_owner(owner, |who| store.unlink(who, &path)) {
                Err(why) if !already_absent(&why) => return Err(why),
                _ => {}
            }
        } else if there {
            self.stranger(
                one,
                &path,
                "deleted here, but another client changed it in the store meanwhile: theirs is kept",
            );
        }
        Ok(Done { dirs: vec![at.0], removed: self.carried_out(one.kind, None, None) })
    }

    /// Moves the agent's own copies out of a directory that is removed. Returns whether there were any. The caller
    /// prevents new staging there.
    fn empties(&self, gone: FileId, at: (&StorePath, Cred)) -> io::Result<bool> {
        Ok(self.moves_spills_out(gone)? | self.stager.gives_up_copies_in(gone, at)?)
    }

    pub(super) fn remove_dir(&self, one: &Work<'_>, file: FileId, at: (FileId, &[u8])) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let (owner, _) = self.owner_and_meta(file)?;
        // No thread may stage a copy in it meanwhile.
        let _staging = self.stager.staging.write().unwrap_or_else(PoisonError::into_inner);
        let remove = || self.attempts.as_owner(owner, |who| self.base.store.remove_dir(who, &path));
        let removed = match self.is_there(file, &path, owner)?.then(remove) {
            Some(Err(_)) if self.empties(file, (&path, owner))? => remove(),
            removed => removed.unwrap_or(Ok(())),
        };
        match removed {
            Ok(()) => {}
            Err(why) if already_absent(&why) => {}
            Err(why) if is_not_empty(&why) => {
                self.stranger(
                    one,
                    &path,
                    "removed here, but another client put files into it in the store: it is kept",
                );
            }
            Err(why) => return Err(why),
        }
        Ok(Done { dirs: vec![at.0], removed: self.carried_out(one.kind, None, None) })
    }

    pub(super) fn publish_dir(&self, one: &Work<'_>, file: FileId, at: (FileId, &[u8])) -> io::Result<Done> {
        let (dir, path) = self.place(at)?;
        let (owner, mut meta) = self.owner_and_meta(file)?;
        // A later mode is set in order: until then the owner puts files into the directory.
        if self.metadata.read_tree().get(file).is_some_and(|inode| inode.set_meta.is_some()) {
            meta.perm |= 0o700;
        }
        let store = &self.base.store;
        let there = match self.attempts.as_owner(owner, |who| store.stat(who, &path)) {
            Ok(stat) if stat.attr.kind == Kind::Directory => Some(stat.identity),
            Ok(_) if one.is_taken => None,
            Ok(_) => return Err(io::Error::from_raw_os_error(libc::EEXIST)),
            Err(why) if already_absent(&why) => None,
            Err(why) => return Err(why),
        };
        let beside = (one.is_taken && there.is_none()).then(|| self.beside(one, &dir, at.1));
        let at = (at.0, beside.as_deref().unwrap_or(at.1));
        let path = dir.join(at.1);
        let identity = match there {
            // Another client made it too (or this agent did, before a crash): both mean the same directory.
            Some(identity) => {
                // (Not if it was made ahead of its turn: then only this agent has put files there.)
                if self.recognition.identity(file).is_some_and(|known| known.ino == identity.ino) {
                    match meta.perm & 0o700 {
                        _ if one.is_taken => identity,
                        0o700 => identity,
                        _ => self.attempts.as_owner(owner, |who| store.set_meta(who, &path, Kind::Directory, &meta))?,
                    }
                } else {
                    if let Some(d) = self.metadata.write_tree().dir_mut(file) {
                        d.complete = false;
                    }
                    identity
                }
            }
            None => {
                self.files.temporaries.expect_temporaries_in(at.0);
                let temporary = dir.join(&self.attempts.temporary(one.seq));
                let made = self.attempts.as_owner(owner, |who| {
                    store.discard(who, &temporary)?;
                    store.stage_dir(who, &temporary, &meta)?;
                    store.publish(who, &temporary, &path, &meta)
                });
                match made {
                    // It was made before a crash, and moved with its parent by a later operation of the queue.
                    Err(why) if already_absent(&why) && self.is_doubtful(one.seq) => {
                        self.carried_out(one.kind, None, None);
                        return Ok(Done::default());
                    }
                    other => other?,
                }
            }
        };
        Ok(self.applied(one.kind, at, identity))
    }

    pub(super) fn publish_special(
        &self,
        one: &Work<'_>,
        file: FileId,
        at: (FileId, &[u8]),
        over: Option<FileId>,
    ) -> io::Result<Done> {
        let (dir, path) = self.place(at)?;
        let (owner, meta) = self.owner_and_meta(file)?;
        let (kind, device, target) = {
            let tree = self.metadata.read_tree();
            let inode = tree.get(file).ok_or_else(no_place)?;
            let target = inode.extra.as_ref().and_then(|extra| extra.target.clone());
            (inode.attr.kind, inode.attr.device, target)
        };
        let store = &self.base.store;
        self.files.temporaries.expect_temporaries_in(at.0);
        let temporary = dir.join(&self.attempts.temporary(one.seq));
        let mut name: Box<[u8]> = Box::from(at.1);
        if one.is_taken || !self.is_as_known(owner, &path, |tree| self.expectation(tree, over, at))? {
            if kind == Kind::Symlink && self.leads_there(&path, owner, target.as_deref())? {
                let stat = self.attempts.as_owner(owner, |who| store.stat(who, &path))?;
                return Ok(self.applied(one.kind, at, stat.identity));
            }
            name = self.beside(one, &dir, at.1);
        }
        let final_path = dir.join(&name);
        let identity = self.attempts.as_owner(owner, |who| {
            store.discard(who, &temporary)?;
            match (&target, kind) {
                (Some(target), Kind::Symlink) => store.stage_symlink(who, &temporary, target, &meta)?,
                _ => store.stage_node(who, &temporary, kind, device, &meta)?,
            };
            store.publish(who, &temporary, &final_path, &meta)
        })?;
        Ok(self.applied(one.kind, (at.0, &name), identity))
    }

    /// Does a link to the same target exist already?
    fn leads_there(&self, path: &StorePath, owner: Cred, target: Option<&[u8]>) -> io::Result<bool> {
        match self.attempts.as_owner(owner, |who| self.base.store.read_link(who, path)) {
            Ok(there) => Ok(target == Some(&*there)),
            // Not a link, or absent.
            Err(why) if already_absent(&why) || why.raw_os_error() == Some(libc::EINVAL) => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// Has another member of the pool taken over a directory in which the operation does something?
    pub(super) fn is_taken(&self, seq: Seq, kind: &OpKind) -> io::Result<bool> {
        let members = self.base.members.get().map(|members| &**members);
        let memberships = self.base.fence.memberships_of(seq, members)?;
        if memberships.is_empty() {
            return Ok(false);
        }
        let directories = {
            let tree = self.metadata.read_tree();
            let mut dirs: Vec<FileId> = places(kind).into_iter().map(|(dir, _)| dir).collect();
            if let OpKind::SetMeta { file } | OpKind::Publish { file, .. } = kind {
                dirs.extend(tree.get(*file).and_then(|inode| inode.applied.as_ref()).map(|(dir, _)| *dir));
                // (The attributes of a directory of the store are its owner's.)
                dirs.push(*file);
            }
            dirs.into_iter().flat_map(|dir| deciding(&tree, dir)).collect::<Vec<_>>()
        };
        self.attempts.pause.call(|| fence::is_taken(&*self.base.store, &memberships, &directories))
    }

    /// The operation is not carried out: a member that was lost to its pool does not change what others decide now.
    pub(super) fn leave_to_others(&self, one: &Work<'_>) -> Done {
        let what = match one.kind {
            OpKind::Rename { .. } | OpKind::Exchange { .. } => "it was renamed here",
            OpKind::Unlink { .. } | OpKind::RemoveDir { .. } => "it was removed here",
            OpKind::Link { .. } => "it got a hard link here",
            OpKind::SetMeta { .. } | OpKind::Publish { .. } => "its attributes were changed here",
        };
        let what = format!(
            "{what}, but this node was lost to its pool, and another one has taken the directory over: the store is left as it is"
        );
        let at = places(one.kind).first().and_then(|(dir, name)| Some(self.place((*dir, name)).ok()?.1));
        let path = at.or_else(|| self.metadata.read_tree().applied_path(surgetank_state::file_of(one.kind)));
        self.attempts.conflict(one.run, &path.unwrap_or_else(StorePath::root).0, &what, None);
        // (The store has everything else where it was.)
        let removed = match one.kind {
            OpKind::Unlink { .. } | OpKind::RemoveDir { .. } => self.carried_out(one.kind, None, None),
            _ => Vec::new(),
        };
        Done { dirs: Vec::new(), removed }
    }
}

/// The directories that may say who decides about the names of this one: those up to the first one that was not made here.
fn deciding(tree: &Tree, dir: FileId) -> Vec<StorePath> {
    let mut found = Vec::new();
    let mut at = Some(dir);
    while let Some(inode) = at.and_then(|at| tree.get(at)) {
        let Some(id) = at else { break };
        let is_beside = |name: &[u8]| name.windows(CONFLICT_INFIX.len()).any(|part| part == CONFLICT_INFIX.as_bytes());
        if inode.is_made(id) && inode.applied.as_ref().is_some_and(|(_, name)| is_beside(name)) {
            // (What this agent has put beside a name is its own.)
            break;
        }
        if inode.is_dir() {
            found.extend(tree.applied_path(id));
        }
        let goes_on = !inode.is_dir() || inode.is_made(id);
        at = inode.applied.as_ref().or(inode.logical.as_ref()).map(|(parent, _)| *parent).filter(|_| goes_on);
    }
    found
}

fn is_not_empty(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST))
}
