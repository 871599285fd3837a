//! The namespace: the POSIX meaning of every operation, once, for every door.
//!
//! Names and attributes live in memory ([`Tree`]). The catalog keeps them, and the drain brings them to the store
//! through the operation queue. Content is in plain files on tiers ([`content`]). The store alone has files that no
//! process has touched.
//!
//! ARCHITECTURE.md, "Locks, in their order", has the order of the locks. The namespace does no store I/O under `tree`. It does a tier's
//! operations on names under `tree`, so that a path means one thing at a time.
//!
//! The danger that this avoids: two doors, or a door and the drain, disagree about what a name means.

mod attributes;
pub mod content;
mod copies;
mod deadline;
mod delegation;
mod eager_publish;
mod events;
mod evict;
mod fetch;
mod files;
mod groups;
mod handoff;
mod hints;
mod index_publisher;
pub(crate) mod inode_locks;
mod listing;
mod locks;
pub(crate) mod losses;
mod memory_pressure;
mod names;
mod negative_cache;
mod pending_unlink;
mod prefetch;
mod questions;
mod recover;
mod refresh;
mod resolve;
mod revalidation;
mod scrub;
mod temporaries;
mod timed_query;
mod transactions;
mod waits;
mod xattrs;

use crate::report::run::EventKind;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use foldhash::{HashMap, HashSet};

use crate::catalog::Catalog;
use surgetank_policy::config::{Config, KeepAtExit, Timing};
use surgetank_policy::placement::History;
use surgetank_policy::rule::{Decision, RuleSet};
use surgetank_store::{Cred, Store};
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::{Errno, Error, Fault, FsResult, Result};
use surgetank_types::model::{Attr, Caller, FileId, Kind, Mode, RunId};

pub use attributes::SetAttr;
use content::{Handle, Open};
pub(crate) use copies::Absence;
pub use copies::Newest;
pub use deadline::Outlook;
pub use delegation::Claimed;
pub use eager_publish::Real;
pub(crate) use evict::THE_END;
pub use files::{Grant, LEFT_TO_THE_MOUNT, Opened, STORE_TO_BE_ASKED, Short};
pub(crate) use files::{HIDDEN_PREFIX, KEPT_FOR};
pub use handoff::{Keeper, Request, Survival};
pub use hints::Given;
pub use index_publisher::{Shim, Shown};
use inode_locks::InodeGuard;
pub use listing::Listed;
pub use prefetch::BroughtIn;
pub use questions::{Queued, Stuck, Undurable, Waiting, Where};
pub(crate) use recover::{ORPHANS, Worth, is_damage, went_down, went_down_with, worth};
pub use recover::{is_spent, keep_copy, unproven_name};
use surgetank_state::{Inode, Tree};
pub use timed_query::StoreQueries;
pub use waits::Waits;

/// What the kernel's side of the mount can do for the namespace.
pub trait Door: Send + Sync {
    /// Does the kernel take plain files at all?
    fn passes_through(&self) -> bool;
    /// Registers a plain file as the backing of a file of the mount. Processes then read and write it natively.
    fn back(&self, file: BorrowedFd<'_>) -> std::io::Result<u32>;
    fn unback(&self, backing: u32);
    /// Makes the kernel drop the attributes that it caches, and the pages unless `attributes_only`. `false`: the kernel
    /// does not know the file.
    fn invalidate(&self, file: FileId, attributes_only: bool) -> bool;
    fn invalidate_name(&self, dir: FileId, name: &[u8]);
    /// Returns when the mount has released ([`Namespace::release`]) the files that processes closed until now, or when
    /// this takes too long.
    fn await_closes(&self);
}

/// The answer of a look-up or a creation.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    pub id: FileId,
    pub attr: Attr,
    /// How long the kernel may cache name and attributes.
    pub ttl: Duration,
}

