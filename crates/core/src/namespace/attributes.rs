//! Attributes: the agent's own for a file of which it has state, the store's for all others. For a file that a process
//! writes directly, each request asks the plain file for its size and times.
//!
//! The danger that this avoids: a change of attributes that overtakes the content, or that never reaches the store.

use std::io;
use std::time::Duration;
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, PoisonError};

use surgetank_store::{Cred, Meta, Space, StorePath};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, OpKind, RunId, Seq, Timestamp};

use super::Namespace;
use super::content::{Content, Location, Open};
use super::inode_locks::BUSY_PATIENCE;
use super::transactions::WriteTree;
use surgetank_state::{Inode, Tree};

/// The changes that a program requests; `None` leaves a field as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttr {
    pub perm: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size_bytes: Option<u64>,
    pub atime: Option<Timestamp>,
    pub mtime: Option<Timestamp>,
    /// The times are "now", for which write permission suffices.
    pub times_now: bool,
    /// Clears set-user-id and set-group-id, because the process that makes the change may not keep them.
    pub kill_suidgid: bool,
}

impl SetAttr {
    /// A chown that names neither owner nor group. The kernel also sends it when a process writes to a file with
    /// set-user-id or set-group-id, allocates or copies into it. This includes writes to its plain file, by
    /// passthrough.
    fn is_empty(&self) -> bool {
        let times = self.atime.is_some() || self.mtime.is_some();
        let ids = self.perm.is_some() || self.uid.is_some() || self.gid.is_some();
        !(times || ids || self.size_bytes.is_some() || self.kill_suidgid)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    pub attr: Attr,
    pub ttl: Duration,
}

/// Set-user-id and set-group-id.
pub(super) const SET_IDS: u32 = 0o6000;

/// The attributes of a file whose plain file was written. The plain file's permissions are the file's, with the owner's
/// right to read and write. Until the file has a version, processes with the shim change permissions and access time on
/// the plain file.
pub(super) fn as_written(inode: &Inode, stat: &rustix::fs::Stat, open: Option<&Open>) -> Attr {
    let mut attr = inode.attr;
    attr.size_bytes = u64::try_from(stat.st_size).unwrap_or(0);
    attr.blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
    attr.mtime = Timestamp::from_parts(stat.st_mtime, stat.st_mtime_nsec as u32);
    attr.ctime = attr.ctime.max(Timestamp::from_parts(stat.st_ctime, stat.st_ctime_nsec as u32));
    let atime = Timestamp::from_parts(stat.st_atime, stat.st_atime_nsec as u32);
    attr.atime = if inode.is_fresh() { atime } else { attr.atime.max(atime) };
    let perm = stat.st_mode & 0o777;
    if inode.is_fresh() && perm != attr.perm & 0o777 | 0o600 {
        attr.perm = attr.perm & 0o7000 | perm;
    }
    if open.is_some_and(|open| open.is_written_by_others(stat)) {
        attr.perm &= !SET_IDS;
    }
    attr
}

impl Namespace {
    /// The caller holds the tree's lock, so the wait for a hanging store has a time limit.
    fn plain_stat(&self, open: &Open) -> Option<rustix::fs::Stat> {
        match open.content() {
            Content { file, location: Location::Tier(_), .. } => rustix::fs::fstat(&*file).ok(),
            Content { file, .. } => self.queries.would_stat(file),
        }
    }

    /// A write through a granted descriptor clears the bits from here on, and no door sees it.
    pub(super) fn watch_set_ids(&self, tree: &Tree, open: &Open) {
        let has_any = tree.get(open.id).is_some_and(|inode| inode.attr.perm & SET_IDS != 0);
        let watched = has_any && open.handed.load(Ordering::Relaxed);
        open.watch_writes_of_others(watched.then(|| self.plain_stat(open)).flatten().as_ref());
    }

