//! A recorded run (`STATE/PLACE/runs/ID.json`, docs/report.md) as a workload: the programs' work, to be predicted for
//! another machine.
//!
//! The record has each process's life and bytes, not its files. So the model assumes:
//! - A task is a process that moved bytes. It waits for the processes that had ended when it began.
//! - For the largest files the record has the time of the last close, and whether they went to the store. Such a file
//!   is the output of the process that wrote enough and ended soonest after that.
//! - Reads past the shim come from the store, because the shim opens files on a tier.
//! - The other bytes, and all bytes without the shim, are divided between the store and other processes' output. The
//!   whole run's proportion decides.
//! - Time outside I/O counts as computing. Time between a process's start and the last end before it counts as waiting.
//!
//! The parser reads only the fields that it uses.

use serde::Deserialize;
use serde_json::Value;

use super::{Fate, FileSet, Step, Task, Workload};
use surgetank_types::error::{Error, Result};

#[derive(Deserialize, Default)]
#[serde(default)]
struct Record {
    id: String,
    processes: Vec<Process>,
    processes_total: u64,
    ended_us: u64,
    store_traffic: StoreTraffic,
    files: Vec<File>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct File {
    size_bytes: u64,
    sealed_us: u64,
    durable_us: Option<u64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct StoreTraffic {
    out_files: u64,
    out_bytes: u64,
    in_files: u64,
    in_bytes: u64,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Process {
    pid: u32,
    parent: u32,
    program: String,
    begun_us: u64,
    ended_us: Option<u64>,
    io: std::collections::BTreeMap<String, Io>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Io {
    read_opens: u64,
    write_opens: u64,
    read_bytes: u64,
    write_bytes: u64,
    mapped_bytes: u64,
    estimated_read_bytes: u64,
    estimated_write_bytes: u64,
    read_us: u64,
    write_us: u64,
    sync_us: u64,
    open_us: u64,
}

impl Process {
    fn sum(&self, of: impl Fn(&Io) -> u64) -> u64 {
        total(self.io.values().map(of))
    }
    fn read_bytes(&self) -> u64 {
        self.sum(|io| total([io.read_bytes, io.estimated_read_bytes, io.mapped_bytes]))
    }
    /// Bytes read past the shim.
    fn other_read_bytes(&self) -> u64 {
        let others = self.io.iter().filter(|(door, _)| *door != "shim").map(|(_, io)| io);
        total(others.map(|io| total([io.read_bytes, io.estimated_read_bytes, io.mapped_bytes])))
    }
    fn other_read_opens(&self) -> u64 {
        total(self.io.iter().filter(|(door, _)| *door != "shim").map(|(_, io)| io.read_opens))
    }
    fn shim_read_bytes(&self) -> u64 {
        self.read_bytes().saturating_sub(self.other_read_bytes())
    }
    fn write_bytes(&self) -> u64 {
        self.sum(|io| total([io.write_bytes, io.estimated_write_bytes]))
    }
    fn read_opens(&self) -> u64 {
        self.sum(|io| io.read_opens)
    }
    fn write_opens(&self) -> u64 {
        self.sum(|io| io.write_opens)
    }
    fn io_us(&self) -> u64 {
        self.sum(|io| total([io.read_us, io.write_us, io.sync_us, io.open_us]))
    }
}

/// Sums figures of a file that a user may have edited: [`Workload::check`] refuses excessive ones later.
fn total(figures: impl IntoIterator<Item = u64>) -> u64 {
    figures.into_iter().fold(0, u64::saturating_add)
}

/// Shells and make take at most this long between two programs.
const OWN_START_US_MAX: u64 = 250_000;
/// The agent learns of a close at about the time when the closing process ends.
const SEALED_LATE_US: u64 = 50_000;

/// Each file is compared with each process. A record has the hundred largest files.
const FILES_MAX: usize = 1_000;

/// Each process is compared with each. A record keeps far fewer.
const PROCESSES_MAX: usize = 10_000;

pub fn workload(value: Value) -> Result<Workload> {
    let record: Record = serde_json::from_value(value)
        .map_err(|error| Error::new("the record of a run is not understood").why(error))?;
    let run = Run::of(&record)?;
    let (reads, writes) = (Reads::of(&run), Writes::of(&run));
    let mut made = Workload { name: record.id.clone(), tasks: Vec::new(), sets: Vec::new() };
    let mut outputs: Vec<Option<usize>> = Vec::new();
    for (number, process) in run.moved.iter().enumerate() {
        let (before_us, after) = run.predecessors(number);
        // Programs do not compute everything before they write; how they interleave is unknown.
        let mut step = Step { streams: true, ..Step::default() };
        let (opens, inputs) = reads.in_store(process);
        step.reads.extend(add(&mut made, "in", number, opens, inputs, Fate::Input));
        let mut left = process.read_bytes() - inputs;
        for output in after.iter().filter_map(|&other| outputs[other]) {
            if left > 0 {
                step.reads.push(output);
                left = left.saturating_sub(made.sets[output].bytes);
            }
        }
        step.cpu_s = run.cpu_s(process);
        step.wait_s = run.wait_s(number, before_us);
        let (files_kept, kept) = writes.in_store(number, process);
        let files = process.write_opens().saturating_sub(files_kept);
        let intermediate = add(&mut made, "work", number, files, process.write_bytes() - kept, Fate::Intermediate);
        let last = add(&mut made, "out", number, files_kept, kept, Fate::Final);
        step.writes.extend(intermediate.iter().chain(&last));
        outputs.push(intermediate.or(last));
        made.tasks.push(Task { stage: process.program.clone(), cores: 1.0, steps: vec![step], after });
    }
    if record.processes_total > record.processes.len() as u64 {
        made.name = format!("{} ({} of {} processes)", made.name, record.processes.len(), record.processes_total);
    }
    Ok(made)
}

/// A record, and its processes that moved bytes, in the order in which they began.
struct Run<'a> {
    record: &'a Record,
    moved: Vec<&'a Process>,
}

impl<'a> Run<'a> {
    fn of(record: &'a Record) -> Result<Self> {
        if record.processes.len() > PROCESSES_MAX {
            return Err(Error::new(format!("the recorded run has {} processes", record.processes.len()))
                .why(format!("at most {PROCESSES_MAX} are read; a record that Surgetank wrote has fewer")));
        }
        let moves = |process: &&Process| process.read_bytes() > 0 || process.write_bytes() > 0;
        let mut moved: Vec<&Process> = record.processes.iter().filter(moves).collect();
        if moved.is_empty() {
            return Err(Error::new("no process of the recorded run moved anything").remedy(
                "record a run with the preload shim, or describe the workload by hand (`surgetank help model`)",
            ));
        }
        moved.sort_by_key(|process| (process.begun_us, process.pid));
        Ok(Self { record, moved })
    }

    fn ended(&self, process: &Process) -> u64 {
        process.ended_us.unwrap_or(self.record.ended_us)
    }

    fn sum(&self, of: fn(&Process) -> u64) -> u64 {
        total(self.moved.iter().map(|process| of(process)))
    }

    /// The tasks that a task waits for, and the last end before it begins.
    fn predecessors(&self, number: usize) -> (u64, Vec<usize>) {
        let moved = &self.moved;
        let over: Vec<usize> =
            (0..number).filter(|&other| self.ended(moved[other]) <= moved[number].begun_us).collect();
        let before_us = over.iter().map(|&other| self.ended(moved[other])).max().unwrap_or(0);
        // A process that had ended before one of those began precedes that one.
        let latest = over.iter().map(|&other| moved[other].begun_us).max().unwrap_or(0);
        (before_us, over.into_iter().filter(|&other| self.ended(moved[other]) > latest).collect())
    }

    fn cpu_s(&self, process: &Process) -> f64 {
        // A parent that waits for its children computes nothing itself.
        let waits = self.record.processes.iter().any(|child| child.parent == process.pid);
        let lived_us = self.ended(process).saturating_sub(process.begun_us);
        if waits { 0.0 } else { lived_us.saturating_sub(process.io_us()) as f64 * 1e-6 }
    }

    fn wait_s(&self, number: usize, before_us: u64) -> f64 {
        let process = self.moved[number];
        // Meanwhile only processes that moved no bytes were at work: make, shells.
        let alone_us = process.begun_us.saturating_sub(before_us);
        // (A slow process, perhaps a driver, delayed all waiting processes together, not each in order.)
        let began_us = if number > 0 { self.moved[number - 1].begun_us } else { 0 };
        let with_others_us = process.begun_us.saturating_sub(before_us.max(began_us));
        (if alone_us <= OWN_START_US_MAX { alone_us } else { with_others_us }) as f64 * 1e-6
    }

    /// Files and bytes of each process that went to the store, as far as the record knows them.
    fn known_outputs(&self) -> Vec<(u64, u64)> {
        let (record, moved) = (self.record, &self.moved);
        let mut known = vec![(0u64, 0u64); moved.len()];
        for file in record.files.iter().take(FILES_MAX).filter(|file| file.durable_us.is_some() && file.size_bytes > 0)
        {
            let wrote = |number: &usize| {
                let (process, (_, bytes)) = (moved[*number], known[*number]);
                let alive = process.begun_us <= file.sealed_us
                    && self.ended(process).saturating_add(SEALED_LATE_US) >= file.sealed_us;
                alive && process.write_bytes() >= bytes.saturating_add(file.size_bytes - file.size_bytes / 8)
            };
            let late_us = |number: &usize| self.ended(moved[*number]).abs_diff(file.sealed_us);
            if let Some(writer) = (0..moved.len()).filter(wrote).min_by_key(late_us) {
                let (files, bytes) = known[writer];
                known[writer] = (files + 1, moved[writer].write_bytes().min(bytes.saturating_add(file.size_bytes)));
            }
        }
        known
    }
}

/// Which part of the reads came from the store.
struct Reads {
    /// The doors tell: all of it was read past the shim.
    doors_tell: bool,
    /// Of the bytes that may have come from there.
    bytes: f64,
    /// Of the opened files.
    files: f64,
}

impl Reads {
    fn of(run: &Run<'_>) -> Self {
        let traffic = &run.record.store_traffic;
        let others = run.sum(Process::other_read_bytes);
        // (Half: a mapping counts for more than the bytes read of it. Several readers of one file count each.)
        let doors_tell =
            run.sum(Process::shim_read_bytes) > 0 && traffic.in_bytes > 0 && others >= traffic.in_bytes / 2;
        let (bytes, opens) = if doors_tell {
            (others, run.sum(Process::other_read_opens))
        } else {
            (run.sum(Process::read_bytes), run.sum(Process::read_opens))
        };
        Self { doors_tell, bytes: share(traffic.in_bytes, bytes), files: share(traffic.in_files, opens) }
    }

    /// Files and bytes that a process read from the store.
    fn in_store(&self, process: &Process) -> (u64, u64) {
        let (opens, bytes) = if self.doors_tell {
            (process.other_read_opens(), process.other_read_bytes())
        } else {
            (process.read_opens(), process.read_bytes())
        };
        (part(opens, self.files), part(bytes, self.bytes))
    }
}

/// What went to the store: known of some processes, of the rest a part.
struct Writes {
    known: Vec<(u64, u64)>,
    bytes: f64,
    files: f64,
}

impl Writes {
    fn of(run: &Run<'_>) -> Self {
        let traffic = &run.record.store_traffic;
        let known = run.known_outputs();
        let known_files = total(known.iter().map(|(files, _)| *files));
        let known_bytes = total(known.iter().map(|(_, bytes)| *bytes));
        let unknown_bytes = run.sum(Process::write_bytes).saturating_sub(known_bytes);
        let unknown_files = run.sum(Process::write_opens).saturating_sub(known_files);
        Self {
            known,
            bytes: share(traffic.out_bytes.saturating_sub(known_bytes), unknown_bytes),
            files: share(traffic.out_files.saturating_sub(known_files), unknown_files),
        }
    }

    /// Files and bytes of a process that went to the store.
    fn in_store(&self, number: usize, process: &Process) -> (u64, u64) {
        let (known_files, known_bytes) = self.known[number];
        let unknown_files = process.write_opens().saturating_sub(known_files);
        let files = known_files.saturating_add(part(unknown_files, self.files));
        (files, known_bytes + part(process.write_bytes() - known_bytes, self.bytes))
    }
}

/// Not more than all.
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) }
}

