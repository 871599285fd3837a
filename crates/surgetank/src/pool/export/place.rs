//! Places below the mount's root: how a single name becomes a descriptor, and which number its node has.
//!
//! The danger that it avoids: a name that leads elsewhere. The kernel refuses links and mounts below while it resolves
//! a name, and the device is compared afterwards.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags, fstatfs, openat, openat2, statx,
};
use rustix::io::Errno;
use surgetank_types::model::{Attr, HOMES, Kind, Timestamp};

use super::moving::{Moved, Moving};
use crate::pool::link::{Moves, Renamed};

/// In the directory of contents, how the names of files by their numbers begin.
pub const BY_NUMBER: u8 = b'@';

const NAME_BYTES_MAX: usize = 255;
/// `f_type` of a FUSE mount.
const FUSE_MAGIC: u32 = 0x6573_5546;
/// The type of FUSE's file handles: `FILEID_INO64_GEN`.
const HANDLE_TYPE: i32 = 0x81;
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_MAGICLINKS);

/// The mount's root.
#[derive(Debug)]
pub struct Root {
    pub fd: OwnedFd,
    device: (u32, u32),
    fuse: bool,
    /// Directories of the store that this member has claimed, by path.
    claimed: Mutex<HashMap<Box<[u8]>, Arc<OwnedFd>>>,
    /// Those that were claimed to be renamed, until they are kept.
    moving: Moving,
    /// The directory of contents for other members.
    homes: OnceLock<(OwnedFd, String)>,
}

/// An open place with its attributes.
#[derive(Debug)]
pub struct Place {
    pub fd: OwnedFd,
    pub number: u64,
    pub attr: Attr,
}

impl Root {
    /// Errors: ENOTCONN, nothing is mounted at the path yet; all of open(2).
    pub fn open(path: &Path) -> Result<Self, Errno> {
        let fd = openat(CWD, path, PATH | OFlags::DIRECTORY, Mode::empty())?;
        let stat = stat(&fd)?;
        // The field's type depends on the architecture; the number has 32 bits.
        let fuse = fstatfs(&fd)?.f_type as u32 == FUSE_MAGIC;
        // Without the mount the path is an ordinary directory, which is not to be served. (Unit tests serve one.)
        let mounted = fuse && stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        if !mounted && !cfg!(test) {
            return Err(Errno::NOTCONN);
        }
        Ok(Self {
            fd,
            device: device(&stat),
            fuse,
            claimed: Mutex::default(),
            moving: Moving::default(),
            homes: OnceLock::new(),
        })
    }

    /// Finds the directory of contents for other members of the pool.
    pub fn find_homes(&self, pool: &str) -> Result<(), Errno> {
        let fd = openat2(&self.fd, HOMES, PATH | OFlags::DIRECTORY, Mode::empty(), BENEATH)?;
        // (Found twice, it is the same one.)
        let _ = self.homes.set((fd, pool.to_owned()));
        Ok(())
    }

    /// Opens the content for a file of this number. Errors: EAGAIN, the directory has not been found yet.
    pub fn open_home(&self, number: u64, flags: OFlags) -> Result<OwnedFd, Errno> {
        let (directory, pool) = self.homes.get().ok_or(Errno::AGAIN)?;
        open_name(directory, format!("{pool}.{number}").as_bytes(), flags, Mode::empty())
    }

    /// The place of a file of this member, by its number. Errors: ESTALE, it has no name, or is a directory.
    pub fn by_number(&self, number: u64) -> Result<Place, Errno> {
        let (directory, _) = self.homes.get().ok_or(Errno::STALE)?;
        let name = [&[BY_NUMBER], number.to_string().as_bytes()].concat();
        let found = open_name(directory, &name, PATH, Mode::empty()).map_err(|_| Errno::STALE)?;
        let place = self.place_as_opened(found)?;
        if place.number == number { Ok(place) } else { Err(Errno::STALE) }
    }

    /// The place of a descriptor that was just opened below the root. Errors: EXDEV, it is on another file system.
    pub fn place(&self, fd: OwnedFd) -> Result<Place, Errno> {
        let stat = stat(&fd)?;
        self.place_with(fd, &stat)
    }