/// The run to which a process belongs. The agent knows it.
pub type RunOf = Box<dyn Fn(u32) -> RunId + Send + Sync>;
/// The run that a process claims to belong to, if such a run exists.
pub type RunKnown = Box<dyn Fn(RunId) -> RunId + Send + Sync>;

#[derive(Debug, Default)]
pub struct Counters {
    pub direct_opens: AtomicU64,
    pub mediated_opens: AtomicU64,
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub store_stats: AtomicU64,
    pub store_lists: AtomicU64,
    pub spills: AtomicU64,
}

/// The last decision's reason as a sentence and in brief. Most decisions have the reason of the one before.
struct LastReason {
    reason: surgetank_policy::placement::Reason,
    sentence: Arc<str>,
    brief: Arc<str>,
}

pub struct Namespace {
    pub config: Config,
    pub rules: RuleSet,
    pub store: Arc<dyn Store>,
    pub tiers: Arc<Tiers>,
    pub catalog: Arc<dyn Catalog>,
    pub(crate) tree: Mutex<Tree>,
    /// Signalled when the queue or the state of a file changes.
    pub(crate) changed: Condvar,
    /// The drain has an empty queue and sleeps.
    pub(crate) drain_asleep: AtomicBool,
    /// The drain was called after its last look.
    woken: AtomicBool,
    /// Signalled when the seal of a file is deferred.
    tender: Condvar,
    pub(crate) moving: RwLock<()>,
    inode_locks: inode_locks::InodeLocks,
    pub queries: StoreQueries,
    pub waits: Arc<Waits>,
    /// Since when a command waits for all of its run, or of everything, to be drained.
    waited_for: Mutex<HashMap<Option<RunId>, Instant>>,
    /// Writers for whom there is no room.
    short: Mutex<files::Shorts>,
    opens: Mutex<HashMap<FileId, Arc<Open>>>,
    /// Copies on tiers of files that processes read from the store, while they have them open.
    waiting_copies: prefetch::Waiting,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    listings: Mutex<HashMap<u64, Arc<Mutex<listing::Snapshot>>>>,
    locks: locks::Locks,
    pub succession: handoff::Succession,
    next_handle: AtomicU64,
    door: OnceLock<Arc<dyn Door>>,
    shim: OnceLock<Arc<dyn Shim>>,
    /// Number of files of which a process may hold a granted descriptor.
    handed: surgetank_types::sync::atomic::AtomicUsize,
    /// Number of handles of the mount that can write.
    writing_handles: surgetank_types::sync::atomic::AtomicUsize,
    /// Number of delegated directories in the tree.
    delegated: surgetank_types::sync::atomic::AtomicUsize,
    delegation_ended: AtomicBool,
    /// The limit of waiting claims that the free room allows.
    claims_max: AtomicU64,
    handed_max: u64,
    /// A new file's name does not change any decision that is due when the file is created.
    delegates_any: bool,
    run_of: OnceLock<RunOf>,
    run_known: OnceLock<RunKnown>,
    prefetcher: OnceLock<Box<dyn Fn(Vec<u8>) + Send + Sync>>,
    history: Mutex<History>,
    /// Files that a process still held writable when the last writer closed. The agent tries again; their `Open` stays.
    deferred: Mutex<Vec<files::DeferredSeal>>,
    unsynced: Mutex<files::Unsynced>,
    unsynced_came: Condvar,
    promises: files::Promises,
    gone_next: AtomicU32,
    last_reason: Mutex<Option<LastReason>>,
    pub(crate) unwritten: Mutex<Vec<surgetank_types::model::Change>>,
    pub(crate) troubles: Mutex<Vec<Noted>>,
    losses: Mutex<std::collections::BTreeMap<Box<[u8]>, surgetank_types::model::LostRecord>>,
    /// Number of callers that wait for the whole queue.
    pub(crate) final_drains: AtomicU32,
    /// Odd from the end of the last command until the next user arrives.
    emptyings: AtomicU32,
    pub(crate) end: deadline::End,
    /// Runs whose command has ended. The drain starts at once with what they still queue.
    pub(crate) ending: Mutex<HashSet<RunId>>,
    pub counters: Counters,
    pub events: events::Events,
    /// The agent checks permissions itself (a mount without `default_permissions`).
    pub checks_permissions: bool,
    /// The supplementary groups of the agent itself.
    groups: Vec<u32>,
    started: Instant,
    key: String,
}

