//! The directories of one agent on one device: the files in `<path>/surgetank-<uid>-<key>/`, all else in
//! `<path>/surgetank-<uid>/<key>/`. (Each directory above the files costs every open 70 to 100 ns.)
//!
//! The files are in `<path>/surgetank-<uid>/<key>/files/` instead if they are there already, or if the user may not write to
//! `<path>` but an administrator made `<path>/surgetank-<uid>`.
//!
//! The second directory contains an empty directory whose name, `device-<token>`, is the device's identity. The catalog
//! recognises the device by its token, whatever path leads to it later, and whatever else is mounted there meanwhile.
//!
//! Invariant: the directories are private to the user, with mode 0700. An existing one that is a symlink, belongs to another
//! user or is open to other users is refused. The danger that it avoids: the user who prepared it could read or replace what
//! programs write.

use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use surgetank_types::error::{Error, Result};

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const FILES: &str = "files";
const TOKEN_PREFIX: &str = "device-";

#[derive(Debug)]
pub(super) struct Scope {
    /// `surgetank-<uid>`; held to remove the scope's own directory in it at the end.
    user_dir: OwnedFd,
    base: OwnedFd,
    user_name: String,
    key: String,
    /// `<key>`: contains the ballast.
    pub dir: OwnedFd,
    pub files: OwnedFd,
    /// Whether `files` is in `dir` rather than in `base`.
    files_are_nested: bool,
    /// Path of `files`, for messages.
    pub files_path: PathBuf,
    /// Identifies this directory, and no other that appears under the same path later.
    pub token: String,
}

impl Scope {
    pub fn open(tier: &str, path: &Path, key: &str) -> Result<Self> {
        let refuse =
            |what: &Path, why: &dyn Display| Error::new(format!("tier {tier} cannot use {}", what.display())).why(why);
        let unsuitable = "give another directory for this tier (--tier NAME=PATH), on a file system you may write to";
        if key.is_empty() || key.contains(['/', '\0']) || key == "." || key == ".." {
            return Err(refuse(path, &format!("\"{key}\" is not a valid directory name")));
        }
        // The configured directory itself may be a symlink ($TMPDIR often is).
        let base = rustix::fs::open(path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())
            .map_err(|errno| refuse(path, &errno).remedy(unsuitable))?;
        let user_name = format!("surgetank-{}", rustix::process::geteuid().as_raw());
        let descend = |dir: &OwnedFd, name: &str, at: &Path| -> Result<OwnedFd> {
            private_dir(dir, name).map_err(|refusal| {
                let error = refuse(at, &refusal.why);
                match refusal.foreign {
                    true => error.remedy(format!("check {} and remove it if it is not needed", at.display())),
                    false => error.remedy(unsuitable),
                }
            })
        };
        let user_path: PathBuf = path.join(&user_name);
        let user_dir = descend(&base, &user_name, &user_path)?;
        let key_path = user_path.join(key);
        let dir = descend(&user_dir, key, &key_path)?;
        // Held as long as the agent lives: see `hand_over`. (On a file system without such locks nothing is handed over.)
        let _ = rustix::fs::flock(&dir, FlockOperation::NonBlockingLockShared);
        let flat = flat_name(key);
        let nested = exists(&dir, FILES) || may_not_make(&base, &flat);
        let (files, files_path) = if nested {
            (descend(&dir, FILES, &key_path.join(FILES))?, key_path.join(FILES))
        } else {
            (descend(&base, &flat, &path.join(&flat))?, path.join(&flat))
        };
        let token = match token_in(&dir).map_err(|errno| refuse(&key_path, &errno))? {
            Some(token) => token,
            None => make_token(&dir).map_err(|errno| refuse(&key_path, &errno).remedy(unsuitable))?,
        };
        Ok(Self {
            user_dir,
            base,
            user_name,
            key: key.to_owned(),
            dir,
            files,
            files_are_nested: nested,
            files_path,
            token,
        })
    }

    /// The token of a scope that an earlier agent left below `path`; creates nothing.
    pub fn token_at(path: &Path, key: &str) -> Option<String> {
        let dir = rustix::fs::open(Self::path_of(path, key), DIRECTORY, Mode::empty()).ok()?;
        token_in(&dir).ok().flatten()
    }

