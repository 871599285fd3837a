//! Errors, of two kinds. A [`Fault`] is what a program under the mount receives: an errno, with a note for the log. An
//! [`Error`] is what a user at the command line reads: what failed, where, why, what to try, whether the data is safe.
//!
//! The danger that it avoids: an errno without its cause, and advice without a word about the data.

use std::borrow::Cow;
use std::fmt;

pub use rustix::io::Errno;

/// Failure of one file operation: the errno for the program, the note for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What the system call returns to the program.
    pub errno: Errno,
    /// The tier or store and the cause, shown by `status` and in the log. Empty when the errno says it all.
    pub note: Cow<'static, str>,
}

/// Result of a file operation.
pub type FsResult<T> = Result<T, Fault>;

impl Fault {
    /// A fault with its cause in words; `note` names the tier or store.
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

/// A failure for the user: one sentence of what failed, then the cause, the next step, and whether data is safe. `Display`
/// prints each non-empty part on its own line, labelled `why:`, `try:` and `data:`.
#[derive(Debug, thiserror::Error)]
#[error("{what}{}{}{}", part("\n  why:  ", .why), part("\n  try:  ", .remedy), part("\n  data: ", .data))]
pub struct Error {
    /// What failed, as `subject verb object`. Never empty.
    pub what: String,
    /// The cause; empty when `what` contains it.
    pub why: String,
    /// What to try, or the next command; empty when there is none.
    pub remedy: String,
    /// Whether data is safe and where it is; empty when no data is concerned.
    pub data: String,
}

/// Result of what a user asked for at the command line.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn part(label: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{label}{text}") }
}

impl Error {
    /// An error that says only what failed. The other parts are added by the methods below.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), why: String::new(), remedy: String::new(), data: String::new() }
    }
    /// Sets the cause.
    #[must_use]
    pub fn why(mut self, why: impl fmt::Display) -> Self {
        self.why = why.to_string();
        self
    }
    /// Sets what to try.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }
    /// Sets whether the data is safe, and where it is.
    #[must_use]
    pub fn data(mut self, data: impl Into<String>) -> Self {
        self.data = data.into();
        self
    }
}
