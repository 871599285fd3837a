//! Objects on a server that speaks S3: Amazon's, or one of the many compatible ones.
//!
//! Every call is one request, or few. It blocks, is tried again a few times when the server or the network fails, and streams
//! its bytes. The driver determines what a server can do by trying each thing once (`probe`), because most servers silently
//! ignore what they do not know, and an ignored condition overwrites another client's file.
//!
//! The danger that it avoids: lost answers. A conditional write whose answer was lost is sent again, and then finds its own
//! object: the driver recognises it by its content and words, and reports success.

mod answers;
mod counters;
mod credentials;
mod failure;
mod place;
mod probe;
mod reading;
mod server;
#[cfg(test)]
mod tests;
mod through;
mod uploads;
mod wire;

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base64::Engine as _;
use md5::{Digest, Md5};
use ureq::http::Method;

pub use self::counters::{Counts, Kind};
use self::failure::{Failure, Meaning};
pub use self::place::{Limits, Payload, Place, Style};
use self::server::Server;
use self::wire::{Ask, Content};
use super::object::{Abilities, Body, Object, Objects, Page, Part, Upload, When, Words};
use surgetank_types::error::{Errno, Error};

/// Parses an answer of a server, for `fuzz/`.
#[cfg(fuzzing)]
pub fn read_answer(body: &[u8]) {
    let _ = answers::error_of(body);
    let _ = answers::parse::<answers::Made>(body);
    let _ = answers::parse::<answers::Begun>(body);
    let _ = answers::parse::<answers::PartList>(body);
    if let Ok(listing) = answers::parse::<answers::Listing>(body) {
        for entry in &listing.contents {
            let name = answers::name(&entry.key, listing.encoding_type.as_deref());
            let _ = name.and_then(|key| answers::listed(entry, key));
        }
    }
    if let Ok(uploads) = answers::parse::<answers::UploadList>(body) {
        uploads.upload.iter().for_each(|upload| {
            let _ = answers::begun_nanos(&upload.initiated);
        });
    }
}

/// One bucket, below one prefix. Clones share everything.
#[derive(Clone)]
pub struct S3(Arc<Server>);

impl S3 {
    /// Does not ask the server yet: its abilities are determined when they are first needed. Errors: a file that the place
    /// names cannot be used.
    pub fn new(place: Place) -> Result<Self, Error> {
        Ok(Self(Arc::new(Server::new(place)?)))
    }

    /// Asks the server what it can do, and thereby whether it is reachable and accepts the credentials. Errors: it does not.
    pub fn open(place: Place) -> Result<Self, Error> {
        let store = Self::new(place)?;
        store.0.known().map_err(|why| {
            Error::new(format!("the store {} at {} cannot be used", store.0.place, store.0.place.endpoint))
                .why(&why)
                .remedy(remedy(&why))
        })?;
        Ok(store)
    }

    /// For reading only: nothing is tried, because that needs more rights and leaves traces. Errors: the bucket cannot be read.
    pub fn open_to_read(place: Place) -> Result<Self, Error> {
        let store = Self::new(place)?;
        let found = store.0.list("", true, None).map_err(|why| {
            Error::new(format!("the store {} at {} cannot be read", store.0.place, store.0.place.endpoint))
                .why(&why)
                .remedy(remedy(&why))
        });
        found?;
        // No other thread has it yet.
        let _ = store.0.abilities.set(probe::NOTHING);
        Ok(store)
    }

    /// Requests and bytes so far.
    pub fn counters(&self) -> Counts {
        self.0.wire.counters.read()
    }

    /// The server's last unexpected answer, for messages.
    pub fn trouble(&self) -> Option<String> {
        self.0.trouble()
    }

    fn known(&self) -> io::Result<Abilities> {
        self.0.known().map_err(|why| self.0.report("", why))
    }

