//! The memory that this process may still take: a RAM tier's pages count against the job's cgroup.
//!
//! It is the smallest of the machine's `MemAvailable` and, for every cgroup above the process (version 1 and 2), its limit less
//! its use. Clean page cache does not count as use, because the kernel reclaims it on demand.
//!
//! The danger that it avoids: the out-of-memory killer ends the user's program because a tmpfs "had space".

use std::fs;
use std::path::{Path, PathBuf};
use surgetank_types::sync::{Mutex, PoisonError};

/// Version 1 reports "unlimited" as a number near 2⁶³.
const UNLIMITED_BYTES: u64 = 1 << 60;
const MARGIN_BYTES_MIN: u64 = 64 << 20;

/// The memory that may be taken, and the whole of which it is a part (the margin depends on the whole).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryRoom {
    /// Negative if a limit was lowered below the use.
    pub available_bytes: i64,
    pub total_bytes: u64,
}

impl MemoryRoom {
    /// What is left after the programs' margin; if negative, so many bytes should be given back.
    pub fn spare_bytes(self) -> i64 {
        // A sixteenth, and more of a small limit: the margin must last until files have left the tier.
        let margin_bytes = (self.total_bytes / 16).max(MARGIN_BYTES_MIN.min(self.total_bytes / 4));
        self.available_bytes.saturating_sub_unsigned(margin_bytes)
    }
}

/// The files to read; found again when the process moves to another cgroup.
#[derive(Debug)]
pub(super) struct Memory {
    meminfo: PathBuf,
    membership: PathBuf,
    cgroup_root: PathBuf,
    groups: Mutex<(String, Vec<Group>)>,
}

#[derive(Debug, Clone)]
struct Group {
    limit: PathBuf,
    /// Above this limit the kernel kills no process but throttles all: it can reclaim nothing from a tmpfs.
    slows_down: Option<PathBuf>,
    usage: PathBuf,
    stat: PathBuf,
    /// Name of the clean-cache line in `stat`.
    cache_key: &'static str,
}

impl Memory {
    pub fn of_this_process() -> Self {
        Self::from(Path::new("/proc/meminfo"), Path::new("/sys/fs/cgroup"), Path::new("/proc/self/cgroup"))
    }

    fn from(meminfo: &Path, cgroup_root: &Path, membership: &Path) -> Self {
        Self {
            meminfo: meminfo.to_path_buf(),
            membership: membership.to_path_buf(),
            cgroup_root: cgroup_root.to_path_buf(),
            groups: Mutex::default(),
        }
    }

    fn groups_of(cgroup_root: &Path, membership: &str) -> Vec<Group> {
        let mut groups = Vec::new();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let version_2 = controllers.is_empty();
            if !version_2 && !controllers.split(',').any(|controller| controller == "memory") {
                continue;
            }
            let root = match version_2 {
                false => cgroup_root.join("memory"),
                true if cgroup_root.join("unified").is_dir() => cgroup_root.join("unified"),
                true => cgroup_root.to_path_buf(),
            };
            // The process's own cgroup and all above it; in a container the visible root may itself be a limited group.
            let mut group = root.join(path.trim_start_matches('/'));
            while group.starts_with(&root) {
                groups.push(match version_2 {
                    true => Group {
                        limit: group.join("memory.max"),
                        slows_down: Some(group.join("memory.high")),
                        usage: group.join("memory.current"),
                        stat: group.join("memory.stat"),
                        cache_key: "inactive_file",
                    },
                    false => Group {
                        limit: group.join("memory.limit_in_bytes"),
                        slows_down: None,
                        usage: group.join("memory.usage_in_bytes"),
                        stat: group.join("memory.stat"),
                        cache_key: "total_inactive_file",
                    },
                });
                if !group.pop() {
                    break;
                }
            }
        }
        groups.retain(|group| group.limit.exists());
        groups
    }

    /// `None` when the kernel does not report it (no /proc): then only the file system's numbers count.
    pub fn room(&self) -> Option<MemoryRoom> {
        let meminfo = fs::read_to_string(&self.meminfo).ok()?;
        let kib = |key| line_value(&meminfo, key)?.checked_mul(1024);
        let machine = MemoryRoom {
            available_bytes: i64::try_from(kib("MemAvailable:")?).unwrap_or(i64::MAX),
            total_bytes: kib("MemTotal:")?,
        };
        let membership = fs::read_to_string(&self.membership).unwrap_or_default();
        let mut known = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != membership {
            known.1 = Self::groups_of(&self.cgroup_root, &membership);
            known.0 = membership;
        }
        let limited = known.1.iter().filter_map(Group::room);
        // The smallest is the one with the least left after its margin.
        limited.chain([machine]).min_by_key(|room| room.spare_bytes())
    }
}

