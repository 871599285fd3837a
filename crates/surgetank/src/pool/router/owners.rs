//! Which members decide about a path, for the commands: what one of them does here has no effect on another member's files.

use std::collections::{BTreeSet, HashMap};
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
    let mut directories = Directories::default();
    let decides = directories.decider(router, path);
    directories.end(router);
    match decides {
        Decides::Member(member) => Some(member),
        Decides::Us | Decides::TheStore => None,
    }
}

/// Directories that were looked up: one below them costs one more look-up.
#[derive(Default)]
pub struct Directories {
    /// By path. `None`: it is not a directory.
    known: HashMap<Vec<u8>, (Option<u64>, Decides)>,
    looked_up: Vec<u64>,
}

impl Directories {
    /// What decides about the file or directory at this path, or about the directory in which it would be made.
    pub fn decider<F: Filesystem>(&mut self, router: &Router<F>, path: &[u8]) -> Decides {
        let caller = Caller { uid: geteuid().as_raw(), gid: getegid().as_raw(), pid: 0, umask: 0 };
        let mut at = (Some(FileId::ROOT.0), decider_of_directory(router, FileId::ROOT.0));
        let mut end = 0;
        for name in path.split(|byte| *byte == b'/') {
            end += name.len() + 1;
            let Some(dir) = at.0 else { break };
            if name.is_empty() || name == b"." {
                continue;
            }
            let Some(so_far) = path.get(..end - 1).filter(|_| name != b"..") else { break };
            if let Some(known) = self.known.get(so_far) {
                at = *known;
                continue;
            }
            at = match router.lookup(&caller, dir, name) {
                Ok(Looked::Found(entry)) => {
                    self.looked_up.push(entry.id);
                    let is_directory = entry.attr.kind == Kind::Directory;
                    if is_directory { (Some(entry.id), decider_of_directory(router, entry.id)) } else { (None, at.1) }
                }
                _ => (None, at.1),
            };
            self.known.insert(so_far.to_vec(), at);
        }
        at.1
    }

    /// Gives the look-ups back.
    pub fn end<F: Filesystem>(self, router: &Router<F>) {
        self.looked_up.into_iter().for_each(|id| router.forget(id, 1));
    }
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
