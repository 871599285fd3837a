//! The records on disk: the last hundred files `STATE/PLACE/runs/ID.json`, 0600, each written atomically. `now-RUN.json`
//! is the note of a run's progress for an agent that takes over.
//!
//! The danger that it avoids: a name from outside that leads out of the directory. A record is found by comparing
//! names.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use surgetank_core::report::run::RunRecord;
use surgetank_types::model::RunId;

/// The directory of the records below an agent's state.
pub const RUNS: &str = "runs";
const KEPT_MAX: usize = 100;
const NOTED: &str = "now-";

pub struct Shelf {
    dir: PathBuf,
}

impl Shelf {
    pub fn new(state: &Path) -> Self {
        Self { dir: state.join(RUNS) }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn put(&self, record: &RunRecord) -> io::Result<()> {
        self.write(&format!("{}.json", record.id), record)?;
        let mut names = records_in(&self.dir)?;
        names.sort();
        let surplus = names.len().saturating_sub(KEPT_MAX);
        names.iter().take(surplus).for_each(|name| drop(fs::remove_file(self.dir.join(name))));
        Ok(())
    }

    pub fn note(&self, record: &RunRecord) -> io::Result<()> {
        self.write(&format!("{NOTED}{}.json", record.run.0), record)
    }

    pub fn noted(&self, run: RunId) -> Option<RunRecord> {
        read(&self.dir.join(format!("{NOTED}{}.json", run.0))).ok()
    }

    pub fn forget_noted(&self, run: RunId) {
        drop(fs::remove_file(self.dir.join(format!("{NOTED}{}.json", run.0))));
    }

    fn write(&self, name: &str, record: &RunRecord) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => return Err(why),
            _ => {}
        }
        let temporary = self.dir.join(format!(".{name}"));
        let written = (|| {
            let options = || File::options().write(true).create_new(true).mode(0o600).open(&temporary);
            let mut file = match options() {
                // A process that was killed while writing left it.
                Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {
                    fs::remove_file(&temporary)?;
                    options()?
                }
                opened => opened?,
            };
            let mut text = serde_json::to_vec(record)?;
            text.push(b'\n');
            file.write_all(&text)?;
            fs::rename(&temporary, self.dir.join(name))
        })();
        written.inspect_err(|_| drop(fs::remove_file(&temporary)))
    }
}

/// Names of the records in a directory of them.
pub fn records_in(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| name.ends_with(".json") && name.starts_with(|first: char| first.is_ascii_digit())).collect())
}

pub fn read(path: &Path) -> io::Result<RunRecord> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// `YYYYMMDD-HHMMSS-UUUUUU-PID`, UTC with microseconds. The microseconds keep names in the order of time, because
/// process ids wrap.
pub fn name_of(unix_us: i64, pid: u32) -> String {
    let (unix_seconds, micros) = (unix_us.div_euclid(1_000_000), unix_us.rem_euclid(1_000_000));
    // SAFETY: an all-zero tm is a valid one.
    let mut utc: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid during the call.
    unsafe { libc::gmtime_r(&raw const unix_seconds, &raw mut utc) };
    format!(
        "{:04}{:02}{:02}-{:02}{:02}{:02}-{micros:06}-{pid}",
        utc.tm_year + 1900,
        utc.tm_mon + 1,
        utc.tm_mday,
        utc.tm_hour,
        utc.tm_min,
        utc.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn last_hundred_records_are_kept_private() {
        let state = tempfile::tempdir().unwrap();
        let shelf = Shelf::new(state.path());
        for second in 0..KEPT_MAX as i64 + 7 {
            let record = RunRecord { id: name_of((1_795_557_600 + second) * 1_000_000, 4711), ..RunRecord::default() };
            shelf.note(&record).unwrap();
            shelf.put(&record).unwrap();
        }
        let dir = state.path().join(RUNS);
        let mut names = records_in(&dir).unwrap();
        names.sort();
        assert_eq!((names.len(), names[0].as_str()), (KEPT_MAX, "20261124-220007-000000-4711.json"));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir), mode(&dir.join(&names[0]))), (0o700, 0o600));
        assert_eq!(read(&dir.join(&names[0])).unwrap().id, "20261124-220007-000000-4711");
        assert!(shelf.noted(RunId(0)).is_some());
        shelf.forget_noted(RunId(0));
        assert!(shelf.noted(RunId(0)).is_none());
    }

    /// Regression: two runs of one second sorted by their process ids as text, so `last` was 9999 and not 10000.
    #[test]
    fn records_of_one_second_sort_by_time() {
        assert!(name_of(1_795_557_600_000_007, 9999) < name_of(1_795_557_600_900_000, 10_000));
        assert_eq!(name_of(-1, 1), "19691231-235959-999999-1");
    }

    #[test]
    fn record_that_cannot_be_written_leaves_no_file() {
        let state = tempfile::tempdir().unwrap();
        let shelf = Shelf::new(state.path());
        fs::create_dir(state.path().join(RUNS)).unwrap();
        fs::create_dir(state.path().join(RUNS).join("x.json")).unwrap();
        assert!(shelf.put(&RunRecord { id: "x".into(), ..RunRecord::default() }).is_err());
        assert_eq!(fs::read_dir(state.path().join(RUNS)).unwrap().count(), 1);
    }
}
