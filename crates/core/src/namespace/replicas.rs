//! Files of a pool of which other members are to have copies until the store has them.
//!
//! The owner of a name decides about its copies. This module says which files need some, and what they are at one moment: a
//! copy is of one sealed version under one path.
//!
//! The danger that this avoids: a copy of what a file was before. So a copy counts only after [`Replicas::is_still`] has
//! found the file as it was when its content was read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::{Timespec, Timestamps, fstat, futimens};
use surgetank_policy::config::Survives;
use surgetank_policy::hint::Collocate;
use surgetank_state::{Inode, PlainId, Tree};
use surgetank_types::ladder;
use surgetank_types::model::{FileId, FsyncTarget, Kind, NodeId, OpKind, Role, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, MutexGuard, PoisonError};

use crate::base::Base;
use crate::base::users::is_drained;
use crate::content::Location;
use crate::files::Files;
use crate::metadata::closed::{self, AtClose};

/// After so many closes those that do not count any more are forgotten.
const SOME: usize = 1024;

/// A directory above a file that the store does not have yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Above {
    /// Its number.
    pub number: u64,
    /// Its mode.
    pub perm: u32,
    /// User and group.
    pub owner: (u32, u32),
}

/// A sealed version that the store does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// The version.
    pub version: u32,
    /// 0: it is sealed. Otherwise this is what it was at a close, and programs may still have it open.
    pub moment: u64,
    epoch: u32,
    /// As programs see it.
    pub path: Vec<u8>,
    /// Its length.
    pub size_bytes: u64,
    /// Its mode.
    pub perm: u32,
    /// User and group.
    pub owner: (u32, u32),
    /// Of its last access and change.
    pub times: (Timestamp, Timestamp),
    /// The member that has its content; `None`: this one.
    pub home: Option<u32>,
    /// Its directory.
    pub directory: FileId,
    /// Directories above it that the store does not have, the nearest first.
    pub above: Vec<Above>,
    /// On how many members it is to be.
    pub wanted: u32,
    /// The files with which its content is to be on one member.
    pub group: Option<Box<str>>,
    /// The store has it.
    pub is_clean: bool,
}

/// Which states of a file count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// Sealed, or at a close that waits; the store does not have it.
    Sealed,
    /// Also a version that was made here and that the store has.
    OrClean,
    /// Also a file that a program may write.
    OrOpen,
}

impl Sealed {
    fn which(&self) -> Which {
        if self.is_clean { Which::OrClean } else { Which::Sealed }
    }
}

/// A file in the directory of contents.
#[derive(Debug, Clone)]
pub struct HeldFile {
    /// Its number here.
    pub id: FileId,
    /// Its name there.
    pub name: Vec<u8>,
    /// The attribute that was asked for.
    pub record: Option<Box<[u8]>>,
}

/// Which files need copies, and what they are.
pub struct Replicas {
    pub(super) base: Base,
    pub(super) files: Arc<Files>,
}

impl Replicas {
    pub(crate) fn new(base: &Base, files: &Arc<Files>) -> Self {
        Self { base: base.clone(), files: files.clone() }
    }

    /// From now on closed files are noted, and those that are there.
    pub fn note_closed(&self) {
        closed::note_from_now_on(&self.files.metadata);
    }

    /// Files that were closed, or got another name, since the last call, and may need copies. Without any it waits for so long.
    pub fn take_closed(&self, patience: Duration) -> BTreeSet<FileId> {
        closed::take(&self.files.metadata, patience).into_iter().collect()
    }

    /// What is to be copied of the file. `None`: nothing, now.
    pub fn sealed(&self, id: FileId) -> Option<Sealed> {
        self.state_in(&self.files.metadata.read_tree(), id, Which::Sealed)
    }

    /// The same as for `then`, now.
    pub fn now(&self, id: FileId, then: &Sealed) -> Option<Sealed> {
        self.now_in(&self.files.metadata.read_tree(), id, then)
    }

    pub(super) fn now_in(&self, tree: &Tree, id: FileId, then: &Sealed) -> Option<Sealed> {
        self.state_in(tree, id, then.which())
    }

    /// Name and rights of a file that the store does not have, also while a program writes it.
    pub fn named(&self, id: FileId) -> Option<Sealed> {
        self.state_in(&self.files.metadata.read_tree(), id, Which::OrOpen)
    }

