//! One device of a tier: a directory on one file system, its ledger, health and counters, and the plain files on it.
//!
//! It says what is there and what is free; it never decides. All methods may be called from any thread. A writer
//! first reserves, then writes, then calls `add_used`, and only then `unreserve`s: in that order no moment shows
//! more room than there is. What direct writers wrote unseen is moved from reserved to used the same way, when the
//! agent looks at their files; until then it counts twice (promised and gone from the device), never not at all.

mod names;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;

use super::ballast;
use super::health::{self, Health};
use super::ledger::Ledger;
use super::rate::Rate;
use super::scope::Scope;
use super::tree::Tree;
use surgetank_policy::config::Survives;
use surgetank_policy::placement::DeviceView;
use surgetank_types::model::DeviceId;

pub use names::Remains;

/// How long a refusal by quota keeps newcomers away; then it is tried again.
const QUOTA_BELIEVED: Duration = Duration::from_secs(10);

/// What happened on a device since the agent started.
#[derive(Debug, Default)]
pub struct DeviceCounters {
    /// Versions of files that were closed here.
    pub files: AtomicU64,
    /// Written to the device by programs, spills, copies up and prefetches.
    pub bytes_in: AtomicU64,
    /// Read from the device by the drain and by mediated reads.
    pub bytes_out: AtomicU64,
    /// Opens that found the file here.
    pub hits: AtomicU64,
    pub spills_in: AtomicU64,
    pub spills_out: AtomicU64,
    pub evictions: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub errors: AtomicU64,
}

/// What the file system said in a poll.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sighting {
    /// `st_dev`: devices on the same file system share what is available.
    pub file_system: u64,
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// Our use just before the file system was asked.
    pub used_before_bytes: u64,
}

/// What a device is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Used,
    /// The configuration does not name it any more: it is read and emptied, and gets nothing new.
    Drained,
    /// It cannot be reached; what it has is waited for.
    Absent,
    /// It cannot come back: it was memory, and the machine restarted or the directory was removed.
    Lost,
}

#[derive(Debug)]
pub struct Device {
    id: DeviceId,
    standing: Standing,
    tier_name: Arc<str>,
    path: PathBuf,
    survives: Survives,
    in_memory: bool,
    leases: bool,
    scope: Scope,
    ledger: Mutex<Ledger>,
    health: Mutex<Health>,
    rate: Mutex<Rate>,
    /// Held while the ballast's file and its entry in the ledger change together.
    ballast_bytes: Mutex<u64>,
    ballast_wanted: AtomicBool,
    /// Until when a refusal by quota is believed.
    quota_until: Mutex<Option<Instant>>,
    writers: AtomicU32,
    counters: DeviceCounters,
    astray: names::Astray,
}

/// What must be known to make a device of a directory.
pub(super) struct Setup {
    pub id: DeviceId,
    pub standing: Standing,
    pub tier_name: Arc<str>,
    pub path: PathBuf,
    pub survives: Survives,
    pub in_memory: bool,
    pub scope: Scope,
    pub ledger: Ledger,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these; if it did, the numbers would still be whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    pub(super) fn new(setup: Setup) -> Self {
        let device = Self {
            id: setup.id,
            standing: setup.standing,
            tier_name: setup.tier_name,
            path: setup.path,
            survives: setup.survives,
            in_memory: setup.in_memory,
            leases: false,
            scope: setup.scope,
            ledger: Mutex::new(setup.ledger),
            health: Mutex::new(Health::new()),
            rate: Mutex::new(Rate::new(setup.in_memory)),
            ballast_bytes: Mutex::new(0),
            ballast_wanted: AtomicBool::new(true),
            quota_until: Mutex::new(None),
            writers: AtomicU32::new(0),
            counters: DeviceCounters::default(),
            astray: names::Astray::default(),
        };
        let leases = device.is_there() && device.probe_leases();
        Self { leases, ..device }
    }

