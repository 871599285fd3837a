//! Which members decide about a path, for the commands: what one of them does here has no effect on another member's files.

use std::collections::BTreeSet;

use rustix::process::{getegid, geteuid};
use surgetank_core::namespace::pooled::Place;
use surgetank_pool::calls::Waits;
use surgetank_types::clock::tick;
use surgetank_types::error::{Error, Result};
use surgetank_types::model::{Caller, FileId, Kind};

use super::super::call::{Answer, Ask, Call};
use super::super::link::{NoAnswer, Owner};
use super::{PATIENCE, Router};
use crate::mount::{Filesystem, Looked};

/// The member that decides about the file or directory at this path, or about the directory in which it would be made.
/// `None`: this one, or the store.
pub fn owner_of<F: Filesystem>(router: &Router<F>, path: &[u8]) -> Option<u32> {
    let caller = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), pid: 0, umask: 0 };
    let mut at = FileId::ROOT.0;
    let mut owner = owner_of_directory(router, at);
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        if name == b"." || name == b".." {
            break;
        }
        let looked = router.lookup(&caller, at, name);
        if at != FileId::ROOT.0 {
            router.forget(at, 1);
        }
        at = FileId::ROOT.0;
        let Ok(Looked::Found(entry)) = looked else { break };
        at = entry.id;
        if entry.attr.kind != Kind::Directory {
            break;
        }
        owner = owner_of_directory(router, at);
    }
    if at != FileId::ROOT.0 {
        router.forget(at, 1);
    }
    owner
}

fn owner_of_directory<F: Filesystem>(router: &Router<F>, id: u64) -> Option<u32> {
    if let Some(at) = router.remote.at(id) {
        return Some(at.member);
    }
    match router.namespace.pooled.place_of(FileId(id)) {
        Some(Place::OfTheStore(path)) => match router.link.owner(&path) {
            Owner::Member(member, _) | Owner::Lost(member) => Some(member),
            Owner::TheStore | Owner::Us | Owner::Between => None,
        },
        _ => None,
    }
}

/// Is it a file of a directory of the store that another member has claimed?
pub fn is_of_another<F: Filesystem>(router: &Router<F>, id: FileId) -> bool {
    let named = router.namespace.pooled.name_of(id);
    named.is_some_and(|(_, dir, _)| owner_of_directory(router, dir.0).is_some())
}

/// The answer of another member's agent to a command, as the agent wrote it.
pub fn ask_agent<F: Filesystem>(router: &Router<F>, member: u32, request: Vec<u8>) -> Result<Vec<u8>> {
    let failed = |why: &dyn std::fmt::Display| {
        let error = Error::new(format!("member {member} of the pool does not answer")).why(why);
        error.remedy("see `surgetank pool members`, then try again").data("what was asked of it may be done or not")
    };
    let call = Call { uid: 0, gid: 0, ask: Ask::Tend { request } };
    // (To reach it. What it has begun is awaited.)
    let until = tick() + PATIENCE;
    let mut patient = |waits: Waits| waits == Waits::ForReply || tick() < until;
    match router.link.call(member, &call, None, &mut patient) {
        Ok(Answer::Bytes(answer)) => Ok(answer),
        Ok(_) => Err(failed(&"its agent is not there")),
        Err(NoAnswer::Gone) => Err(failed(&"it has left, or its node is lost")),
        Err(NoAnswer::TimedOut) => Err(failed(&format!("no answer for {} s", PATIENCE.as_secs()))),
        Err(NoAnswer::Expelled | NoAnswer::NoProcess) => Err(failed(&"the membership of this node has ended")),
    }
}

/// The other members that decide about something at or below this path.
pub fn owners_below<F: Filesystem>(router: &Router<F>, path: &[u8]) -> BTreeSet<u32> {
    let is_below = |directory: &[u8]| {
        path.is_empty() || directory.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    let me = router.link.member();
    let claims = router.link.owned_by_others().into_iter().filter(|(directory, _)| is_below(directory));
    owner_of(router, path).into_iter().chain(claims.map(|(_, member)| member)).filter(|member| *member != me).collect()
}
