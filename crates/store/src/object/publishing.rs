//! Publishing: one request makes a complete file visible under its name.
//!
//! The name was looked at before (`check`), or is new: in this case the request carries the condition that the key is absent,
//! and no look is needed. If a condition does not hold, either an answer was lost and this is the own object (its id tells), or
//! another client was first: the next look then asks the server and finds the conflict.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::attributes::{XATTRS, identity_of, reworded, stat_of, too_many, words_of};
use super::keys::{MARK, MARK_TEXT};
use super::staging::{Content, Range, Waiting};
use super::{Body, ObjectStore, Objects, Part, When, Words, is_condition_failed, locked};
use crate::{Expect, Meta, StorePath, Turn, Verify};
use surgetank_types::model::{Kind, StoreIdentity};

/// After so many different read-backs the network is not the cause.
const SENT_MAX: u32 = 3;

impl ObjectStore {
    pub(super) fn is_as_expected(&self, path: &StorePath, expect: &Expect) -> io::Result<bool> {
        if matches!(expect, Expect::Absent | Expect::Unknown) {
            // The publication itself has the condition; so has a rename (`move_name`).
            if self.abilities.if_absent && !locked(&self.suspect).remove(path) {
                locked(&self.found).insert(path.clone(), None);
                return Ok(true);
            }
        }
        let there = match self.look(path)? {
            Some(object) => Some(object),
            None => self.server.head(&self.below(path)?)?,
        };
        let Some(object) = there else {
            if matches!(expect, Expect::Absent | Expect::Unknown) {
                if self.has_something(path)? {
                    return Ok(false);
                }
                locked(&self.found).insert(path.clone(), None);
                return Ok(true);
            }
            return Ok(false);
        };
        let stat = stat_of(&object, self.owner);
        let is = stat.identity;
        let as_expected = match expect {
            Expect::Absent | Expect::Unknown => false,
            Expect::Inode(known) => is.ino == *known,
            Expect::Identity(known) => stat.attr.kind == Kind::Directory || is == *known,
            Expect::Linked(known) => StoreIdentity { ctime_nanos: known.ctime_nanos, ..is } == *known,
        };
        if as_expected {
            locked(&self.found).insert(path.clone(), Some((object.etag, object.words.unwrap_or_default())));
        }
        Ok(as_expected)
    }

    /// `turn`: not before it.
    pub(super) fn bring(
        &self,
        temporary: &StorePath,
        path: &StorePath,
        turn: Option<Turn<'_>>,
    ) -> io::Result<StoreIdentity> {
        crash_point!("store.publish");
        let waiting = locked(&self.waiting).get(temporary).cloned().ok_or(Errno::NOENT)?;
        let mut found = locked(&self.found).remove(path);
        if found.is_none() && waiting.keeps_xattrs {
            // No look yet: the attributes of the replaced file stay.
            found = self.look(path)?.map(|object| Some((object.etag, object.words.unwrap_or_default())));
        }
        let etag = match &found {
            None => None,
            Some(None) => self.abilities.if_absent.then_some(None),
            Some(Some((etag, _))) => self.abilities.if_same.then_some(Some(etag.clone())),
        };
        let when = match &etag {
            None => When::Always,
            Some(None) => When::Absent,
            Some(Some(etag)) => When::Is(etag),
        };
        self.marked()?;
        let before = found.as_ref().and_then(|found| found.as_ref()).map(|(_, words)| words);
        let sent = if waiting.kind == Kind::Directory {
            turn.map_or(Ok(()), |turn| turn.wait()).and_then(|()| self.bring_dir(&waiting, path))
        } else {
            self.send(&waiting, path, before, when, turn).and_then(|etag| self.read_back(&waiting, path, before, etag))
        };
        let identity = match sent {
            Ok(etag) => {
                let mtime = waiting.stat().attr.mtime;
                identity_of(waiting.id, waiting.size_bytes, mtime, &etag)
            }
            Err(why) if is_condition_failed(&why) => match self.stat_now(path) {
                Ok(there) if there.identity.ino == waiting.id => there.identity,
                Ok(there) if waiting.kind == Kind::Directory && there.attr.kind == Kind::Directory => there.identity,
                other => {
                    other?;
                    locked(&self.suspect).insert(path.clone());
                    return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
                }
            },
            Err(why) => {
                // Another client has aborted the upload (`gc`, a rule of the bucket).
                let is_gone =
                    why.kind() == io::ErrorKind::NotFound && matches!(waiting.content, Content::Uploaded { .. });
                let why = if is_gone { io::Error::new(io::ErrorKind::InvalidData, why) } else { why };
                // Its bytes do not have the checksum: to be staged again.
                if why.kind() == io::ErrorKind::InvalidData {
                    drop(self.throw_away(temporary));
                }
                // Otherwise it is unknown whether the request was carried out.
                locked(&self.suspect).insert(path.clone());
                self.listings.forget(&path.parent());
                return Err(why);
            }
        };
        crash_point!("store.published");
        self.listings.forget(&path.parent());
        match &waiting.content {
            // Completed under another key: the earlier upload is useless.
            Content::Uploaded { key, .. } if key.as_bytes() != path.0 => drop(self.throw_away(temporary)),
            _ => {
                locked(&self.waiting).remove(temporary);
                self.uploads.forget(temporary);
            }
        }
        Ok(identity)
    }

