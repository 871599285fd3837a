//! Content of files in directories that other members have delegated, before programs ask for it.
//!
//! A *bundle* is the content of some small files of one directory, or of one large file ([`super::pieces`]). It is a file in the
//! directory of contents. A program that opens one of these files for reading reads it there. So the next agent can serve what is
//! open.
//!
//! Invariants:
//! - A file is opened here only while the delegation lasts with which its bundle came.
//! - Before a recall is answered, each open file of that directory is open at its owner, too. So after the change programs read
//!   what the owner has. If the owner does not have the file any more, no program can change it: its content is the one here.
//!
//! The danger that this avoids: a program reads what was so before a change that another program knows.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use surgetank_types::clock::tick;
use surgetank_types::error::{Fault, FsResult};
use surgetank_types::model::{Attr, Caller, Kind};

use super::super::call::{Answer, Ask, Call};
use super::delegated::{self, ASKING, Directory, Key};
use super::homes::agent;
use super::kept::{
    ALL_BYTES_MAX, BUNDLED, BYTES_MAX, Bundle, Bundled, COUNTS, FILE_BYTES_MAX, Open, PLACES, create, header_of,
    make_room, remove_all, table,
};
use super::pieces::Pieces;
use super::remote::{At, MARK, Remote};
use super::rights::permits;
use super::{Does, Router};
use crate::mount::{Attributes, Filesystem, Opened, wait_long};

/// Files of a directory's first bundle, and of any. (Each next one has twice as many.)
const FILES: (usize, usize) = (16, 1024);

/// A file of a delegated directory.
pub(super) struct Delegated {
    key: Key,
    directory: Arc<Directory>,
    attr: Attr,
}

/// What has come of a delegated directory.
#[derive(Default)]
pub(super) struct Came {
    /// By file: its bundle and its place there. `None`: the owner does not give it.
    places: HashMap<u64, Option<Place>>,
    /// Files of the next bundle.
    next: usize,
    /// Files that were opened at their owner, for reading.
    opened: HashSet<u64>,
}

#[derive(Clone, Copy)]
struct Place {
    bundle: u64,
    place: usize,
    /// It was open with this delegation: what the kernel has of it is its content.
    was_open: bool,
}

/// Is it the handle of a file that was opened here?
pub(super) fn is_bundled(fh: u64) -> bool {
    fh & (MARK | BUNDLED) == MARK | BUNDLED
}

// ---- Open files.

/// Opens a file of a delegated directory for reading. `None`: its owner is to be asked.
pub(super) fn open<F: Filesystem>(router: &Router<F>, caller: &Caller, at: At, flags: OFlags) -> Option<Opened> {
    if flags.intersects(OFlags::ACCMODE | OFlags::TRUNC) {
        return None;
    }
    let (key, directory, index) = delegated::file_of(router, at)?;
    let attr = directory.names.get(index)?.attr.filter(|attr| attr.kind == Kind::File)?;
    // (Its owner knows more of the user, as its groups.)
    if !permits(&attr, caller, 4) {
        return None;
    }
    let is_large = !is_small(Some(&attr));
    if is_large && large(router, &directory, (key, at.node)).is_none_or(|(_, bundle)| !bundle.is_whole()) {
        return None;
    }
    let mut came = came_of(&directory);
    if is_large {
        let (number, bundle) = large(router, &directory, (key, at.node))?;
        let fh = table(router).opens(number, 0, (bundle, key))?;
        let keep_cache = !came.opened.insert(at.node);
        drop(came);
        return opened_here(router, (key, &directory), fh, keep_cache);
    }
    let bundle = match came.places.get(&at.node) {
        Some(None) => return None,
        Some(Some(one)) => table(router).bundles.get(&one.bundle).cloned(),
        None => None,
    };
    if bundle.is_none() {
        came.places.remove(&at.node);
        bring(router, key, &directory, (&mut came, index));
    }
    let one = came.places.get_mut(&at.node)?.as_mut()?;
    let fh = {
        let mut table = table(router);
        let bundle = bundle.or_else(|| table.bundles.get(&one.bundle).cloned())?;
        table.opens(one.bundle, one.place, (bundle, key))?
    };
    let keep_cache = std::mem::replace(&mut one.was_open, true);
    drop(came);
    opened_here(router, (key, &directory), fh, keep_cache)
}

