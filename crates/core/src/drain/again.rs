//! A publication that was carried out before: by an agent that died, or by this one, and then its directory could not
//! be synced.

use std::io;

use surgetank_state::{Copied, Inode, files_of};
use surgetank_store::{Cred, Staged, StorePath, StoreStat};
use surgetank_types::model::{FileId, Kind, OpKind, Seq, StoreIdentity};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::drain::attempts::{Attempts, already_absent, not_yet};
use crate::metadata::Metadata;

/// Recognises the work of an earlier attempt, or of an earlier agent, in the store.
pub(crate) struct Recognition {
    pub(super) base: Base,
    pub(super) metadata: Arc<Metadata>,
    pub(super) attempts: Arc<Attempts>,
}

impl Recognition {
    pub(super) fn new(base: &Base, metadata: &Arc<Metadata>, attempts: &Arc<Attempts>) -> Self {
        Self { base: base.clone(), metadata: metadata.clone(), attempts: attempts.clone() }
    }

    /// For files whose publication was taken back in doubt: does the store have that version, or the one before?
    pub(super) fn settle_doubts(&self, kind: &OpKind) -> io::Result<()> {
        if self.metadata.read_tree().doubts.is_empty() {
            return Ok(());
        }
        for id in files_of(kind) {
            let known = {
                let tree = self.metadata.read_tree();
                let doubt = tree.doubts.get(&id).copied();
                doubt.zip(tree.applied_path(id)).zip(tree.get(id).map(Inode::cred))
            };
            let Some(((prepared, path), owner)) = known else { continue };
            let there = self.there(&path, owner)?.map(|there| there.identity);
            let mut tree = self.metadata.write_tree();
            tree.doubts.remove(&id);
            let ours = there.filter(|there| prepared.is(there) && prepared.identity.ino == there.ino);
            if let (Some(ours), Some(inode)) = (ours, tree.get_mut(id)) {
                inode.identity = Some(ours);
            }
        }
        Ok(())
    }

    /// The file under the name, with its version, if it is the one whose copy the catalog records for this publication.
    pub(super) fn published_before(
        &self,
        seq: Seq,
        owner: Cred,
        path: &StorePath,
    ) -> io::Result<Option<(StoreStat, u32)>> {
        let prepared = self.metadata.read_tree().ops.get(&seq).and_then(|op| op.prepared);
        let Some(prepared) = prepared else { return Ok(None) };
        let is_it = |there: &StoreStat| prepared.is(&there.identity) && prepared.identity.ino == there.identity.ino;
        Ok(self.there(path, owner)?.filter(is_it).map(|there| (there, prepared.version)))
    }

    /// The temporary of a doubtful publication is missing: its content is in place, or what it held is. An error when
    /// neither is true; the drain then copies again.
    pub(super) fn in_place_already(
        &self,
        seq: Seq,
        owner: Cred,
        temporary: &StorePath,
        path: &StorePath,
        staged: Option<&Copied>,
    ) -> io::Result<Option<StoreStat>> {
        if self.there(temporary, owner)?.is_some() && !self.is_version_before(owner, temporary, staged)? {
            return Ok(None);
        }
        if let Some((there, version)) = self.published_before(seq, owner, path)?
            && staged.is_none_or(|copied| copied.version == version)
        {
            return Ok(Some(there));
        }
        if let Some(copied) = staged
            && self.has_these_bytes(owner, path, &copied.staged)?
        {
            return self.attempts.as_owner(owner, |who| self.base.store.stat(who, path)).map(Some);
        }
        Err(self.is_copied_again(seq))
    }

    /// After an exchange of names, does the version before have the temporary's name?
    fn is_version_before(&self, owner: Cred, temporary: &StorePath, staged: Option<&Copied>) -> io::Result<bool> {
        let Some(copied) = staged.filter(|_| self.base.store.exchanges()) else { return Ok(false) };
        Ok(self.there(temporary, owner)?.is_some_and(|there| there.identity.ino != copied.staged.identity.ino))
    }

    /// An error means that the copy was published, and is made again.
    pub(super) fn is_still_copied(
        &self,
        seq: Seq,
        owner: Cred,
        temporary: &StorePath,
        staged: Option<&Copied>,
    ) -> io::Result<()> {
        let doubtful = self.metadata.read_tree().ops.get(&seq).is_some_and(|op| op.doubtful);
        if doubtful && self.is_version_before(owner, temporary, staged)? {
            Err(self.is_copied_again(seq))
        } else {
            Ok(())
        }
    }

    /// The copy for an operation is not there any more: it was published, or its directory was removed.
    pub(super) fn is_copied_again(&self, seq: Seq) -> io::Error {
        self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
        not_yet("its copy is neither in place nor beside it, and is made again")
    }

    /// An error means that the answer is unknown. Without it, the drain would take its own file for another client's.
    pub(super) fn has_these_bytes(&self, owner: Cred, path: &StorePath, staged: &Staged) -> io::Result<bool> {
        let Some(there) = self.there(path, owner)?.filter(|there| there.attr.kind == Kind::File) else {
            return Ok(false);
        };
        let mut expected = *staged;
        expected.identity.ino = there.identity.ino;
        let verify = self.base.config.verify;
        match self.attempts.as_owner(owner, |who| self.base.store.verify(who, path, &expected, verify, &|_| Ok(()))) {
            Ok(()) => Ok(true),
            Err(why) if why.kind() == io::ErrorKind::InvalidData || already_absent(&why) => Ok(false),
            // The drain can read its own files.
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// What the store has at the path. The name is absent only if the store says so. After any other error the answer
    /// is unknown, and an operation that took the error for an answer would be dropped without a message.
    pub(super) fn there(&self, path: &StorePath, owner: Cred) -> io::Result<Option<StoreStat>> {
        match self.attempts.as_owner(owner, |who| self.base.store.stat(who, path)) {
            Ok(stat) => Ok(Some(stat)),
            Err(why) if already_absent(&why) => Ok(None),
            Err(why) => Err(why),
        }
    }

    pub(super) fn identity(&self, file: FileId) -> Option<StoreIdentity> {
        self.metadata.read_tree().get(file).and_then(|inode| inode.identity)
    }
}
