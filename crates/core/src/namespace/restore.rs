//! Restores what programs have open from an agent that was killed: handles, listings, times of directories.
//!
//! This runs once, after recovery and before the first request. Recovery did not seal files that programs can still
//! write (`left_written`, `still_granted`). The danger that this avoids: an open file of a running program fails, or
//! reads another file.

use std::time::Instant;

use surgetank_state::{Inode, Name, PlainId, Tree, files_of};
use surgetank_store::{Store, StoreStat};
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, Kind, OpKind, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, OnceLock, PoisonError};

use crate::base::deferred::DeferredSeals;
use crate::base::notes::{Noted, Notes};
use crate::base::runs::Runs;
use crate::base::succession::{MANY, Succession, kept_as};
use crate::base::{Base, Door};
use crate::content::{Content, Handle, Location, Open, reopen_writable};
use crate::files::copies::{Copies, STORE_TIMEOUT};
use crate::files::fetch_open::Fetches;
use crate::files::open::Opener;
use crate::files::open_files::OpenFiles;
use crate::files::{Files, Grant, Opened, hidden_name};
use crate::handoff::{Left, LeftHandle, LeftMirror};
use crate::metadata::Metadata;
use crate::namespace::listing::Listings;
use crate::namespace::locks::FileLocks;
use crate::namespace::resolve::{Found, Resolver};

const NUMBERS_LEFT_OUT: u64 = 1 << 20;

/// What programs have open from an agent that was killed.
pub struct Restore {
    door: Arc<OnceLock<Arc<dyn Door>>>,
    store: Arc<dyn Store>,
    succession: Arc<Succession>,
    tiers: Arc<Tiers>,
    copies: Arc<Copies>,
    deferred: Arc<DeferredSeals>,
    fetches: Arc<Fetches>,
    file_locks: Arc<FileLocks>,
    listings: Arc<Listings>,
    metadata: Arc<Metadata>,
    notes: Arc<Notes>,
    open_files: Arc<OpenFiles>,
    opener: Arc<Opener>,
    resolver: Arc<Resolver>,
    runs: Arc<Runs>,
}

impl Restore {
    pub(crate) fn new(
        base: &Base,
        files: &Files,
        file_locks: &Arc<FileLocks>,
        listings: &Arc<Listings>,
        resolver: &Arc<Resolver>,
    ) -> Self {
        Self {
            door: base.door.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            deferred: base.deferred.clone(),
            notes: base.notes.clone(),
            runs: base.runs.clone(),
            copies: files.copies.clone(),
            fetches: files.fetches.clone(),
            file_locks: file_locks.clone(),
            listings: listings.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            opener: files.opener.clone(),
            resolver: resolver.clone(),
        }
    }

    /// Can a process still write the plain file? Then the file counts as handed out, and the tender looks at it until it is closed. The
    /// caller holds the inode's lock.
    pub(crate) fn still_granted(&self, id: FileId, content: &Content) -> bool {
        if !self.succession.is_still_granted(content) {
            return false;
        }
        let charged_bytes = self.metadata.read_tree().get(id).map_or(0, |inode| inode.charged_bytes);
        let open = Arc::new(Open::new(id, content.clone(), true, self.succession.backing_left(id), charged_bytes));
        open.granted.store(true, Ordering::Relaxed);
        open.granted_to(rustix::process::geteuid().as_raw());
        self.metadata.granted.fetch_add(1, Ordering::Relaxed);
        self.metadata.directly_written(&open);
        self.opener.count_user(&open, true);
        self.metadata.opens().insert(id, open);
        self.deferred.defer_seal(id);
        true
    }

