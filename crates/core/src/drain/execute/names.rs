//! Operations that change names: links, renames, exchanges, removals.

use std::io;

use surgetank_state::{Inode, Name, Tree};
use surgetank_store::{Cred, Expect, StorePath};
use surgetank_types::model::FileId;
use surgetank_types::sync::PoisonError;

use crate::drain::attempts::already_absent;
use crate::drain::execute::{Done, Executor, Work};

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
}

fn is_not_empty(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST))
}
