//! The lock around the tree: [`Metadata::read_tree`] to look, [`Metadata::write_tree`] to change.
//!
//! Both first take in the files that processes made in delegated directories, so that every holder of the tree sees
//! them. A [`WriteTree`] commits every change that the tree has noted ([`Txn`](surgetank_state::Txn)) before it
//! unlocks.
//!
//! Invariant: the catalog's order is the tree's order. The danger that this avoids: a path out of a function that
//! leaves a change uncommitted.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use surgetank_state::{PlainId, Tree, Txn};
use surgetank_types::model::{Change, FileId, Mark, OpKind, Prepared, RunId, Seq};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{MutexGuard, PoisonError};

use crate::metadata::Metadata;
use crate::metadata::pending_unlink::mark_of;

/// The locked tree, for looking only.
pub(crate) struct ReadTree<'a>(MutexGuard<'a, Tree>);

impl Deref for ReadTree<'_> {
    type Target = Tree;
    fn deref(&self) -> &Tree {
        &self.0
    }
}

/// The locked tree, for changes; commits them when it is dropped.
pub(crate) struct WriteTree<'a> {
    tree: MutexGuard<'a, Tree>,
    metadata: &'a Metadata,
}

impl Deref for WriteTree<'_> {
    type Target = Tree;
    fn deref(&self) -> &Tree {
        &self.tree
    }
}

impl DerefMut for WriteTree<'_> {
    fn deref_mut(&mut self) -> &mut Tree {
        &mut self.tree
    }
}

impl Drop for WriteTree<'_> {
    fn drop(&mut self) {
        // After a panic the catalog does not have the tree's present state: recovery starts from the last commit. The next thread must
        // not commit half of a change.
        if std::thread::panicking() {
            self.tree.txn = Txn::default();
        } else {
            self.metadata.commit(&mut self.tree);
        }
    }
}

