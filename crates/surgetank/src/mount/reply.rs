//! Answers to the kernel: the shapes in which the file system gives them, and their encoding in buffers that each thread
//! reuses.

use std::collections::BTreeSet;
use std::io::IoSlice;
use std::time::Duration;

use rustix::fs::{major, minor};
use surgetank_types::model::{Attr, FileLock, Kind, LockKind};

use super::abi::{self, fopen};
use super::backing::BackingId;

/// The longest validity sent to the kernel, which counts in jiffies.
const TTL_SECS_MAX: u64 = u32::MAX as u64;
/// Bytes of one directory entry before its name, and of the attributes that READDIRPLUS puts before it.
const DIRENT_BYTES: usize = 24;
const ENTRY_BYTES: usize = 128;

/// A name that was found or created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The kernel's name for the file: its node.
    pub id: u64,
    /// Distinguishes two files that got the same `id` one after the other. 0 if ids are never reused.
    pub generation: u64,
    /// The attributes of the file.
    pub attr: Attr,
    /// How long the kernel may cache the name.
    pub entry_ttl: Duration,
    /// How long the kernel may cache the attributes.
    pub attr_ttl: Duration,
}

/// Answer to a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Looked {
    /// The name exists.
    Found(Entry),
    /// No such name exists; with a `ttl` above zero the kernel caches that.
    Missing {
        /// How long the kernel may cache the absence.
        ttl: Duration,
    },
}

/// Answer to getattr and setattr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// The attributes of the file.
    pub attr: Attr,
    /// How long the kernel may cache them.
    pub ttl: Duration,
}

/// An open file. Fields that are not set are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// The kernel returns it with every operation on the open file.
    pub fh: u64,
    /// The kernel reads, writes and maps this file itself. All opens of one node must agree (EIO otherwise).
    pub backing: Option<BackingId>,
    /// Reads and writes come to the file system each time, past the page cache.
    pub direct_io: bool,
    /// Cached pages from before this open stay valid.
    pub keep_cache: bool,
    /// The file has no position: lseek fails.
    pub nonseekable: bool,
    /// `close` sends no request; saves one round trip per close.
    pub no_flush: bool,
    /// With `direct_io`: writers of one file need not wait for each other.
    pub parallel_writes: bool,
}

/// An open directory. Fields that are not set are off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenedDirectory {
    /// The kernel returns it with every operation on the open directory.
    pub fh: u64,
    /// The kernel caches the listing…
    pub cache: bool,
    /// …and this open may use the cached one.
    pub keep_cache: bool,
}

/// Answer to statfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceReport {
    /// The preferred size of a transfer, in bytes.
    pub block_bytes: u32,
    /// The unit of the block counts, in bytes.
    pub fragment_bytes: u32,
    /// The size of the file system, in fragments.
    pub blocks: u64,
    /// The free fragments.
    pub blocks_free: u64,
    /// The free fragments that ordinary users may take.
    pub blocks_available: u64,
    /// The number of inodes.
    pub files: u64,
    /// The free inodes.
    pub files_free: u64,
    /// The longest name, in bytes.
    pub name_bytes_max: u32,
}

/// One answer under construction: fields, or bulk bytes (file contents, listings), never both.
#[derive(Default)]
pub(crate) struct Reply {
    fields: Vec<u8>,
    /// As large as the largest bulk answer so far; only the first `bulk_used` bytes are the answer.
    bulk: Vec<u8>,
    bulk_used: usize,
}

impl Reply {
    pub(crate) fn clear(&mut self) {
        self.fields.clear();
        self.bulk_used = 0;
    }

    pub(crate) fn body(&self) -> &[u8] {
        if self.bulk_used > 0 { &self.bulk[..self.bulk_used] } else { &self.fields }
    }

    /// Room for a bulk answer of at most `size` bytes; [`Reply::use_bulk`] sets the number that were used.
    pub(crate) fn bulk(&mut self, size: usize) -> &mut [u8] {
        if self.bulk.len() < size {
            // A fresh zeroed allocation costs no memory until it is touched, unlike growing the old one.
            self.bulk = vec![0; size.next_power_of_two()];
        }
        &mut self.bulk[..size]
    }

