//! Paths of other members' files, and which ones programs of this node have written.
//!
//! The danger that this avoids: a lost member whose files are missing in the list of what is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// So many paths are listed for each member.
const PATHS_MAX: usize = 10_000;

/// Files and directories of other members, by member and node.
type Node = (u32, u64);

/// Paths of other members' files, and which ones programs of this node have written.
#[derive(Debug, Default)]
pub struct Written {
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    names: HashMap<Node, Name>,
    /// By member and handle: files that are open for writing.
    open: HashMap<Node, Vec<u8>>,
    /// Not known to be in the store.
    paths: BTreeMap<u32, BTreeSet<Vec<u8>>>,
}

#[derive(Debug)]
enum Name {
    /// The path of a directory of the store.
    Path(Vec<u8>),
    /// The node of the directory above.
    Below(u64, Box<[u8]>),
}

impl Written {
    /// The member's directory is at this path of the store.
    pub fn claimed(&self, member: u32, node: u64, path: &[u8]) {
        self.tables().names.insert((member, node), Name::Path(path.to_vec()));
    }

    /// A name was looked up, or made.
    pub fn named(&self, member: u32, node: u64, parent: u64, name: &[u8]) {
        self.tables().names.insert((member, node), Name::Below(parent, name.into()));
    }

    /// The kernel knows it no more.
    pub fn forget(&self, member: u32, node: u64) {
        let mut tables = self.tables();
        // (A claimed directory's node is not the kernel's.)
        if matches!(tables.names.get(&(member, node)), Some(Name::Below(..))) {
            tables.names.remove(&(member, node));
        }
    }

    /// A name in a directory was made or changed.
    pub fn changed(&self, member: u32, parent: u64, name: &[u8]) {
        let mut tables = self.tables();
        let path = tables.path(member, parent).map(|dir| joined(dir, name));
        tables.note(member, path);
    }

    /// A file was opened for writing.
    pub fn opened(&self, member: u32, node: u64, handle: u64) {
        let mut tables = self.tables();
        if let Some(path) = tables.path(member, node) {
            tables.note(member, Some(path.clone()));
            tables.open.insert((member, handle), path);
        }
    }

    /// That handle was closed.
    pub fn closed(&self, member: u32, handle: u64) {
        let mut tables = self.tables();
        let path = tables.open.remove(&(member, handle));
        tables.note(member, path);
    }

    /// Before the member is asked: what its answer is about.
    pub fn take(&self, member: u32) -> BTreeSet<Vec<u8>> {
        self.tables().paths.remove(&member).unwrap_or_default()
    }

    /// The member has not put these into the store.
    pub fn put_back(&self, member: u32, paths: BTreeSet<Vec<u8>>) {
        if !paths.is_empty() {
            self.tables().paths.entry(member).or_default().extend(paths);
        }
    }

    /// What may not be in the store, of one member.
    pub fn of(&self, member: u32) -> Vec<Vec<u8>> {
        let tables = self.tables();
        let open = tables.open.iter().filter(|((of, _), _)| *of == member).map(|(_, path)| path);
        let paths: BTreeSet<&Vec<u8>> = tables.paths.get(&member).into_iter().flatten().chain(open).collect();
        paths.into_iter().cloned().collect()
    }

    /// Members with such files.
    pub fn members(&self) -> BTreeSet<u32> {
        let tables = self.tables();
        tables.paths.keys().copied().chain(tables.open.keys().map(|(member, _)| *member)).collect()
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn path(&self, member: u32, node: u64) -> Option<Vec<u8>> {
        const DEPTH_MAX: usize = 4096;
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = node;
        for _ in 0..DEPTH_MAX {
            match self.names.get(&(member, at))? {
                Name::Below(parent, name) => {
                    names.push(name);
                    at = *parent;
                }
                Name::Path(path) => return Some(names.iter().rev().fold(path.clone(), |dir, name| joined(dir, name))),
            }
        }
        None
    }

    fn note(&mut self, member: u32, path: Option<Vec<u8>>) {
        let paths = self.paths.entry(member).or_default();
        match path {
            Some(path) if paths.len() < PATHS_MAX => drop(paths.insert(path)),
            // (More than are listed, or a directory whose path is not known any more.)
            _ => drop(paths.insert(b"(more files, whose names are not known here)".to_vec())),
        }
    }
}

fn joined(mut dir: Vec<u8>, name: &[u8]) -> Vec<u8> {
    if !dir.is_empty() {
        dir.push(b'/');
    }
    dir.extend_from_slice(name);
    dir
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(written: &Written, member: u32) -> Vec<String> {
        written.of(member).into_iter().map(|path| String::from_utf8(path).unwrap()).collect()
    }

    fn with_a_directory() -> Written {
        let written = Written::default();
        written.claimed(2, 10, b"");
        written.named(2, 11, 10, b"d");
        written
    }

    #[test]
    fn files_are_named_by_their_paths_until_the_member_has_put_them_into_the_store() {
        let written = with_a_directory();
        written.changed(2, 11, b"x");
        written.changed(2, 10, b"y");
        assert_eq!(paths(&written, 2), ["d/x", "y"]);
        assert_eq!(written.members(), BTreeSet::from([2]));
        let asked = written.take(2);
        written.changed(2, 11, b"later");
        assert_eq!(paths(&written, 2), ["d/later"]);
        written.put_back(2, asked);
        assert_eq!(paths(&written, 2), ["d/later", "d/x", "y"]);
    }

    #[test]
    fn file_that_is_open_for_writing_stays() {
        let written = with_a_directory();
        written.named(2, 12, 11, b"log");
        written.opened(2, 12, 77);
        written.forget(2, 12);
        drop(written.take(2));
        assert_eq!(paths(&written, 2), ["d/log"]);
        written.closed(2, 77);
        assert_eq!(paths(&written, 2), ["d/log"]);
        drop(written.take(2));
        assert!(written.members().is_empty());
    }

    #[test]
    fn change_without_a_known_path_is_counted() {
        let written = Written::default();
        written.changed(3, 99, b"x");
        assert_eq!(written.of(3).len(), 1);
    }
}
