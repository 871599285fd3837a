//! The negative cache: many files are created in a directory that the store already has.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::fetch::world::{Kind, World, pattern};
use surgetank_types::error::Errno;
use surgetank_types::model::FileId;

const ROOMY: u64 = 1 << 30;

fn world(ttl: Duration) -> World {
    World::of(Kind { plain: true, direct: false }, ROOMY, |config| config.store_ttl = ttl)
}

fn make(world: &World, name: &str) {
    let made = world.create(name).unwrap();
    world.write(&made, 0, name.as_bytes()).unwrap();
    world.close(made);
}

/// Counts of the store's look-ups and listings.
fn requests(world: &World) -> (u64, u64) {
    let counters = &world.namespace.base.counters;
    (counters.store_stats.load(Ordering::Relaxed), counters.store_lists.load(Ordering::Relaxed))
}

/// Regression: the agent looked up each new file in the store, although it had listed the directory.
#[test]
fn new_files_in_a_listed_directory_cost_no_lookups() {
    let mut world = world(Duration::from_secs(600));
    for number in 0..50 {
        world.put(&format!("old-{number}"), b"theirs");
    }
    for number in 0..500 {
        make(&world, &format!("new-{number}"));
    }
    let (lookups, listings) = requests(&world);
    assert!(lookups <= 10 && listings == 1, "{lookups} look-ups, {listings} listings for 500 files");
    // Files of the store are found, including those of other clients.
    world.settle();
    for number in 0..50 {
        assert!(world.find(&format!("old-{number}")).is_ok());
        let again = world.namespace.names.create(
            &world.caller,
            FileId::ROOT,
            format!("old-{number}").as_bytes(),
            0o644,
            libc::O_RDWR | libc::O_EXCL,
        );
        assert_eq!(again.unwrap_err().errno, Errno::EXIST);
    }
    assert_eq!(std::fs::read(world.in_store("new-499")).unwrap(), b"new-499");
}

/// A program makes a file, and the agent drains, evicts and forgets it while an older listing is valid. Regression: the
/// file was absent.
#[test]
fn evicted_file_is_found_while_an_older_listing_is_valid() {
    let mut world = world(Duration::from_secs(600));
    for number in 0..20 {
        make(&world, &format!("early-{number}"));
    }
    make(&world, "ours");
    world.settle();
    let id = world.find("ours").unwrap();
    world.namespace.resolver.forget(id, u64::from(u32::MAX));
    world.namespace.files.eviction.evict(id, "a test").unwrap();
    let again = world.open("ours", libc::O_RDONLY).unwrap();
    assert_eq!(world.read(&again, 0, 100).unwrap(), b"ours");
    world.close(again);
    let id = world.find("ours").unwrap();
    world.namespace.resolver.forget(id, u64::from(u32::MAX));
    assert!(world.find("ours").is_ok(), "the store has the file");
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"ours").unwrap();
    assert_eq!(world.find("ours").unwrap_err(), Errno::NOENT);
    world.settle();
    assert_eq!(world.find("ours").unwrap_err(), Errno::NOENT);
    assert!(!world.in_store("ours").exists());
}

#[test]
fn file_of_another_client_appears_after_store_ttl() {
    let ttl = Duration::from_millis(300);
    let world = world(ttl);
    for number in 0..20 {
        make(&world, &format!("new-{number}"));
    }
    assert_eq!(requests(&world).1, 1);
    world.put("theirs", b"theirs");
    world.put(".hidden", b"theirs");
    assert!(world.find(".hidden").is_ok(), "names with a dot are not looked up");
    let put = Instant::now();
    while world.find("theirs").is_err() {
        assert!(put.elapsed() < ttl + Duration::from_secs(60), "never seen");
        std::thread::sleep(Duration::from_millis(10));
    }
    // `refresh_all` takes effect at once.
    for number in 0..20 {
        make(&world, &format!("newer-{number}"));
    }
    world.put("later", b"theirs");
    world.namespace.revalidation.refresh_all();
    assert!(world.find("later").is_ok());
}

#[test]
fn large_directory_is_looked_up_by_name() {
    let world = world(Duration::from_secs(600));
    for number in 0..5000 {
        std::fs::write(world.in_store(&format!("old-{number}")), pattern(8, number)).unwrap();
    }
    for number in 0..100 {
        make(&world, &format!("new-{number}"));
    }
    let (lookups, listings) = requests(&world);
    assert!(lookups >= 100 && listings == 1, "{lookups} look-ups, {listings} listings");
    assert!(world.find("old-4999").is_ok());
}

/// Regression: a name that the listing showed was absent when a program opened it.
#[test]
fn name_shown_by_a_listing_can_be_opened() {
    let mut world = world(Duration::from_secs(600));
    for number in 0..20 {
        make(&world, &format!("new-{number}"));
    }
    world.put("theirs", b"theirs");
    assert_eq!(world.find("theirs").unwrap_err(), Errno::NOENT);
    let listing = world.namespace.listings.opendir(&world.caller, FileId::ROOT).unwrap();
    let names = world.namespace.listings.listing(listing.fh, 0).unwrap();
    assert!(names.iter().any(|listed| *listed.name == *b"theirs"));
    assert!(world.find("theirs").is_ok());
    // So can a file that the drain renames because another client had the name first.
    world.put("new-5", b"theirs");
    world.settle();
    let conflict = std::fs::read_dir(world.in_store("")).unwrap().map(|entry| entry.unwrap().file_name());
    let conflict =
        conflict.map(|name| name.into_string().unwrap()).find(|name| name.starts_with("new-5.surgetank-conflict"));
    assert!(world.find(&conflict.expect("only one file is kept")).is_ok());
}

/// Regression: the agent made the directory again, and never showed the other node's files in it.
#[test]
fn mkdir_fails_when_another_node_made_the_directory() {
    let world = world(Duration::from_secs(600));
    for number in 0..20 {
        make(&world, &format!("new-{number}"));
    }
    std::fs::create_dir(world.in_store("shared")).unwrap();
    let made = world.namespace.names.mkdir(&world.caller, FileId::ROOT, b"shared", 0o755);
    assert_eq!(made.unwrap_err().errno, Errno::EXIST);
}

/// Regression: the look-up of a store's file with a hint wrote a record to the catalog, even in a run that only reads.
#[test]
fn lookup_of_a_hinted_store_file_writes_no_record() {
    let world = world(Duration::from_secs(600));
    world.put("theirs", b"theirs");
    let hints = [("mode".to_owned(), "keep".to_owned())].into();
    assert!(world.namespace.hints.hint(&[(b"theirs", &hints)]).is_empty());
    let before = world.namespace.base.catalog.position();
    world.find("theirs").unwrap();
    assert_eq!(world.namespace.base.catalog.position(), before);
}
