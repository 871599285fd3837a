//! Files whose content is at another member than their name: the *home* ([`surgetank_core::namespace::homes`]).
//!
//! A program has such a file open at two members. The owner of the name counts who writes it. The home has the content, in one
//! plain file for all programs of the pool. The kernel's number of such an open file is that of the name's handle with a
//! second mark; at the home it is also the number of the handle there. So the next agent understands it without a table.
//!
//! Invariants:
//! - A file is opened at its name first and closed there last. So the owner never takes the content for complete while a
//!   program may write it.
//! - The length at the owner is right before the last writer's handle ends there.
//! - A member that serves content for another one waits for no member.

use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_core::namespace::pooled::FILES_OF_A_MEMBER;
use surgetank_pool::calls::{caller_of, is_opening};

use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Attr, Caller, FileId, HOMES, Kind};

use super::super::call::{Answer, Ask, Change, Home};
use super::super::export::{BY_NUMBER, OF_A_MEMBER};
use super::delegated::LISTED_HERE;
use super::lengths::{attributes_at, end_name};
use super::remote::{HANDLES, MARK};
use super::{Router, closing, copies, here, lengths, order};
use crate::mount::request::{ReleaseFlags, SetAttr};
use crate::mount::{Attributes, Entry, Filesystem, Looked, Opened};

/// Of handles of such files, beside the mark.
pub(super) const HOME: u64 = 1 << 62;

/// The kernel's number of an open file whose name's handle at the member is this.
fn number(member: u32, handle: u64) -> u64 {
    MARK | HOME | (u64::from(member) * HANDLES) | (handle % HANDLES)
}

/// The member that has the name, and the handle there. `None`: another kind of handle.
pub(super) fn at_name(fh: u64) -> Option<(u32, u64)> {
    let number = fh & !(MARK | HOME);
    (fh & MARK != 0 && fh & (HOME | LISTED_HERE) == HOME)
        .then(|| (u32::try_from(number / HANDLES).unwrap_or(0), number % HANDLES))
}

/// The agent itself.
pub(super) fn agent() -> Caller {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Caller { uid, gid, pid: 0, umask: 0 }
}

/// The member for which the caller acts.
pub(super) fn peer<F: Filesystem>(router: &Router<F>, caller: &Caller) -> Option<u32> {
    let name = router.name_of_thread(caller)?;
    caller_of(&name).map(|member| member.0)
}

/// The member for which the caller opens a file with these flags.
fn opens_for<F: Filesystem>(router: &Router<F>, caller: &Caller, flags: OFlags) -> Option<u32> {
    if flags.contains(OF_A_MEMBER) { peer(router, caller) } else { None }
}

// ---- At the owner of the name.

/// A file was made here. If another member's program made it, its content will be there.
pub(super) fn created<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    flags: OFlags,
    (entry, opened): (Entry, Opened),
) -> FsResult<(Entry, Opened)> {
    let by = opens_for(router, caller, flags);
    order::opened(router, entry.id, &opened, || by);
    copies::opened(router, entry.id, &opened)?;
    // (A number from before the pool may be another file's elsewhere.)
    let is_ours = entry.id / FILES_OF_A_MEMBER == u64::from(router.link.member());
    let is_new = by.is_some_and(|member| is_ours && router.namespace.homes.set_home(FileId(entry.id), member));
    let opened = closing::opened(router, caller, entry.id, opened_name(router, caller, entry.id, flags, opened)?);
    let is_elsewhere = is_new || router.namespace.homes.home_of(FileId(entry.id)).is_some();
    let attr_ttl = if is_elsewhere { Duration::ZERO } else { entry.attr_ttl };
    Ok((Entry { attr_ttl, ..entry }, opened))
}

/// A file of this member was opened: its content may be at another one. Errors: ESTALE, the content has gone from there since,
/// and the file is to be opened again.
pub(super) fn opened_name<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    flags: OFlags,
    opened: Opened,
) -> FsResult<Opened> {
    let homes = &router.namespace.homes;
    if homes.is_content(FileId(id)) && opened.backing.is_none() {
        // (Programs here have it under another number, so pages of this one may be old.)
        return Ok(Opened { direct_io: true, keep_cache: false, ..opened });
    }
    let Some(member) = homes.home_of(FileId(id)) else { return Ok(opened) };
    // (The plain file here is empty: no kernel may read it.)
    if opens_for(router, caller, flags).is_some() {
        return Ok(Opened { fh: opened.fh, direct_io: true, no_flush: true, ..Opened::default() });
    }
    let home = Home { member, number: id };
    let at_home = open_home(router, caller, (router.link.member(), opened.fh), home, flags);
    if at_home.is_err() {
        // (It may have been cut.)
        end_name(router, id, opened.fh, ReleaseFlags::default());
    }
    at_home
}

