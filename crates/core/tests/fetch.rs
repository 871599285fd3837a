//! Reads and writes of files in a store without plain files: which bytes the agent fetches, and when.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

pub mod world;

use std::time::{Duration, Instant};

use surgetank_core::namespace::Grant;
use surgetank_store::source::RANGES_AT_ONCE;
use surgetank_types::error::Errno;
use surgetank_types::model::{FileId, FsyncTarget};
use world::{CHUNK, MIB, World, pattern};

const ROOMY: u64 = 1 << 30;

#[test]
fn small_file_is_one_request_and_resident() {
    let world = World::new(ROOMY);
    let bytes = pattern(3 * MIB + 5, 1);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert!(matches!(opened.grant, Grant::Direct(_)));
    assert_eq!((world.line.sources(), world.line.requests()), (1, 1));
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
    let again = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&again, MIB).unwrap() == bytes);
    world.close(again);
    assert_eq!((world.line.sources(), world.line.requests()), (1, 1));
    world.is_charged();
    assert!(world.namespace.files.eviction.evict(world.find("f").unwrap(), "it may go").unwrap() > 0);
    assert_eq!(world.used_bytes(), 0);
    assert!(!world.namespace.questions.busy(None));
}

#[test]
fn empty_file_fetches_no_bytes() {
    let world = World::new(ROOMY);
    world.put("f", b"");
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(world.read(&opened, 0, 10).unwrap(), b"");
    assert_eq!(world.line.requests(), 0);
    world.close(opened);
}

#[test]
fn large_file_is_read_during_its_fetch_and_stays() {
    let world = World::new(ROOMY);
    let chunks = 12;
    let bytes = pattern((chunks - 1) * CHUNK + 77, 2);
    world.put("f", &bytes);
    world.line.delay(Duration::from_millis(300));
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert!(matches!(opened.grant, Grant::Mediated));
    assert_eq!(world.line.requests(), 0);
    assert!(world.read_on(&opened, 128 << 10).unwrap() == bytes);
    assert_eq!((world.line.requests(), world.line.bytes()), (chunks, bytes.len() as u64));
    assert_eq!(world.line.at_once_max(), RANGES_AT_ONCE as u64);
    // Resident before the last close.
    world.is_charged();
    world.close(opened);
    world.line.forget();
    let again = world.open("f", libc::O_RDONLY).unwrap();
    assert!(matches!(again.grant, Grant::Direct(_)));
    assert!(world.read_on(&again, MIB).unwrap() == bytes);
    world.close(again);
    assert_eq!((world.line.sources(), world.line.requests()), (0, 0));
    assert!(world.namespace.files.eviction.evict(world.find("f").unwrap(), "it may go").unwrap() > 0);
    assert_eq!(world.used_bytes(), 0);
}

#[test]
fn read_in_the_middle_fetches_only_its_chunks() {
    let world = World::new(ROOMY);
    let (size_bytes, at) = (100 << 30, (50 << 30) + 12345);
    world.put_sparse("f", size_bytes, at, b"here");
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(world.read(&opened, at, 4).unwrap(), b"here");
    assert_eq!(world.read(&opened, at - 4096, 4096).unwrap(), vec![0; 4096]);
    assert_eq!(world.read(&opened, size_bytes - 10, 100).unwrap(), vec![0; 10]);
    assert_eq!(world.read(&opened, 3, 4).unwrap(), vec![0; 4]);
    assert_eq!(world.line.requests(), 3);
    for step in 0..50 {
        assert_eq!(world.read(&opened, step * (size_bytes / 50), 4096).unwrap().len(), 4096);
    }
    assert!(world.line.requests() <= 53, "{} requests", world.line.requests());
    assert!(world.used_bytes() <= 53 * CHUNK);
    let seek = |offset, whence| {
        world.namespace.files.transfers.seek(opened.handle, offset, whence).map_err(|fault| fault.errno)
    };
    assert_eq!(seek(5, libc::SEEK_DATA), Ok(5));
    assert_eq!(seek(5, libc::SEEK_HOLE), Ok(size_bytes));
    assert_eq!(seek(size_bytes, libc::SEEK_DATA), Err(Errno::NXIO));
    world.close(opened);
    // An incomplete copy does not stay.
    assert_eq!((world.used_bytes(), world.on_tiers()), (0, 0));
}

