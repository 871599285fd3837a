//! Compares the layout with `shim/abi.h`, and the index with a map, read back as the shim reads it; checks the reports
//! of closes.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use surgetank_core::namespace::IndexEntry;
use surgetank_types::model::{Attr, DeviceId, FileId, Kind, Timestamp};

use super::abi::{self, of_record};
use super::closings::{Closed, Closings, IDLE_MAX};
use super::index::{Index, Place};

const DEVICE: DeviceId = DeviceId { tier: 0, device: 0 };
const DEV: u64 = 77;

#[test]
fn layout_equals_the_header() {
    let mut ours = BTreeMap::new();
    macro_rules! says {
        ($rust:ty, $c:literal: $($field:ident),*) => {
            ours.insert(concat!("sizeof(struct ", $c, ")").to_owned(), size_of::<$rust>() as u64);
            $(ours.insert(
                concat!("offsetof(struct ", $c, ", ", stringify!($field), ")").to_owned(),
                offset_of!($rust, $field) as u64,
            );)*
        };
    }
    says!(abi::Header, "st_header": magic, layout, flags, total_bytes, alive_until_ns, generation, key, mount_dev, root,
        uid, names, records, labels, dirs, plain, device_count, moves, devices);
    says!(abi::Device, "st_device": dev, flags, root_bytes, root_offset);
    says!(abi::Name, "st_name": a, b, id, record);
    says!(abi::Record, "st_record": seq, flags, id, ino, backing_ino, device, mode, uid, gid, nlink, label, rdev,
        size_bytes, blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns);
    says!(abi::Label, "st_label": parent, name_bytes, name);
    says!(abi::Dir, "st_dir": ino, record);
    says!(abi::Plain, "st_plain": backing_ino, device, record);
    says!(abi::Ring, "st_ring": magic, layout, entries, epoch, turn, first, limit, giving, next);
    says!(abi::IntakeEntry, "st_intake_entry": state, number, dir, dev, ino, run, mode, device, name_bytes, uid, gid, name);
    ours.remove("sizeof(struct st_request)");
    for (field, at) in [
        ("op", offset_of!(abi::Request, op)),
        ("flags", offset_of!(abi::Request, flags)),
        ("mode", offset_of!(abi::Request, mode)),
        ("valid", offset_of!(abi::Request, valid)),
        ("dir", offset_of!(abi::Request, dir)),
        ("dev", offset_of!(abi::Request, dev)),
        ("ino", offset_of!(abi::Request, ino)),
        ("uid", offset_of!(abi::Request, uid)),
        ("gid", offset_of!(abi::Request, gid)),
        ("atime_s", offset_of!(abi::Request, atime_s)),
        ("mtime_s", offset_of!(abi::Request, mtime_s)),
        ("atime_ns", offset_of!(abi::Request, atime_ns)),
        ("mtime_ns", offset_of!(abi::Request, mtime_ns)),
        ("name_bytes", offset_of!(abi::Request, name_bytes)),
        ("name", size_of::<abi::Request>()),
    ] {
        ours.insert(format!("offsetof(struct st_request, {field})"), at as u64);
    }
    for (constant, value) in [
        ("ST_MAGIC", abi::MAGIC),
        ("ST_LAYOUT", abi::LAYOUT.into()),
        ("ST_DEVICES_MAX", abi::DEVICES_MAX as u64),
        ("ST_NAME_BYTES_MAX", abi::NAME_BYTES_MAX as u64),
        ("ST_KNOWN", of_record::KNOWN.into()),
        ("ST_RESIDENT", of_record::RESIDENT.into()),
        ("ST_LIVE", of_record::LIVE.into()),
        ("ST_COMPLETE", of_record::COMPLETE.into()),
        ("ST_SEARCHABLE", of_record::SEARCHABLE.into()),
        ("ST_LINKED", of_record::LINKED.into()),
        ("ST_DELEGATED", of_record::DELEGATED.into()),
        ("ST_WRITES", abi::WRITES.into()),
        ("ST_RING", abi::RING.into()),
        ("ST_RING_MAGIC", abi::RING_MAGIC),
        ("ST_INTAKE_ENTRIES", abi::INTAKE_ENTRIES),
        ("ST_RING_SLOTS_OFFSET", abi::RING_SLOTS_OFFSET as u64),
        ("ST_INTAKE_FREE", abi::phase::FREE),
        ("ST_INTAKE_MADE", abi::phase::MADE),
        ("ST_INTAKE_DONE", abi::phase::DONE),
        ("ST_INTAKE_VOID", abi::phase::VOID),
        ("ST_INTAKE_REVOKED", abi::phase::REVOKED),
        ("ST_INTAKE_SKIP", abi::phase::SKIP),
        ("ST_DEVICE_NOEXEC", abi::NOEXEC.into()),
        ("ST_OPEN", abi::op::OPEN.into()),
        ("ST_SYNC", abi::op::SYNC.into()),
        ("ST_SETATTR", abi::op::SETATTR.into()),
        ("ST_SETATTR_NAMED", abi::op::SETATTR_NAMED.into()),
        ("ST_SETXATTR", abi::op::SETXATTR.into()),
        ("ST_GETXATTR", abi::op::GETXATTR.into()),
        ("ST_MORE_BYTES_MAX", abi::MORE_BYTES_MAX as u64),
        ("ST_VALUE_BYTES_MAX", abi::VALUE_BYTES_MAX as u64),
        ("ST_AGAIN", abi::AGAIN.into()),
        ("ST_SET_MODE", abi::set::MODE.into()),
        ("ST_SET_UID", abi::set::UID.into()),
        ("ST_SET_GID", abi::set::GID.into()),
        ("ST_SET_ATIME", abi::set::ATIME.into()),
        ("ST_SET_MTIME", abi::set::MTIME.into()),
        ("ST_SET_ATIME_NOW", abi::set::ATIME_NOW.into()),
        ("ST_SET_MTIME_NOW", abi::set::MTIME_NOW.into()),
    ] {
        ours.insert(constant.to_owned(), value);
    }
    let long = "a name that is longer than a few words of eight bytes";
    for (parent, name) in [
        (1, ""),
        (1, "a"),
        (1, "ab"),
        (1, "abc"),
        (4, "abcd"),
        (4, "abcdefg"),
        (2, "12345678"),
        (u64::MAX, "123456789"),
        (7, long),
    ] {
        let (a, b) = abi::hash([3, 5], parent, name.as_bytes());
        ours.insert(format!("hash_a({parent}ull, \"{name}\")"), a);
        ours.insert(format!("hash_b({parent}ull, \"{name}\")"), b);
    }
    ours.insert("st_mix(12345)".to_owned(), abi::mix(12345));

    let dir = tempfile::tempdir().unwrap();
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shim/abi.h");
    let mut program = format!(
        "#include \"{header}\"\n#include <stddef.h>\n#include <stdio.h>\n#include <string.h>\n\
         static const uint64_t key[2] = {{3, 5}};\n\
         static uint64_t hash_a(uint64_t p, const char *n) {{ uint64_t a, b; st_hash(key, p, n, strlen(n), &a, &b); return a; }}\n\
         static uint64_t hash_b(uint64_t p, const char *n) {{ uint64_t a, b; st_hash(key, p, n, strlen(n), &a, &b); return b; }}\n\
         int main(void) {{\n"
    );
    for what in ours.keys() {
        program += &format!("printf(\"%llu\\n\", (unsigned long long)({what}));\n");
    }
    program += "return 0; }\n";
    let source = dir.path().join("layout.c");
    std::fs::write(&source, program).unwrap();
    let binary = dir.path().join("layout");
    let built = Command::new("cc").arg("-o").arg(&binary).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
    let theirs: Vec<u64> = output.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(theirs.len(), ours.len());
    for ((what, rust), c) in ours.iter().zip(theirs) {
        assert_eq!(*rust, c, "{what}");
    }
}

