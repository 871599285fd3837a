//! Everything that is counted or measured of a served directory at one moment: what the metrics are made of.
//!
//! Beside what `status` and the summary say, what only a graph over time is interested in.

use super::run::Event;
use super::{Status, Summary};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Figures {
    pub status: Status,
    /// Since the agent started, of all runs.
    pub summary: Summary,
    pub tiers: Vec<TierFigures>,
    pub drain: DrainFigures,
    /// Asked of the store because a program wanted to know: attributes of a name, and whole directories.
    pub store_lookups: u64,
    pub store_listings: u64,
    /// What was decided and met, by kind, place and reason.
    pub events: Vec<Event>,
}

/// Of one tier, all its devices together; since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierFigures {
    pub name: String,
    /// That are there now.
    pub files: u64,
    pub evictions: u64,
    pub evicted_bytes: u64,
    /// Calls of a device that failed.
    pub errors: u64,
}

/// Of the drain, since the agent started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DrainFigures {
    /// Read for copies to the store, those that were made again included.
    pub copied_bytes: u64,
    /// Carried out in the store: files, renames, deletes.
    pub operations: u64,
    /// Somebody else had changed the store's file.
    pub conflicts: u64,
}
