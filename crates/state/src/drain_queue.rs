//! The queue as the drain sees it.
//!
//! The drain asks for the [next](DrainQueue::next) operations. It reports each as staged, [begun](DrainQueue::begin),
//! [complete](DrainQueue::complete), or [failed](DrainQueue::fail).
//!
//! Invariants:
//! - Only operations from the head of the queue are published, unless the user gave up the order.
//! - The catalog records an operation as begun before the drain changes a name in the store for it.
//! - An operation leaves the queue only when it is durable.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use surgetank_store::Staged;
use surgetank_types::clock;
use surgetank_types::model::{FileId, Kind, OpKind, Prepared, RunId, Seq};

use crate::{Entry, Name, Op, Progress, Tree, Trouble, files_of, places};

/// How many operations behind the first one are inspected.
const WINDOW_OPS: usize = 1024;
/// At most so many operations are published as one batch: one sync, one record.
pub const BATCH_OPS_MAX: usize = 256;
/// For a server of objects: a copy in publication cannot be moved when memory runs short.
const BATCH_HELD_BYTES_MAX: u64 = 32 << 20;
/// (Larger files have been sent before their publication.)
const HELD_BYTES_MAX: u64 = 16 << 20;
/// The longest wait until the next look at the queue.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// The time in which the staging thread notices that its copy is no longer wanted.
const DISTURBED_WAIT: Duration = Duration::from_millis(2);

/// Which operations the drain may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Operations that are due by now may be taken.
    pub now: Instant,
    /// In the order of the queue.
    pub ordered: bool,
    /// One operation only: it shows whether the store is back.
    pub one: bool,
    /// The store holds the bytes of small files in memory until they are published.
    pub holds_bytes: bool,
}

/// The drain's next work.
#[derive(Debug)]
pub struct Next {
    /// Operations to copy; they are [`Progress::Staging`] from now on.
    pub to_stage: Vec<Seq>,
    /// Operations to publish as one batch.
    pub batch: Vec<Seq>,
    /// Until the queue is worth another look.
    pub wait: Duration,
    /// A copy in progress may soon belong to the batch.
    pub is_staging: bool,
    /// Only operations of the final drain are queued.
    pub is_empty: bool,
}

/// A copy in a temporary.
#[derive(Debug, Clone, PartialEq)]
pub struct Copied {
    /// The temporary's directory.
    pub dir: FileId,
    /// The temporary's name.
    pub temporary: Name,
    /// What the store has of the copy.
    pub staged: Staged,
    /// The version of the file that the copy holds.
    pub version: u32,
}

impl Copied {
    /// What the catalog keeps of it, so that a repetition after a crash recognises the file.
    pub fn prepared(&self) -> Prepared {
        Prepared { identity: self.staged.identity, checksum: self.staged.checksum, version: self.version }
    }
}

/// The drain's view of the queue.
#[derive(Debug)]
pub struct DrainQueue<'a> {
    tree: &'a mut Tree,
}

impl Tree {
    /// The queue for the drain.
    pub fn drain_queue(&mut self) -> DrainQueue<'_> {
        DrainQueue { tree: self }
    }
}

/// Is it the first operation that does not wait for the final drain, or is there none?
pub fn is_first(tree: &Tree, seq: Seq) -> bool {
    tree.before_the_end.first().is_none_or(|first| *first == seq)
}

/// The progress of one look at the queue.
struct Look<'a> {
    limits: &'a Limits,
    /// Names of temporaries that are still to be removed.
    discarded: HashSet<Name>,
    busy: HashMap<FileId, Seq>,
    next: Next,
    held_bytes: u64,
    /// All operations before were ready.
    is_open: bool,
    /// Ordered: an earlier file found no room in the store. Copies of later files must not take the room that becomes
    /// free.
    is_short: bool,
    gives_way: Vec<Seq>,
    /// Unordered: files of operations that are not ready.
    stuck: Vec<FileId>,
}

