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

/// Has a signal ended the thread, so that the kernel closes its files? It has no pending signal then.
pub(super) fn was_killed(thread: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap_or_default();
    has_died(&stat)
}

fn has_died(stat: &str) -> bool {
    const EXITING: u64 = 4;
    const OF_SIGNAL: u64 = 0x7f;
    // (The name of the program may have any character.)
    let fields: Vec<u64> = stat
        .trim_end()
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split(' ')
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    let (flags, code) = (fields.get(7), fields.get(50));
    flags.is_some_and(|flags| flags & EXITING != 0) && code.is_some_and(|code| code & OF_SIGNAL != 0)
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

    #[test]
    fn thread_that_a_signal_has_ended_is_distinguished_from_one_that_exits() {
        let stat = |flags: u64, code: u64| format!("7 (a) b 1) Z 1 7 7 0 -1 {flags} {}{code}\n", "0 ".repeat(42));
        assert!(has_died(&stat(0x40_0004, 9)) && has_died(&stat(4, 139)));
        assert!(!has_died(&stat(4, 0)) && !has_died(&stat(4, 9 << 8)) && !has_died(&stat(0, 9)) && !has_died(""));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!was_killed(child.id()));
        child.kill().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !was_killed(child.id()) {
            assert!(std::time::Instant::now() < until, "the kernel says something else");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        child.wait().unwrap();
    }
}
