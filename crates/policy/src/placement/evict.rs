//! Which files make room.
//!
//! Only what is durable (or may be dropped by its rule), unpinned and not open. The least valuable go first; value is
//! the cost of bringing a byte back times the chance that somebody wants it: small files cost more per byte, recent and
//! often read ones are more likely wanted. Before all of them go temporaries that may be dropped, files whose mode is
//! to be moved out, those that nobody will read again, and prefetched files that were read. After all of them goes what is
//! known to be read again, the latest first (Belady, "A study of replacement algorithms", 1966: it costs the fewest fetches).
//!
//! No full sort: a heap holds just the victims needed so far, so n candidates and k victims take O(n log k).

use std::collections::BinaryHeap;
use std::fmt;
use std::time::Duration;

use crate::hint::NextRead;
use surgetank_types::model::{FileId, Mode};

/// Bringing a file back costs as much as this many bytes, before its first byte comes.
const FETCH_OVERHEAD_BYTES: u64 = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    pub id: FileId,
    /// What its eviction frees.
    pub bytes: u64,
    /// The store has this very version, verified and synced.
    pub durable: bool,
    pub pinned: bool,
    pub open: bool,
    pub mode: Mode,
    /// Its rule says that it may be dropped undrained, and nobody needs it any more. Counts for `Mode::Remove` only.
    pub droppable: bool,
    /// It was brought in ahead of use.
    pub prefetched: bool,
    /// As the workflow's graph has it.
    pub next_read: Option<NextRead>,
    /// Opens for reading since it is here.
    pub reads: u32,
    /// Since it was last used.
    pub idle: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictReason {
    /// A temporary that its rule lets go.
    Droppable,
    /// Its mode is `move`: it was to leave once it is in the store.
    Moved,
    /// Nobody will read it any more.
    ReadNoMore,
    /// Prefetched and read.
    PrefetchedAndRead,
    /// It is wanted again, and all that may go is wanted sooner.
    WantedLatest { next_read: u64 },
    /// In the store, and the least valuable per byte.
    LeastValuable { idle: Duration, reads: u32 },
}

impl fmt::Display for EvictReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Droppable => f.write_str("dropped: a temporary that its rule (remove) lets go when room is wanted"),
            Self::Moved => f.write_str("evicted: it is in the store, and its rule (move) wants it only there"),
            Self::ReadNoMore => {
                f.write_str("evicted: it is in the store, and a hint says that nobody will read it again")
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

/// In the order in which they go.
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
    /// May it go at all?
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

    /// Cost of bringing a byte back × chance of use, in a scale of its own; greater is worth more.
    fn value(&self) -> u128 {
        if self.class() == Class::Planned {
            return u128::from(u64::MAX - self.turn());
        }
        let cost_per_mebibyte =
            u128::from(FETCH_OVERHEAD_BYTES.saturating_add(self.bytes)) * (1 << 20) / u128::from(self.bytes.max(1));
        // A prefetched file that nobody read yet is about to be read.
        let uses = u128::from(self.reads) + if self.prefetched && self.reads == 0 { 16 } else { 1 };
        // Idle time in tenths of a second, so that a burst of files of one second still differs.
        let idle = self.idle.as_millis() / 100 + 1;
        cost_per_mebibyte * uses * (1 << 20) / idle
    }
}

/// Orders by what is kept: class, value, then id, so that the outcome is one and the same.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kept {
    class: Class,
    value: u128,
    id: FileId,
    bytes: u64,
    reason: EvictReason,
}

/// Who goes so that `want_bytes` are freed, least valuable first; everybody who may go when that is not enough.
/// No one is in the list without need: without any one of them too little would be freed.
pub fn victims(candidates: impl Iterator<Item = Candidate>, want_bytes: u64) -> Vec<(FileId, EvictReason)> {
    if want_bytes == 0 {
        return Vec::new();
    }
    let want_bytes = u128::from(want_bytes);
    // The most valuable of the victims so far is on top; it is let off as soon as the others suffice.
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
    // A large last victim may have made some needless: the most valuable of those are let off first.
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
