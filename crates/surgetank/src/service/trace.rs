//! Traced runs (`run --trace`): which process reads and writes which file, and at which offsets.
//!
//! During a traced run every open uses the mount and the agent serves every request (`passes_through` is off). Files
//! are opened uncached, or the kernel would answer from its pages. The dangers that it avoids:
//! - A name that means another file by the time of the record. So files are kept by number, and named when the process
//!   ends.
//! - A request that waits for itself. A command line is in its process's memory, and a page fault that waits for the
//!   agent's answer may have locked that memory. It is read while a thread is in open(2), which holds no lock of ours,
//!   and otherwise by a thread that no request waits for.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};

use rustix::fs::OFlags;
use surgetank_core::report::PathText;
use surgetank_core::report::pattern::{Access, Tracker};
use surgetank_core::report::run::{ACCESSES_MAX, COMMAND_CHARS_MAX};
use surgetank_types::model::{FileId, RunId};

/// The name and size of a file, if it has a name.
pub type Named = Box<dyn Fn(FileId) -> Option<(Vec<u8>, u64)> + Send + Sync>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Read,
    Write,
}

#[derive(Default)]
pub struct Traces {
    active: AtomicUsize,
    inner: Arc<Mutex<Inner>>,
    /// Processes whose command lines are to be read.
    looks: OnceLock<mpsc::Sender<u32>>,
}

#[derive(Default)]
struct Inner {
    runs: HashSet<RunId>,
    processes: HashMap<u32, Traced>,
    /// The process that opened each handle: kernel writes for a mapping have no process of their own.
    openers: HashMap<u64, u32>,
    /// The names at the last open. The process that wrote a file under another name may have ended, and the file may be
    /// gone when a record needs its name.
    names: HashMap<FileId, Vec<u8>>,
}

/// One process.
#[derive(Debug, Clone, Default)]
pub struct Traced {
    pub run: RunId,
    pub program: String,
    pub command: String,
    pub pipeline: u32,
    pub files: BTreeMap<FileId, Touched>,
    pub left_out: u64,
}

/// One file, as one process used it.
#[derive(Debug, Clone, Default)]
pub struct Touched {
    path: Vec<u8>,
    size_bytes: u64,
    /// The file was empty or absent when the process opened it.
    made: bool,
    read: Tracker,
    write: Tracker,
}

impl Touched {
    fn tracker(&self, way: Way) -> &Tracker {
        if way == Way::Read { &self.read } else { &self.write }
    }

    pub fn access(&self, file: FileId) -> Access {
        let (read, write) = (self.read.pattern(), self.write.pattern());
        let calls = |pattern: &Option<_>, calls: fn(&_) -> u64| pattern.as_ref().map(calls);
        let (reading, writing) = (calls(&read, |read| read.calls), calls(&write, |write| write.calls));
        // Opened for both, without requests: it is mapped, and other processes had its pages in memory already.
        let mapped = reading == Some(0) && writing == Some(0) && !self.made;
        Access {
            path: PathText(self.path.clone()),
            file: Some(file),
            size_bytes: self.size_bytes,
            reads: !self.made && (mapped || reading.is_some_and(|calls| calls > 0 || writing.is_none())),
            writes: self.made || mapped || writing.is_some_and(|calls| calls > 0 || reading.is_none()),
            read,
            write,
        }
    }
}

impl Traces {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Reads the process's command line soon.
    fn look_later(&self, pid: u32) {
        let looks = self.looks.get_or_init(|| {
            let (asks, asked) = mpsc::channel();
            let inner = Arc::clone(&self.inner);
            let work = move || {
                // (The loop ends with its last sender.)
                for pid in asked {
                    let command = command_of(pid);
                    if let Some(process) = lock(&inner).processes.get_mut(&pid).filter(|_| !command.is_empty()) {
                        process.command = command;
                    }
                }
            };
            if let Err(why) = std::thread::Builder::new().name("trace".into()).spawn(work) {
                tracing::warn!(%why, "command lines in the trace may be those of the shells that started the commands");
            }
            asks
        });
        let _ = looks.send(pid);
    }

    pub fn is_on(&self) -> bool {
        self.active.load(Ordering::Relaxed) > 0
    }

    pub fn begin(&self, run: RunId) {
        let mut inner = self.inner();
        inner.runs.insert(run);
        self.active.store(inner.runs.len(), Ordering::Relaxed);
    }