/// Opens a file of this member, whose content may be at another one.
pub(super) fn open_name<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    flags: OFlags,
    kill_suidgid: bool,
) -> FsResult<Opened> {
    loop {
        let opened = router.door.open(caller, id, flags, kill_suidgid)?;
        order::opened(router, id, &opened, || opens_for(router, caller, flags));
        copies::opened(router, id, &opened)?;
        match opened_name(router, caller, id, flags, opened) {
            Err(fault) if is_missing(&fault) => {
                let homes = &router.namespace.homes;
                if !homes.end_home(FileId(id)) && !copies::comes_home(router, FileId(id)) {
                    return Err(if homes.is_removed(FileId(id)) { fault } else { Errno::IO.into() });
                }
            }
            opened => return opened.map(|opened| closing::opened(router, caller, id, opened)),
        }
    }
}

/// Hints may want the content of a file of this member, wherever it is.
pub(super) fn begin<F: Filesystem>(router: &Arc<Router<F>>) {
    let weak = Arc::downgrade(router);
    router.namespace.earlier.set_reader(Box::new(move |id, take| {
        weak.upgrade().map_or_else(|| Err(Errno::IO.into()), |router| read_whole(&router, id.0, take))
    }));
}

fn read_whole<F: Filesystem>(
    router: &Router<F>,
    id: u64,
    take: &mut dyn FnMut(u64, &[u8]) -> FsResult<()>,
) -> FsResult<()> {
    const PIECE_BYTES: usize = 1 << 20;
    let caller = agent();
    let fh = open_name(router, &caller, id, OFlags::RDONLY, false)?.fh;
    let mut piece = vec![0; PIECE_BYTES];
    let mut offset = 0;
    let read = loop {
        match router.read(&caller, id, fh, offset, &mut piece) {
            Ok(0) => break Ok(()),
            Ok(count) => match take(offset, &piece[..count]) {
                Ok(()) => offset += count as u64,
                refused => break refused,
            },
            Err(fault) => break Err(fault),
        }
    };
    router.release(id, fh, ReleaseFlags::default());
    read
}

/// The answer to a look-up of a name here.
pub(super) fn known<F: Filesystem>(router: &Router<F>, caller: &Caller, looked: Looked) -> Looked {
    let Looked::Found(mut entry) = looked else { return looked };
    if entry.attr.kind == Kind::File && router.namespace.homes.home_of(FileId(entry.id)).is_some() {
        let answer = attributes(router, caller, entry.id, Attributes { attr: entry.attr, ttl: entry.attr_ttl });
        (entry.attr, entry.attr_ttl) = (answer.attr, answer.ttl);
    }
    Looked::Found(entry)
}

/// The attributes of a file of this member: while a program may write it, the home knows the size and the times.
pub(super) fn attributes<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    answer: Attributes,
) -> Attributes {
    let homes = &router.namespace.homes;
    let Some(member) = homes.home_of(FileId(id)) else { return answer };
    let opens = || router.name_of_thread(caller).is_some_and(|name| is_opening(&name));
    let mut attr = answer.attr;
    if homes.is_written(FileId(id)) {
        // (A thread that opens it, and a home that does not answer: the last ones that were seen. The kernel would take the
        // length of the empty file for the end, also for programs that read it meanwhile.)
        let asked = if opens() { None } else { attributes_at(router, member, id).ok() };
        if let Some(there) = asked.or_else(|| router.lengths.last(id)) {
            join(&mut attr, &there);
        }
        if !homes.is_written(FileId(id)) {
            router.lengths.is_known(id);
        }
    } else if let Ok(sealed) = router.door.getattr(caller, id, None) {
        // (It may have been sealed after the answer.)
        attr = sealed.attr;
    }
    Attributes { attr, ttl: Duration::ZERO }
}

pub(super) fn join(attr: &mut Attr, content: &Attr) {
    attr.size_bytes = content.size_bytes;
    attr.blocks = content.blocks;
    attr.mtime = content.mtime;
    attr.atime = content.atime;
    attr.ctime = attr.ctime.max(content.ctime);
}

