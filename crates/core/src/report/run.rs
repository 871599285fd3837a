//! The record of a run: the agent writes it when the run has ended (`STATE/PLACE/runs/ID.json`), and `surgetank report`
//! renders it. docs/report.md describes it for users.
//!
//! - Every time is in microseconds since the run began (`…_us`, monotonic clock); `begun_unix_us` anchors them.
//! - A list that could be as long as the run is large is bounded, and the record says what was left out.
//! - An estimate has its own field, named as an estimate, and is never added to counts.
//!
//! The danger that it avoids: a second renderer reads a field in another sense. So every field says what is counted,
//! and whose.

use serde::{Deserialize, Serialize};

use super::pattern::Access;
use super::{PathText, Summary, Verdict};
use surgetank_policy::config::Survives;
use surgetank_types::model::{Mode, RunId};

/// The record's format. New fields do not change the number; a reader takes a missing field as empty.
pub const FORMAT: u32 = 1;
/// The most samples of a record: when they are reached, every second one is dropped and the interval doubles.
pub const SAMPLES_MAX: usize = 600;
/// The most processes of a record, those that moved most bytes; all of them are in `programs`.
pub const PROCESSES_MAX: usize = 1000;
/// The same for a traced run, which is about processes.
pub const TRACED_PROCESSES_MAX: usize = 20_000;
/// Files of one process in the record of a traced run.
pub const ACCESSES_MAX: usize = 10_000;
/// The most files of a record.
pub const FILES_MAX: usize = 100;
/// The most characters of a command line.
pub const COMMAND_CHARS_MAX: usize = 1000;

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of Surgetank.
    pub version: String,
    /// Name of the record, `YYYYMMDD-HHMMSS-UUUUUU-N` (UTC, with microseconds), as an argument of `surgetank report`.
    /// Names sort by time.
    pub id: String,
    pub run: RunId,
    pub host: String,
    /// Shortened to [`COMMAND_CHARS_MAX`].
    pub command: String,
    /// The served directory.
    pub directory: PathText,
    /// Path or URL, without secrets.
    pub store: String,
    pub begun_unix_us: i64,
    /// When the command had ended; `None`: unknown (the run was killed, or detached).
    pub command_ended_us: Option<u64>,
    /// When the run had ended, its final drain included.
    pub ended_us: u64,
    /// The command's exit code, as a shell returns it.
    pub command_exit: Option<u8>,
    /// The exit code of `surgetank run` itself.
    pub exit: Option<u8>,
    /// Why `exit` differs from `command_exit`; empty when they are equal, or when neither is known.
    pub reason: String,
    pub verdict: Option<Verdict>,
    /// The agent's summary since it started, as in `--json`.
    pub summary: Option<Summary>,
    /// How many agents served the run: more than 1 when one was killed and another took over. The mount's counts of an
    /// earlier agent since its last note (every few seconds) are then missing.
    pub agents: u32,
    /// Other runs over the same directory during this one. `tiers`, `store`, `events` and `samples` are the agent's and
    /// include theirs; `processes`, `programs` and `files` are this run's alone.
    pub runs_beside: u32,
    pub tiers: Vec<TierRecord>,
    pub store_traffic: StoreTraffic,
    /// Decisions and incidents of the engine, by kind, place and reason.
    pub events: Vec<Event>,
    pub samples: Samples,
    /// In the order of their start.
    pub processes: Vec<Process>,
    /// The number of processes, those outside `processes` included.
    pub processes_total: u64,
    /// Processes without any figures, because no slot to count in was free when they started.
    pub processes_lost: u64,
    /// Processes with impossible figures, because a program wrote over them: only the agent's counts remain.
    pub processes_disbelieved: u64,
    /// Each request was traced (`run --trace`), and `Process::files` says which files were read and written.
    pub traced: bool,
    /// Uses of files that are missing in a process's list because it was full.
    pub accesses_left_out: u64,
    /// A program has truncated or removed the memory that processes count in: their later work is unknown.
    pub counting_ended: bool,
    /// All processes, by the name of their program; those that moved most bytes first.
    pub programs: Vec<Program>,
    /// The largest and the slowest, [`FILES_MAX`] at most.
    pub files: Vec<File>,
    /// The number of files that the run wrote and closed.
    pub files_total: u64,
    pub tail: Tail,
}

