//! Tiers and their devices: exact byte accounting, caps, health. They never decide.
//!
//! A tier is what the configuration calls so: a name, one or more directories (its *devices*), a cap. [`Tiers`] holds all tiers
//! in the configuration's order, fastest first, and is cheap to clone.
//!
//! Free space is what the cap allows and what the file system has left, less a floor for other users. A monitor thread calls
//! [`Tiers::poll`] every 100 ms, which sees other users of a device (and the job's memory limit, for a tier in memory) and
//! yields to them.
//!
//! After the configured devices come those that only the catalog names ([`Tiers::take_up`]): they are emptied, not filled.

#![warn(missing_docs)]

#[macro_use]
extern crate surgetank_types;

mod ballast;
mod device;
mod health;
mod ledger;
mod memory;
mod rate;
mod remembered;
mod scope;
mod tree;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;
use surgetank_types::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use device::{Device, DeviceCounters, Remains, Standing};
pub use health::is_sickness;
pub use remembered::Remembered;
pub use scope::{files_of_all, hand_over, is_in_use};
pub use surgetank_policy::placement::{DeviceView, POLL_PERIOD};
pub use tree::{Each, Plain};

use device::{Setup, Sighting};
use ledger::{CapRule, Ledger, floor_bytes, share_out};
use memory::{Memory, MemoryRoom};
use scope::Scope;

use surgetank_policy::config::{Survives, TierConfig};
use surgetank_types::error::{Errno, Error, Result};
use surgetank_types::model::DeviceId;

/// Twice the rate at which programs can allocate memory: the next poll comes when half of what is left could be used.
const MEMORY_TAKEN_BYTES_PER_SECOND: u64 = 16_000_000_000;
const MEMORY_POLL_PERIOD_MIN: Duration = Duration::from_millis(2);

/// Cap of a device without a configured cap, in sixteenths: half of what memory could give, four fifths of a disk.
const MEMORY_CAP_SIXTEENTHS: u64 = 8;
const DISK_CAP_SIXTEENTHS: u64 = 13;

/// All tiers of this node, fastest first. A clone refers to the same devices.
#[derive(Debug, Clone)]
pub struct Tiers {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tiers: Vec<Vec<Arc<Device>>>,
    /// Devices that the catalog names and the configuration does not; each is a tier of its own after all others.
    left: OnceLock<Vec<Arc<Device>>>,
    key: String,
    memory: Memory,
    /// Serializes polls.
    polling: Mutex<()>,
}

impl Tiers {
    /// Opens `<path>/surgetank-<uid>-<key>` on every device. `key` is the agent's directory key. Files of an earlier agent
    /// count after the caller reports them (`Device::walk`, then `add_used`, then one [`Self::poll`]).
    ///
    /// Errors: a directory that cannot be opened or made, that another user owns or can read, or that two devices share; more
    /// than 256 tiers or devices of a tier.
    pub fn open(config: &[TierConfig], key: &str) -> Result<Self> {
        let mut tiers = Vec::with_capacity(config.len());
        for (index, tier) in config.iter().enumerate() {
            tiers.push(open_tier(index, tier, key)?);
        }
        refuse_twice(&tiers)?;
        let inner = Inner {
            tiers,
            left: OnceLock::new(),
            key: key.to_owned(),
            memory: Memory::of_this_process(),
            polling: Mutex::new(()),
        };
        let tiers = Self { inner: Arc::new(inner) };
        for device in tiers.devices() {
            device.drop_old_ballast();
        }
        tiers.poll_devices();
        Ok(tiers)
    }

    /// The device with this id.
    ///
    /// # Panics
    /// If the id is not one of these tiers: the catalog's numbers are not these ids (see [`Self::take_up`]).
    pub fn device(&self, id: DeviceId) -> &Device {
        let tier = usize::from(id.tier);
        match tier.checked_sub(self.inner.tiers.len()) {
            None => &self.inner.tiers[tier][usize::from(id.device)],
            Some(index) => &self.left()[index],
        }
    }

    /// An operation on a device failed: some errors say that the device itself is ill.
    pub fn device_failed(&self, id: DeviceId, why: &std::io::Error) {
        if let Some(code) = why.raw_os_error() {
            self.device(id).report_error(Errno::from_raw_os_error(code));
        }
    }

    /// All devices, in the order of their ids.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.all().map(|device| &**device)
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Device>> {
        self.inner.tiers.iter().flatten().chain(self.left())
    }

