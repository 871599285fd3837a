//! The point estimate: the workload runs on the machine, from event to event.
//!
//! ```text
//! ready tasks ─► a slot of a node ─► step by step: read sets ─► compute ─► write sets ─► ready tasks …
//!                                                                            └─► drain (Surgetank) or write-back (store alone)
//! ```
//! Everything that takes time is a [`Flow`] over resources (cores, bandwidths, operations); between two events all
//! rates are constant. The end is when all tasks have ended and all files for the store are there. There is no
//! randomness and no wall clock.
//!
//! The danger that it avoids: an estimate without an explanation. An outcome says what every resource did and what
//! tasks waited for.

mod drain;
mod memory;
mod place;
mod task;

use std::collections::VecDeque;

use serde::Serialize;

use super::fluid::{self, Flow};
use super::machine::{Calibration, Door, Place};
use super::workload::{Fate, Workload};
use memory::{Buffer, PageCache};
use place::{Places, Where};
use task::{Into, Running, Todo};

/// The mode: where files go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Without Surgetank.
    Store,
    /// Intermediate files stay in the tiers (rule `keep`), the others are drained.
    InMemory,
    /// All files are drained and stay in the tiers while there is room.
    CopyAll,
    /// All files are drained and leave the tiers at once.
    Move,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Store, Self::InMemory, Self::CopyAll, Self::Move];

    /// The name of the mode, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::InMemory => "in-memory",
            Self::CopyAll => "copy-all",
            Self::Move => "move",
        }
    }

    fn drains(self, fate: Fate) -> bool {
        match self {
            Self::Store => false,
            Self::InMemory => fate == Fate::Final,
            Self::CopyAll | Self::Move => fate != Fate::Input,
        }
    }
}

/// How the machine is used.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setup {
    /// The mode.
    pub mode: Mode,
    /// Number of nodes.
    pub nodes: usize,
    /// Tasks at a time on each node.
    pub processes: usize,
    /// Caps of the calibration's tiers, in their order; 0 leaves one out.
    pub tier_bytes: Vec<u64>,
    /// Programs use the mount, without the shim.
    pub mount_only: bool,
    /// Files that the drain copies at a time, on each node.
    pub drain_threads: usize,
    /// Undrained bytes allowed in memory, on each node.
    pub dirty_bytes_max: u64,
    /// May the page cache have earlier reads and writes?
    pub page_cache: bool,
    /// Time between the starts of the first tasks. Equal tasks that begin at the same instant stay in step: all read,
    /// then all write, while half of the store rests. Only a difference between them ends that, and real tasks always
    /// differ.
    pub apart_s: f64,
}

impl Setup {
    /// The setup that the calibration suggests, on one node. `processes`: tasks at a time on each node.
    pub fn new(machine: &Calibration, mode: Mode, processes: usize) -> Self {
        Self {
            mode,
            nodes: 1,
            processes,
            tier_bytes: machine.tiers.iter().map(|tier| tier.room_bytes).collect(),
            mount_only: machine.agent.shim.is_none(),
            drain_threads: 4,
            dirty_bytes_max: machine.memory_bytes / 4,
            page_cache: true,
            apart_s: APART_S,
        }
    }
}

/// About the time to start a program.
const APART_S: f64 = 1e-3;

/// The use of a span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// The start of the agent, and the time between the first starts of tasks.
    Start,
    /// Reads from the store.
    ReadStore,
    /// Writes to the store.
    WriteStore,
    /// Reads from a tier.
    ReadTier,
    /// Writes to a tier.
    WriteTier,
    /// Reads that the page cache answers.
    PageCache,
    /// Opens and creations in the store, without the agent.
    StoreOperations,
    /// Opens and creations through the agent.
    AgentOperations,
    /// Computing on cores.
    Compute,
    /// Waiting without a core, as the workload says.
    Wait,
    /// Waiting because too many undrained bytes are in memory.
    DirtyLimit,
    /// After the last task: files that are not in the store yet.
    LastDrain,
}

const CAUSES: [Cause; 12] = [
    Cause::Start,
    Cause::ReadStore,
    Cause::WriteStore,
    Cause::ReadTier,
    Cause::WriteTier,
    Cause::PageCache,
    Cause::StoreOperations,
    Cause::AgentOperations,
    Cause::Compute,
    Cause::Wait,
    Cause::DirtyLimit,
    Cause::LastDrain,
];

