//! The choice of a device.
//!
//! Tiers in order, fastest first (a preferred tier before all); within a tier the freest devices by what is free and how
//! busy they are, and among near equals a caller-given salt takes turns. Two rounds: first a place where the whole
//! file is known to fit, then a place to begin, from which the agent moves it on.
//!
//! Invariants: nothing is put on a device out of use, or on a volatile one when it must persist; a reservation never
//! exceeds what is free; `direct` is promised only with a reservation or ample room; undrained data on volatile tiers
//! stays below its limit, and so does what has to be drained before the job ends. The danger avoided: a program that gets ENOSPC while another tier is empty.

use surgetank_types::sync::Arc;

use super::reason::{Basis, Guarantee, Reason, Skip};
use super::view::{DeviceView, POLL_PERIOD};
use crate::config::Survives;
use surgetank_types::model::{DeviceId, Mode};

/// Fewer files of a class say nothing about the next.
pub(super) const HISTORY_SAMPLES_MIN: u32 = 3;
/// A reservation by history: so many times the largest seen.
const HISTORY_FACTOR: u64 = 2;
/// No reservation for a file to be written is less, so that “direct” always has something behind it.
const RESERVE_BYTES_MIN: u64 = 64 << 10;
/// A mediated writer begins where this is free (or 1/64 of the cap, if that is less).
const BEGIN_BYTES: u64 = 1 << 20;
/// What a prefetch leaves to writers: a sixteenth of the cap.
const PREFETCH_LEAVES_SHARE: u64 = 16;
/// A device counts as equal to the best of its tier when it is within this part of it.
const EQUAL_SHARE: u64 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    Unknown,
    /// A hint or rule names the size.
    Hint(u64),
    History {
        max_bytes: u64,
        samples: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskKind {
    Create {
        expected: Expected,
    },
    /// A file that is being written has to leave its device: what it has, and what the writer wants more.
    Spill {
        have_bytes: u64,
        want_bytes: u64,
        from: DeviceId,
    },
    /// A file of the store that is opened for writing.
    CopyUp {
        bytes: u64,
    },
    Prefetch {
        bytes: u64,
    },
    /// A file of the store that somebody wants to read, and that can only be read in a tier.
    Fetch {
        bytes: u64,
    },
}

/// Undrained bytes on some tiers: now (with what open writers have reserved), and at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyRoom {
    pub bytes: u64,
    pub bytes_max: u64,
}

impl DirtyRoom {
    pub fn allows(self, more_bytes: u64) -> bool {
        self.bytes.saturating_add(more_bytes) <= self.bytes_max
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    pub kind: AskKind,
    pub preferred_tier: Option<u8>,
    /// Could this writer be given a direct descriptor at all?
    pub direct_possible: bool,
    /// Must outlive the node's memory (fsync means the tier).
    pub must_persist: bool,
    pub mode: Mode,
    pub dirty: DirtyRoom,
    /// The same on all tiers that go with the node, where the end of the job is known.
    pub until_the_end: Option<DirtyRoom>,
    /// Takes turns among equal devices: a counter, or a hash of the path.
    pub salt: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `direct`: a direct descriptor for *writing* may be given. `reserve_bytes`: to be had from `try_reserve` first.
    Device {
        id: DeviceId,
        direct: bool,
        reserve_bytes: u64,
    },
    Store,
}

/// What one more direct writer needs so that nobody runs out of room before the agent looks again.
pub fn ample_bytes(view: &DeviceView) -> u64 {
    unseen_bytes(view, u64::from(view.writers) + 1)
}

/// What so many direct writers could write within two polls.
fn unseen_bytes(view: &DeviceView, writers: u64) -> u64 {
    let period_ms = POLL_PERIOD.as_millis() as u64;
    let one_writer_bytes = view.bandwidth_bytes_per_second.saturating_mul(2 * period_ms) / 1000;
    writers.saturating_mul(one_writer_bytes)
}

/// May one more direct writer begin without a reservation?
pub fn is_ample(view: &DeviceView) -> bool {
    view.free_bytes >= ample_bytes(view)
}

/// What is known of the file's size, and why.
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

/// Chooses where the file goes.
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
        // Bytes that are there already need their place now; only a file that is still to be written can begin small.
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

/// The preferred tier, then the slower ones, then the faster ones; without a preference fastest first.
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

/// Counts this file against the limit of undrained data?
fn is_dirty(ask: &Ask) -> bool {
    let drained = matches!(ask.mode, Mode::Copy | Mode::Move);
    drained && !matches!(ask.kind, AskKind::Prefetch { .. } | AskKind::Fetch { .. })
}

/// Is the device out of the question whatever its room?
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

/// May `bytes` more of undrained data lie on this device?
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
    // A spill between volatile devices moves what is counted already.
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

/// With its room reserved a created file is direct. What is copied up grows by an unknown amount beyond its
/// reservation, so room must be ample besides. A spilled file stays mediated, a prefetched one is not written.
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

/// Ample on the device, and ample below the limit of undrained data with all that volatile tiers' writers could add.
fn ample_for(ask: &Ask, views: &[DeviceView], view: &DeviceView) -> bool {
    let writers_bytes: u64 = views
        .iter()
        .filter(|other| other.survives == Survives::Agent && other.id != view.id)
        .map(|other| unseen_bytes(other, u64::from(other.writers)))
        .fold(ample_bytes(view), u64::saturating_add);
    is_ample(view) && dirty_allows(ask, view, writers_bytes).is_ok()
}

/// What the device has for newcomers: free less what its direct writers may take, less for a busy one.
fn weight(view: &DeviceView) -> u128 {
    let calm_bytes = view.free_bytes.saturating_sub(unseen_bytes(view, u64::from(view.writers)));
    let bandwidth = u128::from(view.bandwidth_bytes_per_second.max(1));
    // Scaled, so that devices whose writers may take everything still differ by what is free.
    let scaled = (u128::from(calm_bytes) << 8) + u128::from(view.free_bytes >> 8);
    scaled * bandwidth / (bandwidth + u128::from(view.load_bytes_per_second))
}

/// The best device of a tier that passes, or why the tier's first obstacle is what it is.
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
                // Of several devices the one that came closest speaks for the tier.
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
    // Not empty: the best is in it.
    Ok(fit[(ask.salt % fit.len() as u64) as usize].0)
}

#[cfg(test)]
mod tests;
