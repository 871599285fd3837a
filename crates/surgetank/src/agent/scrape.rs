//! The port where Prometheus fetches the metrics: HTTP/1.1, one path, one thread for all clients.
//!
//! ```text
//! accepted ─► Asking (until the request's head is whole) ─► Answering ─► Leaving (further input is thrown away) ─► closed
//! ```
//! The port opens before the supervisor forks ([`super::ground`]), so all agents share it in order. A client that
//! connects while one agent replaces another waits in the same queue. The token also stays as it was then.
//!
//! The first danger that it avoids: a client sends nothing, sends without end or never reads, and so blocks other
//! clients. Each connection ends within `TIMEOUT`. The second danger: another user of the machine learns about a run.
//! Without the token the agent reveals and computes nothing.

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

/// The limit from the connection to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(5);
const CONNECTIONS_MAX: usize = 32;
/// The limit of a request, up to the empty line. Prometheus sends 300 bytes.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// This much further input is read and thrown away: an earlier close would take the answer back.
const REST_BYTES_MAX: usize = 64 << 10;
const TOKEN_BYTES_MAX: u64 = 4 << 10;
const TOKEN_NAME: &str = "metrics-token";

pub(crate) struct Port {
    listener: TcpListener,
    /// `None`: every client is answered.
    token: Option<Vec<u8>>,
}

/// The kind of request, decided before the metrics are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The head is not complete yet.
    More,
    /// A request for the metrics, with the token if one is needed.
    Metrics {
        /// The head of the answer alone (HEAD).
        head_only: bool,
    },
    /// A request that gets an error.
    Refused(Refused),
}

/// The reason why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Not HTTP.
    Malformed,
    /// The head has more than [`HEAD_BYTES_MAX`] bytes.
    TooLong,
    /// The token is missing or wrong.
    NoToken,
    /// The path is not `/metrics`.
    OtherPath,
    /// The method is neither GET nor HEAD.
    OtherMethod,
}

impl Refused {
    /// Status, further lines of the head, and the text for a person.
    fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Malformed => ("400 Bad Request", "", "this is not an HTTP/1.1 request"),
            Self::TooLong => ("431 Request Header Fields Too Large", "", "the request is too long"),
            Self::NoToken => (
                "401 Unauthorized",
                "WWW-Authenticate: Bearer\r\n",
                "the metrics need the token: Authorization: Bearer TOKEN",
            ),
            Self::OtherPath => ("404 Not Found", "", "there is nothing here but /metrics"),
            Self::OtherMethod => ("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "the metrics can only be read"),
        }
    }
}

/// Parses the beginning of a request.
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

/// Compares in a time that does not reveal how much of the token is right.
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
    /// Proceeds as far as possible without waiting; false at the end.
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
                            // The client may have closed: then no connection is left to shut down.
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
    /// Opens the port if the configuration wants one. It opens before any mount, so that a port in use is reported
    /// then.
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

    /// Answers until the process ends. `metrics` is called once for each answer.
    pub fn serve(&self, metrics: &dyn Fn() -> String) {
        let mut clients: Vec<Client> = Vec::new();
        loop {
            let now = clock::tick();
            let next = clients.iter().map(|client| client.until.saturating_duration_since(now)).min();
            let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
            fds.extend(clients.iter().map(|client| PollFd::new(&client.stream, client.waits_for())));
            let timeout = next.and_then(|left| rustix::time::Timespec::try_from(left).ok());
            // An interrupted poll means the same as no event.
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
                let mut client = Client { stream, until: clock::tick() + TIMEOUT, state: State::Asking { head } };
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
                // The process is probably out of descriptors: give clients time to close some.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// The connection to close when there are too many: a random one of those that are not being answered, if any.
fn unlucky(clients: &[Client]) -> usize {
    let mut bytes = [0_u8; 8];
    // Without a random number it is usually one of the newest: a flood would push out the oldest.
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
                    "choose another one with --metrics, or find the process that has it: ss -ltnp 'sport = :{}'",
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

/// A token that other users could read would not be a secret; one that they could write would be theirs.
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
        return Err(refuse("it is not a file".into()));
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

/// The token in the root of journals and sockets. All agents of the user share it, so that a reader needs no new token
/// for each.
fn own_token(state: &Path) -> Result<Vec<u8>> {
    let path = state.join(TOKEN_NAME);
    if !path.exists() {
        make_token(&path).map_err(|why| token_error(&path, why).remedy("name a file with --metrics-token-file"))?;
    }
    read_token(&path)
}

/// Writes the token atomically; if another process makes one at the same moment, that one counts.
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
