//! fsync: what has to be durable before it returns, by the target that the rules name (tier or store).
//!
//! The danger that this avoids: fsync returns, and the machine's end costs what it promised.

use std::time::Duration;

use surgetank_policy::config::Survives;
use surgetank_state::{Inode, PlainId, Tree};
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, FsyncTarget, OpKind};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::users::is_drained;
use crate::content::{Location, Open};
use crate::files::open_files::as_written;
use crate::files::sync::Syncs;

/// The limit of tries for the sync of a closed file that keeps moving.
const LOOKS_MAX: usize = 1000;
/// How often a thread that waits looks again.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Where an fsync of a file brings its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The disk of its tier.
    Tier,
    /// A synced copy beside the agent's state.
    Copy,
    /// Its name in the store.
    Store,
}

impl From<FsyncTarget> for Reach {
    fn from(target: FsyncTarget) -> Self {
        match target {
            FsyncTarget::Tier => Self::Tier,
            FsyncTarget::Store => Self::Store,
        }
    }
}

impl Syncs {
    /// The promise of fsync for the file: its tier or the store.
    pub(crate) fn fsync_target(&self, id: FileId, path: &[u8], location: Location) -> Reach {
        let decision = self.rules.decide(path);
        if !is_drained(self.metadata.mode_for(&self.metadata.read_tree(), id, path)) {
            return Reach::Tier;
        }
        let wanted = decision.fsync.or(self.config.fsync).map(Reach::from);
        // (The plain file here is empty.)
        if self.metadata.read_tree().get(id).is_some_and(|inode| inode.home().is_some()) {
            return Reach::Store;
        }
        match location {
            Location::Store | Location::Arriving => Reach::Tier,
            // The bytes survive the node there, but only the published name is found again without the agent.
            Location::StoreTemporary => wanted.unwrap_or(Reach::Tier),
            Location::Tier(device) => wanted.unwrap_or(match self.tiers.device(device).survives() {
                Survives::Agent if self.synced_copies.are_made() && self.tiers.device(device).in_memory() => {
                    Reach::Copy
                }
                Survives::Agent => Reach::Store,
                Survives::Reboot | Survives::Node => Reach::Tier,
            }),
        }
    }

    /// Is the open file on a tier that survives the agent and its machine's memory?
    pub(crate) fn is_synced_by_tier(&self, open: &Open) -> bool {
        match open.content().location {
            Location::Tier(device) => self.tiers.device(device).survives() != Survives::Agent,
            _ => false,
        }
    }

    /// Makes an open file durable as far as its rule promises: on its tier, or in the store. `data_only`: fdatasync.
    /// Errors: an unknown handle, a failed sync, or a publication that failed.
    pub fn fsync(&self, fh: u64, data_only: bool) -> FsResult<()> {
        let handle = self.open_files.handle(fh)?;
        self.fsync_open(&handle.open, data_only)
    }

    pub(crate) fn fsync_open(&self, open: &Arc<Open>, data_only: bool) -> FsResult<()> {
        let content = open.content();
        let path = self.metadata.read_tree().logical_path(open.id);
        let target = path.as_deref().map_or(Reach::Tier, |path| self.fsync_target(open.id, path, content.location));
        match target {
            Reach::Tier => {
                // The gate keeps the file on its tier meanwhile.
                let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
                let content = open.content();
                if data_only {
                    content.file.sync_data()?;
                } else {
                    content.file.sync_all()?;
                }
                self.promise_bytes(open.id);
                self.metadata.sync_catalog()?;
                Ok(())
            }
            Reach::Copy => match self.sync_copy(open) {
                Ok(()) => Ok(()),
                Err(why) => {
                    if why.kind() != std::io::ErrorKind::Unsupported {
                        tracing::warn!(%why, id = open.id.0, "a synced copy could not be made: the file is published");
                    }
                    self.flush_to_store(open)
                }
            },
            Reach::Store => self.flush_to_store(open),
        }
    }

