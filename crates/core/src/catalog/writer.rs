//! The writing end of the log: many committers, one write(2) for each group of them.
//!
//! A committer puts its record into the pending buffer, then queues for the pen. The first to get the pen is the leader
//! and writes all that is pending; the others find their record written when their turn comes. So the lock's queue is
//! the commit's queue, and an uncontended commit is two locks and one write.
//!
//! Invariants: positions grow with offsets; the file has no byte after `end` unless `torn`; nothing is written while
//! `torn`.
//!
//! The danger that it avoids: a record after a hole, which recovery would never reach.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::segment::{HEADER_BYTES, Segment};
use super::{Lsn, record};
use surgetank_types::model::Change;

/// A buffer that one large batch enlarged is freed.
const BUFFER_BYTES_KEPT: usize = 1 << 20;

/// A panic under a lock cannot leave these states half-changed in a way that matters more than stopping.
pub(super) fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct Writer {
    dir: PathBuf,
    segment_bytes_max: u64,
    pending: Mutex<Pending>,
    pen: Mutex<Pen>,
    written: AtomicU64,
}

/// Records that wait for a leader.
struct Pending {
    buffer: Vec<u8>,
    records: u32,
    last: Lsn,
}

/// The right to write, with its state.
pub(super) struct Pen {
    pub current: Arc<Segment>,
    pub end: u64,
    /// Closed segments that the snapshot does not hold yet, oldest first, with their last positions.
    pub closed: Vec<(Arc<Segment>, Lsn)>,
    pub written: Lsn,
    spare: Vec<u8>,
    roll_at: u64,
    torn: bool,
    failures: Vec<Failure>,
}

/// A group that could not be written; kept until each of its committers has the error.
struct Failure {
    last: Lsn,
    first: Lsn,
    unreported: u32,
    error: io::Error,
}

/// A commit that succeeded.
pub(super) struct Committed {
    pub lsn: Lsn,
    /// A segment was closed on the way.
    pub rolled: bool,
}

impl Writer {
    /// `segments` are oldest first, the last is current and ends at `end`.
    pub fn new(
        dir: PathBuf,
        segment_bytes_max: u64,
        closed: Vec<(Arc<Segment>, Lsn)>,
        current: Arc<Segment>,
        end: u64,
        last: Lsn,
    ) -> Self {
        let pen = Pen {
            current,
            end,
            closed,
            written: last,
            spare: Vec::new(),
            roll_at: segment_bytes_max,
            torn: false,
            failures: Vec::new(),
        };
        Self {
            dir,
            segment_bytes_max,
            pending: Mutex::new(Pending { buffer: Vec::new(), records: 0, last }),
            pen: Mutex::new(pen),
            written: AtomicU64::new(last.0),
        }
    }

    /// The position of the last successful commit.
    pub fn written(&self) -> Lsn {
        Lsn(self.written.load(Ordering::Acquire))
    }

