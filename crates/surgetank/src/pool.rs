//! The agent's place in a pool: one namespace over the nodes of a job.
//!
//! ```text
//!  program ─► kernel ─► agent: router ─► own directory: the namespace, as without a pool
//!                          │
//!                          └─ another member's: link ─► the pool's process ═══ TLS ═══► the pool's process of the owner
//!                                                                                         └─ export: a system call on
//!                                                                                            the owner's mount
//! ```
//! The pool's process is a sibling of the agent. It holds the membership, and the files that other members have open. So
//! nothing of that ends with an agent that is killed.

pub(crate) mod call;
pub(crate) mod export;
pub(crate) mod link;
pub(crate) mod others;
pub(crate) mod process;
pub(crate) mod rendezvous;
pub(crate) mod replicas;
pub(crate) mod router;
pub mod status;
