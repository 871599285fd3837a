//! Which directories are delegated to processes, and how long. The intake ([`intake`](crate::metadata::intake)) has the states of a
//! directory, and what a process creates in one.
//!
//! The danger that this avoids: processes fill a device that the agent has promised to others.

use surgetank_policy::config::Config;
use surgetank_state::{Delegation, Name, Tree};
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::model::{Caller, DeviceId, FileId};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::end::End;
use crate::base::runs::Runs;
use crate::base::{Base, Door};
use crate::content::{Location, Open};
use crate::files::deadline::DeadlineWatch;
use crate::metadata::intake::{DELEGATIONS_MAX, DIRTY_AHEAD_BYTES, FILE_BYTES_MIN, FILES_AHEAD, MADE_MIN, UNUSED};
use crate::metadata::{Metadata, closed};

/// Decides which directories are delegated to processes.
pub struct Delegator {
    config: Arc<Config>,
    door: Arc<OnceLock<Arc<dyn Door>>>,
    end: Arc<End>,
    tiers: Arc<Tiers>,
    deadline: Arc<DeadlineWatch>,
    metadata: Arc<Metadata>,
    runs: Arc<Runs>,
    /// A new file's name does not change any decision that is due when the file is created.
    delegates_any: bool,
}

impl Delegator {
    pub(crate) fn new(base: &Base, deadline: &Arc<DeadlineWatch>, metadata: &Arc<Metadata>) -> Self {
        Self {
            config: base.config.clone(),
            door: base.door.clone(),
            end: base.end.clone(),
            tiers: base.tiers.clone(),
            runs: base.runs.clone(),
            deadline: deadline.clone(),
            metadata: metadata.clone(),
            delegates_any: base.rules.place_all_alike() && base.store.features().plain_files,
        }
    }

    /// A file was just handed out. Its directory is delegated if that pays and nothing prevents it. Returns what
    /// [`Self::delegate`] returns. `may_be_dirty`: the answer of [`Self::may_hold_more`] for its device.
    pub(crate) fn consider_delegation(
        &self,
        tree: &mut Tree,
        caller: &Caller,
        dir: FileId,
        open: &Open,
        may_be_dirty: bool,
    ) -> Option<Vec<Name>> {
        if let Some(delegation) = tree.delegations.dirs.get_mut(&dir) {
            delegation.used = clock::tick();
        }
        if !may_be_dirty || !self.may_delegate_at_all(caller) {
            return None;
        }
        let d = tree.dir_mut(dir)?;
        d.demand.made = d.demand.made.saturating_add(1);
        if d.demand.made < d.demand.after.max(MADE_MIN) {
            return None;
        }
        self.delegate(tree, caller, dir, open)
    }

    /// `Some`: the kernel caches the directory or these names. The caller invalidates them and calls again. `None`: the
    /// kernel caches nothing that prevents the delegation.
    pub(crate) fn delegate(&self, tree: &mut Tree, caller: &Caller, dir: FileId, open: &Open) -> Option<Vec<Name>> {
        let shim = self.metadata.shim.get().filter(|_| !tree.delegations.dirs.contains_key(&dir))?;
        let Location::Tier(device) = open.content().location else { return None };
        if !self.may_be_delegated(tree, dir) {
            return None;
        }
        let d = tree.dir_mut(dir)?;
        // `None`: the kernel caches too many names to list.
        let names = d.kernel_negative_entries.take_all()?;
        if d.is_in_kernel || !names.is_empty() {
            return Some(names);
        }
        let reserve_bytes = open.reserved_bytes.load(Ordering::Relaxed);
        let on = self.tiers.device(device);
        let ahead_bytes = reserve_bytes.max(FILE_BYTES_MIN) * FILES_AHEAD;
        let path = tree.logical_path(dir)?;
        let mut inside = path.clone();
        inside.extend_from_slice(if path.is_empty() { b"-" } else { b"/-" });
        let (at, _) = on.place_of(&inside)?;
        if !on.leases() || !on.healthy() || on.free_bytes() < Self::bytes_to_delegate(on, ahead_bytes) {
            return None;
        }
        while tree.delegations.dirs.len() >= DELEGATIONS_MAX
            && let Some(oldest) =
                tree.delegations.dirs.iter().min_by_key(|(_, delegation)| delegation.number).map(|(dir, _)| *dir)
        {
            self.metadata.recall_dirs(tree, &[oldest]);
        }
        let watch = shim.watch_delegated(&at).ok()?;
        if !on.try_reserve(ahead_bytes) {
            shim.no_longer_delegated(watch);
            return None;
        }
        let reason = tree.get(open.id).and_then(|inode| inode.placed.clone());
        tree.delegations.next += 1;
        let number = tree.delegations.next;
        let used = clock::tick();
        let delegation = Delegation { device, watch, reserve_bytes, ahead_bytes, reason, ended: false, number, used };
        tree.delegations.dirs.insert(dir, delegation);
        if let Some(d) = tree.dir_mut(dir) {
            d.is_delegated = true;
        }
        self.metadata.delegated.store(tree.delegations.dirs.len(), Ordering::SeqCst);
        // A process that came to write through the mount meanwhile has not seen the delegation.
        if self.may_delegate_at_all(caller) {
            self.metadata.limit_intake(tree);
            self.metadata.show(tree, dir);
            crash_point!("delegation.published");
        } else {
            self.metadata.recall_dirs(tree, &[dir]);
        }
        None
    }