fn part(whole: u64, share: f64) -> u64 {
    ((whole as f64 * share) as u64).min(whole)
}

fn add(made: &mut Workload, what: &str, number: usize, files: u64, bytes: u64, fate: Fate) -> Option<usize> {
    (bytes > 0).then(|| {
        let name = format!("{what}/{number}");
        made.sets.push(FileSet { name, files: files.max(1), bytes, fate });
        made.sets.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Fate, Workload};

    const RECORD: &str = r#"{"format": 1, "id": "20261124-1", "ended_us": 9000000, "processes_total": 4,
        "store_traffic": {"in_files": 2, "in_bytes": 100, "out_files": 1, "out_bytes": 50},
        "processes": [
            {"pid": 1, "program": "sh", "begun_us": 0, "io": {}},
            {"pid": 2, "parent": 1, "program": "cut", "begun_us": 0, "ended_us": 2000000,
             "io": {"shim": {"read_bytes": 100, "read_opens": 2, "write_bytes": 80, "write_opens": 4, "read_us": 500000}}},
            {"pid": 3, "parent": 1, "program": "cut", "begun_us": 100, "ended_us": 2500000, "io": {"mediated": {"write_bytes": 20, "write_opens": 1}}},
            {"pid": 4, "parent": 1, "program": "join", "begun_us": 3000000, "io": {"shim": {"read_bytes": 100, "read_opens": 5}}}]}"#;

    #[test]
    fn processes_that_moved_something_are_tasks() {
        let workload = Workload::parse(RECORD).unwrap();
        assert_eq!(workload.tasks.iter().map(|task| task.stage.as_str()).collect::<Vec<_>>(), ["cut", "cut", "join"]);
        assert_eq!(workload.tasks[2].after, [0, 1]);
        assert_eq!(workload.tasks[0].steps[0].cpu_s, 1.5);
        let totals = workload.totals();
        // Half of the reads came from the store, half of the writes went there.
        assert_eq!((totals.input_bytes, totals.intermediate_bytes, totals.final_bytes), (100, 50, 50));
        let read = &workload.tasks[2].steps[0].reads;
        assert!(read.iter().any(|&set| workload.sets[set].fate == Fate::Intermediate), "{workload:?}");
    }

    /// Regression: of 8,540 files, of which 24 were kept, the planner counted 17,000 as files to publish.
    #[test]
    fn files_count_as_intermediate_or_as_final() {
        let workload = Workload::parse(RECORD).unwrap();
        let files =
            |fate: Fate| workload.sets.iter().filter(|set| set.fate == fate).map(|set| set.files).collect::<Vec<_>>();
        // A fifth of all files went to the store; one process's output is at least one file.
        assert_eq!((files(Fate::Intermediate), files(Fate::Final)), (vec![4, 1], vec![1, 1]));
        // Two of seven opened files came from there.
        assert_eq!(files(Fate::Input), [1, 1]);
    }

    /// Regression: GDAL's mosaics, all that went to the store, counted as a quarter of each task's output. The drain
    /// then had the whole run's time. The elevations that the first tasks read counted as a part of what all tasks
    /// read.
    #[test]
    fn last_process_output_drains_at_the_end() {
        let record = r#"{"format": 1, "id": "x", "ended_us": 9000000,
            "store_traffic": {"in_files": 1, "in_bytes": 1000, "out_files": 2, "out_bytes": 1010},
            "files": [{"size_bytes": 1000, "sealed_us": 3990000, "durable_us": 5000000}, {"size_bytes": 1000, "sealed_us": 1990000}],
            "processes": [
                {"pid": 2, "program": "crop", "begun_us": 0, "ended_us": 2000000,
                 "io": {"passthrough": {"read_bytes": 1000, "read_opens": 1}, "shim": {"write_bytes": 1000, "write_opens": 1}}},
                {"pid": 3, "program": "slope", "begun_us": 2000000, "ended_us": 3000000,
                 "io": {"shim": {"read_bytes": 1000, "read_opens": 1, "write_bytes": 1010, "write_opens": 2}}},
                {"pid": 4, "program": "mosaic", "begun_us": 3000000, "ended_us": 4000000,
                 "io": {"shim": {"read_bytes": 1000, "read_opens": 1, "write_bytes": 1010, "write_opens": 2}}}]}"#;
        let workload = Workload::parse(record).unwrap();
        let of = |task: usize, fate: Fate| {
            let steps = &workload.tasks[task].steps[0];
            let sets = steps.reads.iter().chain(&steps.writes).map(|set| &workload.sets[*set]);
            sets.filter(|set| set.fate == fate).map(|set| set.bytes).sum::<u64>()
        };
        assert_eq!((of(0, Fate::Input), of(1, Fate::Input), of(2, Fate::Input)), (1000, 0, 0));
        // Ten bytes belong to no known file.
        assert!(of(0, Fate::Final) <= 5 && of(1, Fate::Final) <= 5 && (1000..=1005).contains(&of(2, Fate::Final)));
        assert_eq!(workload.totals().final_bytes / 10, 100);
    }

    #[test]
    fn record_without_processes_is_an_error() {
        let error = Workload::parse(r#"{"format": 1, "id": "x", "processes": [], "store_traffic": {}}"#).unwrap_err();
        assert!(error.to_string().contains("moved anything"));
    }
}
