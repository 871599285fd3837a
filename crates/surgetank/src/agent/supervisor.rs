//! The supervisor: the agent's parent. It holds what has to outlive a killed agent, and starts the next one.
//!
//! ```text
//! starter ── spawns ──► supervisor (one thread) ── forks ──► agent ── killed ──► forks ──► the next agent …
//!                        │ holds: lock, namespaces, the bare directories, memory (`core::handoff`),
//!                        │        and what the agent sends it: the mount's descriptor and its clones, the socket, …
//!                        └─ ends as the agent ended, when that ended in order
//! ```
//! The next agent is a fork, not a new program. So it inherits everything, and in a user namespace it keeps the rights
//! that an exec would remove.
//!
//! The supervisor gives up after several agents die before they serve. Then its descriptors close, and programs get
//! ENOTCONN, as without a supervisor.
//!
//! The first danger that it avoids: a second agent beside a living one. The supervisor waits for the first one's end.
//! The second danger: its own death together with the agent. It allocates almost no memory and does no other work.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, WaitOptions, WaitStatus};
use surgetank_core::handoff::Handoff;
use surgetank_types::clock;

use super::keep::{Channel, MESSAGE_BYTES_MAX, Message};
use super::signals::{self, Signals};

/// As `ps` shows it (15 bytes at most); the agent keeps the program's name.
const NAME: &std::ffi::CStr = c"surgetank-super";
const AGENT_NAME: &std::ffi::CStr = c"surgetank";
const BESIDE_NAME: &std::ffi::CStr = c"surgetank-pool";
/// Signals that ask the agent to stop.
const STOPS: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
/// The supervisor gives up after this many consecutive agents that did not serve.
const FAILURES_MAX: u32 = 3;
/// An agent that dies this soon after it began to serve may have died of a request: that counts as a failure.
const SERVED_FOR: Duration = Duration::from_millis(20);
const FAILED: u8 = 1;

/// The state that an agent begins with.
pub struct Inheritance {
    pub handoff: Arc<Handoff>,
    pub channel: Arc<Channel>,
    /// The descriptors, by the names under which they were kept.
    pub kept: BTreeMap<String, OwnedFd>,
    /// The number of agents before this one.
    pub life: u32,
}

/// How an agent ended.
struct End {
    status: WaitStatus,
    /// When the agent reported that another agent can continue.
    served: Option<Instant>,
    /// The agent removed the mount and left in order: no further agent is needed.
    ending: bool,
}

/// Runs agents until one ends in order. `agent` is what a fork does: it gets `ground` and returns its exit code. Call
/// it while the process has a single thread.
/// `beside`: what another process does meanwhile; it is killed at the end.
pub fn supervise<G>(ground: G, beside: Option<impl FnOnce() -> u8>, agent: impl FnOnce(G, Inheritance) -> u8) -> u8 {
    let supervisor = rustix::process::getpid();
    let beside = match beside.map(fork_beside) {
        Some(Err(code)) => return code,
        Some(Ok(pid)) => pid,
        None => None,
    };
    let code = supervise_agents(ground, agent);
    if let Some(pid) = beside.filter(|_| rustix::process::getpid() == supervisor) {
        // (It may have ended by itself.)
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
    }
    code
}

/// A process that ends with this one. In the new process: its exit code, as an error.
fn fork_beside(work: impl FnOnce() -> u8) -> Result<Option<Pid>, u8> {
    // SAFETY: the process has one thread, so the child finds no lock taken by another.
    match unsafe { libc::fork() } {
        0 => {
            call_ourselves(BESIDE_NAME);
            let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
            detach_from_starter();
            // A scheduler's stop is for the agent, which drains and leaves the pool first: this process ends after it.
            match Signals::block(&STOPS) {
                Ok(blocked) => std::mem::forget(blocked),
                Err(error) => tracing::warn!(%error, "a stop signal would end the membership at once"),
            }
            Err(work())
        }
        // (Without it the agent finds nothing to connect to, and says so.)
        child => Ok(Pid::from_raw(child).filter(|pid| pid.as_raw_pid() > 0)),
    }
}

