//! Which files of this member one node alone has.
//!
//! The danger that this avoids: a node is called safe to power off that has the only copy of a file, or its only name.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use surgetank_types::model::FileId;

use super::super::replicas::Record;
use super::Router;
use crate::mount::Filesystem;

/// So long the pool's process may take to say who the members are.
const PATIENCE: Duration = Duration::from_secs(1);

/// Files of this member whose content one member alone has.
#[derive(Debug, Default)]
pub struct SingleCopies {
    /// How many.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many each member has, of their contents or of their names.
    pub at: BTreeMap<u32, u64>,
}

/// Files that the store does not have and that are on one member only.
pub fn single_copies<F: Filesystem>(router: &Router<F>) -> SingleCopies {
    let lost = router.link.lost();
    let me = router.link.member();
    // (The table may still have one that has left.)
    let known = router.link.status(PATIENCE).map(|status| status.members).unwrap_or_default();
    let is_member = |member: u32| known.is_empty() || known.iter().any(|one| one.member == member);
    // Other members with a copy of the file as it is now.
    let holders = |number: u64, home: u32| {
        let whole = router.outgoing.copies.whole(number);
        // (A copy of an earlier close does not have what came after it.)
        let of_now = |has: &Record| {
            let now = || router.namespace.replicas.sealed(FileId(number));
            has.moment == 0 || now().is_some_and(|now| Record::of(number, &now).is_of_content_of(has))
        };
        let whole = whole.into_iter().filter(|(_, has)| has.as_ref().is_some_and(of_now)).map(|(member, _)| member);
        let is_there = |member: &u32| *member != home && !lost.contains_key(member) && is_member(*member);
        whole.filter(is_there).collect::<BTreeSet<u32>>()
    };
    let mut single = SingleCopies::default();
    for (number, bytes) in router.namespace.replicas.undrained() {
        let home = router.namespace.homes.home_of(FileId(number)).unwrap_or(me);
        let holders = holders(number, home);
        if holders.is_empty() {
            single.files += 1;
            single.bytes += bytes;
            *single.at.entry(home).or_default() += 1;
        }
        // (The name may not come back from its home: another member's program may have made it.)
        if home != me && holders.iter().all(|holder| *holder == me) {
            *single.at.entry(me).or_default() += 1;
        }
    }
    let spilled = router.namespace.replicas.spilled();
    if spilled > 0 {
        *single.at.entry(me).or_default() += spilled;
    }
    single
}
