//! The changes of the tree since the last commit. It records only numbers and names: a commit writes the values of that
//! moment.

use surgetank_types::model::{Change, EntryRecord, FileId, FileRecord, Hinted, LostRecord, Mark, Replica, Seq};

use crate::{Name, Place, PlainId, Tree};

/// The files, names and operations that changed.
#[derive(Debug, Default)]
pub struct Txn {
    /// Files with a changed record.
    pub files: Vec<FileId>,
    /// Names with changed bindings.
    pub entries: Vec<Place>,
    /// Operations that were queued, changed, or left the queue.
    pub ops: Vec<Seq>,
    /// Files that are forgotten.
    pub dropped: Vec<FileId>,
    /// Marks and their new numbers.
    pub marks: Vec<(Mark, u64)>,
    /// Losses that were recorded or acknowledged.
    pub lost: Vec<Change>,
    /// Plain files that are removed after the commit.
    pub pending_unlinks: Vec<PlainId>,
    /// Files and paths with changed hints.
    pub hints: Vec<Hinted>,
    /// This transaction carries out the request that this thread serves; the request is about that file.
    pub carried_out: Option<FileId>,
}

impl Txn {
    /// Nothing is noted.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
            && self.entries.is_empty()
            && self.ops.is_empty()
            && self.dropped.is_empty()
            && self.marks.is_empty()
            && self.lost.is_empty()
            && self.pending_unlinks.is_empty()
            && self.hints.is_empty()
            && self.carried_out.is_none()
    }
    /// The file's record changed.
    pub fn file(&mut self, id: FileId) {
        if self.files.last() != Some(&id) {
            self.files.push(id);
        }
    }
    /// Each file once, in the order of their numbers: call it before the lists are read.
    pub fn sort(&mut self) {
        self.files.sort_unstable();
        self.files.dedup();
        self.dropped.sort_unstable();
    }
    /// The name's bindings changed.
    pub fn entry(&mut self, dir: FileId, name: &Name) {
        self.entries.push((dir, name.clone()));
    }
    /// The operation was queued, changed, or left the queue.
    pub fn op(&mut self, seq: Seq) {
        self.ops.push(seq);
    }
    /// The file is forgotten.
    pub fn dropped(&mut self, id: FileId) {
        self.dropped.push(id);
    }
    /// This plain file is removed once the catalog no longer names it.
    pub fn pending_unlink(&mut self, plain: Option<PlainId>) {
        self.pending_unlinks.extend(plain);
    }
    /// The hints changed.
    pub fn hints(&mut self, of: Hinted) {
        self.hints.push(of);
    }
    /// If the request comes again, the agent answers it without carrying it out twice.
    pub fn carried_out(&mut self, id: FileId) {
        self.carried_out = Some(id);
    }
    /// The mark has a new number.
    pub fn mark(&mut self, mark: Mark, number: u64) {
        self.marks.push((mark, number));
    }
    /// `None`: the loss is acknowledged.
    pub fn lost(&mut self, path: &[u8], record: Option<LostRecord>) {
        self.lost.push(match record {
            Some(record) => Change::PutLost(path.into(), record),
            None => Change::DropLost(path.into()),
        });
    }
}

impl Txn {
    /// The present values of all recorded changes, as the catalog keeps them. Call [`Self::sort`] before.
    pub fn changes(&mut self, tree: &Tree) -> Vec<Change> {
        let mut changes = Vec::with_capacity(self.files.len() + self.entries.len() + self.ops.len() + 1);
        for id in self.files.iter().filter(|id| self.dropped.binary_search(id).is_err()) {
            match tree.get(*id) {
                Some(inode) if inode.owned => {
                    changes.extend(record(tree, *id).map(|record| Change::PutFile(*id, Box::new(record))));
                }
                Some(_) => {}
                None => changes.push(Change::DropFile(*id)),
            }
        }
        changes.extend(self.dropped.iter().map(|id| Change::DropFile(*id)));
        if tree.hints.any {
            changes.extend(self.dropped.iter().map(|id| Change::DropHints(Hinted::File(*id))));
        }
        changes.extend(self.hints.drain(..).map(|of| match tree.hint_record(&of) {
            Some(record) => Change::PutHints(of, record),
            None => Change::DropHints(of),
        }));
        changes.extend(self.entries.iter().map(|(dir, name)| match entry_record(tree, *dir, name) {
            Some(record) => Change::PutEntry(*dir, Box::from(&**name), record),
            None => Change::DropEntry(*dir, Box::from(&**name)),
        }));
        changes.extend(self.ops.iter().map(|seq| match tree.ops.get(seq) {
            Some(op) => Change::PutOp(*seq, op.record()),
            None => Change::DropOp(*seq),
        }));
        changes.extend(self.marks.drain(..).map(|(mark, number)| Change::PutMark(mark, number)));
        changes.append(&mut self.lost);
        changes
    }
}

fn record(tree: &Tree, id: FileId) -> Option<FileRecord> {
    let inode = tree.get(id)?;
    let place = |place: &Place| (place.0, Box::from(&*place.1));
    let now;
    let (applied, identity) = match tree.before.get(&id) {
        Some(before) => (&before.names, &before.identity),
        None => {
            now = inode.names_in_store();
            (&now, &inode.identity)
        }
    };
    Some(FileRecord {
        attr: inode.attr,
        version: u64::from(inode.version),
        durable_version: u64::from(inode.durable),
        sealed: inode.sealed,
        synced_version: u64::from(inode.synced),
        promised_version: u64::from(inode.promised),
        replica: inode.replica.map(|plain| Replica {
            node: inode.home().unwrap_or_default(),
            device: tree.device_numbers.get(&plain.device).copied().unwrap_or(plain.device),
            backing_ino: plain.ino,
            born: plain.born,
        }),
        spill: inode.spill().map(place),
        identity: *identity,
        logical: inode.logical.as_ref().map(place),
        applied: applied.iter().map(place).collect(),
        target: inode.extra.as_ref().and_then(|extra| extra.target.clone()),
        xattrs: inode.extra.as_ref().and_then(|extra| extra.xattrs.clone()),
        pinned: inode.pinned,
        adopted: inode.is_adopted(),
        checksum: inode.checksum(),
        run: inode.run,
    })
}

fn entry_record(tree: &Tree, dir: FileId, name: &[u8]) -> Option<EntryRecord> {
    tree.entry(dir, name).map(|entry| EntryRecord { logical: entry.logical(), planned: entry.planned() })
}
