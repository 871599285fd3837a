//! Requests to the store with a limit on how long the caller waits.
//!
//! The danger that it avoids: a store whose server is gone blocks the thread that asks, for minutes. So another thread asks.
//!
//! - An optional answer ([`StoreQueries::would_ask`]): after a second the caller continues with what the agent knows. While one
//!   question is unanswered no other optional one is asked; its answer shows that the store is back.
//! - A necessary answer ([`StoreQueries::must_ask`]): a process waits for it, at most for `retry` where the store is a server. A slow
//!   server is not an absent one: while it answers another question the process waits on.

use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use surgetank_store::verdict::Verdict;
use surgetank_store::{Cred, Space, Store, StorePath, verdict};
use surgetank_types::clock;
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::FileId;
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};
use surgetank_types::workers::Workers;

use crate::base::waits::Waits;

/// The time limit of an optional question.
const TIMEOUT: Duration = Duration::from_secs(1);
/// The number of idle threads that wait for the next question.
const IDLE_MAX: usize = 8;
/// How often a thread that waits for a required answer checks whether its program was killed.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The store's room is not asked for more often by programs that only want to know it.
const LATELY: Duration = Duration::from_millis(200);
/// The root of an object store exists without a question. This name in it does not exist.
const NEVER_THERE: &[u8] = b".surgetank-there";
/// The number of directories that are remembered as changeable.
const CHANGEABLE_MAX: usize = 4096;

/// Requests to the store, each with a limit on how long its caller waits.
pub struct StoreQueries {
    store: Arc<dyn Store>,
    /// How long a server may be silent.
    retry: Duration,
    store_ttl: Duration,
    waits: Arc<Waits>,
    asking: Asking,
    /// Directories in which the store lets these users (uid, gid) make names, and when it said so.
    changeable: Mutex<HashMap<(FileId, u32, u32), Instant>>,
    space: Mutex<Option<(Space, Instant)>>,
}

/// The threads that ask.
struct Asking {
    workers: Workers,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Questions for which no caller waits any more.
    unanswered: u32,
    since: Option<Instant>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A question that another thread asks.
struct Asked<T> {
    begun: Instant,
    answered: Receiver<T>,
    /// Set before the answer arrived: then the asking thread reports that the store is back.
    given_up: Arc<Mutex<bool>>,
}

impl<T> Asked<T> {
    /// The outer `None`: no answer yet. The inner `None`: there will not be an answer.
    fn answer_within(&self, time: Duration) -> Option<Option<T>> {
        match self.answered.recv_timeout(time) {
            Ok(answer) => Some(Some(answer)),
            Err(RecvTimeoutError::Disconnected) => Some(None),
            Err(RecvTimeoutError::Timeout) => None,
        }
    }
}

impl Default for Asking {
    fn default() -> Self {
        Self { workers: Workers::new("ask", IDLE_MAX), state: Arc::default() }
    }
}

impl Asking {
    /// `None`: no answer; the caller continues without it.
    fn ask<T: Send + 'static>(&self, question: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        if cfg!(feature = "schedules") {
            // Where the test decides which thread runs, no store hangs.
            return Some(question());
        }
        if locked(&self.state).unanswered > 0 {
            return None;
        }
        let asked = self.begin(question)?;
        match asked.answer_within(TIMEOUT) {
            Some(answer) => answer,
            None => self.give_up(&asked),
        }
    }

    /// `None`: no thread is available.
    fn begin<T: Send + 'static>(&self, question: impl FnOnce() -> T + Send + 'static) -> Option<Asked<T>> {
        let begun = clock::tick();
        let (answer, answered) = channel();
        let given_up = Arc::new(Mutex::new(false));
        let (state, too_late) = (self.state.clone(), given_up.clone());
        let question = move || {
            let _ = answer.send(question());
            if *locked(&too_late) {
                let mut state = locked(&state);
                state.unanswered -= 1;
                if state.unanswered == 0 {
                    state.since = None;
                }
            }
        };
        self.workers.run(question).ok()?;
        Some(Asked { begun, answered, given_up })
    }

    /// The answer, if it arrived in the last moment. Otherwise the store counts as silent until it arrives.
    fn give_up<T>(&self, asked: &Asked<T>) -> Option<T> {
        let mut given_up = locked(&asked.given_up);
        if let Ok(answer) = asked.answered.try_recv() {
            return Some(answer);
        }
        *given_up = true;
        let mut state = locked(&self.state);
        state.unanswered += 1;
        let since = state.since.get_or_insert(asked.begun);
        *since = (*since).min(asked.begun);
        tracing::warn!("the store does not answer; what is known is believed");
        None
    }

    fn silent_for(&self) -> Option<Duration> {
        locked(&self.state).since.map(|since| since.elapsed())
    }
}

