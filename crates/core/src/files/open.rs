//! Open and release. The first open of an inode decides whether it is direct or mediated.
//!
//! Invariant: an inode has at most one `Open`; its users are counted, and the last one gives it up.
//!
//! The danger that this avoids: a process writes to a file that the drain publishes, or that has lost its last name.

use std::time::Duration;

use surgetank_policy::config::Config;
use surgetank_policy::rule::RuleSet;
use surgetank_state::{Progress, Tree};
use surgetank_store::Store;
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind, RunId};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::deferred::DeferredSeals;
use crate::base::events::Events;
use crate::base::runs::Runs;
use crate::base::succession::Succession;
use crate::base::users::Permissions;
use crate::base::{Base, Counters};
use crate::content::{Content, Handle, Location, Open, runs_it};
use crate::files::copies::Copies;
use crate::files::descriptor_grant::Descriptors;
use crate::files::dispatcher::Dispatcher;
use crate::files::evict::Eviction;
use crate::files::fetch_open::Fetches;
use crate::files::open_files::OpenFiles;
use crate::files::place::Placer;
use crate::files::promise::Promises;
use crate::files::seal::Sealer;
use crate::files::transfer::Transfers;
use crate::files::{Grant, LEFT_TO_THE_MOUNT, Opened, Via};
use crate::handoff::Record;
use crate::metadata::access::Access;
use crate::metadata::{Metadata, closed};

/// A rename limit: more renames during one open are not normal use.
const MOVES_MAX: usize = 1000;
/// The last name went between the look-up and the open. The kernel and the agent's other doors then look the name up
/// again, because a process that creates a file must not get "not found".
pub(crate) const REMOVED: Errno = Errno::STALE;
/// A spilled file is being published as it is: a writer would now write to the store's own file. (The number differs
/// from `STORE_TO_BE_ASKED`, which the caller gets.)
pub(super) const PUBLISHED_AS_IT_IS: Errno = Errno::ALREADY;
const PUBLISHED_TRIES_MAX: usize = 20;
const BEGUN_TIMEOUT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Opens, closes and seals files.
pub struct Opener {
    pub(super) config: Arc<Config>,
    pub(super) counters: Arc<Counters>,
    pub(super) events: Arc<Events>,
    pub(super) rules: Arc<RuleSet>,
    pub(super) store: Arc<dyn Store>,
    pub(super) succession: Arc<Succession>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) deferred: Arc<DeferredSeals>,
    pub(super) permissions: Arc<Permissions>,
    pub(super) runs: Arc<Runs>,
    pub(super) access: Arc<Access>,
    pub(super) copies: Arc<Copies>,
    pub(super) descriptors: Arc<Descriptors>,
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(super) eviction: Arc<Eviction>,
    pub(super) fetches: Arc<Fetches>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) open_files: Arc<OpenFiles>,
    pub(super) placer: Arc<Placer>,
    pub(super) sealer: Arc<Sealer>,
    pub(super) transfers: Arc<Transfers>,
    pub(super) promises: Promises,
}

