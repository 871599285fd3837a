//! The plain files of a device, by the paths that the catalog has for them.
//!
//! A device that is full or sick may not follow a rename: there is no room for the directory that the file goes to. Its
//! path would name nothing then, and a new file of the old path would be written over it. What could not follow is moved
//! aside, which takes no directory, or stays where it is if not even that can be done: it is *astray*, and known by the
//! path that it should have. The next agent finds it by its inode number and puts it in its place.

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

/// What was moved aside is called so, and has a number.
const ASTRAY: &str = ".surgetank-astray-";

/// To give back fewer bytes takes no longer than to hold them.
const HELD_BYTES_MIN: u64 = 1 << 20;

/// The bytes of a plain file without a name, and their room on the device: both are given back when this goes. The name goes under the tree's
/// lock, but to give back memory takes a quarter of a second a gigabyte, and nobody else need wait for that.
#[derive(Debug)]
#[must_use = "its room is given back when it goes"]
pub struct Remains<'a> {
    device: &'a Device,
    held: Option<OwnedFd>,
    charged_bytes: u64,
}

impl Remains<'_> {
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
        // In this order: whoever is promised the room finds it.
        self.device.add_used(-i64::try_from(self.charged_bytes).unwrap_or(i64::MAX));
    }
}

#[derive(Debug, Default)]
pub(super) struct Astray {
    any: AtomicBool,
    /// By the path that it should have: where it lies. A directory with all that is in it.
    lies: Mutex<Lies>,
}

#[derive(Debug, Default)]
struct Lies {
    at: BTreeMap<Vec<u8>, Vec<u8>>,
    count: u64,
}

/// What `path` has behind `dir`: empty, or with a slash in front.
fn behind<'a>(path: &'a [u8], dir: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(dir).filter(|rest| rest.first().is_none_or(|byte| *byte == b'/'))
}

impl Lies {
    /// The entry that the path belongs to: its own, or that of the nearest directory above.
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

    /// Does something else lie there that could not be moved away? It would be written over.
    fn is_taken(&self, path: &[u8]) -> bool {
        let at = self.where_is(path);
        self.at.iter().any(|(known, other)| behind(&at, other).is_some() && behind(path, known).is_none())
    }

    /// `from` is called `to` from now on, with all below, and what lay below `was` lies below `is`.
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

