//! The agent's reports: one set of shapes for the socket, the tables of the verbs and the JSON output.
//!
//! Every shape is a plain snapshot with public fields. Lists that can be as long as the directory is large are
//! [`Listing`]s. A listing has the first few entries and the true total, so that an answer stays small.
//!
//! The danger that it avoids: a summary counts one thing and a verdict judges another.

mod audit;
mod figures;
mod io;
mod locate;
pub mod pattern;
mod pool;
pub mod run;
mod status;
mod summary;
mod verdict;

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use audit::{Audit, Finding, Proven, TierCopy, Undrained, What};
pub use figures::{DrainFigures, Figures, PoolFigures, TierFigures};
pub use locate::{CopyOn, Located, Same};
pub use pool::{LostMember, Pair, PoolMember, PoolMembers, PoolTraffic, Room, Traffic};
pub use status::{
    AgentStatus, DeadlineStatus, DeviceStatus, DrainStatus, Health, Oldest, Phase, Queue, RunStatus, Status,
    TierStatus, Trouble, Visibility,
};
pub use summary::{DrainSummary, MountSummary, NoRoom, Refused, Summary, TierSummary};
pub use verdict::{Conflict, Lost, NotDurable, Undelivered, Undone, Verdict};

use surgetank_types::model::{Mode, RunId};

/// The most entries of a [`Listing`].
pub const LISTED_MAX: usize = 100;

/// A path as bytes. In JSON a string where it is UTF-8, otherwise an array of byte values.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PathText(pub Vec<u8>);

impl PathText {
    /// The same bytes as a path, borrowed.
    pub fn as_path(&self) -> &Path {
        Path::new(std::ffi::OsStr::from_bytes(&self.0))
    }
    /// A copy of the path.
    pub fn to_path_buf(&self) -> PathBuf {
        self.as_path().to_path_buf()
    }
}

impl From<&Path> for PathText {
    fn from(path: &Path) -> Self {
        Self(path.as_os_str().as_bytes().to_vec())
    }
}

impl From<PathBuf> for PathText {
    fn from(path: PathBuf) -> Self {
        Self(path.into_os_string().into_vec())
    }
}

impl From<&[u8]> for PathText {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

/// For a terminal: control characters are escaped, so that a file's name cannot repaint the screen.
impl fmt::Display for PathText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in String::from_utf8_lossy(&self.0).chars() {
            if c.is_control() {
                write!(f, "{}", c.escape_default())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for PathText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl Serialize for PathText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => serializer.collect_seq(self.0.iter()),
        }
    }
}

impl<'de> Deserialize<'de> for PathText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Shape {
            Text(String),
            Bytes(Vec<u8>),
        }
        Ok(Self(match Shape::deserialize(deserializer)? {
            Shape::Text(text) => text.into_bytes(),
            Shape::Bytes(bytes) => bytes,
        }))
    }
}

/// The first entries of a list, and its true length.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing<T> {
    /// The number of entries, those outside `first` included.
    pub total: u64,
    /// The first entries, [`LISTED_MAX`] at most.
    pub first: Vec<T>,
}

impl<T> Default for Listing<T> {
    fn default() -> Self {
        Self { total: 0, first: Vec::new() }
    }
}

impl<T> Listing<T> {
    /// Counts an entry, and keeps it while `first` has room.
    pub fn push(&mut self, entry: T) {
        self.total += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push(entry);
        }
    }
    /// Adds the entries of another list.
    pub fn add(&mut self, other: Self) {
        let more = other.more();
        other.first.into_iter().for_each(|entry| self.push(entry));
        self.total += more;
    }
    /// The list has no entries, listed or not.
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }
    /// How many are not in `first`.
    pub fn more(&self) -> u64 {
        self.total.saturating_sub(self.first.len() as u64)
    }
}

impl<T> FromIterator<T> for Listing<T> {
    fn from_iter<I: IntoIterator<Item = T>>(entries: I) -> Self {
        let mut listing = Self::default();
        for entry in entries {
            listing.push(entry);
        }
        listing
    }
}

/// The scope of a question: everything, one run's output, or the files below some paths.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Scope {
    /// Only the files and operations of this run; `None`: those of all runs.
    pub run: Option<RunId>,
    /// Relative to the served directory; empty: no restriction. A directory includes all below it.
    #[serde(default)]
    pub paths: Vec<PathText>,
}

impl Scope {
    /// The scope without a restriction.
    pub fn everything() -> Self {
        Self::default()
    }
    /// The scope of one run's output.
    pub fn run(run: RunId) -> Self {
        Self { run: Some(run), paths: Vec::new() }
    }
    /// Is `path` one of the scope's paths, or below one?
    pub fn covers(&self, path: &[u8]) -> bool {
        self.paths.is_empty()
            || self.paths.iter().any(|under| {
                under.0.is_empty()
                    || path
                        .strip_prefix(under.0.as_slice())
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
            })
    }
}

/// The state of a file's content, as `surgetank why` prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    /// Some program may still write it.
    Open,
    /// Complete, and not in the store: it waits for the drain, or a rule keeps it on the tiers.
    Sealed,
    /// The drain copies or publishes it now.
    Draining,
    /// Verified in the store, and still on a tier.
    Durable,
    /// Durable, and only in the store.
    Evicted,
    /// In a pool: its content was only on a node that is lost. Make it again.
    Lost,
}

