//! An operation that failed: when it is retried, whether the failure is lasting, and which layer is to blame.
//!
//! The danger that it avoids: a tier that cannot be read is reported as a failure of the store.

use std::sync::atomic::Ordering;

use surgetank_state::Trouble;
use surgetank_store::verdict;
use surgetank_store::verdict::Verdict;
use surgetank_types::clock;
use surgetank_types::model::{OpKind, Seq};

use crate::drain::attempts::Attempts;
use crate::drain::pause::May;
use crate::files::copies::Absence;

/// An operation that is still refused after so many times of opening its directories fails.
const OPENED_UP_MAX: u32 = 4;

impl Attempts {
    /// Records that an operation failed, and when it is retried.
    pub(crate) fn failed(&self, seq: Seq, why: &std::io::Error) {
        let errno = verdict::errno_of(why);
        let judged = verdict::classify(errno);
        let errno = errno.raw_os_error();
        let retry = self.base.config.retry;
        let opened_up = errno == libc::EACCES && self.open_up(seq);
        let unreadable = self.unreadable(seq, why);
        let mut tree = self.metadata.write_tree();
        let path = tree.ops.get(&seq).map(|op| op.path(&tree)).unwrap_or_default();
        let absent = tree.ops.get(&seq).and_then(|op| self.files.copies.absence(&tree, op.file())).or(unreadable);
        if absent.is_none() {
            self.counters.failures.fetch_add(1, Ordering::Relaxed);
        }
        if !tree.ops.contains_key(&seq) {
            return;
        }
        if opened_up && tree.drain_queue().retry(seq, OPENED_UP_MAX) {
            return;
        }
        let (place, text) = match &absent {
            Some(absent) => (absent.place.clone(), absent.text.clone()),
            None => {
                let (store, advice) = (self.base.store.describe(), verdict::advise(verdict::errno_of(why)));
                let text = format!("the store {store} refused it ({why}). {} {}", advice.meaning, advice.remedy);
                (store, text)
            }
        };
        tree.drain_queue().fail(seq, |failures, first| {
            let lasting = judged == Verdict::Refuse
                || first.elapsed() >= retry
                || absent.as_ref().is_some_and(|absent| absent.lasting);
            tracing::warn!(path = %String::from_utf8_lossy(&path), %why, failures, lasting, "drain");
            let due = self.pause.next_try(seq, failures, clock::tick(), first + retry);
            (due, Trouble { errno, place, text, lasting })
        });
        // The store is not to blame for what a tier cannot deliver.
        if absent.is_none() {
            self.pause.failed(seq, verdict::errno_of(why));
        }
        drop(tree);
        if self.pause.may() != May::All {
            self.take_back_jobs();
        }
    }

    /// Is it the tier that cannot be read, where the error may come from either side?
    fn unreadable(&self, seq: Seq, why: &std::io::Error) -> Option<Absence> {
        let code = why.raw_os_error()?;
        let file = match &self.metadata.read_tree().ops.get(&seq)?.kind {
            OpKind::Publish { file, .. } => *file,
            _ => return None,
        };
        let either = surgetank_tier::is_sickness(rustix::io::Errno::from_raw_os_error(code));
        either.then(|| self.files.copies.unreadable(file)).flatten()
    }

    /// Opens the directories of an operation that their owner has closed meanwhile.
    fn open_up(&self, seq: Seq) -> bool {
        let places = {
            let tree = self.metadata.read_tree();
            tree.ops.get(&seq).map(|op| surgetank_state::places(&op.kind)).unwrap_or_default()
        };
        // (All of them.)
        places.iter().filter(|(dir, _)| self.files.access.open_up(*dir)).count() > 0
    }
}
