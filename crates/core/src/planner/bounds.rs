//! Closed forms around the estimate: what no schedule can beat, and what no busy schedule can exceed.
//!
//! Both add up the workload's demand on each resource.
//!
//! - *Lower*: the busiest resource alone, or the longest chain of tasks alone. All the rest is hidden behind it,
//!   nothing is read twice, and every file is where it is fastest. Where all later work must wait for all earlier work
//!   (a stage's barrier), the parts between barriers are added up.
//! - *Upper*: everything one after the other, as in Sea's equations, with nothing cached. It is each resource's time,
//!   plus the chain, plus the tasks' turns in their slots.

use std::ops::Range;

use super::machine::{Calibration, Door};
use super::simulate::{Mode, Setup};
use super::workload::{Fate, Step, Task, Workload};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    pub lower_s: f64,
    pub upper_s: f64,
}

/// The best, or the worst, rates on one node.
struct Pace {
    read_bps: f64,
    /// Of an input without another reader: it is in no cache.
    first_read_bps: f64,
    write_bps: f64,
    /// The rate beyond a write-back cache; infinite where there is none, or another place takes it.
    through_bps: f64,
    ahead_bytes: f64,
    /// Sets that are read once only.
    read_once: Vec<bool>,
    open_s: f64,
    create_s: f64,
    read_cpu: f64,
    write_cpu: f64,
    operation_cpu: f64,
}

pub fn bounds(fastest: &Calibration, slowest: &Calibration, workload: &Workload, setup: &Setup) -> Bounds {
    let lower_s = lower(fastest, workload, setup);
    Bounds { lower_s, upper_s: upper(slowest, workload, setup).max(lower_s) }
}

fn lower(machine: &Calibration, workload: &Workload, setup: &Setup) -> f64 {
    let pace = pace(machine, workload, setup, true);
    let load = Load::of(machine, workload, setup, true);
    let nodes = setup.nodes as f64;
    let slots = nodes * setup.processes as f64;
    let all = chain(workload, 0..workload.tasks.len(), &pace, |set| tail_s(machine, workload, setup, set));
    let busiest = load.seconds(machine, setup, &pace).into_iter().fold(0.0, f64::max);
    let barriers = barriers(workload);
    let parts = barriers.windows(2).map(|ends| part_s(machine, workload, setup, &pace, ends[0]..ends[1]));
    let (before_s, after_s) = edges(machine, workload, setup, &pace);
    let (read_bps, write_bps) = together_bps(machine, setup);
    let reading = load.store_read / read_bps + after_s;
    // The final content of a write-back cache has to be written too.
    let writing = before_s + load.store_write / write_bps;
    let whole = busiest.max(all.longest_s).max(all.work_s / slots);
    start_s(machine, setup) + whole.max(parts.sum()).max(reading).max(writing)
}

/// The least time before the first byte can go to the store, and after the last byte of input is read from it.
///
/// The first: the earliest end of the work before a file that goes there. The second: the last reader still computes
/// and writes. It holds only where a task's first step alone reads the inputs.
fn edges(machine: &Calibration, workload: &Workload, setup: &Setup, pace: &Pace) -> (f64, f64) {
    // (A task that writes as it computes may write its first byte at once.)
    if workload.tasks.iter().flat_map(|task| &task.steps).any(|step| step.streams) {
        return (0.0, 0.0);
    }
    let mut ends: Vec<f64> = Vec::with_capacity(workload.tasks.len());
    let (mut before, mut after) = (f64::INFINITY, f64::INFINITY);
    let is_input = |set: &usize| workload.sets[*set].fate == Fate::Input;
    let goes_there = |set: &usize| setup.mode != Mode::InMemory || workload.sets[*set].fate == Fate::Final;
    for task in &workload.tasks {
        let mut now = task.after.iter().map(|&earlier| ends[earlier]).fold(0.0, f64::max);
        let mut rest: f64 = 0.0;
        for (number, step) in task.steps.iter().enumerate() {
            let only_reads = Step { reads: step.reads.clone(), ..Step::default() };
            let computed = Step { writes: Vec::new(), ..step.clone() };
            if step.writes.iter().any(goes_there) {
                before = before.min(now + step_s(workload, &computed, task.cores, pace));
            }
            let all = step_s(workload, step, task.cores, pace);
            let fresh = step.reads.iter().filter(|set| is_input(set));
            if step.reads.iter().any(is_input) && (number > 0 || !fresh.clone().all(|&set| pace.read_once[set])) {
                after = 0.0;
            }
            rest += if number == 0 { all - step_s(workload, &only_reads, task.cores, pace) } else { all };
            now += all;
        }
        if task.steps.first().is_some_and(|step| step.reads.iter().any(is_input)) {
            let last = task.steps.last().map_or(&[][..], |step| &step.writes);
            let tail = last.iter().map(|&set| tail_s(machine, workload, setup, set)).fold(0.0, f64::max);
            // Its other reads may come after its last input, or before.
            after = after.min(rest + tail);
        }
        ends.push(now);
    }
    // Files without room in memory go to the store before any final file does.
    let spills = setup.mode != Mode::Store && !never_spills(workload, setup);
    let finite = |seconds: f64| if seconds.is_finite() { seconds } else { 0.0 };
    (if spills { 0.0 } else { finite(before) }, finite(after))
}

