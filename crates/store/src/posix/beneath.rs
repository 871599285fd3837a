//! Names under the store's root, reached only from a handle of the root.
//!
//! The root's own path is useless (the mount covers it), and other users change the directories below at any time. Every
//! operation therefore opens the parent directory beneath the handle, follows no symbolic link, and then acts on one name in
//! it.
//! The danger that it avoids: a directory that is swapped for a link between two calls. It gives ELOOP, never another place.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fcntl_getfl, fcntl_setfl, fstat, openat, openat2, statat,
};
use rustix::io::Errno;

use crate::StorePath;

/// Longest path of one system call, with the final zero; longer paths are walked in pieces.
const PATH_BYTES_MAX: usize = 4096;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A handle of the store's root directory, taken before anything was mounted over it.
pub struct Root {
    handle: OwnedFd,
    /// `openat2` works (Linux 5.6, and no filter forbids it).
    openat2: bool,
}

/// An open directory: a borrowed handle (the root's, for example), or an owned one.
pub enum Dir<'a> {
    Borrowed(BorrowedFd<'a>),
    Own(OwnedFd),
}

impl AsFd for Dir<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Borrowed(fd) => *fd,
            Self::Own(fd) => fd.as_fd(),
        }
    }
}

/// One name in an open directory.
pub struct Place<'a> {
    pub dir: Dir<'a>,
    pub name: &'a [u8],
}

impl Place<'_> {
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(statat(&self.dir, self.name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT)?)
    }
}

/// An `O_PATH` handle: pins an inode of any type without opening it, and gives it a path of its own.
pub struct Pinned(OwnedFd);

impl Pinned {
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(fstat(&self.0)?)
    }

    /// A path to the pinned inode itself, whatever its name is now.
    pub fn path(&self) -> io::Result<CString> {
        handle_path(&self.0)
    }

    /// Opens the pinned file. A fifo, device or directory is refused: these could block or have side effects.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        require_file(&self.stat()?)?;
        Ok(openat(CWD, self.path()?, flags | OFlags::CLOEXEC, Mode::empty())?.into())
    }
}

impl Deref for Pinned {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

/// The path under which the kernel knows an open descriptor.
pub fn handle_path(fd: impl AsFd) -> io::Result<CString> {
    Ok(CString::new(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?)
}

pub fn require_file(stat: &Stat) -> io::Result<()> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Errno::ISDIR.into()),
        FileType::Symlink => Err(Errno::LOOP.into()),
        _ => Err(Errno::INVAL.into()),
    }
}

impl Root {
    pub fn new(handle: OwnedFd) -> Self {
        let probe = openat2(&handle, ".", DIRECTORY, Mode::empty(), ResolveFlags::BENEATH);
        // Any other failure is the directory's (a squashed root may not search it): the call itself exists.
        Self { handle, openat2: !matches!(probe, Err(Errno::NOSYS | Errno::PERM)) }
    }

    #[cfg(test)]
    pub fn without_openat2(mut self) -> Self {
        self.openat2 = false;
        self
    }

    pub fn handle(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }

