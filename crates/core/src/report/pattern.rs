//! How a process used a file, request by request (`run --trace`): how much of it, in which order, and what of it
//! repeatedly.
//!
//! Offsets are kept as extents, [`EXTENTS_MAX`] at most. Beyond that the nearest ones are merged, and the pattern
//! records it (`about`).
//!
//! The danger that it avoids: a trace that grows with the number of requests.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::PathText;
use super::run::Sizes;
use surgetank_types::model::FileId;

/// The most extents of a file that are kept apart.
pub const EXTENTS_MAX: usize = 4096;
/// The distances that are kept apart while counting, and those that are shown.
const STRIDES_MAX: usize = 64;
const STRIDES_SHOWN: usize = 4;

/// What one process did to one file.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Access {
    /// Its last name, relative to the directory.
    pub path: PathText,
    /// For the agent: a file that is renamed later has another name in the end.
    #[serde(skip)]
    pub file: Option<FileId>,
    /// Its size at its last open or request.
    pub size_bytes: u64,
    /// The process used earlier content of the file. False if it made or emptied the file, or opened it for both and
    /// only wrote.
    pub reads: bool,
    /// The process wrote to the file, or opened it for that.
    pub writes: bool,
    /// `None`: not opened for that, and without a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<Pattern>,
    /// Writes; `None`: not opened for that, and without a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<Pattern>,
}

/// The requests in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Pattern {
    /// Opens in this direction.
    pub opens: u64,
    /// Requests, as the kernel sent them: several for a large call; for a mapped file, those of its touched parts.
    pub calls: u64,
    /// Bytes of all requests; repeated ones count each time.
    pub bytes: u64,
    /// Different bytes of the file.
    pub distinct_bytes: u64,
    /// Requests that began where the previous one ended; a first one at 0 counts too.
    pub sequential_calls: u64,
    /// Histogram of the requests' sizes.
    pub sizes: Sizes,
    /// Distances between the starts of a request and the previous one, of requests that were not sequential; the most
    /// frequent first.
    pub strides: Vec<Stride>,
    /// `distinct_bytes` is too high by the gaps between extents, because there were too many of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub about: bool,
}

/// One distance between requests, and its frequency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Stride {
    /// Distance in bytes from the start of the previous request; negative: backwards.
    pub bytes: i64,
    /// Requests at this distance.
    pub calls: u64,
}

impl Pattern {
    /// Bytes that the same process had read (written) before.
    pub fn again_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.distinct_bytes)
    }

    /// The order in a word or two.
    pub fn order(&self) -> String {
        let stride = self.strides.first();
        match stride {
            _ if self.calls == 0 => "-".into(),
            None => "sequential".into(),
            Some(_) if self.sequential_calls * 10 >= self.calls * 9 => "sequential".into(),
            Some(stride) if stride.calls * 10 >= self.calls * 6 => format!("stride {}", stride.bytes),
            Some(_) => "scattered".into(),
        }
    }
}

/// A pattern under construction.
#[derive(Debug, Clone, Default)]
pub struct Tracker {
    opens: u64,
    calls: u64,
    bytes: u64,
    sequential_calls: u64,
    sizes: Sizes,
    /// Begin and end of the last request.
    last: Option<(u64, u64)>,
    /// Begin to end; no extent touches the next.
    extents: BTreeMap<u64, u64>,
    strides: HashMap<i64, u64>,
    about: bool,
}

impl Tracker {
    /// Counts an open in this direction.
    pub fn opened(&mut self) {
        self.opens += 1;
    }

    /// Counts a request of `bytes` bytes at `offset`.
    pub fn request(&mut self, offset: u64, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
        self.sizes.add(bytes);
        let (begin, expected) = self.last.unwrap_or((0, 0));
        if offset == expected {
            self.sequential_calls += 1;
        } else {
            let stride = i64::try_from(i128::from(offset) - i128::from(begin)).unwrap_or(i64::MAX);
            if self.strides.len() < STRIDES_MAX || self.strides.contains_key(&stride) {
                *self.strides.entry(stride).or_default() += 1;
            }
        }
        let end = offset.saturating_add(bytes);
        self.last = Some((offset, end));
        self.cover(offset, end);
    }

    /// A request has come.
    pub fn has_begun(&self) -> bool {
        self.calls > 0
    }

    fn cover(&mut self, begin: u64, end: u64) {
        if begin >= end {
            return;
        }
        let (mut begin, mut end) = (begin, end);
        while let Some((&at, &until)) = self.extents.range(..=end).next_back().filter(|(_, until)| **until >= begin) {
            self.extents.remove(&at);
            begin = begin.min(at);
            end = end.max(until);
        }
        self.extents.insert(begin, end);
        if self.extents.len() > EXTENTS_MAX {
            self.thin();
        }
    }

