//! Values on a Redis server: a file is the plain value of the key PREFIX + path, so that `redis-cli GET path` gives its bytes.
//!
//! | key, after the prefix | value |
//! |---|---|
//! | a path | the file's bytes, or a link's target |
//! | a path and `/` | empty: a directory's own object |
//! | `//surgetank/records` | a hash: for each path the file's attributes, its etag and its age |
//! | `//surgetank/index` | a sorted set of all paths, for listings |
//! | `//surgetank/uploads`, `…/upload/ID`, `…/bytes/ID` | uploads in parts; they expire a day after their last use |
//!
//! Every change is one script on the server (`scripts/`), which checks its condition, changes the value and writes record and
//! index: no client sees one without the other. A script that is sent again because its answer was lost recognises its own work
//! by the etag, which the driver draws.
//!
//! **Other clients** write values without records. A mark that a SET removes shows that a record no longer fits: each value of
//! Surgetank expires, some 50,000 years ahead, at a time that differs for each version. Where the server evicts expiring keys
//! when memory runs short (`maxmemory-policy volatile-…`), values have a digest instead of the mark: of all of a value up to 4
//! KiB, and of 16 places of a longer one. So have the values of other clients.
//!
//! **A cluster** has all keys on one server, because the prefix has a hash tag (`nodes`).
//!
//! The dangers that it avoids: a server that loses what it acknowledged (`durability`), and one that does nothing else for
//! seconds (a script moves at most a piece of a value, and lists have pages).

mod durability;
mod failure;
mod listing;
mod nodes;
mod place;
mod records;
mod scripts;
mod server;
#[cfg(test)]
mod tests;
mod uploads;
mod wire;

use std::io::{self, Read};
use std::ops::Range;

pub use self::durability::Durability;
use self::failure::Failure;
pub use self::nodes::Node;
pub use self::place::{Limits, Place};
use self::records::Change;
use self::scripts::Script;
use self::server::{NOTHING, Server};
pub use self::wire::Counts;
use self::wire::{Batch, bytes_of, text_of};
use super::object::{Abilities, Body, Object, Objects, Page, Part, Upload, When, Words};
use surgetank_types::error::Error;
use surgetank_types::sync::Arc;

/// A longer value does not go through a script, which would copy it twice.
const SCRIPTED_BYTES_MAX: u64 = 64 << 10;
/// Bytes of a long value in one request.
const READ_BYTES: u64 = 4 << 20;

/// Parses a record from a server, for `fuzz/`.
#[cfg(fuzzing)]
pub fn read_record(text: &str) {
    let _ = records::object("key", text);
    if let Some((field, value)) = text.split_once('\n') {
        let _ = uploads::part_of(field, value);
    }
}

/// All keys of one data base with one prefix. Clones share everything.
#[derive(Clone)]
pub struct Redis(Arc<Server>);

impl Redis {
    /// Does not ask the server yet. Errors: a file that the place names cannot be used.
    pub fn new(place: Place) -> Result<Self, Error> {
        Ok(Self(Arc::new(Server::new(place)?)))
    }

    /// Asks the server what it can do, and thereby whether it is reachable and accepts the user. Errors: it does not.
    pub fn open(place: Place) -> Result<Self, Error> {
        let store = Self::new(place)?;
        store.0.known().map_err(|why| {
            Error::new(format!("the store {} cannot be used", store.0.place)).why(&why).remedy(failure::remedy(&why))
        })?;
        Ok(store)
    }

    /// Requests and connections so far.
    pub fn counters(&self) -> Counts {
        self.0.wire.counters.read()
    }

    /// The server's promise about what it has acknowledged; `None` if it could not be asked.
    pub fn durability(&self) -> Option<Durability> {
        Some(self.0.known().ok()?.durability.clone())
    }

    /// Runs one script that answers with a word; `path` is for messages.
    fn change(&self, path: &str, change: &Change, act: impl Fn(&Change) -> io::Result<Batch>) -> io::Result<String> {
        let batch = act(change)?;
        let answer = self.0.wire.ask(&batch).and_then(|mut answers| text_of(answers.pop().unwrap_or_default()));
        answer.and_then(|word| self.0.done(&word, &change.etag)).map_err(|why| self.0.report(path, why))
    }

    fn record(&self, path: &str) -> io::Result<Option<Object>> {
        let batch = Batch::of(self.0.script(Script::Look).arg(path.as_bytes()));
        let answer = self.0.wire.ask(&batch).and_then(|mut answers| match answers.pop().unwrap_or_default() {
            redis::Value::Nil => Ok(None),
            said => records::object(path, &text_of(said)?).map(Some),
        });
        answer.map_err(|why| self.0.report(path, why))
    }

    /// Reads at most `READ_BYTES`.
    fn piece(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Vec<u8>> {
        let ask = || -> Result<Vec<u8>, Failure> {
            let script = self.0.script(Script::Read).arg(key.as_bytes()).arg(etag.unwrap_or_default().as_bytes());
            let batch = Batch::of(script.number(range.start).number(range.end));
            let answer = wire::array_of(self.0.wire.ask(&batch)?.pop().unwrap_or_default())?;
            let mut answer = answer.into_iter();
            self.0.done(&text_of(answer.next().unwrap_or_default())?, "")?;
            bytes_of(answer.next().unwrap_or_default())
        };
        ask().map_err(|why| self.0.report(key, why))
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Redis").field(&self.0.place).finish()
    }
}

impl Objects for Redis {
    fn describe(&self) -> String {
        self.0.place.to_string()
    }

