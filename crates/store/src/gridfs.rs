//! Files in GridFS, MongoDB's standard for files. `mongofiles get path` reads what Surgetank writes, and Surgetank reads the files
//! of other clients.
//!
//! | collection | holds |
//! |---|---|
//! | `BUCKET.files` | a document for each version of a file: name (prefix + path), length, date; its words in `metadata.surgetank` |
//! | | a path and `/`: an empty file that stands for a directory |
//! | `BUCKET.chunks` | the bytes, 255 KiB a document |
//! | `BUCKET.surgetank.uploads`, `….parts` | uploads in parts that are in progress |
//! | `BUCKET.surgetank.locks` | names that an agent changes at this moment |
//!
//! A name may have several files. The youngest counts, for every client. So a younger file replaces a file: it becomes visible
//! with its document, and the older files are deleted after it. A lock (`locks`) guards the check of what is replaced, because
//! servers agree only on the uniqueness of ids.
//!
//! **The messages, BSON and the login** (`wire`, `bson`, `scram`) are our own: the driver needs nine commands. docs/stores.md says
//! why MongoDB's crate does not replace them: it cannot log in to FerretDB, and it writes no checksums.
//!
//! The dangers that this avoids:
//! - Half a file. (The document is written last.)
//! - Chunks of no file. (`uploads`)
//! - Other clients, which ignore the lock. The driver overwrites what they write between its check and its own write.

pub(crate) mod bson;
mod chunks;
mod failure;
mod files;
mod listing;
mod locks;
mod place;
mod publishing;
mod scram;
#[cfg(test)]
mod scripted;
mod server;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trouble;
mod uploads;
mod wire;

use std::io::{self, Read};
use std::ops::Range;

use self::bson::{Document, Id};
use self::failure::Failure;
use self::files::{File, OURS};
pub use self::place::{Limits, Place};
use self::publishing::Publication;
use self::server::{Server, new_id};
use self::uploads::PART_BYTES;
pub use self::wire::Counts;
#[cfg(fuzzing)]
pub use self::wire::read_answer;
use super::object::{Abilities, Body, Object, Objects, Page, Part, Upload, When, Words};
use crate::checksum::Checksum;
use crate::source::RANGE_BYTES;
use surgetank_types::error::{Errno, Error};
use surgetank_types::sync::Arc;

/// The bytes of a long file that are read at a time: whole chunks, and at least one range of a request.
const READ_BYTES: u64 = RANGE_BYTES.div_ceil(files::CHUNK_BYTES) * files::CHUNK_BYTES;
/// The largest number of parts: nearly 16 TiB.
const PARTS_MAX: u32 = 1 << 20;
const FILE_BYTES_MAX: u64 = PARTS_MAX as u64 * PART_BYTES;
/// A document may hold 16 MiB. Names and words get a lower limit.
const KEY_BYTES_MAX: usize = 64 << 10;
const WORDS_BYTES_MAX: usize = 256 << 10;

/// All files of one bucket whose names begin with one prefix. Clones share everything.
#[derive(Clone)]
pub struct GridFs(Arc<Server>);

impl GridFs {
    /// Sends no request.
    pub fn new(place: Place) -> Result<Self, Error> {
        Ok(Self(Arc::new(Server::new(place)?)))
    }

    /// Connects. Errors: the server does not answer, refuses the login, or is not the primary.
    pub fn open(place: Place) -> Result<Self, Error> {
        let store = Self::new(place)?;
        store.0.hello().map_err(|why| {
            Error::new(format!("the store {} cannot be used", store.0.place)).why(&why).remedy(failure::remedy(&why))
        })?;
        Ok(store)
    }

    /// The numbers of requests and connections since the store was opened.
    pub fn counters(&self) -> Counts {
        self.0.wire.counters.read()
    }

    /// The server belongs to a replica set: several servers keep durable files.
    pub fn is_replicated(&self) -> bool {
        self.0.hello().is_ok_and(|hello| hello.is_replicated)
    }

    fn reported<T>(&self, key: &str, done: Result<T, Failure>) -> io::Result<T> {
        done.map_err(|why| self.0.report(key, why))
    }

