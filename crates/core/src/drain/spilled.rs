//! Publishing the temporary in the store in which a file lies, and in which its program may go on writing.

use crate::sync::{Arc, PoisonError};

use crate::model::{FileId, OpKind, StoreIdentity};
use crate::namespace::content::{Content, Lies, Open};
use crate::namespace::tree::{Inode, file_of};
use crate::store::{Cred, StorePath};

use super::execute::{Done, Work};
use super::{Copied, Drain};

impl Drain {
    /// The copy is under the file's name now.
    pub(super) fn published(
        &self,
        kind: &OpKind,
        at: (FileId, &[u8]),
        identity: StoreIdentity,
        staged: &Option<Copied>,
    ) -> Done {
        let file = file_of(kind);
        let done = self.applied(kind, at, identity);
        let was_spill = self.is_spill(file, staged);
        let mut tree = self.namespace.tree();
        let wanted =
            tree.get(file).is_some_and(|inode| inode.logical.is_some()) || self.namespace.open_of(file).is_some();
        if let Some(inode) = tree.get_mut(file)
            && let owner = inode.cred()
            && let Some(spill) = inode.extra.as_mut().and_then(|extra| extra.spill.take_if(|_| was_spill || !wanted))
            && !was_spill
        {
            // Deleted since, and closed: nobody publishes that any more.
            tree.discards.push((spill.0, spill.1, owner));
        }
        done
    }

    /// Is what is published the temporary in which the file lies? Its writer may have moved there since the copy was made:
    /// then he goes on there, and that is published in its turn.
    pub(super) fn is_spill(&self, file: FileId, staged: &Option<Copied>) -> bool {
        let tree = self.namespace.tree();
        let spill = tree.get(file).and_then(Inode::spill);
        staged.as_ref().zip(spill).is_some_and(|((dir, name, ..), spill)| *spill == (*dir, name.clone()))
    }

    /// It was there already.
    pub(super) fn found_published(
        &self,
        one: &Work<'_>,
        at: (FileId, &[u8]),
        there: (&StorePath, Cred),
        identity: StoreIdentity,
        staged: &Option<Copied>,
    ) -> Done {
        let file = file_of(one.kind);
        if self.is_spill(file, staged)
            && let Some(open) = self.namespace.open_of(file)
        {
            let _gate = open.gate.write().unwrap_or_else(PoisonError::into_inner);
            self.goes_on_there(one, &open, there, identity);
        }
        self.published(one.kind, at, identity, staged)
    }

    /// What a program has open was published as it is: it is the store's own file now. The gate is closed.
    pub(super) fn goes_on_there(&self, one: &Work<'_>, open: &Open, there: (&StorePath, Cred), is: StoreIdentity) {
        let content = open.content();
        if content.lies != Lies::StoreTemporary {
            return;
        }
        let (path, owner) = there;
        let same = rustix::fs::fstat(&*content.file).map(|stat| stat.st_ino == is.ino);
        let file = match same {
            Ok(true) => Ok(content.file),
            // Its bytes were written into another file, which has further names.
            Ok(false) => {
                self.as_owner(owner, |who| self.namespace.store.open(who, path, content.writable)).map(Arc::new)
            }
            Err(why) => Err(why.into()),
        };
        match file {
            Ok(file) => open.replace(Content { file, lies: Lies::Store, ..content }),
            Err(why) => {
                let what = format!("published, but what is written to it from now on is lost: {why}");
                self.namespace.note(one.run, path.to_string(), what, true);
            }
        }
    }
}
