//! Prefetch of files that programs have open: under mediated readers, and for passed-through readers after their last close.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::fetch::world::{Kind, MIB, World, pattern};
use surgetank_core::namespace::{Grant, SetAttr};
use surgetank_types::model::FileId;

const ROOMY: u64 = 1 << 30;
const SIZE: u64 = 9 * MIB + 77;

fn mediated() -> World {
    World::of(Kind { plain: true, direct: false }, ROOMY, |config| config.copy_up_bytes_max = ROOMY)
}

fn passed_through() -> World {
    World::of(Kind { plain: true, direct: true }, ROOMY, |config| config.copy_up_bytes_max = ROOMY)
}

/// Prefetches a file, and runs `meanwhile` once during the copy. Returns the copied bytes, and the number of times that the
/// copy checked whether to continue.
fn prefetch(world: &World, id: FileId, meanwhile: impl Fn() + Sync) -> (u64, u64) {
    let (checks, events) = (AtomicU64::new(0), AtomicBool::new(false));
    let bytes = world.namespace.prefetch.prefetch(id, &|| {
        // (At the second check the source is open, and a part of it is copied.)
        if checks.fetch_add(1, Ordering::SeqCst) == 1 && !events.swap(true, Ordering::SeqCst) {
            meanwhile();
        }
        false
    });
    (bytes.unwrap(), checks.into_inner())
}

/// The number of checks of one copy.
fn checks_of_one_copy(bytes: &[u8]) -> u64 {
    let world = mediated();
    world.put("f", bytes);
    prefetch(&world, world.find("f").unwrap(), || ()).1
}

fn hits(world: &World) -> u64 {
    world.namespace.base.tiers.devices().map(|device| device.counters().hits.load(Ordering::Relaxed)).sum()
}

fn from_tiers(world: &World) -> u64 {
    world.namespace.base.tiers.devices().map(|device| device.counters().bytes_out.load(Ordering::Relaxed)).sum()
}

fn nothing_is_left(world: &World) {
    assert_eq!((world.used_bytes(), world.on_tiers()), (0, 0));
    assert_eq!(world.namespace.metadata.dirty_bytes(), 0);
}

/// Regression: the agent prefetched an open file only after every reader had closed it.
#[test]
fn open_file_is_prefetched_while_readers_have_it() {
    let world = mediated();
    let bytes = pattern(SIZE, 1);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(reader.grant, Grant::Mediated);
    assert!(world.read(&reader, 0, MIB).unwrap() == bytes[..MIB as usize]);
    assert_eq!(from_tiers(&world), 0);
    let other = std::cell::Cell::new(None);
    let id = world.find("f").unwrap();
    let (brought, _) = prefetch(&world, id, || ());
    assert_eq!(brought, SIZE);
    world.is_charged();
    assert!(world.used_bytes() >= SIZE);
    assert_eq!(world.namespace.metadata.dirty_bytes(), 0, "the copy counts as dirty");
    // Later and earlier readers read the copy.
    other.set(Some(world.open("f", libc::O_RDONLY).unwrap()));
    let other = other.take().unwrap();
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    assert!(world.read_on(&other, MIB).unwrap() == bytes);
    assert!(from_tiers(&world) >= 2 * SIZE);
    assert_eq!(prefetch(&world, id, || ()), (0, 0), "the copy was made again");
    assert_eq!(world.namespace.files.eviction.evict(id, "it is open").unwrap(), 0);
    world.close(reader);
    world.close(other);
    world.is_charged();
    assert!(world.namespace.files.eviction.evict(id, "it may go").unwrap() >= SIZE);
    nothing_is_left(&world);
    let again = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&again, MIB).unwrap() == bytes);
    world.close(again);
}

#[test]
fn reader_sees_the_same_bytes_while_the_copy_replaces_them() {
    let world = mediated();
    let bytes = pattern(SIZE, 2);
    world.put("f", &bytes);
    let id = world.find("f").unwrap();
    for _ in 0..5 {
        let reader = world.open("f", libc::O_RDONLY).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    assert!(world.read_on(&reader, 100_000).unwrap() == bytes);
                }
                assert!(world.read_on(&reader, MIB).unwrap() == bytes);
            });
            let brought = world.namespace.prefetch.prefetch(id, &|| false);
            done.store(true, Ordering::SeqCst);
            assert_eq!(brought.unwrap(), SIZE);
        });
        world.close(reader);
        world.namespace.files.eviction.evict(id, "once more").unwrap();
        nothing_is_left(&world);
    }
}

#[test]
fn deleted_file_leaves_the_tier_with_its_last_reader() {
    let mut world = mediated();
    let bytes = pattern(SIZE, 3);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(prefetch(&world, world.find("f").unwrap(), || ()).0, SIZE);
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"f").unwrap();
    world.settle();
    assert!(!world.in_store("f").exists());
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    world.close(reader);
    nothing_is_left(&world);
}

