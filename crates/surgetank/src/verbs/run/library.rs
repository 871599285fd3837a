//! The preload shim's library, as a file that the dynamic loader of every program of the run can read.
//!
//! It is in the user's home if possible. Launchers such as srun carry the environment to other nodes, which usually
//! have the home and not this node's state. There the shim finds no mount and refuses to write underneath; with a
//! missing library every write would pass. Root's programs may become other users. So root's library is stored where
//! every user can read it: in such a home, in one that several machines share, else in a directory of the machine.
//!
//! The file stays. Its name is made from its content, and programs that outlive their run continue to load it by its
//! name.
//!
//! The danger that it avoids: a library that root preloads and another user can replace. So every directory up to the
//! file is checked before any file is created. The preloaded path is the checked one, without symbolic links.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use surgetank_policy::config::machine::Machine;
use surgetank_policy::config::{Config, Survives};

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libsurgetank.so"));
/// Directories for every user of this machine; unfit ones are skipped.
const SHARED: [&str; 2] = ["/var/cache/surgetank", "/var/tmp/surgetank-shim"];

/// The library's path; it is created if missing.
pub fn place(config: &Config) -> io::Result<PathBuf> {
    // Its name comes from its content: running programs have their library open, and a newer one does not disturb them.
    let name = format!("libsurgetank-{:016x}.so", fingerprint(LIBRARY));
    let home = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .filter(|home| home.is_absolute())
        .map(|home| home.join("surgetank"));
    let apart = |dir: &PathBuf| !dir.starts_with(&config.over);
    let own = config.state.join("lib");
    let mut failed = io::Error::from(io::ErrorKind::NotFound);
    if rustix::process::geteuid().is_root() {
        for dir in home.into_iter().chain(SHARED.map(PathBuf::from)).filter(apart) {
            match roots(&dir).and_then(|dir| put(&dir, &name)) {
                Ok(path) => return Ok(path),
                Err(why) => failed = why,
            }
        }
    } else if let Some(home) = home.filter(apart) {
        match put_made(&home, &name) {
            Ok(path) => return Ok(path),
            Err(why) => failed = why,
        }
    }
    // Programs that keep their user can read it.
    put_made(&own, &name).map_err(|why| if why.kind() == io::ErrorKind::NotFound { failed } else { why })
}

/// The directory, created if missing, without symbolic links in its path. An error if a user other than root could
/// change its contents, or if other users cannot read it on a machine of its own.
fn roots(dir: &Path) -> io::Result<PathBuf> {
    let there = dir.ancestors().find(|at| fs::symlink_metadata(at).is_ok()).ok_or(io::ErrorKind::NotFound)?;
    let mut path = there.canonicalize()?;
    if !is_fit(&path, path.as_os_str() == dir.as_os_str()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    for part in dir.strip_prefix(there).unwrap_or(Path::new("")) {
        path.push(part);
        match fs::create_dir(&path) {
            Ok(()) => {
                // (The umask may have removed permissions.)
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::fchmod(rustix::fs::open(&path, flags, Mode::empty())?, Mode::from_raw_mode(0o755))?;
            }
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
            Err(why) => return Err(why),
        }
    }
    if is_fit(&path, true) { Ok(path) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Only root can change this directory or one above it, and every user, or root of every machine, can read it.
/// `is_last`: the file itself is in it.
fn is_fit(dir: &Path, is_last: bool) -> bool {
    let runs = rustix::fs::statvfs(dir).is_ok_and(|stat| !stat.f_flag.contains(StatVfsMountFlags::NOEXEC));
    let shared = || Machine::default().file_system(dir).is_ok_and(|found| found.survives == Survives::Node);
    let everybody = |one: &Path| fs::symlink_metadata(one).is_ok_and(|meta| meta.mode() & 0o001 != 0);
    let only_roots = |one: &Path| {
        fs::symlink_metadata(one).is_ok_and(|meta| {
            let mode = meta.mode();
            // In a sticky directory other users cannot rename root's files.
            let safe = mode & 0o022 == 0 || mode & 0o1000 != 0 && !(is_last && one == dir);
            meta.is_dir() && meta.uid() == 0 && safe
        })
    };
    runs && dir.ancestors().all(only_roots) && (dir.ancestors().all(everybody) || shared())
}

fn is_ours(path: &Path) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    let is_right = |meta: &fs::Metadata| {
        meta.is_file() && meta.uid() == ours && meta.mode() & 0o777 == 0o755 && meta.len() == LIBRARY.len() as u64
    };
    fs::symlink_metadata(path).is_ok_and(|meta| is_right(&meta)) && fs::read(path).is_ok_and(|there| there == LIBRARY)
}

fn put_made(dir: &Path, name: &str) -> io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    put(dir, name)
}

/// Writes atomically: under its name the file is always complete.
fn put(dir: &Path, name: &str) -> io::Result<PathBuf> {
    // The loader separates paths at these characters.
    if dir.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'$')) {
        return Err(io::Error::other(format!("the dynamic loader does not understand the path {}", dir.display())));
    }
    let path = dir.join(name);
    if is_ours(&path) {
        return Ok(path);
    }
    let temporary = dir.join(format!("{name}.{:016x}", RandomState::new().build_hasher().finish()));
    let mut file = File::options().write(true).create_new(true).mode(0o700).open(&temporary)?;
    file.write_all(LIBRARY)
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(0o755)))
        .and_then(|()| fs::rename(&temporary, &path))
        .inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    Ok(path)
}

