//! The mount's door into the namespace: it translates the kernel's requests and answers, and adds no meaning of its
//! own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_core::namespace::{self, Found, Grant, NAME_TTL_MIN, Namespace};
use surgetank_policy::hint::module::is_set_aside;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId, FileLock, Kind, LockKind, LockRequest, Timestamp};

use super::backings::{Backings, named};
use super::tally::{OpenedBy, Request, Tally};
use super::unshimmed::Unshimmed;
use crate::mount::request::{FilePlace, ReleaseFlags};
use crate::mount::{
    Agreed, Attributes, BackingId, DirectoryPlusSink, DirectorySink, Entry, Filesystem, Looked, Notifier, Opened,
    OpenedDirectory, SetAttr, SpaceReport, TimeChange, WriteFlags, current, wait_long,
};

pub struct Door {
    namespace: Arc<Namespace>,
    direct: bool,
    /// The ids of a user namespace with one user and one group. There the kernel lets no process write what belongs to
    /// other ids, such as a project's directory. So the door shows everything as owned by these ids, and the namespace
    /// checks permissions by the true owners.
    only_ids: Option<(u32, u32)>,
    on_lost: Box<dyn Fn() + Send + Sync>,
    ending: AtomicBool,
    backings: Arc<Backings>,
    tally: Arc<Tally>,
    unshimmed: Unshimmed,
    pub requests: AtomicU64,
    pub service_nanos: AtomicU64,
}

impl Door {
    pub fn new(
        namespace: Arc<Namespace>,
        direct: bool,
        only_ids: Option<(u32, u32)>,
        tally: Arc<Tally>,
        on_lost: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        let (notifier, passes_through) = (OnceLock::new(), OnceLock::new());
        Self {
            namespace,
            direct,
            only_ids,
            on_lost,
            ending: AtomicBool::new(false),
            backings: Arc::new(Backings { tally: Arc::clone(&tally), notifier, passes_through }),
            tally,
            unshimmed: Unshimmed::new(),
            requests: AtomicU64::new(0),
            service_nanos: AtomicU64::new(0),
        }
    }

    /// The mount ends soon because the agent wants it to.
    pub fn expect_end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }
    pub fn expect_more(&self) {
        self.ending.store(false, Ordering::Relaxed);
    }

    fn serve<T>(&self, act: impl FnOnce(&Namespace) -> T) -> T {
        let begin = Instant::now();
        let answer = act(&self.namespace);
        self.requests.fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.service_nanos.fetch_add(nanos, Ordering::Relaxed);
        answer
    }

    /// For requests that change names or attributes, or end a writer: they take effect after earlier closes by other
    /// programs.
    fn change<T>(&self, act: impl FnOnce(&Namespace) -> T) -> T {
        self.namespace.files.descriptors.catch_up();
        self.serve(act)
    }

    fn shown(&self, attr: Attr) -> Attr {
        let (uid, gid) = self.only_ids.unwrap_or((attr.uid, attr.gid));
        Attr { uid, gid, ..attr }
    }

    fn entry(&self, found: &Found) -> Entry {
        Entry {
            id: found.id.0,
            generation: 0,
            attr: self.shown(found.attr),
            // The attributes of a file that is written directly change all the time; its name does not.
            entry_ttl: found.ttl.max(NAME_TTL_MIN),
            attr_ttl: found.ttl,
        }
    }

    /// Setting the owner or group that is shown changes nothing (`cp -p`, tar): the true one stays.
    fn keep_true_ids(&self, set: &mut namespace::SetAttr) {
        if let Some((uid, gid)) = self.only_ids {
            set.uid = set.uid.filter(|to| *to != uid);
            set.gid = set.gid.filter(|to| *to != gid);
        }
    }

    fn opened(&self, opened: &namespace::Opened, flags: OFlags) -> Opened {
        let backing = match opened.grant {
            Grant::Direct(backing) => Some(BackingId::of(backing)),
            Grant::Mediated => None,
        };
        // A process that only writes needs no pages in between: one copy less. The kernel drops pages that readers
        // have.
        let access = flags.bits() as i32 & libc::O_ACCMODE;
        // The agent syncs synchronous writes itself: the kernel sends no FSYNC for writes without pages in between.
        let is_synchronous = access != libc::O_RDONLY && is_synchronous(flags.bits());
        // A trace wants every request, including those that the kernel would answer from memory.
        let uncached = opened.shared || access == libc::O_WRONLY || is_synchronous || self.tally.traces.is_on();
        let direct_io = backing.is_none() && uncached;
        // POSIX locks end with the first close, and the kernel reports that close only on request. The report costs a
        // round trip, so only files where programs use locks ask for it: databases lock what they read and write.
        let no_flush = access != libc::O_RDWR;
        let keep_cache = opened.keep_cache && !direct_io;
        Opened { fh: opened.handle, backing, direct_io, keep_cache, no_flush, ..Opened::default() }
    }

    fn tally_open(&self, caller: &Caller, file: FileId, opened: &Opened, how: (OFlags, bool), begun: Instant) {
        let (flags, creates) = how;
        self.tally.opened(&OpenedBy {
            thread: caller.pid,
            handle: opened.fh,
            file,
            direct: opened.backing.is_some(),
            flags,
            creates,
            took: begun.elapsed(),
        });
    }
}

