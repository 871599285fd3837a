//! Reads of files that are still arriving, and the end of a fetch: complete, completed for a writer, or dropped.
//!
//! A reader requests its chunks and those ahead of it, and waits without a lock. Where there is no room for a chunk,
//! its bytes come straight from the store.
//!
//! The dangers that this avoids:
//! - A process writes a file whose bytes are not all there. (The writer waits for them.)
//! - Readers lose a file that is deleted or replaced meanwhile. (The drain waits for the rest of the file, and retries
//!   within its retry window.)

use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use surgetank_policy::placement::AskKind;
use surgetank_store::source::RANGE_BYTES;
use surgetank_store::verdict::{Verdict, classify};
use surgetank_store::{Remote, Source};
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{FileId, RunId, data_bytes};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::users::own_cred;
use crate::content::fetch::{Failure, Fetch, Want, chunk_of};
use crate::content::{Content, Location, Open};
use crate::files::Via;
use crate::files::fetch_open::{Fetches, LOOKS_MAX, There};
use crate::report::run::EventKind;

/// How long the drain may take to record what it did to a file.
const TIMEOUT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For another chunk, an eviction frees at least this share of a full device.
const EVICT_SHARE: u64 = 16;

/// The store's error as a program sees it. (Programs do not expect EAGAIN from a read of a file.)
pub(crate) fn as_fault(why: io::Error) -> Fault {
    match Fault::from(why) {
        fault if fault.errno == Errno::AGAIN => Fault { errno: Errno::IO, ..fault },
        fault => fault,
    }
}

impl Fetches {
    /// Reads up to the end of a chunk at most, after the chunk arrives. `None`: the file is not arriving any more.
    pub(crate) fn read_fetching(
        &self,
        open: &Open,
        fetch: &Arc<Fetch>,
        offset: u64,
        buffer: &mut [u8],
    ) -> FsResult<Option<usize>> {
        let Some(left) = fetch.size_bytes.checked_sub(offset).filter(|left| *left > 0) else { return Ok(Some(0)) };
        let length = left.min(buffer.len() as u64);
        let chunk = chunk_of(offset);
        let here = length.min((chunk + 1) * RANGE_BYTES - offset);
        let buffer = &mut buffer[..usize::try_from(here).unwrap_or(0)];
        // The part that the caller reads next is certain to be needed.
        let end = chunk_of(offset + length - 1);
        let last = (end + fetch.follow(offset, here)).min(fetch.chunks() - 1);
        loop {
            let (remote, failures) = (fetch.remote().0, fetch.failures());
            let kept = self.want_chunk(fetch, chunk, false);
            let _all = kept && (chunk + 1..=last).all(|next| self.want_chunk(fetch, next, true));
            fetch.start();
            let came = match kept {
                true => fetch.wait(chunk, failures, &|| self.waits.is_killed()),
                false => Err(Failure::Place),
            };
            match came {
                Ok(Some(_pinned)) => {
                    let _gate = open.gate.read().unwrap_or_else(PoisonError::into_inner);
                    if !open.fetch().is_some_and(|now| Arc::ptr_eq(&now, fetch)) {
                        return Ok(None);
                    }
                    fetch.file().read_exact_at(buffer, offset)?;
                    return Ok(Some(buffer.len()));
                }
                // A writer waited for the whole file, or had it fetched.
                Ok(None) if !open.fetch().is_some_and(|now| Arc::ptr_eq(&now, fetch)) => return Ok(None),
                Ok(None) => {}
                Err(Failure::Killed) => return Err(Errno::INTR.into()),
                Err(Failure::Place) => match remote.read_at(buffer, offset) {
                    Ok(()) => return Ok(Some(buffer.len())),
                    Err(why) if is_stale(&why) && self.goes_on(open.id, fetch, &remote) => {}
                    Err(why) => return Err(as_fault(why)),
                },
                Err(Failure::Store(Errno::STALE)) if self.goes_on(open.id, fetch, &remote) => {}
                Err(Failure::Store(errno)) => return Err(as_fault(errno.into())),
            }
        }
    }

    /// `false`: there is no room for the chunk.
    fn want_chunk(&self, fetch: &Fetch, chunk: u64, ahead: bool) -> bool {
        loop {
            match fetch.want(chunk, ahead) {
                Want::Had => return true,
                Want::Room(bytes) if self.room_to_fetch(fetch, bytes) || fetch.recycle(!ahead) => {}
                Want::Room(_) => return false,
            }
        }
    }