fn came_of(directory: &Directory) -> MutexGuard<'_, Came> {
    directory.came.try_lock().unwrap_or_else(|_| {
        // (Another thread may ask the owner.)
        wait_long();
        directory.came.lock().unwrap_or_else(PoisonError::into_inner)
    })
}

fn opened_here<F: Filesystem>(
    router: &Router<F>,
    (key, directory): (Key, &Arc<Directory>),
    fh: u64,
    keep_cache: bool,
) -> Option<Opened> {
    // (A recall that came meanwhile may not have found it.)
    if !delegated::is_still(router, key, directory) {
        table(router).open.remove(&fh);
        end_moved(router, key.0, fh, true);
        return None;
    }
    Some(Opened { fh, keep_cache, no_flush: true, ..Opened::default() })
}

/// A file is to be opened at its owner, for reading: the delegation of its directory.
pub(super) fn before_open<F: Filesystem>(router: &Router<F>, at: At, flags: OFlags) -> Option<Delegated> {
    if flags.intersects(OFlags::ACCMODE | OFlags::TRUNC) {
        return None;
    }
    let (key, directory, index) = delegated::file_of(router, at)?;
    let attr = directory.names.get(index)?.attr?;
    Some(Delegated { key, directory, attr })
}

/// It was opened. If it was open before with the same delegation, what the kernel has of it is its content. A large file comes in
/// pieces.
pub(super) fn after_open<F: Filesystem>(
    router: &Router<F>,
    at: At,
    opened: Opened,
    before: Option<Delegated>,
) -> Opened {
    let keeps = before.is_some_and(|Delegated { key, directory, attr }| {
        let mut came = came_of(&directory);
        let was_open = !came.opened.insert(at.node);
        let is_still = delegated::is_still(router, key, &directory);
        let handle =
            Remote::handle(opened.fh).filter(|_| is_still && attr.kind == Kind::File && !is_small(Some(&attr)));
        if let Some(handle) = handle
            && let Some(bundle) = comes(router, (key, &directory), Bundled { node: at.node, attr, offset: 0 })
        {
            bundle.pieces.iter().for_each(|pieces| pieces.opened(handle, was_open));
            table(router).beside.insert(opened.fh, (bundle, key));
        }
        drop(came);
        was_open && is_still
    });
    Opened { keep_cache: keeps, ..opened }
}

/// The bundle of a large file, which has come or is to come. (The caller holds the lock of what has come of the directory.)
fn comes<F: Filesystem>(
    router: &Router<F>,
    (key, directory): (Key, &Arc<Directory>),
    of: Bundled,
) -> Option<Arc<Bundle>> {
    if let Some((number, bundle)) = large(router, directory, (key, of.node)) {
        if !bundle.pieces.as_ref().is_some_and(Pieces::are_broken) {
            return Some(bundle);
        }
        // (There may be room again.)
        let gone: Vec<_> = table(router).take(number).into_iter().collect();
        remove_all(router, &gone);
    }
    if router.leaving.load(Ordering::SeqCst) || router.left.load(Ordering::SeqCst) {
        return None;
    }
    let (node, size_bytes) = (of.node, of.attr.size_bytes);
    let coming = table(router).coming();
    if !make_room(router, size_bytes.saturating_add(coming)) {
        return None;
    }
    // (Without a header, until all has come.)
    let made = create(router, (directory, Some(key)), vec![of], &[]);
    let (number, bundle) = made.inspect_err(is_not_kept).ok()?;
    let bundle = Bundle { pieces: Some(Pieces::new(size_bytes)), ..bundle };
    let mut table = table(router);
    table.large.insert((key, node), number);
    Some(table.insert(number, bundle))
}

