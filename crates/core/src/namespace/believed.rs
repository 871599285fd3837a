//! What a directory of the store does not have, without asking name by name. Who makes many files in a directory that the store has
//! already would ask for each whether it is there; after a few such questions in vain the directory is listed once, and what it does not
//! list is believed to be absent for `store_ttl`, as a single name is.
//!
//! The danger it avoids: a name is said to be absent that is there. Names that we bind ourselves count as listed from the moment at which a
//! listing begins (they may be forgotten here once the store has them). Directories need not list all that can be looked up: where
//! upper and lower case are the same nothing is believed, and of hidden names (snapshots) and of names that are not ASCII (which may be
//! spelt in several ways) neither.

use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use foldhash::HashSet;
use foldhash::quality::RandomState;

use crate::clock;
use crate::model::{Caller, FileId};
use crate::sync::PoisonError;
use crate::sync::atomic::{AtomicU32, Ordering};

use super::Namespace;
use super::resolve::is_absent;

/// So many names looked up in vain, one soon after the other, cost more than to list a directory of some thousand names.
const MISSES: u32 = 8;
/// More names than this are not listed.
const NAMES_MAX: usize = 4096;
/// Names that we bind are counted among them as long as nobody lists anew.
const BOUND_MAX: usize = 16 * NAMES_MAX;
/// After a directory was found to have more, or could not be listed.
const REST: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub struct Believed(Option<Box<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    hasher: RandomState,
    misses: u32,
    missed: Option<Instant>,
    /// When the listing began that is under way.
    listing: Option<Instant>,
    /// When the listing began that is believed.
    listed: Option<Instant>,
    /// Hashes: of two names with the same one both are asked for.
    names: HashSet<u64>,
    /// Questions to the store that the listing made needless.
    spared: AtomicU32,
    rests_until: Option<Instant>,
    tells_case: bool,
}

impl Believed {
    /// Is this name known not to be in the store?
    pub fn is_absent(&self, name: &[u8], ttl: Duration) -> bool {
        let Some(inner) = self.0.as_deref() else { return false };
        let absent = inner.listed.is_some_and(|at| at.elapsed() < ttl)
            && is_plain(name)
            && !inner.names.contains(&inner.hasher.hash_one(name));
        if absent {
            inner.spared.fetch_add(1, Ordering::Relaxed);
        }
        absent
    }

    /// We have bound the name ourselves.
    pub fn bound(&mut self, name: &[u8]) {
        let Some(inner) = self.0.as_deref_mut() else { return };
        if inner.names.len() >= BOUND_MAX && inner.listing.is_none() {
            inner.listed = None;
            inner.names.clear();
        }
        inner.names.insert(inner.hasher.hash_one(name));
    }

    /// A name was looked up in vain. Returns whether the directory should be listed: then `told` has to follow.
    fn missed(&mut self, name: &[u8], ttl: Duration) -> bool {
        if !is_plain(name) || ttl.is_zero() {
            return false;
        }
        let now = clock::tick();
        let inner = self.0.get_or_insert_default();
        if inner.listing.is_some() || inner.rests_until.is_some_and(|until| now < until) {
            return false;
        }
        // A listing that has paid for itself is worth another one.
        let paid = inner.listed.take().is_some() && *inner.spared.get_mut() >= MISSES;
        *inner.spared.get_mut() = 0;
        let soon = inner.missed.is_some_and(|before| now.saturating_duration_since(before) < ttl);
        inner.misses = if soon { inner.misses + 1 } else { 1 };
        inner.missed = Some(now);
        let lists = paid || inner.misses >= MISSES;
        if lists {
            inner.misses = 0;
            inner.names.clear();
            inner.listing = Some(now);
        }
        lists
    }

    /// What the store answered. `None`: there are too many names, or it did not tell.
    fn told(&mut self, names: Option<&[Box<[u8]>]>) {
        let Some(inner) = self.0.as_deref_mut() else { return };
        let began = inner.listing.take();
        match names {
            Some(names) => {
                let hashes = names.iter().map(|name| inner.hasher.hash_one(&**name));
                inner.names.extend(hashes);
                inner.listed = began;
                inner.tells_case = true;
            }
            None => inner.rests_until = Some(clock::tick() + REST),
        }
    }
}

impl Namespace {
    /// The store does not have the name. Where it is often asked for such, the directory is listed.
    pub(super) fn missed(&self, caller: &Caller, dir: FileId, name: &[u8]) {
        let lists = |dir: &mut super::tree::Dir| dir.believed.missed(name, self.config.store_ttl);
        if self.tree().dir_mut(dir).is_some_and(lists) {
            let names = self.names_listed(caller, dir);
            if let Some(dir) = self.tree().dir_mut(dir) {
                dir.believed.told(names.as_deref());
            }
        }
    }

