//! Files of a pool of which other members are to have copies until the store has them.
//!
//! The owner of a name decides about its copies. This module says which files need some, and what they are at one moment: a
//! copy is of one sealed version under one path.
//!
//! The danger that this avoids: a copy of what a file was before. So a copy counts only after [`Replicas::is_still`] has
//! found the file as it was when its content was read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::time::Duration;

use rustix::fs::{Timespec, Timestamps, fstat, futimens};
use surgetank_policy::config::Survives;
use surgetank_state::{Inode, PlainId, Tree};
use surgetank_types::ladder;
use surgetank_types::model::{FileId, FsyncTarget, Kind, NodeId, OpKind, Role, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::users::is_drained;
use crate::files::Files;
use crate::metadata::closed;

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
    base: Base,
    files: Arc<Files>,
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
        self.sealed_in(&self.files.metadata.read_tree(), id)
    }

    fn sealed_in(&self, tree: &Tree, id: FileId) -> Option<Sealed> {
        let inode = tree.get(id).filter(|inode| inode.attr.kind == Kind::File && inode.sealed && inode.dirty())?;
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
            version: inode.version,
            epoch: inode.epoch,
            path,
            size_bytes: attr.size_bytes,
            perm: attr.perm,
            owner: (attr.uid, attr.gid),
            times: (attr.atime, attr.mtime),
            home: inode.home().map(|home| u32::from(home.0)),
            directory,
            above: above(tree, directory),
            wanted: decision.replicas.unwrap_or(self.base.config.replicas),
        })
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

    /// Is the file as it was then? From now on the shim does not write it without a request.
    pub fn is_still(&self, id: FileId, then: &Sealed) -> bool {
        let _inode = self.files.metadata.lock_inode(id);
        let tree = self.files.metadata.read_tree();
        let now = self.sealed_in(&tree, id);
        // (What else has changed the holders learn at the next look.)
        let of = |sealed: &Sealed| (sealed.version, sealed.epoch, sealed.path.clone(), sealed.perm, sealed.owner);
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

    /// The member that has the content is lost: a copy of this version, which is here, takes its place. Returns whether it did.
    pub fn comes_home(&self, id: FileId, version: u32, copy: &File) -> io::Result<bool> {
        let metadata = &self.files.metadata;
        let _inode = metadata.lock_inode(id);
        let opened = {
            let tree = metadata.read_tree();
            let is_one = |inode: &&Inode| inode.home().is_some() && inode.sealed && inode.version == version;
            let plain = tree.get(id).filter(is_one).and_then(|inode| Some((inode.replica?.device, inode.attr)));
            let place = plain.zip(tree.logical_path(id));
            let Some(((device, attr), path)) = place else { return Ok(false) };
            let device = self.base.tiers.device(device);
            (device.open(&path, true)?, device, attr)
        };
        let (file, device, attr) = opened;
        ladder::copy_file(copy, &file, attr.size_bytes, &|_| Ok(()))?;
        file.set_len(attr.size_bytes)?;
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
        (inode.charged_bytes, inode.attr.blocks) = (blocks * 512, blocks);
        inode.extra_mut().home = NodeId::default();
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
        /// One part of this of a tier stays free for its own programs, if it has some.
        const FREE: u64 = 4;
        let is_storage = self.base.config.pool.as_ref().is_some_and(|pool| pool.role == Role::Storage);
        self.base.tiers.devices().filter(|device| device.is_there()).any(|device| {
            let view = device.view();
            let kept = if is_storage { 0 } else { view.cap_bytes / FREE };
            view.used_bytes.saturating_add(bytes) <= view.cap_bytes - kept
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
