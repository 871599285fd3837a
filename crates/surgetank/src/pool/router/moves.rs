//! Renames of files between directories of two members.
//!
//! The member that makes the request leads it, whether it has one of the directories or none: the file's owner keeps the name
//! (`Depart`), the directory's owner makes the new one (`Arrive`) and has the store take it (`Settled`), and the file's owner
//! removes the old one (`Leave`). No step waits for another member, and each may be done twice.
//!
//! The danger that this avoids: a request that ends between two steps, and a file that has no name then.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use surgetank_core::namespace::NAME_TTL_MIN;
use surgetank_core::namespace::moves::{Departing, Departure, Left};
use surgetank_core::namespace::pooled::Place;
use surgetank_state::Mover;
use surgetank_store::{Cred, StorePath};
use surgetank_types::clock::tick;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Caller, FileId};

use super::super::call::{Answer, Ask, Departs, Moved, Moving};
use super::super::export::checked;
use super::serving::is_below;
use super::{Does, NOT_OWNER, PATIENCE, Router, Way, copies, delegating, lost};
use crate::mount::{Filesystem, SetAttr, current, killed, wait_long};

/// So long one question may wait for the store.
const STEP: Duration = Duration::from_millis(500);
/// So long a close may be under way.
const CLOSING: Duration = Duration::from_secs(2);
/// The pause before a step is tried again.
const PAUSE: Duration = Duration::from_millis(5);

/// A name in a directory, by the kernel's number.
type At<'a> = (u64, &'a [u8]);

/// truncate(2) of a name that the kernel takes for a file that has left. (The kernel looks the name up again.)
pub(super) fn is_it_still<F: Filesystem>(router: &Router<F>, id: u64, change: &SetAttr) -> FsResult<()> {
    let is_by_name = change.fh.is_none() && change.size_bytes.is_some();
    if is_by_name && router.namespace.moves.has_left(FileId(id)) { Err(Errno::STALE.into()) } else { Ok(()) }
}

/// Do two members own the directories?
pub(super) fn are_two(from: &Way, to: &Way) -> bool {
    match (from, to) {
        (Way::There(from), Way::There(to)) => from.member != to.member,
        (Way::There(_), _) | (_, Way::There(_)) => true,
        _ => false,
    }
}

/// Renames a file from one member's directory to another one's.
pub(super) fn rename<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    from: At<'_>,
    to: At<'_>,
    flags: RenameFlags,
) -> FsResult<()> {
    let can = flags.difference(RenameFlags::NOREPLACE).is_empty();
    if !can || !router.namespace.base.store.features().plain_files {
        return Err(Errno::XDEV.into());
    }
    wait_long();
    let (request, again) = current().map_or((0, false), |current| (current.number, current.again));
    let mover = Mover { member: router.link.member(), request, again };
    let one = Rename { router, caller, from, to, mover, has_begun: Cell::new(again), arrived: Cell::new(None) };
    one.carry_out(flags.contains(RenameFlags::NOREPLACE))
}

struct Rename<'a, F> {
    router: &'a Router<F>,
    caller: &'a Caller,
    from: At<'a>,
    to: At<'a>,
    mover: Mover,
    /// The file has waited for this request, or may have.
    has_begun: Cell<bool>,
    /// The inode of the store that has the new name, and its number there.
    arrived: Cell<Option<(u64, FileId)>>,
}

