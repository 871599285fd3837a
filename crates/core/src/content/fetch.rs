//! The bytes of a file while they come from a store that serves only ranges.
//!
//! States of a chunk: absent → wanted → fetching → present; a present chunk may become absent again to make room.
//!
//! - The chunks go to a sparse file. It is hidden on a tier and becomes the file's copy there when it is complete.
//!   Where no tier has room, it is an unlinked file of bounded size.
//! - Chunks that readers wait for are fetched first. After that come the chunks ahead of readers that continue where
//!   they were: 1, 2, 4, then 8 chunks. A reader that jumps about in a large file fetches only the chunks that it
//!   reads.
//! - Room is charged for each chunk. Without room, chunks that were read make room for wanted ones. Another read of a
//!   dropped chunk fetches it again.
//! - An incomplete file is dropped when no process has the file open any more. A part of a file is of no use to a direct
//!   open, and the next reader may never need that part.
//!
//! The dangers that this avoids:
//! - A reader of a few bytes causes the transfer of a hundred gigabytes.
//! - One file has bytes of two versions. (All ranges are of one version, or fail.)
//! - A chunk is punched out while a process reads it (the reader pins it), or while the complete file becomes the copy.
//!
//! The lock here is a leaf. No request goes to the store or the tier under it, except the hole that makes room.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::FallocateFlags;

use surgetank_store::source::{RANGE_BYTES, RANGES_AT_ONCE};
use surgetank_store::{Remote, StorePath, verdict};
use surgetank_types::error::Errno;
use surgetank_types::model::DeviceId;
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::content::{Location, Placed};

/// The size of the window, used where no tier has room.
pub(crate) const WINDOW_BYTES: u64 = 8 * RANGE_BYTES;
/// The largest number of chunks that are fetched ahead of a reader.
const AHEAD_MAX: u64 = 8;
/// Two reads within this distance belong to one stream: the kernel reads ahead, and not always in order.
const NEAR_BYTES: u64 = 1 << 20;
/// A stream counts as sequential after this many bytes.
const BEGINS_BYTES: u64 = 256 << 10;
/// The number of streams of one file that are distinguished.
const STREAMS_MAX: usize = 8;
/// How often a waiting reader checks whether its process was killed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Absent,
    Wanted,
    Fetching,
    Present,
}

/// Why a chunk did not arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The store failed.
    Store(Errno),
    /// The chunk arrived and could not be written to its place.
    Place,
    /// A signal killed the reader's process.
    Killed,
}

/// The answer to a request for a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// The chunk is there, or on its way.
    Had,
    /// The caller has to give this many bytes of room first.
    Room(u64),
}

/// One reader, as the reads suggest.
#[derive(Debug, Clone, Copy)]
struct Stream {
    next: u64,
    /// Bytes read in sequence, without a jump.
    run_bytes: u64,
}

impl Stream {
    fn ahead(self) -> u64 {
        match self.run_bytes {
            ..BEGINS_BYTES => 0,
            run if run < RANGE_BYTES / 2 => 1,
            run if run < RANGE_BYTES => 2,
            run if run < 3 * RANGE_BYTES => 4,
            _ => AHEAD_MAX,
        }
    }
    fn wants(self, chunk: u64) -> bool {
        let at = self.next / RANGE_BYTES;
        // The kernel's reads can overtake one another and ask again for the chunk that was just finished.
        (at..=at + AHEAD_MAX).contains(&chunk) || self.next % RANGE_BYTES < NEAR_BYTES && chunk + 1 == at
    }
}

struct State {
    remote: Arc<dyn Remote>,
    /// The file's path in the store.
    path: StorePath,
    chunks: Vec<Chunk>,
    missing: usize,
    /// In order of request.
    present: VecDeque<u64>,
    demanded: VecDeque<u64>,
    ahead: VecDeque<u64>,
    pins: HashMap<u64, u32>,
    failures: u64,
    failed: HashMap<u64, (u64, Failure)>,
    /// The most recent stream first.
    streams: Vec<Stream>,
    workers: usize,
    /// Room that no chunk uses yet.
    credit_bytes: u64,
    charged_bytes: u64,
    ended: bool,
}

pub(crate) struct Fetch {
    pub size_bytes: u64,
    /// The hidden file on a tier; `None`: a window without a name.
    pub placed: Option<Placed>,
    file: Arc<File>,
    state: Mutex<State>,
    came: Condvar,
}