/// The bundle of a large file of a delegated directory, and its number.
pub(super) fn large<F: Filesystem>(
    router: &Router<F>,
    directory: &Arc<Directory>,
    (key, node): (Key, u64),
) -> Option<(u64, Arc<Bundle>)> {
    let table = table(router);
    let number = *table.large.get(&(key, node))?;
    let bundle = table.bundles.get(&number).filter(|bundle| bundle.is_of(directory))?;
    Some((number, bundle.clone()))
}

/// The bundle of a file that is open at its owner, too.
pub(super) fn beside<F: Filesystem>(router: &Router<F>, fh: u64) -> Option<(Arc<Bundle>, Key)> {
    Remote::handle(fh)?;
    table(router).beside.get(&fh).cloned()
}

/// The program's last descriptor of a file has ended that is open at its owner.
pub(super) fn closed<F: Filesystem>(router: &Router<F>, fh: u64, handle: (u32, u64)) {
    let beside = table(router).beside.remove(&fh);
    if let Some((bundle, _)) = beside {
        bundle.pieces.iter().for_each(|pieces| pieces.closed(handle));
    }
}

fn is_not_kept(why: &Fault) {
    tracing::debug!(why = %why.errno, "content of another member's files is not kept here");
}

fn is_small(attr: Option<&Attr>) -> bool {
    attr.is_some_and(|attr| attr.kind == Kind::File && attr.size_bytes <= FILE_BYTES_MAX)
}

/// Brings this file of the directory, and those after it.
fn bring<F: Filesystem>(router: &Router<F>, key: Key, directory: &Arc<Directory>, (came, index): (&mut Came, usize)) {
    let count = came.next.clamp(FILES.0, FILES.1);
    let mut bytes = 0;
    let after = directory.names.get(index..).unwrap_or_default().iter();
    let after = after.filter(|one| is_small(one.attr.as_ref()) && !came.places.contains_key(&one.node)).take(count);
    let wanted = after.take_while(|one| {
        bytes += one.attr.map_or(0, |attr| attr.size_bytes);
        bytes <= BYTES_MAX
    });
    let wanted: Vec<(u64, Attr)> = wanted.filter_map(|one| Some((one.node, one.attr?))).collect();
    let gone = table(router).unneeded(BYTES_MAX);
    remove_all(router, &gone);
    if table(router).bytes + BYTES_MAX > ALL_BYTES_MAX || !router.namespace.replicas.has_room_for(BYTES_MAX) {
        return;
    }
    let files = wanted.iter().map(|(node, _)| *node).collect();
    let ask = Ask::Contents { node: key.1, serial: directory.serial, files };
    let Some(Answer::Contents { lengths, content }) = delegated::ask(router, key.0, ask) else {
        came.places.extend(wanted.first().map(|(node, _)| (*node, None)));
        return;
    };
    came.next = count * 2;
    let (mut files, mut parts, mut offset, mut from) = (Vec::new(), Vec::new(), 0, 0);
    for ((node, attr), length) in wanted.into_iter().zip(lengths) {
        let part = length.and_then(|length| {
            let part = content.get(from..from + length as usize)?;
            from += part.len();
            Some(part)
        });
        // (What has another length was changed meanwhile.)
        let Some(part) = part.filter(|part| part.len() as u64 == attr.size_bytes) else {
            came.places.insert(node, None);
            continue;
        };
        files.push(Bundled { node, attr, offset });
        offset += attr.size_bytes;
        parts.push(part);
    }
    if files.is_empty() {
        return;
    }
    let nodes: Vec<u64> = files.iter().map(|of| of.node).collect();
    match write(router, directory, files, &parts) {
        Ok((number, bundle)) => {
            for (place, of) in bundle.files.iter().enumerate() {
                came.places.insert(of.node, Some(Place { bundle: number, place, was_open: false }));
            }
            table(router).insert(number, bundle);
        }
        Err(why) => {
            is_not_kept(&why);
            came.places.extend(nodes.into_iter().map(|node| (node, None)));
        }
    }
}

