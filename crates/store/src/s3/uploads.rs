//! Uploads in parts, as the server has them: begun, filled in any order, completed or aborted.
//!
//! The danger that it avoids: an abandoned upload stays indefinitely, costs money and is not in any listing; `uploads` finds
//! it.

use std::ops::Range;

use md5::{Digest, Md5};
use ureq::http::Method;

use super::answers;
use super::counters::Kind;
use super::failure::Failure;
use super::server::Server;
use super::wire::{Answer, Ask, Content};
use crate::object::{Abilities, Body, Part, Upload, When, Words};

impl Server {
    pub fn begin(&self, able: &Abilities, key: &str, words: &Words) -> Result<String, Failure> {
        let whole = self.whole(key);
        let mut ask = super::with_words(Ask::new(Kind::Begin, Method::POST, Some(&whole)).query("uploads", ""), words);
        if able.checksums {
            ask = ask.header("x-amz-checksum-algorithm", "CRC64NVME").header("x-amz-checksum-type", "FULL_OBJECT");
        }
        self.ask(&ask, |answer| Ok(answers::parse::<answers::Begun>(&answer.text()?)?.upload_id))
    }

    pub fn part(
        &self,
        able: &Abilities,
        key: &str,
        id: &str,
        number: u32,
        body: &dyn Body,
        crc: u64,
    ) -> Result<Part, Failure> {
        let whole = self.whole(key);
        let md5 = if able.checksums { None } else { Some(super::md5_of(body)?) };
        let (name, value) = super::proof(crc, md5.as_ref());
        let ask = Ask::new(Kind::Part, Method::PUT, Some(&whole)).content(Content::Body(body)).header(name, value);
        let (etag, _) = self.ask(&of_part(ask, id, number), sent)?;
        Ok(Part { number, size_bytes: body.len(), etag, crc64nvme: able.checksums.then_some(crc) })
    }

    /// A body whose checksum is known only after it was read; returns the server's checksum.
    pub fn part_unsummed(&self, key: &str, id: &str, number: u32, body: &dyn Body) -> Result<Part, Failure> {
        let whole = self.whole(key);
        let ask = Ask::new(Kind::Part, Method::PUT, Some(&whole)).content(Content::Body(body));
        let (etag, crc64nvme) = self.ask(&of_part(ask, id, number), sent)?;
        Ok(Part { number, size_bytes: body.len(), etag, crc64nvme })
    }

    pub fn part_of(
        &self,
        key: &str,
        id: &str,
        number: u32,
        from: &str,
        range: Range<u64>,
        etag: &str,
    ) -> Result<Part, Failure> {
        let whole = self.whole(key);
        let mut ask = Ask::new(Kind::PartOf, Method::PUT, Some(&whole))
            .header("x-amz-copy-source", self.wire.copy_source(&self.whole(from)))
            .header("x-amz-copy-source-range", format!("bytes={}-{}", range.start, range.end.saturating_sub(1)))
            .header("x-amz-copy-source-if-match", answers::quoted(etag));
        ask.conditional = true;
        self.ask(&of_part(ask, id, number), |answer| {
            let made: answers::Made = answers::parse(&answer.text()?)?;
            let crc64nvme = made.crc64nvme.as_deref().and_then(answers::crc);
            let size_bytes = range.end.saturating_sub(range.start);
            Ok(Part { number, size_bytes, etag: answers::bare(&made.etag), crc64nvme })
        })
    }

    pub fn parts(&self, key: &str, id: &str) -> Result<Vec<Part>, Failure> {
        let whole = self.whole(key);
        let mut parts: Vec<Part> = Vec::new();
        let mut marker = None;
        loop {
            let mut ask = Ask::new(Kind::Parts, Method::GET, Some(&whole)).query("uploadId", id);
            if let Some(after) = marker {
                ask = ask.query("part-number-marker", u32::to_string(&after));
            }
            let page: answers::PartList = self.ask(&ask, |answer| answers::parse(&answer.text()?))?;
            parts.extend(page.part.iter().map(|part| Part {
                number: part.part_number,
                size_bytes: part.size,
                etag: answers::bare(&part.etag),
                crc64nvme: part.crc64nvme.as_deref().and_then(answers::crc),
            }));
            match page.next_part_number_marker {
                Some(next) if page.is_truncated && marker.is_none_or(|last| last < next) => marker = Some(next),
                _ => return Ok(parts),
            }
        }
    }

