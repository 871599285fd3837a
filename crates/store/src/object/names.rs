//! Renames and removals. A server has no rename: an object is copied to the new key and then deleted at the old one.
//!
//! **A directory** costs a look, a copy, a look and a delete for each object below it: first all copies, in the order of the
//! keys, then the deletes, the directory's own object last. Another client may see files under both names meanwhile, never
//! under none. After a crash the rename starts again; an object that was copied before is copied again. An object that another
//! client put under an old name meanwhile stays there.

use std::io;

use rustix::io::Errno;

use super::attributes::{reworded, stat_of, words_of};
use super::{Object, ObjectStore, When, locked};
use crate::{Meta, StorePath, at_once};
use surgetank_types::sync::Mutex;

const AT_ONCE: usize = 16;

impl ObjectStore {
    pub(super) fn move_name(&self, from: &StorePath, to: &StorePath) -> io::Result<()> {
        crash_point!("store.rename");
        let (old, new) = (self.key(from)?.to_owned(), self.key(to)?.to_owned());
        let unasked = matches!(locked(&self.found).remove(to), Some(None));
        let forget = || {
            self.listings.forget(&from.parent());
            self.listings.forget(&to.parent());
        };
        let Some(object) = self.server.head(&old)? else {
            locked(&self.own_object).clear();
            let moved = self.move_dir(from, to);
            self.listings.forget_all();
            return moved;
        };
        if unasked
            && let Some(there) = self.server.head(&new)?
            && stat_of(&there, self.owner).identity.ino != stat_of(&object, self.owner).identity.ino
        {
            locked(&self.suspect).insert(to.clone());
            return Err(io::Error::new(io::ErrorKind::WouldBlock, super::condition_failed(&new)));
        }
        self.copy_as_it_is(&object, &new)?;
        crash_point!("store.rename_copied");
        self.delete_copied(&object)?;
        forget();
        self.keep_dir(&from.parent())
    }

    fn words_as_it_is(&self, object: &Object) -> io::Result<super::Words> {
        let attr = stat_of(object, self.owner).attr;
        let times = Some((attr.atime, attr.mtime));
        let meta = Meta { perm: attr.perm, uid: attr.uid, gid: attr.gid, times, xattrs: None };
        let ours = words_of(attr.kind, attr.ino, attr.device, &meta, object.words.as_ref())?;
        Ok(reworded(object.words.as_ref(), ours))
    }

    /// Copies an object unchanged. One of another client gets an id, because its inode number must not change with its name.
    fn copy_as_it_is(&self, object: &Object, to: &str) -> io::Result<()> {
        let own = object.words.as_ref().and_then(super::attributes::id_of).is_some();
        let words = if own { None } else { Some(self.words_as_it_is(object)?) };
        self.marked()?;
        self.copy_object(object, to, words.as_ref()).map(drop)
    }

    /// Deletes the old object after its copy. If another client has put a new one there, that one stays.
    fn delete_copied(&self, object: &Object) -> io::Result<()> {
        match self.server.head(&object.key)? {
            Some(there) if there.etag == object.etag => self.server.delete(&object.key),
            _ => Ok(()),
        }
    }

    fn move_dir(&self, from: &StorePath, to: &StorePath) -> io::Result<()> {
        let (old, new) = (self.below(from)?, self.below(to)?);
        let mut objects = Vec::new();
        let mut page = None;
        loop {
            let listed = self.server.list(&old, false, page.as_deref())?;
            objects.extend(listed.objects);
            page = listed.next;
            if page.is_none() {
                break;
            }
        }
        if objects.is_empty() {
            return Err(Errno::NOENT.into());
        }
        let marker = objects.iter().position(|object| object.key == old).map(|at| objects.remove(at));
        let marker = match marker {
            Some(marker) => self.server.head(&marker.key)?,
            None => None,
        };
        // With its inode number, even if only its files implied it.
        let words = match marker.as_ref().and_then(|marker| marker.words.clone()) {
            Some(words) => words,
            None => self.words_as_it_is(&Object { key: old.clone(), ..empty() })?,
        };
        let sum = crate::checksum::of_bytes(b"");
        self.marked()?;
        self.server.put(&new, &&b""[..], sum, &words, When::Always)?;
        let copied = Mutex::new(Vec::with_capacity(objects.len()));
        at_once(objects.len(), AT_ONCE, &|index| {
            let key = &objects[index].key;
            let target = format!("{new}{}", &key[old.len()..]);
            // A listing does not contain the words. An object that another client removed meanwhile is skipped.
            let Some(object) = self.server.head(key)? else { return Ok(()) };
            if key.ends_with('/') {
                // Some servers keep directories as such and do not copy them.
                self.server.put(&target, &&b""[..], sum, &self.words_as_it_is(&object)?, When::Always)?;
            } else {
                self.copy_as_it_is(&object, &target)?;
            }
            crash_point!("store.rename_copied");
            locked(&copied).push(object);
            Ok(())
        })?;
        let copied = std::mem::take(&mut *locked(&copied));
        at_once(copied.len(), AT_ONCE, &|index| {
            self.delete_copied(&copied[index])?;
            crash_point!("store.rename_deleted");
            Ok(())
        })?;
        self.server.delete(&old)?;
        self.move_staged(from, to)?;
        self.keep_dir(&from.parent())
    }

    pub(super) fn remove_file(&self, path: &StorePath) -> io::Result<()> {
        crash_point!("store.unlink");
        let key = self.key(path)?;
        locked(&self.found).remove(path);
        if key.is_empty() {
            return Err(Errno::BUSY.into());
        }
        if self.server.head(key)?.is_none() {
            return Err(Errno::NOENT.into());
        }
        self.server.delete(key)?;
        self.listings.forget(&path.parent());
        self.keep_dir(&path.parent())
    }

    /// Keeps a directory whose last file leaves: when the first file is taken out of it, it gets an object of its own.
    fn keep_dir(&self, dir: &StorePath) -> io::Result<()> {
        if dir.0.is_empty() || locked(&self.own_object).contains(dir) {
            return Ok(());
        }
        let key = self.below(dir)?;
        if self.server.head(&key)?.is_none() {
            let words = self.words_as_it_is(&Object { key: key.clone(), ..empty() })?;
            let sum = crate::checksum::of_bytes(b"");
            self.marked()?;
            self.server.put(&key, &&b""[..], sum, &words, When::Always)?;
            self.listings.forget(&dir.parent());
        }
        locked(&self.own_object).insert(dir.clone());
        Ok(())
    }

    pub(super) fn remove_marker(&self, path: &StorePath) -> io::Result<()> {
        crash_point!("store.remove_dir");
        let below = self.below(path)?;
        let page = self.server.list(&below, true, None)?;
        if page.objects.iter().any(|object| object.key != below) || !page.prefixes.is_empty() {
            return Err(Errno::NOTEMPTY.into());
        }
        if page.objects.is_empty() {
            return Err(match self.look(path)? {
                Some(_) => Errno::NOTDIR,
                None => Errno::NOENT,
            }
            .into());
        }
        self.lose_staged(path)?;
        locked(&self.own_object).remove(path);
        self.server.delete(&below)?;
        self.listings.forget(&path.parent());
        self.listings.forget(path);
        self.keep_dir(&path.parent())
    }
}

pub(super) fn empty() -> Object {
    Object { key: String::new(), size_bytes: 0, etag: String::new(), modified_nanos: 0, words: None, crc64nvme: None }
}
