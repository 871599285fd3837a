//! Bytes through the agent: reads and writes of mediated files. Also the operations that the kernel never applies to
//! the plain file directly: allocation, holes, copies between files, sync.
//!
//! The danger that this avoids: fsync returns before the bytes are where it promises them.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use surgetank_store::Store;
use surgetank_tier::Tiers;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::RunId;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::events::Events;
use crate::base::notes::Notes;
use crate::base::queries::StoreQueries;
use crate::base::succession::Succession;
use crate::base::{Base, Counters};
use crate::content::{Location, append_all, reopen_writable};
use crate::files::RoomWait;
use crate::files::deadline::DeadlineWatch;
use crate::files::evict::Eviction;
use crate::files::fetch_open::Fetches;
use crate::files::open_files::OpenFiles;
use crate::files::place::Placer;
use crate::files::room::WriteAt;
use crate::files::room_wait::RoomWaits;
use crate::metadata::Metadata;

/// The limit of bytes for one copy_file_range call; programs call again.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// Reads and writes of mediated files.
pub struct Transfers {
    pub(super) counters: Arc<Counters>,
    pub(super) events: Arc<Events>,
    pub(super) queries: Arc<StoreQueries>,
    pub(super) store: Arc<dyn Store>,
    pub(super) succession: Arc<Succession>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) deadline: Arc<DeadlineWatch>,
    pub(super) eviction: Arc<Eviction>,
    fetches: Arc<Fetches>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) notes: Arc<Notes>,
    open_files: Arc<OpenFiles>,
    pub(super) placer: Arc<Placer>,
    pub(super) room_waits: Arc<RoomWaits>,
}

impl Transfers {
    #[expect(clippy::too_many_arguments, reason = "one for each component that it uses")]
    pub(crate) fn new(
        base: &Base,
        deadline: &Arc<DeadlineWatch>,
        eviction: &Arc<Eviction>,
        fetches: &Arc<Fetches>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        placer: &Arc<Placer>,
        room_waits: &Arc<RoomWaits>,
    ) -> Self {
        Self {
            counters: base.counters.clone(),
            events: base.events.clone(),
            queries: base.queries.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            notes: base.notes.clone(),
            deadline: deadline.clone(),
            eviction: eviction.clone(),
            fetches: fetches.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            placer: placer.clone(),
            room_waits: room_waits.clone(),
        }
    }

    /// Reads into `buffer` from `offset`, and returns the number of bytes, which is less at the end only. Errors: an
    /// unknown handle, the device, the store.
    pub fn read(&self, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let handle = self.open_files.handle(fh)?;
        let mut done = 0;
        while let Some(fetch) = handle.open.fetch().filter(|_| done < buffer.len()) {
            match self.fetches.read_fetching(&handle.open, &fetch, offset + done as u64, &mut buffer[done..])? {
                // The end of the file.
                Some(0) => break,
                Some(count) => done += count,
                None => {}
            }
            self.fetches.try_complete(&handle.open, &fetch);
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
                        self.tiers.device_failed(device, &why);
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

    /// `appends`: the descriptor's present state, however it was opened (F_SETFL). Then `offset` is the end that the kernel believes.
    /// The data lands at the end of the content, and not before that offset.
    pub fn write(&self, fh: u64, offset: u64, data: &[u8], appends: bool) -> FsResult<usize> {
        let handle = self.open_files.handle(fh)?;
        if !handle.writes {
            return Err(Errno::BADF.into());
        }
        self.counters.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        if handle.open.direct {
            // Writes that the kernel cannot pass through, or sends here anyway, also go to the plain file.
            let file = reopen_writable(&handle.open.content().file)?;
            // (Processes with the shim may append at the same time.)
            let _appends = appends.then(|| handle.open.end.lock().unwrap_or_else(PoisonError::into_inner));
            let end = file.metadata()?.len();
            let offset = if appends { self.succession.append_at(fh, end) } else { offset };
            if appends && !is_begun_there(&file, data, offset, end)? {
                append_all(&file, data)?;
            } else {
                crate::files::room::write_all_at(&file, data, offset)?;
            }
            return Ok(data.len());
        }
        let at = if appends { WriteAt::End { fh, least: offset } } else { WriteAt::Offset(offset) };
        self.write_mediated(&handle.open, data, at)
    }

    /// Allocates or punches a range. `mode`: as for fallocate(2). Errors: an unknown handle, no room in any tier or the
    /// store, the device.
    pub fn allocate(&self, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        let handle = self.open_files.handle(fh)?;
        let open = &handle.open;
        let _mark = open.mark_written();
        let mut room_wait = RoomWait::default();
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
                    self.room_waits.has_room(&room_wait);
                    return Ok(());
                }
                Err(Errno::NOSPC) if mediated && matches!(content.location, Location::Tier(_)) => {
                    if let Err(fault) = self.spill(open, content.location, length, crate::files::SpilledBy::Writer) {
                        self.room_waits.await_room(&mut room_wait, (Some(open.id), b"", RunId(0)), fault)?;
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The next data or hole from `offset` (`SEEK_DATA`, `SEEK_HOLE`). Errors: EINVAL for another `whence`, ENXIO
    /// beyond the end.
    pub fn seek(&self, fh: u64, offset: u64, whence: i32) -> FsResult<u64> {
        let handle = self.open_files.handle(fh)?;
        let from = match whence {
            libc::SEEK_DATA => rustix::fs::SeekFrom::Data(offset),
            libc::SEEK_HOLE => rustix::fs::SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL.into()),
        };
        // A range that has not arrived yet is not a hole.
        if let Some(fetch) = handle.open.fetch() {
            let there = offset < fetch.size_bytes;
            return match whence {
                _ if !there => Err(Errno::NXIO.into()),
                libc::SEEK_DATA => Ok(offset),
                _ => Ok(fetch.size_bytes),
            };
        }
        Ok(rustix::fs::seek(&*handle.open.content().file, from)?)
    }

    /// Copies a range within the kernel, and returns the number of bytes. Errors: EOPNOTSUPP where the kernel has to
    /// read and write instead.
    pub fn copy_range(&self, from: u64, offset_in: u64, to: u64, offset_out: u64, length: u64) -> FsResult<u64> {
        let source = self.open_files.handle(from)?;
        let target = self.open_files.handle(to)?;
        let length = length.min(COPY_BYTES_MAX);
        let _mark = target.open.mark_written();
        let whole = source.open.fetch().is_none();
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
}

/// An earlier agent was to append at this offset: does the file have the beginning of the data there, up to its end at most?
/// (A process may have appended something else meanwhile.)
pub(super) fn is_begun_there(file: &std::fs::File, data: &[u8], offset: u64, end: u64) -> std::io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let there = usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX).min(data.len());
    let mut seen = vec![0; there];
    file.read_exact_at(&mut seen, offset)?;
    Ok(there > 0 && seen == data[..there])
}