    pub(crate) fn restore(&self) {
        if !self.succession.again {
            return;
        }
        let left = self.succession.left().clone();
        self.restore_tree(&left);
        let mut failed = 0_u64;
        let until = surgetank_types::clock::tick() + STORE_TIMEOUT;
        for (fh, handle) in &left.handles {
            match self.restore_handle(handle, until) {
                Some(open) => {
                    let LeftHandle { flags, writes, .. } = *handle;
                    let handle = Handle::new(open, writes, flags);
                    self.metadata.writing_handles.fetch_add(usize::from(writes), Ordering::SeqCst);
                    self.open_files
                        .handles
                        .write()
                        .unwrap_or_else(PoisonError::into_inner)
                        .insert(*fh, Arc::new(handle));
                }
                None => failed += 1,
            }
        }
        for (fh, listing) in &left.listings {
            self.recall(listing.dir);
            self.listings.listing_left(*fh, listing);
        }
        self.file_locks.restore_locks(&mut self.succession.kept.lock().unwrap_or_else(PoisonError::into_inner));
        self.open_files.next_handle.store(left.handle_max + 1, Ordering::Relaxed);
        let _ = self.succession.handles_from.set(left.handle_max + 1);
        let noted = left.noted.iter().filter_map(|text| serde_json::from_slice::<Noted>(text).ok());
        self.notes.troubles.lock().unwrap_or_else(PoisonError::into_inner).extend(noted);
        tracing::info!(
            open = left.handles.len(),
            failed,
            mirrors = left.mirrors.len(),
            done = self.succession.done().len(),
            "programs continue after an earlier agent was killed"
        );
    }

    fn restore_tree(&self, left: &Left) {
        let mut tree = self.metadata.write_tree();
        let highest = left.mirrors.keys().map(|id| id.0).max().unwrap_or(0);
        // The catalog does not have numbers that were given out and returned since. The kernel must not see one of them
        // again.
        tree.next_id = tree.next_id.max(highest + 1) + NUMBERS_LEFT_OUT;
        // A queued rename of a directory prevents that its creation is taken back.
        let moved = tree.ops.values().filter(|op| matches!(op.kind, OpKind::Rename { .. } | OpKind::Exchange { .. }));
        let moved: Vec<FileId> = moved.flat_map(|op| files_of(&op.kind)).collect();
        for id in moved {
            if let Some(dir) = tree.dir_mut(id) {
                dir.moved = true;
            }
        }
        let known: Vec<FileId> = tree.iter().map(|(id, _)| id).collect();
        for id in known {
            let Some(inode) = tree.get_mut(id) else { continue };
            inode.lookups = MANY;
            if let Some(dir) = inode.dir.as_mut() {
                dir.is_in_kernel = true;
                dir.kernel_negative_entries.all();
            }
            if let Some((nanos, links)) = left.dirs.get(&id) {
                inode.attr.mtime = Timestamp { nanos: *nanos };
                inode.attr.ctime = inode.attr.ctime.max(inode.attr.mtime);
                inode.attr.links = *links;
            }
        }
    }

    fn restore_handle(&self, handle: &LeftHandle, until: Instant) -> Option<Arc<Open>> {
        self.recall(handle.id);
        let _inode = self.metadata.lock_inode(handle.id);
        let known = self.metadata.open_of(handle.id);
        let open = match known {
            Some(open) => open,
            None => {
                let arriving = if handle.writes { None } else { self.fetches.fetches_again(handle.id) };
                let open = match arriving {
                    Some(open) => Arc::new(open),
                    None => {
                        let content = self.content_left(handle.id, until)?;
                        let charged_bytes =
                            self.metadata.read_tree().get(handle.id).map_or(0, |inode| inode.charged_bytes);
                        let backing = self.succession.backing_left(handle.id);
                        Arc::new(Open::new(handle.id, content, handle.direct, backing, charged_bytes))
                    }
                };
                self.metadata.opens().insert(handle.id, open.clone());
                open
            }
        };
        if handle.writes {
            if !open.direct && !open.content().writable {
                let content = open.content();
                let file =
                    reopen_writable(&content.file).inspect_err(|why| self.report_unreadable(handle.id, why)).ok()?;
                open.replace(Content { file: Arc::new(file), writable: true, ..content });
            }
            // The earlier agent's view of it is lost: so it counts as changed.
            open.written.store(true, Ordering::Relaxed);
            if open.direct {
                self.metadata.directly_written(&open);
            }
        }
        self.opener.count_user(&open, handle.writes);
        Some(open)
    }

