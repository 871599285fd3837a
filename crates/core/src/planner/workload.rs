//! The work: tasks in steps that read and write sets of files, as a graph without cycles.
//!
//! One task writes a set of files (or the store has it at the start), and other tasks read it as a whole.
//!
//! Invariants, checked once by [`Workload::check`]: every set has at most one writer; a task's index is above those of
//! the tasks that it waits for; every index exists.
//!
//! The danger that it avoids: an impossible description starts a simulation that never ends. It is an error here.

mod describe;
mod recorded;
mod wfformat;

use std::path::Path;

use serde::Serialize;

use surgetank_types::error::{Error, Result};

/// Need for a set of files after its writer has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// The store has it at the start.
    Input,
    /// Read again, and not needed afterwards.
    Intermediate,
    /// Needed in the store.
    Final,
}

/// Files that are written together and read together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileSet {
    /// Name of the set.
    pub name: String,
    /// Number of files.
    pub files: u64,
    /// Bytes of all files together.
    pub bytes: u64,
    /// Need for the files.
    pub fate: Fate,
}

/// Reads, then computes, then writes; or computes while it writes.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Step {
    /// Indices of the sets that are read.
    pub reads: Vec<usize>,
    /// Core time.
    pub cpu_s: f64,
    /// Time without any core: sleeping, or waiting for a remote network.
    pub wait_s: f64,
    /// Indices of the sets that are written.
    pub writes: Vec<usize>,
    /// It writes as it computes.
    pub streams: bool,
}

/// A program, or a part of it that runs on one node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Task {
    /// Name of the stage that it belongs to.
    pub stage: String,
    /// Cores it computes on at a time.
    pub cores: f64,
    /// Steps, one after another.
    pub steps: Vec<Step>,
    /// Tasks that end before this one begins.
    pub after: Vec<usize>,
}

/// The tasks and files of one workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Workload {
    /// Name of the workload.
    pub name: String,
    /// Tasks, each behind those that it waits for.
    pub tasks: Vec<Task>,
    /// Sets of files.
    pub sets: Vec<FileSet>,
}

/// Sums, for the user and for the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Totals {
    /// Number of tasks.
    pub tasks: usize,
    /// Bytes of inputs.
    pub input_bytes: u64,
    /// Bytes of intermediate files.
    pub intermediate_bytes: u64,
    /// Bytes of final files.
    pub final_bytes: u64,
    /// Number of intermediate and final files.
    pub files_written: u64,
    /// Number of files that tasks read; a file counts once for each reader.
    pub files_read: u64,
    /// Core time of all tasks, in seconds.
    pub cpu_s: f64,
}

/// With more tasks than this the simulation would take minutes.
const TASKS_MAX: usize = 200_000;
/// 31 years.
pub(super) const TIME_S_MAX: f64 = 1e9;
/// 1 EiB: of all sets together, and of their reads. Sums stay far from the limits of their type.
const BYTES_MAX: u64 = 1 << 60;
const FILES_MAX: u64 = 1 << 48;
const CORES: std::ops::RangeInclusive<f64> = 0.01..=65_536.0;

