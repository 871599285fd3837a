//! Uploads in parts: chunks of a file without a document. All parts but the last have one length, so that each has its place
//! before the others are known.
//!
//! The documents of uploads identify abandoned ones. Chunks without such a document (an agent was killed between two requests)
//! identify themselves: they have the field of this driver, and their file's id has the time of its start.

use std::io;

use super::bson::{Document, Id, Value, fields};
use super::chunks::{BY, US};
use super::failure::Failure;
use super::files::{CHUNK_BYTES, words_of};
use super::server::{Kind, Server, Sure, begun_nanos, hex, new_id, unhex};
use crate::checksum;
use crate::object::{Body, Part, Upload, Words};
use surgetank_types::error::Errno;

/// The length of every part but the last.
pub const PART_BYTES: u64 = PART_CHUNKS * CHUNK_BYTES;
const PART_CHUNKS: u64 = 64;
/// Ids that are looked up together.
const TOGETHER: usize = 1000;

/// The server's record of an upload.
pub struct Begun {
    pub id: Id,
    pub words: Words,
    pub parts: Vec<Part>,
}

pub fn no_such_upload() -> Failure {
    Failure::ours(Errno::NOENT, "no such upload")
}

fn parsed(id: &str) -> Result<Id, Failure> {
    unhex(id).and_then(|id| Id::try_from(id).ok()).ok_or_else(no_such_upload)
}

/// The length of the whole file. Errors: the parts are not the server's, or do not have the checksum.
pub fn whole(begun: &Begun, parts: &[Part], crc64nvme: u64) -> Result<u64, Failure> {
    let mut sum = Some(checksum::of_bytes(b""));
    for (nth, part) in parts.iter().enumerate() {
        let is_last = nth + 1 == parts.len();
        if !begun.parts.contains(part) {
            return Err(no_such_upload());
        }
        if part.number as usize != nth + 1 || !is_last && part.size_bytes != PART_BYTES {
            return Err(Failure::ours(Errno::INVAL, "the parts are not those of the upload"));
        }
        sum = sum.zip(part.crc64nvme).map(|(sum, crc)| checksum::joined(sum, crc, part.size_bytes));
    }
    if sum != Some(crc64nvme) || begun.parts.len() != parts.len() {
        return Err(Failure::checksum("the parts do not have the checksum of the whole"));
    }
    Ok(parts.iter().map(|part| part.size_bytes).sum())
}

impl Server {
    pub fn begin(&self, key: &str, words: &Words) -> Result<String, Failure> {
        let id = new_id()?;
        let words = Document(words.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect());
        let upload = fields! { "_id": id, "filename": self.filename(key), "words": words };
        self.insert_ours(Kind::Uploads, upload, None)?;
        Ok(hex(&id))
    }

    /// Records that a copy is in progress.
    pub fn begin_copy(&self, key: &str, id: &Id) -> Result<(), Failure> {
        let upload = fields! { "_id": *id, "filename": self.filename(key), "words": Document::default() };
        self.insert_ours(Kind::Uploads, upload, None)
    }

