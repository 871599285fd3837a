//! A device as placement sees it: a snapshot, at most as old as the period between two polls.

use std::sync::Arc;
use std::time::Duration;

use surgetank_types::model::DeviceId;

use crate::config::Survives;

/// Time between two polls of the devices. It determines how much a direct writer may write unseen.
pub const POLL_PERIOD: Duration = Duration::from_millis(100);

/// A snapshot of a device, for placement and `status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceView {
    /// The device.
    pub id: DeviceId,
    /// Name of its tier.
    pub tier_name: Arc<str>,
    /// Bytes that are neither used nor reserved nor needed by other users.
    pub free_bytes: u64,
    /// Bytes that are reserved.
    pub reserved_bytes: u64,
    /// Bytes that Surgetank's files use.
    pub used_bytes: u64,
    /// The most bytes that may be used and reserved together.
    pub cap_bytes: u64,
    /// Number of direct descriptors that are open for writing.
    pub writers: u32,
    /// Rate at which one writer can fill the device.
    pub bandwidth_bytes_per_second: u64,
    /// Bytes read and written per second, recently.
    pub load_bytes_per_second: u64,
    /// Whether the device may get new files: it is in use and not only drained.
    pub healthy: bool,
    /// Whether `F_SETLEASE` works on it.
    pub leases: bool,
    /// What its files survive.
    pub survives: Survives,
}
