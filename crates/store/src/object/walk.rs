//! Walks of a tree (`ls -R`, `find`): a client that lists one directory after the other gets them by the page, not one by one.
//!
//! A listing by directories costs a request for each, however small it is. From the third directory of one parent on, the keys
//! after that directory are requested without a delimiter. One page of them is the listing of that directory and of all that
//! follow, as far as the page extends, with everything below them. While one answer is processed, the next one is requested,
//! because the walker's next directory is predictable.
//!
//! The dangers that it avoids:
//! - a directory that is shown in part (what the page's end cuts off is not used);
//! - an own change that an older answer hides (it is dropped with the directory's listing, and an answer that was requested
//!   before a change is not used);
//! - a server that does not sort or cannot begin after a key (it is not asked again);
//! - pages that large directories make useless (after each, twice as many directories are listed in the ordinary way before the
//!   next).

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use super::{Object, ObjectStore, Objects, Page, Words, locked};
use crate::StorePath;
use surgetank_types::clock::Moment;
use surgetank_types::model::Kind;
use surgetank_types::sync::atomic::{AtomicBool, Ordering};
use surgetank_types::sync::{Mutex, is_finished, thread};

/// From this many listed directories of one parent on, it is a walk.
const WALKS_FROM: u32 = 3;
/// The number of directories between two useless pages doubles at most this often.
const DOUBLINGS_MAX: u32 = 6;
/// A client that lists the next directory later than this does not walk.
const STEP: Duration = Duration::from_secs(10);
const PARENTS_MAX: usize = 1000;
const AHEAD_MAX: usize = 200_000;

/// A directory, as the server describes it.
#[derive(Debug, Default)]
pub(super) struct Level {
    /// Without the directory's own object.
    pub objects: Vec<Object>,
    /// Directories. Those with words have no object of their own; whether the others have one must be asked.
    pub dirs: Vec<Object>,
}

struct Ahead {
    level: Level,
    at: Moment,
}

struct Steps {
    /// Since the last useless page.
    count: u32,
    vain: u32,
    at: Moment,
    /// The directory after the one that was listed last; and whether that one was expected.
    expected: Option<StorePath>,
    in_order: bool,
}

impl Steps {
    fn first() -> Self {
        Self { count: 0, vain: 0, at: Moment::now(), expected: None, in_order: false }
    }

    fn is_walk(&self, more: u32) -> bool {
        self.count + more >= WALKS_FROM << self.vain.min(DOUBLINGS_MAX)
    }
}

/// A walker's request: the first page of one directory, or of all keys of a prefix after one key.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Request {
    Level { below: String },
    Behind { prefix: String, key: String },
}

impl Request {
    /// `None` if the server cannot.
    fn ask(&self, server: &dyn Objects) -> io::Result<Option<Page>> {
        match self {
            Self::Level { below } => server.list(below, true, None).map(Some),
            Self::Behind { prefix, key } => server.list_behind(prefix, key),
        }
    }
}

pub(super) struct Answer {
    pub page: Option<Page>,
    /// The time of the request, and the number of own changes by then.
    pub at: Moment,
    since: u64,
}

struct Foreseen {
    request: Request,
    at: Moment,
    since: u64,
    answer: thread::JoinHandle<io::Result<Option<Page>>>,
}

#[derive(Default)]
pub(super) struct Walks {
    parents: Mutex<HashMap<StorePath, Steps>>,
    ahead: Mutex<HashMap<StorePath, Ahead>>,
    foreseen: Mutex<Option<Foreseen>>,
    cannot: AtomicBool,
}

impl Walks {
    pub fn forget(&self, dir: &StorePath) {
        locked(&self.ahead).remove(dir);
    }

    pub fn forget_all(&self) {
        locked(&self.ahead).clear();
    }

    #[cfg(test)]
    pub fn settle(&self) {
        while locked(&self.foreseen).as_ref().is_some_and(|one| !is_finished(&one.answer)) {
            std::thread::yield_now();
        }
    }

    fn take(&self, dir: &StorePath, ttl: Duration) -> Option<(Level, Moment)> {
        locked(&self.ahead).remove(dir).filter(|ahead| ahead.at.elapsed() < ttl).map(|ahead| (ahead.level, ahead.at))
    }

    /// Counts one more listed directory of the parent. Returns whether that is a walk.
    fn steps(&self, parent: &StorePath, dir: &StorePath) -> bool {
        let mut parents = locked(&self.parents);
        if parents.len() >= PARENTS_MAX {
            parents.retain(|_, steps| steps.at.elapsed() < STEP);
        }
        let steps = parents.entry(parent.clone()).or_insert_with(Steps::first);
        if steps.at.elapsed() >= STEP {
            *steps = Steps::first();
        }
        steps.count = steps.count.saturating_add(1);
        steps.at = Moment::now();
        steps.in_order = steps.expected.take().is_some_and(|expected| expected == *dir);
        steps.is_walk(0) && !self.cannot.load(Ordering::Relaxed)
    }

