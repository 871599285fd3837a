use std::sync::atomic::Ordering;

use super::memory::Memory;
use super::*;
use crate::conformance::{self, deliver, errno, me, meta, names, no_gate, noise, path, read, source, staged};

pub struct World {
    pub server: Arc<Memory>,
    state: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self { server: Arc::default(), state: tempfile::tempdir().unwrap() }
    }
    /// A store of another agent, as after a crash.
    fn store(&self) -> ObjectStore {
        ObjectStore::new(self.server.clone(), self.state.path(), Verify::Cache, Duration::from_secs(60)).unwrap()
    }
}

#[test]
fn object_store_conforms() {
    let state = tempfile::tempdir().unwrap();
    conformance::conform(|| {
        let server = Arc::<Memory>::default();
        Box::new(ObjectStore::new(server, state.path(), Verify::Reread, Duration::ZERO).unwrap())
    });
}

#[test]
fn renamed_directory_keeps_entries_and_inode_number() {
    let world = World::new();
    let store = world.store();
    for n in 0..20 {
        deliver(&store, &format!("d/sub/f{n}"), &noise(100 + n), &meta(0o640));
    }
    let before = store.stat(me(), &path("d")).unwrap();
    let file = store.stat(me(), &path("d/sub/f7")).unwrap();
    store.rename(me(), &path("d"), &path("e")).unwrap();
    assert_eq!(store.stat(me(), &path("e")).unwrap().identity.ino, before.identity.ino);
    assert_eq!(store.stat(me(), &path("e/sub/f7")).unwrap().identity.ino, file.identity.ino);
    assert_eq!(errno(store.stat(me(), &path("d"))), libc::ENOENT);
    assert_eq!(names(&store, "e/sub", true).len(), 20);
    assert_eq!(read(&store, "e/sub/f19"), noise(119));
    // A directory stays after the removal of its last file.
    for n in 0..20 {
        store.unlink(me(), &path(&format!("e/sub/f{n}"))).unwrap();
    }
    assert!(names(&store, "e/sub", true).is_empty());
    assert_eq!(errno(store.remove_dir(me(), &path("e"))), libc::ENOTEMPTY);
    store.remove_dir(me(), &path("e/sub")).unwrap();
    store.remove_dir(me(), &path("e")).unwrap();
    assert_eq!(world.server.keys(), [keys::MARK]);
}

#[test]
fn upload_of_killed_agent_is_continued() {
    let world = World::new();
    let bytes = noise((100 << 20) + 5);
    let file = source(&bytes);
    let stop = std::sync::atomic::AtomicU64::new(90);
    let gate = |_| match stop.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
        Ok(_) => Ok(()),
        Err(_) => Err(io::ErrorKind::Interrupted.into()),
    };
    let temporary = path(".surgetank-tmp-1");
    let first = world.store();
    first.stage_file(me(), &temporary, &path("big"), &file, &meta(0o600), &gate).unwrap_err();
    drop(first);
    let id = world.server.uploads("big").unwrap()[0].id.clone();
    let there: u64 = world.server.parts("big", &id).unwrap().iter().map(|part| part.size_bytes).sum();
    assert!(there > 0, "no part is complete, although at most 60 of 90 MiB belong to incomplete parts");
    let sent = std::sync::atomic::AtomicU64::new(0);
    let count = |bytes| {
        sent.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    };
    let second = world.store();
    let copy = second.stage_file(me(), &temporary, &path("big"), &file, &meta(0o600), &count).unwrap();
    assert_eq!(sent.load(Ordering::SeqCst), bytes.len() as u64 - there, "complete parts were sent again");
    assert!(second.check(me(), &path("big"), &Expect::Absent).unwrap());
    assert_eq!(errno(second.stat(me(), &path("big"))), libc::ENOENT, "the file is visible before it is complete");
    let identity = second.publish(me(), &temporary, &path("big"), &meta(0o600)).unwrap();
    assert_eq!(identity.ino, copy.identity.ino);
    assert!(read(&second, "big") == bytes);
    assert!(world.server.uploads("").unwrap().is_empty());
    // An upload without its temporary is removed.
    world.store().stage_file(me(), &temporary, &path("other"), &file, &meta(0o600), no_gate()).unwrap();
    assert_eq!(world.server.uploads("").unwrap().len(), 1);
    assert_eq!(world.store().collect().unwrap(), 1);
    assert!(world.server.uploads("").unwrap().is_empty());
}