    fn room_to_fetch(&self, fetch: &Fetch, bytes: u64) -> bool {
        let Some(id) = fetch.device() else { return false };
        let device = self.tiers.device(id);
        let mut granted = device.try_reserve(bytes);
        if !granted && self.metadata.read_tree().clean.any_on(id) {
            self.eviction.evict_from(id, bytes.max(device.view().cap_bytes / EVICT_SHARE));
            granted = device.try_reserve(bytes);
        }
        if granted {
            self.eviction.charge_fetching(id, i64::try_from(bytes).unwrap_or(i64::MAX));
            device.unreserve(bytes);
            if !fetch.give(bytes) {
                self.eviction.charge_fetching(id, -i64::try_from(bytes).unwrap_or(i64::MAX));
            }
        }
        granted
    }

    /// The version is not at its path any more. If the agent's own drain renamed the file or changed its attributes,
    /// the rest comes from its new place.
    fn goes_on(&self, id: FileId, fetch: &Fetch, asked: &Arc<dyn Remote>) -> bool {
        let until = clock::tick() + TIMEOUT;
        loop {
            let (before, path) = fetch.remote();
            // Another reader found it meanwhile.
            if !Arc::ptr_eq(&before, asked) {
                return true;
            }
            let (queued, ours) = {
                let tree = self.metadata.read_tree();
                let Some(inode) = tree.get(id) else { return false };
                // Only the drain changes these while a process has the file open.
                let known = inode.identity;
                let ours = known != Some(before.identity()) || tree.applied_path(id).as_ref() != Some(&path);
                (tree.is_queued(id), ours)
            };
            if !ours && !queued && !self.metadata.may_move(id, Some(&path)) {
                return false;
            }
            let found = ours.then(|| self.there_as_known(id, fetch.size_bytes)).flatten();
            if let Some(There { remote, path }) = found {
                fetch.goes_on_with(remote, path);
                return true;
            }
            if clock::tick() >= until {
                return false;
            }
            surgetank_types::sync::thread::sleep(LOOK_EVERY);
        }
    }

    /// What the store has, if it is the version that the agent knows.
    fn there_as_known(&self, id: FileId, size_bytes: u64) -> Option<There> {
        let (path, owner) = {
            let tree = self.metadata.read_tree();
            (tree.applied_path(id)?, tree.get(id)?.cred())
        };
        let source = self.queries.must_ask((own_cred(owner), &path), |store, who, path| store.source(who, path));
        let Ok(Source::Remote(remote)) = source else { return None };
        let known = self.metadata.read_tree().get(id)?.identity;
        let is = remote.identity();
        let same = known.is_some_and(|known| known.is_still(&is)) && is.size_bytes == size_bytes;
        same.then_some(There { remote, path })
    }

    /// The file is complete: the hidden file becomes its copy on the tier, unless another thread holds the inode's lock.
    pub(crate) fn try_complete(&self, open: &Arc<Open>, fetch: &Fetch) {
        if fetch.is_complete()
            && let Some(_inode) = self.metadata.try_lock_inode(open.id)
        {
            self.complete_fetch(open);
        }
    }

    /// The caller holds the inode's lock. `false`: the file is not complete, or the store has another version now.
    pub(crate) fn complete_fetch(&self, open: &Open) -> bool {
        let Some(fetch) = open.fetch().filter(|fetch| fetch.is_complete()) else { return false };
        let (Some(placed), Some(device)) = (&fetch.placed, fetch.device()) else { return false };
        let at = || {
            let tree = self.metadata.read_tree();
            let inode = tree.get(open.id).filter(|inode| inode.logical.is_some())?;
            Some((tree.applied_path(open.id)?, inode.cred(), inode.identity?))
        };
        let Some((path, owner, known)) = at() else { return false };
        let (who, there) = (own_cred(owner), path.clone());
        let stat = self.queries.would_ask(move |store| store.stat(who, &there));
        let unchanged = stat.is_some_and(|stat| stat.is_ok_and(|stat| known.is_still(&stat.identity)));
        if !unchanged || at() != Some((path, owner, known)) {
            return false;
        }
        // A descriptor for writing would prevent the agent's own leases.
        let Ok(file) = crate::files::place::reopen_read_only(fetch.file()) else { return false };
        let mut tree = self.metadata.write_tree();
        let Ok(charged_bytes) = self.take_in(&mut tree, open.id, placed, fetch.file()) else { return false };
        open.charged_bytes.store(charged_bytes, Ordering::Relaxed);
        open.replace(Content { file: Arc::new(file), location: Location::Tier(device), writable: false });
        drop(tree);
        open.take_fetch();
        self.eviction.charge_fetching(device, -i64::try_from(fetch.end()).unwrap_or(i64::MAX));
        let written_bytes = data_bytes(fetch.size_bytes, charged_bytes / 512);
        self.tiers.device(device).counters().bytes_in.fetch_add(written_bytes, Ordering::Relaxed);
        let place = self.tiers.device(device).tier_name();
        self.events.count(EventKind::Fetched, place, "opened while only the store had it", fetch.size_bytes);
        true
    }

