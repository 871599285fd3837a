//! Describes what blocks the drain and writers.

use std::time::Duration;

use surgetank_core::report::{Listing, NoRoom, PathText, Trouble};
use surgetank_types::model::RunId;

use super::Served;

const SHORT_TOLD_MAX: usize = 20;

impl Served {
    /// `ends`: this is the final drain, which gives up.
    pub(super) fn trouble(&self, ends: bool) -> Option<Trouble> {
        let place = self.namespace.base.store.describe();
        let paused = self.drain.paused_since_unix_seconds();
        // The drain can be in trouble without a failure.
        let silent = self.namespace.base.queries.silent_for();
        if let Some(time) = silent.or(self.drain.stalled_for()) {
            let since_unix_seconds = paused.unwrap_or_else(|| before_unix(time));
            let slow =
                || format!("the store {place} has been at one thing for {} s: it is slow, or hangs", time.as_secs());
            let reason = if silent.is_some() { self.namespace.base.queries.silence() } else { slow() };
            return Some(Trouble { path: None, place, reason, since_unix_seconds });
        }
        let mut stuck = self.namespace.questions.stuck()?;
        if ends && !stuck.lasting {
            let left = self.namespace.base.config.retry.saturating_sub(stuck.since).as_secs();
            stuck.text.push_str(&format!(
                " The agent retries for {left} s; files that are left then stay safe in the tiers."
            ));
        }
        Some(Trouble {
            path: Some(PathText(stuck.path)),
            place: stuck.place,
            reason: stuck.text,
            since_unix_seconds: before_unix(stuck.since).min(paused.unwrap_or(i64::MAX)),
        })
    }

    /// Writers that wait for room, or waited without success.
    pub(super) fn short_of_room(&self, refused: bool) -> impl Iterator<Item = Trouble> {
        let place = self.namespace.base.store.describe();
        let timeout = self.namespace.base.config.wait_for_room;
        let short =
            self.namespace.files.room_waits.short_of_room().into_iter().filter(move |short| refused || !short.refused);
        short.take(SHORT_TOLD_MAX).map(move |short| Trouble {
            path: Some(PathText(short.path)),
            place: place.clone(),
            reason: match short.refused {
                true => format!("a writer got an error: {}", short.why),
                false => {
                    let left = timeout.saturating_sub(short.since.elapsed());
                    format!("a writer waits, {} s more: {}", left.as_secs(), short.why)
                }
            },
            since_unix_seconds: short.at_unix_seconds,
        })
    }
}

/// Writers that got an error because no room was left.
pub(super) fn refused_for_room(served: &Served, run: Option<RunId>) -> Listing<NoRoom> {
    let short = served.namespace.files.room_waits.short_of_room().into_iter();
    short
        .filter(|short| short.refused && run.is_none_or(|run| short.run == run || short.run == RunId(0)))
        .map(|short| NoRoom { path: PathText(short.path), why: short.why })
        .collect()
}

pub(super) fn before_unix(time: Duration) -> i64 {
    now_unix() - i64::try_from(time.as_secs()).unwrap_or(0)
}

fn now_unix() -> i64 {
    surgetank_types::clock::now().secs()
}
