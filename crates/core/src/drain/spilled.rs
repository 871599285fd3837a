//! Publishes the temporary in the store that holds a spilled file, while its program may still write to it.

use std::io;

use surgetank_state::{Copied, Inode, Name, file_of};
use surgetank_store::{Cred, StorePath};
use surgetank_types::model::{FileId, Kind, OpKind, StoreIdentity};
use surgetank_types::sync::{Arc, PoisonError};

use crate::content::{Content, Location, Open};
use crate::drain::execute::{Done, Executor, Work};

impl Executor {
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
        let mut tree = self.metadata.write_tree();
        let wanted =
            tree.get(file).is_some_and(|inode| inode.logical.is_some()) || self.metadata.open_of(file).is_some();
        if let Some(inode) = tree.get_mut(file)
            && let owner = inode.cred()
            && let Some(spill) = inode.extra.as_mut().and_then(|extra| extra.spill.take_if(|_| was_spill || !wanted))
            && !was_spill
        {
            // Deleted since, and closed: no operation publishes it any more.
            tree.discards.push((spill.0, spill.1, owner));
        }
        done
    }

    /// Is the published copy the temporary that holds the file? Its writer may have moved there since the copy was
    /// made. Then the writer continues there, and a later operation publishes it.
    pub(super) fn is_spill(&self, file: FileId, staged: &Option<Copied>) -> bool {
        let tree = self.metadata.read_tree();
        let spill = tree.get(file).and_then(Inode::spill);
        staged.as_ref().zip(spill).is_some_and(|(copied, spill)| *spill == (copied.dir, copied.temporary.clone()))
    }

    /// The directory is removed. Temporaries of spilled files in it that are elsewhere by now move to another
    /// directory. Returns whether there were any. Nothing is staged meanwhile.
    ///
    /// (They keep both names until the catalog's disk has the new one.)
    pub(super) fn moves_spills_out(&self, gone: FileId) -> io::Result<bool> {
        let spilled: Vec<(FileId, Name, FileId, Cred)> = {
            let tree = self.metadata.read_tree();
            let is_spilled_there = |(id, inode): (FileId, &Inode)| {
                let (_, name) = inode.spill().filter(|(dir, _)| *dir == gone)?;
                let to = inode.logical.as_ref().map_or(FileId::ROOT, |(dir, _)| tree.nearest_applied(*dir));
                Some((id, name.clone(), to, inode.cred())).filter(|_| to != gone)
            };
            tree.iter().filter_map(is_spilled_there).collect()
        };
        let store = &self.base.store;
        for (id, name, to, owner) in &spilled {
            self.files.temporaries.expect_temporaries_in(*to);
            let paths = {
                let tree = self.metadata.read_tree();
                tree.applied_path(gone).zip(tree.applied_path(*to))
            };
            let Some((from, target)) = paths.map(|(from, to)| (from.join(name), to.join(name))) else { continue };
            self.attempts.as_owner(*owner, |who| match store.link(who, &from, &target) {
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                linked => linked,
            })?;
            {
                let mut tree = self.metadata.write_tree();
                if let Some(inode) = tree.get_mut(*id) {
                    inode.extra_mut().spill = Some((*to, name.clone()));
                    tree.txn.file(*id);
                }
                self.metadata.commit(&mut tree);
            }
            self.metadata.sync_catalog()?;
            self.attempts.as_owner(*owner, |who| store.unlink(who, &from))?;
        }
        Ok(!spilled.is_empty())
    }

    /// The file was in place already, with the attributes that it had when its copy was made.
    pub(super) fn found_published(
        &self,
        one: &Work<'_>,
        at: (FileId, &[u8]),
        there: (&StorePath, Cred),
        staged: &Option<Copied>,
    ) -> io::Result<Done> {
        let file = file_of(one.kind);
        let (_, mut meta) = self.owner_and_meta(file)?;
        if self.attempts.is_written_in_place(file)
            || self.is_spill(file, staged) && self.metadata.open_of(file).is_some()
        {
            meta.times = None;
        }
        let (path, owner) = there;
        let identity = self.attempts.as_owner(owner, |who| self.base.store.set_meta(who, path, Kind::File, &meta))?;
        if self.is_spill(file, staged)
            && let Some(open) = self.metadata.open_of(file)
        {
            let _gate = open.gate.write().unwrap_or_else(PoisonError::into_inner);
            self.goes_on_there(one, &open, there, identity);
        }
        Ok(self.published(one.kind, at, identity, staged))
    }

    /// A file that a program has open was published as it is: it is the store's own file now. The gate is closed.
    pub(super) fn goes_on_there(&self, one: &Work<'_>, open: &Open, there: (&StorePath, Cred), is: StoreIdentity) {
        let content = open.content();
        if content.location != Location::StoreTemporary {
            return;
        }
        let (path, owner) = there;
        let same = rustix::fs::fstat(&*content.file).map(|stat| stat.st_ino == is.ino);
        let file = match same {
            Ok(true) => Ok(content.file),
            // Its bytes were written into another file, which has further names.
            Ok(false) => {
                self.attempts.as_owner(owner, |who| self.base.store.open(who, path, content.writable)).map(Arc::new)
            }
            Err(why) => Err(why.into()),
        };
        match file {
            Ok(file) => open.replace(Content { file, location: Location::Store, ..content }),
            Err(why) => {
                let what = format!("published, but what is written to it from now on is lost: {why}");
                self.base.notes.note(one.run, path.to_string(), what, true);
            }
        }
    }
}
