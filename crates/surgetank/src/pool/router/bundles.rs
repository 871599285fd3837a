//! Content of small files in directories that other members have delegated, before programs ask for it.
//!
//! A *bundle* is the content of some files of one directory. It comes with one message, and is a file in the directory of contents. A
//! program that opens one of these files for reading reads it there. So the next agent can serve what is open.
//!
//! Invariants:
//! - A file is opened here only while the delegation lasts with which its bundle came.
//! - Before a recall is answered, each open file of that directory is open at its owner, too. So after the change programs read
//!   what the owner has. If the owner does not have the file any more, no program can change it: its content is the one here.
//!
//! The danger that this avoids: a program reads what was so before a change that another program knows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use surgetank_types::clock::{tick, uptime};
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, Caller, FileId, Kind};

use super::super::call::{Answer, Ask, Call};
use super::delegated::{self, ASKING, Directory, Key, LISTED_HERE};
use super::homes::{HOME, agent};
use super::remote::{At, MARK};
use super::rights::permits;
use super::{Does, Router};
use crate::mount::request::ReleaseFlags;
use crate::mount::{Attributes, Filesystem, Opened, WriteFlags, wait_long};

/// Of handles of such files, beside the mark.
const BUNDLED: u64 = HOME | LISTED_HERE;
/// A handle is `MARK + BUNDLED + bundle * PLACES + place * COUNTS + a count`.
const PLACES: u64 = 1 << 32;
const COUNTS: u64 = 1 << 16;
/// An agent's first bundle has a number below this.
const NUMBERS: u64 = 1 << 28;
/// A larger file is read at its owner.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Files of a directory's first bundle, and of any. (Each next one has twice as many.)
const FILES: (usize, usize) = (16, 1024);
/// The content of one bundle.
const BYTES_MAX: u64 = 4 << 20;
/// The content of all bundles. With more, those leave of which no file is open.
const ALL_BYTES_MAX: u64 = 256 << 20;

/// The bundles here.
#[derive(Default)]
pub(super) struct Bundles {
    table: Mutex<Table>,
    /// Those of an earlier agent are known.
    found: OnceLock<()>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// By number: the oldest first.
    bundles: BTreeMap<u64, Arc<Bundle>>,
    bytes: u64,
    open: HashMap<u64, Open>,
    count: u64,
}

struct Bundle {
    /// With it, its files may be opened. (None: an earlier agent's.)
    directory: Weak<Directory>,
    name: String,
    file: File,
    /// Before the content.
    header_bytes: u64,
    /// All of it.
    bytes: u64,
    files: Vec<Bundled>,
}

/// A file in a bundle. Its length is that of its attributes.
#[derive(Clone, Serialize, Deserialize)]
struct Bundled {
    node: u64,
    attr: Attr,
    offset: u64,
}

/// An open file.
#[derive(Clone)]
struct Open {
    bundle: Arc<Bundle>,
    place: usize,
    key: Key,
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

impl Bundles {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn insert(&mut self, number: u64, bundle: Bundle) {
        self.bytes += bundle.bytes;
        self.bundles.insert(number, Arc::new(bundle));
    }

    /// Takes those out that are not needed: of ended delegations, and the oldest ones until there is room.
    fn unneeded(&mut self, room: u64) -> Vec<Arc<Bundle>> {
        let mut bytes = self.bytes;
        let is_open = |bundle: &Arc<Bundle>| Arc::strong_count(bundle) > 1;
        let mut gone = Vec::new();
        for (number, bundle) in &self.bundles {
            // (An earlier agent's may be open: it stays while there is room.)
            let is_over = bundle.directory.strong_count() == 0 && !bundle.is_of_earlier_agent();
            let is_full = bytes.saturating_add(room) > ALL_BYTES_MAX;
            if !is_open(bundle) && (is_over || is_full) {
                bytes -= bundle.bytes;
                gone.push(*number);
            }
        }
        self.bytes = bytes;
        gone.iter().filter_map(|number| self.bundles.remove(number)).collect()
    }
}

impl Bundle {
    fn is_of_earlier_agent(&self) -> bool {
        self.directory.ptr_eq(&Weak::new())
    }

