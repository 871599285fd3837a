//! Placing: placement says where a new version's plain file is made.
//!
//! States: placed, then adopted as the inode's replica, or undone. Invariant: a file whose content has to be copied
//! first stays under a hidden name until the copy is complete (`adopt`). The danger that this avoids: an incomplete
//! plain file under its own name.

use surgetank_policy::config::Config;
use surgetank_policy::placement;
use surgetank_policy::placement::{Ask, AskKind, DirtyRoom, Expected, History, Place, Reason};
use surgetank_policy::rule::Decision;
use surgetank_state::{Name, PlainId, Tree};
use surgetank_store::verdict::Verdict;
use surgetank_store::{Cred, Store, StorePath, verdict};
use surgetank_tier::{Device, Tiers};
use surgetank_types::error::{Errno, Fault, FsResult};
use surgetank_types::model::{DeviceId, FileId, Mode};
use surgetank_types::sync::atomic::Ordering;
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::base::events::Events;
use crate::base::users::own_cred;
use crate::base::{Base, Door};
use crate::content::{Content, Location, Placed};
use crate::files::deadline::DeadlineWatch;
use crate::files::evict::Eviction;
use crate::files::open_files::OpenFiles;
use crate::files::room_wait::RoomWaits;
use crate::files::temporaries::StoreTemporaries;
use crate::files::{LEFT_TO_THE_MOUNT, Via};
use crate::metadata::Metadata;
use crate::report::run::EventKind;

/// The demands of rules and hints for a file's place.
pub(crate) struct Wish {
    pub mode: Mode,
    pub tier: Option<Arc<str>>,
    pub size_bytes: Option<u64>,
}

impl Wish {
    pub fn of(decision: Decision) -> Self {
        Self { mode: decision.mode, tier: decision.tier, size_bytes: decision.size_bytes }
    }
    pub fn only(mode: Mode) -> Self {
        Self { mode, tier: None, size_bytes: None }
    }
}

/// The last decision's reason as a sentence and in brief. Most decisions have the reason of the one before.
struct LastReason {
    reason: surgetank_policy::placement::Reason,
    sentence: Arc<str>,
    brief: Arc<str>,
}

/// Room that placement chose and that is reserved on the device.
struct Reserved {
    direct: bool,
    reserve_bytes: u64,
    reason: Reason,
}

/// Chooses the place of a file and makes its plain file there.
pub struct Placer {
    pub(super) config: Arc<Config>,
    pub(super) door: Arc<OnceLock<Arc<dyn Door>>>,
    events: Arc<Events>,
    key: Arc<str>,
    store: Arc<dyn Store>,
    pub(super) tiers: Arc<Tiers>,
    deadline: Arc<DeadlineWatch>,
    eviction: Arc<Eviction>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) open_files: Arc<OpenFiles>,
    pub(super) room_waits: Arc<RoomWaits>,
    temporaries: Arc<StoreTemporaries>,
    pub(super) history: Mutex<History>,
    last_reason: Mutex<Option<LastReason>>,
}

