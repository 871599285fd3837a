//! A task's steps in their order, and the cost of each on this machine.

use std::collections::{HashSet, VecDeque};

use super::{
    AGENT, CACHE, CACHE_WRITE, CORES, Cause, FROM_STORE, Flow, Mode, Owner, STORE_OPERATIONS, STORE_READ, STORE_WRITE,
    Simulation, TO_STORE, Where,
};
use crate::planner::machine::{Place, Stream};
use crate::planner::workload::Step;

pub struct Running {
    task: usize,
    pub node: usize,
    todo: VecDeque<Todo>,
    /// Waits until the drain has made room under the limit of undrained bytes.
    pub held: bool,
}

/// One step. Reads and writes become flows only when their turn comes: before that, the place of the bytes is unknown.
#[derive(Debug)]
pub enum Todo {
    Read(usize),
    /// Also the computing for each byte, in core seconds.
    Write(usize, f64),
    Closed(usize),
    Flow {
        cause: Cause,
        flow: Flow,
        into: Option<Into>,
    },
}

/// A write into a write-back cache; also through it while the cache is full.
#[derive(Debug, Clone)]
pub struct Into {
    pub buffer: usize,
    pub uses: Vec<(usize, f64)>,
    pub bound: f64,
}

impl Todo {
    pub fn flow(cause: Cause, flow: Flow) -> Self {
        Self::Flow { cause, flow, into: None }
    }
}