    /// The same, with the attributes that came with the opening: the agent is not asked for them again.
    pub fn place_as_opened(&self, fd: OwnedFd) -> Result<Place, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        let stat = statx(&fd, c"", flags, StatxFlags::BASIC_STATS)?;
        self.place_with(fd, &stat)
    }

    fn place_with(&self, fd: OwnedFd, stat: &Statx) -> Result<Place, Errno> {
        if device(stat) != self.device {
            return Err(Errno::XDEV);
        }
        let number = if self.fuse { fuse_node(&fd)? } else { stat.stx_ino };
        Ok(Place { fd, number, attr: attr(stat) })
    }

    /// The number of a name's node.
    pub fn as_known(&self, directory: impl AsFd, name: &[u8]) -> Result<u64, Errno> {
        Ok(self.place_as_opened(open_name(directory, name, PATH, Mode::empty())?)?.number)
    }

    /// The place of a name in a directory.
    pub fn of_name(&self, directory: impl AsFd, name: &[u8]) -> Result<Place, Errno> {
        self.place(open_name(directory, name, PATH, Mode::empty())?)
    }

    /// Keeps a directory that this member has just claimed, for [`Self::of_path`]. The kernel still knows its way, from
    /// the change that claims it. Later, the way might need another member, which waits for this one.
    pub fn keep(&self, path: &[u8]) -> Result<(), Errno> {
        let fd = Arc::new(self.walked(path)?);
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).insert(path.into(), fd);
        Ok(())
    }

    /// This member has claimed a directory to rename it: it is kept later.
    pub fn moves(&self, path: &[u8], moves: &Moves) {
        // (What is open is found, whatever its path is.)
        if !self.claimed.lock().unwrap_or_else(PoisonError::into_inner).contains_key(path) {
            self.moving.add(path, moves);
        }
    }

    /// A directory gets another path.
    pub fn renamed(&self, renamed: &Renamed) {
        self.moving.renamed(renamed);
    }

    /// Is it claimed to be renamed, and not kept yet?
    pub fn is_moving(&self, path: &[u8]) -> bool {
        self.moving.has(path)
    }

    /// Keeps what was claimed for renames, as far as it is found. Returns whether to try again.
    pub fn keep_moved(&self) -> bool {
        let kept = |path: &[u8]| self.claimed.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned();
        self.moving.find(|claimed, moved| {
            let found = match moved {
                Moved::Itself { ino, paths } => {
                    // (Another directory may have one of the paths by now.)
                    let is_it = |fd: &OwnedFd| stat(fd).is_ok_and(|stat| stat.stx_ino == *ino);
                    paths.iter().find_map(|path| self.walked(path).ok().filter(is_it))
                }
                Moved::Below => {
                    let (above, name) = split(claimed)?;
                    openat2(kept(above)?, name, PATH | OFlags::DIRECTORY, Mode::empty(), BENEATH).ok()
                }
            };
            let fd = Arc::new(found?);
            self.claimed.lock().unwrap_or_else(PoisonError::into_inner).insert(claimed.into(), fd);
            Some(())
        })
    }

    /// It is claimed no more.
    pub fn keep_no_more(&self, path: &[u8]) -> Option<Arc<OwnedFd>> {
        self.moving.remove(path);
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).remove(path)
    }

    /// It is claimed still.
    pub fn keep_again(&self, path: &[u8], directory: Arc<OwnedFd>) {
        // (A newer claim has its own.)
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).entry(path.into()).or_insert(directory);
    }

    /// A claimed directory, by its path below the root. An empty one: the root. Errors: EREMCHG, it is not claimed.
    pub fn of_path(&self, path: &[u8]) -> Result<Place, Errno> {
        let kept = self.claimed.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned();
        let fd = match &kept {
            Some(fd) => openat(fd, c".", PATH | OFlags::DIRECTORY, Mode::empty())?,
            // (Unit tests serve a plain directory, in which none is claimed.)
            None if path.is_empty() || cfg!(test) => self.walked(path)?,
            // (Also if it is being renamed: the other member asks again.)
            None => return Err(Errno::REMCHG),
        };
        self.place(fd)
    }

    /// The path of an open directory below the root, as the kernel knows it; that of the root is empty. `None`: it was
    /// removed.
    pub fn path_below(&self, fd: impl AsFd) -> Option<Vec<u8>> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        if statx(&fd, c"", flags, StatxFlags::NLINK).ok()?.stx_nlink == 0 {
            return None;
        }
        let known = |fd: &dyn AsRawFd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok();
        let (path, root) = (known(&fd.as_fd())?, known(&self.fd)?);
        Some(path.strip_prefix(&root).ok()?.as_os_str().as_bytes().to_vec())
    }

    fn walked(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = PATH | OFlags::DIRECTORY;
        if path.is_empty() {
            return openat(&self.fd, c".", flags, Mode::empty());
        }
        path.split(|byte| *byte == b'/').try_for_each(checked)?;
        openat2(&self.fd, path, flags, Mode::empty(), BENEATH)
    }
}

