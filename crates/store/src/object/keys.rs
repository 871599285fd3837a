//! Paths and keys. A file's key is its path; a directory's own key, if it has one, ends with `/`.

use std::io;

use rustix::io::Errno;

use super::ObjectStore;
use crate::{StorePath, StoreStat};
use surgetank_types::model::Kind;

/// Says since when objects below the prefix may carry attributes of ours; hidden from listings.
pub(super) const MARK: &str = ".surgetank-store";
pub(super) const MARK_TEXT: &[u8] =
    b"Objects below this prefix are kept by Surgetank: mode, owner and times are in their user metadata.\n";

/// As file systems have it.
const NAME_BYTES_MAX: usize = 255;

/// (What is called so and has another length is somebody's file.)
pub fn is_mark(name: &[u8], stat: &StoreStat) -> bool {
    name == MARK.as_bytes() && stat.attr.kind == Kind::File && stat.attr.size_bytes == MARK_TEXT.len() as u64
}

/// Most control characters stand in no XML, not even by their number; servers put U+FFFD there and so name another key.
pub(super) fn is_of_xml(character: char) -> bool {
    !matches!(character, '\0'..='\x08' | '\x0b' | '\x0c' | '\x0e'..='\x1f' | '\u{fffe}' | '\u{ffff}')
}

impl ObjectStore {
    /// The key of a file. Not every name can be one.
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

    /// What the keys of all that is in a directory begin with; also the directory's own key.
    pub(super) fn below(&self, path: &StorePath) -> io::Result<String> {
        let key = self.key(path)?;
        Ok(if key.is_empty() { String::new() } else { format!("{key}/") })
    }
}
