//! Notices that descriptors which we handed out are closed, whoever has them by then: the kernel tells (inotify) when the
//! last of an open file's descriptors and mappings is gone, in the order in which it happened, across all processes, also
//! when they are killed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use foldhash::HashMap;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use surgetank_core::clock;
use surgetank_core::model::FileId;

const BUFFER_BYTES: usize = 64 << 10;
/// struct inotify_event: watch, mask, cookie, bytes of the name that follows.
const EVENT_BYTES: usize = 16;

pub struct Closings {
    queue: OwnedFd,
    watched: Mutex<HashMap<i32, FileId>>,
    /// Whoever takes events in holds this until they are dealt with, so that nobody overtakes them.
    taking: Mutex<Taking>,
}

struct Taking {
    buffer: Vec<u8>,
    /// The kernel tells of a close an instant before the file counts as closed. Whoever looked in that instant looks again
    /// before anything that came later, or a mark that was made after the data could be queued before it.
    early: Vec<(FileId, Instant)>,
}

/// So long that instant lasts, mostly; after that somebody else has the file open.
const INSTANT: Duration = Duration::from_millis(50);
/// But closing a large file may take its file system longer (ext4 begins to write it when it was emptied before): so many
/// are looked at for so long, the latest.
const LONG_MAX: usize = 8;
const LONG_INSTANT: Duration = Duration::from_secs(60);

/// What happened.
pub enum Closed {
    Of(FileId),
    /// The kernel's queue overflowed: it may have been any.
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

    pub fn watch(&self, id: FileId, file: BorrowedFd<'_>) -> io::Result<()> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let watch = inotify::add_watch(&self.queue, path, WatchFlags::CLOSE_WRITE | WatchFlags::ONESHOT)?;
        watched.insert(watch, id);
        Ok(())
    }

    /// Tells `each` of what was closed until now, in order; it says whether the file counts as closed.
    pub fn take(&self, mut each: impl FnMut(Closed) -> bool) {
        let mut taking = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let Taking { buffer, early } = &mut *taking;
        look_again(early, &mut each);
        while let Ok(bytes) = rustix::io::read(&self.queue, &mut **buffer) {
            let mut rest = &buffer[..bytes];
            while let Some((event, after)) = rest.split_at_checked(EVENT_BYTES) {
                let word = |at: usize| -> [u8; 4] { [event[at], event[at + 1], event[at + 2], event[at + 3]] };
                let (watch, mask) = (i32::from_ne_bytes(word(0)), u32::from_ne_bytes(word(4)));
                let name_bytes = u32::from_ne_bytes(word(12)) as usize;
                rest = after.get(name_bytes..).unwrap_or_default();
                if mask & libc::IN_Q_OVERFLOW != 0 {
                    each(Closed::Any);
                } else if mask & libc::IN_CLOSE_WRITE != 0 {
                    // What came early a moment ago, in this very round, may be closed by now, and this come after it.
                    look_again(early, &mut each);
                    let id = self.watched.lock().unwrap_or_else(PoisonError::into_inner).get(&watch).copied();
                    if let Some(id) = id
                        && !each(Closed::Of(id))
                    {
                        early.retain(|(other, _)| *other != id);
                        early.push((id, clock::tick()));
                    }
                } else if mask & libc::IN_IGNORED != 0 {
                    self.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(&watch);
                }
            }
        }
    }
}

fn look_again(early: &mut Vec<(FileId, Instant)>, each: &mut impl FnMut(Closed) -> bool) {
    let mut left = early.len();
    early.retain(|(id, since)| {
        let patience = if left <= LONG_MAX { LONG_INSTANT } else { INSTANT };
        left -= 1;
        !each(Closed::Of(*id)) && since.elapsed() < patience
    });
}

impl AsFd for Closings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}
