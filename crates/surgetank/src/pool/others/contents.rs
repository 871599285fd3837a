//! Files of other members whose content this node has, and directories that its programs made there: by path and by number.

use std::collections::{BTreeMap, HashMap};

/// A file whose content this node has, or a directory that a program here made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    pub path: Vec<u8>,
    pub is_directory: bool,
    pub perm: u32,
    pub owner: (u32, u32),
    /// It is a copy of a lost member's file: its owner has said of each change.
    pub is_copy: bool,
    /// A copy at a close: this member may have what was written since. It puts that back itself.
    pub newer_at: Option<u32>,
}

/// All of them. A path of a member has one.
#[derive(Debug, Default)]
pub struct Contents {
    all: BTreeMap<(u32, Vec<u8>), (u64, Content)>,
    paths: HashMap<(u32, u64), Vec<u8>>,
}

/// What is behind a path: nothing, or what begins with a slash. `None`: it is another path.
pub fn below<'a>(path: &'a [u8], of: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(of).filter(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

impl Contents {
    /// What had the path before is gone.
    pub fn insert(&mut self, member: u32, number: u64, content: Content) {
        self.remove(member, number);
        let key = (member, content.path.clone());
        self.paths.insert((member, number), content.path.clone());
        if let Some((before, _)) = self.all.insert(key, (number, content)) {
            self.paths.remove(&(member, before));
        }
    }

    pub fn has_path(&self, member: u32, path: &[u8]) -> bool {
        self.all.contains_key(&(member, path.to_vec()))
    }

    pub fn path(&self, member: u32, number: u64) -> Option<&Vec<u8>> {
        self.paths.get(&(member, number))
    }

    pub fn get_mut(&mut self, member: u32, number: u64) -> Option<&mut Content> {
        let path = self.paths.get(&(member, number))?;
        self.all.get_mut(&(member, path.clone())).map(|(_, content)| content)
    }

    pub fn remove(&mut self, member: u32, number: u64) {
        if let Some(path) = self.paths.remove(&(member, number)) {
            self.all.remove(&(member, path));
        }
    }

    pub fn remove_path(&mut self, member: u32, path: &[u8]) {
        if let Some((number, _)) = self.all.remove(&(member, path.to_vec())) {
            self.paths.remove(&(member, number));
        }
    }

    /// Removes what has the path, and all below it.
    pub fn take(&mut self, member: u32, path: &[u8]) -> Vec<(u64, Content)> {
        let prefix = [path, b"/"].concat();
        let inside = self.all.range((member, prefix.clone())..);
        let inside = inside.take_while(|((of, path), _)| *of == member && path.starts_with(&prefix));
        let mut keys: Vec<_> = inside.map(|(key, _)| key.clone()).collect();
        keys.push((member, path.to_vec()));
        let taken: Vec<_> = keys.iter().filter_map(|key| self.all.remove(key)).collect();
        for (number, _) in &taken {
            self.paths.remove(&(member, *number));
        }
        taken
    }

    /// What was taken from below one path has a place below another one.
    pub fn give(&mut self, member: u32, taken: Vec<(u64, Content)>, from: &[u8], to: &[u8]) {
        for (number, content) in taken {
            if let Some(rest) = below(&content.path, from) {
                self.insert(member, number, Content { path: [to, rest].concat(), ..content });
            }
        }
    }

    /// Of a member, in the order of their paths: a directory comes before what is below.
    pub fn of(&self, member: u32) -> impl Iterator<Item = &(u64, Content)> {
        let all = self.all.range((member, Vec::new())..);
        all.take_while(move |((of, _), _)| *of == member).map(|(_, one)| one)
    }

    /// Directories of a member that are not `needed` leave.
    pub fn retain_directories(&mut self, member: u32, needed: impl Fn(&[u8]) -> bool) {
        let leave: Vec<u64> = self
            .of(member)
            .filter(|(_, content)| content.is_directory && !needed(&content.path))
            .map(|(number, _)| *number)
            .collect();
        leave.into_iter().for_each(|number| self.remove(member, number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(path: &str) -> Content {
        Content { path: path.into(), is_directory: false, perm: 0o644, owner: (0, 0), is_copy: false, newer_at: None }
    }

    fn paths(contents: &Contents, member: u32) -> Vec<(u64, String)> {
        contents.of(member).map(|(number, one)| (*number, String::from_utf8(one.path.clone()).unwrap())).collect()
    }

    #[test]
    fn what_is_below_a_path_moves_with_it() {
        let mut contents = Contents::default();
        for (number, path) in ["d", "d-x", "d/a", "d/b/c", "e"].into_iter().enumerate() {
            contents.insert(2, number as u64, content(path));
            contents.insert(3, number as u64, content(path));
        }
        let taken = contents.take(2, b"d");
        contents.give(2, taken, b"d", b"e");
        let there = [(3, "e/b/c"), (2, "e/a"), (1, "d-x"), (0, "e")];
        let mut expected = there.map(|(number, path)| (number, path.to_owned()));
        expected.sort_by(|one, other| one.1.cmp(&other.1));
        assert_eq!(paths(&contents, 2), expected, "the one that had the path `e` is gone");
        assert_eq!(paths(&contents, 3).len(), 5);
        contents.get_mut(2, 2).unwrap().perm = 0o600;
        contents.remove_path(2, b"e/a");
        assert!(contents.get_mut(2, 2).is_none() && contents.get_mut(2, 4).is_none());
        contents.remove(2, 0);
        assert_eq!(paths(&contents, 2).len(), 2);
    }
}
