//! Memory pressure: when the job's memory is short, tiers in memory give back what exceeds their limit.
//!
//! Steps:
//! - evict files that the store has too;
//! - make all queued operations due;
//! - move undrained files to a tier on a disk or, without room there, to a temporary in the store.
//!
//! The danger that this avoids: the out-of-memory killer, because the drain is slower than the growth of the programs.
//! Directly written files cannot move; their memory is freed when they are drained.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

use surgetank_policy::placement::AskKind;
use surgetank_state::{Inode, PlainId, Progress, Tree};
use surgetank_store::Store;
use surgetank_tier::{Device, POLL_PERIOD, Tiers};
use surgetank_types::model::{DeviceId, FileId, Seq};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::end::End;
use crate::base::events::Events;
use crate::base::users::is_drained;
use crate::content::Location;
use crate::files::deadline::DeadlineWatch;
use crate::files::evict::Eviction;
use crate::files::place::Placer;
use crate::files::sync::Syncs;
use crate::files::transfer::Transfers;
use crate::files::{Given, SpilledBy, Wish, copy_with_attributes};
use crate::metadata::Metadata;
use crate::report::run::EventKind;

/// A file to be moved, as it was found.
struct Found {
    path: Vec<u8>,
    plain: PlainId,
    wish: Wish,
    perm: u32,
    version: u32,
    epoch: u32,
    promised: bool,
}

/// Has the copy of this file not begun yet? (The drain takes all due operations, and copies a few at a time.)
fn waits(tree: &Tree, seq: Seq) -> bool {
    tree.ops.get(&seq).is_some_and(|op| {
        let begun = match op.progress {
            Progress::Waiting => false,
            Progress::Staging => tree.staging.iter().any(|(other, _)| *other == seq),
            _ => true,
        };
        !begun && !op.doubtful && !op.certain
    })
}

