//! The agent's reports: one set of shapes for the socket, the tables of the verbs and the JSON output.
//!
//! Every shape is a plain snapshot with public fields. Lists that can be as long as the directory is large are
//! [`Listing`]s. A listing has the first few entries and the true total, so that an answer stays small.
//!
//! The danger that it avoids: a summary counts one thing and a verdict judges another.

mod audit;
mod figures;
pub mod pattern;
pub mod run;
mod verdict;

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use audit::{Audit, Finding, Proven, TierCopy, Undrained, What};
pub use figures::{DrainFigures, Figures, TierFigures};
pub use verdict::{Conflict, Lost, NotDurable, Undelivered, Verdict};

use surgetank_policy::config::Survives;
use surgetank_store::Savings;
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

/// Is a tier's device in use, and if not, why not?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    Well,
    /// Taken out of use after errors.
    Sick {
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    pub path: PathText,
    pub used_bytes: u64,
    pub reserved_bytes: u64,
    /// The free bytes of the file system, shared with other users.
    pub free_bytes: u64,
    pub health: Health,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    pub name: String,
    pub cap_bytes: u64,
    pub used_bytes: u64,
    pub reserved_bytes: u64,
    /// Bytes here that the store does not have yet.
    pub dirty_bytes: u64,
    pub survives: Survives,
    pub devices: Vec<DeviceStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oldest {
    pub path: PathText,
    pub age_seconds: u64,
}

/// The work that waits for the store.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Queue {
    pub files: u64,
    pub bytes: u64,
    /// Renames, deletes, changes of mode.
    pub operations: u64,
    pub oldest: Option<Oldest>,
    pub bytes_per_second: u64,
}

/// A failure at the moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    pub path: Option<PathText>,
    /// The tier or store.
    pub place: String,
    pub reason: String,
    pub since_unix_seconds: i64,
}

/// The drain's state and failures with the store, since the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DrainStatus {
    /// No operation has reached the store since then: the time of the first failure, or of a call without an answer.
    /// `troubles` has the reason.
    pub paused_since_unix_seconds: Option<i64>,
    /// Failed tries.
    pub failures: u64,
    /// Copies that verification rejected.
    pub corrupt: u64,
    /// Present where rules compress files for the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub savings: Option<Savings>,
}

/// The engine's part of `surgetank status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Status {
    pub tiers: Vec<TierStatus>,
    pub queue: Queue,
    #[serde(default)]
    pub drain: DrainStatus,
    pub troubles: Vec<Trouble>,
    /// Losses that the user has not acknowledged yet.
    #[serde(default)]
    pub lost: Listing<Lost>,
    /// Bytes that are meant for the store, have no durable copy, and would be lost with a reboot of the node.
    pub at_risk_reboot_bytes: u64,
    /// The same with the loss of the node.
    pub at_risk_node_bytes: u64,
    #[serde(default)]
    pub deadline: Option<DeadlineStatus>,
}

/// The end of the job, where it is known, and the bytes that can be drained by then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadlineStatus {
    pub unix_seconds: i64,
    /// The source of the end's time.
    pub from: String,
    pub left_seconds: u64,
    /// The drain's rate while it works; assumed as long as it is not `measured`.
    pub bytes_per_second: u64,
    pub measured: bool,
    /// The bytes that can be drained until then, with a margin.
    pub drainable_bytes: u64,
    /// The bytes that have to be drained.
    pub undrained_bytes: u64,
    pub fits: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Visibility {
    /// A mount namespace of the runs.
    Private,
    /// Every program of the node sees the mount.
    Global,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    pub run: RunId,
    pub pid: u32,
    pub command: String,
    pub since_unix_seconds: i64,
}

/// All of `surgetank status`: the agent's own part and the engine's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    pub over: PathText,
    pub store: PathText,
    pub pid: u32,
    pub version: String,
    pub phase: Phase,
    pub visibility: Visibility,
    pub since_unix_seconds: i64,
    pub runs: Vec<RunStatus>,
    /// Other mounts below the directory: bound through, not served by the agent.
    pub bypassed: Vec<PathText>,
    #[serde(flatten)]
    pub content: Status,
}

/// The agent's life; `agent/users.rs` has the transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has users, or was ordered to stay.
    Serving,
    /// Without users: the agent drains the rest, and still admits a new user.
    Leaving,
    /// Unmounting: a new user has to wait and start another agent.
    Closed,
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

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierSummary {
    pub name: String,
    pub files: u64,
    pub in_bytes: u64,
    pub out_bytes: u64,
    /// Opens served from here.
    pub hits: u64,
    /// Files that had to leave in the middle of a write.
    pub spills: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DrainSummary {
    pub files: u64,
    /// Without holes.
    pub bytes: u64,
    /// `bytes` over the time in which the drain worked.
    pub bytes_per_second: u64,
    /// Failed tries of all runs.
    #[serde(default)]
    pub failures: u64,
    /// Copies of all runs that verification rejected, and that were made again.
    #[serde(default)]
    pub corrupt: u64,
    /// From the end of the command to the last durable byte.
    pub tail_ms: u64,
    /// Present where rules compress files for the store; of all runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub savings: Option<Savings>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MountSummary {
    pub requests: u64,
    /// Time the agent spent answering, over all threads.
    pub service_ms: u64,
    pub direct_opens: u64,
    pub mediated_opens: u64,
    pub mediated_read_bytes: u64,
    pub mediated_write_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Summary {
    pub tiers: Vec<TierSummary>,
    pub drain: DrainSummary,
    pub mount: MountSummary,
    /// Bytes that are meant for the store, have no durable copy, and would be lost with the node now.
    pub at_risk_node_bytes: u64,
    /// By all programs that the agent served, of all runs.
    #[serde(default)]
    pub refused: Vec<Refused>,
    /// Writers that got an error because no room was left anywhere.
    #[serde(default)]
    pub no_room: Listing<NoRoom>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct NoRoom {
    pub path: PathText,
    /// The tiers and the store, and the store's answer.
    pub why: String,
}

/// Calls of one kind that failed because there is no mount.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Refused {
    pub what: String,
    pub count: u64,
    /// The path in the first of them, as the program gave it; empty without a path.
    pub path: PathText,
    /// The program of the first call.
    pub command: String,
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
