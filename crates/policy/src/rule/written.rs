//! A rule as a source has it: its pattern, what it sets, its origin, and the authority of that.

use serde::{Deserialize, Serialize};

use crate::hint::Acting;
use crate::words::{Collocate, ReplicasAt, Timing};
use surgetank_types::model::{FsyncTarget, Mode};

/// The paths that a rule applies to, relative to the directory that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pattern {
    /// `**`, `*`, `?`, `[…]`, `{a,b}`, read as in `.gitignore` (see [`super`]).
    Glob(String),
    /// From Sea's lists: a regular expression that covers the whole path.
    Regex(String),
}

/// The source of a rule; a later variant wins over an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Authority {
    /// Built in.
    Default,
    /// A hint of a workflow.
    Hint,
    /// The project's `surgetank.toml`, or Sea's lists.
    Project,
    /// An environment variable or an option of the command.
    CommandLine,
    /// The site's file, `/etc/surgetank.toml`.
    Site,
}

/// One rule of the configuration. `None` means that the rule does not set the attribute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleConfig {
    /// The paths that the rule applies to.
    pub pattern: Pattern,
    /// What happens to the file after it is written.
    pub mode: Option<Mode>,
    /// When the drain starts with it.
    pub timing: Option<Timing>,
    /// What fsync waits for.
    pub fsync: Option<FsyncTarget>,
    /// Expected size, in bytes: space is reserved for it, so that writes are direct.
    pub size_bytes: Option<u64>,
    /// Name of the tier to prefer.
    pub tier: Option<String>,
    /// Whether the file is copied to a tier at the start, while there is free space.
    pub prefetch: bool,
    /// Whether it stays on its tier as long as the agent lives.
    pub pin: bool,
    /// Its form in the store.
    pub compress: Option<Compress>,
    /// Whether the store holds equal content only once. `false` overrides weaker rules.
    pub dedup: Option<bool>,
    /// On how many members of a pool it is until the store has it.
    pub replicas: Option<u32>,
    /// When it is there.
    pub replicas_at: Option<ReplicasAt>,
    /// On which member of a pool its content is.
    pub collocate: Option<Collocate>,
    /// Hints that are asked at operations on the file.
    pub acting: Acting,
    /// The kind of source that has the rule.
    pub authority: Authority,
    /// The place where it is written: `surgetank.toml:12`, `.sea_flushlist:3`, `--rule`.
    pub origin: String,
}

impl RuleConfig {
    /// A rule that sets nothing yet. `origin` is the place where it is written.
    pub fn empty(pattern: Pattern, authority: Authority, origin: impl Into<String>) -> Self {
        Self {
            pattern,
            mode: None,
            timing: None,
            fsync: None,
            size_bytes: None,
            tier: None,
            prefetch: false,
            pin: false,
            compress: None,
            dedup: None,
            replicas: None,
            replicas_at: None,
            collocate: None,
            acting: Acting::default(),
            authority,
            origin: origin.into(),
        }
    }
}

/// The form of a file's content in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compress {
    /// Unchanged; overrides weaker rules.
    None,
    /// Compressed by zstd, at this level (1 to 19).
    Zstd(i32),
}
