//! Plain files under one directory handle: every path is relative, no symlink is followed, no path leaves the directory.
//!
//! The kernel resolves a path in one call (`openat2`, beneath the root, no symlinks). Where the kernel has no `openat2` (or a
//! sandbox forbids it), and for paths that are too long for one call, the path is walked piece by piece with directory handles.
//! The length of a path is therefore unlimited.
//!
//! The danger that it avoids: a symlink planted in the tier that turns our write into a write to another file of the user.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use surgetank_types::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use surgetank_types::model::Timestamp;

/// Longest piece of a path handed to one system call (PATH_MAX is 4096 with the final NUL).
const PIECE_BYTES_MAX: usize = 4000;
/// Attempts to use a directory after making it, because another thread may remove it as empty before.
const ATTEMPTS: usize = 32;
/// Beneath the root, no symlinks of any kind.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const PRIVATE_DIR: Mode = Mode::RWXU;

static OPENAT2_MISSING: AtomicBool = AtomicBool::new(false);

/// Called for each file, with its path.
pub type Each<'a> = &'a mut dyn FnMut(&[u8], Plain);

/// A plain file's numbers, as its file system reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// Inode number on the device.
    pub ino: u64,
    /// A digest of the time at which the file was made, because an inode number may be reused. 0 if the time is unknown.
    pub born: u32,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Bytes of the blocks that the file occupies.
    pub blocks_bytes: u64,
    /// Time of the last change of the content.
    pub mtime: Timestamp,
}

impl Plain {
    const ASKED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

    /// The numbers of an open file. Errors: those of `statx`.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::from(&rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, Self::ASKED)?))
    }
}

impl From<&rustix::fs::Statx> for Plain {
    fn from(stat: &rustix::fs::Statx) -> Self {
        let known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
        let born = || {
            let mut bytes = [0; 12];
            bytes[..8].copy_from_slice(&stat.stx_btime.tv_sec.to_le_bytes());
            bytes[8..].copy_from_slice(&stat.stx_btime.tv_nsec.to_le_bytes());
            crc_fast::crc32_iscsi(&bytes).max(1)
        };
        Self {
            ino: stat.stx_ino,
            born: if known { born() } else { 0 },
            size_bytes: stat.stx_size,
            blocks_bytes: stat.stx_blocks * 512,
            mtime: Timestamp::from_parts(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
        }
    }
}

/// A directory and all below it; borrowed from the owner of the handle.
#[derive(Clone, Copy)]
pub(super) struct Tree<'a> {
    root: BorrowedFd<'a>,
}

/// The directory part of a path as an open handle: the root itself, or one opened for the call.
enum Parent<'a> {
    Root(BorrowedFd<'a>),
    Below(OwnedFd),
}

impl AsFd for Parent<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Root(root) => *root,
            Self::Below(dir) => dir.as_fd(),
        }
    }
}

/// `a/b/c` → (`a/b`, `c`); the first part may be empty.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

/// Paths come from the catalog and are clean; any other path must not reach the file system.
fn check(path: &[u8]) -> io::Result<()> {
    let clean = !path.contains(&0)
        && path.split(|byte| *byte == b'/').all(|name| !name.is_empty() && name != b"." && name != b"..");
    if clean { Ok(()) } else { Err(Errno::INVAL.into()) }
}

/// One step of resolution. `path` may have several components and is at most one piece long.
fn open_beneath(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    if !OPENAT2_MISSING.load(Ordering::Relaxed) {
        loop {
            match rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, mode, RESOLVE) {
                Err(Errno::NOSYS | Errno::PERM) if !openat2_works(dir) => {
                    OPENAT2_MISSING.store(true, Ordering::Relaxed);
                    break;
                }
                // A concurrent rename interfered with the resolution: the kernel asks to try again.
                Err(Errno::AGAIN | Errno::INTR) => {}
                outcome => return outcome,
            }
        }
    }
    open_step_by_step(dir, path, flags, mode)
}

/// Tells an EPERM of a sandbox that forbids the call from one for this file.
fn openat2_works(dir: BorrowedFd<'_>) -> bool {
    rustix::fs::openat2(dir, ".", DIRECTORY, Mode::empty(), RESOLVE).is_ok()
}

