//! The members of the agent's pool, in the shapes of the report.

use surgetank_core::report::{PoolFigures, PoolMembers, Room};

use super::Served;
use crate::pool::others::reports::{self, Report, Undrained};
use crate::pool::router::single::single_copies;

/// The answers of all members; `None`: the agent belongs to no pool.
pub(super) fn of_all(served: &Served) -> Option<PoolMembers> {
    served.pool.as_ref().map(|pool| reports::of_all(&pool.others, undrained(served)))
}

/// This member's answer to another one.
pub(super) fn of_this(served: &Served) -> Option<Report> {
    reports::of_this(&served.pool.as_ref()?.others, undrained(served))
}

/// The pool's part of the metrics.
pub(super) fn figures(served: &Served) -> Option<PoolFigures> {
    served.pool.as_ref().map(|pool| reports::figures(&pool.others))
}

fn undrained(served: &Served) -> Undrained {
    let waiting = served.namespace.questions.waiting();
    let single = served.pool.as_ref().map(|pool| single_copies(pool)).unwrap_or_default();
    Undrained {
        bytes: waiting.bytes,
        operations: waiting.operations,
        single_copy_bytes: single.bytes,
        single_copy_files: single.files,
        alone_at: single.at,
        node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        tiers: rooms(served),
    }
}

fn rooms(served: &Served) -> Vec<Room> {
    let mut rooms: Vec<Room> = Vec::new();
    for device in served.namespace.base.tiers.devices() {
        let view = device.view();
        let at = rooms.iter().position(|room| room.tier == device.tier_name()).unwrap_or_else(|| {
            let tier = device.tier_name().to_owned();
            rooms.push(Room { tier, cap_bytes: 0, free_bytes: 0, write_bytes_per_second: 0 });
            rooms.len() - 1
        });
        let room = &mut rooms[at];
        room.cap_bytes += view.cap_bytes;
        room.free_bytes += view.free_bytes;
        room.write_bytes_per_second += view.bandwidth_bytes_per_second;
    }
    rooms
}
