//! The catalog of one node: the writer in front, the snapshot behind it, and a thread that folds the log into the
//! snapshot.
//!
//! Locks, in their order: `folding` → `syncing` → the writer's pen. Commits take the pen only, so they wait neither for
//! a fold nor for a sync.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::thread::JoinHandle;
use surgetank_types::sync::{Arc, Condvar, Mutex, PoisonError};

use super::damage;
use super::digest::Digest;
use super::directory::{self, Recovery};
use super::segment::{HEADER_BYTES, Segment};
use super::snapshot::Snapshot;
use super::writer::{Writer, hold};
use super::{Catalog, Loaded, Lsn};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Change, Image};

/// Closed segments that loading lays over the snapshot rather than folding them first.
const CLOSED_SEGMENTS_LOADED_MAX: usize = 1;

/// Sizes of the catalog's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// A segment of the log is closed and folded when it has grown to this.
    pub segment_bytes_max: u64,
    /// Memory for redb while it folds or loads; none in between.
    pub snapshot_cache_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { segment_bytes_max: segment_bytes_max(), snapshot_cache_bytes: 4 << 20 }
    }
}

const SEGMENT_BYTES_MAX: u64 = 16 << 20;

/// Debug builds fold as often as `SURGETANK_SEGMENT_BYTES` says: the crash campaign's writers would never reach the
/// default.
fn segment_bytes_max() -> u64 {
    #[cfg(debug_assertions)]
    if let Some(bytes) = std::env::var("SURGETANK_SEGMENT_BYTES").ok().and_then(|text| text.parse().ok()) {
        return bytes;
    }
    SEGMENT_BYTES_MAX
}

/// A write-ahead log with group commit, folded into a redb snapshot in the background.
pub struct LogCatalog {
    shared: Arc<Shared>,
    folder: Option<JoinHandle<()>>,
    recovery: Recovery,
    _lock: File,
}

struct Shared {
    dir: PathBuf,
    writer: Writer,
    snapshot: Snapshot,
    folding: Mutex<Folding>,
    syncing: Mutex<Syncing>,
    synced: Condvar,
    /// Parents of directories that the catalog made; their new entries are not on the media yet.
    parents: Mutex<Vec<PathBuf>>,
    /// Everything up to here survives the machine.
    durable: AtomicU64,
    wish: Mutex<Wish>,
    wished: Condvar,
    #[cfg(test)]
    syncs_to_fail: AtomicU64,
}

struct Folding {
    /// A snapshot exists and counts.
    snapshot: bool,
    /// Up to here the snapshot holds the log.
    upto: Lsn,
}

#[derive(Default)]
struct Syncing {
    /// A sync failed when this was the last position. The kernel may have dropped what it could not write, so a later
    /// sync of the log proves nothing until the snapshot holds it all.
    distrust: Option<Lsn>,
    /// A thread syncs at the moment.
    running: bool,
}

#[derive(Default)]
struct Wish {
    fold: bool,
    stop: bool,
}

impl LogCatalog {
    /// Opens the catalog in `dir`, which is created when absent, and repairs what a death left (see [`Recovery`]). A
    /// second opener gets an error that names the process that holds it.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::open_with(dir, Options::default())
    }

    /// The same as [`Self::open`], with options.
    pub fn open_with(dir: &Path, options: Options) -> Result<Self> {
        let parents = directory::create(dir)?;
        let lock = directory::lock(dir)?;
        let snapshot = Snapshot::new(dir, options.snapshot_cache_bytes);
        let mut found = directory::recover(dir, &snapshot)?;
        let current = found.segments.pop().ok_or_else(|| Error::new("The catalog has no log"))?;
        // A closed segment ends where the next one begins.
        let begins: Vec<Lsn> = found.segments.iter().skip(1).chain([&current]).map(|segment| segment.after()).collect();
        let closed = found.segments.into_iter().zip(begins).collect();
        let writer = Writer::new(dir.to_owned(), options.segment_bytes_max, closed, current, found.end, found.last);
        let shared = Arc::new(Shared {
            dir: dir.to_owned(),
            writer,
            snapshot,
            folding: Mutex::new(Folding { snapshot: found.folded.is_some(), upto: found.folded.unwrap_or_default() }),
            syncing: Mutex::new(Syncing::default()),
            synced: Condvar::new(),
            parents: Mutex::new(parents),
            durable: AtomicU64::new(found.folded.unwrap_or_default().0),
            wish: Mutex::new(Wish::default()),
            wished: Condvar::new(),
            #[cfg(test)]
            syncs_to_fail: AtomicU64::new(0),
        });
        let thread = surgetank_types::sync::thread::Builder::new().name("catalog-fold".to_owned());
        let folder = thread.spawn({
            let shared = Arc::clone(&shared);
            move || shared.fold_when_wished()
        });
        let folder = folder.map_err(|error| Error::new("The catalog's thread cannot be started").why(error))?;
        Ok(Self { shared, folder: Some(folder), recovery: found.recovery, _lock: lock })
    }

    /// Reads the catalog and changes not one byte. An error while another process uses the catalog.
    pub fn look(dir: &Path) -> Result<(Image, Recovery)> {
        let mut image = Image::default();
        if !dir.exists() {
            return Ok((image, Recovery::default()));
        }
        let _lock = directory::lock_to_look(dir)?;
        let snapshot = Snapshot::new(dir, Options::default().snapshot_cache_bytes);
        let below = snapshot.exists().then(|| snapshot.look()).transpose()?;
        let folded = below.as_ref().map(|below| snapshot.folded_in(below)).transpose()?;
        let survey = directory::survey(dir, folded, false)?;
        let recovery = survey.recovery(dir)?;
        let mut digest = Digest::default();
        let count = survey.segments.len();
        for (index, segment) in survey.segments.into_iter().map(Arc::new).enumerate() {
            let end = (index + 1 == count).then_some(survey.end);
            digest.add(&segment, end, survey.folded.unwrap_or_default())?;
        }
        let below = below.as_ref().filter(|_| survey.folded.is_some());
        snapshot.for_each_in(below, &digest, &mut |loaded| loaded.put_into(&mut image))?;
        Ok((image, recovery))
    }

    /// What the last death cost.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Forgets everything, atomically and durably: after a death during this the catalog is either as before or empty.
    /// Marks are cleared too; positions continue to grow. Commits wait; one that returns after this is remembered.
    /// An error may say that the new log's name may not be on the media, or that a file could not be deleted. The
    /// catalog is empty nevertheless.
    pub fn clear(&self) -> io::Result<()> {
        self.shared.clear()
    }
}

