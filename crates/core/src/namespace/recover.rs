//! Recovery: this agent resumes what an earlier one left. The state comes from the catalog, the content from the tiers.
//!
//! Steps: load the catalog, take in the intake, settle started operations, match plain files with records, seal files
//! that no process can still write. The inode number identifies a plain file. So recovery completes a rename that has a
//! record and was not done on the tier, or only in part.
//!
//! The danger that this avoids: data loss. Recovery never deletes content that only this agent has.

mod damaged;
mod load;
mod lost;
mod orphans;
mod spilled;
mod started;
mod synced;
mod tiers;

use std::collections::{HashMap, HashSet};

use load::load_names;
use synced::PutBack;

use surgetank_state::{Inode, Tree};
use surgetank_tier::{Plain, Remembered, Standing};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Change, DeviceId, FileId, Image, Kind, Mode, RunId};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::content::{Content, Location};
use crate::files::Files;
use crate::files::copies::STORE_TIMEOUT;
use crate::metadata::Metadata;
use crate::metadata::losses::Losses;
use crate::namespace::hints::FileHints;
use crate::namespace::restore::Restore;

pub(crate) use damaged::is_damage;
pub use lost::unproven_name;
pub(crate) use lost::{Doubt, Worth, give_up_homes, went_down, went_down_with, worth};
pub use orphans::keep_copy;

/// Plain files without a record are moved here.
pub(crate) const ORPHANS: &[u8] = b".surgetank-orphans/";
/// The number of such files that are named one by one.
const ORPHANS_REPORTED_MAX: usize = 20;

/// Is the catalog free of files on tiers, operations owed to the store, and temporaries that may be under way there?
pub fn is_spent(image: &Image) -> bool {
    let empty = image.files.is_empty() && image.entries.is_empty() && image.ops.is_empty();
    empty && image.lost.is_empty() && !surgetank_state::temporaries_are_expected(image) && !damaged::is_doubtful(image)
}

pub(crate) struct OnTier {
    path: Vec<u8>,
    plain: Plain,
}

type PendingUnlinks = foldhash::HashSet<u64>;

/// An agent continues after another one: loads the catalog, matches it with tiers and store, and takes the queue up again. It ends
/// before a process is served.
pub(crate) struct Recovery<'a> {
    pub(crate) base: &'a Base,
    pub(crate) metadata: &'a Metadata,
    pub(crate) losses: &'a Losses,
    pub(crate) files: &'a Files,
    pub(crate) hints: &'a FileHints,
    pub(crate) restore: &'a Restore,
}

