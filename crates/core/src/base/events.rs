//! Events for the record of a run: decisions and failures by kind, place and reason, and the files that a run wrote.
//!
//! They are counted where they occur, under a lock of their own that is taken last. Invariant: the record is bounded.
//! Reasons contain no figures of a single case. Of the files, only the largest and the slowest are kept. The danger
//! that this avoids: a record that grows with the number of files.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use surgetank_types::clock;
use surgetank_types::model::{FileId, Mode, RunId};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::report::PathText;
use crate::report::run::{Event, EventKind, FILES_MAX, File};

/// The limit of distinct events; later ones are counted under their kind alone.
const REASONS_MAX: usize = 1000;
const KEPT_MAX: usize = 8 * FILES_MAX;

#[derive(Default)]
pub struct Events {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    events: HashMap<(EventKind, Arc<str>, Arc<str>), Count>,
    runs: HashMap<RunId, Files>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    count: u64,
    bytes: u64,
}

/// The files of one run.
#[derive(Default)]
struct Files {
    total: u64,
    kept: HashMap<FileId, Seen>,
    /// Smaller files are not kept.
    least_bytes: u64,
    /// The files that waited longest for the store, without those in `kept`.
    slow: Vec<(Duration, Seen)>,
}

/// A version of a file that was closed.
#[derive(Clone)]
pub struct Seen {
    pub path: Vec<u8>,
    pub size_bytes: u64,
    pub mode: Mode,
    pub place: Arc<str>,
    pub placement: Arc<str>,
    pub rule: Arc<str>,
    pub sealed: Instant,
    pub durable: Option<Instant>,
    pub versions: u64,
}

/// A reason without the figures of the single case.
pub(crate) fn without_figures(reason: &str) -> String {
    let words: Vec<&str> =
        reason.split(' ').map(|word| if word.bytes().any(|byte| byte.is_ascii_digit()) { "…" } else { word }).collect();
    words.join(" ")
}

