//! The data base of one server, with the few commands that GridFS needs. Every write waits until most servers of the set have it
//! in their journals.

use std::io;
use std::time::Instant;

use super::bson::{Document, Id, Value, fields};
use super::failure::{Failure, Meaning};
use super::place::Place;
use super::wire::{Command, Hello, Wire};
use surgetank_types::error::{Errno, Error};
use surgetank_types::sync::{OnceLock, PoisonError};

/// The number of documents in a page of an answer.
const BATCH: i32 = 1000;
/// The largest number of consecutive empty pages of one answer.
const EMPTY_PAGES_MAX: u32 = 100;
const CURSOR_NOT_FOUND: i64 = 43;

/// The collections of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Files,
    Chunks,
    /// Uploads in progress, and their parts.
    Uploads,
    Parts,
    /// Names that an agent changes at this moment.
    Locks,
}

/// How durable a write is when its answer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sure {
    Durable,
    /// For data that has no use after the server's death.
    Seen,
}

pub struct Server {
    pub place: Place,
    pub wire: Wire,
    hello: OnceLock<Hello>,
    indexed: OnceLock<()>,
    indexing: surgetank_types::sync::Mutex<()>,
}

impl Server {
    pub fn new(place: Place) -> Result<Self, Error> {
        let wire = Wire::new(&place)?;
        Ok(Self {
            place,
            wire,
            hello: OnceLock::new(),
            indexed: OnceLock::new(),
            indexing: surgetank_types::sync::Mutex::default(),
        })
    }

    /// Asks the server once. A failure is not remembered.
    pub fn hello(&self) -> Result<&Hello, Failure> {
        if let Some(hello) = self.hello.get() {
            return Ok(hello);
        }
        let hello = self.wire.hello()?;
        // May the user read the collection?
        self.find(Kind::Files, fields! { "filename": self.filename("") }, None, Some(1))?;
        Ok(self.hello.get_or_init(|| hello))
    }

    pub fn filename(&self, key: &str) -> String {
        format!("{}{key}", self.place.prefix)
    }

    fn collection(&self, kind: Kind) -> String {
        let name = match kind {
            Kind::Files => "files",
            Kind::Chunks => "chunks",
            Kind::Uploads => "surgetank.uploads",
            Kind::Parts => "surgetank.parts",
            Kind::Locks => "surgetank.locks",
        };
        format!("{}.{name}", self.place.bucket)
    }

    fn sure(sure: Sure) -> Document {
        match sure {
            Sure::Durable => fields! { "w": "majority", "j": true },
            Sure::Seen => fields! { "w": 1 },
        }
    }

    fn command(&self, name: &str, kind: Kind) -> Document {
        Document::default().with(name, self.collection(kind))
    }

    fn ask(&self, body: Document) -> Result<Document, Failure> {
        self.wire.ask(&body.with("$db", self.place.db.as_str()).into())
    }

    /// All matching documents, or at most `limit` of them.
    pub fn find(
        &self,
        kind: Kind,
        filter: Document,
        sort: Option<Document>,
        limit: Option<i32>,
    ) -> Result<Vec<Document>, Failure> {
        self.find_fields(kind, filter, sort, limit, None)
    }

    pub fn find_fields(
        &self,
        kind: Kind,
        filter: Document,
        sort: Option<Document>,
        limit: Option<i32>,
        fields: Option<Document>,
    ) -> Result<Vec<Document>, Failure> {
        self.find_behind(kind, filter, sort, (0, limit), fields)
    }

    /// Without the first `skip` of them.
    pub fn find_behind(
        &self,
        kind: Kind,
        filter: Document,
        sort: Option<Document>,
        (skip, limit): (usize, Option<i32>),
        fields: Option<Document>,
    ) -> Result<Vec<Document>, Failure> {
        let mut body = self.command("find", kind).with("filter", filter);
        if let Some(sort) = sort {
            body = body.with("sort", sort);
        }
        if let Some(fields) = fields {
            body = body.with("projection", fields);
        }
        if skip > 0 {
            body = body.with("skip", Value::Long(i64::try_from(skip).unwrap_or(i64::MAX)));
        }
        // (The server may send a part of several documents, and the rest on request.)
        let body = match limit {
            Some(1) => body.with("limit", 1).with("batchSize", 1).with("singleBatch", true),
            // (With one more, every server recognises the end.)
            Some(limit) => body.with("limit", limit).with("batchSize", limit.saturating_add(1)),
            None => body.with("batchSize", BATCH),
        };
        self.all(kind, &body, &Some)
    }

