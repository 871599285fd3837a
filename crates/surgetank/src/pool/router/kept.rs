//! The bundles that are here: files of the directory of contents.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use surgetank_types::clock::uptime;
use surgetank_types::error::FsResult;
use surgetank_types::model::{Attr, FileId};

use super::Router;
use super::delegated::{Directory, Key, LISTED_HERE};
use super::homes::{HOME, agent};
use super::pieces::{Brings, PIECE_BYTES, Pieces};
use super::remote::MARK;
use crate::mount::request::ReleaseFlags;
use crate::mount::{Filesystem, WriteFlags};

/// Of handles of such files, beside the mark.
pub const BUNDLED: u64 = HOME | LISTED_HERE;
/// A handle is `MARK + BUNDLED + bundle * PLACES + place * COUNTS + a count`.
pub const PLACES: u64 = 1 << 32;
pub const COUNTS: u64 = 1 << 16;
/// A larger file comes in pieces.
pub const FILE_BYTES_MAX: u64 = PIECE_BYTES;
/// The content of all bundles. With more, those leave of which no file is open.
pub const ALL_BYTES_MAX: u64 = 256 << 20;
/// The content of one bundle.
pub const BYTES_MAX: u64 = 4 << 20;
/// An agent's first bundle has a number below this.
const NUMBERS: u64 = 1 << 28;
/// The bundles here.
#[derive(Default)]
pub(super) struct Bundles {
    table: Mutex<Table>,
    /// Those of an earlier agent are known.
    found: OnceLock<()>,
    pub brings: OnceLock<Weak<dyn Brings>>,
    /// Threads that bring pieces.
    pub threads: AtomicUsize,
}

#[derive(Default)]
pub struct Table {
    pub next: u64,
    /// By number: the oldest first.
    pub bundles: BTreeMap<u64, Arc<Bundle>>,
    /// Of those with small files.
    pub bytes: u64,
    pub open: HashMap<u64, Open>,
    count: u64,
    /// Those of large files: by directory and file.
    pub large: HashMap<(Key, u64), u64>,
    /// Large files that are open at their owner, by handle.
    pub beside: HashMap<u64, (Arc<Bundle>, Key)>,
}

pub(super) struct Bundle {
    /// With it, its files may be opened. (None: an earlier agent's.)
    pub directory: Weak<Directory>,
    /// The same. (Of a large file.)
    pub key: Option<Key>,
    pub name: String,
    pub file: RwLock<Arc<File>>,
    /// The number of the file.
    pub id: u64,
    /// Before the content.
    pub header_bytes: u64,
    /// All of it.
    pub bytes: u64,
    pub files: Vec<Bundled>,
    /// What has come of a large file.
    pub pieces: Option<Pieces>,
}

/// A file in a bundle. Its length is that of its attributes.
#[derive(Clone, Serialize, Deserialize)]
pub struct Bundled {
    pub node: u64,
    pub attr: Attr,
    pub offset: u64,
}

/// An open file.
#[derive(Clone)]
pub struct Open {
    pub bundle: Arc<Bundle>,
    pub place: usize,
    pub key: Key,
}

impl Bundles {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    pub fn insert(&mut self, number: u64, bundle: Bundle) -> Arc<Bundle> {
        if !bundle.is_large() {
            self.bytes += bundle.bytes;
        }
        let bundle = Arc::new(bundle);
        self.bundles.insert(number, bundle.clone());
        bundle
    }

    /// A new handle.
    pub fn opens(&mut self, number: u64, place: usize, (bundle, key): (Arc<Bundle>, Key)) -> Option<u64> {
        let first = (MARK | BUNDLED) + number * PLACES + place as u64 * COUNTS;
        // (The owner may still have to close one of the last.)
        let mut counts = (0..COUNTS).map(|more| first + (self.count + more) % COUNTS);
        let fh = counts.find(|fh| !self.open.contains_key(fh))?;
        self.count = fh % COUNTS + 1;
        self.open.insert(fh, Open { bundle, place, key });
        Some(fh)
    }

