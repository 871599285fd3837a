//! What the drain counts, for status and metrics.

use surgetank_types::sync::atomic::AtomicU64;

/// Since the agent started.
#[derive(Debug, Default)]
pub struct DrainCounters {
    /// Files made durable.
    pub files: AtomicU64,
    /// Bytes of those files, without holes.
    pub bytes: AtomicU64,
    /// Copied bytes, with repeated copies and with files whose copy is not complete yet.
    pub staged_bytes: AtomicU64,
    /// Completed operations: files, renames, deletes, changes of attributes.
    pub operations: AtomicU64,
    /// Failed tries.
    pub failures: AtomicU64,
    /// Copies that differed from their files; the drain discarded them and copied again.
    pub corrupt: AtomicU64,
    /// Files that another client changed in the store meanwhile.
    pub conflicts: AtomicU64,
}
