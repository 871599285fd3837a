//! The plain files of a device, by the paths that the catalog has for them.
//!
//! A device that is full or sick may be unable to carry out a rename, because it has no space for the new directory. The new
//! path would then name nothing, and a new file with the old path would overwrite the old file. Such a file is therefore moved
//! aside, which needs no directory, or stays at its place if not even that is possible. It is *astray*, and is known by the
//! path that it should have. The next agent finds it by its inode number and moves it to its path.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use surgetank_types::sync::Mutex;
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::super::tree::{Each, Plain, Tree};
use super::{Device, lock};

/// Prefix of the names of files that were moved aside; a number follows.
const ASTRAY: &str = ".surgetank-astray-";

/// Freeing fewer bytes takes no longer than holding them.
const HELD_BYTES_MIN: u64 = 1 << 20;

/// The bytes of a plain file without a name, and their space on the device: `drop` frees both. The name is removed under the
/// tree's lock, but freeing memory takes a quarter of a second a gigabyte, and other threads must not wait for that.
#[derive(Debug)]
#[must_use = "its room is given back when it goes"]
pub struct Remains<'a> {
    device: &'a Device,
    held: Option<OwnedFd>,
    charged_bytes: u64,
}

impl Remains<'_> {
    /// The bytes that the file is charged in the ledger.
    pub fn bytes(&self) -> u64 {
        self.charged_bytes
    }
}

impl Drop for Remains<'_> {
    fn drop(&mut self) {
        if self.held.is_some() {
            crash_point!("remains.held");
        }
        drop(self.held.take());
        // In this order: a reservation that gets the space also finds it free.
        self.device.add_used(-i64::try_from(self.charged_bytes).unwrap_or(i64::MAX));
    }
}

#[derive(Debug, Default)]
pub(super) struct Astray {
    any: AtomicBool,
    /// For each file or directory astray: the path that it should have, and the path at which it is stored.
    locations: Mutex<Locations>,
}

#[derive(Debug, Default)]
struct Locations {
    at: BTreeMap<Vec<u8>, Vec<u8>>,
    count: u64,
}

/// The rest of `path` after `dir`: empty, or with a leading slash.
fn behind<'a>(path: &'a [u8], dir: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(dir).filter(|rest| rest.first().is_none_or(|byte| *byte == b'/'))
}

impl Locations {
    /// The entry that applies to the path: its own, or that of the nearest directory above.
    fn entry(&self, path: &[u8]) -> Option<(&[u8], &[u8])> {
        let mut dir = path;
        loop {
            if let Some((known, at)) = self.at.get_key_value(dir) {
                return Some((known, at));
            }
            dir = &dir[..dir.iter().rposition(|byte| *byte == b'/')?];
        }
    }

    fn where_is(&self, path: &[u8]) -> Vec<u8> {
        match self.entry(path) {
            Some((known, at)) => [at, &path[known.len()..]].concat(),
            None => path.to_vec(),
        }
    }

    /// Whether another file that could not be moved away is stored at this path. A new file would overwrite it.
    fn is_taken(&self, path: &[u8]) -> bool {
        let at = self.where_is(path);
        self.at.iter().any(|(known, other)| behind(&at, other).is_some() && behind(path, known).is_none())
    }

    /// From now on `from` is named `to`, with all below it, and what was stored below `was` is stored below `is`.
    fn renamed(&mut self, (from, to): (&[u8], &[u8]), (was, is): (&[u8], &[u8])) {
        let moved = |path: Vec<u8>, before: &[u8], after: &[u8]| match behind(&path, before) {
            Some(rest) => [after, rest].concat(),
            None => path,
        };
        let all = std::mem::take(&mut self.at);
        self.at = all.into_iter().map(|(path, at)| (moved(path, from, to), moved(at, was, is))).collect();
    }
}

