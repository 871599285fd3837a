//! What the agents of a pool agree on: who is a member, and who owns which directory of the store.
//!
//! A *pool* is the agents of one job that share one namespace. Each directory that the job changes has one *owner*, the
//! member that decides its names. A directory of the store gets its owner by a *claim* at the *registry* ([`registry`]).
//! [`Member`] is the part of an agent that keeps its lease, claims, and tells the others. Neither it nor the engine opens
//! a socket or reads a clock: time and messages come in as arguments and go out as [`Output`]s. So the model in
//! `tests/model.rs` runs the same code over a network that loses, delays and cuts. [`Membership`] runs a member over
//! [`Connection`]s.
//!
//! Invariants:
//! - At every moment at most one member that may serve owns a directory. A member whose lease has ended serves nothing.
//! - A change in a claimed directory is answered only when each other member knows the claim and has forgotten what it
//!   believed of the directory, or has left the pool.
//! - What is asked twice has its effect once: a resend is answered again, and an overtaken request is refused.
//!
//! Source: WOSS (one namespace over the nodes); leases as in Gray and Cheriton, "Leases: an efficient fault-tolerant
//! mechanism for distributed file cache consistency", 1989.

#![warn(missing_docs)]

pub mod calls;
pub mod connection;
mod embedded;
pub mod frame;
mod greeting;
mod member;
pub mod membership;
pub mod registry;
pub mod remote;
mod rules;
pub mod secret;
mod sockets;
mod view;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use calls::{CallFailed, Caller, Once, Whereabouts};
pub use connection::Connection;
pub use embedded::{Embedded, Kept};
pub use member::{Authority, Member, Message, Output, Times};
pub use membership::Membership;
pub use registry::{Answer, Ask, Claim, Everything, Join, MemberRecord, News, Refusal, Request};
pub use remote::Remote;
pub use secret::Secret;

/// Time since a machine started, with the time for which it slept (`CLOCK_BOOTTIME`). Each machine has its own.
pub type Uptime = Duration;

/// One agent of a pool. Never used again in the same pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(pub u32);

/// Incarnation of a member: grows at each start of its agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Term(pub u32);

/// Number of an ownership: the revision of its claim. So a later claim of the same directory has a higher one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// Counts the changes at the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Revision(pub u64);

/// A directory of the store: its path below the store's root, as bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Directory(pub Box<[u8]>);
