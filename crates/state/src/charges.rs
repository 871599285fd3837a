//! What each device is charged for replicas, and how much of that the store has too.

use foldhash::HashMap;

use crate::{PlainId, Tree};
use surgetank_types::model::{DeviceId, FileId};

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
        let count = self.clean_bytes.entry(device).or_insert(0);
        *count = (*count + now).saturating_sub(before);
    }

    /// Does the device have bytes that the store has too, and that no fetch is writing now?
    pub fn has_clean(&self, device: DeviceId) -> bool {
        self.clean_bytes.get(&device).is_some_and(|clean| *clean > 0)
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
        let of = |counts: &HashMap<DeviceId, u64>| counts.get(&device).copied().unwrap_or(0);
        of(&self.clean_bytes) + of(&self.arriving_bytes)
    }

    /// The replica leaves its device; returns what it was charged.
    pub fn drop_replica(&mut self, id: FileId) -> Option<(DeviceId, u64)> {
        let inode = self.inodes.get_mut(&id)?;
        let device = inode.replica.take()?.device;
        let before = std::mem::replace(&mut inode.clean_bytes, 0);
        let charged = std::mem::replace(&mut inode.charged_bytes, 0);
        if let Some(count) = self.clean_bytes.get_mut(&device) {
            *count = count.saturating_sub(before);
        }
        Some((device, charged))
    }
}
