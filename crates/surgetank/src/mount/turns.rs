//! Files are stored in the order of their closes, and a program does not wait for its close to be handled (RELEASE has
//! no answer). So only one thread at a time reads requests. It registers each RELEASE in a queue, and the RELEASEs are
//! carried out in that order.
//!
//! A process that opens a file at another door after such a close must come after it, too. That door waits until the
//! RELEASEs that the kernel has sent are done ([`Turns::await_closes`]).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::abi::opcode;
use super::inbox::{Inbox, Place};
use super::request::Header;

/// A close that takes this long (its file is in a slow store) does not delay the others any longer.
const TIMEOUT: Duration = Duration::from_millis(100);

/// If more requests have been read since than the kernel ever queues at once, an earlier one was among them.
const READ_MAX: u64 = 256;
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// No thread is in `read`, or the one that was has not registered its request yet.
const NOBODY: i32 = 0;
const HAS_READ: i32 = -1;

#[derive(Debug, Default)]
pub struct Turns {
    /// The reading thread holds this: requests that were read already, to be served before others.
    reading: Mutex<VecDeque<Vec<u8>>>,
    /// The thread in `read` (or one of the values above).
    reader: AtomicI32,
    read: AtomicU64,
    /// The number of polls that found no request.
    looks: AtomicU64,
    releases: Mutex<VecDeque<Release>>,
    done: Condvar,
}

/// A RELEASE that was read and is not done.
#[derive(Debug)]
struct Release {
    unique: u64,
    /// A thread waited for it until its time limit.
    slow: bool,
}

/// A RELEASE that is being carried out.
pub struct Turn<'a> {
    turns: &'a Turns,
    unique: u64,
}