/// Copied bytes also use memory until the disk has them.
fn begin_writing(target: &File) {
    // SAFETY: a call on a descriptor that `target` keeps open. A refusal changes nothing.
    unsafe { libc::sync_file_range(target.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Moves files out of memory when it is short.
pub struct MemoryPressure {
    end: Arc<End>,
    events: Arc<Events>,
    store: Arc<dyn Store>,
    tiers: Arc<Tiers>,
    deadline: Arc<DeadlineWatch>,
    eviction: Arc<Eviction>,
    metadata: Arc<Metadata>,
    placer: Arc<Placer>,
    syncs: Arc<Syncs>,
    transfers: Arc<Transfers>,
}

impl MemoryPressure {
    pub(crate) fn new(
        base: &Base,
        deadline: &Arc<DeadlineWatch>,
        eviction: &Arc<Eviction>,
        metadata: &Arc<Metadata>,
        placer: &Arc<Placer>,
        syncs: &Arc<Syncs>,
        transfers: &Arc<Transfers>,
    ) -> Self {
        Self {
            end: base.end.clone(),
            events: base.events.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            deadline: deadline.clone(),
            eviction: eviction.clone(),
            metadata: metadata.clone(),
            placer: placer.clone(),
            syncs: syncs.clone(),
            transfers: transfers.clone(),
        }
    }

    /// Checks the memory and gives back what exceeds the limit. Returns the time until the next check.
    pub(crate) fn relieve_memory(&self) -> Duration {
        let mut next = self.tiers.poll_memory();
        let mut short = false;
        for device in self.tiers.devices().filter(|device| device.in_memory() && device.is_there()) {
            let (excess_bytes, before) = (device.excess_bytes(), device.used_bytes());
            if excess_bytes == 0 {
                continue;
            }
            if device.deficit_bytes() > 0 {
                device.release_ballast();
            }
            if before > self.metadata.dirty_bytes_of(device) {
                self.eviction.make_room(device.id(), excess_bytes);
            }
            self.tiers.poll_memory();
            if device.deficit_bytes() > 0 {
                short = true;
                self.move_away(device);
                self.deadline.press_for_memory(true);
            }
            // A search without a result walks over all files.
            if device.used_bytes() >= before {
                next = POLL_PERIOD;
            }
        }
        if !short {
            self.deadline.press_for_memory(false);
            self.end.interrupted().clear();
        }
        next
    }

    /// Moves files one after another, the last in the queue first, until enough memory is free.
    fn move_away(&self, device: &Device) {
        for id in self.undrained_on(device.id()) {
            if device.deficit_bytes() == 0 {
                return;
            }
            let open = self.metadata.open_of(id);
            let moved = match open {
                Some(open) if open.direct => continue,
                // Room for further growth is not requested: the writer requests it.
                Some(open) if open.content().writable => {
                    self.transfers.spill(&open, Location::Tier(device.id()), 0, SpilledBy::Others)
                }
                Some(_) => continue,
                None => self.move_closed(id, device),
            };
            if let Err(fault) = moved {
                tracing::debug!(id = id.0, %fault, "could not be moved out of the memory");
            }
            self.tiers.poll_memory();
        }
    }

    fn undrained_on(&self, device: DeviceId) -> Vec<FileId> {
        let tree = self.metadata.read_tree();
        let mut found: Vec<_> = tree
            .iter()
            .filter(|(_, inode)| inode.replica.is_some_and(|plain| plain.device == device))
            .filter(|(_, inode)| (!inode.sealed || inode.dirty()) && inode.home().is_none())
            .map(|(id, inode)| (inode.publish, id))
            .collect();
        // A file without a place in the queue is never drained.
        found.sort_unstable_by_key(|(publish, id)| std::cmp::Reverse((publish.is_none(), *publish, *id)));
        found.into_iter().map(|(_, id)| id).collect()
    }

    fn movable(&self, id: FileId, device: &Device) -> Option<Found> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id)?;
        let plain = inode.replica.filter(|plain| plain.device == device.id())?;
        let path = tree.logical_path(id)?;
        // A running copy would keep the memory.
        let waits = inode.publish.is_none_or(|seq| waits(&tree, seq));
        let free = inode.sealed && inode.dirty() && waits && !self.metadata.opens().contains_key(&id);
        let pinned = self.eviction.pinned(&tree, id);
        (free && !pinned).then(|| Found {
            wish: self.placer.wish(&tree, id, &path),
            path,
            plain,
            perm: inode.attr.perm,
            version: inode.version,
            epoch: inode.epoch,
            promised: inode.is_promised(),
        })
    }

    fn move_closed(&self, id: FileId, from: &Device) -> surgetank_types::error::FsResult<()> {
        let Some(_inode) = self.metadata.try_lock_inode(id) else { return Ok(()) };
        self.interrupt_copy(id, from.id());
        self.release_staged(id, from.id());
        let Some(found) = self.movable(id, from) else { return Ok(()) };
        if self.eviction.has_readers(&self.metadata.read_tree(), id, from.id(), Some(&found.path)) {
            return Ok(());
        }
        let outcome = self.move_found(id, from, &found);
        self.metadata.show(&self.metadata.read_tree(), id);
        outcome
    }

    /// A running copy holds the memory until it ends, and a slow store decides when. It is given up once, so that the
    /// next check can move the file. If no place takes the file, the next copy is left alone.
    fn interrupt_copy(&self, id: FileId, from: DeviceId) {
        let mut tree = self.metadata.write_tree();
        let staging = |op: &surgetank_state::Op| op.progress == Progress::Staging && !op.eager && !op.certain;
        let Some(inode) = tree.get(id).filter(|inode| inode.replica.is_some_and(|plain| plain.device == from)) else {
            return;
        };
        if inode.sealed
            && inode.publish.is_some_and(|seq| !waits(&tree, seq) && tree.ops.get(&seq).is_some_and(|op| staging(op)))
            && self.end.interrupted().insert(id)
            && let Some(inode) = tree.get_mut(id)
        {
            inode.epoch = inode.epoch.wrapping_add(1);
        }
    }

    /// An operation that waits to be sent to an object store holds the plain file itself. It is staged again from the
    /// new place.
    fn release_staged(&self, id: FileId, from: DeviceId) {
        if self.store.features().plain_files {
            return;
        }
        let mut tree = self.metadata.write_tree();
        let on_it = |inode: &&Inode| inode.sealed && inode.replica.is_some_and(|plain| plain.device == from);
        let Some(seq) = tree.get(id).filter(on_it).and_then(|inode| inode.publish) else { return };
        let staged = tree.ops.get(&seq).is_some_and(|op| {
            matches!(op.progress, Progress::Staged { .. }) && !op.eager && !op.doubtful && !op.certain
        });
        // Once: if no place takes the file, the server must not get the same bytes again and again.
        if !staged || !self.end.interrupted().insert(id) {
            return;
        }
        let staged = match &tree.ops.get(&seq).map(|op| &op.progress) {
            Some(Progress::Staged { copied, .. }) => {
                tree.applied_path(copied.dir).map(|dir| dir.join(&copied.temporary))
            }
            _ => None,
        };
        tree.unstage(seq);
        // The drain discards the part that the server has; it may be busy with a long request.
        if let Some(temporary) = staged {
            self.store.release(&temporary);
        }
        drop(tree);
        self.metadata.nudge();
    }

    fn move_found(&self, id: FileId, from: &Device, found: &Found) -> surgetank_types::error::FsResult<()> {
        let source = from.open(&found.path, false)?;
        let have_bytes = source.metadata()?.len();
        let kind = AskKind::Spill { have_bytes, want_bytes: 0, from: from.id() };
        let placed = self.placer.place(&found.path, id, kind, &found.wish, found.perm, crate::files::Via::Mount)?;
        let unwanted = match placed.content.location {
            Location::Tier(to) => self.tiers.device(to).in_memory(),
            // Short memory does not bring a file to the store that must not be there.
            _ => !is_drained(found.wish.mode),
        };
        let copied = match unwanted {
            true => Ok(None),
            false => placed.writable().and_then(|target| {
                let gate = |_| {
                    begin_writing(&target);
                    Ok(())
                };
                let given = copy_with_attributes(&source, &target, have_bytes, &gate)?;
                if found.promised {
                    target.sync_data()?;
                }
                Ok(Some((target, given)))
            }),
        };
        let (target, given) = match copied {
            Ok(Some(copied)) => copied,
            other => {
                self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
                return other.map(drop).map_err(Into::into);
            }
        };
        crash_point!("memory_pressure.copied");
        let mut tree = self.metadata.write_tree();
        // Since then, the drain may have begun its copy, a process may have opened it, or it may have another name.
        let same = |tree: &Tree| {
            tree.get(id).is_some_and(|inode| {
                let waits = inode.publish.is_none_or(|seq| waits(tree, seq));
                let unchanged =
                    (inode.version, inode.epoch, inode.replica) == (found.version, found.epoch, Some(found.plain));
                // A file that the drain has brought to the store by now need not move.
                waits
                    && unchanged
                    && inode.sealed
                    && inode.dirty()
                    && tree.logical_path(id).as_deref() == Some(&*found.path)
            })
        };
        if !same(&tree) || self.metadata.opens().contains_key(&id) {
            self.placer.undo_placed(&mut tree, &placed);
            return Ok(());
        }
        // Attributes that a process set by name since.
        let late = Given::of(&source).and_then(|now| if now == given { Ok(()) } else { now.give(&target) });
        if let Err(why) = late {
            self.placer.undo_placed(&mut tree, &placed);
            return Err(why.into());
        }
        let charged = tree.get(id).map_or(0, |inode| inode.charged_bytes);
        let now_charged = self.placer.change_place(&mut tree, id, &placed, have_bytes)?;
        if placed.spill.is_some() {
            // The drain finds a spilled file by its place in the queue.
            self.metadata.queue_publish(&mut tree, id);
        }
        if let Some(inode) = tree.get_mut(id) {
            inode.charged_bytes = now_charged;
        }
        tree.recount(id);
        tree.txn.file(id);
        self.metadata.commit(&mut tree);
        crash_point!("memory_pressure.written_down");
        if let Err(why) = from.unlink(&found.path) {
            // The catalog names it as pending unlink: recovery sweeps it.
            self.tiers.device_failed(from.id(), &why);
        }
        self.syncs.to_be_synced(&tree, id);
        drop(tree);
        from.add_used(-i64::try_from(charged).unwrap_or(i64::MAX));
        from.counters().spills_out.fetch_add(1, Ordering::Relaxed);
        self.events.count(EventKind::Spilled, from.tier_name(), "memory ran short", 0);
        Ok(())
    }

    /// Waits for `pause`, or until `stop`.
    pub(crate) fn wait_memory_pressure(&self, pause: Duration, stop: &dyn Fn() -> bool) {
        let guard = self.end.resting.lock().unwrap_or_else(PoisonError::into_inner);
        if !stop() {
            drop(self.end.rested.wait_timeout(guard, pause));
        }
    }

    pub(crate) fn end_memory_pressure(&self) {
        drop(self.end.resting.lock());
        self.end.rested.notify_all();
    }
}
