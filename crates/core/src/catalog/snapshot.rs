//! The snapshot: the content of closed segments, in one redb file.
//!
//! It is opened for each use and closed again: between folds it takes neither memory nor descriptors. It appears under
//! its name only when complete (temporary name, then rename). It changes only by durable transactions, each of which
//! also records up to which position it holds the log.
//!
//! The danger that it avoids: a segment is deleted before its content is durable elsewhere.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{Builder, Database, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition};
use serde::de::DeserializeOwned;

use super::digest::{Digest, KEEP_A_COPY, Span};
use super::directory::{DATA_IS_SAFE, TEMPORARY_EXTENSION, other_format};
use super::{Loaded, Lsn};
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{FileId, Hinted, Mark, Seq};

const FORMAT: u64 = 5;
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const FILES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("files");
const ENTRIES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("entries");
const OPS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("ops");
const MARKS: TableDefinition<'_, &[u8], u64> = TableDefinition::new("marks");
const HINTS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("hints");
const LOST: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("lost");

pub(super) struct Snapshot {
    path: PathBuf,
    cache_bytes: usize,
}

impl Snapshot {
    pub fn new(dir: &Path, cache_bytes: usize) -> Self {
        Self { path: dir.join("snapshot.redb"), cache_bytes }
    }

    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    pub fn delete(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Up to which position it holds the log; 0 when there is none. Every page is compared with its checksum. Otherwise
    /// the catalog would believe a flipped bit indefinitely, and the next fold would give it a valid checksum.
    pub fn folded(&self) -> Result<Lsn> {
        if !self.exists() {
            return Ok(Lsn(0));
        }
        let whole = self.builder().set_check_integrity_on_open(true).open(&self.path).map_err(redb::Error::from);
        whole.map_err(|error| self.failed("read", error)).and_then(|database| self.folded_in(&database))
    }

    pub fn folded_in(&self, database: &Database) -> Result<Lsn> {
        let read = || -> Result<(u64, u64), redb::Error> {
            let meta = database.begin_read()?.open_table(META)?;
            let number = |name| Ok::<_, redb::Error>(meta.get(name)?.map_or(0, |value| value.value()));
            Ok((number("format")?, number("folded")?))
        };
        match read().map_err(|error| self.failed("read", error))? {
            (FORMAT, folded) => Ok(Lsn(folded)),
            (format, _) => Err(other_format("snapshot", &self.path, format, FORMAT)),
        }
    }

    /// A copy in memory, for a reader that changes nothing: redb writes into what it opens.
    pub fn look(&self) -> Result<Database> {
        let copy = || -> Result<Database, redb::Error> {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let mut memory =
                File::from(rustix::fs::memfd_create("surgetank-snapshot", flags).map_err(io::Error::from)?);
            io::copy(&mut File::open(&self.path)?, &mut memory)?;
            Ok(self.builder().set_check_integrity_on_open(true).create_with_backend(FileBackend::new(memory)?)?)
        };
        copy().map_err(|error| self.failed("read", error))
    }

    /// Takes `digest` over durably: onto the snapshot's content, or onto nothing when `afresh`; it ends at `last`.
    pub fn fold(&self, digest: &Digest, last: Lsn, afresh: bool) -> Result<()> {
        let folded = if afresh {
            let temporary = self.path.with_extension(TEMPORARY_EXTENSION);
            self.make(&temporary, digest, last).inspect_err(|_| {
                // Half a snapshot would only fill a full disk further.
                let _ = std::fs::remove_file(&temporary);
            })
        } else {
            self.open().and_then(|database| apply(&database, digest, last))
        };
        folded.map_err(|error| self.failed("written", error))
    }

    fn make(&self, temporary: &Path, digest: &Digest, last: Lsn) -> Result<(), redb::Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let file = FileBackend::new(options.mode(0o600).open(temporary)?)?;
        apply(&self.builder().create_with_backend(file)?, digest, last)?;
        crash_point!("catalog.snapshot_made");
        std::fs::rename(temporary, &self.path)?;
        crash_point!("catalog.snapshot_named");
        if let Some(dir) = self.path.parent() {
            File::open(dir)?.sync_all()?;
        }
        Ok(())
    }

    /// Returns all that it holds (nothing unless `counts`) with `digest` laid over it, in the order that
    /// [`super::Catalog::load_into`] promises.
    pub fn for_each(&self, digest: &Digest, counts: bool, take: Take<'_>) -> Result<()> {
        let open = || self.open().map_err(|error| self.failed("read", error));
        let database = if counts { Some(open()?) } else { None };
        self.for_each_in(database.as_ref(), digest, take)
    }

