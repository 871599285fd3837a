//! Reads the store all the time: each file under its own name must be complete, and in order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::content;

const OURS: &str = ".surgetank-";
/// The server's temporary that is about to replace another object.
const OF_VERSITYGW: &str = ".sgwtmp.";

#[derive(Debug, Default)]
pub struct Seen {
    pub looks: u64,
    pub files: u64,
    /// Path → what was wrong with it.
    pub broken: BTreeMap<String, String>,
    pub disorder: Vec<String>,
}

pub struct Watcher {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Watcher {
    /// `copies_die`: staged data is only in the agent's memory.
    pub fn start(store: &Path, copies_die: bool) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, store) = (Arc::clone(&stop), store.to_owned());
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            let mut known = BTreeMap::new();
            while !stopped.load(Ordering::Relaxed) {
                look(&store, &store, copies_die, &mut known, &mut seen);
                seen.looks += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            seen
        });
        Self { stop, thread }
    }

    pub fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

type Known = BTreeMap<(u64, i64, i64), ()>;

fn look(store: &Path, dir: &Path, copies_die: bool, known: &mut Known, seen: &mut Seen) {
    use std::os::unix::fs::MetadataExt;
    let Ok(listed) = fs::read_dir(dir) else { return };
    let mut orders: Vec<PathBuf> = Vec::new();
    for entry in listed.flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if name.starts_with(OURS) || name.contains(".surgetank-") || name.contains(OF_VERSITYGW) {
            continue;
        }
        // A link or a file may vanish between the listing and the stat.
        let Ok(stat) = fs::symlink_metadata(&path) else { continue };
        // (An object server stores a symbolic link as an object that contains its target.)
        if name.starts_with('s') && stat.is_file() {
            continue;
        }
        if stat.is_dir() {
            look(store, &path, copies_die, known, seen);
            continue;
        }
        if dir.file_name().is_some_and(|name| name == "order") {
            orders.push(path.clone());
        }
        let version = (stat.ino(), stat.ctime(), stat.ctime_nsec());
        if known.insert(version, ()).is_none()
            && let Ok(bytes) = fs::read(&path)
        {
            seen.files += 1;
            // (The copy of a deleted file can die with the agent. An empty file then shows until the drain removes
            // it.)
            if bytes.is_empty() && copies_die {
                continue;
            }
            if let Err(why) = content::check(&bytes) {
                let path = path.strip_prefix(store).unwrap().to_string_lossy().into_owned();
                seen.broken.insert(path, why);
            }
        }
    }
    // No writer deletes these files: every file before the last one must exist now, too.
    if let Some(last) = orders.iter().max() {
        let number = |path: &Path| path.file_name().unwrap().to_str().unwrap()[1..].parse::<u64>().unwrap();
        for earlier in 1..number(last) {
            let path = dir.join(format!("o{earlier:05}"));
            if fs::symlink_metadata(&path).is_err() {
                let time = |path: &Path| fs::symlink_metadata(path).map(|stat| (stat.ctime(), stat.ctime_nsec()));
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                let (last, there) = (last.display(), time(last));
                seen.disorder.push(format!("{last} ({there:?}) without {} at {now:?}", path.display()));
            }
        }
    }
}
