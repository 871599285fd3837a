//! Notices the close of descriptors that the agent granted, whichever process has them by then. The kernel reports
//! (inotify) the end of an open file's last descriptor or mapping. It reports in order, across all processes, also for
//! killed ones.
//!
//! A new file is reported by its directory, and one watch serves all files that are created there: a watch for each
//! file costs four times as much. Such a report contains only a name. So a file that moves gets its own watch before
//! (`Descriptors::watch_apart`). A name may mean several files until all of them are closed; a file that is still open
//! only costs a useless check.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashSet};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use surgetank_types::clock;
use surgetank_types::model::FileId;

const BUFFER_BYTES: usize = 64 << 10;
/// Added to what is there: otherwise the kernel takes a watch back for an instant when it is set again, and loses the closes of
/// other files in that instant.
const CLOSES: WatchFlags = WatchFlags::CLOSE_WRITE.union(WatchFlags::MASK_ADD);
/// struct inotify_event: watch, mask, cookie, and the size of the name that follows.
const EVENT_BYTES: usize = 16;

/// At most this many directories without an open file stay watched, and no longer than [`Closings::rest`] allows: a
/// watch adds a tenth of a microsecond to each open there.
pub(super) const IDLE_MAX: usize = 512;

pub struct Closings {
    queue: OwnedFd,
    watched: Mutex<Watched>,
    /// A thread that takes events in holds this until it has handled them, so that no other thread overtakes it.
    taking: Mutex<Taking>,
}

#[derive(Default)]
struct Watched {
    files: HashMap<i32, FileId>,
    dirs: HashMap<i32, Names>,
    /// The delegated directories: their watches stay, whether files are open in them or not.
    delegated: HashMap<i32, u32>,
    /// Directories without an open file since the last check.
    idle: HashSet<i32>,
    /// For files that their directory reports: the directory's watch, and the name.
    made: HashMap<FileId, (i32, Arc<[u8]>)>,
}

/// The files of a directory that are not closed yet, under the names of their creation.
type Names = HashMap<Arc<[u8]>, Vec<FileId>>;

impl Watched {
    fn is_idle(&self, watch: i32) -> bool {
        self.dirs.get(&watch).is_some_and(HashMap::is_empty) && !self.delegated.contains_key(&watch)
    }

    /// Ends the kernel's reports for these. (An error: the directory is gone, which the kernel will report.)
    fn drop_watches(&mut self, queue: &OwnedFd, those: &[i32]) {
        for watch in those {
            self.dirs.remove(watch);
            self.idle.remove(watch);
            let _ = inotify::remove_watch(queue, *watch);
        }
    }

    fn forget(&mut self, id: FileId) {
        if let Some((watch, name)) = self.made.remove(&id)
            && let Some(names) = self.dirs.get_mut(&watch)
            && let Some(files) = names.get_mut(&name)
        {
            files.retain(|other| *other != id);
            if files.is_empty() {
                names.remove(&name);
            }
        }
    }
}

struct Taking {
    buffer: Vec<u8>,
    /// The kernel reports a close an instant before the file counts as closed. A file that was checked in that instant
    /// is checked again before any later event. Otherwise a mark made after the data could be queued before it.
    early: Vec<(FileId, Instant)>,
}

/// That instant usually lasts at most this long; after that another process has the file open.
const INSTANT: Duration = Duration::from_millis(50);
/// Closing a large file may take its file system longer (ext4 starts to write a file that was truncated before). So the
/// latest of these files are checked for this long.
const LONG_MAX: usize = 8;
const LONG_INSTANT: Duration = Duration::from_secs(60);

/// What happened.
#[derive(Clone, Copy)]
pub enum Closed {
    Of(FileId),
    /// The kernel's queue overflowed: any file may have been closed.
    Any,
}