impl DrainQueue<'_> {
    /// The operations that can be staged, and the longest publishable run from the head of the queue. `None`: an
    /// operation in progress will show whether the store is back.
    pub fn next(&mut self, limits: &Limits, temporary_of: &dyn Fn(Seq) -> Name) -> Option<Next> {
        let tree = &mut *self.tree;
        let is_under_way = |op: &Op| matches!(op.progress, Progress::Staging | Progress::Committing);
        if limits.one && tree.ops.values().take(WINDOW_OPS).any(|op| is_under_way(op)) {
            return None;
        }
        let seqs: Vec<Seq> = tree.before_the_end.iter().take(WINDOW_OPS).copied().collect();
        let mut look = Look {
            limits,
            discarded: tree.discards.iter().map(|(_, name, _)| name.clone()).collect(),
            busy: if limits.ordered { HashMap::new() } else { busy_dirs(tree, &seqs) },
            next: Next {
                to_stage: Vec::new(),
                batch: Vec::new(),
                wait: LOOK_AGAIN,
                is_staging: false,
                is_empty: seqs.is_empty(),
            },
            held_bytes: 0,
            is_open: true,
            is_short: false,
            gives_way: Vec::new(),
            stuck: Vec::new(),
        };
        for seq in seqs {
            if let Some(op) = tree.ops.get(&seq) {
                let is_ready = look.is_ready(tree, seq, op, temporary_of);
                look.take(tree, seq, op, is_ready);
            }
        }
        for seq in look.gives_way {
            tree.unstage(seq);
        }
        for seq in &look.next.to_stage {
            if let Some(op) = tree.ops.get_mut(seq) {
                op.progress = Progress::Staging;
            }
        }
        Some(look.next)
    }

    /// No operation waits for the final drain or for a quiet period any longer.
    pub fn hasten_all(&mut self, now: Instant) {
        while let Some(seq) = self.tree.for_the_end.first() {
            self.tree.hasten(seq);
        }
        // A refused operation keeps its time for the next try.
        for op in self.tree.ops.values_mut().filter(|op| op.failures == 0) {
            op.due = op.due.min(now);
        }
    }

    /// The final drain of a run (`None`: of everything) begins. Its operations wait behind those of other runs, so all
    /// become due, and refused ones are tried again.
    pub fn begin_final_drain(&mut self, run: Option<RunId>, now: Instant) {
        let tree = &mut *self.tree;
        let is_of_run = |op: &Op| run.is_none_or(|run| op.run == run || op.run == RunId(0));
        let waiting = tree.for_the_end.iter();
        let hastened: Vec<Seq> = waiting.filter(|seq| tree.ops.get(seq).is_some_and(|op| is_of_run(op))).collect();
        for seq in hastened {
            tree.hasten(seq);
        }
        for op in tree.ops.values_mut() {
            // Its programs have ended and will not repeat a request.
            op.not_before = op.not_before.filter(|_| run != Some(op.run));
            op.due = op.due.min(now);
            op.failures = 0;
            op.first_failure = None;
            op.error = None;
        }
    }

    /// Operations that were handed out for staging, and not begun.
    pub fn hand_back(&mut self, seqs: impl IntoIterator<Item = Seq>) {
        for seq in seqs {
            if let Some(op) = self.tree.ops.get_mut(&seq).filter(|op| op.progress == Progress::Staging) {
                op.progress = Progress::Waiting;
            }
        }
    }

    /// The operation is retried a little later, without counting a failure.
    pub fn put_off(&mut self, seq: Seq, by: impl FnOnce(FileId) -> Duration) {
        if let Some(op) = self.tree.ops.get_mut(&seq).filter(|op| op.progress == Progress::Staging) {
            op.progress = Progress::Waiting;
            op.due = clock::tick() + by(op.file());
        }
    }

    /// A copy is complete. `false`: the copy is not wanted, because the operation was taken back or its file is
    /// `changed`.
    pub fn staged(&mut self, seq: Seq, copied: &Copied, is_checked: bool, changed: bool) -> bool {
        let Some(op) = self.tree.ops.get_mut(&seq) else { return false };
        if op.progress != Progress::Staging || changed {
            op.progress = Progress::Waiting;
            return false;
        }
        op.progress = Progress::Staged { copied: Box::new(copied.clone()), checked: is_checked };
        true
    }

    /// The copies of these were compared with their files. Returns those that are still queued.
    pub fn compared(&mut self, seqs: &[Seq]) -> Vec<Seq> {
        let mut queued = Vec::with_capacity(seqs.len());
        for seq in seqs {
            if let Some(op) = self.tree.ops.get_mut(seq) {
                if let Progress::Staged { checked, .. } = &mut op.progress {
                    *checked = true;
                }
                queued.push(*seq);
            }
        }
        queued
    }

    /// From here on the operations cannot be taken back. The commit must record that they are begun, and what they will
    /// rename. The catalog keeps where their files were until they are complete. Returns the begun operations, with
    /// their copies.
    pub fn begin(&mut self, batch: &[Seq]) -> Vec<(Seq, Option<Copied>)> {
        let tree = &mut *self.tree;
        let mut begun = Vec::with_capacity(batch.len());
        for seq in batch {
            let needs_staging = tree.ops.get(seq).is_some_and(|op| needs_staging(tree, &op.kind));
            let Some(op) = tree.ops.get_mut(seq) else {
                continue;
            };
            let copied = match op.progress.clone() {
                Progress::Staged { copied, .. } => {
                    // An earlier agent's copy may be in place already: it has to be recognised first.
                    if !(op.doubtful && op.prepared.is_some()) {
                        op.prepared = Some(copied.prepared());
                    }
                    Some(copied)
                }
                // Its copy was discarded meanwhile.
                Progress::Waiting if needs_staging => break,
                Progress::Waiting => None,
                Progress::Staging | Progress::Committing => break,
            };
            op.progress = Progress::Committing;
            op.certain = true;
            let kind = op.kind.clone();
            tree.txn.op(*seq);
            tree.hold_books(&kind);
            plan(tree, &kind);
            begun.push((*seq, copied.map(|copied| *copied)));
        }
        begun
    }

    /// Operations that were begun and not carried out continue as before. Returns files that may have lost their last
    /// reference.
    pub fn back_to_waiting(&mut self, begun: Vec<(Seq, Option<Copied>)>) -> Vec<FileId> {
        let tree = &mut *self.tree;
        let mut released = Vec::new();
        for (seq, copied) in begun {
            let Some(op) = tree.ops.get_mut(&seq) else {
                continue;
            };
            op.progress =
                copied.map_or(Progress::Waiting, |copied| Progress::Staged { copied: Box::new(copied), checked: true });
            let (kind, may_be_done) = (op.kind.clone(), op.doubtful);
            if !may_be_done {
                tree.release_books(&kind);
                released.extend(files_of(&kind));
            }
            files_of(&kind).for_each(|id| tree.txn.file(id));
            tree.txn.op(seq);
        }
        released
    }

    /// They may have been carried out, and only the sync of their directory failed.
    pub fn doubt(&mut self, seqs: &[Seq]) {
        for seq in seqs {
            if let Some(op) = self.tree.ops.get_mut(seq) {
                op.doubtful = true;
            }
        }
    }

    /// The operation is durable and leaves the queue. `copied`: what a file's publication brought. Returns its file,
    /// and whether the file has a newer version to publish.
    pub fn complete(&mut self, seq: Seq, copied: Option<&Prepared>) -> Option<(FileId, bool)> {
        let tree = &mut *self.tree;
        let (op, places) = tree.dequeue(seq)?;
        tree.release_books(&op.kind);
        tree.txn.op(seq);
        for (dir, name) in &places {
            tree.txn.entry(*dir, name);
        }
        for id in files_of(&op.kind) {
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
                            inode.set_checksum(Some(copied.checksum));
                            inode.reopened = 0;
                        }
                        None => inode.durable = inode.version,
                    }
                    inode.checked = Some(clock::Moment::now());
                }
                OpKind::SetMeta { .. } if inode.set_meta == Some(seq) => inode.set_meta = None,
                _ => {}
            }
        }
        tree.recount(id);
        let again = tree.get(id).is_some_and(|inode| inode.sealed && inode.dirty() && inode.publish.is_none());
        Some((id, again))
    }

    /// The operation failed, and its cause was removed: it is retried at once. `false`: it has failed `failures_max`
    /// times.
    pub fn retry(&mut self, seq: Seq, failures_max: u32) -> bool {
        let Some(op) = self.tree.ops.get_mut(&seq).filter(|op| op.failures + 1 < failures_max) else { return false };
        op.failures += 1;
        op.due = clock::tick();
        unless_staged(op);
        true
    }

    /// What made the operation fail is gone: it is tried again at once, as if it had not.
    pub fn forgive(&mut self, seq: Seq) {
        let Some(op) = self.tree.ops.get_mut(&seq).filter(|op| op.error.is_some()) else { return };
        (op.due, op.failures, op.first_failure, op.error) = (clock::tick(), 0, None, None);
    }

    /// The operation failed. `judge` gets the number of failures and the time of the first one. It returns when the
    /// operation is retried, and the report to the user.
    pub fn fail(&mut self, seq: Seq, judge: impl FnOnce(u32, Instant) -> (Instant, Trouble)) {
        let Some(op) = self.tree.ops.get_mut(&seq) else {
            return;
        };
        op.failures += 1;
        let first = *op.first_failure.get_or_insert_with(clock::tick);
        let (due, trouble) = judge(op.failures, first);
        op.due = due;
        op.error = Some(Box::new(trouble));
        unless_staged(op);
    }
}