/// One line of a listing.
struct Line<'a> {
    ino: u64,
    kind: Kind,
    name: &'a [u8],
}

impl Door {
    /// Adds lines, each with the position behind it, until the reply is full (`true`).
    fn list(
        &self,
        id: u64,
        fh: u64,
        offset: u64,
        mut add: impl FnMut(&Namespace, Line<'_>, u64) -> bool,
    ) -> FsResult<()> {
        self.serve(|ns| {
            let listing = ns.listings.listing(fh, offset)?;
            let dots: [(&[u8], FileId); 2] = [(b".", FileId(id)), (b"..", ns.listings.parent(FileId(id)))];
            for (index, (name, dir)) in (0..).zip(dots) {
                let line = Line { ino: ns.metadata.ino(dir), kind: Kind::Directory, name };
                if offset <= index && add(ns, line, index + 1) {
                    return Ok(());
                }
            }
            let start = usize::try_from(offset.saturating_sub(2)).unwrap_or(usize::MAX);
            let mut told = None;
            for (index, listed) in (3..).zip(listing.iter()).skip(start) {
                if add(ns, Line { ino: listed.ino, kind: listed.kind, name: &listed.name }, index) {
                    break;
                }
                told = Some((index, listed));
            }
            if let Some((position, last)) = told {
                ns.listings.listed(fh, position, &last.name);
            }
            Ok(())
        })
    }
}

/// Requests that an earlier agent may have carried out before it was killed: the kernel sends them again.
impl Door {
    /// The file of this request, if an earlier agent carried it out.
    fn done_before(&self) -> Option<FileId> {
        let current = current().filter(|current| current.again)?;
        self.namespace.base.succession.carried_out(current.number)
    }

    fn made_before(&self) -> Option<FsResult<Entry>> {
        self.done_before().map(|about| self.namespace.restore.made_before(about).map(|found| self.entry(&found)))
    }

    /// The handle that an earlier agent opened for this request before it could answer.
    fn opened_before(&self, flags: OFlags) -> Option<(FileId, FsResult<Opened>)> {
        let current = current().filter(|current| current.again)?;
        let (fh, id) = self.namespace.base.succession.handle_made_by(current.number)?;
        Some((id, self.namespace.restore.opened_as(fh).map(|opened| self.opened(&opened, flags))))
    }
}

impl Filesystem for Door {
    fn started(&self, notifier: &Notifier, agreed: &Agreed) {
        drop(self.backings.notifier.set(notifier.clone()));
        let _ = self.backings.passes_through.set(self.direct && agreed.passthrough);
        self.namespace.set_door(self.backings.clone());
    }

    fn recall(&self, id: u64) {
        self.namespace.restore.recall(FileId(id));
    }

    fn ended(&self) {
        if !self.ending.load(Ordering::Relaxed) {
            (self.on_lost)();
        }
    }

