//! Access to processes that the agent itself may not access.
//!
//! Under Yama (`kernel.yama.ptrace_scope` 1, the default of Ubuntu) an ordinary user's process may read the memory and
//! take the descriptors of its own descendants only. The command's processes are descendants of `run`, not of the
//! agent: `run` is the parent of the first, and becomes that of the orphans. So a thread of `run` acts for the agent,
//! which asks over a socket that came with the filter's listener. When `run` has ended, the remaining processes get
//! EPERM.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

use super::task::Task;

/// The limit of one message: longer data goes in pieces.
const PIECE_BYTES_MAX: usize = 32 << 10;
const HEAD_BYTES: usize = 24;

const READ: u32 = 0;
const WRITE: u32 = 1;
const DESCRIPTOR: u32 = 2;

/// Both ends: `run` serves the first, the agent sends requests on the second.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// The agent's end.
pub struct Reach(Mutex<OwnedFd>);

impl Reach {
    pub fn new(socket: OwnedFd) -> Self {
        Self(Mutex::new(socket))
    }

    /// Returns the number of bytes moved, and a descriptor if the request wanted one.
    fn ask(&self, head: Head, sent: &[u8], into: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
        // One request at a time: an answer does not identify its request.
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let head = head.to_bytes();
        // `run` has ended: the same as no access.
        let gone = |_| Errno::PERM;
        let parts = [IoSlice::new(&head), IoSlice::new(sent)];
        rustix::net::sendmsg(&*socket, &parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)
            .map_err(gone)?;
        let mut value = [0; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let parts = &mut [IoSliceMut::new(&mut value), IoSliceMut::new(into)];
            match rustix::net::recvmsg(&*socket, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                other => break other.map_err(gone)?,
            }
        };
        if got.bytes < value.len() {
            return Err(Errno::PERM);
        }
        let value = i64::from_ne_bytes(value);
        if value < 0 {
            return Err(Errno::from_raw_os_error(i32::try_from(-value).unwrap_or(libc::EIO)));
        }
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        Ok((usize::try_from(value).unwrap_or(0), descriptor))
    }

    pub fn read(&self, tid: u32, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        for piece in into.chunks_mut(PIECE_BYTES_MAX) {
            let head = Head { what: READ, tid, at: at + done as u64, len: piece.len() as u64 };
            let (moved, _) = self.ask(head, &[], piece)?;
            done += moved;
            if moved < piece.len() {
                break;
            }
        }
        Ok(done)
    }

    pub fn write(&self, tid: u32, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let mut done = 0;
        for piece in bytes.chunks(PIECE_BYTES_MAX) {
            let head = Head { what: WRITE, tid, at: at + done as u64, len: piece.len() as u64 };
            let (moved, _) = self.ask(head, piece, &mut [])?;
            done += moved;
            if moved < piece.len() {
                break;
            }
        }
        Ok(done)
    }

    pub fn descriptor(&self, tid: u32, number: i32) -> Result<OwnedFd, Errno> {
        let head = Head { what: DESCRIPTOR, tid, at: 0, len: u64::from(number.cast_unsigned()) };
        self.ask(head, &[], &mut [])?.1.ok_or(Errno::BADF)
    }
}

/// A request. `len` is the descriptor's number if it wants one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    what: u32,
    tid: u32,
    at: u64,
    len: u64,
}

impl Head {
    fn to_bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&self.what.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.tid.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.at.to_ne_bytes());
        bytes[16..].copy_from_slice(&self.len.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; HEAD_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = *bytes;
        let (mut at, mut len) = ([0; 8], [0; 8]);
        at.copy_from_slice(&rest[..8]);
        len.copy_from_slice(&rest[8..]);
        Self {
            what: u32::from_ne_bytes([a, b, c, d]),
            tid: u32::from_ne_bytes([e, f, g, h]),
            at: u64::from_ne_bytes(at),
            len: u64::from_ne_bytes(len),
        }
    }
}

/// In `run`: serves the agent's requests, until no process holds the other end.
pub fn serve(socket: OwnedFd) -> io::Result<()> {
    let work = move || {
        let mut buffer = vec![0; PIECE_BYTES_MAX];
        while one(&socket, &mut buffer).is_ok() {}
    };
    std::thread::Builder::new().name("reach".into()).stack_size(256 << 10).spawn(work).map(drop)
}

