//! Sealing: the last writer has closed, and the file cannot be written any more. Then its content becomes a version,
//! and its rule decides what follows.
//!
//! States: open, sealed, or with a deferred seal. Invariant: files become versions in the order of their closes. The
//! danger that this avoids: the drain copies a file that a process still writes.

use surgetank_policy::rule::RuleSet;
use surgetank_state::Tree;
use surgetank_store::Store;
use surgetank_tier::Tiers;
use surgetank_types::model::{FileId, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, OnceLock, PoisonError};

use crate::base::events::{Events, Seen};
use crate::base::notes::Notes;
use crate::base::succession::{MANY, Succession};
use crate::base::{Base, Door};
use crate::content::{Content, Location, Open, Users};
use crate::files::fetch_open::Fetches;
use crate::files::open_files::{OpenFiles, SET_IDS, as_written};
use crate::files::place::Placer;
use crate::files::sync::Syncs;
use crate::metadata::Metadata;

/// The kernel gets a decided answer within microseconds, if the processor is free.
const INVALIDATE_TRIES: u32 = 16;
const INVALIDATE_PAUSE: std::time::Duration = std::time::Duration::from_micros(100);
const INVALIDATE_PAUSE_MAX: std::time::Duration = std::time::Duration::from_millis(200);

/// Ends the life of open files: the last close, and the version that it makes.
pub struct Sealer {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    events: Arc<Events>,
    rules: Arc<RuleSet>,
    store: Arc<dyn Store>,
    succession: Arc<Succession>,
    tiers: Arc<Tiers>,
    notes: Arc<Notes>,
    fetches: Arc<Fetches>,
    metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    placer: Arc<Placer>,
    syncs: Arc<Syncs>,
}

impl Sealer {
    pub(crate) fn new(
        base: &Base,
        fetches: &Arc<Fetches>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        placer: &Arc<Placer>,
        syncs: &Arc<Syncs>,
    ) -> Self {
        Self {
            door: base.door.clone(),
            events: base.events.clone(),
            rules: base.rules.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            notes: base.notes.clone(),
            fetches: fetches.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            placer: placer.clone(),
            syncs: syncs.clone(),
        }
    }