impl StoreQueries {
    pub(crate) fn new(store: Arc<dyn Store>, retry: Duration, store_ttl: Duration, waits: Arc<Waits>) -> Self {
        Self {
            store,
            retry,
            store_ttl,
            waits,
            asking: Asking::default(),
            changeable: Mutex::default(),
            space: Mutex::default(),
        }
    }

    /// Asks the store what we can do without knowing. `None`: it did not answer.
    pub(crate) fn would_ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&dyn Store) -> T + Send + 'static,
    ) -> Option<T> {
        let store = self.store.clone();
        self.asking.ask(move || question(&*store))
    }

    /// Asks the store a required question, for a program that waits; `path` is the subject. For a store with plain
    /// files, the calling thread asks, because the kernel's call ends when its file system allows it. A killed program
    /// does not wait.
    ///
    /// Errors: `ETIMEDOUT` if the server answers nothing for `retry`, or for a second when it has already been silent
    /// that long.
    pub(crate) fn must_ask<T: Send + 'static>(
        &self,
        (who, path): (Cred, &StorePath),
        question: impl FnOnce(&dyn Store, Cred, &StorePath) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        if cfg!(feature = "schedules") || self.store.features().plain_files {
            return question(&*self.store, who, path);
        }
        let (store, at) = (self.store.clone(), path.clone());
        let no_thread = || io::Error::from_raw_os_error(libc::EAGAIN);
        let asked = self.asking.begin(move || question(&*store, who, &at)).ok_or_else(no_thread)?;
        let retry = self.retry.max(TIMEOUT);
        let timeout = if self.silent_for().is_some_and(|silent| silent >= retry) { TIMEOUT } else { retry };
        let mut since = asked.begun;
        let mut other: Option<Asked<bool>> = None;
        loop {
            let left = timeout.saturating_sub(since.elapsed());
            if let Some(answer) = asked.answer_within(left.min(LOOK_EVERY)) {
                return answer.ok_or_else(no_thread)?;
            }
            if self.waits.is_killed() {
                return Err(io::Error::from_raw_os_error(libc::EINTR));
            }
            if other.is_none() && since.elapsed() >= timeout / 2 {
                other = self.asking.begin(self.is_alive(who, path));
            }
            if since.elapsed() < timeout {
                continue;
            }
            match other.take().map(|other| (other.answer_within(Duration::ZERO), other)) {
                Some((Some(Some(true)), _)) => since = clock::tick(),
                Some((None, other)) => {
                    self.asking.give_up(&other);
                    break;
                }
                _ => break,
            }
        }
        self.asking.give_up(&asked).unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)))
    }

    /// Asks about a single name, without the time that the driver gives to programs.
    fn is_alive(&self, who: Cred, path: &StorePath) -> impl FnOnce() -> bool + Send + 'static {
        let path = if *path == StorePath::root() { path.join(NEVER_THERE) } else { path.clone() };
        let store = self.store.clone();
        move || store.stat(who, &path).map_or_else(|why| crate::base::queries::is_absent(&why), |_| true)
    }

    /// The same for an open file of the store.
    pub(crate) fn would_stat(&self, file: Arc<std::fs::File>) -> Option<rustix::fs::Stat> {
        self.asking.ask(move || rustix::fs::fstat(&*file))?.ok()
    }

    /// For how long it has not answered, if it does not.
    pub fn silent_for(&self) -> Option<Duration> {
        self.asking.silent_for()
    }

    /// Who waits for the store to take something, since then, gets the error of one that does not answer.
    pub(crate) fn must_answer(&self, since: Instant) -> FsResult<()> {
        let retry = self.retry;
        if since.elapsed() < retry || self.silent_for().is_none_or(|silent| silent < retry) {
            return Ok(());
        }
        Err(Fault::new(Errno::TIMEDOUT, self.silence()))
    }

    /// Asks it for something that takes no time, to know.
    pub(crate) fn ask_whether_alive(&self) {
        let who = Cred { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        self.would_ask(move |store| store.stat(who, &StorePath::root()).map(drop));
    }

    /// In words.
    pub fn silence(&self) -> String {
        let advice = verdict::advise(Errno::TIMEDOUT);
        format!("the store {} does not answer. {} {}", self.store.describe(), advice.meaning, advice.remedy)
    }

    /// The store has said so a moment ago.
    pub(crate) fn is_changeable(&self, dir: FileId, who: Cred) -> bool {
        let ttl = self.store_ttl;
        locked(&self.changeable).get(&(dir, who.uid, who.gid)).is_some_and(|at| at.elapsed() < ttl)
    }

    /// Does the store refuse to have names made or removed in the directory? The program gets the error now, and not the
    /// drain later. The answer is believed for a while. A store that cannot answer does not refuse.
    pub(crate) fn may_change(&self, dir: FileId, who: Cred, path: &StorePath) -> io::Result<()> {
        let key = (dir, who.uid, who.gid);
        if self.is_changeable(dir, who) {
            return Ok(());
        }
        let path = path.clone();
        match self.would_ask(move |store| store.may_write_dir(who, &path)) {
            Some(Err(why)) if verdict::classify(verdict::errno_of(&why)) == Verdict::Refuse => Err(why),
            Some(Err(_)) | None => Ok(()),
            Some(Ok(())) => {
                let mut changeable = locked(&self.changeable);
                if changeable.len() >= CHANGEABLE_MAX {
                    changeable.clear();
                }
                changeable.insert(key, clock::tick());
                Ok(())
            }
        }
    }

    /// The same, or those of a moment ago: the shim asks with each file.
    pub(crate) fn space_lately(&self) -> io::Result<Space> {
        let known = *locked(&self.space);
        match known.filter(|(_, asked)| asked.elapsed() < LATELY) {
            Some((space, _)) => Ok(space),
            None => self.space_now(),
        }
    }

    /// The store's numbers, or those it had when it last answered.
    pub(crate) fn space_now(&self) -> io::Result<Space> {
        let asked = self.would_ask(|store| store.space(&StorePath::root()));
        let mut known = locked(&self.space);
        match (asked, *known) {
            (Some(Ok(space)), _) => Ok(known.insert((space, clock::tick())).0),
            (_, Some((space, _))) => Ok(space),
            (Some(Err(why)), None) => Err(why),
            (None, None) => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
        }
    }
}

/// The store is in trouble, not the file.
pub(crate) fn passes(why: &io::Error) -> bool {
    verdict::classify(verdict::errno_of(why)) == Verdict::Retry
}

pub(crate) fn is_absent(why: &io::Error) -> bool {
    matches!(why.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_does_not_wait_for_a_silent_store() {
        let asking = Asking::default();
        assert_eq!(asking.ask(|| 1), Some(1));
        let (send, received) = channel::<()>();
        assert_eq!(asking.ask(move || received.recv()), None);
        assert!(asking.silent_for().is_some());
        // The second question is not asked at all.
        assert_eq!(asking.ask(|| -> u32 { unreachable!("asked while another question was open") }), None);
        send.send(()).unwrap();
        while asking.silent_for().is_some() {
            std::thread::yield_now();
        }
        assert_eq!(asking.ask(|| 2), Some(2));
    }
}
