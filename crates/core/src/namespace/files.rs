//! Opening, reading, writing, sealing: the life of content between the first open and the last release.

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

/// Through which door a program comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    Mount,
    /// The same, by one to whom it matters when the store or the tier has what was written: every write is to be seen by us.
    Synced,
    /// It wants a descriptor of the plain file itself, opened with these flags, or be sent to the mount.
    Shim(i32),
    /// The same where there is no mount: whatever can be opened at all is opened directly.
    Only(i32),
}

/// Of open's flags, what an open file keeps.
const KEPT: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME;

impl Via {
    /// As who opens through the mount asked for it.
    pub fn of_flags(flags: i32, fsync: impl FnOnce() -> Option<FsyncTarget>) -> Self {
        // (O_SYNC has the bit of O_DSYNC.) The kernel's own way to the plain file syncs that file and tells nobody; of msync
        // it never tells.
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

    /// How a plain file is opened when it is made.
    fn access(self) -> rustix::fs::OFlags {
        match self {
            Self::Mount | Self::Synced => rustix::fs::OFlags::RDWR,
            Self::Shim(flags) | Self::Only(flags) => rustix::fs::OFlags::from_bits_retain((flags & KEPT) as u32),
        }
    }
}

/// What the shim's door answers when only the mount can serve. No file system fails with this.
pub const LEFT_TO_THE_MOUNT: surgetank_types::error::Errno = surgetank_types::error::Errno::RESTART;

/// What it answers when that may take a while: once more, where nobody else waits behind it.
pub const STORE_TO_BE_ASKED: surgetank_types::error::Errno = surgetank_types::error::Errno::INPROGRESS;

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
    /// Others write the plain file directly while the kernel cannot pass it through: nothing of it may be cached.
    pub shared: bool,
}