    fn abilities(&self) -> Abilities {
        self.0.known().map_or(NOTHING, |known| known.abilities)
    }

    fn head(&self, key: &str) -> io::Result<Option<Object>> {
        self.record(key)
    }

    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>> {
        let first = range.start..range.end.min(range.start + READ_BYTES);
        let bytes = self.piece(key, first.clone(), etag)?;
        if (bytes.len() as u64) < first.end - first.start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let etag = match etag {
            // The rest must be of the same version.
            None if first.end < range.end => self.record(key)?.map(|object| object.etag),
            etag => etag.map(str::to_owned),
        };
        let piece = io::Cursor::new(bytes);
        Ok(Box::new(Reading { store: self.clone(), key: key.to_owned(), etag, piece, rest: first.end..range.end }))
    }

    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page> {
        self.0.page(prefix, delimited, from).map_err(|why| self.0.report(prefix, why))
    }

    fn put(&self, key: &str, body: &dyn Body, crc64nvme: u64, words: &Words, when: When<'_>) -> io::Result<String> {
        let change = self.0.new_change(when, Some(crc64nvme), Some(words))?;
        self.change(key, &change, |change| {
            if body.len() <= SCRIPTED_BYTES_MAX {
                let script = change.fill(self.0.script(Script::Put).arg(key.as_bytes()), when);
                return Ok(Batch::of(script.body(body, crc64nvme)?));
            }
            let beside = self.0.beside(&change.etag);
            let set = wire::command("SET").arg(&beside).body(body, crc64nvme)?.arg(b"EX").number(server::ASIDE_SECONDS);
            let script = change.fill(self.0.script(Script::Place).arg(key.as_bytes()), when);
            Ok(Batch::of(set).and(script.arg(&beside).number(body.len()).arg(b"")))
        })
    }

    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String> {
        let change = self.0.new_change(When::Always, None, words)?;
        self.change(from, &change, |change| {
            let script = self.0.script(Script::Copy).arg(from.as_bytes()).arg(etag.unwrap_or_default().as_bytes());
            let script = script.arg(to.as_bytes()).arg(change.etag.as_bytes()).arg(change.mark.as_bytes());
            Ok(Batch::of(script.arg(if words.is_some() { change.words.as_bytes() } else { b"" })))
        })
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        let batch = Batch::of(self.0.script(Script::Delete).arg(key.as_bytes()));
        self.0.wire.ask(&batch).map(drop).map_err(|why| self.0.report(key, why))
    }

    fn begin(&self, key: &str, words: &Words) -> io::Result<String> {
        self.0.begin(key, words).map_err(|why| self.0.report(key, why))
    }

    fn part(&self, key: &str, id: &str, number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part> {
        self.0.part((key, id), number, body, crc64nvme)
    }

    /// By way of the client: the server cannot compute the checksum, and its copies need no parts.
    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part> {
        let mut bytes = Vec::new();
        self.get(from, range, Some(etag))?.read_to_end(&mut bytes)?;
        self.part(key, id, number, &&*bytes, crate::checksum::of_bytes(&bytes))
    }

    fn parts(&self, key: &str, id: &str) -> io::Result<Vec<Part>> {
        self.0.upload(id).map(|begun| begun.parts).map_err(|why| self.0.report(key, why))
    }

    fn complete(&self, key: &str, id: &str, parts: &[Part], crc64nvme: u64, when: When<'_>) -> io::Result<String> {
        let begun = self.0.upload(id).map_err(|why| self.0.report(key, why))?;
        let size = uploads::whole(&begun, parts, crc64nvme).map_err(|why| self.0.report(key, why))?;
        let change = self.0.new_change(when, Some(crc64nvme), None)?.with_words(begun.words);
        self.change(key, &change, |change| {
            let script = change.fill(self.0.script(Script::Place).arg(key.as_bytes()), when);
            Ok(Batch::of(script.arg(&self.0.beside(id)).number(size).arg(id.as_bytes())))
        })
    }

    fn abort(&self, key: &str, id: &str) -> io::Result<()> {
        self.0.abort(id).map_err(|why| self.0.report(key, why))
    }

    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>> {
        self.0.uploads(prefix).map_err(|why| self.0.report(prefix, why))
    }

    fn refresh(&self) {
        self.0.forget_scan();
    }

    fn settle(&self) -> io::Result<()> {
        self.0.settle().map_err(|why| self.0.report("", why))
    }
}

/// Reads a range, a piece at a time.
struct Reading {
    store: Redis,
    key: String,
    etag: Option<String>,
    piece: io::Cursor<Vec<u8>>,
    rest: Range<u64>,
}

impl Read for Reading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.piece.read(buffer)?;
        if got > 0 || self.rest.is_empty() || buffer.is_empty() {
            return Ok(got);
        }
        let next = self.rest.start..self.rest.end.min(self.rest.start + READ_BYTES);
        let bytes = self.store.piece(&self.key, next.clone(), self.etag.as_deref())?;
        if (bytes.len() as u64) < next.end - next.start {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (self.piece, self.rest.start) = (io::Cursor::new(bytes), next.end);
        self.piece.read(buffer)
    }
}