/// Changes of stage times tasks. With more of them, the search for barriers takes longer than the simulation. Without
/// barriers the bound is lower.
const BARRIERS_SOUGHT_MAX: usize = 100_000_000;

/// Indices at which all later tasks wait, by any chain, for all earlier ones; with both ends.
fn barriers(workload: &Workload) -> Vec<usize> {
    let tasks = &workload.tasks;
    let mut last_follower = vec![0; tasks.len()];
    for (number, task) in tasks.iter().enumerate() {
        for &before in &task.after {
            last_follower[before] = number;
        }
    }
    let stages = tasks.windows(2).filter(|two| two[0].stage != two[1].stage).count();
    if stages.saturating_mul(tasks.len()) > BARRIERS_SOUGHT_MAX {
        return vec![0, tasks.len()];
    }
    let mut found = vec![0];
    for at in 1..tasks.len() {
        // Equal tasks of one stage are never separated; any finer search would be quadratic for long chains.
        if tasks[at].stage == tasks[at - 1].stage {
            continue;
        }
        let ends: Vec<usize> = (0..at).filter(|&task| last_follower[task] >= at || last_follower[task] == 0).collect();
        let waits_for_all = |task: &Task| ends.iter().all(|end| task.after.binary_search(end).is_ok());
        let begins = |task: &&Task| task.after.iter().all(|&before| before < at);
        if tasks[at..].iter().filter(begins).all(waits_for_all) {
            found.push(at);
        }
    }
    found.push(tasks.len());
    found
}

/// The work that cannot move to a later part: first reads of inputs, computing, the tasks' turns, bytes beyond
/// write-back caches.
fn part_s(machine: &Calibration, workload: &Workload, setup: &Setup, pace: &Pace, part: Range<usize>) -> f64 {
    let nodes = setup.nodes as f64;
    let own = chain(workload, part.clone(), pace, |_| 0.0);
    let (mut cpu_s, mut written) = (0.0, 0.0);
    let mut inputs = Vec::new();
    for task in &workload.tasks[part.clone()] {
        for step in &task.steps {
            cpu_s += step.cpu_s;
            written += bytes(workload, &step.writes);
            inputs.extend(step.reads.iter().copied().filter(|&set| workload.sets[set].fate == Fate::Input));
        }
    }
    inputs.sort_unstable();
    inputs.dedup();
    // An earlier part read it, so it may be cached.
    let earlier = workload.tasks[..part.start].iter().flat_map(|task| &task.steps).flat_map(|step| &step.reads);
    let earlier: std::collections::HashSet<usize> = earlier.copied().collect();
    inputs.retain(|set| !earlier.contains(set));
    let through = match setup.mode {
        Mode::Store => (written - nodes * ahead_bytes(machine, setup)).max(0.0),
        _ => 0.0,
    };
    let (read_bps, write_bps) = together_bps(machine, setup);
    [
        own.longest_s,
        own.work_s / (nodes * setup.processes as f64),
        cpu_s / machine.cores / nodes,
        bytes(workload, &inputs) / read_bps,
        through / write_bps,
    ]
    .into_iter()
    .fold(0.0, f64::max)
}

