//! The run's side: installs the filter in the command's process, between fork and exec.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{filter, reach};

const NEW_LISTENER: libc::c_ulong = 1 << 3;
/// After the agent has taken a call, only a fatal signal interrupts it: no call is done twice. From 5.19 on.
const WAIT_KILLABLE: libc::c_ulong = 1 << 5;

/// Everything that the child needs, prepared before the fork.
pub struct Arming {
    program: Vec<libc::sock_filter>,
    agent: UnixStream,
    /// Sent to the agent with the listener.
    reach: OwnedFd,
}

impl Arming {
    /// `agent` is a connection to the agent's socket for listeners. Its read timeout limits how long the child waits for
    /// the agent.
    pub fn new(agent: UnixStream) -> io::Result<Self> {
        let (served, reach) = reach::pair()?;
        // From the first call on: the exec that follows is a trapped call.
        reach::serve(served)?;
        Ok(Self { program: filter::program(), agent, reach })
    }

    /// Runs in the child. System calls only; returns when the agent serves.
    pub fn arm(&self) -> io::Result<()> {
        let listener = install(&self.program)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors: [BorrowedFd<'_>; 2] = [listener.as_fd(), self.reach.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        rustix::net::sendmsg(&self.agent, &[IoSlice::new(&[1])], &mut ancillary, SendFlags::NOSIGNAL)?;
        let mut byte = [0];
        match rustix::io::read(&self.agent, &mut byte)? {
            1 => Ok(()),
            _ => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

/// Installs the filter for this thread.
fn install(program: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let whole =
        libc::sock_fprog { len: u16::try_from(program.len()).unwrap_or(0), filter: program.as_ptr().cast_mut() };
    let try_with = |flags: libc::c_ulong| {
        // SAFETY: the program is alive and `len` long; the kernel copies it.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                flags,
                (&raw const whole).cast::<libc::c_void>(),
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just created it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    let try_either = || match try_with(NEW_LISTENER | WAIT_KILLABLE) {
        Err(why) if why.raw_os_error() == Some(libc::EINVAL) => try_with(NEW_LISTENER),
        other => other,
    };
    match try_either() {
        // A process that is not root must first give up the privileges of setuid programs.
        Err(why) if why.raw_os_error() == Some(libc::EACCES) => {
            // SAFETY: a number for a flag of this process.
            if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
            try_either()
        }
        other => other,
    }
}

/// Can calls be passed to an agent here? If not, the reason.
pub fn is_possible() -> Result<(), String> {
    // Injecting a descriptor and answering in one step came last (5.14). Only a listener shows whether it works, so its
    // kernel version decides.
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (5, 14) {
        return Err(format!("the kernel {release} cannot inject descriptors (5.14 can)"));
    }
    let action: u32 = libc::SECCOMP_RET_USER_NOTIF;
    // SAFETY: asks whether the action is known.
    let known = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, (&raw const action).cast::<libc::c_void>())
    };
    if known != 0 {
        return Err(format!("user notification is not to be had: {}", io::Error::last_os_error()));
    }
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let may_trace = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_PTRACE));
    reach::permitted(&scope, may_trace)
}