    /// Stands for a scope that cannot be reached: a removed directory, in which nothing can be made.
    pub fn nowhere(path: &Path, key: &str, token: &str) -> Result<Self> {
        let failed = |why: &dyn Display| {
            Error::new(format!("the tier at {} is not there, and no stand-in could be made", path.display()))
                .why(why)
                .remedy("make the directory for temporary files writable (TMPDIR)")
        };
        let name = std::env::temp_dir().join(format!("surgetank-nowhere-{}", new_token()));
        rustix::fs::mkdir(&name, Mode::RWXU).map_err(|errno| failed(&errno))?;
        let opened = rustix::fs::open(&name, DIRECTORY, Mode::empty());
        rustix::fs::rmdir(&name).map_err(|errno| failed(&errno))?;
        let dir = opened.map_err(|errno| failed(&errno))?;
        let again = || dir.try_clone().map_err(|why| failed(&why));
        Ok(Self {
            user_dir: again()?,
            base: again()?,
            files: again()?,
            files_are_nested: false,
            user_name: String::new(),
            key: key.to_owned(),
            files_path: path.join(flat_name(key)),
            token: token.to_owned(),
            dir,
        })
    }

    fn path_of(path: &Path, key: &str) -> PathBuf {
        path.join(format!("surgetank-{}", rustix::process::geteuid().as_raw())).join(key)
    }