fn entry_of(id: u64, kind: Kind, parent: u64) -> IndexEntry {
    let time = Timestamp::from_parts(1000 + id as i64, 7);
    IndexEntry {
        id: FileId(id),
        attr: Attr {
            kind,
            perm: 0o640,
            uid: 3,
            gid: 4,
            ino: 5_000_000 + id,
            links: 1,
            size_bytes: id * 10,
            blocks: 8,
            device: 0,
            atime: time,
            mtime: time,
            ctime: time,
        },
        known: true,
        live: false,
        fresh: false,
        plain: (kind == Kind::File).then_some((DEVICE, 9_000_000 + id)),
        readable: true,
        delegated: None,
        complete: kind == Kind::Directory,
        searchable: kind == Kind::Directory,
        parent: FileId(parent),
    }
}

fn index(dir: &std::path::Path) -> Index {
    let place = Place { id: DEVICE, root: "/tier/files".into(), dev: DEV, noexec: false };
    let mut index = Index::create(&dir.join("index"), vec![place], None, false).unwrap();
    index.show(&entry_of(1, Kind::Directory, 1), b"");
    index.open(42);
    index
}

/// Reads the file as a foreign process does, without the writer's memory.
struct Reader {
    bytes: Vec<u8>,
}

impl Reader {
    fn of(dir: &std::path::Path) -> Self {
        let file = std::fs::File::open(dir.join("index")).unwrap();
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        Self { bytes }
    }
    fn get<T: Copy>(&self, at: u64) -> T {
        let at = usize::try_from(at).unwrap();
        assert!(at + size_of::<T>() <= self.bytes.len());
        // SAFETY: within the bytes, and all types of the layout are numbers.
        unsafe { self.bytes.as_ptr().add(at).cast::<T>().read_unaligned() }
    }
    fn header(&self) -> abi::Header {
        self.get(0)
    }
    fn record(&self, number: u32) -> abi::Record {
        let header = self.header();
        assert!(u64::from(number) < header.records.capacity);
        self.get(header.records.offset + u64::from(number) * size_of::<abi::Record>() as u64)
    }
    fn find(&self, parent: u64, name: &[u8]) -> Option<abi::Record> {
        let header = self.header();
        let (a, b) = abi::hash(header.key, parent, name);
        let mut at = a & (header.names.capacity - 1);
        loop {
            let there: abi::Name = self.get(header.names.offset + at * size_of::<abi::Name>() as u64);
            if there.a == 0 {
                return None;
            }
            if (there.a, there.b) == (a, b) {
                let record = self.record(there.record);
                assert_eq!(record.id, there.id);
                return Some(record);
            }
            at = (at + 1) & (header.names.capacity - 1);
        }
    }
}

