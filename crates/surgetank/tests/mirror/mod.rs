//! A pass-through file system: shows a directory at another place, unchanged.
//!
//! It tests the adapter: every operation has a native twin for comparison. In the testbed it stands in for a busy
//! parallel file system, by sleeping before each metadata operation. It also stands in for a faulty one, by injecting
//! faults (`faults`).
//!
//! It must run as the owner of the files or as root. It needs a umask of 0, because the kernel has already applied the
//! caller's; [`serve_mirror`] ensures that. Files that it creates for other users are given to them.

#![allow(dead_code, reason = "the example `slowfs` and the tests use different parts")]

pub mod faults;
mod nodes;
mod operations;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use surgetank_types::error::{Error, FsResult, Result};

use faults::{Faults, Op, Wrong};
use nodes::{Node, Nodes};
use surgetank::mount::attach::{self, AttachOptions};
use surgetank::mount::handshake::Options;
use surgetank::mount::notifier::Notifier;
use surgetank::mount::session::Session;

/// How the mirror behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MirrorOptions {
    /// The sleep before each metadata operation.
    pub latency_metadata: Duration,
    /// The kernel reads and writes the files itself.
    pub passthrough: bool,
    /// How long the kernel may cache names and attributes. Above zero, changes made beside the mirror show late.
    pub ttl: Duration,
    /// A file's data is on the device when the close of a writer returns, as over NFS.
    pub flush_on_close: bool,
}

/// The number of reads and writes that came to the mirror instead of the kernel's passthrough.
#[derive(Debug, Default)]
pub struct Traffic {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
}

pub struct Mirror {
    options: MirrorOptions,
    nodes: Nodes,
    handles: RwLock<HashMap<u64, Arc<Handle>>>,
    next_handle: AtomicU64,
    traffic: Traffic,
    notifier: OnceLock<Notifier>,
    faults: Faults,
}

/// An open file or directory.
struct Handle {
    node: Arc<Node>,
    file: OwnedFd,
}

impl Mirror {
    pub fn new(source: &Path, options: MirrorOptions) -> io::Result<Self> {
        let root = rustix::fs::open(source, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self {
            options,
            nodes: Nodes::new(root)?,
            handles: RwLock::default(),
            next_handle: AtomicU64::new(1),
            traffic: Traffic::default(),
            notifier: OnceLock::new(),
            faults: Faults::default(),
        })
    }

    /// This file describes the faults.
    #[must_use]
    pub fn with_faults(mut self, file: PathBuf) -> Self {
        self.faults = Faults::read_from(file);
        self
    }

    pub fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    fn handle(&self, fh: u64) -> FsResult<Arc<Handle>> {
        let handles = self.handles.read().unwrap_or_else(PoisonError::into_inner);
        handles.get(&fh).cloned().ok_or_else(|| Errno::BADF.into())
    }

    fn keep(&self, node: Arc<Node>, file: OwnedFd) -> u64 {
        let fh = self.next_handle.fetch_add(1, Ordering::Relaxed);
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        handles.insert(fh, Arc::new(Handle { node, file }));
        fh
    }

    fn drop_handle(&self, fh: u64) -> Option<Arc<Handle>> {
        self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&fh)
    }

    /// Runs before each metadata operation.
    fn metadata(&self, op: Op) -> FsResult<Wrong> {
        if !self.options.latency_metadata.is_zero() {
            std::thread::sleep(self.options.latency_metadata);
        }
        self.faults.apply(op)
    }
}

/// Serves `source` at `mountpoint` in the foreground until an unmount, SIGTERM or SIGINT (a signal unmounts lazily).
/// Call it before any other thread exists: it changes the umask, the signal mask and limits of the process.
pub fn serve_mirror(source: &Path, mountpoint: &Path, options: MirrorOptions, faults: Option<PathBuf>) -> Result<()> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::new(format!("cannot mirror {} at {}", source.display(), mountpoint.display())).why(why)
    };
    rustix::process::umask(Mode::empty());
    raise_descriptor_limit();
    sleep_precisely();
    let signals = block_signals();
    let mut mirror = Mirror::new(source, options).map_err(|error| failed(&error))?;
    if let Some(file) = faults {
        mirror = mirror.with_faults(file);
    }
    let mirror = Arc::new(mirror);
    // The mounting helper refuses to open an ordinary user's mount to other users.
    let allow_other = rustix::process::geteuid().is_root();
    let subtype = "surgetank-mirror".to_owned();
    let attach_options = AttachOptions { subtype, allow_other, default_permissions: true };
    let device = attach::attach(mountpoint, &attach_options)?;
    let session_options = Options { passthrough: options.passthrough, ..Options::default() };
    let session = Session::start(device, &mirror, &session_options).map_err(|error| failed(&error))?;
    if options.passthrough && !session.agreed().passthrough {
        attach::detach(mountpoint, true)?;
        return Err(failed(&"the kernel does not grant passthrough"));
    }
    while session.running() {
        if signal_came(&signals, Duration::from_millis(100)) {
            attach::detach(mountpoint, true)?;
            session.stop();
        }
    }
    Ok(())
}

/// The mirror holds one descriptor for every file that the kernel knows.
fn raise_descriptor_limit() {
    let wanted = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    if rustix::process::setrlimit(Resource::Nofile, wanted).is_err() {
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let outcome = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
        if let Err(error) = outcome {
            tracing::warn!(%error, "the limit of open files stays low; the mirror may run out of them");
        }
    }
}

/// Threads started from here on sleep with microsecond precision, not the default 50.
fn sleep_precisely() {
    let slack_ns: libc::c_ulong = 1_000;
    // SAFETY: PR_SET_TIMERSLACK takes an integer and touches nothing else.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, slack_ns) };
}

/// SIGTERM and SIGINT, blocked for this thread and those that it starts.
fn block_signals() -> libc::sigset_t {
    // SAFETY: sigemptyset initialises the set; the other calls get a valid set and signal numbers.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        libc::sigaddset(&raw mut signals, libc::SIGTERM);
        libc::sigaddset(&raw mut signals, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
        signals
    }
}

fn signal_came(signals: &libc::sigset_t, timeout: Duration) -> bool {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32) };
    // SAFETY: both pointers are to living values; no information about the signal is requested.
    unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &raw const timeout) > 0 }
}