fn supervise_agents<G>(ground: G, agent: impl FnOnce(G, Inheritance) -> u8) -> u8 {
    let prepared = Handoff::new().and_then(|handoff| Ok((Arc::new(handoff), Signals::block(&STOPS)?)));
    let (handoff, signals) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            tracing::error!(%error, "no supervisor: the agent could not be replaced, so none is started");
            return FAILED;
        }
    };
    let mut kept = BTreeMap::new();
    let mut failures = 0;
    let mut stop_signal = None;
    for life in 0.. {
        let Ok((ours, theirs)) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        else {
            tracing::error!("no socket for an agent");
            return FAILED;
        };
        // SAFETY: the process has one thread, so the child finds no lock taken by another.
        let child = match unsafe { libc::fork() } {
            0 => {
                call_ourselves(AGENT_NAME);
                drop((ours, signals));
                let channel = Arc::new(Channel::new(theirs));
                return agent(ground, Inheritance { handoff, channel, kept, life });
            }
            child => child,
        };
        drop(theirs);
        if life == 0 {
            call_ourselves(NAME);
            detach_from_starter();
        }
        let Some(child) = Pid::from_raw(child).filter(|pid| pid.as_raw_pid() > 0) else {
            tracing::error!(error = %io::Error::last_os_error(), "no agent could be forked");
            return FAILED;
        };
        // A stop signal to one agent is meant for the next one, too. (It stays blocked there until the agent listens.)
        if let Some(number) = stop_signal {
            let _ = signals::send(child.as_raw_nonzero().get().cast_unsigned(), number);
        }
        let end = attend(child, &ours, &signals, &mut kept, &mut stop_signal);
        let code = end.status.exit_status().map(|code| u8::try_from(code).unwrap_or(u8::MAX));
        if end.ending || code == Some(0) || (end.served.is_none() && life == 0) {
            return code.unwrap_or(FAILED);
        }
        let served = end.served.is_some_and(|since| since.elapsed() >= SERVED_FOR);
        failures = if served { 0 } else { failures + 1 };
        if failures == FAILURES_MAX || !handoff.is_whole() {
            tracing::error!(status = ?end.status, failures, "the agent died and is not replaced: programs get ENOTCONN");
            return FAILED;
        }
        tracing::warn!(status = ?end.status, "the agent died; another one takes over");
    }
    FAILED
}

/// Waits until the agent has ended.
fn attend(
    child: Pid,
    channel: &OwnedFd,
    signals: &Signals,
    kept: &mut BTreeMap<String, OwnedFd>,
    stop_signal: &mut Option<i32>,
) -> End {
    let life = rustix::process::pidfd_open(child, PidfdFlags::empty());
    let (mut served, mut ending, mut talks) = (None, false, true);
    let status = loop {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        if let Ok(life) = &life {
            fds.push(PollFd::new(life, PollFlags::IN));
        }
        if talks {
            fds.push(PollFd::new(channel, PollFlags::IN));
        }
        // Without a pidfd the end of the agent's channel wakes the supervisor.
        let _ = rustix::event::poll(&mut fds, None);
        while talks && let Some(message) = receive(channel, &mut talks) {
            match message {
                (Message::Keep, name, Some(file)) => drop(kept.insert(name, file)),
                (Message::Keep, ..) => {}
                (Message::GiveUp, name, _) => drop(kept.remove(&name)),
                (Message::Serving, ..) => served = Some(clock::tick()),
                (Message::Ending, ..) => ending = true,
            }
        }
        while let Ok(Some(arrived)) = signals.next() {
            *stop_signal = Some(arrived.number);
            let _ = signals::send(child.as_raw_nonzero().get().cast_unsigned(), arrived.number);
        }
        match rustix::process::waitpid(Some(child), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => break status,
            Ok(None) if !talks && life.is_err() => std::thread::sleep(Duration::from_millis(1)),
            Ok(None) | Err(_) => {}
        }
    };
    // Messages from the agent's last moment.
    while talks && let Some(message) = receive(channel, &mut talks) {
        match message {
            (Message::Keep, name, Some(file)) => drop(kept.insert(name, file)),
            (Message::GiveUp, name, _) => drop(kept.remove(&name)),
            (Message::Ending, ..) => ending = true,
            (Message::Serving | Message::Keep, ..) => {}
        }
    }
    End { status, served, ending }
}

/// The next message, without waiting.
fn receive(channel: &OwnedFd, talks: &mut bool) -> Option<(Message, String, Option<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    match rustix::net::recvmsg(channel.as_fd(), &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
        Ok(received) if received.bytes > 0 => {
            let file = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                _ => None,
            });
            let (kind, name) = bytes[..received.bytes].split_first()?;
            Some((Message::of(*kind)?, String::from_utf8_lossy(name).into_owned(), file))
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
        Ok(_) | Err(_) => {
            *talks = false;
            None
        }
    }
}

/// Only the first agent talks to the starter.
fn detach_from_starter() {
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    if let Ok(nothing) = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty()) {
        // This fails only for lack of memory; then the starter waits longer.
        let _ = rustix::stdio::dup2_stdin(&nothing);
        let _ = rustix::stdio::dup2_stdout(&nothing);
    }
}

fn call_ourselves(name: &std::ffi::CStr) {
    // SAFETY: PR_SET_NAME reads a string that ends with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}
