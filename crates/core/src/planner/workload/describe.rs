//! A workload described by hand: stages of equal tasks, in TOML or JSON (docs/model.md has the keys).
//!
//! A stage's tasks share the output of earlier stages. With as many tasks as sets, each task reads one. With fewer
//! tasks, each reads several; with more, several tasks read the same set. Pure: text in, [`Workload`] out.

use serde::Deserialize;

use super::{Fate, FileSet, Step, Task, Workload};
use surgetank_policy::config::quantity;
use surgetank_types::error::{Error, Result};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    #[serde(default)]
    name: String,
    stage: Vec<Stage>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stage {
    name: String,
    tasks: usize,
    /// Input files of the store, for each task.
    #[serde(default = "one")]
    files_in: u64,
    #[serde(default)]
    bytes_in: Size,
    /// All tasks read the same input.
    #[serde(default)]
    shared_in: bool,
    /// Stages whose files are read.
    #[serde(default)]
    reads: Vec<String>,
    /// Each task reads everything that those stages wrote.
    #[serde(default)]
    reads_all: bool,
    #[serde(default = "one")]
    files_out: u64,
    #[serde(default)]
    bytes_out: Size,
    /// The output is kept in the store; by default, if no stage reads it.
    #[serde(default)]
    keep_out: Option<bool>,
    /// Core time of one step.
    #[serde(default)]
    cpu_s: f64,
    #[serde(default)]
    wait_s: f64,
    #[serde(default = "one_core")]
    cores: f64,
    /// Steps in each task, each of which writes `files_out`, `bytes_out`; all but the last are intermediate.
    #[serde(default = "one_step")]
    iterations: usize,
    /// A step reads what the one before wrote.
    #[serde(default)]
    reread: bool,
    /// No task begins before all tasks of all stages above have ended.
    #[serde(default)]
    barrier: bool,
}

/// `"64M"` or a number of bytes.
#[derive(Debug, Default, Clone, Copy)]
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self(bytes)),
            Written::Text(text) => quantity::size_bytes(&text).map(Self).map_err(serde::de::Error::custom),
        }
    }
}

fn one() -> u64 {
    1
}
fn one_step() -> usize {
    1
}
fn one_core() -> f64 {
    1.0
}

pub fn refused(error: impl std::fmt::Display) -> Error {
    Error::new("the description is not understood").why(error).remedy("`surgetank help model` explains descriptions")
}

/// Limit for the steps of a description. A short text may demand any number, so they are counted before they are built.
const STEPS_MAX: u64 = 500_000;
/// Limit for reads and waits between tasks.
const EDGES_MAX: u64 = 5_000_000;

/// Refuses a stage before memory is used for it.
fn is_small_enough(stage: &Stage, tasks_before: usize, sources: &[&Written], asked: &mut (u64, u64)) -> Result<()> {
    let (tasks, iterations) = (stage.tasks as u64, stage.iterations as u64);
    let part = |source: &&Written| {
        let sets = source.sets.len() as u64;
        if stage.reads_all { sets } else { sets / tasks + 2 }
    };
    let waits = if stage.barrier { tasks_before as u64 } else { 0 };
    let each = sources.iter().map(part).fold(waits + 1, u64::saturating_add);
    asked.0 = asked.0.saturating_add(tasks.saturating_mul(iterations));
    asked.1 = asked.1.saturating_add(tasks.saturating_mul(each));
    let refused = |what: &str, count: u64, most: u64| {
        Error::new(format!("the workload is too large: with stage {} it has {count} {what}", stage.name))
            .why(format!("at most {most} can be simulated"))
            .remedy("describe a smaller one of the same kind: fewer tasks or iterations, with more bytes each")
    };
    if asked.0 > STEPS_MAX {
        return Err(refused("steps (tasks × iterations)", asked.0, STEPS_MAX));
    }
    if asked.1 > EDGES_MAX {
        return Err(refused("reads and waits of its tasks", asked.1, EDGES_MAX));
    }
    Ok(())
}