    /// Stops all writing while it is held.
    pub fn pen(&self) -> MutexGuard<'_, Pen> {
        hold(&self.pen)
    }

    pub fn commit(&self, changes: &[Change]) -> io::Result<Committed> {
        let lsn = {
            let mut pending = hold(&self.pending);
            let lsn = Lsn(pending.last.0 + 1);
            record::append(&mut pending.buffer, lsn, changes)?;
            pending.last = lsn;
            pending.records += 1;
            lsn
        };
        let mut pen = self.pen();
        if let Some(error) = pen.take_failure(lsn) {
            return Err(error);
        }
        if pen.written >= lsn {
            return Ok(Committed { lsn, rolled: false });
        }
        let rolled = self.lead(&mut pen)?;
        Ok(Committed { lsn, rolled })
    }

    /// Writes everything that is pending, the leader's own record included.
    fn lead(&self, pen: &mut Pen) -> io::Result<bool> {
        let mut group = std::mem::take(&mut pen.spare);
        let (records, last) = {
            let mut pending = hold(&self.pending);
            std::mem::swap(&mut pending.buffer, &mut group);
            (std::mem::take(&mut pending.records), pending.last)
        };
        let written = pen.write(&group);
        group.clear();
        group.shrink_to(BUFFER_BYTES_KEPT);
        pen.spare = group;
        if let Err(error) = written {
            // Positions go up one by one within a group.
            let first = Lsn(last.0 + 1 - u64::from(records));
            if records > 1 {
                pen.failures.push(Failure { first, last, unreported: records - 1, error: again(&error) });
            }
            return Err(error);
        }
        pen.written = last;
        self.written.store(last.0, Ordering::Release);
        Ok(pen.end >= pen.roll_at && self.roll(pen))
    }

    /// Closes the current segment, if it holds anything, and begins a new one. On failure the log continues in the old
    /// segment, and the writer tries again after some more bytes.
    pub fn roll(&self, pen: &mut Pen) -> bool {
        if pen.end <= HEADER_BYTES || pen.cut_torn_tail().is_err() {
            return false;
        }
        match Segment::create(&self.dir, pen.written, false) {
            Ok(segment) => {
                crash_point!("catalog.rolled");
                let written = pen.written;
                let closed = std::mem::replace(&mut pen.current, Arc::new(segment));
                pen.closed.push((closed, written));
                pen.end = HEADER_BYTES;
                pen.roll_at = self.segment_bytes_max;
                true
            }
            Err(error) => {
                tracing::warn!(%error, dir = %self.dir.display(), "the catalog's log cannot begin a new segment and goes on in the old one");
                pen.roll_at = pen.end + self.segment_bytes_max / 16;
                false
            }
        }
    }

    /// Starts over: a fresh segment voids everything before it from the moment it has its name. Returns the segments to
    /// be deleted once that name is on the media.
    pub fn restart(&self, pen: &mut Pen) -> io::Result<Vec<Arc<Segment>>> {
        let segment = Segment::create(&self.dir, pen.written, true)?;
        let mut void: Vec<_> = std::mem::take(&mut pen.closed).into_iter().map(|(segment, _)| segment).collect();
        void.push(std::mem::replace(&mut pen.current, Arc::new(segment)));
        pen.end = HEADER_BYTES;
        pen.roll_at = self.segment_bytes_max;
        pen.torn = false;
        // An empty segment that had the same first position was replaced by the rename.
        void.retain(|segment| segment.path != pen.current.path);
        Ok(void)
    }
}

impl Pen {
    /// Writes `group` after the last record, or nothing.
    fn write(&mut self, group: &[u8]) -> io::Result<()> {
        self.cut_torn_tail()?;
        crash_point!("catalog.append");
        #[cfg(debug_assertions)]
        if surgetank_types::crash::is_next("catalog.torn") {
            // As if the machine had died in the middle of it.
            self.current.file.write_all_at(&group[..group.len() / 2], self.end)?;
        }
        crash_point!("catalog.torn");
        if let Err(error) = self.current.file.write_all_at(group, self.end) {
            self.torn = true;
            // When this fails too, the next commit tries again before it writes.
            let _ = self.cut_torn_tail();
            return Err(error);
        }
        self.end += group.len() as u64;
        crash_point!("catalog.appended");
        Ok(())
    }

    /// Cuts off what a failed write left.
    fn cut_torn_tail(&mut self) -> io::Result<()> {
        if self.torn {
            self.current.file.set_len(self.end)?;
            self.torn = false;
        }
        Ok(())
    }

    fn take_failure(&mut self, lsn: Lsn) -> Option<io::Error> {
        let index = self.failures.iter().position(|failure| failure.first <= lsn && lsn <= failure.last)?;
        let failure = &mut self.failures[index];
        failure.unreported -= 1;
        if failure.unreported == 0 {
            return Some(self.failures.swap_remove(index).error);
        }
        Some(again(&failure.error))
    }
}

/// The same error, for another committer of the group.
fn again(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error)
}