/// An event that went wrong and that the agent reports to the user.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Noted {
    pub path: String,
    pub what: String,
    pub run: RunId,
    /// It makes `run` and `wait` return 3.
    pub counts: bool,
    /// Name of the agent's version, when another client's file has the name.
    pub kept_as: Option<String>,
    pub at_unix_seconds: i64,
}

/// The least time for which the kernel caches a name, whether the name exists or not.
pub const NAME_TTL_MIN: Duration = Duration::from_secs(1);
/// For entries that only the agent changes: it invalidates the kernel's cache when it does.
const TTL_OURS: Duration = Duration::from_secs(3600);
/// Attributes of a file that a process writes directly. The kernel drops them itself at each write through a
/// descriptor. After a write through a mapping, the kernel may show old times for this long.
const TTL_WRITTEN: Duration = Duration::from_millis(50);

impl Namespace {
    /// Loads the catalog, finds the files on the tiers and resumes the queue.
    pub fn open(
        config: Config,
        store: Arc<dyn Store>,
        tiers: Arc<Tiers>,
        catalog: Arc<dyn Catalog>,
        key: String,
        checks_permissions: bool,
    ) -> Result<Arc<Self>> {
        Self::open_after(config, store, tiers, catalog, key, checks_permissions, Survival::default())
    }

    /// The same with a handoff: this agent may continue after a killed one, and the next agent after this one.
    pub fn open_after(
        config: Config,
        store: Arc<dyn Store>,
        tiers: Arc<Tiers>,
        catalog: Arc<dyn Catalog>,
        key: String,
        checks_permissions: bool,
        survival: Survival,
    ) -> Result<Arc<Self>> {
        let rules = RuleSet::new(&config.rules)?;
        let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        let stat = store.stat(who, &surgetank_store::StorePath::root()).map_err(|why| {
            Error::new(format!("the store {} cannot be read", store.describe()))
                .why(why)
                .remedy("check that the directory exists and that you may enter it")
        })?;
        let mut root = Inode::new(stat.attr);
        root.identity = Some(Box::new(stat.identity));
        root.owned = true;
        let delegates_any = rules.place_all_alike() && store.features().plain_files;
        let waits = Arc::new(Waits::default());
        let namespace = Arc::new(Self {
            rules,
            tiers,
            catalog,
            tree: Mutex::new(Tree::new(root)),
            changed: Condvar::new(),
            drain_asleep: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            tender: Condvar::new(),
            moving: RwLock::new(()),
            inode_locks: inode_locks::InodeLocks::new(),
            queries: StoreQueries::new(store.clone(), config.retry, config.store_ttl, waits.clone()),
            waits,
            waited_for: Mutex::default(),
            store,
            short: Mutex::default(),
            opens: Mutex::default(),
            waiting_copies: prefetch::Waiting::default(),
            handles: RwLock::default(),
            listings: Mutex::default(),
            locks: locks::Locks::kept_by(survival.keeper.clone()),
            succession: handoff::Succession::new(survival),
            next_handle: AtomicU64::new(1),
            door: OnceLock::new(),
            shim: OnceLock::new(),
            handed: surgetank_types::sync::atomic::AtomicUsize::new(0),
            writing_handles: surgetank_types::sync::atomic::AtomicUsize::new(0),
            delegated: surgetank_types::sync::atomic::AtomicUsize::new(0),
            delegation_ended: AtomicBool::new(false),
            claims_max: AtomicU64::new(0),
            handed_max: delegation::handed_max(),
            delegates_any,
            run_of: OnceLock::new(),
            run_known: OnceLock::new(),
            prefetcher: OnceLock::new(),
            history: Mutex::new(History::new()),
            deferred: Mutex::default(),
            unsynced: Mutex::default(),
            unsynced_came: Condvar::new(),
            promises: files::Promises::default(),
            gone_next: AtomicU32::new(0),
            last_reason: Mutex::default(),
            unwritten: Mutex::default(),
            troubles: Mutex::default(),
            losses: Mutex::default(),
            final_drains: AtomicU32::new(0),
            emptyings: AtomicU32::new(0),
            end: deadline::End::default(),
            ending: Mutex::default(),
            counters: Counters::default(),
            events: events::Events::default(),
            checks_permissions,
            groups: rustix::process::getgroups().unwrap_or_default().iter().map(|gid| gid.as_raw()).collect(),
            started: clock::tick(),
            key,
            config,
        });
        recover::Recovery::new(&namespace).recover()?;
        namespace.restore();
        namespace.revalidate_with_store();
        Ok(namespace)
    }