    /// Whether the object of the key is the own one, or an equal one of another client. Asked when the answer of a write was
    /// lost.
    fn is_ours(&self, key: &str, size_bytes: u64, crc: u64, etag: &str, words: Option<&Words>) -> Option<String> {
        let found = self.0.head(key).ok()??;
        let same = found.crc64nvme.map_or(found.etag == etag, |theirs| theirs == crc);
        let said = words.is_none_or(|words| found.words.as_ref() == Some(words));
        (same && said && found.size_bytes == size_bytes).then_some(found.etag)
    }
}

impl std::fmt::Debug for S3 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("S3").field(&self.0.place).finish()
    }
}

impl Objects for S3 {
    fn describe(&self) -> String {
        self.0.place.to_string()
    }

    fn abilities(&self) -> Abilities {
        // Without an answer it counts as unable: no caller may rely on an ability. The next call asks again.
        self.known().unwrap_or(probe::NOTHING)
    }

    fn head(&self, key: &str) -> io::Result<Option<Object>> {
        self.0.head(key).map_err(|why| self.0.report(key, why))
    }

    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(reading::Reading::begin(Arc::clone(&self.0), key, range, etag)?))
    }

    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page> {
        let from = from.map(|token| ("continuation-token", token.to_owned()));
        self.0.list(prefix, delimited, from).map_err(|why| self.0.report(prefix, why))
    }

    fn list_behind(&self, prefix: &str, key: &str) -> io::Result<Option<Page>> {
        let from = Some(("start-after", self.0.whole(key)));
        self.0.list(prefix, false, from).map(Some).map_err(|why| self.0.report(prefix, why))
    }

    fn put(&self, key: &str, body: &dyn Body, crc64nvme: u64, words: &Words, when: When<'_>) -> io::Result<String> {
        let able = self.known()?;
        let put = || -> Result<String, Failure> {
            allowed(&able, when)?;
            let md5 = if able.checksums { None } else { Some(md5_of(body)?) };
            let proof = proof(crc64nvme, md5.as_ref());
            let sent = self.0.put(key, body, words, when, proof);
            let Err(why) = sent else { return sent };
            if why.unsure && why.meaning == Meaning::Condition {
                let etag = md5.map_or(String::new(), |sum| hex(&sum));
                if let Some(etag) = self.is_ours(key, body.len(), crc64nvme, &etag, Some(words)) {
                    return Ok(etag);
                }
            }
            Err(why)
        };
        put().map_err(|why| self.0.report(key, why))
    }

    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String> {
        let able = self.known()?;
        self.0.copy(&able, from, etag, to, words).map_err(|why| self.0.report(from, why))
    }

    fn delete(&self, key: &str) -> io::Result<()> {
        self.0.delete(key).map_err(|why| self.0.report(key, why))
    }

    fn begin(&self, key: &str, words: &Words) -> io::Result<String> {
        let able = self.known()?;
        self.0.begin(&able, key, words).map_err(|why| self.0.report(key, why))
    }

    fn part(&self, key: &str, id: &str, number: u32, body: &dyn Body, crc64nvme: u64) -> io::Result<Part> {
        let able = self.known()?;
        self.0.part(&able, key, id, number, body, crc64nvme).map_err(|why| self.0.report(key, why))
    }

    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part> {
        let able = self.known()?;
        let part = if self.0.ranges_missummed.load(Ordering::Relaxed) {
            through::part_of(&self.0, &able, key, id, number, from, range, etag)
        } else {
            self.0.part_of(key, id, number, from, range, etag)
        };
        part.map_err(|why| self.0.report(from, why))
    }

    fn parts(&self, key: &str, id: &str) -> io::Result<Vec<Part>> {
        self.0.parts(key, id).map_err(|why| self.0.report(key, why))
    }

    fn complete(&self, key: &str, id: &str, parts: &[Part], crc64nvme: u64, when: When<'_>) -> io::Result<String> {
        let able = self.known()?;
        let complete = || -> Result<String, Failure> {
            allowed(&able, when)?;
            let completed = self.0.complete(&able, key, id, parts, crc64nvme, when);
            let Err(why) = completed else { return completed };
            if why.unsure && (why.meaning == Meaning::Condition || why.is(Errno::NOENT)) {
                let size_bytes = parts.iter().map(|part| part.size_bytes).sum();
                let etag = uploads::etag_of_parts(parts).unwrap_or_default();
                if let Some(etag) = self.is_ours(key, size_bytes, crc64nvme, &etag, None) {
                    return Ok(etag);
                }
            }
            Err(why)
        };
        complete().map_err(|why| self.0.report(key, why))
    }

    fn abort(&self, key: &str, id: &str) -> io::Result<()> {
        self.0.abort(key, id).map_err(|why| self.0.report(key, why))
    }

    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>> {
        self.0.uploads(prefix).map_err(|why| self.0.report(prefix, why))
    }
}