/// How far writers on the store may be ahead of it, on one node.
fn ahead_bytes(machine: &Calibration, setup: &Setup) -> f64 {
    if setup.page_cache { machine.store.dirty_bytes as f64 } else { 0.0 }
}

/// The store's read and write rates, all nodes together.
fn together_bps(machine: &Calibration, setup: &Setup) -> (f64, f64) {
    let (store, nodes) = (&machine.store, setup.nodes as f64);
    let total = |known: Option<f64>, node: f64| known.unwrap_or(node).min(node * nodes);
    (total(store.total_read_bps, store.read.all_bps), total(store.total_write_bps, store.write.all_bps))
}

fn bytes(workload: &Workload, sets: &[usize]) -> f64 {
    sets.iter().map(|&set| workload.sets[set].bytes as f64).sum()
}

fn upper(machine: &Calibration, workload: &Workload, setup: &Setup) -> f64 {
    let pace = pace(machine, workload, setup, false);
    let load = Load::of(machine, workload, setup, false);
    let slots = (setup.nodes * setup.processes) as f64;
    let all = chain(workload, 0..workload.tasks.len(), &pace, |_| 0.0);
    let serial: f64 = load.seconds(machine, setup, &pace).into_iter().sum();
    start_s(machine, setup) + serial + all.longest_s + all.work_s / slots + machine.store.operations.fsync_s
}

fn start_s(machine: &Calibration, setup: &Setup) -> f64 {
    if setup.mode == Mode::Store { 0.0 } else { machine.agent.start_s }
}

fn door(machine: &Calibration, setup: &Setup) -> Option<Door> {
    let agent = &machine.agent;
    if setup.mount_only { agent.mount.or(agent.shim) } else { agent.shim.or(agent.mount) }
}

fn pace(machine: &Calibration, workload: &Workload, setup: &Setup, best: bool) -> Pace {
    let store = &machine.store;
    let pick = |a: f64, b: f64| if best { a.max(b) } else { a.min(b) };
    let least = |a: f64, b: f64| if best { a.min(b) } else { a.max(b) };
    let mut pace = Pace {
        read_bps: pick(store.read.one_bps, store.cached_read.one_bps),
        first_read_bps: store.read.one_bps,
        write_bps: pick(store.write.one_bps, store.cached_write.one_bps),
        through_bps: if setup.mode == Mode::Store {
            store.write.one_bps.min(store.write.all_bps)
        } else {
            f64::INFINITY
        },
        ahead_bytes: ahead_bytes(machine, setup) * setup.nodes as f64,
        read_once: read_once(workload),
        open_s: store.operations.open_s,
        create_s: store.operations.create_s,
        read_cpu: least(store.read.cpu_s_per_byte, store.cached_read.cpu_s_per_byte),
        write_cpu: store.write.cpu_s_per_byte.max(store.cached_write.cpu_s_per_byte),
        operation_cpu: store.operations.cpu_s,
    };
    if setup.mode == Mode::Store {
        return pace;
    }
    for tier in &machine.tiers {
        pace.read_bps = pick(pace.read_bps, pick(tier.read.one_bps, tier.cached_read.one_bps));
        pace.write_bps = pick(pace.write_bps, pick(tier.write.one_bps, tier.cached_write.one_bps));
        pace.read_cpu = least(pace.read_cpu, least(tier.read.cpu_s_per_byte, tier.cached_read.cpu_s_per_byte));
        let written = tier.write.cpu_s_per_byte.max(tier.cached_write.cpu_s_per_byte);
        pace.write_cpu = if best {
            pace.write_cpu.min(tier.write.cpu_s_per_byte.min(tier.cached_write.cpu_s_per_byte))
        } else {
            pace.write_cpu.max(written)
        };
    }
    if let Some(door) = door(machine, setup) {
        pace.open_s = least(door.open_s, door.open_store_s);
        pace.create_s = door.create_s;
        pace.operation_cpu = least(door.open_cpu_s, door.create_cpu_s);
        if !best {
            pace.operation_cpu = pace.operation_cpu.max(door.open_store_cpu_s);
        }
    }
    pace
}

