//! One device of a tier: a directory on one file system, its ledger, health and counters, and the plain files on it.
//!
//! A device reports what is stored and what is free; it never decides. Every method may be called from any thread.
//!
//! Invariant: the free space is never overstated. A writer first reserves, then writes, then calls `add_used`, and only then
//! `unreserve`. The agent accounts the bytes of direct writers in the same order when it looks at their files; until then they
//! count twice (reserved, and missing from the device).

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

/// Time for which a refusal by quota keeps new files away; then the device is tried again.
const QUOTA_BELIEVED: Duration = Duration::from_secs(10);

/// Events on a device since the agent started.
#[derive(Debug, Default)]
pub struct DeviceCounters {
    /// Number of file versions that were closed here.
    pub files: AtomicU64,
    /// Bytes written to the device by programs, spills, copies from slower tiers and prefetches.
    pub bytes_in: AtomicU64,
    /// Bytes read from the device by the drain and by mediated reads.
    pub bytes_out: AtomicU64,
    /// Number of opens that found the file here.
    pub hits: AtomicU64,
    /// Number of files that spilled to this device.
    pub spills_in: AtomicU64,
    /// Number of files that spilled from this device.
    pub spills_out: AtomicU64,
    /// Number of files that were evicted.
    pub evictions: AtomicU64,
    /// Bytes of the evicted files.
    pub evicted_bytes: AtomicU64,
    /// Number of failed operations.
    pub errors: AtomicU64,
}

/// The file system's answer in a poll.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sighting {
    /// `st_dev`: devices on the same file system share what is available.
    pub file_system: u64,
    pub total_bytes: u64,
    pub available_bytes: u64,
    /// Bytes of Surgetank's own files just before the file system was asked.
    pub used_before_bytes: u64,
}

/// How a device is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The configuration names it, and placement may choose it.
    Used,
    /// The configuration does not name it any more: it is read and emptied, and gets nothing new.
    Drained,
    /// It cannot be reached; its files are waited for.
    Absent,
    /// It cannot return: it was memory, and the machine restarted or the directory was removed.
    Lost,
}

/// A device of a tier.
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
    /// Held while the ballast's file and its ledger entry change together.
    ballast_bytes: Mutex<u64>,
    ballast_wanted: AtomicBool,
    /// Time until which a refusal by quota counts.
    quota_until: Mutex<Option<Instant>>,
    writers: AtomicU32,
    counters: DeviceCounters,
    astray: names::Astray,
}

