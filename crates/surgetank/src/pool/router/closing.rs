//! Closes that wait until other members have copies of what the program has written.
//!
//! The kernel reports each close of a descriptor, and only later the end of the open file: a duplicate or a mapping may still
//! write. So the copy is of the content at this close. When the file is sealed, the contents are compared, and the copy is
//! replaced if they differ.
//!
//! The owner of the name makes the copies. A program's member asks it, and the close waits.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_pool::calls::is_closing;
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::call::Ask;
use super::super::export::homes::WAITS;
use super::remote::Remote;
use super::{PATIENCE, Router, copies, homes, lengths};
use crate::mount::{Filesystem, Opened};

/// Open files of other members' names whose closes wait, by handle. (An agent before this one may have known others.)
#[derive(Default)]
pub(super) struct Closing(Mutex<HashSet<u64>>);

impl Closing {
    fn hold(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file whose name is here was opened: the kernel is to report its closes if they wait.
pub(super) fn opened<F: Filesystem>(router: &Router<F>, id: u64, opened: Opened) -> Opened {
    let fh = homes::at_name(opened.fh).map_or(opened.fh, |(_, handle)| handle);
    let waits = router.namespace.homes.writes(fh) && router.namespace.replicas.are_made_at_close(FileId(id));
    Opened { no_flush: opened.no_flush && !waits, ..opened }
}

/// The same of a file whose name is at another member.
pub(super) fn opened_there<F: Filesystem>(router: &Router<F>, opened: Opened, flags: OFlags, waits: bool) -> Opened {
    if !waits || flags & OFlags::ACCMODE == OFlags::RDONLY {
        return opened;
    }
    router.closing.hold().insert(opened.fh);
    Opened { no_flush: false, ..opened }
}

/// The last descriptor has ended.
pub(super) fn released<F: Filesystem>(router: &Router<F>, fh: u64) {
    if Remote::handle(fh).is_some() || homes::at_name(fh).is_some() {
        router.closing.hold().remove(&fh);
    }
}

/// The value that says to a peer where the content of a file is, and whether its closes wait.
pub(super) fn home_of<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64) -> FsResult<Vec<u8>> {
    if !router.is_of_a_peer(caller) {
        return Err(Errno::NODATA.into());
    }
    let home = router.namespace.homes.home_of(FileId(id)).map(|member| format!("{member} {id}"));
    let waits = router.namespace.replicas.are_made_at_close(FileId(id)).then_some(WAITS);
    match (home, waits) {
        (None, None) => Err(Errno::NODATA.into()),
        (home, waits) => Ok((home.unwrap_or_default() + waits.unwrap_or_default()).into_bytes()),
    }
}

/// A program closes a descriptor. Errors: EIO, as many members as are to have the file could not get it in time; it is here, and is
/// copied later.
pub(super) fn closes<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, fh: u64) -> FsResult<()> {
    match homes::at_name(fh).or_else(|| Remote::handle(fh)) {
        Some((owner, handle)) if owner != router.link.member() => {
            let may_wait = router.closing.hold().contains(&fh) || router.link.had_earlier();
            if may_wait { router.on_handle(caller, owner, Ask::Flush { handle }) } else { Ok(()) }
        }
        Some((_, handle)) => closes_name(router, caller, id, handle),
        None => closes_name(router, caller, id, fh),
    }
}

fn closes_name<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, fh: u64) -> FsResult<()> {
    let replicas = &router.namespace.replicas;
    if !router.namespace.homes.writes(fh) || !replicas.are_made_at_close(FileId(id)) {
        return Ok(());
    }
    // (The pool's process has more closes than a member's program, and is to put content back also if there is no other member.)
    if router.name_of_thread(caller).is_some_and(|name| !is_closing(&name)) {
        return Ok(());
    }
    let until = tick() + PATIENCE;
    lengths::bring(router, id, fh);
    while replicas.closes(FileId(id), copies::next_attempt(router))? {
        // (Otherwise another program has opened it for writing meanwhile.)
        if copies::copy_now(router, id, until) && replicas.sealed(FileId(id)).is_some() {
            break;
        }
        if let Err(fault) = router.pause(until) {
            if fault.errno == Errno::IO {
                tracing::warn!(number = id, "a close failed: too few members could take a copy in time");
            }
            return Err(fault);
        }
    }
    Ok(())
}
