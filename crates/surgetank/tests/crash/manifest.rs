//! What the writers wrote down, and what therefore may, and must, be in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// One writer's story: all that was done, and at most one operation that was begun and of which nobody knows.
#[derive(Debug, Default, Clone)]
pub struct Story {
    /// Path → id of its content.
    pub files: BTreeMap<String, u64>,
    pub dirs: BTreeSet<String>,
    pub open: Option<Open>,
    pub done: u64,
    pub synced: u64,
}

#[derive(Debug, Clone)]
pub struct Open {
    pub words: Vec<String>,
    /// Its bytes were synced before the end came.
    pub synced: bool,
}

impl Story {
    pub fn read(manifest: &Path) -> Self {
        let mut story = Self::default();
        // The last line may be cut off: then nobody was told.
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
            ("create" | "overwrite", path) => {
                self.files.insert(path.to_owned(), words[2].parse().unwrap());
            }
            ("unlink", path) => {
                self.files.remove(path).unwrap();
            }
            ("mkdir", path) => {
                self.dirs.insert(path.to_owned());
            }
            ("rename", from) => {
                let to = words[2].as_str();
                let moved = |path: &str| {
                    path.strip_prefix(from)
                        .filter(|rest| rest.is_empty() || rest.starts_with('/'))
                        .map(|rest| format!("{to}{rest}"))
                };
                self.files = std::mem::take(&mut self.files)
                    .into_iter()
                    // Whom it replaces goes first.
                    .filter(|(path, _)| path != to)
                    .map(|(path, id)| (moved(&path).unwrap_or(path), id))
                    .collect();
                self.dirs =
                    std::mem::take(&mut self.dirs).into_iter().map(|path| moved(&path).unwrap_or(path)).collect();
            }
            (other, _) => panic!("an operation {other}"),
        }
    }

    /// All states that are allowed: the open operation was carried out, or it was not.
    pub fn allowed(&self) -> Vec<Self> {
        let before = Self { open: None, ..self.clone() };
        let mut all = Vec::new();
        match &self.open {
            None => all.push(before),
            Some(open) => {
                let mut after = before.clone();
                after.apply(&open.words);
                // What was synced is promised: only with these bytes.
                if !open.synced {
                    all.push(before);
                }
                all.push(after);
            }
        }
        all
    }

    /// The file that was being written when the end came: its bytes may be any, unless they were synced.
    pub fn half_written(&self) -> Option<&str> {
        let open = self.open.as_ref().filter(|open| !open.synced)?;
        matches!(open.words[0].as_str(), "create" | "overwrite").then(|| open.words[1].as_str())
    }
}
