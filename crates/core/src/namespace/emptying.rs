//! The end of the last run over a directory: files that need not stay leave the tiers, and the catalog is emptied.
//!
//! The danger that this avoids: data is removed that a queued operation or a loss still refers to.

use surgetank_policy::config::{Config, KeepAtExit};
use surgetank_state::Place;
use surgetank_tier::Tiers;
use surgetank_types::model::{FileId, Mode};
use surgetank_types::sync::atomic::{AtomicU32, Ordering};
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::{Base, Door};
use crate::catalog::Catalog;
use crate::files::Files;
use crate::files::evict::{Eviction, THE_END};
use crate::files::open::Opener;
use crate::files::sync::Syncs;
use crate::files::synced_copies::SyncedCopies;
use crate::metadata::Metadata;
use crate::metadata::losses::Losses;
use crate::namespace::hints::FileHints;
use crate::namespace::revalidation::Revalidation;

/// The pause before another look at temporaries that could not go yet.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);
const LOOK_AGAIN_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// The end of the last run: tiers and catalog are emptied.
pub struct Emptying {
    catalog: Arc<dyn Catalog>,
    config: Arc<Config>,
    door: Arc<OnceLock<Arc<dyn Door>>>,
    tiers: Arc<Tiers>,
    eviction: Arc<Eviction>,
    hints: Arc<FileHints>,
    losses: Arc<Losses>,
    metadata: Arc<Metadata>,
    opener: Arc<Opener>,
    revalidation: Arc<Revalidation>,
    synced_copies: Arc<SyncedCopies>,
    syncs: Arc<Syncs>,
    /// Odd from the end of the last command until the next user arrives.
    emptyings: AtomicU32,
}

impl Emptying {
    pub(crate) fn new(base: &Base, files: &Files, hints: &Arc<FileHints>, revalidation: &Arc<Revalidation>) -> Self {
        Self {
            catalog: base.catalog.clone(),
            config: base.config.clone(),
            door: base.door.clone(),
            tiers: base.tiers.clone(),
            eviction: files.eviction.clone(),
            hints: hints.clone(),
            losses: files.losses.clone(),
            metadata: files.metadata.clone(),
            opener: files.opener.clone(),
            revalidation: revalidation.clone(),
            synced_copies: files.synced_copies.clone(),
            syncs: files.syncs.clone(),
            emptyings: AtomicU32::new(0),
        }
    }

    /// The last command over this directory has ended. Until `end_emptying`, durable files leave the tiers at once,
    /// while the drain writes the rest. (Giving memory back takes a quarter of a second for each gigabyte. This way no
    /// user waits for it.) The caller does not run this and `end_emptying` at the same time. Returns the number of this
    /// turn, for `empty_tiers`; `None` if a turn has already begun.
    pub fn begin_emptying(&self) -> Option<u32> {
        let before = self.emptyings.load(Ordering::Relaxed);
        let begins = before.is_multiple_of(2);
        begins.then(|| {
            self.emptyings.store(before.wrapping_add(1), Ordering::Relaxed);
            before.wrapping_add(1)
        })
    }

