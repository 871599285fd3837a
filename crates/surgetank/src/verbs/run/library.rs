//! The preload shim's library as a file that the dynamic loader of every program of the run can read.
//!
//! Where: in the user's home if possible. Launchers such as srun carry the environment to other nodes, where the home is
//! usually there too and our state is not: there the shim finds no mount and refuses to write underneath, whereas a library
//! that is missing would let everything through. Root's programs may become other users, so root's library lies where every
//! user can read it and only root can replace it: in such a home, else in a directory of the machine's.
//!
//! Danger avoided: a library that another user puts in its place, and one that goes while a program of any run needs it. On a
//! directory of the machine's each run holds a shared lock on the file; the last one removes it, under an exclusive lock.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, StatVfsMountFlags};
use surgetank_core::config::Config;

const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libsurgetank.so"));
/// For every user of this machine; what is missing or unfit is passed over.
const SHARED: [&str; 2] = ["/var/cache/surgetank", "/var/tmp/surgetank-shim"];
const PREFIX: &[u8] = b"libsurgetank-";
/// Other runs remove and make the file meanwhile; each time one of them has got further.
const TRIES_MAX: usize = 1000;

/// There for as long as this is.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    /// Locked, in a directory of the machine's.
    shared: Option<File>,
}

impl Library {
    pub fn place(config: &Config) -> io::Result<Self> {
        Self::place_in(config, &SHARED.map(Path::new))
    }

    fn place_in(config: &Config, shared: &[&Path]) -> io::Result<Self> {
        // Named by its content: programs that run have theirs open, a newer one does not disturb them.
        let name = format!("libsurgetank-{:016x}.so", fingerprint(LIBRARY));
        let home = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
            .filter(|home| home.is_absolute() && !home.starts_with(&config.over))
            .map(|home| home.join("surgetank"));
        let of_root = rustix::process::geteuid().is_root();
        let open = |dir: &PathBuf| !of_root || fs::create_dir_all(dir).is_ok() && is_for_everybody(dir);
        if let Some(path) = home.clone().filter(open).and_then(|dir| put(&dir, &name).ok()) {
            return Ok(Self { path, shared: None });
        }
        for dir in shared.iter().filter(|dir| of_root && !dir.starts_with(&config.over)) {
            if let Ok((path, file)) = share(dir, &name) {
                return Ok(Self { path, shared: Some(file) });
            }
        }
        // Programs that stay who they are can read it.
        let mut failed = None;
        for dir in home.into_iter().chain([config.state.join("lib")]) {
            match put(&dir, &name) {
                Ok(path) => return Ok(Self { path, shared: None }),
                Err(why) => failed = Some(why),
            }
        }
        Err(failed.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
    }

    pub fn path(&self) -> &OsStr {
        self.path.as_os_str()
    }

    /// Programs that the run leaves behind go on using it. The next run that ends removes it.
    pub fn leave(mut self) {
        self.shared = None;
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if let Some(file) = self.shared.take()
            && let Some(dir) = self.path.parent()
        {
            remove_unused(&self.path, &file);
            // Fails while another run has it.
            drop(fs::remove_dir(dir));
        }
    }
}

/// Nobody but root can change what lies in it, and every user can read that.
fn is_for_everybody(dir: &Path) -> bool {
    let Ok(dir) = dir.canonicalize() else { return false };
    let runs = rustix::fs::statvfs(&dir).is_ok_and(|stat| !stat.f_flag.contains(StatVfsMountFlags::NOEXEC));
    runs && dir.ancestors().all(|one| {
        let is_last = one == dir;
        fs::symlink_metadata(one).is_ok_and(|meta| {
            let mode = meta.mode();
            // In a sticky directory others cannot rename what is root's.
            let safe = mode & 0o022 == 0 || mode & 0o1000 != 0 && !is_last;
            meta.is_dir() && meta.uid() == 0 && safe && mode & 0o001 != 0
        })
    })
}

fn is_ours(path: &Path) -> bool {
    let ours = rustix::process::geteuid().as_raw();
    let is_right = |meta: &fs::Metadata| {
        meta.is_file() && meta.uid() == ours && meta.mode() & 0o777 == 0o755 && meta.len() == LIBRARY.len() as u64
    };
    fs::symlink_metadata(path).is_ok_and(|meta| is_right(&meta)) && fs::read(path).is_ok_and(|there| there == LIBRARY)
}

/// Written, and not yet under its name.
fn write(temporary: &Path) -> io::Result<File> {
    let mut file = File::options().write(true).create_new(true).mode(0o700).open(temporary)?;
    let written = rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .map_err(Into::into)
        .and_then(|()| file.write_all(LIBRARY))
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(0o755)));
    if written.is_err() {
        drop(fs::remove_file(temporary));
    }
    written.map(|()| file)
}

fn understood(dir: &Path) -> io::Result<()> {
    // The loader separates paths by these.
    if dir.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ' | b'$')) {
        return Err(io::Error::other(format!("the dynamic loader does not understand the path {}", dir.display())));
    }
    Ok(())
}

/// Where only this user's runs put it; it stays there.
fn put(dir: &Path, name: &str) -> io::Result<PathBuf> {
    understood(dir)?;
    let path = dir.join(name);
    if is_ours(&path) {
        return Ok(path);
    }
    fs::create_dir_all(dir)?;
    let temporary = dir.join(format!("{name}.{}", std::process::id()));
    drop(fs::remove_file(&temporary));
    write(&temporary)?;
    fs::rename(&temporary, &path).inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    Ok(path)
}