#[test]
fn readers_keep_the_prefetched_copy_after_an_agent_kill() {
    let world = mediated();
    let bytes = pattern(SIZE, 4);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    let id = world.find("f").unwrap();
    assert_eq!(prefetch(&world, id, || ()).0, SIZE);
    let world = world.die();
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    assert!(from_tiers(&world) >= SIZE);
    world.close(reader);
    world.is_charged();
    assert!(world.namespace.files.eviction.evict(id, "it may go").unwrap() >= SIZE);
    nothing_is_left(&world);
}

/// A program writes a file during its copy: the file and its readers have the written bytes.
fn a_writer_wins(mut world: World, with_reader: bool) {
    let mut bytes = pattern(SIZE, 5);
    world.put("f", &bytes);
    let reader = with_reader.then(|| world.open("f", libc::O_RDONLY).unwrap());
    let id = world.find("f").unwrap();
    let writer = std::sync::Mutex::new(None);
    let (brought, checks) = prefetch(&world, id, || {
        let opened = world.open("f", libc::O_RDWR).unwrap();
        world.write(&opened, 5 * MIB, b"newer").unwrap();
        *writer.lock().unwrap() = Some(opened);
    });
    assert_eq!(brought, 0);
    assert!(checks <= checks_of_one_copy(&bytes), "copied more than once");
    bytes[5 * MIB as usize..][..5].copy_from_slice(b"newer");
    if let Some(reader) = reader {
        assert!(world.read_on(&reader, MIB).unwrap() == bytes);
        world.close(reader);
    }
    world.close(writer.into_inner().unwrap().unwrap());
    world.settle();
    assert!(std::fs::read(world.in_store("f")).unwrap() == bytes);
    world.is_charged();
    world.namespace.files.eviction.evict(id, "it may go").unwrap();
    nothing_is_left(&world);
}

#[test]
fn writer_during_a_prefetch_wins() {
    for with_reader in [false, true] {
        a_writer_wins(mediated(), with_reader);
        a_writer_wins(passed_through(), with_reader);
    }
}

/// A program that writes and closes the file during the copy makes a new version. The copy of the earlier version does
/// not replace it.
#[test]
fn write_during_a_prefetch_is_not_covered_by_the_copy() {
    for direct in [false, true] {
        let mut world = if direct { passed_through() } else { mediated() };
        let mut bytes = pattern(SIZE, 6);
        world.put("f", &bytes);
        let reader = world.open("f", libc::O_RDONLY).unwrap();
        let id = world.find("f").unwrap();
        prefetch(&world, id, || {
            let opened = world.open("f", libc::O_RDWR).unwrap();
            world.write(&opened, MIB, b"newer").unwrap();
            world.close(opened);
        });
        bytes[MIB as usize..][..5].copy_from_slice(b"newer");
        assert!(world.read_on(&reader, MIB).unwrap() == bytes);
        world.close(reader);
        world.settle();
        assert!(std::fs::read(world.in_store("f")).unwrap() == bytes);
        let again = world.open("f", libc::O_RDONLY).unwrap();
        assert!(world.read_on(&again, MIB).unwrap() == bytes);
        world.close(again);
        world.is_charged();
        world.namespace.files.eviction.evict(id, "it may go").unwrap();
        nothing_is_left(&world);
    }
}

/// Another client replaces the file or its bytes. Regression: the agent copied the file three times.
#[test]
fn change_in_the_store_during_a_prefetch_ends_the_prefetch() {
    let (bytes, newer) = (pattern(SIZE, 7), pattern(SIZE - MIB, 8));
    let once = checks_of_one_copy(&bytes);
    for direct in [false, true] {
        for replaced in [false, true] {
            for with_reader in [false, true] {
                let world = if direct { passed_through() } else { mediated() };
                world.put("f", &bytes);
                let id = world.find("f").unwrap();
                let reader = with_reader.then(|| world.open("f", libc::O_RDONLY).unwrap());
                let (brought, checks) = prefetch(&world, id, || match replaced {
                    true => world.put("f", &newer),
                    false => std::fs::write(world.in_store("f"), &newer).unwrap(),
                });
                assert_eq!(brought, 0, "direct {direct}, replaced {replaced}, reader {with_reader}");
                assert!(checks <= once, "{checks} instead of {once}: copied again");
                if let Some(reader) = reader {
                    assert!(world.read_on(&reader, MIB).unwrap() == if replaced { &bytes[..] } else { &newer });
                    world.close(reader);
                }
                nothing_is_left(&world);
                let again = world.open("f", libc::O_RDONLY).unwrap();
                assert!(world.read_on(&again, MIB).unwrap() == newer);
                world.close(again);
            }
        }
    }
}

