//! Locks of names. GridFS lets a name have many files, of which the newest counts. So only an agent that changes the name alone
//! can ensure that its version follows the intended one.
//!
//! A lock is a document whose id is the name. **Its holder may die**: an agent that sees the same holder for `Limits::hold`, by its
//! own clock, removes the lock (also one without a holder). The danger: a holder that lives and is slow. It sends no request
//! after half of that time. A request can then still be under way for longer than the other half. The holder whose answer comes
//! that late checks whether another agent changed the name meanwhile.

use std::time::Instant;

use super::bson::{Value, fields};
use super::failure::{Failure, Meaning};
use super::server::{Kind, Server, Sure, new_id};
use surgetank_types::error::Errno;

const PAUSE: std::time::Duration = std::time::Duration::from_millis(2);
/// An agent that waits for this many times `Limits::hold` gets an error.
const HOLDS_MAX: u32 = 10;

pub struct Held {
    since: Instant,
    limit: std::time::Duration,
}

impl Held {
    /// The holder may send a change of the name until then.
    pub fn until(&self) -> Instant {
        self.since + self.limit / 2
    }

    /// No other agent can have the lock yet.
    pub fn is_sure(&self) -> bool {
        surgetank_types::clock::tick().saturating_duration_since(self.since) < self.limit
    }
}

impl Server {
    /// Runs `act` while no other agent changes the name. (Other clients ignore the lock.)
    pub fn alone_with<T>(&self, key: &str, act: impl FnOnce(&Held) -> Result<T, Failure>) -> Result<T, Failure> {
        let (filename, me) = (self.filename(key), new_id()?);
        let held = self.take(&filename, me)?;
        let done = act(&held);
        // A lock that stays expires.
        if let Err(why) = self.delete(Kind::Locks, fields! { "_id": filename.as_str(), "by": me }, Sure::Seen) {
            tracing::debug!("{}: {key} stays locked for a while: {why}", self.place);
        }
        done
    }

    fn take(&self, filename: &str, me: super::bson::Id) -> Result<Held, Failure> {
        let limit = self.place.limits.hold;
        let (begun, mut seen) = (surgetank_types::clock::tick(), None);
        let mut pause = PAUSE;
        loop {
            let since = surgetank_types::clock::tick();
            match self.insert(Kind::Locks, vec![fields! { "_id": filename, "by": me }], Sure::Seen) {
                Ok(()) => return Ok(Held { since, limit }),
                Err(why) if why.meaning != Meaning::Twice => return Err(why),
                Err(_) => {}
            }
            let found = self.find(Kind::Locks, fields! { "_id": filename }, None, Some(1))?;
            // (A lock without a holder counts as null.)
            let by = found.first().map(|lock| lock.get("by").cloned().unwrap_or(Value::Null));
            // This agent has the lock: the answer was lost.
            if by == Some(me.into()) {
                return Ok(Held { since, limit });
            }
            match (&seen, by) {
                (_, None) => seen = None,
                (Some((same, first)), Some(by)) if *same == by => {
                    if surgetank_types::clock::tick().saturating_duration_since(*first) >= limit {
                        tracing::warn!("{}: the holder of the lock of {filename} has expired", self.place);
                        self.delete(Kind::Locks, fields! { "_id": filename, "by": &by }, Sure::Seen)?;
                    }
                }
                (_, Some(by)) => seen = Some((by, surgetank_types::clock::tick())),
            }
            if surgetank_types::clock::tick().saturating_duration_since(begun) >= limit * HOLDS_MAX {
                return Err(Failure::ours(Errno::AGAIN, "other agents held the lock of the name all the time"));
            }
            surgetank_types::sync::thread::sleep(pause);
            pause = (pause * 2).min(100 * PAUSE);
        }
    }
}
