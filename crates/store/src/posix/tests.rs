//! Cases that need a directory of a real file system: other users, other owners, mounts, full and read-only stores.

mod moosefs;
mod users;

use std::cell::RefCell;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::*;
use crate::conformance::{conform, deliver, errno, me, meta, names, no_gate, noise, path, read, source, staged};

/// Directories for stores, removed at the end.
#[derive(Default)]
pub struct Plain {
    dirs: RefCell<Vec<TempDir>>,
}

impl Plain {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn dir(&self) -> PathBuf {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let at = dir.path().to_owned();
        self.dirs.borrow_mut().push(dir);
        at
    }

    pub fn posix(&self) -> PosixStore {
        store_at(&self.dir())
    }
}

fn store_at(dir: &Path) -> PosixStore {
    // SAFETY: umask cannot fail and touches no memory. The agent clears it at its start, too.
    unsafe { libc::umask(0) };
    let handle = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    PosixStore::new(handle, format!("file://{}", dir.display())).unwrap()
}

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        assert!(std::env::var_os("CI").is_none(), "not root");
        eprintln!("not root: skipped");
    }
    root
}

/// Runs in its own mount namespace; its mounts end with the thread.
fn apart(run: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                // SAFETY: only this thread's view of mounts (and its working directory) becomes its own.
                assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0);
                rustix::mount::mount_change(
                    "/",
                    rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC,
                )
                .unwrap();
                run();
            })
            .join()
            .unwrap();
    });
}

fn mount_tmpfs(at: &Path, options: &str) {
    let options = std::ffi::CString::new(options).unwrap();
    rustix::mount::mount("none", at, "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str()).unwrap();
}

#[test]
fn posix_store_conforms() {
    let plain = Plain::new();
    conform(|| Box::new(plain.posix()));
}

#[test]
fn posix_store_without_openat2_conforms() {
    let plain = Plain::new();
    conform(|| {
        let mut store = plain.posix();
        store.root = store.root.without_openat2();
        Box::new(store)
    });
}

#[test]
fn posix_store_without_whole_syncs_conforms() {
    let plain = Plain::new();
    conform(|| {
        let mut store = plain.posix();
        store.file_system = None;
        Box::new(store)
    });
}

#[test]
fn posix_store_on_tmpfs_conforms() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dirs: Vec<_> = (0..64).map(|_| plain.dir()).collect();
    apart(|| {
        let unused = std::cell::RefCell::new(dirs);
        conform(|| {
            let dir = unused.borrow_mut().pop().unwrap();
            mount_tmpfs(&dir, "size=512m");
            Box::new(store_at(&dir))
        });
    });
}

/// A plain user of the machine, without privileges: the driver runs as that user, in a child of this test program.
#[test]
fn posix_store_without_privileges_conforms() {
    const INNER: &str = "SURGETANK_TEST_UNPRIVILEGED";
    if std::env::var_os(INNER).is_some() {
        let plain = Plain::new();
        assert!(!Identity::of_this_agent().unwrap().privileged());
        return conform(|| Box::new(plain.posix()));
    }
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(54_321), Some(54_321)).unwrap();
    let program = dir.path().join("tests");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let output = {
        use std::os::unix::process::CommandExt;
        std::process::Command::new(&program)
            .args(["--exact", "posix::tests::posix_store_without_privileges_conforms", "--nocapture"])
            .env(INNER, "1")
            .env("TMPDIR", dir.path())
            .current_dir(dir.path())
            .uid(54_321)
            .gid(54_321)
            .output()
            .unwrap()
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn store_below_a_mount_over_its_root_works() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    apart(|| {
        let store = store_at(&dir);
        mount_tmpfs(&dir, "size=1m");
        deliver(&store, "f", b"below", &meta(0o644));
        assert_eq!(names(&store, "", true), ["f"]);
        assert!(fs::read_dir(&dir).unwrap().next().is_none(), "the mount over the directory got a file");
    });
    assert_eq!(fs::read(dir.join("f")).unwrap(), b"below");
}