    /// Halves the extents: merges each second one with the next.
    fn thin(&mut self) {
        self.about = true;
        let all: Vec<(u64, u64)> = std::mem::take(&mut self.extents).into_iter().collect();
        self.extents = all.chunks(2).filter_map(|pair| Some((pair.first()?.0, pair.last()?.1))).collect();
    }

    /// The pattern so far; `None`: neither an open nor a request.
    pub fn pattern(&self) -> Option<Pattern> {
        if self.opens == 0 && self.calls == 0 {
            return None;
        }
        let mut strides: Vec<Stride> =
            self.strides.iter().map(|(bytes, calls)| Stride { bytes: *bytes, calls: *calls }).collect();
        strides.sort_by_key(|stride| (std::cmp::Reverse(stride.calls), stride.bytes));
        strides.truncate(STRIDES_SHOWN);
        Some(Pattern {
            opens: self.opens,
            calls: self.calls,
            bytes: self.bytes,
            distinct_bytes: self.extents.iter().map(|(begin, end)| end - begin).sum(),
            sequential_calls: self.sequential_calls,
            sizes: self.sizes.clone(),
            strides,
            about: self.about,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(requests: impl IntoIterator<Item = (u64, u64)>) -> Pattern {
        let mut tracker = Tracker::default();
        requests.into_iter().for_each(|(offset, bytes)| tracker.request(offset, bytes));
        tracker.pattern().unwrap()
    }

    #[test]
    fn second_read_counts_as_repeated_bytes() {
        let twice = of((0..2).flat_map(|_| (0..10).map(|at| (at * 100, 100))));
        assert_eq!((twice.bytes, twice.distinct_bytes, twice.again_bytes()), (2000, 1000, 1000));
        assert_eq!((twice.sequential_calls, twice.order().as_str()), (19, "sequential"));
        assert_eq!(twice.strides, [Stride { bytes: -900, calls: 1 }]);
    }

    #[test]
    fn every_fourth_block_is_a_stride_and_a_quarter_of_the_file() {
        let strided = of((0..100).map(|at| (at * 4096, 1024)));
        assert_eq!((strided.distinct_bytes, strided.again_bytes()), (102_400, 0));
        assert_eq!((strided.order().as_str(), strided.strides[0].calls), ("stride 4096", 99));
        assert!(!strided.about);
    }

    #[test]
    fn adjacent_extents_merge() {
        let mut tracker = Tracker::default();
        for (offset, bytes) in [(10, 10), (30, 10), (50, 10), (15, 20), (0, 0), (38, 13)] {
            tracker.request(offset, bytes);
        }
        assert_eq!(tracker.extents, BTreeMap::from([(10, 60)]));
        tracker.request(70, 5);
        tracker.request(5, 100);
        assert_eq!(tracker.extents, BTreeMap::from([(5, 105)]));
    }

    /// Compares the sum over all bytes of a small file with a table of them.
    #[test]
    fn distinct_bytes_are_those_of_a_table() {
        let mut state = 12345_u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let mut tracker = Tracker::default();
            let mut table = [false; 300];
            for _ in 0..30 {
                let (offset, bytes) = (random(250), random(50));
                tracker.request(offset, bytes);
                (offset..offset + bytes).for_each(|at| table[at as usize] = true);
            }
            let marked = table.iter().filter(|marked| **marked).count() as u64;
            assert_eq!(tracker.pattern().unwrap().distinct_bytes, marked);
        }
    }

    #[test]
    fn scattered_requests_stay_bounded_and_say_so() {
        let mut tracker = Tracker::default();
        for at in 0..4 * EXTENTS_MAX as u64 {
            tracker.request(at.wrapping_mul(7919) % 1_000_003 * 1000, 10);
        }
        assert!(tracker.extents.len() <= EXTENTS_MAX && tracker.strides.len() <= STRIDES_MAX);
        let pattern = tracker.pattern().unwrap();
        assert!(pattern.about && pattern.distinct_bytes >= pattern.calls * 10);
        assert!(tracker.extents.iter().zip(tracker.extents.iter().skip(1)).all(|(one, next)| one.1 < next.0));
    }

    #[test]
    fn file_only_opened_has_a_pattern_without_requests() {
        assert_eq!(Tracker::default().pattern(), None);
        let mut tracker = Tracker::default();
        tracker.opened();
        let pattern = tracker.pattern().unwrap();
        assert_eq!((pattern.opens, pattern.calls, pattern.order().as_str()), (1, 0, "-"));
    }
}
