//! Files whose last writer has closed and that can still be written: by a duplicate, a child, a mapping. Or so it seems: the
//! kernel tells of a close an instant before it lets go of the plain file.
//!
//! Files become versions in the order in which they were closed. Who closes one file after another one's close has
//! returned finds that one let go of, however slow its file system is in it: so before a file becomes a version,
//! those that linger are tried, in the order of their closes, and one that is still held was not closed before.

use std::time::{Duration, Instant};
use surgetank_types::sync::{Arc, MutexGuard, PoisonError};

use surgetank_types::clock;
use surgetank_types::model::FileId;

use super::super::Namespace;
use super::super::content::Open;
use super::seal::somebody_writes;

const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// So many of those that were closed last are tried before another becomes a version.
const TRIED_MAX: usize = 64;

/// In the order in which they were closed.
pub(crate) struct DeferredSeal {
    id: FileId,
    due: Instant,
    pause: Duration,
}

impl Namespace {
    fn deferred(&self) -> MutexGuard<'_, Vec<DeferredSeal>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn defer_seal(&self, id: FileId) {
        let mut deferred = self.deferred();
        deferred.retain(|other| other.id != id);
        deferred.push(DeferredSeal { id, due: clock::tick() + PAUSE_FIRST, pause: PAUSE_FIRST });
        drop(deferred);
        self.tender.notify_all();
    }

    pub(super) fn is_seal_deferred(&self, id: FileId) -> bool {
        self.deferred().iter().any(|other| other.id == id)
    }

    /// Seals what was closed before this one as far as it is let go of. The error: somebody is about that one just now.
    /// (The lock of this one's inode is held, so others' are only tried.)
    pub(super) fn seal_those_before(&self, id: FileId) -> Result<(), FileId> {
        let before: Vec<FileId> = {
            let deferred = self.deferred();
            let end = deferred.iter().position(|other| other.id == id).unwrap_or(deferred.len());
            deferred[end.saturating_sub(TRIED_MAX)..end].iter().map(|other| other.id).collect()
        };
        before.into_iter().try_for_each(|id| {
            let _inode = self.try_lock_inode(id).ok_or(id)?;
            if self.seal_deferred_one(id) {
                self.deferred().retain(|other| other.id != id);
            }
            Ok(())
        })
    }

    /// Tries again to seal what was still held writable. Returns how long to wait until the next one is due.
    pub(crate) fn seal_deferred(&self) -> Option<Duration> {
        let now = clock::tick();
        let tried: Vec<FileId> = {
            let deferred = self.deferred();
            let end = deferred.iter().rposition(|one| one.due <= now).map_or(0, |last| last + 1);
            deferred[..end].iter().map(|one| one.id).collect()
        };
        for id in tried {
            // (Held until the list knows: who closes it anew meanwhile would lose his place there, and nobody would ever seal it.)
            let _inode = self.lock_inode(id);
            let sealed = self.seal_deferred_one(id);
            let mut deferred = self.deferred();
            if sealed {
                deferred.retain(|other| other.id != id);
            } else if let Some(one) = deferred.iter_mut().find(|other| other.id == id && other.due <= now) {
                one.pause = (one.pause * 2).min(PAUSE_MAX);
                one.due = clock::tick() + one.pause;
            }
        }
        let deferred = self.deferred();
        deferred.iter().map(|one| one.due.saturating_duration_since(now)).min()
    }

    /// The inode's lock is held.
    fn seal_deferred_one(&self, id: FileId) -> bool {
        let open = self.opens().get(&id).cloned();
        // Whoever has it open for writing again seals it when he closes.
        open.is_none_or(|open| self.end_handed_now(&open) && (open.writers() > 0 || self.seal_again(&open)))
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
    pub(crate) fn end_deferred(&self) {
        drop(self.deferred.lock());
        self.tender.notify_all();
    }

    /// Waits until something lingers anew, at most so long.
    pub(crate) fn wait_deferred(&self, at_most: Duration, stop: &dyn Fn() -> bool) {
        let deferred = self.deferred();
        if !stop() {
            drop(self.tender.wait_timeout(deferred, at_most));
        }
    }

    /// Files that no program has open any more but that something can still write.
    pub(crate) fn deferred_files(&self) -> Vec<FileId> {
        self.deferred().iter().map(|one| one.id).collect()
    }
}
