//! The order of a pool's publications, at one member.
//!
//! The drain publishes an operation when nothing earlier can come any more: of this member's queue, and of all others.
//! [`surgetank_state::Order`] has the places of files that programs may still write. [`Members`](crate::base::Members) knows how
//! far the others are.

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
            self.metadata.write_tree().order.closed(fh, id);
        }
    }

    /// Has this member told others, or will, up to which moment everything of its own is in the store? It waits for closes that
    /// programs here have made, at most for `patience`; `None`: they take longer. Closes at other members are not awaited.
    pub fn is_published_until(&self, own: u32, patience: Duration) -> Option<u64> {
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

    /// A cut over other members, too: `others` has them deliver the closes of their programs, and says who did.
    pub fn cut(&self, own: u32, patience: Duration, others: impl FnOnce() -> Vec<u32>) {
        let cut = self.begin_cut();
        let here = self.closes_are_done(patience);
        let delivered = others();
        self.end_cut(&cut, &|member| if member == own { here } else { delivered.contains(&member) });
        self.metadata.wake();
    }

    /// Do programs of other members write files whose names are here?
    pub fn has_others(&self, own: u32) -> bool {
        self.metadata.read_tree().order.has_others(own)
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

/// The operations at the head of a batch that may be published now. (A program waits in fsync for some: they keep only the order
/// of their own member.) Without any, returns when there are news of other members.
pub(crate) fn in_order(base: &Base, metadata: &Metadata, mut batch: Vec<Seq>) -> Vec<Seq> {
    let Some(members) = base.members.get().filter(|_| base.config.ordered) else { return batch };
    let until = if base.config.pool_ordered { members.are_published_until() } else { u64::MAX };
    let ready = {
        let tree = metadata.read_tree();
        let held = tree.order.first();
        let comes = |seq: &Seq| {
            held.is_none_or(|first| *seq < first.seq) && tree.ops.get(seq).is_none_or(|op| op.stamp_nanos <= until)
        };
        let awaited = batch.iter().rposition(|seq| tree.ops.get(seq).is_some_and(|op| op.eager));
        let ready = batch.iter().position(|seq| !comes(seq)).unwrap_or(batch.len());
        ready.max(awaited.map_or(0, |at| at + 1))
    };
    batch.truncate(ready);
    if ready == 0 {
        members.await_cut();
    }
    batch
}