    pub fn end(&self, run: RunId) {
        let mut inner = self.inner();
        inner.runs.remove(&run);
        inner.processes.retain(|_, process| process.run != run);
        if inner.runs.is_empty() {
            inner.openers.clear();
            inner.names.clear();
        }
        self.active.store(inner.runs.len(), Ordering::Relaxed);
    }

    pub fn opened(&self, run: RunId, pid: u32, handle: u64, file: FileId, how: (OFlags, bool), named: &Named) {
        let (flags, creates) = how;
        let access = flags.bits() as i32 & libc::O_ACCMODE;
        let (found, now) = (named(file), Look::now(pid, true));
        let mut inner = self.inner();
        if access != libc::O_RDONLY {
            inner.openers.insert(handle, pid);
        }
        let Some(touched) = inner.touched(run, pid, file, Some(now), found) else { return };
        if access != libc::O_WRONLY {
            touched.read.opened();
        }
        if access != libc::O_RDONLY {
            touched.write.opened();
        }
        // (`create` is not requested for an existing file.)
        touched.made |= creates || flags.contains(OFlags::TRUNC);
    }

    /// `who`: run and process, if the kernel reports them.
    pub fn request(&self, who: Option<(RunId, u32)>, at: (u64, FileId, Way), offset: u64, bytes: u64, named: &Named) {
        let (handle, file, way) = at;
        let mut inner = self.inner();
        let who = who.or_else(|| {
            let pid = *inner.openers.get(&handle)?;
            Some((inner.processes.get(&pid)?.run, pid))
        });
        let Some((run, pid)) = who else { return };
        let touched = inner.processes.get(&pid).and_then(|process| process.files.get(&file));
        // A shell opens redirections itself, and becomes the program afterwards.
        let is_first = touched.is_none_or(|touched| !touched.tracker(way).has_begun());
        let found = if touched.is_some() { None } else { named(file) };
        let now = is_first.then(|| Look::now(pid, false));
        let changed =
            now.as_ref().is_some_and(|now| inner.processes.get(&pid).is_none_or(|known| known.program != now.program));
        if changed {
            self.look_later(pid);
        }
        let Some(touched) = inner.touched(run, pid, file, now, found) else { return };
        match way {
            Way::Read => touched.read.request(offset, bytes),
            Way::Write => touched.write.request(offset, bytes),
        }
        if way == Way::Write {
            touched.size_bytes = touched.size_bytes.max(offset.saturating_add(bytes));
        }
    }

    pub fn last_name(&self, file: FileId) -> Option<Vec<u8>> {
        self.inner().names.get(&file).cloned()
    }

    pub fn released(&self, handle: u64) {
        if self.is_on() {
            self.inner().openers.remove(&handle);
        }
    }

    /// The process or the run has ended: it is forgotten here.
    pub fn take(&self, run: RunId, pid: u32) -> Option<Traced> {
        let mut inner = self.inner();
        inner.processes.get(&pid).filter(|process| process.run == run)?;
        inner.processes.remove(&pid)
    }
}

impl Inner {
    /// `now`: the process's identity; it may have become another program since.
    fn touched(
        &mut self,
        run: RunId,
        pid: u32,
        file: FileId,
        now: Option<Look>,
        found: Option<(Vec<u8>, u64)>,
    ) -> Option<&mut Touched> {
        if !self.runs.contains(&run) {
            return None;
        }
        let process = self.processes.entry(pid).or_default();
        process.run = run;
        if let Some(now) = now {
            process.program = now.program;
            if !now.command.is_empty() {
                process.command = now.command;
            }
            process.pipeline = if now.pipeline > 0 { now.pipeline } else { process.pipeline };
        }
        if process.files.len() >= ACCESSES_MAX && !process.files.contains_key(&file) {
            process.left_out += 1;
            return None;
        }
        let touched = process.files.entry(file).or_default();
        if let Some((path, size_bytes)) = found {
            self.names.insert(file, path.clone());
            (touched.path, touched.size_bytes) = (path, size_bytes);
        }
        Some(touched)
    }
}

/// The current identity of a process.
#[derive(Default)]
struct Look {
    program: String,
    command: String,
    pipeline: u32,
}

