//! A private place for a mount: mount namespaces, with a user namespace around them for an ordinary user.
//!
//! The dangers: these calls change the whole process, so their callers must be single-threaded (between fork and exec,
//! or before the first thread). An identity map keeps file owners and MPI's cross-process reads unchanged, but setuid
//! programs do not work inside. `/dev/fuse` must be opened inside: the kernel refuses a descriptor from another user
//! namespace.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::mount::{MountPropagationFlags, mount_change};

/// The namespaces of a running process, held open.
#[derive(Debug)]
pub struct Namespaces {
    /// `None`: the same as ours (the kernel would refuse to enter it again).
    user: Option<File>,
    mount: File,
}

/// Gives this process its own mount table. Mounts from outside still arrive; mounts from inside stay inside.
pub fn private_namespace_root() -> io::Result<()> {
    unshare(libc::CLONE_NEWNS)?;
    keep_mounts_inside()
}

/// The same for an ordinary user: inside a user namespace in which the process may mount, and every id stays the same.
pub fn private_namespace_user() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS)?;
    // A group map may be written only after setgroups is disabled permanently.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    keep_mounts_inside()
}

impl Namespaces {
    /// Opens the namespaces of a process. An error: it has ended, or /proc refuses.
    pub fn of(pid: u32) -> io::Result<Self> {
        let open = |kind: &str| File::open(format!("/proc/{pid}/ns/{kind}"));
        let user = open("user")?;
        let foreign = !same(user.as_fd(), File::open("/proc/self/ns/user")?.as_fd())?;
        Ok(Self { user: foreign.then_some(user), mount: open("mnt")? })
    }

    /// Enters the namespaces. Async-signal-safe, for the moment between fork and exec. The working directory is lost:
    /// change to it by its path afterwards.
    pub fn enter(&self) -> io::Result<()> {
        enter_namespaces(self.user.as_ref().map(AsFd::as_fd), self.mount.as_fd())
    }
}

/// [`Namespaces::enter`] on descriptors of `/proc/PID/ns/{user,mnt}`.
pub fn enter_namespaces(user: Option<BorrowedFd<'_>>, mount: BorrowedFd<'_>) -> io::Result<()> {
    // The user namespace comes first: it grants the right to enter the other.
    if let Some(user) = user {
        set_namespace(user, libc::CLONE_NEWUSER)?;
    }
    set_namespace(mount, libc::CLONE_NEWNS)
}

fn set_namespace(namespace: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: setns takes plain integers; the descriptor is open for the call.
    let outcome = unsafe { libc::setns(namespace.as_raw_fd(), kind) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn unshare(what: libc::c_int) -> io::Result<()> {
    // SAFETY: unshare takes a plain integer; none of the kinds used here changes memory or descriptors.
    let outcome = unsafe { libc::unshare(what) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn keep_mounts_inside() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    Ok(())
}

fn same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> io::Result<bool> {
    let (one, other) = (rustix::fs::fstat(one)?, rustix::fs::fstat(other)?);
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}
