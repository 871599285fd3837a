//! Files whose last writer has closed and that can still be written: by a duplicate, a child, a mapping. Or so it seems: the
//! kernel tells of a close an instant before it lets go of the plain file. For that instant whatever is closed later waits
//! too, so that files become versions in the order in which they were closed.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;
use crate::model::FileId;

use super::super::Namespace;
use super::super::content::Open;
use super::seal::somebody_writes;

const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// So long the kernel's instant lasts at most. After that somebody has the file: a mapping, a child.
const INSTANT: Duration = Duration::from_millis(50);

/// In the order in which they were closed.
pub(crate) struct Lingering {
    id: FileId,
    since: Instant,
    due: Instant,
    pause: Duration,
}

impl Lingering {
    fn is_young(&self) -> bool {
        self.since.elapsed() < INSTANT
    }
}

impl Namespace {
    fn lingering(&self) -> MutexGuard<'_, Vec<Lingering>> {
        self.lingering.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn linger(&self, id: FileId) {
        let since = clock::tick();
        let mut lingering = self.lingering();
        lingering.retain(|other| other.id != id);
        lingering.push(Lingering { id, since, due: since + PAUSE_FIRST, pause: PAUSE_FIRST });
        drop(lingering);
        self.tender.notify_all();
    }

    /// A descriptor was to be handed out and could not be.
    pub(super) fn linger_handed(&self, id: FileId) {
        self.linger(id);
    }

    pub(super) fn lingers(&self, id: FileId) -> bool {
        self.lingering().iter().any(|other| other.id == id)
    }

    /// Tries to seal what was closed a moment before this one; says whether nothing of that is left. (The lock of this one's
    /// inode is held, so others' are only tried.)
    pub(super) fn seal_those_before(&self, id: FileId) -> bool {
        let young: Vec<FileId> = {
            let lingering = self.lingering();
            let before = lingering.iter().take_while(|other| other.id != id);
            before.filter(|other| other.is_young()).map(|other| other.id).collect()
        };
        young.into_iter().all(|id| {
            let Some(_inode) = self.try_lock_inode(id) else { return false };
            let sealed = self.seal_lingering_one(id);
            if sealed {
                self.lingering().retain(|other| other.id != id);
            }
            sealed
        })
    }

    /// Tries again to seal what was still held writable. Returns how long to wait until the next one is due.
    pub(crate) fn seal_lingering(&self) -> Option<Duration> {
        let now = clock::tick();
        let due: Vec<(FileId, bool)> = {
            let lingering = self.lingering();
            lingering.iter().filter(|one| one.due <= now).map(|one| (one.id, one.is_young())).collect()
        };
        let mut before_is_left = false;
        for (id, young) in due {
            let sealed = if young && before_is_left {
                false
            } else {
                let _inode = self.lock_inode(id);
                self.seal_lingering_one(id)
            };
            before_is_left |= young && !sealed;
            let mut lingering = self.lingering();
            if sealed {
                lingering.retain(|other| other.id != id);
            } else if let Some(one) = lingering.iter_mut().find(|other| other.id == id) {
                // One that only waits for another does so without getting slower.
                one.pause = if one.is_young() { PAUSE_FIRST } else { (one.pause * 2).min(PAUSE_MAX) };
                one.due = clock::tick() + one.pause;
            }
        }
        let lingering = self.lingering();
        lingering.iter().map(|one| one.due.saturating_duration_since(now)).min()
    }

    /// The inode's lock is held.
    fn seal_lingering_one(&self, id: FileId) -> bool {
        let open = self.opens().get(&id).cloned();
        // Whoever has it open for writing again seals it when he closes.
        open.is_none_or(|open| self.end_handed(&open) && (open.writers() > 0 || self.seal_again(&open)))
    }

    /// The inode's lock is held.
    fn seal_again(&self, open: &Arc<Open>) -> bool {
        let content = open.content();
        if somebody_writes(open, &content) {
            return false;
        }
        self.finish_seal(open.id, Some(open), &content);
        if open.is_unused() {
            self.give_up(open);
        }
        true
    }

    /// Lets whoever waits for lingering files go.
    pub(crate) fn end_lingering(&self) {
        drop(self.lingering.lock());
        self.tender.notify_all();
    }

    /// Waits until something lingers anew, at most so long.
    pub(crate) fn wait_lingering(&self, at_most: Duration, stop: &dyn Fn() -> bool) {
        let lingering = self.lingering();
        if !stop() {
            drop(self.tender.wait_timeout(lingering, at_most));
        }
    }

    /// Files that no program has open any more but that something can still write.
    pub(crate) fn lingering_files(&self) -> Vec<FileId> {
        self.lingering().iter().map(|one| one.id).collect()
    }
}
