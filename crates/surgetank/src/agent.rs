//! The agent: one process for each (user, directory), shared by all runs over it.
//!
//! ```text
//! run/mount ── spawns ──► agent: state directory (place) ─ private namespace + mount (life, submounts)
//!      │                     │
//!      └── socket (client) ──┴─ one thread per connection (socket, wire) ─ users (users) ─ Engine
//! ```
//! The agent moves no bytes and decides nothing about files; the [`engine::Engine`] behind it does. The agent exists
//! exactly once for each directory and answers at its socket. It leaves after its last user has left and every file is
//! durable. The dangers that it avoids: two agents over one directory; an agent that leaves while a process can still
//! write.

pub(crate) mod client;
pub(crate) mod commands;
pub mod engine;
pub(crate) mod final_drain;
pub(crate) mod ground;
pub(crate) mod group;
pub(crate) mod holders;
pub(crate) mod keep;
pub(crate) mod life;
pub(crate) mod line;
pub(crate) mod metrics;
pub(crate) mod place;
pub mod scrape;
pub(crate) mod seclusion;
pub(crate) mod signals;
pub(crate) mod socket;
pub(crate) mod submounts;
pub(crate) mod supervisor;
pub(crate) mod tending;
pub(crate) mod users;
pub(crate) mod way;
pub mod wire;