/// One tier during the run: the growth of its counters from the run's begin to its end.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierRecord {
    pub name: String,
    pub cap_bytes: u64,
    pub survives: Option<Survives>,
    pub devices: Vec<PathText>,
    /// Files placed on this tier.
    pub files: u64,
    /// Bytes that programs wrote to it, and bytes copied to it. For direct writes the agent sees only the size at the
    /// close.
    pub in_bytes: u64,
    /// Bytes that the drain and mediated reads read from it.
    pub out_bytes: u64,
    /// Opens answered from here.
    pub hits: u64,
    /// Files that had to leave in the middle of a write.
    pub spills: u64,
    pub used_bytes_max: u64,
    pub dirty_bytes_max: u64,
}

/// Traffic between the agent and the store during the run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreTraffic {
    /// Files and bytes made durable.
    pub out_files: u64,
    pub out_bytes: u64,
    /// Fetched files and bytes: opens that no tier answered, prefetched files, mediated reads of the store.
    pub in_files: u64,
    pub in_bytes: u64,
    /// Time in which the queue was not empty, and the rate over it.
    pub busy_us: u64,
    pub out_bytes_per_second: u64,
    /// Tries that failed and were repeated.
    pub failures: u64,
    /// Copies that verification rejected.
    pub corrupt: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A new or overwritten file got this place.
    Placed,
    /// A file was opened that a tier had.
    Hit,
    /// A file was opened that only the store had, and was read there.
    Miss,
    /// A file was fetched from the store into a tier.
    Fetched,
    /// A file had to leave its place in the middle of a write.
    Spilled,
    Evicted,
    /// Another client had changed the store's file: both are kept.
    Conflict,
    /// A writer for which no room was left anywhere.
    NoRoom,
}

/// How often one event happened for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    pub kind: EventKind,
    /// Tier, or `store`.
    pub place: String,
    /// In a few words, without the figures of the single case, so that equal ones are counted together. From
    /// `placement::Reason` where placement decided.
    pub reason: String,
    pub count: u64,
    /// The bytes of these files, where known at that time.
    pub bytes: u64,
}

/// The state of tiers and queue over time. `points[i]` was taken at `points[i].at_us`; a point is the state at that
/// time, not an average.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Samples {
    pub interval_us: u64,
    /// Names of the tiers, in the order of `Sample::tiers`.
    pub tiers: Vec<String>,
    pub points: Vec<Sample>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    pub at_us: u64,
    pub tiers: Vec<Fill>,
    /// The work that waits for the store: files, renames, deletes …
    pub queue_operations: u64,
    pub queue_bytes: u64,
    /// Made durable since the run began; the rate between two points is the difference over the time.
    pub drained_bytes: u64,
    /// Fetched from the store since the run began.
    pub fetched_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fill {
    pub used_bytes: u64,
    pub dirty_bytes: u64,
}

/// The source of a process's figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Counted {
    /// The preload shim, to the process's end.
    Shim,
    /// The preload shim, until the process was killed or became one that does not count (`exec` of a static program).
    ShimCutShort,
    /// The agent only, in the mount or at seccomp's stops: a static program, or one without the shim.
    #[default]
    Agent,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    pub pid: u32,
    /// 0: unknown.
    pub parent: u32,
    /// Name of the executable, without its directory.
    pub program: String,
    /// Shortened; empty where the agent did not see it.
    pub command: String,
    /// The first sign of it. A process that calls `exec` has one entry for each program.
    pub begun_us: u64,
    /// The last sign; `None`: it outlived the run.
    pub ended_us: Option<u64>,
    pub counted: Counted,
    /// I/O in the directory.
    pub io: Doors,
    /// All I/O of this process anywhere, as the kernel counts it (`/proc/PID/io`), where it could be read.
    pub kernel: Option<Kernel>,
    /// The parent of a process whose standard input or output is a pipe that the parent does not have itself. Processes
    /// with the same one at the same time belong to one pipeline. 0: none, or unknown. Of traced runs only.
    #[serde(skip_serializing_if = "is_zero")]
    pub pipeline: u32,
    /// Of a traced run: the process's use of each file, in the order of their names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Access>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's way")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// All processes of one program.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Program {
    pub program: String,
    pub processes: u64,
    /// Sum of the times from their begin to their end.
    pub lived_us: u64,
    pub io: Doors,
    /// Of those processes for which it is known.
    pub kernel: Option<Kernel>,
}

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
    /// Bytes that read calls returned and write calls took.
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_calls: u64,
    pub write_calls: u64,
    /// fsync, fdatasync, msync and the like.
    pub sync_calls: u64,
    /// Bytes of the mapped files (mmap): how much of them the program touched is unknown, and in no other figure.
    pub mapped_bytes: u64,
    pub map_calls: u64,
    /// By bytes moved per call.
    pub read_sizes: Sizes,
    pub write_sizes: Sizes,
    /// Time in the calls above, from outside: read, write, sync; and in opens. Sampled where requests are small.
    pub read_us: u64,
    pub write_us: u64,
    pub sync_us: u64,
    pub open_us: u64,
    /// For files whose requests cannot be counted: their size at the close, once per open for reading or for writing.
    pub estimated_read_bytes: u64,
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
    /// rchar, wchar: bytes of read and write calls on any file.
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_calls: u64,
    pub write_calls: u64,
    /// read_bytes, write_bytes: reads from and writes to block devices that the process caused.
    pub device_read_bytes: u64,
    pub device_write_bytes: u64,
}

