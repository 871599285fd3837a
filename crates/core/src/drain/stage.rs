//! Staging: makes a complete, compared copy under a temporary name before anything is visible.

use std::collections::HashMap;
use std::io;

use surgetank_policy::hint::Acting;
use surgetank_policy::hint::module::Moment;
use surgetank_state::{Copied, Inode, Name, Op, Progress, is_first};
use surgetank_store::{Cred, Meta, Staged, StorePath, Verify};
use surgetank_types::model::{FileId, NodeId, OpKind, Seq};
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::base::{Base, StoreCopy};
use crate::content::{Content, Location};
use crate::drain::attempts::Attempts;
use crate::drain::counters::DrainCounters;
use crate::drain::meter::Meter;
use crate::drain::rests::{Rests, others_wait};
use crate::drain::spares::{Spare, Spares};
use crate::drain::throttle::Throttle;
use crate::files::Files;
use crate::metadata::Metadata;
use crate::metadata::asked::decision_if_asked;
use crate::namespace::homes::content_for;

/// The thread that copies a file of at least this size also syncs and compares it, so that other files continue
/// meanwhile. Smaller files are synced in batches, where a batch costs less than each file by itself.
const LARGE_BYTES: u64 = 8 << 20;

/// How long an operation waits whose directory is not in its place yet.
const PUT_OFF: std::time::Duration = std::time::Duration::from_millis(20);

/// How long an operation waits whose file is about to be moved out of memory.
const UNTIL_MOVED: std::time::Duration = std::time::Duration::from_millis(300);

struct Job {
    seq: Seq,
    id: FileId,
    version: u32,
    epoch: u32,
    eager: bool,
    size_bytes: u64,
    /// No program writes it any more.
    sealed: bool,
    dir: FileId,
    temporary: Name,
    path: StorePath,
    /// The path at which it will be published, as things are now.
    bound: StorePath,
    owner: Cred,
    meta: Meta,
    /// The content is in the store already, under the temporary name.
    in_place: bool,
    /// An fsync published the file before.
    again: bool,
    /// The temporary has an earlier version, of which the copy is made.
    spare: Option<Spare>,
    /// Another member of the pool has the content.
    home: Option<NodeId>,
    /// Its hints that are asked at operations.
    acting: Acting,
}

/// A copy that is complete in the store.
struct Complete {
    staged: Staged,
    /// It is synced and compared.
    checked: bool,
    /// What was written for it.
    copied_bytes: u64,
}

/// The content for which an operation copies.
struct Wanted {
    seq: Seq,
    id: FileId,
    epoch: u32,
    eager: bool,
}

/// Copies files to temporaries in the store.
pub(crate) struct Stager {
    base: Base,
    metadata: Arc<Metadata>,
    files: Arc<Files>,
    attempts: Arc<Attempts>,
    counters: Arc<DrainCounters>,
    meter: Arc<Meter>,
    throttle: Throttle,
    pub(super) spares: Spares,
    /// Held while the drain stages something by its path, and for writing while a directory of the store moves.
    /// Otherwise a copy could end up in the directory that takes the other's place.
    pub(super) staging: RwLock<()>,
    for_others: ForOthers,
    /// The last try of a copy that another member makes.
    attempt: AtomicU64,
    /// How many bytes of each file in staging are copied.
    copying: Mutex<HashMap<Seq, u64>>,
}

impl Stager {
    pub(super) fn new(
        base: &Base,
        metadata: &Arc<Metadata>,
        files: &Arc<Files>,
        attempts: &Arc<Attempts>,
        meter: &Arc<Meter>,
    ) -> Self {
        Self {
            throttle: Throttle::new(base.config.drain_bytes_per_second_max),
            spares: Spares::default(),
            base: base.clone(),
            metadata: metadata.clone(),
            files: files.clone(),
            counters: attempts.counters.clone(),
            attempts: attempts.clone(),
            meter: meter.clone(),
            staging: RwLock::new(()),
            for_others: ForOthers::default(),
            attempt: AtomicU64::new(0),
            copying: Mutex::default(),
        }
    }

