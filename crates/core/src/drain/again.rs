//! A publication that was carried out before: by an agent that died, or by us, only that its directory could not be synced.

use crate::sync::PoisonError;
use std::io;

use crate::model::{Kind, OpKind, Seq};
use crate::namespace::tree::{Inode, files_of};
use crate::store::{Cred, Staged, StorePath, StoreStat};

use super::{Copied, Drain};

impl Drain {
    /// Of files whose publication was taken back in doubt: has the store that, or what it had before?
    pub(super) fn settle_doubts(&self, kind: &OpKind) -> io::Result<()> {
        if self.namespace.tree().doubts.is_empty() {
            return Ok(());
        }
        for id in files_of(kind) {
            let known = {
                let tree = self.namespace.tree();
                let doubt = tree.doubts.get(&id).copied();
                doubt.zip(tree.applied_path(id)).zip(tree.get(id).map(Inode::cred))
            };
            let Some(((prepared, path), owner)) = known else { continue };
            let there = match self.as_owner(owner, |who| self.namespace.store.stat(who, &path)) {
                Ok(there) => Some(there.identity),
                Err(why) if why.kind() == io::ErrorKind::NotFound => None,
                Err(why) => return Err(why),
            };
            let mut tree = self.namespace.tree();
            tree.doubts.remove(&id);
            let ours = there.filter(|there| prepared.is(there) && prepared.identity.ino == there.ino);
            if let (Some(ours), Some(inode)) = (ours, tree.get_mut(id)) {
                inode.identity = Some(Box::new(ours));
            }
        }
        Ok(())
    }

    /// The file that is under the name, if it is the one whose copy was written down for this publication; of which version.
    pub(super) fn published_before(&self, seq: Seq, owner: Cred, path: &StorePath) -> Option<(StoreStat, u32)> {
        let prepared = self.namespace.tree().ops.get(&seq).and_then(|op| op.prepared)?;
        let there = self.as_owner(owner, |who| self.namespace.store.stat(who, path)).ok()?;
        (prepared.is(&there.identity) && prepared.identity.ino == there.identity.ino)
            .then_some((there, prepared.version))
    }

    /// The temporary of a publication in doubt is gone: it is in place, or what it held is. An error when neither is so: the
    /// copy is made again then.
    pub(super) fn in_place_already(
        &self,
        seq: Seq,
        owner: Cred,
        temporary: &StorePath,
        path: &StorePath,
        staged: Option<&Copied>,
    ) -> io::Result<Option<StoreStat>> {
        let store = &self.namespace.store;
        match self.as_owner(owner, |who| store.stat(who, temporary)) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why),
            Ok(_) => return Ok(None),
        }
        if let Some((there, version)) = self.published_before(seq, owner, path)
            && staged.is_none_or(|(.., staged)| *staged == version)
        {
            return Ok(Some(there));
        }
        if staged.is_some_and(|(_, _, staged, _)| self.has_these_bytes(owner, path, staged)) {
            return self.as_owner(owner, |who| store.stat(who, path)).map(Some);
        }
        self.staged.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
        Err(super::execute::not_yet("its copy is neither in place nor beside it, and is made again"))
    }

    pub(super) fn has_these_bytes(&self, owner: Cred, path: &StorePath, staged: &Staged) -> bool {
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
}
