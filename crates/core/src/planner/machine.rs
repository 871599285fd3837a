//! The figures of a machine that a calibration measured, in base units (bytes, seconds).
//!
//! `surgetank calibrate` writes it; `model` and `advise` read it. A user may edit it, so it is plain JSON and every
//! figure is a field. `None` means "not measured", never zero.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use surgetank_types::error::{Error, Result};

/// Grows when an older program would read a file wrongly.
pub const SCHEMA: u32 = 1;

/// The figures of one machine, its tiers, its store, and the agent on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`SCHEMA`] of the program that wrote the file.
    pub schema: u32,
    /// The version of Surgetank that measured.
    pub version: String,
    /// Seconds since 1970.
    pub taken_at_s: u64,
    /// Name of the node.
    pub host: String,
    /// One-minute load average before the measurement. A measurement beside other work is doubtful.
    pub load_before: f64,
    /// One-minute load average after the measurement.
    pub load_after: f64,
    /// Cores that programs may use.
    pub cores: f64,
    /// Memory the machine may use for programs, tiers in memory and page cache together.
    pub memory_bytes: u64,
    /// The store.
    pub store: Place,
    /// Fastest first.
    pub tiers: Vec<Place>,
    /// Costs of the agent.
    pub agent: Agent,
    /// Measurements that failed or are doubtful, in words.
    pub notes: Vec<String>,
}

/// A tier or the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Name of the tier, or `store`.
    pub name: String,
    /// The measured directory.
    pub path: PathBuf,
    /// tmpfs: its files are memory, without a page cache over them.
    pub in_memory: bool,
    /// Surgetank's cap there; for the store the free bytes.
    pub room_bytes: u64,
    /// Cold reading.
    pub read: Stream,
    /// Writing with sync.
    pub write: Stream,
    /// Reads that the page cache answers.
    pub cached_read: Stream,
    /// Writes that the page cache still accepts.
    pub cached_write: Stream,
    /// Bytes that writers may be ahead of the device.
    pub dirty_bytes: u64,
    /// Operations on names.
    pub operations: Operations,
    /// Bandwidth of all nodes together, where it is known to be more than one node gets. Not measured: one node cannot.
    #[serde(default)]
    pub total_read_bps: Option<f64>,
    /// The same for writing, in bytes per second.
    #[serde(default)]
    pub total_write_bps: Option<f64>,
}

/// Sequential bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Of one process.
    pub one_bps: f64,
    /// Of as many processes as there are cores, together.
    pub all_bps: f64,
    /// Core time per byte.
    pub cpu_s_per_byte: f64,
    /// The spread of rounds: (largest − smallest) ÷ (2 × median).
    pub spread: f64,
}

/// The time of one operation on a name, in seconds, one at a time; `per_second` for all processes together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operations {
    /// open(O_CREAT) and close of a new file.
    pub create_s: f64,
    /// open and close of an existing file.
    pub open_s: f64,
    /// stat of an existing file.
    pub stat_s: f64,
    /// unlink of a file.
    pub unlink_s: f64,
    /// fsync of a small new file.
    pub fsync_s: f64,
    /// Core time of one creation.
    pub cpu_s: f64,
    /// Creations per second of all processes together.
    pub per_second: f64,
}

/// The costs of Surgetank's own agent here.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    /// `surgetank run -- true`, less the same without it.
    pub start_s: f64,
    /// Files through the preload shim; `None`: not measured.
    pub shim: Option<Door>,
    /// Files through the mount; `None`: not measured.
    pub mount: Option<Door>,
    /// One small file, from closed to durable, when many wait: the inverse of the drain's rate in files.
    pub drain_file_s: f64,
    /// Core time of the agent for one small file.
    pub drain_file_cpu_s: f64,
    /// The drain's rate with large files.
    pub drain_bps: f64,
    /// Core time of the agent for one byte of a large file.
    pub drain_cpu_s_per_byte: f64,
    /// How long a closed file rests before the drain takes it.
    pub quiet_s: f64,
}

/// Files through one of the doors, with a tier's file behind it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Door {
    /// open(O_CREAT) and close of a new file, in seconds.
    pub create_s: f64,
    /// Core time of one creation, in program and agent together, in seconds.
    pub create_cpu_s: f64,
    /// open and close of a file on a tier, in seconds.
    pub open_s: f64,
    /// Core time of one open, in program and agent together, in seconds.
    pub open_cpu_s: f64,
    /// Opens a file that only the store has.
    pub open_store_s: f64,
    /// Core time of one such open, in program and agent together, in seconds.
    pub open_store_cpu_s: f64,
    /// Creations per second of all processes together.
    pub per_second: f64,
}

impl Calibration {
    /// Reads a calibration from JSON, and checks it. Errors: not JSON, another schema, a figure out of range.
    pub fn parse(text: &str) -> Result<Self> {
        let again = "measure again: surgetank calibrate --out FILE";
        let calibration: Self = serde_json::from_str(text)
            .map_err(|error| Error::new("the calibration can't be read").why(error).remedy(again))?;
        if calibration.schema != SCHEMA {
            return Err(Error::new(format!(
                "the calibration has schema {}, this program reads {SCHEMA}",
                calibration.schema
            ))
            .remedy(again));
        }
        calibration.check().map_err(|why| Error::new("the calibration can't be right").why(why).remedy(again))?;
        Ok(calibration)
    }

