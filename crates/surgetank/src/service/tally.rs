//! Who does what through the mount: requests counted by the thread that makes them, added up by process.
//!
//! Read and write through the kernel (passthrough) never come here: their opens do, and the file's size at its close is kept as
//! an estimate. The danger it avoids: asking `/proc` for each request, so a thread is looked up at its first open only.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use surgetank_core::model::RunId;
use surgetank_core::report::run::Io;

use super::runs::Runs;

const SHARDS: usize = 16;

pub struct Tally {
    runs: Arc<Runs>,
    /// Runs that want to know.
    wanted: AtomicUsize,
    threads: [Mutex<HashMap<u32, Seen>>; SHARDS],
    /// Open files that the kernel reads and writes itself: by whom, and for writing?
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
}

impl Seen {
    /// The same process's other thread.
    pub fn join(&mut self, other: &Self) {
        self.begun = self.begun.min(other.begun);
        self.last = self.last.max(other.last);
        self.mediated.join(&other.mediated);
        self.direct.join(&other.direct);
    }
}

impl Tally {
    pub fn new(runs: Arc<Runs>) -> Self {
        Self { runs, wanted: AtomicUsize::new(0), threads: Default::default(), handles: Mutex::default() }
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

    fn with(&self, thread: u32, act: impl FnOnce(&mut Seen)) {
        if let Some(shard) = self.threads.get(thread as usize % SHARDS) {
            let mut threads = lock(shard);
            let seen = threads.entry(thread).or_insert_with(|| self.look_up(thread));
            seen.last = Instant::now();
            act(seen);
        }
    }

    fn look_up(&self, thread: u32) -> Seen {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or_default();
        let now = Instant::now();
        Seen {
            run: self.runs.run_of(thread),
            pid: field("Tgid:").parse().unwrap_or(thread),
            parent: field("PPid:").parse().unwrap_or(0),
            program: field("Name:").to_owned(),
            begun: now,
            last: now,
            mediated: Io::default(),
            direct: Io::default(),
        }
    }

    pub fn opened(&self, thread: u32, handle: u64, direct: bool, flags: OFlags, creates: bool, took: Duration) {
        if !self.is_wanted() || thread == 0 {
            return;
        }
        let writes = flags.bits() as i32 & libc::O_ACCMODE != libc::O_RDONLY;
        self.with(thread, |seen| {
            let io = if direct { &mut seen.direct } else { &mut seen.mediated };
            *(if writes { &mut io.write_opens } else { &mut io.read_opens }) += 1;
            io.create_opens += u64::from(creates);
            io.open_us += micros(took);
        });
        if direct {
            lock(&self.handles).insert(handle, (thread, writes));
        }
    }

    pub fn read(&self, thread: u32, bytes: usize, took: Duration) {
        if self.is_wanted() && thread != 0 {
            self.with(thread, |seen| {
                seen.mediated.read_bytes += bytes as u64;
                seen.mediated.read_calls += 1;
                seen.mediated.read_sizes.add(bytes as u64);
                seen.mediated.read_us += micros(took);
            });
        }
    }

    pub fn wrote(&self, thread: u32, bytes: usize, took: Duration) {
        if self.is_wanted() && thread != 0 {
            self.with(thread, |seen| {
                seen.mediated.write_bytes += bytes as u64;
                seen.mediated.write_calls += 1;
                seen.mediated.write_sizes.add(bytes as u64);
                seen.mediated.write_us += micros(took);
            });
        }
    }

    /// Does somebody want to know how large the file is now?
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

    /// Processes of the run that `is_over` says so of, each once; they are forgotten here.
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
    fn threads_are_added_up_by_process_and_runs_are_kept_apart() {
        let runs = Arc::new(Runs::default());
        let ours = runs.register(std::process::id());
        let tally = Tally::new(runs);
        tally.read(std::process::id(), 5, Duration::ZERO);
        assert!(tally.take(ours, |_| true).is_empty(), "nobody wanted to know");
        tally.want();
        let thread = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let thread = rustix::thread::gettid().as_raw_pid() as u32;
                    tally.read(thread, 100, Duration::ZERO);
                    tally.opened(thread, 7, true, OFlags::WRONLY, true, Duration::ZERO);
                    tally.released(7, 4096);
                    thread
                })
                .join()
                .unwrap()
        });
        assert_ne!(thread, std::process::id());
        tally.wrote(std::process::id(), 11, Duration::ZERO);
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