    /// What `of` makes of these fields, for all documents of a collection.
    pub fn find_some<T>(
        &self,
        kind: Kind,
        fields: Document,
        of: &dyn Fn(Document) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let body = self.command("find", kind).with("filter", Document::default());
        self.all(kind, &body.with("projection", fields).with("batchSize", BATCH), of)
    }

    pub fn aggregate<T>(
        &self,
        kind: Kind,
        steps: Vec<Value>,
        of: &dyn Fn(Document) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let body =
            self.command("aggregate", kind).with("pipeline", steps).with("cursor", fields! { "batchSize": BATCH });
        self.all(kind, &body, of)
    }

    /// A server sends a page once. After a lost page the whole request is repeated.
    fn all<T>(&self, kind: Kind, body: &Document, of: &dyn Fn(Document) -> Option<T>) -> Result<Vec<T>, Failure> {
        let limit = body.number("limit").and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let mut nth = 1;
        loop {
            let mut answer = self.ask(body.clone())?;
            match self.pages(kind, &mut answer, limit, of) {
                Err(why) if (why.again || why.code == CURSOR_NOT_FOUND) && nth < self.place.limits.tries => {
                    tracing::debug!(nth, "repeating the request: {why}");
                    nth += 1;
                }
                other => return other,
            }
        }
    }

    fn pages<T>(
        &self,
        kind: Kind,
        answer: &mut Document,
        limit: usize,
        of: &dyn Fn(Document) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let (mut found, mut which, mut empty) = (Vec::new(), "firstBatch", 0);
        loop {
            let Some(Value::Document(mut cursor)) = answer.take("cursor") else { return Err(Failure::garbled()) };
            let id = cursor.number("id").unwrap_or(0);
            let Some(Value::Array(page)) = cursor.take(which) else { return Err(Failure::garbled()) };
            empty = if page.is_empty() { empty + 1 } else { 0 };
            if empty > EMPTY_PAGES_MAX {
                return Err(Failure::garbled());
            }
            let documents = page.into_iter().filter_map(|value| match value {
                Value::Document(one) => of(one),
                _ => None,
            });
            found.extend(documents);
            if found.len() > limit {
                return Err(Failure::garbled());
            }
            if id == 0 {
                return Ok(found);
            }
            let more = fields! { "getMore": Value::Long(id) };
            let more = more.with("collection", self.collection(kind)).with("batchSize", BATCH);
            let body = more.with("$db", self.place.db.as_str());
            *answer = self.wire.ask(&Command { once: true, ..body.into() })?;
            which = "nextBatch";
        }
    }

    /// The server tries each document, also after one fails.
    pub fn insert(&self, kind: Kind, documents: Vec<Document>, sure: Sure) -> Result<(), Failure> {
        self.insert_until(kind, documents, sure, None)
    }

    fn insert_until(
        &self,
        kind: Kind,
        documents: Vec<Document>,
        sure: Sure,
        until: Option<Instant>,
    ) -> Result<(), Failure> {
        self.index()?;
        let body = self.command("insert", kind).with("ordered", false).with("writeConcern", Self::sure(sure));
        let body = body.with("$db", self.place.db.as_str());
        self.wire.ask(&Command { body, documents: Some(("documents", documents)), once: false, until }).map(drop)
    }

    /// A document under the id is this driver's: an answer was lost. (The cause can also be an index that makes names unique.)
    pub fn insert_ours(&self, kind: Kind, document: Document, until: Option<Instant>) -> Result<(), Failure> {
        let id = document.get("_id").cloned().unwrap_or(Value::Null);
        let filename = document.get("filename").cloned().unwrap_or(Value::Null);
        match self.insert_until(kind, vec![document], Sure::Durable, until) {
            Err(why) if why.meaning == Meaning::Twice => {
                if self.confirm(kind, &id, filename)? {
                    Ok(())
                } else {
                    Err(why)
                }
            }
            other => other,
        }
    }

    /// Checks that the document exists and is durable: the answer to an empty change comes when most servers have all earlier
    /// changes.
    pub fn confirm(&self, kind: Kind, id: &Value, filename: Value) -> Result<bool, Failure> {
        let same = fields! { "$set": fields! { "filename": &filename } };
        Ok(self.update(kind, fields! { "_id": id, "filename": &filename }, same, false)? > 0)
    }

