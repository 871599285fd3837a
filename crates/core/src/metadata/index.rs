//! The index publisher: it writes to the index in shared memory what the shim may know about files without a request.
//!
//! Invariants:
//! - It publishes under the tree's lock, in the catalog's order. A reader of the index sees what a request would have
//!   answered.
//! - It publishes only files that the agent owns, because other clients may change all others at any time.
//!
//! The danger that this avoids: a process acts on an entry that no longer matches the answer to a request.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use surgetank_state::{Entry, Inode, Name, Stray, Tree};
use surgetank_types::model::{Attr, DeviceId, FileId, Kind};
use surgetank_types::sync::atomic::Ordering;

use crate::base::intake_file::IntakeFile;
use crate::metadata::{Metadata, shown};

/// One file, as the shim may show it.
#[derive(Debug, Clone, Copy)]
pub struct IndexEntry {
    /// Id of the file.
    pub id: FileId,
    /// Attributes, as a program sees them.
    pub attr: Attr,
    /// The attributes are correct; otherwise the shim asks the mount. (So it does where a write removes set-user-id.)
    pub known: bool,
    /// Size, blocks and times come from the plain file, which a process writes directly.
    pub live: bool,
    /// Permissions and access time also come from the plain file: until the first version, processes change them there.
    pub fresh: bool,
    /// The plain file, of which processes may hold descriptors.
    pub plain: Option<(DeviceId, u64)>,
    /// Processes may open the plain file for reading, under the path of the first name.
    pub readable: bool,
    /// A delegated directory: processes may create plain files in it, on this device.
    pub delegated: Option<DeviceId>,
    /// A directory of the agent: names that the index does not have do not exist.
    pub complete: bool,
    /// The agent's user may look names up in the directory.
    pub searchable: bool,
    /// A directory's parent.
    pub parent: FileId,
}

/// The shim's side.
pub trait Shim: Send + Sync {
    /// Publishes the present state of a file. `name`: a directory's own name.
    fn show(&self, entry: &IndexEntry, name: &[u8]);
    /// Removes a file from the index; the shim then asks the mount.
    fn hide(&self, id: FileId);
    /// The shim must not use the file's entry for a moment; `show` or `hide` follows.
    fn conceal(&self, id: FileId);
    /// Publishes which file a name in a directory means; `None`: the name does not exist.
    fn name(&self, dir: FileId, name: &[u8], id: Option<FileId>);
    /// A directory is about to move on the tiers, or has moved: paths of directories that the shim's door looked up are void.
    fn directories_move(&self);
    /// From now on, a close of a writable descriptor of the file calls `Descriptors::grant_closed`.
    fn watch(&self, id: FileId, file: BorrowedFd<'_>) -> std::io::Result<()>;
    /// The same for a file that was just created, at less cost. The file has to stay in this directory under this name.
    /// A caller that moves it has it watched by itself first.
    fn watch_in(&self, dir: &Path, name: &[u8], id: FileId) -> std::io::Result<()>;
    /// Does the intake have entries that [`Self::take_intake`] may return, or that are under way?
    fn intake_waits(&self) -> bool;
    /// Some of the files that processes created. The caller gives them back once the index shows them.
    fn take_intake(&self) -> Vec<IntakeFile>;
    /// Gives the slots back. `numbers`: for the next files.
    fn give_back(&self, numbers: &mut dyn FnMut() -> u64);
    /// Strays of the entries that were revoked since the last call.
    fn take_strays(&self) -> Vec<Stray>;
    /// Returns when a process can no longer create a file through an earlier look-up.
    fn stop_intake(&self);
    /// Limits the number of files that processes create before the agent takes them in.
    fn limit_intake(&self, files_max: u64);
    /// From now on the kernel reports closes in this directory, as long as it is delegated.
    fn watch_delegated(&self, dir: &Path) -> std::io::Result<i32>;
    /// Ends the reports that [`Self::watch_delegated`] began.
    fn no_longer_delegated(&self, watch: i32);
    /// A process created a file there. `false`: the kernel does not report its close.
    fn made_in(&self, watch: i32, name: &[u8], id: FileId) -> bool;
    /// Calls `Descriptors::grant_closed` for all files that processes have closed until now.
    fn catch_up(&self);
    /// Returns when the agent has closed its own copies of all descriptors that it granted until now.
    fn await_grants(&self);
}

impl Metadata {
    /// The file of the agent that the name means, if processes with the shim may ask about it. (For a copy they ask the
    /// store.)
    pub fn file_named(&self, dir: FileId, name: &[u8]) -> Option<FileId> {
        let tree = self.read_tree();
        let id = tree.entry(dir, &Name::from(name)).and_then(Entry::logical)?;
        let is_one = |inode: &&Inode| inode.owned && !inode.is_copy() && inode.home().is_none();
        tree.get(id).filter(is_one).filter(|inode| inode.attr.kind == Kind::File).map(|_| id)
    }

