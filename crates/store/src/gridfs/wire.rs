//! Connections, and their messages: one message (OP_MSG) there, one back.
//!
//! One thread uses a connection at a time. A connection with an error is closed. A message can be sent again, because everything in
//! it may happen twice (except for `Command::once`). Each carries a CRC-32C, which the server compares before it acts. (Not over
//! TLS, which has its own.)
//!
//! The danger that this avoids: a server that is no longer the primary. The driver asks at each connection, and the server
//! refuses each write.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crc_fast::CrcAlgorithm;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::bson::{Document, Value, fields};
use super::failure::Failure;
use super::place::Place;
use super::scram::Exchange;
use surgetank_types::error::Error;
use surgetank_types::sync::atomic::{AtomicU64, Ordering};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The largest number of idle connections.
const IDLE_MAX: usize = 32;
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// The standard's limit, which servers report, too.
const MESSAGE_BYTES_MAX: usize = 48_000_000;
const OP_MSG: i32 = 2013;
const HEAD_BYTES: usize = 16;
const CHECKSUM_PRESENT: u32 = 1;
/// MongoDB 4.4.
const VERSION_MIN: i64 = 9;

/// Counts since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Round trips; every try counts.
    pub requests: u64,
    /// Requests that were sent again after a failure.
    pub tries_again: u64,
    /// Connections that were made.
    pub connections: u64,
}

#[derive(Default)]
pub struct Counters {
    requests: AtomicU64,
    tries_again: AtomicU64,
    connections: AtomicU64,
}

impl Counters {
    pub fn read(&self) -> Counts {
        Counts {
            requests: self.requests.load(Ordering::Relaxed),
            tries_again: self.tries_again.load(Ordering::Relaxed),
            connections: self.connections.load(Ordering::Relaxed),
        }
    }
}

/// A command, and the documents in a section of their own.
pub struct Command {
    pub body: Document,
    pub documents: Option<(&'static str, Vec<Document>)>,
    /// The command must not be sent twice.
    pub once: bool,
    /// The command is not sent after this time.
    pub until: Option<Instant>,
}

impl From<Document> for Command {
    fn from(body: Document) -> Self {
        Self { body, documents: None, once: false, until: None }
    }
}

impl Command {
    fn message(&self, with_sum: bool) -> Vec<u8> {
        let mut out = vec![0; HEAD_BYTES];
        out.extend_from_slice(&if with_sum { CHECKSUM_PRESENT } else { 0 }.to_le_bytes());
        out.push(0);
        self.body.write(&mut out);
        if let Some((name, documents)) = &self.documents {
            out.push(1);
            let start = out.len();
            out.extend_from_slice(&[0; 4]);
            out.extend_from_slice(name.as_bytes());
            out.push(0);
            documents.iter().for_each(|document| document.write(&mut out));
            let length = number(out.len() - start);
            out[start..start + 4].copy_from_slice(&length);
        }
        let whole = number(out.len() + if with_sum { 4 } else { 0 });
        out[..4].copy_from_slice(&whole);
        out[12..HEAD_BYTES].copy_from_slice(&OP_MSG.to_le_bytes());
        if with_sum {
            let sum = sum_of(&out);
            out.extend_from_slice(&sum);
        }
        out
    }
}

fn number(bytes: usize) -> [u8; 4] {
    i32::try_from(bytes).unwrap_or(i32::MAX).to_le_bytes()
}

fn sum_of(bytes: &[u8]) -> [u8; 4] {
    let sum = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes);
    (sum as u32).to_le_bytes()
}

/// A socket with a limit for each operation and a limit for the whole request.
struct Timed {
    socket: TcpStream,
    progress: Duration,
    until: Instant,
}

impl Timed {
    fn timeout(&self) -> std::io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(surgetank_types::clock::tick());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left.min(self.progress)))
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.socket.set_read_timeout(self.timeout()?)?;
        self.socket.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.socket.set_write_timeout(self.timeout()?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.socket.flush()
    }
}

enum Stream {
    Plain(Timed),
    Tls(Box<StreamOwned<ClientConnection, Timed>>),
}

impl Stream {
    fn begin(&mut self, limit: Duration) {
        let timed = match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &mut stream.sock,
        };
        timed.until = surgetank_types::clock::tick() + limit;
    }

    fn ask(&mut self, message: &[u8]) -> std::io::Result<Vec<u8>> {
        match self {
            Self::Plain(stream) => exchange(stream, message),
            Self::Tls(stream) => exchange(stream, message),
        }
    }
}

