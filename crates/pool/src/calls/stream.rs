//! A connection for calls: frames on TLS, read and written by the thread that uses it.

use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use serde::{Deserialize, Serialize};

use super::{BODY_BYTES_MAX, Once, Traffic};
use crate::greeting::Greeted;
use crate::sockets;

/// So much is encrypted before it is written.
const WRITTEN_AT_ONCE: usize = 128 << 10;
/// So much is read at once of a long body.
const READ_AT_ONCE: usize = 128 << 10;
/// So much is read at once otherwise: an idle connection keeps this buffer.
const READ_SHORT: usize = 4 << 10;
/// A longer head is refused: [`super::caller`] sends at most 1,000 numbers, of 15 bytes each.
const HEAD_BYTES_MAX: usize = 32 << 10;
/// The lengths of head and body.
const LENGTHS_BYTES: usize = 8;

/// What is asked while a socket is waited for. `false` ends the wait.
pub(super) type Waits<'a> = &'a mut dyn FnMut() -> bool;

/// A call, without its body.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Head {
    pub once: Option<Once>,
    /// The caller needs the replies to these no more.
    pub answered: Vec<Once>,
}

/// After an error it is of no use.
#[derive(Debug)]
pub(super) struct Stream {
    socket: Arc<TcpStream>,
    tls: rustls::Connection,
    /// Decrypted with the greeting.
    early: Vec<u8>,
    /// Read from the socket; from `decrypted` to `read` not decrypted yet.
    wire: Vec<u8>,
    decrypted: usize,
    read: usize,
    head: Vec<u8>,
    traffic: Arc<Traffic>,
}

impl Stream {
    pub fn new(greeted: Greeted, traffic: Arc<Traffic>) -> Self {
        let Greeted { socket, mut tls, frames, received, sent, .. } = greeted;
        tls.set_buffer_limit(Some(WRITTEN_AT_ONCE));
        traffic.received.fetch_add(received, Ordering::Relaxed);
        traffic.sent.fetch_add(sent, Ordering::Relaxed);
        Self {
            socket: Arc::new(socket),
            tls,
            early: frames.into_rest(),
            wire: Vec::new(),
            decrypted: 0,
            read: 0,
            head: Vec::new(),
            traffic,
        }
    }

    /// How often a wait asks whether it goes on. Without it a wait lasts until the connection ends.
    pub fn ask_each(&self, time: Duration) -> io::Result<()> {
        self.socket.set_read_timeout(Some(time))?;
        self.socket.set_write_timeout(Some(time))
    }

    pub fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Ends the connection so that the peer's kernel reports it, even if the peer has not read all.
    pub fn reset(self) {
        // (Otherwise the peer sees the end of the stream.)
        let _ = set_socket_linger(&*self.socket, Some(Duration::ZERO));
    }

    pub fn write_call(&mut self, head: &Head, body: &[u8], waits: Waits<'_>) -> io::Result<()> {
        self.write_frame(Some(head), body, waits)
    }

    pub fn write_reply(&mut self, body: &[u8], waits: Waits<'_>) -> io::Result<()> {
        self.write_frame(None, body, waits)
    }

    pub fn read_call(&mut self, waits: Waits<'_>) -> io::Result<(Head, Vec<u8>)> {
        let body = self.read_frame(waits)?;
        let head = postcard::from_bytes(&self.head).map_err(malformed)?;
        Ok((head, body))
    }

    pub fn read_reply(&mut self, waits: Waits<'_>) -> io::Result<Vec<u8>> {
        let body = self.read_frame(waits)?;
        if self.head.is_empty() { Ok(body) } else { Err(malformed("a reply has no head")) }
    }

