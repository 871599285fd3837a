//! Where sets are stored: in tiers of nodes, in the store, or partly both; and the remaining room.
//!
//! As the agent places: the fastest tier with room, the rest in the next one, the remainder in the store. Durable sets
//! make room for new ones, oldest first.
//!
//! Invariant: no tier holds more than its cap.

use std::collections::VecDeque;

use super::{Fate, Mode, Setup, Workload};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Where {
    Tier { node: usize, tier: usize },
    Store,
}

pub struct Places {
    /// The parts of each set and their bytes. Empty: not written yet.
    pub parts: Vec<Vec<(Where, f64)>>,
    caps: Vec<f64>,
    /// By node and tier.
    used: Vec<Vec<f64>>,
    /// Sets on a node that are durable, oldest first.
    evictable: Vec<VecDeque<usize>>,
    pub written_bytes: Vec<f64>,
    /// The peak use of each tier on any node.
    pub peak_bytes: Vec<f64>,
    pub spilled_bytes: f64,
}

impl Places {
    pub fn new(workload: &Workload, setup: &Setup, with_tiers: bool) -> Self {
        let caps: Vec<f64> =
            setup.tier_bytes.iter().map(|&bytes| if with_tiers { bytes as f64 } else { 0.0 }).collect();
        let parts = workload.sets.iter().map(|set| match set.fate {
            Fate::Input => vec![(Where::Store, set.bytes as f64)],
            _ => Vec::new(),
        });
        Self {
            parts: parts.collect(),
            used: vec![vec![0.0; caps.len()]; setup.nodes],
            evictable: vec![VecDeque::new(); setup.nodes],
            written_bytes: vec![0.0; caps.len()],
            peak_bytes: vec![0.0; caps.len()],
            spilled_bytes: 0.0,
            caps,
        }
    }

    /// Finds room for a set's bytes on a node and takes it. Returns the bytes per tier that were freed for it.
    pub fn put(&mut self, node: usize, set: usize, bytes: f64, mode: Mode) -> Vec<(usize, f64)> {
        let mut freed = Vec::new();
        let mut left = bytes;
        let mut parts = Vec::new();
        for tier in 0..self.caps.len() {
            while self.caps[tier] - self.used[node][tier] < left
                && let Some(old) = self.evictable[node].pop_front()
            {
                freed.extend(self.leave(old));
            }
            let here = (self.caps[tier] - self.used[node][tier]).min(left).max(0.0);
            if here > 0.0 {
                self.used[node][tier] += here;
                self.written_bytes[tier] += here;
                self.peak_bytes[tier] = self.peak_bytes[tier].max(self.used[node][tier]);
                parts.push((Where::Tier { node, tier }, here));
                left -= here;
            }
        }
        if left > 0.0 || parts.is_empty() {
            parts.push((Where::Store, left));
            if mode != Mode::Store {
                self.spilled_bytes += left;
            }
        }
        self.parts[set] = parts;
        freed
    }

    /// The set is in the store: it may leave its tiers, and does so at once in mode `move`.
    pub fn durable(&mut self, node: usize, set: usize, mode: Mode) -> Vec<(usize, f64)> {
        if mode == Mode::Move {
            return self.leave(set);
        }
        self.evictable[node].push_back(set);
        Vec::new()
    }

    /// Removes a set from its tiers. Returns the bytes per tier.
    fn leave(&mut self, set: usize) -> Vec<(usize, f64)> {
        let mut freed = Vec::new();
        let mut whole = 0.0;
        for (place, bytes) in std::mem::take(&mut self.parts[set]) {
            whole += bytes;
            if let Where::Tier { node, tier } = place {
                self.used[node][tier] -= bytes;
                freed.push((tier, bytes));
            }
        }
        self.parts[set] = vec![(Where::Store, whole)];
        freed
    }

    /// Bytes of a set in the tiers of a node.
    pub fn local(&self, node: usize, set: usize) -> f64 {
        let here = |place: &Where| matches!(place, Where::Tier { node: at, .. } if *at == node);
        self.parts[set].iter().filter(|(place, _)| here(place)).map(|(_, bytes)| bytes).sum()
    }
}