impl Recovery<'_> {
    pub(crate) fn recover(&self) -> Result<()> {
        let mut image = self.base.catalog.load()?;
        self.base.succession.remember_requests(&image);
        *self.losses.losses.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut image.lost);
        let damage = self.damage(&image);
        if let Some(damage) = &damage {
            self.note_damage(damage, &image);
        }
        let (ids, strange) = self.take_up_devices(&image)?;
        self.take_up_doubt(&image);
        if image.files.is_empty() && image.ops.is_empty() && !self.metadata.has_left_intake() {
            self.hints.take_up_hints(&mut image);
            PutBack::of(self).take_up(damage.is_some())?;
            let pending_unlinks = crate::metadata::pending_unlink::remembered(&image);
            let walked = self.match_tiers(&strange, &pending_unlinks, &image, damage.is_some());
            self.remember_boot(&image, &walked);
            if damage.is_some() {
                self.leave_out_blind_operations();
                self.keep_spills()?;
                self.report_damage();
            }
            return Ok(());
        }
        let mut tree = self.metadata.write_tree();
        tree.reserve(image.files.len());
        tree.temporaries = surgetank_state::Temporaries::remembered(&image);
        let pending_unlinks = crate::metadata::pending_unlink::remembered(&image);
        self.load_files(&mut tree, &mut image, &ids);
        load_names(&mut tree, &mut image);
        self.load_queue(&mut tree, &mut image);
        self.metadata.take_in_left(&mut tree);
        // Every name that is hidden only while an operation waits was written down with it; stale ones go.
        drop(tree);
        self.hints.take_up_hints(&mut image);
        crash_point!("recover.loaded");
        self.settle_started()?;
        if damage.is_some() {
            self.leave_out_blind_operations();
        }
        crash_point!("recover.settled");
        PutBack::of(self).take_up(damage.is_some())?;
        let walked = self.match_tiers(&strange, &pending_unlinks, &image, damage.is_some());
        crash_point!("recover.matched");
        self.take_over_copies();
        self.match_spills(went_down(&image), damage.is_some())?;
        self.look_at_reverted();
        crash_point!("recover.taken_over");
        self.seal_recovered()?;
        crash_point!("recover.sealed");
        if damage.is_some() {
            self.keep_spills()?;
        }
        self.files.temporaries.discard_leftovers();
        // Not before: who takes up the work of an agent that died here has to doubt the same files.
        self.remember_boot(&image, &walked);
        if damage.is_some() {
            self.report_damage();
        }
        crash_point!("recover.cleaned");
        let tree = self.metadata.read_tree();
        tracing::info!(files = tree.count(), operations = tree.ops.len(), "took up what an earlier agent left");
        Ok(())
    }

    /// Finds the devices that the catalog's replicas name, wherever they are now. Records devices that the catalog does
    /// not know yet, before any file is put there. Returns the present id for each number, and the unknown devices.
    fn take_up_devices(&self, image: &Image) -> Result<(HashMap<DeviceId, DeviceId>, HashSet<DeviceId>)> {
        let named: HashSet<DeviceId> =
            image.files.iter().filter_map(|(_, record)| Some(record.replica?.device)).collect();
        let described: Vec<(DeviceId, Remembered)> = image
            .marks
            .iter()
            .filter_map(|(mark, number)| {
                let [.., tier, device] = number.to_be_bytes();
                Some((DeviceId { tier, device }, Remembered::from_mark(mark)?))
            })
            .collect();
        let mut wanted: Vec<(DeviceId, Remembered)> = Vec::with_capacity(named.len());
        for number in &named {
            let one = described.iter().rev().find(|(other, _)| other == number);
            wanted.push(one.cloned().unwrap_or_else(|| (*number, Remembered::nameless(*number))));
        }
        wanted.sort_unstable_by_key(|(number, _)| *number);
        let ids = self.base.tiers.take_up(&wanted)?;

        let mut taken: HashSet<DeviceId> = named;
        taken.extend(described.iter().map(|(number, _)| *number));
        let mut free = (0..=u16::MAX)
            .map(|number| {
                let [tier, device] = number.to_be_bytes();
                DeviceId { tier, device }
            })
            .filter(|number| !taken.contains(number));
        let mut strange = HashSet::new();
        let mut changes = Vec::new();
        let mut tree = self.metadata.write_tree();
        for device in self.base.tiers.devices() {
            let known = described.iter().find(|(_, one)| one.token() == device.token());
            let number = match ids.iter().find(|(_, id)| **id == device.id()) {
                Some((number, _)) => *number,
                None => match known {
                    Some((number, _)) => *number,
                    None => {
                        strange.insert(device.id());
                        free.next().ok_or_else(|| Error::new("the catalog remembers too many tiers"))?
                    }
                },
            };
            tree.device_numbers.insert(device.id(), number);
            if device.standing() == Standing::Used {
                let value = u64::from(u16::from_be_bytes([number.tier, number.device]));
                let mark = Remembered::of(device).mark()?;
                if image.marks.get(&mark) != Some(&value) {
                    changes.push(Change::PutMark(mark, value));
                }
            }
        }
        if !changes.is_empty()
            && let Err(why) = self.base.catalog.commit(&changes)
        {
            // Held back: these changes precede the first replica that is recorded.
            tracing::warn!(%why, "the tiers could not be written down yet");
            self.metadata.uncommitted.lock().unwrap_or_else(PoisonError::into_inner).append(&mut changes);
        }
        Ok((ids, strange))
    }

    /// Whose content the plain file is now; `None`: it is not wanted.
    fn judge(&self, tree: &mut Tree, id: FileId, on_tier: &OnTier, doubt: Doubt) -> Option<FileId> {
        let path = tree.logical_path(id)?;
        let plain = tree.get(id)?.replica?;
        // (Another member has the content. The drain asks it.)
        if tree.get(id)?.home().is_some() {
            return Some(id);
        }
        match worth(&tree.get(id)?.into(), on_tier.plain.size_bytes) {
            Worth::All => Some(id),
            Worth::Promised if doubt == Doubt::MachineWentDown => {
                Self::is_as_long(tree, id, &on_tier.plain);
                self.note_promised(&path);
                Some(id)
            }
            // The catalog could not record that a process opened it.
            Worth::Spare
                if doubt != Doubt::MachineWentDown && self.is_left_to_writer(id, plain.device, &on_tier.path) =>
            {
                tree.get_mut(id)?.sealed = false;
                tree.txn.file(id);
                Some(id)
            }
            // An empty copy was created for a process that opened the file to overwrite it. That process was killed, or
            // is served again in a moment.
            Worth::Spare if doubt == Doubt::MachineWentDown || on_tier.plain.size_bytes == 0 => {
                tree.drop_replica(id);
                tree.txn.file(id);
                None
            }
            // Of no use without the run that made it.
            Worth::Promised | Worth::Doubtful
                if self.metadata.mode_for(tree, id, &path) == Mode::Remove
                    && !surgetank_state::is_for_another(tree, id) =>
            {
                self.lose(tree, id);
                None
            }
            // A spare copy with another length is not spare: a process has written it since.
            Worth::Promised | Worth::Doubtful | Worth::Spare => {
                let kept = self.set_apart(tree, id, &on_tier.plain, doubt)?;
                self.sync_apart(tree, kept, plain, &on_tier.path);
                Some(kept)
            }
        }
    }

    /// Does a process continue to write it?
    fn is_left_to_writer(&self, id: FileId, device: DeviceId, path: &[u8]) -> bool {
        let granted = || {
            let file = self.base.tiers.device(device).open(path, false).ok()?;
            Some(self.base.succession.is_still_granted(&Content {
                file: Arc::new(file),
                location: Location::Tier(device),
                writable: false,
            }))
        };
        self.base.succession.left_written(id) || granted().unwrap_or(false)
    }

    /// Seals the files that were open when the agent died. No process can have them open any more, unless processes continue.
    fn seal_recovered(&self) -> Result<()> {
        let open: Vec<FileId> = {
            let tree = self.metadata.read_tree();
            tree.iter()
                .filter(|(_, inode)| !inode.sealed && inode.attr.kind == Kind::File)
                // What cannot be read now is completed when its tier is back.
                .filter(|(_, inode)| inode.replica.is_none_or(|plain| self.base.tiers.device(plain.device).is_there()))
                .map(|(id, _)| id)
                .collect()
        };
        // The order of the closes is lost. The order of creation is the next best.
        let open = in_order(open);
        let until = surgetank_types::clock::tick() + STORE_TIMEOUT;
        for id in open {
            let _inode = self.metadata.lock_inode(id);
            if self.base.succession.left_written(id) {
                self.leave_to_writer(id);
                continue;
            }
            if let Some(content) = self.files.copies.content_left_in(id, until)? {
                if self.restore.still_granted(id, &content) {
                    self.leave_to_writer(id);
                    continue;
                }
                self.files.sealer.finish_seal(id, None, &content);
                continue;
            }
            let mut tree = self.metadata.write_tree();
            let path = tree.logical_path(id);
            let Some(inode) = tree.get_mut(id) else { continue };
            let has_content = inode.replica.is_some() || inode.spill().is_some();
            let Some(path) = path.filter(|_| has_content) else {
                inode.sealed = true;
                continue;
            };
            drop(tree);
            // Sealed it would be the version before, and what was written since be removed as its copy.
            self.base.notes.note(
                RunId(0),
                String::from_utf8_lossy(&path).into_owned(),
                "it was being written when an earlier agent died, and what there is of it cannot be opened: it is remembered, and not in the store; start again when it can",
                true,
            );
        }
        let dirty: Vec<FileId> = {
            let tree = self.metadata.read_tree();
            // What a program has open is queued when it is closed.
            let is_owed = |inode: &Inode| inode.sealed && inode.dirty() && inode.publish.is_none();
            tree.iter().filter(|(_, inode)| is_owed(inode)).map(|(id, _)| id).collect()
        };
        let dirty = in_order(dirty);
        let mut tree = self.metadata.write_tree();
        for id in dirty {
            self.metadata.queue_publish(&mut tree, id);
        }
        self.metadata.commit(&mut tree);
        let files: Vec<FileId> = tree.iter().map(|(id, _)| id).collect();
        files.into_iter().for_each(|id| self.files.syncs.to_be_synced(&tree, id));
        self.base.succession.await_makers(&mut tree);
        Ok(())
    }

    /// A queued publication would bring half of what a process is writing. If a process waits in an fsync, it asks
    /// again; otherwise the close queues the file.
    fn leave_to_writer(&self, id: FileId) {
        let mut tree = self.metadata.write_tree();
        if let Some(seq) = tree.get(id).and_then(|inode| inode.publish) {
            tree.take_back(id, seq);
        }
    }
}

fn in_order(mut ids: Vec<FileId>) -> Vec<FileId> {
    ids.sort_unstable();
    ids
}
