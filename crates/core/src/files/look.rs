//! Checks whether a file that only the store has is another version now.
//!
//! The danger that this avoids: programs get old attributes for new content, after another client changed the file.

use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::FileId;
use surgetank_types::sync::atomic::Ordering;

use crate::base::users::own_cred;
use crate::files::copies::Copies;
use crate::files::open::REMOVED;

impl Copies {
    /// Only the store has it, and the last look is too old.
    pub(crate) fn is_to_be_looked_at(&self, id: FileId) -> FsResult<bool> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).ok_or(REMOVED)?;
        let fresh = inode.checked.is_some_and(|at| at.elapsed() < self.config.store_ttl);
        Ok(!fresh && inode.replica.is_none() && inode.spill().is_none() && !inode.dirty())
    }

    /// Another client may have changed a file that only the store has, since the last look.
    pub(crate) fn reread(&self, id: FileId, truncates: bool) -> FsResult<()> {
        if !self.is_to_be_looked_at(id)? {
            return Ok(());
        }
        // A store without plain files reports the version with the bytes.
        if self.store.features().plain_files || truncates { self.look_at_it(id) } else { Ok(()) }
    }

    pub(crate) fn look_at_it(&self, id: FileId) -> FsResult<()> {
        if self.look_quietly(id)?
            && let Some(door) = self.door.get()
        {
            door.invalidate(id, false);
        }
        Ok(())
    }

    /// The same while a process may be reading the file. It does not notify the kernel, because that waits for reads,
    /// and a thread that serves them may wait for the inode's lock. Returns whether the file is another version.
    pub(crate) fn look_quietly(&self, id: FileId) -> FsResult<bool> {
        let (path, who, identity) = {
            let tree = self.metadata.read_tree();
            let Some(inode) = tree.get(id) else {
                return Err(REMOVED.into());
            };
            let Some(path) = tree.applied_path(id) else {
                return Ok(false);
            };
            (path, inode.cred(), inode.identity)
        };
        self.counters.store_stats.fetch_add(1, Ordering::Relaxed);
        let stat =
            self.queries.must_ask((own_cred(who), &path), |store, who, path| store.stat(who, path)).map_err(|why| {
                if crate::base::queries::is_absent(&why) { Fault::from(Errno::STALE) } else { Fault::from(why) }
            })?;
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(id) else {
            return Ok(false);
        };
        inode.checked = Some(surgetank_types::clock::Moment::now());
        let now = inode.identity;
        // The drain changed the file during the look, or is about to (a new link, new attributes): the known identity
        // is right.
        if now.is_some_and(|now| now.is_still(&stat.identity)) || now != identity || tree.is_queued(id) {
            return Ok(false);
        }
        let Some(inode) = tree.get_mut(id) else {
            return Ok(false);
        };
        let ino = inode.attr.ino;
        inode.attr = surgetank_types::model::Attr { ino, ..stat.attr };
        inode.identity = Some(stat.identity);
        if inode.owned {
            tree.txn.file(id);
        }
        Ok(true)
    }
}
