//! Flows that share resources by max-min fairness: each resource divides itself equally among its flows. A flow that
//! needs less gets what it needs, and the other flows share the rest. A flow that needs several resources runs at the
//! rate of its scarcest one.
//!
//! Invariants after [`share`]: no resource gives more than it has; no flow is faster than its own bound. Deterministic:
//! the same flows in the same order give the same rates.

/// An activity with a rate: bytes, operations or core seconds.
#[derive(Debug, Clone)]
pub struct Flow {
    pub remaining: f64,
    /// Its rate per second alone on an unlimited machine.
    pub bound: f64,
    /// Resource, and how much of it one unit takes.
    pub uses: Vec<(usize, f64)>,
    pub rate: f64,
}

impl Flow {
    pub fn new(work: f64, bound: f64) -> Self {
        Self { remaining: work, bound, uses: Vec::new(), rate: 0.0 }
    }

    #[must_use]
    pub fn using(mut self, resource: usize, each: f64) -> Self {
        if each > 0.0 {
            self.uses.push((resource, each));
        }
        self
    }
}

/// After so many rounds the remaining levels are final; their overdraft is scaled down.
const ROUNDS_MAX: usize = 64;
const SETTLED: f64 = 1e-10;

/// Sets every flow's rate.
pub fn share(capacities: &[f64], flows: &mut [&mut Flow]) {
    let mut users: Vec<Vec<(usize, f64)>> = vec![Vec::new(); capacities.len()];
    for (number, flow) in flows.iter().enumerate() {
        for &(resource, each) in &flow.uses {
            users[resource].push((number, each));
        }
    }
    let mut levels = vec![f64::INFINITY; capacities.len()];
    for _ in 0..ROUNDS_MAX {
        let mut moved = false;
        for (resource, users) in users.iter().enumerate() {
            if users.is_empty() || capacities[resource].is_infinite() {
                continue;
            }
            let wanted = users.iter().map(|&(number, each)| each * limit(flows[number], &levels, Some(resource)));
            let level = water_level(wanted.collect(), capacities[resource]);
            let old = levels[resource];
            moved |= level != old && (old.is_infinite() || (level - old).abs() > SETTLED * old.abs());
            levels[resource] = level;
        }
        if !moved {
            break;
        }
    }
    for flow in flows.iter_mut() {
        flow.rate = limit(flow, &levels, None);
    }
    for (resource, users) in users.iter().enumerate() {
        let taken: f64 = users.iter().map(|&(number, each)| each * flows[number].rate).sum();
        if taken > capacities[resource] {
            for &(number, _) in users {
                flows[number].rate *= capacities[resource] / taken;
            }
        }
    }
}

/// The rate that all resources but `but` allow a flow.
fn limit(flow: &Flow, levels: &[f64], but: Option<usize>) -> f64 {
    let others = flow.uses.iter().filter(|&&(resource, _)| Some(resource) != but);
    others.map(|&(resource, each)| levels[resource] / each).fold(flow.bound, f64::min)
}

/// The level at which requests, each limited to it, fill the capacity; infinite when all fit.
fn water_level(mut wanted: Vec<f64>, capacity: f64) -> f64 {
    if wanted.iter().sum::<f64>() <= capacity {
        return f64::INFINITY;
    }
    wanted.sort_by(f64::total_cmp);
    let mut left = capacity;
    let mut others = wanted.len();
    for wish in wanted {
        let equal = left / others as f64;
        if wish >= equal {
            return equal;
        }
        left -= wish;
        others -= 1;
    }
    f64::INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(capacities: &[f64], mut flows: Vec<Flow>) -> Vec<f64> {
        share(capacities, &mut flows.iter_mut().collect::<Vec<_>>());
        flows.iter().map(|flow| flow.rate).collect()
    }

    #[test]
    fn small_flow_leaves_the_rest_to_other_flows() {
        let flow = |bound| Flow::new(1.0, bound).using(0, 1.0);
        assert_eq!(rates(&[10.0], vec![flow(2.0), flow(100.0), flow(100.0)]), [2.0, 4.0, 4.0]);
        assert_eq!(rates(&[10.0], vec![flow(2.0), flow(3.0)]), [2.0, 3.0]);
    }

    #[test]
    fn flow_is_limited_by_its_scarcest_resource() {
        // The first flow needs both; the second resource gives it only 1, so the third flow has 9 of the first.
        let flows = vec![
            Flow::new(1.0, 100.0).using(0, 1.0).using(1, 1.0),
            Flow::new(1.0, 100.0).using(1, 1.0),
            Flow::new(1.0, 100.0).using(0, 1.0),
        ];
        assert_eq!(rates(&[10.0, 2.0], flows), [1.0, 1.0, 9.0]);
    }

    #[test]
    fn units_do_not_matter() {
        // 4 core seconds a second are shared by two computing flows and one that needs a tenth of a core for its bytes.
        let flows = vec![
            Flow::new(1.0, 2.0).using(0, 1.0),
            Flow::new(1.0, 2.0).using(0, 1.0),
            Flow::new(1.0, 100e6).using(0, 1e-9),
        ];
        assert_eq!(rates(&[2.0], flows), [0.95, 0.95, 100e6]);
    }
}
