//! Signals as readable events: blocked for the whole process, then taken from a descriptor.
//!
//! Invariant: [`Signals::block`] is called before the first thread is made, so that every thread inherits the mask.
//! A child gets the mask from before through [`Signals::unblock_in_child`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};

pub struct Signals {
    fd: OwnedFd,
    blocked: libc::sigset_t,
    before: libc::sigset_t,
}

/// One signal that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    pub number: i32,
    /// The terminal sent it to the whole foreground group, so the command has it already.
    pub from_terminal: bool,
}

impl Signals {
    pub fn block(numbers: &[i32]) -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is a valid place for sigemptyset to initialise.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a live sigset_t; the numbers are checked by sigaddset.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for number in numbers {
                libc::sigaddset(&raw mut set, *number);
            }
        }
        // SAFETY: both sets are initialised and live during the call.
        let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd just returned this descriptor; no other value owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, blocked: set, before })
    }

    /// The kernel sends SIGIO to a lease holder when another process opens the file. By default SIGIO ends the process.
    /// The agent requests leases only to learn whether they are granted and returns them at once, so it needs no
    /// handler.
    pub fn ignore_broken_leases() {
        // SAFETY: SIG_IGN runs no code of ours; nothing in this process waits for SIGIO.
        unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) };
    }

    /// The next pending signal, if any.
    pub fn next(&self) -> io::Result<Option<Arrived>> {
        // SAFETY: signalfd_siginfo is plain integers; all zeroes is a valid value.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` is live and exactly `size` bytes long.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut info).cast(), size) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        }
        Ok(Some(Arrived { number: info.ssi_signo.cast_signed(), from_terminal: info.ssi_code == SI_KERNEL }))
    }

    /// Blocks until a signal arrives.
    pub fn wait(&self) -> io::Result<Arrived> {
        loop {
            if let Some(arrived) = self.next()? {
                return Ok(arrived);
            }
            let mut fds = [PollFd::new(self, PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// From now on signals have their action from before [`Signals::block`] again, including pending ones.
    pub fn unblock(&self) {
        // pthread_sigmask accepts every mask that it returned.
        let _ = self.unblock_in_child()();
    }

    /// After [`Signals::unblock`]: signals arrive at the descriptor again.
    pub fn block_again(&self) -> io::Result<()> {
        // SAFETY: `blocked` was filled by sigaddset.
        let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const self.blocked, std::ptr::null_mut()) };
        if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
    }

    /// The mask from before [`Signals::block`]; for a closure that runs between fork and exec.
    pub fn unblock_in_child(&self) -> impl Fn() -> io::Result<()> + Send + Sync + 'static {
        let before = self.before;
        move || {
            // SAFETY: `before` was filled by pthread_sigmask; the call is async-signal-safe.
            let code = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
            if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
        }
    }
}

/// The `si_code` of signals from the kernel itself, including the terminal's.
const SI_KERNEL: i32 = 0x80;

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sends a signal. A process that has ended already is not an error.
pub fn send(pid: u32, number: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: kill takes no pointers.
    if unsafe { libc::kill(pid, number) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// `SIGTERM` as people write it.
pub fn name(number: i32) -> String {
    match number {
        libc::SIGHUP => "SIGHUP".into(),
        libc::SIGINT => "SIGINT".into(),
        libc::SIGQUIT => "SIGQUIT".into(),
        libc::SIGTERM => "SIGTERM".into(),
        other => format!("signal {other}"),
    }
}