#[test]
fn hundred_thousand_names_are_added_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut index = index(dir.path());
    let mut names: HashMap<u64, String> = HashMap::new();
    for id in 2..100_000 {
        let name = format!("file-{id}");
        index.show(&entry_of(id, Kind::File, 1), b"");
        index.name(FileId(1), name.as_bytes(), Some(FileId(id)));
        names.insert(id, name);
        // Most of them are removed again, and their places are reused.
        if id % 3 != 0 {
            let gone = id - 1;
            if let Some(name) = names.remove(&gone) {
                index.name(FileId(1), name.as_bytes(), None);
                index.hide(FileId(gone));
            }
        }
    }
    assert_eq!(index.of_plain(DEV, 9_000_000 + 99_999), Some(FileId(99_999)));
    assert_eq!(index.of_plain(DEV + 1, 9_000_000 + 99_999), None, "another file system's file");
    let reader = Reader::of(dir.path());
    let header = reader.header();
    assert_eq!((header.magic, header.mount_dev, header.generation % 2), (abi::MAGIC, 42, 0));
    assert!(header.names.capacity > 1 << 12, "it grew");
    for id in 2..100_000 {
        let found = reader.find(1, format!("file-{id}").as_bytes());
        match names.get(&id) {
            None => assert_eq!(found, None, "{id}"),
            Some(_) => {
                let found = found.unwrap_or_else(|| panic!("{id} is missing"));
                assert_eq!((found.id, found.ino, found.size_bytes), (id, 5_000_000 + id, id * 10));
                assert_eq!(found.mode, libc::S_IFREG | 0o640);
                assert_eq!(found.flags, of_record::KNOWN | of_record::RESIDENT);
                assert_eq!((found.seq % 2, found.backing_ino), (0, 9_000_000 + id));
                assert_eq!((found.mtime_s, found.mtime_ns), (1000 + id as i64, 7));
            }
        }
    }
}

