//! Living processes that hold something: a directory tree, or a mount namespace.
//!
//! All answers come from /proc and are as good as our right to look: another user's processes stay invisible to an
//! ordinary user. They are for refusing early and naming names; the kernel's EBUSY has the last word.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags};
use surgetank_core::report::Holder;

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

/// Processes with a cwd, root, executable, descriptor or mapping at or below `directory`, by the kernel's own names.
pub fn of_directory(directory: &Path) -> Vec<Holder> {
    let me = std::process::id();
    let inside = |path: &Path| path.starts_with(directory);
    let mut holders = Vec::new();
    for pid in pids().into_iter().filter(|pid| *pid != me) {
        if let Some(holds) = held(pid, &inside) {
            holders.push(Holder { pid, command: command_line(pid), holds });
        }
    }
    holders
}

fn held(pid: u32, inside: &dyn Fn(&Path) -> bool) -> Option<String> {
    for what in ["cwd", "root", "exe"] {
        if let Ok(path) = fs::read_link(format!("/proc/{pid}/{what}"))
            && inside(&path)
        {
            return Some(format!("{what} {}", path.display()));
        }
    }
    if let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) {
        for entry in entries.flatten() {
            if let Ok(path) = fs::read_link(entry.path())
                && inside(&path)
            {
                return Some(format!("descriptor {} {}", entry.file_name().display(), path.display()));
            }
        }
    }
    let maps = fs::read(format!("/proc/{pid}/maps")).ok()?;
    // address perms offset dev inode path
    String::from_utf8_lossy(&maps).lines().find_map(|line| {
        let path = PathBuf::from(line.get(line.find('/')?..)?);
        inside(&path).then(|| format!("mapping {}", path.display()))
    })
}

/// Other processes in our mount namespace.
pub fn of_our_namespace() -> Vec<Holder> {
    let Ok(ours) = fs::metadata("/proc/self/ns/mnt").map(|meta| meta.ino()) else {
        return Vec::new();
    };
    let me = std::process::id();
    pids()
        .into_iter()
        .filter(|pid| *pid != me)
        .filter(|pid| fs::metadata(format!("/proc/{pid}/ns/mnt")).is_ok_and(|meta| meta.ino() == ours))
        .map(|pid| Holder { pid, command: command_line(pid), holds: String::new() })
        .collect()
}

/// Returns when one of them has ended, or after `at_most`.
pub fn await_one_gone(holders: &[Holder], at_most: Duration) {
    let mut watched: Vec<OwnedFd> = Vec::new();
    for holder in holders {
        let pid = i32::try_from(holder.pid).ok().and_then(Pid::from_raw);
        match pid.map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(fd)) => watched.push(fd),
            // Gone already.
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
    fn a_process_in_a_directory_is_named_with_what_it_holds() {
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
