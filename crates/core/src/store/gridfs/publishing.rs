//! How a version gets its name, and loses it. Its chunks are there already; its document is the moment at which it shows. Then
//! those before it go: first their documents, then their chunks.

use super::bson::{Id, Value, fields};
use super::failure::Failure;
use super::files::{File, id_of};
use super::locks::Held;
use super::server::{Kind, Server, Sure};
use crate::error::Errno;
use crate::store::object::When;

impl Server {
    /// All that have the name, the one that counts first.
    pub fn versions(&self, key: &str) -> Result<Vec<File>, Failure> {
        self.named(key, None)
    }

    pub fn newest(&self, key: &str) -> Result<Option<File>, Failure> {
        Ok(self.named(key, Some(1))?.pop())
    }

    fn named(&self, key: &str, limit: Option<i32>) -> Result<Vec<File>, Failure> {
        let filter = fields! { "filename": self.filename(key) };
        let found = self.find(Kind::Files, filter, Some(fields! { "uploadDate": -1, "_id": -1 }), limit)?;
        Ok(found.iter().filter_map(File::of).collect())
    }

    /// The version that an etag names, wherever it is now.
    pub fn version(&self, etag: &str) -> Result<File, Failure> {
        let found = self.find(Kind::Files, fields! { "_id": id_of(etag)? }, None, Some(1))?;
        found.first().and_then(File::of).ok_or_else(Failure::condition)
    }

    /// Shows it, if what is there is what is to be. Returns its etag.
    pub fn publish(&self, key: &str, file: File, when: When<'_>) -> Result<String, Failure> {
        self.alone_with(key, |held| self.publish_alone(held, key, file, when))
    }

    fn publish_alone(&self, held: &Held, key: &str, mut file: File, when: When<'_>) -> Result<String, Failure> {
        let there = self.versions(key)?;
        if let Some(ours) = there.iter().find(|there| there.id == file.id) {
            // An earlier try of ours.
            return Ok(ours.etag());
        }
        let holds = match when {
            When::Always => true,
            When::Absent => there.is_empty(),
            When::Is(etag) => there.first().is_some_and(|there| there.etag() == etag),
        };
        if !holds {
            return Err(Failure::condition());
        }
        let now = crate::clock::now().nanos.div_euclid(1_000_000);
        // Readers take the youngest for the newest.
        file.date_millis = there.first().map_or(now, |there| now.max(there.date_millis.saturating_add(1)));
        held.in_time()?;
        self.insert_ours(Kind::Files, file.document(), Sure::Durable)?;
        there.iter().try_for_each(|old| self.remove_version(&old.id))?;
        Ok(file.etag())
    }

    /// Other words for the same bytes.
    pub fn reword(&self, key: &str, etag: Option<&str>, words: impl FnOnce(&File) -> File) -> Result<String, Failure> {
        self.alone_with(key, |held| {
            let there = self.newest(key)?.ok_or_else(|| Failure::ours(Errno::NOENT, "no such file"))?;
            if etag.is_some_and(|etag| there.etag() != etag) {
                return Err(Failure::condition());
            }
            let changed = words(&there);
            held.in_time()?;
            let set = fields! { "$set": fields! { "metadata": changed.metadata.clone() } };
            match self.update(Kind::Files, fields! { "_id": &there.id }, set, false)? {
                0 => Err(Failure::condition()),
                _ => Ok(changed.etag()),
            }
        })
    }

    /// Absent is fine.
    pub fn remove(&self, key: &str) -> Result<(), Failure> {
        if self.newest(key)?.is_none() {
            return Ok(());
        }
        self.alone_with(key, |_| {
            // The oldest first: it must not show again.
            self.versions(key)?.iter().rev().try_for_each(|old| self.remove_version(&old.id))
        })
    }

    fn remove_version(&self, id: &Value) -> Result<(), Failure> {
        self.delete(Kind::Files, fields! { "_id": id }, Sure::Durable)?;
        self.remove_chunks(id)
    }

    /// The chunks of what will never be published. (They show nowhere; `gc` finds what stays.)
    pub fn throw_away(&self, id: &Id) {
        if let Err(why) = self.remove_chunks(&(*id).into()) {
            tracing::debug!("{}: chunks stay for gc: {why}", self.place);
        }
    }
}
