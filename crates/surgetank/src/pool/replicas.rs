//! Copies of files that the store does not have yet, on other members than their own: what a copy is, and the table of the member
//! that decides about them.
//!
//! The owner of a name decides about its copies. It sends the content to other members, and tells them of each change before
//! the program that made it is answered. So a holder has what the name had last, or nothing.
//!
//! States of an entry: *being made* (a holder may have it already), then *there*. A change waits until no copy is being made.
//!
//! The danger that this avoids: a file that was removed or written since returns when its owner is lost.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_core::namespace::replicas::Sealed;
use surgetank_types::model::Timestamp;

/// So many records are in one answer to [`Hold::List`].
pub const LISTED_MAX: usize = 5_000;

/// A directory above a file, which the store does not have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Above {
    pub number: u64,
    pub perm: u32,
    pub owner: (u32, u32),
}

/// What a copy is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The file's number at the owner of its name.
    pub number: u64,
    pub version: u32,
    /// 0: the version is sealed. Otherwise it is the content at a close, higher at each one, and a program may still write it.
    pub moment: u64,
    pub size_bytes: u64,
    /// Below the store's root.
    pub path: Vec<u8>,
    pub perm: u32,
    /// User and group.
    pub owner: (u32, u32),
    /// Of the last access and change.
    pub times: (Timestamp, Timestamp),
    /// The nearest first.
    pub above: Vec<Above>,
    /// The member that has the content, if that is not the owner of the name.
    pub home: Option<u32>,
}

impl Record {
    pub fn of(number: u64, sealed: &Sealed) -> Self {
        let above = sealed.above.iter().map(|one| Above { number: one.number, perm: one.perm, owner: one.owner });
        Self {
            number,
            version: sealed.version,
            moment: sealed.moment,
            size_bytes: sealed.size_bytes,
            path: sealed.path.clone(),
            perm: sealed.perm,
            owner: sealed.owner,
            times: sealed.times,
            above: above.collect(),
            home: sealed.home,
        }
    }

    /// Is it of the same content?
    pub fn is_of_content_of(&self, other: &Self) -> bool {
        self.moment == other.moment && self.is_of_version_of(other)
    }

    fn is_of_version_of(&self, other: &Self) -> bool {
        // (A version that is sealed is the same wherever its home is.)
        self.version == other.version && (self.home == other.home || self.moment == 0 && other.moment == 0)
    }

    /// The copy is of this version at an earlier close. It stays until a look has compared the contents, or the new one is there.
    pub fn follows(&self, earlier: &Self) -> bool {
        earlier.moment != 0 && !self.is_of_content_of(earlier) && self.is_of_version_of(earlier)
    }

    /// May this be the new record of a copy that has had that one? (It is not if the copy is of a later close.)
    pub fn may_be_said_of(&self, known: &Self) -> bool {
        self.version == known.version && (self.moment == 0 || self.moment >= known.moment && known.moment != 0)
    }

    /// Are both of the content itself, which this member has?
    pub fn is_of_home(&self, member: u32, known: &Self) -> bool {
        self.home == Some(member) && known.home == Some(member)
    }

    /// Would both bring a file back under the same name?
    pub fn has_name_of(&self, other: &Self) -> bool {
        (&self.path, self.perm, self.owner, &self.above) == (&other.path, other.perm, other.owner, &other.above)
    }

    /// The name and rights of this record, and the content of that one.
    pub fn with_content_of(&self, earlier: &Self) -> Self {
        let Self { moment, size_bytes, times, .. } = *earlier;
        Self { moment, size_bytes, times, ..self.clone() }
    }

    /// Is it the same but for the time of the last access?
    pub fn says(&self, other: &Self) -> bool {
        let times = (self.times.0, other.times.1);
        *self == Self { times: (times.0, other.times.1), ..other.clone() }
    }
}

/// What the owner of names tells a member about copies of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hold {
    /// A piece of a copy. With the last one the copy counts.
    Piece {
        record: Record,
        attempt: u64,
        offset: u64,
        #[serde(with = "serde_bytes")]
        content: Vec<u8>,
        is_last: bool,
    },
    /// These files are other ones now, or need no copy; these have other names or attributes. `stored`: the receiver is the home, and
    /// the store has them. Of two messages about a file the one with the higher `attempt` counts, whichever comes first.
    Changed { attempt: u64, gone: Vec<u64>, stored: Vec<u64>, records: Vec<Record> },
    /// Which copies are there with numbers from `first` on: the records of at most [`LISTED_MAX`]. None of an attempt before `since`
    /// counts from now on.
    List { since: u64, first: u64 },
    /// The receiver is to be the home of this version, of which it has a copy. The copy is the content from now on. The record stays
    /// until the owner says otherwise. `is_home`: it is the home already, and only gets the record.
    Home { attempt: u64, record: Record, is_home: bool },
}

