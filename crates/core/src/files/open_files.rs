//! Open files: their handles by number, what the kernel has registered of them, and attributes from their plain files.
//!
//! The danger that this avoids: times and sizes that a process wrote directly are older than what it saw.

use std::os::fd::AsFd;

use foldhash::HashMap;

use surgetank_state::{Inode, Tree};
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{Attr, FileId, Timestamp};
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::base::queries::StoreQueries;
use crate::base::succession::Succession;
use crate::base::{Base, Door};
use crate::content::{Content, Handle, Location, Open};
use crate::handoff::Record;
use crate::metadata::Metadata;
use crate::metadata::transactions::WriteTree;

/// Set-user-id and set-group-id.
pub(crate) const SET_IDS: u32 = 0o6000;

/// The attributes of a file whose plain file was written. The plain file's permissions are the file's, with the owner's
/// right to read and write. Until the file has a version, processes with the shim change permissions and access time on
/// the plain file.
pub(crate) fn as_written(inode: &Inode, stat: &rustix::fs::Stat, open: Option<&Open>) -> Attr {
    let mut attr = inode.attr;
    attr.size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
    // (Where another member has the content, the plain file here is empty.)
    let is_elsewhere = inode.home().is_some();
    attr.blocks = if is_elsewhere { attr.size_bytes.div_ceil(512) } else { u64::try_from(stat.st_blocks).unwrap_or(0) };
    attr.mtime = Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32);
    attr.ctime = attr.ctime.max(Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32));
    let atime = Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32);
    attr.atime = if inode.is_fresh() { atime } else { attr.atime.max(atime) };
    let perm = stat.st_mode & 0o777;
    if inode.is_fresh() && perm != attr.perm & 0o777 | 0o600 {
        // The owner may always read and write a plain file: whether the file's owner may, only the record says.
        let owner = if perm & 0o600 == 0o600 { attr.perm & 0o600 | perm & 0o177 } else { perm };
        attr.perm = attr.perm & 0o7000 | owner;
    }
    if open.is_some_and(|open| open.is_written_by_others(stat)) {
        attr.perm &= !SET_IDS;
    }
    attr
}

/// The open files: their handles, what the kernel has of them, and the attributes of their plain files.
pub struct OpenFiles {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    queries: Arc<StoreQueries>,
    succession: Arc<Succession>,
    metadata: Arc<Metadata>,
    pub(crate) handles: RwLock<HashMap<u64, Arc<Handle>>>,
    pub(crate) next_handle: AtomicU64,
}

impl OpenFiles {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self {
            door: base.door.clone(),
            queries: base.queries.clone(),
            succession: base.succession.clone(),
            metadata: metadata.clone(),
            handles: RwLock::default(),
            next_handle: AtomicU64::new(1),
        }
    }

    /// The caller holds the tree's lock, so the wait for a hanging store has a time limit.
    pub(crate) fn plain_stat(&self, open: &Open) -> Option<rustix::fs::Stat> {
        match open.content() {
            Content { file, location: Location::Tier(_), .. } => rustix::fs::fstat(&*file).ok(),
            Content { file, .. } => self.queries.would_stat(file),
        }
    }

    /// A write through a granted descriptor clears the bits from here on, and no door sees it.
    pub(crate) fn watch_set_ids(&self, tree: &Tree, open: &Open) {
        let has_any = tree.get(open.id).is_some_and(|inode| inode.attr.perm & SET_IDS != 0);
        let watched = has_any && open.granted.load(Ordering::Relaxed);
        open.watch_writes_of_others(watched.then(|| self.plain_stat(open)).flatten().as_ref());
    }

    /// The attributes that programs see. The caller holds the tree's lock.
    pub(crate) fn attr_of(&self, id: FileId, inode: &Inode) -> Attr {
        if !inode.sealed {
            let open = self.metadata.opens().get(&id).cloned();
            if let Some(stat) = open.as_ref().and_then(|open| self.plain_stat(open)) {
                return as_written(inode, &stat, open.as_deref());
            }
        }
        inode.attr
    }

    /// The plain file's attributes, to be recorded in the tree. A process that sets times or mode by name changes the
    /// tree and the plain file under the tree's lock. A look before that, with a record after it, would lose the
    /// change.
    pub(crate) fn look_and_lock(
        &self,
        id: FileId,
        file: &std::fs::File,
    ) -> FsResult<(WriteTree<'_>, rustix::fs::Stat)> {
        loop {
            let before = self.metadata.read_tree().get(id).map(|inode| inode.attr);
            let stat = rustix::fs::fstat(file)?;
            crash_point!("seal.looked");
            let tree = self.metadata.write_tree();
            if tree.get(id).map(|inode| inode.attr) == before {
                return Ok((tree, stat));
            }
        }
    }

    /// Registers a plain file with the kernel, where that is possible.
    pub(crate) fn back(&self, id: FileId, content: &Content) -> Option<u32> {
        let door = self.door.get().filter(|door| door.passes_through())?;
        let backing = door.back(content.file.as_fd()).ok()?;
        self.succession.hand_off(&Record::Backed { id, backing });
        Some(backing)
    }

    /// The kernel no longer needs the plain file.
    pub(crate) fn unback(&self, open: &Open) {
        if let (Some(backing), Some(door)) = (open.take_backing(), self.door.get()) {
            self.succession.hand_off(&Record::Unbacked { id: open.id });
            door.unback(backing);
        }
    }

    pub(crate) fn handle(&self, fh: u64) -> FsResult<Arc<Handle>> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        let lost = || if self.succession.is_lost_handle(fh) { Errno::STALE } else { Errno::BADF };
        handles.get(&fh).cloned().ok_or_else(|| Fault::from(lost()))
    }

    pub(crate) fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }
}
