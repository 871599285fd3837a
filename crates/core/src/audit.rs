//! Compares what the catalog remembers with what is stored on the tiers and in the store, and changes nothing: for
//! `fsck` and `scavenge`, when no agent lives.
//!
//! The danger that it avoids: a repair before the inspection. The findings describe the state as it was found;
//! recovery, which changes it, comes later.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::catalog::Damage;
use crate::files::synced_copies::{Left, kept_in, left_in};
use crate::metadata::losses::{lost_from, missing_from};
use crate::namespace::{HIDDEN_PREFIX, ORPHANS, Worth, is_damage, went_down, went_down_with, worth};
use crate::report::{Audit, Finding, Proven, TierCopy, Undrained, What};
use surgetank_store::{Cred, Store, StorePath, checksum};
use surgetank_tier::{Device, Plain, Remembered, Standing, Tiers};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{DeviceId, FileId, FileRecord, Image, Kind, NodeId, STORE_TEMPORARY_PREFIX};

const IN_PART: &str = "the machine went down while it was being written: what was synced is there, what was written after that may not be";

/// What the audit inspects.
pub struct Ground<'a> {
    /// State that the catalog has: files, names, operations and losses.
    pub image: &'a Image,
    /// The damage of the catalog's log, of which `image` has what is before the damage.
    pub damage: Option<&'a Damage>,
    /// Devices of the tiers, open for reading.
    pub tiers: &'a Tiers,
    /// `None`: the store is not inspected.
    pub store: Option<&'a dyn Store>,
    /// User on whose behalf the store is asked.
    pub who: Cred,
    /// The served directory's store, as a path for users.
    pub store_path: &'a Path,
    /// Identifies this agent's temporaries.
    pub key: &'a str,
    /// Directory of the copies that fsync made of files on volatile tiers.
    pub synced_copies: &'a Path,
    /// Read every byte whose checksum is known.
    pub scrub: bool,
}

struct OnTier {
    path: Vec<u8>,
    plain: Plain,
}

struct Look<'a> {
    ground: &'a Ground<'a>,
    records: HashMap<FileId, &'a FileRecord>,
    ids: HashMap<DeviceId, DeviceId>,
    /// Devices that cannot be read; a file that is not found may be on them.
    unread: HashSet<DeviceId>,
    copies: Vec<Left>,
    audit: Audit,
}

/// Compares the catalog with tiers and store. Errors: a device of a tier cannot be taken up.
pub fn audit(ground: &Ground<'_>) -> Result<Audit> {
    let ids = take_up(ground)?;
    let records: HashMap<FileId, &FileRecord> = ground.image.files.iter().map(|(id, record)| (*id, record)).collect();
    let cannot = |why| Error::new(format!("{} cannot be read", ground.synced_copies.display())).why(why);
    let copies = left_in(ground.synced_copies).map_err(cannot)?;
    let mut look = Look { ground, records, ids, unread: HashSet::new(), copies, audit: Audit::default() };
    look.damage();
    let mut found = look.walk_tiers();
    let mut files: Vec<(&FileId, &FileRecord)> = ground.image.files.iter().map(|(id, record)| (id, record)).collect();
    files.sort_unstable_by_key(|(id, _)| **id);
    for (id, record) in files {
        if record.attr.kind == Kind::File {
            look.audit.files += 1;
            look.file(*id, record, &mut found);
        }
    }
    look.recorded_losses();
    look.kept_copies(&kept_in(ground.synced_copies).map_err(cannot)?);
    look.orphans(found);
    look.leftovers();
    Ok(look.audit)
}

