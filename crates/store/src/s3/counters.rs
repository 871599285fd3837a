//! The number of requests to the server, by kind, and of bytes of content: the cost of the store.

use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of request, as servers bill for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// HeadObject.
    Head,
    /// GetObject.
    Get,
    /// ListObjectsV2.
    List,
    /// PutObject.
    Put,
    /// CopyObject.
    Copy,
    /// DeleteObject.
    Delete,
    /// CreateMultipartUpload.
    Begin,
    /// UploadPart.
    Part,
    /// UploadPartCopy.
    PartOf,
    /// ListParts.
    Parts,
    /// CompleteMultipartUpload.
    Complete,
    /// AbortMultipartUpload.
    Abort,
    /// ListMultipartUploads.
    Uploads,
}

const KINDS: usize = Kind::Uploads as usize + 1;

/// Requests and bytes since the store was opened. Every try of a request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    by_kind: [u64; KINDS],
    /// How many of the requests were another try.
    pub tries_again: u64,
    /// Bytes of bodies sent.
    pub sent_bytes: u64,
    /// Bytes of content received.
    pub received_bytes: u64,
}

impl Counts {
    /// Number of requests of one kind.
    pub fn of(&self, kind: Kind) -> u64 {
        self.by_kind[kind as usize]
    }
    /// Number of requests of all kinds.
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