#[test]
fn large_file_renamed_after_staging_is_sent_to_new_name() {
    let world = World::new();
    let store = world.store();
    let bytes = noise((20 << 20) + 1);
    let (temporary, _) = staged(&store, "meant", &source(&bytes), &meta(0o600));
    assert!(store.check(me(), &path("elsewhere"), &Expect::Absent).unwrap());
    store.publish(me(), &temporary, &path("elsewhere"), &meta(0o600)).unwrap();
    assert!(read(&store, "elsewhere") == bytes);
    assert_eq!(errno(store.stat(me(), &path("meant"))), libc::ENOENT);
    assert!(world.server.uploads("").unwrap().is_empty());
}

#[test]
fn first_of_two_publications_keeps_the_name() {
    let world = World::new();
    let store = world.store();
    let (temporary, _) = staged(&store, "f", &source(b"ours"), &meta(0o600));
    assert!(store.check(me(), &path("f"), &Expect::Absent).unwrap());
    let theirs = b"theirs";
    world.server.put("f", &&theirs[..], crate::checksum::of_bytes(theirs), &Words::new(), When::Always).unwrap();
    let refused = store.publish(me(), &temporary, &path("f"), &meta(0o600)).unwrap_err();
    assert_eq!(crate::verdict::errno_of(&refused), Errno::AGAIN, "the drain checks the name again: {refused}");
    assert!(!store.check(me(), &path("f"), &Expect::Absent).unwrap());
    store.publish(me(), &temporary, &path("f.conflict"), &meta(0o600)).unwrap();
    assert_eq!((read(&store, "f"), read(&store, "f.conflict")), (theirs.to_vec(), b"ours".to_vec()));
    // The next version, over an object that another client replaced in the meantime.
    let known = store.stat(me(), &path("f.conflict")).unwrap().identity;
    let (temporary, _) = staged(&store, "f.conflict", &source(b"newer"), &meta(0o600));
    assert!(store.check(me(), &path("f.conflict"), &Expect::Identity(known)).unwrap());
    world
        .server
        .put("f.conflict", &&theirs[..], crate::checksum::of_bytes(theirs), &Words::new(), When::Always)
        .unwrap();
    store.publish(me(), &temporary, &path("f.conflict"), &meta(0o600)).unwrap_err();
    assert!(!store.check(me(), &path("f.conflict"), &Expect::Identity(known)).unwrap());
    assert_eq!(read(&store, "f.conflict"), theirs);
}

#[test]
fn publication_of_new_small_file_needs_one_request() {
    let world = World::new();
    let store = world.store();
    deliver(&store, "first", b"x", &meta(0o600));
    let before = world.server.requests();
    for n in 0..10 {
        let (temporary, _) = staged(&store, &format!("f{n}"), &source(b"small"), &meta(0o600));
        assert!(store.check(me(), &path(&format!("f{n}")), &Expect::Absent).unwrap());
        store.publish(me(), &temporary, &path(&format!("f{n}")), &meta(0o600)).unwrap();
    }
    assert_eq!(world.server.requests() - before, 10);
}

