//! How much memory this process may still take: a RAM tier's pages count against the job's cgroup.
//!
//! The smallest of the machine's `MemAvailable` and, for every cgroup above us (version 1 and 2), its limit less its
//! use, where clean page cache does not count as use (it is given back on demand). The danger it avoids: the
//! out-of-memory killer taking the scientist's program because a tmpfs "had room".

use std::fs;
use std::path::{Path, PathBuf};

/// What may be taken, and the whole it is a part of (the margin is measured by the whole).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryRoom {
    pub available_bytes: u64,
    pub total_bytes: u64,
}

impl MemoryRoom {
    /// Left to the programs themselves.
    pub fn margin_bytes(self) -> u64 {
        self.total_bytes / 16
    }
}

/// Where to look; found once, read in every poll.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    meminfo: PathBuf,
    groups: Vec<Group>,
}

#[derive(Debug, Clone)]
struct Group {
    limit: PathBuf,
    usage: PathBuf,
    stat: PathBuf,
    /// Name of the clean-cache line in `stat`.
    cache_key: &'static str,
}

impl Memory {
    pub fn of_this_process() -> Self {
        let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::from(Path::new("/proc/meminfo"), Path::new("/sys/fs/cgroup"), &membership)
    }

    fn from(meminfo: &Path, cgroup_root: &Path, membership: &str) -> Self {
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
            // Our group and all above it; in a container the visible root may itself be a limited group.
            let mut group = root.join(path.trim_start_matches('/'));
            while group.starts_with(&root) {
                groups.push(match version_2 {
                    true => Group {
                        limit: group.join("memory.max"),
                        usage: group.join("memory.current"),
                        stat: group.join("memory.stat"),
                        cache_key: "inactive_file",
                    },
                    false => Group {
                        limit: group.join("memory.limit_in_bytes"),
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
        Self { meminfo: meminfo.to_path_buf(), groups }
    }

    /// `None` when the kernel does not tell (no /proc): the file system's own word must do then.
    pub fn room(&self) -> Option<MemoryRoom> {
        let meminfo = fs::read_to_string(&self.meminfo).ok()?;
        let machine = MemoryRoom {
            available_bytes: line_value(&meminfo, "MemAvailable:")? << 10,
            total_bytes: line_value(&meminfo, "MemTotal:")? << 10,
        };
        let tightest = self.groups.iter().filter_map(Group::room).chain([machine]).min_by_key(|room| {
            // By what is left after the margin, which is what counts.
            room.available_bytes.saturating_sub(room.margin_bytes())
        });
        tightest.map(|room| MemoryRoom { total_bytes: room.total_bytes.min(machine.total_bytes), ..room })
    }
}

impl Group {
    fn room(&self) -> Option<MemoryRoom> {
        // "max" does not parse: no limit. Version 1 says a number near 2⁶³ instead, which is never the tightest.
        let limit_bytes: u64 = fs::read_to_string(&self.limit).ok()?.trim().parse().ok()?;
        let usage_bytes: u64 = fs::read_to_string(&self.usage).ok()?.trim().parse().ok()?;
        let cache_bytes =
            fs::read_to_string(&self.stat).ok().and_then(|stat| line_value(&stat, self.cache_key)).unwrap_or(0);
        let held_bytes = usage_bytes.saturating_sub(cache_bytes);
        Some(MemoryRoom { available_bytes: limit_bytes.saturating_sub(held_bytes), total_bytes: limit_bytes })
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
    fn the_tightest_group_counts_and_clean_cache_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = machine(dir.path());
        let job = dir.path().join("cg/slurm/job_7");
        fs::create_dir_all(&job).unwrap();
        fs::write(job.join("memory.max"), "104857600\n").unwrap();
        fs::write(job.join("memory.current"), "83886080\n").unwrap();
        fs::write(job.join("memory.stat"), "anon 5\ninactive_file 20971520\n").unwrap();
        fs::write(dir.path().join("cg/slurm/memory.max"), "max\n").unwrap();
        let memory = Memory::from(&meminfo, &dir.path().join("cg"), "0::/slurm/job_7\n");
        assert_eq!(memory.room(), Some(MemoryRoom { available_bytes: 40 << 20, total_bytes: 100 << 20 }));

        // The limit of a parent group counts as well.
        fs::write(dir.path().join("cg/slurm/memory.max"), "104857600\n").unwrap();
        fs::write(dir.path().join("cg/slurm/memory.current"), "99614720\n").unwrap();
        let memory = Memory::from(&meminfo, &dir.path().join("cg"), "0::/slurm/job_7\n");
        assert_eq!(memory.room().unwrap().available_bytes, 5 << 20);
    }

    #[test]
    fn version_1_groups_and_no_groups() {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = machine(dir.path());
        let group = dir.path().join("cg/memory/a");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "104857600\n").unwrap();
        fs::write(group.join("memory.usage_in_bytes"), "94371840\n").unwrap();
        let memory = Memory::from(&meminfo, &dir.path().join("cg"), "4:cpu:/\n3:memory:/a\n0::/\n");
        assert_eq!(memory.room().unwrap().available_bytes, 10 << 20);

        let alone = Memory::from(&meminfo, &dir.path().join("cg"), "");
        assert_eq!(alone.room(), Some(MemoryRoom { available_bytes: 512 << 20, total_bytes: 1 << 30 }));
        assert!(Memory::of_this_process().room().is_some_and(|room| room.available_bytes > 0));
    }
}