/// Where all of root's runs share it.
fn share(dir: &Path, name: &str) -> io::Result<(PathBuf, File)> {
    understood(dir)?;
    let path = dir.join(name);
    for _ in 0..TRIES_MAX {
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => return Err(why),
            _ => {}
        }
        // Ours, made just now, here or by another run.
        let is_new = |meta: fs::Metadata| meta.is_dir() && meta.uid() == 0 && meta.mode() & 0o777 == 0o700;
        if fs::symlink_metadata(dir).is_ok_and(is_new) {
            let _ = fs::set_permissions(dir, fs::Permissions::from_mode(0o755));
        }
        match try_share(dir, &path) {
            // The last run that had it, or the directory, removed it.
            Err(why) if why.kind() == io::ErrorKind::NotFound => {}
            Err(why) => return Err(why),
            Ok(None) => {}
            Ok(Some(file)) => {
                sweep(dir, &path);
                return Ok((path, file));
            }
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// `None`: another run was at it.
fn try_share(dir: &Path, path: &Path) -> io::Result<Option<File>> {
    if !is_for_everybody(dir) {
        // It may be removed just now.
        let there = dir.try_exists()?;
        return Err(if there { io::ErrorKind::PermissionDenied } else { io::ErrorKind::NotFound }.into());
    }
    if !is_ours(path) {
        let unique = RandomState::new().build_hasher().finish();
        let temporary = path.with_extension(format!("so.{unique:016x}"));
        let written = write(&temporary)?;
        // Never over one that another run has locked.
        let linked = fs::hard_link(&temporary, path);
        drop(fs::remove_file(&temporary));
        drop(written);
        match linked {
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {
                let there = File::open(path)?;
                // Not whole: of another hand, or after a power failure.
                if !is_ours(path) {
                    remove_unused(path, &there);
                }
            }
            other => other?,
        }
    }
    let file = File::open(path)?;
    rustix::fs::flock(&file, FlockOperation::LockShared)?;
    Ok(is_at(path, &file).then_some(file))
}

fn is_at(path: &Path, file: &File) -> bool {
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    fs::symlink_metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|ours| same(there, ours)))
}

/// Unless another run holds it. Whoever opens it just before finds it gone once it has its lock.
fn remove_unused(path: &Path, file: &File) {
    if rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() && is_at(path, file) {
        drop(fs::remove_file(path));
    }
}

/// What runs left that were killed: of other versions, and half-made ones.
fn sweep(dir: &Path, ours: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path != ours
            && entry.file_name().as_bytes().starts_with(PREFIX)
            && let Ok(file) = File::open(&path)
        {
            remove_unused(&path, &file);
        }
    }
}

/// Tells builds apart; nothing depends on its being hard to forge.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
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
    fn shared_library_goes_with_the_last_of_many_runs() {
        let Some(base) = base() else { return };
        open_up(base.path(), 0o755);
        let dir = base.path().join("shared");
        let runs: Vec<_> = (0..8)
            .map(|_| {
                let dir = dir.clone();
                std::thread::spawn(move || {
                    for _ in 0..200 {
                        let (path, file) = share(&dir, NAME).unwrap();
                        assert!(is_ours(&path), "a run has it, and it is not whole");
                        drop(Library { path, shared: Some(file) });
                    }
                })
            })
            .collect();
        runs.into_iter().for_each(|run| run.join().unwrap());
        assert!(!dir.exists(), "{:?}", fs::read_dir(&dir).map(Iterator::count));
    }

    #[test]
    fn shared_library_is_not_put_where_others_could_replace_it() {
        let Some(base) = base() else { return };
        let dir = base.path().join("shared");
        for (mode, fits) in [(0o755, true), (0o700, false), (0o775, false), (0o757, false), (0o1777, true)] {
            open_up(base.path(), mode);
            assert_eq!(
                share(&dir, NAME).map(|(path, file)| drop(Library { path, shared: Some(file) })).is_ok(),
                fits,
                "{mode:o}"
            );
        }
        open_up(base.path(), 0o755);
        fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, Some(1000), None).unwrap();
        assert!(share(&dir, NAME).is_err(), "another user's directory");
        fs::remove_dir_all(&dir).unwrap();
        std::os::unix::fs::symlink("/tmp", &dir).unwrap();
        assert!(share(&dir, NAME).is_err(), "a link to everybody's directory");
    }

    #[test]
    fn damaged_and_old_libraries_are_replaced() {
        let Some(base) = base() else { return };
        open_up(base.path(), 0o755);
        let dir = base.path().join("shared");
        fs::create_dir(&dir).unwrap();
        for name in [NAME, "libsurgetank-1.so", "libsurgetank-0.so.77", "something else"] {
            fs::write(dir.join(name), "half").unwrap();
        }
        let held = File::create(dir.join("libsurgetank-2.so")).unwrap();
        rustix::fs::flock(&held, FlockOperation::LockShared).unwrap();
        let (path, file) = share(&dir, NAME).unwrap();
        assert!(is_ours(&path));
        drop(Library { path, shared: Some(file) });
        let mut left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["libsurgetank-2.so", "something else"]);
    }
}
