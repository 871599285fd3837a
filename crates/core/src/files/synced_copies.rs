//! Synced copies: what an `fsync` of a file on a volatile tier brought to the disk of the agent's state, where that is the store's
//! disk too. Such an `fsync` writes the blocks that changed since the one before, and syncs one file. The drain publishes the file
//! after its close, as without an `fsync`.
//!
//! States of a copy: being made, complete (its checksum is known), changing (each `fsync` writes into it, as a
//! program writes into its file).
//!
//! Invariants: a copy has the blocks that its checksums say, or is not used again. It stays until the store has its version, or
//! until the catalog on the disk has no such file.
//!
//! The danger that this avoids: fsync returns, the machine goes down, and neither the tier nor the store has the bytes.

mod file;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Stat, fstat, fstatvfs};
use surgetank_state::Tree;
use surgetank_store::BlockSums;
use surgetank_types::mapped::Mapped;
use surgetank_types::model::FileId;
use surgetank_types::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{Base, SyncedCopiesAt};
use crate::metadata::Metadata;
pub(crate) use file::{Content, KEPT, Left, kept_in, left_in, sync_directory};
use file::{CopyFile, Name};

/// All blocks of a larger file would have to be read too long for each fsync. (Their checksums take 2 MiB.)
const BYTES_MAX: u64 = 1 << 30;

/// Room that copies leave on the store's disk.
const FREE_BYTES_MIN: u64 = 64 << 20;
/// Smaller files are read.
const MAPPED_BYTES_MIN: usize = 128 << 10;

/// The copies of all files that need one.
pub(crate) struct SyncedCopies {
    at: Option<SyncedCopiesAt>,
    metadata: Arc<Metadata>,
    files: Mutex<HashMap<FileId, Arc<Slot>>>,
    number: AtomicU64,
}

/// The copy of one file.
#[derive(Default)]
struct Slot {
    /// Number of the last sync that has begun.
    begun: AtomicU64,
    /// The last version of which this agent has made a copy.
    version: AtomicU32,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    copy: Option<Copy>,
    /// Number of the last sync that succeeded.
    ended: u64,
    /// Copies that the present one replaces, and copies of an earlier agent.
    before: Vec<Left>,
}

struct Copy {
    name: Name,
    path: PathBuf,
    /// `None`: closed, because no program writes the file.
    file: Option<CopyFile>,
    sums: BlockSums,
    /// No sync has changed it yet.
    is_complete: bool,
    mapped: Option<Mapping>,
}

/// The plain file in memory. It keeps the file's room, so it goes when no sync uses it.
struct Mapping {
    memory: Mapped,
    /// Device and inode number of the plain file.
    file: (u64, u64),
    /// No sync has used it since the last sweep.
    is_idle: bool,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SyncedCopies {
    pub(crate) fn new(base: &Base, metadata: &Arc<Metadata>) -> Self {
        let at = base.synced_copies.clone();
        Self { at, metadata: metadata.clone(), files: Mutex::default(), number: AtomicU64::new(0) }
    }

    /// Where the copies are, also those of an earlier agent.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.at.as_ref().map(|at| &*at.dir)
    }

    /// Does an fsync of a file in memory make a copy? Otherwise it publishes.
    pub(crate) fn are_made(&self) -> bool {
        self.at.as_ref().is_some_and(|at| at.may_make)
    }

    /// Was this version of the file synced to a copy?
    pub(crate) fn has(&self, id: FileId, version: u32) -> bool {
        locked(&self.files).get(&id).is_some_and(|slot| slot.version.load(Ordering::Acquire) >= version)
    }

    /// Copies of an earlier agent, which stay as long as they are needed.
    pub(crate) fn take_over(&self, left: Vec<Left>) {
        let mut files = locked(&self.files);
        for one in left {
            self.number.fetch_max(one.name.number + 1, Ordering::Relaxed);
            let slot = files.entry(one.name.id).or_default();
            locked(&slot.held).before.push(one);
        }
    }

