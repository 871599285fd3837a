//! One request and its further tries. Requests about names go to the namenode. Requests about content it redirects to a
//! datanode of its choice, to which the second request goes.
//!
//! The dangers that it avoids: retries that overload a failing server (they are few, with growing random pauses, and limited in
//! time); a dead datanode that the namenode still uses (the next try names it, so that another one is chosen).

use std::borrow::Cow;
use std::io::{self, Read};
use std::time::Duration;

use percent_encoding::utf8_percent_encode;
use ureq::http::header::{CONTENT_LENGTH, LOCATION, WWW_AUTHENTICATE};
use ureq::http::{HeaderMap, Method, Request};
use ureq::{Agent, SendBody};

use super::failure::Failure;
use super::place::Place;
use crate::http::{self, Feeder, IN_PATH, IN_QUERY, part_of};
use crate::object::Body;
use surgetank_types::clock::tick;
use surgetank_types::error::{Errno, Error};
use surgetank_types::sync::{Mutex, PoisonError};

/// Longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(4);

/// One request.
pub struct Ask<'a> {
    method: Method,
    operation: &'static str,
    /// Below the store's root; absolute for an inode number.
    path: Cow<'a, str>,
    query: Vec<(&'static str, Cow<'a, str>)>,
    again: bool,
}

impl<'a> Ask<'a> {
    fn new(method: Method, operation: &'static str, path: impl Into<Cow<'a, str>>) -> Self {
        Self { method, operation, path: path.into(), query: Vec::new(), again: true }
    }
    pub fn get(operation: &'static str, path: impl Into<Cow<'a, str>>) -> Self {
        Self::new(Method::GET, operation, path)
    }
    pub fn put(operation: &'static str, path: impl Into<Cow<'a, str>>) -> Self {
        Self::new(Method::PUT, operation, path)
    }
    pub fn delete(path: impl Into<Cow<'a, str>>) -> Self {
        Self::new(Method::DELETE, "DELETE", path)
    }
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<Cow<'a, str>>) -> Self {
        self.query.push((name, value.into()));
        self
    }
    /// A single try: the caller has its own retries.
    #[must_use]
    pub fn once(mut self) -> Self {
        self.again = false;
        self
    }
}

pub struct Answer {
    status: u16,
    headers: HeaderMap,
    body: ureq::Body,
}

impl Answer {
    pub fn text(self) -> Result<Vec<u8>, Failure> {
        match http::text_of(self.body) {
            Ok(Some(text)) => Ok(text),
            Ok(None) => Err(Failure::ours(Errno::IO, "the answer has no end")),
            Err(_) => Err(Failure::garbled("the answer was cut short")),
        }
    }

    /// The content, as it arrives, and its announced length.
    pub fn content(self) -> (impl Read, Option<u64>) {
        let length = self.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        (self.body.into_reader(), length)
    }

    fn refusal(self) -> Failure {
        let negotiates = self.headers.get_all(WWW_AUTHENTICATE).iter().any(|scheme| scheme.as_bytes() == b"Negotiate");
        let status = self.status;
        Failure::refused(status, &self.text().unwrap_or_default(), negotiates)
    }
}

pub struct Wire {
    agent: Agent,
    pub place: Place,
    trouble: Mutex<Option<String>>,
}

impl Wire {
    pub fn new(place: Place) -> Result<Self, Error> {
        let limits = &place.limits;
        let (connect, progress) = (limits.connect, limits.progress);
        let line = http::Line { endpoint: &place.endpoint, connect, progress, authorities: None };
        Ok(Self { agent: http::agent(&line)?, place, trouble: Mutex::default() })
    }

    /// The namenode's answer.
    pub fn ask(&self, ask: &Ask<'_>) -> Result<Vec<u8>, Failure> {
        self.tries(ask, &mut |_| self.name_node(ask, None)?.text())
    }

    /// A datanode's answer. (`take` may be called again, and then starts over.)
    pub fn content<T>(
        &self,
        ask: &Ask<'_>,
        body: Option<&dyn Body>,
        mut take: impl FnMut(Answer) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.tries(ask, &mut |dead: &mut Option<String>| {
            let sent_on = self.name_node(ask, dead.as_deref());
            let answer = match sent_on {
                // There is no other datanode.
                Err(why) if dead.take().is_some() && why.is(Errno::AGAIN) => self.name_node(ask, None)?,
                answer => answer?,
            };
            if answer.status != 307 {
                return Err(Failure::ours(Errno::IO, "the server does not redirect: it is not a namenode"));
            }
            let to = answer.headers.get(LOCATION).and_then(|value| Some(value.to_str().ok()?.to_owned()));
            let to = to.ok_or_else(|| Failure::garbled("the server redirects without an address"))?;
            answer.text()?;
            let sent = self.send(&ask.method, &to, body, true);
            if sent.as_ref().is_err_and(|why| why.status == 0 && why.again) {
                let authority = to.parse::<ureq::http::Uri>().ok().and_then(|uri| Some(uri.authority()?.to_string()));
                *dead = authority;
            }
            take(sent?)
        })
    }