/// The answer without its head.
fn exchange(stream: &mut (impl Read + Write), message: &[u8]) -> std::io::Result<Vec<u8>> {
    stream.write_all(message)?;
    stream.flush()?;
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head)?;
    let strange = || {
        std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the answer does not follow the protocol of MongoDB")
    };
    let field = |at: usize| i32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let length = usize::try_from(field(0)).map_err(|_| strange())?;
    if field(12) != OP_MSG || !(HEAD_BYTES..=MESSAGE_BYTES_MAX + (1 << 20)).contains(&length) {
        return Err(strange());
    }
    let mut rest = vec![0; length - HEAD_BYTES];
    stream.read_exact(&mut rest)?;
    let flags = u32::from_le_bytes(*rest.first_chunk::<4>().ok_or_else(strange)?);
    if flags & CHECKSUM_PRESENT != 0 {
        let at = rest.len().saturating_sub(4);
        let sum = rest.split_off(at);
        let whole = [&head[..], &rest].concat();
        if sum != sum_of(&whole) {
            return Err(strange());
        }
    }
    Ok(rest)
}

/// The server's description of itself.
#[derive(Debug, Clone, Default)]
pub struct Hello {
    pub is_replicated: bool,
}

pub struct Wire {
    place: Place,
    tls: Option<Arc<ClientConfig>>,
    idle: Mutex<Vec<Stream>>,
    pub counters: Counters,
}

impl Wire {
    pub fn new(place: &Place) -> Result<Self, Error> {
        let tls = if place.tls { Some(Arc::new(tls(place)?)) } else { None };
        Ok(Self { place: place.clone(), tls, idle: Mutex::default(), counters: Counters::default() })
    }

