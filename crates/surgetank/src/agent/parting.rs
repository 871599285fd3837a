//! The end that comes from outside: SIGTERM, or the end of the job that was announced. Nobody new is admitted, everything is
//! due, and what is left, and where, is written down again and again: the kill that follows asks nobody.
//!
//! The danger it avoids: a note that outlives the reason for it, written after the agent's last word.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use surgetank_core::report::Scope;
use surgetank_policy::config::Deadline;

use super::place::Place;
use super::socket::Desk;

const NOTED_EVERY: Duration = Duration::from_secs(1);
/// The clock may be set meanwhile.
const LOOK_EVERY: Duration = Duration::from_secs(10);

pub struct Parting {
    desk: Arc<Desk>,
    place: Arc<Place>,
    stage: Mutex<Stage>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    NotYet,
    Begun,
    /// Who leaves in order writes the note itself.
    Over,
}

impl Parting {
    pub fn new(desk: Arc<Desk>, place: Arc<Place>) -> Arc<Self> {
        Arc::new(Self { desk, place, stage: Mutex::new(Stage::NotYet) })
    }

    /// Once; again it only hastens what came since.
    pub fn begin(self: &Arc<Self>, why: &str) {
        tracing::warn!("{why}: nobody new is admitted, everything is due");
        self.desk.engine.job_ends();
        self.desk.users.stop_admitting();
        {
            let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
            if *stage != Stage::NotYet {
                return;
            }
            *stage = Stage::Begun;
        }
        let parting = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("parting".into()).spawn(move || {
            while parting.note() {
                std::thread::sleep(NOTED_EVERY);
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "what is left is not written down before the end");
        }
    }

    /// Returns when it is time.
    pub fn await_deadline(self: &Arc<Self>, deadline: &Deadline) {
        while !deadline.is_near() {
            let left = deadline.left().saturating_sub(deadline.lead);
            std::thread::sleep(left.clamp(Duration::from_millis(10), LOOK_EVERY));
        }
        self.begin(&format!("the job ends at {}, says {}", deadline.shown(), deadline.from));
    }

    /// False when that is not wanted any more.
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

    /// From here on the agent speaks for itself.
    pub fn end(&self) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = Stage::Over;
    }
}