/// Regression: the agent expected a version that the store no longer had, and copied the file three times without success.
#[test]
fn file_changed_before_a_prefetch_is_copied_once() {
    let world = mediated();
    let (bytes, newer) = (pattern(SIZE, 9), pattern(SIZE, 10));
    world.put("f", &bytes);
    let id = world.find("f").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(world.in_store("f"), &newer).unwrap();
    let (brought, checks) = prefetch(&world, id, || ());
    assert_eq!((brought, checks), (SIZE, checks_of_one_copy(&bytes)));
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&reader, MIB).unwrap() == newer);
    assert_eq!(hits(&world), 1);
    world.close(reader);
}

/// A reader has the earlier version open, which the store no longer has.
#[test]
fn readers_of_another_version_keep_theirs() {
    let world = mediated();
    let (bytes, newer) = (pattern(SIZE, 11), pattern(SIZE, 12));
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    let id = world.find("f").unwrap();
    world.put("f", &newer);
    assert_eq!(prefetch(&world, id, || ()), (0, 0));
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    world.close(reader);
    nothing_is_left(&world);
}

#[test]
fn file_deleted_during_a_prefetch_stays_deleted() {
    for direct in [false, true] {
        for with_reader in [false, true] {
            let mut world = if direct { passed_through() } else { mediated() };
            let bytes = pattern(SIZE, 13);
            world.put("f", &bytes);
            let reader = with_reader.then(|| world.open("f", libc::O_RDONLY).unwrap());
            let (brought, checks) = prefetch(&world, world.find("f").unwrap(), || {
                world.namespace.names.unlink(&world.caller, FileId::ROOT, b"f").unwrap();
            });
            assert_eq!(brought, 0);
            assert!(checks <= checks_of_one_copy(&bytes), "copied more than once");
            world.settle();
            assert!(!world.in_store("f").exists());
            if let Some(reader) = reader {
                assert!(world.read_on(&reader, MIB).unwrap() == bytes);
                world.close(reader);
            }
            nothing_is_left(&world);
        }
    }
}

/// The kernel reads the store's file for all readers as long as one of them has it open. Regression: the agent copied
/// such a file and discarded the copy.
#[test]
fn copy_of_a_passed_through_file_waits_for_its_readers() {
    let world = passed_through();
    let bytes = pattern(SIZE, 14);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert!(matches!(reader.grant, Grant::Direct(_)));
    let id = world.find("f").unwrap();
    assert_eq!(prefetch(&world, id, || ()).0, SIZE);
    world.is_charged();
    assert!(world.used_bytes() >= SIZE);
    assert_eq!(world.namespace.metadata.dirty_bytes(), 0, "the waiting copy counts as dirty");
    assert_eq!(prefetch(&world, id, || ()), (0, 0), "the waiting copy was made again");
    let other = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(other.grant, reader.grant, "two readers have different grants");
    world.close(reader);
    assert!(world.read_on(&other, MIB).unwrap() == bytes);
    assert_eq!(hits(&world), 0);
    world.close(other);
    world.is_charged();
    let next = world.open("f", libc::O_RDONLY).unwrap();
    assert!(matches!(next.grant, Grant::Direct(_)));
    assert!(world.read_on(&next, MIB).unwrap() == bytes);
    assert_eq!(hits(&world), 1);
    world.close(next);
    assert!(world.namespace.files.eviction.evict(id, "it may go").unwrap() >= SIZE);
    nothing_is_left(&world);
}

