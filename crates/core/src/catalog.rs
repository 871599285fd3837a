//! The catalog: what survives the agent. One node: a log with group commit and snapshots in redb.

use crate::error::Result;
use crate::model::{Change, Image};

/// Position in the log; grows with every commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Lsn(pub u64);

/// Remembers changes in order. Namespace and drain hold the live state in memory; the catalog holds it across deaths.
pub trait Catalog: Send + Sync {
    /// Appends one atomic batch. When it returns, the batch survives the death of the agent (not of the machine).
    fn commit(&self, changes: &[Change]) -> std::io::Result<Lsn>;
    /// Returns once everything up to `upto` survives the machine. Concurrent callers share one sync.
    fn sync(&self, upto: Lsn) -> std::io::Result<()>;
    /// The position of the last commit.
    fn position(&self) -> Lsn;
    /// All that was committed, read once at start.
    fn load(&self) -> Result<Image>;
    /// Starts over, empty: everything is in the store and nothing is left to remember.
    fn clear(&self) -> std::io::Result<()>;
}
