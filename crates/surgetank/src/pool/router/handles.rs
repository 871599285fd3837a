//! Open files and directories of other members: content, locks and listings.
//!
//! A file that is opened for reading is cached by the kernel, which asks for its attributes before each read. A file that
//! is opened for writing is not.

use std::collections::HashMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Caller, FileLock, Kind, LockKind, LockRequest};

use super::super::call::{self, Answer, Ask, Listed, Lock};
use super::remote::{At, Remote};
use super::{Does, NOT_OWNER, PATIENCE, Router, Way};
use super::{bundles, closing, delegated, homes};
use crate::mount::{Filesystem, Opened, OpenedDirectory, interrupted, wait_long};

/// Bytes of one message with content.
const PIECE_BYTES: usize = 1 << 20;
/// How often a lock is asked for that another program has: at first, and at most.
const LOCK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

impl<F: Filesystem> Router<F> {
    pub(super) fn opened_there(member: u32, handle: u64, flags: OFlags) -> Opened {
        let reads = flags & OFlags::ACCMODE == OFlags::RDONLY;
        // (Only programs that read and write use locks of ranges, which end with the first close.)
        let no_flush = flags & OFlags::ACCMODE != OFlags::RDWR;
        Opened { fh: Remote::handle_number(member, handle), direct_io: !reads, no_flush, ..Opened::default() }
    }

    pub(super) fn open_there(&self, caller: &Caller, at: At, flags: OFlags) -> FsResult<Opened> {
        const TRIES: usize = 3;
        if let Some(opened) = bundles::open(self, caller, at, flags) {
            return Ok(opened);
        }
        let delegated = bundles::before_open(self, at, flags);
        for _ in 0..TRIES {
            match self.remote.ask_once(caller, at, Ask::Open { node: at.node, flags: flags.bits() })? {
                Answer::Opened { handle, waits } => {
                    let opened = Self::opened_there(at.member, handle, flags);
                    let opened = bundles::after_open(self, at, opened, delegated);
                    return Ok(closing::opened_there(self, caller, opened, flags, waits));
                }
                Answer::OpenedAt { handle, home, waits } => {
                    match homes::opened_at(self, caller, (at.member, handle), home, flags) {
                        // (The store has it by now.)
                        Err(fault) if homes::is_missing(&fault) => {}
                        opened => {
                            return opened.map(|opened| closing::opened_there(self, caller, opened, flags, waits));
                        }
                    }
                }
                _ => return Err(Errno::PROTO.into()),
            }
        }
        Err(Errno::IO.into())
    }

    /// Where an open file is: `None`, here.
    pub(super) fn there(&self, caller: &Caller, id: u64, fh: u64) -> FsResult<Option<(u32, u64)>> {
        if homes::at_name(fh).is_some() { homes::place(self, caller, id, fh) } else { Ok(Remote::handle(fh)) }
    }

    /// A request about an open file: its member cannot change.
    pub(super) fn at_handle(member: u32) -> At {
        At { member, node: 0, by_path: false }
    }

    pub(super) fn on_handle(&self, caller: &Caller, member: u32, ask: Ask) -> FsResult<()> {
        match self.remote.ask_once(caller, Self::at_handle(member), ask).map_err(gone)? {
            Answer::Done => Ok(()),
            _ => Err(Errno::PROTO.into()),
        }
    }