    /// A user has arrived.
    pub fn end_emptying(&self) {
        if self.is_emptying() {
            self.emptyings.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn is_emptying(&self) -> bool {
        !self.emptyings.load(Ordering::Relaxed).is_multiple_of(2)
    }

    /// Evicts the files that are durable already, while this turn lasts. Several threads do it; each takes the files of
    /// its `share` of `of`.
    pub fn empty_tiers(&self, turn: u32, (share, of): (usize, usize)) {
        for id in self.replicas() {
            if id.0 as usize % of != share {
                continue;
            }
            if self.emptyings.load(Ordering::Relaxed) != turn {
                return;
            }
            let _inode = self.metadata.lock_inode(id);
            self.eviction.evict_locked(id, THE_END, false);
        }
    }

    /// Drops temporaries, while this turn lasts, as soon as no process is left that could read them. The last process
    /// may be dying, and its files may count as open for a moment: so the loop looks again.
    pub fn drop_temporaries(&self, turn: u32, is_deserted: impl Fn() -> bool) {
        let lasts = || self.emptyings.load(Ordering::Relaxed) == turn;
        let mut pause = LOOK_AGAIN;
        let mut open = None;
        while lasts() {
            if is_deserted() {
                let mut ids = open.unwrap_or_else(|| self.replicas());
                ids.retain(|id| lasts() && self.drop_at_the_end(*id));
                if ids.is_empty() {
                    return;
                }
                open = Some(ids);
            }
            surgetank_types::sync::thread::sleep(pause);
            pause = (pause * 2).min(LOOK_AGAIN_MAX);
        }
    }

    /// Returns whether the file is a temporary that is still open.
    fn drop_at_the_end(&self, id: FileId) -> bool {
        if let Some((dir, name)) = self.drop_temporary(id, false) {
            // A later run may create the name again.
            if let Some(door) = self.door.get() {
                door.invalidate_name(dir, &name);
            }
            return false;
        }
        let tree = self.metadata.read_tree();
        let mode = tree.logical_path(id).map(|path| self.metadata.mode_for(&tree, id, &path));
        mode == Some(Mode::Remove)
            && !surgetank_state::is_for_another(&tree, id)
            && self.metadata.opens().contains_key(&id)
    }

    fn replicas(&self) -> Vec<FileId> {
        self.metadata.read_tree().iter().filter(|(_, inode)| inode.replica.is_some()).map(|(id, _)| id).collect()
    }

    /// The end of the agent: every durable file leaves the tiers, and temporaries are dropped. When the agent has no
    /// file left that only it has, the catalog starts over. Returns whether everything is in the store.
    pub fn finish(&self) -> bool {
        self.opener.end_promises(std::time::Duration::ZERO);
        self.eviction.drop_waiting_on(None);
        for id in self.replicas() {
            self.drop_temporary(id, true);
            // A pin lasts as long as an agent runs here: without one, the copy would only grow stale.
            let _inode = self.metadata.lock_inode(id);
            self.eviction.evict_locked(id, THE_END, true);
        }
        self.synced_copies.sweep();
        let (left, queued) = {
            let tree = self.metadata.read_tree();
            let left = tree.iter().any(|(_, inode)| inode.replica.is_some() || inode.spill().is_some());
            (left, !tree.ops.is_empty())
        };
        let is_over = !left && !queued;
        // Losses are reported until they are acknowledged.
        if !is_over || self.losses.has_losses() {
            // The files may wait long: until the store is back, or for the next run.
            self.syncs.sync_closed(true);
            self.hints.end_hints();
            self.revalidation.forget_what_the_store_has();
        } else {
            if let Err(why) = self.synced_copies.clear().and_then(|()| self.catalog.clear()) {
                tracing::warn!(%why, "the catalog could not be cleared");
            }
            self.metadata.write_down_doubt();
        }
        if !is_over {
            return false;
        }
        for device in self.tiers.devices() {
            if let Err(why) = device.sweep() {
                tracing::warn!(%why, device = %device.path().display(), "a tier could not be swept");
            }
        }
        true
    }

    /// Drops a `remove` file. At the agent's end (`ends`) this includes files with several names, and `keep` files with
    /// `--keep-at-exit=drop`, which the verdict names first. Returns the name that is now free.
    fn drop_temporary(&self, id: FileId, ends: bool) -> Option<Place> {
        let _inode = self.metadata.lock_inode(id);
        let mut tree = self.metadata.write_tree();
        let path = tree.logical_path(id)?;
        let mode = self.metadata.mode_for(&tree, id, &path);
        let droppable =
            mode == Mode::Remove || (ends && mode == Mode::Keep && self.config.keep_at_exit == KeepAtExit::Drop);
        let inode = tree.get(id)?;
        let wanted = inode.publish.is_some() || inode.applied.is_some();
        let several = inode.extra.as_ref().is_some_and(|extra| !extra.more_names.is_empty());
        if !droppable
            || surgetank_state::is_for_another(&tree, id)
            || !inode.dirty()
            || wanted
            || (several && !ends)
            || self.metadata.opens().contains_key(&id)
        {
            return None;
        }
        let (at, replica) = (inode.logical.clone(), inode.replica);
        tree.txn.pending_unlink(replica);
        let dropped = tree.drop_replica(id);
        tree.txn.file(id);
        if let Some((dir, name)) = &at {
            tree.bind(*dir, name, |entry| entry.set_logical(None));
            tree.txn.entry(*dir, name);
        }
        if let Some(inode) = tree.get_mut(id) {
            inode.logical = None;
        }
        self.metadata.commit(&mut tree);
        let remains = dropped.map(|(device, charged)| {
            let device = self.tiers.device(device);
            let remains = device.hold(Some(&path), charged);
            if let Err(why) = device.unlink(&path) {
                self.tiers.device_failed(device.id(), &why);
            }
            remains
        });
        drop(tree);
        drop(remains);
        at
    }
}
