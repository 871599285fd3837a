//! Making copies and names survive the store's power loss.
//!
//! A few files are synced one by one. From [`TOGETHER_MIN`] on, one sync of the whole file system is cheaper (10,000
//! single ones take 20–40 s), and it is used where the file system is known to honour it; on all others (NFS, FUSE,
//! Lustre, overlays) every file is synced by itself. The price of a whole sync is that it also waits for what others
//! wrote. Threads that want one at the same time share it.
//! The danger avoided: a write-back error that one thread's sync reports and another's does not. The kernel tells it
//! once per descriptor of the file system, so after a shared sync every file is asked by itself as well, which costs no flush.

use std::io;
use std::os::fd::OwnedFd;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Mutex, PoisonError};

use rustix::fs::{fstat, fstatfs, syncfs};

use super::counters::Counters;

/// From this many on, one sync for all.
pub const TOGETHER_MIN: usize = 16;

/// ext2/3/4, XFS, btrfs, F2FS, bcachefs; and tmpfs, ramfs, where nothing survives in either way.
const HONOURING: [i64; 7] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994, 0x8584_58f6];

/// The store's file system, as something to be synced whole.
pub struct FileSystem {
    device: u64,
    handle: OwnedFd,
    begun: AtomicU64,
    /// Held while a sync runs; the errno of the last one.
    last: Mutex<Option<i32>>,
}

impl FileSystem {
    /// `None` when it is not known to honour a sync of the whole.
    pub fn honouring(root: OwnedFd) -> Option<Self> {
        // So that tests reach with a local one what is done on others.
        #[cfg(debug_assertions)]
        if std::env::var_os("SURGETANK_STORE_IS_REMOTE").is_some() {
            return None;
        }
        let kind = fstatfs(&root).ok()?.f_type as i64;
        let device = fstat(&root).ok()?.st_dev;
        HONOURING.contains(&kind).then(|| Self {
            device,
            handle: root,
            begun: AtomicU64::new(0),
            last: Mutex::new(None),
        })
    }

    pub fn device(&self) -> u64 {
        self.device
    }

    /// Returns when a sync that began after this call has ended.
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
