//! The life of content between the first open and the last release: opening, reading, writing, sealing.
//!
//! States: open, sealed, or with a deferred seal. The danger that this avoids: content that a process still writes
//! counts as a version.

pub(crate) mod attach;
pub mod copies;
pub mod deadline;
mod deferred_seal;
pub mod delegation;
pub mod descriptor_grant;
pub mod dispatcher;
pub mod evict;
pub mod fetch_open;
pub(crate) mod fetch_read;
mod fsync;
mod look;
pub mod memory_pressure;
pub mod open;
mod open_content;
pub mod open_files;
mod pages;
pub mod place;
pub mod prefetch;
pub(crate) mod promise;
pub(crate) mod room;
pub mod room_wait;
pub mod scrub;
pub mod seal;
pub mod sync;
pub(crate) mod synced_copies;
pub mod temporaries;
pub mod transfer;
pub(crate) mod waiting;

use copies::Copies;
use deadline::DeadlineWatch;
use delegation::Delegator;
use descriptor_grant::Descriptors;
use dispatcher::Dispatcher;
use evict::Eviction;
use fetch_open::Fetches;
use memory_pressure::MemoryPressure;
use open::Opener;
use open_files::OpenFiles;
use place::Placer;
use room_wait::RoomWaits;
use scrub::Scrub;
use seal::Sealer;
use sync::Syncs;
use synced_copies::SyncedCopies;
use temporaries::StoreTemporaries;
use transfer::Transfers;

use surgetank_state::Inode;
use surgetank_types::model::FsyncTarget;
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::metadata::Metadata;
use crate::metadata::access::Access;
use crate::metadata::losses::Losses;

pub(crate) use place::{HIDDEN_PREFIX, SPILL, Wish, hidden_name, reopen_read_only};
pub(crate) use promise::KEPT_FOR;
pub(crate) use room::{Given, SpilledBy, copy_with_attributes};
pub(crate) use room_wait::RoomWait;
pub use room_wait::Short;
pub(crate) use seal::identity_of;

/// The components that content goes through, and the metadata that they work on. Each is made of those before it.
pub struct Files {
    pub(crate) metadata: Arc<Metadata>,
    /// Requests to the store as a user.
    pub access: Arc<Access>,
    pub(crate) losses: Arc<Losses>,
    /// What may still be begun before the end of the job.
    pub deadline: Arc<DeadlineWatch>,
    pub(crate) temporaries: Arc<StoreTemporaries>,
    pub(crate) open_files: Arc<OpenFiles>,
    /// The place of each newest version.
    pub copies: Arc<Copies>,
    /// Writers that wait for room.
    pub room_waits: Arc<RoomWaits>,
    /// Plain files that leave a tier.
    pub eviction: Arc<Eviction>,
    pub(crate) placer: Arc<Placer>,
    pub(crate) fetches: Arc<Fetches>,
    pub(crate) synced_copies: Arc<SyncedCopies>,
    /// The promise of fsync.
    pub syncs: Arc<Syncs>,
    /// Reads and writes of mediated files.
    pub transfers: Arc<Transfers>,
    /// The last close, and the version that it makes.
    pub sealer: Arc<Sealer>,
    /// Descriptors that processes hold.
    pub descriptors: Arc<Descriptors>,
    /// Hints that are asked at operations.
    pub(crate) dispatcher: Arc<Dispatcher>,
    /// Opens and releases.
    pub opener: Arc<Opener>,
    pub(crate) delegation: Arc<Delegator>,
    pub(crate) memory_pressure: Arc<MemoryPressure>,
    /// Copies on tiers, compared with the store.
    pub scrub: Arc<Scrub>,
}

impl Files {
    /// `root`: the directory of the store that is the root of the namespace.
    pub(crate) fn new(base: &Base, root: Inode) -> Self {
        let metadata = Arc::new(Metadata::new(base, root));
        let access = Arc::new(Access::new(base, &metadata));
        let losses = Arc::new(Losses::new(&metadata));
        let deadline = Arc::new(DeadlineWatch::new(base, &metadata));
        let temporaries = Arc::new(StoreTemporaries::new(base, &metadata));
        let open_files = Arc::new(OpenFiles::new(base, &metadata));
        let copies = Arc::new(Copies::new(base, &access, &metadata, &open_files));
        let room_waits = Arc::new(RoomWaits::new(base, &metadata));
        let eviction = Arc::new(Eviction::new(base, &metadata));
        let placer =
            Arc::new(Placer::new(base, &deadline, &eviction, &metadata, &open_files, &room_waits, &temporaries));
        let fetches =
            Arc::new(Fetches::new(base, &access, &copies, &eviction, &metadata, &open_files, &placer, &room_waits));
        let synced_copies = Arc::new(SyncedCopies::new(base, &metadata));
        let syncs = Arc::new(Syncs::new(base, &metadata, &open_files, &synced_copies));
        let transfers = Arc::new(Transfers::new(
            base,
            &deadline,
            &eviction,
            &fetches,
            &metadata,
            &open_files,
            &placer,
            &room_waits,
        ));
        let sealer = Arc::new(Sealer::new(base, &fetches, &metadata, &open_files, &placer, &syncs));
        let descriptors = Arc::new(Descriptors::new(base, &metadata, &sealer, &syncs));
        let dispatcher = Arc::new(Dispatcher::new(base, &descriptors, &metadata));
        let opener = Arc::new(Opener::new(
            base,
            &access,
            &copies,
            &descriptors,
            &dispatcher,
            &eviction,
            &fetches,
            &metadata,
            &open_files,
            &placer,
            &sealer,
            &transfers,
        ));
        let delegation = Arc::new(Delegator::new(base, &deadline, &metadata));
        let memory_pressure =
            Arc::new(MemoryPressure::new(base, &deadline, &eviction, &metadata, &placer, &syncs, &transfers));
        let scrub = Arc::new(Scrub::new(base, &copies, &eviction, &losses, &metadata, &syncs));
        Self {
            metadata,
            access,
            losses,
            deadline,
            temporaries,
            open_files,
            copies,
            room_waits,
            eviction,
            placer,
            fetches,
            synced_copies,
            syncs,
            transfers,
            sealer,
            descriptors,
            dispatcher,
            opener,
            delegation,
            memory_pressure,
            scrub,
        }
    }
}

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
pub(crate) const KEPT: i32 = libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME;

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

/// An open file, as a door hands it to a program.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    /// Number of the open file, unique in the life of the mount.
    pub handle: u64,
    /// The way to the content.
    pub grant: Grant,
    /// Pages that the kernel still has from an earlier open are valid.
    pub keep_cache: bool,
    /// Other processes write the plain file directly, and the kernel cannot pass it through: it must not cache anything
    /// of it.
    pub shared: bool,
}