    fn is_of(&self, directory: &Arc<Directory>) -> bool {
        std::ptr::eq(self.directory.as_ptr(), Arc::as_ptr(directory))
    }

    /// Returns the number of bytes.
    fn read(&self, place: usize, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let of = self.files.get(place).ok_or(Errno::BADF)?;
        let rest = of.attr.size_bytes.saturating_sub(offset);
        let wanted = buffer.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
        let buffer = buffer.get_mut(..wanted).unwrap_or_default();
        self.file.read_exact_at(buffer, self.header_bytes + of.offset + offset)?;
        Ok(wanted)
    }
}

/// Is it the handle of a file that was opened here?
pub(super) fn is_bundled(fh: u64) -> bool {
    fh & (MARK | BUNDLED) == MARK | BUNDLED
}

fn prefix<F: Filesystem>(router: &Router<F>) -> String {
    format!("{}.d", router.link.key())
}

fn remove<F: Filesystem>(router: &Router<F>, name: &str) {
    let _ = router.door.unlink(&agent(), router.namespace.homes.directory().0, name.as_bytes());
}

/// Looks first at what an earlier agent had.
fn table<F: Filesystem>(router: &Router<F>) -> MutexGuard<'_, Table> {
    router.bundles.found.get_or_init(|| find(router));
    router.bundles.table()
}

fn find<F: Filesystem>(router: &Router<F>) {
    let prefix = prefix(router);
    let mut table = router.bundles.table();
    // (An earlier agent's handles have other numbers, also of bundles that are gone.)
    table.next = u64::try_from(uptime().as_millis()).unwrap_or(0) % NUMBERS;
    for held in router.namespace.replicas.held(&prefix, b"") {
        let name = String::from_utf8(held.name).unwrap_or_default();
        let Some(number) = name.strip_prefix(&prefix).and_then(|digits| digits.parse::<u64>().ok()) else { continue };
        table.next = table.next.max(number + 1);
        // (A bundle of which not all has come was not used.)
        let is_known = router.link.had_earlier();
        let file = is_known.then(|| router.namespace.replicas.open(held.id)).and_then(Result::ok);
        match file.and_then(|file| Some((header(&file)?, file))) {
            Some(((header_bytes, files), file)) => {
                let bytes = header_bytes + files.iter().map(|of| of.attr.size_bytes).sum::<u64>();
                table.insert(number, Bundle { directory: Weak::new(), name, file, header_bytes, bytes, files });
            }
            None => remove(router, &name),
        }
    }
}

/// Its length, and the files.
fn header(file: &File) -> Option<(u64, Vec<Bundled>)> {
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).ok()?;
    let length = u64::from_le_bytes(length);
    let mut header = vec![0; usize::try_from(length).ok().filter(|length| *length as u64 <= BYTES_MAX)?];
    file.read_exact_at(&mut header, 8).ok()?;
    Some((8 + length, postcard::from_bytes(&header).ok()?))
}

// ---- Open files.

/// Opens a small file of a delegated directory for reading. `None`: its owner is to be asked.
pub(super) fn open<F: Filesystem>(router: &Router<F>, caller: &Caller, at: At, flags: OFlags) -> Option<Opened> {
    if flags.intersects(OFlags::ACCMODE | OFlags::TRUNC) {
        return None;
    }
    let (key, directory, index) = delegated::file_of(router, at)?;
    let attr = directory.names.get(index)?.attr.filter(|attr| is_small(Some(attr)))?;
    // (Its owner knows more of the user, as its groups.)
    if !permits(&attr, caller, 4) {
        return None;
    }
    let mut came = match directory.came.try_lock() {
        Ok(came) => came,
        // (Another thread may ask the owner.)
        Err(_) => {
            wait_long();
            directory.came.lock().unwrap_or_else(PoisonError::into_inner)
        }
    };
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
        let first = (MARK | BUNDLED) + one.bundle * PLACES + one.place as u64 * COUNTS;
        // (The owner may still have to close one of the last.)
        let mut counts = (0..COUNTS).map(|more| first + (table.count + more) % COUNTS);
        let fh = counts.find(|fh| !table.open.contains_key(fh))?;
        table.count = fh % COUNTS + 1;
        table.open.insert(fh, Open { bundle, place: one.place, key });
        fh
    };
    let keep_cache = std::mem::replace(&mut one.was_open, true);
    drop(came);
    // (A recall that came meanwhile may not have found it.)
    if !delegated::is_still(router, key, &directory) {
        table(router).open.remove(&fh);
        end_moved(router, key.0, fh, true);
        return None;
    }
    Some(Opened { fh, keep_cache, no_flush: true, ..Opened::default() })
}