    /// Brings the present content of an open file to its synced copy, and its names to the catalog's disk.
    fn sync_copy(&self, open: &Arc<Open>) -> std::io::Result<()> {
        // The gate keeps the file on its tier meanwhile.
        let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
        let content = open.content();
        if !matches!(content.location, Location::Tier(_)) {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        let version = {
            let tree = self.metadata.read_tree();
            // The store has everything, or the file has no name any more.
            let needs = |inode: &&Inode| !inode.sealed || inode.dirty();
            let Some(inode) = tree.get(open.id).filter(needs) else { return Ok(()) };
            inode.present_version()
        };
        self.promise_bytes(open.id);
        self.synced_copies.sync(open.id, version, &content.file)?;
        self.metadata.sync_catalog()
    }

    /// fsync of a file that is sealed by now.
    pub(crate) fn fsync_closed(&self, id: FileId) -> FsResult<()> {
        let (path, version) = {
            let mut tree = self.metadata.write_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.dirty()) else {
                return Ok(());
            };
            let (publish, version, replica) = (inode.publish, inode.version, inode.replica);
            let Some(path) = tree.logical_path(id) else {
                return Ok(());
            };
            tree.hurry(publish);
            (replica.map(|plain| (path, Location::Tier(plain.device))), version)
        };
        match path {
            Some((path, location)) if self.fsync_target(id, &path, location) != Reach::Tier => {
                self.metadata.wake();
                self.wait_durable(id, version)
            }
            _ => {
                for _ in 0..LOOKS_MAX {
                    if self.sync_closed_file(id, version)? {
                        return self.metadata.sync_catalog().map_err(Into::into);
                    }
                }
                Err(Errno::IO.into())
            }
        }
    }

    /// The store has names of the file that no process has looked up. Before the known name goes, and the content with
    /// it, those names must show the written bytes. (Such a file is written in place, unless a reader had its copy on a
    /// tier open when the writer came.)
    pub(crate) fn spare_unknown_names(&self, id: FileId) -> FsResult<()> {
        let (open, publish, version) = {
            let mut tree = self.metadata.write_tree();
            let Some(inode) = tree.get(id) else { return Ok(()) };
            if !inode.has_unknown_names() || (inode.sealed && !inode.dirty()) {
                return Ok(());
            }
            let (publish, version) = (inode.publish, inode.version);
            tree.hurry(publish);
            self.metadata.commit(&mut tree);
            (self.metadata.open_of(id).filter(|open| open.writers() > 0), publish, version)
        };
        match open {
            Some(open) if matches!(open.content().location, Location::Tier(_)) => self.flush_to_store(&open),
            None if publish.is_some() => {
                self.metadata.wake();
                self.wait_durable(id, version)
            }
            _ => Ok(()),
        }
    }

    /// Publishes the present content of an open file and waits until it is durable.
    fn flush_to_store(&self, open: &Arc<Open>) -> FsResult<()> {
        let id = open.id;
        let version = {
            let _inode = self.metadata.lock_inode(id);
            let may_be_dirty =
                open.written.swap(false, Ordering::Relaxed) || open.direct_writer.load(Ordering::Relaxed);
            let dirty = may_be_dirty && !self.is_published(id, &open.content().file);
            let (mut tree, stat) = self.open_files.look_and_lock(id, &open.content().file)?;
            let Some(inode) = tree.get_mut(id) else {
                return Ok(());
            };
            if dirty {
                inode.attr = as_written(inode, &stat, Some(open));
                inode.version += 1;
                if let Some(seq) = inode.publish {
                    tree.take_back(id, seq);
                }
            }
            let version = tree.get(id).map_or(0, |inode| inode.version);
            self.metadata.queue_publish(&mut tree, id);
            let publish = tree.get(id).and_then(|inode| inode.publish);
            tree.hurry(publish);
            version
        };
        self.metadata.wake();
        self.wait_durable(id, version)
    }

