//! Directories whose numbers outlast the member that gave them: a program's working directory is still there after its
//! member has left. A leaving member says where its directories are in the store; requests about their numbers are then
//! served as requests about the directory at that path.
//!
//! The danger that this avoids: another directory under the same path. Its inode number in the store must be the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId, FileLock, LockRequest};

use super::super::call::{Ask, Call, Stored};
use super::remote::Remote;
use super::{FAREWELL, PATIENCE, Router};
use crate::mount::request::{FilePlace, ReleaseFlags};
use crate::mount::{
    Agreed, Attributes, DirectorySink, Entry, Filesystem, Looked, Notifier, Opened, OpenedDirectory, SetAttr,
    SpaceReport, WriteFlags,
};

/// What members that left have said of their directories.
#[derive(Default)]
pub(super) struct Left {
    any: AtomicBool,
    places: Mutex<HashMap<u64, Place>>,
}

enum Place {
    Stored(Stored),
    /// The kernel's number for it now. It counts as looked up.
    Now(u64),
}

impl Left {
    fn places(&self) -> MutexGuard<'_, HashMap<u64, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A member says, before it leaves, where its directories are.
    pub fn note(&self, remote: &Remote, member: u32, directories: Vec<Stored>) {
        let mut places = self.places();
        for directory in directories {
            let id = remote.number_of(member, directory.node);
            // (It may have said so before, and stayed.)
            if !matches!(places.get(&id), Some(Place::Now(_))) {
                places.insert(id, Place::Stored(directory));
            }
        }
        self.any.store(!places.is_empty(), Ordering::Release);
    }

    /// The present number of what the kernel knows by `id`, as far as it was looked up.
    fn now(&self, mut id: u64) -> u64 {
        if self.any.load(Ordering::Acquire) {
            let places = self.places();
            while let Some(Place::Now(now)) = places.get(&id) {
                id = *now;
            }
        }
        id
    }

    /// The kernel has forgotten it. Returns what is to be forgotten with it.
    fn forget(&self, id: u64) -> Option<u64> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut places = self.places();
        // (An older number leads here.)
        if places.values().any(|place| matches!(place, Place::Now(now) if *now == id)) {
            return None;
        }
        match places.remove(&id) {
            Some(Place::Now(now)) => Some(now),
            _ => None,
        }
    }

    fn is_to_be_found(&self, id: u64) -> bool {
        self.any.load(Ordering::Acquire) && matches!(self.places().get(&id), Some(Place::Stored(_)))
    }
}

/// What the kernel talks to in a pool: the router, behind the numbers of members that have left.
pub struct Lasting<F>(pub Arc<Router<F>>);

impl<F: Filesystem> Lasting<F> {
    fn now(&self, id: u64) -> u64 {
        self.0.left_members.now(id)
    }

    /// The present number, looked up if it has to be.
    fn found(&self, caller: &Caller, id: u64) -> u64 {
        let now = self.now(id);
        if self.0.left_members.is_to_be_found(now) { self.next(caller, now).unwrap_or(now) } else { now }
    }

    /// Does something with the present number, again with the next one if its member has left. The second argument says
    /// whether it is another number than the kernel's. The kernel is not notified of changes under the old one, and is to
    /// believe nothing.
    fn present<T>(&self, caller: &Caller, id: u64, does: impl Fn(u64, bool) -> FsResult<T>) -> FsResult<T> {
        let mut now = self.found(caller, id);
        loop {
            match does(now, now != id) {
                Err(fault) if fault.errno == Errno::STALE => match self.next(caller, now) {
                    Some(next) => now = next,
                    None => return Err(fault),
                },
                result => return result,
            }
        }
    }

    /// The number of the same directory, after its member has left.
    fn next(&self, caller: &Caller, id: u64) -> Option<u64> {
        let router = &self.0;
        let stored = match router.left_members.places().get(&id)? {
            Place::Now(now) => return Some(*now),
            Place::Stored(stored) => stored.clone(),
        };
        // (It may have stayed: then it says itself what is stale.)
        if !router.remote.has_left(id) {
            return None;
        }
        let found = self.walked(caller, &stored)?;
        let mut places = router.left_members.places();
        match places.get_mut(&id) {
            Some(place @ Place::Stored(_)) => *place = Place::Now(found),
            // Another thread was first, or the kernel has forgotten it.
            other => {
                let first = if let Some(Place::Now(first)) = other { Some(*first) } else { None };
                drop(places);
                router.forget(found, 1);
                return first;
            }
        }
        Some(found)
    }

