//! New names: files, directories, links, special files, and files without a name.
//!
//! Invariant: a name is bound once. Two doors that make the same name at the same time agree on one of the files
//! (`making`). The danger that this avoids: two files under one name, or a file that exists only for one door.

use surgetank_policy::placement::AskKind;
use surgetank_state::{Inode, Name, OWN_INODE_BASE, PlainId, Tree};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, Mode, OpKind, RunId, Timestamp};
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::content::{Content, Location, Open, Placed};
use crate::files::dispatcher::Dispatcher;
use crate::files::{Opened, Via, Wish};
use crate::namespace::names::Names;
use crate::namespace::resolve::Found;

/// The size of a directory that the agent made. File systems differ; programs only need a value other than 0.
const DIR_BYTES: u64 = 4096;

/// A file that was just made.
pub(crate) struct Made {
    pub id: FileId,
    pub attr: Attr,
    pub open: Arc<Open>,
    /// The descriptor with which the plain file was made, if it is direct.
    pub plain: Option<std::fs::File>,
}

impl Names {
    fn fresh_attr(id: FileId, kind: Kind, perm: u32, cred: surgetank_store::Cred) -> Attr {
        let now = clock::now();
        Attr {
            kind,
            perm: perm & 0o7777,
            uid: cred.uid,
            gid: cred.gid,
            ino: OWN_INODE_BASE + id.0,
            links: if kind == Kind::Directory { 2 } else { 1 },
            size_bytes: 0,
            blocks: 0,
            device: 0,
            atime: now,
            mtime: now,
            ctime: now,
        }
    }