    pub fn part(&self, (key, id): (&str, &str), number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part> {
        let size_bytes = body.len();
        if number == 0 || size_bytes > PART_BYTES {
            return Err(Errno::INVAL.into());
        }
        let upload = parsed(id).map_err(|why| self.report(key, why))?;
        self.send(key, &upload, u64::from(number - 1) * PART_CHUNKS, body, crc64nvme)?;
        let note = || -> Result<Part, Failure> {
            let part = fields! {
                "upload": upload, "number": i64::from(number), "bytes": Value::Long(size_bytes.cast_signed()),
                "crc64nvme": format!("{crc64nvme:016x}"),
            };
            self.update(Kind::Parts, fields! { "_id": format!("{id}/{number}") }, part, true)?;
            if self.find(Kind::Uploads, fields! { "_id": upload }, None, Some(1))?.is_empty() {
                // The upload was aborted meanwhile: nothing of it stays.
                self.abort(id)?;
                return Err(no_such_upload());
            }
            Ok(as_part(number, size_bytes, crc64nvme))
        };
        note().map_err(|why| self.report(key, why))
    }

    pub fn upload(&self, id: &str) -> Result<Begun, Failure> {
        let id = parsed(id)?;
        let upload =
            self.find(Kind::Uploads, fields! { "_id": id }, None, Some(1))?.pop().ok_or_else(no_such_upload)?;
        let words = upload.document("words").map(words_of).unwrap_or_default();
        let found = self.find(Kind::Parts, fields! { "upload": id }, None, None)?;
        let mut parts: Vec<Part> = found.iter().filter_map(part_of).collect();
        parts.sort_unstable_by_key(|part| part.number);
        Ok(Begun { id, words, parts })
    }

    /// Deletes the record of an upload that became a file.
    pub fn forget_upload(&self, id: &Id) -> Result<(), Failure> {
        self.delete(Kind::Parts, fields! { "upload": *id }, Sure::Durable)?;
        self.delete(Kind::Uploads, fields! { "_id": *id }, Sure::Durable).map(drop)
    }

    /// An absent upload is not an error. An upload that became a file stays a file.
    pub fn abort(&self, id: &str) -> Result<(), Failure> {
        let id = parsed(id)?;
        // First: the publisher of the file checks this afterwards (`is_whole`).
        self.delete(Kind::Uploads, fields! { "_id": id }, Sure::Durable)?;
        if self.find(Kind::Files, fields! { "_id": id }, None, Some(1))?.is_empty() {
            self.remove_chunks(&id.into())?;
        }
        self.forget_upload(&id)
    }

    /// Uploads with a record, and those of which only chunks are left: these have no key.
    pub fn uploads(&self, prefix: &str) -> Result<Vec<Upload>, Failure> {
        let mut found = Vec::new();
        for upload in self.find(Kind::Uploads, Document::default(), None, None)? {
            let (Some(Value::Id(id)), Some(filename)) = (upload.get("_id"), upload.text("filename")) else { continue };
            if let Some(key) = filename.strip_prefix(&self.place.prefix).filter(|key| key.starts_with(prefix)) {
                found.push(Upload { key: key.to_owned(), id: hex(id), begun_nanos: begun_nanos(id) });
            }
        }
        if prefix.is_empty() {
            let known: std::collections::HashSet<String> = found.iter().map(|upload| upload.id.clone()).collect();
            for id in self.orphans()? {
                let upload = Upload { key: String::new(), id: hex(&id), begun_nanos: begun_nanos(&id) };
                found.extend(Some(upload).filter(|upload| !known.contains(&upload.id)));
            }
        }
        Ok(found)
    }

    /// Ids that have chunks of this driver, and no file and no upload.
    fn orphans(&self) -> Result<Vec<Id>, Failure> {
        let group = fields! { "$group": fields! { "_id": "$files_id" } };
        let id = |one: Document| if let Some(Value::Id(id)) = one.get("_id") { Some(*id) } else { None };
        let ids = self.aggregate(Kind::Chunks, vec![group.into()], &id)?;
        let mut orphans = Vec::new();
        for some in ids.chunks(TOGETHER) {
            let any_of = || fields! { "$in": some.iter().map(|id| Value::Id(*id)).collect::<Vec<_>>() };
            let mut theirs = std::collections::HashSet::new();
            for kind in [Kind::Files, Kind::Uploads] {
                for one in
                    self.find_fields(kind, fields! { "_id": any_of() }, None, None, Some(fields! { "_id": 1 }))?
                {
                    theirs.extend(if let Some(Value::Id(id)) = one.get("_id") { Some(*id) } else { None });
                }
            }
            for id in some.iter().filter(|id| !theirs.contains(*id)) {
                let ours = fields! { "files_id": *id }.with(BY, US);
                let chunk = self.find_fields(Kind::Chunks, ours, None, Some(1), Some(fields! { "n": 1 }))?;
                orphans.extend(chunk.first().map(|_| *id));
            }
        }
        Ok(orphans)
    }
}

fn as_part(number: u32, size_bytes: u64, crc64nvme: u64) -> Part {
    Part { number, size_bytes, etag: format!("{crc64nvme:016x}"), crc64nvme: Some(crc64nvme) }
}

fn part_of(document: &Document) -> Option<Part> {
    let number = u32::try_from(document.number("number")?).ok()?;
    let size_bytes = u64::try_from(document.number("bytes")?).ok()?;
    Some(as_part(number, size_bytes, u64::from_str_radix(document.text("crc64nvme")?, 16).ok()?))
}