    /// Looks the directory up by its path.
    fn walked(&self, caller: &Caller, stored: &Stored) -> Option<u64> {
        let router = &self.0;
        let mut at = FileId::ROOT.0;
        let mut ino = None;
        // (The other member's word is not trusted.)
        if stored.path.split(|byte| *byte == b'/').any(|name| matches!(name, b"" | b"." | b"..")) {
            return None;
        }
        for name in stored.path.split(|byte| *byte == b'/') {
            let looked = router.lookup(caller, at, name);
            if at != FileId::ROOT.0 {
                router.forget(at, 1);
            }
            let Ok(Looked::Found(entry)) = looked else { return None };
            (at, ino) = (entry.id, Some(entry.attr.ino));
        }
        if ino == Some(stored.ino) {
            return Some(at);
        }
        router.forget(at, 1);
        None
    }
}

fn brief(entry: Entry, is_other: bool) -> Entry {
    if is_other { Entry { entry_ttl: Duration::ZERO, ..entry } } else { entry }
}

impl<F: Filesystem> Filesystem for Lasting<F> {
    fn started(&self, notifier: &Notifier, agreed: &Agreed) {
        self.0.started(notifier, agreed);
    }
    fn recall(&self, id: u64) {
        self.0.recall(id);
    }
    fn ended(&self) {
        self.0.ended();
    }

