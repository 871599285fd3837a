//! Listings of directories, and their cache.
//!
//! A listing contains sizes and times, not the words (mode, owner, times). Only objects that are younger than the mark, which
//! is put below the prefix before the first object with words, can have words: the others are not asked for. Words that were
//! read once are cached for as long as the object is the same (etag, size and time).

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Bound;
use std::time::Duration;

use rustix::io::Errno;

use super::attributes::{Owner, stat_of};
use super::keys::MARK;
use super::walk::{Level, Request, Walks};
use super::{Object, ObjectStore, Words, locked};
use crate::{StoreEntry, StorePath, StoreStat, at_once};
use surgetank_types::clock::Moment;
use surgetank_types::model::{Kind, STORE_TEMPORARY_PREFIX};
use surgetank_types::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex};

/// Clocks of one server's machines differ by at most this.
const MARK_MARGIN_NANOS: i64 = 300_000_000_000;
const HEADS_AT_ONCE: usize = 16;
/// Most cached words of objects, and most cached names.
const WORDS_MAX: usize = 200_000;
const NAMES_MAX: usize = 500_000;
const SWEEP_MIN: usize = 64;

type Names = BTreeMap<Box<[u8]>, StoreStat>;

#[derive(Default)]
struct Held {
    dirs: HashMap<StorePath, Listed>,
    /// An upper bound: dropped listings are subtracted only at the next sweep.
    names: usize,
    /// At this number of directories the expired ones are dropped.
    sweep_at: usize,
}

struct Listed {
    names: Arc<Names>,
    at: Moment,
}

type Read = HashMap<String, (String, i64, Arc<Words>)>;

pub(super) struct Listings {
    pub ttl: Duration,
    pub walks: Walks,
    listed: Mutex<Held>,
    words: Mutex<Read>,
    /// The mark's time by the server's clock, if there is a mark; and when it was looked for.
    mark: Mutex<Option<(Option<i64>, Moment)>>,
    marked: AtomicBool,
    /// Number of own changes: an answer that was requested before one is not used after it.
    changes: AtomicU64,
    /// How often the words of all objects were dropped.
    words_forgotten: AtomicU64,
}

impl Listings {
    pub fn new(ttl: Duration) -> Self {
        Self {
            ttl,
            walks: Walks::default(),
            listed: Mutex::default(),
            words: Mutex::default(),
            mark: Mutex::default(),
            marked: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            words_forgotten: AtomicU64::new(0),
        }
    }

    /// Whether the mark was found or made.
    pub fn is_marked(&self) -> bool {
        self.marked.load(Ordering::Relaxed)
    }

    pub fn mark(&self) {
        self.marked.store(true, Ordering::Relaxed);
        *locked(&self.mark) = None;
    }

    /// Drops the listing of a directory after an own change.
    pub fn forget(&self, dir: &StorePath) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        locked(&self.listed).dirs.remove(dir);
        self.walks.forget(dir);
    }

    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Drops the words of all objects. (A change within the resolution of the server's times keeps etag and time.)
    pub fn forget_words(&self) {
        let mut known = locked(&self.words);
        self.words_forgotten.fetch_add(1, Ordering::SeqCst);
        known.clear();
    }

    pub fn forget_all(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        *locked(&self.listed) = Held::default();
        self.walks.forget_all();
        *locked(&self.mark) = None;
    }

    /// The answer of the directory's listing for a name: `Some(None)` if there is no such name, `None` if no listing is fresh.
    pub fn known(&self, path: &StorePath) -> Option<Option<StoreStat>> {
        let dir = path.parent();
        let name = &path.0[if dir.0.is_empty() { 0 } else { dir.0.len() + 1 }..];
        let listed = locked(&self.listed);
        let listed = listed.dirs.get(&dir).filter(|listed| listed.at.elapsed() < self.ttl)?;
        Some(listed.names.get(name).copied())
    }

    /// The next name of this type after this one in its directory's listing.
    pub fn next_of_kind(&self, path: &StorePath, kind: Kind) -> Option<StorePath> {
        let dir = path.parent();
        let name = &path.0[if dir.0.is_empty() { 0 } else { dir.0.len() + 1 }..];
        let names = self.fresh(&dir)?;
        let mut behind = names.range::<[u8], _>((Bound::Excluded(name), Bound::Unbounded));
        behind.find(|(_, stat)| stat.attr.kind == kind).map(|(next, _)| dir.join(next))
    }

    pub fn fresh(&self, dir: &StorePath) -> Option<Arc<Names>> {
        let listed = locked(&self.listed);
        listed.dirs.get(dir).filter(|listed| listed.at.elapsed() < self.ttl).map(|listed| listed.names.clone())
    }

    fn keep(&self, dir: &StorePath, names: &Arc<Names>, at: Moment, since: u64) {
        let mut listed = locked(&self.listed);
        if self.changes() != since {
            return;
        }
        listed.names += names.len();
        if listed.names > NAMES_MAX || listed.dirs.len() >= listed.sweep_at {
            listed.dirs.retain(|_, one| one.at.elapsed() < self.ttl);
            listed.names = listed.dirs.values().map(|one| one.names.len()).sum::<usize>() + names.len();
            if listed.names > NAMES_MAX {
                listed.dirs.clear();
                listed.names = names.len();
            }
            listed.sweep_at = (2 * listed.dirs.len()).max(SWEEP_MIN);
        }
        listed.dirs.insert(dir.clone(), Listed { names: names.clone(), at });
    }

    fn words_known(&self, object: &Object) -> Option<Words> {
        let words = locked(&self.words);
        let (etag, modified, words) = words.get(&object.key)?;
        (*etag == object.etag && *modified == object.modified_nanos).then(|| (**words).clone())
    }

    /// `since`: how often words had been forgotten before the object was asked for.
    fn learn(&self, object: &Object, since: u64) {
        let Some(words) = &object.words else { return };
        let mut known = locked(&self.words);
        if self.words_forgotten.load(Ordering::SeqCst) != since {
            return;
        }
        if known.len() >= WORDS_MAX {
            known.clear();
        }
        known.insert(object.key.clone(), (object.etag.clone(), object.modified_nanos, Arc::new(words.clone())));
    }
}

