//! Taking up what an earlier agent left: memory from the catalog, content from the tiers. A plain file is
//! known by its inode number, so that a rename that was written down but not done (or done but not
//! finished) on the tier is put right. Nothing that only we have is ever deleted here.

mod damaged;
mod lost;
mod orphans;
mod spilled;
mod started;

use std::collections::{HashMap, HashSet};
use surgetank_types::sync::{Arc, PoisonError};

use surgetank_tier::{Plain, Remembered, Standing};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Change, DeviceId, FileId, Image, Kind, Mode, OpKind, RunId};

use super::Namespace;
use super::content::{Content, Location};
pub(crate) use damaged::is_damage;
use lost::Held;
pub use lost::unproven_name;
pub(crate) use lost::{Doubt, Worth, went_down, went_down_with, worth};
pub use orphans::keep_copy;
pub(crate) use spilled::STORE_PATIENCE;
use surgetank_state::{Entry, Inode, Name, Op, PlainId, Tree};

/// Where plain files lie that nobody remembers.
pub(crate) const ORPHANS: &[u8] = b".surgetank-orphans/";
/// So many are named one by one.
const ORPHANS_TOLD_MAX: usize = 20;

/// The catalog names nothing that lies on a tier, is owed to the store, or may be under way there.
pub fn is_spent(image: &Image) -> bool {
    let empty = image.files.is_empty() && image.entries.is_empty() && image.ops.is_empty();
    empty && image.lost.is_empty() && !surgetank_state::temporaries_are_expected(image) && !damaged::is_doubtful(image)
}

struct OnTier {
    path: Vec<u8>,
    plain: Plain,
}

type Gone = foldhash::HashSet<u64>;

