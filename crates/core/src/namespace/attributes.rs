//! Attributes: the agent's own for a file of which it has state, the store's for all others. For a file that a process
//! writes directly, each request asks the plain file for its size and times.
//!
//! The danger that this avoids: a change of attributes that overtakes the content, or that never reaches the store.

use std::time::Duration;

use surgetank_state::Tree;
use surgetank_store::Space;
use surgetank_tier::Tiers;
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, Kind, RunId, Timestamp};
use surgetank_types::sync::{Arc, PoisonError};

use crate::base::Base;
use crate::base::queries::StoreQueries;
use crate::base::runs::Runs;
use crate::base::users::{Permissions, own_cred};
use crate::content::{Location, Open};
use crate::files::Files;
use crate::files::dispatcher::Dispatcher;
use crate::files::open::Opener;
use crate::files::open_files::{OpenFiles, SET_IDS};
use crate::files::seal::Sealer;
use crate::files::transfer::Transfers;
use crate::metadata::Metadata;
use crate::namespace::resolve::Resolver;

/// The changes that a program requests; `None` leaves a field as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct SetAttr {
    /// Permission bits with setuid, setgid and sticky.
    pub perm: Option<u32>,
    /// User id of the owner.
    pub uid: Option<u32>,
    /// Group id.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size_bytes: Option<u64>,
    /// Time of the last access.
    pub atime: Option<Timestamp>,
    /// Time of the last modification.
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

/// Attributes, and how long they are valid.
#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    /// Attributes of the file.
    pub attr: Attr,
    /// Time for which the kernel may cache them.
    pub ttl: Duration,
}

/// Attributes of files.
pub struct FileAttributes {
    queries: Arc<StoreQueries>,
    tiers: Arc<Tiers>,
    permissions: Arc<Permissions>,
    runs: Arc<Runs>,
    metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    dispatcher: Arc<Dispatcher>,
    opener: Arc<Opener>,
    resolver: Arc<Resolver>,
    sealer: Arc<Sealer>,
    transfers: Arc<Transfers>,
}

impl FileAttributes {
    pub(crate) fn new(base: &Base, files: &Files, resolver: &Arc<Resolver>) -> Self {
        Self {
            queries: base.queries.clone(),
            tiers: base.tiers.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            dispatcher: files.dispatcher.clone(),
            opener: files.opener.clone(),
            resolver: resolver.clone(),
            sealer: files.sealer.clone(),
            transfers: files.transfers.clone(),
        }
    }

    /// Attributes of a file. Errors: ESTALE if the file is unknown; the store.
    pub fn getattr(&self, id: FileId, _fh: Option<u64>) -> FsResult<Attributes> {
        self.resolver.revalidate(id)?;
        let mut tree = self.metadata.write_tree();
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        inode.enters_kernel();
        Ok(Attributes { attr: self.open_files.attr_of(id, inode), ttl: self.metadata.ttl(id, inode) })
    }

