//! The server's abilities, determined by trying each thing once, on a separate object that is removed again.
//!
//! The danger that it avoids: a server that ignores what it does not know, and reports success. Only a refusal where one is due
//! shows that a condition or a checksum is understood.

use std::hash::{BuildHasher, RandomState};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::failure::{Failure, Meaning};
use super::server::Server;
use crate::checksum;
use crate::object::{Abilities, Part, When, Words};
use surgetank_types::error::Errno;

const MIB: u64 = 1 << 20;

/// No abilities. The limits are Amazon's: compatible servers allow at least as much, or refuse with a message.
pub const NOTHING: Abilities = Abilities {
    if_absent: false,
    if_same: false,
    checksums: false,
    copies: false,
    uploads_in_parts: false,
    holds_back: true,
    part_bytes_min: 5 * MIB,
    part_bytes_max: 5 << 30,
    parts_max: 10_000,
    put_bytes_max: 5 << 30,
    copy_bytes_max: 5 << 30,
    object_bytes_max: 5 << 40,
    lists_any_key: false,
    key_bytes_max: 1024,
    words_bytes_max: 2048,
};

const CONTENT: &[u8] = b"surgetank asks what this server can do";
const NO_ETAG: &str = "00000000000000000000000000000000";

impl Server {
    /// Asked once; a failure to ask is not cached.
    pub fn known(&self) -> Result<Abilities, Failure> {
        if let Some(abilities) = self.abilities.get() {
            return Ok(*abilities);
        }
        let _one = self.probing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(abilities) = self.abilities.get() {
            return Ok(*abilities);
        }
        let name = format!(".surgetank-tmp-probe-{:016x}", RandomState::new().hash_one(0));
        let found = match self.probe(&name) {
            Err(why) if why.is(Errno::ACCESS) && self.list("", true, None).is_ok() => {
                tracing::warn!("{} can be read only: {why}", self.place);
                NOTHING
            }
            found => found?,
        };
        tracing::debug!("{}: {found:?}", self.place);
        Ok(*self.abilities.get_or_init(|| found))
    }

    fn probe(&self, name: &str) -> Result<Abilities, Failure> {
        let found = self.probe_object(name);
        // Whatever the result, nothing of it stays. Every server limits the key by the prefix too.
        let removed = self.delete(name);
        let mut found = found?;
        removed?;
        found.key_bytes_max = found.key_bytes_max.saturating_sub(self.place.prefix.len());
        // The prefix of a copy's source has the same limits as a key.
        Ok(found)
    }

    fn probe_object(&self, name: &str) -> Result<Abilities, Failure> {
        let crc = checksum::of_bytes(CONTENT);
        let words = Words::new();
        let body: &dyn crate::object::Body = &CONTENT;
        let put = |when, sum| self.put(name, body, &words, when, sum);
        let mut found = NOTHING;

        found.checksums = match put(When::Always, super::proof(crc, None)) {
            Ok(_) => refused(put(When::Always, super::proof(crc ^ 1, None)).map(drop))?,
            Err(why) if is_no(&why) => false,
            Err(why) => return Err(why),
        };
        let told = self.head(name)?.and_then(|object| object.crc64nvme);
        found.checksums &= told == Some(crc);
        let md5 = if found.checksums { None } else { Some(super::md5_of(body)?) };
        let proof = || super::proof(crc, md5.as_ref());
        let etag = put(When::Always, proof())?;

        found.if_absent = held(put(When::Absent, proof()).map(drop))?;
        found.if_same = held(put(When::Is(NO_ETAG), proof()).map(drop))?;
        // A user that may not list gets the error when listing.
        found.lists_any_key = self.list(name, true, None).is_ok() && !self.lists_as_xml.load(Ordering::Relaxed);
        found.copies = !refused(self.copy(&found, name, Some(&etag), name, Some(&words)).map(drop))?;
        found.uploads_in_parts = self.probe_upload(name, &mut found)?;
        Ok(found)
    }

    fn probe_upload(&self, name: &str, found: &mut Abilities) -> Result<bool, Failure> {
        let body: &dyn crate::object::Body = &CONTENT;
        let crc = checksum::of_bytes(CONTENT);
        let id = match self.begin(found, name, &Words::new()) {
            Err(why) if is_no(&why) => return Ok(false),
            begun => begun?,
        };
        self.probe_range(name, &id, crc);
        let parts: Result<Vec<Part>, Failure> = self.part(found, name, &id, 1, body, crc).map(|part| vec![part]);
        let completed = parts.and_then(|parts| {
            let complete = |when| self.complete(found, name, &id, &parts, crc, when).map(drop);
            let same = held(complete(When::Is(NO_ETAG)))?;
            // If the condition was ignored, the upload no longer exists.
            let absent = same && held(complete(When::Absent))?;
            Ok((absent, same))
        });
        let aborted = self.abort(name, &id);
        let (absent, same) = completed?;
        aborted?;
        (found.if_absent, found.if_same) = (found.if_absent && absent, found.if_same && same);
        Ok(true)
    }

    /// Every answer is acceptable: Amazon copies no range of so small an object.
    fn probe_range(&self, name: &str, id: &str, crc_of_all: u64) {
        let etag = self.head(name).ok().flatten().map(|object| object.etag).unwrap_or_default();
        let part = self.part_of(name, id, 2, name, 0..7, &etag);
        let wrong = part.is_ok_and(|part| part.crc64nvme == Some(crc_of_all));
        self.ranges_missummed.store(wrong, Ordering::Relaxed);
    }
}

/// Whether the server does not have the ability.
fn is_no(why: &Failure) -> bool {
    why.is(Errno::OPNOTSUPP) || why.is(Errno::INVAL)
}

/// Whether the write was refused because of its condition.
fn held(done: Result<(), Failure>) -> Result<bool, Failure> {
    match done {
        Ok(()) => Ok(false),
        Err(why) if why.meaning == Meaning::Condition => Ok(true),
        Err(why) if is_no(&why) => Ok(false),
        Err(why) => Err(why),
    }
}

fn refused(done: Result<(), Failure>) -> Result<bool, Failure> {
    match done {
        Ok(()) => Ok(false),
        Err(why) if why.meaning == Meaning::Checksum || is_no(&why) => Ok(true),
        Err(why) => Err(why),
    }
}
