//! Stores of objects (S3 and similar): a directory tree kept on a server that has only keys and whole objects.
//!
//! | here | there |
//! |---|---|
//! | a file | the object of its path, byte for byte; its attributes are user metadata (`attributes`) |
//! | a directory | an empty object whose key ends with `/`; or nothing, while an object is below it |
//! | a symbolic link, a fifo | an object with the target, or an empty one; its mode gives the type |
//! | staging (`staging`) | large: an incomplete upload in parts under the final key; small: nothing, the tier's file is held
//! open |
//! | publishing (`publishing`) | completing the upload, or one PUT: atomic, and conditional if the server can |
//! | a rename (`names`) | a copy on the server, then a delete: a crash between leaves both, and repeating the operation
//! finishes it |
//!
//! The dangers that it avoids:
//! - overwriting what another client put there meanwhile (conditions, and a look before each change);
//! - taking an incomplete copy for the file (an upload is visible only when it is complete);
//! - sending a large file again after a crash (the upload's id is kept on disk);
//! - one request for each object of a large directory (`listing`).

mod attributes;
mod interface;
mod keys;
mod listing;
#[cfg(test)]
pub(super) mod memory;
mod names;
mod publishing;
mod remote;
mod staging;
#[cfg(test)]
mod tests;
mod uploads;
mod walk;

pub use attributes::directory_number;
pub use interface::*;
pub use keys::is_mark;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use super::source::Source;
use super::{Cred, Expect, Features, Gate, Meta, Space, Staged, Store, StoreEntry, StorePath, StoreStat, Turn, Verify};
use attributes::Owner;
use listing::Listings;
use staging::Waiting;
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uploads::Uploads;

/// The space that a server reports: unlimited for practical purposes.
const SPACE_BYTES: u64 = 1 << 60;
const BLOCK_BYTES: u32 = 1 << 20;
/// Time for which a program's request waits for an unavailable server, unless [`ObjectStore::with_timeout`] sets another.
pub(super) const AWAY_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of small files published at the same time when order does not matter: most of the time is waiting.
const PUBLICATIONS_AT_ONCE: usize = 16;

/// The tree of files on a server of objects.
pub struct ObjectStore {
    server: Arc<dyn Objects>,
    abilities: Abilities,
    owner: Owner,
    verify: Verify,
    timeout: Duration,
    uploads: Uploads,
    /// Staged and not yet published, by temporary.
    waiting: Mutex<HashMap<StorePath, Arc<Waiting>>>,
    /// The last look at each path that will be published next: etag and words, or nothing.
    found: Mutex<HashMap<StorePath, Option<(String, Words)>>>,
    /// Paths at which a condition did not hold: the next look must ask the server.
    suspect: Mutex<HashSet<StorePath>>,
    /// Directories with an object of their own, which do not end with their last file.
    own_object: Mutex<HashSet<StorePath>>,
    listings: Listings,
    /// Objects as they were at their first look, for a reader that needs one consistent state (`as_it_was`).
    seen: Option<Mutex<HashMap<String, Object>>>,
}

impl ObjectStore {
    /// A store on this server. The ids of uploads are kept in the directory `state`; a listing is cached for `ttl`. Errors:
    /// `state` cannot be used.
    pub fn new(server: Arc<dyn Objects>, state: &Path, verify: Verify, ttl: Duration) -> io::Result<Self> {
        Ok(Self {
            abilities: server.abilities(),
            server,
            owner: Owner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() },
            verify,
            timeout: AWAY_TIMEOUT,
            uploads: Uploads::in_directory(state)?,
            waiting: Mutex::default(),
            found: Mutex::default(),
            suspect: Mutex::default(),
            own_object: Mutex::default(),
            listings: Listings::new(ttl),
            seen: None,
        })
    }

    /// Sets the time for which a program's request waits for an unavailable server.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// For reading only: each object is asked for once, and what changes afterwards counts as absent. The words of every object
    /// are read, also those that another client wrote.
    #[must_use]
    pub fn as_it_was(mut self) -> Self {
        self.seen = Some(Mutex::default());
        self
    }

    /// The object of a file or link, with its words; `None` if there is none.
    fn look(&self, path: &StorePath) -> io::Result<Option<Object>> {
        let key = self.key(path)?;
        let Some(seen) = &self.seen else { return self.server.head(key) };
        if let Some(object) = locked(seen).get(key) {
            return Ok(Some(object.clone()));
        }
        let object = self.server.head(key)?;
        if let Some(object) = &object {
            locked(seen).insert(key.to_owned(), object.clone());
        }
        Ok(object)
    }

    fn stat_now(&self, path: &StorePath) -> io::Result<StoreStat> {
        if path.0.is_empty() {
            return Ok(self.implied(path));
        }
        if path.is_temporary() {
            let waiting = locked(&self.waiting).get(path).cloned();
            return waiting.map(|waiting| waiting.stat()).ok_or_else(|| Errno::NOENT.into());
        }
        if let Some(object) = self.look(path)? {
            return Ok(attributes::stat_of(&object, self.owner));
        }
        if let Some(marker) = self.server.head(&self.below(path)?)? {
            return Ok(attributes::stat_of(&marker, self.owner));
        }
        if self.has_something(path)? { Ok(self.implied(path)) } else { Err(Errno::NOENT.into()) }
    }

    /// A directory without an object of its own.
    fn implied(&self, path: &StorePath) -> StoreStat {
        let key = format!("{}/", String::from_utf8_lossy(&path.0));
        attributes::stat_of(&Object { key, ..names::empty() }, self.owner)
    }

    fn has_something(&self, dir: &StorePath) -> io::Result<bool> {
        let page = self.server.list(&self.below(dir)?, true, None)?;
        Ok(!page.objects.is_empty() || !page.prefixes.is_empty())
    }

    /// The object of a path that must be a file, with its words.
    fn object(&self, path: &StorePath) -> io::Result<Object> {
        self.look(path)?.ok_or_else(|| Errno::NOENT.into())
    }

    fn remote(&self, object: Object) -> remote::RemoteObject {
        let identity = attributes::stat_of(&object, self.owner).identity;
        let (key, etag, crc64nvme) = (object.key, object.etag, object.crc64nvme);
        remote::RemoteObject { server: self.server.clone(), key, etag, identity, crc64nvme, timeout: self.timeout }
    }
}

