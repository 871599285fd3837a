//! Why a request failed: the answer of the server or the socket, as an errno, and whether another try may help.
//!
//! Whether the request was carried out need not be known: every change recognises its own work.

use std::io;

use redis::RedisError;

use surgetank_types::error::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    Errno(Errno),
    /// The key does not have what the condition requires.
    Condition,
    /// The bytes do not have the checksum.
    Checksum,
}

#[derive(Debug)]
pub struct Failure {
    pub meaning: Meaning,
    /// The server's code of the error, or empty.
    pub code: String,
    pub message: String,
    pub again: bool,
}

impl Failure {
    /// Found by the driver; final.
    pub fn ours(errno: Errno, message: &str) -> Self {
        Self { meaning: Meaning::Errno(errno), code: String::new(), message: message.to_owned(), again: false }
    }

    pub fn condition() -> Self {
        Self { meaning: Meaning::Condition, ..Self::ours(Errno::EXIST, "the condition does not hold") }
    }

    pub fn checksum() -> Self {
        Self { meaning: Meaning::Checksum, ..Self::ours(Errno::IO, "the parts do not have the checksum of the whole") }
    }

    /// The answer cannot be understood.
    pub fn garbled() -> Self {
        Self::ours(Errno::IO, "the server's answer is not understood")
    }

    pub fn of(why: RedisError) -> Self {
        // Of several commands, the first that failed gives the cause.
        if let Some((_, first)) = why.clone().into_server_errors().as_deref().and_then(<[_]>::first) {
            return Self::refused(first.code(), first.details().unwrap_or_default());
        }
        let message = why.detail().map_or_else(|| why.to_string(), str::to_owned);
        if let Some(code) = why.code() {
            return Self::refused(code, &message);
        }
        match why.kind() {
            redis::ErrorKind::AuthenticationFailed => Self::refused("WRONGPASS", &message),
            redis::ErrorKind::Io => {
                let (errno, again) = socket_errno(&why);
                Self { again, ..Self::ours(errno, &why.to_string()) }
            }
            redis::ErrorKind::Parse => Self { again: true, ..Self::ours(Errno::CONNRESET, &message) },
            _ => Self::ours(Errno::IO, &why.to_string()),
        }
    }

    /// The server refused.
    pub fn refused(code: &str, message: &str) -> Self {
        let code = if message.contains("user executing the script can't") { "NOPERM" } else { code };
        let (errno, again) = match code {
            // The server exists and does not serve yet: like an absent one.
            "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" => (Errno::HOSTDOWN, true),
            "BUSY" => (Errno::AGAIN, true),
            // Another server of the cluster has the key, or will have it.
            "MOVED" | "ASK" | "TRYAGAIN" => (Errno::HOSTDOWN, true),
            _ if message.contains("access a non local key") => (Errno::HOSTDOWN, true),
            "NOSCRIPT" => (Errno::AGAIN, true),
            "OOM" => (Errno::NOSPC, false),
            "READONLY" => (Errno::ROFS, false),
            "NOAUTH" | "WRONGPASS" | "NOPERM" => (Errno::ACCESS, false),
            // It cannot write its log, or no replica is connected.
            "MISCONF" | "NOREPLICAS" => (Errno::IO, false),
            "CROSSSLOT" => (Errno::OPNOTSUPP, false),
            _ if message.contains("max number of clients") => (Errno::AGAIN, true),
            _ if message.contains("maximum allowed size") || message.contains("invalid bulk length") => {
                (Errno::FBIG, false)
            }
            _ if message.contains("AUTH") => (Errno::ACCESS, false),
            _ => (Errno::IO, false),
        };
        Self { again, code: code.to_owned(), ..Self::ours(errno, message) }
    }

    /// `key` as the caller names it.
    pub fn into_io(self, key: &str) -> io::Error {
        match self.meaning {
            Meaning::Errno(errno) => errno.into(),
            Meaning::Condition => super::super::object::condition_failed(key),
            Meaning::Checksum => io::Error::new(io::ErrorKind::InvalidData, format!("{key}: {self}")),
        }
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.meaning == Meaning::Errno(errno)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.code.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.code, self.message) }
    }
}

