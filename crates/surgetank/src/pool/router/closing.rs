//! Closes that wait until other members have copies of what the program has written.
//!
//! The kernel reports each close of a descriptor, and only later the end of the open file: a duplicate or a mapping may still
//! write. So the copy is of the content at this close. When the file is sealed, the contents are compared, and the copy is
//! replaced if they differ.
//!
//! The owner of the name makes the copies. A program's member asks it, and the close waits.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_core::namespace::{Dispatcher, SEAL_TIMEOUT, STILL_WRITTEN};
use surgetank_pool::calls::{caller_of, is_closing, is_opening};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::call::{Answer, Ask};
use super::super::export::OF_A_MEMBER;
use super::super::export::homes::WAITS;
use super::remote::Remote;
use super::{PATIENCE, Router, copies, homes, lengths};
use crate::mount::{Filesystem, Opened, interrupted, killed_at_close, wait_long};

/// Open files by handle. `None`: their closes do not wait. Otherwise the process that has opened the file; 0: not known. (Files that
/// an earlier agent has opened are not here.)
#[derive(Default)]
pub(super) struct Closing(Mutex<HashMap<u64, Option<u32>>>);

impl Closing {
    fn hold(&self) -> MutexGuard<'_, HashMap<u64, Option<u32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a file when no program writes it any more, if its hints say so. Another member asks again itself. What a member opens for no
/// program, such as content that it has had until now, is not asked of hints. Errors: EBUSY, it is still written; EINTR.
pub(super) fn once_sealed<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    flags: OFlags,
    open: impl Fn() -> FsResult<Opened>,
) -> FsResult<Opened> {
    const LOOK_EVERY: Duration = Duration::from_millis(50);
    let of_member = || router.name_of_thread(caller).filter(|name| caller_of(name).is_some());
    if flags.contains(OF_A_MEMBER) && of_member().is_some_and(|name| !is_opening(&name)) {
        return Dispatcher::unasked(open);
    }
    let until = tick() + SEAL_TIMEOUT;
    loop {
        let opened = open();
        let waits = opened.as_ref().is_err_and(|fault| fault.errno == STILL_WRITTEN);
        if !waits || router.is_of_a_peer(caller) {
            return opened;
        }
        wait_long();
        if interrupted() {
            return Err(Errno::INTR.into());
        }
        if tick() >= until {
            return Err(Errno::BUSY.into());
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// The process of a thread. 0: it cannot be seen from here, as in another container.
fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok()).unwrap_or(0)
}

/// A file whose name is here was opened: the kernel is to report its closes if they wait.
pub(super) fn opened<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, opened: Opened) -> Opened {
    let fh = homes::at_name(opened.fh).map_or(opened.fh, |(_, handle)| handle);
    let waits = router.namespace.homes.writes(fh) && router.namespace.replicas.are_made_at_close(FileId(id));
    keep(router, caller, opened, waits)
}

/// The same of a file whose name is at another member.
pub(super) fn opened_there<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    opened: Opened,
    flags: OFlags,
    waits: bool,
) -> Opened {
    if flags & OFlags::ACCMODE == OFlags::RDONLY { opened } else { keep(router, caller, opened, waits) }
}

fn keep<F: Filesystem>(router: &Router<F>, caller: &Caller, opened: Opened, waits: bool) -> Opened {
    if waits || router.link.had_earlier() {
        router.closing.hold().insert(opened.fh, waits.then(|| process_of(caller.pid)));
    }
    Opened { no_flush: opened.no_flush && !waits, ..opened }
}

/// The last descriptor has ended.
pub(super) fn released<F: Filesystem>(router: &Router<F>, fh: u64) {
    router.closing.hold().remove(&fh);
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
    let known = router.closing.hold().get(&fh).copied();
    // A child has duplicates of all descriptors, and closes them when it ends, or starts another program: that says nothing.
    let waits = match known {
        None => router.link.had_earlier(),
        Some(None) => false,
        Some(Some(0)) => true,
        Some(Some(process)) => [0, process].contains(&process_of(caller.pid)),
    };
    if !waits {
        return Ok(());
    }
    match homes::at_name(fh).or_else(|| Remote::handle(fh)) {
        Some((owner, handle)) if owner != router.link.member() => {
            let at = Router::<F>::at_handle(owner);
            match router.remote.ask_unless(caller, at, Ask::Flush { handle }, &killed_at_close) {
                Ok(Answer::Done) => Ok(()),
                Ok(_) => Err(Errno::PROTO.into()),
                Err(fault) if fault.errno == Errno::DEADLK => Err(Errno::INTR.into()),
                Err(fault) if fault.errno == Errno::STALE => Err(Errno::IO.into()),
                Err(fault) => Err(fault),
            }
        }
        Some((_, handle)) => closes_name(router, caller, id, handle),
        None => closes_name(router, caller, id, fh),
    }
}

fn closes_name<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, fh: u64) -> FsResult<()> {
    if !router.namespace.homes.writes(fh) || !router.namespace.replicas.are_made_at_close(FileId(id)) {
        return Ok(());
    }
    // (The pool's process has more closes than a member's program, and is to put content back also if there is no other member.)
    if router.name_of_thread(caller).is_some_and(|name| !is_closing(&name)) {
        return Ok(());
    }
    let until = tick() + PATIENCE;
    loop {
        if lengths::bring(router, id, fh, true) && copies::copy_closed(router, id, until)? {
            return Ok(());
        }
        if killed_at_close() {
            return Err(Errno::INTR.into());
        }
        if let Err(fault) = router.pause(until) {
            if fault.errno == Errno::IO {
                tracing::warn!(number = id, "a close failed: too few members could take a copy in time");
            }
            return Err(fault);
        }
    }
}