impl Look<'_> {
    /// May the operation be published? One that may be staged is recorded for staging.
    fn is_ready(&mut self, tree: &Tree, seq: Seq, op: &Op, temporary_of: &dyn Fn(Seq) -> Name) -> bool {
        let due_at = tree.due(op);
        let due = due_at <= self.limits.now;
        if !due {
            self.next.wait = self.next.wait.min(due_at.duration_since(self.limits.now));
        }
        match &op.progress {
            Progress::Staged { .. } if self.is_short => {
                self.gives_way.push(seq);
                false
            }
            Progress::Staged { .. } => due,
            Progress::Staging | Progress::Committing => {
                self.next.is_staging = true;
                false
            }
            Progress::Waiting if needs_staging(tree, &op.kind) => {
                // Its last copy has the name until that copy is removed.
                let taken = !self.discarded.is_empty() && self.discarded.contains(&temporary_of(seq));
                if taken {
                    self.next.wait = self.next.wait.min(DISTURBED_WAIT);
                }
                let goes = tree.get(op.file()).is_some_and(|inode| inode.sealed || op.is_taken_open(inode));
                let nothing_taken = self.next.to_stage.is_empty() && self.next.batch.is_empty();
                if due && goes && !self.is_short && !taken && (!self.limits.one || nothing_taken) {
                    self.next.to_stage.push(seq);
                }
                self.is_short |= self.limits.ordered && op.error.as_deref().is_some_and(Trouble::is_full);
                false
            }
            // A temporary that is still to be removed there would change its times.
            Progress::Waiting if due && is_disturbed(tree, seq, &op.kind, &self.busy) => {
                self.next.wait = self.next.wait.min(DISTURBED_WAIT);
                false
            }
            Progress::Waiting => due,
        }
    }

    /// Puts the operation into the batch, or records that operations that depend on it have to wait.
    fn take(&mut self, tree: &Tree, seq: Seq, op: &Op, is_ready: bool) {
        let is_blocked = self.stuck.contains(&op.file()) || touches(&op.kind, &self.stuck);
        let bytes = tree.get(op.file()).map_or(0, |inode| inode.attr.size_bytes);
        let held = if !self.limits.holds_bytes || bytes >= HELD_BYTES_MAX { 0 } else { bytes };
        let fits = self.next.batch.is_empty() || self.held_bytes + held <= BATCH_HELD_BYTES_MAX;
        let ops_max = if self.limits.one { 1 } else { BATCH_OPS_MAX };
        let has_room = fits && self.next.batch.len() < ops_max && (!self.limits.one || self.next.to_stage.is_empty());
        if is_ready && self.is_open && !is_blocked && has_room {
            self.held_bytes += held;
            self.next.batch.push(seq);
        } else if self.limits.ordered {
            self.is_open = false;
        } else {
            self.stuck.push(op.file());
        }
    }
}

