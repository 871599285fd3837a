//! What the drain counts, for status and metrics.

use surgetank_types::sync::atomic::AtomicU64;

/// Since the agent started.
#[derive(Debug, Default)]
pub struct DrainCounters {
    pub files: AtomicU64,
    pub bytes: AtomicU64,
    /// Copied bytes, with repeated copies and with files whose copy is not complete yet.
    pub staged_bytes: AtomicU64,
    pub operations: AtomicU64,
    pub failures: AtomicU64,
    /// Copies that differed from their files; the drain discarded them and copied again.
    pub corrupt: AtomicU64,
    pub conflicts: AtomicU64,
}
