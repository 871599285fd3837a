//! The list of files whose seal is deferred: a process still held them writable when the last writer closed. The agent tries
//! again; their `Open` stays.

use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::model::FileId;
use surgetank_types::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) const PAUSE_FIRST: Duration = Duration::from_millis(1);

/// In the order in which they were closed.
pub(crate) struct DeferredSeal {
    pub(crate) id: FileId,
    pub(crate) due: Instant,
    pub(crate) pause: Duration,
}

/// The files whose seal is deferred.
#[derive(Default)]
pub struct DeferredSeals {
    /// Files that a process still held writable when the last writer closed. The agent tries again; their `Open` stays.
    deferred: Mutex<Vec<DeferredSeal>>,
    /// Signalled when the seal of a file is deferred.
    came: Condvar,
}

impl DeferredSeals {
    pub(crate) fn deferred(&self) -> MutexGuard<'_, Vec<DeferredSeal>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn defer_seal(&self, id: FileId) {
        let mut deferred = self.deferred();
        deferred.retain(|other| other.id != id);
        deferred.push(DeferredSeal { id, due: clock::tick() + PAUSE_FIRST, pause: PAUSE_FIRST });
        drop(deferred);
        self.came.notify_all();
    }

    pub(crate) fn is_seal_deferred(&self, id: FileId) -> bool {
        self.deferred().iter().any(|other| other.id == id)
    }

    /// Ends the waits for deferred seals.
    pub(crate) fn end_deferred(&self) {
        drop(self.deferred.lock());
        self.came.notify_all();
    }

    /// Waits until another seal is deferred, for `at_most`.
    pub(crate) fn wait_deferred(&self, at_most: Duration, stop: &dyn Fn() -> bool) {
        let deferred = self.deferred();
        if !stop() {
            drop(self.came.wait_timeout(deferred, at_most));
        }
    }

    /// Files that no program has open any more, but that can still be written.
    pub(crate) fn deferred_files(&self) -> Vec<FileId> {
        self.deferred().iter().map(|one| one.id).collect()
    }
}
