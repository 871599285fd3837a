//! Events that went wrong, which the agent reports to the user: in verdicts, and in the exit codes of `run` and `wait`.

use surgetank_types::clock;
use surgetank_types::model::RunId;
use surgetank_types::sync::{Arc, Mutex, PoisonError};

use crate::base::events::Events;
use crate::base::succession::Succession;
use crate::report::run::EventKind;

/// An event that went wrong and that the agent reports to the user.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Noted {
    /// Path below the served directory, or the operation in words.
    pub path: String,
    /// Description of the event for the user.
    pub what: String,
    /// The run that it concerns; 0: all runs.
    pub run: RunId,
    /// It makes `run` and `wait` return 3.
    pub counts: bool,
    /// Name of the agent's version, when another client's file has the name.
    pub kept_as: Option<String>,
    /// Time of the event, in seconds since 1970.
    pub at_unix_seconds: i64,
}

/// The events of this agent that went wrong.
pub struct Notes {
    events: Arc<Events>,
    succession: Arc<Succession>,
    pub(crate) troubles: Mutex<Vec<Noted>>,
}

impl Notes {
    pub(crate) fn new(events: Arc<Events>, succession: Arc<Succession>) -> Self {
        Self { events, succession, troubles: Mutex::default() }
    }

    /// Notes an event that the agent reports to the user.
    pub(crate) fn note(&self, run: RunId, path: String, what: impl Into<String>, counts: bool) {
        self.note_kept(run, path, what, counts, None);
    }

    pub(crate) fn note_kept(
        &self,
        run: RunId,
        path: String,
        what: impl Into<String>,
        counts: bool,
        kept_as: Option<String>,
    ) {
        let what = what.into();
        tracing::warn!(path, what, "noted");
        if kept_as.is_some() {
            self.events.count(EventKind::Conflict, "store", "another client had changed it in the store", 0);
        }
        let at_unix_seconds = clock::now().secs();
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounded: the queue has the facts that matter; this is only the story around them.
        if troubles.len() < 10_000 {
            let noted = Noted { path, what, run, counts, kept_as, at_unix_seconds };
            self.succession.hand_off_noted(&noted);
            troubles.push(noted);
        }
    }

    pub fn troubles(&self) -> Vec<Noted> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