/// The workload's demand, in bytes, operations and core seconds.
struct Load {
    store_read: f64,
    store_write: f64,
    operations: f64,
    read: f64,
    written: f64,
    tier_moved: Vec<f64>,
    drained: f64,
    drained_files: f64,
    names: f64,
    cpu_s: f64,
}

impl Load {
    fn of(machine: &Calibration, workload: &Workload, setup: &Setup, best: bool) -> Self {
        let totals = workload.totals();
        let (intermediate, last) = (totals.intermediate_bytes as f64, totals.final_bytes as f64);
        let with_tiers = setup.mode != Mode::Store;
        let steps = || workload.tasks.iter().flat_map(|task| &task.steps);
        let sum = |sets: &mut dyn Iterator<Item = usize>| sets.map(|set| workload.sets[set].bytes as f64).sum::<f64>();
        let mut read_sets: Vec<usize> = steps().flat_map(|step| step.reads.iter().copied()).collect();
        let read = sum(&mut read_sets.iter().copied());
        let input_reads =
            |sets: &[usize]| sum(&mut sets.iter().copied().filter(|&set| workload.sets[set].fate == Fate::Input));
        let every_input_read = input_reads(&read_sets);
        let opened_inputs: f64 = read_sets
            .iter()
            .filter(|&&set| workload.sets[set].fate == Fate::Input)
            .map(|&set| workload.sets[set].files as f64)
            .sum();
        read_sets.sort_unstable();
        read_sets.dedup();
        let each_input_once = input_reads(&read_sets);
        let room: f64 = setup.tier_bytes.iter().map(|&bytes| bytes as f64).sum::<f64>() * setup.nodes as f64;
        let drained = match setup.mode {
            Mode::Store => 0.0,
            Mode::InMemory => last,
            Mode::CopyAll | Mode::Move => intermediate + last,
        };
        let spilled = if with_tiers && setup.mode == Mode::InMemory { (intermediate - room).max(0.0) } else { 0.0 };
        let store_write = match (setup.mode, best) {
            (Mode::Store, _) => intermediate + last,
            (_, true) => drained + spilled,
            // In the worst case only bytes that are certain to fit count as placed.
            (_, false) => drained.max(intermediate + last - room),
        };
        let files_written = totals.files_written as f64;
        let final_files: u64 = workload.sets.iter().filter(|set| set.fate == Fate::Final).map(|set| set.files).sum();
        let drained_files = match setup.mode {
            Mode::Store => 0.0,
            Mode::InMemory => final_files as f64,
            Mode::CopyAll | Mode::Move => files_written,
        };
        Self {
            store_read: match (setup.page_cache && best, with_tiers) {
                (true, _) => each_input_once,
                (false, false) => read,
                // Evicted files, and those without room, are read from the store.
                (false, true) if intermediate + last > room || setup.mode == Mode::Move => read,
                (false, true) => every_input_read,
            },
            store_write,
            operations: if with_tiers { opened_inputs } else { totals.files_read as f64 + files_written },
            read,
            written: intermediate + last,
            tier_moved: if best || !with_tiers {
                Vec::new()
            } else {
                vec![read + intermediate + last; machine.tiers.len()]
            },
            drained,
            drained_files,
            names: totals.files_read as f64 + files_written,
            cpu_s: totals.cpu_s,
        }
    }

