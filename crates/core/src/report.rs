//! The agent's reports: one set of shapes for the socket, the tables of the verbs and the JSON output.
//!
//! Every shape is a plain snapshot with public fields. Lists that can be as long as the directory is large are
//! [`Listing`]s. A listing has the first few entries and the true total, so that an answer stays small.
//!
//! The danger that it avoids: a summary counts one thing and a verdict judges another.

mod audit;
mod figures;
mod io;
pub mod pattern;
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
pub use figures::{DrainFigures, Figures, TierFigures};
pub use status::{
    AgentStatus, DeadlineStatus, DeviceStatus, DrainStatus, Health, Oldest, Phase, Queue, RunStatus, Status,
    TierStatus, Trouble, Visibility,
};
pub use summary::{DrainSummary, MountSummary, NoRoom, Refused, Summary, TierSummary};
pub use verdict::{Conflict, Lost, NotDurable, Undelivered, Verdict};

use surgetank_types::model::{Mode, RunId};

/// The most entries of a [`Listing`].
pub const LISTED_MAX: usize = 100;

/// A path as bytes. In JSON a string where it is UTF-8, otherwise an array of byte values.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PathText(pub Vec<u8>);

impl PathText {
    pub fn as_path(&self) -> &Path {
        Path::new(std::ffi::OsStr::from_bytes(&self.0))
    }
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
    pub total: u64,
    pub first: Vec<T>,
}

impl<T> Default for Listing<T> {
    fn default() -> Self {
        Self { total: 0, first: Vec::new() }
    }
}

impl<T> Listing<T> {
    pub fn push(&mut self, entry: T) {
        self.total += 1;
        if self.first.len() < LISTED_MAX {
            self.first.push(entry);
        }
    }
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
    pub run: Option<RunId>,
    /// Relative to the served directory; empty: no restriction. A directory includes all below it.
    #[serde(default)]
    pub paths: Vec<PathText>,
}

impl Scope {
    pub fn everything() -> Self {
        Self::default()
    }
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    /// Some program may still write it.
    Open,
    Sealed,
    Draining,
    Durable,
    /// Durable, and only in the store.
    Evicted,
}

impl fmt::Display for FileState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Draining => "draining",
            Self::Durable => "durable",
            Self::Evicted => "evicted",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    pub tier: String,
    /// The plain file itself.
    pub file: PathText,
}

/// `surgetank why PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    pub path: PathText,
    pub state: FileState,
    pub size_bytes: u64,
    /// Where its bytes are read from now, in a few words.
    pub place: String,
    pub mode: Mode,
    /// The rule that decided the mode, and where that rule is written.
    pub rule: String,
    /// Every hint of the file, the nearest first, and its effect.
    #[serde(default)]
    pub hints: Vec<String>,
    /// The reason for its place.
    pub placement: String,
    pub replicas: Vec<ReplicaStatus>,
    pub store_path: PathText,
    pub pinned: bool,
    pub trouble: Option<Trouble>,
}

/// A workflow's hints for one file or directory, in the words of [`surgetank_policy::hint`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HintOf {
    pub path: PathText,
    pub hints: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedHint {
    pub path: PathText,
    pub why: String,
}

/// The drain's progress. "Done" counts since the final drain of the scope began.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    pub undrained_files: u64,
    pub undrained_bytes: u64,
    pub undrained_operations: u64,
    pub done_files: u64,
    /// Includes the copied bytes of incomplete files, which `undrained_bytes` excludes.
    pub done_bytes: u64,
    /// The current rate; 0 without progress.
    pub bytes_per_second: u64,
    #[serde(default)]
    pub average_bytes_per_second: u64,
    pub trouble: Option<Trouble>,
    /// Without a user's action the scope will not change any more: all is durable, or the drain gave up.
    pub settled: bool,
}

/// The work that `prefetch` started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Prefetch {
    pub files: u64,
    pub bytes: u64,
}

/// A living process, for the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    pub pid: u32,
    pub command: String,
    /// What it holds: `cwd /scratch/project`; empty for a background child.
    pub holds: String,
}

/// `surgetank run --json FILE`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    pub version: String,
    pub over: PathText,
    pub store: PathText,
    pub command: Vec<PathText>,
    /// As a shell returns it: 128 + signal when killed.
    pub command_exit: u8,
    /// What `surgetank run` itself returned.
    pub exit: u8,
    pub command_ms: u64,
    pub drain_ms: u64,
    /// Why `exit` differs from `command_exit`; empty when it does not.
    pub reason: String,
    pub verdict: Option<Verdict>,
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
    fn a_listing_is_bounded_and_keeps_the_true_total() {
        let listing: Listing<usize> = (0..LISTED_MAX + 7).collect();
        assert_eq!((listing.first.len(), listing.total, listing.more()), (LISTED_MAX, LISTED_MAX as u64 + 7, 7));
    }

    #[test]
    fn a_scope_covers_whole_components_only() {
        let scope = Scope { run: None, paths: vec![PathText(b"out".to_vec())] };
        assert!(scope.covers(b"out") && scope.covers(b"out/a"));
        assert!(!scope.covers(b"output") && !scope.covers(b"ou"));
        assert!(Scope::everything().covers(b"anything"));
    }
}
