//! Lost versions: the plain file is not there, or the machine went down before the tier was made to keep it.
//!
//! The danger that this file avoids: after a power loss a plain file can have its name and its length, but not its
//! bytes. A copy of it would replace the store's earlier version, and no check would find that. So a version for which
//! no `fsync` and no sync of the agent vouches ([`Inode::is_synced`]) is never published under its own name. What is
//! left of it gets a name beside it.

use std::collections::HashSet;
use std::path::Path;

use surgetank_state::{Inode, Name, OWN_INODE_BASE, Op, Place, PlainId, Progress, Tree};
use surgetank_store::StorePath;
use surgetank_tier::Plain;
use surgetank_types::model::{DeviceId, FileId, FileRecord, Image, Kind, Mark, Mode, OpKind, RunId, Seq};

use crate::base::users::own_cred;
use crate::metadata::losses::{lost_from, missing_from};
use crate::namespace::recover::Recovery;
use crate::namespace::recover::synced::PutBack;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const NAME_BYTES_MAX: usize = 255;

/// The present boot. `None` where the kernel does not report it: then a reboot is not noticed.
pub(crate) fn boot() -> Option<u64> {
    let text = std::fs::read(Path::new(BOOT_ID)).ok()?;
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(text.trim_ascii());
    Some(digest.finalize())
}

pub(crate) fn went_down(image: &Image) -> bool {
    image.marks.get(&Mark::Boot).is_some_and(|before| Some(*before) != boot())
}

/// Did the machine go down since this device was last walked? `number`: the catalog's number for the device.
pub(crate) fn went_down_with(image: &Image, number: Option<DeviceId>) -> bool {
    let before = number.and_then(|number| image.marks.get(&Mark::DeviceBoot(number)));
    before.or(image.marks.get(&Mark::Boot)).is_some_and(|before| Some(*before) != boot())
}

/// The worth of a plain file that was found after the machine went down.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// Complete.
    All,
    /// A program was promised its bytes, and may have written more since.
    Promised,
    /// Unknown.
    Doubtful,
    /// The store has the same version.
    Spare,
}

/// The reason for doubt about a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doubt {
    MachineWentDown,
    /// The plain file has another length than at its close, and no program of the run can have changed it. The tier's
    /// file system was repaired, or another process changed the file.
    Length {
        closed_bytes: u64,
        plain_bytes: u64,
    },
}

impl Doubt {
    pub fn of_length(inode: Option<&Inode>, plain: &Plain) -> Option<Self> {
        let closed_bytes = inode.filter(|inode| inode.sealed)?.attr.size_bytes;
        (closed_bytes != plain.size_bytes).then_some(Self::Length { closed_bytes, plain_bytes: plain.size_bytes })
    }
}

impl std::fmt::Display for Doubt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::MachineWentDown => f.write_str("the machine went down before it was synced"),
            Self::Length { closed_bytes, plain_bytes } => {
                write!(
                    f,
                    "its plain file on the tier has {plain_bytes} bytes, and had {closed_bytes} when it was closed"
                )
            }
        }
    }
}

/// The record of a version, in memory or in the catalog.
pub(crate) struct Recorded {
    sealed: bool,
    dirty: bool,
    synced: bool,
    promised: bool,
    size_bytes: u64,
}

impl From<&Inode> for Recorded {
    fn from(inode: &Inode) -> Self {
        Self {
            sealed: inode.sealed,
            dirty: inode.dirty(),
            synced: inode.is_synced(),
            promised: inode.is_promised(),
            size_bytes: inode.attr.size_bytes,
        }
    }
}

impl From<&FileRecord> for Recorded {
    fn from(record: &FileRecord) -> Self {
        Self {
            sealed: record.sealed,
            dirty: record.version != record.durable_version,
            synced: record.sealed && record.synced_version >= record.version,
            promised: record.promised_version > record.durable_version,
            size_bytes: record.attr.size_bytes,
        }
    }
}

/// `size_bytes`: of the plain file, or of the temporary in the store that holds the version.
pub(crate) fn worth(recorded: &Recorded, size_bytes: u64) -> Worth {
    // For a prefetched or fetched copy, too, no record says whether its bytes reached the disk or changed.
    if recorded.sealed && !recorded.dirty {
        Worth::Spare
    } else if recorded.sealed && recorded.size_bytes == size_bytes && (recorded.synced || size_bytes == 0) {
        Worth::All
    } else if recorded.promised {
        Worth::Promised
    } else {
        Worth::Doubtful
    }
}