/// Changes attributes of a file of this member, whose content may be at another one.
pub(super) fn set<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    change: &SetAttr,
) -> FsResult<Attributes> {
    let rest = change_home(router, caller, id, change)?;
    let SetAttr { perm, uid, gid, size_bytes, atime, mtime, kill_suidgid, .. } = rest;
    let others = perm.or(uid).or(gid).is_some() || atime.or(mtime).is_some() || kill_suidgid;
    let answer = if change.size_bytes.is_some() && size_bytes.is_none() && !others {
        router.door.getattr(caller, id, None)?
    } else {
        router.door.setattr(caller, id, &rest)?
    };
    copies::changed(router, &[Some(FileId(id))])?;
    Ok(attributes(router, caller, id, answer))
}

/// Changes size and times at the home. Returns what is to be changed here.
fn change_home<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, change: &SetAttr) -> FsResult<SetAttr> {
    let homes = &router.namespace.homes;
    let Some(member) = homes.home_of(FileId(id)) else { return Ok(*change) };
    let at = Router::<F>::at_handle(member);
    let ask = |change: Change| match router.remote.ask(&agent(), at, Ask::ChangeHome { number: id, change })? {
        Answer::Content(content) => {
            router.lengths.newest(id, content);
            Ok(())
        }
        _ => Err(Fault::from(Errno::PROTO)),
    };
    if change.size_bytes.is_some() {
        // (As a program that opens it for writing: whether it may is asked here, and its version ends with the close.)
        let handle = change.fh.map(|fh| at_name(fh).map_or(fh, |(_, handle)| handle));
        let handle = handle.filter(|fh| homes.writes(*fh));
        let opened = match handle {
            Some(_) => None,
            None => Some(router.door.open(caller, id, OFlags::WRONLY, false)?.fh),
        };
        let done = ask(Change { size_bytes: change.size_bytes, ..Change::default() });
        if let Some(fh) = opened {
            end_name(router, id, fh, ReleaseFlags::default());
        }
        done?;
    }
    let rest = SetAttr { size_bytes: None, ..*change };
    if change.atime.is_some() || change.mtime.is_some() {
        let Change { atime, mtime, .. } = Change::of(change);
        ask(Change { atime, mtime, ..Change::default() })?;
    }
    Ok(rest)
}

// ---- At any member.

/// Has the content left its home?
pub(super) fn is_missing(fault: &Fault) -> bool {
    fault.errno == Errno::STALE
}

/// Opens the content of a file whose name was opened by `(owner, handle)`. Errors: ESTALE, the home does not have it.
fn open_home<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (owner, handle): (u32, u64),
    home: Home,
    flags: OFlags,
) -> FsResult<Opened> {
    let fh = number(owner, handle);
    let missing = |fault: Fault| if fault.errno == Errno::NOENT { Errno::STALE.into() } else { fault };
    if home.member == router.link.member() {
        return open_here(router, home.number, fh, flags, false).map_err(missing);
    }
    let at = Router::<F>::at_handle(home.member);
    let ask = Ask::OpenHome { number: home.number, key: fh, flags: flags.bits() };
    let answer = router.remote.ask_once(caller, at, ask).map_err(missing);
    if answer.as_ref().is_err_and(|fault| !is_missing(fault)) {
        // (It may have been opened.)
        let _ = router.remote.ask_once(&agent(), at, Ask::CloseMoved { key: fh });
    }
    let Answer::Opened { handle, .. } = answer? else { return Err(Errno::PROTO.into()) };
    router.moved().insert(fh, (home.member, handle));
    Ok(Opened { fh, ..Router::<F>::opened_there(home.member, handle, flags) })
}

/// Opens content that this member has.
fn open_here<F: Filesystem>(
    router: &Router<F>,
    number: u64,
    fh: u64,
    flags: OFlags,
    may_make: bool,
) -> FsResult<Opened> {
    let homes = &router.namespace.homes;
    let flags = flags - (OFlags::EXCL | OFlags::CREATE);
    let known = homes.content_for(number);
    let opened = match known {
        Some(id) => router.door.open(&agent(), id.0, flags, false)?,
        None if may_make => {
            let (dir, name) = (homes.directory().0, homes.name_of(number));
            let made = router.door.create(&agent(), dir, name.as_bytes(), 0o600, flags | OFlags::CREATE, false)?;
            // (The kernel knows it by the number of its name.)
            router.door.forget(made.0.id, 1);
            made.1
        }
        None => return Err(Errno::NOENT.into()),
    };
    homes.renumber(opened.fh, fh);
    router.here.opened(&router.remote, number, known.is_none());
    // (Pages of an earlier open are not known to be of this content: it has two numbers.)
    Ok(Opened { fh, keep_cache: false, ..opened })
}