fn one(socket: &OwnedFd, buffer: &mut [u8]) -> Result<(), Errno> {
    let mut head = [0; HEAD_BYTES];
    let parts = &mut [IoSliceMut::new(&mut head), IoSliceMut::new(buffer)];
    let got = match rustix::net::recvmsg(socket, parts, &mut RecvAncillaryBuffer::default(), RecvFlags::empty()) {
        Err(Errno::INTR) => return Ok(()),
        other => other?,
    };
    let came = got.bytes.checked_sub(HEAD_BYTES).ok_or(Errno::PIPE)?;
    let head = Head::from_bytes(&head);
    let task = Task::of(head.tid);
    let len = usize::try_from(head.len).unwrap_or(usize::MAX).min(PIECE_BYTES_MAX);
    let mut descriptor = None;
    let (outcome, back) = match head.what {
        READ => match task.read_some(head.at, &mut buffer[..len]) {
            Ok(moved) => (Ok(moved), moved),
            Err(errno) => (Err(errno), 0),
        },
        WRITE => (task.write_some(head.at, &buffer[..came]), 0),
        DESCRIPTOR => match task.descriptor(head.len as i32) {
            Ok(found) => {
                descriptor = Some(found);
                (Ok(0), 0)
            }
            Err(errno) => (Err(errno), 0),
        },
        _ => (Err(Errno::INVAL), 0),
    };
    let value = match outcome {
        Ok(moved) => moved as i64,
        Err(errno) => -i64::from(errno.raw_os_error()),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors: [BorrowedFd<'_>; 1];
    if let Some(descriptor) = &descriptor {
        descriptors = [descriptor.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let value = value.to_ne_bytes();
    let parts = [IoSlice::new(&value), IoSlice::new(&buffer[..back])];
    rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// May `run` help an agent so, or does the agent need no help? `scope` is the value of `kernel.yama.ptrace_scope`.
pub fn permitted(scope: &str, may_trace: bool) -> Result<(), String> {
    match scope.trim() {
        // 1: descendants only, which `run` can access.
        "" | "0" | "1" => Ok(()),
        "2" if may_trace => Ok(()),
        other => Err(format!(
            "only an administrator may read the arguments of other programs (kernel.yama.ptrace_scope is {other})"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// The thread's own process stands for the command's.
    fn reach() -> Reach {
        let (served, asked) = pair().unwrap();
        serve(served).unwrap();
        Reach::new(asked)
    }

    #[test]
    fn memory_is_read_and_written_in_pieces() {
        let reach = reach();
        let us = std::process::id();
        let theirs: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let mut read = vec![0; theirs.len()];
        assert_eq!(reach.read(us, theirs.as_ptr() as u64, &mut read), Ok(theirs.len()));
        assert_eq!(read, theirs);
        let mut target = vec![0_u8; theirs.len()];
        assert_eq!(reach.write(us, target.as_mut_ptr() as u64, &theirs), Ok(theirs.len()));
        assert_eq!(std::hint::black_box(target), theirs);
        assert_eq!(reach.read(us, 16, &mut read[..8]), Err(Errno::FAULT));
        assert_eq!(reach.read(u32::MAX >> 1, 16, &mut read[..8]), Err(Errno::SRCH));
    }

    #[test]
    fn descriptors_are_the_same_open_file() {
        let file = tempfile::tempfile().unwrap();
        let found = reach().descriptor(std::process::id(), file.as_raw_fd()).unwrap();
        rustix::fs::seek(&found, rustix::fs::SeekFrom::Start(77)).unwrap();
        assert_eq!(rustix::fs::tell(&file), Ok(77));
        assert_eq!(reach().descriptor(std::process::id(), 1 << 20).unwrap_err(), Errno::BADF);
    }

    #[test]
    fn request_without_a_server_fails_with_eperm() {
        let (served, asked) = pair().unwrap();
        drop(served);
        assert_eq!(Reach::new(asked).read(std::process::id(), 16, &mut [0; 8]), Err(Errno::PERM));
    }

    #[test]
    fn yama_scope_decides_access() {
        for may_trace in [true, false] {
            for scope in ["", "0\n", "1\n"] {
                assert_eq!(permitted(scope, may_trace), Ok(()));
            }
            assert!(permitted("3\n", may_trace).is_err());
        }
        assert_eq!(permitted("2\n", true), Ok(()));
        assert!(permitted("2\n", false).unwrap_err().contains("ptrace_scope is 2"));
    }
}
