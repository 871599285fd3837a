//! Files of dead agents in shared memory. The next agent of the same user and `surgetank doctor --clean` find and
//! remove them.
//!
//! An agent holds a shared lock (flock) on its index and on its ring from their creation on. The supervisor holds the
//! same locks while it replaces an agent. So an exclusive lock proves that no agent uses the files, regardless of its
//! process, mount or state directory.
//!
//! The dangers that it avoids: removing the files of a living agent, and removing a ring whose entries no agent has
//! read. Such a ring is the only record of files on the tiers, so it stays for the next agent of its directory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::ring;

/// Where agents of every directory have their files.
pub const SHARED_MEMORY: &str = "/dev/shm";
const INDEX: &str = ".index";
const BLOCK_BYTES: u64 = 512;

/// The leftovers of dead agents.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Removed, or to be removed.
    pub files: usize,
    pub bytes: u64,
    /// Rings with entries that no agent has read, and the number of entries.
    pub kept: Vec<(PathBuf, usize)>,
}

/// The path of an index up to its key.
pub fn prefix() -> String {
    format!("surgetank-{}-", rustix::process::geteuid().as_raw())
}

/// A file of this user's agents. Every user can write to the directory: a file of another user, or a link, is an error.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let found = file.metadata()?;
    let ours = found.is_file() && found.uid() == rustix::process::geteuid().as_raw();
    if ours { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// A new file for this user only, marked as used. A file of an earlier agent with this name is removed.
pub fn create(path: &Path) -> io::Result<File> {
    loop {
        // Locked until the new file is: a sweep that found the earlier one removes what has the name then.
        let earlier = match open(path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => None,
            earlier => {
                let earlier = earlier.ok();
                // A sweep that checks the file now must end first, or it could remove the new file.
                if let Some(earlier) = &earlier {
                    mark_used(earlier);
                }
                match std::fs::remove_file(path) {
                    Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                    _ => {}
                }
                earlier
            }
        };
        let file = match File::options().read(true).write(true).create_new(true).mode(0o600).open(path) {
            // Another process created one in between.
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => continue,
            file => file?,
        };
        if mark_used(&file) {
            return Ok(file);
        }
        drop(earlier);
    }
}

/// No sweep removes the file while its description is open. `false`: a sweep has removed it.
pub fn mark_used(file: &File) -> bool {
    // Another error: the file system has no locks, so no sweep removes anything there.
    while rustix::fs::flock(file, FlockOperation::LockShared) == Err(Errno::INTR) {}
    file.metadata().is_ok_and(|file| file.nlink() > 0)
}

/// Removes the files of this user's dead agents from `dir`; without `remove` they are only counted.
pub fn sweep(dir: &Path, remove: bool) -> Leftovers {
    let mut found = Leftovers::default();
    for (index, counts) in by_index(dir) {
        let ring = ring::path_of(&index);
        // Held until the files are removed.
        let (Ok(of_index), Ok(of_ring)) = (unused(&index), unused(&ring)) else { continue };
        if of_index.is_none() && of_ring.is_none() {
            continue;
        }
        let mut files = counts;
        match (remove && of_ring.is_some()).then(|| ring::left(&index)) {
            // It may have entries.
            Some(Err(why)) => {
                tracing::warn!(%why, path = %ring.display(), "a dead agent's ring cannot be read and stays");
                continue;
            }
            Some(Ok(entries)) if !entries.is_empty() => found.kept.push((ring, entries.len())),
            None | Some(Ok(_)) => files.extend(of_ring.is_some().then_some(ring)),
        }
        // The index last: a sweep that is killed leaves what the next one recognises.
        files.extend(of_index.is_some().then_some(index));
        for path in files {
            let bytes = std::fs::symlink_metadata(&path).map_or(0, |file| file.blocks() * BLOCK_BYTES);
            if !remove || std::fs::remove_file(&path).is_ok() {
                found.files += 1;
                found.bytes += bytes;
            }
        }
    }
    found
}

/// Every index that has a file in `dir`, with the files in which the processes of its runs count.
fn by_index(dir: &Path) -> BTreeMap<PathBuf, Vec<PathBuf>> {
    let prefix = prefix();
    let mut found: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with(&prefix)) else { continue };
        let Some(at) = name.find(INDEX) else { continue };
        let (index, rest) = name.split_at(at + INDEX.len());
        let counts = found.entry(dir.join(index)).or_default();
        if rest.starts_with(".counts-") {
            counts.push(entry.path());
        }
    }
    found
}

