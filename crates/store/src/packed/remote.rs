//! Content for reading: of a packed file, and of a plain one by ranges like everything else of such a store.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Content;
use crate::source::identity_of;
use crate::{Remote, Source};
use surgetank_types::error::Errno;
use surgetank_types::model::StoreIdentity;
use surgetank_types::sync::Arc;

/// A version of a packed file.
pub struct Unpacked {
    pub content: Content,
    /// Identity of the content.
    pub identity: StoreIdentity,
}

impl Remote for Unpacked {
    fn identity(&self) -> StoreIdentity {
        self.identity
    }
    fn checksum(&self) -> Option<u64> {
        Some(self.content.checksum)
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        (self.content.read)(buffer, offset)
    }
}

/// A version of a plain file: a write into it makes another version.
struct Plain {
    file: File,
    identity: StoreIdentity,
}

impl Plain {
    fn same(&self) -> io::Result<()> {
        if identity_of(&self.file)? == self.identity { Ok(()) } else { Err(Errno::STALE.into()) }
    }
}

impl Remote for Plain {
    fn identity(&self) -> StoreIdentity {
        self.identity
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.same()?;
        self.file.read_exact_at(buffer, offset)?;
        self.same()
    }
}

/// The content by ranges, whatever its source.
pub fn by_ranges(source: Source) -> io::Result<Arc<dyn Remote>> {
    match source {
        Source::Remote(remote) => Ok(remote),
        Source::Plain(file) => {
            let identity = identity_of(&file)?;
            Ok(Arc::new(Plain { file, identity }))
        }
    }
}