/// A complete copy stays.
fn unless_staged(op: &mut Op) {
    if !matches!(op.progress, Progress::Staged { .. }) {
        op.progress = Progress::Waiting;
    }
}

fn needs_staging(tree: &Tree, kind: &OpKind) -> bool {
    matches!(kind, OpKind::Publish { file, .. } if tree.get(*file).is_some_and(|inode| inode.attr.kind == Kind::File))
}

/// Later operations on the names of a begun operation have to build on what the store will have.
fn plan(tree: &mut Tree, kind: &OpKind) {
    let (file, dir, name) = match kind {
        // For a directory this was decided when it was made; later operations in the queue may plan otherwise by now.
        OpKind::Publish { file, dir, name, .. }
            if tree.get(*file).is_some_and(|inode| inode.applied.is_none() && !inode.is_dir()) =>
        {
            plan_links(tree, *file);
            (*file, *dir, Name::from(&**name))
        }
        OpKind::Link { file, dir, name } => (*file, *dir, Name::from(&**name)),
        _ => return,
    };
    if tree.entry(dir, &name).and_then(Entry::logical) == Some(file) {
        tree.bind(dir, &name, |entry| entry.set_planned(Some(file)));
        tree.txn.entry(dir, &name);
    }
}

/// The publication of a file also makes its further names certain.
fn plan_links(tree: &mut Tree, file: FileId) {
    let more = tree.get(file).and_then(|inode| inode.extra.as_ref()).map(|extra| extra.more_names.clone());
    for (dir, name) in more.unwrap_or_default() {
        let links = |op: &Op| matches!(&op.kind, OpKind::Link { file: id, dir: at, name: link } if *id == file && *at == dir && **link == *name);
        if tree.entry(dir, &name).is_some_and(|entry| entry.pins > 0) && tree.ops.values().any(|op| links(op)) {
            tree.bind(dir, &name, |entry| entry.set_planned(Some(file)));
            tree.txn.entry(dir, &name);
        }
    }
}