impl Turns {
    /// To be served before the kernel's requests.
    pub fn put_behind(&self, requests: Vec<Vec<u8>>) {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner).extend(requests);
    }

    /// The next request.
    pub fn read(&self, inbox: &mut Inbox) -> Result<Place, Errno> {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let place = match reading.pop_front() {
            Some(request) => inbox.put(&request),
            None => {
                self.reader.store(own_tid(), Ordering::SeqCst);
                let outcome = inbox.read(|| _ = self.looks.fetch_add(1, Ordering::SeqCst));
                self.reader.store(if outcome.is_ok() { HAS_READ } else { NOBODY }, Ordering::SeqCst);
                outcome?
            }
        };
        if let Ok(header) = Header::decode(inbox.bytes(&place))
            && header.opcode == opcode::RELEASE
        {
            self.releases().push_back(Release { unique: header.unique, slow: false });
        }
        self.read.fetch_add(1, Ordering::Relaxed);
        self.reader.store(NOBODY, Ordering::SeqCst);
        Ok(place)
    }

    /// Returns when the RELEASEs that the kernel has sent so far are done, or some are slow.
    pub fn await_closes(&self, device: BorrowedFd<'_>) {
        self.await_until(device, Instant::now() + TIMEOUT, true);
    }

    /// Are the RELEASEs done that the kernel has sent so far? Waits for them, also for slow ones.
    pub fn closes_are_done(&self, device: BorrowedFd<'_>, patience: Duration) -> bool {
        self.await_until(device, Instant::now() + patience, false)
    }

    /// Returns whether those that count are done. After `until`, those that are not have been marked as slow.
    /// `leave_out`: those that are slow already, and requests that come while many others do.
    fn await_until(&self, device: BorrowedFd<'_>, until: Instant, leave_out: bool) -> bool {
        let read = self.read.load(Ordering::Relaxed);
        let looks = self.looks.load(Ordering::SeqCst);
        while !self.all_are_read(device, looks) {
            if leave_out && self.read.load(Ordering::Relaxed) - read >= READ_MAX {
                break;
            }
            if Instant::now() >= until {
                if leave_out {
                    break;
                }
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let mut releases = self.releases();
        let before: Vec<u64> = releases.iter().filter(|one| !(leave_out && one.slow)).map(|one| one.unique).collect();
        loop {
            let mut left = releases.iter_mut().filter(|one| before.contains(&one.unique)).peekable();
            if left.peek().is_none() {
                return true;
            }
            let timeout = until.saturating_duration_since(Instant::now());
            if timeout.is_zero() {
                left.for_each(|one| one.slow = true);
                return false;
            }
            releases = self.done.wait_timeout(releases, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has every request that the kernel had at this number of polls been read and registered?
    fn all_are_read(&self, device: BorrowedFd<'_>, looks: u64) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN)];
        if poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok() && fds[0].revents().contains(PollFlags::IN)
        {
            return false;
        }
        match self.reading.try_lock() {
            Ok(behind) => behind.is_empty(),
            Err(TryLockError::Poisoned(behind)) => behind.into_inner().is_empty(),
            // The reader sleeps until a request comes; or it has polled twice since then without a request; or it has a
            // request and runs.
            Err(TryLockError::WouldBlock) => {
                let reader = self.reader.load(Ordering::SeqCst);
                let polled_twice = || self.looks.load(Ordering::SeqCst) >= looks + 2;
                reader > NOBODY && (polled_twice() || sleeps(reader)) && self.reader.load(Ordering::SeqCst) == reader
            }
        }
    }

    /// Waits until earlier RELEASEs are done. `None`: not a RELEASE. `waits` is called if it has to wait.
    pub fn turn(&self, header: &Header, waits: impl Fn()) -> Option<Turn<'_>> {
        if header.opcode != opcode::RELEASE {
            return None;
        }
        let unique = header.unique;
        let until = Instant::now() + TIMEOUT;
        let mut releases = self.releases();
        while releases.front().is_some_and(|first| first.unique != unique) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            waits();
            releases = self.done.wait_timeout(releases, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(Turn { turns: self, unique })
    }

    fn releases(&self) -> MutexGuard<'_, VecDeque<Release>> {
        self.releases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut releases = self.turns.releases();
        releases.retain(|one| one.unique != self.unique);
        self.turns.done.notify_all();
    }
}

fn own_tid() -> i32 {
    thread_local! {
        static TID: i32 = rustix::thread::gettid().as_raw_nonzero().get();
    }
    TID.with(|tid| *tid)
}

fn sleeps(tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test reports by a panic")]
mod tests {
    use super::*;

    #[test]
    fn turns_wait_for_requests_that_the_kernel_sent() {
        let turns = Turns::default();
        let (device, kernel) = rustix::pipe::pipe().unwrap();
        assert!(turns.all_are_read(device.as_fd(), 0));
        rustix::io::write(&kernel, b"request").unwrap();
        assert!(!turns.all_are_read(device.as_fd(), 0));
        rustix::io::read(&device, &mut [0; 7]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _reading = turns.reading.lock().unwrap();
                turns.reader.store(own_tid(), Ordering::SeqCst);
                rustix::io::read(&device, &mut [0; 7]).unwrap();
                turns.reader.store(HAS_READ, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                turns.releases().push_back(Release { unique: 7, slow: false });
                turns.reader.store(NOBODY, Ordering::SeqCst);
            });
            while !turns.all_are_read(device.as_fd(), 0) || turns.reader.load(Ordering::SeqCst) == NOBODY {
                std::thread::yield_now();
            }
            rustix::io::write(&kernel, b"release").unwrap();
            while turns.reader.load(Ordering::SeqCst) > NOBODY {
                assert!(!turns.all_are_read(device.as_fd(), 0) || turns.reader.load(Ordering::SeqCst) <= NOBODY);
            }
            // It is read and not registered.
            assert!(!turns.all_are_read(device.as_fd(), 0));
            turns.looks.store(9, Ordering::SeqCst);
            assert!(!turns.all_are_read(device.as_fd(), 0), "who has one does not look");
            scope.spawn(|| {
                while turns.releases().is_empty() {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(20));
                drop(Turn { turns: &turns, unique: 7 });
            });
            turns.await_closes(device.as_fd());
            assert!(turns.releases().is_empty());
        });
    }

    #[test]
    fn empty_poll_means_that_all_requests_are_read() {
        let turns = Turns::default();
        let (device, _kernel) = rustix::pipe::pipe().unwrap();
        let _reading = turns.reading.lock().unwrap();
        turns.reader.store(own_tid(), Ordering::SeqCst);
        turns.looks.store(6, Ordering::SeqCst);
        assert!(!turns.all_are_read(device.as_fd(), 5), "that look may have begun before");
        turns.looks.store(7, Ordering::SeqCst);
        assert!(turns.all_are_read(device.as_fd(), 5));
    }

    #[test]
    fn slow_close_is_waited_for_once() {
        let turns = Turns::default();
        let (device, _kernel) = rustix::pipe::pipe().unwrap();
        turns.releases().push_back(Release { unique: 7, slow: false });
        let since = Instant::now();
        turns.await_closes(device.as_fd());
        assert!(since.elapsed() >= TIMEOUT && turns.releases()[0].slow);
        turns.releases().push_back(Release { unique: 8, slow: false });
        drop(Turn { turns: &turns, unique: 8 });
        turns.await_closes(device.as_fd());
        assert_eq!(turns.releases().len(), 1);
    }
}
