//! What each device is charged for replicas, and how much of that the store has too.

use foldhash::{HashMap, HashSet};

use crate::{Inode, PlainId, Tree};
use surgetank_types::model::{DeviceId, FileId};

/// What a device has that the store has too.
#[derive(Debug, Default)]
pub(crate) struct Clean {
    bytes: u64,
    files: HashSet<FileId>,
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
        if now == before {
            return;
        }
        let clean = self.clean.entry(device).or_default();
        clean.bytes = (clean.bytes + now).saturating_sub(before);
        if now > 0 {
            clean.files.insert(id);
        } else {
            clean.files.remove(&id);
        }
    }

    /// Does the device have bytes that the store has too, and that no fetch is writing now?
    pub fn has_clean(&self, device: DeviceId) -> bool {
        self.clean.get(&device).is_some_and(|clean| clean.bytes > 0)
    }

    /// The files whose plain file on the device takes space, and whose newest version the store has too.
    pub fn clean_files(&self, device: DeviceId) -> impl Iterator<Item = (FileId, &Inode)> {
        debug_assert_eq!(
            self.clean.get(&device).map_or(0, |clean| clean.files.len()),
            self.count_clean(device),
            "{device:?}"
        );
        let files = self.clean.get(&device).into_iter().flat_map(|clean| &clean.files);
        files.filter_map(|id| Some((*id, self.get(*id)?)))
    }

    /// The same by a walk over all files.
    fn count_clean(&self, device: DeviceId) -> usize {
        let there = |inode: &Inode| inode.replica.is_some_and(|plain| plain.device == device);
        let is_clean = |inode: &Inode| inode.sealed && !inode.dirty() && inode.charged_bytes > 0;
        self.inodes.values().filter(|inode| there(inode) && is_clean(inode)).count()
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
        let clean_bytes = self.clean.get(&device).map_or(0, |clean| clean.bytes);
        clean_bytes + self.arriving_bytes.get(&device).copied().unwrap_or(0)
    }

    /// The replica leaves its device; returns what it was charged.
    pub fn drop_replica(&mut self, id: FileId) -> Option<(DeviceId, u64)> {
        let inode = self.inodes.get_mut(&id)?;
        let device = inode.replica.take()?.device;
        let before = std::mem::replace(&mut inode.clean_bytes, 0);
        let charged = std::mem::replace(&mut inode.charged_bytes, 0);
        if let Some(clean) = self.clean.get_mut(&device) {
            clean.bytes = clean.bytes.saturating_sub(before);
            clean.files.remove(&id);
        }
        Some((device, charged))
    }
}
