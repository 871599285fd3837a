//! Requests through the mount: counted by the thread that makes them, summed by process.
//!
//! The agent does not see passthrough reads and writes. It sees their opens, and keeps the file's size at the close as
//! an estimate. The danger that it avoids: a read of `/proc` for each request. So a thread is looked up at its first
//! open only.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use surgetank_core::report::run::{Io, Sizes};
use surgetank_types::model::{Caller, FileId, RunId};

use super::runs::Runs;
use super::trace::{Named, Traced, Traces, Way};

const SHARDS: usize = 16;
/// Files of one process whose sizes are read at its end.
const GIVEN_MAX: usize = 10_000;

pub struct Tally {
    runs: Arc<Runs>,
    named: Named,
    pub traces: Traces,
    /// The number of runs that want figures.
    wanted: AtomicUsize,
    threads: [Mutex<HashMap<u32, Seen>>; SHARDS],
    /// Open files that the kernel reads and writes itself: the process, and whether it writes.
    handles: Mutex<HashMap<u64, (u32, bool)>>,
}

/// One thread's requests.
#[derive(Debug, Clone)]
pub struct Seen {
    pub run: RunId,
    pub pid: u32,
    pub parent: u32,
    pub program: String,
    pub begun: Instant,
    pub last: Instant,
    pub mediated: Io,
    /// Opens only, and estimates.
    pub direct: Io,
    /// Opens and estimates of descriptors that the seccomp door granted.
    pub seccomp: Io,
    /// The files of these, for reading and for writing: the number of opens, and the size at the last check.
    given: HashMap<(FileId, bool), (u64, u64)>,
    /// Its run is traced.
    pub traced: Option<Traced>,
}

/// An open, and its duration.
pub struct OpenedBy {
    pub thread: u32,
    pub handle: u64,
    pub file: FileId,
    pub direct: bool,
    pub flags: OFlags,
    pub creates: bool,
    pub took: Duration,
}

/// A request that the agent answered.
pub struct Request {
    pub thread: u32,
    pub handle: u64,
    pub file: FileId,
    pub offset: u64,
    pub bytes: usize,
    pub took: Duration,
}

impl Request {
    /// `at`: number of the file, and handle.
    pub fn of(caller: &Caller, at: (u64, u64), offset: u64, bytes: usize, begun: Instant) -> Self {
        Self { thread: caller.pid, file: FileId(at.0), handle: at.1, offset, bytes, took: begun.elapsed() }
    }
}

impl Seen {
    pub fn new(run: RunId, pid: u32, parent: u32, program: &str) -> Self {
        let now = Instant::now();
        let (mediated, direct, seccomp) = (Io::default(), Io::default(), Io::default());
        let program = program.to_owned();
        let (begun, last, given) = (now, now, HashMap::new());
        Self { run, pid, parent, program, begun, last, mediated, direct, seccomp, given, traced: None }
    }

    /// Adds another thread of the same process.
    pub fn join(&mut self, other: &Self) {
        self.begun = self.begun.min(other.begun);
        self.last = self.last.max(other.last);
        self.mediated.join(&other.mediated);
        self.direct.join(&other.direct);
        self.seccomp.join(&other.seccomp);
        for (file, (times, size_bytes)) in &other.given {
            let given = self.given.entry(*file).or_default();
            *given = (given.0 + times, given.1.max(*size_bytes));
        }
    }
}

impl Tally {
    pub fn new(runs: Arc<Runs>, named: Named) -> Self {
        let (threads, handles) = (Default::default(), Mutex::default());
        Self { runs, named, traces: Traces::default(), wanted: AtomicUsize::new(0), threads, handles }
    }

    pub fn want(&self) {
        self.wanted.fetch_add(1, Ordering::Relaxed);
    }

