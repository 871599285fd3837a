//! What the driver did to the store, in counts: for reports, and for tests that must not depend on time.

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

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Counts {
    /// Copied into temporaries or over existing files; cloned extents and holes are not among them.
    pub bytes_written: u64,
    /// Read again to verify.
    pub bytes_read_back: u64,
    /// Files that share their source's extents.
    pub files_cloned: u64,
    pub fsyncs: u64,
    pub file_system_syncs: u64,
    pub renames: u64,
    /// Publications that went over an existing file in place.
    pub overwrites: u64,
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
