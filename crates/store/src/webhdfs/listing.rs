//! Listings of directories, and their cache.
//!
//! A listing contains everything but the records. A record is asked for once: it is cached for as long as the file has the same
//! number, length and time. For a file that this agent wrote it is never asked for.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use super::answers::{Batch, Status, Statuses, parse};
use super::failure::Failure;
use super::record::{Record, stat_of};
use super::wire::Ask;
use super::{WebHdfs, locked};
use crate::{StoreEntry, StorePath, StoreStat, at_once};
use surgetank_types::clock::Moment;
use surgetank_types::error::Errno;
use surgetank_types::model::STORE_TEMPORARY_PREFIX;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex};

const RECORDS_AT_ONCE: usize = 16;
/// Most cached records, and most cached names.
const RECORDS_MAX: usize = 200_000;
const NAMES_MAX: usize = 500_000;

type Names = BTreeMap<Box<[u8]>, StoreStat>;

struct Listed {
    names: Arc<Names>,
    at: Moment,
}

struct Known {
    modification_time: i64,
    length: u64,
    record: Option<Arc<Record>>,
}

pub(super) struct Listings {
    ttl: Duration,
    listed: Mutex<HashMap<StorePath, Listed>>,
    /// By the inode's number.
    records: Mutex<HashMap<u64, Known>>,
    /// Number of own changes: an answer that was requested before one is not used after it.
    changes: AtomicU64,
}

impl Listings {
    pub fn new(ttl: Duration) -> Self {
        Self { ttl, listed: Mutex::default(), records: Mutex::default(), changes: AtomicU64::new(0) }
    }

    /// Drops the listing of a directory after an own change.
    pub fn forget(&self, dir: &StorePath) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        locked(&self.listed).remove(dir);
    }

    pub fn forget_below(&self, dir: &StorePath) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        locked(&self.listed).retain(|path, _| path != dir && !path.is_below(dir));
    }

    pub fn forget_all(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        locked(&self.listed).clear();
        locked(&self.records).clear();
    }

    /// The answer of the directory's listing for a name: `Some(None)` if there is no such name, `None` if no listing is fresh.
    pub fn known(&self, path: &StorePath) -> Option<Option<StoreStat>> {
        if path.0.is_empty() || path.is_temporary() {
            return None;
        }
        let dir = path.parent();
        let name = &path.0[if dir.0.is_empty() { 0 } else { dir.0.len() + 1 }..];
        let listed = locked(&self.listed);
        let listed = listed.get(&dir).filter(|listed| listed.at.elapsed() < self.ttl)?;
        Some(listed.names.get(name).copied())
    }

    fn fresh(&self, dir: &StorePath) -> Option<Arc<Names>> {
        let listed = locked(&self.listed);
        listed.get(dir).filter(|listed| listed.at.elapsed() < self.ttl).map(|listed| listed.names.clone())
    }

    fn keep(&self, dir: &StorePath, names: &Arc<Names>, at: Moment, since: u64) {
        let mut listed = locked(&self.listed);
        if self.changes.load(Ordering::SeqCst) != since || self.ttl.is_zero() {
            return;
        }
        listed.retain(|_, one| one.at.elapsed() < self.ttl);
        if listed.values().map(|one| one.names.len()).sum::<usize>() > NAMES_MAX {
            listed.clear();
        }
        listed.insert(dir.clone(), Listed { names: names.clone(), at });
    }

    /// `Some(None)`: it has none.
    pub fn record_known(&self, status: &Status) -> Option<Option<Arc<Record>>> {
        let records = locked(&self.records);
        let known = records.get(&status.file_id)?;
        let same = known.modification_time == status.modification_time && known.length == status.length;
        same.then(|| known.record.clone())
    }

    pub fn learn(&self, status: &Status, record: Option<Record>) {
        let mut records = locked(&self.records);
        if records.len() >= RECORDS_MAX {
            records.clear();
        }
        let (modification_time, length) = (status.modification_time, status.length);
        records.insert(status.file_id, Known { modification_time, length, record: record.map(Arc::new) });
    }
}

impl WebHdfs {
    pub(super) fn entries(&self, dir: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        // Temporaries appear and disappear unnoticed.
        let known = if temporaries { None } else { self.listings.fresh(dir) };
        let names = match known {
            Some(names) => names,
            None => self.read_dir(dir)?,
        };
        let shown = names.iter().filter(|(name, _)| temporaries || !name.starts_with(STORE_TEMPORARY_PREFIX));
        Ok(shown
            .map(|(name, stat)| StoreEntry { name: name.clone(), kind: stat.attr.kind, ino: stat.attr.ino })
            .collect())
    }

    fn read_dir(&self, dir: &StorePath) -> io::Result<Arc<Names>> {
        let (at, since) = (Moment::now(), self.listings.changes.load(Ordering::SeqCst));
        let path = super::names::checked(&self.wire, dir)?;
        let statuses = self.read_statuses(path).map_err(|why| self.wire.report(path, why))?;
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
        let names: Mutex<Names> = Mutex::default();
        let (known, unknown): (Vec<_>, Vec<_>) = statuses
            .into_iter()
            .map(|status| (self.listings.record_known(&status), status))
            .partition(|one| one.0.is_some());
        let show = |status: &Status, record: Option<&Record>| {
            let stat = stat_of(status, record, &self.people);
            locked(&names).insert(status.path_suffix.as_bytes().into(), stat);
        };
        known.iter().for_each(|(record, status)| show(status, record.as_ref().and_then(|record| record.as_deref())));
        at_once(unknown.len(), RECORDS_AT_ONCE, &|index| {
            let status = &unknown[index].1;
            match self.record(&below(&status.path_suffix)) {
                Ok(record) => {
                    show(status, record.as_ref());
                    self.listings.learn(status, record);
                }
                // It was removed meanwhile.
                Err(why) if why.is(Errno::NOENT) => {}
                Err(why) => return Err(self.wire.report(path, why)),
            }
            Ok(())
        })?;
        let names = Arc::new(std::mem::take(&mut *locked(&names)));
        self.listings.keep(dir, &names, at, since);
        Ok(names)
    }

    fn read_statuses(&self, path: &str) -> Result<Vec<Status>, Failure> {
        let mut statuses: Vec<Status> = Vec::new();
        loop {
            let mut ask = Ask::get("LISTSTATUS_BATCH", path);
            if let Some(last) = statuses.last() {
                ask = ask.with("startAfter", last.path_suffix.clone());
            }
            let told = match self.wire.ask(&ask) {
                // Older than 3.0.
                Err(why) if why.is(Errno::INVAL) && statuses.is_empty() => {
                    let answer = self.wire.ask(&Ask::get("LISTSTATUS", path))?;
                    statuses = parse::<Statuses>(&answer)?.statuses.list;
                    break;
                }
                answer => parse::<Batch>(&answer?)?.listing,
            };
            let page = told.partial_listing.statuses.list;
            let ends = told.remaining_entries == 0 || page.is_empty();
            statuses.extend(page);
            if ends {
                break;
            }
        }
        // A file is listed as itself.
        match statuses.first() {
            Some(only) if only.path_suffix.is_empty() => Err(Failure::ours(Errno::NOTDIR, "it is not a directory")),
            _ => Ok(statuses),
        }
    }
}
