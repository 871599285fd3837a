//! The live state in memory: files, names, and the queue of operations on their way to the store.
//!
//! Every name has two bindings. *Logical* is what programs see. *Planned* is what the store will have once all queued
//! operations are carried out. (It excludes the publication of files that the store never had: those can still be taken
//! back.) A name without an entry is "as in the store". The inode has where the file is in the store *now* (`applied`).
//! This crate does no I/O; the one lock around the state is held briefly.
//!
//! Invariants:
//! - A file that is `owned` is in the catalog, and so are all its ancestors.
//! - A file is kept while a name, an operation, an open handle, the store or the kernel refers to it.
//! - An entry is kept while an operation that names it is queued (`pins`). Otherwise the store would show through too
//!   early.

#![warn(missing_docs)]

mod bindings;
mod charges;
mod delegation;
mod drain_queue;
mod final_ops;
mod hints;
mod inode;
mod kernel_entries;
mod leaving;
mod name;
mod negative_cache;
mod operation;
mod order;
mod queue;
mod temporaries;
mod tree;
mod txn;

use surgetank_types::model::FileId;

pub use bindings::Before;
pub use charges::CleanFiles;
pub use delegation::{Delegation, DelegationDemand, Delegations, Stray};
pub use drain_queue::{BATCH_OPS_MAX, Copied, DrainQueue, Limits, Next, is_first};
pub use hints::{HintHistory, KnownHints, parent};
pub use inode::{Dir, Entry, Extra, Inode, Pages, PlainId, State};
pub use kernel_entries::KernelNegativeEntries;
pub use leaving::{Leaving, Mover};
pub use name::Name;
pub use negative_cache::{NAMES_LISTED_MAX, NegativeCache};
pub use operation::{Op, Progress, Trouble, file_of, files_of, places};
pub use order::{Cut, Order, Position, first_unpublished, may_precede};
pub use temporaries::{Temporaries, are_expected as temporaries_are_expected};
pub use tree::{OWN_INODE_BASE, Tree, is_for_another};
pub use txn::Txn;

/// A name in a directory.
pub type Place = (FileId, Name);
