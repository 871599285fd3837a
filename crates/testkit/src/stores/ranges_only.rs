//! A store without plain files, for tests of everything that must not rely on a descriptor. It wraps another store, whose files
//! can only be read by ranges, as an object store's.
//!
//! It counts requests, fails and delays on demand, and gives a version of a file only while the store has it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use surgetank_store::source::identity_of;
use surgetank_store::{
    Cred, Expect, Features, Gate, Meta, Remote, Source, Space, Staged, Store, StoreEntry, StorePath, StoreStat, Verify,
};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Condvar, Mutex, PoisonError};

/// The requests for ranges: their counts, and the fate of the next ones.
#[derive(Debug, Default)]
pub struct Line {
    sources: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
    at_once: AtomicU64,
    at_once_max: AtomicU64,
    /// How many of the next requests fail, and with which errno.
    failing: Mutex<Option<(u64, Errno)>>,
    delay: Mutex<Duration>,
    questions: AtomicU64,
    held: Mutex<Option<Held>>,
    release: Condvar,
}

/// Questions about names that are not answered until [`Line::answer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Every question.
    All,
    /// Listings only.
    Listings,
}

impl Line {
    /// Number of files that a program began to read.
    pub fn sources(&self) -> u64 {
        self.sources.load(Ordering::SeqCst)
    }
    /// Number of requests for ranges, failed ones included.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }
    /// Bytes of the ranges that were served.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }
    /// The most ranges that were requested at the same time.
    pub fn at_once_max(&self) -> u64 {
        self.at_once_max.load(Ordering::SeqCst)
    }
    /// Sets the counts of sources and ranges to zero.
    pub fn forget(&self) {
        for count in [&self.sources, &self.requests, &self.bytes, &self.at_once_max] {
            count.store(0, Ordering::SeqCst);
        }
    }
    /// Makes the next requests for ranges fail: how many, and with which errno.
    pub fn fail(&self, times: u64, errno: Errno) {
        *self.failing.lock().unwrap_or_else(PoisonError::into_inner) = Some((times, errno));
    }
    /// Delays every request for a range by this time.
    pub fn delay(&self, delay: Duration) {
        *self.delay.lock().unwrap_or_else(PoisonError::into_inner) = delay;
    }

    /// Number of questions about names, unanswered ones included.
    pub fn questions(&self) -> u64 {
        self.questions.load(Ordering::SeqCst)
    }
    /// Stops answering these questions; their callers block.
    pub fn hold(&self, held: Held) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
    }
    /// Answers all questions again.
    pub fn answer(&self) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.release.notify_all();
    }

    fn asked(&self, lists: bool) {
        self.questions.fetch_add(1, Ordering::SeqCst);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while held.is_some_and(|held| lists || held == Held::All) {
            held = self.release.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn begin(&self, bytes: u64) -> io::Result<()> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let delay = *self.delay.lock().unwrap_or_else(PoisonError::into_inner);
        if !delay.is_zero() {
            surgetank_types::sync::thread::sleep(delay);
        }
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((left, errno)) = failing.as_mut().filter(|(left, _)| *left > 0) {
            *left -= 1;
            return Err((*errno).into());
        }
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    }
}

/// A store like `S`, whose files can only be read by ranges.
pub struct RangesOnly<S> {
    inner: Arc<S>,
    /// Its requests for ranges.
    pub line: Arc<Line>,
}

impl<S: Store> RangesOnly<S> {
    /// Wraps `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner: Arc::new(inner), line: Arc::default() }
    }
}

/// One version, read through a descriptor that is opened again for every range.
struct Range<S> {
    inner: Arc<S>,
    line: Arc<Line>,
    who: Cred,
    path: StorePath,
    identity: StoreIdentity,
}

impl<S: Store> Range<S> {
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.line.begin(buffer.len() as u64)?;
        let file = self.inner.open(self.who, &self.path, false).map_err(|why| match why.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Errno::STALE.into(),
            _ => why,
        })?;
        let same = || if identity_of(&file)? == self.identity { Ok(()) } else { Err(io::Error::from(Errno::STALE)) };
        same()?;
        file.read_exact_at(buffer, offset)?;
        same()
    }
}

impl<S: Store> Remote for Range<S> {
    fn identity(&self) -> StoreIdentity {
        self.identity
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let at_once = self.line.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        self.line.at_once_max.fetch_max(at_once, Ordering::SeqCst);
        let read = self.read(buffer, offset);
        self.line.at_once.fetch_sub(1, Ordering::SeqCst);
        read
    }
}

