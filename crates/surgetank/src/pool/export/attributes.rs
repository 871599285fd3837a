//! Requests on attributes: of stat(2), and extended ones.
//!
//! The danger that it avoids: a descriptor of a symbolic link, whose path in /proc would reach the link's own inode
//! where a call expects a file. Such calls refuse links.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, Gid, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, XattrFlags, chmodat, chownat, ftruncate,
    getxattr, listxattr, removexattr, setxattr, utimensat,
};
use rustix::io::{Errno, retry_on_intr};
use surgetank_types::model::{Attr, Kind};

use super::holdings::{Holdings, Node};
use super::homes::{CONTENT, HOME};
use super::names::{AUTHORITY, perm_bits};
use super::place::{attr_of, last_error, path_of};
use crate::pool::call::{Answer, Change, Time};

/// Most bytes of a value, and of a list of names (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const XATTR_BYTES_MAX: usize = 64 << 10;
const XATTR_NAME_BYTES_MAX: usize = 255;

/// The attributes, through a handle where there is one.
pub fn get(of: &Holdings, node: u64, handle: Option<u64>) -> Result<Answer, Errno> {
    of.attr(node, handle).map(answered)
}

/// Changes attributes, through a handle where there is one: the owner first, because a new owner clears bits of the mode.
pub fn set(of: &Holdings, node: u64, handle: Option<u64>, change: &Change) -> Result<Answer, Errno> {
    if let Some(Ok(file)) = handle.map(|handle| of.file(handle)) {
        set_of(file.fd.as_fd(), Kind::File, change, |size| ftruncate(&file.fd, size))?;
        return attr_of(&file.fd).map(answered);
    }
    let node = of.node(node)?;
    set_of(node.fd.as_fd(), node.kind, change, |size| truncate_node(&node, size))?;
    attr_of(&*node.fd).map(answered)
}

fn set_of(
    fd: BorrowedFd<'_>,
    kind: Kind,
    change: &Change,
    set_size: impl Fn(u64) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let Change { perm, uid, gid, size_bytes, atime, mtime } = *change;
    if uid.is_some() || gid.is_some() {
        // (This number means "unchanged" to the kernel.)
        if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
            return Err(Errno::INVAL);
        }
        chownat(fd, c"", uid.map(Uid::from_raw), gid.map(Gid::from_raw), AtFlags::EMPTY_PATH)?;
    }
    if let Some(perm) = perm {
        if kind == Kind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        chmodat(CWD, path_of(fd), perm_bits(perm), AtFlags::empty())?;
    }
    if let Some(size_bytes) = size_bytes {
        retry_on_intr(|| set_size(size_bytes))?;
    }
    if atime.is_some() || mtime.is_some() {
        let times = Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
        utimensat(fd, c"", &times, AtFlags::EMPTY_PATH)?;
    }
    Ok(())
}

fn answered(attr: Attr) -> Answer {
    Answer::Attributes { attr, ttl: Duration::ZERO }
}

fn truncate_node(node: &Node, size_bytes: u64) -> Result<(), Errno> {
    let size = i64::try_from(size_bytes).map_err(|_| Errno::INVAL)?;
    let path = CString::new(path_of(&*node.fd)).map_err(|_| Errno::INVAL)?;
    // SAFETY: the path is a live C string, and the call only reads it.
    if unsafe { libc::truncate(path.as_ptr(), size) } == 0 { Ok(()) } else { Err(last_error()) }
}

fn timespec(time: Option<Time>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(Time::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(Time::At(at)) => Timespec { tv_sec: at.secs(), tv_nsec: at.subsec_nanos().into() },
    }
}

fn not_a_link(node: &Node) -> Result<(), Errno> {
    if node.kind == Kind::Symlink { Err(Errno::OPNOTSUPP) } else { Ok(()) }
}

/// The path for calls on extended attributes of a node.
fn path_for(of: &Holdings, node: u64, name: &[u8]) -> Result<(Node, String), Errno> {
    if name.contains(&0) {
        return Err(Errno::INVAL);
    }
    if name.is_empty() || name.len() > XATTR_NAME_BYTES_MAX {
        return Err(Errno::RANGE);
    }
    let node = of.node(node)?;
    not_a_link(&node)?;
    let path = path_of(&*node.fd);
    Ok((node, path))
}

/// For this process only.
fn is_internal(name: &[u8]) -> bool {
    [AUTHORITY, HOME, CONTENT].iter().any(|internal| name == internal.as_bytes())
}

/// The value of an extended attribute.
pub fn get_value(of: &Holdings, node: u64, name: &[u8]) -> Result<Answer, Errno> {
    let (_node, path) = path_for(of, node, name)?;
    if is_internal(name) {
        return Err(Errno::NODATA);
    }
    let mut value = vec![0; XATTR_BYTES_MAX];
    let length = getxattr(path, name, &mut value[..])?;
    value.truncate(length);
    Ok(Answer::Bytes(value))
}

/// Sets an extended attribute. `flags`: of setxattr(2).
pub fn set_value(of: &Holdings, node: u64, name: &[u8], value: &[u8], flags: u32) -> Result<Answer, Errno> {
    let (_node, path) = path_for(of, node, name)?;
    if is_internal(name) {
        return Err(Errno::PERM);
    }
    setxattr(path, name, value, XattrFlags::from_bits_retain(flags))?;
    Ok(Answer::Done)
}

/// The names of the extended attributes, each with a final zero.
pub fn list_values(of: &Holdings, node: u64) -> Result<Answer, Errno> {
    let node = of.node(node)?;
    not_a_link(&node)?;
    let mut names = vec![0; XATTR_BYTES_MAX];
    let length = listxattr(path_of(&*node.fd), &mut names[..])?;
    names.truncate(length);
    let shown =
        names.split_inclusive(|byte| *byte == 0).filter(|name| !name.strip_suffix(b"\0").is_some_and(is_internal));
    Ok(Answer::Bytes(shown.flatten().copied().collect()))
}

/// Removes an extended attribute.
pub fn remove_value(of: &Holdings, node: u64, name: &[u8]) -> Result<Answer, Errno> {
    let (_node, path) = path_for(of, node, name)?;
    if is_internal(name) {
        return Err(Errno::NODATA);
    }
    removexattr(path, name)?;
    Ok(Answer::Done)
}
