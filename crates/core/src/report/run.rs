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
use super::{PathText, PoolTraffic, Summary, Verdict};
use surgetank_policy::config::Survives;
use surgetank_types::model::{Mode, RunId};

pub use super::io::{Doors, Io, Kernel, Sizes};

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

/// The record of one run. Every field says what is counted, and for which runs.
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
    /// Number of the run.
    pub run: RunId,
    /// Name of the node.
    pub host: String,
    /// Shortened to [`COMMAND_CHARS_MAX`].
    pub command: String,
    /// The served directory.
    pub directory: PathText,
    /// Path or URL, without secrets.
    pub store: String,
    /// Begin of the run, in microseconds since 1970.
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
    /// The last verdict on the run's output; `None`: no verdict was given.
    pub verdict: Option<Verdict>,
    /// The agent's summary since it started, as in `--json`.
    pub summary: Option<Summary>,
    /// How many agents served the run: more than 1 when one was killed and another took over. The mount's counts of an
    /// earlier agent since its last note (every few seconds) are then missing.
    pub agents: u32,
    /// Other runs over the same directory during this one. `tiers`, `store`, `events` and `samples` are the agent's and
    /// include theirs; `processes`, `programs` and `files` are this run's alone.
    pub runs_beside: u32,
    /// Each tier during the run, in the configured order.
    pub tiers: Vec<TierRecord>,
    /// Traffic with the store during the run.
    pub store_traffic: StoreTraffic,
    /// Calls of this node's agent to other members of its pool while the run lasted; missing outside a pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_traffic: Option<PoolTraffic>,
    /// Decisions and incidents of the engine, by kind, place and reason.
    pub events: Vec<Event>,
    /// The state of tiers and queue over time.
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
    /// The part of the run after the command's end.
    pub tail: Tail,
}

/// One tier during the run: the growth of its counters from the run's begin to its end.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TierRecord {
    /// Name of the tier.
    pub name: String,
    /// The most bytes that Surgetank uses of the tier, over all its devices.
    pub cap_bytes: u64,
    /// The event that its files outlive; `None`: not recorded.
    pub survives: Option<Survives>,
    /// Directories of the tier's devices.
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
    /// The most bytes in use at a sample.
    pub used_bytes_max: u64,
    /// The most bytes at a sample that the store did not have.
    pub dirty_bytes_max: u64,
}

/// Traffic between the agent and the store during the run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreTraffic {
    /// Files made durable.
    pub out_files: u64,
    /// Bytes made durable, without holes.
    pub out_bytes: u64,
    /// Fetched files: opens that no tier answered, prefetched files, mediated reads of the store.
    pub in_files: u64,
    /// Fetched bytes.
    pub in_bytes: u64,
    /// Time in which the queue was not empty, in microseconds.
    pub busy_us: u64,
    /// `out_bytes` per second of `busy_us`.
    pub out_bytes_per_second: u64,
    /// Tries that failed and were repeated.
    pub failures: u64,
    /// Copies that verification rejected.
    pub corrupt: u64,
}

/// Kind of an event.
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
    /// A durable file left a tier.
    Evicted,
    /// Another client had changed the store's file: both are kept.
    Conflict,
    /// A writer for which no room was left anywhere.
    NoRoom,
}

/// How often one event happened for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Kind of the event.
    pub kind: EventKind,
    /// Tier, or `store`.
    pub place: String,
    /// In a few words, without the figures of the single case, so that equal ones are counted together. From
    /// `placement::Reason` where placement decided.
    pub reason: String,
    /// Number of times.
    pub count: u64,
    /// The bytes of these files, where known at that time.
    pub bytes: u64,
}

/// The state of tiers and queue over time. `points[i]` was taken at `points[i].at_us`; a point is the state at that
/// time, not an average.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Samples {
    /// Time between two points, in microseconds.
    pub interval_us: u64,
    /// Names of the tiers, in the order of `Sample::tiers`.
    pub tiers: Vec<String>,
    /// Points in the order of time, [`SAMPLES_MAX`] at most.
    pub points: Vec<Sample>,
}

/// The state of tiers and queue at one time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Time of the point, in microseconds since the run began.
    pub at_us: u64,
    /// Fill of each tier, in the order of [`Samples::tiers`].
    pub tiers: Vec<Fill>,
    /// The work that waits for the store: files, renames, deletes …
    pub queue_operations: u64,
    /// Bytes that wait for the store, without holes.
    pub queue_bytes: u64,
    /// Made durable since the run began; the rate between two points is the difference over the time.
    pub drained_bytes: u64,
    /// Fetched from the store since the run began.
    pub fetched_bytes: u64,
}

/// Fill of one tier at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fill {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Those of them that the store does not have.
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

/// One process of the run, and its I/O.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Process id.
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
    /// The source of the figures.
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
    /// Name of the executable, without its directory.
    pub program: String,
    /// Number of processes.
    pub processes: u64,
    /// Sum of the times from their begin to their end.
    pub lived_us: u64,
    /// I/O in the directory, summed up.
    pub io: Doors,
    /// Of those processes for which it is known.
    pub kernel: Option<Kernel>,
}

/// A file that the run wrote.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct File {
    /// Path below the served directory.
    pub path: PathText,
    /// Size of the last version in bytes.
    pub size_bytes: u64,
    /// How often it was closed after a write.
    pub versions: u64,
    /// The mode that applied at the close: whether and how the file reaches the store.
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
    /// Duration in microseconds; 0 where the command's end is unknown.
    pub elapsed_us: u64,
    /// Files that were left to drain when the command ended.
    pub undrained_files: u64,
    /// Bytes that were left to drain when the command ended, without holes.
    pub undrained_bytes: u64,
    /// Renames, deletes and changes of attributes that were left to drain.
    pub undrained_operations: u64,
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
}