/// The same without `openat2`: opens every component separately and refuses symlinks.
fn open_step_by_step(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let (parents, name) = split(path);
    let mut held: Option<OwnedFd> = None;
    for parent in parents.split(|byte| *byte == b'/').filter(|parent| !parent.is_empty()) {
        let from = held.as_ref().map_or(dir, AsFd::as_fd);
        let next = rustix::fs::openat(from, parent, DIRECTORY, Mode::empty())?;
        held = Some(next);
    }
    let from = held.as_ref().map_or(dir, AsFd::as_fd);
    rustix::io::retry_on_intr(|| rustix::fs::openat(from, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode))
}

impl<'a> Tree<'a> {
    pub fn new(root: BorrowedFd<'a>) -> Self {
        Self { root }
    }

    /// Opens the entry at `path`, in as few calls as its length allows.
    fn open_at(self, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        if path.len() <= PIECE_BYTES_MAX {
            return open_beneath(self.root, path, flags, mode);
        }
        let (parents, name) = split(path);
        let parent = self.open_dir(parents)?;
        open_beneath(parent.as_fd(), name, flags, mode)
    }

    fn open_dir(self, path: &[u8]) -> Result<Parent<'a>, Errno> {
        let mut held = Parent::Root(self.root);
        let mut rest = path;
        while !rest.is_empty() {
            let piece = if rest.len() <= PIECE_BYTES_MAX {
                rest
            } else {
                // A name has at most 255 bytes, so there is a slash unless the path is too long for any file system.
                let slash = rest[..PIECE_BYTES_MAX].iter().rposition(|byte| *byte == b'/').ok_or(Errno::NAMETOOLONG)?;
                &rest[..slash]
            };
            held = Parent::Below(open_beneath(held.as_fd(), piece, DIRECTORY, Mode::empty())?);
            rest = rest.get(piece.len() + 1..).unwrap_or_default();
        }
        Ok(held)
    }

    /// Makes the missing directories of `path`, private to the user.
    fn make_dirs(self, path: &[u8]) -> Result<Parent<'a>, Errno> {
        let mut held = Parent::Root(self.root);
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            let next = match open_beneath(held.as_fd(), name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(held.as_fd(), name, PRIVATE_DIR) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno),
                    }
                    open_beneath(held.as_fd(), name, DIRECTORY, Mode::empty())?
                }
                outcome => outcome?,
            };
            held = Parent::Below(next);
        }
        Ok(held)
    }

    /// Runs `act`. On ENOENT it makes the directories of `path` and tries again; it also removes a leftover empty directory at
    /// the file's path. `leftover` is the errno by which `act` reports such a directory.
    fn with_parents<T>(self, path: &[u8], leftover: Errno, mut act: impl FnMut() -> Result<T, Errno>) -> io::Result<T> {
        let mut attempts = 0;
        loop {
            let errno = match act() {
                Ok(done) => return Ok(done),
                Err(errno) => errno,
            };
            attempts += 1;
            if attempts > ATTEMPTS {
                return Err(errno.into());
            } else if errno == Errno::NOENT {
                match self.make_dirs(split(path).0) {
                    Ok(_) | Err(Errno::NOENT) => {}
                    Err(errno) => return Err(errno.into()),
                }
            } else if errno == leftover {
                match self.remove_dir(path) {
                    Ok(()) => {}
                    // A file, or a directory that contains files: the caller decides.
                    Err(_) => return Err(errno.into()),
                }
            } else {
                return Err(errno.into());
            }
        }
    }

    pub fn create(self, path: &[u8], perm: u32, access: OFlags) -> io::Result<File> {
        check(path)?;
        let flags = OFlags::CREATE | OFlags::EXCL | access;
        self.with_parents(path, Errno::EXIST, || self.open_at(path, flags, Mode::from_raw_mode(perm))).map(File::from)
    }

    pub fn open(self, path: &[u8], write: bool) -> io::Result<File> {
        check(path)?;
        // O_NONBLOCK would be wrong on a leased file. A fifo cannot be here: only plain files are made.
        let flags = if write { OFlags::RDWR } else { OFlags::RDONLY };
        Ok(File::from(self.open_at(path, flags, Mode::empty())?))
    }

    /// A handle that neither reads nor writes: the file's bytes stay as long as it is open.
    pub fn hold(self, path: &[u8]) -> io::Result<OwnedFd> {
        check(path)?;
        Ok(self.open_at(path, OFlags::PATH, Mode::empty())?)
    }

    pub fn rename(self, from: &[u8], to: &[u8]) -> io::Result<()> {
        check(from)?;
        check(to)?;
        let (from_dir, from_name) = split(from);
        let (to_dir, to_name) = split(to);
        // Held for the whole operation, so that ENOENT below can only concern `to` or a removed name.
        let from_dir = self.open_dir(from_dir)?;
        rustix::fs::statat(from_dir.as_fd(), from_name, AtFlags::SYMLINK_NOFOLLOW)?;
        self.with_parents(to, Errno::ISDIR, || {
            let to_dir = self.open_dir(to_dir)?;
            rustix::fs::renameat(from_dir.as_fd(), from_name, to_dir.as_fd(), to_name)
        })
    }

    /// Moves a directory. Leftover directories in `to` do not stop it: the two trees are merged. If both contain an entry of
    /// the same name that is not a directory, the result is EEXIST and nothing moves: the entry may be the only copy of a file,
    /// which only the catalog can tell.
    pub fn rename_dir(self, from: &[u8], to: &[u8]) -> io::Result<()> {
        check(from)?;
        check(to)?;
        let below_itself = to.starts_with(from) && to.get(from.len()) == Some(&b'/');
        if from == to {
            return Ok(());
        } else if below_itself {
            return Err(Errno::INVAL.into());
        }
        // First of all: every device is asked, and a device without `from` makes nothing at `to` either.
        match self.stat(from) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            outcome => outcome?,
        };
        match self.rename_over_empty(from, to) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            // A file where a directory is to be.
            Err(Errno::NOTDIR) => return Err(Errno::EXIST.into()),
            Err(errno) => return Err(errno.into()),
        }
        let mut moves = Vec::new();
        let mut pending = vec![(from.to_vec(), to.to_vec())];
        while let Some((from, to)) = pending.pop() {
            for (name, kind) in entries(self.open_dir(&from)?.as_fd())? {
                let (from, to) = (join(&from, &name), join(&to, &name));
                match self.stat(&to) {
                    Err(Errno::NOENT) => moves.push((from, to)),
                    Ok(there) => {
                        let both = kind == FileType::Directory
                            && FileType::from_raw_mode(there.st_mode) == FileType::Directory;
                        if !both {
                            return Err(Errno::EXIST.into());
                        }
                        pending.push((from, to));
                    }
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        for (from, to) in &moves {
            self.rename(from, to)?;
        }
        self.remove_dir(from)
    }

    fn rename_over_empty(self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let (from_dir, from_name) = split(from);
        let (to_dir, to_name) = split(to);
        let from_dir = self.open_dir(from_dir)?;
        for _ in 0..ATTEMPTS {
            let to_dir = self.make_dirs(to_dir)?;
            match rustix::fs::renameat(from_dir.as_fd(), from_name, to_dir.as_fd(), to_name) {
                // Directories that contain only directories are no obstacle.
                Err(Errno::NOTEMPTY | Errno::EXIST) if self.remove_dir(to).is_ok() => {}
                // Another thread removed the parent of `to` meanwhile, unless it is `from` that was removed.
                Err(Errno::NOENT) if self.stat(from).is_ok() => {}
                outcome => return outcome,
            }
        }
        Err(Errno::AGAIN)
    }

    /// The plain file at this path, if there is one.
    pub fn plain_at(self, path: &[u8]) -> io::Result<Option<Plain>> {
        check(path)?;
        let (dir, name) = split(path);
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        match self.open_dir(dir).and_then(|dir| rustix::fs::statx(dir.as_fd(), name, flags, Plain::ASKED)) {
            Ok(stat) => Ok(Some(Plain::from(&stat))),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub fn set_perm(self, path: &[u8], perm: u32) -> io::Result<()> {
        check(path)?;
        let (dir, name) = split(path);
        let dir = self.open_dir(dir)?;
        Ok(rustix::fs::chmodat(dir.as_fd(), name, Mode::from_raw_mode(perm), AtFlags::empty())?)
    }

    pub fn unlink(self, path: &[u8]) -> io::Result<()> {
        check(path)?;
        let (dir, name) = split(path);
        let outcome = self.open_dir(dir).and_then(|dir| rustix::fs::unlinkat(dir.as_fd(), name, AtFlags::empty()));
        match outcome {
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Removes `path` and the directories below it as far as they contain no files; ENOTEMPTY if some do.
    pub fn remove_dir(self, path: &[u8]) -> io::Result<()> {
        check(path)?;
        let mut outcome = Ok(());
        for dir in self.directories_below(path)?.iter().rev().map(Vec::as_slice).chain([path]) {
            let (parent, name) = split(dir);
            let removed =
                self.open_dir(parent).and_then(|parent| rustix::fs::unlinkat(parent.as_fd(), name, AtFlags::REMOVEDIR));
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY | Errno::EXIST) => outcome = Err(Errno::NOTEMPTY.into()),
                Err(errno) => return Err(errno.into()),
            }
        }
        outcome
    }

    /// Removes all directories that contain no files; remaining ones are not an error.
    pub fn remove_empty_dirs(self) -> io::Result<()> {
        for dir in self.directories_below(&[])?.iter().rev() {
            let (parent, name) = split(dir);
            let removed =
                self.open_dir(parent).and_then(|parent| rustix::fs::unlinkat(parent.as_fd(), name, AtFlags::REMOVEDIR));
            match removed {
                Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// All directories below `path`, a parent always before its children.
    fn directories_below(self, path: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let mut all: Vec<Vec<u8>> = Vec::new();
        let mut next = 0;
        let mut here = path.to_vec();
        loop {
            let opened = self.open_dir(&here);
            match opened.map_err(io::Error::from).and_then(|dir| entries(dir.as_fd())) {
                Ok(entries) => all.extend(
                    entries
                        .into_iter()
                        .filter(|(_, kind)| *kind == FileType::Directory)
                        .map(|(name, _)| join(&here, &name)),
                ),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
            match all.get(next) {
                Some(dir) => here.clone_from(dir),
                None => return Ok(all),
            }
            next += 1;
        }
    }

    /// Every plain file below the root. Files that are made or removed meanwhile may be missing.
    pub fn walk(self, each: Each<'_>) -> io::Result<()> {
        let mut pending = vec![Vec::new()];
        while let Some(here) = pending.pop() {
            let dir = match self.open_dir(&here) {
                Err(Errno::NOENT) => continue,
                outcome => outcome?,
            };
            for (name, kind) in entries(dir.as_fd())? {
                let path = join(&here, &name);
                if kind == FileType::Directory {
                    pending.push(path);
                } else if kind == FileType::RegularFile {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    match rustix::fs::statx(dir.as_fd(), name.as_slice(), flags, Plain::ASKED) {
                        Ok(stat) => each(&path, Plain::from(&stat)),
                        Err(Errno::NOENT) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
            }
        }
        Ok(())
    }

    pub fn stat(self, path: &[u8]) -> Result<rustix::fs::Stat, Errno> {
        let (dir, name) = split(path);
        rustix::fs::statat(self.open_dir(dir)?.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// Names and kinds in a directory held by an `O_PATH` handle.
fn entries(dir: BorrowedFd<'_>) -> io::Result<Vec<(Vec<u8>, FileType)>> {
    let listing = rustix::fs::openat(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut found = Vec::new();
    for entry in Dir::new(listing)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let kind = match entry.file_type() {
            // Some file systems do not report the type.
            FileType::Unknown => match rustix::fs::statat(dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(errno.into()),
            },
            kind => kind,
        };
        found.push((name.to_vec(), kind));
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