impl Group {
    fn room(&self) -> Option<MemoryRoom> {
        // "max" does not parse: no limit.
        let number = |path: &Path| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
        let limits = [number(&self.limit), self.slows_down.as_deref().and_then(number)];
        let limit_bytes = limits.into_iter().flatten().min().filter(|limit| *limit < UNLIMITED_BYTES)?;
        let usage_bytes = number(&self.usage)?;
        let cache_bytes =
            fs::read_to_string(&self.stat).ok().and_then(|stat| line_value(&stat, self.cache_key)).unwrap_or(0);
        let held_bytes = usage_bytes.saturating_sub(cache_bytes);
        // Both are far below 2⁶³.
        let available_bytes = limit_bytes.cast_signed().saturating_sub_unsigned(held_bytes);
        Some(MemoryRoom { available_bytes, total_bytes: limit_bytes })
    }
}

/// The number behind `key` at the start of a line.
fn line_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(key)).then(|| words.next())?.and_then(|number| number.parse().ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(dir: &Path) -> PathBuf {
        let meminfo = dir.join("meminfo");
        fs::write(&meminfo, "MemTotal:  1048576 kB\nMemFree: 1 kB\nMemAvailable:  524288 kB\n").unwrap();
        meminfo
    }

    #[test]
    fn room_is_of_tightest_group_without_clean_cache() {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = machine(dir.path());
        let job = dir.path().join("cg/slurm/job_7");
        fs::create_dir_all(&job).unwrap();
        fs::write(job.join("memory.max"), "104857600\n").unwrap();
        fs::write(job.join("memory.current"), "83886080\n").unwrap();
        fs::write(job.join("memory.stat"), "anon 5\ninactive_file 20971520\n").unwrap();
        fs::write(dir.path().join("cg/slurm/memory.max"), "max\n").unwrap();
        let membership = dir.path().join("membership");
        fs::write(&membership, "0::/slurm/job_7\n").unwrap();
        let memory = Memory::from(&meminfo, &dir.path().join("cg"), &membership);
        assert_eq!(memory.room(), Some(MemoryRoom { available_bytes: 40 << 20, total_bytes: 100 << 20 }));

        // The limit of a parent group counts too.
        fs::write(dir.path().join("cg/slurm/memory.max"), "104857600\n").unwrap();
        fs::write(dir.path().join("cg/slurm/memory.current"), "99614720\n").unwrap();
        assert_eq!(memory.room().unwrap().available_bytes, 5 << 20);
        fs::write(dir.path().join("cg/slurm/memory.max"), "max\n").unwrap();

        // So does the limit that throttles, and one that was lowered below the use.
        fs::write(job.join("memory.high"), "94371840\n").unwrap();
        assert_eq!(memory.room().unwrap().available_bytes, 30 << 20);
        fs::write(job.join("memory.max"), "41943040\n").unwrap();
        let room = memory.room().unwrap();
        assert_eq!((room.available_bytes, room.spare_bytes()), (-20 << 20, (-20 << 20) - (40 << 20) / 4));

        // The process moved to another group.
        fs::write(&membership, "0::/slurm\n").unwrap();
        assert_eq!(memory.room().unwrap().available_bytes, 512 << 20);
    }

    #[test]
    fn room_with_version_1_or_no_groups_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = machine(dir.path());
        let group = dir.path().join("cg/memory/a");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "104857600\n").unwrap();
        fs::write(group.join("memory.usage_in_bytes"), "94371840\n").unwrap();
        let membership = dir.path().join("membership");
        fs::write(&membership, "4:cpu:/\n3:memory:/a\n0::/\n").unwrap();
        let memory = Memory::from(&meminfo, &dir.path().join("cg"), &membership);
        assert_eq!(memory.room().unwrap().available_bytes, 10 << 20);

        fs::write(group.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        assert_eq!(memory.room().unwrap().total_bytes, 1 << 30, "no limit");

        let alone = Memory::from(&meminfo, &dir.path().join("cg"), &dir.path().join("absent"));
        assert_eq!(alone.room(), Some(MemoryRoom { available_bytes: 512 << 20, total_bytes: 1 << 30 }));
        assert!(Memory::of_this_process().room().is_some_and(|room| room.available_bytes > 0));
    }
}