    /// Checks that every figure of the simulation is in a range where its sums and quotients stay finite. The error
    /// names the wrong figure as in the file.
    pub fn check(&self) -> Result<(), String> {
        within("cores", self.cores, 1.0..=CORES_MAX)?;
        whole("memory_bytes", self.memory_bytes)?;
        self.store.check("store")?;
        for (number, tier) in self.tiers.iter().enumerate() {
            tier.check(&format!("tiers[{number}] ({})", tier.name))?;
        }
        let agent = &self.agent;
        for (name, door) in [("shim", &agent.shim), ("mount", &agent.mount)] {
            if let Some(door) = door {
                door.check(&format!("agent.{name}"))?;
            }
        }
        rate("agent.drain_bps", agent.drain_bps)?;
        for (name, seconds) in [
            ("start_s", agent.start_s),
            ("drain_file_s", agent.drain_file_s),
            ("drain_file_cpu_s", agent.drain_file_cpu_s),
            ("drain_cpu_s_per_byte", agent.drain_cpu_s_per_byte),
            ("quiet_s", agent.quiet_s),
        ] {
            time(&format!("agent.{name}"), seconds)?;
        }
        Ok(())
    }

    /// The same machine, with all of its rates scaled by the spread: +1 is the fastest seen, −1 the slowest.
    #[must_use]
    pub fn at_spread(&self, direction: f64) -> Self {
        let mut machine = self.clone();
        for place in machine.tiers.iter_mut().chain([&mut machine.store]) {
            for stream in [&mut place.read, &mut place.write, &mut place.cached_read, &mut place.cached_write] {
                let factor = (1.0 + direction * stream.spread).max(0.1);
                stream.one_bps *= factor;
                stream.all_bps *= factor;
            }
        }
        let write = self.store.write.spread;
        machine.agent.drain_bps *= (1.0 + direction * write).max(0.1);
        machine
    }
}

impl Place {
    fn check(&self, what: &str) -> Result<(), String> {
        whole(&format!("room_bytes of {what}"), self.room_bytes)?;
        whole(&format!("dirty_bytes of {what}"), self.dirty_bytes)?;
        for (name, stream) in [
            ("read", self.read),
            ("write", self.write),
            ("cached_read", self.cached_read),
            ("cached_write", self.cached_write),
        ] {
            rate(&format!("{name}.one_bps of {what}"), stream.one_bps)?;
            rate(&format!("{name}.all_bps of {what}"), stream.all_bps)?;
            time(&format!("{name}.cpu_s_per_byte of {what}"), stream.cpu_s_per_byte)?;
            within(&format!("{name}.spread of {what}"), stream.spread, 0.0..=SPREAD_MAX)?;
        }
        for (name, total) in [("total_read_bps", self.total_read_bps), ("total_write_bps", self.total_write_bps)] {
            total.map_or(Ok(()), |total| rate(&format!("{name} of {what}"), total))?;
        }
        let operations = &self.operations;
        for (name, seconds) in [
            ("create_s", operations.create_s),
            ("open_s", operations.open_s),
            ("stat_s", operations.stat_s),
            ("unlink_s", operations.unlink_s),
            ("fsync_s", operations.fsync_s),
            ("cpu_s", operations.cpu_s),
        ] {
            time(&format!("operations.{name} of {what}"), seconds)?;
        }
        within(&format!("operations.per_second of {what}"), operations.per_second, PER_SECOND)
    }
}

impl Door {
    fn check(&self, what: &str) -> Result<(), String> {
        for (name, seconds) in [
            ("create_s", self.create_s),
            ("create_cpu_s", self.create_cpu_s),
            ("open_s", self.open_s),
            ("open_cpu_s", self.open_cpu_s),
            ("open_store_s", self.open_store_s),
            ("open_store_cpu_s", self.open_store_cpu_s),
        ] {
            time(&format!("{what}.{name}"), seconds)?;
        }
        within(&format!("{what}.per_second"), self.per_second, PER_SECOND)
    }
}

const CORES_MAX: f64 = 65_536.0;
/// 8 PiB.
const BYTES_MAX: u64 = 1 << 53;
/// From a byte per second to a million times the rate of memory.
const RATE_BPS: RangeInclusive<f64> = 1.0..=1e18;
/// From one operation in a quarter of an hour.
const PER_SECOND: RangeInclusive<f64> = 0.001..=1e15;
/// Eleven days, for one operation.
const TIME_S: RangeInclusive<f64> = 0.0..=1e6;
const SPREAD_MAX: f64 = 10.0;

/// NaN is outside every range.
fn within(what: &str, value: f64, range: RangeInclusive<f64>) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(format!("{what} is {value}, it must be from {} to {}", range.start(), range.end()))
}

fn whole(what: &str, bytes: u64) -> Result<(), String> {
    if bytes <= BYTES_MAX { Ok(()) } else { Err(format!("{what} is {bytes}, it must be at most {BYTES_MAX}")) }
}

fn rate(what: &str, bps: f64) -> Result<(), String> {
    within(what, bps, RATE_BPS)
}

fn time(what: &str, seconds: f64) -> Result<(), String> {
    within(what, seconds, TIME_S)
}