/// The copies of this member's files at other members.
#[derive(Debug, Default)]
pub struct Copies {
    all: Mutex<BTreeMap<u64, Entry>>,
    made: Condvar,
}

#[derive(Debug, Clone, Default)]
struct Entry {
    holders: BTreeMap<u32, Holder>,
    is_being_made: bool,
}

#[derive(Debug, Clone)]
struct Holder {
    /// The number of the message that made it one.
    made: u64,
    /// What it has. `None`: in doubt, so it is to drop what it has.
    has: Option<Record>,
    /// Its copy is whole.
    is_there: bool,
    /// While its copy is replaced: the one before.
    before: Option<(Record, Option<Sum>)>,
    /// Of the content, if it may be compared with a later one.
    sum: Option<Sum>,
}

/// The BLAKE3 hash of a file's content.
pub type Sum = [u8; 32];

/// What is known of the end of a message that makes a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    There,
    NotThere,
    /// No answer: it may be there.
    Unknown,
}

/// What each holder of one file has. `None`: in doubt.
pub type Holders = BTreeMap<u32, Option<Record>>;

impl Entry {
    fn known(&self) -> Holders {
        self.holders.iter().map(|(member, holder)| (*member, holder.has.clone())).collect()
    }

    fn records(&self) -> impl Iterator<Item = &Record> {
        self.holders.values().filter_map(|holder| holder.has.as_ref())
    }
}

impl Copies {
    /// A copy may be there from now on. It may replace one of an earlier close. Returns `false` if that is not possible now: another
    /// one is being made, or members have an older version.
    pub fn begins(&self, record: &Record, member: u32, attempt: u64) -> bool {
        let mut all = self.hold();
        let entry = all.entry(record.number).or_default();
        let there = entry.holders.get(&member);
        let may_be = there.is_none_or(|holder| holder.has.as_ref().is_some_and(|has| record.follows(has)));
        let is_older = |(of, has): (&u32, &Holder)| {
            let has = has.has.as_ref().filter(|_| Some(*of) != record.home);
            has.is_some_and(|has| has.version != record.version)
        };
        if entry.is_being_made || !may_be || entry.holders.iter().any(is_older) {
            return false;
        }
        entry.is_being_made = true;
        let before = entry.holders.remove(&member).and_then(|holder| Some((holder.has?, holder.sum)));
        entry
            .holders
            .insert(member, Holder { made: attempt, has: Some(record.clone()), is_there: false, before, sum: None });
        true
    }

    /// The end of that. `sum`: of the content. `alone`: no member has a copy.
    pub fn ends(&self, number: u64, member: u32, end: End, sum: Option<Sum>, alone: impl FnOnce()) {
        let mut all = self.hold();
        if let Some(entry) = all.get_mut(&number) {
            entry.is_being_made = false;
            match (end, entry.holders.get_mut(&member)) {
                (End::Unknown, Some(holder)) => (holder.has, holder.before) = (None, None),
                (End::There, Some(holder)) => (holder.is_there, holder.sum, holder.before) = (true, sum, None),
                (End::NotThere, Some(holder)) => match holder.before.take() {
                    Some((before, sum)) => (holder.is_there, holder.has, holder.sum) = (true, Some(before), sum),
                    None => drop(entry.holders.remove(&member)),
                },
                (_, None) => {}
            }
            if entry.holders.is_empty() {
                all.remove(&number);
                alone();
            }
        }
        self.made.notify_all();
    }

    /// A member says that it has this copy.
    pub fn is_at(&self, record: Record, member: u32) {
        let mut all = self.hold();
        let entry = all.entry(record.number).or_default();
        entry.holders.insert(member, Holder { made: 0, has: Some(record), is_there: true, before: None, sum: None });
    }

    pub fn are_none(&self) -> bool {
        self.hold().is_empty()
    }

    /// `None`: there are no copies.
    pub fn of(&self, number: u64) -> Option<Holders> {
        self.hold().get(&number).map(Entry::known)
    }