impl Catalog for LogCatalog {
    fn clear(&self) -> io::Result<()> {
        // Calls the inherent method.
        Self::clear(self)
    }

    fn commit(&self, changes: &[Change]) -> io::Result<Lsn> {
        if changes.is_empty() {
            return Ok(self.position());
        }
        let committed = self.shared.writer.commit(changes)?;
        if committed.rolled {
            self.shared.wish_fold();
        }
        Ok(committed.lsn)
    }

    fn sync(&self, upto: Lsn) -> io::Result<()> {
        self.shared.sync(upto)
    }

    fn position(&self) -> Lsn {
        self.shared.writer.written()
    }

    fn load(&self) -> Result<Image> {
        let mut image = Image::default();
        self.load_into(&mut |loaded| loaded.put_into(&mut image))?;
        Ok(image)
    }

    fn recovery(&self) -> Recovery {
        self.recovery.clone()
    }

    fn damage_reported(&self) -> io::Result<()> {
        damage::mark_reported(&self.shared.dir)
    }

    fn load_into(&self, take: &mut dyn FnMut(Loaded)) -> Result<()> {
        self.shared.load_into(take)
    }
}

impl Drop for LogCatalog {
    /// Lets a fold that has begun finish, and leaves everything on the media.
    fn drop(&mut self) {
        hold(&self.shared.wish).stop = true;
        self.shared.wished.notify_all();
        if let Some(folder) = self.folder.take() {
            // The panic hook has reported a panic in the thread; the log has everything.
            let _ = folder.join();
        }
        if let Err(error) = self.shared.sync(self.position()) {
            tracing::warn!(%error, dir = %self.shared.dir.display(), "the catalog could not be synced at its end");
        }
    }
}

impl Shared {
    fn durable(&self) -> Lsn {
        Lsn(self.durable.load(Ordering::Acquire))
    }