#[test]
fn concurrent_readers_of_one_file_fetch_it_once() {
    let world = World::new(ROOMY);
    let bytes = pattern(6 * CHUNK + 9, 3);
    world.put("f", &bytes);
    world.line.delay(Duration::from_millis(5));
    std::thread::scope(|scope| {
        for reader in 0..8_u64 {
            let (world, bytes) = (&world, &bytes);
            scope.spawn(move || {
                let opened = world.open("f", libc::O_RDONLY).unwrap();
                if reader % 2 == 0 {
                    assert!(world.read_on(&opened, 1 << 20).unwrap() == *bytes);
                } else {
                    let mut at = reader;
                    for _ in 0..200 {
                        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let offset = at % bytes.len() as u64;
                        let end = bytes.len().min(offset as usize + 5000);
                        assert!(world.read(&opened, offset, 5000).unwrap() == bytes[offset as usize..end]);
                    }
                }
                world.close(opened);
            });
        }
    });
    assert_eq!(world.line.bytes(), bytes.len() as u64);
    world.is_charged();
}

#[test]
fn writer_after_a_partial_read_gets_the_whole_file() {
    let mut world = World::new(ROOMY);
    let mut bytes = pattern(5 * CHUNK + 3, 4);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read(&reader, 2 * CHUNK, 100).unwrap() == bytes[2 * CHUNK as usize..][..100]);
    let writer = world.open("f", libc::O_RDWR).unwrap();
    assert_eq!(world.line.bytes(), bytes.len() as u64);
    world.write(&writer, 10, b"written").unwrap();
    bytes[10..17].copy_from_slice(b"written");
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    assert!(world.read_on(&writer, MIB).unwrap() == bytes);
    world.close(writer);
    world.close(reader);
    world.settle();
    assert!(std::fs::read(world.in_store("f")).unwrap() == bytes);
    world.is_charged();
}

#[test]
fn append_to_a_large_file_fetches_it_whole() {
    let mut world = World::new(ROOMY);
    let mut bytes = pattern(3 * CHUNK, 5);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_WRONLY | libc::O_APPEND).unwrap();
    assert_eq!((world.line.requests(), world.line.bytes()), (3, bytes.len() as u64));
    let count = world.namespace.files.transfers.write(opened.handle, 0, b"more", true).unwrap();
    assert_eq!(count, 4);
    world.close(opened);
    world.settle();
    bytes.extend_from_slice(b"more");
    assert!(std::fs::read(world.in_store("f")).unwrap() == bytes);
    world.is_charged();
}

#[test]
fn truncation_fetches_nothing() {
    let mut world = World::new(ROOMY);
    world.put("f", &pattern(3 * CHUNK, 6));
    let opened = world.open("f", libc::O_WRONLY | libc::O_TRUNC).unwrap();
    world.write(&opened, 0, b"new").unwrap();
    world.close(opened);
    world.settle();
    assert_eq!(std::fs::read(world.in_store("f")).unwrap(), b"new");
    // Not even while a reader has the file open.
    world.put("g", &pattern(3 * CHUNK, 6));
    let reader = world.open("g", libc::O_RDONLY).unwrap();
    let opened = world.open("g", libc::O_WRONLY | libc::O_TRUNC).unwrap();
    world.write(&opened, 0, b"newer").unwrap();
    assert_eq!(world.read_on(&reader, MIB).unwrap(), b"newer");
    world.close(opened);
    world.close(reader);
    world.settle();
    assert_eq!(std::fs::read(world.in_store("g")).unwrap(), b"newer");
    assert_eq!(world.line.requests(), 0);
    world.is_charged();
}

#[test]
fn file_without_room_is_read_through_a_window() {
    // Not even a small file fits.
    let world = World::new(MIB);
    let small = pattern(2 * MIB, 7);
    let large = pattern(20 * CHUNK + 5, 8);
    world.put("small", &small);
    world.put("large", &large);
    for (name, bytes) in [("small", &small), ("large", &large)] {
        let opened = world.open(name, libc::O_RDONLY).unwrap();
        assert!(world.read_on(&opened, 128 << 10).unwrap() == *bytes);
        assert!(world.read(&opened, 0, 5000).unwrap() == bytes[..5000]);
        world.close(opened);
    }
    assert!(world.line.requests() <= 1 + 21 + 2, "{} requests", world.line.requests());
    assert_eq!((world.used_bytes(), world.on_tiers()), (0, 0));
    // The whole file in one read.
    let opened = world.open("large", libc::O_RDONLY).unwrap();
    assert!(world.read(&opened, 0, large.len() as u64).unwrap() == large);
    world.close(opened);
}

