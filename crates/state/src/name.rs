//! A name in a directory, as small as it can be: one pointer, and one allocation that all places with the name share.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

use triomphe::ThinArc;

/// One component of a path, as any bytes but `/` and NUL. A copy shares the bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(ThinArc<(), u8>);

impl Deref for Name {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0.slice
    }
}

impl Borrow<[u8]> for Name {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

// (As a slice hashes: a map is asked with slices.)
impl std::hash::Hash for Name {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self[..].hash(state);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.escape_ascii())
    }
}

impl From<&[u8]> for Name {
    fn from(bytes: &[u8]) -> Self {
        Self(ThinArc::from_header_and_slice((), bytes))
    }
}

impl From<Vec<u8>> for Name {
    fn from(bytes: Vec<u8>) -> Self {
        Self::from(&*bytes)
    }
}

impl From<Box<[u8]>> for Name {
    fn from(bytes: Box<[u8]>) -> Self {
        Self::from(&*bytes)
    }
}
