//! How many files programs created without a request, and where they report them to the agent.

use std::fs;
use std::path::{Path, PathBuf};

/// From the programs' own counts.
pub fn made(output: &str) -> u64 {
    let lines = output.lines().filter_map(|line| line.strip_suffix(" created in delegated directories"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// The files in `/dev/shm` that programs share with the agent of this state directory.
pub fn in_memory(state: &Path) -> Vec<PathBuf> {
    let places = fs::read_dir(state).into_iter().flatten().flatten();
    let keys: Vec<String> = places.filter_map(|place| place.file_name().into_string().ok()).collect();
    let all = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.path());
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        keys.iter().any(|key| name.contains(&format!("-{key}.index")))
    };
    all.filter(is_ours).collect()
}

/// How many entries programs took in the ring at `path`; `None` if the file is not a ring.
pub fn entries(path: &Path) -> Option<u64> {
    let is_ring = path.extension().is_some_and(|end| end == "ring");
    let bytes = fs::read(path).ok().filter(|_| is_ring)?;
    // `st_ring.next` (shim/abi.h).
    Some(u64::from_ne_bytes(bytes.get(64..72)?.try_into().unwrap()))
}
