//! Room for mediated writes. It is charged as the file grows. When a device is full, the file moves to the next tier,
//! and its writer does not notice. The last place is a temporary in the store itself.
//!
//! The danger that this avoids: a program gets ENOSPC although another place has room.

use std::fs::File;

use surgetank_policy::placement::AskKind;
use surgetank_state::Inode;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::ladder;
use surgetank_types::model::{Attr, DeviceId, FileId, Mode, RunId, Timestamp};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, MutexGuard, PoisonError};

use crate::content::{Content, Location, Open};
use crate::files::transfer::{Transfers, is_begun_there};
use crate::files::{RoomWait, Wish};
use crate::report::run::EventKind;

/// The largest step in which room is charged, so that a long file is not charged for each write.
const STEP_BYTES_MAX: u64 = 4 << 20;

/// The party that moves an open file to another place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpilledBy {
    Writer,
    /// The writer may close the file meanwhile.
    Others,
}

/// Where a write lands.
#[derive(Clone, Copy)]
pub(crate) enum WriteAt {
    Offset(u64),
    /// `least`: not before this offset.
    End {
        fh: u64,
        least: u64,
    },
}

impl Transfers {
    /// Makes sure that the device has room for the file to grow to its new end. `false`: it has none, and the caller spills.
    pub(crate) fn ensure_room(&self, open: &Open, device: DeviceId, size_bytes: u64, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length);
        let charged = open.charged_bytes.load(Ordering::Relaxed);
        // A hole in front of the write costs nothing.
        let grows = end.saturating_sub(size_bytes.max(charged)).min(length);
        if grows == 0 {
            return true;
        }
        let ahead = charged.min(STEP_BYTES_MAX);
        let device = self.tiers.device(device);
        // A tier must not exceed its limit of undrained bytes: the file continues in a safer place. Files that are
        // never drained are exempt.
        if !self.deadline.dirty_allows(device, grows) && self.is_to_be_drained(open.id) {
            return false;
        }
        for want in [grows + ahead, grows] {
            if device.try_reserve(want) {
                device.add_used(i64::try_from(want).unwrap_or(i64::MAX));
                device.unreserve(want);
                open.charged_bytes.fetch_add(want, Ordering::Relaxed);
                return true;
            }
        }
        self.eviction.make_room(device.id(), grows) > 0 && {
            let granted = device.try_reserve(grows);
            if granted {
                device.add_used(i64::try_from(grows).unwrap_or(i64::MAX));
                device.unreserve(grows);
                open.charged_bytes.fetch_add(grows, Ordering::Relaxed);
            }
            granted
        }
    }

    fn is_to_be_drained(&self, id: FileId) -> bool {
        let tree = self.metadata.read_tree();
        let path = tree.logical_path(id);
        path.is_none_or(|path| self.metadata.drained_sometime(self.metadata.mode_for(&tree, id, &path)))
    }

    /// Moves the content of a mediated file to the next place that has room, while its writer waits. `seen`: where the
    /// writer found the content; another thread may have moved it already.
    pub(crate) fn spill(&self, open: &Arc<Open>, seen: Location, want_bytes: u64, by: SpilledBy) -> FsResult<()> {
        let _gate = open.gate.write().unwrap_or_else(PoisonError::into_inner);
        let before = open.content();
        if before.location != seen {
            return Ok(());
        }
        let Location::Tier(from) = before.location else {
            return Err(Errno::NOSPC.into());
        };
        let id = open.id;
        // (The plain file has no bytes to move: another member has them.)
        if self.metadata.read_tree().get(id).is_some_and(|inode| inode.home().is_some()) {
            return Err(Errno::NOSPC.into());
        }
        let have_bytes = before.file.metadata()?.len();
        let (path, wish, perm) = {
            let tree = self.metadata.read_tree();
            let inode = tree.get(id).ok_or(Errno::NOENT)?;
            match tree.logical_path(id) {
                Some(path) => (path.clone(), self.placer.wish(&tree, id, &path), inode.attr.perm),
                None => (Vec::new(), Wish::only(Mode::Remove), inode.attr.perm),
            }
        };
        let placed = self.placer.place(
            &path,
            id,
            AskKind::Spill { have_bytes, want_bytes, from },
            &wish,
            perm,
            crate::files::Via::Mount,
        )?;
        let fits = placed.spill.is_none() || self.store_could_take(have_bytes.saturating_add(want_bytes));
        let (target, given) = match if fits { placed.writable() } else { Err(Errno::NOSPC.into()) }.and_then(|target| {
            copy_with_attributes(&before.file, &target, have_bytes, &|_| Ok(())).map(|given| (target, given))
        }) {
            Ok(made) => made,
            Err(why) => {
                self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
                return Err(why.into());
            }
        };
        let promised = self.metadata.read_tree().get(id).is_some_and(Inode::is_promised);
        if promised && let Err(why) = target.sync_data() {
            self.placer.undo_placed(&mut self.metadata.write_tree(), &placed);
            return Err(why.into());
        }
        crash_point!("spill.copied");
        let charged = open.charged_bytes.load(Ordering::Relaxed);
        let mut old_place;
        {
            let mut tree = self.metadata.write_tree();
            // Closed: the drain may already be copying it.
            let closed = || {
                tree.get(id).is_none_or(|inode| inode.sealed)
                    || !self.metadata.opens().get(&id).is_some_and(|known| Arc::ptr_eq(known, open))
            };
            if by == SpilledBy::Others && closed() {
                self.placer.undo_placed(&mut tree, &placed);
                return Ok(());
            }
            let path = tree.logical_path(id);
            let old = path.unwrap_or_else(|| crate::files::hidden_name(id));
            // Attributes that a process set by name since. After the adoption nothing may fail: the writer would
            // continue in the old file.
            let late = Given::of(&before.file).and_then(|now| if now == given { Ok(()) } else { now.give(&target) });
            if let Err(why) = late {
                self.placer.undo_placed(&mut tree, &placed);
                return Err(why.into());
            }
            let left = tree.get(id).and_then(|inode| inode.replica);
            let now_charged = self.placer.change_place(&mut tree, id, &placed, have_bytes)?;
            crash_point!("spill.adopted");
            self.metadata.commit(&mut tree);
            crash_point!("spill.written_down");
            old_place = left.filter(|_| placed.content.location != before.location).map(|left| (old, left.ino));
            if !promised {
                self.leave_place(from, old_place.take());
            }
            // Under the tree's lock: the thread that seals the file sees both changes or neither.
            open.charged_bytes.store(now_charged, Ordering::Relaxed);
            open.replace(Content { file: Arc::new(target), location: placed.content.location, writable: true });
        }
        // Promised bytes stay at the old place until the catalog's disk has the new one.
        if promised {
            match self.metadata.sync_catalog() {
                Ok(()) => self.leave_place(from, old_place),
                Err(why) => tracing::warn!(%why, "a file that was moved stays on its tier too until the next start"),
            }
        }
        self.tiers.device(from).counters().spills_out.fetch_add(1, Ordering::Relaxed);
        let place = self.tiers.device(from).tier_name();
        self.events.count(EventKind::Spilled, place, "it grew and the tier had no room for more", charged);
        self.tiers.device(from).add_used(-i64::try_from(charged).unwrap_or(i64::MAX));
        Ok(())
    }

    /// By now the path may have another file.
    fn leave_place(&self, from: DeviceId, left: Option<(Vec<u8>, u64)>) {
        if let Some((path, ino)) = left
            && let Err(why) = self.tiers.device(from).unlink_if(&path, ino)
        {
            // The catalog names it as pending unlink: recovery sweeps it.
            self.tiers.device_failed(from, &why);
        }
    }

    /// According to the store's own numbers: this avoids a useless copy.
    fn store_could_take(&self, bytes: u64) -> bool {
        self.queries.space_now().map_or(true, |space| space.total_bytes == 0 || space.free_bytes >= bytes)
    }

    /// Mediated writes. Rule 4: a program never sees a full device while any place has room.
    pub(crate) fn write_mediated(&self, open: &Arc<Open>, data: &[u8], at: WriteAt) -> FsResult<usize> {
        let _mark = open.mark_written();
        let mut room_wait = RoomWait::default();
        let about = (Some(open.id), &b""[..], RunId(0));
        let mut tried = None;
        loop {
            let gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
            let content = open.content();
            let (offset, end) = self.offset_of((open, &content), data, at, &mut tried)?;
            let (failed, seen) = match content.location {
                Location::Tier(device) => {
                    let size_bytes = content.file.metadata()?.len();
                    if self.ensure_room(open, device, size_bytes, offset, data.len() as u64) {
                        match write_all_at(&content.file, data, offset) {
                            Ok(()) => {
                                has_landed(end);
                                self.room_waits.has_room(&room_wait);
                                return Ok(data.len());
                            }
                            Err(why) if is_full(&why) => {
                                self.tiers.device_failed(device, &why);
                                (why, content.location)
                            }
                            Err(why) => {
                                self.tiers.device_failed(device, &why);
                                return Err(why.into());
                            }
                        }
                    } else {
                        (std::io::Error::from_raw_os_error(libc::ENOSPC), content.location)
                    }
                }
                Location::StoreTemporary | Location::Store | Location::Arriving => {
                    match write_all_at(&content.file, data, offset) {
                        Ok(()) => {
                            has_landed(end);
                            self.room_waits.has_room(&room_wait);
                            return Ok(data.len());
                        }
                        // A write to the store's own file behaves as it would without Surgetank.
                        Err(why) if content.location == Location::Store => {
                            return Err(self.store_refused(open.id, &why));
                        }
                        Err(why) => {
                            drop((end, gate));
                            self.room_waits.await_room(&mut room_wait, about, self.refusal(open.id, &why))?;
                            continue;
                        }
                    }
                }
            };
            drop((end, gate));
            tracing::debug!(id = open.id.0, %failed, "spilling");
            if let Err(fault) = self.spill(open, seen, data.len() as u64, SpilledBy::Writer) {
                self.room_waits.await_room(&mut room_wait, about, fault)?;
            }
        }
    }

    /// Where the next try of a write lands. An append holds the end until it has landed. While it waits for room, others append:
    /// then its end is another one.
    fn offset_of<'a>(
        &self,
        (open, content): (&'a Open, &Content),
        data: &[u8],
        at: WriteAt,
        tried: &mut Option<(u64, u64)>,
    ) -> FsResult<(u64, Option<MutexGuard<'a, u64>>)> {
        let size_bytes = || content.file.metadata().map(|plain| plain.len());
        let (fh, least) = match at {
            WriteAt::Offset(offset) => {
                // (A write that makes the file longer is as an append to all others.)
                let is_longer = offset.saturating_add(data.len() as u64) > size_bytes()?;
                let end = is_longer.then(|| open.end.lock().unwrap_or_else(PoisonError::into_inner));
                return Ok((offset, end));
            }
            WriteAt::End { fh, least } => (fh, least),
        };
        let end = open.end.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = match *tried {
            // (A part of it may have landed there.)
            Some((changes, offset)) if changes == *end => offset,
            _ => {
                let size_bytes = size_bytes()?;
                let present = size_bytes.max(least);
                let offset = self.succession.append_at(fh, present);
                let is_there = offset >= present || is_begun_there(&content.file, data, offset, size_bytes)?;
                if is_there { offset } else { present }
            }
        };
        *tried = Some((*end, offset));
        Ok((offset, Some(end)))
    }

    /// The store itself refuses: only then does the program see the error. The message says what is full and what is safe.
    pub(crate) fn store_refused(
        &self,
        id: surgetank_types::model::FileId,
        why: &std::io::Error,
    ) -> surgetank_types::error::Fault {
        let fault = self.refusal(id, why);
        let path = self.metadata.read_tree().logical_path(id).unwrap_or_default();
        self.notes.note(RunId(0), String::from_utf8_lossy(&path).into_owned(), fault.note.clone(), false);
        fault
    }

    fn refusal(&self, id: surgetank_types::model::FileId, why: &std::io::Error) -> surgetank_types::error::Fault {
        let errno = Errno::from_raw_os_error(why.raw_os_error().unwrap_or(libc::EIO));
        let path = self.metadata.read_tree().logical_path(id).unwrap_or_default();
        let path = String::from_utf8_lossy(&path);
        surgetank_types::error::Fault::new(
            errno,
            format!("the store {} refused to write {path}: {why}", self.store.describe()),
        )
    }

    /// Cuts or extends the content of an open inode.
    pub(crate) fn truncate_content(&self, open: &Arc<Open>, size_bytes: u64) -> FsResult<()> {
        let _mark = open.mark_written();
        let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
        let mut end = open.end.lock().unwrap_or_else(PoisonError::into_inner);
        *end += 1;
        let content = open.content();
        if content.writable {
            content.file.set_len(size_bytes)?;
        } else {
            crate::content::reopen_writable(&content.file)?.set_len(size_bytes)?;
        }
        Ok(())
    }
}