#[test]
fn listing_of_other_clients_objects_needs_no_look() {
    let world = World::new();
    let put = |key: &str| {
        let bytes = b"theirs";
        let sum = crate::checksum::of_bytes(bytes);
        world.server.put(key, &&bytes[..], sum, &Words::new(), When::Always).unwrap();
    };
    for n in 0..50 {
        put(&format!("d/f{n:02}"));
    }
    let store = world.store();
    let before = world.server.requests();
    assert_eq!(names(&store, "d", false).len(), 50);
    assert_eq!(world.server.requests() - before, 50_u64.div_ceil(7) + 1, "the pages, and the query for the mark");
    let before = world.server.requests();
    for n in 0..50 {
        assert_eq!(store.glance(me(), &path(&format!("d/f{n:02}"))).unwrap().attr.size_bytes, 6);
    }
    assert_eq!(errno(store.glance(me(), &path("d/absent"))), libc::ENOENT);
    assert_eq!(names(&store, "d", false).len(), 50);
    assert_eq!(world.server.requests(), before, "a request was sent");
    // The store's own change is visible at once, another client's after a refresh.
    deliver(&store, "d/new", b"ours", &meta(0o751));
    assert_eq!(store.glance(me(), &path("d/new")).unwrap().attr.perm, 0o751);
    assert_eq!(names(&store, "d", false).len(), 51);
    put("d/theirs");
    assert_eq!(names(&store, "d", false).len(), 51);
    store.refresh();
    assert_eq!(names(&store, "d", false).len(), 52);
    assert_eq!(store.glance(me(), &path("d/new")).unwrap().attr.perm, 0o751);
}

#[test]
fn names_that_cannot_be_keys_are_refused() {
    let store = World::new().store();
    assert_eq!(errno(store.may_hold(&StorePath(b"d/\xff".to_vec()))), libc::EILSEQ);
    assert_eq!(errno(store.may_hold(&path(&"x".repeat(256)))), libc::ENAMETOOLONG);
    assert_eq!(errno(store.may_hold(&path(&vec!["x".repeat(200); 6].join("/")))), libc::ENAMETOOLONG);
    assert_eq!(errno(store.may_hold(&path(keys::MARK))), libc::EACCES);
    for wrong in ["a//b", "/a", "a/", "../a", "a/./b"] {
        assert_eq!(errno(store.may_hold(&path(wrong))), libc::EINVAL, "{wrong}");
    }
    for fine in ["", "a", "a b/ü&<>'\"%41+", "new\nline", "-rf", "..."] {
        store.may_hold(&path(fine)).unwrap();
    }
    let mut store = store;
    for (lists_any_key, name, refused) in [
        (true, "d/\x01\u{fffe}", false),
        (false, "d/\x01", true),
        (false, "\u{ffff}/x", true),
        (false, "d/\t\n\r\x7f\u{85}\u{fffd}", false),
    ] {
        store.abilities.lists_any_key = lists_any_key;
        let held = store.may_hold(&path(name));
        assert_eq!(held.map_err(|why| why.raw_os_error()), if refused { Err(Some(libc::EILSEQ)) } else { Ok(()) });
    }
}

#[test]
fn attributes_larger_than_server_limit_are_refused() {
    let store = World::new().store();
    let much = Meta { xattrs: Some([(b"user.much"[..].into(), vec![b'x'; 3000].into())].into()), ..meta(0o600) };
    let refused = store.stage_file(me(), &path(".surgetank-tmp-1"), &path("f"), &source(b"x"), &much, no_gate());
    assert_eq!(errno(refused), libc::E2BIG);
}

fn put_by_another_client(server: &Memory, key: &str, bytes: &[u8]) {
    let words = [("theirs".to_owned(), "word".to_owned())].into();
    server.put(key, &bytes, crate::checksum::of_bytes(bytes), &words, When::Always).unwrap();
}

#[test]
fn object_of_other_client_after_rename_keeps_words() {
    let world = World::new();
    put_by_another_client(&world.server, "d/e/f", b"theirs");
    let store = world.store();
    let before = store.stat(me(), &path("d/e/f")).unwrap().identity;
    store.rename(me(), &path("d"), &path("g")).unwrap();
    let after = store.stat(me(), &path("g/e/f")).unwrap().identity;
    assert_eq!((after.ino, after.mtime_nanos), (before.ino, before.mtime_nanos));
    store.rename(me(), &path("g/e/f"), &path("f")).unwrap();
    store.set_meta(me(), &path("f"), Kind::File, &meta(0o600)).unwrap();
    assert_eq!(store.stat(me(), &path("f")).unwrap().identity.ino, before.ino);
    assert_eq!(world.server.head("f").unwrap().unwrap().words.unwrap()["theirs"], "word");
    // A client that uses the listing gets the same.
    assert_eq!(names(&store, "", false), ["f", "g"]);
    assert_eq!(store.glance(me(), &path("f")).unwrap().identity, store.stat(me(), &path("f")).unwrap().identity);
    assert_eq!(store.glance(me(), &path("f")).unwrap().attr.perm, 0o600);
}