    /// No process has it open any more. The caller holds the inode's lock.
    pub(crate) fn end_fetch(&self, open: &Open) {
        if open.fetch().is_some() && !self.complete_fetch(open) {
            self.drop_fetch(open);
        }
    }

    fn drop_fetch(&self, open: &Open) {
        let Some(fetch) = open.take_fetch() else { return };
        let charged_bytes = fetch.end();
        if let (Some(placed), Some(device)) = (&fetch.placed, fetch.device()) {
            self.placer.undo_placed(&mut self.metadata.write_tree(), placed);
            self.eviction.charge_fetching(device, -i64::try_from(charged_bytes).unwrap_or(i64::MAX));
        }
    }

    /// Brings the whole file to a tier for a writer. Its readers continue. The caller holds the inode's lock.
    pub(crate) fn fetch_whole(&self, open: &Open, truncates: bool) -> FsResult<()> {
        let Some(fetch) = open.fetch() else { return Ok(()) };
        if truncates {
            let placed = self.placer.open_placed(open.id, None, 0, Via::Mount)?;
            self.open_files.unback(&placed);
            open.replace(placed.content());
            self.drop_fetch(open);
            return Ok(());
        }
        let failures = fetch.failures();
        while self.want_all(&fetch) && fetch.failures() == failures {
            if self.complete_fetch(open) {
                return Ok(());
            }
            if fetch.is_complete() {
                break;
            }
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            surgetank_types::sync::thread::sleep(LOOK_EVERY);
        }
        // The file does not fit, or a chunk failed: fetch all of it again, where there is room.
        let id = open.id;
        self.room_waits.with_room((Some(id), b"", RunId(0)), || self.bring_in_instead(id, &fetch))?;
        let content = self.copies.content_of(id).ok_or(Errno::STALE)?;
        let charged_bytes = self.metadata.read_tree().get(id).map_or(0, |inode| inode.charged_bytes);
        open.charged_bytes.store(charged_bytes, Ordering::Relaxed);
        open.replace(content);
        self.drop_fetch(open);
        Ok(())
    }

    /// Fetches the whole file again. It must match the bytes that its readers have read.
    fn bring_in_instead(&self, id: FileId, fetch: &Fetch) -> FsResult<()> {
        let bytes = fetch.size_bytes;
        for _ in 0..LOOKS_MAX {
            let (remote, _) = fetch.remote();
            match self.there_as_known(id, bytes) {
                Some(there) => match self.bring_in(id, &there, AskKind::CopyUp { bytes }) {
                    Err(fault) if fault.errno == Errno::STALE => {}
                    brought => return brought,
                },
                None if self.goes_on(id, fetch, &remote) => {}
                None => break,
            }
        }
        Err(Errno::STALE.into())
    }

    /// `false`: there is no room for all of it.
    fn want_all(&self, fetch: &Arc<Fetch>) -> bool {
        let room = |chunk| loop {
            match fetch.want(chunk, true) {
                Want::Had => return true,
                Want::Room(bytes) if self.room_to_fetch(fetch, bytes) => {}
                Want::Room(_) => return false,
            }
        };
        let all = fetch.placed.is_some() && (0..fetch.chunks()).all(room);
        fetch.start();
        all
    }

    /// The store's file is about to go, so its readers need the rest first. `stop`: the caller gives up the wait.
    ///
    /// Errors: the rest does not come now, and may come later.
    pub(crate) fn await_fetch(&self, id: FileId, stop: &dyn Fn() -> bool) -> Result<(), Errno> {
        let Some(fetch) = self.metadata.open_of(id).and_then(|open| open.fetch()) else { return Ok(()) };
        let seen = || (fetch.remote().0, fetch.failures());
        let (mut remote, mut failures) = seen();
        while !fetch.is_complete() && self.want_all(&fetch) && !stop() {
            if self.metadata.open_of(id).is_none_or(|open| open.fetch().is_none()) {
                break;
            }
            match fetch.failed_after(failures) {
                None => surgetank_types::sync::thread::sleep(LOOK_EVERY),
                // The store has another version now, or none under this name.
                Some(Failure::Store(Errno::STALE)) => match self.goes_on(id, &fetch, &remote) {
                    true => (remote, failures) = seen(),
                    false => break,
                },
                Some(Failure::Store(errno)) if classify(errno) == Verdict::Retry => return Err(errno),
                Some(_) => break,
            }
        }
        Ok(())
    }
}

fn is_stale(why: &io::Error) -> bool {
    why.raw_os_error() == Some(libc::ESTALE)
}