    fn left(&self) -> &[Arc<Device>] {
        self.inner.left.get().map_or(&[], Vec::as_slice)
    }

    /// A snapshot of every device, for placement.
    pub fn views(&self) -> Vec<DeviceView> {
        self.devices().map(Device::view).collect()
    }

    /// Polls every device: free space, other users, health, load; allocates or releases ballast.
    pub fn poll(&self) {
        let _one_at_a_time = self.inner.polling.lock().unwrap_or_else(PoisonError::into_inner);
        let now = surgetank_types::clock::tick();
        for device in self.all().filter(|device| device.is_there()) {
            device.measure(now);
            if device.wants_probe(now) {
                // A sick device may block every thread that uses it: the probe must not block the monitor.
                let probed = Arc::clone(device);
                let spawned = surgetank_types::sync::thread::Builder::new()
                    .name("device-probe".into())
                    .spawn(move || probed.probe());
                if spawned.is_err() {
                    device.probe();
                }
            }
        }
        self.poll_devices();
        for device in self.devices() {
            device.keep_ballast();
        }
    }

    /// Asks every healthy device for its free space, then shares the caps out again.
    fn poll_devices(&self) {
        self.look_at(&|_| true);
    }

    /// Polls only the tiers in memory, because programs use up memory faster than disks. Returns the time until the next poll,
    /// 2 ms to [`POLL_PERIOD`].
    pub fn poll_memory(&self) -> Duration {
        if !self.devices().any(|device| device.in_memory() && device.used_bytes() > 0) {
            return POLL_PERIOD;
        }
        let _one_at_a_time = self.inner.polling.lock().unwrap_or_else(PoisonError::into_inner);
        let available = self.look_at(&Device::in_memory).map_or(i64::MAX, |room| room.available_bytes);
        let micros = u64::try_from(available).unwrap_or(0) / (MEMORY_TAKEN_BYTES_PER_SECOND / 1_000_000);
        Duration::from_micros(micros).clamp(MEMORY_POLL_PERIOD_MIN, POLL_PERIOD)
    }

    /// Polls the devices that `which` selects. Returns the memory that is available, if a device in memory is among them.
    fn look_at(&self, which: &dyn Fn(&Device) -> bool) -> Option<MemoryRoom> {
        let seen: Vec<(&Device, Sighting)> = self
            .devices()
            .filter(|device| which(device) && device.standing() == Standing::Used && device.healthy())
            .filter_map(|device| Some((device, device.look()?)))
            .collect();
        // Devices on one file system share its free space, and those in memory share the memory.
        let mut sharers: HashMap<u64, u64> = HashMap::new();
        for (_, sighting) in &seen {
            *sharers.entry(sighting.file_system).or_default() += 1;
        }
        let in_memory = seen.iter().filter(|(device, _)| device.in_memory()).count() as u64;
        let memory = if in_memory > 0 { self.inner.memory.room() } else { None };
        for (device, sighting) in &seen {
            let sharing = sharers.get(&sighting.file_system).copied().unwrap_or(1).max(1);
            let floor = floor_bytes(sighting.total_bytes);
            let available = sighting.available_bytes.saturating_sub(floor) / sharing;
            let mut available = i64::try_from(available).unwrap_or(i64::MAX);
            if let (true, Some(memory)) = (device.in_memory(), memory) {
                available = available.min(memory.spare_bytes() / in_memory.cast_signed());
            }
            device.ledger().observe(sighting.used_before_bytes, available);
        }
        for tier in &self.inner.tiers {
            share_cap(tier);
        }
        memory
    }
}

fn open_tier(index: usize, tier: &TierConfig, key: &str) -> Result<Vec<Arc<Device>>> {
    let too_many = || Error::new(format!("tier {} has too many devices or is one of too many tiers", tier.name));
    let tier_index = u8::try_from(index).map_err(|_| too_many())?;
    let tier_name: Arc<str> = Arc::from(tier.name.as_str());
    let shares = tier.cap_bytes.map(|cap| share_out(cap, &vec![1; tier.paths.len()]));
    let mut devices = Vec::with_capacity(tier.paths.len());
    for (index, path) in tier.paths.iter().enumerate() {
        let scope = Scope::open(&tier.name, path, key)?;
        let kind = kind_of(&scope.files, path, &tier.name)?;
        let ledger = match (&shares, kind.in_memory) {
            (Some(shares), _) => Ledger::new(CapRule::Share, shares[index]),
            (None, true) => Ledger::new(CapRule::Sixteenths(MEMORY_CAP_SIXTEENTHS), 0),
            (None, false) => Ledger::new(CapRule::Sixteenths(DISK_CAP_SIXTEENTHS), 0),
        };
        devices.push(Arc::new(Device::new(Setup {
            id: DeviceId { tier: tier_index, device: u8::try_from(index).map_err(|_| too_many())? },
            standing: Standing::Used,
            tier_name: Arc::clone(&tier_name),
            path: path.clone(),
            survives: tier.survives.unwrap_or(kind.survives),
            in_memory: kind.in_memory,
            scope,
            ledger,
        })));
    }
    Ok(devices)
}