    /// The directory at `path` as an `O_PATH` handle.
    pub fn dir(&self, path: &StorePath) -> io::Result<Dir<'_>> {
        validate(&path.0)?;
        self.walk(&path.0)
    }

    /// The directory that contains the last component of `path`, and that component. The root has none: EBUSY.
    pub fn place<'a>(&'a self, path: &'a StorePath) -> io::Result<Place<'a>> {
        validate(&path.0)?;
        match path.0.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => Ok(Place { dir: self.walk(&path.0[..slash])?, name: &path.0[slash + 1..] }),
            None if path.0.is_empty() => Err(Errno::BUSY.into()),
            None => Ok(Place { dir: Dir::Borrowed(self.handle()), name: &path.0 }),
        }
    }

    /// The place of `path` beside a known one; the directory is not opened again if it is the same.
    pub fn place_beside<'a>(
        &'a self,
        known: &'a Place<'_>,
        known_path: &StorePath,
        path: &'a StorePath,
    ) -> io::Result<Place<'a>> {
        let parent =
            |path: &StorePath| path.0.len() - path.0.rsplit(|byte| *byte == b'/').next().map_or(0, <[u8]>::len);
        let (here, there) = (parent(known_path), parent(path));
        if known_path.0[..here] != path.0[..there] || there == path.0.len() {
            return self.place(path);
        }
        validate(&path.0)?;
        Ok(Place { dir: Dir::Borrowed(known.dir.as_fd()), name: &path.0[there..] })
    }

    pub fn pin(&self, path: &StorePath) -> io::Result<Pinned> {
        if path.0.is_empty() {
            return Ok(Pinned(self.handle.try_clone()?));
        }
        pin_at(&self.place(path)?)
    }

    /// Opens the directory for reading and syncing.
    pub fn open_dir(&self, path: &StorePath) -> io::Result<OwnedFd> {
        let dir = self.dir(path)?;
        Ok(openat(&dir, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Opens an existing regular file.
    pub fn open_file(&self, path: &StorePath, flags: OFlags) -> io::Result<File> {
        let file = open_file_at(&self.place(path)?, flags)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        Ok(file)
    }

    fn walk(&self, path: &[u8]) -> io::Result<Dir<'_>> {
        let mut dir = Dir::Borrowed(self.handle());
        let mut rest = path;
        while !rest.is_empty() {
            let (piece, after) = self.cut(rest);
            dir = Dir::Own(self.step(dir.as_fd(), piece)?);
            rest = after;
        }
        Ok(dir)
    }

    /// As many components as one call can take, and the rest.
    fn cut<'p>(&self, path: &'p [u8]) -> (&'p [u8], &'p [u8]) {
        let end = if !self.openat2 {
            path.iter().position(|byte| *byte == b'/')
        } else if path.len() < PATH_BYTES_MAX {
            None
        } else {
            // A single component that is too long is passed whole: the kernel names the error.
            path[..PATH_BYTES_MAX]
                .iter()
                .rposition(|byte| *byte == b'/')
                .or_else(|| path.iter().position(|byte| *byte == b'/'))
        };
        end.map_or((path, &[]), |end| (&path[..end], &path[end + 1..]))
    }

    fn step(&self, dir: BorrowedFd<'_>, piece: &[u8]) -> io::Result<OwnedFd> {
        if !self.openat2 {
            return openat(dir, piece, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()).map_err(|error| match error {
                // The two flags together give ENOTDIR for a link too; this tells them apart as openat2 does.
                Errno::NOTDIR => match statat(dir, piece, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => Errno::LOOP.into(),
                    _ => error.into(),
                },
                _ => error.into(),
            });
        }
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        // EAGAIN: renames elsewhere interfered with the walk. Bounded, because another client could rename indefinitely.
        let mut left = 100;
        loop {
            match openat2(dir, piece, DIRECTORY, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) if left > 0 => left -= 1,
                result => return Ok(result?),
            }
        }
    }
}

/// Pins whatever has the name; a link itself rather than its target.
pub fn pin_at(place: &Place<'_>) -> io::Result<Pinned> {
    Ok(Pinned(openat(&place.dir, place.name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?))
}

/// Opens a file so that the agent's own reads do not change its access time, if its owner permits that.
pub fn without_atime(open: impl Fn(OFlags) -> io::Result<File>, flags: OFlags) -> io::Result<File> {
    match open(flags | OFlags::NOATIME) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => open(flags),
        result => result,
    }
}

/// Opens an existing regular file without blocking on another type of file under its name. The descriptor stays non-blocking,
/// which has no effect on regular files.
pub fn open_file_at(place: &Place<'_>, flags: OFlags) -> io::Result<File> {
    let guard = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = openat(&place.dir, place.name, flags | guard, Mode::empty()).map_err(|error| match error {
        // The answer of a fifo without a reader, or of a socket.
        Errno::NXIO => Errno::INVAL,
        error => error,
    })?;
    require_file(&fstat(&fd)?)?;
    Ok(fd.into())
}

/// `.` and `..` never come from the namespace; a path with them is a programming error, not the user's.
fn validate(path: &[u8]) -> io::Result<()> {
    let clean = |name: &[u8]| !name.is_empty() && name != b"." && name != b".." && !name.contains(&0);
    if path.is_empty() || path.split(|byte| *byte == b'/').all(clean) { Ok(()) } else { Err(Errno::INVAL.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_dots_are_refused() {
        for bad in ["/", "/a", "a/", "a//b", ".", "a/../b", "..", "a/.", "a\0b"] {
            assert!(validate(bad.as_bytes()).is_err(), "{bad}");
        }
        for good in ["", "a", "a/b", "...", "a/.b", "a/..b"] {
            assert!(validate(good.as_bytes()).is_ok(), "{good}");
        }
    }
}