#[test]
fn directory_shown_before_its_parent_has_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let mut index = index(dir.path());
    index.show(&entry_of(11, Kind::Directory, 10), b"child");
    index.show(&entry_of(10, Kind::Directory, 1), b"parent");
    index.name(FileId(1), b"parent", Some(FileId(10)));
    index.name(FileId(10), b"child", Some(FileId(11)));
    let reader = Reader::of(dir.path());
    let header = reader.header();
    let label = |record: &abi::Record| -> abi::Label {
        reader.get(header.labels.offset + u64::from(record.label) * size_of::<abi::Label>() as u64)
    };
    let child = reader.find(10, b"child").unwrap();
    assert_eq!(child.flags, of_record::KNOWN | of_record::COMPLETE | of_record::SEARCHABLE);
    assert_eq!(&label(&child).name[..label(&child).name_bytes as usize], b"child");
    let parent = reader.record(label(&child).parent);
    assert_eq!(parent.id, 10);
    assert_eq!(&label(&parent).name[..label(&parent).name_bytes as usize], b"parent");
    assert_eq!(reader.record(label(&parent).parent).id, 1);
    let mut at = abi::mix(child.ino) & (header.dirs.capacity - 1);
    let found = loop {
        let there: abi::Dir = reader.get(header.dirs.offset + at * size_of::<abi::Dir>() as u64);
        assert_ne!(there.record, 0, "fstat of the directory does not lead to it");
        if there.ino == child.ino {
            break there;
        }
        at = (at + 1) & (header.dirs.capacity - 1);
    };
    assert_eq!(reader.record(found.record).id, 11);
}

#[test]
fn concealed_or_unshown_names_are_left_to_the_mount() {
    let dir = tempfile::tempdir().unwrap();
    let mut index = index(dir.path());
    index.show(&entry_of(5, Kind::File, 1), b"");
    index.name(FileId(1), b"a", Some(FileId(5)));
    index.name(FileId(1), b"stranger", Some(FileId(6)));
    index.conceal(FileId(5));
    let reader = Reader::of(dir.path());
    assert_eq!(reader.find(1, b"a").map(|record| (record.id, record.flags)), Some((5, 0)));
    assert_eq!(reader.find(1, b"stranger").map(|record| record.flags), Some(0), "it is there, but nothing is known");
    index.show(&entry_of(5, Kind::File, 1), b"");
    let live = IndexEntry { live: true, plain: None, ..entry_of(5, Kind::File, 1) };
    assert_eq!(Reader::of(dir.path()).find(1, b"a").unwrap().flags, of_record::KNOWN | of_record::RESIDENT);
    index.show(&live, b"");
    let record = Reader::of(dir.path()).find(1, b"a").unwrap();
    assert_eq!((record.flags & (of_record::KNOWN | of_record::RESIDENT), record.backing_ino), (0, 0));
    assert_eq!(index.of_plain(DEV, 9_000_005), None);
}

/// A name that comes to mean another file was missing for an instant: `mv new current` was no longer atomic.
#[test]
fn replaced_name_is_always_present() {
    let dir = tempfile::tempdir().unwrap();
    let mut index = index(dir.path());
    for id in [2, 3] {
        index.show(&entry_of(id, Kind::File, 1), b"");
    }
    index.name(FileId(1), b"current", Some(FileId(2)));
    let header = Reader::of(dir.path()).header();
    let (a, _) = abi::hash(header.key, 1, b"current");
    let slot = header.names.offset + (a & (header.names.capacity - 1)) * size_of::<abi::Name>() as u64;
    let file = std::fs::File::open(dir.path().join("index")).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut looks = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let mut there = [0; 8];
                file.read_exact_at(&mut there, slot).unwrap();
                assert_eq!(u64::from_ne_bytes(there), a, "after {looks} looks");
                looks += 1;
            }
            looks
        });
        for round in 0..2_000_000_u64 {
            index.name(FileId(1), b"current", Some(FileId(2 + round % 2)));
            if reader.is_finished() {
                break;
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(reader.join().unwrap() > 1000);
    });
}

