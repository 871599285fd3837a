//! The meaning of a store's error: whether another try may succeed, or the error is final until the user acts; and the words
//! for the user.
//!
//! *Retry* is for errors that pass, alone or with help, while the data waits safely in the tiers: a full file system that the
//! user cleans up, a server that restarts. *Refuse* is for errors that every further try would repeat.
//! An errno that is not listed is refused: an error is better than silent, endless retries.

use std::io;

use surgetank_types::error::Errno;

/// Whether a failed operation is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Try again for the configured time; the data stays where it is.
    Retry,
    /// A further try gives the same error.
    Refuse,
}

/// The meaning of a store's error and the remedy: whole sentences without the path, to follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    /// Whether the operation is tried again.
    pub verdict: Verdict,
    /// What happened.
    pub meaning: &'static str,
    /// What the user can do.
    pub remedy: &'static str,
}

/// Only the verdict of [`advise`].
pub fn classify(errno: Errno) -> Verdict {
    advise(errno).verdict
}

/// The errno of a failed store operation. Errors without an errno are the driver's own findings: a copy that does not match
/// (tried again from the tier's copy) is EIO, a copy that was stopped or cut short is EAGAIN, attributes that never fit are
/// E2BIG.
pub fn errno_of(error: &io::Error) -> Errno {
    match (error.raw_os_error(), error.kind()) {
        (Some(code), _) => Errno::from_raw_os_error(code),
        (None, io::ErrorKind::Interrupted | io::ErrorKind::UnexpectedEof | io::ErrorKind::WouldBlock) => Errno::AGAIN,
        (None, io::ErrorKind::NotFound) => Errno::NOENT,
        (None, io::ErrorKind::PermissionDenied) => Errno::ACCESS,
        (None, io::ErrorKind::ArgumentListTooLong) => Errno::TOOBIG,
        (None, _) => Errno::IO,
    }
}

/// Meaning, verdict and remedy of an errno of the store.
pub fn advise(errno: Errno) -> Advice {
    let (verdict, (meaning, remedy)) = match passing(errno) {
        Some(words) => (Verdict::Retry, words),
        None => (Verdict::Refuse, lasting(errno)),
    };
    Advice { verdict, meaning, remedy }
}

/// What happened, and what the user can do.
type Words = (&'static str, &'static str);

/// Errors that pass, alone or with the user's help.
fn passing(errno: Errno) -> Option<Words> {
    let words = match errno {
        Errno::NOSPC => (
            "The store's file system is full (or out of inodes).",
            "Make room in the store; what waits is drained as soon as there is some.",
        ),
        Errno::DQUOT => (
            "The quota of the file's owner in the store is used up.",
            "Remove files from the store or ask for more quota; what waits is drained as soon as there is some.",
        ),
        Errno::IO | Errno::REMOTEIO => (
            "The store's device or server failed to read or write, or a copy did not read back as it was written.",
            "Look into the kernel log (dmesg) of this node and the health of the store.",
        ),
        Errno::TIMEDOUT
        | Errno::HOSTDOWN
        | Errno::HOSTUNREACH
        | Errno::NETDOWN
        | Errno::NETUNREACH
        | Errno::NETRESET => (
            "The store's server does not answer.",
            "Check the network and the server; the drain goes on when it is back.",
        ),
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::CONNABORTED | Errno::NOTCONN | Errno::PIPE | Errno::SHUTDOWN => {
            (
                "The connection to the store is broken, or the file system shut itself down.",
                "Check that the store is still mounted and its server runs; it may have to be mounted again.",
            )
        }
        Errno::NODEV | Errno::NXIO | Errno::NOMEDIUM => (
            "The store's device is gone.",
            "Bring the device back; if it has to be mounted again, restart the agent afterwards: nothing in the tiers is lost by that.",
        ),
        Errno::STALE => (
            "The file server no longer knows the directory or file (it was moved, removed or exported again).",
            "See whether the directory is still there on the server; mount it again if it was exported again.",
        ),
        Errno::AGAIN | Errno::BUSY | Errno::INTR | Errno::TXTBSY | Errno::DEADLK | Errno::NOLCK => {
            ("The store is busy, or another client uses this file.", "Nothing, as a rule: it is tried again.")
        }
        Errno::NOMEM | Errno::NOBUFS | Errno::MFILE | Errno::NFILE => (
            "This node is short of memory or of open files.",
            "End what is not needed, or raise the limit (ulimit -n, the job's memory).",
        ),
        Errno::KEYEXPIRED | Errno::NOKEY | Errno::KEYREVOKED => {
            ("The ticket for the store has expired.", "Renew it (kinit); the drain then goes on by itself.")
        }
        _ => return None,
    };
    Some(words)
}

