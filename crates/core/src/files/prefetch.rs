//! Prefetch: it brings files to a tier before their use. The user asks for it (`surgetank prefetch`), or rules do at
//! the agent's start.
//!
//! Steps: copy without any lock, under a hidden name of its own; then adopt the copy, if the file has not changed
//! since. Invariants: processes never wait for a prefetch, and it evicts nothing. Without free room the file stays
//! where it is.
//!
//! Processes that only read the file do not prevent it (a database that all tasks read is hardly ever closed). Mediated
//! readers continue with the copy and do not notice. The kernel reads the store's file itself for direct readers. Then
//! the copy waits until the last of them closes the file (`waiting`).
//!
//! The danger that this avoids: a copy of another version than the one that programs see.

use std::io;

use surgetank_policy::placement::AskKind;
use surgetank_state::Tree;
use surgetank_store::source::identity_of;
use surgetank_store::{Cred, StorePath};
use surgetank_types::error::{Errno, Error, FsResult, Result};
use surgetank_types::model::{Caller, FileId, Mode, StoreIdentity, data_bytes};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::users::own_cred;
use crate::content::{Content, Location, Open, Placed};
use crate::files::fetch_open::Fetches;
use crate::files::{Given, Wish, hidden_name, reopen_read_only};
use crate::report::run::EventKind;

/// The agent's own drain may rename the file or change its attributes during the copy: then it is copied again. A file
/// that another client keeps writing is left alone.
pub(crate) const COPIES_MAX: usize = 2;
/// The limit of looks until the drain has recorded what it did to a file.
const LOOKS_MAX: usize = 50;
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_millis(20);

/// A file that could be prefetched, as it is now.
struct Source {
    path: Vec<u8>,
    store_path: StorePath,
    size_bytes: u64,
    owner: Cred,
    identity: Option<StoreIdentity>,
    perm: u32,
    wish: Wish,
    /// The open file, if processes have it open.
    readers: Option<Arc<Open>>,
}

/// The plain file under its hidden name, with one version of a file.
pub(crate) struct Copied {
    pub(crate) placed: Placed,
    version: StoreIdentity,
    size_bytes: u64,
    pub(crate) charged_bytes: u64,
}

/// The result of a prefetch.
pub(crate) enum Outcome {
    Brought(u64),
    Not,
    /// The copy is useless: the file got another version or another name meanwhile, perhaps from the drain.
    Overtaken,
}

/// The files and bytes that a prefetch brought in.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct BroughtIn {
    /// Number of files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

fn failed(why: &dyn std::fmt::Display) -> Error {
    Error::new("a file could not be prefetched").why(why).data("the store has it, nothing is lost")
}

/// The agent itself is the caller.
pub(crate) fn ourselves() -> Caller {
    Caller { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw(), pid: 0, umask: 0 }
}

/// Do the readers of the store's file read this version of it? (An earlier file may have had the name.)
fn read_this(readers: &Open, version: &StoreIdentity) -> bool {
    identity_of(&readers.content().file).is_ok_and(|theirs| version.is_still(&theirs))
}