    pub fn want_no_more(&self) {
        if self.wanted.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.threads.iter().for_each(|shard| lock(shard).clear());
            lock(&self.handles).clear();
        }
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) > 0
    }

    /// Run and process of the thread.
    fn with(&self, thread: u32, act: impl FnOnce(&mut Seen)) -> Option<(RunId, u32)> {
        let mut threads = lock(self.threads.get(thread as usize % SHARDS)?);
        let seen = threads.entry(thread).or_insert_with(|| self.look_up(thread));
        seen.last = Instant::now();
        act(seen);
        Some((seen.run, seen.pid))
    }

    fn look_up(&self, thread: u32) -> Seen {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
        let (pid, parent) = (field("Tgid:").parse().unwrap_or(thread), field("PPid:").parse().unwrap_or(0));
        Seen::new(self.runs.run_of(thread), pid, parent, field("Name:"))
    }

    pub fn opened(&self, by: &OpenedBy) {
        if !self.is_wanted() || by.thread == 0 {
            return;
        }
        let writes = by.flags.bits() as i32 & libc::O_ACCMODE != libc::O_RDONLY;
        let who = self.with(by.thread, |seen| {
            let io = if by.direct { &mut seen.direct } else { &mut seen.mediated };
            *(if writes { &mut io.write_opens } else { &mut io.read_opens }) += 1;
            io.create_opens += u64::from(by.creates);
            io.open_us += micros(by.took);
        });
        if by.direct {
            lock(&self.handles).insert(by.handle, (by.thread, writes));
        }
        if let (true, Some((run, pid))) = (self.traces.is_on(), who) {
            self.traces.opened(run, pid, by.handle, by.file, (by.flags, by.creates), &self.named);
        }
    }

    /// The seccomp door granted a descriptor, and no counter sees its use.
    pub fn gave(&self, thread: u32, file: FileId, flags: i32, made: bool) {
        if !self.is_wanted() {
            return;
        }
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let size_bytes = if writes { 0 } else { self.size_of(file) };
        self.with(thread, |seen| {
            *(if writes { &mut seen.seccomp.write_opens } else { &mut seen.seccomp.read_opens }) += 1;
            seen.seccomp.create_opens += u64::from(made);
            if seen.given.len() < GIVEN_MAX || seen.given.contains_key(&(file, writes)) {
                let given = seen.given.entry((file, writes)).or_default();
                *given = (given.0 + 1, given.1.max(size_bytes));
            }
        });
    }

    fn size_of(&self, file: FileId) -> u64 {
        (self.named)(file).map_or(0, |(_, size_bytes)| size_bytes)
    }

    pub fn read(&self, request: &Request) {
        self.request(
            request,
            Way::Read,
            |io| (&mut io.read_bytes, &mut io.read_calls, &mut io.read_us),
            |io| &mut io.read_sizes,
        );
    }

    pub fn wrote(&self, request: &Request) {
        self.request(
            request,
            Way::Write,
            |io| (&mut io.write_bytes, &mut io.write_calls, &mut io.write_us),
            |io| &mut io.write_sizes,
        );
    }

    pub fn synced(&self, thread: u32, took: Duration) {
        if self.is_wanted() && thread != 0 {
            self.with(thread, |seen| {
                seen.mediated.sync_calls += 1;
                seen.mediated.sync_us += micros(took);
            });
        }
    }

    fn request(
        &self,
        request: &Request,
        way: Way,
        figures: impl FnOnce(&mut Io) -> (&mut u64, &mut u64, &mut u64),
        sizes: impl FnOnce(&mut Io) -> &mut Sizes,
    ) {
        if !self.is_wanted() {
            return;
        }
        let bytes = request.bytes as u64;
        let known = request.thread != 0;
        let who = known.then(|| {
            self.with(request.thread, |seen| {
                sizes(&mut seen.mediated).add(bytes);
                let (sum, calls, time_us) = figures(&mut seen.mediated);
                *sum += bytes;
                *calls += 1;
                *time_us += micros(request.took);
            })
        });
        if self.traces.is_on() {
            let at = (request.handle, request.file, way);
            self.traces.request(who.flatten(), at, request.offset, bytes, &self.named);
        }
    }

    /// Does a run want the file's current size?
    pub fn is_estimated(&self, handle: u64) -> bool {
        self.is_wanted() && lock(&self.handles).contains_key(&handle)
    }

    pub fn released(&self, handle: u64, size_bytes: u64) {
        if let Some((thread, writes)) = lock(&self.handles).remove(&handle) {
            self.with(thread, |seen| {
                let io = &mut seen.direct;
                *(if writes { &mut io.estimated_write_bytes } else { &mut io.estimated_read_bytes }) += size_bytes;
            });
        }
    }

    /// The processes whose requests were seen.
    pub fn processes(&self, run: RunId) -> HashSet<u32> {
        let mut pids = HashSet::new();
        for shard in &self.threads {
            pids.extend(lock(shard).values().filter(|seen| seen.run == run).map(|seen| seen.pid));
        }
        pids
    }

    /// Processes of the run for which `is_over` is true, each once; they are forgotten here.
    pub fn take(&self, run: RunId, is_over: impl Fn(u32) -> bool) -> HashMap<u32, Seen> {
        let mut taken: HashMap<u32, Seen> = HashMap::new();
        for shard in &self.threads {
            lock(shard).retain(|_, seen| {
                let goes = seen.run == run && is_over(seen.pid);
                if goes {
                    taken.entry(seen.pid).and_modify(|known| known.join(seen)).or_insert_with(|| seen.clone());
                }
                !goes
            });
        }
        for seen in taken.values_mut() {
            for ((file, writes), (times, size_bytes)) in std::mem::take(&mut seen.given) {
                // The size of a written file is known when it is closed, unless it is removed by then.
                let estimated = times.saturating_mul(if writes { self.size_of(file) } else { size_bytes });
                let io = &mut seen.seccomp;
                let sum = if writes { &mut io.estimated_write_bytes } else { &mut io.estimated_read_bytes };
                *sum = sum.saturating_add(estimated);
            }
        }
        if self.traces.is_on() {
            taken.values_mut().for_each(|seen| seen.traced = self.traces.take(run, seen.pid));
        }
        taken
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_add_up_by_process_and_run() {
        let runs = Arc::new(Runs::default());
        let ours = runs.register(std::process::id());
        let tally = Tally::new(runs, Box::new(|_| None));
        let of = |thread, bytes| {
            let (file, took) = (FileId(1), Duration::ZERO);
            Request { thread, handle: 7, file, offset: 0, bytes, took }
        };
        tally.read(&of(std::process::id(), 5));
        assert!(tally.take(ours, |_| true).is_empty(), "nobody wanted to know");
        tally.want();
        let thread = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let thread = rustix::thread::gettid().as_raw_pid() as u32;
                    tally.read(&of(thread, 100));
                    let (file, took) = (FileId(1), Duration::ZERO);
                    let flags = OFlags::WRONLY;
                    tally.opened(&OpenedBy { thread, handle: 7, file, direct: true, flags, creates: true, took });
                    tally.released(7, 4096);
                    thread
                })
                .join()
                .unwrap()
        });
        assert_ne!(thread, std::process::id());
        tally.wrote(&of(std::process::id(), 11));
        assert!(tally.take(ours, |_| false).is_empty());
        assert!(tally.take(RunId(99), |_| true).is_empty());
        let taken = tally.take(ours, |_| true);
        let seen = &taken[&std::process::id()];
        assert_eq!((taken.len(), seen.mediated.read_bytes, seen.mediated.write_bytes), (1, 100, 11));
        assert_eq!(
            (seen.direct.create_opens, seen.direct.estimated_write_bytes, seen.direct.write_bytes),
            (1, 4096, 0)
        );
    }
}