/// A waiting copy is not a copy of the file's next version.
#[test]
fn waiting_copy_is_removed_when_the_file_changes() {
    type Change = fn(&World);
    let changes: [(&str, Change); 6] = [
        ("written", |world| {
            let writer = world.open("f", libc::O_RDWR).unwrap();
            world.write(&writer, MIB, b"newer").unwrap();
            assert_eq!(world.on_tiers(), 0, "the waiting copy still takes room");
            world.close(writer);
        }),
        ("deleted", |world| world.namespace.names.unlink(&world.caller, FileId::ROOT, b"f").unwrap()),
        ("covered", |world| {
            let made = world.create("g").unwrap();
            world.close(made);
            let (root, caller) = (FileId::ROOT, &world.caller);
            world.namespace.names.rename(caller, root, b"g", root, b"f", 0).unwrap();
        }),
        ("another's", |world| world.put("f", b"another")),
        ("another's bytes", |world| {
            let file = std::fs::File::options().write(true).open(world.in_store("f")).unwrap();
            file.write_all_at(b"another", 5).unwrap();
        }),
        ("gone", |world| std::fs::remove_file(world.in_store("f")).unwrap()),
    ];
    for (what, change) in changes {
        let mut world = passed_through();
        world.put("f", &pattern(SIZE, 15));
        let reader = world.open("f", libc::O_RDONLY).unwrap();
        assert_eq!(prefetch(&world, world.find("f").unwrap(), || ()).0, SIZE, "{what}");
        assert!(world.on_tiers() >= SIZE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
        change(&world);
        world.close(reader);
        assert_eq!((world.used_bytes(), world.on_tiers()), (0, 0), "{what}");
        world.settle();
        if let Ok(should) = std::fs::read(world.in_store("f")) {
            let opened = world.open("f", libc::O_RDONLY).unwrap();
            assert!(world.read_on(&opened, MIB).unwrap() == should, "{what}");
            world.close(opened);
        }
    }
}

/// The agent renames the file: the copy has the new name.
#[test]
fn waiting_copy_follows_its_renamed_file() {
    let mut world = passed_through();
    let bytes = pattern(SIZE, 16);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    let id = world.find("f").unwrap();
    assert_eq!(prefetch(&world, id, || ()).0, SIZE);
    let (root, caller) = (FileId::ROOT, world.caller);
    world.namespace.names.rename(&caller, root, b"f", root, b"g", 0).unwrap();
    world.close(reader);
    world.settle();
    let opened = world.open("g", libc::O_RDONLY).unwrap();
    assert!(world.read_on(&opened, MIB).unwrap() == bytes);
    world.close(opened);
    world.is_charged();
    world.namespace.files.eviction.evict(id, "it may go").unwrap();
    nothing_is_left(&world);
}

#[test]
fn waiting_copy_is_evicted_for_room() {
    let world = World::of(Kind { plain: true, direct: true }, 16 * MIB, |config| config.copy_up_bytes_max = ROOMY);
    world.put("f", &pattern(SIZE, 17));
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(prefetch(&world, world.find("f").unwrap(), || ()).0, SIZE);
    let made = world.create("made").unwrap();
    let bytes = pattern(14 * MIB, 18);
    world.write(&made, 0, &bytes).unwrap();
    assert!(world.namespace.base.tiers.devices().all(|device| device.used_bytes() <= 16 * MIB));
    world.close(made);
    world.is_charged();
    let made = world.find("made").unwrap();
    let location = world.namespace.files.eviction.evict(made, "the test evicts a dirty file").unwrap();
    assert_eq!(location, 0);
    assert!(world.on_tiers() >= 14 * MIB, "the waiting copy kept its room, and the written file got none");
    assert!(world.on_tiers() < 14 * MIB + SIZE);
    world.close(reader);
    world.is_charged();
}

#[test]
fn waiting_copy_is_swept_after_an_agent_kill() {
    let world = passed_through();
    let bytes = pattern(SIZE, 19);
    world.put("f", &bytes);
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(prefetch(&world, world.find("f").unwrap(), || ()).0, SIZE);
    let world = world.die();
    nothing_is_left(&world);
    assert!(world.read_on(&reader, MIB).unwrap() == bytes);
    world.close(reader);
    nothing_is_left(&world);
}

#[test]
fn waiting_copy_is_removed_at_the_end() {
    let mut world = passed_through();
    world.put("f", &pattern(SIZE, 20));
    let reader = world.open("f", libc::O_RDONLY).unwrap();
    assert_eq!(prefetch(&world, world.find("f").unwrap(), || ()).0, SIZE);
    world.settle();
    assert!(world.namespace.emptying.finish());
    nothing_is_left(&world);
    world.close(reader);
    nothing_is_left(&world);
}

/// Regression: the copy on the tier had the mode from before the change.
#[test]
fn mode_set_during_a_prefetch_holds_for_the_copy() {
    for with_reader in [false, true] {
        let world = mediated();
        let bytes = pattern(SIZE, 21);
        world.put("f", &bytes);
        let reader = with_reader.then(|| world.open("f", libc::O_RDONLY).unwrap());
        let id = world.find("f").unwrap();
        let (brought, _) = prefetch(&world, id, || {
            let change = SetAttr { perm: Some(0o750), ..SetAttr::default() };
            world.namespace.attributes.setattr(&world.caller, id, None, &change).unwrap();
        });
        assert_eq!(brought, SIZE);
        let mut modes = Vec::new();
        for device in world.namespace.base.tiers.devices() {
            let file = device.open(b"f", false).unwrap();
            modes.push(std::os::unix::fs::MetadataExt::mode(&file.metadata().unwrap()) & 0o777);
        }
        assert_eq!(modes, [0o750]);
        if let Some(reader) = reader {
            world.close(reader);
        }
    }
}
