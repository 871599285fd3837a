//! Delegated directories: processes make new plain files in them without asking the agent.

use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::HashMap;

use surgetank_types::model::{DeviceId, FileId};

/// Directory and name of a plain file that a process created, or is about to create, and that is not a file of the namespace.
pub type Stray = (FileId, Vec<u8>);

/// A delegated directory.
#[derive(Debug)]
pub struct Delegation {
    /// The device for the new files.
    pub device: DeviceId,
    /// The watch on the directory of the tier.
    pub watch: i32,
    /// Bytes reserved for each new file.
    pub reserve_bytes: u64,
    /// Reserved for files that the agent has not taken in yet.
    pub ahead_bytes: u64,
    /// Why new files go to that device.
    pub reason: Option<Arc<str>>,
    /// The index does not show it any more; files that were created in it are still to be taken in.
    pub ended: bool,
    /// Grows with each delegation.
    pub number: u64,
    /// When it was delegated, or a file was created in it.
    pub used: Instant,
}

/// All delegated directories.
#[derive(Debug, Default)]
pub struct Delegations {
    /// By directory.
    pub dirs: HashMap<FileId, Delegation>,
    /// The number of the newest delegation.
    pub next: u64,
    /// Plain files that are to be removed.
    pub strays: Vec<Stray>,
}

/// How many files were created in a directory since its recall, and after how many it is delegated.
#[derive(Debug, Default, Clone, Copy)]
pub struct DelegationDemand {
    /// Files created since the recall.
    pub made: u16,
    /// The directory is delegated after so many files.
    pub after: u16,
}

impl Delegations {
    /// The device on which processes may create files of the directory.
    pub fn device(&self, dir: FileId) -> Option<DeviceId> {
        self.dirs.get(&dir).filter(|delegation| !delegation.ended).map(|delegation| delegation.device)
    }
}
