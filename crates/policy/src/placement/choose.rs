//! The choice of a device.
//!
//! Placement tries the fastest tier first. With a preferred tier it tries that one, then the slower ones, then the faster
//! ones. Within a tier the best device is the one with the most free space and the least load; among near equals a salt
//! from the caller decides. There are two rounds: first a place where the whole file is known to fit, then a place to
//! begin, from which the agent moves the file.
//!
//! Invariants:
//! - no file is put on a device out of use, or on a volatile one when it must persist;
//! - a reservation never exceeds the free space;
//! - `direct` needs a reservation or ample space;
//! - undrained data on volatile tiers stays below its limit, and so does the data to drain before the job ends.
//!
//! The danger that it avoids: a program gets ENOSPC while another tier is empty.

use surgetank_types::sync::Arc;

use super::reason::{Basis, Guarantee, Reason, Skip};
use super::view::{DeviceView, POLL_PERIOD};
use crate::config::Survives;
use surgetank_types::model::{DeviceId, Mode};

/// Fewer files of a class say nothing about the next one.
pub(super) const HISTORY_SAMPLES_MIN: u32 = 3;
/// A reservation by history is this many times the largest size seen.
const HISTORY_FACTOR: u64 = 2;
/// The smallest reservation for a file to be written, so that “direct” always has some space.
const RESERVE_BYTES_MIN: u64 = 64 << 10;
/// A mediated writer begins where this much is free (or 1/64 of the cap, if that is less).
const BEGIN_BYTES: u64 = 1 << 20;
/// A prefetch leaves a sixteenth of the cap to writers.
const PREFETCH_LEAVES_SHARE: u64 = 16;
/// A device counts as equal to the best of its tier if it is within this part of it.
const EQUAL_SHARE: u64 = 16;

/// The expected size of a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Neither a hint or rule nor earlier files tell.
    Unknown,
    /// A hint or rule names the size, in bytes.
    Hint(u64),
    /// Earlier files of the same class tell.
    History {
        /// The largest of them, in bytes.
        max_bytes: u64,
        /// How many of them were seen.
        samples: u32,
    },
}

/// Why a file needs a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskKind {
    /// A program creates the file.
    Create {
        /// Its expected size.
        expected: Expected,
    },
    /// A file that is being written has to leave its device.
    Spill {
        /// Bytes that the file has.
        have_bytes: u64,
        /// Further bytes that the writer needs.
        want_bytes: u64,
        /// The device that it leaves.
        from: DeviceId,
    },
    /// A program opens a file of the store for writing.
    CopyUp {
        /// Size of the store's file.
        bytes: u64,
    },
    /// A rule or hint has a file of the store copied to a tier before its use.
    Prefetch {
        /// Size of the store's file.
        bytes: u64,
    },
    /// A program reads a file of the store that can only be read on a tier.
    Fetch {
        /// Size of the store's file.
        bytes: u64,
    },
}

/// Undrained bytes on some tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyRoom {
    /// Undrained bytes now, with the reservations of open writers.
    pub bytes: u64,
    /// The most that is allowed.
    pub bytes_max: u64,
}

impl DirtyRoom {
    /// Whether so many further bytes stay within the limit.
    pub fn allows(self, more_bytes: u64) -> bool {
        self.bytes.saturating_add(more_bytes) <= self.bytes_max
    }
}

/// A request for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Why the file needs a place.
    pub kind: AskKind,
    /// Index of the tier that a hint or rule prefers.
    pub preferred_tier: Option<u8>,
    /// Whether this writer can use a direct descriptor at all.
    pub direct_possible: bool,
    /// Whether the file must survive the loss of the node's memory (fsync means the tier).
    pub must_persist: bool,
    /// What happens to the file after it is written.
    pub mode: Mode,
    /// Undrained bytes on volatile tiers.
    pub dirty: DirtyRoom,
    /// Undrained bytes on all tiers that are lost with the node; `None` if the end of the job is unknown.
    pub until_the_end: Option<DirtyRoom>,
    /// Chooses among equal devices: a counter, or a hash of the path.
    pub salt: u64,
}

