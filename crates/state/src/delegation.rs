//! Delegated directories: processes make new plain files in them without asking the agent.

use std::time::Instant;
use surgetank_types::sync::Arc;

use foldhash::HashMap;

use surgetank_types::model::{DeviceId, FileId};

/// Directory and name of a plain file that a program made, or is about to make, and that counts for nothing.
pub type Stray = (FileId, Vec<u8>);

/// A directory that is lent.
#[derive(Debug)]
pub struct Delegation {
    pub device: DeviceId,
    pub watch: i32,
    pub reserve_bytes: u64,
    /// Set aside for files of which we do not know yet.
    pub ahead_bytes: u64,
    pub reason: Option<Arc<str>>,
    /// It is not shown any more; what was made in it is still to be taken in.
    pub ended: bool,
    pub number: u64,
    /// When it was lent, or a file was made in it, by whomever.
    pub used: Instant,
}

#[derive(Debug, Default)]
pub struct Delegations {
    pub dirs: HashMap<FileId, Delegation>,
    pub next: u64,
    pub strays: Vec<Stray>,
}

/// How often files were made in a directory since it was taken back, and after how many it is lent.
#[derive(Debug, Default, Clone, Copy)]
pub struct DelegationDemand {
    pub made: u16,
    pub after: u16,
}

impl Delegations {
    /// The device on which programs may make files of the directory.
    pub fn device(&self, dir: FileId) -> Option<DeviceId> {
        self.dirs.get(&dir).filter(|lend| !lend.ended).map(|lend| lend.device)
    }
}