    fn lookup(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<Looked> {
        self.serve(|ns| match ns.resolver.lookup(caller, FileId(parent), name) {
            Ok(found) => {
                if found.attr.kind == Kind::File {
                    self.unshimmed.add(caller.pid);
                }
                Ok(Looked::Found(named(self.entry(&found), name)))
            }
            // Another client may create the name in the store at any moment.
            Err(fault) if fault.errno == Errno::NOENT => {
                let ttl = ns.resolver.absent_ttl(FileId(parent), name);
                Ok(Looked::Missing { ttl: if is_set_aside(name) { Duration::ZERO } else { ttl } })
            }
            Err(fault) => Err(fault),
        })
    }

    fn forget(&self, id: u64, count: u64) {
        self.namespace.resolver.forget(FileId(id), count);
    }

    fn getattr(&self, _caller: &Caller, id: u64, fh: Option<u64>) -> FsResult<Attributes> {
        self.serve(|ns| {
            ns.attributes.getattr(FileId(id), fh).map(|a| Attributes { attr: self.shown(a.attr), ttl: a.ttl })
        })
    }

    fn setattr(&self, caller: &Caller, id: u64, change: &SetAttr) -> FsResult<Attributes> {
        let now = surgetank_types::clock::now();
        let time = |change: Option<TimeChange>| -> Option<Timestamp> {
            change.map(|change| match change {
                TimeChange::Now => now,
                TimeChange::At(time) => time,
            })
        };
        let mut set = namespace::SetAttr {
            perm: change.perm,
            uid: change.uid,
            gid: change.gid,
            size_bytes: change.size_bytes,
            atime: time(change.atime),
            mtime: time(change.mtime),
            times_now: !matches!(change.atime, Some(TimeChange::At(_)))
                && !matches!(change.mtime, Some(TimeChange::At(_))),
            kill_suidgid: change.kill_suidgid,
        };
        self.keep_true_ids(&mut set);
        self.change(|ns| {
            ns.attributes
                .setattr(caller, FileId(id), change.fh, &set)
                .map(|a| Attributes { attr: self.shown(a.attr), ttl: a.ttl })
        })
    }

    fn readlink(&self, _caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.serve(|ns| ns.attributes.readlink(FileId(id)).map(<[u8]>::into_vec))
    }

    fn symlink(&self, caller: &Caller, parent: u64, name: &[u8], target: &[u8]) -> FsResult<Entry> {
        if let Some(made) = self.made_before() {
            return made;
        }
        self.change(|ns| ns.names.symlink(caller, FileId(parent), name, target).map(|found| self.entry(&found)))
    }

    fn mknod(&self, caller: &Caller, parent: u64, name: &[u8], mode: u32, device: u64) -> FsResult<Entry> {
        if let Some(made) = self.made_before() {
            // The process created, opened and closed an empty file.
            if let Some((fh, _)) =
                current().and_then(|current| self.namespace.base.succession.handle_made_by(current.number))
            {
                self.namespace.files.opener.release(fh);
            }
            return made;
        }
        self.change(|ns| ns.names.mknod(caller, FileId(parent), name, mode, device).map(|found| self.entry(&found)))
    }

    fn mkdir(&self, caller: &Caller, parent: u64, name: &[u8], perm: u32) -> FsResult<Entry> {
        if let Some(made) = self.made_before() {
            return made;
        }
        self.change(|ns| ns.names.mkdir(caller, FileId(parent), name, perm).map(|found| self.entry(&found)))
    }

    fn unlink(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        if self.done_before().is_some() {
            return Ok(());
        }
        self.change(|ns| ns.names.unlink(caller, FileId(parent), name))
    }

    fn rmdir(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        if self.done_before().is_some() {
            return Ok(());
        }
        self.change(|ns| ns.names.rmdir(caller, FileId(parent), name))
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
        if self.done_before().is_some() {
            return Ok(());
        }
        self.change(|ns| ns.names.rename(caller, FileId(parent), name, FileId(new_parent), new_name, flags.bits()))
    }

    fn link(&self, caller: &Caller, id: u64, new_parent: u64, new_name: &[u8]) -> FsResult<Entry> {
        if let Some(made) = self.made_before() {
            return made;
        }
        self.change(|ns| {
            ns.names
                .link(caller, FileId(id), FileId(new_parent), new_name)
                .map(|found| named(self.entry(&found), new_name))
        })
    }

    fn open(&self, caller: &Caller, id: u64, flags: OFlags, kill_suidgid: bool) -> FsResult<Opened> {
        if let Some((_, opened)) = self.opened_before(flags) {
            return opened;
        }
        let begun = Instant::now();
        self.change(|ns| {
            let opened = ns.files.opener.open_file(caller, FileId(id), flags.bits() as i32)?;
            if kill_suidgid {
                ns.attributes.clear_suidgid(caller, FileId(id));
            }
            let opened = self.opened(&opened, flags);
            self.tally_open(caller, FileId(id), &opened, (flags, false), begun);
            Ok(opened)
        })
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
        if let Some((id, opened)) = self.opened_before(flags) {
            return Ok((self.namespace.restore.made_before(id).map(|found| self.entry(&found))?, opened?));
        }
        if let Some(about) = self.done_before() {
            let (found, opened) = self.namespace.restore.opened_before(caller, about, flags.bits() as i32)?;
            return Ok((self.entry(&found), self.opened(&opened, flags)));
        }
        let begun = Instant::now();
        self.change(|ns| {
            let (found, opened) = ns.names.create(caller, FileId(parent), name, perm, flags.bits() as i32)?;
            if kill_suidgid {
                ns.attributes.clear_suidgid(caller, found.id);
            }
            let opened = self.opened(&opened, flags);
            self.tally_open(caller, found.id, &opened, (flags, true), begun);
            Ok((named(self.entry(&found), name), opened))
        })
    }

    fn tmpfile(&self, caller: &Caller, parent: u64, perm: u32, flags: OFlags) -> FsResult<(Entry, Opened)> {
        if let Some((id, opened)) = self.opened_before(flags) {
            return Ok((self.namespace.restore.made_before(id).map(|found| self.entry(&found))?, opened?));
        }
        self.serve(|ns| {
            let begun = Instant::now();
            let (found, opened) = ns.names.create_unnamed(caller, FileId(parent), perm, flags.bits() as i32)?;
            let opened = self.opened(&opened, flags);
            self.tally_open(caller, found.id, &opened, (flags, true), begun);
            Ok((self.entry(&found), opened))
        })
    }

    fn read(&self, caller: &Caller, id: u64, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let begun = Instant::now();
        let read = self.serve(|ns| ns.files.transfers.read(fh, offset, buffer));
        if let Ok(bytes) = &read {
            self.tally.read(&Request::of(caller, (id, fh), offset, *bytes, begun));
        }
        read
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
        let begun = Instant::now();
        let written = self.serve(|ns| {
            let count = ns.files.transfers.write(fh, offset, bytes, flags.open & libc::O_APPEND as u32 != 0)?;
            if flags.kill_suidgid {
                ns.attributes.clear_suidgid(caller, FileId(id));
            }
            Ok(count)
        });
        let written = match written {
            Ok(count) if is_synchronous(flags.open) && !flags.cached => {
                self.change(|ns| ns.files.syncs.fsync(fh, false)).map(|()| count)
            }
            written => written,
        };
        if let Ok(count) = &written {
            self.tally.wrote(&Request::of(caller, (id, fh), offset, *count, begun));
        }
        written
    }

    fn flush(&self, _caller: &Caller, id: u64, fh: u64, lock_owner: u64) -> FsResult<()> {
        self.serve(|ns| ns.file_locks.unlock_owner(FileId(id), fh, lock_owner));
        Ok(())
    }

    fn release(&self, id: u64, fh: u64, _flags: ReleaseFlags) {
        // Unlocking comes first: the next program may want the lock already. A writable descriptor of the agent would
        // keep the file from being sealed.
        self.namespace.file_locks.unlock_handle(FileId(id), fh);
        self.tally.traces.released(fh);
        if self.tally.is_estimated(fh) {
            let size_bytes =
                self.namespace.attributes.getattr(FileId(id), Some(fh)).map_or(0, |answer| answer.attr.size_bytes);
            self.tally.released(fh, size_bytes);
        }
        self.change(|ns| ns.files.opener.release(fh));
    }

    fn fsync(&self, caller: &Caller, _id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        let begun = Instant::now();
        let synced = self.change(|ns| ns.files.syncs.fsync(fh, data_only));
        self.tally.synced(caller.pid, begun.elapsed());
        synced
    }

    fn fallocate(&self, _caller: &Caller, _id: u64, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        self.serve(|ns| ns.files.transfers.allocate(fh, mode, offset, length))
    }

    fn lseek(&self, _caller: &Caller, _id: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        self.serve(|ns| ns.files.transfers.seek(fh, offset, whence as i32))
    }

    fn copy_file_range(
        &self,
        _caller: &Caller,
        from: FilePlace,
        to: FilePlace,
        length: u64,
        _flags: u64,
    ) -> FsResult<u64> {
        self.serve(|ns| ns.files.transfers.copy_range(from.fh, from.offset, to.fh, to.offset, length))
    }

    fn opendir(&self, caller: &Caller, id: u64) -> FsResult<OpenedDirectory> {
        self.serve(|ns| {
            let opened = ns.listings.opendir(caller, FileId(id))?;
            let keep_cache = opened.keep_cache && !(opened.bare && self.unshimmed.has(caller.pid));
            Ok(OpenedDirectory { fh: opened.fh, cache: opened.cache, keep_cache })
        })
    }

    fn readdir(&self, _caller: &Caller, id: u64, fh: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()> {
        self.list(id, fh, offset, |_, at, next| sink.add(at.ino, next, at.kind, at.name))
    }

    /// Includes only attributes that need no question: a listing must not cost one question per file of the store.
    fn readdirplus(
        &self,
        caller: &Caller,
        id: u64,
        fh: u64,
        offset: u64,
        sink: &mut DirectoryPlusSink<'_>,
    ) -> FsResult<()> {
        // The shim reads them from the index. For a process with the shim the kernel would only create inodes that no
        // process needs.
        let are_shown = self.namespace.metadata.lists_bare(FileId(id), !self.unshimmed.has(caller.pid));
        self.list(id, fh, offset, |ns, at, next| {
            if !sink.fits(at.name) {
                return true;
            }
            let bare = next <= 2 || are_shown && at.kind == Kind::File;
            let found = if bare { None } else { ns.resolver.lookup_known(caller, FileId(id), at.name) };
            match found {
                Some(found) => sink.add(&named(self.entry(&found), at.name), next, at.name),
                None => sink.add_bare(at.ino, next, at.kind, at.name),
            }
        })
    }

    fn releasedir(&self, _id: u64, fh: u64) {
        self.namespace.listings.releasedir(fh);
    }

    fn fsyncdir(&self, _caller: &Caller, id: u64, _fh: u64, _data_only: bool) -> FsResult<()> {
        self.change(|ns| ns.files.syncs.fsync_dir(FileId(id)))
    }

    fn statfs(&self, _caller: &Caller, _id: u64) -> FsResult<SpaceReport> {
        self.serve(|ns| {
            let space = ns.attributes.statfs()?;
            let block = u64::from(space.block_bytes.max(512));
            Ok(SpaceReport {
                block_bytes: space.block_bytes,
                fragment_bytes: space.block_bytes,
                blocks: space.total_bytes / block,
                blocks_free: space.free_bytes / block,
                blocks_available: space.available_bytes / block,
                files: space.inodes_total,
                files_free: space.inodes_free,
                name_bytes_max: space.name_bytes_max,
            })
        })
    }

    fn getxattr(&self, _caller: &Caller, id: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        self.serve(|ns| ns.xattrs.getxattr(FileId(id), name))
    }

    fn setxattr(&self, caller: &Caller, id: u64, name: &[u8], value: &[u8], flags: u32) -> FsResult<()> {
        if self.done_before().is_some() {
            return Ok(());
        }
        self.change(|ns| ns.xattrs.setxattr(caller, FileId(id), name, value, flags as i32))
    }

    fn listxattr(&self, _caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        self.serve(|ns| ns.xattrs.listxattr(FileId(id)))
    }

    fn removexattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<()> {
        if self.done_before().is_some() {
            return Ok(());
        }
        self.change(|ns| ns.xattrs.removexattr(caller, FileId(id), name))
    }

    fn getlk(&self, _caller: &Caller, id: u64, asked: &LockRequest) -> FsResult<FileLock> {
        self.serve(|ns| ns.file_locks.lock_in_the_way(FileId(id), asked))
    }

    fn setlk(&self, _caller: &Caller, id: u64, asked: &LockRequest, wait: bool) -> FsResult<()> {
        if asked.lock.kind != LockKind::None {
            wait_long();
        }
        if wait {
            // Not counted as service: the other program causes the time.
            return self.namespace.file_locks.lock(FileId(id), asked, wait);
        }
        self.serve(|ns| ns.file_locks.lock(FileId(id), asked, wait))
    }

    fn access(&self, caller: &Caller, id: u64, mask: u32) -> FsResult<()> {
        self.serve(|ns| ns.attributes.access(caller, FileId(id), mask))
    }
}

/// `O_DSYNC`, `O_SYNC`, or `pwritev2` with `RWF_DSYNC`.
fn is_synchronous(flags: u32) -> bool {
    flags & libc::O_DSYNC as u32 != 0
}
