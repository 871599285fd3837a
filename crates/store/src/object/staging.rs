//! Staging: everything that can be done before the file may become visible.
//!
//! A large file is uploaded in parts under its final key. Of a small one only the checksum is computed, and the tier's file is
//! held open until its turn. Whatever goes to the server later must have that checksum, so a file that changed meanwhile is
//! detected.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::attributes::{Owner, id_of, identity_of, stat_of, too_many, words_of};
use super::uploads::Kept;
use super::{Body, Object, ObjectStore, Part, Words, locked};
use crate::checksum::{self, Checksum};
use crate::{Gate, Meta, Staged, StorePath, StoreStat, Verify, at_once};
use rustix::io::Errno;
use surgetank_types::model::Kind;
use surgetank_types::sync::{Arc, Mutex};

/// From this size on a file is uploaded in parts, which can be staged; a smaller one is sent in one request.
const LARGE_BYTES: u64 = 16 << 20;
const PART_BYTES: u64 = 16 << 20;
/// Of one file.
const PARTS_AT_ONCE: usize = 4;
const CHUNK_BYTES: u64 = 1 << 20;

/// Staged, and waiting to be published.
pub(super) struct Waiting {
    pub kind: Kind,
    pub id: u64,
    pub size_bytes: u64,
    pub checksum: u64,
    pub words: Words,
    pub content: Content,
    pub owner: Owner,
    /// No extended attributes were given: the replaced file's stay.
    pub keeps_xattrs: bool,
}

pub(super) enum Content {
    /// A link's target, or nothing.
    Bytes(Box<[u8]>),
    /// To be sent in its turn.
    Held(File),
    /// Sent, and to be completed. The file serves if its key changes.
    Uploaded { file: File, key: String, upload: String, parts: Vec<Part> },
}

/// A range of a file, as a request's body.
pub(super) struct Range<'a> {
    pub file: &'a File,
    pub start: u64,
    pub len: u64,
}

impl Body for Range<'_> {
    fn len(&self) -> u64 {
        self.len
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, self.start + offset)
    }
}

impl Range<'_> {
    pub fn sum(&self) -> io::Result<u64> {
        let mut sum = Checksum::default();
        let mut buffer = vec![0; usize::try_from(self.len.min(CHUNK_BYTES)).unwrap_or(0)];
        let mut done = 0;
        while done < self.len {
            let len = usize::try_from((self.len - done).min(CHUNK_BYTES)).unwrap_or(buffer.len());
            self.read_at(&mut buffer[..len], done)?;
            sum.bytes(&buffer[..len]);
            done += len as u64;
        }
        Ok(sum.value())
    }
}

impl Waiting {
    /// The attributes that it will have, without its etag.
    pub fn stat(&self) -> StoreStat {
        let words = Some(self.words.clone());
        let object = Object { size_bytes: self.size_bytes, words, ..super::names::empty() };
        let mut stat = stat_of(&object, self.owner);
        stat.attr.kind = self.kind;
        stat
    }

    fn staged(&self) -> Staged {
        let mtime = self.stat().attr.mtime;
        Staged { identity: identity_of(self.id, self.size_bytes, mtime, ""), checksum: self.checksum }
    }
}

/// Calls the gate in chunks, as a copy to a file does.
fn in_chunks(bytes: u64, gate: Gate<'_>) -> io::Result<()> {
    (0..bytes).step_by(CHUNK_BYTES as usize).try_for_each(|at| gate(CHUNK_BYTES.min(bytes - at)))
}

/// A new id, unique for one version of one file.
fn new_id() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    // Positive, and not 0.
    Ok(u64::from_ne_bytes(bytes) >> 1 | 1)
}

impl ObjectStore {
    fn put_by(&self, temporary: &StorePath, waiting: Waiting) -> Staged {
        let staged = waiting.staged();
        locked(&self.waiting).insert(temporary.clone(), Arc::new(waiting));
        staged
    }

    pub(super) fn stage_other(
        &self,
        temporary: &StorePath,
        kind: Kind,
        device: u64,
        bytes: &[u8],
        meta: &Meta,
    ) -> io::Result<Staged> {
        if !temporary.is_temporary() {
            return Err(Errno::EXIST.into());
        }
        self.throw_away(temporary)?;
        let id = new_id()?;
        let words = words_of(kind, id, device, meta, None)?;
        too_many(&words, self.abilities.words_bytes_max)?;
        let waiting = Waiting {
            kind,
            id,
            size_bytes: bytes.len() as u64,
            checksum: checksum::of_bytes(bytes),
            words,
            content: Content::Bytes(bytes.into()),
            owner: self.owner,
            keeps_xattrs: false,
        };
        Ok(Staged { checksum: 0, ..self.put_by(temporary, waiting) })
    }

