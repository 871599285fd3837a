//! What the machine has: memory, cgroup limits, file systems. Only looks, changes nothing.
//!
//! `/proc` and the cgroup tree are read below a root, so that tests can show it a machine of their own.

use std::fs;
use std::path::{Path, PathBuf};

use super::Survives;

/// Whose `/proc` and cgroups are read.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self { root: PathBuf::from("/") }
    }
}

/// Memory in bytes, as `/proc/meminfo` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub total_bytes: u64,
    pub available_bytes: u64,
}

/// The tightest memory limit that applies to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    pub limit_bytes: u64,
    /// Limit less what is used and can't be reclaimed easily.
    pub room_bytes: u64,
}

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    pub at: PathBuf,
    /// `ext4`, `tmpfs`, `fuse.sshfs`, …
    pub kind: String,
    pub source: String,
}

impl Machine {
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path.trim_start_matches('/'))).ok()
    }

    pub fn memory(&self) -> Option<Memory> {
        let text = self.text("/proc/meminfo")?;
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()? << 10)
        };
        let total_bytes = field("MemTotal")?;
        Some(Memory { total_bytes, available_bytes: field("MemAvailable").or_else(|| field("MemFree"))? })
    }

    /// The tightest limit among our cgroup and those above it, of version 1 or 2. `None`: unlimited.
    pub fn memory_limit(&self) -> Option<MemoryLimit> {
        let groups = self.text("/proc/self/cgroup")?;
        let mounts = self.mounts();
        let mut tightest: Option<MemoryLimit> = None;
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let (files, mount) = if controllers.is_empty() {
                (&V2, mounts.iter().find(|mount| mount.kind == "cgroup2"))
            } else if controllers.split(',').any(|name| name == "memory") {
                (&V1, mounts.iter().find(|mount| mount.kind == "cgroup" && mount.at.ends_with("memory")))
            } else {
                continue;
            };
            let Some(mount) = mount else { continue };
            let base = self.root.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
            // In a container the path may be that of the host; then only the top is visible.
            let mut group = base.join(path.trim_start_matches('/'));
            while group.starts_with(&base) {
                if let Some(limit) = files.read(&group)
                    && tightest.is_none_or(|known| limit.room_bytes < known.room_bytes)
                {
                    tightest = Some(limit);
                }
                if !group.pop() {
                    break;
                }
            }
        }
        tightest
    }

    /// Everything that is mounted, in the order of mounting.
    pub fn mounts(&self) -> Vec<Mounted> {
        let text = self.text("/proc/self/mountinfo").unwrap_or_default();
        text.lines().filter_map(mounted).collect()
    }

    /// The mount that `path` (absolute, physical) lies on.
    pub fn mount_of(&self, path: &Path) -> Option<Mounted> {
        // The later of two mounts at one place hides the earlier.
        self.mounts()
            .into_iter()
            .filter(|mount| path.starts_with(&mount.at))
            .max_by_key(|mount| mount.at.as_os_str().len())
    }
}

struct Files {
    limit: &'static str,
    used: &'static str,
    /// In `memory.stat`: pages of files that nobody used lately.
    reclaimable: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", reclaimable: "total_inactive_file" };
const V2: Files = Files { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };
/// Version 1 says "unlimited" with a number near 2⁶³.
const UNLIMITED_BYTES: u64 = 1 << 60;

impl Files {
    fn read(&self, group: &Path) -> Option<MemoryLimit> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        let limit_bytes = number(self.limit).filter(|limit| *limit < UNLIMITED_BYTES)?;
        let reclaimable = fs::read_to_string(group.join("memory.stat")).ok().and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix(self.reclaimable)?.trim().parse::<u64>().ok())
        });
        let used = number(self.used).unwrap_or(0).saturating_sub(reclaimable.unwrap_or(0));
        Some(MemoryLimit { limit_bytes, room_bytes: limit_bytes.saturating_sub(used) })
    }
}

fn mounted(line: &str) -> Option<Mounted> {
    let (front, back) = line.split_once(" - ")?;
    let at = unescaped(front.split(' ').nth(4)?);
    let mut back = back.split(' ');
    Some(Mounted { at: PathBuf::from(at), kind: back.next()?.to_owned(), source: unescaped(back.next().unwrap_or("")) })
}

/// `\040` and the like.
fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        match after.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &after[3..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// What a file system is, for us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// `ext4`, `tmpfs`, `lustre`, …; the number in hexadecimal when the kind is not known.
    pub kind: String,
    pub survives: Survives,
    pub total_bytes: u64,
    /// What an ordinary user may still write.
    pub available_bytes: u64,
    pub device: u64,
}

impl FileSystem {
    pub fn is_shared(&self) -> bool {
        self.survives == Survives::Node
    }
    pub fn is_memory(&self) -> bool {
        self.survives == Survives::Agent
    }
}

