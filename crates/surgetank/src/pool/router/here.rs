//! What is known of other members' files without a question: of files whose content programs here have open, and of directories
//! in which they have just made one.
//!
//! The danger that this avoids: something is answered that was not so any more when the program asked. So a file's attributes
//! are answered from memory only to the request that made it, and a directory's so long as its owner lets them be believed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId, Kind};

use super::super::call::{Ask, Content};
use super::Router;
use super::homes::{agent, join};
use super::names::Found;
use super::remote::{At, Remote};
use super::serving::stamp_nanos;
use crate::mount::{Attributes, Filesystem};

/// An attribute that the kernel asks for at the first write to a file.
const CAPABILITY: &[u8] = b"security.capability";
/// So many threads may have looked a file up.
const FOUND_MAX: usize = 1000;
/// With more directories than this, those leave whose time has ended.
const DIRECTORIES_MAX: usize = 1000;

/// Files of other members whose content programs here have open, by the kernel's number.
#[derive(Default)]
pub(super) struct Here {
    files: Mutex<HashMap<u64, Open>>,
    /// By thread.
    found: Mutex<HashMap<u32, Found>>,
    may_not_look: AtomicBool,
}

#[derive(Default)]
struct Open {
    handles: usize,
    /// By a program that has it still open.
    is_made: bool,
    /// The thread that makes it, and its attributes. The kernel asks for them once, as part of that request.
    making: Option<(u32, Attr)>,
}

/// The number of the file of that name's number.
fn number_of(remote: &Remote, number: u64) -> u64 {
    remote.number_of(u32::try_from(number / FILES_OF_A_MEMBER).unwrap_or(0), number)
}

impl Here {
    pub fn opened(&self, remote: &Remote, number: u64, is_made: bool) {
        let mut files = self.hold();
        let open = files.entry(number_of(remote, number)).or_default();
        open.handles += 1;
        open.is_made |= is_made;
    }

    pub fn closed(&self, id: u64) {
        let mut files = self.hold();
        if let Some(open) = files.get_mut(&id) {
            open.handles -= 1;
            if open.handles == 0 {
                files.remove(&id);
            }
        }
    }

    /// The kernel gets these attributes of a file that the caller makes.
    pub fn making(&self, id: u64, caller: &Caller, attr: Attr) {
        if let Some(open) = self.hold().get_mut(&id).filter(|open| open.is_made) {
            open.making = Some((caller.pid, attr));
        }
    }

    /// The attributes for the request that makes the file.
    pub fn made(&self, id: u64, caller: &Caller) -> Option<Attributes> {
        let mut files = self.hold();
        let open = files.get_mut(&id)?;
        let (_, attr) = open.making.take_if(|(by, _)| *by == caller.pid)?;
        Some(Attributes { attr, ttl: Duration::ZERO })
    }

    /// Does a file that was made here have no such attribute? (From its first write on the kernel believes that by itself.)
    pub fn has_not(&self, id: u64, name: &[u8]) -> bool {
        name == CAPABILITY && self.hold().get(&id).is_some_and(|open| open.is_made)
    }

    /// The thread's call has looked a file up.
    pub fn found(&self, thread: u32, found: Found) {
        let mut all = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= FOUND_MAX {
            all.clear();
        }
        all.insert(thread, found);
    }

    pub fn take_found(&self, thread: u32) -> Option<Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread)
    }

    /// The agent may not look at the calls of threads.
    pub fn is_refused(&self) {
        self.may_not_look.store(true, Ordering::Relaxed);
    }

    pub fn may_not_look(&self) -> bool {
        self.may_not_look.load(Ordering::Relaxed)
    }

    pub fn is_open(&self, id: u64) -> bool {
        self.hold().contains_key(&id)
    }

    fn hold(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The attributes of another member's file or directory.
pub(super) fn attributes<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (id, handle): (u64, Option<u64>),
    at: At,
) -> FsResult<Attributes> {
    if let Some(known) = router.remote.parents.known(at) {
        return Ok(known);
    }
    let content = router.here.is_open(id).then(|| router.namespace.homes.content_for(at.node)).flatten();
    let Some(content) = content else {
        let parents = &router.remote.parents;
        let before = parents.before();
        let known = router.attributes_there(caller, at, Ask::Attributes { node: at.node, handle })?;
        // (A claimed directory of the store: the kernel gets its name from this member, and asks each time.)
        if known.attr.kind == Kind::Directory && !known.ttl.is_zero() {
            parents.made_in((at.member, at.node), known.attr, tick() + known.ttl, before);
        }
        return Ok(known);
    };
    let mut known = router.attributes_there(caller, at, Ask::NameAttributes { node: at.node })?;
    join(&mut known.attr, &of_content(router, content)?.attr);
    Ok(known)
}

/// Content here that programs may write.
pub(super) fn of_content<F: Filesystem>(router: &Router<F>, content: FileId) -> FsResult<Content> {
    let stamp_nanos = stamp_nanos();
    let attr = router.door.getattr(&agent(), content.0, None)?.attr;
    Ok(Content { attr, stamp_nanos })
}

/// Attributes of other members' directories that came with the last file that was made in each.
#[derive(Default)]
pub(super) struct Parents {
    known: Mutex<HashMap<(u32, u64), (Attr, Instant)>>,
    /// Changes of this node's programs other than that a file was made: begun and ended.
    changes: AtomicU64,
}

impl Parents {
    /// A file is made after this.
    pub fn before(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// One was made, or the directory's attributes were asked for. `attr`: as the kernel gets them. `until`: they may be believed.
    pub fn made_in(&self, directory: (u32, u64), attr: Attr, until: Instant, before: u64) {
        let mut known = self.hold();
        if self.before() != before {
            known.remove(&directory);
            return;
        }
        if known.len() >= DIRECTORIES_MAX {
            let now = tick();
            known.retain(|_, (_, until)| *until > now);
        }
        let is_newer = |(of, _): &(Attr, Instant)| of.ctime > attr.ctime;
        if known.len() < DIRECTORIES_MAX && !known.get(&directory).is_some_and(is_newer) {
            known.insert(directory, (attr, until));
        }
    }

    /// Something changes there, or has changed: the directories are unknown.
    pub fn change(&self, directories: &[(u32, u64)]) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let mut known = self.hold();
        for directory in directories {
            known.remove(directory);
        }
    }

    fn known(&self, at: At) -> Option<Attributes> {
        let (attr, until) = self.hold().get(&(at.member, at.node)).copied()?;
        let ttl = until.saturating_duration_since(tick());
        (!ttl.is_zero()).then_some(Attributes { attr, ttl })
    }

    fn hold(&self) -> MutexGuard<'_, HashMap<(u32, u64), (Attr, Instant)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