/// Distinguishes builds; nothing depends on it being hard to forge.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    const NAME: &str = "libsurgetank-0.so";

    /// Below a path that only root can change; `None` where tests do not run as root.
    fn base() -> Option<tempfile::TempDir> {
        rustix::process::geteuid().is_root().then(|| tempfile::tempdir_in("/var").unwrap())
    }

    fn open_up(dir: &Path, mode: u32) {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn library_is_whole_for_many_runs_at_once() {
        let Some(base) = base() else { return };
        open_up(base.path(), 0o755);
        let dir = base.path().join("shared");
        for _ in 0..50 {
            let all_at_once = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        all_at_once.wait();
                        let path = put(&roots(&dir).unwrap(), NAME).unwrap();
                        assert!(is_ours(&path), "a run has it, and it is not whole");
                    });
                }
            });
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no temporary is left");
            fs::remove_dir_all(&dir).unwrap();
        }
    }

    #[test]
    fn library_is_not_put_where_other_users_could_replace_it() {
        let Some(base) = base() else { return };
        let dir = base.path().join("shared");
        for (mode, fits) in [(0o755, true), (0o700, false), (0o775, false), (0o757, false), (0o1777, true)] {
            open_up(base.path(), mode);
            assert_eq!(roots(&dir).is_ok(), fits, "{mode:o}");
            assert_eq!(dir.exists(), fits, "{mode:o}: looked at before it is made");
            drop(fs::remove_dir(&dir));
        }
        open_up(base.path(), 0o1777);
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(1000), None).unwrap();
        assert!(roots(&dir).is_err(), "another user's directory");
        assert!(roots(&dir.join("below")).is_err(), "below another user's directory");
        assert!(!dir.join("below").exists());
    }

    /// A link may lead elsewhere later. So the preloaded path has none.
    #[test]
    fn library_is_preloaded_by_a_path_without_links() {
        let Some(base) = base() else { return };
        open_up(base.path(), 0o755);
        let (good, alice) = (base.path().join("good"), base.path().join("alice"));
        for dir in [&good, &alice] {
            fs::create_dir(dir).unwrap();
        }
        symlink(&good, alice.join("cache")).unwrap();
        chown(&alice, Some(1000), None).unwrap();
        assert_eq!(roots(&alice.join("cache")).unwrap(), good);
        assert_eq!(roots(&alice.join("cache/surgetank")).unwrap(), good.join("surgetank"));
    }

    #[test]
    fn damaged_library_is_replaced() {
        let Some(base) = base() else { return };
        open_up(base.path(), 0o755);
        let dir = roots(&base.path().join("shared")).unwrap();
        fs::write(dir.join(NAME), "half").unwrap();
        assert!(is_ours(&put(&dir, NAME).unwrap()));
    }
}
