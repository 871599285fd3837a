//! Makes the mount and removes it. The result is the descriptor that a [`super::Session`] serves.
//!
//! Two ways: mount(2) for root, also root of a user namespace; setuid `fusermount3` for all other users. Mounts never
//! honour setuid bits or device nodes.

use std::ffi::CString;
use std::fmt::Write as _;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType};
use surgetank_types::error::{Error, Result};

const SOURCE: &str = "surgetank";
const HELPER: &str = "fusermount3";
/// Names the descriptor on which the helper sends the mount's descriptor.
const HELPER_CHANNEL: &str = "_FUSE_COMMFD";

/// The options of a mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachOptions {
    /// The type that `mount` and `df` show: `fuse.SUBTYPE`.
    pub subtype: String,
    /// Users other than the mounting one may enter.
    pub allow_other: bool,
    /// The kernel checks permission bits; otherwise the file system does.
    pub default_permissions: bool,
}

impl Default for AttachOptions {
    fn default() -> Self {
        Self { subtype: "surgetank".to_owned(), allow_other: true, default_permissions: true }
    }
}

/// Mounts over `directory`: with mount(2) if permitted, otherwise through `fusermount3`.
pub fn attach(directory: impl AsRef<Path>, options: &AttachOptions) -> Result<OwnedFd> {
    let directory = directory.as_ref();
    match attach_ourselves(directory, options) {
        Ok(device) => Ok(device),
        Err(errno @ (Errno::PERM | Errno::ACCESS)) => attach_by_helper(directory, options, errno),
        Err(errno) => Err(refused(directory).why(errno)),
    }
}

/// Unmounts. `lazy` hides the mount at once, even in use; the session ends when the last user has left.
pub fn detach(directory: impl AsRef<Path>, lazy: bool) -> Result<()> {
    let directory = directory.as_ref();
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    let failed = |why: String| {
        Error::new(format!("cannot unmount {}", directory.display()))
            .why(why)
            .remedy("find the processes that use it: fuser -vm DIRECTORY")
    };
    match rustix::mount::unmount(directory, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => {
            let mut helper = Command::new(HELPER);
            helper.arg("-u").args(lazy.then_some("-z")).arg("--").arg(directory);
            let outcome = helper.stdin(Stdio::null()).output().map_err(|error| failed(format!("{HELPER}: {error}")))?;
            if outcome.status.success() { Ok(()) } else { Err(failed(last_line(&outcome.stderr))) }
        }
        Err(errno) => Err(failed(errno.to_string())),
    }
}

fn attach_ourselves(directory: &Path, options: &AttachOptions) -> Result<OwnedFd, Errno> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let kind = rustix::fs::stat(directory)?.st_mode & libc::S_IFMT;
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let mut text = format!("fd={},rootmode={kind:o},user_id={uid},group_id={gid}", device.as_raw_fd());
    text.push_str(&switches(options));
    let text = CString::new(text).map_err(|_nul| Errno::INVAL)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount(SOURCE, directory, format!("fuse.{}", options.subtype), flags, &*text)?;
    Ok(device)
}

fn switches(options: &AttachOptions) -> String {
    let mut text = String::new();
    if options.allow_other {
        text.push_str(",allow_other");
    }
    if options.default_permissions {
        text.push_str(",default_permissions");
    }
    text
}

fn attach_by_helper(directory: &Path, options: &AttachOptions, direct: Errno) -> Result<OwnedFd> {
    let place: PathBuf = directory.canonicalize().map_err(|error| refused(directory).why(error))?;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| refused(directory).why(errno))?;
    // The helper must inherit its end: a duplicate without close-on-exec, open until the helper has run.
    let inherited = rustix::io::dup(&theirs).map_err(|errno| refused(directory).why(errno))?;
    drop(theirs);
    let mut text = format!("fsname={SOURCE},subtype={},nosuid,nodev", options.subtype);
    let _ = write!(text, "{}", switches(options));
    let outcome = Command::new(HELPER)
        .args(["-o", &text, "--"])
        .arg(&place)
        .env(HELPER_CHANNEL, inherited.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .output();
    drop(inherited);
    let outcome = outcome.map_err(|error| {
        refused(directory)
            .why(format!("mount: {direct}; {HELPER}: {error}"))
            .remedy("install fuse3, or let `surgetank run` make a private mount (needs user namespaces)")
    })?;
    if !outcome.status.success() {
        return Err(refused(directory).why(format!("mount: {direct}; {}", last_line(&outcome.stderr))).remedy(
            "allow_other needs `user_allow_other` in /etc/fuse.conf; /dev/fuse must be readable and writable for you",
        ));
    }
    receive_descriptor(&ours).map_err(|error| refused(directory).why(format!("{HELPER}: {error}")))
}

fn receive_descriptor(channel: &OwnedFd) -> io::Result<OwnedFd> {
    let mut byte = [0; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(channel.as_fd(), &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags)?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| io::Error::other("it sent no descriptor"))
}

/// The magic link of a descriptor: mount(2) resolves it to the directory itself, whatever covers its path.
pub fn descriptor_path(descriptor: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
}

fn refused(directory: &Path) -> Error {
    Error::new(format!("cannot mount over {}", directory.display()))
}

fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines().last().unwrap_or("no reason given").to_owned()
}
