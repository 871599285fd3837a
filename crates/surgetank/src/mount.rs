//! The kernel adapter: a thin, synchronous FUSE server on `/dev/fuse`, and the ways to mount it.
//!
//! It knows the kernel's protocol and nothing of tiers or names; the implementation of [`Filesystem`] decides what a
//! file is. Reading order:
//!
//! * [`attach()`] makes the mount and yields the descriptor; [`namespaces`] makes a private place for it.
//! * [`Session`] shakes hands with the kernel on that descriptor, and its worker pool serves it.
//! * [`request`] decodes requests (every length checked, fuzzed), [`reply`] encodes answers, `dispatch` joins the
//!   two through the trait; [`abi`] has the numbers of the protocol.
//! * [`Notifier`] sends unsolicited messages to the kernel: drop cached data, register a backing file.
//!
//! The dangers that it avoids: a missing answer (a program in D state), and a panic that ends the mount. It never
//! requests the write-back cache, which loses appends as soon as a process writes beside the mount.

pub mod abi;
pub mod attach;
mod dispatch;
pub mod filesystem;
pub mod namespaces;
pub mod notifier;
pub mod reply;
pub mod request;
pub mod session;
pub mod trial;
mod workers;

pub use attach::{AttachOptions, attach, detach};
pub use filesystem::{
    Attributes, Entry, Filesystem, Looked, Opened, OpenedDirectory, SetAttr, SpaceReport, TimeChange, WriteFlags,
};
pub use notifier::{BackingId, Notifier};
pub use reply::{DirectoryPlusSink, DirectorySink};
pub use session::{Agreed, Kept, Options, Readdirplus, Session};
pub use workers::{Current, OnClone, current, interrupted, killed, wait_long};