impl Look {
    fn now(pid: u32, with_command: bool) -> Self {
        let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
        Self {
            program: String::from_utf8_lossy(name.trim_ascii_end()).into_owned(),
            command: if with_command { command_of(pid) } else { String::new() },
            pipeline: pipeline_of(pid).unwrap_or(0),
        }
    }
}

/// Waits while another thread changes the process's address space.
fn command_of(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = words.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    words.join(" ").trim_end().chars().take(COMMAND_CHARS_MAX).collect()
}

fn pipeline_of(pid: u32) -> Option<u32> {
    let pipes_of = |of: &str, numbers: &[u32]| -> Vec<PathBuf> {
        let ends = numbers.iter().filter_map(|number| std::fs::read_link(format!("/proc/{of}/fd/{number}")).ok());
        ends.filter(|end| end.as_os_str().as_encoded_bytes().starts_with(b"pipe:")).collect()
    };
    let pipes = pipes_of(&pid.to_string(), &[0, 1]);
    if pipes.is_empty() {
        return None;
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).map(str::trim)?;
    let of_parent = pipes_of(parent, &[0, 1, 2]);
    pipes.iter().any(|pipe| !of_parent.contains(pipe)).then(|| parent.parse().ok()).flatten()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces() -> Traces {
        let traces = Traces::default();
        traces.begin(RunId(1));
        traces
    }

    fn named() -> Named {
        Box::new(|file| Some((format!("file{}", file.0).into_bytes(), 100)))
    }

    /// The accesses of process 1 to file 7.
    fn did(act: impl FnOnce(&Traces)) -> Access {
        let traces = traces();
        act(&traces);
        traces.take(RunId(1), 1).unwrap().files[&FileId(7)].access(FileId(7))
    }

    #[test]
    fn creator_of_a_file_does_not_depend_on_it() {
        let (wo, rw, rdonly) = (OFlags::WRONLY, OFlags::RDWR, OFlags::RDONLY);
        let open = |flags, creates| {
            move |traces: &Traces| traces.opened(RunId(1), 1, 5, FileId(7), (flags, creates), &named())
        };
        let request =
            |way| move |traces: &Traces| traces.request(Some((RunId(1), 1)), (5, FileId(7), way), 0, 10, &named());
        let used = |access: Access| (access.reads, access.writes);
        assert_eq!(used(did(open(rdonly, false))), (true, false));
        assert_eq!(used(did(open(wo, false))), (false, true));
        assert_eq!(used(did(open(rw, false))), (true, true), "mapped, perhaps");
        let with = |flags, creates, way| {
            used(did(|traces| {
                open(flags, creates)(traces);
                request(way)(traces)
            }))
        };
        assert_eq!(with(rw, false, Way::Read), (true, false), "a database that is only asked");
        assert_eq!(with(rw, false, Way::Write), (false, true));
        assert_eq!(with(rw, true, Way::Read), (false, true), "made, written by a mapping, read again");
        assert_eq!(with(rw | OFlags::TRUNC, false, Way::Read), (false, true));
        assert_eq!(used(did(request(Way::Write))), (false, true), "a descriptor that was inherited");
    }

    #[test]
    fn kernel_writes_of_a_mapping_count_for_the_opener() {
        let access = did(|traces| {
            traces.opened(RunId(1), 1, 5, FileId(7), (OFlags::RDWR, false), &named());
            traces.request(None, (5, FileId(7), Way::Write), 4096, 4096, &named());
            traces.request(None, (6, FileId(7), Way::Write), 0, 4096, &named());
        });
        let write = access.write.unwrap();
        assert_eq!((write.calls, write.bytes, access.size_bytes), (1, 4096, 8192));
        assert_eq!(access.path.to_string(), "file7");
    }

    #[test]
    fn other_runs_are_not_traced_and_an_ended_run_leaves_nothing() {
        let traces = traces();
        traces.opened(RunId(2), 2, 5, FileId(7), (OFlags::RDONLY, false), &named());
        traces.opened(RunId(1), 1, 6, FileId(7), (OFlags::RDONLY, false), &named());
        assert!(traces.take(RunId(2), 2).is_none() && traces.take(RunId(2), 1).is_none());
        assert!(traces.is_on());
        traces.end(RunId(1));
        assert!(!traces.is_on() && traces.take(RunId(1), 1).is_none());
    }
}