#[test]
fn file_larger_than_the_tier_is_read_through_it() {
    let world = World::new(12 * CHUNK);
    let bytes = pattern(30 * CHUNK + 5, 9);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    let mut at = 0;
    while at < bytes.len() {
        let more = world.read(&opened, at as u64, MIB).unwrap();
        assert!(more == bytes[at..at + more.len()]);
        at += more.len();
        assert!(world.used_bytes() <= 12 * CHUNK);
    }
    assert_eq!(world.line.requests(), 31);
    // A writer takes the room back.
    let writer = world.create("w").unwrap();
    world.write(&writer, 0, &pattern(9 * CHUNK, 10)).unwrap();
    assert!(world.read(&opened, 3, 1000).unwrap() == bytes[3..1003]);
    world.close(opened);
    world.close(writer);
    world.is_charged();
}

#[test]
fn store_error_reaches_the_reader_and_passes() {
    let world = World::new(ROOMY);
    let bytes = pattern(4 * CHUNK, 11);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    for (errno, seen) in [(Errno::IO, Errno::IO), (Errno::AGAIN, Errno::IO), (Errno::TIMEDOUT, Errno::TIMEDOUT)] {
        world.line.fail(1, errno);
        assert_eq!(world.read(&opened, 0, 10), Err(seen));
    }
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
    world.is_charged();
    world.put("small", b"few");
    world.line.fail(1, Errno::TIMEDOUT);
    assert_eq!(world.open("small", libc::O_RDONLY).err(), Some(Errno::TIMEDOUT));
    let opened = world.open("small", libc::O_RDONLY).unwrap();
    assert_eq!(world.read(&opened, 0, 10).unwrap(), b"few");
    world.close(opened);
    world.is_charged();
}

#[test]
fn bytes_of_two_versions_are_never_mixed() {
    let world = World::new(ROOMY);
    let (old, new) = (pattern(4 * CHUNK, 12), pattern(4 * CHUNK, 13));
    world.put("f", &old);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read(&reader, 0, 1000).unwrap() == old[..1000]);
    world.put("f", &new);
    assert_eq!(world.read(&reader, 3 * CHUNK, 1000), Err(Errno::STALE));
    assert!(world.read(&reader, 500, 1000).unwrap() == old[500..1500]);
    world.close(reader);
    let again = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&again, MIB).unwrap() == new);
    world.close(again);
    // The store's file changes between the look-up and the open.
    world.put("g", b"older");
    let id = world.find("g").unwrap();
    world.put("g", b"and newer");
    match world.namespace.files.opener.open_file(&world.caller, id, libc::O_RDONLY) {
        Ok(opened) => assert_eq!(world.read(&opened, 0, 100).unwrap(), b"and newer"),
        Err(fault) => assert_eq!(fault.errno, Errno::STALE),
    }
}

#[test]
fn drain_changes_do_not_disturb_readers() {
    let mut world = World::new(ROOMY);
    let bytes = pattern(4 * CHUNK + 1, 14);
    for name in ["renamed", "deleted", "replaced", "chmodded"] {
        world.put(name, &bytes);
    }
    world.line.delay(Duration::from_millis(10));
    let caller = world.caller;
    let handles: Vec<_> = ["renamed", "deleted", "replaced", "chmodded"]
        .map(|name| {
            let opened = world.open(name, libc::O_RDONLY).unwrap();
            assert!(world.read(&opened, 0, 10).unwrap() == bytes[..10]);
            opened
        })
        .into();
    let namespace = world.namespace.clone();
    namespace.names.rename(&caller, FileId::ROOT, b"renamed", FileId::ROOT, b"elsewhere", 0).unwrap();
    namespace.names.unlink(&caller, FileId::ROOT, b"deleted").unwrap();
    let other = world.create("other").unwrap();
    world.write(&other, 0, b"other").unwrap();
    world.close(other);
    namespace.names.rename(&caller, FileId::ROOT, b"other", FileId::ROOT, b"replaced", 0).unwrap();
    let change = surgetank_core::namespace::SetAttr { perm: Some(0o600), ..Default::default() };
    namespace.attributes.setattr(&caller, world.find("chmodded").unwrap(), None, &change).unwrap();
    world.settle();
    assert!(!world.in_store("deleted").exists());
    assert_eq!(std::fs::read(world.in_store("replaced")).unwrap(), b"other");
    assert!(world.in_store("elsewhere").exists());
    for opened in handles {
        assert!(world.read_on(&opened, MIB).unwrap() == bytes);
        world.close(opened);
    }
    world.is_charged();
    assert!(namespace.base.notes.troubles().is_empty(), "{:?}", namespace.base.notes.troubles());
}