    /// The answer. Repeats the request while that may help. Errors: the server refuses it, or does not answer.
    pub fn ask(&self, command: &Command) -> Result<Document, Failure> {
        let message = command.message(!self.place.tls);
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(Failure::ours(
                surgetank_types::error::Errno::FBIG,
                "the message is longer than the server accepts",
            ));
        }
        let begun = surgetank_types::clock::tick();
        let limits = &self.place.limits;
        let (mut pause, mut nth) = (limits.pause, 1);
        loop {
            let why = match self.ask_once(&message, command.until) {
                Ok(answer) => return Ok(answer),
                Err(why) => why,
            };
            let is_last = command.once || nth >= limits.tries || begun.elapsed() >= limits.all_tries;
            if !why.again || is_last {
                return Err(why);
            }
            tracing::debug!(nth, "another try: {why}");
            surgetank_types::sync::thread::sleep(part_of(pause).min(PAUSE_MAX));
            self.counters.tries_again.fetch_add(1, Ordering::Relaxed);
            (pause, nth) = ((pause * 3).min(PAUSE_MAX * 3), nth + 1);
        }
    }

    fn ask_once(&self, message: &[u8], until: Option<Instant>) -> Result<Document, Failure> {
        let idle = self.idle().pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => self.connect()?,
        };
        if until.is_some_and(|until| surgetank_types::clock::tick() >= until) {
            return Err(Failure::too_slow());
        }
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        stream.begin(self.place.limits.request);
        let answer = stream.ask(message).map_err(|why| {
            // When one connection breaks, the idle ones are usually broken, too. Each would cost a try.
            self.idle().clear();
            Failure::of_io(&why)
        })?;
        let answer = answer_of(&answer);
        // A connection to a former primary is not used again.
        if !answer.as_ref().is_err_and(|why| why.again) {
            let mut idle = self.idle();
            if idle.len() < IDLE_MAX {
                idle.push(stream);
            }
        }
        answer
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connect(&self) -> Result<Stream, Failure> {
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        let Place { host, port, limits, .. } = &self.place;
        let plain = || -> std::io::Result<Timed> {
            let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, format!("{host} has no address"));
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, limits.connect) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        let until = surgetank_types::clock::tick() + limits.request;
                        return Ok(Timed { socket: stream, progress: limits.progress, until });
                    }
                    Err(why) => last = why,
                }
            }
            Err(last)
        };
        let plain = plain().map_err(|why| Failure::of_io(&why))?;
        let mut stream = match &self.tls {
            None => Stream::Plain(plain),
            Some(config) => {
                let name = ServerName::try_from(host.clone()).map_err(|_| {
                    Failure::ours(
                        surgetank_types::error::Errno::INVAL,
                        "the host is not a name that a certificate can have",
                    )
                })?;
                let connection = ClientConnection::new(Arc::clone(config), name)
                    .map_err(|why| Failure::ours(surgetank_types::error::Errno::IO, &why.to_string()))?;
                Stream::Tls(Box::new(StreamOwned::new(connection, plain)))
            }
        };
        greet(&mut |command| self.ask_on(&mut stream, command))?;
        self.log_in(&mut stream)?;
        Ok(stream)
    }

    fn ask_on(&self, stream: &mut Stream, command: Document) -> Result<Document, Failure> {
        let message = Command::from(command).message(!self.place.tls);
        answer_of(&stream.ask(&message).map_err(|why| Failure::of_io(&why))?)
    }

    /// Asks for the server's description.
    pub fn hello(&self) -> Result<Hello, Failure> {
        greet(&mut |command| self.ask(&command.into()))
    }

    fn log_in(&self, stream: &mut Stream) -> Result<(), Failure> {
        let Some(user) = &self.place.user else { return Ok(()) };
        let password = self.place.password().map_err(|why| Failure::login_refused(&why.why))?;
        let password =
            password.ok_or_else(|| Failure::login_refused("the URL names a user, and no password is set"))?;
        let mut nonce = [0; 24];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(|why| Failure::ours(why, "the kernel gives no random numbers"))?;
        let mut exchange = Exchange::new(user, &password, &nonce)?;
        let payload = |text: String| Value::Binary(text.into_bytes());
        let said = |answer: &Document| match answer.get("payload") {
            Some(Value::Binary(bytes)) => String::from_utf8(bytes.clone()).map_err(|_| Failure::garbled()),
            _ => Err(Failure::garbled()),
        };
        let source = self.place.auth_source.as_str();
        let start = fields! {
            "saslStart": 1, "mechanism": "SCRAM-SHA-256", "payload": payload(exchange.first()),
            "options": fields! { "skipEmptyExchange": true }, "$db": source,
        };
        let answer = self.ask_on(stream, start)?;
        let id = answer.get("conversationId").cloned().unwrap_or(Value::Int(1));
        let resume = |text: String| {
            fields! {
                "saslContinue": 1, "conversationId": &id, "payload": payload(text), "$db": source,
            }
        };
        let mut answer = self.ask_on(stream, resume(exchange.second(&said(&answer)?)?))?;
        exchange.end(&said(&answer)?)?;
        // Some servers need one more, empty message.
        if answer.get("done") != Some(&Value::Bool(true)) {
            answer = self.ask_on(stream, resume(String::new()))?;
        }
        match answer.get("done") {
            Some(Value::Bool(true)) => Ok(()),
            _ => Err(Failure::garbled()),
        }
    }
}

fn greet(ask: &mut dyn FnMut(Document) -> Result<Document, Failure>) -> Result<Hello, Failure> {
    let answer = ask(fields! { "hello": 1, "$db": "admin" })?;
    if answer.number("maxWireVersion").is_none_or(|version| version < VERSION_MIN) {
        return Err(Failure::ours(surgetank_types::error::Errno::OPNOTSUPP, "the server is older than MongoDB 4.4"));
    }
    if answer.get("isWritablePrimary") != Some(&Value::Bool(true)) {
        let primary = answer.text("primary").map_or(String::new(), |primary| format!("; the primary is {primary}"));
        return Err(Failure::not_serving(&format!("the server is not the primary{primary}")));
    }
    Ok(Hello { is_replicated: answer.text("setName").is_some() })
}