    pub(crate) fn use_bulk(&mut self, used: usize) {
        self.bulk_used = used;
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.fields.extend_from_slice(bytes);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_ne_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_ne_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_ne_bytes());
    }

    pub(crate) fn looked(&mut self, looked: &Looked) {
        match looked {
            Looked::Found(entry) => self.entry(entry),
            Looked::Missing { ttl } => {
                let (secs, nanos) = validity(*ttl);
                self.u64(0);
                self.u64(0);
                self.u64(secs);
                self.u64(0);
                self.u32(nanos);
                self.u32(0);
                self.bytes(&[0; 88]);
            }
        }
    }

    pub(crate) fn entry(&mut self, entry: &Entry) {
        self.bytes(&entry_bytes(entry));
    }

    pub(crate) fn attributes(&mut self, attributes: &Attributes) {
        let (secs, nanos) = validity(attributes.ttl);
        self.u64(secs);
        self.u32(nanos);
        self.u32(0);
        self.bytes(&attr_bytes(&attributes.attr));
    }

    pub(crate) fn opened(&mut self, opened: &Opened) {
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let flags = flag(opened.direct_io, fopen::DIRECT_IO)
            | flag(opened.keep_cache, fopen::KEEP_CACHE)
            | flag(opened.nonseekable, fopen::NONSEEKABLE)
            | flag(opened.no_flush, fopen::NOFLUSH)
            | flag(opened.parallel_writes, fopen::PARALLEL_DIRECT_WRITES)
            | flag(opened.backing.is_some(), fopen::PASSTHROUGH);
        self.u64(opened.fh);
        self.u32(flags);
        self.u32(opened.backing.map_or(0, BackingId::raw));
    }

    pub(crate) fn opened_directory(&mut self, opened: &OpenedDirectory) {
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        self.u64(opened.fh);
        self.u32(flag(opened.cache, fopen::CACHE_DIR) | flag(opened.keep_cache, fopen::KEEP_CACHE));
        self.u32(0);
    }

    pub(crate) fn lock(&mut self, lock: &FileLock) {
        let kind = match lock.kind {
            LockKind::Shared => libc::F_RDLCK,
            LockKind::Exclusive => libc::F_WRLCK,
            LockKind::None => libc::F_UNLCK,
        };
        self.u64(lock.first);
        self.u64(lock.last);
        self.u32(kind as u32);
        self.u32(lock.pid);
    }

    pub(crate) fn space(&mut self, space: &SpaceReport) {
        self.u64(space.blocks);
        self.u64(space.blocks_free);
        self.u64(space.blocks_available);
        self.u64(space.files);
        self.u64(space.files_free);
        self.u32(space.block_bytes);
        self.u32(space.name_bytes_max);
        self.u32(space.fragment_bytes);
        self.bytes(&[0; 28]);
    }
}

/// The header of an answer. `error` is 0 or a positive errno.
pub(crate) fn header(unique: u64, error: i32, body_bytes: usize) -> [u8; abi::OUT_HEADER_BYTES] {
    let mut header = [0; abi::OUT_HEADER_BYTES];
    let bytes = u32::try_from(abi::OUT_HEADER_BYTES + body_bytes).unwrap_or(u32::MAX);
    header[0..4].copy_from_slice(&bytes.to_ne_bytes());
    header[4..8].copy_from_slice(&(-error).to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// Header and body as one message.
pub(crate) fn slices<'a>(header: &'a [u8], body: &'a [u8]) -> [IoSlice<'a>; 2] {
    [IoSlice::new(header), IoSlice::new(body)]
}

fn validity(ttl: Duration) -> (u64, u32) {
    if ttl.as_secs() >= TTL_SECS_MAX { (TTL_SECS_MAX, 0) } else { (ttl.as_secs(), ttl.subsec_nanos()) }
}

/// Writes fields one after another into a fixed array; the caller must choose its size correctly.
struct Pen<'a> {
    page: &'a mut [u8],
    at: usize,
}

