//! When the kernel last got an answer about a directory of the store: until it has forgotten that, a claim of another
//! member is not acknowledged.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use surgetank_types::clock::tick;

/// With more directories than this, those of which an answer is old leave.
const DIRECTORIES_MAX: usize = 10_000;
/// An answer is old after this time.
const OLD: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Believed {
    answered: Mutex<Answered>,
}

#[derive(Default)]
struct Answered {
    directories: HashMap<Box<[u8]>, Instant>,
    /// The newest answer of those that left.
    left: Option<Instant>,
}

impl Believed {
    /// The kernel may have answers of an earlier agent about every directory.
    pub fn since_now() -> Self {
        Self { answered: Mutex::new(Answered { left: Some(tick()), ..Answered::default() }) }
    }

    /// The kernel gets an answer now.
    pub fn note(&self, directory: &[u8]) {
        let now = tick();
        let mut answered = self.answered();
        if let Some(at) = answered.directories.get_mut(directory) {
            *at = now;
            return;
        }
        if answered.directories.len() >= DIRECTORIES_MAX {
            let Answered { directories, left } = &mut *answered;
            directories.retain(|_, at| {
                let is_new = now.saturating_duration_since(*at) < OLD;
                if !is_new {
                    *left = (*left).max(Some(*at));
                }
                is_new
            });
            if directories.len() >= DIRECTORIES_MAX {
                *left = (*left).max(directories.values().copied().max());
                directories.clear();
            }
        }
        answered.directories.insert(directory.into(), now);
    }

    /// How long ago the last answer was; `None`: there was none.
    pub fn since(&self, directory: &[u8]) -> Option<Duration> {
        let answered = self.answered();
        let at = answered.directories.get(directory).copied().max(answered.left)?;
        Some(tick().saturating_duration_since(at))
    }

    fn answered(&self) -> MutexGuard<'_, Answered> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
