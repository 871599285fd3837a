//! Where a file goes and what is evicted: pure functions that return their reason.
//!
//! No I/O, no clock, no state of their own: all that matters is in the arguments, so every decision can be replayed
//! and `surgetank why` can say it in a sentence. The room promised by a decision is only promised once the caller
//! got it from `Device::try_reserve`; when that fails (somebody was faster), the caller asks again with new views.

mod choose;
mod evict;
mod history;
mod reason;
mod view;

pub use choose::{Ask, AskKind, DirtyRoom, Expected, Place, ample_bytes, choose, is_ample};
pub use evict::{Candidate, EvictReason, victims};
pub use history::History;
pub use reason::{Basis, Bytes, Guarantee, Reason, Skip};
pub use view::{DeviceView, POLL_PERIOD};