#[test]
fn operations_beyond_the_store_are_refused_at_once() {
    let mut world = World::new(ROOMY);
    world.put("f", b"f");
    world.put("g", b"g");
    let (namespace, caller) = (world.namespace.clone(), world.caller);
    let id = world.find("f").unwrap();
    let linked = namespace.names.link(&caller, id, FileId::ROOT, b"h").map(drop).map_err(|fault| fault.errno);
    assert_eq!(linked, Err(Errno::PERM));
    let exchanged = namespace.names.rename(&caller, FileId::ROOT, b"f", FileId::ROOT, b"g", libc::RENAME_EXCHANGE);
    assert_eq!(exchanged.map_err(|fault| fault.errno), Err(Errno::INVAL));
    // The first name of the file is not a link.
    let (found, opened) = namespace.names.create_unnamed(&caller, FileId::ROOT, 0o644, libc::O_RDWR).unwrap();
    world.write(&opened, 0, b"unnamed").unwrap();
    namespace.names.link(&caller, found.id, FileId::ROOT, b"h").unwrap();
    assert_eq!(
        namespace.names.link(&caller, found.id, FileId::ROOT, b"i").map(drop).map_err(|fault| fault.errno),
        Err(Errno::PERM)
    );
    world.close(opened);
    // Names that the namespace could never keep.
    let bad: &[u8] = b"\xff\xfe";
    let refused = Err(Errno::ILSEQ);
    assert_eq!(
        namespace.names.create(&caller, FileId::ROOT, bad, 0o644, libc::O_RDWR).map(drop).map_err(|f| f.errno),
        refused
    );
    assert_eq!(namespace.names.mkdir(&caller, FileId::ROOT, bad, 0o755).map(drop).map_err(|f| f.errno), refused);
    assert_eq!(namespace.names.symlink(&caller, FileId::ROOT, bad, b"f").map(drop).map_err(|f| f.errno), refused);
    assert_eq!(namespace.names.rename(&caller, FileId::ROOT, b"f", FileId::ROOT, bad, 0).map_err(|f| f.errno), refused);
    world.settle();
    assert_eq!(std::fs::read(world.in_store("h")).unwrap(), b"unnamed");
}

#[test]
fn writer_without_room_gets_the_error_after_its_wait() {
    let wait = Duration::from_millis(300);
    let mut world = World::with(4 * MIB, |config| config.wait_for_room = wait);
    let first = world.create("first").unwrap();
    world.write(&first, 0, &pattern(3 * MIB, 15)).unwrap();
    assert!(world.namespace.files.room_waits.short_of_room().is_empty(), "it waited");
    let second = world.create("second").unwrap();
    let begun = Instant::now();
    assert_eq!(world.write(&second, 0, &pattern(2 * MIB, 16)), Err(Errno::NOSPC));
    assert!(begun.elapsed() >= wait);
    assert!(
        world
            .namespace
            .files
            .room_waits
            .short_of_room()
            .iter()
            .any(|short| short.refused && short.why.contains("s3://test"))
    );
    // A file cannot be fetched for writing either.
    world.put("large", &pattern(2 * MIB, 17));
    assert_eq!(world.open("large", libc::O_RDWR).err(), Some(Errno::NOSPC));
    // The drain makes room in the end.
    world.close(first);
    world.start_drain();
    assert_eq!(world.write(&second, 0, &pattern(2 * MIB, 16)), Ok(2 << 20));
    world.close(second);
    world.settle();
    assert!(std::fs::read(world.in_store("second")).unwrap() == pattern(2 * MIB, 16));
    let large = world.open("large", libc::O_RDWR).unwrap();
    world.close(large);
    world.is_charged();
}

