//! Closed files survive a reboot: some time after the close the agent syncs the plain file, and the catalog records
//! that. This concerns files on a tier that survives a reboot, and files that were spilled to the store.
//!
//! States of a version: closed, due, synced. Until the sync, a reboot leaves the file in doubt
//! (`namespace/recover`). Files that the store has by then need no sync.

use std::collections::VecDeque;
use std::fs::File;
use std::time::{Duration, Instant};

use surgetank_policy::config::{Config, Survives};
use surgetank_policy::rule::RuleSet;
use surgetank_state::{Inode, PlainId, Tree};
use surgetank_store::checksum::checksum;
use surgetank_store::{Cred, Store, StorePath};
use surgetank_tier::{Plain, Tiers};
use surgetank_types::clock;
use surgetank_types::model::{FileId, Kind, Mode, Timestamp};
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::base::Base;
use crate::base::queries::{StoreQueries, is_absent};
use crate::base::users::own_cred;
use crate::base::waits::Waits;
use crate::files::open_files::OpenFiles;
use crate::files::synced_copies::SyncedCopies;
use crate::metadata::Metadata;

/// The number of files that are synced before the catalog records them.
const BATCH: usize = 256;
/// A file that was in use comes again after this time, at the earliest.
const AGAIN: Duration = Duration::from_secs(1);
const IDLE: Duration = Duration::from_secs(3600);
/// A larger file is drained again after a close, rather than compared with its checksum.
const COMPARED_BYTES_MAX: u64 = 1 << 30;

#[derive(Default)]
pub(crate) struct Unsynced(VecDeque<Closed>);

/// Where a version is stored, and under which path.
enum At {
    Tier(PlainId, Vec<u8>),
    Store(Cred, StorePath),
}

fn needs_sync(inode: &Inode) -> bool {
    inode.sealed && inode.dirty() && !inode.is_synced() && inode.attr.kind == Kind::File
}

struct Closed {
    id: FileId,
    version: u32,
    due: Instant,
}

/// What fsync promises: plain files, names, and files in the store that survive the machine.
pub struct Syncs {
    pub(super) config: Arc<Config>,
    pub(super) queries: Arc<StoreQueries>,
    pub(super) rules: Arc<RuleSet>,
    store: Arc<dyn Store>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) waits: Arc<Waits>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) open_files: Arc<OpenFiles>,
    pub(super) synced_copies: Arc<SyncedCopies>,
    unsynced: Mutex<Unsynced>,
    unsynced_came: Condvar,
}