/// The agent's writer against the shim's reader, as built into programs.
#[test]
fn lookup_sees_one_state_of_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let mut index = index(dir.path());
    let of_round = |id: u64, kind: Kind, round: u64| {
        let time = Timestamp::from_parts(round as i64, (round % 1000) as u32);
        let mut one = entry_of(id, kind, 1);
        let number = round as u32;
        one.attr =
            Attr { uid: number, gid: number, links: number % 7 + 1, size_bytes: round, blocks: round, ..one.attr };
        one.attr = Attr { atime: time, mtime: time, ctime: time, ..one.attr };
        one
    };
    let label = |round: u64| vec![b'a' + (round % 26) as u8; (round % 250) as usize + 1];
    let reader = dir.path().join("torn");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shim/tests/torn.c");
    let built = Command::new("cc").args(["-std=gnu11", "-O2", "-o"]).arg(&reader).arg(source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let mut reading =
        Command::new(&reader).arg(dir.path().join("index")).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    let mut round = 0;
    loop {
        // Two files alternately have the record and the name.
        let (now, other) = if round / 16 % 2 == 0 { (5, 6) } else { (6, 5) };
        if round % 16 == 0 {
            index.hide(FileId(other));
        }
        index.show(&of_round(now, Kind::File, round), b"");
        if round % 16 == 0 {
            index.name(FileId(1), b"current", Some(FileId(now)));
        }
        index.show(&of_round(10, Kind::Directory, round), &label(round));
        round += 1;
        if round % 1000 == 0 {
            // (A new name each time: tables grow, too.)
            index.name(FileId(1), format!("name-{round}").as_bytes(), Some(FileId(1)));
            if reading.try_wait().unwrap().is_some() || std::time::Instant::now() > until {
                break;
            }
        }
    }
    std::fs::write(dir.path().join("index.over"), "").unwrap();
    let ended = reading.wait_with_output().unwrap();
    let output = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "after {round} rounds: {output}");
    let looks: Vec<u64> = output.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert!(looks.len() == 4 && looks.iter().all(|looks| *looks > 1000), "{round} rounds: {output}");
}

/// The files that are reported so far, among the closed ones.
fn reported(closings: &Closings, closed: &[u64]) -> Vec<u64> {
    let mut reported = Vec::new();
    closings.take(
        || (),
        |what| {
            let Closed::Of(FileId(id)) = what else { return true };
            let ended = closed.contains(&id);
            if ended {
                reported.push(id);
            }
            ended
        },
    );
    reported
}

#[test]
fn files_are_reported_in_the_order_of_their_closes() {
    let place = tempfile::tempdir().unwrap();
    let (one, two) = (place.path().join("one"), place.path().join("two"));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    let closings = Closings::new().unwrap();
    let mut files = HashMap::new();
    for (id, dir, name) in [(1, &one, "a"), (2, &two, "a"), (3, &one, "b"), (4, &two, "of a longer name")] {
        files.insert(id, File::create(dir.join(name)).unwrap());
        closings.watch_in(dir, name.as_bytes(), FileId(id)).unwrap();
    }
    // An unrelated file.
    drop(File::create(one.join("strange")).unwrap());
    for id in [3, 2, 4, 1] {
        files.remove(&id);
    }
    assert_eq!(reported(&closings, &[1, 2, 3, 4]), [3, 2, 4, 1]);
    drop(File::options().append(true).open(one.join("a")).unwrap());
    assert!(reported(&closings, &[1]).is_empty(), "it was closed before, and its id may have another file now");
}

/// Regression: setting a watch again took it back for an instant, in which the kernel lost the closes of other files.
#[test]
fn no_close_is_missed_while_other_files_get_watches() {
    let place = tempfile::tempdir().unwrap();
    let closings = Closings::new().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watches = || {
            while !is_over.load(Ordering::Relaxed) {
                closings.watch_in(place.path(), b"other", FileId(1 << 40)).unwrap();
            }
        };
        scope.spawn(watches);
        let mut missed = 0;
        for turn in 0..100_u64 {
            let ids: Vec<u64> = (turn * 100..turn * 100 + 100).collect();
            let make = |id: &u64| {
                let name = id.to_string();
                let file = File::create(place.path().join(&name)).unwrap();
                closings.watch_in(place.path(), name.as_bytes(), FileId(*id)).unwrap();
                file
            };
            let files: Vec<File> = ids.iter().map(make).collect();
            drop(files);
            missed += ids.len() - reported(&closings, &ids).len();
            ids.iter().for_each(|id| fs::remove_file(place.path().join(id.to_string())).unwrap());
        }
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(missed, 0);
    });
}