/// Content that only lost members had does not come back, and a command ends: what is behind such a file in the order would
/// stay on the tiers. Returns how many versions are lost, or are looked for at this moment. A file that is open stays,
/// and those that have a copy (`not`).
pub(crate) fn give_up_homes(recovery: &Recovery<'_>, not: &[FileId]) -> usize {
    let metadata = &recovery.metadata;
    let mut tree = metadata.write_tree();
    let is_missing = |op: &Op| {
        let is_lasting = op.error.as_ref().is_some_and(|trouble| trouble.lasting);
        // (A staged copy may still arrive.)
        is_lasting && matches!(op.kind, OpKind::Publish { .. }) && !matches!(op.progress, Progress::Staged { .. })
    };
    // (It ends soon.)
    let is_tried = |op: &Op| !matches!(op.progress, Progress::Waiting);
    let at_lost = |id: FileId| {
        let inode = tree.get(id).filter(|inode| inode.handles == 0 && !not.contains(&id))?;
        let home = inode.home()?;
        let copies = &recovery.files.copies;
        copies.absence(&tree, id).filter(|_| copies.is_of_this_pool(id)).map(|absent| (id, home, absent))
    };
    let missing = tree.ops.values().filter(|op| is_missing(op));
    let missing = missing.filter_map(|op| at_lost(op.file()).map(|lost| (is_tried(op), lost)));
    let (tried, found): (Vec<_>, Vec<_>) = missing.partition(|(is_tried, _)| *is_tried);
    let (tried, found) = (tried.len(), found.into_iter().map(|(_, lost)| lost).collect::<Vec<_>>());
    for (id, home, absent) in &found {
        let path = tree.logical_path(*id);
        let store_has_one = tree.get(*id).is_some_and(|inode| inode.applied.is_some());
        recovery.lose(&mut tree, *id);
        if let Some(path) = path {
            let why = lost_from(&format!("member {} of the pool, which is lost", home.0), store_has_one);
            recovery.losses.record_loss(&mut tree, &path, absent.place.clone().into_bytes(), why);
        }
    }
    metadata.commit(&mut tree);
    drop(tree);
    if !found.is_empty() {
        recovery.look_at_reverted();
        metadata.wake();
    }
    found.len() + tried
}

/// The place of the newest version.
pub(crate) enum Held<'a> {
    Tier(DeviceId),
    /// A temporary in the store.
    Store(&'a StorePath),
}

