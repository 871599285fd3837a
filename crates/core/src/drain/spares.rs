//! Spare copies: of a file that a program syncs again and again, the store keeps the version before the published one under a
//! temporary's name. The next version is made of it, so that an fsync writes what changed and not the whole file.
//!
//! A spare is made by an exchange of names: the copy becomes the file, and the file becomes the spare. So each version is
//! published as a whole, as by a rename. The spares of closed files go when the queue is empty.
//!
//! Invariant: a spare has exactly the recorded blocks, and its identity is as after the exchange. Otherwise the drain copies the
//! whole file.
//!
//! The danger that this avoids: a version that is made of a file which another client changed.

use std::collections::HashMap;

use surgetank_state::{Name, Op, Tree};
use surgetank_store::{BlockSums, Cred};
use surgetank_types::model::{FileId, OpKind, Seq, StoreIdentity};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

/// (An empty file has no blocks.)
const BYTES_MIN: u64 = 1;
/// All blocks of a larger file would have to be read too long for each fsync. (Its checksums take 2 MiB.)
const BYTES_MAX: u64 = 1 << 30;
/// With more operations in the queue, a look at all of them for each fsync would cost more than a copy.
const OPERATIONS_MAX: usize = 256;
/// Each has a second copy in the store.
const FILES_MAX: usize = 64;

/// The version before the published one.
#[derive(Debug)]
pub(super) struct Spare {
    pub dir: FileId,
    pub temporary: Name,
    pub owner: Cred,
    pub identity: StoreIdentity,
    pub sums: BlockSums,
}

#[derive(Debug, Default)]
struct Synced {
    spare: Option<Spare>,
    /// What the store has under the file's name.
    published: Option<(StoreIdentity, BlockSums)>,
    /// The copy of this operation.
    staged: Option<(Seq, BlockSums)>,
    /// The bytes that were written for the copy of this operation.
    written_bytes: Option<(Seq, u64)>,
}

/// The spares of all files.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    files: Mutex<HashMap<FileId, Synced>>,
}

impl Spares {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Synced>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Should the next version of this file be made of a spare?
    pub(super) fn wants(&self, id: FileId, size_bytes: u64) -> bool {
        let files = self.files();
        (BYTES_MIN..=BYTES_MAX).contains(&size_bytes) && (files.len() < FILES_MAX || files.contains_key(&id))
    }

    pub(super) fn has(&self, id: FileId) -> bool {
        self.files().get(&id).is_some_and(|synced| synced.spare.is_some())
    }

    /// The spare of a file whose next copy is made in this directory. The caller owns it then.
    pub(super) fn take(&self, tree: &mut Tree, id: FileId, dir: FileId) -> Option<Spare> {
        let spare = self.files().get_mut(&id)?.spare.take()?;
        let goes = tree.discards.iter().any(|(at, name, _)| *at == spare.dir && *name == spare.temporary);
        if spare.dir == dir && !goes {
            return Some(spare);
        }
        if !goes {
            tree.discards.push((spare.dir, spare.temporary, spare.owner));
        }
        None
    }

    /// The blocks of the copy for an operation are known.
    pub(super) fn staged(&self, id: FileId, seq: Seq, sums: BlockSums, written_bytes: u64) {
        let mut files = self.files();
        let synced = files.entry(id).or_default();
        (synced.staged, synced.written_bytes) = (Some((seq, sums)), Some((seq, written_bytes)));
    }

    /// How many bytes were written for the operation's copy; `None`: the whole file.
    pub(super) fn written_bytes(&self, id: FileId, seq: Seq) -> Option<u64> {
        let written = self.files().get(&id).and_then(|synced| synced.written_bytes);
        written.filter(|(of, _)| *of == seq).map(|(_, bytes)| bytes)
    }

    pub(super) fn knows_published(&self, id: FileId) -> bool {
        self.files().get(&id).is_some_and(|synced| synced.published.is_some())
    }

    /// The store's present version has these blocks.
    pub(super) fn is_published(&self, id: FileId, identity: StoreIdentity, sums: Option<BlockSums>) {
        if let Some(synced) = self.files().get_mut(&id) {
            synced.published = sums.map(|sums| (identity, sums));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files().is_empty()
    }

    /// Are the blocks known of the operation's copy, and of the file that it replaces? Where the directory will be removed,
    /// nothing stays in it.
    pub(super) fn keeps(&self, tree: &Tree, id: FileId, seq: Seq, dir: FileId) -> bool {
        let goes = |op: &Op| matches!(&op.kind, OpKind::RemoveDir { file, .. } if *file == dir);
        if tree.ops.len() > OPERATIONS_MAX || tree.ops.values().any(|op| goes(op)) {
            return false;
        }
        self.files().get(&id).is_some_and(|synced| {
            synced.published.is_some() && synced.staged.as_ref().is_some_and(|(staged, _)| *staged == seq)
        })
    }

    /// The operation is carried out. `kept`: the place of the version before, its owner and its identity there. Returns a
    /// temporary that is not needed.
    pub(super) fn published(
        &self,
        id: FileId,
        seq: Seq,
        identity: StoreIdentity,
        kept: Option<(FileId, Name, Cred, StoreIdentity)>,
    ) -> Option<(FileId, Name, Cred)> {
        let mut files = self.files();
        let Some(synced) = files.get_mut(&id) else {
            return kept.map(|(dir, name, owner, _)| (dir, name, owner));
        };
        let staged = synced.staged.take().filter(|(staged, _)| *staged == seq);
        let before = std::mem::replace(&mut synced.published, staged.map(|(_, sums)| (identity, sums)));
        let (dir, temporary, owner, identity) = kept?;
        match before.filter(|(before, _)| is_same_version(before, &identity)) {
            Some((_, sums)) => {
                let spare = Spare { dir, temporary, owner, identity, sums };
                synced.spare.replace(spare).map(|old| (old.dir, old.temporary, old.owner))
            }
            None => Some((dir, temporary, owner)),
        }
    }

    /// Spares in a directory that is removed go with it.
    pub(super) fn forget_in(&self, dir: FileId) {
        for synced in self.files().values_mut() {
            synced.spare.take_if(|spare| spare.dir == dir);
        }
    }

    /// Gives up the spares of files that no program writes any more. `all`: of every file.
    pub(super) fn give_up(&self, tree: &mut Tree, all: bool) {
        let mut files = self.files();
        if files.is_empty() {
            return;
        }
        files.retain(|id, synced| {
            let stays = !all && tree.get(*id).is_some_and(|inode| !inode.sealed && inode.logical.is_some());
            if !stays && let Some(spare) = synced.spare.take() {
                tree.discards.push((spare.dir, spare.temporary, spare.owner));
            }
            stays
        });
    }
}

/// (A rename changes the ctime.)
fn is_same_version(a: &StoreIdentity, b: &StoreIdentity) -> bool {
    StoreIdentity { ctime_nanos: b.ctime_nanos, ..*a } == *b
}
