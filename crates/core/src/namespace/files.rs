//! The life of content between the first open and the last release: opening, reading, writing, sealing.
//!
//! States: open, sealed, or with a deferred seal. The danger that this avoids: content that a process still writes
//! counts as a version.

mod attach;
mod deferred_seal;
mod descriptor_grant;
mod fetch_open;
mod fetch_read;
mod look;
mod only;
mod open;
mod pages;
mod place;
mod promise;
mod room;
mod room_wait;
mod seal;
mod sync;
mod transfer;

pub(crate) use deferred_seal::DeferredSeal;
pub(crate) use place::{HIDDEN_PREFIX, Placed, SPILL, Wish, hidden_name, reopen_read_only};
pub(crate) use promise::{KEPT_FOR, Promises};
pub(crate) use room::{Given, SpilledBy, copy_with_attributes};
pub use room_wait::Short;
pub(crate) use room_wait::{Shortage, Shorts};
pub(crate) use seal::{identity_of, nobody_has, nobody_writes};
pub(crate) use sync::Unsynced;

use surgetank_types::model::FsyncTarget;

/// The door through which a program comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    Mount,
    /// The mount, for a program that asks for synchronous writes: the agent must see every write.
    Synced,
    /// The shim asks for a descriptor of the plain file itself, opened with these flags. Otherwise the program goes to
    /// the mount.
    Shim(i32),
    /// The same without a mount: every file that can be opened is opened directly.
    Only(i32),
}

/// The flags of open that an open file keeps.
const KEPT: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME;

impl Via {
    /// The door that fits the flags of an open through the mount.
    pub fn of_flags(flags: i32, fsync: impl FnOnce() -> Option<FsyncTarget>) -> Self {
        // O_SYNC has the bit of O_DSYNC. With passthrough, the kernel syncs the plain file without a request to the
        // agent. It never sends a request for msync.
        let mapped = || flags & libc::O_ACCMODE == libc::O_RDWR && fsync() == Some(FsyncTarget::Store);
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writes && flags & libc::O_DSYNC != 0 || mapped() { Self::Synced } else { Self::Mount }
    }

    pub fn is_mount(self) -> bool {
        matches!(self, Self::Mount | Self::Synced)
    }

    fn is_only(self) -> bool {
        matches!(self, Self::Only(_))
    }

    /// How a new plain file is opened.
    fn access(self) -> rustix::fs::OFlags {
        match self {
            Self::Mount | Self::Synced => rustix::fs::OFlags::RDWR,
            Self::Shim(flags) | Self::Only(flags) => rustix::fs::OFlags::from_bits_retain((flags & KEPT) as u32),
        }
    }
}

/// The answer of the shim's door when only the mount can serve. No file system fails with this error.
pub const LEFT_TO_THE_MOUNT: surgetank_types::error::Errno = surgetank_types::error::Errno::RESTART;

/// Its answer when the request may take a while: the caller asks again where no other request waits behind it.
pub const STORE_TO_BE_ASKED: surgetank_types::error::Errno = surgetank_types::error::Errno::INPROGRESS;

/// How a program reaches the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// The kernel reads and writes the plain file itself; the number is the kernel's registration of it.
    Direct(u32),
    /// Every read and write comes to the agent.
    Mediated,
}

#[derive(Debug, Clone, Copy)]
pub struct Opened {
    pub handle: u64,
    pub grant: Grant,
    /// Pages that the kernel still has from an earlier open are valid.
    pub keep_cache: bool,
    /// Other processes write the plain file directly, and the kernel cannot pass it through: it must not cache anything
    /// of it.
    pub shared: bool,
}
