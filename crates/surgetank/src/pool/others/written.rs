//! Paths of other members' files, and which ones programs of this node have written.
//!
//! The danger that this avoids: a lost member whose files are missing in the list of what is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// So many paths are listed for each member.
const PATHS_MAX: usize = 10_000;
/// Stands for all others.
const NAMELESS: &[u8] = b"(changes whose names are not known here)";

/// When a member was asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

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
    /// Not known to be in the store: by member and path, and when that was last noted.
    paths: BTreeMap<u32, BTreeMap<Vec<u8>, u64>>,
    /// Counts the questions to members.
    asked: u64,
    /// An earlier agent may have changed something, too: at members that have not said yet that all is in the store.
    had_earlier: Option<BTreeSet<u32>>,
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

    /// The directory and the name under which a node was found last.
    pub fn name_of(&self, member: u32, node: u64) -> Option<(u64, Box<[u8]>)> {
        match self.tables().names.get(&(member, node)) {
            Some(Name::Below(parent, name)) => Some((*parent, name.clone())),
            _ => None,
        }
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
        let path = tables.path(member, node);
        tables.note(member, path.clone());
        tables.open.insert((member, handle), path.unwrap_or_else(|| NAMELESS.to_vec()));
    }

    /// That handle was closed.
    pub fn closed(&self, member: u32, handle: u64) {
        let mut tables = self.tables();
        let path = tables.open.remove(&(member, handle));
        // (An earlier agent may have opened it for writing.)
        if path.is_some() || tables.had_earlier.is_some() {
            tables.note(member, path);
        }
    }

    /// A file, or its attributes, has changed.
    pub fn changed_node(&self, member: u32, node: u64) {
        let mut tables = self.tables();
        let path = tables.path(member, node);
        tables.note(member, path);
    }

    /// Something has changed that has no path here.
    pub fn touched(&self, member: u32) {
        self.tables().note(member, None);
    }

    /// An earlier agent of this node was a member. What it has noted is not known.
    pub fn had_earlier(&self) {
        self.tables().had_earlier = Some(BTreeSet::new());
    }

    /// The member is asked: its answer is about what was noted before.
    pub fn ask(&self) -> Asked {
        let mut tables = self.tables();
        tables.asked += 1;
        Asked(tables.asked)
    }

    /// All that was noted before is in the member's store, but these.
    pub fn answered(&self, member: u32, asked: Asked, left: impl Iterator<Item = Vec<u8>>) {
        let mut tables = self.tables();
        let now = tables.asked;
        if let Some(known) = &mut tables.had_earlier {
            known.insert(member);
        }
        let paths = tables.paths.entry(member).or_default();
        paths.retain(|_, noted| *noted >= asked.0);
        paths.extend(left.map(|path| (path, now)));
        if paths.is_empty() {
            tables.paths.remove(&member);
        }
    }

    /// What may not be in the store, of one member.
    pub fn of(&self, member: u32) -> Vec<Vec<u8>> {
        let tables = self.tables();
        let open = tables.open.iter().filter(|((of, _), _)| *of == member).map(|(_, path)| path.as_slice());
        let earlier = tables.had_earlier.as_ref().is_some_and(|known| !known.contains(&member)).then_some(NAMELESS);
        let noted = tables.paths.get(&member).into_iter().flat_map(BTreeMap::keys).map(Vec::as_slice);
        let paths: BTreeSet<&[u8]> = noted.chain(open).chain(earlier).collect();
        paths.into_iter().map(<[u8]>::to_vec).collect()
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
        let now = self.asked;
        let paths = self.paths.entry(member).or_default();
        // (More than are listed, or a directory whose path is not known any more.)
        let path = path.filter(|path| paths.len() < PATHS_MAX || paths.contains_key(path));
        paths.insert(path.unwrap_or_else(|| NAMELESS.to_vec()), now);
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
    use std::iter;

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
        let asked = written.ask();
        written.changed(2, 11, b"later");
        // While the member is asked, all of them count.
        assert_eq!(paths(&written, 2), ["d/later", "d/x", "y"]);
        written.answered(2, asked, iter::once(b"renamed/x".to_vec()));
        assert_eq!(paths(&written, 2), ["d/later", "renamed/x"]);
        written.answered(2, written.ask(), iter::empty());
        assert!(written.members().is_empty() && written.of(2).is_empty());
    }

    #[test]
    fn file_that_is_open_for_writing_stays() {
        let written = with_a_directory();
        written.named(2, 12, 11, b"log");
        written.opened(2, 12, 77);
        written.forget(2, 12);
        written.answered(2, written.ask(), iter::empty());
        assert_eq!(paths(&written, 2), ["d/log"]);
        written.closed(2, 77);
        assert_eq!(paths(&written, 2), ["d/log"]);
        written.answered(2, written.ask(), iter::empty());
        assert!(written.members().is_empty());
    }

    #[test]
    fn change_without_a_known_path_counts_and_a_read_does_not() {
        let written = Written::default();
        written.closed(3, 5);
        assert!(written.of(3).is_empty());
        written.changed(3, 99, b"x");
        written.opened(4, 98, 1);
        assert_eq!((written.of(3).len(), written.of(4).len()), (1, 1));
    }

    #[test]
    fn changes_of_an_earlier_agent_count_until_the_member_has_answered() {
        let written = Written::default();
        written.had_earlier();
        assert_eq!(written.of(2).len(), 1);
        written.answered(2, written.ask(), iter::empty());
        assert!(written.of(2).is_empty() && written.of(3).len() == 1);
    }
}
