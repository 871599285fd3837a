//! A version that goes over the store's file in place, because that has further names or another owner.
//!
//! The danger avoided: cut off in its middle the file is neither what we knew nor what we publish, and would be taken for
//! somebody else's, now or by the next agent: half of it would stay under all of its names, with ours beside. So before
//! that, and on the catalog's disk, only its number is what we know of it.

use std::io;

use surgetank_store::{Cred, Expect, StorePath};
use surgetank_types::model::{FileId, StoreIdentity};

use super::Drain;

impl Drain {
    /// Returns what was known of the file, if it is about to be written over.
    pub(super) fn begin_overwrite(
        &self,
        file: FileId,
        owner: Cred,
        temporary: &StorePath,
        target: &StorePath,
    ) -> io::Result<Option<StoreIdentity>> {
        let Some(known) = self.identity(file).filter(|known| !known.is_bare()) else { return Ok(None) };
        if !self.as_owner(owner, |who| self.namespace.store.writes_over(who, temporary, target))? {
            return Ok(None);
        }
        self.know(file, known.bare());
        if let Err(why) = self.namespace.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a file that is being written over may be taken for another's");
        }
        Ok(Some(known))
    }

    /// It failed: perhaps before anything was written, and then what others do to it is seen as before.
    pub(super) fn end_overwrite(&self, file: FileId, owner: Cred, target: &StorePath, known: StoreIdentity) {
        let expect = Expect::Linked(known);
        let untouched = self.as_owner(owner, |who| self.namespace.store.check(who, target, &expect));
        if untouched.is_ok_and(|untouched| untouched) {
            self.know(file, known);
        }
    }

    fn know(&self, file: FileId, identity: StoreIdentity) {
        let mut tree = self.namespace.write_tree();
        if let Some(inode) = tree.get_mut(file) {
            inode.identity = Some(Box::new(identity));
        }
        // What the next agent goes by.
        let before = tree.before.get_mut(&file).and_then(|before| before.identity.as_mut());
        if let Some(before) = before.filter(|before| before.ino == identity.ino) {
            **before = identity;
        }
        tree.txn.file(file);
    }
}
