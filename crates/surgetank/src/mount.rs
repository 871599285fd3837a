//! The kernel adapter: a thin, synchronous FUSE server on `/dev/fuse`, and the ways to mount it.
//!
//! It knows the kernel's protocol and nothing of tiers or names: what a file is, is said by whoever implements
//! [`Filesystem`]. Reading order:
//!
//! * [`attach()`] makes the mount and yields the descriptor; [`namespaces`] makes a private place for it.
//! * [`Session`] shakes hands with the kernel on that descriptor, and its crew of threads serves it.
//! * [`request`] takes requests apart (every length checked, fuzzed), [`reply`] puts answers together, `dispatch` joins the
//!   two through the trait; [`abi`] has the numbers of the protocol.
//! * [`Notifier`] speaks to the kernel unasked: drop what you cache, here is a backing file.
//! * [`mirror`] is a pass-through file system over a directory: the adapter's own test, and the slow store of the testbed.
//!
//! The dangers this folder avoids: an answer that never comes (a program in D state), a panic that takes the mount with it,
//! and the write-back cache, which loses appends as soon as anybody writes beside the mount (it is never asked for).

pub mod abi;
pub mod attach;
mod crew;
mod dispatch;
pub mod filesystem;
pub mod mirror;
pub mod namespaces;
pub mod notifier;
pub mod reply;
pub mod request;
pub mod session;
pub mod trial;

pub use attach::{AttachOptions, attach, detach};
pub use crew::{Current, OnClone, current, interrupted, killed, wait_long};
pub use filesystem::{
    Attributes, Entry, Filesystem, Looked, Opened, OpenedDirectory, SetAttr, SpaceReport, TimeChange, WriteFlags,
};
pub use notifier::{BackingId, Notifier};
pub use reply::{DirectoryPlusSink, DirectorySink};
pub use session::{Agreed, Kept, Options, Readdirplus, Session};
