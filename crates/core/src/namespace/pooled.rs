//! What the agent of a pool asks about directories: their paths, which ones were made here, and what to forget of one.
//!
//! The danger that this avoids: the agent believes what the store said of a directory before another member changed it.

use std::io;

use surgetank_state::{Inode, Name, NegativeCache, Op, Tree, file_of, places};
use surgetank_store::{Cred, Store, StorePath};
use surgetank_types::model::{Attr, FileId, Kind, STORE_TEMPORARY_PREFIX};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::Base;
use crate::base::fence::Membership;
use crate::base::queries::is_absent;
use crate::files::evict::Eviction;
use crate::files::temporaries::KEPT_IN_STORE;
use crate::files::{Files, SPILL};
use crate::metadata::shown::is_made;
use crate::metadata::{Metadata, shares_a_server};

pub use crate::metadata::FILES_OF_A_MEMBER;

/// A directory, as a member of a pool sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// It was made here, or is below one that was. This agent decides its names.
    Made,
    /// The store has it, at this path.
    OfTheStore(Vec<u8>),
}

/// A name in a directory that is delegated for reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Child {
    /// The name.
    pub name: Box<[u8]>,
    /// The file's number here.
    pub id: FileId,
    /// Its type.
    pub kind: Kind,
    /// The inode number that programs see.
    pub ino: u64,
    /// Its attributes, if only a request of which the pool learns can change them.
    pub attr: Option<Attr>,
}

/// Questions of the pool.
pub struct Pooled {
    metadata: Arc<Metadata>,
    eviction: Arc<Eviction>,
    store: Arc<dyn Store>,
}

impl Pooled {
    pub(crate) fn new(base: &Base, files: &Files) -> Self {
        Self { metadata: files.metadata.clone(), eviction: files.eviction.clone(), store: base.store.clone() }
    }

    /// From now on the numbers of new files are those of this member, which counts from 1.
    pub fn number_files_of(&self, member: u32) {
        let mut tree = self.metadata.write_tree();
        tree.next_id = tree.next_id.max(u64::from(member) * FILES_OF_A_MEMBER);
    }

    /// Where a directory is; `None`: it is not known, or it has no name any more.
    pub fn place_of(&self, dir: FileId) -> Option<Place> {
        let tree = self.metadata.read_tree();
        if is_made(&tree, dir) {
            return Some(Place::Made);
        }
        tree.logical_path(dir).map(Place::OfTheStore)
    }

