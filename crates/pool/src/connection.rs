//! A connection between two members, for messages in both directions.
//!
//! States: shaking hands (with one patience for all of it), open, closed. Two threads serve an open connection: one reads
//! and delivers, one writes what [`Connection::send`] queued. So a peer that does not read blocks no reader, and after
//! [`QUEUED_BYTES_MAX`] a sender waits with a patience of its own.
//!
//! Invariant: messages of one connection are delivered in the order of their sending, each once. After the first loss the
//! connection is closed.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use surgetank_types::clock::tick;

use crate::frame::{BadFrame, Frames, encode};
use crate::greeting::{Greeted, take_plain};
use crate::secret::Tls;
use crate::sockets::Patience;

pub use crate::greeting::{Hello, PROTOCOL, Purpose};

/// So much waits to be written before a sender waits.
pub const QUEUED_BYTES_MAX: usize = 4 << 20;
/// With so much in the queue even an urgent message closes the connection: some of the longest frames have room.
pub const URGENT_BYTES_MAX: usize = 32 << 20;
/// Encrypted at once.
const PIECE_BYTES: usize = 16 << 10;

/// Why there is no connection, or no longer one.
#[derive(Debug)]
pub enum Closed {
    /// The network failed, or a patience ran out.
    Io(io::Error),
    /// The peer has another secret, or speaks no TLS.
    Stranger(rustls::Error),
    /// The peer has the secret, and is of another pool, user or version, or another member.
    Refused(&'static str),
    /// What the peer sent is not a message.
    Frame(BadFrame),
    /// This side closed it.
    Here,
}

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io(why) => write!(f, "{why}"),
            Self::Stranger(why) => write!(f, "the peer does not have the pool's secret ({why})"),
            Self::Refused(why) => f.write_str(why),
            Self::Frame(why) => write!(f, "{why}"),
            Self::Here => f.write_str("this agent closed the connection"),
        }
    }
}

impl std::error::Error for Closed {}

impl From<io::Error> for Closed {
    fn from(why: io::Error) -> Self {
        Self::Io(why)
    }
}

impl From<BadFrame> for Closed {
    fn from(why: BadFrame) -> Self {
        Self::Frame(why)
    }
}

/// What a connection brings.
#[derive(Debug)]
pub enum Event<M> {
    /// The next message.
    Message(M),
    /// The last event.
    Closed(Closed),
}

/// An open connection. It is closed when this is dropped.
#[derive(Debug)]
pub struct Connection {
    shared: Arc<Shared>,
    peer: Hello,
}

#[derive(Debug)]
struct Shared {
    socket: TcpStream,
    tls: Mutex<rustls::Connection>,
    out: Mutex<Out>,
    /// The writer has something to do.
    changed: Condvar,
    /// A sender has room.
    room: Condvar,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Out {
    pieces: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Of messages that have room and are not encrypted yet.
    reserved_bytes: usize,
    closed: bool,
    /// This side closed it, and no failure.
    closed_here: bool,
}

impl Out {
    fn queued_bytes(&self) -> usize {
        self.bytes + self.reserved_bytes
    }
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Connects to `HOST:PORT`, within `patience`. `expected` says whether it is the right member: all have the same key,
    /// and an address may be another one's by now. `deliver` is called by a thread of the connection, and must not wait for
    /// an answer that comes over it.
    pub fn connect<M: DeserializeOwned>(
        address: &str,
        (tls, hello): (&Tls, Hello),
        patience: Duration,
        expected: impl FnOnce(&Hello) -> bool,
        deliver: impl FnMut(Event<M>) + Send + 'static,
    ) -> Result<Self, Closed> {
        let mut goes_on = || true;
        let greeted = Greeted::connect(address, (tls, &hello), &mut Patience::new(patience, &mut goes_on))?;
        Self::open(greeted, expected, deliver)
    }

