//! Places in the queue for files that programs may still write.
//!
//! In a pool a close is learnt of late: the program may be on another node. What was queued meanwhile must not be published
//! before the closed file. So a handle that writes holds a place in the queue, and nothing behind it is published. A *cut* moves
//! the places of files that are still open to the moment at which the cut began.
//!
//! Invariants:
//! - In the order of the queue, stamps do not fall. (Operations that an earlier agent queued have none: 0.)
//! - A place's stamp is a moment at which its file was open.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::model::{FileId, OpKind, Seq};

use crate::{Tree, files_of, places};

/// So many operations are compared with one that is to be put before them. (Behind more of them, it comes last.)
const COMPARED_MAX: usize = 10_000;

/// A place in the queue, and the moment that it stands for (Unix, by this node's clock).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The place.
    pub seq: Seq,
    /// The moment.
    pub stamp_nanos: u64,
}

/// The kernel lets go of a closed file within this time. What can be written later is mapped, or has a duplicate.
const LET_GO: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
struct Held {
    position: Position,
    /// The member whose program writes.
    member: u32,
}

/// A handle that was closed, and whose file has not been sealed yet.
#[derive(Debug, Clone, Copy)]
struct Closing {
    handles: usize,
    /// The earliest one.
    position: Position,
    since: Instant,
}

/// A cut that has begun: new positions for the handles that hold one, and for files that were closed.
#[derive(Debug)]
pub struct Cut {
    /// When it began.
    pub stamp_nanos: u64,
    moves: Vec<(u64, Seq, Seq)>,
    closing: Vec<(FileId, Seq, Seq)>,
}

/// The places of all handles that write.
#[derive(Debug, Default)]
pub struct Order {
    held: HashMap<u64, Held>,
    /// Of handles that are being closed, by file.
    closing: HashMap<FileId, Closing>,
    places: BTreeMap<Seq, u64>,
    /// Of queued operations.
    stamps: HashMap<Seq, u64>,
    /// The agent is in a pool.
    is_kept: bool,
    last_stamp_nanos: u64,
}

impl Order {
    /// The agent is in a pool: operations have stamps from now on.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }

    pub(crate) fn queue(&mut self, seq: Seq) {
        if self.is_kept {
            let stamp_nanos = self.stamp_nanos();
            self.stamps.insert(seq, stamp_nanos);
        }
    }

    pub(crate) fn dequeue(&mut self, seq: Seq) {
        self.stamps.remove(&seq);
    }

    /// An operation is queued at this position.
    pub fn queue_at(&mut self, position: Position) {
        self.stamps.insert(position.seq, position.stamp_nanos);
    }

    /// The stamp of a queued operation. 0: an earlier agent queued it.
    pub fn stamp_of(&self, seq: Seq) -> u64 {
        self.stamps.get(&seq).copied().unwrap_or(0)
    }

    /// The stamp of an operation that is queued now.
    pub fn stamp_nanos(&mut self) -> u64 {
        let now = u64::try_from(clock::now().nanos).unwrap_or(0);
        self.last_stamp_nanos = self.last_stamp_nanos.max(now);
        self.last_stamp_nanos
    }

    /// Another member has this stamp: later ones here come no sooner.
    pub fn follow(&mut self, stamp_nanos: u64) {
        self.last_stamp_nanos = self.last_stamp_nanos.max(stamp_nanos);
    }

    /// A program of that member may write through the handle from now on.
    pub fn hold(&mut self, next_seq: &mut u64, fh: u64, member: u32) {
        let place = Position { seq: Seq::new(*next_seq), stamp_nanos: self.stamp_nanos() };
        *next_seq += 1;
        self.places.insert(place.seq, place.stamp_nanos);
        if let Some(before) = self.held.insert(fh, Held { position: place, member }) {
            self.places.remove(&before.position.seq);
        }
    }

    /// The handle is being closed: a version that is sealed now has its place. `false`: it holds none.
    pub fn close(&mut self, fh: u64, id: FileId) -> bool {
        let Some(held) = self.held.remove(&fh) else { return false };
        let mut closing = Closing { handles: 1, position: held.position, since: clock::tick() };
        if let Some(before) = self.closing.remove(&id) {
            closing.handles += before.handles;
            let (first, second) = (before.position, held.position);
            let (kept, dropped) = if first.seq < second.seq { (first, second) } else { (second, first) };
            closing.position = kept;
            self.places.remove(&dropped.seq);
        }
        self.closing.insert(id, closing);
        true
    }

    /// It is closed, and no version of the file will be sealed by that.
    pub fn closed(&mut self, id: FileId) {
        let Some(closing) = self.closing.get_mut(&id) else { return };
        closing.handles -= 1;
        if closing.handles == 0 {
            self.sealed(id);
        }
    }

    /// Its version has a place in the queue, or needs none.
    pub fn sealed(&mut self, id: FileId) {
        if let Some(Closing { position, .. }) = self.closing.remove(&id) {
            self.places.remove(&position.seq);
        }
    }

    /// The place of a version of the file that is sealed now.
    pub fn position_of(&self, id: FileId) -> Option<Position> {
        self.closing.get(&id).map(|closing| closing.position)
    }

    /// The first place that is held: nothing behind it may be published.
    pub fn first(&self) -> Option<Position> {
        self.places.first_key_value().map(|(seq, stamp_nanos)| Position { seq: *seq, stamp_nanos: *stamp_nanos })
    }

    /// The members, besides this one, whose programs hold places.
    pub fn others(&self, own: u32) -> BTreeSet<u32> {
        self.held.values().map(|held| held.member).filter(|member| *member != own).collect()
    }

