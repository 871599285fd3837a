//! What a first open opens: the plain file on a tier, the file in the store, or what arrives from there.
//!
//! The danger that this avoids: a process gets the content of another file, which took the name meanwhile.

use surgetank_state::PlainId;
use surgetank_store::{Cred, StorePath};
use surgetank_types::error::{Errno, FsResult};
use surgetank_types::model::FileId;
use surgetank_types::sync::Arc;
use surgetank_types::sync::atomic::Ordering;

use crate::base::queries::is_absent;
use crate::base::users::own_cred;
use crate::content::{Content, Location, Open};
use crate::files::attach::Wanted;
use crate::files::open::{Opener, PUBLISHED_AS_IT_IS, REMOVED};
use crate::files::{LEFT_TO_THE_MOUNT, Via};
use crate::metadata::{FILES_OF_A_MEMBER, shares_a_server};
use crate::report::run::EventKind;

impl Opener {
    /// Was the file made in a pool in which this agent is no more? (Before it has joined one, that is not known.)
    fn is_of_an_earlier_pool(&self, id: FileId) -> bool {
        let first = self.metadata.pool.get().map(|(_, first)| *first);
        let is_ours = first.is_none_or(|first| (first..first + FILES_OF_A_MEMBER).contains(&id.0));
        self.config.pool.is_none() || !is_ours
    }

