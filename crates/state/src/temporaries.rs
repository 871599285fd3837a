//! The directories of the store in which the drain's temporaries may be.
//!
//! The catalog records a directory before the first temporary is made there, so that the next agent finds and removes
//! what a killed agent left.

use std::time::Instant;

use foldhash::HashSet;

use surgetank_store::StorePath;
use surgetank_types::model::{FileId, Image};

use crate::{Tree, Txn};

const COUNTER: &str = "temporaries-in-";

/// Temporaries of the agent that left this may be in the store.
pub fn are_expected(image: &Image) -> bool {
    image.counters.iter().any(|(name, there)| *there > 0 && name.starts_with(COUNTER))
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
        let directory = |name: &str| name.strip_prefix(COUNTER)?.parse().ok().map(FileId);
        let dirs = image.counters.iter().filter(|(_, there)| **there > 0).filter_map(|(name, _)| directory(name));
        Self { dirs: dirs.collect(), inherited: None }
    }

    /// To be committed before the first temporary is made there.
    pub fn expect_in(dir: FileId, txn: &mut Txn) {
        txn.counter(format!("{COUNTER}{}", dir.0), 1);
    }

    /// No temporary is left in any of them.
    pub fn forget_all(&mut self, txn: &mut Txn) {
        for dir in std::mem::take(&mut self.dirs) {
            txn.counter(format!("{COUNTER}{}", dir.0), 0);
        }
    }

    /// Their paths in the store, as it is now.
    pub fn paths(&self, tree: &Tree) -> Vec<(FileId, StorePath)> {
        self.dirs.iter().filter_map(|dir| Some((*dir, tree.applied_path(*dir)?))).collect()
    }
}