    /// `EEXIST` if the name is taken. After success the agent knows that the name is free.
    pub(crate) fn must_be_absent(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<()> {
        if name.is_empty() {
            return Err(Errno::NOENT.into());
        }
        if name.starts_with(surgetank_types::model::STORE_TEMPORARY_PREFIX) {
            // The agent uses these names; a program's file would be hidden.
            return Err(Errno::INVAL.into());
        }
        match self.resolver.resolve(caller, dir, name) {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(fault) if fault.errno == Errno::NOENT => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Creates and opens. With `O_EXCL` an existing name is an error; without, it is opened.
    pub fn create(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        perm: u32,
        flags: i32,
    ) -> FsResult<(Found, Opened)> {
        loop {
            match self.must_be_absent(caller, dir, name) {
                Ok(()) => {}
                Err(fault) if fault.errno == Errno::EXIST && flags & libc::O_EXCL == 0 => {
                    let known = self.resolver.resolve(caller, dir, name);
                    let reads = flags & (libc::O_ACCMODE | libc::O_TRUNC) == libc::O_RDONLY;
                    if let (Ok(id), true) = (&known, reads) {
                        self.dispatcher.before_read_locked(caller, *id)?;
                    }
                    let opened = known.and_then(|id| {
                        let open = || self.opener.open_file(caller, id, flags);
                        let opened = if reads { Dispatcher::unasked(open) } else { open() }?;
                        self.resolver.found(id).map(|found| (found, opened))
                    });
                    match opened {
                        // The file lost its name meanwhile: so create one after all.
                        Err(fault) if matches!(fault.errno, Errno::NOENT | Errno::STALE) => {}
                        opened => return opened,
                    }
                }
                Err(fault) => return Err(fault),
            }
            self.permit_change(caller, dir)?;
            match self.create_absent(caller, dir, name, perm, flags) {
                // Another door was faster.
                Err(fault) if fault.errno == Errno::EXIST && flags & libc::O_EXCL == 0 => {}
                other => return other,
            }
        }
    }

    fn create_absent(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        perm: u32,
        flags: i32,
    ) -> FsResult<(Found, Opened)> {
        let run = self.runs.run(caller);
        let fsync = || {
            let path = self.metadata.read_tree().child_path(dir, name)?;
            self.rules.decide(&path).fsync.or(self.config.fsync)
        };
        let via = Via::of_flags(flags, fsync);
        let Made { id, attr, open, .. } = self.make_file(caller, (dir, name), perm, run, via)?;
        if open.direct && flags & libc::O_ACCMODE != libc::O_RDONLY {
            self.metadata.directly_written(&open);
        }
        let ttl = if open.direct { crate::metadata::TTL_WRITTEN } else { self.ttl_of_new() };
        let opened = self.opener.register(open, true, flags, run);
        Ok((Found { id, attr, ttl }, opened))
    }

    /// So long the kernel believes what it has just made. (In a pool another member's program may rename it.)
    fn ttl_of_new(&self) -> std::time::Duration {
        if self.config.pool.is_some() { self.config.store_ttl } else { crate::metadata::TTL_OURS }
    }

    /// Makes a file under a free name, open for one writer.
    pub(crate) fn make_file(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        perm: u32,
        run: RunId,
        via: Via,
    ) -> FsResult<Made> {
        let name = Name::from(name);
        let (id, path, decision) = {
            let mut tree = self.metadata.write_tree();
            let path = tree.child_path(dir, &name).ok_or(Errno::NOENT)?;
            self.may_be_called(&tree, dir, &name)?;
            let decision = self.metadata.decided_new(&tree, dir, &path);
            let id = tree.new_id();
            // Another maker of the same name starts again.
            tree.making.insert((dir, name.clone()), id);
            (id, path, decision)
        };
        let wish = Wish::of(decision);
        let placed = self.room_waits.with_room((None, &path, run), || {
            self.placer.place(
                &path,
                id,
                AskKind::Create { expected: self.placer.expected(&path, &wish) },
                &wish,
                perm,
                via,
            )
        });
        let plain_stat = placed.as_ref().ok().and_then(Placed::stat_on_tier);
        // Another door that finds the file waits until it is open.
        let _inode = self.metadata.lock_inode(id);
        let mut tree = self.metadata.write_tree();
        // Under its name on the same device, the plain file keeps processes from making another one. Anywhere else it
        // does not.
        if let (Some(device), Ok(placed)) = (tree.delegations.device(dir), &placed)
            && !(placed.content.location == Location::Tier(device)
                && tree.child_path(dir, &name).as_ref() == Some(&placed.at))
        {
            self.metadata.recall_delegation(&mut tree, Some(dir));
        }
        let place = (dir, name);
        let own_turn = tree.making.get(&place) == Some(&id);
        if own_turn {
            tree.making.remove(&place);
        }
        let name = place.1;
        let mut placed = placed?;
        let plain = placed.made.take();
        let free = tree.require_absent(dir, &name);
        if let Err(fault) = free.and_then(|()| if own_turn { Ok(()) } else { Err(Errno::EXIST.into()) }) {
            self.placer.undo_placed(&mut tree, &placed);
            return Err(fault);
        }
        let mut inode = Self::fresh_file(&tree, caller, (dir, &name), (id, perm), plain_stat.as_ref());
        inode.run = run;
        inode.lookups = u32::from(via.is_mount());
        tree.insert(id, inode);
        // The kernel sends no request for a file that the shim will write, so the file is open before it is visible.
        let adopted = self.placer.adopt(&mut tree, id, &placed).and_then(|()| match via {
            Via::Shim(_) | Via::Only(_) => self.attach_new(id, &placed, via).map(Some),
            Via::Mount | Via::Synced => Ok(None),
        });
        let early = match adopted {
            Ok(early) => early,
            Err(fault) => {
                tree.remove(id);
                self.placer.undo_placed(&mut tree, &placed);
                if let Location::Tier(device) = placed.content.location {
                    drop(self.tiers.device(device).unlink_if(&path, placed.plain.ino));
                }
                return Err(fault);
            }
        };
        crash_point!("make.adopted");
        tree.bind(dir, &name, |entry| entry.set_logical(Some(id)));
        tree.own(id);
        tree.named(id, &path);
        tree.txn.entry(dir, &name);
        tree.touch_dir(dir, 0);
        tree.txn.carried_out(id);
        self.metadata.commit(&mut tree);
        let attr = tree.get(id).map(|inode| inode.attr).ok_or(Errno::NOENT)?;
        crash_point!("make.written_down");
        drop(tree);
        let open = match early {
            Some(open) => open,
            None => self.attach_new(id, &placed, via)?,
        };
        Ok(Made { id, attr, open, plain })
    }

    /// The inode of a new file that is open for writing. Its times are the plain file's, from the first answer on. The kernel's
    /// clock is behind the agent's, and times must not go back.
    fn fresh_file(
        tree: &Tree,
        caller: &Caller,
        (dir, name): (FileId, &Name),
        (id, perm): (FileId, u32),
        plain: Option<&rustix::fs::Stat>,
    ) -> Inode {
        let (cred, _) = tree.owner_for_new(caller, dir, Kind::File, perm);
        let mut attr = Self::fresh_attr(id, Kind::File, perm, cred);
        if let Some(stat) = plain {
            attr.mtime = Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32);
            attr.atime = Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32);
        }
        let mut inode = Inode::new(attr);
        inode.logical = Some((dir, name.clone()));
        inode.sealed = false;
        inode.handles = 1;
        inode
    }

    /// Opens it for one writer. (A file created for reading only still has to be sealed once.)
    fn attach_new(&self, id: FileId, placed: &Placed, via: Via) -> FsResult<Arc<Open>> {
        let open = Arc::new(self.placer.bound(id, placed, 0, via)?);
        open.users.lock().unwrap_or_else(surgetank_types::sync::PoisonError::into_inner).writers = 1;
        if !via.is_mount() {
            open.granted.store(true, Ordering::Relaxed);
            self.metadata.directly_written(&open);
        }
        self.metadata.opens().insert(id, open.clone());
        Ok(open)
    }

    /// `O_TMPFILE`: a file without a name, which link may give one.
    pub fn create_unnamed(&self, caller: &Caller, dir: FileId, perm: u32, flags: i32) -> FsResult<(Found, Opened)> {
        self.permit_change(caller, dir)?;
        let run = self.runs.run(caller);
        let id = self.metadata.write_tree().new_id();
        let kind = AskKind::Create { expected: surgetank_policy::placement::Expected::Unknown };
        let wish = Wish::only(Mode::Remove);
        let placed = self
            .room_waits
            .with_room((None, b"", run), || self.placer.place(b"", id, kind, &wish, perm, Via::Mount))?;
        let mut tree = self.metadata.write_tree();
        let (cred, _) = tree.owner_for_new(caller, dir, Kind::File, perm);
        let mut attr = Self::fresh_attr(id, Kind::File, perm, cred);
        attr.links = 0;
        let mut inode = Inode::new(attr);
        inode.sealed = false;
        inode.run = run;
        inode.handles = 1;
        inode.lookups = 1;
        inode.owned = true;
        tree.insert(id, inode);
        self.placer.adopt(&mut tree, id, &placed)?;
        // Processes that have it open continue if the agent is killed.
        tree.txn.file(id);
        drop(tree);
        // Mediated, so that link can name it on whichever device it is by then.
        let content = Content { file: Arc::new(placed.writable()?), location: placed.content.location, writable: true };
        if let Location::Tier(device) = content.location {
            self.tiers.device(device).unreserve(placed.reserved_bytes);
        }
        let open = Arc::new(Open::new(id, content, false, None, 0));
        open.written.store(true, Ordering::Relaxed);
        open.users.lock().unwrap_or_else(surgetank_types::sync::PoisonError::into_inner).writers = 1;
        self.metadata.opens().insert(id, open.clone());
        let opened = self.opener.register(open, true, flags, run);
        Ok((Found { id, attr, ttl: self.ttl_of_new() }, opened))
    }

    /// Makes a directory. Errors: EEXIST, permissions, the store.
    pub fn mkdir(&self, caller: &Caller, dir: FileId, name: &[u8], perm: u32) -> FsResult<Found> {
        self.make_node(caller, (dir, name), Kind::Directory, perm, 0, None)
    }

    /// Makes a symbolic link. Errors: EEXIST, permissions, the store.
    pub fn symlink(&self, caller: &Caller, dir: FileId, name: &[u8], target: &[u8]) -> FsResult<Found> {
        self.make_node(caller, (dir, name), Kind::Symlink, 0o777, 0, Some(target))
    }

    /// Fifos, sockets, devices, empty regular files.
    pub fn mknod(&self, caller: &Caller, dir: FileId, name: &[u8], mode: u32, device: u64) -> FsResult<Found> {
        match Kind::from_mode(mode) {
            Kind::Directory | Kind::Symlink => Err(Errno::INVAL.into()),
            Kind::File => {
                let (found, opened) = self.create(caller, dir, name, mode & 0o7777, libc::O_WRONLY | libc::O_EXCL)?;
                self.opener.release(opened.handle);
                let attr = self.attributes.getattr(found.id, None)?.attr;
                Ok(Found { attr, ..found })
            }
            kind => self.make_node(caller, (dir, name), kind, mode & 0o7777, device, None),
        }
    }

    fn make_node(
        &self,
        caller: &Caller,
        (dir, name): (FileId, &[u8]),
        kind: Kind,
        perm: u32,
        device: u64,
        target: Option<&[u8]>,
    ) -> FsResult<Found> {
        // A new directory's content is the agent's alone. So the negative cache is not enough here: the store is asked
        // whether another client has made the directory.
        if kind == Kind::Directory
            && let Some(d) = self.metadata.write_tree().dir_mut(dir)
        {
            d.negative_cache.may_be_there(name);
        }
        self.must_be_absent(caller, dir, name)?;
        self.permit_change(caller, dir)?;
        let run = self.runs.run(caller);
        let name = Name::from(name);
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, Some(dir));
        tree.require_absent(dir, &name)?;
        crash_point!("name.decided");
        self.may_be_called(&tree, dir, &name)?;
        let path = tree.child_path(dir, &name).ok_or(Errno::NOENT)?;
        let decision = self.metadata.decided_new(&tree, dir, &path);
        let last = self.runs.is_last(&decision);
        let id = tree.new_id();
        let (cred, perm) = tree.owner_for_new(caller, dir, kind, perm);
        let mut attr = Self::fresh_attr(id, kind, perm, cred);
        attr.device = device;
        if let Some(target) = target {
            attr.size_bytes = target.len() as u64;
        }
        let mut inode = Inode::new(attr);
        inode.logical = Some((dir, name.clone()));
        inode.run = run;
        inode.lookups = 1;
        inode.version = 1;
        if let Some(target) = target {
            inode.extra_mut().target = Some(Box::from(target));
        }
        if let Some(d) = inode.dir.as_mut() {
            d.complete = true;
            inode.attr.size_bytes = DIR_BYTES;
            inode.attr.blocks = DIR_BYTES / 512;
        }
        // The answer has its attributes.
        inode.enters_kernel();
        tree.insert(id, inode);
        tree.bind(dir, &name, |entry| entry.set_logical(Some(id)));
        tree.own(id);
        if kind == Kind::Directory {
            tree.named(id, &path);
        }
        tree.txn.entry(dir, &name);
        // A socket has no meaning in another place: it lives as long as its mount.
        if kind == Kind::Directory {
            tree.hasten_dirs(dir, last);
            let kind = OpKind::Publish { file: id, dir, name: Box::from(&*name), over: tree.planned(dir, &name) };
            let seq = self.metadata.queue(&mut tree, kind, run, last, 0);
            tree.bind(dir, &name, |entry| entry.set_planned(Some(id)));
            if let Some(inode) = tree.get_mut(id) {
                inode.publish = Some(seq);
            }
        } else if kind != Kind::Socket {
            self.metadata.queue_publish(&mut tree, id);
        }
        tree.touch_dir(dir, i32::from(kind == Kind::Directory));
        tree.txn.carried_out(id);
        self.metadata.commit(&mut tree);
        crash_point!("node.written_down");
        drop(tree);
        self.metadata.nudge();
        Ok(Found { id, attr, ttl: self.ttl_of_new() })
    }

