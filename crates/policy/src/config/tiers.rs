//! The search for tiers when the configuration names none, and caps that leave space to the machine.
//!
//! A tier is useful only if it is faster than the store and harms no other user: memory that the job may still use, or a local
//! disk that is not the store's own. A note names every candidate that is passed over.

use std::path::{Path, PathBuf};

use super::machine::Machine;
use super::{Survives, TierConfig};
use crate::words::quantity::show_bytes;

/// A tier with a smaller cap is not useful.
const CAP_BYTES_MIN: u64 = 16 << 20;
/// Least memory that is left to the programs of a limited job.
const MARGIN_BYTES_MIN: u64 = 64 << 20;

/// The cap on one device, in bytes: what may be used so that the machine keeps space.
///
/// In memory: half of what is available, half of what the file system has, and in a memory cgroup (where tmpfs pages count)
/// what is left of the limit less a margin of a sixteenth. On a disk: four fifths of the free space. Errors: those of `statfs`.
pub fn cap_bytes(machine: &Machine, path: &Path) -> std::io::Result<u64> {
    let system = machine.file_system(path)?;
    if !system.is_memory() {
        return Ok(system.available_bytes / 5 * 4);
    }
    let mut cap = system.available_bytes / 2;
    if let Some(memory) = machine.memory() {
        cap = cap.min(memory.available_bytes / 2);
    }
    if let Some(limit) = machine.memory_limit() {
        let margin = (limit.limit_bytes / 16).max(MARGIN_BYTES_MIN);
        cap = cap.min(limit.room_bytes.saturating_sub(margin));
    }
    Ok(cap)
}

/// Undrained bytes allowed in memory: a quarter of the memory that the job may use. It limits both the loss if the node dies
/// and the duration of the final drain. The kernel risks about as much in its own page cache (`dirty_ratio`, 20 %).
pub(crate) fn dirty_bytes_max(machine: &Machine) -> u64 {
    let total = machine.memory().map_or(u64::MAX, |memory| memory.total_bytes);
    let limit = machine.memory_limit().map_or(u64::MAX, |limit| limit.limit_bytes);
    let usable = total.min(limit);
    if usable == u64::MAX { 1 << 30 } else { usable / 4 }
}

/// Completes a tier's configuration: the cap over its distinct devices, and what it survives.
pub(crate) fn completed(machine: &Machine, mut tier: TierConfig) -> std::io::Result<TierConfig> {
    let mut seen = Vec::new();
    let mut cap = 0u64;
    let mut survives = Survives::Node;
    for path in &tier.paths {
        let system = machine.file_system(path)?;
        survives = survives.min(system.survives);
        if !seen.contains(&system.device) {
            seen.push(system.device);
            cap = cap.saturating_add(cap_bytes(machine, path)?);
        }
    }
    tier.cap_bytes.get_or_insert(cap);
    tier.survives.get_or_insert(survives);
    Ok(tier)
}

/// Directories to consider, as the environment names them.
pub(crate) struct Candidates {
    pub ram: PathBuf,
    /// The first suitable one is taken: (what named it, directory).
    pub disks: Vec<(String, PathBuf)>,
}

/// Tiers for a directory and its store, fastest first, with a note for every candidate that was passed over.
pub(crate) fn found(
    machine: &Machine,
    candidates: &Candidates,
    over: &Path,
    store: &Path,
) -> (Vec<TierConfig>, Vec<String>) {
    let mut notes = Vec::new();
    let mut tiers = Vec::new();
    let site = Site { machine, over, store, store_device: machine.file_system(store).ok().map(|system| system.device) };
    match site.judge(&candidates.ram, true) {
        Ok(tier) => tiers.push(TierConfig { name: "ram".to_owned(), ..tier }),
        Err(why) => notes.push(format!("no tier in memory: {}: {why}", candidates.ram.display())),
    }
    for (named_by, path) in &candidates.disks {
        match site.judge(path, false) {
            Ok(tier) => {
                tiers.push(TierConfig { name: "disk".to_owned(), ..tier });
                break;
            }
            Err(why) => notes.push(format!("no tier on {} ({named_by}): {why}", path.display())),
        }
    }
    (tiers, notes)
}

struct Site<'a> {
    machine: &'a Machine,
    over: &'a Path,
    store: &'a Path,
    store_device: Option<u64>,
}

impl Site<'_> {
    fn judge(&self, path: &Path, memory: bool) -> Result<TierConfig, String> {
        let path = path.canonicalize().map_err(|error| error.to_string())?;
        let system = self.machine.file_system(&path).map_err(|error| error.to_string())?;
        if !path.is_dir() {
            return Err("it is not a directory".to_owned());
        }
        if memory != system.is_memory() {
            return Err(format!("it is {}, not {}", system.kind, if memory { "memory (tmpfs)" } else { "a disk" }));
        }
        if system.is_shared() {
            return Err(format!("{} is shared storage, not a local disk", system.kind));
        }
        for (name, other) in [("the directory that is served", self.over), ("the store", self.store)] {
            if path.starts_with(other) {
                return Err(format!("it is inside {name}"));
            }
            if other.starts_with(&path) {
                return Err(format!("{name} is inside it"));
            }
        }
        if self.store_device == Some(system.device) {
            return Err(
                "it is on the very file system of the store, so it would bring no speed (--tier takes it all the same)"
                    .to_owned(),
            );
        }
        if let Err(error) = rustix::fs::access(&path, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK) {
            return Err(format!("we may not write there ({error})"));
        }
        let tier = TierConfig { name: String::new(), paths: vec![path], cap_bytes: None, survives: None };
        let tier = completed(self.machine, tier).map_err(|error| error.to_string())?;
        match tier.cap_bytes {
            Some(cap) if cap < CAP_BYTES_MIN => {
                Err(format!("only {} could be used without taking space from other users", show_bytes(cap)))
            }
            _ => Ok(tier),
        }
    }
}
