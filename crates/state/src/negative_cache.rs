//! Names that a directory of the store does not have.
//!
//! A process that creates many files in a directory of the store causes one look-up for each. After a few look-ups
//! without a result the agent lists the directory once. It then believes for `store_ttl` that a name outside the
//! listing is absent, as it does for a single name.
//!
//! The danger that it avoids: an existing name is reported absent.
//!
//! - Names that the agent binds count as listed from the moment at which a listing begins. This cache may forget them
//!   once the store has them. So do names that a listing has shown to programs since.
//! - Upper and lower case are one where the store does not distinguish them; so they are here.
//! - The agent asks the store for hidden names (snapshots) and for names that are not ASCII, which have several
//!   spellings. It also asks for short forms (`PROGRA~1`), and for ends that some stores leave out.
//! - A directory is made in a new one only after a query of the store (`names/make`). Otherwise the agent would take it
//!   for its own alone.

use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use foldhash::HashSet;
use foldhash::quality::RandomState;

use surgetank_types::clock;
use surgetank_types::sync::atomic::{AtomicU32, Ordering};

/// So many look-ups without a result in quick succession cost more than the listing of a directory of some hundred
/// names.
const MISSES: u32 = 8;
/// Names that the store lists in the time of one look-up.
const NAMES_A_QUESTION: usize = 64;
/// More names than this are not listed.
pub const NAMES_LISTED_MAX: usize = 4096;
/// Names that the agent binds count as listed until the next listing; at most so many.
const BOUND_MAX: usize = 16 * NAMES_LISTED_MAX;
/// The pause after a directory had more names, could not be listed, or did not pay.
const REST: Duration = Duration::from_secs(60);

/// The absent names of one directory of the store.
#[derive(Debug, Default)]
pub struct NegativeCache(Option<Box<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    hasher: RandomState,
    misses: u32,
    missed: Option<Instant>,
    /// When the listing in progress began.
    listing: Option<Instant>,
    /// When the listing in force began.
    listed: Option<Instant>,
    /// Hashes: if two names have the same hash, the store is asked for both.
    names: HashSet<u64>,
    /// The cost of the listing, in questions.
    cost: u32,
    /// Questions to the store that the listing saved.
    spared: AtomicU32,
    rests_until: Option<Instant>,
}

impl Inner {
    fn hash(&self, name: &[u8]) -> u64 {
        self.hasher.hash_one(name.to_ascii_lowercase())
    }

    fn knows(&self, name: &[u8]) -> bool {
        self.names.contains(&self.hash(name))
    }
}

impl NegativeCache {
    /// Is this name known not to be in the store?
    pub fn is_absent(&self, name: &[u8], ttl: Duration) -> bool {
        let Some(inner) = self.0.as_deref() else { return false };
        let absent = inner.listed.is_some_and(|at| at.elapsed() < ttl) && is_plain(name) && !inner.knows(name);
        if absent {
            inner.spared.fetch_add(1, Ordering::Relaxed);
        }
        absent
    }

    /// The name may be in the store: the agent has bound it, or a process has seen it in a listing.
    pub fn may_be_there(&mut self, name: &[u8]) {
        let Some(inner) = self.0.as_deref_mut() else { return };
        if inner.names.len() >= BOUND_MAX && inner.listing.is_none() {
            inner.listed = None;
            inner.names.clear();
        }
        let hash = inner.hash(name);
        inner.names.insert(hash);
    }

    /// A look-up found the name absent. Should the agent list the directory? Then [`Self::listed`] has to follow, with
    /// the returned time.
    pub fn missed(&mut self, name: &[u8], ttl: Duration) -> Option<Instant> {
        if !is_plain(name) || ttl.is_zero() {
            return None;
        }
        let now = clock::tick();
        let inner = self.0.get_or_insert_default();
        let listed = inner.listed.is_some_and(|at| now.saturating_duration_since(at) < ttl);
        // (The name may exist again: another listing would not help.)
        if listed || inner.listing.is_some() || inner.rests_until.is_some_and(|until| now < until) {
            return None;
        }
        let spared = std::mem::take(inner.spared.get_mut());
        let (had, paid) = (inner.listed.take().is_some(), spared >= inner.cost);
        if had && !paid {
            inner.rests_until = Some(now + REST);
            inner.misses = 0;
            return None;
        }
        let soon = inner.missed.is_some_and(|before| now.saturating_duration_since(before) < ttl);
        inner.misses = if soon { inner.misses + 1 } else { 1 };
        inner.missed = Some(now);
        // A listing that has paid for itself is repeated at once.
        if !had && inner.misses < MISSES {
            return None;
        }
        inner.misses = 0;
        inner.names.clear();
        inner.listing = Some(now);
        inner.listing
    }