    /// Takes up a connection that a listener accepted. `expected` says whether the peer may be a member of that name.
    pub fn accept<M: DeserializeOwned>(
        socket: TcpStream,
        (tls, hello): (&Tls, Hello),
        patience: Duration,
        expected: impl FnOnce(&Hello) -> bool,
        deliver: impl FnMut(Event<M>) + Send + 'static,
    ) -> Result<Self, Closed> {
        let mut goes_on = || true;
        let greeted = Greeted::accept(socket, (tls, &hello), &mut Patience::new(patience, &mut goes_on))?;
        Self::open(greeted, expected, deliver)
    }

    /// What the peer said first.
    pub fn peer(&self) -> &Hello {
        &self.peer
    }

    /// Bytes on the network so far: received, sent.
    pub fn network_bytes(&self) -> (u64, u64) {
        (self.shared.read_bytes.load(Ordering::Relaxed), self.shared.written_bytes.load(Ordering::Relaxed))
    }

    /// Queues a message. Waits up to `patience` for room; then the connection is closed, because what comes next would be
    /// out of order.
    pub fn send(&self, message: &impl Serialize, patience: Duration) -> Result<(), Closed> {
        self.send_below(QUEUED_BYTES_MAX, message, patience)
    }

    /// Queues a short message behind whatever is queued, without a wait. With [`URGENT_BYTES_MAX`] in the queue the
    /// connection is closed.
    pub fn send_urgent(&self, message: &impl Serialize) -> Result<(), Closed> {
        self.send_below(URGENT_BYTES_MAX, message, Duration::ZERO)
    }