    /// Reads back for `verify = reread`. What the server did not keep unchanged is sent again.
    fn read_back(
        &self,
        waiting: &Waiting,
        path: &StorePath,
        before: Option<&Words>,
        mut etag: String,
    ) -> io::Result<String> {
        if self.verify != Verify::Reread || waiting.kind != Kind::File {
            return Ok(etag);
        }
        for _ in 0..SENT_MAX {
            let identity = identity_of(waiting.id, waiting.size_bytes, waiting.stat().attr.mtime, &etag);
            let staged = crate::Staged { identity, checksum: waiting.checksum };
            match self.compare(path, &staged, Verify::Reread, &|_| Ok(())) {
                Err(why) if why.kind() == io::ErrorKind::InvalidData => tracing::warn!(%path, %why, "sent again"),
                other => return other.map(|()| etag),
            }
            let when = if self.abilities.if_same { When::Is(&etag) } else { When::Always };
            etag = self.send_whole(waiting, path, before, when, None)?;
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("{path} reads back differently each time")))
    }

    fn send(
        &self,
        waiting: &Waiting,
        path: &StorePath,
        before: Option<&Words>,
        when: When<'_>,
        turn: Option<Turn<'_>>,
    ) -> io::Result<String> {
        match &waiting.content {
            Content::Uploaded { key, upload, parts, .. } if key.as_bytes() == path.0 => {
                turn.map_or(Ok(()), |turn| turn.wait())?;
                self.server.complete(key, upload, parts, waiting.checksum, when)
            }
            // The key has changed since. The earlier upload is removed with its temporary.
            _ => self.send_whole(waiting, path, before, when, turn),
        }
    }

    /// Sends all bytes now.
    fn send_whole(
        &self,
        waiting: &Waiting,
        path: &StorePath,
        before: Option<&Words>,
        when: When<'_>,
        turn: Option<Turn<'_>>,
    ) -> io::Result<String> {
        let key = self.key(path)?;
        let mut words = waiting.words.clone();
        if waiting.keeps_xattrs
            && let Some(kept) = before.and_then(|before| before.get(XATTRS))
        {
            words.insert(XATTRS.to_owned(), kept.clone());
        }
        let put = |body: &dyn Body| match turn {
            Some(turn) if self.abilities.holds_back && !body.is_empty() => {
                self.server.put(key, &InTurn { body, turn }, waiting.checksum, &words, when)
            }
            turn => {
                turn.map_or(Ok(()), |turn| turn.wait())?;
                self.server.put(key, body, waiting.checksum, &words, when)
            }
        };
        match &waiting.content {
            Content::Bytes(bytes) => put(&&**bytes),
            Content::Held(file) => {
                let body = Range { file, start: 0, len: waiting.size_bytes };
                if rustix::fs::fstat(file.as_fd())?.st_size as u64 != waiting.size_bytes {
                    return Err(changed(path));
                }
                put(&body)
            }
            Content::Uploaded { file, parts, .. } => {
                turn.map_or(Ok(()), |turn| turn.wait())?;
                let part_bytes = parts.first().map_or(waiting.size_bytes, |part| part.size_bytes);
                let upload = self.server.begin(key, &words)?;
                let sent = self.send_again((key, &upload), file, waiting.size_bytes, part_bytes);
                sent.and_then(|parts| self.server.complete(key, &upload, &parts, waiting.checksum, when))
                    .inspect_err(|_| drop(self.server.abort(key, &upload)))
            }
        }
    }

    fn send_again(
        &self,
        (key, upload): (&str, &str),
        file: &std::fs::File,
        size_bytes: u64,
        part_bytes: u64,
    ) -> io::Result<Vec<Part>> {
        let starts = (0..size_bytes).step_by(usize::try_from(part_bytes).map_err(io::Error::other)?);
        (1..)
            .zip(starts)
            .map(|(number, start)| {
                let body = Range { file, start, len: part_bytes.min(size_bytes - start) };
                self.server.part(key, upload, number, &body, body.sum()?)
            })
            .collect()
    }

    fn bring_dir(&self, waiting: &Waiting, path: &StorePath) -> io::Result<String> {
        if self.look(path)?.is_some() {
            return Err(Errno::EXIST.into());
        }
        let when = if self.abilities.if_absent { When::Absent } else { When::Always };
        self.server.put(&self.below(path)?, &&b""[..], waiting.checksum, &waiting.words, when)
    }

    /// Puts the mark, before the first object with words.
    pub(super) fn marked(&self) -> io::Result<()> {
        if self.listings.is_marked() {
            return Ok(());
        }
        let sum = crate::checksum::of_bytes(MARK_TEXT);
        // A new mark would be younger than objects with words.
        if !self.abilities.if_absent && self.server.head(MARK)?.is_some() {
            self.listings.mark();
            return Ok(());
        }
        let when = if self.abilities.if_absent { When::Absent } else { When::Always };
        match self.server.put(MARK, &MARK_TEXT, sum, &Words::new(), when) {
            Err(why) if !is_condition_failed(&why) => return Err(why),
            _ => {}
        }
        self.listings.mark();
        Ok(())
    }

    pub(super) fn change_words(&self, path: &StorePath, kind: Kind, meta: &Meta) -> io::Result<StoreIdentity> {
        crash_point!("store.set_meta");
        if path.0.is_empty() {
            return Ok(self.implied(path).identity);
        }
        if kind == Kind::Directory {
            let key = self.below(path)?;
            let marker = self.server.head(&key)?;
            if marker.is_none() && !self.has_something(path)? {
                return Err(Errno::NOENT.into());
            }
            let present = marker.as_ref().map_or_else(|| self.implied(path), |marker| stat_of(marker, self.owner));
            let before = marker.and_then(|marker| marker.words);
            let words = words_of(kind, present.identity.ino, 0, meta, before.as_ref())?;
            let words = reworded(before.as_ref(), words);
            if before.as_ref() == Some(&words) {
                return Ok(present.identity);
            }
            too_many(&words, self.abilities.words_bytes_max)?;
            self.marked()?;
            let etag = self.server.put(&key, &&b""[..], crate::checksum::of_bytes(b""), &words, When::Always)?;
            self.listings.forget(&path.parent());
            let marker = super::Object { key, etag, words: Some(words), ..super::names::empty() };
            return Ok(stat_of(&marker, self.owner).identity);
        }
        let object = self.object(path)?;
        let present = stat_of(&object, self.owner);
        if present.attr.kind != kind {
            return Err(Errno::NOENT.into());
        }
        let words = words_of(kind, present.identity.ino, present.attr.device, meta, object.words.as_ref())?;
        let words = reworded(object.words.as_ref(), words);
        if object.words.as_ref() == Some(&words) {
            return Ok(present.identity);
        }
        too_many(&words, self.abilities.words_bytes_max)?;
        self.marked()?;
        let key = object.key.clone();
        let etag = self.copy_object(&object, &key, Some(&words))?;
        self.listings.forget(&path.parent());
        let changed = super::Object { etag, words: Some(words), ..object };
        Ok(stat_of(&changed, self.owner).identity)
    }

    /// Copies on the server, whatever the size.
    pub(super) fn copy_object(&self, object: &super::Object, to: &str, words: Option<&Words>) -> io::Result<String> {
        let server: &dyn Objects = &*self.server;
        if object.size_bytes <= self.abilities.copy_bytes_max {
            return server.copy(&object.key, Some(&object.etag), to, words);
        }
        let none = Words::new();
        let upload = server.begin(to, words.or(object.words.as_ref()).unwrap_or(&none))?;
        let part_bytes = self.abilities.copy_bytes_max.min(1 << 30).max(self.abilities.part_bytes_min);
        let part_bytes = part_bytes.min(self.abilities.part_bytes_max);
        let copy = || {
            let mut parts = Vec::new();
            let mut start = 0;
            while start < object.size_bytes {
                let range = start..object.size_bytes.min(start + part_bytes);
                start = range.end;
                let number = u32::try_from(parts.len() + 1).map_err(io::Error::other)?;
                parts.push(server.part_of(to, &upload, number, &object.key, range, &object.etag)?);
            }
            let whole = parts.iter().try_fold(crate::checksum::of_bytes(b""), |whole, part| {
                Some(crate::checksum::joined(whole, part.crc64nvme?, part.size_bytes))
            });
            let whole = whole.or(object.crc64nvme).ok_or(Errno::OPNOTSUPP)?;
            server.complete(to, &upload, &parts, whole, When::Always)
        };
        copy().inspect_err(|_| drop(server.abort(to, &upload)))
    }
}

/// A body that is sent before its turn, except for its last byte.
struct InTurn<'a> {
    body: &'a dyn Body,
    turn: Turn<'a>,
}

impl Body for InTurn<'_> {
    fn len(&self) -> u64 {
        self.body.len()
    }
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.body.read_at(buffer, offset)
    }
    fn last_byte_waits(&self) -> Option<Turn<'_>> {
        Some(self.turn)
    }
}

fn changed(path: &StorePath) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{path} changed while it was being published"))
}
