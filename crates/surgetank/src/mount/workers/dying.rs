//! Whether the thread that waits for an answer will ever see it.
//!
//! The kernel reports only the first signal of a call to the server; `/proc` shows what the signal does. A pending
//! signal ends the process before its program continues if two conditions hold. The process does not block, ignore or
//! catch the signal, and its default action is to end the process. (The kernel turns most of them into a SIGKILL for
//! each thread; not those that dump core, nor one that follows another pending signal.)
//!
//! The danger that it avoids: EINTR for a program that continues.

/// A thread that cannot be inspected counts as living: a long wait is safer than a false EINTR.
pub(super) fn is_dying(thread: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    will_die(&status)
}

/// Signals whose default action does not end the process.
const HARMLESS: [i32; 8] = [
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGURG,
    libc::SIGWINCH,
    libc::SIGSTOP,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

fn will_die(status: &str) -> bool {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
    let set = |name: &str| u64::from_str_radix(field(name), 16).unwrap_or(0);
    let bit = |number: i32| 1_u64 << (number - 1);
    let pending = set("SigPnd:") | set("ShdPnd:");
    // A debugger decides the effect of all other signals.
    if pending & bit(libc::SIGKILL) != 0 || field("TracerPid:") != "0" {
        return pending & bit(libc::SIGKILL) != 0;
    }
    let harmless: u64 = HARMLESS.into_iter().map(bit).sum();
    pending & !(set("SigBlk:") | set("SigIgn:") | set("SigCgt:") | harmless) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets of signals by number.
    fn status(tracer: u32, sets: [&[i32]; 5]) -> String {
        let [own, shared, blocked, ignored, caught] =
            sets.map(|set| format!("{:016x}", set.iter().map(|number| 1_u64 << (number - 1)).sum::<u64>()));
        format!(
            "Name:\tcp\nTracerPid:\t{tracer}\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\nSigIgn:\t{ignored}\nSigCgt:\t{caught}\n"
        )
    }

    #[test]
    fn fatal_signal_is_distinguished_from_handled_signals() {
        use libc::{SIGALRM, SIGCHLD, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP};
        let dies = [
            status(0, [&[SIGKILL], &[], &[], &[], &[]]),
            status(0, [&[], &[SIGKILL], &[], &[], &[SIGALRM]]),
            // Another signal, which the program handles, came first.
            status(0, [&[], &[SIGALRM, SIGTERM], &[], &[], &[SIGALRM]]),
            status(0, [&[], &[SIGQUIT], &[], &[], &[]]),
            status(77, [&[SIGKILL], &[], &[], &[], &[]]),
        ];
        let lives = [
            status(0, [&[], &[], &[SIGKILL], &[], &[]]),
            status(0, [&[SIGALRM], &[SIGTERM], &[], &[], &[SIGALRM, SIGTERM]]),
            status(0, [&[], &[SIGTERM], &[SIGTERM], &[], &[]]),
            status(0, [&[], &[SIGTERM], &[], &[SIGTERM], &[]]),
            status(0, [&[], &[SIGCHLD, SIGTSTP], &[], &[], &[]]),
            status(77, [&[], &[SIGTERM], &[], &[], &[]]),
            String::new(),
        ];
        assert!(dies.iter().all(|status| will_die(status)) && !lives.iter().any(|status| will_die(status)));
        assert!(!is_dying(0) && !is_dying(std::process::id()));
    }
}
