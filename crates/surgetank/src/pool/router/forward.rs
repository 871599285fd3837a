//! The kernel's requests about names and attributes: here, or at another member.

use std::time::Duration;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use surgetank_core::namespace::pooled::Place;
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, FileLock, Kind, LockRequest};

use super::super::call::{Answer, Ask, Change, Found};
use super::remote::{At, Remote};
use super::{Does, PATIENCE, Router, Way};
use super::{
    adopt, bundles, changes, closing, copies, delegated, delegating, here, homes, lengths, lost, moves, names, pieces,
    rights, shim,
};
use crate::mount::request::{FilePlace, ReleaseFlags};
use crate::mount::{
    Agreed, Attributes, DirectorySink, Entry, Filesystem, Looked, Notifier, Opened, OpenedDirectory, SetAttr,
    SpaceReport, WriteFlags, wait_long,
};

/// An attribute of files for the pool's process: which member has the content.
const HOME: &[u8] = b"system.surgetank.home";

/// An attribute by which it announces the end of a writer at the home.
const CONTENT: &[u8] = b"system.surgetank.content";

/// How names of attributes begin that users may set.
const USER: &[u8] = b"user.";

/// What is not a directory of another member is not believed longer than the answer takes.
const TTL: Duration = Duration::ZERO;

pub(super) fn unexpected<T>(answer: Answer) -> FsResult<T> {
    tracing::error!(?answer, "another member answered something else than was asked");
    Err(Fault::from(Errno::PROTO))
}

impl<F: Filesystem> Router<F> {
    pub(super) fn entry(&self, at: At, found: &Found) -> Entry {
        let id = self.remote.number_of(at.member, found.node);
        Entry { id, generation: 0, attr: self.shown(found.attr), entry_ttl: found.ttl, attr_ttl: found.ttl }
    }

    pub(super) fn shown(&self, attr: Attr) -> Attr {
        let (uid, gid) = self.only_ids.unwrap_or((attr.uid, attr.gid));
        Attr { uid, gid, ..attr }
    }