/// The file, locked so that no agent begins to use it. `Ok(None)`: there is none. An error: an agent uses it, or it is not
/// a file of this user.
fn unused(path: &Path) -> io::Result<Option<File>> {
    let seen = match std::fs::symlink_metadata(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        seen => seen?,
    };
    if !seen.is_file() || seen.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let file = open(path)?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let opened = file.metadata()?;
    // Since the check an agent has put another file in its place.
    let same = opened.nlink() > 0 && (opened.dev(), opened.ino()) == (seen.dev(), seen.ino());
    if same { Ok(Some(file)) } else { Err(io::ErrorKind::ResourceBusy.into()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test reports by a panic")]
mod tests {
    use super::*;

    fn place(dir: &Path, key: &str, end: &str) -> PathBuf {
        dir.join(format!("{}{key}.index{end}", prefix()))
    }

    #[test]
    fn dead_agents_files_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["", ".ring", ".counts-1", ".counts-12"].map(|end| place(dir.path(), "dead", end));
        let other = dir.path().join("surgetank-of-another-kind.index");
        paths.iter().chain([&other]).for_each(|path| drop(create(path).unwrap()));
        assert_eq!(sweep(dir.path(), false).files, 4);
        assert!(paths.iter().all(|path| path.exists()));
        assert_eq!(sweep(dir.path(), true).files, 4);
        assert!(paths.iter().all(|path| !path.exists()) && other.exists());
        assert_eq!(sweep(dir.path(), true), Leftovers::default());
    }

    #[test]
    fn files_of_an_agent_that_holds_either_file_stay() {
        for held in ["", ".ring"] {
            let dir = tempfile::tempdir().unwrap();
            let paths = ["", ".ring", ".counts-1"].map(|end| place(dir.path(), "alive", end));
            let files: Vec<File> = paths.iter().map(|path| create(path).unwrap()).collect();
            let number = paths.iter().position(|path| *path == place(dir.path(), "alive", held)).unwrap();
            let lock = files[number].try_clone().unwrap();
            drop(files);
            assert_eq!(sweep(dir.path(), true), Leftovers::default());
            assert!(paths.iter().all(|path| path.exists()), "{held}");
            drop(lock);
            assert_eq!(sweep(dir.path(), true).files, 3);
        }
    }

    #[test]
    fn links_with_an_agents_name_stay() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        std::fs::write(&target, "content").unwrap();
        std::os::unix::fs::symlink(&target, place(dir.path(), "linked", "")).unwrap();
        assert_eq!(sweep(dir.path(), true), Leftovers::default());
        assert!(target.exists() && place(dir.path(), "linked", "").is_symlink());
    }

    /// Any user can create files in shared memory, and lock them.
    #[test]
    fn file_of_another_user_is_not_waited_for() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = place(dir.path(), "foreign", "");
        let foreign = File::create(&path).unwrap();
        std::os::unix::fs::fchown(&foreign, Some(1000), None).unwrap();
        rustix::fs::flock(&foreign, FlockOperation::LockExclusive).unwrap();
        assert_eq!(open(&path).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let ours = create(&path).unwrap();
        assert_ne!(ours.metadata().unwrap().ino(), foreign.metadata().unwrap().ino());
    }

    /// Its entries would be the only record of files on the tiers.
    #[test]
    fn ring_that_cannot_be_read_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (index, ring) = (place(dir.path(), "odd", ""), place(dir.path(), "odd", ".ring"));
        drop(create(&index).unwrap());
        std::fs::write(&ring, "of another layout").unwrap();
        assert_eq!(sweep(dir.path(), true), Leftovers::default());
        assert!(index.exists() && ring.exists());
    }

    /// The agent that creates it waits for the sweep, and finds that its file lost its name.
    #[test]
    fn file_swept_while_it_is_created_is_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = place(dir.path(), "new", "");
        std::thread::scope(|scope| {
            let sweeper = scope.spawn(|| (0..2000).map(|_| sweep(dir.path(), true).files).sum::<usize>());
            for _ in 0..2000 {
                let file = create(&path).unwrap();
                let same = std::fs::metadata(&path).unwrap().ino() == file.metadata().unwrap().ino();
                assert!(same, "the name leads to another file");
            }
            sweeper.join().unwrap();
        });
    }
}