/// The path of the directory above, and the name in it.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|byte| *byte == b'/')?;
    Some((&path[..at], &path[at + 1..]))
}

/// Flags for a descriptor that only names a file.
pub const PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Set at each open of a file here: the agent need not look at the threads of programs, which do not set it. Linux gives it no
/// effect in open(2).
pub const OF_A_MEMBER: OFlags = OFlags::from_bits_retain(libc::O_ASYNC as u32);

/// Opens one name in a directory, with flags of open(2). A link is not followed.
pub fn open_name(directory: impl AsFd, name: &[u8], flags: OFlags, perm: Mode) -> Result<OwnedFd, Errno> {
    checked(name)?;
    let flags = if flags.contains(OFlags::PATH) { flags } else { flags | OF_A_MEMBER };
    openat2(directory, name, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, perm, BENEATH)
}

/// Errors: EINVAL, the name does not name an entry of a directory; ENAMETOOLONG.
pub fn checked(name: &[u8]) -> Result<(), Errno> {
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(Errno::INVAL);
    }
    if name.len() > NAME_BYTES_MAX { Err(Errno::NAMETOOLONG) } else { Ok(()) }
}

/// The path under which the kernel knows an open descriptor: it leads to the file itself, whatever its names are.
pub fn path_of(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Opens the file of a descriptor again.
pub fn reopened(fd: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = path_of(fd);
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OF_A_MEMBER;
    rustix::io::retry_on_intr(|| openat(CWD, path.as_str(), flags, Mode::empty()))
}

/// The attributes of an open file.
pub fn attr_of(fd: impl AsFd) -> Result<Attr, Errno> {
    Ok(attr(&stat(fd)?))
}

/// The type of an open file, which the kernel knows without a request to the agent.
pub fn known_kind(fd: impl AsFd) -> Result<Kind, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    Ok(Kind::from_mode(u32::from(statx(fd, c"", flags, StatxFlags::TYPE)?.stx_mode)))
}

fn stat(fd: impl AsFd) -> Result<Statx, Errno> {
    statx(fd, c"", AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS)
}

fn device(stat: &Statx) -> (u32, u32) {
    (stat.stx_dev_major, stat.stx_dev_minor)
}

fn attr(stat: &Statx) -> Attr {
    let mode = u32::from(stat.stx_mode);
    let time = |at: rustix::fs::StatxTimestamp| Timestamp::from_parts(at.tv_sec, at.tv_nsec);
    Attr {
        kind: Kind::from_mode(mode),
        perm: mode & 0o7777,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        ino: stat.stx_ino,
        links: stat.stx_nlink,
        size_bytes: stat.stx_size,
        blocks: stat.stx_blocks,
        device: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
        atime: time(stat.stx_atime),
        mtime: time(stat.stx_mtime),
        ctime: time(stat.stx_ctime),
    }
}

/// `struct file_handle` with room for that of FUSE: the node's number (upper half, lower half) and its generation.
#[repr(C)]
struct FuseHandle {
    header: libc::file_handle,
    words: [u32; 3],
}

/// The number by which the kernel and the agent know the node.
fn fuse_node(fd: impl AsFd) -> Result<u64, Errno> {
    let header = libc::file_handle { handle_bytes: 12, handle_type: 0, f_handle: [] };
    let mut handle = FuseHandle { header, words: [0; 3] };
    let mut mount_id = 0;
    // SAFETY: the descriptor is open during the call. The kernel writes at most the 12 bytes after the header, which
    // are part of the same value, and one number.
    let result = unsafe {
        let to = (&raw mut handle).cast::<libc::file_handle>();
        libc::name_to_handle_at(fd.as_fd().as_raw_fd(), c"".as_ptr(), to, &raw mut mount_id, libc::AT_EMPTY_PATH)
    };
    if result != 0 {
        return Err(last_error());
    }
    if handle.header.handle_type != HANDLE_TYPE {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(u64::from(handle.words[0]) << 32 | u64::from(handle.words[1]))
}

/// The error of the last call of the C library.
pub fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
