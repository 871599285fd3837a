//! The findings of `fsck` and `scavenge`.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::PathText;
use surgetank_types::model::Timestamp;

/// The kinds of findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Its newest version is lost. It stays a finding until the user acknowledges it.
    Lost,
    /// A plain file differs in size from its version at the close.
    WrongSize,
    /// The tier's copy differs from what was written to the store; the store's copy is right.
    RottenOnTier,
    /// The store's copy differs from what was written to it; the tier's copy is right.
    RottenInStore,
    /// Neither copy has the written bytes.
    RottenEverywhere,
    /// The store lacks a file that the catalog says it has.
    NotInStore,
    /// Another client changed the store's copy.
    ChangedInStore,
    /// A plain file that no record names.
    Orphan,
    /// An incomplete copy in the store.
    Leftover,
    /// A tier that is missing or unreadable; and each file whose newest version is on it.
    Unread,
    /// The machine went down before all of it was synced.
    Unproven,
    /// The catalog's log is damaged, so later changes are unknown.
    Damaged,
}

/// How much of a version is certain to be there. A machine that went down leaves doubts, and so does a plain file of
/// another length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proven {
    /// All of it.
    Whole,
    /// The bytes that a program had synced; later writes may be missing.
    InPart,
    /// Nothing of it.
    Nothing,
    /// Its length differs from that at the close.
    Cut,
    /// No record says what became of it.
    Unknown,
}

/// One difference between the catalog, a tier and the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Kind of the finding.
    pub what: What,
    /// Relative to the served directory.
    pub path: PathText,
    /// The plain file, the store's file or the tier of the finding.
    pub at: PathText,
    /// Explanation for the user, in words.
    pub text: String,
    /// The repair fixed it.
    pub repaired: bool,
    /// The tier's copy of a file that the store no longer has.
    #[serde(skip)]
    pub copy: Option<TierCopy>,
}

/// The place of a copy on a tier, from which `scavenge` can save it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierCopy {
    /// The directory of the device's plain files.
    pub files: PathBuf,
    /// Relative to it.
    pub path: Vec<u8>,
}

/// A file whose newest version is not in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undrained {
    /// Path below the served directory.
    pub path: PathText,
    /// The plain file, or the temporary in the store.
    pub at: PathText,
    /// Size in bytes of what is at `at`.
    pub size_bytes: u64,
    /// A program may have been about to write more.
    pub open: bool,
    /// The part of the version that is certain to be there.
    pub proven: Proven,
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u32,
    /// Modification time of the newest version.
    pub mtime: Timestamp,
}

/// The result of an audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Inspected files.
    pub files: u64,
    /// Bytes that were read and compared with their checksum.
    pub scrubbed_bytes: u64,
    /// Differences, in the order in which the audit met them.
    pub findings: Vec<Finding>,
    /// Files whose newest version is not in the store.
    pub undrained: Vec<Undrained>,
}

impl Audit {
    /// Findings of kind [`What::Lost`].
    pub fn lost(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.what == What::Lost)
    }
}

impl What {
    /// No copy can restore it.
    pub fn is_lost(self) -> bool {
        matches!(self, Self::Lost | Self::WrongSize | Self::RottenEverywhere | Self::Unproven | Self::Damaged)
    }

    /// Other findings are reported, and need no action.
    pub fn is_trouble(self) -> bool {
        !matches!(self, Self::Leftover | Self::ChangedInStore)
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Lost => "lost",
            Self::WrongSize => "wrong size",
            Self::RottenOnTier => "rotten on tier",
            Self::RottenInStore => "rotten in store",
            Self::RottenEverywhere => "rotten",
            Self::NotInStore => "not in store",
            Self::ChangedInStore => "changed in store",
            Self::Orphan => "orphan",
            Self::Leftover => "leftover",
            Self::Unread => "unread",
            Self::Unproven => "unproven",
            Self::Damaged => "damaged",
        })
    }
}
