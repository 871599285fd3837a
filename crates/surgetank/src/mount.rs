//! The kernel adapter: a thin, synchronous FUSE server on `/dev/fuse`, and the ways to mount it.
//!
//! It knows the kernel's protocol and nothing of tiers or names; the implementation of [`Filesystem`] decides what a
//! file is. Reading order:
//!
//! * [`attach()`] makes the mount and yields the descriptor; [`namespaces`] makes a private place for it.
//! * [`Session`] shakes hands with the kernel on that descriptor ([`handshake`]), and its worker pool serves it.
//! * [`request`] decodes requests (every length checked, fuzzed), [`reply`] encodes answers, `dispatch` joins the
//!   two through the trait; [`abi`] has the numbers of the protocol.
//! * [`Notifier`] sends unsolicited messages to the kernel: drop cached data, register a file of [`backing`].
//!
//! Inside, imports point one way: `session → workers → dispatch → filesystem → notifier → turns → {request, reply} → abi`.
//!
//! The dangers that it avoids: a missing answer (a program in D state), and a panic that ends the mount. It never
//! requests the write-back cache, which loses appends as soon as a process writes beside the mount.

pub mod abi;
pub mod attach;
pub mod backing;
mod dispatch;
pub mod filesystem;
pub mod handshake;
mod inbox;
pub mod namespaces;
pub mod notifier;
pub mod reply;
pub mod request;
pub mod session;
pub(crate) mod trial;
mod turns;
mod workers;

pub use attach::{AttachOptions, attach, detach};
pub use backing::BackingId;
pub use filesystem::Filesystem;
pub use handshake::{Agreed, Options, Readdirplus};
pub use notifier::Notifier;
pub use reply::{Attributes, DirectoryPlusSink, DirectorySink, Entry, Looked, Opened, OpenedDirectory, SpaceReport};
pub use request::{SetAttr, TimeChange, WriteFlags};
pub(crate) use session::Kept;
pub use session::Session;
pub(crate) use workers::{current, killed, killed_at_close};
pub use workers::{interrupted, wait_long};