impl Fetches {
    pub(crate) fn bring_ahead(&self, id: FileId, stop: &(dyn Fn() -> bool + Sync)) -> Result<Outcome> {
        let Some((source, version, from)) = self.source_of(id)? else {
            return Ok(Outcome::Not);
        };
        // The copy has its own id, and so its own hidden name: the file itself may be placed meanwhile.
        let copy = self.metadata.write_tree().new_id();
        let kind = AskKind::Prefetch { bytes: source.size_bytes };
        let placed =
            match self.placer.place(&source.path, copy, kind, &source.wish, source.perm, crate::files::Via::Mount) {
                Err(fault) if fault.errno == Errno::NOSPC => return Ok(Outcome::Not),
                other => other.map_err(|why| failed(&why))?,
            };
        let Location::Tier(device) = placed.content.location else {
            return Ok(Outcome::Not);
        };
        let device = self.tiers.device(device);
        let gate = |_| {
            if stop() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        let copied = placed.writable().and_then(|target| {
            from.copy_to(&target, source.size_bytes, &gate)?;
            Ok(u64::try_from(rustix::fs::fstat(&target)?.st_blocks).unwrap_or(0) * 512)
        });
        device.unreserve(placed.reserved_bytes);
        let discard = || drop(device.unlink(&hidden_name(copy)));
        let charged_bytes = match copied {
            Ok(charged_bytes) => charged_bytes,
            Err(why) => {
                discard();
                return match why.raw_os_error() {
                    _ if stop() => Ok(Outcome::Not),
                    Some(libc::ESTALE) => Ok(Outcome::Overtaken),
                    _ => Err(failed(&why)),
                };
            }
        };
        let copied = Copied { placed, version, size_bytes: source.size_bytes, charged_bytes };
        crash_point!("prefetch.copied");
        // From here on, opens and closes of the file wait.
        let _inode = self.metadata.lock_inode(id);
        // If another client changed the file during the copy, the copy matches no version.
        let unchanged = self
            .store
            .stat(own_cred(source.owner), &source.store_path)
            .is_ok_and(|stat| version.is_still(&stat.identity));
        let readers = self.metadata.open_of(id).filter(|open| !open.direct);
        let theirs = readers.is_none_or(|open| read_this(&open, &version));
        let mut tree = self.metadata.write_tree();
        let outcome = match self.worth_bringing(&tree, id) {
            None => Outcome::Not,
            Some(now) if now.path != source.path || now.identity != source.identity => Outcome::Overtaken,
            Some(_) if !unchanged && tree.is_queued(id) => Outcome::Overtaken,
            Some(_) if !unchanged || !theirs => Outcome::Not,
            Some(Source { readers: Some(open), .. }) if open.direct => {
                drop(tree);
                self.eviction.let_wait(id, copied);
                return Ok(Outcome::Brought(source.size_bytes));
            }
            Some(now) => {
                let adopted = self.adopt_copy(&mut tree, id, &copied, now.readers.as_deref());
                if adopted.is_ok() {
                    device.add_used(i64::try_from(charged_bytes).unwrap_or(i64::MAX));
                    return Ok(Outcome::Brought(source.size_bytes));
                }
                drop(tree);
                discard();
                return adopted.map(|()| Outcome::Not).map_err(|why| failed(&why));
            }
        };
        drop(tree);
        discard();
        Ok(outcome)
    }

    /// The copy becomes the file's content, also for its `readers`, whose reads are all mediated. A read that is under
    /// way ends on the store's file, which has the same bytes. The caller charges the copy under the same lock of the
    /// tree, unless it already has. The caller holds the inode's lock, and the file is at rest.
    fn adopt_copy(&self, tree: &mut Tree, id: FileId, copied: &Copied, readers: Option<&Open>) -> FsResult<()> {
        let placed = &copied.placed;
        let Location::Tier(device) = placed.content.location else { return Err(Errno::STALE.into()) };
        let target = placed.writable()?;
        // A descriptor for writing would prevent the agent's own leases.
        let file = readers.map(|_| reopen_read_only(&target)).transpose()?;
        // Its mode and times are those that programs see; the store's may be older.
        let attr = tree.get(id).ok_or(Errno::STALE)?.attr;
        Given::known(&attr).give(&target)?;
        if let Err(fault) = self.placer.adopt(tree, id, placed) {
            if let Some(inode) = tree.get_mut(id) {
                inode.replica = None;
            }
            return Err(fault);
        }
        tree.own(id);
        let device = self.tiers.device(device);
        let written_bytes = data_bytes(copied.size_bytes, copied.charged_bytes / 512);
        device.counters().bytes_in.fetch_add(written_bytes, Ordering::Relaxed);
        self.events.count(EventKind::Fetched, device.tier_name(), "prefetched", written_bytes);
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = copied.charged_bytes;
            inode.prefetched = true;
        }
        tree.recount(id);
        if let Some((open, file)) = readers.zip(file) {
            open.charged_bytes.store(copied.charged_bytes, Ordering::Relaxed);
            open.replace(Content { file: Arc::new(file), location: placed.content.location, writable: false });
        }
        crash_point!("prefetch.adopted");
        // The commit also publishes the file to the shim's index.
        self.metadata.commit(tree);
        Ok(())
    }

