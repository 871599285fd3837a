//! Directory listings: the store's names, merged with the agent's own.
//!
//! Invariant: a listing is a snapshot from its start. So readdir during changes neither repeats nor loses a name that
//! stays. The danger that this avoids: a removed file appears again, because the store still lists it.

use std::collections::{BTreeMap, HashSet};

use foldhash::HashMap;

use surgetank_state::{Inode, Name};
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::queries::StoreQueries;
use crate::base::succession::Succession;
use crate::base::users::Permissions;
use crate::base::{Base, Counters};
use crate::files::Files;
use crate::files::open_files::OpenFiles;
use crate::handoff::{LeftListing, Record};
use crate::metadata::access::Access;
use crate::metadata::{Metadata, shares_a_server};

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The name.
    pub name: Name,
    /// Kind of the file.
    pub kind: Kind,
    /// Inode number.
    pub ino: u64,
}

#[derive(Debug)]
pub(crate) struct Snapshot {
    dir: FileId,
    caller: Caller,
    /// Taken at the first read from the start, and again at every rewinddir. A kernel that kept the listing never reads.
    entries: Option<Arc<Vec<Listed>>>,
    /// An earlier agent began it: the kernel continues at this position, after this name.
    resumed: Option<(u64, Name)>,
}

/// A directory that was opened.
#[derive(Debug, Clone, Copy)]
pub struct Listing {
    /// Handle of the open directory.
    pub fh: u64,
    /// The kernel may keep the listing: only the agent changes the directory.
    pub cache: bool,
    /// A listing that the kernel already has is still valid.
    pub keep_cache: bool,
    /// The listing omits the files' attributes.
    pub bare: bool,
}

/// Directories that processes read.
pub struct Listings {
    counters: Arc<Counters>,
    queries: Arc<StoreQueries>,
    succession: Arc<Succession>,
    access: Arc<Access>,
    metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    permissions: Arc<Permissions>,
    listings: Mutex<HashMap<u64, Arc<Mutex<Snapshot>>>>,
}