    /// Expects this directory next. Returns whether it will be sought in a page; `None` if the directories are not listed in
    /// order.
    fn expect(&self, parent: &StorePath, next: &StorePath) -> Option<bool> {
        let mut parents = locked(&self.parents);
        let steps = parents.get_mut(parent)?;
        steps.expected = Some(next.clone());
        steps.in_order.then(|| steps.is_walk(1) && !self.cannot.load(Ordering::Relaxed))
    }

    /// Records a page and whether it was useful.
    fn was_worth_it(&self, parent: &StorePath, worth: bool) {
        if let Some(steps) = locked(&self.parents).get_mut(parent) {
            if worth {
                steps.vain = 0;
            } else {
                (steps.count, steps.vain) = (0, steps.vain + 1);
            }
        }
    }

    /// `is_old`: something has changed since the levels were asked for.
    fn keep(&self, levels: BTreeMap<String, Level>, at: Moment, ttl: Duration, is_old: impl Fn() -> bool) {
        let mut ahead = locked(&self.ahead);
        // (Under the lock: a change counts before it drops what is kept.)
        if is_old() {
            return;
        }
        if ahead.len() + levels.len() > AHEAD_MAX {
            ahead.retain(|_, one| one.at.elapsed() < ttl);
        }
        if ahead.len() + levels.len() <= AHEAD_MAX {
            ahead.extend(levels.into_iter().map(|(dir, level)| (StorePath(dir.into_bytes()), Ahead { level, at })));
        }
    }
}

impl ObjectStore {
    /// The server's answer for the directory, if it was requested with other directories or now is; and its time. `None`: it is to be
    /// listed alone.
    pub(super) fn walk(&self, dir: &StorePath) -> io::Result<Option<(Level, Moment)>> {
        if dir.0.is_empty() || self.listings.ttl.is_zero() {
            return Ok(None);
        }
        let (walks, parent) = (&self.listings.walks, dir.parent());
        let is_walk = walks.steps(&parent, dir);
        if let Some(known) = walks.take(dir, self.listings.ttl) {
            return Ok(Some(known));
        }
        if !is_walk {
            return Ok(None);
        }
        let (prefix, key) = (self.below(&parent)?, self.below(dir)?);
        let Answer { page, at, since } = self.answer(Request::Behind { prefix: prefix.clone(), key: key.clone() })?;
        let Some(page) = page.filter(|page| is_sorted(&page.objects, &key)) else {
            walks.cannot.store(true, Ordering::Relaxed);
            return Ok(None);
        };
        let end = page.next.as_ref().and(page.objects.last()).map(|last| last.key.clone());
        let mut levels = levels_of(page.objects, &prefix);
        if let Some(end) = &end {
            levels.retain(|level, _| !is_below(end, level));
        }
        let own = levels.remove(std::str::from_utf8(&dir.0).unwrap_or_default());
        walks.was_worth_it(&parent, own.is_some());
        if own.is_some()
            && let Some(slash) = end.as_ref().and_then(|end| end.strip_prefix(&prefix)?.find('/'))
            && let Some(key) = end.as_ref().and_then(|end| end.get(..=prefix.len() + slash))
        {
            // The rest, which the page's end cuts off.
            self.foresee(Request::Behind { prefix, key: key.to_owned() });
        }
        walks.keep(levels, at, self.listings.ttl, || self.listings.changes() != since);
        Ok(own.map(|level| (level, at)))
    }

    /// The answer to a request, possibly one of a moment ago.
    pub(super) fn answer(&self, request: Request) -> io::Result<Answer> {
        let foreseen = locked(&self.listings.walks.foreseen).take_if(|foreseen| foreseen.request == request);
        if let Some(Foreseen { at, since, answer, .. }) = foreseen
            && let Ok(Ok(page)) = answer.join()
            && at.elapsed() < self.listings.ttl
            && self.listings.changes() == since
        {
            return Ok(Answer { page, at, since });
        }
        let (at, since) = (Moment::now(), self.listings.changes());
        Ok(Answer { page: request.ask(&*self.server)?, at, since })
    }