    pub(super) fn state_in(&self, tree: &Tree, id: FileId, which: Which) -> Option<Sealed> {
        let inode = tree.get(id).filter(|inode| inode.attr.kind == Kind::File)?;
        let at_close = match which {
            Which::OrOpen => None,
            _ if inode.sealed => None,
            _ => Some(self.at_close(id)?),
        };
        let is_clean = inode.sealed && !inode.dirty();
        if is_clean && !(which == Which::OrClean && inode.version > 0) {
            return None;
        }
        // (The store has the content of a spilled file.)
        if inode.spill().is_some() || inode.replica.is_none() || surgetank_state::is_for_another(tree, id) {
            return None;
        }
        let (directory, path) = (inode.logical.as_ref()?.0, tree.logical_path(id)?);
        let decision = self.files.metadata.decided(tree, id, &path);
        if !is_drained(self.files.metadata.mode_as(tree, id, decision.mode)) {
            return None;
        }
        let attr = &inode.attr;
        Some(Sealed {
            version: at_close.map_or(inode.version, |close| close.version),
            moment: at_close.map_or(0, |close| close.moment),
            epoch: inode.epoch,
            path,
            size_bytes: at_close.map_or(attr.size_bytes, |close| close.size_bytes),
            perm: attr.perm,
            owner: (attr.uid, attr.gid),
            times: at_close.map_or((attr.atime, attr.mtime), |close| close.times),
            home: inode.home().map(|home| u32::from(home.0)),
            directory,
            above: above(tree, directory),
            wanted: if is_clean { 1 } else { decision.replicas.unwrap_or(self.base.config.replicas) },
            group: decision.collocate.as_ref().and_then(Collocate::group).map(Box::from),
            is_clean,
        })
    }

    /// Does a close of the file by a writer wait until other members have copies?
    pub fn are_made_at_close(&self, id: FileId) -> bool {
        closed::waits_for(&self.files.metadata, id)
    }

    /// A program that may write the file closes it: from now on [`Self::sealed`] is what the file is now, until another program
    /// opens it for writing. Returns `false` if it needs no copies.
    pub fn closes(&self, id: FileId, moment: u64) -> io::Result<bool> {
        let metadata = &self.files.metadata;
        let _inode = metadata.lock_inode(id);
        // (It may have lost its name meanwhile, or its rule may be another one.)
        let Some(open) = metadata.open_of(id).filter(|_| self.are_made_at_close(id)) else { return Ok(false) };
        let content = open.content();
        if !matches!(content.location, Location::Tier(_)) || self.files.syncs.is_published(id, &content.file) {
            return Ok(false);
        }
        let stat = fstat(&content.file)?;
        let written = open.written.load(Ordering::Relaxed) || open.direct_writer.load(Ordering::Relaxed);
        let tree = metadata.read_tree();
        let Some(inode) = tree.get(id).filter(|inode| !inode.sealed && (written || inode.dirty())) else {
            return Ok(false);
        };
        let time = |secs, nanos: u64| Timestamp::from_parts(secs, u32::try_from(nanos).unwrap_or(0));
        let close = AtClose {
            moment,
            version: inode.version + u32::from(written),
            size_bytes: u64::try_from(stat.st_size).unwrap_or(0),
            times: (time(stat.st_atime, stat.st_atime_nsec), time(stat.st_mtime, stat.st_mtime_nsec)),
        };
        let mut closes = self.known_closes();
        if closes.len() % SOME == SOME - 1 {
            // (Those of sealed files are of no use.)
            closes.retain(|id, _| tree.get(*id).is_some_and(|inode| !inode.sealed));
        }
        closes.insert(id, close);
        Ok(true)
    }

    /// A member has a copy of an earlier agent's close: it counts while no other program has opened the file for writing.
    pub fn was_closed(
        &self,
        id: FileId,
        (moment, version): (u64, u32),
        size_bytes: u64,
        times: (Timestamp, Timestamp),
    ) {
        let tree = self.files.metadata.read_tree();
        if !tree.get(id).is_some_and(|inode| !inode.sealed && version.wrapping_sub(inode.version) <= 1) {
            return;
        }
        let close = AtClose { moment, version, size_bytes, times };
        let mut closes = self.known_closes();
        if closes.get(&id).is_none_or(|known| known.moment < moment) {
            closes.insert(id, close);
        }
    }

    fn at_close(&self, id: FileId) -> Option<AtClose> {
        self.known_closes().get(&id).copied().filter(|close| close.moment != u64::MAX)
    }

    fn known_closes(&self) -> MutexGuard<'_, HashMap<FileId, AtClose>> {
        self.files.metadata.closes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the content, which is on a tier here. It may be a later one.
    pub fn open(&self, id: FileId) -> io::Result<File> {
        // (A path on a tier means one thing while the tree is locked.)
        let tree = self.files.metadata.read_tree();
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let PlainId { device, .. } = tree.get(id).and_then(|inode| inode.replica).ok_or_else(missing)?;
        let path = tree.logical_path(id).ok_or_else(missing)?;
        self.base.tiers.device(device).open(&path, false)
    }

