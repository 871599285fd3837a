//! Calls that this door could not serve: logged once per kind, counted for the summary.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use surgetank_core::report::{PathText, Refused};

/// There are few kinds, all known at compile time.
#[derive(Default)]
pub struct Refusals(Mutex<BTreeMap<&'static str, Refused>>);

impl Refusals {
    /// `command` and `path`: the caller's command, and the path of its call, if any; called for the first of a kind
    /// only.
    pub fn add(&self, what: &'static str, first: impl FnOnce() -> (String, Vec<u8>)) {
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = kinds.entry(what).or_insert_with(|| {
            let (command, path) = first();
            let path = PathText(path);
            tracing::warn!(command, %path, "refused without a mount: {what}");
            Refused { what: what.to_owned(), count: 0, path, command }
        });
        refused.count += 1;
    }

    pub fn list(&self) -> Vec<Refused> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}