/// The use of one resource.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Use {
    /// Name of the resource.
    pub resource: String,
    /// Share of the makespan in which it was busy; 1 is always saturated.
    pub busy: f64,
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Time until all tasks have ended and all files for the store are there, in seconds.
    pub makespan_s: f64,
    /// When the last task ended.
    pub tasks_s: f64,
    /// Seconds of the makespan by the tasks' activity; their sum is the makespan.
    pub spent: Vec<(Cause, f64)>,
    /// Busiest first.
    pub uses: Vec<Use>,
    /// Bytes written to each tier, and those without room in any.
    pub tier_bytes: Vec<u64>,
    /// Most that any node used of each tier at a time.
    pub tier_peak_bytes: Vec<u64>,
    /// Bytes without room in any tier, written to the store.
    pub spilled_bytes: u64,
    /// Bytes that the drain wrote to the store.
    pub drained_bytes: u64,
    /// Bytes of reads that the page cache answered.
    pub cached_bytes: u64,
}

/// Resources: the shared ones, then those of each node.
pub(super) struct Resources {
    pub capacities: Vec<f64>,
    names: Vec<String>,
    tiers: usize,
}

const STORE_READ: usize = 0;
const STORE_WRITE: usize = 1;
const STORE_OPERATIONS: usize = 2;
const SHARED: usize = 3;
const CORES: usize = 0;
const FROM_STORE: usize = 1;
const TO_STORE: usize = 2;
const CACHE: usize = 3;
const AGENT: usize = 4;
const PUBLISH: usize = 5;
const DRAIN: usize = 6;
const CACHE_WRITE: usize = 7;
const OWN: usize = 8;

impl Resources {
    fn new(machine: &Calibration, setup: &Setup, door: Option<&Door>) -> Self {
        let store = &machine.store;
        let tiers = machine.tiers.len();
        let mut capacities = vec![
            store.total_read_bps.unwrap_or(store.read.all_bps),
            store.total_write_bps.unwrap_or(store.write.all_bps),
            store.operations.per_second,
        ];
        let mut names: Vec<String> =
            ["reading the store", "writing the store", "operations of the store"].map(str::to_owned).into();
        let per_second = |seconds: f64| if seconds > 0.0 { 1.0 / seconds } else { f64::INFINITY };
        for node in 0..setup.nodes {
            capacities.extend([
                machine.cores,
                store.read.all_bps,
                store.write.all_bps,
                store.cached_read.all_bps,
                door.map_or(f64::INFINITY, |door| door.per_second),
                per_second(machine.agent.drain_file_s),
                machine.agent.drain_bps,
                store.cached_write.all_bps,
            ]);
            let of_node = if setup.nodes == 1 { String::new() } else { format!(" (node {node})") };
            let own = [
                "cores",
                "from the store",
                "to the store",
                "reading the page cache",
                "agent",
                "publishing files",
                "drain",
                "writing the page cache",
            ];
            names.extend(own.iter().map(|name| format!("{name}{of_node}")));
            for tier in &machine.tiers {
                capacities.extend([tier.read.all_bps, tier.write.all_bps]);
                names.extend(["reading", "writing"].map(|way| format!("{way} tier {}{of_node}", tier.name)));
            }
        }
        Self { capacities, names, tiers }
    }

    fn own(&self, node: usize, which: usize) -> usize {
        SHARED + node * (OWN + 2 * self.tiers) + which
    }

    fn tier_read(&self, node: usize, tier: usize) -> usize {
        self.own(node, OWN + 2 * tier)
    }

    fn tier_write(&self, node: usize, tier: usize) -> usize {
        self.own(node, OWN + 2 * tier + 1)
    }
}

/// The owner that continues when a flow ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Task(usize),
    Drain(usize),
    Flush(usize),
}

struct Active {
    flow: Flow,
    owner: Owner,
    cause: Cause,
    into: Option<Into>,
}

impl Active {
    fn writes_into(&self, buffer: usize) -> bool {
        self.into.as_ref().is_some_and(|into| into.buffer == buffer)
    }
}

pub(super) struct Simulation<'a> {
    machine: &'a Calibration,
    workload: &'a Workload,
    setup: &'a Setup,
    door: Option<Door>,
    resources: Resources,
    now_s: f64,
    /// When the first tasks start.
    began_s: f64,
    active: Vec<Active>,
    running: Vec<Option<Running>>,
    free_slots: Vec<usize>,
    ready: VecDeque<usize>,
    waits_for: Vec<usize>,
    followers: Vec<Vec<usize>>,
    left: usize,
    places: Places,
    caches: Vec<PageCache>,
    buffers: Vec<Buffer>,
    drains: Vec<drain::Drain>,
    used: Vec<f64>,
    spent: Vec<f64>,
    tasks_s: f64,
    cached_bytes: f64,
}

/// Runs the workload.
pub fn run(machine: &Calibration, workload: &Workload, setup: &Setup) -> Outcome {
    let mut simulation = Simulation::new(machine, workload, setup);
    simulation.play();
    simulation.outcome()
}