/// Errors that every further try repeats.
fn lasting(errno: Errno) -> Words {
    match errno {
        Errno::ACCESS | Errno::PERM => (
            "The store does not let this user write there (or set this owner or mode).",
            "Check owner, mode and ACL of the directory in the store; an NFS export may map root to an unprivileged user.",
        ),
        Errno::ROFS => (
            "The store is mounted read-only.",
            "Mount it read-write; if it turned read-only by itself, its device has failed: check it first.",
        ),
        Errno::NAMETOOLONG => {
            ("The name is longer than the store's file system takes.", "Rename the file to something shorter.")
        }
        Errno::INVAL | Errno::ILSEQ => (
            "The store's file system does not take this name or this kind of file.",
            "Rename the file, or keep it out with a rule (keep or remove).",
        ),
        Errno::LOOP => (
            "A directory on the way has been replaced by a symbolic link in the store; links are never followed.",
            "Put the directory back, or move the link elsewhere.",
        ),
        Errno::NOENT | Errno::NOTDIR => (
            "The directory is no longer there in the store: another client removed, renamed or replaced it.",
            "Make it again in the store, or rename the file to another place.",
        ),
        Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR => (
            "Something else has that name in the store: another client made it meanwhile.",
            "Look at both, then rename or remove one of them.",
        ),
        Errno::FBIG => (
            "The file is larger than the store's file system takes.",
            "Use a store that takes larger files, or split the file.",
        ),
        Errno::MLINK => {
            ("The store's file system takes no more links to this file.", "Copy the file instead of linking it.")
        }
        Errno::XDEV => (
            "The two places are on different file systems of the store.",
            "Copy instead of linking or renaming across them.",
        ),
        Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY => (
            "The store's file system cannot keep this (extended attributes, special files, exchange of two names).",
            "Keep such files out with a rule, or use a store that can.",
        ),
        Errno::TOOBIG | Errno::RANGE => (
            "The extended attributes are larger than the store's file system takes.",
            "Remove some of the file's attributes: surgetank run -- setfattr -x NAME FILE.",
        ),
        Errno::UCLEAN => {
            ("The store's file system is damaged.", "Have it checked (fsck) before anything else is written.")
        }
        _ => (
            "The store answered with an error that is not expected.",
            "Look into the kernel log (dmesg) and report it.",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passing_errors_are_retried_and_lasting_ones_refused() {
        for errno in [
            libc::ENOSPC,
            libc::EDQUOT,
            libc::EIO,
            libc::ETIMEDOUT,
            libc::ESTALE,
            libc::EAGAIN,
            libc::EBUSY,
            libc::ENOTCONN,
            libc::ENODEV,
        ] {
            assert_eq!(classify(Errno::from_raw_os_error(errno)), Verdict::Retry, "{errno}");
        }
        for errno in [
            libc::EACCES,
            libc::EPERM,
            libc::EROFS,
            libc::ENAMETOOLONG,
            libc::EINVAL,
            libc::ELOOP,
            libc::ENOENT,
            libc::EEXIST,
            libc::EOPNOTSUPP,
        ] {
            assert_eq!(classify(Errno::from_raw_os_error(errno)), Verdict::Refuse, "{errno}");
        }
    }

    #[test]
    fn advice_of_every_errno_is_whole_sentences() {
        for code in 1..=133 {
            let advice = advise(Errno::from_raw_os_error(code));
            for text in [advice.meaning, advice.remedy] {
                assert!(text.ends_with('.') && text.starts_with(char::is_uppercase), "{code}: {text}");
            }
        }
    }

    #[test]
    fn error_without_errno_gets_one() {
        let of = |kind| errno_of(&io::Error::new(kind, "found by us"));
        assert_eq!(of(io::ErrorKind::InvalidData), Errno::IO);
        assert_eq!(classify(of(io::ErrorKind::InvalidData)), Verdict::Retry);
        assert_eq!(of(io::ErrorKind::UnexpectedEof), Errno::AGAIN);
        assert_eq!(of(io::ErrorKind::ArgumentListTooLong), Errno::TOOBIG);
        assert_eq!(errno_of(&io::Error::from_raw_os_error(libc::EROFS)), Errno::ROFS);
    }
}
