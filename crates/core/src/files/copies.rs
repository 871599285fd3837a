//! The present place of a file's newest version, and the bytes at risk.
//!
//! The dangers that this avoids:
//! - a verdict calls a copy safe because a record names it;
//! - a verdict blames the store for a copy that the tier does not have.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use surgetank_policy::config::Config;
use surgetank_state::{PlainId, Tree};
use surgetank_store::{Cred, Store, StorePath, checksum};
use surgetank_tier::{Device, Tiers};
use surgetank_types::clock;
use surgetank_types::error::Error;
use surgetank_types::model::{DeviceId, FileId, Kind};
use surgetank_types::sync::{Arc, OnceLock};

use crate::base::fence::{Fence, Membership};
use crate::base::queries::{StoreQueries, is_absent, passes};
use crate::base::users::{Permissions, is_drained, own_cred};
use crate::base::{Base, Counters, Door, Members};
use crate::content::{Content, Location};
use crate::files::open_files::OpenFiles;
use crate::metadata::access::Access;
use crate::metadata::{FILES_OF_A_MEMBER, Metadata};

/// The newest version of a file that is not durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Newest {
    /// It was there a moment ago.
    At(String),
    /// There is no copy, or its layer cannot be read. In words: which layer, which path.
    Missing(String),
    /// No copy is known, or the store does not answer.
    Unknown,
}

/// The reason why a tier does not have the newest version of a file.
pub(crate) struct Absence {
    /// The tier.
    pub place: String,
    pub text: String,
    /// Another try does not help.
    pub lasting: bool,
}

/// How long recovery waits for the store.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause before a store that does not answer is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// Where a file's newest version is, and whether the store's file is still the one that is known.
pub struct Copies {
    pub(super) config: Arc<Config>,
    pub(super) counters: Arc<Counters>,
    pub(super) door: Arc<OnceLock<Arc<dyn Door>>>,
    pub(super) queries: Arc<StoreQueries>,
    pub(super) store: Arc<dyn Store>,
    tiers: Arc<Tiers>,
    access: Arc<Access>,
    pub(super) metadata: Arc<Metadata>,
    open_files: Arc<OpenFiles>,
    permissions: Arc<Permissions>,
    members: Arc<OnceLock<Arc<dyn Members>>>,
    fence: Arc<Fence>,
}

impl Copies {
    pub(crate) fn new(
        base: &Base,
        access: &Arc<Access>,
        metadata: &Arc<Metadata>,
        open_files: &Arc<OpenFiles>,
    ) -> Self {
        Self {
            config: base.config.clone(),
            counters: base.counters.clone(),
            door: base.door.clone(),
            queries: base.queries.clone(),
            store: base.store.clone(),
            tiers: base.tiers.clone(),
            permissions: base.permissions.clone(),
            members: base.members.clone(),
            fence: base.fence.clone(),
            access: access.clone(),
            metadata: metadata.clone(),
            open_files: open_files.clone(),
        }
    }

    /// The plain file that holds a sealed or abandoned version.
    pub(crate) fn content_of(&self, id: FileId) -> Option<Content> {
        let tree = self.metadata.read_tree();
        let inode = tree.get(id)?;
        if let Some(PlainId { device, .. }) = inode.replica {
            let path = tree.logical_path(id)?;
            let file = self.tiers.device(device).open(&path, false);
            let file = file.inspect_err(|why| tracing::warn!(id = id.0, %why, "a plain file cannot be opened")).ok()?;
            return Some(Content { file: Arc::new(file), location: Location::Tier(device), writable: false });
        }
        drop(tree);
        self.content_in_store(id).ok().flatten()
    }

    /// With the rights of the agent, or of the owner: the store may squash root.
    pub(crate) fn as_either<T>(&self, who: Cred, act: impl Fn(Cred) -> io::Result<T>) -> io::Result<T> {
        let own = own_cred(who);
        act(own).or_else(|why| match why.kind() {
            io::ErrorKind::PermissionDenied if own != who => act(who),
            _ => Err(why),
        })
    }