    /// How much of the operation's file is copied.
    pub(super) fn copied_bytes(&self, seq: Seq) -> u64 {
        self.copying.lock().unwrap_or_else(PoisonError::into_inner).get(&seq).copied().unwrap_or(0)
    }

    pub(super) fn stage(&self, seq: Seq) {
        let _staging = self.staging.read().unwrap_or_else(surgetank_types::sync::PoisonError::into_inner);
        let Some(job) = self.job(seq) else {
            self.put_off(seq);
            return;
        };
        let mut work = self.base.end.work();
        self.copying.lock().unwrap_or_else(PoisonError::into_inner).insert(seq, 0);
        if let Some(bytes) = self.copy(seq, job) {
            work.copied(bytes);
        }
        drop(work);
        // Complete or given up; the queue knows which.
        self.copying.lock().unwrap_or_else(PoisonError::into_inner).remove(&seq);
        self.metadata.write_tree().staging.retain(|(other, _)| *other != seq);
    }

    /// Returns how many bytes were copied, if any.
    fn copy(&self, seq: Seq, mut job: Job) -> Option<u64> {
        match self.stage_job(&mut job) {
            Ok(Complete { staged, checked, copied_bytes }) => {
                let copied_bytes = (!job.in_place).then_some(copied_bytes);
                let mut tree = self.metadata.write_tree();
                let unchanged = tree.get(job.id).is_some_and(|inode| job.eager || inode.epoch == job.epoch);
                let copied = Copied { dir: job.dir, temporary: job.temporary, staged, version: job.version };
                if !tree.drain_queue().staged(seq, &copied, checked, !unchanged) && !job.in_place {
                    tree.discards.push((copied.dir, copied.temporary, job.owner));
                }
                copied_bytes
            }
            Err(why) => {
                let (id, epoch, eager) = (job.id, job.epoch, job.eager);
                let cancelled = !self.current(&Wanted { seq, id, epoch, eager });
                {
                    let mut tree = self.metadata.write_tree();
                    if !job.in_place {
                        tree.discards.push((job.dir, job.temporary.clone(), job.owner));
                    }
                    // Second copies take room that a first one needs.
                    if matches!(why.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) {
                        self.spares.give_up(&mut tree, true);
                    }
                }
                // An operation before it moves its directory, or moved it before a crash.
                let early = why.kind() == io::ErrorKind::NotFound && !self.is_head(seq) && !self.is_absent(job.id);
                // An operation that is not taken back although its content changed copies again when the content is
                // complete.
                if early || cancelled {
                    self.put_off(seq);
                } else {
                    self.attempts.failed(seq, &why);
                }
                None
            }
        }
    }

    /// The directory is removed, and copies in it are made again elsewhere. They belong to later operations, for files
    /// that were in the directory when they were queued. Returns whether there were any, or an earlier agent's.
    pub(super) fn gives_up_copies_in(&self, dir: FileId, (path, owner): (&StorePath, Cred)) -> io::Result<bool> {
        // Also copies of operations in the same batch, a little later.
        let mut given_up = Vec::new();
        self.spares.forget_in(dir);
        self.attempts.staged.lock().unwrap_or_else(PoisonError::into_inner).retain(|seq, copied| {
            let stays = copied.dir != dir;
            if !stays {
                given_up.push(*seq);
            }
            stays
        });
        let mut tree = self.metadata.write_tree();
        let is_staged_there = |op: &Op| matches!(&op.progress, Progress::Staged { copied, .. } if copied.dir == dir);
        given_up.extend(tree.ops.iter().filter(|(_, op)| is_staged_there(op)).map(|(seq, _)| *seq));
        given_up.into_iter().for_each(|seq| tree.unstage(seq));
        drop(tree);
        self.attempts.as_owner(owner, |who| self.files.temporaries.discard_left_in(who, path))
    }

    fn is_head(&self, seq: Seq) -> bool {
        is_first(&self.metadata.read_tree(), seq)
    }

