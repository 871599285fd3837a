//! Staging: a complete copy beside its destination, with all its attributes except a part of its mode.
//!
//! A file that its owner must not write accepts no attributes and cannot be read back, so a temporary has the necessary bits
//! until it is published.
//!
//! The dangers that it avoids: bytes that differ from those that were summed (HDFS's checksum is compared, or the bytes are
//! read back); a temporary that is made after it was discarded (by the datanode, when it gets to the request).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use percent_encoding::utf8_percent_encode;

use super::answers::{OneDigest, Status, hexadecimal, parse};
use super::digest::{Digesting, Sum};
use super::failure::Failure;
use super::names::checked;
use super::record::{self, Record, stat_of};
use super::wire::Ask;
use super::{ServerDefaults, WebHdfs, inode, locked};
use crate::checksum::Checksum;
use crate::http::IN_QUERY;
use crate::object::Body;
use crate::{Gate, Meta, Source, Staged, StorePath, Verify};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity, Xattrs};
use surgetank_types::sync::{Arc, Mutex};

/// Number of looks for a temporary that was discarded, with pauses between them.
const LOOKS: u32 = 10;
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Longest value that the namenode accepts in a URL, with everything around it.
const VALUE_CHARS_MAX: usize = 60 << 10;

/// Staged, and waiting to be published.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    pub kind: Kind,
    pub identity: StoreIdentity,
    /// The mode that HDFS has now.
    pub perm: u32,
    pub status: Status,
    pub record: Record,
    pub sum: Option<Sum>,
}

/// A file that is being sent, summed on the way.
struct Sending<'a> {
    file: &'a File,
    len: u64,
    gate: Gate<'a>,
    defaults: Option<ServerDefaults>,
    sums: Mutex<Sums>,
}

struct Sums {
    own: Checksum,
    theirs: Option<Digesting>,
}

impl Sums {
    fn new(defaults: Option<&ServerDefaults>) -> Self {
        Self { own: Checksum::default(), theirs: defaults.and_then(Digesting::new) }
    }
}

impl Body for Sending<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let mut sums = locked(&self.sums);
        if offset == 0 {
            // Possibly not the first time.
            *sums = Sums::new(self.defaults.as_ref());
        }
        if buffer.is_empty() {
            return Ok(());
        }
        self.file.read_exact_at(buffer, offset)?;
        sums.own.bytes(buffer);
        if let Some(theirs) = &mut sums.theirs {
            theirs.bytes(buffer);
        }
        drop(sums);
        (self.gate)(buffer.len() as u64)
    }
}

