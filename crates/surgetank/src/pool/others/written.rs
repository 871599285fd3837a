//! Paths of other members' files, and which ones programs of this node have written.
//!
//! The danger that this avoids: a lost member whose files are missing in the list of what is lost.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_types::clock::tick;

use super::super::replicas::Record;
use super::contents::{Content, Contents, below};

/// So many paths are listed for each member.
const PATHS_MAX: usize = 10_000;
/// Other members learn of paths with so many bytes. (Their message has a limit.)
const PATH_BYTES_MAX: usize = 3 << 20;
/// A name that was removed counts so long against content that would bring it back.
const REMOVED: Duration = Duration::from_secs(60);
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
    puts: AtomicU64,
    /// Copies here of other members' files, by number.
    pub copies: Mutex<HashMap<u64, Record>>,
}

/// What programs of this node have changed at a member that is lost, as far as it may not be in the store.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Changed {
    /// Paths of files and directories.
    pub paths: Vec<Vec<u8>>,
    /// Paths that do not exist since, also those whose removal is in the store.
    pub removed: Vec<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Tables {
    names: HashMap<Node, Name>,
    /// By member and handle: files that are open for writing.
    open: HashMap<Node, Vec<u8>>,
    /// Not known to be in the store: by member and path, and when that was last noted.
    paths: BTreeMap<u32, BTreeMap<Vec<u8>, u64>>,
    /// By member and number: content here of files there.
    contents: Contents,
    /// By member: names that programs of this node removed, and when.
    removed: HashMap<u32, VecDeque<(Vec<u8>, Instant)>>,
    /// By member: names that do not exist since the last change of a program here.
    absent: BTreeSet<(u32, Vec<u8>)>,
    /// Those that the store still has after the loss.
    looked_at: BTreeSet<Vec<u8>>,
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
        self.tables().changed(member, (parent, name));
    }

    /// A name was removed.
    pub fn removed(&self, member: u32, parent: u64, name: &[u8]) {
        let mut tables = self.tables();
        if let Some(path) = tables.changed(member, (parent, name)) {
            tables.has_gone(member, path);
        }
    }

    /// A name is another one now.
    pub fn renamed(&self, member: u32, from: (u64, &[u8]), to: (u64, &[u8])) {
        let mut tables = self.tables();
        let (Some(from), Some(to)) = (tables.changed(member, from), tables.changed(member, to)) else { return };
        for ((of, _), open) in &mut tables.open {
            if *of == member
                && let Some(rest) = below(open, &from)
            {
                *open = [&to, rest].concat();
            }
        }
        if let Some(paths) = tables.paths.get_mut(&member) {
            let inside = inside(paths, &from);
            paths.extend(inside.into_iter().map(|(path, noted)| ([&to, &path[from.len()..]].concat(), noted)));
        }
        let moved = tables.contents.take(member, &from);
        tables.contents.take(member, &to);
        tables.contents.give(member, moved, &from, &to);
        tables.has_gone(member, from);
    }

    /// Two names are exchanged.
    pub fn exchanged(&self, member: u32, one: (u64, &[u8]), other: (u64, &[u8])) {
        let mut tables = self.tables();
        let (Some(one), Some(other)) = (tables.changed(member, one), tables.changed(member, other)) else { return };
        let exchange = |path: &mut Vec<u8>| {
            if let Some(rest) = below(path, &one) {
                *path = [&other, rest].concat();
            } else if let Some(rest) = below(path, &other) {
                *path = [&one, rest].concat();
            }
        };
        let taken = (tables.contents.take(member, &one), tables.contents.take(member, &other));
        tables.contents.give(member, taken.0, &one, &other);
        tables.contents.give(member, taken.1, &other, &one);
        if let Some(paths) = tables.paths.get_mut(&member) {
            let (of_one, of_other) = (inside(paths, &one), inside(paths, &other));
            for (mut path, noted) in of_one.into_iter().chain(of_other) {
                exchange(&mut path);
                paths.insert(path, noted);
            }
        }
        tables.open.iter_mut().filter(|((of, _), _)| *of == member).for_each(|(_, path)| exchange(path));
    }

    /// A program here has made a file, whose content is here, or a directory.
    pub fn has_content(&self, member: u32, number: u64, is_directory: bool, (perm, owner): (u32, (u32, u32))) {
        let mut tables = self.tables();
        // (Without a path it cannot be put back.)
        if let Some(path) = tables.path(member, number) {
            tables.contents.insert(
                member,
                number,
                Content { path, is_directory, perm, owner, is_copy: false, newer_at: None },
            );
        }
    }

    /// This node has a copy of a lost member's file, or knows a directory above one.
    pub fn has_copy(&self, member: u32, number: u64, content: Content) {
        let mut tables = self.tables();
        let is_known = content.is_directory && tables.contents.has_path(member, &content.path);
        if !is_known {
            // (Also more than are listed otherwise.)
            let now = tables.asked;
            tables.paths.entry(member).or_default().insert(content.path.clone(), now);
            tables.contents.insert(member, number, content);
        }
    }

    /// The attributes of such a file have changed.
    pub fn attributes_are(&self, member: u32, number: u64, (perm, owner): (u32, (u32, u32))) {
        if let Some(content) = self.tables().contents.get_mut(member, number) {
            (content.perm, content.owner) = (perm, owner);
        }
    }

    /// The content is not here any more, or not needed.
    pub fn content_ends(&self, member: u32, number: u64) {
        self.tables().contents.remove(member, number);
    }

    /// Content here of files that are lost with the member, and directories, by number. A directory comes before what is below.
    pub fn to_put_back(&self, member: u32) -> Vec<(u64, Content)> {
        let tables = self.tables();
        let open = tables.open.iter().filter(|((of, _), _)| *of == member).map(|(_, path)| path);
        let paths: BTreeSet<&Vec<u8>> =
            tables.paths.get(&member).into_iter().flat_map(BTreeMap::keys).chain(open).collect();
        tables.contents.of(member).filter(|(_, content)| paths.contains(&content.path)).cloned().collect()
    }

    /// Is this one still among them?
    pub fn is_to_be_put_back(&self, member: u32, number: u64) -> bool {
        let tables = self.tables();
        let Some(path) = tables.contents.path(member, number) else { return false };
        let is_open = || tables.open.iter().any(|((of, _), open)| *of == member && open == path);
        tables.paths.get(&member).is_some_and(|paths| paths.contains_key(path)) || is_open()
    }

    /// Some content is put back.
    pub fn puts_back(&self) {
        self.puts.fetch_add(1, Ordering::SeqCst);
    }

    /// How often that was done.
    pub fn puts(&self) -> u64 {
        self.puts.load(Ordering::SeqCst)
    }

    /// Names that programs here removed at a lost member, and of which it is not known whether the store has them still.
    pub fn to_look_at(&self, member: u32) -> Vec<Vec<u8>> {
        let tables = self.tables();
        let Some(paths) = tables.paths.get(&member) else { return Vec::new() };
        let absent = tables.absent.iter().filter(|(of, path)| *of == member && paths.contains_key(path));
        absent.map(|(_, path)| path).filter(|path| !tables.looked_at.contains(*path)).cloned().collect()
    }

    /// The store still has it: the removal is lost.
    pub fn looked_at(&self, path: &[u8]) {
        self.tables().looked_at.insert(path.to_vec());
    }

    /// Is there something to be done since the member was lost?
    pub fn is_pending(&self, member: u32) -> bool {
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let has_copies = copies.keys().any(|number| number / FILES_OF_A_MEMBER == u64::from(member));
        drop(copies);
        has_copies || !self.to_put_back(member).is_empty() || !self.to_look_at(member).is_empty()
    }

    /// What is known of a lost member.
    pub fn lost_with(&self, member: u32) -> Changed {
        let mut paths = self.of(member);
        let mut bytes = 0;
        paths.retain(|path| {
            bytes += path.len();
            path != NAMELESS && bytes <= PATH_BYTES_MAX
        });
        let tables = self.tables();
        let removed = tables.removed.get(&member).into_iter().flatten();
        let removed = removed.filter(|(_, since)| since.elapsed() < REMOVED).map(|(path, _)| path.clone()).collect();
        Changed { paths, removed }
    }

    /// The name has been made again since one of these members was lost.
    pub fn made_again(&self, lost: &[u32], path: &[u8]) {
        let mut tables = self.tables();
        for member in lost {
            if let Some(paths) = tables.paths.get_mut(member) {
                paths.remove(path);
                if paths.is_empty() {
                    tables.paths.remove(member);
                }
            }
        }
        lost.iter().for_each(|member| tables.contents.remove_path(*member, path));
        tables.absent.retain(|(member, absent)| !lost.contains(member) || absent != path);
        // (The close may not have reached the member.)
        tables.open.retain(|(member, _), open| !lost.contains(member) || open != path);
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
        // (What is in the store needs no name here.)
        let known: BTreeSet<Vec<u8>> = paths.keys().cloned().collect();
        if paths.is_empty() {
            tables.paths.remove(&member);
        }
        tables.absent.retain(|(of, path)| *of != member || known.contains(path));
        tables.contents.retain_directories(member, |path| known.contains(path));
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

    /// Notes a name in a directory. Returns its path, if that is known.
    fn changed(&mut self, member: u32, (parent, name): (u64, &[u8])) -> Option<Vec<u8>> {
        let path = self.path(member, parent).map(|dir| joined(dir, name));
        self.note(member, path.clone());
        path
    }

    /// Nothing has this path any more.
    fn has_gone(&mut self, member: u32, path: Vec<u8>) {
        self.contents.take(member, &path);
        let now = tick();
        self.absent.insert((member, path.clone()));
        let removed = self.removed.entry(member).or_default();
        // (In the order of their times.)
        while removed.front().is_some_and(|(_, since)| now.saturating_duration_since(*since) >= REMOVED) {
            removed.pop_front();
        }
        removed.push_back((path, now));
    }

    fn note(&mut self, member: u32, path: Option<Vec<u8>>) {
        let now = self.asked;
        if let Some(path) = &path {
            self.absent.remove(&(member, path.clone()));
        }
        let paths = self.paths.entry(member).or_default();
        // (More than are listed, or a directory whose path is not known any more.)
        let path = path.filter(|path| paths.len() < PATHS_MAX || paths.contains_key(path));
        paths.insert(path.unwrap_or_else(|| NAMELESS.to_vec()), now);
    }
}

