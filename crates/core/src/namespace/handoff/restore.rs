//! Restores what programs have open from an agent that was killed: handles, listings, times of directories.
//!
//! This runs once, after recovery and before the first request. Recovery did not seal files that programs can still
//! write (`left_written`, `still_handed`). The danger that this avoids: an open file of a running program fails, or
//! reads another file.

use std::time::Instant;

use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use super::super::content::{Content, Handle, Location, Open, reopen_writable};
use super::super::files::hidden_name;
use super::super::recover::STORE_PATIENCE;
use super::super::{Namespace, Noted};
use super::{MANY, kept_as};
use crate::handoff::{Left, LeftHandle};
use surgetank_state::{PlainId, files_of};
use surgetank_types::model::{FileId, OpKind, Timestamp};

const NUMBERS_LEFT_OUT: u64 = 1 << 20;

impl Namespace {
    /// Can a process still write the plain file? Then the file counts as handed out, and the tender looks at it until it is closed. The
    /// caller holds the inode's lock.
    pub(in super::super) fn still_handed(&self, id: FileId, content: &Content) -> bool {
        if !self.succession.is_handed_still(content) {
            return false;
        }
        let charged_bytes = self.read_tree().get(id).map_or(0, |inode| inode.charged_bytes);
        let open = Arc::new(Open::new(id, content.clone(), true, self.succession.backing_left(id), charged_bytes));
        open.handed.store(true, Ordering::Relaxed);
        open.handed_to(rustix::process::geteuid().as_raw());
        self.handed.fetch_add(1, Ordering::Relaxed);
        self.directly_written(&open);
        self.count_user(&open, true);
        self.opens().insert(id, open);
        self.defer_seal(id);
        true
    }

    pub(in super::super) fn restore(&self) {
        if !self.succession.again {
            return;
        }
        let left = self.succession.left().clone();
        self.restore_tree(&left);
        let mut failed = 0_u64;
        let until = surgetank_types::clock::tick() + STORE_PATIENCE;
        for (fh, handle) in &left.handles {
            match self.restore_handle(handle, until) {
                Some(open) => {
                    let LeftHandle { flags, writes, run, .. } = *handle;
                    let handle = Handle::new(open, writes, flags, run);
                    self.writing_handles.fetch_add(usize::from(writes), Ordering::SeqCst);
                    self.handles.write().unwrap_or_else(PoisonError::into_inner).insert(*fh, Arc::new(handle));
                }
                None => failed += 1,
            }
        }
        for (fh, listing) in &left.listings {
            self.recall(listing.dir);
            self.listing_left(*fh, listing);
        }
        self.restore_locks(&mut self.succession.kept.lock().unwrap_or_else(PoisonError::into_inner));
        self.next_handle.store(left.handle_max + 1, Ordering::Relaxed);
        let _ = self.succession.handles_from.set(left.handle_max + 1);
        let noted = left.noted.iter().filter_map(|text| serde_json::from_slice::<Noted>(text).ok());
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).extend(noted);
        tracing::info!(
            open = left.handles.len(),
            failed,
            mirrors = left.mirrors.len(),
            done = self.succession.done().len(),
            "programs go on where an earlier agent was killed"
        );
    }

    fn restore_tree(&self, left: &Left) {
        let mut tree = self.write_tree();
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
        let _inode = self.lock_inode(handle.id);
        let known = self.open_of(handle.id);
        let open = match known {
            Some(open) => open,
            None => {
                let arriving = if handle.writes { None } else { self.arrives_again(handle.id) };
                let open = match arriving {
                    Some(open) => Arc::new(open),
                    None => {
                        let content = self.content_left(handle.id, until)?;
                        let charged_bytes = self.read_tree().get(handle.id).map_or(0, |inode| inode.charged_bytes);
                        let backing = self.succession.backing_left(handle.id);
                        Arc::new(Open::new(handle.id, content, handle.direct, backing, charged_bytes))
                    }
                };
                self.opens().insert(handle.id, open.clone());
                open
            }
        };
        if handle.writes {
            if !open.direct && !open.content().writable {
                let content = open.content();
                let file =
                    reopen_writable(&content.file).inspect_err(|why| self.told_unreadable(handle.id, why)).ok()?;
                open.replace(Content { file: Arc::new(file), writable: true, ..content });
            }
            // The earlier agent's view of it is lost: so it counts as changed.
            open.written.store(true, Ordering::Relaxed);
            if open.direct {
                self.directly_written(&open);
            }
        }
        self.count_user(&open, handle.writes);
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
            let tree = self.read_tree();
            (tree.get(id)?.replica, tree.logical_path(id).is_none())
        };
        let content = match plain {
            Some(PlainId { device, .. }) if nameless => {
                let file = self.tiers.device(device).open(&hidden_name(id), false);
                let file = file.inspect_err(|why| self.told_unreadable(id, why)).ok()?;
                Some(Content { file: Arc::new(file), location: Location::Tier(device), writable: false })
            }
            _ => crate::namespace::recover::Recovery::new(self)
                .content_left_in(id, until)
                .inspect_err(|why| tracing::error!(%why))
                .ok()
                .flatten(),
        }?;
        if content.location == Location::Store {
            // Another client may have put another file there.
            let ino = rustix::fs::fstat(&*content.file).ok()?.st_ino;
            let same =
                self.read_tree().get(id).and_then(|inode| inode.identity.as_ref().map(|known| known.ino)) == Some(ino);
            return same.then_some(content);
        }
        Some(content)
    }

    fn told_unreadable(&self, id: FileId, why: &std::io::Error) {
        tracing::error!(id = id.0, %why, "a file that programs have open cannot be opened again: ESTALE");
    }

    /// Registrations with the kernel that nobody needs any more.
    pub(in super::super) fn give_up_backings(&self) {
        let backings: Vec<u32> = self.succession.left().backings.drain().map(|(_, backing)| backing).collect();
        if let Some(door) = self.door.get() {
            backings.into_iter().for_each(|backing| door.unback(backing));
        }
    }
}