    /// The file, its known version, and its bytes in the store, if a prefetch is worthwhile.
    fn source_of(&self, id: FileId) -> Result<Option<(Source, StoreIdentity, surgetank_store::Source)>> {
        for _ in 0..LOOKS_MAX {
            let Some(source) = self.worth_bringing(&self.metadata.read_tree(), id) else {
                return Ok(None);
            };
            let from = match self.store.source(own_cred(source.owner), &source.store_path) {
                // The drain moved it meanwhile, or it was deleted: a later prefetch may find it.
                Err(_) if !self.is_unmoved(id, &source) => return Ok(None),
                other => other.map_err(|why| failed(&why))?,
            };
            let is = from.identity().map_err(|why| failed(&why))?;
            if let Some(version) = source.identity.filter(|known| known.is_still(&is)) {
                let theirs = source.readers.as_ref().is_none_or(|open| open.direct || read_this(open, &version));
                return Ok(theirs.then_some((source, version, from)));
            }
            // Another client has changed it since the look, so a copy would be useless; or the drain did.
            let _inode = self.metadata.lock_inode(id);
            if self.copies.look_quietly(id).is_err() {
                return Ok(None);
            }
            if self.metadata.read_tree().is_queued(id) {
                surgetank_types::sync::thread::sleep(LOOK_EVERY);
            }
        }
        Ok(None)
    }

    /// Is the file still where the look found it, without a queued operation that moves it or a directory above it?
    fn is_unmoved(&self, id: FileId, source: &Source) -> bool {
        let tree = self.metadata.read_tree();
        let mut at = id;
        while at != FileId::ROOT {
            if tree.is_queued(at) {
                return false;
            }
            let Some(dir) = tree.get(at).and_then(|inode| inode.applied.as_ref()).map(|place| place.0) else {
                return false;
            };
            at = dir;
        }
        tree.applied_path(id).as_ref() == Some(&source.store_path)
    }

    /// `None`: not a file, in a tier already (or a copy waits there), newer than the store's, or a process writes it.
    fn worth_bringing(&self, tree: &Tree, id: FileId) -> Option<Source> {
        let readers = self.metadata.opens().get(&id).cloned();
        let only_read = |open: &Arc<Open>| {
            open.content().location == Location::Store && open.writers() == 0 && !open.granted.load(Ordering::Relaxed)
        };
        if !tree.is_at_rest(id) || !readers.as_ref().is_none_or(only_read) || self.eviction.has_waiting(id) {
            return None;
        }
        let inode = tree.get(id)?;
        let path = tree.logical_path(id)?;
        Some(Source {
            wish: Wish { mode: Mode::Copy, ..self.placer.wish(tree, id, &path) },
            path,
            store_path: tree.applied_path(id)?,
            size_bytes: inode.attr.size_bytes,
            owner: inode.cred(),
            identity: inode.identity,
            perm: inode.attr.perm,
            readers,
        })
    }
}

impl Fetches {
    /// No process has the file open any more. The caller holds the inode's lock.
    pub(crate) fn use_waiting(&self, open: &Open) {
        let id = open.id;
        let Some(copied) = self.eviction.take_waiting(id) else { return };
        let at = |tree: &Tree| {
            let inode = tree.get(id).filter(|inode| inode.logical.is_some() && tree.is_at_rest(id))?;
            let known = inode.identity.filter(|known| *known == copied.version)?;
            Some((tree.applied_path(id)?, inode.cred(), known))
        };
        let found = at(&self.metadata.read_tree());
        let unchanged = found.as_ref().is_some_and(|(path, owner, known)| {
            self.store.stat(own_cred(*owner), path).is_ok_and(|stat| known.is_still(&stat.identity))
        });
        let mut tree = self.metadata.write_tree();
        if let Some(device) = copied.device().filter(|_| unchanged && at(&tree) == found) {
            match self.adopt_copy(&mut tree, id, &copied, None) {
                Ok(()) => return tree.arriving(device, -i64::try_from(copied.charged_bytes).unwrap_or(i64::MAX)),
                Err(fault) => tracing::debug!(id = id.0, %fault, "what was brought in is not used"),
            }
        }
        drop(tree);
        self.eviction.discard_waiting(&copied);
    }
}
