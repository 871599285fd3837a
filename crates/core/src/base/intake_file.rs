//! What a process says about a file that it created in a delegated directory (see the intake of the metadata).

use surgetank_types::model::{FileId, RunId};

/// A file that a process says it created.
#[derive(Debug, Clone)]
pub struct IntakeFile {
    /// The agent gave it for the inode number. The file's id comes at intake, so that ids give the order of creation.
    pub number: u64,
    /// The directory in which it was created.
    pub dir: FileId,
    /// Its name in that directory.
    pub name: Vec<u8>,
    /// Permission bits.
    pub perm: u32,
    /// As the process says: the run may have ended.
    pub run: RunId,
    /// Device number of the plain file.
    pub dev: u64,
    /// Inode number of the plain file.
    pub ino: u64,
}