/// An append is done.
fn has_landed(end: Option<MutexGuard<'_, u64>>) {
    if let Some(mut changes) = end {
        *changes += 1;
    }
}

/// Copies content between places, with its permissions and times, because those are the catalog's.
pub(crate) fn copy_with_attributes(
    from: &File,
    to: &File,
    size_bytes: u64,
    gate: ladder::Gate<'_>,
) -> std::io::Result<Given> {
    let given = Given::of(from)?;
    ladder::copy_file(from, to, size_bytes, gate)?;
    to.set_len(size_bytes)?;
    given.give(to)?;
    Ok(given)
}

/// The attributes that a plain file gets beside its content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Given {
    perm: u32,
    atime: Timestamp,
    mtime: Timestamp,
}

impl Given {
    pub fn of(file: &File) -> std::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self {
            perm: stat.st_mode & 0o777,
            atime: Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32),
            mtime: Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32),
        })
    }

    /// The values that the catalog has.
    pub fn known(attr: &Attr) -> Self {
        Self { perm: attr.perm & 0o777 | 0o600, atime: attr.atime, mtime: attr.mtime }
    }

    pub fn give(self, file: &File) -> std::io::Result<()> {
        rustix::fs::fchmod(file, rustix::fs::Mode::from_raw_mode(self.perm))?;
        self.give_times(file)
    }

    pub fn give_times(self, file: &File) -> std::io::Result<()> {
        let spec =
            |time: Timestamp| rustix::fs::Timespec { tv_sec: time.secs(), tv_nsec: i64::from(time.subsec_nanos()) };
        let times = rustix::fs::Timestamps { last_access: spec(self.atime), last_modification: spec(self.mtime) };
        Ok(rustix::fs::futimens(file, &times)?)
    }
}

pub(crate) fn is_full(why: &std::io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

pub(crate) fn write_all_at(file: &File, data: &[u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, data, offset)
}
