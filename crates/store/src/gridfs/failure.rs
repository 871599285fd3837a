//! Why a request failed: what the server or the socket said, as an errno, and whether another try may help.
//!
//! (Whether it was carried out all the same need not be known: every change knows its own work.)

use std::io;

use surgetank_types::error::Errno;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    Errno(Errno),
    /// Something else has the name than was to be.
    Condition,
    /// The bytes are not those that were summed.
    Checksum,
    /// A document with this id is there already.
    Twice,
}

#[derive(Debug)]
pub struct Failure {
    pub meaning: Meaning,
    /// The server's number for it, or 0.
    pub code: i64,
    pub message: String,
    pub again: bool,
}

const AUTHENTICATION_FAILED: i64 = 18;

impl Failure {
    /// Found by us; final.
    pub fn ours(errno: Errno, message: &str) -> Self {
        Self { meaning: Meaning::Errno(errno), code: 0, message: message.to_owned(), again: false }
    }

    pub fn condition() -> Self {
        Self { meaning: Meaning::Condition, ..Self::ours(Errno::EXIST, "the condition does not hold") }
    }

    /// Whoever holds a name must not change it any more.
    pub fn too_slow() -> Self {
        Self::ours(Errno::AGAIN, "the server is so slow that somebody else may change the name meanwhile")
    }

    /// What is there is no longer what it was, and is nothing that could be.
    pub fn damaged() -> Self {
        Self::ours(Errno::IO, "the chunks of the file are damaged")
    }

    pub fn checksum(message: &str) -> Self {
        Self { meaning: Meaning::Checksum, ..Self::ours(Errno::IO, message) }
    }

    /// The answer makes no sense.
    pub fn garbled() -> Self {
        Self::ours(Errno::IO, "the server's answer is not understood")
    }

    /// It is there and does not serve: as if it were not there.
    pub fn not_serving(message: &str) -> Self {
        Self { again: true, ..Self::ours(Errno::HOSTDOWN, message) }
    }

    pub fn not_let_in(message: &str) -> Self {
        Self { code: AUTHENTICATION_FAILED, ..Self::ours(Errno::ACCESS, message) }
    }

    /// Of the socket.
    pub fn of_io(why: &io::Error) -> Self {
        let (errno, again) = match (why.raw_os_error().map(Errno::from_raw_os_error), why.kind()) {
            // A socket's patience is over.
            (Some(Errno::AGAIN), _) => (Errno::TIMEDOUT, true),
            (Some(errno), _) => (errno, true),
            // A certificate that is not believed.
            (None, io::ErrorKind::InvalidData) => (Errno::IO, false),
            (None, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => (Errno::TIMEDOUT, true),
            (None, io::ErrorKind::NotFound | io::ErrorKind::Other) => (Errno::HOSTUNREACH, true),
            (None, _) => (Errno::CONNRESET, true),
        };
        Self { again, ..Self::ours(errno, &why.to_string()) }
    }

    /// The server said no.
    pub fn refused(code: i64, message: &str) -> Self {
        let lower = message.to_ascii_lowercase();
        let (errno, again) = match code {
            // It ends, begins, or another one has taken over.
            6 | 7 | 89 | 91 | 189 | 10107 | 11600 | 11602 | 13435 | 13436 => (Errno::HOSTDOWN, true),
            // Too much at once, or it took too long.
            50 | 64 | 112 | 24 | 46 | 202 => (Errno::AGAIN, true),
            13 | AUTHENTICATION_FAILED | 8000 => (Errno::ACCESS, false),
            14031 => (Errno::NOSPC, false),
            10334 | 17280 => (Errno::FBIG, false),
            _ if lower.contains("disk is full") || lower.contains("no space left") => (Errno::NOSPC, false),
            // Servers with another one behind them pass on what that one says.
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
            // The errno alone would say nothing.
            Meaning::Errno(Errno::IO) | Meaning::Twice => io::Error::other(format!("{key}: {self}")),
            Meaning::Errno(errno) => errno.into(),
            Meaning::Condition => super::super::object::condition_failed(key),
            Meaning::Checksum => io::Error::new(io::ErrorKind::InvalidData, format!("{key}: {self}")),
        }
    }

    /// `damaged`
    pub fn is_damage(&self) -> bool {
        self.is(Errno::IO) && self.message == Self::damaged().message
    }

    /// For certain nothing was published.
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
            "put the user before the @ and the password into the environment (MONGODB_PASSWORD) or a file (password_file=PATH); authSource=DB, if the user belongs to another data base"
        }
        (13 | 8000, _) => "let the user read and write in the data base (the role readWrite)",
        (_, Meaning::Errno(Errno::HOSTDOWN)) => "name the server that is written to (the primary)",
        (_, Meaning::Errno(Errno::OPNOTSUPP)) => "use MongoDB 4.4 or newer",
        _ if why.message.contains("ertificate") => {
            "name the file with the certificate of the server's authority (tlsCAFile=PATH), if it is not a public one"
        }
        (0, _) => "look whether the server runs, and at host and port in the URL",
        _ => "look at the URL and at what the server says",
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
