//! Resolution: from names to files. Where the agent has no entry of its own, it asks the store. It caches the answer
//! only for the configured time (`store_ttl`), because other clients change the store too.
//!
//! The danger that this avoids: the store's answer, older than a change by the agent itself, replaces that change.

use std::io;
use std::time::Duration;

use surgetank_policy::config::Config;
use surgetank_state::{Entry, Inode, Name, Tree};
use surgetank_store::{Cred, Store, StorePath, StoreStat};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, STORE_TEMPORARY_PREFIX};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::queries::{StoreQueries, is_absent, passes};
use crate::base::succession::Succession;
use crate::base::users::{Permissions, own_cred, who};
use crate::base::{Base, Counters};
use crate::files::Files;
use crate::files::evict::Eviction;
use crate::files::open::Opener;
use crate::files::open_files::OpenFiles;
use crate::handoff::Record;
use crate::metadata::access::Access;
use crate::metadata::{Metadata, shares_a_server};

/// The limit of tries for a look-up in the store that keeps overlapping changes.
const TRIES_MAX: usize = 100;

enum Ask {
    Known(FileId),
    Absent,
    /// The store has to be asked, at this path; with the directory's generation and the entry before that.
    Store(StorePath, u32, Option<Entry>),
}

/// The answer of a look-up or a creation.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    /// Id of the file.
    pub id: FileId,
    /// Attributes of the file.
    pub attr: Attr,
    /// How long the kernel may cache name and attributes.
    pub ttl: Duration,
}

/// The least time for which the kernel caches a name, whether the name exists or not.
pub const NAME_TTL_MIN: Duration = Duration::from_secs(1);

/// Looks names up, in the tree and in the store.
pub struct Resolver {
    pub(super) config: Arc<Config>,
    pub(super) counters: Arc<Counters>,
    pub(super) queries: Arc<StoreQueries>,
    store: Arc<dyn Store>,
    succession: Arc<Succession>,
    pub(super) access: Arc<Access>,
    eviction: Arc<Eviction>,
    pub(super) metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    opener: Arc<Opener>,
    permissions: Arc<Permissions>,
}

