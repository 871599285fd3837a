//! The document of a file: the fields of the standard, and the driver's own in `metadata.surgetank`.
//!
//! An etag names one version. It has the file's id, its length and date (other clients may put other bytes under one id), and a
//! checksum of a random value that changes with the words. The first three name the bytes.

use super::bson::{Document, Id, Value, fields};
use super::failure::Failure;
use super::server::{hex, unhex};
use crate::checksum;
use crate::object::{Object, Words};
use surgetank_types::error::Errno;

/// The standard's size. (Some servers put a hundred chunks of any size into one answer, which is too long for some clients.) A
/// part of an upload is a whole number of chunks, and so is a piece that is read at a time.
pub const CHUNK_BYTES: u64 = 255 << 10;
pub const OURS: &str = "surgetank";
const STANDARD: [&str; 6] = ["_id", "filename", "length", "chunkSize", "uploadDate", "metadata"];
/// The longest id in an etag; other clients may use any id.
const ID_BYTES_MAX: usize = 512;

/// A version of a file that a server has.
#[derive(Debug, Clone, PartialEq)]
pub struct File {
    pub id: Value,
    pub filename: String,
    pub size_bytes: u64,
    pub chunk_bytes: u64,
    pub date_millis: i64,
    /// Includes the fields of other clients. `None`: another client wrote something that is not a document.
    pub metadata: Option<Document>,
    /// Fields of other clients beside those of the standard.
    pub beside: Document,
}

impl File {
    /// `None`: the file has no usable name, length or chunk size.
    pub fn of(document: &Document) -> Option<Self> {
        let size_bytes = u64::try_from(document.number("length")?).ok()?;
        let chunk_bytes = u64::try_from(document.number("chunkSize")?).ok()?;
        let id = document.get("_id")?.clone();
        let date_millis = match document.get("uploadDate") {
            Some(Value::Date(millis)) => *millis,
            _ => 0,
        };
        let usable = (1..=1 << 30).contains(&chunk_bytes) && id.bytes().len() <= ID_BYTES_MAX;
        usable.then_some(())?;
        let filename = document.text("filename")?.to_owned();
        let metadata = match document.get("metadata") {
            Some(Value::Document(metadata)) => Some(metadata.clone()),
            None | Some(Value::Null) => Some(Document::default()),
            Some(_) => None,
        };
        let beside = document.0.iter().filter(|(name, _)| !STANDARD.contains(&name.as_str())).cloned().collect();
        Some(Self { id, filename, size_bytes, chunk_bytes, date_millis, metadata, beside: Document(beside) })
    }

    pub fn new(id: Id, filename: String, size_bytes: u64, metadata: Document) -> Self {
        let beside = Document::default();
        Self {
            id: id.into(),
            filename,
            size_bytes,
            chunk_bytes: CHUNK_BYTES,
            date_millis: 0,
            metadata: Some(metadata),
            beside,
        }
    }

    /// Errors: EPERM if another client put something there that cannot hold the field of this driver.
    pub fn metadata(&self) -> Result<&Document, Failure> {
        let why = "the field metadata of the file is not a document, so Surgetank cannot store attributes in it";
        self.metadata.as_ref().ok_or_else(|| Failure::ours(Errno::PERM, why))
    }

    fn ours(&self) -> Option<&Document> {
        self.metadata.as_ref()?.document(OURS)
    }

    /// Has the same bytes and words, as two tries of one publication.
    pub fn is_again(&self, earlier: &Self) -> bool {
        let words = |file: &Self| file.ours().and_then(|ours| ours.document("words").cloned());
        let sum = |file: &Self| file.ours().and_then(|ours| ours.text("crc64nvme").map(str::to_owned));
        let same = words(self) == words(earlier) && sum(self) == sum(earlier) && self.size_bytes == earlier.size_bytes;
        same && sum(self).is_some() && words(self).is_some_and(|words| !words.0.is_empty())
    }

    pub fn document(&self) -> Document {
        let number = |bytes: u64| Value::Long(i64::try_from(bytes).unwrap_or(i64::MAX));
        let mut document = fields! {
            "_id": &self.id, "filename": self.filename.as_str(), "length": number(self.size_bytes),
            "chunkSize": Value::Int(i32::try_from(self.chunk_bytes).unwrap_or(i32::MAX)),
            "uploadDate": Value::Date(self.date_millis), "metadata": self.metadata.clone().unwrap_or_default(),
        };
        document.0.extend(self.beside.0.iter().cloned());
        document
    }