    pub(crate) fn content_in_store(&self, id: FileId) -> io::Result<Option<Content>> {
        let found = {
            let tree = self.metadata.read_tree();
            tree.get(id).and_then(|inode| {
                let (path, location) = match inode.spill() {
                    Some((dir, name)) => (tree.applied_path(*dir)?.join(name), Location::StoreTemporary),
                    None if !self.store.features().plain_files => return None,
                    None => (tree.applied_path(id)?, Location::Store),
                };
                Some((path, location, inode.cred()))
            })
        };
        let Some((path, location, owner)) = found else { return Ok(None) };
        match self.as_either(owner, |who| self.store.open(who, &path, false)) {
            Ok(file) => Ok(Some(Content { file: Arc::new(file), location, writable: false })),
            Err(why) if is_absent(&why) => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Was the file made in the pool of now? (After the end of a whole pool its nodes may have everything.)
    pub(crate) fn is_of_this_pool(&self, id: FileId) -> bool {
        let Some(members) = self.members.get() else { return false };
        let present = members.membership();
        let Ok(member) = u32::try_from(id.0 / FILES_OF_A_MEMBER) else { return false };
        member == present.member || self.fence.was(&Membership { member, ..present })
    }

    /// `None`: the tier has it, or the file is not on a tier, or the store has the same. Operations on names of a tier are done under the tree's lock,
    /// so what is not there now is gone.
    pub(crate) fn absence(&self, tree: &Tree, id: FileId) -> Option<Absence> {
        let inode = tree.get(id).filter(|inode| inode.dirty() || !inode.sealed)?;
        if let Some(home) = inode.home() {
            let is_lost = self.members.get().is_some_and(|members| members.has_lost(home, id));
            let place = format!("member {} of the pool", home.0);
            let text = format!("its content was at {place}, which is lost, or to which this node was lost");
            return is_lost.then_some(Absence { place, text, lasting: true });
        }
        let plain = inode.replica?;
        let device = self.tiers.device(plain.device);
        let place = called(device);
        if !device.is_there() {
            let at = device.path().display();
            let text =
                format!("it is on a tier that is not there: {at}; bring it back (mount it again) and start again");
            return Some(Absence { place, text, lasting: true });
        }
        let path = tree.logical_path(id)?;
        let shown = on_device(device, &path);
        match device.plain_at(&path) {
            Ok(Some(there)) if is_same(plain, &PlainId::new(plain.device, &there)) => {
                let (is, was) = (there.size_bytes, inode.attr.size_bytes);
                (inode.sealed && is != was).then(|| {
                    let text = format!(
                        "its plain file on the {place} has {is} bytes, and had {was} when it was closed: {shown}"
                    );
                    Absence { place, text, lasting: true }
                })
            }
            Ok(_) => {
                let text = format!("its plain file is gone from the {place}, and the store does not have it: {shown}");
                Some(Absence { place, text, lasting: true })
            }
            Err(why) => {
                let text = format!("the {place} cannot be read: {shown}: {why}");
                Some(Absence { place, text, lasting: false })
            }
        }
    }

    /// Reads a file on its tier, after an error that either the tier or the store may have caused.
    pub(crate) fn unreadable(&self, id: FileId) -> Option<Absence> {
        let (device, path) = {
            let tree = self.metadata.read_tree();
            (tree.get(id)?.replica?.device, tree.logical_path(id)?)
        };
        let device = self.tiers.device(device);
        let why = device.open(&path, false).and_then(|file| checksum::checksum(&file, &|_| Ok(()))).err()?;
        self.tiers.device_failed(device.id(), &why);
        let place = called(device);
        let text = format!("the {place} cannot be read: {}: {why}", on_device(device, &path));
        Some(Absence { place, text, lasting: false })
    }

    /// Looks for the newest version of a file. Asks the store only if it has the one copy, and with a time limit.
    pub fn newest_copy(&self, id: FileId) -> Newest {
        let (path, who) = {
            let tree = self.metadata.read_tree();
            let Some(inode) = tree.get(id) else { return Newest::Unknown };
            if let Some(home) = inode.home() {
                return match self.absence(&tree, id) {
                    Some(absent) => Newest::Missing(absent.text),
                    None => Newest::At(format!("member {} of the pool", home.0)),
                };
            }
            if let Some(plain) = inode.replica {
                let device = self.tiers.device(plain.device);
                let at = on_device(device, &tree.logical_path(id).unwrap_or_default());
                // A device that takes no writes may still be readable.
                let sick = device.sickness().filter(|errno| *errno != Errno::ROFS);
                return match (self.absence(&tree, id), sick) {
                    (Some(absent), _) => Newest::Missing(absent.text),
                    (None, Some(errno)) => {
                        Newest::Missing(format!("the {} cannot be read: {at}: {errno}", called(device)))
                    }
                    (None, None) => Newest::At(at),
                };
            }
            let Some((dir, name)) = inode.spill() else { return Newest::Unknown };
            let Some(dir) = tree.applied_path(*dir) else { return Newest::Unknown };
            (dir.join(name), inode.cred())
        };
        let at = format!("{}/{path}", self.store.describe());
        let own = own_cred(who);
        match self.queries.would_ask(move |store| store.stat(own, &path).or_else(|_| store.stat(who, &path))) {
            Some(Ok(_)) => Newest::At(at),
            Some(Err(why)) if why.kind() == std::io::ErrorKind::NotFound => {
                Newest::Missing(format!("the temporary in the store that held it is gone: {at}"))
            }
            Some(Err(_)) | None => Newest::Unknown,
        }
    }

    /// Bytes on these devices that are meant for the store and have no durable copy. Files that a rule keeps out of the
    /// store are not at risk, and neither are tier copies of files that the store has.
    pub fn at_risk_bytes(&self, of: impl Fn(&Device) -> bool) -> u64 {
        let devices: Vec<DeviceId> = self.tiers.devices().filter(|device| of(device)).map(Device::id).collect();
        let tree = self.metadata.read_tree();
        let on_one = |id: &FileId| {
            let plain = tree.get(*id).and_then(|inode| inode.replica);
            plain.is_some_and(|plain| devices.contains(&plain.device))
        };
        let meant = |id: FileId, path: &[u8]| is_drained(self.metadata.mode_for(&tree, id, path));
        tree.iter()
            .filter(|(id, inode)| inode.attr.kind == Kind::File && on_one(id) && (inode.dirty() || !inode.sealed))
            .filter(|(id, inode)| {
                inode.publish.is_some() || tree.logical_path(*id).is_some_and(|path| meant(*id, &path))
            })
            .map(|(id, inode)| self.open_files.attr_of(id, inode).size_bytes)
            .sum()
    }

    pub(crate) fn has_unknown_names(&self, id: FileId) -> bool {
        self.metadata.read_tree().get(id).is_some_and(surgetank_state::Inode::has_unknown_names)
    }

    /// Must the content be written in the store itself? This is so if the store has further names that no process has
    /// looked up. It is also so if the file may be written, but the directory does not allow a new version in place of
    /// the old one.
    pub(crate) fn only_in_place(&self, id: FileId) -> bool {
        // An agent that serves all users may write everywhere.
        if !self.store.features().plain_files {
            return false;
        }
        let linked = self.has_unknown_names(id);
        if linked || !self.permissions.checks_permissions {
            return linked;
        }
        let (dir, path, who) = {
            let tree = self.metadata.read_tree();
            let Some(inode) = tree.get(id).filter(|inode| !inode.dirty() && inode.publish.is_none()) else {
                return false;
            };
            let Some((dir, path)) = inode.applied.as_ref().and_then(|(dir, _)| Some((*dir, tree.applied_path(*dir)?)))
            else {
                return false;
            };
            (dir, path, own_cred(inode.cred()))
        };
        let may = self.access.let_in(dir, || self.queries.may_change(dir, who, &path));
        may.is_err_and(|why| why.raw_os_error() == Some(libc::EACCES))
    }

    /// The content of a file that was open when the agent died. The store may keep us waiting for it until then. An error: it
    /// was spilled there, and the store does not answer. `None`, of one that has a plain file or a spill: it cannot be opened.
    pub(crate) fn content_left_in(
        &self,
        id: FileId,
        until: Instant,
    ) -> surgetank_types::error::Result<Option<Content>> {
        if self.metadata.read_tree().get(id).is_none_or(|inode| inode.replica.is_some()) {
            return Ok(self.content_of(id));
        }
        loop {
            match self.content_in_store(id) {
                Err(why) if passes(&why) && clock::tick() < until => surgetank_types::sync::thread::sleep(PAUSE),
                Err(why) if passes(&why) && self.is_spilled(id) => {
                    let path = self.metadata.read_tree().logical_path(id).map(StorePath).unwrap_or_default();
                    return Err(self.does_not_tell(&path, why));
                }
                answer => return Ok(answer.unwrap_or(None)),
            }
        }
    }

    fn is_spilled(&self, id: FileId) -> bool {
        self.metadata.read_tree().get(id).is_some_and(|inode| inode.spill().is_some())
    }

    pub(crate) fn does_not_tell(&self, path: &StorePath, why: io::Error) -> Error {
        Error::new(format!("The store {} cannot be asked for {path}", self.store.describe()))
            .why(why)
            .remedy("start again when it can: what an earlier agent spilled there is in no other place")
            .data("nothing was changed; files in the tiers and in the store are as they were")
    }
}

/// A file system may give a removed file's number to another one. Their times of birth differ, if it has them.
fn is_same(known: PlainId, there: &PlainId) -> bool {
    known.ino == there.ino && (known.born == 0 || there.born == 0 || known.born == there.born)
}

fn called(device: &Device) -> String {
    format!("tier {} ({})", device.tier_name(), device.path().display())
}

fn on_device(device: &Device, path: &[u8]) -> String {
    format!("{}/{}", device.files_path().display(), String::from_utf8_lossy(path))
}
