//! A mirror on a temporary directory, mounted for the time of a test.
#![allow(dead_code, reason = "each test file is compiled with its own copy and uses a part of it")]

use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::mirror::{Mirror, MirrorOptions};
use surgetank::mount::{AttachOptions, Filesystem, Options, Session, attach, detach};
use tempfile::TempDir;

/// Whether this machine lets the tests mount; prints a line if it does not.
pub fn permitted() -> bool {
    let permitted = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !permitted {
        assert!(std::env::var_os("CI").is_none(), "mounting needs root and /dev/fuse");
        eprintln!("skipped: mounting needs root and /dev/fuse");
    }
    permitted
}

/// Unmounts and ends the session when dropped.
pub struct Mounted {
    source: TempDir,
    place: Place,
    pub mirror: Arc<Mirror>,
}

impl Mounted {
    pub fn new(passthrough: bool) -> Self {
        let options = MirrorOptions { passthrough, ttl: Duration::from_secs(60), ..MirrorOptions::default() };
        Self::serving(options, |mirror, _| mirror)
    }

    /// `prepared` gets the mirror before it serves, and the directory that it shows.
    pub fn serving(options: MirrorOptions, prepared: impl FnOnce(Mirror, &Path) -> Mirror) -> Self {
        // The kernel has already applied the caller's umask; this process's would apply a second time.
        static UMASK: Once = Once::new();
        UMASK.call_once(|| {
            rustix::process::umask(rustix::fs::Mode::empty());
        });
        let source = tempfile::tempdir().unwrap();
        let mirror = Arc::new(prepared(Mirror::new(source.path(), options).unwrap(), source.path()));
        let passthrough = options.passthrough;
        let place = Place::new(&mirror, &Options { passthrough, ..Options::default() });
        assert_eq!(place.session.agreed().passthrough, passthrough, "passthrough was not granted");
        Self { source, place, mirror }
    }

    pub fn path(&self) -> &Path {
        self.place.path()
    }

    pub fn source(&self) -> &Path {
        self.source.path()
    }
}

/// A mountpoint at which a file system is served.
pub struct Place {
    mountpoint: TempDir,
    pub session: Session,
}

impl Place {
    pub fn new<F: Filesystem>(filesystem: &Arc<F>, options: &Options) -> Self {
        let mountpoint = tempfile::tempdir().unwrap();
        let device = attach(mountpoint.path(), &AttachOptions::default()).unwrap();
        let session = Session::start(device, filesystem, options).unwrap();
        Self { mountpoint, session }
    }

    pub fn path(&self) -> &Path {
        self.mountpoint.path()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        detach(self.mountpoint.path(), true).unwrap();
        if !std::thread::panicking() {
            assert!(self.session.wait(Some(Duration::from_secs(20))), "the session outlives its mount");
        }
    }
}
