//! One request to the server and its answer: names are encoded, the request is signed, the body is sent in small pieces from
//! its source.
//!
//! (Connections, and how bodies are sent and answers read: `store/http`.)

use std::borrow::Cow;
use std::io::{self, Read};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use percent_encoding::utf8_percent_encode;
use sha2::{Digest, Sha256};
use ureq::http::header::{CONTENT_LENGTH, HeaderName, HeaderValue};
use ureq::http::{HeaderMap, Method, Request, Response};
use ureq::{Agent, AsSendBody, SendBody};

use super::counters::{Counters, Kind};
use super::credentials::Credentials;
use super::failure::{Failure, Meaning};
use super::place::{Payload, Place, Style};
use crate::http::{self, BUFFER_BYTES, Feeder, IN_PATH, IN_QUERY};
use crate::object::Body;
use surgetank_types::error::{Errno, Error};

/// SHA-256 of the empty body.
const HASH_OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

pub enum Content<'a> {
    Nothing,
    Text(&'a str),
    Body(&'a dyn Body),
}

/// One request to the server.
pub struct Ask<'a> {
    pub kind: Kind,
    pub method: Method,
    /// The whole key, with the store's prefix; `None`: the bucket.
    pub key: Option<&'a str>,
    pub query: Vec<(&'static str, Cow<'a, str>)>,
    pub headers: Vec<(Cow<'static, str>, String)>,
    pub content: Content<'a>,
    /// Whether one of the headers is a condition.
    pub conditional: bool,
}

impl<'a> Ask<'a> {
    pub fn new(kind: Kind, method: Method, key: Option<&'a str>) -> Self {
        let (query, headers) = (Vec::new(), Vec::new());
        Self { kind, method, key, query, headers, content: Content::Nothing, conditional: false }
    }
    #[must_use]
    pub fn query(mut self, name: &'static str, value: impl Into<Cow<'a, str>>) -> Self {
        self.query.push((name, value.into()));
        self
    }
    #[must_use]
    pub fn header(mut self, name: impl Into<Cow<'static, str>>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
    #[must_use]
    pub fn content(mut self, content: Content<'a>) -> Self {
        self.content = content;
        self
    }
}

pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    body: ureq::Body,
}

impl Answer {
    /// All of an answer that is not content; the connection is then free again.
    pub fn text(self) -> Result<Vec<u8>, Failure> {
        match http::text_of(self.body) {
            Ok(Some(text)) => Ok(text),
            Ok(None) => Err(Failure::ours(Errno::IO, "the answer has no end")),
            Err(_) => Err(Failure::garbled("the answer was cut short")),
        }
    }

    /// The content, as it arrives.
    pub fn reader(self) -> Box<dyn Read + Send> {
        Box::new(self.body.into_reader())
    }

    pub fn refusal(self, ask: &Ask<'_>) -> Failure {
        let status = self.status;
        let header = |name: &str| self.headers.get(name).and_then(|value| value.to_str().ok());
        let wait_seconds = header("retry-after").and_then(|text| text.parse().ok());
        let region = header("x-amz-bucket-region").map(str::to_owned);
        let body = self.text().unwrap_or_default();
        let mut why = Failure::refused(status, &body, ask.conditional);
        why.wait_seconds = wait_seconds;
        match (status, region) {
            (300..=400, Some(region)) if why.code.is_empty() || status < 400 => {
                why.message = format!("the bucket is in another region: use region={region}");
                why.code = "PermanentRedirect".into();
            }
            // Usually expired credentials; the answer to HEAD has no body that could tell.
            (400, _) if ask.kind == Kind::Head => (why.meaning, why.again) = (Meaning::Expired, true),
            _ => {}
        }
        why
    }
}

pub struct Wire {
    agent: Agent,
    credentials: Credentials,
    /// With the bucket; the key follows after a `/`.
    base: String,
    copy_base: String,
    signed_payload: AtomicBool,
    /// Whether bodies may be signed after the server requires it.
    payload: Payload,
    work: Duration,
    pub counters: Counters,
}

impl Wire {
    pub fn new(place: &Place) -> Result<Self, Error> {
        let limits = &place.limits;
        let authorities = place.ca_bundle.as_deref().map(|path| ("AWS_CA_BUNDLE", path));
        let (connect, progress) = (limits.connect, limits.progress);
        let agent = http::agent(&http::Line { endpoint: &place.endpoint, connect, progress, authorities })?;
        Ok(Self {
            agent,
            credentials: Credentials::new(place),
            base: base_of(place),
            copy_base: format!("/{}/", place.bucket),
            signed_payload: (place.payload == Payload::Signed).into(),
            payload: place.payload,
            work: limits.work,
            counters: Counters::default(),
        })
    }

    /// The source of a copy, as its header names it.
    pub fn copy_source(&self, key: &str) -> String {
        format!("{}{}", self.copy_base, utf8_percent_encode(key, IN_PATH))
    }

    /// One try. Any answer counts as one.
    pub fn send(&self, ask: &Ask<'_>) -> Result<Answer, Failure> {
        let hash = match &ask.content {
            Content::Nothing => Cow::Borrowed(HASH_OF_NOTHING),
            Content::Text(text) => Cow::Owned(reqsign_core::hash::hex_sha256(text.as_bytes())),
            Content::Body(body) if self.signed_payload.load(Ordering::Relaxed) => Cow::Owned(hash_of(*body)?),
            Content::Body(_) => Cow::Borrowed("UNSIGNED-PAYLOAD"),
        };
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = ask.method.clone();
        parts.uri =
            self.uri(ask).parse().map_err(|_| Failure::ours(Errno::INVAL, "the key cannot be part of a URL"))?;
        let mut put = |name: &str, value: &str| {
            let name: HeaderName = name.parse().map_err(|_| bad_words())?;
            parts.headers.insert(name, HeaderValue::from_str(value).map_err(|_| bad_words())?);
            Ok(())
        };
        put("x-amz-content-sha256", &hash)?;
        for (name, value) in &ask.headers {
            put(name, value)?;
        }
        self.credentials.sign(&mut parts)?;

        let nothing: &[u8] = b"";
        let text;
        let body: &dyn Body = match &ask.content {
            Content::Nothing => &nothing,
            Content::Text(words) => {
                text = words.as_bytes();
                &text
            }
            Content::Body(body) => *body,
        };
        let count = |bytes| {
            if matches!(ask.content, Content::Body(_)) {
                self.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        let mut feeder = Feeder::new(body, &count);
        self.counters.request(ask.kind);
        let answer = if matches!(ask.method, Method::PUT | Method::POST) {
            parts.headers.insert(CONTENT_LENGTH, body.len().into());
            self.run(ask.kind, Request::from_parts(parts, SendBody::from_reader(&mut feeder)))
        } else {
            self.run(ask.kind, Request::from_parts(parts, ()))
        };
        if let Some(why) = feeder.failed {
            return Err(Failure::of_source(why));
        }
        let (parts, body) = answer.map_err(Failure::unanswered)?.into_parts();
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    fn run(&self, kind: Kind, request: Request<impl AsSendBody>) -> Result<Response<ureq::Body>, ureq::Error> {
        match kind {
            Kind::Complete | Kind::Copy | Kind::PartOf => {
                let patient = self.agent.configure_request(request).timeout_per_read(Some(self.work)).build();
                self.agent.run(patient)
            }
            _ => self.agent.run(request),
        }
    }

    fn uri(&self, ask: &Ask<'_>) -> String {
        let mut uri = self.base.clone();
        if let Some(key) = ask.key {
            uri.push('/');
            uri.extend(utf8_percent_encode(key, IN_PATH));
        }
        for (nth, (name, value)) in ask.query.iter().enumerate() {
            uri.push(if nth == 0 { '?' } else { '&' });
            uri.push_str(name);
            uri.push('=');
            uri.extend(utf8_percent_encode(value, IN_QUERY));
        }
        uri
    }

    /// Drops credentials that have expired by the server's answer.
    pub fn renew_credentials(&self) {
        self.credentials.forget();
    }

    /// Signs bodies from now on. Returns false if they are signed already, or must not be.
    pub fn learn_to_hash(&self) -> bool {
        self.payload == Payload::Auto && !self.signed_payload.swap(true, Ordering::Relaxed)
    }

    /// Whether the signature covers the hash of the body.
    pub fn hashes(&self) -> bool {
        self.signed_payload.load(Ordering::Relaxed)
    }
}

fn bad_words() -> Failure {
    Failure::ours(Errno::INVAL, "the name or the value of a word has characters that a header cannot contain")
}

fn base_of(place: &Place) -> String {
    match (place.style, place.endpoint.split_once("://")) {
        (Style::Virtual, Some((scheme, host))) => format!("{scheme}://{}.{host}", place.bucket),
        _ => format!("{}/{}", place.endpoint, place.bucket),
    }
}

fn hash_of(body: &dyn Body) -> Result<String, Failure> {
    let mut hash = Sha256::new();
    pieces(body, |piece| hash.update(piece)).map_err(Failure::of_source)?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Passes all of a body to `see`, a piece at a time.
pub fn pieces(body: &dyn Body, mut see: impl FnMut(&[u8])) -> io::Result<()> {
    let length = body.len();
    let mut buffer = vec![0; BUFFER_BYTES.min(usize::try_from(length).unwrap_or(BUFFER_BYTES))];
    let mut at = 0;
    while at < length {
        let count = buffer.len().min(usize::try_from(length - at).unwrap_or(buffer.len()));
        body.read_at(&mut buffer[..count], at)?;
        see(&buffer[..count]);
        at += count as u64;
    }
    Ok(())
}

/// Limits the rate of requests.
pub struct Throttle {
    every: Duration,
    next: std::sync::Mutex<std::time::Instant>,
}

impl Throttle {
    pub fn new(requests_per_second: u32) -> Self {
        Self { every: Duration::from_secs(1) / requests_per_second.max(1), next: surgetank_types::clock::tick().into() }
    }

    pub fn wait(&self) {
        let now = surgetank_types::clock::tick();
        let mine = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let mine = now.max(*next);
            *next = mine + self.every;
            mine
        };
        std::thread::sleep(mine - now);
    }
}