/// A file is to be opened at its owner, for reading: the delegation of its directory.
pub(super) fn before_open<F: Filesystem>(router: &Router<F>, at: At, flags: OFlags) -> Option<(Key, Arc<Directory>)> {
    if flags.intersects(OFlags::ACCMODE | OFlags::TRUNC) {
        return None;
    }
    let (key, directory, index) = delegated::file_of(router, at)?;
    directory.names.get(index)?.attr.map(|_| (key, directory))
}

/// It was opened. If it was open before with the same delegation, what the kernel has of it is its content.
pub(super) fn after_open<F: Filesystem>(
    router: &Router<F>,
    at: At,
    opened: Opened,
    before: Option<(Key, Arc<Directory>)>,
) -> Opened {
    let keeps = before.is_some_and(|(key, directory)| {
        let mut came = directory.came.lock().unwrap_or_else(PoisonError::into_inner);
        let was_open = !came.opened.insert(at.node);
        drop(came);
        was_open && delegated::is_still(router, key, &directory)
    });
    Opened { keep_cache: keeps, ..opened }
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
    gone.iter().for_each(|bundle| remove(router, &bundle.name));
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
            tracing::debug!(why = %why.errno, "content of another member's files is not kept here");
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
    let number = {
        let mut table = table(router);
        table.next += 1;
        table.next - 1
    };
    let header = postcard::to_stdvec(&files).map_err(|_| Errno::INVAL)?;
    let header_bytes = 8 + header.len() as u64;
    let mut all = [&(header.len() as u64).to_le_bytes(), &*header].concat();
    parts.iter().for_each(|part| all.extend_from_slice(part));
    let name = format!("{}{number}", prefix(router));
    let (dir, flags) = (router.namespace.homes.directory().0, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL);
    let (entry, opened) = router.door.create(&agent(), dir, name.as_bytes(), 0o600, flags, false)?;
    // (No kernel knows it.)
    router.door.forget(entry.id, 1);
    let write = || -> FsResult<()> {
        let mut written = 0;
        while let Some(rest) = all.get(written..).filter(|rest| !rest.is_empty()) {
            match router.door.write(&agent(), entry.id, opened.fh, written as u64, rest, WriteFlags::default())? {
                0 => return Err(Errno::NOSPC.into()),
                count => written += count,
            }
        }
        Ok(())
    };
    let written = write();
    router.door.release(entry.id, opened.fh, ReleaseFlags::default());
    let opened = written.and_then(|()| Ok(router.namespace.replicas.open(FileId(entry.id))?));
    let file = opened.inspect_err(|_| remove(router, &name))?;
    let directory = Arc::downgrade(directory);
    Ok((number, Bundle { directory, name, file, header_bytes, bytes: all.len() as u64, files }))
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

/// All of a small file is data.
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

fn remove_unneeded<F: Filesystem>(router: &Router<F>) {
    let gone = table(router).unneeded(0);
    gone.iter().for_each(|bundle| remove(router, &bundle.name));
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
    remove_unneeded(router);
}

/// This member leaves.
pub(super) fn end<F: Filesystem>(router: &Router<F>) {
    let bundles = {
        let mut table = table(router);
        table.bytes = 0;
        std::mem::take(&mut table.bundles)
    };
    bundles.values().for_each(|bundle| remove(router, &bundle.name));
}
