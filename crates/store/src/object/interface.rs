//! Stores of objects (S3 and its kin): what such a server can do, as one small interface.
//!
//! A server has keys, and whole objects under them with a few words of metadata each; no directories, no renames, no
//! writing in place. Errors are `io::Error`s with an errno where one fits, because the rest of the house speaks errno:
//!
//! | the server says | errno |
//! |---|---|
//! | no such key or bucket | ENOENT |
//! | access denied, bad or expired credentials | EACCES |
//! | a condition does not hold (412, 409 of a conditional request) | [`condition_failed`] |
//! | slow down, too many requests, internal error, service unavailable (after the driver's own retries) | EAGAIN |
//! | quota or storage full (507) | ENOSPC |
//! | no connection, no answer in time | what the socket said, ETIMEDOUT |
//! | the bytes do not have the checksum | `ErrorKind::InvalidData` |

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;

use crate::Turn;

/// User metadata: lower-case ASCII names without prefix, values of printable ASCII.
pub type Words = BTreeMap<String, String>;

/// One object as the server tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub key: String,
    pub size_bytes: u64,
    /// Without its quotes; what conditions name.
    pub etag: String,
    /// When the server took it, in nanoseconds since 1970.
    pub modified_nanos: i64,
    /// `None` where a listing does not tell; `head` always does.
    pub words: Option<Words>,
    /// CRC-64/NVME of the whole content, if the server keeps it.
    pub crc64nvme: Option<u64>,
}

/// One page of a listing, in the order of the keys' bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    pub objects: Vec<Object>,
    /// With a delimiter: what stands between the asked prefix and the next `/`, that one included; whole keys.
    pub prefixes: Vec<String>,
    /// For the next page.
    pub next: Option<String>,
}

/// What must be under a key for a write to happen. A server that cannot be asked says so in its `Abilities`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When<'a> {
    Always,
    Absent,
    /// The object with this etag.
    Is(&'a str),
}

/// Bytes to be sent: can be read again for a second try.
pub trait Body: Send + Sync {
    fn len(&self) -> u64;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills the whole buffer from this offset on.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// To be called before the last byte is sent, where there is one (`Abilities::holds_back`).
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
    /// From 1.
    pub number: u32,
    pub size_bytes: u64,
    pub etag: String,
    pub crc64nvme: Option<u64>,
}

/// An upload that was begun and is neither complete nor given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    pub key: String,
    pub id: String,
    pub begun_nanos: i64,
}

/// What a server can do, and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// `When::Absent` is honoured, by `put` and by `complete`.
    pub if_absent: bool,
    /// `When::Is` is honoured.
    pub if_same: bool,
    /// It computes CRC-64/NVME itself, refuses a body that has another, and tells it.
    pub checksums: bool,
    /// It copies from key to key without the bytes going through us.
    pub copies: bool,
    pub uploads_in_parts: bool,
    /// The driver sends a body's last byte only when it may be (`Body::last_byte_waits`); before that no object is made.
    pub holds_back: bool,
    /// All parts but the last are at least so long.
    pub part_bytes_min: u64,
    /// No part is longer; where it is the same, all parts but the last are so long.
    pub part_bytes_max: u64,
    pub parts_max: u32,
    /// By one `put`.
    pub put_bytes_max: u64,
    /// By one `copy`.
    pub copy_bytes_max: u64,
    pub object_bytes_max: u64,
    /// Listings tell every key as it is. Where not, one with characters that XML has not would not be found again.
    pub lists_any_key: bool,
    /// Of UTF-8.
    pub key_bytes_max: usize,
    /// Names and values together.
    pub words_bytes_max: usize,
}

/// A server of objects: one bucket, all keys below one prefix that the driver adds and takes away itself.
/// Every call blocks; all of them may be made from many threads at once.
pub trait Objects: Send + Sync {
    /// For messages, never with credentials: `s3://bucket/prefix`.
    fn describe(&self) -> String;
    fn abilities(&self) -> Abilities;

    /// `None`: no such key.
    fn head(&self, key: &str) -> io::Result<Option<Object>>;
    /// The bytes of the range (not empty, within the object), only while the object has this etag.
    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>>;
    /// What lies below `prefix`; with `delimited`, only as far as the next `/`. `from` is an earlier page's `next`.
    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page>;
    /// One page of what lies below `prefix` and comes behind this key. `None`: it cannot be asked that.
    fn list_behind(&self, _prefix: &str, _key: &str) -> io::Result<Option<Page>> {
        Ok(None)
    }

    /// Returns the etag. `crc64nvme` is that of the body; the server refuses another if it can.
    fn put(&self, key: &str, body: &dyn Body, crc64nvme: u64, words: &Words, when: When<'_>) -> io::Result<String>;
    /// Server-side, only while the source has this etag; with other words where given, else the source's. Returns the etag.
    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String>;
    /// Absent is fine.
    fn delete(&self, key: &str) -> io::Result<()>;

    // ---- an upload in parts becomes visible when it is complete
    fn begin(&self, key: &str, words: &Words) -> io::Result<String>;
    fn part(&self, key: &str, id: &str, number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part>;
    /// A part that is a range of an object that the server has.
    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part>;
    /// All parts that the server has of it. ENOENT: no such upload.
    fn parts(&self, key: &str, id: &str) -> io::Result<Vec<Part>>;
    /// `crc64nvme` is that of the whole. Returns the etag.
    fn complete(&self, key: &str, id: &str, parts: &[Part], crc64nvme: u64, when: When<'_>) -> io::Result<String>;
    /// Absent is fine.
    fn abort(&self, key: &str, id: &str) -> io::Result<()>;
    /// Something that is there and that no listing shows, because it has no name that a path can be; the first that was found.
    fn hidden(&self) -> io::Result<Option<String>> {
        Ok(None)
    }
    /// All uploads below `prefix` that are under way.
    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>>;

    /// All that was acknowledged survives the server's power loss when this returns, as far as the server lets itself be asked.
    fn settle(&self) -> io::Result<()> {
        Ok(())
    }
    /// Listings show from now on what others have put there, where the driver believed for a while to know that.
    fn refresh(&self) {}
}

/// A condition of a write did not hold: somebody else was there first.
#[derive(Debug, thiserror::Error)]
#[error("somebody else has changed {key} in the store")]
pub struct ConditionFailed {
    pub key: String,
}

pub fn condition_failed(key: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, ConditionFailed { key: key.to_owned() })
}

pub fn is_condition_failed(why: &io::Error) -> bool {
    why.get_ref().is_some_and(|inner| inner.is::<ConditionFailed>())
}