    /// Changes the first matching document. Returns the number of matches.
    pub fn update(&self, kind: Kind, filter: Document, change: Document, upsert: bool) -> Result<i64, Failure> {
        self.update_until(kind, filter, change, upsert, None)
    }

    pub fn update_until(
        &self,
        kind: Kind,
        filter: Document,
        change: Document,
        upsert: bool,
        until: Option<Instant>,
    ) -> Result<i64, Failure> {
        let update = fields! { "q": filter, "u": change, "upsert": upsert };
        let body = self.command("update", kind).with("updates", vec![update.into()]);
        let body = body.with("writeConcern", Self::sure(Sure::Durable)).with("$db", self.place.db.as_str());
        let answer = self.wire.ask(&Command { until, ..body.into() })?;
        Ok(answer.number("n").unwrap_or(0))
    }

    /// Deletes all matching documents. Returns their number.
    pub fn delete(&self, kind: Kind, filter: Document, sure: Sure) -> Result<i64, Failure> {
        let delete = fields! { "q": filter, "limit": 0 };
        let body = self.command("delete", kind).with("deletes", vec![delete.into()]);
        Ok(self.ask(body.with("writeConcern", Self::sure(sure)))?.number("n").unwrap_or(0))
    }

    /// Creates the indexes of the standard before the first write.
    fn index(&self) -> Result<(), Failure> {
        if self.indexed.get().is_some() {
            return Ok(());
        }
        let _one = self.indexing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.indexed.get().is_some() {
            return Ok(());
        }
        let index = |kind: Kind, keys: Document, name: &str, unique: bool| {
            let index = fields! { "key": keys.clone(), "name": name };
            let index = if unique { index.with("unique", true) } else { index };
            let made = self.ask(self.command("createIndexes", kind).with("indexes", vec![index.into()]));
            match made {
                // (Twice: existing documents prevent the index. That is not a conflict of the document to write.)
                Err(why) if why.again || !self.has_index(kind, &keys, unique).unwrap_or(false) => Err(Failure {
                    meaning: if why.meaning == Meaning::Twice { Meaning::Errno(Errno::IO) } else { why.meaning },
                    ..why
                }),
                _ => Ok(()),
            }
        };
        index(Kind::Files, fields! { "filename": 1, "uploadDate": 1 }, "filename_1_uploadDate_1", false)?;
        index(Kind::Chunks, fields! { "files_id": 1, "n": 1 }, "files_id_1_n_1", true)?;
        index(Kind::Parts, fields! { "upload": 1 }, "upload_1", false)?;
        self.indexed.get_or_init(|| ());
        Ok(())
    }

    /// Does the index exist under any name?
    fn has_index(&self, kind: Kind, keys: &Document, unique: bool) -> Result<bool, Failure> {
        let numbers = |keys: &Document| -> Vec<(String, Option<i64>)> {
            keys.0.iter().map(|(name, order)| (name.clone(), order.as_number())).collect()
        };
        let known = self.all(kind, &self.command("listIndexes", kind), &Some)?;
        Ok(known.iter().any(|index| {
            let is_unique = index.get("unique") == Some(&Value::Bool(true));
            index.document("key").is_some_and(|own| numbers(own) == numbers(keys)) && (is_unique || !unique)
        }))
    }

    /// The error for the caller. The message of the server goes to the log.
    pub fn report(&self, key: &str, why: Failure) -> io::Error {
        if why.meaning != Meaning::Condition && !why.is(Errno::NOENT) {
            tracing::warn!("{}: {key}: {why}", self.place);
        }
        why.into_io(key)
    }
}

/// The current second, as in every client's ids, and random bytes.
pub fn new_id() -> Result<Id, Failure> {
    let mut id = [0; 12];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|why| Failure::ours(why, "the kernel gives no random numbers"))?;
    let seconds = u32::try_from(surgetank_types::clock::now().secs()).unwrap_or(u32::MAX);
    id[..4].copy_from_slice(&seconds.to_be_bytes());
    Ok(id)
}

pub fn begun_nanos(id: &Id) -> i64 {
    i64::from(u32::from_be_bytes([id[0], id[1], id[2], id[3]])) * 1_000_000_000
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    if digits.len().is_multiple_of(2) && digits.iter().all(u8::is_ascii_hexdigit) {
        digits.chunks(2).map(pair).collect()
    } else {
        None
    }
}