impl Server {
    fn head(&self, key: &str) -> Result<Option<Object>, Failure> {
        let whole = self.whole(key);
        let ask = Ask::new(Kind::Head, Method::HEAD, Some(&whole)).header("x-amz-checksum-mode", "ENABLED");
        match self.ask(&ask, |answer| answers::object(&answer.headers, key)) {
            Ok(object) => Ok(Some(object)),
            Err(why) if why.is(Errno::NOENT) => Ok(None),
            Err(why) => Err(why),
        }
    }

    fn list(&self, prefix: &str, delimited: bool, from: Option<(&'static str, String)>) -> Result<Page, Failure> {
        let mut ask = Ask::new(Kind::List, Method::GET, None).query("list-type", "2").query("encoding-type", "url");
        ask = ask.query("prefix", self.whole(prefix));
        if delimited {
            ask = ask.query("delimiter", "/");
        }
        if let Some((name, value)) = from {
            ask = ask.query(name, value);
        }
        self.ask(&ask, |answer| {
            let listing: answers::Listing = answers::parse(&answer.text()?)?;
            let encoding = listing.encoding_type.as_deref();
            self.lists_as_xml.store(encoding != Some("url"), Ordering::Relaxed);
            let mut page = Page::default();
            for entry in &listing.contents {
                if let Some(key) = self.own(&answers::name(&entry.key, encoding)?) {
                    page.objects.push(answers::listed(entry, key)?);
                }
            }
            for below in &listing.common_prefixes {
                page.prefixes.extend(self.own(&answers::name(&below.prefix, encoding)?));
            }
            page.next = listing.next_continuation_token.filter(|_| listing.is_truncated);
            Ok(page)
        })
    }

    /// A key of the server without the store's prefix.
    fn own(&self, key: &str) -> Option<String> {
        key.strip_prefix(&self.place.prefix).map(str::to_owned)
    }

    fn put(
        &self,
        key: &str,
        body: &dyn Body,
        words: &Words,
        when: When<'_>,
        proof: (&'static str, String),
    ) -> Result<String, Failure> {
        let whole = self.whole(key);
        let ask = Ask::new(Kind::Put, Method::PUT, Some(&whole)).content(Content::Body(body));
        let ask = with_words(with_condition(ask, when), words).header(proof.0, proof.1);
        let put = self.ask(&ask, |answer| {
            let etag = answers::etag(&answer.headers)?;
            answer.text()?;
            Ok(etag)
        });
        put.map_err(|why| gone_is_changed(why, when))
    }

    fn copy(
        &self,
        able: &Abilities,
        from: &str,
        etag: Option<&str>,
        to: &str,
        words: Option<&Words>,
    ) -> Result<String, Failure> {
        let whole = self.whole(to);
        let mut ask = Ask::new(Kind::Copy, Method::PUT, Some(&whole));
        ask = ask.header("x-amz-copy-source", self.wire.copy_source(&self.whole(from)));
        if let Some(etag) = etag {
            ask = ask.header("x-amz-copy-source-if-match", answers::quoted(etag));
            ask.conditional = true;
        }
        if able.checksums {
            ask = ask.header("x-amz-checksum-algorithm", "CRC64NVME");
        }
        ask = match words {
            Some(words) => with_words(ask.header("x-amz-metadata-directive", "REPLACE"), words),
            None => ask.header("x-amz-metadata-directive", "COPY"),
        };
        self.ask(&ask, |answer| {
            let made: answers::Made = answers::parse(&answer.text()?)?;
            Ok(answers::bare(&made.etag))
        })
    }

    fn delete(&self, key: &str) -> Result<(), Failure> {
        let whole = self.whole(key);
        let ask = Ask::new(Kind::Delete, Method::DELETE, Some(&whole));
        match self.ask(&ask, |answer| answer.text().map(drop)) {
            Err(why) if why.is(Errno::NOENT) => Ok(()),
            done => done,
        }
    }
}

/// Refuses a condition that the server would ignore.
fn allowed(able: &Abilities, when: When<'_>) -> Result<(), Failure> {
    let able = match when {
        When::Always => true,
        When::Absent => able.if_absent,
        When::Is(_) => able.if_same,
    };
    able.then_some(()).ok_or_else(|| Failure::ours(Errno::OPNOTSUPP, "the server does not honour conditions of writes"))
}

fn with_condition<'a>(mut ask: Ask<'a>, when: When<'_>) -> Ask<'a> {
    ask.conditional = when != When::Always;
    match when {
        When::Always => ask,
        When::Absent => ask.header("if-none-match", "*"),
        When::Is(etag) => ask.header("if-match", answers::quoted(etag)),
    }
}

/// An object that must exist and is absent has changed.
fn gone_is_changed(mut why: Failure, when: When<'_>) -> Failure {
    if matches!(when, When::Is(_)) && why.code == "NoSuchKey" {
        why.meaning = Meaning::Condition;
    }
    why
}

fn with_words<'a>(ask: Ask<'a>, words: &Words) -> Ask<'a> {
    words.iter().fold(ask, |ask, (name, value)| ask.header(format!("{}{name}", answers::WORD), value.as_str()))
}

