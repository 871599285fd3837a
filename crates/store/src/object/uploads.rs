//! The ids of unfinished uploads, on disk. If the agent is killed in the middle, the next one continues them or aborts them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Words;
use crate::StorePath;

/// One upload: its temporary and its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub temporary: Vec<u8>,
    pub key: String,
    pub id: String,
    pub size_bytes: u64,
    pub part_bytes: u64,
    pub words: Words,
}

impl Kept {
    pub fn path(&self) -> StorePath {
        StorePath(self.temporary.clone())
    }
}

pub(super) struct Uploads {
    dir: PathBuf,
}

impl Uploads {
    pub fn in_directory(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    fn file(&self, temporary: &StorePath) -> PathBuf {
        self.dir.join(format!("{:016x}.json", crate::checksum::of_bytes(&temporary.0)))
    }

    /// Written before the first part is sent. (It need not survive the node: the tier's file does not either, or `gc` finds the
    /// upload.)
    pub fn keep(&self, upload: &Kept) -> io::Result<()> {
        let file = self.file(&upload.path());
        let unfinished = file.with_extension("new");
        let mut out = fs::File::create(&unfinished)?;
        out.write_all(&serde_json::to_vec(upload)?)?;
        drop(out);
        fs::rename(unfinished, file)
    }

    /// The upload of a temporary; `None` if there is none, or its file cannot be read.
    pub fn of(&self, temporary: &StorePath) -> Option<Kept> {
        let upload: Kept = serde_json::from_slice(&fs::read(self.file(temporary)).ok()?).ok()?;
        (upload.temporary == temporary.0).then_some(upload)
    }

    pub fn forget(&self, temporary: &StorePath) {
        drop(fs::remove_file(self.file(temporary)));
    }

    pub fn all(&self) -> io::Result<Vec<Kept>> {
        let files = fs::read_dir(&self.dir)?.filter_map(Result::ok).map(|entry| entry.path());
        let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
        Ok(files.filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok()).collect())
    }
}
