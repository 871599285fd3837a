//! The pool in the reports: its members, what each has to drain, and the bytes between them on the network.
//!
//! The danger that it avoids: a member that does not answer looks like one that has nothing to drain. What is not known
//! is `None`, and never 0.

use serde::{Deserialize, Serialize};

/// The pool in `surgetank status`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolMembers {
    /// The number of the member that answers.
    pub member: u32,
    /// All members, this one too. Empty: the pool's process of this node does not answer, or the membership has ended.
    pub members: Vec<PoolMember>,
    /// Members that were lost: their lease ended before they left.
    pub lost: Vec<LostMember>,
    /// The network between each two members, in each direction.
    pub traffic: Vec<Pair>,
}

/// One member. `None`: it did not answer in time.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolMember {
    /// Its number, from 1.
    pub member: u32,
    /// Where the others reach it: `HOST:PORT`.
    pub address: String,
    /// The registry is there: it leaves last.
    pub has_registry: Option<bool>,
    /// Bytes of closed files there that the store does not have yet, without holes.
    pub undrained_bytes: Option<u64>,
    /// Renames, deletes and changes of attributes there that the store does not have yet.
    pub undrained_operations: Option<u64>,
    /// Those of them that are on one member only: they are lost with it.
    pub single_copy_bytes: Option<u64>,
    /// How many files that are.
    pub single_copy_files: Option<u64>,
    /// The name of its node, as `uname -n`.
    #[serde(default)]
    pub node: Option<String>,
    /// Its tiers.
    #[serde(default)]
    pub tiers: Option<Vec<Room>>,
    /// The pool loses nothing if its node alone goes: it has no sole copy, no waiting operation and no registry. Files that a
    /// rule keeps do not count, nor does what a copy does not have ([semantics](docs/semantics.md#copies-on-other-nodes)).
    /// `None`: another member that may have files there did not answer.
    #[serde(default)]
    pub safe_to_power_off: Option<bool>,
    /// Calls of this node's agent to it.
    pub calls: u64,
    /// Bytes that this node received from it.
    pub received_bytes: u64,
    /// Bytes that this node sent to it.
    pub sent_bytes: u64,
}

/// The room of a tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// Its name.
    pub tier: String,
    /// What may be used there.
    pub cap_bytes: u64,
    /// What is free of it.
    pub free_bytes: u64,
    /// How fast its devices were written so far, or are expected to be until then.
    pub write_bytes_per_second: u64,
}

/// A member that was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostMember {
    /// Its number.
    pub member: u32,
    /// Where it was: `HOST:PORT`.
    pub address: String,
}

/// The network from one member to another one. `None`: neither of those that know it answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair {
    /// The number of the member that sends.
    pub from: u32,
    /// The number of the member that receives.
    pub to: u32,
    /// Bytes on the network: calls, replies and messages. The counts of connections that have ended may be missing.
    pub bytes: Option<u64>,
    /// Calls of the sender's agent, since it started.
    pub calls: Option<u64>,
}

/// One agent's calls to another member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// The number of the other member.
    pub member: u32,
    /// The number of calls: each one is a round trip.
    pub calls: u64,
    /// Bytes received from that member.
    pub received_bytes: u64,
    /// Bytes sent to that member.
    pub sent_bytes: u64,
}

/// The calls of a node's agent to the other members of its pool.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolTraffic {
    /// The number of this node's member.
    pub member: u32,
    /// Members that were called, by their numbers.
    pub others: Vec<Traffic>,
}

impl PoolTraffic {
    /// The growth since `base`, of members with any.
    #[must_use]
    pub fn since(mut self, base: Option<&Self>) -> Self {
        for now in &mut self.others {
            let base = base.and_then(|base| base.others.iter().find(|base| base.member == now.member));
            if let Some(base) = base {
                now.calls = now.calls.saturating_sub(base.calls);
                now.received_bytes = now.received_bytes.saturating_sub(base.received_bytes);
                now.sent_bytes = now.sent_bytes.saturating_sub(base.sent_bytes);
            }
        }
        self.others.retain(|one| one.calls + one.received_bytes + one.sent_bytes > 0);
        self
    }

    /// The sum with the counts of earlier agents.
    #[must_use]
    pub fn and(mut self, before: Option<&Self>) -> Self {
        for earlier in before.iter().flat_map(|before| &before.others) {
            match self.others.iter_mut().find(|now| now.member == earlier.member) {
                Some(now) => {
                    now.calls += earlier.calls;
                    now.received_bytes += earlier.received_bytes;
                    now.sent_bytes += earlier.sent_bytes;
                }
                None => self.others.push(*earlier),
            }
        }
        self.others.sort_unstable_by_key(|one| one.member);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(others: &[(u32, u64)]) -> PoolTraffic {
        let one = |(member, calls): &(u32, u64)| Traffic {
            member: *member,
            calls: *calls,
            received_bytes: calls * 100,
            sent_bytes: calls * 10,
        };
        PoolTraffic { member: 1, others: others.iter().map(one).collect() }
    }

    #[test]
    fn traffic_of_a_run_is_the_growth_of_all_its_agents() {
        let earlier_agent = traffic(&[(2, 9), (3, 4)]).since(Some(&traffic(&[(2, 5)])));
        assert_eq!(earlier_agent, traffic(&[(2, 4), (3, 4)]));
        // The next agent counts from 0.
        let next_agent = traffic(&[(4, 1), (2, 3)]).since(Some(&traffic(&[(4, 1)])));
        assert_eq!(next_agent.and(Some(&earlier_agent)), traffic(&[(2, 7), (3, 4)]));
        assert_eq!(traffic(&[(2, 1)]).since(Some(&traffic(&[(2, 5)]))), traffic(&[]), "a smaller later value");
    }
}
