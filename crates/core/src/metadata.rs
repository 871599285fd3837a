//! Names and inodes: the tree, its lock, and what goes with each change of it (the catalog, the index of the shim, the handoff).
//!
//! [`transactions`] has the lock. Everything above this module asks here for a file's mode and for its place in the queue.

pub mod access;
pub(crate) mod asked;
pub(crate) mod closed;
pub mod index;
pub(crate) mod inode_locks;
pub mod intake;
pub mod losses;
pub(crate) mod pending_unlink;
pub(crate) mod shown;
pub(crate) mod transactions;

use std::time::Duration;

use foldhash::{HashMap, HashSet};

use surgetank_policy::config::{Config, KeepAtExit, Survives};
use surgetank_policy::hint::Advice;
use surgetank_policy::rule::{Decision, RuleSet};
use surgetank_state::{Inode, Name, Tree};
use surgetank_store::{Store, StorePath};
use surgetank_tier::Tiers;
use surgetank_types::model::{Change, FileId, Kind, Mark, Mode, OpKind, RunId, Seq};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use crate::base::deferred::DeferredSeals;
use crate::base::end::End;
use crate::base::notes::Notes;
use crate::base::runs::Runs;
use crate::base::succession::Succession;
use crate::base::users::{Permissions, is_drained};
use crate::base::{Base, Members};
use crate::catalog::Catalog;
use crate::content::{Location, Open};
use crate::metadata::closed::{Closed, Closes};
use crate::metadata::index::Shim;
use crate::metadata::inode_locks::{InodeGuard, InodeLocks};

/// A counter: files and spill temporaries with lower numbers may have no record.
/// For entries that only the agent changes: it invalidates the kernel's cache when it does.
pub(crate) const TTL_OURS: Duration = Duration::from_secs(3600);
/// Attributes of a file that a process writes directly. The kernel drops them itself at each write through a
/// descriptor. After a write through a mapping, the kernel may show old times for this long.
pub(crate) const TTL_WRITTEN: Duration = Duration::from_millis(50);

/// Each member of a pool numbers its files from its own number times this. So a number means one file of the whole pool.
pub const FILES_OF_A_MEMBER: u64 = 1 << 34;

/// Names and inodes, with their lock.
pub struct Metadata {
    catalog: Arc<dyn Catalog>,
    config: Arc<Config>,
    end: Arc<End>,
    rules: Arc<RuleSet>,
    store: Arc<dyn Store>,
    succession: Arc<Succession>,
    tiers: Arc<Tiers>,
    deferred: Arc<DeferredSeals>,
    notes: Arc<Notes>,
    permissions: Arc<Permissions>,
    runs: Arc<Runs>,
    tree: Mutex<Tree>,
    /// Signalled when the queue or the state of a file changes.
    pub(crate) changed: Condvar,
    /// The drain has an empty queue and sleeps.
    pub(crate) drain_asleep: AtomicBool,
    /// The drain was called after its last look.
    woken: AtomicBool,
    /// Read: a path of the store is in use. Write: a directory of the store changes its place.
    pub(crate) moving: RwLock<()>,
    /// A file is opened, sealed or evicted.
    inode_locks: InodeLocks,
    /// The open files.
    opens: Mutex<HashMap<FileId, Arc<Open>>>,
    pub(crate) shim: OnceLock<Arc<dyn Shim>>,
    /// Number of files of which a process may hold a granted descriptor.
    pub(crate) granted: AtomicUsize,
    /// Files that were closed, for the member of a pool that has them copied.
    pub(crate) closed: OnceLock<Closed>,
    /// Files of which other members have copies: a program that is to write one asks the mount.
    pub(crate) copied: Mutex<HashSet<FileId>>,
    /// Other files may have some, too.
    pub(crate) copies_unknown: AtomicBool,
    /// Files whose closes wait for copies.
    pub(crate) closes: Closes,
    /// What tells the pool of this agent from earlier ones, and the first number of its files there.
    pub(crate) pool: OnceLock<(String, u64)>,
    members: Arc<OnceLock<Arc<dyn Members>>>,
    /// Number of handles of the mount that can write.
    pub(crate) writing_handles: AtomicUsize,
    /// Number of delegated directories in the tree.
    pub(crate) delegated: AtomicUsize,
    pub(crate) delegation_ended: AtomicBool,
    /// The limit of waiting entries that the free room allows.
    intake_max: AtomicU64,
    granted_max: u64,
    pending_unlink_next: AtomicU8,
    /// Changes that the catalog could not take: the next commit tries them again.
    pub(crate) uncommitted: Mutex<Vec<Change>>,
}