    /// Takes those out that are not needed: of ended delegations, and the oldest ones until there is room.
    pub fn unneeded(&mut self, room: u64) -> Vec<Arc<Bundle>> {
        let mut bytes = self.bytes;
        let mut gone = Vec::new();
        for (number, bundle) in &self.bundles {
            // (An earlier agent's may be open: it stays while there is room.)
            let is_over = bundle.directory.strong_count() == 0 && !bundle.is_of_earlier_agent();
            let is_full = bytes.saturating_add(room) > ALL_BYTES_MAX && !bundle.is_large();
            if !is_open(bundle) && (is_over || is_full) {
                bytes -= if bundle.is_large() { 0 } else { bundle.bytes };
                gone.push(*number);
            }
        }
        self.bytes = bytes;
        gone.iter().filter_map(|number| self.take(*number)).collect()
    }

    pub fn take(&mut self, number: u64) -> Option<Arc<Bundle>> {
        let bundle = self.bundles.remove(&number)?;
        if let (Some(key), Some(node)) = (bundle.key, bundle.node()) {
            // (Unless another one has its place.)
            if self.large.get(&(key, node)) == Some(&number) {
                self.large.remove(&(key, node));
            }
        }
        Some(bundle)
    }

    /// Takes the oldest large file out that no program reads. (Those of an earlier agent, which may be open, are the last ones.)
    fn oldest_large(&mut self) -> Option<Arc<Bundle>> {
        let known = self.unneeded_large().find(|(_, bundle)| !bundle.is_of_earlier_agent());
        let number = known.or_else(|| self.unneeded_large().next()).map(|(number, _)| *number)?;
        self.take(number)
    }

    /// The bytes of those.
    fn large_unneeded(&self) -> u64 {
        let here =
            |bundle: &Arc<Bundle>| bundle.bytes.saturating_sub(bundle.pieces.as_ref().map_or(0, Pieces::left_bytes));
        self.unneeded_large().map(|(_, bundle)| here(bundle)).sum()
    }

    fn unneeded_large(&self) -> impl Iterator<Item = (&u64, &Arc<Bundle>)> {
        self.bundles.iter().filter(|(_, bundle)| bundle.is_large() && !is_open(bundle))
    }

    /// So many bytes are to come of files that programs read.
    pub fn coming(&self) -> u64 {
        let open = self.bundles.values().filter(|bundle| is_open(bundle));
        open.filter_map(|bundle| bundle.pieces.as_ref()).map(Pieces::left_bytes).sum()
    }
}

fn is_open(bundle: &Arc<Bundle>) -> bool {
    Arc::strong_count(bundle) > 1
}

impl Bundle {
    fn is_large(&self) -> bool {
        self.size_bytes() > FILE_BYTES_MAX
    }

    /// Of the first file.
    pub fn size_bytes(&self) -> u64 {
        self.files.first().map_or(0, |of| of.attr.size_bytes)
    }

    /// All of it is here.
    pub fn is_whole(&self) -> bool {
        self.pieces.as_ref().is_none_or(Pieces::are_whole)
    }

    pub fn node(&self) -> Option<u64> {
        self.files.first().map(|of| of.node)
    }

    /// What goes before the content.
    pub fn header(&self) -> Option<Vec<u8>> {
        header_of(&self.files).ok()
    }

    pub fn is_of_earlier_agent(&self) -> bool {
        self.directory.ptr_eq(&Weak::new())
    }

    pub fn is_of(&self, directory: &Arc<Directory>) -> bool {
        std::ptr::eq(self.directory.as_ptr(), Arc::as_ptr(directory))
    }

    /// Returns the number of bytes.
    pub fn read(&self, place: usize, offset: u64, buffer: &mut [u8]) -> FsResult<usize> {
        let of = self.files.get(place).ok_or(Errno::BADF)?;
        let rest = of.attr.size_bytes.saturating_sub(offset);
        let wanted = buffer.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
        let buffer = buffer.get_mut(..wanted).unwrap_or_default();
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner).clone();
        file.read_exact_at(buffer, self.header_bytes + of.offset + offset)?;
        Ok(wanted)
    }

    /// From now on it is read here: a write may have moved it to another tier.
    pub fn is_in(&self, file: File) {
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(file);
    }
}

fn prefix<F: Filesystem>(router: &Router<F>) -> String {
    format!("{}.d", router.link.key())
}

