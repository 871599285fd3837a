//! Names that HDFS can have, renames and removals.
//!
//! The danger that it avoids: a lost answer. A rename that is sent again finds nothing at the old name; it was its own work if
//! the new name has the inode that the old one had.

use std::io;

use super::answers::{Truth, parse};
use super::failure::Failure;
use super::wire::{Ask, Wire};
use super::{NAME_BYTES_MAX, WebHdfs, locked};
use crate::StorePath;
use surgetank_types::error::Errno;

/// The namenode's limits.
const PATH_CHARS_MAX: usize = 8000;
const DEPTH_MAX: usize = 1000;

/// The path, as HDFS has it. Errors: HDFS cannot have this name.
pub(super) fn checked<'a>(wire: &Wire, path: &'a StorePath) -> io::Result<&'a str> {
    let text = std::str::from_utf8(&path.0).map_err(|_| Errno::ILSEQ)?;
    if text.is_empty() {
        return Ok(text);
    }
    let names = text.split('/');
    if names.clone().any(|name| name.len() > NAME_BYTES_MAX) {
        return Err(Errno::NAMETOOLONG.into());
    }
    if names.clone().any(|name| matches!(name, "" | "." | ".." | ".snapshot") || name.contains([':', '\0'])) {
        return Err(Errno::INVAL.into());
    }
    let root = &wire.place.root;
    if root.is_empty() && (text == ".reserved" || text.starts_with(".reserved/")) {
        return Err(Errno::INVAL.into());
    }
    let depth = names.count() + root.matches('/').count();
    if root.len() + 1 + text.chars().count() > PATH_CHARS_MAX || depth > DEPTH_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    Ok(text)
}

impl WebHdfs {
    /// `replaces`: whatever has the name, if it has the same type and is not a directory with entries.
    pub(super) fn rename_inode(&self, from: &str, to: &str, replaces: bool) -> Result<(), Failure> {
        let options = if replaces { "OVERWRITE" } else { "NONE" };
        let ask = Ask::put("RENAME", from).with("destination", self.wire.whole(to)).with("renameoptions", options);
        self.wire.ask(&ask).map(drop)
    }

    pub(super) fn move_name(&self, from: &StorePath, to: &StorePath) -> io::Result<()> {
        crash_point!("store.rename");
        let (old, new) = (checked(&self.wire, from)?, checked(&self.wire, to)?);
        if old.is_empty() || new.is_empty() {
            return Err(Errno::BUSY.into());
        }
        let free = locked(&self.absent).remove(to);
        let moved = || {
            let status = self.status(old)?;
            if old == new {
                return Ok(());
            }
            match self.rename_inode(old, new, !free) {
                Err(why) if why.unsure && self.status(new)?.file_id == status.file_id => Ok(()),
                renamed => renamed,
            }
        };
        let renamed = moved();
        self.listings.forget(&from.parent());
        self.listings.forget(&to.parent());
        match renamed {
            Ok(()) => {}
            // It was absent at the last look: to be looked at again.
            Err(why) if why.is(Errno::EXIST) && free => {
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why.to_string()));
            }
            Err(why) => return Err(self.wire.report(old, why)),
        }
        // Everything in it, and everything staged in it, has another path now.
        self.listings.forget_below(from);
        let mut staged = locked(&self.staged);
        let moving: Vec<StorePath> =
            staged.keys().filter(|path| *path == from || path.is_below(from)).cloned().collect();
        for path in moving {
            if let Some(copy) = staged.remove(&path) {
                staged.insert(StorePath([&to.0[..], &path.0[from.0.len()..]].concat()), copy);
            }
        }
        Ok(())
    }

    pub(super) fn remove_file(&self, path: &StorePath) -> io::Result<()> {
        crash_point!("store.unlink");
        self.remove(path, false)
    }

    pub(super) fn remove_directory(&self, path: &StorePath) -> io::Result<()> {
        crash_point!("store.remove_dir");
        self.remove(path, true)
    }

    fn remove(&self, path: &StorePath, directory: bool) -> io::Result<()> {
        let name = checked(&self.wire, path)?;
        if name.is_empty() {
            return Err(Errno::BUSY.into());
        }
        locked(&self.absent).remove(path);
        let gone = || {
            match (self.status(name)?.is_dir(), directory) {
                (true, false) => return Err(Failure::ours(Errno::ISDIR, "it is a directory")),
                (false, true) => return Err(Failure::ours(Errno::NOTDIR, "it is not a directory")),
                _ => {}
            }
            // If it is already gone, an earlier try whose answer was lost may have removed it.
            self.delete(name, false).map(drop)
        };
        let gone = gone();
        self.listings.forget(&path.parent());
        self.listings.forget(path);
        gone.map_err(|why| self.wire.report(name, why))
    }

    /// Returns false if there was nothing.
    pub(super) fn delete(&self, name: &str, recursive: bool) -> Result<bool, Failure> {
        let recursive = if recursive { "true" } else { "false" };
        let answer = self.wire.ask(&Ask::delete(name).with("recursive", recursive))?;
        Ok(parse::<Truth>(&answer)?.boolean)
    }
}
