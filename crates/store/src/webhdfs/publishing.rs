//! Publishing: one rename makes a complete copy visible under its name; and changes of attributes.
//!
//! The verified inode is renamed, by its number: whatever has the temporary's name by then stays there.

use std::io;

use super::answers::Status;
use super::failure::Failure;
use super::names::checked;
use super::record::{self, Record, stat_of};
use super::staging::{Copy, attributes_in};
use super::wire::Ask;
use super::{WebHdfs, inode, locked};
use crate::{Expect, Meta, StorePath};
use surgetank_types::error::Errno;
use surgetank_types::model::{Kind, StoreIdentity};

impl WebHdfs {
    pub(super) fn is_as_expected(&self, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        let name = checked(&self.wire, path)?;
        locked(&self.absent).remove(path);
        let is = match self.look(name, false) {
            Ok((status, record)) => stat_of(&status, record.as_ref(), &self.people),
            Err(why) if why.is(Errno::NOENT) => {
                let absent = matches!(expect, Expect::Absent | Expect::Unknown);
                if absent {
                    locked(&self.absent).insert(path.clone());
                }
                return Ok(absent);
            }
            Err(why) => return Err(self.wire.report(name, why)),
        };
        Ok(match expect {
            Expect::Absent | Expect::Unknown => false,
            Expect::Inode(known) => is.identity.ino == *known,
            Expect::Identity(known) => is.attr.kind == Kind::Directory || is.identity == *known,
            Expect::Linked(known) => StoreIdentity { ctime_nanos: known.ctime_nanos, ..is.identity } == *known,
        })
    }

    pub(super) fn bring(&self, temporary: &StorePath, path: &StorePath, meta: &Meta) -> io::Result<StoreIdentity> {
        crash_point!("store.publish");
        let (from, to) = (checked(&self.wire, temporary)?, checked(&self.wire, path)?);
        let free = locked(&self.absent).remove(path);
        let staged = locked(&self.staged).get(temporary).cloned();
        let brought = self.brought(staged, from, to, free, meta);
        crash_point!("store.published");
        self.listings.forget(&path.parent());
        self.listings.forget(path);
        match brought {
            Ok(identity) => {
                locked(&self.staged).remove(temporary);
                Ok(identity)
            }
            // Another client was first: to be looked at again.
            Err(why) if why.is(Errno::EXIST) => Err(io::Error::new(io::ErrorKind::WouldBlock, why.to_string())),
            Err(why) => Err(self.wire.report(to, why)),
        }
    }

    fn brought(
        &self,
        staged: Option<Copy>,
        from: &str,
        to: &str,
        free: bool,
        meta: &Meta,
    ) -> Result<StoreIdentity, Failure> {
        let copy = match staged {
            Some(copy) => copy,
            None => self.left(from)?,
        };
        let number = copy.identity.ino;
        let source = inode(number);
        let copy = self.finished(copy, &source, meta)?;
        let arrived = |copy: &Copy| {
            self.listings.learn(&copy.status, Some(copy.record.clone()));
            Ok(copy.identity)
        };
        match self.rename_inode(&source, to, false) {
            Ok(()) => return arrived(&copy),
            Err(why) if why.is(Errno::EXIST) => {}
            Err(why) => return Err(why),
        }
        let (there, there_record) = self.look(to, false)?;
        if there.file_id == number {
            // An answer was lost.
            return arrived(&copy);
        }
        if free {
            return Err(Failure::ours(Errno::EXIST, "another client has put something there meanwhile"));
        }
        match (there.is_dir(), copy.kind == Kind::Directory) {
            (true, false) => return Err(Failure::ours(Errno::ISDIR, "a directory has the name")),
            (false, true) => return Err(Failure::ours(Errno::NOTDIR, "a file has the name")),
            (true, true) => return self.joined(from, to, &there, there_record.as_ref(), meta),
            (false, false) => {}
        }
        let kind = stat_of(&there, there_record.as_ref(), &self.people).attr.kind;
        if meta.xattrs.is_none() && kind == Kind::File && copy.kind == Kind::File {
            let kept = self.xattrs_of(to)?;
            let kept = attributes_in(&kept).map_err(Failure::of_source)?;
            self.writable(&source, &copy.status, |path| {
                kept.iter().try_for_each(|(name, value)| self.give(path, name, value))
            })?;
        }
        crash_point!("store.replace");
        match self.rename_inode(&source, to, true) {
            Err(why) if why.unsure && self.status(to)?.file_id == number => arrived(&copy),
            Err(why) => Err(why),
            Ok(()) => arrived(&copy),
        }
    }

