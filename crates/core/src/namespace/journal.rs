//! Writing down what changed. A [`Txn`] collects what was touched while the tree is locked and commits
//! the present values as one atomic batch, before the lock is let go: the catalog's order is the tree's.

use std::time::Duration;
use surgetank_types::sync::PoisonError;

use surgetank_types::model::{Change, FileId, Hinted, LostRecord, OpKind, Prepared, RunId, Seq};

use super::Namespace;
use super::tree::{Inode, Name, Place, PlainId, Progress, Tree};

#[derive(Debug, Default)]
pub struct Txn {
    files: Vec<FileId>,
    entries: Vec<Place>,
    ops: Vec<Seq>,
    dropped: Vec<FileId>,
    counters: Vec<(String, u64)>,
    lost: Vec<Change>,
    gone: Vec<PlainId>,
    hints: Vec<Hinted>,
    /// The request that this thread serves is carried out with this; it is about that file.
    carried_out: Option<FileId>,
}

impl Txn {
    fn is_empty(&self) -> bool {
        self.files.is_empty()
            && self.entries.is_empty()
            && self.ops.is_empty()
            && self.dropped.is_empty()
            && self.counters.is_empty()
            && self.lost.is_empty()
            && self.gone.is_empty()
            && self.hints.is_empty()
            && self.carried_out.is_none()
    }
    pub fn file(&mut self, id: FileId) {
        if !self.files.contains(&id) {
            self.files.push(id);
        }
    }
    pub fn entry(&mut self, dir: FileId, name: &Name) {
        self.entries.push((dir, name.clone()));
    }
    pub fn op(&mut self, seq: Seq) {
        self.ops.push(seq);
    }
    pub fn dropped(&mut self, id: FileId) {
        self.dropped.push(id);
    }
    /// This plain file is removed once the catalog does not name it any more.
    pub fn gone(&mut self, plain: Option<PlainId>) {
        self.gone.extend(plain);
    }
    pub fn hints(&mut self, of: Hinted) {
        self.hints.push(of);
    }
    /// Should it come again, it is answered and not carried out once more.
    pub fn carried_out(&mut self, id: FileId) {
        self.carried_out = Some(id);
    }
    pub fn counter(&mut self, name: String, value: u64) {
        self.counters.push((name, value));
    }
    /// `None`: the loss is acknowledged.
    pub fn lost(&mut self, path: &[u8], record: Option<LostRecord>) {
        self.lost.push(match record {
            Some(record) => Change::PutLost(path.into(), record),
            None => Change::DropLost(path.into()),
        });
    }
}

impl Namespace {
    /// Makes a file ours: it and its ancestors are in the catalog from now on.
    pub(crate) fn own(&self, tree: &mut Tree, id: FileId) {
        tree.txn.file(id);
        let mut at = id;
        while let Some(inode) = tree.get_mut(at) {
            if at != id && inode.owned {
                break;
            }
            let already = std::mem::replace(&mut inode.owned, true);
            let (place, is_hinted) = (inode.logical.clone(), inode.said().is_some());
            let more = inode.extra.as_ref().map(|extra| extra.more_names.clone()).unwrap_or_default();
            tree.txn.file(at);
            let Some((parent, name)) = place else {
                break;
            };
            if !already {
                if is_hinted {
                    tree.txn.hints(Hinted::File(at));
                }
                tree.txn.entry(parent, &name);
                for (dir, name) in more {
                    tree.txn.entry(dir, &name);
                    self.own(tree, dir);
                }
            }
            at = parent;
        }
    }

    pub(crate) fn queue(
        &self,
        tree: &mut Tree,
        kind: OpKind,
        run: RunId,
        last: bool,
        delay_factor: u32,
    ) -> Seq {
        // Sealed late, when the command had ended and its final drain had begun: nobody would take it up any more.
        let ending = self.is_ending(run) || self.end.is_hurried();
        let last = last && !ending;
        if !last {
            self.undefer(tree, &kind);
        }
        let due =
            surgetank_types::clock::tick() + if ending { Duration::ZERO } else { self.config.quiet * delay_factor };
        let seq = tree.queue(kind, run, due, last);
        tree.txn.op(seq);
        seq
    }