    /// Requests the next directory of the same parent ahead, if a client walks.
    pub(super) fn foresee_next(&self, dir: &StorePath) {
        let (walks, parent) = (&self.listings.walks, dir.parent());
        if dir.0.is_empty() || self.listings.ttl.is_zero() {
            return;
        }
        let Some(next) = self.listings.next_of_kind(dir, Kind::Directory) else { return };
        let Some(is_walk) = walks.expect(&parent, &next) else { return };
        if self.listings.fresh(&next).is_some() || locked(&walks.ahead).contains_key(&next) {
            return;
        }
        let (Ok(prefix), Ok(below)) = (self.below(&parent), self.below(&next)) else { return };
        self.foresee(if is_walk { Request::Behind { prefix, key: below } } else { Request::Level { below } });
    }

    fn foresee(&self, request: Request) {
        let mut foreseen = locked(&self.listings.walks.foreseen);
        if foreseen.as_ref().is_some_and(|one| !is_finished(&one.answer)) {
            return;
        }
        let (at, since) = (Moment::now(), self.listings.changes());
        let (server, asked) = (self.server.clone(), request.clone());
        let answer = thread::Builder::new().name("list".to_owned()).spawn(move || asked.ask(&*server));
        *foreseen = answer.ok().map(|answer| Foreseen { request, at, since, answer });
    }
}

fn is_sorted(objects: &[Object], behind: &str) -> bool {
    objects.is_sorted_by(|one, next| one.key < next.key) && objects.first().is_none_or(|first| *first.key > *behind)
}

fn is_below(key: &str, dir: &str) -> bool {
    key.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

/// Every directory below the prefix (without that one) that the keys imply.
fn levels_of(objects: Vec<Object>, prefix: &str) -> BTreeMap<String, Level> {
    let mut levels: BTreeMap<String, Level> = BTreeMap::new();
    for object in objects {
        let Some(rest) = object.key.strip_prefix(prefix) else { continue };
        let dirs = rest.rfind('/').map_or(0, |slash| slash + 1);
        // Keys that are not paths (`a//b`) cannot be shown.
        if rest[..dirs].split_terminator('/').any(|name| matches!(name, "" | "." | "..")) {
            continue;
        }
        let slashes = rest[..dirs].match_indices('/').map(|(at, _)| prefix.len() + at);
        let mut above: Option<&str> = None;
        for end in slashes {
            let dir = &object.key[..end];
            if !levels.contains_key(dir) {
                levels.insert(dir.to_owned(), Level::default());
                if let Some(above) = above.and_then(|above| levels.get_mut(above)) {
                    let is_own = object.key.len() == end + 1;
                    let implied =
                        || Object { key: format!("{dir}/"), words: Some(Words::new()), ..super::names::empty() };
                    above.dirs.push(if is_own { object.clone() } else { implied() });
                }
            }
            above = Some(dir);
        }
        if !object.key.ends_with('/')
            && let Some(level) = above.map(str::to_owned).and_then(|above| levels.get_mut(&above))
        {
            level.objects.push(object);
        }
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory, its objects, and its directories; for each of these, whether it has an object of its own.
    type Told = (String, Vec<String>, Vec<(String, bool)>);

    fn levels(keys: &[&str], prefix: &str) -> Vec<Told> {
        let object = |key: &&str| Object { key: (*key).to_owned(), ..super::super::names::empty() };
        let names = |objects: &[Object]| objects.iter().map(|object| object.key.clone()).collect();
        levels_of(keys.iter().map(object).collect(), prefix)
            .into_iter()
            .map(|(dir, level)| {
                let dirs = level.dirs.iter().map(|dir| (dir.key.clone(), dir.words.is_none())).collect();
                (dir, names(&level.objects), dirs)
            })
            .collect()
    }

    #[test]
    fn levels_of_keys_are_their_directories() {
        let told = levels(&["p/a/", "p/a/f", "p/a//g", "p/b/c/", "p/b/c/d/h", "p/e/", "p/i", "q/j"], "p/");
        let no: Vec<String> = Vec::new();
        let expected = [
            ("p/a", vec!["p/a/f".to_owned()], vec![]),
            ("p/b", no.clone(), vec![("p/b/c/".to_owned(), true)]),
            ("p/b/c", no.clone(), vec![("p/b/c/d/".to_owned(), false)]),
            ("p/b/c/d", vec!["p/b/c/d/h".to_owned()], vec![]),
            ("p/e", no, vec![]),
        ];
        assert_eq!(told, expected.map(|(dir, objects, dirs)| (dir.to_owned(), objects, dirs)));
    }

    #[test]
    fn directory_of_the_pages_last_key_is_cut_off() {
        assert!(is_below("p/a/f", "p/a") && is_below("p/a/b/f", "p/a") && is_below("p/a/", "p/a"));
        assert!(!is_below("p/ab/f", "p/a") && !is_below("p/a", "p/a") && !is_below("p/a-b", "p/a"));
    }
}