    pub fn complete(
        &self,
        able: &Abilities,
        key: &str,
        id: &str,
        parts: &[Part],
        crc: u64,
        when: When<'_>,
    ) -> Result<String, Failure> {
        let whole = self.whole(key);
        let xml = answers::completion(parts);
        let mut ask = Ask::new(Kind::Complete, Method::POST, Some(&whole)).query("uploadId", id);
        ask = super::with_condition(ask.content(Content::Text(&xml)), when);
        if able.checksums {
            ask = ask
                .header("x-amz-checksum-crc64nvme", answers::crc_text(crc))
                .header("x-amz-checksum-type", "FULL_OBJECT");
        }
        let size_bytes: u64 = parts.iter().map(|part| part.size_bytes).sum();
        ask = ask.header("x-amz-mp-object-size", size_bytes.to_string());
        let made = self.ask(&ask, |answer| {
            let made: answers::Made = answers::parse(&answer.text()?)?;
            Ok(answers::bare(&made.etag))
        });
        made.map_err(|why| super::gone_is_changed(why, when))
    }

    pub fn abort(&self, key: &str, id: &str) -> Result<(), Failure> {
        let whole = self.whole(key);
        let ask = Ask::new(Kind::Abort, Method::DELETE, Some(&whole)).query("uploadId", id);
        match self.ask(&ask, |answer| answer.text().map(drop)) {
            Err(why) if why.is(surgetank_types::error::Errno::NOENT) => Ok(()),
            done => done,
        }
    }

    pub fn uploads(&self, prefix: &str) -> Result<Vec<Upload>, Failure> {
        let whole = self.whole(prefix);
        let mut uploads = Vec::new();
        let mut after: Option<(String, String)> = None;
        loop {
            let mut ask = Ask::new(Kind::Uploads, Method::GET, None).query("uploads", "").query("encoding-type", "url");
            ask = ask.query("prefix", whole.as_str());
            if let Some((key, id)) = &after {
                ask = ask.query("key-marker", key.as_str()).query("upload-id-marker", id.as_str());
            }
            let page: answers::UploadList = self.ask(&ask, |answer| answers::parse(&answer.text()?))?;
            let encoding = page.encoding_type.as_deref();
            for upload in page.upload {
                let key = answers::name(&upload.key, encoding)?;
                if let Some(key) = key.strip_prefix(&self.place.prefix) {
                    let begun_nanos = answers::begun_nanos(&upload.initiated);
                    uploads.push(Upload { key: key.to_owned(), id: upload.upload_id, begun_nanos });
                }
            }
            let next = match page.next_key_marker {
                Some(key) if page.is_truncated => {
                    Some((answers::name(&key, encoding)?, page.next_upload_id_marker.unwrap_or_default()))
                }
                _ => None,
            };
            // A server that returns the same page again would never end.
            if next.is_none() || next == after {
                return Ok(uploads);
            }
            after = next;
        }
    }
}

/// Etag and checksum of a part that arrived.
fn sent(answer: Answer) -> Result<(String, Option<u64>), Failure> {
    let told = (answers::etag(&answer.headers)?, answers::whole_crc(&answer.headers));
    answer.text()?;
    Ok(told)
}

fn of_part<'a>(ask: Ask<'a>, id: &'a str, number: u32) -> Ask<'a> {
    ask.query("partNumber", number.to_string()).query("uploadId", id)
}

/// The etag that most servers give to an object made of these parts.
pub fn etag_of_parts(parts: &[Part]) -> Option<String> {
    let mut sum = Md5::new();
    for part in parts {
        let digits =
            part.etag.as_bytes().chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok());
        sum.update(digits.collect::<Option<Vec<u8>>>().filter(|bytes| bytes.len() == 16)?);
    }
    Some(format!("{}-{}", super::hex(&sum.finalize()), parts.len()))
}