    pub fn for_each_in(&self, below: Option<&Database>, digest: &Digest, take: Take<'_>) -> Result<()> {
        let mut read = || -> Result<(), redb::Error> {
            let below = below.map(ReadableDatabase::begin_read).transpose()?;
            files(below.as_ref(), digest, take)?;
            entries(below.as_ref(), digest, take)?;
            ops_and_marks(below.as_ref(), digest, take)?;
            hints(below.as_ref(), digest, take)?;
            lost(below.as_ref(), digest, take)
        };
        read().map_err(|error| self.failed("read", error))
    }

    fn builder(&self) -> Builder {
        let mut builder = Builder::new();
        builder.set_cache_size(self.cache_bytes);
        builder
    }

    fn open(&self) -> Result<Database, redb::Error> {
        Ok(self.builder().open(&self.path)?)
    }

    fn failed(&self, verb: &str, error: redb::Error) -> Error {
        if let redb::Error::Corrupted(why) = error {
            return Error::new(format!("The catalog snapshot {} is damaged", self.path.display()))
                .why(why)
                .remedy(KEEP_A_COPY)
                .data(DATA_IS_SAFE);
        }
        Error::new(format!("The catalog snapshot {} cannot be {verb}", self.path.display()))
            .why(error)
            .remedy("look at the disk that holds the catalog: is it full, read-only or failing?")
            .data(DATA_IS_SAFE)
    }
}

/// One durable transaction. With quick repair the next start after a kill does not walk the whole file.
fn apply(database: &Database, digest: &Digest, last: Lsn) -> Result<(), redb::Error> {
    let mut write = database.begin_write()?;
    write.set_quick_repair(true);
    {
        let mut buffer = Vec::new();
        let mut files = write.open_table(FILES)?;
        for (id, span) in &digest.files {
            match span {
                Some(span) => {
                    digest.fetch(*span, &mut buffer)?;
                    files.insert(id.0, &*buffer)?;
                }
                None => drop(files.remove(id.0)?),
            }
        }
        let mut entries = write.open_table(ENTRIES)?;
        let mut key = Vec::new();
        for ((dir, name), record) in &digest.entries {
            key.clear();
            key.extend_from_slice(&dir.0.to_be_bytes());
            key.extend_from_slice(name);
            match record {
                Some(record) => drop(entries.insert(&*key, &*bytes(record)?)?),
                None => drop(entries.remove(&*key)?),
            }
        }
        let mut ops = write.open_table(OPS)?;
        for (seq, record) in &digest.ops {
            match record {
                Some(record) => drop(ops.insert(seq.number(), &*bytes(record)?)?),
                None => drop(ops.remove(seq.number())?),
            }
        }
        let mut marks = write.open_table(MARKS)?;
        for (mark, number) in &digest.marks {
            marks.insert(&*bytes(mark)?, number)?;
        }
        let mut hints = write.open_table(HINTS)?;
        for (of, record) in &digest.hints {
            let key = bytes(of)?;
            match record {
                Some(record) => drop(hints.insert(&*key, &*bytes(record)?)?),
                None => drop(hints.remove(&*key)?),
            }
        }
        let mut lost = write.open_table(LOST)?;
        for (path, record) in &digest.lost {
            match record {
                Some(record) => drop(lost.insert(&**path, &*bytes(record)?)?),
                None => drop(lost.remove(&**path)?),
            }
        }
        let mut meta = write.open_table(META)?;
        meta.insert("format", FORMAT)?;
        meta.insert("folded", last.0)?;
    }
    write.commit()?;
    Ok(())
}

type Take<'a> = &'a mut dyn FnMut(Loaded);

fn files(below: Option<&ReadTransaction>, digest: &Digest, take: Take<'_>) -> Result<(), redb::Error> {
    let mut buffer = Vec::new();
    let mut over = digest.files.iter().peekable();
    let mut put_over = |id: FileId, span: Option<Span>, take: Take<'_>| -> Result<(), redb::Error> {
        if let Some(span) = span {
            digest.fetch(span, &mut buffer)?;
            take(Loaded::File(id, value("file", &buffer)?));
        }
        Ok(())
    };
    if let Some(table) = below.map(|below| below.open_table(FILES)).transpose()? {
        for row in table.iter()? {
            let (key, bytes) = row?;
            let id = FileId(key.value());
            while let Some((&first, &span)) = over.next_if(|(first, _)| **first < id) {
                put_over(first, span, take)?;
            }
            match over.next_if(|(first, _)| **first == id) {
                Some((_, &span)) => put_over(id, span, take)?,
                None => take(Loaded::File(id, value("file", bytes.value())?)),
            }
        }
    }
    over.try_for_each(|(&id, &span)| put_over(id, span, take))
}