    /// The mount registers itself. Before this call, everything is mediated.
    pub fn set_door(&self, door: Arc<dyn Door>) {
        // A second door for the same mount would be a programming error; the first one stays.
        drop(self.door.set(door));
        self.give_up_backings();
    }
    pub fn set_run_of(&self, run_of: RunOf) {
        drop(self.run_of.set(run_of));
    }
    pub fn set_run_known(&self, run_known: RunKnown) {
        drop(self.run_known.set(run_known));
    }
    pub(crate) fn lock_inode(&self, id: FileId) -> InodeGuard<'_> {
        self.inode_locks.lock(id)
    }
    /// For the drain: the holder of the lock may wait for room, and room comes from drained files.
    pub(crate) fn lock_inode_within(&self, id: FileId, patience: Duration) -> Option<InodeGuard<'_>> {
        self.inode_locks.lock_within(id, patience)
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
    pub(crate) fn handle(&self, fh: u64) -> FsResult<Arc<Handle>> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        let lost = || if self.succession.is_lost_handle(fh) { Errno::STALE } else { Errno::BADF };
        handles.get(&fh).cloned().ok_or_else(|| Fault::from(lost()))
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
    fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }
    fn run(&self, caller: &Caller) -> RunId {
        self.run_of.get().map_or(RunId(0), |run_of| run_of(caller.pid))
    }
    fn run_claimed(&self, run: RunId) -> RunId {
        self.run_known.get().map_or(RunId(0), |known| known(run))
    }
    fn who(caller: &Caller) -> Cred {
        Cred { uid: caller.uid, gid: caller.gid }
    }

    /// The rules' decision for a path, without hints.
    pub fn decide(&self, path: &[u8]) -> Decision {
        self.rules.decide(path)
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
            Kind::File if thrown_away && (inode.applied.is_some() || takes_over().is_some()) => Mode::Copy,
            Kind::File => ruled,
            _ if ruled == Mode::Keep => Mode::Copy,
            _ => ruled,
        }
    }
    fn drained(mode: Mode) -> bool {
        matches!(mode, Mode::Copy | Mode::Move)
    }
    /// The mode drains the file at the end at the latest. Until then the node's death costs the file.
    fn drained_sometime(&self, mode: Mode) -> bool {
        Self::drained(mode) || (mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drain)
    }
    fn is_last(&self, decision: &Decision) -> bool {
        decision.timing == Timing::Last && self.final_drains.load(Ordering::Relaxed) == 0 && !self.end.is_hurried()
    }

    /// How long the kernel may cache the attributes of a file.
    fn ttl(&self, id: FileId, inode: &Inode) -> Duration {
        let open = (!inode.sealed).then(|| self.opens().get(&id).cloned()).flatten();
        if open.as_ref().is_some_and(|open| open.handed.load(Ordering::Relaxed))
            || inode.dir.as_ref().is_some_and(|dir| dir.is_delegated)
        {
            // The kernel gets no notice of a write.
            Duration::ZERO
        } else if open.is_some_and(|open| open.directly_written()) {
            TTL_WRITTEN
        } else if inode.owned && id != FileId::ROOT && !inode.may_be_copy() {
            TTL_OURS
        } else {
            self.config.store_ttl
        }
    }

    /// How long the kernel may cache that a name of the directory does not exist, right after a look-up failed. The
    /// time is always short, for two reasons. Another client may have made the directory in the store, with files in
    /// it. And the next agent asks the store for the directory's content. Neither of them can correct everything that
    /// the kernel cached.
    pub fn absent_ttl(&self, dir: FileId, name: &[u8]) -> Duration {
        crash_point!("lookup.missed");
        let mut tree = self.write_tree();
        // A process with the shim may have created it since. It looked here before, and did not notify the kernel.
        let absent = tree.entry(dir, name).and_then(surgetank_state::Entry::logical).is_none();
        match tree.dir_mut(dir).filter(|d| d.complete && absent && !d.is_delegated) {
            // Only the agent makes names in its own directory. The kernel sees each one, or gets a notification.
            Some(d) => {
                d.kernel_negative_entries.add(name);
                self.config.store_ttl.max(NAME_TTL_MIN)
            }
            None => Duration::ZERO,
        }
    }

    /// Inode number as programs see it.
    pub fn ino(&self, id: FileId) -> u64 {
        self.read_tree().get(id).map_or(0, |inode| inode.attr.ino)
    }

    /// May the caller do this (1 execute or search, 2 write, 4 read)? Asked only where the kernel does not check.
    fn permit(&self, caller: &Caller, attr: &Attr, want: u32) -> FsResult<()> {
        if !self.checks_permissions || caller.uid == 0 {
            return Ok(());
        }
        let allows = |class: u32| class & want == want;
        let (group, other) = (allows(attr.perm >> 3), allows(attr.perm));
        let allowed = if caller.uid == attr.uid {
            allows(attr.perm >> 6)
        } else if group == other {
            // Both classes agree, so the look-up of the group is saved.
            group
        } else if self.is_in_group(caller, attr.gid) {
            group
        } else {
            other
        };
        if allowed { Ok(()) } else { Err(Errno::ACCESS.into()) }
    }

    /// May the caller change attributes of the file?
    fn permit_owner(&self, caller: &Caller, attr: &Attr) -> FsResult<()> {
        if self.checks_permissions && caller.uid != 0 && caller.uid != attr.uid {
            return Err(Errno::PERM.into());
        }
        Ok(())
    }

    /// Checks the bits that access(2) asks for.
    pub fn access(&self, caller: &Caller, id: FileId, mask: u32) -> FsResult<()> {
        let attr = self.getattr(id, None)?.attr;
        if caller.uid == 0 && attr.kind == Kind::File && mask & 1 != 0 && attr.perm & 0o111 == 0 {
            return Err(Errno::ACCESS.into());
        }
        self.permit(caller, &attr, mask & 7)
    }

    /// Notes an event that the agent reports to the user.
    pub(crate) fn note(&self, run: RunId, path: String, what: impl Into<String>, counts: bool) {
        self.note_kept(run, path, what, counts, None);
    }

    pub(crate) fn note_kept(
        &self,
        run: RunId,
        path: String,
        what: impl Into<String>,
        counts: bool,
        kept_as: Option<String>,
    ) {
        let what = what.into();
        tracing::warn!(path, what, "noted");
        if kept_as.is_some() {
            self.events.count(EventKind::Conflict, "store", "another client had changed it in the store", 0);
        }
        let at_unix_seconds = clock::now().secs();
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounded: the queue has the facts that matter; this is only the story around them.
        if troubles.len() < 10_000 {
            let noted = Noted { path, what, run, counts, kept_as, at_unix_seconds };
            self.succession.hand_off_noted(&noted);
            troubles.push(noted);
        }
    }

    pub fn troubles(&self) -> Vec<Noted> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The part of the names of temporaries in the store that identifies this agent.
    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}