/// Pieces may be brought from now on.
pub(super) fn begin<F: Filesystem>(router: &Arc<Router<F>>) {
    let brings: Arc<dyn Brings> = router.clone();
    // (Set once.)
    let _ = router.bundles.brings.set(Arc::downgrade(&brings));
}

pub fn remove_all<F: Filesystem>(router: &Router<F>, bundles: &[Arc<Bundle>]) {
    for bundle in bundles {
        bundle.pieces.iter().for_each(Pieces::end);
        remove(router, &bundle.name);
    }
}

pub fn remove<F: Filesystem>(router: &Router<F>, name: &str) {
    let _ = router.door.unlink(&agent(), router.namespace.homes.directory().0, name.as_bytes());
}

/// Looks first at what an earlier agent had.
pub fn table<F: Filesystem>(router: &Router<F>) -> MutexGuard<'_, Table> {
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
                let (directory, key, pieces) = (Weak::new(), None, None);
                let (file, id) = (RwLock::new(Arc::new(file)), held.id.0);
                table.insert(number, Bundle { directory, key, name, file, id, header_bytes, bytes, files, pieces });
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

/// Large files that no program reads leave until there is room for so much more. Returns whether there is.
pub(super) fn make_room<F: Filesystem>(router: &Router<F>, bytes: u64) -> bool {
    let replicas = &router.namespace.replicas;
    let unneeded = table(router).large_unneeded();
    if !replicas.would_have_room_for(bytes, unneeded) {
        return false;
    }
    while !replicas.has_room_for(bytes) {
        let oldest = table(router).oldest_large();
        let Some(bundle) = oldest else { return false };
        remove_all(router, &[bundle]);
    }
    true
}

pub fn header_of(files: &[Bundled]) -> FsResult<Vec<u8>> {
    let header = postcard::to_stdvec(files).map_err(|_| Errno::INVAL)?;
    Ok([&(header.len() as u64).to_le_bytes(), &*header].concat())
}

/// Makes the file of a bundle that begins with these bytes: its number, and the bundle.
pub fn create<F: Filesystem>(
    router: &Router<F>,
    (directory, key): (&Arc<Directory>, Option<Key>),
    files: Vec<Bundled>,
    content: &[u8],
) -> FsResult<(u64, Bundle)> {
    let number = {
        let mut table = table(router);
        table.next += 1;
        table.next - 1
    };
    let name = format!("{}{number}", prefix(router));
    let header_bytes = header_of(&files)?.len() as u64;
    let bytes = header_bytes + files.iter().map(|of| of.attr.size_bytes).sum::<u64>();
    let (dir, flags) = (router.namespace.homes.directory().0, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL);
    let (entry, opened) = router.door.create(&agent(), dir, name.as_bytes(), 0o600, flags, false)?;
    // (No kernel knows it.)
    router.door.forget(entry.id, 1);
    let file = written(router, (entry.id, opened.fh), 0, content).inspect_err(|_| remove(router, &name))?;
    let (id, directory, file) = (entry.id, Arc::downgrade(directory), RwLock::new(Arc::new(file)));
    Ok((number, Bundle { directory, key, name, file, id, header_bytes, bytes, files, pieces: None }))
}

/// Writes into the file of a bundle, and opens it for reading.
pub fn write_at<F: Filesystem>(router: &Router<F>, id: u64, offset: u64, content: &[u8]) -> FsResult<File> {
    let opened = router.door.open(&agent(), id, OFlags::WRONLY, false)?;
    written(router, (id, opened.fh), offset, content)
}

/// Writes, closes, and opens for reading. (Between its writes it counts as closed. So it is not moved, and it is charged.)
fn written<F: Filesystem>(router: &Router<F>, (id, fh): (u64, u64), offset: u64, content: &[u8]) -> FsResult<File> {
    router.namespace.homes.ends_with_the_agent(fh);
    let write = || -> FsResult<()> {
        let mut written = 0;
        while let Some(rest) = content.get(written..).filter(|rest| !rest.is_empty()) {
            match router.door.write(&agent(), id, fh, offset + written as u64, rest, WriteFlags::default())? {
                0 => return Err(Errno::NOSPC.into()),
                count => written += count,
            }
        }
        Ok(())
    };
    let written = write();
    router.door.release(id, fh, ReleaseFlags::default());
    written.and_then(|()| Ok(router.namespace.replicas.open(FileId(id))?))
}