#[test]
fn prefetched_and_scrubbed_like_any_other() {
    let world = World::new(ROOMY);
    let bytes = pattern(2 * CHUNK + 1, 18);
    world.put("f", &bytes);
    let id = world.find("f").unwrap();
    assert_eq!(world.namespace.prefetch.prefetch(id, &|| false).unwrap(), bytes.len() as u64);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
    assert!(world.namespace.files.scrub.scrub(false).findings.is_empty());
}

/// The drain changes the file's attributes, or another client writes it. Regression: the prefetch failed.
#[test]
fn file_changed_during_a_prefetch_is_prefetched() {
    let mut world = World::new(ROOMY);
    let (bytes, newer) = (pattern(2 * CHUNK + 1, 18), pattern(2 * CHUNK, 19));
    for name in ["chmodded", "written"] {
        world.put(name, &bytes);
    }
    let [chmodded, written] = ["chmodded", "written"].map(|name| world.find(name).unwrap());
    world.start_drain();
    world.line.delay(Duration::from_millis(200));
    let (namespace, caller) = (world.namespace.clone(), world.caller);
    std::thread::scope(|scope| {
        let prefetched = [chmodded, written].map(|id| {
            let namespace = &namespace;
            scope.spawn(move || namespace.prefetch.prefetch(id, &|| false).unwrap())
        });
        std::thread::sleep(Duration::from_millis(50));
        let change = surgetank_core::namespace::SetAttr { perm: Some(0o600), ..Default::default() };
        namespace.attributes.setattr(&caller, chmodded, None, &change).unwrap();
        world.put("written", &newer);
        let [chmodded, written] = prefetched.map(|one| one.join().unwrap());
        assert_eq!(chmodded, bytes.len() as u64, "only its attributes changed");
        assert!([0, newer.len() as u64].contains(&written), "{written}");
    });
    let opened = world.open("written", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&opened, MIB).unwrap() == newer);
    world.close(opened);
}

#[test]
fn program_continues_reading_after_an_agent_kill() {
    let world = World::new(ROOMY);
    let bytes = pattern(4 * CHUNK + 1, 19);
    world.put("large", &bytes);
    world.put("small", b"small");
    world.put("deleted", &bytes);
    let [large, small, deleted] = ["large", "small", "deleted"].map(|name| world.open(name, libc::O_RDONLY).unwrap());
    assert!(world.read(&large, CHUNK, 1000).unwrap() == bytes[CHUNK as usize..][..1000]);
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"deleted").unwrap();
    let mut world = world.die();
    assert_eq!(world.read(&small, 0, 10).unwrap(), b"small");
    assert_eq!(world.line.requests(), 0);
    assert!(world.read_on(&large, MIB).unwrap() == bytes);
    world.settle();
    assert!(!world.in_store("deleted").exists());
    assert!(world.read_on(&deleted, MIB).unwrap() == bytes);
    for opened in [large, small, deleted] {
        world.close(opened);
    }
    world.is_charged();
}