impl ObjectStore {
    pub(super) fn entries(&self, dir: &StorePath) -> io::Result<Vec<StoreEntry>> {
        let names = match self.listings.fresh(dir) {
            Some(names) => names,
            None => self.read_dir(dir)?,
        };
        let mut entries = Vec::with_capacity(names.len());
        for (name, stat) in &*names {
            entries.push(StoreEntry { name: name.clone(), kind: stat.attr.kind, ino: stat.attr.ino });
        }
        Ok(entries)
    }

    fn read_dir(&self, dir: &StorePath) -> io::Result<Arc<Names>> {
        let since = self.listings.changes();
        let below = self.below(dir)?;
        let (Level { objects, dirs }, at) = match self.walk(dir)? {
            Some(known) => known,
            None => self.read_level(dir, &below)?,
        };
        let mark = self.mark_age()?;
        let mut sure = Vec::new();
        let mut unsure = Vec::new();
        for object in objects.into_iter().chain(dirs) {
            if object.words.is_some() {
                sure.push(object);
                continue;
            }
            let is_young = |mark: i64| object.modified_nanos >= mark.saturating_sub(MARK_MARGIN_NANOS);
            let may_be_ours = self.seen.is_some() || mark.is_some_and(is_young);
            match self.listings.words_known(&object) {
                Some(words) => sure.push(Object { words: Some(words), ..object }),
                None if may_be_ours => unsure.push(object),
                None if object.key.ends_with('/') => sure.push(Object { modified_nanos: 0, ..object }),
                None => sure.push(object),
            }
        }
        sure.extend(self.heads(unsure)?);
        let owner: Owner = self.owner;
        let mut names = Names::new();
        for object in sure {
            let name = object.key[below.len()..].trim_end_matches('/');
            // Keys that are not paths (`a//b`) cannot be shown.
            if !matches!(name, "" | "." | "..") && name.len() <= 255 {
                let stat = stat_of(&object, owner);
                // (By such objects members of a pool find each other.)
                if name.as_bytes().starts_with(STORE_TEMPORARY_PREFIX) {
                    continue;
                }
                // A file hides the directory of the same name.
                let shown = names.entry(name.as_bytes().into()).or_insert(stat);
                if stat.attr.kind != Kind::Directory {
                    *shown = stat;
                }
            }
        }
        let names = Arc::new(names);
        self.listings.keep(dir, &names, at, since);
        Ok(names)
    }

    fn read_level(&self, dir: &StorePath, below: &str) -> io::Result<(Level, Moment)> {
        let mut level = Level::default();
        let mut is_there = dir.0.is_empty();
        let first = self.answer(Request::Level { below: below.to_owned() })?;
        let mut page = first.page.unwrap_or_default();
        loop {
            is_there |= !page.objects.is_empty() || !page.prefixes.is_empty();
            level.objects.extend(page.objects.into_iter().filter(|object| object.key != below && object.key != MARK));
            // The directories' own objects are asked for like files.
            let own = |key| Object { key, modified_nanos: i64::MAX, ..super::names::empty() };
            level.dirs.extend(page.prefixes.into_iter().map(own));
            let Some(from) = page.next else { break };
            page = self.server.list(below, true, Some(&from))?;
        }
        if !is_there {
            // A file, or nothing.
            return Err(if self.look(dir)?.is_some() { Errno::NOTDIR } else { Errno::NOENT }.into());
        }
        self.foresee_next(dir);
        Ok((level, first.at))
    }

    /// The time of the mark; `None` if there is no mark.
    fn mark_age(&self) -> io::Result<Option<i64>> {
        if let Some((age, at)) = *locked(&self.listings.mark)
            && (age.is_some() || at.elapsed() < self.listings.ttl)
        {
            return Ok(age);
        }
        let at = Moment::now();
        let age = self.server.head(MARK)?.map(|mark| mark.modified_nanos);
        *locked(&self.listings.mark) = Some((age, at));
        Ok(age)
    }

    /// The objects with their words, several requests at a time. Objects that were removed meanwhile are left out.
    fn heads(&self, objects: Vec<Object>) -> io::Result<Vec<Object>> {
        let done: Mutex<Vec<Object>> = Mutex::default();
        at_once(objects.len(), HEADS_AT_ONCE, &|index| {
            let object = &objects[index];
            let since = self.listings.words_forgotten.load(Ordering::SeqCst);
            let is_dir = object.key.ends_with('/');
            match self.server.head(&object.key)? {
                Some(head) => {
                    if let Some(seen) = self.seen.as_ref().filter(|_| !is_dir) {
                        locked(seen).insert(head.key.clone(), head.clone());
                    }
                    if !is_dir {
                        self.listings.learn(&Object { modified_nanos: object.modified_nanos, ..head.clone() }, since);
                    }
                    locked(&done).push(head);
                }
                None if is_dir => locked(&done).push(Object { modified_nanos: 0, ..object.clone() }),
                // The object exists, but the listing has another name for it. A name that cannot be opened is better than none.
                None if !self.abilities.lists_any_key && object.key.contains('\u{fffd}') => {
                    locked(&done).push(object.clone());
                }
                None => {}
            }
            Ok(())
        })?;
        Ok(std::mem::take(&mut *locked(&done)))
    }
}