    /// The store's answer. `None`: there are too many names, or no answer.
    pub fn listed(&mut self, began: Instant, names: Option<&[Box<[u8]>]>) {
        let Some(inner) = self.0.as_deref_mut().filter(|inner| inner.listing == Some(began)) else { return };
        inner.listing = None;
        let Some(names) = names else {
            inner.rests_until = Some(clock::tick() + REST);
            return;
        };
        let hashes: Vec<u64> = names.iter().map(|name| inner.hash(name)).collect();
        inner.names.extend(hashes);
        inner.cost = MISSES.max(u32::try_from(names.len() / NAMES_A_QUESTION).unwrap_or(u32::MAX));
        inner.listed = Some(began);
    }
}

/// Does a listing show the name if it is there?
fn is_plain(name: &[u8]) -> bool {
    name.is_ascii()
        && !name.starts_with(b".")
        && !name.iter().any(|byte| matches!(byte, b'~' | b':'))
        && !name.ends_with(b".")
        && !name.ends_with(b" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);
    const SHORT: Duration = Duration::from_millis(1);

    fn names(names: &[&str]) -> Vec<Box<[u8]>> {
        names.iter().map(|name| name.as_bytes().into()).collect()
    }

    fn asked_for(cache: &mut NegativeCache) -> Instant {
        (0..MISSES).find_map(|number| cache.missed(format!("new-{number}").as_bytes(), LONG)).unwrap()
    }

    fn listed(has: &[&str]) -> NegativeCache {
        let mut cache = NegativeCache::default();
        let began = asked_for(&mut cache);
        assert!(cache.missed(b"one-more", LONG).is_none(), "one lists it already");
        assert!(!cache.is_absent(b"anything", LONG), "not before the store has answered");
        cache.listed(began, Some(&names(has)));
        cache
    }

    #[test]
    fn name_made_during_a_listing_is_not_absent() {
        let mut cache = NegativeCache::default();
        let began = asked_for(&mut cache);
        cache.may_be_there(b"made-meanwhile");
        cache.listed(began, Some(&names(&["old"])));
        assert!(cache.is_absent(b"other", LONG));
        assert!(!cache.is_absent(b"made-meanwhile", LONG));
        cache.may_be_there(b"made-later");
        assert!(!cache.is_absent(b"made-later", LONG));
        assert!(!cache.is_absent(b"old", LONG));
    }

    #[test]
    fn names_that_a_listing_may_omit_are_not_absent() {
        let cache = listed(&["old", "Makefile"]);
        for name in [".snapshot", "e\u{301}t\u{e9}", "PROGRA~1", "old.", "old ", "makefile", "OLD"] {
            assert!(!cache.is_absent(name.as_bytes(), LONG), "{name}");
        }
        assert!(cache.is_absent(b"plain", LONG));
        assert!(!cache.is_absent(b"plain", Duration::ZERO), "nothing is believed");
        assert!(NegativeCache::default().missed(b"plain", Duration::ZERO).is_none());
    }

    #[test]
    fn huge_directory_is_not_listed_again() {
        let mut cache = NegativeCache::default();
        let began = asked_for(&mut cache);
        cache.listed(began, None);
        assert!((0..1000).all(|_| cache.missed(b"x", LONG).is_none()));
        assert!(!cache.is_absent(b"x", LONG));
    }

    #[test]
    fn listing_that_saved_no_lookup_is_not_repeated() {
        let mut cache = listed(&[]);
        cache.may_be_there(b"x.part");
        assert!((0..100).all(|_| cache.missed(b"x.part", LONG).is_none()), "it is believed all the same");
        assert!(cache.is_absent(b"y", LONG));
        std::thread::sleep(2 * SHORT);
        assert!((0..100).all(|_| cache.missed(b"x", SHORT).is_none()), "it paid for nothing");
        let mut cache = listed(&[]);
        assert!((0..MISSES).all(|number| cache.is_absent(&[b'a', b'0' + number as u8], LONG)));
        std::thread::sleep(2 * SHORT);
        assert!(cache.missed(b"x", SHORT).is_some(), "it has paid for itself");
    }

    #[test]
    fn answer_to_an_earlier_listing_does_not_count() {
        let mut cache = NegativeCache::default();
        let first = asked_for(&mut cache);
        // `refresh`.
        cache = NegativeCache::default();
        std::thread::sleep(SHORT);
        let second = asked_for(&mut cache);
        cache.listed(first, Some(&[]));
        assert!(!cache.is_absent(b"x", LONG));
        cache.listed(second, Some(&names(&["x"])));
        assert!(!cache.is_absent(b"x", LONG) && cache.is_absent(b"y", LONG));
    }
}