    /// The type of a file, its directory and its name there. `None`: it is not known, or it has no name any more.
    pub fn name_of(&self, id: FileId) -> Option<(Kind, FileId, Box<[u8]>)> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id)?;
        let (dir, name) = inode.logical.as_ref()?;
        Some((inode.attr.kind, *dir, Box::from(&**name)))
    }

    /// The path of a name in a directory, as programs see it.
    pub fn path_of(&self, dir: FileId, name: &[u8]) -> Option<Vec<u8>> {
        self.metadata.read_tree().child_path(dir, name)
    }

    /// The names of directories that the store has in the one at this path, and that this member has not made. Errors: those
    /// of the store.
    pub fn stored_directories(&self, who: Cred, path: &[u8]) -> io::Result<Vec<Box<[u8]>>> {
        let listed = self.store.list(who, &StorePath(path.to_vec()), false)?;
        let tree = self.metadata.read_tree();
        let dir = at_path(&tree, path);
        let known = |name: &[u8]| tree.entry(dir?, name).and_then(surgetank_state::Entry::logical);
        let is_made = |name: &[u8]| known(name).is_some_and(|id| is_made(&tree, id));
        let stored = listed.into_iter().filter(|one| one.kind == Kind::Directory && !is_made(&one.name));
        Ok(stored.map(|one| one.name).collect())
    }

    /// Does the store's number of this directory, and not this member, say what it is? Then it is adopted before it moves.
    pub fn is_adoptable(&self, dir: FileId) -> bool {
        let tree = self.metadata.read_tree();
        tree.get(dir).is_some_and(|inode| inode.is_dir() && !inode.is_made(dir))
    }

    /// From now on this member decides about the directory, and about all that is below it, whatever its path is. The
    /// catalog has it with the directory's next change.
    pub fn adopt(&self, dir: FileId) {
        if let Some(adopted) = self.metadata.write_tree().dir_mut(dir) {
            adopted.adopted = true;
        }
    }

    /// This agent is a new member: it has no claims for what it adopted as another one.
    pub fn adopts_none(&self) {
        let mut tree = self.metadata.write_tree();
        let adopted: Vec<FileId> = tree.iter().filter(|(_, inode)| inode.is_adopted()).map(|(id, _)| id).collect();
        if adopted.is_empty() {
            return;
        }
        for id in adopted {
            if let Some(dir) = tree.dir_mut(id) {
                dir.adopted = false;
            }
            tree.txn.file(id);
        }
        // (An agent that replaces this one must not find them adopted.)
        self.metadata.commit(&mut tree);
    }

    /// The directories of a file's names beyond the first.
    pub fn other_directories_of(&self, id: FileId) -> Vec<FileId> {
        let tree = self.metadata.read_tree();
        let more = tree.get(id).and_then(|inode| inode.extra.as_ref()).map(|extra| extra.more_names.iter());
        more.map_or_else(Vec::new, |names| names.map(|(dir, _)| *dir).collect())
    }

    /// The file under a name, as far as it is known without the store.
    pub fn child_of(&self, dir: FileId, name: &[u8]) -> Option<FileId> {
        self.metadata.read_tree().entry(dir, name).and_then(surgetank_state::Entry::logical)
    }

    /// The type of a file.
    pub fn kind_of(&self, id: FileId) -> Option<Kind> {
        self.metadata.read_tree().get(id).map(|inode| inode.attr.kind)
    }

    /// The inode number that programs see.
    pub fn ino_of(&self, id: FileId) -> Option<u64> {
        self.metadata.read_tree().get(id).map(|inode| inode.attr.ino)
    }

    /// Does the directory of the store at this path have names, as far as is known?
    pub fn has_names(&self, path: &[u8]) -> bool {
        let tree = self.metadata.read_tree();
        let dir = at_path(&tree, path).and_then(|id| tree.dir(id));
        dir.is_some_and(|dir| dir.children.values().any(|entry| entry.logical().is_some()))
    }

    /// Are all changes of the directory of the store at this path, and of its names, in the store? Otherwise they are due
    /// now. (What was below one of its names comes before the removal of that name.)
    pub fn hurries(&self, path: &[u8]) -> bool {
        let mut tree = self.metadata.write_tree();
        let Some(id) = at_path(&tree, path) else { return true };
        let is_in_it = |op: &Op| file_of(&op.kind) == id || places(&op.kind).iter().any(|(dir, _)| *dir == id);
        let last = tree.ops.iter().rev().find(|(_, op)| is_in_it(op)).map(|(seq, _)| *seq);
        if last.is_some() {
            tree.hurry(last);
            drop(tree);
            self.metadata.wake();
        }
        last.is_none()
    }

    /// The directory at this path is the store's again, or this member's: what the store's driver has kept of a server's
    /// answers may be older than another member's changes.
    pub fn is_given(&self, path: &[u8]) {
        if !self.store.features().plain_files {
            self.store.refresh();
            self.believes_nothing(&mut self.metadata.write_tree(), path);
        }
    }

    /// Another member uses names in the directory: processes make no files in it without a request from now on.
    pub fn is_used_by_others(&self, dir: FileId) {
        let mut tree = self.metadata.write_tree();
        if let Some(shared) = tree.dir_mut(dir) {
            shared.is_shared = true;
        }
        self.metadata.recall_delegation(&mut tree, Some(dir));
    }

    /// Do processes make files in the directory without a request?
    pub fn is_delegated(&self, dir: FileId) -> bool {
        let is_any = self.metadata.delegated.load(Ordering::SeqCst) > 0;
        is_any && self.metadata.read_tree().delegations.dirs.contains_key(&dir)
    }

    /// Forgets what the store said of the directory at this path.
    pub fn forget(&self, path: &[u8]) {
        self.store.refresh();
        let children = self.believes_nothing(&mut self.metadata.write_tree(), path);
        // (A copy that is open stays until the last program closes it. One after the other: there may be many.)
        for id in children.into_iter().filter(|_| shares_a_server(&self.metadata)) {
            self.eviction.disown_copy(&mut self.metadata.write_tree(), id);
        }
    }

    /// Is what has this name newer here than in the store?
    pub fn is_changed_here(&self, dir: FileId, name: &[u8]) -> bool {
        let tree = self.metadata.read_tree();
        let id = tree.entry(dir, name).and_then(surgetank_state::Entry::logical);
        id.and_then(|id| tree.get(id)).is_some_and(|inode| inode.dirty())
    }

    /// The attributes of a directory, and all its names. `None`: other clients of the store may change it, or it is unknown.
    pub fn delegable(&self, dir: FileId) -> Option<(Attr, Vec<Child>)> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(dir).filter(|inode| inode.is_dir() && inode.logical.is_some() && inode.owned)?;
        let names = inode.dir.as_ref().filter(|names| names.complete && is_made(&tree, dir))?;
        let is_settled = |inode: &Inode| {
            let more = inode.extra.as_ref().is_some_and(|extra| !extra.more_names.is_empty());
            // (While a program may write it, it is not sealed.)
            inode.sealed && inode.attr.links == 1 && !more && inode.owned && !inode.may_be_copy()
        };
        let child = |(name, id): (&Name, FileId)| {
            let inode = tree.get(id)?;
            let attr = (inode.attr.kind != Kind::Directory && is_settled(inode)).then_some(inode.attr);
            Some(Child { name: Box::from(&**name), id, kind: inode.attr.kind, ino: inode.attr.ino, attr })
        };
        let known = names.children.iter().filter_map(|(name, entry)| Some((name, entry.logical()?)));
        let known = known.filter(|(_, id)| tree.homes != Some(*id));
        Some((inode.attr, known.filter_map(child).collect()))
    }

    /// What the store has at this path.
    pub fn stored(&self, path: &[u8]) -> io::Result<Option<Kind>> {
        let me = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        match self.store.stat(me, &StorePath(path.to_vec())) {
            Ok(found) => Ok(Some(found.attr.kind)),
            Err(why) if is_absent(&why) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// The directory of the store at this path is taken over from a lost member, which may live: from now on it replaces
    /// nothing there. Comes before all else.
    pub fn give_notice(&self, path: &[u8], from: &Membership) -> io::Result<()> {
        from.gives(&*self.store, path)
    }

    /// Ends the temporaries of a lost member in the directory of the store at this path: a rename that its server carries out late
    /// finds nothing. One that may be the only content of a file gets another name. `key` begins their names.
    pub fn end_temporaries(&self, path: &[u8], key: &str) -> io::Result<()> {
        if !self.store.features().plain_files {
            return Ok(());
        }
        let me = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        let dir = StorePath(path.to_vec());
        let listed = match self.store.list(me, &dir, true) {
            Ok(listed) => listed,
            Err(why) if is_absent(&why) => return Ok(()),
            Err(why) => return Err(why),
        };
        let of_it = |name: &[u8]| {
            let rest = name.strip_prefix(STORE_TEMPORARY_PREFIX)?.strip_prefix(key.as_bytes())?;
            Some(rest.starts_with(SPILL))
        };
        for entry in listed {
            let Some(is_spilled) = of_it(&entry.name) else { continue };
            let name = dir.join(&entry.name);
            let ended = if is_spilled {
                let rest = entry.name.get(STORE_TEMPORARY_PREFIX.len()..).unwrap_or_default();
                self.store.rename(me, &name, &dir.join(&[KEPT_IN_STORE, rest].concat()))
            } else {
                self.store.discard(me, &name)
            };
            match ended {
                Err(why) if !is_absent(&why) => return Err(why),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the files in the directory.
    fn believes_nothing(&self, tree: &mut Tree, path: &[u8]) -> Vec<FileId> {
        let Some(at) = at_path(tree, path) else { return Vec::new() };
        let Some(dir) = tree.dir_mut(at) else { return Vec::new() };
        dir.absent.clear();
        dir.negative_cache = NegativeCache::default();
        dir.generation = dir.generation.wrapping_add(1);
        let children: Vec<FileId> = dir.children.values().filter_map(|entry| entry.logical()).collect();
        for id in children.iter().copied().chain([at]) {
            if let Some(inode) = tree.get_mut(id) {
                inode.checked = None;
            }
        }
        children
    }
}

impl Pooled {
    /// The directory of the store at this path has another owner: the shim sees of it what it may see now.
    pub fn owner_changed(&self, path: &[u8]) {
        let tree = self.metadata.read_tree();
        let Some(at) = at_path(&tree, path) else { return };
        self.metadata.show(&tree, at);
        for entry in tree.dir(at).iter().flat_map(|dir| dir.children.values()) {
            if let Some(id) = entry.logical() {
                self.metadata.show(&tree, id);
            }
        }
    }
}

fn at_path(tree: &Tree, path: &[u8]) -> Option<FileId> {
    let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    names.try_fold(FileId::ROOT, |at, name| tree.entry(at, name).and_then(surgetank_state::Entry::logical))
}
