//! One version of a file, read by ranges.

use std::io::{self, Read};
use std::time::Duration;

use super::failure::Failure;
use super::wire::{Answer, Ask, Wire};
use crate::Remote;
use crate::object::retry_within;
use surgetank_types::error::Errno;
use surgetank_types::model::StoreIdentity;
use surgetank_types::sync::Arc;

pub(super) struct Inode {
    pub wire: Arc<Wire>,
    pub identity: StoreIdentity,
    pub checksum: Option<u64>,
    pub timeout: Duration,
}

impl Remote for Inode {
    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        let path = super::inode(self.identity.ino);
        let length = buffer.len() as u64;
        // By its number: a file that replaces it meanwhile has another one.
        let mut read = || {
            let ask =
                Ask::get("OPEN", path.as_str()).with("offset", offset.to_string()).with("length", length.to_string());
            self.wire.content(&ask, None, |answer: Answer| {
                let (mut content, said) = answer.content();
                if said.is_some_and(|said| said != length) {
                    return Err(Failure::ours(Errno::STALE, "the file is shorter than it was"));
                }
                content.read_exact(buffer).map_err(|_| Failure::garbled("the content was cut short"))
            })
        };
        let attempt = surgetank_types::sync::Mutex::new(&mut read);
        retry_within(self.timeout, || {
            let mut read = super::locked(&attempt);
            (*read)().map_err(|why| match why.errno {
                // Another client has removed it, or truncated it before this range.
                Errno::NOENT | Errno::NXIO => Errno::STALE.into(),
                _ => self.wire.report(&path, why),
            })
        })
    }
}
