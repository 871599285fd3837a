//! What each member says about itself: what it has to drain, and the bytes between it and each other member.
//!
//! The danger that this avoids: a command that waits for a member that does not answer. All members together have 2 s.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use surgetank_core::report::{Pair, PoolFigures, PoolMember, PoolMembers, PoolTraffic, Room, Traffic};
use surgetank_types::clock::tick;

use super::super::call::{Answer, Ask, Call};
use super::super::link::Link;
use super::super::status::PoolStatus;
use super::Others;

/// So long all members together may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// So long the pool's process of a node may take to answer its own agent.
const OF_PROCESS: Duration = Duration::from_secs(1);

/// What a member says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Report {
    /// The registry is there.
    pub has_registry: bool,
    /// What its drain has to do.
    pub undrained: Undrained,
    /// Between it and each other member.
    pub traffic: Vec<Traffic>,
}

/// What the store does not have yet, and where there is room.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Undrained {
    /// Bytes of closed files.
    pub bytes: u64,
    /// Operations that have no content.
    pub operations: u64,
    /// Bytes of closed files of which no other member has a copy.
    pub single_copy_bytes: u64,
    /// How many files that are.
    pub single_copy_files: u64,
    /// How many files would be lost with each member: it alone has their content, or their name.
    pub alone_at: BTreeMap<u32, u64>,
    /// The name of the node.
    pub node: String,
    /// The node's tiers.
    pub tiers: Vec<Room>,
}

/// What this member says to another one. `None`: its pool's process does not answer.
pub fn of_this(others: &Others, undrained: Undrained) -> Option<Report> {
    Some(report_of(&others.link.status(OF_PROCESS).ok()?, undrained))
}

/// What all members say. `undrained`: of this one.
pub fn of_all(others: &Others, undrained: Undrained) -> PoolMembers {
    let me = others.link.member();
    let until = tick() + PATIENCE;
    let status = others.link.status(OF_PROCESS).unwrap_or_default();
    if status.members.is_empty() {
        return PoolMembers { member: me, ..PoolMembers::default() };
    }
    let (sender, answers) = channel();
    let mut asked = 0;
    for member in status.members.iter().map(|one| one.member).filter(|member| *member != me) {
        let (link, sender) = (others.link.clone(), sender.clone());
        // (The other end may have stopped waiting.)
        let ask = move || drop(sender.send((member, asked_of(&link, member, until))));
        // (A member for which there is no thread counts as one that does not answer.)
        asked += usize::from(thread::Builder::new().name("pool-report".to_owned()).spawn(ask).is_ok());
    }
    let mut reports = BTreeMap::from([(me, report_of(&status, undrained))]);
    for _ in 0..asked {
        let left = until.saturating_duration_since(tick());
        let Ok((member, report)) = answers.recv_timeout(left) else { break };
        reports.extend(report.map(|report| (member, report)));
    }
    joined(status, &reports)
}

fn asked_of(link: &Link, member: u32, until: std::time::Instant) -> Option<Report> {
    let call = Call { uid: 0, gid: 0, ask: Ask::Report };
    match link.call(member, &call, None, &mut |_| tick() < until) {
        Ok(Answer::Bytes(bytes)) => serde_json::from_slice(&bytes).ok(),
        _ => None,
    }
}

/// For the metrics: what this agent knows without another member.
pub fn figures(others: &Others) -> PoolFigures {
    let members = others.link.status(OF_PROCESS).ok().map(|status| status.members.len());
    PoolFigures { members, traffic: traffic(others) }
}

/// The calls of this node's agent.
pub fn traffic(others: &Others) -> PoolTraffic {
    PoolTraffic { member: others.link.member(), others: others.link.traffic() }
}

fn report_of(status: &PoolStatus, undrained: Undrained) -> Report {
    let others = status.members.iter().filter(|one| one.member != status.member);
    let traffic = others.map(|one| Traffic {
        member: one.member,
        calls: one.calls,
        received_bytes: one.received_bytes,
        sent_bytes: one.sent_bytes,
    });
    Report { has_registry: status.has_registry, undrained, traffic: traffic.collect() }
}

