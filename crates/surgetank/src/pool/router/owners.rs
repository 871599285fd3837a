//! Which members decide about a path, for the commands: what one of them does here has no effect on another member's files.

use std::collections::BTreeSet;
use std::time::Duration;

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

/// What decides about the names of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decides {
    /// This agent.
    Us,
    /// No member has claimed it.
    TheStore,
    /// Another member, which may be lost.
    Member(u32),
}

/// The member that decides about the file or directory at this path, or about the directory in which it would be made.
/// `None`: this one, or the store.
pub fn owner_of<F: Filesystem>(router: &Router<F>, path: &[u8]) -> Option<u32> {
    match decider(router, path) {
        Decides::Member(member) => Some(member),
        Decides::Us | Decides::TheStore => None,
    }
}

/// The same, with the others.
pub fn decider<F: Filesystem>(router: &Router<F>, path: &[u8]) -> Decides {
    let caller = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), pid: 0, umask: 0 };
    let mut at = FileId::ROOT.0;
    let mut owner = decider_of_directory(router, at);
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
        owner = decider_of_directory(router, at);
    }
    if at != FileId::ROOT.0 {
        router.forget(at, 1);
    }
    owner
}

fn decider_of_directory<F: Filesystem>(router: &Router<F>, id: u64) -> Decides {
    if let Some(at) = router.remote.at(id) {
        return Decides::Member(at.member);
    }
    match router.namespace.pooled.place_of(FileId(id)) {
        Some(Place::OfTheStore(path)) => match router.link.owner(&path) {
            Owner::Member(member, _) | Owner::Lost(member) => Decides::Member(member),
            Owner::Us => Decides::Us,
            Owner::TheStore | Owner::Between => Decides::TheStore,
        },
        _ => Decides::Us,
    }
}

/// Is it a file of a directory of the store that another member has claimed?
pub fn is_of_another<F: Filesystem>(router: &Router<F>, id: FileId) -> bool {
    let named = router.namespace.pooled.name_of(id);
    named.is_some_and(|(_, dir, _)| matches!(decider_of_directory(router, dir.0), Decides::Member(_)))
}

/// The answer of another member's agent to a command, as the agent wrote it. `question`: it changes nothing, so that its answer
/// is not awaited for long.
pub fn ask_agent<F: Filesystem>(
    router: &Router<F>,
    member: u32,
    request: Vec<u8>,
    question: Option<Duration>,
) -> Result<Vec<u8>> {
    let failed = |why: &dyn std::fmt::Display| {
        let error = Error::new(format!("member {member} of the pool does not answer")).why(why);
        let data = if question.is_some() { "nothing was changed" } else { "what was asked of it may be done or not" };
        error.remedy("see `surgetank pool members`, then try again").data(data)
    };
    let call = Call { uid: 0, gid: 0, ask: Ask::Tend { request } };
    // (To reach it. What it has begun is awaited.)
    let patience = question.unwrap_or(PATIENCE);
    let until = tick() + patience;
    let mut patient = |waits: Waits| waits == Waits::ForReply && question.is_none() || tick() < until;
    match router.link.call(member, &call, None, &mut patient) {
        Ok(Answer::Bytes(answer)) => Ok(answer),
        Ok(_) => Err(failed(&"its agent is not there")),
        Err(NoAnswer::Gone) => Err(failed(&"it has left, or its node is lost")),
        Err(NoAnswer::TimedOut) => Err(failed(&format!("no answer for {} s", patience.as_secs()))),
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
