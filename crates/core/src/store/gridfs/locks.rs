//! Who changes a name just now. GridFS lets a name have many files, of which the newest counts; that one is to follow
//! another, and no third, can only be seen to by whoever changes the name alone.
//!
//! A lock is a document whose id is the name. **Its holder may die**: whoever sees the same one hold it for `Limits::hold`, by his
//! own clock, takes it away. The danger: a holder that lives and is slow. He does not begin to publish when half of that time
//! is over; what then still may happen is that his request is on its way for longer than the other half.

use std::time::Instant;

use super::bson::fields;
use super::failure::{Failure, Meaning};
use super::server::{Kind, Server, Sure, new_id};
use crate::error::Errno;

const PAUSE: std::time::Duration = std::time::Duration::from_millis(2);

pub struct Held {
    since: Instant,
    limit: std::time::Duration,
}

impl Held {
    /// There is time enough to publish.
    pub fn in_time(&self) -> Result<(), Failure> {
        if self.since.elapsed() < self.limit / 2 {
            return Ok(());
        }
        Err(Failure::ours(Errno::AGAIN, "the server is so slow that somebody else may change the name meanwhile"))
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
        let mut seen = None;
        let mut pause = PAUSE;
        loop {
            let since = crate::clock::tick();
            match self.insert(Kind::Locks, vec![fields! { "_id": filename, "by": me }], Sure::Seen) {
                Ok(()) => return Ok(Held { since, limit }),
                Err(why) if why.meaning != Meaning::Twice => return Err(why),
                Err(_) => {}
            }
            let found = self.find(Kind::Locks, fields! { "_id": filename }, None, Some(1))?;
            let Some(by) = found.first().and_then(|lock| lock.get("by")).cloned() else { continue };
            // An answer was lost.
            if by == me.into() {
                return Ok(Held { since, limit });
            }
            match &seen {
                Some((same, first)) if *same == by => {
                    if crate::clock::tick().saturating_duration_since(*first) >= limit {
                        tracing::warn!("{}: whoever changed {filename} is no more", self.place);
                        self.delete(Kind::Locks, fields! { "_id": filename, "by": &by }, Sure::Seen)?;
                    }
                }
                _ => seen = Some((by, crate::clock::tick())),
            }
            crate::sync::thread::sleep(pause);
            pause = (pause * 2).min(100 * PAUSE);
        }
    }
}