    /// From here on closes are awaited.
    pub fn begin_cut(&mut self, next_seq: &mut u64) -> Cut {
        let stamp_nanos = self.stamp_nanos();
        // (In the order that they have.)
        let mut held: Vec<(u64, Seq)> = self.held.iter().map(|(fh, held)| (*fh, held.position.seq)).collect();
        held.sort_unstable_by_key(|(_, seq)| *seq);
        let mut moves = Vec::with_capacity(held.len());
        for (fh, seq) in held {
            moves.push((fh, seq, Seq::new(*next_seq)));
            *next_seq += 1;
        }
        let mut closing = Vec::new();
        for (id, one) in self.closing.iter().filter(|(_, one)| one.since.elapsed() > LET_GO) {
            closing.push((*id, one.position.seq, Seq::new(*next_seq)));
            *next_seq += 1;
        }
        Cut { stamp_nanos, moves, closing }
    }

    /// All closes by programs of these members from before the cut are known. `can_be_written`: a closed file, by a mapping or a
    /// duplicate.
    pub fn end_cut(&mut self, cut: &Cut, knows: impl Fn(u32) -> bool, can_be_written: impl Fn(FileId) -> bool) {
        for (id, from, to) in &cut.closing {
            let Some(one) = self.closing.get_mut(id).filter(|one| one.position.seq == *from) else { continue };
            self.places.remove(from);
            if can_be_written(*id) {
                one.position = Position { seq: *to, stamp_nanos: cut.stamp_nanos };
                self.places.insert(*to, cut.stamp_nanos);
            } else {
                self.closing.remove(id);
            }
        }
        for (fh, from, to) in &cut.moves {
            let Some(held) = self.held.get_mut(fh).filter(|held| held.position.seq == *from && knows(held.member))
            else {
                continue;
            };
            self.places.remove(from);
            held.position = Position { seq: *to, stamp_nanos: cut.stamp_nanos };
            self.places.insert(*to, cut.stamp_nanos);
        }
    }
}

/// May a publication be put at this place, before operations that were queued since? Not if one of them concerns its names or
/// its directories.
pub fn may_precede(tree: &Tree, kind: &OpKind, from: Seq) -> bool {
    let OpKind::Publish { file, dir, name, over } = kind else { return false };
    let mut near = vec![*file];
    near.extend(*over);
    let mut at = *dir;
    loop {
        near.push(at);
        match tree.get(at).and_then(|inode| inode.logical.as_ref()) {
            Some((parent, _)) if at != FileId::ROOT => at = *parent,
            _ => break,
        }
    }
    let since = tree.ops.range(from..).take(COMPARED_MAX + 1);
    let mut compared = 0;
    for (_, op) in since {
        compared += 1;
        let concerns = match &op.kind {
            OpKind::SetMeta { file: of } => of == file,
            other => {
                files_of(other).any(|of| near.contains(&of))
                    || places(other).iter().any(|(in_dir, named)| in_dir == dir && **named == **name)
            }
        };
        if concerns || compared > COMPARED_MAX {
            return false;
        }
    }
    true
}

/// The stamp of the first operation that is not published, and whether the store refuses it. (What waits for the end of a run
/// holds up nothing.)
pub fn first_unpublished(tree: &Tree) -> Option<(u64, bool)> {
    let seq = *tree.before_the_end.first()?;
    Some((tree.order.stamp_of(seq), tree.ops.get(&seq)?.failures > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_moves_what_is_still_open_behind_what_was_queued_before() {
        let (mut order, mut next) = (Order::default(), 1);
        order.hold(&mut next, 7, 1);
        order.hold(&mut next, 8, 2);
        let queued = next;
        next += 1;
        let cut = order.begin_cut(&mut next);
        let later = next;
        assert!(order.close(7, FileId(70)));
        assert_eq!(order.position_of(FileId(70)).unwrap().seq, Seq::new(1));
        order.end_cut(&cut, |member| member == 2, |_| false);
        // The closed one keeps its place until it is sealed, and the other one is between both operations.
        assert_eq!(order.first().unwrap().seq, Seq::new(1));
        order.closed(FileId(70));
        let first = order.first().unwrap();
        assert!(first.seq > Seq::new(queued) && first.seq < Seq::new(later));
        assert_eq!(first.stamp_nanos, cut.stamp_nanos);
        assert_eq!(order.others(1), BTreeSet::from([2]));
        assert_eq!(order.others(2), BTreeSet::new());
    }

    #[test]
    fn two_handles_that_close_at_once_keep_the_earlier_place() {
        let (mut order, mut next) = (Order::default(), 1);
        order.hold(&mut next, 7, 1);
        order.hold(&mut next, 8, 1);
        assert!(order.close(8, FileId(70)) && order.close(7, FileId(70)));
        order.closed(FileId(70));
        assert_eq!(order.position_of(FileId(70)).unwrap().seq, Seq::new(1));
        order.closed(FileId(70));
        assert!(order.position_of(FileId(70)).is_none() && order.first().is_none());
    }

    #[test]
    fn handle_of_a_member_that_did_not_answer_keeps_its_place() {
        let (mut order, mut next) = (Order::default(), 1);
        order.hold(&mut next, 7, 3);
        let cut = order.begin_cut(&mut next);
        order.end_cut(&cut, |member| member != 3, |_| false);
        assert_eq!(order.first().unwrap().seq, Seq::new(1));
        assert!(!order.close(9, FileId(90)));
        assert!(order.position_of(FileId(90)).is_none());
    }
}