    /// A copy that an agent staged before it died.
    fn left(&self, from: &str) -> Result<Copy, Failure> {
        let (status, record) = self.look(from, true)?;
        let stat = stat_of(&status, record.as_ref(), &self.people);
        let (kind, identity, perm) = (stat.attr.kind, stat.identity, status.perm());
        let record = record.ok_or_else(|| Failure::ours(Errno::NOENT, "the copy was not finished"))?;
        Ok(Copy { kind, identity, perm, status, record, sum: None })
    }

    /// Sets the times again, which staging inside a directory has changed; and the mode last.
    fn finished(&self, mut copy: Copy, path: &str, meta: &Meta) -> Result<Copy, Failure> {
        if copy.kind == Kind::Directory && meta.times.is_some() {
            copy.status = self.dress(path, copy.status, &copy.record, true)?;
        }
        let perm = record::native_perm(copy.kind, meta.perm);
        if copy.perm != perm {
            self.set_perm(path, perm)?;
            copy.perm = perm;
            copy.status.permission = format!("{perm:o}");
        }
        Ok(copy)
    }

    pub(super) fn set_perm(&self, path: &str, perm: u32) -> Result<(), Failure> {
        self.wire.ask(&Ask::put("SETPERMISSION", path).with("permission", format!("{perm:o}"))).map(drop)
    }

    /// Makes the file writable for its owner: only then can its attributes change.
    fn writable(
        &self,
        path: &str,
        status: &Status,
        act: impl FnOnce(&str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let perm = status.perm();
        if perm & 0o600 == 0o600 {
            return act(path);
        }
        self.set_perm(path, perm | 0o600)?;
        let done = act(path);
        let back = self.set_perm(path, perm);
        done.and(back)
    }

    /// The directory exists already: the staged one is dropped if it is empty.
    fn joined(
        &self,
        from: &str,
        to: &str,
        there: &Status,
        record: Option<&Record>,
        meta: &Meta,
    ) -> Result<StoreIdentity, Failure> {
        self.delete(from, false)?;
        let present = stat_of(there, record, &self.people);
        if present.attr.uid == meta.uid {
            let meta = Meta { uid: present.attr.uid, gid: present.attr.gid, xattrs: None, ..meta.clone() };
            return self.changed(to, Kind::Directory, &meta);
        }
        Ok(present.identity)
    }

    pub(super) fn change(&self, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        crash_point!("store.set_meta");
        let name = checked(&self.wire, path)?;
        let changed = self.changed(name, kind, meta);
        self.listings.forget(&path.parent());
        changed.map_err(|why| self.wire.report(name, why))
    }

    fn changed(&self, name: &str, kind: Kind, meta: &Meta) -> Result<StoreIdentity, Failure> {
        let (status, before) = self.look(name, true)?;
        let present = stat_of(&status, before.as_ref(), &self.people);
        if present.attr.kind != kind {
            return Err(Failure::ours(Errno::NOENT, "another file has the name"));
        }
        let path = inode(status.file_id);
        let record = Record::changed(&present, before.as_ref(), &status.owner, meta);
        let (had, wanted) = match &meta.xattrs {
            Some(wanted) => (self.xattrs_of(&path)?, attributes_in(wanted).map_err(Failure::of_source)?),
            None => Default::default(),
        };
        let had = attributes_in(&had).map_err(Failure::of_source)?;
        let perm = record::native_perm(kind, meta.perm);
        let times = (record::millis(record.mtime_nanos), record::millis(record.atime_nanos));
        let retimed = meta.times.is_some() && times != (status.modification_time, status.access_time);
        let redressed = before.as_ref() != Some(&record);
        if !redressed && !retimed && perm == status.perm() && had == wanted {
            return Ok(present.identity);
        }
        if status.perm() & 0o600 != 0o600 {
            self.set_perm(&path, status.perm() | 0o600)?;
        }
        for (name, value) in wanted.iter().filter(|pair| !had.contains(pair)) {
            self.give(&path, name, value)?;
        }
        for (name, _) in had.iter().filter(|(name, _)| wanted.iter().all(|(kept, _)| kept != name)) {
            match self.wire.ask(&Ask::put("REMOVEXATTR", path.as_str()).with("xattr.name", name.as_str())) {
                Err(why) if !why.is(Errno::NODATA) => return Err(why),
                _ => {}
            }
        }
        let status = self.dress(&path, status, &record, meta.times.is_some())?;
        if perm != status.perm() || status.perm() & 0o600 != 0o600 {
            self.set_perm(&path, perm)?;
        }
        let identity = stat_of(&status, Some(&record), &self.people).identity;
        self.listings.learn(&status, Some(record));
        Ok(identity)
    }
}
