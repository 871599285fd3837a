//! Who changes a name just now. GridFS lets a name have many files, of which the newest counts; that one is to follow
//! another, and no third, can only be seen to by whoever changes the name alone.
//!
//! A lock is a document whose id is the name. **Its holder may die**: whoever sees the same one hold it for `Limits::hold`, by his
//! own clock, takes it away (also one that does not say whose it is). The danger: a holder that lives and is slow. He sends
//! nothing, and nothing again, when half of that time is over; what then still may happen is that his request is on its way
//! for longer than the other half. Whose answer came so late looks whether somebody else was there meanwhile.

use std::time::Instant;

use super::bson::{Value, fields};
use super::failure::{Failure, Meaning};
use super::server::{Kind, Server, Sure, new_id};
use surgetank_types::error::Errno;

const PAUSE: std::time::Duration = std::time::Duration::from_millis(2);
/// Whoever waits for longer than so many holders could have died is told so.
const HOLDS_MAX: u32 = 10;

pub struct Held {
    since: Instant,
    limit: std::time::Duration,
}

impl Held {
    /// Until then a change of the name may be sent.
    pub fn until(&self) -> Instant {
        self.since + self.limit / 2
    }

    /// Nobody else can have it yet.
    pub fn is_sure(&self) -> bool {
        surgetank_types::clock::tick().saturating_duration_since(self.since) < self.limit
    }
}

impl Server {
    /// Nobody else of ours changes the name while this goes on. (Strangers know nothing of it.)
    pub fn alone_with<T>(&self, key: &str, act: impl FnOnce(&Held) -> Result<T, Failure>) -> Result<T, Failure> {
        let (filename, me) = (self.filename(key), new_id()?);
        let held = self.take(&filename, me)?;
        let done = act(&held);
        // Left there, it is taken away when its time is over.
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
            // (Null is also what does not say.)
            let by = found.first().map(|lock| lock.get("by").cloned().unwrap_or(Value::Null));
            // An answer was lost.
            if by == Some(me.into()) {
                return Ok(Held { since, limit });
            }
            match (&seen, by) {
                (_, None) => seen = None,
                (Some((same, first)), Some(by)) if *same == by => {
                    if surgetank_types::clock::tick().saturating_duration_since(*first) >= limit {
                        tracing::warn!("{}: whoever changed {filename} is no more", self.place);
                        self.delete(Kind::Locks, fields! { "_id": filename, "by": &by }, Sure::Seen)?;
                    }
                }
                (_, Some(by)) => seen = Some((by, surgetank_types::clock::tick())),
            }
            if surgetank_types::clock::tick().saturating_duration_since(begun) >= limit * HOLDS_MAX {
                return Err(Failure::ours(Errno::AGAIN, "others have held the name all the time"));
            }
            surgetank_types::sync::thread::sleep(pause);
            pause = (pause * 2).min(100 * PAUSE);
        }
    }
}