    pub(crate) fn wait_durable(&self, id: FileId, version: u32) -> FsResult<()> {
        let began = surgetank_types::clock::tick();
        let mut tree = self.metadata.read_tree();
        loop {
            let Some(inode) = tree.get(id) else {
                return Ok(());
            };
            if inode.durable >= version || inode.logical.is_none() {
                return Ok(());
            }
            let Some(seq) = inode.publish else {
                drop(tree);
                if !self.publish_newest(id) {
                    return Ok(());
                }
                self.metadata.wake();
                tree = self.metadata.read_tree();
                continue;
            };
            if let Some(trouble) =
                tree.ops.range(..=seq).find_map(|(_, op)| op.error.as_ref().filter(|trouble| trouble.lasting))
            {
                return Err(Fault::new(Errno::from_raw_os_error(trouble.errno), trouble.text.clone()));
            }
            self.queries.must_answer(began)?;
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            tree = self.metadata.wait_changed(tree, LOOK_EVERY);
        }
    }

    /// The drain has just published an older version: queues the newest one. `false`: the file is not published.
    fn publish_newest(&self, id: FileId) -> bool {
        let mut tree = self.metadata.write_tree();
        if tree.get(id).is_some_and(|inode| inode.publish.is_none()) {
            self.metadata.queue_publish(&mut tree, id);
        }
        let newest = tree.get(id).and_then(|inode| inode.publish);
        tree.hurry(newest);
        newest.is_some()
    }

    /// Does the operation publish a file that the machine's end would cost?
    fn is_only_in_memory(&self, tree: &Tree, kind: &OpKind) -> bool {
        let OpKind::Publish { file, .. } = kind else { return false };
        tree.get(*file).is_some_and(|inode| {
            let is_lost = |plain: PlainId| self.tiers.device(plain.device).survives() == Survives::Agent;
            inode.dirty() && inode.replica.is_some_and(is_lost) && !self.synced_copies.has(*file, inode.version)
        })
    }

    /// Makes names in a directory durable. On the tier, a sync of the catalog does that; in the store, the operations
    /// on the names do. Where fsync makes copies, a name is as durable as its file: files in memory without a copy are published.
    pub fn fsync_dir(&self, dir: FileId) -> FsResult<()> {
        self.metadata.sync_catalog()?;
        let path = self.metadata.read_tree().logical_path(dir).unwrap_or_default();
        let volatile = self.tiers.devices().next().is_some_and(|device| device.survives() == Survives::Agent);
        let decision = self.rules.decide(&path);
        let wanted = decision.fsync.or(self.config.fsync);
        if wanted == Some(FsyncTarget::Tier) || wanted.is_none() && !volatile {
            return Ok(());
        }
        let all = wanted == Some(FsyncTarget::Store) || !self.synced_copies.are_made();
        let last = {
            let mut tree = self.metadata.write_tree();
            let last = tree
                .ops
                .iter()
                .rev()
                .find(|(_, op)| {
                    let is_of_dir = surgetank_state::places(&op.kind).iter().any(|place| place.0 == dir)
                        || matches!(&op.kind, OpKind::Publish { file, .. } if *file == dir);
                    is_of_dir && (all || self.is_only_in_memory(&tree, &op.kind))
                })
                .map(|(seq, _)| *seq);
            tree.hurry(last);
            last
        };
        let Some(last) = last else { return Ok(()) };
        self.metadata.wake();
        let began = surgetank_types::clock::tick();
        let mut tree = self.metadata.read_tree();
        while let Some(op) = tree.ops.get(&last) {
            self.queries.must_answer(began)?;
            if let Some(trouble) = op.error.as_ref().filter(|trouble| trouble.lasting) {
                return Err(Fault::new(Errno::from_raw_os_error(trouble.errno), trouble.text.clone()));
            }
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            tree = self.metadata.wait_changed(tree, LOOK_EVERY);
        }
        Ok(())
    }
}
