//! Background work that is not the drain's, and lives as long as it does: the tender, the syncs and the memory.

use std::time::Duration;

use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::{clock, heap};

use crate::base::Base;
use crate::drain::attempts::{Attempts, HANGS};
use crate::files::Files;

const POLL_PERIOD: Duration = Duration::from_millis(100);

/// After so many operations, and when the drain rests, freed memory is given back.
const OPERATIONS_MIN: u64 = 10_000;

/// The background work on open and closed files, and on tiers.
pub(crate) struct Maintenance {
    base: Base,
    files: Arc<Files>,
    attempts: Arc<Attempts>,
}

impl Maintenance {
    pub(super) fn new(base: &Base, files: &Arc<Files>, attempts: &Arc<Attempts>) -> Self {
        Self { base: base.clone(), files: files.clone(), attempts: attempts.clone() }
    }

    /// Watches devices, direct writers, and files that a program still holds open for writing.
    pub(super) fn tend_loop(&self) {
        let mut polled = clock::tick();
        let mut asked = polled;
        let (mut seen, mut given_back) = (0, 0);
        while !self.attempts.stopping() {
            self.files.opener.end_promises(crate::files::KEPT_FOR);
            let next = self.files.descriptors.seal_deferred();
            if polled.elapsed() >= POLL_PERIOD {
                polled = clock::tick();
                self.base.tiers.poll();
                self.files.deadline.watch_the_end();
                self.files.delegation.watch_delegations();
                self.files.eviction.watch_direct_writers();
                self.files.descriptors.retry_grants();
                self.files.synced_copies.sweep();
                let done = self.attempts.counters.operations.load(Ordering::Relaxed);
                if done == seen && done - given_back >= OPERATIONS_MIN {
                    given_back = done;
                    heap::give_back();
                }
                seen = done;
                if asked.elapsed() >= HANGS && self.attempts.hangs_for().is_some_and(|time| time >= HANGS) {
                    asked = clock::tick();
                    self.base.queries.ask_whether_alive();
                }
            }
            let until_poll = POLL_PERIOD.saturating_sub(polled.elapsed());
            let pause = next.map_or(until_poll, |next| next.min(until_poll)).max(Duration::from_micros(100));
            self.base.deferred.wait_deferred(pause, &|| self.attempts.stopping());
        }
    }

    /// Syncs the tiers' files that have been closed for a while.
    pub(super) fn sync_loop(&self) {
        while !self.attempts.stopping() {
            let next = self.files.syncs.sync_closed(false);
            self.files.syncs.wait_unsynced(next, &|| self.attempts.stopping());
        }
    }

    /// Keeps the tiers in memory within the job's memory limit.
    pub(super) fn memory_loop(&self) {
        while !self.attempts.stopping() {
            let next = self.files.memory_pressure.relieve_memory();
            self.files.memory_pressure.wait_memory_pressure(next, &|| self.attempts.stopping());
        }
    }
}