/// The output of a stage: one entry per task, the sets of its last step.
struct Written {
    name: String,
    sets: Vec<usize>,
    tasks: Vec<usize>,
}

pub fn workload(described: Description) -> Result<Workload> {
    let mut made = Workload { name: described.name, tasks: Vec::new(), sets: Vec::new() };
    let mut before: Vec<Written> = Vec::new();
    let mut asked = (0, 0);
    for stage in &described.stage {
        let read_later = described.stage.iter().any(|later| later.reads.contains(&stage.name));
        let written = add(&mut made, stage, &before, read_later, &mut asked)?;
        before.push(written);
    }
    Ok(made)
}

fn add(
    made: &mut Workload,
    stage: &Stage,
    before: &[Written],
    read_later: bool,
    asked: &mut (u64, u64),
) -> Result<Written> {
    if stage.tasks == 0 || stage.iterations == 0 {
        return Err(
            Error::new(format!("stage {} has no tasks", stage.name)).remedy("tasks and iterations are at least 1")
        );
    }
    if before.iter().any(|written| written.name == stage.name) {
        return Err(Error::new(format!("two stages are called {}", stage.name)).remedy("give each a name of its own"));
    }
    let mut sources = Vec::new();
    for name in &stage.reads {
        sources.push(before.iter().find(|written| &written.name == name).ok_or_else(|| {
            Error::new(format!("stage {} reads from {name}, and no stage above it is called that", stage.name))
                .remedy("stages stand in the order in which they run")
        })?);
    }
    is_small_enough(stage, made.tasks.len(), &sources, asked)?;
    let fate = if stage.keep_out.unwrap_or(!read_later) { Fate::Final } else { Fate::Intermediate };
    let shared = (stage.shared_in && stage.bytes_in.0 > 0).then(|| input(made, stage, "shared"));
    let everybody = made.tasks.len();
    let mut written = Written { name: stage.name.clone(), sets: Vec::new(), tasks: Vec::new() };
    for number in 0..stage.tasks {
        let mut first = Step { cpu_s: stage.cpu_s, wait_s: stage.wait_s, ..Step::default() };
        let mut after = if stage.barrier { (0..everybody).collect() } else { Vec::new() };
        first.reads.extend(shared);
        if shared.is_none() && stage.bytes_in.0 > 0 {
            first.reads.push(input(made, stage, &number.to_string()));
        }
        for source in &sources {
            for part in share(source.sets.len(), stage.tasks, number, stage.reads_all) {
                first.reads.push(source.sets[part]);
                after.push(source.tasks[part]);
            }
        }
        after.sort_unstable();
        after.dedup();
        let mut steps = vec![first];
        for iteration in 1..stage.iterations {
            let out = output(made, stage, &format!("{number}.{iteration}"), Fate::Intermediate);
            steps[iteration - 1].writes.extend(out);
            steps.push(Step {
                reads: if stage.reread { out.into_iter().collect() } else { Vec::new() },
                cpu_s: stage.cpu_s,
                wait_s: stage.wait_s,
                ..Step::default()
            });
        }
        let last = output(made, stage, &number.to_string(), fate);
        steps[stage.iterations - 1].writes.extend(last);
        if let Some(set) = last {
            written.sets.push(set);
            written.tasks.push(made.tasks.len());
        }
        made.tasks.push(Task { stage: stage.name.clone(), cores: stage.cores, steps, after });
    }
    Ok(written)
}

fn input(made: &mut Workload, stage: &Stage, which: &str) -> usize {
    let name = format!("{}/in/{which}", stage.name);
    made.sets.push(FileSet { name, files: stage.files_in, bytes: stage.bytes_in.0, fate: Fate::Input });
    made.sets.len() - 1
}

fn output(made: &mut Workload, stage: &Stage, which: &str, fate: Fate) -> Option<usize> {
    if stage.bytes_out.0 == 0 || stage.files_out == 0 {
        return None;
    }
    let name = format!("{}/out/{which}", stage.name);
    made.sets.push(FileSet { name, files: stage.files_out, bytes: stage.bytes_out.0, fate });
    Some(made.sets.len() - 1)
}

