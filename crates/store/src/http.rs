//! What every driver needs that speaks HTTP: connections that are kept, bodies that are sent in small pieces from their source,
//! answers limited in size, and the meaning of a missing answer.
//!
//! The danger that it avoids: unbounded memory and time. No body is ever whole in memory, and every wait has a limit.

mod listening;
mod names;

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC};
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::unversioned::transport::{ConnectProxyConnector, Connector, RustlsConnector, TcpConnector};

use self::listening::Listening;
use self::names::Names;
use super::object::Body;
use surgetank_types::error::{Errno, Error};

/// Of one connection, in each direction: large, so that a body needs few system calls.
pub const BUFFER_BYTES: usize = 128 << 10;
/// Largest answer that is not content: a page of 1,000 names of 1,024 bytes, each byte written as three.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Connections kept open between requests; more exist only while more threads ask.
const IDLE_CONNECTIONS: usize = 32;

/// All bytes but those that stand for themselves in a URL, as signatures require.
pub const IN_QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
pub const IN_PATH: &AsciiSet = &IN_QUERY.remove(b'/');

/// How a server is reached.
pub struct Line<'a> {
    /// `http://host:port` or `https://host`.
    pub endpoint: &'a str,
    pub connect: Duration,
    /// Longest time without any progress.
    pub progress: Duration,
    /// PEM file with the only trusted authorities, and the name of what named it.
    pub authorities: Option<(&'static str, &'a Path)>,
}

pub fn agent(line: &Line<'_>) -> Result<Agent, Error> {
    let mut config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("surgetank/", env!("CARGO_PKG_VERSION")))
        .no_delay(true)
        .input_buffer_size(BUFFER_BYTES)
        .output_buffer_size(BUFFER_BYTES)
        .max_response_header_size(64 << 10)
        .max_idle_connections(IDLE_CONNECTIONS)
        .max_idle_connections_per_host(IDLE_CONNECTIONS)
        .timeout_connect(Some(line.connect))
        .timeout_resolve(Some(line.connect))
        .timeout_per_read(Some(line.progress))
        .timeout_per_write(Some(line.progress));
    if line.endpoint.starts_with("https:") {
        config = config.tls_config(TlsConfig::builder().root_certs(roots(line.authorities)?).build());
    }
    if is_loopback(line.endpoint) {
        // Whatever the environment says about proxies: this machine is not behind one.
        config = config.proxy(None);
    }
    // Below TLS, which reads nothing while it has something to write.
    let below = ConnectProxyConnector::default().chain(TcpConnector::default()).chain(Listening);
    let connector = below.chain(RustlsConnector::default());
    Ok(Agent::with_parts(config.build(), connector, Names::default()))
}

fn is_loopback(endpoint: &str) -> bool {
    let host = endpoint.parse::<ureq::http::Uri>().ok().and_then(|uri| Some(uri.host()?.to_owned()));
    host.is_some_and(|host| {
        let ip = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
        host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
    })
}

/// The trusted authorities: the file that the user names, else the system's, else the built-in ones.
fn roots(authorities: Option<(&'static str, &Path)>) -> Result<RootCerts, Error> {
    let Some((named_by, path)) = authorities else {
        let found = rustls_native_certs::load_native_certs().certs;
        let certificates: Vec<_> = found.iter().map(|one| Certificate::from_der(one).to_owned()).collect();
        return Ok(if certificates.is_empty() { RootCerts::WebPki } else { certificates.into() });
    };
    let wrong = |why: String| {
        Error::new(format!("the certificates of {named_by}, {}, cannot be used", path.display())).why(why)
    };
    let pem = std::fs::read(path).map_err(|why| wrong(why.to_string()))?;
    let mut certificates = Vec::new();
    for item in ureq::tls::parse_pem(&pem) {
        if let ureq::tls::PemItem::Certificate(one) = item.map_err(|why| wrong(why.to_string()))? {
            certificates.push(one);
        }
    }
    if certificates.is_empty() { Err(wrong("there is none in it".into())) } else { Ok(certificates.into()) }
}

/// All of an answer that is not content; the connection is then free again. `None` if it exceeds the limit.
pub fn text_of(mut body: ureq::Body) -> io::Result<Option<Vec<u8>>> {
    let mut text = Vec::new();
    body.as_reader().take(ANSWER_BYTES_MAX).read_to_end(&mut text)?;
    Ok(Some(text).filter(|text| (text.len() as u64) < ANSWER_BYTES_MAX))
}

/// Reads directly into the connection's buffer, and keeps the error of the source apart from those of the connection.
pub struct Feeder<'a> {
    body: &'a dyn Body,
    at: u64,
    /// Called with the number of bytes sent.
    sent: &'a dyn Fn(u64),
    pub failed: Option<io::Error>,
}

