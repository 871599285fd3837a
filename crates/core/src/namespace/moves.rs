//! Renames of files between directories of two members of a pool.
//!
//! The store has the file first. The member that gets it makes a second name of it there, and renames that as a file of its own.
//! When the store has the new name, the member that had the file removes the old one. At every moment the store has the whole
//! file under one of its names, so that a crash of either member loses nothing.
//!
//! The danger that this avoids: the old name goes before the new one is safe.

use std::time::{Duration, Instant};

use foldhash::HashMap;
use surgetank_state::{Dir, Entry, Mover, Name, Op, Tree, file_of, is_for_another, places};
use surgetank_store::{Cred, StorePath, StoreStat};
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, OpKind, STORE_TEMPORARY_PREFIX, Seq, StoreIdentity};
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::Base;
use crate::base::queries::is_absent;
use crate::base::users::own_cred;
use crate::files::Files;
use crate::namespace::names::Names;
use crate::namespace::resolve::Resolver;

/// How often a wait looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// By so much longer than asked the kernel may believe something: it counts in ticks.
const A_TICK: Duration = Duration::from_millis(10);
/// So long the kernel may take a name at its new member for the file here.
const BELIEVED: Duration = Duration::from_secs(5);

/// A file as the store has it, while another member takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departing {
    /// Its number here.
    pub id: FileId,
    /// Where the store has it.
    pub path: StorePath,
    /// The version that the store has.
    pub identity: StoreIdentity,
    /// As which user it is linked.
    pub who: Cred,
}

/// May a file go to another member?
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Departure {
    /// It keeps its names and waits for its mover.
    Now(Departing),
    /// The store does not have all of it yet, or another mover has it. Ask again.
    NotYet,
    /// A program may still write it. Ask again.
    IsOpen,
}

/// What became of the old name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The name is gone, or is another file's by now.
    Gone,
    /// The file was written meanwhile: it has to be taken again.
    Changed,
}

/// Renames between members.
pub struct Moves {
    base: Base,
    files: Arc<Files>,
    names: Arc<Names>,
    resolver: Arc<Resolver>,
    /// Files that have gone a moment ago.
    gone: Mutex<HashMap<FileId, Instant>>,
}

impl Moves {
    pub(crate) fn new(base: &Base, files: &Arc<Files>, names: &Arc<Names>, resolver: &Arc<Resolver>) -> Self {
        let gone = Mutex::default();
        Self { base: base.clone(), files: files.clone(), names: names.clone(), resolver: resolver.clone(), gone }
    }

    /// An earlier agent may have had files that were leaving.
    pub fn had_earlier(&self) {
        self.files.metadata.write_tree().leaving.had_earlier(clock::tick());
    }

    // At the member that has the file.

    /// Has the store get a file that is to leave, and keeps its names from now on. Waits for the store, at most so long.
    ///
    /// Errors: EXDEV, it is of another kind than file or symbolic link, has further names, or its rule keeps it from the store; the store's.
    pub fn depart(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        mover: Mover,
        patience: Duration,
    ) -> FsResult<Departure> {
        let until = clock::tick() + patience;
        let name = Name::from(name);
        self.files.descriptors.catch_up();
        loop {
            let id = self.resolver.resolve(caller, dir, &name)?;
            self.names.permit_change(caller, dir)?;
            let departure = {
                let mut tree = self.files.metadata.write_tree();
                self.files.metadata.recall_delegation(&mut tree, Some(dir));
                self.names.permit_sticky(&tree, caller, dir, id)?;
                let is_it = tree.entry(dir, &name).and_then(Entry::logical) == Some(id);
                let departure =
                    if is_it { self.look(&mut tree, (dir, &name), id, mover) } else { Ok(Departure::NotYet) };
                self.files.metadata.commit(&mut tree);
                departure
            };
            match departure {
                Ok(Departure::NotYet | Departure::IsOpen) if clock::tick() < until && !self.base.waits.is_killed() => {}
                departure => return departure,
            }
            if departure == Ok(Departure::IsOpen)
                && let Some(door) = self.base.door.get()
            {
                door.closes_are_done(until.saturating_duration_since(clock::tick()));
                self.files.descriptors.catch_up();
            }
            self.files.metadata.wake();
            let metadata = &self.files.metadata;
            drop(metadata.wait_changed(metadata.read_tree(), LOOK_EVERY));
        }
    }