impl Metadata {
    pub(crate) fn read_tree(&self) -> ReadTree<'_> {
        ReadTree(self.settled_tree())
    }

    pub(crate) fn write_tree(&self) -> WriteTree<'_> {
        WriteTree { tree: self.settled_tree(), metadata: self }
    }

    fn settled_tree(&self) -> MutexGuard<'_, Tree> {
        let mut tree = self.tree.lock().unwrap_or_else(PoisonError::into_inner);
        if self.delegated.load(Ordering::SeqCst) > 0 {
            self.settle_in(&mut tree);
        }
        tree
    }

    /// Releases the tree until the queue or the state of a file changes, for `at_most`.
    pub(crate) fn wait_changed<'a>(&self, tree: ReadTree<'a>, at_most: Duration) -> ReadTree<'a> {
        ReadTree(self.changed.wait_timeout(tree.0, at_most).unwrap_or_else(PoisonError::into_inner).0)
    }

    pub(crate) fn queue(&self, tree: &mut Tree, kind: OpKind, run: RunId, last: bool, delay_factor: u32) -> Seq {
        // A file that is sealed after the final drain began needs its operation at once: no later drain would take it.
        let ending = self.runs.is_ending(run) || self.end.is_hurried();
        let last = last && !ending;
        if !last {
            tree.undefer(&kind);
        }
        let due =
            surgetank_types::clock::tick() + if ending { Duration::ZERO } else { self.config.quiet * delay_factor };
        let seq = queue_in_place(tree, kind, run, due, last);
        tree.txn.op(seq);
        seq
    }

    /// Forgets a file that nothing refers to any more.
    pub(crate) fn reap(&self, tree: &mut Tree, id: FileId) {
        // (What programs have of an earlier agent is not counted yet.)
        if tree.unreferenced(id) && !self.opens().contains_key(&id) && !self.succession.is_yet_to_restore() {
            let owned = tree.remove(id).is_some_and(|inode| inode.owned);
            if owned {
                tree.txn.dropped(id);
            }
        }
    }

    /// A completed operation leaves the queue. `copied`: what a file's publication brought to the store.
    pub(crate) fn retire(&self, tree: &mut Tree, seq: Seq, copied: Option<&Prepared>, removed: &[FileId]) {
        let Some((id, again)) = tree.drain_queue().complete(seq, copied) else {
            return;
        };
        if again {
            self.queue_publish(tree, id);
        }
        tree.links_changed += u64::from(removed.iter().any(|id| tree.is_hard_linked(*id)));
        self.reap(tree, id);
        for id in removed {
            tree.txn.file(*id);
            self.reap(tree, *id);
        }
    }

    /// Commits the changes of `act` as a batch of its own. Earlier changes by the holder of the tree stay for its own commit.
    pub(crate) fn commit_apart<T>(&self, tree: &mut Tree, act: impl FnOnce(&mut Tree) -> T) -> T {
        let outer = std::mem::take(&mut tree.txn);
        let done = act(tree);
        self.commit(tree);
        tree.txn = outer;
        done
    }

    /// Commits the present values of everything that changed. A catalog that cannot be written does not stop programs.
    /// The changes are kept, the next commit tries them again, and a note reports the error.
    pub(crate) fn commit(&self, tree: &mut Tree) {
        if tree.txn.is_empty() {
            return;
        }
        let mut txn = std::mem::take(&mut tree.txn);
        let tree = &*tree;
        txn.sort();
        let mut changes = txn.changes(tree);
        self.show_all(tree, &txn.files, &txn.entries);
        for id in &txn.dropped {
            self.show(tree, *id);
        }
        changes.extend(txn.pending_unlinks.iter().filter_map(|plain| self.pending_unlink(tree, *plain)));
        self.succession.hand_off_names(tree, &txn.entries, &txn.dropped);
        if changes.is_empty() {
            return;
        }
        changes.extend(txn.carried_out.and_then(|id| self.succession.request_done(id)).into_iter().flatten());
        let mut uncommitted = self.uncommitted.lock().unwrap_or_else(PoisonError::into_inner);
        let result = if uncommitted.is_empty() {
            self.catalog.commit(&changes)
        } else {
            uncommitted.append(&mut changes);
            self.catalog.commit(&uncommitted)
        };
        match result {
            Ok(_) => uncommitted.clear(),
            Err(why) => {
                if uncommitted.is_empty() {
                    self.notes.note(
                        RunId(0),
                        self.config.state.display().to_string(),
                        format!("the catalog cannot be written: {why}; changes are held in memory and would be lost with the agent"),
                        false,
                    );
                }
                uncommitted.append(&mut changes);
            }
        }
    }

    /// After this, everything that was committed so far survives the machine. Errors: also when a change could not be
    /// committed, because it would be promised and lost.
    pub(crate) fn sync_catalog(&self) -> std::io::Result<()> {
        {
            let mut uncommitted = self.uncommitted.lock().unwrap_or_else(PoisonError::into_inner);
            if !uncommitted.is_empty() {
                self.catalog.commit(&uncommitted)?;
                uncommitted.clear();
            }
        }
        self.catalog.sync(self.catalog.position())
    }
}

impl Metadata {
    /// The catalog's record of a plain file that is about to be removed. `None` if it could not be distinguished from a
    /// later file: then a leftover is kept.
    pub(crate) fn pending_unlink(&self, tree: &Tree, plain: PlainId) -> Option<Change> {
        // Each removal under way has a thread: 256 slots are more than all of them.
        let slot = self.pending_unlink_next.fetch_add(1, Ordering::Relaxed);
        Some(Change::PutMark(Mark::PendingUnlink(slot), mark_of(tree, plain)?))
    }
}

/// A publication comes where its file was last known to be open, if nothing is in the way. All else comes last.
fn queue_in_place(tree: &mut Tree, kind: OpKind, run: RunId, due: std::time::Instant, last: bool) -> Seq {
    let position = match &kind {
        OpKind::Publish { file, .. } if !last => tree.order.position_of(*file),
        _ => None,
    };
    let Some(position) = position.filter(|position| {
        !tree.ops.contains_key(&position.seq) && surgetank_state::may_precede(tree, &kind, position.seq)
    }) else {
        return tree.queue(kind, run, due, last);
    };
    let op = surgetank_state::Op::new(kind, run, due, last);
    tree.order.queue_at(position);
    let (seq, file) = (position.seq, op.file());
    tree.enqueue(seq, op);
    tree.order.sealed(file);
    seq
}