impl<'a> Feeder<'a> {
    pub fn new(body: &'a dyn Body, sent: &'a dyn Fn(u64)) -> Self {
        Self { body, at: 0, sent, failed: None }
    }
}

impl Read for Feeder<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut count = buffer.len().min(usize::try_from(self.body.len() - self.at).unwrap_or(usize::MAX));
        let turn = self.body.last_byte_waits().filter(|_| count > 0 && self.at + count as u64 == self.body.len());
        if count > 1 && turn.is_some() {
            count -= 1;
        } else if let Some(Err(why)) = turn.map(|turn| turn.wait()) {
            self.failed = Some(why);
            return Err(io::Error::other("a file before it failed: it will not be published"));
        }
        if let Err(why) = self.body.read_at(&mut buffer[..count], self.at) {
            self.failed = Some(why);
            return Err(io::Error::other("the source of the body failed"));
        }
        (self.sent)(count as u64);
        self.at += count as u64;
        Ok(count)
    }
}

/// The meaning of a missing answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Silence {
    pub errno: Errno,
    /// Whether another try may help.
    pub again: bool,
    /// Whether the request may have been carried out.
    pub unsure: bool,
}

/// The meaning of an error without a readable answer.
pub fn silence(why: &ureq::Error) -> Silence {
    use ureq::{Error, Timeout};
    let (errno, again, unsure) = match why {
        Error::Timeout(Timeout::Connect | Timeout::Resolve) => (Errno::TIMEDOUT, true, false),
        Error::Timeout(_) => (Errno::TIMEDOUT, true, true),
        Error::HostNotFound => (Errno::HOSTUNREACH, true, false),
        Error::ConnectionFailed | Error::ConnectProxyFailed(_) => (Errno::CONNREFUSED, true, false),
        // A certificate that is invalid now is still invalid in a second.
        Error::Io(why) if why.kind() == io::ErrorKind::InvalidData => (Errno::IO, false, false),
        Error::Io(why) => {
            let errno = socket_errno(why);
            let refused = [Errno::CONNREFUSED, Errno::HOSTUNREACH, Errno::NETUNREACH].contains(&errno);
            (errno, true, !refused)
        }
        // An answer that is not HTTP: a proxy that fails, a connection that broke in the middle of a header.
        Error::Protocol(_) => (Errno::CONNRESET, true, true),
        _ => (Errno::IO, false, false),
    };
    Silence { errno, again, unsure }
}

fn socket_errno(why: &io::Error) -> Errno {
    match (why.raw_os_error(), why.kind()) {
        (Some(code), _) => Errno::from_raw_os_error(code),
        (None, io::ErrorKind::TimedOut) => Errno::TIMEDOUT,
        (None, io::ErrorKind::ConnectionRefused) => Errno::CONNREFUSED,
        // The name server's refusal has no number.
        (None, io::ErrorKind::NotFound | io::ErrorKind::Other) => Errno::HOSTUNREACH,
        _ => Errno::CONNRESET,
    }
}

/// A random part of the pause: clients that failed together must not return together.
pub fn part_of(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(0);
    Duration::from_nanos(random % u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX).max(1))
}