    /// The copies of a file that an earlier agent left, the newest first.
    pub(crate) fn left_of(&self, id: FileId) -> Vec<Left> {
        let slot = locked(&self.files).get(&id).cloned();
        let mut left = slot.map(|slot| locked(&slot.held).before.clone()).unwrap_or_default();
        left.sort_unstable_by_key(|one| Reverse((one.name.version, one.name.number)));
        left
    }

    /// Brings the present content of `source`, version `version` of a file, to its copy. Errors: those of the disk; `Unsupported`
    /// where there are no copies, or not of so large a file. After an error an earlier copy may be between two syncs.
    pub(crate) fn sync(&self, id: FileId, version: u32, source: &File) -> io::Result<()> {
        let at = self.at.as_ref().filter(|at| at.may_make).ok_or(io::ErrorKind::Unsupported)?;
        let size_bytes = source.metadata()?.len();
        if size_bytes > BYTES_MAX {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let slot = locked(&self.files).entry(id).or_default().clone();
        let before = slot.begun.load(Ordering::Acquire);
        let mut held = locked(&slot.held);
        let present = held.copy.take_if(|copy| copy.name.version == version && copy.file.is_some());
        // Another thread began after this call, and has finished.
        if present.is_some() && held.ended > before {
            held.copy = present;
            return Ok(());
        }
        let turn = slot.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let copy = match present {
            Some(mut copy) => {
                if let Err(why) = copy.bring(source) {
                    // Its blocks are not known any more: the next sync makes another copy.
                    held.before.push(Left { name: copy.name, path: copy.path });
                    return Err(why);
                }
                copy
            }
            None => {
                // The file itself needs its room, too, before the copy goes.
                let free = fstatvfs(File::open(&at.dir)?)?;
                if free.f_bavail.saturating_mul(free.f_frsize) < 2 * size_bytes + FREE_BYTES_MIN {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                let name = Name { id, version, number: self.number.fetch_add(1, Ordering::Relaxed) };
                Copy::make(name, at.dir.join(name.text()), source)?
            }
        };
        slot.version.store(version, Ordering::Release);
        held.remove_all();
        (held.copy, held.ended) = (Some(copy), turn);
        Ok(())
    }

    /// Removes the copies that are not needed any more, and closes those that no program changes.
    pub(crate) fn sweep(&self) {
        // (Closed after the locks are released: a file that is gone gives its memory back.)
        let mut closed = Vec::new();
        let goes = self.not_needed(&mut closed);
        drop(closed);
        if goes.is_empty() {
            return;
        }
        // A file that is gone must not come back without its copy.
        if let Err(why) = self.metadata.sync_catalog() {
            tracing::warn!(%why, "synced copies stay: the catalog could not be synced");
            return;
        }
        let mut removed = Vec::new();
        {
            let tree = self.metadata.read_tree();
            let mut files = locked(&self.files);
            for id in goes {
                // (A thread that has the slot needs it.)
                let Some(slot) = files.get(&id).filter(|slot| Arc::strong_count(slot) == 1) else { continue };
                if !locked(&slot.held).versions().any(|version| is_needed(&tree, id, version)) {
                    removed.extend(files.remove(&id));
                }
            }
        }
        removed.iter().for_each(|slot| locked(&slot.held).remove_all());
    }

    /// The files without a version that needs a copy.
    fn not_needed(&self, closed: &mut Vec<(Option<CopyFile>, Option<Mapping>)>) -> Vec<FileId> {
        if locked(&self.files).is_empty() {
            return Vec::new();
        }
        let tree = self.metadata.read_tree();
        let files = locked(&self.files);
        let mut goes = Vec::new();
        for (id, slot) in files.iter() {
            let Ok(mut held) = slot.held.try_lock() else { continue };
            let needed = held.versions().any(|version| is_needed(&tree, *id, version));
            if !needed {
                goes.push(*id);
            }
            if let Some(copy) = &mut held.copy {
                let is_idle = copy.mapped.as_mut().is_some_and(|mapped| std::mem::replace(&mut mapped.is_idle, true));
                let ends = !needed || tree.get(*id).is_some_and(|inode| inode.sealed);
                if ends || is_idle {
                    closed.push((copy.file.take_if(|_| ends), copy.mapped.take()));
                }
            }
        }
        goes
    }

    /// Removes all copies, and their names from the disk: the numbers of files begin again. Nothing is left that only a copy has.
    pub(crate) fn clear(&self) -> io::Result<()> {
        let Some(dir) = self.dir() else { return Ok(()) };
        if self.number.swap(0, Ordering::Relaxed) == 0 {
            return Ok(());
        }
        locked(&self.files).drain().for_each(|(_, slot)| locked(&slot.held).remove_all());
        sync_directory(dir)
    }
}

fn is_needed(tree: &Tree, id: FileId, version: u32) -> bool {
    // (A version that was not written at its close never came to be.)
    tree.get(id).is_some_and(|inode| (inode.durable + 1..=inode.present_version()).contains(&version))
}

impl Held {
    fn versions(&self) -> impl Iterator<Item = u32> {
        self.copy.iter().map(|copy| copy.name.version).chain(self.before.iter().map(|left| left.name.version))
    }

    fn remove_all(&mut self) {
        self.copy.take().iter().for_each(|copy| remove(&copy.path));
        self.before.drain(..).for_each(|left| remove(&left.path));
    }
}

impl Copy {
    /// A new copy, complete and synced.
    fn make(name: Name, path: PathBuf, source: &File) -> io::Result<Self> {
        let mut sums = BlockSums::default();
        let made = CopyFile::create(&path).and_then(|mut file| {
            sums.bring((source, None), file.file(), &|write| write(), &|_| Ok(()))?;
            file.complete(&name, sums.size_bytes(), sums.total())?;
            Ok(file)
        });
        let file = made.inspect_err(|_| remove(&path))?;
        Ok(Self { name, path, file: Some(file), sums, is_complete: true, mapped: None })
    }

    /// Makes the copy equal to `source`.
    fn bring(&mut self, source: &File) -> io::Result<()> {
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        if self.is_complete {
            file.will_change()?;
            self.is_complete = false;
        }
        let mapped = self.mapped.take().map_or_else(|| Mapping::of(source), |mapped| mapped.or_again(source))?;
        let present = (source, mapped.as_ref().map(|mapped| &mapped.memory));
        self.sums.bring(present, file.file(), &|write| write(), &|_| Ok(()))?;
        self.mapped = mapped;
        file.file().sync_data()
    }
}

impl Mapping {
    /// `None`: the file is small or has holes, or cannot be mapped.
    fn of(source: &File) -> io::Result<Option<Self>> {
        let stat = fstat(source)?;
        let bytes = usize::try_from(stat.st_size).unwrap_or(0);
        let is_mapped = bytes >= MAPPED_BYTES_MIN && is_dense(&stat);
        let memory = if is_mapped { Mapped::of(source, bytes).ok() } else { None };
        Ok(memory.map(|memory| Self { memory, file: (stat.st_dev, stat.st_ino), is_idle: false }))
    }

    /// The same mapping, if it still is of this file, and of most of it.
    fn or_again(mut self, source: &File) -> io::Result<Option<Self>> {
        let stat = fstat(source)?;
        let (size_bytes, mapped_bytes) = (usize::try_from(stat.st_size).unwrap_or(0), self.memory.bytes());
        // (What a growing file has behind the mapping is read.)
        let covers = (mapped_bytes..=mapped_bytes + mapped_bytes / 16).contains(&size_bytes);
        if self.file != (stat.st_dev, stat.st_ino) || !covers || !is_dense(&stat) || self.memory.is_cut() {
            drop(self);
            return Self::of(source);
        }
        self.is_idle = false;
        Ok(Some(self))
    }
}

/// A look at a hole in a mapping makes tmpfs fill it.
fn is_dense(stat: &Stat) -> bool {
    stat.st_blocks.saturating_mul(512) >= stat.st_size
}

fn remove(path: &Path) {
    if let Err(why) = std::fs::remove_file(path)
        && why.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%why, path = %path.display(), "a synced copy that is not needed stays");
    }
}