/// Refuses one directory for two devices, which would count its bytes twice and overwrite each other's files.
fn refuse_twice(tiers: &[Vec<Arc<Device>>]) -> Result<()> {
    let mut seen: HashMap<(u64, u64), &Device> = HashMap::new();
    for device in tiers.iter().flatten() {
        let root = rustix::fs::fstat(device.root()).map_err(|errno| {
            Error::new(format!("tier {} cannot look at {}", device.tier_name(), device.path().display())).why(errno)
        })?;
        if let Some(other) = seen.insert((root.st_dev, root.st_ino), device) {
            return Err(Error::new(format!(
                "tier {} and tier {} use the same directory, {}",
                other.tier_name(),
                device.tier_name(),
                device.path().display()
            ))
            .remedy("give every tier (--tier NAME=PATH) a directory of its own"));
        }
    }
    Ok(())
}

struct FileSystemKind {
    in_memory: bool,
    survives: Survives,
}

/// Derives from the file system's magic number what its files survive.
fn kind_of(dir: impl AsFd, path: &Path, tier: &str) -> Result<FileSystemKind> {
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    const SHARED: [u32; 10] = [
        0x0000_6969, // NFS
        0x0bd0_0bd0, // Lustre
        0x4750_4653, // GPFS
        0x1983_0326, // BeeGFS
        0x00c3_6400, // Ceph
        0xff53_4d42, // CIFS
        0xfe53_4d42, // SMB2
        0xaad7_aaea, // PanFS
        0x2003_0528, // OrangeFS
        0x0000_517b, // SMB
    ];
    let stat = rustix::fs::fstatfs(dir).map_err(|errno| {
        Error::new(format!("tier {tier} cannot tell the kind of file system at {}", path.display())).why(errno)
    })?;
    // Magic numbers have 32 bits; the field's width and sign differ between architectures.
    let magic = stat.f_type as u32;
    let in_memory = magic == TMPFS || magic == RAMFS;
    let survives = match (in_memory, SHARED.contains(&magic)) {
        (true, _) => Survives::Agent,
        (false, true) => Survives::Node,
        (false, false) => Survives::Reboot,
    };
    Ok(FileSystemKind { in_memory, survives })
}

/// Shares a tier's cap over its devices: each keeps what it has committed, and the rest is divided by spare space. Only what a
/// device has not committed at that moment is taken from it, so the tier never exceeds its cap.
fn share_cap(tier: &[Arc<Device>]) {
    if tier.len() < 2 || !tier.iter().all(|device| device.ledger().cap_is_shared()) {
        return;
    }
    let snapshot: Vec<(u64, u64, u64)> = tier
        .iter()
        .map(|device| {
            let ledger = device.ledger();
            let spare = if device.healthy() { ledger.spare_room_bytes() } else { 0 };
            (ledger.cap_bytes(), ledger.committed_bytes(), spare)
        })
        .collect();
    let cap: u64 = snapshot.iter().map(|(cap, ..)| cap).sum();
    let committed: u64 = snapshot.iter().map(|(_, committed, _)| committed).sum();
    let spare: Vec<u64> = snapshot.iter().map(|(.., spare)| *spare).collect();
    let extra = share_out(cap.saturating_sub(committed), &spare);
    let targets: Vec<u64> = snapshot.iter().zip(&extra).map(|((_, committed, _), extra)| committed + extra).collect();

    let mut pool = 0;
    for (device, target) in tier.iter().zip(&targets) {
        let mut ledger = device.ledger();
        let surplus = ledger.cap_bytes().saturating_sub(*target);
        pool += ledger.give_cap(surplus);
    }
    let wants: Vec<u64> =
        tier.iter().zip(&targets).map(|(device, target)| target.saturating_sub(device.ledger().cap_bytes())).collect();
    for (device, part) in tier.iter().zip(share_out(pool, &wants)) {
        device.ledger().take_cap(part);
    }
}
