//! Making and removing names. Each operation is one step under the tree's lock: memory, then the catalog, then the tier.
//!
//! After a crash the catalog has the intended state, and recovery finds the files by inode number. The danger that this
//! avoids: a tier that disagrees with the catalog about which file has a name.

mod make;
mod rename;

use std::time::Duration;

use surgetank_policy::config::{Config, Survives};
use surgetank_policy::rule::RuleSet;
use surgetank_state::{Inode, Name, Tree};
use surgetank_store::{Store, StorePath};
use surgetank_tier::{Remains, Tiers};
use surgetank_types::clock;
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::{Caller, FileId, RunId};
use surgetank_types::sync::Arc;

use crate::base::Base;
use crate::base::queries::StoreQueries;
use crate::base::runs::Runs;
use crate::base::succession::Succession;
use crate::base::users::{Permissions, who};
use crate::base::waits::Waits;
use crate::files::Files;
use crate::files::descriptor_grant::Descriptors;
use crate::files::dispatcher::Dispatcher;
use crate::files::open::Opener;
use crate::files::open_files::OpenFiles;
use crate::files::place::Placer;
use crate::files::room_wait::RoomWaits;
use crate::files::seal::Sealer;
use crate::files::sync::Syncs;
use crate::metadata::Metadata;
use crate::metadata::access::Access;
use crate::namespace::attributes::FileAttributes;
use crate::namespace::hints::FileHints;
use crate::namespace::listing::Listings;
use crate::namespace::resolve::Resolver;

/// The limit of tries while another process keeps giving the name to other files during one operation.
const LOOKS_MAX: usize = 1000;

/// Operations on names: make, link, rename, remove.
pub struct Names {
    pub(super) config: Arc<Config>,
    pub(super) queries: Arc<StoreQueries>,
    pub(super) rules: Arc<RuleSet>,
    pub(super) store: Arc<dyn Store>,
    pub(super) succession: Arc<Succession>,
    pub(super) tiers: Arc<Tiers>,
    pub(super) permissions: Arc<Permissions>,
    pub(super) runs: Arc<Runs>,
    pub(super) access: Arc<Access>,
    pub(super) attributes: Arc<FileAttributes>,
    pub(super) descriptors: Arc<Descriptors>,
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(super) hints: Arc<FileHints>,
    pub(super) listings: Arc<Listings>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) open_files: Arc<OpenFiles>,
    pub(super) opener: Arc<Opener>,
    pub(super) placer: Arc<Placer>,
    pub(super) resolver: Arc<Resolver>,
    pub(super) room_waits: Arc<RoomWaits>,
    pub(super) sealer: Arc<Sealer>,
    pub(super) syncs: Arc<Syncs>,
    waits: Arc<Waits>,
}