    /// May the device hold the undrained files of one more directory? The caller does not hold the tree's lock.
    pub(crate) fn may_hold_more(&self, device: DeviceId) -> bool {
        self.deadline.dirty_allows(self.tiers.device(device), DIRTY_AHEAD_BYTES)
    }

    /// The bytes that must be free. Files that the agent does not know yet grow unseen, as long as other directly
    /// written files do.
    fn bytes_to_delegate(device: &surgetank_tier::Device, ahead_bytes: u64) -> u64 {
        let one = surgetank_policy::placement::ample_bytes(&surgetank_tier::DeviceView { writers: 0, ..device.view() });
        one.saturating_mul(2).saturating_add(ahead_bytes)
    }

    pub(crate) fn may_delegate_at_all(&self, caller: &Caller) -> bool {
        self.delegates_any
            && self.config.direct
            && self.door.get().is_some()
            // (The stamp of a file that the agent learns of late would be too late for other members.)
            && !(self.config.pool_ordered && self.metadata.pool.get().is_some())
            // (A close that waits for copies is the mount's.)
            && !closed::may_wait(&self.metadata)
            && !self.metadata.delegation_ended.load(Ordering::SeqCst)
            && self.runs.final_drains.load(Ordering::Relaxed) == 0
            && !self.end.is_hurried()
            // The mount reports closes late: a file created after a close would come before it.
            && self.metadata.writing_handles.load(Ordering::SeqCst) == 0
            && caller.uid == rustix::process::geteuid().as_raw()
    }

    fn may_be_delegated(&self, tree: &Tree, dir: FileId) -> bool {
        let Some(inode) = tree.get(dir) else { return false };
        let own = inode.attr.uid == rustix::process::geteuid().as_raw() && inode.attr.perm & 0o7700 == 0o700;
        let plain = inode.extra.as_ref().is_none_or(|extra| extra.xattrs.is_none());
        // Processes do not get the hints for a new file.
        own && plain
            && !tree.is_hinted(dir)
            && inode.owned
            && inode.logical.is_some()
            && inode.dir.as_ref().is_some_and(|d| d.complete && !d.is_shared)
    }

    /// Watches the delegations: takes in created files, and recalls directories that must not stay delegated.
    pub(crate) fn watch_delegations(&self) {
        if self.metadata.delegated.load(Ordering::SeqCst) == 0 {
            return;
        }
        let devices = self.tiers.devices().map(surgetank_tier::Device::id);
        let full: Vec<DeviceId> = devices.filter(|device| !self.may_hold_more(*device)).collect();
        let mut tree = self.metadata.write_tree();
        let ending = self.metadata.delegation_ended.load(Ordering::SeqCst)
            || self.runs.final_drains.load(Ordering::Relaxed) > 0
            || self.end.is_hurried();
        let dirs: Vec<FileId> = tree
            .delegations
            .dirs
            .iter()
            .filter(|(dir, delegation)| {
                let on = self.tiers.device(delegation.device);
                ending
                    || delegation.used.elapsed() > UNUSED
                    || !on.healthy()
                    || on.free_bytes() < Self::bytes_to_delegate(on, 0)
                    || full.contains(&delegation.device)
                    || !self.may_be_delegated(&tree, **dir)
            })
            .map(|(dir, _)| *dir)
            .collect();
        if !dirs.is_empty() {
            self.metadata.recall_dirs(&mut tree, &dirs);
        }
        self.metadata.limit_intake(&tree);
        if dirs.is_empty()
            && let Some(shim) = self.metadata.shim.get().filter(|shim| shim.intake_waits())
        {
            // A process that does not complete its entry keeps the ring from being used.
            shim.stop_intake();
            self.metadata.settle_in(&mut tree);
        }
    }
}
