//! The I/O of processes, by its door, and its sums.
//!
//! The danger that it avoids: a counted byte and an estimated byte in one figure.

use serde::{Deserialize, Serialize};

/// I/O in the directory, by its door. A request is counted in one of them only.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Doors {
    /// On descriptors that the preload shim granted: directly on the tier, counted in the program.
    pub shim: Io,
    /// On files of the mount that the kernel reads and writes itself, counted in programs that have the shim.
    pub passthrough: Io,
    /// The same in programs without the shim: their requests are not counted. Opens are counted; the bytes are an
    /// estimate (`estimated_read_bytes`, `estimated_write_bytes`).
    pub passthrough_unseen: Io,
    /// Counted by the agent, request by request.
    pub mediated: Io,
    /// On descriptors that the seccomp door granted, where there is no mount: as `passthrough_unseen`.
    pub seccomp: Io,
}

/// I/O through one door. Counted, unless a field's name says that it is an estimate.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Io {
    /// Successful opens for reading only.
    pub read_opens: u64,
    /// Successful opens for writing, those that made the file included.
    pub write_opens: u64,
    /// Opens with permission to make the file.
    pub create_opens: u64,
    /// Bytes that read calls returned.
    pub read_bytes: u64,
    /// Bytes that write calls took.
    pub write_bytes: u64,
    /// Read calls.
    pub read_calls: u64,
    /// Write calls.
    pub write_calls: u64,
    /// fsync, fdatasync, msync and the like.
    pub sync_calls: u64,
    /// Bytes of the mapped files (mmap): how much of them the program touched is unknown, and in no other figure.
    pub mapped_bytes: u64,
    /// Calls that mapped a file (mmap).
    pub map_calls: u64,
    /// Read calls by the bytes that each moved.
    pub read_sizes: Sizes,
    /// Write calls by the bytes that each moved.
    pub write_sizes: Sizes,
    /// Time in read calls, in microseconds, measured from outside. Sampled where requests are small, like the times
    /// below.
    pub read_us: u64,
    /// Time in write calls, in microseconds.
    pub write_us: u64,
    /// Time in sync calls, in microseconds.
    pub sync_us: u64,
    /// Time in opens, in microseconds.
    pub open_us: u64,
    /// For files whose requests cannot be counted: their size at the close, in bytes, once per open for reading.
    pub estimated_read_bytes: u64,
    /// The same for opens for writing, in bytes.
    pub estimated_write_bytes: u64,
}

/// Histogram of request sizes by powers of two: entry 0 counts requests of 0 bytes, entry n those of 2ⁿ⁻¹ to 2ⁿ−1.
/// Zeros at the end are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sizes(pub Vec<u64>);

/// `/proc/PID/io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Kernel {
    /// rchar: bytes of read calls on any file.
    pub read_bytes: u64,
    /// wchar: bytes of write calls on any file.
    pub write_bytes: u64,
    /// syscr: read calls on any file.
    pub read_calls: u64,
    /// syscw: write calls on any file.
    pub write_calls: u64,
    /// read_bytes: bytes read from block devices that the process caused.
    pub device_read_bytes: u64,
    /// write_bytes: bytes written to block devices that the process caused.
    pub device_write_bytes: u64,
}

/// Programs write their own counts, so an overflow in a sum must not stop the recorder.
fn add(to: &mut u64, more: u64) {
    *to = to.saturating_add(more);
}

impl Sizes {
    /// Counts a request of `bytes` bytes.
    pub fn add(&mut self, bytes: u64) {
        self.add_many((u64::BITS - bytes.leading_zeros()) as usize, 1);
    }

    /// Adds `count` to entry `class`.
    pub fn add_many(&mut self, class: usize, count: u64) {
        if count == 0 {
            return;
        }
        if self.0.len() <= class {
            self.0.resize(class + 1, 0);
        }
        if let Some(entry) = self.0.get_mut(class) {
            *entry = entry.saturating_add(count);
        }
    }

    /// Number of requests.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    fn join(&mut self, other: &Self) {
        for (class, count) in other.0.iter().enumerate() {
            self.add_many(class, *count);
        }
    }
}