/// The chosen place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A device of a tier.
    Device {
        /// The device.
        id: DeviceId,
        /// Whether the writer may get a direct descriptor.
        direct: bool,
        /// Bytes that the caller must first reserve by `try_reserve`.
        reserve_bytes: u64,
    },
    /// The store: no tier can take the file.
    Store,
}

/// Free bytes that one more direct writer needs, so that no writer runs out of space before the next poll.
pub fn ample_bytes(view: &DeviceView) -> u64 {
    unseen_bytes(view, u64::from(view.writers) + 1)
}

/// Bytes that this many direct writers could write within two polls.
fn unseen_bytes(view: &DeviceView, writers: u64) -> u64 {
    let period_ms = POLL_PERIOD.as_millis() as u64;
    let one_writer_bytes = view.bandwidth_bytes_per_second.saturating_mul(2 * period_ms) / 1000;
    writers.saturating_mul(one_writer_bytes)
}

/// Whether one more direct writer may begin without a reservation.
fn is_ample(view: &DeviceView) -> bool {
    view.free_bytes >= ample_bytes(view)
}

/// The known size of the file, and its basis.
fn known_size(ask: &Ask) -> Option<(u64, Basis)> {
    match ask.kind {
        AskKind::Create { expected: Expected::Hint(bytes) } => Some((bytes.max(RESERVE_BYTES_MIN), Basis::Hint)),
        AskKind::Create { expected: Expected::History { max_bytes, samples } } if samples >= HISTORY_SAMPLES_MIN => {
            let bytes = max_bytes.saturating_mul(HISTORY_FACTOR).max(RESERVE_BYTES_MIN);
            Some((bytes, Basis::History { max_bytes, samples }))
        }
        AskKind::Create { .. } => None,
        AskKind::Spill { have_bytes, want_bytes, .. } => Some((have_bytes.saturating_add(want_bytes), Basis::Content)),
        AskKind::CopyUp { bytes } | AskKind::Prefetch { bytes } | AskKind::Fetch { bytes } => {
            Some((bytes, Basis::Content))
        }
    }
}

/// Chooses the place of a file, with the reason. `views` are all devices, fastest tier first.
pub fn choose(ask: &Ask, views: &[DeviceView]) -> (Place, Reason) {
    let order = tier_order(ask, views);
    let size = known_size(ask);
    let mut skipped = Vec::new();

    if let Some((bytes, basis)) = size {
        for tier in &order {
            match best_of(ask, views, *tier, |view| whole_fits(ask, views, view, bytes)) {
                Ok(view) => {
                    let reserved = Guarantee::Reserved { bytes, basis };
                    return placed(
                        ask,
                        view,
                        direct_with_reservation(ask, views, view, bytes),
                        bytes,
                        reserved,
                        skipped,
                    );
                }
                Err(skip) => skipped.extend(skip),
            }
        }
        // Bytes that exist already need their space now; only a file that is still to be written can begin with little.
        if !matches!(ask.kind, AskKind::Create { .. }) {
            return (Place::Store, Reason::Store { skipped });
        }
        skipped.clear();
    }

    for tier in &order {
        match best_of(ask, views, *tier, |view| can_begin(ask, view)) {
            Ok(view) => {
                let ample = size.is_none() && ask.direct_possible && ample_for(ask, views, view);
                let guarantee = match ample {
                    true => Guarantee::Ample { bytes: ample_bytes(view) },
                    false => Guarantee::Mediated,
                };
                return placed(ask, view, ample, 0, guarantee, skipped);
            }
            Err(skip) => skipped.extend(skip),
        }
    }
    (Place::Store, Reason::Store { skipped })
}

