//! What every part of the drain shares: the way to the store, what is handed out and staged, and the end of all of it.
//!
//! The danger that this avoids: a store that hangs or fails is asked in parallel by every thread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use surgetank_state::{Copied, Name};
use surgetank_store::StorePath;
use surgetank_types::model::{FileId, RunId, Seq};
use surgetank_types::sync::atomic::{AtomicBool, Ordering};
use surgetank_types::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::base::Base;
use crate::base::users::own_cred;
use crate::content::Location;
use crate::drain::counters::DrainCounters;
use crate::drain::pause::Pause;
use crate::files::Files;
use crate::metadata::Metadata;

/// After this long in one call the drain asks the store for something that needs no time.
pub(super) const HANGS: Duration = Duration::from_secs(2);
/// The drain reports a call that takes this long, whatever else the store does.
const SLOW: Duration = Duration::from_secs(15);

/// Calls to the store for the drain: as which user, how long one hangs, and when all of them pause.
pub(crate) struct Attempts {
    pub(super) base: Base,
    pub(super) metadata: Arc<Metadata>,
    pub(super) files: Arc<Files>,
    pub(super) counters: Arc<DrainCounters>,
    pub(super) pause: Pause,
    pub(super) stop: AtomicBool,
    /// Operations whose files are to be staged.
    pub(super) jobs: Mutex<VecDeque<Seq>>,
    pub(super) job_came: Condvar,
    /// The staged copies of the operations in progress.
    pub(super) staged: Mutex<HashMap<Seq, Copied>>,
}

impl Attempts {
    pub(super) fn new(
        base: &Base,
        metadata: &Arc<Metadata>,
        files: &Arc<Files>,
        counters: &Arc<DrainCounters>,
    ) -> Self {
        Self {
            base: base.clone(),
            metadata: metadata.clone(),
            files: files.clone(),
            counters: counters.clone(),
            pause: Pause::default(),
            stop: AtomicBool::new(false),
            jobs: Mutex::default(),
            job_came: Condvar::new(),
            staged: Mutex::default(),
        }
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Operations that were handed out but not begun wait for their turn again.
    pub(crate) fn take_back_jobs(&self) {
        let left = std::mem::take(&mut *self.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        self.metadata.write_tree().drain_queue().hand_back(left);
    }

    /// Store I/O with the owner's ids. Where they do not suffice (a file whose owner changed), with the agent's own
    /// ids.
    pub(crate) fn as_owner<T>(
        &self,
        owner: surgetank_store::Cred,
        act: impl Fn(surgetank_store::Cred) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let root = rustix::process::geteuid().is_root();
        if !root || owner.uid == 0 {
            return self.pause.call(|| act(own_cred(owner)));
        }
        match self.pause.call(|| act(owner)) {
            Err(why) if matches!(why.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
                self.pause.call(|| act(own_cred(owner)))
            }
            other => other,
        }
    }

    /// Verification found a copy that differs from its file.
    pub(crate) fn found_corrupt(&self, why: &std::io::Error) {
        if why.kind() == std::io::ErrorKind::InvalidData {
            self.counters.corrupt.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Since when a failure has kept all operations from the store.
    pub fn paused_since_unix_seconds(&self) -> Option<i64> {
        self.pause
            .since_unix_seconds()
            .or_else(|| self.stalled_for().and_then(|_| self.pause.hangs_since()).map(|(_, at)| at))
    }

    /// How long the store has been in one call, when that is too long: it does not answer other questions either, or is
    /// very slow.
    pub fn stalled_for(&self) -> Option<Duration> {
        let least = if self.base.queries.silent_for().is_some() { HANGS } else { SLOW };
        self.hangs_for().filter(|time| *time >= least)
    }

    /// How long the drain has had no answer from the store.
    pub fn hangs_for(&self) -> Option<Duration> {
        self.pause.hangs_for()
    }

    /// Retries all waiting operations at once.
    pub fn hurry(&self) {
        self.pause.hurry();
    }

    /// A file that a program writes in place in the store gets its times from those writes.
    pub(super) fn is_written_in_place(&self, id: FileId) -> bool {
        let in_place = self.metadata.open_of(id).is_some_and(|open| open.content().location == Location::Store);
        in_place && self.metadata.read_tree().get(id).is_some_and(|inode| !inode.sealed)
    }

    /// Another client caused a conflict or a loss of order. The drain reports and counts it, and continues.
    pub(super) fn conflict(&self, run: RunId, path: &[u8], what: &str, kept_as: Option<&StorePath>) {
        self.counters.conflicts.fetch_add(1, Ordering::Relaxed);
        let path = String::from_utf8_lossy(path).into_owned();
        self.base.notes.note_kept(run, path, what, true, kept_as.map(ToString::to_string));
    }

    pub(super) fn temporary(&self, seq: Seq) -> Name {
        self.files.temporaries.staged_name(seq)
    }
}

pub(super) fn already_absent(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

/// Something is not in its place yet (EAGAIN); an operation in the queue brings it.
pub(super) fn not_yet(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, what)
}
