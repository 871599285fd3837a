//! The verdict: the basis of the exit code.
//!
//! The danger that it avoids: a loss that is reported only once. A lost file never becomes durable, so it stays in
//! every verdict until the user acknowledges it.

use serde::{Deserialize, Serialize};

use super::{Listing, PathText};

/// A file whose newest version is not in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotDurable {
    /// Path below the served directory.
    pub path: PathText,
    /// The operation or error for which the file waits, in words.
    pub why: String,
    /// Where the newest bytes are. Empty when no copy was found, or when the copy cannot be checked.
    pub safe_at: PathText,
}

/// A file whose newest version has no copy any more. Every command reports it until the user acknowledges it (`scavenge
/// --forget`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// Path below the served directory.
    pub path: PathText,
    /// Where its bytes were.
    pub at: PathText,
    /// Cause of the loss, in words.
    pub why: String,
}

/// A file that another client changed in the store; both versions are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// Path below the served directory.
    pub path: PathText,
    /// The name under which the agent's copy was put into the store.
    pub kept_as: PathText,
}

/// An operation on names or attributes that the store did not get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undelivered {
    /// `rename a → b`.
    pub operation: String,
    /// The error, in words.
    pub why: String,
}

/// A lost node, whose own programs may have lost what they did. No other node has a list of it. Not a failure of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undone {
    /// Its number in the pool.
    pub member: u32,
    /// Where it was: `HOST:PORT`.
    pub address: String,
    /// Up to this moment it had everything in the store. `None`: not known.
    pub since_unix_seconds: Option<u64>,
}

/// The basis of the exit code.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Verdict {
    /// Files whose content is not in the store.
    pub not_durable: Listing<NotDurable>,
    /// Files whose newest version has no copy any more.
    #[serde(default)]
    pub lost: Listing<Lost>,
    /// Files that were lost with another node of the pool, as far as this node knows. They are not acknowledged: the list
    /// ends with the agent.
    #[serde(default)]
    pub lost_elsewhere: Listing<Lost>,
    /// Files that another client changed in the store meanwhile.
    pub conflicts: Listing<Conflict>,
    /// Operations other than content, such as renames and deletes.
    pub undelivered: Listing<Undelivered>,
    /// How many of those are still tried. The others have ended without success.
    #[serde(default)]
    pub waiting_operations: u64,
    /// Lost nodes of the pool, whose own programs may have lost what they did.
    #[serde(default)]
    pub perhaps_undone: Listing<Undone>,
    /// Kept by rule `keep`: not in the store, on purpose; not a failure.
    pub kept: Listing<PathText>,
}

impl Verdict {
    /// All output is in the store, and no loss is unacknowledged.
    pub fn is_durable(&self) -> bool {
        self.is_drained()
            && self.conflicts.is_empty()
            && self.undelivered.is_empty()
            && self.lost.is_empty()
            && self.lost_elsewhere.is_empty()
    }

    /// Adds the verdict of another agent.
    pub fn add(&mut self, other: Self) {
        self.not_durable.add(other.not_durable);
        self.lost.add(other.lost);
        self.lost_elsewhere.add(other.lost_elsewhere);
        self.conflicts.add(other.conflicts);
        self.undelivered.add(other.undelivered);
        self.waiting_operations += other.waiting_operations;
        self.perhaps_undone.add(other.perhaps_undone);
        self.kept.add(other.kept);
    }

    /// No operation is left that can still reach the store.
    pub fn is_drained(&self) -> bool {
        self.not_durable.is_empty() && self.waiting_operations == 0
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
