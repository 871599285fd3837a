//! Several programs in one world, without a reference: the facts that a test can check afterwards.

use std::collections::BTreeMap;
use std::path::Path;

use super::door::Mounted;
use super::world::World;
use surgetank_testkit::model::operation::Operation;
use surgetank_testkit::model::reference::{Kind, Outcome};

impl World {
    /// Another program on the same mount.
    pub fn another_program(&self) -> Mounted {
        Mounted::new(self.namespace().clone(), false, true)
    }

    /// Every file and its bytes, as programs see them.
    pub fn tree(&self) -> Result<BTreeMap<String, Vec<u8>>, String> {
        let mut program = self.another_program();
        let mut found = BTreeMap::new();
        let mut todo = vec![String::new()];
        while let Some(path) = todo.pop() {
            let (outcome, _) = program.apply(&Operation::List { path: path.clone() });
            let Outcome::Names(names) = outcome else { return Err(format!("listing {path}: {outcome:?}")) };
            for (name, kind) in names {
                let below = if path.is_empty() { name } else { format!("{path}/{name}") };
                match kind {
                    Kind::Directory => todo.push(below),
                    Kind::File => {
                        let content = program.content(&below).map_err(|errno| format!("reading {below}: {errno:?}"))?;
                        found.insert(below, content);
                    }
                    Kind::Symlink => {}
                }
            }
        }
        Ok(found)
    }

    /// Every file and its bytes in the store.
    pub fn stored(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        walk(&self.base.join("store"), "", &mut found);
        found
    }

    pub fn troubles(&self) -> Vec<String> {
        self.namespace().base.notes.troubles().iter().map(|noted| format!("{}: {}", noted.path, noted.what)).collect()
    }
}

fn walk(at: &Path, path: &str, found: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(at).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        let below = if path.is_empty() { name } else { format!("{path}/{name}") };
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            walk(&entry.path(), &below, found);
        } else if kind.is_file() {
            found.insert(below, std::fs::read(entry.path()).unwrap());
        }
    }
}