/// A file of another member was opened at its name.
pub(super) fn opened_at<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (owner, handle): (u32, u64),
    home: Home,
    flags: OFlags,
) -> FsResult<Opened> {
    let opened = open_home(router, caller, (owner, handle), home, flags);
    if opened.is_err() {
        router.close_there(owner, Ask::Close { handle });
    }
    match opened {
        Err(fault) if is_missing(&fault) => {
            let at = Router::<F>::at_handle(owner);
            match router.remote.ask(caller, at, Ask::EndHome { number: home.number }) {
                // (To be opened again.)
                Ok(Answer::Done) => Err(fault),
                // (It was removed meanwhile.)
                Err(refused) if refused.errno == Errno::STALE => Err(fault),
                _ => Err(Errno::IO.into()),
            }
        }
        opened => opened,
    }
}

/// A file in a directory of another member was made, or opened as [`opened_at`].
pub(super) fn created_at<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (owner, handle): (u32, u64),
    home: Home,
    (flags, is_empty): (OFlags, bool),
) -> FsResult<Opened> {
    if home.member != router.link.member() || !is_empty {
        return opened_at(router, caller, (owner, handle), home, flags);
    }
    let opened = open_here(router, home.number, number(owner, handle), flags, true);
    if opened.is_err() {
        router.close_there(owner, Ask::Close { handle });
    }
    opened
}

/// Where an open file of this kind is read and written: `None`, here.
pub(super) fn place<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    fh: u64,
) -> FsResult<Option<(u32, u64)>> {
    if router.namespace.homes.file_of(fh).is_some() {
        return Ok(None);
    }
    let known = router.moved().get(&fh).copied();
    if known.is_some() {
        return Ok(known);
    }
    // An earlier agent has opened it there.
    let Some(Home { member, number }) = home(router, caller, id, fh)? else { return Err(Errno::IO.into()) };
    if member == router.link.member() {
        // (It was closed here.)
        return Err(Errno::BADF.into());
    }
    let ask = Ask::OpenHome { number, key: fh, flags: OFlags::RDONLY.bits() };
    let Answer::Opened { handle, .. } = router.remote.ask(caller, Router::<F>::at_handle(member), ask)? else {
        return Err(Errno::PROTO.into());
    };
    router.moved().insert(fh, (member, handle));
    Ok(Some((member, handle)))
}

fn home<F: Filesystem>(router: &Router<F>, caller: &Caller, id: u64, fh: u64) -> FsResult<Option<Home>> {
    if at_name(fh).is_some_and(|(owner, _)| owner == router.link.member()) {
        let member = router.namespace.homes.home_of(FileId(id));
        return Ok(member.map(|member| Home { member, number: id }));
    }
    let Some(at) = router.remote.at(id) else { return Ok(None) };
    match router.remote.ask(caller, at, Ask::HomeOf { node: at.node })? {
        Answer::Home(home) => Ok(home),
        _ => Err(Errno::PROTO.into()),
    }
}

/// The file here that an open file's handle leads to.
pub(super) fn local<F: Filesystem>(router: &Router<F>, id: u64, fh: u64) -> u64 {
    let is_home = at_name(fh).is_some();
    let content = is_home.then(|| router.namespace.homes.file_of(fh)).flatten();
    content.map_or(id, |content| content.0)
}

/// Where an append lands at the earliest, if the kernel believes that this is the end. Content here has two numbers, and its
/// agents cut it without the kernel. So the kernel's length means nothing.
pub(super) fn end_at_most<F: Filesystem>(router: &Router<F>, local: u64, end: u64) -> u64 {
    if router.namespace.homes.is_content(FileId(local)) { 0 } else { end }
}

/// The program's last descriptor has ended: first at the home, then at the name.
pub(super) fn release<F: Filesystem>(router: &Router<F>, id: u64, fh: u64, flags: ReleaseFlags) {
    let Some((owner, handle)) = at_name(fh) else { return };
    let homes = &router.namespace.homes;
    let mut close = Ask::Close { handle };
    match homes.file_of(fh) {
        Some(content) => {
            let wrote = homes.writes(fh);
            router.door.release(content.0, fh, flags);
            // (Without it the owner of the name asks.)
            if let (true, Ok(content)) = (wrote, here::of_content(router, content)) {
                close = Ask::CloseWritten { handle, content };
            }
            router.here.closed(id);
        }
        None => {
            let known = router.moved().remove(&fh).map(|(member, _)| member);
            let member = known.or_else(|| home(router, &agent(), id, fh).ok().flatten().map(|home| home.member));
            // (An earlier agent may have closed it here.)
            if let Some(member) = member.filter(|member| *member != router.link.member()) {
                // (With the member its handles ended.)
                let _ = router.remote.ask_once(&agent(), Router::<F>::at_handle(member), Ask::CloseMoved { key: fh });
            }
        }
    }
    if owner == router.link.member() {
        end_name(router, id, handle, flags);
    } else {
        router.close_there(owner, close);
    }
}

