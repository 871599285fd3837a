//! How many requests went to the server, of which kind, and how many bytes of content: what it costs.

use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of request, as servers bill for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    Head,
    Get,
    List,
    Put,
    Copy,
    Delete,
    Begin,
    Part,
    PartOf,
    Parts,
    Complete,
    Abort,
    Uploads,
}

const KINDS: usize = Kind::Uploads as usize + 1;

/// Since the store was opened. Every try of a request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    by_kind: [u64; KINDS],
    /// How many of them were another try.
    pub tries_again: u64,
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

impl Counts {
    pub fn of(&self, kind: Kind) -> u64 {
        self.by_kind[kind as usize]
    }
    pub fn requests(&self) -> u64 {
        self.by_kind.iter().sum()
    }
}

#[derive(Debug, Default)]
pub struct Counters {
    by_kind: [AtomicU64; KINDS],
    pub tries_again: AtomicU64,
    pub sent_bytes: AtomicU64,
    pub received_bytes: AtomicU64,
}

impl Counters {
    pub fn request(&self, kind: Kind) {
        self.by_kind[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self) -> Counts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            by_kind: std::array::from_fn(|kind| of(&self.by_kind[kind])),
            tries_again: of(&self.tries_again),
            sent_bytes: of(&self.sent_bytes),
            received_bytes: of(&self.received_bytes),
        }
    }
}
