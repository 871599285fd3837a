//! Files are stored in the order in which they were closed, and a program does not wait for its close to be dealt with
//! (RELEASE has no answer that it waits for). So that no thread overtakes another, requests are read by one thread at a time,
//! which puts down the RELEASEs among them, and each of those has its turn.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::inbox::{Inbox, Place};
use crate::mount::abi::opcode;
use crate::mount::request::Header;

/// A close that takes so long (its file lies in a slow store) does not keep the others any longer.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub struct Turns {
    /// Whoever reads has this: requests that were read already, to be served before others.
    reading: Mutex<VecDeque<Vec<u8>>>,
    /// RELEASEs that were read and are not done, by their numbers.
    releases: Mutex<VecDeque<u64>>,
    done: Condvar,
}

/// A RELEASE that is being carried out.
pub struct Turn<'a> {
    turns: &'a Turns,
    unique: u64,
}

impl Turns {
    pub fn behind(requests: Vec<Vec<u8>>) -> Self {
        Self { reading: Mutex::new(requests.into()), ..Self::default() }
    }

    /// The next request.
    pub fn read(&self, inbox: &mut Inbox) -> Result<Place, Errno> {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let place = match reading.pop_front() {
            Some(request) => inbox.put(&request),
            None => inbox.read()?,
        };
        if let Ok(header) = Header::decode(inbox.bytes(&place))
            && header.opcode == opcode::RELEASE
        {
            self.releases().push_back(header.unique);
        }
        Ok(place)
    }

    /// Waits until those before it are done. Nothing to wait for: not a RELEASE.
    pub fn turn(&self, header: &Header) -> Option<Turn<'_>> {
        if header.opcode != opcode::RELEASE {
            return None;
        }
        let unique = header.unique;
        let until = Instant::now() + PATIENCE;
        let mut releases = self.releases();
        while releases.front().is_some_and(|first| *first != unique) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            releases = self.done.wait_timeout(releases, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(Turn { turns: self, unique })
    }

    fn releases(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.releases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut releases = self.turns.releases();
        releases.retain(|unique| *unique != self.unique);
        if !releases.is_empty() {
            self.turns.done.notify_all();
        }
    }
}