impl Closings {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            queue: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            watched: Mutex::default(),
            taking: Mutex::new(Taking { buffer: vec![0; BUFFER_BYTES], early: Vec::new() }),
        })
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn watch(&self, id: FileId, file: BorrowedFd<'_>) -> io::Result<()> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut watched = self.watched();
        let watch = inotify::add_watch(&self.queue, path, CLOSES | WatchFlags::ONESHOT)?;
        watched.files.insert(watch, id);
        Ok(())
    }

    /// The same for a file created in a directory. (The directory usually has a watch already, and then the kernel
    /// returns the same number again. Only the kernel knows which directory is there now.)
    pub fn watch_in(&self, dir: &Path, name: &[u8], id: FileId) -> io::Result<()> {
        let mut watched = self.watched();
        let watch = inotify::add_watch(&self.queue, dir, CLOSES | WatchFlags::ONLYDIR)?;
        if watched.dirs.len() >= IDLE_MAX && !watched.dirs.contains_key(&watch) {
            let idle: Vec<i32> = watched.dirs.keys().copied().filter(|watch| watched.is_idle(*watch)).collect();
            watched.drop_watches(&self.queue, &idle);
        }
        watched.idle.remove(&watch);
        watched.forget(id);
        let name: Arc<[u8]> = name.into();
        watched.made.insert(id, (watch, name.clone()));
        watched.dirs.entry(watch).or_default().entry(name).or_default().push(id);
        Ok(())
    }

    /// The kernel reports every file that is created in the directory from now on; [`Self::made_in`] adds their ids
    /// afterwards.
    pub fn watch_delegated(&self, dir: &Path) -> io::Result<i32> {
        let mut watched = self.watched();
        let watch = inotify::add_watch(&self.queue, dir, CLOSES | WatchFlags::ONLYDIR)?;
        watched.idle.remove(&watch);
        watched.dirs.entry(watch).or_default();
        *watched.delegated.entry(watch).or_default() += 1;
        Ok(watch)
    }

    pub fn no_longer_delegated(&self, watch: i32) {
        let mut watched = self.watched();
        let last = watched.delegated.get_mut(&watch).is_some_and(|times| {
            *times -= 1;
            *times == 0
        });
        if last {
            watched.delegated.remove(&watch);
        }
    }

    /// Called periodically: ends the watches of directories without an open file since the last call.
    pub fn rest(&self) {
        let mut watched = self.watched();
        let (long, just): (Vec<i32>, Vec<i32>) = watched
            .dirs
            .keys()
            .copied()
            .filter(|watch| watched.is_idle(*watch))
            .partition(|watch| watched.idle.contains(watch));
        watched.drop_watches(&self.queue, &long);
        watched.idle.extend(just);
    }

    /// `false`: the kernel does not report that directory any more.
    pub fn made_in(&self, watch: i32, name: &[u8], id: FileId) -> bool {
        let mut watched = self.watched();
        if !watched.dirs.contains_key(&watch) {
            return false;
        }
        watched.idle.remove(&watch);
        let name: Arc<[u8]> = name.into();
        watched.made.insert(id, (watch, name.clone()));
        watched.dirs.entry(watch).or_default().entry(name).or_default().push(id);
        true
    }

    /// The files that the event may mean. (A file's own watch reports once.)
    fn meant(&self, event: &Event<'_>) -> Vec<FileId> {
        let mut watched = self.watched();
        match event.name {
            [] => watched.files.remove(&event.watch).into_iter().collect(),
            name => watched.dirs.get(&event.watch).and_then(|names| names.get(name)).cloned().unwrap_or_default(),
        }
    }

    /// Calls `each` for what was closed so far, in order; it returns whether the file counts as closed. `heard`: called
    /// between reading the events and asking whose they are.
    pub fn take(&self, heard: impl Fn(), mut each: impl FnMut(Closed) -> bool) {
        let mut taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let Taking { buffer, early } = &mut *taking;
        let mut each = |closed: Closed| {
            let ended = each(closed);
            if let (Closed::Of(id), true) = (closed, ended) {
                self.watched().forget(id);
            }
            ended
        };
        look_again(early, &mut each);
        while let Ok(bytes) = rustix::io::read(&self.queue, &mut **buffer) {
            heard();
            for event in events(&buffer[..bytes]) {
                if event.mask & libc::IN_Q_OVERFLOW != 0 {
                    each(Closed::Any);
                } else if event.mask & libc::IN_CLOSE_WRITE != 0 {
                    // A file that was early a moment ago, in this same round, may be closed by now, and this event came
                    // after it.
                    look_again(early, &mut each);
                    for id in self.meant(&event) {
                        if !each(Closed::Of(id)) {
                            early.retain(|(other, _)| *other != id);
                            early.push((id, clock::tick()));
                        }
                    }
                } else if event.mask & libc::IN_IGNORED != 0 {
                    let mut watched = self.watched();
                    let file = watched.files.remove(&event.watch);
                    watched.idle.remove(&event.watch);
                    let names = watched.dirs.remove(&event.watch).unwrap_or_default();
                    names.values().flatten().for_each(|id| drop(watched.made.remove(id)));
                    drop(watched);
                    // Its watch was set again just before it ended.
                    if let Some(id) = file {
                        each(Closed::Of(id));
                    }
                }
            }
        }
    }
}

struct Event<'a> {
    watch: i32,
    mask: u32,
    /// The name in a directory; empty: the file itself is watched.
    name: &'a [u8],
}

/// Events as the kernel writes them, one after another. The name is padded with zeroes.
fn events(mut rest: &[u8]) -> impl Iterator<Item = Event<'_>> {
    std::iter::from_fn(move || {
        let (event, after) = rest.split_at_checked(EVENT_BYTES)?;
        let word = |at: usize| -> [u8; 4] { [event[at], event[at + 1], event[at + 2], event[at + 3]] };
        let (name, after) = after.split_at_checked(u32::from_ne_bytes(word(12)) as usize)?;
        rest = after;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(Event { watch: i32::from_ne_bytes(word(0)), mask: u32::from_ne_bytes(word(4)), name })
    })
}

fn look_again(early: &mut Vec<(FileId, Instant)>, each: &mut impl FnMut(Closed) -> bool) {
    let mut left = early.len();
    early.retain(|(id, since)| {
        let timeout = if left <= LONG_MAX { LONG_INSTANT } else { INSTANT };
        left -= 1;
        !each(Closed::Of(*id)) && since.elapsed() < timeout
    });
}

impl AsFd for Closings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}