impl Names {
    pub(crate) fn new(
        base: &Base,
        files: &Files,
        attributes: &Arc<FileAttributes>,
        hints: &Arc<FileHints>,
        listings: &Arc<Listings>,
        resolver: &Arc<Resolver>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            queries: base.queries.clone(),
            rules: base.rules.clone(),
            store: base.store.clone(),
            succession: base.succession.clone(),
            tiers: base.tiers.clone(),
            permissions: base.permissions.clone(),
            runs: base.runs.clone(),
            access: files.access.clone(),
            attributes: attributes.clone(),
            descriptors: files.descriptors.clone(),
            dispatcher: files.dispatcher.clone(),
            hints: hints.clone(),
            listings: listings.clone(),
            metadata: files.metadata.clone(),
            open_files: files.open_files.clone(),
            opener: files.opener.clone(),
            placer: files.placer.clone(),
            resolver: resolver.clone(),
            room_waits: files.room_waits.clone(),
            sealer: files.sealer.clone(),
            syncs: files.syncs.clone(),
            waits: base.waits.clone(),
        }
    }

    /// May the caller make or remove names in the directory? Where the store has the directory, the store decides too:
    /// an error now is better than one in the drain.
    pub(crate) fn permit_change(&self, caller: &Caller, dir: FileId) -> FsResult<()> {
        let look = || -> FsResult<Option<StorePath>> {
            let tree = self.metadata.read_tree();
            let inode = tree.get(dir).ok_or(Errno::NOENT)?;
            if !inode.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
            if inode.logical.is_none() && dir != FileId::ROOT {
                return Err(Errno::NOENT.into());
            }
            self.permissions.permit(caller, &inode.attr, 3)?;
            if inode.dir.as_ref().is_some_and(|d| d.complete) {
                return Ok(None);
            }
            Ok(tree.applied_path(dir))
        };
        if look()?.is_none() || self.queries.is_changeable(dir, who(caller)) {
            return Ok(());
        }
        // The drain must not rename the directory between the look at its path and the use of it.
        let _moving = self.metadata.moving.read().unwrap_or_else(surgetank_types::sync::PoisonError::into_inner);
        let Some(path) = look()? else { return Ok(()) };
        self.access.let_caller_in(caller, dir, |who| self.queries.may_change(dir, who, &path)).map_err(Into::into)
    }

    /// Would `permit_change` have to ask the store?
    pub(crate) fn change_would_ask(&self, caller: &Caller, dir: FileId) -> bool {
        !self.metadata.read_tree().dir(dir).is_some_and(|d| d.complete) && !self.queries.is_changeable(dir, who(caller))
    }

    /// Can the store keep a file of this name? An error now is better than one in the drain.
    fn may_be_called(&self, tree: &Tree, dir: FileId, name: &[u8]) -> FsResult<()> {
        let path = tree.child_path(dir, name).ok_or(Errno::NOENT)?;
        Ok(self.store.may_hold(&StorePath(path))?)
    }

    /// Another member of the pool may be taking one of these files. Waits until that has ended.
    fn await_stays(&self, ids: &[FileId]) -> FsResult<()> {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let mut tree = self.metadata.read_tree();
        while ids.iter().any(|id| is_leaving(&tree, *id)) {
            self.waits.begin_long();
            if self.waits.is_killed() {
                return Err(Errno::INTR.into());
            }
            tree = self.metadata.wait_changed(tree, LOOK_EVERY);
        }
        Ok(())
    }

    /// The sticky bit: only the owner of the file or of the directory removes names.
    pub(super) fn permit_sticky(&self, tree: &Tree, caller: &Caller, dir: FileId, id: FileId) -> FsResult<()> {
        if !self.permissions.checks_permissions || caller.uid == 0 {
            return Ok(());
        }
        let (Some(dir), Some(inode)) = (tree.get(dir), tree.get(id)) else {
            return Err(Errno::NOENT.into());
        };
        if dir.attr.perm & 0o1000 != 0 && caller.uid != dir.attr.uid && caller.uid != inode.attr.uid {
            return Err(Errno::PERM.into());
        }
        Ok(())
    }

    /// What the unlinking of a name means for file, tier and store; used by unlink and by a rename over a name.
    /// `replaced`: the name gets another file in the same step, which also changes the store's side.
    fn detach(
        &self,
        tree: &mut Tree,
        (dir, name): (FileId, &Name),
        id: FileId,
        replaced: bool,
        run: RunId,
    ) -> Detached {
        // Its plain file moves, or loses its name.
        self.descriptors.watch_apart(tree, id);
        // The agent owns it from now on, even if only the store had it: the store's file still has to go.
        tree.own(id);
        tree.own(dir);
        tree.txn.entry(dir, name);
        let was_primary =
            tree.get(id).is_some_and(|inode| inode.logical.as_ref().is_some_and(|(d, n)| *d == dir && n == name));
        let old_path = was_primary.then(|| tree.child_path(dir, name)).flatten();
        let replica = tree.get(id).and_then(|inode| inode.replica);
        // Until the catalog's disk has the name's next holder, a power loss brings this file back.
        let outlasts = replica.is_some_and(|plain| self.tiers.device(plain.device).survives() != Survives::Agent);
        let vouched = |inode: &Inode| inode.dirty() && (inode.is_synced() || inode.is_promised());
        let vouched = replaced && outlasts && tree.get(id).is_some_and(vouched);
        let had_links = tree.get(id).is_some_and(|inode| inode.attr.links > 1);
        let last = tree.unname(id, dir, name);
        tree.bind(dir, name, |entry| entry.set_logical(None));
        let was_in_store = tree.in_store(id);
        let pending = tree.get(id).and_then(|inode| inode.publish);
        let mut requeue = false;
        if let Some(seq) = pending
            && (last || !was_in_store)
        {
            let taken = tree.take_back(id, seq);
            // This name may have been the last but one: then the file no longer looks like one with links.
            if taken && had_links && !was_in_store {
                tree.take_back_links(id, seq);
            }
            requeue = taken && !last;
        }
        // Names that no process has looked up yet have the file's attributes too.
        if last
            && !tree.get(id).is_some_and(Inode::has_unknown_names)
            && let Some(seq) = tree.get(id).and_then(|inode| inode.set_meta)
            && tree.cancel(seq)
            && let Some(inode) = tree.get_mut(id)
        {
            inode.set_meta = None;
        }
        if !replaced {
            self.metadata.vacate(tree, dir, name, run);
        }
        if requeue {
            self.metadata.queue_publish(tree, id);
        }
        let new_path = (!last && was_primary).then(|| tree.logical_path(id)).flatten();
        if last {
            tree.txn.pending_unlink(replica);
        }
        let mut charged_bytes = 0;
        if last && !self.metadata.opens().contains_key(&id) {
            charged_bytes = tree.get(id).filter(|inode| inode.replica.is_some()).map_or(0, |inode| inode.charged_bytes);
            self.sealer.drop_content(tree, id, 0);
        }
        let open = self.metadata.opens().get(&id).cloned();
        if let Some(open) = open.as_ref().filter(|_| last) {
            self.succession.keep_content(open);
        }
        let until_synced = last && vouched && open.is_none();
        let aside = (open.is_some() || until_synced).then(|| crate::files::hidden_name(id));
        let shown_perm = if last { self.metadata.perm_to_leave(tree, id) } else { None };
        Detached {
            device: replica.map(|plain| plain.device),
            old_path,
            new_path,
            last,
            aside,
            shown_perm,
            until_synced,
            charged_bytes,
        }
    }

    /// The tier's side of `detach`, after the catalog has it. The caller drops the result after it unlocks the tree.
    fn detach_on_tier(&self, detached: &Detached) -> Option<Remains<'_>> {
        let device = self.tiers.device(detached.device?);
        let goes = detached.last && detached.aside.is_none();
        let remains = device.hold(detached.old_path.as_deref().filter(|_| goes), detached.charged_bytes);
        let Some(old) = &detached.old_path else {
            return Some(remains);
        };
        let result = match (&detached.new_path, &detached.aside) {
            (Some(new), _) => device.follow(old, new),
            (None, _) if !detached.last => Ok(()),
            // If this agent is killed, the next one has to find it.
            (None, Some(aside)) => device.follow(old, aside),
            (None, None) => device.unlink_with(old, detached.shown_perm),
        };
        if let Err(why) = result {
            self.tiers.device_failed(device.id(), &why);
            tracing::warn!(%why, path = %String::from_utf8_lossy(old), "a tier did not follow an unlink");
        }
        Some(remains)
    }

    /// The caller does not hold the tree's lock: this takes as long as the catalog's disk.
    fn unlink_after_sync(&self, detached: &Detached) {
        let (true, Some(device), Some(aside)) = (detached.until_synced, detached.device, &detached.aside) else {
            return;
        };
        let device = self.tiers.device(device);
        let done = self.metadata.sync_catalog().and_then(|()| device.unlink_with(aside, detached.shown_perm));
        if let Err(why) = done {
            tracing::warn!(%why, "a file that was replaced stays on its tier until the next start");
        }
    }

    /// Removes a name. Errors: ENOENT, EISDIR, permissions, the store.
    pub fn unlink(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<()> {
        let stays = |tree: &mut Tree, id| if is_leaving(tree, id) { Err(Errno::AGAIN.into()) } else { Ok(()) };
        self.unlink_if(caller, dir, name, &stays)
    }

    /// The same, if the file under the name `may` go at that moment. (EAGAIN: look again when it does not leave any more.)
    pub(super) fn unlink_if(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &[u8],
        may: &dyn Fn(&mut Tree, FileId) -> FsResult<()>,
    ) -> FsResult<()> {
        let run = self.runs.run(caller);
        let name = Name::from(name);
        let mut looks = 0;
        let (id, mut tree) = loop {
            let id = self.resolver.resolve(caller, dir, &name)?;
            self.permit_change(caller, dir)?;
            self.syncs.spare_unknown_names(id)?;
            self.opener.await_begun(id);
            let mut tree = self.metadata.write_tree();
            if tree.entry(dir, &name).and_then(surgetank_state::Entry::logical) == Some(id) {
                match may(&mut tree, id) {
                    Err(fault) if fault.errno == Errno::AGAIN => {}
                    may => {
                        may?;
                        break (id, tree);
                    }
                }
                drop(tree);
                self.await_stays(&[id])?;
            }
            // Another door has put another file there meanwhile.
            looks += 1;
            if looks == LOOKS_MAX {
                return Err(Errno::NOENT.into());
            }
        };
        if tree.get(id).is_some_and(surgetank_state::Inode::is_dir) {
            return Err(Errno::ISDIR.into());
        }
        self.permit_sticky(&tree, caller, dir, id)?;
        crash_point!("unlink.begun");
        let detached = self.detach(&mut tree, (dir, &name), id, false, run);
        tree.touch_dir(dir, 0);
        self.metadata.reap(&mut tree, id);
        tree.txn.carried_out(id);
        self.metadata.commit(&mut tree);
        crash_point!("unlink.written_down");
        let remains = self.detach_on_tier(&detached);
        crash_point!("unlink.tier_done");
        drop(tree);
        drop(remains);
        self.metadata.nudge();
        Ok(())
    }

    /// Removes an empty directory. Errors: ENOENT, ENOTDIR, ENOTEMPTY, permissions, the store.
    pub fn rmdir(&self, caller: &Caller, dir: FileId, name: &[u8]) -> FsResult<()> {
        let id = self.resolver.resolve(caller, dir, name)?;
        self.permit_change(caller, dir)?;
        self.must_be_empty(caller, id)?;
        let run = self.runs.run(caller);
        let name = Name::from(name);
        let mut tree = self.metadata.write_tree();
        self.metadata.recall_delegation(&mut tree, Some(id));
        if tree.entry(dir, &name).and_then(surgetank_state::Entry::logical) != Some(id) {
            return Err(Errno::NOENT.into());
        }
        self.permit_sticky(&tree, caller, dir, id)?;
        tree.require_empty(id)?;
        let path = tree.child_path(dir, &name);
        self.remove_dir_entry(&mut tree, (dir, &name), id, false, run);
        tree.touch_dir(dir, -1);
        self.metadata.reap(&mut tree, id);
        tree.txn.carried_out(id);
        self.metadata.commit(&mut tree);
        crash_point!("rmdir.written_down");
        if let Some(path) = path {
            self.remove_on_tiers(&path);
        }
        drop(tree);
        self.metadata.nudge();
        Ok(())
    }

    fn remove_on_tiers(&self, path: &[u8]) {
        for device in self.tiers.devices() {
            if let Err(why) = device.remove_dir(path) {
                tracing::warn!(%why, path = %String::from_utf8_lossy(path), "a tier did not follow an rmdir");
            }
        }
    }

    /// The logical side of the removal of an (empty) directory, and the operation for the store.
    fn remove_dir_entry(&self, tree: &mut Tree, (dir, name): (FileId, &Name), id: FileId, replaced: bool, run: RunId) {
        // Its plain file moves, or loses its name.
        self.descriptors.watch_apart(tree, id);
        // The agent owns it from now on, even if only the store had it: the store's file still has to go.
        tree.own(id);
        tree.own(dir);
        tree.txn.entry(dir, name);
        tree.bind(dir, name, |entry| entry.set_logical(None));
        let mut never = false;
        if let Some(inode) = tree.get_mut(id) {
            inode.logical = None;
            inode.attr.links = 0;
            inode.attr.ctime = clock::now();
            let quiet = inode.dir.as_ref().is_some_and(|d| d.queued == 0 && !d.moved);
            never = inode.applied.is_none() && quiet;
        }
        if let Some(seq) = tree.get(id).and_then(|inode| inode.set_meta)
            && tree.cancel(seq)
            && let Some(inode) = tree.get_mut(id)
        {
            inode.set_meta = None;
        }
        // The store never saw the directory, and no operation needs it: so it is forgotten.
        if never
            && let Some(seq) = tree.get(id).and_then(|inode| inode.publish)
            && tree.ops.get(&seq).is_some_and(|op| op.progress == surgetank_state::Progress::Waiting && !op.certain)
        {
            tree.cancel(seq);
            if let Some(inode) = tree.get_mut(id) {
                inode.publish = None;
            }
            tree.bind(dir, name, |entry| entry.set_planned(None));
        }
        if !replaced {
            self.metadata.vacate(tree, dir, name, run);
        }
    }

    /// `ENOTEMPTY` unless programs see nothing in the directory.
    fn must_be_empty(&self, caller: &Caller, id: FileId) -> FsResult<()> {
        let is_dir = self.metadata.read_tree().get(id).is_some_and(surgetank_state::Inode::is_dir);
        if !is_dir {
            return Err(Errno::NOTDIR.into());
        }
        if self.listings.merged(caller, id)?.is_empty() { Ok(()) } else { Err(Errno::NOTEMPTY.into()) }
    }
}

fn is_leaving(tree: &Tree, id: FileId) -> bool {
    tree.leaving.has(id, clock::tick())
}

/// The result for the plain file of an unlinked name.
struct Detached {
    device: Option<surgetank_types::model::DeviceId>,
    old_path: Option<Vec<u8>>,
    new_path: Option<Vec<u8>>,
    last: bool,
    /// The path of the plain file while processes have it open.
    aside: Option<Vec<u8>>,
    /// The mode for the plain file, if it differs from the file's.
    shown_perm: Option<u32>,
    /// The file leaves `aside` after the catalog's next sync.
    until_synced: bool,
    /// The charged bytes, if no process has the file open.
    charged_bytes: u64,
}
