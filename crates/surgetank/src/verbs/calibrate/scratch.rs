//! A calibration's directory in a tier or the store. The next calibration removes the directory of a killed one.

use std::fs;
use std::path::{Path, PathBuf};

use surgetank_types::error::{Error, Result};

/// A directory of this calibration, removed when dropped.
pub struct Scratch {
    pub path: PathBuf,
}

const SCRATCH: &str = ".surgetank-calibrate-";

impl Scratch {
    pub fn new(below: &Path) -> Result<Self> {
        remove_left_behind(below);
        let path = below.join(format!("{SCRATCH}{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| {
            Error::new(format!("no directory can be made in {}", below.display()))
                .why(error)
                .remedy("give a tier or a store that is yours to write")
        })?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes the directories of killed calibrations.
fn remove_left_behind(below: &Path) {
    for entry in fs::read_dir(below).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(SCRATCH)).and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
