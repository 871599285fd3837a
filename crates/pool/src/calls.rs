//! Calls of one member to another. A call has a connection for itself while it runs, and a blocking thread on each side:
//! no thread hands it to another one.
//!
//! A caller sends a call until it has the reply or gives up. With a number ([`Once`]) the receiver carries the call out
//! once, however often it comes: it keeps the reply until the caller says that the reply has reached the program
//! ([`Caller::answered`]).
//!
//! Frame: the length of its head and of its body (4 bytes each, little endian), the head, the body. A reply has no head.
//!
//! The dangers that this avoids:
//! - A call that a lost connection repeats has its effect twice.
//! - A call has an effect after its caller gave it up. Giving up resets the connection, and the receiver looks for that
//!   before it begins a call. What the receiver has begun by then is finished. A reset takes as long as the network does.

mod caller;
mod server;
mod stream;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

pub use caller::Caller;
pub(crate) use server::{Admitted, Serving};

use crate::frame::FRAME_BYTES_MAX;
use crate::{MemberId, Term};

/// Bytes of the longest body of a call, and of a reply.
pub const BODY_BYTES_MAX: usize = FRAME_BYTES_MAX - 64;
/// So many connections for calls a member has to another one. More calls wait.
const CONNECTIONS_MAX: usize = 1024;

/// A call's number, by which its receiver carries it out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Once {
    /// The kernel's number of a request.
    pub request: u64,
    /// How many calls that request has made before.
    pub part: u32,
}

/// Where a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whereabouts {
    /// The agent of this term, at `HOST:PORT`.
    At(Term, String),
    /// It may be known later.
    Unknown,
    /// It has left the pool, or was lost.
    Gone,
    /// This agent is not a member any more.
    Expelled,
}

/// The name of a thread that carries out calls of a member.
#[must_use]
pub fn name_of_thread(caller: MemberId) -> String {
    format!("{THREAD}{}", caller.0)
}

/// The name of a thread that opens a file for a member.
#[must_use]
pub fn name_of_opening_thread(caller: MemberId) -> String {
    format!("{OPENING}{}", caller.0)
}

/// The name of a thread that closes a file as the member's program does.
#[must_use]
pub fn name_of_closing_thread(caller: MemberId) -> String {
    format!("{CLOSING}{}", caller.0)
}

/// Does a thread of this name do that?
#[must_use]
pub fn is_closing(name_of_thread: &str) -> bool {
    name_of_thread.starts_with(CLOSING)
}

/// Does a thread of this name open a file?
#[must_use]
pub fn is_opening(name_of_thread: &str) -> bool {
    name_of_thread.starts_with(OPENING)
}

/// The member for which a thread of this name carries out calls.
#[must_use]
pub fn caller_of(name_of_thread: &str) -> Option<MemberId> {
    let name = name_of_thread.trim_end();
    let number = [THREAD, OPENING, CLOSING].into_iter().find_map(|prefix| name.strip_prefix(prefix))?;
    number.parse().ok().map(MemberId)
}

/// (The kernel keeps 15 bytes of a name.)
const THREAD: &str = "pool-s-";
const OPENING: &str = "pool-o-";
const CLOSING: &str = "pool-c-";

/// What a call waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// The member is not reached yet.
    ForMember,
    /// The receiver may have begun to carry it out.
    ForReply,
}

/// Why a call has no reply. It may have been carried out, except after [`CallFailed::TooLong`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFailed {
    /// The member has left the pool, or was lost.
    Gone,
    /// The caller's patience has ended.
    TimedOut,
    /// This agent has left the pool, or was lost.
    Expelled,
    /// The body has more than [`BODY_BYTES_MAX`] bytes.
    TooLong,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "the other agent has left the pool, or was lost",
            Self::TimedOut => "the other agent did not answer in time",
            Self::Expelled => "this agent has left the pool, or was lost",
            Self::TooLong => "a request to another agent is too long",
        })
    }
}

impl std::error::Error for CallFailed {}

/// Bytes on the network, in both directions.
#[derive(Debug, Default)]
struct Traffic {
    received: AtomicU64,
    sent: AtomicU64,
}

impl Traffic {
    fn bytes(&self) -> (u64, u64) {
        (self.received.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed))
    }
}