impl Metadata {
    /// `root`: the directory of the store that is the root of the namespace.
    pub(crate) fn new(base: &Base, root: Inode) -> Self {
        Self {
            catalog: base.catalog.clone(),
            config: base.config.clone(),
            end: base.end.clone(),
            rules: base.rules.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            deferred: base.deferred.clone(),
            notes: base.notes.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            tree: Mutex::new(Tree::new(root)),
            changed: Condvar::new(),
            drain_asleep: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            moving: RwLock::new(()),
            inode_locks: InodeLocks::new(),
            opens: Mutex::default(),
            shim: OnceLock::new(),
            granted: AtomicUsize::new(0),
            closed: OnceLock::new(),
            copied: Mutex::default(),
            copies_unknown: AtomicBool::new(false),
            closes: Closes::default(),
            pool: OnceLock::new(),
            members: base.members.clone(),
            writing_handles: AtomicUsize::new(0),
            delegated: AtomicUsize::new(0),
            delegation_ended: AtomicBool::new(false),
            intake_max: AtomicU64::new(0),
            granted_max: intake::granted_max(),
            pending_unlink_next: AtomicU8::new(0),
            uncommitted: Mutex::default(),
        }
    }

    /// The decision of rules and hints for a file.
    pub(crate) fn decided(&self, tree: &Tree, id: FileId, path: &[u8]) -> Decision {
        let mut advice = Advice::default();
        tree.each_hint(id, |_, hints| advice.or(hints.advice()));
        let dir = tree.get(id).and_then(|inode| inode.logical.as_ref()).map(|(dir, _)| *dir);
        as_in(tree, dir, self.rules.decide_hinted(path, &advice))
    }

    /// The same for a file that is about to be made in a directory, under that path.
    pub(crate) fn decided_new(&self, tree: &Tree, dir: FileId, path: &[u8]) -> Decision {
        let mut advice = Advice::default();
        if tree.hints.any {
            if let Some(given) = tree.hints.names.get(path) {
                advice.or(given.advice());
            }
            tree.inherited(dir, FileId(u64::MAX), |_, hints| advice.or(hints.advice()));
        }
        as_in(tree, Some(dir), self.rules.decide_hinted(path, &advice))
    }

    /// Attributes reach the store with the content, or by an operation of their own if the content is already there. (A
    /// change of the owner needs its own operation: a new version keeps the owner of the store's file, as a write
    /// would.)
    pub(crate) fn queue_meta(&self, tree: &mut Tree, id: FileId, run: RunId, gives_away: bool) {
        let last = |inode: &Inode| inode.publish.and_then(|seq| tree.ops.get(&seq)).is_some_and(|op| op.is_last());
        let last = tree.get(id).is_some_and(last);
        self.queue_meta_behind(tree, id, run, gives_away, last);
    }

