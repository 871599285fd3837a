//! Other mounts below the served directory (a scratch disk, a container's volume). The agent copies them before it
//! mounts over the directory and puts them back on top afterwards. It does not serve them, and `status` names them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};
use surgetank_types::error::{Error, Result};

/// A copy of one mount and all below it, not attached anywhere.
pub struct Taken {
    pub path: PathBuf,
    tree: Option<OwnedFd>,
}

impl Taken {
    /// A mount that an earlier agent put back.
    pub fn there(path: PathBuf) -> Self {
        Self { path, tree: None }
    }
}

/// Topmost mounts below `directory`, in the order of the mount table.
pub fn below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let mut found: Vec<PathBuf> = Vec::new();
    for line in table.split(|byte| *byte == b'\n') {
        // id parent device root MOUNTPOINT options …
        let Some(field) = line.split(|byte| *byte == b' ').nth(4) else {
            continue;
        };
        let path = PathBuf::from(std::ffi::OsString::from_vec(unescape(field)));
        if path != directory && path.starts_with(directory) && !found.iter().any(|seen| path.starts_with(seen)) {
            found.retain(|seen| !seen.starts_with(&path));
            found.push(path);
        }
    }
    Ok(found)
}

/// The mount table writes space, tab, newline and backslash in octal.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\').then(|| tail.get(..3)).flatten();
        match octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    bytes
}

/// Clones every mount below `directory`. Needs a mount namespace of our own.
pub fn take(directory: &Path) -> Result<Vec<Taken>> {
    below(directory).map_err(|error| fail(directory, error))?.iter().map(|path| copy(path)).collect()
}

/// Attaches the copies at their old paths, which now lead through our own mount.
pub fn put_back(taken: &[Taken]) -> Result<()> {
    for Taken { path, tree } in taken {
        let Some(tree) = tree else { continue };
        rustix::mount::move_mount(tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|errno| fail(path, errno))?;
    }
    Ok(())
}

/// Detaches the copies on top, before our own unmount. Returns fresh copies, to be put back if the unmount is refused.
/// Detaching lazily loses nothing: these are copies of mounts that exist elsewhere, with their open files.
pub fn take_away(taken: &[Taken]) -> Result<Vec<Taken>> {
    let copies = taken.iter().map(|Taken { path, .. }| copy(path)).collect::<Result<Vec<_>>>()?;
    for Taken { path, .. } in taken.iter().rev() {
        rustix::mount::unmount(path, rustix::mount::UnmountFlags::DETACH).map_err(|errno| fail(path, errno))?;
    }
    Ok(copies)
}

/// Unmounts what programs mounted below and left, in a namespace where no process lives any more. It would end with the
/// namespace, and until then it would block our unmount.
pub fn take_away_left(directory: &Path) {
    const LAYERS_MAX: usize = 64;
    for _ in 0..LAYERS_MAX {
        let left = below(directory).unwrap_or_default();
        let gone = left.iter().filter(|path| {
            let outcome = rustix::mount::unmount(path.as_path(), rustix::mount::UnmountFlags::DETACH);
            tracing::info!(path = %path.display(), ?outcome, "a mount that a program left is unmounted");
            outcome.is_ok()
        });
        if gone.count() == 0 {
            return;
        }
    }
}

fn copy(path: &Path) -> Result<Taken> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    match rustix::mount::open_tree(CWD, path, flags) {
        Ok(tree) => Ok(Taken { path: path.to_path_buf(), tree: Some(tree) }),
        Err(errno) => Err(fail(path, errno)),
    }
}

fn fail(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::new(format!("the mount {} below the served directory cannot be bound through", path.display()))
        .why(why)
        .remedy("unmount it, or serve a directory that does not contain it (--over)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_mount_table_are_unescaped() {
        assert_eq!(unescape(b"/a\\040b\\134c\\"), b"/a b\\c\\");
        assert_eq!(unescape(b"/plain"), b"/plain");
    }

    #[test]
    fn only_mounts_strictly_below_count() {
        let below_proc = below(Path::new("/proc")).unwrap();
        assert!(!below_proc.contains(&PathBuf::from("/proc")));
        assert!(below(Path::new("/")).unwrap().contains(&PathBuf::from("/proc")));
    }
}