/// f_type → what it is called and what it survives. Those with the number of FUSE are told apart by their mount's kind.
const KINDS: [(i64, &str, Survives); 24] = [
    (0x0102_1994, "tmpfs", Survives::Agent),
    (0x8584_58f6, "ramfs", Survives::Agent),
    (0xef53, "ext4", Survives::Reboot),
    (0x5846_5342, "xfs", Survives::Reboot),
    (0x9123_683e, "btrfs", Survives::Reboot),
    (0xf2f5_2010, "f2fs", Survives::Reboot),
    (0x2fc1_2fc1, "zfs", Survives::Reboot),
    (0xca45_1a4e, "bcachefs", Survives::Reboot),
    (0x794c_7630, "overlay", Survives::Reboot),
    (0x4d44, "vfat", Survives::Reboot),
    (0x6969, "nfs", Survives::Node),
    (0x0bd0_0bd0, "lustre", Survives::Node),
    (0x4750_4653, "gpfs", Survives::Node),
    (0x1983_0326, "beegfs", Survives::Node),
    (0xff53_4d42, "cifs", Survives::Node),
    (0xfe53_4d42, "smb2", Survives::Node),
    (0x517b, "smb", Survives::Node),
    (0x00c3_6400, "ceph", Survives::Node),
    (0x5346_414f, "afs", Survives::Node),
    (0x0102_1997, "9p", Survives::Node),
    (0x0116_1970, "gfs2", Survives::Node),
    (0x7461_636f, "ocfs2", Survives::Node),
    (0xaad7_aaea, "panfs", Survives::Node),
    (0x2003_0528, "orangefs", Survives::Node),
];
const FUSE: i64 = 0x6573_5546;
/// FUSE file systems over a local disk; any other is taken for shared.
const LOCAL_FUSE: [&str; 5] = ["fuseblk", "virtiofs", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs"];

impl Machine {
    /// What `path` lies on.
    pub fn file_system(&self, path: &Path) -> std::io::Result<FileSystem> {
        let stat = rustix::fs::statfs(path)?;
        let device = rustix::fs::stat(path)?.st_dev;
        let number = stat.f_type & 0xffff_ffff;
        let (kind, survives) = if number == FUSE {
            let kind = self.mount_of(path).map_or_else(|| "fuse".to_owned(), |mount| mount.kind);
            let survives = if LOCAL_FUSE.contains(&kind.as_str()) { Survives::Reboot } else { Survives::Node };
            (kind, survives)
        } else {
            match KINDS.iter().find(|(known, ..)| *known == number) {
                Some((_, kind, survives)) => ((*kind).to_owned(), *survives),
                // Not known to be shared: promise the less.
                None => (format!("{number:#x}"), Survives::Reboot),
            }
        };
        let block = u64::try_from(stat.f_frsize).unwrap_or(0);
        Ok(FileSystem {
            kind,
            survives,
            total_bytes: block.saturating_mul(stat.f_blocks),
            available_bytes: block.saturating_mul(stat.f_bavail),
            device,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().expect("tempdir");
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
            fs::write(path, text).expect("write");
        }
        let machine = Machine::below(dir.path());
        (dir, machine)
    }

    #[test]
    fn limits_of_both_cgroup_versions() {
        let (_dir, v2) = machine(&[
            ("proc/self/cgroup", "0::/slurm/job7/step0\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/slurm/memory.max", "max\n"),
            ("sys/fs/cgroup/slurm/job7/memory.max", "1000000\n"),
            ("sys/fs/cgroup/slurm/job7/memory.current", "600000\n"),
            ("sys/fs/cgroup/slurm/job7/memory.stat", "anon 1\ninactive_file 100000\n"),
            ("sys/fs/cgroup/slurm/job7/step0/memory.max", "max\n"),
        ]);
        assert_eq!(v2.memory_limit(), Some(MemoryLimit { limit_bytes: 1_000_000, room_bytes: 500_000 }));

        let (_dir, v1) = machine(&[
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/not/visible\n0::/\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4096\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "96\n"),
        ]);
        assert_eq!(v1.memory_limit(), Some(MemoryLimit { limit_bytes: 4096, room_bytes: 4000 }));

        let (_dir, unlimited) = machine(&[
            ("proc/self/cgroup", "4:memory:/\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(unlimited.memory_limit(), None);
    }

    #[test]
    fn memory_and_mounts() {
        let (_dir, machine) = machine(&[
            ("proc/meminfo", "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n"),
            (
                "proc/self/mountinfo",
                "27 1 254:0 / / rw - ext4 /dev/vda rw\n30 27 0:9 / /a\\040b rw shared:1 - fuse.sshfs host:/x rw\n31 27 0:9 / /a\\040b rw - tmpfs t rw\n",
            ),
        ]);
        assert_eq!(machine.memory(), Some(Memory { total_bytes: 2 << 20, available_bytes: 1 << 20 }));
        assert_eq!(machine.mount_of(Path::new("/a b/c")).expect("mount").kind, "tmpfs");
        assert_eq!(machine.mount_of(Path::new("/a")).expect("mount").source, "/dev/vda");
    }

    #[test]
    fn this_machine() {
        let machine = Machine::default();
        assert!(machine.memory().expect("meminfo").total_bytes > 0);
        let proc = machine.file_system(Path::new("/")).expect("statfs");
        assert!(proc.total_bytes > 0 && !proc.is_memory());
    }
}
