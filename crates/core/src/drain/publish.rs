//! One batch from the head of the queue.
//!
//! The steps: sync and compare the small copies, record the coming renames in the catalog, carry the operations out in
//! order, sync the directories. Only then are the operations durable.

use std::collections::{HashMap, HashSet};

use surgetank_state::{Copied, Progress};
use surgetank_store::{Cred, Staged, StorePath, TakesTurn, at_once};
use surgetank_types::model::{FileId, Kind, Mode, OpKind, Seq, data_bytes};
use surgetank_types::sync::PoisonError;
use surgetank_types::sync::atomic::Ordering;

use crate::base::users::own_cred;
use crate::drain::Drain;
use crate::drain::attempts::not_yet;
use crate::drain::execute::Done;
use crate::drain::turns::Turns;
use crate::files::evict::THE_END;

struct Small {
    seq: Seq,
    path: StorePath,
    staged: Staged,
    owner: Cred,
    /// Fsync publishes a spilled file as it is, and its program may still write: there is nothing to compare.
    is_written: bool,
}

impl Drain {
    pub(super) fn publish(&self, batch: &[Seq]) {
        let _work = self.base.end.work();
        let batch = self.compare(batch);
        crash_point!("drain.compared");
        let batch = self.commit_to(&batch);
        crash_point!("drain.started");
        let mut done: Vec<(Seq, Done)> = Vec::with_capacity(batch.len());
        let mut dirs: Vec<FileId> = Vec::new();
        let mut broke_off = None;
        let mut ahead: HashMap<Seq, std::io::Result<Done>> = HashMap::new();
        for (index, seq) in batch.iter().enumerate() {
            let outcome = ahead.remove(seq).or_else(|| {
                // (An operation that has an outcome already does not begin again.)
                let known = batch[index..].iter().position(|seq| ahead.contains_key(seq));
                ahead.extend(self.execute_at_once(&batch[index..known.map_or(batch.len(), |at| index + at)]));
                ahead.remove(seq)
            });
            match outcome.unwrap_or_else(|| self.executor.execute(*seq, None)) {
                Ok(outcome) => {
                    crash_point!("drain.executed");
                    for dir in &outcome.dirs {
                        if !dirs.contains(dir) {
                            dirs.push(*dir);
                        }
                    }
                    done.push((*seq, outcome));
                }
                Err(why) => {
                    broke_off = Some((index, why));
                    break;
                }
            }
        }
        // Operations that were carried out together with the failed one, and are behind it in the queue.
        let (mut others, mut rest) = (Vec::new(), Vec::new());
        if let Some((index, _)) = &broke_off {
            for seq in &batch[index + 1..] {
                match ahead.remove(seq) {
                    Some(Ok(outcome)) => {
                        dirs.extend(outcome.dirs.iter().copied().filter(|dir| !dirs.contains(dir)).collect::<Vec<_>>());
                        done.push((*seq, outcome));
                    }
                    Some(Err(why)) => others.push((*seq, why)),
                    None => rest.push(*seq),
                }
            }
        }
        if !done.is_empty() {
            self.make_durable(done, &dirs);
        }
        // Only now: the catalog must not be ahead of what is still to become durable.
        if let Some((index, why)) = broke_off {
            rest.push(batch[index]);
            others.push((batch[index], why));
        }
        for (seq, why) in &others {
            if crate::drain::pause::may_be_done(surgetank_store::verdict::errno_of(why)) {
                self.metadata.write_tree().drain_queue().doubt(&[*seq]);
            }
            if why.kind() == std::io::ErrorKind::InvalidData {
                self.copy_again_if_missing(*seq);
            }
        }
        rest.extend(others.iter().map(|(seq, _)| *seq));
        rest.sort_unstable();
        rest.dedup();
        self.back_to_waiting(&rest);
        others.iter().for_each(|(seq, why)| self.attempts.failed(*seq, why));
    }