/// Removes what is inside a directory.
fn inside(paths: &mut BTreeMap<Vec<u8>, u64>, dir: &[u8]) -> Vec<(Vec<u8>, u64)> {
    let prefix = [dir, b"/"].concat();
    let inside = paths.range(prefix.clone()..).take_while(|(path, _)| path.starts_with(&prefix));
    let inside: Vec<_> = inside.map(|(path, noted)| (path.clone(), *noted)).collect();
    for (path, _) in &inside {
        paths.remove(path);
    }
    inside
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
    fn content_is_put_back_under_the_path_that_it_has_now() {
        let written = with_a_directory();
        written.named(2, 12, 11, b"part");
        written.opened(2, 12, 77);
        written.has_content(2, 12, false, (0o600, (1, 2)));
        written.attributes_are(2, 12, (0o755, (1, 2)));
        written.renamed(2, (11, b"part"), (11, b"whole"));
        written.closed(2, 77);
        let content = Content {
            path: b"d/whole".to_vec(),
            is_directory: false,
            perm: 0o755,
            owner: (1, 2),
            is_copy: false,
            newer_at: None,
        };
        assert_eq!(written.to_put_back(2), [(12, content.clone())]);
        // (The old name is looked for in the store.)
        assert_eq!(written.to_look_at(2), [b"d/part".to_vec()]);
        written.renamed(2, (10, b"d"), (10, b"e"));
        assert_eq!(written.to_put_back(2)[0].1.path, b"e/whole");
        written.made_again(&[2], b"e/whole");
        assert_eq!(written.to_put_back(2), []);
    }

    #[test]
    fn removed_file_is_not_put_back() {
        let written = with_a_directory();
        for name in [&b"x"[..], b"y"] {
            let number = u64::from(name[0]);
            written.named(2, number, 11, name);
            written.changed(2, 11, name);
            written.has_content(2, number, false, (0o600, (0, 0)));
        }
        written.removed(2, 11, b"x");
        assert_eq!(written.to_put_back(2).len(), 1);
        assert_eq!(written.lost_with(2).removed, [b"d/x".to_vec()]);
        assert_eq!(written.to_look_at(2), [b"d/x".to_vec()]);
        // Also once the store has neither.
        written.answered(2, written.ask(), iter::empty());
        assert_eq!(written.lost_with(2), Changed { paths: Vec::new(), removed: vec![b"d/x".to_vec()] });
        assert!(written.to_put_back(2).is_empty() && written.to_look_at(2).is_empty());
        // A name that was made again is one.
        written.removed(2, 11, b"y");
        written.changed(2, 11, b"y");
        assert!(written.to_look_at(2).is_empty() && !written.is_pending(2));
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