impl Syncs {
    pub(crate) fn new(
        base: &Base,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        synced_copies: &Arc<SyncedCopies>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            queries: base.queries.clone(),
            rules: base.rules.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            waits: base.waits.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            synced_copies: synced_copies.clone(),
            unsynced: Mutex::default(),
            unsynced_came: Condvar::new(),
        }
    }

    /// Does the store have exactly the plain file's present bytes and attributes, because an fsync brought them there?
    /// The agent does not see the writes of direct writers: so it compares times, then the checksum (writes through a
    /// mapping need not change a time). The caller holds the inode's lock. A very large file counts as written: reading
    /// it would delay other files.
    pub(crate) fn is_published(&self, id: FileId, plain: &File) -> bool {
        let known = {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).filter(|inode| !inode.dirty() && inode.publish.is_none());
            let inode = inode.filter(|inode| inode.attr.size_bytes <= COMPARED_BYTES_MAX);
            inode.filter(|inode| inode.applied.is_some()).and_then(|inode| Some((inode.attr, inode.checksum()?)))
        };
        let Some((attr, sum)) = known else { return false };
        let unchanged = || {
            rustix::fs::fstat(plain).is_ok_and(|stat| {
                let time = |seconds, nanos: u64| Timestamp::from_parts(seconds, nanos as u32);
                u64::try_from(stat.st_size) == Ok(attr.size_bytes)
                    && time(stat.st_mtime, stat.st_mtime_nsec) == attr.mtime
                    && time(stat.st_ctime, stat.st_ctime_nsec) <= attr.ctime
            })
        };
        let same_bytes = || checksum(plain, &|_| Ok(())).is_ok_and(|now| now == sum);
        unchanged() && same_bytes() && unchanged()
    }

    fn unsynced(&self) -> MutexGuard<'_, Unsynced> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the next file is due. `to_be_synced` wakes the thread when the queue gets its first file.
    pub(crate) fn wait_unsynced(&self, next: Option<Duration>, stop: &dyn Fn() -> bool) {
        let unsynced = self.unsynced();
        // While processes close files all the time, the thread is not woken for each of them.
        if !stop() && (next.is_some() || unsynced.0.is_empty()) {
            drop(self.unsynced_came.wait_timeout(unsynced, next.unwrap_or(IDLE)));
        }
    }

    pub(crate) fn end_unsynced(&self) {
        drop(self.unsynced());
        self.unsynced_came.notify_all();
    }

    /// Queues a version without a sync, if its place can survive a reboot.
    pub(crate) fn to_be_synced(&self, tree: &Tree, id: FileId) {
        self.to_be_synced_after(tree, id, self.config.sync_after);
    }

    fn to_be_synced_after(&self, tree: &Tree, id: FileId, pause: Duration) {
        let Some(inode) = tree.get(id).filter(|inode| needs_sync(inode)) else { return };
        let volatile = inode.replica.is_some_and(|plain| self.tiers.device(plain.device).survives() == Survives::Agent);
        if volatile || inode.replica.is_none() && inode.spill().is_none() {
            return;
        }
        let mut unsynced = self.unsynced();
        unsynced.0.push_back(Closed { id, version: inode.version, due: clock::tick() + pause });
        if unsynced.0.len() == 1 {
            self.unsynced_came.notify_all();
        }
    }

    /// Syncs the files that are due, or all. Returns the time until the next one is due.
    pub(crate) fn sync_closed(&self, all: bool) -> Option<Duration> {
        // Files that are queued again meanwhile wait for the next call.
        let mut left = self.unsynced().0.len();
        loop {
            let now = clock::tick();
            let due: Vec<(FileId, u32)> = {
                let mut unsynced = self.unsynced();
                let batch = unsynced.0.iter().take(BATCH.min(left));
                let count = batch.take_while(|closed| all || closed.due <= now).count();
                left -= count;
                unsynced.0.drain(..count).map(|closed| (closed.id, closed.version)).collect()
            };
            if due.is_empty() {
                let unsynced = self.unsynced();
                return unsynced.0.front().map(|closed| closed.due.saturating_duration_since(now));
            }
            self.sync_these(&due);
        }
    }

    fn sync_these(&self, due: &[(FileId, u32)]) {
        let needed: Vec<(FileId, u32, At)> = {
            let tree = self.metadata.read_tree();
            let needs = |(id, version): &(FileId, u32)| {
                tree.get(*id).filter(|inode| needs_sync(inode) && inode.version == *version)?;
                // A temporary file is not needed after a reboot.
                let path = tree.logical_path(*id)?;
                let is_temporary = self.metadata.mode_for(&tree, *id, &path) == Mode::Remove;
                (!is_temporary || surgetank_state::is_for_another(&tree, *id)).then_some(())?;
                Some((*id, *version, self.newest_at(&tree, *id)?))
            };
            due.iter().filter_map(needs).collect()
        };
        let mut synced = Vec::new();
        for (id, version, at) in needed {
            match self.open_to_sync(&at).and_then(|file| file.map_or(Ok(false), |file| file.sync_data().map(|()| true)))
            {
                Ok(true) => synced.push((id, version)),
                // Renamed, moved, evicted or deleted meanwhile: if it still exists, a later call syncs it.
                Ok(false) => self.to_be_synced_after(&self.metadata.read_tree(), id, self.config.sync_after.max(AGAIN)),
                Err(why) => {
                    if let At::Tier(plain, _) = &at {
                        self.tiers.device_failed(plain.device, &why);
                    }
                    tracing::warn!(%why, id = id.0, "a file could not be synced on its tier");
                }
            }
        }
        if synced.is_empty() {
            return;
        }
        let files = synced.len();
        let mut tree = self.metadata.write_tree();
        for (id, version) in synced {
            self.is_synced(&mut tree, id, version);
        }
        drop(tree);
        crash_point!("sync.written_down");
        match self.metadata.sync_catalog() {
            Ok(()) => tracing::debug!(files, "closed files are synced"),
            Err(why) => tracing::warn!(%why, "the catalog could not be synced"),
        }
    }

    fn newest_at(&self, tree: &Tree, id: FileId) -> Option<At> {
        let inode = tree.get(id)?;
        match (inode.replica, inode.spill()) {
            (Some(plain), _) => Some(At::Tier(plain, tree.logical_path(id)?)),
            (None, Some((dir, name))) => Some(At::Store(inode.cred(), tree.applied_path(*dir)?.join(name))),
            (None, None) => None,
        }
    }

    /// `None`: the file is not there any more, or the path has another file.
    fn open_to_sync(&self, at: &At) -> std::io::Result<Option<File>> {
        let opened = match at {
            At::Tier(plain, path) => self.tiers.device(plain.device).open(path, false).and_then(|file| {
                let there = Plain::of(&file)?;
                Ok((PlainId::new(plain.device, &there) == *plain).then_some(file))
            }),
            At::Store(who, path) => self.store.open(own_cred(*who), path, false).map(Some),
        };
        match opened {
            Err(why) if is_absent(&why) => Ok(None),
            opened => opened,
        }
    }

    /// Syncs a closed file, even if a process has opened it since. `false`: the file was moving just now.
    pub(crate) fn sync_closed_file(&self, id: FileId, version: u32) -> std::io::Result<bool> {
        let at = {
            let tree = self.metadata.read_tree();
            self.newest_at(&tree, id)
        };
        // The store has the content, or the file is gone.
        let Some(at) = at else { return Ok(true) };
        let Some(file) = self.open_to_sync(&at)? else { return Ok(false) };
        self.sync_version(id, version, &file)?;
        if self.metadata.read_tree().get(id).is_some_and(|inode| !inode.sealed) {
            self.promise_bytes(id);
        }
        Ok(true)
    }

    /// The version cannot have changed meanwhile: an open for writing starts another one.
    fn is_synced(&self, tree: &mut Tree, id: FileId, version: u32) {
        if let Some(inode) = tree.get_mut(id)
            && inode.sealed
            && inode.version == version
        {
            inode.synced = version;
            tree.txn.file(id);
        }
    }

    /// `fsync` of a sealed file.
    fn sync_version(&self, id: FileId, version: u32, file: &File) -> std::io::Result<()> {
        file.sync_all()?;
        let mut tree = self.metadata.write_tree();
        self.is_synced(&mut tree, id, version);
        Ok(())
    }

    /// Records the promise to a process that the open file's present bytes survive.
    pub(crate) fn promise_bytes(&self, id: FileId) {
        let mut tree = self.metadata.write_tree();
        if let Some(inode) = tree.get_mut(id)
            && inode.promised < inode.present_version()
            && inode.owned
        {
            inode.promised = inode.present_version();
            tree.txn.file(id);
        }
    }
}