#[test]
fn close_of_a_reused_name_reports_the_right_file() {
    let place = tempfile::tempdir().unwrap();
    let closings = Closings::new().unwrap();
    let make = |id| {
        let file = File::create_new(place.path().join("name")).unwrap();
        closings.watch_in(place.path(), b"name", FileId(id)).unwrap();
        file
    };
    let first = make(1);
    fs::remove_file(place.path().join("name")).unwrap();
    let second = make(2);
    drop(first);
    assert_eq!(reported(&closings, &[1]), [1]);
    drop(second);
    assert_eq!(reported(&closings, &[1, 2]), [2]);
    // The file is closed, and that event not taken in, when the next one is created.
    fs::remove_file(place.path().join("name")).unwrap();
    drop(make(3));
    fs::remove_file(place.path().join("name")).unwrap();
    let fourth = make(4);
    assert_eq!(reported(&closings, &[3]), [3]);
    drop(fourth);
    assert_eq!(reported(&closings, &[3, 4]), [4]);
}

#[test]
fn moved_file_is_reported_if_watched_itself() {
    let place = tempfile::tempdir().unwrap();
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    fs::create_dir(&from).unwrap();
    fs::create_dir(&to).unwrap();
    let closings = Closings::new().unwrap();
    let file = File::create(from.join("a")).unwrap();
    closings.watch_in(&from, b"a", FileId(1)).unwrap();
    closings.watch(FileId(1), file.as_fd()).unwrap();
    fs::rename(from.join("a"), to.join("b")).unwrap();
    drop(file);
    assert_eq!(reported(&closings, &[1]), [1]);
    // A file that moves with its directory needs no watch.
    let file = File::create(from.join("a")).unwrap();
    closings.watch_in(&from, b"a", FileId(2)).unwrap();
    fs::rename(&from, to.join("from")).unwrap();
    drop(file);
    assert_eq!(reported(&closings, &[2]), [2]);
}

#[test]
fn recreated_directory_is_watched_and_idle_watches_end() {
    let place = tempfile::tempdir().unwrap();
    let closings = Closings::new().unwrap();
    let mut id = 0;
    let mut make = |dir: &Path| {
        id += 1;
        fs::create_dir_all(dir).unwrap();
        let file = File::create(dir.join("file")).unwrap();
        closings.watch_in(dir, b"file", FileId(id)).unwrap();
        (id, file)
    };
    for turn in 0..3 {
        let dir = place.path().join("again");
        let (id, file) = make(&dir);
        drop(file);
        // It is reported after the directory is removed, too.
        if turn == 1 {
            fs::remove_dir_all(&dir).unwrap();
        }
        assert_eq!(reported(&closings, &[id]), [id]);
        if turn == 0 {
            fs::remove_dir_all(&dir).unwrap();
        }
    }
    let held = make(&place.path().join("held"));
    for number in 0..2 * IDLE_MAX + 10 {
        let (id, file) = make(&place.path().join(number.to_string()));
        drop(file);
        assert_eq!(reported(&closings, &[id]), [id]);
    }
    let watches = || {
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", closings.as_fd().as_raw_fd())).unwrap();
        text.lines().filter(|line| line.starts_with("inotify")).count()
    };
    assert!(watches() <= IDLE_MAX + 1, "{} directories are watched", watches());
    closings.rest();
    let used = make(&place.path().join("1"));
    drop(used.1);
    assert_eq!(reported(&closings, &[used.0]), [used.0]);
    closings.rest();
    assert_eq!(watches(), 2, "of one a file is open, one was used since");
    closings.rest();
    assert_eq!(watches(), 1);
    let delegated = closings.watch_delegated(&place.path().join("2")).unwrap();
    (0..3).for_each(|_| closings.rest());
    assert_eq!(watches(), 2);
    closings.no_longer_delegated(delegated);
    (0..3).for_each(|_| closings.rest());
    assert_eq!(watches(), 1);
    let again = make(&place.path().join("2"));
    drop(again.1);
    assert_eq!(reported(&closings, &[again.0]), [again.0]);
    drop(held.1);
    assert_eq!(reported(&closings, &[held.0]), [held.0]);
}