/// The parts that task `number` of `tasks` reads.
fn share(parts: usize, tasks: usize, number: usize, all: bool) -> std::ops::Range<usize> {
    if all {
        return 0..parts;
    }
    let from = number * parts / tasks;
    let to = (number + 1) * parts / tasks;
    // With fewer parts than tasks the share may be empty; the task then reads the part at its position.
    if from == to && from < parts { from..from + 1 } else { from..to }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Workload {
        Workload::parse(text).unwrap()
    }

    #[test]
    fn iterations_are_intermediate_but_for_the_last() {
        let workload =
            of("[[stage]]\nname='inc'\ntasks=2\nbytes_in='1M'\nbytes_out='2M'\niterations=3\nreread=true\ncpu_s=0.5");
        let totals = workload.totals();
        assert_eq!((totals.input_bytes, totals.intermediate_bytes, totals.final_bytes), (2 << 20, 8 << 20, 4 << 20));
        assert_eq!(totals.cpu_s, 3.0);
        let steps = &workload.tasks[1].steps;
        assert_eq!(steps[1].reads, steps[0].writes);
    }

    #[test]
    fn reading_tasks_share_the_written_files() {
        let two = |readers: usize, more: &str| {
            let text = format!(
                "[[stage]]\nname='a'\ntasks=4\nbytes_out='1M'\n[[stage]]\nname='b'\ntasks={readers}\nreads=['a']\n{more}"
            );
            let workload = of(&text);
            workload.tasks[4..].iter().map(|task| task.steps[0].reads.clone()).collect::<Vec<_>>()
        };
        assert_eq!(two(4, ""), [[0], [1], [2], [3]]);
        assert_eq!(two(2, ""), [[0, 1], [2, 3]]);
        assert_eq!(two(8, "")[3..6], [[1], [2], [2]]);
        assert_eq!(two(1, "reads_all=true"), [[0, 1, 2, 3]]);
    }

    #[test]
    fn data_read_by_a_later_stage_is_intermediate_by_default() {
        let text = "[[stage]]\nname='a'\ntasks=1\nbytes_out=7\n[[stage]]\nname='b'\ntasks=1\nreads=['a']\nbytes_out=9";
        assert_eq!(of(text).totals().intermediate_bytes, 7);
        let kept = text.replacen("bytes_out=7", "bytes_out=7\nkeep_out=true", 1);
        assert_eq!(of(&kept).totals().final_bytes, 16);
    }

    /// Regression: a huge description took all of the memory, or did not end.
    #[test]
    fn huge_description_is_refused_before_it_is_built() {
        let error = |text: &str| Workload::parse(text).unwrap_err().to_string();
        assert!(error("[[stage]]\nname='a'\ntasks=1000000000000").contains("1000000000000 steps"));
        assert!(error("[[stage]]\nname='a'\ntasks=2\niterations=1000000000").contains("2000000000 steps"));
        let both = i64::MAX;
        assert!(error(&format!("[[stage]]\nname='a'\ntasks={both}\niterations={both}")).contains("too large"));
        let stage = |name: &str, more: &str| format!("[[stage]]\nname='{name}'\ntasks=40000\nbytes_out=1\n{more}\n");
        assert!(error(&(stage("a", "") + &stage("b", "barrier=true"))).contains("reads and waits"));
        assert!(error(&(stage("a", "") + &stage("b", "reads=['a']\nreads_all=true"))).contains("reads and waits"));
        assert_eq!(of(&(stage("a", "") + &stage("b", "reads=['a']"))).tasks.len(), 80_000);
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| Workload::parse(text).unwrap_err().to_string();
        assert!(error("[[stage]]\nname='a'\ntasks=1\nreads=['x']").contains("reads from x"));
        assert!(error("[[stage]]\nname='a'\ntasks=0").contains("no tasks"));
        assert!(error("[[stage]]\nname='a'\ntasks=1\nbyte_out=3").contains("byte_out"));
        assert!(error("[[stage]]\nname='a'\ntasks=1\nbytes_out='3 apples'").contains("3 apples"));
    }
}