    /// The attributes that programs see. The caller holds the tree's lock.
    pub(super) fn attr_of(&self, id: FileId, inode: &Inode) -> Attr {
        if !inode.sealed {
            let open = self.opens().get(&id).cloned();
            if let Some(stat) = open.as_ref().and_then(|open| self.plain_stat(open)) {
                return as_written(inode, &stat, open.as_deref());
            }
        }
        inode.attr
    }

    /// The plain file's attributes, to be recorded in the tree. A process that sets times or mode by name changes the
    /// tree and the plain file under the tree's lock. A look before that, with a record after it, would lose the
    /// change.
    pub(super) fn look_and_lock(
        &self,
        id: FileId,
        file: &std::fs::File,
    ) -> FsResult<(WriteTree<'_>, rustix::fs::Stat)> {
        loop {
            let before = self.read_tree().get(id).map(|inode| inode.attr);
            let stat = rustix::fs::fstat(file)?;
            crash_point!("seal.looked");
            let tree = self.write_tree();
            if tree.get(id).map(|inode| inode.attr) == before {
                return Ok((tree, stat));
            }
        }
    }

    pub fn getattr(&self, id: FileId, _fh: Option<u64>) -> FsResult<Attributes> {
        self.revalidate(id)?;
        let mut tree = self.write_tree();
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        inode.enters_kernel();
        Ok(Attributes { attr: self.attr_of(id, inode), ttl: self.ttl(id, inode) })
    }

    pub fn setattr(&self, caller: &Caller, id: FileId, fh: Option<u64>, change: &SetAttr) -> FsResult<Attributes> {
        if change.is_empty() {
            self.permit_clearing(caller, id)?;
            self.change_meta(caller, id, change)?;
            return self.getattr(id, fh);
        }
        self.permit_setattr(caller, id, fh, change)?;
        if let Some(size_bytes) = change.size_bytes {
            self.truncate(caller, id, fh, size_bytes)?;
        }
        let times = change.atime.is_some() || change.mtime.is_some();
        if change.perm.is_some() || change.uid.is_some() || change.gid.is_some() || times {
            self.change_meta(caller, id, change)?;
        }
        // A change of the owner has cleared them, with the group that the file had before.
        if change.kill_suidgid && change.uid.is_none() && change.gid.is_none() {
            self.clear_suidgid(caller, id);
        }
        self.getattr(id, fh)
    }

    /// A process that may not keep set-user-id and set-group-id has changed the content.
    pub fn clear_suidgid(&self, caller: &Caller, id: FileId) {
        let mut tree = self.write_tree();
        let Some(inode) = tree.get_mut(id) else {
            return;
        };
        let perm = self.perm_without_set_ids(caller, &inode.attr);
        if perm == inode.attr.perm {
            return;
        }
        inode.attr.perm = perm;
        inode.attr.ctime = clock::now();
        tree.txn.file(id);
        self.queue_meta(&mut tree, id, RunId(0), false);
        drop(tree);
        self.nudge();
        // The answer to a write or an open has no attributes.
        self.forget_attributes(id);
    }

    /// The permissions after a change of content or owner, as Linux defines them.
    fn perm_without_set_ids(&self, caller: &Caller, attr: &Attr) -> u32 {
        if attr.kind == Kind::Directory {
            return attr.perm;
        }
        // Without the group's right to execute, the bit stays for callers that may set it.
        let keeps = || {
            let own_group = caller.uid == 0 || caller.gid == attr.gid;
            own_group || self.checks_permissions && self.is_in_group(caller, attr.gid)
        };
        attr.perm & if attr.perm & 0o2010 == 0o2000 && keeps() { !0o4000 } else { !SET_IDS }
    }

    /// A change without a field: only the owner, or a process that has the file open for writing, may clear the bits.
    fn permit_clearing(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        let attr = self.read_tree().get(id).ok_or(Errno::STALE)?.attr;
        let loses = self.perm_without_set_ids(caller, &attr) != attr.perm;
        let writes = || self.open_of(id).is_some_and(|open| open.writers() > 0);
        if loses && caller.uid != 0 && caller.uid != attr.uid && !writes() {
            return Err(Errno::PERM.into());
        }
        Ok(())
    }

