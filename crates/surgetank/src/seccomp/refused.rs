//! What this way could not serve: told in the log once for each kind, counted for the summary.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use surgetank_core::report::{PathText, Refused};

/// Kinds are few and known when this is compiled.
#[derive(Default)]
pub struct Refusals(Mutex<BTreeMap<&'static str, Refused>>);

impl Refusals {
    /// `command` and `path`: whose call it was and what it named, if anything; asked for the first of a kind only.
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