/// The parts of a device.
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
    // No thread panics while it holds one of these locks; if one did, the numbers would still be consistent.
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

    /// The id of the device in this process.
    pub fn id(&self) -> DeviceId {
        self.id
    }
    /// How the device is used.
    pub fn standing(&self) -> Standing {
        self.standing
    }
    /// Whether the device can be read.
    pub fn is_there(&self) -> bool {
        matches!(self.standing, Standing::Used | Standing::Drained)
    }
    /// The token that identifies the device's directory, whatever its path.
    pub fn token(&self) -> &str {
        &self.scope.token
    }
    /// The name of the device's tier, from the configuration.
    pub fn tier_name(&self) -> &str {
        &self.tier_name
    }
    /// The directory that contains the plain files, each under its own relative path.
    pub fn files_path(&self) -> &Path {
        &self.scope.files_path
    }
    /// A path below it, for messages and reports.
    pub fn shown(&self, path: &[u8]) -> Vec<u8> {
        use std::os::unix::ffi::OsStrExt;
        self.files_path().join(std::ffi::OsStr::from_bytes(path)).into_os_string().into_encoded_bytes()
    }
    /// The directory from the configuration.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What the device's files survive.
    pub fn survives(&self) -> Survives {
        self.survives
    }
    /// Whether its files count as memory of the job.
    pub fn in_memory(&self) -> bool {
        self.in_memory
    }
    /// The directory of the plain files, as a handle.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.scope.files.as_fd()
    }
    /// Whether `F_SETLEASE` works on this device.
    pub fn leases(&self) -> bool {
        self.leases
    }
    /// Events since the agent started.
    pub fn counters(&self) -> &DeviceCounters {
        &self.counters
    }

    // ---- space

    /// Adds bytes to the use of Surgetank's files; negative when they are freed.
    pub fn add_used(&self, bytes: i64) {
        lock(&self.ledger).add_used(bytes);
    }
    /// Bytes that Surgetank's files use.
    pub fn used_bytes(&self) -> u64 {
        lock(&self.ledger).used_bytes()
    }
    /// Reserves bytes. Returns false, and reserves nothing, if they are not free.
    pub fn try_reserve(&self, bytes: u64) -> bool {
        lock(&self.ledger).try_reserve(bytes)
    }
    /// Gives reserved bytes back.
    pub fn unreserve(&self, bytes: u64) {
        lock(&self.ledger).unreserve(bytes);
    }
    /// Bytes that can be reserved now.
    pub fn free_bytes(&self) -> u64 {
        lock(&self.ledger).free_bytes()
    }
    /// Bytes to evict so that the cap holds and other users of the device get their space.
    pub fn excess_bytes(&self) -> u64 {
        lock(&self.ledger).excess_bytes()
    }
    /// Bytes that the memory needs at once; the rest of the excess can wait.
    pub fn deficit_bytes(&self) -> u64 {
        lock(&self.ledger).deficit_bytes()
    }
    /// Counts a direct descriptor for writing that a program received.
    pub fn writer_opened(&self) {
        self.writers.fetch_add(1, Ordering::Relaxed);
    }
    /// Counts the end of a direct descriptor for writing.
    pub fn writer_closed(&self) {
        let before = self.writers.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "more writers closed than opened");
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }

    /// A snapshot for placement.
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

    /// Reports a failed operation on the device. Errors of the device take it out of use. After "full" nothing is free until
    /// the next poll, after "quota" for some seconds. Other errors are only counted.
    pub fn report_error(&self, errno: Errno) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        if errno == Errno::NOSPC {
            lock(&self.ledger).observe_full();
        } else if errno == Errno::DQUOT {
            // The file system's free space ignores quotas: the present use is the limit for a while.
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

    /// Whether the device is in use.
    pub fn healthy(&self) -> bool {
        self.sickness().is_none()
    }
    /// The error that took the device out of use.
    pub fn sickness(&self) -> Option<Errno> {
        if !self.is_there() {
            return Some(Errno::NODEV);
        }
        lock(&self.health).errno()
    }

    /// True when the back-off ends: the caller runs [`Self::probe`], on a thread that may block with the device.
    pub(super) fn wants_probe(&self, now: Instant) -> bool {
        lock(&self.health).begin_probe(now)
    }

    /// Writes, syncs and reads back one page, and puts the device back into use if all steps succeed.
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
            // A full device is not sick.
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

    /// Asks the file system; `None` (and out of use) if it does not answer well.
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
            // Another process removed the agent's directory (schedulers wipe node-local space): nothing can be made here any
            // more.
            self.fail(Errno::NODEV);
            return None;
        }
        // Without inodes there is no space for a file, however many bytes are free. 0 of 0 means that there is no such limit.
        let inodes_short = space.f_files > 0 && space.f_favail <= (space.f_files / 64).min(1024);
        // ramfs reports no sizes: only the memory's own limit counts then.
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

    /// Sets whether programs write directly to this device; only direct writers need ballast.
    pub fn want_ballast(&self, wanted: bool) {
        self.ballast_wanted.store(wanted, Ordering::Relaxed);
        if !wanted {
            self.release_ballast();
        }
    }

    /// Gives the ballast's space to a direct writer; false if there is none (left).
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

    /// Allocates ballast when there is space for it, and frees it before files need the space.
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
            // Reserved first: another thread may take the space between the check above and the allocation.
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
                // The file system cannot preallocate, or a quota forbids it: this device has no ballast.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOSPC | Errno::DQUOT) => {
                    self.ballast_wanted.store(false, Ordering::Relaxed);
                }
                Err(errno) => self.report_error(errno),
            }
        }
    }

    /// At the clean end: removes ballast and empty directories, and the scope itself if it is empty.
    ///
    /// Errors: those of the file system; what is left is harmless.
    pub fn sweep(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        self.want_ballast(false);
        // Also the ballast of an earlier agent.
        ballast::release(self.scope.dir.as_fd())?;
        Tree::new(self.root()).remove_empty_dirs()?;
        self.scope.remove_when_empty()?;
        Ok(())
    }

    /// Removes the ballast of a killed agent, before anything is counted.
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
        // A write lease is the stricter of the two: the kernel refuses it while another process has the file open.
        set(libc::F_WRLCK) && set(libc::F_UNLCK)
    }
}