impl Workload {
    /// Loads a file: a description in TOML or JSON, a WfFormat 1.5 instance, or a recorded run. The content decides
    /// which.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(format!("the workload {} can't be read", path.display()))
                .why(error)
                .remedy("give a description (`surgetank help model`), a WfFormat instance or a recorded run")
        })?;
        Self::parse(&text).map_err(|error| {
            let what = format!("{}: {}", path.display(), error.what);
            Error { what, ..error }
        })
    }

    /// Reads the text of a workload, as [`Self::load`] does, and checks it.
    pub fn parse(text: &str) -> Result<Self> {
        let workload = if text.trim_start().starts_with('{') {
            let value: serde_json::Value =
                serde_json::from_str(text).map_err(|error| Error::new("it is not JSON").why(error))?;
            if value.get("schemaVersion").is_some() && value.get("workflow").is_some() {
                wfformat::workload(value)?
            } else if value.get("store_traffic").is_some() && value.get("processes").is_some() {
                recorded::workload(value)?
            } else {
                let described = serde_json::from_value(value).map_err(describe::refused)?;
                describe::workload(described)?
            }
        } else {
            describe::workload(toml::from_str(text).map_err(describe::refused)?)?
        };
        workload.check().map_err(|why| Error::new("the workload can't be carried out").why(why))?;
        Ok(workload)
    }

    /// Checks the invariants and the limits of a workload. The error says what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.tasks.is_empty() {
            return Err("it has no tasks".into());
        }
        if self.tasks.len() > TASKS_MAX {
            return Err(format!("it has {} tasks, at most {TASKS_MAX} can be simulated", self.tasks.len()));
        }
        let totals = self.totals();
        let bytes = [totals.input_bytes, totals.intermediate_bytes, totals.final_bytes];
        for (what, sum, most) in [
            ("bytes", bytes.into_iter().fold(0, u64::saturating_add), BYTES_MAX),
            ("files", totals.files_written.saturating_add(totals.files_read), FILES_MAX),
        ] {
            if sum > most {
                return Err(format!("its {what} are {sum} together, at most {most} can be simulated"));
            }
        }
        let mut writer = vec![None; self.sets.len()];
        for (number, task) in self.tasks.iter().enumerate() {
            if !CORES.contains(&task.cores) {
                return Err(format!(
                    "a task of {} computes on {} cores (cores is {} to {})",
                    task.stage,
                    task.cores,
                    CORES.start(),
                    CORES.end()
                ));
            }
            if let Some(late) = task.after.iter().find(|&&before| before >= number) {
                return Err(format!("task {number} ({}) waits for task {late}, which comes later", task.stage));
            }
            for step in &task.steps {
                for (name, seconds) in [("cpu_s", step.cpu_s), ("wait_s", step.wait_s)] {
                    if !(0.0..=TIME_S_MAX).contains(&seconds) {
                        return Err(format!("{name} of a task of {} is {seconds} (0 to {TIME_S_MAX} s)", task.stage));
                    }
                }
                if let Some(&early) = step.reads.iter().find(|&&set| {
                    self.sets.get(set).is_some_and(|files| files.fate != Fate::Input) && writer[set].is_none()
                }) {
                    return Err(format!(
                        "a task of {} reads {} before a task writes it",
                        task.stage, self.sets[early].name
                    ));
                }
                for &set in step.reads.iter().chain(&step.writes) {
                    let Some(files) = self.sets.get(set) else {
                        return Err(format!("a task of {} names files that the description lacks", task.stage));
                    };
                    if step.writes.contains(&set) {
                        if let Some(other) = writer[set].replace(number) {
                            return Err(format!("{} is written by tasks {other} and {number}", files.name));
                        }
                        if files.fate == Fate::Input {
                            return Err(format!("{} is written, and yet an input", files.name));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Sums of all tasks and sets.
    pub fn totals(&self) -> Totals {
        // (Before their check they may have any value.)
        let sum = |figures: &mut dyn Iterator<Item = u64>| figures.fold(0, u64::saturating_add);
        let of = |fate: Fate| sum(&mut self.sets.iter().filter(|set| set.fate == fate).map(|set| set.bytes));
        let steps = || self.tasks.iter().flat_map(|task| &task.steps);
        Totals {
            tasks: self.tasks.len(),
            input_bytes: of(Fate::Input),
            intermediate_bytes: of(Fate::Intermediate),
            final_bytes: of(Fate::Final),
            files_written: sum(&mut self.sets.iter().filter(|set| set.fate != Fate::Input).map(|set| set.files)),
            files_read: sum(&mut steps()
                .flat_map(|step| &step.reads)
                .filter_map(|&set| self.sets.get(set))
                .map(|set| set.files)),
            cpu_s: steps().map(|step| step.cpu_s).sum(),
        }
    }
}
