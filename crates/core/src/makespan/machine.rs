//! What a calibration found out about a machine: the figures the model computes with, in base units (bytes, seconds).
//!
//! Written by `surgetank calibrate`, read by `model` and `advise`; a person may edit it, so it is plain JSON and every figure is a
//! field. `None` means "not measured", never zero.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Grows when an older program would read a file wrongly.
pub const SCHEMA: u32 = 1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    pub schema: u32,
    pub version: String,
    /// Seconds since 1970.
    pub taken_at_s: u64,
    pub host: String,
    /// One-minute load average before and after: what was measured beside others is doubtful.
    pub load_before: f64,
    pub load_after: f64,
    pub cores: f64,
    /// Memory the machine may use for programs, tiers in memory and page cache together.
    pub memory_bytes: u64,
    pub store: Place,
    /// Fastest first.
    pub tiers: Vec<Place>,
    pub agent: Agent,
    /// What could not be measured as it should, in words.
    pub notes: Vec<String>,
}

/// A tier or the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    pub name: String,
    pub path: PathBuf,
    /// tmpfs: its files are memory, and no page cache lies over them.
    pub in_memory: bool,
    /// Our cap there; for the store what is free.
    pub room_bytes: u64,
    pub read: Stream,
    pub write: Stream,
    /// Reading what the page cache has, and writing what it still takes.
    pub cached_read: Stream,
    pub cached_write: Stream,
    /// Bytes that writers may be ahead of the device.
    pub dirty_bytes: u64,
    pub operations: Operations,
    /// Bandwidth of all nodes together, where it is known to be more than one node gets. Not measured: one node cannot.
    #[serde(default)]
    pub total_read_bps: Option<f64>,
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
    /// Time on a core a byte costs.
    pub cpu_s_per_byte: f64,
    /// How far rounds lay apart: (largest − smallest) ÷ (2 × median).
    pub spread: f64,
}

/// What an operation on a name takes, in seconds, one at a time; `per_second` for all processes together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operations {
    /// open(O_CREAT) and close of a new file.
    pub create_s: f64,
    /// open and close of one that exists.
    pub open_s: f64,
    pub stat_s: f64,
    pub unlink_s: f64,
    /// fsync of a small new file.
    pub fsync_s: f64,
    /// Core time of creating one.
    pub cpu_s: f64,
    /// Creations a second of all processes together.
    pub per_second: f64,
}

/// What our own agent costs here.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    /// `surgetank run -- true`, less the same without it.
    pub start_s: f64,
    pub shim: Option<Door>,
    pub mount: Option<Door>,
    /// One small file, from closed to durable, when many wait: the drain as a whole does so many a second.
    pub drain_file_s: f64,
    pub drain_file_cpu_s: f64,
    /// Of the drain, of large files.
    pub drain_bps: f64,
    pub drain_cpu_s_per_byte: f64,
    /// How long a closed file is left alone before it is drained.
    pub quiet_s: f64,
}

/// Files through one of the doors, tier file behind it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Door {
    pub create_s: f64,
    pub create_cpu_s: f64,
    pub open_s: f64,
    pub open_cpu_s: f64,
    /// A file that only the store has.
    pub open_store_s: f64,
    pub open_store_cpu_s: f64,
    /// Creations a second of all processes together.
    pub per_second: f64,
}

impl Calibration {
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

    /// Zero or negative rates would have the simulation divide by them.
    fn check(&self) -> Result<(), String> {
        if !(self.cores >= 1.0 && self.cores.is_finite()) {
            return Err(format!("{} cores", self.cores));
        }
        for place in self.tiers.iter().chain([&self.store]) {
            for (what, stream) in [
                ("read", place.read),
                ("write", place.write),
                ("cached_read", place.cached_read),
                ("cached_write", place.cached_write),
            ] {
                let positive = stream.one_bps > 0.0 && stream.all_bps > 0.0 && stream.cpu_s_per_byte >= 0.0;
                if !positive || !(0.0..=10.0).contains(&stream.spread) {
                    return Err(format!("{what} of {} is {stream:?}", place.name));
                }
            }
            let operations = &place.operations;
            let times = [
                operations.create_s,
                operations.open_s,
                operations.stat_s,
                operations.unlink_s,
                operations.fsync_s,
                operations.cpu_s,
            ];
            if !(operations.per_second > 0.0 && times.iter().all(|time| *time >= 0.0)) {
                return Err(format!("operations of {} are {operations:?}", place.name));
            }
        }
        let agent = &self.agent;
        for door in agent.shim.iter().chain(&agent.mount) {
            if !(door.per_second > 0.0 && door.create_s >= 0.0 && door.open_s >= 0.0 && door.open_store_s >= 0.0) {
                return Err(format!("the agent's door is {door:?}"));
            }
        }
        if !(agent.drain_bps > 0.0 && agent.drain_file_s >= 0.0 && agent.quiet_s >= 0.0) {
            return Err(format!("the drain is {agent:?}"));
        }
        Ok(())
    }

    /// The same machine, all of its rates multiplied by what rounds lay apart: +1 the fastest seen, −1 the slowest.
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
