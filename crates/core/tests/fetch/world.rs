//! A namespace over a store that gives bytes only by ranges (or over a directory), and the operations that these tests need.
#![allow(dead_code, reason = "each test file is compiled with its own copy and uses a part of it")]

use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use surgetank_core::catalog::LogCatalog;
use surgetank_core::drain::Drain;
use surgetank_core::handoff::Handoff;
use surgetank_core::namespace::{Door, Namespace, Opened, Survival};
use surgetank_policy::config::{Config, KeepAtExit, Survives, TierConfig, Way};
use surgetank_store::posix::PosixStore;
use surgetank_store::source::RANGE_BYTES;
use surgetank_store::{Store, Verify};
use surgetank_testkit::stores::ranges_only::{Line, RangesOnly};
use surgetank_tier::Tiers;
use surgetank_types::error::Errno;
use surgetank_types::model::{Caller, FileId, FsyncTarget};

pub const MIB: u64 = 1 << 20;
pub const CHUNK: u64 = RANGE_BYTES;
/// Longer than any wait here takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The kinds of the store and the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The store is a directory.
    pub plain: bool,
    /// The kernel accepts every offered plain file.
    pub direct: bool,
}

struct Kernel {
    backed: AtomicU32,
    direct: bool,
}

impl Door for Kernel {
    fn passes_through(&self) -> bool {
        self.direct
    }
    fn back(&self, _file: BorrowedFd<'_>) -> std::io::Result<u32> {
        Ok(self.backed.fetch_add(1, Ordering::Relaxed) + 1)
    }
    fn unback(&self, _backing: u32) {}
    fn invalidate(&self, _file: FileId, _attributes_only: bool) -> bool {
        true
    }
    fn invalidate_name(&self, _dir: FileId, _name: &[u8]) {}
    fn await_closes(&self) {}
}

pub struct World {
    base: tempfile::TempDir,
    pub namespace: Arc<Namespace>,
    pub line: Arc<Line>,
    pub caller: Caller,
    drain: Option<Arc<Drain>>,
    handoff: Arc<Handoff>,
    kind: Kind,
}

impl World {
    pub fn new(cap_bytes: u64) -> Self {
        Self::with(cap_bytes, |_| {})
    }

    pub fn with(cap_bytes: u64, change: impl FnOnce(&mut Config)) -> Self {
        Self::of(Kind { plain: false, direct: true }, cap_bytes, change)
    }

    pub fn of(kind: Kind, cap_bytes: u64, change: impl FnOnce(&mut Config)) -> Self {
        let base = tempfile::tempdir().unwrap();
        for dir in ["store", "fast", "state"] {
            std::fs::create_dir(base.path().join(dir)).unwrap();
        }
        let at = |name: &str| base.path().join(name);
        let mut config = Config {
            pool: None,
            over: at("store"),
            store: at("store"),
            tiers: vec![TierConfig {
                name: "fast".into(),
                paths: vec![at("fast")],
                cap_bytes: Some(cap_bytes),
                survives: Some(Survives::Agent),
            }],
            rules: Vec::new(),
            state: at("state"),
            ordered: true,
            pool_ordered: false,
            replicas: 1,
            replicas_at: Default::default(),
            verify: Verify::Cache,
            fsync: Some(FsyncTarget::Tier),
            // The drain writes no file in place, however large the file is.
            copy_up_bytes_max: 0,
            dirty_bytes_max: u64::MAX,
            drain_threads: 2,
            drain_bytes_per_second_max: 0,
            store_ttl: Duration::ZERO,
            quiet: Duration::ZERO,
            deadline: None,
            job: None,
            sync_after: Duration::from_millis(20),
            retry: Duration::from_secs(1),
            wait_for_room: Duration::ZERO,
            grace: Duration::ZERO,
            keep_at_exit: KeepAtExit::Leave,
            direct: true,
            door: Way::Fuse,
            preload: false,
            preload_skip: Vec::new(),
            group_socket: None,
            metrics: None,
            metrics_token_file: surgetank_policy::config::TokenFile::Own,
            again: Vec::new(),
        };
        change(&mut config);
        Self::begin(kind, base, config, Arc::new(Handoff::new().unwrap()), false)
    }

    /// Kills the agent, and starts another one.
    pub fn die(mut self) -> Self {
        self.stop_drain();
        let (kind, config, handoff) = (self.kind, self.namespace.base.config.as_ref().clone(), self.handoff.clone());
        let base = std::mem::replace(&mut self.base, tempfile::tempdir().unwrap());
        let old = Arc::downgrade(&self.namespace);
        drop(self);
        assert!(old.upgrade().is_none(), "a thread still holds the namespace of the dead agent");
        Self::begin(kind, base, config, handoff, true)
    }