/// A writer whose permitted lead over a device is less than this part of its bytes counts as having no lead. Each time
/// that it fills so small a lead would be an event.
const AHEAD_PART_LEAST: f64 = 5e-5;
/// Below this a flow has ended: a billionth of its size, or a nanosecond at its rate.
const NOTHING_S: f64 = 1e-9;

impl<'a> Simulation<'a> {
    fn new(machine: &'a Calibration, workload: &'a Workload, setup: &'a Setup) -> Self {
        let door = match setup.mode {
            Mode::Store => None,
            _ if setup.mount_only => machine.agent.mount.or(machine.agent.shim),
            _ => machine.agent.shim.or(machine.agent.mount),
        };
        let resources = Resources::new(machine, setup, door.as_ref());
        let mut followers = vec![Vec::new(); workload.tasks.len()];
        for (number, task) in workload.tasks.iter().enumerate() {
            for &before in &task.after {
                followers[before].push(number);
            }
        }
        let waits_for: Vec<usize> = workload.tasks.iter().map(|task| task.after.len()).collect();
        let with_tiers = setup.mode != Mode::Store;
        let began_s = if with_tiers { machine.agent.start_s } else { 0.0 };
        let totals = workload.totals();
        let ahead_least = (totals.intermediate_bytes as f64 + totals.final_bytes as f64) * AHEAD_PART_LEAST;
        let ahead = |place: &Place| match place.dirty_bytes as f64 {
            bytes if setup.page_cache && bytes >= ahead_least => bytes,
            _ => 0.0,
        };
        let buffers = (0..setup.nodes)
            .flat_map(|_| machine.tiers.iter().chain([&machine.store]))
            .map(|place| Buffer::new(ahead(place)))
            .collect();
        Self {
            used: vec![0.0; resources.capacities.len()],
            places: Places::new(workload, setup, with_tiers),
            caches: vec![PageCache::new(if setup.page_cache { machine.memory_bytes as f64 } else { 0.0 }); setup.nodes],
            drains: (0..setup.nodes).map(|_| drain::Drain::default()).collect(),
            ready: (0..workload.tasks.len()).filter(|&task| waits_for[task] == 0).collect(),
            free_slots: vec![setup.processes; setup.nodes],
            left: workload.tasks.len(),
            now_s: began_s,
            began_s,
            spent: vec![0.0; CAUSES.len()],
            tasks_s: 0.0,
            cached_bytes: 0.0,
            active: Vec::new(),
            running: Vec::new(),
            machine,
            workload,
            setup,
            door,
            resources,
            waits_for,
            followers,
            buffers,
        }
    }

    fn play(&mut self) {
        self.spent[Cause::Start as usize] = self.now_s;
        self.dispatch();
        while !self.finished() {
            self.regulate();
            let Some(step_s) = self.next_event_s() else {
                // Without any progress but with work left, a writer waits for room that no drain will free. It gets the
                // room.
                if !self.admit_anyhow() {
                    break;
                }
                continue;
            };
            self.advance(step_s);
            self.settle();
        }
        if self.left == 0 && self.setup.mode == Mode::Store && self.workload.totals().files_written > 0 {
            let sync_s = self.machine.store.operations.fsync_s;
            self.now_s += sync_s;
            self.spent[Cause::LastDrain as usize] += sync_s;
        }
    }

    fn finished(&self) -> bool {
        let unwritten = self.buffers.iter().skip(self.resources.tiers).step_by(self.resources.tiers + 1);
        self.left == 0 && self.drains.iter().all(drain::Drain::is_empty) && unwritten.into_iter().all(Buffer::is_empty)
    }

    /// Write-back caches change their state, then all flows share the resources again.
    fn regulate(&mut self) {
        for number in 0..self.buffers.len() {
            let writers = self.active.iter().any(|active| active.writes_into(number));
            let flushing = self.active.iter().any(|active| active.owner == Owner::Flush(number));
            self.buffers[number].turn(writers);
            if !flushing && self.buffers[number].is_to_flush(writers) {
                let flow = self.flush_flow(number);
                self.active.push(Active { flow, owner: Owner::Flush(number), cause: Cause::WriteStore, into: None });
            }
        }
        let mut flows: Vec<Flow> = self.active.iter().map(|active| self.as_it_stands(active)).collect();
        fluid::share(&self.resources.capacities, &mut flows.iter_mut().collect::<Vec<_>>());
        for (active, shared) in self.active.iter_mut().zip(&flows) {
            active.flow.rate = shared.rate;
        }
    }

    /// The flow, with its further uses while its write-back cache is full.
    fn as_it_stands(&self, active: &Active) -> Flow {
        let mut flow = active.flow.clone();
        if let Some(into) = active.into.as_ref().filter(|into| self.buffers[into.buffer].full) {
            flow.uses.extend(&into.uses);
            flow.bound = flow.bound.min(into.bound);
        }
        flow
    }

