//! Bytes through the agent: reads and writes of mediated files. Also the operations that the kernel never applies to
//! the plain file directly: allocation, holes, copies between files, sync.
//!
//! The danger that this avoids: fsync returns before the bytes are where it promises them.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use surgetank_policy::config::Survives;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, FsyncTarget, OpKind, RunId};

use super::super::Namespace;
use super::super::attributes::as_written;
use super::super::content::{Location, Open, reopen_writable};
use super::Shortage;

/// The limit of bytes for one copy_file_range call; programs call again.
const COPY_BYTES_MAX: u64 = 64 << 20;
/// The limit of tries for the sync of a closed file that keeps moving.
const LOOKS_MAX: usize = 1000;
/// How often a caller that waits for the store checks whether its program was killed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

impl Namespace {
    pub fn read(&self, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let handle = self.handle(fh)?;
        let mut done = 0;
        while let Some(arrival) = handle.open.arrival().filter(|_| done < buffer.len()) {
            match self.read_arriving(&handle.open, &arrival, offset + done as u64, &mut buffer[done..])? {
                // The end of the file.
                Some(0) => break,
                Some(count) => done += count,
                None => {}
            }
            self.try_complete(&handle.open, &arrival);
        }
        let _gate = handle.open.gate.read().unwrap_or_else(PoisonError::into_inner);
        let content = handle.open.content();
        while content.location != Location::Arriving && done < buffer.len() {
            match content.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(why) if why.kind() == std::io::ErrorKind::Interrupted => {}
                Err(why) => {
                    if let Location::Tier(device) = content.location {
                        self.device_failed(device, &why);
                    }
                    return Err(why.into());
                }
            }
        }
        self.counters.read_bytes.fetch_add(done as u64, Ordering::Relaxed);
        if let Location::Tier(device) = content.location {
            self.tiers.device(device).counters().bytes_out.fetch_add(done as u64, Ordering::Relaxed);
        }
        Ok(done)
    }

    /// `appends`: the descriptor's present state, however it was opened (F_SETFL).
    pub fn write(&self, fh: u64, offset: u64, data: &[u8], appends: bool) -> FsResult<usize> {
        let handle = self.handle(fh)?;
        if !handle.writes {
            return Err(Errno::BADF.into());
        }
        self.counters.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        if handle.open.direct {
            // Writes that the kernel cannot pass through, or sends here anyway, also go to the plain file.
            let file = reopen_writable(&handle.open.content().file)?;
            let offset = if appends { self.succession.append_at(fh, file.metadata()?.len()) } else { offset };
            super::room::write_all_at(&file, data, offset)?;
            return Ok(data.len());
        }
        let end = || -> FsResult<u64> { Ok(handle.open.content().file.metadata()?.len().max(offset)) };
        let offset = if appends { self.succession.append_at(fh, end()?) } else { offset };
        self.write_mediated(&handle.open, data, offset)
    }

    pub fn allocate(&self, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        let handle = self.handle(fh)?;
        let open = &handle.open;
        open.written.store(true, Ordering::Relaxed);
        let mut shortage = Shortage::default();
        loop {
            let gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
            let content = open.content();
            let mediated = !open.direct;
            let flags = rustix::fs::FallocateFlags::from_bits_truncate(mode);
            let punches = flags.contains(rustix::fs::FallocateFlags::PUNCH_HOLE);
            let size_bytes = content.file.metadata()?.len();
            let room = match content.location {
                Location::Tier(device) if mediated && !punches => {
                    self.ensure_room(open, device, size_bytes, offset, length)
                }
                _ => true,
            };
            let result = if room {
                let file =
                    if content.writable { content.file.clone() } else { Arc::new(reopen_writable(&content.file)?) };
                rustix::fs::fallocate(&*file, flags, offset, length)
            } else {
                Err(Errno::NOSPC)
            };
            drop(gate);
            match result {
                Ok(()) => {
                    self.has_room(&shortage);
                    return Ok(());
                }
                Err(Errno::NOSPC) if mediated && matches!(content.location, Location::Tier(_)) => {
                    if let Err(fault) = self.spill(open, content.location, length, super::SpilledBy::Writer) {
                        self.await_room(&mut shortage, (Some(open.id), b"", RunId(0)), fault)?;
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    pub fn seek(&self, fh: u64, offset: u64, whence: i32) -> FsResult<u64> {
        let handle = self.handle(fh)?;
        let from = match whence {
            libc::SEEK_DATA => rustix::fs::SeekFrom::Data(offset),
            libc::SEEK_HOLE => rustix::fs::SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        // A range that has not arrived yet is not a hole.
        if let Some(arrival) = handle.open.arrival() {
            let there = offset < arrival.size_bytes;
            return match whence {
                _ if !there => Err(Errno::NXIO.into()),
                libc::SEEK_DATA => Ok(offset),
                _ => Ok(arrival.size_bytes),
            };
        }
        Ok(rustix::fs::seek(&*handle.open.content().file, from)?)
    }

    pub fn copy_range(&self, from: u64, offset_in: u64, to: u64, offset_out: u64, length: u64) -> FsResult<u64> {
        let source = self.handle(from)?;
        let target = self.handle(to)?;
        let length = length.min(COPY_BYTES_MAX);
        target.open.written.store(true, Ordering::Relaxed);
        let whole = source.open.arrival().is_none();
        if !whole || !target.open.direct || source.open.id == target.open.id {
            // The kernel falls back to reads and writes, which may move the target to another tier meanwhile.
            return Err(Errno::OPNOTSUPP.into());
        }
        let out = reopen_writable(&target.open.content().file)?;
        let (mut offset_in, mut offset_out) = (offset_in, offset_out);
        let input = source.open.content().file;
        let copied = rustix::fs::copy_file_range(
            &*input,
            Some(&mut offset_in),
            out.as_fd(),
            Some(&mut offset_out),
            length as usize,
        );
        match copied {
            Ok(count) => Ok(count as u64),
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS) => Err(Errno::OPNOTSUPP.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The promise of fsync for the file: its tier or the store.
    pub(crate) fn fsync_target(&self, id: FileId, path: &[u8], location: Location) -> FsyncTarget {
        let decision = self.decide(path);
        if !Self::drained(self.mode_for(&self.read_tree(), id, path)) {
            return FsyncTarget::Tier;
        }
        let wanted = decision.fsync.or(self.config.fsync);
        match location {
            Location::Store | Location::Arriving => FsyncTarget::Tier,
            // The bytes survive the node there, but only the published name is found again without the agent.
            Location::StoreTemporary => wanted.unwrap_or(FsyncTarget::Tier),
            Location::Tier(device) => wanted.unwrap_or(match self.tiers.device(device).survives() {
                Survives::Agent => FsyncTarget::Store,
                Survives::Reboot | Survives::Node => FsyncTarget::Tier,
            }),
        }
    }

    pub fn fsync(&self, fh: u64, data_only: bool) -> FsResult<()> {
        let handle = self.handle(fh)?;
        self.fsync_open(&handle.open, data_only)
    }

    pub(super) fn fsync_open(&self, open: &Arc<Open>, data_only: bool) -> FsResult<()> {
        let content = open.content();
        let path = self.read_tree().logical_path(open.id);
        let target =
            path.as_deref().map_or(FsyncTarget::Tier, |path| self.fsync_target(open.id, path, content.location));
        match target {
            FsyncTarget::Tier => {
                // The gate keeps the file on its tier meanwhile.
                let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
                let content = open.content();
                if data_only {
                    content.file.sync_data()?;
                } else {
                    content.file.sync_all()?;
                }
                self.promise_bytes(open.id);
                self.sync_catalog()?;
                Ok(())
            }
            FsyncTarget::Store => self.flush_to_store(open),
        }
    }

    /// fsync of a file that is sealed by now.
    pub(super) fn fsync_closed(&self, id: FileId) -> FsResult<()> {
        let (path, version) = {
            let mut tree = self.write_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.dirty()) else {
                return Ok(());
            };
            let (publish, version, replica) = (inode.publish, inode.version, inode.replica);
            let Some(path) = tree.logical_path(id) else {
                return Ok(());
            };
            tree.hurry(publish);
            (replica.map(|plain| (path, Location::Tier(plain.device))), version)
        };
        match path {
            Some((path, location)) if self.fsync_target(id, &path, location) == FsyncTarget::Store => {
                self.wake();
                self.wait_durable(id, version)
            }
            _ => {
                for _ in 0..LOOKS_MAX {
                    if self.sync_closed_file(id, version)? {
                        return self.sync_catalog().map_err(Into::into);
                    }
                }
                Err(Errno::IO.into())
            }
        }
    }

    /// The store has names of the file that no process has looked up. Before the known name goes, and the content with
    /// it, those names must show the written bytes. (Such a file is written in place, unless a reader had its copy on a
    /// tier open when the writer came.)
    pub(crate) fn spare_unknown_names(&self, id: FileId) -> FsResult<()> {
        let (open, publish, version) = {
            let mut tree = self.write_tree();
            let Some(inode) = tree.get(id) else { return Ok(()) };
            if !inode.has_unknown_names() || (inode.sealed && !inode.dirty()) {
                return Ok(());
            }
            let (publish, version) = (inode.publish, inode.version);
            tree.hurry(publish);
            self.commit(&mut tree);
            (self.open_of(id).filter(|open| open.writers() > 0), publish, version)
        };
        match open {
            Some(open) if matches!(open.content().location, Location::Tier(_)) => self.flush_to_store(&open),
            None if publish.is_some() => {
                self.wake();
                self.wait_durable(id, version)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn has_unknown_names(&self, id: FileId) -> bool {
        self.read_tree().get(id).is_some_and(surgetank_state::Inode::has_unknown_names)
    }

    /// Must the content be written in the store itself? This is so if the store has further names that no process has
    /// looked up. It is also so if the file may be written, but the directory does not allow a new version in place of
    /// the old one.
    pub(super) fn only_in_place(&self, id: FileId) -> bool {
        // An agent that serves all users may write everywhere.
        if !self.store.features().plain_files {
            return false;
        }
        let linked = self.has_unknown_names(id);
        if linked || !self.checks_permissions {
            return linked;
        }
        let (dir, path, who) = {
            let tree = self.read_tree();
            let Some(inode) = tree.get(id).filter(|inode| !inode.dirty() && inode.publish.is_none()) else {
                return false;
            };
            let Some((dir, path)) = inode.applied.as_ref().and_then(|(dir, _)| Some((*dir, tree.applied_path(*dir)?)))
            else {
                return false;
            };
            (dir, path, self.own_cred(inode.cred()))
        };
        let may = self.let_in(dir, || self.queries.may_change(dir, who, &path));
        may.is_err_and(|why| why.raw_os_error() == Some(libc::EACCES))
    }

    /// Publishes the present content of an open file and waits until it is durable.
    fn flush_to_store(&self, open: &Arc<Open>) -> FsResult<()> {
        let id = open.id;
        let version = {
            let _inode = self.lock_inode(id);
            let dirty = open.written.swap(false, Ordering::Relaxed) || open.direct_writer.load(Ordering::Relaxed);
            let (mut tree, stat) = self.look_and_lock(id, &open.content().file)?;
            let Some(inode) = tree.get_mut(id) else {
                return Ok(());
            };
            if dirty {
                inode.attr = as_written(inode, &stat, Some(open));
                inode.version += 1;
                if let Some(seq) = inode.publish {
                    tree.take_back(id, seq);
                }
            }
            let version = tree.get(id).map_or(0, |inode| inode.version);
            self.queue_publish(&mut tree, id);
            let publish = tree.get(id).and_then(|inode| inode.publish);
            tree.hurry(publish);
            version
        };
        self.wake();
        self.wait_durable(id, version)
    }

    pub(crate) fn wait_durable(&self, id: FileId, version: u32) -> FsResult<()> {
        let began = surgetank_types::clock::tick();
        let mut tree = self.read_tree();
        loop {
            let Some(inode) = tree.get(id) else {
                return Ok(());
            };
            if inode.durable >= version || inode.logical.is_none() {
                return Ok(());
            }
            let Some(seq) = inode.publish else {
                drop(tree);
                if !self.publish_newest(id) {
                    return Ok(());
                }
                self.wake();
                tree = self.read_tree();
                continue;
            };
            if let Some(trouble) =
                tree.ops.range(..=seq).find_map(|(_, op)| op.error.as_ref().filter(|trouble| trouble.lasting))
            {
                return Err(Fault::new(Errno::from_raw_os_error(trouble.errno), trouble.text.clone()));
            }
            self.queries.must_answer(began)?;
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            tree = self.wait_changed(tree, LOOK_EVERY);
        }
    }

    /// The drain has just published an older version: queues the newest one. `false`: the file is not published.
    fn publish_newest(&self, id: FileId) -> bool {
        let mut tree = self.write_tree();
        if tree.get(id).is_some_and(|inode| inode.publish.is_none()) {
            self.queue_publish(&mut tree, id);
        }
        let newest = tree.get(id).and_then(|inode| inode.publish);
        tree.hurry(newest);
        newest.is_some()
    }

    /// Makes names in a directory durable. On the tier, a sync of the catalog does that; in the store, the operations
    /// on the names do.
    pub fn fsync_dir(&self, dir: FileId) -> FsResult<()> {
        self.sync_catalog()?;
        let path = self.read_tree().logical_path(dir).unwrap_or_default();
        let volatile = self.tiers.devices().next().is_some_and(|device| device.survives() == Survives::Agent);
        let decision = self.decide(&path);
        let wanted = decision.fsync.or(self.config.fsync).unwrap_or(if volatile {
            FsyncTarget::Store
        } else {
            FsyncTarget::Tier
        });
        if wanted == FsyncTarget::Tier {
            return Ok(());
        }
        let last = {
            let mut tree = self.write_tree();
            let last = tree
                .ops
                .iter()
                .rev()
                .find(|(_, op)| {
                    surgetank_state::places(&op.kind).iter().any(|place| place.0 == dir)
                        || matches!(&op.kind, OpKind::Publish { file, .. } if *file == dir)
                })
                .map(|(seq, _)| *seq);
            tree.hurry(last);
            last
        };
        let Some(last) = last else { return Ok(()) };
        self.wake();
        let began = surgetank_types::clock::tick();
        let mut tree = self.read_tree();
        while let Some(op) = tree.ops.get(&last) {
            self.queries.must_answer(began)?;
            if let Some(trouble) = op.error.as_ref().filter(|trouble| trouble.lasting) {
                return Err(Fault::new(Errno::from_raw_os_error(trouble.errno), trouble.text.clone()));
            }
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            tree = self.wait_changed(tree, LOOK_EVERY);
        }
        Ok(())
    }
}