fn entries(below: Option<&ReadTransaction>, digest: &Digest, take: Take<'_>) -> Result<(), redb::Error> {
    let mut over = digest.entries.iter().peekable();
    let put_over = |(dir, name): &(FileId, Box<[u8]>), record: Option<_>, take: Take<'_>| {
        if let Some(record) = record {
            take(Loaded::Entry(*dir, name.clone(), record));
        }
    };
    if let Some(table) = below.map(|below| below.open_table(ENTRIES)).transpose()? {
        for row in table.iter()? {
            let (key, bytes) = row?;
            let (dir, name) = entry_of(key.value())?;
            let order = |first: &(FileId, Box<[u8]>)| (first.0, &*first.1).cmp(&(dir, name));
            while let Some((first, &record)) = over.next_if(|(first, _)| order(first).is_lt()) {
                put_over(first, record, take);
            }
            match over.next_if(|(first, _)| order(first).is_eq()) {
                Some((first, &record)) => put_over(first, record, take),
                None => take(Loaded::Entry(dir, name.into(), value("entry", bytes.value())?)),
            }
        }
    }
    over.for_each(|(first, &record)| put_over(first, record, take));
    Ok(())
}

/// Operations in progress and marks are few: merged in memory.
fn ops_and_marks(below: Option<&ReadTransaction>, digest: &Digest, take: Take<'_>) -> Result<(), redb::Error> {
    let mut ops = BTreeMap::new();
    let mut marks = BTreeMap::new();
    if let Some(below) = below {
        for row in below.open_table(OPS)?.iter()? {
            let (key, bytes) = row?;
            ops.insert(Seq::new(key.value()), Some(value("operation", bytes.value())?));
        }
        for row in below.open_table(MARKS)?.iter()? {
            let (key, number) = row?;
            marks.insert(value::<Mark>("mark", key.value())?, number.value());
        }
    }
    ops.extend(digest.ops.iter().map(|(seq, record)| (*seq, record.clone())));
    marks.extend(digest.marks.iter().map(|(mark, number)| (mark.clone(), *number)));
    for (seq, record) in ops {
        if let Some(record) = record {
            take(Loaded::Op(seq, record));
        }
    }
    marks.into_iter().for_each(|(mark, number)| take(Loaded::Mark(mark, number)));
    Ok(())
}

fn hints(below: Option<&ReadTransaction>, digest: &Digest, take: Take<'_>) -> Result<(), redb::Error> {
    let mut hints = BTreeMap::new();
    if let Some(below) = below {
        for row in below.open_table(HINTS)?.iter()? {
            let (key, bytes) = row?;
            hints.insert(value::<Hinted>("hint", key.value())?, Some(value("hint", bytes.value())?));
        }
    }
    hints.extend(digest.hints.iter().map(|(of, record)| (of.clone(), record.clone())));
    for (of, record) in hints {
        if let Some(record) = record {
            take(Loaded::Hints(of, record));
        }
    }
    Ok(())
}

fn lost(below: Option<&ReadTransaction>, digest: &Digest, take: Take<'_>) -> Result<(), redb::Error> {
    let mut lost = BTreeMap::new();
    if let Some(below) = below {
        for row in below.open_table(LOST)?.iter()? {
            let (key, bytes) = row?;
            lost.insert(Box::from(key.value()), Some(value("lost file", bytes.value())?));
        }
    }
    lost.extend(digest.lost.iter().map(|(path, record)| (path.clone(), record.clone())));
    for (path, record) in lost {
        if let Some(record) = record {
            take(Loaded::Lost(path, record));
        }
    }
    Ok(())
}

fn entry_of(key: &[u8]) -> Result<(FileId, &[u8]), redb::Error> {
    let (dir, name) =
        key.split_first_chunk().ok_or_else(|| redb::Error::Corrupted("an entry's key is short".into()))?;
    Ok((FileId(u64::from_be_bytes(*dir)), name))
}

fn bytes<T: serde::Serialize>(record: &T) -> Result<Vec<u8>, redb::Error> {
    postcard::to_stdvec(record).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

fn value<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, redb::Error> {
    postcard::from_bytes(bytes).map_err(|error| redb::Error::Corrupted(format!("the record of a {what}: {error}")))
}
