//! The interface of a server of objects (S3 and similar), as small as possible.
//!
//! A server has keys, and whole objects under them with a few words of metadata each; no directories, no renames, no writing in
//! place. Errors are `io::Error`s, with an errno where one fits:
//!
//! | the server's answer | errno |
//! |---|---|
//! | no such key or bucket | ENOENT |
//! | access denied, bad or expired credentials | EACCES |
//! | a condition does not hold (412, 409 of a conditional request) | [`condition_failed`] |
//! | slow down, too many requests, internal error, service unavailable (after the driver's own retries) | EAGAIN |
//! | quota or storage full (507) | ENOSPC |
//! | no connection, no answer in time | the socket's errno, ETIMEDOUT |
//! | the bytes do not have the checksum | `ErrorKind::InvalidData` |

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

use crate::Turn;

/// User metadata: lower-case ASCII names without prefix, values of printable ASCII.
pub type Words = BTreeMap<String, String>;

/// One object, as the server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// The key, without the store's prefix.
    pub key: String,
    /// Length of the content.
    pub size_bytes: u64,
    /// The server's tag of this version, without quotes; conditions name it.
    pub etag: String,
    /// Time at which the server accepted it, in nanoseconds since 1970.
    pub modified_nanos: i64,
    /// The user metadata; `None` if a listing does not contain it. `head` always does.
    pub words: Option<Words>,
    /// CRC-64/NVME of the whole content, if the server keeps it.
    pub crc64nvme: Option<u64>,
}

/// One page of a listing, in the order of the keys' bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// The objects of this page.
    pub objects: Vec<Object>,
    /// With a delimiter: the keys up to and including the next `/` after the requested prefix.
    pub prefixes: Vec<String>,
    /// The position of the next page; `None` at the end.
    pub next: Option<String>,
}

/// The condition of a write. A server that does not honour one says so in its [`Abilities`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When<'a> {
    /// No condition.
    Always,
    /// The key must be absent.
    Absent,
    /// The key must have the object with this etag.
    Is(&'a str),
}

/// A body to send, which can be read again for a second try.
pub trait Body: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills the whole buffer from this offset on.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// The turn to wait for before the last byte is sent, if there is one (`Abilities::holds_back`).
    fn last_byte_waits(&self) -> Option<Turn<'_>> {
        None
    }
}

impl Body for &[u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let range = from..from + buffer.len();
        buffer.copy_from_slice(self.get(range).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// A part of an upload that the server has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Number of the part, from 1.
    pub number: u32,
    /// Length of the part.
    pub size_bytes: u64,
    /// The server's tag of the part.
    pub etag: String,
    /// CRC-64/NVME of the part, if the server keeps it.
    pub crc64nvme: Option<u64>,
}

/// An upload that was begun and is neither complete nor aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    /// The key that the object will have.
    pub key: String,
    /// The server's id of the upload.
    pub id: String,
    /// Time at which it was begun, in nanoseconds since 1970.
    pub begun_nanos: i64,
}

/// What a server can do, and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// `When::Absent` is honoured, by `put` and by `complete`.
    pub if_absent: bool,
    /// `When::Is` is honoured.
    pub if_same: bool,
    /// The server computes CRC-64/NVME itself, refuses a body with another checksum, and reports it.
    pub checksums: bool,
    /// The server copies from key to key without a transfer through the client.
    pub copies: bool,
    /// Uploads in parts are supported.
    pub uploads_in_parts: bool,
    /// The driver sends a body's last byte only after `Body::last_byte_waits`; before that no object exists.
    pub holds_back: bool,
    /// Least length of all parts but the last.
    pub part_bytes_min: u64,
    /// Greatest length of a part; if equal to the least, all parts but the last have this length.
    pub part_bytes_max: u64,
    /// Most parts of an upload.
    pub parts_max: u32,
    /// Greatest length of one `put`.
    pub put_bytes_max: u64,
    /// Greatest length of one `copy`.
    pub copy_bytes_max: u64,
    /// Greatest length of an object.
    pub object_bytes_max: u64,
    /// Listings contain every key unchanged. Otherwise a key with characters that XML does not have would not be found again.
    pub lists_any_key: bool,
    /// Longest key, in bytes of UTF-8.
    pub key_bytes_max: usize,
    /// Longest user metadata of an object, names and values together.
    pub words_bytes_max: usize,
}

/// A server of objects: one bucket, all keys below one prefix that the driver adds and removes itself. Every call blocks, and
/// may be made from any thread.
pub trait Objects: Send + Sync {
    /// URL of the store, for messages, never with credentials: `s3://bucket/prefix`.
    fn describe(&self) -> String;
    /// What the server can do; asked once.
    fn abilities(&self) -> Abilities;

    /// The object of a key; `None` if there is none.
    fn head(&self, key: &str) -> io::Result<Option<Object>>;
    /// The bytes of the range, which is not empty and within the object. With `etag`, only while the object has this etag.
    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>>;
    /// One page of the keys below `prefix`; with `delimited`, only up to the next `/`. `from` is the `next` of an earlier page.
    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page>;
    /// One page of the keys below `prefix` that follow `key`; `None` if the server cannot be asked for it.
    fn list_behind(&self, _prefix: &str, _key: &str) -> io::Result<Option<Page>> {
        Ok(None)
    }

    /// Stores an object and returns its etag. `crc64nvme` is that of the body; the server refuses any other if it can.
    fn put(&self, key: &str, body: &dyn Body, crc64nvme: u64, words: &Words, when: When<'_>) -> io::Result<String>;
    /// Copies on the server, with `etag` only while the source has it; with `words`, or else with the source's. Returns the
    /// etag.
    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String>;
    /// Removes an object. An absent one is not an error.
    fn delete(&self, key: &str) -> io::Result<()>;

    // ---- an upload in parts becomes visible when it is complete
    /// Begins an upload and returns its id.
    fn begin(&self, key: &str, words: &Words) -> io::Result<String>;
    /// Sends a part of an upload. `crc64nvme` is that of the body.
    fn part(&self, key: &str, id: &str, number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part>;
    /// Makes a part from a range of an object that the server has.
    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part>;
    /// All parts of the upload that the server has. Errors: ENOENT if there is no such upload.
    fn parts(&self, key: &str, id: &str) -> io::Result<Vec<Part>>;
    /// Completes an upload and returns the object's etag. `crc64nvme` is that of the whole.
    fn complete(&self, key: &str, id: &str, parts: &[Part], crc64nvme: u64, when: When<'_>) -> io::Result<String>;
    /// Removes an upload. An absent one is not an error.
    fn abort(&self, key: &str, id: &str) -> io::Result<()>;
    /// A key that no listing shows, because it cannot be a path; the first one found.
    fn hidden(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
    /// All unfinished uploads below `prefix`.
    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>>;

    /// Returns when everything that was acknowledged survives the server's power loss, as far as the server can be asked for
    /// that.
    fn settle(&self) -> io::Result<()> {
        Ok(())
    }
    /// Drops what the driver caches about other clients' keys, so that listings show their changes.
    fn refresh(&self) {}
}

/// The condition of a write did not hold: another client was first.
#[derive(Debug, thiserror::Error)]
#[error("another client has changed {key} in the store")]
pub struct ConditionFailed {
    /// The key of the write.
    pub key: String,
}

/// The error of a condition that does not hold.
pub fn condition_failed(key: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, ConditionFailed { key: key.to_owned() })
}

/// Whether an error is that of [`condition_failed`].
pub fn is_condition_failed(why: &io::Error) -> bool {
    why.get_ref().is_some_and(|inner| inner.is::<ConditionFailed>())
}
