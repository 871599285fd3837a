//! Files of a pool whose name and whose content are at different members.
//!
//! The member that owns the directory has the name, and all attributes. It keeps an empty plain file of the right length, so that
//! everything but the bytes is as for any file. The member whose program made the file is its home: it has the content, in a
//! directory that programs do not see, under the number that the file has at the other member.
//!
//! The danger that this avoids: the empty plain file is taken for the content. Code that reads the content asks
//! [`Inode::home`](surgetank_state::Inode::home) first.

use surgetank_state::{Inode, Name, OWN_INODE_BASE, is_for_another};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, FileId, FsyncTarget, HOMES, Kind, NodeId, Timestamp};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::users::is_drained;
use crate::content::{Location, reopen_writable};
use crate::files::Files;
use crate::handoff::Record;
use crate::metadata::{FILES_OF_A_MEMBER, Metadata};

/// The reason of an eviction, for the log.
const HOME_ENDS: &str = "its content left the member that had it, after the store had it";

/// Content that is at another member than its name.
pub struct Homes {
    base: Base,
    files: Arc<Files>,
}

impl Homes {
    pub(crate) fn new(base: &Base, files: &Arc<Files>) -> Self {
        Self { base: base.clone(), files: files.clone() }
    }

    // At the member that has the name.

    /// The member that has the content of a file; `None`: this one, or the store.
    pub fn home_of(&self, id: FileId) -> Option<u32> {
        let tree = self.files.metadata.read_tree();
        tree.get(id).and_then(Inode::home).map(|home| u32::from(home.0))
    }

    /// May a program write it?
    pub fn is_written(&self, id: FileId) -> bool {
        self.files.metadata.read_tree().get(id).is_some_and(|inode| !inode.sealed)
    }

    /// A program of that member has just made the file: its content will be there. Returns whether it will; not so if the file
    /// is not new, or a store without plain files is to get it.
    pub fn set_home(&self, id: FileId, member: u32) -> bool {
        let Ok(member) = u16::try_from(member) else { return false };
        if !self.base.store.features().plain_files || self.is_synced_to_store(id) {
            return false;
        }
        let _inode = self.files.metadata.lock_inode(id);
        // (A program here may have opened it meanwhile.)
        if !self.files.metadata.open_of(id).is_some_and(|open| open.is_untouched()) {
            return false;
        }
        let mut tree = self.files.metadata.write_tree();
        // (What is not drained would keep the other member from leaving.)
        let path = tree.logical_path(id);
        if !path.is_some_and(|path| is_drained(self.files.metadata.mode_for(&tree, id, &path))) {
            return false;
        }
        let Some(inode) = tree.get_mut(id) else { return false };
        let is_new = inode.version == 0 && !inode.sealed && inode.handles == 1 && inode.applied.is_none();
        let is_empty = inode.is_fresh() && inode.spill().is_none() && inode.publish.is_none();
        if !is_new || !is_empty {
            return false;
        }
        inode.extra_mut().home = NodeId(member);
        tree.txn.file(id);
        self.files.metadata.commit(&mut tree);
        true
    }

    /// Does fsync wait for the store? Each one would begin here, and end here.
    fn is_synced_to_store(&self, id: FileId) -> bool {
        let path = self.files.metadata.read_tree().logical_path(id);
        let ruled = path.and_then(|path| self.base.rules.decide(&path).fsync);
        ruled.or(self.base.config.fsync) == Some(FsyncTarget::Store)
    }

    /// The length of the content, and when it changed: before the last program that writes it closes it here.
    /// `wrote`: its program may have written.
    pub fn content_is(&self, fh: u64, (size_bytes, mtime): (u64, Timestamp), wrote: bool) -> FsResult<()> {
        let handle = self.files.open_files.handle(fh)?;
        let open = &handle.open;
        let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
        let content = open.content();
        // (The store's own file must not be cut.)
        if self.home_of(open.id).is_none() || !matches!(content.location, Location::Tier(_)) {
            return Err(Errno::STALE.into());
        }
        let file = reopen_writable(&content.file)?;
        let before = rustix::fs::fstat(&file)?;
        let known = Timestamp::from_parts(before.st_mtime, before.st_mtime_nsec as u32);
        let is_known = (u64::try_from(before.st_size).ok(), known) == (Some(size_bytes), mtime);
        if wrote || !is_known {
            drop(open.mark_written());
        }
        if is_known {
            return Ok(());
        }
        file.set_len(size_bytes)?;
        let time = |secs, nanos| rustix::fs::Timespec { tv_sec: secs, tv_nsec: nanos };
        let last_modification = time(mtime.secs(), i64::from(mtime.subsec_nanos()));
        let times = rustix::fs::Timestamps { last_access: time(0, rustix::fs::UTIME_OMIT), last_modification };
        rustix::fs::futimens(&file, &times)?;
        Ok(())
    }