impl Simulation<'_> {
    /// Assigns ready tasks to free slots: the node with most of a task's input, then the emptiest.
    pub(super) fn dispatch(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        // A store serves requests in their order. Of equal tasks that begin together, each gets its input after the one
        // before. If they shared the bandwidth, all inputs would arrive at once. The tasks would then stay in step: all
        // reading, then all computing.
        let mut served_s = vec![0.0; self.setup.nodes];
        let mut served = HashSet::new();
        while !self.ready.is_empty() {
            let task = self.ready[0];
            let wanted = self.workload.tasks[task].steps.first().map_or(&[][..], |step| &step.reads);
            let free = (0..self.setup.nodes).filter(|&node| self.free_slots[node] > 0);
            let best = free.map(|node| {
                let here: f64 = wanted.iter().map(|&set| self.places.local(node, set)).sum();
                (node, here, self.free_slots[node])
            });
            let best = best.reduce(|best, next| {
                let better = next.1.total_cmp(&best.1).then(next.2.cmp(&best.2)).is_gt();
                if better { next } else { best }
            });
            let Some((node, ..)) = best else { return };
            self.ready.pop_front();
            self.free_slots[node] -= 1;
            let slot = self.running.iter().position(Option::is_none).unwrap_or_else(|| {
                self.running.push(None);
                self.running.len() - 1
            });
            let mut todo = self.program(task);
            if self.setup.apart_s > 0.0 {
                let reading_s = self.first_reading_s(node, task, &mut served);
                todo.push_front(Todo::flow(Cause::ReadStore, Flow::new(served_s[node], 1.0)));
                served_s[node] += reading_s;
                if self.now_s <= self.began_s {
                    todo.push_front(Todo::flow(Cause::Start, Flow::new(slot as f64 * self.setup.apart_s, 1.0)));
                }
            }
            self.running[slot] = Some(Running { task, node, todo, held: false });
            self.resume(slot);
        }
    }

    /// How long a task reads before its next step if no other task reads; excludes input that other tasks read with it.
    fn first_reading_s(&self, node: usize, task: usize, served: &mut HashSet<(usize, usize)>) -> f64 {
        let first = self.workload.tasks[task].steps.first();
        let sets = first.iter().flat_map(|step| &step.reads).filter(|&&set| served.insert((node, set)));
        let bytes = sets.map(|&set| {
            let all = self.workload.sets[set].bytes as f64;
            let parts = self.places.parts[set].iter();
            let on_tiers: f64 = parts.filter(|(place, _)| *place != Where::Store).map(|(_, bytes)| bytes).sum();
            (all - on_tiers - self.caches[node].has(set)).max(0.0)
        });
        bytes.sum::<f64>() / self.machine.store.read.all_bps
    }

    fn program(&self, task: usize) -> VecDeque<Todo> {
        let task = &self.workload.tasks[task];
        let mut todo = VecDeque::new();
        for step in &task.steps {
            todo.extend(step.reads.iter().map(|&set| Todo::Read(set)));
            let cpu_s_per_byte = self.cpu_s_per_byte(step);
            if step.cpu_s > 0.0 && cpu_s_per_byte == 0.0 {
                // The node whose cores it uses is known when the turn comes: see `resume`.
                todo.push_back(Todo::flow(Cause::Compute, Flow::new(step.cpu_s, task.cores)));
            }
            if step.wait_s > 0.0 {
                todo.push_back(Todo::flow(Cause::Wait, Flow::new(step.wait_s, 1.0)));
            }
            todo.extend(step.writes.iter().map(|&set| Todo::Write(set, cpu_s_per_byte)));
        }
        todo
    }

    /// Core time per written byte; 0 where the computing is done before.
    fn cpu_s_per_byte(&self, step: &Step) -> f64 {
        let bytes: f64 = step.writes.iter().map(|&set| self.workload.sets[set].bytes as f64).sum();
        if step.streams && bytes > 0.0 { step.cpu_s / bytes } else { 0.0 }
    }

    /// The next step of a slot's task; without one the task has ended.
    pub(super) fn resume(&mut self, slot: usize) {
        loop {
            let Some(running) = self.running[slot].as_mut() else { return };
            let (node, running_task) = (running.node, running.task);
            match running.todo.pop_front() {
                Some(Todo::Read(set)) => {
                    let flows = self.reading(node, set);
                    self.put_before(slot, flows);
                }
                Some(Todo::Write(set, cpu_s_per_byte)) => {
                    let bytes = self.workload.sets[set].bytes as f64;
                    let drains = self.setup.mode.drains(self.workload.sets[set].fate);
                    if drains && !self.admits(node, bytes) {
                        self.hold(slot, Todo::Write(set, cpu_s_per_byte));
                        return;
                    }
                    let mut flows = self.writing(node, set);
                    if cpu_s_per_byte > 0.0 {
                        self.compute_while(node, running_task, cpu_s_per_byte, &mut flows);
                    }
                    flows.push(Todo::Closed(set));
                    self.put_before(slot, flows);
                }
                Some(Todo::Closed(set)) => {
                    if self.setup.mode.drains(self.workload.sets[set].fate) {
                        self.closed(node, set);
                    }
                }
                Some(Todo::Flow { cause, mut flow, into }) => {
                    if flow.remaining <= 0.0 {
                        continue;
                    }
                    // (For streaming writes, which compute as they write, this is reported already.)
                    if cause == Cause::Compute && flow.uses.is_empty() {
                        flow = flow.using(self.resources.own(node, CORES), 1.0);
                    }
                    self.start_flow(Owner::Task(slot), Todo::Flow { cause, flow, into });
                    return;
                }
                None => {
                    self.ended(slot);
                    return;
                }
            }
        }
    }

    fn put_before(&mut self, slot: usize, flows: Vec<Todo>) {
        if let Some(running) = self.running[slot].as_mut() {
            for todo in flows.into_iter().rev() {
                running.todo.push_front(todo);
            }
        }
    }

    /// Bytes are written no faster than they are computed.
    fn compute_while(&self, node: usize, task: usize, cpu_s_per_byte: f64, flows: &mut [Todo]) {
        let cores = self.resources.own(node, CORES);
        let computed_s = cpu_s_per_byte / self.workload.tasks[task].cores;
        for todo in flows {
            if let Todo::Flow { cause: cause @ (Cause::WriteTier | Cause::WriteStore), flow, .. } = todo {
                // The program copies its bytes itself.
                let copied_s: f64 =
                    flow.uses.iter().filter(|(resource, _)| *resource == cores).map(|(_, each)| each).sum();
                if 1.0 / (computed_s + copied_s) < flow.bound {
                    flow.bound = 1.0 / (computed_s + copied_s);
                    *cause = Cause::Compute;
                }
                match flow.uses.iter_mut().find(|(resource, _)| *resource == cores) {
                    Some((_, each)) => *each += cpu_s_per_byte,
                    None => flow.uses.push((cores, cpu_s_per_byte)),
                }
            }
        }
    }

    fn hold(&mut self, slot: usize, todo: Todo) {
        if let Some(running) = self.running[slot].as_mut() {
            running.todo.push_front(todo);
            running.held = true;
        }
    }

    /// The drain has made progress: held writers try again, in the order of slots.
    pub(super) fn let_in(&mut self, node: usize) {
        for slot in 0..self.running.len() {
            if let Some(running) = self.running[slot].as_mut()
                && running.node == node
                && std::mem::take(&mut running.held)
            {
                self.resume(slot);
            }
        }
    }

    /// Without progress anywhere, one held writer is admitted beyond the limit. False: no writer is held.
    pub(super) fn admit_anyhow(&mut self) -> bool {
        let Some(slot) = self.running.iter().position(|running| running.as_ref().is_some_and(|running| running.held))
        else {
            return false;
        };
        let Some(running) = self.running[slot].as_mut() else { return false };
        running.held = false;
        let node = running.node;
        self.drains[node].dirty_bytes = 0.0;
        self.resume(slot);
        true
    }

    fn ended(&mut self, slot: usize) {
        let Some(running) = self.running[slot].take() else { return };
        self.free_slots[running.node] += 1;
        self.left -= 1;
        self.tasks_s = self.now_s;
        for follower in self.followers[running.task].clone() {
            self.waits_for[follower] -= 1;
            if self.waits_for[follower] == 0 {
                self.ready.push_back(follower);
            }
        }
    }

    /// Opens and reads a set, part by part.
    fn reading(&mut self, node: usize, set: usize) -> Vec<Todo> {
        let files = self.workload.sets[set].files as f64;
        let mut parts = self.places.parts[set].clone();
        if parts.is_empty() {
            parts.push((Where::Store, self.workload.sets[set].bytes as f64));
        }
        let in_tiers: f64 = parts.iter().filter(|(place, _)| *place != Where::Store).map(|(_, bytes)| bytes).sum();
        let whole: f64 = parts.iter().map(|(_, bytes)| bytes).sum();
        // A set's files are alike: a tier has the same share of files as of bytes, and only those are opened there.
        let here = if whole > 0.0 { files * in_tiers / whole } else { 0.0 };
        let mut todo = self.opening(node, here, files - here);
        let in_cache = self.caches[node].has(set);
        let mut over_cache = 0.0;
        for (place, bytes) in parts {
            match place {
                Where::Tier { node: at, tier } if at == node => {
                    let place = &self.machine.tiers[tier];
                    let resource = self.resources.tier_read(node, tier);
                    if place.in_memory {
                        todo.push(self.stream(node, bytes, &place.read, &[resource], Cause::ReadTier));
                    } else {
                        over_cache += bytes;
                        todo.extend(self.cached_or(node, bytes, in_cache, place, &[resource], Cause::ReadTier));
                    }
                }
                // The content of another node's tier comes over the network, as the store's does.
                Where::Tier { .. } => {
                    let resource = self.resources.own(node, FROM_STORE);
                    todo.push(self.stream(node, bytes, &self.machine.store.read, &[resource], Cause::ReadTier));
                }
                Where::Store => {
                    over_cache += bytes;
                    let resources = [STORE_READ, self.resources.own(node, FROM_STORE)];
                    let store = &self.machine.store;
                    todo.extend(self.cached_or(node, bytes, in_cache, store, &resources, Cause::ReadStore));
                }
            }
        }
        self.cached_bytes += in_cache.min(over_cache);
        self.caches[node].put(set, over_cache);
        todo
    }

    /// Opening files that tiers have, and others.
    fn opening(&self, node: usize, in_tiers: f64, in_store: f64) -> Vec<Todo> {
        let Some(door) = &self.door else {
            return vec![self.store_operations(node, in_tiers + in_store, self.machine.store.operations.open_s)];
        };
        let cores = self.resources.own(node, CORES);
        let mut todo = Vec::new();
        if in_tiers > 0.0 && door.open_s > 0.0 {
            let flow = Flow::new(in_tiers, 1.0 / door.open_s).using(cores, door.open_cpu_s);
            todo.push(Todo::flow(Cause::AgentOperations, flow));
        }
        if in_store > 0.0 && door.open_store_s > 0.0 {
            let flow = Flow::new(in_store, 1.0 / door.open_store_s).using(cores, door.open_store_cpu_s);
            todo.push(Todo::flow(Cause::AgentOperations, flow.using(STORE_OPERATIONS, 1.0)));
        }
        todo
    }

    fn store_operations(&self, node: usize, files: f64, each_s: f64) -> Todo {
        if each_s <= 0.0 {
            return Todo::flow(Cause::StoreOperations, Flow::new(0.0, 1.0));
        }
        let cpu_s = self.machine.store.operations.cpu_s.min(each_s);
        let flow =
            Flow::new(files, 1.0 / each_s).using(STORE_OPERATIONS, 1.0).using(self.resources.own(node, CORES), cpu_s);
        Todo::flow(Cause::StoreOperations, flow)
    }

    fn stream(&self, node: usize, bytes: f64, stream: &Stream, resources: &[usize], cause: Cause) -> Todo {
        let mut flow = Flow::new(bytes, stream.one_bps).using(self.resources.own(node, CORES), stream.cpu_s_per_byte);
        for &resource in resources {
            flow = flow.using(resource, 1.0);
        }
        Todo::flow(cause, flow)
    }

    /// Takes from the page cache what it has of that place, the rest from the device.
    fn cached_or(
        &self,
        node: usize,
        bytes: f64,
        in_cache: f64,
        place: &Place,
        device: &[usize],
        cause: Cause,
    ) -> Vec<Todo> {
        let hit = in_cache.min(bytes);
        let cache = [self.resources.own(node, CACHE)];
        let mut todo = Vec::new();
        if hit > 0.0 {
            todo.push(self.stream(node, hit, &place.cached_read, &cache, Cause::PageCache));
        }
        if bytes > hit {
            todo.push(self.stream(node, bytes - hit, &place.read, device, cause));
        }
        todo
    }

    /// Creates and writes a set: room is taken now.
    fn writing(&mut self, node: usize, set: usize) -> Vec<Todo> {
        let FileCount { files, bytes } = FileCount::of(self, set);
        let cores = self.resources.own(node, CORES);
        let mut todo = vec![match &self.door {
            None => self.store_operations(node, files, self.machine.store.operations.create_s),
            Some(door) if door.create_s > 0.0 => {
                let flow = Flow::new(files, 1.0 / door.create_s)
                    .using(cores, door.create_cpu_s)
                    .using(self.resources.own(node, AGENT), 1.0);
                Todo::flow(Cause::AgentOperations, flow)
            }
            Some(_) => Todo::flow(Cause::AgentOperations, Flow::new(0.0, 1.0)),
        }];
        let freed = self.places.put(node, set, bytes, self.setup.mode);
        self.give_back(node, &freed);
        let mut over_cache = 0.0;
        for (place, bytes) in self.places.parts[set].clone() {
            match place {
                Where::Tier { tier, .. } => {
                    let place = &self.machine.tiers[tier];
                    let resource = self.resources.tier_write(node, tier);
                    if place.in_memory {
                        self.caches[node].take(bytes);
                        todo.push(self.stream(node, bytes, &place.write, &[resource], Cause::WriteTier));
                    } else {
                        over_cache += bytes;
                        todo.push(self.buffered(node, bytes, place, Some(tier), &[resource], Cause::WriteTier));
                    }
                }
                Where::Store => {
                    over_cache += bytes;
                    let resources = [STORE_WRITE, self.resources.own(node, TO_STORE)];
                    let store = &self.machine.store;
                    todo.push(self.buffered(node, bytes, store, None, &resources, Cause::WriteStore));
                }
            }
        }
        if self.setup.mode.drains(self.workload.sets[set].fate) {
            self.drains[node].dirty_bytes += self.dirty_in_memory(node, set);
        }
        self.caches[node].put(set, over_cache);
        todo
    }

    /// Writes into the write-back cache of a device, and through it while it is full.
    fn buffered(
        &self,
        node: usize,
        bytes: f64,
        place: &Place,
        tier: Option<usize>,
        device: &[usize],
        cause: Cause,
    ) -> Todo {
        let mediated_cpu = if tier.is_none() && self.setup.mode != Mode::Store {
            // Bytes without room in any tier go through the agent.
            self.machine.agent.drain_cpu_s_per_byte
        } else {
            0.0
        };
        let cores = self.resources.own(node, CORES);
        let written_cpu = (place.write.cpu_s_per_byte - place.cached_write.cpu_s_per_byte).max(0.0);
        let flow = Flow::new(bytes, place.cached_write.one_bps)
            .using(cores, place.cached_write.cpu_s_per_byte + mediated_cpu)
            .using(self.resources.own(node, CACHE_WRITE), 1.0);
        let mut uses: Vec<(usize, f64)> = device.iter().map(|&resource| (resource, 1.0)).collect();
        if written_cpu > 0.0 {
            uses.push((cores, written_cpu));
        }
        let into = Into { buffer: self.buffer_of(node, tier), uses, bound: place.write.one_bps };
        Todo::Flow { cause, flow, into: Some(into) }
    }

    /// Writes back the content of a write-back cache.
    pub(super) fn flush_flow(&self, buffer: usize) -> Flow {
        let (node, at) = (buffer / (self.resources.tiers + 1), buffer % (self.resources.tiers + 1));
        let tier = (at < self.resources.tiers).then_some(at);
        let place = tier.map_or(&self.machine.store, |tier| &self.machine.tiers[tier]);
        let cpu = (place.write.cpu_s_per_byte - place.cached_write.cpu_s_per_byte).max(0.0);
        let flow = Flow::new(self.buffers[buffer].level, f64::INFINITY).using(self.resources.own(node, CORES), cpu);
        match tier {
            Some(tier) => flow.using(self.resources.tier_write(node, tier), 1.0),
            None => flow.using(STORE_WRITE, 1.0).using(self.resources.own(node, TO_STORE), 1.0),
        }
    }
}

struct FileCount {
    files: f64,
    bytes: f64,
}

impl FileCount {
    fn of(simulation: &Simulation<'_>, set: usize) -> Self {
        let set = &simulation.workload.sets[set];
        Self { files: set.files as f64, bytes: set.bytes as f64 }
    }
}