    fn queue_meta_behind(&self, tree: &mut Tree, id: FileId, run: RunId, gives_away: bool, last: bool) {
        let Some(inode) = tree.get(id) else { return };
        let waiting = inode
            .publish
            .and_then(|seq| tree.ops.get(&seq))
            .is_some_and(|op| op.progress == surgetank_state::Progress::Waiting);
        let needed = inode.is_dir() || tree.in_store(id) && (!waiting || gives_away);
        let staged = inode.publish.is_some() && !waiting;
        if id == FileId::ROOT && inode.applied.is_some() {
            return;
        }
        if !(needed || staged) {
            return;
        }
        // At most one operation waits. It moves to the end, after operations that would disturb it.
        if let Some(seq) = inode.set_meta
            && tree.ops.get(&seq).is_some_and(|op| op.progress == surgetank_state::Progress::Waiting)
        {
            tree.cancel(seq);
        }
        let seq = self.queue(tree, OpKind::SetMeta { file: id }, run, last, 0);
        if let Some(inode) = tree.get_mut(id) {
            inode.set_meta = Some(seq);
        }
    }

    /// A new version of a file does not change its directory's time, but the drain's work in the store does. If a
    /// program gave the directory a time, and the store's directories have times, the drain sets it again afterwards.
    pub(crate) fn queue_times(&self, tree: &mut Tree, dir: FileId, run: RunId, last: bool) {
        let given = |inode: &Inode| inode.dir.as_ref().is_some_and(|dir| dir.times_set);
        if !self.store.features().directories || !tree.get(dir).is_some_and(given) {
            return;
        }
        self.queue_meta_behind(tree, dir, run, false, last);
    }

    /// The copy for an operation is in a directory above the file's own. The time of that directory changes when the
    /// copy leaves.
    pub(crate) fn queue_times_behind(&self, tree: &mut Tree, seq: Seq, dir: FileId) {
        let Some(op) = tree.ops.get(&seq) else { return };
        let (run, last) = (op.run, op.is_last());
        let waits_behind = |later: &Seq| {
            *later > seq && tree.ops.get(later).is_some_and(|op| op.progress == surgetank_state::Progress::Waiting)
        };
        if tree.get(dir).is_some_and(|dir| dir.set_meta.as_ref().is_none_or(|later| !waits_behind(later))) {
            self.commit_apart(tree, |tree| self.queue_times(tree, dir, run, last));
        }
    }

    /// Who goes on changing what was queued does so with the next agent too.
    pub(crate) fn due_after_recovery(&self) -> std::time::Instant {
        surgetank_types::clock::tick()
            + if self.succession.again { self.config.quiet } else { std::time::Duration::ZERO }
    }

    /// No file has the name logically any more, and none follows: queues the removal of the store's file there.
    pub(crate) fn vacate(&self, tree: &mut Tree, dir: FileId, name: &Name, run: RunId) {
        let Some(occupant) = tree.planned(dir, name) else {
            return;
        };
        tree.bind(dir, name, |entry| entry.set_planned(None));
        let is_dir = tree.get(occupant).is_some_and(surgetank_state::Inode::is_dir);
        let name_bytes = Box::from(&**name);
        let kind = if is_dir {
            OpKind::RemoveDir { file: occupant, dir, name: name_bytes }
        } else {
            OpKind::Unlink { file: occupant, dir, name: name_bytes }
        };
        tree.own(dir);
        tree.own(occupant);
        let last = tree.belongs_last(dir);
        self.queue(tree, kind, run, last, 0);
        tree.txn.entry(dir, name);
    }

    /// The mode that the plain file has to get when the namespace forgets the file. Processes may have the plain file
    /// itself open, and then it is all that they can ask. `None`: it has that mode.
    pub(crate) fn perm_to_leave(&self, tree: &Tree, id: FileId) -> Option<u32> {
        let perm = tree.get(id)?.attr.perm;
        (self.shim.get().is_some() && perm & 0o777 | 0o600 != perm).then_some(perm)
    }

    /// Bytes that a device holds and the store does not.
    pub fn dirty_bytes_on(&self, tree: &Tree, device: &surgetank_tier::Device) -> u64 {
        device.used_bytes().saturating_sub(tree.spare_bytes(device.id()))
    }

