//! The operations that wait for the end of their run, found by number, by file, by directory and by name.
//!
//! An operation that must not wait takes with it all that it builds on. The danger that this avoids: each such operation
//! walks over the whole queue under the tree's lock.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::HashMap;

use surgetank_types::model::{FileId, Seq};

use crate::operation::{Op, places};
use crate::{Name, Place};

#[derive(Debug, Default)]
pub(crate) struct FinalOps {
    seqs: BTreeSet<Seq>,
    /// By [`Op::file`].
    of_file: HashMap<FileId, Vec<Seq>>,
    /// By each name that the operation is about.
    of_place: BTreeMap<Place, Vec<Seq>>,
}

impl FinalOps {
    pub fn insert(&mut self, seq: Seq, op: &Op) {
        self.seqs.insert(seq);
        self.of_file.entry(op.file()).or_default().push(seq);
        for place in places(&op.kind) {
            self.of_place.entry(place).or_default().push(seq);
        }
    }

    pub fn remove(&mut self, seq: Seq, op: &Op) {
        self.seqs.remove(&seq);
        if let Some(seqs) = self.of_file.get_mut(&op.file()) {
            seqs.retain(|other| *other != seq);
            if seqs.is_empty() {
                self.of_file.remove(&op.file());
            }
        }
        for place in places(&op.kind) {
            if let Some(seqs) = self.of_place.get_mut(&place) {
                seqs.retain(|other| *other != seq);
                if seqs.is_empty() {
                    self.of_place.remove(&place);
                }
            }
        }
    }

    pub fn first(&self) -> Option<Seq> {
        self.seqs.first().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = Seq> {
        self.seqs.iter().copied()
    }

    /// The operations on any of the files, on a name in any of the directories, or on any of the names, in order.
    pub fn about(&self, files: &[FileId], dirs: &[FileId], names: &[Place]) -> BTreeSet<Seq> {
        let of_files = files.iter().filter_map(|file| self.of_file.get(file));
        let in_dirs = dirs.iter().flat_map(|dir| self.of_place.range(first_in(*dir)..first_in(FileId(dir.0 + 1))));
        let of_names = names.iter().filter_map(|name| self.of_place.get(name));
        of_files.chain(in_dirs.map(|(_, seqs)| seqs)).chain(of_names).flatten().copied().collect()
    }
}

/// No name of the directory comes before it.
fn first_in(dir: FileId) -> Place {
    (dir, Name::from(&b""[..]))
}
