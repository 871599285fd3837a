//! WfFormat 1.5 instances (wfcommons.org): a recorded workflow with its files' sizes and its tasks' run times.
//!
//! Core time is the run time times the average use of the processor. Without a recorded use the whole run time counts
//! as computing, so the model underestimates I/O. Tasks are ordered so that parents come first.

use std::collections::{HashMap, HashSet, VecDeque};

use serde::Deserialize;
use serde_json::Value;

use super::{Fate, FileSet, Step, TIME_S_MAX, Task, Workload};
use surgetank_types::error::{Error, Result};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    #[serde(default)]
    name: String,
    schema_version: String,
    workflow: Recorded,
}

#[derive(Deserialize)]
struct Recorded {
    specification: Specification,
    #[serde(default)]
    execution: Execution,
}

#[derive(Deserialize)]
struct Specification {
    tasks: Vec<Specified>,
    #[serde(default)]
    files: Vec<Sized>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Specified {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    parents: Vec<String>,
    #[serde(default)]
    input_files: Vec<String>,
    #[serde(default)]
    output_files: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sized {
    id: String,
    size_in_bytes: u64,
}

#[derive(Deserialize, Default)]
struct Execution {
    #[serde(default)]
    tasks: Vec<Executed>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Executed {
    id: String,
    #[serde(default)]
    runtime_in_seconds: f64,
    #[serde(default, rename = "avgCPU")]
    average_cpu: Option<f64>,
}

/// All of 65,536 cores.
const PERCENT_MAX: f64 = 6_553_600.0;

pub fn workload(value: Value) -> Result<Workload> {
    let instance: Instance = serde_json::from_value(value).map_err(|error| {
        Error::new("the WfFormat instance is not understood").why(error).remedy("WfFormat 1.5 is read: wfcommons.org")
    })?;
    if instance.schema_version != "1.5" {
        return Err(Error::new(format!("the instance is WfFormat {}", instance.schema_version))
            .remedy("bring it to 1.5 with wfcommons, which is what is read here"));
    }
    let specified = &instance.workflow.specification.tasks;
    let order = parents_first(specified)?;
    let executed: HashMap<&str, &Executed> =
        instance.workflow.execution.tasks.iter().map(|task| (task.id.as_str(), task)).collect();

    let mut sets: Vec<FileSet> = Vec::new();
    let mut set_of: HashMap<&str, usize> = HashMap::new();
    for file in &instance.workflow.specification.files {
        set_of.entry(&file.id).or_insert_with(|| {
            sets.push(FileSet { name: file.id.clone(), files: 1, bytes: file.size_in_bytes, fate: Fate::Input });
            sets.len() - 1
        });
    }
    let position: HashMap<&str, usize> =
        order.iter().enumerate().map(|(at, &task)| (specified[task].id.as_str(), at)).collect();
    let mut writer: HashMap<usize, usize> = HashMap::new();
    let mut read_before: HashSet<usize> = HashSet::new();
    let mut tasks = Vec::with_capacity(order.len());
    for &number in &order {
        let task = &specified[number];
        let known = |files: &[String]| {
            let mut found: Vec<usize> = files.iter().filter_map(|file| set_of.get(file.as_str()).copied()).collect();
            found.sort_unstable();
            found.dedup();
            found
        };
        // A file that two tasks declare as output counts for the first; a file that a task reads and writes counts as
        // read.
        let mut reads = known(&task.input_files);
        let mut writes = known(&task.output_files);
        // A file that an earlier task has read counts as read too: the store had it.
        writes.retain(|set| !writer.contains_key(set) && !read_before.contains(set) && !reads.contains(set));
        for &set in &writes {
            writer.insert(set, tasks.len());
            sets[set].fate = Fate::Final;
        }
        reads.retain(|set| !writes.contains(set));
        read_before.extend(&reads);
        for &set in &reads {
            if sets[set].fate != Fate::Input {
                sets[set].fate = Fate::Intermediate;
            }
        }
        let run = executed.get(task.id.as_str());
        let runtime_s = run.map_or(0.0, |run| run.runtime_in_seconds);
        let average = run.and_then(|run| run.average_cpu).map_or(1.0, |percent| percent / 100.0);
        // A product of two wrong figures may look right.
        for (what, value, most) in
            [("runtimeInSeconds", runtime_s, TIME_S_MAX), ("avgCPU", 100.0 * average, PERCENT_MAX)]
        {
            if !(0.0..=most).contains(&value) {
                return Err(Error::new(format!("{what} of task {} is {value}", task.id))
                    .why(format!("it is from 0 to {most}"))
                    .remedy("correct the instance, or leave it out where it was not recorded"));
            }
        }
        let mut after: Vec<usize> = task.parents.iter().filter_map(|id| position.get(id.as_str()).copied()).collect();
        // Files also imply an order, where the instance has none.
        after.extend(reads.iter().filter_map(|set| writer.get(set).copied()));
        after.sort_unstable();
        after.dedup();
        let stage = stage_of(if task.name.is_empty() { &task.id } else { &task.name }).to_owned();
        let step = Step { reads, cpu_s: runtime_s * average, wait_s: 0.0, writes, streams: false };
        tasks.push(Task { stage, cores: average.max(1.0), steps: vec![step], after });
    }
    Ok(Workload { name: instance.name, tasks, sets })
}

/// `mProject_ID0000001` → `mProject`.
fn stage_of(name: &str) -> &str {
    name.rfind("_ID").map_or(name, |at| &name[..at])
}

/// Kahn's order; among equals, the file's own.
fn parents_first(tasks: &[Specified]) -> Result<Vec<usize>> {
    let number: HashMap<&str, usize> = tasks.iter().enumerate().map(|(at, task)| (task.id.as_str(), at)).collect();
    let mut waits = vec![0usize; tasks.len()];
    let mut children = vec![Vec::new(); tasks.len()];
    for (at, task) in tasks.iter().enumerate() {
        for parent in &task.parents {
            let Some(&parent) = number.get(parent.as_str()) else {
                return Err(Error::new(format!("task {} has a parent {parent} that is not there", task.id)));
            };
            waits[at] += 1;
            children[parent].push(at);
        }
    }
    let mut ready: VecDeque<usize> = (0..tasks.len()).filter(|&at| waits[at] == 0).collect();
    let mut order = Vec::with_capacity(tasks.len());
    while let Some(at) = ready.pop_front() {
        order.push(at);
        for &child in &children[at] {
            waits[child] -= 1;
            if waits[child] == 0 {
                ready.push_back(child);
            }
        }
    }
    if order.len() < tasks.len() {
        return Err(Error::new("some of its tasks wait for each other in a circle"));
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::super::{Fate, Workload};

    const TWO: &str = r#"{"name": "two", "schemaVersion": "1.5", "workflow": {
        "specification": {
            "tasks": [
                {"id": "b_ID2", "name": "b_ID2", "parents": ["a_ID1"], "inputFiles": ["mid"], "outputFiles": ["out"]},
                {"id": "a_ID1", "name": "a_ID1", "parents": [], "inputFiles": ["in"], "outputFiles": ["mid"]}],
            "files": [{"id": "in", "sizeInBytes": 10}, {"id": "mid", "sizeInBytes": 20}, {"id": "out", "sizeInBytes": 30}]},
        "execution": {"tasks": [{"id": "a_ID1", "runtimeInSeconds": 4, "avgCPU": 150}, {"id": "b_ID2", "runtimeInSeconds": 2, "avgCPU": 25}]}}}"#;

    #[test]
    fn parents_come_first_and_readers_decide_fates() {
        let workload = Workload::parse(TWO).unwrap();
        assert_eq!(workload.tasks[0].stage, "a");
        assert_eq!(workload.tasks[1].after, [0]);
        assert_eq!(
            workload.sets.iter().map(|set| set.fate).collect::<Vec<_>>(),
            [Fate::Input, Fate::Intermediate, Fate::Final]
        );
        assert_eq!((workload.tasks[0].cores, workload.tasks[0].steps[0].cpu_s), (1.5, 6.0));
        assert_eq!((workload.tasks[1].cores, workload.tasks[1].steps[0].cpu_s), (1.0, 0.5));
    }

    #[test]
    fn cycle_is_an_error() {
        let circle = TWO.replace(r#""parents": []"#, r#""parents": ["b_ID2"]"#);
        assert!(Workload::parse(&circle).unwrap_err().to_string().contains("circle"));
    }

    #[test]
    fn negative_times_with_a_positive_product_are_refused() {
        let error = |text: &str| Workload::parse(text).unwrap_err().to_string();
        let both =
            TWO.replace("\"runtimeInSeconds\": 4, \"avgCPU\": 150", "\"runtimeInSeconds\": -5, \"avgCPU\": -100");
        assert!(error(&both).contains("runtimeInSeconds of task a_ID1 is -5"), "{}", error(&both));
        assert!(error(&TWO.replace("150", "-100")).contains("avgCPU of task a_ID1 is -100"));
        assert!(
            error(&TWO.replace("\"sizeInBytes\": 20", "\"sizeInBytes\": 18446744073709551615"))
                .contains("its bytes are")
        );
    }

    #[test]
    fn another_version_is_refused() {
        assert!(Workload::parse(&TWO.replace("1.5", "1.4")).unwrap_err().to_string().contains("1.4"));
    }
}
