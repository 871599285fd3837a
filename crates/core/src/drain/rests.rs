//! Rests between the pieces of one file's copy, which its hints want while other files wait for the drain.

use std::time::{Duration, Instant};

use surgetank_policy::hint::module::Moment;
use surgetank_policy::hint::{Acting, listens};
use surgetank_types::clock;
use surgetank_types::sync::{Mutex, PoisonError};

use crate::files::dispatcher::Dispatcher;

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
    pub fn new(acting: &Acting) -> Self {
        let acting = listens(acting, Moment::Drains).then(|| acting.clone());
        Self { acting, since: Mutex::new((clock::tick(), Duration::ZERO)) }
    }

    /// A piece was copied, and the next one has not begun.
    pub fn between_pieces(&self, others_wait: &dyn Fn() -> bool, is_wanted: &dyn Fn() -> bool) {
        let Some(acting) = &self.acting else { return };
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, mut owed) = *since;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use surgetank_policy::hint::Hints;

    fn rests(share: &str) -> Rests {
        let mut hints = Hints::default();
        hints.set("drain_share", share).expect("set");
        Rests::new(&hints.advice().acting)
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
        let rests = Rests::new(&Acting::default());
        rests.between_pieces(&|| unreachable!("nothing is asked"), &|| true);
    }
}