    /// Opens the content of a sealed file in this directory, if it is on a tier here.
    pub fn open_sealed(&self, id: FileId, dir: FileId) -> Option<File> {
        let is_here = |tree: &Tree| {
            let inode = tree.get(id).filter(|inode| inode.attr.kind == Kind::File && inode.sealed)?;
            // (What is fetched from the store may be incomplete.)
            let is_whole = inode.home().is_none() && inode.spill().is_none() && !inode.may_be_copy();
            let is_there = inode.logical.as_ref().is_some_and(|(at, _)| *at == dir);
            (is_whole && is_there && !surgetank_state::is_for_another(tree, id)).then_some(())
        };
        is_here(&self.files.metadata.read_tree())?;
        self.open(id).ok()
    }

    /// Is the file as it was then? From now on the shim does not write it without a request.
    pub fn is_still(&self, id: FileId, then: &Sealed) -> bool {
        let _inode = self.files.metadata.lock_inode(id);
        let tree = self.files.metadata.read_tree();
        let now = self.now_in(&tree, id, then);
        // (What else has changed the holders learn at the next look.)
        let of = |sealed: &Sealed| {
            ((sealed.version, sealed.moment), sealed.epoch, sealed.path.clone(), sealed.perm, sealed.owner)
        };
        let is_still = now.is_some_and(|now| of(&now) == of(then));
        if is_still {
            self.has_copy(id);
        }
        is_still
    }

    /// An earlier agent may have had copies made: until they are known, each file may have one.
    pub fn are_unknown(&self) {
        self.files.metadata.copies_unknown.store(true, Ordering::SeqCst);
    }

    /// Each file with a copy was named ([`Self::has_copy`]).
    pub fn are_known(&self) {
        self.files.metadata.copies_unknown.store(false, Ordering::SeqCst);
        self.known_closes().retain(|_, close| close.moment != u64::MAX);
    }

    /// Another member has a copy of the file, or this one of content that is elsewhere.
    pub fn has_copy(&self, id: FileId) {
        self.files.metadata.copied.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }

