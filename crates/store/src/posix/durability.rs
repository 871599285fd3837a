//! Makes copies and names survive the store's power loss.
//!
//! A few files are synced one by one. From [`TOGETHER_MIN`] on, one sync of the whole file system is cheaper (10,000 single
//! ones take 20–40 s). It is used where the file system is known to honour it; on all others (NFS, FUSE, Lustre, overlays)
//! every file is synced separately. A sync of the whole also waits for what other programs wrote. Threads that need one at the
//! same time share it.
//!
//! The danger that it avoids: a write-back error that one thread's sync reports and another's does not. The kernel reports it
//! once per descriptor of the file system, so after a shared sync every file is asked separately too, which needs no flush.

use std::io;
use std::os::fd::OwnedFd;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Mutex, PoisonError};

use rustix::fs::{fstat, fstatfs, syncfs};

use super::counters::Counters;

/// From this many files on, one sync for all.
pub const TOGETHER_MIN: usize = 16;

/// Magic numbers of ext2/3/4, XFS, btrfs, F2FS, bcachefs; and of tmpfs, ramfs, where nothing survives either way.
const HONOURING: [i64; 7] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994, 0x8584_58f6];

/// Magic number of ext2/3/4.
const EXT: i64 = 0xef53;

/// The store's file system, for a sync of the whole.
pub struct FileSystem {
    kind: i64,
    device: u64,
    handle: OwnedFd,
    begun: AtomicU64,
    /// Held while a sync runs; the errno of the last one.
    last: Mutex<Option<i32>>,
}

impl FileSystem {
    /// `None` if the file system is not known to honour a sync of the whole.
    pub fn honouring(root: OwnedFd) -> Option<Self> {
        // Lets tests on a local file system use the path for others.
        #[cfg(debug_assertions)]
        if std::env::var_os("SURGETANK_STORE_IS_REMOTE").is_some() {
            return None;
        }
        let kind = fstatfs(&root).ok()?.f_type as i64;
        let device = fstat(&root).ok()?.st_dev;
        HONOURING.contains(&kind).then(|| Self {
            kind,
            device,
            handle: root,
            begun: AtomicU64::new(0),
            last: Mutex::new(None),
        })
    }

    pub fn device(&self) -> u64 {
        self.device
    }

    /// A sync of one directory brings every earlier change of names and attributes to the disk (ext2/3/4: one journal commit).
    pub fn has_one_journal(&self) -> bool {
        self.kind == EXT
    }

    /// Returns after the end of a sync that began after this call.
    pub fn sync(&self, counters: &Counters) -> io::Result<()> {
        let asked = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if self.begun.load(Ordering::SeqCst) == asked {
            self.begun.fetch_add(1, Ordering::SeqCst);
            counters.file_system_syncs.add(1);
            *last = syncfs(&self.handle).err().map(|error| error.raw_os_error());
        }
        last.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}