/// fsync(2) of a file of this kind. If a sync here does not survive the machine, the owner of the name publishes the file.
pub(super) fn sync<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    (fh, data_only): (u64, bool),
) -> FsResult<()> {
    let Some((owner, handle)) = at_name(fh) else { return Err(Errno::BADF.into()) };
    let homes = &router.namespace.homes;
    if let Some(content) = homes.file_of(fh).filter(|_| homes.syncs_here(fh)) {
        return router.door.fsync(caller, content.0, fh, data_only);
    }
    if owner == router.link.member() {
        return lengths::sync_name(router, caller, id, (handle, data_only));
    }
    router.on_handle(caller, owner, Ask::Sync { handle, data_only })
}

/// The same after a write, if the program has opened the file so.
pub(super) fn sync_if_wanted<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    fh: u64,
    flags: u32,
) -> FsResult<()> {
    let is_synchronous = flags & (libc::O_SYNC | libc::O_DSYNC) as u32 != 0;
    if is_synchronous && at_name(fh).is_some() { sync(router, caller, id, (fh, false)) } else { Ok(()) }
}

/// A change of attributes through an open file whose content is here. Returns what is left for the owner of the name.
pub(super) fn change_here<F: Filesystem>(router: &Router<F>, change: &SetAttr) -> FsResult<SetAttr> {
    let Some(fh) = change.fh.filter(|fh| at_name(*fh).is_some()) else { return Ok(*change) };
    let content = router.namespace.homes.file_of(fh).filter(|_| change.size_bytes.is_some());
    let Some(content) = content else { return Ok(*change) };
    let size = SetAttr { size_bytes: change.size_bytes, fh: Some(fh), ..SetAttr::default() };
    router.door.setattr(&agent(), content.0, &size)?;
    Ok(SetAttr { size_bytes: None, ..*change })
}

/// The directory of contents: only the pool's process finds it.
pub(super) fn look_up_directory<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    (parent, name): (u64, &[u8]),
) -> Option<FsResult<Looked>> {
    let is_number = name.starts_with(&[BY_NUMBER]) && FileId(parent) == router.namespace.homes.directory();
    if is_number && router.is_of_a_peer(caller) {
        return Some(by_number(router, name));
    }
    if parent != FileId::ROOT.0 || name != HOMES {
        return None;
    }
    if !router.is_of_a_peer(caller) {
        return Some(Ok(Looked::Missing { ttl: Duration::ZERO }));
    }
    let looked = router.door.lookup(&agent(), parent, name);
    // (Programs would find it by what the kernel knows.)
    Some(looked.map(|looked| match looked {
        Looked::Found(entry) => Looked::Found(Entry { entry_ttl: Duration::ZERO, ..entry }),
        missing => missing,
    }))
}

/// A file of this member by its number, for a member that answers for its directory: that one's look-ups did not come here.
fn by_number<F: Filesystem>(router: &Router<F>, name: &[u8]) -> FsResult<Looked> {
    let missing = Looked::Missing { ttl: Duration::ZERO };
    let digits = std::str::from_utf8(name.get(1..).unwrap_or_default()).ok();
    let Some(id) = digits.and_then(|digits| digits.parse().ok()).map(FileId) else { return Ok(missing) };
    // (A directory has one place in the kernel.)
    let at = router.namespace.pooled.name_of(id).filter(|(kind, ..)| *kind != Kind::Directory);
    let Some((_, dir, name)) = at.filter(|(_, dir, _)| router.is_ours(*dir)) else { return Ok(missing) };
    match router.door.lookup(&agent(), dir.0, &name)? {
        Looked::Found(entry) if entry.id == id.0 => {
            let entry = Entry { entry_ttl: Duration::ZERO, attr_ttl: Duration::ZERO, ..entry };
            Ok(known(router, &agent(), Looked::Found(entry)))
        }
        Looked::Found(entry) => {
            router.door.forget(entry.id, 1);
            Ok(missing)
        }
        looked => Ok(looked),
    }
}
