//! The choice of files to evict.
//!
//! Only files that are durable (or that their rule lets drop), unpinned and not open are evicted. The least valuable go first;
//! the value is the cost of fetching a byte again times the probability of its use. Small files cost more per byte, and
//! recently or often read files are more probably used.
//!
//! Before all of them go, in order: temporaries that may be dropped, files with mode `move`, files that no program reads again,
//! and prefetched files that were read. After all of them go files that are known to be read again, the latest first (L. A.
//! Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966: this needs the
//! fewest fetches).
//!
//! There is no full sort: a heap holds only the victims needed so far, so n candidates and k victims take O(n log k).

use std::collections::BinaryHeap;
use std::fmt;
use std::time::Duration;

use crate::hint::NextRead;
use surgetank_types::model::{FileId, Mode};

/// Cost of a fetch before its first byte, in bytes.
const FETCH_OVERHEAD_BYTES: u64 = 256 << 10;

/// A file on a tier, with what decides about its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The file.
    pub id: FileId,
    /// Bytes that its eviction frees.
    pub bytes: u64,
    /// Whether the store has exactly this version, verified and synced.
    pub durable: bool,
    /// Whether a rule, a hint or `surgetank pin` pins it.
    pub pinned: bool,
    /// Whether a program has it open.
    pub open: bool,
    /// What happens to the file after it is written.
    pub mode: Mode,
    /// Whether its rule lets it be dropped undrained, and no program needs it any more. Counts for `Mode::Remove` only.
    pub droppable: bool,
    /// Whether it was fetched before its use.
    pub prefetched: bool,
    /// The next read, as the workflow's graph has it.
    pub next_read: Option<NextRead>,
    /// Number of opens for reading since it is on the tier.
    pub reads: u32,
    /// Time since its last use.
    pub idle: Duration,
}

/// Why a file is evicted. `Display` prints it as a sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictReason {
    /// A temporary that its rule lets drop.
    Droppable,
    /// Its mode is `move`, and it is in the store.
    Moved,
    /// No program will read it again.
    ReadNoMore,
    /// It was prefetched, and has been read.
    PrefetchedAndRead,
    /// All other candidates will be read sooner.
    WantedLatest {
        /// Position of its next read in the workflow's order.
        next_read: u64,
    },
    /// It is in the store, and has the least value per byte.
    LeastValuable {
        /// Time since its last use.
        idle: Duration,
        /// Number of opens for reading since it is on the tier.
        reads: u32,
    },
}

impl fmt::Display for EvictReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Droppable => f.write_str("dropped: a temporary that its rule (remove) lets go when room is wanted"),
            Self::Moved => f.write_str("evicted: it is in the store, and its rule (move) wants it only there"),
            Self::ReadNoMore => {
                f.write_str("evicted: it is in the store, and a hint says that no program will read it again")
            }
            Self::WantedLatest { next_read } => write!(
                f,
                "evicted: it is in the store, and of what hints say is read again it comes last (next_read {next_read})"
            ),
            Self::PrefetchedAndRead => f.write_str("evicted: it was prefetched, has been read, and is in the store"),
            Self::LeastValuable { idle, reads } => write!(
                f,
                "evicted: it is in the store and was the least likely to be missed (read {reads} times, last used {} s ago)",
                idle.as_secs()
            ),
        }
    }
}

/// Classes in the order in which they are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Droppable,
    Moved,
    ReadNoMore,
    PrefetchedAndRead,
    Ordinary,
    Planned,
}

impl Candidate {
    /// Whether it may be evicted at all.
    fn evictable(&self) -> bool {
        let unneeded = self.durable || (self.mode == Mode::Remove && self.droppable);
        unneeded && !self.pinned && !self.open && self.bytes > 0
    }

    fn class(&self) -> Class {
        if self.mode == Mode::Remove && self.droppable {
            Class::Droppable
        } else if self.mode == Mode::Move {
            Class::Moved
        } else {
            match self.next_read {
                Some(NextRead::Never) => Class::ReadNoMore,
                Some(NextRead::At(_)) => Class::Planned,
                None if self.prefetched && self.reads > 0 => Class::PrefetchedAndRead,
                None => Class::Ordinary,
            }
        }
    }

    fn reason(&self) -> EvictReason {
        match self.class() {
            Class::Droppable => EvictReason::Droppable,
            Class::Moved => EvictReason::Moved,
            Class::ReadNoMore => EvictReason::ReadNoMore,
            Class::PrefetchedAndRead => EvictReason::PrefetchedAndRead,
            Class::Planned => EvictReason::WantedLatest { next_read: self.turn() },
            Class::Ordinary => EvictReason::LeastValuable { idle: self.idle, reads: self.reads },
        }
    }

    fn turn(&self) -> u64 {
        match self.next_read {
            Some(NextRead::At(turn)) => turn,
            _ => 0,
        }
    }

    /// Cost of fetching a byte again × probability of use, in an arbitrary scale; greater is worth more.
    fn value(&self) -> u128 {
        if self.class() == Class::Planned {
            return u128::from(u64::MAX - self.turn());
        }
        let cost_per_mebibyte =
            u128::from(FETCH_OVERHEAD_BYTES.saturating_add(self.bytes)) * (1 << 20) / u128::from(self.bytes.max(1));
        // A prefetched file that was not read yet is about to be read.
        let uses = u128::from(self.reads) + if self.prefetched && self.reads == 0 { 16 } else { 1 };
        // Idle time in tenths of a second, so that a burst of files of one second still differs.
        let idle = self.idle.as_millis() / 100 + 1;
        cost_per_mebibyte * uses * (1 << 20) / idle
    }
}

/// Order of keeping: class, value, then id, so that the outcome is deterministic.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kept {
    class: Class,
    value: u128,
    id: FileId,
    bytes: u64,
    reason: EvictReason,
}

/// The files to evict so that `want_bytes` are freed, least valuable first; all evictable files if they do not suffice. The
/// list is minimal: without any of its files too little would be freed.
pub fn victims(candidates: impl Iterator<Item = Candidate>, want_bytes: u64) -> Vec<(FileId, EvictReason)> {
    if want_bytes == 0 {
        return Vec::new();
    }
    let want_bytes = u128::from(want_bytes);
    // The most valuable victim so far is on top; it is released as soon as the others suffice.
    let mut chosen: BinaryHeap<Kept> = BinaryHeap::new();
    let mut chosen_bytes: u128 = 0;
    for candidate in candidates.filter(Candidate::evictable) {
        chosen_bytes += u128::from(candidate.bytes);
        chosen.push(Kept {
            class: candidate.class(),
            value: candidate.value(),
            id: candidate.id,
            bytes: candidate.bytes,
            reason: candidate.reason(),
        });
        while let Some(top) = chosen.peek()
            && chosen_bytes - u128::from(top.bytes) >= want_bytes
        {
            chosen_bytes -= u128::from(top.bytes);
            chosen.pop();
        }
    }
    // A large last victim may have made some unnecessary: the most valuable of those are released first.
    let mut victims = Vec::with_capacity(chosen.len());
    for kept in chosen.into_sorted_vec().into_iter().rev() {
        let others_bytes = chosen_bytes - u128::from(kept.bytes);
        if others_bytes >= want_bytes {
            chosen_bytes = others_bytes;
        } else {
            victims.push((kept.id, kept.reason));
        }
    }
    victims.reverse();
    victims
}

#[cfg(test)]
mod tests;