    /// The blocks of a sealed file whose content is elsewhere.
    pub fn takes_blocks(&self, id: FileId, blocks: u64) {
        let mut tree = self.files.metadata.write_tree();
        let is_one = |inode: &&mut Inode| inode.sealed && inode.home().is_some() && inode.attr.blocks != blocks;
        let Some(inode) = tree.get_mut(id).filter(is_one) else { return };
        inode.attr.blocks = blocks;
        tree.txn.file(id);
    }

    /// Files whose content is elsewhere, and not in the store yet.
    pub fn undrained(&self) -> Vec<FileId> {
        let tree = self.files.metadata.read_tree();
        let is_one = |inode: &Inode| inode.home().is_some() && inode.sealed && inode.dirty();
        tree.iter().filter(|(_, inode)| is_one(inode)).map(|(id, _)| id).collect()
    }

    /// The program that made the file ended before it had made the content: the file is an empty one of this member.
    pub fn never_began(&self, id: FileId) {
        let _inode = self.files.metadata.lock_inode(id);
        let mut tree = self.files.metadata.write_tree();
        // (Another program that has it open may just be making it.)
        let never = |inode: &&mut Inode| inode.version == 0 && inode.attr.size_bytes == 0 && inode.handles <= 1;
        let Some(inode) = tree.get_mut(id).filter(never) else { return };
        inode.extra_mut().home = NodeId::default();
        tree.txn.file(id);
        self.files.metadata.commit(&mut tree);
    }

    /// The home does not have the content any more. Returns whether the store has it.
    pub fn end_home(&self, id: FileId) -> bool {
        let _inode = self.files.metadata.lock_inode(id);
        if self.home_of(id).is_none() {
            return true;
        }
        if !self.is_settled(id) {
            return false;
        }
        self.files.eviction.evict_locked(id, HOME_ENDS, true);
        self.home_of(id).is_none()
    }

    /// Does the store have the content, and no program the file open?
    pub fn is_settled(&self, id: FileId) -> bool {
        let tree = self.files.metadata.read_tree();
        let is_durable = |inode: &Inode| inode.sealed && !inode.dirty() && inode.publish.is_none();
        tree.get(id).is_some_and(|inode| is_durable(inode) && inode.applied.is_some())
            && !self.files.metadata.opens().contains_key(&id)
    }

    /// Has the file no name?
    pub fn is_removed(&self, id: FileId) -> bool {
        self.files.metadata.read_tree().get(id).is_none_or(|inode| inode.logical.is_none())
    }

    /// Is a member's content of no use any more: is there no such file, or is the content in the store alone?
    pub fn is_gone(&self, id: FileId, member: u32) -> bool {
        let tree = self.files.metadata.read_tree();
        let Some(inode) = tree.get(id) else { return true };
        // (The member may have looked it up, and have lost count of that with its agent.)
        if inode.logical.is_none() && inode.handles == 0 {
            return true;
        }
        match inode.home() {
            Some(home) => u32::from(home.0) != member,
            // (A file that has lost its plain file here may have its last copy there.)
            None => inode.sealed && !inode.dirty() && inode.applied.is_some() || inode.replica.is_some(),
        }
    }

    // At the member that has the content.

    /// The directory of contents for other members.
    pub fn directory(&self) -> FileId {
        let mut tree = self.files.metadata.write_tree();
        if let Some(id) = tree.homes {
            return id;
        }
        let id = tree.new_id();
        let now = clock::now();
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let (ino, device) = (OWN_INODE_BASE + id.0, 0);
        // (Only the pool's process finds it, also as the user of a request.)
        let (size_bytes, blocks, perm, links) = (4096, 8, 0o711, 2);
        let kind = Kind::Directory;
        let attr =
            Attr { kind, perm, uid, gid, ino, links, size_bytes, blocks, device, atime: now, mtime: now, ctime: now };
        let mut inode = Inode::new(attr);
        let name = Name::from(HOMES);
        inode.logical = Some((FileId::ROOT, name.clone()));
        // (The kernel may forget it, and it stays.)
        inode.lookups = 1;
        if let Some(dir) = inode.dir.as_mut() {
            dir.complete = true;
        }
        tree.insert(id, inode);
        tree.bind(FileId::ROOT, &name, |entry| entry.set_logical(Some(id)));
        tree.own(id);
        tree.homes = Some(id);
        tree.txn.entry(FileId::ROOT, &name);
        tree.txn.file(id);
        self.files.metadata.commit(&mut tree);
        id
    }

