//! Children: the command itself, and the processes that it leaves behind (this process is their subreaper).

use std::fs;
use std::path::PathBuf;

use rustix::process::{Pid, WaitOptions, WaitStatus};
use surgetank_core::report::Holder;

use crate::agent::holders;

/// A change of one child's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The exit code is as a shell gives it.
    Ended { pid: u32, exit: u8 },
    /// Stopped by the terminal (Ctrl-Z, or reading in the background): the whole job must stop.
    Suspended { pid: u32 },
}

/// The next change that has happened, without waiting.
pub fn reap() -> Option<Change> {
    loop {
        let (pid, status) = match rustix::process::waitpid(None, WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            Ok(Some(reaped)) => reaped,
            Err(rustix::io::Errno::INTR) => continue,
            // No children at all, or none that changed.
            Ok(None) | Err(_) => return None,
        };
        if let Some(change) = change(pid, status) {
            return Some(change);
        }
    }
}

fn change(pid: Pid, status: WaitStatus) -> Option<Change> {
    let pid = pid.as_raw_nonzero().get().cast_unsigned();
    if let Some(code) = status.exit_status() {
        return Some(Change::Ended { pid, exit: u8::try_from(code & 0xff).unwrap_or(u8::MAX) });
    }
    if let Some(signal) = status.terminating_signal() {
        return Some(Change::Ended { pid, exit: u8::try_from(128 + signal).unwrap_or(u8::MAX) });
    }
    // SIGSTOP came from another process on purpose; that process will send SIGCONT to this child alone.
    let by_terminal = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    status.stopping_signal().filter(|signal| by_terminal.contains(signal)).map(|_| Change::Suspended { pid })
}

/// Living children without agents, which outlive this process on purpose.
pub fn living() -> Vec<Holder> {
    let me = std::process::id();
    let us = executable("self");
    children(me)
        .into_iter()
        .filter(|pid| !is_agent(*pid, us.as_ref()))
        .filter(|pid| !is_zombie(*pid))
        .map(|pid| Holder { pid, command: holders::command_line(pid), holds: String::new() })
        .collect()
}

fn children(parent: u32) -> Vec<u32> {
    match fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")) {
        Ok(text) => text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect(),
        // A kernel without that file: read every process's parent.
        Err(_) => fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid| stat_fields(*pid).is_some_and(|(_, of)| of == parent))
            .collect(),
    }
}

/// State letter and parent. The name in parentheses may contain any character, so the fields follow its last `)`.
fn stat_fields(pid: u32) -> Option<(char, u32)> {
    let text = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?).into_owned();
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn is_zombie(pid: u32) -> bool {
    stat_fields(pid).is_none_or(|(state, _)| state == 'Z')
}

fn executable(pid: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

fn is_agent(pid: u32, us: Option<&PathBuf>) -> bool {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|byte| *byte == 0).nth(1) == Some(b"agent") && executable(&pid.to_string()).as_ref() == us
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_record_has_its_parent_and_state() {
        let (state, parent) = stat_fields(std::process::id()).unwrap();
        assert_eq!(parent, std::os::unix::process::parent_id());
        assert!(matches!(state, 'R' | 'S'));
        assert!(is_zombie(u32::MAX), "a process that does not exist counts as gone");
    }
}
