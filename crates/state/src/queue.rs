//! The queue of operations on their way to the store: how operations are added, taken back, and hastened.
//!
//! Invariants:
//! - An operation that was begun for good (`certain`) is never taken back.
//! - No operation that is due soon waits for an operation of the final drain (`last`).

use surgetank_types::clock;
use surgetank_types::model::{FileId, Hinted, OpKind, Seq};

use crate::{Copied, Inode, Name, Progress, Tree, file_of, files_of, places};

impl Tree {
    /// Makes a file the agent's own: it and its ancestors are in the catalog from now on.
    pub fn own(&mut self, id: FileId) {
        self.txn.file(id);
        let mut at = id;
        while let Some(inode) = self.get_mut(at) {
            if at != id && inode.owned {
                break;
            }
            let already = std::mem::replace(&mut inode.owned, true);
            let (place, is_hinted) = (inode.logical.clone(), inode.hint_history().is_some());
            let more = inode.extra.as_ref().map(|extra| extra.more_names.clone()).unwrap_or_default();
            self.txn.file(at);
            let Some((parent, name)) = place else {
                break;
            };
            if !already {
                if is_hinted {
                    self.txn.hints(Hinted::File(at));
                }
                self.txn.entry(parent, &name);
                for (dir, name) in more {
                    self.txn.entry(dir, &name);
                    self.own(dir);
                }
            }
            at = parent;
        }
    }

    /// The operation no longer waits for the final drain. `false`: it did not, or is not queued.
    pub fn hasten(&mut self, seq: Seq) -> bool {
        let Some(op) = self.ops.get_mut(&seq).filter(|op| op.last) else { return false };
        op.last = false;
        self.for_the_end.remove(seq, op);
        self.before_the_end.insert(seq);
        true
    }

    /// An operation that is drained soon must not wait for a directory that belongs to the final drain.
    pub fn hasten_dirs(&mut self, dir: FileId, last: bool) {
        let mut at = dir;
        while !last && at != FileId::ROOT {
            let Some(inode) = self.get(at) else { return };
            if inode.applied.is_some() {
                return;
            }
            let parent = inode.logical.as_ref().map(|place| place.0);
            if let Some(seq) = inode.publish
                && self.hasten(seq)
            {
                self.txn.op(seq);
            }
            match parent {
                Some(parent) => at = parent,
                None => return,
            }
        }
    }

    /// The drain takes the operation and all before it at once, whatever their quiet period.
    pub fn hurry(&mut self, upto: Option<Seq>) {
        let Some(upto) = upto else { return };
        let now = clock::tick();
        let is_hastened = self.hasten(upto);
        let mut dirs = Vec::new();
        if let Some(op) = self.ops.get_mut(&upto) {
            op.eager = true;
            dirs.extend(places(&op.kind).into_iter().map(|place| place.0));
        }
        // Its directory must come first.
        for dir in dirs {
            self.hasten_dirs(dir, false);
        }
        for (_, op) in self.ops.range_mut(..=upto) {
            op.due = op.due.min(now);
        }
        if is_hastened {
            self.txn.op(upto);
        }
    }

    /// What an operation builds on must not wait for the final drain while the operation itself is carried out earlier.
    pub fn undefer(&mut self, kind: &OpKind) {
        let file = file_of(kind);
        let names = places(kind);
        // The removal of a directory removes its content: all operations queued below it come first.
        let goes = match kind {
            OpKind::RemoveDir { file, .. } => Some(*file),
            OpKind::Publish { over, .. } | OpKind::Rename { over, .. } => *over,
            _ => None,
        };
        let mut files = vec![file];
        files.extend(goes.filter(|id| *id != file));
        let mut dirs = files.clone();
        let of_files = files.iter().filter_map(|id| self.get(*id)).any(|inode| {
            inode.publish.is_some() || inode.set_meta.is_some() || inode.dir.as_ref().is_some_and(|dir| dir.queued > 0)
        });
        let of_names = names.iter().any(|(dir, name)| self.entry(*dir, name).is_some_and(|entry| entry.pins > 0));
        if !of_files && !of_names {
            return;
        }
        loop {
            let needed = self.for_the_end.about(&files, &dirs, &names);
            for seq in &needed {
                self.hasten(*seq);
                self.txn.op(*seq);
                let Some(op) = self.ops.get(seq) else { continue };
                let (file, above) = (op.file(), places(&op.kind));
                // A link builds on its file's publication.
                if !files.contains(&file) {
                    files.push(file);
                }
                if goes.is_some() && !dirs.contains(&file) {
                    dirs.push(file);
                }
                for (dir, _) in above {
                    self.hasten_dirs(dir, false);
                }
            }
            if needed.is_empty() {
                return;
            }
        }
    }