    /// Bytes on all tiers that the store does not have.
    pub fn dirty_bytes(&self) -> u64 {
        let tree = self.read_tree();
        self.tiers.devices().map(|device| self.dirty_bytes_on(&tree, device)).sum()
    }

    /// Those of them on tiers that do not outlive the machine.
    pub fn volatile_dirty_bytes(&self) -> u64 {
        let tree = self.read_tree();
        let volatile = self.tiers.devices().filter(|device| device.survives() == Survives::Agent);
        volatile.map(|device| self.dirty_bytes_on(&tree, device)).sum()
    }

    /// Bytes on the device that the store does not have.
    pub fn dirty_bytes_of(&self, device: &surgetank_tier::Device) -> u64 {
        self.dirty_bytes_on(&self.read_tree(), device)
    }

    /// Files that their rule keeps out of the store.
    pub fn kept(&self, run: Option<RunId>, mode: Mode) -> Vec<(FileId, Vec<u8>, u64)> {
        let tree = self.read_tree();
        tree.iter()
            .filter(|(_, inode)| {
                inode.attr.kind == Kind::File
                    && inode.sealed
                    && inode.dirty()
                    && inode.publish.is_none()
                    && inode.logical.is_some()
            })
            // Files that an earlier agent left count for every run.
            .filter(|(_, inode)| run.is_none_or(|run| run.has(inode.run)))
            .filter(|(id, _)| !surgetank_state::is_for_another(&tree, *id))
            .filter_map(|(id, inode)| Some((id, tree.logical_path(id)?, inode.attr.size_bytes)))
            .filter(|(id, path, _)| self.mode_for(&tree, *id, path) == mode)
            .collect()
    }

    /// Is the file elsewhere in the store than before, or about to be?
    pub(crate) fn may_move(&self, id: FileId, before: Option<&StorePath>) -> bool {
        let tree = self.read_tree();
        tree.get(id).is_some() && (tree.moves_in_store(id) || tree.path_in_store(id).as_ref() != before)
    }

    /// A direct writer begins: the device counts it, because the agent does not see its writes.
    pub(crate) fn directly_written(&self, open: &Open) {
        open.written.store(true, Ordering::Relaxed);
        if !open.direct_writer.swap(true, Ordering::Relaxed)
            && let Location::Tier(device) = open.content().location
        {
            self.tiers.device(device).writer_opened();
        }
    }

