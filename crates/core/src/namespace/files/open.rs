//! Open and release. The first open of an inode decides whether it is direct or mediated.
//!
//! Invariant: an inode has at most one `Open`; its users are counted, and the last one gives it up.
//!
//! The danger that this avoids: a process writes to a file that the drain publishes, or that has lost its last name.

use crate::report::run::EventKind;
use std::time::Duration;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::handoff::Record;
use surgetank_store::{Cred, StorePath};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, DeviceId, FileId, Kind, RunId};

use super::super::Namespace;
use super::super::content::{Content, Handle, Location, Open, Users, runs_it};
use super::super::resolve::is_absent;
use super::attach::Wanted;
use super::{Grant, LEFT_TO_THE_MOUNT, Opened, Via};
use surgetank_state::{PlainId, Progress, Tree};

/// A rename limit: more renames during one open are not normal use.
const MOVES_MAX: usize = 1000;
/// The last name went between the look-up and the open. The kernel and the agent's other doors then look the name up
/// again, because a process that creates a file must not get "not found".
pub(super) const GONE: Errno = Errno::STALE;
/// A spilled file is being published as it is: a writer would now write to the store's own file. (The number differs
/// from `STORE_TO_BE_ASKED`, which the caller gets.)
const PUBLISHED_AS_IT_IS: Errno = Errno::ALREADY;
const PUBLISHED_TRIES_MAX: usize = 20;
const BEGUN_PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Namespace {
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
            let tree = self.read_tree();
            let inode = tree.get(id).ok_or(GONE)?;
            match inode.attr.kind {
                Kind::File => {}
                Kind::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::INVAL.into()),
            }
            // Linux asks only for execute permission when the kernel runs a program.
            let want = if runs_it(flags) { 1 } else { want };
            self.permit(caller, &inode.attr, want)?;
        }
        // A program that runs must not change. The kernel refuses an open for writing before it asks the agent. It
        // refuses an open that only empties the file after that, when the file would already be empty.
        let only_empties = truncates && flags & libc::O_ACCMODE == libc::O_RDONLY;
        if only_empties && self.opens().get(&id).is_some_and(|open| open.is_run()) {
            return Err(Errno::TXTBSY.into());
        }
        let run = if writes { self.run(caller) } else { RunId(0) };
        let fsync =
            || self.read_tree().logical_path(id).and_then(|path| self.decide(&path).fsync).or(self.config.fsync);
        let open = self.open_inode(id, writes, truncates, run, Via::of_flags(flags, fsync));
        if open.as_ref().is_err_and(|fault| fault.errno == GONE) {
            self.sent_back(caller.pid);
        } else {
            self.served(caller.pid);
        }
        Ok(self.register(open?, writes, flags, run))
    }

    pub(crate) fn register(&self, open: Arc<Open>, writes: bool, flags: i32, run: RunId) -> Opened {
        let fh = self.new_handle();
        let backing = open.backing_or(|content| self.back(open.id, content));
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
        let keep_cache = !writes && !shared && grant == Grant::Mediated && self.may_keep_pages(&open);
        let handle = Handle::new(open, writes, flags, run);
        self.writing_handles.fetch_add(usize::from(writes), Ordering::SeqCst);
        if writes {
            self.recall_for_writer();
        }
        self.handles.write().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(handle));
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
        let _inode = self.lock_inode(id);
        self.open_locked(id, writes, truncates, run, via)
    }

    /// The caller holds the inode's lock.
    pub(super) fn open_locked(
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
        let active = self.opens().get(&id).cloned();
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
                    self.drop_waiting(id);
                    self.make_writable(&open, truncates)?;
                } else if via.is_mount() {
                    self.look_whether_still(&open);
                }
                open
            }
            None => {
                let open = Arc::new(self.while_it_moves(id, || {
                    self.reread(id, truncates)?;
                    self.open_content(id, writes, truncates, via)
                })?);
                self.opens().insert(id, open.clone());
                self.still_has_content(&open)?;
                open
            }
        };
        let begin = || -> FsResult<()> {
            if writes {
                self.await_begun(id);
                self.begin_write(&open, run)?;
            }
            if truncates { self.truncate_content(&open, 0) } else { Ok(()) }
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
        if on_tier && self.read_tree().get(open.id).is_none_or(|inode| inode.replica.is_none()) {
            self.opens().remove(&open.id);
            // The file has no user, so its place in the shim's index is free.
            self.show(&self.read_tree(), open.id);
            self.tiers_unreserve(open);
            self.unback(open);
            return Err(GONE.into());
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
        if let Some(inode) = self.write_tree().get_mut(open.id) {
            inode.handles += 1;
        }
    }

    /// Repeats `act` when the drain renames the file between the look at its path and the use of it. The file is the
    /// store's own, or the temporary in the store that has the content.
    fn while_it_moves<T>(&self, id: FileId, act: impl Fn() -> FsResult<T>) -> FsResult<T> {
        for _ in 0..MOVES_MAX {
            let before = self.read_tree().path_in_store(id);
            match act() {
                Err(fault)
                    if matches!(
                        fault.errno,
                        Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR
                    ) && self.may_move(id, before.as_ref()) =>
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
            let before = self.read_tree().applied_path(id);
            let answer = self.while_it_moves(id, &ask)?;
            if self.read_tree().applied_path(id) == before {
                return Ok(answer);
            }
        }
        ask()
    }

    /// Is the file elsewhere in the store than before, or about to be?
    pub(super) fn may_move(&self, id: FileId, before: Option<&StorePath>) -> bool {
        let tree = self.read_tree();
        tree.get(id).is_some() && (tree.moves_in_store(id) || tree.path_in_store(id).as_ref() != before)
    }

    /// The first open of an inode. The caller holds the inode's lock.
    fn open_content(&self, id: FileId, writes: bool, truncates: bool, via: Via) -> FsResult<Open> {
        let in_place = writes && self.only_in_place(id);
        if matches!(via, Via::Shim(_))
            && (in_place || self.read_tree().get(id).is_none_or(|inode| inode.replica.is_none()))
        {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        if in_place {
            self.evict_locked(
                id,
                "it can only be written in the store, in place: further names, or a directory that lets nothing in",
                true,
            );
        }
        let tree = self.read_tree();
        let inode = tree.get(id).ok_or(GONE)?;
        let owner = inode.cred();
        let size_bytes = inode.attr.size_bytes;
        let charged_bytes = inode.charged_bytes;
        if let Some(PlainId { device, .. }) = inode.replica {
            let path = tree.logical_path(id).ok_or(GONE)?;
            let device = self.tiers.device(device);
            // The agent's descriptor of a direct file is read-only; otherwise the agent's own leases would be refused.
            let direct = via.is_only()
                || self.may_be_direct(via)
                    && (!writes || self.room_for_direct(device.id(), &path, &self.wish(&tree, id, &path)).is_some());
            if !via.is_mount() && !direct {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
            let file = device.open(&path, writes && !direct).inspect_err(|why| self.device_failed(device.id(), why))?;
            drop(tree);
            if !writes {
                device.counters().hits.fetch_add(1, Ordering::Relaxed);
                self.events.count(EventKind::Hit, device.tier_name(), "opened for reading", size_bytes);
            }
            let content =
                Content { file: Arc::new(file), location: Location::Tier(device.id()), writable: writes && !direct };
            return self.attach(id, content, Wanted { via, writes, direct }, charged_bytes);
        }
        if let Some((dir, name)) = inode.spill().cloned() {
            let path = tree.applied_path(dir).ok_or(GONE)?.join(&name);
            drop(tree);
            let direct = !writes || via.is_only();
            let file = match self.store.open(self.own_cred(owner), &path, !direct) {
                // The temporary already has its final name; the catalog follows.
                Err(why) if is_absent(&why) && self.read_tree().is_published_as_it_is(id) => {
                    return Err(PUBLISHED_AS_IT_IS.into());
                }
                opened => opened?,
            };
            let content = Content { file: Arc::new(file), location: Location::StoreTemporary, writable: !direct };
            return self.attach(id, content, Wanted { via, writes, direct }, 0);
        }
        let path = tree.applied_path(id).ok_or(GONE)?;
        drop(tree);
        if truncates && !in_place {
            return self.open_placed(id, None, 0, via);
        }
        self.events.count(EventKind::Miss, "store", "only the store had it", size_bytes);
        if !self.store.features().plain_files {
            return match self.open_distant(id, writes, via)? {
                Some(open) => Ok(open),
                None if self.read_tree().get(id).is_some_and(|inode| inode.replica.is_some()) => {
                    self.open_content(id, writes, truncates, via)
                }
                None => Err(GONE.into()),
            };
        }
        if writes && !in_place && size_bytes <= self.config.copy_up_bytes_max {
            let source = self.open_in_store(id, owner, &path, false)?;
            // A process that has the store's own file open would not see writes to a copy.
            if !via.is_only() || super::nobody_has(&source) {
                return self.open_placed(id, Some(&source), size_bytes, via);
            }
        }
        let direct = !writes || via.is_only();
        let file = self.open_in_store(id, owner, &path, !direct)?;
        if writes {
            self.times_in_place(id, &file)?;
        }
        let content = Content { file: Arc::new(file), location: Location::Store, writable: !direct };
        let mut open = self.attach(id, content, Wanted { via, writes, direct }, 0)?;
        if !open.direct {
            open.found = rustix::fs::fstat(&*open.content().file).ok().map(|stat| super::identity_of(&stat));
        }
        Ok(open)
    }

    /// Opens the store's own file.
    fn open_in_store(&self, id: FileId, owner: Cred, path: &StorePath, writes: bool) -> std::io::Result<std::fs::File> {
        let who = self.own_cred(owner);
        let file = self.let_in(id, || self.store.open(who, path, writes))?;
        self.is_it(id, path, file)
    }

    /// Is this still the file? The drain may have moved it after the look at its path, and put another one there. (If
    /// another client did that, the name means that client's file now.)
    fn is_it(&self, id: FileId, path: &StorePath, file: std::fs::File) -> std::io::Result<std::fs::File> {
        let ino = rustix::fs::fstat(&file)?.st_ino;
        let tree = self.read_tree();
        let known = tree.get(id).and_then(|inode| inode.identity.as_ref().map(|known| known.ino));
        let same = known.is_none_or(|known| known == ino);
        let moves = tree.is_queued(id) || tree.is_moving_in_store(id) || tree.applied_path(id).as_ref() != Some(path);
        if same || !moves {
            return Ok(file);
        }
        Err(Errno::STALE.into())
    }

    /// Times that a process set and that the drain has not applied yet. From now on the file's own times count.
    fn times_in_place(&self, id: FileId, file: &std::fs::File) -> FsResult<()> {
        let mut tree = self.write_tree();
        let Some(inode) = tree.get_mut(id).filter(|inode| inode.set_meta.is_some()) else {
            return Ok(());
        };
        super::Given::known(&inode.attr).give_times(file)?;
        inode.identity = Some(Box::new(super::identity_of(&rustix::fs::fstat(file)?)));
        Ok(())
    }

    pub(crate) fn device_failed(&self, device: DeviceId, why: &std::io::Error) {
        if let Some(code) = why.raw_os_error() {
            self.tiers.device(device).report_error(Errno::from_raw_os_error(code));
        }
    }

    /// An open inode gets its first writer. The caller holds the inode's lock.
    fn make_writable(&self, open: &Arc<Open>, truncates: bool) -> FsResult<()> {
        self.arrive_whole(open, truncates)?;
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
                let file = super::super::content::reopen_writable(&content.file)?;
                open.replace(Content { file: Arc::new(file), writable: true, ..content });
            }
            // `arrive_whole` has waited for all of its bytes.
            Location::Arriving => return Err(Errno::STALE.into()),
            Location::Store => {
                let size_bytes = self.read_tree().get(id).ok_or(Errno::NOENT)?.attr.size_bytes;
                if size_bytes <= self.config.copy_up_bytes_max && !self.only_in_place(id) {
                    let placed = self.open_placed(id, Some(&content.file), size_bytes, Via::Mount)?;
                    let fresh = placed.content();
                    open.charged_bytes.store(size_bytes, Ordering::Relaxed);
                    self.unback(&placed);
                    let file = if fresh.writable {
                        fresh.file
                    } else {
                        Arc::new(super::super::content::reopen_writable(&fresh.file)?)
                    };
                    open.replace(Content { file, location: fresh.location, writable: true });
                } else {
                    let file = self.while_it_moves(id, || {
                        let (path, owner) = {
                            let tree = self.read_tree();
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

    /// Waits while the condition holds, for `BEGUN_PATIENCE` at most.
    fn await_progress(&self, is_so: impl Fn(&Tree, FileId) -> bool, id: FileId) {
        let until = clock::tick() + BEGUN_PATIENCE;
        let mut tree = self.read_tree();
        loop {
            let left = until.saturating_duration_since(clock::tick());
            if left.is_zero() || !is_so(&tree, id) {
                return;
            }
            tree = self.wait_changed(tree, left.min(LOOK_EVERY));
        }
    }

    /// The content may change from now on, so a copy that is under way to the store is void. The catalog may vouch for
    /// this version after a power loss. Then the disk gets the revocation first, or else half-written content would
    /// pass for it.
    fn begin_write(&self, open: &Open, run: RunId) -> FsResult<()> {
        let mut tree = self.write_tree();
        let id = open.id;
        if open.content().location == Location::StoreTemporary && tree.is_published_as_it_is(id) {
            return Err(PUBLISHED_AS_IT_IS.into());
        }
        if open.direct {
            self.directly_written(open);
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
        if vouched { Ok(self.sync_catalog()?) } else { Ok(()) }
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

    /// Gives back what `open_inode` gave.
    pub(crate) fn close_inode(&self, open: &Arc<Open>, writes: bool) {
        let _inode = self.lock_inode(open.id);
        self.close_user(open, writes);
    }

    /// Returns the users that are left.
    pub(super) fn uncount_user(&self, open: &Open, writes: bool) -> Users {
        let mut users = open.users.lock().unwrap_or_else(PoisonError::into_inner);
        let count = if writes { &mut users.writers } else { &mut users.readers };
        *count = count.saturating_sub(1);
        let left = *users;
        drop(users);
        if let Some(inode) = self.write_tree().get_mut(open.id) {
            inode.handles = inode.handles.saturating_sub(1);
        }
        left
    }

    pub(super) fn close_user(&self, open: &Arc<Open>, writes: bool) {
        let left = self.uncount_user(open, writes);
        let (last_writer, last) = (writes && left.writers == 0, left.writers == 0 && left.readers == 0);
        // The one remaining writer may be a granted descriptor that was closed before this one.
        if writes && !last_writer && open.handed.load(Ordering::Relaxed) && open.writers() == 1 && self.end_handed(open)
        {
            return;
        }
        let is_seal_deferred = if last_writer { !self.seal(open) } else { last && self.is_seal_deferred(open.id) };
        if last && !is_seal_deferred {
            self.give_up(open);
        }
    }

    /// The file is sealed, and no process has it open. The caller holds the inode's lock.
    pub(super) fn give_up(&self, open: &Open) {
        self.end_arrival(open);
        self.use_waiting(open);
        self.unback(open);
        self.last_close(open);
    }

    /// The kernel no longer needs the plain file.
    pub(super) fn unback(&self, open: &Open) {
        if let (Some(backing), Some(door)) = (open.take_backing(), self.door.get()) {
            self.succession.hand_off(&Record::Unbacked { id: open.id });
            door.unback(backing);
        }
    }

    pub fn release(&self, fh: u64) {
        let handle = self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        if let Some(handle) = handle {
            self.close_inode(&handle.open, handle.writes);
            self.writing_handles.fetch_sub(usize::from(handle.writes), Ordering::SeqCst);
        }
        self.succession.hand_off(&Record::Closed { fh });
    }
}
