//! The bytes of files: documents of 255 KiB each. They are written before the file's document and deleted after it.
//!
//! Chunks of this driver have a field that says so. It distinguishes the remains of a killed agent from chunks of another client
//! that is about to write a file (`uploads`).

use std::io;
use std::ops::Range;

use super::bson::{Document, Id, Value, fields};
use super::failure::{Failure, Meaning};
use super::files::{CHUNK_BYTES, File};
use super::server::{Kind, Server, Sure, new_id};
use crate::checksum::Checksum;
use crate::object::Body;
use surgetank_types::error::Errno;

/// Chunks of one message.
const TOGETHER: u64 = 32;
/// More than one answer may be lost.
const CLEARINGS_MAX: u32 = 3;
/// The field of a chunk that this driver wrote.
pub const BY: &str = "by";
pub const US: &str = "surgetank";

fn number(nth: u64) -> Result<Value, Failure> {
    i32::try_from(nth)
        .map(Value::Int)
        .map_err(|_| Failure::ours(Errno::FBIG, "the file is too long for GridFS: it has more than 2^31 chunks"))
}

impl Server {
    /// Sends a body as chunks from number `first` on. Errors: the bytes do not have the checksum `crc64nvme`.
    pub fn send(&self, key: &str, id: &Id, first: u64, body: &dyn Body, crc64nvme: u64) -> io::Result<()> {
        let mut sum = Checksum::default();
        let count = body.len().div_ceil(CHUNK_BYTES);
        let mut nth = 0;
        while nth < count {
            let until = count.min(nth + TOGETHER);
            let mut documents = Vec::new();
            for chunk in nth..until {
                let start = chunk * CHUNK_BYTES;
                let size = usize::try_from(CHUNK_BYTES.min(body.len() - start)).map_err(io::Error::other)?;
                let mut bytes = vec![0; size];
                body.read_at(&mut bytes, start)?;
                sum.bytes(&bytes);
                let made = || {
                    Ok(fields! {
                        "_id": new_id()?, "files_id": *id, "n": number(first + chunk)?, "data": Value::Binary(bytes), "by": US,
                    })
                };
                documents.push(made().map_err(|why| self.report(key, why))?);
            }
            self.send_some(id, first + nth..first + until, &documents).map_err(|why| self.report(key, why))?;
            nth = until;
        }
        if sum.value() == crc64nvme {
            return Ok(());
        }
        let text = format!("{key}: the source does not have its checksum");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    fn send_some(&self, id: &Id, range: Range<u64>, documents: &[Document]) -> Result<(), Failure> {
        for _ in 0..CLEARINGS_MAX {
            match self.insert(Kind::Chunks, documents.to_vec(), Sure::Durable) {
                // Chunks of an earlier try or of a killed agent, perhaps with other bytes.
                Err(why) if why.meaning == Meaning::Twice => {
                    let numbers = fields! { "$gte": number(range.start)?, "$lt": number(range.end)? };
                    self.delete(Kind::Chunks, fields! { "files_id": *id, "n": numbers }, Sure::Durable)?;
                }
                sent => return sent,
            }
        }
        Err(Failure::ours(Errno::AGAIN, "another process sends chunks of the same file"))
    }

    /// Bytes of a version. If its chunks are wrong, the version was deleted or replaced meanwhile, or it is damaged.
    pub fn piece(&self, file: &File, range: Range<u64>) -> Result<Vec<u8>, Failure> {
        match self.chunks(file, range) {
            Err(why) if why.is_damage() => {
                self.still(file)?;
                Err(why)
            }
            read => read,
        }
    }

    fn chunks(&self, file: &File, range: Range<u64>) -> Result<Vec<u8>, Failure> {
        let (first, behind) = (range.start / file.chunk_bytes, range.end.div_ceil(file.chunk_bytes));
        let filter = fields! { "files_id": &file.id, "n": fields! { "$gte": number(first)?, "$lt": number(behind)? } };
        let fields = fields! { "n": 1, "data": 1 };
        let limit = i32::try_from(behind - first).ok();
        let found = self.find_fields(Kind::Chunks, filter, Some(fields! { "n": 1 }), limit, Some(fields))?;
        if found.len() as u64 != behind - first {
            return Err(Failure::damaged());
        }
        let mut bytes = Vec::with_capacity(usize::try_from(range.end - range.start).unwrap_or(0));
        for (nth, chunk) in (first..).zip(&found) {
            let start = nth * file.chunk_bytes;
            let size = file.chunk_bytes.min(file.size_bytes.saturating_sub(start));
            let data = match chunk.get("data") {
                Some(Value::Binary(data))
                    if data.len() as u64 == size && chunk.number("n") == i64::try_from(nth).ok() =>
                {
                    data
                }
                _ => return Err(Failure::damaged()),
            };
            let within = |at: u64| usize::try_from(at.saturating_sub(start).min(size)).unwrap_or(0);
            bytes.extend_from_slice(&data[within(range.start)..within(range.end)]);
        }
        Ok(bytes)
    }

    pub fn remove_chunks(&self, id: &Value) -> Result<(), Failure> {
        self.delete(Kind::Chunks, fields! { "files_id": id }, Sure::Durable).map(drop)
    }
}
