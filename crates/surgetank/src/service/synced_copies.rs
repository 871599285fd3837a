//! Decides whether `fsync` may use synced copies: the agent's state is on the same local file system as the store. Then a copy
//! beside the state survives what the store's file survives.
//!
//! The danger that this avoids: fsync means a disk that is lost where the store is not.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, fstat, fstatfs, openat};
use surgetank_types::error::{Error, Result};

use crate::agent::place::SYNCED_COPIES;

/// Magic numbers of ext2/3/4, XFS and btrfs: an fsync of a new file also brings its name to the disk.
const NAMES_WITH_FILES: [i64; 3] = [0xef53, 0x5846_5342, 0x9123_683e];

/// The directory for synced copies in the agent's state. `None`: there are none, and fsync publishes. `store`: root of the store,
/// if that is a directory.
pub fn directory(store: Option<BorrowedFd<'_>>, state: &Path) -> Result<Option<PathBuf>> {
    let path = state.join(SYNCED_COPIES);
    let cannot = |why: io::Error| Error::new(format!("{} cannot be used", path.display())).why(why);
    let may_make = store.map_or(Ok(false), |store| is_on_same_disk(store, state)).map_err(cannot)?;
    if !may_make && !path.exists() {
        return Ok(None);
    }
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => std::fs::File::open(state).and_then(|dir| dir.sync_all()).map_err(cannot)?,
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
        Err(why) => return Err(cannot(why)),
    }
    Ok(Some(path))
}

fn is_on_same_disk(store: BorrowedFd<'_>, state: &Path) -> io::Result<bool> {
    // Lets tests on a local file system use the path for others.
    #[cfg(debug_assertions)]
    if std::env::var_os("SURGETANK_STORE_IS_REMOTE").is_some() {
        return Ok(false);
    }
    let state = openat(CWD, state, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let is_known = NAMES_WITH_FILES.contains(&(fstatfs(&state)?.f_type as i64));
    Ok(is_known && fstat(state.as_fd())?.st_dev == fstat(store)?.st_dev)
}