    /// The content for the other member's file of this number.
    pub fn content_for(&self, number: u64) -> Option<FileId> {
        content_for(&self.files.metadata, number)
    }

    /// Is the file such a content?
    pub fn is_content(&self, id: FileId) -> bool {
        is_for_another(&self.files.metadata.read_tree(), id)
    }

    /// The name of the content for the other member's file of this number.
    pub fn name_of(&self, number: u64) -> String {
        name_of(&self.files.metadata, number).unwrap_or_default()
    }

    /// From now on contents are those of this pool, in which this agent is that member.
    pub fn is_in_pool(&self, key: &str, member: u32) {
        // (Set once.)
        let _ = self.files.metadata.pool.set((key.to_owned(), u64::from(member) * FILES_OF_A_MEMBER));
    }

    /// The numbers of all contents, and whether a program has each open.
    pub fn contents(&self) -> Vec<(u64, bool)> {
        let Some((pool, _)) = self.files.metadata.pool.get() else { return Vec::new() };
        let tree = self.files.metadata.read_tree();
        let Some(dir) = tree.homes.and_then(|homes| tree.dir(homes)) else { return Vec::new() };
        let number = |name: &[u8]| {
            let (of, number) = std::str::from_utf8(name).ok()?.split_once('.')?;
            if of == pool { number.parse::<u64>().ok() } else { None }
        };
        let found = dir.children.iter().filter_map(|(name, entry)| {
            let id = entry.logical()?;
            Some((number(name)?, self.files.metadata.opens().contains_key(&id)))
        });
        found.collect()
    }

    /// The file of an open handle.
    pub fn file_of(&self, fh: u64) -> Option<FileId> {
        self.files.open_files.handle(fh).ok().map(|handle| handle.id)
    }

    /// Does the handle's program write?
    pub fn writes(&self, fh: u64) -> bool {
        self.files.open_files.handle(fh).is_ok_and(|handle| handle.writes)
    }

    /// Does a sync on the tier suffice for the content of this open file?
    pub fn syncs_here(&self, fh: u64) -> bool {
        self.files.open_files.handle(fh).is_ok_and(|handle| self.files.syncs.is_synced_by_tier(&handle.open))
    }

    /// The next agent does not open this handle again.
    pub fn ends_with_the_agent(&self, fh: u64) {
        self.base.succession.hand_off(&Record::Closed { fh });
    }

    /// Another number for an open file: that by which the kernel will know it.
    pub fn renumber(&self, fh: u64, number: u64) {
        // (A request that the kernel repeats gets the number that the handle has.)
        if fh == number {
            return;
        }
        let mut handles = self.files.open_files.handles.write().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = handles.remove(&fh) else { return };
        handles.insert(number, handle.clone());
        drop(handles);
        let flags = match (handle.reads, handle.writes) {
            (true, true) => libc::O_RDWR,
            (false, true) => libc::O_WRONLY,
            _ => libc::O_RDONLY,
        };
        let run = surgetank_types::model::RunId(0);
        // (In this order: an agent that comes between them has it twice, and not never.)
        self.base.succession.hand_off_handle(number, &handle.open, handle.writes, flags, run);
        self.base.succession.hand_off(&Record::Closed { fh });
    }
}

/// The content that this member has for another one's file of this number.
pub(crate) fn content_for(metadata: &Metadata, number: u64) -> Option<FileId> {
    let name = name_of(metadata, number)?;
    let tree = metadata.read_tree();
    tree.entry(tree.homes?, name.as_bytes()).and_then(surgetank_state::Entry::logical)
}

/// Its name. `None`: this agent is in no pool. (What an agent that crashed had for another pool is not this one's to decide.)
fn name_of(metadata: &Metadata, number: u64) -> Option<String> {
    Some(format!("{}.{number}", metadata.pool.get()?.0))
}
