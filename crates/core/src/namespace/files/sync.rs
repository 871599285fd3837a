//! What is closed on a tier that survives a reboot is made to survive it: after a while its plain file is synced, and the
//! catalog says so. Until then a reboot leaves it in doubt ([`super::super::recover`]); what the store has by then needs
//! nothing.

use crate::sync::{MutexGuard, PoisonError};
use std::collections::VecDeque;
use std::fs::File;
use std::time::{Duration, Instant};

use crate::clock;
use crate::config::Survives;
use crate::model::{DeviceId, FileId, Mode};

use super::super::Namespace;
use super::super::journal::Txn;

/// So many are synced before the catalog is told.
const BATCH: usize = 256;
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub(crate) struct Unsynced(VecDeque<Closed>);

struct Closed {
    id: FileId,
    version: u32,
    due: Instant,
}

impl Namespace {
    fn unsynced(&self) -> MutexGuard<'_, Unsynced> {
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until the next one is due; the thread is told when there is one where there was none.
    pub(crate) fn wait_unsynced(&self, next: Option<Duration>, stop: &dyn Fn() -> bool) {
        let unsynced = self.unsynced();
        // (While files are closed all the time nobody is woken for each of them.)
        if !stop() && (next.is_some() || unsynced.0.is_empty()) {
            drop(self.unsynced_came.wait_timeout(unsynced, next.unwrap_or(IDLE)));
        }
    }

    pub(crate) fn end_unsynced(&self) {
        drop(self.unsynced());
        self.unsynced_came.notify_all();
    }

    /// A version was closed on this device.
    pub(crate) fn to_be_synced(&self, id: FileId, version: u32, device: DeviceId) {
        if self.tiers.device(device).survives() != Survives::Agent {
            let mut unsynced = self.unsynced();
            unsynced.0.push_back(Closed { id, version, due: clock::tick() + self.config.sync_after });
            if unsynced.0.len() == 1 {
                self.unsynced_came.notify_all();
            }
        }
    }

    /// Syncs what is due, or all. Returns how long nothing more will be.
    pub(crate) fn sync_closed(&self, all: bool) -> Option<Duration> {
        loop {
            let now = clock::tick();
            let due: Vec<(FileId, u32)> = {
                let mut unsynced = self.unsynced();
                let count = unsynced.0.iter().take(BATCH).take_while(|closed| all || closed.due <= now).count();
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
        let needed: Vec<(FileId, u32, DeviceId, Vec<u8>)> = {
            let tree = self.tree();
            let needs = |(id, version): &(FileId, u32)| {
                let inode = tree.get(*id)?;
                let waits = inode.sealed && inode.dirty() && inode.version == *version && !inode.is_synced();
                let device = inode.replica.filter(|_| waits)?.device;
                let path = tree.logical_path(*id)?;
                // Nobody wants a temporary file back.
                (self.mode_for(&tree, *id, &path) != Mode::Remove).then_some((*id, *version, device, path))
            };
            due.iter().filter_map(needs).collect()
        };
        let synced: Vec<(FileId, u32)> = needed
            .into_iter()
            .filter(|(_, _, device, path)| {
                let device = self.tiers.device(*device);
                // (What was evicted, renamed or deleted meanwhile is another's business, or comes again.)
                match device.open(path, false) {
                    Ok(file) => file
                        .sync_data()
                        .inspect_err(|why| {
                            self.device_failed(device.id(), why);
                            tracing::warn!(%why, path = %String::from_utf8_lossy(path), "a tier could not sync a file");
                        })
                        .is_ok(),
                    Err(_) => false,
                }
            })
            .map(|(id, version, ..)| (id, version))
            .collect();
        if synced.is_empty() {
            return;
        }
        let mut tree = self.tree();
        let mut txn = Txn::default();
        for (id, version) in synced {
            self.is_synced(&mut tree, &mut txn, id, version);
        }
        self.commit(&tree, txn);
        drop(tree);
        crash_point!("sync.written_down");
        if let Err(why) = self.sync_catalog() {
            tracing::warn!(%why, "the catalog could not be synced");
        }
    }

    /// Nobody can have changed the version meanwhile: whoever opens the file for writing makes another one.
    fn is_synced(&self, tree: &mut super::super::tree::Tree, txn: &mut Txn, id: FileId, version: u32) {
        if let Some(inode) = tree.get_mut(id)
            && inode.sealed
            && inode.version == version
        {
            inode.synced = version;
            txn.file(id);
        }
    }

    /// `fsync` of a sealed file.
    pub(super) fn sync_version(&self, id: FileId, version: u32, file: &File) -> std::io::Result<()> {
        file.sync_all()?;
        let mut tree = self.tree();
        let mut txn = Txn::default();
        self.is_synced(&mut tree, &mut txn, id, version);
        self.commit(&tree, txn);
        Ok(())
    }

    /// A program has been promised the bytes that its open file has now.
    pub(super) fn promise_bytes(&self, id: FileId) {
        let mut tree = self.tree();
        let mut txn = Txn::default();
        if let Some(inode) = tree.get_mut(id)
            && !inode.promised
            && inode.owned
        {
            inode.promised = true;
            txn.file(id);
        }
        self.commit(&tree, txn);
    }
}
