//! The server, as the rest of the driver asks it: a request with its further tries, and the last error.
//!
//! The danger that it avoids: retries that overload a failing server. They are few, with growing random pauses, and limited in
//! time; callers have their own retries.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::failure::{Failure, Meaning};
use super::place::Place;
use super::wire::{Answer, Ask, Throttle, Wire};
use crate::http::part_of;
use crate::object::Abilities;
use surgetank_types::clock::tick;
use surgetank_types::error::{Errno, Error};

/// Longest pause between two tries, whatever the server asks for.
const PAUSE_MAX: Duration = Duration::from_secs(4);

pub struct Server {
    pub place: Place,
    pub wire: Wire,
    throttle: Option<Throttle>,
    pub abilities: OnceLock<Abilities>,
    /// Whether a part that the server copies from an object gets the checksum of the whole object (versitygw 1.8).
    pub ranges_missummed: AtomicBool,
    /// Whether the server writes keys in listings otherwise than requested (versitygw 1.8).
    pub lists_as_xml: AtomicBool,
    /// One thread asks for the abilities; the others wait.
    pub probing: Mutex<()>,
    trouble: Mutex<Option<String>>,
}

impl Server {
    pub fn new(place: Place) -> Result<Self, Error> {
        let wire = Wire::new(&place)?;
        let throttle = place.requests_per_second.map(Throttle::new);
        let (abilities, probing, trouble) = (OnceLock::new(), Mutex::new(()), Mutex::new(None));
        let (ranges_missummed, lists_as_xml) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { place, wire, throttle, abilities, ranges_missummed, lists_as_xml, probing, trouble })
    }

    pub fn whole(&self, key: &str) -> String {
        format!("{}{key}", self.place.prefix)
    }

    /// Asks until there is an answer that `take` can read, or further tries are useless.
    pub fn ask<T>(&self, ask: &Ask<'_>, mut take: impl FnMut(Answer) -> Result<T, Failure>) -> Result<T, Failure> {
        let limits = &self.place.limits;
        let (begun, mut pause, mut unsure) = (tick(), limits.pause, false);
        let mut nth = 1;
        loop {
            if let Some(throttle) = &self.throttle {
                throttle.wait();
            }
            let answer = self.wire.send(ask).and_then(|answer| match answer.status {
                200..=299 => take(answer),
                _ => Err(answer.refusal(ask)),
            });
            let mut why = match answer {
                Ok(answer) => return Ok(answer),
                Err(why) => why,
            };
            why.unsure |= unsure;
            unsure = why.unsure;
            match why.meaning {
                Meaning::Expired => self.wire.renew_credentials(),
                // Learnt once, for the life of the store.
                Meaning::WantsHash if self.wire.learn_to_hash() => continue,
                // Another thread learnt it after this body was sent, or the body was damaged on the way.
                Meaning::WantsHash if self.wire.hashes() => why.again = true,
                _ => {}
            }
            if !why.again || nth >= limits.tries || begun.elapsed() >= limits.all_tries {
                return Err(why);
            }
            let asked = why.wait_seconds.map(Duration::from_secs);
            tracing::debug!(kind = ?ask.kind, nth, "another try: {why}");
            std::thread::sleep(asked.unwrap_or_else(|| part_of(pause)).min(PAUSE_MAX));
            self.wire.counters.tries_again.fetch_add(1, Ordering::Relaxed);
            (pause, nth) = (pause * 3, nth + 1);
        }
    }

    /// The error for the caller: the errno; the server's message goes to the log.
    pub fn report(&self, key: &str, why: Failure) -> io::Error {
        let usual = matches!(why.meaning, Meaning::Condition | Meaning::Source) || why.is(Errno::NOENT);
        if !usual {
            let text = format!("{}/{key}: {why}", self.place);
            tracing::warn!("{text}");
            *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        }
        why.into_io(key)
    }

    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