    /// No member has a copy any more.
    pub fn is_alone(&self, id: FileId) {
        self.files.metadata.copied.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    /// Files that the store does not have yet, or that a program writes: number and bytes, without holes.
    pub fn undrained(&self) -> BTreeMap<u64, u64> {
        let open = self
            .files
            .metadata
            .opens()
            .values()
            .filter(|open| open.writers() > 0)
            .map(|open| open.id)
            .collect::<Vec<_>>();
        let tree = self.files.metadata.read_tree();
        let files = tree.ops.values().filter_map(|op| match &op.kind {
            OpKind::Publish { file, .. } => Some((*file, tree.get(*file)?)),
            _ => None,
        });
        let open = open
            .into_iter()
            .filter_map(|id| Some((id, tree.get(id)?)))
            .filter(|(id, _)| !surgetank_state::is_for_another(&tree, *id));
        let files = files.chain(open).filter(|(_, inode)| inode.attr.kind == Kind::File && inode.spill().is_none());
        files.map(|(FileId(number), inode)| (number, inode.attr.data_bytes())).collect()
    }

    /// How many files have their content in the store already, and not their name: only this member knows that.
    pub fn spilled(&self) -> u64 {
        let opens: Vec<FileId> = self.files.metadata.opens().keys().copied().collect();
        let tree = self.files.metadata.read_tree();
        let queued = tree.ops.values().filter_map(|op| match &op.kind {
            OpKind::Publish { file, .. } => Some(*file),
            _ => None,
        });
        let files: BTreeSet<FileId> = queued.chain(opens).collect();
        files.into_iter().filter(|id| tree.get(*id).is_some_and(|inode| inode.spill().is_some())).count() as u64
    }

    /// The content comes to the member that has the name: a copy of this version, which is here, takes its place. Returns whether it
    /// did. `if_closed`: only if no program has it open. (Otherwise it is lost where it was.)
    pub fn comes_home(&self, id: FileId, version: u32, copy: &File, if_closed: bool) -> io::Result<bool> {
        let metadata = &self.files.metadata;
        let _inode = metadata.lock_inode(id);
        let opened = {
            let tree = metadata.read_tree();
            let is_one = |inode: &&Inode| inode.home().is_some() && inode.sealed && inode.version == version;
            let plain = tree.get(id).filter(is_one).and_then(|inode| Some((inode.replica?.device, inode.attr)));
            let place = plain.zip(tree.logical_path(id));
            // (No program can open it while its lock is held.)
            let is_open = if_closed && metadata.open_of(id).is_some();
            let Some(((device, attr), path)) = place.filter(|_| !is_open) else { return Ok(false) };
            let device = self.base.tiers.device(device);
            (device.open(&path, true)?, device, attr)
        };
        let (file, device, attr) = opened;
        // (The length at the close that it is of. Here that may not be known.)
        let size_bytes = copy.metadata()?.len();
        ladder::copy_file(copy, &file, size_bytes, &|_| Ok(()))?;
        file.set_len(size_bytes)?;
        let time = |time: Timestamp| Timespec { tv_sec: time.secs(), tv_nsec: i64::from(time.subsec_nanos()) };
        futimens(&file, &Timestamps { last_access: time(attr.atime), last_modification: time(attr.mtime) })?;
        file.sync_all()?;
        let blocks = u64::try_from(fstat(&file)?.st_blocks).unwrap_or(0);
        let open = metadata.open_of(id);
        let mut tree = metadata.write_tree();
        let Some(inode) = tree.get_mut(id).filter(|inode| inode.home().is_some()) else { return Ok(false) };
        let known = inode.charged_bytes;
        let charged = open.map_or(known, |open| open.charged_bytes.swap(blocks * 512, Ordering::Relaxed));
        device.add_used((blocks * 512) as i64 - charged as i64);
        (inode.charged_bytes, inode.attr.blocks, inode.attr.size_bytes) = (blocks * 512, blocks, size_bytes);
        inode.extra_mut().home = NodeId::default();
        if let Some(publish) = inode.publish {
            tree.drain_queue().forgive(publish);
        }
        tree.recount(id);
        tree.txn.file(id);
        metadata.commit(&mut tree);
        metadata.show(&tree, id);
        drop(tree);
        metadata.wake();
        Ok(true)
    }

    // At the member that has copies of another one's files.

    /// Files in the directory of contents with this beginning of their names, and one attribute of each.
    pub fn held(&self, prefix: &str, attribute: &[u8]) -> Vec<HeldFile> {
        let tree = self.files.metadata.read_tree();
        let Some(dir) = tree.homes.and_then(|homes| tree.dir(homes)) else { return Vec::new() };
        let found = dir.children.iter().filter(|(name, _)| name.starts_with(prefix.as_bytes()));
        let found = found.filter_map(|(name, entry)| {
            let id = entry.logical()?;
            let xattrs = tree.get(id)?.extra.as_ref().and_then(|extra| extra.xattrs.as_ref());
            let record = xattrs.and_then(|xattrs| xattrs.get(attribute)).cloned();
            Some(HeldFile { id, name: name.to_vec(), record })
        });
        found.collect()
    }

    /// Does a sync on the tier make the content of another member's file durable?
    pub fn is_synced_by_tier(&self, number: u64) -> bool {
        let metadata = &self.files.metadata;
        let content = crate::namespace::homes::content_for(metadata, number);
        let device = content.and_then(|id| Some(metadata.read_tree().get(id)?.replica?.device));
        let survives = device.is_some_and(|device| self.base.tiers.device(device).survives() >= Survives::Reboot);
        survives && self.base.config.fsync != Some(FsyncTarget::Store)
    }

    /// Is there room on a tier for so many bytes of another member's files?
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.would_have_room_for(bytes, 0)
    }

    /// Would there be, with so many bytes less there?
    pub fn would_have_room_for(&self, bytes: u64, less: u64) -> bool {
        /// One part of this of a tier stays free for its own programs, if it has some.
        const FREE: u64 = 4;
        let is_storage = self.base.config.pool.as_ref().is_some_and(|pool| pool.role == Role::Storage);
        self.base.tiers.devices().filter(|device| device.is_there()).any(|device| {
            let view = device.view();
            let kept = if is_storage { 0 } else { view.cap_bytes / FREE };
            view.used_bytes.saturating_sub(less).saturating_add(bytes) <= view.cap_bytes - kept
        })
    }
}

fn above(tree: &Tree, directory: FileId) -> Vec<Above> {
    let mut found = Vec::new();
    let mut at = directory;
    while let Some(inode) = tree.get(at).filter(|inode| at != FileId::ROOT && inode.applied.is_none()) {
        let attr = &inode.attr;
        found.push(Above { number: at.0, perm: attr.perm, owner: (attr.uid, attr.gid) });
        let Some((parent, _)) = inode.logical.as_ref() else { break };
        at = *parent;
    }
    found
}