    fn made(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Entry> {
        match self.remote.ask_once(caller, at, ask)? {
            Answer::Found(found) => Ok(self.entry(at, &found)),
            answer => unexpected(answer),
        }
    }

    pub(super) fn done(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<()> {
        match self.remote.ask_once(caller, at, ask)? {
            Answer::Done => Ok(()),
            answer => unexpected(answer),
        }
    }

    pub(super) fn attributes_there(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Attributes> {
        match self.remote.ask_once(caller, at, ask)? {
            Answer::Attributes { attr, ttl } => Ok(Attributes { attr: self.shown(attr), ttl }),
            answer => unexpected(answer),
        }
    }

    /// Makes a name: in a directory of this member, or of another one.
    fn make(
        &self,
        caller: &Caller,
        (parent, name): (u64, &[u8]),
        here: impl Fn(&F) -> FsResult<Entry>,
        ask: impl Fn(u64) -> Ask,
    ) -> FsResult<Entry> {
        let way = || self.way(caller, parent, Does::Changes);
        let make = |door: &F| lost::making(self, caller, (parent, name), || here(door));
        let here = |door: &F| delegating::changing(self, parent, || make(door));
        self.within(caller, way, here, |at| self.made(caller, at, ask(at.node)))
    }

    fn remove(
        &self,
        caller: &Caller,
        parent: u64,
        here: impl Fn(&F) -> FsResult<()>,
        ask: impl Fn(u64) -> Ask,
    ) -> FsResult<()> {
        let way = || self.way(caller, parent, Does::Changes);
        let here = |door: &F| delegating::changing(self, parent, || here(door));
        self.within(caller, way, here, |at| self.done(caller, at, ask(at.node)))
    }

    /// No name is believed for longer than what the store says. The attributes of another member's directory are asked
    /// there.
    /// `is_decided_here`: the directory above has no owner, or this member. (To remove or rename the name, it is claimed, and then
    /// forgotten here; or a request here does it.)
    fn with_its_owner(&self, looked: Looked, is_decided_here: bool) -> Looked {
        let Looked::Found(mut entry) = looked else { return looked };
        let believed = self.namespace.base.config.store_ttl;
        entry.entry_ttl = entry.entry_ttl.min(believed);
        if entry.attr.kind == Kind::Directory
            && let Some(Place::OfTheStore(path)) = self.namespace.pooled.place_of(FileId(entry.id))
        {
            // (Before the owner is looked up: a claim that comes now waits until the kernel has forgotten.)
            self.believed.note(&path);
            match self.link.owner(&path) {
                super::Owner::TheStore | super::Owner::Us => {}
                _ if is_decided_here => entry.attr_ttl = TTL,
                // (Its owner may remove it.)
                _ => (entry.entry_ttl, entry.attr_ttl) = (TTL, TTL),
            }
        }
        Looked::Found(entry)
    }

    pub(super) fn directory_at(&self, parent: u64, name: &[u8]) -> Option<FileId> {
        let child = self.namespace.pooled.child_of(FileId(parent), name)?;
        (self.namespace.pooled.kind_of(child) == Some(Kind::Directory)).then_some(child)
    }

    /// A directory has another name, another mode, or none of both: waits until no member believes the old ones.
    pub(super) fn await_seen(&self, caller: &Caller, dir: FileId) {
        wait_long();
        self.link.await_seen(dir.0, caller.pid, PATIENCE);
    }
}

impl<F: Filesystem> Filesystem for Router<F> {
    fn started(&self, notifier: &Notifier, agreed: &Agreed) {
        self.delegated.notifies(notifier);
        self.door.started(notifier, agreed);
    }
    fn recall(&self, id: u64) {
        if self.remote.at(id).is_none() {
            self.door.recall(id);
        }
    }
    fn ended(&self) {
        self.door.ended();
    }

    fn lookup(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<Looked> {
        let ask = |at: At| {
            let keep = self.remote.is_replaced(at.member, at.node, name);
            let answer = names::look_up(self, caller, at, (name, keep));
            delegated::answered(self, at, Some(&answer));
            answer
        };
        let asked = |at: At| match (self.remote.answers(), ask(at)) {
            (before, Ok(Answer::Found(found))) => {
                self.remote.written.named(at.member, found.node, at.node, name);
                let entry = self.entry(at, &found);
                names::found(self, caller, &entry, before);
                self.delegated.is_counted((at, found.node), &entry);
                Ok(Looked::Found(entry))
            }
            (_, Ok(Answer::OfTheStore)) if self.remote.at(parent).is_none() => {
                self.door.lookup(caller, parent, name).map(|looked| self.with_its_owner(looked, false))
            }
            (_, Ok(answer)) => unexpected(answer),
            (_, Err(fault)) if fault.errno == Errno::NOENT => Ok(Looked::Missing { ttl: TTL }),
            (_, Err(fault)) => Err(fault),
        };
        let there = |at: At| {
            // (A file that was gone when it was opened is looked up at its owner.)
            let known = if self.remote.is_stale() { None } else { delegated::look_up(self, caller, at, name) };
            known.map_or_else(|| asked(at), Ok)
        };
        if let Some(answer) = homes::look_up_directory(self, caller, (parent, name)) {
            return answer;
        }
        shim::uses_names(self, caller, parent);
        let way = || self.way(caller, parent, Does::Reads);
        let here = |door: &F| {
            if lost::hides(self, parent, name) {
                return Ok(Looked::Missing { ttl: TTL });
            }
            let looked = door.lookup(caller, parent, name)?;
            Ok(homes::known(self, caller, self.with_its_owner(looked, true)))
        };
        self.within(caller, way, here, there)
    }

    fn forget(&self, id: u64, count: u64) {
        match self.remote.at(id) {
            Some(at) => self.remote.forget(at.member, at.node, self.delegated.forget(id, count)),
            None => {
                self.remote.forget_file(id);
                self.door.forget(id, count);
            }
        }
    }

    fn getattr(&self, caller: &Caller, id: u64, fh: Option<u64>) -> FsResult<Attributes> {
        let handle = fh.and_then(Remote::handle).map(|(_, handle)| handle);
        let looked_up = || names::found_before(self, caller, id).or_else(|| delegated::attributes(self, id));
        if let Some(known) = self.here.made(id, caller).or_else(looked_up) {
            return Ok(known);
        }
        let there = |at: At| here::attributes(self, caller, (id, handle), at);
        let way = || self.way_of(caller, id, Does::Looks);
        let here = |door: &F| Ok(homes::attributes(self, caller, id, door.getattr(caller, id, fh)?));
        let answer = self.within(caller, way, here, there);
        match answer {
            // Open here since before another member removed it.
            Err(fault) if fault.errno == Errno::STALE => match self.remote.at(id) {
                Some(_) if self.remote.has_left(id) => Err(fault),
                Some(_) => bundles::last_attributes(self, id).ok_or(fault),
                None => self.door.getattr(caller, id, fh).map_err(|_| fault),
            },
            answer => answer,
        }
    }

    fn setattr(&self, caller: &Caller, id: u64, change: &SetAttr) -> FsResult<Attributes> {
        moves::is_it_still(self, id, change)?;
        let change = &homes::change_here(self, change)?;
        let handle = change.fh.and_then(|fh| Remote::handle(fh).or(homes::at_name(fh))).map(|(_, handle)| handle);
        let there = |at: At| {
            let change = Change::of(change);
            self.attributes_there(caller, at, Ask::SetAttributes { node: at.node, handle, change })
        };
        let way = || self.way_of(caller, id, Does::Changes);
        let here = |_: &F| {
            let changed = homes::set(self, caller, id, change);
            if delegating::may_have_changed(&changed) {
                delegating::changed(self, id);
            }
            let changed = changed?;
            if changed.attr.kind == Kind::Directory {
                self.await_seen(caller, FileId(id));
            }
            Ok(changed)
        };
        self.within(caller, way, here, there)
    }

    fn readlink(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        let there = |at: At| match self.remote.ask(caller, at, Ask::ReadLink { node: at.node })? {
            Answer::Bytes(target) => Ok(target),
            answer => unexpected(answer),
        };
        self.within(caller, || self.way_of(caller, id, Does::Reads), |door| door.readlink(caller, id), there)
    }

    fn symlink(&self, caller: &Caller, parent: u64, name: &[u8], target: &[u8]) -> FsResult<Entry> {
        let ask = |parent| Ask::SymbolicLink { parent, name: name.into(), target: target.into() };
        self.make(caller, (parent, name), |door| door.symlink(caller, parent, name, target), ask)
    }

    fn mknod(&self, caller: &Caller, parent: u64, name: &[u8], mode: u32, device: u64) -> FsResult<Entry> {
        let ask = |parent| Ask::MakeNode { parent, name: name.into(), mode, device };
        self.make(caller, (parent, name), |door| door.mknod(caller, parent, name, mode, device), ask)
    }

    fn mkdir(&self, caller: &Caller, parent: u64, name: &[u8], perm: u32) -> FsResult<Entry> {
        let ask = |parent| Ask::MakeDirectory { parent, name: name.into(), perm };
        self.make(caller, (parent, name), |door| door.mkdir(caller, parent, name, perm), ask)
    }

    fn unlink(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        let ask = |parent| Ask::Unlink { parent, name: name.into() };
        self.remove(caller, parent, |_| copies::unlink(self, caller, (parent, name)), ask)
    }

    fn rmdir(&self, caller: &Caller, parent: u64, name: &[u8]) -> FsResult<()> {
        changes::remove_directory(self, caller, parent, name)
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
        changes::rename(self, caller, &adopt::Names { from: (parent, name), to: (new_parent, new_name), flags })
    }

    fn link(&self, caller: &Caller, id: u64, new_parent: u64, new_name: &[u8]) -> FsResult<Entry> {
        let way = || match (self.way_of(caller, id, Does::Changes)?, self.way(caller, new_parent, Does::Changes)?) {
            (Way::There(file), Way::There(to)) if file.member == to.member => Ok(Way::There(file)),
            (Way::There(_), _) | (_, Way::There(_)) => Err(Errno::XDEV.into()),
            (file, _) => Ok(file),
        };
        let there = |file: At| {
            let Way::There(to) = self.way(caller, new_parent, Does::Changes)? else {
                return Err(super::NOT_OWNER.into());
            };
            self.made(caller, to, Ask::Link { node: file.node, new_parent: to.node, new_name: new_name.into() })
        };
        let make = |door: &F| {
            let linked = door.link(caller, id, new_parent, new_name)?;
            delegating::changed(self, id);
            Ok(linked)
        };
        let here = |door: &F| lost::making(self, caller, (new_parent, new_name), || make(door));
        self.within(caller, way, here, there)
    }

    fn open(&self, caller: &Caller, id: u64, flags: OFlags, kill_suidgid: bool) -> FsResult<Opened> {
        let reads = flags & OFlags::ACCMODE == OFlags::RDONLY && !flags.contains(OFlags::TRUNC);
        let does = if reads { Does::Reads } else { Does::Changes };
        let there = |at: At| {
            let opened = self.open_there(caller, at, flags);
            if opened.as_ref().is_err_and(|fault| fault.errno == Errno::STALE) {
                self.remote.was_replaced(at);
            }
            opened
        };
        // (The kernel looks its name up again, at the member that has it by now.)
        if self.namespace.moves.has_left(FileId(id)) {
            return Err(Errno::STALE.into());
        }
        let way = || self.way_of(caller, id, does);
        let here = |_: &F| {
            let opened = homes::open_name(self, caller, id, flags, kill_suidgid);
            if !reads && delegating::may_have_changed(&opened) {
                delegating::changed(self, id);
            }
            opened
        };
        closing::once_sealed(self, caller, flags, || self.within(caller, way, here, there))
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
        changes::create(self, caller, (parent, name), perm, flags, kill_suidgid)
    }

    fn tmpfile(&self, caller: &Caller, parent: u64, perm: u32, flags: OFlags) -> FsResult<(Entry, Opened)> {
        let way = || self.way(caller, parent, Does::Changes);
        // Programs then make a file with a name.
        self.within(caller, way, |door| door.tmpfile(caller, parent, perm, flags), |_| Err(Errno::OPNOTSUPP.into()))
    }

    fn read(&self, caller: &Caller, id: u64, fh: u64, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let read = bundles::read(self, fh, offset, buffer);
        if let Some(read) = read.or_else(|| pieces::read(self, fh, offset, buffer)) {
            return read;
        }
        match self.handle_there(caller, id, fh, Does::Reads)? {
            Some((member, handle)) => self.read_there(caller, member, handle, offset, buffer),
            None if bundles::is_bundled(fh) => bundles::read_last(self, (id, fh), offset, buffer),
            None => self.door.read(caller, id, fh, offset, buffer),
        }
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
        // (A program may set it after the open. What the kernel wrote to its pages has a place.)
        let at_end = !flags.cached && flags.open & libc::O_APPEND as u32 != 0;
        match self.there(caller, id, fh)? {
            Some((member, handle)) => self.write_there(caller, member, handle, (offset, at_end), bytes),
            None => {
                let local = homes::local(self, id, fh);
                let offset = if at_end { homes::end_at_most(self, local, offset) } else { offset };
                let written = self.door.write(caller, local, fh, offset, bytes, flags)?;
                homes::sync_if_wanted(self, caller, id, fh, flags.open).map(|()| written)
            }
        }
    }

    fn flush(&self, caller: &Caller, id: u64, fh: u64, lock_owner: u64) -> FsResult<()> {
        let there = self.there(caller, id, fh)?;
        if let Some((member, handle)) = there.or_else(|| self.known_there(fh)) {
            self.on_handle(caller, member, Ask::Unlock { handle, owner: lock_owner })?;
        }
        if there.is_none() && !bundles::is_bundled(fh) {
            self.door.flush(caller, homes::local(self, id, fh), fh, lock_owner)?;
        }
        closing::closes(self, caller, id, fh)
    }

    fn release(&self, id: u64, fh: u64, flags: ReleaseFlags) {
        closing::released(self, fh);
        if homes::at_name(fh).is_some() {
            return homes::release(self, id, fh, flags);
        }
        if bundles::is_bundled(fh) {
            return bundles::release(self, id, fh);
        }
        match Remote::handle(fh) {
            Some((member, handle)) => {
                bundles::closed(self, fh, (member, handle));
                self.close_there(member, Ask::Close { handle });
            }
            None => {
                self.end_moved(id, fh);
                lengths::end_name(self, id, fh, flags);
            }
        }
    }

    fn fsync(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        if homes::at_name(fh).is_some() {
            return homes::sync(self, caller, id, (fh, data_only));
        }
        if bundles::is_bundled(fh) {
            return bundles::sync(self, caller, id, (fh, data_only));
        }
        match Remote::handle(fh) {
            Some((member, handle)) => self.on_handle(caller, member, Ask::Sync { handle, data_only }),
            None => lengths::sync_name(self, caller, id, (fh, data_only)),
        }
    }

    fn fallocate(&self, caller: &Caller, id: u64, fh: u64, mode: u32, offset: u64, length: u64) -> FsResult<()> {
        match self.there(caller, id, fh)? {
            Some((member, handle)) => self.on_handle(caller, member, Ask::Allocate { handle, mode, offset, length }),
            None => self.door.fallocate(caller, id, fh, mode, offset, length),
        }
    }

    fn lseek(&self, caller: &Caller, id: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        if let Some(found) = bundles::seek(self, fh, offset, whence) {
            return found;
        }
        match self.handle_there(caller, id, fh, Does::Reads)? {
            Some((member, handle)) => self.seek_there(caller, member, handle, offset, whence),
            None if bundles::is_bundled(fh) => bundles::seek_last(self, (id, fh), offset, whence),
            None => self.door.lseek(caller, id, fh, offset, whence),
        }
    }

    fn copy_file_range(
        &self,
        caller: &Caller,
        from: FilePlace,
        to: FilePlace,
        length: u64,
        flags: u64,
    ) -> FsResult<u64> {
        let is_there = || -> FsResult<bool> {
            let from_there = self.handle_there(caller, from.id, from.fh, Does::Reads)?;
            Ok(from_there.or(self.there(caller, to.id, to.fh)?).is_some())
        };
        if bundles::is_bundled(from.fh) || is_there()? {
            // The kernel reads and writes then.
            return Err(Errno::OPNOTSUPP.into());
        }
        self.door.copy_file_range(caller, from, to, length, flags)
    }

    fn opendir(&self, caller: &Caller, id: u64) -> FsResult<OpenedDirectory> {
        let way = || self.way(caller, id, Does::Reads);
        let here = |door: &F| {
            let opened = door.opendir(caller, id)?;
            // (Another member may claim it, and the listing in the kernel would stay.)
            Ok(OpenedDirectory { cache: false, keep_cache: false, ..opened })
        };
        shim::uses_names(self, caller, id);
        self.within(caller, way, here, |at| self.opendir_there(caller, at))
    }

    fn readdir(&self, caller: &Caller, id: u64, fh: u64, offset: u64, sink: &mut DirectorySink<'_>) -> FsResult<()> {
        if Remote::handle(fh).is_none() && !delegated::is_listed_here(fh) {
            sink.leave_out(lost::left_out(self, id));
            return self.door.readdir(caller, id, fh, offset, sink);
        }
        self.list_there(caller, id, fh, offset, |ino, next, kind, name| sink.add(ino, next, kind, name))
    }

    fn releasedir(&self, id: u64, fh: u64) {
        match Remote::handle(fh) {
            Some((member, handle)) => {
                self.end_listing(fh);
                self.close_there(member, Ask::Close { handle });
            }
            None if delegated::is_listed_here(fh) => self.end_listing(fh),
            None => self.door.releasedir(id, fh),
        }
    }

    fn fsyncdir(&self, caller: &Caller, id: u64, fh: u64, data_only: bool) -> FsResult<()> {
        let way = || self.way(caller, id, Does::Reads);
        let there = |at: At| self.done(caller, at, Ask::SyncDirectory { node: at.node });
        self.within(caller, way, |door| door.fsyncdir(caller, id, fh, data_only), there)
    }

    fn statfs(&self, caller: &Caller, id: u64) -> FsResult<SpaceReport> {
        self.door.statfs(caller, id)
    }

    fn getxattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        if name == rights::AUTHORITY {
            return rights::authority(self, caller, id);
        }
        if name == HOME {
            return closing::home_of(self, caller, id);
        }
        if self.here.has_not(id, name) {
            return Err(Errno::NODATA.into());
        }
        if self.remote.at(id).is_some() && !name.starts_with(USER) {
            // (As every member answers.)
            return Err(surgetank_core::namespace::of_no_user(name).into());
        }
        let there = |at: At| match self.remote.ask(caller, at, Ask::GetXattr { node: at.node, name: name.into() })? {
            Answer::Bytes(value) => Ok(value),
            answer => unexpected(answer),
        };
        let way = || self.way_of(caller, id, Does::Reads);
        self.within(caller, way, |door| door.getxattr(caller, id, name), there)
    }

    fn setxattr(&self, caller: &Caller, id: u64, name: &[u8], value: &[u8], flags: u32) -> FsResult<()> {
        if name == CONTENT {
            return lengths::announced(self, homes::peer(self, caller), id, value);
        }
        let there = |at: At| {
            let ask = Ask::SetXattr { node: at.node, name: name.into(), value: value.into(), flags };
            self.done(caller, at, ask)
        };
        let way = || self.way_of(caller, id, Does::Changes);
        let here = |door: &F| {
            door.setxattr(caller, id, name, value, flags)?;
            delegating::changed(self, id);
            Ok(())
        };
        self.within(caller, way, here, there)
    }

    fn listxattr(&self, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
        let there = |at: At| match self.remote.ask(caller, at, Ask::ListXattrs { node: at.node })? {
            Answer::Bytes(names) => Ok(names),
            answer => unexpected(answer),
        };
        self.within(caller, || self.way_of(caller, id, Does::Reads), |door| door.listxattr(caller, id), there)
    }

    fn removexattr(&self, caller: &Caller, id: u64, name: &[u8]) -> FsResult<()> {
        let there = |at: At| self.done(caller, at, Ask::RemoveXattr { node: at.node, name: name.into() });
        let way = || self.way_of(caller, id, Does::Changes);
        let here = |door: &F| {
            door.removexattr(caller, id, name)?;
            delegating::changed(self, id);
            Ok(())
        };
        self.within(caller, way, here, there)
    }

    fn getlk(&self, caller: &Caller, id: u64, asked: &LockRequest) -> FsResult<FileLock> {
        match self.handle_there(caller, id, asked.handle, Does::Changes)? {
            Some((member, handle)) => self.test_lock_there(caller, member, handle, asked),
            None => self.door.getlk(caller, homes::local(self, id, asked.handle), asked),
        }
    }

    fn setlk(&self, caller: &Caller, id: u64, asked: &LockRequest, wait: bool) -> FsResult<()> {
        match self.handle_there(caller, id, asked.handle, Does::Changes)? {
            Some((member, handle)) => self.lock_there(caller, member, handle, asked, wait),
            None => self.door.setlk(caller, homes::local(self, id, asked.handle), asked, wait),
        }
    }

    fn access(&self, caller: &Caller, id: u64, mask: u32) -> FsResult<()> {
        let there = |at: At| {
            let ask = Ask::Attributes { node: at.node, handle: None };
            let attr = self.attributes_there(caller, at, ask)?.attr;
            if rights::permits(&attr, caller, mask) { Ok(()) } else { Err(Errno::ACCESS.into()) }
        };
        self.within(caller, || self.way_of(caller, id, Does::Reads), |door| door.access(caller, id, mask), there)
    }
}
