//! Why a request failed: the answer of the namenode, a datanode or the socket, as an errno, and whether another try may help.
//!
//! The server's code is the name of a Java exception. Its message is text for users, and is considered only where one exception
//! has several meanings.
//!
//! The danger that it avoids: a namenode that is not ready (it starts, is in standby, or in safe mode) refuses with the status
//! of a lack of permission. That passes.

use std::io;

use serde::Deserialize;

use crate::http;
use surgetank_types::error::Errno;

#[derive(Debug)]
pub struct Failure {
    pub errno: Errno,
    /// The HTTP status, or 0 without an answer.
    pub status: u16,
    /// The server's code of the error, or empty.
    pub code: String,
    pub message: String,
    /// Whether another try may help.
    pub again: bool,
    /// Whether this request, or an earlier try of it, may have been carried out.
    pub unsure: bool,
    /// The source of the body could not be read, or the reader wants to stop.
    pub source: Option<io::Error>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(rename = "RemoteException")]
    exception: Exception,
}

#[derive(Deserialize, Default)]
struct Exception {
    #[serde(default)]
    exception: String,
    #[serde(default)]
    message: String,
}

impl Failure {
    /// Found by the driver, before or after the request; final.
    pub fn ours(errno: Errno, message: &str) -> Self {
        let (code, message) = (String::new(), message.to_owned());
        Self { errno, status: 0, code, message, again: false, unsure: false, source: None }
    }

    /// The source failed before the server had all of the body.
    pub fn of_source(why: io::Error) -> Self {
        Self { source: Some(why), ..Self::ours(Errno::IO, "what was to be sent could not be read") }
    }

    /// The answer cannot be understood or is cut short: the request may have been carried out, and another try may help.
    pub fn garbled(message: &str) -> Self {
        Self { again: true, unsure: true, ..Self::ours(Errno::IO, message) }
    }

    /// No readable answer.
    pub fn unanswered(why: &ureq::Error) -> Self {
        let http::Silence { errno, again, unsure } = http::silence(why);
        Self { again, unsure, ..Self::ours(errno, &why.to_string()) }
    }

    /// The server refused. `negotiates`: it requires Kerberos.
    pub fn refused(status: u16, body: &[u8], negotiates: bool) -> Self {
        let Exception { exception: code, message } =
            serde_json::from_slice::<Refusal>(body).map(|refusal| refusal.exception).unwrap_or_default();
        // The rest is the server's stack trace.
        let mut message = message.split("\n\tat ").next().unwrap_or_default().to_owned();
        let (errno, again) = if status == 401 && code.is_empty() {
            message = match negotiates {
                true => "the server wants Kerberos, which Surgetank does not speak: it authenticates by user.name only",
                false => "the server requires an authentication that Surgetank does not speak",
            }
            .to_owned();
            (Errno::ACCESS, false)
        } else {
            meaning_of(status, &code, &message)
        };
        // What a failing server has done is unknown.
        Self { errno, status, code, message, again, unsure: status >= 500, source: None }
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.errno == errno && self.source.is_none()
    }

    pub fn into_io(self) -> io::Error {
        self.source.unwrap_or_else(|| self.errno.into())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.status, self.code.as_str()) {
            (0, _) | (401, "") => f.write_str(&self.message),
            (status, "") => write!(f, "the server answered {status}"),
            (status, code) => write!(f, "{code}: {} ({status})", self.message),
        }
    }
}

/// The errno, and whether another try at once may help.
fn meaning_of(status: u16, code: &str, message: &str) -> (Errno, bool) {
    match code {
        "FileNotFoundException" if message.starts_with("Path is not a file") => (Errno::ISDIR, false),
        "FileNotFoundException" | "PathNotFoundException" => (Errno::NOENT, false),
        "FileAlreadyExistsException" => (Errno::EXIST, false),
        "ParentNotDirectoryException" | "PathIsNotDirectoryException" => (Errno::NOTDIR, false),
        "PathIsNotEmptyDirectoryException" => (Errno::NOTEMPTY, false),
        "AccessControlException" | "AuthorizationException" | "SecurityException" | "InvalidToken" => {
            (Errno::ACCESS, false)
        }
        "StandbyException" | "ObserverRetryOnActiveException" | "SafeModeException" | "RetriableException" => {
            (Errno::AGAIN, true)
        }
        // Another client writes it, or died while writing.
        "AlreadyBeingCreatedException" | "RecoveryInProgressException" | "LeaseExpiredException" => {
            (Errno::BUSY, false)
        }
        "NotReplicatedYetException" | "ServerTooBusyException" | "ConnectException" | "EOFException" => {
            (Errno::AGAIN, true)
        }
        "SocketTimeoutException" | "NoRouteToHostException" | "BlockMissingException" => (Errno::AGAIN, true),
        "NSQuotaExceededException"
        | "DSQuotaExceededException"
        | "QuotaExceededException"
        | "QuotaByStorageTypeExceededException" => (Errno::DQUOT, false),
        "MaxDirectoryItemsExceededException" => (Errno::NOSPC, false),
        "PathComponentTooLongException" => (Errno::NAMETOOLONG, false),
        "InvalidPathException" => (Errno::INVAL, false),
        "UnsupportedOperationException" => (Errno::OPNOTSUPP, false),
        "HadoopIllegalArgumentException" if message.contains("XAttr is too big") => (Errno::TOOBIG, false),
        "HadoopIllegalArgumentException" | "IllegalArgumentException" => (Errno::INVAL, false),
        "XAttrNotFoundException" => (Errno::NODATA, false),
        "IOException" => by_message(status, message),
        _ => match status {
            401 | 403 => (Errno::ACCESS, false),
            404 => (Errno::NOENT, false),
            408 | 429 | 500 | 502..=504 => (Errno::AGAIN, true),
            400..=499 => (Errno::INVAL, false),
            _ => (Errno::IO, false),
        },
    }
}