impl std::fmt::Debug for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetch").field("size_bytes", &self.size_bytes).finish_non_exhaustive()
    }
}

/// A chunk that a process reads: it stays while this value exists.
pub(crate) struct Pinned<'a> {
    fetch: &'a Fetch,
    chunk: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let mut state = self.fetch.state();
        if let Some(count) = state.pins.get_mut(&self.chunk) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(&self.chunk);
            }
        }
    }
}

pub(crate) fn chunk_of(offset: u64) -> u64 {
    offset / RANGE_BYTES
}

impl Fetch {
    /// A window has its room from the beginning.
    pub fn new(
        remote: Arc<dyn Remote>,
        path: StorePath,
        size_bytes: u64,
        file: Arc<File>,
        placed: Option<Placed>,
    ) -> Self {
        let count = usize::try_from(size_bytes.div_ceil(RANGE_BYTES)).unwrap_or(usize::MAX);
        let credit_bytes = if placed.is_none() { WINDOW_BYTES } else { 0 };
        let state = State {
            remote,
            path,
            chunks: vec![Chunk::Absent; count],
            missing: count,
            present: VecDeque::new(),
            demanded: VecDeque::new(),
            ahead: VecDeque::new(),
            pins: HashMap::new(),
            failures: 0,
            failed: HashMap::new(),
            streams: Vec::new(),
            workers: 0,
            credit_bytes,
            charged_bytes: 0,
            ended: false,
        };
        Self { size_bytes, placed, file, state: Mutex::new(state), came: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn device(&self) -> Option<DeviceId> {
        match self.placed.as_ref()?.content.location {
            Location::Tier(device) => Some(device),
            _ => None,
        }
    }

    fn chunk_bytes(&self, chunk: u64) -> u64 {
        self.size_bytes.saturating_sub(chunk * RANGE_BYTES).min(RANGE_BYTES)
    }

    pub fn chunks(&self) -> u64 {
        self.size_bytes.div_ceil(RANGE_BYTES)
    }

    pub fn is_complete(&self) -> bool {
        self.state().missing == 0
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    pub fn remote(&self) -> (Arc<dyn Remote>, StorePath) {
        let state = self.state();
        (state.remote.clone(), state.path.clone())
    }

    /// Continues with the same bytes under another name, or with other attributes.
    pub fn goes_on_with(&self, remote: Arc<dyn Remote>, path: StorePath) {
        let mut state = self.state();
        (state.remote, state.path) = (remote, path);
    }

    /// The number of failures until now.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }

    /// Why the last chunk failed after that count, if that chunk has not arrived since.
    pub fn failed_after(&self, failures_before: u64) -> Option<Failure> {
        let state = self.state();
        let failed = state.failed.values().filter(|(number, _)| *number > failures_before);
        failed.max_by_key(|(number, _)| *number).map(|(_, why)| *why)
    }

    /// Records a read. Returns how many chunks ahead of its end are worth fetching.
    pub fn follow(&self, offset: u64, length: u64) -> u64 {
        let mut state = self.state();
        let end = offset.saturating_add(length).min(self.size_bytes);
        let known = state.streams.iter().position(|stream| stream.next.abs_diff(offset) <= NEAR_BYTES);
        let stream = match known {
            Some(at) => {
                let mut stream = state.streams.remove(at);
                stream.run_bytes += end.saturating_sub(stream.next);
                stream.next = stream.next.max(end);
                stream
            }
            None => {
                // A jump drops the chunks that were queued ahead for other streams. Those streams request them again.
                while let Some(chunk) = state.ahead.pop_front() {
                    state.chunks[index(chunk)] = Chunk::Absent;
                    state.credit_bytes += self.chunk_bytes(chunk);
                }
                self.came.notify_all();
                let run_bytes = if offset == 0 { end } else { 0 };
                Stream { next: end, run_bytes }
            }
        };
        state.streams.insert(0, stream);
        state.streams.truncate(STREAMS_MAX);
        stream.ahead()
    }

    /// Queues a chunk, if there is room for it.
    pub fn want(&self, chunk: u64, ahead: bool) -> Want {
        let mut state = self.state();
        let length = self.chunk_bytes(chunk);
        match state.chunks.get(index(chunk)) {
            Some(Chunk::Absent) if !state.ended => {}
            // A chunk that was queued ahead moves to the demanded ones.
            Some(Chunk::Wanted) if !ahead => {
                if let Some(at) = state.ahead.iter().position(|other| *other == chunk) {
                    state.ahead.remove(at);
                    state.demanded.push_back(chunk);
                }
                return Want::Had;
            }
            _ => return Want::Had,
        }
        if state.credit_bytes < length {
            return Want::Room(length - state.credit_bytes);
        }
        state.credit_bytes -= length;
        state.chunks[index(chunk)] = Chunk::Wanted;
        if ahead {
            state.ahead.push_back(chunk);
        } else {
            state.demanded.push_back(chunk);
        }
        Want::Had
    }

    /// Adds room that the caller has charged on the device. `false`: the fetch has ended and does not need it.
    pub fn give(&self, bytes: u64) -> bool {
        let mut state = self.state();
        if !state.ended {
            state.credit_bytes += bytes;
            state.charged_bytes += bytes;
        }
        !state.ended
    }

    /// Drops a chunk to make room for another one. `forced`: a reader waits, so a chunk that other streams want soon may go.
    pub fn recycle(&self, forced: bool) -> bool {
        let mut state = self.state();
        // (All has come since the caller asked. It may just become the file's copy: from now on it keeps all.)
        if state.missing == 0 {
            return true;
        }
        let idle = |state: &State, chunk: u64| !state.pins.contains_key(&chunk);
        let wanted = |state: &State, chunk: u64| state.streams.iter().any(|stream| stream.wants(chunk));
        let at = state
            .present
            .iter()
            .position(|chunk| idle(&state, *chunk) && !wanted(&state, *chunk))
            .or_else(|| state.present.iter().position(|chunk| forced && idle(&state, *chunk)));
        at.is_some_and(|at| self.punch(&mut state, at).is_some())
    }

    /// Drops one of the present chunks.
    fn punch(&self, state: &mut State, at: usize) -> Option<u64> {
        let chunk = *state.present.get(at)?;
        let length = self.chunk_bytes(chunk);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&*self.file, flags, chunk * RANGE_BYTES, length).ok()?;
        state.present.remove(at);
        state.chunks[index(chunk)] = Chunk::Absent;
        state.missing += 1;
        state.credit_bytes += length;
        Some(length)
    }

    /// A writer needs the room. Returns the bytes that were freed, for the caller to discharge.
    pub fn squeeze(&self) -> u64 {
        let mut state = self.state();
        if state.missing == 0 || state.ended {
            return 0;
        }
        let mut at = 0;
        while at < state.present.len() {
            let chunk = state.present[at];
            // The chunk that a stream is reading stays; otherwise its reader would fetch it again for every read.
            let here = |stream: &Stream| stream.next / RANGE_BYTES == chunk;
            let stays = state.pins.contains_key(&chunk) || state.streams.iter().any(here);
            if stays || self.punch(&mut state, at).is_none() {
                at += 1;
            }
        }
        let freed = std::mem::take(&mut state.credit_bytes).min(state.charged_bytes);
        state.charged_bytes -= freed;
        freed
    }

    /// Ends the fetch. Returns the bytes for the caller to discharge.
    pub fn end(&self) -> u64 {
        let mut state = self.state();
        state.ended = true;
        state.demanded.clear();
        state.ahead.clear();
        state.credit_bytes = 0;
        self.came.notify_all();
        std::mem::take(&mut state.charged_bytes)
    }

    /// Waits for a requested chunk. `None`: the chunk was dropped again, or the fetch ended; the caller asks again.
    pub fn wait(
        &self,
        chunk: u64,
        failures_before: u64,
        killed: &dyn Fn() -> bool,
    ) -> Result<Option<Pinned<'_>>, Failure> {
        let mut state = self.state();
        loop {
            match state.chunks.get(index(chunk)) {
                Some(Chunk::Present) => {
                    *state.pins.entry(chunk).or_default() += 1;
                    return Ok(Some(Pinned { fetch: self, chunk }));
                }
                Some(Chunk::Wanted | Chunk::Fetching) if !state.ended => {}
                _ => {
                    let failed = state.failed.get(&chunk).filter(|(number, _)| *number > failures_before);
                    return failed.map_or(Ok(None), |(_, why)| Err(*why));
                }
            }
            if killed() {
                return Err(Failure::Killed);
            }
            state = self.came.wait_timeout(state, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Starts as many threads as the queued chunks need.
    pub fn start(self: &Arc<Self>) {
        loop {
            let mut state = self.state();
            let queued = state.demanded.len() + state.ahead.len();
            if state.workers >= queued.min(RANGES_AT_ONCE) {
                return;
            }
            state.workers += 1;
            let alone = state.workers == 1;
            drop(state);
            let this = self.clone();
            let spawned = surgetank_types::sync::thread::Builder::new()
                .name("fetch".to_owned())
                .spawn(move || this.work())
                .map(drop);
            match spawned {
                Ok(()) => {}
                // The waiting thread fetches by itself.
                Err(_) if alone => return self.work(),
                Err(_) => {
                    self.state().workers -= 1;
                    return;
                }
            }
        }
    }

    fn work(&self) {
        let mut buffer = Vec::new();
        while let Some((chunk, remote)) = self.take() {
            buffer.resize(usize::try_from(self.chunk_bytes(chunk)).unwrap_or(0), 0);
            let at = chunk * RANGE_BYTES;
            let fetched = match remote.read_at(&mut buffer, at) {
                Ok(()) => self.file.write_all_at(&buffer, at).map_err(|why| {
                    tracing::warn!(%why, "fetched bytes could not be kept");
                    Failure::Place
                }),
                Err(why) => Err(Failure::Store(verdict::errno_of(&why))),
            };
            self.took(chunk, fetched, &remote);
        }
    }

    /// The next chunk to fetch. `None`: the queues are empty, and this thread ends.
    fn take(&self) -> Option<(u64, Arc<dyn Remote>)> {
        let mut state = self.state();
        let next = if state.ended { None } else { state.demanded.pop_front().or_else(|| state.ahead.pop_front()) };
        match next {
            Some(chunk) => state.chunks[index(chunk)] = Chunk::Fetching,
            None => state.workers -= 1,
        }
        next.map(|chunk| (chunk, state.remote.clone()))
    }

    fn took(&self, chunk: u64, fetched: Result<(), Failure>, asked: &Arc<dyn Remote>) {
        let mut state = self.state();
        match fetched {
            Ok(()) => {
                state.chunks[index(chunk)] = Chunk::Present;
                state.missing -= 1;
                state.present.push_back(chunk);
                state.failed.remove(&chunk);
            }
            Err(why) => {
                state.chunks[index(chunk)] = Chunk::Absent;
                state.credit_bytes += if state.ended { 0 } else { self.chunk_bytes(chunk) };
                // The failure is about the old path and does not concern the new one: the waiting reader asks again.
                if Arc::ptr_eq(asked, &state.remote) {
                    state.failures += 1;
                    let number = state.failures;
                    state.failed.insert(chunk, (number, why));
                }
            }
        }
        drop(state);
        self.came.notify_all();
    }
}

fn index(chunk: u64) -> usize {
    usize::try_from(chunk).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use surgetank_types::model::StoreIdentity;

    use super::*;

    struct Ones;

    impl Remote for Ones {
        fn identity(&self) -> StoreIdentity {
            StoreIdentity { ino: 1, size_bytes: 2 * RANGE_BYTES, mtime_nanos: 0, ctime_nanos: 0 }
        }

        fn read_at(&self, buffer: &mut [u8], _offset: u64) -> std::io::Result<()> {
            buffer.fill(1);
            Ok(())
        }
    }

    /// Regression: a reader wanted room for a chunk that came meanwhile. It punched another one out of the complete file, while that
    /// became the copy on the tier.
    #[test]
    fn complete_file_keeps_all_for_a_reader_that_still_wants_room() {
        let size_bytes = 2 * RANGE_BYTES;
        let file = Arc::new(tempfile::tempfile().unwrap());
        let fetch = Arc::new(Fetch::new(Arc::new(Ones), StorePath(b"f".to_vec()), size_bytes, file, None));
        fetch.state().credit_bytes = RANGE_BYTES;
        assert_eq!(fetch.want(0, false), Want::Had);
        let late = fetch.want(1, false);
        assert_eq!(late, Want::Room(RANGE_BYTES), "the reader that is slow");
        assert!(fetch.give(RANGE_BYTES) && fetch.want(1, false) == Want::Had, "another one");
        fetch.start();
        (0..2).for_each(|chunk| drop(fetch.wait(chunk, 0, &|| false).unwrap().unwrap()));
        assert!(fetch.is_complete());
        assert!(fetch.recycle(true) && fetch.is_complete(), "nothing is dropped any more");
        let mut bytes = vec![0; usize::try_from(size_bytes).unwrap()];
        fetch.file().read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 1));
    }
}