    /// Takes an operation back, with its staged copy; `false` if it is being carried out.
    pub fn cancel(&mut self, seq: Seq) -> bool {
        if self.ops.get(&seq).is_some_and(|op| op.progress == Progress::Committing) {
            return false;
        }
        let Some((op, places)) = self.dequeue(seq) else {
            return true;
        };
        self.discard_staged(op.file(), op.progress);
        self.txn.op(seq);
        for (dir, name) in places {
            self.txn.entry(dir, &name);
        }
        // Carried out, and perhaps not durable: from here on the catalog says what the store has. Otherwise the next
        // agent would take it for another client's.
        if op.doubtful {
            if let (OpKind::Publish { file, .. }, Some(prepared)) = (&op.kind, op.prepared) {
                self.doubts.insert(*file, prepared);
            }
            let in_doubt = |tree: &Tree, id| {
                tree.ops.values().any(|op| op.doubtful && files_of(&op.kind).any(|other| other == id))
            };
            for id in files_of(&op.kind).filter(|id| !in_doubt(self, *id)).collect::<Vec<_>>() {
                self.before.remove(&id);
                self.txn.file(id);
            }
        }
        true
    }

    /// Discards the staged copy, to be made again in order.
    pub fn unstage(&mut self, seq: Seq) {
        if let Some(op) = self.ops.get_mut(&seq) {
            let (file, progress) = (op.file(), std::mem::replace(&mut op.progress, Progress::Waiting));
            self.discard_staged(file, progress);
        }
    }

    fn discard_staged(&mut self, file: FileId, progress: Progress) {
        if let Progress::Staged { copied, .. } = progress {
            let Copied { dir, temporary, .. } = *copied;
            let inode = self.get(file);
            // A spilled file's temporary is not a copy: the content is nowhere else.
            if inode.and_then(Inode::spill).is_some_and(|spill| *spill == (dir, temporary.clone())) {
                return;
            }
            let cred = inode.map_or(surgetank_store::Cred { uid: 0, gid: 0 }, Inode::cred);
            self.discards.push((dir, temporary, cred));
        }
    }

    /// Takes back a publication (and the links that belong to it), unless it was begun.
    pub fn take_back(&mut self, id: FileId, seq: Seq) -> bool {
        // Later operations on a file that the store has build on that file, not on its next version.
        let needed =
            self.ops.get(&seq).is_some_and(|op| op.certain) && self.get(id).is_none_or(|inode| inode.applied.is_none());
        if needed || !self.cancel(seq) {
            return false;
        }
        let mut never_applied = false;
        let mut many = false;
        if let Some(inode) = self.get_mut(id) {
            inode.publish = None;
            never_applied = inode.applied.is_none();
            many = inode.extra.as_ref().is_some_and(|extra| !extra.more_names.is_empty()) || inode.attr.links > 1;
        }
        if never_applied && many {
            self.take_back_links(id, seq);
        }
        self.txn.file(id);
        true
    }

    /// Without the publication at `seq` its links have no target.
    pub fn take_back_links(&mut self, id: FileId, seq: Seq) {
        let links: Vec<Seq> = self
            .ops
            .range(seq..)
            .filter(|(_, op)| matches!(&op.kind, OpKind::Link { file, .. } if *file == id))
            .map(|(seq, _)| *seq)
            .collect();
        for link in links {
            self.cancel(link);
        }
    }

    /// Does a change of names in this directory belong to the final drain?
    pub fn belongs_last(&self, dir: FileId) -> bool {
        // Only a name that was never in the store can wait without disturbing the order of other operations.
        let mut at = dir;
        while let Some(inode) = self.get(at) {
            if inode.applied.is_some() || at == FileId::ROOT {
                return false;
            }
            if inode.publish.and_then(|seq| self.ops.get(&seq)).is_some_and(|op| op.last) {
                return true;
            }
            match &inode.logical {
                Some((parent, _)) => at = *parent,
                None => return false,
            }
        }
        false
    }

    /// The operation that renames a file in the store there, in order.
    pub fn rename_op(&self, id: FileId, from: (FileId, &Name), to: (FileId, &Name)) -> OpKind {
        let over = self.planned(to.0, to.1);
        let ((from_dir, from), (to_dir, to)) = ((from.0, Box::from(&**from.1)), (to.0, Box::from(&**to.1)));
        if over == Some(id) {
            // The name is still that of an older link to this very file, and rename(2) would leave both.
            OpKind::Unlink { file: id, dir: from_dir, name: from }
        } else {
            OpKind::Rename { file: id, from_dir, from, to_dir, to, over }
        }
    }

