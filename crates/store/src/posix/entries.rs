//! The entries of a directory: listing them, and removing them with everything below.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, StatxFlags, fstatfs, openat, statat, statx, unlinkat};
use rustix::io::Errno;

use super::beneath::{Dir, Place};
use crate::StoreEntry;
use surgetank_types::model::Kind;

pub fn entries(dir: &OwnedFd) -> io::Result<Vec<StoreEntry>> {
    let mut entries = Vec::new();
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut raw = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = raw.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => Kind::from_mode(stat.st_mode),
                // Removed since.
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            },
            known => Kind::from_mode(known.as_raw_mode()),
        };
        entries.push(StoreEntry { name: name.into(), kind, ino: entry.ino() });
    }
    Ok(entries)
}

const NFS_SUPER_MAGIC: i64 = 0x6969;
/// File systems in which more can be looked up than is listed: autofs, two kinds of AFS, proc.
const LISTS_LESS: [i64; 4] = [0x187, 0x5346_414f, 0x6b41_4653, 0x9fa0];

/// `None`: there are more, or a listing is not complete on this file system.
pub fn names(dir: &OwnedFd, at_most: usize) -> io::Result<Option<Vec<Box<[u8]>>>> {
    let kind = fstatfs(dir)?.f_type;
    if LISTS_LESS.contains(&kind) {
        return Ok(None);
    }
    // The kernel's cached listing may be older than the result of a look-up.
    if kind == NFS_SUPER_MAGIC {
        statx(dir, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::MTIME)?;
    }
    let mut names = Vec::new();
    let mut buffer = Vec::with_capacity(64 << 10);
    let mut raw = RawDir::new(dir, buffer.spare_capacity_mut());
    while let Some(entry) = raw.next() {
        if names.len() > at_most {
            return Ok(None);
        }
        names.push(entry?.file_name().to_bytes().into());
    }
    Ok(Some(names))
}

/// Removes a name and, if it is a directory, everything below it; follows no link.
pub fn remove_tree(place: &Place<'_>) -> io::Result<()> {
    match unlinkat(&place.dir, place.name, AtFlags::empty()) {
        // The error for directories, on different file systems.
        Err(Errno::ISDIR | Errno::PERM) => {}
        result => return Ok(result?),
    }
    match unlinkat(&place.dir, place.name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        result => return Ok(result?),
    }
    let dir = openat(
        &place.dir,
        place.name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    for entry in entries(&dir)? {
        let below = Place { dir: Dir::Borrowed(dir.as_fd()), name: &entry.name };
        match remove_tree(&below) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
    }
    Ok(unlinkat(&place.dir, place.name, AtFlags::REMOVEDIR)?)
}