impl Events {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self, kind: EventKind, place: &str, reason: &str, bytes: u64) {
        let mut inner = self.inner();
        let mut key: (EventKind, Arc<str>, Arc<str>) = (kind, place.into(), reason.into());
        if inner.events.len() >= REASONS_MAX && !inner.events.contains_key(&key) {
            key.2 = "other reasons".into();
        }
        let count = inner.events.entry(key).or_default();
        count.count += 1;
        count.bytes += bytes;
    }

    /// All events since the agent started.
    pub fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = self
            .inner()
            .events
            .iter()
            .map(|((kind, place, reason), count)| Event {
                kind: *kind,
                place: place.to_string(),
                reason: reason.to_string(),
                count: count.count,
                bytes: count.bytes,
            })
            .collect();
        events.sort_by(|a, b| (a.kind, &a.place, &a.reason).cmp(&(b.kind, &b.place, &b.reason)));
        events
    }

    /// From now on, files of this run are kept.
    pub fn begin(&self, run: RunId) {
        self.inner().runs.entry(run).or_default();
    }

    pub fn end(&self, run: RunId) {
        self.inner().runs.remove(&run);
    }

    pub(crate) fn sealed(&self, run: RunId, id: FileId, seen: impl FnOnce() -> Seen, size_bytes: u64) {
        let mut inner = self.inner();
        let Some(files) = inner.runs.get_mut(&run) else { return };
        if let Some(known) = files.kept.get_mut(&id) {
            let versions = known.versions + 1;
            *known = Seen { versions, ..seen() };
            return;
        }
        files.total += 1;
        if size_bytes < files.least_bytes {
            return;
        }
        files.kept.insert(id, seen());
        if files.kept.len() > KEPT_MAX {
            let mut sizes: Vec<u64> = files.kept.values().map(|seen| seen.size_bytes).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            let least = sizes.get(FILES_MAX).copied().unwrap_or(0) + 1;
            files.least_bytes = least;
            files.kept.retain(|_, seen| seen.size_bytes >= least);
        }
    }

    /// The store has the file's version.
    pub(crate) fn durable(&self, run: RunId, id: FileId, size_bytes: u64, waited: Duration, path: Option<Vec<u8>>) {
        let mut inner = self.inner();
        let Some(files) = inner.runs.get_mut(&run) else { return };
        let now = clock::tick();
        if let Some(known) = files.kept.get_mut(&id) {
            known.durable = Some(now);
            // Its name may have changed by now.
            known.path = path.unwrap_or_else(|| std::mem::take(&mut known.path));
            return;
        }
        let least = if files.slow.len() < FILES_MAX { None } else { files.slow.last().map(|(waited, _)| *waited) };
        let (Some(path), true) = (path, least.is_none_or(|least| waited > least)) else { return };
        let seen = Seen {
            path,
            size_bytes,
            mode: Mode::default(),
            place: Arc::from(""),
            placement: Arc::from(""),
            rule: Arc::from(""),
            sealed: now.checked_sub(waited).unwrap_or(now),
            durable: Some(now),
            versions: 1,
        };
        let at = files.slow.partition_point(|(longer, _)| *longer >= waited);
        files.slow.insert(at, (waited, seen));
        files.slow.truncate(FILES_MAX);
    }

    /// The number of files that the run closed, and the largest and slowest of them.
    pub fn files(&self, run: RunId, begun: Instant) -> (u64, Vec<File>) {
        let inner = self.inner();
        let Some(files) = inner.runs.get(&run) else { return (0, Vec::new()) };
        let mut kept: Vec<&Seen> = files.kept.values().collect();
        kept.sort_by(|a, b| b.size_bytes.cmp(&a.size_bytes).then_with(|| a.path.cmp(&b.path)));
        kept.truncate(FILES_MAX * 3 / 4);
        let left = FILES_MAX - kept.len();
        kept.extend(files.slow.iter().take(left).map(|(_, seen)| seen));
        let since = |at: Instant| u64::try_from(at.saturating_duration_since(begun).as_micros()).unwrap_or(u64::MAX);
        let shown = kept.into_iter().map(|seen| File {
            path: PathText(seen.path.clone()),
            size_bytes: seen.size_bytes,
            versions: seen.versions,
            mode: seen.mode,
            place: seen.place.to_string(),
            placement: seen.placement.to_string(),
            rule: seen.rule.to_string(),
            sealed_us: since(seen.sealed),
            durable_us: seen.durable.map(since),
        });
        (files.total, shown.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(size_bytes: u64) -> Seen {
        Seen {
            path: size_bytes.to_string().into_bytes(),
            size_bytes,
            mode: Mode::Copy,
            place: Arc::from("ram"),
            placement: Arc::from(""),
            rule: Arc::from(""),
            sealed: Instant::now(),
            durable: None,
            versions: 1,
        }
    }

    #[test]
    fn largest_files_are_kept_and_all_are_counted() {
        let (events, begun) = (Events::default(), Instant::now());
        events.begin(RunId(1));
        for size in 0..10_000 {
            events.sealed(RunId(1), FileId(size), || seen(size), size);
            events.sealed(RunId(2), FileId(size), || seen(size), size);
        }
        let (total, files) = events.files(RunId(1), begun);
        assert_eq!((total, files.len()), (10_000, FILES_MAX * 3 / 4));
        assert_eq!(files[0].size_bytes, 9_999);
        assert!(files.windows(2).all(|two| two[0].size_bytes == two[1].size_bytes + 1));
        assert_eq!(events.files(RunId(2), begun).0, 0, "no process asked for that run");
    }

    #[test]
    fn longest_wait_is_kept_at_any_size() {
        let (events, begun) = (Events::default(), Instant::now());
        events.begin(RunId(1));
        for size in 0..10_000 {
            events.sealed(RunId(1), FileId(size), || seen(size), size);
        }
        for small in 0..500 {
            events.durable(RunId(1), FileId(small), small, Duration::from_millis(small), Some(b"slow".to_vec()));
        }
        let slow: Vec<u64> = events
            .files(RunId(1), begun)
            .1
            .iter()
            .filter(|file| file.path.0 == b"slow")
            .map(|file| file.size_bytes)
            .collect();
        assert_eq!(slow, (475..500).rev().collect::<Vec<u64>>());
    }

    #[test]
    fn like_reasons_are_counted_together_and_stay_bounded() {
        let events = Events::default();
        for n in 0..5 * REASONS_MAX {
            events.count(EventKind::Evicted, "ram", "room was wanted", 10);
            events.count(EventKind::Spilled, "ram", &n.to_string(), 1);
        }
        let events = events.events();
        assert!(events.len() <= REASONS_MAX + 2);
        let evicted = events.iter().find(|event| event.kind == EventKind::Evicted).unwrap();
        assert_eq!((evicted.count, evicted.bytes), (5 * REASONS_MAX as u64, 50 * REASONS_MAX as u64));
        let spilled: u64 =
            events.iter().filter(|event| event.kind == EventKind::Spilled).map(|event| event.count).sum();
        assert_eq!(spilled, 5 * REASONS_MAX as u64);
    }
}