    pub fn id(&self) -> DeviceId {
        self.id
    }
    pub fn standing(&self) -> Standing {
        self.standing
    }
    /// It can be read.
    pub fn is_there(&self) -> bool {
        matches!(self.standing, Standing::Used | Standing::Drained)
    }
    /// Names the very directory behind the path.
    pub fn token(&self) -> &str {
        &self.scope.token
    }
    pub fn tier_name(&self) -> &str {
        &self.tier_name
    }
    /// The directory below which our plain files lie under their own relative paths.
    pub fn files_path(&self) -> &Path {
        &self.scope.files_path
    }
    /// A path below it, for people and reports.
    pub fn shown(&self, path: &[u8]) -> Vec<u8> {
        use std::os::unix::ffi::OsStrExt;
        self.files_path().join(std::ffi::OsStr::from_bytes(path)).into_os_string().into_encoded_bytes()
    }
    /// The directory from the configuration.
    pub fn path(&self) -> &Path {
        &self.path
    }
    pub fn survives(&self) -> Survives {
        self.survives
    }
    /// Its files count as memory of the job.
    pub fn in_memory(&self) -> bool {
        self.in_memory
    }
    /// The `files` directory: whole plain files under their own relative path.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.scope.files.as_fd()
    }
    /// `F_SETLEASE` works here.
    pub fn leases(&self) -> bool {
        self.leases
    }
    pub fn counters(&self) -> &DeviceCounters {
        &self.counters
    }

    // ---- room

    pub fn add_used(&self, bytes: i64) {
        lock(&self.ledger).add_used(bytes);
    }
    pub fn used_bytes(&self) -> u64 {
        lock(&self.ledger).used_bytes()
    }
    /// Promises room; false when there is not enough.
    pub fn try_reserve(&self, bytes: u64) -> bool {
        lock(&self.ledger).try_reserve(bytes)
    }
    pub fn unreserve(&self, bytes: u64) {
        lock(&self.ledger).unreserve(bytes);
    }
    pub fn free_bytes(&self) -> u64 {
        lock(&self.ledger).free_bytes()
    }
    /// What should be evicted so that the cap is kept and other users of the device get their room.
    pub fn excess_bytes(&self) -> u64 {
        lock(&self.ledger).excess_bytes()
    }
    /// What the memory is short of; the rest of the excess can wait.
    pub fn deficit_bytes(&self) -> u64 {
        lock(&self.ledger).deficit_bytes()
    }
    /// A direct descriptor for writing was given out.
    pub fn writer_opened(&self) {
        self.writers.fetch_add(1, Ordering::Relaxed);
    }
    pub fn writer_closed(&self) {
        let before = self.writers.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "more writers closed than opened");
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    pub fn view(&self) -> DeviceView {
        let healthy = self.healthy() && self.standing == Standing::Used;
        let rate = lock(&self.rate).clone();
        let ledger = lock(&self.ledger);
        DeviceView {
            id: self.id,
            tier_name: Arc::clone(&self.tier_name),
            free_bytes: ledger.free_bytes(),
            reserved_bytes: ledger.reserved_bytes(),
            used_bytes: ledger.used_bytes(),
            cap_bytes: ledger.cap_bytes(),
            writers: self.writers.load(Ordering::Relaxed),
            bandwidth_bytes_per_second: rate.bandwidth_bytes_per_second(),
            load_bytes_per_second: rate.load_bytes_per_second(),
            healthy,
            leases: self.leases,
            survives: self.survives,
        }
    }

    // ---- health

    /// An operation on the device failed. Errors of the device take it out of use; "full" means that nothing is
    /// free until the next poll, "quota" that nothing is for some seconds; others are only counted.
    pub fn report_error(&self, errno: Errno) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        if errno == Errno::NOSPC {
            lock(&self.ledger).observe_full();
        } else if errno == Errno::DQUOT {
            // Free space does not tell of quotas: what we have is what we may have, for a while.
            *lock(&self.quota_until) = Some(surgetank_types::clock::tick() + QUOTA_BELIEVED);
            lock(&self.ledger).observe_quota();
        } else if health::is_sickness(errno) {
            self.fail(errno);
        }
    }

    fn fail(&self, errno: Errno) {
        if lock(&self.health).fail(errno, surgetank_types::clock::tick()) {
            tracing::warn!(tier = &*self.tier_name, path = %self.path.display(), %errno, "device taken out of use; it is tried again");
        }
    }

    pub fn healthy(&self) -> bool {
        self.sickness().is_none()
    }
    /// Why it is out of use.
    pub fn sickness(&self) -> Option<Errno> {
        if !self.is_there() {
            return Some(Errno::NODEV);
        }
        lock(&self.health).errno()
    }

    /// True when the back-off is over: the caller runs [`Self::probe`], on a thread that may hang with the device.
    pub(super) fn wants_probe(&self, now: Instant) -> bool {
        lock(&self.health).begin_probe(now)
    }

    /// Writes, syncs and reads back one page, and puts the device back into use when all of it went well.
    pub(super) fn probe(&self) {
        let outcome = self.write_and_read_back();
        if outcome.is_ok() {
            tracing::info!(tier = &*self.tier_name, path = %self.path.display(), "device is in use again");
        }
        lock(&self.health).probed(outcome, surgetank_types::clock::tick());
    }

    fn write_and_read_back(&self) -> Result<(), Errno> {
        use std::os::unix::fs::FileExt;
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        if self.read_only()? {
            return Err(Errno::ROFS);
        }
        let page = [0xA5_u8; 4096];
        let mut back = [0_u8; 4096];
        let file = self.create_unnamed(0o600).map_err(errno)?;
        match file.write_all_at(&page, 0) {
            // Full is not sick.
            Err(error) if error.raw_os_error().map(Errno::from_raw_os_error).is_some_and(health::is_full) => {
                return Ok(());
            }
            outcome => outcome.map_err(errno)?,
        }
        file.sync_data().map_err(errno)?;
        file.read_exact_at(&mut back, 0).map_err(errno)?;
        if back == page { Ok(()) } else { Err(Errno::IO) }
    }

    fn read_only(&self) -> Result<bool, Errno> {
        Ok(rustix::fs::fstatvfs(self.root())?.f_flag.contains(StatVfsMountFlags::RDONLY))
    }

    /// Asks the file system; `None` (and out of use) when it does not answer well.
    pub(super) fn look(&self) -> Option<Sighting> {
        let used_before_bytes = self.used_bytes();
        let answer = rustix::fs::fstatvfs(self.root()).and_then(|space| Ok((space, rustix::fs::fstat(self.root())?)));
        let (space, root) = match answer {
            Ok(answer) => answer,
            Err(errno) => {
                self.counters.errors.fetch_add(1, Ordering::Relaxed);
                self.fail(errno);
                return None;
            }
        };
        if space.f_flag.contains(StatVfsMountFlags::RDONLY) {
            self.fail(Errno::ROFS);
            return None;
        }
        if root.st_nlink == 0 {
            // Somebody removed our directory (schedulers wipe node-local space): nothing can be made here any more.
            self.fail(Errno::NODEV);
            return None;
        }
        // Without inodes there is no room for a file, however many bytes are free. 0 of 0: it has no such limit.
        let inodes_short = space.f_files > 0 && space.f_favail <= (space.f_files / 64).min(1024);
        // ramfs tells nothing at all: only the memory's own limit counts then.
        let unlimited = space.f_blocks == 0;
        let bytes = |blocks: u64| {
            if unlimited { u64::MAX / 2 } else { blocks.saturating_mul(space.f_frsize) }
        };
        Some(Sighting {
            file_system: root.st_dev,
            total_bytes: if unlimited { 0 } else { bytes(space.f_blocks) },
            available_bytes: if inodes_short { 0 } else { bytes(space.f_bavail) },
            used_before_bytes,
        })
    }

    pub(super) fn measure(&self, now: Instant) {
        let mut quota_until = lock(&self.quota_until);
        if quota_until.is_some_and(|until| until <= now) {
            *quota_until = None;
            lock(&self.ledger).forget_quota();
        }
        drop(quota_until);
        let bytes_in = self.counters.bytes_in.load(Ordering::Relaxed);
        let bytes_out = self.counters.bytes_out.load(Ordering::Relaxed);
        let writers = self.writers.load(Ordering::Relaxed);
        lock(&self.rate).measure(bytes_in, bytes_out, writers, now);
    }

    // ---- ballast

    /// Whether direct writes happen here at all; without them ballast serves nobody.
    pub fn want_ballast(&self, wanted: bool) {
        self.ballast_wanted.store(wanted, Ordering::Relaxed);
        if !wanted {
            self.release_ballast();
        }
    }

    /// Gives the ballast's room to a direct writer in need; false when there was none (left).
    pub fn release_ballast(&self) -> bool {
        let mut carried_bytes = lock(&self.ballast_bytes);
        if *carried_bytes == 0 {
            return false;
        }
        if let Err(errno) = ballast::release(self.scope.dir.as_fd()) {
            drop(carried_bytes);
            self.report_error(errno);
            return false;
        }
        *carried_bytes = 0;
        lock(&self.ledger).set_ballast(0);
        true
    }

    /// Takes ballast on when there is room for it, and throws it off before others go short.
    pub(super) fn keep_ballast(&self) {
        let (wanted_bytes, free_bytes, excess) = {
            let ledger = lock(&self.ledger);
            (ballast::size_bytes(ledger.cap_bytes()), ledger.free_bytes(), ledger.excess_bytes() > 0)
        };
        let wanted = self.ballast_wanted.load(Ordering::Relaxed) && self.healthy() && self.standing == Standing::Used;
        let carried_bytes = *lock(&self.ballast_bytes);
        if excess && carried_bytes > 0 {
            self.release_ballast();
        } else if carried_bytes == 0 && wanted && ballast::affordable(wanted_bytes, free_bytes) {
            let mut carried_bytes = lock(&self.ballast_bytes);
            // Reserved first: between the look above and the allocation somebody else may have taken the room.
            if !self.try_reserve(wanted_bytes) {
                return;
            }
            let outcome = ballast::refill(self.scope.dir.as_fd(), wanted_bytes);
            let mut ledger = lock(&self.ledger);
            if outcome.is_ok() {
                *carried_bytes = wanted_bytes;
                ledger.set_ballast(wanted_bytes);
            }
            ledger.unreserve(wanted_bytes);
            drop(ledger);
            drop(carried_bytes);
            match outcome {
                Ok(()) => {}
                // It cannot allocate ahead, or a quota forbids it: this device does without.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOSPC | Errno::DQUOT) => {
                    self.ballast_wanted.store(false, Ordering::Relaxed);
                }
                Err(errno) => self.report_error(errno),
            }
        }
    }

    /// At the clean end: ballast and empty directories go, and the scope itself when nothing is left in it.
    pub fn sweep(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        self.want_ballast(false);
        // Also one that an earlier agent left behind.
        ballast::release(self.scope.dir.as_fd())?;
        Tree::new(self.root()).remove_empty_dirs()?;
        self.scope.remove_when_empty()?;
        Ok(())
    }

    /// The ballast of an agent that was killed is nobody's: its room is given back before anything is counted.
    pub(super) fn drop_old_ballast(&self) {
        if let Err(errno) = ballast::release(self.scope.dir.as_fd()) {
            self.report_error(errno);
        }
    }

    fn probe_leases(&self) -> bool {
        let Ok(file) = self.create_unnamed(0o600) else {
            return false;
        };
        let set = |kind: libc::c_int| {
            // SAFETY: F_SETLEASE takes an int and touches no memory of ours; the descriptor is open.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
        };
        // A write lease is the stricter of the two: it is refused while anybody else has the file open.
        set(libc::F_WRLCK) && set(libc::F_UNLCK)
    }
}