    /// After a failure, removes the chunks only if the file is certainly not published.
    fn publish_or_give_up(
        &self,
        key: &str,
        file: File,
        when: When<'_>,
        (id, is_upload): (&Id, bool),
    ) -> Result<String, Failure> {
        let how = Publication { is_upload, ..Publication::default() };
        self.0.publish(key, file, when, &how).inspect_err(|why| {
            if !how.is_sent.get() || why.is_undone() {
                self.0.give_up(id);
            }
        })
    }

    /// Copies the bytes through this process: a server cannot copy chunks.
    fn copy_bytes(&self, from: &File, id: &Id, to: &str) -> io::Result<()> {
        let mut sum = Checksum::default();
        let mut start = 0;
        while start < from.size_bytes {
            let range = start..from.size_bytes.min(start + READ_BYTES);
            let bytes = self.reported(&from.filename, self.0.piece(from, range.clone()))?;
            sum.bytes(&bytes);
            let own = crate::checksum::of_bytes(&bytes);
            self.0.send(to, id, start / files::CHUNK_BYTES, &bytes.as_slice(), own)?;
            start = range.end;
        }
        // Every byte belongs to this version.
        self.reported(&from.filename, self.0.still(from))?;
        match from.object("").and_then(|object| object.crc64nvme) {
            Some(known) if known != sum.value() => {
                let why = Failure::checksum("the source of the copy does not have its checksum");
                self.reported(&from.filename, Err(why))
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for GridFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GridFs({})", self.0.place)
    }
}

impl Objects for GridFs {
    fn describe(&self) -> String {
        self.0.place.to_string()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            if_absent: true,
            if_same: true,
            checksums: false,
            copies: true,
            uploads_in_parts: true,
            holds_back: false,
            part_bytes_min: PART_BYTES,
            part_bytes_max: PART_BYTES,
            parts_max: PARTS_MAX,
            put_bytes_max: FILE_BYTES_MAX,
            copy_bytes_max: FILE_BYTES_MAX,
            object_bytes_max: FILE_BYTES_MAX,
            lists_any_key: true,
            key_bytes_max: KEY_BYTES_MAX.saturating_sub(self.0.place.prefix.len()),
            words_bytes_max: WORDS_BYTES_MAX,
        }
    }

    fn head(&self, key: &str) -> io::Result<Option<Object>> {
        let found = self.reported(key, self.0.newest(key))?;
        Ok(found.and_then(|file| file.object(&self.0.place.prefix)))
    }

    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>> {
        let file = match etag {
            Some(etag) => self.0.version(etag),
            None => self.0.newest(key).and_then(|file| file.ok_or_else(|| Failure::ours(Errno::NOENT, "no such file"))),
        };
        let file = self.reported(key, file)?;
        if range.end > file.size_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let is_whole = range.end - range.start <= READ_BYTES;
        let (key, piece) = (key.to_owned(), io::Cursor::default());
        let mut reading = Reading { store: self.clone(), key, file, is_whole, piece, rest: range };
        // Errors appear here and not at the first read.
        reading.resume()?;
        Ok(Box::new(reading))
    }

    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page> {
        self.reported(prefix, self.0.page(prefix, delimited, from))
    }

    fn list_behind(&self, prefix: &str, key: &str) -> io::Result<Option<Page>> {
        self.list(prefix, false, Some(&listing::behind(key))).map(Some)
    }

    fn put(&self, key: &str, body: &dyn Body, crc64nvme: u64, words: &Words, when: When<'_>) -> io::Result<String> {
        let id = self.reported(key, new_id())?;
        self.0.send(key, &id, 0, body, crc64nvme).inspect_err(|_| self.0.give_up(&id))?;
        let metadata = Document::default().with(OURS, files::ours(words, Some(crc64nvme), &id));
        let file = File::new(id, self.0.filename(key), body.len(), metadata);
        self.reported(key, self.publish_or_give_up(key, file, when, (&id, false)))
    }

    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String> {
        let version = self.reported(to, new_id())?;
        let ours = |file: &File| {
            let (own, crc64nvme) = file.object("").map_or((None, None), |object| (object.words, object.crc64nvme));
            files::ours(&words.cloned().or(own).unwrap_or_default(), crc64nvme, &version)
        };
        if from == to {
            return self.reported(to, self.0.reword(to, etag, ours));
        }
        let source = self.reported(from, self.0.newest(from))?;
        let source = source.ok_or_else(|| io::Error::from(Errno::NOENT))?;
        if etag.is_some_and(|etag| source.etag() != etag) {
            return Err(super::object::condition_failed(from));
        }
        let metadata = self.reported(from, source.metadata().cloned())?.with(OURS, ours(&source));
        let id = self.reported(to, new_id())?;
        // `gc` removes chunks that belong to no file for a long time (`uploads`).
        let is_long = source.size_bytes > READ_BYTES;
        if is_long {
            self.reported(to, self.0.begin_copy(to, &id))?;
        }
        self.copy_bytes(&source, &id, to).inspect_err(|_| self.0.give_up(&id))?;
        let file = File::new(id, self.0.filename(to), source.size_bytes, metadata);
        let file = File { beside: source.beside.clone(), ..file };
        let etag = self.reported(to, self.publish_or_give_up(to, file, When::Always, (&id, is_long)))?;
        if is_long {
            self.reported(to, self.0.forget_upload(&id))?;
        }
        Ok(etag)
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.reported(key, self.0.remove(key))
    }

    fn begin(&self, key: &str, words: &Words) -> io::Result<String> {
        self.reported(key, self.0.begin(key, words))
    }

    fn part(&self, key: &str, id: &str, number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part> {
        self.0.part((key, id), number, body, crc64nvme)
    }

    /// Through this process, like every copy.
    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part> {
        let mut bytes = Vec::new();
        self.get(from, range, Some(etag))?.read_to_end(&mut bytes)?;
        self.part(key, id, number, &&*bytes, crate::checksum::of_bytes(&bytes))
    }

    fn parts(&self, key: &str, id: &str) -> io::Result<Vec<Part>> {
        self.reported(key, self.0.upload(id)).map(|begun| begun.parts)
    }

    fn complete(&self, key: &str, id: &str, parts: &[Part], crc64nvme: u64, when: When<'_>) -> io::Result<String> {
        let complete = || {
            let begun = self.0.upload(id)?;
            let size_bytes = uploads::whole(&begun, parts, crc64nvme)?;
            let metadata = Document::default().with(OURS, files::ours(&begun.words, Some(crc64nvme), &begun.id));
            let file = File::new(begun.id, self.0.filename(key), size_bytes, metadata);
            let etag = self.0.publish(key, file, when, &Publication { is_upload: true, ..Publication::default() })?;
            self.0.forget_upload(&begun.id)?;
            Ok(etag)
        };
        self.reported(key, complete())
    }

    fn abort(&self, key: &str, id: &str) -> io::Result<()> {
        self.reported(key, self.0.abort(id))
    }

    fn hidden(&self) -> io::Result<Option<String>> {
        self.reported("", self.0.hidden())
    }

    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>> {
        self.reported(prefix, self.0.uploads(prefix))
    }
}

/// Reads a range piece by piece.
struct Reading {
    store: GridFs,
    key: String,
    file: File,
    /// The range is one piece, read right after the check of the version.
    is_whole: bool,
    piece: io::Cursor<Vec<u8>>,
    rest: Range<u64>,
}

impl Reading {
    fn resume(&mut self) -> io::Result<()> {
        let next = self.rest.start..self.rest.end.min(self.rest.start + READ_BYTES);
        let bytes = self.store.reported(&self.key, self.store.0.piece(&self.file, next.clone()))?;
        if !self.is_whole {
            self.store.reported(&self.key, self.store.0.still(&self.file))?;
        }
        (self.piece, self.rest.start) = (io::Cursor::new(bytes), next.end);
        Ok(())
    }
}

impl Read for Reading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.piece.read(buffer)?;
        if got > 0 || self.rest.is_empty() || buffer.is_empty() {
            return Ok(got);
        }
        self.resume()?;
        self.piece.read(buffer)
    }
}