/// Regression: a killed agent's request could reach the server after the next agent had removed temporaries. Its
/// temporary stayed in the store.
#[test]
fn late_temporary_of_a_killed_agent_is_removed() {
    for ends in [true, false] {
        let mut world = World::new(ROOMY);
        world.put("read", b"read");
        // Temporaries may appear while the file is open.
        let reading = world.open("read", libc::O_RDONLY).unwrap();
        let made = world.create("made").unwrap();
        world.write(&made, 0, b"made").unwrap();
        world.close(made);
        world.settle();
        let mut world = world.die();
        let late = world.in_store(&format!(".surgetank-tmp-{}-77", world.namespace.key()));
        let others = world.in_store(".surgetank-tmp-another-77");
        [&late, &others].iter().for_each(|path| std::fs::write(path, "half").unwrap());
        world.close(reading);
        world.settle();
        if ends {
            world.stop_drain();
        } else {
            let until = Instant::now() + Duration::from_secs(20);
            while late.exists() {
                assert!(Instant::now() < until, "it stays");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        assert!(!late.exists() && others.exists());
        assert_eq!(std::fs::read(world.in_store("made")).unwrap(), b"made");
    }
}

/// The agent dies after it made a file and before it answered; the program asks the next agent. Regression: another
/// program's fsync published the file empty.
#[test]
fn unanswered_create_is_drained_with_its_content() {
    let world = World::with(ROOMY, |config| config.fsync = Some(FsyncTarget::Store));
    let made = world.create("made").unwrap();
    world.close(made);
    let mut world = world.die();
    world.start_drain();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let other = world.create("other").unwrap();
            world.write(&other, 0, b"other").unwrap();
            world.namespace.files.syncs.fsync(other.handle, false).unwrap();
            world.close(other);
        });
        std::thread::sleep(Duration::from_millis(500));
        assert!(!world.in_store("made").exists() && !other.is_finished(), "it was drained before it was written");
        let again = world.open("made", libc::O_WRONLY).unwrap();
        world.write(&again, 0, b"made").unwrap();
        world.close(again);
    });
    world.settle();
    assert_eq!(std::fs::read(world.in_store("made")).unwrap(), b"made");
    assert_eq!(std::fs::read(world.in_store("other")).unwrap(), b"other");
}

#[test]
fn readers_writers_and_evictions_on_a_small_tier() {
    let mut world = World::with(5 * CHUNK, |config| config.wait_for_room = Duration::from_secs(10));
    let names = ["a", "b", "c"];
    let contents: Vec<Vec<u8>> = (0..3).map(|salt| pattern((salt + 2) * CHUNK + salt * 1000, 20 + salt)).collect();
    for (name, bytes) in names.iter().zip(&contents) {
        world.put(name, bytes);
    }
    world.start_drain();
    let until = Instant::now() + Duration::from_secs(5);
    std::thread::scope(|scope| {
        for reader in 0..4_usize {
            let (world, contents) = (&world, &contents);
            scope.spawn(move || {
                let mut turn = reader;
                while Instant::now() < until {
                    turn += 1;
                    let (name, bytes) = (names[turn % 3], &contents[turn % 3]);
                    let opened = world.open(name, libc::O_RDONLY).unwrap();
                    if reader < 2 {
                        assert!(world.read_on(&opened, 512 << 10).unwrap() == *bytes);
                    } else {
                        for step in 0..20 {
                            let at = (turn * 7919 + step * 1_048_583) % bytes.len();
                            let end = bytes.len().min(at + 3000);
                            assert!(world.read(&opened, at as u64, 3000).unwrap() == bytes[at..end]);
                        }
                    }
                    world.close(opened);
                }
            });
        }
        let world = &world;
        scope.spawn(move || {
            for number in 0_u64.. {
                if Instant::now() >= until {
                    return;
                }
                let bytes = pattern(MIB + number, number);
                let opened = world.create("w").unwrap();
                world.write(&opened, 0, &bytes).unwrap();
                world.close(opened);
                world.namespace.names.unlink(&world.caller, FileId::ROOT, b"w").unwrap();
            }
        });
    });
    world.settle();
    world.is_charged();
}

/// Regression: one failed request was enough, and the reader of a deleted file lost the rest of it.
#[test]
fn deleted_open_file_survives_one_store_error() {
    let mut world = World::new(ROOMY);
    let bytes = pattern(4 * CHUNK + 1, 21);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read(&opened, 0, 10).unwrap() == bytes[..10]);
    world.line.fail(6, Errno::TIMEDOUT);
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"f").unwrap();
    world.settle();
    assert!(!world.in_store("f").exists());
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
    assert_eq!(world.namespace.base.notes.troubles().len(), 0, "{:?}", world.namespace.base.notes.troubles());
}

/// The rest of the content comes from the file's last name in the store. Regression: its reader lost it.
#[test]
fn renamed_and_deleted_file_stays_readable_while_open() {
    let mut world = World::new(ROOMY);
    let bytes = pattern(4 * CHUNK + 1, 22);
    world.put("f", &bytes);
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read(&opened, 0, 10).unwrap() == bytes[..10]);
    world.namespace.names.rename(&world.caller, FileId::ROOT, b"f", FileId::ROOT, b"g", 0).unwrap();
    world.settle();
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"g").unwrap();
    world.settle();
    assert!(!world.in_store("g").exists());
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
}