    /// The content of an open file, also of one without a name.
    fn content_left(&self, id: FileId, until: Instant) -> Option<Content> {
        let kept = self.succession.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&kept_as(id));
        if let Some(file) = kept {
            let writable = rustix::fs::fcntl_getfl(&file).is_ok_and(|flags| flags.intersects(rustix::fs::OFlags::RDWR));
            return Some(Content { file: Arc::new(file), location: Location::Store, writable });
        }
        let (plain, nameless) = {
            let tree = self.metadata.read_tree();
            (tree.get(id)?.replica, tree.logical_path(id).is_none())
        };
        let content = match plain {
            Some(PlainId { device, .. }) if nameless => {
                let file = self.tiers.device(device).open(&hidden_name(id), false);
                let file = file.inspect_err(|why| self.report_unreadable(id, why)).ok()?;
                Some(Content { file: Arc::new(file), location: Location::Tier(device), writable: false })
            }
            _ => self.copies.content_left_in(id, until).inspect_err(|why| tracing::error!(%why)).ok().flatten(),
        }?;
        if content.location == Location::Store {
            // Another client may have put another file there.
            let ino = rustix::fs::fstat(&*content.file).ok()?.st_ino;
            let same =
                self.metadata.read_tree().get(id).and_then(|inode| inode.identity.as_ref().map(|known| known.ino))
                    == Some(ino);
            return same.then_some(content);
        }
        Some(content)
    }

    fn report_unreadable(&self, id: FileId, why: &std::io::Error) {
        tracing::error!(id = id.0, %why, "a file that programs have open cannot be opened again: ESTALE");
    }

    /// Registrations with the kernel that no open file needs any more.
    pub(crate) fn give_up_backings(&self) {
        let backings: Vec<u32> = self.succession.left().backings.drain().map(|(_, backing)| backing).collect();
        if let Some(door) = self.door.get() {
            backings.into_iter().for_each(|backing| door.unback(backing));
        }
    }

    /// A number that the kernel has from an earlier agent gets its meaning back, if it has none yet and the store still has
    /// the file. To be called before anything else is asked of the number; store I/O, so with no lock held.
    pub fn recall(&self, id: FileId) {
        if !self.succession.mirrors.load(Ordering::Relaxed) || self.metadata.read_tree().get(id).is_some() {
            return;
        }
        let Some(mirror) = self.succession.left().mirrors.get(&id).cloned() else { return };
        if mirror.dir != id {
            self.recall(mirror.dir);
        }
        let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
        let Some(path) = self.metadata.read_tree().applied_path(mirror.dir).map(|dir| dir.join(&mirror.name)) else {
            return;
        };
        let who = surgetank_store::Cred {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        let Ok(stat) = self.store.stat(who, &path) else { return };
        let mut tree = self.metadata.write_tree();
        if mirror.is(&stat) && tree.get(id).is_none() {
            self.recalled(&mut tree, id, mirror, &stat);
        }
    }

    fn recalled(&self, tree: &mut Tree, id: FileId, mirror: LeftMirror, stat: &StoreStat) {
        let place = (mirror.dir, Name::from(mirror.name));
        let mut inode = Inode::new(stat.attr);
        inode.identity = Some(stat.identity);
        inode.checked = Some(surgetank_types::clock::Moment::now());
        inode.lookups = MANY;
        inode.enters_kernel();
        let free = tree.entry(place.0, &place.1).is_none();
        if free {
            inode.logical = Some(place.clone());
            inode.applied = Some(place.clone());
        }
        tree.insert(id, inode);
        if free {
            tree.bind(place.0, &place.1, |entry| {
                entry.set_logical(Some(id));
                entry.set_planned(Some(id));
            });
        }
        if stat.attr.kind == Kind::File && stat.attr.links > 1 {
            tree.hard_links.entry(stat.attr.ino).or_insert(id);
        }
    }

    /// The file of a request that was carried out, as a look-up would return it.
    pub fn made_before(&self, about: FileId) -> FsResult<Found> {
        self.resolver.found(about).map_err(|_gone| Errno::STALE.into())
    }

    /// The create was carried out, but the answer with the open file was lost.
    pub fn opened_before(&self, caller: &Caller, about: FileId, flags: i32) -> FsResult<(Found, Opened)> {
        let run = self.runs.run(caller);
        let open = self.opener.open_inode(about, true, false, run, crate::files::Via::Mount)?;
        let opened = self.opener.register(open, true, flags, run);
        Ok((self.made_before(about)?, opened))
    }

    /// The file is already open: the answer to the process for which it was opened.
    pub fn opened_as(&self, fh: u64) -> FsResult<Opened> {
        let handle = self.open_files.handle(fh)?;
        let backing = handle.open.backing_or(|content| self.open_files.back(handle.id, content));
        let grant = backing.map_or(Grant::Mediated, Grant::Direct);
        Ok(Opened { handle: fh, grant, keep_cache: false, shared: handle.open.direct && backing.is_none() })
    }
}
