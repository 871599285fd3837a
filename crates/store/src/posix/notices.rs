//! Notices for other agents: empty files at the root.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, fsync, openat, statat, unlinkat};
use rustix::io::Errno;

use super::CREATE;
use super::beneath::Root;
use crate::StorePath;

pub(super) fn leave(root: &Root, name: &[u8]) -> io::Result<()> {
    let dir = root.open_dir(&StorePath::root())?;
    match openat(&dir, name, CREATE | OFlags::WRONLY, Mode::RUSR | Mode::WUSR) {
        Ok(_) | Err(Errno::EXIST) => Ok(fsync(&dir)?),
        Err(why) => Err(why.into()),
    }
}

/// A client of NFS believes for a while that a name is absent. It asks again after the directory was opened.
pub(super) fn is_there(root: &Root, name: &[u8]) -> io::Result<bool> {
    let dir = root.open_dir(&StorePath::root())?;
    match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(why) => Err(why.into()),
    }
}

pub(super) fn remove(root: &Root, prefix: &[u8]) -> io::Result<()> {
    let dir = root.open_dir(&StorePath::root())?;
    let mut names = Vec::new();
    for entry in Dir::read_from(dir.as_fd())? {
        let entry = entry?;
        names.extend(entry.file_name().to_bytes().starts_with(prefix).then(|| entry.file_name().to_owned()));
    }
    for name in names {
        match unlinkat(&dir, &*name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(why) => return Err(why.into()),
        }
    }
    Ok(())
}