    /// Is it the tier that does not have the file?
    fn is_absent(&self, id: FileId) -> bool {
        self.files.copies.absence(&self.metadata.read_tree(), id).is_some()
    }

    /// The operation is retried a little later, without counting a failure.
    fn put_off(&self, seq: Seq) {
        let moves = |file| self.base.end.interrupted().contains(&file);
        let by = |file| if moves(file) { UNTIL_MOVED } else { PUT_OFF };
        self.metadata.write_tree().drain_queue().put_off(seq, by);
    }

    /// Collects what the copy needs, under the tree's lock.
    fn job(&self, seq: Seq) -> Option<Job> {
        let mut tree = self.metadata.write_tree();
        let op = tree.ops.get(&seq)?;
        let OpKind::Publish { file: id, dir: bound_dir, .. } = &op.kind else {
            return None;
        };
        let (id, bound_dir) = (*id, *bound_dir);
        let inode = tree.get(id)?;
        let spill = inode.spill().cloned();
        let in_place = spill.is_some();
        let again = inode.applied.is_some();
        let (dir, temporary) = spill.unwrap_or_else(|| (tree.nearest_applied(bound_dir), self.attempts.temporary(seq)));
        let home = inode.home();
        let spare = if in_place || home.is_some() { None } else { self.spares.take(&mut tree, id, dir) };
        let temporary = spare.as_ref().map_or(temporary, |spare| spare.temporary.clone());
        let Some(path) = tree.applied_path(dir).map(|dir| dir.join(&temporary)) else {
            // (A spare is given up with its directory.)
            return None;
        };
        let op = tree.ops.get(&seq)?;
        let inode = tree.get(id)?;
        let bound = tree.destination(&op.kind).and_then(|(dir, name)| {
            let dir = tree.applied_path(dir).or_else(|| tree.logical_path(dir).map(StorePath))?;
            Some(dir.join(&name))
        });
        let acting = decision_if_asked(&self.metadata, &tree, id, Moment::Drains);
        let acting = acting.map(|decision| decision.acting).unwrap_or_default();
        let job = Job {
            seq,
            id,
            version: inode.version,
            epoch: inode.epoch,
            eager: op.is_taken_open(inode),
            size_bytes: inode.attr.size_bytes,
            sealed: inode.sealed,
            dir,
            temporary,
            bound: bound.unwrap_or_else(|| path.clone()),
            path,
            owner: inode.cred(),
            meta: meta_of(inode),
            in_place,
            again,
            spare,
            home,
            acting,
        };
        tree.staging.push((seq, job.dir));
        if job.dir != bound_dir {
            self.metadata.queue_times_behind(&mut tree, seq, job.dir);
        }
        Some(job)
    }

    fn is_nameless(&self, id: FileId) -> bool {
        self.metadata.read_tree().get(id).is_some_and(|inode| inode.logical.is_none())
    }

    /// Is the operation still wanted, for the content that the thread copies?
    fn current(&self, wanted: &Wanted) -> bool {
        let tree = self.metadata.read_tree();
        tree.ops.get(&wanted.seq).is_some_and(|op| op.progress == Progress::Staging)
            && tree.get(wanted.id).is_some_and(|inode| wanted.eager || inode.epoch == wanted.epoch)
    }