    fn look(&self, tree: &mut Tree, at: (FileId, &Name), id: FileId, mover: Mover) -> FsResult<Departure> {
        // (The store shows the second name that this mover has made.)
        let unknown = u32::from(tree.leaving.renew(id, mover, clock::tick()) || mover.again);
        let inode = tree.get(id).ok_or(Errno::NOENT)?;
        let is_one = matches!(inode.attr.kind, Kind::File | Kind::Symlink)
            && inode.attr.links <= 1 + unknown
            && inode.extra.as_ref().is_none_or(|extra| extra.more_names.is_empty());
        if !is_one || is_for_another(tree, id) {
            return Err(Errno::XDEV.into());
        }
        match self.state(tree, at, id)? {
            Departure::Now(_) if !tree.leaving.take(id, mover, clock::tick()) => Ok(Departure::NotYet),
            Departure::Now(what) => {
                has_second_name(tree, id);
                Ok(Departure::Now(what))
            }
            departure => Ok(departure),
        }
    }

    /// Is all of the file in the store? Otherwise that is due now.
    fn state(&self, tree: &mut Tree, (dir, name): (FileId, &Name), id: FileId) -> FsResult<Departure> {
        let inode = tree.get(id).ok_or(Errno::NOENT)?;
        if !inode.sealed {
            return Ok(Departure::IsOpen);
        }
        if inode.dirty() && inode.publish.is_none() {
            self.files.metadata.queue_publish(tree, id);
        }
        let concerns = |op: &Op| {
            let is_at = || places(&op.kind).iter().any(|(at, called)| *at == dir && called == name);
            file_of(&op.kind) == id || is_at()
        };
        let last = tree.ops.iter().rev().find(|(_, op)| concerns(op)).map(|(seq, _)| *seq);
        if let Some(seq) = last {
            is_refused(tree, seq)?;
            tree.hurry(Some(seq));
            return Ok(Departure::NotYet);
        }
        let inode = tree.get(id).ok_or(Errno::NOENT)?;
        let is_there = inode.applied.as_ref().is_some_and(|(at, called)| *at == dir && called == name);
        let (Some(identity), who) = (inode.identity, inode.cred()) else { return Err(Errno::XDEV.into()) };
        if inode.dirty() || !is_there {
            return Err(Errno::XDEV.into());
        }
        let path = tree.applied_path(id).ok_or(Errno::STALE)?;
        Ok(Departure::Now(Departing { id, path, identity, who }))
    }

    /// The mover has given up.
    pub fn stay(&self, id: FileId, mover: Mover) {
        let mut tree = self.files.metadata.write_tree();
        tree.leaving.end(id, mover);
        // (That name is gone.)
        has_second_name(&mut tree, id);
        self.files.metadata.commit(&mut tree);
    }

    /// The store has the file under its new name: removes the old one.
    pub fn leave(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        what: &Departing,
        mover: Mover,
    ) -> FsResult<Left> {
        const CHANGED: Errno = Errno::TXTBSY;
        const ANOTHER: Errno = Errno::STALE;
        // (EAGAIN would wait here.)
        const WAITS: Errno = Errno::ALREADY;
        self.files.descriptors.catch_up();
        let bound = Name::from(name);
        let may = |tree: &mut Tree, id: FileId| {
            self.files.metadata.recall_delegation(tree, Some(dir));
            if tree.entry(dir, &bound).and_then(Entry::logical) != Some(id) {
                return Err(Errno::AGAIN.into());
            }
            match self.state(tree, (dir, &bound), id) {
                // (One of the same content may have come to the name since.)
                _ if id != what.id => Err(ANOTHER.into()),
                Ok(Departure::Now(now)) if now.identity.touched().is(&what.identity) => {
                    // (Programs may set the times of the new name already, which is the same file of the store.)
                    if let Some(inode) = tree.get_mut(id) {
                        inode.identity = inode.identity.map(StoreIdentity::bare);
                    }
                    Ok(())
                }
                Ok(Departure::NotYet) => Err(WAITS.into()),
                Err(fault) => Err(fault),
                Ok(_) => Err(CHANGED.into()),
            }
        };
        let left = match self.names.unlink_if(caller, dir, name, &may) {
            Ok(()) => {
                self.is_gone(what.id);
                Left::Gone
            }
            Err(fault) if fault.errno == WAITS => return Err(Errno::AGAIN.into()),
            Err(fault) if matches!(fault.errno, ANOTHER | Errno::NOENT | Errno::ISDIR) => Left::Gone,
            Err(fault) if fault.errno == CHANGED => return Ok(Left::Changed),
            Err(fault) => return Err(fault),
        };
        self.stay(what.id, mover);
        Ok(left)
    }

    /// The kernel may take a name for this file that it has no more.
    pub fn is_gone(&self, id: FileId) {
        if self.files.metadata.read_tree().get(id).is_some_and(|inode| inode.logical.is_some()) {
            return;
        }
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.retain(|_, since| since.elapsed() < BELIEVED);
        gone.insert(id, clock::tick());
    }

