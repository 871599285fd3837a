//! What the agent of a pool asks about directories: their paths, which ones were made here, and what to forget of one.
//!
//! The danger that this avoids: the agent believes what the store said of a directory before another member changed it.

use surgetank_state::{NegativeCache, OWN_INODE_BASE, Op, Tree, file_of, places};
use surgetank_types::model::{FileId, Kind};
use surgetank_types::sync::Arc;

use crate::files::Files;
use crate::metadata::Metadata;

pub use crate::metadata::FILES_OF_A_MEMBER;

/// A directory, as a member of a pool sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// It was made here, or is below one that was. This agent decides its names.
    Made,
    /// The store has it, at this path.
    OfTheStore(Vec<u8>),
}

/// Questions of the pool.
pub struct Pooled {
    metadata: Arc<Metadata>,
}

impl Pooled {
    pub(crate) fn new(files: &Files) -> Self {
        Self { metadata: files.metadata.clone() }
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

    /// Forgets what the store said of the directory at this path.
    pub fn forget(&self, path: &[u8]) {
        let mut tree = self.metadata.write_tree();
        let Some(at) = at_path(&tree, path) else { return };
        let Some(dir) = tree.dir_mut(at) else { return };
        dir.absent.clear();
        dir.negative_cache = NegativeCache::default();
        dir.generation = dir.generation.wrapping_add(1);
        let children: Vec<FileId> = dir.children.values().filter_map(|entry| entry.logical()).collect();
        for id in children.into_iter().chain([at]) {
            if let Some(inode) = tree.get_mut(id) {
                inode.checked = None;
            }
        }
    }
}

fn at_path(tree: &Tree, path: &[u8]) -> Option<FileId> {
    let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
    names.try_fold(FileId::ROOT, |at, name| tree.entry(at, name).and_then(surgetank_state::Entry::logical))
}

fn is_made(tree: &Tree, dir: FileId) -> bool {
    let mut at = dir;
    while let Some(inode) = tree.get(at) {
        if inode.attr.ino >= OWN_INODE_BASE {
            return true;
        }
        match &inode.logical {
            Some((parent, _)) => at = *parent,
            None => return false,
        }
    }
    false
}