    /// On a device that is not there, names change in the catalog only; they are put right when it is back.
    fn change(&self, change: impl FnOnce(Tree<'_>) -> io::Result<()>) -> io::Result<()> {
        if self.is_there() { change(self.tree()) } else { Ok(()) }
    }

    fn lies<'a>(&self, path: &'a [u8]) -> Cow<'a, [u8]> {
        if !self.astray.any.load(Ordering::Relaxed) {
            return path.into();
        }
        lock(&self.astray.lies).where_is(path).into()
    }

    fn is_free(&self, path: &[u8]) -> io::Result<()> {
        let taken = self.astray.any.load(Ordering::Relaxed) && lock(&self.astray.lies).is_taken(path);
        if taken { Err(Errno::EXIST.into()) } else { Ok(()) }
    }

    /// It is where it should be, or gone.
    fn is_settled(&self, path: &[u8]) {
        if self.astray.any.load(Ordering::Relaxed) {
            lock(&self.astray.lies).at.remove(path);
        }
    }

    /// Makes a new file and what is missing of its directories. A leftover tree of empty directories in its place
    /// is removed; any other leftover is EEXIST. (The process's umask applies to `perm`.)
    pub fn create(&self, path: &[u8], perm: u32) -> io::Result<File> {
        self.create_as(path, perm, OFlags::RDWR)
    }

    /// The same, opened as `access` says (open's access mode and status flags).
    pub fn create_as(&self, path: &[u8], perm: u32, access: OFlags) -> io::Result<File> {
        self.is_free(path)?;
        self.tree().create(&self.lies(path), perm, access)
    }

    /// A file without a name: it vanishes with its last descriptor unless [`Self::link_unnamed`] names it.
    pub fn create_unnamed(&self, perm: u32) -> io::Result<File> {
        let mode = Mode::from_raw_mode(perm);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(self.root(), ".", flags, mode) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => self.create_unlinked(mode),
            outcome => Ok(File::from(outcome?)),
        }
    }

    /// For file systems without `O_TMPFILE`; such a file cannot be given a name later.
    pub(in super::super) fn create_unlinked(&self, mode: Mode) -> io::Result<File> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            // Beside `files`, so that no walk sees it.
            let name = format!("unnamed-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            match rustix::fs::openat(&self.scope.dir, name.as_str(), flags, mode) {
                Err(Errno::EXIST) => {
                    // Left by a process of the same number that died between its two calls.
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

    /// The directory in which a file of this path lies, and its name there; `None`: not where it should.
    pub fn place_of<'a>(&self, path: &'a [u8]) -> Option<(PathBuf, &'a [u8])> {
        let cut = path.iter().rposition(|byte| *byte == b'/');
        let (dir, name) = cut.map_or((&path[..0], path), |at| (&path[..at], &path[at + 1..]));
        let straight = !self.astray.any.load(Ordering::Relaxed);
        straight.then(|| (self.scope.files_path.join(OsStr::from_bytes(dir)), name))
    }

    pub fn open(&self, path: &[u8], write: bool) -> io::Result<File> {
        if !self.is_there() {
            return Err(Errno::IO.into());
        }
        self.tree().open(&self.lies(path), write)
    }

    /// Renames a file, replacing what is at `to`; makes the directories of `to`.
    pub fn rename(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            self.is_free(to)?;
            tree.rename(&self.lies(from), &self.lies(to))?;
            self.is_settled(from);
            Ok(())
        })
    }

    /// Renames a directory. An absent `from` is fine; leftovers in `to` are merged with.
    fn rename_dir(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            self.is_free(to)?;
            let (was, is) = (self.lies(from), self.lies(to));
            tree.rename_dir(&was, &is)?;
            self.is_settled(from);
            if self.astray.any.load(Ordering::Relaxed) {
                lock(&self.astray.lies).renamed((from, to), (&was, &is));
            }
            Ok(())
        })
    }

    /// The file is called `to` from now on, whatever the device makes of it; an error says that it could not follow.
    pub fn follow(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.rename(from, to).inspect_err(|_| self.strays(from, to))
    }

    /// The same of a directory. An absent `from` is fine; leftovers in `to` are merged with.
    pub fn follow_dir(&self, from: &[u8], to: &[u8]) -> io::Result<()> {
        self.rename_dir(from, to).inspect_err(|_| self.strays(from, to))
    }

    fn strays(&self, from: &[u8], to: &[u8]) {
        let (tree, mut lies) = (self.tree(), lock(&self.astray.lies));
        let was = lies.where_is(from);
        // Nothing of it is here.
        if matches!(tree.stat(&was), Err(Errno::NOENT | Errno::NOTDIR)) {
            return;
        }
        let aside = loop {
            lies.count += 1;
            let aside = format!("{ASTRAY}{}", lies.count).into_bytes();
            if tree.stat(&aside).is_err() {
                break aside;
            }
        };
        let is = if tree.rename(&was, &aside).is_ok() { aside } else { was.clone() };
        lies.renamed((from, to), (&was, &is));
        lies.at.insert(to.to_vec(), is);
        self.astray.any.store(true, Ordering::Relaxed);
    }

    /// Gives a file from [`Self::create_unnamed`] a name. ENOENT where the file system has no `O_TMPFILE`: copy it then.
    pub fn link_unnamed(&self, file: &File, path: &[u8]) -> io::Result<()> {
        self.is_free(path)?;
        self.tree().link_unnamed(file, &self.lies(path))
    }

    /// Absent is fine.
    pub fn unlink(&self, path: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            tree.unlink(&self.lies(path))?;
            self.is_settled(path);
            Ok(())
        })
    }

    /// Who has it open sees this mode from now on.
    pub fn unlink_with(&self, path: &[u8], perm: Option<u32>) -> io::Result<()> {
        if let Some(perm) = perm
            && let Err(why) = self.tree().set_perm(&self.lies(path), perm)
        {
            tracing::debug!(%why, "a plain file keeps its mode");
        }
        self.unlink(path)
    }

    /// Of a file whose name is about to go, and what it was charged.
    pub fn hold(&self, path: Option<&[u8]>, charged_bytes: u64) -> Remains<'_> {
        let large = charged_bytes >= HELD_BYTES_MIN && self.is_there();
        let held = path.filter(|_| large).and_then(|path| self.tree().hold(&self.lies(path)).ok());
        Remains { device: self, held, charged_bytes }
    }

    /// What is there, if anything.
    pub fn plain_at(&self, path: &[u8]) -> io::Result<Option<Plain>> {
        self.tree().plain_at(&self.lies(path))
    }

    /// Only if it is this file.
    pub fn unlink_if(&self, path: &[u8], ino: u64) -> io::Result<()> {
        let there = if self.is_there() { self.plain_at(path)? } else { None };
        if there.is_some_and(|plain| plain.ino == ino) { self.unlink(path) } else { Ok(()) }
    }

    /// Removes a tree of directories without files (absent is fine); ENOTEMPTY when there are files in it.
    pub fn remove_dir(&self, path: &[u8]) -> io::Result<()> {
        self.change(|tree| {
            tree.remove_dir(&self.lies(path))?;
            self.is_settled(path);
            Ok(())
        })
    }

    /// Every plain file, by where it lies.
    pub fn walk(&self, each: Each<'_>) -> io::Result<()> {
        self.change(|tree| tree.walk(each))
    }
}