    pub fn etag(&self) -> String {
        let drawn = self.ours().and_then(|ours| ours.text("version")).unwrap_or_default();
        format!("{}.{:016x}", self.bytes_tag(), checksum::of_bytes(drawn.as_bytes()))
    }

    fn bytes_tag(&self) -> String {
        format!("{}.{:x}.{:x}", hex(&self.id.bytes()), self.size_bytes, self.date_millis)
    }

    /// Does the etag name these bytes?
    pub fn is_of(&self, etag: &str) -> bool {
        etag.rsplit_once('.').is_some_and(|(tag, _)| tag == self.bytes_tag())
    }

    pub fn has_bytes_of(&self, other: &Self) -> bool {
        self.bytes_tag() == other.bytes_tag()
    }

    /// The file as an object; its key has no prefix.
    pub fn object(&self, prefix: &str) -> Option<Object> {
        let ours = self.ours();
        let word = |(name, value): &(String, Value)| Some((name.clone(), value.as_text()?.to_owned()));
        let words = ours.and_then(|ours| ours.document("words"));
        let crc = ours.and_then(|ours| ours.text("crc64nvme"));
        Some(Object {
            key: self.filename.strip_prefix(prefix)?.to_owned(),
            size_bytes: self.size_bytes,
            etag: self.etag(),
            modified_nanos: self.date_millis.saturating_mul(1_000_000),
            words: Some(words.map(|words| words.0.iter().filter_map(word).collect()).unwrap_or_default()),
            crc64nvme: crc.and_then(|crc| u64::from_str_radix(crc, 16).ok()),
        })
    }
}

/// The content of `metadata.surgetank`.
pub fn ours(words: &Words, crc64nvme: Option<u64>, version: &Id) -> Document {
    let words = Document(words.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect());
    let mut ours = fields! { "words": words, "version": hex(version) };
    if let Some(crc) = crc64nvme {
        ours = ours.with("crc64nvme", format!("{crc:016x}"));
    }
    ours
}

pub fn words_of(document: &Document) -> Words {
    let word = |(name, value): &(String, Value)| Some((name.clone(), value.as_text()?.to_owned()));
    document.0.iter().filter_map(word).collect()
}

/// The id of the file in an etag.
pub fn id_of(etag: &str) -> Result<Value, Failure> {
    let (id, _) = etag.split_once('.').ok_or_else(Failure::condition)?;
    Value::of_bytes(&unhex(id).ok_or_else(Failure::condition)?).map_err(|_| Failure::condition())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_document_is_read_back() {
        let words = Words::from([("mode".to_owned(), "0644".to_owned())]);
        let metadata = fields! { "theirs": 7 }.with(OURS, ours(&words, Some(5), &[1; 12]));
        let file = File::new([9; 12], "p/a".into(), 1 << 40, metadata);
        assert_eq!(File::of(&file.document()).unwrap(), file);
        let object = file.object("p/").unwrap();
        assert_eq!((object.key.as_str(), object.size_bytes, object.crc64nvme), ("a", 1 << 40, Some(5)));
        assert_eq!(object.words, Some(words));
        assert_eq!(id_of(&object.etag).unwrap(), file.id);
        for changed in [
            File { size_bytes: 1, ..file.clone() },
            File { date_millis: 1, ..file.clone() },
            File { metadata: Some(Document::default()), ..file.clone() },
        ] {
            assert_ne!(changed.etag(), file.etag());
        }
    }

    #[test]
    fn file_of_another_client_is_read() {
        let theirs = fields! {
            "_id": "a name", "filename": "x", "length": Value::Double(5.0), "chunkSize": 261_120,
            "uploadDate": Value::Date(1_700_000_000_000), "md5": "…", "metadata": Value::Null,
        };
        let object = File::of(&theirs).unwrap().object("").unwrap();
        assert_eq!((object.size_bytes, object.words, object.crc64nvme), (5, Some(Words::new()), None));
        assert_eq!(object.modified_nanos, 1_700_000_000_000_000_000);
        assert_eq!(id_of(&object.etag).unwrap(), Value::from("a name"));
        for (name, value) in [("length", Value::Int(-1)), ("chunkSize", Value::Int(0)), ("filename", Value::Null)] {
            assert_eq!(File::of(&theirs.clone().with(name, &value)), None, "{name}");
        }
        for etag in ["", "x.y", "07.0", "0.0", "0123456789abcdef"] {
            assert!(id_of(etag).is_err(), "{etag}");
        }
    }
}
