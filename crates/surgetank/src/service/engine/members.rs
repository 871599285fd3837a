//! The members of the agent's pool, in the shapes of the report.

use surgetank_core::report::{PoolFigures, PoolMembers};

use super::Served;
use crate::pool::others::reports::{self, Report, Undrained};
use crate::pool::router::single_copies;

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
    let (single_copy_files, single_copy_bytes) =
        served.pool.as_ref().map(|pool| single_copies(pool)).unwrap_or_default();
    Undrained { bytes: waiting.bytes, operations: waiting.operations, single_copy_bytes, single_copy_files }
}
