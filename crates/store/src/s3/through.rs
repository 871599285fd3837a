//! Makes a range of an object a part of an upload by way of the client: for servers that do not copy ranges correctly.
//!
//! The danger that it avoids: a body that can be read only once, while the request may be sent again. Each try reads from the
//! start, and the checksum is that of the last one.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::failure::{Failure, Meaning};
use super::reading::Reading;
use super::server::Server;
use crate::checksum::Checksum;
use crate::object::{Abilities, Body, Part};
use surgetank_types::error::Errno;

struct Fetched<'a> {
    server: &'a Arc<Server>,
    from: &'a str,
    range: Range<u64>,
    etag: &'a str,
    reading: Mutex<Option<Try>>,
}

struct Try {
    at: u64,
    reading: Reading,
    sum: Checksum,
}

impl Body for Fetched<'_> {
    fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        if offset == 0 {
            let begun = Reading::begin(Arc::clone(self.server), self.from, self.range.clone(), Some(self.etag))?;
            *reading = Some(Try { at: 0, reading: begun, sum: Checksum::default() });
        }
        let Some(this) = reading.as_mut().filter(|this| this.at == offset) else { return Err(Errno::SPIPE.into()) };
        this.reading.read_exact(buffer)?;
        this.sum.bytes(buffer);
        this.at += buffer.len() as u64;
        Ok(())
    }
}

#[allow(clippy::too_many_arguments, reason = "those of the interface")]
pub fn part_of(
    server: &Arc<Server>,
    able: &Abilities,
    key: &str,
    id: &str,
    number: u32,
    from: &str,
    range: Range<u64>,
    etag: &str,
) -> Result<Part, Failure> {
    let body = Fetched { server, from, range, etag, reading: Mutex::new(None) };
    let mut part = server.part_unsummed(key, id, number, &body)?;
    let sum = body.reading.into_inner().unwrap_or_else(PoisonError::into_inner).map(|this| this.sum.value());
    match part.crc64nvme {
        Some(theirs) if Some(theirs) != sum => {
            let why = Failure::ours(Errno::IO, "the server stored other bytes than it sent");
            Err(Failure { meaning: Meaning::Checksum, ..why })
        }
        _ => {
            part.crc64nvme = sum.filter(|_| able.checksums);
            Ok(part)
        }
    }
}
