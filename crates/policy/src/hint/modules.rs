//! The hints, each a module. A new one is a file beside these, and a line in [`ALL`].

mod blocks;
mod cache;
mod consistency;
mod drain_share;
mod placement;
mod replication;
mod transfer;
mod versions;

use crate::hint::module::Module;

/// All hints, by name. Of two hints that set the same attribute, an own name of Surgetank's is stronger than one of WOSS.
pub(crate) const ALL: [&dyn Module; 18] = [
    &transfer::Mode,
    &transfer::Timing,
    &placement::Size,
    &placement::Tier,
    &cache::Pin,
    &cache::Prefetch,
    &cache::NextRead,
    &replication::Replicas,
    &replication::ReplicasAt,
    &placement::Collocate,
    &drain_share::DrainShare,
    &consistency::Consistency,
    &versions::Versions,
    &placement::Dp,
    &replication::Replication,
    &replication::ReplicationSemantics,
    &cache::CacheSize,
    &blocks::BlockSize,
];