    /// Queues the publication of the file's present version, if its rule says so and the version is dirty.
    pub(crate) fn queue_publish(&self, tree: &mut Tree, id: FileId) {
        closed::note(self, tree, id);
        let Some(path) = tree.logical_path(id) else {
            return;
        };
        let decision = self.decided(tree, id, &path);
        let Some(inode) = tree.get(id) else { return };
        let mode = self.mode_as(tree, id, decision.mode);
        // Sealed after the end of the command, when the `keep` files had been collected already.
        let kept =
            mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drain && self.runs.is_ending(inode.run);
        let drained = kept || is_drained(mode) || inode.spill().is_some();
        let is_drained_here = drained && !surgetank_state::is_for_another(tree, id);
        if !inode.dirty() || !is_drained_here || inode.publish.is_some() || inode.is_dir() {
            return;
        }
        let (run, delay) = (inode.run, 1_u32 << inode.reopened.min(7));
        let last = self.runs.is_last(&decision);
        if let Some((dir, name)) = inode.applied.clone() {
            let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over: Some(id) };
            let seq = self.queue(tree, kind, run, last, delay);
            if let Some(inode) = tree.get_mut(id) {
                inode.publish = Some(seq);
            }
            self.queue_times(tree, dir, run, last);
            return;
        }
        let Some((dir, name)) = inode.logical.clone() else {
            return;
        };
        let more = inode.extra.as_ref().map(|extra| extra.more_names.clone()).unwrap_or_default();
        tree.hasten_dirs(dir, last);
        let over = tree.planned(dir, &name);
        let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over };
        let seq = self.queue(tree, kind, run, last, delay);
        if let Some(inode) = tree.get_mut(id) {
            inode.publish = Some(seq);
        }
        for (dir, name) in more {
            tree.hasten_dirs(dir, last);
            // A link does not replace a file: the file that has the name goes first.
            if tree.planned(dir, &name).is_some_and(|holder| holder != id) {
                self.vacate(tree, dir, &name, run);
            }
            self.queue(tree, OpKind::Link { file: id, dir, name: Box::from(&*name) }, run, last, delay);
            self.queue_times(tree, dir, run, last);
        }
        self.queue_times(tree, dir, run, last);
    }

    pub(crate) fn lock_inode(&self, id: FileId) -> InodeGuard<'_> {
        self.inode_locks.lock(id)
    }

    /// For the drain: the holder of the lock may wait for room, and room comes from drained files.
    pub(crate) fn lock_inode_within(&self, id: FileId, timeout: Duration) -> Option<InodeGuard<'_>> {
        self.inode_locks.lock_within(id, timeout)
    }

    /// For callers that may hold another inode's lock or a gate: they pass over a busy inode, because waiting could deadlock.
    pub(crate) fn try_lock_inode(&self, id: FileId) -> Option<InodeGuard<'_>> {
        self.inode_locks.try_lock(id)
    }

    pub(crate) fn opens(&self) -> MutexGuard<'_, HashMap<FileId, Arc<Open>>> {
        self.opens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn open_of(&self, id: FileId) -> Option<Arc<Open>> {
        self.opens().get(&id).cloned()
    }

    /// An operation was queued. A drain that has work looks at the queue by itself, so only a sleeping drain is woken.
    /// A wake-up for every operation costs programs more than it gains. The caller does not hold the tree's lock.
    pub(crate) fn nudge(&self) {
        if self.drain_asleep.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    /// A caller waits: the drain looks now. The caller does not hold the tree's lock.
    pub(crate) fn wake(&self) {
        self.woken.store(true, Ordering::Relaxed);
        // The drain holds the tree's lock from its last look to its wait. The lock here keeps the signal out of that gap.
        drop(self.read_tree());
        self.changed.notify_all();
    }

    /// The drain's wait: until a wake-up, at most `at_most`.
    pub(crate) fn wait_woken(&self, at_most: Duration) {
        let tree = self.read_tree();
        if !self.woken.swap(false, Ordering::Relaxed) {
            drop(self.wait_changed(tree, at_most));
            self.woken.store(false, Ordering::Relaxed);
        }
    }

    /// The mode of this very file or link. Its rule or hint decides, with two exceptions:
    /// - A file that the store has under the name is not a temporary. The drain brings a new version of it to the
    ///   store; the end of the run does not drop it.
    /// - Links and special files have no content that a tier could keep. The drain makes them in the store, like directories.
    pub(crate) fn mode_for(&self, tree: &Tree, id: FileId, path: &[u8]) -> Mode {
        self.mode_as(tree, id, self.decided(tree, id, path).mode)
    }

    /// The same, when the caller has already asked the rules.
    pub(crate) fn mode_as(&self, tree: &Tree, id: FileId, ruled: Mode) -> Mode {
        let Some(inode) = tree.get(id) else {
            return ruled;
        };
        let thrown_away =
            ruled == Mode::Remove || (ruled == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drop);
        let takes_over = || {
            let (dir, name) = inode.logical.as_ref()?;
            tree.planned(*dir, name).filter(|holder| *holder != id)
        };
        match inode.attr.kind {
            // (The member that has the content waits for the store.)
            Kind::File if inode.home().is_some() && !is_drained(ruled) => Mode::Copy,
            Kind::File if thrown_away && (inode.applied.is_some() || takes_over().is_some()) => Mode::Copy,
            Kind::File => ruled,
            _ if ruled == Mode::Keep => Mode::Copy,
            _ => ruled,
        }
    }

    /// The mode drains the file at the end at the latest. Until then the node's death costs the file.
    pub(crate) fn drained_sometime(&self, mode: Mode) -> bool {
        is_drained(mode) || (mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drain)
    }

    /// How long the kernel may cache the attributes of a file.
    pub(crate) fn ttl(&self, id: FileId, inode: &Inode) -> Duration {
        let open = (!inode.sealed).then(|| self.opens().get(&id).cloned()).flatten();
        if open.as_ref().is_some_and(|open| open.granted.load(Ordering::Relaxed))
            || inode.dir.as_ref().is_some_and(|dir| dir.is_delegated)
        {
            // The kernel gets no notice of a write.
            Duration::ZERO
        } else if open.is_some_and(|open| open.directly_written()) {
            TTL_WRITTEN
        } else if inode.owned && id != FileId::ROOT && !inode.may_be_copy() && self.config.pool.is_none() {
            TTL_OURS
        } else {
            self.config.store_ttl
        }
    }

    /// Inode number as programs see it.
    pub fn ino(&self, id: FileId) -> u64 {
        self.read_tree().get(id).map_or(0, |inode| inode.attr.ino)
    }

    /// Also called after the catalog started over.
    pub(crate) fn write_down_doubt(&self) {
        let mut tree = self.write_tree();
        let below = tree.doubtful_below;
        if below == 0 {
            return;
        }
        tree.txn.mark(Mark::DoubtfulBelow, below);
        drop(tree);
        if let Err(why) = self.sync_catalog() {
            tracing::warn!(%why, "the catalog cannot be synced");
        }
    }

    /// The store has the directory under its new name. On some stores that is a copy of everything below. Each file
    /// there is then another object, and still the agent's own.
    pub(crate) fn copied_with(&self, tree: &mut Tree, dir: FileId) {
        let features = self.store.features();
        if features.atomic_renames || features.plain_files || !tree.get(dir).is_some_and(Inode::is_dir) {
            return;
        }
        for id in tree.applied_below(dir) {
            let Some(inode) = tree.get_mut(id).filter(|inode| !inode.is_dir()) else { continue };
            if let Some(known) = inode.identity.as_ref().filter(|known| !known.is_touched()) {
                inode.identity = Some(known.touched());
                if inode.owned {
                    tree.txn.file(id);
                }
            }
        }
    }
}

