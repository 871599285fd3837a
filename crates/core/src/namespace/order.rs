//! The order of a pool's publications, at one member.
//!
//! The drain publishes an operation when nothing earlier can come any more: of this member's queue, and of all others.
//! [`surgetank_state::Order`] has the places of files that programs may still write. [`Members`](crate::base::Members) knows how
//! far the others are.

use std::collections::BTreeSet;
use std::time::Duration;

use surgetank_state::{Cut, first_unpublished};
use surgetank_types::model::{FileId, Seq};
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::Base;
use crate::metadata::Metadata;

/// What the pool asks and says about the order.
pub struct PoolOrder {
    base: Base,
    metadata: Arc<Metadata>,
    /// One cut at a time.
    cuts: Mutex<()>,
}

impl PoolOrder {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self { base: base.clone(), metadata: metadata.clone(), cuts: Mutex::default() }
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
        self.base.door.get().is_none_or(|door| door.closes_are_done(patience))
    }
}

/// The operations at the head of a batch that may be published now. Without any, returns when there are news of other members.
///
/// A program that waits in fsync for one of the queue waits for one cut at most: it needs the order of its own member only.
pub(crate) fn in_order(base: &Base, metadata: &Metadata, mut batch: Vec<Seq>) -> Vec<Seq> {
    let members = base.members.get().filter(|members| base.config.ordered && members.keep_order());
    let Some(members) = members else { return batch };
    let (ready, needed_nanos, is_awaited) = ready(base, metadata, &batch, members.are_published_until());
    if ready < batch.len() && is_awaited {
        members.await_cut(needed_nanos);
        return batch;
    }
    if ready == 0 {
        members.await_cut(needed_nanos);
    }
    // (Something may come before these since the cut: the drain looks at the queue again.)
    batch.truncate(ready);
    batch
}

/// How many at the head of the batch may be published, the stamp of the first one that may not, and whether a program waits for an
/// operation of the queue.
fn ready(base: &Base, metadata: &Metadata, batch: &[Seq], until_nanos: u64) -> (usize, u64, bool) {
    let until_nanos = if base.config.pool_ordered { until_nanos } else { u64::MAX };
    let tree = metadata.read_tree();
    let held = tree.order.first();
    let stamp = |seq: &Seq| tree.order.stamp_of(*seq);
    let comes = |seq: &Seq| held.is_none_or(|first| *seq < first.seq) && stamp(seq) <= until_nanos;
    match batch.iter().position(|seq| !comes(seq)) {
        None => (batch.len(), 0, false),
        Some(ready) => {
            let needed_nanos = if base.config.pool_ordered { stamp(&batch[ready]) } else { 0 };
            (ready, needed_nanos, tree.ops.values().any(|op| op.eager))
        }
    }
}