    fn permit_setattr(&self, caller: &Caller, id: FileId, fh: Option<u64>, change: &SetAttr) -> FsResult<()> {
        if !self.checks_permissions {
            return Ok(());
        }
        let attr = self.read_tree().get(id).ok_or(Errno::STALE)?.attr;
        // Also where the new owner and group are the old ones.
        if change.uid.is_some() || change.gid.is_some() {
            self.permit_owner(caller, &attr)?;
        }
        if change.size_bytes.is_some() && fh.is_none() {
            self.permit(caller, &attr, 2)?;
        }
        if change.perm.is_some() {
            self.permit_owner(caller, &attr)?;
        }
        if caller.uid != 0 {
            if change.uid.is_some_and(|uid| uid != attr.uid) {
                return Err(Errno::PERM.into());
            }
            if change
                .gid
                .is_some_and(|gid| gid != attr.gid && !(caller.uid == attr.uid && self.is_in_group(caller, gid)))
            {
                return Err(Errno::PERM.into());
            }
        }
        if (change.atime.is_some() || change.mtime.is_some()) && caller.uid != attr.uid && caller.uid != 0 {
            if !change.times_now {
                return Err(Errno::PERM.into());
            }
            self.permit(caller, &attr, 2)?;
        }
        Ok(())
    }

    fn truncate(&self, caller: &Caller, id: FileId, fh: Option<u64>, size_bytes: u64) -> FsResult<()> {
        match self.read_tree().get(id).map(|inode| inode.attr.kind) {
            Some(Kind::File) => {}
            Some(Kind::Directory) => return Err(Errno::ISDIR.into()),
            Some(_) => return Err(Errno::INVAL.into()),
            None => return Err(Errno::STALE.into()),
        }
        let handle = fh.and_then(|fh| self.handle(fh).ok()).filter(|handle| handle.writes);
        match handle {
            Some(handle) => self.truncate_content(&handle.open, size_bytes),
            None => {
                let open = self.open_inode(id, true, size_bytes == 0, self.run(caller), super::files::Via::Mount)?;
                let result = self.truncate_content(&open, size_bytes);
                self.close_inode(&open, true);
                result
            }
        }
    }

    fn change_meta(&self, caller: &Caller, id: FileId, change: &SetAttr) -> FsResult<()> {
        let mut tree = self.write_tree();
        self.recall_delegation(&mut tree, Some(id));
        tree.own(id);
        let open = self.opens().get(&id).cloned();
        let now = clock::now();
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        if let Some(open) = open.as_ref().filter(|open| open.is_watched())
            && self.plain_stat(open).is_some_and(|stat| open.is_written_by_others(&stat))
        {
            inode.attr.perm &= !SET_IDS;
        }
        if let Some(perm) = change.perm {
            inode.attr.perm = perm & 0o7777;
            // As in every file system: only a member of the group may make the file run as that group.
            if self.checks_permissions
                && caller.uid != 0
                && perm & 0o2000 != 0
                && !self.is_in_group(caller, inode.attr.gid)
            {
                inode.attr.perm &= !0o2000;
            }
        }
        if change.uid.is_some() || change.gid.is_some() || change.is_empty() {
            if change.perm.is_none() {
                inode.attr.perm = self.perm_without_set_ids(caller, &inode.attr);
            }
            inode.attr.uid = change.uid.unwrap_or(inode.attr.uid);
            inode.attr.gid = change.gid.unwrap_or(inode.attr.gid);
        }
        if let Some(atime) = change.atime {
            inode.attr.atime = atime;
        }
        if let Some(mtime) = change.mtime {
            inode.attr.mtime = mtime;
            if let Some(dir) = inode.dir.as_mut() {
                dir.times_given = !change.times_now;
            }
        }
        inode.attr.ctime = now;
        if change.mtime.is_some() || change.atime.is_some() || change.perm.is_some() {
            let in_place = self.follow_on_tier(&tree, id, open.as_deref(), change);
            if let (Some(identity), Some(inode)) = (in_place, tree.get_mut(id)) {
                inode.identity = Some(Box::new(identity));
            }
        }
        if let Some(open) = &open {
            self.watch_set_ids(&tree, open);
        }
        let gives_away = change.uid.is_some() || change.gid.is_some();
        self.queue_meta(&mut tree, id, self.run(caller), gives_away);
        drop(tree);
        self.nudge();
        Ok(())
    }