    fn lookup(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<Looked> {
        self.present(caller, parent, |parent, is_other| {
            Ok(match self.0.lookup(caller, parent, name)? {
                Looked::Found(entry) => Looked::Found(brief(entry, is_other)),
                Looked::Missing { .. } if is_other => Looked::Missing { ttl: Duration::ZERO },
                looked => looked,
            })
        })
    }

    fn forget(&self, id: u64, count: u64) {
        if let Some(now) = self.0.left_members.forget(id) {
            self.0.forget(now, 1);
        }
        self.0.forget(id, count);
    }

    fn getattr(&self, caller: &Caller, id: u64, fh: Option<u64>) -> FsResult<Attributes> {
        self.present(caller, id, |id, is_other| {
            let found = self.0.getattr(caller, id, fh)?;
            Ok(if is_other { Attributes { ttl: Duration::ZERO, ..found } } else { found })
        })
    }

    fn setattr(&self, caller: &Caller, id: u64, change: &SetAttr) -> FsResult<Attributes> {
        self.present(caller, id, |id, is_other| {
            let found = self.0.setattr(caller, id, change)?;
            Ok(if is_other { Attributes { ttl: Duration::ZERO, ..found } } else { found })
        })
    }

    fn readlink(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.0.readlink(caller, id)
    }

    fn symlink(&self, caller: &Caller, parent: u64, name: &[u8], target: &[u8]) -> FsResult<Entry> {
        self.present(caller, parent, |parent, is_other| {
            Ok(brief(self.0.symlink(caller, parent, name, target)?, is_other))
        })
    }

    fn mknod(&self, caller: &Caller, parent: u64, name: &[u8], mode: u32, device: u64) -> FsResult<Entry> {
        self.present(caller, parent, |parent, is_other| {
            Ok(brief(self.0.mknod(caller, parent, name, mode, device)?, is_other))
        })
    }

    fn mkdir(&self, caller: &Caller, parent: u64, name: &[u8], perm: u32) -> FsResult<Entry> {
        self.present(caller, parent, |parent, is_other| Ok(brief(self.0.mkdir(caller, parent, name, perm)?, is_other)))
    }

    fn unlink(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        self.present(caller, parent, |parent, _| self.0.unlink(caller, parent, name))
    }

    fn rmdir(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        self.present(caller, parent, |parent, _| self.0.rmdir(caller, parent, name))
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: u64,
        name: &[u8],
        new_parent: u64,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> FsResult<()> {
        // (A stale second directory is tried again with the first one.)
        self.present(caller, new_parent, |new_parent, _| {
            self.present(caller, parent, |parent, _| self.0.rename(caller, parent, name, new_parent, new_name, flags))
        })
    }

    fn link(&self, caller: &Caller, id: u64, new_parent: u64, new_name: &[u8]) -> FsResult<Entry> {
        self.present(caller, new_parent, |new_parent, is_other| {
            Ok(brief(self.0.link(caller, id, new_parent, new_name)?, is_other))
        })
    }

    fn open(&self, caller: &Caller, id: u64, flags: OFlags, kill_suidgid: bool) -> FsResult<Opened> {
        self.0.open(caller, id, flags, kill_suidgid)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: u64,
        name: &[u8],
        perm: u32,
        flags: OFlags,
        kill_suidgid: bool,
    ) -> FsResult<(Entry, Opened)> {
        self.present(caller, parent, |parent, is_other| {
            let (entry, opened) = self.0.create(caller, parent, name, perm, flags, kill_suidgid)?;
            Ok((brief(entry, is_other), opened))
        })
    }

    fn tmpfile(&self, caller: &Caller, parent: u64, perm: u32, flags: OFlags) -> FsResult<(Entry, Opened)> {
        self.present(caller, parent, |parent, _| self.0.tmpfile(caller, parent, perm, flags))
    }

    fn read(&self, caller: &Caller, id: u64, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        self.0.read(caller, id, fh, offset, buffer)
    }

    fn write(
        &self,
        caller: &Caller,
        id: u64,
        fh: u64,
        offset: u64,
        bytes: &[u8],
        flags: WriteFlags,
    ) -> FsResult<usize> {
        self.0.write(caller, id, fh, offset, bytes, flags)
    }

    fn flush(&self, caller: &Caller, id: u64, fh: u64, lock_owner: u64) -> FsResult<()> {
        self.0.flush(caller, id, fh, lock_owner)
    }

    fn release(&self, id: u64, fh: u64, flags: ReleaseFlags) {
        self.0.release(id, fh, flags);
    }

    fn fsync(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        self.0.fsync(caller, id, fh, data_only)
    }

    fn fallocate(&self, caller: &Caller, id: u64, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        self.0.fallocate(caller, id, fh, mode, offset, length)
    }

    fn lseek(&self, caller: &Caller, id: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        self.0.lseek(caller, id, fh, offset, whence)
    }

    fn copy_file_range(
        &self,
        caller: &Caller,
        from: FilePlace,
        to: FilePlace,
        length: u64,
        flags: u64,
    ) -> FsResult<u64> {
        self.0.copy_file_range(caller, from, to, length, flags)
    }

    fn opendir(&self, caller: &Caller, id: u64) -> FsResult<OpenedDirectory> {
        self.present(caller, id, |id, is_other| {
            let opened = self.0.opendir(caller, id)?;
            Ok(if is_other { OpenedDirectory { cache: false, keep_cache: false, ..opened } } else { opened })
        })
    }

    fn readdir(&self, caller: &Caller, id: u64, fh: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()> {
        self.0.readdir(caller, self.now(id), fh, offset, sink)
    }

    fn releasedir(&self, id: u64, fh: u64) {
        self.0.releasedir(self.now(id), fh);
    }

    fn fsyncdir(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        self.0.fsyncdir(caller, self.now(id), fh, data_only)
    }

    fn statfs(&self, caller: &Caller, id: u64) -> FsResult<SpaceReport> {
        self.present(caller, id, |id, _| self.0.statfs(caller, id))
    }

    fn getxattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        self.present(caller, id, |id, _| self.0.getxattr(caller, id, name))
    }

    fn setxattr(&self, caller: &Caller, id: u64, name: &[u8], value: &[u8], flags: u32) -> FsResult<()> {
        self.present(caller, id, |id, _| self.0.setxattr(caller, id, name, value, flags))
    }

    fn listxattr(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.present(caller, id, |id, _| self.0.listxattr(caller, id))
    }

    fn removexattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<()> {
        self.present(caller, id, |id, _| self.0.removexattr(caller, id, name))
    }

    fn getlk(&self, caller: &Caller, id: u64, asked: &LockRequest) -> FsResult<FileLock> {
        self.0.getlk(caller, id, asked)
    }

    fn setlk(&self, caller: &Caller, id: u64, asked: &LockRequest, wait: bool) -> FsResult<()> {
        self.0.setlk(caller, id, asked, wait)
    }

    fn access(&self, caller: &Caller, id: u64, mask: u32) -> FsResult<()> {
        self.present(caller, id, |id, _| self.0.access(caller, id, mask))
    }
}

/// So that working directories of programs at other members stay.
pub(super) fn say_where_directories_are<F: Filesystem>(router: &Router<F>) {
    const SOME: usize = 1000;
    let members = router.link.status(PATIENCE).map(|status| status.members).unwrap_or_default();
    let say = |member: u32| {
        let until = tick() + FAREWELL;
        for some in router.link.looked_up(member, FAREWELL).chunks(SOME) {
            let ask = Ask::Leaves { directories: some.to_vec() };
            // (A member that is not reached answers ESTALE for them.)
            let _ = router.link.call(member, &Call { uid: 0, gid: 0, ask }, None, &mut |_| tick() < until);
        }
    };
    std::thread::scope(|scope| {
        for other in members.iter().filter(|other| other.member != router.link.member()) {
            // (Without a thread that member does not learn it.)
            let _ = std::thread::Builder::new().spawn_scoped(scope, || say(other.member));
        }
    });
}