/// Makes a bundle.
fn write<F: Filesystem>(
    router: &Router<F>,
    directory: &Arc<Directory>,
    files: Vec<Bundled>,
    parts: &[&[u8]],
) -> FsResult<(u64, Bundle)> {
    let mut all = header_of(&files)?;
    parts.iter().for_each(|part| all.extend_from_slice(part));
    create(router, (directory, None), files, &all)
}

/// Reads an open file, if the delegation lasts. Otherwise its owner is to be asked first.
pub(super) fn read<F: Filesystem>(
    router: &Router<F>,
    fh: u64,
    offset: u64,
    buffer: &mut [u8],
) -> Option<FsResult<usize>> {
    let open = still(router, fh)?;
    Some(open.bundle.read(open.place, offset, buffer))
}

/// An open file whose delegation lasts.
fn still<F: Filesystem>(router: &Router<F>, fh: u64) -> Option<Open> {
    if !is_bundled(fh) {
        return None;
    }
    let open = table(router).open.get(&fh).cloned()?;
    let is_still = delegated::of(router, open.key).is_some_and(|directory| open.bundle.is_of(&directory));
    is_still.then_some(open)
}

/// The owner does not have the file any more: what is open stays as it was.
pub(super) fn read_last<F: Filesystem>(
    router: &Router<F>,
    (id, fh): (u64, u64),
    offset: u64,
    buffer: &mut [u8],
) -> FsResult<usize> {
    let (bundle, place) = opened(router, id, fh).ok_or(Errno::IO)?;
    bundle.read(place, offset, buffer)
}

/// The bundle of an open file, also of one that an earlier agent opened.
fn opened<F: Filesystem>(router: &Router<F>, id: u64, fh: u64) -> Option<(Arc<Bundle>, usize)> {
    let table = table(router);
    if let Some(open) = table.open.get(&fh) {
        return Some((open.bundle.clone(), open.place));
    }
    let number = (fh & !(MARK | BUNDLED)) / PLACES;
    let place = usize::try_from(fh % PLACES / COUNTS).ok()?;
    let bundle = table.bundles.get(&number).filter(|bundle| bundle.is_of_earlier_agent())?;
    let at = router.remote.at(id)?;
    bundle.files.get(place).filter(|of| of.node == at.node).map(|_| (bundle.clone(), place))
}

/// The attributes of a file that is open here, and that its owner does not have any more.
pub(super) fn last_attributes<F: Filesystem>(router: &Router<F>, id: u64) -> Option<Attributes> {
    let At { node, .. } = router.remote.at(id)?;
    let table = table(router);
    let in_bundle = |bundle: &Bundle| bundle.files.iter().find(|of| of.node == node).map(|of| of.attr);
    let open = table.open.values().filter_map(|open| open.bundle.files.get(open.place));
    let attr = open.filter(|of| of.node == node).map(|of| of.attr).next();
    let earlier = || {
        let mut earlier = table.bundles.values().filter(|bundle| bundle.is_of_earlier_agent());
        earlier.find_map(|bundle| in_bundle(bundle))
    };
    let attr = attr.or_else(earlier)?;
    Some(Attributes { attr: router.shown(Attr { links: 0, ..attr }), ttl: std::time::Duration::ZERO })
}

/// lseek(2) for data or a hole, as [`read`].
pub(super) fn seek<F: Filesystem>(router: &Router<F>, fh: u64, offset: u64, whence: u32) -> Option<FsResult<u64>> {
    let open = still(router, fh)?;
    Some(seek_in(&open.bundle, open.place, offset, whence))
}

/// The same, as [`read_last`].
pub(super) fn seek_last<F: Filesystem>(
    router: &Router<F>,
    (id, fh): (u64, u64),
    offset: u64,
    whence: u32,
) -> FsResult<u64> {
    let (bundle, place) = opened(router, id, fh).ok_or(Errno::IO)?;
    seek_in(&bundle, place, offset, whence)
}

