//! Hints as the state keeps them: of a file, of a directory for files made in it from then on, and of names that no
//! file has yet.

use std::collections::BTreeMap;
use surgetank_types::sync::Arc;

use foldhash::{HashMap, HashSet};

use surgetank_policy::hint::Hints;
use surgetank_types::model::{FileId, HintRecord, Hinted};

use crate::{Inode, OWN_INODE_BASE, Tree};

/// So many changes of a directory's hints are remembered. Files made before those count as made before any hint.
const CHANGES_MAX: usize = 64;

/// The hint history of one file or directory, oldest first: from which file on each holds.
#[derive(Debug, Default)]
pub struct HintHistory(Vec<(FileId, Arc<Hints>)>);

impl HintHistory {
    /// The hints that hold now, for a file, or for the next file made in a directory.
    pub fn now(&self) -> Option<&Arc<Hints>> {
        self.0.last().map(|(_, hints)| hints)
    }

    /// The directory's hints for a file with this number.
    pub fn for_file(&self, id: FileId) -> Option<&Arc<Hints>> {
        self.0.iter().rev().find(|(since, _)| *since <= id).map(|(_, hints)| hints)
    }

    /// Hints that hold from the file `since` on.
    pub fn put(&mut self, since: FileId, hints: Arc<Hints>) {
        if let Some(last) = self.0.last_mut().filter(|last| last.0 == since) {
            last.1 = hints;
            return;
        }
        if self.0.len() == CHANGES_MAX {
            self.0.remove(0);
        }
        self.0.push((since, hints));
    }

    /// The first file for which the newest hints hold.
    pub fn since(&self) -> Option<FileId> {
        self.0.last().map(|(since, _)| *since)
    }

    /// For the catalog.
    pub fn record(&self) -> HintRecord {
        let texts = |hints: &Hints| hints.texts().map(|(name, value)| (name.into(), value.into())).collect();
        self.0.iter().map(|(since, hints)| (*since, texts(hints))).collect()
    }

    /// From the catalog.
    pub fn of_record(record: &HintRecord) -> Self {
        let hints = |texts: &BTreeMap<Box<str>, Box<str>>| {
            Arc::new(Hints::of_texts(texts.iter().map(|(name, value)| (name.as_ref(), value.as_ref()))))
        };
        Self(record.iter().map(|(since, texts)| (*since, hints(texts))).collect())
    }
}

/// The hints of the whole tree.
#[derive(Debug, Default)]
pub struct KnownHints {
    /// True once any hint was given; without one no look-up is made.
    pub any: bool,
    /// Hints of names, by path.
    pub names: HashMap<Box<[u8]>, Arc<Hints>>,
    /// Directories with a hinted name.
    pub dirs: HashSet<Box<[u8]>>,
}

impl KnownHints {
    /// Whether any hint was ever given.
    pub fn any(&self) -> bool {
        self.any
    }

    /// The hints of a name, for a change.
    pub fn of_name(&mut self, path: &[u8]) -> &mut Arc<Hints> {
        self.any = true;
        self.dirs.insert(parent(path).into());
        self.names.entry(path.into()).or_default()
    }
}

impl Tree {
    /// A file or directory got this name: hints of the name become its hints.
    pub fn named(&mut self, id: FileId, path: &[u8]) {
        if self.hints.names.is_empty() {
            return;
        }
        let Some(given) = self.hints.names.get(path).cloned() else { return };
        self.change_hints(id, |said| said.update(&given));
        // (The catalog has no record of a file that only the store has.)
        if self.get(id).is_some_and(|inode| inode.owned) {
            self.txn.hints(Hinted::File(id));
        }
    }

    /// The hints that the catalog keeps; `None`: none.
    pub fn hint_record(&self, of: &Hinted) -> Option<HintRecord> {
        match of {
            Hinted::File(id) => self.get(*id).filter(|inode| inode.owned)?.hint_history().map(HintHistory::record),
            Hinted::Path(path) => {
                let hints = self.hints.names.get(path)?.clone();
                Some(HintHistory(vec![(FileId(0), hints)]).record())
            }
        }
    }

    /// The file at the path, as far as it is known without a query of the store.
    pub fn file_at(&self, path: &[u8]) -> Option<FileId> {
        let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        names.try_fold(FileId::ROOT, |dir, name| self.entry(dir, name)?.logical())
    }

    /// Changes the hints of the file, or of files made in the directory from now on.
    pub fn change_hints(&mut self, id: FileId, change: impl FnOnce(&mut Hints)) {
        let next = FileId(self.next_id);
        self.hints.any = true;
        let Some(inode) = self.get_mut(id) else { return };
        let since = if inode.is_dir() { next } else { FileId(0) };
        let said = &mut inode.extra_mut().hints;
        let mut hints = said.as_ref().and_then(|said| said.now()).map(|hints| Hints::clone(hints)).unwrap_or_default();
        change(&mut hints);
        said.get_or_insert_default().put(since, Arc::new(hints));
    }

    /// Would a file made in the directory have a hint from the start?
    pub fn is_hinted(&self, dir: FileId) -> bool {
        if !self.hints.any {
            return false;
        }
        let mut any = self.logical_path(dir).is_none_or(|path| self.hints.dirs.contains(path.as_slice()));
        self.inherited(dir, FileId(u64::MAX), |_, hints| any |= hints.has_effect());
        any
    }

    /// The file's or directory's own hints now.
    pub fn hints_of(&self, id: FileId) -> Option<&Arc<Hints>> {
        self.get(id).and_then(Inode::hint_history).and_then(HintHistory::now)
    }

    /// Hints of directories from `dir` upwards for the file, the nearest first.
    pub fn inherited(&self, dir: FileId, id: FileId, mut heard: impl FnMut(FileId, &Hints)) {
        let mut at = dir;
        while let Some(inode) = self.get(at) {
            if let Some(hints) = inode.hint_history().and_then(|said| said.for_file(id)) {
                heard(at, hints);
            }
            match inode.logical.as_ref() {
                Some((parent, _)) if at != FileId::ROOT => at = *parent,
                _ => return,
            }
        }
    }

    /// Every hint of the file, the nearest first, with the directory that has it.
    pub fn each_hint(&self, id: FileId, mut heard: impl FnMut(Option<FileId>, &Hints)) {
        let Some(inode) = self.get(id).filter(|_| self.hints.any) else { return };
        if let Some(own) = self.hints_of(id) {
            heard(None, own);
        }
        // Files of the store were not made below a hinted directory.
        if let Some((dir, _)) = inode.logical.as_ref().filter(|_| inode.attr.ino >= OWN_INODE_BASE) {
            self.inherited(*dir, id, |dir, hints| heard(Some(dir), hints));
        }
    }
}

/// The directory of a path.
pub fn parent(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |at| &path[..at])
}
