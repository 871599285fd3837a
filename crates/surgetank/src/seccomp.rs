//! The door without a mount. The kernel passes the command's system calls on paths to the agent (seccomp user
//! notification). The agent answers them from the namespace and puts descriptors of plain files into the command's
//! table.
//!
//! ```text
//! command ── openat ──► kernel: filter ──► listener ──► agent: walk the path
//!    ▲                                                    ├─ outside: "continue the call unchanged"
//!    │                                                    └─ inside:  namespace → plain file on a tier (or in the store)
//!    └────────────── a descriptor, or the result ◄──────────┘
//! ```
//! The kernel itself reads, writes and maps. Directories are the bare ones, so that entering them and paths out of them
//! work. They are created there at once (`namespace/eager_publish`); everything else appears in them when it is drained.
//!
//! The kernel reads the path of a continued call again: a program that changes the path in another thread meanwhile
//! reaches the bare directory. This door protects against accidents, not against malicious programs.

mod arm;
mod attributes;
mod bare;
mod call;
mod dispatch;
mod enter;
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
mod unsupported;
mod walk;

pub use arm::{Arming, is_possible};
pub use refused::Refusals;
pub use supervisor::{Opened, open};
