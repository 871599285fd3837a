//! What the writers recorded, and what may and must therefore be in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;

/// A file without its names. The id of its first content identifies it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct File {
    /// Id of its content.
    pub content: u64,
    pub mode: Option<u32>,
    /// Value of its one extended attribute.
    pub mark: Option<String>,
}

/// One writer's story: all completed operations, and at most one begun operation whose outcome is unknown.
#[derive(Debug, Default, Clone)]
pub struct Story {
    /// Path → file.
    pub names: BTreeMap<String, u64>,
    pub files: BTreeMap<u64, File>,
    pub dirs: BTreeSet<String>,
    /// Symbolic links and their targets.
    pub symlinks: BTreeMap<String, String>,
    /// Every name of each file that had several names at some time. Such a file is written in place, in the store
    /// too.
    held: BTreeSet<(String, u64)>,
    linked: BTreeSet<u64>,
    pub open: Option<Open>,
    pub done: u64,
    pub synced: u64,
}

#[derive(Debug, Clone)]
pub struct Open {
    pub words: Vec<String>,
    /// The file's bytes were synced before the agent died.
    pub synced: bool,
}

impl Story {
    pub fn read(manifest: &Path) -> Self {
        let mut story = Self::default();
        // The last line may be cut off: no program then depends on it.
        let text = std::fs::read_to_string(manifest).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        for line in whole.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[0] {
                "B" => {
                    let words = words[2..].iter().map(|word| (*word).to_owned()).collect();
                    story.open = Some(Open { words, synced: false });
                }
                "F" => {
                    story.synced += 1;
                    story.open.as_mut().unwrap().synced = true;
                }
                "E" => {
                    let open = story.open.take().unwrap();
                    story.apply(&open.words);
                    story.done += 1;
                }
                "X" => {}
                other => panic!("a manifest with {other}"),
            }
        }
        story
    }

    pub fn apply(&mut self, words: &[String]) {
        match (words[0].as_str(), words[1].as_str()) {
            ("create", path) => {
                let id = words[2].parse().unwrap();
                self.names.insert(path.to_owned(), id);
                self.files.insert(id, File { content: id, ..File::default() });
            }
            ("overwrite", path) => self.file(path).content = words[2].parse().unwrap(),
            ("chmod", path) => self.file(path).mode = Some(u32::from_str_radix(&words[2], 8).unwrap()),
            ("mark", path) => self.file(path).mark = Some(words[2].clone()),
            ("link", from) => {
                let id = self.names[from];
                self.linked.insert(id);
                self.names.insert(words[2].clone(), id);
            }
            ("symlink", path) => {
                self.symlinks.insert(path.to_owned(), words[2].clone());
            }
            ("unlink", path) => {
                self.names.remove(path).unwrap();
            }
            ("mkdir", path) => {
                self.dirs.insert(path.to_owned());
            }
            ("rmdir", path) => {
                self.dirs.remove(path);
            }
            ("exchange", one) => {
                let (a, b) = (self.names[one], self.names[&words[2]]);
                self.names.insert(one.to_owned(), b);
                self.names.insert(words[2].clone(), a);
            }
            ("rename", from) => {
                let to = words[2].as_str();
                let moved = |path: String| {
                    let rest = path.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('/'));
                    rest.map(|rest| format!("{to}{rest}")).unwrap_or(path)
                };
                let names = std::mem::take(&mut self.names).into_iter();
                // The file that the new name replaces is removed first.
                self.names = names.filter(|(path, _)| path != to).map(|(path, id)| (moved(path), id)).collect();
                self.symlinks = std::mem::take(&mut self.symlinks)
                    .into_iter()
                    .map(|(path, target)| (moved(path), target))
                    .collect();
                self.dirs = std::mem::take(&mut self.dirs).into_iter().map(moved).collect();
            }
            (other, _) => panic!("an operation {other}"),
        }
        self.held.extend(self.names.iter().map(|(path, id)| (path.clone(), *id)));
    }

    fn file(&mut self, path: &str) -> &mut File {
        self.files.get_mut(&self.names[path]).unwrap()
    }

    /// Names under which a file was written in place.
    pub fn in_place(&self) -> impl Iterator<Item = &str> {
        self.held.iter().filter(|(_, id)| self.linked.contains(id)).map(|(path, _)| path.as_str())
    }

    /// All allowed states: the open operation happened, or it did not.
    pub fn allowed(&self) -> Vec<Self> {
        let before = Self { open: None, ..self.clone() };
        let mut all = Vec::new();
        match &self.open {
            None => all.push(before),
            Some(open) => {
                let mut after = before.clone();
                after.apply(&open.words);
                // A sync promises the bytes: only the state with them is allowed.
                if !open.synced {
                    all.push(before);
                }
                all.push(after);
            }
        }
        all
    }

    /// The names of the file that was being written at the end. Its bytes may be any, unless they were synced.
    pub fn half_written(&self) -> Vec<&str> {
        let Some(open) = self.open.as_ref().filter(|open| !open.synced) else { return Vec::new() };
        let path = open.words[1].as_str();
        match (open.words[0].as_str(), self.names.get(path)) {
            ("overwrite", Some(id)) => {
                self.names.iter().filter(|(_, other)| *other == id).map(|(path, _)| path.as_str()).collect()
            }
            ("create" | "overwrite", _) => vec![path],
            _ => Vec::new(),
        }
    }
}

/// For the campaign's totals (`make crash`).
pub fn record(line: &str) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("crash-cases.jsonl");
    let mut file = fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}
