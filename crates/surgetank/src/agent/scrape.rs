//! The port where Prometheus fetches the metrics: HTTP/1.1, one path, one thread for all who ask.
//!
//! ```text
//! accepted ─► Asking (until the request's head is whole) ─► Answering ─► Leaving (what it still sends is thrown away) ─► closed
//! ```
//! Opened before the agent's processes part ([`super::ground`]), so it is every agent's in turn: who connects while one takes
//! over from another waits in the same queue. The token stays as it was then, too.
//!
//! The dangers it avoids: one who asks nothing, sends without end or never reads keeps others out (whatever is not done
//! in `PATIENCE` is closed, and where there are too many, one of them by chance: with any order among them, who floods the port
//! would choose who goes); a stranger of the same machine learns what a user's
//! run does (without the token nothing is told, not even which path exists, and nothing is computed).

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use surgetank_policy::config::{Config, TokenFile};
use surgetank_types::clock;
use surgetank_types::error::{Error, Result};

/// From the connection to the last byte of the answer.
const PATIENCE: Duration = Duration::from_secs(5);
const CONNECTIONS_MAX: usize = 32;
/// Of a request, up to the empty line. Prometheus sends 300 bytes.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// So much of what follows is read and thrown away: to close before would take the answer back.
const REST_BYTES_MAX: usize = 64 << 10;
const TOKEN_BYTES_MAX: u64 = 4 << 10;
const TOKEN_NAME: &str = "metrics-token";

pub struct Port {
    listener: TcpListener,
    /// `None`: everybody is answered.
    token: Option<Vec<u8>>,
}

/// What is answered, before the metrics are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The head is not whole yet.
    More,
    Metrics {
        /// The head of the answer alone (HEAD).
        head_only: bool,
    },
    Refused(Refused),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Not HTTP.
    Malformed,
    TooLong,
    NoToken,
    OtherPath,
    OtherMethod,
}

impl Refused {
    /// Status, further lines of the head, and what a person reads.
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Malformed => ("400 Bad Request", "", "this is no request of HTTP/1.1"),
            Self::TooLong => ("431 Request Header Fields Too Large", "", "the request is too long"),
            Self::NoToken => (
                "401 Unauthorized",
                "WWW-Authenticate: Bearer\r\n",
                "the metrics are told to who shows the token: Authorization: Bearer TOKEN",
            ),
            Self::OtherPath => ("404 Not Found", "", "there is nothing here but /metrics"),
            Self::OtherMethod => ("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "the metrics can only be read"),
        }
    }
}

/// Takes the beginning of a request apart.
pub fn asked(head: &[u8], token: Option<&[u8]>) -> Asked {
    let window = &head[..head.len().min(HEAD_BYTES_MAX)];
    let Some(end) = window.windows(4).position(|four| four == b"\r\n\r\n") else {
        let too_long = head.len() >= HEAD_BYTES_MAX;
        return if too_long { Asked::Refused(Refused::TooLong) } else { Asked::More };
    };
    let Ok(text) = std::str::from_utf8(&window[..end]) else {
        return Asked::Refused(Refused::Malformed);
    };
    let mut lines = text.split("\r\n");
    let request: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let &[method, target, "HTTP/1.1" | "HTTP/1.0"] = &*request else {
        return Asked::Refused(Refused::Malformed);
    };
    let mut shown = None;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return Asked::Refused(Refused::Malformed);
        };
        if name.eq_ignore_ascii_case("authorization") {
            shown = value.trim().split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        }
    }
    if token.is_some_and(|token| !shown.is_some_and(|(_, shown)| same(shown.trim().as_bytes(), token))) {
        return Asked::Refused(Refused::NoToken);
    }
    match (target.split('?').next(), method) {
        (Some("/metrics"), "GET") => Asked::Metrics { head_only: false },
        (Some("/metrics"), "HEAD") => Asked::Metrics { head_only: true },
        (Some("/metrics"), _) => Asked::Refused(Refused::OtherMethod),
        _ => Asked::Refused(Refused::OtherPath),
    }
}