/// A file that the run wrote.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct File {
    pub path: PathText,
    pub size_bytes: u64,
    /// How often it was closed after a write.
    pub versions: u64,
    pub mode: Mode,
    /// Its place: a tier's name, or `store`.
    pub place: String,
    /// The reason for the place, as `surgetank why` prints it.
    pub placement: String,
    /// The rule that decided the mode, and where it is written.
    pub rule: String,
    /// When its last version was closed.
    pub sealed_us: u64,
    /// When that version was in the store; `None`: never (kept, removed, deleted or not yet).
    pub durable_us: Option<u64>,
}

/// From the end of the command to the last durable byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Tail {
    pub elapsed_us: u64,
    /// What was left to drain when the command ended.
    pub undrained_files: u64,
    pub undrained_bytes: u64,
    pub undrained_operations: u64,
}

/// Programs write their own counts, so an overflow in a sum must not stop the recorder.
fn add(to: &mut u64, more: u64) {
    *to = to.saturating_add(more);
}

impl Sizes {
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

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Doors {
    pub fn all(&self) -> [(&'static str, &Io); 5] {
        [
            ("shim", &self.shim),
            ("passthrough", &self.passthrough),
            ("passthrough, uncounted", &self.passthrough_unseen),
            ("mediated", &self.mediated),
            ("seccomp", &self.seccomp),
        ]
    }

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
    pub fn join(&mut self, other: &Self) {
        add(&mut self.read_bytes, other.read_bytes);
        add(&mut self.write_bytes, other.write_bytes);
        add(&mut self.read_calls, other.read_calls);
        add(&mut self.write_calls, other.write_calls);
        add(&mut self.device_read_bytes, other.device_read_bytes);
        add(&mut self.device_write_bytes, other.device_write_bytes);
    }
}

impl Samples {
    /// Adds a point. Without room, drops every second point, and doubles the interval from here on.
    pub fn push(&mut self, point: Sample) {
        if self.points.len() >= SAMPLES_MAX {
            let mut nth = 0_usize;
            self.points.retain(|_| {
                nth += 1;
                nth % 2 == 1
            });
            self.interval_us = self.interval_us.saturating_mul(2);
        }
        self.points.push(point);
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
    fn samples_stay_bounded_and_cover_the_whole_run() {
        let mut samples = Samples { interval_us: 100, ..Samples::default() };
        let mut at_us = 0;
        for _ in 0..5 * SAMPLES_MAX {
            samples.push(Sample { at_us, ..Sample::default() });
            at_us += samples.interval_us;
        }
        assert!(samples.points.len() <= SAMPLES_MAX && samples.points.len() > SAMPLES_MAX / 2 - 1);
        assert_eq!(samples.points.first().map(|point| point.at_us), Some(0));
        assert!(samples.points.is_sorted_by_key(|point| point.at_us));
        let widest = samples.points.windows(2).map(|two| two[1].at_us - two[0].at_us).max();
        assert_eq!(widest, Some(samples.interval_us), "no gap is wider than the interval says");
    }

    #[test]
    fn record_with_missing_or_new_fields_is_read() {
        let record: RunRecord = serde_json::from_str(r#"{"format":1,"id":"x","invented_later":[1]}"#).unwrap();
        assert_eq!((record.format, record.id.as_str()), (1, "x"));
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<RunRecord>(&json).unwrap(), record);
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
