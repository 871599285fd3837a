//! Content that is read while it arrives, and requested again from where it broke off.
//!
//! The danger that it avoids: bytes of two versions in one file. Every further request requires the etag of the first answer.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ureq::http::Method;

use super::answers;
use super::counters::Kind;
use super::failure::Failure;
use super::server::Server;
use super::wire::Ask;
use crate::http::part_of;
use surgetank_types::error::Errno;

pub struct Reading {
    server: Arc<Server>,
    key: String,
    etag: String,
    left: Range<u64>,
    body: Option<Box<dyn Read + Send>>,
    /// Number of breaks since the last byte.
    breaks: u32,
}

impl Reading {
    pub fn begin(server: Arc<Server>, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Self> {
        let (body, found) = open(&server, key, &range, etag).map_err(|why| server.report(key, why))?;
        Ok(Self { server, key: key.to_owned(), etag: found, left: range, body: Some(body), breaks: 0 })
    }

    fn again(&mut self, why: io::Error) -> io::Result<()> {
        self.breaks += 1;
        if self.breaks >= self.server.place.limits.tries {
            return Err(self.server.report(&self.key, Failure::unanswered(ureq::Error::from(why))));
        }
        // The broken connection is closed first.
        self.body = None;
        std::thread::sleep(part_of(self.server.place.limits.pause));
        self.server.wire.counters.tries_again.fetch_add(1, Ordering::Relaxed);
        let (body, _) = open(&self.server, &self.key, &self.left, Some(&self.etag))
            .map_err(|why| self.server.report(&self.key, why))?;
        self.body = Some(body);
        Ok(())
    }
}

impl Read for Reading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = usize::try_from(self.left.end - self.left.start).unwrap_or(usize::MAX).min(buffer.len());
        let buffer = &mut buffer[..length];
        while !buffer.is_empty() {
            let Some(body) = &mut self.body else { return Err(Errno::IO.into()) };
            match body.read(buffer) {
                Ok(0) => self.again(io::ErrorKind::UnexpectedEof.into())?,
                Ok(count) => {
                    self.breaks = 0;
                    self.left.start += count as u64;
                    self.server.wire.counters.received_bytes.fetch_add(count as u64, Ordering::Relaxed);
                    if self.left.is_empty() {
                        // The body's end is only seen by a read after the last byte; then the connection is free again.
                        let _ = body.read(&mut [0]);
                        self.body = None;
                    }
                    return Ok(count);
                }
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => self.again(why)?,
            }
        }
        Ok(0)
    }
}

fn open(
    server: &Server,
    key: &str,
    range: &Range<u64>,
    etag: Option<&str>,
) -> Result<(Box<dyn Read + Send>, String), Failure> {
    if range.is_empty() {
        return Err(Failure::ours(Errno::INVAL, "nothing is asked for"));
    }
    let whole = server.whole(key);
    let mut ask = Ask::new(Kind::Get, Method::GET, Some(&whole));
    ask = ask.header("range", format!("bytes={}-{}", range.start, range.end - 1));
    if let Some(etag) = etag {
        ask = ask.header("if-match", answers::quoted(etag));
        ask.conditional = true;
    }
    let length = range.end - range.start;
    server.ask(&ask, |answer| {
        let said: Option<u64> =
            answer.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse().ok());
        // A server without ranges sends everything.
        let as_asked = answer.status == 206 || range.start == 0;
        match said {
            Some(said) if said == length && as_asked => {
                let etag = answers::etag(&answer.headers)?;
                Ok((answer.reader(), etag))
            }
            _ => Err(Failure::ours(Errno::IO, "the server sends another range than it was asked for")),
        }
    })
}