/// All of a file is data.
fn seek_in(bundle: &Bundle, place: usize, offset: u64, whence: u32) -> FsResult<u64> {
    let size_bytes = bundle.files.get(place).map_or(0, |of| of.attr.size_bytes);
    match i32::try_from(whence) {
        Ok(libc::SEEK_DATA) if offset < size_bytes => Ok(offset),
        Ok(libc::SEEK_HOLE) if offset < size_bytes => Ok(size_bytes),
        Ok(libc::SEEK_DATA | libc::SEEK_HOLE) => Err(Errno::NXIO.into()),
        _ => Err(Errno::INVAL.into()),
    }
}

/// fsync(2): the content may not be in the store yet.
pub(super) fn sync<F: Filesystem>(
    router: &Router<F>,
    caller: &Caller,
    id: u64,
    (fh, data_only): (u64, bool),
) -> FsResult<()> {
    match router.handle_there(caller, id, fh, Does::Reads)? {
        Some((member, handle)) => router.on_handle(caller, member, Ask::Sync { handle, data_only }),
        None => Ok(()),
    }
}

/// The program's last descriptor has ended.
pub(super) fn release<F: Filesystem>(router: &Router<F>, id: u64, fh: u64) {
    let open = table(router).open.remove(&fh);
    match open {
        // (Or an earlier agent has opened it.)
        None => router.end_moved(id, fh),
        Some(Open { bundle, key, .. }) => {
            // (What was asked at a recall may be done later.)
            let is_still = delegated::of(router, key).is_some_and(|directory| bundle.is_of(&directory));
            end_moved(router, key.0, fh, !is_still);
            let is_over = bundle.directory.strong_count() == 0;
            drop(bundle);
            if is_over {
                remove_unneeded(router);
            }
        }
    }
}

fn end_moved<F: Filesystem>(router: &Router<F>, member: u32, fh: u64, is_perhaps: bool) {
    let moved = router.moved().remove(&fh);
    if moved.is_some() || is_perhaps {
        // (With the member its handles ended.)
        let _ = router.remote.ask_once(&agent(), Router::<F>::at_handle(member), Ask::CloseMoved { key: fh });
    }
}

/// Those of ended delegations leave.
pub(super) fn remove_unneeded<F: Filesystem>(router: &Router<F>) {
    let gone = table(router).unneeded(0);
    remove_all(router, &gone);
}

/// The owner recalls these directories, which this member does not answer for any more. Without any: all of its.
pub(super) fn recalled<F: Filesystem>(router: &Router<F>, member: u32, nodes: &[u64]) {
    let is_meant = |open: &Open| open.key.0 == member && (nodes.is_empty() || nodes.contains(&open.key.1));
    let node_of = |open: &Open| open.bundle.files.get(open.place).map(|of| of.node);
    let open: Vec<(u64, u64)> = {
        let table = table(router);
        let meant = table.open.iter().filter(|(_, open)| is_meant(open));
        meant.filter_map(|(fh, open)| Some((*fh, node_of(open)?))).collect()
    };
    let until = tick() + ASKING;
    for (fh, node) in open {
        if router.moved().contains_key(&fh) || tick() >= until {
            continue;
        }
        let (uid, gid) = (agent().uid, agent().gid);
        let call = Call { uid, gid, ask: Ask::OpenMoved { node, key: fh } };
        let answer = router.link.call(member, &call, None, &mut |_| tick() < until);
        if let Ok(Answer::Opened { handle, .. }) = answer {
            router.moved().insert(fh, (member, handle));
            // (It may have been closed meanwhile.)
            if !table(router).open.contains_key(&fh) {
                end_moved(router, member, fh, false);
            }
        }
    }
}

/// This member leaves.
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    let bundles = {
        let mut table = table(router);
        table.bytes = 0;
        table.large.clear();
        std::mem::take(&mut table.bundles)
    };
    remove_all(router, &bundles.into_values().collect::<Vec<_>>());
}
