//! Errors. Two kinds, on purpose: a [`Fault`] is what a program under the mount sees (an errno,
//! with a note for the person who asks why); an [`Error`] is what a person at the command line
//! sees (what failed, where, why, what to try, whether the data is safe).

use std::borrow::Cow;
use std::fmt;

pub use rustix::io::Errno;

/// Failure of one file operation: the errno for the program, the note for the human.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub errno: Errno,
    /// Which tier or store and why, shown by `status` and in the log. Empty when the errno says it all.
    pub note: Cow<'static, str>,
}

pub type FsResult<T> = Result<T, Fault>;

impl Fault {
    pub fn new(errno: Errno, note: impl Into<Cow<'static, str>>) -> Self {
        Self { errno, note: note.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.note.is_empty() { write!(f, "{}", self.errno) } else { write!(f, "{} ({})", self.note, self.errno) }
    }
}

impl std::error::Error for Fault {}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self { errno, note: Cow::Borrowed("") }
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) => Self { errno: Errno::from_raw_os_error(code), note: Cow::Borrowed("") },
            None => Self { errno: Errno::IO, note: Cow::Owned(error.to_string()) },
        }
    }
}

/// A failure told to a person: one sentence of what failed, then why, what to try, and whether data is safe.
#[derive(Debug, thiserror::Error)]
#[error("{what}{}{}{}", part("\n  why:  ", .why), part("\n  try:  ", .remedy), part("\n  data: ", .data))]
pub struct Error {
    pub what: String,
    pub why: String,
    pub remedy: String,
    /// Whether data is safe and where it is; empty when no data is concerned.
    pub data: String,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

fn part(label: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{label}{text}") }
}

impl Error {
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), why: String::new(), remedy: String::new(), data: String::new() }
    }
    #[must_use]
    pub fn why(mut self, why: impl fmt::Display) -> Self {
        self.why = why.to_string();
        self
    }
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
    #[must_use]
    pub fn data(mut self, data: impl Into<String>) -> Self {
        self.data = data.into();
        self
    }
}