fn by_message(status: u16, message: &str) -> (Errno, bool) {
    let says = |words: &str| message.contains(words);
    if says("There are 0 datanode(s) running") || says("Failed to find datanode") {
        // All datanodes are unavailable, or have not registered yet.
        return (Errno::AGAIN, true);
    }
    if says("could only be written to") || says("could only be replicated to") {
        return (Errno::NOSPC, false);
    }
    if says("additional XAttr") || says("XAttr is too big") {
        return (Errno::TOOBIG, false);
    }
    if says("No matching attributes found") || says("attributes provided was not found") {
        return (Errno::NODATA, false);
    }
    if says("destination directory is not empty") {
        return (Errno::NOTEMPTY, false);
    }
    if says("must both be directories") {
        return (Errno::NOTDIR, false);
    }
    if says("out of the range") {
        return (Errno::NXIO, false);
    }
    if says("under source") {
        return (Errno::INVAL, false);
    }
    if says("path length") || says("depth") && says("exceed") {
        return (Errno::NAMETOOLONG, false);
    }
    // A datanode that stopped in the middle, a block that moved: usually the server's fault.
    (Errno::IO, status >= 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_exceptions_have_errno_and_retry() {
        for (status, code, message, errno, again) in [
            (404, "FileNotFoundException", "File does not exist: /a/zz", Errno::NOENT, false),
            (404, "FileNotFoundException", "Path is not a file: /t\n\tat org.apache", Errno::ISDIR, false),
            (403, "StandbyException", "Operation category READ is not supported in state standby", Errno::AGAIN, true),
            (403, "SafeModeException", "Cannot create file/a. Name node is in safe mode.", Errno::AGAIN, true),
            (403, "RetriableException", "NameNode still not started", Errno::AGAIN, true),
            (403, "AccessControlException", "Permission denied: user=nobody", Errno::ACCESS, false),
            (403, "IOException", "rename destination directory is not empty: /t/d", Errno::NOTEMPTY, false),
            (403, "IOException", "Source /a/b and destination /a/f must both be directories", Errno::NOTDIR, false),
            (403, "DSQuotaExceededException", "The DiskSpace quota of /a is exceeded", Errno::DQUOT, false),
            (400, "InvalidPathException", "Invalid path name /a/x:y", Errno::INVAL, false),
            (400, "HadoopIllegalArgumentException", "The XAttr is too big. The maximum", Errno::TOOBIG, false),
            (403, "IOException", "Cannot add additional XAttr to inode, would exceed limit", Errno::TOOBIG, false),
            (
                403,
                "IOException",
                "File /a could only be written to 0 of the 1 minReplication nodes. There are 0 datanode(s) running",
                Errno::AGAIN,
                true,
            ),
            (
                403,
                "IOException",
                "File /a could only be written to 0 of the 1 minReplication nodes. There are 1 datanode(s) running",
                Errno::NOSPC,
                false,
            ),
            (503, "", "", Errno::AGAIN, true),
            (418, "SomethingNew", "", Errno::INVAL, false),
        ] {
            let body =
                serde_json::json!({"RemoteException": {"exception": code, "javaClassName": "x", "message": message}});
            let failure = Failure::refused(status, body.to_string().as_bytes(), false);
            assert_eq!((failure.errno, failure.again), (errno, again), "{status} {code} {message}");
            assert!(!failure.message.contains("org.apache"));
        }
    }

    #[test]
    fn refusal_that_requires_kerberos_says_so() {
        let failure = Failure::refused(401, b"<html>Authentication required</html>", true);
        assert!(failure.is(Errno::ACCESS) && failure.to_string().contains("Kerberos"), "{failure}");
        assert!(!failure.again);
    }
}
