//! The content of closed files goes to the member on which their group is (collocation; WOSS, section 3.2).
//!
//! A file is made where its program runs, so its writes cost no message. When it is closed, a copy goes to the member of its
//! group. Then that member becomes its home, in one step.
//!
//! The dangers that this avoids:
//! - A program has the content open where it was. So only a file that no program has open moves.
//! - A program has synced the content, and the other member's tier does not survive the end of its machine. So such a version
//!   moves after the store has it.
//! - The content leaves before the other member has it. So the plain file keeps its bytes until the record of the move is
//!   written down, and while the drain reads them.

use std::fs::File;
use std::io;

use rustix::fs::{FallocateFlags, Timespec, Timestamps, fallocate, fstat, futimens};
use surgetank_state::{Inode, PlainId, Progress, Tree};
use surgetank_types::model::{FileId, NodeId};

use crate::namespace::replicas::{Replicas, Sealed, Which};

impl Replicas {
    /// A file that belongs to the member of its group. `None`: it stays where it is, for now. (Over a store without plain files each
    /// file has its content with its name.)
    pub fn placed(&self, id: FileId) -> Option<Sealed> {
        if !self.base.store.features().plain_files {
            return None;
        }
        let tree = self.files.metadata.read_tree();
        let has_one_name = tree.get(id).is_some_and(|inode| inode.attr.links == 1);
        let sealed = has_one_name.then(|| self.state_in(&tree, id, Which::OrClean)).flatten();
        sealed.filter(|sealed| sealed.group.is_some() && sealed.moment == 0)
    }

    /// Has no program the file open, and has none synced what only this node has?
    pub fn may_move(&self, id: FileId) -> bool {
        let metadata = &self.files.metadata;
        let tree = metadata.read_tree();
        let Some(inode) = tree.get(id).filter(|inode| !is_promised(inode)) else { return false };
        if metadata.opens().contains_key(&id) {
            return false;
        }
        let Some(PlainId { device, .. }) = inode.replica.filter(|_| inode.home().is_none()) else { return true };
        // (A process with the shim, or the drain.)
        let is_read = self.files.eviction.has_readers(&tree, id, device, tree.logical_path(id).as_deref());
        metadata.show(&tree, id);
        !is_read
    }

    /// Files whose content is elsewhere, and whose plain file still has bytes here.
    pub fn to_be_emptied(&self) -> Vec<FileId> {
        let tree = self.files.metadata.read_tree();
        let is_one = |inode: &Inode| inode.home().is_some() && inode.charged_bytes > 0 && inode.sealed;
        tree.iter().filter(|(_, inode)| is_one(inode)).map(|(id, _)| id).collect()
    }

    /// Has no program the file open?
    pub fn is_closed(&self, id: FileId) -> bool {
        self.files.metadata.open_of(id).is_none()
    }

    /// Has a program synced content that is here for another member's file?
    pub fn is_content_promised(&self, content: FileId) -> bool {
        self.files.metadata.read_tree().get(content).is_some_and(Inode::is_promised)
    }

    /// That member has the content of this version now, and becomes its home. Returns whether it did.
    pub fn moves_to(&self, id: FileId, then: &Sealed, member: u32) -> io::Result<bool> {
        let Ok(home) = u16::try_from(member) else { return Ok(false) };
        let metadata = &self.files.metadata;
        let inode_lock = metadata.lock_inode(id);
        let mut tree = metadata.write_tree();
        let is_same =
            |now: Sealed| (now.version, now.moment, now.home, &now.path) == (then.version, 0, then.home, &then.path);
        if !self.now_in(&tree, id, then).is_some_and(is_same) || metadata.opens().contains_key(&id) {
            return Ok(false);
        }
        let path = tree.logical_path(id);
        let Some(PlainId { device, .. }) = tree.get(id).and_then(|inode| inode.replica) else { return Ok(false) };
        // (A process with the shim, or the drain.)
        if then.home.is_none() && self.files.eviction.has_readers(&tree, id, device, path.as_deref()) {
            return Ok(false);
        }
        let Some(inode) = tree.get_mut(id).filter(|inode| !is_promised(inode)) else { return Ok(false) };
        inode.extra_mut().home = NodeId(home);
        tree.txn.file(id);
        metadata.commit(&mut tree);
        metadata.show(&tree, id);
        drop(tree);
        drop(inode_lock);
        // (The kernel has believed them for a while longer than those of content elsewhere.)
        self.files.sealer.forget_attributes_for_sure(id);
        metadata.wake();
        Ok(true)
    }

    /// The plain file of content that is elsewhere needs no bytes, when no other member believes that they are here. Returns `false` if
    /// the drain may still read them.
    pub fn empty(&self, id: FileId) -> io::Result<bool> {
        let metadata = &self.files.metadata;
        let _inode = metadata.lock_inode(id);
        if metadata.opens().contains_key(&id) {
            return Ok(false);
        }
        let is_staged = |tree: &Tree, inode: &Inode| {
            let op = inode.publish.and_then(|seq| tree.ops.get(&seq));
            op.is_some_and(|op| !matches!(op.progress, Progress::Waiting))
        };
        let (file, device) = {
            // (A path on a tier means one thing while the tree is locked. What the drain begins after this it reads at the home.)
            let tree = metadata.read_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.home().is_some()) else { return Ok(true) };
            if is_staged(&tree, inode) {
                return Ok(false);
            }
            let place = inode.replica.zip(tree.logical_path(id));
            let Some((PlainId { device, ino, .. }, path)) = place else { return Ok(true) };
            let device = self.base.tiers.device(device);
            // (Without leases it is not known who reads it.)
            if !device.leases() {
                return Ok(true);
            }
            let file = device.open(&path, true)?;
            if fstat(&file)?.st_ino != ino {
                return Ok(false);
            }
            (file, device)
        };
        let before = punch(&file)?;
        let blocks = u64::try_from(fstat(&file)?.st_blocks).unwrap_or(0);
        let mut tree = metadata.write_tree();
        if let Some(inode) = tree.get_mut(id) {
            device.add_used((blocks * 512) as i64 - inode.charged_bytes as i64);
            inode.charged_bytes = blocks * 512;
            tree.recount(id);
            tree.txn.file(id);
            metadata.commit(&mut tree);
        }
        tracing::debug!(id = id.0, bytes = before, "content moved to another member");
        Ok(true)
    }
}

/// The other member's tier may not survive what this one does.
fn is_promised(inode: &Inode) -> bool {
    inode.dirty() && inode.is_promised()
}

/// Takes the bytes out of a file. It keeps its length and its times. Returns the length.
fn punch(file: &File) -> io::Result<u64> {
    let before = fstat(file)?;
    let length = u64::try_from(before.st_size).unwrap_or(0);
    if length > 0 {
        fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, length)?;
    }
    let time = |secs, nanos: u64| Timespec { tv_sec: secs, tv_nsec: i64::try_from(nanos).unwrap_or(0) };
    let last_access = time(before.st_atime, before.st_atime_nsec);
    futimens(file, &Timestamps { last_access, last_modification: time(before.st_mtime, before.st_mtime_nsec) })?;
    Ok(length)
}