    /// The plain file on the tier gets the same permissions and times, because processes can read it without the agent.
    /// If the store's own file is being written in place, returns its identity after that.
    fn follow_on_tier(
        &self,
        tree: &Tree,
        id: FileId,
        open: Option<&Open>,
        change: &SetAttr,
    ) -> Option<surgetank_types::model::StoreIdentity> {
        let inode = tree.get(id)?;
        let mut in_place = false;
        let file = match open.map(Open::content) {
            // Only read: an operation of the queue changes the store's file.
            Some(content) if content.location == Location::Arriving => return None,
            Some(content) if content.location == Location::Store && inode.sealed => return None,
            // Written in place: the store's file itself follows, like its content.
            Some(content) if content.location == Location::Store => {
                in_place = true;
                content.file
            }
            Some(content) => content.file,
            None => {
                let device = inode.replica?.device;
                let path = tree.logical_path(id)?;
                let opened = self.tiers.device(device).open(&path, false);
                Arc::new(
                    opened
                        .inspect_err(|why| tracing::warn!(%why, "a tier did not follow a change of attributes"))
                        .ok()?,
                )
            }
        };
        let mut result: std::io::Result<()> = Ok(());
        if change.perm.is_some() {
            let perm = if in_place { inode.attr.perm } else { inode.attr.perm & 0o777 | 0o600 };
            let mode = rustix::fs::Mode::from_raw_mode(perm);
            result = rustix::fs::fchmod(&*file, mode).map_err(Into::into);
        }
        if change.mtime.is_some() || change.atime.is_some() {
            let omitted = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
            let spec = |time: Option<Timestamp>| {
                time.map_or(omitted, |time| rustix::fs::Timespec {
                    tv_sec: time.secs(),
                    tv_nsec: i64::from(time.subsec_nanos()),
                })
            };
            // The other time belongs to the plain file while it is written.
            let times =
                rustix::fs::Timestamps { last_access: spec(change.atime), last_modification: spec(change.mtime) };
            result = result.and(rustix::fs::futimens(&*file, &times).map_err(Into::into));
        }
        if let Err(why) = result {
            tracing::warn!(%why, "a tier did not follow a change of attributes");
        }
        let stat = in_place.then(|| rustix::fs::fstat(&*file).ok()).flatten()?;
        Some(super::files::identity_of(&stat))
    }

    /// Attributes reach the store with the content, or by an operation of their own if the content is already there. (A
    /// change of the owner needs its own operation: a new version keeps the owner of the store's file, as a write
    /// would.)
    pub(super) fn queue_meta(&self, tree: &mut Tree, id: FileId, run: RunId, gives_away: bool) {
        let last = |inode: &Inode| inode.publish.and_then(|seq| tree.ops.get(&seq)).is_some_and(|op| op.last);
        let last = tree.get(id).is_some_and(last);
        self.queue_meta_behind(tree, id, run, gives_away, last);
    }

