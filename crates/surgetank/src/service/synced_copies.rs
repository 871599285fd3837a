//! Decides whether `fsync` may use synced copies: the agent's state is on the same local file system as the store. Then a copy
//! beside the state survives what the store's file survives.
//!
//! The danger that this avoids: fsync means a disk that is lost where the store is not.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use rustix::fs::fstat;
use surgetank_core::namespace::SyncedCopiesAt;
use surgetank_policy::config::machine::Machine;
use surgetank_types::error::{Error, Result};

use crate::agent::place::SYNCED_COPIES;

/// An fsync of a new file also brings its name to the disk. (The kernel's own ext2 does not.)
const NAMES_WITH_FILES: [&str; 4] = ["ext4", "ext3", "xfs", "btrfs"];

/// The copies in the agent's state: of this agent, or only those of an earlier one. `store`: root of the store, if that is a
/// directory.
pub fn place(store: Option<BorrowedFd<'_>>, state: &Path) -> Result<Option<SyncedCopiesAt>> {
    let dir = state.join(SYNCED_COPIES);
    let cannot = |why: io::Error| Error::new(format!("{} cannot be used", dir.display())).why(why);
    let may_make = store.map_or(Ok(false), |store| is_on_same_disk(store, state)).map_err(cannot)?;
    if !may_make {
        return Ok(dir.exists().then_some(SyncedCopiesAt { dir, may_make }));
    }
    match DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => std::fs::File::open(state).and_then(|state| state.sync_all()).map_err(cannot)?,
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
        Err(why) => return Err(cannot(why)),
    }
    Ok(Some(SyncedCopiesAt { dir, may_make }))
}

fn is_on_same_disk(store: BorrowedFd<'_>, state: &Path) -> io::Result<bool> {
    // Lets tests on a local file system use the path for others.
    #[cfg(debug_assertions)]
    if std::env::var_os("SURGETANK_STORE_IS_REMOTE").is_some() {
        return Ok(false);
    }
    let state = state.canonicalize()?;
    let mount = Machine::below("/").mount_of(&state);
    let is_known = mount.is_some_and(|mount| NAMES_WITH_FILES.contains(&mount.kind.as_str()));
    Ok(is_known && state.metadata()?.dev() == fstat(store)?.st_dev)
}