fn placed(
    ask: &Ask,
    view: &DeviceView,
    direct: bool,
    reserve_bytes: u64,
    guarantee: Guarantee,
    skipped: Vec<(Arc<str>, Skip)>,
) -> (Place, Reason) {
    let reason = Reason::Tier {
        tier: Arc::clone(&view.tier_name),
        preferred: ask.preferred_tier == Some(view.id.tier),
        free_bytes: view.free_bytes,
        guarantee,
        skipped,
    };
    (Place::Device { id: view.id, direct, reserve_bytes }, reason)
}

/// The preferred tier, then the slower ones, then the faster ones; without a preference, fastest first.
fn tier_order(ask: &Ask, views: &[DeviceView]) -> Vec<u8> {
    let mut tiers: Vec<u8> = views.iter().map(|view| view.id.tier).collect();
    tiers.sort_unstable();
    tiers.dedup();
    if let Some(preferred) = ask.preferred_tier {
        let faster = tiers.partition_point(|tier| *tier < preferred);
        tiers.rotate_left(faster);
    }
    tiers
}

/// Whether this file counts against the limit of undrained data.
fn is_dirty(ask: &Ask) -> bool {
    let drained = matches!(ask.mode, Mode::Copy | Mode::Move);
    drained && !matches!(ask.kind, AskKind::Prefetch { .. } | AskKind::Fetch { .. })
}

/// Why the device is excluded whatever its free space.
fn barred(ask: &Ask, view: &DeviceView) -> Option<Skip> {
    if let AskKind::Spill { from, .. } = ask.kind
        && (view.id == from || view.id.tier < from.tier)
    {
        return Some(Skip::SpilledFrom);
    }
    if !view.healthy {
        return Some(Skip::Sick);
    }
    (ask.must_persist && view.survives == Survives::Agent).then_some(Skip::Volatile)
}

/// Whether the device may hold this many further undrained bytes.
fn dirty_allows(ask: &Ask, view: &DeviceView, bytes: u64) -> Result<(), Skip> {
    if !is_dirty(ask) {
        return Ok(());
    }
    if view.survives != Survives::Node
        && let Some(room) = ask.until_the_end
        && !room.allows(bytes)
    {
        return Err(Skip::TooLate { dirty_bytes: room.bytes, drainable_bytes: room.bytes_max });
    }
    if view.survives != Survives::Agent || ask.dirty.allows(bytes) {
        return Ok(());
    }
    Err(Skip::Undrained { dirty_bytes: ask.dirty.bytes, dirty_bytes_max: ask.dirty.bytes_max })
}

fn has_room(view: &DeviceView, wanted_bytes: u64) -> Result<(), Skip> {
    if view.free_bytes >= wanted_bytes {
        return Ok(());
    }
    Err(Skip::NoRoom { free_bytes: view.free_bytes, wanted_bytes })
}

fn whole_fits(ask: &Ask, views: &[DeviceView], view: &DeviceView, bytes: u64) -> Result<(), Skip> {
    let wanted_bytes = match ask.kind {
        AskKind::Prefetch { .. } => bytes.saturating_add(view.cap_bytes / PREFETCH_LEAVES_SHARE),
        _ => bytes,
    };
    has_room(view, wanted_bytes)?;
    // A spill between volatile devices moves bytes that already count.
    let more_dirty_bytes = match ask.kind {
        AskKind::Spill { want_bytes, from, .. } if is_volatile(views, from) => want_bytes,
        _ => bytes,
    };
    dirty_allows(ask, view, more_dirty_bytes)
}

fn is_volatile(views: &[DeviceView], id: DeviceId) -> bool {
    views.iter().any(|view| view.id == id && view.survives == Survives::Agent)
}

fn can_begin(ask: &Ask, view: &DeviceView) -> Result<(), Skip> {
    let begin_bytes = BEGIN_BYTES.min(view.cap_bytes / 64).max(1);
    has_room(view, begin_bytes)?;
    dirty_allows(ask, view, begin_bytes)
}