impl Placer {
    pub(crate) fn new(
        base: &Base,
        deadline: &Arc<DeadlineWatch>,
        eviction: &Arc<Eviction>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
        room_waits: &Arc<RoomWaits>,
        temporaries: &Arc<StoreTemporaries>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            door: base.door.clone(),
            events: base.events.clone(),
            key: base.key.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            deadline: deadline.clone(),
            eviction: eviction.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
            room_waits: room_waits.clone(),
            temporaries: temporaries.clone(),
            history: Mutex::new(History::new()),
            last_reason: Mutex::default(),
        }
    }

    /// Makes the hidden plain file the inode's replica, under the inode's present path. The caller holds the tree's lock.
    pub(crate) fn adopt(&self, tree: &mut Tree, id: FileId, placed: &Placed) -> FsResult<()> {
        let path = tree.logical_path(id);
        let reason = tree.reason(&placed.reason);
        let Some(inode) = tree.get_mut(id) else {
            return Err(Errno::STALE.into());
        };
        inode.placed = Some(reason);
        match (placed.content.location, &placed.spill) {
            (Location::Tier(device), _) => {
                let plain = PlainId { device, ..placed.plain };
                let before = (inode.replica.replace(plain), std::mem::take(&mut inode.synced));
                // Without a name it keeps the hidden one: link may give it a name later.
                match path {
                    Some(path) if path != placed.at => {
                        // The file gets its name before the catalog knows it. An agent that dies in between leaves an
                        // unwanted copy, and the next one has to know that.
                        self.metadata.commit_apart(tree, |tree| tree.txn.pending_unlink(Some(plain)));
                        let device = self.tiers.device(device);
                        let renamed = device.rename(&placed.at, &path);
                        // It may have moved with its directory.
                        if renamed.is_err()
                            && device.plain_at(&path).ok().flatten().map(|plain| plain.ino) != Some(placed.plain.ino)
                        {
                            if let Some(inode) = tree.get_mut(id) {
                                (inode.replica, inode.synced) = before;
                            }
                            return Err(renamed.err().map_or(Errno::IO.into(), Into::into));
                        }
                    }
                    _ => {}
                }
            }
            (_, Some((dir, name, _))) => inode.extra_mut().spill = Some((*dir, name.clone())),
            (_, None) => {}
        }
        Ok(())
    }

    /// Removes a placed file that is not needed after all.
    pub(crate) fn undo_placed(&self, tree: &mut Tree, placed: &Placed) {
        tree.discards.extend(placed.spill.clone());
        if let Location::Tier(device) = placed.content.location {
            let device = self.tiers.device(device);
            device.unreserve(placed.reserved_bytes);
            // Another process that has the name now may have put its plain file over it. Recovery sweeps files that stay.
            drop(device.unlink_if(&placed.at, placed.plain.ino));
        }
    }

    /// The content was copied: from now on the file is here, and no longer at its old place. Returns the bytes that it
    /// is charged here. On success, the caller must not fail after this: a writer would continue in the old file while
    /// the catalog names the new one. On an error, everything is as before.
    pub(crate) fn change_place(&self, tree: &mut Tree, id: FileId, placed: &Placed, bytes: u64) -> FsResult<u64> {
        let replica = tree.get(id).and_then(|inode| inode.replica);
        let charged = tree.drop_replica(id).map_or(0, |(_, charged)| charged);
        if let Err(fault) = self.adopt(tree, id, placed) {
            if let Some(inode) = tree.get_mut(id) {
                (inode.replica, inode.charged_bytes) = (replica, charged);
            }
            tree.recount(id);
            self.undo_placed(tree, placed);
            return Err(fault);
        }
        tree.txn.pending_unlink(replica);
        tree.txn.file(id);
        let Location::Tier(to) = placed.content.location else { return Ok(0) };
        let to = self.tiers.device(to);
        to.counters().spills_in.fetch_add(1, Ordering::Relaxed);
        to.unreserve(placed.reserved_bytes);
        to.add_used(i64::try_from(bytes).unwrap_or(i64::MAX));
        Ok(bytes)
    }

    /// Creates a plain file for a new version where placement says; under a hidden name until it is adopted.
    pub(crate) fn place(
        &self,
        path: &[u8],
        id: FileId,
        kind: AskKind,
        wish: &Wish,
        perm: u32,
        via: Via,
    ) -> FsResult<Placed> {
        let preferred_tier = wish.tier.as_deref().and_then(|name| self.tier_index(name));
        let direct_possible = self.may_be_direct(via);
        // A prefetch evicts no files.
        let mut may_evict = !matches!(kind, AskKind::Prefetch { .. });
        for _attempt in 0..=self.tiers.devices().count() + 1 {
            let ask = Ask {
                kind,
                preferred_tier,
                direct_possible,
                must_persist: false,
                mode: wish.mode,
                dirty: DirtyRoom {
                    bytes: self.metadata.volatile_dirty_bytes(),
                    bytes_max: self.config.dirty_bytes_max,
                },
                until_the_end: self.deadline.room_until_the_end(),
                salt: id.0,
            };
            let (place, reason) = placement::choose(&ask, &self.tiers.views());
            if std::mem::take(&mut may_evict) && self.eviction.make_room_where_full(&reason) {
                continue;
            }
            match place {
                // The mount mediates where the room is not certain.
                Place::Device { direct: false, .. } | Place::Store if matches!(via, Via::Shim(_)) => {
                    return Err(LEFT_TO_THE_MOUNT.into());
                }
                Place::Device { id: device, direct, reserve_bytes } => {
                    let device = self.tiers.device(device);
                    let limited = self.metadata.drained_sometime(wish.mode);
                    let direct =
                        via.is_only() || direct && (!limited || self.dirty_room_for_direct(device, reserve_bytes));
                    if !direct && !via.is_mount() {
                        return Err(LEFT_TO_THE_MOUNT.into());
                    }
                    if reserve_bytes > 0 && !device.try_reserve(reserve_bytes) {
                        continue;
                    }
                    let reserved = Reserved { direct, reserve_bytes, reason };
                    if let Some(placed) = self.place_on(device, (path, id, kind), perm, via, reserved)? {
                        return Ok(placed);
                    }
                }
                // The store has it already.
                Place::Store if brings_in(kind) => return Err(Errno::NOSPC.into()),
                Place::Store => return self.place_in_store(path, id, perm, &self.sentence(reason), via),
            }
        }
        if brings_in(kind) {
            return Err(Errno::NOSPC.into());
        }
        if matches!(via, Via::Shim(_)) {
            return Err(LEFT_TO_THE_MOUNT.into());
        }
        self.place_in_store(path, id, perm, "no tier took the file", via)
    }

    /// Makes the plain file on a device that has the room. `None`: the device failed, so another place is chosen.
    fn place_on(
        &self,
        device: &Device,
        (path, id, kind): (&[u8], FileId, AskKind),
        perm: u32,
        via: Via,
        Reserved { direct, reserve_bytes, reason }: Reserved,
    ) -> FsResult<Option<Placed>> {
        crash_point!("tier.reserved");
        // An empty file may have its own name at once. Content that has to be copied first stays hidden.
        let at = match kind {
            AskKind::Create { .. } if !path.is_empty() => path.to_vec(),
            _ => hidden_name(id),
        };
        let plain_perm = perm & 0o777 | 0o600;
        let access = via.access();
        let created = match device.create_as(&at, plain_perm, access) {
            // The catalog does not know the file at this path.
            Err(why) if why.raw_os_error() == Some(libc::EEXIST) => {
                let hidden = hidden_name(id);
                device.create_as(&hidden, plain_perm, access).map(|file| (file, hidden))
            }
            other => other.map(|file| (file, at)),
        };
        let (file, at) = match created {
            Ok(created) => created,
            Err(why) => {
                device.unreserve(reserve_bytes);
                self.tiers.device_failed(device.id(), &why);
                tracing::warn!(device = %device.path().display(), %why, "cannot create a file on the tier");
                return Ok(None);
            }
        };
        crash_point!("tier.created");
        let plain = PlainId::new(device.id(), &surgetank_tier::Plain::of(&file)?);
        let (file, made) = if direct {
            // An open by path costs half of one by number, if the path still has the file.
            let again = device.open(&at, false).ok();
            let again = again.filter(|again| is_file(again, plain.ino));
            (again.map_or_else(|| reopen_read_only(&file), Ok)?, Some(file))
        } else {
            (file, None)
        };
        Ok(Some(Placed {
            content: Content { file: Arc::new(file), location: Location::Tier(device.id()), writable: !direct },
            direct,
            reserved_bytes: reserve_bytes,
            spill: None,
            reason: self.sentence(reason),
            plain,
            at,
            made,
        }))
    }

    fn place_in_store(&self, path: &[u8], id: FileId, perm: u32, reason: &str, via: Via) -> FsResult<Placed> {
        if !self.store.features().plain_files {
            // Only the drain writes there, and only whole files.
            let mut tiers: Vec<&str> = self.tiers.devices().map(surgetank_tier::Device::tier_name).collect();
            tiers.dedup();
            return Err(Fault::new(
                Errno::NOSPC,
                format!(
                    "no tier ({}) has room for {}, and the store {} takes whole files only: {reason}",
                    tiers.join(", "),
                    String::from_utf8_lossy(path),
                    self.store.describe()
                ),
            ));
        }
        let place = || {
            let tree = self.metadata.read_tree();
            let dir = tree.get(id).and_then(|inode| inode.logical.as_ref()).map_or(FileId::ROOT, |place| place.0);
            let owner = tree.get(id).map_or(Cred { uid: 0, gid: 0 }, surgetank_state::Inode::cred);
            let dir = tree.nearest_applied(dir);
            (dir, tree.applied_path(dir).unwrap_or_else(StorePath::root), owner)
        };
        // The drain may rename the directory during the look; an older agent may have left a file of this name.
        let (dir, name, owner, made) = loop {
            let (dir, path, owner) = place();
            let name = self.spill_name();
            self.temporaries.expect_temporaries_in(dir);
            match self.store.create_temporary(own_cred(owner), &path.join(&name), perm | 0o600) {
                Err(why) if why.kind() == std::io::ErrorKind::NotFound && place().1 != path => {}
                Err(why) if why.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => break (dir, name, owner, made),
            }
        };
        let file = made.map_err(|why| {
            let errno = verdict::errno_of(&why);
            // For any passing failure of the store, the caller gets "no room".
            let passes = errno == Errno::ROFS || verdict::classify(errno) == Verdict::Retry;
            Fault::new(
                if passes && errno != Errno::DQUOT { Errno::NOSPC } else { errno },
                format!(
                    "no tier has room for {} and the store {} refuses it: {why}",
                    String::from_utf8_lossy(path),
                    self.store.describe()
                ),
            )
        })?;
        // Where the agent does not mediate, the program writes to the temporary itself.
        let (file, made) = if via.is_only() { (reopen_read_only(&file)?, Some(file)) } else { (file, None) };
        Ok(Placed {
            content: Content { file: Arc::new(file), location: Location::StoreTemporary, writable: made.is_none() },
            direct: made.is_some(),
            reserved_bytes: 0,
            spill: Some((dir, name, owner)),
            reason: format!("written to a temporary in the store: {reason}").into(),
            plain: PlainId { device: DeviceId { tier: 0, device: 0 }, born: 0, ino: 0 },
            at: Vec::new(),
            made,
        })
    }

    /// The reason as a sentence. Most decisions have the reason of the one before.
    fn sentence(&self, reason: placement::Reason) -> Arc<str> {
        let reason = reason.rounded();
        let mut last = self.last_reason.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(last) if last.reason == reason => {
                self.events.count(EventKind::Placed, reason.place(), &last.brief, 0);
                last.sentence.clone()
            }
            _ => {
                let (sentence, brief): (Arc<str>, Arc<str>) = (reason.to_string().into(), reason.brief().into());
                self.events.count(EventKind::Placed, reason.place(), &brief, 0);
                *last = Some(LastReason { reason, sentence: sentence.clone(), brief });
                sentence
            }
        }
    }

    /// A direct writer must not exceed the limit of undrained bytes before the next poll.
    fn dirty_room_for_direct(&self, device: &surgetank_tier::Device, reserve_bytes: u64) -> bool {
        let wanted_bytes = if reserve_bytes > 0 { reserve_bytes } else { placement::ample_bytes(&device.view()) };
        self.deadline.dirty_allows(device, wanted_bytes)
    }

    fn tier_index(&self, name: &str) -> Option<u8> {
        self.tiers.devices().find(|device| device.tier_name() == name).map(|device| device.id().tier)
    }

    /// A new name each time: the file's earlier one may still be on the list of temporaries to remove.
    fn spill_name(&self) -> Name {
        let number = self.metadata.write_tree().new_id();
        let mut name = surgetank_types::model::STORE_TEMPORARY_PREFIX.to_vec();
        name.extend_from_slice(self.key.as_ref().as_bytes());
        name.extend_from_slice(SPILL);
        name.extend_from_slice(format!("{:x}", number.0).as_bytes());
        Name::from(name)
    }

    /// The demands of rules and hints for a known file.
    pub(crate) fn wish(&self, tree: &Tree, id: FileId, path: &[u8]) -> Wish {
        let decision = self.metadata.decided(tree, id, path);
        Wish { mode: self.metadata.mode_as(tree, id, decision.mode), ..Wish::of(decision) }
    }

    pub(crate) fn expected(&self, path: &[u8], wish: &Wish) -> Expected {
        match wish.size_bytes {
            Some(bytes) => Expected::Hint(bytes),
            None => self.history.lock().unwrap_or_else(PoisonError::into_inner).expected(path),
        }
    }
}