#[test]
fn links_out_of_the_root_are_not_followed() {
    let plain = Plain::new();
    let (dir, outside) = (plain.dir(), plain.dir());
    fs::write(outside.join("f"), b"outside").unwrap();
    for openat2 in [true, false] {
        let mut store = store_at(&dir);
        if !openat2 {
            store.root = store.root.without_openat2();
        }
        fs::create_dir(dir.join("d")).unwrap();
        let (temporary, copy) = staged(&store, "d/f", &source(b"ours"), &meta(0o644));
        fs::rename(dir.join("d"), dir.join("away")).unwrap();
        symlink(&outside, dir.join("d")).unwrap();
        let name = temporary.0.rsplit(|byte| *byte == b'/').next().unwrap().to_vec();
        let planted = outside.join(std::str::from_utf8(&name).unwrap());
        fs::write(&planted, b"planted").unwrap();
        for result in [
            store.verify(me(), &temporary, &copy, Verify::Cache, no_gate()),
            store.settle(me(), std::slice::from_ref(&temporary)),
            store.discard(me(), &temporary),
            store.publish(me(), &temporary, &path("d/f"), &meta(0o644)).map(|_| ()),
            store.unlink(me(), &path("d/f")),
            store.rename(me(), &path("d/f"), &path("stolen")),
        ] {
            assert_eq!(errno(result), libc::ELOOP, "openat2: {openat2}");
        }
        assert_eq!(fs::read(&planted).unwrap(), b"planted");
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"outside");
        // The final name itself is a link that leads out: the store replaces the link, and does not write through it.
        symlink(outside.join("f"), dir.join("g")).unwrap();
        deliver(&store, "g", b"plain", &meta(0o644));
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"outside");
        // The removal of a tree stops at links.
        fs::create_dir(dir.join(".surgetank-tmp-t")).unwrap();
        symlink(&outside, dir.join(".surgetank-tmp-t/out")).unwrap();
        store.discard(me(), &path(".surgetank-tmp-t")).unwrap();
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"outside");
        fs::remove_file(dir.join("d")).unwrap();
        fs::remove_file(dir.join("g")).unwrap();
        fs::remove_dir_all(dir.join("away")).unwrap();
    }
}

#[test]
fn links_swapped_in_concurrently_are_not_followed() {
    let plain = Plain::new();
    let (dir, outside) = (plain.dir(), plain.dir());
    let store = store_at(&dir);
    fs::create_dir(dir.join("d")).unwrap();
    symlink(&outside, dir.join("link")).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                rustix::fs::renameat_with(
                    rustix::fs::CWD,
                    dir.join("d"),
                    rustix::fs::CWD,
                    dir.join("link"),
                    RenameFlags::EXCHANGE,
                )
                .unwrap();
            }
        });
        let (mut through, mut refused, mut other) = (0, 0, 0);
        for number in 0..20_000 {
            let temporary = path(&format!("d/.surgetank-tmp-{number}"));
            match store.create_temporary(me(), &temporary, 0o644) {
                Ok(_) => through += 1,
                Err(error) if error.raw_os_error() == Some(libc::ELOOP) => refused += 1,
                Err(_) => other += 1,
            }
            if through > 50 && refused > 50 {
                break;
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(through > 0 && refused > 0 && other == 0, "{through} through, {refused} refused, {other} otherwise");
    });
    assert!(fs::read_dir(&outside).unwrap().next().is_none());
}

#[test]
fn read_only_store_gives_erofs() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    apart(|| {
        deliver(&store_at(&dir), "f", b"x", &meta(0o644));
        rustix::mount::mount_bind(&dir, &dir).unwrap();
        rustix::mount::mount_remount(&dir, rustix::mount::MountFlags::BIND | rustix::mount::MountFlags::RDONLY, c"")
            .unwrap();
        let store = store_at(&dir);
        let temporary = path(".surgetank-tmp-1");
        assert_eq!(read(&store, "f"), b"x");
        for result in [
            store.may_write_dir(me(), &StorePath::root()),
            store.stage_file(me(), &temporary, &StorePath::root(), &source(b"x"), &meta(0o644), no_gate()).map(|_| ()),
            store.stage_dir(me(), &temporary, &meta(0o644)).map(|_| ()),
            store.create_temporary(me(), &temporary, 0o644).map(|_| ()),
            store.rename(me(), &path("f"), &path("g")),
            store.unlink(me(), &path("f")),
            store.set_meta(me(), &path("f"), Kind::File, &meta(0o600)).map(|_| ()),
            store.open(me(), &path("f"), true).map(|_| ()),
        ] {
            assert_eq!(errno(result), libc::EROFS);
        }
    });
}

#[test]
fn full_store_keeps_present_files() {
    if !root() {
        return;
    }
    let plain = Plain::new();
    let dir = plain.dir();
    apart(|| {
        mount_tmpfs(&dir, "size=4m,nr_inodes=12");
        let store = store_at(&dir);
        deliver(&store, "f", b"old", &meta(0o644));
        let big = source(&noise(8 << 20));
        assert_eq!(
            errno(store.stage_file(me(), &path(".surgetank-tmp-1"), &StorePath::root(), &big, &meta(0o644), no_gate())),
            libc::ENOSPC
        );
        assert_eq!(names(&store, "", true), ["f"], "the failed copy keeps its room");
        assert!(store.space(&StorePath::root()).unwrap().available_bytes > 3 << 20);
        // In place: the target loses its bytes, the verified copy keeps them, and the write succeeds when there is space.
        store.link(me(), &path("f"), &path("g")).unwrap();
        let bytes = noise(1_500_000);
        let (temporary, _) = staged(&store, "f", &source(&bytes), &meta(0o644));
        fs::write(dir.join("hog"), noise(2 << 20)).unwrap();
        assert_eq!(errno(store.publish(me(), &temporary, &path("f"), &meta(0o644))), libc::ENOSPC);
        assert!(read(&store, std::str::from_utf8(&temporary.0).unwrap()) == bytes);
        fs::remove_file(dir.join("hog")).unwrap();
        store.publish(me(), &temporary, &path("f"), &meta(0o644)).unwrap();
        assert!(read(&store, "g") == bytes);
        // No inodes left.
        let made = (0..20)
            .map(|number| errno(store.stage_dir(me(), &path(&format!(".surgetank-tmp-{number}")), &meta(0o755))))
            .max();
        assert_eq!(made, Some(libc::ENOSPC));
    });
}

