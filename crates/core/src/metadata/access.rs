//! Requests to the store as a user. A directory that a process may enter now may still be closed in the store, because the drain
//! has not set its new attributes yet: they go ahead of their turn in the queue. The store may also need the groups of a process.
//!
//! The danger that this avoids: a process is refused what it was just permitted.

use std::io;

use surgetank_store::{Cred, Meta, Store, StorePath};
use surgetank_types::model::{Caller, FileId, Kind, Timestamp};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::base::users::{groups_of, own_cred, who};
use crate::metadata::Metadata;
use crate::metadata::inode_locks::INODE_LOCK_TIMEOUT;

/// Requests to the store on behalf of a process: the attributes of directories that are still queued go ahead, and the store
/// learns the process's groups.
pub struct Access {
    store: Arc<dyn Store>,
    metadata: Arc<Metadata>,
}

impl Access {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self { store: base.store.clone(), metadata: metadata.clone() }
    }

    /// Asks the store about a file, or in a directory. A new mode or owner of the path may still be queued. If the
    /// store denies the request, those attributes are set now, and the request is repeated.
    pub(crate) fn let_in<T>(&self, id: FileId, ask: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match ask() {
            Err(why) if why.raw_os_error() == Some(libc::EACCES) && self.attributes_ahead(id) => ask(),
            other => other,
        }
    }

    /// Sets the queued attributes of a file and of the directories above it. Returns whether they may have other
    /// attributes now, set here or by the drain a moment ago.
    pub fn attributes_ahead(&self, id: FileId) -> bool {
        let (mut waiting, mut given) = (Vec::new(), false);
        {
            let tree = self.metadata.read_tree();
            let mut at = Some(id);
            while let Some((id, inode)) = at.and_then(|id| Some((id, tree.get(id)?))) {
                given |= inode.owned;
                if inode.set_meta.is_some() {
                    waiting.push((id, inode.is_dir()));
                }
                at = inode.applied.as_ref().map(|(dir, _)| *dir);
            }
        }
        // From the top: a directory must be reachable before its children.
        for (id, is_dir) in waiting.into_iter().rev() {
            // The drain may be about to set older attributes. (A caller that asks about a file holds its lock.)
            let _inode = is_dir.then(|| self.metadata.lock_inode_within(id, INODE_LOCK_TIMEOUT));
            let Some((path, kind, owner, meta)) = self.attributes_waiting(id) else { continue };
            let who = own_cred(owner);
            if !self.is_ours_there(id, who, &path, &meta, false).unwrap_or(false) {
                continue;
            }
            let Ok(identity) = self.store.set_meta(who, &path, kind, &meta) else { continue };
            given = true;
            if let Some(inode) = self.metadata.write_tree().get_mut(id).filter(|inode| !inode.is_dir()) {
                inode.identity = Some(identity);
            }
        }
        given
    }

    /// Does the store have the agent's file there, as known? Also true for a file that got these attributes already,
    /// without a record of that. For a file that is `written_in_place`, only the inode number is compared.
    pub(crate) fn is_ours_there(
        &self,
        id: FileId,
        who: Cred,
        path: &StorePath,
        meta: &Meta,
        written_in_place: bool,
    ) -> io::Result<bool> {
        let known = {
            let tree = self.metadata.read_tree();
            tree.get(id).filter(|inode| !inode.is_dir()).and_then(|inode| inode.identity)
        };
        let Some(known) = known else { return Ok(true) };
        let there = self.store.stat(who, path)?.identity;
        let given = |(_, mtime): (Timestamp, Timestamp)| mtime.nanos == there.mtime_nanos;
        Ok(known.is(&there)
            || known.ino == there.ino
                && (written_in_place
                    || known.size_bytes == there.size_bytes
                        && (known.mtime_nanos == there.mtime_nanos || meta.times.is_some_and(given))))
    }

    fn attributes_waiting(&self, id: FileId) -> Option<(StorePath, Kind, Cred, Meta)> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).filter(|inode| inode.set_meta.is_some())?;
        let attr = inode.attr;
        let times = Some((attr.atime, attr.mtime));
        let meta = Meta { perm: attr.perm, uid: attr.uid, gid: attr.gid, times, xattrs: None };
        Some((tree.applied_path(id)?, attr.kind, inode.cred(), meta))
    }

    /// Opens a directory in the store that its owner made inaccessible while the drain still has files for it. `false`:
    /// the directory is accessible, or the change does not help.
    pub(crate) fn open_up(&self, id: FileId) -> bool {
        let (path, owner, meta) = {
            let mut tree = self.metadata.write_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.is_dir() && inode.attr.perm & 0o300 != 0o300) else {
                return false;
            };
            let (attr, owner, run) = (inode.attr, inode.cred(), inode.run);
            let Some(path) = tree.applied_path(id) else { return false };
            tree.own(id);
            // Recorded first: in every case the directory gets its own mode again, last.
            self.metadata.queue_meta(&mut tree, id, run, false);
            self.metadata.commit(&mut tree);
            let times = Some((attr.atime, attr.mtime));
            (path, owner, Meta { perm: attr.perm | 0o700, uid: attr.uid, gid: attr.gid, times, xattrs: None })
        };
        self.store.set_meta(own_cred(owner), &path, Kind::Directory, &meta).is_ok()
    }

    /// As `let_in`, for requests to the store with the ids of a process. If the store denies, it gets the process's groups.
    pub(crate) fn let_caller_in<T>(
        &self,
        caller: &Caller,
        id: FileId,
        ask: impl Fn(Cred) -> io::Result<T>,
    ) -> io::Result<T> {
        let who = who(caller);
        let learns = || groups_of(caller).is_some_and(|groups| self.store.learn_groups(who, &groups));
        match self.let_in(id, || ask(who)) {
            Err(why) if why.raw_os_error() == Some(libc::EACCES) && learns() => self.let_in(id, || ask(who)),
            other => other,
        }
    }
}
