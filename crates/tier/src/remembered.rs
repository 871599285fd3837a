//! Devices that the catalog remembers, whether or not the configuration still names them.
//!
//! A replica in the catalog names its device by a number. Before the first replica that uses it, the catalog records the
//! number's meaning as a mark ([`Mark::Device`]) with the device's description. Record and number therefore share one fate.
//!
//! The danger that it avoids: taking the position in the configuration for the device. Another order of `--tier` would then
//! look for every file in the wrong place, and a tier that is not mounted yet would appear as one whose files are lost.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use surgetank_types::sync::Arc;

use serde::{Deserialize, Serialize};

use super::device::Setup;
use super::ledger::{CapRule, Ledger};
use super::scope::Scope;
use super::{Device, Standing, Tiers, kind_of};
use surgetank_policy::config::Survives;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{DeviceId, Mark};

/// Description of a device in the catalog.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remembered {
    /// Identifies the directory itself, at whatever path it is found.
    token: String,
    tier: String,
    /// Without symbolic links, which may lead elsewhere in the next job.
    path: PathBuf,
    in_memory: bool,
    survives: Survives,
    /// Boot id, for a device in memory, which loses all files when the machine restarts.
    boot: Option<String>,
    /// The directory of the configuration, and its parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    place: Option<[Directory; 2]>,
}

/// Identifies a directory by numbers that stay the same, even after a reboot, as far as its file system keeps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Directory {
    file_system: u64,
    inode: u64,
}

impl Directory {
    fn at(path: &Path) -> std::io::Result<Self> {
        let file_system = rustix::fs::statvfs(path)?.f_fsid;
        Ok(Self { file_system, inode: rustix::fs::stat(path)?.st_ino })
    }
}

fn place_of(path: &Path) -> Option<[Directory; 2]> {
    Some([Directory::at(path).ok()?, Directory::at(path.parent()?).ok()?])
}

impl Remembered {
    /// The description of a configured device.
    pub fn of(device: &Device) -> Self {
        let in_memory = device.in_memory();
        let path = std::fs::canonicalize(device.path()).unwrap_or_else(|_| device.path().to_owned());
        Self {
            token: device.token().to_owned(),
            tier: device.tier_name().to_owned(),
            place: place_of(&path),
            path,
            in_memory,
            survives: device.survives(),
            boot: if in_memory { boot_id() } else { None },
        }
    }

    /// A stand-in for a replica's device that the catalog does not describe.
    pub fn nameless(number: DeviceId) -> Self {
        Self {
            token: String::new(),
            tier: format!("{}.{}", number.tier, number.device),
            path: PathBuf::from("(a tier that the catalog does not describe)"),
            in_memory: false,
            survives: Survives::Agent,
            boot: None,
            place: None,
        }
    }

    /// The token that identifies the device's directory.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The mark that describes the device.
    ///
    /// Errors: the tier's path is not UTF-8.
    pub fn mark(&self) -> Result<Mark> {
        let text = serde_json::to_string(self).map_err(|why| {
            Error::new(format!("tier {} at {} cannot be remembered", self.tier, self.path.display()))
                .why(why)
                .remedy("give the tier a path that is valid UTF-8")
        })?;
        Ok(Mark::Device(text))
    }

    /// The device that a mark describes; `None` for marks of another kind.
    pub fn from_mark(mark: &Mark) -> Option<Self> {
        let Mark::Device(text) = mark else { return None };
        serde_json::from_str(text).ok()
    }

    /// Whether the device may contain files of an agent of this key. True also if the device cannot be reached.
    pub fn may_hold(&self, key: &str) -> bool {
        self.standing(key) != Standing::Lost
    }

    fn standing(&self, key: &str) -> Standing {
        if !self.token.is_empty() && Scope::token_at(&self.path, key).as_deref() == Some(&*self.token) {
            return Standing::Drained;
        }
        // Memory is lost after a restart, and where its file system is mounted without the agent's directory.
        let restarted = self.boot.is_some() && boot_id().is_some_and(|now| self.boot.as_ref() != Some(&now));
        let gone = self.in_memory && (restarted || is_memory(&self.path));
        if gone || self.is_wiped() { Standing::Lost } else { Standing::Absent }
    }

    /// Whether the device's directory exists without the agent's in it, or was removed from its own parent. Anything else may
    /// be a file system that is not mounted, or another job's view of the path.
    fn is_wiped(&self) -> bool {
        let Some([directory, parent]) = self.place else { return false };
        match Directory::at(&self.path) {
            Ok(now) => now == directory,
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => {
                // A mount point may be absent only because it is not mounted.
                directory.file_system == parent.file_system
                    && self.path.parent().is_some_and(|path| Directory::at(path).is_ok_and(|now| now == parent))
            }
            Err(_) => false,
        }
    }
}

impl Tiers {
    /// Finds the devices that replicas in the catalog name by number, and returns the id that each number has now. Devices that
    /// the configuration does not name are opened at their old path, to be emptied; one that cannot be opened gets a stand-in.
    /// To be called once, before any other use of the tiers.
    ///
    /// Errors: more tiers than ids, or a stand-in that cannot be made.
    pub fn take_up(&self, remembered: &[(DeviceId, Remembered)]) -> Result<HashMap<DeviceId, DeviceId>> {
        let mut ids = HashMap::with_capacity(remembered.len());
        let mut left: Vec<Arc<Device>> = Vec::new();
        for (number, one) in remembered {
            let known = self
                .devices()
                .chain(left.iter().map(|device| &**device))
                .filter(|device| !one.token.is_empty() && device.token() == one.token)
                .map(Device::id)
                .next();
            let id = match known {
                Some(id) => id,
                None => {
                    let tier = self.inner.tiers.len() + left.len();
                    let tier = u8::try_from(tier).map_err(|_| {
                        Error::new("files are stored on more tiers than can be served at once")
                            .remedy("start with the tiers of the previous run")
                    })?;
                    let id = DeviceId { tier, device: 0 };
                    left.push(Arc::new(self.open_left(id, one)?));
                    id
                }
            };
            ids.insert(*number, id);
        }
        for device in left.iter().filter(|device| device.is_there()) {
            device.drop_old_ballast();
        }
        // A second call would be a programming error; the first one's devices stay.
        drop(self.inner.left.set(left));
        Ok(ids)
    }

    fn open_left(&self, id: DeviceId, one: &Remembered) -> Result<Device> {
        let mut standing = one.standing(&self.inner.key);
        let mut scope = None;
        if standing == Standing::Drained {
            match Scope::open(&one.tier, &one.path, &self.inner.key) {
                Ok(opened) => scope = Some(opened),
                Err(why) => {
                    tracing::warn!(%why, path = %one.path.display(), "a tier of an earlier run cannot be opened");
                    standing = Standing::Absent;
                }
            }
        }
        let scope = match scope {
            Some(scope) => scope,
            None => Scope::nowhere(&one.path, &self.inner.key, &one.token)?,
        };
        Ok(Device::new(Setup {
            id,
            standing,
            tier_name: Arc::from(one.tier.as_str()),
            path: one.path.clone(),
            survives: one.survives,
            in_memory: one.in_memory,
            scope,
            // Nothing is free, and all that is durable there is in excess: the device is emptied by eviction.
            ledger: Ledger::new(CapRule::Share, 0),
        }))
    }
}

fn is_memory(path: &Path) -> bool {
    rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .is_ok_and(|dir| kind_of(&dir, path, "").is_ok_and(|kind| kind.in_memory))
}

fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}
