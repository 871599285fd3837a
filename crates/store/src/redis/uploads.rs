//! Uploads in parts: one value beside the others grows, each part at its own offset, and gets its name when it is complete.
//!
//! All parts but the last have one length (`PART_BYTES`), so that the offset of each is known whatever arrives first. Joining
//! parts at the end would block the server for as long as that takes.

use std::io;

use redis::Value;

use super::failure::Failure;
use super::records::text_of_words;
use super::server::{ASIDE_SECONDS, PART_BYTES, Server, random};
use super::wire::{self, Batch, array_of, text_of};
use crate::checksum;
use crate::object::{Body, Part, Upload, Words};
use surgetank_types::error::Errno;

/// The server's record of an upload.
pub struct Begun {
    pub key: String,
    pub words: String,
    pub begun_nanos: i64,
    pub parts: Vec<Part>,
}

/// Length of the whole. The parts must be those that the server has, and have the checksum.
pub fn whole(begun: &Begun, parts: &[Part], crc64nvme: u64) -> Result<u64, Failure> {
    let mut sum = Some(checksum::of_bytes(b""));
    for (nth, part) in parts.iter().enumerate() {
        let is_last = nth + 1 == parts.len();
        // A server that took over may lack it: the upload is useless.
        if !begun.parts.contains(part) {
            return Err(no_such_upload());
        }
        if part.number as usize != nth + 1 || !is_last && part.size_bytes != PART_BYTES {
            return Err(Failure::ours(Errno::INVAL, "these are not the parts of the upload"));
        }
        sum = sum.zip(part.crc64nvme).map(|(sum, crc)| checksum::joined(sum, crc, part.size_bytes));
    }
    if sum != Some(crc64nvme) {
        return Err(Failure::checksum());
    }
    Ok(parts.iter().map(|part| part.size_bytes).sum())
}

fn no_such_upload() -> Failure {
    Failure::ours(Errno::NOENT, "no such upload")
}

impl Server {
    fn about(&self, id: &str) -> Vec<u8> {
        self.own(&format!("upload/{id}"))
    }

    pub fn begin(&self, key: &str, words: &Words) -> Result<String, Failure> {
        let id = format!("{:016x}", random().map_err(|why| Failure::ours(Errno::IO, &why.to_string()))?);
        let about = self.about(&id);
        let begun = surgetank_types::clock::now().nanos.unsigned_abs();
        let set = wire::command("HSET").arg(&about).arg(b"key").arg(key.as_bytes()).arg(b"begun").number(begun);
        let set = set.arg(b"words").arg(text_of_words(words).as_bytes());
        let list = wire::command("HSET").arg(&self.own("uploads")).arg(id.as_bytes()).arg(key.as_bytes());
        let expire = wire::command("EXPIRE").arg(&about).number(ASIDE_SECONDS);
        self.wire.ask(&Batch::of(set).and(list).and(expire).at_once())?;
        Ok(id)
    }

    pub fn part(&self, (key, id): (&str, &str), number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part> {
        let size_bytes = body.len();
        if number == 0 || size_bytes > PART_BYTES {
            return Err(Errno::INVAL.into());
        }
        let (about, beside) = (self.about(id), self.beside(id));
        let offset = u64::from(number - 1) * PART_BYTES;
        let set = wire::command("SETRANGE").arg(&beside).number(offset).body(body, crc64nvme)?;
        let note = format!("{size_bytes} {crc64nvme:016x}");
        let note = wire::command("HSET").arg(&about).arg(format!("part:{number}").as_bytes()).arg(note.as_bytes());
        let expire = |key: &[u8]| wire::command("EXPIRE").arg(key).number(ASIDE_SECONDS);
        let there = wire::command("HEXISTS").arg(&about).arg(b"key");
        let batch = Batch::of(set).and(note).and(expire(&about)).and(expire(&beside)).and(there).at_once();
        let sent = self.wire.ask(&batch).and_then(|mut answers| match answers.pop() {
            Some(Value::Int(1)) => Ok(part(number, size_bytes, crc64nvme)),
            // Aborted meanwhile: nothing of it stays.
            _ => self.abort(id).and_then(|()| Err(no_such_upload())),
        });
        sent.map_err(|why| self.report(key, why))
    }

    pub fn upload(&self, id: &str) -> Result<Begun, Failure> {
        let answers = self.wire.ask(&Batch::of(wire::command("HGETALL").arg(&self.about(id))))?;
        let mut fields = array_of(answers.into_iter().next().unwrap_or_default())?.into_iter();
        let (mut key, mut words, mut begun_nanos, mut parts) = (None, String::new(), 0, Vec::new());
        while let (Some(field), Some(value)) = (fields.next(), fields.next()) {
            let (field, value) = (text_of(field)?, text_of(value)?);
            match field.as_str() {
                "key" => key = Some(value),
                "words" => words = value,
                "begun" => begun_nanos = value.parse().unwrap_or(0),
                _ => parts.extend(part_of(&field, &value)),
            }
        }
        parts.sort_unstable_by_key(|part: &Part| part.number);
        Ok(Begun { key: key.ok_or_else(no_such_upload)?, words, begun_nanos, parts })
    }

    pub fn abort(&self, id: &str) -> Result<(), Failure> {
        let gone = wire::command("UNLINK").arg(&self.about(id)).arg(&self.beside(id));
        let unlisted = wire::command("HDEL").arg(&self.own("uploads")).arg(id.as_bytes());
        // Not in one transaction: a full server accepts nothing between MULTI and EXEC.
        self.wire.ask(&Batch::of(gone).and(unlisted)).map(drop)
    }

    pub fn uploads(&self, prefix: &str) -> Result<Vec<Upload>, Failure> {
        let answers = self.wire.ask(&Batch::of(wire::command("HKEYS").arg(&self.own("uploads"))))?;
        let mut found = Vec::new();
        for id in array_of(answers.into_iter().next().unwrap_or_default())? {
            let id = text_of(id)?;
            match self.upload(&id) {
                Ok(begun) if begun.key.starts_with(prefix) => {
                    found.push(Upload { key: begun.key, id, begun_nanos: begun.begun_nanos });
                }
                Ok(_) => {}
                // It has expired.
                Err(why) if why.is(Errno::NOENT) => self.abort(&id)?,
                Err(why) => return Err(why),
            }
        }
        Ok(found)
    }
}

fn part(number: u32, size_bytes: u64, crc64nvme: u64) -> Part {
    Part { number, size_bytes, etag: format!("{crc64nvme:016x}"), crc64nvme: Some(crc64nvme) }
}

pub fn part_of(field: &str, value: &str) -> Option<Part> {
    let (size, crc) = value.split_once(' ')?;
    let number = field.strip_prefix("part:")?.parse().ok()?;
    Some(part(number, size.parse().ok()?, u64::from_str_radix(crc, 16).ok()?))
}
