//! The driver's operations on the store, as counts: for reports, and for tests that must not depend on time.

use surgetank_types::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub struct Counters {
    pub bytes_written: Counter,
    pub bytes_read_back: Counter,
    pub files_cloned: Counter,
    pub fsyncs: Counter,
    pub file_system_syncs: Counter,
    pub renames: Counter,
    pub overwrites: Counter,
    pub stats: Counter,
}

/// The counters at one moment, since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Counts {
    /// Bytes copied into temporaries or over existing files, without cloned extents and holes.
    pub bytes_written: u64,
    /// Bytes read again to verify.
    pub bytes_read_back: u64,
    /// Number of files that share their source's extents.
    pub files_cloned: u64,
    /// Number of files synced separately.
    pub fsyncs: u64,
    /// Number of syncs of the whole file system.
    pub file_system_syncs: u64,
    /// Number of renames.
    pub renames: u64,
    /// Number of publications over an existing file in place.
    pub overwrites: u64,
    /// Number of look-ups of a file's attributes.
    pub stats: u64,
}

impl Counters {
    pub fn counts(&self) -> Counts {
        Counts {
            bytes_written: self.bytes_written.get(),
            bytes_read_back: self.bytes_read_back.get(),
            files_cloned: self.files_cloned.get(),
            fsyncs: self.fsyncs.get(),
            file_system_syncs: self.file_system_syncs.get(),
            renames: self.renames.get(),
            overwrites: self.overwrites.get(),
            stats: self.stats.get(),
        }
    }
}
