//! The machine: memory, cgroup limits, file systems. It only reads, and changes nothing.
//!
//! `/proc` and the cgroup tree are read below a root, so that tests can provide their own. [`Surroundings`] adds the process's
//! working directory and variables.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::Survives;
use surgetank_types::error::{Error, Result};

/// The environment that a configuration depends on.
#[derive(Debug, Clone)]
pub struct Surroundings {
    /// The working directory, absolute.
    pub cwd: PathBuf,
    /// The environment variables; of two with the same name the later one counts.
    pub env: Vec<(OsString, OsString)>,
    /// The site's configuration file; it need not exist.
    pub site_file: PathBuf,
    /// The machine on which the tiers are.
    pub machine: Machine,
    /// The directory in memory to consider as a tier.
    pub ram: PathBuf,
    /// The user's id, for the default state directory.
    pub uid: u32,
}

impl Surroundings {
    /// The environment of this process. Errors: the working directory was removed.
    pub fn of_this_process() -> Result<Self> {
        let cwd = std::env::current_dir().map_err(|error| {
            Error::new("the current directory can't be found").why(error).remedy("change to a directory that exists")
        })?;
        Ok(Self {
            cwd,
            env: std::env::vars_os().collect(),
            site_file: PathBuf::from("/etc/surgetank.toml"),
            machine: Machine::default(),
            ram: PathBuf::from("/dev/shm"),
            uid: rustix::process::getuid().as_raw(),
        })
    }

    /// A path in a variable that is set and not empty; its bytes need not be UTF-8.
    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        let (_, value) = self.env.iter().rev().find(|(key, _)| key == name)?;
        (!value.is_empty()).then(|| PathBuf::from(value))
    }

    /// A variable that is set, not empty, and UTF-8.
    pub(super) fn var(&self, name: &str) -> Option<String> {
        let (_, value) = self.env.iter().rev().find(|(key, _)| key == name)?;
        value.to_str().filter(|text| !text.is_empty()).map(str::to_owned)
    }
}

/// A machine, as its `/proc` and cgroup tree describe it. The default is the present one.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self { root: PathBuf::from("/") }
    }
}

/// The machine's memory, from `/proc/meminfo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable`, in bytes.
    pub available_bytes: u64,
}

/// The tightest memory limit of a cgroup that applies to this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// The limit less the memory in use that cannot be reclaimed easily, in bytes.
    pub room_bytes: u64,
}

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// The mount point, absolute.
    pub at: PathBuf,
    /// The type of the file system: `ext4`, `tmpfs`, `fuse.sshfs`, …
    pub kind: String,
    /// The source: a device, `HOST:PATH`, or any word.
    pub source: String,
}

impl Machine {
    /// A machine whose `/proc` and `/sys` are below `root`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path.trim_start_matches('/'))).ok()
    }

    /// The machine's memory; `None` if the kernel does not report it.
    pub fn memory(&self) -> Option<Memory> {
        let text = self.text("/proc/meminfo")?;
        let field = |name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()? << 10)
        };
        let total_bytes = field("MemTotal")?;
        Some(Memory { total_bytes, available_bytes: field("MemAvailable").or_else(|| field("MemFree"))? })
    }

    /// The tightest limit of the process's cgroup and those above it, of version 1 or 2. `None` if there is no limit.
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

    /// All mounts, in the order of mounting.
    pub fn mounts(&self) -> Vec<Mounted> {
        let text = self.text("/proc/self/mountinfo").unwrap_or_default();
        text.lines().filter_map(mounted).collect()
    }

    /// The mount that contains `path` (absolute, physical).
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
    /// Name of the line in `memory.stat` that counts inactive file pages.
    reclaimable: &'static str,
}

const V1: Files =
    Files { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", reclaimable: "total_inactive_file" };
const V2: Files = Files { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };
/// Version 1 reports "unlimited" as a number near 2⁶³.
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

/// Decodes `\040` and the like.
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

/// A file system: what it is, what it survives, and its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// The type: `ext4`, `tmpfs`, `lustre`, …; the magic number in hexadecimal if it is unknown.
    pub kind: String,
    /// What files on it survive.
    pub survives: Survives,
    /// Size, in bytes.
    pub total_bytes: u64,
    /// Bytes that an ordinary user may still write.
    pub available_bytes: u64,
    /// `st_dev`, equal for all files of the file system.
    pub device: u64,
}

impl FileSystem {
    /// Whether it outlives the node: shared storage.
    pub fn is_shared(&self) -> bool {
        self.survives == Survives::Node
    }
    /// Whether its files are in memory, so that a reboot removes them (tmpfs, ramfs).
    pub fn is_memory(&self) -> bool {
        self.survives == Survives::Agent
    }
}

/// `f_type`, the name, and what it survives. The kind of the mount tells apart file systems with FUSE's number.
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
/// FUSE file systems over a local disk; any other counts as shared.
const LOCAL_FUSE: [&str; 5] = ["fuseblk", "virtiofs", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs"];

impl Machine {
    /// The file system that contains `path`. Errors: those of `statfs` and `stat`.
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
                // Not known to be shared: the weaker promise.
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
    fn memory_limit_is_found_in_both_cgroup_versions() {
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
    fn memory_and_mounts_are_parsed() {
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
    fn file_system_of_this_machine_is_known() {
        let machine = Machine::default();
        assert!(machine.memory().expect("meminfo").total_bytes > 0);
        let proc = machine.file_system(Path::new("/")).expect("statfs");
        assert!(proc.total_bytes > 0 && !proc.is_memory());
    }
}
