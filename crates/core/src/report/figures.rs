//! All counts and measurements of a served directory at one time: the source of the metrics.
//!
//! Besides the content of `status` and the summary, it has values that only a graph over time needs.

use super::run::Event;
use super::{PoolTraffic, Status, Summary};

/// All figures of a served directory at one time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Figures {
    /// The present state, as in `surgetank status`.
    pub status: Status,
    /// Since the agent started, of all runs.
    pub summary: Summary,
    /// Figures of each tier, in the configured order.
    pub tiers: Vec<TierFigures>,
    /// Figures of the drain.
    pub drain: DrainFigures,
    /// Attributes of a name that were requested from the store on behalf of a program.
    pub store_lookups: u64,
    /// Directories that were listed in the store on behalf of a program.
    pub store_listings: u64,
    /// Decisions and incidents, by kind, place and reason.
    pub events: Vec<Event>,
    /// The agent's pool; `None`: it belongs to none.
    pub pool: Option<PoolFigures>,
}

/// The pool of an agent, as this member sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PoolFigures {
    /// The number of members, this one too; `None`: the pool's process of this node does not answer.
    pub members: Option<usize>,
    /// Calls of this agent, since it started.
    pub traffic: PoolTraffic,
}

/// One tier with all its devices, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TierFigures {
    /// Name of the tier.
    pub name: String,
    /// Files that are there now.
    pub files: u64,
    /// Copies that left the tier because room was wanted; the store has their content.
    pub evictions: u64,
    /// Bytes that these evictions freed.
    pub evicted_bytes: u64,
    /// Failed calls of a device.
    pub errors: u64,
}

/// The drain, since the agent started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DrainFigures {
    /// Bytes read for copies to the store, repeated copies included.
    pub copied_bytes: u64,
    /// Operations in the store: files, renames, deletes.
    pub operations: u64,
    /// Another client had changed the store's file.
    pub conflicts: u64,
}
