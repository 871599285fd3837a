//! Resolution: from names to files. Where the agent has no entry of its own, it asks the store. It caches the answer
//! only for the configured time (`store_ttl`), because other clients change the store too.
//!
//! The danger that this avoids: the store's answer, older than a change by the agent itself, replaces that change.

use std::io;
use surgetank_types::sync::PoisonError;
use surgetank_types::sync::atomic::Ordering;

use crate::handoff::Record;
use surgetank_store::verdict::{self, Verdict};
use surgetank_store::{Cred, StorePath, StoreStat};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, STORE_TEMPORARY_PREFIX};

use super::{Found, Namespace};
use surgetank_state::{Entry, Inode, Name, Tree};

/// The limit of tries for a look-up in the store that keeps overlapping changes.
const TRIES_MAX: usize = 100;

enum Ask {
    Known(FileId),
    Absent,
    /// The store has to be asked, at this path; with the directory's generation and the entry before that.
    Store(StorePath, u32, Option<Entry>),
}

impl Namespace {
    pub fn lookup(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<Found> {
        for _ in 0..TRIES_MAX {
            let id = self.resolve(caller, dir, name)?;
            if !self.found_again(caller.pid, id) {
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
        let _moving = self.moving.try_read().ok()?;
        let (path, generation, entry, links_changed) = {
            let tree = self.read_tree();
            self.permit(caller, &tree.get(dir)?.attr, 1).ok()?;
            match self.ask(&tree, dir, name) {
                Ask::Known(id) => return Some(id),
                Ask::Absent => return None,
                Ask::Store(path, generation, entry) => (path, generation, entry, tree.links_changed),
            }
        };
        let stat = self.store.told(Self::who(caller), &path)?.ok()?;
        let mut tree = self.write_tree();
        let unchanged = tree.dir(dir).is_some_and(|d| d.generation == generation) && tree.entry(dir, name) == entry;
        let counted = tree.links_changed == links_changed || stat.attr.links == 1;
        let ours = entry.and_then(Entry::logical).is_some_and(|id| tree.get(id).is_some_and(Inode::is_copy));
        (unchanged && counted && !ours).then(|| self.integrate(&mut tree, dir, name, &stat))
    }

    /// Counts one more reference that the kernel holds.
    pub(super) fn found(&self, id: FileId) -> FsResult<Found> {
        let mut tree = self.write_tree();
        let inode = tree.get_mut(id).ok_or(Errno::NOENT)?;
        inode.lookups += 1;
        inode.enters_kernel();
        let ttl = self.ttl(id, inode);
        let attr = self.attr_of(id, inode);
        Ok(Found { id, attr, ttl })
    }

    pub fn forget(&self, id: FileId, count: u64) {
        let mut tree = self.write_tree();
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        inode.lookups = inode.lookups.saturating_sub(u32::try_from(count).unwrap_or(u32::MAX));
        if inode.lookups == 0 {
            let owned = inode.owned;
            if owned {
                self.reap(&mut tree, id);
                self.commit(&mut tree);
            } else if tree.forget_mirror(id) {
                self.succession.hand_off(&Record::Forgotten { id });
            }
        }
    }

    /// The file under a name, or `ENOENT`. Asks the store where the agent does not know.
    pub(super) fn resolve(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<FileId> {
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
            let tree = self.read_tree();
            let inode = tree.get(dir).ok_or(Errno::NOENT)?;
            if !inode.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
            self.permit(caller, &inode.attr, 1)?;
            Ok((self.ask(&tree, dir, &name), tree.links_changed))
        };
        match look()?.0 {
            Ask::Known(id) => return Ok(id),
            Ask::Absent => return Err(Errno::NOENT.into()),
            Ask::Store(..) => {}
        }
        for _ in 0..TRIES_MAX {
            let moving = self.moving.read().unwrap_or_else(PoisonError::into_inner);
            let (path, generation, entry, links_changed) = match look()? {
                (Ask::Known(id), _) => return Ok(id),
                (Ask::Absent, _) => return Err(Errno::NOENT.into()),
                (Ask::Store(path, generation, entry), links_changed) => (path, generation, entry, links_changed),
            };
            self.counters.store_stats.fetch_add(1, Ordering::Relaxed);
            let copy =
                entry.and_then(Entry::logical).filter(|id| self.read_tree().get(*id).is_some_and(Inode::is_copy));
            let result = match copy {
                Some(id) => match self.look_at_copy(Self::who(caller), &path) {
                    Some(answer) => answer,
                    None => return Ok(id),
                },
                None => self.let_caller_in(caller, dir, |who| self.glance_at(who, &path)),
            };
            let mut tree = self.write_tree();
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
                let known = tree.get(id).and_then(|inode| inode.identity.as_deref());
                let same = result.as_ref().is_ok_and(|stat| known.is_some_and(|known| known.is_still(&stat.identity)));
                if !same && !self.disown_copy(&mut tree, id) {
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
        let known = self.store.told(who, path);
        known.unwrap_or_else(|| self.queries.must_ask((who, path), |store, who, path| store.glance(who, path)))
    }

    /// What the store has where the agent has a copy. `None`: the store does not answer, and the copy stays valid.
    fn look_at_copy(&self, who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        let path = path.clone();
        match self.queries.would_ask(move |store| store.glance(who, &path))? {
            Err(why) if !is_absent(&why) => None,
            answer => Some(answer),
        }
    }

    /// What a name means, as far as the agent knows without the store. The outer `None`: the store has to be asked.
    pub(super) fn known(&self, tree: &Tree, dir: FileId, name: &Name) -> Option<Option<FileId>> {
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
                let ours = inode.owned && (!inode.is_copy() || self.opens().contains_key(&id));
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
    fn integrate(&self, tree: &mut Tree, dir: FileId, name: &Name, stat: &StoreStat) -> FileId {
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
            && (stat.attr.links > 1 || self.opens().contains_key(&id))
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
                self.commit_apart(tree, |tree| {
                    tree.own(dir);
                    tree.txn.file(id);
                    tree.txn.entry(dir, name);
                });
            }
            return id;
        }
        let id = self.succession.mirror_id(tree, dir, name, stat);
        let mut inode = Inode::new(stat.attr);
        inode.identity = Some(Box::new(stat.identity));
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
    pub(super) fn refresh(&self, tree: &mut Tree, id: FileId, stat: &StoreStat) {
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
        inode.identity = Some(Box::new(stat.identity));
    }

    /// Asks the store again about its file, when the known attributes are too old.
    pub(super) fn revalidate(&self, id: FileId) -> FsResult<()> {
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
            let tree = self.read_tree();
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
        let moving = self.moving.read().unwrap_or_else(PoisonError::into_inner);
        let Some((path, who, links_changed, is_dir)) = look() else {
            return Ok(true);
        };
        self.counters.store_stats.fetch_add(1, Ordering::Relaxed);
        let who = self.own_cred(who);
        let result = if is_dir {
            // The way to what lies in the tiers: while the store does not tell, it is as it was.
            match self.queries.would_ask(move |store| store.stat(who, &path)) {
                None => return Ok(true),
                Some(Err(why)) if !is_absent(&why) && passes(&why) => return Ok(true),
                Some(answer) => answer,
            }
        } else {
            self.glance_at(who, &path)
        };
        let mut tree = self.write_tree();
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

    /// Credentials for the agent's own requests, not on behalf of a caller: root where the agent is root.
    pub(crate) fn own_cred(&self, owner: Cred) -> Cred {
        if rustix::process::geteuid().is_root() { Cred { uid: 0, gid: 0 } } else { owner }
    }
}

/// The store is in trouble, not the file.
pub(super) fn passes(why: &io::Error) -> bool {
    verdict::classify(verdict::errno_of(why)) == Verdict::Retry
}

pub(super) fn is_absent(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}
