//! How a version gets its name, and loses it. Its chunks exist already. The version becomes visible with its document. Then the
//! older versions are deleted: first their documents, then their chunks.

use std::cell::Cell;

use super::bson::{Document, Id, Value, fields};
use super::failure::Failure;
use super::files::{File, OURS, id_of};
use super::locks::Held;
use super::server::{Kind, Server, Sure, hex};
use super::uploads::no_such_upload;
use crate::object::When;
use surgetank_types::error::Errno;

#[derive(Default)]
pub struct Publication {
    /// The file has a document in the collection of uploads.
    pub is_upload: bool,
    /// The file may be visible, whatever the answer is.
    pub is_sent: Cell<bool>,
}

impl Server {
    /// All versions of the name, the newest first.
    pub fn versions(&self, key: &str) -> Result<Vec<File>, Failure> {
        self.named(key, None)
    }

    pub fn newest(&self, key: &str) -> Result<Option<File>, Failure> {
        Ok(self.named(key, Some(1))?.pop())
    }

    /// Errors: EIO if a version is unreadable. The driver does not replace such a version.
    fn named(&self, key: &str, limit: Option<i32>) -> Result<Vec<File>, Failure> {
        let filter = fields! { "filename": self.filename(key) };
        let found = self.find(Kind::Files, filter, Some(fields! { "uploadDate": -1, "_id": -1 }), limit)?;
        let strange = || Failure::ours(Errno::IO, "another client wrote a version of the file that cannot be read");
        found.iter().map(|document| File::of(document).ok_or_else(strange)).collect()
    }

    /// The version of an etag, under any name.
    pub fn version(&self, etag: &str) -> Result<File, Failure> {
        let found = self.find(Kind::Files, fields! { "_id": id_of(etag)? }, None, Some(1))?;
        found.first().and_then(File::of).filter(|file| file.is_of(etag)).ok_or_else(Failure::condition)
    }

    /// Checks that the version still exists.
    pub fn still(&self, file: &File) -> Result<(), Failure> {
        let found = self.find(Kind::Files, fields! { "_id": &file.id }, None, Some(1))?;
        let there = found.first().and_then(File::of).filter(|there| there.has_bytes_of(file));
        there.map(drop).ok_or_else(Failure::condition)
    }

    /// Publishes the file if the condition holds. Returns its etag.
    pub fn publish(&self, key: &str, file: File, when: When<'_>, how: &Publication) -> Result<String, Failure> {
        self.alone_with(key, |held| self.publish_alone(held, key, file, when, how))
    }

    fn publish_alone(
        &self,
        held: &Held,
        key: &str,
        mut file: File,
        when: When<'_>,
        how: &Publication,
    ) -> Result<String, Failure> {
        let there = self.versions(key)?;
        let holds = match when {
            When::Always => true,
            When::Absent => there.is_empty(),
            When::Is(etag) => there.first().is_some_and(|there| there.etag() == etag),
        };
        // An earlier try of this publication that did not end.
        let earlier = |at: usize, known: &File| known.id == file.id || at == 0 && !holds && file.is_again(known);
        if let Some(at) = there.iter().enumerate().position(|(at, known)| earlier(at, known)) {
            let ours = &there[at];
            if !self.confirm(Kind::Files, &ours.id, ours.filename.as_str().into())? {
                return Err(Failure::condition());
            }
            if ours.id == file.id {
                self.is_whole(&file, how)?;
            } else {
                self.remove_chunks(&file.id)?;
            }
            self.remove_versions(&there[at + 1..])?;
            return Ok(ours.etag());
        }
        if !holds {
            return Err(Failure::condition());
        }
        let now = surgetank_types::clock::now().nanos.div_euclid(1_000_000);
        // Readers take the youngest version as the newest.
        file.date_millis = there.first().map_or(now, |there| now.max(there.date_millis.saturating_add(1)));
        how.is_sent.set(true);
        self.insert_ours(Kind::Files, file.document(), Some(held.until()))?;
        if !held.is_sure() && self.newest(key)?.is_none_or(|newest| newest.id != file.id) {
            self.remove_version(&file.id)?;
            return Err(Failure::condition());
        }
        self.is_whole(&file, how)?;
        self.remove_versions(&there)?;
        Ok(file.etag())
    }

    /// Either `abort` of the upload sees the file, or this sees that the upload was aborted, before anything else is deleted.
    fn is_whole(&self, file: &File, how: &Publication) -> Result<(), Failure> {
        if how.is_upload && self.find(Kind::Uploads, fields! { "_id": &file.id }, None, Some(1))?.is_empty() {
            self.remove_version(&file.id)?;
            return Err(no_such_upload());
        }
        Ok(())
    }

    /// Replaces the words of the same bytes.
    pub fn reword(
        &self,
        key: &str,
        etag: Option<&str>,
        words: impl FnOnce(&File) -> Document,
    ) -> Result<String, Failure> {
        self.alone_with(key, |held| {
            let mut there = self.newest(key)?.ok_or_else(|| Failure::ours(Errno::NOENT, "no such file"))?;
            if etag.is_some_and(|etag| there.etag() != etag) {
                return Err(Failure::condition());
            }
            let ours = words(&there);
            let mut whole = there.metadata()?.clone();
            // Changes of other clients beside it stay.
            let set = if whole.0.is_empty() {
                fields! { "metadata": Document::default().with(OURS, ours.clone()) }
            } else {
                Document::default().with(&format!("metadata.{OURS}"), ours.clone())
            };
            whole.set(OURS, ours.into());
            there.metadata = Some(whole);
            let set = fields! { "$set": set };
            match self.update_until(Kind::Files, fields! { "_id": &there.id }, set, false, Some(held.until()))? {
                0 => Err(Failure::condition()),
                _ => Ok(there.etag()),
            }
        })
    }

    /// An absent file is not an error.
    pub fn remove(&self, key: &str) -> Result<(), Failure> {
        if self.newest(key)?.is_none() {
            return Ok(());
        }
        self.alone_with(key, |_| {
            // The oldest first: it must not become visible again.
            self.remove_versions(&self.versions(key)?)
        })
    }

    fn remove_versions(&self, old: &[File]) -> Result<(), Failure> {
        old.iter().rev().try_for_each(|old| self.remove_version(&old.id))
    }

    pub fn remove_version(&self, id: &Value) -> Result<(), Failure> {
        self.delete(Kind::Files, fields! { "_id": id }, Sure::Durable)?;
        self.remove_chunks(id)
    }

    /// Removes chunks of a file that will not be published. (They are invisible; `gc` finds any that stay.)
    pub fn give_up(&self, id: &Id) {
        if let Err(why) = self.abort(&hex(id)) {
            tracing::debug!("{}: chunks stay for gc: {why}", self.place);
        }
    }
}
