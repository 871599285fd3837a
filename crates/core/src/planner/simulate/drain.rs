//! The drain of each node: sets in the order of their closes, some at a time, each copied and then published.

use std::collections::VecDeque;

use super::{CORES, Flow};
use super::{Cause, DRAIN, Mode, Owner, PUBLISH, STORE_WRITE, Simulation, TO_STORE, Todo, Where};

#[derive(Default)]
pub struct Drain {
    waiting: VecDeque<usize>,
    /// Sets in progress, in the order in which their flows were started, each with its remaining work.
    working: Vec<(usize, VecDeque<Todo>)>,
    /// Undrained bytes in memory.
    pub dirty_bytes: f64,
    pub drained_bytes: f64,
}

impl Drain {
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.working.is_empty()
    }
}

impl Simulation<'_> {
    /// Does the limit of undrained bytes in memory admit a new set that will be drained?
    pub(super) fn admits(&self, node: usize, bytes: f64) -> bool {
        let dirty = self.drains[node].dirty_bytes;
        dirty < 1.0 || dirty + bytes <= self.setup.dirty_bytes_max as f64
    }

    /// A set for the drain has been closed.
    pub(super) fn closed(&mut self, node: usize, set: usize) {
        self.drains[node].waiting.push_back(set);
        self.feed(node);
    }

    pub(super) fn feed(&mut self, node: usize) {
        while self.drains[node].working.len() < self.setup.drain_threads
            && let Some(set) = self.drains[node].waiting.pop_front()
        {
            let mut todo = self.work(node, set);
            let first = todo.pop_front();
            // Owners of drain flows are numbered by node and set, so that several can be under way.
            self.drains[node].working.push((set, todo));
            let owner = node * self.workload.sets.len() + set;
            match first {
                Some(first) => self.start_flow(Owner::Drain(owner), first),
                None => self.drained(owner),
            }
        }
    }

    fn work(&self, node: usize, set: usize) -> VecDeque<Todo> {
        let agent = &self.machine.agent;
        let files = self.workload.sets[set].files as f64;
        let mut todo = VecDeque::new();
        let own = |which| self.resources.own(node, which);
        if agent.quiet_s > 0.0 {
            todo.push_back(Todo::flow(Cause::LastDrain, Flow::new(1.0, 1.0 / agent.quiet_s)));
        }
        for &(place, bytes) in &self.places.parts[set] {
            let Where::Tier { tier, .. } = place else { continue };
            let mut flow = Flow::new(bytes, agent.drain_bps)
                .using(own(DRAIN), 1.0)
                .using(own(CORES), agent.drain_cpu_s_per_byte)
                .using(STORE_WRITE, 1.0)
                .using(own(TO_STORE), 1.0);
            if !self.machine.tiers[tier].in_memory && self.caches[node].has(set) < bytes {
                flow = flow.using(self.resources.tier_read(node, tier), 1.0);
            }
            todo.push_back(Todo::flow(Cause::LastDrain, flow));
        }
        if agent.drain_file_s > 0.0 {
            let flow =
                Flow::new(files, f64::INFINITY).using(own(PUBLISH), 1.0).using(own(CORES), agent.drain_file_cpu_s);
            todo.push_back(Todo::flow(Cause::LastDrain, flow));
        }
        todo
    }

    /// A flow of the drain has ended: starts the set's next one, or makes the set durable.
    pub(super) fn drained(&mut self, owner: usize) {
        let (node, set) = (owner / self.workload.sets.len(), owner % self.workload.sets.len());
        let Some(at) = self.drains[node].working.iter().position(|(working, _)| *working == set) else { return };
        if let Some(next) = self.drains[node].working[at].1.pop_front() {
            self.start_flow(Owner::Drain(owner), next);
            return;
        }
        self.drains[node].working.remove(at);
        let in_tiers = self.places.local(node, set);
        self.drains[node].drained_bytes += in_tiers;
        self.drains[node].dirty_bytes -= self.dirty_in_memory(node, set);
        let freed = self.places.durable(node, set, self.setup.mode);
        self.give_back(node, &freed);
        if self.setup.mode != Mode::Store {
            self.caches[node].put(set, self.workload.sets[set].bytes as f64);
        }
        self.feed(node);
        self.let_in(node);
    }

    pub(super) fn dirty_in_memory(&self, node: usize, set: usize) -> f64 {
        let in_memory = |place: &Where| match place {
            Where::Tier { node: at, tier } => *at == node && self.machine.tiers[*tier].in_memory,
            Where::Store => false,
        };
        self.places.parts[set].iter().filter(|(place, _)| in_memory(place)).map(|(_, bytes)| bytes).sum()
    }

    /// Memory that tiers no longer use is page cache again.
    pub(super) fn give_back(&mut self, node: usize, freed: &[(usize, f64)]) {
        for &(tier, bytes) in freed {
            if self.machine.tiers[tier].in_memory {
                self.caches[node].take(-bytes);
            }
        }
    }
}
