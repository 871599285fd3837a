//! The escape guard: files under the mount that did not go through it. A program bypasses the mount with a descriptor
//! of the directory that is older than the mount, or from a namespace without the mount.
//!
//! If the bare directory is the store, such a file looks like another client's file: the mount shows it, and it is
//! safe. If the store is elsewhere, the directory had no files when it was covered. So every file in it has escaped,
//! and the store lacks it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags};
use surgetank_core::report::{PathText, Undelivered};

/// The number of names to list: enough to see what happened.
const NAMED_MAX: usize = 1000;
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub struct Guard {
    over: PathBuf,
    bare: OwnedFd,
}

impl Guard {
    /// `bare`: the directory, opened before any mount covered it.
    pub fn new(over: &Path, bare: OwnedFd) -> Self {
        Self { over: over.to_owned(), bare }
    }

    /// The files that have escaped so far, as the verdict lists them.
    pub fn escaped(&self) -> Vec<Undelivered> {
        let mut found = Vec::new();
        if let Err(why) = walk(self.bare.as_fd(), Path::new(""), &mut found) {
            tracing::warn!(%why, over = %self.over.display(), "the directory under the mount cannot be read");
        }
        let told = |path: PathBuf| Undelivered {
            operation: PathText(path.as_os_str().as_bytes().to_vec()).to_string(),
            why: format!(
                "was written to the bare directory under the mount, and is not in the store. It is in \
                 {} once nothing covers that directory: move it to the store",
                self.over.display()
            ),
        };
        found.into_iter().map(told).collect()
    }
}

/// Collects everything except directories.
fn walk(dir: BorrowedFd<'_>, at: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if found.len() >= NAMED_MAX {
            return Ok(());
        }
        let path = at.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
        // Some file systems do not report the type; an entry that cannot be entered is not a directory.
        let inner = match entry.file_type() {
            FileType::Directory | FileType::Unknown => rustix::fs::openat(dir, name, FLAGS, Mode::empty()).ok(),
            _ => None,
        };
        match inner {
            Some(inner) => walk(inner.as_fd(), &path, found)?,
            None if entry.file_type() == FileType::Directory => {}
            None => found.push(path),
        }
    }
    Ok(())
}
