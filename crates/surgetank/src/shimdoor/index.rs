//! The index: the namespace's visible files, in the form that the shim reads. It has one writer, behind a lock;
//! `shim/abi.h` describes the layout and how to read it.
//!
//! A file has one record while it is shown. Each name leads to a record and states the record's file. When a table is
//! full, files are left out, and a directory that misses a name is not complete any more: the shim asks the mount for
//! what is not here.

use std::io;
use std::mem::offset_of;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use foldhash::{HashMap, HashSet};
use surgetank_core::namespace::IndexEntry;
use surgetank_types::model::{FileId, Timestamp};

use super::abi::{self, Header, Record, of_record};
use super::memory::Memory;
use super::table::Table;

const HEADER_BYTES: usize = 64 << 10;
/// The devices' paths follow the header.
const ROOTS_OFFSET: usize = 4096;
const NAMES: (usize, usize) = (1 << 12, 1 << 22);
const RECORDS: (usize, usize) = (1 << 11, 1 << 21);
const LABELS: (usize, usize) = (1 << 8, 1 << 17);
const DIRS: (usize, usize) = (1 << 9, 1 << 18);
const PLAIN: (usize, usize) = (1 << 12, 1 << 22);

/// A device's facts for the shim.
#[derive(Debug, Clone)]
pub struct Place {
    pub id: surgetank_types::model::DeviceId,
    pub root: std::path::PathBuf,
    pub dev: u64,
    pub noexec: bool,
}

/// Numbered places of equal size, which are allocated and freed; number 0 is never used.
struct Slab {
    extent_at: usize,
    offset: usize,
    each_bytes: usize,
    capacity: usize,
    capacity_max: usize,
    next: u32,
    free: Vec<u32>,
}

impl Slab {
    fn take(&mut self, memory: &Memory) -> Option<u32> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        if self.next as usize >= self.capacity {
            let capacity = self.capacity * 2;
            if capacity > self.capacity_max || !memory.provide(self.offset, capacity * self.each_bytes) {
                return None;
            }
            self.capacity = capacity;
            memory.while_unsettled(|| self.publish_extent(memory));
        }
        self.next += 1;
        Some(self.next - 1)
    }

    fn publish_extent(&self, memory: &Memory) {
        let extent = abi::Extent { offset: self.offset as u64, capacity: self.capacity as u64 };
        // SAFETY: `extent_at` is the offset of an extent in the header.
        unsafe { memory.at(self.extent_at).cast::<abi::Extent>().write_volatile(extent) };
    }

    fn at(&self, memory: &Memory, number: u32) -> *mut u8 {
        memory.at(self.offset + number as usize * self.each_bytes)
    }
}

pub struct Index {
    memory: Memory,
    key: [u64; 2],
    names: Table<abi::Name>,
    records: Slab,
    labels: Slab,
    dirs: Table<abi::Dir>,
    plain: Table<abi::Plain>,
    numbers: HashMap<u64, u32>,
    places: Vec<Place>,
    /// Directories that miss a name.
    wanting: HashSet<u64>,
    /// In a user namespace with one user: everything is shown as that user's.
    only_ids: Option<(u32, u32)>,
}

