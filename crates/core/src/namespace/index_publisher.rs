//! What is shown of files to programs that do not ask (the index in shared memory that the shim reads).
//!
//! Told under the tree's lock, in the catalog's order: whoever looks sees what a request would have answered. Only what is
//! ours is shown; of the rest others may change anything.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use surgetank_types::sync::atomic::Ordering;

use surgetank_types::model::{Attr, DeviceId, FileId, Kind};

use super::{Claimed, Namespace};
use surgetank_state::Stray;
use surgetank_state::{Entry, Inode, Name, Tree};

/// One file as it may be believed.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    pub id: FileId,
    pub attr: Attr,
    /// The attributes are right; otherwise the mount has to be asked. (So it is where a write takes set-user-id away.)
    pub known: bool,
    /// Size, blocks and times are the plain file's, which is being written directly.
    pub live: bool,
    /// Permissions and access time are the plain file's too: until its first version programs change them there.
    pub fresh: bool,
    /// The plain file, to which descriptors may have been given.
    pub plain: Option<(DeviceId, u64)>,
    /// The plain file may be opened for reading under the first name's path.
    pub readable: bool,
    /// A directory in which programs may make plain files themselves, on this device.
    pub lent: Option<DeviceId>,
    /// A directory of ours: names that are not shown do not exist.
    pub complete: bool,
    /// The agent's user may look names up in the directory.
    pub searchable: bool,
    /// A directory's parent.
    pub parent: FileId,
}

/// The shim's side.
pub trait Shim: Send + Sync {
    /// What is true of a file now; `name`: a directory's own.
    fn show(&self, shown: &Shown, name: &[u8]);
    fn hide(&self, id: FileId);
    /// For a moment nothing is to be believed of the file; it is shown again, or hidden.
    fn conceal(&self, id: FileId);
    /// Whom the name in a directory means; `None`: nobody.
    fn name(&self, dir: FileId, name: &[u8], id: Option<FileId>);
    /// A directory is about to be moved on the tiers, or has been: what was found out before of where one lies is void.
    fn directories_move(&self);
    /// From now on `Namespace::handed_closed` is to be called when a descriptor of the file that can write is closed.
    fn watch(&self, id: FileId, file: BorrowedFd<'_>) -> std::io::Result<()>;
    /// The same of a file that was just made, which costs less: it lies in this directory, under this name, as long as nobody
    /// takes it elsewhere without having it watched itself before.
    fn watch_in(&self, dir: &Path, name: &[u8], id: FileId) -> std::io::Result<()>;
    /// Is something told of that [`Self::take_claims`] may return, or on its way?
    fn claims_wait(&self) -> bool;
    /// Files that programs made, some of them; given back when they are shown.
    fn take_claims(&self) -> Vec<Claimed>;
    /// `numbers`: for the next files.
    fn give_back(&self, numbers: &mut dyn FnMut() -> u64);
    /// Whose claims were revoked since this was asked last.
    fn take_strays(&self) -> Vec<Stray>;
    /// What was looked up until now makes no file any more when this returns.
    fn stop_claims(&self);
    /// No more than so many files are made before we know of them.
    fn limit_claims(&self, claims: u64);
    /// The kernel tells of closes in this directory from now on, as long as it is lent.
    fn watch_delegated(&self, dir: &Path) -> std::io::Result<i32>;
    fn no_longer_delegated(&self, watch: i32);
    /// A file was made there. `false`: the kernel does not tell of it.
    fn made_in(&self, watch: i32, name: &[u8], id: FileId) -> bool;
    /// Calls it for all that have been closed until now.
    fn catch_up(&self);
    /// Returns when no descriptor that was given until now is still ours as well.
    fn await_given(&self);
}

impl Namespace {
    /// The file of our own that the name is, which programs with the shim may ask about. (Of what is a copy the store is asked.)
    pub fn file_named(&self, dir: FileId, name: &[u8]) -> Option<FileId> {
        let tree = self.read_tree();
        let id = tree.entry(dir, &Name::from(name)).and_then(Entry::logical)?;
        tree.get(id).filter(|inode| inode.owned && !inode.is_copy() && inode.attr.kind == Kind::File).map(|_| id)
    }

    /// The directory is about to be listed. May that be without its files' attributes, as programs with the shim see them all?
    pub fn lists_bare(&self, dir: FileId, has_shim: bool) -> bool {
        let mut tree = self.write_tree();
        let Some(d) = tree.dir_mut(dir) else { return false };
        d.listed_bare = has_shim && d.complete && self.shim.get().is_some();
        d.listed_bare
    }

    /// The shim's door is open from now on: everything is shown to it.
    pub fn set_shim(&self, shim: surgetank_types::sync::Arc<dyn Shim>) {
        let tree = self.read_tree();
        if self.shim.set(shim).is_err() {
            return;
        }
        for (id, _) in tree.iter() {
            self.show(&tree, id);
        }
        if let Some(shim) = self.shim.get() {
            // Given by an earlier agent.
            for open in self.opens().values().filter(|open| open.handed.load(Ordering::Relaxed)) {
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
                let lent = tree.delegations.device(id);
                shim.show(&Shown { lent, ..self.shown(id, inode, parent) }, name);
            }
            _ => shim.hide(id),
        }
    }

    /// Without a name it is somebody's still: a program's, or that of the plain file's writers, of whom we hear late. Until
    /// then the plain file has a name on its tier, and who reads it is to be told that the file has none.
    fn is_held(&self, id: FileId, inode: &Inode) -> bool {
        inode.handles > 0 || id == FileId::ROOT || self.opens().contains_key(&id)
    }

    /// What a transaction changed is shown. New names come before old ones go: a file that is renamed is never gone.
    pub(super) fn show_all(&self, tree: &Tree, files: &[FileId], entries: &[(FileId, surgetank_state::Name)]) {
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
        // Their times changed too.
        for dir in dirs {
            self.show(tree, dir);
        }
    }

    fn shown(&self, id: FileId, inode: &Inode, parent: FileId) -> Shown {
        let open = (!inode.sealed).then(|| self.opens().get(&id).cloned()).flatten();
        let direct = open.as_ref().is_some_and(|open| open.direct);
        let watched = open.as_ref().is_some_and(|open| open.is_watched());
        let handed = open.is_some_and(|open| open.handed.load(surgetank_types::sync::atomic::Ordering::Relaxed));
        let file = inode.attr.kind == Kind::File;
        let ours = |want| !self.checks_permissions || self.may(&inode.attr, want);
        // Who has had it open for reading since before it was mediated is told about the file, too.
        let plain = inode.replica.map(|plain| (plain.device, plain.ino)).filter(|_| file);
        // What others may change in the store is looked at again by who opens it, unless it was asked for in advance.
        let looked_at = inode.is_copy() && !inode.prefetched;
        let steady = plain.is_some() && (inode.sealed || direct) && !looked_at;
        Shown {
            id,
            attr: inode.attr,
            known: (!file || inode.sealed && !looked_at || steady) && !watched,
            live: file && !inode.sealed,
            fresh: handed && inode.is_fresh(),
            plain,
            readable: self.config.direct && steady && inode.logical.is_some() && ours(4),
            lent: None,
            complete: inode.dir.as_ref().is_some_and(|dir| dir.complete),
            searchable: inode.is_dir() && ours(1),
            parent,
        }
    }

    /// May the agent's own user do this?
    fn may(&self, attr: &Attr, want: u32) -> bool {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let caller = surgetank_types::model::Caller { uid, gid, pid: 0, umask: 0 };
        self.permit(&caller, attr, want).is_ok()
    }
}