impl Device {
    fn tree(&self) -> Tree<'_> {
        Tree::new(self.root())
    }

    /// On a device that is absent, names change in the catalog only; they are corrected when it is back.
    fn change(&self, change: impl FnOnce(Tree<'_>) -> io::Result<()>) -> io::Result<()> {
        if self.is_there() { change(self.tree()) } else { Ok(()) }
    }

    fn location<'a>(&self, path: &'a [u8]) -> Cow<'a, [u8]> {
        if !self.astray.any.load(Ordering::Relaxed) {
            return path.into();
        }
        lock(&self.astray.locations).where_is(path).into()
    }

    fn is_free(&self, path: &[u8]) -> io::Result<()> {
        let taken = self.astray.any.load(Ordering::Relaxed) && lock(&self.astray.locations).is_taken(path);
        if taken { Err(Errno::EXIST.into()) } else { Ok(()) }
    }

    /// The file is at its path, or removed.
    fn is_settled(&self, path: &[u8]) {
        if self.astray.any.load(Ordering::Relaxed) {
            lock(&self.astray.locations).at.remove(path);
        }
    }

    /// Creates a file and the missing directories of its path. A leftover tree of empty directories at `path` is removed. The
    /// process's umask applies to `perm`.
    ///
    /// Errors: `EEXIST` for any other entry at `path`, and those of the file system.
    pub fn create(&self, path: &[u8], perm: u32) -> io::Result<File> {
        self.create_as(path, perm, OFlags::RDWR)
    }

    /// Like [`Self::create`], opened as `access` says (open's access mode and status flags).
    pub fn create_as(&self, path: &[u8], perm: u32, access: OFlags) -> io::Result<File> {
        self.is_free(path)?;
        self.tree().create(&self.location(path), perm, access)
    }

    /// Creates a file without a name, which ends with its last descriptor.
    pub fn create_unnamed(&self, perm: u32) -> io::Result<File> {
        let mode = Mode::from_raw_mode(perm);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(self.root(), ".", flags, mode) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => self.create_unlinked(mode),
            outcome => Ok(File::from(outcome?)),
        }
    }

    /// For file systems without `O_TMPFILE`.
    pub(in super::super) fn create_unlinked(&self, mode: Mode) -> io::Result<File> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            // In the scope's directory, not in that of the files, so that no walk sees it.
            let name = format!("unnamed-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            match rustix::fs::openat(&self.scope.dir, name.as_str(), flags, mode) {
                Err(Errno::EXIST) => {
                    // Left by a process with the same number that died between its two calls.
                    rustix::fs::unlinkat(&self.scope.dir, name.as_str(), AtFlags::empty())?;
                }
                outcome => {
                    let file = outcome?;
                    rustix::fs::unlinkat(&self.scope.dir, name.as_str(), AtFlags::empty())?;
                    return Ok(File::from(file));
                }
            }
        }
    }

    /// The directory that stores the file of this path, and its name there; `None` if the file is astray.
    pub fn place_of<'a>(&self, path: &'a [u8]) -> Option<(PathBuf, &'a [u8])> {
        let cut = path.iter().rposition(|byte| *byte == b'/');
        let (dir, name) = cut.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
        let straight = !self.astray.any.load(Ordering::Relaxed);
        straight.then(|| (self.scope.files_path.join(OsStr::from_bytes(dir)), name))
    }

    /// Opens a file for reading, or for reading and writing.
    ///
    /// Errors: those of the file system; a file that is absent is `ENOENT`.
    pub fn open(&self, path: &[u8], write: bool) -> io::Result<File> {
        if !self.is_there() {
            return Err(Errno::IO.into());
        }
        self.tree().open(&self.location(path), write)
    }

    /// Renames a file, replaces what is at `to`, and makes the directories of `to`.
    pub fn rename(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            self.is_free(to)?;
            tree.rename(&self.location(from), &self.location(to))?;
            self.is_settled(from);
            Ok(())
        })
    }

    /// Renames a directory. An absent `from` is not an error; leftovers in `to` are merged.
    fn rename_dir(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            self.is_free(to)?;
            let (was, is) = (self.location(from), self.location(to));
            tree.rename_dir(&was, &is)?;
            self.is_settled(from);
            if self.astray.any.load(Ordering::Relaxed) {
                lock(&self.astray.locations).renamed((from, to), (&was, &is));
            }
            Ok(())
        })
    }

    /// Gives the file the path `to`, whether or not the device can carry out the rename; an error says that it could not.
    pub fn follow(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.rename(from, to).inspect_err(|_| self.strays(from, to))
    }

    /// The same for a directory. An absent `from` is not an error; leftovers in `to` are merged.
    pub fn follow_dir(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.rename_dir(from, to).inspect_err(|_| self.strays(from, to))
    }

    fn strays(&self, from: &[u8], to: &[u8]) {
        let (tree, mut locations) = (self.tree(), lock(&self.astray.locations));
        let was = locations.where_is(from);
        // This device has nothing of it.
        if matches!(tree.stat(&was), Err(Errno::NOENT | Errno::NOTDIR)) {
            return;
        }
        let aside = loop {
            locations.count += 1;
            let aside = format!("{ASTRAY}{}", locations.count).into_bytes();
            if tree.stat(&aside).is_err() {
                break aside;
            }
        };
        let is = if tree.rename(&was, &aside).is_ok() { aside } else { was.clone() };
        locations.renamed((from, to), (&was, &is));
        locations.at.insert(to.to_vec(), is);
        self.astray.any.store(true, Ordering::Relaxed);
    }

    /// Removes a file's name. An absent file is not an error.
    pub fn unlink(&self, path: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            tree.unlink(&self.location(path))?;
            self.is_settled(path);
            Ok(())
        })
    }

    /// Removes a file's name and sets its permissions first, for programs that have it open. An absent file is not an error.
    pub fn unlink_with(&self, path: &[u8], perm: Option<u32>) -> io::Result<()> {
        if let Some(perm) = perm
            && let Err(why) = self.tree().set_perm(&self.location(path), perm)
        {
            tracing::debug!(%why, "a plain file keeps its mode");
        }
        self.unlink(path)
    }

    /// Keeps the bytes of a file whose name is about to be removed, with the bytes that it is charged in the ledger.
    pub fn hold(&self, path: Option<&[u8]>, charged_bytes: u64) -> Remains<'_> {
        let large = charged_bytes >= HELD_BYTES_MIN && self.is_there();
        let held = path.filter(|_| large).and_then(|path| self.tree().hold(&self.location(path)).ok());
        Remains { device: self, held, charged_bytes }
    }

    /// The plain file at this path, if there is one.
    pub fn plain_at(&self, path: &[u8]) -> io::Result<Option<Plain>> {
        self.tree().plain_at(&self.location(path))
    }

    /// Removes the name only if it names the file with this inode number.
    pub fn unlink_if(&self, path: &[u8], ino: u64) -> io::Result<()> {
        let there = if self.is_there() { self.plain_at(path)? } else { None };
        if there.is_some_and(|plain| plain.ino == ino) { self.unlink(path) } else { Ok(()) }
    }

    /// Removes a tree of directories without files. An absent tree is not an error.
    ///
    /// Errors: `ENOTEMPTY` if it contains files.
    pub fn remove_dir(&self, path: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            tree.remove_dir(&self.location(path))?;
            self.is_settled(path);
            Ok(())
        })
    }

    /// Calls `each` for every plain file, with the path at which it is stored.
    pub fn walk(&self, each: Each<'_>) -> io::Result<()> {
        self.change(|tree| tree.walk(each))
    }
}
