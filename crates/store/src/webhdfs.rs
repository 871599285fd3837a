//! The store that is an HDFS, over its REST API (WebHDFS).
//!
//! HDFS has most of what a file system has: directories, atomic renames, modes, times. It has no links and no writing in place,
//! and an inode's content changes only by appending.
//!
//! | here | there |
//! |---|---|
//! | a file | a file, byte for byte; what HDFS cannot keep of it is in its `record` |
//! | a symbolic link, a fifo | a file with the target, or an empty one; its record gives the type |
//! | staging (`staging`) | a temporary beside the destination, complete when the datanodes have confirmed its end |
//! | verifying | the namenode's checksum of it (`digest`), or reading back |
//! | publishing (`publishing`) | a rename of that inode, whatever has the temporary's name by then |
//! | reading (`remote`) | ranges of an inode, wherever it moves meanwhile |
//!
//! The dangers that it avoids:
//! - overwriting what another client put there meanwhile (a new name is taken by a rename that replaces nothing);
//! - taking a lost answer for a failure (an inode that has arrived is recognised by its number);
//! - repeated requests for each file of a large directory (`listing`).

mod answers;
mod digest;
mod failure;
mod listing;
mod names;
mod people;
mod place;
mod publishing;
mod record;
mod remote;
mod staging;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::time::Duration;

use self::answers::{ServerDefaults, Status};
use self::failure::Failure;
use self::listing::Listings;
use self::people::People;
pub use self::place::{Limits, Place};
use self::record::Record;
use self::staging::Copy;
use self::wire::{Ask, Wire};
use super::object::{AWAY_TIMEOUT, retry_within};
use super::{
    Cred, Expect, Features, Gate, Meta, Source, Space, Staged, Store, StoreEntry, StorePath, StoreStat, Verify,
};
use surgetank_types::error::{Errno, Error, Result};
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Number of files published at the same time when order does not matter: most of the time is waiting.
const PUBLICATIONS_AT_ONCE: usize = 16;
/// For a server that does not report its space.
const SPACE_BYTES: u64 = 1 << 60;
const NAME_BYTES_MAX: usize = 255;

/// A store on an HDFS.
pub struct WebHdfs {
    wire: Arc<Wire>,
    people: People,
    defaults: OnceLock<Option<ServerDefaults>>,
    /// Staged by this agent and not yet published.
    staged: Mutex<HashMap<StorePath, Copy>>,
    /// Paths at which the last look found nothing: a publication there replaces nothing.
    absent: Mutex<HashSet<StorePath>>,
    listings: Listings,
    timeout: Duration,
}

impl WebHdfs {
    /// Checks that the server is reachable and accepts the user, and makes the store's directory. A listing is cached for
    /// `ttl`. Errors: the server or the directory cannot be used.
    pub fn open(place: Place, ttl: Duration) -> Result<Self> {
        let store = Self::new(place, ttl)?;
        store.begin(true).map_err(|why| store.unusable(&why))?;
        Ok(store)
    }

    /// For reading only: nothing is made. Errors: the server or the directory cannot be used.
    pub fn open_to_read(place: Place, ttl: Duration) -> Result<Self> {
        let store = Self::new(place, ttl)?;
        store.begin(false).map_err(|why| store.unusable(&why))?;
        Ok(store)
    }