    pub(crate) fn is_ending(&self, run: RunId) -> bool {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).contains(&run)
            || self.final_drains.load(surgetank_types::sync::atomic::Ordering::Relaxed) > 0
    }

    /// What an operation builds on must not be left for the final drain while the operation itself goes ahead.
    fn undefer(&self, tree: &mut Tree, kind: &OpKind) {
        let file = super::tree::file_of(kind);
        let places = super::tree::places(kind);
        // A directory that goes takes with it what is in it: all that is queued below comes before.
        let goes = match kind {
            OpKind::RemoveDir { file, .. } => Some(*file),
            OpKind::Publish { over, .. } | OpKind::Rename { over, .. } => *over,
            _ => None,
        };
        let mut files = vec![file];
        files.extend(goes.filter(|id| *id != file));
        let mut dirs = files.clone();
        let of_files = files.iter().filter_map(|id| tree.get(*id)).any(|inode| {
            inode.publish.is_some() || inode.set_meta.is_some() || inode.dir.as_ref().is_some_and(|dir| dir.queued > 0)
        });
        let of_names = places.iter().any(|(dir, name)| tree.entry(*dir, name).is_some_and(|entry| entry.pins > 0));
        if !of_files && !of_names {
            return;
        }
        loop {
            let needed: Vec<Seq> = tree
                .ops
                .iter()
                .filter(|(_, op)| op.last)
                .filter(|(_, op)| {
                    files.contains(&op.file())
                        || super::tree::places(&op.kind)
                            .iter()
                            .any(|place| dirs.contains(&place.0) || places.contains(place))
                })
                .map(|(seq, _)| *seq)
                .collect();
            for seq in &needed {
                let Some(op) = tree.ops.get_mut(seq) else {
                    continue;
                };
                op.last = false;
                tree.txn.op(*seq);
                let (file, above) = (op.file(), super::tree::places(&op.kind));
                // A link builds on its file's publication.
                if !files.contains(&file) {
                    files.push(file);
                }
                if goes.is_some() && !dirs.contains(&file) {
                    dirs.push(file);
                }
                for (dir, _) in above {
                    self.hasten_dirs(tree, dir, false);
                }
            }
            if needed.is_empty() {
                return;
            }
        }
    }

    /// Takes an operation back, with its staged copy; `false` if it is being carried out.
    pub(crate) fn cancel(&self, tree: &mut Tree, seq: Seq) -> bool {
        if tree.ops.get(&seq).is_some_and(|op| op.progress == Progress::Committing) {
            return false;
        }
        let Some((op, places)) = tree.dequeue(seq) else {
            return true;
        };
        Self::discard_staged(tree, op.file(), op.progress);
        tree.txn.op(seq);
        for (dir, name) in places {
            tree.txn.entry(dir, &name);
        }
        // Carried out, though not for good: from here on the books say what the store has, or the next agent would take it
        // for somebody else's.
        if op.doubtful {
            if let (OpKind::Publish { file, .. }, Some(prepared)) = (&op.kind, op.prepared) {
                tree.doubts.insert(*file, prepared);
            }
            let in_doubt = |tree: &Tree, id| {
                tree.ops.values().any(|op| op.doubtful && super::tree::files_of(&op.kind).any(|other| other == id))
            };
            for id in super::tree::files_of(&op.kind).filter(|id| !in_doubt(tree, *id)).collect::<Vec<_>>() {
                tree.before.remove(&id);
                tree.txn.file(id);
            }
        }
        true
    }

    /// The staged copy goes, to be made again in its turn.
    pub(crate) fn unstage(&self, tree: &mut Tree, seq: Seq) {
        if let Some(op) = tree.ops.get_mut(&seq) {
            let (file, progress) = (op.file(), std::mem::replace(&mut op.progress, Progress::Waiting));
            Self::discard_staged(tree, file, progress);
        }
    }

    fn discard_staged(tree: &mut Tree, file: FileId, progress: Progress) {
        if let Progress::Staged { dir, temporary, .. } = progress {
            let inode = tree.get(file);
            // Of a file that was spilled into the store it is no copy: it is the only place where the content lies.
            if inode.and_then(Inode::spill).is_some_and(|spill| *spill == (dir, temporary.clone())) {
                return;
            }
            let cred = inode.map_or(surgetank_store::Cred { uid: 0, gid: 0 }, Inode::cred);
            tree.discards.push((dir, temporary, cred));
        }
    }

    /// Forgets a file that nothing refers to any more.
    pub(crate) fn reap(&self, tree: &mut Tree, id: FileId) {
        // (What programs have of an earlier agent is not counted yet.)
        if tree.unreferenced(id) && !self.opens().contains_key(&id) && !self.is_yet_to_restore() {
            let owned = tree.remove(id).is_some_and(|inode| inode.owned);
            if owned {
                tree.txn.dropped(id);
            }
        }
    }

    /// An operation has been carried out for good: it leaves the queue. `copied` is what a file's publication brought.
    pub(crate) fn retire(&self, tree: &mut Tree, seq: Seq, copied: Option<&Prepared>, gone: &[FileId]) {
        let Some((op, places)) = tree.dequeue(seq) else {
            return;
        };
        tree.release_books(&op.kind);
        tree.txn.op(seq);
        for (dir, name) in &places {
            tree.txn.entry(*dir, name);
        }
        for id in super::tree::files_of(&op.kind) {
            tree.txn.file(id);
        }
        let id = op.file();
        if let Some(inode) = tree.get_mut(id) {
            match op.kind {
                OpKind::Publish { .. } => {
                    if inode.publish == Some(seq) {
                        inode.publish = None;
                    }
                    match copied {
                        Some(copied) => {
                            inode.durable = inode.durable.max(copied.version);
                            inode.checksum = Some(copied.checksum);
                            inode.reopened = 0;
                        }
                        None => inode.durable = inode.version,
                    }
                    inode.checked = Some(surgetank_types::clock::Moment::now());
                }
                OpKind::SetMeta { .. } if inode.set_meta == Some(seq) => inode.set_meta = None,
                _ => {}
            }
        }
        tree.recount(id);
        let again = tree.get(id).is_some_and(|inode| inode.sealed && inode.dirty() && inode.publish.is_none());
        if again {
            self.queue_publish(tree, id);
        }
        tree.links_changed += u64::from(gone.iter().any(|gone| tree.is_hard_linked(*gone)));
        self.reap(tree, id);
        for gone in gone {
            tree.txn.file(*gone);
            self.reap(tree, *gone);
        }
    }

    /// Commits what `act` changes as a batch of its own: what the holder of the tree changed before stays for its own commit.
    pub(crate) fn commit_apart<T>(&self, tree: &mut Tree, act: impl FnOnce(&mut Tree) -> T) -> T {
        let outer = std::mem::take(&mut tree.txn);
        let done = act(tree);
        self.commit(tree);
        tree.txn = outer;
        done
    }

    /// Commits the present values of all that was touched. A catalog that cannot be written does not stop
    /// programs: the changes are kept, tried again with the next commit, and the trouble is shown.
    pub(crate) fn commit(&self, tree: &mut Tree) {
        if tree.txn.is_empty() {
            return;
        }
        let txn = std::mem::take(&mut tree.txn);
        let tree = &*tree;
        let mut changes = Vec::with_capacity(txn.files.len() + txn.entries.len() + txn.ops.len() + 1);
        for id in &txn.files {
            if txn.dropped.contains(id) {
                continue;
            }
            match tree.get(*id) {
                Some(inode) if inode.owned => {
                    if let Some(record) = tree.record(*id) {
                        changes.push(Change::PutFile(*id, Box::new(record)));
                    }
                }
                Some(_) => {}
                None => changes.push(Change::DropFile(*id)),
            }
        }
        changes.extend(txn.dropped.iter().map(|id| Change::DropFile(*id)));
        if tree.hints.any() {
            changes.extend(txn.dropped.iter().map(|id| Change::DropHints(Hinted::File(*id))));
        }
        for of in txn.hints {
            match tree.hint_record(&of) {
                Some(record) => changes.push(Change::PutHints(of, record)),
                None => changes.push(Change::DropHints(of)),
            }
        }
        for (dir, name) in &txn.entries {
            changes.push(match tree.entry_record(*dir, name) {
                Some(record) => Change::PutEntry(*dir, Box::from(&**name), record),
                None => Change::DropEntry(*dir, Box::from(&**name)),
            });
        }
        for seq in &txn.ops {
            changes.push(match tree.ops.get(seq) {
                Some(op) => Change::PutOp(*seq, op.record()),
                None => Change::DropOp(*seq),
            });
        }
        self.show_all(tree, &txn.files, &txn.entries);
        for id in &txn.dropped {
            self.show(tree, *id);
        }
        changes.extend(txn.gone.iter().filter_map(|plain| self.gone(tree, *plain)));
        changes.extend(txn.counters.into_iter().map(|(name, value)| Change::PutCounter(name, value)));
        changes.extend(txn.lost);
        self.bequeath_names(tree, &txn.entries, &txn.dropped);
        if changes.is_empty() {
            return;
        }
        changes.extend(txn.carried_out.and_then(|id| self.request_done(id)).into_iter().flatten());
        let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
        let result = if unwritten.is_empty() {
            self.catalog.commit(&changes)
        } else {
            unwritten.append(&mut changes);
            self.catalog.commit(&unwritten)
        };
        match result {
            Ok(_) => unwritten.clear(),
            Err(why) => {
                if unwritten.is_empty() {
                    self.note(
                        RunId(0),
                        self.config.state.display().to_string(),
                        format!("the catalog cannot be written: {why}; changes are held in memory and would be lost with the agent"),
                        false,
                    );
                }
                unwritten.append(&mut changes);
            }
        }
    }

    /// Everything committed so far survives the machine. An error, too, when something could not be committed: it would be
    /// promised, and forgotten.
    pub(crate) fn sync_catalog(&self) -> std::io::Result<()> {
        {
            let mut unwritten = self.unwritten.lock().unwrap_or_else(PoisonError::into_inner);
            if !unwritten.is_empty() {
                self.catalog.commit(&unwritten)?;
                unwritten.clear();
            }
        }
        self.catalog.sync(self.catalog.position())
    }
}