    pub(super) fn read_there(
        &self,
        caller: &Caller,
        member: u32,
        handle: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> FsResult<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let wanted = (buffer.len() - done).min(PIECE_BYTES);
            let ask = Ask::Read { handle, offset: offset + done as u64, bytes: wanted as u32 };
            let Answer::Bytes(bytes) = self.remote.ask(caller, Self::at_handle(member), ask).map_err(gone)? else {
                return Err(Errno::PROTO.into());
            };
            let came = bytes.len().min(wanted);
            buffer[done..done + came].copy_from_slice(&bytes[..came]);
            done += came;
            if came < wanted {
                break;
            }
        }
        Ok(done)
    }

    pub(super) fn write_there(
        &self,
        caller: &Caller,
        member: u32,
        handle: u64,
        (offset, at_end): (u64, bool),
        bytes: &[u8],
    ) -> FsResult<usize> {
        // (The kernel sends no more than one piece; a request that is done once is one call.)
        let piece = &bytes[..bytes.len().min(PIECE_BYTES)];
        let ask = Ask::Write { handle, offset, at_end, content: piece.to_vec() };
        match self.remote.ask_once(caller, Self::at_handle(member), ask).map_err(gone)? {
            Answer::Count(count) => Ok(usize::try_from(count).map_or(piece.len(), |count| count.min(piece.len()))),
            _ => Err(Errno::PROTO.into()),
        }
    }

    pub(super) fn seek_there(
        &self,
        caller: &Caller,
        member: u32,
        handle: u64,
        offset: u64,
        whence: u32,
    ) -> FsResult<u64> {
        let ask = Ask::Seek { handle, offset, whence };
        match self.remote.ask(caller, Self::at_handle(member), ask).map_err(gone)? {
            Answer::Count(at) => Ok(at),
            _ => Err(Errno::PROTO.into()),
        }
    }

    /// The program's close returned before this. The kernel asks the next agent if this one dies first.
    pub(super) fn close_there(&self, member: u32, close: Ask) {
        let caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0 };
        match self.remote.ask_once(&caller, Self::at_handle(member), close.clone()) {
            // (With the member its handles ended.)
            Err(fault) if fault.errno != Errno::STALE && fault.errno != Errno::BADF => {
                tracing::warn!(member, ?close, why = %fault.errno, "a file stays open at another member");
            }
            _ => {}
        }
    }

    /// Where an open file is read and locked now: `None`, here. A file of the store that was opened for reading moves
    /// to the member that claims its directory.
    pub(super) fn handle_there(&self, caller: &Caller, id: u64, fh: u64, does: Does) -> FsResult<Option<(u32, u64)>> {
        let until = tick() + PATIENCE;
        loop {
            match self.moved_there(caller, id, fh, does) {
                Err(fault) if fault.errno == NOT_OWNER && !self.is_of_a_peer(caller) => self.pause(until)?,
                there => return there,
            }
        }
    }

    fn moved_there(&self, caller: &Caller, id: u64, fh: u64, does: Does) -> FsResult<Option<(u32, u64)>> {
        if homes::at_name(fh).is_some() {
            return homes::place(self, caller, id, fh);
        }
        if let Some(known) = self.known_there(fh) {
            return Ok(Some(known));
        }
        let at = match self.way_of(caller, id, does) {
            Ok(Way::There(at)) => at,
            Ok(Way::Here | Way::Store(_)) => return Ok(None),
            // It has been removed, or replaced: what is open stays as it was.
            Err(fault) if fault.errno == Errno::STALE || fault.errno == Errno::NOENT => return Ok(None),
            Err(fault) => return Err(fault),
        };
        let ask = Ask::OpenMoved { node: at.node, key: fh };
        let is_bundled = bundles::is_bundled(fh);
        // (Whether its program may read it was decided when it was opened.)
        let caller = if is_bundled { &homes::agent() } else { caller };
        let handle = match self.remote.ask(caller, at, ask) {
            Ok(Answer::Opened { handle, .. }) => handle,
            Ok(_) => return Err(Errno::PROTO.into()),
            // (The owner did not know that it is open. What a lost member had another one may have changed since.)
            Err(fault) if is_bundled && fault.errno == Errno::STALE => {
                return if self.remote.has_left(id) { Err(Errno::IO.into()) } else { Ok(None) };
            }
            Err(fault) => return Err(fault),
        };
        self.moved().insert(fh, (at.member, handle));
        Ok(Some((at.member, handle)))
    }

    /// As far as is known without a question.
    pub(super) fn known_there(&self, fh: u64) -> Option<(u32, u64)> {
        Remote::handle(fh).or_else(|| self.moved().get(&fh).copied())
    }

    /// The program's last descriptor of a file here has ended: if it was moved, the other member closes it. (An earlier
    /// agent may have moved it.)
    pub(super) fn end_moved(&self, id: u64, fh: u64) {
        let caller = Caller { uid: 0, gid: 0, pid: 0, umask: 0 };
        let known = self.moved().remove(&fh).map(|(member, _)| Self::at_handle(member));
        let at = known.or_else(|| match self.link.had_earlier().then(|| self.way_of(&caller, id, Does::Looks)) {
            Some(Ok(Way::There(at))) => Some(at),
            _ => None,
        });
        if let Some(at) = at {
            // (With the member its handles ended.)
            let _ = self.remote.ask_once(&caller, at, Ask::CloseMoved { key: fh });
        }
    }

    pub(super) fn moved(&self) -> MutexGuard<'_, HashMap<u64, (u32, u64)>> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opendir_there(&self, caller: &Caller, at: At) -> FsResult<OpenedDirectory> {
        delegated::answered(self, at, None);
        if let Some(opened) = delegated::opendir(self, caller, at) {
            return Ok(opened);
        }
        self.open_directory_there(caller, at)
    }

    pub(super) fn open_directory_there(&self, caller: &Caller, at: At) -> FsResult<OpenedDirectory> {
        match self.remote.ask_once(caller, at, Ask::OpenDirectory { node: at.node })? {
            Answer::Opened { handle, .. } => {
                Ok(OpenedDirectory { fh: Remote::handle_number(at.member, handle), ..OpenedDirectory::default() })
            }
            _ => Err(Errno::PROTO.into()),
        }
    }

    /// Adds lines from `offset` until `add` says that no more fit.
    pub(super) fn list_there(
        &self,
        caller: &Caller,
        id: u64,
        fh: u64,
        offset: u64,
        mut add: impl FnMut(u64, u64, Kind, &[u8]) -> bool,
    ) -> FsResult<()> {
        let names = self.names_there(caller, id, fh, offset)?;
        let dots: [&[u8]; 2] = [b".", b".."];
        for (next, name) in (1..).zip(dots) {
            if offset < next && add(id, next, Kind::Directory, name) {
                return Ok(());
            }
        }
        let start = usize::try_from(offset.saturating_sub(2)).unwrap_or(usize::MAX);
        for (next, Listed { ino, kind, name }) in (3..).zip(names.iter()).skip(start) {
            if add(*ino, next, *kind, name) {
                break;
            }
        }
        Ok(())
    }

    /// All names of the directory, as they were when it was read from its beginning.
    fn names_there(&self, caller: &Caller, id: u64, fh: u64, offset: u64) -> FsResult<std::sync::Arc<Vec<Listed>>> {
        let known = self.listings.lock().unwrap_or_else(PoisonError::into_inner).get(&fh).cloned();
        if let Some(names) = known.as_ref().filter(|_| offset > 0) {
            return Ok(names.clone());
        }
        let is_here = delegated::is_listed_here(fh);
        let names = if is_here { delegated::names(self, caller, id) } else { self.listed_there(caller, fh) };
        // (An open directory stays readable, also if its mode has changed.)
        let names = match (names, known) {
            (Err(_), Some(known)) if is_here => return Ok(known),
            (names, _) => names?,
        };
        let names = std::sync::Arc::new(names);
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).insert(fh, names.clone());
        Ok(names)
    }

    /// From the beginning.
    pub(super) fn listed_there(&self, caller: &Caller, fh: u64) -> FsResult<Vec<Listed>> {
        let (member, handle) = Remote::handle(fh).ok_or(Errno::BADF)?;
        let mut names = Vec::new();
        let mut from_the_beginning = true;
        loop {
            let ask = Ask::List { handle, from_the_beginning };
            let Answer::Names(more) = self.remote.ask(caller, Self::at_handle(member), ask).map_err(gone)? else {
                return Err(Errno::PROTO.into());
            };
            if more.is_empty() {
                break;
            }
            names.extend(more);
            from_the_beginning = false;
        }
        Ok(names)
    }

    pub(super) fn end_listing(&self, fh: u64) {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner).remove(&fh);
    }

    fn lock_of(asked: &LockRequest) -> Lock {
        let kind = match asked.lock.kind {
            LockKind::Shared => call::LockKind::Shared,
            LockKind::Exclusive => call::LockKind::Exclusive,
            LockKind::None => call::LockKind::None,
        };
        Lock { owner: asked.owner, flock: asked.flock, kind, first: asked.lock.first, last: asked.lock.last }
    }

    pub(super) fn test_lock_there(
        &self,
        caller: &Caller,
        member: u32,
        handle: u64,
        asked: &LockRequest,
    ) -> FsResult<FileLock> {
        let ask = Ask::TestLock { handle, lock: Self::lock_of(asked) };
        let Answer::Lock(lock) = self.remote.ask(caller, Self::at_handle(member), ask).map_err(gone)? else {
            return Err(Errno::PROTO.into());
        };
        let kind = match lock.kind {
            call::LockKind::Shared => LockKind::Shared,
            call::LockKind::Exclusive => LockKind::Exclusive,
            call::LockKind::None => LockKind::None,
        };
        // (Processes of other nodes have no number here.)
        Ok(FileLock { kind, first: lock.first, last: lock.last, pid: 0 })
    }

    /// Asks again and again: a member does not wait for programs of another one.
    pub(super) fn lock_there(
        &self,
        caller: &Caller,
        member: u32,
        handle: u64,
        asked: &LockRequest,
        wait: bool,
    ) -> FsResult<()> {
        let mut pause = LOCK_AGAIN.0;
        loop {
            let ask = Ask::Lock { handle, lock: Self::lock_of(asked) };
            match self.remote.ask(caller, Self::at_handle(member), ask).map_err(gone) {
                Ok(Answer::Done) => return Ok(()),
                Ok(_) => return Err(Errno::PROTO.into()),
                Err(fault) if fault.errno == Errno::AGAIN && wait => {}
                Err(fault) => return Err(fault),
            }
            wait_long();
            if interrupted() {
                return Err(Errno::INTR.into());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOCK_AGAIN.1);
        }
    }
}

/// The member that has the open file is gone: what was not in the store is lost.
fn gone(fault: Fault) -> Fault {
    if fault.errno == Errno::STALE { Errno::IO.into() } else { fault }
}