/// Directories with a pending operation that is not refused, each with the first of them; only where attributes wait
/// for it.
fn busy_dirs(tree: &Tree, seqs: &[Seq]) -> HashMap<FileId, Seq> {
    let ops = || seqs.iter().filter_map(|seq| Some((*seq, tree.ops.get(seq)?))).filter(|(_, op)| op.error.is_none());
    let mut first = HashMap::new();
    if ops().any(|(_, op)| matches!(op.kind, OpKind::SetMeta { .. })) {
        for (seq, op) in ops() {
            for (dir, _) in places(&op.kind) {
                first.entry(dir).or_insert(seq);
            }
            // Its copy leaves this one.
            if let Progress::Staged { copied, .. } = &op.progress {
                first.entry(copied.dir).or_insert(seq);
            }
        }
    }
    first
}

/// Does the operation set attributes of a directory that still changes? A copy of an earlier, cancelled operation is
/// being made there, or waits to be removed. Or, in unordered mode, an earlier operation there is pending.
fn is_disturbed(tree: &Tree, seq: Seq, kind: &OpKind, busy: &HashMap<FileId, Seq>) -> bool {
    let OpKind::SetMeta { file } = kind else { return false };
    if busy.get(file).is_some_and(|first| *first < seq) {
        return true;
    }
    tree.staging.iter().any(|(other, dir)| dir == file && *other < seq)
        || tree.discards.iter().any(|(dir, ..)| dir == file)
}

/// Is an operation about a file or directory of another operation that cannot continue?
fn touches(kind: &OpKind, stuck: &[FileId]) -> bool {
    if stuck.is_empty() {
        return false;
    }
    let over = match kind {
        OpKind::Publish { over, .. } | OpKind::Rename { over, .. } => *over,
        OpKind::Exchange { b, .. } => Some(*b),
        _ => None,
    };
    over.is_some_and(|over| stuck.contains(&over)) || places(kind).iter().any(|(dir, _)| stuck.contains(dir))
}
