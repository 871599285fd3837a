//! Deduplicated files: content is stored once, under a name from its BLAKE3 hash, and each file with that content is a small
//! text that names it (`references`).
//!
//! ```text
//! d/table.bin.surgetank.ref                   the file: its mode, owner, times and extended attributes, and the reference
//! .surgetank-blobs-1000/ab/cdef…              the content; `-UID` in a directory, no suffix on a server of objects
//! .surgetank-blobs-1000/.surgetank-tmp-KEY-7  while it is staged
//! ```
//! The dangers that it avoids:
//! - *A reference to nothing*: the content has its name durably before the reference is settled. Content that the store has
//!   already is compared before a reference is made, and replaced if it is damaged.
//! - *Content that is removed while an agent begins to refer to it*: only `surgetank gc` removes content, and only what no file
//!   has referred to for a long time (`unused`). A new reference therefore renews the content's time.
//! - *Other users*: in a directory each owner has separate content, in a directory that no other user may list or change. A
//!   file of it may be read by a user who knows its name: who may read a reference to it, or has the same content.

mod references;
#[cfg(test)]
mod tests;
pub mod unused;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::MemfdFlags;

use super::super::{Cred, Gate, Meta, Remote, Savings, Staged, Store, StorePath, Verify};
use super::forms::name_of;
use super::remote::by_ranges;
use super::{Behind, Content, Made, Packing, is_absent, locked};
use references::{Blobs, Reference};
use surgetank_types::clock;
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::{Arc, Mutex};

/// The end of a reference's name.
pub const SUFFIX: &[u8] = b".surgetank.ref";
/// Smaller files are not worth a second file.
const WORTH_BYTES: u64 = 64 << 10;
/// From this size on, an agent waits for content that it is sending already; the drain settles files of this size separately.
const LARGE_BYTES: u64 = 8 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Content that is older gets a new time with a new reference, so that `unused` leaves it alone.
const YOUNG: Duration = Duration::from_secs(24 * 3600);

/// Whether a file that is published at this path is deduplicated.
pub type Choice = Box<dyn Fn(&StorePath) -> bool + Send + Sync>;

/// Packs files by deduplication.
pub struct Shared {
    inner: Arc<dyn Store>,
    choose: Choice,
    /// Directories that exist.
    ready: Mutex<HashSet<StorePath>>,
    making: Mutex<()>,
    /// Large content that is being sent: its path, by its temporary.
    under_way: Mutex<HashMap<StorePath, StorePath>>,
    savings: Mutex<Savings>,
    /// Also deduplicates small files: for tests.
    always: bool,
}

enum Found {
    Nothing,
    /// Other bytes.
    Rotten,
    Whole(Staged),
}