impl Store for ObjectStore {
    fn describe(&self) -> String {
        self.server.describe()
    }

    fn features(&self) -> Features {
        Features {
            plain_files: false,
            hard_links: false,
            directories: false,
            atomic_renames: false,
            publications_at_once: PUBLICATIONS_AT_ONCE,
        }
    }

    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        let key = self.key(path)?;
        if self.abilities.lists_any_key || key.chars().all(keys::is_of_xml) { Ok(()) } else { Err(Errno::ILSEQ.into()) }
    }

    fn stat(&self, _who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.stat_now(path)
    }

    fn known_stat(&self, _who: Cred, path: &StorePath) -> Option<io::Result<StoreStat>> {
        self.listings.known(path).map(|known| known.ok_or_else(|| Errno::NOENT.into()))
    }

    fn glance(&self, who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.known_stat(who, path).unwrap_or_else(|| retry_within(self.timeout, || self.stat_now(path)))
    }

    fn hidden(&self) -> io::Result<Option<String>> {
        self.server.hidden()
    }

    fn list(&self, _who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        let mut entries = retry_within(self.timeout, || self.entries(path))?;
        if temporaries {
            for (temporary, waiting) in &*locked(&self.waiting) {
                if temporary.parent() == *path {
                    let name = temporary.0.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
                    let attr = waiting.stat().attr;
                    entries.push(StoreEntry { name: name.into(), kind: attr.kind, ino: attr.ino });
                }
            }
        }
        Ok(entries)
    }

    fn read_link(&self, _who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        let object = retry_within(self.timeout, || self.object(path))?;
        if attributes::stat_of(&object, self.owner).attr.kind != Kind::Symlink {
            return Err(Errno::INVAL.into());
        }
        let mut target = vec![0; usize::try_from(object.size_bytes).map_err(io::Error::other)?];
        super::Remote::read_at(&self.remote(object), &mut target, 0)?;
        Ok(target.into())
    }

    fn xattrs(&self, _who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        let object = match path.0.is_empty() {
            true => None,
            false => {
                self.look(path)?.map_or_else(|| self.server.head(&self.below(path)?), |object| Ok(Some(object)))?
            }
        };
        object.and_then(|object| object.words).map_or_else(|| Ok(Xattrs::new()), |words| attributes::xattrs_of(&words))
    }

    fn space(&self, _path: &StorePath) -> io::Result<Space> {
        Ok(Space {
            total_bytes: SPACE_BYTES,
            free_bytes: SPACE_BYTES,
            available_bytes: SPACE_BYTES,
            inodes_total: SPACE_BYTES,
            inodes_free: SPACE_BYTES,
            name_bytes_max: 255,
            block_bytes: BLOCK_BYTES,
        })
    }

    /// The server decides at the operation itself.
    fn may_write_dir(&self, _who: Cred, _path: &StorePath) -> io::Result<()> {
        Ok(())
    }

    fn open(&self, _who: Cred, _path: &StorePath, _write: bool) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn source(&self, _who: Cred, path: &StorePath) -> io::Result<Source> {
        let object = retry_within(self.timeout, || self.object(path))?;
        match attributes::stat_of(&object, self.owner).attr.kind {
            Kind::File => Ok(Source::Remote(Arc::new(self.remote(object)))),
            Kind::Symlink => Err(Errno::LOOP.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }

    fn create_temporary(&self, _who: Cred, _path: &StorePath, _perm: u32) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn stage_file(
        &self,
        _who: Cred,
        path: &StorePath,
        bound: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        self.stage_content(path, bound, source, meta, gate)
    }

    fn stage_in_place(&self, _: Cred, _: &StorePath, _: &Meta, _: Gate<'_>) -> io::Result<Staged> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn stage_dir(&self, _who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        self.stage_other(path, Kind::Directory, 0, b"", meta)
    }

    fn stage_symlink(&self, _who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        self.stage_other(path, Kind::Symlink, 0, target, meta)
    }

    fn stage_node(&self, _who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        self.stage_other(path, kind, device, b"", meta)
    }

    /// What the server has accepted it keeps.
    fn settle(&self, _who: Cred, paths: &[StorePath]) -> io::Result<()> {
        let waiting = locked(&self.waiting);
        let is_there = |path: &StorePath| !path.is_temporary() || waiting.contains_key(path);
        if paths.iter().all(is_there) { Ok(()) } else { Err(Errno::NOENT.into()) }
    }

    fn verify(&self, _: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        self.compare(path, staged, how, gate)
    }

    fn collect(&self) -> io::Result<u64> {
        let mut given_up = 0;
        for upload in self.uploads.all()? {
            let wanted = |waiting: &Waiting| match &waiting.content {
                staging::Content::Uploaded { upload: id, .. } => *id == upload.id,
                _ => false,
            };
            if !locked(&self.waiting).values().any(|waiting| wanted(waiting)) {
                self.server.abort(&upload.key, &upload.id)?;
                self.uploads.forget(&upload.path());
                given_up += 1;
            }
        }
        Ok(given_up)
    }

    fn release(&self, temporary: &StorePath) {
        locked(&self.waiting).remove(temporary);
    }

    fn refresh(&self) {
        self.server.refresh();
        self.listings.forget_all();
        self.listings.forget_words();
        locked(&self.own_object).clear();
        if let Some(seen) = &self.seen {
            locked(seen).clear();
        }
    }

    fn discard(&self, _who: Cred, path: &StorePath) -> io::Result<()> {
        self.throw_away(path)
    }

    fn check(&self, _who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        self.is_as_expected(path, expect)
    }

    fn publish(&self, _who: Cred, temporary: &StorePath, path: &StorePath, _meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(temporary, path, None)
    }

    fn publish_in_turn(
        &self,
        _who: Cred,
        temporary: &StorePath,
        path: &StorePath,
        _meta: &Meta,
        turn: Turn<'_>,
    ) -> io::Result<StoreIdentity> {
        self.bring(temporary, path, Some(turn))
    }

    fn replace(&self, _who: Cred, temporary: &StorePath, path: &StorePath, _meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(temporary, path, None)
    }

    fn rename(&self, _who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        self.move_name(from, to)
    }

    /// Two renames would leave both names absent in between.
    fn exchange(&self, _who: Cred, _a: &StorePath, _b: &StorePath) -> io::Result<()> {
        Err(Errno::INVAL.into())
    }

    fn link(&self, _who: Cred, _from: &StorePath, _to: &StorePath) -> io::Result<()> {
        Err(Errno::PERM.into())
    }

    fn unlink(&self, _who: Cred, path: &StorePath) -> io::Result<()> {
        self.remove_file(path)
    }

    fn remove_dir(&self, _who: Cred, path: &StorePath) -> io::Result<()> {
        self.remove_marker(path)
    }

    fn set_meta(&self, _who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        self.change_words(path, kind, meta)
    }

    fn sync_dirs(&self, _who: Cred, _paths: &[StorePath]) -> io::Result<()> {
        self.server.settle()
    }

    fn leave_notice(&self, name: &[u8]) -> io::Result<()> {
        let key = std::str::from_utf8(name).map_err(|_| Errno::ILSEQ)?;
        let sum = crate::checksum::of_bytes(b"");
        self.server.put(key, &&b""[..], sum, &Words::new(), When::Always)?;
        self.server.settle()
    }

    fn has_notice(&self, name: &[u8]) -> io::Result<bool> {
        let key = std::str::from_utf8(name).map_err(|_| Errno::ILSEQ)?;
        Ok(self.server.head(key)?.is_some())
    }

    fn remove_notices(&self, prefix: &[u8]) -> io::Result<()> {
        let prefix = std::str::from_utf8(prefix).map_err(|_| Errno::ILSEQ)?;
        let (mut keys, mut from) = (Vec::new(), None);
        loop {
            let page = self.server.list(prefix, true, from.as_deref())?;
            keys.extend(page.objects.into_iter().map(|object| object.key));
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        keys.iter().try_for_each(|key| self.server.delete(key))
    }
}

/// Repeats a program's request while the server is unavailable, for as long as `retry` allows, so that no program fails. (The
/// drain has its own retries.)
pub(super) fn retry_within<T>(timeout: Duration, ask: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let until = surgetank_types::clock::tick() + timeout;
    let mut pause = Duration::from_millis(50);
    loop {
        match ask() {
            Err(why) if is_away(&why) && surgetank_types::clock::tick() < until => {
                surgetank_types::sync::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_secs(1));
            }
            answer => return answer,
        }
    }
}

pub(super) fn is_away(why: &io::Error) -> bool {
    let errno = super::verdict::errno_of(why);
    matches!(
        errno,
        Errno::CONNREFUSED
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::PIPE
            | Errno::TIMEDOUT
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::NETRESET
    )
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
