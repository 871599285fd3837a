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

pub mod client;
pub mod commands;
pub mod engine;
pub mod final_drain;
pub mod ground;
pub mod group;
pub mod holders;
pub mod keep;
pub mod life;
pub mod line;
pub mod metrics;
pub mod place;
pub mod scrape;
pub mod seclusion;
pub mod signals;
pub mod socket;
pub mod submounts;
pub mod supervisor;
pub mod users;
pub mod way;
pub mod wire;