fn damaged(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

impl Shared {
    /// Deduplicates the files that `choose` selects, with content in the store `inner`.
    pub fn new(inner: Arc<dyn Store>, choose: Choice) -> Self {
        Self {
            inner,
            choose,
            ready: Mutex::default(),
            making: Mutex::default(),
            under_way: Mutex::default(),
            savings: Mutex::default(),
            always: false,
        }
    }

    #[cfg(test)]
    fn always(self) -> Self {
        Self { always: true, ..self }
    }

    fn blobs_of(&self, who: Cred) -> Blobs {
        Blobs { owner: self.inner.features().directories.then_some(who.uid) }
    }

    /// What the store has at the content's path.
    fn find(&self, who: Cred, at: &StorePath, length_bytes: u64, checksum: u64, gate: Gate<'_>) -> io::Result<Found> {
        let there = match self.inner.stat(who, at) {
            Err(why) if is_absent(&why) => return Ok(Found::Nothing),
            there => there?,
        };
        if there.attr.kind != Kind::File || there.attr.size_bytes != length_bytes {
            return Ok(Found::Rotten);
        }
        let mut staged = Staged { identity: there.identity, checksum };
        // Read, not sent: does not count against the drain's rate.
        match self.inner.verify(who, at, &staged, Verify::Cache, &|_| gate(0)) {
            Err(why) if why.kind() == io::ErrorKind::InvalidData => {
                tracing::warn!(%at, %why, "what the store has of this content is not that: it is replaced");
                return Ok(Found::Rotten);
            }
            verified => verified?,
        }
        let age = clock::now().nanos.saturating_sub(there.attr.mtime.nanos);
        if age > i64::try_from(YOUNG.as_nanos()).unwrap_or(i64::MAX) {
            staged.identity = self.inner.set_meta(who, at, Kind::File, &meta_of(who, 0o444))?;
        }
        Ok(Found::Whole(staged))
    }

    fn send(
        &self,
        who: Cred,
        temporary: &StorePath,
        behind: &Behind,
        source: &File,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        let staged = self.inner.stage_file(who, temporary, &behind.at, source, &meta_of(who, 0o444), gate);
        let staged = staged.inspect_err(|why| {
            // Another client has removed the directories.
            if is_absent(why) {
                locked(&self.ready).clear();
            }
        })?;
        if staged.checksum != behind.staged.checksum {
            self.inner.discard(who, temporary)?;
            return Err(damaged("it was written to while it was stored"));
        }
        Ok(staged)
    }

    /// If the same large content is being sent already: waits until it is sent or has failed, and returns which. (Small content
    /// is settled together with other files, and may wait for this one.)
    fn waits_for_another(
        &self,
        temporary: &StorePath,
        at: &StorePath,
        length_bytes: u64,
        gate: Gate<'_>,
    ) -> io::Result<bool> {
        if length_bytes < LARGE_BYTES {
            return Ok(false);
        }
        let mut waited = false;
        loop {
            let mut under_way = locked(&self.under_way);
            if !under_way.iter().any(|(other, towards)| other != temporary && towards == at) {
                under_way.insert(temporary.clone(), at.clone());
                return Ok(waited);
            }
            drop(under_way);
            waited = true;
            gate(0)?;
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn is_not_under_way(&self, temporary: &StorePath) {
        locked(&self.under_way).remove(temporary);
    }

    /// Another agent was faster with the same content.
    fn brought(&self, who: Cred, one: &Behind) -> io::Result<Option<StoreIdentity>> {
        match self.inner.stat(who, &one.at) {
            Ok(there) => {
                let same = there.attr.kind == Kind::File && there.attr.size_bytes == one.staged.identity.size_bytes;
                Ok(same.then_some(there.identity))
            }
            Err(why) if is_absent(&why) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Makes the directories for the content. Errors: they do not exist and cannot be made.
    fn prepare(&self, who: Cred, blobs: &Blobs, dir: &StorePath) -> io::Result<()> {
        if !self.inner.features().directories {
            return Ok(());
        }
        if locked(&self.ready).contains(dir) {
            return Ok(());
        }
        // One at a time: two threads would remove each other's.
        let _making = locked(&self.making);
        for dir in [&blobs.root(), dir] {
            if locked(&self.ready).contains(dir) {
                continue;
            }
            match self.inner.stat(who, dir) {
                // A directory that other users may change is not reliable.
                Ok(there) if there.attr.kind == Kind::Directory && there.attr.uid == who.uid => {}
                Ok(_) => return Err(Errno::PERM.into()),
                Err(why) if is_absent(&why) => self.make_dir(who, dir)?,
                Err(why) => return Err(why),
            }
            locked(&self.ready).insert(dir.clone());
        }
        Ok(())
    }

    fn make_dir(&self, who: Cred, dir: &StorePath) -> io::Result<()> {
        let made = |by: Cred| -> io::Result<()> {
            // Another machine's process may have the same number.
            let name = format!(".surgetank-tmp-blobs-{}-{}", std::process::id(), clock::now().nanos);
            let temporary = dir.parent().join(name.as_bytes());
            // Other users may pass through it, but not list it.
            let meta = meta_of(who, 0o711);
            self.inner.stage_dir(by, &temporary, &meta)?;
            self.inner.publish(by, &temporary, dir, &meta).map(drop).inspect_err(|_| {
                drop(self.inner.discard(by, &temporary));
            })
        };
        let made = match made(who) {
            // Only root may be permitted to write to the store's root.
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied && rustix::process::geteuid().is_root() => {
                made(Cred { uid: 0, gid: 0 })
            }
            made => made,
        };
        match (made, self.inner.stat(who, dir)) {
            (Ok(()), _) => self.inner.sync_dirs(who, &[dir.parent()]),
            // Another agent was faster.
            (Err(_), Ok(there)) if there.attr.kind == Kind::Directory && there.attr.uid == who.uid => Ok(()),
            (Err(why), _) => Err(why),
        }
    }
}

fn unsent(length_bytes: u64) -> StoreIdentity {
    StoreIdentity { ino: 0, size_bytes: length_bytes, mtime_nanos: 0, ctime_nanos: 0 }
}

fn meta_of(who: Cred, perm: u32) -> Meta {
    let now = clock::now();
    Meta { perm, uid: who.uid, gid: who.gid, times: Some((now, now)), xattrs: Some(Xattrs::new()) }
}

/// Temporary of the content, derived from that of the reference.
fn temporary_of(blobs: &StorePath, temporary: &StorePath) -> StorePath {
    blobs.join(name_of(temporary))
}

impl Packing for Shared {
    fn suffix(&self) -> &'static [u8] {
        SUFFIX
    }

    fn hides(&self, path: &StorePath) -> bool {
        Blobs::is_one(path.0.split(|byte| *byte == b'/').next().unwrap_or_default())
    }

    fn make(&self, who: Cred, bound: &StorePath, source: &File, gate: Gate<'_>) -> io::Result<Option<Made>> {
        if source.metadata()?.len() < WORTH_BYTES && !self.always || !(self.choose)(bound) {
            return Ok(None);
        }
        let began = clock::tick();
        let blobs = self.blobs_of(who);
        let reference = Reference::to(blobs, source, gate)?;
        let took = clock::tick().saturating_duration_since(began);
        let at = reference.path();
        if let Err(why) = self.prepare(who, &blobs, &at.parent()) {
            tracing::warn!(path = %bound, dir = %blobs.root(), %why, "no directory for deduplicated content can be made: the file is stored unchanged");
            return Ok(None);
        }
        locked(&self.savings).hash_ms += u64::try_from(took.as_millis()).unwrap_or(0);
        let found = self.find(who, &at, reference.length_bytes, reference.checksum, gate)?;
        let text = reference.text();
        let packed: OwnedFd = rustix::fs::memfd_create(c"reference", MemfdFlags::CLOEXEC)?;
        let packed = File::from(packed);
        packed.write_all_at(text.as_bytes(), 0)?;
        let (length_bytes, checksum) = (reference.length_bytes, reference.checksum);
        let is_rotten = matches!(found, Found::Rotten);
        let (is_new, staged) = match found {
            Found::Whole(staged) => (false, staged),
            Found::Nothing | Found::Rotten => (true, Staged { identity: unsent(length_bytes), checksum }),
        };
        let behind = Behind { at, temporary: None, is_new, is_rotten, staged };
        Ok(Some(Made { packed, length_bytes, checksum, behind: Some(behind) }))
    }

    fn length_of(&self, packed: &dyn Remote) -> io::Result<u64> {
        Reference::read(packed).map(|reference| reference.length_bytes)
    }

    fn open(&self, who: Cred, packed: Arc<dyn Remote>) -> io::Result<Content> {
        let reference = Reference::read(&*packed)?;
        let (inner, at, length_bytes) = (Arc::clone(&self.inner), reference.path(), reference.length_bytes);
        let find = move || {
            let found = match inner.source(who, &at) {
                Err(why) if is_absent(&why) => return Err(damaged(format!("its content is gone: {at}"))),
                found => by_ranges(found?)?,
            };
            match found.identity().size_bytes {
                is if is == length_bytes => Ok(found),
                is => Err(damaged(format!("its content {at} has {is} bytes instead of {length_bytes}"))),
            }
        };
        let now = Mutex::new(find()?);
        let read = move |buffer: &mut [u8], offset: u64| {
            let blob = Arc::clone(&locked(&now));
            match blob.read_at(buffer, offset) {
                // Its time was renewed, or it was sent again: no other content has this name.
                Err(why) if why.raw_os_error() == Some(libc::ESTALE) => {
                    let again = find()?;
                    *locked(&now) = Arc::clone(&again);
                    again.read_at(buffer, offset)
                }
                read => read,
            }
        };
        Ok(Content { length_bytes, checksum: reference.checksum, read: Box::new(read) })
    }

    fn savings(&self) -> Savings {
        *locked(&self.savings)
    }

    fn stage_behind(
        &self,
        who: Cred,
        temporary: &StorePath,
        behind: &mut Behind,
        source: &File,
        gate: Gate<'_>,
    ) -> io::Result<()> {
        let length_bytes = behind.staged.identity.size_bytes;
        let temporary = temporary_of(&behind.at.parent().parent(), temporary);
        if behind.is_new && self.waits_for_another(&temporary, &behind.at, length_bytes, gate)? {
            let found = self.find(who, &behind.at, length_bytes, behind.staged.checksum, gate)?;
            if let Found::Whole(staged) = found {
                *behind = Behind { is_new: false, staged, ..behind.clone() };
                self.is_not_under_way(&temporary);
            }
        }
        if behind.is_new {
            let staged = self.send(who, &temporary, behind, source, gate);
            behind.staged = staged.inspect_err(|_| self.is_not_under_way(&temporary))?;
            behind.temporary = Some(temporary);
        }
        let mut savings = locked(&self.savings);
        savings.deduplicated_files += 1;
        savings.deduplicated_bytes += length_bytes;
        savings.new_bytes += if behind.is_new { length_bytes } else { 0 };
        Ok(())
    }

    fn settle_behind(&self, who: Cred, behind: &mut [Behind]) -> io::Result<()> {
        let temporaries: Vec<StorePath> = behind.iter().filter_map(|one| one.temporary.clone()).collect();
        if temporaries.is_empty() {
            return Ok(());
        }
        self.inner.settle(who, &temporaries)?;
        let mut dirs = HashSet::new();
        for one in behind.iter_mut() {
            let Some(temporary) = &one.temporary else { continue };
            let brought = if one.is_rotten { None } else { self.brought(who, one)? };
            if let Some(identity) = brought {
                self.inner.discard(who, temporary)?;
                one.staged.identity = identity;
                self.is_not_under_way(temporary);
                one.temporary = None;
                continue;
            }
            let published = self.inner.publish(who, temporary, &one.at, &meta_of(who, 0o444));
            one.staged.identity = published.inspect_err(|why| {
                if is_absent(why) {
                    locked(&self.ready).clear();
                }
            })?;
            self.is_not_under_way(temporary);
            one.temporary = None;
            dirs.insert(one.at.parent());
            crash_point!("packed.behind");
        }
        // The directory above was synced when it was made.
        self.inner.sync_dirs(who, &dirs.into_iter().collect::<Vec<_>>())
    }

    fn verify_behind(&self, who: Cred, behind: &Behind, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        match &behind.temporary {
            Some(temporary) => self.inner.verify(who, temporary, &behind.staged, how, gate),
            None if behind.is_new || how == Verify::Reread => {
                self.inner.verify(who, &behind.at, &behind.staged, how, gate)
            }
            // It was compared when it was found.
            None => Ok(()),
        }
    }

    fn discard_behind(&self, who: Cred, temporary: &StorePath, packed: Option<&dyn Remote>) -> io::Result<()> {
        let blobs = match packed.map(Reference::read) {
            Some(Ok(reference)) => reference.blobs,
            Some(Err(_)) | None => self.blobs_of(who),
        };
        let temporary = temporary_of(&blobs.root(), temporary);
        self.is_not_under_way(&temporary);
        match self.inner.discard(who, &temporary) {
            Err(why) if is_absent(&why) => Ok(()),
            done => done,
        }
    }
}
