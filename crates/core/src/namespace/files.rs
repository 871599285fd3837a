//! Opening, reading, writing, sealing: the life of content between the first open and the last release.

mod open;
mod place;
mod room;
mod seal;
mod transfer;

pub(crate) use place::{HIDDEN_PREFIX, Placed, hidden_name};
pub(crate) use room::give_times;
pub(crate) use seal::identity_of;

/// How a program reaches the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// The kernel reads and writes the plain file itself; the number is the kernel's registration of it.
    Direct(u32),
    /// Every read and write comes to us.
    Mediated,
}

#[derive(Debug, Clone, Copy)]
pub struct Opened {
    pub handle: u64,
    pub grant: Grant,
    /// Pages that the kernel still has from an earlier open are good.
    pub keep_cache: bool,
}