impl fmt::Display for FileState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Draining => "draining",
            Self::Durable => "durable",
            Self::Evicted => "evicted",
            Self::Lost => "lost",
        })
    }
}

/// One copy of a file on a tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// Name of the tier.
    pub tier: String,
    /// The plain file itself.
    pub file: PathText,
}

/// `surgetank why PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// Path below the served directory.
    pub path: PathText,
    /// State of the newest version.
    pub state: FileState,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Where its bytes are read from now, in a few words.
    pub place: String,
    /// The mode that applies: whether and how the file reaches the store.
    pub mode: Mode,
    /// The rule that decided the mode, and where that rule is written.
    pub rule: String,
    /// Every hint of the file, the nearest first, and its effect.
    #[serde(default)]
    pub hints: Vec<String>,
    /// The reason for its place.
    pub placement: String,
    /// Copies on tiers.
    pub replicas: Vec<ReplicaStatus>,
    /// Path of the file below the store; empty while the store does not have it.
    pub store_path: PathText,
    /// The file stays on its tier although it is durable, because a user or a hint wants that.
    pub pinned: bool,
    /// The operation for which the file waits, or the error of the drain.
    pub trouble: Option<Trouble>,
}

/// A workflow's hints for one file or directory, in the words of [`surgetank_policy::hint`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintOf {
    /// Path below the served directory; a directory's hints apply to files that are made below it.
    pub path: PathText,
    /// Values of the hints by their names.
    pub hints: BTreeMap<String, String>,
}

/// A hint that the agent did not accept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedHint {
    /// Path to which the hint was given.
    pub path: PathText,
    /// Reason for the refusal.
    pub why: String,
}

/// The drain's progress. "Done" counts since the final drain of the scope began.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Files whose content is not in the store yet.
    pub undrained_files: u64,
    /// Bytes that are not copied yet, without holes.
    pub undrained_bytes: u64,
    /// Renames, deletes and changes of attributes that are not in the store yet.
    pub undrained_operations: u64,
    /// Files that became durable.
    pub done_files: u64,
    /// Includes the copied bytes of incomplete files, which `undrained_bytes` excludes.
    pub done_bytes: u64,
    /// The current rate; 0 without progress.
    pub bytes_per_second: u64,
    /// Rate in bytes per second since the final drain of the scope began.
    #[serde(default)]
    pub average_bytes_per_second: u64,
    /// The failure for which the drain waits; `None`: it makes progress.
    pub trouble: Option<Trouble>,
    /// Without a user's action the scope will not change any more: all is durable, or the drain gave up.
    pub settled: bool,
}

/// The work that `prefetch` started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prefetch {
    /// Files that were fetched from the store.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A living process, for the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Command line, shortened.
    pub command: String,
    /// What it holds: `cwd /scratch/project`; empty for a background child.
    pub holds: String,
}

/// `surgetank run --json FILE`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    /// The version of Surgetank.
    pub version: String,
    /// The served directory.
    pub over: PathText,
    /// Path or URL of the store, without secrets.
    pub store: PathText,
    /// The command and its arguments.
    pub command: Vec<PathText>,
    /// As a shell returns it: 128 + signal when killed.
    pub command_exit: u8,
    /// What `surgetank run` itself returned.
    pub exit: u8,
    /// Time from the command's start to its end, in milliseconds.
    pub command_ms: u64,
    /// Duration of the final drain, in milliseconds.
    pub drain_ms: u64,
    /// Why `exit` differs from `command_exit`; empty when it does not.
    pub reason: String,
    /// The verdict on the run's output; `None`: the agent gave none.
    pub verdict: Option<Verdict>,
    /// The agent's summary; `None`: the agent gave none.
    pub summary: Option<Summary>,
    /// Background children that outlived the grace.
    pub left_running: Vec<Holder>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_any_bytes_survive_json() {
        for bytes in [&b"a/b"[..], b"", b"\xff\x00\x80", "ä".as_bytes(), b"\"\n"] {
            let path = PathText(bytes.to_vec());
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<PathText>(&json).unwrap(), path, "{json}");
        }
    }

    #[test]
    fn name_with_control_bytes_is_escaped() {
        assert_eq!(PathText(b"a\x1b[2Jb\n".to_vec()).to_string(), "a\\u{1b}[2Jb\\n");
    }

    #[test]
    fn listing_is_bounded_and_keeps_the_true_total() {
        let listing: Listing<usize> = (0..LISTED_MAX + 7).collect();
        assert_eq!((listing.first.len(), listing.total, listing.more()), (LISTED_MAX, LISTED_MAX as u64 + 7, 7));
    }

    #[test]
    fn scope_covers_whole_components_only() {
        let scope = Scope { run: None, paths: vec![PathText(b"out".to_vec())] };
        assert!(scope.covers(b"out") && scope.covers(b"out/a"));
        assert!(!scope.covers(b"output") && !scope.covers(b"ou"));
        assert!(Scope::everything().covers(b"anything"));
    }
}
