//! One socket to an agent, on which every wait ends.
//!
//! An agent that is stopped, hangs or is being replaced still takes connections and requests: the kernel queues them.
//! So each wait checks every 100 ms:
//! - a stopped process (SIGSTOP, a debugger) has 5 s to go on;
//! - any other has a minute to answer. Then the caller decides; see [`super::client::Connection`];
//! - the caller's own limit ends the wait, and so does a signal that the caller has blocked.
//!
//! Invariant: the answer to an abandoned wait still arrives; the client skips it before the next request's answer.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use surgetank_types::clock;
use surgetank_types::error::Error;

use super::signals::Signals;
use super::wire::{ANSWER_BYTES_MAX, Answer, Request};
use crate::socket_address::Address;

const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A stopped process does not continue by itself.
pub const STOPPED_PATIENCE: Duration = Duration::from_secs(5);
/// A running agent may be recovering what another agent left, or lack processor time.
pub const BUSY_PATIENCE: Duration = Duration::from_secs(60);

/// Limits that end a wait before the answer.
#[derive(Clone, Default)]
pub struct Limits {
    /// SIGINT, SIGTERM, SIGHUP and SIGQUIT end the wait; others are dropped.
    pub signals: Option<Arc<Signals>>,
    pub until: Option<Instant>,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Broken {
    /// The other end has closed.
    Closed,
    Io(io::Error),
    /// The agent is stopped, or has used its time.
    Silent(Duration),
    /// This signal arrived.
    Signal(i32),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

pub struct Line {
    stream: UnixStream,
    /// The pid of the listening process in our own pid namespace; 0: it is in another one.
    pub pid: u32,
    received: VecDeque<u8>,
    /// The number of requests that were sent and are not answered completely.
    owed: u32,
}

/// Waits until one of these is ready; `true`: the first is.
fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, signals: Option<&Signals>, time: Duration) -> io::Result<bool> {
    let mut fds = vec![PollFd::from_borrowed_fd(fd, flags)];
    fds.extend(signals.map(|signals| PollFd::new(signals, PollFlags::IN)));
    let time = rustix::time::Timespec::try_from(time).ok();
    match rustix::event::poll(&mut fds, time.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(errno) => Err(errno.into()),
    }
}

/// One wait, from its beginning.
pub struct Wait<'a> {
    begun: Instant,
    stopped_since: Option<Instant>,
    limits: &'a Limits,
    pid: u32,
}

impl<'a> Wait<'a> {
    /// For the process `pid`.
    pub fn new(limits: &'a Limits, pid: u32) -> Self {
        Self { begun: clock::tick(), stopped_since: None, limits, pid }
    }

    /// An error: a limit or a signal ends the wait.
    pub fn goes_on(&mut self) -> Result<(), Broken> {
        while let Some(arrived) = self.limits.signals.as_ref().map_or(Ok(None), |signals| signals.next())? {
            if [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].contains(&arrived.number) {
                return Err(Broken::Signal(arrived.number));
            }
        }
        let stopped = matches!(process_state(self.pid), Some('T' | 't'));
        self.stopped_since = self.stopped_since.filter(|_| stopped).or_else(|| stopped.then(clock::tick));
        let ended = self.begun.elapsed() >= BUSY_PATIENCE
            || self.stopped_since.is_some_and(|since| since.elapsed() >= STOPPED_PATIENCE)
            || self.limits.until.is_some_and(|until| clock::tick() >= until);
        if ended { Err(Broken::Silent(self.begun.elapsed())) } else { Ok(()) }
    }

    fn signals(&self) -> Option<&Signals> {
        self.limits.signals.as_deref()
    }
}

/// Connects. Tries again while the socket's queue is full of connections that the agent does not accept.
pub fn connect(socket: &Path, limits: &Limits) -> Result<UnixStream, Broken> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let short = Address::of(socket)?;
    let address = SocketAddrUnix::new(short.path()).map_err(io::Error::from)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(io::Error::from)?;
    let mut wait = Wait::new(limits, 0);
    loop {
        match rustix::net::connect(&fd, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if wait.begun.elapsed() < STOPPED_PATIENCE => {
                wait.goes_on()?;
                std::thread::sleep(LOOK_EVERY);
            }
            Err(Errno::AGAIN) => return Err(Broken::Silent(wait.begun.elapsed())),
            Err(errno) => return Err(Broken::Io(errno.into())),
        }
    }
    rustix::io::ioctl_fionbio(&fd, false).map_err(io::Error::from)?;
    // SAFETY: the descriptor is ours alone, and a connected socket.
    Ok(unsafe { UnixStream::from_raw_fd(fd.into_raw_fd()) })
}

/// 0: the peer is in a pid namespace that we do not see. (A `rustix` pid cannot be 0.)
fn peer_pid(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    let fd = stream.as_raw_fd();
    // SAFETY: `peer` and `size` are live during the call, and `size` is the size of `peer`.
    let code =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut size) };
    if code == 0 { Ok(peer.pid.cast_unsigned()) } else { Err(io::Error::last_os_error()) }
}

impl Line {
    pub fn connect(socket: &Path, limits: &Limits) -> Result<Self, Broken> {
        let stream = connect(socket, limits)?;
        let pid = peer_pid(&stream)?;
        Ok(Self { stream, pid, received: VecDeque::new(), owed: 0 })
    }