impl Pen<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.page[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

fn attr_bytes(attr: &Attr) -> [u8; 88] {
    let mut page = [0; 88];
    let mut pen = Pen { page: &mut page, at: 0 };
    let times = [attr.atime, attr.mtime, attr.ctime];
    for value in [attr.ino, attr.size_bytes, attr.blocks] {
        pen.put(&value.to_ne_bytes());
    }
    for time in times {
        pen.put(&time.secs().to_ne_bytes());
    }
    for time in times {
        pen.put(&time.subsec_nanos().to_ne_bytes());
    }
    let block_bytes = abi::PAGE_BYTES as u32;
    let device = device_to_wire(attr.device);
    for value in [attr.mode(), attr.links, attr.uid, attr.gid, device, block_bytes, 0] {
        pen.put(&value.to_ne_bytes());
    }
    page
}

fn entry_bytes(entry: &Entry) -> [u8; ENTRY_BYTES] {
    let mut page = [0; ENTRY_BYTES];
    let mut pen = Pen { page: &mut page, at: 0 };
    let (entry_secs, entry_nanos) = validity(entry.entry_ttl);
    let (attr_secs, attr_nanos) = validity(entry.attr_ttl);
    for value in [entry.id, entry.generation, entry_secs, attr_secs] {
        pen.put(&value.to_ne_bytes());
    }
    pen.put(&entry_nanos.to_ne_bytes());
    pen.put(&attr_nanos.to_ne_bytes());
    pen.put(&attr_bytes(&entry.attr));
    page
}

fn device_to_wire(device: u64) -> u32 {
    let (major, minor) = (major(device), minor(device));
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12)
}

/// Takes the entries of one READDIR answer.
pub struct DirectorySink<'a> {
    page: &'a mut [u8],
    used: usize,
    left_out: Option<BTreeSet<Box<[u8]>>>,
}

impl<'a> DirectorySink<'a> {
    pub(crate) fn new(page: &'a mut [u8]) -> Self {
        Self { page, used: 0, left_out: None }
    }

    /// These names are not listed.
    pub fn leave_out(&mut self, names: Option<BTreeSet<Box<[u8]>>>) {
        self.left_out = names;
    }

    /// `next_offset` is where a listing continues after this entry. `true` means full: the entry was not taken, stop.
    pub fn add(&mut self, ino: u64, next_offset: u64, kind: Kind, name: &[u8]) -> bool {
        if self.left_out.as_ref().is_some_and(|names| kind != Kind::Directory && names.contains(name)) {
            return false;
        }
        self.append(&[], ino, next_offset, kind, name)
    }

    pub(crate) fn used(&self) -> usize {
        self.used
    }

    fn fits(&self, prefix_bytes: usize, name: &[u8]) -> bool {
        self.used + (prefix_bytes + DIRENT_BYTES + name.len()).next_multiple_of(8) <= self.page.len()
    }

    fn append(&mut self, prefix: &[u8], ino: u64, next_offset: u64, kind: Kind, name: &[u8]) -> bool {
        let bytes = (prefix.len() + DIRENT_BYTES + name.len()).next_multiple_of(8);
        let Some(page) = self.page.get_mut(self.used..self.used + bytes) else {
            return true;
        };
        let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let mut pen = Pen { page, at: 0 };
        pen.put(prefix);
        pen.put(&ino.to_ne_bytes());
        pen.put(&next_offset.to_ne_bytes());
        pen.put(&name_bytes.to_ne_bytes());
        pen.put(&kind.dirent_type().to_ne_bytes());
        pen.put(name);
        let end = pen.at;
        page[end..].fill(0);
        self.used += bytes;
        false
    }
}

/// Takes the entries of one READDIRPLUS answer: each with its look-up.
pub struct DirectoryPlusSink<'a> {
    plain: DirectorySink<'a>,
}

impl<'a> DirectoryPlusSink<'a> {
    pub(crate) fn new(page: &'a mut [u8]) -> Self {
        Self { plain: DirectorySink::new(page) }
    }

    /// `false`: full. Ask before any look-up, because look-ups are counted.
    pub fn fits(&self, name: &[u8]) -> bool {
        self.plain.fits(ENTRY_BYTES, name)
    }

    /// Like [`DirectorySink::add`]; an entry that was taken counts as one look-up.
    pub fn add(&mut self, entry: &Entry, next_offset: u64, name: &[u8]) -> bool {
        self.plain.append(&entry_bytes(entry), entry.attr.ino, next_offset, entry.attr.kind, name)
    }

    /// An entry without a look-up: `.` and `..`, or one that could not be looked up.
    pub fn add_bare(&mut self, ino: u64, next_offset: u64, kind: Kind, name: &[u8]) -> bool {
        self.plain.append(&[0; ENTRY_BYTES], ino, next_offset, kind, name)
    }

    pub(crate) fn used(&self) -> usize {
        self.plain.used()
    }
}
