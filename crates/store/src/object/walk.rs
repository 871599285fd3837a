//! Trees that are walked (`ls -R`, `find`): who lists one directory after the other is given them by the page, not one by one.
//!
//! A listing by directories costs a request for each, however small it is. From the third directory of one parent on, the
//! keys behind that directory are asked for without a delimiter: one page of them is the listing of it and of all that come
//! after it, as far as the page goes, with what is below them. And while one answer is looked at, the next is under way: the
//! walker's next request can be told from where it is.
//!
//! Dangers avoided: a directory that is shown in part (what the page's end cuts off is not taken from it); a change of ours
//! that an older answer hides (it is forgotten with the directory's listing, and an answer that was asked for before a change
//! is not kept, nor one that was foreseen before it taken); a server that does not sort or cannot begin behind a key (it is asked no more); pages that large directories
//! make vain (after each such one, twice as many directories are listed in the ordinary way before the next is tried).

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use super::{Object, ObjectStore, Objects, Page, Words, locked};
use crate::StorePath;
use surgetank_types::clock::Moment;
use surgetank_types::model::Kind;
use surgetank_types::sync::atomic::{AtomicBool, Ordering};
use surgetank_types::sync::{Mutex, is_finished, thread};

/// The listing of so many of a parent's directories is a walk.
const WALKS_FROM: u32 = 3;
/// So many times the number of directories between two vain pages doubles.
const DOUBLINGS_MAX: u32 = 6;
/// Who lists the next one later than this does not walk.
const STEP: Duration = Duration::from_secs(10);
const PARENTS_MAX: usize = 1000;
const AHEAD_MAX: usize = 200_000;

/// A directory as the server told of it.
#[derive(Debug, Default)]
pub(super) struct Level {
    /// Without the directory's own.
    pub objects: Vec<Object>,
    /// Directories; those with words have no object of their own, of the others that is to be asked for.
    pub dirs: Vec<Object>,
}

struct Ahead {
    level: Level,
    at: Moment,
}

struct Steps {
    /// Since a page was asked for in vain.
    count: u32,
    vain: u32,
    at: Moment,
    /// What comes behind the one that was listed last; was that one expected?
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

/// Of a walker: the first page of one directory, or of all keys of a prefix that come behind one.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Request {
    Level { below: String },
    Behind { prefix: String, key: String },
}

impl Request {
    /// `None`: the server cannot.
    fn ask(&self, server: &dyn Objects) -> io::Result<Option<Page>> {
        match self {
            Self::Level { below } => server.list(below, true, None).map(Some),
            Self::Behind { prefix, key } => server.list_behind(prefix, key),
        }
    }
}

pub(super) struct Answer {
    pub page: Option<Page>,
    /// When it was asked for, and what we had changed by then.
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

    /// One more of the parent's directories is listed. Is that a walk?
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

    /// This one will come next, if all are listed in their order. Will it be looked for in a page? `None`: they are not.
    fn expect(&self, parent: &StorePath, next: &StorePath) -> Option<bool> {
        let mut parents = locked(&self.parents);
        let steps = parents.get_mut(parent)?;
        steps.expected = Some(next.clone());
        steps.in_order.then(|| steps.is_walk(1) && !self.cannot.load(Ordering::Relaxed))
    }

    /// A page was asked for.
    fn was_worth_it(&self, parent: &StorePath, worth: bool) {
        if let Some(steps) = locked(&self.parents).get_mut(parent) {
            if worth {
                steps.vain = 0;
            } else {
                (steps.count, steps.vain) = (0, steps.vain + 1);
            }
        }
    }

    fn keep(&self, levels: BTreeMap<String, Level>, at: Moment, ttl: Duration) {
        let mut ahead = locked(&self.ahead);
        if ahead.len() + levels.len() > AHEAD_MAX {
            ahead.retain(|_, one| one.at.elapsed() < ttl);
        }
        if ahead.len() + levels.len() <= AHEAD_MAX {
            ahead.extend(levels.into_iter().map(|(dir, level)| (StorePath(dir.into_bytes()), Ahead { level, at })));
        }
    }
}

impl ObjectStore {
    /// What the server tells of the directory, if it was asked for with others, or now is; and when. `None`: it is to be listed alone.
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
            // What the page's end cuts off.
            self.foresee(Request::Behind { prefix, key: key.to_owned() });
        }
        if self.listings.changes() == since {
            walks.keep(levels, at, self.listings.ttl);
        }
        Ok(own.map(|level| (level, at)))
    }

    /// What the server says to a request, perhaps since a moment ago.
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

    /// A directory was listed alone: the next of its parent will be too, where somebody walks.
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

/// Every directory below the prefix (not that one itself) of which the keys tell.
fn levels_of(objects: Vec<Object>, prefix: &str) -> BTreeMap<String, Level> {
    let mut levels: BTreeMap<String, Level> = BTreeMap::new();
    for object in objects {
        let Some(rest) = object.key.strip_prefix(prefix) else { continue };
        let dirs = rest.rfind('/').map_or(0, |slash| slash + 1);
        // Keys that are no paths (`a//b`) cannot be shown.
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

    /// A directory, its objects, and its directories; of these, whether they have an object of their own.
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
    fn keys_become_directories() {
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
    fn the_last_key_cuts_off_what_it_is_in() {
        assert!(is_below("p/a/f", "p/a") && is_below("p/a/b/f", "p/a") && is_below("p/a/", "p/a"));
        assert!(!is_below("p/ab/f", "p/a") && !is_below("p/a", "p/a") && !is_below("p/a-b", "p/a"));
    }
}