    /// The same without copies that are just being made.
    pub fn whole(&self, number: u64) -> Holders {
        let all = self.hold();
        let holders = all.get(&number).into_iter().flat_map(|entry| &entry.holders);
        let has = |holder: &Holder| {
            let before = || holder.before.as_ref().map(|(before, _)| before.clone());
            if holder.is_there { holder.has.clone() } else { before() }
        };
        holders.map(|(member, holder)| (*member, has(holder))).collect()
    }

    /// The sum of what the member has.
    pub fn sum(&self, number: u64, member: u32) -> Option<Sum> {
        self.hold().get(&number)?.holders.get(&member)?.sum
    }

    pub fn numbers(&self) -> Vec<u64> {
        self.hold().keys().copied().collect()
    }

    /// Files at this path, and below.
    pub fn below(&self, path: &[u8]) -> Vec<u64> {
        let is_below = |of: &[u8]| of.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"));
        let all = self.hold();
        let concerned = all.iter().filter(|(_, entry)| entry.records().any(|record| is_below(&record.path)));
        concerned.map(|(number, _)| *number).collect()
    }

    /// The entry when no copy is being made. `None`: there is none.
    pub fn when_made(&self, number: u64, mut patient: impl FnMut() -> bool) -> Option<Holders> {
        const LOOK_EVERY: Duration = Duration::from_millis(50);
        let mut all = self.hold();
        loop {
            let entry = all.get(&number)?;
            if !entry.is_being_made || !patient() {
                return Some(entry.known());
            }
            all = self.made.wait_timeout(all, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The member has this record now, if it had its copy when this message began.
    pub fn says(&self, record: Record, member: u32, attempt: u64) {
        let mut all = self.hold();
        let holder = all.get_mut(&record.number).and_then(|entry| entry.holders.get_mut(&member));
        let is_of_it = |holder: &Holder| {
            let may_be_said = |has: &Record| record.may_be_said_of(has) || record.is_of_home(member, has);
            holder.has.as_ref().is_some_and(may_be_said)
        };
        if let Some(holder) = holder.filter(|holder| holder.made < attempt && is_of_it(holder)) {
            // (What an earlier message said does not count after this.)
            (holder.made, holder.has) = (attempt, Some(record));
        }
    }

    /// The member may not have the copy that it had when this message began: it is to drop what it has.
    pub fn is_in_doubt(&self, number: u64, member: u32, attempt: u64) {
        let mut all = self.hold();
        let holder = all.get_mut(&number).and_then(|entry| entry.holders.get_mut(&member));
        if let Some(holder) = holder.filter(|holder| holder.made < attempt) {
            holder.has = None;
        }
    }

    /// The member does not have the copy any more that it had when this message began. `alone`: no member has one.
    pub fn has_gone(&self, number: u64, member: u32, attempt: u64, alone: impl FnOnce()) {
        let mut all = self.hold();
        let Some(entry) = all.get_mut(&number) else { return alone() };
        if entry.holders.get(&member).is_some_and(|holder| holder.made < attempt) {
            entry.holders.remove(&member);
        }
        if entry.holders.is_empty() && !entry.is_being_made {
            all.remove(&number);
            // (The next copy begins after this.)
            alone();
        }
    }

    /// Members that are none any more have none. Returns the files that had some there. `alone`: no member has one of this file.
    pub fn keep_members(&self, is_member: impl Fn(u32) -> bool, mut alone: impl FnMut(u64)) -> Vec<u64> {
        let mut all = self.hold();
        let mut fewer = Vec::new();
        for (number, entry) in all.iter_mut() {
            let before = entry.holders.len();
            entry.holders.retain(|member, _| is_member(*member));
            if entry.holders.len() < before {
                fewer.push(*number);
            }
        }
        all.retain(|number, entry| {
            let is_kept = !entry.holders.is_empty() || entry.is_being_made;
            if !is_kept {
                alone(*number);
            }
            is_kept
        });
        fewer
    }

    fn hold(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: u32 = 2;

    fn record(version: u32, path: &str) -> Record {
        let time = Timestamp::from_parts(1, 0);
        Record {
            number: 7,
            version,
            moment: 0,
            size_bytes: 10,
            path: path.into(),
            perm: 0o644,
            owner: (0, 0),
            times: (time, time),
            above: Vec::new(),
            home: None,
        }
    }

    fn made(copies: &Copies, end: End) {
        assert!(copies.begins(&record(1, "a"), HERE, 5));
        copies.ends(7, HERE, end, None, || assert_eq!(end, End::NotThere));
    }

    fn has(copies: &Copies, member: u32) -> Option<Option<Record>> {
        copies.of(7)?.get(&member).cloned()
    }

    #[test]
    fn copy_that_may_be_there_does_not_count_and_others_stay() {
        let copies = Copies::default();
        made(&copies, End::Unknown);
        assert_eq!(has(&copies, HERE), Some(None));
        assert!(!copies.begins(&record(1, "a"), HERE, 6), "it is to drop what it may have first");
        assert!(copies.begins(&record(1, "a"), HERE + 1, 7));
        copies.ends(7, HERE + 1, End::There, None, || panic!("it has a copy"));
        copies.has_gone(7, HERE, 8, || panic!("another one has a copy"));
        assert_eq!(copies.of(7), Some(Holders::from([(HERE + 1, Some(record(1, "a")))])));
        let mut is_alone = false;
        copies.has_gone(7, HERE + 1, 9, || is_alone = true);
        assert!(is_alone && copies.are_none());
        made(&copies, End::NotThere);
        assert!(copies.are_none());
    }

    #[test]
    fn copy_of_an_earlier_close_stays_until_the_next_one_is_there() {
        let copies = Copies::default();
        let close = |moment: u64| Record { moment, ..record(1, "a") };
        let has = || has(&copies, HERE).flatten().map(|record| record.moment);
        let whole = || copies.whole(7).remove(&HERE).flatten().map(|record| record.moment);
        assert!(copies.begins(&close(3), HERE, 4));
        assert_eq!((whole(), copies.whole(8)), (None, Holders::new()), "it may not be there yet");
        copies.ends(7, HERE, End::There, Some([1; 32]), || panic!("it has a copy"));
        assert!(!copies.begins(&close(3), HERE, 5), "it is there");
        for (end, moment, sum) in [(End::NotThere, 3, Some([1; 32])), (End::There, 5, Some([2; 32]))] {
            assert!(copies.begins(&close(5), HERE, 5));
            assert_eq!(whole(), Some(3), "until the other one is there");
            assert_eq!(copies.sum(7, HERE), None);
            copies.ends(7, HERE, end, Some([2; 32]), || panic!("it has one of them"));
            assert_eq!((has(), copies.sum(7, HERE)), (Some(moment), sum));
        }
        assert!(!copies.begins(&record(2, "a"), HERE, 6), "it is another version");
        copies.says(record(1, "b"), HERE, 6);
        assert_eq!((has(), copies.sum(7, HERE)), (Some(0), Some([2; 32])));
        assert!(!copies.begins(&close(7), HERE, 8), "what is sealed is not written any more");
        made_and_unknown(&copies);
    }

    /// A copy that may be there or not is not replaced, but dropped.
    fn made_and_unknown(copies: &Copies) {
        copies.has_gone(7, HERE, 9, || ());
        assert!(copies.begins(&Record { moment: 9, ..record(1, "a") }, HERE, 10));
        copies.ends(7, HERE, End::There, None, || panic!("it has a copy"));
        assert!(copies.begins(&Record { moment: 10, ..record(1, "a") }, HERE, 11));
        copies.ends(7, HERE, End::Unknown, None, || panic!("it may have one of them"));
        assert_eq!(has(copies, HERE), Some(None));
        assert!(!copies.begins(&Record { moment: 11, ..record(1, "a") }, HERE, 12));
    }

    #[test]
    fn late_end_of_an_earlier_message_changes_no_later_copy() {
        let copies = Copies::default();
        made(&copies, End::There);
        copies.has_gone(7, HERE, 4, || panic!("it has a copy"));
        copies.says(record(1, "before"), HERE, 4);
        assert_eq!(has(&copies, HERE), Some(Some(record(1, "a"))));
    }

    #[test]
    fn only_the_holder_that_has_answered_has_the_new_name() {
        let copies = Copies::default();
        (HERE..HERE + 2).for_each(|member| copies.is_at(record(1, "a"), member));
        copies.says(record(1, "b"), HERE, 5);
        assert_eq!(has(&copies, HERE), Some(Some(record(1, "b"))));
        assert_eq!(has(&copies, HERE + 1), Some(Some(record(1, "a"))));
        assert_eq!((copies.below(b"a"), copies.below(b"b")), (vec![7], vec![7]));
        assert!(!copies.begins(&record(2, "b"), HERE + 2, 6), "others have an older version");
        let mut alone = Vec::new();
        assert_eq!(copies.keep_members(|_| false, |number| alone.push(number)), [7]);
        assert_eq!(alone, [7]);
    }
}
