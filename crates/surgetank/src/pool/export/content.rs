//! Requests on open files and directories: their handles, their content and their listings.
//!
//! The danger that it avoids: a request that occupies its thread or the memory. Only regular files and directories are
//! opened, and one answer has at most 1 MiB or 1,000 names.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{
    FallocateFlags, OFlags, RawDir, SeekFrom, XattrFlags, fallocate, fcntl_setfl, fdatasync, fsync, setxattr,
};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};
use surgetank_types::model::Kind;

use super::holdings::{Closed, Handle, Holdings, Listing, Node, OpenFile};
use super::homes::{self, CONTENT};
use super::names::perm_bits;
use super::place::{attr_of, last_error, open_name, path_of, reopened};
use crate::pool::call::{Answer, Content, Listed};

const READ_BYTES_MAX: u32 = 1 << 20;
const NAMES_MAX: usize = 1000;
const LISTING_BUFFER_BYTES: usize = 32 << 10;
/// What a member chooses of open(2). The rest concerns its own kernel, as `O_DIRECT` and `O_NONBLOCK` do.
const CHOSEN: OFlags =
    OFlags::ACCMODE.union(OFlags::TRUNC).union(OFlags::APPEND).union(OFlags::DSYNC).union(OFlags::SYNC);

pub(super) fn chosen(flags: u32, also: OFlags) -> Result<OFlags, Errno> {
    let flags = OFlags::from_bits_retain(flags) & (CHOSEN | also);
    // (Both bits: not a mode of access, but Linux gives a descriptor for ioctl.)
    if flags.contains(OFlags::WRONLY | OFlags::RDWR) { Err(Errno::INVAL) } else { Ok(flags) }
}

/// Opens a regular file.
pub fn open(of: &Holdings, number: u64, flags: u32) -> Result<Answer, Errno> {
    open_node(of, number, of.node(number)?, chosen(flags, OFlags::empty())?)
}

fn open_node(of: &Holdings, number: u64, node: Node, flags: OFlags) -> Result<Answer, Errno> {
    match node.kind {
        Kind::File => {}
        Kind::Directory => return Err(Errno::ISDIR),
        Kind::Symlink => return Err(Errno::LOOP),
        _ => return Err(Errno::INVAL),
    }
    let file = OpenFile::new(reopened(&*node.fd, flags)?, number, flags);
    let (home, waits) = homes::of(&file.fd)?;
    let handle = of.opened(Handle::File(Arc::new(file)))?;
    Ok(home.map_or(Answer::Opened { handle, waits }, |home| Answer::OpenedAt { handle, home, waits }))
}

/// Opens a file that the member had opened in the store. A key has one handle.
pub fn open_moved(of: &Holdings, number: u64, key: u64) -> Result<Answer, Errno> {
    if let Some(handle) = of.moved(key) {
        if of.file(handle)?.node == number {
            return Ok(Answer::Opened { handle, waits: false });
        }
        // (An earlier agent's close did not come.)
        close_moved(of, key)?;
    }
    let node = of.node_without_names(number)?;
    let Answer::Opened { handle, .. } = open_node(of, number, node, OFlags::RDONLY)? else { return Err(Errno::INVAL) };
    let known = of.moves(key, handle);
    if known != handle {
        close(of, handle)?;
    }
    Ok(Answer::Opened { handle: known, waits: false })
}

/// The member has closed it.
pub fn close_moved(of: &Holdings, key: u64) -> Result<Answer, Errno> {
    match of.moves_no_more(key) {
        Some(handle) => close(of, handle),
        None => Ok(Answer::Done),
    }
}

/// Opens a name, which is made if it is missing.
pub fn create(of: &Holdings, parent: u64, name: &[u8], perm: u32, flags: u32) -> Result<Answer, Errno> {
    let flags = chosen(flags, OFlags::EXCL)?;
    let directory = of.node(parent)?.fd;
    // The name may be that of a pipe or a device, whose opening would wait.
    let safe = OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = open_name(&*directory, name, flags | OFlags::CREATE | safe, perm_bits(perm))?;
    // Not by the name, which may be that of another file by now.
    let place = of.root.place_as_opened(reopened(&fd, OFlags::PATH)?)?;
    if place.attr.kind != Kind::File {
        return Err(Errno::NXIO);
    }
    fcntl_setfl(&fd, flags & OFlags::APPEND)?;
    let found = of.found(place, Some((parent, name)))?;
    let (home, waits) = homes::of(&fd)?;
    let file = OpenFile::new(fd, found.node, flags);
    let handle = of.opened(Handle::File(Arc::new(file)))?;
    let Some(home) = home else { return Ok(Answer::Created { found, handle, waits }) };
    let parent = attr_of(&*directory).ok().map(|attr| Box::new((attr, Duration::ZERO)));
    Ok(Answer::CreatedAt { found, handle, home, waits, parent })
}

/// Reads up to the end of the file, or as many bytes as are wanted and allowed.
pub fn read(of: &Holdings, handle: u64, offset: u64, bytes: u32) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    let offset = checked(offset)?;
    let mut content = vec![0; bytes.min(READ_BYTES_MAX) as usize];
    let mut filled = 0;
    while let Some(room) = content.get_mut(filled..).filter(|room| !room.is_empty()) {
        match retry_on_intr(|| pread(&file.fd, &mut *room, offset.saturating_add(filled as u64))) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if filled == 0 => return Err(error),
            Err(_) => break,
        }
    }
    content.truncate(filled);
    Ok(Answer::Bytes(content))
}