    fn sync(&self, upto: Lsn) -> io::Result<()> {
        if self.durable() >= upto {
            return Ok(());
        }
        if upto > self.writer.written() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a sync of something that was never committed"));
        }
        // One caller syncs for all that committed before it began; the others wait and return with it.
        let mut syncing = hold(&self.syncing);
        while syncing.running && self.durable() < upto {
            syncing = self.synced.wait(syncing).unwrap_or_else(PoisonError::into_inner);
        }
        if self.durable() >= upto {
            return Ok(());
        }
        if let Some(position) = syncing.distrust {
            if self.durable() < position {
                self.save_elsewhere(position);
                return Err(io::Error::other(
                    "an earlier sync of the catalog's log failed; its content is being saved elsewhere",
                ));
            }
            syncing.distrust = None;
        }
        syncing.running = true;
        drop(syncing);
        let settled = self.settle();
        let mut syncing = hold(&self.syncing);
        syncing.running = false;
        if settled.is_err() {
            let position = self.writer.written();
            syncing.distrust = Some(position);
            self.save_elsewhere(position);
        }
        drop(syncing);
        self.synced.notify_all();
        settled
    }

    /// Brings all written bytes to the media, the oldest segment first.
    fn settle(&self) -> io::Result<()> {
        crash_point!("catalog.sync");
        let (closed, current, written) = {
            let pen = self.writer.pen();
            (pen.closed.clone(), Arc::clone(&pen.current), pen.written)
        };
        let unsettled = |segment: &&Segment| !segment.settled.load(Ordering::Acquire);
        for segment in closed.iter().map(|(segment, _)| &**segment).filter(unsettled) {
            self.sync_data(segment)?;
            segment.mark();
        }
        self.sync_data(&current)?;
        self.sync_names(&current)?;
        self.durable.fetch_max(written.0, Ordering::AcqRel);
        Ok(())
    }

    /// Brings the name of `current`, and with it those of all earlier segments, to the media.
    fn sync_names(&self, current: &Segment) -> io::Result<()> {
        if !current.named.load(Ordering::Acquire) {
            File::open(&self.dir)?.sync_all()?;
            current.named.store(true, Ordering::Release);
        }
        let mut parents = hold(&self.parents);
        while let Some(parent) = parents.last() {
            File::open(parent)?.sync_all()?;
            parents.pop();
        }
        Ok(())
    }

    fn sync_data(&self, segment: &Segment) -> io::Result<()> {
        #[cfg(test)]
        if self.syncs_to_fail.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        segment.file.sync_data()
    }

    /// Folds everything up to `position`, because the log cannot be synced.
    fn save_elsewhere(&self, position: Lsn) {
        let mut pen = self.writer.pen();
        if pen.current.after() < position {
            self.writer.roll(&mut pen);
        }
        drop(pen);
        self.wish_fold();
    }

    fn wish_fold(&self) {
        hold(&self.wish).fold = true;
        self.wished.notify_all();
    }

    fn fold_when_wished(&self) {
        loop {
            let mut wish = hold(&self.wish);
            while !wish.fold && !wish.stop {
                wish = self.wished.wait(wish).unwrap_or_else(PoisonError::into_inner);
            }
            if wish.stop {
                return;
            }
            wish.fold = false;
            drop(wish);
            if let Err(error) = self.fold() {
                // Nothing is lost; the log only grows, and the next closed segment tries again.
                tracing::warn!(%error, "the catalog's log could not be folded into its snapshot");
            }
            // A segment in memory and the pages of the snapshot, which the next fold needs again, but maybe hours later.
            surgetank_types::heap::give_back();
        }
    }

    /// Folds all closed segments into the snapshot and deletes them, one at a time to keep the memory small.
    fn fold(&self) -> Result<()> {
        while self.fold_oldest(&mut hold(&self.folding))? {}
        Ok(())
    }

    fn fold_oldest(&self, folding: &mut Folding) -> Result<bool> {
        let Some((segment, last)) = self.writer.pen().closed.first().cloned() else {
            return Ok(false);
        };
        crash_point!("catalog.fold");
        self.fold_segment(folding, &segment, last)?;
        crash_point!("catalog.folded");
        self.durable.fetch_max(last.0, Ordering::AcqRel);
        self.writer.pen().closed.remove(0);
        if let Err(error) = std::fs::remove_file(&segment.path) {
            tracing::warn!(%error, path = %segment.path.display(), "a folded segment of the catalog's log stays until the next start");
        }
        Ok(true)
    }

    /// The durable half of a fold; a death after it costs nothing.
    fn fold_segment(&self, folding: &mut Folding, segment: &Arc<Segment>, last: Lsn) -> Result<()> {
        let mut digest = Digest::default();
        digest.add(segment, None, folding.upto)?;
        // (A segment that exists again ends before that.)
        let upto = last.max(folding.upto);
        self.snapshot.fold(&digest, upto, !folding.snapshot)?;
        (folding.snapshot, folding.upto) = (true, upto);
        Ok(())
    }

    fn load_into(&self, take: &mut dyn FnMut(Loaded)) -> Result<()> {
        let mut folding = hold(&self.folding);
        // Folds what a death left unfolded, unless it is little: a digest of many segments would take much memory.
        while self.writer.pen().closed.len() > CLOSED_SEGMENTS_LOADED_MAX && self.fold_oldest(&mut folding)? {}
        let (closed, current, end) = {
            let pen = self.writer.pen();
            (pen.closed.clone(), Arc::clone(&pen.current), pen.end)
        };
        let mut digest = Digest::default();
        for (segment, _) in &closed {
            digest.add(segment, None, folding.upto)?;
        }
        digest.add(&current, Some(end), folding.upto)?;
        self.snapshot.for_each(&digest, folding.snapshot, take)?;
        drop(folding);
        if !closed.is_empty() {
            self.wish_fold();
        }
        Ok(())
    }

    fn clear(&self) -> io::Result<()> {
        let mut folding = hold(&self.folding);
        let mut syncing = hold(&self.syncing);
        let mut pen = self.writer.pen();
        if pen.end <= HEADER_BYTES && pen.closed.is_empty() && !folding.snapshot {
            return Ok(());
        }
        crash_point!("catalog.clear");
        let void = self.writer.restart(&mut pen)?;
        crash_point!("catalog.restarted");
        // From here on the catalog is empty, whatever happens; recovery would also do the rest.
        let (current, written) = (Arc::clone(&pen.current), pen.written);
        drop(pen);
        (folding.snapshot, folding.upto) = (false, Lsn(0));
        self.sync_names(&current)?;
        syncing.distrust = None;
        self.durable.fetch_max(written.0, Ordering::AcqRel);
        self.snapshot.delete()?;
        crash_point!("catalog.snapshot_deleted");
        for segment in void {
            std::fs::remove_file(&segment.path)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
