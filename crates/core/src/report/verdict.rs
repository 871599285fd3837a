//! The verdict: the basis of the exit code.
//!
//! The danger that it avoids: a loss that is reported only once. A lost file never becomes durable, so it stays in
//! every verdict until the user acknowledges it.

use serde::{Deserialize, Serialize};

use super::{Listing, PathText};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotDurable {
    pub path: PathText,
    pub why: String,
    /// Where the newest bytes are. Empty when no copy was found, or when the copy cannot be checked.
    pub safe_at: PathText,
}

/// A file whose newest version has no copy any more. Every command reports it until the user acknowledges it (`scavenge
/// --forget`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    pub path: PathText,
    /// Where its bytes were.
    pub at: PathText,
    pub why: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    pub path: PathText,
    /// The name under which the agent's copy was put into the store.
    pub kept_as: PathText,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undelivered {
    /// `rename a → b`.
    pub operation: String,
    pub why: String,
}

/// The basis of the exit code.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verdict {
    pub not_durable: Listing<NotDurable>,
    #[serde(default)]
    pub lost: Listing<Lost>,
    pub conflicts: Listing<Conflict>,
    pub undelivered: Listing<Undelivered>,
    /// Kept by rule `keep`: not in the store, on purpose; not a failure.
    pub kept: Listing<PathText>,
}

impl Verdict {
    pub fn is_durable(&self) -> bool {
        self.is_drained() && self.lost.is_empty()
    }

    /// No operation is left that can still reach the store.
    pub fn is_drained(&self) -> bool {
        self.not_durable.is_empty() && self.conflicts.is_empty() && self.undelivered.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_files_are_durable_and_conflicts_are_not() {
        let mut verdict = Verdict::default();
        verdict.kept.push(PathText(b"k".to_vec()));
        assert!(verdict.is_durable());
        verdict.conflicts.push(Conflict { path: PathText::default(), kept_as: PathText::default() });
        assert!(!verdict.is_durable());
    }

    #[test]
    fn lost_file_is_not_durable_and_leaves_nothing_to_drain() {
        let mut verdict = Verdict::default();
        verdict.lost.push(Lost { path: PathText::default(), at: PathText::default(), why: String::new() });
        assert!(!verdict.is_durable() && verdict.is_drained());
    }
}