    /// Removes the scope's directories as far as they are empty.
    pub fn remove_when_empty(&self) -> Result<(), Errno> {
        let removed = if self.files_are_nested {
            rustix::fs::unlinkat(&self.dir, FILES, AtFlags::REMOVEDIR)
        } else {
            rustix::fs::unlinkat(&self.base, flat_name(&self.key), AtFlags::REMOVEDIR)
        };
        match removed {
            // Files remain, and so does the token of their device.
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(()),
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let token = format!("{TOKEN_PREFIX}{}", self.token);
        for (dir, name) in [(&self.dir, &*token), (&self.user_dir, &*self.key), (&self.base, &*self.user_name)] {
            match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// The directories in a tier's directory `path` that may contain files of this user, of any project.
pub fn files_of_all(path: &Path) -> Vec<PathBuf> {
    let in_it = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let flat = flat_name("");
    let is_flat = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(flat.as_bytes()));
    let nested = in_it(&path.join(flat.trim_end_matches('-'))).map(|key| key.join(FILES));
    in_it(path).filter(is_flat).chain(nested).filter(|files| files.is_dir()).collect()
}

/// Renames the directories that agents of other keys left in a tier's directory `path`, so that `key` finds them. `is_left`
/// tells whether a key has lost its state. The directories of a living agent stay, and those whose agent cannot be determined.
///
/// Other users may create names in a tier's directory (`/dev/shm`). Therefore only the user's own private directories are
/// renamed, and an entry that cannot be renamed does not fail the start.
///
/// Errors: `path` cannot be opened or read.
pub fn hand_over(path: &Path, key: &str, is_left: &dyn Fn(&str) -> bool) -> std::io::Result<()> {
    let Ok(base) = rustix::fs::open(path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty()) else { return Ok(()) };
    let user_name = flat_name("").trim_end_matches('-').to_owned();
    let user_dir = match exists(&base, &user_name) {
        // In a directory that other users can write to, the locks of living agents cannot be found.
        true if !is_private(&base, &user_name) => return Ok(()),
        true => match rustix::fs::openat(&base, user_name, DIRECTORY, Mode::empty()) {
            Ok(dir) => Some(dir),
            Err(_) => return Ok(()),
        },
        false => None,
    };
    let mut keys: Vec<String> = user_dir.iter().flat_map(names_in).collect();
    keys.extend(names_in(&base).iter().filter_map(|name| name.strip_prefix(&flat_name("")).map(str::to_owned)));
    keys.sort_unstable();
    keys.dedup();
    for left in keys.iter().filter(|left| *left != key && is_left(left)) {
        let nested = user_dir.as_ref().filter(|dir| exists(dir, left));
        // The lock is released when both directories have their new names.
        let _lock = match nested {
            Some(dir) if is_private(dir, left) => match rustix::fs::openat(dir, left, DIRECTORY, Mode::empty()) {
                Ok(dir) => match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => Some(dir),
                    Err(_) => continue,
                },
                Err(Errno::NOENT | Errno::ACCESS | Errno::PERM) => continue,
                Err(errno) => return Err(errno.into()),
            },
            // Whether an agent lives there cannot be determined.
            Some(_) => continue,
            None => None,
        };
        // An interrupted handover is found again by its files.
        let (old, new) = (flat_name(left), flat_name(key));
        let dirs = nested.map(|dir| rustix::fs::renameat(dir, left, dir, key));
        let files = is_private(&base, &old).then(|| rustix::fs::renameat(&base, &old, &base, &new));
        for renamed in [dirs, files].into_iter().flatten() {
            match renamed {
                Ok(()) | Err(Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY | Errno::ACCESS | Errno::PERM) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

fn names_in(dir: &OwnedFd) -> Vec<String> {
    let entries = rustix::fs::Dir::read_from(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
    names.filter(|name| name != "." && name != "..").collect()
}

/// Whether this entry is a directory of the user's own that is closed to other users.
fn is_private(dir: &OwnedFd, name: &str) -> bool {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| {
        rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir()
            && stat.st_uid == rustix::process::geteuid().as_raw()
            && stat.st_mode & 0o077 == 0
    })
}

/// Whether an agent of this key left a directory in the tier's directory `path`. True also if that cannot be determined.
pub fn is_in_use(path: &Path, key: &str) -> bool {
    let there = |path: PathBuf| !matches!(rustix::fs::lstat(&path), Err(Errno::NOENT | Errno::NOTDIR));
    there(path.join(flat_name(key))) || there(Scope::path_of(path, key))
}

fn flat_name(key: &str) -> String {
    format!("surgetank-{}-{key}", rustix::process::geteuid().as_raw())
}

fn exists(dir: &OwnedFd, name: &str) -> bool {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Whether the entry is absent and the user may not create it.
fn may_not_make(dir: &OwnedFd, name: &str) -> bool {
    let made = rustix::fs::mkdirat(dir, name, Mode::RWXU);
    matches!(made, Err(Errno::ACCESS | Errno::PERM | Errno::ROFS))
}

fn token_in(dir: &OwnedFd) -> Result<Option<String>, Errno> {
    let mut token: Option<String> = None;
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let found = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix(TOKEN_PREFIX));
        // There are never two; if there were, always the same one is chosen.
        if let Some(found) = found
            && token.as_deref().is_none_or(|token| found < token)
        {
            token = Some(found.to_owned());
        }
    }
    Ok(token)
}

fn make_token(dir: &OwnedFd) -> Result<String, Errno> {
    let token = new_token();
    rustix::fs::mkdirat(dir, format!("{TOKEN_PREFIX}{token}"), Mode::RWXU)?;
    // Synced before any record contains this token.
    rustix::fs::fsync(dir)?;
    Ok(token)
}

/// A token that is unique, on this machine and on others.
fn new_token() -> String {
    use std::hash::{BuildHasher, RandomState};
    // Keyed by the system's random numbers, different at each call.
    let random = |salt: u8| RandomState::new().hash_one((salt, std::process::id(), std::time::SystemTime::now()));
    format!("{:016x}{:016x}", random(0), random(1))
}

struct Refusal {
    why: String,
    /// An entry exists that Surgetank did not make, as opposed to a directory that could not be made.
    foreign: bool,
}

fn private_dir(dir: &OwnedFd, name: &str) -> Result<OwnedFd, Refusal> {
    let plain = |errno: Errno| Refusal { why: errno.to_string(), foreign: false };
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(plain(errno)),
    }
    let opened = match rustix::fs::openat(dir.as_fd(), name, DIRECTORY, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(Refusal { why: "it is a symbolic link or not a directory".to_owned(), foreign: true });
        }
        outcome => outcome.map_err(plain)?,
    };
    let stat = rustix::fs::fstat(&opened).map_err(plain)?;
    let own_uid = rustix::process::geteuid().as_raw();
    if stat.st_uid != own_uid {
        return Err(Refusal { why: format!("it belongs to user {}, not to {own_uid}", stat.st_uid), foreign: true });
    }
    if stat.st_mode & 0o077 != 0 {
        let why = format!("it is open to others (mode {:o} instead of 700)", stat.st_mode & 0o7777);
        return Err(Refusal { why, foreign: true });
    }
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn user_dir(base: &Path) -> PathBuf {
        base.join(format!("surgetank-{}", rustix::process::geteuid().as_raw()))
    }

    #[test]
    fn scope_is_private_found_again_and_removed_when_empty() {
        let base = tempfile::tempdir().unwrap();
        let scope = Scope::open("ram", base.path(), "k1").unwrap();
        let files = base.path().join(flat_name("k1"));
        for dir in [user_dir(base.path()), user_dir(base.path()).join("k1"), files.clone()] {
            let mode = fs::metadata(&dir).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o700, "{}", dir.display());
        }
        assert_eq!(scope.files_path, files);
        let file = files.join("f");
        fs::write(&file, b"x").unwrap();
        drop(Scope::open("ram", base.path(), "k1").unwrap());
        scope.remove_when_empty().unwrap();
        assert!(file.exists());
        fs::remove_file(&file).unwrap();
        let other = Scope::open("ram", base.path(), "k2").unwrap();
        scope.remove_when_empty().unwrap();
        assert!(!user_dir(base.path()).join("k1").exists());
        assert!(!files.exists() && user_dir(base.path()).join("k2").exists());
        other.remove_when_empty().unwrap();
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn files_of_lost_state_without_agent_are_handed_over() {
        let base = tempfile::tempdir().unwrap();
        for key in ["a-1", "a-2", "b-1"] {
            fs::write(Scope::open("ram", base.path(), key).unwrap().files_path.join("f"), key).unwrap();
        }
        let lives = Scope::open("ram", base.path(), "a-2").unwrap();
        hand_over(base.path(), "a-3", &|key| key.starts_with("a-")).unwrap();
        let read = |key: &str| fs::read_to_string(base.path().join(flat_name(key)).join("f")).ok();
        assert_eq!(
            ["a-1", "a-2", "a-3", "b-1"].map(read),
            [None, Some("a-2".into()), Some("a-1".into()), Some("b-1".into())]
        );
        assert!(!is_in_use(base.path(), "a-1"));
        drop(lives);
        // One after the other: the files of two keys are never mixed.
        hand_over(base.path(), "a-3", &|key| key == "a-2").unwrap();
        assert_eq!(["a-2", "a-3"].map(read), [Some("a-2".into()), Some("a-1".into())]);
        hand_over(base.path(), "a-4", &|key| key == "a-2").unwrap();
        assert_eq!(read("a-4").as_deref(), Some("a-2"));
    }

    /// The directory may be /dev/shm, which contains the shim's index and entries of other users.
    #[test]
    fn hand_over_takes_private_directories_only() {
        let base = tempfile::tempdir().unwrap();
        let path = |key: &str| base.path().join(flat_name(key));
        drop(Scope::open("ram", base.path(), "a-1").unwrap());
        fs::write(path("a-1").join("f"), "x").unwrap();
        fs::write(path("a-1.index"), "index").unwrap();
        fs::write(path("a-2"), "a file").unwrap();
        fs::create_dir(path("a-3")).unwrap();
        fs::set_permissions(path("a-3"), fs::Permissions::from_mode(0o777)).unwrap();
        symlink(path("a-3"), path("a-4")).unwrap();
        hand_over(base.path(), "a-9", &|_| true).unwrap();
        assert_eq!(fs::read_to_string(path("a-9").join("f")).unwrap(), "x");
        assert!(!is_in_use(base.path(), "a-1"));
        for left in ["a-1.index", "a-2", "a-3", "a-4"] {
            assert!(path(left).symlink_metadata().is_ok(), "{left}");
        }
    }

    /// Root must not rename through another user's symbolic link.
    #[test]
    fn hand_over_skips_user_directory_that_is_a_symlink() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::create_dir(elsewhere.path().join("a-1")).unwrap();
        fs::set_permissions(elsewhere.path().join("a-1"), fs::Permissions::from_mode(0o700)).unwrap();
        symlink(elsewhere.path(), user_dir(base.path())).unwrap();
        hand_over(base.path(), "a-9", &|key| key == "a-1").unwrap();
        assert!(elsewhere.path().join("a-1").exists());
    }

    /// What an earlier agent left, or where an administrator made only the user's own directory.
    #[test]
    fn files_below_user_directory_stay_there() {
        let base = tempfile::tempdir().unwrap();
        let nested = user_dir(base.path()).join("k/files");
        fs::create_dir_all(&nested).unwrap();
        for dir in [&user_dir(base.path()), &user_dir(base.path()).join("k"), &nested] {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
        }
        fs::write(nested.join("f"), b"x").unwrap();
        let scope = Scope::open("ram", base.path(), "k").unwrap();
        assert_eq!(scope.files_path, nested);
        assert!(!base.path().join(flat_name("k")).exists());
        fs::remove_file(nested.join("f")).unwrap();
        scope.remove_when_empty().unwrap();
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn scope_that_is_symlink_or_open_to_others_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), user_dir(base.path())).unwrap();
        let text = Scope::open("ram", base.path(), "k").unwrap_err().to_string();
        assert!(text.contains("tier ram") && text.contains("symbolic link"), "{text}");
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);

        fs::remove_file(user_dir(base.path())).unwrap();
        fs::create_dir(user_dir(base.path())).unwrap();
        fs::set_permissions(user_dir(base.path()), fs::Permissions::from_mode(0o777)).unwrap();
        let text = Scope::open("ram", base.path(), "k").unwrap_err().to_string();
        assert!(text.contains("777 instead of 700"), "{text}");

        let text = Scope::open("ram", &base.path().join("absent"), "k").unwrap_err().to_string();
        assert!(text.contains("absent") && text.contains("try:"), "{text}");
        assert!(Scope::open("ram", base.path(), "../x").is_err());
    }
}