impl Resolver {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        Self {
            config: base.config.clone(),
            counters: base.counters.clone(),
            queries: base.queries.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            permissions: base.permissions.clone(),
            access: files.access.clone(),
            eviction: files.eviction.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            opener: files.opener.clone(),
        }
    }

    /// The file under a name, with one reference of the kernel more. Errors: ENOENT, permissions, the store; EAGAIN if
    /// the name keeps changing.
    pub fn lookup(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<Found> {
        for _ in 0..TRIES_MAX {
            let id = self.resolve(caller, dir, name)?;
            if !self.opener.found_again(caller.pid, id) {
                continue;
            }
            match self.found(id) {
                // The last holder has dropped it since. The name still exists.
                Err(fault) if fault.errno == Errno::NOENT => {}
                found => {
                    crash_point!("lookup.found");
                    return found;
                }
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// As `lookup`, without a request to the store. `None`: the store has to be asked, or the name does not exist.
    pub fn lookup_known(&self, caller: &Caller, dir: FileId, name: &[u8]) -> Option<Found> {
        let id = self.resolve_known(caller, dir, &Name::from(name))?;
        self.found(id).ok()
    }

    fn resolve_known(&self, caller: &Caller, dir: FileId, name: &Name) -> Option<FileId> {
        let _moving = self.metadata.moving.try_read().ok()?;
        let (path, generation, entry, links_changed) = {
            let tree = self.metadata.read_tree();
            self.permissions.permit(caller, &tree.get(dir)?.attr, 1).ok()?;
            match self.ask(&tree, dir, name) {
                Ask::Known(id) => return Some(id),
                Ask::Absent => return None,
                Ask::Store(path, generation, entry) => (path, generation, entry, tree.links_changed),
            }
        };
        let stat = self.store.known_stat(who(caller), &path)?.ok()?;
        let mut tree = self.metadata.write_tree();
        let unchanged = tree.dir(dir).is_some_and(|d| d.generation == generation) && tree.entry(dir, name) == entry;
        let counted = tree.links_changed == links_changed || stat.attr.links == 1;
        let ours = |id: FileId| tree.get(id).is_some_and(|inode| inode.is_copy() || inode.is_way(id));
        let ours = entry.and_then(Entry::logical).is_some_and(ours);
        (unchanged && counted && !ours).then(|| self.integrate(&mut tree, dir, name, &stat))
    }

    /// Counts one more reference that the kernel holds.
    pub(crate) fn found(&self, id: FileId) -> FsResult<Found> {
        let mut tree = self.metadata.write_tree();
        let inode = tree.get_mut(id).ok_or(Errno::NOENT)?;
        inode.lookups += 1;
        inode.enters_kernel();
        let ttl = self.metadata.ttl(id, inode);
        let attr = self.open_files.attr_of(id, inode);
        Ok(Found { id, attr, ttl })
    }

    /// The kernel drops `count` references to a file.
    pub fn forget(&self, id: FileId, count: u64) {
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        inode.lookups = inode.lookups.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        if inode.lookups == 0 {
            let owned = inode.owned;
            if owned {
                self.metadata.reap(&mut tree, id);
                self.metadata.commit(&mut tree);
            } else if tree.forget_mirror(id) {
                self.succession.hand_off(&Record::Forgotten { id });
            }
        }
    }

    /// The file under a name, or `ENOENT`. Asks the store where the agent does not know.
    pub(crate) fn resolve(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<FileId> {
        if name == b"." {
            return Ok(dir);
        }
        if name.len() > 255 {
            return Err(Errno::NAMETOOLONG.into());
        }
        if name.starts_with(STORE_TEMPORARY_PREFIX) {
            return Err(Errno::NOENT.into());
        }
        let name: Name = Name::from(name);
        // Known answers do not wait for the store, or for requests that do.
        let look = || -> FsResult<(Ask, u64)> {
            let tree = self.metadata.read_tree();
            let inode = tree.get(dir).ok_or(Errno::NOENT)?;
            if !inode.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
            self.permissions.permit(caller, &inode.attr, 1)?;
            Ok((self.ask(&tree, dir, &name), tree.links_changed))
        };
        match look()?.0 {
            Ask::Known(id) => return Ok(id),
            Ask::Absent => return Err(Errno::NOENT.into()),
            Ask::Store(..) => {}
        }
        for _ in 0..TRIES_MAX {
            let moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
            let (path, generation, entry, links_changed) = match look()? {
                (Ask::Known(id), _) => return Ok(id),
                (Ask::Absent, _) => return Err(Errno::NOENT.into()),
                (Ask::Store(path, generation, entry), links_changed) => (path, generation, entry, links_changed),
            };
            self.counters.store_stats.fetch_add(1, Ordering::Relaxed);
            let known = entry.and_then(Entry::logical);
            let is = |what: &dyn Fn(&Inode, FileId) -> bool| {
                let tree = self.metadata.read_tree();
                known.filter(|id| tree.get(*id).is_some_and(|inode| what(inode, *id)))
            };
            let copy = is(&|inode, _| inode.is_copy());
            // (While the store does not answer, what is here is as it was.)
            let kept = copy.or_else(|| is(&|inode, id| inode.is_way(id)));
            let result = match kept {
                Some(id) => match self.look_at_copy(who(caller), &path) {
                    Some(answer) => answer,
                    None => return Ok(id),
                },
                None => self.access.let_caller_in(caller, dir, |who| self.glance_at(who, &path)),
            };
            let mut tree = self.metadata.write_tree();
            let unchanged =
                tree.dir(dir).is_some_and(|d| d.generation == generation) && tree.entry(dir, &name) == entry;
            drop(moving);
            // The store's link count may be older than an operation of the drain that completed meanwhile.
            let counted =
                tree.links_changed == links_changed || result.as_ref().map_or(true, |stat| stat.attr.links == 1);
            if !unchanged || !counted {
                continue;
            }
            if let Some(id) = copy
                && tree.get(id).is_some_and(Inode::is_copy)
            {
                let known = tree.get(id).and_then(|inode| inode.identity.as_ref());
                let same = result.as_ref().is_ok_and(|stat| known.is_some_and(|known| known.is_still(&stat.identity)));
                if !same && !self.eviction.disown_copy(&mut tree, id) {
                    return Ok(id);
                }
            }
            if let Some(id) = known.filter(|id| tree.get(*id).is_some_and(|inode| inode.is_way(*id))) {
                let ino = tree.get(id).map(|inode| inode.attr.ino);
                let same = result.as_ref().map_or_else(|why| !is_absent(why), |stat| Some(stat.attr.ino) == ino);
                if !same && !self.eviction.disown_way(&mut tree, id) {
                    return Ok(id);
                }
            }
            return match result {
                Ok(stat) => Ok(self.integrate(&mut tree, dir, &name, &stat)),
                Err(why) if is_absent(&why) => {
                    self.vanished(&mut tree, dir, &name);
                    drop(tree);
                    self.missed(caller, dir, &name);
                    Err(Errno::NOENT.into())
                }
                Err(why) => Err(why.into()),
            };
        }
        Err(Errno::AGAIN.into())
    }

    /// What the store has under a name that the agent does not know.
    fn glance_at(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        let known = self.store.known_stat(who, path);
        known.unwrap_or_else(|| self.queries.must_ask((who, path), |store, who, path| store.glance(who, path)))
    }

    /// What the store has where the agent has a copy, or a directory with files of its own. `None`: the store does not answer, and
    /// these stay valid.
    fn look_at_copy(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        let path = path.clone();
        match self.queries.would_ask(move |store| store.glance(who, &path))? {
            Err(why) if !is_absent(&why) => None,
            answer => Some(answer),
        }
    }

    /// What a name means, as far as the agent knows without the store. The outer `None`: the store has to be asked.
    pub(crate) fn known(&self, tree: &Tree, dir: FileId, name: &Name) -> Option<Option<FileId>> {
        match self.ask(tree, dir, name) {
            Ask::Known(id) => Some(Some(id)),
            Ask::Absent => Some(None),
            Ask::Store(..) => None,
        }
    }

    fn ask(&self, tree: &Tree, dir: FileId, name: &Name) -> Ask {
        let Some(d) = tree.dir(dir) else {
            return Ask::Absent;
        };
        if let Some(entry) = d.children.get(name) {
            let Some(id) = entry.logical() else {
                return Ask::Absent;
            };
            let believed = tree.get(id).is_some_and(|inode| {
                let is_way = shares_a_server(&self.metadata) && inode.is_way(id);
                let ours = inode.owned && !is_way && (!inode.is_copy() || self.metadata.opens().contains_key(&id));
                ours || inode.handles > 0 || inode.checked.is_some_and(|at| at.elapsed() < self.config.store_ttl)
            });
            if believed {
                return Ask::Known(id);
            }
        } else if d.complete
            || d.absent.get(name).is_some_and(|at| at.elapsed() < self.config.store_ttl)
            || d.negative_cache.is_absent(name, self.config.store_ttl)
        {
            return Ask::Absent;
        }
        match tree.applied_path(dir) {
            Some(path) => Ask::Store(path.join(name), d.generation, d.children.get(name).copied()),
            None => Ask::Absent,
        }
    }

    /// Takes in what the store has under a name for which the agent has no own file.
    pub(super) fn integrate(&self, tree: &mut Tree, dir: FileId, name: &Name, stat: &StoreStat) -> FileId {
        let known = tree.entry(dir, name).and_then(Entry::logical);
        if let Some(id) = known {
            let same =
                tree.get(id).is_some_and(|inode| inode.attr.ino == stat.attr.ino && inode.attr.kind == stat.attr.kind);
            if same {
                self.refresh(tree, id, stat);
                return id;
            }
            // Another client replaced it: this is another file.
            self.vanished(tree, dir, name);
        }
        if stat.attr.kind == Kind::File
            && let Some(id) = tree.hard_links.get(&stat.attr.ino).copied()
            && tree.get(id).is_some()
            // A file system reuses an inode number only when no process has the old file open.
            && (stat.attr.links > 1 || self.metadata.opens().contains_key(&id))
        {
            tree.bind(dir, name, |entry| {
                entry.set_logical(Some(id));
                entry.set_planned(Some(id));
            });
            let owned = tree.get_mut(id).is_some_and(|inode| {
                // The name by which the agent knew it may be gone: then this one replaces it.
                if inode.logical.is_none() {
                    inode.logical = Some((dir, name.clone()));
                    inode.attr.links = inode.attr.links.max(1);
                } else {
                    inode.extra_mut().more_names.push((dir, name.clone()));
                }
                // Found again after a crash during a write in place: its state is the store's.
                let the_stores = inode.replica.is_none() && inode.spill().is_none() && !inode.dirty();
                if the_stores && inode.handles == 0 && inode.set_meta.is_none() {
                    let Attr { size_bytes, blocks, mtime, .. } = stat.attr;
                    inode.attr = Attr { size_bytes, blocks, mtime, ..inode.attr };
                }
                inode.owned
            });
            tree.is_found_at(id, &(dir, name.clone()));
            if owned {
                self.metadata.commit_apart(tree, |tree| {
                    tree.own(dir);
                    tree.txn.file(id);
                    tree.txn.entry(dir, name);
                });
            }
            return id;
        }
        let id = self.succession.mirror_id(tree, dir, name, stat);
        let mut inode = Inode::new(stat.attr);
        inode.identity = Some(stat.identity);
        inode.logical = Some((dir, name.clone()));
        inode.applied = Some((dir, name.clone()));
        inode.checked = Some(surgetank_types::clock::Moment::now());
        tree.insert(id, inode);
        if stat.attr.kind == Kind::File && stat.attr.links > 1 {
            tree.hard_links.insert(stat.attr.ino, id);
        }
        tree.bind(dir, name, |entry| {
            entry.set_logical(Some(id));
            entry.set_planned(Some(id));
        });
        if tree.hints.any()
            && let Some(path) = tree.child_path(dir, name)
        {
            // It is not in the catalog. Each later look-up of that name applies the hints again.
            tree.named(id, &path);
        }
        id
    }

    /// The store no longer has a name for which the agent has no own file.
    fn vanished(&self, tree: &mut Tree, dir: FileId, name: &Name) {
        let known = tree.entry(dir, name).and_then(Entry::logical);
        if let Some(id) = known {
            tree.bind(dir, name, |entry| *entry = Entry::default());
            let at = (dir, name.clone());
            tree.is_not_found_at(id, &at);
            if let Some(inode) = tree.get_mut(id) {
                let more = inode.extra.as_mut().map(|extra| &mut extra.more_names);
                if inode.logical.as_ref() == Some(&at) {
                    inode.logical = more.and_then(Vec::pop);
                } else if let Some(more) = more {
                    more.retain(|other| *other != at);
                }
                inode.attr.links = if inode.logical.is_some() { inode.attr.links.saturating_sub(1) } else { 0 };
                if inode.logical.is_none() && inode.lookups == 0 && tree.forget_mirror(id) {
                    self.succession.hand_off(&Record::Forgotten { id });
                }
            }
        }
        if let Some(d) = tree.dir_mut(dir) {
            if d.absent.len() >= 4096 {
                d.absent.clear();
            }
            d.absent.insert(name.clone(), clock::tick());
        }
    }

    /// Takes the store's new attributes of a file. A directory keeps the agent's own changes since then.
    pub(crate) fn refresh(&self, tree: &mut Tree, id: FileId, stat: &StoreStat) {
        // Programs see only the agent's names in it, and the store changes it when the drain gets there. Programs would
        // see a directory that changes by itself (tar fails on one).
        let complete = tree.dir(id).is_some_and(|dir| dir.complete);
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        inode.checked = Some(surgetank_types::clock::Moment::now());
        if inode.owned && !inode.is_dir() {
            return;
        }
        if inode.is_dir() {
            if inode.set_meta.is_none() {
                inode.attr.perm = stat.attr.perm;
                inode.attr.uid = stat.attr.uid;
                inode.attr.gid = stat.attr.gid;
            }
            if inode.set_meta.is_none() && !complete {
                inode.attr.mtime = inode.attr.mtime.max(stat.attr.mtime);
                inode.attr.ctime = inode.attr.ctime.max(stat.attr.ctime);
            }
            if !complete {
                inode.attr.size_bytes = stat.attr.size_bytes;
            }
            return;
        }
        inode.attr = Attr { ino: inode.attr.ino, ..stat.attr };
        inode.identity = Some(stat.identity);
    }

    /// Asks the store again about its file, when the known attributes are too old.
    pub(crate) fn revalidate(&self, id: FileId) -> FsResult<()> {
        for _ in 0..TRIES_MAX {
            if self.look_again(id)? {
                return Ok(());
            }
        }
        Err(Errno::AGAIN.into())
    }

    /// `false`: the drain changed a link count during the look.
    fn look_again(&self, id: FileId) -> FsResult<bool> {
        let look = || -> Option<(StorePath, Cred, u64, bool)> {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id)?;
            let fresh = inode.checked.is_some_and(|at| at.elapsed() < self.config.store_ttl);
            let ours = inode.owned && !inode.is_dir();
            if fresh || ours || inode.handles > 0 || inode.set_meta.is_some() {
                return None;
            }
            Some((tree.applied_path(id)?, inode.cred(), tree.links_changed, inode.is_dir()))
        };
        if look().is_none() {
            return Ok(true);
        }
        let moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
        let Some((path, who, links_changed, is_dir)) = look() else {
            return Ok(true);
        };
        self.counters.store_stats.fetch_add(1, Ordering::Relaxed);
        let who = own_cred(who);
        let result = if is_dir {
            // The way to files on the tiers: while the store does not answer, it is as it was.
            match self.queries.would_ask(move |store| store.stat(who, &path)) {
                None => return Ok(true),
                Some(Err(why)) if !is_absent(&why) && passes(&why) => return Ok(true),
                Some(answer) => answer,
            }
        } else {
            self.glance_at(who, &path)
        };
        let mut tree = self.metadata.write_tree();
        drop(moving);
        match result {
            Ok(stat) => {
                let same = id == FileId::ROOT
                    || tree.get(id).is_some_and(|inode| {
                        let known = inode.identity.as_ref().map_or(inode.attr.ino, |known| known.ino);
                        known == stat.identity.ino
                    });
                if !same {
                    return Err(Errno::STALE.into());
                }
                if tree.links_changed != links_changed && stat.attr.links > 1 {
                    return Ok(false);
                }
                self.refresh(&mut tree, id, &stat);
                Ok(true)
            }
            Err(why) if is_absent(&why) => Err(Errno::STALE.into()),
            Err(why) => Err(why.into()),
        }
    }

    /// How long the kernel may cache that a name of the directory does not exist, right after a look-up failed. The
    /// time is always short, for two reasons. Another client may have made the directory in the store, with files in
    /// it. And the next agent asks the store for the directory's content. Neither of them can correct everything that
    /// the kernel cached.
    pub fn absent_ttl(&self, dir: FileId, name: &[u8]) -> Duration {
        crash_point!("lookup.missed");
        let mut tree = self.metadata.write_tree();
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
}