impl Opener {
    #[expect(clippy::too_many_arguments, reason = "one for each component that it uses")]
    pub(crate) fn new(
        base: &Base,
        access: &Arc<Access>,
        copies: &Arc<Copies>,
        descriptors: &Arc<Descriptors>,
        dispatcher: &Arc<Dispatcher>,
        eviction: &Arc<Eviction>,
        fetches: &Arc<Fetches>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        placer: &Arc<Placer>,
        sealer: &Arc<Sealer>,
        transfers: &Arc<Transfers>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            counters: base.counters.clone(),
            events: base.events.clone(),
            rules: base.rules.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            deferred: base.deferred.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            access: access.clone(),
            copies: copies.clone(),
            descriptors: descriptors.clone(),
            dispatcher: dispatcher.clone(),
            eviction: eviction.clone(),
            fetches: fetches.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            placer: placer.clone(),
            sealer: sealer.clone(),
            transfers: transfers.clone(),
            promises: Promises::default(),
        }
    }

    /// Opens a file for a program that comes through the mount. `flags`: as for open(2). Errors: the file is unknown or
    /// not regular, permissions, no room, the store.
    pub fn open_file(&self, caller: &Caller, id: FileId, flags: i32) -> FsResult<Opened> {
        let truncates = flags & libc::O_TRUNC != 0;
        // A process that only empties the file is a writer until it closes it, and needs a writer's permission.
        let (writes, want) = match flags & libc::O_ACCMODE {
            libc::O_RDONLY if truncates => (true, 6),
            libc::O_RDONLY => (false, 4),
            libc::O_WRONLY => (true, 2),
            _ => (true, 6),
        };
        {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).ok_or(REMOVED)?;
            match inode.attr.kind {
                Kind::File => {}
                Kind::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::INVAL.into()),
            }
            // Linux asks only for execute permission when the kernel runs a program.
            let want = if runs_it(flags) { 1 } else { want };
            self.permissions.permit(caller, &inode.attr, want)?;
        }
        // A program that runs must not change. The kernel refuses an open for writing before it asks the agent. It
        // refuses an open that only empties the file after that, when the file would already be empty.
        let only_empties = truncates && flags & libc::O_ACCMODE == libc::O_RDONLY;
        if only_empties && self.metadata.opens().get(&id).is_some_and(|open| open.is_run()) {
            return Err(Errno::TXTBSY.into());
        }
        if writes {
            self.dispatcher.before_change(caller, id)?;
        } else {
            self.dispatcher.before_read(caller, id)?;
        }
        let run = if writes { self.runs.run(caller) } else { RunId(0) };
        let fsync = || {
            self.metadata
                .read_tree()
                .logical_path(id)
                .and_then(|path| self.rules.decide(&path).fsync)
                .or(self.config.fsync)
        };
        let open = self.open_inode(id, writes, truncates, run, Via::of_flags(flags, fsync));
        if open.as_ref().is_err_and(|fault| fault.errno == REMOVED) {
            self.sent_back(caller.pid);
        } else {
            self.served(caller.pid);
        }
        Ok(self.register(open?, writes, flags, run))
    }

    pub(crate) fn register(&self, open: Arc<Open>, writes: bool, flags: i32, run: RunId) -> Opened {
        let fh = self.open_files.new_handle();
        let backing = open.backing_or(|content| self.open_files.back(open.id, content));
        let shared = open.direct && backing.is_none();
        let grant = match backing {
            Some(backing) => {
                self.counters.direct_opens.fetch_add(1, Ordering::Relaxed);
                Grant::Direct(backing)
            }
            None => {
                self.counters.mediated_opens.fetch_add(1, Ordering::Relaxed);
                Grant::Mediated
            }
        };
        self.succession.hand_off_handle(fh, &open, writes, flags, run);
        let keep_cache = !writes && !shared && grant == Grant::Mediated && self.copies.may_keep_pages(&open);
        let handle = Handle::new(open, writes, flags);
        self.metadata.writing_handles.fetch_add(usize::from(writes), Ordering::SeqCst);
        if writes {
            self.metadata.recall_for_writer();
        }
        self.open_files.handles.write().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(handle));
        Opened { handle: fh, grant, keep_cache, shared }
    }

    /// Prepares the content of an inode and counts one more user. The caller gives it back with `close_inode`.
    pub(crate) fn open_inode(
        &self,
        id: FileId,
        writes: bool,
        truncates: bool,
        run: RunId,
        via: Via,
    ) -> FsResult<Arc<Open>> {
        let _inode = self.metadata.lock_inode(id);
        self.open_locked(id, writes, truncates, run, via)
    }

    /// The caller holds the inode's lock.
    pub(crate) fn open_locked(
        &self,
        id: FileId,
        writes: bool,
        truncates: bool,
        run: RunId,
        via: Via,
    ) -> FsResult<Arc<Open>> {
        for _ in 0..PUBLISHED_TRIES_MAX {
            match self.open_once(id, writes, truncates, run, via) {
                Err(fault) if fault.errno == PUBLISHED_AS_IT_IS => self.await_progress(Tree::is_published_as_it_is, id),
                opened => return opened,
            }
        }
        Err(Errno::IO.into())
    }

    fn open_once(&self, id: FileId, writes: bool, truncates: bool, run: RunId, via: Via) -> FsResult<Arc<Open>> {
        let active = self.metadata.opens().get(&id).cloned();
        let open = match active {
            Some(open)
                if matches!(via, Via::Shim(_))
                    && (open.is_run() || !(open.direct && matches!(open.content().location, Location::Tier(_)))) =>
            {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
            // A thread of the agent moves its bytes, for a moment only.
            Some(open) if via.is_only() && !open.direct => return Err(Errno::AGAIN.into()),
            Some(open) => {
                if writes {
                    self.eviction.drop_waiting(id);
                    self.make_writable(&open, truncates)?;
                } else if via.is_mount() {
                    self.copies.look_whether_still(&open);
                }
                open
            }
            None => {
                let open = Arc::new(self.while_it_moves(id, || {
                    self.copies.reread(id, truncates)?;
                    self.open_content(id, writes, truncates, via)
                })?);
                self.metadata.opens().insert(id, open.clone());
                self.still_has_content(&open)?;
                open
            }
        };
        let begin = || -> FsResult<()> {
            if writes {
                self.await_begun(id);
                self.begin_write(&open, run)?;
            }
            if truncates { self.transfers.truncate_content(&open, 0) } else { Ok(()) }
        };
        if let Err(fault) = begin() {
            self.count_user(&open, writes);
            self.close_user(&open, writes);
            return Err(fault);
        }
        self.count_user(&open, writes);
        Ok(open)
    }

    /// Another request may have removed the last name before the file counted as open. The content is discharged then.
    fn still_has_content(&self, open: &Open) -> FsResult<()> {
        let on_tier = matches!(open.content().location, Location::Tier(_));
        if on_tier && self.metadata.read_tree().get(open.id).is_none_or(|inode| inode.replica.is_none()) {
            self.metadata.opens().remove(&open.id);
            // The file has no user, so its place in the shim's index is free.
            self.metadata.show(&self.metadata.read_tree(), open.id);
            self.sealer.tiers_unreserve(open);
            self.open_files.unback(open);
            return Err(REMOVED.into());
        }
        Ok(())
    }

    pub(crate) fn count_user(&self, open: &Open, writes: bool) {
        let mut users = open.users.lock().unwrap_or_else(PoisonError::into_inner);
        if writes {
            users.writers += 1;
        } else {
            users.readers += 1;
        }
        drop(users);
        if let Some(inode) = self.metadata.write_tree().get_mut(open.id) {
            inode.handles += 1;
        }
    }

    /// Repeats `act` when the drain renames the file between the look at its path and the use of it. The file is the
    /// store's own, or the temporary in the store that has the content.
    fn while_it_moves<T>(&self, id: FileId, act: impl Fn() -> FsResult<T>) -> FsResult<T> {
        for _ in 0..MOVES_MAX {
            let before = self.metadata.read_tree().path_in_store(id);
            match act() {
                Err(fault)
                    if matches!(
                        fault.errno,
                        Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR
                    ) && self.metadata.may_move(id, before.as_ref()) =>
                {
                    surgetank_types::sync::thread::sleep(std::time::Duration::from_micros(200));
                }
                other => return other,
            }
        }
        act()
    }

    /// The same for a question: at the moment of the answer, the path may have been another file's.
    pub(crate) fn asked_of_it<T>(&self, id: FileId, ask: impl Fn() -> FsResult<T>) -> FsResult<T> {
        for _ in 0..MOVES_MAX {
            let before = self.metadata.read_tree().applied_path(id);
            let answer = self.while_it_moves(id, &ask)?;
            if self.metadata.read_tree().applied_path(id) == before {
                return Ok(answer);
            }
        }
        ask()
    }

    /// An open inode gets its first writer. The caller holds the inode's lock.
    fn make_writable(&self, open: &Arc<Open>, truncates: bool) -> FsResult<()> {
        self.fetches.fetch_whole(open, truncates)?;
        let content = open.content();
        if open.direct && content.location == Location::Store {
            self.times_in_place(open.id, &content.file)?;
        }
        if open.direct || content.writable {
            return Ok(());
        }
        // Only mediated readers so far: replace the descriptor that they use.
        let _gate = open.gate.write().unwrap_or_else(PoisonError::into_inner);
        let id = open.id;
        match content.location {
            // Not by its path: the path may be another file's by now.
            Location::Tier(_) | Location::StoreTemporary => {
                let file = crate::content::reopen_writable(&content.file)?;
                open.replace(Content { file: Arc::new(file), writable: true, ..content });
            }
            // `fetch_whole` has waited for all of its bytes.
            Location::Arriving => return Err(Errno::STALE.into()),
            Location::Store => {
                let size_bytes = self.metadata.read_tree().get(id).ok_or(Errno::NOENT)?.attr.size_bytes;
                if size_bytes <= self.config.copy_up_bytes_max && !self.copies.only_in_place(id) {
                    let placed = self.placer.open_placed(id, Some(&content.file), size_bytes, Via::Mount)?;
                    let fresh = placed.content();
                    open.charged_bytes.store(size_bytes, Ordering::Relaxed);
                    self.open_files.unback(&placed);
                    let file = if fresh.writable {
                        fresh.file
                    } else {
                        Arc::new(crate::content::reopen_writable(&fresh.file)?)
                    };
                    open.replace(Content { file, location: fresh.location, writable: true });
                } else {
                    let file = self.while_it_moves(id, || {
                        let (path, owner) = {
                            let tree = self.metadata.read_tree();
                            let inode = tree.get(id).ok_or(Errno::NOENT)?;
                            (tree.applied_path(id).ok_or(Errno::NOENT)?, inode.cred())
                        };
                        Ok(self.open_in_store(id, owner, &path, true)?)
                    })?;
                    self.times_in_place(id, &file)?;
                    open.replace(Content { file: Arc::new(file), location: Location::Store, writable: true });
                }
            }
        }
        Ok(())
    }

    /// A publication that began before a crash must complete, because later operations build on it. It would wait until
    /// this writer closes, so the writer waits for the copy instead. A request that deletes or replaces the file also
    /// waits. The copy is among the first things that a new agent does.
    pub(crate) fn await_begun(&self, id: FileId) {
        let is_begun = |tree: &Tree, id: FileId| {
            let op = tree.get(id).filter(|inode| inode.applied.is_none()).and_then(|inode| inode.publish);
            let op = op.and_then(|seq| tree.ops.get(&seq)).filter(|op| op.certain && op.error.is_none());
            op.is_some_and(|op| matches!(op.progress, Progress::Waiting | Progress::Staging))
        };
        self.await_progress(is_begun, id);
    }

    /// Waits while the condition holds, for `BEGUN_TIMEOUT` at most.
    fn await_progress(&self, is_so: impl Fn(&Tree, FileId) -> bool, id: FileId) {
        let until = clock::tick() + BEGUN_TIMEOUT;
        let mut tree = self.metadata.read_tree();
        loop {
            let left = until.saturating_duration_since(clock::tick());
            if left.is_zero() || !is_so(&tree, id) {
                return;
            }
            tree = self.metadata.wait_changed(tree, left.min(LOOK_EVERY));
        }
    }

    /// The content may change from now on, so a copy that is under way to the store is void. The catalog may vouch for
    /// this version after a power loss. Then the disk gets the revocation first, or else half-written content would
    /// pass for it.
    fn begin_write(&self, open: &Open, run: RunId) -> FsResult<()> {
        closed::is_opened(&self.metadata, open.id);
        let mut tree = self.metadata.write_tree();
        let id = open.id;
        if open.content().location == Location::StoreTemporary && tree.is_published_as_it_is(id) {
            return Err(PUBLISHED_AS_IT_IS.into());
        }
        if open.direct {
            self.metadata.directly_written(open);
        }
        // An fsync may have queued a publication of a file that is not sealed.
        if tree.get(id).is_some_and(|inode| inode.sealed || inode.publish.is_some() || !inode.owned) {
            tree.own(id);
        }
        let Some(inode) = tree.get_mut(id) else {
            return Ok(());
        };
        let vouched = inode.is_synced() && inode.dirty();
        inode.sealed = false;
        inode.epoch = inode.epoch.wrapping_add(1);
        if run != RunId(0) || inode.run == RunId(0) {
            inode.run = run;
        }
        let publish = inode.publish;
        tree.recount(id);
        let Some(inode) = tree.get_mut(id) else {
            return Ok(());
        };
        if let Some(seq) = publish
            && !inode.is_dir()
        {
            inode.reopened = inode.reopened.saturating_add(1);
            tree.take_back(id, seq);
        }
        drop(tree);
        if vouched { Ok(self.metadata.sync_catalog()?) } else { Ok(()) }
    }

    /// Gives back what `open_inode` gave.
    pub(crate) fn close_inode(&self, open: &Arc<Open>, writes: bool) {
        let _inode = self.metadata.lock_inode(open.id);
        self.close_user(open, writes);
    }

    pub(crate) fn close_user(&self, open: &Arc<Open>, writes: bool) {
        let left = self.sealer.uncount_user(open, writes);
        let (last_writer, last) = (writes && left.writers == 0, left.writers == 0 && left.readers == 0);
        // The one remaining writer may be a granted descriptor that was closed before this one.
        if writes
            && !last_writer
            && open.granted.load(Ordering::Relaxed)
            && open.writers() == 1
            && self.descriptors.end_grant(open)
        {
            return;
        }
        let is_seal_deferred =
            if last_writer { !self.descriptors.seal(open) } else { last && self.deferred.is_seal_deferred(open.id) };
        if last && !is_seal_deferred {
            self.sealer.give_up(open);
        }
    }

    /// Closes an open file. The last close by a writer makes a version.
    pub fn release(&self, fh: u64) {
        let handle = self.open_files.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        if let Some(handle) = handle {
            self.close_inode(&handle.open, handle.writes);
            self.metadata.writing_handles.fetch_sub(usize::from(handle.writes), Ordering::SeqCst);
        }
        self.succession.hand_off(&Record::Closed { fh });
    }
}
