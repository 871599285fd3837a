//! The bytes of a file while they come from a store that gives them by ranges only: chunks, who waits for which, and what
//! is fetched ahead.
//!
//! The chunks come into a sparse file: a hidden one on a tier, which becomes the file's copy there when nothing is missing
//! any more, or, where no tier has room, an unlinked one of bounded size. What readers wait for is fetched first; after
//! that what lies ahead of those that read on from where they were, the farther the longer they do so: 1, 2, 4, 8 chunks.
//! Whoever jumps about in a large file causes no more than the chunks that he touches. Room is charged chunk by chunk, and
//! when there is none, chunks that were read make way for those that are wanted and would have to be fetched again.
//!
//! What is dropped when nobody has the file open any more: whatever is not complete. (A part of a file is of no use to
//! whoever opens it directly, and the next reader may never want that part.)
//!
//! The dangers avoided: a reader of a few bytes who fetches a hundred gigabytes; bytes of two versions in one file (all
//! ranges are of one version, or fail); a chunk that is punched out while somebody reads it (he pins it). The lock in here
//! is a leaf: neither store nor tier is asked for anything under it, but for the hole that makes room.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::FallocateFlags;

use surgetank_store::source::{RANGE_BYTES, RANGES_AT_ONCE};
use surgetank_store::verdict;
use surgetank_store::{Remote, StorePath};
use surgetank_types::error::Errno;
use surgetank_types::model::DeviceId;
use surgetank_types::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::content::Location;
use super::files::Placed;

/// Where no tier has room: so much at a time.
pub(crate) const WINDOW_BYTES: u64 = 8 * RANGE_BYTES;
/// The farthest that is fetched ahead of a reader.
const AHEAD_MAX: u64 = 8;
/// Two reads that are not farther apart go on from one another: the kernel asks ahead, and not always in order.
const NEAR_BYTES: u64 = 1 << 20;
/// Who has read on for so long reads on.
const BEGINS_BYTES: u64 = 256 << 10;
/// So many readers of one file are told apart.
const STREAMS_MAX: usize = 8;
/// Who waits looks this often whether his program still does.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Absent,
    Wanted,
    Fetching,
    Present,
}

/// Why a chunk did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The store's.
    Store(Errno),
    /// It came, and could not be kept.
    Place,
    /// Its reader is wanted no more.
    Killed,
}

/// What came of asking for a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// There, or on its way.
    Had,
    /// So much room has to be given first.
    Room(u64),
}

/// One reader, as far as reads tell.
#[derive(Debug, Clone, Copy)]
struct Stream {
    next: u64,
    /// Read on without a jump.
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
        // (What was just read to its end is asked for again where the kernel's reads overtake one another.)
        (at..=at + AHEAD_MAX).contains(&chunk) || self.next % RANGE_BYTES < NEAR_BYTES && chunk + 1 == at
    }
}

struct State {
    remote: Arc<dyn Remote>,
    /// Where the store has it.
    path: StorePath,
    chunks: Vec<Chunk>,
    missing: usize,
    /// In the order in which they came.
    present: VecDeque<u64>,
    demanded: VecDeque<u64>,
    ahead: VecDeque<u64>,
    pins: HashMap<u64, u32>,
    failures: u64,
    failed: HashMap<u64, (u64, Failure)>,
    /// The last one first.
    streams: Vec<Stream>,
    workers: usize,
    /// Room that no chunk has yet.
    credit_bytes: u64,
    charged_bytes: u64,
    ended: bool,
}

pub(crate) struct Arrival {
    pub size_bytes: u64,
    /// The hidden file on a tier; `None`: a window without a name.
    pub placed: Option<Placed>,
    file: Arc<File>,
    state: Mutex<State>,
    came: Condvar,
}

impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrival").field("size_bytes", &self.size_bytes).finish_non_exhaustive()
    }
}

/// A chunk that is being read, and stays.
pub(crate) struct Pinned<'a> {
    arrival: &'a Arrival,
    chunk: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let mut state = self.arrival.state();
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

impl Arrival {
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

    /// The same bytes under another name, or with other attributes.
    pub fn goes_on_with(&self, remote: Arc<dyn Remote>, path: StorePath) {
        let mut state = self.state();
        (state.remote, state.path) = (remote, path);
    }

    /// So many chunks did not come until now.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }

    /// Why a chunk did not come since then, if it has not come after that.
    pub fn failed_after(&self, failures_before: u64) -> Option<Failure> {
        let state = self.state();
        let failed = state.failed.values().filter(|(number, _)| *number > failures_before);
        failed.max_by_key(|(number, _)| *number).map(|(_, why)| *why)
    }

    /// Somebody reads here. Returns how many chunks ahead of the end of the read are worth fetching.
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
                // A jump: what was to be fetched ahead of others comes again when they read on.
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

    /// Puts a chunk on the list, if it has room.
    pub fn want(&self, chunk: u64, ahead: bool) -> Want {
        let mut state = self.state();
        let length = self.chunk_bytes(chunk);
        match state.chunks.get(index(chunk)) {
            Some(Chunk::Absent) if !state.ended => {}
            // From ahead to the front.
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

    /// Room that was charged on its device; `false`: too late, it is not wanted any more.
    pub fn give(&self, bytes: u64) -> bool {
        let mut state = self.state();
        if !state.ended {
            state.credit_bytes += bytes;
            state.charged_bytes += bytes;
        }
        !state.ended
    }

    /// A chunk makes way for another one. Whoever is waited for may take what others will want soon.
    pub fn recycle(&self, forced: bool) -> bool {
        let mut state = self.state();
        let idle = |state: &State, chunk: u64| !state.pins.contains_key(&chunk);
        let wanted = |state: &State, chunk: u64| state.streams.iter().any(|stream| stream.wants(chunk));
        let at = state
            .present
            .iter()
            .position(|chunk| idle(&state, *chunk) && !wanted(&state, *chunk))
            .or_else(|| state.present.iter().position(|chunk| forced && idle(&state, *chunk)));
        at.is_some_and(|at| self.punch(&mut state, at).is_some())
    }

    /// Drops one of the chunks that are there.
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

    /// A writer needs the room more. Returns what was given back, to be discharged.
    pub fn squeeze(&self) -> u64 {
        let mut state = self.state();
        if state.missing == 0 || state.ended {
            return 0;
        }
        let mut at = 0;
        while at < state.present.len() {
            let chunk = state.present[at];
            // Not what is being read just now, or its reader would have to fetch it for every read.
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

    /// Nobody wants it any more. Returns what is to be discharged.
    pub fn end(&self) -> u64 {
        let mut state = self.state();
        state.ended = true;
        state.demanded.clear();
        state.ahead.clear();
        state.credit_bytes = 0;
        self.came.notify_all();
        std::mem::take(&mut state.charged_bytes)
    }

    /// Waits for a chunk that was asked for. `None`: it made way again, or was given up: ask once more.
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
                    return Ok(Some(Pinned { arrival: self, chunk }));
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

    /// Has what is wanted fetched, by as many threads as that takes.
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
                .name("arrive".to_owned())
                .spawn(move || this.work())
                .map(drop);
            match spawned {
                Ok(()) => {}
                // Whoever waits does it himself.
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
                    tracing::warn!(%why, "what came from the store could not be kept");
                    Failure::Place
                }),
                Err(why) => Err(Failure::Store(verdict::errno_of(&why))),
            };
            self.took(chunk, fetched, &remote);
        }
    }

    /// The next one; `None`: nothing is wanted, and this thread goes.
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
                // (Where it was before says nothing about where it is now: whoever waits asks once more.)
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