    pub(super) fn stage_content(
        &self,
        temporary: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        if !temporary.is_temporary() {
            return Err(Errno::EXIST.into());
        }
        locked(&self.waiting).remove(temporary);
        let key = self.key(bound)?;
        let size_bytes = source.metadata()?.len();
        if size_bytes > self.abilities.object_bytes_max {
            return Err(Errno::FBIG.into());
        }
        let file = source.try_clone()?;
        let in_parts = size_bytes >= LARGE_BYTES && self.abilities.uploads_in_parts && !bound.is_temporary();
        let waiting = if in_parts {
            self.upload(temporary, key, file, size_bytes, meta, gate)?
        } else {
            self.throw_away(temporary)?;
            let id = new_id()?;
            let words = words_of(Kind::File, id, 0, meta, None)?;
            too_many(&words, self.abilities.words_bytes_max)?;
            let checksum = checksum::checksum(&file, gate)?;
            let content = Content::Held(file);
            let keeps_xattrs = meta.xattrs.is_none();
            Waiting { kind: Kind::File, id, size_bytes, checksum, words, content, owner: self.owner, keeps_xattrs }
        };
        crash_point!("store.staged");
        Ok(self.put_by(temporary, waiting))
    }

    /// Continues the upload that an earlier agent began, if it was of the same bytes as far as that can be determined.
    fn upload(
        &self,
        temporary: &StorePath,
        key: &str,
        file: File,
        size_bytes: u64,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Waiting> {
        // An upload's words cannot change after it has begun.
        let before = if meta.xattrs.is_none() { self.server.head(key)?.and_then(|object| object.words) } else { None };
        let earlier = self.uploads.of(temporary).filter(|kept| kept.key == key && kept.size_bytes == size_bytes);
        let resumed = earlier.and_then(|kept| {
            let id = id_of(&kept.words)?;
            let mut words = words_of(Kind::File, id, 0, meta, before.as_ref()).ok()?;
            // Reading the source changes this one.
            words.remove("atime");
            let same = kept.words.iter().filter(|(name, _)| *name != "atime").eq(&words);
            let parts = same.then(|| self.server.parts(key, &kept.id).ok()).flatten()?;
            Some((kept, parts, id))
        });
        let (kept, there, id) = match resumed {
            Some(resumed) => resumed,
            None => {
                self.throw_away(temporary)?;
                let id = new_id()?;
                let words = words_of(Kind::File, id, 0, meta, before.as_ref())?;
                too_many(&words, self.abilities.words_bytes_max)?;
                let least = size_bytes.div_ceil(u64::from(self.abilities.parts_max.max(1)));
                let part_bytes = PART_BYTES.max(self.abilities.part_bytes_min).max(least.next_multiple_of(1 << 20));
                let part_bytes = part_bytes.min(self.abilities.part_bytes_max);
                let upload = self.server.begin(key, &words)?;
                let kept = Kept {
                    temporary: temporary.0.clone(),
                    key: key.to_owned(),
                    id: upload,
                    size_bytes,
                    part_bytes,
                    words,
                };
                if let Err(why) = self.uploads.keep(&kept) {
                    drop(self.server.abort(key, &kept.id));
                    return Err(why);
                }
                crash_point!("store.upload_begun");
                (kept, Vec::new(), id)
            }
        };
        let (parts, checksum) = self.send_parts(&kept, &file, &there, gate)?;
        let content = Content::Uploaded { file, key: kept.key, upload: kept.id, parts };
        let (words, owner) = (kept.words, self.owner);
        Ok(Waiting { kind: Kind::File, id, size_bytes, checksum, words, content, owner, keeps_xattrs: false })
    }

    /// Sends several parts at a time; parts that the server has are only compared. Returns them in order, and the checksum of
    /// the whole.
    fn send_parts(&self, kept: &Kept, file: &File, there: &[Part], gate: Gate<'_>) -> io::Result<(Vec<Part>, u64)> {
        let count = usize::try_from(kept.size_bytes.div_ceil(kept.part_bytes)).map_err(io::Error::other)?;
        let sent: Mutex<Vec<(Part, u64)>> = Mutex::default();
        at_once(count, PARTS_AT_ONCE, &|index| {
            let start = index as u64 * kept.part_bytes;
            let body = Range { file, start, len: kept.part_bytes.min(kept.size_bytes - start) };
            let number = u32::try_from(index + 1).map_err(io::Error::other)?;
            let sum = body.sum()?;
            let known = there
                .iter()
                .find(|part| part.number == number && part.size_bytes == body.len && part.crc64nvme == Some(sum));
            let part = match known {
                Some(part) => part.clone(),
                None => {
                    in_chunks(body.len, gate)?;
                    let part = self.server.part(&kept.key, &kept.id, number, &body, sum)?;
                    crash_point!("store.part_sent");
                    part
                }
            };
            locked(&sent).push((part, sum));
            Ok(())
        })?;
        let mut sent = std::mem::take(&mut *locked(&sent));
        sent.sort_unstable_by_key(|(part, _)| part.number);
        let whole = sent
            .iter()
            .fold(checksum::of_bytes(b""), |whole, (part, sum)| checksum::joined(whole, *sum, part.size_bytes));
        Ok((sent.into_iter().map(|(part, _)| part).collect(), whole))
    }

    /// Follows the rename of the directory of staged copies.
    pub(super) fn move_staged(&self, from: &StorePath, to: &StorePath) -> io::Result<()> {
        let mut waiting = locked(&self.waiting);
        let moving: Vec<StorePath> = waiting.keys().filter(|path| path.is_below(from)).cloned().collect();
        for old in moving {
            let new = StorePath([&to.0[..], &old.0[from.0.len()..]].concat());
            if let Some(kept) = self.uploads.of(&old) {
                self.uploads.keep(&Kept { temporary: new.0.clone(), ..kept })?;
                self.uploads.forget(&old);
            }
            if let Some(one) = waiting.remove(&old) {
                waiting.insert(new, one);
            }
        }
        Ok(())
    }

    /// Drops the staged copies of a directory that is removed.
    pub(super) fn lose_staged(&self, dir: &StorePath) -> io::Result<()> {
        let lost: Vec<StorePath> = locked(&self.waiting).keys().filter(|path| path.is_below(dir)).cloned().collect();
        lost.iter().try_for_each(|temporary| self.throw_away(temporary))
    }

    pub(super) fn throw_away(&self, temporary: &StorePath) -> io::Result<()> {
        if !temporary.is_temporary() {
            return Err(Errno::INVAL.into());
        }
        locked(&self.waiting).remove(temporary);
        if let Some(kept) = self.uploads.of(temporary) {
            self.server.abort(&kept.key, &kept.id)?;
            self.uploads.forget(temporary);
        }
        Ok(())
    }

    /// Compares a copy. For a temporary, the server has confirmed every part or has none yet; a published object is asked for.
    pub(super) fn compare(&self, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        let different = |why: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{path} in {}: {why}", self.server.describe()))
        };
        if path.is_temporary() {
            let waiting = locked(&self.waiting).get(path).cloned().ok_or(Errno::NOENT)?;
            let same = waiting.id == staged.identity.ino && waiting.size_bytes == staged.identity.size_bytes;
            return if same { Ok(()) } else { Err(different("the copy was replaced by another one".into())) };
        }
        let object = self.object(path)?;
        let stat = stat_of(&object, self.owner);
        if stat.identity.ino != staged.identity.ino {
            return Err(different("another file has the name".into()));
        }
        if object.size_bytes != staged.identity.size_bytes {
            return Err(different(format!("{} bytes instead of {}", object.size_bytes, staged.identity.size_bytes)));
        }
        if stat.attr.kind != Kind::File {
            return Ok(());
        }
        let sum = match object.crc64nvme.filter(|_| how == Verify::Cache) {
            Some(sum) => sum,
            None => self.sum_of(object, gate)?,
        };
        if sum == staged.checksum {
            Ok(())
        } else {
            Err(different(format!("checksum {sum:016x} instead of {:016x}", staged.checksum)))
        }
    }

    /// Reads the object back.
    fn sum_of(&self, object: Object, gate: Gate<'_>) -> io::Result<u64> {
        let bytes = object.size_bytes;
        let sum = crate::Source::Remote(Arc::new(self.remote(object))).sum()?;
        gate(bytes)?;
        Ok(sum)
    }
}