    fn send_below(&self, most: usize, message: &impl Serialize, patience: Duration) -> Result<(), Closed> {
        let bytes = encode(message)?;
        if !self.shared.reserve(bytes.len(), most, tick() + patience)? {
            self.close();
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        self.shared.send_reserved(&bytes)
    }

    /// Ends both directions. What is queued may be lost.
    pub fn close(&self) {
        self.shared.close(true);
    }

    pub(crate) fn open<M: DeserializeOwned>(
        greeted: Greeted,
        expected: impl FnOnce(&Hello) -> bool,
        mut deliver: impl FnMut(Event<M>) + Send + 'static,
    ) -> Result<Self, Closed> {
        let Greeted { socket, tls, peer, frames, received, sent } = greeted;
        if !expected(&peer) {
            return Err(Closed::Refused("the peer is another member"));
        }
        let shared = Arc::new(Shared {
            socket,
            tls: Mutex::new(tls),
            out: Mutex::default(),
            changed: Condvar::new(),
            room: Condvar::new(),
            read_bytes: AtomicU64::new(received),
            written_bytes: AtomicU64::new(sent),
        });
        // (From here on a failure closes the socket.)
        let connection = Self { shared: shared.clone(), peer };
        let writer = shared.clone();
        thread::Builder::new().name("pool-out".to_owned()).spawn(move || writer.write_loop())?;
        thread::Builder::new().name("pool-in".to_owned()).spawn(move || {
            let why = shared.read_loop(frames, &mut |message| deliver(Event::Message(message))).err();
            let closed_here = shared.close(false);
            deliver(Event::Closed(why.filter(|_| !closed_here).unwrap_or(Closed::Here)));
        })?;
        Ok(connection)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Returns whether this side closed it.
    fn close(&self, here: bool) -> bool {
        let closed_here = {
            let mut out = hold(&self.out);
            out.closed_here |= here && !out.closed;
            out.closed = true;
            out.closed_here
        };
        self.changed.notify_all();
        self.room.notify_all();
        // (A peer that closed first makes this fail.)
        let _ = self.socket.shutdown(Shutdown::Both);
        closed_here
    }

    /// Waits until less than `most` is queued. Of senders that wait together only some get the room.
    fn reserve(&self, bytes: usize, most: usize, until: Instant) -> Result<bool, Closed> {
        let mut out = hold(&self.out);
        while !out.closed && out.queued_bytes() >= most {
            let Ok(left) = left(until) else { return Ok(false) };
            out = self.room.wait_timeout(out, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if out.closed {
            return Err(Closed::Here);
        }
        out.reserved_bytes += bytes;
        Ok(true)
    }

    fn send_reserved(&self, bytes: &[u8]) -> Result<(), Closed> {
        let sent = self.encrypt(bytes);
        self.make_room(|out| out.reserved_bytes -= bytes.len());
        if sent.is_err() {
            // (A part of the message may be queued.)
            self.close(true);
        }
        sent
    }

    /// (Senders wake when there is room, and not at each piece that is written.)
    fn make_room(&self, change: impl FnOnce(&mut Out)) {
        let mut out = hold(&self.out);
        let was_full = out.queued_bytes() >= QUEUED_BYTES_MAX;
        change(&mut out);
        if was_full && out.queued_bytes() < QUEUED_BYTES_MAX {
            self.room.notify_all();
        }
    }

    fn encrypt(&self, bytes: &[u8]) -> Result<(), Closed> {
        let mut tls = hold(&self.tls);
        for piece in bytes.chunks(PIECE_BYTES) {
            tls.writer().write_all(piece)?;
            self.queue_encrypted(&mut tls)?;
        }
        Ok(())
    }

    /// Queues what TLS wants to send. The caller holds the lock of TLS, so the order is that of the encryption.
    fn queue_encrypted(&self, tls: &mut rustls::Connection) -> Result<(), Closed> {
        let mut encrypted = Vec::new();
        while tls.wants_write() {
            tls.write_tls(&mut encrypted)?;
        }
        if !encrypted.is_empty() {
            let mut out = hold(&self.out);
            out.bytes += encrypted.len();
            out.pieces.push_back(encrypted);
            self.changed.notify_all();
        }
        Ok(())
    }

    fn write_loop(&self) {
        loop {
            let piece = {
                let mut out = hold(&self.out);
                loop {
                    if out.closed {
                        return;
                    }
                    if let Some(piece) = out.pieces.pop_front() {
                        break piece;
                    }
                    out = self.changed.wait(out).unwrap_or_else(PoisonError::into_inner);
                }
            };
            // (The reader's end of the socket reports why.)
            if (&self.socket).write_all(&piece).is_err() {
                self.close(false);
                return;
            }
            self.written_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
            self.make_room(|out| out.bytes -= piece.len());
        }
    }

    /// Never returns without an error: a peer that ends without one has closed the connection.
    fn read_loop<M: DeserializeOwned>(&self, mut frames: Frames, deliver: &mut dyn FnMut(M)) -> Result<(), Closed> {
        let mut bytes = vec![0; 64 << 10];
        loop {
            while let Some(message) = frames.next_message()? {
                deliver(message);
            }
            let count = (&self.socket).read(&mut bytes)?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            self.read_bytes.fetch_add(count as u64, Ordering::Relaxed);
            let mut rest = &bytes[..count];
            let mut tls = hold(&self.tls);
            while !rest.is_empty() {
                tls.read_tls(&mut rest)?;
                let processed = tls.process_new_packets();
                // An alert tells the peer why.
                self.queue_encrypted(&mut tls)?;
                processed.map_err(Closed::Stranger)?;
                take_plain(&mut tls, &mut frames)?;
            }
        }
    }
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(tick());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::Secret;

    // With its own check alone a client would refuse the server first.
    #[test]
    fn client_that_accepts_any_server_is_refused_for_its_key() {
        let (secret, other) = (Secret::random().unwrap(), Secret::random().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let hello = Hello { version: PROTOCOL, pool: [7; 16], uid: 1000, member: None, purpose: Purpose::Control };
        thread::scope(|scope| {
            let impostor = other.impostor_of(&secret).unwrap();
            let patience = Duration::from_secs(10);
            let client_says = hello.clone();
            scope.spawn(move || {
                let says = (&impostor, client_says);
                // (The server refuses after the client's part of the handshake.)
                drop(Connection::connect::<()>(&address, says, patience, |_| true, |_| {}));
            });
            let socket = listener.accept().unwrap().0;
            let tls = secret.tls().unwrap();
            let refused = Connection::accept::<()>(socket, (&tls, hello), patience, |_| true, |_| {}).unwrap_err();
            assert!(matches!(refused, Closed::Stranger(rustls::Error::InvalidCertificate(_))), "{refused:?}");
        });
    }
}
