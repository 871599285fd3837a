//! Promises: the kernel opens a name in two steps, a look-up and an open of the file that was found. If the last name
//! goes in between, the kernel starts again, but only once.
//!
//! So a thread that was sent back gets a promise: the file that its second look-up finds stays until the thread has
//! opened it. The danger that this avoids: an open fails with ESTALE although the name always had a file.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::error::Errno;
use surgetank_types::model::{FileId, Kind, RunId};
use surgetank_types::sync::atomic::{AtomicUsize, Ordering};
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::content::Open;
use crate::files::Via;
use crate::files::open::Opener;

/// The kernel comes back at once. After this time, the thread was killed meanwhile.
pub(crate) const KEPT_FOR: Duration = Duration::from_millis(500);

#[derive(Default)]
pub(crate) struct Promises {
    count: AtomicUsize,
    /// By the thread that was sent back.
    list: Mutex<HashMap<u32, Promise>>,
}

struct Promise {
    since: Instant,
    /// The file of the second look-up, held open for the thread.
    open: Option<Arc<Open>>,
}

impl Opener {
    /// The thread was sent back and will come again.
    pub(crate) fn sent_back(&self, thread: u32) {
        if thread != 0 {
            let now = Promise { since: clock::tick(), open: None };
            self.release_promise(self.promised(|list| list.insert(thread, now)));
        }
    }

    /// The thread's second look-up found this file. `false`: the file is already gone.
    pub(crate) fn found_again(&self, thread: u32, id: FileId) -> bool {
        let comes_again = || self.promised(|list| list.contains_key(&thread));
        if self.promises.count.load(Ordering::Relaxed) == 0 || !comes_again() {
            return true;
        }
        if self.metadata.read_tree().get(id).is_none_or(|inode| inode.attr.kind != Kind::File) {
            return true;
        }
        let open = match self.open_inode(id, false, false, RunId(0), Via::Mount) {
            Ok(open) => Some(open),
            Err(fault) if fault.errno == Errno::STALE => return false,
            Err(_) => None,
        };
        let now = Promise { since: clock::tick(), open };
        self.release_promise(self.promised(|list| list.insert(thread, now)));
        true
    }

    /// The thread has opened a file, or failed for another reason.
    pub(crate) fn served(&self, thread: u32) {
        if self.promises.count.load(Ordering::Relaxed) > 0 {
            self.release_promise(self.promised(|list| list.remove(&thread)));
        }
    }

    /// Ends the promises whose thread did not come in time.
    pub(crate) fn end_promises(&self, kept_for: Duration) {
        if self.promises.count.load(Ordering::Relaxed) > 0 {
            let old: Vec<Promise> = self.promised(|list| {
                list.extract_if(|_, promise| promise.since.elapsed() >= kept_for).map(|(_, promise)| promise).collect()
            });
            old.into_iter().for_each(|promise| self.release_promise(Some(promise)));
        }
    }

    fn release_promise(&self, promise: Option<Promise>) {
        if let Some(open) = promise.and_then(|promise| promise.open) {
            self.close_inode(&open, false);
        }
    }

    fn promised<T>(&self, act: impl FnOnce(&mut HashMap<u32, Promise>) -> T) -> T {
        let mut list = self.promises.list.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut list);
        self.promises.count.store(list.len(), Ordering::Relaxed);
        result
    }
}