    /// Has the file lost its name so a moment ago?
    pub fn has_left(&self, id: FileId) -> bool {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.get(&id).is_some_and(|since| since.elapsed() < BELIEVED)
    }

    /// Do files wait for their movers?
    pub fn are_leaving(&self) -> bool {
        self.files.metadata.read_tree().leaving.any(clock::tick())
    }

    /// Has the store removed the old name? Otherwise that is due now. Waits for it, at most so long.
    pub fn is_removed(&self, id: FileId, patience: Duration) -> FsResult<bool> {
        self.is_done(patience, |op| matches!(op, OpKind::Unlink { file, .. } if *file == id))
    }

    // At the member that gets the file.

    /// Makes the file's new name. `None`: the store does not have the directory yet; ask again. `request`: the number of the
    /// request that this thread serves.
    ///
    /// Errors: ESTALE, the store has another file there by now; EXDEV, it makes no second names; EBUSY, what has the name is
    /// leaving itself; as of rename(2).
    pub fn arrive(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        what: &Departing,
        (noreplace, request): (bool, u64),
    ) -> FsResult<Option<FileId>> {
        if let Some(id) = self.has_arrived(what, request) {
            return Ok(Some(id));
        }
        // (It may have come from here, and its old name here not have ended. To replace it would end both.)
        if let Some(id) = self.is_the_same(dir, name, what) {
            let is_leaving = self.files.metadata.read_tree().leaving.has(id, clock::tick());
            return Err(if is_leaving { Errno::BUSY.into() } else { Errno::XDEV.into() });
        }
        let metadata = &self.files.metadata;
        let to = {
            let mut tree = metadata.write_tree();
            let inode = tree.get(dir).ok_or(Errno::NOENT)?;
            if !inode.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
            let publish = inode.publish;
            let path = tree.applied_path(dir);
            if path.is_none() {
                if let Some(seq) = publish {
                    is_refused(&tree, seq)?;
                }
                tree.hurry(publish);
                metadata.commit(&mut tree);
            }
            path
        };
        let Some(to) = to else {
            metadata.wake();
            return Ok(None);
        };
        // (A try that is repeated finds its own name, and no other request's.)
        let StoreIdentity { ino, mtime_nanos, .. } = what.identity;
        let own = format!("moved-{}-{:x}-{request:x}-{ino:x}-{mtime_nanos:x}", self.base.key, what.id.0);
        let second = [STORE_TEMPORARY_PREFIX, own.as_bytes()].concat();
        let at = to.join(&second);
        let stat = self.link(what, &at)?;
        // (What is here counts one name: the old one goes.)
        let stat = StoreStat { attr: Attr { links: 1, ..stat.attr }, ..stat };
        let brought = self.names.bring(caller, dir, (&Name::from(&*second), &stat), name, noreplace);
        match brought {
            Ok(id) => Ok(Some(id)),
            Err(fault) => {
                let removed = self.base.store.unlink(own_cred(what.who), &at);
                if let Some(why) = removed.err().filter(|why| !is_absent(why)) {
                    tracing::warn!(%why, path = %at, "a second name of a file stays in the store");
                }
                Err(fault)
            }
        }
    }

    /// The second name of the file.
    fn link(&self, what: &Departing, at: &StorePath) -> FsResult<StoreStat> {
        let store = &self.base.store;
        let who = own_cred(what.who);
        for _ in 0..2 {
            // (As in the drain: a store may give root no rights.)
            let linked = match store.link(what.who, &what.path, at) {
                Err(why) if matches!(why.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
                    store.link(who, &what.path, at)
                }
                linked => linked,
            };
            match linked {
                Err(why) if why.raw_os_error() == Some(libc::EEXIST) => {}
                Err(why) if is_absent(&why) => return Err(Errno::STALE.into()),
                Err(why) => {
                    let cannot = [libc::EPERM, libc::EOPNOTSUPP, libc::EMLINK, libc::EACCES, libc::ENOSYS];
                    let cannot = why.raw_os_error().is_some_and(|errno| cannot.contains(&errno));
                    return Err(if cannot { Errno::XDEV.into() } else { why.into() });
                }
                Ok(()) => {}
            }
            let stat = store.stat(who, at)?;
            if what.identity.touched().is(&stat.identity) {
                return Ok(stat);
            }
            store.unlink(who, at)?;
        }
        Err(Errno::STALE.into())
    }

    /// Has an earlier agent made the name for this request?
    fn has_arrived(&self, what: &Departing, request: u64) -> Option<FileId> {
        let id = self.base.succession.carried_out(request)?;
        let tree = self.files.metadata.read_tree();
        // (It may have been removed since. Or what arrived was an older version.)
        let identity = tree.get(id).and_then(|inode| inode.identity);
        identity.is_none_or(|identity| identity.touched().is(&what.identity)).then_some(id)
    }

