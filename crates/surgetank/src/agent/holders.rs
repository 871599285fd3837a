//! Living processes that hold a directory tree or a mount namespace.
//!
//! All answers come from /proc and depend on our permissions: an ordinary user does not see another user's processes.
//! They serve to refuse early and to name processes; the kernel's EBUSY decides.

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::process::{Pid, PidfdFlags};
use surgetank_core::report::Holder;

use super::submounts;

/// The agent's supervisor; 0: none. It has handles on the bare directories and is in the agent's namespaces.
static SUPERVISOR: AtomicU32 = AtomicU32::new(0);
/// The pool's process, which does what other members ask for; 0: none.
static POOL: AtomicU32 = AtomicU32::new(0);

/// From now on our parent process counts as part of the agent.
pub fn has_supervisor() {
    SUPERVISOR.store(std::os::unix::process::parent_id(), Ordering::Relaxed);
}

/// From now on the pool's process counts as part of the agent.
pub fn has_pool(process: u32) {
    POOL.store(process, Ordering::Relaxed);
}

fn is_ours(pid: u32) -> bool {
    pid == std::process::id() || pid == SUPERVISOR.load(Ordering::Relaxed) || pid == POOL.load(Ordering::Relaxed)
}

fn pids() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// `python3 train.py --epochs 4`, cut to a sensible length.
pub fn command_line(pid: u32) -> String {
    const SHOWN_CHARS_MAX: usize = 120;
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> =
        bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(String::from_utf8_lossy).collect();
    let text = if words.is_empty() {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
    } else {
        words.join(" ")
    };
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if clean.chars().count() > SHOWN_CHARS_MAX {
        clean.chars().take(SHOWN_CHARS_MAX).chain(['…']).collect()
    } else {
        clean
    }
}

/// Processes with a cwd, root, executable, descriptor or mapping at or below `directory`.
pub fn of_directory(directory: &Path) -> Vec<Holder> {
    let sought = Sought { path: directory, numbers: Numbers::of(directory), namespace: mount_namespace("self") };
    let mut holders = Vec::new();
    for pid in pids().into_iter().filter(|pid| !is_ours(*pid)) {
        if let Some(holds) = sought.held_by(pid) {
            holders.push(Holder { pid, command: command_line(pid), holds });
        }
    }
    holders
}

/// A directory that is sought among what processes hold. In our own mount namespace the kernel's names for it are
/// exact. In another namespace the same name may mean another directory, and this directory may have another name.
/// There it is compared by its numbers, on the way up from each held file.
struct Sought<'a> {
    path: &'a Path,
    numbers: Option<Numbers>,
    namespace: Option<u64>,
}

struct Numbers {
    device: u64,
    inode: u64,
    /// The directory's path in its file system: a mount may show only a part of what is below it.
    path: Option<PathBuf>,
}

impl Sought<'_> {
    fn held_by(&self, pid: u32) -> Option<String> {
        let process = format!("/proc/{pid}");
        let elsewhere = mount_namespace(&pid.to_string()) != self.namespace;
        let inside = |link: &Path, name: &Path, is_directory: bool| match (elsewhere, &self.numbers) {
            (true, Some(numbers)) => {
                name.is_absolute() && {
                    let at = if is_directory { link.to_path_buf() } else { parent_of(&process, name) };
                    numbers.are_above(&at, &process)
                }
            }
            _ => name.starts_with(self.path),
        };
        for what in ["cwd", "root", "exe"] {
            let link = Path::new(&process).join(what);
            if let Ok(name) = fs::read_link(&link)
                && inside(&link, &name, what != "exe")
            {
                return Some(format!("{what} {}", name.display()));
            }
        }
        if let Ok(entries) = fs::read_dir(format!("{process}/fd")) {
            for entry in entries.flatten() {
                let link = entry.path();
                if let Ok(name) = fs::read_link(&link)
                    && inside(&link, &name, elsewhere && is_directory(&link))
                {
                    return Some(format!("descriptor {} {}", entry.file_name().display(), name.display()));
                }
            }
        }
        let maps = fs::read(format!("{process}/maps")).ok()?;
        // address perms offset dev inode path
        let mut seen = None;
        String::from_utf8_lossy(&maps).lines().find_map(|line| {
            let name = PathBuf::from(line.get(line.find('/')?..)?);
            // A library has several mappings in a row.
            if seen.as_ref() == Some(&name) {
                return None;
            }
            let found = inside(&name, &name, false).then(|| format!("mapping {}", name.display()));
            seen = Some(name);
            found
        })
    }
}

fn mount_namespace(process: &str) -> Option<u64> {
    fs::metadata(format!("/proc/{process}/ns/mnt")).ok().map(|meta| meta.ino())
}