impl Namespace {
    pub(super) fn recover(&self) -> Result<()> {
        let mut image = self.catalog.load()?;
        self.remember_requests(&image);
        *self.losses.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut image.lost);
        let damage = self.damage(&image);
        if let Some(damage) = &damage {
            self.tell_damage(damage, &image);
        }
        let (ids, strange) = self.take_up_devices(&image)?;
        self.take_up_doubt(&image);
        if image.files.is_empty() && image.ops.is_empty() && !self.has_claimed() {
            self.take_up_hints(&mut image);
            let gone = super::pending_unlink::remembered(&image);
            let walked = self.match_tiers(&strange, &gone, &image, damage.is_some());
            self.remember_boot(&image, &walked);
            if damage.is_some() {
                self.leave_out_blind_operations();
                self.keep_spills()?;
                self.damage_is_told();
            }
            return Ok(());
        }
        let mut tree = self.write_tree();
        tree.reserve(image.files.len());
        tree.temporaries = surgetank_state::Temporaries::remembered(&image);
        let gone = super::pending_unlink::remembered(&image);
        let files = std::mem::take(&mut image.files);
        for (id, record) in files {
            tree.next_id = tree.next_id.max(id.0 + 1);
            let root = id == FileId::ROOT;
            let mut inode = Inode::new(record.attr);
            let place = |(dir, name): (FileId, Box<[u8]>)| (dir, Name::from(name));
            inode.version = u32::try_from(record.version).unwrap_or(u32::MAX);
            inode.durable = u32::try_from(record.durable_version).unwrap_or(0);
            inode.sealed = record.sealed;
            inode.replica = record.replica.and_then(|replica| {
                let device = *ids.get(&replica.device)?;
                Some(PlainId { device, born: replica.born, ino: replica.backing_ino })
            });
            inode.synced = u32::try_from(record.synced_version).unwrap_or(0);
            inode.promised = u32::try_from(record.promised_version).unwrap_or(0);
            inode.identity = record.identity.map(|known| Box::new(known.of_kind(record.attr.kind)));
            inode.logical = record.logical.map(place);
            inode.pinned = record.pinned;
            inode.checksum = record.checksum;
            inode.run = self.still(record.run);
            inode.owned = true;
            if record.target.is_some() || record.xattrs.is_some() || record.spill.is_some() {
                let extra = inode.extra_mut();
                extra.target = record.target;
                extra.xattrs = record.xattrs;
                extra.spill = record.spill.map(place);
            }
            inode.set_names_in_store(record.applied.into_iter().map(place).collect());
            if root {
                let Some(known) = tree.get_mut(FileId::ROOT) else {
                    continue;
                };
                known.extra = inode.extra;
                continue;
            }
            let ino = inode.attr.ino;
            let known = inode.identity.as_ref().is_some_and(|identity| identity.ino == ino);
            let nameless = inode.logical.is_none();
            tree.insert(id, inode);
            // The store may have further names of it that nobody has looked up yet.
            if known && (nameless || tree.is_hard_linked(id)) {
                tree.hard_links.insert(ino, id);
            }
        }
        for (dir, name, record) in std::mem::take(&mut image.entries) {
            let name = Name::from(name);
            let Some(d) = tree.dir_mut(dir) else { continue };
            d.children.insert(name.clone(), Entry::new(record.logical, record.planned));
            if let Some(id) = record.logical
                && let Some(inode) = tree.get_mut(id)
                && inode.logical.as_ref().is_some_and(|place| *place != (dir, name.clone()))
            {
                inode.extra_mut().more_names.push((dir, name));
            }
        }
        for (seq, record) in std::mem::take(&mut image.ops) {
            tree.next_seq = tree.next_seq.max(seq.0 + 1);
            let mut op = Op::new(record.kind, self.still(record.run), self.due_after_recovery(), record.last);
            op.prepared = record.prepared;
            op.doubtful = record.started;
            op.certain = record.certain;
            let file = op.file();
            if let Some(inode) = tree.get_mut(file) {
                match op.kind {
                    OpKind::Publish { .. } => inode.publish = Some(seq),
                    OpKind::SetMeta { .. } => inode.set_meta = Some(seq),
                    _ => {}
                }
            }
            tree.enqueue(seq, op);
        }
        self.take_in_claimed(&mut tree);
        // Every name that is hidden only while an operation waits was written down with it; stale ones go.
        drop(tree);
        self.take_up_hints(&mut image);
        crash_point!("recover.loaded");
        self.settle_started()?;
        if damage.is_some() {
            self.leave_out_blind_operations();
        }
        crash_point!("recover.settled");
        let walked = self.match_tiers(&strange, &gone, &image, damage.is_some());
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
        self.discard_leftovers();
        // Not before: who takes up the work of an agent that died here has to doubt the same files.
        self.remember_boot(&image, &walked);
        if damage.is_some() {
            self.damage_is_told();
        }
        crash_point!("recover.cleaned");
        let tree = self.read_tree();
        tracing::info!(files = tree.count(), operations = tree.ops.len(), "took up what an earlier agent left");
        Ok(())
    }

    /// Finds the devices that the catalog's replicas name, wherever they are now, and writes down those that it does not
    /// know yet, before anything is put there. Returns which id each number has now, and the unknown devices.
    fn take_up_devices(&self, image: &Image) -> Result<(HashMap<DeviceId, DeviceId>, HashSet<DeviceId>)> {
        let named: HashSet<DeviceId> =
            image.files.iter().filter_map(|(_, record)| Some(record.replica?.device)).collect();
        let described: Vec<(DeviceId, Remembered)> = image
            .counters
            .iter()
            .filter_map(|(name, number)| {
                let [.., tier, device] = number.to_be_bytes();
                Some((DeviceId { tier, device }, Remembered::from_counter(name)?))
            })
            .collect();
        let mut wanted: Vec<(DeviceId, Remembered)> = Vec::with_capacity(named.len());
        for number in &named {
            let one = described.iter().rev().find(|(other, _)| other == number);
            wanted.push(one.cloned().unwrap_or_else(|| (*number, Remembered::nameless(*number))));
        }
        wanted.sort_unstable_by_key(|(number, _)| *number);
        let ids = self.tiers.take_up(&wanted)?;

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
        let mut tree = self.write_tree();
        for device in self.tiers.devices() {
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
                let name = Remembered::of(device).counter()?;
                if image.counters.get(&name) != Some(&value) {
                    changes.push(Change::PutCounter(name, value));
                }
            }
        }
        if !changes.is_empty()
            && let Err(why) = self.catalog.commit(&changes)
        {
            // Held back: they go in front of the first replica that is written down.
            tracing::warn!(%why, "the tiers could not be written down yet");
            self.unwritten.lock().unwrap_or_else(PoisonError::into_inner).append(&mut changes);
        }
        Ok((ids, strange))
    }

    /// Finds every replica on its device, by inode number, and puts it under the path that the catalog says. On a
    /// `strange` device nobody can have put anything, as far as the catalog knows. Returns the devices that were looked
    /// through. `damaged`: nothing is removed for want of a record.
    fn match_tiers(&self, strange: &HashSet<DeviceId>, gone: &Gone, image: &Image, damaged: bool) -> HashSet<DeviceId> {
        let mut walked = HashSet::new();
        let mut found: HashMap<(DeviceId, u64), OnTier> = HashMap::new();
        // What is not found there may be there all the same.
        let mut unread: HashMap<DeviceId, u64> = HashMap::new();
        for device in self.tiers.devices() {
            if !device.is_there() {
                if device.standing() == Standing::Absent {
                    unread.insert(device.id(), 0);
                }
                continue;
            }
            let result = device.walk(&mut |path: &[u8], plain| {
                found.insert((device.id(), plain.ino), OnTier { path: path.to_vec(), plain });
            });
            walked.insert(device.id());
            if let Err(why) = result {
                walked.remove(&device.id());
                unread.insert(device.id(), 0);
                self.device_failed(device.id(), &why);
                self.note(
                    RunId(0),
                    device.path().display().to_string(),
                    format!("the tier cannot be read: {why}"),
                    true,
                );
            }
        }
        let mut tree = self.write_tree();
        let replicas: Vec<(FileId, PlainId)> =
            tree.iter().filter_map(|(id, inode)| Some((id, inode.replica?))).collect();
        // Whatever is in another's place is moved aside first, so that swapped names come right too.
        let mut aside: Vec<(FileId, DeviceId, Vec<u8>)> = Vec::new();
        for (mut id, known) in replicas {
            let want = tree.logical_path(id);
            let device = known.device;
            let is_it =
                |on_tier: &OnTier| known.born == 0 || on_tier.plain.born == 0 || known.born == on_tier.plain.born;
            let place = (device, known.ino);
            let Some(on_tier) = found.get(&place).is_some_and(is_it).then(|| found.remove(&place)).flatten() else {
                let only_there =
                    tree.get(id).is_some_and(|inode| inode.logical.is_some() && (inode.dirty() || !inode.sealed));
                if only_there && let Some(files) = unread.get_mut(&device) {
                    *files += 1;
                    continue;
                }
                self.replica_missing(&mut tree, id, &Held::Tier(device));
                continue;
            };
            let Some(mut want) = want else {
                // Unlinked while open: nobody has it open any more, unless programs go on.
                if damaged && !self.left_open(id) {
                    // It may have got a name since.
                    tree.drop_replica(id);
                    tree.txn.file(id);
                    found.insert(place, on_tier);
                } else if !self.left_open(id) {
                    drop(self.tiers.device(device).unlink(&on_tier.path));
                    tree.drop_replica(id);
                } else if on_tier.path != super::files::hidden_name(id) {
                    drop(self.tiers.device(device).follow(&on_tier.path, &super::files::hidden_name(id)));
                }
                continue;
            };
            let is_clean = |inode: &Inode| inode.sealed && !inode.dirty();
            let written_since =
                |inode: &Inode| is_clean(inode) && !Self::is_still_clean(self.tiers.device(device), inode, &on_tier);
            // (Before a machine that went down makes it a spare one.)
            if damaged && tree.get(id).is_some_and(written_since) {
                tree.drop_replica(id);
                tree.txn.file(id);
                found.insert(place, on_tier);
                continue;
            }
            let doubt = if went_down_with(image, tree.device_numbers.get(&device).copied()) {
                Some(Doubt::MachineWentDown)
            } else {
                Doubt::of_length(tree.get(id), &on_tier.plain)
            };
            if let Some(doubt) = doubt {
                match self.judge(&mut tree, id, &on_tier, doubt) {
                    Some(kept) => id = kept,
                    None => {
                        drop(self.tiers.device(device).unlink(&on_tier.path));
                        continue;
                    }
                }
                want = tree.logical_path(id).unwrap_or(want);
            }
            let device = self.tiers.device(device);
            device.add_used(i64::try_from(on_tier.plain.blocks_bytes).unwrap_or(i64::MAX));
            if let Some(inode) = tree.get_mut(id) {
                inode.charged_bytes = on_tier.plain.blocks_bytes;
            }
            tree.recount(id);
            if on_tier.path != want {
                let hidden = super::files::hidden_name(id);
                drop(device.follow(&on_tier.path, &hidden));
                aside.push((id, device.id(), want));
            }
        }
        drop(tree);
        self.set_orphans_aside(found, strange, gone, damaged);
        for (device, files) in unread {
            let device = self.tiers.device(device);
            if files > 0 && device.standing() == Standing::Absent {
                self.note(
                    RunId(0),
                    device.path().display().to_string(),
                    format!(
                        "{files} file(s) are on a tier that is not there: {}; bring it back (mount it again) and start once more; until then they are remembered, and not in the store",
                        device.path().display()
                    ),
                    // The verdict names the files that are meant for the store.
                    false,
                );
            }
        }
        for (id, device, want) in aside {
            if let Err(why) = self.tiers.device(device).follow(&super::files::hidden_name(id), &want) {
                self.note(
                    RunId(0),
                    String::from_utf8_lossy(&want).into_owned(),
                    format!("cannot be put in its place on the tier: {why}"),
                    true,
                );
            }
        }
        walked
    }

    /// Whose content the plain file is now; `None`: it is not wanted.
    fn judge(&self, tree: &mut Tree, id: FileId, on_tier: &OnTier, doubt: Doubt) -> Option<FileId> {
        let path = tree.logical_path(id)?;
        let plain = tree.get(id)?.replica?;
        match worth(&tree.get(id)?.into(), on_tier.plain.size_bytes) {
            Worth::All => Some(id),
            Worth::Promised if doubt == Doubt::MachineWentDown => {
                Self::is_as_long(tree, id, &on_tier.plain);
                self.tell_promised(&path);
                Some(id)
            }
            // The catalog could not be told that somebody opened it.
            Worth::Spare
                if doubt != Doubt::MachineWentDown && self.is_left_to_writer(id, plain.device, &on_tier.path) =>
            {
                tree.get_mut(id)?.sealed = false;
                tree.txn.file(id);
                Some(id)
            }
            // (An empty one was made for somebody who opened it to write it anew, and was killed, or is served again in a moment.)
            Worth::Spare if doubt == Doubt::MachineWentDown || on_tier.plain.size_bytes == 0 => {
                tree.drop_replica(id);
                tree.txn.file(id);
                None
            }
            // Of no use without the run that made it.
            Worth::Promised | Worth::Doubtful if self.mode_for(tree, id, &path) == Mode::Remove => {
                self.lose(tree, id);
                None
            }
            // A spare copy that is not as long as it was is none: it was written since.
            Worth::Promised | Worth::Doubtful | Worth::Spare => {
                let kept = self.set_apart(tree, id, &on_tier.plain, doubt)?;
                self.sync_apart(tree, kept, plain, &on_tier.path);
                Some(kept)
            }
        }
    }

    /// Does a program go on writing it?
    fn is_left_to_writer(&self, id: FileId, device: DeviceId, path: &[u8]) -> bool {
        let handed = || {
            let file = self.tiers.device(device).open(path, false).ok()?;
            Some(self.is_handed_still(&Content {
                file: Arc::new(file),
                location: Location::Tier(device),
                writable: false,
            }))
        };
        self.left_written(id) || handed().unwrap_or(false)
    }

    /// Files that were open when the agent died are complete now: nobody can have them open any more, unless programs go on.
    fn seal_recovered(&self) -> Result<()> {
        let open: Vec<FileId> = {
            let tree = self.read_tree();
            tree.iter()
                .filter(|(_, inode)| !inode.sealed && inode.attr.kind == Kind::File)
                // What cannot be read now is completed when its tier is back.
                .filter(|(_, inode)| inode.replica.is_none_or(|plain| self.tiers.device(plain.device).is_there()))
                .map(|(id, _)| id)
                .collect()
        };
        // Which was closed first nobody knows any more; the order in which they were made is the next best.
        let open = in_order(open);
        let until = surgetank_types::clock::tick() + STORE_PATIENCE;
        for id in open {
            let _inode = self.lock_inode(id);
            if self.left_written(id) {
                self.leave_to_writer(id);
                continue;
            }
            if let Some(content) = self.content_left_in(id, until)? {
                if self.still_handed(id, &content) {
                    self.leave_to_writer(id);
                    continue;
                }
                self.finish_seal(id, None, &content);
                continue;
            }
            let mut tree = self.write_tree();
            let path = tree.logical_path(id);
            let Some(inode) = tree.get_mut(id) else { continue };
            let has_content = inode.replica.is_some() || inode.spill().is_some();
            let Some(path) = path.filter(|_| has_content) else {
                inode.sealed = true;
                continue;
            };
            drop(tree);
            // Sealed it would be the version before, and what was written since be removed as its copy.
            self.note(
                RunId(0),
                String::from_utf8_lossy(&path).into_owned(),
                "it was being written when an earlier agent died, and what there is of it cannot be opened: it is remembered, and not in the store; start again when it can",
                true,
            );
        }
        let dirty: Vec<FileId> = {
            let tree = self.read_tree();
            // What a program has open is queued when it is closed.
            let is_owed = |inode: &Inode| inode.sealed && inode.dirty() && inode.publish.is_none();
            tree.iter().filter(|(_, inode)| is_owed(inode)).map(|(id, _)| id).collect()
        };
        let dirty = in_order(dirty);
        let mut tree = self.write_tree();
        for id in dirty {
            self.queue_publish(&mut tree, id);
        }
        self.commit(&mut tree);
        let files: Vec<FileId> = tree.iter().map(|(id, _)| id).collect();
        files.into_iter().for_each(|id| self.to_be_synced(&tree, id));
        self.await_makers(&mut tree);
        Ok(())
    }

    /// What is queued of it would be half of what is being written. Who waits in an fsync asks again; else the close queues it.
    fn leave_to_writer(&self, id: FileId) {
        let mut tree = self.write_tree();
        if let Some(seq) = tree.get(id).and_then(|inode| inode.publish) {
            tree.take_back(id, seq);
        }
    }

    /// The plain file that holds a sealed or abandoned version.
    pub(crate) fn content_of(&self, id: FileId) -> Option<Content> {
        let tree = self.read_tree();
        let inode = tree.get(id)?;
        if let Some(PlainId { device, .. }) = inode.replica {
            let path = tree.logical_path(id)?;
            let file = self.tiers.device(device).open(&path, false);
            let file = file.inspect_err(|why| tracing::warn!(id = id.0, %why, "a plain file cannot be opened")).ok()?;
            return Some(Content { file: Arc::new(file), location: Location::Tier(device), writable: false });
        }
        drop(tree);
        self.content_in_store(id).ok().flatten()
    }
}

fn in_order(mut ids: Vec<FileId>) -> Vec<FileId> {
    ids.sort_unstable();
    ids
}