impl Io {
    /// Adds all figures of `other`.
    pub fn join(&mut self, other: &Self) {
        add(&mut self.read_opens, other.read_opens);
        add(&mut self.write_opens, other.write_opens);
        add(&mut self.create_opens, other.create_opens);
        add(&mut self.read_bytes, other.read_bytes);
        add(&mut self.write_bytes, other.write_bytes);
        add(&mut self.read_calls, other.read_calls);
        add(&mut self.write_calls, other.write_calls);
        add(&mut self.sync_calls, other.sync_calls);
        add(&mut self.mapped_bytes, other.mapped_bytes);
        add(&mut self.map_calls, other.map_calls);
        self.read_sizes.join(&other.read_sizes);
        self.write_sizes.join(&other.write_sizes);
        add(&mut self.read_us, other.read_us);
        add(&mut self.write_us, other.write_us);
        add(&mut self.sync_us, other.sync_us);
        add(&mut self.open_us, other.open_us);
        add(&mut self.estimated_read_bytes, other.estimated_read_bytes);
        add(&mut self.estimated_write_bytes, other.estimated_write_bytes);
    }

    /// Counted bytes, reads and writes.
    pub fn bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.write_bytes)
    }

    /// Every figure is 0.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Doors {
    /// The figures of each door, with its name for users.
    pub fn all(&self) -> [(&'static str, &Io); 5] {
        [
            ("shim", &self.shim),
            ("passthrough", &self.passthrough),
            ("passthrough, uncounted", &self.passthrough_unseen),
            ("mediated", &self.mediated),
            ("seccomp", &self.seccomp),
        ]
    }

    /// Adds the figures of `other`, door by door.
    pub fn join(&mut self, other: &Self) {
        self.shim.join(&other.shim);
        self.passthrough.join(&other.passthrough);
        self.passthrough_unseen.join(&other.passthrough_unseen);
        self.mediated.join(&other.mediated);
        self.seccomp.join(&other.seccomp);
    }

    /// All counted and estimated I/O, through every door.
    pub fn total(&self) -> Io {
        let mut total = Io::default();
        for (_, io) in self.all() {
            total.join(io);
        }
        total
    }
}

impl Kernel {
    /// Adds all figures of `other`.
    pub fn join(&mut self, other: &Self) {
        add(&mut self.read_bytes, other.read_bytes);
        add(&mut self.write_bytes, other.write_bytes);
        add(&mut self.read_calls, other.read_calls);
        add(&mut self.write_calls, other.write_calls);
        add(&mut self.device_read_bytes, other.device_read_bytes);
        add(&mut self.device_write_bytes, other.device_write_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_classed_by_powers_of_two() {
        let mut sizes = Sizes::default();
        for bytes in [0, 1, 2, 3, 4, 4096, 4096, 4095] {
            sizes.add(bytes);
        }
        assert_eq!(sizes.0, [1, 1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(sizes.total(), 8);
    }

    #[test]
    fn overflowing_figures_saturate() {
        let mut io = Io { read_bytes: u64::MAX, write_bytes: 1, ..Io::default() };
        io.read_sizes.add_many(3, u64::MAX);
        io.join(&io.clone());
        assert_eq!((io.read_bytes, io.bytes(), io.read_sizes.total()), (u64::MAX, u64::MAX, u64::MAX));
        let mut kernel = Kernel { read_calls: u64::MAX, ..Kernel::default() };
        kernel.join(&kernel.clone());
        assert_eq!(kernel.read_calls, u64::MAX);
    }

    #[test]
    fn doors_are_added_up_and_stay_apart() {
        let mut one = Doors::default();
        one.shim.read_bytes = 5;
        one.shim.read_sizes.add(5);
        let mut two = Doors::default();
        two.mediated.write_bytes = 7;
        two.seccomp.estimated_read_bytes = 11;
        one.join(&two);
        assert_eq!((one.shim.read_bytes, one.mediated.write_bytes), (5, 7));
        let total = one.total();
        assert_eq!((total.bytes(), total.estimated_read_bytes, total.read_sizes.total()), (12, 11, 1));
    }
}