    /// Sets the time for which a program's request waits for an unavailable server.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    fn new(place: Place, ttl: Duration) -> Result<Self> {
        let people = People::new(&place.user);
        Ok(Self {
            wire: Arc::new(Wire::new(place)?),
            people,
            defaults: OnceLock::new(),
            staged: Mutex::default(),
            absent: Mutex::default(),
            listings: Listings::new(ttl),
            timeout: AWAY_TIMEOUT,
        })
    }

    fn begin(&self, makes: bool) -> std::result::Result<(), Failure> {
        let status = match self.status("") {
            Err(why) if why.is(Errno::NOENT) && makes => {
                self.wire.ask(&Ask::put("MKDIRS", ""))?;
                self.status("")?
            }
            found => found?,
        };
        if status.is_dir() { Ok(()) } else { Err(Failure::ours(Errno::NOTDIR, "it is a file, not a directory")) }
    }

    fn unusable(&self, why: &Failure) -> Error {
        let place = &self.wire.place;
        let remedy = match (why.errno, why.status) {
            (_, 401) => "use an HDFS (or a gateway to it) with simple authentication",
            (Errno::ACCESS, _) => "name the user: HADOOP_USER_NAME, or webhdfs://USER@HOST:PORT/PATH",
            (Errno::NOENT | Errno::NOTDIR, _) => "correct the path in the URL",
            (_, 0) => "look whether the namenode runs, and at host and port in the URL: those of its web address",
            _ => "look at the URL and at what the namenode says",
        };
        Error::new(format!("the store {place} cannot be used")).why(why).remedy(remedy)
    }

    /// What the server is like, for messages.
    pub fn abilities_in_words(&self) -> String {
        let sums = match self.defaults() {
            Some(_) => "checksums: yes",
            None => "checksums: read back",
        };
        format!("it answers; {sums}")
    }

    fn status(&self, path: &str) -> std::result::Result<Status, Failure> {
        let answer = self.wire.ask(&Ask::get("GETFILESTATUS", path))?;
        Ok(answers::parse::<answers::OneStatus>(&answer)?.status)
    }

    /// How new files are laid out; `None` if the server does not report it.
    fn defaults(&self) -> Option<ServerDefaults> {
        if let Some(known) = self.defaults.get() {
            return *known;
        }
        let asked = self.wire.ask(&Ask::get("GETSERVERDEFAULTS", ""));
        let parsed = match asked.and_then(|answer| answers::parse::<answers::Defaults>(&answer)) {
            Ok(parsed) => Some(parsed.defaults),
            Err(why) if why.again => return None,
            Err(_) => None,
        };
        *self.defaults.get_or_init(|| parsed)
    }

    /// The record of a file. Where the file's mode does not permit reading it, HDFS's own attributes count.
    fn record(&self, path: &str) -> std::result::Result<Option<Record>, Failure> {
        let ask = Ask::get("GETXATTRS", path).with("xattr.name", record::NAME).with("encoding", "hex");
        match self.wire.ask(&ask) {
            Ok(answer) => {
                let parsed = answers::parse::<answers::Attributes>(&answer)?;
                let bytes = parsed.list.first().and_then(|one| bytes_of(one.value.as_deref()));
                Ok(bytes.and_then(|bytes| Record::parse(&bytes)))
            }
            Err(why) if why.is(Errno::NODATA) || why.is(Errno::ACCESS) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// `fresh`: the record is asked for even if one is cached.
    fn look(&self, path: &str, fresh: bool) -> std::result::Result<(Status, Option<Record>), Failure> {
        let status = self.status(path)?;
        if !fresh && let Some(known) = self.listings.record_known(&status) {
            return Ok((status, known.map(|record| (*record).clone())));
        }
        let record = self.record(path)?;
        self.listings.learn(&status, record.clone());
        Ok((status, record))
    }

    fn stat_now(&self, path: &StorePath, fresh: bool) -> io::Result<StoreStat> {
        let path = names::checked(&self.wire, path)?;
        let (status, record) = self.look(path, fresh).map_err(|why| self.wire.report(path, why))?;
        Ok(record::stat_of(&status, record.as_ref(), &self.people))
    }

    fn xattrs_of(&self, path: &str) -> std::result::Result<Xattrs, Failure> {
        let answer = self.wire.ask(&Ask::get("GETXATTRS", path).with("encoding", "hex"))?;
        let parsed = answers::parse::<answers::Attributes>(&answer)?;
        let ours = parsed.list.into_iter().filter(|one| one.name.starts_with("user.") && one.name != record::NAME);
        let pairs = ours.map(|one| {
            let value = bytes_of(one.value.as_deref()).ok_or_else(|| Failure::garbled("a value is not bytes"))?;
            Ok((one.name.into_bytes().into(), value.into()))
        });
        pairs.collect()
    }

    fn remote(&self, status: &Status, record: Option<&Record>) -> remote::Inode {
        let identity = record::stat_of(status, record, &self.people).identity;
        let checksum = record::checksum_of(status, record);
        remote::Inode { wire: self.wire.clone(), identity, checksum, timeout: self.timeout }
    }
}

/// Path of an inode, wherever it is.
fn inode(number: u64) -> String {
    format!("/.reserved/.inodes/{number}")
}

fn bytes_of(value: Option<&str>) -> Option<Vec<u8>> {
    value.map_or(Some(Vec::new()), |text| answers::from_hexadecimal(text.strip_prefix("0x")?))
}

impl Store for WebHdfs {
    fn describe(&self) -> String {
        self.wire.place.to_string()
    }

    fn features(&self) -> Features {
        Features {
            plain_files: false,
            hard_links: false,
            directories: true,
            atomic_renames: true,
            publications_at_once: PUBLICATIONS_AT_ONCE,
        }
    }

    fn may_hold(&self, path: &StorePath) -> io::Result<()> {
        names::checked(&self.wire, path).map(drop)
    }

    fn stat(&self, _who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        self.stat_now(path, true)
    }

    fn glance(&self, _who: Cred, path: &StorePath) -> io::Result<StoreStat> {
        match self.listings.known(path) {
            Some(known) => known.ok_or_else(|| Errno::NOENT.into()),
            None => retry_within(self.timeout, || self.stat_now(path, false)),
        }
    }

    fn list(&self, _who: Cred, path: &StorePath, temporaries: bool) -> io::Result<Vec<StoreEntry>> {
        retry_within(self.timeout, || self.entries(path, temporaries))
    }

    fn read_link(&self, _who: Cred, path: &StorePath) -> io::Result<Box<[u8]>> {
        let name = names::checked(&self.wire, path)?;
        let (status, record) =
            retry_within(self.timeout, || self.look(name, false).map_err(|why| self.wire.report(name, why)))?;
        if record::stat_of(&status, record.as_ref(), &self.people).attr.kind != Kind::Symlink {
            return Err(Errno::INVAL.into());
        }
        let mut target = vec![0; usize::try_from(status.length).map_err(io::Error::other)?];
        super::Remote::read_at(&self.remote(&status, record.as_ref()), &mut target, 0)?;
        Ok(target.into())
    }

    fn xattrs(&self, _who: Cred, path: &StorePath) -> io::Result<Xattrs> {
        let name = names::checked(&self.wire, path)?;
        self.xattrs_of(name).map_err(|why| self.wire.report(name, why))
    }

    fn space(&self, _path: &StorePath) -> io::Result<Space> {
        let parsed = self.wire.ask(&Ask::get("GETSTATUS", "/"));
        let space = match parsed.and_then(|answer| answers::parse::<answers::OneSpace>(&answer)) {
            Ok(parsed) => parsed.space,
            Err(why) if why.again => return Err(self.wire.report("", why)),
            // Older than 3.4.
            Err(_) => answers::FsSpace { remaining: SPACE_BYTES, capacity: SPACE_BYTES },
        };
        Ok(Space {
            total_bytes: space.capacity,
            free_bytes: space.remaining,
            available_bytes: space.remaining,
            inodes_total: SPACE_BYTES,
            inodes_free: SPACE_BYTES,
            name_bytes_max: NAME_BYTES_MAX as u32,
            block_bytes: 1 << 20,
        })
    }

    fn may_write_dir(&self, _who: Cred, path: &StorePath) -> io::Result<()> {
        let name = names::checked(&self.wire, path)?;
        let ask = Ask::get("CHECKACCESS", name).with("fsaction", "-wx");
        self.wire.ask(&ask).map(drop).map_err(|why| self.wire.report(name, why))
    }

    fn open(&self, _who: Cred, _path: &StorePath, _write: bool) -> io::Result<File> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn source(&self, _who: Cred, path: &StorePath) -> io::Result<Source> {
        let name = names::checked(&self.wire, path)?;
        let (status, record) =
            retry_within(self.timeout, || self.look(name, false).map_err(|why| self.wire.report(name, why)))?;
        match record::stat_of(&status, record.as_ref(), &self.people).attr.kind {
            Kind::File => Ok(Source::Remote(Arc::new(self.remote(&status, record.as_ref())))),
            Kind::Symlink => Err(Errno::LOOP.into()),
            Kind::Directory => Err(Errno::ISDIR.into()),
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
        self.may_hold(bound)?;
        self.stage_content(path, source, meta, gate)
    }

    fn stage_in_place(&self, _: Cred, _: &StorePath, _: &Meta, _: Gate<'_>) -> io::Result<Staged> {
        Err(Errno::OPNOTSUPP.into())
    }

    fn stage_dir(&self, _who: Cred, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        self.stage_directory(path, meta)
    }

    fn stage_symlink(&self, _who: Cred, path: &StorePath, target: &[u8], meta: &Meta) -> io::Result<Staged> {
        self.stage_other(path, Kind::Symlink, 0, target, meta)
    }

    fn stage_node(&self, _who: Cred, path: &StorePath, kind: Kind, device: u64, meta: &Meta) -> io::Result<Staged> {
        self.stage_other(path, kind, device, b"", meta)
    }

    /// What the datanodes have confirmed they keep; no request forces it to their disks.
    fn settle(&self, _who: Cred, paths: &[StorePath]) -> io::Result<()> {
        for path in paths {
            if !locked(&self.staged).contains_key(path) {
                let name = names::checked(&self.wire, path)?;
                self.status(name).map_err(|why| self.wire.report(name, why))?;
            }
        }
        Ok(())
    }

    fn verify(&self, _: Cred, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        self.compare(path, staged, how, gate)
    }

    fn refresh(&self) {
        self.listings.forget_all();
    }

    fn discard(&self, _who: Cred, path: &StorePath) -> io::Result<()> {
        self.throw_away(path)
    }

    fn check(&self, _who: Cred, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        self.is_as_expected(path, expect)
    }

    fn publish(&self, _who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(temporary, path, meta)
    }

    /// Without hard links the two are the same.
    fn replace(&self, _who: Cred, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        self.bring(temporary, path, meta)
    }

    fn rename(&self, _who: Cred, from: &StorePath, to: &StorePath) -> io::Result<()> {
        self.move_name(from, to)
    }

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
        self.remove_directory(path)
    }

    fn set_meta(&self, _who: Cred, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        self.change(path, kind, meta)
    }

    /// The namenode writes a change to its journal before it answers.
    fn sync_dirs(&self, _who: Cred, _paths: &[StorePath]) -> io::Result<()> {
        Ok(())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