    fn queue_meta_behind(&self, tree: &mut Tree, id: FileId, run: RunId, gives_away: bool, last: bool) {
        let Some(inode) = tree.get(id) else { return };
        let waiting = inode
            .publish
            .and_then(|seq| tree.ops.get(&seq))
            .is_some_and(|op| op.progress == surgetank_state::Progress::Waiting);
        let needed = inode.is_dir() || tree.in_store(id) && (!waiting || gives_away);
        let staged = inode.publish.is_some() && !waiting;
        if id == FileId::ROOT && inode.applied.is_some() {
            return;
        }
        if !(needed || staged) {
            return;
        }
        // At most one operation waits. It moves to the end, after operations that would disturb it.
        if let Some(seq) = inode.set_meta
            && tree.ops.get(&seq).is_some_and(|op| op.progress == surgetank_state::Progress::Waiting)
        {
            tree.cancel(seq);
        }
        let seq = self.queue(tree, OpKind::SetMeta { file: id }, run, last, 0);
        if let Some(inode) = tree.get_mut(id) {
            inode.set_meta = Some(seq);
        }
    }

    /// A new version of a file does not change its directory's time, but the drain's work in the store does. If a
    /// program gave the directory a time, and the store's directories have times, the drain sets it again afterwards.
    pub(super) fn queue_times(&self, tree: &mut Tree, dir: FileId, run: RunId, last: bool) {
        let given = |inode: &Inode| inode.dir.as_ref().is_some_and(|dir| dir.times_given);
        if !self.store.features().directories || !tree.get(dir).is_some_and(given) {
            return;
        }
        self.queue_meta_behind(tree, dir, run, false, last);
    }

    /// The copy for an operation is in a directory above the file's own. The time of that directory changes when the
    /// copy leaves.
    pub(crate) fn queue_times_behind(&self, tree: &mut Tree, seq: Seq, dir: FileId) {
        let Some(op) = tree.ops.get(&seq) else { return };
        let (run, last) = (op.run, op.last);
        let waits_behind = |later: &Seq| {
            *later > seq && tree.ops.get(later).is_some_and(|op| op.progress == surgetank_state::Progress::Waiting)
        };
        if tree.get(dir).is_some_and(|dir| dir.set_meta.as_ref().is_none_or(|later| !waits_behind(later))) {
            self.commit_apart(tree, |tree| self.queue_times(tree, dir, run, last));
        }
    }

    /// Asks the store about a file, or in a directory. A new mode or owner of the path may still be queued. If the
    /// store denies the request, those attributes are set now, and the request is repeated.
    pub(super) fn let_in<T>(&self, id: FileId, ask: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match ask() {
            Err(why) if why.raw_os_error() == Some(libc::EACCES) && self.attributes_ahead(id) => ask(),
            other => other,
        }
    }

    /// Sets the queued attributes of a file and of the directories above it. Returns whether they may have other
    /// attributes now, set here or by the drain a moment ago.
    pub fn attributes_ahead(&self, id: FileId) -> bool {
        let (mut waiting, mut given) = (Vec::new(), false);
        {
            let tree = self.read_tree();
            let mut at = Some(id);
            while let Some((id, inode)) = at.and_then(|id| Some((id, tree.get(id)?))) {
                given |= inode.owned;
                if inode.set_meta.is_some() {
                    waiting.push((id, inode.is_dir()));
                }
                at = inode.applied.as_ref().map(|(dir, _)| *dir);
            }
        }
        // From the top: a directory must be reachable before its children.
        for (id, is_dir) in waiting.into_iter().rev() {
            // The drain may be about to set older attributes. (A caller that asks about a file holds its lock.)
            let _inode = is_dir.then(|| self.lock_inode_within(id, BUSY_PATIENCE));
            let Some((path, kind, owner, meta)) = self.attributes_waiting(id) else { continue };
            let who = self.own_cred(owner);
            if !self.is_ours_there(id, who, &path, &meta, false).unwrap_or(false) {
                continue;
            }
            let Ok(identity) = self.store.set_meta(who, &path, kind, &meta) else { continue };
            given = true;
            if let Some(inode) = self.write_tree().get_mut(id).filter(|inode| !inode.is_dir()) {
                inode.identity = Some(Box::new(identity));
            }
        }
        given
    }

