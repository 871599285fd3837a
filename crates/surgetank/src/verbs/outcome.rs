//! The result of a verb: an exit code, or an error with its exit code.

use surgetank_types::error::{Error, Result};

use super::exit;

/// An error with its exit code.
pub struct Failure {
    pub error: Error,
    pub exit: u8,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, exit: exit::FAILED }
    }
}

impl Failure {
    pub fn usage(error: Error) -> Self {
        Self { error, exit: exit::USAGE }
    }
}

pub type Outcome<T = u8> = Result<T, Failure>;