fn not_supported<T>() -> io::Result<T> {
    Err(Errno::OPNOTSUPP.into())
}

impl<S: Store + 'static> Store for RangesOnly<S> {
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn features(&self) -> Features {
        Features {
            plain_files: false,
            hard_links: false,
            directories: false,
            atomic_renames: false,
            publications_at_once: 1,
        }
    }
    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        // As where names are UTF-8.
        std::str::from_utf8(&path.0).map(drop).map_err(|_| Errno::ILSEQ.into())
    }
    fn stat(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.line.asked(false);
        self.inner.stat(who, path)
    }
    fn list(&self, who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        self.line.asked(true);
        self.inner.list(who, path, temporaries)
    }
    fn read_link(&self, who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        self.line.asked(false);
        self.inner.read_link(who, path)
    }
    fn xattrs(&self, who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        self.line.asked(false);
        self.inner.xattrs(who, path)
    }
    fn space(&self, path: &StorePath) -> io::Result<Space> {
        self.inner.space(path)
    }
    fn learn_groups(&self, who: Cred, groups: &[u32]) -> bool {
        self.inner.learn_groups(who, groups)
    }
    fn may_write_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.may_write_dir(who, path)
    }
    fn open(&self, _who: Cred, _path: &StorePath, _write: bool) -> io::Result<File> {
        not_supported()
    }
    fn source(&self, who: Cred, path: &StorePath) -> io::Result<Source> {
        self.line.asked(false);
        self.line.sources.fetch_add(1, Ordering::SeqCst);
        let identity = identity_of(&self.inner.open(who, path, false)?)?;
        let (inner, line) = (self.inner.clone(), self.line.clone());
        Ok(Source::Remote(Arc::new(Range { inner, line, who, path: path.clone(), identity })))
    }
    fn create_temporary(&self, _who: Cred, _path: &StorePath, _perm: u32) -> io::Result<File> {
        not_supported()
    }
    fn stage_file(
        &self,
        who: Cred,
        path: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        self.inner.stage_file(who, path, bound, source, meta, gate)
    }
    fn stage_in_place(&self, _who: Cred, _path: &StorePath, _meta: &Meta, _gate: Gate<'_>) -> io::Result<Staged> {
        not_supported()
    }
    fn stage_dir(&self, who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        self.inner.stage_dir(who, path, meta)
    }
    fn stage_symlink(&self, who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        self.inner.stage_symlink(who, path, target, meta)
    }
    fn stage_node(&self, who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        self.inner.stage_node(who, path, kind, device, meta)
    }
    fn settle(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.inner.settle(who, paths)
    }
    fn verify(&self, who: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        self.inner.verify(who, path, staged, how, gate)
    }
    fn discard(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.discard(who, path)
    }
    fn check(&self, who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        self.inner.check(who, path, expect)
    }
    fn writes_over(&self, who: Cred, temporary: &StorePath, path: &StorePath) -> io::Result<bool> {
        self.inner.writes_over(who, temporary, path)
    }
    fn publish(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.inner.publish(who, temporary, path, meta)
    }
    fn replace(&self, who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.inner.replace(who, temporary, path, meta)
    }
    fn rename(&self, who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        self.inner.rename(who, from, to)
    }
    fn exchange(&self, _who: Cred, _a: &StorePath, _b: &StorePath) -> io::Result<()> {
        not_supported()
    }
    fn link(&self, _who: Cred, _from: &StorePath, _to: &StorePath) -> io::Result<()> {
        not_supported()
    }
    fn unlink(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.unlink(who, path)
    }
    fn remove_dir(&self, who: Cred, path: &StorePath) -> io::Result<()> {
        self.inner.remove_dir(who, path)
    }
    fn set_meta(&self, who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        self.inner.set_meta(who, path, kind, meta)
    }
    fn sync_dirs(&self, who: Cred, paths: &[StorePath]) -> io::Result<()> {
        self.inner.sync_dirs(who, paths)
    }
    fn leave_notice(&self, name: &[u8]) -> io::Result<()> {
        self.inner.leave_notice(name)
    }
    fn has_notice(&self, name: &[u8]) -> io::Result<bool> {
        self.inner.has_notice(name)
    }
    fn remove_notices(&self, prefix: &[u8]) -> io::Result<()> {
        self.inner.remove_notices(prefix)
    }
}
