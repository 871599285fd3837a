//! A version that replaces the store's file in place, because that file has further names or another owner.
//!
//! The danger that it avoids: an overwrite cut off in its middle leaves a file that is neither the known version nor
//! the new one. This agent or the next one would take it for another client's file. Half of it would stay under all of
//! its names, with the agent's version beside. So before the overwrite the catalog's disk records only the inode number
//! as known.

use std::io;

use surgetank_store::{Cred, Expect, StorePath};
use surgetank_types::model::{FileId, StoreIdentity};

use crate::drain::again::Recognition;

impl Recognition {
    /// Returns what was known of the file, if an overwrite begins.
    pub(super) fn begin_overwrite(
        &self,
        file: FileId,
        owner: Cred,
        temporary: &StorePath,
        target: &StorePath,
    ) -> io::Result<Option<StoreIdentity>> {
        let Some(known) = self.identity(file).filter(|known| !known.is_bare()) else { return Ok(None) };
        if !self.attempts.as_owner(owner, |who| self.base.store.writes_over(who, temporary, target))? {
            return Ok(None);
        }
        self.know(file, known.bare());
        if let Err(why) = self.metadata.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a file that is being written over may be taken for another's");
        }
        Ok(Some(known))
    }

    /// The overwrite failed. If nothing was written yet, changes by other clients are detected as before.
    pub(super) fn end_overwrite(&self, file: FileId, owner: Cred, target: &StorePath, known: StoreIdentity) {
        let expect = Expect::Linked(known);
        let untouched = self.attempts.as_owner(owner, |who| self.base.store.check(who, target, &expect));
        if untouched.is_ok_and(|untouched| untouched) {
            self.know(file, known);
        }
    }

    fn know(&self, file: FileId, identity: StoreIdentity) {
        let mut tree = self.metadata.write_tree();
        if let Some(inode) = tree.get_mut(file) {
            inode.identity = Some(identity);
        }
        // The next agent uses this record.
        let before = tree.before.get_mut(&file).and_then(|before| before.identity.as_mut());
        if let Some(before) = before.filter(|before| before.ino == identity.ino) {
            *before = identity;
        }
        tree.txn.file(file);
    }
}
