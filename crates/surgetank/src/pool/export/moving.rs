//! Directories that this member has claimed to rename them. The kernel holds locks during a rename, so they are opened later.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use surgetank_types::clock::tick;

use crate::pool::link::{Moves, Renamed};

/// What is not found for so long after its claim has been removed, or renamed by itself.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a directory is found.
#[derive(Debug, Clone)]
pub enum Moved {
    /// By one of the paths that it had since, and its inode number.
    Itself { ino: u64, paths: Vec<Box<[u8]>> },
    /// In the directory above it, by its name.
    Below,
}

/// By the path of the claim, since when. (A directory comes before those below it.)
type All = BTreeMap<Box<[u8]>, (Instant, Moved)>;

#[derive(Debug, Default)]
pub struct Moving {
    all: Mutex<All>,
    /// A thread is looking for them.
    is_looking: AtomicBool,
}

impl Moving {
    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, claimed: &[u8], moves: &Moves) {
        let moved = match moves {
            Moves::Itself(ino) => Moved::Itself { ino: *ino, paths: vec![claimed.into()] },
            Moves::Below => Moved::Below,
        };
        // (For a request that is repeated, it may have other paths already.)
        self.all().entry(claimed.into()).or_insert((tick(), moved));
    }

    pub fn has(&self, claimed: &[u8]) -> bool {
        self.all().contains_key(claimed)
    }

    pub fn remove(&self, claimed: &[u8]) {
        self.all().remove(claimed);
    }

    /// A directory gets another path, with all that is below it.
    pub fn renamed(&self, Renamed { from, to }: &Renamed) {
        for (_, moved) in self.all().values_mut() {
            let Moved::Itself { paths, .. } = moved else { continue };
            let next = |path: &[u8]| {
                let rest = path.strip_prefix(&**from).filter(|rest| rest.is_empty() || rest.starts_with(b"/"))?;
                Some(Box::from([&**to, rest].concat()))
            };
            let more: Vec<Box<[u8]>> =
                paths.iter().filter_map(|path| next(path)).filter(|path| !paths.contains(path)).collect();
            paths.extend(more);
        }
    }

    /// Looks for each. Returns whether to look again: some are not found yet, and this is the only thread that looks.
    pub fn find(&self, mut keep: impl FnMut(&[u8], &Moved) -> Option<()>) -> bool {
        if self.is_looking.swap(true, Ordering::AcqRel) {
            return false;
        }
        let all: Vec<_> = self.all().iter().map(|(claimed, (_, moved))| (claimed.clone(), moved.clone())).collect();
        for (claimed, moved) in all {
            if keep(&claimed, &moved).is_some() {
                self.remove(&claimed);
            }
        }
        self.is_looking.store(false, Ordering::Release);
        let mut left = self.all();
        left.retain(|_, (since, _)| since.elapsed() < PATIENCE);
        !left.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renamed(from: &str, to: &str) -> Renamed {
        Renamed { from: from.as_bytes().into(), to: to.as_bytes().into() }
    }

    #[test]
    fn directory_is_looked_for_under_all_its_paths() {
        let moving = Moving::default();
        moving.add(b"set", &Moves::Itself(7));
        moving.add(b"set/a", &Moves::Below);
        moving.add(b"settle", &Moves::Itself(8));
        moving.renamed(&renamed("set", "x/first"));
        moving.renamed(&renamed("x", "y"));
        moving.renamed(&renamed("other", "elsewhere"));
        let mut looked = Vec::new();
        let again = moving.find(|claimed, moved| {
            let paths = if let Moved::Itself { paths, .. } = moved { paths.clone() } else { Vec::new() };
            looked.push((String::from_utf8_lossy(claimed).into_owned(), paths.len(), paths.last().cloned()));
            (claimed != b"settle").then_some(())
        });
        assert!(again && moving.has(b"settle") && !moving.has(b"set") && !moving.has(b"set/a"));
        let last = |path: &str| Some(Box::from(path.as_bytes()));
        assert_eq!(looked[0], ("set".to_owned(), 3, last("y/first")));
        assert_eq!(looked[1], ("set/a".to_owned(), 0, None));
        assert_eq!(looked[2], ("settle".to_owned(), 1, last("settle")));
    }
}