impl Recovery<'_> {
    /// What had the newest version does not have it. Returns the device of a plain file that was made of a synced copy, under the
    /// file's hidden name.
    pub(crate) fn replica_missing(&self, tree: &mut Tree, id: FileId, held: &Held<'_>) -> Option<DeviceId> {
        let dirty = tree.get(id).is_some_and(|inode| inode.dirty() || !inode.sealed);
        let (Some(path), true) = (tree.logical_path(id), dirty) else {
            tree.drop_replica(id);
            tree.txn.file(id);
            return None;
        };
        let was_on = if let Held::Tier(device) = held { Some(*device) } else { None };
        if let Some(device) = PutBack::of(self).put_back(tree, id, &path, was_on) {
            return Some(device);
        }
        let is_temporary = self.metadata.mode_for(tree, id, &path) == Mode::Remove;
        let store_has_one = tree.get(id).is_some_and(|inode| inode.applied.is_some());
        self.lose(tree, id);
        // Of no use without the run that made it.
        if is_temporary {
            return None;
        }
        let (at, why) = match held {
            Held::Tier(device) => {
                let device = self.base.tiers.device(*device);
                (device.shown(&path), missing_from(device, store_has_one))
            }
            Held::Store(temporary) => {
                let at = format!("{}/{temporary}", self.base.store.describe());
                (at.into_bytes(), lost_from("the temporary in the store that held it", store_has_one))
            }
        };
        self.losses.record_loss(tree, &path, at, why);
        None
    }

    /// The user says that the absent tiers do not come back. Runs only while the agent serves no program.
    pub fn give_up_absent(&self) {
        let mut tree = self.metadata.write_tree();
        let only_there: Vec<(FileId, DeviceId)> = tree
            .iter()
            .filter(|(_, inode)| inode.logical.is_some() && (inode.dirty() || !inode.sealed))
            .filter_map(|(id, inode)| Some((id, inode.replica?.device)))
            .filter(|(_, device)| !self.base.tiers.device(*device).is_there())
            .collect();
        let mut aside = Vec::new();
        for (id, device) in only_there {
            let put_back = self.replica_missing(&mut tree, id, &Held::Tier(device));
            aside.extend(put_back.zip(tree.logical_path(id)).map(|(device, path)| (id, device, path)));
        }
        drop(tree);
        self.put_in_place(&aside);
        self.look_at_reverted();
        // What fsync synced of them may be back.
        if let Err(why) = self.seal_recovered() {
            tracing::warn!(%why, "files that were put back wait for the next start");
        }
    }

    /// From now on the catalog and these devices belong to the present boot. An absent device is checked when it is back.
    pub(crate) fn remember_boot(&self, image: &Image, walked: &HashSet<DeviceId>) {
        let Some(boot) = boot() else { return };
        let mut tree = self.metadata.write_tree();
        for (device, number) in tree.device_numbers.clone() {
            let mark = Mark::DeviceBoot(number);
            match image.marks.get(&Mark::Boot) {
                _ if walked.contains(&device) => tree.txn.mark(mark, boot),
                Some(before) if !image.marks.contains_key(&mark) => tree.txn.mark(mark, *before),
                _ => {}
            }
        }
        tree.txn.mark(Mark::Boot, boot);
    }

    /// Gives up the newest version. If the store has the file, its version becomes the file; otherwise the file that it
    /// was about to replace returns.
    pub(crate) fn lose(&self, tree: &mut Tree, id: FileId) {
        tree.drop_replica(id);
        let mut replaced: Vec<(Place, FileId)> = Vec::new();
        if let Some(seq) = tree.get_mut(id).and_then(|inode| inode.publish.take()) {
            replaced.extend(tree.ops.get(&seq).and_then(|op| replaced_by(&op.kind)));
            tree.cancel(seq);
        }
        let Some(inode) = tree.get_mut(id) else { return };
        revert(inode);
        if inode.applied.is_some() {
            tree.txn.file(id);
            tree.reverted.push(id);
            return;
        }
        let mut names: Vec<Place> = inode.logical.take().into_iter().collect();
        names.extend(inode.extra.iter_mut().flat_map(|extra| std::mem::take(&mut extra.more_names)));
        tree.txn.file(id);
        // No queued operation on it can be carried out.
        let of_it = |op: &Op| op.file() == id && !matches!(op.kind, OpKind::Exchange { .. });
        let ops: Vec<Seq> = tree.ops.iter().filter(|(_, op)| of_it(op)).map(|(seq, _)| *seq).collect();
        for seq in ops {
            replaced.extend(tree.ops.get(&seq).and_then(|op| replaced_by(&op.kind)));
            tree.cancel(seq);
        }
        for (dir, name) in names {
            let planned = tree.planned(dir, &name).filter(|planned| *planned != id);
            // Only files that the store has: a file that would be there for an instant only has no content any more.
            let there = |other: &FileId| *other != id && tree.get(*other).is_some_and(|inode| inode.applied.is_some());
            let mut over = replaced.iter().filter(|(at, _)| *at == (dir, name.clone())).map(|(_, over)| *over);
            let before = planned.filter(there).or_else(|| over.find(there));
            // No later file needs it in the store any more.
            let useless = planned.filter(|other| {
                before.is_none()
                    && tree.get(*other).is_some_and(|inode| inode.logical.is_none() && inode.applied.is_none())
            });
            tree.bind(dir, &name, |entry| {
                entry.set_logical(before);
                entry.set_planned(before.or(planned.filter(|_| useless.is_none())));
            });
            if let Some(useless) = useless {
                self.lose(tree, useless);
            }
            tree.txn.entry(dir, &name);
            if let Some(before) = before {
                self.as_the_store_has_it(tree, before);
            }
            if let Some(before) = before
                && let Some(inode) = tree.get_mut(before)
            {
                inode.attr.links = inode.attr.links.max(1);
                match inode.logical {
                    None => inode.logical = Some((dir, name)),
                    Some(_) => inode.extra_mut().more_names.push((dir, name)),
                }
                tree.txn.file(before);
            }
        }
    }

    /// The file was replaced, and its newer content went with that: only the store's version is left.
    fn as_the_store_has_it(&self, tree: &mut Tree, id: FileId) {
        let Some(inode) = tree.get_mut(id) else { return };
        if inode.replica.is_some() || inode.spill().is_some() || inode.attr.kind != Kind::File {
            return;
        }
        revert(inode);
        if let Some(seq) = inode.publish.take() {
            tree.cancel(seq);
        }
        tree.reverted.push(id);
    }

    /// Takes a doubtful version out of its name, and gives what is left of it a name beside that. Returns that file, if
    /// anything is left.
    pub(crate) fn set_apart(&self, tree: &mut Tree, id: FileId, plain: &Plain, doubt: Doubt) -> Option<FileId> {
        let path = tree.logical_path(id)?;
        let shown = String::from_utf8_lossy(&path).into_owned();
        let inode = tree.get_mut(id)?;
        let ((dir, name), replica, spill) =
            (inode.logical.clone()?, inode.replica.take(), inode.extra.as_mut().and_then(|extra| extra.spill.take()));
        let (run, charged_bytes, mut attr) = (inode.run, inode.charged_bytes, inode.attr);
        let before = if inode.applied.is_some() { "; the store keeps the version before" } else { "" };
        self.lose(tree, id);
        if plain.size_bytes == 0 {
            let why = match doubt {
                Doubt::MachineWentDown => {
                    format!("the machine went down before its bytes were on the tier's disk: they are lost{before}")
                }
                Doubt::Length { .. } => format!("{doubt}: they are lost{before}"),
            };
            let at = replica.map(|plain| self.base.tiers.device(plain.device).shown(&path)).unwrap_or_default();
            self.losses.record_loss(tree, &path, at, why);
            return None;
        }
        let aside = self.name_beside(tree, dir, &name);
        let new = tree.new_id();
        attr.ino = OWN_INODE_BASE + new.0;
        attr.links = 1;
        attr.size_bytes = plain.size_bytes;
        attr.mtime = plain.mtime;
        let mut inode = Inode::new(attr);
        inode.version = 1;
        inode.run = run;
        inode.replica = replica;
        inode.charged_bytes = charged_bytes;
        inode.logical = Some((dir, aside.clone()));
        if spill.is_some() {
            inode.extra_mut().spill = spill;
        }
        tree.insert(new, inode);
        tree.bind(dir, &aside, |entry| entry.set_logical(Some(new)));
        tree.own(new);
        tree.txn.entry(dir, &aside);
        self.base.notes.note(
            RunId(0),
            shown,
            format!(
                "{doubt}, so it may not be complete: what there is of it is now {}{before}; compare it and rename it, or make it again",
                String::from_utf8_lossy(&aside)
            ),
            true,
        );
        Some(new)
    }

    /// A file of which a program was promised some bytes keeps its name.
    pub(crate) fn note_promised(&self, path: &[u8]) {
        self.base.notes.note(
            RunId(0),
            String::from_utf8_lossy(path).into_owned(),
            "the machine went down while it was being written: what was synced is there, what was written after that may not be",
            true,
        );
    }

    /// The content does not change before it is in the store, so the next boot need not doubt it again.
    pub(crate) fn sync_apart(&self, tree: &mut Tree, id: FileId, plain: PlainId, path: &[u8]) {
        match self.base.tiers.device(plain.device).open(path, false).and_then(|file| file.sync_all()) {
            Ok(()) => {
                if let Some(inode) = tree.get_mut(id) {
                    inode.synced = inode.version;
                }
            }
            Err(why) => self.base.tiers.device_failed(plain.device, &why),
        }
    }

    fn name_beside(&self, tree: &Tree, dir: FileId, name: &Name) -> Name {
        let mut number = 0;
        loop {
            let aside = unproven_name(name, number);
            let taken_here = tree.entry(dir, &aside).is_some();
            let in_store = || {
                let path = tree.applied_path(dir)?.join(&aside);
                self.base.store.stat(own_cred(tree.get(dir)?.cred()), &path).ok()
            };
            if !taken_here && in_store().is_none() {
                return Name::from(aside);
            }
            number += 1;
        }
    }
}

/// The name for what is left of a doubtful version of `name`; `number` distinguishes several such names.
pub fn unproven_name(name: &[u8], number: u32) -> Vec<u8> {
    let mut ending = format!(".surgetank-unproven-{:08x}", boot().unwrap_or_default() as u32);
    if number > 0 {
        ending.push_str(&format!("-{number}"));
    }
    let kept = name.len().min(NAME_BYTES_MAX - ending.len());
    [&name[..kept], ending.as_bytes()].concat()
}

fn revert(inode: &mut Inode) {
    inode.sealed = true;
    inode.promised = 0;
    inode.version = inode.durable;
    inode.synced = 0;
}

/// The file from which the operation would take a name, and that name.
fn replaced_by(kind: &OpKind) -> Option<(Place, FileId)> {
    match kind {
        OpKind::Publish { dir, name, over, .. } => Some(((*dir, Name::from(&**name)), (*over)?)),
        OpKind::Rename { to_dir, to, over, .. } => Some(((*to_dir, Name::from(&**to)), (*over)?)),
        _ => None,
    }
}
