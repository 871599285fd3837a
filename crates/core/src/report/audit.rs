//! What `fsck` and `scavenge` tell.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::PathText;
use surgetank_types::model::Timestamp;

/// What `fsck` finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Its newest version is gone. It stays a finding until the user acknowledges it.
    Lost,
    /// A plain file has another size than its version had when it was closed.
    WrongSize,
    /// The tier's copy has other bytes than were written to the store; the store's are right.
    RottenOnTier,
    /// The store's copy has other bytes than were written to it; the tier's are right.
    RottenInStore,
    /// Neither copy has the bytes that were written.
    RottenEverywhere,
    /// The store does not have what the catalog says it has.
    NotInStore,
    /// Somebody else changed the store's copy.
    ChangedInStore,
    /// A plain file that no record names.
    Orphan,
    /// A half-made copy in the store.
    Leftover,
    /// A tier that is not there, or cannot be read; and each file whose newest version is on it.
    Unread,
    /// The machine went down before all of it was synced.
    Unproven,
    /// The catalog's log, so that what happened since is not known.
    Damaged,
}

/// How much of a version is there for sure. A machine that went down leaves doubts, and a plain file that is not as long as it
/// was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proven {
    Whole,
    /// What a program had synced of it; what it wrote after that may not be.
    InPart,
    /// Nothing of it.
    Nothing,
    /// It is not as long as it was when it was closed.
    Cut,
    /// Nobody remembers what became of it.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub what: What,
    /// Relative to the directory that is served.
    pub path: PathText,
    /// The plain file, the store's file or the tier that it is about.
    pub at: PathText,
    pub text: String,
    /// It was put right.
    pub mended: bool,
    /// What a tier has of a file that the store does not have any more.
    #[serde(skip)]
    pub copy: Option<TierCopy>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierCopy {
    /// Where the device has its plain files.
    pub files: PathBuf,
    /// Below it.
    pub path: Vec<u8>,
}

/// A file whose newest version is not in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undrained {
    pub path: PathText,
    /// The plain file, or the temporary in the store.
    pub at: PathText,
    pub size_bytes: u64,
    /// A program may have been about to write more.
    pub open: bool,
    pub proven: Proven,
    pub perm: u32,
    pub mtime: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Files that were looked at.
    pub files: u64,
    /// Bytes that were read and compared with their checksum.
    pub scrubbed_bytes: u64,
    pub findings: Vec<Finding>,
    pub undrained: Vec<Undrained>,
}

impl Audit {
    pub fn lost(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.what == What::Lost)
    }
}

impl What {
    /// Nothing can bring it back.
    pub fn is_lost(self) -> bool {
        matches!(self, Self::Lost | Self::WrongSize | Self::RottenEverywhere | Self::Unproven | Self::Damaged)
    }

    /// The rest is told, and is nothing to be dealt with.
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
