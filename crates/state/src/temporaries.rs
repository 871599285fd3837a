//! The directories of the store in which the drain's temporaries may be.
//!
//! The catalog records a directory before the first temporary is made there, so that the next agent finds and removes
//! what a killed agent left.

use std::time::Instant;

use foldhash::HashSet;

use surgetank_store::StorePath;
use surgetank_types::model::{FileId, Image, Mark};

use crate::{Tree, Txn};

/// Temporaries of the agent that left this may be in the store.
pub fn are_expected(image: &Image) -> bool {
    image.marks.iter().any(|(mark, there)| *there > 0 && matches!(mark, Mark::Temporaries(_)))
}

/// Directories of the store that may have temporaries of this agent.
#[derive(Debug, Default)]
pub struct Temporaries {
    /// The directories.
    pub dirs: HashSet<FileId>,
    /// Since when this agent has continued after a killed one: a server may still make some for it in `dirs`.
    pub inherited: Option<Instant>,
}

impl Temporaries {
    /// From the catalog.
    pub fn remembered(image: &Image) -> Self {
        let directory = |(mark, there): (&Mark, &u64)| match mark {
            Mark::Temporaries(dir) if *there > 0 => Some(*dir),
            _ => None,
        };
        Self { dirs: image.marks.iter().filter_map(directory).collect(), inherited: None }
    }

    /// To be committed before the first temporary is made there.
    pub fn expect_in(dir: FileId, txn: &mut Txn) {
        txn.mark(Mark::Temporaries(dir), 1);
    }

    /// No temporary is left in any of them.
    pub fn forget_all(&mut self, txn: &mut Txn) {
        for dir in std::mem::take(&mut self.dirs) {
            txn.mark(Mark::Temporaries(dir), 0);
        }
    }

    /// Their paths in the store, as it is now.
    pub fn paths(&self, tree: &Tree) -> Vec<(FileId, StorePath)> {
        self.dirs.iter().filter_map(|dir| Some((*dir, tree.applied_path(*dir)?))).collect()
    }
}