fn joined(status: PoolStatus, reports: &BTreeMap<u32, Report>) -> PoolMembers {
    let numbers: Vec<u32> = status.members.iter().map(|one| one.member).collect();
    let pairs = numbers.iter().flat_map(|from| numbers.iter().map(|to| (*from, *to))).filter(|(from, to)| from != to);
    let traffic = pairs.map(|(from, to)| pair(from, to, reports)).collect();
    let members = status.members.into_iter().map(|one| {
        let report = reports.get(&one.member);
        PoolMember {
            member: one.member,
            address: one.address,
            has_registry: report.map(|report| report.has_registry),
            undrained_bytes: report.map(|report| report.undrained.bytes),
            undrained_operations: report.map(|report| report.undrained.operations),
            single_copy_bytes: report.map(|report| report.undrained.single_copy_bytes),
            single_copy_files: report.map(|report| report.undrained.single_copy_files),
            node: report.map(|report| report.undrained.node.clone()),
            tiers: report.map(|report| report.undrained.tiers.clone()),
            safe_to_power_off: is_safe_without(one.member, &numbers, reports),
            calls: one.calls,
            received_bytes: one.received_bytes,
            sent_bytes: one.sent_bytes,
        }
    });
    PoolMembers { member: status.member, members: members.collect(), lost: status.lost, traffic }
}

/// Does the pool lose nothing with this member? `None`: a member that may have files there did not answer.
fn is_safe_without(member: u32, all: &[u32], reports: &BTreeMap<u32, Report>) -> Option<bool> {
    let own = reports.get(&member)?;
    let alone = |report: &Report| report.undrained.alone_at.get(&member).copied().unwrap_or(0);
    if own.has_registry || own.undrained.operations > 0 || reports.values().any(|report| alone(report) > 0) {
        return Some(false);
    }
    all.iter().all(|other| reports.contains_key(other)).then_some(true)
}

/// Both members count the bytes. An agent that was replaced, and a connection that has ended, count less than the other
/// end.
fn pair(from: u32, to: u32, reports: &BTreeMap<u32, Report>) -> Pair {
    let between = |of: u32, other: u32| {
        let report = reports.get(&of)?;
        Some(report.traffic.iter().find(|one| one.member == other).copied().unwrap_or_default())
    };
    let (sender, receiver) = (between(from, to), between(to, from));
    Pair {
        from,
        to,
        bytes: sender.map(|one| one.sent_bytes).max(receiver.map(|one| one.received_bytes)),
        calls: sender.map(|one| one.calls),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A member has content of another one's file; the registry is at the first.
    #[test]
    fn member_is_safe_to_power_off_if_nothing_is_there_alone() {
        let report = |has_registry, operations, alone_at: &[(u32, u64)]| Report {
            has_registry,
            undrained: Undrained { operations, alone_at: alone_at.iter().copied().collect(), ..Undrained::default() },
            ..Report::default()
        };
        let mut reports = BTreeMap::from([
            (1, report(true, 0, &[(2, 1)])),
            (2, report(false, 0, &[])),
            (3, report(false, 4, &[])),
            (4, report(false, 0, &[])),
        ]);
        let safe = |reports: &BTreeMap<u32, Report>| {
            [1, 2, 3, 4].map(|member| is_safe_without(member, &[1, 2, 3, 4], reports))
        };
        assert_eq!(safe(&reports), [Some(false), Some(false), Some(false), Some(true)]);
        reports.remove(&1);
        assert_eq!(safe(&reports), [None, None, Some(false), None], "the first one may name a file there");
    }

    #[test]
    fn pair_has_the_larger_count_and_no_count_without_an_answer() {
        let report = |member, calls, received_bytes, sent_bytes| Report {
            traffic: vec![Traffic { member, calls, received_bytes, sent_bytes }],
            ..Report::default()
        };
        let reports = BTreeMap::from([(1, report(2, 7, 500, 300)), (2, report(1, 1, 200, 900))]);
        assert_eq!(pair(1, 2, &reports), Pair { from: 1, to: 2, bytes: Some(300), calls: Some(7) });
        assert_eq!(pair(2, 1, &reports), Pair { from: 2, to: 1, bytes: Some(900), calls: Some(1) });
        assert_eq!(pair(3, 1, &reports), Pair { from: 3, to: 1, bytes: Some(0), calls: None });
        assert_eq!(pair(3, 4, &reports), Pair { from: 3, to: 4, bytes: None, calls: None });
    }
}
