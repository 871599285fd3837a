//! What is to be done: tasks in steps that read and write sets of files, as a graph without circles.
//!
//! A set of files is what one task writes (or what the store has at the start) and others read as a whole. Invariants, checked once by
//! [`Workload::check`]: every set has at most one writer, a task's index is above those of the tasks it waits for, and every index
//! exists. The danger it avoids: a description that cannot be carried out is an error here, not a simulation that never ends.

pub mod describe;
pub mod recorded;
pub mod wfformat;

use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// The store has it at the start.
    Input,
    /// Read again, and wanted by nobody afterwards.
    Intermediate,
    /// Wanted in the store.
    Final,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileSet {
    pub name: String,
    pub files: u64,
    pub bytes: u64,
    pub fate: Fate,
}

/// Reading, then computing, then writing.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Step {
    pub reads: Vec<usize>,
    /// Core time.
    pub cpu_s: f64,
    /// Time that passes without any core: sleeping, waiting for somebody else's network.
    pub wait_s: f64,
    pub writes: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Task {
    pub stage: String,
    /// Cores it computes on at a time.
    pub cores: f64,
    pub steps: Vec<Step>,
    /// Tasks that end before this one begins.
    pub after: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Workload {
    pub name: String,
    pub tasks: Vec<Task>,
    pub sets: Vec<FileSet>,
}

/// Sums, for people and for the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Totals {
    pub tasks: usize,
    pub input_bytes: u64,
    pub intermediate_bytes: u64,
    pub final_bytes: u64,
    pub files_written: u64,
    pub files_read: u64,
    pub cpu_s: f64,
}

/// More tasks than this and the simulation would take minutes.
const TASKS_MAX: usize = 200_000;

impl Workload {
    /// Of a file: a description in TOML or JSON, a WfFormat 1.5 instance, a recorded run. What it is is seen by its content.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::new(format!("the workload {} can't be read", path.display())).why(error).remedy(
                "give a description (docs/model.md, examples/workloads/), a WfFormat instance or a recorded run",
            )
        })?;
        Self::parse(&text).map_err(|error| {
            let what = format!("{}: {}", path.display(), error.what);
            Error { what, ..error }
        })
    }

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

    pub fn check(&self) -> Result<(), String> {
        if self.tasks.is_empty() {
            return Err("it has no tasks".into());
        }
        if self.tasks.len() > TASKS_MAX {
            return Err(format!("it has {} tasks, at most {TASKS_MAX} can be simulated", self.tasks.len()));
        }
        let mut writer = vec![None; self.sets.len()];
        for (number, task) in self.tasks.iter().enumerate() {
            if !(task.cores > 0.0 && task.cores.is_finite()) {
                return Err(format!("a task of {} computes on {} cores", task.stage, task.cores));
            }
            if let Some(late) = task.after.iter().find(|&&before| before >= number) {
                return Err(format!("task {number} ({}) waits for task {late}, which comes later", task.stage));
            }
            for step in &task.steps {
                if !(step.cpu_s >= 0.0 && step.cpu_s.is_finite() && step.wait_s >= 0.0 && step.wait_s.is_finite()) {
                    return Err(format!("a task of {} computes for {} s", task.stage, step.cpu_s));
                }
                if let Some(&early) = step.reads.iter().find(|&&set| {
                    self.sets.get(set).is_some_and(|files| files.fate != Fate::Input) && writer[set].is_none()
                }) {
                    return Err(format!(
                        "a task of {} reads {} before anybody wrote it",
                        task.stage, self.sets[early].name
                    ));
                }
                for &set in step.reads.iter().chain(&step.writes) {
                    let Some(files) = self.sets.get(set) else {
                        return Err(format!("a task of {} names files that nobody describes", task.stage));
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

    pub fn totals(&self) -> Totals {
        let of = |fate: Fate| self.sets.iter().filter(|set| set.fate == fate).map(|set| set.bytes).sum();
        let steps = || self.tasks.iter().flat_map(|task| &task.steps);
        Totals {
            tasks: self.tasks.len(),
            input_bytes: of(Fate::Input),
            intermediate_bytes: of(Fate::Intermediate),
            final_bytes: of(Fate::Final),
            files_written: self.sets.iter().filter(|set| set.fate != Fate::Input).map(|set| set.files).sum(),
            files_read: steps().flat_map(|step| &step.reads).map(|&set| self.sets[set].files).sum(),
            cpu_s: steps().map(|step| step.cpu_s).sum(),
        }
    }
}
