//! The directory of one agent on one device: `<path>/surgetank-<uid>/<key>/`, with the files in `files/`.
//!
//! Private to the user: made with mode 0700; an existing one that is a symlink, belongs to somebody else or is
//! open to others is refused, because whoever prepared it could read or replace what programs write.

use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const FILES: &str = "files";

#[derive(Debug)]
pub(super) struct Scope {
    /// `surgetank-<uid>`; held to remove our own directory in it at the end.
    user_dir: OwnedFd,
    base: OwnedFd,
    user_name: String,
    key: String,
    /// `<key>`: the ballast lies here, beside `files`.
    pub dir: OwnedFd,
    pub files: OwnedFd,
    /// Where `files` is, for people.
    pub files_path: PathBuf,
}

impl Scope {
    pub fn open(tier: &str, path: &Path, key: &str) -> Result<Self> {
        let refuse = |what: &Path, why: &dyn Display| {
            Error::new(format!("tier {tier} cannot use {}", what.display())).why(why)
        };
        let unsuitable = "give another directory for this tier (--tier NAME=PATH), on a file system you may write to";
        if key.is_empty() || key.contains(['/', '\0']) || key == "." || key == ".." {
            return Err(refuse(
                path,
                &format!("\"{key}\" is no name for a directory"),
            ));
        }
        // The configured directory itself may be reached by a symlink ($TMPDIR often is one).
        let base = rustix::fs::open(path, DIRECTORY.difference(OFlags::NOFOLLOW), Mode::empty())
            .map_err(|errno| refuse(path, &errno).remedy(unsuitable))?;
        let user_name = format!("surgetank-{}", rustix::process::geteuid().as_raw());
        let descend = |dir: &OwnedFd, name: &str, at: &Path| -> Result<OwnedFd> {
            private_dir(dir, name).map_err(|refusal| {
                let error = refuse(at, &refusal.why);
                match refusal.foreign {
                    true => error.remedy(format!(
                        "look at {} and remove it if nobody needs it",
                        at.display()
                    )),
                    false => error.remedy(unsuitable),
                }
            })
        };
        let user_path: PathBuf = path.join(&user_name);
        let user_dir = descend(&base, &user_name, &user_path)?;
        let key_path = user_path.join(key);
        let dir = descend(&user_dir, key, &key_path)?;
        let files_path = key_path.join(FILES);
        let files = descend(&dir, FILES, &files_path)?;
        Ok(Self {
            user_dir,
            base,
            user_name,
            key: key.to_owned(),
            dir,
            files,
            files_path,
        })
    }

    /// Removes the scope's directories as far as they are empty.
    pub fn remove_when_empty(&self) -> Result<(), Errno> {
        for (dir, name) in [
            (&self.dir, FILES),
            (&self.user_dir, &*self.key),
            (&self.base, &*self.user_name),
        ] {
            match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

struct Refusal {
    why: String,
    /// Something is there that we did not make, as opposed to a directory that could not be made.
    foreign: bool,
}

fn private_dir(dir: &OwnedFd, name: &str) -> Result<OwnedFd, Refusal> {
    let plain = |errno: Errno| Refusal {
        why: errno.to_string(),
        foreign: false,
    };
    match rustix::fs::mkdirat(dir, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(plain(errno)),
    }
    let opened = match rustix::fs::openat(dir.as_fd(), name, DIRECTORY, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(Refusal {
                why: "it is a symbolic link or no directory".to_owned(),
                foreign: true,
            });
        }
        outcome => outcome.map_err(plain)?,
    };
    let stat = rustix::fs::fstat(&opened).map_err(plain)?;
    let own_uid = rustix::process::geteuid().as_raw();
    if stat.st_uid != own_uid {
        return Err(Refusal {
            why: format!("it belongs to user {}, not to {own_uid}", stat.st_uid),
            foreign: true,
        });
    }
    if stat.st_mode & 0o077 != 0 {
        let why = format!(
            "it is open to others (mode {:o} instead of 700)",
            stat.st_mode & 0o7777
        );
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
    fn it_is_private_and_found_again_and_removed_when_empty() {
        let base = tempfile::tempdir().unwrap();
        let scope = Scope::open("ram", base.path(), "k1").unwrap();
        for dir in ["", "k1", "k1/files"] {
            let mode = fs::metadata(user_dir(base.path()).join(dir))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o7777, 0o700, "{dir}");
        }
        let file = user_dir(base.path()).join("k1/files/f");
        fs::write(&file, b"x").unwrap();
        drop(Scope::open("ram", base.path(), "k1").unwrap());
        scope.remove_when_empty().unwrap();
        assert!(file.exists());
        fs::remove_file(&file).unwrap();
        let other = Scope::open("ram", base.path(), "k2").unwrap();
        scope.remove_when_empty().unwrap();
        assert!(!user_dir(base.path()).join("k1").exists());
        assert!(user_dir(base.path()).join("k2").exists());
        other.remove_when_empty().unwrap();
        assert!(!user_dir(base.path()).exists());
    }

    #[test]
    fn a_symlink_or_an_open_directory_is_refused_with_the_reason() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), user_dir(base.path())).unwrap();
        let text = Scope::open("ram", base.path(), "k")
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("tier ram") && text.contains("symbolic link"),
            "{text}"
        );
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);

        fs::remove_file(user_dir(base.path())).unwrap();
        fs::create_dir(user_dir(base.path())).unwrap();
        fs::set_permissions(user_dir(base.path()), fs::Permissions::from_mode(0o777)).unwrap();
        let text = Scope::open("ram", base.path(), "k")
            .unwrap_err()
            .to_string();
        assert!(text.contains("777 instead of 700"), "{text}");

        let text = Scope::open("ram", &base.path().join("absent"), "k")
            .unwrap_err()
            .to_string();
        assert!(text.contains("absent") && text.contains("try:"), "{text}");
        assert!(Scope::open("ram", base.path(), "../x").is_err());
    }
}