    /// Whether the drain is renaming the temporary that has the content of a spilled file.
    pub fn is_published_as_it_is(&self, id: FileId) -> bool {
        let op = self.get(id).filter(|inode| inode.spill().is_some()).and_then(|inode| inode.publish);
        op.and_then(|seq| self.ops.get(&seq)).is_some_and(|op| op.progress == Progress::Committing)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use surgetank_types::model::{Attr, Kind, RunId, Timestamp};

    use super::*;
    use crate::{Inode, Place};

    fn attr(kind: Kind) -> Attr {
        let now = Timestamp::default();
        Attr {
            kind,
            perm: 0o755,
            uid: 0,
            gid: 0,
            ino: 1,
            links: 1,
            size_bytes: 0,
            blocks: 0,
            device: 0,
            atime: now,
            mtime: now,
            ctime: now,
        }
    }

    /// The indexes of the queue say what a walk over it says, after every change.
    #[test]
    fn indexes_of_the_queue_agree_with_a_walk_over_it() {
        let mut tree = Tree::new(Inode::new(attr(Kind::Directory)));
        let files: Vec<FileId> = (0..4).map(|_| tree.new_id()).collect();
        for id in &files {
            tree.insert(*id, Inode::new(attr(Kind::File)));
        }
        let (mut random, mut seqs) = (7_u64, Vec::new());
        let mut pick = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let (mut about_two, mut hastened) = (0, 0);
        for _ in 0..2000 {
            if seqs.is_empty() || pick(2) == 0 {
                let (file, other) = (files[pick(4)], files[pick(4)]);
                let name: Box<[u8]> = Box::from(&b"f"[..]);
                let kind = match pick(3) {
                    0 => OpKind::SetMeta { file },
                    1 => OpKind::Unlink { file, dir: FileId::ROOT, name },
                    _ => {
                        about_two += 1;
                        OpKind::Exchange {
                            a: file,
                            a_dir: FileId::ROOT,
                            a_name: name,
                            b: other,
                            b_dir: FileId::ROOT,
                            b_name: Box::from(&b"g"[..]),
                        }
                    }
                };
                let due = clock::tick() + Duration::from_secs(1);
                seqs.push(tree.queue(kind, RunId(1), due, pick(2) == 0));
            } else {
                let seq = seqs.swap_remove(pick(seqs.len()));
                assert!(tree.dequeue(seq).is_some());
            }
            for id in &files {
                let walked = tree.ops.values().any(|op| files_of(&op.kind).any(|file| file == *id));
                assert_eq!(tree.is_queued(*id), walked, "{id:?}");
            }
            let last: Vec<Seq> = tree.ops.iter().filter(|(_, op)| op.last).map(|(seq, _)| *seq).collect();
            assert!(tree.for_the_end.iter().eq(last.iter().copied()), "{last:?}");
            let (of, under) = ([files[pick(4)]], [FileId::ROOT].map(|dir| (dir, Name::from(&b"g"[..]))));
            for (dirs, names) in [(&[][..], &[][..]), (&[FileId::ROOT][..], &[][..]), (&[][..], &under[..])] {
                let walked = last.iter().filter(|seq| {
                    let op = &tree.ops[*seq];
                    let is_named = |place: &Place| dirs.contains(&place.0) || names.contains(place);
                    of.contains(&op.file()) || places(&op.kind).iter().any(is_named)
                });
                assert!(tree.for_the_end.about(&of, dirs, names).iter().eq(walked), "{of:?} {dirs:?} {names:?}");
            }
            assert!(tree.before_the_end.iter().eq(tree.ops.iter().filter(|(_, op)| !op.last).map(|(seq, _)| seq)));
            if pick(10) == 0 {
                hastened += last.len();
                let kind = OpKind::Unlink { file: files[pick(4)], dir: FileId::ROOT, name: Box::from(&b"f"[..]) };
                let pinned = tree.ops.values().any(|op| !places(&op.kind).is_empty());
                tree.undefer(&kind);
                let waits = tree.ops.values().any(|op| op.last && !places(&op.kind).is_empty());
                assert!(!pinned || !waits, "an operation with the name still waits for the end");
            }
        }
        assert!(about_two > 100 && hastened > 100, "the walk met too few cases: {about_two}, {hastened}");
    }
}