/// Maps the devices that the catalog names to where they are now.
fn take_up(ground: &Ground<'_>) -> Result<HashMap<DeviceId, DeviceId>> {
    let named: HashSet<DeviceId> =
        ground.image.files.iter().filter_map(|(_, record)| Some(record.replica?.device)).collect();
    let described = ground.image.marks.iter().filter_map(|(mark, number)| {
        let [.., tier, device] = number.to_be_bytes();
        Some((DeviceId { tier, device }, Remembered::from_mark(mark)?))
    });
    let mut wanted: HashMap<DeviceId, Remembered> = described.filter(|(number, _)| named.contains(number)).collect();
    for number in named {
        wanted.entry(number).or_insert_with(|| Remembered::nameless(number));
    }
    let mut wanted: Vec<(DeviceId, Remembered)> = wanted.into_iter().collect();
    wanted.sort_unstable_by_key(|(number, _)| *number);
    ground.tiers.take_up(&wanted)
}

impl Look<'_> {
    fn report(&mut self, what: What, path: &[u8], at: &Path, text: impl Into<String>) {
        self.audit.findings.push(Finding {
            what,
            path: path.into(),
            at: at.into(),
            text: text.into(),
            repaired: false,
            copy: None,
        });
    }

    fn damage(&mut self) {
        let Some(damage) = self.ground.damage else { return };
        if !is_damage(damage, self.ground.image) {
            return;
        }
        let text = format!(
            "the catalog's log is damaged at byte {}, with {} intact record(s) behind it: what happened since then is not known, and files of that time are orphans",
            damage.offset, damage.records_behind
        );
        self.report(What::Damaged, b"", &damage.path, text);
    }

    fn walk_tiers(&mut self) -> HashMap<(DeviceId, u64), OnTier> {
        let mut found = HashMap::new();
        for device in self.ground.tiers.devices() {
            if !device.is_there() {
                if device.standing() == Standing::Absent {
                    self.unread.insert(device.id());
                    self.report(
                        What::Unread,
                        b"",
                        device.path(),
                        "the tier is not there: mount it again, then repeat this command",
                    );
                }
                continue;
            }
            let walked = device.walk(&mut |path: &[u8], plain| {
                found.insert((device.id(), plain.ino), OnTier { path: path.to_vec(), plain });
            });
            if let Err(why) = walked {
                self.unread.insert(device.id());
                self.report(What::Unread, b"", device.path(), format!("the tier cannot be read: {why}"));
            }
        }
        found
    }

    /// The path by which programs know a file; `None`: it has no name any more.
    fn path_of<'b>(&'b self, mut place: Option<&'b (FileId, Box<[u8]>)>) -> Option<Vec<u8>> {
        let mut names: Vec<&[u8]> = Vec::new();
        loop {
            let (dir, name) = place?;
            names.push(name);
            if *dir == FileId::ROOT {
                names.reverse();
                return Some(names.join(&b'/'));
            }
            place = self.records.get(dir)?.logical.as_ref();
            if names.len() > self.records.len() {
                return None;
            }
        }
    }

    fn path_in_store(&self, place: &(FileId, Box<[u8]>)) -> Option<StorePath> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut place = place;
        loop {
            names.push(&place.1);
            if place.0 == FileId::ROOT {
                return Some(names.iter().rev().fold(StorePath::root(), |path, name| path.join(name)));
            }
            place = self.records.get(&place.0)?.applied.first()?;
            if names.len() > self.records.len() {
                return None;
            }
        }
    }

    fn in_store(&self, path: &StorePath) -> std::path::PathBuf {
        self.ground.store_path.join(std::ffi::OsStr::from_bytes(&path.0))
    }

    fn file(&mut self, id: FileId, record: &FileRecord, found: &mut HashMap<(DeviceId, u64), OnTier>) {
        let path = self.path_of(record.logical.as_ref());
        let dirty = record.version != record.durable_version || !record.sealed;
        let device = record.replica.and_then(|replica| self.ids.get(&replica.device).copied());
        let on_tier = record.replica.zip(device).and_then(|(replica, device)| {
            let place = (device, replica.backing_ino);
            let born = found.get(&place)?.plain.born;
            let same = replica.born == 0 || born == 0 || replica.born == born;
            same.then(|| found.remove(&place)).flatten()
        });
        // Unlinked while a program had it open; no program has it open any more.
        let Some(path) = path else { return };
        let device = device.map(|device| self.ground.tiers.device(device));
        let home = record.replica.map(|replica| replica.node).filter(|node| *node != NodeId::default());
        if let Some(home) = home {
            if dirty {
                let text = format!("its content is at member {} of the pool in which this agent was", home.0);
                self.report(
                    What::Unread,
                    &path,
                    &device.map(|device| on_device(device, &path)).unwrap_or_default(),
                    text,
                );
            }
            return self.store_copy(&path, record, dirty, None);
        }
        if let (Some(device), Some(on_tier)) = (device, &on_tier) {
            let at = on_device(device, &on_tier.path);
            let size_bytes = on_tier.plain.size_bytes;
            let went_down = went_down_with(self.ground.image, record.replica.map(|replica| replica.device));
            let proven = dirty.then(|| self.undrained(&path, &at, record, size_bytes, went_down));
            // (`undrained` has reported a file that is still to be drained.)
            if proven.is_none() && record.sealed && size_bytes != record.attr.size_bytes {
                let text =
                    format!("{size_bytes} bytes, and {} when it was closed; the store has it", record.attr.size_bytes);
                self.report(What::WrongSize, &path, &at, text);
            }
        } else if let Some(spill) = &record.spill {
            self.spilled(id, &path, record, spill);
        } else if let (true, Some(device)) = (dirty, device) {
            let at = on_device(device, &path);
            if self.unread.contains(&device.id()) {
                self.report(What::Unread, &path, &at, "it is on a tier that is not there, or cannot be read");
            } else if !self.synced_copy(id, record, &path) {
                self.report(What::Lost, &path, &at, missing_from(device, !record.applied.is_empty()));
            }
        }
        self.store_copy(&path, record, dirty, device.zip(on_tier.as_ref()));
    }

    /// Reports what fsync synced of a file whose plain file is gone. `false`: there is no such copy.
    fn synced_copy(&mut self, id: FileId, record: &FileRecord, path: &[u8]) -> bool {
        let is_newer = |one: &&Left| one.name.id == id && u64::from(one.name.version) > record.durable_version;
        let mut copies: Vec<&Left> = self.copies.iter().filter(is_newer).collect();
        copies.sort_unstable_by_key(|one| Reverse((one.name.version, one.name.number)));
        let newest = copies.into_iter().find_map(|one| Some((one.path.clone(), one.content().ok()??.size_bytes)));
        let Some((at, size_bytes)) = newest else { return false };
        self.report(What::Unproven, path, &at, IN_PART);
        self.audit.undrained.push(Undrained {
            path: path.into(),
            at: at.as_path().into(),
            size_bytes,
            open: !record.sealed,
            proven: Proven::InPart,
            perm: record.attr.perm,
            mtime: record.attr.mtime,
        });
        true
    }

    /// Its newest version is a temporary in the store.
    fn spilled(&mut self, id: FileId, path: &[u8], record: &FileRecord, spill: &(FileId, Box<[u8]>)) {
        let Some(store) = self.ground.store else { return };
        let place = self.path_in_store(spill);
        let at = place.as_ref().map(|at| self.in_store(at)).unwrap_or_default();
        match place.map(|place| store.stat(self.ground.who, &place)) {
            Some(Ok(stat)) => {
                self.undrained(path, &at, record, stat.attr.size_bytes, went_down(self.ground.image));
            }
            Some(Err(why)) if why.kind() != io::ErrorKind::NotFound => {
                self.report(
                    What::Unread,
                    path,
                    &at,
                    format!("the store does not show the temporary that holds it: {why}"),
                );
            }
            Some(Err(_)) | None => {
                if !self.synced_copy(id, record, path) {
                    let why = lost_from("the temporary in the store that held it", !record.applied.is_empty());
                    self.report(What::Lost, path, &at, why);
                }
            }
        }
    }

    /// Synced copies that could not be put back.
    fn kept_copies(&mut self, kept: &[PathBuf]) {
        for path in kept {
            let text = "a program synced it, and it could not be put back: copy it to where it belongs, or remove it";
            self.report(What::Orphan, b"", path, text);
        }
    }

    /// Losses that an earlier agent found and that the user has not acknowledged.
    fn recorded_losses(&mut self) {
        let found: HashSet<Vec<u8>> = self.audit.lost().map(|finding| finding.path.0.clone()).collect();
        for (path, record) in &self.ground.image.lost {
            if !found.contains(&**path) {
                self.report(What::Lost, path, Path::new(std::ffi::OsStr::from_bytes(&record.at)), &*record.why);
            }
        }
    }

    /// `went_down`: the machine went down since.
    fn undrained(&mut self, path: &[u8], at: &Path, record: &FileRecord, size_bytes: u64, went_down: bool) -> Proven {
        // A plain file only: the catalog does not record the length of a spilled one.
        let cut = record.sealed && record.spill.is_none() && size_bytes != record.attr.size_bytes;
        let proven = match worth(&record.into(), size_bytes) {
            _ if cut && !went_down => Proven::Cut,
            Worth::Promised if went_down => Proven::InPart,
            Worth::Doubtful if went_down => Proven::Nothing,
            _ => Proven::Whole,
        };
        match proven {
            Proven::InPart => self.report(What::Unproven, path, at, IN_PART),
            Proven::Nothing if size_bytes == 0 => {
                self.report(What::Lost, path, at, "the machine went down before its bytes were on the disk");
                return proven;
            }
            Proven::Nothing => self.report(
                What::Unproven,
                path,
                at,
                "the machine went down before it was synced, so it may not be complete",
            ),
            Proven::Cut => {
                let text = format!("{size_bytes} bytes, and {} when it was closed", record.attr.size_bytes);
                self.report(What::WrongSize, path, at, text);
            }
            Proven::Whole | Proven::Unknown => {}
        }
        self.audit.undrained.push(Undrained {
            path: path.into(),
            at: at.into(),
            size_bytes,
            open: !record.sealed,
            proven,
            perm: record.attr.perm,
            mtime: record.attr.mtime,
        });
        proven
    }

    /// Compares the store's copy of a file with what was written there.
    fn store_copy(&mut self, path: &[u8], record: &FileRecord, dirty: bool, on_tier: Option<(&Device, &OnTier)>) {
        let Some(store) = self.ground.store else { return };
        let Some(at) = record.applied.first().and_then(|place| self.path_in_store(place)) else { return };
        let shown = self.in_store(&at);
        let stat = match store.stat(self.ground.who, &at) {
            Ok(stat) => stat,
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                match on_tier {
                    Some((device, on_tier)) => {
                        let at = on_device(device, &on_tier.path);
                        self.report(What::NotInStore, path, &at, "it is not in the store any more; here is a copy");
                        let copy = TierCopy { files: device.files_path().to_path_buf(), path: on_tier.path.clone() };
                        if let Some(finding) = self.audit.findings.last_mut() {
                            finding.copy = Some(copy);
                        }
                    }
                    None => self.report(What::NotInStore, path, &shown, "it is not in the store any more"),
                }
                return;
            }
            Err(why) => {
                self.report(What::Unread, path, &shown, format!("the store does not show it: {why}"));
                return;
            }
        };
        if record.identity.is_some_and(|known| !known.of_kind(record.attr.kind).is(&stat.identity)) {
            self.report(
                What::ChangedInStore,
                path,
                &shown,
                "another client changed it in the store; the store's version counts",
            );
            return;
        }
        let Some(right) = record.checksum.filter(|_| self.ground.scrub && !dirty) else { return };
        let store = store.source(self.ground.who, &at).and_then(|source| {
            self.audit.scrubbed_bytes += stat.attr.size_bytes;
            source.sum()
        });
        let tier = on_tier.map(|(device, on_tier)| {
            device.open(&on_tier.path, false).and_then(|file| self.sum(&file)).map(|sum| sum == right)
        });
        let tier_at = on_tier.map(|(device, on_tier)| on_device(device, &on_tier.path)).unwrap_or_default();
        match (store.map(|sum| sum == right), tier) {
            (Ok(true), None | Some(Ok(true))) => {}
            (Ok(true), Some(_)) => {
                self.report(
                    What::RottenOnTier,
                    path,
                    &tier_at,
                    "its bytes are not those that were written; the store's are",
                );
            }
            (_, Some(Ok(true))) => {
                self.report(
                    What::RottenInStore,
                    path,
                    &shown,
                    "its bytes are not those that were written; the tier's are",
                );
            }
            (Ok(false), _) => {
                self.report(
                    What::RottenEverywhere,
                    path,
                    &shown,
                    "its bytes are not those that were written, and no other copy has them",
                );
            }
            (Err(why), _) => self.report(What::RottenEverywhere, path, &shown, format!("it cannot be read: {why}")),
        }
    }

    fn sum(&mut self, file: &File) -> io::Result<u64> {
        self.audit.scrubbed_bytes += file.metadata()?.len();
        checksum::reread(file)
    }

    fn orphans(&mut self, found: HashMap<(DeviceId, u64), OnTier>) {
        let mut orphans: Vec<((DeviceId, u64), OnTier)> = found.into_iter().collect();
        orphans.sort_unstable_by(|(at, one), (other_at, other)| (at.0, &one.path).cmp(&(other_at.0, &other.path)));
        for ((device, _), orphan) in orphans {
            let at = on_device(self.ground.tiers.device(device), &orphan.path);
            let path = orphan.path.strip_prefix(ORPHANS).unwrap_or(&orphan.path);
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
            // (With a damaged catalog they may be the only content of a file.)
            let is_nothing = orphan.plain.size_bytes == 0 || name.starts_with(HIDDEN_PREFIX);
            if is_nothing && self.ground.damage.is_none() {
                continue;
            }
            let size = orphan.plain.size_bytes;
            let text = format!("no record names it ({size} bytes): if it is missed, copy it to where it belongs");
            self.report(What::Orphan, path, &at, text);
        }
    }

    fn leftovers(&mut self) {
        let Some(store) = self.ground.store else { return };
        let mut prefix = STORE_TEMPORARY_PREFIX.to_vec();
        prefix.extend_from_slice(self.ground.key.as_bytes());
        let spills: HashSet<&[u8]> =
            self.records.values().filter_map(|record| Some(&*record.spill.as_ref()?.1)).collect();
        let mut dirs: Vec<StorePath> = vec![StorePath::root()];
        let applied = self.records.values().filter(|record| record.attr.kind == Kind::Directory);
        dirs.extend(applied.filter_map(|record| self.path_in_store(record.applied.first()?)));
        for dir in dirs {
            for entry in store.list(self.ground.who, &dir, true).unwrap_or_default() {
                if entry.name.starts_with(&prefix) && !spills.contains(&*entry.name) {
                    let at = dir.join(&entry.name);
                    let shown = self.in_store(&at);
                    let is_spill = entry.name[prefix.len()..].starts_with(b"-spill-");
                    if is_spill && self.ground.damage.is_some() {
                        let text = "no record names it, for the catalog is damaged: it may be the only copy of a file, and is kept under another name by the next start";
                        self.report(What::Orphan, &at.0, &shown, text);
                        continue;
                    }
                    self.report(
                        What::Leftover,
                        &at.0,
                        &shown,
                        "a copy that was not finished; it goes with the next start",
                    );
                }
            }
        }
    }
}

fn on_device(device: &Device, path: &[u8]) -> std::path::PathBuf {
    device.files_path().join(std::ffi::OsStr::from_bytes(path))
}
