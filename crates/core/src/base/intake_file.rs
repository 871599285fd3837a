//! What a process says about a file that it created in a delegated directory (see the intake of the metadata).

use surgetank_types::model::{FileId, RunId};

/// A file that a process says it created.
#[derive(Debug, Clone)]
pub struct IntakeFile {
    /// The agent gave it for the inode number. The file's id comes at intake, so that ids give the order of creation.
    pub number: u64,
    pub dir: FileId,
    pub name: Vec<u8>,
    pub perm: u32,
    /// As the process says: the run may have ended.
    pub run: RunId,
    pub dev: u64,
    pub ino: u64,
}