impl Index {
    /// `again`: in the place of an earlier agent's index, which programs have mapped.
    pub fn create(path: &Path, places: Vec<Place>, only_ids: Option<(u32, u32)>, again: bool) -> io::Result<Self> {
        let mut offset = HEADER_BYTES;
        let mut take = |bytes: usize| {
            let at = offset;
            offset += bytes.next_multiple_of(4096);
            at
        };
        let names = Table::new(offset_of!(Header, names), take(NAMES.1 * size_of::<abi::Name>()), NAMES.0, NAMES.1);
        let records =
            slab(offset_of!(Header, records), take(RECORDS.1 * size_of::<Record>()), size_of::<Record>(), RECORDS);
        let labels =
            slab(offset_of!(Header, labels), take(LABELS.1 * size_of::<abi::Label>()), size_of::<abi::Label>(), LABELS);
        let dirs = Table::new(offset_of!(Header, dirs), take(DIRS.1 * size_of::<abi::Dir>()), DIRS.0, DIRS.1);
        let plain = Table::new(offset_of!(Header, plain), take(PLAIN.1 * size_of::<abi::Plain>()), PLAIN.0, PLAIN.1);
        let taken_over = again.then(|| Memory::take_over(path, offset, HEADER_BYTES).ok()).flatten();
        let memory = taken_over.map_or_else(|| Memory::create(path, offset), Ok)?;
        let key = random()?;
        let provided = memory.provide(0, HEADER_BYTES)
            && memory.provide(names.offset(), names.bytes())
            && memory.provide(records.offset, records.capacity * records.each_bytes)
            && memory.provide(labels.offset, labels.capacity * labels.each_bytes)
            && memory.provide(dirs.offset(), dirs.bytes())
            && memory.provide(plain.offset(), plain.bytes());
        if !provided {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let index = Self {
            memory,
            key,
            names,
            records,
            labels,
            dirs,
            plain,
            numbers: HashMap::default(),
            places,
            wanting: HashSet::default(),
            only_ids,
        };
        index.write_header(offset);
        Ok(index)
    }

    fn write_header(&self, total_bytes: usize) {
        let mut header = Header {
            magic: 0,
            layout: abi::LAYOUT,
            flags: abi::WRITES,
            total_bytes: total_bytes as u64,
            key: self.key,
            uid: rustix::process::geteuid().as_raw(),
            ..Header::default()
        };
        if self.memory.is_taken_over() {
            // A program that reads it now finds the same mount, and an odd generation.
            // SAFETY: the mapped header of an earlier agent; only this agent writes it.
            let before = unsafe { self.memory.header().read_volatile() };
            header.magic = before.magic;
            header.generation = before.generation;
            header.mount_dev = before.mount_dev;
        }
        let mut at = ROOTS_OFFSET;
        for (device, place) in header.devices.iter_mut().zip(&self.places) {
            let root = std::os::unix::ffi::OsStrExt::as_bytes(place.root.as_os_str());
            if at + root.len() + 1 > HEADER_BYTES {
                break;
            }
            // SAFETY: within the header's pages, which are mapped, and behind the header itself.
            unsafe { std::ptr::copy_nonoverlapping(root.as_ptr(), self.memory.at(at), root.len()) };
            *device = abi::Device {
                dev: place.dev,
                flags: if place.noexec { abi::NOEXEC } else { 0 },
                root_bytes: u32::try_from(root.len()).unwrap_or(0),
                root_offset: at as u64,
            };
            header.device_count += 1;
            at += root.len() + 1;
        }
        // SAFETY: the header's place; no process reads it before the magic is there.
        unsafe { self.memory.header().write_volatile(header) };
        self.names.publish_extent(&self.memory);
        self.records.publish_extent(&self.memory);
        self.labels.publish_extent(&self.memory);
        self.dirs.publish_extent(&self.memory);
        self.plain.publish_extent(&self.memory);
    }

    /// Everything is shown: readers may come.
    pub fn open(&mut self, mount_dev: u64) {
        let root = self.numbers.get(&FileId::ROOT.0).copied().unwrap_or(0);
        let header = self.memory.header();
        fence(Ordering::SeqCst);
        // SAFETY: fields of the mapped header; `magic` last.
        unsafe {
            (&raw mut (*header).mount_dev).write_volatile(mount_dev);
            (&raw mut (*header).root).write_volatile(root);
            fence(Ordering::SeqCst);
            (&raw mut (*header).magic).write_volatile(abi::MAGIC);
        }
        self.memory.settle();
    }

    /// The ring exists: from here on directories may be delegated.
    pub fn has_ring(&self) {
        // SAFETY: a field of the mapped header; no other thread or process writes it.
        unsafe { (&raw mut (*self.memory.header()).flags).write_volatile(abi::WRITES | abi::RING) };
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn show(&mut self, entry: &IndexEntry, name: &[u8]) {
        let id = entry.id.0;
        let Some(number) = self.number(entry.id) else { return };
        let before = self.record(number);
        let mut record = self.record_of(entry);
        record.label = before.label;
        let is_dir = record.mode & libc::S_IFMT == libc::S_IFDIR;
        if is_dir && record.label == 0 {
            record.label = self.labels.take(&self.memory).unwrap_or(0);
        }
        if is_dir && (record.label == 0 || self.wanting.contains(&id)) {
            record.flags &= !(of_record::COMPLETE | of_record::DELEGATED);
        }
        let parent = if is_dir { self.number(entry.parent).unwrap_or(0) } else { 0 };
        self.write(number, record, is_dir.then_some((parent, name)));
        self.point_from_plain(number, &before, &record);
        if is_dir && before.ino != record.ino {
            let dir = abi::Dir { ino: record.ino, record: number, reserved: 0 };
            self.dirs.put(&self.memory, dir, |there| there.ino == dir.ino && there.record == number);
        }
    }

    /// The file's record, which has no content until the file is shown.
    fn number(&mut self, id: FileId) -> Option<u32> {
        if let Some(number) = self.numbers.get(&id.0) {
            return Some(*number);
        }
        let number = self.records.take(&self.memory)?;
        self.numbers.insert(id.0, number);
        self.write(number, Record { id: id.0, ..Record::default() }, None);
        Some(number)
    }

    /// Lets fstat of the plain file find the record.
    fn point_from_plain(&mut self, number: u32, before: &Record, now: &Record) {
        if (before.backing_ino, before.device) == (now.backing_ino, now.device) {
            return;
        }
        if before.backing_ino != 0 {
            self.forget_plain(number, before);
        }
        if now.backing_ino != 0 {
            let slot = abi::Plain { backing_ino: now.backing_ino, device: now.device, record: number };
            let same = |there: &abi::Plain| (there.backing_ino, there.device) == (slot.backing_ino, slot.device);
            if !self.plain.put(&self.memory, slot, same) {
                // A program that opened it could not determine which file it is.
                self.write(number, Record { flags: now.flags & !of_record::RESIDENT, ..*now }, None);
            }
        }
    }

    fn forget_plain(&mut self, number: u32, record: &Record) {
        let slot = abi::Plain { backing_ino: record.backing_ino, device: record.device, record: number };
        self.plain.remove(&self.memory, super::table::Slot::start(&slot), |there| {
            (there.backing_ino, there.device, there.record) == (slot.backing_ino, slot.device, number)
        });
    }

    pub fn conceal(&mut self, id: FileId) {
        if let Some(number) = self.numbers.get(&id.0).copied() {
            let record = self.record(number);
            self.write(number, Record { flags: 0, ..record }, None);
        }
    }

    pub fn directories_move(&self) {
        self.memory.count_move();
    }

    pub fn hide(&mut self, id: FileId) {
        let Some(number) = self.numbers.remove(&id.0) else { return };
        let record = self.record(number);
        self.wanting.remove(&id.0);
        self.write(number, Record { label: record.label, ..Record::default() }, None);
        if record.backing_ino != 0 {
            self.forget_plain(number, &record);
        }
        if record.mode & libc::S_IFMT == libc::S_IFDIR {
            self.dirs.remove(&self.memory, abi::mix(record.ino), |there| there.record == number);
        }
        if record.label != 0 {
            self.labels.free.push(record.label);
        }
        self.write(number, Record::default(), None);
        self.records.free.push(number);
    }

    pub fn name(&mut self, dir: FileId, name: &[u8], id: Option<FileId>) {
        let (a, b) = abi::hash(self.key, dir.0, name);
        let same = |there: &abi::Name| there.a == a && there.b == b;
        let Some(id) = id else {
            self.names.remove(&self.memory, a, same);
            return;
        };
        // The file is not shown: the mount knows it.
        let known = self.numbers.get(&id.0).copied();
        let slot = abi::Name { a, b, id: known.map_or(0, |_| id.0), record: known.unwrap_or(0), reserved: 0 };
        if self.names.get(&self.memory, a, same) == Some(slot) {
            return;
        }
        if !self.names.put(&self.memory, slot, same) && self.wanting.insert(dir.0) {
            tracing::warn!("the index is full: programs use the mount for files without an entry");
            if let Some(number) = self.numbers.get(&dir.0).copied() {
                let record = self.record(number);
                let flags = record.flags & !(of_record::COMPLETE | of_record::DELEGATED);
                self.write(number, Record { flags, ..record }, None);
            }
        }
    }

    /// The file of this plain file.
    pub fn of_plain(&self, dev: u64, ino: u64) -> Option<FileId> {
        self.places.iter().enumerate().filter(|(_, place)| place.dev == dev).find_map(|(device, _)| {
            let device = u32::try_from(device).ok()?;
            let start = abi::mix(ino.wrapping_add(u64::from(device)));
            let found =
                self.plain.get(&self.memory, start, |there| (there.backing_ino, there.device) == (ino, device))?;
            Some(FileId(self.record(found.record).id))
        })
    }

    fn record_of(&self, entry: &IndexEntry) -> Record {
        let attr = &entry.attr;
        let device = entry.plain.and_then(|(device, _)| self.places.iter().position(|place| place.id == device));
        let plain = entry.plain.filter(|_| device.is_some());
        let mut flags = 0;
        let mut set = |on: bool, flag: u32| flags |= if on { flag } else { 0 };
        set(entry.known && (!entry.live || plain.is_some()), of_record::KNOWN);
        set(entry.live, of_record::LIVE);
        set(plain.is_some() && entry.readable, of_record::RESIDENT);
        set(entry.live && entry.fresh, of_record::FRESH);
        set(entry.complete, of_record::COMPLETE);
        let delegated = entry.delegated.and_then(|device| self.places.iter().position(|place| place.id == device));
        set(delegated.is_some(), of_record::DELEGATED);
        set(entry.searchable, of_record::SEARCHABLE);
        set(attr.links > 1 && attr.kind == surgetank_types::model::Kind::File, of_record::LINKED);
        let (uid, gid) = self.only_ids.unwrap_or((attr.uid, attr.gid));
        let parts = |time: Timestamp| (time.secs(), time.subsec_nanos());
        let ((atime_s, atime_ns), (mtime_s, mtime_ns), (ctime_s, ctime_ns)) =
            (parts(attr.atime), parts(attr.mtime), parts(attr.ctime));
        Record {
            seq: 0,
            flags,
            id: entry.id.0,
            ino: attr.ino,
            backing_ino: plain.map_or(0, |(_, ino)| ino),
            device: device.or(delegated).and_then(|device| u32::try_from(device).ok()).unwrap_or(0),
            mode: attr.mode(),
            uid,
            gid,
            nlink: attr.links,
            label: 0,
            rdev: attr.device,
            size_bytes: attr.size_bytes,
            blocks: attr.blocks,
            atime_s,
            mtime_s,
            ctime_s,
            atime_ns,
            mtime_ns,
            ctime_ns,
            reserved: 0,
        }
    }

    fn record(&self, number: u32) -> Record {
        // SAFETY: allocated numbers are within the slab; no other thread or process writes.
        unsafe { *self.records.at(&self.memory, number).cast::<Record>() }
    }

    /// Writes under the record's sequence number, which is odd meanwhile; also writes a directory's label.
    fn write(&self, number: u32, record: Record, label: Option<(u32, &[u8])>) {
        let at = self.records.at(&self.memory, number).cast::<Record>();
        // SAFETY: as in `record`; aligned, for the slab's offset and the record's size are.
        let seq = unsafe { AtomicU32::from_ptr(&raw mut (*at).seq) };
        let before = seq.load(Ordering::Relaxed);
        seq.store(before.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        // SAFETY: as above; the label's number was given out by the labels' slab.
        unsafe {
            at.write_volatile(Record { seq: before.wrapping_add(1), ..record });
            if let Some((parent, name)) = label.filter(|_| record.label != 0) {
                let mut text = [0; abi::NAME_BYTES_MAX + 1];
                let bytes = name.len().min(abi::NAME_BYTES_MAX);
                text[..bytes].copy_from_slice(&name[..bytes]);
                let label = abi::Label { parent, name_bytes: bytes as u32, name: text };
                self.labels.at(&self.memory, record.label).cast::<abi::Label>().write_volatile(label);
            }
        }
        seq.store(before.wrapping_add(2), Ordering::Release);
    }
}

fn slab(extent_at: usize, offset: usize, each_bytes: usize, (capacity, capacity_max): (usize, usize)) -> Slab {
    Slab { extent_at, offset, each_bytes, capacity, capacity_max, next: 1, free: Vec::new() }
}

fn random() -> io::Result<[u64; 2]> {
    let mut bytes = [0; 16];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bytes)?;
    let word = |part: &[u8]| part.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    Ok([word(&bytes[..8]), word(&bytes[8..])])
}