    fn begin(kind: Kind, base: tempfile::TempDir, config: Config, handoff: Arc<Handoff>, again: bool) -> Self {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
        let root = rustix::fs::open(&config.store, flags, rustix::fs::Mode::empty()).unwrap();
        let directory = PosixStore::new(root, "s3://test".into()).unwrap();
        let (store, line): (Arc<dyn Store>, _) = if kind.plain {
            (Arc::new(directory), Arc::default())
        } else {
            let wrapped = RangesOnly::new(directory);
            let line = wrapped.line.clone();
            (Arc::new(wrapped), line)
        };
        let tiers = Arc::new(Tiers::open(&config.tiers, "fetch").unwrap());
        let catalog = LogCatalog::open(&config.state.join("catalog")).unwrap();
        let survival = Survival { handoff: Some(handoff.clone()), again, ..Survival::default() };
        let catalog = Arc::new(catalog);
        let namespace = Namespace::open_after(config, store, tiers, catalog, "fetch".into(), false, survival).unwrap();
        namespace.set_door(Arc::new(Kernel { backed: AtomicU32::new(0), direct: kind.direct }));
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let caller = Caller { uid, gid, pid: std::process::id(), umask: 0 };
        Self { base, namespace, line, caller, drain: None, handoff, kind }
    }

    pub fn in_store(&self, name: &str) -> PathBuf {
        self.base.path().join("store").join(name)
    }

    /// Another client puts a file into the store.
    pub fn put(&self, name: &str, bytes: &[u8]) {
        let beside = self.in_store(".others");
        std::fs::write(&beside, bytes).unwrap();
        std::fs::rename(&beside, self.in_store(name)).unwrap();
    }

    /// Another client puts a huge file of zeros, except for a few bytes.
    pub fn put_sparse(&self, name: &str, size_bytes: u64, at: u64, bytes: &[u8]) {
        let file = std::fs::File::create(self.in_store(name)).unwrap();
        file.set_len(size_bytes).unwrap();
        file.write_all_at(bytes, at).unwrap();
    }

    pub fn find(&self, name: &str) -> Result<FileId, Errno> {
        self.namespace
            .resolver
            .lookup(&self.caller, FileId::ROOT, name.as_bytes())
            .map(|found| found.id)
            .map_err(|f| f.errno)
    }

    pub fn open(&self, name: &str, flags: i32) -> Result<Opened, Errno> {
        let id = self.find(name)?;
        self.namespace.files.opener.open_file(&self.caller, id, flags).map_err(|fault| fault.errno)
    }

    pub fn create(&self, name: &str) -> Result<Opened, Errno> {
        let made = self.namespace.names.create(&self.caller, FileId::ROOT, name.as_bytes(), 0o644, libc::O_RDWR);
        made.map(|(_, opened)| opened).map_err(|fault| fault.errno)
    }

    pub fn read(&self, opened: &Opened, offset: u64, length: u64) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; length as usize];
        let count =
            self.namespace.files.transfers.read(opened.handle, offset, &mut bytes).map_err(|fault| fault.errno)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    pub fn write(&self, opened: &Opened, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        self.namespace.files.transfers.write(opened.handle, offset, bytes, false).map_err(|fault| fault.errno)
    }

    /// Reads from the beginning to the end, as a sequential program does.
    pub fn read_on(&self, opened: &Opened, step: u64) -> Result<Vec<u8>, Errno> {
        let mut all = Vec::new();
        loop {
            let more = self.read(opened, all.len() as u64, step)?;
            if more.is_empty() {
                return Ok(all);
            }
            all.extend(more);
        }
    }

    pub fn close(&self, opened: Opened) {
        self.namespace.files.opener.release(opened.handle);
    }

    pub fn used_bytes(&self) -> u64 {
        self.namespace.base.tiers.devices().map(surgetank_tier::Device::used_bytes).sum()
    }

    /// Bytes of the plain files on the tiers, with and without a name.
    pub fn on_tiers(&self) -> u64 {
        let mut blocks = 0;
        for device in self.namespace.base.tiers.devices() {
            device.walk(&mut |_: &[u8], plain| blocks += plain.blocks_bytes).unwrap();
        }
        blocks
    }

    /// The charged bytes are on the tier. (A file may take one more block when the file system allocates it on the disk.)
    pub fn is_charged(&self) {
        let (used, there) = (self.used_bytes(), self.on_tiers());
        assert!(used.abs_diff(there) <= 64 << 10, "{used} bytes charged, {there} on the tiers");
    }

    pub fn start_drain(&mut self) {
        self.drain = Some(Drain::start(&self.namespace).unwrap());
    }

    pub fn settle(&mut self) {
        if self.drain.is_none() {
            self.start_drain();
        }
        let until = Instant::now() + TIMEOUT;
        while self.namespace.questions.busy(None) {
            assert!(Instant::now() < until, "the drain hangs: {:?}", self.namespace.questions.stuck());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop_drain();
    }
}

impl World {
    pub fn stop_drain(&mut self) {
        if let Some(drain) = self.drain.take() {
            drain.stop();
        }
    }
}

/// Bytes that identify their own offset.
pub fn pattern(size_bytes: u64, salt: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_bytes as usize + 8);
    let mut at = 0_u64;
    while (bytes.len() as u64) < size_bytes {
        bytes.extend_from_slice(&(at ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        at += 1;
    }
    bytes.truncate(size_bytes as usize);
    bytes
}