    /// Makes the content a version. The caller holds the inode's lock.
    pub(crate) fn finish_seal(&self, id: FileId, open: Option<&Open>, content: &Content) {
        crash_point!("seal.begun");
        let written = open.is_none_or(|open| {
            let direct = open.direct_writer.swap(false, Ordering::Relaxed);
            if direct && let Location::Tier(device) = content.location {
                self.tiers.device(device).writer_closed();
            }
            open.written.swap(false, Ordering::Relaxed) || direct
        });
        let in_place = content.location == Location::Store;
        let on_tier = matches!(content.location, Location::Tier(_));
        // An fsync brought this version to the store.
        let is_published = written && on_tier && self.syncs.is_published(id, &content.file);
        let is_closed_by_writer = written;
        let written = written && !is_published;
        let synced = in_place && written;
        if synced && let Err(why) = sync_in_place(&content.file) {
            let path = self.metadata.read_tree().logical_path(id).unwrap_or_default();
            let run = self.metadata.read_tree().get(id).map_or(surgetank_types::model::RunId(0), |inode| inode.run);
            self.notes.note(
                run,
                String::from_utf8_lossy(&path).into_owned(),
                format!("written in place on the store {}, which failed to sync: {why}", self.store.describe()),
                true,
            );
        }
        let Ok((mut tree, stat)) = self.open_files.look_and_lock(id, &content.file) else {
            return;
        };
        if let Some(open) = open
            && let now = open.content()
            && now.location != content.location
        {
            // The content was moved, or published as it is, during the look.
            drop(tree);
            open.written.fetch_or(is_closed_by_writer, Ordering::Relaxed);
            return self.finish_seal(id, Some(open), &now);
        }
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        // The kernel clears them on the store's own file at every write. Here they stay if the writer may keep them.
        let mut lost_set_ids = false;
        if written {
            inode.attr = as_written(inode, &stat, open);
            lost_set_ids = in_place && (inode.attr.perm & !stat.st_mode) & SET_IDS != 0;
            inode.version += 1;
            if in_place {
                inode.durable = inode.version;
                inode.identity = Some(identity_of(&stat));
            }
        }
        inode.sealed = true;
        // A promise for a version that does not exist becomes one for the version before.
        inode.promised = inode.promised.min(inode.version);
        // Opened for writing and not written: the copy that was made for it is not needed.
        let unwanted =
            !written && !inode.dirty() && inode.applied.is_some() && content.location == Location::StoreTemporary;
        let spill = inode.extra.as_mut().filter(|_| unwanted).and_then(|extra| extra.spill.take());
        let cred = inode.cred();
        let data_bytes = inode.attr.data_bytes();
        if let Location::Tier(device) = content.location {
            self.settle_charge(device, open, inode, stat.st_blocks);
        }
        if is_closed_by_writer {
            if let Location::Tier(device) = content.location {
                let counters = self.tiers.device(device).counters();
                counters.files.fetch_add(1, Ordering::Relaxed);
                counters.bytes_in.fetch_add(data_bytes, Ordering::Relaxed);
            }
            if let Some(path) = tree.logical_path(id) {
                self.log_sealed(&tree, id, &path, &content.location, is_published);
                self.placer.history.lock().unwrap_or_else(PoisonError::into_inner).observe(&path, data_bytes);
            }
        }
        if let Some((dir, name)) = spill {
            tree.discards.push((dir, name, cred));
        }
        tree.recount(id);
        tree.txn.file(id);
        self.metadata.queue_publish(&mut tree, id);
        tree.order.sealed(id);
        if lost_set_ids {
            self.metadata.queue_meta(&mut tree, id, surgetank_types::model::RunId(0), false);
        }
        self.metadata.commit(&mut tree);
        self.syncs.to_be_synced(&tree, id);
        let queued = lost_set_ids || tree.get(id).is_some_and(|inode| inode.publish.is_some());
        crash_point!("seal.written_down");
        let first = tree.get(id).is_some_and(|inode| inode.version <= 1);
        drop(tree);
        // The kernel may cache attributes of an older version for long; it never does for a new file.
        if !first && open.is_some_and(|open| open.direct) {
            self.forget_attributes(id);
        }
        if queued {
            self.metadata.nudge();
        }
    }

    fn log_sealed(&self, tree: &Tree, id: FileId, path: &[u8], location: &Location, is_durable: bool) {
        let Some(inode) = tree.get(id) else { return };
        let size_bytes = inode.attr.size_bytes;
        let decision = self.metadata.decided(tree, id, path);
        let seen = || Seen {
            path: path.to_vec(),
            size_bytes,
            mode: decision.mode,
            rule: self.rules.why(decision.reason).into(),
            place: match location {
                Location::Tier(device) => self.tiers.device(*device).tier_name().into(),
                Location::Store | Location::StoreTemporary | Location::Arriving => "store".into(),
            },
            placement: inode.placed.clone().unwrap_or_else(|| "".into()),
            sealed: surgetank_types::clock::tick(),
            durable: is_durable.then(surgetank_types::clock::tick),
            versions: 1,
        };
        self.events.sealed(inode.run, id, seen, size_bytes);
    }

    /// The device's real usage replaces the bytes that were charged meanwhile.
    fn settle_charge(
        &self,
        device: surgetank_types::model::DeviceId,
        open: Option<&Open>,
        inode: &mut surgetank_state::Inode,
        blocks: i64,
    ) {
        let exact = u64::try_from(blocks).unwrap_or(0) * 512;
        let device = self.tiers.device(device);
        let charged = open.map_or(inode.charged_bytes, |open| open.charged_bytes.swap(exact, Ordering::Relaxed));
        if let Some(open) = open {
            device.unreserve(open.reserved_bytes.swap(0, Ordering::Relaxed));
        }
        device.add_used(exact as i64 - charged as i64);
        inode.charged_bytes = exact;
    }