    /// Changes attributes, and returns the new ones. `fh`: the open file of a truncation. Errors: permissions, no room,
    /// the store.
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
        let mut tree = self.metadata.write_tree();
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
        self.metadata.queue_meta(&mut tree, id, RunId(0), false);
        drop(tree);
        self.metadata.nudge();
        // The answer to a write or an open has no attributes.
        self.sealer.forget_attributes(id);
    }

    /// The permissions after a change of content or owner, as Linux defines them.
    fn perm_without_set_ids(&self, caller: &Caller, attr: &Attr) -> u32 {
        if attr.kind == Kind::Directory {
            return attr.perm;
        }
        // Without the group's right to execute, the bit stays for callers that may set it.
        let keeps = || {
            let own_group = caller.uid == 0 || caller.gid == attr.gid;
            own_group || self.permissions.checks_permissions && self.permissions.is_in_group(caller, attr.gid)
        };
        attr.perm & if attr.perm & 0o2010 == 0o2000 && keeps() { !0o4000 } else { !SET_IDS }
    }

    /// A change without a field: only the owner, or a process that has the file open for writing, may clear the bits.
    fn permit_clearing(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        let attr = self.metadata.read_tree().get(id).ok_or(Errno::STALE)?.attr;
        let loses = self.perm_without_set_ids(caller, &attr) != attr.perm;
        let writes = || self.metadata.open_of(id).is_some_and(|open| open.writers() > 0);
        if loses && caller.uid != 0 && caller.uid != attr.uid && !writes() {
            return Err(Errno::PERM.into());
        }
        Ok(())
    }

    fn permit_setattr(&self, caller: &Caller, id: FileId, fh: Option<u64>, change: &SetAttr) -> FsResult<()> {
        if !self.permissions.checks_permissions {
            return Ok(());
        }
        let attr = self.metadata.read_tree().get(id).ok_or(Errno::STALE)?.attr;
        // Also where the new owner and group are the old ones.
        if change.uid.is_some() || change.gid.is_some() {
            self.permissions.permit_owner(caller, &attr)?;
        }
        if change.size_bytes.is_some() && fh.is_none() {
            self.permissions.permit(caller, &attr, 2)?;
        }
        if change.perm.is_some() {
            self.permissions.permit_owner(caller, &attr)?;
        }
        if caller.uid != 0 {
            if change.uid.is_some_and(|uid| uid != attr.uid) {
                return Err(Errno::PERM.into());
            }
            if change.gid.is_some_and(|gid| {
                gid != attr.gid && !(caller.uid == attr.uid && self.permissions.is_in_group(caller, gid))
            }) {
                return Err(Errno::PERM.into());
            }
        }
        if (change.atime.is_some() || change.mtime.is_some()) && caller.uid != attr.uid && caller.uid != 0 {
            if !change.times_now {
                return Err(Errno::PERM.into());
            }
            self.permissions.permit(caller, &attr, 2)?;
        }
        Ok(())
    }

    fn truncate(&self, caller: &Caller, id: FileId, fh: Option<u64>, size_bytes: u64) -> FsResult<()> {
        match self.metadata.read_tree().get(id).map(|inode| inode.attr.kind) {
            Some(Kind::File) => {}
            Some(Kind::Directory) => return Err(Errno::ISDIR.into()),
            Some(_) => return Err(Errno::INVAL.into()),
            None => return Err(Errno::STALE.into()),
        }
        let handle = fh.and_then(|fh| self.open_files.handle(fh).ok()).filter(|handle| handle.writes);
        match handle {
            Some(handle) => self.transfers.truncate_content(&handle.open, size_bytes),
            None => {
                self.dispatcher.before_change(caller, id)?;
                let open = self.opener.open_inode(
                    id,
                    true,
                    size_bytes == 0,
                    self.runs.run(caller),
                    crate::files::Via::Mount,
                )?;
                let result = self.transfers.truncate_content(&open, size_bytes);
                self.opener.close_inode(&open, true);
                result
            }
        }
    }

    fn change_meta(&self, caller: &Caller, id: FileId, change: &SetAttr) -> FsResult<()> {
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, Some(id));
        tree.own(id);
        let open = self.metadata.opens().get(&id).cloned();
        let now = clock::now();
        let inode = tree.get_mut(id).ok_or(Errno::STALE)?;
        if let Some(open) = open.as_ref().filter(|open| open.is_watched())
            && self.open_files.plain_stat(open).is_some_and(|stat| open.is_written_by_others(&stat))
        {
            inode.attr.perm &= !SET_IDS;
        }
        if let Some(perm) = change.perm {
            inode.attr.perm = perm & 0o7777;
            // As in every file system: only a member of the group may make the file run as that group.
            if self.permissions.checks_permissions
                && caller.uid != 0
                && perm & 0o2000 != 0
                && !self.permissions.is_in_group(caller, inode.attr.gid)
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
                dir.times_set = !change.times_now;
            }
        }
        inode.attr.ctime = now;
        if change.mtime.is_some() || change.atime.is_some() || change.perm.is_some() {
            let in_place = self.follow_on_tier(&tree, id, open.as_deref(), change);
            if let (Some(identity), Some(inode)) = (in_place, tree.get_mut(id)) {
                inode.identity = Some(identity);
            }
        }
        if let Some(open) = &open {
            self.open_files.watch_set_ids(&tree, open);
        }
        let gives_away = change.uid.is_some() || change.gid.is_some();
        self.metadata.queue_meta(&mut tree, id, self.runs.run(caller), gives_away);
        drop(tree);
        self.metadata.nudge();
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
        Some(crate::files::identity_of(&stat))
    }

    /// The target of a symbolic link. Errors: EINVAL if the file is not one, ESTALE if it is unknown; the store.
    pub fn readlink(&self, id: FileId) -> FsResult<Box<[u8]>> {
        self.opener.asked_of_it(id, || {
            let _moving = self.metadata.moving.read().unwrap_or_else(PoisonError::into_inner);
            let (path, who) = {
                let tree = self.metadata.read_tree();
                let inode = tree.get(id).ok_or(Errno::STALE)?;
                if inode.attr.kind != Kind::Symlink {
                    return Err(Errno::INVAL.into());
                }
                if let Some(target) = inode.extra.as_ref().and_then(|extra| extra.target.clone()) {
                    return Ok(target);
                }
                (tree.applied_path(id).ok_or(Errno::NOENT)?, inode.cred())
            };
            Ok(self.queries.must_ask((own_cred(who), &path), |store, who, path| store.read_link(who, path))?)
        })
    }

    /// The store's space, less the bytes that the drain still brings there.
    pub fn statfs(&self) -> FsResult<Space> {
        let mut space = self.queries.space_lately()?;
        let dirty = self.metadata.dirty_bytes();
        space.free_bytes = space.free_bytes.saturating_sub(dirty);
        space.available_bytes = space.available_bytes.saturating_sub(dirty);
        Ok(space)
    }

    /// Checks the bits that access(2) asks for.
    pub fn access(&self, caller: &Caller, id: FileId, mask: u32) -> FsResult<()> {
        let attr = self.getattr(id, None)?.attr;
        if caller.uid == 0 && attr.kind == Kind::File && mask & 1 != 0 && attr.perm & 0o111 == 0 {
            return Err(Errno::ACCESS.into());
        }
        self.permissions.permit(caller, &attr, mask & 7)
    }
}