#[test]
fn object_damaged_by_server_is_sent_again() {
    let world = World::new();
    let store = ObjectStore::new(world.server.clone(), world.state.path(), Verify::Reread, Duration::ZERO).unwrap();
    world.server.corrupts.store(2, Ordering::Relaxed);
    deliver(&store, "f", b"what matters", &meta(0o600));
    assert_eq!(read(&store, "f"), b"what matters");
    world.server.corrupts.store(9, Ordering::Relaxed);
    let (temporary, _) = staged(&store, "g", &source(b"what matters"), &meta(0o600));
    let refused = store.publish(me(), &temporary, &path("g"), &meta(0o600)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{refused}");
    assert_eq!(errno(store.stat(me(), &temporary)), libc::ENOENT, "the damaged copy stays");
}

#[test]
fn file_changed_after_staging_is_not_published() {
    use std::os::unix::fs::FileExt;
    let store = World::new().store();
    let file = source(b"as it was");
    let (temporary, _) = staged(&store, "f", &file, &meta(0o600));
    file.write_all_at(b"AS", 0).unwrap();
    let refused = store.publish(me(), &temporary, &path("f"), &meta(0o600)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{refused}");
    assert_eq!(errno(store.stat(me(), &temporary)), libc::ENOENT);
    assert_eq!(errno(store.stat(me(), &path("f"))), libc::ENOENT, "the file is visible");
}

#[test]
fn mark_on_server_without_conditions_is_not_replaced() {
    let mut world = World::new();
    world.server = Arc::new(Memory::unconditional());
    deliver(&world.store(), "f", b"x", &meta(0o600));
    let mark = world.server.head(keys::MARK).unwrap().unwrap();
    deliver(&world.store(), "g", b"x", &meta(0o600));
    assert_eq!(world.server.head(keys::MARK).unwrap().unwrap(), mark);
}

#[test]
fn walk_of_a_tree_gets_directories_by_the_page() {
    let world = World::new();
    let mut expected = std::collections::BTreeMap::<String, Vec<String>>::new();
    let mut put = |dir: &str, name: &str| {
        put_by_another_client(&world.server, &format!("{dir}/{name}"), b"theirs");
        let mut dir = dir.to_owned();
        let mut name = name.to_owned();
        loop {
            let names = expected.entry(dir.clone()).or_default();
            if !names.contains(&name) {
                names.push(name);
                names.sort();
            }
            let Some((above, last)) =
                dir.clone().rsplit_once('/').map(|(above, last)| (above.to_owned(), last.to_owned()))
            else {
                break;
            };
            (dir, name) = (above, last);
        }
    };
    // (The server's pages have 7 keys.) Names that sort around `/`, a directory that fills pages, a directory inside another.
    for n in 0..40 {
        put(&format!("t/d{n:02}"), "a");
        put(&format!("t/d{n:02}"), "b");
    }
    for dir in ["t/d03-x", "t/d03.x", "t/d030", "t/d20/in", "t/d20/in/deep", "t/d20/in.2"] {
        put(dir, "f");
    }
    for n in 0..20 {
        put("t/d30", &format!("c{n}"));
    }
    let walked = |store: &ObjectStore| {
        let before = world.server.requests();
        for (dir, expected) in &expected {
            assert_eq!(names(store, dir, false), *expected, "{dir}");
            for name in expected {
                store.glance(me(), &path(&format!("{dir}/{name}"))).unwrap();
            }
        }
        store.listings.walks.settle();
        world.server.requests() - before
    };
    let (store, alone) = (world.store(), expected.len() as u64);
    let asked = walked(&store);
    // `t` itself needs 7 pages, the large directory 4, and the mark one query. A page has three of the other directories; two
    // predicted requests are useless.
    assert!(asked <= 33 && alone == 47, "{asked} requests for {alone} directories");
    assert_eq!(walked(&store), 0, "requests of the second walk");
    // With caching disabled every directory is requested.
    let never = ObjectStore::new(world.server.clone(), world.state.path(), Verify::Cache, Duration::ZERO).unwrap();
    for dir in expected.keys() {
        assert_eq!(names(&never, dir, false), expected[dir], "{dir}");
    }
    // The store's own change is visible at once, even in a prefetched listing; an absent name is absent.
    let store = world.store();
    for n in 0..5 {
        assert_eq!(names(&store, &format!("t/d{n:02}"), false), ["a", "b"]);
    }
    let next = (5..40).map(|n| format!("t/d{n:02}")).find(|dir| {
        let before = world.server.requests();
        assert!(!names(&store, dir, false).is_empty());
        world.server.requests() > before
    });
    let ahead = format!("t/d{:02}", next.unwrap()[3..].parse::<u32>().unwrap() + 1);
    deliver(&store, &format!("{ahead}/ours"), b"ours", &meta(0o600));
    store.unlink(me(), &path(&format!("{ahead}/a"))).unwrap();
    assert_eq!(names(&store, &ahead, false), ["b", "ours"]);
    for absent in ["t/d31x", "t/d32x", "t/d33x"] {
        assert_eq!(errno(store.list(me(), &path(absent), false)), libc::ENOENT);
    }
}

#[test]
fn walk_in_order_finds_next_answer_requested() {
    let world = World::new();
    let dir = |n: u32| format!("t/d{n:02}");
    for n in 0..40 {
        // More than a page of the server, so that each directory is requested alone.
        for file in 0..9 {
            put_by_another_client(&world.server, &format!("{}/f{file}", dir(n)), b"x");
        }
    }
    let look = |store: &ObjectStore, n: u32| {
        let before = world.server.requests();
        let found = names(store, &dir(n), false);
        store.listings.walks.settle();
        (found.len(), world.server.requests() - before)
    };
    let others = |n: u32| (0..9).filter(|file| *file != n).map(|file| format!("f{file}")).collect::<Vec<_>>();
    let store = world.store();
    assert_eq!(names(&store, "t", false).len(), 40);
    // Two pages each; from the second directory in order on, also the first page of the next directory.
    assert_eq!([look(&store, 0), look(&store, 1)], [(9, 2), (9, 3)]);
    // Now the walk tries a page, which is useless.
    assert_eq!(look(&store, 2).0, 9);
    let begun = (0..4).map(|n| look(&store, 3 + n).1).collect::<Vec<_>>();
    assert_eq!(begun, [2; 4], "a request in progress, one for this directory, and one for the next");
    // A client that does not walk in order causes no prefetch (except for one tried page).
    let counts = [20, 12, 31, 15, 39].map(|n| look(&store, n).1);
    assert_eq!(counts.iter().sum::<u64>(), 2 * 5 + 1, "{counts:?}");
    // The store's own change is visible, whatever was prefetched.
    look(&store, 7);
    look(&store, 8);
    store.unlink(me(), &path("t/d09/f3")).unwrap();
    assert_eq!(names(&store, "t/d09", false), others(3));
}

#[test]
fn walked_directories_keep_modes_and_empty_ones() {
    let world = World::new();
    let store = world.store();
    for n in 0..12_u32 {
        let (temporary, dir) = (path(".surgetank-tmp-9"), path(&format!("d{n:02}")));
        for made in [dir.clone(), dir.join(b"empty")] {
            store.stage_dir(me(), &temporary, &meta(0o700 + n)).unwrap();
            store.publish(me(), &temporary, &made, &meta(0o700 + n)).unwrap();
        }
        deliver(&store, &format!("d{n:02}/f"), b"x", &meta(0o600 + n));
    }
    let other = world.store();
    for n in 0..12_u32 {
        assert_eq!(names(&other, &format!("d{n:02}"), false), ["empty", "f"]);
        assert_eq!(names(&other, &format!("d{n:02}/empty"), false), [""; 0]);
        let perm = |name: &str| other.glance(me(), &path(&format!("d{n:02}/{name}"))).unwrap().attr.perm;
        assert_eq!((perm("empty"), perm("f")), (0o700 + n, 0o600 + n));
    }
}