    fn name_node(&self, ask: &Ask<'_>, dead: Option<&str>) -> Result<Answer, Failure> {
        self.send(&ask.method, &self.uri(ask, dead), None, false)
    }

    fn tries<T>(
        &self,
        ask: &Ask<'_>,
        once: &mut dyn FnMut(&mut Option<String>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let limits = &self.place.limits;
        let (begun, mut pause, mut unsure, mut nth) = (tick(), limits.pause, false, 1);
        let mut dead = None;
        loop {
            let mut why = match once(&mut dead) {
                Ok(answer) => return Ok(answer),
                Err(why) => why,
            };
            why.unsure |= unsure;
            unsure = why.unsure;
            if !ask.again || !why.again || nth >= limits.tries || begun.elapsed() >= limits.all_tries {
                return Err(why);
            }
            tracing::debug!(operation = ask.operation, nth, "another try: {why}");
            surgetank_types::sync::thread::sleep(part_of(pause).min(PAUSE_MAX));
            (pause, nth) = (pause * 3, nth + 1);
        }
    }

    fn send(&self, method: &Method, uri: &str, body: Option<&dyn Body>, patient: bool) -> Result<Answer, Failure> {
        let request = Request::builder().method(method.clone()).uri(uri);
        let bad = |_| Failure::ours(Errno::INVAL, "it cannot be part of a URL");
        let work = if patient { self.place.limits.work } else { self.place.limits.progress };
        let answer = if *method == Method::PUT {
            let nothing: &[u8] = b"";
            let body = body.unwrap_or(&nothing);
            let mut feeder = Feeder::new(body, &|_| {});
            let request = request.header(CONTENT_LENGTH, body.len());
            let request = request.body(SendBody::from_reader(&mut feeder)).map_err(bad)?;
            let answer = self.agent.run(self.agent.configure_request(request).timeout_per_read(Some(work)).build());
            if let Some(why) = feeder.failed {
                return Err(Failure::of_source(why));
            }
            answer
        } else {
            self.agent.run(request.body(()).map_err(bad)?)
        };
        let (parts, body) = answer.map_err(|why| Failure::unanswered(&why))?.into_parts();
        let answer = Answer { status: parts.status.as_u16(), headers: parts.headers, body };
        match answer.status {
            200..=299 | 307 => Ok(answer),
            _ => Err(answer.refusal()),
        }
    }

    /// The path, as the server has it.
    pub fn whole(&self, path: &str) -> String {
        match (path.strip_prefix('/'), path) {
            (Some(_), _) => path.to_owned(),
            (None, "") if self.place.root.is_empty() => "/".to_owned(),
            (None, "") => self.place.root.clone(),
            (None, _) => format!("{}/{path}", self.place.root),
        }
    }

    fn uri(&self, ask: &Ask<'_>, dead: Option<&str>) -> String {
        let mut uri = format!("{}/webhdfs/v1", self.place.endpoint);
        uri.extend(utf8_percent_encode(&self.whole(&ask.path), IN_PATH));
        uri.push_str("?op=");
        uri.push_str(ask.operation);
        uri.push_str("&user.name=");
        uri.extend(utf8_percent_encode(&self.place.user, IN_QUERY));
        let dead = dead.map(|dead| ("excludedatanodes", Cow::Borrowed(dead)));
        for (name, value) in ask.query.iter().chain(&dead) {
            uri.push('&');
            uri.push_str(name);
            uri.push('=');
            uri.extend(utf8_percent_encode(value, IN_QUERY));
        }
        uri
    }

    /// The error for the caller: the errno; the server's message goes to the log.
    pub fn report(&self, path: &str, why: Failure) -> io::Error {
        let usual = [Errno::NOENT, Errno::EXIST, Errno::NOTEMPTY, Errno::NODATA].contains(&why.errno);
        if !usual && why.source.is_none() {
            let text = format!("{}/{path}: {why}", self.place);
            tracing::warn!("{text}");
            *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
        }
        why.into_io()
    }
}
