//! What placement knows of a device: a snapshot, which may be as old as the period between two polls.

use std::sync::Arc;
use std::time::Duration;

use surgetank_types::model::DeviceId;

use crate::config::Survives;

/// How often devices are looked at; what a direct writer may do unseen is measured by it.
pub const POLL_PERIOD: Duration = Duration::from_millis(100);

/// A snapshot for placement and `status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceView {
    pub id: DeviceId,
    pub tier_name: Arc<str>,
    /// Neither used nor reserved nor wanted by others.
    pub free_bytes: u64,
    pub reserved_bytes: u64,
    pub used_bytes: u64,
    pub cap_bytes: u64,
    /// Direct descriptors open for writing.
    pub writers: u32,
    /// How fast one writer can fill the device.
    pub bandwidth_bytes_per_second: u64,
    /// Bytes in and out per second, lately.
    pub load_bytes_per_second: u64,
    pub healthy: bool,
    pub leases: bool,
    pub survives: Survives,
}
