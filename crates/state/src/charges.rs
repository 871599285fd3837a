//! What each device is charged for replicas, and how much of that the store has too.

use foldhash::{HashMap, HashSet};

use crate::{Inode, PlainId, Tree};
use surgetank_types::model::{DeviceId, FileId, NodeId};

/// The files on each device that take space there, and whose newest version the store has too.
#[derive(Debug, Default)]
pub struct CleanFiles(HashMap<DeviceId, Clean>);

#[derive(Debug, Default)]
struct Clean {
    bytes: u64,
    files: HashSet<FileId>,
}

impl CleanFiles {
    /// Whether the device has any. (Not those that a fetch is writing now.)
    pub fn any_on(&self, device: DeviceId) -> bool {
        self.bytes_on(device) > 0
    }

    /// The bytes that the device is charged for them.
    fn bytes_on(&self, device: DeviceId) -> u64 {
        self.0.get(&device).map_or(0, |clean| clean.bytes)
    }

    fn change(&mut self, device: DeviceId, id: FileId, before: u64, now: u64) {
        if before == now {
            return;
        }
        let clean = self.0.entry(device).or_default();
        clean.bytes = (clean.bytes + now).saturating_sub(before);
        if now > 0 {
            clean.files.insert(id);
        } else {
            clean.files.remove(&id);
        }
    }
}

/// The number of clean files by a walk over all files.
fn count_clean(tree: &Tree, device: DeviceId) -> usize {
    let there = |inode: &Inode| inode.replica.is_some_and(|plain| plain.device == device);
    let is_clean = |inode: &Inode| inode.sealed && !inode.dirty() && inode.charged_bytes > 0;
    tree.inodes.values().filter(|inode| there(inode) && is_clean(inode)).count()
}

impl Tree {
    /// Updates the count of clean bytes to the file's present state. Call it before the replica changes its device,
    /// with `replica` still the old one and the file not sealed. Also call it after any other change that matters.
    pub fn recount(&mut self, id: FileId) {
        let Some(inode) = self.inodes.get_mut(&id) else {
            return;
        };
        let Some(PlainId { device, .. }) = inode.replica else {
            return;
        };
        let now = if inode.sealed && !inode.dirty() { inode.charged_bytes } else { 0 };
        let before = std::mem::replace(&mut inode.clean_bytes, now);
        self.clean.change(device, id, before, now);
    }

    /// The clean files of a device ([`CleanFiles`]).
    pub fn clean_files(&self, device: DeviceId) -> impl Iterator<Item = (FileId, &Inode)> {
        let clean = self.clean.0.get(&device);
        debug_assert_eq!(clean.map_or(0, |clean| clean.files.len()), count_clean(self, device), "{device:?}");
        clean.into_iter().flat_map(|clean| &clean.files).filter_map(|id| Some((*id, self.get(*id)?)))
    }

    /// How many files have their plain file on each device.
    pub fn files_on_devices(&self) -> HashMap<DeviceId, u64> {
        let mut files = HashMap::default();
        for PlainId { device, .. } in self.inodes.values().filter_map(|inode| inode.replica) {
            *files.entry(device).or_insert(0) += 1;
        }
        files
    }

    /// Bytes on their way from the store, or removed half-way, do not count as undrained either.
    pub fn arriving(&mut self, device: DeviceId, bytes: i64) {
        let count = self.arriving_bytes.entry(device).or_insert(0);
        *count = count.saturating_add_signed(bytes);
    }

    /// The bytes on the device that the store has too.
    pub fn spare_bytes(&self, device: DeviceId) -> u64 {
        self.clean.bytes_on(device) + self.arriving_bytes.get(&device).copied().unwrap_or(0)
    }

    /// The replica leaves its device; returns what it was charged.
    pub fn drop_replica(&mut self, id: FileId) -> Option<(DeviceId, u64)> {
        let inode = self.inodes.get_mut(&id)?;
        let device = inode.replica.take()?.device;
        // (The next plain file has its bytes.)
        if let Some(extra) = inode.extra.as_mut() {
            extra.home = NodeId::default();
        }
        let before = std::mem::replace(&mut inode.clean_bytes, 0);
        let charged = std::mem::replace(&mut inode.charged_bytes, 0);
        self.clean.change(device, id, before, 0);
        Some((device, charged))
    }
}
