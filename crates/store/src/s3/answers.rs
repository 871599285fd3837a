//! The servers' answers in XML and in headers, and the little XML that the driver sends.
//!
//! The danger that it avoids: misread names. A key may have any character, and XML cannot contain all of them. Listings are
//! therefore requested in URL encoding; whether a server used it is taken from its answer (`EncodingType`).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use percent_encoding::percent_decode_str;
use reqsign_core::time::Timestamp;
use serde::Deserialize;
use ureq::http::HeaderMap;

use super::failure::Failure;
use crate::object::{Object, Part, Words};

/// Prefix of the headers of user metadata.
pub const WORD: &str = "x-amz-meta-";

/// Code and message of an error; `None` if the body is not one.
pub fn error_of(body: &[u8]) -> Option<(String, String)> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct ErrorBody {
        code: String,
        #[serde(default)]
        message: String,
    }
    let text = std::str::from_utf8(body).ok()?;
    let (_, root) = text.split_once("<Error")?;
    root.starts_with(['>', ' ']).then_some(())?;
    let said: ErrorBody = quick_xml::de::from_str(text).ok()?;
    // For one line of a log.
    let message: String = said.message.chars().filter(|c| !c.is_control()).take(300).collect();
    Some((said.code, message))
}

/// The answer of a request that may fail after it began as a success.
pub fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    if error_of(body).is_some() {
        return Err(Failure::refused(200, body, true));
    }
    let text = std::str::from_utf8(body).map_err(|_| Failure::garbled("the answer is not UTF-8"))?;
    quick_xml::de::from_str(text).map_err(|_| Failure::garbled("the answer is not the XML that was expected"))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Listing {
    #[serde(default)]
    pub contents: Vec<Listed>,
    #[serde(default)]
    pub common_prefixes: Vec<CommonPrefix>,
    #[serde(default)]
    pub is_truncated: bool,
    pub next_continuation_token: Option<String>,
    pub encoding_type: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Listed {
    pub key: String,
    pub size: u64,
    #[serde(rename = "ETag")]
    pub etag: String,
    pub last_modified: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct CommonPrefix {
    pub prefix: String,
}

/// Of CopyObject, UploadPartCopy and CompleteMultipartUpload.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Made {
    #[serde(rename = "ETag")]
    pub etag: String,
    #[serde(rename = "ChecksumCRC64NVME")]
    pub crc64nvme: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Begun {
    pub upload_id: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PartList {
    #[serde(default)]
    pub part: Vec<ListedPart>,
    #[serde(default)]
    pub is_truncated: bool,
    pub next_part_number_marker: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ListedPart {
    pub part_number: u32,
    #[serde(rename = "ETag")]
    pub etag: String,
    pub size: u64,
    #[serde(rename = "ChecksumCRC64NVME")]
    pub crc64nvme: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct UploadList {
    #[serde(default)]
    pub upload: Vec<ListedUpload>,
    #[serde(default)]
    pub is_truncated: bool,
    pub next_key_marker: Option<String>,
    pub next_upload_id_marker: Option<String>,
    pub encoding_type: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ListedUpload {
    pub key: String,
    pub upload_id: String,
    #[serde(default)]
    pub initiated: String,
}

/// Decodes a name of a listing.
pub fn name(text: &str, encoding: Option<&str>) -> Result<String, Failure> {
    if encoding != Some("url") {
        return Ok(text.to_owned());
    }
    // Some servers write a space as `+`, and all of them a plus as `%2B`.
    let text = text.replace('+', " ");
    let name = percent_decode_str(&text).decode_utf8().map_err(|_| Failure::garbled("a name is not UTF-8"))?;
    Ok(name.into_owned())
}

pub fn listed(entry: &Listed, key: String) -> Result<Object, Failure> {
    Ok(Object {
        key,
        size_bytes: entry.size,
        etag: bare(&entry.etag),
        modified_nanos: nanos(entry.last_modified.parse())?,
        words: None,
        crc64nvme: None,
    })
}

pub fn begun_nanos(text: &str) -> i64 {
    nanos(text.parse()).unwrap_or(0)
}

/// An object, from the headers of the answer to HEAD.
pub fn object(headers: &HeaderMap, key: &str) -> Result<Object, Failure> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let missing = || Failure::garbled("the answer has no length, no etag or no date");
    let words = headers.iter().filter_map(|(name, value)| {
        Some((name.as_str().strip_prefix(WORD)?.to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
    });
    Ok(Object {
        key: key.to_owned(),
        size_bytes: text("content-length").and_then(|length| length.parse().ok()).ok_or_else(missing)?,
        etag: bare(text("etag").ok_or_else(missing)?),
        modified_nanos: nanos(Timestamp::parse_rfc2822(text("last-modified").ok_or_else(missing)?))?,
        words: Some(words.collect::<Words>()),
        crc64nvme: whole_crc(headers),
    })
}

/// The checksum of the whole content, not that of the parts' checksums.
pub fn whole_crc(headers: &HeaderMap) -> Option<u64> {
    let kind = headers.get("x-amz-checksum-type").and_then(|value| value.to_str().ok());
    if kind == Some("COMPOSITE") {
        return None;
    }
    crc(headers.get("x-amz-checksum-crc64nvme")?.to_str().ok()?)
}

pub fn etag(headers: &HeaderMap) -> Result<String, Failure> {
    let value = headers.get("etag").and_then(|value| value.to_str().ok());
    value.map(bare).ok_or_else(|| Failure::garbled("the answer has no etag"))
}

pub fn bare(etag: &str) -> String {
    etag.trim().trim_start_matches("W/").trim_matches('"').to_owned()
}

pub fn quoted(etag: &str) -> String {
    format!("\"{etag}\"")
}

pub fn crc(text: &str) -> Option<u64> {
    Some(u64::from_be_bytes(BASE64.decode(text).ok()?.try_into().ok()?))
}

pub fn crc_text(crc: u64) -> String {
    BASE64.encode(crc.to_be_bytes())
}

/// The body that completes an upload.
pub fn completion(parts: &[Part]) -> String {
    let mut xml = String::from("<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">");
    for part in parts {
        let sum = part.crc64nvme.map(|sum| format!("<ChecksumCRC64NVME>{}</ChecksumCRC64NVME>", crc_text(sum)));
        let etag = quick_xml::escape::escape(part.etag.as_str());
        xml.push_str(&format!(
            "<Part><ETag>&quot;{etag}&quot;</ETag>{}<PartNumber>{}</PartNumber></Part>",
            sum.unwrap_or_default(),
            part.number
        ));
    }
    xml.push_str("</CompleteMultipartUpload>");
    xml
}

fn nanos(when: reqsign_core::Result<Timestamp>) -> Result<i64, Failure> {
    let when = when.map_err(|_| Failure::garbled("the answer has an invalid date"))?;
    Ok(when.as_second().saturating_mul(1_000_000_000).saturating_add(i64::from(when.subsec_nanosecond())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_of_a_listing_is_parsed() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
            <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix>p%2F</Prefix>
            <EncodingType>url</EncodingType><KeyCount>3</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>true</IsTruncated>
            <Contents><Key>p/a+b%2Bc%2541</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>
            <ETag>&quot;0a1b&quot;</ETag><Size>12</Size><StorageClass>STANDARD</StorageClass></Contents>
            <CommonPrefixes><Prefix>p/x%26y/</Prefix></CommonPrefixes>
            <Contents><Key>p/z</Key><LastModified>2026-01-02T03:04:05Z</LastModified><ETag>"1"</ETag><Size>0</Size></Contents>
            <NextContinuationToken>1ueG/=</NextContinuationToken></ListBucketResult>"#;
        let listing: Listing = parse(xml.as_bytes()).unwrap();
        let encoding = listing.encoding_type.as_deref();
        let keys: Vec<_> = listing.contents.iter().map(|entry| name(&entry.key, encoding).unwrap()).collect();
        assert_eq!(keys, ["p/a b+c%41", "p/z"]);
        assert_eq!(name(&listing.common_prefixes[0].prefix, encoding).unwrap(), "p/x&y/");
        let object = listed(&listing.contents[0], keys[0].clone()).unwrap();
        assert_eq!((object.etag.as_str(), object.size_bytes), ("0a1b", 12));
        assert_eq!(object.modified_nanos % 1_000_000_000, 678_000_000);
        assert_eq!((listing.is_truncated, listing.next_continuation_token.as_deref()), (true, Some("1ueG/=")));
        let empty: Listing = parse(b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>").unwrap();
        assert!(empty.contents.is_empty() && empty.common_prefixes.is_empty());
    }

    #[test]
    fn error_body_of_a_success_is_found() {
        let xml = br#"<?xml version="1.0" encoding="UTF-8"?>

            <Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"#;
        let why = parse::<Made>(xml).unwrap_err();
        assert!(why.again && why.code == "InternalError", "{why:?}");
        let why = parse::<Made>(b"<CopyObjectResult><ETag>x</E").unwrap_err();
        assert!(why.again && why.unsure, "{why:?}");
        assert_eq!(error_of(b"<ErrorDocument><Key>x</Key></ErrorDocument>"), None);
        assert_eq!(error_of(b"half <Error><Code>x"), None);
    }

    #[test]
    fn checksum_text_is_big_endian() {
        // CRC-64/NVME of "123456789" is 0xae8b14860a799888.
        assert_eq!(crc_text(0xae8b_1486_0a79_9888), "rosUhgp5mIg=");
        assert_eq!(crc("rosUhgp5mIg="), Some(0xae8b_1486_0a79_9888));
        assert_eq!(crc("rosUhgp5mIg=-3"), None);
        assert_eq!(crc("AAAA"), None);
    }

    #[test]
    fn completion_of_upload_lists_its_parts() {
        let parts = [Part { number: 2, size_bytes: 9, etag: "a<b".into(), crc64nvme: Some(0) }];
        let xml = completion(&parts);
        assert!(xml.contains("<ETag>&quot;a&lt;b&quot;</ETag>"), "{xml}");
        assert!(xml.contains("<ChecksumCRC64NVME>AAAAAAAAAAA=</ChecksumCRC64NVME><PartNumber>2</PartNumber>"), "{xml}");
    }
}