#[test]
fn small_files_share_one_sync() {
    let plain = Plain::new();
    let store = plain.posix();
    if store.file_system.is_none() {
        eprintln!("this file system is synced file by file: skipped");
        return;
    }
    let copies: Vec<_> = (0..256).map(|_| staged(&store, "f", &source(b"small"), &meta(0o644))).collect();
    let paths: Vec<_> = copies.iter().map(|(path, _)| path.clone()).collect();
    store.settle(me(), &paths).unwrap();
    for (number, (temporary, copy)) in copies.iter().enumerate() {
        store.verify(me(), temporary, copy, Verify::Cache, no_gate()).unwrap();
        store.publish(me(), temporary, &path(&format!("f{number}")), &meta(0o644)).unwrap();
    }
    store.sync_dirs(me(), &vec![StorePath::root(); 256]).unwrap();
    let counts = store.counters();
    assert_eq!((counts.file_system_syncs, counts.fsyncs, counts.renames), (1, 1, 256));
    assert_eq!((counts.bytes_written, counts.bytes_read_back), (256 * 5, 256 * 5));
    // The store syncs a few files one by one.
    let (temporary, _) = staged(&store, "g", &source(b"small"), &meta(0o644));
    store.settle(me(), &[temporary]).unwrap();
    assert_eq!(store.counters().fsyncs, 2);
}

#[test]
fn store_from_file_handle_is_refused() {
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    assert_eq!(errno(PosixStore::new(file, String::new())), libc::ENOTDIR);
}

/// Regression: a file's turn ended only after the server had also answered a query for the result of its rename.
#[test]
fn turn_ends_with_the_rename() {
    struct Watched<'a>(&'a Path, std::sync::Mutex<Vec<bool>>);
    impl crate::TakesTurn for Watched<'_> {
        fn wait(&self) -> io::Result<()> {
            self.1.lock().unwrap().push(self.0.exists());
            Ok(())
        }
        fn pass(&self) {
            self.1.lock().unwrap().push(self.0.exists());
        }
    }
    let plain = Plain::new();
    let dir = plain.dir();
    let (store, at) = (store_at(&dir), dir.join("f"));
    for version in [b"one".as_slice(), b"two"] {
        let before = at.exists();
        let (temporary, _) = staged(&store, "f", &source(version), &meta(0o644));
        let turn = Watched(&at, std::sync::Mutex::default());
        store.publish_in_turn(me(), &temporary, &path("f"), &meta(0o644), &turn).unwrap();
        assert_eq!(*turn.1.lock().unwrap(), [before, true]);
        assert_eq!(fs::read(&at).unwrap(), version);
    }
    fs::remove_file(&at).unwrap();
    let turn = Watched(&at, std::sync::Mutex::default());
    let (temporary, _) = staged(&store, "f", &source(b"new"), &meta(0o644));
    store.publish_absent(me(), &temporary, &path("f"), Some(&turn)).unwrap();
    assert_eq!(*turn.1.lock().unwrap(), [false, true]);
    let (temporary, _) = staged(&store, "f", &source(b"two"), &meta(0o644));
    assert_eq!(errno(store.publish_absent(me(), &temporary, &path("f"), None)), libc::EEXIST);
    assert_eq!(fs::read(&at).unwrap(), b"new");
    store.publish(me(), &temporary, &path("f"), &meta(0o644)).unwrap();
    struct Refused;
    impl crate::TakesTurn for Refused {
        fn wait(&self) -> io::Result<()> {
            Err(Errno::CANCELED.into())
        }
    }
    let (temporary, _) = staged(&store, "f", &source(b"three"), &meta(0o644));
    assert!(store.publish_in_turn(me(), &temporary, &path("f"), &meta(0o644), &Refused).is_err());
    assert_eq!(fs::read(&at).unwrap(), b"two");
    assert!(store.stat(me(), &temporary).is_ok());
}

#[test]
fn remote_file_system_publishes_several_files_at_once() {
    assert_eq!(Plain::new().posix().features().publications_at_once, 1);
    // /proc is not a local file system, and is always available.
    assert!(store_at(Path::new("/proc")).features().publications_at_once > 1);
}