    fn write_frame(&mut self, head: Option<&Head>, body: &[u8], waits: Waits<'_>) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.head);
        bytes.clear();
        bytes.resize(LENGTHS_BYTES, 0);
        if let Some(head) = head {
            bytes = postcard::to_extend(head, bytes).map_err(malformed)?;
        }
        let length = |bytes: usize, most: usize| {
            u32::try_from(bytes).ok().filter(|_| bytes <= most).ok_or_else(|| malformed("a call is too long"))
        };
        let head_bytes = length(bytes.len() - LENGTHS_BYTES, HEAD_BYTES_MAX)?;
        bytes[..4].copy_from_slice(&head_bytes.to_le_bytes());
        bytes[4..LENGTHS_BYTES].copy_from_slice(&length(body.len(), BODY_BYTES_MAX)?.to_le_bytes());
        let (mut head_left, mut body_left) = (&bytes[..], body);
        while !head_left.is_empty() || !body_left.is_empty() {
            let pieces = [IoSlice::new(head_left), IoSlice::new(body_left)];
            let written = self.tls.writer().write_vectored(&pieces)?;
            let of_head = written.min(head_left.len());
            head_left = &head_left[of_head..];
            body_left = &body_left[written - of_head..];
            self.flush(waits)?;
        }
        self.head = bytes;
        Ok(())
    }

    fn flush(&mut self, waits: Waits<'_>) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut &*self.socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.traffic.sent.fetch_add(count as u64, Ordering::Relaxed)),
                Err(why) => wait_on(why, waits)?,
            }
        }
        Ok(())
    }

    /// Leaves the head in `self.head`.
    fn read_frame(&mut self, waits: Waits<'_>) -> io::Result<Vec<u8>> {
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        self.read_into(&mut head, LENGTHS_BYTES, waits)?;
        let length =
            |at: usize| head[at..].first_chunk().map_or(usize::MAX, |bytes| u32::from_le_bytes(*bytes) as usize);
        let (head_bytes, body_bytes) = (length(0), length(4));
        if head_bytes > HEAD_BYTES_MAX || body_bytes > BODY_BYTES_MAX {
            return Err(malformed("a call is too long"));
        }
        head.clear();
        self.read_into(&mut head, head_bytes, waits)?;
        let mut body = Vec::with_capacity(body_bytes);
        self.read_into(&mut body, body_bytes, waits)?;
        self.head = head;
        Ok(body)
    }

    fn read_into(&mut self, into: &mut Vec<u8>, count: usize, waits: Waits<'_>) -> io::Result<()> {
        let end = into.len() + count;
        while into.len() < end {
            let missing = end - into.len();
            if !self.early.is_empty() {
                let count = missing.min(self.early.len());
                into.extend(self.early.drain(..count));
                continue;
            }
            let mut reader = self.tls.reader();
            match reader.fill_buf() {
                Ok([]) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    let count = missing.min(bytes.len());
                    into.extend_from_slice(&bytes[..count]);
                    reader.consume(count);
                }
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => self.receive(missing, waits)?,
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    /// Decrypts a part of what has come, or waits for more.
    fn receive(&mut self, missing: usize, waits: Waits<'_>) -> io::Result<()> {
        if self.decrypted == self.read {
            let wanted = if missing > READ_SHORT { READ_AT_ONCE } else { READ_SHORT };
            if self.wire.len() < wanted {
                self.wire.resize(wanted, 0);
            }
            let count = loop {
                match (&*self.socket).read(&mut self.wire) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(count) => break count,
                    Err(why) => wait_on(why, waits)?,
                }
            };
            self.traffic.received.fetch_add(count as u64, Ordering::Relaxed);
            (self.decrypted, self.read) = (0, count);
        }
        let mut rest = &self.wire[self.decrypted..self.read];
        self.tls.read_tls(&mut rest)?;
        self.decrypted = self.read - rest.len();
        self.tls.process_new_packets().map_err(malformed)?;
        Ok(())
    }

    /// Has the peer ended the connection? What it sent before may have come.
    pub fn has_ended(&self) -> bool {
        sockets::has_ended(&self.socket)
    }
}

fn malformed(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// (Linux says `EAGAIN` when the time of a socket has run out.)
fn wait_on(why: io::Error, waits: Waits<'_>) -> io::Result<()> {
    match why.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        io::ErrorKind::WouldBlock if waits() => Ok(()),
        io::ErrorKind::WouldBlock => Err(io::ErrorKind::TimedOut.into()),
        _ => Err(why),
    }
}
