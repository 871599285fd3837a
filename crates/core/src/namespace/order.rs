//! The order of a pool's publications, at one member.
//!
//! The drain publishes an operation when nothing earlier can come any more: of this member's queue, and of all others.
//! [`surgetank_state::Order`] has the places of files that programs may still write. [`Members`](crate::base::Members) knows how
//! far the others are.

use std::collections::BTreeSet;
use std::time::Duration;

use surgetank_state::{Cut, Tree, first_unpublished};
use surgetank_types::model::{FileId, Seq};
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::Base;
use crate::files::Files;
use crate::files::descriptor_grant::Descriptors;
use crate::metadata::Metadata;

/// What the pool asks and says about the order.
pub struct PoolOrder {
    base: Base,
    descriptors: Arc<Descriptors>,
    metadata: Arc<Metadata>,
    /// One cut at a time.
    cuts: Mutex<()>,
}

impl PoolOrder {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        let (descriptors, metadata) = (files.descriptors.clone(), files.metadata.clone());
        Self { base: base.clone(), descriptors, metadata, cuts: Mutex::default() }
    }

    /// A program of that member may write through the handle from now on.
    pub fn hold(&self, fh: u64, member: u32) {
        if self.base.config.ordered {
            let mut tree = self.metadata.write_tree();
            let tree = &mut *tree;
            tree.order.hold(&mut tree.next_seq, fh, member);
        }
    }

    /// Its last descriptor has ended: a version that `release` seals comes where the file was last known to be open.
    pub fn close(&self, fh: u64, id: FileId, release: impl FnOnce()) {
        let holds = self.metadata.write_tree().order.close(fh, id);
        release();
        // (Otherwise it is sealed when the last duplicate or mapping has ended.)
        if holds && !self.base.deferred.is_seal_deferred(id) {
            self.metadata.write_tree().order.closed(id);
        }
    }

    /// The moment up to which this member has everything in the store, for another member. Waits for closes that programs here
    /// have made, at most for `patience`; `None`: they take longer. Closes at other members are not awaited.
    /// `needed_nanos`: the other one has an operation of that moment. (0: it asks only for the closes.)
    pub fn is_published_until(&self, own: u32, needed_nanos: u64, patience: Duration) -> Option<u64> {
        self.metadata.write_tree().order.follow(needed_nanos);
        let _one = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        let cut = self.begin_cut();
        if !self.closes_are_done(patience) {
            return None;
        }
        self.end_cut(&cut, &|member| member == own);
        if !self.base.config.ordered {
            return Some(u64::MAX);
        }
        let tree = self.metadata.read_tree();
        let held = tree.order.first().map(|first| first.stamp_nanos);
        Some(match first_unpublished(&tree) {
            // (Others do not wait for what does not come.)
            Some((_, true)) => u64::MAX,
            first => [first.map(|(stamp, _)| stamp), held].into_iter().flatten().min().unwrap_or(cut.stamp_nanos),
        })
    }

    /// A cut over other members, too. `others`: from when it is, has them deliver the closes of their programs, and returns which
    /// may not have.
    pub fn cut(&self, patience: Duration, others: impl FnOnce(u64) -> Vec<u32>) {
        let cut = self.begin_cut();
        let missing = others(cut.stamp_nanos);
        // (After that: what they have delivered is closed by the pool's process here.)
        if self.closes_are_done(patience) {
            self.end_cut(&cut, &|member| !missing.contains(&member));
        }
        self.metadata.wake();
    }

    /// The members, besides this one, whose programs write files whose names are here.
    pub fn writers(&self, own: u32) -> BTreeSet<u32> {
        self.metadata.read_tree().order.others(own)
    }

    fn begin_cut(&self) -> Cut {
        let mut tree = self.metadata.write_tree();
        let tree = &mut *tree;
        tree.order.begin_cut(&mut tree.next_seq)
    }

    fn end_cut(&self, cut: &Cut, knows: &dyn Fn(u32) -> bool) {
        self.metadata.write_tree().order.end_cut(cut, knows, |id| self.base.deferred.is_seal_deferred(id));
    }

    fn closes_are_done(&self, patience: Duration) -> bool {
        let are_done = self.base.door.get().is_none_or(|door| door.closes_are_done(patience));
        if are_done {
            // Those of processes with the shim.
            self.descriptors.catch_up();
            self.descriptors.retry_unwatched();
        }
        are_done
    }
}

/// What the drain does with a batch.
pub(crate) enum Ordered {
    /// It publishes these, from the head of the batch.
    Publish(Vec<Seq>),
    /// Something may come before the first one that it may not publish.
    Await {
        /// The stamp of that one. (0: only this member's order counts.)
        needed_nanos: u64,
        /// A program waits in fsync for one of the queue: it waits for one cut at most, and needs the order of its own member only.
        /// So the operations up to this one go then.
        goes_then: Option<Seq>,
    },
}

/// How much of a batch may be published now. The batch comes from the queue under the same lock of the tree: a version that is
/// sealed after that has held its place until then. `goes`: as [`Ordered::Await`] has said.
pub(crate) fn in_order(base: &Base, tree: &Tree, mut batch: Vec<Seq>, goes: Option<Seq>) -> Ordered {
    let members = base.members.get().filter(|members| base.config.ordered && members.keep_order());
    let Some(members) = members else { return Ordered::Publish(batch) };
    let until_nanos = if base.config.pool_ordered { members.are_published_until() } else { u64::MAX };
    let held = tree.order.first();
    let stamp = |seq: &Seq| tree.order.stamp_of(*seq);
    let is_hurried = || tree.ops.values().any(|op| op.eager);
    let goes = goes.filter(|_| is_hurried());
    let is_first = |seq: &Seq| held.is_none_or(|first| *seq < first.seq) && stamp(seq) <= until_nanos;
    let comes = |seq: &Seq| Some(*seq) <= goes || is_first(seq);
    let Some(ready) = batch.iter().position(|seq| !comes(seq)) else { return Ordered::Publish(batch) };
    let goes_then = batch.last().copied().filter(|_| is_hurried());
    if ready == 0 || goes.is_none() && goes_then.is_some() {
        let needed_nanos = if base.config.pool_ordered { stamp(&batch[ready]) } else { 0 };
        return Ordered::Await { needed_nanos, goes_then };
    }
    batch.truncate(ready);
    Ordered::Publish(batch)
}

/// Waits for news of other members, or for a cut.
pub(crate) fn await_cut(base: &Base, needed_nanos: u64) {
    if let Some(members) = base.members.get() {
        members.await_cut(needed_nanos);
    }
}