    /// Seconds that each resource needs for it.
    fn seconds(&self, machine: &Calibration, setup: &Setup, pace: &Pace) -> Vec<f64> {
        let (store, agent, nodes) = (&machine.store, &machine.agent, setup.nodes as f64);
        let (read_bps, write_bps) = together_bps(machine, setup);
        let mut cores = self.cpu_s + self.read * pace.read_cpu + self.written * pace.write_cpu;
        cores += self.names * pace.operation_cpu;
        let mut seconds = vec![
            self.store_read / read_bps,
            self.store_write / write_bps,
            self.operations / store.operations.per_second,
        ];
        if setup.mode != Mode::Store {
            cores += self.drained_files * agent.drain_file_cpu_s;
            seconds.push(self.drained_files * agent.drain_file_s / nodes);
            if !self.tier_moved.is_empty() {
                cores += self.drained * agent.drain_cpu_s_per_byte;
                seconds.push(self.drained / agent.drain_bps / nodes);
                let per_second = door(machine, setup).map_or(f64::INFINITY, |door| door.per_second);
                seconds.push(self.names / per_second / nodes);
            }
        }
        // In the worst case all goes through the slowest tier.
        let slowest = machine.tiers.iter().map(|tier| tier.read.all_bps.min(tier.write.all_bps)).reduce(f64::min);
        if let (Some(moved), Some(slowest)) = (self.tier_moved.first(), slowest) {
            seconds.push(moved / slowest / nodes);
        }
        seconds.push(cores / machine.cores / nodes);
        seconds
    }
}

fn step_s(workload: &Workload, step: &Step, cores: f64, pace: &Pace) -> f64 {
    let files = |sets: &[usize]| sets.iter().map(|&set| workload.sets[set].files as f64).sum::<f64>();
    let read_s = |&set: &usize| {
        let fresh = workload.sets[set].fate == Fate::Input && pace.read_once[set];
        workload.sets[set].bytes as f64 / if fresh { pace.first_read_bps } else { pace.read_bps }
    };
    let written = bytes(workload, &step.writes);
    let (computing_s, writing_s) =
        (step.cpu_s / cores, (written / pace.write_bps).max((written - pace.ahead_bytes) / pace.through_bps));
    files(&step.reads) * pace.open_s
        + step.reads.iter().map(read_s).sum::<f64>()
        + step.wait_s
        + files(&step.writes) * pace.create_s
        + if step.streams { computing_s.max(writing_s) } else { computing_s + writing_s }
}

fn read_once(workload: &Workload) -> Vec<bool> {
    let mut times = vec![0u32; workload.sets.len()];
    for &set in workload.tasks.iter().flat_map(|task| &task.steps).flat_map(|step| &step.reads) {
        times[set] += 1;
    }
    times.into_iter().map(|times| times == 1).collect()
}

struct Chain {
    longest_s: f64,
    /// All tasks, one after the other.
    work_s: f64,
}

/// The longest chain among some tasks, with the time after the last of its files.
fn chain(workload: &Workload, part: Range<usize>, pace: &Pace, tail_s: impl Fn(usize) -> f64) -> Chain {
    let mut ends: Vec<f64> = Vec::with_capacity(part.len());
    let mut found = Chain { longest_s: 0.0, work_s: 0.0 };
    for task in &workload.tasks[part.clone()] {
        let before = task.after.iter().filter(|&&before| before >= part.start);
        let begins = before.map(|&before| ends[before - part.start]).fold(0.0, f64::max);
        let own: f64 = task.steps.iter().map(|step| step_s(workload, step, task.cores, pace)).sum();
        found.work_s += own;
        ends.push(begins + own);
        let last = task.steps.last().map_or(&[][..], |step| &step.writes);
        let latest = last.iter().map(|&set| begins + own + tail_s(set)).fold(begins + own, f64::max);
        found.longest_s = found.longest_s.max(latest);
    }
    found
}

/// The least time from the end of a file's last task to its place in the store.
fn tail_s(machine: &Calibration, workload: &Workload, setup: &Setup, set: usize) -> f64 {
    let drained = match setup.mode {
        Mode::Store => return machine.store.operations.fsync_s,
        Mode::InMemory => workload.sets[set].fate == Fate::Final,
        Mode::CopyAll | Mode::Move => true,
    };
    let copy_s =
        if never_spills(workload, setup) { workload.sets[set].bytes as f64 / machine.agent.drain_bps } else { 0.0 };
    if drained { machine.agent.quiet_s + copy_s } else { 0.0 }
}

fn never_spills(workload: &Workload, setup: &Setup) -> bool {
    let written: f64 = workload.sets.iter().filter(|set| set.fate != Fate::Input).map(|set| set.bytes as f64).sum();
    setup.tier_bytes.first().is_some_and(|&bytes| bytes as f64 >= written)
}