    fn next_event_s(&self) -> Option<f64> {
        let ends = |active: &&Active| active.flow.rate > 0.0 && !matches!(active.owner, Owner::Flush(_));
        let soonest = self.active.iter().filter(ends).map(|active| active.flow.remaining / active.flow.rate);
        let turns = (0..self.buffers.len())
            .map(|number| self.buffers[number].turns_after_s(self.inflow(number), self.outflow(number)));
        let soonest = soonest.chain(turns).fold(f64::INFINITY, f64::min);
        soonest.is_finite().then_some(soonest.max(0.0))
    }

    fn inflow(&self, buffer: usize) -> f64 {
        let through = self.buffers[buffer].full;
        let into = self.active.iter().filter(|active| active.writes_into(buffer) && !through);
        into.map(|active| active.flow.rate).sum()
    }

    fn outflow(&self, buffer: usize) -> f64 {
        let out = self.active.iter().find(|active| active.owner == Owner::Flush(buffer));
        out.map_or(0.0, |active| active.flow.rate)
    }

    fn advance(&mut self, step_s: f64) {
        self.now_s += step_s;
        self.account(step_s);
        for number in 0..self.buffers.len() {
            let gained = (self.inflow(number) - self.outflow(number)) * step_s;
            self.buffers[number].gain(gained);
        }
        for active in &mut self.active {
            active.flow.remaining -= active.flow.rate * step_s;
        }
    }

    fn account(&mut self, step_s: f64) {
        for active in &self.active {
            for (resource, each) in self.as_it_stands(active).uses {
                self.used[resource] += each * active.flow.rate * step_s;
            }
        }
        let tasks: Vec<Cause> = self
            .active
            .iter()
            .filter(|active| matches!(active.owner, Owner::Task(_)))
            .map(|active| active.cause)
            .chain(self.running.iter().flatten().filter(|running| running.held).map(|_| Cause::DirtyLimit))
            .collect();
        if tasks.is_empty() {
            self.spent[Cause::LastDrain as usize] += step_s;
        }
        for &cause in &tasks {
            self.spent[cause as usize] += step_s / tasks.len() as f64;
        }
    }

    /// Removes ended flows and continues their owners.
    fn settle(&mut self) {
        let mut ended = Vec::new();
        let mut number = 0;
        while number < self.active.len() {
            let Active { flow, owner, .. } = &self.active[number];
            let over = match *owner {
                Owner::Flush(buffer) => self.buffers[buffer].is_empty(),
                _ => flow.remaining <= flow.rate * NOTHING_S,
            };
            if over {
                ended.push(self.active.remove(number).owner);
            } else {
                number += 1;
            }
        }
        for owner in ended {
            match owner {
                Owner::Task(slot) => self.resume(slot),
                Owner::Drain(node) => self.drained(node),
                Owner::Flush(buffer) => self.buffers[buffer].level = 0.0,
            }
        }
        self.dispatch();
    }

    fn start_flow(&mut self, owner: Owner, todo: Todo) {
        if let Todo::Flow { cause, flow, into } = todo {
            self.active.push(Active { flow, owner, cause, into });
        }
    }

    fn buffer_of(&self, node: usize, tier: Option<usize>) -> usize {
        node * (self.resources.tiers + 1) + tier.unwrap_or(self.resources.tiers)
    }

    fn outcome(mut self) -> Outcome {
        let makespan_s = self.now_s;
        let mut uses: Vec<Use> = std::mem::take(&mut self.resources.names)
            .into_iter()
            .zip(self.used.iter().zip(&self.resources.capacities))
            .map(|(resource, (used, capacity))| Use { resource, busy: used / capacity / makespan_s.max(NOTHING_S) })
            .filter(|used| used.busy > 0.0)
            .collect();
        uses.sort_by(|a, b| b.busy.total_cmp(&a.busy));
        let spent = CAUSES.iter().copied().zip(self.spent.iter().copied()).filter(|(_, seconds)| *seconds > 0.0);
        Outcome {
            makespan_s,
            tasks_s: self.tasks_s,
            spent: spent.collect(),
            uses,
            tier_bytes: self.places.written_bytes.iter().map(|bytes| *bytes as u64).collect(),
            tier_peak_bytes: self.places.peak_bytes.iter().map(|bytes| bytes.ceil() as u64).collect(),
            spilled_bytes: self.places.spilled_bytes as u64,
            drained_bytes: self.drains.iter().map(|drain| drain.drained_bytes as u64).sum(),
            cached_bytes: self.cached_bytes as u64,
        }
    }
}
