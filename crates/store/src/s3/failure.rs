//! Why a request failed: the answer of the server or the socket, as an errno, whether another try may help, and whether the
//! request may have been carried out.
//!
//! The danger that it avoids: taking a lost answer for a failure. A conditional write that is sent again then finds its own
//! object and reports a conflict that does not exist.

use std::io;

use super::answers;
use crate::http;
use surgetank_types::error::Errno;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    Errno(Errno),
    /// 412, or 409 of a conditional request.
    Condition,
    /// The bytes that arrived do not have the checksum of the request.
    Checksum,
    /// The credentials have expired: new ones may exist.
    Expired,
    /// The server requires the hash of the body in the signature.
    WantsHash,
    /// The source of the body could not be read, or the reader wants to stop.
    Source,
}

#[derive(Debug)]
pub struct Failure {
    pub meaning: Meaning,
    /// The HTTP status, or 0 without an answer.
    pub status: u16,
    /// The server's code of the error, or empty.
    pub code: String,
    pub message: String,
    /// Whether another try may help.
    pub again: bool,
    /// Whether this request, or an earlier try of it, may have been carried out.
    pub unsure: bool,
    pub wait_seconds: Option<u64>,
    pub source: Option<io::Error>,
}

impl Failure {
    /// Found by the driver, before or after the request; final.
    pub fn ours(errno: Errno, message: &str) -> Self {
        Self {
            meaning: Meaning::Errno(errno),
            status: 0,
            code: String::new(),
            message: message.to_owned(),
            again: false,
            unsure: false,
            wait_seconds: None,
            source: None,
        }
    }

    /// The source failed before the server had all of the body.
    pub fn of_source(why: io::Error) -> Self {
        let failure = Self::ours(Errno::IO, "what was to be sent could not be read");
        Self { meaning: Meaning::Source, source: Some(why), ..failure }
    }

    /// The answer cannot be understood or is cut short: the request may have been carried out, and another try may help.
    pub fn garbled(message: &str) -> Self {
        Self { again: true, unsure: true, ..Self::ours(Errno::IO, message) }
    }

    /// No readable answer.
    pub fn unanswered(why: ureq::Error) -> Self {
        let http::Silence { errno, again, unsure } = http::silence(&why);
        Self { again, unsure, ..Self::ours(errno, &why.to_string()) }
    }

    /// The server refused. `conditional`: the request had a condition.
    pub fn refused(status: u16, body: &[u8], conditional: bool) -> Self {
        let (code, message) = answers::error_of(body).unwrap_or_default();
        let (meaning, again) = meaning_of(status, &code, conditional);
        // What a failing server has done is unknown.
        let unsure = status >= 500 && status != 501 || code == "RequestTimeout" || status == 200;
        Self { meaning, status, code, message, again, unsure, wait_seconds: None, source: None }
    }

    /// `key` as the caller names it.
    pub fn into_io(self, key: &str) -> io::Error {
        match self.meaning {
            Meaning::Errno(errno) => errno.into(),
            Meaning::Condition => super::super::object::condition_failed(key),
            Meaning::Checksum => {
                io::Error::new(io::ErrorKind::InvalidData, format!("{key} arrived with another checksum: {self}"))
            }
            Meaning::Expired => Errno::ACCESS.into(),
            Meaning::WantsHash => Errno::INVAL.into(),
            Meaning::Source => self.source.unwrap_or_else(|| Errno::IO.into()),
        }
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.meaning == Meaning::Errno(errno)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.status, self.code.as_str()) {
            (0, _) => f.write_str(&self.message),
            (status, "") => write!(f, "the server answered {status}"),
            (status, code) => write!(f, "{code}: {} ({status})", self.message),
        }
    }
}

