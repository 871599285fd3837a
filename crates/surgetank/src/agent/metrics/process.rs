//! The agent process's use of the machine. A value that cannot be read is reported as 0.

use std::fs;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

#[derive(Debug, Default)]
pub struct Process {
    pub cpu_seconds: f64,
    pub resident_bytes: u64,
    pub virtual_bytes: u64,
    pub open_descriptors: usize,
    pub descriptors_max: u64,
}

impl Process {
    pub fn of_this() -> Self {
        let used = clock_gettime(ClockId::ProcessCPUTime);
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            cpu_seconds: used.tv_sec as f64 + used.tv_nsec as f64 / 1e9,
            resident_bytes: field(&status, "VmRSS:"),
            virtual_bytes: field(&status, "VmSize:"),
            // The directory itself is open while it is read.
            open_descriptors: fs::read_dir("/proc/self/fd").map_or(0, |list| list.count().saturating_sub(1)),
            descriptors_max: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        }
    }
}

/// `VmRSS:    1234 kB`
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_has_nonzero_usage() {
        let process = Process::of_this();
        assert!(process.resident_bytes > 1 << 20 && process.virtual_bytes >= process.resident_bytes, "{process:?}");
        assert!(
            process.open_descriptors >= 3 && process.descriptors_max >= process.open_descriptors as u64,
            "{process:?}"
        );
        assert!(process.cpu_seconds > 0.0, "{process:?}");
    }
}