    /// Gives a file another name. Errors: EEXIST, EPERM for a directory or a store without hard links, permissions, the
    /// store.
    pub fn link(&self, caller: &Caller, id: FileId, dir: FileId, name: &[u8]) -> FsResult<Found> {
        self.must_be_absent(caller, dir, name)?;
        self.permit_change(caller, dir)?;
        let name = Name::from(name);
        let run = self.runs.run(caller);
        self.await_stays(&[id])?;
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, Some(dir));
        tree.require_absent(dir, &name)?;
        crash_point!("name.decided");
        self.may_be_called(&tree, dir, &name)?;
        let path = tree.child_path(dir, &name).ok_or(Errno::NOENT)?;
        let inode = tree.get_mut(id).ok_or(Errno::NOENT)?;
        if inode.is_dir() {
            return Err(Errno::PERM.into());
        }
        let unnamed = inode.logical.is_none();
        if unnamed && inode.handles == 0 {
            return Err(Errno::NOENT.into());
        }
        // Its first name is not a link yet.
        if !(self.store.features().hard_links || unnamed && inode.applied.is_none()) {
            return Err(Errno::PERM.into());
        }
        // A file that lost its last name has a hidden plain file. It gets its name first, because that can fail.
        if let Some(PlainId { device, .. }) = inode.replica.filter(|_| unnamed) {
            self.tiers.device(device).rename(&crate::files::hidden_name(id), &path)?;
        }
        inode.attr.links += 1;
        inode.attr.ctime = clock::now();
        if unnamed {
            inode.logical = Some((dir, name.clone()));
        } else {
            inode.extra_mut().more_names.push((dir, name.clone()));
        }
        tree.bind(dir, &name, |entry| entry.set_logical(Some(id)));
        tree.own(id);
        tree.own(dir);
        tree.named(id, &path);
        tree.txn.entry(dir, &name);
        if unnamed {
            // A file with a writer is published when that writer closes; without a writer, now.
            let sealed = tree.get(id).is_some_and(|inode| inode.sealed);
            if sealed {
                self.metadata.queue_publish(&mut tree, id);
            }
        } else if tree.in_store(id) {
            let last = false;
            tree.hasten_dirs(dir, last);
            self.metadata.queue(&mut tree, OpKind::Link { file: id, dir, name: Box::from(&*name) }, run, last, 0);
            tree.bind(dir, &name, |entry| entry.set_planned(Some(id)));
        } else if let Some(seq) = tree.get(id).and_then(|inode| inode.publish)
            && tree.take_back(id, seq)
        {
            self.metadata.queue_publish(&mut tree, id);
        }
        tree.touch_dir(dir, 0);
        tree.txn.carried_out(id);
        self.metadata.commit(&mut tree);
        crash_point!("link.written_down");
        let inode = tree.get_mut(id).ok_or(Errno::NOENT)?;
        inode.lookups += 1;
        let attr = self.open_files.attr_of(id, inode);
        // A process may be writing it without the kernel's knowledge.
        let ttl = self.metadata.ttl(id, inode);
        drop(tree);
        self.metadata.nudge();
        Ok(Found { id, attr, ttl })
    }
}