impl WebHdfs {
    /// Errors: EEXIST, because the path may be another program's.
    fn temporary<'a>(&self, path: &'a StorePath) -> io::Result<&'a str> {
        if !path.is_temporary() && !path.is_part() {
            return Err(Errno::EXIST.into());
        }
        checked(&self.wire, path)
    }

    pub(super) fn stage_content(
        &self,
        path: &StorePath,
        source: &File,
        meta: &Meta,
        gate: Gate<'_>,
    ) -> io::Result<Staged> {
        let name = self.temporary(path)?;
        let attributes = attributes_of(meta)?;
        let len = source.metadata()?.len();
        let defaults = self.defaults();
        let sums = Mutex::new(Sums::new(defaults.as_ref()));
        let sending = Sending { file: source, len, gate, defaults, sums };
        let perm = record::native_perm(Kind::File, meta.perm) | 0o600;
        self.create(name, perm, &sending).map_err(|why| self.wire.report(name, why))?;
        crash_point!("store.copied");
        let Sums { own, theirs } = std::mem::replace(&mut *locked(&sending.sums), Sums::new(None));
        let (sum, theirs) = (own.value(), theirs.filter(|_| len > 0).map(Digesting::sum));
        let copy = self.dressed(name, Kind::File, 0, meta, &attributes, Some(sum)).and_then(|copy| {
            let short = copy.status.length != len;
            if short { Err(Failure::garbled("the copy has another length")) } else { Ok(Copy { sum: theirs, ..copy }) }
        });
        crash_point!("store.staged");
        self.keep(path, name, copy).map(|identity| Staged { identity, checksum: sum })
    }

    pub(super) fn stage_other(
        &self,
        path: &StorePath,
        kind: Kind,
        device: u64,
        bytes: &[u8],
        meta: &Meta,
    ) -> io::Result<Staged> {
        let name = self.temporary(path)?;
        let attributes = attributes_of(meta)?;
        self.create(name, record::OTHER_PERM, &bytes).map_err(|why| self.wire.report(name, why))?;
        let copy = self.dressed(name, kind, device, meta, &attributes, None);
        self.keep(path, name, copy).map(|identity| Staged { identity, checksum: 0 })
    }

    pub(super) fn stage_directory(&self, path: &StorePath, meta: &Meta) -> io::Result<Staged> {
        crash_point!("store.stage_dir");
        let name = self.temporary(path)?;
        let attributes = attributes_of(meta)?;
        let perm = record::native_perm(Kind::Directory, meta.perm) | 0o700;
        let make = || {
            // The request would also make missing parents: a directory that another client removed must not return.
            let parent = name.rsplit_once('/').map_or("", |(parent, _)| parent);
            if !self.status(parent)?.is_dir() {
                return Err(Failure::ours(Errno::NOTDIR, "the parent is not a directory"));
            }
            self.wire.ask(&Ask::put("MKDIRS", name).with("permission", format!("{perm:o}")))?;
            let made = self.status(name)?;
            if made.children_num > 0 { Err(Failure::ours(Errno::EXIST, "it holds something")) } else { Ok(()) }
        };
        let made = match make() {
            // A leftover of an earlier agent is removed.
            Err(why) if why.is(Errno::EXIST) => self.delete(name, true).and_then(|_| make()),
            made => made,
        };
        made.map_err(|why| self.wire.report(name, why))?;
        let copy = self.dressed(name, Kind::Directory, 0, meta, &attributes, None);
        self.keep(path, name, copy).map(|identity| Staged { identity, checksum: 0 })
    }

    fn keep(&self, path: &StorePath, name: &str, copy: Result<Copy, Failure>) -> io::Result<StoreIdentity> {
        match copy {
            Ok(copy) => {
                let identity = copy.identity;
                locked(&self.staged).insert(path.clone(), copy);
                Ok(identity)
            }
            Err(why) => {
                // The first error counts; a leftover is hidden, and replaced next time.
                drop(self.delete(name, true));
                Err(self.wire.report(name, why))
            }
        }
    }

    fn create(&self, name: &str, perm: u32, body: &dyn Body) -> Result<(), Failure> {
        let mut ask = Ask::put("CREATE", name)
            .with("overwrite", "true")
            .with("createparent", "false")
            .with("permission", format!("{perm:o}"));
        if let Some(defaults) = self.defaults() {
            ask = ask.with("blocksize", defaults.block_size.to_string());
        }
        let send = || self.wire.content(&ask, Some(body), |answer| answer.text().map(drop));
        let sent = match send() {
            // A directory of an earlier agent.
            Err(why) if why.is(Errno::EXIST) || why.is(Errno::ISDIR) => self.delete(name, true).and_then(|_| send()),
            sent => sent,
        };
        if let Err(why) = &sent
            && (why.source.is_some() || why.unsure)
        {
            self.give_up(name);
        }
        sent
    }

    /// Discards a temporary. A datanode may have begun it, or may begin it later.
    fn give_up(&self, name: &str) {
        for _ in 0..LOOKS {
            match self.wire.ask(&Ask::delete(name).with("recursive", "true").once()) {
                Ok(answer) if parse::<super::answers::Truth>(&answer).is_ok_and(|gone| !gone.boolean) => {}
                _ => return,
            }
            surgetank_types::sync::thread::sleep(LOOK_PAUSE);
        }
    }

    /// With its attributes, times and record.
    fn dressed(
        &self,
        name: &str,
        kind: Kind,
        device: u64,
        meta: &Meta,
        attributes: &[(String, String)],
        crc64nvme: Option<u64>,
    ) -> Result<Copy, Failure> {
        let status = self.status(name)?;
        let mut present = stat_of(&status, None, &self.people);
        (present.attr.kind, present.attr.device) = (kind, device);
        let record = Record { crc64nvme, ..Record::changed(&present, None, &status.owner, meta) };
        let path = inode(status.file_id);
        for (name, value) in attributes {
            self.give(&path, name, value)?;
        }
        let status = self.dress(&path, status, &record, meta.times.is_some())?;
        let identity = stat_of(&status, Some(&record), &self.people).identity;
        Ok(Copy { kind, identity, perm: status.perm(), status, record, sum: None })
    }

    /// Sets the record, and the times as far as HDFS keeps them. Returns what HDFS has afterwards.
    pub(super) fn dress(&self, path: &str, status: Status, record: &Record, times: bool) -> Result<Status, Failure> {
        self.give(path, record::NAME, &hexadecimal(record.text().as_bytes()))?;
        if !times {
            return Ok(status);
        }
        let (modification_time, access_time) = (record::millis(record.mtime_nanos), record::millis(record.atime_nanos));
        self.wire.ask(
            &Ask::put("SETTIMES", path)
                .with("modificationtime", modification_time.to_string())
                .with("accesstime", access_time.to_string()),
        )?;
        Ok(Status { modification_time, access_time, ..status })
    }

    /// `value`: hexadecimal.
    pub(super) fn give(&self, path: &str, name: &str, value: &str) -> Result<(), Failure> {
        let ask = Ask::put("SETXATTR", path).with("xattr.name", name).with("flag", "CREATE,REPLACE");
        let value = if value.is_empty() { String::new() } else { format!("0x{value}") };
        self.wire.ask(&ask.with("xattr.value", value)).map(drop)
    }

    pub(super) fn throw_away(&self, path: &StorePath) -> io::Result<()> {
        crash_point!("store.discard");
        if !path.is_temporary() && !path.is_part() {
            return Err(Errno::INVAL.into());
        }
        let name = checked(&self.wire, path)?;
        locked(&self.staged).retain(|staged, _| staged != path && !staged.is_below(path));
        match self.delete(name, true) {
            Err(why) if why.is(Errno::NOENT) => Ok(()),
            gone => gone.map(drop).map_err(|why| self.wire.report(name, why)),
        }
    }

    pub(super) fn compare(&self, path: &StorePath, staged: &Staged, how: Verify, gate: Gate<'_>) -> io::Result<()> {
        crash_point!("store.verify");
        let name = checked(&self.wire, path)?;
        let different =
            |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{path} in {}: {why}", self.wire.place));
        let (status, record) = self.look(name, false).map_err(|why| self.wire.report(name, why))?;
        if status.file_id != staged.identity.ino {
            return Err(different("the copy was replaced by another file".into()));
        }
        if stat_of(&status, record.as_ref(), &self.people).attr.kind != Kind::File {
            return Ok(());
        }
        if status.length != staged.identity.size_bytes {
            return Err(different(format!("{} bytes instead of {}", status.length, staged.identity.size_bytes)));
        }
        if status.length == 0 {
            return Ok(());
        }
        if how == Verify::Cache {
            let sum = locked(&self.staged).get(path).and_then(|copy| copy.sum.clone());
            // Erasure-coded files have another checksum: they are read back.
            if let Some(sum) = sum
                && let Ok(told) = self.digest(status.file_id)
                && sum.is(&told) == Some(true)
            {
                return Ok(());
            }
        }
        let sum = Source::Remote(Arc::new(self.remote(&status, None))).sum()?;
        gate(status.length)?;
        if sum == staged.checksum {
            Ok(())
        } else {
            Err(different(format!("checksum {sum:016x} instead of {:016x}", staged.checksum)))
        }
    }

    pub(super) fn digest(&self, number: u64) -> Result<super::answers::Digest, Failure> {
        let path = inode(number);
        let ask = Ask::get("GETFILECHECKSUM", path.as_str());
        Ok(parse::<OneDigest>(&self.wire.content(&ask, None, |answer| answer.text())?)?.digest)
    }
}

/// Names and values, encoded for requests. What HDFS cannot keep is refused before anything is sent.
fn attributes_of(meta: &Meta) -> io::Result<Vec<(String, String)>> {
    meta.xattrs.as_ref().map_or(Ok(Vec::new()), attributes_in)
}

pub(super) fn attributes_in(xattrs: &Xattrs) -> io::Result<Vec<(String, String)>> {
    let pair = |name: &[u8], value: &[u8]| {
        let name = std::str::from_utf8(name).map_err(|_| Errno::ILSEQ)?;
        if name == record::NAME {
            return Err(Errno::INVAL.into());
        }
        let chars = utf8_percent_encode(name, IN_QUERY).map(str::len).sum::<usize>();
        if chars + 2 * value.len() > VALUE_CHARS_MAX {
            return Err(Errno::TOOBIG.into());
        }
        Ok((name.to_owned(), hexadecimal(value)))
    };
    xattrs.iter().map(|(name, value)| pair(name, value)).collect()
}
