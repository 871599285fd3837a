//! The server's answers.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::failure::Failure;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub access_time: i64,
    #[serde(default)]
    pub block_size: u64,
    /// The inode's number: constant for the life of the file under any name, and never reused.
    pub file_id: u64,
    pub group: String,
    pub length: u64,
    pub modification_time: i64,
    pub owner: String,
    #[serde(default)]
    pub path_suffix: String,
    #[serde(default)]
    pub children_num: u64,
    /// Octal.
    pub permission: String,
    #[serde(rename = "type")]
    pub kind: String,
}

impl Status {
    pub fn is_dir(&self) -> bool {
        self.kind == "DIRECTORY"
    }
    pub fn perm(&self) -> u32 {
        u32::from_str_radix(&self.permission, 8).unwrap_or(0) & 0o7777
    }
}

#[derive(Deserialize)]
pub struct OneStatus {
    #[serde(rename = "FileStatus")]
    pub status: Status,
}

#[derive(Deserialize)]
pub struct Statuses {
    #[serde(rename = "FileStatuses")]
    pub statuses: StatusList,
}

#[derive(Deserialize)]
pub struct StatusList {
    #[serde(rename = "FileStatus")]
    pub list: Vec<Status>,
}

#[derive(Deserialize)]
pub struct Batch {
    #[serde(rename = "DirectoryListing")]
    pub listing: Partial,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Partial {
    pub partial_listing: Statuses,
    pub remaining_entries: u64,
}

#[derive(Deserialize)]
pub struct Attributes {
    #[serde(rename = "XAttrs")]
    pub list: Vec<Attribute>,
}

#[derive(Deserialize)]
pub struct Attribute {
    pub name: String,
    /// `0x…`; `None` if it is empty.
    pub value: Option<String>,
}

#[derive(Deserialize)]
pub struct Truth {
    pub boolean: bool,
}

#[derive(Deserialize)]
pub struct OneDigest {
    #[serde(rename = "FileChecksum")]
    pub digest: Digest,
}

#[derive(Debug, Deserialize)]
pub struct Digest {
    pub algorithm: String,
    pub bytes: String,
}

#[derive(Deserialize)]
pub struct Defaults {
    #[serde(rename = "FsServerDefaults")]
    pub defaults: ServerDefaults,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerDefaults {
    pub block_size: u64,
    pub bytes_per_checksum: u32,
    /// 1: CRC32, 2: CRC32C.
    pub checksum_type: u32,
}

#[derive(Deserialize)]
pub struct OneSpace {
    #[serde(rename = "FsStatus")]
    pub space: FsSpace,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub struct FsSpace {
    pub remaining: u64,
    pub capacity: u64,
}

pub fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(text).map_err(|why| Failure::garbled(&format!("the answer is not understood: {why}")))
}

pub fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub fn from_hexadecimal(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_a_file_is_parsed() {
        let text = br#"{"FileStatus":{"accessTime":1795425473262,"blockSize":134217728,"childrenNum":0,"fileId":16388,"group":"users","length":3000000,"modificationTime":1795425475054,"owner":"1000","pathSuffix":"","permission":"1640","replication":1,"storagePolicy":0,"type":"FILE"}}"#;
        let OneStatus { status } = parse(text).unwrap();
        assert_eq!((status.file_id, status.perm(), status.is_dir(), status.length), (16388, 0o1640, false, 3_000_000));
        assert!(parse::<OneStatus>(b"<html>").is_err());
    }

    #[test]
    fn bytes_in_hexadecimal_read_back() {
        assert_eq!(hexadecimal(&[0, 255, 10]), "00ff0a");
        assert_eq!(from_hexadecimal("00FF0a"), Some(vec![0, 255, 10]));
        for wrong in ["0", "0g", "é0"] {
            assert_eq!(from_hexadecimal(wrong), None, "{wrong}");
        }
    }
}