    /// The first open of an inode. The caller holds the inode's lock.
    pub(super) fn open_content(&self, id: FileId, writes: bool, truncates: bool, via: Via) -> FsResult<Open> {
        let in_place = writes && self.copies.only_in_place(id);
        if matches!(via, Via::Shim(_))
            && (in_place || self.metadata.read_tree().get(id).is_none_or(|inode| inode.replica.is_none()))
        {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        if in_place {
            self.eviction.evict_locked(
                id,
                "it can only be written in the store, in place: further names, or a directory that lets nothing in",
                true,
            );
        }
        let tree = self.metadata.read_tree();
        let inode = tree.get(id).ok_or(REMOVED)?;
        let owner = inode.cred();
        let size_bytes = inode.attr.size_bytes;
        let charged_bytes = inode.charged_bytes;
        if inode.home().is_some() && self.is_of_an_earlier_pool(id) {
            tracing::warn!(id = id.0, "the content of a file is at a member of an earlier pool");
            return Err(Errno::IO.into());
        }
        if let Some(PlainId { device, .. }) = inode.replica {
            let path = tree.logical_path(id).ok_or(REMOVED)?;
            let device = self.tiers.device(device);
            // (In a pool another member may change the file, as below. On a server each file that was read is a copy.)
            let is_shared = shares_a_server(&self.metadata) && inode.may_be_copy();
            let may_be_direct = (writes || !is_shared) && self.placer.may_be_direct(via);
            // The agent's descriptor of a direct file is read-only; otherwise the agent's own leases would be refused.
            let has_room = || {
                let wish = self.placer.wish(&tree, id, &path);
                self.placer.room_for_direct(device.id(), &path, &wish).is_some()
            };
            let direct = via.is_only() || may_be_direct && (!writes || has_room());
            if !via.is_mount() && !direct {
                return Err(LEFT_TO_THE_MOUNT.into());
            }
            let file =
                device.open(&path, writes && !direct).inspect_err(|why| self.tiers.device_failed(device.id(), why))?;
            drop(tree);
            if !writes {
                device.counters().hits.fetch_add(1, Ordering::Relaxed);
                self.events.count(EventKind::Hit, device.tier_name(), "opened for reading", size_bytes);
            }
            let content =
                Content { file: Arc::new(file), location: Location::Tier(device.id()), writable: writes && !direct };
            return self.placer.attach(id, content, Wanted { via, writes, direct }, charged_bytes);
        }
        if let Some((dir, name)) = inode.spill().cloned() {
            let path = tree.applied_path(dir).ok_or(REMOVED)?.join(&name);
            drop(tree);
            let direct = !writes || via.is_only();
            let file = match self.store.open(own_cred(owner), &path, !direct) {
                // The temporary already has its final name; the catalog follows.
                Err(why) if is_absent(&why) && self.metadata.read_tree().is_published_as_it_is(id) => {
                    return Err(PUBLISHED_AS_IT_IS.into());
                }
                opened => opened?,
            };
            let content = Content { file: Arc::new(file), location: Location::StoreTemporary, writable: !direct };
            return self.placer.attach(id, content, Wanted { via, writes, direct }, 0);
        }
        let path = tree.applied_path(id).ok_or(REMOVED)?;
        drop(tree);
        if truncates && !in_place {
            return self.placer.open_placed(id, None, 0, via);
        }
        self.events.count(EventKind::Miss, "store", "only the store had it", size_bytes);
        if !self.store.features().plain_files {
            return match self.fetches.open_for_fetch(id, writes, via)? {
                Some(open) => Ok(open),
                None if self.metadata.read_tree().get(id).is_some_and(|inode| inode.replica.is_some()) => {
                    self.open_content(id, writes, truncates, via)
                }
                None => Err(REMOVED.into()),
            };
        }
        if writes && !in_place && size_bytes <= self.config.copy_up_bytes_max {
            let source = self.open_in_store(id, owner, &path, false)?;
            // A process that has the store's own file open would not see writes to a copy.
            if !via.is_only() || crate::content::is_open_only_here(&source) {
                return self.placer.open_placed(id, Some(&source), size_bytes, via);
            }
        }
        // (In a pool another member may change the file: its readers are served by that member then.)
        let direct = !writes && self.config.pool.is_none() || via.is_only();
        let file = self.open_in_store(id, owner, &path, writes && !direct)?;
        if writes {
            self.times_in_place(id, &file)?;
        }
        let content = Content { file: Arc::new(file), location: Location::Store, writable: writes && !direct };
        let mut open = self.placer.attach(id, content, Wanted { via, writes, direct }, 0)?;
        if !open.direct {
            open.found = rustix::fs::fstat(&*open.content().file).ok().map(|stat| crate::files::identity_of(&stat));
        }
        Ok(open)
    }

    /// Opens the store's own file.
    pub(super) fn open_in_store(
        &self,
        id: FileId,
        owner: Cred,
        path: &StorePath,
        writes: bool,
    ) -> std::io::Result<std::fs::File> {
        let who = own_cred(owner);
        let file = self.access.let_in(id, || self.store.open(who, path, writes))?;
        self.is_it(id, path, file)
    }

    /// Is this still the file? The drain may have moved it after the look at its path, and put another one there. (If
    /// another client did that, the name means that client's file now.)
    fn is_it(&self, id: FileId, path: &StorePath, file: std::fs::File) -> std::io::Result<std::fs::File> {
        let ino = rustix::fs::fstat(&file)?.st_ino;
        let tree = self.metadata.read_tree();
        let known = tree.get(id).and_then(|inode| inode.identity.as_ref().map(|known| known.ino));
        let same = known.is_none_or(|known| known == ino);
        let moves = tree.is_queued(id) || tree.is_moving_in_store(id) || tree.applied_path(id).as_ref() != Some(path);
        if same || !moves {
            return Ok(file);
        }
        Err(Errno::STALE.into())
    }

    /// Times that a process set and that the drain has not applied yet. From now on the file's own times count.
    pub(super) fn times_in_place(&self, id: FileId, file: &std::fs::File) -> FsResult<()> {
        let mut tree = self.metadata.write_tree();
        let Some(inode) = tree.get_mut(id).filter(|inode| inode.set_meta.is_some()) else {
            return Ok(());
        };
        crate::files::Given::known(&inode.attr).give_times(file)?;
        inode.identity = Some(crate::files::identity_of(&rustix::fs::fstat(file)?));
        Ok(())
    }
}