    fn stage_job(&self, job: &mut Job) -> io::Result<Complete> {
        crash_point!("drain.stage");
        let (seq, in_place) = (job.seq, job.in_place);
        let wanted = Wanted { seq, id: job.id, epoch: job.epoch, eager: job.eager };
        let rests = Rests::new(&job.acting, !job.eager && !self.base.config.ordered);
        let gate = |bytes: u64| -> io::Result<()> {
            let is_wanted = || !self.attempts.stopping() && self.current(&wanted);
            self.attempts.pause.rests();
            rests.between_pieces(&|| others_wait(&self.base, &self.metadata, Some(seq)), &is_wanted);
            // Content already in the store is only read there, and an empty piece waits for no turn.
            if !in_place && bytes > 0 {
                self.throttle.pass(bytes, &is_wanted);
            }
            self.attempts.pause.moved();
            self.counters.staged_bytes.fetch_add(bytes, Ordering::Relaxed);
            self.meter.pass(bytes);
            if let Some(copied) = self.copying.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&seq) {
                *copied += bytes;
            }
            rests.next_piece();
            if is_wanted() { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
        };
        let free = |_: u64| {
            self.attempts.pause.moved();
            if self.attempts.stopping() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        let store = &self.base.store;
        if let Some(home) = job.home {
            let is_wanted = || !self.attempts.stopping() && self.current(&wanted);
            let staged = self.stage_elsewhere(home, job, &is_wanted)?;
            if !is_wanted() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            return Ok(Complete { staged, checked: true, copied_bytes: staged.identity.size_bytes });
        }
        let staged = if job.in_place {
            self.attempts.as_owner(job.owner, |who| store.stage_in_place(who, &job.path, &job.meta, &gate))?
        } else {
            let content = self.content_of(job.id);
            let mut read_from = None;
            let file = match content {
                Some(content) => {
                    if let Location::Tier(device) = content.location {
                        read_from = Some(self.base.tiers.device(device).counters());
                    }
                    content.file
                }
                // Begun before a crash and deleted since: later operations need it in the store, to remove it again.
                None if self.is_nameless(job.id) => {
                    tracing::info!(path = %job.path, "nothing is left of a deleted file: an empty one is published, until its turn to go");
                    Arc::new(std::fs::File::open("/dev/null")?)
                }
                None => return Err(io::Error::from_raw_os_error(libc::ENOENT)),
            };
            self.files.temporaries.expect_temporaries_in(job.dir);
            let counted = |bytes: u64| {
                gate(bytes)?;
                if let Some(counters) = read_from {
                    counters.bytes_out.fetch_add(bytes, Ordering::Relaxed);
                }
                Ok(())
            };
            if let Some(complete) = self.stage_on_spare(job, &file, &counted)? {
                return Ok(complete);
            }
            self.attempts
                .as_owner(job.owner, |who| store.stage_file(who, &job.path, &job.bound, &file, &job.meta, &counted))?
        };
        // Another program changed the plain file: its rest must not replace what the store has.
        if job.sealed && !job.eager && !self.is_nameless(job.id) && staged.identity.size_bytes != job.size_bytes {
            let (is, was) = (staged.identity.size_bytes, job.size_bytes);
            let why = format!("its plain file has {is} bytes, and had {was} when it was closed");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let copied_bytes = staged.identity.size_bytes;
        let keeps_blocks = self.keeps_blocks(job);
        if job.size_bytes < LARGE_BYTES && !keeps_blocks && !store.features().syncs_each_file() {
            return Ok(Complete { staged, checked: false, copied_bytes });
        }
        self.attempts
            .as_owner(job.owner, |who| {
                store.settle(who, std::slice::from_ref(&job.path))?;
                if job.in_place && !self.metadata.read_tree().get(job.id).is_some_and(|inode| inode.sealed) {
                    return Ok(());
                }
                if keeps_blocks && let Some(sums) = store.block_sums(who, &job.path, &staged)? {
                    self.spares.staged(job.id, job.seq, sums, copied_bytes);
                    self.know_published(job, who);
                    return Ok(());
                }
                store.verify(who, &job.path, &staged, self.base.config.verify, &free)
            })
            .inspect_err(|why| self.attempts.found_corrupt(why))?;
        Ok(Complete { staged, checked: true, copied_bytes })
    }

    /// The member that has the content makes the copy.
    fn stage_elsewhere(&self, home: NodeId, job: &Job, is_wanted: &dyn Fn() -> bool) -> io::Result<Staged> {
        let Some(members) = self.base.members.get() else {
            let why = format!("its content is at member {} of a pool, and this agent is in none", home.0);
            return Err(io::Error::other(why));
        };
        self.files.temporaries.expect_temporaries_in(job.dir);
        let now = u64::try_from(surgetank_types::clock::now().nanos).unwrap_or(0);
        let last = self.attempt.fetch_max(now, Ordering::SeqCst);
        let attempt = if now > last { now } else { self.attempt.fetch_add(1, Ordering::SeqCst) + 1 };
        let (path, bound, meta, acting) = (&job.path, &job.bound, &job.meta, &job.acting);
        let copy = |who| StoreCopy { who, path, bound, meta, acting, attempt };
        let staged = self.attempts.as_owner(job.owner, |who| members.stage(home, job.id, &copy(who), is_wanted))?;
        if job.sealed && !self.is_nameless(job.id) && staged.identity.size_bytes != job.size_bytes {
            let (is, was) = (staged.identity.size_bytes, job.size_bytes);
            let why = format!("its content at member {} has {is} bytes, and had {was} when it was closed", home.0);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(staged)
    }

    fn content_of(&self, id: FileId) -> Option<Content> {
        match self.metadata.open_of(id) {
            Some(open) => Some(open.content()),
            None => self.files.copies.content_of(id),
        }
    }

    /// Makes the copy of another member's file, whose content is here. A newer try for the same file ends this one, and
    /// waits for that: two must not write one temporary. The same try is made once.
    pub(super) fn stage_for_another(&self, number: u64, copy: &StoreCopy<'_>) -> io::Result<Staged> {
        if !copy.path.is_temporary() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let alone = self.for_others.begin(number, copy.attempt).ok_or(io::ErrorKind::Interrupted)?;
        let mut done = alone.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, staged)) = done.filter(|(attempt, _)| *attempt == copy.attempt) {
            return Ok(staged);
        }
        let is_wanted = || !self.attempts.stopping() && self.for_others.is_newest(number, copy.attempt);
        let rests = Rests::new(copy.acting, !self.base.config.ordered);
        let others = || self.for_others.has_others(number) || others_wait(&self.base, &self.metadata, None);
        let gate = |bytes: u64| -> io::Result<()> {
            rests.between_pieces(&others, &is_wanted);
            if bytes > 0 {
                self.throttle.pass(bytes, &is_wanted);
            }
            self.meter.pass(bytes);
            rests.next_piece();
            if is_wanted() { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
        };
        let stays = |_: u64| if is_wanted() { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) };
        gate(0)?;
        let id = content_for(&self.metadata, number).ok_or(io::ErrorKind::NotFound)?;
        let content = self.content_of(id).ok_or(io::ErrorKind::NotFound)?;
        let mut work = self.base.end.work();
        let store = &self.base.store;
        let staged = store.stage_file(copy.who, copy.path, copy.bound, &content.file, copy.meta, &gate)?;
        store.settle(copy.who, std::slice::from_ref(copy.path))?;
        store.verify(copy.who, copy.path, &staged, self.base.config.verify, &stays)?;
        work.copied(staged.identity.size_bytes);
        *done = Some((copy.attempt, staged));
        Ok(staged)
    }

    /// Ends the tries before this one, and waits for that.
    pub(super) fn end_stage_for_another(&self, number: u64, attempt: u64) {
        if let Some(alone) = self.for_others.begin(number, attempt) {
            drop(alone.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Will the next version probably be made of a spare? A program syncs the file repeatedly, and the size is right. A copy
    /// that is to be read from the device is read as a whole.
    fn keeps_blocks(&self, job: &Job) -> bool {
        let repeated = job.eager && job.again && !job.in_place && !job.sealed;
        repeated && self.base.config.verify == Verify::Cache && self.spares.wants(job.id, job.size_bytes)
    }

    /// The blocks of the version that the store has now: it can become the spare. An error means that it does not.
    fn know_published(&self, job: &Job, who: Cred) {
        let known = {
            let tree = self.metadata.read_tree();
            tree.get(job.id).and_then(|inode| Some((*inode.identity.as_ref()?, inode.checksum()?)))
        };
        let Some((identity, checksum)) = known.filter(|_| !self.spares.knows_published(job.id)) else { return };
        match self.base.store.block_sums(who, &job.bound, &Staged { identity, checksum }) {
            Ok(sums) => self.spares.is_published(job.id, identity, sums),
            Err(why) => tracing::debug!(%why, path = %job.bound, "the version before is not kept"),
        }
    }

    /// Makes the copy of the file's spare. `None`: it has none, or another program uses the spare; then the job has another
    /// temporary, for a copy of the whole.
    fn stage_on_spare(
        &self,
        job: &mut Job,
        file: &std::fs::File,
        gate: surgetank_store::Gate<'_>,
    ) -> io::Result<Option<Complete>> {
        let Some(spare) = job.spare.take() else { return Ok(None) };
        let made = self.attempts.as_owner(job.owner, |who| {
            // (Another attempt, with other ids, begins with what the spare has.)
            let mut sums = spare.sums.clone();
            let earlier = (&spare.identity, &mut sums);
            let restaged = self.base.store.restage_file(who, &job.path, file, &job.meta, earlier, gate);
            restaged.map(|(staged, copied_bytes)| (staged, copied_bytes, sums))
        });
        match made {
            Ok((staged, copied_bytes, sums)) => {
                // The last version is compared as a whole.
                if self.keeps_blocks(job) {
                    self.spares.staged(job.id, job.seq, sums, copied_bytes);
                    return Ok(Some(Complete { staged, checked: true, copied_bytes }));
                }
                let is_short = job.sealed && !job.eager && staged.identity.size_bytes != job.size_bytes;
                if !is_short {
                    self.attempts
                        .as_owner(job.owner, |who| {
                            let how = self.base.config.verify;
                            self.base.store.verify(who, &job.path, &staged, how, &|_| Ok(()))
                        })
                        .inspect_err(|why| self.attempts.found_corrupt(why))?;
                    return Ok(Some(Complete { staged, checked: true, copied_bytes }));
                }
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => return Err(why),
            Err(why) => {
                self.attempts.found_corrupt(&why);
                tracing::debug!(%why, path = %job.path, "a spare copy is not used");
            }
        }
        let mut tree = self.metadata.write_tree();
        let used = std::mem::replace(&mut job.temporary, self.attempts.temporary(job.seq));
        // (A copy under the same name replaces it.)
        if used != job.temporary {
            tree.discards.push((job.dir, used, job.owner));
        }
        let dir = tree.applied_path(job.dir).ok_or(io::ErrorKind::NotFound)?;
        job.path = dir.join(&job.temporary);
        Ok(None)
    }
}

/// Copies for other members, by file.
#[derive(Default)]
pub(super) struct ForOthers {
    files: Mutex<HashMap<u64, (u64, Made)>>,
}

/// The last copy that was made, with its try. Locked while one is made.
type Made = Arc<Mutex<Option<(u64, Staged)>>>;

/// With more files than this, those of which no copy is being made are forgotten.
const FILES_MAX: usize = 10_000;

impl ForOthers {
    /// `None`: there is a newer try.
    fn begin(&self, file: u64, attempt: u64) -> Option<Made> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.len() > FILES_MAX {
            files.retain(|_, (_, made)| Arc::strong_count(made) > 1);
        }
        let (newest, made) = files.entry(file).or_default();
        if attempt < *newest {
            return None;
        }
        *newest = attempt;
        Some(made.clone())
    }

    /// Is another file being copied?
    fn has_others(&self, file: u64) -> bool {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter().any(|(other, (_, made))| *other != file && Arc::strong_count(made) > 1)
    }

    fn is_newest(&self, file: u64, attempt: u64) -> bool {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.get(&file).is_some_and(|(newest, _)| *newest == attempt)
    }
}

/// All of a file but its bytes, as the store must have it.
pub(super) fn meta_of(inode: &Inode) -> Meta {
    Meta {
        perm: inode.attr.perm,
        uid: inode.attr.uid,
        gid: inode.attr.gid,
        times: Some((inode.attr.atime, inode.attr.mtime)),
        xattrs: inode.extra.as_ref().and_then(|extra| extra.xattrs.clone()),
    }
}