fn meaning_of(status: u16, code: &str, conditional: bool) -> (Meaning, bool) {
    let errno = |errno| Meaning::Errno(errno);
    // A known code tells more than the status.
    let by_word = match code {
        "PreconditionFailed" => (Meaning::Condition, false),
        "ConditionalRequestConflict" => (Meaning::Condition, false),
        "BadDigest" | "XAmzContentChecksumMismatch" | "InvalidDigest" => (Meaning::Checksum, false),
        "XAmzContentSHA256Mismatch" => (Meaning::WantsHash, false),
        "ExpiredToken" | "TokenRefreshRequired" => (Meaning::Expired, true),
        "InvalidToken" | "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "AccessDenied" | "RequestTimeTooSkewed" => {
            (errno(Errno::ACCESS), false)
        }
        "NoSuchKey" | "NoSuchBucket" | "NoSuchUpload" | "NotFound" => (errno(Errno::NOENT), false),
        "SlowDown" | "Throttling" | "ThrottlingException" | "TooManyRequests" | "RequestLimitExceeded" => {
            (errno(Errno::AGAIN), true)
        }
        "RequestTimeout" | "IncompleteBody" | "OperationAborted" => (errno(Errno::AGAIN), true),
        "QuotaExceeded" | "InsufficientStorage" | "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded" => {
            (errno(Errno::NOSPC), false)
        }
        "EntityTooLarge" => (errno(Errno::FBIG), false),
        "KeyTooLong" | "KeyTooLongError" => (errno(Errno::NAMETOOLONG), false),
        "MetadataTooLarge" | "RequestHeaderSectionTooLarge" => (errno(Errno::TOOBIG), false),
        "NotImplemented" | "MethodNotAllowed" => (errno(Errno::OPNOTSUPP), false),
        _ => (errno(Errno::IO), false),
    };
    if by_word.0 != errno(Errno::IO) {
        return by_word;
    }
    match status {
        401 | 403 => (errno(Errno::ACCESS), false),
        404 => (errno(Errno::NOENT), false),
        405 | 501 => (errno(Errno::OPNOTSUPP), false),
        408 | 429 | 500 | 502 | 503 | 504 => (errno(Errno::AGAIN), true),
        409 if conditional => (Meaning::Condition, false),
        409 => (errno(Errno::BUSY), false),
        412 => (Meaning::Condition, false),
        413 => (errno(Errno::FBIG), false),
        507 => (errno(Errno::NOSPC), false),
        // An error in an answer that began as a success: usually the server's.
        200 => (errno(Errno::AGAIN), true),
        300..=499 => (errno(Errno::INVAL), false),
        _ => (errno(Errno::IO), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: u16, code: &str, conditional: bool) -> (Meaning, bool) {
        let body = format!("<Error><Code>{code}</Code><Message>why</Message></Error>");
        let failure = Failure::refused(status, if code.is_empty() { b"" } else { body.as_bytes() }, conditional);
        (failure.meaning, failure.again)
    }

    #[test]
    fn server_errors_have_errno_and_retry() {
        for (status, code, conditional, meaning, again) in [
            (503, "SlowDown", false, Meaning::Errno(Errno::AGAIN), true),
            (500, "", false, Meaning::Errno(Errno::AGAIN), true),
            (200, "InternalError", false, Meaning::Errno(Errno::AGAIN), true),
            (200, "AccessDenied", false, Meaning::Errno(Errno::ACCESS), false),
            (403, "QuotaExceeded", false, Meaning::Errno(Errno::NOSPC), false),
            (403, "", false, Meaning::Errno(Errno::ACCESS), false),
            (400, "ExpiredToken", false, Meaning::Expired, true),
            (404, "", false, Meaning::Errno(Errno::NOENT), false),
            (409, "", true, Meaning::Condition, false),
            (409, "", false, Meaning::Errno(Errno::BUSY), false),
            (412, "", true, Meaning::Condition, false),
            (400, "BadDigest", false, Meaning::Checksum, false),
            (507, "", false, Meaning::Errno(Errno::NOSPC), false),
            (400, "SomethingNew", false, Meaning::Errno(Errno::INVAL), false),
            (501, "NotImplemented", true, Meaning::Errno(Errno::OPNOTSUPP), false),
        ] {
            assert_eq!(of(status, code, conditional), (meaning, again), "{status} {code}");
        }
    }
}
