//! Rests between the pieces of one file's copy, which its hints want while other files wait for the drain.
//!
//! There are none in the order of the queue, where the others would wait for this file all the same. Nor at the end of a run, nor
//! while an operation waits for all copies.

use std::time::{Duration, Instant};

use surgetank_policy::hint::module::Moment;
use surgetank_policy::hint::{Acting, listens};
use surgetank_state::Progress;
use surgetank_types::clock;
use surgetank_types::model::{OpKind, Seq};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Mutex, PoisonError};

use crate::base::Base;
use crate::files::dispatcher::Dispatcher;
use crate::metadata::Metadata;
use crate::metadata::asked::decision_if_asked;

/// Among so many operations another file is looked for.
const OTHERS_MAX: usize = 1024;

/// A rest ends so soon after the other files are copied, or after the copy is not wanted any more.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The rests of one copy.
pub(super) struct Rests {
    /// `None`: its hints want none.
    acting: Option<Acting>,
    /// The beginning of the present piece, and what is left to rest for those before. (A wait of less than a look is put off.)
    since: Mutex<(Instant, Duration)>,
}

impl Rests {
    /// `may_rest`: the copy is not one for which a program waits.
    pub fn new(acting: &Acting, may_rest: bool) -> Self {
        let acting = (may_rest && listens(acting, Moment::Drains)).then(|| acting.clone());
        Self { acting, since: Mutex::new((clock::tick(), Duration::ZERO)) }
    }

    /// A piece was copied, and the next one has not begun.
    pub fn between_pieces(&self, others_wait: &dyn Fn() -> bool, is_wanted: &dyn Fn() -> bool) {
        let Some(acting) = &self.acting else { return };
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, mut owed) = *since;
        // (The time of the copy alone: waits for the store's rate and for other reasons come later.)
        owed += Dispatcher::drained(acting, begun.elapsed(), others_wait());
        while owed >= LOOK_EVERY && is_wanted() && others_wait() {
            let rested = clock::tick();
            surgetank_types::sync::thread::sleep(LOOK_EVERY);
            owed = owed.saturating_sub(rested.elapsed());
        }
        if !others_wait() {
            owed = Duration::ZERO;
        }
        *since = (clock::tick(), owed);
    }

    /// The next piece begins now.
    pub fn next_piece(&self) {
        if self.acting.is_some() {
            self.since.lock().unwrap_or_else(PoisonError::into_inner).0 = clock::tick();
        }
    }
}

/// Are there files besides this operation's that are to be copied now, and gain by a rest?
pub(super) fn others_wait(base: &Base, metadata: &Metadata, seq: Option<Seq>) -> bool {
    if base.end.is_hurried() || base.runs.final_drains.load(Ordering::Relaxed) > 0 {
        return false;
    }
    let now = clock::tick();
    let tree = metadata.read_tree();
    // (A program has begun to wait for it.)
    if seq.and_then(|seq| tree.ops.get(&seq)).is_some_and(|op| op.eager) {
        return false;
    }
    let mut found = false;
    for (other, op) in tree.ops.iter().take(OTHERS_MAX) {
        let is_due = op.error.is_none() && !op.is_last() && tree.due(op) <= now;
        let waits = op.progress == Progress::Waiting && is_due || op.progress == Progress::Staging;
        match op.kind {
            // It waits for all copies.
            OpKind::Rename { .. } | OpKind::Exchange { .. } | OpKind::RemoveDir { .. } if is_due => return false,
            OpKind::Publish { file, .. } if waits && !found && Some(*other) != seq => {
                found = decision_if_asked(metadata, &tree, file, Moment::Drains).is_none();
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use surgetank_policy::hint::Hints;

    fn rests(share: &str) -> Rests {
        let mut hints = Hints::default();
        hints.set("drain_share", share).expect("set");
        Rests::new(&hints.advice().acting, true)
    }

    #[test]
    fn copy_rests_in_proportion_to_its_pieces() {
        let rests = rests("20%");
        surgetank_types::sync::thread::sleep(Duration::from_millis(50));
        let begun = clock::tick();
        rests.between_pieces(&|| true, &|| true);
        assert!(begun.elapsed() >= Duration::from_millis(180), "{:?}", begun.elapsed());
    }

    #[test]
    fn rest_ends_with_the_reason_for_it() {
        for ends_by_others in [true, false] {
            let rests = rests("1%");
            surgetank_types::sync::thread::sleep(Duration::from_millis(300));
            let looks = Cell::new(0);
            let look = || {
                looks.set(looks.get() + 1);
                looks.get() < 4
            };
            let begun = clock::tick();
            if ends_by_others {
                rests.between_pieces(&look, &|| true);
            } else {
                rests.between_pieces(&|| true, &look);
            }
            assert!(begun.elapsed() < Duration::from_secs(20) && looks.get() >= 4);
        }
    }

    #[test]
    fn copy_without_such_a_hint_never_rests() {
        let mut hints = Hints::default();
        hints.set("drain_share", "1%").expect("set");
        for rests in [Rests::new(&Acting::default(), true), Rests::new(&hints.advice().acting, false)] {
            rests.between_pieces(&|| unreachable!("nothing is asked"), &|| true);
        }
    }
}
