//! What the agent knows of other members' files: their numbers, and the nodes of directories and files that it has of the
//! store itself.
//!
//! A number with the mark is `MARK + node`; the node's own bits name its member. Nodes that a member has numbered before
//! it joined are listed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::Caller;

use super::super::call::{Answer, Ask, Call, Found};
use super::super::link::{Link, NoAnswer};
use super::{NOT_OWNER, PATIENCE};
use crate::mount::{current, killed, wait_long};

/// Of the kernel's numbers of other members' files, and of handles there.
pub(super) const MARK: u64 = 1 << 63;
/// Of numbers that are listed.
const LISTED: u64 = 1 << 62;
/// A handle is `MARK + member * HANDLES + number`.
const HANDLES: u64 = 1 << 40;

/// A file or directory of another member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct At {
    pub member: u32,
    pub node: u64,
    /// Found by a directory of the store: if the owner changes, another member has it.
    pub by_path: bool,
}

pub(super) struct Remote {
    pub link: Arc<Link>,
    /// Claimed directories: by path, of which owner and epoch.
    directories: Mutex<HashMap<Vec<u8>, (u32, u64, u64)>>,
    listed: Mutex<Vec<(u32, u64)>>,
}

impl Remote {
    pub fn new(link: Arc<Link>) -> Self {
        Self { link, directories: Mutex::default(), listed: Mutex::default() }
    }

    /// Whose file the kernel's number is; `None`: one of this agent.
    pub fn at(&self, id: u64) -> Option<At> {
        if id & MARK == 0 {
            return None;
        }
        if id & LISTED != 0 {
            let listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
            let known = usize::try_from(id & !(MARK | LISTED)).ok().and_then(|index| listed.get(index).copied());
            // (The list ended with an earlier agent.)
            let (member, node) = known.unwrap_or_default();
            return Some(At { member, node, by_path: false });
        }
        let node = id & !MARK;
        Some(At { member: u32::try_from(node / FILES_OF_A_MEMBER).unwrap_or(0), node, by_path: false })
    }

    /// The kernel's number of a file.
    pub fn number_of(&self, member: u32, node: u64) -> u64 {
        if node < LISTED && node / FILES_OF_A_MEMBER == u64::from(member) {
            return MARK | node;
        }
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        let index = listed.iter().position(|one| *one == (member, node)).unwrap_or(listed.len());
        if index == listed.len() {
            listed.push((member, node));
        }
        MARK | LISTED | index as u64
    }

    /// The kernel's number of a handle.
    pub fn handle_number(member: u32, handle: u64) -> u64 {
        MARK | (u64::from(member) * HANDLES) | (handle % HANDLES)
    }

    /// The member and number of a handle; `None`: one of this agent.
    pub fn handle(fh: u64) -> Option<(u32, u64)> {
        let number = fh & !MARK;
        (fh & MARK != 0).then(|| (u32::try_from(number / HANDLES).unwrap_or(0), number % HANDLES))
    }

    /// The node of a directory that the member has claimed in that epoch.
    pub fn directory(&self, caller: &Caller, path: &[u8], (member, epoch): (u32, u64), until: Instant) -> FsResult<At> {
        let known = self.directories.lock().unwrap_or_else(PoisonError::into_inner).get(path).copied();
        if let Some((owner, of, node)) = known
            && (owner, of) == (member, epoch)
        {
            return Ok(At { member, node, by_path: true });
        }
        let at = At { member, node: 0, by_path: true };
        let Found { node, .. } = self.found(caller, at, Ask::Directory(path.into()), until)?;
        let mut directories = self.directories.lock().unwrap_or_else(PoisonError::into_inner);
        directories.insert(path.to_vec(), (member, epoch, node));
        Ok(At { node, ..at })
    }

    /// The node of a file that the store had when this agent looked, in a directory that another member owns by now.
    pub fn file(&self, caller: &Caller, dir: At, name: &[u8], ino: u64) -> FsResult<At> {
        let asked = self.ask(caller, dir, Ask::Lookup { parent: dir.node, name: name.into() })?;
        match asked {
            Answer::Found(found) if found.attr.ino == ino => Ok(At { node: found.node, ..dir }),
            Answer::Found(found) => {
                self.forget(dir.member, found.node, 1);
                Err(Errno::STALE.into())
            }
            _ => Err(Errno::STALE.into()),
        }
    }

    pub fn found(&self, caller: &Caller, at: At, ask: Ask, until: Instant) -> FsResult<Found> {
        match self.ask_until(caller, at, ask, 0, until)? {
            Answer::Found(found) => Ok(found),
            _ => Err(Errno::IO.into()),
        }
    }

    /// Asks what may be asked twice.
    pub fn ask(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Answer> {
        self.ask_until(caller, at, ask, 0, tick() + PATIENCE)
    }

    /// Asks what is to be done once, even if this agent dies before it has the answer.
    pub fn ask_once(&self, caller: &Caller, at: At, ask: Ask) -> FsResult<Answer> {
        let request = current().map_or(0, |current| current.number);
        self.ask_until(caller, at, ask, request, tick() + PATIENCE)
    }

    fn ask_until(&self, caller: &Caller, at: At, ask: Ask, request: u64, until: Instant) -> FsResult<Answer> {
        wait_long();
        let gone = if at.by_path { NOT_OWNER } else { Errno::STALE };
        let call = Call { uid: caller.uid, gid: caller.gid, ask };
        match self.link.call(at.member, call, request, || tick() < until && !killed()) {
            Ok(Answer::Failed(errno)) => Err(Errno::from_raw_os_error(errno).into()),
            Ok(Answer::NotOwner) | Err(NoAnswer::Gone) => Err(gone.into()),
            Ok(answer) => Ok(answer),
            Err(NoAnswer::TimedOut) if killed() => Err(Errno::INTR.into()),
            Err(_) => Err(Errno::IO.into()),
        }
    }

    /// Takes back look-ups.
    pub fn forget(&self, member: u32, node: u64, count: u64) {
        let call = Call { uid: 0, gid: 0, ask: Ask::Forget(vec![(node, count)]) };
        self.link.call_without_waiting(member, call);
    }
}