/// Do other members of a pool change a store that is on a server? What only read files made the agent's own is then not
/// believed longer than the rest of the store.
pub(crate) fn shares_a_server(metadata: &Metadata) -> bool {
    metadata.config.pool.is_some() && !metadata.store.features().plain_files
}

/// Content for another member's name is not drained from here: that member asks for it.
fn as_in(tree: &Tree, dir: Option<FileId>, decision: Decision) -> Decision {
    let is_for_another = dir.is_some() && dir == tree.homes;
    if is_for_another { Decision { mode: Mode::Remove, fsync: None, ..decision } } else { decision }
}

/// May a member have a copy of the file's present content?
pub(crate) fn may_have_copies(metadata: &Metadata, id: FileId) -> bool {
    metadata.copies_unknown.load(Ordering::SeqCst)
        || metadata.copied.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
}

/// This agent's number in its pool. `None`: it is in none.
pub(crate) fn this_member(metadata: &Metadata) -> Option<u32> {
    metadata.pool.get().and_then(|(_, first)| u32::try_from(first / FILES_OF_A_MEMBER).ok())
}

/// In a pool: a process may write the file, and its next version comes after what was queued before this moment.
pub(crate) fn hold_place(metadata: &Metadata, tree: &mut Tree, id: FileId) {
    let Some(member) = this_member(metadata).filter(|_| metadata.config.ordered) else { return };
    tree.order.hold(&mut tree.next_seq, place_of_descriptors(id), member);
}

/// Under this number the descriptors of a file hold its place in a pool's queue. (Numbers of handles are small.)
pub(crate) fn place_of_descriptors(id: FileId) -> u64 {
    u64::MAX - id.0
}