/// The document of the first section. Errors: the server refuses the command.
fn answer_of(bytes: &[u8]) -> Result<Document, Failure> {
    let sections = bytes.get(4..).ok_or_else(Failure::garbled)?;
    let (0, document) = sections.split_first().ok_or_else(Failure::garbled)? else { return Err(Failure::garbled()) };
    let answer = Document::read(document)?.0;
    let failed = |error: &Document| {
        let message = error.text("errmsg").unwrap_or("the server gives no reason");
        Failure::refused(error.number("code").unwrap_or(1), message)
    };
    if answer.number("ok") != Some(1) {
        return Err(failed(&answer));
    }
    // Of several errors, one that another try cannot help counts most.
    let errors = answer.array("writeErrors").iter().filter_map(|error| match error {
        Value::Document(error) => Some(failed(error)),
        _ => None,
    });
    let weight = |why: &Failure| (why.meaning != super::failure::Meaning::Twice, !why.again);
    let why = errors.max_by_key(weight);
    // Most servers may not have the existing document yet.
    let not_kept = answer.document("writeConcernError").map(failed);
    match why.into_iter().chain(not_kept).max_by_key(weight) {
        Some(why) => Err(why),
        None => Ok(answer),
    }
}

/// Reads an answer, for `fuzz/`.
#[cfg(fuzzing)]
pub fn read_answer(bytes: &[u8]) {
    let _ = answer_of(bytes);
}

fn tls(place: &Place) -> Result<ClientConfig, Error> {
    let failed = |why: &dyn std::fmt::Display| Error::new(format!("the store {place} cannot be used")).why(why);
    let mut roots = RootCertStore::empty();
    match &place.authority_file {
        Some(path) => {
            for certificate in CertificateDer::pem_slice_iter(&place.read(path)?) {
                let certificate = certificate.map_err(|why| failed(&format!("{}: {why}", path.display())))?;
                roots.add(certificate).map_err(|why| failed(&format!("{}: {why}", path.display())))?;
            }
        }
        // Malformed certificates of the system are not trusted.
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(
            failed(&"no trusted certificate authority is configured").remedy("name its certificate: tlsCAFile=PATH")
        );
    }
    // The same provider as in the other drivers.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(config.map_err(|why| failed(&why))?.with_root_certificates(roots).with_no_client_auth())
}

/// A random part of the pause: clients that failed together must not return together.
fn part_of(pause: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0);
    Duration::from_nanos(random % u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gridfs::failure::Meaning;

    fn answer(document: &Document) -> Result<Document, Failure> {
        let mut bytes = vec![0; 5];
        document.write(&mut bytes);
        answer_of(&bytes)
    }

    #[test]
    fn answer_maps_to_its_failure() {
        assert!(answer(&fields! { "ok": Value::Double(1.0), "n": 1 }).is_ok());
        assert!(
            answer(&fields! { "ok": 0, "errmsg": "no", "code": 13 })
                .unwrap_err()
                .is(surgetank_types::error::Errno::ACCESS)
        );
        let twice = fields! { "index": 0, "code": 11000, "errmsg": "E11000" };
        let full = fields! { "index": 1, "code": 14031, "errmsg": "full" };
        let errors = |errors: Vec<Value>| fields! { "ok": 1, "writeErrors": errors };
        let failed = answer(&errors(vec![twice.clone().into(), twice.clone().into()])).unwrap_err();
        assert_eq!(failed.meaning, Meaning::Twice);
        let failed = answer(&errors(vec![twice.clone().into(), full.into(), twice.into()])).unwrap_err();
        assert!(failed.is(surgetank_types::error::Errno::NOSPC), "{failed}");
        let not_kept = fields! { "ok": 1, "writeConcernError": fields! { "code": 64, "errmsg": "waiting for replication timed out" } };
        assert!(answer(&not_kept).unwrap_err().again, "it is not durable");
        let both = errors(vec![fields! { "code": 11000, "errmsg": "E11000" }.into()])
            .with("writeConcernError", not_kept.get("writeConcernError").unwrap());
        assert!(answer(&both).unwrap_err().again, "nor is what is there already");
        let both = both.with("writeErrors", vec![fields! { "code": 14031, "errmsg": "full" }.into()]);
        assert!(answer(&both).unwrap_err().is(surgetank_types::error::Errno::NOSPC), "no other try helps");
    }

    #[test]
    fn message_has_its_length_and_its_checksum() {
        let command =
            Command { documents: Some(("documents", vec![fields! { "a": 1 }])), ..fields! { "insert": "x" }.into() };
        let message = command.message(true);
        assert_eq!(message[..4], number(message.len()));
        let (text, sum) = message.split_at(message.len() - 4);
        assert_eq!(sum, sum_of(text));
        assert_eq!(command.message(false).len(), text.len());
        // "123456789", the check value of CRC-32C.
        assert_eq!(sum_of(b"123456789"), 0xe306_9283_u32.to_le_bytes());
    }
}
