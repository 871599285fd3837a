//! The door without a mount: the command's system calls on paths are put before the agent (seccomp user notification), which
//! answers them from the namespace and puts descriptors of plain files into the command's table.
//!
//! ```text
//! command ── openat ──► kernel: filter ──► listener ──► agent: walk the path
//!    ▲                                                    ├─ outside: "go on as if nobody had asked"
//!    │                                                    └─ inside:  namespace → plain file on a tier (or in the store)
//!    └────────────── a descriptor, or the result ◄──────────┘
//! ```
//! Reading, writing and mapping are the kernel's. Directories are the bare ones, so that entering them and paths out of
//! them work: they are made there at once (`namespace/early`), and hold nothing else before it is drained.
//!
//! What goes on as it was asked is looked at by the kernel once more: a program that changes a path in another thread
//! meanwhile gets to the bare directory. This door protects against accidents, not against programs.

mod arm;
mod attributes;
mod call;
mod dispatch;
mod filter;
mod listener;
mod listing;
mod names;
mod open;
mod program;
mod reach;
mod refused;
mod stat;
mod supervisor;
mod task;
mod walk;

pub use arm::{Arming, is_possible};
pub use refused::Refusals;
pub use supervisor::{Opened, open};