/// The header by which the server can verify that all bytes arrived.
fn proof(crc: u64, md5: Option<&[u8; 16]>) -> (&'static str, String) {
    match md5 {
        None => ("x-amz-checksum-crc64nvme", answers::crc_text(crc)),
        Some(sum) => ("content-md5", base64::engine::general_purpose::STANDARD.encode(sum)),
    }
}

fn md5_of(body: &dyn Body) -> Result<[u8; 16], Failure> {
    let mut sum = Md5::new();
    wire::pieces(body, |piece| sum.update(piece)).map_err(Failure::of_source)?;
    Ok(sum.finalize().into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn remedy(why: &Failure) -> &'static str {
    match (&why.meaning, why.code.as_str()) {
        (_, "NoSuchBucket") => "make the bucket, or correct its name in the URL",
        (_, "SignatureDoesNotMatch" | "InvalidAccessKeyId") => "look at the credentials: they are not the server's",
        (_, "RequestTimeTooSkewed") => "set this machine's clock",
        (_, "PermanentRedirect" | "AuthorizationHeaderMalformed") => "correct the region in the URL (region=NAME)",
        // The answer to a HEAD, which has no body.
        (Meaning::Expired, "") => {
            "look whether the bucket's name is one that the server allows; if so, renew the credentials"
        }
        (Meaning::Expired, _) => "renew the credentials",
        (Meaning::Errno(Errno::ACCESS), _) => {
            "look at the credentials and at what they are allowed to do in this bucket"
        }
        (_, "") if why.message.contains("certificate") => {
            "name the file with the certificate of the server's authority in AWS_CA_BUNDLE, if it is not a public one"
        }
        (_, "") => "look whether the server runs, and at the endpoint in the URL",
        _ => "look at the URL and at what the server says",
    }
}