    /// A publication did not arrive as it was staged. If the store discarded the staged copy, the drain copies again.
    fn copy_again_if_missing(&self, seq: Seq) {
        let staged = || self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner);
        let place = staged().get(&seq).map(|copied| (copied.dir, copied.temporary.clone()));
        let Some((dir, name)) = place else { return };
        let (path, owner) = {
            let tree = self.metadata.read_tree();
            let owner = tree.ops.get(&seq).and_then(|op| tree.get(op.file())).map(surgetank_state::Inode::cred);
            (tree.applied_path(dir).map(|dir| dir.join(&name)), owner)
        };
        let Some((path, owner)) = path.zip(owner) else { return };
        let there = self.attempts.as_owner(owner, |who| self.base.store.stat(who, &path));
        if there.is_err_and(|why| why.kind() == std::io::ErrorKind::NotFound) {
            staged().remove(&seq);
        }
    }

    /// Where each request takes its time in the store, the drain publishes several files at a time: the first of these
    /// that are independent. In ordered mode each file shows in order; a file that did not get so far has no outcome.
    fn execute_at_once(&self, rest: &[Seq]) -> HashMap<Seq, std::io::Result<Done>> {
        let at_once_max = self.base.store.features().publications_at_once;
        if at_once_max < 2 {
            return HashMap::new();
        }
        let alone = self.alone(rest);
        if alone.len() < 2 {
            return HashMap::new();
        }
        let done = surgetank_types::sync::Mutex::new(HashMap::new());
        let record = |seq, outcome| done.lock().unwrap_or_else(PoisonError::into_inner).insert(seq, outcome);
        let turns = Turns::default();
        let published = at_once(alone.len(), at_once_max, &|index| {
            let seq = alone[index];
            if !self.base.config.ordered {
                record(seq, self.executor.execute(seq, None));
                return Ok(());
            }
            let turn = turns.of(index);
            match self.executor.execute(seq, Some(&turn)) {
                Ok(outcome) => {
                    record(seq, Ok(outcome));
                    turn.pass();
                }
                // (The staged copy is missing or bad. That stays so in its turn, and no later step would report the
                // reason.)
                Err(why) if turn.has_come() || why.kind() == std::io::ErrorKind::InvalidData => {
                    drop(record(seq, Err(why)));
                }
                Err(why) => tracing::debug!(%why, "before its turn"),
            }
            Ok(())
        });
        debug_assert!(published.is_ok(), "each has an outcome of its own");
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The files at the head of these that are independent of each other.
    fn alone(&self, rest: &[Seq]) -> Vec<Seq> {
        let tree = self.metadata.read_tree();
        let mut touched: HashSet<FileId> = HashSet::new();
        let mut names: HashSet<(FileId, Box<[u8]>)> = HashSet::new();
        let mut alone = Vec::new();
        for seq in rest {
            let Some(op) = tree.ops.get(seq) else { continue };
            let OpKind::Publish { file, dir, name, over } = &op.kind else { break };
            if tree.get(*file).is_none_or(|inode| inode.attr.kind != Kind::File) {
                break;
            }
            let over = over.filter(|over| over != file);
            let met = touched.contains(file) || over.is_some_and(|over| touched.contains(&over));
            if met || !names.insert((*dir, name.clone())) {
                break;
            }
            touched.extend([Some(*file), over].into_iter().flatten());
            alone.push(*seq);
        }
        alone
    }

    /// Makes the names that a batch changed survive the machine, then finishes the operations.
    fn make_durable(&self, done: Vec<(Seq, Done)>, dirs: &[FileId]) {
        let who = own_cred(self.owner_of(FileId::ROOT));
        // By file, not by path: a later operation of the batch may have moved or removed a directory.
        let dirs: Vec<StorePath> = {
            let tree = self.metadata.read_tree();
            dirs.iter().filter_map(|dir| tree.applied_path(*dir)).collect()
        };
        // A later operation of the batch may have removed a directory: its content needs no sync.
        let synced = self.attempts.pause.call(|| self.base.store.sync_dirs(who, &dirs)).or_else(|why| {
            if why.kind() == std::io::ErrorKind::NotFound {
                dirs.iter().try_for_each(|dir| match self.base.store.sync_dirs(who, std::slice::from_ref(dir)) {
                    Err(why) if why.kind() == std::io::ErrorKind::NotFound => Ok(()),
                    other => other,
                })
            } else {
                Err(why)
            }
        });
        if let Err(why) = synced {
            let seqs: Vec<Seq> = done.iter().map(|(seq, _)| *seq).collect();
            // Done, but perhaps not durable. Repetition is harmless: each operation recognises its own work.
            self.metadata.write_tree().drain_queue().doubt(&seqs);
            self.back_to_waiting(&seqs);
            if let Some(first) = seqs.first() {
                self.attempts.failed(*first, &why);
            }
            return;
        }
        crash_point!("drain.durable");
        self.attempts.pause.succeeded();
        self.finalise(done);
    }

    fn owner_of(&self, id: FileId) -> Cred {
        self.metadata.read_tree().get(id).map_or(Cred { uid: 0, gid: 0 }, surgetank_state::Inode::cred)
    }

    /// Syncs and compares the small copies of the batch. A copy that fails is sent back; in ordered mode the batch ends
    /// before it.
    fn compare(&self, batch: &[Seq]) -> Vec<Seq> {
        let small: Vec<Small> = {
            let tree = self.metadata.read_tree();
            batch
                .iter()
                .filter_map(|seq| {
                    let op = tree.ops.get(seq)?;
                    let Progress::Staged { copied, checked: false } = &op.progress else { return None };
                    let Copied { dir, temporary, staged, .. } = &**copied;
                    let inode = tree.get(op.file())?;
                    let is_spill = inode.spill().is_some_and(|spill| *spill == (*dir, temporary.clone()));
                    let (owner, is_written) = (inode.cred(), is_spill && !inode.sealed);
                    Some(Small {
                        seq: *seq,
                        path: tree.applied_path(*dir)?.join(temporary),
                        staged: *staged,
                        owner,
                        is_written,
                    })
                })
                .collect()
        };
        let mut bad: Option<Seq> = None;
        if !small.is_empty() {
            let paths: Vec<StorePath> = small.iter().map(|one| one.path.clone()).collect();
            let owner = small[0].owner;
            if let Err(why) = self.attempts.as_owner(owner, |who| self.base.store.settle(who, &paths)) {
                // (A member that has taken the directory over has removed some of them.)
                let is_gone = |one: &&Small| {
                    let there = self.attempts.as_owner(one.owner, |who| self.base.store.stat(who, &one.path));
                    there.is_err_and(|why| why.kind() == std::io::ErrorKind::NotFound)
                };
                let gone: Vec<&Small> = match why.kind() {
                    std::io::ErrorKind::NotFound => small.iter().filter(is_gone).collect(),
                    _ => Vec::new(),
                };
                if gone.is_empty() {
                    self.restage(small[0].seq, &why);
                }
                // (Not the store's refusal, which would last: the next copy may stay.)
                gone.iter().for_each(|one| self.restage(one.seq, &not_yet("its copy was removed from the store")));
                // (None is compared in this batch.)
                bad = Some(small[0].seq);
            }
            let compared: Vec<&Small> = small.iter().filter(|one| !one.is_written && bad.is_none()).collect();
            let different = surgetank_types::sync::Mutex::new(Vec::new());
            let at_once_max = self.base.store.features().publications_at_once;
            // (Copies behind a different one are compared the next time; the results are in `different`.)
            let _ = at_once(compared.len(), at_once_max, &|index| {
                let (one, how) = (compared[index], self.base.config.verify);
                let verified = self
                    .attempts
                    .as_owner(one.owner, |who| self.base.store.verify(who, &one.path, &one.staged, how, &|_| Ok(())));
                verified.map_err(|why| {
                    different.lock().unwrap_or_else(PoisonError::into_inner).push((index, why));
                    std::io::ErrorKind::InvalidData.into()
                })
            });
            let different = different.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some((index, why)) = different.into_iter().min_by_key(|(index, _)| *index) {
                self.attempts.found_corrupt(&why);
                self.restage(compared[index].seq, &why);
                bad = Some(compared[index].seq);
            }
        }
        let good = batch.iter().position(|seq| Some(*seq) == bad).unwrap_or(batch.len());
        self.metadata.write_tree().drain_queue().compared(&batch[..good])
    }

    /// Discards a copy that differs from its file, and copies again.
    fn restage(&self, seq: Seq, why: &std::io::Error) {
        {
            let mut tree = self.metadata.write_tree();
            tree.unstage(seq);
        }
        self.attempts.failed(seq, why);
    }

    /// From here on the operations cannot be taken back. The catalog first records that they are started, and what they
    /// will rename. It keeps where they start until they are done.
    fn commit_to(&self, batch: &[Seq]) -> Vec<Seq> {
        let mut tree = self.metadata.write_tree();
        let begun = tree.drain_queue().begin(batch);
        let seqs = begun.iter().map(|(seq, _)| *seq).collect();
        let copied = begun.into_iter().filter_map(|(seq, copied)| Some((seq, copied?)));
        self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner).extend(copied);
        drop(tree);
        if let Err(why) = self.metadata.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced: after a power loss an operation may be repeated");
        }
        seqs
    }

    /// Operations that were not carried out continue as before.
    fn back_to_waiting(&self, seqs: &[Seq]) {
        let mut tree = self.metadata.write_tree();
        let begun = {
            let mut staged = self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner);
            seqs.iter().map(|seq| (*seq, staged.remove(seq))).collect()
        };
        let released = tree.drain_queue().back_to_waiting(begun);
        // Perhaps no operation or program needs these files any more.
        released.into_iter().for_each(|id| self.metadata.reap(&mut tree, id));
    }

    /// The operations are durable and leave the queue.
    fn finalise(&self, done: Vec<(Seq, Done)>) {
        let mut tree = self.metadata.write_tree();
        let mut leaving = Vec::new();
        for (seq, outcome) in done {
            let Some(id) = tree.ops.get(&seq).map(|op| op.file()) else {
                continue;
            };
            let staged = self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
            let copied = staged.map(|copied| copied.prepared());
            self.counters.operations.fetch_add(1, Ordering::Relaxed);
            if let Some(copied) = &copied {
                self.counters.files.fetch_add(1, Ordering::Relaxed);
                // (For a sparse file, the written bytes.)
                let size_bytes = copied.identity.size_bytes;
                let data_bytes = tree.get(id).map_or(size_bytes, |inode| data_bytes(size_bytes, inode.attr.blocks));
                let written_bytes = self.stager.spares.written_bytes(id, seq).unwrap_or(data_bytes);
                self.counters.bytes.fetch_add(written_bytes, Ordering::Relaxed);
                if let Some(op) = tree.ops.get(&seq) {
                    let path = tree.logical_path(id);
                    self.base.events.durable(op.run, id, size_bytes, op.queued.elapsed(), path);
                }
            }
            self.metadata.retire(&mut tree, seq, copied.as_ref(), &outcome.removed);
            let file = tree.get(id).is_some_and(|inode| inode.attr.kind == Kind::File && inode.replica.is_some());
            if file
                && let Some(path) = tree.logical_path(id)
                && self.metadata.decided(&tree, id, &path).mode == Mode::Move
            {
                leaving.push((id, "its rule says move: evicted once it was in the store"));
            } else if file && self.emptying.is_emptying() {
                leaving.push((id, THE_END));
            }
        }
        self.metadata.commit(&mut tree);
        crash_point!("drain.done");
        drop(tree);
        for (id, reason) in leaving {
            if let Err(why) = self.files.eviction.evict(id, reason) {
                tracing::warn!(%why, "evict");
            }
        }
    }
}