    /// Does the store have the agent's file there, as known? Also true for a file that got these attributes already,
    /// without a record of that. For a file that is `written_in_place`, only the inode number is compared.
    pub(crate) fn is_ours_there(
        &self,
        id: FileId,
        who: Cred,
        path: &StorePath,
        meta: &Meta,
        written_in_place: bool,
    ) -> io::Result<bool> {
        let known = {
            let tree = self.read_tree();
            tree.get(id).filter(|inode| !inode.is_dir()).and_then(|inode| inode.identity.as_deref().copied())
        };
        let Some(known) = known else { return Ok(true) };
        let there = self.store.stat(who, path)?.identity;
        let given = |(_, mtime): (Timestamp, Timestamp)| mtime.nanos == there.mtime_nanos;
        Ok(known.is(&there)
            || known.ino == there.ino
                && (written_in_place
                    || known.size_bytes == there.size_bytes
                        && (known.mtime_nanos == there.mtime_nanos || meta.times.is_some_and(given))))
    }

    fn attributes_waiting(&self, id: FileId) -> Option<(StorePath, Kind, Cred, Meta)> {
        let tree = self.read_tree();
        let inode = tree.get(id).filter(|inode| inode.set_meta.is_some())?;
        let attr = inode.attr;
        let times = Some((attr.atime, attr.mtime));
        let meta = Meta { perm: attr.perm, uid: attr.uid, gid: attr.gid, times, xattrs: None };
        Some((tree.applied_path(id)?, attr.kind, inode.cred(), meta))
    }

    /// Opens a directory in the store that its owner made inaccessible while the drain still has files for it. `false`:
    /// the directory is accessible, or the change does not help.
    pub(crate) fn open_up(&self, id: FileId) -> bool {
        let (path, owner, meta) = {
            let mut tree = self.write_tree();
            let Some(inode) = tree.get(id).filter(|inode| inode.is_dir() && inode.attr.perm & 0o300 != 0o300) else {
                return false;
            };
            let (attr, owner, run) = (inode.attr, inode.cred(), inode.run);
            let Some(path) = tree.applied_path(id) else { return false };
            tree.own(id);
            // Recorded first: in every case the directory gets its own mode again, last.
            self.queue_meta(&mut tree, id, run, false);
            self.commit(&mut tree);
            let times = Some((attr.atime, attr.mtime));
            (path, owner, Meta { perm: attr.perm | 0o700, uid: attr.uid, gid: attr.gid, times, xattrs: None })
        };
        self.store.set_meta(self.own_cred(owner), &path, Kind::Directory, &meta).is_ok()
    }

    pub fn readlink(&self, id: FileId) -> FsResult<Box<[u8]>> {
        self.asked_of_it(id, || {
            let _moving = self.moving.read().unwrap_or_else(PoisonError::into_inner);
            let (path, who) = {
                let tree = self.read_tree();
                let inode = tree.get(id).ok_or(Errno::STALE)?;
                if inode.attr.kind != Kind::Symlink {
                    return Err(Errno::INVAL.into());
                }
                if let Some(target) = inode.extra.as_ref().and_then(|extra| extra.target.clone()) {
                    return Ok(target);
                }
                (tree.applied_path(id).ok_or(Errno::NOENT)?, inode.cred())
            };
            Ok(self.queries.must_ask((self.own_cred(who), &path), |store, who, path| store.read_link(who, path))?)
        })
    }

    /// The store's space, less the bytes that the drain still brings there.
    pub fn statfs(&self) -> FsResult<Space> {
        let mut space = self.queries.space_now()?;
        let dirty = self.dirty_bytes();
        space.free_bytes = space.free_bytes.saturating_sub(dirty);
        space.available_bytes = space.available_bytes.saturating_sub(dirty);
        Ok(space)
    }
}
