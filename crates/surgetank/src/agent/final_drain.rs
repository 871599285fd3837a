//! The end that comes from outside: SIGTERM, or the announced end of the job. The agent admits no new run and makes
//! everything due. It keeps writing a note of what is not durable and where, because the kill that follows gives no
//! warning.
//!
//! The danger that it avoids: a note that outlives its reason, written after the agent's own last verdict.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use surgetank_core::report::Scope;
use surgetank_policy::config::Deadline;

use super::place::Place;
use super::socket::Desk;

const NOTED_EVERY: Duration = Duration::from_secs(1);
/// Short, because the clock may be set meanwhile.
const LOOK_EVERY: Duration = Duration::from_secs(10);

pub struct FinalDrain {
    desk: Arc<Desk>,
    place: Arc<Place>,
    stage: Mutex<Stage>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    NotYet,
    Begun,
    /// An agent that leaves in order writes the note itself.
    Over,
}

impl FinalDrain {
    pub fn new(desk: Arc<Desk>, place: Arc<Place>) -> Arc<Self> {
        Arc::new(Self { desk, place, stage: Mutex::new(Stage::NotYet) })
    }

    /// Takes effect once; a second call only makes later files due.
    pub fn begin(self: &Arc<Self>, why: &str) {
        tracing::warn!("{why}: no new run is admitted, everything is due");
        self.desk.engine.job_ends();
        self.desk.users.stop_admitting();
        {
            let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
            if *stage != Stage::NotYet {
                return;
            }
            *stage = Stage::Begun;
        }
        let final_drain = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("final-drain".into()).spawn(move || {
            while final_drain.note() {
                std::thread::sleep(NOTED_EVERY);
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "what is left is not written down before the end");
        }
    }

    /// Returns when the deadline is near.
    pub fn await_deadline(self: &Arc<Self>, deadline: &Deadline) {
        while !deadline.is_near() {
            let left = deadline.left().saturating_sub(deadline.lead);
            std::thread::sleep(left.clamp(Duration::from_millis(10), LOOK_EVERY));
        }
        self.begin(&format!("the job ends at {}, says {}", deadline.shown(), deadline.from));
    }

    /// False when the note is not wanted any more.
    fn note(&self) -> bool {
        let verdict = self.desk.engine.verdict(&Scope::everything());
        let stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if *stage == Stage::Over {
            return false;
        }
        if let Err(error) = self.place.put_undrained((!verdict.is_durable()).then_some(&verdict)) {
            tracing::error!(%error, "the note of what is left");
        }
        true
    }

    /// From here on the agent writes its own verdict.
    pub fn end(&self) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = Stage::Over;
    }
}
