//! The begin of a connection between two members: TLS with the pool's key, then a greeting of each side. All of it has one
//! patience.

use std::io::{self, BufRead, Read, Write};
use std::net::TcpStream;

use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};

use crate::connection::Closed;
use crate::frame::{Frames, encode};
use crate::secret::Tls;
use crate::sockets::{self, Patience};
use crate::{MemberId, Term};

/// The version of the messages. Members with different versions do not talk.
pub const PROTOCOL: u16 = 8;

/// What each side says first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the sender.
    pub version: u16,
    /// Random, one for each pool.
    pub pool: [u8; 16],
    /// The user that the sender runs as.
    pub uid: u32,
    /// Which member the sender is; `None` before it has joined.
    pub member: Option<(MemberId, Term)>,
    /// As the connecting side says. The other side's is not looked at.
    pub purpose: Purpose,
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Messages between members, and to the registry ([`crate::Connection`]).
    Control,
    /// Calls ([`crate::Caller`]).
    Calls,
}

/// A connection whose peer has the secret, and is of the same pool, user and version.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub socket: TcpStream,
    pub tls: rustls::Connection,
    pub peer: Hello,
    /// What came behind the greeting.
    pub frames: Frames,
    /// Bytes on the network.
    pub received: u64,
    pub sent: u64,
}

impl Greeted {
    /// Connects to `HOST:PORT`.
    pub fn connect(address: &str, (tls, hello): (&Tls, &Hello), patience: &mut Patience<'_>) -> Result<Self, Closed> {
        let socket = sockets::connect(address, patience)?;
        // (Every key is accepted or refused by itself: the name plays no part.)
        let name = ServerName::from(socket.peer_addr()?.ip());
        let client = rustls::ClientConnection::new(tls.client.clone(), name).map_err(Closed::Stranger)?;
        Self::greet(socket, client.into(), hello, patience)
    }

    /// Takes up a connection that a listener accepted.
    pub fn accept(
        socket: TcpStream,
        (tls, hello): (&Tls, &Hello),
        patience: &mut Patience<'_>,
    ) -> Result<Self, Closed> {
        let server = rustls::ServerConnection::new(tls.server.clone()).map_err(Closed::Stranger)?;
        Self::greet(socket, server.into(), hello, patience)
    }

    fn greet(
        socket: TcpStream,
        mut tls: rustls::Connection,
        hello: &Hello,
        patience: &mut Patience<'_>,
    ) -> Result<Self, Closed> {
        socket.set_nodelay(true)?;
        let mut patient = Patient { socket: &socket, patience, received: 0, sent: 0 };
        let (peer, frames) = shake_hands(&mut patient, &mut tls, hello)?;
        let (received, sent) = (patient.received, patient.sent);
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        sockets::end_with_the_peer(&socket).map_err(io::Error::from)?;
        Ok(Self { socket, tls, peer, frames, received, sent })
    }
}

/// Returns the peer's greeting, and what came behind it.
fn shake_hands(
    socket: &mut Patient<'_, '_>,
    tls: &mut rustls::Connection,
    hello: &Hello,
) -> Result<(Hello, Frames), Closed> {
    let mut frames = Frames::before_greeting();
    let stranger = |why: io::Error| match why.downcast::<rustls::Error>() {
        Ok(why) => Closed::Stranger(why),
        Err(why) => Closed::Io(why),
    };
    while tls.is_handshaking() {
        let done = tls.complete_io(socket);
        if done.is_err() {
            // The alert tells the peer why. (If that fails too, the peer sees the end of the stream.)
            while tls.wants_write() && tls.write_tls(socket).is_ok() {}
        }
        done.map_err(stranger)?;
    }
    tls.writer().write_all(&encode(hello)?)?;
    while tls.wants_write() {
        tls.write_tls(socket)?;
    }
    loop {
        // (The client's greeting may have come with the end of the handshake.)
        take_plain(tls, &mut frames)?;
        if let Some(peer) = frames.next_message::<Hello>()? {
            frames.greeted();
            check(hello, &peer).map_err(Closed::Refused)?;
            return Ok((peer, frames));
        }
        if tls.read_tls(socket)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let processed = tls.process_new_packets();
        while tls.wants_write() {
            tls.write_tls(socket)?;
        }
        processed.map_err(Closed::Stranger)?;
    }
}

fn check(hello: &Hello, peer: &Hello) -> Result<(), &'static str> {
    if peer.version != hello.version {
        Err("the peer has another version of Surgetank")
    } else if peer.pool != hello.pool {
        Err("the peer is a member of another pool")
    } else if peer.uid != hello.uid {
        Err("the peer runs as another user")
    } else {
        Ok(())
    }
}

/// What is decrypted.
pub(crate) fn take_plain(tls: &mut rustls::Connection, frames: &mut Frames) -> Result<(), Closed> {
    let mut reader = tls.reader();
    loop {
        let count = match reader.fill_buf() {
            Ok([]) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(bytes) => {
                frames.push(bytes);
                bytes.len()
            }
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(why) => return Err(why.into()),
        };
        reader.consume(count);
    }
}

/// A socket with one patience for all that it does.
struct Patient<'a, 'b> {
    socket: &'a TcpStream,
    patience: &'a mut Patience<'b>,
    received: u64,
    sent: u64,
}

impl Patient<'_, '_> {
    /// (Linux says `EAGAIN` when the time of a socket has run out.)
    fn is_early(why: &io::Error) -> bool {
        matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
    }
}

impl Read for Patient<'_, '_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.set_read_timeout(Some(self.patience.slice()?))?;
            match self.socket.read(bytes) {
                Err(why) if Self::is_early(&why) => {}
                Err(why) => return Err(why),
                Ok(count) => {
                    self.received += count as u64;
                    return Ok(count);
                }
            }
        }
    }
}

impl Write for Patient<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.socket.set_write_timeout(Some(self.patience.slice()?))?;
            match self.socket.write(bytes) {
                Err(why) if Self::is_early(&why) => {}
                Err(why) => return Err(why),
                Ok(count) => {
                    self.sent += count as u64;
                    return Ok(count);
                }
            }
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
