//! Why a request failed: the error of the server or the socket as an errno, and whether another try may help.
//!
//! (The caller need not know whether the server carried out the request: every change recognises its own work.)

use std::io;

use surgetank_types::error::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    Errno(Errno),
    /// The name has another file than the condition asks for.
    Condition,
    /// The bytes do not have their checksum.
    Checksum,
    /// A document with this id exists.
    Twice,
}

#[derive(Debug)]
pub struct Failure {
    pub meaning: Meaning,
    /// The server's error code, or 0.
    pub code: i64,
    pub message: String,
    pub again: bool,
}

const AUTHENTICATION_FAILED: i64 = 18;

impl Failure {
    /// An error that the driver found itself; another try does not help.
    pub fn ours(errno: Errno, message: &str) -> Self {
        Self { meaning: Meaning::Errno(errno), code: 0, message: message.to_owned(), again: false }
    }

    pub fn condition() -> Self {
        Self { meaning: Meaning::Condition, ..Self::ours(Errno::EXIST, "the condition does not hold") }
    }

    /// The holder of a lock must not change the name any more.
    pub fn too_slow() -> Self {
        Self::ours(Errno::AGAIN, "the server answers so late that another agent may hold the lock of the name")
    }

    /// The chunks do not form the file.
    pub fn damaged() -> Self {
        Self::ours(Errno::IO, "the chunks of the file are damaged")
    }

    pub fn checksum(message: &str) -> Self {
        Self { meaning: Meaning::Checksum, ..Self::ours(Errno::IO, message) }
    }

    /// The answer is malformed.
    pub fn garbled() -> Self {
        Self::ours(Errno::IO, "the server's answer is not understood")
    }

    /// The server answers but does not serve; it counts as unavailable.
    pub fn not_serving(message: &str) -> Self {
        Self { again: true, ..Self::ours(Errno::HOSTDOWN, message) }
    }

    pub fn login_refused(message: &str) -> Self {
        Self { code: AUTHENTICATION_FAILED, ..Self::ours(Errno::ACCESS, message) }
    }

    /// An error of the socket.
    pub fn of_io(why: &io::Error) -> Self {
        let (errno, again) = match (why.raw_os_error().map(Errno::from_raw_os_error), why.kind()) {
            // The timeout of a socket ended.
            (Some(Errno::AGAIN), _) => (Errno::TIMEDOUT, true),
            (Some(errno), _) => (errno, true),
            // A certificate that is not trusted.
            (None, io::ErrorKind::InvalidData) => (Errno::IO, false),
            (None, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => (Errno::TIMEDOUT, true),
            (None, io::ErrorKind::NotFound | io::ErrorKind::Other) => (Errno::HOSTUNREACH, true),
            (None, _) => (Errno::CONNRESET, true),
        };
        Self { again, ..Self::ours(errno, &why.to_string()) }
    }

    /// The server's refusal.
    pub fn refused(code: i64, message: &str) -> Self {
        let lower = message.to_ascii_lowercase();
        let (errno, again) = match code {
            // The server stops or starts, or another server is the primary now.
            6 | 7 | 89 | 91 | 189 | 10107 | 11600 | 11602 | 13435 | 13436 => (Errno::HOSTDOWN, true),
            // The server is busy, or the request took too long.
            50 | 64 | 112 | 24 | 46 | 202 => (Errno::AGAIN, true),
            13 | AUTHENTICATION_FAILED | 8000 => (Errno::ACCESS, false),
            14031 => (Errno::NOSPC, false),
            10334 | 17280 => (Errno::FBIG, false),
            _ if lower.contains("disk is full") || lower.contains("no space left") => (Errno::NOSPC, false),
            // A server in front of another data base passes on its messages.
            _ if lower.contains("database is locked") => (Errno::AGAIN, true),
            _ if lower.contains("read-only") || lower.contains("readonly") => (Errno::ROFS, false),
            _ => (Errno::IO, false),
        };
        let meaning = if matches!(code, 11000 | 11001) { Meaning::Twice } else { Meaning::Errno(errno) };
        Self { meaning, code, message: message.to_owned(), again }
    }

    /// `key` as the caller names it.
    pub fn into_io(self, key: &str) -> io::Error {
        match self.meaning {
            // The errno alone has no cause.
            Meaning::Errno(Errno::IO) | Meaning::Twice => io::Error::other(format!("{key}: {self}")),
            Meaning::Errno(errno) => errno.into(),
            Meaning::Condition => super::super::object::condition_failed(key),
            Meaning::Checksum => io::Error::new(io::ErrorKind::InvalidData, format!("{key}: {self}")),
        }
    }

    /// Is this [`Self::damaged`]?
    pub fn is_damage(&self) -> bool {
        self.is(Errno::IO) && self.message == Self::damaged().message
    }

    /// The file is certainly not published.
    pub fn is_undone(&self) -> bool {
        matches!(self.meaning, Meaning::Condition | Meaning::Checksum | Meaning::Twice)
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.meaning == Meaning::Errno(errno)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if self.code == 0 { Ok(()) } else { write!(f, " ({})", self.code) }
    }
}

pub fn remedy(why: &Failure) -> &'static str {
    match (why.code, why.meaning) {
        (AUTHENTICATION_FAILED, _) => {
            "put the user before the @ and the password into the environment (MONGODB_PASSWORD) or a file (password_file=PATH); if the user belongs to another data base, add authSource=DB"
        }
        (13 | 8000, _) => "give the user the role readWrite in the data base",
        (_, Meaning::Errno(Errno::HOSTDOWN)) => "name the primary in the URL",
        (_, Meaning::Errno(Errno::OPNOTSUPP)) => "use MongoDB 4.4 or newer",
        _ if why.message.contains("ertificate") => {
            "if the server's authority is not a public one, name the file with its certificate (tlsCAFile=PATH)"
        }
        (0, _) => "check that the server runs, and host and port in the URL",
        _ => "check the URL and the log of the server",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_servers() {
        for (code, message, meaning, again) in [
            (11000, "E11000 duplicate key error", Meaning::Twice, false),
            (10107, "not primary", Meaning::Errno(Errno::HOSTDOWN), true),
            (91, "The server is in quiesce mode and will shut down", Meaning::Errno(Errno::HOSTDOWN), true),
            (13, "not authorized on db to execute command", Meaning::Errno(Errno::ACCESS), false),
            (18, "Authentication failed.", Meaning::Errno(Errno::ACCESS), false),
            (14031, "available disk space of 500 bytes is less than required", Meaning::Errno(Errno::NOSPC), false),
            (1, "database or disk is full (13)", Meaning::Errno(Errno::NOSPC), false),
            (1, "database is locked (5)", Meaning::Errno(Errno::AGAIN), true),
            (59, "no such command", Meaning::Errno(Errno::IO), false),
        ] {
            let failure = Failure::refused(code, message);
            assert_eq!((failure.meaning, failure.again), (meaning, again), "{code} {message}");
        }
    }
}
