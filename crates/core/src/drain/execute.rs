//! Carrying out one operation in the store. Each recognises its own work, so that repeating one after a
//! crash (or after a sync that failed) does no harm; each leaves what somebody else changed alone.

use std::io;
use std::sync::PoisonError;

use crate::model::{FileId, Kind, OpKind, RunId, Seq, StoreIdentity};
use crate::namespace::journal::Txn;
use crate::namespace::tree::{Inode, Name, Tree};
use crate::store::{Cred, Expect, Meta, Staged, StorePath};

use super::Drain;
use super::publish::conflict_name;
use super::stage::meta_of;

/// What came of an operation.
#[derive(Default)]
pub(super) struct Done {
    /// Directories whose names changed. By id: a later operation of the batch may move them.
    pub dirs: Vec<FileId>,
    /// Files that the store no longer has because of it.
    pub gone: Vec<FileId>,
}

fn gone_already(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// The directory is not in the store yet; its turn comes.
fn no_place() -> io::Error {
    io::Error::from_raw_os_error(libc::EAGAIN)
}

/// What somebody else may not have touched when the operation's turn comes.
fn expectation(tree: &Tree, over: Option<FileId>, at: (FileId, &[u8])) -> Expect {
    let Some(inode) = over.and_then(|over| tree.get(over)) else {
        return Expect::Absent;
    };
    match &inode.identity {
        // Under whichever of its names: a hard link is the same file.
        Some(identity) => Expect::Identity(**identity),
        None if inode.applied.as_ref().is_some_and(|(dir, name)| *dir == at.0 && **name == *at.1) => Expect::Unknown,
        None => Expect::Absent,
    }
}

impl Drain {
    pub(super) fn execute(&self, seq: Seq) -> io::Result<Done> {
        let (kind, run) = {
            let tree = self.namespace.tree();
            let Some(op) = tree.ops.get(&seq) else {
                return Ok(Done::default());
            };
            (op.kind.clone(), op.run)
        };
        let over = match &kind {
            OpKind::Publish { over, .. } | OpKind::Rename { over, .. } => *over,
            OpKind::Exchange { b, .. } => Some(*b),
            _ => None,
        };
        for id in [Some(crate::namespace::tree::file_of(&kind)), over].into_iter().flatten() {
            self.know_in_place(id);
        }
        match kind {
            OpKind::Publish { file, dir, name, over } => {
                let what = self.namespace.tree().get(file).map(|inode| inode.attr.kind);
                match what {
                    Some(Kind::File) => self.publish_file(seq, file, (dir, &name), over, run),
                    Some(Kind::Directory) => self.publish_dir(seq, file, (dir, &name)),
                    Some(_) => self.publish_special(seq, file, (dir, &name), over, run),
                    None => Ok(Done::default()),
                }
            }
            OpKind::SetMeta { file } => self.set_meta(file),
            OpKind::Link { file, dir, name } => self.link(seq, file, (dir, &name), run),
            OpKind::Rename { file, from_dir, from, to_dir, to, over } => {
                self.rename(seq, file, (from_dir, &from), (to_dir, &to), over, run)
            }
            OpKind::Exchange { a, a_dir, a_name, b, b_dir, b_name } => {
                self.exchange(a, (a_dir, &a_name), b, (b_dir, &b_name))
            }
            OpKind::Unlink { file, dir, name } => self.unlink(seq, file, (dir, &name), run),
            OpKind::RemoveDir { file, dir, name } => self.remove_dir(seq, file, (dir, &name), run),
        }
    }

    /// May an earlier agent have carried it out?
    fn is_doubtful(&self, seq: Seq) -> bool {
        self.namespace.tree().ops.get(&seq).is_some_and(|op| op.doubtful)
    }

    fn place(&self, at: (FileId, &[u8])) -> io::Result<(StorePath, StorePath)> {
        let dir = self.namespace.tree().applied_path(at.0).ok_or_else(no_place)?;
        let path = dir.join(at.1);
        Ok((dir, path))
    }

    /// Is it this very file that the store has there?
    fn is_there(&self, file: FileId, path: &StorePath, owner: Cred) -> bool {
        let known = self.identity(file).map(|identity| identity.ino);
        self.as_owner(owner, |who| self.namespace.store.stat(who, path))
            .is_ok_and(|stat| known.is_none_or(|ino| ino == stat.identity.ino))
    }

    /// The store is not as the operation should find it. Where it may have been carried out before, that was us.
    fn stranger(&self, seq: Seq, run: RunId, path: &StorePath, what: &str) {
        if self.is_doubtful(seq) {
            tracing::info!(%path, what, "an operation that an earlier agent may have carried out");
        } else {
            self.conflict(run, &path.0, what, None);
        }
    }

    /// The file is in the store under this name now; whoever was there is not any more.
    fn applied(&self, file: FileId, at: (FileId, &[u8]), over: Option<FileId>, identity: StoreIdentity) -> Done {
        let mut tree = self.namespace.tree();
        let mut done = Done::default();
        let name = Name::from(at.1);
        let over = over.filter(|over| *over != file);
        if let Some(over) = over {
            Self::leaves(&mut tree, over, (at.0, &name));
            done.gone.push(over);
        }
        if let Some(inode) = tree.get_mut(file) {
            inode.identity = Some(Box::new(identity));
            inode.applied = Some((at.0, name));
        }
        drop(tree);
        if let Some(over) = over {
            self.lost_a_link(over);
        }
        done
    }

    /// One of a file's names went in the store; if it has others, its ctime changed there, and that was us.
    fn lost_a_link(&self, file: FileId) {
        let rest = {
            let tree = self.namespace.tree();
            tree.applied_path(file).zip(tree.get(file).map(Inode::cred))
        };
        if let Some((path, owner)) = rest {
            self.reidentify(file, &path, owner);
        }
    }

    /// A file loses one of its names in the store; another one, if it has one, stands for it.
    fn leaves(tree: &mut Tree, id: FileId, at: (FileId, &Name)) {
        let Some(inode) = tree.get(id) else { return };
        if !inode.applied.as_ref().is_some_and(|(dir, name)| *dir == at.0 && name == at.1) {
            return;
        }
        let names = inode.logical.iter().chain(inode.extra.iter().flat_map(|extra| &extra.more_names));
        let other = names
            .filter(|(dir, name)| !(*dir == at.0 && name == at.1))
            .find(|(dir, name)| tree.planned(*dir, name) == Some(id))
            .cloned();
        if let Some(inode) = tree.get_mut(id) {
            inode.applied = other;
        }
    }

    fn publish_file(
        &self,
        seq: Seq,
        file: FileId,
        at: (FileId, &[u8]),
        over: Option<FileId>,
        run: RunId,
    ) -> io::Result<Done> {
        let staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner).get(&seq).cloned();
        let (at, expect, owner, meta, temporary, is_again) = {
            let tree = self.namespace.tree();
            let inode = tree.get(file).ok_or_else(no_place)?;
            // A file that the store has is published where it is now.
            let at = inode.applied.clone().unwrap_or_else(|| (at.0, Name::from(at.1)));
            let expect = if inode.applied.is_some() {
                inode.identity.as_ref().map_or(Expect::Unknown, |identity| Expect::Identity(**identity))
            } else {
                expectation(&tree, over, (at.0, &at.1))
            };
            let temporary = match &staged {
                Some((dir, name, ..)) => Some(tree.applied_path(*dir).ok_or_else(no_place)?.join(name)),
                None => None,
            };
            (at, expect, inode.cred(), meta_of(inode), temporary, inode.applied.is_some())
        };
        let at = (at.0, &*at.1);
        let mut meta = meta;
        if !is_again && over.is_some() {
            // Another file than the one it replaces: nothing of that one stays.
            meta.xattrs.get_or_insert_default();
        }
        let (dir, path) = self.place(at)?;
        let Some(temporary) = temporary else {
            return Err(io::Error::other("published without a staged copy"));
        };
        let store = &self.namespace.store;
        let mut target = path.clone();
        let mut name_used: Box<[u8]> = Box::from(at.1);
        if !self.as_owner(owner, |who| store.check(who, &path, &expect))? {
            let op_prepared = self.namespace.tree().ops.get(&seq).and_then(|op| op.prepared);
            let ours = self.as_owner(owner, |who| store.stat(who, &path)).ok().filter(|stat| {
                op_prepared.is_some_and(|prepared| {
                    prepared.ino == stat.identity.ino
                        && prepared.size_bytes == stat.identity.size_bytes
                        && prepared.mtime_nanos == stat.identity.mtime_nanos
                })
            });
            if let Some(stat) = ours {
                // Renamed before a crash or a failed sync; only the books were behind.
                if let Some((dir, name, ..)) = staged {
                    let mut tree = self.namespace.tree();
                    tree.discards.push((dir, name, owner));
                }
                let mut done = self.applied(file, at, over.filter(|_| !is_again), stat.identity);
                done.dirs.push(at.0);
                return Ok(done);
            }
            // Published before, and the store broke off before it said so: the same bytes are no conflict.
            let same = staged.as_ref().is_some_and(|(_, _, staged, _)| self.has_these_bytes(owner, &path, staged));
            if !same {
                name_used = conflict_name(at.1, self.namespace.key(), run);
                target = dir.join(&name_used);
                self.conflict(
                    run,
                    &path.0,
                    "somebody else changed it in the store meanwhile; both are kept",
                    Some(&target),
                );
            }
        }
        self.write_down(seq, &staged);
        let identity = self.as_owner(owner, |who| store.publish(who, &temporary, &target, &meta))?;
        let mut done = self.applied(file, (at.0, &name_used), over.filter(|_| !is_again), identity);
        if let Some(inode) = self.namespace.tree().get_mut(file)
            && let Some(extra) = inode.extra.as_mut()
        {
            extra.spill = None;
        }
        done.dirs.push(at.0);
        Ok(done)
    }

    fn has_these_bytes(&self, owner: Cred, path: &StorePath, staged: &Staged) -> bool {
        let store = &self.namespace.store;
        let compared = self.as_owner(owner, |who| {
            let there = store.stat(who, path)?;
            let mut expected = *staged;
            expected.identity.ino = there.identity.ino;
            let is_file = there.attr.kind == Kind::File;
            let verify = self.namespace.config.verify;
            Ok(is_file && store.verify(who, path, &expected, verify, &|_| Ok(())).is_ok())
        });
        compared.unwrap_or(false)
    }

    /// An earlier agent's copy is not in place: from now on ours is the one to be recognised.
    fn write_down(&self, seq: Seq, staged: &Option<super::Copied>) {
        let mut tree = self.namespace.tree();
        let (Some(op), Some((_, _, staged, _))) = (tree.ops.get_mut(&seq), staged) else {
            return;
        };
        if op.prepared == Some(staged.identity) {
            return;
        }
        op.prepared = Some(staged.identity);
        let mut txn = Txn::default();
        txn.op(seq);
        self.namespace.commit(&tree, txn);
        drop(tree);
        if let Err(why) = self.namespace.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a publication may be repeated");
        }
    }

    fn publish_dir(&self, seq: Seq, file: FileId, at: (FileId, &[u8])) -> io::Result<Done> {
        let (dir, path) = self.place(at)?;
        let (owner, meta) = self.owner_and_meta(file)?;
        let store = &self.namespace.store;
        let there = match self.as_owner(owner, |who| store.stat(who, &path)) {
            Ok(stat) if stat.attr.kind == Kind::Directory => Some(stat.identity),
            Ok(_) => return Err(io::Error::from_raw_os_error(libc::EEXIST)),
            Err(why) if gone_already(&why) => None,
            Err(why) => return Err(why),
        };
        let identity = match there {
            // Somebody else made it too (or we did, before a crash): both mean the same directory.
            Some(identity) => {
                if let Some(d) = self.namespace.tree().dir_mut(file) {
                    d.complete = false;
                }
                identity
            }
            None => {
                let temporary = dir.join(&self.temporary(seq));
                let made = self.as_owner(owner, |who| {
                    store.discard(who, &temporary)?;
                    store.stage_dir(who, &temporary, &meta)?;
                    store.publish(who, &temporary, &path, &meta)
                });
                match made {
                    // Made before a crash, and moved along with its parent by what comes later in the queue.
                    Err(why) if gone_already(&why) && self.is_doubtful(seq) => {
                        if let Some(inode) = self.namespace.tree().get_mut(file) {
                            inode.applied = Some((at.0, Name::from(at.1)));
                        }
                        return Ok(Done::default());
                    }
                    other => other?,
                }
            }
        };
        let mut done = self.applied(file, at, None, identity);
        done.dirs.push(at.0);
        Ok(done)
    }

    fn publish_special(
        &self,
        seq: Seq,
        file: FileId,
        at: (FileId, &[u8]),
        over: Option<FileId>,
        run: RunId,
    ) -> io::Result<Done> {
        let (dir, path) = self.place(at)?;
        let (owner, meta) = self.owner_and_meta(file)?;
        let (kind, device, target, expect) = {
            let tree = self.namespace.tree();
            let inode = tree.get(file).ok_or_else(no_place)?;
            let target = inode.extra.as_ref().and_then(|extra| extra.target.clone());
            (inode.attr.kind, inode.attr.device, target, expectation(&tree, over, at))
        };
        let store = &self.namespace.store;
        let temporary = dir.join(&self.temporary(seq));
        let mut name: Box<[u8]> = Box::from(at.1);
        if !self.as_owner(owner, |who| store.check(who, &path, &expect))? {
            let same = kind == Kind::Symlink && self.as_owner(owner, |who| store.read_link(who, &path)).ok() == target;
            if same {
                let stat = self.as_owner(owner, |who| store.stat(who, &path))?;
                let mut done = self.applied(file, at, over, stat.identity);
                done.dirs.push(at.0);
                return Ok(done);
            }
            name = conflict_name(at.1, self.namespace.key(), run);
            self.conflict(
                run,
                &path.0,
                "somebody else changed it in the store meanwhile; both are kept",
                Some(&dir.join(&name)),
            );
        }
        let final_path = dir.join(&name);
        let identity = self.as_owner(owner, |who| {
            store.discard(who, &temporary)?;
            match (&target, kind) {
                (Some(target), Kind::Symlink) => store.stage_symlink(who, &temporary, target, &meta)?,
                _ => store.stage_node(who, &temporary, kind, device, &meta)?,
            };
            store.publish(who, &temporary, &final_path, &meta)
        })?;
        let mut done = self.applied(file, (at.0, &name), over, identity);
        done.dirs.push(at.0);
        Ok(done)
    }

    fn owner_and_meta(&self, file: FileId) -> io::Result<(Cred, Meta)> {
        let tree = self.namespace.tree();
        let inode = tree.get(file).ok_or_else(no_place)?;
        Ok((inode.cred(), meta_of(inode)))
    }

    fn set_meta(&self, file: FileId) -> io::Result<Done> {
        let Some(path) = self.namespace.tree().applied_path(file) else {
            return Ok(Done::default());
        };
        let (owner, meta) = self.owner_and_meta(file)?;
        let kind = self.namespace.tree().get(file).map_or(Kind::File, |inode| inode.attr.kind);
        match self.as_owner(owner, |who| self.namespace.store.set_meta(who, &path, kind, &meta)) {
            Ok(identity) => {
                if let Some(inode) = self.namespace.tree().get_mut(file)
                    && !inode.is_dir()
                {
                    inode.identity = Some(Box::new(identity));
                }
                Ok(Done::default())
            }
            // Somebody else removed it: there is nothing to set attributes of.
            Err(why) if gone_already(&why) => Ok(Done::default()),
            Err(why) => Err(why),
        }
    }

    fn link(&self, seq: Seq, file: FileId, at: (FileId, &[u8]), run: RunId) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let Some(from) = self.namespace.tree().applied_path(file) else {
            return Ok(Done::default());
        };
        let (owner, _) = self.owner_and_meta(file)?;
        match self.as_owner(owner, |who| self.namespace.store.link(who, &from, &path)) {
            Ok(()) => {}
            Err(why) if why.raw_os_error() == Some(libc::EEXIST) => {
                let ino = self.identity(file).map(|identity| identity.ino);
                let there = self.as_owner(owner, |who| self.namespace.store.stat(who, &path))?;
                if Some(there.identity.ino) != ino {
                    self.stranger(
                        seq,
                        run,
                        &path,
                        "somebody else made a file of this name; the hard link was not made",
                    );
                }
            }
            Err(why) => return Err(why),
        }
        // A link changes ctime (and the number of links): that was us.
        self.reidentify(file, &path, owner);
        Ok(Done { dirs: vec![at.0], gone: Vec::new() })
    }

    fn identity(&self, file: FileId) -> Option<StoreIdentity> {
        self.namespace.tree().get(file).and_then(|inode| inode.identity.as_deref().copied())
    }

    /// After we changed something of a file in the store other than its content.
    fn reidentify(&self, file: FileId, path: &StorePath, owner: Cred) {
        let Ok(stat) = self.as_owner(owner, |who| self.namespace.store.stat(who, path)) else {
            return;
        };
        if let Some(inode) = self.namespace.tree().get_mut(file)
            && !inode.is_dir()
            && inode.identity.as_ref().is_none_or(|known| {
                known.ino == stat.identity.ino
                    && known.mtime_nanos == stat.identity.mtime_nanos
                    && known.size_bytes == stat.identity.size_bytes
            })
        {
            inode.identity = Some(Box::new(stat.identity));
        }
    }

    fn rename(
        &self,
        seq: Seq,
        file: FileId,
        from: (FileId, &[u8]),
        to: (FileId, &[u8]),
        over: Option<FileId>,
        run: RunId,
    ) -> io::Result<Done> {
        let (_, from_path) = self.place(from)?;
        let (to_dir, to_path) = self.place(to)?;
        let (owner, _) = self.owner_and_meta(file)?;
        let expect = expectation(&self.namespace.tree(), over, to);
        let store = &self.namespace.store;
        let is_dir = self.namespace.tree().get(file).is_some_and(Inode::is_dir);
        // Look-ups must not resolve a path that is moving under them.
        let _staging = is_dir.then(|| self.staging.write().unwrap_or_else(PoisonError::into_inner));
        let moving = is_dir.then(|| self.namespace.moving.write().unwrap_or_else(PoisonError::into_inner));
        let free = is_dir || self.as_owner(owner, |who| store.check(who, &to_path, &expect))?;
        // Only the file itself is renamed: after a crash the name it had may be another's already.
        let present = self.is_there(file, &from_path, owner);
        let arrived = !free && self.is_there(file, &to_path, owner);
        let mut name: Box<[u8]> = Box::from(to.1);
        let mut target = to_path.clone();
        if present && !free && !arrived {
            name = conflict_name(to.1, self.namespace.key(), run);
            target = to_dir.join(&name);
            self.conflict(
                run,
                &to_path.0,
                "somebody else changed it in the store meanwhile; both are kept",
                Some(&target),
            );
        }
        let renamed = if present && !arrived {
            self.as_owner(owner, |who| store.rename(who, &from_path, &target))
        } else if arrived {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOENT))
        };
        match renamed {
            Ok(()) => {}
            Err(why) if gone_already(&why) => {
                self.stranger(
                    seq,
                    run,
                    &from_path,
                    &format!("somebody else removed it in the store before it could be renamed to {to_path}"),
                );
            }
            Err(why) => return Err(why),
        }
        {
            let mut tree = self.namespace.tree();
            if let Some(over) = over.filter(|over| *over != file) {
                Self::leaves(&mut tree, over, (to.0, &Name::from(to.1)));
            }
            if let Some(inode) = tree.get_mut(file) {
                let from_name = Name::from(from.1);
                let stood = inode.applied.as_ref().is_some_and(|(dir, name)| *dir == from.0 && *name == from_name);
                if stood || inode.applied.is_none() {
                    inode.applied = Some((to.0, Name::from(&*name)));
                }
            }
        }
        drop(moving);
        self.reidentify(file, &target, owner);
        if let Some(over) = over.filter(|over| *over != file) {
            self.lost_a_link(over);
        }
        let gone = over.filter(|over| *over != file).into_iter().collect();
        Ok(Done { dirs: vec![from.0, to.0], gone })
    }

    fn exchange(&self, a: FileId, a_at: (FileId, &[u8]), b: FileId, b_at: (FileId, &[u8])) -> io::Result<Done> {
        let (_, a_path) = self.place(a_at)?;
        let (_, b_path) = self.place(b_at)?;
        let (owner, _) = self.owner_and_meta(a)?;
        let store = &self.namespace.store;
        let _staging = self.staging.write().unwrap_or_else(PoisonError::into_inner);
        let moving = self.namespace.moving.write().unwrap_or_else(PoisonError::into_inner);
        // Otherwise it was done before a crash, and later operations on these names perhaps too.
        if self.is_there(a, &a_path, owner) && self.is_there(b, &b_path, owner) {
            self.as_owner(owner, |who| store.exchange(who, &a_path, &b_path))?;
        }
        {
            let mut tree = self.namespace.tree();
            for (id, at) in [(a, b_at), (b, a_at)] {
                if let Some(inode) = tree.get_mut(id) {
                    inode.applied = Some((at.0, Name::from(at.1)));
                }
            }
        }
        drop(moving);
        self.reidentify(a, &b_path, owner);
        self.reidentify(b, &a_path, owner);
        Ok(Done { dirs: vec![a_at.0, b_at.0], gone: Vec::new() })
    }

    fn unlink(&self, seq: Seq, file: FileId, at: (FileId, &[u8]), run: RunId) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let (owner, _) = self.owner_and_meta(file)?;
        let expect = self.identity(file).map_or(Expect::Unknown, Expect::Identity);
        let store = &self.namespace.store;
        // A directory may have the name by now, if this was carried out before a crash.
        let ours = self.as_owner(owner, |who| store.check(who, &path, &expect))? && self.is_there(file, &path, owner);
        let there = ours || self.as_owner(owner, |who| store.stat(who, &path)).is_ok();
        if ours {
            match self.as_owner(owner, |who| store.unlink(who, &path)) {
                Err(why) if !gone_already(&why) => return Err(why),
                _ => {}
            }
        } else if there {
            self.stranger(
                seq,
                run,
                &path,
                "deleted here, but somebody else changed it in the store meanwhile: theirs is kept",
            );
        }
        {
            let mut tree = self.namespace.tree();
            Self::leaves(&mut tree, file, (at.0, &Name::from(at.1)));
        }
        self.lost_a_link(file);
        Ok(Done { dirs: vec![at.0], gone: vec![file] })
    }

    fn remove_dir(&self, seq: Seq, file: FileId, at: (FileId, &[u8]), run: RunId) -> io::Result<Done> {
        let (_, path) = self.place(at)?;
        let (owner, _) = self.owner_and_meta(file)?;
        let removed = if self.is_there(file, &path, owner) {
            self.as_owner(owner, |who| self.namespace.store.remove_dir(who, &path))
        } else {
            Ok(())
        };
        match removed {
            Ok(()) => {}
            Err(why) if gone_already(&why) => {}
            Err(why) if matches!(why.raw_os_error(), Some(libc::ENOTEMPTY | libc::EEXIST)) => {
                self.stranger(
                    seq,
                    run,
                    &path,
                    "removed here, but somebody else put files into it in the store: it is kept",
                );
            }
            Err(why) => return Err(why),
        }
        let mut tree = self.namespace.tree();
        if let Some(inode) = tree.get_mut(file) {
            inode.applied = None;
        }
        Ok(Done { dirs: vec![at.0], gone: vec![file] })
    }
}