    /// Does the name lead to the very file of the store?
    fn is_the_same(&self, dir: FileId, name: &[u8], what: &Departing) -> Option<FileId> {
        let tree = self.files.metadata.read_tree();
        let id = tree.entry(dir, name).and_then(Entry::logical)?;
        let identity = tree.get(id).and_then(|inode| inode.identity)?;
        (identity.ino == what.identity.ino).then_some(id)
    }

    /// Does the store have the new name? Otherwise that is due now. Waits for it, at most so long.
    ///
    /// Errors: EIO, the name did not get there.
    pub fn has_settled(&self, id: FileId, patience: Duration) -> FsResult<bool> {
        if !self.is_done(patience, |op| matches!(op, OpKind::Rename { file, .. } if *file == id))? {
            return Ok(false);
        }
        if !self.is_in_store(id) {
            return Err(Fault::new(Errno::IO, "the store did not take the file's new name".to_owned()));
        }
        let mut tree = self.files.metadata.write_tree();
        // (Until the old name ends.)
        has_second_name(&mut tree, id);
        self.files.metadata.commit(&mut tree);
        Ok(true)
    }

    /// Has the store the file where it should be? (A program may have removed or replaced it since.)
    fn is_in_store(&self, id: FileId) -> bool {
        let _moving = self.files.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
        let (path, identity, who) = {
            let tree = self.files.metadata.read_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.logical.is_some()) else { return true };
            let is_still = inode.applied == inode.logical && inode.publish.is_none() && inode.sealed;
            let (Some(path), Some(identity)) = (tree.applied_path(id), inode.identity) else { return false };
            // (A newer version is on its way: it comes from here.)
            if !is_still && inode.applied.is_some() {
                return true;
            }
            (path, identity, inode.cred())
        };
        self.base.store.stat(own_cred(who), &path).is_ok_and(|stat| stat.identity.ino == identity.ino)
    }

    /// Has the store no such operation before it? Otherwise the first one is due now.
    fn is_done(&self, patience: Duration, is_it: impl Fn(&OpKind) -> bool) -> FsResult<bool> {
        let until = clock::tick() + patience;
        loop {
            {
                let mut tree = self.files.metadata.write_tree();
                let Some(seq) = tree.ops.iter().find(|(_, op)| is_it(&op.kind)).map(|(seq, _)| *seq) else {
                    return Ok(true);
                };
                is_refused(&tree, seq)?;
                tree.hurry(Some(seq));
                self.files.metadata.commit(&mut tree);
            }
            self.files.metadata.wake();
            if clock::tick() >= until || self.base.waits.is_killed() {
                return Ok(false);
            }
            let metadata = &self.files.metadata;
            drop(metadata.wait_changed(metadata.read_tree(), LOOK_EVERY));
        }
    }

    /// May the kernel know the file under the name?
    pub fn is_known(&self, dir: FileId, name: &[u8]) -> bool {
        let tree = self.files.metadata.read_tree();
        let id = tree.entry(dir, name).and_then(Entry::logical);
        id.and_then(|id| tree.get(id)).is_some_and(|inode| inode.lookups > 0)
    }

    /// Another member's program has changed what the name means: waits until the kernel believes nothing else. (A notification
    /// would need the directory's lock, which a program may hold that waits for this agent.)
    pub fn await_forgotten(&self, dir: FileId, name: &[u8], was_known: bool) {
        let (listed, was_absent) = {
            let mut tree = self.files.metadata.write_tree();
            let take = |dir: &mut Dir| (std::mem::take(&mut dir.is_in_kernel), dir.kernel_negative_entries.take(name));
            tree.dir_mut(dir).map_or((false, false), take)
        };
        if let Some(door) = self.base.door.get().filter(|_| listed) {
            door.invalidate(dir, false);
        }
        if was_known || was_absent {
            std::thread::sleep(self.base.config.store_ttl.max(crate::namespace::NAME_TTL_MIN) + A_TICK);
        }
    }
}

/// From now on another member may make or remove a second name of the file: its change time in the store means nothing.
fn has_second_name(tree: &mut Tree, id: FileId) {
    let Some(inode) = tree.get_mut(id) else { return };
    inode.identity = inode.identity.map(StoreIdentity::touched);
    if inode.owned {
        tree.txn.file(id);
    }
}

/// The error of a file before which, or with which, the queue stands still.
fn is_refused(tree: &Tree, seq: Seq) -> FsResult<()> {
    let trouble = tree.ops.range(..=seq).find_map(|(_, op)| op.error.as_ref().filter(|trouble| trouble.lasting));
    trouble.map_or(Ok(()), |trouble| Err(Fault::new(Errno::from_raw_os_error(trouble.errno), trouble.text.clone())))
}
