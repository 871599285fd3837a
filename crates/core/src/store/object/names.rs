//! Names that move and go. A server has no rename: a file is copied there and deleted here, in this order.
//!
//! **A directory** costs a copy and a delete for each file below it: all copies first, in the order of the keys, then the
//! deletes, the directory's own object last of all. Whoever looks meanwhile may see files under both names, never under
//! none. After a crash the rename is done again from the beginning; what was copied before is only copied once more.

use std::io;

use rustix::io::Errno;

use super::attributes::{stat_of, words_of};
use super::keys::parent;
use super::{Object, ObjectStore, When, locked};
use crate::store::{Meta, StorePath};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};

const AT_ONCE: usize = 16;

impl ObjectStore {
    pub(super) fn move_name(&self, from: &StorePath, to: &StorePath) -> io::Result<()> {
        crash_point!("store.rename");
        let (old, new) = (self.key(from)?.to_owned(), self.key(to)?.to_owned());
        let unasked = matches!(locked(&self.found).remove(to), Some(None));
        let forget = || {
            self.listings.forget(&parent(from));
            self.listings.forget(&parent(to));
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
        // What is somebody else's gets an id now: its number shall not change with its name.
        let own = object.words.as_ref().and_then(super::attributes::id_of).is_some();
        let words = if own { None } else { Some(self.words_as_it_is(&object)?) };
        self.copy_object(&object, &new, words.as_ref())?;
        crash_point!("store.rename_copied");
        self.server.delete(&old)?;
        forget();
        self.keep_dir(&parent(from))
    }

    fn words_as_it_is(&self, object: &Object) -> io::Result<super::Words> {
        let attr = stat_of(object, self.owner).attr;
        let times = Some((attr.atime, attr.mtime));
        let meta = Meta { perm: attr.perm, uid: attr.uid, gid: attr.gid, times, xattrs: None };
        words_of(attr.kind, attr.ino, attr.device, &meta, object.words.as_ref())
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
        // With its number, also if only its files told of it.
        let words = match marker.as_ref().and_then(|marker| marker.words.clone()) {
            Some(words) => words,
            None => self.words_as_it_is(&Object { key: old.clone(), ..empty() })?,
        };
        let sum = crate::store::checksum::of_bytes(b"");
        self.server.put(&new, &&b""[..], sum, &words, When::Always)?;
        self.each(&objects, &|object| {
            let target = format!("{new}{}", &object.key[old.len()..]);
            if object.key.ends_with('/') {
                // Servers that keep directories as such do not copy them.
                let words = self.server.head(&object.key)?.and_then(|marker| marker.words).unwrap_or_default();
                self.server.put(&target, &&b""[..], sum, &words, When::Always)?;
            } else {
                self.copy_object(object, &target, None)?;
            }
            crash_point!("store.rename_copied");
            Ok(())
        })?;
        self.each(&objects, &|object| self.server.delete(&object.key))?;
        self.server.delete(&old)?;
        self.keep_dir(&parent(from))
    }

    fn each(&self, objects: &[Object], act: &(dyn Fn(&Object) -> io::Result<()> + Sync)) -> io::Result<()> {
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<io::Error>> = Mutex::default();
        let work = || {
            while locked(&failed).is_none() {
                let Some(object) = objects.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                if let Err(why) = act(object) {
                    locked(&failed).get_or_insert(why);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..AT_ONCE.min(objects.len()) {
                scope.spawn(work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(crate::sync::PoisonError::into_inner).map_or(Ok(()), Err)
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
        self.listings.forget(&parent(path));
        self.keep_dir(&parent(path))
    }

    /// A directory whose last file went is still there: from the first file on that is taken out of it, it has an object of
    /// its own.
    fn keep_dir(&self, dir: &StorePath) -> io::Result<()> {
        if dir.0.is_empty() || locked(&self.own_object).contains(dir) {
            return Ok(());
        }
        let key = self.below(dir)?;
        if self.server.head(&key)?.is_none() {
            let words = self.words_as_it_is(&Object { key: key.clone(), ..empty() })?;
            let sum = crate::store::checksum::of_bytes(b"");
            self.server.put(&key, &&b""[..], sum, &words, When::Always)?;
            self.listings.forget(&parent(dir));
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
        locked(&self.own_object).remove(path);
        self.server.delete(&below)?;
        self.listings.forget(&parent(path));
        self.listings.forget(path);
        self.keep_dir(&parent(path))
    }
}

fn empty() -> Object {
    Object { key: String::new(), size_bytes: 0, etag: String::new(), modified_nanos: 0, words: None, crc64nvme: None }
}
