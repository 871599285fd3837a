//! Queries with a timeout, to a store whose server does not answer: a program gets an error after the timeout. Operations that
//! need no answer succeed at once. The agent waits for a slow server.

#![allow(clippy::unwrap_used, clippy::expect_used)] // a test reports by a panic

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::fetch::world::{CHUNK, MIB, World, pattern};
use surgetank_testkit::stores::ranges_only::Held;
use surgetank_types::error::{Errno, Fault};
use surgetank_types::model::FileId;

const ROOMY: u64 = 1 << 30;

fn errno<T>(outcome: Result<T, Fault>) -> Option<Errno> {
    outcome.err().map(|fault| fault.errno)
}

/// The number of names in the directory.
fn list(world: &World, dir: FileId) -> Result<usize, Fault> {
    let listing = world.namespace.listings.opendir(&world.caller, dir)?;
    let listed = world.namespace.listings.listing(listing.fh, 0).map(|names| names.len());
    world.namespace.listings.releasedir(listing.fh);
    listed
}

#[test]
fn silent_server_gives_an_error_after_retry() {
    let world = World::new(ROOMY);
    world.put("old", &pattern(MIB, 1));
    let (namespace, caller) = (&world.namespace, &world.caller);
    world.find("old").unwrap();
    world.line.hold(Held::All);
    assert_eq!(errno(namespace.names.mkdir(caller, FileId::ROOT, b"new", 0o755)), Some(Errno::TIMEDOUT));
    assert_eq!(world.find("old").err(), Some(Errno::TIMEDOUT));
    assert_eq!(errno(list(&world, FileId::ROOT)), Some(Errno::TIMEDOUT));
    assert!(namespace.base.queries.silent_for().is_some());
    world.line.answer();
    while namespace.base.queries.silent_for().is_some() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let opened = world.open("old", libc::O_RDONLY).unwrap();
    assert_eq!(world.read_on(&opened, MIB).unwrap(), pattern(MIB, 1));
    world.close(opened);
    namespace.names.mkdir(caller, FileId::ROOT, b"new", 0o755).unwrap();
}

#[test]
fn names_in_a_made_directory_need_no_server() {
    let mut world = World::new(ROOMY);
    let (namespace, caller) = (world.namespace.clone(), world.caller);
    let made = namespace.names.mkdir(&caller, FileId::ROOT, b"made", 0o755).unwrap().id;
    namespace.names.mkdir(&caller, made, b"sub", 0o755).unwrap();
    world.settle();
    world.stop_drain();
    world.line.hold(Held::All);
    let before = world.line.questions();
    let new = namespace.names.mkdir(&caller, made, b"new", 0o755).unwrap().id;
    namespace.names.mkdir(&caller, new, b"deep", 0o755).unwrap();
    namespace.names.symlink(&caller, made, b"link", b"new").unwrap();
    let (_, opened) = namespace.names.create(&caller, new, b"file", 0o644, libc::O_RDWR).unwrap();
    world.write(&opened, 0, b"content").unwrap();
    world.close(opened);
    assert_eq!(errno(namespace.resolver.lookup(&caller, made, b"absent")), Some(Errno::NOENT));
    namespace.names.rename(&caller, made, b"sub", new, b"sub", 0).unwrap();
    namespace.names.rmdir(&caller, new, b"deep").unwrap();
    assert_eq!(list(&world, made).unwrap(), 2);
    assert_eq!(world.line.questions(), before, "the server got a query");
    world.line.answer();
}

#[test]
fn slow_server_is_waited_for() {
    let world = World::new(ROOMY);
    world.put("old", b"old");
    world.line.hold(Held::Listings);
    let answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lister = scope.spawn(|| {
            let listing = list(&world, FileId::ROOT);
            answered.store(true, Ordering::SeqCst);
            listing
        });
        // The listing, and one other question in each `retry` interval.
        while world.line.questions() < 4 && !answered.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!answered.load(Ordering::SeqCst), "the listing ended although the server answers other queries");
        world.line.answer();
        assert_eq!(lister.join().unwrap().unwrap(), 1);
    });
}

/// A deleted file does not stay in a store that never returns the rest of its bytes.
#[test]
fn unreadable_deleted_file_is_removed_in_the_end() {
    let mut world = World::new(ROOMY);
    world.put("f", &pattern(4 * CHUNK + 1, 23));
    let opened = world.open("f", libc::O_RDONLY).unwrap();
    world.line.fail(u64::MAX, Errno::IO);
    world.namespace.names.unlink(&world.caller, FileId::ROOT, b"f").unwrap();
    world.settle();
    assert!(!world.in_store("f").exists());
    assert_eq!(world.read(&opened, 0, 10), Err(Errno::IO));
    world.close(opened);
}
