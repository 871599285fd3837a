//! The agent: one process for each (user, directory), shared by all runs over it.
//!
//! ```text
//! run/mount ── spawns ──► agent: state directory (place) ─ private namespace + mount (life, submounts)
//!      │                     │
//!      └── socket (client) ──┴─ one thread a connection (socket, wire) ─ who is here (users) ─ Engine
//! ```
//! The agent moves no bytes and decides nothing about files: that is the [`engine::Engine`] behind it. Its own
//! business is to exist exactly once, to be reachable, to outlive its last user until all is durable, and to go away.
//! The danger it avoids: two agents over one directory, and an agent that leaves while somebody can still write.

pub mod address;
pub mod client;
pub mod commands;
pub mod engine;
pub mod ground;
pub mod group;
pub mod holders;
pub mod keep;
pub mod life;
pub mod line;
pub mod metrics;
pub mod parting;
pub mod place;
pub mod progress;
pub mod scrape;
pub mod seclusion;
pub mod signals;
pub mod socket;
pub mod submounts;
pub mod supervisor;
pub mod users;
pub mod way;
pub mod wire;
