//! Where in the store temporaries of ours may lie. The catalog knows it before the first is made in a directory, so that
//! what a killed agent left is found and removed by the next one.

use std::io;

use foldhash::HashSet;

use crate::model::{FileId, Image, STORE_TEMPORARY_PREFIX};

use super::Namespace;
use super::journal::Txn;
use super::resolve::is_absent;
use super::tree::{Inode, Name, Tree};
use crate::store::{Cred, StorePath};

const COUNTER: &str = "temporaries-in-";

pub(super) fn remembered(image: &Image) -> HashSet<FileId> {
    let directory = |name: &str| name.strip_prefix(COUNTER)?.parse().ok().map(FileId);
    image.counters.iter().filter(|(_, there)| **there > 0).filter_map(|(name, _)| directory(name)).collect()
}

impl Tree {
    /// Where they may lie, as the store is now.
    pub fn dirs_of_temporaries(&self) -> Vec<(FileId, StorePath)> {
        self.temporaries.iter().filter_map(|dir| Some((*dir, self.applied_path(*dir)?))).collect()
    }
}

impl Namespace {
    /// A temporary is about to be made in this directory.
    pub(crate) fn expect_temporaries_in(&self, dir: FileId) {
        let mut tree = self.tree();
        if tree.temporaries.contains(&dir) {
            return;
        }
        let mut txn = Txn::default();
        self.own(&mut tree, &mut txn, dir);
        txn.counter(format!("{COUNTER}{}", dir.0), 1);
        self.commit(&tree, txn);
        drop(tree);
        // The store goes on when the machine does not.
        if let Err(why) = self.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss a temporary may be left in the store");
        }
        self.tree().temporaries.insert(dir);
    }

    /// When nothing is under way, there are none.
    pub(crate) fn forget_temporaries(&self) {
        let mut tree = self.tree();
        let none =
            tree.ops.is_empty() && tree.staging.is_empty() && tree.discards.is_empty() && self.opens().is_empty();
        if !none || tree.temporaries.is_empty() {
            return;
        }
        let mut txn = Txn::default();
        for dir in std::mem::take(&mut tree.temporaries) {
            txn.counter(format!("{COUNTER}{}", dir.0), 0);
        }
        self.commit(&tree, txn);
    }

    /// What files are spilled to now.
    pub(super) fn spill_names(&self) -> HashSet<Name> {
        self.tree().iter().filter_map(|(_, inode)| inode.spill().map(|place| place.1.clone())).collect()
    }

    /// Nothing is put into the directory any more: copies in it are those of an agent that was killed, and had not yet been
    /// told that the directory is there. Returns whether there were any; an error: that is not known, or they are there yet.
    pub(crate) fn discard_left_in(&self, who: Cred, dir: &StorePath) -> io::Result<bool> {
        let spills = self.spill_names();
        let left = match self.store.list(who, dir, true) {
            Err(why) if is_absent(&why) => return Ok(false),
            listed => listed?,
        };
        let mut left = left.iter().filter(|entry| self.is_left_over(&entry.name, &spills)).peekable();
        let any = left.peek().is_some();
        left.try_for_each(|entry| self.discard_left(who, dir, &entry.name))?;
        Ok(any)
    }

    /// Removes what an earlier agent left half made. What a file was spilled to stays.
    pub(super) fn discard_leftovers(&self) {
        let (dirs, who) = {
            let tree = self.tree();
            let who = tree.get(FileId::ROOT).map(Inode::cred).unwrap_or(crate::store::Cred { uid: 0, gid: 0 });
            (tree.dirs_of_temporaries(), self.own_cred(who))
        };
        let spills = self.spill_names();
        for (_, dir) in dirs {
            for entry in self.store.list(who, &dir, true).unwrap_or_default() {
                if self.is_left_over(&entry.name, &spills)
                    && let Err(why) = self.discard_left(who, &dir, &entry.name)
                {
                    tracing::warn!(%why, %dir, "what is left of an earlier agent's copies stays in the store for now");
                }
            }
        }
    }

    fn is_left_over(&self, name: &[u8], spills: &HashSet<Name>) -> bool {
        let ours =
            name.strip_prefix(STORE_TEMPORARY_PREFIX).is_some_and(|rest| rest.starts_with(self.key().as_bytes()));
        ours && !spills.contains(name)
    }

    /// Of a damaged catalog it may be all there is of a file.
    fn discard_left(&self, who: Cred, dir: &StorePath, name: &[u8]) -> io::Result<()> {
        if self.is_doubtful_spill(name) {
            self.keep_spill(who, dir, name)
        } else {
            self.store.discard(who, &dir.join(name))
        }
    }
}