    /// No process has the file open any more. Content without a name goes now.
    pub(crate) fn last_close(&self, open: &Open) {
        let mut tree = self.metadata.write_tree();
        // In one step. The thread that removes the last name drops the content if the file is not open; this thread
        // drops it if it was.
        self.metadata.opens().remove(&open.id);
        let Some(inode) = tree.get(open.id) else {
            return;
        };
        if inode.logical.is_some() {
            return;
        }
        // Processes with the shim may have it open without a request.
        let shown_perm = self.metadata.perm_to_leave(&tree, open.id);
        self.drop_content(&mut tree, open.id, open.charged_bytes.load(Ordering::Relaxed));
        self.tiers_unreserve(open);
        if let Location::Tier(device) = open.content().location {
            // A file that never had a name, or lost it while it was open.
            drop(self.tiers.device(device).unlink_with(&crate::files::hidden_name(open.id), shown_perm));
        }
        self.metadata.reap(&mut tree, open.id);
        self.metadata.commit(&mut tree);
        self.succession.give_up_content(open.id);
    }

    pub(crate) fn tiers_unreserve(&self, open: &Open) {
        if let Location::Tier(device) = open.content().location {
            self.tiers.device(device).unreserve(open.reserved_bytes.swap(0, Ordering::Relaxed));
        }
    }

    /// Discharges the content of an unlinked inode. Its plain file has no name any more.
    pub(crate) fn drop_content(&self, tree: &mut Tree, id: FileId, charged_bytes: u64) {
        if let Some((device, _)) = tree.drop_replica(id) {
            self.tiers.device(device).add_used(-i64::try_from(charged_bytes).unwrap_or(i64::MAX));
        }
        let publish = tree.get(id).and_then(|inode| inode.publish);
        let goes = publish.is_none_or(|seq| tree.take_back(id, seq));
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        let cred = inode.cred();
        // Unless the drain is publishing the temporary as the file: then an operation in the queue deletes it.
        if goes
            && let Some(extra) = inode.extra.as_mut()
            && let Some((dir, name)) = extra.spill.take()
        {
            tree.discards.push((dir, name, cred));
        }
        tree.txn.file(id);
    }

    /// The file is sealed, and no process has it open. The caller holds the inode's lock.
    pub(crate) fn give_up(&self, open: &Open) {
        self.fetches.end_fetch(open);
        self.fetches.use_waiting(open);
        self.open_files.unback(open);
        self.last_close(open);
    }

    /// Returns the users that are left.
    pub(crate) fn uncount_user(&self, open: &Open, writes: bool) -> Users {
        let mut users = open.users.lock().unwrap_or_else(PoisonError::into_inner);
        let count = if writes { &mut users.writers } else { &mut users.readers };
        *count = count.saturating_sub(1);
        let left = *users;
        drop(users);
        if let Some(inode) = self.metadata.write_tree().get_mut(open.id) {
            inode.handles = inode.handles.saturating_sub(1);
        }
        left
    }

    /// Makes the kernel drop the attributes of a file that it knows.
    pub fn forget_attributes(&self, id: FileId) {
        let known = self.metadata.read_tree().get(id).is_some_and(|inode| inode.lookups > 0);
        if let Some(door) = self.door.get().filter(|_| known) {
            door.invalidate(id, true);
        }
    }

    /// The same, where no later event invalidates them. The kernel does not know the file while the answer to its first
    /// look-up is under way, with the old attributes. The caller holds no lock.
    pub fn forget_attributes_for_sure(&self, id: FileId) {
        for turn in 0..INVALIDATE_TRIES {
            let lookups = self.metadata.read_tree().get(id).map_or(0, |inode| inode.lookups);
            match self.door.get().filter(|_| lookups > 0) {
                // For an earlier agent's file, the agent cannot know whether the kernel has seen it.
                Some(door) if !door.invalidate(id, true) && lookups < MANY / 2 => {
                    std::thread::sleep((INVALIDATE_PAUSE * 2_u32.pow(turn)).min(INVALIDATE_PAUSE_MAX))
                }
                _ => return,
            }
        }
    }
}

fn sync_in_place(file: &std::fs::File) -> std::io::Result<()> {
    // A read-only descriptor syncs the whole file just as well.
    file.sync_all()
}

pub(crate) fn identity_of(stat: &rustix::fs::Stat) -> surgetank_types::model::StoreIdentity {
    surgetank_types::model::StoreIdentity {
        ino: stat.st_ino,
        size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_nanos: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32).nanos,
        ctime_nanos: Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32).nanos,
    }
}