impl<F: Filesystem> Rename<'_, F> {
    fn carry_out(&self, mut noreplace: bool) -> FsResult<()> {
        let until = tick() + PATIENCE;
        let mut before: Option<Departing> = None;
        loop {
            let what = match self.depart() {
                Ok(Some(what)) => what,
                Ok(None) => {
                    // (The owner of the old name may not have waited yet until its kernel had forgotten it.)
                    let believed = self.router.namespace.base.config.store_ttl.max(NAME_TTL_MIN);
                    std::thread::sleep(believed + super::A_TICK);
                    return Ok(());
                }
                Err(fault) => {
                    before.inspect(|what| self.stay(what));
                    return Err(fault);
                }
            };
            self.has_begun.set(true);
            before = Some(what.clone());
            match self.pass(&what, noreplace) {
                // (The file was written meanwhile. What has the name now is an older version of it.)
                Ok(Left::Changed) => noreplace = false,
                Ok(Left::Gone) => return self.await_removal(&what),
                // (The file, or one that has the new name, is moving itself.)
                Err(fault) if matches!(fault.errno, Errno::STALE | Errno::BUSY) && tick() < until && !killed() => {
                    self.stay(&what);
                    std::thread::sleep(PAUSE * (1 + self.mover.member % 7));
                }
                Err(fault) => {
                    self.stay(&what);
                    return Err(fault);
                }
            }
        }
    }

    /// The file is in the store and waits. `None`: an earlier agent has renamed it.
    fn depart(&self) -> FsResult<Option<Departing>> {
        let mut open_since: Option<Instant> = None;
        loop {
            if killed() {
                return Err(Errno::INTR.into());
            }
            // (The closes of programs here, which the owner may not know yet.)
            if open_since.is_some() {
                self.deliver_closes();
            }
            match self.ask_to_depart() {
                Ok(Departure::Now(what)) => return Ok(Some(what)),
                Ok(Departure::NotYet) => open_since = None,
                Ok(Departure::IsOpen) if open_since.get_or_insert_with(tick).elapsed() >= CLOSING => {
                    return Err(Errno::XDEV.into());
                }
                Ok(Departure::IsOpen) => {}
                Err(fault) if fault.errno == Errno::NOENT && self.mover.again && self.was_done() => return Ok(None),
                Err(fault) if fault.errno == Errno::AGAIN => std::thread::sleep(PAUSE),
                Err(fault) => return Err(fault),
            }
        }
    }

    fn deliver_closes(&self) {
        self.router.namespace.files.descriptors.catch_up();
        if let Some(door) = self.router.namespace.base.door.get() {
            door.closes_are_done(STEP);
        }
        std::thread::sleep(PAUSE);
    }

    fn ask_to_depart(&self) -> FsResult<Departure> {
        let (dir, name) = self.from;
        let moves = &self.router.namespace.moves;
        let mover = self.mover();
        let here = || moves.depart(self.caller, (FileId(dir), name), mover, STEP);
        let ask = |parent| Ask::Depart { who: self.who(), parent, name: name.into(), mover: Moving::of(mover) };
        self.at(dir, here, false, ask, |answer| match answer {
            Answer::Departs(Departs::Now(moved)) => Ok(Departure::Now(departing(&moved))),
            Answer::Departs(Departs::NotYet) => Ok(Departure::NotYet),
            Answer::Departs(Departs::IsOpen) => Ok(Departure::IsOpen),
            _ => Err(Errno::PROTO.into()),
        })
    }

    /// The old name is gone. Was it an earlier agent that did this request?
    fn was_done(&self) -> bool {
        let succession = &self.router.namespace.base.succession;
        if succession.carried_out(self.mover.request).is_some() {
            return true;
        }
        // (The directory's owner answers what it has answered before. Otherwise the store has no such file.)
        let none = Departing {
            id: FileId(0),
            path: StorePath(Vec::new()),
            identity: surgetank_types::model::StoreIdentity { ino: 0, size_bytes: 0, mtime_nanos: 0, ctime_nanos: 0 },
            who: Cred { uid: 0, gid: 0 },
        };
        // (Earlier tries of that agent come first.)
        const TRIES_MAX: usize = 1000;
        for _ in 0..TRIES_MAX {
            match self.arrive(&none, false) {
                Ok(Some(_)) => return true,
                Ok(None) => {}
                Err(fault) if matches!(fault.errno, Errno::AGAIN | Errno::BUSY | Errno::STALE) => {}
                Err(_) => return false,
            }
        }
        false
    }

    fn pass(&self, what: &Departing, noreplace: bool) -> FsResult<Left> {
        let known = self.arrived.get().filter(|(ino, _)| *ino == what.identity.ino);
        let id = loop {
            if let Some((_, id)) = known {
                // (Only its attributes have changed meanwhile, and these are those of the new name.)
                break id;
            }
            match self.arrive(what, noreplace) {
                Ok(Some(id)) => break id,
                Ok(None) => {}
                Err(fault) if fault.errno == Errno::AGAIN => {}
                Err(fault) => return Err(fault),
            }
            self.go_on_waiting()?;
        };
        self.arrived.set(Some((what.identity.ino, id)));
        while !self.has_settled(id)? {
            self.go_on_waiting()?;
        }
        loop {
            match self.leave(what) {
                Err(fault) if fault.errno == Errno::AGAIN => self.go_on_waiting()?,
                left => return left,
            }
        }
    }

    /// The file's owner learns that this is still under way.
    fn go_on_waiting(&self) -> FsResult<()> {
        if killed() {
            return Err(Errno::INTR.into());
        }
        std::thread::sleep(PAUSE);
        // (Its answer changes nothing.)
        let _ = self.ask_to_depart();
        Ok(())
    }

    /// `None`: the store does not have the directory yet.
    fn arrive(&self, what: &Departing, noreplace: bool) -> FsResult<Option<FileId>> {
        let (dir, name) = self.to;
        let how = (noreplace, self.mover.request);
        let here = || {
            let arrived = self.router.namespace.moves.arrive(self.caller, (FileId(dir), name), what, how)?;
            if arrived.is_some() {
                lost::made(self.router, dir, name);
                delegating::recall(self.router, &[dir]);
            }
            Ok(arrived)
        };
        let moved = Box::new(moved(what));
        let (who, mover) = (self.who(), Moving::of(self.mover));
        let ask = |parent| Ask::Arrive { who, parent, name: name.into(), moved: moved.clone(), mover, noreplace };
        self.at(dir, here, true, ask, |answer| match answer {
            Answer::Count(id) => Ok(Some(FileId(id))),
            _ => Err(Errno::PROTO.into()),
        })
    }

    fn has_settled(&self, FileId(number): FileId) -> FsResult<bool> {
        let here = || self.router.namespace.moves.has_settled(FileId(number), STEP);
        self.is_so(self.to.0, here, |parent| Ask::Settled { parent, number })
    }

    fn leave(&self, what: &Departing) -> FsResult<Left> {
        let (dir, name) = self.from;
        let leave = || self.router.namespace.moves.leave(self.caller, (FileId(dir), name), what, self.mover);
        let here = || delegating::changing(self.router, dir, leave);
        let moved = Box::new(moved(what));
        let mover = Moving::of(self.mover);
        let ask = |parent| Ask::Leave { who: self.who(), parent, name: name.into(), moved: moved.clone(), mover };
        self.at(dir, here, true, ask, |answer| match answer {
            Answer::Done => Ok(Left::Gone),
            Answer::Changed => Ok(Left::Changed),
            _ => Err(Errno::PROTO.into()),
        })
    }

    /// The store removes the old name. (If it does not soon, that is reported where the name was, as of any removal.)
    fn await_removal(&self, what: &Departing) -> FsResult<()> {
        let until = tick() + PATIENCE;
        let FileId(number) = what.id;
        let here = || self.router.namespace.moves.is_removed(FileId(number), STEP);
        while tick() < until && !killed() {
            match self.is_so(self.from.0, here, |parent| Ask::Removed { parent, number }) {
                Ok(false) => std::thread::sleep(PAUSE),
                Ok(true) | Err(_) => break,
            }
        }
        Ok(())
    }

    fn stay(&self, what: &Departing) {
        let FileId(number) = what.id;
        let here = || {
            self.router.namespace.moves.stay(FileId(number), self.mover);
            Ok(())
        };
        let ask = |parent| Ask::Stay { parent, number, mover: Moving::of(self.mover) };
        // (One that does not learn it lets others have the file after a while.)
        let _ = self.at(self.from.0, here, false, ask, |_| Ok(()));
    }

    fn is_so(&self, dir: u64, here: impl Fn() -> FsResult<bool>, ask: impl Fn(u64) -> Ask) -> FsResult<bool> {
        let so = self.at(dir, here, false, ask, |answer| match answer {
            Answer::Done => Ok(true),
            _ => Err(Errno::PROTO.into()),
        });
        match so {
            Err(fault) if fault.errno == Errno::AGAIN => Ok(false),
            so => so,
        }
    }

    /// One step, at the member that owns the directory. `once`: it changes names.
    fn at<T>(
        &self,
        dir: u64,
        here: impl Fn() -> FsResult<T>,
        once: bool,
        ask: impl Fn(u64) -> Ask,
        answer: impl Fn(Answer) -> FsResult<T>,
    ) -> FsResult<T> {
        let router = self.router;
        let there = |at: super::remote::At| {
            let ask = ask(at.node);
            let asked = if once {
                router.remote.ask_once(self.caller, at, ask)
            } else {
                router.remote.ask(self.caller, at, ask)
            };
            answer(asked?)
        };
        router.within(self.caller, || router.way(self.caller, dir, Does::Changes), |_| here(), there)
    }

    fn mover(&self) -> Mover {
        Mover { again: self.has_begun.get(), ..self.mover }
    }

    fn who(&self) -> (u32, u32) {
        (self.caller.uid, self.caller.gid)
    }
}