    pub fn send(&mut self, request: &Request, limits: &Limits) -> Result<(), Broken> {
        let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
        line.push(b'\n');
        let mut wait = Wait::new(limits, self.pid);
        let mut sent = 0;
        while sent < line.len() {
            match rustix::net::send(&self.stream, &line[sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    wait.goes_on()?;
                    wait_for(self.stream.as_fd(), PollFlags::OUT, wait.signals(), LOOK_EVERY)?;
                }
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        self.owed += 1;
        Ok(())
    }

    /// The next answer of the agent, whichever request it belongs to.
    pub fn next(&mut self, limits: &Limits) -> Result<Answer, Broken> {
        let mut wait = Wait::new(limits, self.pid);
        loop {
            if let Some(answer) = self.at_hand()? {
                return Ok(answer);
            }
            wait.goes_on()?;
            wait_for(self.stream.as_fd(), PollFlags::IN, wait.signals(), LOOK_EVERY)?;
        }
    }

    /// Skips the answers to abandoned waits.
    pub fn settle(&mut self, limits: &Limits) -> Result<(), Broken> {
        while self.owed > 0 {
            self.next(limits)?;
        }
        Ok(())
    }

    /// Does the agent owe an answer?
    pub fn is_owed(&self) -> bool {
        self.owed > 0
    }

    /// A whole answer, if one is there without waiting.
    pub fn at_hand(&mut self) -> Result<Option<Answer>, Broken> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                let answer = serde_json::from_slice(&line).map_err(io::Error::from)?;
                if !matches!(answer, Answer::Progress(_)) {
                    self.owed = self.owed.saturating_sub(1);
                }
                return Ok(Some(answer));
            }
            if self.received.len() > ANSWER_BYTES_MAX {
                let why = format!("an answer longer than {ANSWER_BYTES_MAX} bytes");
                return Err(Broken::Io(io::Error::new(io::ErrorKind::InvalidData, why)));
            }
            let mut more = [0; 64 << 10];
            match rustix::net::recv(&self.stream, &mut more[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Broken::Closed),
                Ok((count, _)) => self.received.extend(&more[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
    }

    /// Waits until the other end closes the connection.
    pub fn closed(&mut self, limits: &Limits) -> Result<(), Broken> {
        let mut wait = Wait::new(limits, self.pid);
        loop {
            match self.at_hand() {
                Err(Broken::Closed) => return Ok(()),
                Err(broken) => return Err(broken),
                Ok(Some(_)) => {}
                Ok(None) => {
                    wait.goes_on()?;
                    wait_for(self.stream.as_fd(), PollFlags::IN, wait.signals(), LOOK_EVERY)?;
                }
            }
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// `R`, `S`, `D`, `T`, `t`, `Z`…; `None`: there is no such process, or we may not see it.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain any character.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The error for the user: which agent did not answer, its state, and what helps. `place`: its state directory.
pub fn silence(over: &str, pid: u32, place: &Path, after: Duration) -> Error {
    let (socket, log) = (place.join("agent.sock"), place.join("agent.log"));
    let log = log.display();
    let (state, remedy) = match process_state(pid) {
        Some('T') => ("it is stopped (SIGSTOP)", format!("kill -CONT {pid}")),
        Some('t') => ("a debugger has stopped it", "let the debugger go on".to_owned()),
        Some('D') => ("it waits in the kernel", format!("look into {log}; a store or a tier that hangs blocks it")),
        Some('Z') | None => ("it was killed, and no other one has taken over yet", format!("look into {log}")),
        Some(_) => {
            ("it runs", format!("look into {log}; when it stays so, kill -KILL {pid} lets another one take over"))
        }
    };
    Error::new(format!("the agent of {over} (pid {pid}) does not answer: {state}"))
        .why(format!("nothing came from {} for {} s", socket.display(), after.as_secs().max(1)))
        .remedy(remedy)
        .data("closed files are in the store or safe in the tiers; programs that use the directory wait for the agent")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn soon() -> Limits {
        Limits { signals: None, until: Some(clock::tick() + Duration::from_millis(50)) }
    }

    #[test]
    fn agent_that_takes_no_connection_is_silent() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let mut waiting = Vec::new();
        // The kernel queues some connections for the agent, and then refuses more.
        let broken = loop {
            match Line::connect(&socket, &soon()) {
                Ok(line) => waiting.push(line),
                Err(broken) => break broken,
            }
        };
        assert!(matches!(broken, Broken::Silent(_)), "{broken:?}");
        assert!(matches!(waiting[0].send(&Request::Status, &soon()), Ok(())));
        assert!(matches!(waiting[0].next(&soon()), Err(Broken::Silent(_))));
    }

    #[test]
    fn late_answers_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut line = Line::connect(&socket, &Limits::default()).unwrap();
        let (mut agent, _) = listener.accept().unwrap();
        line.send(&Request::Waiting, &Limits::default()).unwrap();
        assert!(matches!(line.next(&soon()), Err(Broken::Silent(_))));
        agent.write_all(b"{\"waiting\":[]}\n\"done\"\n").unwrap();
        line.settle(&Limits::default()).unwrap();
        line.send(&Request::Refresh, &Limits::default()).unwrap();
        assert_eq!(line.next(&Limits::default()).unwrap(), Answer::Done);
        assert!(!line.is_owed());
        drop(agent);
        assert!(line.closed(&Limits::default()).is_ok());
    }
}