/// Whether the file may be direct with its reservation. A created file may. A copied-up file may grow by an unknown amount, so
/// it needs ample space too. A spilled file stays mediated, and a prefetched one is not written.
fn direct_with_reservation(ask: &Ask, views: &[DeviceView], view: &DeviceView, bytes: u64) -> bool {
    let guaranteed = match ask.kind {
        AskKind::Create { .. } => true,
        AskKind::CopyUp { .. } => {
            let rest = DeviceView { free_bytes: view.free_bytes.saturating_sub(bytes), ..view.clone() };
            let dirty = DirtyRoom { bytes: ask.dirty.bytes.saturating_add(bytes), ..ask.dirty };
            ample_for(&Ask { dirty, ..*ask }, views, &rest)
        }
        AskKind::Spill { .. } | AskKind::Prefetch { .. } | AskKind::Fetch { .. } => false,
    };
    ask.direct_possible && guaranteed
}

/// Ample on the device, and ample below the limit of undrained data with everything that the writers of volatile tiers could
/// add.
fn ample_for(ask: &Ask, views: &[DeviceView], view: &DeviceView) -> bool {
    let writers_bytes: u64 = views
        .iter()
        .filter(|other| other.survives == Survives::Agent && other.id != view.id)
        .map(|other| unseen_bytes(other, u64::from(other.writers)))
        .fold(ample_bytes(view), u64::saturating_add);
    is_ample(view) && dirty_allows(ask, view, writers_bytes).is_ok()
}

/// The space that the device has for new files: free less what its direct writers may take, less for a busy one.
fn weight(view: &DeviceView) -> u128 {
    let calm_bytes = view.free_bytes.saturating_sub(unseen_bytes(view, u64::from(view.writers)));
    let bandwidth = u128::from(view.bandwidth_bytes_per_second.max(1));
    // Scaled, so that devices whose writers may take everything still differ by their free space.
    let scaled = (u128::from(calm_bytes) << 8) + u128::from(view.free_bytes >> 8);
    scaled * bandwidth / (bandwidth + u128::from(view.load_bytes_per_second))
}

/// The best device of a tier that passes, or the obstacle of the tier.
fn best_of<'v>(
    ask: &Ask,
    views: &'v [DeviceView],
    tier: u8,
    passes: impl Fn(&DeviceView) -> Result<(), Skip>,
) -> Result<&'v DeviceView, Option<(Arc<str>, Skip)>> {
    let mut fit: Vec<(&DeviceView, u128)> = Vec::new();
    let mut obstacle: Option<(Arc<str>, Skip)> = None;
    for view in views.iter().filter(|view| view.id.tier == tier) {
        match barred(ask, view).map_or_else(|| passes(view), Err) {
            Ok(()) => fit.push((view, weight(view))),
            Err(skip) => {
                // Of several devices the one that came closest gives the tier's reason.
                let closer = match (&obstacle, skip) {
                    (None, _) => true,
                    (Some((_, Skip::NoRoom { free_bytes: best, .. })), Skip::NoRoom { free_bytes, .. }) => {
                        free_bytes > *best
                    }
                    (Some((_, Skip::Sick | Skip::SpilledFrom)), other) => {
                        !matches!(other, Skip::Sick | Skip::SpilledFrom)
                    }
                    _ => false,
                };
                if closer {
                    obstacle = Some((Arc::clone(&view.tier_name), skip));
                }
            }
        }
    }
    let Some(best) = fit.iter().map(|(_, weight)| *weight).max() else {
        return Err(obstacle);
    };
    let equal = best - best / u128::from(EQUAL_SHARE);
    fit.retain(|(_, weight)| *weight >= equal);
    fit.sort_unstable_by_key(|(view, _)| view.id);
    // Not empty: it contains the best device.
    Ok(fit[(ask.salt % fit.len() as u64) as usize].0)
}

#[cfg(test)]
mod tests;