impl Placed {
    /// The plain file's attributes; `None` where the store has it, because the store may hang.
    pub fn stat_on_tier(&self) -> Option<rustix::fs::Stat> {
        matches!(self.content.location, Location::Tier(_))
            .then(|| rustix::fs::fstat(&*self.content.file).ok())
            .flatten()
    }

    /// A descriptor for writing of the placed file.
    pub fn writable(&self) -> std::io::Result<std::fs::File> {
        if self.content.writable {
            self.content.file.try_clone()
        } else {
            crate::content::reopen_writable(&self.content.file)
        }
    }
}

/// Is it for a file that the store already has?
fn brings_in(kind: AskKind) -> bool {
    matches!(kind, AskKind::Prefetch { .. } | AskKind::Fetch { .. })
}

/// A read-only descriptor of a file that was just made: a writable one in the agent would prevent its own leases.
pub(crate) fn reopen_read_only(file: &std::fs::File) -> std::io::Result<std::fs::File> {
    use std::os::fd::AsRawFd;
    std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Does the file have this inode number? (The caller has that inode open, so no other file has the number.)
fn is_file(file: &std::fs::File, ino: u64) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_ino == ino)
}

/// Name of a plain file on a tier that is not yet its inode's content; recovery sweeps such files.
pub(crate) fn hidden_name(id: FileId) -> Vec<u8> {
    let mut name = HIDDEN_PREFIX.to_vec();
    name.extend_from_slice(format!("{:x}", id.0).as_bytes());
    name
}

/// Prefix of plain files on a tier that are being made.
pub(crate) const HIDDEN_PREFIX: &[u8] = b".surgetank-new-";
/// Between the agent's key and the number, in the name of the temporary to which a file is spilled.
pub(crate) const SPILL: &[u8] = b"-spill-";