    /// A process is about to list the directory. May the listing omit the files' attributes, because processes with the
    /// shim see them all in the index?
    pub fn lists_bare(&self, dir: FileId, has_shim: bool) -> bool {
        let mut tree = self.write_tree();
        let Some(d) = tree.dir_mut(dir) else { return false };
        d.listed_bare = has_shim && d.complete && self.shim.get().is_some();
        d.listed_bare
    }

    /// Opens the shim's door: the index gets all files.
    pub fn set_shim(&self, shim: surgetank_types::sync::Arc<dyn Shim>) {
        let tree = self.read_tree();
        if self.shim.set(shim).is_err() {
            return;
        }
        for (id, _) in tree.iter() {
            self.show(&tree, id);
        }
        if let Some(shim) = self.shim.get() {
            // Granted by an earlier agent.
            for open in self.opens().values().filter(|open| open.granted.load(Ordering::Relaxed)) {
                if let Err(why) = shim.watch(open.id, open.content().file.as_fd()) {
                    tracing::warn!(%why, "a plain file cannot be watched; it is looked at now and then");
                }
            }
            for (dir, inode) in tree.iter().filter(|(_, inode)| inode.owned) {
                for (name, entry) in inode.dir.iter().flat_map(|dir| &dir.children) {
                    if entry.logical().is_some() {
                        shim.name(dir, name, entry.logical());
                    }
                }
            }
        }
    }

    pub(crate) fn show(&self, tree: &Tree, id: FileId) {
        let Some(shim) = self.shim.get() else { return };
        match tree.get(id) {
            Some(inode) if inode.owned && (inode.logical.is_some() || self.is_held(id, inode)) => {
                let (parent, name): (FileId, &[u8]) = match &inode.logical {
                    Some((parent, name)) if inode.is_dir() => (*parent, name),
                    _ => (FileId::ROOT, b""),
                };
                let delegated = tree.delegations.device(id);
                let entry = IndexEntry { delegated, ..self.index_entry(id, inode, parent) };
                let entry = shown::while_written(self, tree, (id, inode), entry);
                match shown::in_pool(self, tree, (id, inode), entry) {
                    Some(entry) => shim.show(&entry, name),
                    None => shim.hide(id),
                }
            }
            _ => shim.hide(id),
        }
    }

    /// Does anything still hold the file when it has no name? That is a process, or writers of the plain file, whose
    /// closes are reported late. Until then the plain file has a name on its tier, and its readers must see that the
    /// file has none.
    fn is_held(&self, id: FileId, inode: &Inode) -> bool {
        inode.handles > 0 || id == FileId::ROOT || self.opens().contains_key(&id)
    }

    /// Publishes the changes of a transaction. New names come before old ones go, so that a renamed file never disappears.
    pub(crate) fn show_all(&self, tree: &Tree, files: &[FileId], entries: &[(FileId, surgetank_state::Name)]) {
        let Some(shim) = self.shim.get() else { return };
        for id in files {
            self.show(tree, *id);
        }
        let mut dirs: Vec<FileId> = Vec::new();
        for bound in [true, false] {
            for (dir, name) in entries {
                let id = tree.entry(*dir, name).and_then(surgetank_state::Entry::logical);
                if id.is_some() == bound {
                    shim.name(*dir, name, id);
                }
                if !dirs.contains(dir) {
                    dirs.push(*dir);
                }
            }
        }
        // The directories' times changed too.
        for dir in dirs {
            self.show(tree, dir);
        }
    }

    fn index_entry(&self, id: FileId, inode: &Inode, parent: FileId) -> IndexEntry {
        let open = (!inode.sealed).then(|| self.opens().get(&id).cloned()).flatten();
        let direct = open.as_ref().is_some_and(|open| open.direct);
        let watched = open.as_ref().is_some_and(|open| open.is_watched());
        let granted = open.is_some_and(|open| open.granted.load(surgetank_types::sync::atomic::Ordering::Relaxed));
        let file = inode.attr.kind == Kind::File;
        let ours = |want| !self.permissions.checks_permissions || self.may(&inode.attr, want);
        // A process may have opened the plain file before the file became mediated. Its entry stays, too.
        let has_bytes = inode.home().is_none();
        let plain = inode.replica.filter(|_| has_bytes).map(|plain| (plain.device, plain.ino)).filter(|_| file);
        // Other clients may change a copy's file in the store. So each open asks the store, unless the copy was prefetched.
        let looked_at = inode.is_copy() && !inode.prefetched;
        let steady = plain.is_some() && (inode.sealed || direct) && !looked_at;
        IndexEntry {
            id,
            attr: inode.attr,
            known: (!file || inode.sealed && !looked_at || steady) && !watched,
            live: file && !inode.sealed,
            fresh: granted && inode.is_fresh(),
            plain,
            readable: self.config.direct && steady && inode.logical.is_some() && ours(4),
            delegated: None,
            complete: inode.dir.as_ref().is_some_and(|dir| dir.complete),
            searchable: inode.is_dir() && ours(1),
            parent,
        }
    }

    /// May the agent's own user do this?
    fn may(&self, attr: &Attr, want: u32) -> bool {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let caller = surgetank_types::model::Caller { uid, gid, pid: 0, umask: 0 };
        self.permissions.permit(&caller, attr, want).is_ok()
    }
}
