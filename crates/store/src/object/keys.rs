//! Paths and keys. A file's key is its path; the key of a directory's own object, if it has one, ends with `/`.

use std::io;

use rustix::io::Errno;

use super::ObjectStore;
use crate::{StorePath, StoreStat};
use surgetank_types::model::Kind;

/// Name of the mark: objects below the prefix that are older carry no attributes of Surgetank. Hidden from listings.
pub(super) const MARK: &str = ".surgetank-store";
pub(super) const MARK_TEXT: &[u8] =
    b"Objects below this prefix are kept by Surgetank: mode, owner and times are in their user metadata.\n";

/// As on file systems.
const NAME_BYTES_MAX: usize = 255;

/// Whether this is the store's mark. (An object with this name and another length is a file.)
pub fn is_mark(name: &[u8], stat: &StoreStat) -> bool {
    name == MARK.as_bytes() && stat.attr.kind == Kind::File && stat.attr.size_bytes == MARK_TEXT.len() as u64
}

/// Whether XML can contain the character. It cannot contain most control characters, not even by number; servers write U+FFFD
/// instead, which names another key.
pub(super) fn is_of_xml(character: char) -> bool {
    !matches!(character, '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\u{fffe}' | '\u{ffff}')
}

impl ObjectStore {
    /// The key of a file. Errors: the name cannot be a key.
    pub(super) fn key<'a>(&self, path: &'a StorePath) -> io::Result<&'a str> {
        let text = std::str::from_utf8(&path.0).map_err(|_| Errno::ILSEQ)?;
        if text == MARK {
            return Err(Errno::ACCESS.into());
        }
        let mut names = text.split('/');
        if names.clone().any(|name| name.len() > NAME_BYTES_MAX) || text.len() >= self.abilities.key_bytes_max {
            return Err(Errno::NAMETOOLONG.into());
        }
        if text.contains('\0') || !text.is_empty() && names.any(|name| matches!(name, "" | "." | "..")) {
            return Err(Errno::INVAL.into());
        }
        Ok(text)
    }

    /// The prefix of the keys of everything in a directory; also the key of the directory's own object.
    pub(super) fn below(&self, path: &StorePath) -> io::Result<String> {
        let key = self.key(path)?;
        Ok(if key.is_empty() { String::new() } else { format!("{key}/") })
    }
}
