//! The deadline: the end of the job is known. The undrained bytes stay few enough that the drain can bring them to the
//! store in time, at its measured speed.
//!
//! Beyond that limit a new file goes to a temporary in the store, where it needs no copy to become durable. An open
//! mediated file moves there. When half of the limit is undrained, or the end is near, quiet periods and `last` lose
//! their effect.
//!
//! The danger that this avoids: a scheduler wipes the tiers while they hold files that cannot be drained in time.

use std::time::Duration;

use surgetank_policy::config::{Config, Deadline, Survives};
use surgetank_policy::placement::DirtyRoom;
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::model::Mode;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::end::End;
use crate::metadata::Metadata;

/// The speed before any measurement: below that of most shared file systems.
const ASSUMED_BYTES_PER_SECOND: u64 = 32 << 20;
/// The share of the measured speed that is counted on: other jobs use the store too.
const COUNTED_ON: f64 = 0.75;
/// At this many leads before the end, no operation waits for a better moment.
const NEAR_LEADS: u32 = 4;
/// How often files that are never drained are counted.
const KEPT_LOOK_EVERY: Duration = Duration::from_secs(5);

/// The present outlook for the end of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    /// The end of the job.
    pub deadline: Deadline,
    /// Measured, or assumed before the first measurement.
    pub bytes_per_second: u64,
    /// `bytes_per_second` is a measurement.
    pub measured: bool,
    /// The bytes that can be drained until the end, with a margin.
    pub drainable_bytes: u64,
    /// The bytes that have to be drained until then.
    pub undrained_bytes: u64,
}

/// Decides by the end of the job what may still be begun on a tier.
pub struct DeadlineWatch {
    config: Arc<Config>,
    end: Arc<End>,
    tiers: Arc<Tiers>,
    metadata: Arc<Metadata>,
}

impl DeadlineWatch {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        Self {
            config: base.config.clone(),
            end: base.end.clone(),
            tiers: base.tiers.clone(),
            metadata: metadata.clone(),
        }
    }

    /// The job ends: all operations are due, and no file is begun where it may be wiped.
    pub fn job_ends(&self) {
        self.end.come.store(true, Ordering::Relaxed);
        self.press(true);
    }

    pub(crate) fn press_for_memory(&self, on: bool) {
        if self.end.short_of_memory.swap(on, Ordering::Relaxed) != on && on {
            tracing::info!("memory is short: what is undrained there is due, and moved away");
            self.hasten();
        }
    }

    /// Undrained bytes on tiers that are wiped with the node, and their limit; `None` if no end is known.
    pub(crate) fn room_until_the_end(&self) -> Option<DirtyRoom> {
        if self.end.come.load(Ordering::Relaxed) {
            return Some(DirtyRoom { bytes: self.wiped_bytes(), bytes_max: 0 });
        }
        let deadline = self.config.deadline.as_ref()?;
        Some(DirtyRoom { bytes: self.wiped_bytes(), bytes_max: self.drainable_bytes(deadline) })
    }

    /// The outlook now; `None`: the end of the job is unknown.
    pub fn outlook(&self) -> Option<Outlook> {
        let deadline = self.config.deadline.clone()?;
        let (bytes_per_second, measured) = self.bytes_per_second();
        let drainable_bytes = self.drainable_bytes(&deadline);
        Some(Outlook { bytes_per_second, measured, drainable_bytes, undrained_bytes: self.wiped_bytes(), deadline })
    }

    fn bytes_per_second(&self) -> (u64, bool) {
        let measured = self.end.pace().bytes_per_second;
        let limit = match self.config.drain_bytes_per_second_max {
            0 => u64::MAX,
            limit => limit,
        };
        (measured.unwrap_or(ASSUMED_BYTES_PER_SECOND).min(limit), measured.is_some())
    }

    fn drainable_bytes(&self, deadline: &Deadline) -> u64 {
        let file_takes = self.end.pace().file_takes.unwrap_or_default();
        // This counts names and attributes too, each of which takes less.
        let files = u32::try_from(self.metadata.read_tree().ops.len()).unwrap_or(u32::MAX);
        let time = deadline.left().saturating_sub(deadline.lead).saturating_sub(file_takes.saturating_mul(files));
        (time.as_secs_f64() * self.bytes_per_second().0 as f64 * COUNTED_ON) as u64
    }

    /// The undrained bytes that an end of the job would wipe now. Files that the rules keep from the store do not count.
    fn wiped_bytes(&self) -> u64 {
        let dirty: u64 = {
            let tree = self.metadata.read_tree();
            let wiped = self.tiers.devices().filter(|device| device.survives() != Survives::Node);
            wiped.map(|device| self.metadata.dirty_bytes_on(&tree, device)).sum()
        };
        dirty.saturating_sub(self.end.kept_bytes.load(Ordering::Relaxed))
    }

    /// Called in every poll.
    pub(crate) fn watch_the_end(&self) {
        if self.end.come.load(Ordering::Relaxed) {
            return;
        }
        let Some(deadline) = &self.config.deadline else { return };
        self.count_kept();
        let late = self.room_until_the_end().is_some_and(|room| room.bytes > room.bytes_max / 2);
        self.press(late || deadline.left() <= deadline.lead * NEAR_LEADS);
    }

    /// Operations do not wait for a better moment any more (`on`), or may again.
    fn press(&self, on: bool) {
        if self.end.late.swap(on, Ordering::Relaxed) != on && on {
            self.hasten();
        }
    }

    /// Makes waiting operations due. (Later ones are checked when they are queued.)
    fn hasten(&self) {
        self.metadata.write_tree().drain_queue().hasten_all(clock::tick());
        self.metadata.wake();
    }

    fn count_kept(&self) {
        let rules = self.config.rules.iter();
        if rules.into_iter().all(|rule| !matches!(rule.mode, Some(Mode::Keep | Mode::Remove)))
            && !self.metadata.read_tree().hints.any()
        {
            return;
        }
        let mut counted = self.end.kept_counted.lock().unwrap_or_else(PoisonError::into_inner);
        if counted.is_some_and(|at| at.elapsed() < KEPT_LOOK_EVERY) {
            return;
        }
        *counted = Some(clock::tick());
        drop(counted);
        let kept = [Mode::Keep, Mode::Remove].into_iter().flat_map(|mode| self.metadata.kept(None, mode));
        self.end.kept_bytes.store(kept.map(|(_, _, bytes)| bytes).sum(), Ordering::Relaxed);
    }

    /// May the device hold this many more undrained bytes?
    pub(crate) fn dirty_allows(&self, device: &surgetank_tier::Device, more_bytes: u64) -> bool {
        use surgetank_policy::config::Survives;
        let survives = device.survives();
        if survives != Survives::Node && self.room_until_the_end().is_some_and(|room| !room.allows(more_bytes)) {
            return false;
        }
        let room = || DirtyRoom { bytes: self.metadata.volatile_dirty_bytes(), bytes_max: self.config.dirty_bytes_max };
        survives != Survives::Agent || room().allows(more_bytes)
    }
}
