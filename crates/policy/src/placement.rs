//! Where a file is placed and which files are evicted: pure functions that return their reason.
//!
//! They have no I/O, no clock and no state of their own: all that matters is in the arguments. Every decision can therefore be
//! replayed, and `surgetank why` can state it in a sentence.
//!
//! A decision's reservation holds only after `Device::try_reserve` grants it. If that fails because another thread was faster,
//! the caller asks again with new views.

mod choose;
mod evict;
mod history;
mod reason;
mod view;

pub use choose::{Ask, AskKind, DirtyRoom, Expected, Place, ample_bytes, choose};
pub use evict::{Candidate, EvictReason, victims};
pub use history::History;
pub use reason::{Basis, Bytes, Guarantee, Reason, Skip};
pub use view::{DeviceView, POLL_PERIOD};
