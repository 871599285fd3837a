//! The namespace's requests to the kernel, through the mount's door.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use surgetank_core::namespace;
use surgetank_policy::hint::module::is_set_aside;
use surgetank_types::model::FileId;

use super::tally::Tally;
use crate::mount::{BackingId, Entry, Notifier};

/// The connection to the kernel.
pub struct Backings {
    pub tally: Arc<Tally>,
    pub notifier: OnceLock<Notifier>,
    pub passes_through: OnceLock<bool>,
}

/// The kernel does not cache such a name: earlier contents get other names while programs change their files.
pub fn named(entry: Entry, name: &[u8]) -> Entry {
    if is_set_aside(name) { Entry { entry_ttl: Duration::ZERO, ..entry } } else { entry }
}

impl namespace::Door for Backings {
    fn passes_through(&self) -> bool {
        self.passes_through.get().copied().unwrap_or(false) && !self.tally.traces.is_on()
    }

    fn back(&self, file: BorrowedFd<'_>) -> std::io::Result<u32> {
        let notifier = self.notifier.get().ok_or_else(|| std::io::Error::from(Errno::NOTCONN))?;
        notifier.backing_open(file).map(BackingId::raw)
    }

    fn unback(&self, backing: u32) {
        if let Some(notifier) = self.notifier.get()
            && let Err(why) = notifier.backing_close(BackingId::of(backing))
        {
            tracing::debug!(%why, "backing close");
        }
    }

    fn invalidate(&self, file: FileId, attributes_only: bool) -> bool {
        let Some(notifier) = self.notifier.get() else { return true };
        notifier.inval_inode(file.0, if attributes_only { -1 } else { 0 }, 0).unwrap_or(true)
    }

    fn invalidate_name(&self, dir: FileId, name: &[u8]) {
        if let Some(notifier) = self.notifier.get() {
            drop(notifier.inval_entry(dir.0, name));
        }
    }

    fn await_closes(&self) {
        if let Some(notifier) = self.notifier.get() {
            notifier.await_closes();
        }
    }

    fn closes_are_done(&self, patience: Duration) -> bool {
        self.notifier.get().is_none_or(|notifier| notifier.closes_are_done(patience))
    }
}