    fn names_listed(&self, caller: &Caller, dir: FileId) -> Option<Vec<Box<[u8]>>> {
        let _moving = self.moving.read().unwrap_or_else(PoisonError::into_inner);
        let (path, tells_case) = {
            let tree = self.tree();
            let known = tree.dir(dir).and_then(|dir| dir.believed.0.as_deref()).is_some_and(|inner| inner.tells_case);
            (tree.applied_path(dir)?, known)
        };
        self.counters.store_lists.fetch_add(1, Ordering::Relaxed);
        let who = Self::who(caller);
        let names = self.let_in(dir, || self.store.names(who, &path, NAMES_MAX)).ok()??;
        let Some(other) = names.iter().find_map(|name| other_case(name)).filter(|_| !tells_case) else {
            return Some(names);
        };
        let has = names.iter().any(|name| **name == *other);
        let absent = || self.store.stat(who, &path.join(&other)).is_err_and(|why| is_absent(&why));
        (has || absent()).then_some(names)
    }
}

/// A listing tells of it if it is there.
fn is_plain(name: &[u8]) -> bool {
    name.is_ascii() && !name.starts_with(b".")
}

/// The same name on a file system that does not tell upper from lower case; `None`: it has no letters.
fn other_case(name: &[u8]) -> Option<Vec<u8>> {
    let other: Vec<u8> = name
        .iter()
        .map(|byte| if byte.is_ascii_lowercase() { byte.to_ascii_uppercase() } else { byte.to_ascii_lowercase() })
        .collect();
    (is_plain(name) && *other != *name).then_some(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn names(names: &[&str]) -> Vec<Box<[u8]>> {
        names.iter().map(|name| name.as_bytes().into()).collect()
    }

    fn listed(has: &[&str]) -> Believed {
        let mut believed = Believed::default();
        let asked: Vec<bool> = (0..MISSES).map(|number| believed.missed(format!("new-{number}").as_bytes(), LONG)).collect();
        assert_eq!(asked.iter().filter(|asked| **asked).count(), 1, "listed once, at the last");
        assert!(!believed.missed(b"one-more", LONG), "one lists it already");
        assert!(!believed.is_absent(b"anything", LONG), "not before the store has answered");
        believed.told(Some(&names(has)));
        believed
    }

    #[test]
    fn a_name_that_was_made_while_the_directory_was_listed_was_said_to_be_absent() {
        let mut believed = Believed::default();
        while !believed.missed(b"x", LONG) {}
        believed.bound(b"made-meanwhile");
        believed.told(Some(&names(&["old"])));
        assert!(believed.is_absent(b"other", LONG));
        assert!(!believed.is_absent(b"made-meanwhile", LONG));
        believed.bound(b"made-later");
        assert!(!believed.is_absent(b"made-later", LONG));
        assert!(!believed.is_absent(b"old", LONG));
    }

    #[test]
    fn what_a_listing_need_not_show_is_asked_for() {
        let believed = listed(&["old"]);
        assert!(!believed.is_absent(b".snapshot", LONG));
        assert!(!believed.is_absent("e\u{301}t\u{e9}".as_bytes(), LONG));
        assert!(believed.is_absent(b"plain", LONG));
        assert!(!believed.is_absent(b"plain", Duration::ZERO), "nothing is believed");
        assert!(!Believed::default().missed(b"plain", Duration::ZERO));
    }

    #[test]
    fn a_directory_of_millions_is_not_listed_again_and_again() {
        let mut believed = Believed::default();
        while !believed.missed(b"x", LONG) {}
        believed.told(None);
        assert!((0..1000).all(|_| !believed.missed(b"x", LONG)));
        assert!(!believed.is_absent(b"x", LONG));
    }

    #[test]
    fn a_listing_that_spared_nothing_is_not_repeated_at_once() {
        let mut believed = listed(&[]);
        assert!(!believed.missed(b"x", LONG), "it paid for nothing");
        let mut believed = listed(&[]);
        assert!((0..MISSES).all(|number| believed.is_absent(&[b'a', b'0' + number as u8], LONG)));
        assert!(believed.missed(b"x", LONG), "it has paid for itself");
    }

    #[test]
    fn letters_of_the_other_case() {
        assert_eq!(other_case(b"Makefile.in").as_deref(), Some(b"mAKEFILE.IN".as_slice()));
        assert_eq!(other_case(b"0001"), None);
        assert_eq!(other_case(b".Hidden"), None);
    }
}
