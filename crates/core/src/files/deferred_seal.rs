//! Deferred seals: files whose last writer has closed and that a duplicate, a child or a mapping can still write. Some
//! only seem so, because the kernel reports a close an instant before it lets go of the plain file.
//!
//! Invariant: files become versions in the order of their closes. A process that closes a file after another close has
//! returned finds that other file let go of, however slow its file system is. So before a file becomes a version, the
//! deferred ones are tried in the order of their closes. One that is still held was not closed before it.
//!
//! The danger that this avoids: the store gets a later file before an earlier one.

use std::time::Duration;

use surgetank_types::clock;
use surgetank_types::model::FileId;
use surgetank_types::sync::Arc;

use crate::content::{Open, has_direct_writer};
use crate::files::descriptor_grant::Descriptors;

const PAUSE_MAX: Duration = Duration::from_millis(500);
/// The number of the most recently closed files that are tried before another file becomes a version.
const TRIED_MAX: usize = 64;

impl Descriptors {
    /// The last writer closed. The caller holds the inode's lock. `false`: a duplicate, a child or a mapping can still
    /// write. Then the seal is deferred, and the `Open` stays, because it has the charge and knows that the file was
    /// written.
    pub(crate) fn seal(&self, open: &Open) -> bool {
        let content = open.content();
        // Files that were closed before it come before it.
        if has_direct_writer(open, &content) || self.seal_those_before(open.id).is_err() {
            self.deferred.defer_seal(open.id);
            return false;
        }
        self.sealer.finish_seal(open.id, Some(open), &content);
        true
    }

    /// Seals the files that were closed before this one, as far as they are let go of. The caller holds this inode's
    /// lock, so other locks are only tried.
    ///
    /// Errors: another thread holds the lock of the returned file.
    pub(crate) fn seal_those_before(&self, id: FileId) -> Result<(), FileId> {
        let before: Vec<FileId> = {
            let deferred = self.deferred.deferred();
            let end = deferred.iter().position(|other| other.id == id).unwrap_or(deferred.len());
            deferred[end.saturating_sub(TRIED_MAX)..end].iter().map(|other| other.id).collect()
        };
        before.into_iter().try_for_each(|id| {
            let _inode = self.metadata.try_lock_inode(id).ok_or(id)?;
            if self.seal_deferred_one(id) {
                self.deferred.deferred().retain(|other| other.id != id);
            }
            Ok(())
        })
    }

    /// Tries the files again that were still held writable. Returns the time until the next one is due.
    pub(crate) fn seal_deferred(&self) -> Option<Duration> {
        let now = clock::tick();
        let tried: Vec<FileId> = {
            let deferred = self.deferred.deferred();
            let end = deferred.iter().rposition(|one| one.due <= now).map_or(0, |last| last + 1);
            deferred[..end].iter().map(|one| one.id).collect()
        };
        for id in tried {
            // Held until the list is updated: a close in between would lose its place there, and the file would never
            // be sealed.
            let _inode = self.metadata.lock_inode(id);
            let sealed = self.seal_deferred_one(id);
            let mut deferred = self.deferred.deferred();
            if sealed {
                deferred.retain(|other| other.id != id);
            } else if let Some(one) = deferred.iter_mut().find(|other| other.id == id && other.due <= now) {
                one.pause = (one.pause * 2).min(PAUSE_MAX);
                one.due = clock::tick() + one.pause;
            }
        }
        let deferred = self.deferred.deferred();
        deferred.iter().map(|one| one.due.saturating_duration_since(now)).min()
    }

    /// The caller holds the inode's lock.
    fn seal_deferred_one(&self, id: FileId) -> bool {
        let open = self.metadata.opens().get(&id).cloned();
        // A process that has it open for writing again seals it with its close.
        open.is_none_or(|open| self.end_grant_now(&open) && (open.writers() > 0 || self.seal_again(&open)))
    }

    /// The caller holds the inode's lock.
    fn seal_again(&self, open: &Arc<Open>) -> bool {
        let content = open.content();
        if has_direct_writer(open, &content) {
            return false;
        }
        self.sealer.finish_seal(open.id, Some(open), &content);
        if open.is_unused() {
            self.sealer.give_up(open);
        }
        true
    }
}