/// Writes all of the content, or as much as is possible.
pub fn write(of: &Holdings, handle: u64, (offset, at_end): (u64, bool), content: &[u8]) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    let offset = checked(offset)?;
    let _state = file.appending(at_end)?;
    let mut written = 0;
    while let Some(rest) = content.get(written..).filter(|rest| !rest.is_empty()) {
        match retry_on_intr(|| pwrite(&file.fd, rest, offset.saturating_add(written as u64))) {
            Ok(0) => break,
            Ok(more) => written += more,
            Err(error) if written == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(Answer::Count(written as u64))
}

/// Ends a handle. Errors: what the mount reports at the close.
pub fn close(of: &Holdings, handle: u64) -> Result<Answer, Errno> {
    let Closed { handle, descriptions } = of.closed(handle)?;
    drop(descriptions);
    if let Handle::File(file) = handle
        // (Another request still uses it: its end closes the file.)
        && let Some(file) = Arc::into_inner(file)
    {
        closed(file.fd)?;
    }
    Ok(Answer::Done)
}

/// Ends a handle of a name whose content the member has: its agent has seen it so.
pub fn close_written(of: &Holdings, handle: u64, content: &Content) -> Result<Answer, Errno> {
    if let (Ok(file), Ok(value)) = (of.file(handle), postcard::to_stdvec(content)) {
        // (Without it the agent here asks the member.)
        let _ = setxattr(path_of(&file.fd), CONTENT, &value, XattrFlags::empty());
    }
    close(of, handle)
}

/// A program closes one of its descriptors. Errors: what the mount reports at the close.
pub fn flush(of: &Holdings, handle: u64) -> Result<Answer, Errno> {
    closed(rustix::io::dup(&of.file(handle)?.fd)?)?;
    Ok(Answer::Done)
}

fn closed(fd: OwnedFd) -> Result<(), Errno> {
    // SAFETY: the descriptor was owned here, and is not used after this call.
    if unsafe { libc::close(fd.into_raw_fd()) } == 0 {
        return Ok(());
    }
    // An interrupted close has closed.
    match last_error() {
        Errno::INTR => Ok(()),
        error => Err(error),
    }
}

/// Makes the content durable, as fsync(2) on the mount does.
pub fn sync(of: &Holdings, handle: u64, data_only: bool) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    retry_on_intr(|| if data_only { fdatasync(&file.fd) } else { fsync(&file.fd) })?;
    Ok(Answer::Done)
}

/// Makes the names of a directory durable.
pub fn sync_directory(of: &Holdings, node: u64) -> Result<Answer, Errno> {
    let fd = opened_directory(of, node)?;
    retry_on_intr(|| fsync(&fd))?;
    Ok(Answer::Done)
}

/// Reserves or frees space. `mode`: of fallocate(2).
pub fn allocate(of: &Holdings, handle: u64, mode: u32, offset: u64, length: u64) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    let (offset, length) = (checked(offset)?, checked(length)?);
    retry_on_intr(|| fallocate(&file.fd, FallocateFlags::from_bits_retain(mode), offset, length))?;
    Ok(Answer::Done)
}

/// The next data or hole.
pub fn seek(of: &Holdings, handle: u64, offset: u64, whence: u32) -> Result<Answer, Errno> {
    let file = of.file(handle)?;
    let offset = checked(offset)?;
    let to = match i32::try_from(whence) {
        Ok(libc::SEEK_DATA) => SeekFrom::Data(offset),
        Ok(libc::SEEK_HOLE) => SeekFrom::Hole(offset),
        _ => return Err(Errno::INVAL),
    };
    Ok(Answer::Count(rustix::fs::seek(&file.fd, to)?))
}

/// Opens a directory for listing.
pub fn open_directory(of: &Holdings, node: u64) -> Result<Answer, Errno> {
    let listing = Listing { fd: opened_directory(of, node)?, pending: Vec::new().into_iter() };
    Ok(Answer::Opened { handle: of.opened(Handle::Listing(Arc::new(Mutex::new(listing))))?, waits: false })
}

fn opened_directory(of: &Holdings, node: u64) -> Result<OwnedFd, Errno> {
    let node = of.node(node)?;
    if node.kind != Kind::Directory {
        return Err(Errno::NOTDIR);
    }
    reopened(&*node.fd, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// The next names of a listing. None: the end.
pub fn list(of: &Holdings, handle: u64, from_the_beginning: bool) -> Result<Answer, Errno> {
    let Handle::Listing(listing) = of.handle(handle)? else { return Err(Errno::NOTDIR) };
    // (Only requests of this handle wait for each other.)
    let mut listing = listing.lock().unwrap_or_else(PoisonError::into_inner);
    if from_the_beginning {
        rustix::fs::seek(&listing.fd, SeekFrom::Start(0))?;
        listing.pending = Vec::new().into_iter();
    }
    let mut names = Vec::new();
    while names.len() < NAMES_MAX {
        if let Some(name) = listing.pending.next() {
            names.push(name);
            continue;
        }
        match next_names(&listing.fd) {
            Ok(Some(more)) => listing.pending = more.into_iter(),
            Ok(None) => break,
            Err(error) if names.is_empty() => return Err(error),
            // The next request meets the error again.
            Err(_) => break,
        }
    }
    Ok(Answer::Names(names))
}

/// One buffer of names. None: the end.
fn next_names(directory: &OwnedFd) -> Result<Option<Vec<Listed>>, Errno> {
    let mut buffer = Vec::with_capacity(LISTING_BUFFER_BYTES);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            let kind = Kind::from_mode(entry.file_type().as_raw_mode());
            names.push(Listed { ino: entry.ino(), kind, name: name.into() });
        }
        if entries.is_buffer_empty() {
            return Ok(Some(names));
        }
    }
    Ok(None)
}

/// Errors: EINVAL, the kernel has no such offset.
fn checked(offset: u64) -> Result<u64, Errno> {
    if i64::try_from(offset).is_ok() { Ok(offset) } else { Err(Errno::INVAL) }
}