/// The directory of a file, as the process itself finds it.
fn parent_of(process: &str, name: &Path) -> PathBuf {
    let parent = name.parent().unwrap_or(name);
    Path::new(process).join("root").join(parent.strip_prefix("/").unwrap_or(parent))
}

/// Reads attributes without a request to a server, which may not answer or may be this agent.
fn looked_at(dir: impl AsFd, path: &Path) -> Option<Statx> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::EMPTY_PATH;
    rustix::fs::statx(dir, path, flags, StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID).ok()
}

fn device_of(seen: &Statx) -> u64 {
    rustix::fs::makedev(seen.stx_dev_major, seen.stx_dev_minor)
}

fn is_directory(link: &Path) -> bool {
    looked_at(CWD, link).is_some_and(|seen| FileType::from_raw_mode(seen.stx_mode.into()) == FileType::Directory)
}

/// Which directory of its file system a mount shows, and where.
fn shown_by(mount: u64, process: &str) -> Option<(PathBuf, PathBuf)> {
    let table = fs::read(format!("{process}/mountinfo")).ok()?;
    let id = mount.to_string();
    table.split(|byte| *byte == b'\n').find_map(|line| {
        // ID parent device ROOT POINT options …
        let mut fields = line.split(|byte| *byte == b' ');
        let path = |field: &[u8]| PathBuf::from(OsString::from_vec(submounts::unescape(field)));
        (fields.next()? == id.as_bytes()).then_some(())?;
        Some((path(fields.nth(2)?), path(fields.next()?)))
    })
}

impl Numbers {
    fn of(directory: &Path) -> Option<Self> {
        let seen = looked_at(CWD, directory)?;
        let path = shown_by(seen.stx_mnt_id, "/proc/self")
            .and_then(|(root, point)| Some(root.join(directory.strip_prefix(point).ok()?)));
        Some(Self { device: device_of(&seen), inode: seen.stx_ino, path })
    }

    /// Is the directory at `at`, as `process` has it mounted, this one or below it?
    fn are_above(&self, at: &Path, process: &str) -> bool {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let look = |here: &OwnedFd| looked_at(here, Path::new(""));
        let Ok(mut here) = rustix::fs::open(at, flags, Mode::empty()) else {
            return false;
        };
        let Some(mut seen) = look(&here).filter(|seen| device_of(seen) == self.device) else {
            return false;
        };
        while (device_of(&seen), seen.stx_ino) != (self.device, self.inode) {
            let Ok(above) = rustix::fs::openat(&here, "..", flags, Mode::empty()) else {
                return false;
            };
            let Some(next) = look(&above) else {
                return false;
            };
            // Either the root of a mount, or the root of the whole tree, which is its own parent.
            if next.stx_mnt_id != seen.stx_mnt_id || next.stx_ino == seen.stx_ino {
                let shown = shown_by(seen.stx_mnt_id, process);
                return shown.zip(self.path.as_ref()).is_some_and(|((root, _), path)| root.starts_with(path));
            }
            (here, seen) = (above, next);
        }
        true
    }
}

/// Other processes in our mount namespace, without our supervisor.
pub fn of_our_namespace() -> Vec<Holder> {
    let Some(ours) = mount_namespace("self") else {
        return Vec::new();
    };
    pids()
        .into_iter()
        .filter(|pid| !is_ours(*pid))
        .filter(|pid| mount_namespace(&pid.to_string()) == Some(ours))
        .map(|pid| Holder { pid, command: command_line(pid), holds: String::new() })
        .collect()
}

/// Returns when one of them has ended, or after `at_most`.
pub fn await_one_exit(holders: &[Holder], at_most: Duration) {
    let mut watched: Vec<OwnedFd> = Vec::new();
    for holder in holders {
        let pid = i32::try_from(holder.pid).ok().and_then(Pid::from_raw);
        match pid.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(fd)) => watched.push(fd),
            // It has ended already.
            Some(Err(rustix::io::Errno::SRCH)) => return,
            _ => {}
        }
    }
    let mut fds: Vec<_> = watched.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = rustix::time::Timespec::try_from(at_most).ok();
    // An interrupted poll only makes the caller look again.
    let _ = rustix::event::poll(&mut fds, timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn process_in_a_directory_is_named_with_its_hold() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        assert!(of_directory(&path).is_empty());
        let mut child = Command::new("sleep").arg("60").current_dir(&path).spawn().unwrap();
        let holders = of_directory(&path);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(holders.len(), 1, "{holders:?}");
        assert_eq!(holders[0].pid, child.id());
        assert_eq!(holders[0].holds, format!("cwd {}", path.display()));
        assert!(of_directory(&path).is_empty());
    }
}