fn socket_errno(why: &RedisError) -> (Errno, bool) {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(why);
    while let Some(inner) = cause {
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            match (io.raw_os_error(), io.kind()) {
                (Some(code), _) if Errno::from_raw_os_error(code) == Errno::AGAIN => return (Errno::TIMEDOUT, true),
                (Some(code), _) => return (Errno::from_raw_os_error(code), true),
                // An untrusted certificate.
                (None, io::ErrorKind::InvalidData) => return (Errno::IO, false),
                (None, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => return (Errno::TIMEDOUT, true),
                (None, io::ErrorKind::NotFound | io::ErrorKind::Other) => return (Errno::HOSTUNREACH, true),
                (None, _) => return (Errno::CONNRESET, true),
            }
        }
        cause = inner.source();
    }
    match () {
        () if why.is_timeout() => (Errno::TIMEDOUT, true),
        () if why.is_connection_refusal() => (Errno::CONNREFUSED, true),
        () if why.is_connection_dropped() => (Errno::CONNRESET, true),
        () => (Errno::HOSTUNREACH, true),
    }
}

pub fn remedy(why: &Failure) -> &'static str {
    match (why.code.as_str(), why.meaning) {
        ("NOAUTH" | "WRONGPASS", _) => {
            "put the password into the environment (REDISCLI_AUTH) or into a file (password_file=PATH), and the user before the @"
        }
        ("NOPERM", _) => {
            "let the user run scripts and all commands on keys with the prefix: ACL SETUSER … ~PREFIX* +@all"
        }
        ("CROSSSLOT", _) => "put a hash tag into the prefix, so that one server has all of them: ?prefix={NAME}:",
        ("MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN", _) => "wait until the cluster has its keys in their places",
        ("READONLY", _) => "name the server that is written to, not its replica",
        ("OOM", _) => "give the server more memory (maxmemory)",
        (_, Meaning::Errno(Errno::INVAL)) => "name one server, or servers of one cluster",
        ("LOADING", _) => "wait until the server has read its data",
        (_, Meaning::Errno(Errno::OPNOTSUPP)) => "use Redis 6.2 or newer",
        _ if why.message.contains("ertificate") => {
            "name the file with the certificate of the server's authority (authority_file=PATH), if it is not a public one"
        }
        ("", _) => "look whether the server runs, and at host and port in the URL",
        _ => "look at the URL and at what the server says",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_errors_have_errno_and_retry() {
        for (code, message, errno, again) in [
            ("OOM", "command not allowed when used memory > 'maxmemory'.", Errno::NOSPC, false),
            ("LOADING", "Redis is loading the dataset in memory", Errno::HOSTDOWN, true),
            ("BUSY", "Redis is busy running a script.", Errno::AGAIN, true),
            ("NOSCRIPT", "No matching script.", Errno::AGAIN, true),
            ("READONLY", "You can't write against a read only replica.", Errno::ROFS, false),
            ("NOAUTH", "Authentication required.", Errno::ACCESS, false),
            ("ERR", "string exceeds maximum allowed size (proto-max-bulk-len)", Errno::FBIG, false),
            ("ERR", "The user executing the script can't run this command or subcommand", Errno::ACCESS, false),
            ("ERR", "max number of clients reached", Errno::AGAIN, true),
            ("MOVED", "3999 127.0.0.1:6381", Errno::HOSTDOWN, true),
            ("ERR", "Script attempted to access a non local key in a cluster node", Errno::HOSTDOWN, true),
            ("ERR", "unknown command", Errno::IO, false),
        ] {
            let failure = Failure::refused(code, message);
            assert_eq!((failure.meaning, failure.again), (Meaning::Errno(errno), again), "{code} {message}");
        }
    }
}