fn departing(moved: &Moved) -> Departing {
    Departing {
        id: FileId(moved.number),
        path: StorePath(moved.path.to_vec()),
        identity: moved.identity,
        who: Cred { uid: moved.owner.0, gid: moved.owner.1 },
    }
}

fn moved(what: &Departing) -> Moved {
    Moved {
        number: what.id.0,
        path: what.path.0.as_slice().into(),
        identity: what.identity,
        owner: (what.who.uid, what.who.gid),
    }
}

impl Moving {
    fn of(Mover { request, again, .. }: Mover) -> Self {
        Self { request, again }
    }

    fn by(self, member: u32) -> Mover {
        Mover { member, request: self.request, again: self.again }
    }
}

/// Numbers of requests of other members have this bit. Those of the kernel and of the shim do not.
const OF_A_MEMBER: u64 = 1 << 63;
/// So many requests of other members are remembered.
const SLOTS: u64 = 512;

thread_local! {
    static NUMBERED: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// The other member's request that this thread carries out: slot and number.
pub fn numbered_request() -> Option<(u64, u64)> {
    NUMBERED.get()
}

/// The catalog records the request with what `act` changes. So the next agent knows whether this one did it.
fn numbered<T>(number: u64, act: impl FnOnce() -> T) -> T {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NUMBERED.set(Some((NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS, number)));
    let done = act();
    NUMBERED.set(None);
    done
}

/// The number of another member's request about this version of a file.
fn number_of(member: u32, request: u64, what: &Departing) -> u64 {
    // (The next agent is the same program, and gets the same number.)
    let mut hasher = DefaultHasher::new();
    (member, request, what.id.0, what.identity.ino, what.identity.mtime_nanos).hash(&mut hasher);
    hasher.finish() | OF_A_MEMBER
}

/// Another member's program renames a file to, or from, a directory here.
pub(super) fn asked<F: Filesystem>(router: &Router<F>, member: u32, ask: &Ask) -> Answer {
    let moves = &router.namespace.moves;
    let by = |(uid, gid): (u32, u32)| Caller { uid, gid, pid: 0, umask: 0 };
    match ask {
        Ask::Depart { who, parent, name, mover } => served(router, *parent, Some(name), || {
            Ok(match moves.depart(&by(*who), (FileId(*parent), name), mover.by(member), STEP)? {
                Departure::Now(what) => Answer::Departs(Departs::Now(Box::new(moved(&what)))),
                Departure::NotYet => Answer::Departs(Departs::NotYet),
                Departure::IsOpen => Answer::Departs(Departs::IsOpen),
            })
        }),
        Ask::Arrive { who, parent, name, moved, mover, noreplace } => served(router, *parent, Some(name), || {
            let what = departing(moved);
            if !is_below(&what.path) {
                return Err(Errno::NOENT.into());
            }
            let dir = FileId(*parent);
            router.namespace.pooled.is_used_by_others(dir);
            let before = router.namespace.pooled.child_of(dir, name);
            let was_known = may_be_known(router, dir, name);
            let request = number_of(member, mover.request, &what);
            let arrived = numbered(request, || moves.arrive(&by(*who), (dir, name), &what, (*noreplace, request)))?;
            let Some(FileId(id)) = arrived else { return Err(Errno::AGAIN.into()) };
            before.filter(|before| before.0 != id).inspect(|before| moves.is_gone(*before));
            delegating::recall(router, &[*parent]);
            copies::changed(router, &[before])?;
            lost::made(router, *parent, name);
            moves.await_forgotten(dir, name, was_known);
            Ok(Answer::Count(id))
        }),
        Ask::Leave { who, parent, name, moved, mover } => served(router, *parent, Some(name), || {
            let dir = FileId(*parent);
            let was_known = may_be_known(router, dir, name);
            let left = moves.leave(&by(*who), (dir, name), &departing(moved), mover.by(member))?;
            if left == Left::Changed {
                return Ok(Answer::Changed);
            }
            delegating::recall(router, &[*parent]);
            copies::changed(router, &[Some(FileId(moved.number))])?;
            moves.await_forgotten(dir, name, was_known);
            Ok(Answer::Done)
        }),
        Ask::Stay { parent, number, mover } => served(router, *parent, None, || {
            moves.stay(FileId(*number), mover.by(member));
            Ok(Answer::Done)
        }),
        Ask::Settled { parent, number } => {
            served(router, *parent, None, || done(moves.has_settled(FileId(*number), STEP)?))
        }
        Ask::Removed { parent, number } => {
            served(router, *parent, None, || done(moves.is_removed(FileId(*number), STEP)?))
        }
        _ => Answer::Failed(Errno::OPNOTSUPP.raw_os_error()),
    }
}

/// May the kernel know what the name meant before? (An earlier agent has not left its counts.)
fn may_be_known<F: Filesystem>(router: &Router<F>, dir: FileId, name: &[u8]) -> bool {
    router.link.had_earlier() || router.namespace.moves.is_known(dir, name)
}

fn done(is_done: bool) -> FsResult<Answer> {
    if is_done { Ok(Answer::Done) } else { Err(Errno::AGAIN.into()) }
}

/// As long as this member owns the directory, and neither gives it back nor leaves.
fn served<F: Filesystem>(
    router: &Router<F>,
    dir: u64,
    name: Option<&[u8]>,
    act: impl FnOnce() -> FsResult<Answer>,
) -> Answer {
    if let Some(Err(why)) = name.map(checked) {
        return Answer::Failed(why.raw_os_error());
    }
    let _work = router.works.enter();
    let goes = match router.namespace.pooled.place_of(FileId(dir)) {
        Some(Place::OfTheStore(path)) => router.gives_back(&path),
        _ => false,
    };
    let leaves = router.leaving.load(Ordering::SeqCst);
    if goes || leaves || !router.is_ours(FileId(dir)) || FileId(dir) == router.namespace.homes.directory() {
        return Answer::NotOwner;
    }
    match act() {
        Ok(answer) => answer,
        Err(fault) if fault.errno == NOT_OWNER => Answer::NotOwner,
        Err(fault) => Answer::Failed(fault.errno.raw_os_error()),
    }
}
