//! Eager publish: directories that the store needs ahead of their turn, for a door without a mount. There, a program's
//! working directory and its directory descriptors are the bare directories themselves, and the kernel executes only
//! files in them.
//!
//! A directory is made at once. The operation that publishes it stays in the queue; it finds the directory, syncs it
//! and ends. All else waits for the drain. The danger that this avoids: a directory that appears under a name that a
//! queued operation still changes.

use surgetank_state::{Name, Progress};
use surgetank_store::{Meta, Store, StorePath};
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{FileId, Kind, OpKind};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::users::own_cred;
use crate::files::Files;
use crate::metadata::Metadata;

/// A path in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Real {
    /// Path below the store's root.
    pub path: StorePath,
    /// Programs see it at the same path.
    pub in_place: bool,
}

/// Files and directories whose real path a process without the mount needs.
pub struct EagerPublish {
    store: Arc<dyn Store>,
    metadata: Arc<Metadata>,
}

impl EagerPublish {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        Self { store: base.store.clone(), metadata: files.metadata.clone() }
    }

    /// The path below the directory, as programs see it.
    pub fn path_of(&self, id: FileId) -> Option<Vec<u8>> {
        self.metadata.read_tree().logical_path(id)
    }

    /// The same with the file's known size.
    pub fn path_and_size(&self, id: FileId) -> Option<(Vec<u8>, u64)> {
        let tree = self.metadata.read_tree();
        let path = tree.logical_path(id)?;
        tree.get(id).map(|inode| (path, inode.attr.size_bytes))
    }

    /// The store's path of a directory, which is made now if necessary. `EAGAIN`: only the drain can make it.
    pub fn real_dir(&self, id: FileId) -> FsResult<Real> {
        if let Some(real) = self.real(id)? {
            return Ok(real);
        }
        let parent = {
            let tree = self.metadata.read_tree();
            let op = tree.get(id).and_then(|inode| inode.publish).and_then(|seq| tree.ops.get(&seq));
            match op.map(|op| &op.kind) {
                Some(OpKind::Publish { dir, .. }) => *dir,
                _ => return Err(Errno::AGAIN.into()),
            }
        };
        // A program removed the directory meanwhile: the queued operations take its content away.
        self.real_dir(parent).map_err(|fault| match fault.errno {
            Errno::NOENT => Errno::AGAIN.into(),
            _ => fault,
        })?;
        self.make_eagerly(id)?;
        self.real(id)?.ok_or(Errno::AGAIN.into())
    }

    fn real(&self, id: FileId) -> FsResult<Option<Real>> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).ok_or(Errno::NOENT)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR.into());
        }
        if inode.logical.is_none() && id != FileId::ROOT {
            return Err(Errno::NOENT.into());
        }
        // No process may use it while it is being made.
        let making =
            inode.publish.and_then(|seq| tree.ops.get(&seq)).is_some_and(|op| op.progress != Progress::Waiting);
        if making && inode.applied.is_none() {
            return Err(Errno::AGAIN.into());
        }
        let logical = tree.logical_path(id);
        Ok(tree.applied_path(id).map(|path| Real { in_place: logical.as_ref() == Some(&path.0), path }))
    }

    /// Makes a directory in the store before its turn, if no other queued operation concerns its name.
    fn make_eagerly(&self, id: FileId) -> FsResult<()> {
        let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
        let (seq, at, path, owner, meta) = {
            let mut tree = self.metadata.write_tree();
            let Some(inode) = tree.get(id) else { return Err(Errno::NOENT.into()) };
            if inode.applied.is_some() {
                return Ok(());
            }
            let seq = inode.publish.ok_or(Errno::AGAIN)?;
            let attr = inode.attr;
            let owner = inode.cred();
            let meta = Meta { perm: attr.perm | 0o700, uid: attr.uid, gid: attr.gid, times: None, xattrs: None };
            let op = tree.ops.get(&seq).filter(|op| op.progress == Progress::Waiting).ok_or(Errno::AGAIN)?;
            let OpKind::Publish { dir, name, over: None, .. } = &op.kind else { return Err(Errno::AGAIN.into()) };
            let at = (*dir, Name::from(&**name));
            let parent = tree.applied_path(at.0).ok_or(Errno::AGAIN)?;
            if tree.entry(at.0, &at.1).is_none_or(|entry| entry.pins != 1) {
                return Err(Errno::AGAIN.into());
            }
            let path = parent.join(&at.1);
            if let Some(op) = tree.ops.get_mut(&seq) {
                op.progress = Progress::Committing;
                op.certain = true;
            }
            tree.txn.op(seq);
            (seq, at, path, owner, meta)
        };
        let who = own_cred(owner);
        let made = match self.store.stat(who, &path) {
            Ok(there) if there.attr.kind == Kind::Directory => Ok(false),
            Ok(_) => Err(Errno::EXIST.into()),
            Err(why) if crate::base::queries::is_absent(&why) => self.store.stage_dir(who, &path, &meta).map(|_| true),
            Err(why) => Err(why),
        };
        let identity = made.and_then(|made| Ok((made, self.store.stat(who, &path)?.identity)));
        let mut tree = self.metadata.write_tree();
        if let Some(op) = tree.ops.get_mut(&seq) {
            op.progress = Progress::Waiting;
        }
        let (made, identity) = identity?;
        if !made {
            self.metadata.recall_delegation(&mut tree, Some(id));
        }
        if let Some(inode) = tree.get_mut(id) {
            inode.identity = Some(identity);
            inode.applied = Some(at);
            if let Some(d) = inode.dir.as_mut()
                && !made
            {
                d.complete = false;
            }
        }
        tree.txn.file(id);
        Ok(())
    }

    /// Makes every queued operation due now.
    pub fn hurry_everything(&self) {
        {
            let mut tree = self.metadata.write_tree();
            let last = tree.ops.keys().next_back().copied();
            tree.hurry(last);
            self.metadata.commit(&mut tree);
        }
        self.metadata.wake();
    }

    /// The store's path of a file that is exactly as programs see it. `EAGAIN`: it will be; `EACCES`: it never will be.
    pub fn real_file(&self, id: FileId) -> FsResult<StorePath> {
        let mut tree = self.metadata.write_tree();
        let inode = tree.get(id).ok_or(Errno::NOENT)?;
        let (publish, meta) = (inode.publish, inode.set_meta);
        if inode.sealed && !inode.dirty() && publish.is_none() && meta.is_none() {
            let logical = tree.logical_path(id);
            if let Some(path) = tree.applied_path(id).filter(|path| logical.as_ref() == Some(&path.0)) {
                return Ok(path);
            }
        } else if inode.sealed && inode.dirty() && publish.is_none() {
            return Err(Errno::ACCESS.into());
        }
        for seq in [publish, meta] {
            tree.hurry(seq);
        }
        self.metadata.commit(&mut tree);
        Err(Errno::AGAIN.into())
    }
}