impl Listings {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        Self {
            counters: base.counters.clone(),
            queries: base.queries.clone(),
            succession: base.succession.clone(),
            permissions: base.permissions.clone(),
            access: files.access.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            listings: Mutex::default(),
        }
    }

    /// Returns a handle, and whether only the agent changes the directory (the kernel may then keep its listing).
    pub fn opendir(&self, caller: &Caller, dir: FileId) -> FsResult<Listing> {
        let (cache, keep_cache, bare) = {
            let mut tree = self.metadata.write_tree();
            let inode = tree.get_mut(dir).ok_or(Errno::STALE)?;
            self.permissions.permit(caller, &inode.attr, 4)?;
            let d = inode.dir.as_mut().ok_or(Errno::NOTDIR)?;
            // False if a process made a file without the kernel's knowledge since the last notification.
            let keep = std::mem::replace(&mut d.is_in_kernel, true);
            (d.complete && !d.is_delegated, d.complete && !d.is_delegated && keep, d.listed_bare)
        };
        let snapshot = Snapshot { dir, caller: *caller, entries: None, resumed: None };
        let fh = self.open_files.new_handle();
        self.succession.hand_off(&Record::Listing { fh, dir, uid: caller.uid, gid: caller.gid });
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(Mutex::new(snapshot)));
        Ok(Listing { fh, cache, keep_cache, bare })
    }

    /// The whole listing, without `.` and `..`. The caller reads from position `offset`.
    pub fn listing(&self, fh: u64, offset: u64) -> FsResult<Arc<Vec<Listed>>> {
        let snapshot =
            self.listings.lock().unwrap_or_else(PoisonError::into_inner).get(&fh).cloned().ok_or(Errno::BADF)?;
        let mut snapshot = snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(entries), true) = (&snapshot.entries, offset > 0) {
            return Ok(entries.clone());
        }
        let mut entries = self.merged(&snapshot.caller, snapshot.dir)?;
        match snapshot.resumed.take() {
            Some((position, before)) if position == offset => resume(&mut entries, position, &before),
            _ => {}
        }
        let entries = Arc::new(entries);
        snapshot.entries = Some(entries.clone());
        Ok(entries)
    }

    /// Closes an open directory.
    pub fn releasedir(&self, fh: u64) {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        self.succession.hand_off(&Record::Closed { fh });
    }

    /// Records the position up to which the kernel has the listing.
    pub fn listed(&self, fh: u64, position: u64, last: &[u8]) {
        self.succession.hand_off(&Record::Listed { fh, offset: position, before: last });
    }

    /// A directory that programs had open when an earlier agent was killed.
    pub(crate) fn listing_left(&self, fh: u64, left: &LeftListing) {
        let caller = Caller { uid: left.uid, gid: left.gid, pid: 0, umask: 0 };
        let resumed = left.at.as_ref().map(|(position, before)| (*position, Name::from(&**before)));
        let snapshot = Snapshot { dir: left.dir, caller, entries: None, resumed };
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(Mutex::new(snapshot)));
    }

    /// The parent of a directory; of the root, the root.
    pub fn parent(&self, dir: FileId) -> FileId {
        let tree = self.metadata.read_tree();
        tree.get(dir).and_then(|inode| inode.logical.as_ref()).map_or(FileId::ROOT, |place| place.0)
    }

    pub(crate) fn merged(&self, caller: &Caller, dir: FileId) -> FsResult<Vec<Listed>> {
        if let Some(listed) = self.listed_complete(dir)? {
            return Ok(listed);
        }
        let mut names: BTreeMap<Name, (Kind, u64)> = BTreeMap::new();
        let mut hidden: Vec<Name> = Vec::new();
        // The store decides whether these still exist. (A file that becomes a copy meanwhile may be elsewhere in the
        // store's answer.)
        let mut copies: HashSet<FileId> = HashSet::new();
        {
            let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
            let path = {
                let tree = self.metadata.read_tree();
                let d = tree.dir(dir).ok_or(Errno::NOTDIR)?;
                // The drain may carry out the removal of these names during the listing. Then no entry hides them any
                // more, and they must not come back.
                hidden.extend(
                    d.children.iter().filter(|(_, entry)| entry.logical().is_none()).map(|(name, _)| name.clone()),
                );
                let is_copy = |id: FileId| tree.get(id).is_some_and(Inode::is_copy);
                let ids = d.children.values().filter_map(|entry| entry.logical());
                copies.extend(ids.filter(|id| is_copy(*id)));
                if d.complete { None } else { tree.applied_path(dir) }
            };
            if let Some(path) = path {
                self.counters.store_lists.fetch_add(1, Ordering::Relaxed);
                let ask = |who| self.queries.must_ask((who, &path), |store, who, path| store.list(who, path, false));
                for entry in self.access.let_caller_in(caller, dir, ask)? {
                    names.insert(Name::from(entry.name), (entry.kind, entry.ino));
                }
            }
        }
        for name in hidden {
            names.remove(&name);
        }
        let mut tree = self.metadata.write_tree();
        // A name that is shown now must also be found by a look-up.
        if let Some(d) = tree.dir_mut(dir).filter(|d| !d.complete) {
            for name in names.keys() {
                d.absent.remove(name);
                d.negative_cache.may_be_there(name);
            }
        }
        let d = tree.dir(dir).ok_or(Errno::NOTDIR)?;
        for (name, entry) in &d.children {
            match entry.logical().and_then(|id| Some((id, tree.get(id)?))) {
                // A mirror of the store's own entry: the listing has just shown whether it still exists.
                Some((id, inode)) if (!inode.owned || inode.is_copy() && copies.contains(&id)) && !d.complete => {}
                // (Another member may have removed it.)
                Some((id, inode)) if shares_a_server(&self.metadata) && inode.is_way(id) && !d.complete => {}
                // (Programs do not see it.)
                Some((id, _)) if tree.homes == Some(id) => {}
                Some((_, inode)) => {
                    names.insert(name.clone(), (inode.attr.kind, inode.attr.ino));
                }
                None => {
                    names.remove(name);
                }
            }
        }
        Ok(names.into_iter().map(|(name, (kind, ino))| Listed { name, kind, ino }).collect())
    }

    /// The listing of a directory that only the agent has: it needs no request and no merge.
    fn listed_complete(&self, dir: FileId) -> FsResult<Option<Vec<Listed>>> {
        let tree = self.metadata.read_tree();
        let d = tree.dir(dir).ok_or(Errno::NOTDIR)?;
        if !d.complete {
            return Ok(None);
        }
        let listed = d.children.iter().filter_map(|(name, entry)| {
            let inode = tree.get(entry.logical()?)?;
            Some(Listed { name: name.clone(), kind: inode.attr.kind, ino: inode.attr.ino })
        });
        Ok(Some(listed.collect()))
    }
}

/// Puts the entries after the name at the position. Names that came or went before it do not matter any more.
fn resume(entries: &mut Vec<Listed>, position: u64, before: &[u8]) {
    // Two positions are for `.` and `..`.
    let listed = usize::try_from(position.saturating_sub(2)).unwrap_or(usize::MAX);
    let behind = entries.partition_point(|listed| &*listed.name <= before);
    if behind >= listed {
        entries.drain(listed..behind);
    } else if listed - behind <= LISTED_MAX {
        let filler = Listed { name: Name::from(before), kind: Kind::File, ino: 0 };
        entries.splice(behind..behind, std::iter::repeat_n(filler, listed - behind));
    }
}

/// No directory of a known file system has more names.
const LISTED_MAX: usize = 1 << 28;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_continues_after_the_last_name_despite_changes() {
        let listed = |name: &[u8]| Listed { name: Name::from(name), kind: Kind::File, ino: 1 };
        let behind = |names: &[&[u8]], position: u64| {
            let mut entries: Vec<Listed> = names.iter().map(|name| listed(name)).collect();
            resume(&mut entries, position, b"c");
            let at = usize::try_from(position - 2).unwrap();
            entries[at..].iter().map(|listed| listed.name.to_vec()).collect::<Vec<_>>()
        };
        // Already given to the kernel: a, b, c.
        assert_eq!(behind(&[b"a", b"b", b"c", b"d", b"e"], 5), [b"d", b"e"]);
        assert_eq!(behind(&[b"c", b"d", b"e"], 5), [b"d", b"e"], "two of them are gone");
        assert_eq!(behind(&[b"a", b"aa", b"ab", b"b", b"d"], 5), [b"d"], "two came, one went");
        assert!(behind(&[b"a"], 5).is_empty());
    }
}