/// In a time that does not tell how much of it is right.
fn same(shown: &[u8], token: &[u8]) -> bool {
    shown.len() == token.len() && shown.iter().zip(token).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

fn answer(status: &str, head: &str, body: &str, head_only: bool) -> Vec<u8> {
    let kind = if status.starts_with("200") {
        "text/plain; version=0.0.4; charset=utf-8"
    } else {
        "text/plain; charset=utf-8"
    };
    let length = body.len();
    let mut text = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n{head}Connection: close\r\n\r\n"
    );
    if !head_only {
        text.push_str(body);
    }
    text.into_bytes()
}

enum State {
    Asking { head: Vec<u8> },
    Answering { text: Vec<u8>, sent: usize },
    Leaving { seen: usize },
}

struct Client {
    stream: TcpStream,
    until: Instant,
    state: State,
}

impl Client {
    /// Goes as far as it can without waiting; false when it is over.
    fn advance(&mut self, token: Option<&[u8]>, metrics: &dyn Fn() -> String) -> bool {
        loop {
            let moved = match &mut self.state {
                State::Asking { head } => {
                    let mut bytes = [0; 4096];
                    match self.stream.read(&mut bytes) {
                        Ok(0) => return false,
                        Ok(length) => head.extend_from_slice(&bytes[..length]),
                        Err(error) => return is_waiting(&error),
                    }
                    match asked(head, token) {
                        Asked::More => {}
                        Asked::Metrics { head_only } => {
                            let text = answer("200 OK", "", &metrics(), head_only);
                            self.state = State::Answering { text, sent: 0 };
                        }
                        Asked::Refused(refused) => {
                            let (status, head, why) = refused.words();
                            let text = answer(status, head, &format!("{why}\n"), false);
                            self.state = State::Answering { text, sent: 0 };
                        }
                    }
                    Ok(())
                }
                State::Answering { text, sent } => match self.stream.write(&text[*sent..]) {
                    Ok(length) => {
                        *sent += length;
                        if *sent == text.len() {
                            // The other side may have closed: then there is nothing to leave.
                            let _ = self.stream.shutdown(std::net::Shutdown::Write);
                            self.state = State::Leaving { seen: 0 };
                        }
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
                State::Leaving { seen } => {
                    let mut bytes = [0; 4096];
                    match self.stream.read(&mut bytes) {
                        Ok(0) => return false,
                        Ok(length) => {
                            *seen += length;
                            if *seen > REST_BYTES_MAX {
                                return false;
                            }
                            Ok(())
                        }
                        Err(error) => Err(error),
                    }
                }
            };
            if let Err(error) = moved {
                return is_waiting(&error);
            }
        }
    }

    fn waits_for(&self) -> PollFlags {
        match self.state {
            State::Answering { .. } => PollFlags::OUT,
            State::Asking { .. } | State::Leaving { .. } => PollFlags::IN,
        }
    }
}

fn is_waiting(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl Port {
    /// Where the configuration wants one. Before anything is mounted: a port that is in use is to be known then.
    pub fn of(config: &Config) -> Result<Option<Self>> {
        let Some(address) = config.metrics else {
            return Ok(None);
        };
        let token = match &config.metrics_token_file {
            TokenFile::Nobody => None,
            TokenFile::File(path) => Some(read_token(path)?),
            TokenFile::Own => Some(own_token(&config.state)?),
        };
        let listener = bind(address)?;
        Ok(Some(Self { listener, token }))
    }

    /// Answers until the process ends. `metrics` is asked once for each answer.
    pub fn serve(&self, metrics: &dyn Fn() -> String) {
        let mut clients: Vec<Client> = Vec::new();
        loop {
            let now = clock::tick();
            let next = clients.iter().map(|client| client.until.saturating_duration_since(now)).min();
            let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
            fds.extend(clients.iter().map(|client| PollFd::new(&client.stream, client.waits_for())));
            let timeout = next.and_then(|left| rustix::time::Timespec::try_from(left).ok());
            // Interrupted: the same as nothing to do.
            let _ = rustix::event::poll(&mut fds, timeout.as_ref());
            let came = !fds[0].revents().is_empty();
            let ready: Vec<bool> = fds[1..].iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            let mut ready = ready.into_iter();
            let now = clock::tick();
            clients.retain_mut(|client| {
                let ready = ready.next().unwrap_or(false);
                (!ready || client.advance(self.token.as_deref(), metrics)) && client.until > now
            });
            if came {
                self.accept(&mut clients, metrics);
            }
        }
    }

    fn accept(&self, clients: &mut Vec<Client>, metrics: &dyn Fn() -> String) {
        match self.listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream)) {
            Ok(stream) => {
                let head = Vec::new();
                let mut client = Client { stream, until: clock::tick() + PATIENCE, state: State::Asking { head } };
                if client.advance(self.token.as_deref(), metrics) {
                    if clients.len() == CONNECTIONS_MAX {
                        drop(clients.swap_remove(unlucky(clients)));
                    }
                    clients.push(client);
                }
            }
            Err(error) if is_waiting(&error) || error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "metrics: accept");
                // Out of descriptors, most likely: give others time to close some.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Who makes room: by chance among those who are not being answered, if there are any.
fn unlucky(clients: &[Client]) -> usize {
    let mut bytes = [0_u8; 8];
    // Where there is no chance to be had it is the newest but for a few: the oldest is who a flood would put out.
    let drawn = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let drawn = drawn.map_or(usize::MAX, |_| usize::from_ne_bytes(bytes));
    let is_answered = |client: &Client| matches!(client.state, State::Answering { .. });
    let others: Vec<usize> = (0..clients.len()).filter(|&at| !is_answered(&clients[at])).collect();
    match others.len() {
        0 => drawn % clients.len().max(1),
        many => others[drawn % many],
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).and_then(|listener| listener.set_nonblocking(true).map(|()| listener)).map_err(|why| {
        let error = Error::new(format!("the metrics cannot be served at {address}"));
        let error = match why.kind() {
            ErrorKind::AddrInUse => error
                .why("another program has this port; perhaps the agent of another directory, for each needs its own")
                .remedy(format!(
                    "choose another one with --metrics, or see who has it: ss -ltnp 'sport = :{}'",
                    address.port()
                )),
            _ => error.why(why).remedy("choose another address with --metrics, or leave it out"),
        };
        error.data("nothing was begun")
    })
}

fn token_error(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::new(format!("the token of the metrics, {}, cannot be used", path.display()))
        .why(why)
        .data("nothing was begun")
}

/// One that others could read would be no secret, one that they could write would be theirs.
fn read_token(path: &Path) -> Result<Vec<u8>> {
    let refuse = |why: String| {
        token_error(path, why).remedy(
            "make one that is yours: (umask 077; openssl rand -hex 32 >FILE); chgrp and chmod 640 let a group read it",
        )
    };
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|why| refuse(why.to_string()))?;
    let meta = file.metadata().map_err(|why| refuse(why.to_string()))?;
    let me = rustix::process::geteuid().as_raw();
    if !meta.is_file() {
        return Err(refuse("it is no file".into()));
    }
    if meta.uid() != me && meta.uid() != 0 {
        return Err(refuse(format!("it belongs to user {}", meta.uid())));
    }
    if meta.mode() & 0o027 != 0 {
        return Err(refuse(format!("its mode is {:04o}: others can read or write it", meta.mode() & 0o7777)));
    }
    let mut text = Vec::new();
    file.take(TOKEN_BYTES_MAX).read_to_end(&mut text).map_err(|why| refuse(why.to_string()))?;
    let token = text.trim_ascii();
    if token.len() < 16 || !token.iter().all(u8::is_ascii_graphic) {
        return Err(refuse("it has to be one word of at least 16 letters or digits".into()));
    }
    Ok(token.to_vec())
}

/// The one in the root of journals and sockets, for all agents of the user, and so that what reads it need not be told anew.
fn own_token(state: &Path) -> Result<Vec<u8>> {
    let path = state.join(TOKEN_NAME);
    if !path.exists() {
        make_token(&path).map_err(|why| token_error(&path, why).remedy("name a file with --metrics-token-file"))?;
    }
    read_token(&path)
}

/// Whole or not at all; who makes one at the same moment has made it.
fn make_token(path: &Path) -> io::Result<()> {
    let mut bytes = [0_u8; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut new = path.as_os_str().to_owned();
    new.push(format!("-{}", std::process::id()));
    let new = PathBuf::from(new);
    let written = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new);
    let made = written.and_then(|mut file| writeln!(file, "{text}")).and_then(|()| fs::hard_link(&new, path));
    // The other name is enough.
    let _ = fs::remove_file(&new);
    match made {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
