//! Copies that wait: the kernel reads their files from the store, and all opens of a file have to agree. With the last
//! close, a copy becomes the file's content, if it still has the file's version.
//!
//! Until then the copy is under its hidden name. It is charged like any other, and counts as clean. It is dropped when
//! a writer opens the file, or when another file needs the room. The catalog has no record of it: after a crash, the
//! next agent sweeps it.
//!
//! The danger that this avoids: processes that have one file open read different files.

use std::collections::HashMap;

use surgetank_types::model::{DeviceId, FileId};
use surgetank_types::sync::{Mutex, MutexGuard, PoisonError};

use crate::content::Location;
use crate::files::evict::Eviction;
use crate::files::prefetch::Copied;

/// A leaf lock.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<HashMap<FileId, Copied>>);

impl Copied {
    pub(crate) fn device(&self) -> Option<DeviceId> {
        match self.placed.content.location {
            Location::Tier(device) => Some(device),
            _ => None,
        }
    }
}

impl Eviction {
    fn waiting_copies(&self) -> MutexGuard<'_, HashMap<FileId, Copied>> {
        self.waiting_copies.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_waiting(&self, id: FileId) -> bool {
        self.waiting_copies().contains_key(&id)
    }

    /// The caller holds the inode's lock, and a process has the file open.
    pub(crate) fn let_wait(&self, id: FileId, copied: Copied) {
        let Some(device) = copied.device() else { return };
        let bytes = i64::try_from(copied.charged_bytes).unwrap_or(i64::MAX);
        self.tiers.device(device).add_used(bytes);
        self.metadata.write_tree().arriving(device, bytes);
        self.waiting_copies().insert(id, copied);
    }

    /// The caller has to use or discard the result.
    pub(crate) fn take_waiting(&self, id: FileId) -> Option<Copied> {
        self.waiting_copies().remove(&id)
    }

    pub(crate) fn discard_waiting(&self, copied: &Copied) {
        let Some(device) = copied.device() else { return };
        let bytes = i64::try_from(copied.charged_bytes).unwrap_or(i64::MAX);
        // Recovery sweeps a file that stays.
        drop(self.tiers.device(device).unlink_if(&copied.placed.at, copied.placed.plain.ino));
        self.tiers.device(device).add_used(-bytes);
        self.metadata.write_tree().arriving(device, -bytes);
    }

    /// A process writes the file.
    pub(crate) fn drop_waiting(&self, id: FileId) {
        if let Some(copied) = self.take_waiting(id) {
            self.discard_waiting(&copied);
        }
    }

    /// Drops the copies on a device that needs room, or all of them at the end. Returns the bytes freed.
    pub(crate) fn drop_waiting_on(&self, device: Option<DeviceId>) -> u64 {
        let ids: Vec<FileId> = {
            let waiting = self.waiting_copies();
            waiting.iter().filter(|(_, one)| device.is_none() || one.device() == device).map(|(id, _)| *id).collect()
        };
        let mut freed = 0;
        for copied in ids.into_iter().filter_map(|id| self.take_waiting(id)) {
            self.discard_waiting(&copied);
            freed += copied.charged_bytes;
        }
        freed
    }
}
